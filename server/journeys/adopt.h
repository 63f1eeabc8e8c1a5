// Adopt: go on from a sealed sequence. lease -> ticket.
//
// What must stay true:
//  1. Sealed bytes never change: a page that becomes writable again does so under the next generation, and only when the
//     adopter's lease was the only thing that held it.
//  2. Full pages stay shared. The partial page, window and state are moved together or copied together.
//  3. After a move the old sequence is gone and its lease consumed; after a copy both live on.
#pragma once

#include "absl/status/statusor.h"
#include "server/state.h"

namespace needle::server::adopt {

absl::StatusOr<Adopt::Reply> adopt(State& state, const Adopt& request);

}  // namespace needle::server::adopt
