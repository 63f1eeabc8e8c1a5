// select_topk on the GPU: one read of the scores.
//
// A row is read once, by one block or by a cluster of blocks that split it. Its threads draw a stratified sample of the
// row and take from it a rank key that about 2 to 3 k entries reach: the *guess*. Tiles stream through a ring in shared
// memory; each thread keeps what reaches the guess in a short list of its own, without votes or atomics, and a warp gives
// its lists to the pool, in the leading block's shared memory, when one of them is nearly full and at the end. Then half of
// the leader's warps find the exact k-th in the pool and put the members in order by a bitmap over positions.
// docs/kernels-performance.md has the figures.
//
// What must stay true:
//  1. A guess is checked. Where more than the pool holds reached it, the k-th best of what the pool does hold is a sound
//     bound, and the row is read again with that one; where fewer than min(k, present) reached it, one block reads the row
//     slowly, raising its threshold from nothing. Both are counted in OpReport::fallbacks. No entry is ever dropped.
//  2. The answer is a function of the scores: neither sample, plan, timing nor cluster size can change it.
//  3. Aligned 16-byte parts are read by the bulk copy engine; the up to three scores before and after them by threads.
//     Nothing past a row's length is read.
//  4. Another block's shared memory is touched between two cluster barriers only: the first says that the leader has
//     begun and that its counters are zero, the second that its pool is complete.
//  5. An instruction that all 32 warps run costs a multiprocessor eight cycles: what few can do is done by few.
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

constexpr int kStagesMax = 32;
constexpr int kSlotsMax = 32;  // entries that a thread's list may hold
constexpr int kClusterMax = 16;
constexpr int kTileVectorsAThread = 2;  // a tile of scores is so many 16-byte vectors for each thread
constexpr int kSampleGroupsLog2Max = 7;
constexpr int kSampleLoadsMax = 2;  // 16-byte loads of a thread
constexpr int kRankThreadsLog2 = 8;
constexpr int kRankThreads = 1 << kRankThreadsLog2;  // who rank the sample's groups
constexpr float kSampleSigmas = 4.5f;                // of the group count that may lie below the threshold: about 1 row in 1e5 reruns
constexpr int kPartEntriesMin = 4096;                // a block of a cluster with less to read leaves its share to the others

// The sample: groups of neighbouring threads, each thread `loads` vectors of which it looks at `values_a_load` scores.
// The threshold is the rank-th smallest of the groups' best keys. rank 0: no useful guess, take everything.
struct SamplePlan {
  int groups_log2;
  int loads;  // a power of two
  int values_a_load;
  int rank;
};

// What a block reads of a row: vectors [first, first + count) of the aligned ones, and on rank 0 the scores around them.
struct Part {
  const float* row;
  const float4* vectors;
  int head;  // scores before the first aligned one
  int length;
  int row_vectors;
  int vector_first;
  int vector_count;
  int blocks;  // of the cluster that have a part
};

// Behind the pool; the threads' lists and the ring follow.
struct alignas(16) RowShared {
  uint64_t tile_landed[kStagesMax];
  uint64_t tile_taken[kStagesMax];
  uint64_t group_best[1 << kSampleGroupsLog2Max];
  uint64_t guess;
  VisibleRow visible;
  Part part;
  SamplePlan sample;
};

__device__ __forceinline__ RowShared& row_shared(int capacity) { return *reinterpret_cast<RowShared*>(select_keys() + capacity); }

// ------------------------------------------------------------------------------------- the leading block's shared memory

