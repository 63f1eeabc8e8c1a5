// Where the ships that this daemon reads stand. The journey is in ship.cc.
//
// asking -> fetching -> confirming -> sealed, each step back to `asking` under the next attempt; failed from anywhere.
//
// What must stay true:
//  1. Pages of a posted part belong to the part until its completion, whatever became of the attempt.
//  2. bytes_in_flight counts posted and not completed bytes of all ships together.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/btree_map.h"
#include "server/leases.h"
#include "server/messages.h"

namespace needle::server {

struct ShipItem {
  enum Stage : uint8_t { kUnplaced, kPlaced, kPosted, kArrived, kShared };
  PoolKind kind = PoolKind::kPaged;
  ShippedPage source;
  PageId target;
  Stage stage = kUnplaced;
};

struct ShipPart {  // one posted fetch request
  std::vector<size_t> items;
  std::vector<PageRef> targets;
  int64_t bytes = 0;
  int64_t overdue_ns = 0;
  bool abandoned = false;  // its attempt is over; its targets are draining, pinned by it
  NodeId source;
};

struct Ship {
  SessionId session;
  TicketId ticket;  // the caller's
  TicketId wire;    // ours, unique in this incarnation: names the ship to the source and the transport
  PoolSetId set;
  SequenceId sequence;
  NodeId source;
  LeaseId lease;  // to be granted
  int64_t deadline_ns = 0;
  std::vector<Completion<ShipWait>> waiting;

  ShipState state = ShipState::kAsking;
  uint32_t attempt = 1;
  uint32_t parts_posted = 0;       // of this attempt
  Incarnation source_incarnation;  // of this attempt; none until the first offer
  LeaseId source_lease;
  int64_t next_send_ns = 0;        // ask, confirm or place again
  int64_t unanswered_ns = kNever;  // when the first of the questions that the source has not answered was sent
  std::vector<ShipItem> items;     // full pages in order of position, then partial, window, state
  int64_t full_pages = 0;          // of `items`
  size_t next_to_post = 0;         // items before it are posted, arrived or shared
  bool complete = false;           // all items are known
  int64_t tokens = 0;
  int64_t arrived = 0;
  int64_t bytes_arrived = 0;
  std::vector<PageRef> shared;  // local pages leased instead of fetched
};

class Ships {
 public:
  using Key = std::pair<SessionId, TicketId>;
  Ship* find(SessionId session, TicketId ticket) {
    const auto found = by_key_.find(Key(session, ticket));
    return found == by_key_.end() ? nullptr : found->second;
  }
  Ship* find(TicketId wire) {
    const auto found = ships_.find(wire);
    return found == ships_.end() ? nullptr : found->second.get();
  }
  Ship& open(std::unique_ptr<Ship> ship) {
    Ship* opened = ship.get();
    by_key_[Key(opened->session, opened->ticket)] = opened;
    ships_[opened->wire] = std::move(ship);
    return *opened;
  }
  std::unique_ptr<Ship> close(TicketId wire) {
    const auto found = ships_.find(wire);
    std::unique_ptr<Ship> ship = std::move(found->second);
    ships_.erase(found);
    by_key_.erase(Key(ship->session, ship->ticket));
    return ship;
  }
  std::vector<TicketId> of_session(SessionId session) const {
    std::vector<TicketId> wires;
    for (auto at = by_key_.lower_bound(Key(session, TicketId())); at != by_key_.end() && at->first.first == session; ++at) {
      wires.push_back(at->second->wire);
    }
    return wires;
  }
  int64_t size() const { return static_cast<int64_t>(ships_.size()); }
  const absl::btree_map<TicketId, std::unique_ptr<Ship>>& all() const { return ships_; }

  absl::btree_map<FetchId, ShipPart> parts;
  int64_t bytes_in_flight = 0;

 private:
  absl::btree_map<TicketId, std::unique_ptr<Ship>> ships_;
  absl::btree_map<Key, Ship*> by_key_;
};

}  // namespace needle::server
