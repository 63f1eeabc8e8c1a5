// What a block of select_topk reads of a row, where that lies in its shared memory, and where the keys go.
//
// What must stay true:
//  1. Aligned 16-byte parts are copied, and nothing past the length that the part was planned by.
//  2. Of strands a thread reads what it copied itself: no barrier stands between a copy and its use. A tile from the front is
//     copied for all, and its stage filled again when every warp has said that it took the tile.
//  3. Another block's shared memory is written by asynchronous stores alone, whose bytes a barrier of that block's counts.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/bulk_copy.cuh"
#include "kernels/select_topk.h"
#include "kernels/select_topk_block.cuh"
#include "kernels/select_topk_plan.h"

namespace needle {

inline constexpr int kStagesMax = 4;
inline constexpr int kSlotsMax = 32;  // entries that a thread's list may hold
inline constexpr int kClusterMax = 16;
inline constexpr int kStrandsAWarp = 2;  // and so 16-byte vectors of a tile that are a thread's
inline constexpr int kPieceVectorsLog2 = 5;
inline constexpr int kPieceVectors = 1 << kPieceVectorsLog2;  // of a strand in a tile: a warp's neighbouring vectors
inline constexpr int kSampleStrands = 64;                     // of a row that is streamed
inline constexpr int kSamplePieceLog2Min = 3;                 // vectors of a strand in the sample
inline constexpr int kSampleGroupsMax = 128;
inline constexpr int kGroupsOfPieceLog2 = 4;  // a piece's scores go to so many groups, neighbours together
inline constexpr int kGroupsOfPiece = 1 << kGroupsOfPieceLog2;
inline constexpr int kRankThreadsLog2 = 9;
inline constexpr int kRankThreads = 1 << kRankThreadsLog2;  // who rank the groups
inline constexpr float kSampleSigmas = 4.5f;                // of the group count that may lie below the guess: about 1 row in 1e5 reruns

template <int kThreads>
inline constexpr int kTileVectors = kThreads* kStrandsAWarp;
template <int kThreads>
inline constexpr int kTileVectorsLog2 = kThreads == 1024 ? 11 : 10;
static_assert(kTileVectors<1024> == 1 << kTileVectorsLog2<1024> && kTileVectors<512> == 1 << kTileVectorsLog2<512>);
template <int kThreads>
inline constexpr int kSamplePieceLog2Max = kThreads == 1024 ? 5 : 4;  // two vectors a thread
template <int kThreads>
inline constexpr int kTileBytes = 16 * kTileVectors<kThreads>;

// What the guess is made of: of each thread's first scores of the sample (1, 2, 4 or 8 of them) the best, of 64 or 128
// groups of threads the best, of those the rank-th smallest. rank 0: no useful guess, take everything.
struct SamplePlan {
  int values;
  int groups_log2;
  int rank;
  float share;  // of the entries that should reach the guess
};
// How often the sample holds the guess's score, where groups agree on it.
struct SampleCount {
  uint32_t above;
  uint32_t equal;
  uint32_t all;
};

// What a block reads of a row.
struct Part {
  const float* row;
  const float4* vectors;
  int head;  // scores before the first aligned one
  int length;
  int row_vectors;
  int strand;       // vectors of a strand; the last ones may have fewer or none
  int blocks_log2;  // of the cluster that have a part
  int tiles;        // of this block
  int sample_log2;  // vectors of a strand in the sample, of a row that is streamed
  bool by_strands;  // all of them are in the ring at once
  bool guesses;     // long enough for a guess
};
// What a block of the cluster leaves to the leader beside keys.
struct alignas(16) PoolFacts {
  uint64_t guess;
  uint32_t count;  // of keys, be it more than there was room for
  uint32_t order_max;
  uint32_t nans;
  uint32_t absents;
};

// Behind the pool; the threads' lists and the ring follow.
struct alignas(16) RowShared {
  uint64_t tile_landed[kStagesMax];
  uint64_t tile_taken[kStagesMax];
  uint32_t group_best[kSampleGroupsMax];  // as order bits; read by vectors
  PoolFacts pools[kClusterMax];           // of the cluster's blocks
  uint64_t handed;                        // where they arrive
  VisibleRow visible;
  Part part;
  SamplePlan sample;
  SampleCount sampled;
  bool planned_right;  // lengths and tables are what the part was planned by
  uint32_t guess_order;
  uint32_t guess_ties;  // groups whose best is the guess's score
};

static_assert(offsetof(RowShared, group_best) % 16 == 0);

__device__ __forceinline__ RowShared& row_shared(int capacity) { return *reinterpret_cast<RowShared*>(select_keys() + capacity); }

// ----------------------------------------------------------------------------------------- other blocks' shared memory

// A shared address as block `rank` of the cluster has it.
__device__ __forceinline__ uint32_t address_in_block(const void* pointer, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  return address;
}
// Stores whose bytes a barrier of that block's counts as they land.
__device__ __forceinline__ void store_in_block(uint32_t address, uint64_t value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(address), "l"(value), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void expect_in_block(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Barriers that were made are seen, with barrier_init_done() before; nothing else is handed round.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where a block's keys go: its own pool, or its place in the leader's.
struct PoolPlace {
  uint32_t keys;  // shared address
  uint32_t capacity;
  uint32_t barrier;  // of the leader's, where they are handed over; 0: they are not

  // What there is no room for is counted and not written.
  __device__ __forceinline__ void put(bool there, uint32_t place, uint64_t key) const {
    if (!there || place >= capacity) return;
    if (barrier != 0) {
      store_in_block(keys + 8 * place, key, barrier);
    } else {
      asm volatile("st.shared.u64 [%0], %1;" ::"r"(keys + 8 * place), "l"(key) : "memory");
    }
  }
};
// Puts the keys of a warp's lanes, `count` a lane, where the block has room. next() gives a lane's next key, and anything when
// there is none: two at a time, as their instructions wait for each other otherwise.
template <class Next>
__device__ __forceinline__ void put_keys(const PoolPlace& pool, uint32_t count, const Next& next) {
  const uint32_t total = __reduce_add_sync(0xFFFFFFFFu, count);
  if (total == 0) return;
  uint32_t to = add_for_warp(&select_shared().count, total);
  unsigned below = lanes_below();
  asm volatile("" : "+r"(below));  // asked for once
  uint32_t order_max = 0;
#pragma unroll 1
  for (uint32_t given = 0;; given += 2) {
    const unsigned first = __ballot_sync(0xFFFFFFFFu, given < count);
    const unsigned second = __ballot_sync(0xFFFFFFFFu, given + 1 < count);
    if (first == 0) break;
    const uint64_t key = next();
    const uint64_t after = next();
    order_max = max(order_max, given < count ? order_bits_of_key(key) : 0u);
    order_max = max(order_max, given + 1 < count ? order_bits_of_key(after) : 0u);
    pool.put(given < count, to + static_cast<uint32_t>(__popc(first & below)), key);
    to += static_cast<uint32_t>(__popc(first));
    pool.put(given + 1 < count, to + static_cast<uint32_t>(__popc(second & below)), after);
    to += static_cast<uint32_t>(__popc(second));
    __syncwarp();
  }
  note_order_max(order_max);
}

// --------------------------------------------------------------------------------------------------- tiles of the row

__device__ __forceinline__ void copy_vector(uint32_t to_shared, const float4* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from) : "memory");
}
// Until this thread's copies to the first stage have landed, or all of them.
template <bool kAll>
__device__ __forceinline__ void copies_landed() {
  if constexpr (kAll) {
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  }
}

// Where this thread's two vectors of a tile lie in the row, tile after tile.
struct TilePlace {
  int left[2];           // vectors from them to the end of their strand or of the row: nothing there where <= 0
  uint32_t position[2];  // of their first scores
  int step;              // vectors to the next tile's

  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int v = 0; v < kStrandsAWarp; ++v) {
      left[v] -= step;
      position[v] += 4 * static_cast<uint32_t>(step);
    }
  }
};
// Warp w has strands w and warps + w.
template <int kThreads>
__device__ __forceinline__ TilePlace first_by_strands(const Part& part, int rank) {
  constexpr int kWarps = kThreads / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int in_strand = static_cast<int>(threadIdx.x & 31u) + rank * kPieceVectors;
  TilePlace place;
  place.left[0] = min(part.strand, part.row_vectors - warp * part.strand) - in_strand;
  place.left[1] = min(part.strand, part.row_vectors - (kWarps + warp) * part.strand) - in_strand;
  place.position[0] = static_cast<uint32_t>(part.head + 4 * (warp * part.strand + in_strand));
  place.position[1] = place.position[0] + static_cast<uint32_t>(4 * kWarps * part.strand);
  place.step = kPieceVectors << part.blocks_log2;
  return place;
}
template <int kThreads>
__device__ __forceinline__ TilePlace first_from_front(const Part& part, int rank) {
  const int first = rank * kTileVectors<kThreads> + static_cast<int>(threadIdx.x);
  TilePlace place;
  place.left[0] = part.row_vectors - first;
  place.left[1] = place.left[0] - kThreads;
  place.position[0] = static_cast<uint32_t>(part.head + 4 * first);
  place.position[1] = place.position[0] + 4 * kThreads;
  place.step = kTileVectors<kThreads> << part.blocks_log2;
  return place;
}

