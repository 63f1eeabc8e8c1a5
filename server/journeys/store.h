// The store journey: reserve -> write (in the engine) -> publish, seal pages and resume points -> seal | forfeit.
//
// What must stay true:
//  1. reserve takes every page or none, and never evicts what anybody holds.
//  2. Full pages seal singly and in order; window, state and the partial page seal with the sequence, as one unit, last.
//  3. A step is applied once; a failed step changes nothing and may be tried again under the same number.
#pragma once

#include "absl/status/statusor.h"
#include "server/state.h"

namespace needle::server::store {

absl::StatusOr<Reserve::Reply> reserve(State& state, const Reserve& request);
absl::StatusOr<TicketView> extend(State& state, const Extend& request);
absl::StatusOr<TicketView> publish(State& state, const Publish& request);
absl::StatusOr<TicketView> truncate(State& state, const Truncate& request);
absl::StatusOr<TicketView> seal_pages(State& state, const SealPages& request);
absl::StatusOr<Nothing> seal_resume_point(State& state, const SealResumePoint& request);
absl::StatusOr<Seal::Reply> seal(State& state, const Seal& request);
absl::StatusOr<Nothing> forfeit(State& state, const Forfeit& request);

// Publishes a sequence whose full pages are sealed and whose other pages are reserved and written: members first, the
// state page, which is the commit, last. An earlier sequence of that id is undone before. Shared with the ship journey.
struct SequenceParts {
  SequenceId sequence;
  int64_t tokens = 0;
  std::vector<PageId> full;
  PageId partial;
  uint64_t partial_checksum = 0;
  std::vector<PageId> window;
  std::vector<uint64_t> window_checksums;
  PageId state;
  uint64_t state_checksum = 0;
};
void seal_sequence(State& state, PoolSet& set, const SequenceParts& parts);

// Seals one full page under its name after `parent`. The name must not be stored.
void seal_full_page(PoolSet& set, PageId page, const PageName& name, PageId parent, SequenceId sequence, int64_t tokens_end,
                    uint64_t checksum);

}  // namespace needle::server::store
