// select_topk of rows that shared memory holds whole: a block a row.
//
// A row comes in one bulk copy. Each thread has up to 32 neighbouring scores of it, a bit for each, and no score is copied on: what is found
// out of a row is which bits stay. A sample gives a guess that 1.6 k entries reach where k is half of the row, 2.3 k where it is a 32nd,
// more where it is less; bits of scores that reach it are binned by their distance from it, and the bin of the k-th is resolved by comparing
// what is in it. What then stays is counted thread by thread, which is the order of positions, listed, and written.
//
// What must stay true:
//  1. A bin is a monotone function of a score, so whatever lies in a better bin is greater. Rounding may move a bin's edge and never the
//     order.
//  2. Where fewer than k reach the guess, a NaN or an infinity does, or too many are in one bin (equal scores, a sample that an outlier
//     stretches), bits are chosen from exactly, by order bits and then positions: slower, for any numbers, and counted as a fallback.
//  3. A score is looked at by its own thread alone, but for samples, finalists and what is given out.
//  4. Instructions of all 16 warps are what this kernel's time is made of: what few can do is done by few.
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "kernels/bulk_copy.cuh"
#include "kernels/device_report.cuh"
#include "kernels/launch.cuh"
#include "kernels/select_short_rows.h"
#include "kernels/select_topk_block.cuh"
#include "kernels/select_topk_row.cuh"
#include "kernels/select_topk_sample.cuh"

namespace needle {
namespace {

constexpr int kThreads = kTailThreads;
static_assert(kShortRowMax == 32 * kThreads, "a bit a score");
static_assert(kShortRowsTopkMax <= kSelectBins, "members are listed where the bins were");
constexpr int kGroups = 64;             // of the sample
constexpr int kGroupScoresLog2Max = 4;  // scores of a group: two of a thread
constexpr int kRankers = 2 * kGroups;   // threads that rank the groups
constexpr int kRobustRank = 60;         // of the groups' bests: an outlier or two lie above
static_assert(kSelectBins == 4 * kThreads && kThreads % kGroups == 0, "a vector of bins a thread, and a group");
constexpr uint32_t kMinusInfinityOrder = score_order_bits(0xFF800000u);

// How the guess is made: of each group's scores the best, of those the rank-th smallest. rank 0: by no guess.
struct GuessPlan {
  int group_scores_log2;
  int rank;
  int high_rank;  // of the best that is taken for the row's
  float beyond;   // bins reach so many times as far as from the guess to that
};
struct alignas(16) ShortShared {
  uint32_t group_best[kGroups];  // as order bits; read by vectors
  uint64_t landed;
  VisibleRow visible;
  GuessPlan plan;
  uint32_t guess_order;
  uint32_t high_order;
  bool odd;  // a NaN or an infinity among what reaches the guess
};
constexpr int kRowAlignment = 128;  // eight vectors, whose addresses differ in three bits
constexpr int kSharedBytes = static_cast<int>(sizeof(SelectShared) + sizeof(ShortShared)) + kRowAlignment + kShortRowMax * 4;

__device__ __forceinline__ ShortShared& short_shared() { return *reinterpret_cast<ShortShared*>(&select_shared() + 1); }

// As plan_sample() of select_topk_sample.cuh, for groups of single scores from all over the row. No guess where more than 0.7 of it are wanted.
__device__ __forceinline__ GuessPlan plan_guess(int length, int k) {
  GuessPlan plan{};
  if (length < kGroups || k >= length) return plan;
  const float share = __fdividef(static_cast<float>(k), static_cast<float>(length));
  const int wanted = static_cast<int>(__fdividef(0.7f, share));
  if (wanted == 0) return plan;
  plan.group_scores_log2 = min(min(31 - __clz(wanted), kGroupScoresLog2Max), 31 - __clz(length / kGroups));
  const float below = exp2f(static_cast<float>(1 << plan.group_scores_log2) * __log2f(1.0f - share));
  plan.rank = rank_of_guess(kGroups, below);
  // Where few are wanted they are the sample's best and what lies above it.
  const bool few = plan.rank >= kGroups / 2;
  plan.high_rank = few ? kGroups : kRobustRank;
  plan.beyond = few ? 2.0f : 1.0f;
  return plan;
}

// Each group's best goes to shared memory. A block barrier must follow.
__device__ __forceinline__ void sample_groups(ShortShared& shared, uint32_t scores, int length, const GuessPlan& plan) {
  const int samples = kGroups << plan.group_scores_log2;
  const int step = length / samples;
  float best = __uint_as_float(kAbsentScoreBits);
  const auto look = [&](int sample) {  // one a step, each in a bank of its own or nearly
    const int position = sample * step + (sample & ((1 << (31 - __clz(step))) - 1));
    best = fmaxf(best, __uint_as_float(load_word(scores + 4 * static_cast<uint32_t>(position))));  // which ignores NaN
  };
  if (static_cast<int>(threadIdx.x) >= samples) return;
  look(static_cast<int>(threadIdx.x));
  if (samples > kThreads) look(static_cast<int>(threadIdx.x) + kThreads);
  max_to_word(shared_address(&shared.group_best[threadIdx.x % kGroups]), order_bits_of(best));
}
// Of the groups' bests those of the planned ranks, by a few warps. A block barrier must follow.
__device__ __forceinline__ void rank_groups(ShortShared& shared, const GuessPlan& plan) {
  if (threadIdx.x >= kRankers) return;
  const uint32_t mine = shared.group_best[threadIdx.x / 2];
  const uint32_t bests = shared_address(shared.group_best) + 16 * (threadIdx.x % 2);
  uint32_t counted = 0;
#pragma unroll
  for (uint32_t v = 0; v < kGroups / 8; ++v) count_against(load_vector(bests + 32 * v), mine, &counted);
  counted += __shfl_xor_sync(0xFFFFFFFFu, counted, 1);
  const int smaller = static_cast<int>(counted % 65536u);
  const int up_to = smaller + static_cast<int>(counted / 65536u);
  if (smaller < plan.rank && plan.rank <= up_to) shared.guess_order = mine;  // equal ones say the same
  if (smaller < plan.high_rank && plan.high_rank <= up_to) shared.high_order = mine;
}

// This thread's scores, `count` neighbours (4, 8, 16 or 32), and a bit for each: bit 31 is the first one's.
struct Own {
  uint32_t at;  // shared address of the first
  uint32_t position;
  int count;

