// select_topk from scores and the maxima of their groups: a block a row, everything in the order of positions.
//
// Maxima are binned by their distance from the highest of a sample, and where the k-th falls gives the floor. Groups that reach
// it are listed and their scores copied to shared memory; a row that fits there whole (kWhole) is asked for in the same instant
// as its maxima, so that the floor is known when it comes. Each warp lists which of its scores reach the floor, its items, and
// bins them; the bin of the k-th is resolved exactly, and members go out where a count of those before them says.
//
// What must stay true:
//  1. A bin is a monotone function of a score, so whatever lies in a better bin is greater. Rounding may move a bin's edge and
//     never the order.
//  2. At least k scores reach the floor. Where bins cannot tell (equal scores, a sample that an outlier stretches), the floor is
//     found exactly among (maximum, last position) of the groups: k groups reach that.
//  3. Warps have contiguous shares of the row's groups or of the listed ones, and each warp's items ascend by position.
//  4. What is too much for lanes to hold on to, or for one bin, or wanted by rank becomes one pool of keys; what fits nowhere, and
//     rows with fewer than k numbers among their maxima, are read whole instead.
//  5. Instructions of a warp, one after the other, are what this kernel's time is made of, a barrier being a dozen of them. So
//     every warp works out for itself what all need, and what can be is worked out before the wait.
#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "kernels/device_report.cuh"
#include "kernels/launch.cuh"
#include "kernels/select_by_maxima.h"
#include "kernels/select_topk_block.cuh"
#include "kernels/select_topk_row.cuh"

namespace needle {
namespace {

constexpr int kThreads = kTailThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kValuesOfLane = 4;                   // what a lane's maxima are boiled down to
constexpr int kBins = 128;                         // a lane has four
constexpr int kPoolCapacity = kMaximaGroup * 512;  // k groups of equal scores at k = 512
constexpr int kVectorEntries = 4 * kMaximaGroup;   // scores that 16 bytes of maxima stand for
constexpr int kMaximaRounds = 4;                   // 16-byte vectors of maxima that a lane has under way
constexpr int kQuadGroups = 8;                     // neighbours whose scores four lanes copy
constexpr int kWarpGroups = 8 * kQuadGroups;
constexpr int kWarpScores = kWarpGroups * kMaximaGroup;
constexpr int kWholeEntries = kWarps * kWarpScores;
constexpr int kGroupsMax = 4096 - kWarpGroups;
constexpr uint32_t kMinusInfinityBits = 0xFF800000u;
constexpr int kHeldItems = 4;  // of a lane, between barriers

// Behind the scores that warps keep. These lie where the pool's keys will be, until keys are wanted at all.
template <bool kWhole>
struct alignas(16) MaximaShared {
  static constexpr int kItemsMax = kWhole ? kWarpScores : 512;
  uint32_t value_bins[kBins];
  uint32_t score_bins[kBins];
  uint32_t groups_of[kWarps];
  uint32_t items_of[kWarps];
  uint32_t members_of[kWarps];
  uint64_t finalists[kSelectFinalists];  // 0 where there is none
  // Numbers of scores among those of a warp's groups.
  uint16_t items[kWarps][kItemsMax];
  uint16_t groups[kWhole ? 8 : kGroupsMax + kWarpGroups];  // lanes look past the end
};
constexpr size_t kKeptAt = (sizeof(SelectShared) + 127) / 128 * 128;  // of the block's shared memory, where scores are kept
constexpr size_t kMaximaAt = kKeptAt + size_t{kWholeEntries} * 4;
template <bool kWhole>
constexpr size_t kSharedBytes = kMaximaAt + sizeof(MaximaShared<kWhole>);
static_assert(2 * (kSharedBytes<false> + 1024) <= 227 * 1024, "two blocks share a multiprocessor of 9.0");
static_assert(kSharedBytes<false> <= 99 * 1024, "a block of 12.0");
static_assert(sizeof(SelectShared) + size_t{kPoolCapacity} * 8 <= kMaximaAt, "keys lie where scores did");

template <bool kWhole>
__device__ __forceinline__ MaximaShared<kWhole>& maxima_shared() {
  return *reinterpret_cast<MaximaShared<kWhole>*>(reinterpret_cast<std::byte*>(&select_shared()) + kMaximaAt);
}

__device__ __forceinline__ uint32_t load_short(uint32_t address) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_short(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(value)) : "memory");
}
__device__ __forceinline__ float4 load_kept(uint32_t address) {
  float4 four;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(address)
               : "memory");
  return four;
}
// Adds one where `counts`, without the branch that the compiler would put around an atomic; and what stood there before.
__device__ __forceinline__ void count_in(bool counts, uint32_t bin) {
  asm volatile("{\n.reg .pred counts;\nsetp.ne.u32 counts, %1, 0;\n@counts red.relaxed.cta.shared::cta.add.u32 [%0], 1;\n}" ::"r"(bin),
               "r"(counts ? 1u : 0u)
               : "memory");
}
__device__ __forceinline__ uint32_t count_up(bool counts, uint32_t bin) {
  uint32_t before = 0;
  asm volatile("{\n.reg .pred counts;\nsetp.ne.u32 counts, %2, 0;\n@counts atom.relaxed.cta.shared::cta.add.u32 %0, [%1], 1;\n}"
               : "+r"(before)
               : "r"(bin), "r"(counts ? 1u : 0u)
               : "memory");
  return before;
}

