// What Prometheus reads. One table says every family: name, type, unit, labels, and the question that it answers;
// monitoring/METRICS.md is made from it, and a test holds the two together.
//
// What must stay true:
//  1. A scrape takes one snapshot on the loop: the states of each pool's pages sum to its capacity, in every scrape.
//  2. Names follow Prometheus: base units, `_total` for counters, ratios 0..1. Labels come from this process's own words
//     (pools, kinds, verbs, error names, peers that an operator named), never from a request.
//  3. A loop that doesn't answer within scrape_wait_ms leaves `needle_up` 0 and only what needs no loop; the scrape itself succeeds.
//
// prometheus-cpp stays in the .cc.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/attach/session_registry.h"
#include "server/edge_metrics.h"
#include "server/membership/peer_directory.h"
#include "server/messages.h"
#include "server/metrics_http.h"

namespace needle::server {

enum class MetricType : uint8_t { kCounter, kGauge, kHistogram, kInfo };

struct MetricRow {
  const char* name;
  MetricType type;
  const char* labels;    // "pool,kind", "" for none
  const char* meaning;   // the help line
  const char* question;  // what someone asks at night
};

const std::vector<MetricRow>& metric_table();
std::string metrics_reference();  // monitoring/METRICS.md

struct NamedValue {
  std::string name;
  double value = 0;
};

// What the node knows and the core does not.
struct NodeGauges {
  std::string build;
  std::string node;
  std::string transport;
  double uptime_seconds = 0;
  int64_t chunks_by_backing[3] = {};  // PageBacking's order
  int64_t scratch_bytes = 0;
  bool keeper_healthy = true;
  int64_t attach_connections = 0;
  int64_t attach_without_session = 0;
  uint64_t attach_refused = 0;
  uint64_t attach_hellos_overdue = 0;
  std::vector<NamedValue> transport_counters;
  std::vector<std::pair<std::string, bool>> facets;
};

struct MetricSources {
  std::function<absl::StatusOr<Snapshot>()> snapshot;  // asks the loop and waits, bounded
  std::function<NodeGauges()> node;
  std::function<int64_t(const Snapshot::Set&, int kind)> page_bytes;
  const EdgeMetrics& edge;
  const SessionRegistry& registry;
  const PeerDirectory& peers;
};

// Every family that a scrape gives, as text: for tests and for readers without HTTP.
std::string scrape_text(const MetricSources& sources);

absl::StatusOr<std::unique_ptr<MetricsHttp>> serve_metrics(const std::string& address, MetricSources sources);

}  // namespace needle::server
