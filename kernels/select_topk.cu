// select_topk on the GPU: one read of the scores.
//
// A row is read once, by one block or by a cluster of blocks that split it. Eight warps draw a stratified sample of the row and take from it a rank key that about 1.5 to 3 k entries reach: the *guess*,
// score and position together, so that rows of equal scores are cut as finely as any other. Tiles stream through a ring
// in shared memory; each warp keeps the keys at or above the guess in a segment of its own, without atomics. Then the
// exact k-th is found among them, and the members are put in order by a bitmap over positions.
// docs/kernels-performance.md has the figures.
//
// What must stay true:
//  1. A guess is checked: where fewer than min(k, present) entries reached it, or some warp's segment ran full, one block
//     reads the row again, slowly, raising its threshold to the exact k-th of what the buffer holds whenever that fills:
//     a sound bound. Counted in OpReport::fallbacks. No entry is ever dropped.
//  2. The answer is a function of the scores: neither sample, plan, timing nor cluster size can change it.
//  3. Aligned 16-byte parts are read by the bulk copy engine; the up to three scores before and after them by threads.
//     Nothing past a row's length is read.
#include <cooperative_groups.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "kernels/bulk_copy.cuh"
#include "kernels/launch.cuh"
#include "kernels/select_topk.h"
#include "kernels/select_topk_block.cuh"
#include "kernels/select_topk_plan.h"
#include "kernels/tuning.h"

namespace needle {
namespace {

namespace cg = cooperative_groups;

constexpr int kStagesMax = 32;
constexpr int kClusterMax = 16;
constexpr int kTileVectorsAThread = 2;  // a tile of scores is so many 16-byte vectors for each thread
constexpr int kSampleGroupsMax = 128;
constexpr int kSampleLoadsMax = 32;    // 16-byte loads a thread
constexpr int kSampleBatch = 4;        // of them in flight together
constexpr float kSampleSigmas = 4.5f;  // of the group count that may lie below the threshold: about 1 row in 1e5 reruns
constexpr int kPartEntriesMin = 4096;  // a block of a cluster with less to read leaves its share to the others
constexpr int kSampleThreads = 256;    // who draw the sample

// The sample: `groups` groups of neighbouring threads, each thread `loads` vectors of which it looks at `values` scores.
// The threshold is the rank-th smallest of the groups' best keys. rank 0: no useful guess, take everything.
struct SamplePlan {
  int groups_log2;
  int loads_log2;
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

// Behind the key buffer.
struct alignas(16) RowShared {
  uint64_t tile_landed[kStagesMax];
  uint64_t tile_taken[kStagesMax];
  uint64_t group_best[kSampleGroupsMax];
  uint64_t guess;
  VisibleRow visible;
  Part part;
  SamplePlan sample;
  uint32_t warp_counts[32];  // keys in each warp's segment
};

__device__ __forceinline__ RowShared& row_shared(int capacity) { return *reinterpret_cast<RowShared*>(select_keys() + capacity); }
__device__ __forceinline__ float4* ring_of(int capacity) { return reinterpret_cast<float4*>(&row_shared(capacity) + 1); }

__device__ __forceinline__ void add_u64(uint64_t* to, uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}

// ------------------------------------------------------------------------------------------------- the sample's guess

// A group of g scores has its best below the k-th key with probability u = (1 - k/length)^g. Of the groups about
// groups x u do, +- sqrt(groups x u x (1 - u)); the threshold is taken so far below that mean that it lies above the
// k-th key about once in 1e5 rows of independent scores. Correlated neighbours only move it down, to more candidates.
// Approximate arithmetic will do: no answer depends on it.
__device__ SamplePlan plan_sample(int length, int k, int row_vectors) {
  SamplePlan plan{0, 0, 1, 0};
  if (row_vectors < kSampleThreads * kSampleBatch) return plan;  // short: taken whole
  const float share = __fdividef(static_cast<float>(k), static_cast<float>(length));
  const float wanted = __fdividef(0.5f, share);  // scores a group: u = exp(-1/2)
  int groups_log2 = 7;
  int values_log2 = 0;
#pragma unroll 1
  for (;; --groups_log2) {
    const float a_thread = wanted * static_cast<float>(1 << groups_log2) * (1.0f / kSampleThreads);
    values_log2 = a_thread < 1.0f ? 0 : min(31 - __clz(static_cast<int>(a_thread)), 2 + 5);
    if (values_log2 <= 4 || groups_log2 == 5) break;
  }
  while (values_log2 > 4 && (kSampleThreads << (values_log2 - 2)) > row_vectors) --values_log2;
  plan.groups_log2 = groups_log2;
  plan.loads_log2 = max(0, values_log2 - 2);
  plan.values_a_load = 1 << min(values_log2, 2);
  const float group_scores = static_cast<float>((kSampleThreads << values_log2) >> groups_log2);
  const float below = exp2f(group_scores * __log2f(1.0f - share));
  const float mean = static_cast<float>(1 << groups_log2) * below;
  const float variance = mean * (1.0f - below);
  plan.rank = k >= length ? 0 : max(0, static_cast<int>(mean - kSampleSigmas * variance * rsqrtf(variance + 1e-6f)));
  return plan;
}
static_assert(kSampleLoadsMax == 32 && kSampleGroupsMax == 128, "the exponents in plan_sample");

__device__ __forceinline__ uint32_t scramble(uint32_t value) {
  value *= 0x9E3779B1u;
  value ^= value >> 15;
  value *= 0x85EBCA77u;
  return value ^ (value >> 13);
}

// Where load `load` of a thread looks: one place drawn from each stratum of the row. Two neighbouring threads share a
// place and read its 32 bytes. A group's strata are spread over the whole row, so that groups are alike however scores
// drift with position.
struct SamplePlaces {
  uint32_t group;
  uint32_t pair;   // of the group
  uint32_t half;   // of the place's two vectors
  int pairs_log2;  // of a group
  int groups_log2;
  int strata_log2;
  uint32_t pairs;  // of vectors in the row
  uint32_t width;  // of a stratum, in pairs