// Maxima are asked for where the program says so: weak loads the compiler moves to where their values are looked at. 0 where
// they are not `there`.
__device__ __forceinline__ uint4 load_maxima(bool there, const uint4* from) {
  uint4 four{0, 0, 0, 0};
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.u32 there, %5, 0;\n"
      "@there ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(four.x), "+r"(four.y), "+r"(four.z), "+r"(four.w)
      : "l"(from), "r"(there ? 1u : 0u)
      : "memory");
  return four;
}
__device__ __forceinline__ uint2 load_maxima(bool there, const uint2* from) {
  uint2 two{0, 0};
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.u32 there, %3, 0;\n"
      "@there ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];\n}"
      : "+r"(two.x), "+r"(two.y)
      : "l"(from), "r"(there ? 1u : 0u)
      : "memory");
  return two;
}
// Has the address worked out and translated early; says nothing about the value.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); }
// Four scores, to shared memory without a way through registers.
__device__ __forceinline__ void copy_scores(bool there, uint32_t to, const float4* from) {
  asm volatile("{\n.reg .pred there;\nsetp.ne.u32 there, %2, 0;\n@there cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(to), "l"(from),
               "r"(there ? 1u : 0u)
               : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Where a warp keeps the score of an item. A lane reads 32 neighbours: the eight vectors of each 128 bytes change places so that
// lanes meet in no bank. The warp's scores begin on 128 bytes.
__device__ __forceinline__ uint32_t kept_at(uint32_t item) { return 4 * item ^ (item / 2 & 0x70u); }

// The score that has these order bits, which are not 0.
__device__ __forceinline__ float score_of_order(uint32_t order) {
  return __uint_as_float(order ^ (~static_cast<uint32_t>(static_cast<int32_t>(order) >> 31) | 0x80000000u));
}

__device__ __forceinline__ uint32_t best_of(const uint4& four) { return max(max(four.x, four.y), max(four.z, four.w)); }
// The lowest less 1, so that 0 (no number) counts as the highest.
__device__ __forceinline__ uint32_t least_of(const uint4& four) {
  return min(min(four.x - 1u, four.y - 1u), min(four.z - 1u, four.w - 1u));
}

// Values by their distance from the highest of a sample, best first; what lies outside is in the first or the last bin.
struct ValueMap {
  float high;
  float width;  // of a bin and a trifle
  float scale;  // 0 (all alike, or too far apart to subtract): everything is in the first bin

  __device__ __forceinline__ ValueMap(float highest, float lowest) : high(highest) {
    const float range = high - lowest;
    const bool told = range > 1e-30f && range < 3e38f;
    scale = told ? __fdividef(kBins - 0.1f, range) : 0.0f;
    width = range * (1.000002f / (kBins - 0.1f));
  }
  // NaN (infinity x 0) and what is negative become 0.
  __device__ __forceinline__ uint32_t bin_of(float score) const { return min(__float2uint_rz((high - score) * scale), kBins - 1u); }
  __device__ __forceinline__ bool tells(uint32_t bin) const { return scale != 0.0f && bin < kBins - 1; }
  // What every score of bins [0, bin] reaches, where tells(bin): the edge less two parts in a million of the distance, as bins were
  // told by other roundings, and two units in the last place of `high`.
  __device__ __forceinline__ float end_of(uint32_t bin) const {
    return high - __fmaf_rn(static_cast<float>(bin + 1), width, fabsf(high) * 2.4e-7f);
  }
};
// Scores from the floor upwards, best first, to twice as far as the sample's highest and beyond. Bins widen with the distance from
// the floor, where the k-th lies: eight octaves of 16, so that a long way up costs it little.
struct ScoreMap {
  float floor;
  float scale;

  __device__ __forceinline__ ScoreMap(float high, float lowest) : floor(lowest) {
    const float range = 2.0f * (high - floor);
    scale = range > 1e-30f && range < 3e38f ? __fdividef(1.0f, range) : 0.0f;
  }
  __device__ __forceinline__ uint32_t bin_of(float score) const {
    const float distance = __fmaf_rn(__saturatef((score - floor) * scale), 254.99f, 1.0f);  // [1, 256); NaN saturates to 0
    return kBins - 1 - ((__float_as_uint(distance) - __float_as_uint(1.0f)) >> 19);
  }
};

// As inclusive_over_warp(); the shuffle itself says where there is a lane so far below.
__device__ __forceinline__ uint32_t sum_up_to_lane(uint32_t value) {
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    asm volatile(
        "{\n.reg .pred there;\n.reg .u32 below;\n"
        "shfl.sync.up.b32 below|there, %0, %1, 0, 0xFFFFFFFF;\n@there add.u32 %0, %0, below;\n}"
        : "+r"(value)
        : "r"(step));
  }
  return value;
}

// Where the wanted-th best lies: by every warp for itself.
struct Crossing {
  uint32_t bin;
  uint32_t above;   // in better bins
  uint32_t inside;  // in this one
  uint32_t total;   // in all bins; the rest is meaningless where that is below `wanted`
};
__device__ __forceinline__ Crossing find_crossing(uint32_t bins, uint32_t wanted, int lane) {
  const uint4 own = load_vector(bins + 16 * static_cast<uint32_t>(lane));
  const uint32_t two = own.x + own.y;
  const uint32_t three = two + own.z;
  const uint32_t four = three + own.w;
  const uint32_t up_to = sum_up_to_lane(four);
  const uint32_t rest = wanted - (up_to - four);  // in the one lane that counts
  const bool past_first = own.x < rest;
  const bool past_second = two < rest;
  const bool past_third = three < rest;
  const uint32_t bin = past_third ? 3 : past_second ? 2 : past_first ? 1 : 0;
  const uint32_t above = past_third ? three : past_second ? two : past_first ? own.x : 0;
  const uint32_t inside = past_third ? own.w : past_second ? own.z : past_first ? own.y : own.x;
  const int at = max(0, __ffs(static_cast<int>(__ballot_sync(0xFFFFFFFFu, up_to >= wanted))) - 1);
  return {4 * static_cast<uint32_t>(at) + __shfl_sync(0xFFFFFFFFu, bin, at), __shfl_sync(0xFFFFFFFFu, up_to - four + above, at),
          __shfl_sync(0xFFFFFFFFu, inside, at), __shfl_sync(0xFFFFFFFFu, up_to, 31)};
}

// Of what the warps before this one counted, and of all.
struct Counted {
  uint32_t before;
  uint32_t total;
};
__device__ __forceinline__ Counted over_warps(uint32_t count_of, int warp, int lane) {
  const uint32_t theirs = lane < kWarps ? load_word(count_of + 4 * static_cast<uint32_t>(lane)) : 0;
  return {__reduce_add_sync(0xFFFFFFFFu, lane < warp ? theirs : 0u), __reduce_add_sync(0xFFFFFFFFu, theirs)};
}

// Places of a warp's flags, four a lane and round in four rounds, in the order round, lane, bit. While lanes are summed a byte
// holds the count of a round (at most 128).
struct FlagPlaces {
  uint32_t before;  // in lanes below, by round
  uint32_t all;     // in all lanes, by round

  __device__ __forceinline__ explicit FlagPlaces(uint32_t flags) {
    uint32_t counts = flags - ((flags >> 1) & 0x5555u);
    counts = (counts & 0x3333u) + ((counts >> 2) & 0x3333u);  // a nibble a round
    counts = (counts | counts << 8) & 0x00FF00FFu;
    counts = (counts | counts << 4) & 0x0F0F0F0Fu;  // a byte a round
    const uint32_t up_to = sum_up_to_lane(counts);
    all = __shfl_sync(0xFFFFFFFFu, up_to, 31);
    before = up_to - counts;
  }
  __device__ __forceinline__ uint32_t total() const { return __dp4a(all, 0x01010101u, 0u); }
  // The place of the first flag of a round in this lane.
  __device__ __forceinline__ uint32_t of_round(uint32_t round) const {
    return __dp4a(all & ((1u << (8 * round)) - 1u), 0x01010101u, 0u) + ((before >> (8 * round)) & 255u);
  }
};

// A warp's share of `count` items: [first, first + held).
struct Share {
  int first;
  int held;
};
__device__ __forceinline__ Share share_of_warp(int count, int warp) {
  const int each = (count + kWarps - 1) / kWarps;
  const int first = min(warp * each, count);
  return {first, min(each, count - first)};
}

// A row that cannot be bounded, or has no room: as select_topk does it. `memory` is shared and nobody's.
__device__ __noinline__ void give_whole_row(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, bool crowded, void* memory,
                                            uint32_t memory_bytes) {
  SelectShared& pool = select_shared();
  const int length = static_cast<int>(visible.length);
  read_part_slowly<kThreads>(args.scores + row * args.score_stride, 0, length, kPoolCapacity, args.k, 0);
  if (threadIdx.x == 0) {
    pool.nan_count = 0;  // who made the scores has counted them
    pool.absent_count = 0;
    if (crowded) pool.overflows += 1;
  }
  __syncthreads();
  give_row(args, visible, row, static_cast<uint32_t>(length), pool.threshold, static_cast<uint4*>(memory), memory_bytes);
}

// The floor where bins cannot tell: the k-th best of (maximum, last position) over all groups, with the pool for room; order_max
// becomes the highest maximum.
__device__ __noinline__ uint64_t exact_floor(const uint4* row_maxima, int vectors, int k) {
  uint64_t* const keys = select_keys();
  wait_for_copies();  // into the pool's room
  __syncthreads();
  uint32_t highest = 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < vectors; i += kThreads) {
    const uint4 four = load_maxima(true, row_maxima + i);
    const uint32_t order[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t last = static_cast<uint32_t>((4 * i + c) * kMaximaGroup + kMaximaGroup - 1);
      keys[4 * i + c] = order[c] == 0 ? 0 : static_cast<uint64_t>(order[c]) << 32 | ~last;
      highest = max(highest, order[c]);
    }
  }
  note_order_max(highest);
  __syncthreads();
  return block_kth_bound<kThreads>(share_of_run<kThreads>(4 * vectors), k, uint64_t{score_order_bits(kMinusInfinityBits)} << 32);
}
// The k-th key of a pool that the block has just written, of any keys >= floor_order; `highest` of what this thread wrote.
__device__ __noinline__ uint64_t exact_bound(int count, int k, uint32_t highest, uint32_t floor_order) {
  note_order_max(highest);
  __syncthreads();
  return count <= k ? 1 : block_kth_bound<kThreads>(share_of_run<kThreads>(count), k, static_cast<uint64_t>(floor_order) << 32);
}
// Of the warp's keys, which ascend by position, those that reach the bound. Returns what write_member says of absent pages.
__device__ __noinline__ uint32_t give_keys(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, const uint64_t* keys,
                                           uint32_t count, uint64_t bound, uint32_t members_of, int warp, int lane) {
  const auto members_from = [&](uint32_t first) {
    const uint32_t i = first + static_cast<uint32_t>(lane);
    return __ballot_sync(0xFFFFFFFFu, i < count && keys[i] >= bound);
  };
  uint32_t members = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < count; first += 32) members += static_cast<uint32_t>(__popc(members_from(first)));
  if (lane == 0) store_word(members_of + 4 * static_cast<uint32_t>(warp), members);
  __syncthreads();
  uint32_t before = over_warps(members_of, warp, lane).before;
  uint32_t absent = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < count; first += 32) {
    const uint32_t mask = members_from(first);
    if ((mask >> lane & 1u) != 0) {
      const uint64_t key = keys[first + static_cast<uint32_t>(lane)];
      const uint32_t place = before + static_cast<uint32_t>(__popc(mask & lanes_below()));
      write_member(args, visible, row, place, position_of_key(key), score_of_order(order_bits_of_key(key)), &absent);
    }
    before += static_cast<uint32_t>(__popc(mask));
  }
  return absent;
}

