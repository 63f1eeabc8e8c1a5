// A row's end and its slow way: reading it from global memory with a rising threshold, and giving out the k best of a
// complete pool. What select_topk.cu and select_by_maxima.cu share.
//
// What must stay true:
//  1. What is given out is a function of the scores: the pool's order depends on timing, the answer does not.
//  2. Functions named give_* are called by kTailThreads threads, all others of the block having ended, and use the bitmap
//     that they are given: shared memory that nobody reads any more.
#pragma once

#include <cstddef>

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
// The score of a row's entry as it is given out: NaN canonical, -0 as +0.
__device__ __forceinline__ float score_of_entry(const SelectTopkArgs& args, int64_t row, uint32_t entry) {
  return __uint_as_float(score_bits_of_order(order_bits_of(args.scores[row * args.score_stride + entry])));
}

// This thread's share of the keys, four at a time: 0 for what is not there. `visit` runs in whole warps.
template <class Visit>
__device__ __forceinline__ void visit_keys(const KeyShare& share, const Visit& visit) {
  const uint64_t* const keys = select_keys();
#pragma unroll 1
  for (uint32_t first = share.first; __any_sync(0xFFFFFFFFu, first < share.end); first += 4 * share.step) {
    uint64_t key[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) key[i] = first + i * share.step < share.end ? keys[first + i * share.step] : 0;
    visit(key);
  }
}

// Which positions of a stretch are members: a bit each, and of each of kMapParts parts how many members lie before it. A thread of
// the tail owns four neighbouring parts. Parts are of 64 positions, whose members are counted when they are summed, or of more, and
// counted as they are marked.
inline constexpr uint32_t kMapParts = 4 * kTailThreads;
struct MemberMap {
  uint32_t counts;     // shared address
  uint32_t words;      // behind them
  uint32_t part_log2;  // positions of a part; at least 64
  uint32_t bytes;

  // The positions that a map of so many bytes can hold.
  __device__ __forceinline__ static uint32_t holds(uint32_t bytes) { return (bytes - 4 * kMapParts) / 16 * 128; }