// A shared address as block `rank` of the cluster has it.
__device__ __forceinline__ uint32_t address_in_block(const void* pointer, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  return address;
}
__device__ __forceinline__ uint32_t add_in_block(uint32_t address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(value) : "memory");
  return before;
}
__device__ __forceinline__ void raise_in_block(uint32_t address, uint32_t value) {
  asm volatile("red.relaxed.cluster.shared::cluster.max.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_in_block(uint32_t address, uint64_t value) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// ------------------------------------------------------------------------------------------------- the sample's guess

// A group of g scores has its best below the k-th key with probability u = (1 - k/length)^g. Of the groups about
// groups x u do, +- sqrt(groups x u x (1 - u)); the threshold is taken so far below that mean that it lies above the
// k-th key about once in 1e5 rows of independent scores. Correlated neighbours only move it down, to more candidates.
// Approximate arithmetic will do: no answer depends on it.
template <int kThreads>
__device__ __forceinline__ SamplePlan plan_sample(int length, int k, int row_vectors) {
  constexpr int kValuesLog2Max = 3;
  static_assert(1 << kValuesLog2Max == 4 * kSampleLoadsMax, "a thread's share of the sample");
  SamplePlan plan{kSampleGroupsLog2Max, 1, 1, 0};
  if (row_vectors < kThreads || k >= length) return plan;  // taken whole
  const float share = __fdividef(static_cast<float>(k), static_cast<float>(length));
  // The ranking of groups costs their square, candidates cost by their number: many groups for many candidates.
  const bool many = k > 512;
  if (!many) plan.groups_log2 -= 1;
  const float a_thread = __fdividef((many ? 0.5f : 0.25f) / static_cast<float>(kThreads >> plan.groups_log2), share);
  int values_log2 = a_thread < 1.0f ? 0 : min(31 - __clz(static_cast<int>(a_thread)), kValuesLog2Max);
  while (values_log2 > 2 && (kThreads << (values_log2 - 2)) > row_vectors) --values_log2;
  plan.loads = 1 << max(0, values_log2 - 2);
  plan.values_a_load = 1 << min(values_log2, 2);
  const float group_scores = static_cast<float>((kThreads >> plan.groups_log2) << values_log2);
  const float below = exp2f(group_scores * __log2f(1.0f - share));
  const float mean = static_cast<float>(1 << plan.groups_log2) * below;
  const float variance = mean * (1.0f - below);
  plan.rank = max(0, static_cast<int>(mean - kSampleSigmas * variance * rsqrtf(variance + 1e-6f)));
  return plan;
}

__device__ __forceinline__ uint32_t scramble(uint32_t value) {
  value *= 0x9E3779B1u;
  value ^= value >> 15;
  value *= 0x85EBCA77u;
  return value ^ (value >> 13);
}

// Where load `load` of a thread looks: one place drawn from each stratum of the row. Two neighbouring threads share a
// place and read its 32 bytes. A group's strata are spread over the whole row, so that groups are alike however scores
// drift with position.
template <int kThreads>
struct SamplePlaces {
  uint32_t group;
  uint32_t pair;   // of the group
  uint32_t half;   // of the place's two vectors
  int pairs_log2;  // of a group
  int groups_log2;
  int strata_log2;
  uint32_t pairs;  // of vectors in the row
  uint32_t width;  // of a stratum, in pairs

  __device__ __forceinline__ explicit SamplePlaces(const SamplePlan& plan, int row_vectors) {
    constexpr int kLog2 = kThreads == 1024 ? 10 : 9;
    static_assert(1 << kLog2 == kThreads, "512 or 1024");
    const int lanes_log2 = kLog2 - plan.groups_log2;  // >= 2
    group = threadIdx.x >> lanes_log2;
    pair = (threadIdx.x & ((1u << lanes_log2) - 1)) >> 1;
    half = threadIdx.x & 1u;
    pairs_log2 = lanes_log2 - 1;
    groups_log2 = plan.groups_log2;
    strata_log2 = kLog2 - 1 + plan.loads / 2;
    pairs = static_cast<uint32_t>(row_vectors) / 2;
    width = pairs >> strata_log2;
  }
  __device__ __forceinline__ uint32_t vector(uint32_t load) const {
    const uint32_t stratum = (((load << pairs_log2) + pair) << groups_log2) + group;
    const uint32_t first = static_cast<uint32_t>((static_cast<uint64_t>(stratum) * pairs) >> strata_log2);
    return 2 * (first + (((scramble(stratum) & 0xFFFFu) * width) >> 16)) + half;
  }
};
static_assert(kSampleLoadsMax == 2, "loads / 2 above is their logarithm");

// A rank key that about 2 to 3 k entries reach, for every thread: the rank-th smallest of the groups' bests. Equal scores
// are ordered by chance within the sample, so that the guess says what share of the entries with its score is wanted;
// spread evenly over the row, that share lies before a position. `when_asked` is called once every load is under way,
// `when_back` once this thread's are back. Two block barriers.
template <int kThreads, class WhenAsked, class WhenBack>
__device__ __forceinline__ uint64_t guess_threshold(RowShared& shared, const Part& part, const WhenAsked& when_asked,
                                                    const WhenBack& when_back) {
  constexpr int kLoadsMax = kSampleLoadsMax;
  const SamplePlan plan = shared.sample;
  const SamplePlaces<kThreads> places(plan, part.row_vectors);
  float4 scores[kLoadsMax];
  uint32_t vectors[kLoadsMax];
#pragma unroll
  for (int i = 0; i < kLoadsMax; ++i) {
    vectors[i] = places.vector(static_cast<uint32_t>(i));
    if (i < plan.loads) scores[i] = __ldg(part.vectors + vectors[i]);
  }
  when_asked();
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < kLoadsMax; ++i) {
    if (i >= plan.loads) continue;
    const float score[4] = {scores[i].x, scores[i].y, scores[i].z, scores[i].w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c >= plan.values_a_load || __float_as_uint(score[c]) == kAbsentScoreBits) continue;
      const uint32_t chance = scramble(4 * vectors[i] + static_cast<uint32_t>(c));
      const uint64_t key = (rank_key_of(score[c], 0) & 0xFFFFFFFF00000000u) | chance;
      if (key > best) best = key;
    }
  }
  when_back(best);
  const int lanes = kThreads >> plan.groups_log2;  // of a group
#pragma unroll 1
  for (int step = lanes >> 1; step > 0; step >>= 1) {
    const uint64_t other = __shfl_xor_sync(0xFFFFFFFFu, best, step);
    if (other > best) best = other;
  }
  if ((static_cast<int>(threadIdx.x) & (lanes - 1)) == 0) shared.group_best[places.group] = best;
  __syncthreads();
  if (threadIdx.x < kRankThreads) {
    // Rank of each group's best among all, by two or four neighbouring threads.
    const int sharers_log2 = kRankThreadsLog2 - plan.groups_log2;
    const int group = static_cast<int>(threadIdx.x) >> sharers_log2;
    const uint64_t key = shared.group_best[group];
    int smaller = 0;
#pragma unroll 4
    for (int other = static_cast<int>(threadIdx.x) & ((1 << sharers_log2) - 1); other < 1 << plan.groups_log2; other += 1 << sharers_log2) {
      const uint64_t key_there = shared.group_best[other];
      smaller += key_there < key || (key_there == key && other < group);
    }
    smaller += __shfl_xor_sync(0xFFFFFFFFu, smaller, 1);
    if (sharers_log2 == 2) smaller += __shfl_xor_sync(0xFFFFFFFFu, smaller, 2);
    if ((threadIdx.x & ((1u << sharers_log2) - 1)) == 0 && smaller == plan.rank - 1) {
      const uint32_t last = __umulhi(~static_cast<uint32_t>(key), static_cast<uint32_t>(part.length));
      shared.guess = (key & 0xFFFFFFFF00000000u) | (0xFFFFFFFFu - last);
    }
  }
  __syncthreads();
  return shared.guess;
}

