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

// Zeroes the bitmap over a stretch of positions: 128 of them a vector.
__device__ __forceinline__ void clear_bitmap(uint4* bitmap, uint32_t vectors, uint32_t first_thread) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x - first_thread; i < vectors; i += kTailThreads - first_thread) bitmap[i] = uint4{0, 0, 0, 0};
}
__device__ __forceinline__ void set_bit(uint4* bitmap, uint32_t bit) {
  atomicOr(&reinterpret_cast<uint32_t*>(bitmap)[bit >> 5], 1u << (bit & 31u));
}

// before[i]: bits set in vectors [0, i), and `given`. The bitmap is complete; ends at a barrier. Returns given + all.
__device__ __forceinline__ uint32_t sum_bitmap(const uint4* bitmap, uint32_t* before, uint32_t vectors, uint32_t given) {
  const uint32_t a_thread = (vectors + kTailThreads - 1) / kTailThreads;
  const uint32_t first = min(threadIdx.x * a_thread, vectors);
  const uint32_t last = min(first + a_thread, vectors);
  uint32_t mine = 0;
#pragma unroll 4
  for (uint32_t i = first; i < last; ++i) {
    const uint4 bits = bitmap[i];
    before[i] = mine;
    mine += static_cast<uint32_t>(__popc(bits.x) + __popc(bits.y) + __popc(bits.z) + __popc(bits.w));
  }
  uint32_t total;
  const uint32_t place = given + block_exclusive_scan<kTailThreads>(select_shared().warp_sums, mine, &total);
#pragma unroll 4
  for (uint32_t i = first; i < last; ++i) before[i] += place;
  __syncthreads();
  return given + total;
}

// The place among the members of the one at `bit` of the bitmap.
__device__ __forceinline__ uint32_t place_of_bit(const uint4* bitmap, const uint32_t* before, uint32_t bit) {
  const uint4 bits = bitmap[bit >> 7];
  const uint32_t word = (bit >> 5) & 3u;
  const uint32_t below = (1u << (bit & 31u)) - 1u;
  uint32_t place = before[bit >> 7];
  place += static_cast<uint32_t>(__popc(bits.x & (word > 0 ? 0xFFFFFFFFu : below)));
  place += static_cast<uint32_t>(__popc(bits.y & (word > 1 ? 0xFFFFFFFFu : word == 1 ? below : 0u)));
  place += static_cast<uint32_t>(__popc(bits.z & (word > 2 ? 0xFFFFFFFFu : word == 2 ? below : 0u)));
  place += static_cast<uint32_t>(__popc(bits.w & (word == 3 ? below : 0u)));
  return place;
}

// The keys >= bound ascending by position, stretch by stretch where the bitmap is too small for the row. A barrier lies
// behind the call.
__device__ __noinline__ inline uint32_t give_by_position(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row,
                                                         uint32_t length, KeyShare share, uint64_t bound, uint4* bitmap,
                                                         uint32_t bitmap_bytes) {
  uint32_t absent = 0;
  uint32_t given = 0;
  const uint64_t* keys = select_keys();
  const uint32_t vectors_max = min(bitmap_bytes / 20, (length + 127) / 128);
  uint32_t* before = reinterpret_cast<uint32_t*>(bitmap + vectors_max);
#pragma unroll 1
  for (uint32_t begin = 0; begin < length; begin += vectors_max * 128) {
    const uint32_t vectors = min(vectors_max, (length - begin + 127) / 128);
    clear_bitmap(bitmap, vectors, 0);
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = share.first; i < share.end; i += share.step) {
      const uint64_t key = keys[i];
      const uint32_t bit = position_of_key(key) - begin;  // wraps past every bitmap where it lies before
      if (key >= bound && bit < vectors * 128) set_bit(bitmap, bit);
    }
    __syncthreads();
    given = sum_bitmap(bitmap, before, vectors, given);
#pragma unroll 1
    for (uint32_t i = share.first; i < share.end; i += share.step) {
      const uint64_t key = keys[i];
      const uint32_t entry = position_of_key(key);
      const uint32_t bit = entry - begin;
      if (key < bound || bit >= vectors * 128) continue;
      write_member(args, visible, row, place_of_bit(bitmap, before, bit), entry, score_of_key(key), &absent);
    }
    __syncthreads();
  }
  return absent;
}

