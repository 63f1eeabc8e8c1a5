// select_topk from scores and the maxima of their groups: a block a row, everything in the order of positions.
//
// A lane boils its share of the maxima down to four values; they are binned by their distance from the largest, and where the
// k-th falls gives the floor. Groups that reach it are listed, their scores read, those that reach it put into the pool as
// rank keys and binned likewise; the bin of the k-th key is resolved exactly, and members go out where a count of those
// before them says.
//
// What must stay true:
//  1. A bin is a monotone function of a score, so whatever lies in a better bin is greater. Rounding may move a bin's edge and
//     never the order.
//  2. At least k scores reach the floor. Where one bin holds too many values to tell (equal scores, an outlier that stretches
//     the bins), the floor is found exactly among (maximum, last position) of the groups: k groups reach that.
//  3. Warps have contiguous shares, and lanes of a warp neighbouring items, round after round; list and pool ascend by position.
//  4. What does not fit (list, pool) and rows with fewer than k numbers among their maxima are read whole instead.
//  5. One barrier after another is what this kernel's time is made of: every warp works out for itself what all need.
#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "kernels/device_report.cuh"
#include "kernels/hopper.cuh"
#include "kernels/launch.cuh"
#include "kernels/select_by_maxima.h"
#include "kernels/select_topk_block.cuh"
#include "kernels/select_topk_row.cuh"

namespace needle {
namespace {

constexpr int kThreads = kTailThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kValuesOfLane = 4;                   // what a lane's maxima are boiled down to
constexpr int kCoarseBins = 256;                   // of those values: a lane has eight
constexpr int kFineBins = 1024;                    // of the pool: 32 coarse ones of 32
constexpr int kPoolCapacity = kMaximaGroup * 512;  // k groups of equal scores at k = 512
constexpr int kGroupsMax = 4096;
constexpr int kVectorEntries = 4 * kMaximaGroup;  // scores that 16 bytes of maxima stand for
constexpr int kMaximaRounds = 4;                  // 16-byte vectors of maxima that a lane has under way
constexpr int kQuadGroups = 8;                    // neighbours on the list whose scores four lanes read, a quarter of each a lane
constexpr int kWarpGroups = 8 * kQuadGroups;

struct alignas(16) MaximaShared {
  uint32_t bins[kCoarseBins];
  uint32_t highest[kWarps];
  uint32_t lowest[kWarps];
  uint32_t groups_of[kWarps];
  uint32_t keys_of[kWarps];
  uint32_t groups[kGroupsMax + kWarpGroups];  // lanes look past the end
};
constexpr size_t kSharedBytes = sizeof(SelectShared) + size_t{kPoolCapacity} * 8 + sizeof(MaximaShared);
static_assert(2 * (kSharedBytes + 1024) <= 227 * 1024, "two blocks share a multiprocessor of 9.0");
static_assert(kSharedBytes <= 99 * 1024, "a block of 12.0");
static_assert(kFineBins <= kSelectBins && kFineBins / 32 <= kSelectCoarseBins, "the pool's bins");

__device__ __forceinline__ MaximaShared& maxima_shared() { return *reinterpret_cast<MaximaShared*>(select_keys() + kPoolCapacity); }

// Adds one where `counts`, without the branch that the compiler would put around an atomic.
__device__ __forceinline__ void count_in(uint32_t bins, int bin, bool counts) {
  asm volatile("{\n.reg .pred counts;\nsetp.ne.u32 counts, %1, 0;\n@counts red.relaxed.cta.shared::cta.add.u32 [%0], 1;\n}" ::"r"(
                   bins + 4 * static_cast<uint32_t>(bin)),
               "r"(counts ? 1u : 0u)
               : "memory");
}

// Shared memory by its 32-bit address, worked out once: the compiler would begin from the block's place in its cluster each time.
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
// Scores that are asked for before the next __syncwarp(): the compiler would ask for each only where it is looked at.
__device__ __forceinline__ float4 load_scores(const float4* from) {
  float4 four;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "l"(from) : "memory");
  return four;
}

// The score that has these order bits, which are not 0.
__device__ __forceinline__ float score_of_order(uint32_t order) {
  return __uint_as_float(order ^ (~static_cast<uint32_t>(static_cast<int32_t>(order) >> 31) | 0x80000000u));
}

// Best first: bin 0 holds the highest. Scale 0 (all alike, or too far apart to subtract) puts everything there.
template <int kBins>
struct BinMap {
  float high;
  float range;
  float scale;

