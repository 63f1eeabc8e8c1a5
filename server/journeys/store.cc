#include "server/journeys/store.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "base/check.h"
#include "proto/errors.h"
#include "server/holding.h"

namespace needle::server::store {
namespace {

// More boundaries than this in one request is a mistake, not a plan: one a prefill chunk, and chunks have thousands of tokens.
constexpr int64_t kResumeSlotsMax = 256;

absl::Status invalid(const std::string& what) { return make_error(ErrorCode::kInvalid, what); }
std::string text(int64_t value) { return std::to_string(value); }

// An open ticket of a live session; else what became of it.
absl::StatusOr<Ticket*> open_ticket(State& state, SessionId session, TicketId id) {
  const absl::StatusOr<Session*> live = live_session(state, session);
  if (!live.ok()) return live.status();
  if (Ticket* ticket = state.tickets.find(session, id)) return ticket;
  const Outcome* outcome = state.outcomes.find({session, id.value(), OutcomeKey::kTicket});
  if (outcome == nullptr) {
    return make_error(ErrorCode::kStale, "ticket " + std::to_string(id.value()) + " is unknown here: reserve anew");
  }
  state.probes.hit(Probe::ticket_outcome_repeated);
  return make_error(ErrorCode::kConsumed, "ticket " + std::to_string(id.value()) + " has ended, " +
                                              (outcome->kind == OutcomeKind::kSealed ? "sealed" : "forfeited"));
}

// Whether a step is new. A repeat and a late one are answered with the ticket as it is.
bool is_new_step(State& state, const Ticket& ticket, uint64_t step) {
  if (step > ticket.step) return true;
  state.probes.hit(step == ticket.step ? Probe::ticket_repeated : Probe::ticket_step_late);
  return false;
}

Reserve::Reply first_reply(const Ticket& ticket) {
  Reserve::Reply reply;
  reply.view = ticket.view();
  reply.matched_tokens = ticket.matched_tokens;
  reply.resume_tokens = ticket.resume_tokens;
  reply.resume_window = ticket.resume_window;
  reply.resume_state = ticket.resume_state;
  reply.resume_slots = ticket.resume_slots_first;
  return reply;
}

absl::Status check_reserve(const State& state, const PoolSet& set, const Reserve& request) {
  const int64_t page = set.page_tokens();
  if (request.ticket.is_none() || request.sequence.is_none()) return invalid("ticket and sequence ids must not be 0: draw random ones");
  if (request.tokens <= 0 || request.tokens > state.options.pages_per_request_max * page) {
    return invalid("tokens is " + text(request.tokens) + ", allowed are 1 to " + text(state.options.pages_per_request_max * page) +
                   ": reserve less and extend");
  }
  if (static_cast<int64_t>(request.names.size()) > request.tokens / page) {
    return invalid(text(static_cast<int64_t>(request.names.size())) + " names for " + text(request.tokens / page) +
                   " full pages: partial pages are never named");
  }
  if (std::any_of(request.names.begin(), request.names.end(), [](const PageName& name) { return name.is_none(); })) {
    return invalid("a page name is zero: names are hashes");
  }
  if (static_cast<int64_t>(request.resume_tokens_wanted.size()) > kResumeSlotsMax) {
    return invalid(text(static_cast<int64_t>(request.resume_tokens_wanted.size())) + " resume points wanted, at most " +
                   text(kResumeSlotsMax) + " a request");
  }
  for (int64_t tokens : request.resume_tokens_wanted) {
    if (tokens <= 0 || tokens % page != 0 || tokens > request.tokens) {
      return invalid("a resume point at " + text(tokens) + " tokens is wanted: it must be a page boundary (a multiple of " + text(page) +
                     ") within the " + text(request.tokens) + " tokens reserved");
    }
  }
  return absl::OkStatus();
}

// Pages to write resume points into: where asked, and where this sequence is seen to leave another's path. Best effort.
void place_resume_slots(State& state, PoolSet& set, Ticket& ticket, const Reserve& request, uint16_t owner) {
  std::set<int64_t> wanted(request.resume_tokens_wanted.begin(), request.resume_tokens_wanted.end());
  if (branch_seen(ticket.matched_tokens, ticket.resume_tokens)) wanted.insert(ticket.matched_tokens);
  for (int64_t tokens : wanted) {
    if (tokens <= ticket.resume_tokens) continue;  // the engine doesn't recompute what lies before
    const auto [first, last] = set.window_blocks(tokens);
    const absl::StatusOr<Reserved> pages = reserve_pages(state, set, {.paged = 0, .window = last - first, .state = 1}, owner);
    if (!pages.ok()) {
      state.probes.hit(Probe::resume_point_unplaced);
      continue;
    }
    ticket.resume_slots.push_back({tokens, pages->window, pages->state[0]});
  }
  ticket.resume_slots_first = ticket.resume_slots;
}

// Seals the pages of `seals` at the next positions. Everything was checked.
void seal_next_pages(State& state, PoolSet& set, Ticket& ticket, const std::vector<FullPageSeal>& seals) {
  for (const FullPageSeal& seal : seals) {
    const size_t position = static_cast<size_t>(ticket.pages_sealed);
    const PageId parent = position == 0 ? PageId{} : ticket.paged[position - 1];
    const PageIndex stored = set.catalog->find(seal.name);
    if (stored.is_none()) {
      seal_full_page(set, ticket.paged[position], seal.name, parent, ticket.sequence, (ticket.pages_sealed + 1) * set.page_tokens(),
                     seal.checksum);
      state.probes.hit(Probe::page_sealed);
    } else {
      ticket.duplicates.push_back(ticket.paged[position]);
      ticket.paged[position] = set.pool(PoolKind::kPaged).id_of(stored);
      state.probes.hit(Probe::page_name_duplicate);
    }
    ticket.leased.push_back({pool_id(set.id, PoolKind::kPaged), ticket.paged[position]});
    set.pool(PoolKind::kPaged).lease(ticket.paged[position].index);
    ++ticket.pages_sealed;
    if (ticket.names.size() <= position) ticket.names.push_back(seal.name);
  }
}

absl::Status check_seals(const PoolSet& set, const Ticket& ticket, const std::vector<FullPageSeal>& seals, int64_t tokens) {
  const int64_t after = ticket.pages_sealed + static_cast<int64_t>(seals.size());
  if (after * set.page_tokens() > tokens) {
    return invalid("page " + text(after - 1) + " is to be sealed, and only " + text(tokens) +
                   " tokens are published: publish first, and seal full pages only");
  }
  for (size_t i = 0; i < seals.size(); ++i) {
    const size_t position = static_cast<size_t>(ticket.pages_sealed) + i;
    if (seals[i].name.is_none()) return invalid("the name of page " + text(static_cast<int64_t>(position)) + " is zero: names are hashes");
    if (position < ticket.names.size() && ticket.names[position] != seals[i].name) {
      return invalid("page " + text(static_cast<int64_t>(position)) + " was reserved under another name");
    }
  }
  return absl::OkStatus();
}

}  // namespace

void seal_full_page(PoolSet& set, PageId page, const PageName& name, PageId parent, SequenceId sequence, int64_t tokens_end,
                    uint64_t checksum) {
  PageRecord record;
  record.name = name;
  record.sequence = sequence;
  record.checksum = checksum;
  record.parent = parent;
  record.tokens_end = static_cast<uint32_t>(tokens_end);
  record.role_bits = PageRecord::bits(PageRole::kNamed);
  set.pool(PoolKind::kPaged).seal(page, record);
  set.catalog->insert_page(page, parent);
}

void seal_sequence(State& state, PoolSet& set, const SequenceParts& parts) {
  if (set.catalog->sequence(parts.sequence) != nullptr) {
    set.catalog->drop_sequence(parts.sequence);
    state.probes.hit(Probe::sequence_replaced);
  }
  PageRecord record;
  record.sequence = parts.sequence;
  record.tokens_end = static_cast<uint32_t>(parts.tokens);
  if (!parts.full.empty()) {
    record.parent = parts.full.back();
    record.name = set.pool(PoolKind::kPaged).records().name(parts.full.back().index);
  }
  if (!parts.partial.index.is_none()) {
    record.role_bits = PageRecord::bits(PageRole::kSequenceMember, kPartialOrdinal);
    record.checksum = parts.partial_checksum;
    set.pool(PoolKind::kPaged).seal(parts.partial, record);
  }
  for (size_t i = 0; i < parts.window.size(); ++i) {
    record.role_bits = PageRecord::bits(PageRole::kSequenceMember, static_cast<uint16_t>(i));
    record.checksum = parts.window_checksums[i];
    set.pool(PoolKind::kWindow).seal(parts.window[i], record);
  }
  record.role_bits = PageRecord::bits(PageRole::kSequenceCommit, static_cast<uint16_t>(parts.window.size()));
  record.checksum = parts.state_checksum;
  set.pool(PoolKind::kState).seal(parts.state, record);
  state.outcomes.erase_sequence(parts.sequence);

  StoredSequence stored;
  stored.sequence = parts.sequence;
  stored.tokens = parts.tokens;
  stored.full = parts.full;
  stored.partial = parts.partial;
  stored.window = parts.window;
  stored.state = parts.state;
  set.catalog->insert_sequence(std::move(stored));
}

absl::StatusOr<Reserve::Reply> reserve(State& state, const Reserve& request) {
  const absl::StatusOr<Session*> live = live_session(state, request.session);
  if (!live.ok()) return live.status();
  Session& session = **live;
  PoolSet& set = state.set(session.set);

  // Asked before?
  if (const Ticket* ticket = state.tickets.find(request.session, request.ticket)) {
    state.probes.hit(Probe::ticket_repeated);
    return first_reply(*ticket);
  }
  const absl::StatusOr<Ticket*> ended = open_ticket(state, request.session, request.ticket);
  if (is_error(ended.status(), ErrorCode::kConsumed)) return ended.status();
  if (absl::Status taken = check_no_ship(state, request.session, request.ticket); !taken.ok()) return taken;

  // May it be had at all?
  if (absl::Status stopping = refuse_while_stopping(state); !stopping.ok()) return stopping;
  if (session.is_remote()) return make_error(ErrorCode::kWrongOwner, "a remote client cannot write here: ship to its own daemon");
  if (absl::Status bad = check_reserve(state, set, request); !bad.ok()) return bad;
  if (state.tickets.size() >= state.options.tickets_max) {
    return make_error(ErrorCode::kBusy, "all " + text(state.options.tickets_max) + " tickets are open (tickets_max): retry",
                      state.options.retry_after_ms);
  }
  if (state.tickets.writer_of(set.id, request.sequence) != nullptr) {
    return make_error(ErrorCode::kConflict,
                      "sequence " + std::to_string(request.sequence.value()) + " is being written under another ticket: end that one first",
                      state.options.retry_after_ms);
  }

  // The usable prefix, leased before anything is evicted to make room.
  auto ticket = std::make_unique<Ticket>();
  ticket->session = request.session;
  ticket->id = request.ticket;
  ticket->set = set.id;
  ticket->sequence = request.sequence;
  ticket->names = request.names;
  const Match match = set.catalog->match(request.names);
  ticket->paged = match.pages;
  ticket->pages_shared = ticket->pages_sealed = static_cast<int64_t>(match.pages.size());
  ticket->matched_tokens = ticket->tokens_published = ticket->pages_shared * set.page_tokens();
  append(ticket->leased, set.id, PoolKind::kPaged, match.pages);
  PageIndex resume_boundary;
  if (match.resume != nullptr) {
    ticket->resume_tokens = match.resume_pages * set.page_tokens();
    ticket->resume_window = match.resume->window;
    ticket->resume_state = match.resume->state;
    resume_boundary = match.resume->boundary.index;
    append(ticket->leased, set.id, PoolKind::kWindow, ticket->resume_window);
    append(ticket->leased, set.id, PoolKind::kState, ticket->resume_state);
  }
  lease_all(state, ticket->leased);

  // Its own pages, all or none.
  const Wanted wanted{.paged = div_ceil(request.tokens, set.page_tokens()) - ticket->pages_shared, .window = set.window_ring(), .state = 1};
  const absl::StatusOr<Reserved> own = reserve_pages(state, set, wanted, owner_slot(session));
  if (!own.ok()) {
    unlease_all(state, ticket->leased);
    return own.status();
  }
  ticket->paged.insert(ticket->paged.end(), own->paged.begin(), own->paged.end());
  ticket->window = own->window;
  ticket->state = own->state[0];
  ticket->tokens_reserved = request.tokens;
  place_resume_slots(state, set, *ticket, request, owner_slot(session));

  // Nothing can fail from here on.
  set.catalog->touch(match.pages);
  if (!resume_boundary.is_none()) {
    set.catalog->hit_resume_point(resume_boundary);
    state.probes.hit(Probe::resume_point_hit);
  }
  state.probes.hit(match.pages.empty() ? Probe::lookup_missed : Probe::lookup_hit);
  state.outcomes.erase_sequence(request.sequence);
  state.probes.hit(Probe::ticket_reserved);
  return first_reply(state.tickets.open(std::move(ticket)));
}

absl::StatusOr<TicketView> extend(State& state, const Extend& request) {
  const absl::StatusOr<Ticket*> open = open_ticket(state, request.session, request.ticket);
  if (!open.ok()) return open.status();
  Ticket& ticket = **open;
  if (!is_new_step(state, ticket, request.step)) return ticket.view();
  PoolSet& set = state.set(ticket.set);
  const int64_t tokens_max = state.options.pages_per_request_max * set.page_tokens();
  if (request.tokens < 0 || request.tokens > tokens_max) {
    return invalid("tokens is " + text(request.tokens) + ", allowed are 0 to " + text(tokens_max));
  }
  const int64_t missing = div_ceil(request.tokens, set.page_tokens()) - static_cast<int64_t>(ticket.paged.size());
  if (missing > 0) {
    const Session& session = *state.sessions.find(request.session);
    const absl::StatusOr<Reserved> more = reserve_pages(state, set, {.paged = missing, .window = 0, .state = 0}, owner_slot(session));
    if (!more.ok()) return more.status();
    ticket.paged.insert(ticket.paged.end(), more->paged.begin(), more->paged.end());
    state.probes.hit(Probe::ticket_extended);
  }
  ticket.tokens_reserved = std::max(ticket.tokens_reserved, request.tokens);
  ticket.step = request.step;
  return ticket.view();
}

absl::StatusOr<TicketView> publish(State& state, const Publish& request) {
  const absl::StatusOr<Ticket*> open = open_ticket(state, request.session, request.ticket);
  if (!open.ok()) return open.status();
  Ticket& ticket = **open;
  if (!is_new_step(state, ticket, request.step)) return ticket.view();
  if (request.tokens < ticket.tokens_published || request.tokens > ticket.tokens_reserved) {
    return invalid("tokens is " + text(request.tokens) + ", allowed are " + text(ticket.tokens_published) + " to " +
                   text(ticket.tokens_reserved) + ": extend to go further, truncate to go back");
  }
  ticket.tokens_published = request.tokens;
  ticket.step = request.step;
  return ticket.view();
}

absl::StatusOr<TicketView> truncate(State& state, const Truncate& request) {
  const absl::StatusOr<Ticket*> open = open_ticket(state, request.session, request.ticket);
  if (!open.ok()) return open.status();
  Ticket& ticket = **open;
  if (!is_new_step(state, ticket, request.step)) return ticket.view();
  const int64_t sealed_tokens = ticket.pages_sealed * state.set(ticket.set).page_tokens();
  if (request.tokens < sealed_tokens || request.tokens > ticket.tokens_published) {
    return invalid("tokens is " + text(request.tokens) + ", allowed are " + text(sealed_tokens) + " (sealed) to " +
                   text(ticket.tokens_published) + " (published): sealed tokens cannot be taken back");
  }
  ticket.tokens_published = request.tokens;
  ticket.step = request.step;
  state.probes.hit(Probe::ticket_truncated);
  return ticket.view();
}

absl::StatusOr<TicketView> seal_pages(State& state, const SealPages& request) {
  const absl::StatusOr<Ticket*> open = open_ticket(state, request.session, request.ticket);
  if (!open.ok()) return open.status();
  Ticket& ticket = **open;
  if (!is_new_step(state, ticket, request.step)) return ticket.view();
  PoolSet& set = state.set(ticket.set);
  if (absl::Status bad = check_seals(set, ticket, request.pages, ticket.tokens_published); !bad.ok()) return bad;
  seal_next_pages(state, set, ticket, request.pages);
  ticket.step = request.step;
  return ticket.view();
}

absl::StatusOr<Nothing> seal_resume_point(State& state, const SealResumePoint& request) {
  const absl::StatusOr<Ticket*> open = open_ticket(state, request.session, request.ticket);
  if (!open.ok()) return open.status();
  Ticket& ticket = **open;
  PoolSet& set = state.set(ticket.set);
  if (std::count(ticket.resume_sealed.begin(), ticket.resume_sealed.end(), request.tokens) != 0) {
    state.probes.hit(Probe::ticket_repeated);
    return Nothing{};
  }
  const auto slot =
      std::find_if(ticket.resume_slots.begin(), ticket.resume_slots.end(), [&](const ResumeSlot& s) { return s.tokens == request.tokens; });
  if (slot == ticket.resume_slots.end()) {
    return make_error(ErrorCode::kNotFound, "no resume slot at " + text(request.tokens) + " tokens was granted to this ticket");
  }
  const int64_t pages = request.tokens / set.page_tokens();
  if (pages > ticket.pages_sealed) {
    return invalid("the resume point at " + text(request.tokens) + " tokens hangs on page " + text(pages - 1) + ", and only " +
                   text(ticket.pages_sealed) + " pages are sealed: seal that page first");
  }
  if (request.window_checksums.size() != slot->window.size()) {
    return invalid(text(static_cast<int64_t>(request.window_checksums.size())) + " window checksums for " +
                   text(static_cast<int64_t>(slot->window.size())) + " window pages");
  }
  const ResumeSlot taken = *slot;
  ticket.resume_slots.erase(slot);
  ticket.resume_sealed.push_back(request.tokens);
  const PageId boundary = ticket.paged[static_cast<size_t>(pages - 1)];
  Pool& window_pool = set.pool(PoolKind::kWindow);
  Pool& state_pool = set.pool(PoolKind::kState);
  if (set.catalog->resume_point(boundary.index) != nullptr) {  // another writer was faster; both wrote the same bytes
    for (const PageId& page : taken.window) window_pool.free(page);
    state_pool.free(taken.state);
    state.probes.hit(Probe::resume_point_duplicate);
    return Nothing{};
  }
  PageRecord record;
  record.name = set.pool(PoolKind::kPaged).records().name(boundary.index);
  record.sequence = ticket.sequence;
  record.parent = boundary;
  record.tokens_end = static_cast<uint32_t>(request.tokens);
  for (size_t i = 0; i < taken.window.size(); ++i) {
    record.role_bits = PageRecord::bits(PageRole::kResumeMember, static_cast<uint16_t>(i));
    record.checksum = request.window_checksums[i];
    window_pool.seal(taken.window[i], record);
  }
  record.role_bits = PageRecord::bits(PageRole::kResumeCommit, static_cast<uint16_t>(taken.window.size()));
  record.checksum = request.state_checksum;
  state_pool.seal(taken.state, record);
  ResumePoint point;
  point.boundary = boundary;
  point.tokens = request.tokens;
  point.window = taken.window;
  point.state = taken.state;
  point.facts.branch = request.tokens == ticket.matched_tokens;
  set.catalog->insert_resume_point(std::move(point));
  state.probes.hit(Probe::resume_point_sealed);
  return Nothing{};
}

absl::StatusOr<Seal::Reply> seal(State& state, const Seal& request) {
  const absl::StatusOr<Ticket*> open = open_ticket(state, request.session, request.ticket);
  if (!open.ok()) {
    const Outcome* outcome = state.outcomes.find({request.session, request.ticket.value(), OutcomeKey::kTicket});
    const bool repeat =
        is_error(open.status(), ErrorCode::kConsumed) && outcome->kind == OutcomeKind::kSealed && outcome->lease == request.lease;
    if (!repeat) return open.status();
    Seal::Reply reply{outcome->sequence, outcome->lease, {}};
    if (const Lease* lease = state.leases.find(request.session, outcome->lease)) reply.table = lease->table;
    return reply;
  }
  Ticket& ticket = **open;
  PoolSet& set = state.set(ticket.set);
  const Session& session = *state.sessions.find(request.session);

  // Check everything before anything changes.
  const int64_t page_tokens = set.page_tokens();
  if (request.tokens <= 0 || request.tokens < ticket.pages_sealed * page_tokens || request.tokens > ticket.tokens_reserved) {
    return invalid("tokens is " + text(request.tokens) + ", allowed are " + text(std::max<int64_t>(1, ticket.pages_sealed * page_tokens)) +
                   " (sealed) to " + text(ticket.tokens_reserved) + " (reserved)");
  }
  const int64_t full_pages = request.tokens / page_tokens;
  if (ticket.pages_sealed + static_cast<int64_t>(request.pages.size()) != full_pages) {
    return invalid(text(static_cast<int64_t>(request.pages.size())) + " full pages are given, " + text(full_pages - ticket.pages_sealed) +
                   " remain to be sealed up to " + text(request.tokens) + " tokens");
  }
  if (absl::Status bad = check_seals(set, ticket, request.pages, request.tokens); !bad.ok()) return bad;
  const auto [first_block, last_block] = set.window_blocks(request.tokens);
  if (static_cast<int64_t>(request.window_checksums.size()) != last_block - first_block) {
    return invalid(text(static_cast<int64_t>(request.window_checksums.size())) + " window checksums for the " +
                   text(last_block - first_block) + " window pages that cover the trailing window");
  }
  if (absl::Status used = check_lease_id_unused(state, request.session, request.lease); !used.ok()) return used;

  // Publish: full pages, then the rest as one unit.
  seal_next_pages(state, set, ticket, request.pages);
  SequenceParts parts;
  parts.sequence = ticket.sequence;
  parts.tokens = request.tokens;
  parts.full.assign(ticket.paged.begin(), ticket.paged.begin() + full_pages);
  size_t own_from = static_cast<size_t>(full_pages);
  if (request.tokens % page_tokens != 0) {
    parts.partial = ticket.paged[own_from++];
    parts.partial_checksum = request.partial_checksum;
  }
  std::vector<bool> window_used(ticket.window.size(), false);
  for (int64_t block = first_block; block < last_block; ++block) {
    const size_t at = static_cast<size_t>(block) % ticket.window.size();
    window_used[at] = true;
    parts.window.push_back(ticket.window[at]);
  }
  parts.window_checksums = request.window_checksums;
  parts.state = ticket.state;
  parts.state_checksum = request.state_checksum;
  seal_sequence(state, set, parts);

  // The reader's lease comes before the writer's go.
  Seal::Reply reply{ticket.sequence, request.lease, {}};
  if (!request.lease.is_none()) {
    reply.table = {request.tokens, parts.full, parts.window, parts.state};
    if (!parts.partial.index.is_none()) reply.table.paged.push_back(parts.partial);
    open_lease(state, set, session, request.lease, ticket.sequence, reply.table);
  }
  const std::unique_ptr<Ticket> closed = state.tickets.close(request.session, request.ticket);
  unlease_all(state, closed->leased);
  for (size_t i = own_from; i < closed->paged.size(); ++i) set.pool(PoolKind::kPaged).free(closed->paged[i]);
  for (const PageId& page : closed->duplicates) set.pool(PoolKind::kPaged).free(page);
  for (size_t i = 0; i < closed->window.size(); ++i) {
    if (!window_used[i]) set.pool(PoolKind::kWindow).free(closed->window[i]);
  }
  for (const ResumeSlot& slot : closed->resume_slots) {
    for (const PageId& page : slot.window) set.pool(PoolKind::kWindow).free(page);
    set.pool(PoolKind::kState).free(slot.state);
  }
  state.outcomes.remember({request.session, request.ticket.value(), OutcomeKey::kTicket},
                          {OutcomeKind::kSealed, closed->sequence, request.lease, request.ticket, {}}, state.now_ns);
  state.probes.hit(Probe::ticket_sealed);
  return reply;
}

absl::StatusOr<Nothing> forfeit(State& state, const Forfeit& request) {
  const absl::StatusOr<Ticket*> open = open_ticket(state, request.session, request.ticket);
  if (open.ok()) {
    forfeit_ticket(state, request.session, request.ticket, request.fenced);
    return Nothing{};
  }
  if (state.sessions.find(request.session) == nullptr || request.ticket.is_none()) return open.status();
  if (absl::Status taken = check_no_ship(state, request.session, request.ticket); !taken.ok()) return taken;
  const OutcomeKey key{request.session, request.ticket.value(), OutcomeKey::kTicket};
  const Outcome* outcome = state.outcomes.find(key);
  if (outcome == nullptr && is_error(open.status(), ErrorCode::kStale) && live_session(state, request.session).ok()) {
    // Given up before it was granted: a copy of the reserve that is still on its way must not open it.
    state.outcomes.remember(key, {OutcomeKind::kForfeited, SequenceId(), LeaseId(), request.ticket, {}}, state.now_ns);
    return Nothing{};
  }
  if (outcome == nullptr || outcome->kind != OutcomeKind::kForfeited) return open.status();
  if (!request.fenced) return Nothing{};

  // Forfeited before without a promise: the fence has passed now, and its pages need not wait for the whole session.
  Session& session = *state.sessions.find(request.session);
  std::vector<PageRef> passed;
  std::vector<Session::Pin> kept;
  for (const Session::Pin& pin : session.pins) {
    if (pin.ticket == request.ticket) {
      passed.push_back(pin.page);
    } else {
      kept.push_back(pin);
    }
  }
  session.pins = std::move(kept);
  for (const PageRef& ref : passed) state.pool(ref.pool).unpin(ref.page.index);
  return Nothing{};
}

}  // namespace needle::server::store
