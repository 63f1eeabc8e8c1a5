// The life of an attached process: attach -> heartbeats -> detach | silence -> acknowledge | death.
//
// What must stay true:
//  1. Silence and the end of the socket take every right away at once; what the process may still touch is pinned.
//  2. Only its acknowledgement or its death gives pinned pages back. Time alone frees only what a remote client leased.
//  3. A session's slot in the metadata region is written before the attach is answered, and cleared after its last pin went.
#pragma once

#include "absl/status/statusor.h"
#include "server/state.h"

namespace needle::server::session_life {

absl::StatusOr<Attach::Reply> attach(State& state, const Attach& request);
absl::StatusOr<Nothing> heartbeat(State& state, const Heartbeat& request);
absl::StatusOr<Nothing> detach(State& state, const Detach& request);
absl::StatusOr<Nothing> acknowledge(State& state, const Acknowledge& request);
void lost(State& state, const SessionLost& event);
void died(State& state, const ProcessDied& event);

// `absent_ns` in which this daemon did not run count as nobody's silence.
void forgive(State& state, int64_t absent_ns);
// Revokes the sessions that have been silent too long.
void expire_silent(State& state);
int64_t next_silence_ns(const State& state);

}  // namespace needle::server::session_life