  // Every thread has as few as cover the row.
  __device__ __forceinline__ Own(uint32_t scores, int length) {
    const int log2 = max(2, 32 - __clz((length - 1) / kThreads));
    at = scores + (threadIdx.x << (log2 + 2));
    position = threadIdx.x << log2;
    count = 1 << log2;
  }
  __device__ __forceinline__ float score(uint32_t bit) const {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at + 124 - 4 * bit));
    return value;
  }
  __device__ __forceinline__ uint32_t position_of(uint32_t bit) const { return position + 31 - bit; }
  // The bits of those inside the row.
  __device__ __forceinline__ uint32_t valid(int length) const {
    const int there = min(max(length - static_cast<int>(position), 0), count);
    return __funnelshift_lc(0u, 0xFFFFFFFFu, static_cast<uint32_t>(32 - there));
  }
};
__device__ __forceinline__ uint32_t highest_bit(uint32_t bits) {
  uint32_t bit;
  asm("bfind.u32 %0, %1;" : "=r"(bit) : "r"(bits));
  return bit;
}
// Calls visit(bit) for each: the first score first, or, where lanes have many in common and would meet in one bank, each beginning elsewhere.
enum class Lanes : uint8_t { kAlike, kInTurns };
template <Lanes kLanes, class Visit>
__device__ __forceinline__ void for_bits(uint32_t bits, const Visit& visit) {
  constexpr bool kInTurns = kLanes == Lanes::kInTurns;
  if (kInTurns) bits = __funnelshift_l(bits, bits, threadIdx.x);
#pragma unroll 1
  while (bits != 0) {
    const uint32_t bit = highest_bit(bits);
    bits ^= 1u << bit;
    visit(kInTurns ? (bit - threadIdx.x) & 31u : bit);
  }
  __syncwarp();
}
// Whether a warp's threads have so many bits that they should take turns.
__device__ __forceinline__ bool are_many(uint32_t bits) { return __any_sync(0xFFFFFFFFu, __popc(static_cast<int>(bits)) > 16); }