// A score that reaches the floor, and its bin (kBins: none) with how many others the bin held before it.
struct Item {
  uint32_t at;
  float score;
  uint32_t bin;
  uint32_t rank;
};

// Division by what the host knows, of numbers below 2^31.
struct Divider {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  explicit Divider(uint32_t by) : divisor(by) {
    while ((uint64_t{1} << shift) < by) ++shift;
    multiplier = static_cast<uint32_t>((uint64_t{1} << (31 + shift)) / by + 1);
  }
  __device__ __forceinline__ uint32_t quotient(uint32_t number) const { return __umulhi(2 * number, multiplier) >> shift; }
};

// kBlocks share a multiprocessor. kWhole: rows have at most kWholeEntries entries.
template <int kBlocks, bool kWhole>
__global__ void __launch_bounds__(kThreads, kBlocks)
    select_by_maxima_kernel(const __grid_constant__ SelectTopkArgs args, const __grid_constant__ GroupMaxima maxima,
                            const __grid_constant__ Divider slots_per_page) {
  using Shared = MaximaShared<kWhole>;
  SelectShared& pool = select_shared();
  Shared& shared = maxima_shared<kWhole>();
  uint64_t* const keys = select_keys();
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);  // which the compiler then takes for uniform
  int lane = static_cast<int>(threadIdx.x) & 31;
  const int row = static_cast<int>(blockIdx.x);
  const int k = args.k;

  block_begin<kThreads>();
  if (threadIdx.x < 2 * kBins / 4) reinterpret_cast<uint4*>(shared.value_bins)[threadIdx.x] = uint4{0, 0, 0, 0};
  if (threadIdx.x < kSelectFinalists) shared.finalists[threadIdx.x] = 0;
  // Before the wait: the scores' maker lets this kernel start once it has waited itself, and does not write lengths or pages.
  const VisibleRow visible = visible_row(args, row);
  const int length = static_cast<int>(visible.length);
  const int vectors = (length + kVectorEntries - 1) / kVectorEntries;  // of maxima
  const int row_groups = (length + kMaximaGroup - 1) / kMaximaGroup;
  const Share share = share_of_warp(vectors, warp);
  const float* const scores = args.scores + row * args.score_stride;
  const uint4* const row_maxima = reinterpret_cast<const uint4*>(maxima.orders + row * maxima.stride);
  const uint4* const lane_maxima = row_maxima + share.first + lane;
  const uint2* const lane_pair = reinterpret_cast<const uint2*>(row_maxima + share.first) + lane;  // of a whole row
  // The same for every warp: runs of four vectors in the middle of each eighth of the row.
  const uint4* lane_sample = row_maxima + max(min(((lane / 4) * vectors + vectors / 2) / 8 + (lane & 3), vectors - 1), 0);
  const float4* score_vectors = reinterpret_cast<const float4*>(scores);
  if (kWhole) score_vectors += kWarpScores / 4 * warp + lane;
  uint32_t here = shared_address(&shared);
  uint32_t kept =
      shared_address(&pool) + static_cast<uint32_t>(kKeptAt) + 4 * static_cast<uint32_t>(kWarpScores * warp);  // the warp's scores
  uint32_t items = shared_address(shared.items[warp]);
  int32_t* positions_out = args.positions + row * args.out_stride;
  int32_t* slots_out = args.slots == nullptr ? nullptr : args.slots + row * args.out_stride;
  // Worked out once, and before the wait.
  asm volatile("" : "+r"(lane), "+r"(here), "+r"(kept), "+r"(items), "+l"(positions_out), "+l"(slots_out));
  const uint32_t value_bins = here + offsetof(Shared, value_bins);
  const uint32_t score_bins = here + offsetof(Shared, score_bins);
  const uint32_t groups = here + offsetof(Shared, groups);
  const auto give_whole = [&](bool crowded) {
    wait_for_copies();  // into the room for keys
    give_whole_row(args, visible, row, crowded, shared.items, static_cast<uint32_t>(sizeof(shared.items) + sizeof(shared.groups)));
  };
  const auto maxima_at = [&](int place) {  // of the share and lane; zeros where there is none
    return load_maxima(place + lane < share.held, lane_maxima + place);
  };
  // Of a whole row: the warp's scores, each round 128 of them.
  const auto copy_whole = [&] {
    int left = 4 * row_groups - kWarpScores / 4 * warp - lane;
    asm volatile("" : "+r"(left));  // or what is told here would be kept for the next time
    const uint32_t first = kept + kept_at(4 * static_cast<uint32_t>(lane));
#pragma unroll
    for (uint32_t r = 0; r < kQuadGroups; ++r) {  // kept_at(4 * lane + 128 * r) in fewer steps
      copy_scores(32 * static_cast<int>(r) < left, (first ^ (r % 2 * 64)) + 512 * r, score_vectors + 32 * r);
    }
  };
  if (kWhole && lane / 2 < share.held) prefetch(lane_pair);
  if (!kWhole && lane < share.held) prefetch(lane_maxima);
  if (vectors > 0) prefetch(lane_sample);
  if (kWhole && kWarpGroups * warp + lane / 4 < row_groups) prefetch(score_vectors);
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (length == 0) return give_whole(false);

  // Each lane's maxima become a few values, of disjoint groups: 1,024 of a whole row, else 2,048 where it is long enough.
  uint32_t value[kValuesOfLane] = {0, 0, 0, 0};
  uint4 held[kMaximaRounds];  // the first maxima of the lane
  const uint4 sampled = load_maxima(true, lane_sample);
  uint32_t sample_high = 0;
  uint32_t sample_low = 0;
  if constexpr (kWhole) {
    const uint2 two = load_maxima(lane / 2 < share.held, lane_pair);
    __syncthreads();  // every warp's maxima are asked for before the first scores: they would wait behind these
    copy_whole();
    // A branch between asking and looking: without one the compiler asks for scores only behind all that the maxima need.
    if (4 * vectors < k) return give_whole(false);
    value[0] = two.x;
    value[1] = two.y;
    sample_high = best_of(sampled);
    sample_low = least_of(sampled);
  } else {
#pragma unroll
    for (int j = 0; j < kMaximaRounds; ++j) held[j] = maxima_at(32 * j);
    sample_high = best_of(sampled);
    if (share.held <= 32) {
      sample_low = least_of(sampled);
      value[0] = held[0].x;
      value[1] = held[0].y;
      value[2] = held[0].z;
      value[3] = held[0].w;
    } else if (share.held <= 64) {
      sample_low = least_of(sampled);
      value[0] = max(held[0].x, held[0].y);
      value[1] = max(held[0].z, held[0].w);
      value[2] = max(held[1].x, held[1].y);
      value[3] = max(held[1].z, held[1].w);
    } else {
#pragma unroll
      for (int j = 0; j < kMaximaRounds; ++j) value[j] = best_of(held[j]);
#pragma unroll 1
      for (int base = 32 * kMaximaRounds; base < share.held; base += 32 * kMaximaRounds) {
#pragma unroll
        for (int j = 0; j < kMaximaRounds; ++j) value[j] = max(value[j], best_of(maxima_at(base + 32 * j)));
        sample_high = max(sample_high, best_of(load_maxima(true, lane_sample + base / (8 * kMaximaRounds))));
      }
      sample_low = sample_high - 1u;
    }
    static_assert(kMaximaRounds == kValuesOfLane, "a value a round");
  }
  sample_high = __reduce_max_sync(0xFFFFFFFFu, sample_high);
  sample_low = __reduce_min_sync(0xFFFFFFFFu, sample_low) + 1u;
  const ValueMap value_map(score_of_order(sample_high), score_of_order(sample_low));
