// The read journey: lookup -> acquire -> read (in the engine, or by the daemon for a remote reader) -> recheck -> release.
//
// What must stay true:
//  1. Bytes are good only if recheck, or holding a local lease, says so after the last one was read.
//  2. A lease ends once: released, expired (remote alone), revoked, or consumed by an adopt.
#pragma once

#include "absl/status/statusor.h"
#include "server/state.h"

namespace needle::server::read {

absl::StatusOr<Lookup::Reply> lookup(State& state, const Lookup& request);
absl::StatusOr<Acquire::Reply> acquire(State& state, const Acquire& request);
absl::StatusOr<Nothing> recheck(State& state, const Recheck& request);
absl::StatusOr<Nothing> release(State& state, const Release& request);

// Ends the remote leases whose time has come.
void expire_leases(State& state);

// A stored sequence whose whole chain is still there; else it is dropped and this is null.
const StoredSequence* whole_sequence(State& state, PoolSet& set, SequenceId sequence);
PageTable table_of(const StoredSequence& stored);

}  // namespace needle::server::read
