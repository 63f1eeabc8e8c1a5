#include "server/journeys/ship.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "proto/errors.h"
#include "server/holding.h"
#include "server/journeys/read.h"
#include "server/journeys/store.h"

namespace needle::server::ship {
namespace {

int64_t ms(int64_t milliseconds) { return milliseconds * kNanosPerMilli; }

template <class Body>
void send(State& state, NodeId to, Incarnation to_incarnation, Body body) {
  state.env.outbox.to_peer(to, {state.options.node, state.incarnation, to_incarnation, std::move(body)});
}

// ================================================================================================================ reader

void ask(State& state, Ship& ship) {
  PoolSet& set = state.set(ship.set);
  ship.unanswered_ns = std::min(ship.unanswered_ns, state.now_ns);
  ship.next_send_ns = state.now_ns + ms(state.options.ship_retry_ms);
  send(state, ship.source, ship.source_incarnation,
       ShipAsk{ship.wire, ship.attempt, ship.sequence, set.options.name, set.options.format, ship.full_pages});
}

void confirm(State& state, Ship& ship) {
  ship.state = ShipState::kConfirming;
  ship.unanswered_ns = std::min(ship.unanswered_ns, state.now_ns);
  ship.next_send_ns = state.now_ns + ms(state.options.ship_retry_ms);
  send(state, ship.source, ship.source_incarnation, ShipConfirm{ship.wire, ship.attempt, ship.source_lease});
}

int64_t silent_at_ns(const State& state, const Ship& ship) {
  return ship.unanswered_ns == kNever ? kNever : ship.unanswered_ns + ms(state.options.ship_silence_ms);
}

// Gives back what this attempt holds. Pages of posted parts drain until the part completes.
void give_back_attempt(State& state, Ship& ship) {
  for (auto& [id, part] : state.ships.parts) {
    if (id.ticket != ship.wire || part.abandoned) continue;
    part.abandoned = true;
    for (const PageRef& target : part.targets) {
      state.pool(target.pool).pin(target.page.index);
      state.pool(target.pool).drain(target.page);
      state.probes.hit(Probe::page_drained);
    }
    state.env.transport.cancel(id);
  }
  for (const ShipItem& item : ship.items) {
    const bool ours = item.stage == ShipItem::kPlaced || item.stage == ShipItem::kArrived;
    if (ours) state.pool(pool_id(ship.set, item.kind)).free(item.target);
  }
  unlease_all(state, ship.shared);
  if (!ship.source_lease.is_none()) {
    send(state, ship.source, ship.source_incarnation, ShipRelease{ship.wire, ship.attempt, ship.source_lease});
  }
  ship.items.clear();
  ship.shared.clear();
  ship.full_pages = 0;
  ship.complete = false;
  ship.arrived = 0;
  ship.next_to_post = 0;
  ship.parts_posted = 0;
  ship.source_lease = LeaseId();
  ship.source_incarnation = Incarnation();
}

void abandon_attempt(State& state, Ship& ship, const absl::Status& cause) {
  state.probes.hit(Probe::ship_attempt_abandoned);
  state.env.log.write(
      LogLevel::kInfo, "ship_attempt_abandoned",
      {{"ticket", std::to_string(ship.wire.value())}, {"attempt", std::to_string(ship.attempt)}, {"cause", std::string(cause.message())}});
  if (ship.attempt >= state.options.ship_attempts_max) return fail(state, ship.wire, cause);
  give_back_attempt(state, ship);
  ++ship.attempt;
  ship.state = ShipState::kAsking;
  ask(state, ship);
}

void answer_waiting(Ship& ship, const absl::StatusOr<ShipWait::Reply>& answer) {
  for (Completion<ShipWait>& done : ship.waiting) std::move(done)(answer);
  ship.waiting.clear();
}

ShipTotals totals_of(const Ship& ship) { return {ship.attempt, static_cast<int64_t>(ship.items.size()), ship.arrived, ship.bytes_arrived}; }

// Everything has arrived and is confirmed: publish it as one sequence and lease it to whoever asked.
void seal(State& state, Ship& ship) {
  if (absl::Status used = check_lease_id_unused(state, ship.session, ship.lease); !used.ok()) return fail(state, ship.wire, used);
  PoolSet& set = state.set(ship.set);
  store::SequenceParts parts;
  parts.sequence = ship.sequence;
  parts.tokens = ship.tokens;
  std::vector<PageRef> leased = ship.shared;
  for (const ShipItem& item : ship.items) {
    if (item.kind == PoolKind::kWindow) {
      parts.window.push_back(item.target);
      parts.window_checksums.push_back(item.source.checksum);
    } else if (item.kind == PoolKind::kState) {
      parts.state = item.target;
      parts.state_checksum = item.source.checksum;
    } else if (item.source.name.is_none()) {
      parts.partial = item.target;
      parts.partial_checksum = item.source.checksum;
    } else {
      const PageId parent = parts.full.empty() ? PageId{} : parts.full.back();
      PageId page = item.target;
      const PageIndex stored = set.catalog->find(item.source.name);
      if (item.stage != ShipItem::kShared && !stored.is_none()) {  // someone stored it here meanwhile
        set.pool(PoolKind::kPaged).free(page);
        page = set.pool(PoolKind::kPaged).id_of(stored);
        state.probes.hit(Probe::page_name_duplicate);
      } else if (item.stage != ShipItem::kShared) {
        store::seal_full_page(set, page, item.source.name, parent, ship.sequence, item.source.tokens_end, item.source.checksum);
        state.probes.hit(Probe::page_sealed);
      }
      if (item.stage != ShipItem::kShared) {
        set.pool(PoolKind::kPaged).lease(page.index);
        leased.push_back({pool_id(set.id, PoolKind::kPaged), page});
      }
      parts.full.push_back(page);
    }
  }
  store::seal_sequence(state, set, parts);

  ShipWait::Reply reply;
  reply.lease = ship.lease;
  reply.table = {ship.tokens, parts.full, parts.window, parts.state};
  if (!parts.partial.index.is_none()) reply.table.paged.push_back(parts.partial);
  const Session& session = *state.sessions.find(ship.session);
  if (!ship.lease.is_none()) open_lease(state, set, session, ship.lease, ship.sequence, reply.table);
  unlease_all(state, leased);
  send(state, ship.source, ship.source_incarnation, ShipRelease{ship.wire, ship.attempt, ship.source_lease});
  state.outcomes.remember({ship.session, ship.ticket.value(), OutcomeKey::kTicket},
                          {OutcomeKind::kSealed, ship.sequence, ship.lease, ship.ticket, {}, totals_of(ship)}, state.now_ns);
  state.probes.hit(Probe::ship_sealed);
  const std::unique_ptr<Ship> closed = state.ships.close(ship.wire);
  closed->state = ShipState::kSealed;
  answer_waiting(*closed, reply);
}

// A page to receive into, or false when there is none now.
bool place(State& state, Ship& ship, ShipItem& item) {
  PoolSet& set = state.set(ship.set);
  std::vector<PageId> page;
  if (!set.catalog->make_room(item.kind, 1) || !set.pool(item.kind).reserve(1, kOwnerDaemon, page)) return false;
  item.target = page[0];
  item.stage = ShipItem::kPlaced;
  return true;
}

// Places and posts whatever the bounds allow; when nothing is missing any more, asks for confirmation.
void pump(State& state, Ship& ship) {
  if (ship.state == ShipState::kConfirming) return;
  PoolSet& set = state.set(ship.set);
  const TransportTraits& traits = state.env.transport.traits();
  FetchRequest request;
  ShipPart part;
  const auto post = [&] {
    if (request.pages.empty()) return;
    request.id = {ship.wire, ship.attempt, ship.parts_posted++};
    request.source = part.source = ship.source;
    request.source_incarnation = ship.source_incarnation;
    part.overdue_ns = state.now_ns + ms(state.options.fetch_ms);
    state.ships.bytes_in_flight += part.bytes;
    state.ships.parts.emplace(request.id, std::move(part));
    state.env.transport.post(std::move(request));
    request = FetchRequest();
    part = ShipPart();
  };
  bool waits_for_pages = false;
  for (size_t& i = ship.next_to_post; i < ship.items.size(); ++i) {
    ShipItem& item = ship.items[i];
    if (item.stage == ShipItem::kUnplaced && !place(state, ship, item)) {
      waits_for_pages = true;
      break;
    }
    if (item.stage != ShipItem::kPlaced) continue;
    const int64_t bytes = set.pool(item.kind).shape().page_bytes;
    // At least one page may always fly, or a page larger than the bound would never.
    const int64_t flying = state.ships.bytes_in_flight + part.bytes;
    if (flying > 0 && flying + bytes > state.options.bytes_in_flight_max) break;
    const PageRef target{pool_id(ship.set, item.kind), item.target};
    request.pages.push_back({item.source.page, target});
    part.items.push_back(i);
    part.targets.push_back(target);
    part.bytes += bytes;
    item.stage = ShipItem::kPosted;
    ship.state = ShipState::kFetching;
    if (static_cast<int64_t>(request.pages.size()) == traits.request_pages_max) post();
  }
  post();
  if (waits_for_pages) {
    state.probes.hit(Probe::ship_waited_for_pages);
    ship.next_send_ns = std::min(ship.next_send_ns, state.now_ns + ms(state.options.retry_after_ms));
  }
  if (ship.complete && ship.arrived == static_cast<int64_t>(ship.items.size())) confirm(state, ship);
}

void pump_all(State& state) {
  std::vector<TicketId> wires;
  for (const auto& [wire, ship] : state.ships.all()) wires.push_back(wire);
  for (TicketId wire : wires) {
    if (Ship* ship = state.ships.find(wire)) pump(state, *ship);
  }
}

ShipItem item_of(PoolKind kind, const ShippedPage& page) {
  ShipItem item;
  item.kind = kind;
  item.source = page;
  return item;
}

// Whether the offer's pages are of the pools that they claim and named where they must be.
bool is_sound(const ShipOffer& offer) {
  const auto all_of_kind = [](const std::vector<ShippedPage>& pages, PoolKind kind) {
    return std::all_of(pages.begin(), pages.end(), [&](const ShippedPage& page) { return kind_of(page.page.pool) == kind; });
  };
  if (!all_of_kind(offer.pages, PoolKind::kPaged) || !all_of_kind(offer.partial, PoolKind::kPaged)) return false;
  if (!all_of_kind(offer.window, PoolKind::kWindow) || offer.partial.size() > 1) return false;
  if (offer.complete && (kind_of(offer.state.page.pool) != PoolKind::kState || offer.tokens <= 0)) return false;
  return std::none_of(offer.pages.begin(), offer.pages.end(), [](const ShippedPage& page) { return page.name.is_none(); });
}

bool counts_match(PoolSet& set, const Ship& ship, const ShipOffer& offer) {
  const auto [first, last] = set.window_blocks(offer.tokens);
  return ship.full_pages == offer.tokens / set.page_tokens() &&
         static_cast<int64_t>(offer.partial.size()) == (offer.tokens % set.page_tokens() != 0 ? 1 : 0) &&
         static_cast<int64_t>(offer.window.size()) == last - first;
}

void take_offer(State& state, const PeerMessage& message, const ShipOffer& offer) {
  Ship* found = state.ships.find(offer.ticket);
  if (found == nullptr || found->attempt != offer.attempt || message.from != found->source) {
    state.probes.hit(Probe::ship_message_dropped);
    return;
  }
  Ship& ship = *found;
  ship.unanswered_ns = kNever;
  if (!ship.source_incarnation.is_none() && ship.source_incarnation != message.from_incarnation) {
    state.probes.hit(Probe::ship_peer_restarted);
    return abandon_attempt(state, ship, make_error(ErrorCode::kPeerLost, "the source restarted while the ship was under way"));
  }
  if (!offer.status.ok()) {
    state.probes.hit(Probe::ship_offer_refused);
    if (is_error(offer.status, ErrorCode::kBusy)) {  // not yet: ask again in a while
      ship.next_send_ns = state.now_ns + ms(state.options.ship_retry_ms);
      return;
    }
    if (is_error(offer.status, ErrorCode::kStale)) return abandon_attempt(state, ship, offer.status);
    return fail(state, ship.wire, offer.status);
  }
  if (ship.complete || offer.first_page != ship.full_pages) {  // answers an ask that a later one overtook
    state.probes.hit(Probe::ship_message_dropped);
    return;
  }
  if (!is_sound(offer)) return fail(state, ship.wire, make_error(ErrorCode::kInvalid, "the source's offer is malformed"));
  ship.source_incarnation = message.from_incarnation;
  if (!ship.source_lease.is_none() && ship.source_lease != offer.lease) {
    return abandon_attempt(state, ship, make_error(ErrorCode::kLeaseExpired, "the source's lease ran out and was granted anew"));
  }
  ship.source_lease = offer.lease;
  state.env.transport.learn_peer(ship.source, message.from_incarnation, offer.chunks);

  PoolSet& set = state.set(ship.set);
  for (const ShippedPage& page : offer.pages) {
    ShipItem item = item_of(PoolKind::kPaged, page);
    const PageIndex stored = set.catalog->find(page.name);
    if (!stored.is_none()) {
      item.target = set.pool(PoolKind::kPaged).id_of(stored);
      item.stage = ShipItem::kShared;
      ship.shared.push_back({pool_id(set.id, PoolKind::kPaged), item.target});
      set.pool(PoolKind::kPaged).lease(stored);
      ++ship.arrived;
      state.probes.hit(Probe::ship_page_shared);
    }
    ship.items.push_back(item);
    ++ship.full_pages;
  }
  if (offer.complete) {
    if (!counts_match(set, ship, offer)) {
      return fail(state, ship.wire,
                  make_error(ErrorCode::kInvalid, "the source's offer lacks pages of " + std::to_string(offer.tokens) + " tokens"));
    }
    for (const ShippedPage& page : offer.partial) ship.items.push_back(item_of(PoolKind::kPaged, page));
    for (const ShippedPage& page : offer.window) ship.items.push_back(item_of(PoolKind::kWindow, page));
    ship.items.push_back(item_of(PoolKind::kState, offer.state));
    ship.complete = true;
    ship.tokens = offer.tokens;
    ship.next_send_ns = kNever;
  } else {
    ship.next_send_ns = state.now_ns + (offer.pages.empty() ? ms(state.options.ship_poll_ms) : 0);
  }
  pump(state, ship);
}

void take_confirmation(State& state, const PeerMessage& message, const ShipConfirmed& confirmed) {
  Ship* ship = state.ships.find(confirmed.ticket);
  const bool awaited = ship != nullptr && ship->state == ShipState::kConfirming && ship->attempt == confirmed.attempt &&
                       ship->source_lease == confirmed.lease && message.from == ship->source &&
                       message.from_incarnation == ship->source_incarnation;
  if (!awaited) {
    state.probes.hit(Probe::ship_message_dropped);
    return;
  }
  ship->unanswered_ns = kNever;
  if (confirmed.status.ok()) return seal(state, *ship);
  state.probes.hit(Probe::ship_confirm_refused);
  abandon_attempt(state, *ship, confirmed.status);
}

// ================================================================================================================ source

ShippedPage shipped(PoolSet& set, PoolKind kind, PageId page) {
  const PageRecord record = set.pool(kind).records().record(page.index);
  ShippedPage made;
  made.page = {pool_id(set.id, kind), page};
  if (record.role() == PageRole::kNamed) made.name = record.name;
  made.tokens_end = record.tokens_end;
  made.checksum = record.checksum;
  return made;
}

// Extends the reader's lease to pages it does not hold yet.
void extend_lease(State& state, Lease& lease, const std::vector<PageRef>& pages) {
  for (const PageRef& ref : pages) {
    state.pool(ref.pool).lease(ref.page.index);
    lease.pages.push_back(ref);
  }
}

// The answer to an ask: what is sealed of the sequence from page `pages_known` on, under a lease of this reader.
ShipOffer offer_for(State& state, const PeerReader& reader, const ShipAsk& asked) {
  ShipOffer offer;
  offer.ticket = asked.ticket;
  offer.attempt = asked.attempt;
  offer.first_page = asked.pages_known;
  const auto named =
      std::find_if(state.sets.begin(), state.sets.end(), [&](const auto& set) { return set->options.name == asked.pool_set; });
  if (named == state.sets.end()) {
    offer.status = make_error(ErrorCode::kNotFound, "no pool set is named '" + asked.pool_set + "' at the source");
    return offer;
  }
  PoolSet& set = **named;
  if (asked.format != set.options.format) {
    offer.status = make_error(ErrorCode::kFormatMismatch,
                              "the source has page format\n  " + set.options.format + "\nand the reader has\n  " + asked.format);
    return offer;
  }

  // Where the sequence stands: stored, being written, given up, or unknown.
  const StoredSequence* stored = read::whole_sequence(state, set, asked.sequence);
  const Ticket* writer = stored == nullptr ? state.tickets.writer_of(set.id, asked.sequence) : nullptr;
  if (stored == nullptr && writer == nullptr) {
    const bool forfeited = state.outcomes.find({SessionId(), asked.sequence.value(), OutcomeKey::kSequence}) != nullptr;
    offer.status = make_error(forfeited ? ErrorCode::kForfeited : ErrorCode::kNotFound,
                              "sequence " + std::to_string(asked.sequence.value()) +
                                  (forfeited ? " was given up by its writer" : " is not stored at the source"));
    return offer;
  }
  std::vector<PageId> full;
  if (stored != nullptr) full = stored->full;
  if (writer != nullptr) full.assign(writer->paged.begin(), writer->paged.begin() + writer->pages_sealed);
  if (asked.pages_known < 0 || asked.pages_known > static_cast<int64_t>(full.size())) {
    offer.status = make_error(ErrorCode::kStale, "the reader knows " + std::to_string(asked.pages_known) + " pages of the sequence and " +
                                                     std::to_string(full.size()) + " are sealed: it was written anew");
    return offer;
  }

  Lease* lease = state.leases.find(reader);
  if (lease == nullptr && asked.pages_known > 0) {
    offer.status = make_error(ErrorCode::kStale, "the lease under which earlier pages were offered has ended");
    return offer;
  }
  if (lease == nullptr) {
    if (state.leases.size() >= state.options.leases_max) {
      offer.status = make_error(ErrorCode::kBusy, "all leases are open (leases_max)", state.options.retry_after_ms);
      return offer;
    }
    auto fresh = std::make_unique<Lease>();
    fresh->id = LeaseId(state.next_id());
    fresh->set = set.id;
    fresh->reader = reader;
    fresh->expires_ns = state.now_ns + ms(state.options.lease_ms);
    lease = &state.leases.open(std::move(fresh));
    state.probes.hit(Probe::lease_acquired);
  }
  // What was offered before must be what is stored now: the lease's full pages are a prefix of the sequence.
  size_t held = 0;
  for (const PageRef& ref : lease->pages) {
    const bool is_full_page = kind_of(ref.pool) == PoolKind::kPaged && held < full.size() && ref.page == full[held];
    if (!is_full_page) break;
    ++held;
  }
  const bool held_all = held == lease->pages.size();
  const bool held_complete = stored != nullptr && held == full.size() && !lease->pages.empty() &&
                             lease->pages.back() == PageRef{pool_id(set.id, PoolKind::kState), stored->state};
  if ((!held_all && !held_complete) || static_cast<int64_t>(held) < asked.pages_known) {
    offer.status = make_error(ErrorCode::kStale, "the sequence was written anew since the last offer");
    return offer;
  }
  state.leases.renew(*lease, state.now_ns + ms(state.options.lease_ms));
  offer.lease = lease->id;

  const size_t from = static_cast<size_t>(asked.pages_known);
  const size_t until = std::min(full.size(), from + static_cast<size_t>(state.options.offer_pages_max));
  if (until > held) {
    extend_lease(state, *lease,
                 refs(set.id, PoolKind::kPaged,
                      std::vector<PageId>(full.begin() + static_cast<int64_t>(held), full.begin() + static_cast<int64_t>(until))));
  }
  for (size_t i = from; i < until; ++i) offer.pages.push_back(shipped(set, PoolKind::kPaged, full[i]));
  if (stored != nullptr && until == full.size()) {
    std::vector<PageRef> rest;
    append(rest, set.id, PoolKind::kPaged, stored->partial);
    append(rest, set.id, PoolKind::kWindow, stored->window);
    append(rest, set.id, PoolKind::kState, stored->state);
    if (!held_complete) extend_lease(state, *lease, rest);
    offer.complete = true;
    offer.tokens = stored->tokens;
    if (!stored->partial.index.is_none()) offer.partial.push_back(shipped(set, PoolKind::kPaged, stored->partial));
    for (const PageId& page : stored->window) offer.window.push_back(shipped(set, PoolKind::kWindow, page));
    offer.state = shipped(set, PoolKind::kState, stored->state);
    set.catalog->touch_sequence(asked.sequence);
    state.probes.hit(Probe::ship_offered_complete);
  } else {
    state.probes.hit(Probe::ship_offered_open_sequence);
  }

  // The registered chunks that the offered pages lie in.
  std::vector<std::pair<PoolId, ChunkIndex>> chunks;
  const auto note = [&](const ShippedPage& page) {
    chunks.emplace_back(page.page.pool, state.pool(page.page.pool).chunk_of(page.page.page.index));
  };
  for (const ShippedPage& page : offer.pages) note(page);
  for (const ShippedPage& page : offer.partial) note(page);
  for (const ShippedPage& page : offer.window) note(page);
  if (offer.complete) note(offer.state);
  std::sort(chunks.begin(), chunks.end());
  chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  for (const auto& [pool, chunk] : chunks) {
    const auto descriptor = state.descriptors.find({pool, chunk});
    if (descriptor == state.descriptors.end()) {
      // After a restart registration may still be under way, or have failed: try again and let the reader ask again.
      state.env.transport.register_chunk(pool, chunk);
      ShipOffer later;
      later.ticket = asked.ticket;
      later.attempt = asked.attempt;
      later.status = make_error(ErrorCode::kBusy, "a chunk is not registered with the transport yet", state.options.retry_after_ms);
      return later;
    }
    offer.chunks.push_back({pool, chunk, descriptor->second});
  }
  return offer;
}

void answer_ask(State& state, const PeerMessage& message, const ShipAsk& asked) {
  const PeerReader reader{message.from, message.from_incarnation, asked.ticket, asked.attempt};
  if (state.leases.later_attempt_exists(reader)) {
    state.probes.hit(Probe::ship_message_dropped);
    return;
  }
  for (LeaseId earlier : state.leases.earlier_attempts(reader)) close_lease(state, SessionId(), earlier, LeaseEnd::kReleased);
  if (state.leases.find(reader) != nullptr) state.probes.hit(Probe::ship_asked_again);
  send(state, message.from, message.from_incarnation, offer_for(state, reader, asked));
}

void answer_confirm(State& state, const PeerMessage& message, const ShipConfirm& asked) {
  const Lease* lease = state.leases.find({message.from, message.from_incarnation, asked.ticket, asked.attempt});
  ShipConfirmed answer{asked.ticket, asked.attempt, asked.lease, absl::OkStatus()};
  if (lease == nullptr || lease->id != asked.lease || lease->expires_ns <= state.now_ns) {
    answer.status = make_error(ErrorCode::kStale, "the source's lease ended before the last byte was confirmed");
  } else {
    const bool current = std::all_of(lease->pages.begin(), lease->pages.end(), [&](const PageRef& ref) {
      const Pool& pool = state.pool(ref.pool);
      return pool.records().generation(ref.page.index) == ref.page.generation;
    });
    if (!current) answer.status = make_error(ErrorCode::kStale, "a page changed its generation under the lease");
  }
  send(state, message.from, message.from_incarnation, std::move(answer));
}

void take_release(State& state, const PeerMessage& message, const ShipRelease& released) {
  const Lease* lease = state.leases.find({message.from, message.from_incarnation, released.ticket, released.attempt});
  if (lease == nullptr || lease->id != released.lease) {
    state.probes.hit(Probe::ship_message_dropped);
    return;
  }
  close_lease(state, SessionId(), lease->id, LeaseEnd::kReleased);
}

absl::Status is_a_ticket(TicketId id) {
  return make_error(ErrorCode::kConflict, "ticket " + std::to_string(id.value()) + " is a writer's and open: draw another id for a ship");
}

}  // namespace

// ================================================================================================================= verbs

absl::StatusOr<Nothing> start(State& state, const ShipStart& request) {
  const absl::StatusOr<Session*> live = live_session(state, request.session);
  if (!live.ok()) return live.status();
  if (state.ships.find(request.session, request.ticket) != nullptr) {
    state.probes.hit(Probe::ticket_repeated);
    return Nothing{};
  }
  if (state.outcomes.find({request.session, request.ticket.value(), OutcomeKey::kTicket}) != nullptr) {
    return make_error(ErrorCode::kConsumed, "ship " + std::to_string(request.ticket.value()) + " has ended: wait tells how");
  }
  if (state.tickets.find(request.session, request.ticket) != nullptr) return is_a_ticket(request.ticket);
  if (absl::Status stopping = refuse_while_stopping(state); !stopping.ok()) return stopping;
  if (request.ticket.is_none() || request.sequence.is_none()) {
    return make_error(ErrorCode::kInvalid, "ticket and sequence ids must not be 0");
  }
  if (request.source == state.options.node) return make_error(ErrorCode::kInvalid, "the source is this daemon: acquire the sequence here");
  if (request.deadline_ms < 0 || request.deadline_ms > state.options.ship_deadline_ms_max) {
    return make_error(ErrorCode::kInvalid, "deadline_ms is " + std::to_string(request.deadline_ms) + ", allowed are 0 (the default) to " +
                                               std::to_string(state.options.ship_deadline_ms_max));
  }
  if (absl::Status used = check_lease_id_unused(state, request.session, request.lease); !used.ok()) return used;
  if (state.ships.size() >= state.options.ships_max) {
    return make_error(ErrorCode::kBusy, "all " + std::to_string(state.options.ships_max) + " ships are under way (ships_max): retry",
                      state.options.retry_after_ms);
  }
  auto fresh = std::make_unique<Ship>();
  fresh->session = request.session;
  fresh->ticket = request.ticket;
  fresh->wire = TicketId(state.next_id());
  fresh->set = (*live)->set;
  fresh->sequence = request.sequence;
  fresh->source = request.source;
  fresh->lease = request.lease;
  const int64_t deadline_ms = request.deadline_ms == 0 ? state.options.ship_deadline_ms : request.deadline_ms;
  fresh->deadline_ns = state.now_ns + ms(deadline_ms);
  state.probes.hit(Probe::ship_started);
  ask(state, state.ships.open(std::move(fresh)));
  return Nothing{};
}

absl::StatusOr<ShipProgress::Reply> progress(State& state, const ShipProgress& request) {
  const absl::StatusOr<Session*> live = live_session(state, request.session);
  if (!live.ok()) return live.status();
  if (const Ship* ship = state.ships.find(request.session, request.ticket)) {
    return ShipProgress::Reply{ship->state,   ship->attempt,       static_cast<int64_t>(ship->items.size()),
                               ship->arrived, ship->bytes_arrived, ship->complete};
  }
  const Outcome* outcome = state.outcomes.find({request.session, request.ticket.value(), OutcomeKey::kTicket});
  if (outcome == nullptr) return make_error(ErrorCode::kStale, "ship " + std::to_string(request.ticket.value()) + " is unknown here");
  const ShipTotals& ship = outcome->ship;
  const bool sealed = outcome->kind == OutcomeKind::kSealed;
  return ShipProgress::Reply{
      sealed ? ShipState::kSealed : ShipState::kFailed, ship.attempt, ship.pages_known, ship.pages_arrived, ship.bytes_arrived, sealed};
}

void wait(State& state, Call<ShipWait> call) {
  const absl::StatusOr<Session*> live = live_session(state, call.request.session);
  if (!live.ok()) return std::move(call.done)(live.status());
  if (Ship* ship = state.ships.find(call.request.session, call.request.ticket)) {
    ship->waiting.push_back(std::move(call.done));
    return;
  }
  const Outcome* outcome = state.outcomes.find({call.request.session, call.request.ticket.value(), OutcomeKey::kTicket});
  if (outcome == nullptr) {
    return std::move(call.done)(make_error(ErrorCode::kStale, "ship " + std::to_string(call.request.ticket.value()) + " is unknown here"));
  }
  if (outcome->kind == OutcomeKind::kShipFailed) return std::move(call.done)(outcome->status);
  if (outcome->kind != OutcomeKind::kSealed) {
    return std::move(call.done)(
        make_error(ErrorCode::kConsumed, "ticket " + std::to_string(call.request.ticket.value()) + " was forfeited, and never was a ship"));
  }
  ShipWait::Reply reply;
  reply.lease = outcome->lease;
  if (const Lease* lease = state.leases.find(call.request.session, outcome->lease)) reply.table = lease->table;
  std::move(call.done)(reply);
}

absl::StatusOr<Nothing> cancel(State& state, const ShipCancel& request) {
  const absl::StatusOr<Session*> live = live_session(state, request.session);
  if (!live.ok()) return live.status();
  const Ship* ship = state.ships.find(request.session, request.ticket);
  if (ship == nullptr) {
    if (state.tickets.find(request.session, request.ticket) != nullptr) return is_a_ticket(request.ticket);
    const OutcomeKey key{request.session, request.ticket.value(), OutcomeKey::kTicket};
    const Outcome* outcome = state.outcomes.find(key);
    if (outcome == nullptr) {
      // Cancelled before it was started: a copy of the start that is still on its way must not begin it.
      const absl::Status cause = make_error(ErrorCode::kCancelled, "the ship was cancelled");
      state.outcomes.remember(key, {OutcomeKind::kShipFailed, SequenceId(), LeaseId(), request.ticket, cause}, state.now_ns);
      return Nothing{};
    }
    if (outcome->kind == OutcomeKind::kSealed) return make_error(ErrorCode::kConsumed, "the ship was sealed before it could be cancelled");
    return Nothing{};
  }
  state.probes.hit(Probe::ship_cancelled);
  fail(state, ship->wire, make_error(ErrorCode::kCancelled, "the ship was cancelled"));
  return Nothing{};
}

void fail(State& state, TicketId wire, const absl::Status& cause) {
  const ShipTotals totals = totals_of(*state.ships.find(wire));
  give_back_attempt(state, *state.ships.find(wire));
  const std::unique_ptr<Ship> ship = state.ships.close(wire);
  ship->state = ShipState::kFailed;
  state.outcomes.remember({ship->session, ship->ticket.value(), OutcomeKey::kTicket},
                          {OutcomeKind::kShipFailed, ship->sequence, LeaseId(), ship->ticket, cause, totals}, state.now_ns);
  state.probes.hit(Probe::ship_failed);
  answer_waiting(*ship, cause);
}

// ================================================================================================================ events

void peer_message(State& state, const PeerMessage& message) {
  if (!message.to_incarnation.is_none() && message.to_incarnation != state.incarnation) {
    // Meant for this daemon's predecessor. An ask still deserves an answer, or its reader would wait for its deadline.
    state.probes.hit(Probe::ship_message_dropped);
    if (const ShipAsk* asked = std::get_if<ShipAsk>(&message.body)) {
      ShipOffer offer;
      offer.ticket = asked->ticket;
      offer.attempt = asked->attempt;
      offer.status = make_error(ErrorCode::kStale, "this daemon restarted since it was last heard");
      send(state, message.from, message.from_incarnation, std::move(offer));
    }
    if (const ShipConfirm* asked = std::get_if<ShipConfirm>(&message.body)) {
      // Answered in the predecessor's place by an offer of the same attempt: the reader sees the new incarnation.
      ShipOffer offer;
      offer.ticket = asked->ticket;
      offer.attempt = asked->attempt;
      offer.status = make_error(ErrorCode::kStale, "this daemon restarted since it was last heard");
      send(state, message.from, message.from_incarnation, std::move(offer));
    }
    return;
  }
  if (const auto* asked = std::get_if<ShipAsk>(&message.body)) return answer_ask(state, message, *asked);
  if (const auto* offer = std::get_if<ShipOffer>(&message.body)) return take_offer(state, message, *offer);
  if (const auto* asked = std::get_if<ShipConfirm>(&message.body)) return answer_confirm(state, message, *asked);
  if (const auto* confirmed = std::get_if<ShipConfirmed>(&message.body)) return take_confirmation(state, message, *confirmed);
  if (const auto* released = std::get_if<ShipRelease>(&message.body)) return take_release(state, message, *released);
}

void fetched(State& state, const FetchCompletion& completion) {
  const auto found = state.ships.parts.find(completion.id);
  if (found == state.ships.parts.end()) {
    state.probes.hit(Probe::unknown_event_dropped);
    return;
  }
  const ShipPart part = std::move(found->second);
  state.ships.parts.erase(found);
  state.ships.bytes_in_flight -= part.bytes;
  Ship* ship = state.ships.find(completion.id.ticket);
  if (part.abandoned) {  // its attempt is over: the pages may be used again now, and that is all
    state.probes.hit(Probe::ship_late_completion);
    for (const PageRef& target : part.targets) state.pool(target.pool).unpin(target.page.index);
    return pump_all(state);
  }
  NEEDLE_CHECK(ship != nullptr && ship->attempt == completion.id.attempt, "a live part belongs to the present attempt");
  absl::Status status = completion.status;
  if (status.ok() && completion.checksums.size() != part.items.size()) {
    status = make_error(ErrorCode::kCorrupt, "the transport delivered " + std::to_string(completion.checksums.size()) + " of " +
                                                 std::to_string(part.items.size()) + " pages");
  }
  if (!status.ok()) state.probes.hit(Probe::ship_fetch_failed);
  for (size_t i = 0; i < part.items.size(); ++i) {
    ShipItem& item = ship->items[part.items[i]];
    item.stage = ShipItem::kArrived;
    if (status.ok() && completion.checksums[i] != item.source.checksum) {
      state.probes.hit(Probe::ship_checksum_differs);
      status = make_error(ErrorCode::kCorrupt, "page " + std::to_string(item.source.page.page.index.value()) + " of pool " +
                                                   std::to_string(item.source.page.pool.value()) + " arrived with another checksum");
    }
  }
  if (!status.ok()) {
    abandon_attempt(state, *ship, status);
    return pump_all(state);
  }
  ship->arrived += static_cast<int64_t>(part.items.size());
  ship->bytes_arrived += part.bytes;
  pump_all(state);
}

void forgive(State& state, int64_t absent_ns) {
  for (auto& [id, part] : state.ships.parts) part.overdue_ns += absent_ns;
  for (const auto& [wire, ship] : state.ships.all()) {
    if (ship->unanswered_ns != kNever) ship->unanswered_ns += absent_ns;
  }
}

void expire(State& state) {
  // Overdue parts: their peer is stopped or unreachable. The whole endpoint goes; its parts then complete with errors.
  std::vector<NodeId> stopped;
  for (auto& [id, part] : state.ships.parts) {
    if (part.overdue_ns > state.now_ns) continue;
    part.overdue_ns = state.now_ns + ms(state.options.fetch_ms);
    state.probes.hit(Probe::ship_fetch_timed_out);
    stopped.push_back(part.source);
  }
  std::sort(stopped.begin(), stopped.end());
  stopped.erase(std::unique(stopped.begin(), stopped.end()), stopped.end());
  for (NodeId peer : stopped) state.env.transport.close_peer(peer);

  std::vector<TicketId> wires;
  for (const auto& [wire, ship] : state.ships.all()) wires.push_back(wire);
  for (TicketId wire : wires) {
    Ship& ship = *state.ships.find(wire);
    if (ship.deadline_ns <= state.now_ns) {
      state.probes.hit(Probe::ship_deadline_passed);
      fail(state, wire,
           make_error(ErrorCode::kPeerLost, "the ship did not end before its deadline, in state " +
                                                std::string(kShipStateNames[static_cast<size_t>(ship.state)])));
      continue;
    }
    if (silent_at_ns(state, ship) <= state.now_ns) {
      state.probes.hit(Probe::ship_source_silent);
      fail(state, wire,
           make_error(ErrorCode::kPeerLost, "the source has answered nothing for " + std::to_string(state.options.ship_silence_ms) +
                                                " ms (ship.silence); ship again, or from another peer"));
      continue;
    }
    if (ship.next_send_ns > state.now_ns) continue;
    if (ship.state == ShipState::kConfirming) {
      confirm(state, ship);
    } else if (!ship.complete) {
      ask(state, ship);
      pump(state, ship);
    } else {
      ship.next_send_ns = kNever;
      pump(state, ship);
    }
  }
}

int64_t next_deadline_ns(const State& state) {
  int64_t next = kNever;
  for (const auto& [wire, ship] : state.ships.all())
    next = std::min({next, ship->deadline_ns, ship->next_send_ns, silent_at_ns(state, *ship)});
  for (const auto& [id, part] : state.ships.parts) next = std::min(next, part.overdue_ns);
  return next;
}

}  // namespace needle::server::ship
