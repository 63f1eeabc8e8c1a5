// Exact selection inside one block: a buffer of rank keys in shared memory, and what can be asked of it.
//
// What must stay true:
//  1. The buffer always holds every offered key that is at least `threshold`, or has raised `threshold` to a bound that
//     exactly k of the keys it saw reach: never above the row's k-th key. Nothing is dropped for want of room.
//  2. kth_bound() is exact for any keys: each pass resolves 11 more bits of the range that still matters, so ordinary
//     scores need one pass and the worst input six. Keys are unique (they hold the position), so the k-th is one key.
//  3. The buffer's order depends on timing; answers never do: they are sets of unique keys, and are given out sorted.
//  4. Functions named block_* are called by the whole block, from uniform control flow, and say which barriers they have.
//  5. Dynamic shared memory begins with SelectShared and the keys lie right behind it. The functions find both there, not
//     through pointers: an address known to be shared makes shared loads and atomics, a generic one does not.
//
// A rank key is rank_key() of select_topk.h; 0 stands for "no key" (no entry has position 0xFFFFFFFF).
// What is no hot loop is one body, neither inlined nor unrolled: it runs once a row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/select_topk.h"
#include "kernels/shared_memory.cuh"

namespace needle {

inline constexpr int kSelectBins = 2048;
inline constexpr int kSelectBinBits = 11;
inline constexpr int kSelectCoarseBins = 64;  // of 32 bins each: one warp finds the crossing bin in two steps
inline constexpr int kSelectFinalists = 32;   // so many keys in the crossing bin are ranked by one warp directly

struct alignas(16) SelectShared {
  uint32_t bins[kSelectBins];          // zero between calls
  uint32_t coarse[kSelectCoarseBins];  // sums of 32 bins, for warp_find_crossing(); left as they are
  uint32_t aside[4];                   // where keys are counted that count for nothing
  uint4 crossing;
  uint64_t threshold;
  uint64_t finalists[kSelectFinalists];
  uint32_t warp_sums[32];
  uint32_t count;      // keys in the buffer; beyond its capacity while an overflow is being dealt with
  uint32_t order_max;  // largest score_order_bits in the buffer, or above it
  uint32_t finalist_count;
  uint32_t nan_count;
  uint32_t absent_count;
  uint32_t overflows;
};

__device__ __forceinline__ SelectShared& select_shared() {
  extern __shared__ uint4 dynamic_shared[];
  return *reinterpret_cast<SelectShared*>(dynamic_shared);
}
__device__ __forceinline__ uint64_t* select_keys() { return reinterpret_cast<uint64_t*>(&select_shared() + 1); }

__device__ __forceinline__ unsigned lanes_below() {
  unsigned mask;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  return mask;
}

__device__ __forceinline__ uint32_t order_bits_of_key(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
__device__ __forceinline__ uint32_t position_of_key(uint64_t key) { return 0xFFFFFFFFu - static_cast<uint32_t>(key); }
__device__ __forceinline__ float score_of_key(uint64_t key) { return __uint_as_float(score_bits_of_order(order_bits_of_key(key))); }

// Which keys of the buffer are this thread's to look at: keys[first], keys[first + step], ... before `end`. Two shapes:
// each thread its own list, as read_part leaves it, or the whole block one run of keys.
struct KeyShare {
  uint32_t first;
  uint32_t step;
  uint32_t end;
};
template <int kThreads>
__device__ __forceinline__ KeyShare share_of_run(int count) {
  return {threadIdx.x, kThreads, static_cast<uint32_t>(count)};
}

__device__ __forceinline__ uint32_t inclusive_over_warp(uint32_t value) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const uint32_t from = __shfl_up_sync(0xFFFFFFFFu, value, step);
    if (lane >= step) value += from;
  }
  return value;
}

// Exclusive prefix sum over the block's threads; `total` is the sum. One block barrier; warp_sums must not be written
// again before the next.
template <int kThreads>
__device__ __forceinline__ uint32_t block_exclusive_scan(uint32_t* warp_sums, uint32_t value, uint32_t* total) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const uint32_t inclusive = inclusive_over_warp(value);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  const uint32_t theirs = lane < kWarps ? warp_sums[lane] : 0;
  *total = __reduce_add_sync(0xFFFFFFFFu, theirs);
  return __reduce_add_sync(0xFFFFFFFFu, lane < warp ? theirs : 0u) + inclusive - value;
}

// Begins an empty buffer. The whole block calls it; a block barrier must follow before anything is offered.
template <int kThreads>
__device__ __forceinline__ void block_begin() {
  SelectShared& shared = select_shared();
#pragma unroll
  for (int i = 0; i < kSelectBins / 4; i += kThreads) {
    const int vector = i + static_cast<int>(threadIdx.x);
    if (vector < kSelectBins / 4) reinterpret_cast<uint4*>(shared.bins)[vector] = uint4{0, 0, 0, 0};
  }
  if (threadIdx.x < kSelectCoarseBins) shared.coarse[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    shared.threshold = 0;
    shared.count = 0;
    shared.order_max = 0;
    shared.nan_count = 0;
    shared.absent_count = 0;
    shared.overflows = 0;
  }
}

