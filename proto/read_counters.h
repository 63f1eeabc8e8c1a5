// What a client's in-process reads did, in a page of memory that the client writes and the daemon scrapes.
//
// One memfd a session. Each counter has one writer process (its threads add with relaxed atomics) and only ever grows;
// the daemon reads it at a scrape and keeps the last value when the client dies, so a total never falls.
//
// What must stay true:
//  1. Both sides see the same offsets: sizes are asserted; fields are only added at the end.
//  2. The daemon never trusts what lies here: it is shown, never acted upon.
//  3. Latency buckets are powers of two of a microsecond: bucket i counts reads below 2^i us, the last all others.
//
// Samples for the audit follow at `samples_offset`: slots of `sample_bytes`, each begun by a sequence number that is odd
// while the client writes it. Version 1 has none.
#pragma once

#include <atomic>
#include <cstdint>

namespace needle::attach {

inline constexpr uint32_t kReadCountersMagic = 0x7264634Eu;
inline constexpr int kReadLatencyBuckets = 20;  // up to half a second, then everything

struct ReadCounters {
  uint32_t magic;
  uint32_t version;
  uint32_t samples_offset;
  uint32_t sample_bytes;
  uint32_t sample_count;
  uint32_t reserved;
  std::atomic<uint64_t> reads;    // read_topk calls that ended
  std::atomic<uint64_t> queries;  // query tokens in them
  std::atomic<uint64_t> entries_scored;
  std::atomic<uint64_t> bytes_read;  // of index-K
  std::atomic<uint64_t> nan_scores;
  std::atomic<uint64_t> absent_entries;
  std::atomic<uint64_t> stale_reads;    // refused, or their answer was: rights or pages were gone
  std::atomic<uint64_t> exact_rescans;  // OpReport::fallbacks
  std::atomic<uint64_t> stores;         // store_* launches, as the engine counts them
  std::atomic<uint64_t> rows_stored;
  std::atomic<uint64_t> rows_skipped;
  std::atomic<uint64_t> latency[kReadLatencyBuckets];
  std::atomic<uint64_t> latency_ns_sum;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");
static_assert(sizeof(ReadCounters) == 24 + 8 * (11 + kReadLatencyBuckets + 1));
inline constexpr int64_t kReadCountersBytes = 4096;
static_assert(sizeof(ReadCounters) <= kReadCountersBytes);

}  // namespace needle::attach