// Asks for this thread's vectors of `tiles` tiles by strands, the first of them as a group of its own.
template <int kThreads>
__device__ __forceinline__ void ask_for_strands(const Part& part, TilePlace place, uint32_t ring, int tiles) {
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile, ring += kTileBytes<kThreads>) {
    if (place.left[0] > 0) copy_vector(ring, reinterpret_cast<const float4*>(part.row + place.position[0]));
    if (place.left[1] > 0) copy_vector(ring + kThreads * 16, reinterpret_cast<const float4*>(part.row + place.position[1]));
    if (tile == 0) asm volatile("cp.async.commit_group;" ::: "memory");
    place.advance();
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Asks for the part's tiles [first, end) from the front: a tile lies in a stage of the ring, counted round. By one thread.
template <int kThreads>
__device__ __forceinline__ void ask_for_tile(RowShared& shared, float4* ring, const Part& part, int rank, int tile, int stage) {
  const int first = ((tile << part.blocks_log2) + rank) * kTileVectors<kThreads>;
  const uint32_t bytes = static_cast<uint32_t>(min(kTileVectors<kThreads>, part.row_vectors - first)) * 16u;
  barrier_arrive_expect(&shared.tile_landed[stage], bytes);
  bulk_copy(ring + stage * kTileVectors<kThreads>, part.vectors + first, bytes, &shared.tile_landed[stage]);
}
template <int kThreads>
__device__ __forceinline__ void ask_for_first_tiles(RowShared& shared, float4* ring, const Part& part, int rank, int first, int end) {
#pragma unroll 1
  for (int tile = first; tile < min(end, part.tiles); ++tile) ask_for_tile<kThreads>(shared, ring, part, rank, tile, tile);
}
template <int kThreads>
inline constexpr uint32_t kTileTakenArrivals = kThreads / 32 * kWarpArrivals;
template <int kThreads>
__device__ __forceinline__ void init_ring(RowShared& shared, int stages) {
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    barrier_init(&shared.tile_landed[stage], 1);
    barrier_init(&shared.tile_taken[stage], kTileTakenArrivals<kThreads>);
  }
  barrier_init_done();
  shared_written();
}
// The ring as it began, once `tiles` tiles have gone through it and a block barrier lies between: where an odd number of them used a
// stage its barriers go on by a phase. Made anew they would say nothing of the copies that were waited for. Each phase is waited for,
// though it has ended, as synccheck asks. By one thread.
template <int kThreads>
__device__ __forceinline__ void restart_ring(RowShared& shared, int stages, int tiles) {
  const bool taken = tiles > stages;  // else nobody says that a tile was taken
#pragma unroll 1
  for (int stage = 0; stage < min(stages, tiles); ++stage) {
    const uint32_t last = static_cast<uint32_t>((tiles - stage - 1) / stages) & 1u;
    if (taken) barrier_wait(&shared.tile_taken[stage], last);
    if (last != 0) continue;
    barrier_arrive(&shared.tile_landed[stage]);
    barrier_wait(&shared.tile_landed[stage], 1);
    if (taken) {
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&shared.tile_taken[stage])),
                   "r"(kTileTakenArrivals<kThreads>)
                   : "memory");
      barrier_wait(&shared.tile_taken[stage], 1);
    }
  }
}

}  // namespace needle
