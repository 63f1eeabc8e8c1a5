// Open tickets of the store journey: the right of one session to complete one sequence.
//
// Owned by the core's state, loop thread only. server/README.md has the table operation x state.
//
// What must stay true:
//  1. A ticket is open until it ends, sealed or forfeited, once; then only its outcome is known (server/outcomes.h).
//  2. Its own pages are reserved and nobody else's; the pages it reads (shared prefix, sealed by itself, resume point)
//     carry one lease each on its behalf, listed in `leased`.
//  3. paged[0, pages_sealed) are sealed, named and in `leased`; the rest are its own.
//  4. At most one open ticket writes a sequence.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "base/ids.h"
#include "server/messages.h"

namespace needle::server {

struct Ticket {
  SessionId session;
  TicketId id;
  PoolSetId set;
  SequenceId sequence;
  uint64_t step = 0;

  std::vector<PageName> names;  // known so far, from position 0
  std::vector<PageId> paged;
  int64_t pages_shared = 0;  // at reserve or adopt
  int64_t pages_sealed = 0;
  int64_t tokens_reserved = 0;
  int64_t tokens_published = 0;
  std::vector<PageId> window;  // ring
  PageId state;
  std::vector<PageId> duplicates;        // private pages whose name was already stored
  std::vector<ResumeSlot> resume_slots;  // not yet sealed
  std::vector<int64_t> resume_sealed;    // boundaries done: a repeated SealResumePoint is answered OK
  std::vector<PageRef> leased;

  // The first reply, for a repeated Reserve or Adopt.
  int64_t matched_tokens = 0;
  int64_t resume_tokens = 0;
  std::vector<PageId> resume_window;
  PageId resume_state;
  std::vector<ResumeSlot> resume_slots_first;
  std::vector<Adopt::Copy> copies;
  bool lease_consumed = false;

  TicketView view() const { return {id, tokens_reserved, tokens_published, pages_sealed, paged, pages_shared, window, state}; }
};

class Tickets {
 public:
  using Key = std::pair<SessionId, TicketId>;

  Ticket* find(SessionId session, TicketId id) {
    const auto found = tickets_.find(Key(session, id));
    return found == tickets_.end() ? nullptr : found->second.get();
  }
  // Whose open ticket writes the sequence; null when none.
  Ticket* writer_of(PoolSetId set, SequenceId sequence) {
    const auto found = writers_.find(std::pair(set, sequence));
    return found == writers_.end() ? nullptr : found->second;
  }
  Ticket& open(std::unique_ptr<Ticket> ticket) {
    Ticket* opened = ticket.get();
    writers_[std::pair(opened->set, opened->sequence)] = opened;
    tickets_[Key(opened->session, opened->id)] = std::move(ticket);
    return *opened;
  }
  std::unique_ptr<Ticket> close(SessionId session, TicketId id) {
    const auto found = tickets_.find(Key(session, id));
    std::unique_ptr<Ticket> ticket = std::move(found->second);
    tickets_.erase(found);
    writers_.erase(std::pair(ticket->set, ticket->sequence));
    return ticket;
  }
  // In order of id, so that what follows is the same in every run.
  std::vector<TicketId> of_session(SessionId session) const {
    std::vector<TicketId> ids;
    for (auto at = tickets_.lower_bound(Key(session, TicketId())); at != tickets_.end() && at->first.first == session; ++at) {
      ids.push_back(at->first.second);
    }
    return ids;
  }
  int64_t size() const { return static_cast<int64_t>(tickets_.size()); }
  const absl::btree_map<Key, std::unique_ptr<Ticket>>& all() const { return tickets_; }

 private:
  absl::btree_map<Key, std::unique_ptr<Ticket>> tickets_;
  absl::flat_hash_map<std::pair<PoolSetId, SequenceId>, Ticket*> writers_;
};

}  // namespace needle::server
