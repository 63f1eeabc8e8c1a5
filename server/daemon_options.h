// Every option of needled, in one table: it makes --help, --check-config, the NEEDLE_ variables, the TOML keys and the
// reference (docs/options.md), so that none of them can differ from another.
//
// What must stay true:
//  1. An option exists exactly when it has a row. Its TOML key is the row's name (`memory.bytes`), its flag that name with
//     dashes (`--memory-bytes`), its variable that name in capitals (`NEEDLE_MEMORY_BYTES`). Pools have a table of their own.
//  2. Later sources win: defaults < file < environment < flags. Each value remembers where it came from.
//  3. An unknown key, a wrong unit, a value out of bounds, one given twice in one source or an impossible combination is an
//     error that names key, source, value and limit. Nothing is guessed, nothing is clamped.
//  4. Bytes are int64 bytes, times int64 milliseconds: the unit is parsed once, here.
//
// The bounds of the core (server/options.h) are filled from this table by server/node.cc; it is the only other place.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace needle::server {

struct PoolOptions {
  std::string name;
  std::string model;
  std::string index_k;
  std::string index_k_scale;
  std::string main_kv;
  std::string ratio128_state;
  std::string order;
  std::string eviction;
  std::string format_file;
  int64_t window_page_tokens = 0;
  int64_t speculative_rows = 0;
  int64_t share = 0;
  int64_t ratio_paged = 0;
  int64_t ratio_window = 0;
  int64_t ratio_state = 0;
  int64_t resume_points_max = 0;
};

struct DaemonOptions {
  std::string node_name;
  int64_t node_instance = 0;
  std::string node_runtime_dir;
  std::string log_level;
  int64_t stop_deadline_ms = 0;

  std::string listen_grpc;
  std::string listen_metrics;
  std::string listen_advertise;
  bool listen_remote_operators = false;

  std::vector<std::string> peers;
  int64_t peer_hello_ms = 0;

  int64_t memory_bytes = 0;
  double memory_fraction = 0;
  int64_t memory_bytes_max = 0;
  int64_t memory_chunk_bytes = 0;
  int64_t memory_scratch_bytes = 0;
  std::string memory_huge_pages;
  int64_t memory_numa_node = 0;
  std::string memory_keeper;

  std::vector<std::string> attach_uids;

  std::string transport_kind;
  std::string transport_devices;
  std::string transport_lanes;

  int64_t session_heartbeat_ms = 0;
  int64_t session_silence_ms = 0;
  int64_t session_count_max = 0;
  int64_t ticket_count_max = 0;
  int64_t ticket_outcome_remembered_ms = 0;
  int64_t ticket_outcome_count_max = 0;
  int64_t lease_duration_ms = 0;
  int64_t lease_count_max = 0;
  int64_t request_pages_max = 0;
  int64_t request_retry_after_ms = 0;
  int64_t request_queue_max = 0;
  int64_t ship_deadline_ms = 0;
  int64_t ship_deadline_ms_max = 0;
  int64_t ship_retry_ms = 0;
  int64_t ship_silence_ms = 0;
  int64_t ship_poll_ms = 0;
  int64_t ship_fetch_ms = 0;
  int64_t ship_attempts_max = 0;
  int64_t ship_count_max = 0;
  int64_t ship_bytes_in_flight_max = 0;
  int64_t ship_offer_pages_max = 0;

  int64_t topk_threads = 0;

  std::vector<PoolOptions> pools;  // never empty after parsing
};

enum class OptionKind : uint8_t { kText, kSize, kDuration, kCount, kFraction, kSwitch, kChoice, kAddress, kList };

template <class Owner>
struct OptionRow {
  using Place = std::variant<int64_t Owner::*, double Owner::*, bool Owner::*, std::string Owner::*, std::vector<std::string> Owner::*>;
  const char* name;
  OptionKind kind;
  Place place;
  const char* default_text;
  const char* bounds;   // "1..64", "1M..16T", "a|b|c", "" for free text
  bool live;            // may change while the daemon runs
  const char* meaning;  // what it is
  const char* reason;   // why this default
};

const std::vector<OptionRow<DaemonOptions>>& option_table();
const std::vector<OptionRow<PoolOptions>>& pool_option_table();

struct OptionProvenance {
  std::string name;
  std::string value;
  std::string source;  // default, file PATH, environment, flag
  bool live = false;
};

enum class OptionAction : uint8_t { kRun, kHelp, kVersion, kCheckConfig, kReference, kKeeper };

struct ParsedOptions {
  OptionAction action = OptionAction::kRun;
  DaemonOptions options;
  std::vector<OptionProvenance> provenance;
};

// `arguments` without the program's name; `environment` as NAME=VALUE. Reads the file that --config or NEEDLE_CONFIG names.
absl::StatusOr<ParsedOptions> parse_options(const std::vector<std::string>& arguments, const std::vector<std::string>& environment);
// The same with the file's text in hand; `path` is for messages only.
absl::StatusOr<ParsedOptions> parse_options_with_file(const std::vector<std::string>& arguments,
                                                      const std::vector<std::string>& environment, const std::string& path,
                                                      absl::string_view file_text);

std::string options_help();
std::string options_reference();  // docs/options.md

// "512M", "2GiB": bytes; "250ms", "5s", "30m": milliseconds. The message says what was wrong.
// A file that an operator names, up to 1 MiB; the message goes after the file's name.
absl::StatusOr<std::string> read_text_file(const std::string& path);
absl::StatusOr<int64_t> parse_size(absl::string_view text);
absl::StatusOr<int64_t> parse_duration_ms(absl::string_view text);
std::string size_text(int64_t bytes);

struct HostPort {
  std::string host;
  int port = 0;
};
absl::StatusOr<HostPort> parse_host_port(absl::string_view text);  // HOST:PORT, [IPV6]:PORT
struct PeerName {
  std::string name;
  std::string address;
};
absl::StatusOr<PeerName> parse_peer(absl::string_view text);  // NAME=HOST:PORT

}  // namespace needle::server
