// From a row's scores to the leader's pool: what reaches the guess is picked from a part that lies in shared memory, or kept in
// lists while a part streams by, and handed over.
//
// What must stay true:
//  1. Everything that reaches the threshold is put into the pool, or counted there where it has no room.
//  2. NaN passes every comparison here and is looked at afterwards, with what positions decide.
#pragma once

#include "kernels/select_topk_part.cuh"
#include "kernels/select_topk_row.cuh"

namespace needle {

// A thread's list without the entries that are no numbers, or absent, or below the threshold after all. Returns how many stay.
template <int kThreads>
__device__ __noinline__ uint32_t sift_list(uint64_t* list, uint32_t held, uint64_t threshold) {
  Oddities found;
  uint32_t own = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < held; ++i) {
    const uint64_t pair = list[i * kThreads];
    uint64_t key;
    if (takes(true, __uint_as_float(static_cast<uint32_t>(pair >> 32)), static_cast<uint32_t>(pair), threshold, &key, &found)) {
      list[own * kThreads] = pair;
      own += 1;
    }
  }
  __syncwarp();
  found.note();
  return own;
}

// A warp's lists, `held` positions and scores a thread from key `first` of shared memory on, go to the pool as keys. Called by
// whole warps.
template <int kThreads>
__device__ __noinline__ void give_lists(uint32_t first, uint32_t held, uint64_t threshold, PoolPlace pool) {
  uint64_t* const list = select_keys() + first;
  bool odd = static_cast<uint32_t>(threshold) != 0;  // positions decide
#pragma unroll 1
  for (uint32_t i = 0; i < held; ++i) {
    const float score = reinterpret_cast<const float2*>(&list[i * kThreads])->y;
    odd = odd || score != score;
  }
  if (__any_sync(0xFFFFFFFFu, odd)) held = sift_list<kThreads>(list, held, threshold);
  const uint64_t* next = list;
  put_keys(pool, held, [&] {
    const uint2 pair = *reinterpret_cast<const uint2*>(next);
    next += kThreads;
    return rank_key_of(__uint_as_float(pair.y), pair.x);
  });
}

// The up to six scores around the aligned ones that reach the threshold go to the pool. By one warp.
__device__ __noinline__ inline void offer_edges(int plan_capacity, PoolPlace pool, uint64_t threshold) {
  const Part& part = row_shared(plan_capacity).part;
  const int i = static_cast<int>(threadIdx.x & 31u);
  const int position = i < 4 ? i : part.head + 4 * part.row_vectors + i - 4;
  const bool valid = i < 4 ? i < part.head : i < 8 && position < part.length;
  const float score = valid ? part.row[position] : 0.0f;
  Oddities found;
  uint64_t key;
  const bool take = takes(valid, score, static_cast<uint32_t>(position), threshold, &key, &found);
  __syncwarp();
  put_keys(pool, take ? 1u : 0u, [&] { return key; });
  found.note();
}

// One comparison a score: NaN passes, to be looked at later. Scores equal to the threshold's pass up to its position, later
// ones must be greater.
struct Bars {
  float floor;
  float floor_after;
  uint32_t last_equal;

  __device__ __forceinline__ explicit Bars(uint64_t threshold) {
    floor = score_of_key(threshold);
    floor_after = __uint_as_float(score_bits_of_order(order_bits_of_key(threshold) + 1));
    last_equal = position_of_key(threshold);
    asm volatile("" : "+f"(floor), "+f"(floor_after));  // else the compiler works them out anew for every vector
  }
  __device__ __forceinline__ float at(uint32_t position) const { return position > last_equal ? floor_after : floor; }
};

// This thread's scores of a part by strands, by number: four a vector, eight a tile.
template <int kThreads>
struct OwnScores {
  uint32_t ring;  // this thread's first place
  TilePlace first;

  __device__ __forceinline__ float score(uint32_t i) const {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(ring + (i >> 2) * (kThreads * 16) + (i & 3u) * 4));
    return value;
  }
  __device__ __forceinline__ uint32_t position(uint32_t i) const {
    const uint32_t begin = (i & 4u) != 0 ? first.position[1] : first.position[0];
    return begin + (i >> 3) * 4 * static_cast<uint32_t>(first.step) + (i & 3u);
  }
};

// Of the scores that `flags` name, those that are numbers and reach the threshold after all.
template <int kThreads>
__device__ __noinline__ uint32_t sift_flags(OwnScores<kThreads> own, uint32_t flags, uint64_t threshold) {
  Oddities found;
#pragma unroll 1
  for (uint32_t rest = flags; rest != 0; rest &= rest - 1) {
    const uint32_t i = static_cast<uint32_t>(__ffs(static_cast<int>(rest))) - 1;
    uint64_t key;
    if (!takes(true, own.score(i), own.position(i), threshold, &key, &found)) flags &= ~(1u << i);
  }
  __syncwarp();
  found.note();
  return flags;
}