  __device__ __forceinline__ uint32_t vector(uint32_t load) const {
    const uint32_t stratum = (((load << pairs_log2) + pair) << groups_log2) + group;
    const uint32_t first = static_cast<uint32_t>((static_cast<uint64_t>(stratum) * pairs) >> strata_log2);
    return 2 * (first + (((scramble(stratum) & 0xFFFFu) * width) >> 16)) + half;
  }
};

__device__ __forceinline__ SamplePlaces sample_places(const RowShared& shared) {
  constexpr int kLog2 = 8;
  static_assert(1 << kLog2 == kSampleThreads, "a power of two");
  const SamplePlan plan = shared.sample;
  const int lanes_log2 = kLog2 - plan.groups_log2;  // >= 1
  SamplePlaces places;
  places.group = threadIdx.x >> lanes_log2;
  places.pair = (threadIdx.x & ((1u << lanes_log2) - 1)) >> 1;
  places.half = threadIdx.x & 1u;
  places.pairs_log2 = lanes_log2 - 1;
  places.groups_log2 = plan.groups_log2;
  places.strata_log2 = kLog2 - 1 + plan.loads_log2;
  places.pairs = static_cast<uint32_t>(shared.part.row_vectors) / 2;
  places.width = places.pairs >> places.strata_log2;
  return places;
}

__device__ __forceinline__ void load_batch(const float4* vectors, const SamplePlaces& places, uint32_t first, int loads,
                                           float4 (&scores)[kSampleBatch]) {
#pragma unroll
  for (int i = 0; i < kSampleBatch; ++i) {
    if (i < loads) scores[i] = vectors[places.vector(first + static_cast<uint32_t>(i))];
  }
}

// Called by the first kSampleThreads threads. `scores` holds the first batch of loads, `when_read` is called once all
// are back. Writes shared.guess, which a block barrier makes known.
template <class WhenRead>
__device__ __forceinline__ void guess_threshold(RowShared& shared, const float4* vectors, const SamplePlaces& places,
                                                float4 (&scores)[kSampleBatch], const WhenRead& when_read) {
  const SamplePlan plan = shared.sample;
  const int loads = 1 << plan.loads_log2;
  uint64_t best = 0;
#pragma unroll 1
  for (int first = 0; first < loads; first += kSampleBatch) {
    if (first > 0) load_batch(vectors, places, static_cast<uint32_t>(first), loads - first, scores);
#pragma unroll
    for (int i = 0; i < kSampleBatch; ++i) {
      if (first + i >= loads) continue;
      // The largest of the four by plain comparison: a guess need not see NaN or order equal scores.
      const float score[4] = {scores[i].x, scores[i].y, scores[i].z, scores[i].w};
      const uint32_t position = static_cast<uint32_t>(shared.part.head) + 4 * places.vector(static_cast<uint32_t>(first + i));
      float top = score[0];
      uint32_t at = position;
#pragma unroll
      for (int c = 1; c < 4; ++c) {
        if (c < plan.values_a_load && !(score[c] <= top)) {
          top = score[c];
          at = position + static_cast<uint32_t>(c);
        }
      }
      const uint64_t key = __float_as_uint(top) == kAbsentScoreBits ? 0 : rank_key_of(top, at);
      if (key > best) best = key;
    }
  }
  when_read(best);
#pragma unroll 1
  for (int step = (kSampleThreads >> plan.groups_log2) >> 1; step > 0; step >>= 1) {
    const uint64_t other = __shfl_xor_sync(0xFFFFFFFFu, best, step);
    if (other > best) best = other;
  }
  if ((threadIdx.x & ((kSampleThreads >> plan.groups_log2) - 1)) == 0) shared.group_best[places.group] = best;
  asm volatile("bar.sync 1, 256;" ::: "memory");
  static_assert(kSampleThreads == 256, "the barrier above counts threads");
  // Rank of each group's best among all, two threads a group at least.
  const int groups = 1 << plan.groups_log2;
  const int slices_log2 = 8 - plan.groups_log2;
  const int candidate = static_cast<int>(threadIdx.x) >> slices_log2;
  const uint64_t key = shared.group_best[candidate];
  int smaller = 0;
#pragma unroll 4
  for (int other = static_cast<int>(threadIdx.x) & ((1 << slices_log2) - 1); other < groups; other += 1 << slices_log2) {
    const uint64_t key_there = shared.group_best[other];
    smaller += key_there < key || (key_there == key && other < candidate);
  }
#pragma unroll 1
  for (int step = 1 << slices_log2 >> 1; step > 0; step >>= 1) smaller += __shfl_xor_sync(0xFFFFFFFFu, smaller, step);
  if (smaller == plan.rank - 1) shared.guess = key;
}

// ------------------------------------------------------------------------------------------------------- reading a part

// What a thread found beside keys.
struct Oddities {
  uint32_t order_max = 0;
  uint32_t nans = 0;
  uint32_t absents = 0;