// ------------------------------------------------------------------------------------------------------- reading a part

// The ring of tiles: which stage is next, and the parity of its barriers.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

template <int kThreads>
__device__ __forceinline__ void request_tile(RowShared& shared, float4* ring, const Part& part, int tile, int stage) {
  constexpr int kTileVectors = kThreads * kTileVectorsAThread;
  const int first = tile * kTileVectors;
  const uint32_t bytes = static_cast<uint32_t>(min(kTileVectors, part.vector_count - first)) * 16u;
  barrier_expect(&shared.tile_landed[stage], bytes);
  bulk_load(ring + stage * kTileVectors, part.vectors + part.vector_first + first, bytes, &shared.tile_landed[stage]);
}

// Asks for the part's tiles [first, end), as far as the ring and the part have them. By one thread.
template <int kThreads>
__device__ __forceinline__ void request_tiles(RowShared& shared, float4* ring, const Part& part, int stages, int first, int end) {
  constexpr int kTileVectors = kThreads * kTileVectorsAThread;
  const int tiles = min(min(stages, end), (part.vector_count + kTileVectors - 1) / kTileVectors);
#pragma unroll 1
  for (int tile = first; tile < tiles; ++tile) request_tile<kThreads>(shared, ring, part, tile, tile);
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

// The pool as this block sees it: in the leading block's shared memory, by cluster addresses.
struct Pool {
  uint32_t keys;
  uint32_t count;
  uint32_t order_max;
  uint32_t nan_count;
  uint32_t absent_count;
  uint32_t capacity;

  __device__ __forceinline__ explicit Pool(int holds) {
    const SelectShared& shared = select_shared();
    keys = address_in_block(select_keys(), 0);
    count = address_in_block(&shared.count, 0);
    order_max = address_in_block(&shared.order_max, 0);
    nan_count = address_in_block(&shared.nan_count, 0);
    absent_count = address_in_block(&shared.absent_count, 0);
    capacity = static_cast<uint32_t>(holds);
  }
};

// A warp's lists, `held` positions and scores a thread from key `first` of shared memory on, go to the pool as keys,
// without those below the threshold after all and without absent ones. What the pool has no room for is counted and not written. Called by whole warps.
template <int kThreads>
__device__ __noinline__ void give_lists(Pool pool, uint32_t first, uint32_t held, uint64_t threshold) {
  uint64_t* const list = select_keys() + first;
  const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, held);
  const uint32_t lane = threadIdx.x & 31u;
  Oddities found;
  uint32_t taken = 0;  // bit i: entry i is a key
  uint32_t total = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < most; ++i) {
    bool take = false;
    if (i < held) {
      const uint64_t pair = list[i * kThreads];
      uint64_t key;
      take = takes(true, __uint_as_float(static_cast<uint32_t>(pair >> 32)), static_cast<uint32_t>(pair), threshold, &key, &found);
      if (take) {
        list[i * kThreads] = key;
        taken |= 1u << i;
      }
    }
    total += static_cast<uint32_t>(__popc(__ballot_sync(0xFFFFFFFFu, take)));
  }
  if (__any_sync(0xFFFFFFFFu, (found.nans | found.absents) != 0)) {
    const uint32_t nans = __reduce_add_sync(0xFFFFFFFFu, found.nans);
    const uint32_t absents = __reduce_add_sync(0xFFFFFFFFu, found.absents);
    if (lane == 0) {
      add_in_block(pool.nan_count, nans);
      add_in_block(pool.absent_count, absents);
    }
  }
  if (total == 0) return;
  const uint32_t order_max = __reduce_max_sync(0xFFFFFFFFu, found.order_max);
  uint32_t place = 0;
  if (lane == 0) {
    place = add_in_block(pool.count, total);
    raise_in_block(pool.order_max, order_max);
  }
  place = __shfl_sync(0xFFFFFFFFu, place, 0);
