// The bounds and times of the core, each with the reason for its default. The daemon fills them from its one table of
// options; the simulator draws them small and hostile from its seed.
//
// What must stay true:
//  1. Every queue, table, batch and wait in the core is bounded by a field here.
//  2. Times are monotonic milliseconds. A zero or negative bound is a configuration error found before the core starts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/catalog/eviction_policy.h"
#include "server/messages.h"
#include "server/pool/page_types.h"

namespace needle::server {

struct PoolSetOptions {
  std::string name;
  std::string format;  // canonical text of the page format; compared, printed, never parsed here
  std::array<PoolShape, kPoolKinds> shapes;
  int64_t window_tokens = 128;  // trailing tokens that a continuation reads from the window pool
  int64_t budget_bytes = 0;     // of the three pools together
  BudgetRatios ratios{};
  EvictionPolicy eviction = EvictionPolicy::kLeavesFirst;
  int64_t resume_points_max = 4096;  // quota; the least valuable goes first
};

struct CoreOptions {
  NodeId node;
  std::vector<PoolSetOptions> sets;

  int64_t heartbeat_ms = 500;
  int64_t silence_ms = 2'000;              // four missed heartbeats; F9 asks for all rights back within 5 s
  int64_t lease_ms = 4'000;                // of remote readers; renewed by heartbeat or ask. F9 again
  int64_t outcome_remembered_ms = 60'000;  // longer than any client retries
  int64_t ship_deadline_ms_max = 600'000;
  int64_t ship_deadline_ms = 120'000;  // when the caller names none
  int64_t ship_retry_ms = 50;          // resend an unanswered ask or confirm
  int64_t ship_silence_ms = 2'000;     // a question to the source unanswered for so long ends the ship
  int64_t ship_poll_ms = 2;            // ask again while the source is still storing
  int64_t fetch_ms = 5'000;            // a posted part without completion: close the peer's endpoint
  int64_t ship_attempts_max = 8;
  int64_t bytes_in_flight_max = int64_t{256} << 20;  // ten milliseconds of a 200 Gb/s link
  int64_t retry_after_ms = 20;                       // the hint that goes with OUT_OF_PAGES and BUSY

  int64_t sessions_max = 1'024;
  int64_t tickets_max = 65'536;
  int64_t leases_max = 65'536;
  int64_t ships_max = 256;
  int64_t outcomes_max = 262'144;  // remembered at once; the oldest is forgotten early, and counted
  int64_t pages_per_request_max = 65'536;
  int64_t offer_pages_max = 512;  // one control message stays under 64 KiB
};

// OK, or INVALID naming the first option that is out of bounds.
absl::Status validate(const CoreOptions& options);

}  // namespace needle::server
