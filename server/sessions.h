// Attached processes: who may ask, and who may still touch memory.
//
// Owned by the core's state, loop thread only.
//
// What must stay true:
//  1. live -> revoked -> gone; live -> gone; ghost -> gone. Only a live session has rights (tickets, leases, ships).
//  2. A revoked local session has no right and every page it may still touch in `pins`. It is gone, and they with it, when
//     it acknowledges or its process is dead; time alone never does that.
//  3. A ghost is a session of an earlier incarnation whose process may live. While any ghost exists, every page that held
//     content at restart is pinned once on behalf of them all (State::ghost_pins), since nobody knows who reads what.
//  4. A slot in the metadata region says who exists; it is written before the attach is answered and cleared after the
//     last pin went.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/btree_map.h"
#include "base/ids.h"
#include "server/messages.h"

namespace needle::server {

enum class Standing : uint8_t { kLive, kRevoked, kGhost };

struct Session {
  SessionId id;
  int64_t slot = -1;  // in the metadata region; -1: remote
  PoolSetId set;
  ProcessIdentity process;
  Standing standing = Standing::kLive;
  int64_t heard_ns = 0;
  struct Pin {
    PageRef page;
    TicketId ticket;  // of which it was; none for leased pages
  };
  std::vector<Pin> pins;

  bool is_remote() const { return process.pid == 0; }
};

class Sessions {
 public:
  explicit Sessions(int64_t slots) : slots_(static_cast<size_t>(slots), false) {}

  Session* find(SessionId id) {
    const auto found = sessions_.find(id);
    return found == sessions_.end() ? nullptr : found->second.get();
  }
  int64_t free_slot() const {
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      if (!slots_[slot]) return static_cast<int64_t>(slot);
    }
    return -1;
  }
  Session& add(std::unique_ptr<Session> session) {
    Session* added = session.get();
    if (added->slot >= 0) slots_[static_cast<size_t>(added->slot)] = true;
    sessions_[added->id] = std::move(session);
    return *added;
  }
  void erase(SessionId id) {
    const auto found = sessions_.find(id);
    if (found->second->slot >= 0) slots_[static_cast<size_t>(found->second->slot)] = false;
    sessions_.erase(found);
  }
  int64_t size() const { return static_cast<int64_t>(sessions_.size()); }
  const absl::btree_map<SessionId, std::unique_ptr<Session>>& all() const { return sessions_; }

 private:
  absl::btree_map<SessionId, std::unique_ptr<Session>> sessions_;
  std::vector<bool> slots_;
};

}  // namespace needle::server