// Those bits whose entries are there; NaN and absent ones are counted. A block barrier must follow.
__device__ __noinline__ uint32_t present_of(Own own, uint32_t bits) {
  Oddities found;
  uint32_t present = bits;
  for_bits<Lanes::kInTurns>(bits, [&](uint32_t bit) {
    uint64_t key;
    if (!takes(true, own.score(bit), own.position_of(bit), 0, &key, &found)) present &= ~(1u << bit);
  });
  found.note();
  return present;
}

__device__ __forceinline__ void add_to_bin(uint32_t bin, uint32_t count) {
  atomicAdd(&select_shared().bins[bin], count);
  atomicAdd(&select_shared().coarse[bin / 32], count);
}
// Counts a bin's lanes together, as those with equal scores would wait for each other.
__device__ __forceinline__ void count_together(uint32_t bin) {
  const unsigned same = __match_any_sync(__activemask(), bin);
  if ((same & lanes_below()) == 0) add_to_bin(bin, static_cast<uint32_t>(__popc(static_cast<int>(same))));
}

// Of all threads' bits the `need` best, or all where there are no more. Each round bins what is left evenly between its least and its
// best, eleven bits at a time; of equal ones the first are taken.
__device__ __noinline__ uint32_t best_of(Own own, uint32_t bits, uint32_t need) {
  SelectShared& pool = select_shared();
  const uint32_t bins = shared_address(pool.bins);
  uint32_t chosen = 0;
#pragma unroll 1
  for (;;) {
    uint32_t order_min = 0xFFFFFFFFu;
    uint32_t order_max = 0;
    for_bits<Lanes::kInTurns>(bits, [&](uint32_t bit) {
      const uint32_t order = order_bits_of(own.score(bit));
      order_min = min(order_min, order);
      order_max = max(order_max, order);
    });
    __syncthreads();  // everybody has read what bins and bounds there were
    store_vector(bins + 16 * threadIdx.x, uint4{0, 0, 0, 0});
    if (threadIdx.x < kSelectCoarseBins) pool.coarse[threadIdx.x] = 0;
    if (threadIdx.x == 0) pool.crossing = uint4{0xFFFFFFFFu, 0, 0, 0};
    __syncthreads();
    atomicMin(&pool.crossing.x, order_min);
    atomicMax(&pool.crossing.y, order_max);
    __syncthreads();
    order_min = pool.crossing.x;
    order_max = pool.crossing.y;
    if (order_min >= order_max) {
      const uint32_t all = static_cast<uint32_t>(__popc(static_cast<int>(bits)));
      uint32_t total;
      const uint32_t before = block_exclusive_scan<kThreads>(pool.warp_sums, all, &total);
      __syncthreads();  // the sums have been read
      uint32_t beyond = before + all > need ? min(before + all - need, all) : 0;
#pragma unroll 1
      for (; beyond != 0; --beyond) bits &= bits - 1;  // the last one
      __syncwarp();
      return chosen | bits;
    }
    const int shift = max(0, 32 - kSelectBinBits - __clz(static_cast<int>(order_max - order_min)));
    const auto bin_of = [&](uint32_t bit) { return kSelectBins - 1 - ((order_bits_of(own.score(bit)) - order_min) >> shift); };
    for_bits<Lanes::kInTurns>(bits, [&](uint32_t bit) { count_together(bin_of(bit)); });
    __syncthreads();
    const BinCrossing crossing = warp_find_crossing(static_cast<int>(need));
    if (crossing.total <= need) return chosen | bits;
    uint32_t inside = 0;
    for_bits<Lanes::kInTurns>(bits, [&](uint32_t bit) {
      const uint32_t bin = bin_of(bit);
      if (bin < crossing.bin) chosen |= 1u << bit;
      if (bin == crossing.bin) inside |= 1u << bit;
    });
    need -= crossing.above;
    bits = inside;
    if (crossing.inside == need) return chosen | bits;
  }
}