#pragma unroll
  for (int i = 0; i < (kWhole ? 2 : kValuesOfLane); ++i) {
    count_in(value[i] != 0, value_bins + 4 * value_map.bin_of(score_of_order(value[i])));
  }
  __syncthreads();

  // The floor, which at least k scores reach.
  const Crossing at_floor = find_crossing(value_bins, static_cast<uint32_t>(k), lane);
  if (at_floor.total < static_cast<uint32_t>(k)) return give_whole(false);
  float floor = value_map.end_of(at_floor.bin);
  float high = value_map.high;
  uint64_t floor_key = 0;  // where scores that equal the floor are told by their positions
  const bool told = at_floor.above + at_floor.inside <= static_cast<uint32_t>(k + max(k / 4, 64)) && value_map.tells(at_floor.bin);
  if (!told) {
    if (4 * vectors > kPoolCapacity) return give_whole(true);
    floor_key = exact_floor(row_maxima, vectors, k);
    floor = score_of_order(order_bits_of_key(floor_key));
    high = score_of_order(pool.order_max);
    if (kWhole) copy_whole();
  }
  const ScoreMap score_map(high, floor);

  // The groups that reach it: each warp's own where none has more than it reads at once, else dealt out evenly.
  Share mine{kWarpGroups * warp, min(max(row_groups - kWarpGroups * warp, 0), kWarpGroups)};
  if constexpr (!kWhole) {
    const uint32_t floor_order = order_bits_of(floor);
    const auto maxima_flags = [&](int base) {
      uint32_t flags = 0;
#pragma unroll
      for (int j = 0; j < kMaximaRounds; ++j) {
        const uint4 maximum = base == 0 ? held[j] : maxima_at(base + 32 * j);
        flags |= (maximum.x >= floor_order ? 1u << (4 * j) : 0u) | (maximum.y >= floor_order ? 2u << (4 * j) : 0u) |
                 (maximum.z >= floor_order ? 4u << (4 * j) : 0u) | (maximum.w >= floor_order ? 8u << (4 * j) : 0u);
      }
      return flags;
    };
    const uint32_t held_flags = maxima_flags(0);
    uint32_t found = __reduce_add_sync(0xFFFFFFFFu, static_cast<uint32_t>(__popc(held_flags)));
#pragma unroll 1
    for (int base = 32 * kMaximaRounds; base < share.held; base += 32 * kMaximaRounds) {
      found += __reduce_add_sync(0xFFFFFFFFu, static_cast<uint32_t>(__popc(maxima_flags(base))));
    }
    if (lane == 0) shared.groups_of[warp] = found;
    __syncthreads();
    mine.held = static_cast<int>(found);
    const uint32_t groups_of = here + offsetof(Shared, groups_of);
    const bool dealt = __reduce_max_sync(0xFFFFFFFFu, load_word(groups_of + 4 * static_cast<uint32_t>(lane & (kWarps - 1)))) > kWarpGroups;
    uint32_t to = static_cast<uint32_t>(mine.first);
    if (dealt) {
      const Counted counted = over_warps(groups_of, warp, lane);
      if (counted.total > kGroupsMax) return give_whole(true);
      mine = share_of_warp(static_cast<int>(counted.total), warp);
      to = counted.before;
    }
#pragma unroll 1
    for (int base = 0; base < share.held; base += 32 * kMaximaRounds) {
      const uint32_t flags = base == 0 ? held_flags : maxima_flags(base);
      const FlagPlaces places(flags);
#pragma unroll
      for (uint32_t j = 0; j < kMaximaRounds; ++j) {
        uint32_t next = groups + 2 * (to + places.of_round(j));
        const uint32_t group = static_cast<uint32_t>(4 * (share.first + base + 32 * static_cast<int>(j) + lane));
#pragma unroll
        for (uint32_t c = 0; c < 4; ++c) {
          if ((flags >> (4 * j + c) & 1u) != 0) {
            store_short(next, group + c);
            next += 2;
          }
        }
      }
      to += places.total();
    }
    if (dealt) __syncthreads();
    __syncwarp();
  }

  // Scores of the warp's groups, a stretch of them at once, 32 in a row a lane. An item is the number of a score among them.
  const auto group_at = [&](uint32_t place) {
    return kWhole ? static_cast<uint32_t>(mine.first) + place : load_short(groups + 2 * (static_cast<uint32_t>(mine.first) + place));
  };
  const auto position_of = [&](uint32_t item) {
    return kWhole ? static_cast<uint32_t>(kWarpScores * warp) + item : group_at(item / kMaximaGroup) * kMaximaGroup + item % kMaximaGroup;
  };
  // Items from here on lie past the row's end, or in no group.
  int item_end = length - kWarpScores * warp;
  if (!kWhole) {
    const int last_end = kMaximaGroup * (static_cast<int>(group_at(static_cast<uint32_t>(max(mine.held - 1, 0)))) + 1);
    item_end = kMaximaGroup * mine.held - max(0, last_end - length);
  }
  // Without scores that equal the floor and lie too late.
  const auto without_later_equals = [&](uint32_t flags, int first_item) {
#pragma unroll 1
    for (uint32_t rest = flags; rest != 0; rest &= rest - 1) {
      const uint32_t bit = static_cast<uint32_t>(__ffs(static_cast<int>(rest))) - 1;
      const uint32_t at = position_of(static_cast<uint32_t>(first_item) + bit);
      if (rank_key_of(scores[at], at) < floor_key) flags &= ~(1u << bit);
    }
    return flags;
  };
  uint32_t count = 0;  // of the warp's items