// A part by strands, all of which lies in shared memory: what reaches the threshold goes to the block's pool. A flag a score;
// a block barrier must follow.
template <int kThreads>
__device__ __forceinline__ void pick_from_part(const Part& part, const OwnScores<kThreads>& own, const PoolPlace& pool,
                                               uint64_t threshold) {
  static_assert(kStagesMax * kStrandsAWarp * 4 <= 32, "a flag a score");
  const Bars bars(threshold);
  const int tiles = part.tiles;
  copies_landed<true>();
  TilePlace place = own.first;
  bool odd = static_cast<uint32_t>(threshold) != 0;  // positions decide
  uint32_t flags = 0;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    uint32_t here = 0;
#pragma unroll
    for (int v = 0; v < kStrandsAWarp; ++v) {
      if (place.left[v] <= 0) continue;
      const float4 scores = load_shared_vector(own.ring + static_cast<uint32_t>(tile * kTileBytes<kThreads> + v * kThreads * 16));
      const float bar = bars.at(place.position[v]);
      here |= (!(scores.x < bar) ? 1u << (4 * v) : 0u) | (!(scores.y < bar) ? 2u << (4 * v) : 0u) |
              (!(scores.z < bar) ? 4u << (4 * v) : 0u) | (!(scores.w < bar) ? 8u << (4 * v) : 0u);
      odd = odd || scores.x != scores.x || scores.y != scores.y || scores.z != scores.z || scores.w != scores.w;
    }
    flags |= here << (8 * tile);
    place.advance();
  }
  if (__any_sync(0xFFFFFFFFu, odd)) flags = sift_flags<kThreads>(own, flags, threshold);
  put_keys(pool, static_cast<uint32_t>(__popc(static_cast<int>(flags))), [&] {
    const uint32_t i = static_cast<uint32_t>(max(__ffs(static_cast<int>(flags)), 1)) - 1;
    flags &= flags - 1;
    return rank_key_of(own.score(i), own.position(i));
  });
}

// Streams the part from front to back, what reaches the threshold into the block's pool. Each thread keeps the scores that may
// reach it, with their positions, in a list of its own: no counter to share, a few predicated instructions for four scores
// whatever they are. The first tiles are on their way. A block barrier must follow.
template <int kThreads>
__device__ __forceinline__ void stream_part(RowShared& shared, float4* ring, const Part& part, int rank, uint32_t list,
                                            const SelectPlan& plan, const PoolPlace& pool, uint64_t threshold) {
  constexpr uint32_t kListStep = kThreads * 8;
  const int stages = plan.stages;
  const int tiles = part.tiles;
  TilePlace place = first_from_front<kThreads>(part, rank);
  const Bars bars(threshold);
  const uint32_t list_first = shared_address(select_keys() + list);
  const uint32_t list_nearly_full = list_first + static_cast<uint32_t>(plan.slots - 4) * kListStep;
  uint32_t next = list_first;
  const auto keep = [&](bool passes, float score, uint32_t position) {
    if (passes) {
      store_shared_pair(next, position, __float_as_uint(score));
      next += kListStep;
    }
  };

  const uint32_t ring_address = shared_address(ring + threadIdx.x);
  const int late = stages > 1 ? 1 : 0;  // a stage is refilled so many tiles later, so as not to wait for slower warps
  int stage = 0;
  uint32_t parity = 0;
  int refill = 0;
  uint32_t refill_parity = 0;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    barrier_wait(&shared.tile_landed[stage], parity);
    const uint32_t data = ring_address + static_cast<uint32_t>(stage * kTileBytes<kThreads>);
#pragma unroll
    for (int v = 0; v < kStrandsAWarp; ++v) {
      if (__any_sync(0xFFFFFFFFu, next > list_nearly_full)) {
        give_lists<kThreads>(list, (next - list_first) / kListStep, threshold, pool);
        next = list_first;
      }
      if (place.left[v] > 0) {
        const float4 scores = load_shared_vector(data + v * kThreads * 16);
        const uint32_t position = place.position[v];
        const float bar = bars.at(position);
        keep(!(scores.x < bar), scores.x, position);
        keep(!(scores.y < bar), scores.y, position + 1);
        keep(!(scores.z < bar), scores.z, position + 2);
        keep(!(scores.w < bar), scores.w, position + 3);
      }
    }
    place.advance();
    if (tiles > stages) {  // else nothing is overwritten
      barrier_arrive_warp(&shared.tile_taken[stage]);
      if (threadIdx.x == 0 && tile >= late && tile - late + stages < tiles) {
        barrier_wait(&shared.tile_taken[refill], refill_parity);
        ask_for_tile<kThreads>(shared, ring, part, rank, tile - late + stages, refill);
        if (++refill == stages) {
          refill = 0;
          refill_parity ^= 1u;
        }
      }
      __syncwarp();
    }
    if (++stage == stages) {
      stage = 0;
      parity ^= 1u;
    }
  }
  if (__any_sync(0xFFFFFFFFu, next > list_first)) give_lists<kThreads>(list, (next - list_first) / kListStep, threshold, pool);
}

