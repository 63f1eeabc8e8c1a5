#include "server/holding.h"

#include <string>
#include <utility>

#include "base/check.h"
#include "proto/errors.h"

namespace needle::server {

absl::StatusOr<Session*> live_session(State& state, SessionId id) {
  Session* session = state.sessions.find(id);
  if (session == nullptr || session->standing != Standing::kLive) {
    state.probes.hit(Probe::stale_session_refused);
    return make_error(ErrorCode::kStale,
                      "session " + std::to_string(id.value()) +
                          (session == nullptr ? " is unknown here: attach again" : " was revoked: acknowledge, then attach again"));
  }
  session->heard_ns = state.now_ns;
  return session;
}

absl::Status refuse_while_stopping(const State& state) {
  if (!state.stopping) return absl::OkStatus();
  return make_error(ErrorCode::kStopping, "this daemon is draining and takes nothing new: use another");
}

absl::Status out_of_pages(State& state, PoolKind kind, int64_t wanted) {
  state.probes.hit(Probe::pages_refused);
  return make_error(ErrorCode::kOutOfPages,
                    std::to_string(wanted) + " pages wanted of the " + kPoolKindNames[static_cast<size_t>(kind)] +
                        " pool, and fewer are free or idle: retry, or release leases and tickets",
                    state.options.retry_after_ms);
}

void append(std::vector<PageRef>& to, PoolSetId set, PoolKind kind, const std::vector<PageId>& pages) {
  for (const PageId& page : pages) to.push_back({pool_id(set, kind), page});
}

void append(std::vector<PageRef>& to, PoolSetId set, PoolKind kind, PageId page) {
  if (!page.index.is_none()) to.push_back({pool_id(set, kind), page});
}

std::vector<PageRef> refs(PoolSetId set, PoolKind kind, const std::vector<PageId>& pages) {
  std::vector<PageRef> made;
  append(made, set, kind, pages);
  return made;
}

absl::StatusOr<Reserved> reserve_pages(State& state, PoolSet& set, const Wanted& wanted, uint16_t owner) {
  Reserved reserved;
  struct Part {
    PoolKind kind;
    int64_t count;
    std::vector<PageId>& pages;
  };
  const std::array<Part, kPoolKinds> parts = {Part{PoolKind::kPaged, wanted.paged, reserved.paged},
                                              Part{PoolKind::kWindow, wanted.window, reserved.window},
                                              Part{PoolKind::kState, wanted.state, reserved.state}};
  for (const Part& part : parts) {
    if (part.count == 0) continue;
    if (set.catalog->make_room(part.kind, part.count) && set.pool(part.kind).reserve(part.count, owner, part.pages)) continue;
    for (const Part& taken : parts) {
      for (const PageId& page : taken.pages) set.pool(taken.kind).free(page);
    }
    return out_of_pages(state, part.kind, part.count);
  }
  return reserved;
}

void lease_all(State& state, const std::vector<PageRef>& pages) {
  for (const PageRef& ref : pages) state.pool(ref.pool).lease(ref.page.index);
}

void unlease_all(State& state, const std::vector<PageRef>& pages) {
  // From the end of the sequence inwards, so that leaves become idle before what they continue.
  for (auto ref = pages.rbegin(); ref != pages.rend(); ++ref) state.pool(ref->pool).unlease(ref->page.index);
}

absl::Status check_lease_id_unused(const State& state, SessionId session, LeaseId id) {
  if (id.is_none()) return absl::OkStatus();
  const bool open = state.leases.all().contains(Leases::Key(session, id));
  if (!open && state.outcomes.find({session, id.value(), OutcomeKey::kLease}) == nullptr) return absl::OkStatus();
  return make_error(ErrorCode::kConflict, "lease id " + std::to_string(id.value()) + " was used before: draw another");
}

absl::Status check_no_ship(State& state, SessionId session, TicketId id) {
  if (state.ships.find(session, id) == nullptr) return absl::OkStatus();
  return make_error(ErrorCode::kConflict,
                    "ticket " + std::to_string(id.value()) + " is a ship that is under way: wait for it or cancel it");
}

namespace {

Lease& open(State& state, const PoolSet& set, const Session& session, std::unique_ptr<Lease> lease) {
  lease->session = session.id;
  lease->set = set.id;
  if (session.is_remote()) lease->expires_ns = state.now_ns + state.options.lease_ms * kNanosPerMilli;
  lease_all(state, lease->pages);
  state.probes.hit(Probe::lease_acquired);
  return state.leases.open(std::move(lease));
}

}  // namespace

Lease& open_lease(State& state, PoolSet& set, const Session& session, LeaseId id, SequenceId sequence, PageTable table) {
  auto lease = std::make_unique<Lease>();
  lease->id = id;
  lease->sequence = sequence;
  append(lease->pages, set.id, PoolKind::kPaged, table.paged);
  append(lease->pages, set.id, PoolKind::kWindow, table.window);
  append(lease->pages, set.id, PoolKind::kState, table.state);
  lease->table = std::move(table);
  return open(state, set, session, std::move(lease));
}

Lease& open_lease(State& state, PoolSet& set, const Session& session, LeaseId id, std::vector<PageRef> pages) {
  auto lease = std::make_unique<Lease>();
  lease->id = id;
  lease->pages = std::move(pages);
  return open(state, set, session, std::move(lease));
}

void close_lease(State& state, SessionId session, LeaseId id, LeaseEnd end) {
  const std::unique_ptr<Lease> lease = state.leases.close(session, id);
  Session* holder = state.sessions.find(session);
  if (end == LeaseEnd::kRevoked && holder != nullptr && !holder->is_remote()) {
    for (const PageRef& ref : lease->pages) {
      state.pool(ref.pool).pin(ref.page.index);
      holder->pins.push_back({ref, TicketId()});
    }
  }
  unlease_all(state, lease->pages);
  OutcomeKind kind = OutcomeKind::kReleased;
  if (end == LeaseEnd::kExpired) {
    kind = OutcomeKind::kExpired;
    state.probes.hit(Probe::lease_expired);
  }
  if (end == LeaseEnd::kRevoked) kind = OutcomeKind::kRevoked;
  if (!session.is_none()) {
    state.outcomes.remember({session, id.value(), OutcomeKey::kLease}, {kind, lease->sequence, id, TicketId(), {}}, state.now_ns);
  }
}

void forfeit_ticket(State& state, SessionId session, TicketId id, bool fenced) {
  const std::unique_ptr<Ticket> ticket = state.tickets.close(session, id);
  Session* holder = state.sessions.find(session);
  NEEDLE_CHECK(holder != nullptr, "an open ticket has a session");

  std::vector<PageRef> own;
  append(own, ticket->set, PoolKind::kPaged, std::vector<PageId>(ticket->paged.begin() + ticket->pages_sealed, ticket->paged.end()));
  append(own, ticket->set, PoolKind::kPaged, ticket->duplicates);
  append(own, ticket->set, PoolKind::kWindow, ticket->window);
  append(own, ticket->set, PoolKind::kState, ticket->state);
  for (const ResumeSlot& slot : ticket->resume_slots) {
    append(own, ticket->set, PoolKind::kWindow, slot.window);
    append(own, ticket->set, PoolKind::kState, slot.state);
  }
  for (const PageRef& ref : own) {
    Pool& pool = state.pool(ref.pool);
    if (fenced) {
      pool.free(ref.page);
      continue;
    }
    pool.pin(ref.page.index);
    holder->pins.push_back({ref, id});
    pool.drain(ref.page);
    state.probes.hit(Probe::page_drained);
  }
  if (!fenced) {
    for (const PageRef& ref : ticket->leased) {
      state.pool(ref.pool).pin(ref.page.index);
      holder->pins.push_back({ref, id});
    }
  }
  unlease_all(state, ticket->leased);
  state.outcomes.remember({session, id.value(), OutcomeKey::kTicket}, {OutcomeKind::kForfeited, ticket->sequence, LeaseId(), id, {}},
                          state.now_ns);
  state.outcomes.remember({SessionId(), ticket->sequence.value(), OutcomeKey::kSequence},
                          {OutcomeKind::kSequenceForfeited, ticket->sequence, LeaseId(), id, {}}, state.now_ns);
  state.probes.hit(Probe::ticket_forfeited);
}

uint16_t owner_slot(const Session& session) { return session.slot < 0 ? kOwnerDaemon : static_cast<uint16_t>(session.slot); }

}  // namespace needle::server
