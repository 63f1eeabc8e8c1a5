// select_topk on the GPU: one read of the scores.
//
// A row is read once, by one block or by a cluster of blocks that take turns. It is cut into strands, two for each warp, that
// are read side by side: a tile is the next 512 bytes of each. So the first tile is a sample of the whole row, and gives a
// rank key that about 2 to 3 k entries reach: the *guess*. Tiles arrive by asynchronous copies, each thread's own in a ring
// of its own; each thread keeps what reaches the guess in a short list, without votes or atomics, and a warp gives its lists
// to the block's pool when one of them is nearly full and at the end. The leading block fetches the others' pools, finds the
// exact k-th and puts the members in order by a bitmap over positions. docs/kernels-performance.md has the figures.
//
// What must stay true:
//  1. A guess is checked, and each block of a cluster has its own: what counts is what reaches the highest. Where more reached
//     it than the pool holds, the k-th best of what the pool does hold is a sound bound, and one block reads the row again
//     with that; where fewer than min(k, present) reached it, one block reads the row slowly, raising its threshold from
//     nothing. Both are counted in OpReport::fallbacks. No entry is ever dropped.
//  2. The answer is a function of the scores: neither guess, plan, timing nor cluster size can change it.
//  3. Aligned 16-byte parts are copied; the up to three scores before and after them are read by threads. Nothing past a
//     row's length is read.
//  4. A thread reads of the ring what it copied there itself: no barrier stands between a copy and its use.
//  5. Another block's shared memory is read between two cluster barriers: the first says that every pool is complete, the
//     second that the leader has it.
//  6. An instruction that all 32 warps run costs a multiprocessor eight cycles: what few can do is done by few.
#include <algorithm>

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
constexpr int kStrandsAWarp = 2;   // and so 16-byte vectors of a tile that are a thread's
constexpr int kPieceVectors = 32;  // of a strand in a tile: a warp's neighbouring vectors
constexpr int kSampleGroupsMax = 128;
constexpr int kGroupsOfPiece = 16;  // a piece's scores go to so many groups, neighbours together
constexpr int kRankThreadsLog2 = 8;
constexpr int kRankThreads = 1 << kRankThreadsLog2;  // who rank the groups
constexpr float kSampleSigmas = 4.5f;  // of the group count that may lie below the guess: about 1 row in 1e5 reruns

template <int kThreads>
inline constexpr int kTileBytes = kThreads * kStrandsAWarp * 16;

// What the guess is made of: of each thread's first scores of the first tile (1, 2, 4 or 8 of them) the best, of 64 or 128
// groups of threads the best, of those the rank-th smallest. rank 0: no useful guess, take everything.
struct SamplePlan {
  int values;
  int groups_log2;
  int rank;
  float share;  // of the entries that should reach the guess
};
// How often the first tile holds the guess's score, where groups agree on it.
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
  int strand;    // vectors of a strand; the last ones may have fewer or none
  int blocks;    // of the cluster that have a part
  int tiles;     // of this block
  bool guesses;  // long enough for a guess
};

__device__ __forceinline__ int tiles_of(const Part& part, int rank) {
  const int step = part.blocks * kPieceVectors;
  return (part.strand - rank * kPieceVectors + step - 1) / step;
}

// Behind the pool; the threads' lists and the ring follow.
struct alignas(16) RowShared {
  uint32_t group_best[kSampleGroupsMax];  // as order bits
  uint64_t guess;
  uint64_t highest_guess;  // of the cluster
  VisibleRow visible;
  Part part;
  SamplePlan sample;
  SampleCount sampled;
  uint32_t guess_order;
  uint32_t guess_ties;  // groups whose best is the guess's score
  uint32_t total;       // keys of all pools
  uint32_t reaching;    // those that reach the highest guess
};

__device__ __forceinline__ RowShared& row_shared(int capacity) { return *reinterpret_cast<RowShared*>(select_keys() + capacity); }

// ----------------------------------------------------------------------------------------- other blocks' shared memory

// A shared address as block `rank` of the cluster has it.
__device__ __forceinline__ uint32_t address_in_block(const void* pointer, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  return address;
}
__device__ __forceinline__ uint32_t load_in_block(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t load_key_in_block(uint32_t address) {
  uint64_t value;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive_only() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// ------------------------------------------------------------------------------------------------- a thread's stream

__device__ __forceinline__ void copy_vector(uint32_t to_shared, const float4* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from) : "memory");
}
// Until the oldest of `stages` groups of copies has landed.
__device__ __forceinline__ void wait_for_oldest(int stages) {
  if (stages >= 4) {
    asm volatile("cp.async.wait_group 3;" ::: "memory");
  } else if (stages == 3) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else if (stages == 2) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
}