#pragma unroll 1
  for (uint32_t i = 0; i < most; ++i) {
    const bool take = (taken >> i & 1u) != 0;
    const unsigned takers = __ballot_sync(0xFFFFFFFFu, take);
    const uint32_t own = place + static_cast<uint32_t>(__popc(takers & lanes_below()));
    if (take && own < pool.capacity) store_in_block(pool.keys + own * 8, list[i * kThreads]);
    place += static_cast<uint32_t>(__popc(takers));
  }
}

// Reads the part once, what reaches the threshold into the pool. Each thread keeps the scores that may reach it, with
// their positions, in a list of its own: no counter to share, a few predicated instructions for four scores whatever they
// are. The part's first tiles are on their way. A block or cluster barrier must follow.
template <int kThreads>
__device__ __forceinline__ void read_part(RowShared& shared, float4* ring, uint32_t list, const Pool& pool, const Part& part, int stages,
                                          int slots, uint64_t threshold, bool edges) {
  constexpr int kTileVectors = kThreads * kTileVectorsAThread;
  constexpr uint32_t kListStep = kThreads * 8;
  const int tiles = (part.vector_count + kTileVectors - 1) / kTileVectors;
  // One comparison a score: NaN passes, to be looked at later. Scores equal to the threshold's pass up to its position,
  // later ones must be greater.
  float floor = score_of_key(threshold);
  float floor_after = __uint_as_float(score_bits_of_order(order_bits_of_key(threshold) + 1));
  const uint32_t last_equal = position_of_key(threshold);
  asm volatile("" : "+f"(floor), "+f"(floor_after));  // else the compiler works them out anew for every vector
  const uint32_t list_first = shared_address(select_keys() + list);
  const uint32_t list_nearly_full = list_first + static_cast<uint32_t>(slots - 4) * kListStep;
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
  const uint32_t ring_address = shared_address(ring + threadIdx.x);
  uint32_t position = static_cast<uint32_t>(part.head + 4 * (part.vector_first + static_cast<int>(threadIdx.x)));
  int left = part.vector_count - static_cast<int>(threadIdx.x);
  const int late = stages > 1 ? 1 : 0;  // a stage is refilled so many tiles later, so as not to wait for slower warps
  RingPlace place;
  RingPlace refill;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    barrier_wait(&shared.tile_landed[place.stage], place.parity);
    const uint32_t data = ring_address + static_cast<uint32_t>(place.stage) * kTileVectors * 16u;
#pragma unroll
    for (int v = 0; v < kTileVectorsAThread; ++v) {
      if (__any_sync(0xFFFFFFFFu, next > list_nearly_full)) {
        give_lists<kThreads>(pool, list, (next - list_first) / kListStep, threshold);
        next = list_first;
      }
      if (left > 0) {
        const float4 scores = load_shared_vector(data + v * kThreads * 16);
        const float bar = position > last_equal ? floor_after : floor;
        keep(!(scores.x < bar), scores.x, position);
        keep(!(scores.y < bar), scores.y, position + 1);
        keep(!(scores.z < bar), scores.z, position + 2);
        keep(!(scores.w < bar), scores.w, position + 3);
      }
      position += 4 * kThreads;
      left -= kThreads;
    }
    if (tiles > stages) {  // else nothing is overwritten
      __syncwarp();
      if ((threadIdx.x & 31) == 0) barrier_arrive(&shared.tile_taken[place.stage]);
      if (threadIdx.x == 0 && tile >= late && tile - late + stages < tiles) {
        barrier_wait(&shared.tile_taken[refill.stage], refill.parity);
        request_tile<kThreads>(shared, ring, part, tile - late + stages, refill.stage);
        refill.advance(stages);
      }
      __syncwarp();
    }
    place.advance(stages);
  }
  if (__any_sync(0xFFFFFFFFu, next > list_first)) give_lists<kThreads>(pool, list, (next - list_first) / kListStep, threshold);
}