// rank_key() without branches. `score` is not absent.
__device__ __forceinline__ uint64_t rank_key_of(float score, uint32_t position) {
  return (static_cast<uint64_t>(order_bits_of(score)) << 32) | ~position;
}

// Adds to a counter in shared memory, by the warp's first lane, and gives every lane what it was. That the value might differ
// from lane to lane keeps the compiler from its own way of adding for a warp, twelve instructions.
__device__ __forceinline__ uint32_t add_for_warp(uint32_t* counter, uint32_t value) {
  uint32_t before = 0;
  if ((threadIdx.x & 31u) == 0) {
    asm volatile("atom.shared.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(shared_address(counter)), "r"(value + (lanes_below() >> 31))
                 : "memory");
  }
  __syncwarp();
  return __shfl_sync(0xFFFFFFFFu, before, 0);
}

// Appends this lane's key where `take` and gives its place; a place past the capacity was not written (the count goes
// on, so that the overflow can be measured and taken back). 0 for lanes that take nothing. Called by whole warps.
__device__ __forceinline__ uint32_t append_key(bool take, uint64_t key, uint32_t capacity) {
  const unsigned takers = __ballot_sync(0xFFFFFFFFu, take);
  if (takers == 0) return 0;
  const uint32_t first = add_for_warp(&select_shared().count, static_cast<uint32_t>(__popc(takers)));
  const uint32_t place = first + static_cast<uint32_t>(__popc(takers & lanes_below()));
  if (take && place < capacity) select_keys()[place] = key;
  return take ? place : 0;
}

// Notes order bits of keys that were offered. Whole warps, for which the compiler makes it one atomic; a block barrier must
// follow before they are relied on.
__device__ __forceinline__ void note_order_max(uint32_t order) { atomicMax(&select_shared().order_max, order); }

// Of the finalists, every warp for itself: no barrier to hand the answer round. A lane has one of them, or 0.
struct Finalist {
  uint64_t key;
  int rank;  // how many are better
};
__device__ __forceinline__ Finalist own_finalist(uint32_t finalists) {
  const SelectShared& shared = select_shared();
  const uint32_t lane = threadIdx.x & 31u;
  Finalist own{lane < finalists ? shared.finalists[lane] : 0, 0};
#pragma unroll 1
  for (uint32_t first = 0; first < finalists; first += 4) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) own.rank += (first + i < finalists ? shared.finalists[first + i] : 0) > own.key ? 1 : 0;
  }
  return own;
}
__device__ __forceinline__ uint64_t kth_finalist(uint32_t finalists, int need) {
  const Finalist own = own_finalist(finalists);
  const unsigned at = __ballot_sync(0xFFFFFFFFu, own.key != 0 && own.rank == need - 1);
  return __shfl_sync(0xFFFFFFFFu, own.key, __ffs(static_cast<int>(at)) - 1);
}

// A bound that exactly `need` of the block's keys reach. Of those with key - low <= range there are at least `need`, and
// none lies above them. A block barrier lies behind the call; the bound is the same for every thread.
template <int kThreads>
__device__ __noinline__ uint64_t block_kth_bound_in(KeyShare share, int need, uint64_t low, uint64_t range) {
  constexpr int kBinsPerThread = kSelectBins / kThreads;
  SelectShared& shared = select_shared();
  const uint64_t* keys = select_keys();
  int shift = max(0, 64 - kSelectBinBits - __clzll(static_cast<long long>(range)));
#pragma unroll 1
  for (;;) {
#pragma unroll 1
    for (uint32_t i = share.first; i < share.end; i += share.step) {
      const uint64_t offset = keys[i] - low;
      if (offset <= range) atomicAdd(&shared.bins[kSelectBins - 1 - static_cast<int>(offset >> shift)], 1u);
    }
    __syncthreads();
    const int first_bin = static_cast<int>(threadIdx.x) * kBinsPerThread;
    uint32_t mine[kBinsPerThread];
    uint32_t sum = 0;
#pragma unroll
    for (int b = 0; b < kBinsPerThread; b += 2) {
      uint2& own = *reinterpret_cast<uint2*>(&shared.bins[first_bin + b]);
      const uint2 held = own;
      own = uint2{0, 0};
      mine[b] = held.x;
      mine[b + 1] = held.y;
      sum += held.x + held.y;
    }
    uint32_t total;
    uint32_t above = block_exclusive_scan<kThreads>(shared.warp_sums, sum, &total);
    const uint32_t wanted = static_cast<uint32_t>(need);
    if (above < wanted && wanted <= above + sum) {  // exactly one thread
#pragma unroll
      for (int b = 0; b < kBinsPerThread; ++b) {
        if (above < wanted && wanted <= above + mine[b]) {
          shared.crossing = {static_cast<uint32_t>(kSelectBins - 1 - first_bin - b), above, mine[b], 0u};
        }
        above += mine[b];
      }
      shared.finalist_count = 0;
    }
    __syncthreads();
    const uint4 crossing = shared.crossing;  // bin, keys above it, keys in it
    const int inside = static_cast<int>(crossing.z);
    need -= static_cast<int>(crossing.y);
    low += static_cast<uint64_t>(crossing.x) << shift;
    range = (uint64_t{1} << shift) - 1;
    // The whole bin is in: its lower edge is a bound as good as the key itself. (A bin one number wide holds more than
    // one key only where a caller broke the rule that positions are unique; that must not spin.)
    if (need == inside || shift == 0) return low;
    if (inside <= kSelectFinalists) break;
    shift = max(0, shift - kSelectBinBits);
  }
#pragma unroll 1
  for (uint32_t i = share.first; i < share.end; i += share.step) {
    const uint64_t key = keys[i];
    if (key - low <= range) shared.finalists[atomicAdd(&shared.finalist_count, 1u)] = key;
  }
  __syncthreads();
  return kth_finalist(shared.finalist_count, need);
}