  __device__ __forceinline__ BinMap(uint32_t highest, uint32_t lowest)
      : high(score_of_order(highest)), range(high - score_of_order(lowest)) {
    scale = range > 1e-30f && range < 3e38f ? __fdividef(kBins - 0.1f, range) : 0.0f;
  }
  // In range without being cut: (high - score) x scale is at most kBins - 0.1, give or take three roundings. NaN (infinity x 0
  // where the scale is 0): 0.
  __device__ __forceinline__ int bin_of(float score) const { return __float2int_rz((high - score) * scale); }
  // Order bits that every score of bins [0, bin] reaches: the edge less two parts in a million of the distance, as bins were
  // told by other roundings, and two units in the last place of the difference.
  __device__ __forceinline__ uint32_t order_at_end_of(uint32_t bin) const {
    if (scale == 0.0f) return 0;
    const float distance = static_cast<float>(bin + 1) * 1.000002f * (range * (1.0f / (kBins - 0.1f)));
    return max(order_bits_of(high - distance), 2u) - 2u;
  }
};

// Where the wanted-th best lies: by every warp for itself.
struct Crossing {
  uint32_t bin;
  uint32_t above;   // in better bins
  uint32_t inside;  // in this one
  uint32_t total;   // in all bins; the rest is meaningless where that is below `wanted`
};
// Of kFineBins bins and the sums of 32 each.
__device__ __forceinline__ Crossing find_crossing(const uint32_t* bins, const uint32_t* coarse, uint32_t wanted) {
  const uint32_t lane = threadIdx.x & 31u;
  const uint32_t own_coarse = coarse[lane];
  const uint32_t up_to = inclusive_over_warp(own_coarse);
  const int at = max(0, __ffs(static_cast<int>(__ballot_sync(0xFFFFFFFFu, up_to >= wanted))) - 1);
  const uint32_t own = bins[32 * at + static_cast<int>(lane)];
  const uint32_t with_own = __shfl_sync(0xFFFFFFFFu, up_to - own_coarse, at) + inclusive_over_warp(own);
  const int bin = max(0, __ffs(static_cast<int>(__ballot_sync(0xFFFFFFFFu, with_own >= wanted))) - 1);
  return {static_cast<uint32_t>(32 * at + bin), __shfl_sync(0xFFFFFFFFu, with_own - own, bin), __shfl_sync(0xFFFFFFFFu, own, bin),
          __shfl_sync(0xFFFFFFFFu, up_to, 31)};
}
// Of kCoarseBins bins, without sums.
__device__ __forceinline__ Crossing find_crossing(const uint32_t* bins, uint32_t wanted) {
  const uint32_t lane = threadIdx.x & 31u;
  const uint4 first = reinterpret_cast<const uint4*>(bins)[2 * lane];
  const uint4 second = reinterpret_cast<const uint4*>(bins)[2 * lane + 1];
  const uint32_t own[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  uint32_t sum = 0;
#pragma unroll
  for (int b = 0; b < 8; ++b) sum += own[b];
  const uint32_t up_to = inclusive_over_warp(sum);
  uint32_t above = up_to - sum;
  uint32_t bin = 8 * lane;
  uint32_t inside = own[0];
#pragma unroll
  for (int b = 1; b < 8; ++b) {
    if (above + inside < wanted) {
      above += inside;
      inside = own[b];
      bin = 8 * lane + static_cast<uint32_t>(b);
    }
  }
  const int at = max(0, __ffs(static_cast<int>(__ballot_sync(0xFFFFFFFFu, up_to >= wanted))) - 1);
  return {__shfl_sync(0xFFFFFFFFu, bin, at), __shfl_sync(0xFFFFFFFFu, above, at), __shfl_sync(0xFFFFFFFFu, inside, at),
          __shfl_sync(0xFFFFFFFFu, up_to, 31)};
}

// Of what the warps before this one counted, and of all.
struct Counted {
  uint32_t before;
  uint32_t total;
};
__device__ __forceinline__ Counted over_warps(const uint32_t* count_of, int warp) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const uint32_t theirs = lane < kWarps ? count_of[lane] : 0;
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
    const uint32_t up_to = inclusive_over_warp(counts);
    all = __shfl_sync(0xFFFFFFFFu, up_to, 31);
    before = up_to - counts;
  }
  __device__ __forceinline__ uint32_t total() const { return __dp4a(all, 0x01010101u, 0u); }
  // The place of the first flag of a round in this lane.
  __device__ __forceinline__ uint32_t of_round(uint32_t round) const {
    return __dp4a(all & ((1u << (8 * round)) - 1u), 0x01010101u, 0u) + ((before >> (8 * round)) & 255u);
  }
};

