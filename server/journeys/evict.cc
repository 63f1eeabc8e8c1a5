#include "server/journeys/evict.h"

#include <algorithm>
#include <string>

#include "proto/errors.h"
#include "server/holding.h"

namespace needle::server::evict {

absl::StatusOr<Evict::Reply> evict(State& state, const Evict& request) {
  if (request.set.value() >= state.sets.size()) {
    return make_error(ErrorCode::kNotFound, "pool set " + std::to_string(request.set.value()) + " does not exist");
  }
  PoolSet& set = state.set(request.set);
  Pool& paged = set.pool(PoolKind::kPaged);
  const int64_t free_before = paged.free_pages();
  if (!request.sequence.is_none()) {
    if (set.catalog->sequence(request.sequence) == nullptr) {
      return make_error(ErrorCode::kNotFound, "sequence " + std::to_string(request.sequence.value()) + " is not stored here");
    }
    set.catalog->drop_sequence(request.sequence);  // readers keep their leases: held pages drain
    state.probes.hit(Probe::sequence_evicted);
    return Evict::Reply{paged.free_pages() - free_before};
  }
  if (request.pages < 0) return make_error(ErrorCode::kInvalid, "pages is " + std::to_string(request.pages) + ", it must not be negative");
  while (paged.free_pages() - free_before < request.pages && set.catalog->evict_oldest()) {
  }
  return Evict::Reply{paged.free_pages() - free_before};
}

absl::StatusOr<Nothing> forget(State& state, const Forget& request) {
  const absl::StatusOr<Session*> live = live_session(state, request.session);
  if (!live.ok()) return live.status();
  const Outcome* outcome = state.outcomes.find({request.session, request.ticket.value(), OutcomeKey::kTicket});
  if (outcome == nullptr || outcome->kind != OutcomeKind::kSealed) {
    return make_error(ErrorCode::kStale, "ticket " + std::to_string(request.ticket.value()) + " made no sequence in this session lately");
  }
  const Lease* lease = state.leases.find(request.session, outcome->lease);
  if (lease == nullptr) {
    return make_error(ErrorCode::kStale, "the lease on what ticket " + std::to_string(request.ticket.value()) +
                                             " made has ended; forgetting comes before the release");
  }
  PoolSet& set = state.set(lease->set);
  const StoredSequence* stored = set.catalog->sequence(outcome->sequence);
  // Forgotten before, evicted, or replaced by a later sequence of that id: then there is nothing of ours to forget.
  if (stored == nullptr || !(stored->state == lease->table.state)) return Nothing{};
  set.catalog->drop_sequence(outcome->sequence);
  state.probes.hit(Probe::sequence_evicted);
  return Nothing{};
}

absl::StatusOr<ListSequences::Reply> list_sequences(State& state, const ListSequences& request) {
  if (request.set.value() >= state.sets.size()) {
    return make_error(ErrorCode::kNotFound, "pool set " + std::to_string(request.set.value()) + " does not exist");
  }
  if (request.count_max < 1 || request.count_max > state.options.pages_per_request_max) {
    return make_error(ErrorCode::kInvalid, "count_max is " + std::to_string(request.count_max) + ", allowed are 1 to " +
                                               std::to_string(state.options.pages_per_request_max));
  }
  PoolSet& set = state.set(request.set);
  ListSequences::Reply reply;
  reply.total = set.catalog->sequences();
  for (const StoredSequence* stored : set.catalog->latest_sequences(request.count_max)) {
    const int64_t pages = static_cast<int64_t>(stored->full.size() + stored->window.size()) + (stored->partial.index.is_none() ? 0 : 1) + 1;
    reply.rows.push_back({stored->sequence, stored->tokens, pages, set.pool(PoolKind::kState).info(stored->state.index).leases});
  }
  return reply;
}

absl::StatusOr<Nothing> drain(State& state) {
  state.stopping = true;
  return Nothing{};
}

bool drained(const State& state) {
  const bool nothing_pinned =
      std::all_of(state.sessions.all().begin(), state.sessions.all().end(), [](const auto& entry) { return entry.second->pins.empty(); });
  return state.stopping && state.tickets.size() == 0 && state.leases.size() == 0 && state.ships.size() == 0 && state.ships.parts.empty() &&
         nothing_pinned;
}

}  // namespace needle::server::evict
