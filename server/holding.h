// How rights and pages change hands: the few moves that several journeys share.
//
// What must stay true:
//  1. A page that loses its last right while its bytes may still be touched is pinned before the right goes.
//  2. "Fenced" is a promise of the owner that none of its launches can touch the pages any more. Without it, pages drain.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/state.h"

namespace needle::server {

// The session, if it may ask; asking counts as a heartbeat. STALE when unknown, revoked, or of an earlier incarnation.
absl::StatusOr<Session*> live_session(State& state, SessionId id);

absl::Status refuse_while_stopping(const State& state);
absl::Status out_of_pages(State& state, PoolKind kind, int64_t wanted);

std::vector<PageRef> refs(PoolSetId set, PoolKind kind, const std::vector<PageId>& pages);
void append(std::vector<PageRef>& to, PoolSetId set, PoolKind kind, const std::vector<PageId>& pages);
void append(std::vector<PageRef>& to, PoolSetId set, PoolKind kind, PageId page);  // unless none

// Reserves in all three pools, evicting what is idle, or in none.
struct Wanted {
  int64_t paged = 0;
  int64_t window = 0;
  int64_t state = 0;
};
struct Reserved {
  std::vector<PageId> paged;
  std::vector<PageId> window;
  std::vector<PageId> state;
};
absl::StatusOr<Reserved> reserve_pages(State& state, PoolSet& set, const Wanted& wanted, uint16_t owner);

void lease_all(State& state, const std::vector<PageRef>& pages);
void unlease_all(State& state, const std::vector<PageRef>& pages);

// CONFLICT when the id names an open lease or one that is remembered; OK when it is none.
absl::Status check_lease_id_unused(const State& state, SessionId session, LeaseId id);

// CONFLICT when the id names an open ship; OK when a ticket may be opened or ended under it as far as ships are concerned.
absl::Status check_no_ship(State& state, SessionId session, TicketId id);

// Opens a lease for a session over the pages of `table`, or over `pages` where they are no sequence's.
Lease& open_lease(State& state, PoolSet& set, const Session& session, LeaseId id, SequenceId sequence, PageTable table);
Lease& open_lease(State& state, PoolSet& set, const Session& session, LeaseId id, std::vector<PageRef> pages);
// Ends a lease; a local reader that made no promise keeps its pages pinned.
enum class LeaseEnd : uint8_t { kReleased, kExpired, kRevoked };
void close_lease(State& state, SessionId session, LeaseId id, LeaseEnd end);

// Ends a ticket without sealing its sequence. What it sealed singly stays stored.
void forfeit_ticket(State& state, SessionId session, TicketId id, bool fenced);

uint16_t owner_slot(const Session& session);

}  // namespace needle::server
