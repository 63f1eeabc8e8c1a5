// Evict and drain, as an operator asks for them.
//
// What must stay true:
//  1. Nothing held is evicted; asking for more than is idle evicts what is idle and says how much that was.
//  2. Draining never forgets what is open: it only takes nothing new.
#pragma once

#include "absl/status/statusor.h"
#include "server/state.h"

namespace needle::server::evict {

absl::StatusOr<Evict::Reply> evict(State& state, const Evict& request);
absl::StatusOr<Nothing> forget(State& state, const Forget& request);
absl::StatusOr<ListSequences::Reply> list_sequences(State& state, const ListSequences& request);
absl::StatusOr<Nothing> drain(State& state);
bool drained(const State& state);

}  // namespace needle::server::evict