#pragma unroll 1
  for (int stretch = 0; stretch < mine.held; stretch += kWarpGroups) {
    if constexpr (!kWhole) {
      const int quad_first = stretch + kQuadGroups * (lane / 4);  // four lanes copy eight groups, a quarter of each a lane
#pragma unroll
      for (int g = 0; g < kQuadGroups; ++g) {
        const uint32_t group = group_at(static_cast<uint32_t>(quad_first + g));
        const uint32_t item = static_cast<uint32_t>(kMaximaGroup * (kQuadGroups * (lane / 4) + g) + 4 * (lane & 3));
        copy_scores(quad_first + g < mine.held, kept + kept_at(item), score_vectors + kMaximaGroup / 4 * group + (lane & 3));
      }
    }
    wait_for_copies();
    __syncwarp();
    const uint32_t own_kept = kept + kept_at(32 * static_cast<uint32_t>(lane));
    uint32_t flags = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 four = load_kept(own_kept ^ (16 * static_cast<uint32_t>(j)));
      flags |= (four.x >= floor ? 1u << (4 * j) : 0u) | (four.y >= floor ? 2u << (4 * j) : 0u) | (four.z >= floor ? 4u << (4 * j) : 0u) |
               (four.w >= floor ? 8u << (4 * j) : 0u);
    }
    const int first_item = kMaximaGroup * stretch + 32 * lane;
    flags &= __funnelshift_rc(0xFFFFFFFFu, 0, static_cast<uint32_t>(32 - min(max(item_end - first_item, 0), 32)));
    if (!told) flags = without_later_equals(flags, first_item);
    const uint32_t own = static_cast<uint32_t>(__popc(flags));
    uint32_t to = count + sum_up_to_lane(own);
    count += __reduce_add_sync(0xFFFFFFFFu, own);
    while (flags != 0) {  // from the last down
      const int bit = 31 - __clz(static_cast<int>(flags));
      flags ^= 1u << bit;
      --to;
      if (kWhole || to < Shared::kItemsMax) store_short(items + 2 * to, static_cast<uint32_t>(first_item + bit));
    }
    __syncwarp();
    if (kWhole) break;
  }
  if (lane == 0) store_word(here + offsetof(Shared, items_of) + 4 * static_cast<uint32_t>(warp), count);

  // Items are binned, those that lanes hold on to, two of a lane at a time. Their pages are under way until members are given out.
  Item item[kHeldItems];
  int32_t page[kHeldItems];
