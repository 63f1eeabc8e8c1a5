// Restart: from the metadata region of an earlier process to pools and catalog that can be trusted.
//
// What must stay true, for a kill at any write, also one during a restart:
//  1. A page is readable again only if its word says sealed, its record is whole and of the same generation, and what it
//     continues is readable too. A set only with its commit record and every member.
//  2. Pages that a living process may still touch are not free: reserved ones are pinned by their owner's ghost, all others
//     by the ghosts together. A ghost goes when its process attaches again, acknowledges or dies.
//  3. Every other page is free under a generation that was never less.
#pragma once

#include "server/state.h"

namespace needle::server::restart {

// Reads the region, or formats it when it is empty or of another layout. Pools have no chunk yet.
void rebuild(State& state);

}  // namespace needle::server::restart
