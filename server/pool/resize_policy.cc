#include "server/pool/resize_policy.h"

#include <algorithm>
#include <tuple>

#include "proto/errors.h"

namespace needle::server {

absl::StatusOr<ChunkTargets> chunk_targets(int64_t budget_bytes, const BudgetRatios& ratios,
                                           const std::array<PoolShape, kPoolKinds>& shapes) {
  int64_t sum = 0;
  for (int64_t ratio : ratios) {
    if (ratio < 0 || ratio > 1'000'000) {
      return make_error(ErrorCode::kInvalid, "a ratio is " + std::to_string(ratio) + ", allowed are 0 to 1000000");
    }
    sum += ratio;
  }
  if (sum == 0) return make_error(ErrorCode::kInvalid, "all ratios are 0: give the paged pool at least 1");

  ChunkTargets targets{};
  int64_t least_bytes = 0;
  int64_t spent = 0;
  for (size_t kind = 0; kind < kPoolKinds; ++kind) {
    const PoolShape& shape = shapes[kind];
    if (shape.page_bytes == 0) continue;  // the format has no such pool
    least_bytes += shape.chunk_bytes;
    const int64_t share = budget_bytes / sum * ratios[kind] + budget_bytes % sum * ratios[kind] / sum;  // without overflow
    targets[kind] = std::max<int64_t>(1, share / shape.chunk_bytes);
    targets[kind] = std::min(targets[kind], shape.chunks_max);
    spent += targets[kind] * shape.chunk_bytes;
  }
  if (budget_bytes < least_bytes) {
    return make_error(ErrorCode::kImpossible,
                      "the budget is " + std::to_string(budget_bytes) + " bytes, one chunk a pool needs " + std::to_string(least_bytes));
  }
  // Rounding up to one chunk may overspend: take back from whoever has most to give.
  while (spent > budget_bytes) {
    size_t richest = kPoolKinds;
    for (size_t kind = 0; kind < kPoolKinds; ++kind) {
      if (targets[kind] <= 1) continue;
      if (richest == kPoolKinds || targets[kind] * shapes[kind].chunk_bytes > targets[richest] * shapes[richest].chunk_bytes) {
        richest = kind;
      }
    }
    if (richest == kPoolKinds) return make_error(ErrorCode::kImpossible, "the budget has no room for one chunk a pool");
    --targets[richest];
    spent -= shapes[richest].chunk_bytes;
  }
  return targets;
}

std::vector<int64_t> choose_chunks_to_retire(std::span<const ChunkFacts> chunks, int64_t count) {
  std::vector<ChunkFacts> order(chunks.begin(), chunks.end());
  std::sort(order.begin(), order.end(), [](const ChunkFacts& a, const ChunkFacts& b) {
    return std::tuple(a.held_pages, a.idle_pages, -a.chunk) < std::tuple(b.held_pages, b.idle_pages, -b.chunk);
  });
  std::vector<int64_t> chosen;
  for (const ChunkFacts& facts : order) {
    if (static_cast<int64_t>(chosen.size()) == count) break;
    chosen.push_back(facts.chunk);
  }
  return chosen;
}

}  // namespace needle::server
