// select_topk on the GPU: one read of the scores.
//
// A row is read once, by one block or by a cluster of blocks that take turns. Its sample is a piece of each of 32 or 64 strands
// of the row, and gives a rank key that about 2 to 3 k entries reach: the *guess*. Where shared memory holds all that a block
// reads, its tiles are the strands' pieces one after the other, so that the sample is the first of them, all are asked for at
// once, and a thread picks what reaches the guess from where it lies. Longer rows stream behind a small sample from front to
// back through a ring (bulk copies); each thread keeps what reaches the guess in a short list, without votes or atomics, and a
// warp gives its lists away when one of them is nearly full and at the end. What a block of a cluster finds goes straight to its
// place in the leading block's pool, which finds the exact k-th and puts the members in order by a bitmap over positions.
// docs/kernels-performance.md has the figures.
//
// What must stay true:
//  1. A guess is checked, and each block of a cluster has its own: what counts is what reaches the highest. Where more reached
//     it than the pool holds, the k-th best of what the pool does hold is a sound bound, and one block reads the row again
//     with that; where fewer than min(k, present) reached it, one block reads the row slowly, raising its threshold from
//     nothing. Both are counted in OpReport::fallbacks. No entry is ever dropped.
//  2. The answer is a function of the scores: neither guess, plan, timing nor cluster size can change it.
//  3. Aligned 16-byte parts are copied; the up to three scores before and after them are read by threads. Nothing past a
//     row's length is read.
//  4. Of strands a thread reads what it copied itself: no barrier stands between a copy and its use.
//  5. The leader's shared memory is written by other blocks once a cluster barrier has said that it has begun, and by
//     asynchronous stores alone, whose bytes a barrier of the leader's counts: a block says how many it stored, once. It may end
//     then: nobody looks into its memory.
//  6. An instruction that all 32 warps run costs a multiprocessor eight cycles: what few can do is done by few.
#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "kernels/bulk_copy.cuh"
#include "kernels/device_report.cuh"
#include "kernels/launch.cuh"
#include "kernels/select_topk.h"
#include "kernels/select_topk_block.cuh"
#include "kernels/select_topk_plan.h"
#include "kernels/select_topk_row.cuh"
#include "kernels/tuning.h"

namespace needle {
namespace {

constexpr int kStagesMax = 4;
constexpr int kSlotsMax = 32;  // entries that a thread's list may hold
constexpr int kClusterMax = 16;
constexpr int kStrandsAWarp = 2;  // and so 16-byte vectors of a tile that are a thread's
constexpr int kPieceVectorsLog2 = 5;
constexpr int kPieceVectors = 1 << kPieceVectorsLog2;  // of a strand in a tile: a warp's neighbouring vectors
constexpr int kSampleStrands = 64;                     // of a row that is streamed
constexpr int kSamplePieceLog2Min = 3;                 // vectors of a strand in the sample
constexpr int kSampleHits = 16;
constexpr int kSampleGroupsMax = 128;
constexpr int kGroupsOfPieceLog2 = 4;  // a piece's scores go to so many groups, neighbours together
constexpr int kGroupsOfPiece = 1 << kGroupsOfPieceLog2;
constexpr int kRankThreadsLog2 = 9;
constexpr int kRankThreads = 1 << kRankThreadsLog2;  // who rank the groups
constexpr float kSampleSigmas = 4.5f;                // of the group count that may lie below the guess: about 1 row in 1e5 reruns

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
// Barriers that were made are seen, with barrier_inits_visible() before; nothing else is handed round.
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
  barrier_expect(&shared.tile_landed[stage], bytes);
  bulk_load(ring + stage * kTileVectors<kThreads>, part.vectors + first, bytes, &shared.tile_landed[stage]);
}
template <int kThreads>
__device__ __forceinline__ void ask_for_first_tiles(RowShared& shared, float4* ring, const Part& part, int rank, int first, int end) {
#pragma unroll 1
  for (int tile = first; tile < min(end, part.tiles); ++tile) ask_for_tile<kThreads>(shared, ring, part, rank, tile, tile);
}
template <int kThreads>
__device__ __forceinline__ void init_ring(RowShared& shared, int stages) {
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    barrier_init(&shared.tile_landed[stage], 1);
    barrier_init(&shared.tile_taken[stage], kThreads / 32);
  }
  barrier_inits_visible();
}

// ------------------------------------------------------------------------------------------------- the sample's guess

