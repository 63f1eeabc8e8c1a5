#include "server/journeys/adopt.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "proto/errors.h"
#include "server/holding.h"

namespace needle::server::adopt {
namespace {

Adopt::Reply first_reply(const Ticket& ticket) { return {ticket.view(), ticket.copies, ticket.lease_consumed}; }

// Whether this lease alone holds what would be moved.
bool sole_holder(PoolSet& set, const StoredSequence& stored) {
  const auto held_once = [&](PoolKind kind, PageId page) {
    const PageInfo& info = set.pool(kind).info(page.index);
    return info.leases == 1 && info.pins == 0;
  };
  if (!held_once(PoolKind::kState, stored.state)) return false;
  if (!stored.partial.index.is_none() && !held_once(PoolKind::kPaged, stored.partial)) return false;
  return std::all_of(stored.window.begin(), stored.window.end(), [&](PageId page) { return held_once(PoolKind::kWindow, page); });
}

}  // namespace

absl::StatusOr<Adopt::Reply> adopt(State& state, const Adopt& request) {
  const absl::StatusOr<Session*> live = live_session(state, request.session);
  if (!live.ok()) return live.status();
  const Session& session = **live;

  // Asked before?
  if (const Ticket* ticket = state.tickets.find(request.session, request.ticket)) {
    state.probes.hit(Probe::ticket_repeated);
    return first_reply(*ticket);
  }
  if (state.outcomes.find({request.session, request.ticket.value(), OutcomeKey::kTicket}) != nullptr) {
    return make_error(ErrorCode::kConsumed, "ticket " + std::to_string(request.ticket.value()) + " has ended");
  }
  if (absl::Status taken = check_no_ship(state, request.session, request.ticket); !taken.ok()) return taken;

  // May it be had at all?
  if (absl::Status stopping = refuse_while_stopping(state); !stopping.ok()) return stopping;
  if (request.ticket.is_none() || request.sequence.is_none()) {
    return make_error(ErrorCode::kInvalid, "ticket and sequence ids must not be 0: draw random ones");
  }
  Lease* lease = state.leases.find(request.session, request.lease);
  if (lease == nullptr) {
    return make_error(ErrorCode::kStale, "lease " + std::to_string(request.lease.value()) + " is not open: acquire anew");
  }
  if (session.is_remote()) return make_error(ErrorCode::kWrongOwner, "a remote client cannot write here: ship to its own daemon");
  if (lease->sequence.is_none()) {
    return make_error(ErrorCode::kInvalid, "the lease is on a bare prefix: reserve with the same names goes on from it");
  }
  PoolSet& set = state.set(lease->set);
  const int64_t pages_max = state.options.pages_per_request_max;
  if (request.tokens < lease->table.tokens || request.tokens > pages_max * set.page_tokens()) {
    return make_error(ErrorCode::kInvalid, "tokens is " + std::to_string(request.tokens) + ", allowed are " +
                                               std::to_string(lease->table.tokens) + " (the sequence) to " +
                                               std::to_string(pages_max * set.page_tokens()));
  }
  if (state.tickets.writer_of(set.id, request.sequence) != nullptr) {
    return make_error(ErrorCode::kConflict, "sequence " + std::to_string(request.sequence.value()) + " is being written: end that first",
                      state.options.retry_after_ms);
  }
  if (state.tickets.size() >= state.options.tickets_max) {
    return make_error(ErrorCode::kBusy, "all tickets are open (tickets_max): retry", state.options.retry_after_ms);
  }

  // The lease may outlive the catalog's entry (replaced by a later sequence of that id): then there is nothing to move.
  const PageTable table = lease->table;
  const StoredSequence* stored = set.catalog->sequence(lease->sequence);
  const bool listed = stored != nullptr && stored->state == table.state;
  const bool moves = listed && sole_holder(set, *stored);
  const int64_t full_pages = table.tokens / set.page_tokens();
  const bool has_partial = table.tokens % set.page_tokens() != 0;

  Wanted wanted;
  wanted.paged = div_ceil(request.tokens, set.page_tokens()) - full_pages - (moves && has_partial ? 1 : 0);
  wanted.window = set.window_ring() - (moves ? static_cast<int64_t>(table.window.size()) : 0);
  wanted.state = moves ? 0 : 1;
  const absl::StatusOr<Reserved> own = reserve_pages(state, set, wanted, owner_slot(session));
  if (!own.ok()) return own.status();

  auto ticket = std::make_unique<Ticket>();
  ticket->session = request.session;
  ticket->id = request.ticket;
  ticket->set = set.id;
  ticket->sequence = request.sequence;
  ticket->paged.assign(table.paged.begin(), table.paged.begin() + full_pages);
  ticket->pages_shared = ticket->pages_sealed = full_pages;
  ticket->tokens_published = ticket->matched_tokens = ticket->resume_tokens = table.tokens;
  ticket->tokens_reserved = request.tokens;
  for (const PageId& page : ticket->paged) ticket->names.push_back(set.pool(PoolKind::kPaged).records().name(page.index));
  append(ticket->leased, set.id, PoolKind::kPaged, ticket->paged);
  lease_all(state, ticket->leased);

  // Window pages keep their place in the ring; the free places get the new pages.
  const auto [first_block, last_block] = set.window_blocks(table.tokens);
  ticket->window.resize(static_cast<size_t>(set.window_ring()));
  const auto ring_at = [&](int64_t block) -> PageId& { return ticket->window[static_cast<size_t>(block) % ticket->window.size()]; };
  size_t paged_taken = 0;
  size_t window_taken = 0;
  if (moves) {
    const uint16_t owner = owner_slot(session);
    close_lease(state, request.session, request.lease, LeaseEnd::kReleased);
    const StoredSequence taken = set.catalog->take_sequence(stored->sequence);
    ticket->state = set.pool(PoolKind::kState).reopen(taken.state, owner);  // the commit is undone first
    for (int64_t block = first_block; block < last_block; ++block) {
      ring_at(block) = set.pool(PoolKind::kWindow).reopen(taken.window[static_cast<size_t>(block - first_block)], owner);
    }
    if (has_partial) ticket->paged.push_back(set.pool(PoolKind::kPaged).reopen(taken.partial, owner));
    ticket->lease_consumed = true;
    state.probes.hit(Probe::adopt_moved);
  } else {
    const auto copy = [&](PoolKind kind, PageId from, PageId to) {
      ticket->copies.push_back({{pool_id(set.id, kind), from}, {pool_id(set.id, kind), to}});
    };
    ticket->state = own->state[0];
    copy(PoolKind::kState, table.state, ticket->state);
    for (int64_t block = first_block; block < last_block; ++block) {
      ring_at(block) = own->window[window_taken++];
      copy(PoolKind::kWindow, table.window[static_cast<size_t>(block - first_block)], ring_at(block));
    }
    if (has_partial) {
      ticket->paged.push_back(own->paged[paged_taken++]);
      copy(PoolKind::kPaged, table.paged.back(), ticket->paged.back());
    }
    state.probes.hit(Probe::adopt_copied);
  }
  for (PageId& page : ticket->window) {
    if (page.index.is_none()) page = own->window[window_taken++];
  }
  ticket->paged.insert(ticket->paged.end(), own->paged.begin() + static_cast<int64_t>(paged_taken), own->paged.end());
  NEEDLE_CHECK(window_taken == own->window.size(), "every reserved window page has a place in the ring");
  return first_reply(state.tickets.open(std::move(ticket)));
}

}  // namespace needle::server::adopt