// The k best ascending by position, where one bitmap covers the row: the k-th is found and the members are marked on the
// way. More than k keys, none below `low`. A barrier lies behind the call. False where the bin of the k-th holds too many
// keys: nothing is given then, and the bins are zero. Loops are kept small: each runs a few times, and code that comes new
// costs more than what it does.
__device__ __forceinline__ bool give_at_once(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, uint32_t length, int count,
                                             uint64_t low, uint4* bitmap, uint32_t* absent) {
  SelectShared& shared = select_shared();
  const uint64_t* keys = select_keys();
  const uint32_t vectors = (length + 127) / 128;
  uint32_t* before = reinterpret_cast<uint32_t*>(bitmap + vectors);
  const uint64_t range = ((static_cast<uint64_t>(shared.order_max) << 32) | 0xFFFFFFFFu) - low;
  const int shift = max(0, 64 - kSelectBinBits - __clzll(static_cast<long long>(range)));
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kTailThreads) {
    const int bin = kSelectBins - 1 - static_cast<int>((keys[i] - low) >> shift);  // best first
    atomicAdd(&shared.bins[bin], 1u);
    atomicAdd(&shared.coarse[bin / 32], 1u);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    warp_find_crossing(args.k);
  } else {
    clear_bitmap(bitmap, vectors, 32);
  }
  __syncthreads();
  const int need = args.k - static_cast<int>(shared.crossing.y);  // of the keys in the crossing bin
  const int inside = static_cast<int>(shared.crossing.z);
  const bool whole = need == inside;
  if (!whole && inside > kSelectFinalists) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kSelectBins; i += kTailThreads) shared.bins[i] = 0;
    __syncthreads();
    return false;
  }
  const uint64_t bin_low = low + (static_cast<uint64_t>(kSelectBins - 1 - static_cast<int>(shared.crossing.x)) << shift);
  const uint64_t bin_last = bin_low + ((uint64_t{1} << shift) - 1);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kTailThreads) {
    const uint64_t key = keys[i];
    if (key > bin_last || (whole && key >= bin_low)) {
      set_bit(bitmap, position_of_key(key));
    } else if (key >= bin_low) {
      shared.finalists[atomicAdd(&shared.finalist_count, 1u)] = key;
    }
  }
  __syncthreads();
  if (!whole) {
    if (threadIdx.x < 32) {
      const uint64_t bound = kth_finalist(static_cast<uint32_t>(inside), need);
      if (static_cast<int>(threadIdx.x) < inside && shared.finalists[threadIdx.x] >= bound) {
        set_bit(bitmap, position_of_key(shared.finalists[threadIdx.x]));
      }
    }
    __syncthreads();
  }
  sum_bitmap(bitmap, before, vectors, 0);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(bitmap);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kTailThreads) {
    const uint64_t key = keys[i];
    const uint32_t entry = position_of_key(key);
    if (key < bin_low || (words[entry >> 5] >> (entry & 31u) & 1u) == 0) continue;
    write_member(args, visible, row, place_of_bit(bitmap, before, entry), entry, score_of_key(key), absent);
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

// A complete pool of keys >= low, all that the answer can need, becomes the row's answer: by the leader's first
// kTailThreads threads, all others of the block having ended. `bitmap` is shared memory that nobody uses any more.
__device__ __forceinline__ void give_row(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, uint32_t length, uint64_t low,
                                         uint4* bitmap, uint32_t bitmap_bytes) {
  const SelectShared& pool = select_shared();
  const int count = static_cast<int>(pool.count);
  const int members = min(args.k, count);
  if (threadIdx.x == 0) {
    const uint32_t status =
        visible.status | (pool.nan_count != 0 ? kStatusNanScore : 0u) | (pool.absent_count != 0 ? kStatusAbsentPage : 0u);
    report_status(args.report, status);
    report_count(args.report, &OpReport::nan_scores, pool.nan_count);
    report_count(args.report, &OpReport::absent_entries, pool.absent_count);
    report_count(args.report, &OpReport::fallbacks, pool.overflows);
  }
  uint32_t absent = 0;
  const bool fits = args.order == TopkOrder::kByPosition && members < count && (length + 127) / 128 * 20 <= bitmap_bytes;
  if (!fits || !give_at_once(args, visible, row, length, count, low, bitmap, &absent)) {
    const KeyShare share = share_of_run<kTailThreads>(count);
    const uint64_t bound = members < count ? block_kth_bound<kTailThreads>(share, args.k, low) : 1;
    __syncthreads();
    absent = args.order == TopkOrder::kByPosition ? give_by_position(args, visible, row, length, share, bound, bitmap, bitmap_bytes)
                                                  : give_by_rank(args, visible, row, count, members, bound);
  }
  give_padding<kTailThreads>(args, row, members);
  report_absent_slots(args, absent);
}

}  // namespace needle