// A number that is monotone in how far a score lies above the guess: kBinZero + 0 for the best, up to kBinZero + kSelectBins - 1.
constexpr float kBinZeroValue = 8388608.0f;  // whose neighbours are whole numbers
constexpr uint32_t kBinZero = 0x4B000000u;   // its bits
struct Ruler {
  float minus_guess;
  float scale;

  __device__ __forceinline__ Ruler(float guess, float high, float beyond) {
    minus_guess = guess == 0.0f ? 0.0f : -guess;  // -0 + 0 is not negative, as -0 - 0 is
    scale = -fminf(__fdividef(kSelectBins - 1, beyond * (high - guess)), 3e38f);
  }
  __device__ __forceinline__ float above_guess(float score) const { return score + minus_guess; }
  __device__ __forceinline__ uint32_t bin(float above) const {
    return __float_as_uint(fmaxf(__fmaf_rn(above, scale, kBinZeroValue + (kSelectBins - 1)), kBinZeroValue));
  }
};

// Which of this thread's scores are not below the guess. NaN is not: a sum with it has a clear sign bit, whatever its own.
__device__ __forceinline__ uint32_t reaching(const Own& own, const Ruler& ruler) {
  // Eight neighbouring threads begin at vectors that lie in banks of their own.
  const int vectors = own.count / 4;
  const uint32_t turn = threadIdx.x * static_cast<uint32_t>(vectors) / 8 & static_cast<uint32_t>(vectors - 1);
  const uint32_t first = own.at + 16 * turn;
  uint32_t below = 0;
#pragma unroll
  for (int v = 0; v < 8; ++v) {
    if (v >= vectors) break;
    const float4 four = load_shared_vector(first ^ (16u * static_cast<uint32_t>(v)));
    const auto note = [&](float score) { below = __funnelshift_l(__float_as_uint(ruler.above_guess(score)), below, 1); };
    note(four.x);
    note(four.y);
    note(four.z);
    note(four.w);
  }
  // Four bits a vector, which go to where vector v ^ turn belongs.
  below = __byte_perm(below, 0, 0x3210u ^ (0x1111u * (turn >> 1)));
  if ((turn & 1u) != 0) below = (below >> 4 & 0x0F0F0F0Fu) | (below << 4 & 0xF0F0F0F0u);
  return ~below << (32 - own.count);
}

// Counts the bits' scores in bins. Whether one of them is no number, or infinite.
__device__ __forceinline__ bool bin_few(const Own& own, uint32_t bits, const Ruler& ruler) {
  const uint32_t bins = shared_address(select_shared().bins) - 4 * kBinZero;
  const uint32_t coarse = shared_address(select_shared().coarse) - kBinZero / 8;
  float nothing = 0.0f;
  for_bits<Lanes::kAlike>(bits, [&](uint32_t bit) {
    const float above = ruler.above_guess(own.score(bit));
    nothing = __fmaf_rn(above, 0.0f, nothing);
    const uint32_t bin = ruler.bin(above);
    add_one_to_word(bins + 4 * bin);
    add_one_to_word(coarse + 4 * (bin / 32));
  });
  return nothing != 0.0f;
}
__device__ __noinline__ bool bin_many(Own own, uint32_t bits, Ruler ruler) {
  float nothing = 0.0f;
  uint32_t equal = 0;  // to the guess, as many scores of a row may be
  for_bits<Lanes::kInTurns>(bits, [&](uint32_t bit) {
    const float above = ruler.above_guess(own.score(bit));
    nothing = __fmaf_rn(above, 0.0f, nothing);
    if (above == 0.0f) {
      equal += 1;
    } else {
      count_together(ruler.bin(above) - kBinZero);
    }
  });
  equal = __reduce_add_sync(0xFFFFFFFFu, equal);
  if (threadIdx.x % 32 == 0) add_to_bin(kSelectBins - 1, equal);
  return nothing != 0.0f;
}

