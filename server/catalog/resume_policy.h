// Which resume points and sequences are worth their window and state pages: pure functions of what is known about them.
//
// What must stay true:
//  1. A decision depends on its arguments alone; held sets are never offered.
//  2. A boundary where sequences were seen to branch, or that was resumed from, outlives one that never was: a branch
//     point serves every later sequence with that prefix, the end of a prefill chunk at most a retry.
#pragma once

#include <cstdint>
#include <optional>

#include "server/catalog/eviction_policy.h"

namespace needle::server {

struct ResumeFacts {
  uint32_t last_use = 0;
  uint32_t hits = 0;
  bool branch = false;  // made where a second sequence left the first
};

// Whether `a` should go before `b`.
constexpr bool worth_less(const ResumeFacts& a, const ResumeFacts& b) {
  const bool a_proven = a.branch || a.hits > 0;
  const bool b_proven = b.branch || b.hits > 0;
  if (a_proven != b_proven) return b_proven;
  return used_before(a.last_use, b.last_use);
}

enum class SetVictim : uint8_t { kNone, kResumePoint, kSequence };

// Under pressure on window or state pages: the older goes. A resume point goes first at equal age, because losing it
// costs a recomputation and losing a sequence costs a conversation's tail as well.
constexpr SetVictim choose_set_victim(std::optional<uint32_t> resume_last_use, std::optional<uint32_t> sequence_last_use) {
  if (!resume_last_use.has_value()) return sequence_last_use.has_value() ? SetVictim::kSequence : SetVictim::kNone;
  if (!sequence_last_use.has_value()) return SetVictim::kResumePoint;
  return used_before(*sequence_last_use, *resume_last_use) ? SetVictim::kSequence : SetVictim::kResumePoint;
}

// A new resume point is made at these boundaries: those the engine asked for (ends of prefill chunks, last full page of
// prompt and answer), and the boundary up to which another sequence's pages matched when no resume point reached it.
constexpr bool branch_seen(int64_t matched_tokens, int64_t resume_tokens) { return matched_tokens > resume_tokens; }

}  // namespace needle::server