// This thread's vectors of the part, a vector of two strands a tile. Warp w has strands w and warps + w.
template <int kThreads>
struct Stream {
  const float4* next;    // to be asked for, of the first strand
  int64_t second;        // from there to the second strand's
  int left[2];           // vectors of the strands from this thread's of the current tile on: none where <= 0
  uint32_t position[2];  // of the current tile's vectors
  int step;              // vectors from a tile's piece to the next tile's
  int tiles;
  uint32_t ring;  // this thread's first place

  __device__ __forceinline__ Stream(const Part& part, int rank, const float4* ring_begin) {
    constexpr int kWarps = kThreads / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int in_piece = static_cast<int>(threadIdx.x) % 32 + rank * kPieceVectors;
    const int first = warp * part.strand + in_piece;
    second = kWarps * part.strand;
    next = part.vectors + first;
    left[0] = min(part.strand, part.row_vectors - warp * part.strand) - in_piece;
    left[1] = min(part.strand, part.row_vectors - (kWarps + warp) * part.strand) - in_piece;
    position[0] = static_cast<uint32_t>(part.head + 4 * first);
    position[1] = position[0] + 4 * kWarps * static_cast<uint32_t>(part.strand);
    step = part.blocks * kPieceVectors;
    tiles = part.tiles;
    ring = shared_address(ring_begin + threadIdx.x);
  }
  // Asks for the tile that lies `ahead` vectors of a strand behind the current one. One group of copies, be it empty.
  __device__ __forceinline__ void ask(int stage, int ahead) {
    const uint32_t to = ring + static_cast<uint32_t>(stage * kTileBytes<kThreads>);
    if (left[0] > ahead) copy_vector(to, next);
    if (left[1] > ahead) copy_vector(to + kThreads * 16, next + second);
    asm volatile("cp.async.commit_group;" ::: "memory");
    next += step;
  }
  __device__ __forceinline__ void begin(int stages) {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) ask(stage, stage * step);
  }
};

// ------------------------------------------------------------------------------------------------- the sample's guess

// A group of g scores has its best below the k-th key with probability u = (1 - k/length)^g. Of the groups about
// groups x u do, +- sqrt(groups x u x (1 - u)); the guess is taken so far below that mean that it lies above the
// k-th key about once in 1e5 rows of independent scores. Correlated neighbours only move it down, to more candidates.
// Approximate arithmetic will do: no answer depends on it.
template <int kThreads>
__device__ __forceinline__ SamplePlan plan_sample(int length, int k, int strand) {
  constexpr int kValuesLog2Max = 3;
  static_assert(1 << kValuesLog2Max == 4 * kStrandsAWarp, "a thread's share of a tile");
  SamplePlan plan;
  const float entry_share = __fdividef(static_cast<float>(k), static_cast<float>(length));
  // Candidates cost by their number: many groups for many candidates.
  const bool many = k > 512;
  plan.groups_log2 = many ? 7 : 6;
  const float groups = many ? 128.0f : 64.0f;
  const float threads = (kThreads / 32.0f) * static_cast<float>(min(strand, kPieceVectors)) / groups;  // of a group
  const float a_thread = __fdividef(many ? 1.0f : 0.7f, threads * entry_share);
  const int values_log2 = a_thread < 1.0f ? 0 : min(31 - __clz(static_cast<int>(a_thread)), kValuesLog2Max);
  plan.values = 1 << values_log2;
  const float group_scores = threads * static_cast<float>(plan.values);
  const float below = exp2f(group_scores * __log2f(1.0f - entry_share));
  const float mean = groups * below;
  const float variance = mean * (1.0f - below);
  plan.rank = max(0, static_cast<int>(mean - kSampleSigmas * variance * rsqrtf(variance + 1e-6f)));
  plan.share = 1.0f - exp2f(__fdividef(__log2f(__fdividef(static_cast<float>(plan.rank), groups)), group_scores));
  return plan;
}