  // Of `positions` positions.
  __device__ __forceinline__ MemberMap(const uint4* memory, uint32_t positions) {
    counts = shared_address(memory);
    words = counts + 4 * kMapParts;
    part_log2 = max(6u, 32u - static_cast<uint32_t>(__clz(static_cast<int>((positions - 1) / kMapParts))));
    bytes = 4 * kMapParts + (positions + 127) / 128 * 16;
  }
  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (uint32_t at = threadIdx.x * 16; at < bytes; at += kTailThreads * 16) store_vector(counts + at, uint4{0, 0, 0, 0});
  }
  __device__ __forceinline__ void mark(uint32_t position) const {
    or_to_word(words + 4 * (position / 32), 1u << (position % 32));
    if (part_log2 > 6) add_one_to_word(counts + 4 * (position >> part_log2));
  }
  // Of a position that all know: its owner marks it.
  __device__ __forceinline__ void mark_own(uint32_t position) const {
    if ((position >> part_log2) / 4 == threadIdx.x) mark(position);
  }
  // The map is complete but for what others own; `given` members lie before it. Ends at a barrier. Returns given + all.
  __device__ __forceinline__ uint32_t sum(uint32_t given) const {
    const uint32_t own = counts + 16 * threadIdx.x;
    uint4 four;
    if (part_log2 > 6) {
      four = load_vector(own);
    } else {
      const uint4 none{0, 0, 0, 0};
      const uint32_t at = words + 32 * threadIdx.x;
      const uint4 low = at < counts + bytes ? load_vector(at) : none;
      const uint4 high = at + 16 < counts + bytes ? load_vector(at + 16) : none;
      four = {ones(low.x, low.y), ones(low.z, low.w), ones(high.x, high.y), ones(high.z, high.w)};
    }
    uint32_t total;
    const uint32_t before =
        given + block_exclusive_scan<kTailThreads>(select_shared().warp_sums, four.x + four.y + four.z + four.w, &total);
    store_vector(own, uint4{before, before + four.x, before + four.x + four.y, before + four.x + four.y + four.z});
    __syncthreads();
    return given + total;
  }
  // Once summed: whether a position is a member, and its place among them then. Nobody is where it is not `within`.
  struct Place {
    bool member;
    uint32_t place;
  };
  __device__ __forceinline__ Place place_of(uint32_t position, bool within) const {
    const uint32_t at = within ? position : 0;
    const uint32_t count = load_word(counts + 4 * (at >> part_log2));
    uint2 pair;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(pair.x), "=r"(pair.y) : "r"(words + 8 * (at / 64)) : "memory");
    const bool odd = (at & 32u) != 0;
    const uint32_t bit = 1u << (at % 32);
    const uint32_t own = odd ? pair.y : pair.x;
    const uint32_t before = odd ? pair.x : 0;
    return {within && (own & bit) != 0, count + static_cast<uint32_t>(__popc(static_cast<int>(own & (bit - 1)))) +
                                            static_cast<uint32_t>(__popc(static_cast<int>(before)))};
  }
  // Where parts are longer than 64: what place_of() leaves out.
  __device__ __forceinline__ uint32_t before_pair(uint32_t position) const {
    uint32_t count = 0;
#pragma unroll 1
    for (uint32_t word = position >> part_log2 << (part_log2 - 5); word < position / 64 * 2; ++word) {
      count += static_cast<uint32_t>(__popc(static_cast<int>(load_word(words + 4 * word))));
    }
    return count;
  }

 private:
  __device__ __forceinline__ static uint32_t ones(uint32_t first, uint32_t second) {
    return static_cast<uint32_t>(__popc(static_cast<int>(first)) + __popc(static_cast<int>(second)));
  }
};

// Shared memory that nobody uses any more once a row is read: more than 4 x kMapParts bytes.
struct FreeMemory {
  uint4* at;
  uint32_t bytes;

  // Whether give_at_once() can have a map of the row here and, behind it, a list of the members.
  __device__ __forceinline__ bool covers(const SelectTopkArgs& args, uint32_t length) const {
    const uint32_t list = 4 * static_cast<uint32_t>(args.k);
    return args.order == TopkOrder::kByPosition && bytes > 4 * kMapParts + list && length <= MemberMap::holds(bytes - list);
  }
};

// The keys >= bound ascending by position, stretch by stretch where the map is too small for the row. A barrier lies
// behind the call.
__device__ __noinline__ inline uint32_t give_by_position(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row,
                                                         uint32_t length, KeyShare share, uint64_t bound, FreeMemory memory) {
  uint32_t absent = 0;
  uint32_t given = 0;
  const uint32_t stretch = min(MemberMap::holds(memory.bytes), length);
#pragma unroll 1
  for (uint32_t begin = 0; begin < length; begin += stretch) {
    const MemberMap map(memory.at, stretch);
    map.clear();
    __syncthreads();
    visit_keys(share, [&](const uint64_t(&key)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t at = position_of_key(key[i]) - begin;  // wraps past every stretch where it lies before
        if (at < stretch && key[i] >= bound) map.mark(at);
      }
    });
    __syncthreads();
    given = map.sum(given);
#pragma unroll 1
    for (uint32_t i = share.first; i < share.end; i += share.step) {
      const uint64_t key = select_keys()[i];
      const uint32_t at = position_of_key(key) - begin;
      const MemberMap::Place found = map.place_of(at, at < stretch);
      if (!found.member) continue;
      write_member(args, visible, row, found.place + map.before_pair(at), begin + at, score_of_key(key), &absent);
    }
    __syncthreads();
  }
  return absent;
}