  // Whole warps; a block barrier must follow before the sums are relied on.
  __device__ __forceinline__ void note(bool count) const {
    note_order_max(order_max);
    if (count && __any_sync(0xFFFFFFFFu, (nans | absents) != 0)) {
      const uint32_t warp_nans = __reduce_add_sync(0xFFFFFFFFu, nans);
      const uint32_t warp_absents = __reduce_add_sync(0xFFFFFFFFu, absents);
      if ((threadIdx.x & 31) == 0) {
        atomicAdd(&select_shared().nan_count, warp_nans);
        atomicAdd(&select_shared().absent_count, warp_absents);
      }
    }
  }
};

// Whether a lane's score is taken, and its key. A lane with `may` false takes nothing.
__device__ __forceinline__ bool takes(bool may, float score, uint32_t position, uint64_t threshold, uint64_t* key, Oddities* found) {
  *key = rank_key_of(score, position);
  bool take = may && *key >= threshold;
  if (may && score != score) {
    const bool absent = __float_as_uint(score) == kAbsentScoreBits;
    found->absents += absent ? 1u : 0u;
    found->nans += absent ? 0u : 1u;
    take = take && !absent;
  }
  if (take) found->order_max = max(found->order_max, order_bits_of_key(*key));
  return take;
}

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

// Reads the part once, keys >= threshold into each warp's own segment of the buffer: a counter in a register, no atomic.
// Its first `requested` tiles are on their way. Leaves warp_counts, and in SelectShared the sums and whether a segment
// was too small; a block or cluster barrier must follow. Returns this warp's count.
template <int kThreads>
__device__ __forceinline__ uint32_t read_part(RowShared& shared, float4* ring, const Part& part, int stages, int segment,
                                              uint64_t threshold, bool edges) {
  constexpr int kTileVectors = kThreads * kTileVectorsAThread;
  const int tiles = (part.vector_count + kTileVectors - 1) / kTileVectors;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  // One comparison a score decides for nearly all of them, and lets NaN through to be looked at. Scores equal to the
  // threshold's pass up to its position, later ones must be greater.
  const float floor = score_of_key(threshold);  // NaN where everything may pass
  const float floor_after = __uint_as_float(score_bits_of_order(threshold == 0 ? 0 : order_bits_of_key(threshold) + 1));
  const uint32_t last_equal = position_of_key(threshold);
  uint64_t* own = select_keys() + warp * segment;
  uint32_t held = 0;  // of this warp
  Oddities found;

  const auto offer = [&](bool may, float score, uint32_t position) {
    uint64_t key;
    const bool take = takes(may, score, position, threshold, &key, &found);
    const unsigned takers = __ballot_sync(0xFFFFFFFFu, take);
    const uint32_t place = held + static_cast<uint32_t>(__popc(takers & lanes_below()));
    if (take && place < static_cast<uint32_t>(segment)) own[place] = key;
    held += static_cast<uint32_t>(__popc(takers));
  };

  if (edges && warp == 0) {  // at most 6 scores around the aligned ones
    const int position = lane < 4 ? lane : part.head + 4 * part.row_vectors + lane - 4;
    const bool valid = lane < 4 ? lane < part.head : lane < 8 && position < part.length;
    const float score = valid ? part.row[position] : 0.0f;
    offer(valid && !(score < floor), score, static_cast<uint32_t>(position));
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
      float4 scores{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      if (left > 0) scores = load_shared_vector(data + v * kThreads * 16);
      const float bar = position > last_equal ? floor_after : floor;
      const bool below = scores.x < bar && scores.y < bar && scores.z < bar && scores.w < bar;
      if (__any_sync(0xFFFFFFFFu, left > 0 && !below)) {
        uint32_t passing =
            (scores.x < bar ? 0u : 1u) | (scores.y < bar ? 0u : 2u) | (scores.z < bar ? 0u : 4u) | (scores.w < bar ? 0u : 8u);
        if (left <= 0) passing = 0;
#pragma unroll 1
        do {  // the few that pass are taken one a lane and turn
          float score = (passing & 4u) ? scores.z : scores.w;
          if (passing & 2u) score = scores.y;
          if (passing & 1u) score = scores.x;
          offer(passing != 0, score, position + static_cast<uint32_t>(__ffs(static_cast<int>(passing))) - 1u);
          passing &= passing - 1u;
        } while (__any_sync(0xFFFFFFFFu, passing != 0));
      }
      position += 4 * kThreads;
      left -= kThreads;
    }
    if (tiles > stages) {  // else nothing is overwritten
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.tile_taken[place.stage]);
      if (threadIdx.x == 0 && tile >= late && tile - late + stages < tiles) {
        barrier_wait(&shared.tile_taken[refill.stage], refill.parity);
        request_tile<kThreads>(shared, ring, part, tile - late + stages, refill.stage);
        refill.advance(stages);
      }
      __syncwarp();
    }
    place.advance(stages);
  }
  found.note(true);
  if (lane == 0) {
    shared.warp_counts[warp] = held;
    add_shared(&select_shared().count, held);
    if (held > static_cast<uint32_t>(segment)) add_shared(&select_shared().full, 1);
  }
  return held;
}

// Reads the part from global memory, raising the threshold whenever fewer than kThreads places are left: for rows that
// are taken whole, for those whose guess was too high, and for parts with more keys than a segment holds. The keys end up
// as one run. Begins and ends at a block barrier.
template <int kThreads>
__device__ __noinline__ void read_part_slowly(const float* row, int begin, int end, int capacity, int k, uint64_t threshold,
                                              bool count_oddities) {
  SelectShared& shared = select_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.count = 0;
    shared.order_max = 0;
    shared.full = 0;
    shared.threshold = threshold;
  }
  Oddities found;
#pragma unroll 1
  for (int first = begin; first < end; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const bool valid = i < end;
    const float score = valid ? row[i] : 0.0f;
    __syncthreads();
    const int held = static_cast<int>(shared.count);
    if (held + kThreads > capacity) block_raise_threshold<kThreads>(held, k);
    uint64_t key;
    const uint64_t bound = shared.threshold;
    const bool take = takes(valid, score, static_cast<uint32_t>(i), bound, &key, &found);
    __syncthreads();
    append_key(take, key, static_cast<uint32_t>(capacity));
    note_order_max(found.order_max);
  }
  found.note(count_oddities);
  __syncthreads();
}

// ------------------------------------------------------------------------------------------------------ giving it out

// Writes member `place` of a row.
__device__ __forceinline__ void write_member(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, uint32_t place,
                                             uint32_t entry, float score, uint32_t* absent) {
  const int64_t out = row * args.out_stride + place;
  args.positions[out] = static_cast<int32_t>(visible.base + entry);
  if (args.out_scores != nullptr) args.out_scores[out] = score;
  if (args.slots != nullptr) {
    const int32_t slot = slot_of_entry(visible.pages, args.page_count, args.slots_per_page, entry);
    args.slots[out] = slot;
    *absent += slot == kNoEntry;
  }
}

// The keys >= bound ascending by position: a bitmap of positions, the number of set bits before each 128 of them, and
// then each key finds its own place. `room` is shared memory that nobody uses any more. A block barrier lies behind the
// call since bound was asked for.
template <int kThreads>
__device__ __forceinline__ uint32_t give_by_position(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, uint32_t length,
                                                     KeyShare share, uint64_t bound, uint4* room, uint32_t room_bytes) {
  uint32_t absent = 0;
  uint32_t given = 0;
  const uint64_t* keys = select_keys();
  const uint32_t room_vectors = min(room_bytes / 20, (length + 127) / 128);
  uint32_t* words = reinterpret_cast<uint32_t*>(room);
  uint32_t* before = reinterpret_cast<uint32_t*>(room + room_vectors);
#pragma unroll 1
  for (uint32_t begin = 0; begin < length; begin += room_vectors * 128) {
    const uint32_t vectors = min(room_vectors, (length - begin + 127) / 128);
    const uint32_t a_thread = (vectors + kThreads - 1) / kThreads;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < vectors; i += kThreads) room[i] = uint4{0, 0, 0, 0};
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = share.first; i < share.end; i += share.step) {
      const uint64_t key = keys[i];
      const uint32_t bit = position_of_key(key) - begin;  // wraps past every bitmap where it lies before
      if (key >= bound && bit < vectors * 128) atomicOr(&words[bit >> 5], 1u << (bit & 31u));
    }
    __syncthreads();
    const uint32_t first = min(threadIdx.x * a_thread, vectors);
    const uint32_t last = min(first + a_thread, vectors);
    uint32_t mine = 0;
#pragma unroll 1
    for (uint32_t i = first; i < last; ++i) {
      const uint4 bits = room[i];
      before[i] = mine;
      mine += static_cast<uint32_t>(__popc(bits.x) + __popc(bits.y) + __popc(bits.z) + __popc(bits.w));
    }
    uint32_t total;
    const uint32_t place = given + block_exclusive_scan<kThreads>(select_shared().warp_sums, mine, &total);
#pragma unroll 1
    for (uint32_t i = first; i < last; ++i) before[i] += place;
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = share.first; i < share.end; i += share.step) {
      const uint64_t key = keys[i];
      const uint32_t entry = position_of_key(key);
      const uint32_t bit = entry - begin;
      if (key < bound || bit >= vectors * 128) continue;
      const uint4 bits = room[bit >> 7];
      const uint32_t word = (bit >> 5) & 3u;
      const uint32_t below = (1u << (bit & 31u)) - 1u;
      uint32_t rank = before[bit >> 7];
      rank += static_cast<uint32_t>(__popc(word > 0 ? bits.x : bits.x & below));
      if (word > 0) rank += static_cast<uint32_t>(__popc(word > 1 ? bits.y : bits.y & below));
      if (word > 1) rank += static_cast<uint32_t>(__popc(word > 2 ? bits.z : bits.z & below));
      if (word > 2) rank += static_cast<uint32_t>(__popc(bits.w & below));
      write_member(args, visible, row, rank, entry, score_of_key(key), &absent);
    }
    given += total;
    __syncthreads();
  }
  return absent;
}

