#include "server/options.h"

#include <string>

#include "proto/errors.h"

namespace needle::server {
namespace {

struct Bound {
  const char* name;
  int64_t value;
  int64_t least;
  int64_t most;
};

constexpr int64_t kDayMs = 86'400'000;

absl::Status out_of_bounds(const std::string& name, int64_t value, int64_t least, int64_t most) {
  return make_error(ErrorCode::kInvalid,
                    name + " is " + std::to_string(value) + ", allowed are " + std::to_string(least) + " to " + std::to_string(most));
}

absl::Status validate_set(const PoolSetOptions& set) {
  if (set.name.empty() || set.format.empty()) return make_error(ErrorCode::kInvalid, "a pool set needs a name and a page format");
  for (size_t kind = 0; kind < kPoolKinds; ++kind) {
    const PoolShape& shape = set.shapes[kind];
    const std::string name = "pool set '" + set.name + "', " + kPoolKindNames[kind] + " pool: ";
    const bool optional = static_cast<PoolKind>(kind) == PoolKind::kWindow && set.window_tokens == 0;
    if (shape.page_bytes == 0 && optional) continue;
    if (shape.page_bytes < 8) return out_of_bounds(name + "page_bytes", shape.page_bytes, 8, INT64_MAX);
    if (shape.chunk_bytes < shape.page_bytes) {
      return out_of_bounds(name + "chunk_bytes", shape.chunk_bytes, shape.page_bytes, INT64_MAX);
    }
    if (shape.chunks_max < 1 || shape.chunks_max > (int64_t{1} << 20)) {
      return out_of_bounds(name + "chunks_max", shape.chunks_max, 1, int64_t{1} << 20);
    }
    // Page indices are 32 bits, and links store index + 1.
    const int64_t pages_most = (int64_t{1} << 32) - 2;
    if (shape.chunk_bytes / shape.page_bytes + 1 > pages_most / shape.chunks_max) {
      return out_of_bounds(name + "pages", shape.chunk_bytes / shape.page_bytes * shape.chunks_max, 1, pages_most);
    }
    const bool counts_tokens = static_cast<PoolKind>(kind) != PoolKind::kState;
    if (counts_tokens && (shape.page_tokens < 1 || shape.page_tokens > 65'536)) {
      return out_of_bounds(name + "page_tokens", shape.page_tokens, 1, 65'536);
    }
  }
  if (set.window_tokens < 0 || set.window_tokens > 1'000'000) return out_of_bounds("window_tokens", set.window_tokens, 0, 1'000'000);
  if (set.resume_points_max < 0) return out_of_bounds("resume_points_max", set.resume_points_max, 0, INT64_MAX);
  return absl::OkStatus();
}

}  // namespace

absl::Status validate(const CoreOptions& options) {
  if (options.sets.empty()) return make_error(ErrorCode::kInvalid, "no pool set is configured");
  for (const PoolSetOptions& set : options.sets) {
    if (absl::Status bad = validate_set(set); !bad.ok()) return bad;
  }
  const Bound bounds[] = {
      {"heartbeat_ms", options.heartbeat_ms, 1, kDayMs},
      {"silence_ms", options.silence_ms, options.heartbeat_ms + 1, kDayMs},
      {"lease_ms", options.lease_ms, options.heartbeat_ms + 1, kDayMs},
      {"outcome_remembered_ms", options.outcome_remembered_ms, 1, kDayMs},
      {"ship_deadline_ms_max", options.ship_deadline_ms_max, 1, kDayMs},
      {"ship_deadline_ms", options.ship_deadline_ms, 1, options.ship_deadline_ms_max},
      {"ship_retry_ms", options.ship_retry_ms, 1, options.lease_ms},
      {"ship_silence_ms", options.ship_silence_ms, options.ship_retry_ms + 1, kDayMs},
      {"ship_poll_ms", options.ship_poll_ms, 1, options.lease_ms},
      {"fetch_ms", options.fetch_ms, 1, kDayMs},
      {"ship_attempts_max", options.ship_attempts_max, 1, 1'000},
      {"bytes_in_flight_max", options.bytes_in_flight_max, 1, int64_t{1} << 50},
      {"retry_after_ms", options.retry_after_ms, 1, kDayMs},
      {"sessions_max", options.sessions_max, 1, 65'534},
      {"tickets_max", options.tickets_max, 1, int64_t{1} << 30},
      {"leases_max", options.leases_max, 1, int64_t{1} << 30},
      {"ships_max", options.ships_max, 1, int64_t{1} << 20},
      {"outcomes_max", options.outcomes_max, 1, int64_t{1} << 30},
      {"pages_per_request_max", options.pages_per_request_max, 1, int64_t{1} << 24},
      {"offer_pages_max", options.offer_pages_max, 1, 65'536},
  };
  for (const Bound& bound : bounds) {
    if (bound.value < bound.least || bound.value > bound.most) return out_of_bounds(bound.name, bound.value, bound.least, bound.most);
  }
  return absl::OkStatus();
}

}  // namespace needle::server
