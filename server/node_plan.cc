#include "server/node_plan.h"

#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/units.h"
#include "kernels/format_set.h"
#include "proto/attach.h"
#include "proto/errors.h"
#include "server/core.h"
#include "server/membership/node_id.h"
#include "server/pool/resize_policy.h"

namespace needle::server {

namespace {

constexpr int64_t kChunkUnit = 2 * kMiB;  // a huge page
constexpr int64_t kChunksMax = int64_t{1} << 20;

absl::StatusOr<ModelFormats> formats_of(const PoolOptions& pool) {
  if (!pool.format_file.empty()) {
    const absl::StatusOr<std::string> text = read_text_file(pool.format_file);
    if (!text.ok()) {
      return make_error(ErrorCode::kInvalid, absl::StrCat("option pool.", pool.name, ".format_file: '", pool.format_file, "' ",
                                                          absl::StripPrefix(text.status().message(), "INVALID: ")));
    }
    absl::StatusOr<ModelFormats> formats = parse_format_set(*text);
    if (!formats.ok()) {
      return make_error(ErrorCode::kInvalid,
                        absl::StrCat("option pool.", pool.name, ".format_file: ", std::string(formats.status().message())));
    }
    return formats;
  }
  PresetOptions preset;
  if (pool.index_k == "fp8") preset.index_k = ElementFormat::kFp8;
  if (pool.index_k == "fp4") preset.index_k = ElementFormat::kFp4;
  if (pool.index_k_scale == "amax") preset.index_k_scale = ScaleKind::kAmax;
  if (pool.index_k_scale == "amax_reciprocal") preset.index_k_scale = ScaleKind::kAmaxReciprocal;
  if (pool.index_k_scale == "power_of_two") preset.index_k_scale = ScaleKind::kPowerOfTwo;
  const bool v32 = pool.model == "deepseek-v3.2" || pool.model == "glm-5";
  if (v32) preset.main_kv = ElementFormat::kFp8V32;
  if (pool.main_kv == "bf16") preset.main_kv = ElementFormat::kBf16;
  if (pool.main_kv == "fp8_ds_mla") preset.main_kv = ElementFormat::kFp8DsMla;
  if (pool.main_kv == "fp8_v32") preset.main_kv = ElementFormat::kFp8V32;
  preset.window_tokens_per_page = static_cast<int>(pool.window_page_tokens);
  if (pool.ratio128_state == "raw") preset.ratio128_state = StateForm::kRaw;
  preset.speculative_rows = static_cast<int>(pool.speculative_rows);
  absl::StatusOr<ModelFormats> formats = preset_formats(pool.model, preset);
  if (!formats.ok())
    return make_error(ErrorCode::kInvalid, absl::StrCat("pool ", pool.name, ": ", std::string(formats.status().message())));
  return formats;
}

int64_t chunk_bytes_for(int64_t wanted, int64_t budget_bytes, int64_t page_bytes) {
  if (wanted != 0) return wanted;
  int64_t chunk = kChunkUnit;
  while (chunk * 2 <= budget_bytes / 16 && chunk < kGiB) chunk *= 2;
  return std::max(chunk, round_up(4 * page_bytes, kChunkUnit));
}

constexpr int64_t kSocketPathMax = static_cast<int64_t>(sizeof(sockaddr_un::sun_path)) - 1;
constexpr int64_t kOwnFiles = 128;  // 42 were open without chunks or clients; callers of gRPC leave 64 alone (grpc_door.h)
// Libraries, twenty threads' stacks, two heaps: 305 MiB were mapped beside the pools' ranges on a machine of two processors, idle.
// Without the bound on heaps (main.cc) it was 1,200, and a thread that could not be had ended the process in one start of three.
constexpr int64_t kOwnAddressBytes = 512 * kMiB;
constexpr int64_t kAddressBytesAProcessor = 16 * kMiB;  // gRPC keeps threads by processors: stacks of 8 MiB

// Nodes as the kernel lists them: "0-1,4".
std::vector<int> numa_nodes_here() {
  std::ifstream stream("/sys/devices/system/node/online");
  std::string text;
  std::getline(stream, text);
  std::vector<int> nodes;
  for (absl::string_view part : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> ends = absl::StrSplit(part, absl::MaxSplits('-', 1));
    int first = 0;
    int last = 0;
    if (!absl::SimpleAtoi(ends.first, &first)) return {};
    if (ends.second.empty()) last = first;
    if (!ends.second.empty() && !absl::SimpleAtoi(ends.second, &last)) return {};
    for (int node = first; node <= last && node < 1024; ++node) nodes.push_back(node);
  }
  return nodes;
}

absl::Status check_socket_path(const char* option, const std::string& value, const std::string& path) {
  const auto bytes = static_cast<int64_t>(path.size());
  if (bytes <= kSocketPathMax) return absl::OkStatus();
  return make_error(ErrorCode::kInvalid, absl::StrCat("option ", option, ": '", value, "' makes the socket path '", path, "' of ", bytes,
                                                      " bytes, the limit is ", kSocketPathMax, "; choose a shorter one"));
}

std::string plain_name(const std::string& host) {
  std::string name;
  for (char c : host.substr(0, 50)) {
    const char lower = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    name.push_back((lower >= 'a' && lower <= 'z') || (lower >= '0' && lower <= '9') || lower == '-' || lower == '.' ? lower : '-');
  }
  return name.empty() ? "needle" : name;
}

}  // namespace

Surroundings surroundings_here() {
  Surroundings here;
  char host[256] = "";
  ::gethostname(host, sizeof(host) - 1);
  here.host_name = host;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  here.xdg_runtime_dir = runtime == nullptr ? "" : runtime;
  here.numa_nodes = numa_nodes_here();
  return here;
}

// UCX and gRPC abort where a descriptor or an address range that they need at start is refused.
absl::Status check_limits(const NodePlan& plan, const ProcessLimits& limits) {
  int64_t chunks = 0;
  int64_t ranges = 0;
  for (const PoolSetOptions& set : plan.core.sets) {
    const auto targets = chunk_targets(set.budget_bytes, set.ratios, set.shapes);
    if (!targets.ok()) return targets.status();
    chunks = std::accumulate(targets->begin(), targets->end(), chunks);
  }
  for (const PoolShape& shape : plan.shapes) ranges += shape.page_bytes == 0 ? 0 : shape.chunk_bytes * shape.chunks_max;
  const int64_t files = 2 * chunks + kOwnFiles;
  if (limits.open_files < files) {
    return make_error(ErrorCode::kMemory,
                      absl::StrCat("the limit of open files is ", limits.open_files, " and ", files, " are needed: two a chunk for ",
                                   chunks, " chunks, and ", kOwnFiles, "; raise it (ulimit -n, LimitNOFILE) or memory.chunk_bytes"));
  }
  const int64_t metadata = Core::metadata_bytes(plan.core);
  const int64_t own = kOwnAddressBytes + limits.processors * kAddressBytesAProcessor;
  const int64_t addresses = ranges + metadata + plan.scratch_bytes + own;
  if (limits.address_bytes < addresses) {
    return make_error(ErrorCode::kMemory,
                      absl::StrCat("the limit of address space is ", limits.address_bytes / kMiB, " MiB and ", div_ceil(addresses, kMiB),
                                   " MiB are needed: ", ranges / kMiB, " for the pools up to memory.bytes_max, ",
                                   (metadata + plan.scratch_bytes) / kMiB, " for records and scratch, ", own / kMiB,
                                   " for the daemon itself; raise it (ulimit -v, LimitAS) or lower memory.bytes_max"));
  }
  return absl::OkStatus();
}

absl::StatusOr<NodePlan> plan_node(const DaemonOptions& options, const Surroundings& surroundings) {
  NodePlan plan;
  plan.name = !options.node_name.empty() ? options.node_name : absl::StrCat(plain_name(surroundings.host_name), "-", options.node_instance);
  plan.runtime_dir = !options.node_runtime_dir.empty()
                         ? options.node_runtime_dir
                         : attach::runtime_dir(surroundings.xdg_runtime_dir, absl::StrCat(options.node_instance));
  plan.grpc_address = !options.listen_grpc.empty() ? options.listen_grpc : absl::StrCat("127.0.0.1:", 7420 + 2 * options.node_instance);
  plan.metrics_address =
      !options.listen_metrics.empty() ? options.listen_metrics : absl::StrCat("127.0.0.1:", 7421 + 2 * options.node_instance);
  plan.advertise_address = !options.listen_advertise.empty() ? options.listen_advertise : plan.grpc_address;
  if (plan.grpc_address == plan.metrics_address) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("options listen.grpc and listen.metrics are both ", plan.grpc_address));
  }

  const char* const dir_option = options.node_runtime_dir.empty() ? "node.runtime_dir (from XDG_RUNTIME_DIR)" : "node.runtime_dir";
  for (const char* name : {attach::kAttachSocketName, attach::kGrpcSocketName, attach::kKeeperSocketName}) {
    const absl::Status fits = check_socket_path(dir_option, plan.runtime_dir, plan.runtime_dir + "/" + name);
    if (!fits.ok()) return fits;
  }
  const absl::Status keeper_fits = check_socket_path("memory.keeper", options.memory_keeper, options.memory_keeper);
  if (!keeper_fits.ok()) return keeper_fits;
  const std::vector<int>& nodes = surroundings.numa_nodes;
  if (options.memory_numa_node >= 0 && !nodes.empty() && std::count(nodes.begin(), nodes.end(), options.memory_numa_node) == 0) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("option memory.numa_node: this machine has no node ", options.memory_numa_node,
                                                        "; it has ", absl::StrJoin(nodes, ", "), ", and -1 binds to none"));
  }

  const int64_t available = surroundings.available_bytes;
  if (options.memory_bytes != 0) {
    plan.budget_bytes = options.memory_bytes;
    plan.budget_reason = "memory.bytes";
  } else if (options.memory_fraction != 0) {
    plan.budget_bytes = static_cast<int64_t>(options.memory_fraction * static_cast<double>(available));
    plan.budget_reason = absl::StrCat("memory.fraction ", options.memory_fraction, " of ", available / kMiB, " MiB available at start");
  } else {
    plan.budget_bytes = std::min(kGiB, available / 2);
    plan.budget_reason = absl::StrCat("the lesser of 1 GiB and half of ", available / kMiB, " MiB available at start");
  }
  plan.budget_bytes = plan.budget_bytes / kChunkUnit * kChunkUnit;
  if (plan.budget_bytes > available) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("the budget of ", plan.budget_bytes / kMiB, " MiB (", plan.budget_reason,
                                                        ") exceeds the ", available / kMiB, " MiB available; lower memory.bytes"));
  }
  plan.scratch_bytes = options.memory_scratch_bytes;
  const int64_t for_pools = plan.budget_bytes - plan.scratch_bytes;
  if (for_pools <= 0) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("memory.scratch_bytes of ", plan.scratch_bytes / kMiB,
                                                        " MiB leaves nothing of the budget of ", plan.budget_bytes / kMiB, " MiB (",
                                                        plan.budget_reason, "); raise the budget or lower memory.scratch_bytes"));
  }
  const int64_t bytes_max = options.memory_bytes_max != 0 ? options.memory_bytes_max : 2 * plan.budget_bytes;
  if (bytes_max < plan.budget_bytes) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("memory.bytes_max of ", bytes_max / kMiB, " MiB is below the budget of ",
                                                        plan.budget_bytes / kMiB, " MiB"));
  }

  CoreOptions& core = plan.core;
  core.node = node_id_of(plan.name);
  core.heartbeat_ms = options.session_heartbeat_ms;
  core.silence_ms = options.session_silence_ms;
  core.lease_ms = options.lease_duration_ms;
  core.outcome_remembered_ms = options.ticket_outcome_remembered_ms;
  core.ship_deadline_ms_max = options.ship_deadline_ms_max;
  core.ship_deadline_ms = options.ship_deadline_ms;
  core.ship_retry_ms = options.ship_retry_ms;
  core.ship_silence_ms = options.ship_silence_ms;
  core.ship_poll_ms = options.ship_poll_ms;
  core.fetch_ms = options.ship_fetch_ms;
  core.ship_attempts_max = options.ship_attempts_max;
  core.bytes_in_flight_max = options.ship_bytes_in_flight_max;
  core.retry_after_ms = options.request_retry_after_ms;
  core.sessions_max = options.session_count_max;
  core.tickets_max = options.ticket_count_max;
  core.leases_max = options.lease_count_max;
  core.ships_max = options.ship_count_max;
  core.outcomes_max = options.ticket_outcome_count_max;
  core.pages_per_request_max = options.request_pages_max;
  core.offer_pages_max = options.ship_offer_pages_max;

  const int64_t shares = std::accumulate(options.pools.begin(), options.pools.end(), int64_t{0},
                                         [](int64_t sum, const PoolOptions& pool) { return sum + pool.share; });
  for (const PoolOptions& pool : options.pools) {
    absl::StatusOr<ModelFormats> formats = formats_of(pool);
    if (!formats.ok()) return formats.status();
    PlannedSet planned;
    planned.formats = *std::move(formats);
    planned.text = format_set_text(planned.formats);
    planned.fingerprint = format_set_fingerprint(planned.text);
    PoolSetOptions set;
    set.name = pool.name;
    set.format = planned.text;
    set.budget_bytes = static_cast<int64_t>(static_cast<double>(for_pools) * static_cast<double>(pool.share) / static_cast<double>(shares));
    set.ratios = {pool.ratio_paged, pool.ratio_window, pool.ratio_state};
    set.eviction = pool.eviction == "lru" ? EvictionPolicy::kLruReference : EvictionPolicy::kLeavesFirst;
    set.resume_points_max = pool.resume_points_max;
    const bool has_window = !planned.formats.window.components.empty();
    set.window_tokens = has_window ? kWindowTokens : 0;
    if (!has_window) set.ratios[static_cast<size_t>(PoolKind::kWindow)] = 0;
    const int64_t set_bytes_max = static_cast<int64_t>(static_cast<double>(bytes_max - plan.scratch_bytes) *
                                                       static_cast<double>(pool.share) / static_cast<double>(shares));
    const int64_t ratio_sum = set.ratios[0] + set.ratios[1] + set.ratios[2];
    int64_t least_bytes = 0;
    const PageFormat* const by_kind[kPoolKinds] = {&planned.formats.paged, &planned.formats.window, &planned.formats.state};
    for (size_t kind = 0; kind < kPoolKinds; ++kind) {
      PoolShape& shape = set.shapes[kind];
      if (kind == static_cast<size_t>(PoolKind::kWindow) && !has_window) continue;
      if (by_kind[kind]->components.empty()) {
        shape.page_bytes = kCommitRecordBytes;
      } else {
        absl::StatusOr<PageLayout> layout = PageLayout::of(*by_kind[kind]);
        if (!layout.ok())
          return make_error(ErrorCode::kInvalid, absl::StrCat("pool ", pool.name, ": ", std::string(layout.status().message())));
        shape.page_bytes = layout->stride_bytes();
        shape.page_tokens = kind == static_cast<size_t>(PoolKind::kState) ? 0 : by_kind[kind]->tokens_per_page;
      }
      const int64_t part = static_cast<int64_t>(static_cast<double>(set.budget_bytes) * static_cast<double>(set.ratios[kind]) /
                                                static_cast<double>(ratio_sum));
      shape.chunk_bytes = chunk_bytes_for(options.memory_chunk_bytes, part, shape.page_bytes);
      if (shape.chunk_bytes < shape.page_bytes) {
        return make_error(ErrorCode::kInvalid,
                          absl::StrCat("option memory.chunk_bytes: ", shape.chunk_bytes / kKiB, " KiB do not hold one ",
                                       kPoolKindNames[kind], " page of pool ", pool.name, " (", shape.page_bytes, " bytes)"));
      }
      shape.chunks_max = std::max<int64_t>(1, div_ceil(set_bytes_max, shape.chunk_bytes));
      if (shape.chunks_max > kChunksMax) {
        return make_error(ErrorCode::kInvalid,
                          absl::StrCat("memory.bytes_max of ", bytes_max / kMiB, " MiB takes ", shape.chunks_max, " chunks of ",
                                       shape.chunk_bytes / kMiB, " MiB in the ", kPoolKindNames[kind], " pool of ", pool.name,
                                       ", the limit is ", kChunksMax, "; lower memory.bytes_max or raise memory.chunk_bytes"));
      }
      least_bytes += shape.chunk_bytes;
    }
    if (set.budget_bytes < least_bytes) {
      return make_error(
          ErrorCode::kInvalid,
          absl::StrCat("pool ", pool.name, " gets ", set.budget_bytes / kMiB, " MiB of the budget and needs ", div_ceil(least_bytes, kMiB),
                       " MiB for one chunk of each kind; raise memory.bytes or its share, or lower memory.chunk_bytes"));
    }
    for (const PoolShape& shape : set.shapes) plan.shapes.push_back(shape);
    core.sets.push_back(std::move(set));
    plan.sets.push_back(std::move(planned));
  }
  if (absl::Status status = validate(core); !status.ok()) return status;
  return plan;
}

