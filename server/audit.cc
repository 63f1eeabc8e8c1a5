#include "server/audit.h"

#include <string>
#include <vector>

#include "proto/errors.h"

namespace needle::server {
namespace {

// What each page of each pool should show.
struct Expected {
  uint32_t leases = 0;
  uint32_t pins = 0;
  uint32_t owners = 0;
};

class Ledger {
 public:
  explicit Ledger(const State& state) : state_(state) {
    for (const auto& set : state.sets) {
      for (const auto& pool : set->pools) pages_.emplace_back(static_cast<size_t>(pool->pages_max()));
    }
  }
  Expected& at(const PageRef& ref) { return pages_[ref.pool.value()][ref.page.index.value()]; }

  void lease(const PageRef& ref) { ++check(ref, PageState::kSealed).leases; }
  void pin(const PageRef& ref) { ++at(ref).pins; }
  void own(const PageRef& ref) { ++check(ref, PageState::kReserved).owners; }
  void own(PoolSetId set, PoolKind kind, PageId page) { own({pool_id(set, kind), page}); }

  absl::Status status() const { return status_; }
  const std::vector<std::vector<Expected>>& pages() const { return pages_; }

 private:
  // A right names a page of its own generation in a state that grants it (a dropped set drains under its leases).
  Expected& check(const PageRef& ref, PageState wanted) {
    const Pool& pool = *state_.sets[set_of(ref.pool).value()]->pools[static_cast<size_t>(kind_of(ref.pool))];
    const PageState found = pool.state(ref.page.index);
    const bool state_fits = found == wanted || (wanted == PageState::kSealed && found == PageState::kDraining);
    if (status_.ok() && (!state_fits || pool.records().generation(ref.page.index) != ref.page.generation)) {
      status_ =
          make_error(ErrorCode::kBug, "a right names page " + std::to_string(ref.page.index.value()) + " generation " +
                                          std::to_string(ref.page.generation.value()) + " of pool " + std::to_string(ref.pool.value()) +
                                          ", which is " + kPageStateNames[static_cast<size_t>(found)] + " in generation " +
                                          std::to_string(pool.records().generation(ref.page.index).value()));
    }
    return at(ref);
  }

  const State& state_;
  std::vector<std::vector<Expected>> pages_;
  absl::Status status_;
};

void enter_ticket(Ledger& ledger, const Ticket& ticket) {
  for (const PageRef& ref : ticket.leased) ledger.lease(ref);
  for (size_t i = static_cast<size_t>(ticket.pages_sealed); i < ticket.paged.size(); ++i) {
    ledger.own(ticket.set, PoolKind::kPaged, ticket.paged[i]);
  }
  for (const PageId& page : ticket.duplicates) ledger.own(ticket.set, PoolKind::kPaged, page);
  for (const PageId& page : ticket.window) ledger.own(ticket.set, PoolKind::kWindow, page);
  ledger.own(ticket.set, PoolKind::kState, ticket.state);
  for (const ResumeSlot& slot : ticket.resume_slots) {
    for (const PageId& page : slot.window) ledger.own(ticket.set, PoolKind::kWindow, page);
    ledger.own(ticket.set, PoolKind::kState, slot.state);
  }
}

void enter_ship(Ledger& ledger, const Ship& ship) {
  for (const PageRef& ref : ship.shared) ledger.lease(ref);
  for (const ShipItem& item : ship.items) {
    if (item.stage == ShipItem::kPlaced || item.stage == ShipItem::kPosted || item.stage == ShipItem::kArrived) {
      ledger.own(ship.set, item.kind, item.target);
    }
  }
}

}  // namespace

absl::Status audit_state(const State& state) {
  Ledger ledger(state);
  for (const auto& [key, lease] : state.leases.all()) {
    for (const PageRef& ref : lease->pages) ledger.lease(ref);
  }
  for (const auto& [key, ticket] : state.tickets.all()) enter_ticket(ledger, *ticket);
  for (const auto& [wire, ship] : state.ships.all()) enter_ship(ledger, *ship);
  for (const auto& [id, session] : state.sessions.all()) {
    for (const Session::Pin& pin : session->pins) ledger.pin(pin.page);
  }
  for (const PageRef& ref : state.ghost_pins) ledger.pin(ref);
  int64_t bytes_in_flight = 0;
  for (const auto& [id, part] : state.ships.parts) {
    bytes_in_flight += part.bytes;
    if (!part.abandoned) continue;
    for (const PageRef& ref : part.targets) ledger.pin(ref);
  }
  if (!ledger.status().ok()) return ledger.status();
  if (bytes_in_flight != state.ships.bytes_in_flight) {
    return make_error(ErrorCode::kBug, "bytes in flight recounted " + std::to_string(bytes_in_flight) + ", kept " +
                                           std::to_string(state.ships.bytes_in_flight));
  }

  for (const auto& set : state.sets) {
    for (const auto& pool : set->pools) {
      const std::vector<Expected>& expected = ledger.pages()[pool->id().value()];
      for (size_t page = 0; page < expected.size(); ++page) {
        const PageIndex index(static_cast<uint32_t>(page));
        const PageInfo& info = pool->info(index);
        const uint32_t reserved = pool->class_of(index) == PageClass::kReserved ? 1 : 0;
        if (info.leases == expected[page].leases && info.pins == expected[page].pins && reserved == expected[page].owners) continue;
        return make_error(ErrorCode::kBug, "pool " + std::to_string(pool->id().value()) + " page " + std::to_string(page) +
                                               " has leases/pins/owners " + std::to_string(info.leases) + "/" + std::to_string(info.pins) +
                                               "/" + std::to_string(reserved) + ", the tables give " +
                                               std::to_string(expected[page].leases) + "/" + std::to_string(expected[page].pins) + "/" +
                                               std::to_string(expected[page].owners));
      }
      if (absl::Status found = pool->audit(); !found.ok()) return found;
    }
    if (absl::Status found = set->catalog->audit(); !found.ok()) return found;
  }
  return absl::OkStatus();
}

}  // namespace needle::server