// A rank key that about 2 to 3 k entries reach, for every thread, from the first tile. A group's pieces are spread over the
// whole row, so that groups are alike however scores drift with position, and a run of high scores is in few of them. Where
// groups agree on the guess's score, the tile tells what share of its equals is wanted; spread evenly over the row, that share
// lies before a position. Two block barriers, or three.
template <int kThreads>
__device__ __forceinline__ uint64_t guess_threshold(RowShared& shared, const Part& part, const Stream<kThreads>& stream, int stages) {
  const SamplePlan plan = shared.sample;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float none = __uint_as_float(kAbsentScoreBits);
  wait_for_oldest(stages);
  float4 first = load_shared_vector(stream.ring);
  float4 second = load_shared_vector(stream.ring + kThreads * 16);
  if (stream.left[0] <= 0) first = float4{none, none, none, none};
  if (stream.left[1] <= 0) second = float4{none, none, none, none};
  float best = first.x;  // fmaxf() ignores NaN
  if (plan.values >= 2) best = fmaxf(best, first.y);
  if (plan.values >= 4) best = fmaxf(best, fmaxf(first.z, first.w));
  if (plan.values >= 8) best = fmaxf(best, fmaxf(fmaxf(second.x, second.y), fmaxf(second.z, second.w)));
  const uint32_t best_order = order_bits_of(best);
  const int in_piece = part.strand >= kPieceVectors ? lane / (kPieceVectors / kGroupsOfPiece) : lane * kGroupsOfPiece / part.strand;
  const int piece = static_cast<int>(threadIdx.x) / 32 & ((1 << plan.groups_log2) / kGroupsOfPiece - 1);
  const int group_here = piece * kGroupsOfPiece + in_piece;
  if (best_order != 0) {
    asm volatile("red.relaxed.cta.shared::cta.max.u32 [%0], %1;" ::"r"(shared_address(&shared.group_best[group_here])), "r"(best_order)
                 : "memory");
  }
  __syncthreads();
  if (threadIdx.x < kRankThreads) {
    // Rank of each group's best among all, by two or four neighbouring threads.
    const int sharers_log2 = kRankThreadsLog2 - plan.groups_log2;
    const int sharer = static_cast<int>(threadIdx.x) & ((1 << sharers_log2) - 1);
    const int group = static_cast<int>(threadIdx.x) >> sharers_log2;
    const uint32_t own = shared.group_best[group];
    uint32_t counted = 0;  // smaller ones, and 65,536 for each equal one
#pragma unroll 4
    for (int other = sharer; other < 1 << plan.groups_log2; other += 1 << sharers_log2) {
      const uint32_t there = shared.group_best[other];
      counted += there < own || (there == own && other < group) ? 1u : 0u;
      counted += there == own ? 65536u : 0u;
    }
    counted += __shfl_xor_sync(0xFFFFFFFFu, counted, 1);
    if (sharers_log2 == 2) counted += __shfl_xor_sync(0xFFFFFFFFu, counted, 2);
    if (sharer == 0 && static_cast<int>(counted % 65536u) == plan.rank - 1) {
      shared.guess_order = own;
      shared.guess_ties = counted / 65536u;
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
    const uint32_t all = __reduce_add_sync(0xFFFFFFFFu, (stream.left[0] > 0 ? 4u : 0u) + (stream.left[1] > 0 ? 4u : 0u));
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

// A warp's lists, `held` positions and scores a thread from key `first` of shared memory on, go to the pool as keys,
// without those below the threshold after all and without absent ones. What the pool has no room for is counted and not
// written. Called by whole warps.
template <int kThreads>
__device__ __noinline__ void give_lists(uint32_t first, uint32_t held, uint64_t threshold, uint32_t capacity) {
  uint64_t* const list = select_keys() + first;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Oddities found;
  uint32_t own = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < held; ++i) {
    const uint64_t pair = list[i * kThreads];
    uint64_t key;
    if (takes(true, __uint_as_float(static_cast<uint32_t>(pair >> 32)), static_cast<uint32_t>(pair), threshold, &key, &found)) {
      list[own * kThreads] = key;
      own += 1;
    }
  }
  __syncwarp();
  found.note();
  const uint32_t up_to = inclusive_over_warp(own);
  uint32_t place = 0;
  if (lane == 31 && up_to != 0) place = add_shared(&select_shared().count, up_to);
  place = __shfl_sync(0xFFFFFFFFu, place, 31) + up_to - own;
#pragma unroll 1
  for (uint32_t i = 0; i < own; ++i) {
    if (place + i < capacity) select_keys()[place + i] = list[i * kThreads];
  }
  __syncwarp();
}

// Reads the part once, what reaches the threshold into the block's pool. Each thread keeps the scores that may reach it, with
// their positions, in a list of its own: no counter to share, a few predicated instructions for four scores whatever they
// are. The part's first tiles are on their way. A block or cluster barrier must follow.
template <int kThreads>
__device__ __forceinline__ void read_part(const Part& part, Stream<kThreads>& stream, uint32_t list, const SelectPlan& plan,
                                          uint64_t threshold, bool edges) {
  constexpr uint32_t kListStep = kThreads * 8;
  const int stages = plan.stages;
  const uint32_t capacity = static_cast<uint32_t>(plan.capacity);
  // One comparison a score: NaN passes, to be looked at later. Scores equal to the threshold's pass up to its position,
  // later ones must be greater.
  float floor = score_of_key(threshold);
  float floor_after = __uint_as_float(score_bits_of_order(order_bits_of_key(threshold) + 1));
  const uint32_t last_equal = position_of_key(threshold);
  asm volatile("" : "+f"(floor), "+f"(floor_after));  // else the compiler works them out anew for every vector
  const uint32_t list_first = shared_address(select_keys() + list);
  const uint32_t list_nearly_full = list_first + static_cast<uint32_t>(plan.slots - 4) * kListStep;
  uint32_t next = list_first;
  const auto keep = [&](bool passes, float score, uint32_t position) {
    if (passes) {
      store_shared_pair(next, position, __float_as_uint(score));
      next += kListStep;
    }
  };

  if (edges && threadIdx.x < 8) {  // at most 6 scores around the aligned ones
    const int i = static_cast<int>(threadIdx.x);
    const int position = i < 4 ? i : part.head + 4 * part.row_vectors + i - 4;
    const bool valid = i < 4 ? i < part.head : position < part.length;
    const float score = valid ? part.row[position] : 0.0f;
    keep(valid && !(score < floor), score, static_cast<uint32_t>(position));
  }
  int stage = 0;
#pragma unroll 1
  for (int tile = 0; tile < stream.tiles; ++tile) {
    wait_for_oldest(stages);
    const uint32_t data = stream.ring + static_cast<uint32_t>(stage * kTileBytes<kThreads>);
#pragma unroll
    for (int v = 0; v < kStrandsAWarp; ++v) {
      if (__any_sync(0xFFFFFFFFu, next > list_nearly_full)) {
        give_lists<kThreads>(list, (next - list_first) / kListStep, threshold, capacity);
        next = list_first;
      }
      if (stream.left[v] > 0) {
        const float4 scores = load_shared_vector(data + v * kThreads * 16);
        const uint32_t position = stream.position[v];
        const float bar = position > last_equal ? floor_after : floor;
        keep(!(scores.x < bar), scores.x, position);
        keep(!(scores.y < bar), scores.y, position + 1);
        keep(!(scores.z < bar), scores.z, position + 2);
        keep(!(scores.w < bar), scores.w, position + 3);
      }
    }
    stream.ask(stage, stages * stream.step);
    stage = stage + 1 == stages ? 0 : stage + 1;
#pragma unroll
    for (int v = 0; v < kStrandsAWarp; ++v) {
      stream.left[v] -= stream.step;
      stream.position[v] += 4 * static_cast<uint32_t>(stream.step);
    }
  }
  if (__any_sync(0xFFFFFFFFu, next > list_first)) give_lists<kThreads>(list, (next - list_first) / kListStep, threshold, capacity);
}

// Fetches the pools of the cluster's other blocks into the leader's, as far as it has room, and finds what they came to.
template <int kThreads>
__device__ __forceinline__ void fetch_pools(RowShared& shared, int blocks, const SelectPlan& plan) {
  constexpr int kWarps = kThreads / 32;
  SelectShared& pool = select_shared();
  const uint32_t capacity = static_cast<uint32_t>(plan.capacity);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const bool named = lane < blocks;
  const uint32_t block = named ? static_cast<uint32_t>(lane) : 0;
  const uint32_t count = named ? load_in_block(address_in_block(&pool.count, block)) : 0;
  const uint64_t guess = named ? load_key_in_block(address_in_block(&shared.guess, block)) : 0;
  const uint32_t high = __reduce_max_sync(0xFFFFFFFFu, static_cast<uint32_t>(guess >> 32));
  const uint32_t low = __reduce_max_sync(0xFFFFFFFFu, static_cast<uint32_t>(guess >> 32) == high ? static_cast<uint32_t>(guess) : 0u);
  const uint64_t highest = static_cast<uint64_t>(high) << 32 | low;
  const uint32_t held = min(count, capacity);
  const uint32_t up_to = inclusive_over_warp(held);
  if (warp == 0) {
    const uint32_t order_max = named ? load_in_block(address_in_block(&pool.order_max, block)) : 0;
    const uint32_t nans = named ? load_in_block(address_in_block(&pool.nan_count, block)) : 0;
    const uint32_t absents = named ? load_in_block(address_in_block(&pool.absent_count, block)) : 0;
    const uint32_t cluster_max = __reduce_max_sync(0xFFFFFFFFu, order_max);
    const uint32_t cluster_nans = __reduce_add_sync(0xFFFFFFFFu, nans);
    const uint32_t cluster_absents = __reduce_add_sync(0xFFFFFFFFu, absents);
    const bool over = __any_sync(0xFFFFFFFFu, count > capacity);
    if (lane == 31) {
      pool.order_max = cluster_max;
      pool.nan_count = cluster_nans;
      pool.absent_count = cluster_absents;
      shared.total = over ? capacity + 1 : up_to;
      shared.highest_guess = highest;
    }
  }
  // Neighbouring warps share a block's pool.
  const int warps_a_block = kWarps >> plan.cluster_log2;
  const int source = warp << plan.cluster_log2 >> (kThreads == 1024 ? 5 : 4);
  const uint32_t theirs = __shfl_sync(0xFFFFFFFFu, held, source);
  const uint32_t before = __shfl_sync(0xFFFFFFFFu, up_to, source) - theirs;
  const uint32_t from = address_in_block(select_keys(), theirs != 0 ? static_cast<uint32_t>(source) : 0u);
  uint32_t reaching = 0;
#pragma unroll 2
  for (uint32_t i = static_cast<uint32_t>((warp & (warps_a_block - 1)) * 32 + lane); i < theirs; i += static_cast<uint32_t>(warps_a_block) * 32) {
    const uint64_t key = load_key_in_block(from + 8 * i);
    if (source != 0 && before + i < capacity) select_keys()[before + i] = key;
    reaching += key >= highest ? 1u : 0u;
  }
  reaching = __reduce_add_sync(0xFFFFFFFFu, reaching);
  if (lane == 0 && reaching != 0) atomicAdd(&shared.reaching, reaching);
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
  part.guesses = plan.slots > 0 && part.row_vectors >= kThreads && args.k < part.length;
  part.blocks = part.guesses ? max(1, min(plan.cluster, part.strand / kPieceVectors)) : 1;  // each has a whole first tile
  part.tiles = tiles_of(part, rank);
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
  uint64_t* lists = reinterpret_cast<uint64_t*>(&shared + 1);
  float4* ring = reinterpret_cast<float4*>(lists + plan.slots * kThreads);
  const int rank = plan.cluster > 1 ? static_cast<int>(rank_in_cluster()) : 0;
  const bool leader = rank == 0;
  const int64_t row = blockIdx.x >> plan.cluster_log2;

  block_begin<kThreads>();
  if (threadIdx.x < kSampleGroupsMax) shared.group_best[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    shared.sampled = SampleCount{};
    shared.reaching = 0;
  }
  __syncwarp();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x < 32) plan_part<kThreads>(args, plan, row, rank, shared);
  __syncthreads();

  Part part = shared.part;
  if (part.length == 0) {
    if (!leader) return;
    give_padding<kThreads>(args, row, 0);
    if (threadIdx.x == 0) report_status(args.report, shared.visible.status);
    return;
  }
  if (rank >= part.blocks) return;

  uint64_t guess = 0;
  uint32_t count = 0;     // of the pool's keys
  uint32_t reaching = 0;  // those that reach the guess
  bool guesses = part.guesses;
  if (guesses) {
    Stream<kThreads> stream(part, rank, ring);
    stream.begin(plan.stages);
    if (threadIdx.x / 32 == kThreads / 32 - 1) {
      const SamplePlan sample = plan_sample<kThreads>(part.length, args.k, part.strand);
      if (threadIdx.x == kThreads - 1) shared.sample = sample;
    }
    __syncthreads();
    guesses = shared.sample.rank != 0;
    if (guesses) {
      guess = guess_threshold<kThreads>(shared, part, stream, plan.stages);
      const uint32_t list = static_cast<uint32_t>(lists - select_keys()) + threadIdx.x;
#pragma unroll 1
      for (;;) {
        if (threadIdx.x == 0) shared.guess = guess;
        read_part<kThreads>(part, stream, list, plan, guess, leader);
        __syncwarp();
        if (part.blocks > 1) {
          cluster_arrive();
          cluster_wait();
          if (leader) fetch_pools<kThreads>(shared, part.blocks, plan);
          __syncwarp();
          cluster_arrive_only();
          if (!leader) {
            cluster_wait();
            return;
          }
          __syncthreads();
          guess = shared.highest_guess;
          count = shared.total;
          reaching = shared.reaching;
        } else {
          __syncthreads();
          count = pool.count;
          reaching = count;
        }
        if (count <= static_cast<uint32_t>(plan.capacity)) break;
        // More reached the guess than there is room for. The pool is full of keys, and their k-th is a bound.
        guess = block_kth_bound<kThreads>(share_of_run<kThreads>(plan.capacity), args.k, 0);
        part.blocks = 1;
        part.tiles = tiles_of(part, 0);
        __syncthreads();
        if (threadIdx.x == 0) {
          pool.count = 0;
          pool.order_max = 0;
          pool.nan_count = 0;
          pool.absent_count = 0;
          pool.overflows += 1;
        }
        __syncthreads();
        stream = Stream<kThreads>(part, 0, ring);
        stream.begin(plan.stages);
      }
    } else {
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncthreads();
      if (!leader) return;
    }
  }
  // Nobody could guess, or too few reached the guess: the leader reads the row slowly and surely.
  const bool too_few = guesses && static_cast<int>(reaching) < min(args.k, part.length - static_cast<int>(pool.absent_count));
  if (!guesses || too_few) {
    read_part_slowly<kThreads>(part.row, 0, part.length, plan.capacity, args.k, 0);
    guess = pool.threshold;
    count = pool.count;
    reaching = count;
    if (too_few) {
      if (threadIdx.x == 0) pool.overflows += 1;
      __syncthreads();
    }
  }
  if (threadIdx.x >= kTailThreads) return;
  give_row_of(args, shared.visible, row, static_cast<uint32_t>(part.length), guess, static_cast<int>(count), static_cast<int>(reaching),
              reinterpret_cast<uint4*>(lists), static_cast<uint32_t>(plan.slots * kThreads * 8 + plan.stages * kTileBytes<kThreads>));
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
  for (plan.threads = whole ? 1024 : 512;; plan.threads = 512) {
    const int least = static_cast<int>(round_up(std::max(next_power_of_two(args.k), args.k + plan.threads), plan.threads));
    plan.stages = 1;
    plan.slots = tuning.slots;
    // A guess lets about 2.5 k through (k up to 512) or 1.9 k (above), correlated scores more.
    const int least_wanted = whole ? tuning.capacity_min : tuning.shared_capacity_min;
    const int wanted = std::max(args.length_max / 1024 > args.k ? least_wanted / 2 * 3 : least_wanted, args.k / 2 * 7);
    plan.capacity = std::max(static_cast<int>(round_up(wanted, plan.threads)), least);
    while (select_topk_shared_bytes(plan) > room && plan.capacity - plan.threads >= least) plan.capacity -= plan.threads;
    if (select_topk_shared_bytes(plan) <= room) break;
    if (plan.threads == 512) {
      plan.slots = 0;  // no room for lists: rows are read slowly
      break;
    }
  }
  const int64_t tile_bytes = int64_t{plan.threads} * kStrandsAWarp * 16;
  plan.stages = std::clamp(1 + static_cast<int>((room - select_topk_shared_bytes(plan)) / tile_bytes), 1, kStagesMax);
  // No more of a ring than one block's part of the longest row.
  const int64_t needed = (int64_t{args.length_max} * 4 + plan.cluster * tile_bytes - 1) / (plan.cluster * tile_bytes);
  plan.stages = static_cast<int>(std::clamp<int64_t>(needed, 1, plan.stages));
  // What room is left lengthens the lists: the fuller a warp's are, the fewer times it gives them away.
  const int64_t slot_bytes = int64_t{plan.threads} * 8;
  if (plan.slots > 0) plan.slots = std::clamp(plan.slots + static_cast<int>((room - select_topk_shared_bytes(plan)) / slot_bytes), plan.slots, tuning.slots_max);
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