// A group of g scores has its best below the k-th key with probability u = (1 - k/length)^g. Of the groups about
// groups x u do, +- sqrt(groups x u x (1 - u)); the guess is taken so far below that mean that it lies above the
// k-th key about once in 1e5 rows of independent scores. Correlated neighbours only move it down, to more candidates.
// Approximate arithmetic will do: no answer depends on it.
template <int kThreads>
__device__ __forceinline__ SamplePlan plan_sample(const Part& part, int k) {
  const int length = part.length;
  const int vectors = kSampleStrands << part.sample_log2;
  // Who has a vector of it; by strands each has two.
  const int holders = part.by_strands ? kThreads / kPieceVectors * min(part.strand, kPieceVectors) : min(vectors, kThreads);
  const int values_log2_max = part.by_strands || vectors > kThreads ? 3 : 2;
  SamplePlan plan;
  const float entry_share = __fdividef(static_cast<float>(k), static_cast<float>(length));
  // Candidates cost by their number: many groups for many candidates.
  const bool many = k > 512;
  plan.groups_log2 = many ? 7 : 6;
  const float groups = many ? 128.0f : 64.0f;
  const float threads = static_cast<float>(holders) / groups;  // of a group
  const float a_thread = __fdividef(many ? 1.0f : 0.7f, threads * entry_share);
  const int values_log2 = a_thread < 1.0f ? 0 : min(31 - __clz(static_cast<int>(a_thread)), values_log2_max);
  plan.values = 1 << values_log2;
  const float group_scores = threads * static_cast<float>(plan.values);
  const float below = exp2f(group_scores * __log2f(1.0f - entry_share));
  const float mean = groups * below;
  const float variance = mean * (1.0f - below);
  plan.rank = max(0, static_cast<int>(mean - kSampleSigmas * variance * rsqrtf(variance + 1e-6f)));
  plan.share = 1.0f - exp2f(__fdividef(__log2f(__fdividef(static_cast<float>(plan.rank), groups)), group_scores));
  return plan;
}

// This thread's scores of the sample: two vectors at most.
struct OwnSample {
  uint32_t at;    // shared address of the first; the second lies kThreads further on
  bool there[2];  // false: no such vector
  int strand;     // decides with `lane` to which group the scores belong
  int lane;       // of the piece's kGroupsOfPiece or fewer parts
  int lanes_log2;
};
// Of a part by strands: its first tile.
template <int kThreads>
__device__ __forceinline__ OwnSample sample_of_strands(const Part& part, const TilePlace& place, uint32_t ring) {
  const int lane = static_cast<int>(threadIdx.x & 31u);
  const int of_piece = part.strand >= kPieceVectors ? lane / (kPieceVectors / kGroupsOfPiece) : lane * kGroupsOfPiece / part.strand;
  return {ring, {place.left[0] > 0, place.left[1] > 0}, static_cast<int>(threadIdx.x / 32), of_piece, kGroupsOfPieceLog2};
}
// Of a row that is streamed: a piece of each of 64 strands, asked for here. It lies where the lists will.
template <int kThreads>
__device__ __forceinline__ OwnSample ask_for_sample(const Part& part, int rank, uint32_t memory) {
  const int strand_vectors = (part.row_vectors + kSampleStrands - 1) / kSampleStrands;
  const int piece_log2 = part.sample_log2;
  const int in_piece = static_cast<int>(threadIdx.x) & ((1 << piece_log2) - 1);
  OwnSample own;
  own.at = memory + threadIdx.x * 16;
  own.strand = static_cast<int>(threadIdx.x) >> piece_log2;
  own.lanes_log2 = min(piece_log2, kGroupsOfPieceLog2);
  own.lane = in_piece >> (piece_log2 - own.lanes_log2);
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int strand = own.strand + v * (kThreads >> piece_log2);
    const int vector = strand * strand_vectors + (rank << piece_log2) + in_piece;
    own.there[v] = strand < kSampleStrands && vector < part.row_vectors;
    if (own.there[v]) copy_vector(own.at + v * kThreads * 16, part.vectors + vector);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");  // there is no other group, as copies_landed() counts them
  return own;
}