#pragma unroll
  for (int i = 0; i < kHeldItems; ++i) item[i] = Item{0, 0.0f, kBins, 0};
#pragma unroll
  for (int pair = 0; pair < kHeldItems; pair += 2) {
    if (32 * pair >= static_cast<int>(count)) continue;
    uint32_t number[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) number[i] = load_short(items + 2 * min(static_cast<uint32_t>(32 * (pair + i) + lane), count - 1));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Item& own = item[pair + i];
      own.at = position_of(number[i]);
      own.score = mine.held <= kWarpGroups ? __uint_as_float(load_word(kept + kept_at(number[i]))) : scores[own.at];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Item& own = item[pair + i];
      const bool there = 32 * (pair + i) + lane < static_cast<int>(count);
      const uint32_t bin = score_map.bin_of(own.score);
      own.rank = count_up(there, score_bins + 4 * bin);
      if (there) own.bin = bin;
      if (slots_out != nullptr) page[pair + i] = __ldg(visible.pages + slots_per_page.quotient(own.at));
    }
  }
  __syncthreads();

  // The k-th, and the members.
  const uint32_t most =
      __reduce_max_sync(0xFFFFFFFFu, load_word(here + offsetof(Shared, items_of) + 4 * static_cast<uint32_t>(lane & (kWarps - 1))));
  if (!kWhole && most > Shared::kItemsMax) return give_whole(true);
  const Crossing at_kth = find_crossing(score_bins, static_cast<uint32_t>(k), lane);
  uint32_t absent = 0;
  if (args.order == TopkOrder::kByPosition && most <= 32 * kHeldItems && at_kth.inside <= kSelectFinalists) {
    uint32_t surely = 0;
#pragma unroll
    for (int pair = 0; pair < kHeldItems; pair += 2) {
      if (32 * pair >= static_cast<int>(count)) continue;
#pragma unroll
      for (int i = pair; i < pair + 2; ++i) {
        surely += static_cast<uint32_t>(__popc(__ballot_sync(0xFFFFFFFFu, item[i].bin < at_kth.bin)));
        if (item[i].bin == at_kth.bin) shared.finalists[item[i].rank] = rank_key_of(item[i].score, item[i].at);
      }
    }
    if (lane == 0) store_word(here + offsetof(Shared, members_of) + 4 * static_cast<uint32_t>(warp), surely);
    __syncthreads();
    // Which finalists are members, a bit each, and which of these lie in the warps before.
    const uint64_t own = shared.finalists[lane];
    uint32_t better = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < at_kth.inside; first += 8) {
      const ulonglong2* const others = reinterpret_cast<const ulonglong2*>(shared.finalists + first);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const ulonglong2 two = others[i];
        better += (two.x > own ? 1 : 0) + (two.y > own ? 1 : 0);
      }
    }
    const uint32_t chosen = __ballot_sync(0xFFFFFFFFu, own != 0 && better < static_cast<uint32_t>(k) - at_kth.above);
    const uint32_t first_position = kWhole || mine.held > 0 ? position_of(0) : 0;
    const uint32_t earlier = chosen & __ballot_sync(0xFFFFFFFFu, position_of_key(own) < first_position);
    uint32_t before = over_warps(here + offsetof(Shared, members_of), warp, lane).before + static_cast<uint32_t>(__popc(earlier));