// A quad's flags of eight groups become each lane's flags of two, in the order of positions. Before: bits 4 g to 4 g + 3 are
// this lane's quarter of group g. After: the low half is group 2 x (the lane's place in the quad), the high half the next.
__device__ __forceinline__ uint32_t own_groups_of_quad(uint32_t flags) {
  const uint32_t part = threadIdx.x & 3u;
  // Bytes change places with lanes: byte i of lane j with byte j of lane i.
  uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, flags, 1);
  flags = __byte_perm(flags, other, (part & 1u) != 0 ? 0x3715 : 0x6240);
  other = __shfl_xor_sync(0xFFFFFFFFu, flags, 2);
  flags = __byte_perm(flags, other, (part & 2u) != 0 ? 0x3276 : 0x5410);
  const auto low_nibbles = [](uint32_t word) {
    word &= 0x0F0F0F0Fu;
    word = (word | word >> 4) & 0x00FF00FFu;
    return (word | word >> 8) & 0xFFFFu;
  };
  return low_nibbles(flags) | low_nibbles(flags >> 4) << 16;
}

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

// A row that cannot be bounded, or has no room: as select_topk does it.
__device__ __noinline__ void give_whole_row(const SelectTopkArgs& args, const VisibleRow& visible, int64_t row, bool crowded) {
  SelectShared& pool = select_shared();
  const int length = static_cast<int>(visible.length);
  read_part_slowly<kThreads>(args.scores + row * args.score_stride, 0, length, kPoolCapacity, args.k, 0);
  if (threadIdx.x == 0) {
    pool.nan_count = 0;  // who made the scores has counted them
    pool.absent_count = 0;
    if (crowded) pool.overflows += 1;
  }
  __syncthreads();
  MaximaShared& shared = maxima_shared();
  give_row(args, visible, row, static_cast<uint32_t>(length), pool.threshold, reinterpret_cast<uint4*>(shared.groups),
           static_cast<uint32_t>(sizeof(shared.groups)));
}

// The floor where bins cannot tell: the k-th best of (maximum, last position) over all groups, with the pool for room.
__device__ __noinline__ uint64_t exact_floor(const uint4* row_maxima, int vectors, int k, uint32_t highest, uint32_t lowest) {
  uint64_t* const keys = select_keys();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < vectors; i += kThreads) {
    const uint4 four = __ldg(row_maxima + i);
    const uint32_t order[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t last = static_cast<uint32_t>((4 * i + c) * kMaximaGroup + kMaximaGroup - 1);
      keys[4 * i + c] = order[c] == 0 ? 0 : static_cast<uint64_t>(order[c]) << 32 | ~last;
    }
  }
  if (threadIdx.x == 0) select_shared().order_max = highest;
  __syncthreads();
  return block_kth_bound<kThreads>(share_of_run<kThreads>(4 * vectors), k, static_cast<uint64_t>(lowest) << 32);
}
// The k-th key of the pool, of any keys: where a bin holds too many, or members are wanted by rank.
__device__ __noinline__ uint64_t exact_bound(int count, int k, uint32_t highest, uint32_t floor_order) {
  SelectShared& pool = select_shared();
  if (count <= k) return 1;
  __syncthreads();  // everybody has read the bins
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kSelectBins; i += kThreads) pool.bins[i] = 0;
  if (threadIdx.x == 0) pool.order_max = highest;
  __syncthreads();
  return block_kth_bound<kThreads>(share_of_run<kThreads>(count), k, static_cast<uint64_t>(floor_order) << 32);
}

