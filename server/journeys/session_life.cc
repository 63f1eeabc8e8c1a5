#include "server/journeys/session_life.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "proto/errors.h"
#include "server/holding.h"
#include "server/journeys/resize.h"
#include "server/journeys/ship.h"

namespace needle::server::session_life {
namespace {

// Ends every right of a session. `fenced`: it promised, or is dead; nothing of it can touch memory any more.
void end_rights(State& state, Session& session, bool fenced) {
  for (TicketId wire : state.ships.of_session(session.id)) {
    ship::fail(state, wire, make_error(ErrorCode::kCancelled, "the session that asked for the ship ended"));
  }
  for (TicketId ticket : state.tickets.of_session(session.id)) forfeit_ticket(state, session.id, ticket, fenced);
  for (LeaseId lease : state.leases.of_session(session.id)) {
    close_lease(state, session.id, lease, fenced ? LeaseEnd::kReleased : LeaseEnd::kRevoked);
  }
}

// The session is over: nothing of it can touch memory.
void bury(State& state, SessionId id) {
  Session& session = *state.sessions.find(id);
  const bool was_ghost = session.standing == Standing::kGhost;
  const std::vector<Session::Pin> pins = std::move(session.pins);
  session.pins.clear();
  for (const Session::Pin& pin : pins) {
    state.pool(pin.page.pool).unpin(pin.page.page.index);
    state.probes.hit(Probe::page_drained_then_freed);
  }
  if (session.slot >= 0) state.region.clear_session(session.slot);
  resize::forget_session(state, id);
  state.sessions.erase(id);
  if (!was_ghost) return;
  const bool ghosts_left = std::any_of(state.sessions.all().begin(), state.sessions.all().end(),
                                       [](const auto& entry) { return entry.second->standing == Standing::kGhost; });
  if (ghosts_left) return;
  for (const PageRef& ref : state.ghost_pins) state.pool(ref.pool).unpin(ref.page.index);
  state.ghost_pins.clear();
  state.probes.hit(Probe::ghosts_gone);
}

void revoke(State& state, Session& session, const std::string& cause) {
  end_rights(state, session, /*fenced=*/session.is_remote());
  if (session.is_remote()) return bury(state, session.id);  // it maps nothing: time alone ends it
  session.standing = Standing::kRevoked;
  state.env.outbox.to_session(session.id, Revoked{cause});
}

// Sessions of the same process that a new one ends: the one it names, and those of its instance; live, revoked or ghosts.
std::vector<SessionId> earlier_sessions(const State& state, const Attach& request, PoolSetId set) {
  std::vector<SessionId> earlier;
  const ProcessIdentity& process = request.process;
  if (process.pid == 0) return earlier;
  for (const auto& [id, other] : state.sessions.all()) {
    const bool same_process = other->process.pid == process.pid && other->process.start_time_ticks == process.start_time_ticks;
    const bool same_instance = process.instance != 0 && other->process.instance == process.instance;
    if (same_process && (id == request.previous || (same_instance && other->set == set))) earlier.push_back(id);
  }
  return earlier;
}

int64_t silent_at_ns(const State& state, const Session& session) { return session.heard_ns + state.options.silence_ms * kNanosPerMilli; }

}  // namespace

absl::StatusOr<Attach::Reply> attach(State& state, const Attach& request) {
  if (absl::Status stopping = refuse_while_stopping(state); !stopping.ok()) return stopping;
  const auto named =
      std::find_if(state.sets.begin(), state.sets.end(), [&](const auto& set) { return set->options.name == request.pool_set; });
  if (named == state.sets.end()) {
    return make_error(ErrorCode::kNotFound, "no pool set is named '" + request.pool_set + "' here");
  }
  PoolSet& set = **named;
  if (request.format != set.options.format) {
    state.probes.hit(Probe::session_format_refused);
    return make_error(ErrorCode::kFormatMismatch, "pool set '" + request.pool_set + "' has page format\n  " + set.options.format +
                                                      "\nand the client has\n  " + request.format);
  }
  // Whoever comes back gives up a place with this call: after a restart all may be taken by ghosts, who wait for just that.
  const std::vector<SessionId> earlier = earlier_sessions(state, request, set.id);
  if (earlier.empty() && state.sessions.size() >= state.options.sessions_max) {
    return make_error(ErrorCode::kBusy, "all " + std::to_string(state.options.sessions_max) + " sessions are taken (sessions_max)",
                      state.options.retry_after_ms);
  }
  if (static_cast<int64_t>(request.held.size()) > state.options.pages_per_request_max) {
    return make_error(ErrorCode::kInvalid,
                      std::to_string(request.held.size()) + " held pages, at most " + std::to_string(state.options.pages_per_request_max));
  }
  if (!request.held.empty() && request.held_lease.is_none()) {
    return make_error(ErrorCode::kInvalid, "held pages need a lease id: draw a random one");
  }

  auto fresh = std::make_unique<Session>();
  fresh->id = SessionId(state.next_id());
  fresh->slot = request.process.pid == 0 ? -1 : state.sessions.free_slot();
  fresh->set = set.id;
  fresh->process = request.process;
  fresh->heard_ns = state.now_ns;
  Session& session = state.sessions.add(std::move(fresh));
  if (session.slot >= 0) {
    state.region.write_session(session.slot, {session.id.value(), session.process.pid, session.process.start_time_ticks,
                                              session.process.instance, set.id.value(), 0});
  }

  // The new lease first, then the earlier session's pins go: a held page is never without a holder in between.
  Attach::Reply reply;
  reply.session = session.id;
  reply.incarnation = state.incarnation;
  reply.heartbeat_ms = state.options.heartbeat_ms;
  for (const PageRef& ref : request.held) {
    const bool same_epoch = request.held_epoch.is_none() || request.held_epoch == state.epoch;
    const bool good = same_epoch && state.names_pool(ref.pool) && set_of(ref.pool) == set.id && state.pool(ref.pool).is_current(ref.page);
    if (good) reply.held.push_back(ref);
    if (!good) state.probes.hit(Probe::session_held_page_stale);
  }
  if (!reply.held.empty()) {
    open_lease(state, set, session, request.held_lease, reply.held);
    reply.held_lease = request.held_lease;
  }
  for (SessionId id : earlier) {
    end_rights(state, *state.sessions.find(id), /*fenced=*/true);
    bury(state, id);
    state.probes.hit(Probe::session_reattached);
  }
  reply.ended = earlier;

  for (int kind = 0; kind < kPoolKinds; ++kind) {
    const Pool& pool = *set.pools[static_cast<size_t>(kind)];
    PoolLayout& layout = reply.pools[static_cast<size_t>(kind)];
    layout.pool = pool.id();
    layout.epoch = state.epoch;
    layout.shape = pool.shape();
    for (int64_t chunk = 0; chunk < pool.shape().chunks_max; ++chunk) {
      const ChunkIndex index(static_cast<uint32_t>(chunk));
      if (pool.chunk(index).state != Pool::ChunkState::kAbsent && !resize::is_unmapping(set, static_cast<PoolKind>(kind), index)) {
        layout.chunks.push_back(index);
      }
    }
  }
  state.probes.hit(Probe::session_attached);
  return reply;
}

absl::StatusOr<Nothing> heartbeat(State& state, const Heartbeat& request) {
  const absl::StatusOr<Session*> live = live_session(state, request.session);
  if (!live.ok()) return live.status();
  if (!(*live)->is_remote()) return Nothing{};
  for (LeaseId id : state.leases.of_session(request.session)) {
    state.leases.renew(*state.leases.find(request.session, id), state.now_ns + state.options.lease_ms * kNanosPerMilli);
  }
  return Nothing{};
}

absl::StatusOr<Nothing> detach(State& state, const Detach& request) {
  const absl::StatusOr<Session*> live = live_session(state, request.session);
  if (!live.ok()) return live.status();
  end_rights(state, **live, /*fenced=*/true);
  bury(state, request.session);
  return Nothing{};
}

absl::StatusOr<Nothing> acknowledge(State& state, const Acknowledge& request) {
  Session* session = state.sessions.find(request.session);
  if (session == nullptr) {
    state.probes.hit(Probe::stale_session_refused);
    return make_error(ErrorCode::kStale, "session " + std::to_string(request.session.value()) + " is unknown here: attach anew");
  }
  end_rights(state, *session, /*fenced=*/true);
  bury(state, request.session);
  state.probes.hit(Probe::session_acknowledged);
  return Nothing{};
}

void lost(State& state, const SessionLost& event) {
  Session* session = state.sessions.find(event.session);
  if (session == nullptr || session->standing != Standing::kLive) {
    state.probes.hit(Probe::unknown_event_dropped);
    return;
  }
  revoke(state, *session, "the attach socket ended");
  state.probes.hit(Probe::session_lost);
}

void died(State& state, const ProcessDied& event) {
  Session* session = state.sessions.find(event.session);
  if (session == nullptr) {
    state.probes.hit(Probe::unknown_event_dropped);
    return;
  }
  end_rights(state, *session, /*fenced=*/true);
  bury(state, event.session);
  state.probes.hit(Probe::session_died);
}

void forgive(State& state, int64_t absent_ns) {
  for (const auto& [id, session] : state.sessions.all()) session->heard_ns += absent_ns;
}

void expire_silent(State& state) {
  std::vector<SessionId> silent;
  for (const auto& [id, session] : state.sessions.all()) {
    if (session->standing == Standing::kLive && silent_at_ns(state, *session) <= state.now_ns) silent.push_back(id);
  }
  for (SessionId id : silent) {
    state.probes.hit(Probe::session_silent);
    revoke(state, *state.sessions.find(id), "no heartbeat for " + std::to_string(state.options.silence_ms) + " ms");
  }
}

int64_t next_silence_ns(const State& state) {
  int64_t next = kNever;
  for (const auto& [id, session] : state.sessions.all()) {
    if (session->standing == Standing::kLive) next = std::min(next, silent_at_ns(state, *session));
  }
  return next;
}

}  // namespace needle::server::session_life
