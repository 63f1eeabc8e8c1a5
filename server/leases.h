// Open leases: the right of a session, or of a peer's ship, to read sealed pages.
//
// Owned by the core's state, loop thread only. server/README.md has the table operation x state.
//
// What must stay true:
//  1. An open lease counts once on each of its pages; opening and closing are the only places where that count changes on
//     its behalf.
//  2. Time ends only what is remote (expires_ns < INT64_MAX). A local lease ends by release, by its session's end, or by
//     being consumed in an adopt.
//  3. Who holds a page holds every page before it in the sequence.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "base/ids.h"
#include "server/messages.h"

namespace needle::server {

inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// A ship's lease at its source is found by who reads and for which ticket.
struct PeerReader {
  NodeId node;
  Incarnation incarnation;
  TicketId ticket;
  uint32_t attempt = 0;
  friend constexpr auto operator<=>(const PeerReader&, const PeerReader&) = default;
};

struct Lease {
  SessionId session;  // none: a peer's
  LeaseId id;
  PoolSetId set;
  PeerReader reader;    // when a peer's
  SequenceId sequence;  // none: a bare prefix
  PageTable table;
  std::vector<PageRef> pages;
  int64_t expires_ns = kNever;
};

class Leases {
 public:
  using Key = std::pair<SessionId, LeaseId>;

  Lease* find(SessionId session, LeaseId id) {
    const auto found = leases_.find(Key(session, id));
    return found == leases_.end() ? nullptr : found->second.get();
  }
  Lease* find(const PeerReader& reader) {
    const auto found = readers_.find(reader);
    return found == readers_.end() ? nullptr : found->second;
  }
  // Leases that a reader holds for earlier attempts of the same ticket.
  std::vector<LeaseId> earlier_attempts(const PeerReader& reader) const {
    std::vector<LeaseId> ids;
    PeerReader from = reader;
    from.attempt = 0;
    for (auto at = readers_.lower_bound(from); at != readers_.end() && at->first < reader; ++at) ids.push_back(at->second->id);
    return ids;
  }
  bool later_attempt_exists(const PeerReader& reader) const {
    const auto at = readers_.upper_bound(reader);
    return at != readers_.end() && at->first.node == reader.node && at->first.incarnation == reader.incarnation &&
           at->first.ticket == reader.ticket;
  }

  Lease& open(std::unique_ptr<Lease> lease) {
    Lease* opened = lease.get();
    const Key key(opened->session, opened->id);
    if (opened->expires_ns != kNever) expiry_.emplace(opened->expires_ns, key);
    if (!opened->reader.node.is_none()) readers_[opened->reader] = opened;
    leases_[key] = std::move(lease);
    return *opened;
  }
  std::unique_ptr<Lease> close(SessionId session, LeaseId id) {
    const auto found = leases_.find(Key(session, id));
    std::unique_ptr<Lease> lease = std::move(found->second);
    if (lease->expires_ns != kNever) expiry_.erase({lease->expires_ns, found->first});
    if (!lease->reader.node.is_none()) readers_.erase(lease->reader);
    leases_.erase(found);
    return lease;
  }
  void renew(Lease& lease, int64_t expires_ns) {
    if (lease.expires_ns == kNever) return;
    const Key key(lease.session, lease.id);
    expiry_.erase({lease.expires_ns, key});
    lease.expires_ns = expires_ns;
    expiry_.emplace(expires_ns, key);
  }
  int64_t next_expiry_ns() const { return expiry_.empty() ? kNever : expiry_.begin()->first; }
  Key next_to_expire() const { return expiry_.begin()->second; }

  std::vector<LeaseId> of_session(SessionId session) const {
    std::vector<LeaseId> ids;
    for (auto at = leases_.lower_bound(Key(session, LeaseId())); at != leases_.end() && at->first.first == session; ++at) {
      ids.push_back(at->first.second);
    }
    return ids;
  }
  int64_t size() const { return static_cast<int64_t>(leases_.size()); }
  const absl::btree_map<Key, std::unique_ptr<Lease>>& all() const { return leases_; }

 private:
  absl::btree_map<Key, std::unique_ptr<Lease>> leases_;
  absl::btree_map<PeerReader, Lease*> readers_;
  std::set<std::pair<int64_t, Key>> expiry_;
};

}  // namespace needle::server