// kBlocks share a multiprocessor, and with it its registers: what they have decides how many scores a lane asks for at once.
template <int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    select_by_maxima_kernel(const __grid_constant__ SelectTopkArgs args, const __grid_constant__ GroupMaxima maxima) {
  SelectShared& pool = select_shared();
  MaximaShared& shared = maxima_shared();
  uint64_t* const keys = select_keys();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int row = static_cast<int>(blockIdx.x);
  const int k = args.k;

  block_begin<kThreads>();
  if (threadIdx.x < kCoarseBins / 4) reinterpret_cast<uint4*>(shared.bins)[threadIdx.x] = uint4{0, 0, 0, 0};
  // Before the wait: the scores' maker lets this kernel start once it has waited itself, and does not write lengths or pages.
  const VisibleRow visible = visible_row(args, row);
  const int length = static_cast<int>(visible.length);
  const float* const scores = args.scores + row * args.score_stride;
  const float4* score_vectors = reinterpret_cast<const float4*>(scores) + (lane & 3);
  const int vectors = (length + kVectorEntries - 1) / kVectorEntries;  // of maxima
  const Share share = share_of_warp(vectors, warp);
  const uint4* row_maxima = reinterpret_cast<const uint4*>(maxima.orders + row * maxima.stride);
  const uint4* lane_maxima = row_maxima + share.first + lane;
  uint32_t list = shared_address(shared.groups);
  uint32_t bins = shared_address(pool.bins);
  uint32_t value_bins = shared_address(shared.bins);
  asm volatile("" : "+r"(list), "+r"(bins), "+r"(value_bins), "+l"(score_vectors), "+l"(lane_maxima));  // kept, not worked out again
  const auto maxima_at = [&](int place) {  // of the share and lane; zeros where there is none
    return place + lane < share.held ? __ldg(lane_maxima + place) : uint4{0, 0, 0, 0};
  };
  wait_for_previous_kernel();
  let_next_kernel_start();

  // Each lane's maxima become four values, of disjoint groups: 2,048 a block where the row is long enough.
  uint32_t value[kValuesOfLane];
  uint4 held[kMaximaRounds];  // the first maxima of the lane
#pragma unroll
  for (int j = 0; j < kMaximaRounds; ++j) held[j] = maxima_at(32 * j);
  if (share.held <= 32) {
    value[0] = held[0].x;
    value[1] = held[0].y;
    value[2] = held[0].z;
    value[3] = held[0].w;
  } else if (share.held <= 64) {
    value[0] = max(held[0].x, held[0].y);
    value[1] = max(held[0].z, held[0].w);
    value[2] = max(held[1].x, held[1].y);
    value[3] = max(held[1].z, held[1].w);
  } else {
    const auto best_of = [](const uint4& four) { return max(max(four.x, four.y), max(four.z, four.w)); };
#pragma unroll
    for (int j = 0; j < kMaximaRounds; ++j) value[j] = best_of(held[j]);
#pragma unroll 1
    for (int base = 32 * kMaximaRounds; base < share.held; base += 32 * kMaximaRounds) {
#pragma unroll
      for (int j = 0; j < kMaximaRounds; ++j) value[j] = max(value[j], best_of(maxima_at(base + 32 * j)));
    }
  }
  static_assert(kMaximaRounds == kValuesOfLane, "a value a round");
  uint32_t highest = max(max(value[0], value[1]), max(value[2], value[3]));
  // Less 1, so that 0 (no number) counts as the highest.
  uint32_t lowest = min(min(value[0] - 1u, value[1] - 1u), min(value[2] - 1u, value[3] - 1u));
  highest = __reduce_max_sync(0xFFFFFFFFu, highest);
  lowest = __reduce_min_sync(0xFFFFFFFFu, lowest);
  if (lane == 0) {
    shared.highest[warp] = highest;
    shared.lowest[warp] = lowest;
  }
  __syncthreads();
  highest = __reduce_max_sync(0xFFFFFFFFu, shared.highest[lane & (kWarps - 1)]);
  lowest = __reduce_min_sync(0xFFFFFFFFu, shared.lowest[lane & (kWarps - 1)]) + 1u;

  // The floor: a rank key that at least k scores reach.
  const BinMap<kCoarseBins> value_map(highest, lowest);
#pragma unroll
  for (int i = 0; i < kValuesOfLane; ++i) count_in(value_bins, value_map.bin_of(score_of_order(value[i])), value[i] != 0);
  __syncthreads();
  const Crossing at_floor = find_crossing(shared.bins, static_cast<uint32_t>(k));
  if (at_floor.total < static_cast<uint32_t>(k)) return give_whole_row(args, visible, row, false);
  const bool told = at_floor.above + at_floor.inside <= static_cast<uint32_t>(k + max(k / 4, 64));
  uint64_t floor = static_cast<uint64_t>(max(lowest, value_map.order_at_end_of(at_floor.bin))) << 32;
  if (!told) {
    if (4 * vectors > kPoolCapacity) return give_whole_row(args, visible, row, true);
    floor = exact_floor(row_maxima, vectors, k, highest, lowest);
  }
  const uint32_t floor_order = order_bits_of_key(floor);
  const uint32_t last_equal = position_of_key(floor);  // of scores that equal the floor's, those up to here are in

  // The list of groups that reach it.
  const auto maxima_flags = [&](int base) {
    uint32_t flags = 0;
#pragma unroll
    for (int j = 0; j < kMaximaRounds; ++j) {
      const uint4 four = base == 0 ? held[j] : maxima_at(base + 32 * j);
      flags |= (four.x >= floor_order ? 1u << (4 * j) : 0u) | (four.y >= floor_order ? 2u << (4 * j) : 0u) |
               (four.z >= floor_order ? 4u << (4 * j) : 0u) | (four.w >= floor_order ? 8u << (4 * j) : 0u);
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
  Counted counted = over_warps(shared.groups_of, warp);
  const int listed = static_cast<int>(counted.total);
  if (listed > kGroupsMax) return give_whole_row(args, visible, row, true);
  if (threadIdx.x == 0) pool.finalist_count = 0;
  uint32_t to = counted.before;
#pragma unroll 1
  for (int base = 0; base < share.held; base += 32 * kMaximaRounds) {
    const uint32_t flags = base == 0 ? held_flags : maxima_flags(base);
    const FlagPlaces places(flags);
#pragma unroll
    for (uint32_t j = 0; j < kMaximaRounds; ++j) {
      uint32_t next = list + 4 * (to + places.of_round(j));
      const uint32_t group = static_cast<uint32_t>(4 * (share.first + base + 32 * static_cast<int>(j) + lane));
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c) {
        if ((flags >> (4 * j + c) & 1u) != 0) {
          store_shared(next, group + c);
          next += 4;
        }
      }
    }
    to += places.total();
  }
  __syncthreads();

  // Their scores; the positions of what reaches the floor go to the pool, in order.
  const float floor_score = score_of_order(floor_order);
  const Share mine = share_of_warp(listed, warp);  // of the listed groups
  const int quad_first = kQuadGroups * (lane / 4);
  const uint32_t quad_list = list + 4 * static_cast<uint32_t>(mine.first + quad_first);
  // Of bit `bit` of this lane's own groups; `stretch` counts the warp's groups.
  const auto position_of = [&](int stretch, uint32_t bit) {
    const uint32_t place = static_cast<uint32_t>(stretch) + 2 * (static_cast<uint32_t>(lane) & 3u) + (bit >> 4);
    return load_shared(quad_list + 4 * place) * kMaximaGroup + (bit & 15u);
  };
  // In the row's last, unfinished group, and where scores are told by their position: without those that are out after all.
  const bool has_end = length % kMaximaGroup != 0 && mine.first + mine.held == listed;
  const auto within = [&](uint32_t flags, int stretch) {
    if (told && !has_end) return flags;
    const float score_after = score_of_order(floor_order + 1);
#pragma unroll 1
    for (uint32_t rest = flags; rest != 0; rest &= rest - 1) {
      const uint32_t bit = static_cast<uint32_t>(__ffs(static_cast<int>(rest))) - 1;
      const uint32_t at = position_of(stretch, bit);
      const bool in = at < static_cast<uint32_t>(length) && (at <= last_equal || scores[at] >= score_after);
      if (!in) flags &= ~(1u << bit);
    }
    __syncwarp();
    return flags;
  };
  // Flags of this lane's own groups. A quad without a group reads the row's first.
  const auto score_flags = [&](int stretch) {
    const int groups_left = mine.held - stretch - quad_first;
    constexpr int kAtOnce = kBlocks == 1 ? kQuadGroups : kQuadGroups / 2;
    uint32_t flags = 0;
#pragma unroll
    for (int half = 0; half < kQuadGroups; half += kAtOnce) {
      uint32_t group[kAtOnce];
#pragma unroll
      for (int g = 0; g < kAtOnce; ++g) group[g] = load_shared(quad_list + 4 * static_cast<uint32_t>(stretch + half + g));
      float4 four[kAtOnce];
#pragma unroll
      for (int g = 0; g < kAtOnce; ++g) four[g] = load_scores(score_vectors + 4 * (half + g < groups_left ? group[g] : 0));
      __syncwarp();  // all are asked for
#pragma unroll
      for (int g = 0; g < kAtOnce; ++g) {
        const float bar = half + g < groups_left ? floor_score : __uint_as_float(kNanScoreBits);
        const int bit = 4 * (half + g);
        flags |= (four[g].x >= bar ? 1u << bit : 0u) | (four[g].y >= bar ? 2u << bit : 0u) | (four[g].z >= bar ? 4u << bit : 0u) |
                 (four[g].w >= bar ? 8u << bit : 0u);
      }
    }
    return within(own_groups_of_quad(flags), stretch);
  };
  uint32_t first_flags = 0;
  found = 0;
#pragma unroll 1
  for (int stretch = 0; stretch < mine.held; stretch += kWarpGroups) {
    const uint32_t flags = score_flags(stretch);
    if (stretch == 0) first_flags = flags;
    found += __reduce_add_sync(0xFFFFFFFFu, static_cast<uint32_t>(__popc(flags)));
  }
  if (lane == 0) shared.keys_of[warp] = found;
  __syncthreads();
  counted = over_warps(shared.keys_of, warp);
  const int count = static_cast<int>(counted.total);
  if (count > kPoolCapacity) return give_whole_row(args, visible, row, true);
  to = counted.before;
#pragma unroll 1
  for (int stretch = 0; stretch < mine.held; stretch += kWarpGroups) {
    const uint32_t own_flags = stretch == 0 ? first_flags : score_flags(stretch);
    const uint32_t own = static_cast<uint32_t>(__popc(own_flags));
    const uint32_t up_to = inclusive_over_warp(own);
    uint64_t* next = keys + to + up_to - own;
#pragma unroll 1
    for (uint32_t flags = own_flags; flags != 0; flags &= flags - 1) {
      *next++ = position_of(stretch, static_cast<uint32_t>(__ffs(static_cast<int>(flags))) - 1);
    }
    __syncwarp();
    to += __shfl_sync(0xFFFFFFFFu, up_to, 31);
  }
  __syncthreads();

  // Positions become keys, which are binned: a lane may have found many, so the threads share them anew, neighbours each. Few
  // have more than the two that they hold on to.
  const BinMap<kFineBins> key_map(highest, floor_order);
  const int each = (count + kThreads - 1) / kThreads;
  const int first_key = static_cast<int>(threadIdx.x) * each;
  const int own_keys = max(0, min(each, count - first_key));
  const auto key_of = [&](int i, uint32_t* bin) {
    const uint32_t at = static_cast<uint32_t>(keys[first_key + i]);
    const float score = __ldg(scores + at);
    const uint64_t key = rank_key_of(score, at);
    *bin = static_cast<uint32_t>(key_map.bin_of(score));
    keys[first_key + i] = key;
    count_in(bins, static_cast<int>(*bin), true);
    count_in(bins + 4 * kSelectBins, static_cast<int>(*bin / 32), true);
    return key;
  };
  uint64_t held_key[2] = {0, 0};
  uint32_t held_bin[2] = {kFineBins, kFineBins};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i < own_keys) held_key[i] = key_of(i, &held_bin[i]);
  }