// The bits in better bins than the k-th's, and those in it; all of them are `above` where the whole bin is wanted.
struct Sides {
  uint32_t above;
  uint32_t inside;
};
template <Lanes kLanes>
__device__ __forceinline__ Sides sides_of(const Own& own, uint32_t bits, const Ruler& ruler, uint32_t bin, bool whole) {
  const uint32_t end = kBinZero + bin + (whole ? 1u : 0u);
  const uint32_t edge = whole ? 0u : end;
  Sides sides{};
  for_bits<kLanes>(bits, [&](uint32_t bit) {
    const uint32_t here = ruler.bin(ruler.above_guess(own.score(bit)));
    if (here < end) sides.above |= 1u << bit;
    if (here == edge) sides.inside |= 1u << bit;
  });
  return sides;
}
__device__ __noinline__ Sides sides_of_many(Own own, uint32_t bits, Ruler ruler, uint32_t bin, bool whole) {
  return sides_of<Lanes::kInTurns>(own, bits, ruler, bin, whole);
}

// Of all threads' bits, `count` of them and no more than kSelectFinalists, the `need` best.
__device__ __forceinline__ uint32_t best_of_few(const Own& own, uint32_t bits, uint32_t count, uint32_t need) {
  SelectShared& pool = select_shared();
  const auto key_of = [&](uint32_t bit) { return rank_key_of(own.score(bit), own.position_of(bit)); };
  for_bits<Lanes::kAlike>(bits, [&](uint32_t bit) { pool.finalists[atomicAdd(&pool.finalist_count, 1u)] = key_of(bit); });
  __syncthreads();
  uint32_t chosen = 0;
  for_bits<Lanes::kAlike>(bits, [&](uint32_t bit) {
    const uint64_t key = key_of(bit);
    uint32_t better = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) better += pool.finalists[i] > key ? 1u : 0u;
    if (better < need) chosen |= 1u << bit;
  });
  return chosen;
}