// A rank key that about 2 to 3 k entries reach, for every thread, from the sample. A group's pieces are spread over the whole
// row, so that groups are alike however scores drift with position, and a run of high scores is in few of them. Where groups
// agree on the guess's score, the sample tells what share of its equals is wanted; spread evenly over the row, that share lies
// before a position. `when_back` is called once this thread's scores are back. Two block barriers, or three.
template <int kThreads, class WhenBack>
__device__ __forceinline__ uint64_t guess_threshold(RowShared& shared, const Part& part, const OwnSample& sample,
                                                    const WhenBack& when_back) {
  const SamplePlan plan = shared.sample;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float none = __uint_as_float(kAbsentScoreBits);
  copies_landed<false>();
  when_back();
  float4 first = load_shared_vector(sample.at);
  float4 second = load_shared_vector(sample.at + kThreads * 16);
  if (!sample.there[0]) first = float4{none, none, none, none};
  if (!sample.there[1]) second = float4{none, none, none, none};
  float best = first.x;  // fmaxf() ignores NaN
  if (plan.values >= 2) best = fmaxf(best, first.y);
  if (plan.values >= 4) best = fmaxf(best, fmaxf(first.z, first.w));
  if (plan.values >= 8) best = fmaxf(best, fmaxf(fmaxf(second.x, second.y), fmaxf(second.z, second.w)));
  const uint32_t best_order = order_bits_of(best);
  const int classes = (1 << plan.groups_log2) >> sample.lanes_log2;  // of strands
  const int group_here = (sample.strand & (classes - 1)) << sample.lanes_log2 | sample.lane;
  if (best_order != 0) {
    asm volatile("red.relaxed.cta.shared::cta.max.u32 [%0], %1;" ::"r"(shared_address(&shared.group_best[group_here])), "r"(best_order)
                 : "memory");
  }
  __syncthreads();
  if (threadIdx.x < kRankThreads) {
    // Rank of each group's best among all, by four or eight neighbouring threads.
    const int sharers_log2 = kRankThreadsLog2 - plan.groups_log2;
    const int sharer = static_cast<int>(threadIdx.x) & ((1 << sharers_log2) - 1);
    const int group = static_cast<int>(threadIdx.x) >> sharers_log2;
    const uint32_t own = shared.group_best[group];
    const uint4* const bests = reinterpret_cast<const uint4*>(shared.group_best);
    uint32_t counted = 0;  // smaller ones, and 65,536 for each equal one
    const auto count = [&](uint32_t there) { counted += there < own ? 1u : there == own ? 65536u : 0u; };
#pragma unroll 2
    for (int other = sharer; other < (1 << plan.groups_log2) / 4; other += 1 << sharers_log2) {
      const uint4 four = bests[other];
      count(four.x);
      count(four.y);
      count(four.z);
      count(four.w);
    }
    counted += __shfl_xor_sync(0xFFFFFFFFu, counted, 1);
    counted += __shfl_xor_sync(0xFFFFFFFFu, counted, 2);
    if (sharers_log2 == 3) counted += __shfl_xor_sync(0xFFFFFFFFu, counted, 4);
    const int smaller = static_cast<int>(counted % 65536u);
    const int equal = static_cast<int>(counted / 65536u);
    if (sharer == 0 && smaller < plan.rank && plan.rank <= smaller + equal) {  // equal ones say the same
      shared.guess_order = own;
      shared.guess_ties = static_cast<uint32_t>(equal);
    }
  }
  __syncthreads();
  const uint32_t order = shared.guess_order;
  uint32_t before = 0xFFFFFFFFu;  // of scores that equal the guess's, those up to here are in
  if (order != 0 && shared.guess_ties > 1) {
    const float score[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    uint32_t above = 0;
    uint32_t equal = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t there = order_bits_of(score[i]);
      above += there > order ? 1u : 0u;
      equal += there == order ? 1u : 0u;
    }
    above = __reduce_add_sync(0xFFFFFFFFu, above);
    equal = __reduce_add_sync(0xFFFFFFFFu, equal);
    const uint32_t all = __reduce_add_sync(0xFFFFFFFFu, (sample.there[0] ? 4u : 0u) + (sample.there[1] ? 4u : 0u));
    if (lane == 0) {
      atomicAdd(&shared.sampled.above, above);
      atomicAdd(&shared.sampled.equal, equal);
      atomicAdd(&shared.sampled.all, all);
    }
    __syncthreads();
    const SampleCount sampled = shared.sampled;
    const float wanted = plan.share * static_cast<float>(sampled.all) - static_cast<float>(sampled.above);
    const float share = __fdividef(fmaxf(wanted, 0.0f), static_cast<float>(max(sampled.equal, 1u)));
    if (share < 1.0f) before = static_cast<uint32_t>(share * static_cast<float>(part.length));
  }
  return static_cast<uint64_t>(order) << 32 | (0xFFFFFFFFu - before);
}

