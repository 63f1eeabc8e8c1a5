// How many chunks each pool of a set should have, and which go: pure functions of budget, shapes and counts.
//
// What must stay true:
//  1. The targets together never cost more than the budget, and no pool of a kind in use gets less than one chunk.
//  2. Equal arguments give equal answers, whatever happened before: ratios can be changed back and forth live.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/messages.h"
#include "server/pool/page_types.h"

namespace needle::server {

using ChunkTargets = std::array<int64_t, kPoolKinds>;

// IMPOSSIBLE, with the numbers, when the budget cannot be met or a pool's address range is too short.
absl::StatusOr<ChunkTargets> chunk_targets(int64_t budget_bytes, const BudgetRatios& ratios,
                                           const std::array<PoolShape, kPoolKinds>& shapes);

struct ChunkFacts {
  int64_t chunk = 0;
  int64_t held_pages = 0;  // reserved, leased or draining: each may keep the chunk for long
  int64_t idle_pages = 0;  // sealed and unheld: each is a cache entry lost
};
// The `count` cheapest to give up: least held, then least cached, then the highest index, so that ranges stay compact.
std::vector<int64_t> choose_chunks_to_retire(std::span<const ChunkFacts> chunks, int64_t count);

}  // namespace needle::server