// --------------------------------------------------------------------------------------------------------- the kernel

// What warp 1 finds out about the block's work.
template <int kThreads>
__device__ __forceinline__ void plan_part(const SelectTopkArgs& args, const SelectPlan& plan, int64_t row, int rank, RowShared& shared) {
  const VisibleRow visible = visible_row(args, row);
  const int length = static_cast<int>(visible.length);
  Part part;
  part.row = args.scores + row * args.score_stride;
  part.length = length;
  part.head = min(length, static_cast<int>(((16u - (reinterpret_cast<uintptr_t>(part.row) & 15u)) & 15u) / 4));
  part.vectors = reinterpret_cast<const float4*>(part.row + part.head);
  part.row_vectors = (length - part.head) / 4;
  SamplePlan sample{};
  if (plan.slots > 0) sample = plan_sample<kThreads>(length, args.k, part.row_vectors);
  part.blocks = sample.rank == 0 ? 1 : max(1, min(plan.cluster, length / kPartEntriesMin));
  const int a_block = (part.row_vectors + part.blocks - 1) / part.blocks;
  part.vector_first = min(part.row_vectors, rank * a_block);
  part.vector_count = rank < part.blocks ? min(a_block, part.row_vectors - part.vector_first) : 0;
  if ((threadIdx.x & 31) == 0) {
    shared.visible = visible;
    shared.part = part;
    shared.sample = sample;
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
  const int64_t row = blockIdx.x >> plan.cluster_log2;

  if (threadIdx.x == 0) init_ring<kThreads>(shared, plan.stages);
  block_begin<kThreads>();
  __syncwarp();
  if (plan.cluster > 1) cluster_arrive();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x / 32 == 1) plan_part<kThreads>(args, plan, row, rank, shared);
  __syncthreads();

  Part part = shared.part;
  const bool leader = rank == 0;
  if (part.length == 0) {
    if (!leader) return;
    give_padding<kThreads>(args, row, 0);
    if (threadIdx.x == 0) report_status(args.report, shared.visible.status);
    return;
  }
  if (rank >= part.blocks) return;

  uint64_t guess = 0;
  const bool guesses = shared.sample.rank != 0;
  if (guesses) {
    guess = guess_threshold<kThreads>(
        shared, part,
        [&] {
          if (threadIdx.x == 0) request_tiles<kThreads>(shared, ring, part, plan.stages, 0, plan.early);
          __syncwarp();
        },
        [&](uint64_t best) {
          // Only now the rest of the ring: behind all of its bytes the sample would wait for microseconds.
          asm volatile("" ::"l"(best) : "memory");  // the loads are back
          if (threadIdx.x == 0) request_tiles<kThreads>(shared, ring, part, plan.stages, plan.early, plan.stages);
          __syncwarp();
        });
    if (part.blocks > 1) cluster_wait();
    const uint32_t list = static_cast<uint32_t>(lists - select_keys()) + threadIdx.x;
#pragma unroll 1
    for (bool again = false;;) {
      read_part<kThreads>(shared, ring, list, Pool(plan.capacity), part, plan.stages, plan.slots, guess, leader);
      if (part.blocks > 1 && !again) {
        __syncwarp();
        cluster_arrive();
        if (!leader) return;  // nobody looks into this block's memory
        cluster_wait();
      } else {
        __syncthreads();
      }
      if (pool.count <= static_cast<uint32_t>(plan.capacity)) break;
      // More reached the guess than there is room for. The pool is full of keys that did, and their k-th is a bound.
      guess = block_kth_bound<kThreads>(share_of_run<kThreads>(plan.capacity), args.k, guess);
      again = true;
      part.vector_first = 0;
      part.vector_count = part.row_vectors;
      __syncthreads();
      if (threadIdx.x == 0) {
        pool.count = 0;
        pool.order_max = 0;
        pool.nan_count = 0;
        pool.absent_count = 0;
        pool.overflows += 1;
        fence_before_bulk_store();  // the ring was read by threads, and is written by copies again
        init_ring<kThreads>(shared, plan.stages);
        request_tiles<kThreads>(shared, ring, part, plan.stages, 0, plan.stages);
      }
      __syncthreads();
    }
  }
  // Nobody could guess, or too few reached the guess: the leader reads the row slowly and surely.
  const bool too_few = guesses && static_cast<int>(pool.count) < min(args.k, part.length - static_cast<int>(pool.absent_count));
  if (!guesses || too_few) {
    read_part_slowly<kThreads>(part.row, 0, part.length, plan.capacity, args.k, 0);
    guess = pool.threshold;
    if (too_few) {
      if (threadIdx.x == 0) pool.overflows += 1;
      __syncthreads();
    }
  }
  if (threadIdx.x >= kTailThreads) return;
  give_row(args, shared.visible, row, static_cast<uint32_t>(part.length), guess, reinterpret_cast<uint4*>(ring),
           static_cast<uint32_t>(plan.stages * kThreads * kTileVectorsAThread * 16));
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
         int64_t{plan.stages} * plan.threads * kTileVectorsAThread * 16;
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
  const int tile_vectors = plan.threads * kTileVectorsAThread;
  const int64_t tile_bytes = int64_t{tile_vectors} * 16;
  plan.stages = std::clamp(1 + static_cast<int>((room - select_topk_shared_bytes(plan)) / tile_bytes), 1, kStagesMax);
  // No more of a ring than one block's part of the longest row, and no less than a bitmap of a few thousand positions.
  const int64_t part_vectors = (int64_t{args.length_max} / 4 + plan.cluster - 1) / plan.cluster;
  const int needed = static_cast<int>(std::max<int64_t>(1, (part_vectors + tile_vectors - 1) / tile_vectors));
  plan.stages = std::min(plan.stages, needed);
  plan.early = std::min(plan.stages, tuning.early_tiles);
  plan.shared_bytes = select_topk_shared_bytes(plan);
  return plan;
}

absl::Status select_topk_cuda_planned(const SelectTopkArgs& args, const SelectPlan& plan, void* stream) {
  absl::Status status = check_select_topk(args);
  if (!status.ok()) return status;
  if (args.rows == 0) return absl::OkStatus();
  const bool possible = (plan.threads == 512 || plan.threads == 1024) && plan.cluster >= 1 && plan.cluster <= kClusterMax &&
                        plan.cluster == 1 << plan.cluster_log2 && plan.stages >= 1 && plan.stages <= kStagesMax &&
                        plan.capacity >= args.k + plan.threads && plan.capacity % plan.threads == 0 && plan.early >= 0 &&
                        plan.early <= plan.stages && (plan.slots == 0 || (plan.slots >= 4 && plan.slots <= kSlotsMax)) &&
                        (args.order == TopkOrder::kByPosition || plan.capacity >= next_power_of_two(args.k));
  if (!possible) {
    return absl::InvalidArgumentError(absl::StrCat("select_topk: impossible plan: threads ", plan.threads, ", cluster ", plan.cluster,
                                                   " = 2^", plan.cluster_log2, ", capacity ", plan.capacity, ", slots ", plan.slots,
                                                   ", stages ", plan.stages, ", early ", plan.early, " for k = ", args.k));
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
