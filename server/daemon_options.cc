#include "server/daemon_options.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <sstream>

#define TOML_EXCEPTIONS 0
// toml++ 3.3 asserts on some malformed keys that it would report as errors right after: a file never aborts the daemon.
#define TOML_ASSERT(expression) static_cast<void>(0)
#include <toml++/toml.h>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/units.h"
#include "proto/errors.h"

namespace needle::server {

namespace {

using D = DaemonOptions;
using P = PoolOptions;
using K = OptionKind;

constexpr size_t kLineBytesMax = 8 * kKiB;
constexpr int64_t kFileBytesMax = kMiB;  // a configuration is pages, not megabytes; a wrong path should not eat memory
constexpr size_t kPoolsMax = 16;
constexpr size_t kListMax = 256;

}  // namespace

const std::vector<OptionRow<DaemonOptions>>& option_table() {
  static const auto* const table = new std::vector<OptionRow<DaemonOptions>>{
      // --- node
      {"node.name", K::kText, &D::node_name, "", "1..63 of a-z 0-9 . _ -", false, "Name of this daemon: what its peers call it.",
       "Empty: the host's name and the instance, so that two daemons on a host differ."},
      {"node.instance", K::kCount, &D::node_instance, "0", "0..63", false,
       "Which daemon of this host it is. Default ports are 7420 and 7421 plus twice this number; default sockets lie in a folder of this "
       "name.",
       "One daemon a host is the usual case."},
      {"node.runtime_dir", K::kText, &D::node_runtime_dir, "", "path", false,
       "Folder of the Unix sockets (attach.sock, grpc.sock, keeper.sock); made with mode 0700, or 0711 where attach.uids names anybody.",
       "Empty: $XDG_RUNTIME_DIR/needle/INSTANCE, or /run/needle/INSTANCE where that variable is not set."},
      {"node.log_level", K::kChoice, &D::log_level, "info", "debug|info|warning|error", false,
       "The least severe line that is written to standard error.", "What an operator wants to read; debug is a line a message."},
      {"node.stop_deadline", K::kDuration, &D::stop_deadline_ms, "30s", "0s..1h", false,
       "After SIGTERM: how long open tickets, leases and ships may go on before they are cut off.",
       "Kubernetes' default grace period, so that a drain ends before the kill."},
      // --- listen
      {"listen.grpc", K::kAddress, &D::listen_grpc, "", "HOST:PORT", false,
       "Address of the gRPC port: peers, remote clients, health. The Unix socket is always served too.",
       "Empty: 127.0.0.1:(7420 + 2 x instance). Nothing is reachable from outside unless asked for."},
      {"listen.metrics", K::kAddress, &D::listen_metrics, "", "HOST:PORT", false, "Address of /metrics for Prometheus.",
       "Empty: 127.0.0.1:(7421 + 2 x instance)."},
      {"listen.advertise", K::kAddress, &D::listen_advertise, "", "HOST:PORT", false,
       "The gRPC address that peers are told to dial; the transport listens on its host, an address of this machine.",
       "Empty: listen.grpc. Needed when that is 0.0.0.0 or [::], which no peer can dial: without it such a daemon has no transport."},
      {"listen.remote_operators", K::kSwitch, &D::listen_remote_operators, "false", "true|false", false,
       "Whether operator calls (resize, evict, drain, ...) are taken over TCP too.",
       "The Unix socket is guarded by the file system; the TCP port is guarded by nothing but the network."},
      // --- peers
      {"peers.static", K::kList, &D::peers, "", "NAME=HOST:PORT, up to 256", true,
       "Daemons to exchange with. The flag may also be spelled --peer, and is repeated for more.",
       "None: a single daemon serves its own clients. A peer that says hello is answered even when it isn't listed."},
      {"peers.hello", K::kDuration, &D::peer_hello_ms, "500ms", "50ms..60s", false,
       "How often peers exchange incarnation, formats and transport address; four silent periods mean that a peer is silent.",
       "A peer's death is known after two seconds, within the five in which all that it held must be free."},
      // --- memory
      {"memory.bytes", K::kSize, &D::memory_bytes, "0", "0 or 16M..16T", true, "Budget of all pools together, scratch included.",
       "0: memory.fraction when that is set, else the lesser of 1 GiB and half of the memory available at start."},
      {"memory.fraction", K::kFraction, &D::memory_fraction, "0", "0..0.95", false,
       "The budget as a share of the memory available at start: the lesser of MemAvailable and the cgroup's headroom, read once, before "
       "the first chunk.",
       "0: not used. Only one of memory.bytes and memory.fraction may be set."},
      {"memory.bytes_max", K::kSize, &D::memory_bytes_max, "0", "0 or 16M..16T", false,
       "How far a live resize may grow the budget: fixes address ranges and the metadata region.",
       "0: twice the budget. Costs 100 bytes a page that could exist, touched only when it does."},
      {"memory.chunk_bytes", K::kSize, &D::memory_chunk_bytes, "0", "0 or 2M..64G, a multiple of 2M", false,
       "Unit in which pools grow and shrink: one memfd each.",
       "0: for each kind a sixteenth of its part of the budget, as a power of two between 2 MiB and 1 GiB, and at least four pages."},
      {"memory.scratch_bytes", K::kSize, &D::memory_scratch_bytes, "32M", "1M..16G", false,
       "Score buffers of the daemon's own kernels (remote reads, tools). Counted in the budget.",
       "Scores of 64 queries over 128 Ki entries in fp32."},
      {"memory.huge_pages", K::kChoice, &D::memory_huge_pages, "try", "off|try|require", false,
       "2 MiB pages for pool memory: reserved huge pages first, then transparent ones. What was had is logged and shown.",
       "Fewer TLB misses where they exist; a machine without them should still start."},
      {"memory.numa_node", K::kCount, &D::memory_numa_node, "-1", "-1..1023", false, "NUMA node that chunks are bound to.",
       "-1: not bound, the kernel's policy decides."},
      {"memory.keeper", K::kText, &D::memory_keeper, "auto", "auto|none|systemd|PATH of a keeper's socket", false,
       "Who holds the memory's descriptors over a daemon's death. Set memory.bytes too: another budget at the restart would not fit what "
       "was kept.",
       "auto: systemd's descriptor store when $NOTIFY_SOCKET is there, else keeper.sock in the runtime folder when one listens, else "
       "nobody."},
      // --- attach
      {"attach.uids", K::kList, &D::attach_uids, "", "numeric user ids, up to 256", false,
       "Users besides the daemon's own (and root) whose processes may attach. They call at listen.advertise, and are no operators.",
       "None: memory is shared within one user."},
      // --- transport
      {"transport.kind", K::kChoice, &D::transport_kind, "auto", "auto|ucx|none", false,
       "How pages move between daemons. `none` ships nothing.", "auto: UCX where it starts, else none, and health says so."},
      {"transport.devices", K::kText, &D::transport_devices, "", "UCX device names, such as lo or mlx5_0:1", false,
       "Network devices that UCX may use.",
       "Empty: lo when listen.grpc is on loopback, else all. What is reachable for control is reachable for pages."},
      {"transport.lanes", K::kText, &D::transport_lanes, "", "UCX transports, such as tcp,posix,sysv", false,
       "UCX transports that may be used.", "Empty: all that UCX has; the start-up probe chooses among them by measurement."},
      // --- sessions, tickets, leases
      {"session.heartbeat", K::kDuration, &D::session_heartbeat_ms, "500ms", "50ms..60s", false, "How often a client says that it lives.",
       "Four may be missed before its silence counts."},
      {"session.silence", K::kDuration, &D::session_silence_ms, "2s", "200ms..10m", false,
       "Silence after which a client's rights end. At least twice session.heartbeat.", "All rights back within five seconds of a death."},
      {"session.count_max", K::kCount, &D::session_count_max, "1024", "1..65534", false, "Attached clients at once.",
       "Many times the processes of a node."},
      {"ticket.count_max", K::kCount, &D::ticket_count_max, "65536", "1..16777216", false, "Open tickets at once.",
       "One a running sequence."},
      {"ticket.outcome_remembered", K::kDuration, &D::ticket_outcome_remembered_ms, "60s", "1s..1h", false,
       "How long a repeated ticket id gets its first outcome.", "Longer than any client retries."},
      {"ticket.outcome_count_max", K::kCount, &D::ticket_outcome_count_max, "262144", "1..67108864", false,
       "Outcomes remembered at once; the oldest is forgotten early, and counted.", "4,000 ends a second for a minute."},
      {"lease.duration", K::kDuration, &D::lease_duration_ms, "4s", "500ms..10m", false,
       "Leases of remote readers, which only time can end. Attached clients' leases last as long as they do.",
       "Eight heartbeats; pages of a lost reader come back within five seconds."},
      {"lease.count_max", K::kCount, &D::lease_count_max, "65536", "1..16777216", false, "Open leases at once.", "One a running sequence."},
      {"request.pages_max", K::kCount, &D::request_pages_max, "65536", "64..1048576", false, "Pages one request may name.",
       "16 million tokens of V4; a message stays below 2 MB."},
      {"request.retry_after", K::kDuration, &D::request_retry_after_ms, "20ms", "1ms..60s", false,
       "The hint that goes with OUT_OF_PAGES and BUSY.", "About a decode step: pages come free at that pace."},
      {"request.queue_max", K::kCount, &D::request_queue_max, "16384", "64..1048576", false,
       "Requests waiting for the loop; more are answered BUSY.", "Tens of milliseconds of work."},
      // --- ship
      {"ship.deadline", K::kDuration, &D::ship_deadline_ms, "2m", "1s..1h", false, "Of a ship whose caller names none.",
       "A 512 Ki-token prefill takes less."},
      {"ship.deadline_max", K::kDuration, &D::ship_deadline_ms_max, "10m", "1s..24h", false, "The longest a caller may ask for.",
       "A forgotten ship must end some day."},
      {"ship.retry", K::kDuration, &D::ship_retry_ms, "50ms", "1ms..10s", false, "When an unanswered question to the source is repeated.",
       "Well above a round trip, well below a heartbeat."},
      {"ship.silence", K::kDuration, &D::ship_silence_ms, "2s", "100ms..10m", false,
       "A ship whose source leaves a question unanswered for so long ends with PEER_LOST. Above ship.retry.",
       "Forty questions; what a lost source's reader had reserved comes back within five seconds."},
      {"ship.poll", K::kDuration, &D::ship_poll_ms, "2ms", "1ms..10s", false, "How often the source is asked while it is still storing.",
       "A page of V4 is stored in more."},
      {"ship.fetch", K::kDuration, &D::ship_fetch_ms, "5s", "100ms..10m", false,
       "A posted part without completion: the peer's endpoint is closed by force and the ship goes on under a new attempt.",
       "A 64-page part takes 70 ms at 1 GB/s."},
      {"ship.attempts_max", K::kCount, &D::ship_attempts_max, "8", "1..1000", false, "Attempts before a ship fails.",
       "A source that restarts eight times is not coming back."},
      {"ship.count_max", K::kCount, &D::ship_count_max, "256", "1..65536", false, "Ships at once.", "Running hand-overs of a node."},
      {"ship.bytes_in_flight", K::kSize, &D::ship_bytes_in_flight_max, "256M", "4M..64G", false,
       "Bytes posted and not completed, over all ships.", "Ten milliseconds of a 200 Gb/s link."},
      {"ship.offer_pages_max", K::kCount, &D::ship_offer_pages_max, "512", "1..4096", false, "Pages an offer lists.",
       "A control message stays below 64 KiB."},
      // --- top-k
      {"topk.threads", K::kCount, &D::topk_threads, "1", "1..256", false, "Threads of the daemon's own read_topk.",
       "Engines read in their own process; this serves tools and remote readers."},
  };
  return *table;
}

const std::vector<OptionRow<PoolOptions>>& pool_option_table() {
  static const auto* const table = new std::vector<OptionRow<PoolOptions>>{
      {"model", K::kChoice, &P::model, "deepseek-v4-flash", "deepseek-v4-flash|deepseek-v4-pro|deepseek-v3.2|glm-5|raw", false,
       "Layers and layouts of the pages. `raw` takes finished keys.", "The model that needle was made for."},
      {"index_k", K::kChoice, &P::index_k, "bf16", "bf16|fp8|fp4", false, "Element format of index-K.",
       "The exact keys: what recall is about. fp8 and fp4 hold more tokens; `needlectl topk` shows what they cost."},
      {"index_k_scale", K::kChoice, &P::index_k_scale, "usual", "usual|amax|amax_reciprocal|power_of_two", false,
       "How an fp8 or fp4 scale is made.", "amax for fp8, power_of_two for fp4."},
      {"main_kv", K::kChoice, &P::main_kv, "usual", "usual|bf16|fp8_ds_mla|fp8_v32", false, "Element format of the main KV.",
       "fp8_ds_mla for V4, fp8_v32 for V3.2 and GLM-5: what their kernels read."},
      {"window_page_tokens", K::kCount, &P::window_page_tokens, "64", "64..256", false,
       "Tokens a window page: 64, or 256 as SGLang has it.", "A hand-over moves a quarter of the bytes."},
      {"ratio128_state", K::kChoice, &P::ratio128_state, "running", "running|raw", false, "How ratio-128 compressor state is carried.",
       "0.12 MB a sequence where raw rows take 10.5."},
      {"speculative_rows", K::kCount, &P::speculative_rows, "0", "0..8", false, "Unaccepted tokens that state records can hold.",
       "No speculation."},
      {"order", K::kChoice, &P::order, "page_major", "page_major", false, "Order of a page's parts.",
       "Shipping a page is one message, growing extends one range."},
      {"format_file", K::kText, &P::format_file, "", "path", false,
       "A file with the canonical texts of the paged, window and state formats: takes the place of model and all format keys.",
       "Empty: the model's own. For formats that no preset has, and small ones in tests."},
      {"share", K::kCount, &P::share, "1", "1..1000000", false, "This pool's part of the budget, relative to the other pools' shares.",
       "Equal parts."},
      {"ratio_paged", K::kCount, &P::ratio_paged, "80", "1..1000000", true, "Weight of the paged pool within this pool's budget.",
       "4,000-token sequences fill all three about alike."},
      {"ratio_window", K::kCount, &P::ratio_window, "16", "0..1000000", true, "Weight of the window pool.", "See ratio_paged."},
      {"ratio_state", K::kCount, &P::ratio_state, "4", "0..1000000", true, "Weight of the state pool.", "See ratio_paged."},
      {"resume_points_max", K::kCount, &P::resume_points_max, "4096", "0..16777216", false,
       "Resume points kept; the least valuable goes first.", "Bounded by the window pool long before."},
      {"eviction", K::kChoice, &P::eviction, "leaves_first", "leaves_first|lru", false, "Which idle pages go first.",
       "A prefix is lost from its end inwards; lru is the textbook rule that public traces were measured with."},
  };
  return *table;
}

namespace {

absl::Status invalid(const std::string& message) { return make_error(ErrorCode::kInvalid, message); }

// Shown values are cut so that a hostile one cannot fill the log; control characters are made visible.
std::string shown(absl::string_view text) {
  std::string out = "'";
  for (char c : text.substr(0, 80)) {
    if (std::isprint(static_cast<unsigned char>(c)) != 0) {
      out.push_back(c);
    } else {
      char code[8];
      std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
      out += code;
    }
  }
  return out + (text.size() > 80 ? "...'" : "'");
}

bool is_name(absl::string_view text) {
  if (text.empty() || text.size() > 63) return false;
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-'; });
}

std::string flag_of(const char* name) {
  std::string flag = absl::StrCat("--", name);
  std::replace(flag.begin() + 2, flag.end(), '.', '-');
  std::replace(flag.begin() + 2, flag.end(), '_', '-');
  return flag;
}

std::string variable_of(const char* name) {
  std::string variable = absl::StrCat("NEEDLE_", absl::AsciiStrToUpper(name));
  std::replace(variable.begin(), variable.end(), '.', '_');
  return variable;
}

// Splits "1M..16T" and "0 or 2M..64G, a multiple of 2M" into parts; the texts are ours, a test reads them all.
struct Range {
  bool zero_too = false;
  std::string low;
  std::string high;
  std::string multiple;
};
absl::optional<Range> range_of(absl::string_view bounds) {
  Range range;
  if (absl::StartsWith(bounds, "0 or ")) {
    range.zero_too = true;
    bounds.remove_prefix(5);
  }
  const std::vector<absl::string_view> parts = absl::StrSplit(bounds, ", a multiple of ");
  if (parts.size() == 2) range.multiple = std::string(parts[1]);
  const size_t dots = parts[0].find("..");
  if (dots == absl::string_view::npos) return absl::nullopt;
  range.low = std::string(parts[0].substr(0, dots));
  range.high = std::string(parts[0].substr(dots + 2));
  return range;
}

absl::StatusOr<int64_t> parse_count(absl::string_view text) {
  int64_t value = 0;
  const bool digits = !text.empty() && text.find_first_not_of("0123456789", text[0] == '-' ? 1 : 0) == absl::string_view::npos;
  if (!digits || text.size() > 20 || !absl::SimpleAtoi(text, &value)) return invalid("not a whole number");
  return value;
}

absl::StatusOr<int64_t> parse_by_kind(OptionKind kind, absl::string_view text) {
  switch (kind) {
    case OptionKind::kSize: return parse_size(text);
    case OptionKind::kDuration: return parse_duration_ms(text);
    default: return parse_count(text);
  }
}

absl::Status check_range(OptionKind kind, int64_t value, const char* bounds) {
  const absl::optional<Range> range = range_of(bounds);
  NEEDLE_CHECK(range.has_value(), "a numeric option's bounds are LOW..HIGH");
  const absl::StatusOr<int64_t> low = parse_by_kind(kind, range->low);
  const absl::StatusOr<int64_t> high = parse_by_kind(kind, range->high);
  NEEDLE_CHECK(low.ok() && high.ok(), "bounds are spelled like values");
  if (range->zero_too && value == 0) return absl::OkStatus();
  if (value < *low || value > *high) return invalid(absl::StrCat("out of bounds ", bounds));
  if (!range->multiple.empty() && value % *parse_by_kind(kind, range->multiple) != 0) {
    return invalid(absl::StrCat("not ", bounds));
  }
  return absl::OkStatus();
}

template <class Owner>
absl::Status set_value(Owner& owner, const OptionRow<Owner>& row, absl::string_view text) {
  switch (row.kind) {
    case OptionKind::kSize:
    case OptionKind::kDuration:
    case OptionKind::kCount: {
      absl::StatusOr<int64_t> value = parse_by_kind(row.kind, text);
      if (!value.ok()) return value.status();
      if (absl::Status status = check_range(row.kind, *value, row.bounds); !status.ok()) return status;
      owner.*std::get<int64_t Owner::*>(row.place) = *value;
      return absl::OkStatus();
    }
    case OptionKind::kFraction: {
      double value = 0;
      if (text.size() > 32 || !absl::SimpleAtod(text, &value) || !std::isfinite(value)) return invalid("not a number");
      const absl::optional<Range> range = range_of(row.bounds);
      double low = 0;
      double high = 0;
      NEEDLE_CHECK(range.has_value() && absl::SimpleAtod(range->low, &low) && absl::SimpleAtod(range->high, &high),
                   "a fraction's bounds are LOW..HIGH");
      if (value < low || value > high) return invalid(absl::StrCat("out of bounds ", row.bounds));
      owner.*std::get<double Owner::*>(row.place) = value;
      return absl::OkStatus();
    }
    case OptionKind::kSwitch:
      if (text != "true" && text != "false") return invalid("neither true nor false");
      owner.*std::get<bool Owner::*>(row.place) = text == "true";
      return absl::OkStatus();
    case OptionKind::kChoice: {
      const std::vector<absl::string_view> choices = absl::StrSplit(row.bounds, '|');
      if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
        return invalid(absl::StrCat("not one of ", row.bounds));
      }
      owner.*std::get<std::string Owner::*>(row.place) = std::string(text);
      return absl::OkStatus();
    }
    case OptionKind::kAddress:
      if (!text.empty()) {
        if (absl::StatusOr<HostPort> address = parse_host_port(text); !address.ok()) return address.status();
      }
      owner.*std::get<std::string Owner::*>(row.place) = std::string(text);
      return absl::OkStatus();
    case OptionKind::kText:
      if (text.size() > 4096 || text.find('\0') != absl::string_view::npos) return invalid("longer than 4096 bytes, or with a zero byte");
      owner.*std::get<std::string Owner::*>(row.place) = std::string(text);
      return absl::OkStatus();
    case OptionKind::kList: {
      std::vector<std::string> items;
      for (absl::string_view item : absl::StrSplit(text, ',', absl::SkipWhitespace())) items.emplace_back(absl::StripAsciiWhitespace(item));
      if (items.size() > kListMax) return invalid(absl::StrCat("more than ", kListMax, " items"));
      owner.*std::get<std::vector<std::string> Owner::*>(row.place) = std::move(items);
      return absl::OkStatus();
    }
  }
  return absl::OkStatus();
}

template <class Owner>
const OptionRow<Owner>* find_row(const std::vector<OptionRow<Owner>>& table, absl::string_view name) {
  for (const OptionRow<Owner>& row : table) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

// The closest known name, for the message about an unknown one.
template <class Owner>
std::string nearest(const std::vector<OptionRow<Owner>>& table, absl::string_view name) {
  std::string best;
  size_t best_distance = std::max<size_t>(3, name.size() / 3) + 1;
  if (name.size() > 64) return best;
  for (const OptionRow<Owner>& row : table) {
    const absl::string_view other = row.name;
    std::vector<size_t> line(other.size() + 1);
    for (size_t j = 0; j < line.size(); ++j) line[j] = j;
    for (size_t i = 1; i <= name.size(); ++i) {
      size_t diagonal = line[0];
      line[0] = i;
      for (size_t j = 1; j <= other.size(); ++j) {
        const size_t keep = line[j];
        line[j] = std::min({line[j] + 1, line[j - 1] + 1, diagonal + (name[i - 1] == other[j - 1] ? 0u : 1u)});
        diagonal = keep;
      }
    }
    if (line[other.size()] < best_distance) {
      best_distance = line[other.size()];
      best = row.name;
    }
  }
  return best;
}

// One pass over the sources, weakest first.
class Parser {
 public:
  absl::StatusOr<ParsedOptions> run(const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
                                    const std::string* path, const absl::string_view* file_text) {
    for (const auto& row : option_table()) {
      const absl::Status status = set_value(parsed_.options, row, row.default_text);
      NEEDLE_CHECK(status.ok(), "a default is a legal value");
      source_[row.name] = {row.default_text, "default"};
    }
    std::string named_path;
    if (absl::Status status = find_action_and_path(arguments, environment, named_path); !status.ok()) return status;
    if (path != nullptr) {
      if (absl::Status status = take_file(*path, *file_text); !status.ok()) return status;
    } else if (!named_path.empty()) {
      absl::StatusOr<std::string> text = read_text_file(named_path);
      if (!text.ok()) return invalid(absl::StrCat("configuration file ", shown(named_path), " ", reason_of(text.status())));
      if (absl::Status status = take_file(named_path, *text); !status.ok()) return status;
    }
    if (absl::Status status = take_environment(environment); !status.ok()) return status;
    if (absl::Status status = take_arguments(arguments); !status.ok()) return status;
    if (absl::Status status = finish(); !status.ok()) return status;
    return std::move(parsed_);
  }

 private:
  struct Source {
    std::string value;
    std::string source;
  };

  absl::Status find_action_and_path(const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
                                    std::string& path) {
    for (const std::string& variable : environment) {
      if (absl::StartsWith(variable, "NEEDLE_CONFIG=")) path = variable.substr(14);
    }
    bool path_from_flag = false;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const std::string& argument = arguments[i];
      if (argument == "--help" || argument == "-h") parsed_.action = OptionAction::kHelp;
      if (argument == "--version") parsed_.action = OptionAction::kVersion;
      if (argument == "--check-config") parsed_.action = OptionAction::kCheckConfig;
      if (argument == "--reference") parsed_.action = OptionAction::kReference;
      if (argument == "--keeper") parsed_.action = OptionAction::kKeeper;
      const bool joined = absl::StartsWith(argument, "--config=");
      if (!joined && argument != "--config") continue;
      const std::string earlier = path_from_flag ? path : "";
      path = joined ? argument.substr(9) : i + 1 < arguments.size() ? arguments[i + 1] : "";
      // An empty one is most often a variable that a script did not set; to run without the file would hide that.
      if (path.empty()) return invalid("flag --config needs a path");
      if (path_from_flag) return given_twice("config", {earlier, "flag --config"}, {path, "flag --config"});
      path_from_flag = true;
    }
    return absl::OkStatus();
  }

  absl::Status set(absl::string_view name, absl::string_view text, const std::string& source, bool append = false) {
    const auto* row = find_row(option_table(), name);
    if (row == nullptr) {
      const std::string near = nearest(option_table(), name);
      return invalid(absl::StrCat("unknown option ", shown(name), " (", source, ")",
                                  near.empty() ? "" : absl::StrCat("; did you mean ", near, "?"), " `needled --help` lists them all"));
    }
    std::string value(text);
    Source& was = source_[row->name];
    const bool from_flag = absl::StartsWith(was.source, "flag ");  // --peer and --peers-static are one list
    if (from_flag && row->kind != OptionKind::kList) return given_twice(row->name, was, {value, source});
    if (append && from_flag && !was.value.empty()) value = was.value + "," + value;
    if (absl::Status status = set_value(parsed_.options, *row, value); !status.ok()) {
      return invalid(absl::StrCat("option ", row->name, " (", source, "): ", shown(text), " is ", reason_of(status),
                                  *row->bounds == '\0' ? "" : absl::StrCat("; it takes ", row->bounds)));
    }
    was = {value, source};
    return absl::OkStatus();
  }

  // The file's parser refuses that of a key; what one line says twice is most often a wrapper script and its user.
  static absl::Status given_twice(const std::string& name, const Source& first, const Source& second) {
    const std::string sources = first.source == second.source ? first.source : absl::StrCat(first.source, " and ", second.source);
    return invalid(absl::StrCat("option ", name, " is given twice (", sources, "): ", shown(first.value), " and ", shown(second.value),
                                "; leave one of them out"));
  }

  static std::string reason_of(const absl::Status& status) {
    const absl::string_view message = status.message();
    return std::string(absl::StartsWith(message, "INVALID: ") ? message.substr(9) : message);
  }

  PoolOptions& pool(const std::string& name) {
    for (PoolOptions& known : parsed_.options.pools) {
      if (known.name == name) return known;
    }
    PoolOptions fresh;
    for (const auto& row : pool_option_table()) {
      const absl::Status status = set_value(fresh, row, row.default_text);
      NEEDLE_CHECK(status.ok(), "a pool default is a legal value");
    }
    fresh.name = name;
    parsed_.options.pools.push_back(std::move(fresh));
    return parsed_.options.pools.back();
  }

  absl::Status check_pool_name(absl::string_view name, const std::string& source) {
    if (!is_name(name)) {
      return invalid(absl::StrCat("pool name ", shown(name), " (", source, ") is not 1..63 of a-z 0-9 . _ -"));
    }
    if (parsed_.options.pools.size() >= kPoolsMax) {
      const bool known = std::any_of(parsed_.options.pools.begin(), parsed_.options.pools.end(),
                                     [&](const PoolOptions& pool) { return pool.name == std::string(name); });
      if (!known)
        return invalid(absl::StrCat("pool ", shown(name), " (", source, ") is one more than the ", kPoolsMax, " that a daemon holds"));
    }
    return absl::OkStatus();
  }

  absl::Status set_pool(const std::string& name, absl::string_view key, absl::string_view text, const std::string& source) {
    const auto* row = find_row(pool_option_table(), key);
    if (row == nullptr) {
      const std::string near = nearest(pool_option_table(), key);
      return invalid(absl::StrCat("unknown option ", shown(absl::StrCat("pool.", name, ".", key)), " (", source, ")",
                                  near.empty() ? "" : absl::StrCat("; did you mean ", near, "?")));
    }
    if (absl::Status status = set_value(pool(name), *row, text); !status.ok()) {
      return invalid(absl::StrCat("option pool.", name, ".", row->name, " (", source, "): ", shown(text), " is ", reason_of(status),
                                  "; it takes ", row->bounds));
    }
    Source& was = source_[absl::StrCat("pool.", name, ".", row->name)];
    if (was.source == source) return given_twice(absl::StrCat("pool.", name, ".", row->name), was, {std::string(text), source});
    was = {std::string(text), source};
    return absl::OkStatus();
  }

  // "NAME" or "NAME:key=value,key=value".
  absl::Status take_pool_text(absl::string_view text, const std::string& source) {
    const size_t colon = text.find(':');
    const std::string name(text.substr(0, colon));
    if (absl::Status status = check_pool_name(name, source); !status.ok()) return status;
    pool(name);
    if (colon == absl::string_view::npos) return absl::OkStatus();
    for (absl::string_view item : absl::StrSplit(text.substr(colon + 1), ',', absl::SkipEmpty())) {
      const size_t equals = item.find('=');
      if (equals == absl::string_view::npos) {
        return invalid(absl::StrCat("pool ", shown(name), " (", source, "): ", shown(item), " is not key=value"));
      }
      if (absl::Status status = set_pool(name, item.substr(0, equals), item.substr(equals + 1), source); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  static absl::StatusOr<std::string> text_of(const toml::node& node, OptionKind kind, const std::string& key) {
    if (const auto* text = node.as_string()) return text->get();
    if (const auto* number = node.as_integer()) {
      if (kind == OptionKind::kSize || kind == OptionKind::kDuration) {
        if (number->get() == 0 && kind == OptionKind::kSize) return std::string("0");
        return invalid(absl::StrCat("option ", key, ": ", number->get(), " has no unit; write it as text, such as ",
                                    kind == OptionKind::kSize ? "\"512M\"" : "\"5s\""));
      }
      return absl::StrCat(number->get());
    }
    if (const auto* number = node.as_floating_point()) return absl::StrCat(number->get());
    if (const auto* flag = node.as_boolean()) return std::string(flag->get() ? "true" : "false");
    if (const auto* list = node.as_array()) {
      if (kind != OptionKind::kList) return invalid(absl::StrCat("option ", key, " takes one value, not a list"));
      std::string joined;
      for (const toml::node& item : *list) {
        if (const auto* text = item.as_string()) {
          absl::StrAppend(&joined, joined.empty() ? "" : ",", text->get());
        } else if (const auto* number = item.as_integer()) {
          absl::StrAppend(&joined, joined.empty() ? "" : ",", number->get());
        } else {
          return invalid(absl::StrCat("option ", key, ": a list item is neither text nor a whole number"));
        }
      }
      return joined;
    }
    return invalid(absl::StrCat("option ", key, " has a value of a kind that no option takes (table, date or time)"));
  }

  absl::Status take_file(const std::string& path, absl::string_view text) {
    int64_t line = 0;
    for (absl::string_view one : absl::StrSplit(text, '\n')) {  // the parser calls itself for each part of a dotted key
      ++line;
      if (one.size() > kLineBytesMax) {
        return invalid(absl::StrCat("configuration file ", shown(path), ", line ", line, " is ", one.size(), " bytes long; the limit is ",
                                    kLineBytesMax, ": break a list over several lines"));
      }
    }
    toml::parse_result result = toml::parse(std::string_view(text.data(), text.size()), path);
    if (!result) {
      const toml::parse_error& error = result.error();
      const std::string_view reason = error.description();
      return invalid(absl::StrCat("configuration file ", shown(path), ", line ", static_cast<int64_t>(error.source().begin.line), ": ",
                                  absl::string_view(reason.data(), reason.size())));
    }
    const std::string source = absl::StrCat("file ", path);
    for (const auto& [section_key, section] : result.table()) {
      const std::string section_name(section_key.str());
      const toml::table* keys = section.as_table();
      if (keys == nullptr) {
        return invalid(
            absl::StrCat("unknown option ", shown(section_name), " (", source, "); options stand in sections, such as [memory]"));
      }
      for (const auto& [key, value] : *keys) {
        const std::string name = std::string(key.str());
        if (section_name == "pool") {
          if (absl::Status status = take_pool_table(name, value, source); !status.ok()) return status;
          continue;
        }
        const std::string full = section_name + "." + name;
        const auto* row = find_row(option_table(), full);
        if (row == nullptr) return set(full, "", source);  // names the unknown key
        absl::StatusOr<std::string> plain = text_of(value, row->kind, full);
        if (!plain.ok()) return invalid(absl::StrCat(reason_of(plain.status()), " (", source, ")"));
        if (absl::Status status = set(full, *plain, source); !status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  absl::Status take_pool_table(const std::string& name, const toml::node& node, const std::string& source) {
    if (absl::Status status = check_pool_name(name, source); !status.ok()) return status;
    const toml::table* keys = node.as_table();
    if (keys == nullptr) {
      return invalid(absl::StrCat("option pool.", name, " (", source, ") is a section of its own: write [pool.", name, "]"));
    }
    pool(name);
    for (const auto& [key, value] : *keys) {
      const std::string key_name(key.str());
      const auto* row = find_row(pool_option_table(), key_name);
      const OptionKind kind = row == nullptr ? OptionKind::kText : row->kind;
      absl::StatusOr<std::string> plain = text_of(value, kind, absl::StrCat("pool.", name, ".", key_name));
      if (row != nullptr && !plain.ok()) return invalid(absl::StrCat(reason_of(plain.status()), " (", source, ")"));
      if (absl::Status status = set_pool(name, key_name, plain.ok() ? *plain : "", source); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status take_environment(const std::vector<std::string>& environment) {
    // Variables of the build, the tests and the client library, which share the prefix.
    static const std::set<std::string> others = {"NEEDLE_CONFIG",      "NEEDLE_JOBS",        "NEEDLE_ACCEPT",       "NEEDLE_GOLDEN_DIR",
                                                 "NEEDLE_VECTORS_DIR", "NEEDLE_COUNTS_FILE", "NEEDLE_REQUIRE_CUDA", "NEEDLE_TARGET",
                                                 "NEEDLE_SOCKET",      "NEEDLE_RUNTIME_DIR", "NEEDLE_TEST_SEED"};
    std::vector<std::string> sorted = environment;
    std::sort(sorted.begin(), sorted.end());  // the first error named doesn't depend on the shell's order
    for (const std::string& variable : sorted) {
      if (!absl::StartsWith(variable, "NEEDLE_")) continue;
      const size_t equals = variable.find('=');
      if (equals == std::string::npos) continue;
      const std::string name = variable.substr(0, equals);
      const std::string value = variable.substr(equals + 1);
      if (others.count(name) > 0) continue;
      if (name == "NEEDLE_POOLS") {
        for (absl::string_view text : absl::StrSplit(value, ';', absl::SkipWhitespace())) {
          if (absl::Status status = take_pool_text(absl::StripAsciiWhitespace(text), "environment NEEDLE_POOLS"); !status.ok())
            return status;
        }
        continue;
      }
      const std::string* match = nullptr;
      std::string option;
      for (const auto& row : option_table()) {
        if (variable_of(row.name) == name) {
          option = row.name;
          match = &option;
          break;
        }
      }
      if (match == nullptr)
        return invalid(absl::StrCat("unknown variable ", shown(name), "; `needled --help` lists all that begin with NEEDLE_"));
      if (absl::Status status = set(*match, value, absl::StrCat("environment ", name)); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status take_arguments(const std::vector<std::string>& arguments) {
    static const std::set<std::string> actions = {"--help", "-h", "--version", "--check-config", "--reference", "--keeper"};
    for (size_t i = 0; i < arguments.size(); ++i) {
      std::string flag = arguments[i];
      if (actions.count(flag) > 0) continue;
      if (!absl::StartsWith(flag, "--"))
        return invalid(absl::StrCat("argument ", shown(flag), " is not a flag; `needled --help` lists them"));
      std::string value;
      const size_t equals = flag.find('=');
      const bool joined = equals != std::string::npos;
      if (joined) {
        value = flag.substr(equals + 1);
        flag.resize(equals);
      }
      const std::string option = flag == "--peer"       ? "peers.static"
                                 : flag == "--instance" ? "node.instance"
                                 : flag == "--name"     ? "node.name"
                                                        : "";
      const OptionRow<DaemonOptions>* row = nullptr;
      for (const auto& candidate : option_table()) {
        if (flag_of(candidate.name) == flag || option == candidate.name) row = &candidate;
      }
      const bool special = flag == "--config" || flag == "--pool";
      if (row == nullptr && !special) {
        std::string plain = flag.substr(2);
        std::replace(plain.begin(), plain.end(), '-', '.');
        const std::string near = nearest(option_table(), plain);
        return invalid(absl::StrCat("unknown flag ", shown(flag),
                                    near.empty() ? "" : absl::StrCat("; did you mean ", flag_of(near.c_str()), "?"),
                                    " `needled --help` lists them all"));
      }
      if (!joined) {
        if (row != nullptr && row->kind == OptionKind::kSwitch) {
          value = "true";
        } else {
          if (i + 1 >= arguments.size()) return invalid(absl::StrCat("flag ", flag, " needs a value"));
          value = arguments[++i];
          if (absl::StartsWith(value, "--")) {
            return invalid(absl::StrCat("flag ", flag, " needs a value, and ", shown(value), " is a flag; write ", flag, "=VALUE"));
          }
        }
      }
      if (flag == "--config") continue;
      absl::Status status =
          flag == "--pool" ? take_pool_text(value, "flag --pool") : set(row->name, value, absl::StrCat("flag ", flag), true);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status finish() {
    DaemonOptions& options = parsed_.options;
    if (options.pools.empty()) pool("default");
    if (!options.node_name.empty() && !is_name(options.node_name)) {
      return invalid(absl::StrCat("option node.name (", source_["node.name"].source, "): ", shown(options.node_name),
                                  " is not 1..63 of a-z 0-9 . _ -"));
    }
    const auto both = [&](const char* a, const char* b, const std::string& why) {
      return invalid(absl::StrCat("options ", a, " (", source_[a].source, ": ", shown(source_[a].value), ") and ", b, " (",
                                  source_[b].source, ": ", shown(source_[b].value), ") ", why));
    };
    if (options.memory_bytes != 0 && options.memory_fraction != 0) {
      return both("memory.bytes", "memory.fraction", "are both set: the budget is one or the other");
    }
    if (options.memory_bytes_max != 0 && options.memory_bytes > options.memory_bytes_max) {
      return both("memory.bytes", "memory.bytes_max", "disagree: the budget must not exceed its limit");
    }
    if (options.memory_bytes != 0 && options.memory_scratch_bytes > options.memory_bytes / 2) {
      return both("memory.scratch_bytes", "memory.bytes", "disagree: scratch may take at most half of the budget");
    }
    if (options.memory_chunk_bytes != 0 && options.memory_bytes != 0 && options.memory_chunk_bytes > options.memory_bytes) {
      return both("memory.chunk_bytes", "memory.bytes", "disagree: a chunk must not exceed the budget");
    }
    if (options.session_silence_ms < 2 * options.session_heartbeat_ms) {
      return both("session.silence", "session.heartbeat", "disagree: silence is at least twice the heartbeat");
    }
    if (options.ship_silence_ms <= options.ship_retry_ms) {
      return both("ship.silence", "ship.retry", "disagree: a question is repeated before its silence counts");
    }
    if (options.ship_deadline_ms > options.ship_deadline_ms_max) {
      return both("ship.deadline", "ship.deadline_max", "disagree: the default deadline must not exceed the longest");
    }
    if (options.session_heartbeat_ms * 2 > options.lease_duration_ms) {
      return both("lease.duration", "session.heartbeat", "disagree: a lease lasts at least two heartbeats, which renew it");
    }
    std::set<std::string> peer_names;
    for (const std::string& peer : options.peers) {
      absl::StatusOr<PeerName> parsed = parse_peer(peer);
      if (!parsed.ok())
        return invalid(absl::StrCat("option peers.static (", source_["peers.static"].source, "): ", reason_of(parsed.status())));
      if (!peer_names.insert(parsed->name).second) {
        return invalid(
            absl::StrCat("option peers.static (", source_["peers.static"].source, "): peer ", shown(parsed->name), " is named twice"));
      }
    }
    for (const std::string& uid : options.attach_uids) {
      uint32_t value = 0;
      if (!absl::SimpleAtoi(uid, &value)) {
        return invalid(absl::StrCat("option attach.uids (", source_["attach.uids"].source, "): ", shown(uid), " is not a numeric user id"));
      }
    }
    for (const PoolOptions& pool : options.pools) {
      if (pool.window_page_tokens != 64 && pool.window_page_tokens != 256) {
        return invalid(absl::StrCat("option pool.", pool.name, ".window_page_tokens: ", pool.window_page_tokens, " is neither 64 nor 256"));
      }
    }
    for (const auto& row : option_table()) {
      const Source& source = source_[row.name];
      parsed_.provenance.push_back({row.name, source.value, source.source, row.live});
    }
    for (const PoolOptions& pool : options.pools) {
      for (const auto& row : pool_option_table()) {
        const std::string name = absl::StrCat("pool.", pool.name, ".", row.name);
        const auto found = source_.find(name);
        parsed_.provenance.push_back({name, found == source_.end() ? row.default_text : found->second.value,
                                      found == source_.end() ? "default" : found->second.source, row.live});
      }
    }
    return absl::OkStatus();
  }

  ParsedOptions parsed_;
  std::map<std::string, Source> source_;
};

std::string kind_name(OptionKind kind) {
  switch (kind) {
    case OptionKind::kText: return "text";
    case OptionKind::kSize: return "size";
    case OptionKind::kDuration: return "duration";
    case OptionKind::kCount: return "count";
    case OptionKind::kFraction: return "fraction";
    case OptionKind::kSwitch: return "switch";
    case OptionKind::kChoice: return "choice";
    case OptionKind::kAddress: return "address";
    case OptionKind::kList: return "list";
  }
  return "";
}

std::string default_shown(const char* text) { return *text == '\0' ? "(see reason)" : text; }

std::string in_table(std::string text) {  // a | would end the cell
  std::string out;
  for (char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

}  // namespace

absl::StatusOr<std::string> read_text_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return invalid(absl::StrCat("cannot be read: ", std::strerror(errno)));
  std::string text(static_cast<size_t>(kFileBytesMax) + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (stream.bad()) return invalid("cannot be read: it is a folder, or its device fails");  // a folder can be opened
  text.resize(static_cast<size_t>(stream.gcount()));
  if (static_cast<int64_t>(text.size()) > kFileBytesMax) return invalid(absl::StrCat("is larger than ", size_text(kFileBytesMax)));
  return text;
}

absl::StatusOr<int64_t> parse_size(absl::string_view text) {
  if (text == "0") return int64_t{0};
  size_t digits = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  if (digits == 0 || digits > 18) return invalid("not a size; sizes are whole numbers with a unit, such as 512M or 2G");
  int64_t value = 0;
  if (!absl::SimpleAtoi(text.substr(0, digits), &value)) return invalid("not a size");
  static constexpr struct {
    const char* unit;
    int shift;
  } kUnits[] = {{"B", 0}, {"K", 10}, {"KiB", 10}, {"M", 20}, {"MiB", 20}, {"G", 30}, {"GiB", 30}, {"T", 40}, {"TiB", 40}};
  const absl::string_view unit = text.substr(digits);
  if (unit.empty()) return invalid("without a unit; write B, K, M, G or T (powers of 1024)");
  for (const auto& known : kUnits) {
    if (unit != known.unit) continue;
    if (value > (std::numeric_limits<int64_t>::max() >> known.shift)) return invalid("larger than any memory");
    return value << known.shift;
  }
  return invalid("of an unknown unit; units are B, K, M, G, T or KiB, MiB, GiB, TiB (powers of 1024)");
}

absl::StatusOr<int64_t> parse_duration_ms(absl::string_view text) {
  size_t digits = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  if (digits == 0 || digits > 12) return invalid("not a duration; durations are whole numbers with a unit, such as 250ms or 5s");
  int64_t value = 0;
  if (!absl::SimpleAtoi(text.substr(0, digits), &value)) return invalid("not a duration");
  const absl::string_view unit = text.substr(digits);
  if (unit == "ms") return value;
  if (unit == "s") return value * 1000;
  if (unit == "m") return value * 60'000;
  if (unit == "h") return value * 3'600'000;
  if (unit.empty()) return invalid("without a unit; write ms, s, m or h");
  return invalid("of an unknown unit; units are ms, s, m and h");
}

std::string size_text(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "K", "M", "G", "T"};
  int unit = 0;
  while (unit < 4 && bytes != 0 && bytes % 1024 == 0) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrCat(bytes, kUnits[unit]);
}

absl::StatusOr<HostPort> parse_host_port(absl::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos || text.size() > 300) return invalid("not HOST:PORT");
  absl::string_view host = text.substr(0, colon);
  int port = 0;
  const absl::string_view port_text = text.substr(colon + 1);
  if (port_text.empty() || port_text.size() > 5 || !absl::SimpleAtoi(port_text, &port) || port < 1 || port > 65535) {
    return invalid("of a port outside 1..65535");
  }
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != absl::string_view::npos) {
    return invalid("an IPv6 address without brackets; write [HOST]:PORT");
  }
  if (host.empty()) return invalid("without a host");
  for (char c : host) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '-' && c != '_' && c != ':' && c != '%') {
      return invalid("of a host with a character that no host name has");
    }
  }
  return HostPort{std::string(host), port};
}

absl::StatusOr<PeerName> parse_peer(absl::string_view text) {
  const size_t equals = text.find('=');
  if (equals == absl::string_view::npos) return invalid(absl::StrCat("peer ", shown(text), " is not NAME=HOST:PORT"));
  const absl::string_view name = text.substr(0, equals);
  const absl::string_view address = text.substr(equals + 1);
  if (!is_name(name)) return invalid(absl::StrCat("peer name ", shown(name), " is not 1..63 of a-z 0-9 . _ -"));
  if (absl::StatusOr<HostPort> parsed = parse_host_port(address); !parsed.ok()) {
    const absl::string_view why = parsed.status().message();
    return invalid(absl::StrCat("peer ", shown(name), ": address ", shown(address), " is ", why.substr(std::min<size_t>(9, why.size()))));
  }
  return PeerName{std::string(name), std::string(address)};
}

absl::StatusOr<ParsedOptions> parse_options(const std::vector<std::string>& arguments, const std::vector<std::string>& environment) {
  return Parser().run(arguments, environment, nullptr, nullptr);
}

absl::StatusOr<ParsedOptions> parse_options_with_file(const std::vector<std::string>& arguments,
                                                      const std::vector<std::string>& environment, const std::string& path,
                                                      absl::string_view file_text) {
  return Parser().run(arguments, environment, &path, &file_text);
}

std::string options_help() {
  std::string text =
      "usage: needled [FLAGS]\n"
      "Keeps KV and index-K of sparse-attention models for the engines of one node. Without any flag it serves a host pool\n"
      "for deepseek-v4-flash with bf16 index-K on loopback.\n\n"
      "  --config PATH     TOML file (also NEEDLE_CONFIG); the file is weaker than NEEDLE_ variables, those than flags\n"
      "  --pool NAME[:key=value,...]  a pool, repeated for more (also NEEDLE_POOLS, separated by ';')\n"
      "  --peer NAME=HOST:PORT        a peer, repeated for more\n"
      "  --instance N      short for --node-instance; --name NAME for --node-name\n"
      "  --check-config    read everything, say what would run and where each value came from, exit 0 or 1\n"
      "  --reference, --metrics-reference   print the reference of all options, of all metrics\n"
      "  --keeper          run as the keeper: holds a daemon's memory over its death; needs no GPU\n"
      "  --version         what this was built with\n\n"
      "Sizes: 512M, 2G (powers of 1024). Durations: 250ms, 5s, 30m. A flag is given once; lists grow with each.\n\n";
  const auto line = [&text](const std::string& flag, const auto& row) {
    absl::StrAppend(&text, "  ", flag, "  ", kind_name(row.kind), *row.bounds == '\0' ? "" : " ", row.bounds,
                    *row.default_text == '\0' ? "" : absl::StrCat(", default ", row.default_text), "\n      ", row.meaning, " ",
                    *row.default_text == '\0' ? row.reason : "", "\n");
  };
  for (const auto& row : option_table()) line(flag_of(row.name), row);
  absl::StrAppend(&text, "\nOf a pool (--pool NAME:key=value, [pool.NAME] in the file):\n");
  for (const auto& row : pool_option_table()) line(row.name, row);
  return text;
}

std::string options_reference() {
  std::string text =
      "# Options of needled\n\n"
      "Made from the table in `server/daemon_options.cc` by `needled --reference`; a test holds the two together.\n\n"
      "Later sources win: defaults, then the TOML file (`--config PATH` or `NEEDLE_CONFIG`), then `NEEDLE_` variables, then flags.\n"
      "An option `memory.bytes` is the key `bytes` of `[memory]` in the file, the variable `NEEDLE_MEMORY_BYTES` and the flag\n"
      "`--memory-bytes`. Sizes are whole numbers with a unit (`512M`, `2G`, powers of 1024), durations too (`250ms`, `5s`, `30m`).\n"
      "Unknown keys, wrong units, impossible values and a value given twice in one source are errors; only lists (`--peer`,\n"
      "`--attach-uids`) grow with each flag. `needled --check-config` says what would run.\n\n"
      "*live*: may change while the daemon runs (through `needlectl`); all others take effect at the next start.\n";
  std::string section;
  for (const auto& row : option_table()) {
    const std::string name = row.name;
    const std::string its_section = name.substr(0, name.find('.'));
    if (its_section != section) {
      section = its_section;
      absl::StrAppend(&text, "\n## [", section,
                      "]\n\n| option | kind and bounds | default | live | what it is, and why this default |\n|---|---|---|---|---|\n");
    }
    absl::StrAppend(&text, "| `", name, "` | ", kind_name(row.kind), *row.bounds == '\0' ? "" : ", ", in_table(row.bounds), " | ",
                    in_table(default_shown(row.default_text)), " | ", row.live ? "live" : "restart", " | ", in_table(row.meaning), " ",
                    in_table(row.reason), " |\n");
  }
  absl::StrAppend(&text,
                  "\n## [pool.NAME]\n\nOne section a pool; without any there is one pool named `default`. On the command line\n"
                  "`--pool NAME:key=value,key=value`, in the environment `NEEDLE_POOLS` with `;` between pools.\n\n"
                  "| key | kind and bounds | default | live | what it is, and why this default |\n|---|---|---|---|---|\n");
  for (const auto& row : pool_option_table()) {
    absl::StrAppend(&text, "| `", row.name, "` | ", kind_name(row.kind), ", ", in_table(row.bounds), " | ", row.default_text, " | ",
                    row.live ? "live" : "restart", " | ", in_table(row.meaning), " ", in_table(row.reason), " |\n");
  }
  return text;
}

}  // namespace needle::server