// The same of all keys >= low, at least `need`, whose order bits are <= shared.order_max.
template <int kThreads>
__device__ __forceinline__ uint64_t block_kth_bound(KeyShare share, int need, uint64_t low) {
  const uint64_t high = (static_cast<uint64_t>(select_shared().order_max) << 32) | 0xFFFFFFFFu;
  return block_kth_bound_in<kThreads>(share, need, low, high - low);
}

// The bin that holds the need-th best key, counted from the best, by every warp for itself. Bins and coarse bins are complete.
struct BinCrossing {
  uint32_t bin;
  uint32_t above;   // keys in better bins
  uint32_t inside;  // in this one
  uint32_t total;   // in all bins; the rest is meaningless where that is below `need`
};
__device__ __forceinline__ BinCrossing warp_find_crossing(int need) {
  const SelectShared& shared = select_shared();
  const uint32_t lane = threadIdx.x & 31u;
  const uint32_t wanted = static_cast<uint32_t>(need);
  const uint2 two = reinterpret_cast<const uint2*>(shared.coarse)[lane];
  const uint32_t up_to = inclusive_over_warp(two.x + two.y);
  const int lane_at = max(0, __ffs(static_cast<int>(__ballot_sync(0xFFFFFFFFu, up_to >= wanted))) - 1);
  const uint32_t before_two = up_to - two.x - two.y;
  const bool second = before_two + two.x < wanted;
  const uint32_t above = __shfl_sync(0xFFFFFFFFu, second ? before_two + two.x : before_two, lane_at);
  const uint32_t coarse = __shfl_sync(0xFFFFFFFFu, 2 * lane + (second ? 1u : 0u), lane_at);
  const uint32_t own = shared.bins[32 * coarse + lane];
  const uint32_t with_own = above + inclusive_over_warp(own);
  const int at = max(0, __ffs(static_cast<int>(__ballot_sync(0xFFFFFFFFu, with_own >= wanted))) - 1);
  return {32 * coarse + static_cast<uint32_t>(at), __shfl_sync(0xFFFFFFFFu, with_own - own, at), __shfl_sync(0xFFFFFFFFu, own, at),
          __shfl_sync(0xFFFFFFFFu, up_to, 31)};
}

// Keeps of keys[0, count) those >= bound, in some order; shared.count becomes their number. Ends at a block barrier.
template <int kThreads>
__device__ __noinline__ void block_keep_at_least(int count, uint64_t bound) {
  __syncthreads();
  if (threadIdx.x == 0) select_shared().count = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const uint64_t key = i < count ? select_keys()[i] : 0;
    __syncthreads();  // everybody has read this stretch; survivors land at or before it
    append_key(key != 0 && key >= bound, key, 0xFFFFFFFFu);
  }
  __syncthreads();
}

// Raises the threshold to a bound that exactly k of keys[0, count) reach, count > k, and keeps those. Ends at a barrier.
template <int kThreads>
__device__ __noinline__ void block_raise_threshold(int count, int k) {
  __syncthreads();
  const uint64_t bound = block_kth_bound<kThreads>(share_of_run<kThreads>(count), k, select_shared().threshold);
  block_keep_at_least<kThreads>(count, bound);
  if (threadIdx.x == 0) {
    select_shared().threshold = bound;
    select_shared().overflows += 1;
  }
  __syncthreads();
}

// Sorts numbers[0, count) of the key buffer downwards; room up to the next power of two is filled with 0. A block
// barrier lies behind the call and at its end.
template <int kThreads>
__device__ __noinline__ void block_sort_descending(int count) {
  uint64_t* numbers = select_keys();
  int padded = 1;
  while (padded < count) padded <<= 1;
  for (int i = count + static_cast<int>(threadIdx.x); i < padded; i += kThreads) numbers[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int size = 2; size <= padded; size <<= 1) {
#pragma unroll 1
    for (int stride = size >> 1; stride > 0; stride >>= 1) {
#pragma unroll 1
      for (int pair = threadIdx.x; pair < padded / 2; pair += kThreads) {
        const int low = 2 * pair - (pair & (stride - 1));
        const int high = low + stride;
        const uint64_t a = numbers[low];
        const uint64_t b = numbers[high];
        if ((a < b) == ((low & size) == 0)) {
          numbers[low] = b;
          numbers[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace needle