// ------------------------------------------------------------------------------------------------------- reading a part

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
__device__ __noinline__ void offer_edges(int plan_capacity, PoolPlace pool, uint64_t threshold) {
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
      __syncwarp();
      if ((threadIdx.x & 31u) == 0) barrier_arrive(&shared.tile_taken[stage]);
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
__device__ __noinline__ void zero_rest(Handed handed, uint32_t capacity) {
  if (threadIdx.x >= kTailThreads) return;
  const uint32_t end = handed.share.first / capacity * capacity + capacity;
#pragma unroll 1
  for (uint32_t i = handed.share.first; i < end; i += handed.share.step) {
    if (i >= handed.share.end) select_keys()[i] = 0;
  }
  __syncwarp();
}

// --------------------------------------------------------------------------------------------------------- the kernel

// What warp 0 finds out about the row.
template <int kThreads>
__device__ __forceinline__ void plan_part(const SelectTopkArgs& args, const SelectPlan& plan, int64_t row, int rank, RowShared& shared) {
  constexpr int kStrands = kStrandsAWarp * kThreads / 32;
  const VisibleRow visible = visible_row(args, row);
  Part part;
  part.row = args.scores + row * args.score_stride;
  part.length = static_cast<int>(visible.length);
  part.head = min(part.length, static_cast<int>(((16u - (reinterpret_cast<uintptr_t>(part.row) & 15u)) & 15u) / 4));
  part.vectors = reinterpret_cast<const float4*>(part.row + part.head);
  part.row_vectors = (part.length - part.head) / 4;
  part.strand = (part.row_vectors + kStrands - 1) / kStrands;
  part.guesses = part.row_vectors >= kThreads && args.k < part.length;
  // Each block has a whole piece of each strand for a sample.
  part.blocks_log2 = part.guesses ? min(plan.cluster_log2, 31 - __clz(max(1, part.strand / kPieceVectors))) : 0;
  const int strand_step_log2 = kPieceVectorsLog2 + part.blocks_log2;
  part.by_strands = part.strand <= plan.stages << strand_step_log2;
  part.guesses = part.guesses && (part.by_strands || plan.slots > 0);
  const int row_step_log2 = kTileVectorsLog2<kThreads> + part.blocks_log2;
  part.tiles = part.by_strands ? (part.strand - rank * kPieceVectors + (1 << strand_step_log2) - 1) >> strand_step_log2
                               : max(0, part.row_vectors - rank * kTileVectors<kThreads> + (1 << row_step_log2) - 1) >> row_step_log2;
  // Each block has its own piece of every strand.
  const int strand_log2 = 31 - __clz(max(1, part.row_vectors / kSampleStrands));
  part.sample_log2 = max(kSamplePieceLog2Min, min(min(plan.sample_log2, kSamplePieceLog2Max<kThreads>), strand_log2 - part.blocks_log2));
  if (threadIdx.x == 0) {
    shared.visible = visible;
    shared.part = part;
  }
}

template <int kThreads, int kBlocksPerSm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    select_topk_kernel(const __grid_constant__ SelectTopkArgs args, const __grid_constant__ SelectPlan plan) {
  RowShared& shared = row_shared(plan.capacity);
  SelectShared& pool = select_shared();
  uint64_t* const lists = reinterpret_cast<uint64_t*>(&shared + 1);
  float4* ring = reinterpret_cast<float4*>(lists + plan.slots * kThreads);
  const int rank = plan.cluster > 1 ? static_cast<int>(rank_in_cluster()) : 0;
  const bool leader = rank == 0;
  const int64_t row = blockIdx.x >> plan.cluster_log2;

  // Arguments are constants, whose lines come from memory when they are first looked at: now rather than later.
  asm volatile("" ::"l"(args.scores), "l"(args.lengths), "r"(args.k), "l"(args.positions), "l"(args.out_stride), "r"(plan.slots));
  block_begin<kThreads>();
  if (threadIdx.x < kSampleGroupsMax) shared.group_best[threadIdx.x] = 0;
  if (threadIdx.x == kThreads - 1) {  // not of the warp that plans
    barrier_init(&shared.handed, static_cast<uint32_t>(plan.cluster));
    init_ring<kThreads>(shared, plan.stages);
    shared.sampled = SampleCount{};
  }
  __syncwarp();
  if (plan.cluster > 1) cluster_arrive();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x < 32) plan_part<kThreads>(args, plan, row, rank, shared);
  __syncthreads();

  const Part& part = shared.part;
  if (part.length == 0) {
    if (!leader) return;
    give_padding<kThreads>(args, row, 0);
    if (threadIdx.x == 0) report_status(args.report, shared.visible.status);
    return;
  }
  const int blocks = 1 << part.blocks_log2;
  if (rank >= blocks) return;

  const FreeMemory memory{reinterpret_cast<uint4*>(lists),
                          static_cast<uint32_t>(plan.slots * kThreads * 8 + plan.stages * kTileBytes<kThreads>)};
  const bool covered = args.k < part.length && memory.covers(args, static_cast<uint32_t>(part.length));
  CompletePool complete{};
  bool guesses = part.guesses;
  if (guesses) {
    const int stages = plan.stages;
    const uint32_t own_ring = shared_address(ring + threadIdx.x);
    const TilePlace place = first_by_strands<kThreads>(part, rank);
    OwnSample sample;
    if (part.by_strands) {
      ask_for_strands<kThreads>(part, place, own_ring, part.tiles);
      sample = sample_of_strands<kThreads>(part, place, own_ring);
    } else {
      sample = ask_for_sample<kThreads>(part, rank, shared_address(lists));
    }
    // Behind all of the ring's bytes the sample would wait for microseconds: a tile or two keep memory busy till it is back.
    const int early = min(max(1, stages - 2), stages);
    if (threadIdx.x == 0 && !part.by_strands) ask_for_first_tiles<kThreads>(shared, ring, part, rank, 0, early);
    __syncwarp();
    if (threadIdx.x / 32 == kThreads / 32 - 1) {
      const SamplePlan planned = plan_sample<kThreads>(part, args.k);
      if (threadIdx.x == kThreads - 1) shared.sample = planned;
    }
    __syncthreads();
    guesses = shared.sample.rank != 0;
    if (guesses) {
      uint64_t guess = guess_threshold<kThreads>(shared, part, sample, [&] {
        if (threadIdx.x == 0 && !part.by_strands) ask_for_first_tiles<kThreads>(shared, ring, part, rank, early, stages);
        __syncwarp();
      });
      const uint32_t list = static_cast<uint32_t>(lists - select_keys()) + threadIdx.x;
      PoolPlace own{shared_address(select_keys()), static_cast<uint32_t>(plan.capacity), 0};
      if (blocks > 1) {
        cluster_wait();  // the leader has begun
        own.capacity >>= plan.cluster_log2;
        if (!leader) {
          own.keys = address_in_block(select_keys() + static_cast<uint32_t>(rank) * own.capacity, 0);
          own.barrier = address_in_block(&shared.handed, 0);
        }
      }
      bool together = blocks > 1;
#pragma unroll 1
      for (;;) {
        if (rank == 0 && threadIdx.x < 32 && 4 * part.row_vectors < part.length) offer_edges(plan.capacity, own, guess);
        if (part.by_strands) {
          pick_from_part<kThreads>(part, OwnScores<kThreads>{own_ring, place}, own, guess);
        } else {
          stream_part<kThreads>(shared, ring, part, rank, list, plan, own, guess);
        }
        __syncthreads();
        if (together) {
          if (threadIdx.x == kThreads - 1) hand_over(shared, rank, plan.cluster - blocks + 1, own, guess);
          if (!leader) return;
        }
        bool over;
        bool enough = true;  // keys for a bound
        if (together) {
          if (covered && threadIdx.x < kTailThreads) MemberMap(memory.at, static_cast<uint32_t>(part.length)).clear();
          barrier_wait(&shared.handed, 0);
          PoolFacts facts{};
          if (static_cast<int>(threadIdx.x & 31u) < blocks) facts = shared.pools[threadIdx.x & 31u];
          over = __any_sync(0xFFFFFFFFu, facts.count > own.capacity);
          if (!over && threadIdx.x >= kTailThreads) return;
          const Handed handed = see_pools(facts, plan.cluster_log2, own.capacity);
          guess = handed.highest_guess;
          complete.share = handed.share;
          complete.order_max = handed.order_max;
          complete.extent = static_cast<uint32_t>(plan.capacity);
          // No lists: the others' shares cannot be read.
          enough = handed.held >= static_cast<uint32_t>(args.k) && plan.slots > 0;
          if (args.order == TopkOrder::kByRank) zero_rest(handed, own.capacity);
        } else {
          complete.extent = pool.count;
          complete.share = share_of_run<kTailThreads>(static_cast<int>(complete.extent));
          complete.order_max = pool.order_max;
          over = complete.extent > own.capacity;
          if (covered && !over && threadIdx.x < kTailThreads) MemberMap(memory.at, static_cast<uint32_t>(part.length)).clear();
        }
        complete.low = max(guess, uint64_t{1});
        if (!over) break;
        if (!enough) {
          guesses = false;
          if (threadIdx.x == 0) pool.overflows += 1;
          break;
        }
        // More reached the guess than there is room for. Keys that did are in the pool, and their k-th is a bound.
        fence_before_bulk_store();  // the ring was read and perhaps cleared by threads, and is written by copies again
        __syncthreads();
        guess = block_kth_bound<kThreads>(together ? complete.share : share_of_run<kThreads>(plan.capacity), args.k, 1);
        const bool all_here = part.by_strands && blocks == 1;
        together = false;
        own = PoolPlace{shared_address(select_keys()), static_cast<uint32_t>(plan.capacity), 0};
        __syncthreads();
        if (threadIdx.x == 0) {
          pool.count = 0;
          pool.order_max = 0;
          pool.nan_count = 0;
          pool.absent_count = 0;
          pool.overflows += 1;
        }
        if (!all_here && threadIdx.x == 0) {
          shared.part.blocks_log2 = 0;
          shared.part.by_strands = false;
          shared.part.tiles = (part.row_vectors + kTileVectors<kThreads> - 1) / kTileVectors<kThreads>;
          fence_before_bulk_store();
          init_ring<kThreads>(shared, stages);
          ask_for_first_tiles<kThreads>(shared, ring, part, 0, 0, stages);
        }
        __syncthreads();
      }
    } else {
      copies_landed<true>();
      for (int tile = 0; !part.by_strands && tile < min(early, part.tiles); ++tile) barrier_wait(&shared.tile_landed[tile], 0);
      __syncthreads();
      if (!leader) return;
    }
  }
  if (threadIdx.x >= kTailThreads) return;

  // By what the guess gave; where too few reached it, or nobody could guess, by reading the row slowly and surely.
  Given given{};
#pragma unroll 1
  for (;;) {
    if (!guesses) {
      read_part_slowly<kTailThreads>(part.row, 0, part.length, plan.capacity, args.k, 0);
      complete.extent = pool.count;
      complete.share = share_of_run<kTailThreads>(static_cast<int>(complete.extent));
      complete.low = max(pool.threshold, uint64_t{1});
      complete.order_max = pool.order_max;
      if (covered) MemberMap(memory.at, static_cast<uint32_t>(part.length)).clear();
    }
    uint32_t reaching;
    if (covered) {
      const MemberMap map(memory.at, static_cast<uint32_t>(part.length));
      const AtOnce at_once = give_at_once(args, shared.visible, row, map, complete.share, complete.low, complete.order_max, &given.absent);
      if (at_once.given) {
        given.members = args.k;
        break;
      }
      reaching = at_once.reaching;
    } else {
      reaching = count_reaching(complete.share, complete.low);
    }
    if (!guesses || static_cast<int>(reaching) >= min(args.k, part.length - static_cast<int>(pool.absent_count))) {
      given = give_pool(args, shared.visible, row, static_cast<uint32_t>(part.length), complete, static_cast<int>(reaching), memory);
      break;
    }
    guesses = false;
    if (threadIdx.x == 0) pool.overflows += 1;
  }
  end_row(args, shared.visible, row, given.members, given.absent);
}