#pragma unroll 1
  for (int i = 2; i < own_keys; ++i) {
    uint32_t ignored;
    key_of(i, &ignored);
  }
  __syncthreads();

  // The k-th of the pool, and its members.
  static_assert(offsetof(SelectShared, coarse) == offsetof(SelectShared, bins) + 4 * kSelectBins, "sums follow bins");
  const Crossing at_kth = find_crossing(pool.bins, pool.coarse, static_cast<uint32_t>(k));
  const uint32_t need = static_cast<uint32_t>(k) - at_kth.above;  // of the crossing bin
  const bool few = at_kth.inside <= kSelectFinalists && args.order == TopkOrder::kByPosition;
  const auto fine_bin = [&](uint64_t key) { return static_cast<uint32_t>(key_map.bin_of(score_of_order(order_bits_of_key(key)))); };
  const auto visit_keys = [&](const auto& visit) {
#pragma unroll
    for (int i = 0; i < 2; ++i) visit(i, held_key[i], held_bin[i]);
#pragma unroll 1
    for (int i = 2; i < own_keys; ++i) visit(i, keys[first_key + i], fine_bin(keys[first_key + i]));
  };
  uint64_t bound = 0;  // of the keys in the crossing bin; of all, where `few` is false
  if (!few) {
    bound = exact_bound(count, k, highest, floor_order);
  } else if (need != at_kth.inside) {
    visit_keys([&](int, uint64_t key, uint32_t bin) {
      if (bin == at_kth.bin) pool.finalists[atomicAdd(&pool.finalist_count, 1u)] = key;
    });
    __syncthreads();
    bound = kth_finalist(at_kth.inside, static_cast<int>(need));
  }
  uint32_t absent = 0;
  if (args.order == TopkOrder::kByRank) {
    __syncthreads();
    absent = give_by_rank(args, visible, row, count, k, bound);
  } else {
    uint32_t members = 0;  // of at most kPoolCapacity / kThreads keys, a bit each
    visit_keys([&](int i, uint64_t key, uint32_t bin) {
      const bool in = few ? bin < at_kth.bin || (bin == at_kth.bin && key >= bound) : key >= bound && i < own_keys;
      members |= in ? 1u << i : 0u;
    });
    uint32_t total;
    uint32_t place = block_exclusive_scan<kThreads>(pool.warp_sums, static_cast<uint32_t>(__popc(members)), &total);
#pragma unroll 1
    for (; members != 0; members &= members - 1) {
      const uint64_t key = keys[first_key + __ffs(static_cast<int>(members)) - 1];
      write_member(args, visible, row, place++, position_of_key(key), score_of_order(order_bits_of_key(key)), &absent);
    }
    __syncwarp();
  }
  give_padding<kThreads>(args, row, k);
  report_absent_slots(args, absent);
  if (threadIdx.x == 0) report_status(args.report, visible.status);
}

}  // namespace

absl::Status select_by_maxima_cuda(const SelectTopkArgs& args, const GroupMaxima& maxima, void* stream) {
  if (absl::Status status = check_select_topk(args); !status.ok()) return status;
  const auto refuse = [](absl::string_view field, int64_t value, absl::string_view limit) {
    return absl::InvalidArgumentError(absl::StrCat("select_by_maxima: ", field, " is ", value, ", must be ", limit));
  };
  if (args.k > kMaximaTopkMax) return refuse("k", args.k, absl::StrCat("at most ", kMaximaTopkMax));
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
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.rows));
  shape.block = dim3(kThreads);
  shape.shared_bytes = kSharedBytes;
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) return facts.status();
  const bool alone = args.rows <= facts->multiprocessors || facts->major == 12;  // 12.0 has room for one
  return launch("select_by_maxima", alone ? select_by_maxima_kernel<1> : select_by_maxima_kernel<2>, shape,
                static_cast<cudaStream_t>(stream), args, maxima);
}

}  // namespace needle
