// A row's end and its slow way: reading it from global memory with a rising threshold, and giving out the k best of a
// complete pool. What select_topk.cu and select_by_maxima.cu share.
//
// What must stay true:
//  1. What is given out is a function of the scores: the pool's order depends on timing, the answer does not.
//  2. Functions named give_* are called by kTailThreads threads, all others of the block having ended, and use the bitmap
//     that they are given: shared memory that nobody reads any more.
#pragma once

#include "kernels/device_report.cuh"
#include "kernels/select_topk.h"
#include "kernels/select_topk_block.cuh"

namespace needle {

inline constexpr int kTailThreads = 512;  // who give a row out, once the pool is complete

// What a thread found beside keys.
struct Oddities {
  uint32_t order_max = 0;
  uint32_t nans = 0;
  uint32_t absents = 0;

  // Whole warps; a block barrier must follow before the sums are relied on.
  __device__ __forceinline__ void note() const {
    note_order_max(order_max);
    if (__any_sync(0xFFFFFFFFu, (nans | absents) != 0)) {
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

// Reads the part from global memory, raising the threshold whenever fewer than kThreads places are left: for rows that
// are taken whole, for those whose guess was too high, and for those where a list ran full. The keys end up
// as one run. Begins and ends at a block barrier.
template <int kThreads>
__device__ __noinline__ void read_part_slowly(const float* row, int begin, int end, int capacity, int k, uint64_t threshold) {
  SelectShared& shared = select_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.count = 0;
    shared.order_max = 0;
    shared.threshold = threshold;
    shared.nan_count = 0;
    shared.absent_count = 0;
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
  found.note();
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
    const uint32_t slots_per_page = static_cast<uint32_t>(args.slots_per_page);  // entries and slots are below 2^31
    const uint32_t column = entry / slots_per_page;
    const int32_t page = visible.pages[column];
    const int32_t slot = page < 0 || page >= args.page_count
                             ? kNoEntry
                             : static_cast<int32_t>(static_cast<uint32_t>(page) * slots_per_page + entry - column * slots_per_page);
    args.slots[out] = slot;
    *absent += slot == kNoEntry;
  }
}

// Which positions of a stretch are members: a bit each, and for each of kMapParts parts how many, later how many lie before it.
inline constexpr uint32_t kMapParts = 4 * kTailThreads;
struct MemberMap {
  uint32_t* counts;
  uint32_t* words;
  uint32_t vectors;    // of 128 bits
  uint32_t part_log2;  // positions of a part; at least a word

  // The positions that a map of so many bytes can hold: at least 128.
  __device__ __forceinline__ static uint32_t holds(uint32_t bytes) { return (bytes - 4 * kMapParts) / 16 * 128; }

  // Of `positions` positions.
  __device__ __forceinline__ MemberMap(uint4* memory, uint32_t positions)
      : counts(reinterpret_cast<uint32_t*>(memory)), words(counts + kMapParts), vectors((positions + 127) / 128) {
    part_log2 = max(5u, 32u - static_cast<uint32_t>(__clz(static_cast<int>((positions - 1) / kMapParts))));
  }
  __device__ __forceinline__ void clear() const {
    uint4* const all = reinterpret_cast<uint4*>(counts);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < kMapParts / 4 + vectors; i += kTailThreads) all[i] = uint4{0, 0, 0, 0};
  }
  __device__ __forceinline__ void add(uint32_t position) const {
    atomicOr(&words[position / 32], 1u << (position % 32));
    atomicAdd(&counts[position >> part_log2], 1u);
  }
  __device__ __forceinline__ bool has(uint32_t position) const { return (words[position / 32] >> (position % 32) & 1u) != 0; }
  // The map is complete; `given` members lie before it. Ends at a barrier. Returns given + all.
  __device__ __forceinline__ uint32_t sum(uint32_t given) const {
    uint4& own = reinterpret_cast<uint4*>(counts)[threadIdx.x];
    const uint4 four = own;
    uint32_t total;
    const uint32_t before =
        given + block_exclusive_scan<kTailThreads>(select_shared().warp_sums, four.x + four.y + four.z + four.w, &total);
    own = uint4{before, before + four.x, before + four.x + four.y, before + four.x + four.y + four.z};
    __syncthreads();
    return given + total;
  }
  // Of a member, once summed: its place among the members.
  __device__ __forceinline__ uint32_t place_of(uint32_t position) const {
    const uint32_t part = position >> part_log2;
    uint32_t place = counts[part];
#pragma unroll 1
    for (uint32_t word = part << (part_log2 - 5); word < position / 32; ++word) place += static_cast<uint32_t>(__popc(words[word]));
    return place + static_cast<uint32_t>(__popc(words[position / 32] & ((1u << (position % 32)) - 1u)));
  }
};

// The keys >= bound ascending by position, stretch by stretch where the map is too small for the row. A barrier lies
// behind the call.
__device__ __noinline__ inline uint32_t give_by_position(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row,
                                                         uint32_t length, KeyShare share, uint64_t bound, uint4* memory,
                                                         uint32_t memory_bytes) {
  uint32_t absent = 0;
  uint32_t given = 0;
  const uint64_t* keys = select_keys();
  const uint32_t stretch = min(MemberMap::holds(memory_bytes), length);
#pragma unroll 1
  for (uint32_t begin = 0; begin < length; begin += stretch) {
    const MemberMap map(memory, stretch);
    map.clear();
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = share.first; i < share.end; i += share.step) {
      const uint64_t key = keys[i];
      const uint32_t at = position_of_key(key) - begin;  // wraps past every stretch where it lies before
      if (key >= bound && at < stretch) map.add(at);
    }
    __syncthreads();
    given = map.sum(given);
#pragma unroll 1
    for (uint32_t i = share.first; i < share.end; i += share.step) {
      const uint64_t key = keys[i];
      const uint32_t entry = position_of_key(key);
      if (key < bound || entry - begin >= stretch) continue;
      write_member(args, visible, row, map.place_of(entry - begin), entry, score_of_key(key), &absent);
    }
    __syncthreads();
  }
  return absent;
}

// The k best ascending by position, where one map covers the row: the k-th is found and the members are marked on the
// way. More than k of the keys reach `low`. A barrier lies behind the call. False where the bin of the k-th holds too many
// keys: nothing is given then, and the bins are zero. Loops are kept small: each runs a few times, and code that comes new
// costs more than what it does.
__device__ __forceinline__ bool give_at_once(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, uint32_t length,
                                             KeyShare share, uint64_t low, uint4* memory, uint32_t* absent) {
  SelectShared& shared = select_shared();
  const uint64_t* keys = select_keys();
  const MemberMap map(memory, length);
  const uint64_t range = ((static_cast<uint64_t>(shared.order_max) << 32) | 0xFFFFFFFFu) - low;
  const int shift = max(0, 64 - kSelectBinBits - __clzll(static_cast<long long>(range)));
#pragma unroll 1
  for (uint32_t i = share.first; i < share.end; i += share.step) {
    const uint64_t offset = keys[i] - low;
    if (offset > range) continue;                                         // below
    const int bin = kSelectBins - 1 - static_cast<int>(offset >> shift);  // best first
    atomicAdd(&shared.bins[bin], 1u);
    atomicAdd(&shared.coarse[bin / 32], 1u);
  }
  if (threadIdx.x == 0) shared.finalist_count = 0;
  map.clear();
  __syncthreads();
  const BinCrossing crossing = warp_find_crossing(args.k);
  const int need = args.k - static_cast<int>(crossing.above);  // of the keys in the crossing bin
  const int inside = static_cast<int>(crossing.inside);
  const bool whole = need == inside;
  if (!whole && inside > kSelectFinalists) {
    __syncthreads();  // everybody has read the bins
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kSelectBins; i += kTailThreads) shared.bins[i] = 0;
    __syncthreads();
    return false;
  }
  const uint64_t bin_low = low + (static_cast<uint64_t>(kSelectBins - 1 - static_cast<int>(crossing.bin)) << shift);
  const uint64_t bin_last = bin_low + ((uint64_t{1} << shift) - 1);
#pragma unroll 1
  for (uint32_t i = share.first; i < share.end; i += share.step) {
    const uint64_t key = keys[i];
    if (key > bin_last || (whole && key >= bin_low)) {
      map.add(position_of_key(key));
    } else if (key >= bin_low) {
      shared.finalists[atomicAdd(&shared.finalist_count, 1u)] = key;
    }
  }
  __syncthreads();
  if (!whole) {
    if (threadIdx.x < 32) {
      const uint64_t bound = kth_finalist(static_cast<uint32_t>(inside), need);
      if (static_cast<int>(threadIdx.x) < inside && shared.finalists[threadIdx.x] >= bound) {
        map.add(position_of_key(shared.finalists[threadIdx.x]));
      }
    }
    __syncthreads();
  }
  map.sum(0);
#pragma unroll 1
  for (uint32_t i = share.first; i < share.end; i += share.step) {
    const uint64_t key = keys[i];
    const uint32_t entry = position_of_key(key);
    if (key < bin_low || !map.has(entry)) continue;
    write_member(args, visible, row, map.place_of(entry), entry, score_of_key(key), absent);
  }
  return true;
}