// ------------------------------------------------------------------------------------------------------------- merging

constexpr int kSetThreads = 256;  // of a merge's or a list's block

// One block a row. Lists are offered stretch by stretch; a full buffer raises the threshold to the exact k-th so far.
__global__ void __launch_bounds__(kSetThreads, 1) merge_topk_kernel(const __grid_constant__ MergeTopkArgs args, int capacity) {
  SelectShared& shared = select_shared();
  uint64_t* keys = select_keys();
  block_begin<kSetThreads>();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  __syncthreads();

  // The key of item `place` of the row's lists laid end to end, each in_stride long; 0 for what does not count.
  const auto key_at = [&](int64_t place, uint32_t* absent) -> uint64_t {
    const int64_t shard = place / args.in_stride;
    const int64_t item = place - shard * args.in_stride;
    const int64_t list = shard * args.rows + row;
    if (item >= args.counts[list]) return 0;
    const int32_t position = args.positions[list * args.in_stride + item];
    if (position < 0) return 0;
    const uint32_t bits = __float_as_uint(args.scores[list * args.in_stride + item]);
    if (bits == kAbsentScoreBits) {
      *absent += 1;
      return 0;
    }
    return rank_key(bits, static_cast<uint32_t>(position));
  };

  const int64_t total = static_cast<int64_t>(args.shards) * args.in_stride;
  uint32_t absent = 0;
  uint32_t order_max = 0;
  uint64_t threshold = 0;
  for (int64_t first = 0; first < total;) {
    int held = static_cast<int>(shared.count);
    if (held + kSetThreads > capacity) {
      note_order_max(order_max);
      block_raise_threshold<kSetThreads>(held, args.k);
      threshold = shared.threshold;
      held = static_cast<int>(shared.count);
    }
    __syncthreads();
    const int64_t stretches = min(static_cast<int64_t>((capacity - held) / kSetThreads), (total - first + kSetThreads - 1) / kSetThreads);
    for (int64_t stretch = 0; stretch < stretches; ++stretch, first += kSetThreads) {
      const int64_t place = first + threadIdx.x;
      const uint64_t key = place < total ? key_at(place, &absent) : 0;
      const bool take = key != 0 && key >= threshold;
      if (take) order_max = max(order_max, order_bits_of_key(key));
      append_key(take, key, static_cast<uint32_t>(capacity));
    }
    __syncthreads();
  }
  note_order_max(order_max);
  if (args.report != nullptr) {
    absent = __reduce_add_sync(0xFFFFFFFFu, absent);
    if ((threadIdx.x & 31) == 0 && absent != 0) {
      report_status(args.report, kStatusAbsentPage);
      report_count(args.report, &OpReport::absent_entries, absent);
    }
    if (threadIdx.x == 0) report_count(args.report, &OpReport::fallbacks, shared.overflows);
  }
  __syncthreads();

  const int count = static_cast<int>(shared.count);
  const int members = min(args.k, count);
  uint64_t bound = max(threshold, uint64_t{1});  // below the threshold lies what was offered and dropped
  if (count > args.k) bound = block_kth_bound<kSetThreads>(share_of_run<kSetThreads>(count), args.k, threshold);
  block_keep_at_least<kSetThreads>(count, bound);
  const bool by_position = args.order == TopkOrder::kByPosition;
  const auto turned = [](uint64_t key) { return key << 32 | key >> 32; };  // larger = lower position
  if (by_position) {
    for (int i = threadIdx.x; i < members; i += kSetThreads) keys[i] = turned(keys[i]);
    __syncthreads();
  }
  block_sort_descending<kSetThreads>(members);
  for (int64_t i = threadIdx.x; i < args.out_stride; i += kSetThreads) {
    const bool valid = i < members;
    const uint64_t key = !valid ? 0 : by_position ? turned(keys[i]) : keys[i];
    const int64_t out = row * args.out_stride + i;
    args.out_positions[out] = valid ? static_cast<int32_t>(position_of_key(key)) : kNoEntry;
    if (args.out_scores != nullptr) args.out_scores[out] = valid ? score_of_key(key) : -INFINITY;
    if (args.out_slots != nullptr && !valid) args.out_slots[out] = kNoEntry;
  }
  if (threadIdx.x == 0) args.out_counts[row] = members;
  if (args.out_slots == nullptr || members == 0) return;
  uint32_t ignored = 0;
  for (int64_t place = threadIdx.x; place < total; place += kSetThreads) {
    const uint64_t key = key_at(place, &ignored);
    if (key == 0 || key < bound) continue;
    const uint64_t number = by_position ? turned(key) : key;
    int low = 0;  // the first index whose number is <= `number`; it is there
    int high = members - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (keys[middle] > number) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const int64_t shard = place / args.in_stride;
    const int64_t in = (shard * args.rows + row) * args.in_stride + (place - shard * args.in_stride);
    args.out_slots[row * args.out_stride + low] = args.slots[in];
  }
}