// The keys >= bound in the total order. They are one run.
template <int kThreads>
__device__ __forceinline__ uint32_t give_by_rank(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, int count, int members,
                                                 uint64_t bound) {
  uint32_t absent = 0;
  block_keep_at_least<kThreads>(count, bound);
  block_sort_descending<kThreads>(members);
#pragma unroll 1
  for (int i = threadIdx.x; i < members; i += kThreads) {
    const uint64_t key = select_keys()[i];
    write_member(args, visible, row, static_cast<uint32_t>(i), position_of_key(key), score_of_key(key), &absent);
  }
  return absent;
}

template <int kThreads>
__device__ __forceinline__ void give_padding(const SelectTopkArgs& args, int64_t row, int members) {
#pragma unroll 1
  for (int64_t i = members + static_cast<int>(threadIdx.x); i < args.out_stride; i += kThreads) {
    const int64_t out = row * args.out_stride + i;
    args.positions[out] = kNoEntry;
    if (args.out_scores != nullptr) args.out_scores[out] = -INFINITY;
    if (args.slots != nullptr) args.slots[out] = kNoEntry;
  }
  if (threadIdx.x == 0) args.counts[row] = members;
}

// --------------------------------------------------------------------------------------------------------- the kernel

// What the row's blocks hold together. Each warp asks for itself, so that no barrier is needed to hand it round; every
// block of the cluster comes to the same answer.
struct RowSums {
  uint32_t count;
  uint32_t order_max;
  uint32_t absent;
  uint32_t full;
};

