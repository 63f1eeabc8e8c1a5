// What became of tickets and leases that have ended, so that a repeated request gets the first answer again.
//
// Owned by the core's state, loop thread only.
//
// What must stay true:
//  1. The first outcome of an id is never replaced while it is remembered.
//  2. Bounded in time (outcome_remembered_ms) and in number (outcomes_max); forgetting early is counted.
//  3. An id that is neither open nor remembered is unknown: its users are told STALE, never a guess.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "base/ids.h"
#include "proto/errors.h"
#include "server/probe.h"

namespace needle::server {

enum class OutcomeKind : uint8_t { kSealed, kForfeited, kAdopted, kShipFailed, kReleased, kExpired, kRevoked, kSequenceForfeited };

// What a ship's progress says once it has ended.
struct ShipTotals {
  uint32_t attempt = 0;
  int64_t pages_known = 0;
  int64_t pages_arrived = 0;
  int64_t bytes_arrived = 0;
};

struct Outcome {
  OutcomeKind kind = OutcomeKind::kForfeited;
  SequenceId sequence;
  LeaseId lease;
  TicketId ticket;
  absl::Status status;  // of a failed ship
  ShipTotals ship{};
  uint64_t number = 0;  // counts what was remembered; Outcomes sets it
};

struct OutcomeKey {
  enum Of : uint8_t { kTicket, kLease, kSequence };
  SessionId session;
  uint64_t id = 0;
  Of of = kTicket;
  friend bool operator==(const OutcomeKey&, const OutcomeKey&) = default;

  template <class Hash>
  friend Hash AbslHashValue(Hash state, const OutcomeKey& key) {
    return Hash::combine(std::move(state), key.session, key.id, key.of);
  }
};

class Outcomes {
 public:
  Outcomes(int64_t remembered_ns, int64_t outcomes_max, Probes& probes)
      : remembered_ns_(remembered_ns), outcomes_max_(outcomes_max), probes_(probes) {}

  void remember(const OutcomeKey& key, Outcome outcome, int64_t now_ns) {
    outcome.number = ++remembered_;
    if (!outcomes_.emplace(key, std::move(outcome)).second) return;
    ages_.push_back({key, now_ns, remembered_});
    if (static_cast<int64_t>(ages_.size()) <= outcomes_max_) return;
    probes_.hit(Probe::outcome_forgotten_early);
    forget_oldest();
  }

  const Outcome* find(const OutcomeKey& key) const {
    const auto found = outcomes_.find(key);
    return found == outcomes_.end() ? nullptr : &found->second;
  }

  // A sequence that is being written anew is no longer a forfeited one.
  void erase_sequence(SequenceId sequence) { outcomes_.erase({SessionId(), sequence.value(), OutcomeKey::kSequence}); }

  void expire(int64_t now_ns) {
    while (!ages_.empty() && ages_.front().at_ns + remembered_ns_ <= now_ns) forget_oldest();
  }

 private:
  struct Age {
    OutcomeKey key;
    int64_t at_ns;
    uint64_t number;
  };
  void forget_oldest() {
    // The key may have been erased and remembered anew since: then a later age is its own.
    const auto found = outcomes_.find(ages_.front().key);
    if (found != outcomes_.end() && found->second.number == ages_.front().number) outcomes_.erase(found);
    ages_.pop_front();
  }

  const int64_t remembered_ns_;
  const int64_t outcomes_max_;
  Probes& probes_;
  absl::flat_hash_map<OutcomeKey, Outcome> outcomes_;
  std::deque<Age> ages_;
  uint64_t remembered_ = 0;
};

}  // namespace needle::server