#pragma unroll
    for (int pair = 0; pair < kHeldItems; pair += 2) {
      if (32 * pair >= static_cast<int>(count)) continue;
#pragma unroll
      for (int i = pair; i < pair + 2; ++i) {
        const bool in = item[i].bin < at_kth.bin + (chosen >> (item[i].rank & 31u) & 1u);
        const uint32_t members = __ballot_sync(0xFFFFFFFFu, in);
        if (in) {
          const uint32_t place = before + static_cast<uint32_t>(__popc(members & ((1u << lane) - 1u)));
          positions_out[place] = static_cast<int32_t>(visible.base + item[i].at);
          if (args.out_scores != nullptr) args.out_scores[row * args.out_stride + place] = item[i].score + 0.0f;  // -0 is +0
          if (slots_out != nullptr) {
            const uint32_t column = slots_per_page.quotient(item[i].at);
            const uint32_t slot = (static_cast<uint32_t>(page[i]) - column) * slots_per_page.divisor + item[i].at;
            const bool named = page[i] >= 0 && page[i] < args.page_count;
            slots_out[place] = named ? static_cast<int32_t>(slot) : kNoEntry;
            absent += named ? 0 : 1;
          }
        }
        before += static_cast<uint32_t>(__popc(members));
      }
    }
  } else {
    // All items become keys in one pool.
    const Counted counted = over_warps(here + offsetof(Shared, items_of), warp, lane);
    if (counted.total > kPoolCapacity) return give_whole(true);
    uint64_t* const own_keys = keys + counted.before;
    uint32_t highest = 0;
#pragma unroll 1
    for (uint32_t i = static_cast<uint32_t>(lane); i < count; i += 32) {
      const uint32_t at = position_of(load_short(items + 2 * i));
      own_keys[i] = rank_key_of(scores[at], at);
      highest = max(highest, order_bits_of_key(own_keys[i]));
    }
    const uint64_t bound = exact_bound(static_cast<int>(counted.total), k, highest, order_bits_of(floor));
    if (args.order == TopkOrder::kByRank) {
      absent = give_by_rank(args, visible, row, static_cast<int>(counted.total), k, bound);
    } else {
      absent = give_keys(args, visible, row, own_keys, count, bound, here + offsetof(Shared, members_of), warp, lane);
    }
  }
  give_padding<kThreads>(args, row, k);
  report_absent_slots(args, absent);
  if (threadIdx.x == 0) report_status(args.report, visible.status);
}