__device__ __forceinline__ RowSums sum_cluster(cg::cluster_group& cluster, int blocks) {
  const SelectShared& own = select_shared();
  if (blocks == 1) return {own.count, own.order_max, own.absent_count, own.full};
  const int lane = static_cast<int>(threadIdx.x) & 31;
  RowSums sums{0, 0, 0, 0};
  if (lane < blocks) {
    const SelectShared* theirs = cluster.map_shared_rank(&own, static_cast<unsigned>(lane));
    sums = {theirs->count, theirs->order_max, theirs->absent_count, theirs->full};
  }
  sums.count = __reduce_add_sync(0xFFFFFFFFu, sums.count);
  sums.order_max = __reduce_max_sync(0xFFFFFFFFu, sums.order_max);
  sums.absent = __reduce_add_sync(0xFFFFFFFFu, sums.absent);
  sums.full = __reduce_add_sync(0xFFFFFFFFu, sums.full);
  return sums;
}

// The leader's warp w takes what the other blocks' warps w kept behind its own keys. Returns its new count, which is more
// than `segment` where there was no room.
__device__ __forceinline__ uint32_t gather_segments(RowShared& shared, cg::cluster_group& cluster, int blocks, int segment, uint32_t held) {
  const uint32_t lane = threadIdx.x & 31u;
  const uint32_t warp = threadIdx.x >> 5;
  uint32_t count = 0;
  if (lane == 0) count = held;
  if (lane > 0 && static_cast<int>(lane) < blocks) {
    count = *cluster.map_shared_rank(&shared.warp_counts[warp], lane);
  }
  uint32_t before = count;  // inclusive over blocks
#pragma unroll 1
  for (int step = 1; step < blocks; step <<= 1) {
    const uint32_t from = __shfl_up_sync(0xFFFFFFFFu, before, step);
    if (static_cast<int>(lane) >= step) before += from;
  }
  const uint32_t total = __shfl_sync(0xFFFFFFFFu, before, blocks - 1);
  if (total > static_cast<uint32_t>(segment)) return total;
  uint64_t* own = select_keys() + warp * static_cast<uint32_t>(segment);
#pragma unroll 1
  for (uint32_t first = held; first < total; first += 32) {
    const uint32_t at = first + lane;
    // The block whose keys cover `at`: the number of blocks that end at or before it.
    uint32_t block = 0;
    uint32_t block_first = 0;
#pragma unroll 1
    for (int other = 0; other < blocks - 1; ++other) {
      const uint32_t end = __shfl_sync(0xFFFFFFFFu, before, other);
      if (end <= at) {
        block = static_cast<uint32_t>(other) + 1;
        block_first = end;
      }
    }
    if (at < total) own[at] = cluster.map_shared_rank(own, block)[at - block_first];
  }
  __syncwarp();
  return total;
}

