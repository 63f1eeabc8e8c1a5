// What the UCX transport counts. Read by metrics and the CLI, from any thread.
//
// What must stay true: a counter only grows; a gauge says so in its name (`_now`).
#pragma once

#include <atomic>
#include <cstdint>

namespace needle::server::ucx {

struct Counters {
  // reader
  std::atomic<int64_t> pages_arrived{0};
  std::atomic<int64_t> bytes_arrived{0};
  std::atomic<int64_t> pages_dropped{0};     // late, duplicate or of a size nobody asked for
  std::atomic<int64_t> messages_dropped{0};  // malformed, or of a link or request that is gone
  std::atomic<int64_t> links_opened{0};
  std::atomic<int64_t> links_failed{0};         // UCX reported an error
  std::atomic<int64_t> links_silent{0};         // closed because the peer said nothing
  std::atomic<int64_t> bytes_in_flight_now{0};  // asked for and not yet arrived
  std::atomic<int64_t> links_held{0};           // closed without getting back what UCX was working on
  std::atomic<int64_t> pages_held_now{0};       // of those links, not given back yet
  // source
  std::atomic<int64_t> pages_sent{0};
  std::atomic<int64_t> pages_refused{0};
  std::atomic<int64_t> source_links_now{0};
  std::atomic<int64_t> source_links_silent{0};
  std::atomic<int64_t> source_links_failed{0};
  std::atomic<int64_t> sends_now{0};          // given to UCX and not completed
  std::atomic<int64_t> source_links_held{0};  // closed, with sends that UCX did not end
  std::atomic<int64_t> sends_held_now{0};     // of those links, not ended yet: their chunks can't be released
  std::atomic<int64_t> pages_queued_now{0};
};

}  // namespace needle::server::ucx