// -------------------------------------------------------------------------------------------------------- list_slots

__global__ void __launch_bounds__(kSetThreads) list_slots_kernel(const __grid_constant__ ListSlotsArgs args) {
  constexpr int kEntriesAThread = 8;
  __shared__ uint32_t warp_sums[32];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const int64_t table_row = row / args.rows_per_table_row;
  const int32_t* pages = args.pages.pages + table_row * args.pages.row_stride;
  const int64_t base = args.pages.entry_base != nullptr ? args.pages.entry_base[table_row] : 0;
  const int64_t held = static_cast<int64_t>(args.pages.pages_per_row) * args.slots_per_page;
  const int64_t limit = min(held, args.out_stride);
  int64_t length = max(args.lengths[row], 0);
  const bool cut = length > limit;
  if (cut) length = limit;

  uint32_t absent = 0;
  int64_t given = 0;
  for (int64_t first = 0; first < length; first += kSetThreads * kEntriesAThread) {
    const int64_t mine = first + static_cast<int64_t>(threadIdx.x) * kEntriesAThread;
    int32_t slots[kEntriesAThread];
    uint32_t present = 0;
#pragma unroll
    for (int i = 0; i < kEntriesAThread; ++i) {
      slots[i] = kNoEntry;
      if (mine + i < length) {
        slots[i] = slot_of_entry(pages, args.page_count, args.slots_per_page, mine + i);
        present += slots[i] != kNoEntry;
        absent += slots[i] == kNoEntry;
      }
    }
    uint32_t total;
    int64_t out = row * args.out_stride + given + block_exclusive_scan<kSetThreads>(warp_sums, present, &total);
#pragma unroll
    for (int i = 0; i < kEntriesAThread; ++i) {
      if (slots[i] == kNoEntry) continue;
      args.slots[out] = slots[i];
      if (args.positions != nullptr) args.positions[out] = static_cast<int32_t>(base + mine + i);
      ++out;
    }
    given += total;
    __syncthreads();
  }
  for (int64_t i = given + threadIdx.x; i < args.out_stride; i += kSetThreads) {
    args.slots[row * args.out_stride + i] = kNoEntry;
    if (args.positions != nullptr) args.positions[row * args.out_stride + i] = kNoEntry;
  }
  if (threadIdx.x == 0) args.counts[row] = static_cast<int32_t>(given);
  if (args.report == nullptr) return;
  absent = __reduce_add_sync(0xFFFFFFFFu, absent);
  if ((threadIdx.x & 31) == 0 && absent != 0) {
    report_status(args.report, kStatusAbsentPage);
    report_count(args.report, &OpReport::absent_entries, absent);
  }
  if (threadIdx.x == 0 && cut) report_status(args.report, kStatusBadPageTable);
}