// The warps' segments as one run at the buffer's front. Ends at a block barrier.
template <int kThreads>
__device__ __noinline__ void join_segments(RowShared& shared, int segment) {
  __syncthreads();
  uint32_t to = 0;
#pragma unroll 1
  for (int warp = 0; warp < kThreads / 32; ++warp) {  // in order: a segment moves only to or before its own place
    const uint32_t held = shared.warp_counts[warp];
#pragma unroll 1
    for (uint32_t first = 0; first < held; first += kThreads) {
      const uint32_t i = first + threadIdx.x;
      const uint64_t key = i < held ? select_keys()[static_cast<uint32_t>(warp * segment) + i] : 0;
      __syncthreads();
      if (i < held) select_keys()[to + i] = key;
    }
    to += held;
  }
  __syncthreads();
}

// What warp 1 finds out about the block's work while the others prepare shared memory.
__device__ __forceinline__ void plan_part(const SelectTopkArgs& args, const SelectPlan& plan, int64_t row, int rank, RowShared& shared) {
  const VisibleRow visible = visible_row(args, row);
  const int length = static_cast<int>(visible.length);
  Part part;
  part.row = args.scores + row * args.score_stride;
  part.length = length;
  part.head = min(length, static_cast<int>(((16u - (reinterpret_cast<uintptr_t>(part.row) & 15u)) & 15u) / 4));
  part.vectors = reinterpret_cast<const float4*>(part.row + part.head);
  part.row_vectors = (length - part.head) / 4;
  const SamplePlan sample = plan_sample(length, args.k, part.row_vectors);
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
  cg::cluster_group cluster = cg::this_cluster();
  RowShared& shared = row_shared(plan.capacity);
  float4* ring = ring_of(plan.capacity);
  const int rank = static_cast<int>(cluster.block_rank());
  const int64_t row = blockIdx.x >> plan.cluster_log2;

  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int stage = 0; stage < plan.stages; ++stage) {
      barrier_init(&shared.tile_landed[stage], 1);
      barrier_init(&shared.tile_taken[stage], kThreads / 32);
    }
    barrier_inits_visible();
  }
  block_begin<kThreads>();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x / 32 == 1) plan_part(args, plan, row, rank, shared);
  __syncthreads();

  const Part part = shared.part;
  const bool leader = rank == 0;
  if (part.length == 0) {
    if (!leader) return;
    give_padding<kThreads>(args, row, 0);
    if (threadIdx.x == 0 && args.report != nullptr && shared.visible.status != 0) {
      atomicOr(&args.report->status, shared.visible.status);
    }
    return;
  }
  if (rank >= part.blocks) return;

  // The entries of this block, edges included.
  const int begin = leader ? 0 : part.head + 4 * part.vector_first;
  const int end = rank == part.blocks - 1 ? part.length : part.head + 4 * (part.vector_first + part.vector_count);
  const int segment = plan.capacity / (kThreads / 32);
  uint64_t guess = 0;
  uint32_t held = 0;
  bool segments = shared.sample.rank != 0;  // else one run
  if (segments) {
    if (threadIdx.x < kSampleThreads) {
      constexpr int kTileVectors = kThreads * kTileVectorsAThread;
      const int tiles = min(plan.stages, (part.vector_count + kTileVectors - 1) / kTileVectors);
      float4 scores[kSampleBatch];
      const SamplePlaces places = sample_places(shared);
      load_batch(part.vectors, places, 0, 1 << shared.sample.loads_log2, scores);
      if (threadIdx.x == 0 && tiles > 0) request_tile<kThreads>(shared, ring, part, 0, 0);
      guess_threshold(shared, part.vectors, places, scores, [&](uint64_t best) {
        // Only now the rest of the ring: behind all of its bytes the sample would wait for microseconds.
        asm volatile("" ::"l"(best) : "memory");  // the loads are back
        if (threadIdx.x == 0) {
#pragma unroll 1
          for (int tile = 1; tile < tiles; ++tile) request_tile<kThreads>(shared, ring, part, tile, tile);
        }
        __syncwarp();
      });
    }
    __syncthreads();
    guess = shared.guess;
    if (threadIdx.x == 0) select_shared().threshold = guess;
    held = read_part<kThreads>(shared, ring, part, plan.stages, segment, guess, leader);
  } else {
    read_part_slowly<kThreads>(part.row, begin, end, plan.capacity, args.k, 0, true);
  }
  if (part.blocks > 1) {
    cluster.sync();
  } else {
    __syncthreads();
  }
  RowSums sums = sum_cluster(cluster, part.blocks);
  // Too few reached the guess, or a segment ran full somewhere: the leader reads the whole row, slowly and surely.
  const bool too_few = guess != 0 && sums.count < static_cast<uint32_t>(min(args.k, part.length - static_cast<int>(sums.absent)));
  bool again = sums.full != 0 || too_few;
  if (leader && part.blocks > 1 && !again) {
    held = gather_segments(shared, cluster, part.blocks, segment, held);
    again = __syncthreads_or(held > static_cast<uint32_t>(segment)) != 0;
  }
  if (threadIdx.x == 0 && args.report != nullptr) {
    const SelectShared& found = select_shared();
    uint32_t status = leader ? shared.visible.status : 0u;
    if (found.nan_count != 0) status |= kStatusNanScore;
    if (found.absent_count != 0) status |= kStatusAbsentPage;
    if (status != 0) atomicOr(&args.report->status, status);
    if (found.nan_count != 0) add_u64(&args.report->nan_scores, found.nan_count);
    if (found.absent_count != 0) add_u64(&args.report->absent_entries, found.absent_count);
  }
  if (part.blocks > 1) cluster.sync();  // the leader has what it wants of the others
  if (!leader) return;

  if (again) {
    segments = false;
    read_part_slowly<kThreads>(part.row, 0, part.length, plan.capacity, args.k, too_few ? 0 : guess, false);
    sums.count = select_shared().count;
    sums.order_max = select_shared().order_max;
    if (threadIdx.x == 0) select_shared().overflows += 1;
  }
  if (threadIdx.x == 0 && part.blocks > 1) select_shared().order_max = sums.order_max;  // alone, it is that already
  if (segments && args.order == TopkOrder::kByRank) {
    if ((threadIdx.x & 31) == 0) shared.warp_counts[threadIdx.x >> 5] = held;
    join_segments<kThreads>(shared, segment);
    segments = false;
  }
  __syncthreads();
  if (threadIdx.x == 0 && args.report != nullptr && select_shared().overflows != 0) {
    add_u64(&args.report->fallbacks, select_shared().overflows);
  }
  const int count = static_cast<int>(sums.count);
  const int members = min(args.k, count);
  const uint32_t segment_first = (threadIdx.x >> 5) * static_cast<uint32_t>(segment);
  const KeyShare share = segments ? KeyShare{segment_first + (threadIdx.x & 31u), 32, segment_first + held} : share_of_run<kThreads>(count);
  const uint64_t bound = count > args.k ? block_kth_bound<kThreads>(share, args.k, select_shared().threshold) : 1;
  uint32_t absent;
  if (args.order == TopkOrder::kByPosition) {
    absent = give_by_position<kThreads>(args, shared.visible, row, static_cast<uint32_t>(part.length), share, bound,
                                        reinterpret_cast<uint4*>(ring),
                                        static_cast<uint32_t>(plan.stages * kThreads * kTileVectorsAThread * 16));
  } else {
    absent = give_by_rank<kThreads>(args, shared.visible, row, count, members, bound);
  }
  give_padding<kThreads>(args, row, members);
  if (args.slots != nullptr && args.report != nullptr && __any_sync(0xFFFFFFFFu, absent != 0)) {
    absent = __reduce_add_sync(0xFFFFFFFFu, absent);
    if ((threadIdx.x & 31) == 0) {
      atomicOr(&args.report->status, static_cast<uint32_t>(kStatusAbsentPage));
      add_u64(&args.report->absent_entries, absent);
    }
  }
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
      atomicOr(&args.report->status, static_cast<uint32_t>(kStatusAbsentPage));
      add_u64(&args.report->absent_entries, absent);
    }
    if (threadIdx.x == 0 && shared.overflows != 0) add_u64(&args.report->fallbacks, shared.overflows);
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
    atomicOr(&args.report->status, static_cast<uint32_t>(kStatusAbsentPage));
    add_u64(&args.report->absent_entries, absent);
  }
  if (threadIdx.x == 0 && cut) atomicOr(&args.report->status, static_cast<uint32_t>(kStatusBadPageTable));
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
  return int64_t{sizeof(SelectShared)} + int64_t{plan.capacity} * 8 + int64_t{sizeof(RowShared)} +
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
  const int64_t room = alone || args.k > tuning.shared_rows_k_max ? facts.shared_bytes_per_block : tuning.shared_bytes_of_two;
  for (plan.threads = alone ? 1024 : 512;; plan.threads = 512) {
    const int warps = plan.threads / 32;
    const int least = std::max(next_power_of_two(args.k), static_cast<int>(round_up(args.k + plan.threads, 32 * warps)));
    plan.stages = 1;
    plan.capacity = std::max({tuning.capacity_min, std::min(next_power_of_two(4 * args.k), 2 * kTopkMax), least});
    const int64_t spare = room - select_topk_shared_bytes(plan);
    if (spare < 0) {
      plan.capacity = std::max(least, (plan.capacity - static_cast<int>((-spare + 7) / 8)) / (32 * warps) * (32 * warps));
    }
    if (select_topk_shared_bytes(plan) <= room || plan.threads == 512) break;
  }
  const int tile_vectors = plan.threads * kTileVectorsAThread;
  const int64_t tile_bytes = int64_t{tile_vectors} * 16;
  plan.stages = std::clamp(1 + static_cast<int>((room - select_topk_shared_bytes(plan)) / tile_bytes), 1, kStagesMax);
  // No more of a ring than one block's part of the longest row, and no less than a bitmap of a few thousand positions.
  const int64_t part_vectors = (int64_t{args.length_max} / 4 + plan.cluster - 1) / plan.cluster;
  const int needed = static_cast<int>(std::max<int64_t>(1, (part_vectors + tile_vectors - 1) / tile_vectors));
  plan.stages = std::min(plan.stages, needed);
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
                        (args.order == TopkOrder::kByPosition || plan.capacity >= next_power_of_two(args.k));
  if (!possible) {
    return absl::InvalidArgumentError(absl::StrCat("select_topk: impossible plan: threads ", plan.threads, ", cluster ", plan.cluster,
                                                   " = 2^", plan.cluster_log2, ", capacity ", plan.capacity, ", stages ", plan.stages,
                                                   " for k = ", args.k));
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
