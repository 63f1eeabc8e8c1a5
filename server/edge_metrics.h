// What the edge counts about requests: outcome, duration and size of every verb. Plain atomics: counted by RPC threads, read
// at a scrape.
//
// What must stay true:
//  1. Every call of a verb ends in exactly one record(): `needle_requests_total` over all outcomes is the number of calls.
//  2. An outcome is "OK" or a name of proto/errors.h; nothing that a caller sends becomes a label.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "proto/errors.h"

namespace needle::server {

#define NEEDLE_VERBS(X) \
  X(open_session)       \
  X(heartbeat)          \
  X(close_session)      \
  X(acknowledge)        \
  X(reserve)            \
  X(extend)             \
  X(publish)            \
  X(truncate)           \
  X(seal_pages)         \
  X(seal_resume_point)  \
  X(seal)               \
  X(forfeit)            \
  X(adopt)              \
  X(lookup)             \
  X(acquire)            \
  X(release)            \
  X(recheck)            \
  X(read_topk)          \
  X(read_entries)       \
  X(ship_start)         \
  X(ship_progress)      \
  X(ship_wait)          \
  X(ship_cancel)        \
  X(forget)             \
  X(status)             \
  X(peers)              \
  X(add_peer) X(resize) X(resize_status) X(resize_abort) X(evict) X(sequences) X(drain) X(audit) X(options) X(probe) X(hello) X(deliver)

enum class Verb : uint8_t {
#define NEEDLE_VERB_ENUM(name) name,
  NEEDLE_VERBS(NEEDLE_VERB_ENUM)
#undef NEEDLE_VERB_ENUM
      kCount
};
inline constexpr size_t kVerbCount = static_cast<size_t>(Verb::kCount);
inline constexpr std::array<const char*, kVerbCount> kVerbNames = {
#define NEEDLE_VERB_NAME(name) #name,
    NEEDLE_VERBS(NEEDLE_VERB_NAME)
#undef NEEDLE_VERB_NAME
};

// From a cached lookup (10 us) to a ship (a minute); times 4 each.
inline constexpr std::array<double, 12> kDurationBounds = {1e-5,     4e-5,  1.6e-4, 6.4e-4, 2.56e-3, 1.024e-2,
                                                           4.096e-2, 0.164, 0.655,  2.62,   10.5,    42.0};
// Pages named by a request or its reply; 256 tokens each in V4.
inline constexpr std::array<double, 9> kPagesBounds = {1, 4, 16, 64, 256, 1024, 4096, 16384, 65536};

template <size_t kBounds>
struct EdgeHistogram {
  std::array<std::atomic<uint64_t>, kBounds + 1> counts{};
  std::atomic<double> sum{0};

  void add(const std::array<double, kBounds>& bounds, double value) {
    size_t bucket = 0;
    while (bucket < kBounds && value > bounds[bucket]) ++bucket;
    counts[bucket].fetch_add(1, std::memory_order_relaxed);
    sum.fetch_add(value, std::memory_order_relaxed);
  }
};

class EdgeMetrics {
 public:
  static constexpr size_t kOutcomes = kErrorTable.size() + 1;  // 0 is OK, then the table's order

  void record(Verb verb, const absl::Status& status, int64_t duration_ns, int64_t pages) {
    const size_t row = static_cast<size_t>(verb);
    const std::optional<ErrorCode> code = error_code(status);
    outcomes_[row][code.has_value() ? static_cast<size_t>(*code) + 1 : 0].fetch_add(1, std::memory_order_relaxed);
    durations_[row].add(kDurationBounds, static_cast<double>(duration_ns) * 1e-9);
    if (pages > 0) pages_[row].add(kPagesBounds, static_cast<double>(pages));
  }

  uint64_t outcome(Verb verb, size_t outcome) const {
    return outcomes_[static_cast<size_t>(verb)][outcome].load(std::memory_order_relaxed);
  }
  static const char* outcome_name(size_t outcome) { return outcome == 0 ? "OK" : kErrorTable[outcome - 1].name; }
  const EdgeHistogram<12>& duration(Verb verb) const { return durations_[static_cast<size_t>(verb)]; }
  const EdgeHistogram<9>& pages(Verb verb) const { return pages_[static_cast<size_t>(verb)]; }

 private:
  std::array<std::array<std::atomic<uint64_t>, kOutcomes>, kVerbCount> outcomes_{};
  std::array<EdgeHistogram<12>, kVerbCount> durations_{};
  std::array<EdgeHistogram<9>, kVerbCount> pages_{};
};

}  // namespace needle::server