// Says what a block has put into its place of the leader's pool, which is complete. By one thread.
__device__ __forceinline__ void hand_over(RowShared& shared, int rank, int blocks, const PoolPlace& place, uint64_t guess) {
  const SelectShared& pool = select_shared();
  const PoolFacts facts{guess, pool.count, pool.order_max, pool.nan_count, pool.absent_count};
  if (rank == 0) {
    shared.pools[0] = facts;
    // For itself, and for those that have no part.
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&shared.handed)), "r"(blocks) : "memory");
    return;
  }
  const uint32_t to = address_in_block(&shared.pools[rank], 0);
  store_in_block(to, facts.guess, place.barrier);
  store_in_block(to + 8, static_cast<uint64_t>(facts.order_max) << 32 | facts.count, place.barrier);
  store_in_block(to + 16, static_cast<uint64_t>(facts.absents) << 32 | facts.nans, place.barrier);
  static_assert(offsetof(PoolFacts, absents) == 20, "three stores");
  expect_in_block(place.barrier, 8 * min(facts.count, place.capacity) + 24);
}

// What the leader finds in its pool, by every warp for itself from a block's facts a lane; thread 0 notes it there too.
struct Handed {
  uint64_t highest_guess;
  uint32_t order_max;
  uint32_t held;   // keys in all
  KeyShare share;  // of the first kTailThreads threads
};
__device__ __forceinline__ Handed see_pools(const PoolFacts& facts, int cluster_log2, uint32_t capacity) {
  constexpr int kTailWarpsLog2 = 4;
  static_assert(kTailThreads == 32 << kTailWarpsLog2, "the tail's warps share the places evenly");
  const int lane = static_cast<int>(threadIdx.x & 31u);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Handed handed;
  const uint32_t high = static_cast<uint32_t>(facts.guess >> 32);
  const uint32_t highest = __reduce_max_sync(0xFFFFFFFFu, high);
  const uint32_t low = __reduce_max_sync(0xFFFFFFFFu, high == highest ? static_cast<uint32_t>(facts.guess) : 0u);
  handed.highest_guess = static_cast<uint64_t>(highest) << 32 | low;
  handed.order_max = __reduce_max_sync(0xFFFFFFFFu, facts.order_max);
  const uint32_t held = min(facts.count, capacity);
  handed.held = __reduce_add_sync(0xFFFFFFFFu, held);
  // Neighbouring warps share a block's place.
  const int warps_log2 = kTailWarpsLog2 - cluster_log2;
  const int source = warp >> warps_log2;
  const uint32_t begin = static_cast<uint32_t>(source) * capacity;
  const uint32_t theirs = __shfl_sync(0xFFFFFFFFu, held, source & 31);
  handed.share = {begin + static_cast<uint32_t>((warp & ((1 << warps_log2) - 1)) * 32 + lane), 32u << warps_log2, begin + theirs};
  if (threadIdx.x >= kTailThreads) handed.share.end = 0;
  if (warp == 0) {
    const uint32_t nans = __reduce_add_sync(0xFFFFFFFFu, facts.nans);
    const uint32_t absents = __reduce_add_sync(0xFFFFFFFFu, facts.absents);
    if (lane == 0) {
      SelectShared& pool = select_shared();
      pool.order_max = handed.order_max;
      pool.nan_count = nans;
      pool.absent_count = absents;
    }
  }
  return handed;
}

// What lies between the places' keys becomes 0. A barrier must follow.
__device__ __noinline__ inline void zero_rest(Handed handed, uint32_t capacity) {
  if (threadIdx.x >= kTailThreads) return;
  const uint32_t end = handed.share.first / capacity * capacity + capacity;
#pragma unroll 1
  for (uint32_t i = handed.share.first; i < end; i += handed.share.step) {
    if (i >= handed.share.end) select_keys()[i] = 0;
  }
  __syncwarp();
}

}  // namespace needle