std::string describe(const NodePlan& plan) {
  std::string text =
      absl::StrCat("node ", plan.name, ", gRPC ", plan.grpc_address, " and ", plan.runtime_dir, "/grpc.sock, metrics http://",
                   plan.metrics_address, "/metrics, attach ", plan.runtime_dir, "/attach.sock\n", "budget ", plan.budget_bytes / kMiB,
                   " MiB (", plan.budget_reason, "), ", plan.scratch_bytes / kMiB, " MiB of it scratch\n");
  for (size_t i = 0; i < plan.core.sets.size(); ++i) {
    const PoolSetOptions& set = plan.core.sets[i];
    absl::StrAppend(&text, "pool ", set.name, ": ", plan.sets[i].formats.paged.name, ", ", set.budget_bytes / kMiB, " MiB, ratios ",
                    set.ratios[0], ":", set.ratios[1], ":", set.ratios[2], ", fingerprint ",
                    absl::Hex(plan.sets[i].fingerprint, absl::kZeroPad16), "\n");
    for (size_t kind = 0; kind < kPoolKinds; ++kind) {
      const PoolShape& shape = set.shapes[kind];
      if (shape.page_bytes == 0) continue;
      absl::StrAppend(&text, "  ", kPoolKindNames[kind], ": pages of ", shape.page_bytes, " B",
                      shape.page_tokens > 0 ? absl::StrCat(" (", shape.page_tokens, " tokens)") : "", ", chunks of ",
                      size_text(shape.chunk_bytes), ", at most ", shape.chunks_max, "\n");
    }
  }
  return text;
}

}  // namespace needle::server