__global__ void __launch_bounds__(kThreads, 3) select_short_rows_kernel(const __grid_constant__ SelectTopkArgs args) {
  SelectShared& pool = select_shared();
  ShortShared& shared = short_shared();
  const int64_t row = blockIdx.x;
  const uint32_t bins = shared_address(pool.bins);
  const uint32_t scores =
      (bins + static_cast<uint32_t>(sizeof(SelectShared) + sizeof(ShortShared)) + kRowAlignment - 1) & ~(kRowAlignment - 1u);

  block_begin<kThreads>();
  if (threadIdx.x < kGroups) shared.group_best[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    pool.finalist_count = 0;
    shared.odd = false;
    barrier_init(&shared.landed, 1);
    barrier_init_done();
  }
  __syncthreads();  // as racecheck asks, though the same thread uses it next
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x < 32) {
    const VisibleRow visible = visible_row(args, row, LoadNow{});
    const int length = static_cast<int>(visible.length);
    const float* const from = args.scores + row * args.score_stride;
    if (threadIdx.x == 0) {
      if (length >= 4) {
        const uint32_t bytes = static_cast<uint32_t>(length) / 4 * 16;
        barrier_arrive_expect(&shared.landed, bytes);
        bulk_copy(reinterpret_cast<std::byte*>(&pool) + (scores - bins), from, bytes, &shared.landed);
      } else {
        barrier_arrive(&shared.landed);
      }
    }
    const int last = length / 4 * 4 + static_cast<int>(threadIdx.x);
    if (last < length) store_word(scores + 4 * static_cast<uint32_t>(last), __float_as_uint(from[last]));
    const GuessPlan plan = plan_guess(length, args.k);
    if (threadIdx.x == 0) {
      shared.visible = visible;
      shared.plan = plan;
    }
  }
  __syncthreads();
  const int length = static_cast<int>(shared.visible.length);
  if (length == 0) {
    give_padding<kThreads>(args, row, 0);
    if (threadIdx.x == 0) report_status(args.report, shared.visible.status);
    return;
  }
  const GuessPlan plan = shared.plan;
  const Own own(scores, length);
  const uint32_t valid = own.valid(length);
  barrier_wait(&shared.landed, 0);

  uint32_t members = 0;
  bool chosen = false;
  bool fell_back = false;
  if (plan.rank != 0) {
    sample_groups(shared, scores, length, plan);
    __syncthreads();
    rank_groups(shared, plan);
    __syncthreads();
    const uint32_t guess_order = shared.guess_order;
    if (guess_order > kMinusInfinityOrder) {
      const Ruler ruler(__uint_as_float(score_bits_of_order(guess_order)), __uint_as_float(score_bits_of_order(shared.high_order)),
                        plan.beyond);
      const uint32_t bits = reaching(own, ruler) & valid;
      const bool many = are_many(bits);
      const bool odd = many ? bin_many(own, bits, ruler) : bin_few(own, bits, ruler);
      if (odd) shared.odd = true;
      __syncthreads();
      const BinCrossing crossing = warp_find_crossing(args.k);
      if (!shared.odd && crossing.total >= static_cast<uint32_t>(args.k)) {
        chosen = true;
        const uint32_t need = static_cast<uint32_t>(args.k) - crossing.above;
        const bool whole = crossing.inside == need;
        const Sides sides =
            many ? sides_of_many(own, bits, ruler, crossing.bin, whole) : sides_of<Lanes::kAlike>(own, bits, ruler, crossing.bin, whole);
        members = sides.above;
        fell_back = !whole && crossing.inside > kSelectFinalists;
        if (fell_back) {
          members |= best_of(own, sides.inside, need);
        } else if (!whole) {
          members |= best_of_few(own, sides.inside, crossing.inside, need);
        }
      } else {
        fell_back = true;
      }
    }
  }
  if (!chosen) {
    members = present_of(own, valid);
    if (length > args.k) members = best_of(own, members, static_cast<uint32_t>(args.k));
  }
  if (fell_back && threadIdx.x == 0) pool.overflows += 1;

  uint32_t total;
  uint32_t place = block_exclusive_scan<kThreads>(pool.warp_sums, static_cast<uint32_t>(__popc(static_cast<int>(members))), &total);
  for_bits<Lanes::kAlike>(members, [&](uint32_t bit) {
    store_word(bins + 4 * place, own.position_of(bit));
    place += 1;
  });
  __syncthreads();
  uint32_t absent = 0;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < total; i += kThreads) {
    const uint32_t entry = load_word(bins + 4 * i);
    float score = 0.0f;
    if (args.out_scores != nullptr)
      score = __uint_as_float(score_bits_of_order(order_bits_of(__uint_as_float(load_word(scores + 4 * entry)))));
    write_member(args, shared.visible, row, i, entry, score, &absent);
  }
  __syncwarp();
  end_row(args, shared.visible, row, static_cast<int>(total), absent);
}

}  // namespace

bool selects_short_rows(const SelectTopkArgs& args) {
  return args.order == TopkOrder::kByPosition && args.length_max <= kShortRowMax && args.k <= kShortRowsTopkMax &&
         reinterpret_cast<uintptr_t>(args.scores) % 16 == 0 && args.score_stride % 4 == 0;
}

absl::Status select_short_rows_cuda(const SelectTopkArgs& args, void* stream) {
  if (absl::Status status = check_select_topk(args); !status.ok()) return status;
  if (!selects_short_rows(args)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "select_short_rows: order ", static_cast<int>(args.order), ", length_max ", args.length_max, ", k ", args.k, ", score_stride ",
        args.score_stride, ", scores ", reinterpret_cast<uintptr_t>(args.scores) % 16, " bytes past a multiple of 16: must be 0, at most ",
        kShortRowMax, ", at most ", kShortRowsTopkMax, ", a multiple of 4 and 0; select_topk takes every call"));
  }
  if (args.rows == 0) return absl::OkStatus();
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.rows));
  shape.block = dim3(kThreads);
  shape.shared_bytes = kSharedBytes;
  return launch("select_short_rows", select_short_rows_kernel, shape, static_cast<cudaStream_t>(stream), args);
}

}  // namespace needle
