// From options to numbers: which pools, which formats, which chunks, how many bytes of each. A pure function, so that
// --check-config shows exactly what a start would do.
//
// The budget, defined once: memory.bytes; else memory.fraction x (memory available at start); else the lesser of 1 GiB and
// half of it. "Available at start" is read once, before the first chunk: the lesser of MemAvailable and the cgroup's
// headroom, plus what chunks kept from an earlier run already take. Scratch is taken off, the rest is shared out by
// `share`, and within a pool by its three ratios.
//
// What must stay true:
//  1. Every chunk holds at least one page of its kind; every kind gets at least one chunk, or the plan is refused with the
//     numbers that would do.
//  2. The sum of all budgets and scratch never exceeds the budget.
//  3. What a start could only fail at later (a NUMA node that isn't there, a socket path that is too long, a limit of the process)
//     is refused here, with option, value and limit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/page_format.h"
#include "server/daemon_options.h"
#include "server/options.h"

namespace needle::server {

// A model without compressor state has no state pool, but the core commits every sequence by its state page: a record of
// this size stands in.
inline constexpr int64_t kCommitRecordBytes = 256;

struct PlannedSet {
  ModelFormats formats;
  std::string text;  // canonical, of the set
  uint64_t fingerprint = 0;
};

struct NodePlan {
  CoreOptions core;
  std::vector<PlannedSet> sets;  // as core.sets
  int64_t budget_bytes = 0;
  std::string budget_reason;
  int64_t scratch_bytes = 0;
  std::vector<PoolShape> shapes;  // by PoolId
  std::string name;
  std::string runtime_dir;
  std::string grpc_address;
  std::string metrics_address;
  std::string advertise_address;
};

struct Surroundings {
  int64_t available_bytes = 0;
  std::string host_name;
  std::string xdg_runtime_dir;    // empty when unset
  std::vector<int> numa_nodes{};  // empty where the kernel doesn't say
};

// What this machine is, as its kernel says.
Surroundings surroundings_here();

absl::StatusOr<NodePlan> plan_node(const DaemonOptions& options, const Surroundings& surroundings);
// Limits of the process, before a library that needs more ends without a word. Bytes and counts; INT64_MAX: none.
struct ProcessLimits {
  int64_t open_files = INT64_MAX;
  int64_t address_bytes = INT64_MAX;
  int64_t processors = 1;
};
absl::Status check_limits(const NodePlan& plan, const ProcessLimits& limits);

std::string describe(const NodePlan& plan);  // for --check-config and the log's first lines

}  // namespace needle::server