struct AtOnce {
  bool given;
  uint32_t reaching;  // keys that reach `low`
};
// The k best ascending by position, where one map covers the row: it is clear. `low` is not 0; what lies below counts for
// nothing. Nothing is given where fewer than k reach `low`, or where the k-th's bin holds too many keys; the bins are zero
// then. A barrier lies behind the call. Five barriers, and between them as few dependent instructions as can be: every warp works
// out for itself what all need, and a thread looks at four keys at a time. Shared atomics and stores to scattered places in
// memory are slow too: members alone are marked, and listed in their order before neighbours write neighbours.
__device__ __forceinline__ AtOnce give_at_once(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, const MemberMap& map,
                                               const KeyShare& share, uint64_t low, uint32_t order_max, uint32_t* absent) {
  static_assert(offsetof(SelectShared, coarse) == offsetof(SelectShared, bins) + 4 * kSelectBins, "sums follow bins");
  constexpr uint32_t kNoBin = kSelectBins + kSelectCoarseBins;
  static_assert(offsetof(SelectShared, aside) == offsetof(SelectShared, bins) + 4 * kNoBin && kNoBin / 32 < kSelectCoarseBins + 4,
                "a bin that nobody looks at, and its sum");
  SelectShared& shared = select_shared();
  // Where nothing that was kept reaches `low`, the best lies below it.
  const uint64_t range = ((static_cast<uint64_t>(max(order_max, order_bits_of_key(low))) << 32) | 0xFFFFFFFFu) - low;
  const int shift = max(0, 64 - kSelectBinBits - __clzll(static_cast<long long>(range)));
  const uint32_t bins = shared_address(shared.bins);
  visit_keys(share, [&](const uint64_t(&key)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint64_t offset = key[i] - low;
      const uint32_t bin = offset <= range ? kSelectBins - 1 - static_cast<uint32_t>(offset >> shift) : kNoBin;  // best first
      add_one_to_word(bins + 4 * bin);
      add_one_to_word(bins + 4 * (kSelectBins + bin / 32));
    }
  });
  if (threadIdx.x == 0) shared.finalist_count = 0;
  __syncthreads();
  const BinCrossing crossing = warp_find_crossing(args.k);
  const int need = args.k - static_cast<int>(crossing.above);  // of the keys in the crossing bin
  const int inside = static_cast<int>(crossing.inside);
  const bool whole = need == inside;
  if (crossing.total < static_cast<uint32_t>(args.k) || (!whole && inside > kSelectFinalists)) {
    __syncthreads();  // everybody has read the bins
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < kSelectBins + kSelectCoarseBins; i += kTailThreads) store_word(bins + 4 * i, 0);
    __syncthreads();
    return {false, crossing.total};
  }
  const uint64_t bin_low = low + (static_cast<uint64_t>(kSelectBins - 1 - static_cast<int>(crossing.bin)) << shift);
  const uint64_t sure = whole ? bin_low : bin_low + (uint64_t{1} << shift);  // no key is near 2^64
  visit_keys(share, [&](const uint64_t(&key)[4]) {
    uint32_t open = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key[i] >= sure) map.mark(position_of_key(key[i]));
      open |= key[i] >= bin_low && key[i] < sure ? 1u << i : 0u;
    }
    if (open == 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((open >> i & 1u) != 0) shared.finalists[atomicAdd(&shared.finalist_count, 1u)] = key[i];
    }
  });
  __syncthreads();
  if (!whole) {
    const Finalist own = own_finalist(static_cast<uint32_t>(inside));
#pragma unroll 1
    for (unsigned in = __ballot_sync(0xFFFFFFFFu, own.key != 0 && own.rank < need); in != 0; in &= in - 1) {
      map.mark_own(~__shfl_sync(0xFFFFFFFFu, static_cast<uint32_t>(own.key), __ffs(static_cast<int>(in)) - 1));
    }
    __syncwarp();
  }
  map.sum(0);
  const uint32_t list = map.counts + map.bytes;
  visit_keys(share, [&](const uint64_t(&key)[4]) {
    MemberMap::Place found[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) found[i] = map.place_of(position_of_key(key[i]), key[i] >= bin_low);
    if (map.part_log2 > 6) {
#pragma unroll
      for (int i = 0; i < 4; ++i) found[i].place += found[i].member ? map.before_pair(position_of_key(key[i])) : 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (found[i].member) store_word(list + 4 * found[i].place, position_of_key(key[i]));
    }
    __syncwarp();
  });
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(args.k); i += kTailThreads) {
    const uint32_t entry = load_word(list + 4 * i);
    write_member(args, visible, row, i, entry, args.out_scores != nullptr ? score_of_entry(args, row, entry) : 0.0f, absent);
  }
  __syncwarp();
  return {true, crossing.total};
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

