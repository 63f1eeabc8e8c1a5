// Counters of what happened, one a rare or notable branch: metrics for operators, reachability for the simulator (a
// branch that no seed ever reaches is printed). Owned by the core's state; a plain increment on the loop thread.
//
// What must stay true:
//  1. A name here is the name in logs and in Snapshot::counters.
//  2. Probes never influence behaviour.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace needle::server {

#define NEEDLE_PROBES(X)        \
  X(session_attached)           \
  X(session_format_refused)     \
  X(session_silent)             \
  X(session_lost)               \
  X(session_acknowledged)       \
  X(session_died)               \
  X(session_reattached)         \
  X(session_held_page_stale)    \
  X(ghosts_gone)                \
  X(core_was_absent)            \
  X(stale_session_refused)      \
  X(ticket_reserved)            \
  X(ticket_repeated)            \
  X(ticket_sealed)              \
  X(ticket_forfeited)           \
  X(ticket_outcome_repeated)    \
  X(ticket_step_late)           \
  X(ticket_extended)            \
  X(ticket_truncated)           \
  X(outcome_forgotten_early)    \
  X(page_sealed)                \
  X(page_name_duplicate)        \
  X(page_evicted)               \
  X(page_drained)               \
  X(page_drained_then_freed)    \
  X(pages_refused)              \
  X(sequence_sealed)            \
  X(sequence_replaced)          \
  X(sequence_evicted)           \
  X(sequence_chain_broken)      \
  X(resume_point_sealed)        \
  X(resume_point_duplicate)     \
  X(resume_point_unplaced)      \
  X(resume_point_evicted)       \
  X(resume_point_hit)           \
  X(lookup_hit)                 \
  X(lookup_missed)              \
  X(lease_acquired)             \
  X(lease_released)             \
  X(lease_released_twice)       \
  X(lease_expired)              \
  X(lease_recheck_refused)      \
  X(adopt_moved)                \
  X(adopt_copied)               \
  X(ship_started)               \
  X(ship_sealed)                \
  X(ship_failed)                \
  X(ship_cancelled)             \
  X(ship_source_silent)         \
  X(ship_deadline_passed)       \
  X(ship_attempt_abandoned)     \
  X(ship_page_shared)           \
  X(ship_waited_for_pages)      \
  X(ship_checksum_differs)      \
  X(ship_fetch_failed)          \
  X(ship_fetch_timed_out)       \
  X(ship_late_completion)       \
  X(ship_message_dropped)       \
  X(ship_peer_restarted)        \
  X(ship_confirm_refused)       \
  X(ship_offered_open_sequence) \
  X(ship_offered_complete)      \
  X(ship_offer_refused)         \
  X(ship_asked_again)           \
  X(resize_applied)             \
  X(resize_deferred)            \
  X(resize_refused)             \
  X(resize_aborted)             \
  X(resize_chunk_grown)         \
  X(resize_chunk_shrunk)        \
  X(resize_waited_for_session)  \
  X(resize_subtree_evicted)     \
  X(chunk_allocation_failed)    \
  X(chunk_registration_failed)  \
  X(restart_rebuilt)            \
  X(restart_page_drained)       \
  X(restart_page_freed)         \
  X(restart_record_bad)         \
  X(restart_set_incomplete)     \
  X(restart_orphan_dropped)     \
  X(restart_sequence_kept)      \
  X(restart_resume_point_kept)  \
  X(unknown_event_dropped)

enum class Probe : uint16_t {
#define NEEDLE_PROBE_ENUM(name) name,
  NEEDLE_PROBES(NEEDLE_PROBE_ENUM)
#undef NEEDLE_PROBE_ENUM
      kCount
};

inline constexpr size_t kProbeCount = static_cast<size_t>(Probe::kCount);
inline constexpr std::array<const char*, kProbeCount> kProbeNames = {
#define NEEDLE_PROBE_NAME(name) #name,
    NEEDLE_PROBES(NEEDLE_PROBE_NAME)
#undef NEEDLE_PROBE_NAME
};

class Probes {
 public:
  void hit(Probe probe, uint64_t times = 1) { counts_[static_cast<size_t>(probe)] += times; }
  uint64_t count(Probe probe) const { return counts_[static_cast<size_t>(probe)]; }

 private:
  std::array<uint64_t, kProbeCount> counts_{};
};

}  // namespace needle::server