__global__ void add_status_kernel(OpReport* report, uint32_t status) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  atomicOr(&report->status, status);
}

int next_power_of_two(int value) {
  int power = 1;
  while (power < value) power <<= 1;
  return power;
}

}  // namespace

int64_t select_topk_shared_bytes(const SelectPlan& plan) {
  return int64_t{sizeof(SelectShared)} + int64_t{plan.capacity} * 8 + int64_t{sizeof(RowShared)} + int64_t{plan.slots} * plan.threads * 8 +
         int64_t{plan.stages} * plan.threads * kStrandsAWarp * 16;
}

SelectPlan plan_select_topk(const SelectTopkArgs& args, const DeviceFacts& facts) {
  const SelectTuning& tuning = select_tuning(facts.major);
  SelectPlan plan;
  // A sample is as small as a fair guess allows: so many of the k best should be in it.
  const int64_t hits = std::max(kSampleHits, args.k / 32);
  plan.sample_log2 = kSamplePieceLog2Min;
  while (plan.sample_log2 < 5 && (int64_t{4 * kSampleStrands} << plan.sample_log2) * args.k < hits * args.length_max) ++plan.sample_log2;
  // A few rows: as many blocks a row as the GPU has room for, so that every multiprocessor reads. Many: one a row.
  const int64_t rows = std::max<int64_t>(args.rows, 1);
  const int cluster_max = rows <= tuning.widest_cluster_rows_max ? tuning.cluster_max : std::min(tuning.cluster_max, 8);
  while (plan.cluster < cluster_max && rows * plan.cluster * 2 <= facts.multiprocessors &&
         args.length_max >= plan.cluster * 2 * tuning.part_entries_min) {
    plan.cluster *= 2;
    plan.cluster_log2 += 1;
  }
  const bool alone = rows * plan.cluster <= facts.multiprocessors;
  const bool whole = alone || args.k > tuning.shared_rows_k_max;  // the multiprocessor to itself
  const int64_t room = whole ? facts.shared_bytes_per_block : tuning.shared_bytes_of_two;
  const int64_t part_bytes = (int64_t{args.length_max} * 4 + plan.cluster - 1) / plan.cluster;
  const auto tile_bytes = [&] { return int64_t{plan.threads} * kStrandsAWarp * 16; };
  const auto tiles_of_part = [&] { return (part_bytes + tile_bytes() - 1) / tile_bytes(); };
  // What all of a block's warps do takes half as long with half of them: little to read is read by few.
  plan.threads = 512;
  if (whole && tiles_of_part() > kStagesMax) plan.threads = 1024;
  for (;; plan.threads = 512) {
    const int least = static_cast<int>(round_up(std::max(next_power_of_two(args.k), args.k + plan.threads), plan.threads));
    // A guess lets about 2.5 k through (k up to 512) or 1.9 k (above), correlated scores more.
    const int least_wanted = whole ? tuning.capacity_min : tuning.shared_capacity_min;
    const int wanted =
        std::max(args.length_max / 1024 > args.k ? least_wanted / 2 * 3 : least_wanted, args.k > 1024 ? args.k * 3 : args.k / 2 * 7);
    plan.capacity = std::max(static_cast<int>(round_up(wanted, plan.threads)), least);
    // All in shared memory at once where it fits, and then no list is needed but to read others' parts again.
    plan.stages = static_cast<int>(std::clamp<int64_t>(tiles_of_part(), 1, kStagesMax));
    plan.slots = 0;
    const bool at_once = tiles_of_part() <= kStagesMax && select_topk_shared_bytes(plan) <= room;
    if (!at_once) plan.stages = 1;
    if (!at_once || plan.cluster > 1) plan.slots = tuning.slots;
    while (select_topk_shared_bytes(plan) > room && plan.capacity - plan.threads >= least) plan.capacity -= plan.threads;
    if (select_topk_shared_bytes(plan) <= room) break;
    if (plan.threads == 512) {
      plan.slots = 0;  // no room for lists: long rows are read slowly
      break;
    }
  }
  const int64_t left = room - select_topk_shared_bytes(plan);
  if (plan.stages < tiles_of_part()) {
    // Deep rings make memory serve multiprocessors the less evenly, the longer it goes on.
    const int64_t stages_wanted = tiles_of_part() >= tuning.long_part_tiles_min ? 3 : kStagesMax;
    plan.stages = static_cast<int>(std::clamp<int64_t>(1 + left / tile_bytes(), 1, std::min(stages_wanted, tiles_of_part())));
  }
  // What room is left lengthens the lists: the longer they are, the fewer times a warp gives them away.
  if (plan.slots > 0) {
    const int64_t more = (room - select_topk_shared_bytes(plan)) / (int64_t{plan.threads} * 8);
    plan.slots = static_cast<int>(std::clamp<int64_t>(plan.slots + more, plan.slots, tuning.slots_max));
  }
  plan.shared_bytes = select_topk_shared_bytes(plan);
  return plan;
}