// How many of the keys reach `low`, for every thread. Two barriers.
__device__ __forceinline__ uint32_t count_reaching(const KeyShare& share, uint64_t low) {
  uint32_t own = 0;
  visit_keys(share, [&](const uint64_t(&key)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) own += key[i] >= low ? 1u : 0u;
  });
  uint32_t total;
  block_exclusive_scan<kTailThreads>(select_shared().warp_sums, own, &total);
  __syncthreads();
  return total;
}

// A complete pool.
struct CompletePool {
  KeyShare share;  // of its first `extent` keys; what lies in no thread's share is 0, or was never written
  uint32_t extent;
  uint32_t order_max;  // of all keys, or above
  uint64_t low;        // what answers can be made of reaches it; not 0
};
// The k best of the keys that reach `low`, where `reaching` of them do, any order and any keys: slower than give_at_once(). A
// barrier lies behind the call.
struct Given {
  int members;
  uint32_t absent;
};
__device__ __noinline__ inline Given give_pool(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, uint32_t length,
                                               CompletePool pool, int reaching, FreeMemory memory) {
  const int members = min(args.k, reaching);
  if (threadIdx.x == 0) select_shared().order_max = pool.order_max;
  __syncthreads();
  const uint64_t bound = members < reaching ? block_kth_bound<kTailThreads>(pool.share, args.k, pool.low) : pool.low;
  __syncthreads();
  const uint32_t absent = args.order == TopkOrder::kByPosition
                              ? give_by_position(args, visible, row, length, pool.share, bound, memory)
                              : give_by_rank(args, visible, row, static_cast<int>(pool.extent), members, bound);
  return {members, absent};
}

// What a row's end is beside its members: padding, count and report.
__device__ __forceinline__ void end_row(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, int members, uint32_t absent) {
  const SelectShared& pool = select_shared();
  give_padding<kTailThreads>(args, row, members);
  report_absent_slots(args, absent);
  if (threadIdx.x == 0) {
    const uint32_t status =
        visible.status | (pool.nan_count != 0 ? kStatusNanScore : 0u) | (pool.absent_count != 0 ? kStatusAbsentPage : 0u);
    report_status(args.report, status);
    report_count(args.report, &OpReport::nan_scores, pool.nan_count);
    report_count(args.report, &OpReport::absent_entries, pool.absent_count);
    report_count(args.report, &OpReport::fallbacks, pool.overflows);
  }
}

// Gives out a pool that is one run of keys, all of which reach `low`.
__device__ __forceinline__ void give_row(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, uint32_t length, uint64_t low,
                                         uint4* memory, uint32_t memory_bytes) {
  const uint32_t count = select_shared().count;
  const CompletePool pool{share_of_run<kTailThreads>(static_cast<int>(count)), count, select_shared().order_max, max(low, uint64_t{1})};
  __syncthreads();  // give_pool() writes what has been read here
  const Given given = give_pool(args, visible, row, length, pool, static_cast<int>(count), {memory, memory_bytes});
  end_row(args, visible, row, given.members, given.absent);
}

}  // namespace needle
