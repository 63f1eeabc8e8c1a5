// The resize journey: start -> grow and shrink chunk by chunk -> applied; or aborted in part.
//
// What must stay true:
//  1. Bytes held never exceed the larger of the old and the new budget: a pool grows only into what the others gave up.
//  2. A chunk's memory goes only when no page in it is used, every session that maps it has said that it unmapped it (or
//     is dead), and the transport let go of it. No timer shortens that.
//  3. A new chunk's pages are handed out only after memory and transport both have it.
//  4. Revisions count up by one; an old or skipped one changes nothing.
#pragma once

#include "absl/status/statusor.h"
#include "server/pool/resize_policy.h"
#include "server/state.h"

namespace needle::server::resize {

absl::StatusOr<ResizeProgress> resize(State& state, const Resize& request);
absl::StatusOr<ResizeProgress> status(State& state, const ResizeStatus& request);
absl::StatusOr<ResizeProgress> abort(State& state, const ResizeAbort& request);
absl::StatusOr<Nothing> chunk_unmapped(State& state, const ChunkUnmapped& request);
void chunk_allocated(State& state, const ChunkAllocated& event);
void chunk_registered(State& state, const RegisterCompletion& event);
void chunk_released(State& state, const ReleaseCompletion& event);

// Plans towards the set's budget and ratios; called at start and by resize().
void plan(State& state, PoolSet& set, const ChunkTargets& targets);

// Takes every step that has become possible. Called after every message; cheap when nothing is under way.
void advance(State& state);

void forget_session(State& state, SessionId session);  // it is dead, or has unmapped everything
bool is_unmapping(const PoolSet& set, PoolKind kind, ChunkIndex chunk);

}  // namespace needle::server::resize
