#include "server/journeys/read.h"

#include <algorithm>
#include <string>
#include <utility>

#include "proto/errors.h"
#include "server/holding.h"

namespace needle::server::read {
namespace {

absl::Status ended(State& state, SessionId session, LeaseId id) {
  const Outcome* outcome = state.outcomes.find({session, id.value(), OutcomeKey::kLease});
  const std::string lease = "lease " + std::to_string(id.value());
  if (outcome == nullptr) return make_error(ErrorCode::kStale, lease + " is unknown here: acquire anew");
  switch (outcome->kind) {
    case OutcomeKind::kExpired: return make_error(ErrorCode::kLeaseExpired, lease + " ran out: what was read under it must not be used");
    case OutcomeKind::kRevoked: return make_error(ErrorCode::kStale, lease + " was revoked with its session");
    default: return make_error(ErrorCode::kConsumed, lease + " has ended: released, or consumed by an adopt");
  }
}

}  // namespace

PageTable table_of(const StoredSequence& stored) {
  PageTable table{stored.tokens, stored.full, stored.window, stored.state};
  if (!stored.partial.index.is_none()) table.paged.push_back(stored.partial);
  return table;
}

const StoredSequence* whole_sequence(State& state, PoolSet& set, SequenceId sequence) {
  const StoredSequence* stored = set.catalog->sequence(sequence);
  if (stored == nullptr) return nullptr;
  const Pool& paged = set.pool(PoolKind::kPaged);
  // Under the default eviction a sequence keeps its pages; the reference policy may take them from its head.
  const bool whole = std::all_of(stored->full.begin(), stored->full.end(), [&](PageId page) { return paged.is_current(page); });
  if (whole) return stored;
  set.catalog->drop_sequence(sequence);
  state.probes.hit(Probe::sequence_chain_broken);
  return nullptr;
}

absl::StatusOr<Lookup::Reply> lookup(State& state, const Lookup& request) {
  const absl::StatusOr<Session*> live = live_session(state, request.session);
  if (!live.ok()) return live.status();
  PoolSet& set = state.set((*live)->set);
  const Match match = set.catalog->match(request.names);
  state.probes.hit(match.pages.empty() ? Probe::lookup_missed : Probe::lookup_hit);
  return Lookup::Reply{static_cast<int64_t>(match.pages.size()) * set.page_tokens(), match.resume_pages * set.page_tokens()};
}

absl::StatusOr<Acquire::Reply> acquire(State& state, const Acquire& request) {
  const absl::StatusOr<Session*> live = live_session(state, request.session);
  if (!live.ok()) return live.status();
  const Session& session = **live;
  PoolSet& set = state.set(session.set);
  const int64_t renew_ms = state.options.heartbeat_ms;

  // Asked before?
  if (const Lease* lease = state.leases.find(request.session, request.lease)) {
    return Acquire::Reply{lease->id, lease->table, renew_ms};
  }
  if (state.outcomes.find({request.session, request.lease.value(), OutcomeKey::kLease}) != nullptr) {
    return ended(state, request.session, request.lease);
  }
  if (request.lease.is_none()) return make_error(ErrorCode::kInvalid, "the lease id must not be 0: draw a random one");
  if (absl::Status stopping = refuse_while_stopping(state); !stopping.ok()) return stopping;
  if (state.leases.size() >= state.options.leases_max) {
    return make_error(ErrorCode::kBusy, "all " + std::to_string(state.options.leases_max) + " leases are open (leases_max): retry",
                      state.options.retry_after_ms);
  }

  PageTable table;
  if (!request.sequence.is_none()) {
    const StoredSequence* stored = whole_sequence(state, set, request.sequence);
    if (stored == nullptr) {
      return make_error(ErrorCode::kNotFound, "sequence " + std::to_string(request.sequence.value()) + " is not stored here");
    }
    table = table_of(*stored);
    set.catalog->touch_sequence(request.sequence);
  } else {
    const Match match = set.catalog->match(request.names);
    if (match.resume == nullptr) {
      return make_error(ErrorCode::kNotFound,
                        "no stored prefix of the " + std::to_string(request.names.size()) + " named pages ends at a resume point");
    }
    table.tokens = match.resume_pages * set.page_tokens();
    table.paged.assign(match.pages.begin(), match.pages.begin() + match.resume_pages);
    table.window = match.resume->window;
    table.state = match.resume->state;
    set.catalog->hit_resume_point(match.resume->boundary.index);
    set.catalog->touch(table.paged);
    state.probes.hit(Probe::resume_point_hit);
  }
  const Lease& lease = open_lease(state, set, session, request.lease, request.sequence, std::move(table));
  return Acquire::Reply{lease.id, lease.table, renew_ms};
}

absl::StatusOr<Nothing> recheck(State& state, const Recheck& request) {
  const absl::StatusOr<Session*> live = live_session(state, request.session);
  if (!live.ok()) return live.status();
  const Lease* lease = state.leases.find(request.session, request.lease);
  if (lease == nullptr || lease->expires_ns <= state.now_ns) {
    state.probes.hit(Probe::lease_recheck_refused);
    if (lease != nullptr) close_lease(state, request.session, request.lease, LeaseEnd::kExpired);
    return ended(state, request.session, request.lease);
  }
  for (const PageRef& ref : request.pages) {
    const bool held = std::find(lease->pages.begin(), lease->pages.end(), ref) != lease->pages.end();
    if (held) continue;
    state.probes.hit(Probe::lease_recheck_refused);
    return make_error(ErrorCode::kStale, "page " + std::to_string(ref.page.index.value()) + " generation " +
                                             std::to_string(ref.page.generation.value()) + " is not under lease " +
                                             std::to_string(request.lease.value()));
  }
  return Nothing{};
}

absl::StatusOr<Nothing> release(State& state, const Release& request) {
  const absl::StatusOr<Session*> live = live_session(state, request.session);
  if (!live.ok()) return live.status();
  if (state.leases.find(request.session, request.lease) == nullptr) {
    state.probes.hit(Probe::lease_released_twice);
    const absl::Status refused = ended(state, request.session, request.lease);
    // Given up before it was granted: a copy of the acquire that is still on its way must not open it.
    state.outcomes.remember({request.session, request.lease.value(), OutcomeKey::kLease},
                            {OutcomeKind::kReleased, SequenceId(), request.lease, TicketId(), {}}, state.now_ns);
    return refused;
  }
  close_lease(state, request.session, request.lease, LeaseEnd::kReleased);
  state.probes.hit(Probe::lease_released);
  return Nothing{};
}

void expire_leases(State& state) {
  while (state.leases.next_expiry_ns() <= state.now_ns) {
    const auto [session, id] = state.leases.next_to_expire();
    close_lease(state, session, id, LeaseEnd::kExpired);
  }
}

}  // namespace needle::server::read