template <int kBlocks, bool kWhole>
absl::Status launch_shape(const SelectTopkArgs& args, const GroupMaxima& maxima, void* stream) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.rows));
  shape.block = dim3(kThreads);
  shape.shared_bytes = kSharedBytes<kWhole>;
  const Divider slots_per_page(static_cast<uint32_t>(std::max(args.slots_per_page, 1)));
  return launch("select_by_maxima", select_by_maxima_kernel<kBlocks, kWhole>, shape, static_cast<cudaStream_t>(stream), args, maxima,
                slots_per_page);
}

}  // namespace

absl::Status select_by_maxima_cuda(const SelectTopkArgs& args, const GroupMaxima& maxima, void* stream) {
  if (absl::Status status = check_select_topk(args); !status.ok()) return status;
  const auto refuse = [](absl::string_view field, int64_t value, absl::string_view limit) {
    return absl::InvalidArgumentError(absl::StrCat("select_by_maxima: ", field, " is ", value, ", must be ", limit));
  };
  if (args.k > kMaximaTopkMax) return refuse("k", args.k, absl::StrCat("at most ", kMaximaTopkMax));
  if (args.length_max > kMaximaLengthMax) return refuse("length_max", args.length_max, absl::StrCat("at most ", kMaximaLengthMax));
  if (args.rows == 0) return absl::OkStatus();
  const int64_t stride_least = round_up(div_ceil(args.length_max, kMaximaGroup), 4);
  if (maxima.stride < stride_least || maxima.stride % 4 != 0) {
    return refuse("maxima.stride", maxima.stride, absl::StrCat("a multiple of 4, >= ", stride_least));
  }
  const int64_t maxima_at = static_cast<int64_t>(reinterpret_cast<uintptr_t>(maxima.orders));
  const int64_t scores_at = static_cast<int64_t>(reinterpret_cast<uintptr_t>(args.scores));
  if (maxima_at == 0 || maxima_at % 16 != 0) return refuse("maxima.orders", maxima_at, "device memory on a multiple of 16 bytes");
  if (scores_at % 16 != 0) return refuse("scores", scores_at, "on a multiple of 16 bytes");
  if (args.score_stride % kMaximaGroup != 0) return refuse("score_stride", args.score_stride, "a multiple of 16 floats");
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) return facts.status();
  // 12.0 has room for one of these.
  if (facts->major == 12) return launch_shape<1, false>(args, maxima, stream);
  if (args.rows > facts->multiprocessors) return launch_shape<2, false>(args, maxima, stream);
  if (args.length_max > kWholeEntries) return launch_shape<1, false>(args, maxima, stream);
  return launch_shape<1, true>(args, maxima, stream);
}

}  // namespace needle