// The keys >= bound in the total order. They are one run.
__device__ __noinline__ inline uint32_t give_by_rank(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, int count,
                                                     int members, uint64_t bound) {
  uint32_t absent = 0;
  block_keep_at_least<kTailThreads>(count, bound);
  block_sort_descending<kTailThreads>(members);
#pragma unroll 1
  for (int i = threadIdx.x; i < members; i += kTailThreads) {
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

// Members whose pages name nothing, of each thread. Called by whole warps.
__device__ __forceinline__ void report_absent_slots(const SelectTopkArgs& args, uint32_t absent) {
  if (args.slots == nullptr || !__any_sync(0xFFFFFFFFu, absent != 0)) return;
  absent = __reduce_add_sync(0xFFFFFFFFu, absent);
  if ((threadIdx.x & 31) == 0) {
    report_status(args.report, kStatusAbsentPage);
    report_count(args.report, &OpReport::absent_entries, absent);
  }
}

// A complete pool, of which the `reaching` keys >= low are all that the answer can need, becomes the row's answer: by the
// leader's first kTailThreads threads, all others of the block having ended. The pool's first `extent` keys are given in
// threads' shares; what lies in none of them is 0. `memory` is shared memory that nobody uses any more, more than 4 x kMapParts
// bytes.
__device__ __forceinline__ void give_row_of(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, uint32_t length,
                                            uint64_t low, KeyShare share, int extent, int reaching, uint4* memory, uint32_t memory_bytes) {
  const SelectShared& pool = select_shared();
  const int members = min(args.k, reaching);
  if (threadIdx.x == 0) {
    const uint32_t status =
        visible.status | (pool.nan_count != 0 ? kStatusNanScore : 0u) | (pool.absent_count != 0 ? kStatusAbsentPage : 0u);
    report_status(args.report, status);
    report_count(args.report, &OpReport::nan_scores, pool.nan_count);
    report_count(args.report, &OpReport::absent_entries, pool.absent_count);
    report_count(args.report, &OpReport::fallbacks, pool.overflows);
  }
  uint32_t absent = 0;
  const bool fits = args.order == TopkOrder::kByPosition && members < reaching && length <= MemberMap::holds(memory_bytes);
  if (!fits || !give_at_once(args, visible, row, length, share, low, memory, &absent)) {
    const uint64_t bound = members < reaching ? block_kth_bound<kTailThreads>(share, args.k, low) : max(low, uint64_t{1});
    __syncthreads();
    absent = args.order == TopkOrder::kByPosition ? give_by_position(args, visible, row, length, share, bound, memory, memory_bytes)
                                                  : give_by_rank(args, visible, row, extent, members, bound);
  }
  give_padding<kTailThreads>(args, row, members);
  report_absent_slots(args, absent);
}

// The same of a pool of which every key reaches `low`.
__device__ __forceinline__ void give_row(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, uint32_t length, uint64_t low,
                                         uint4* memory, uint32_t memory_bytes) {
  const int count = static_cast<int>(select_shared().count);
  give_row_of(args, visible, row, length, low, share_of_run<kTailThreads>(count), count, count, memory, memory_bytes);
}

}  // namespace needle