absl::Status select_topk_cuda_planned(const SelectTopkArgs& args, const SelectPlan& plan, void* stream) {
  absl::Status status = check_select_topk(args);
  if (!status.ok()) return status;
  if (args.rows == 0) return absl::OkStatus();
  const bool possible = (plan.threads == 512 || plan.threads == 1024) && plan.cluster >= 1 && plan.cluster <= kClusterMax &&
                        plan.cluster == 1 << plan.cluster_log2 && plan.stages >= 1 && plan.stages <= kStagesMax &&
                        plan.capacity >= args.k + plan.threads && plan.capacity % plan.threads == 0 &&
                        (plan.slots == 0 || (plan.slots >= 4 && plan.slots <= kSlotsMax)) &&
                        (args.order == TopkOrder::kByPosition || plan.capacity >= next_power_of_two(args.k));
  if (!possible) {
    return absl::InvalidArgumentError(absl::StrCat("select_topk: impossible plan: threads ", plan.threads, ", cluster ", plan.cluster,
                                                   " = 2^", plan.cluster_log2, ", capacity ", plan.capacity, ", slots ", plan.slots,
                                                   ", stages ", plan.stages, " for k = ", args.k));
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.rows) * static_cast<unsigned>(plan.cluster));
  shape.block = dim3(static_cast<unsigned>(plan.threads));
  shape.cluster_x = static_cast<unsigned>(plan.cluster);
  shape.shared_bytes = static_cast<size_t>(select_topk_shared_bytes(plan));
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (plan.threads == 1024) return launch("select_topk", select_topk_kernel<1024, 1>, shape, cuda_stream, args, plan);
  return launch("select_topk", select_topk_kernel<512, 2>, shape, cuda_stream, args, plan);
}

int64_t select_topk_cuda_scratch(const SelectTopkArgs&) { return 0; }

absl::Status select_topk_cuda(const SelectTopkArgs& args, void*, int64_t, void* stream) {
  absl::Status status = check_select_topk(args);
  if (!status.ok()) return status;
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) return facts.status();
  return select_topk_cuda_planned(args, plan_select_topk(args, *facts), stream);
}

int64_t merge_topk_cuda_scratch(const MergeTopkArgs&) { return 0; }

absl::Status merge_topk_cuda(const MergeTopkArgs& args, void*, int64_t, void* stream) {
  absl::Status status = check_merge_topk(args);
  if (!status.ok()) return status;
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  const OpReport mixed = mixed_variants_of(args);
  if (mixed.status != 0 && args.report != nullptr) {
    absl::Status noted = launch("merge_topk", add_status_kernel, LaunchShape{}, cuda_stream, args.report, mixed.status);
    if (!noted.ok()) return noted;
  }
  if (args.rows == 0) return absl::OkStatus();
  // Room for the sort's next power of two, and for a stretch beyond k before the threshold must rise.
  const int capacity = std::max(next_power_of_two(args.k), args.k + 2 * kSetThreads);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.rows));
  shape.block = dim3(kSetThreads);
  shape.shared_bytes = sizeof(SelectShared) + static_cast<size_t>(capacity) * 8;
  return launch("merge_topk", merge_topk_kernel, shape, cuda_stream, args, capacity);
}

absl::Status list_slots_cuda(const ListSlotsArgs& args, void* stream) {
  absl::Status status = check_list_slots(args);
  if (!status.ok()) return status;
  if (args.rows == 0) return absl::OkStatus();
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.rows));
  shape.block = dim3(kSetThreads);
  return launch("list_slots", list_slots_kernel, shape, static_cast<cudaStream_t>(stream), args);
}

}  // namespace needle
