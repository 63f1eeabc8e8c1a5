// index_logits with mma.sync: every GPU since sm_90, no architecture-specific instruction. What sm_120 (99 KB of shared
// memory a block), sm_100 and plain builds run.
//
// One persistent block a multiprocessor: one producer warp streams key tiles as they lie into a ring (bulk copies, so any
// page stride and any slot count), four pairs of warps score. Ring stage i belongs to pair i % 4; a warp takes 32
// of its keys, holds them as A fragments in registers, and runs over the columns (tokens x padded heads) 64 at a time.
// Queries lie in shared memory in fragment order, so that a lane reads the fragments of two column groups in 16 bytes.
//
// What must stay true:
//  1. Producer and scoring warps walk the same Piece.
//  2. A ring stage is free once both warps of the pair hold its keys in registers; it is the same pair's for good (why:
//     index_logits_sm90.cuh, 3).
//
// Rejected: queries in registers (200 of them, 16 keys a warp): no faster where shared memory is not the limit, and
// impossible beyond 64 columns; ldmatrix: 8-way conflicts on rows of 256 bytes, where 16-byte loads have 2-way ones.
#pragma once

#include "kernels/index_logits_device.cuh"
#include "kernels/launch.cuh"

namespace needle::logits {

inline constexpr int kMmaScoringThreads = 256;
inline constexpr int kMmaThreads = kMmaScoringThreads + 32;
inline constexpr int kMmaRingStagesMax = 16;

template <int kHeads, int kTokens>
struct alignas(16) MmaTail {
  uint64_t full[kMmaRingStagesMax];
  uint64_t empty[kMmaRingStagesMax];
  int64_t sums[kMmaThreads / 32];
  Piece piece;
  int32_t present[kMmaRingStagesMax];  // as in Sm90Control
  alignas(16) float weights[WeightLayout<kHeads>::kToken * kTokens];
  float scales[kHeads * kTokens];  // of the queries, where the matrix element is f16
  int32_t limits[kTokens];
};

template <ElementFormat kKeys, int kHeads, int kTokens>
struct MmaShape {
  static constexpr int kColumns = kHeads * kTokens;
  static constexpr int kQueryBytes = kColumns * kIndexHeadDim * 2;
  static constexpr int kStageBytes = KeyTraits<kKeys>::kStageBytes;
  using Tail = MmaTail<kHeads, kTokens>;
  static constexpr int64_t shared_bytes(int stages) {
    return int64_t{kQueryBytes} + int64_t{kStageBytes} * stages + static_cast<int64_t>(sizeof(Tail));
  }
  static constexpr int stages_in(int64_t limit, int most) {
    const int64_t fit = (limit - shared_bytes(0)) / kStageBytes;
    const int stages = static_cast<int>(fit < most ? fit : most);
    return stages < 4 ? stages : stages / 4 * 4;  // as many stages for each pair
  }
};

__device__ __forceinline__ void scoring_warps_meet() { asm volatile("bar.sync 1, %0;" ::"n"(kMmaScoringThreads) : "memory"); }

// The queries of a run in fragment order: 16 bytes for (block of 64 columns, step, pair of column groups, lane).
template <ElementFormat kKeys, int kHeads, int kTokens>
__device__ __forceinline__ void load_query_fragments(const IndexLogitsArgs& args, const Run& run, uint4* fragments,
                                                     MmaTail<kHeads, kTokens>& tail) {
  using Traits = KeyTraits<kKeys>;
  constexpr int kColumns = kHeads * kTokens;
  const int thread = threadIdx.x;
  const auto vector_of = [&](int n) -> int64_t {  // -1 where the column is padding
    const int token = n / kHeads, head = n % kHeads;
    return token < run.count && head < args.heads ? static_cast<int64_t>(run.token + token) * args.heads + head : -1;
  };
  for (int n = thread; n < kColumns; n += kMmaScoringThreads) {
    const int64_t vector = vector_of(n);
    QueryScale scale{1.0f, 1.0f};
    if constexpr (Traits::kHalf) {
      float largest = 0;
      if (vector >= 0) {
        for (int pair = 0; pair < kIndexHeadDim / 2; ++pair) largest = larger_finite(largest, query_pair(args, vector, pair));
      }
      scale = scale_of_largest(largest);
    }
    tail.scales[n] = scale.scale;
    tail.weights[WeightLayout<kHeads>::place(n)] = vector >= 0 ? __ldg(args.head_weights + vector) * scale.inverse : 0.0f;
  }
  if (thread < kTokens) {
    tail.limits[thread] = thread < run.count ? visible_entries(args, run.token + thread) : 0;
  }
  if constexpr (Traits::kHalf) scoring_warps_meet();
  for (int i = thread; i < kColumns * 16; i += kMmaScoringThreads) {
    const int lane = i % 32;
    const int step = i / 128 % 8;
    uint32_t words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = i / 1024 * 64 + 16 * (i / 32 % 4) + 8 * half + lane / 4;
      const int64_t vector = vector_of(n);
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const int element = Traits::element_of(step, lane % 4, 2 * word);
        words[2 * half + word] =
            vector < 0 ? 0u : query_word<Traits::kHalf>(query_pair(args, vector, element / 2), Traits::kHalf ? tail.scales[n] : 1.0f);
      }
    }
    fragments[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <ElementFormat kKeys, int kHeads, int kTokens>
__global__ void __launch_bounds__(kMmaThreads, 1) index_logits_mma_kernel(const __grid_constant__ IndexLogitsArgs args, int stages) {
  using Shape = MmaShape<kKeys, kHeads, kTokens>;
  using Traits = KeyTraits<kKeys>;
  constexpr int kColumns = Shape::kColumns;
  constexpr int kRowBytes = Traits::kTileBytes / kTileSlots;
  extern __shared__ __align__(128) std::byte mma_shared[];
  uint4* const fragments = reinterpret_cast<uint4*>(mma_shared);
  std::byte* const ring = mma_shared + Shape::kQueryBytes;
  auto& tail = *reinterpret_cast<typename Shape::Tail*>(ring + Shape::kStageBytes * stages);

  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      barrier_init(&tail.full[s], 1);
      barrier_init(&tail.empty[s], 2 * kWarpArrivals);
    }
    barrier_init_done();
  }
  let_next_kernel_start();
  wait_for_previous_kernel();
  Piece piece = find_piece<kTokens, kMmaThreads>(args, tail.sums, &tail.piece);
  if (piece.left == 0) return;
  const int first_column = static_cast<int>(args.entry_begin) / args.keys.slots_per_page;

  if (warp == kMmaScoringThreads / 32) {
    const uint64_t policy = args.query_row == nullptr ? cache_evict_first() : cache_evict_normal();
    int stage = 0;
    uint32_t parity = 1;  // the ring starts empty
    while (piece.left > 0) {
      const int end = piece.tile + tiles_here(piece);
      for (int base = piece.tile; base < end; base += 32) {
        int32_t my_page = kNoPage;
        if (base + lane < end) {
          my_page = page_at(args, piece.run.row, place_of_tile(args, first_column, base + lane).column);
        }
        const int here = min(end - base, 32);
        for (int i = 0; i < here; ++i) {
          const int32_t page = __shfl_sync(0xFFFFFFFFu, my_page, i);
          if (lane == 0) {
            const TilePlace place = place_of_tile(args, first_column, base + i);
            uint64_t* const full = &tail.full[stage];
            barrier_wait(&tail.empty[stage], parity);
            if (page < 0) {
              tail.present[stage] = piece.run.row >= 0 && place.column < args.pages.pages_per_row ? 0 : -1;
              barrier_arrive(full);
            } else {
              tail.present[stage] = 1;
              std::byte* const to = ring + Shape::kStageBytes * stage;
              const std::byte* from = args.keys.base + page * args.keys.page_stride;
              const uint32_t value_bytes = static_cast<uint32_t>(place.slots * kRowBytes);
              const uint32_t scale_bytes = kKeys == ElementFormat::kBf16 ? 0 : static_cast<uint32_t>((place.slots * 4 + 15) / 16 * 16);
              barrier_arrive_expect(full, value_bytes + scale_bytes);
              bulk_copy(to, from + place.slot * kRowBytes, value_bytes, full, policy);
              if constexpr (kKeys != ElementFormat::kBf16) {
                bulk_copy(to + Traits::kTileBytes, from + args.keys.slots_per_page * kRowBytes + place.slot * 4, scale_bytes, full, policy);
              }
            }
          }
          if (++stage == stages) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
      next_run<kTokens>(args, piece);
    }
  } else {
    const int pair = warp / 2;
    const int t = lane % 4;
    const int row = 32 * (warp % 2) + lane / 4;  // and row + 8, + 16, + 24
    int stage = 0;
    uint32_t parity = 0;
    while (piece.left > 0) {
      scoring_warps_meet();  // nobody reads the last run's queries any more
      load_query_fragments<kKeys, kHeads, kTokens>(args, piece.run, fragments, tail);
      scoring_warps_meet();
      const int end = piece.tile + tiles_here(piece);
      for (int tile = piece.tile; tile < end; ++tile) {
        if (stage % 4 == pair) {
          barrier_wait(&tail.full[stage], parity);
          const std::byte* const keys = ring + Shape::kStageBytes * stage;
          const int present = tail.present[stage];
          const TilePlace place = place_of_tile(args, first_column, tile);
          uint32_t a[2][8][4];
          read_keys<kKeys>(keys, row, t, a[0]);
          read_keys<kKeys>(keys, row + 16, t, a[1]);
          const int my_row = row + 8 * (t & 1);  // the row whose sum this lane ends with, and the one 16 below
          float scale[2] = {1.0f, 1.0f};
          if constexpr (kKeys == ElementFormat::kFp8) {
            scale[0] = *reinterpret_cast<const float*>(keys + Traits::kTileBytes + my_row * 4);
            scale[1] = *reinterpret_cast<const float*>(keys + Traits::kTileBytes + (my_row + 16) * 4);
          }
          barrier_arrive_warp(&tail.empty[stage]);

          const auto finish = [&](int token, int half, float score) {
            const int slot = my_row + 16 * half;
            const int entry = place.entry + slot;
            if (slot >= place.slots || token >= kTokens || entry >= tail.limits[token]) return;
            const int64_t at = (piece.run.token + token) * args.score_stride + entry;
            LeftOut left_out;
            if (present > 0) {
              write_score(args.scores + at, kKeys == ElementFormat::kFp8 ? score * scale[half] : score, left_out);
            } else {
              write_absent(args.scores + at, present == 0, left_out);
            }
            left_out.report(args.report);
          };
          HeadSums sums[2];
#pragma unroll 1
          for (int block = 0; block < kColumns / 64; ++block) {
            float d[2][32] = {};
#pragma unroll
            for (int s = 0; s < 8; ++s) {
#pragma unroll
              for (int j = 0; j < 8; j += 2) {
                const uint4 b = fragments[((block * 8 + s) * 4 + j / 2) * 32 + lane];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  mma<Traits::kHalf>(d[half] + 4 * j, a[half][s], b.x, b.y);
                  mma<Traits::kHalf>(d[half] + 4 * (j + 1), a[half][s], b.z, b.w);
                }
              }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) clear_padding<64, kHeads>(d[half], args.heads, block * 64);
            constexpr int kColumnsAToken = kHeads < 64 ? kHeads : 64;  // within one block
#pragma unroll
            for (int part = 0; part < 64 / kColumnsAToken; ++part) {
              const int token = (block * 64 + part * kColumnsAToken) / kHeads;
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                add_heads<kColumnsAToken>(sums[half], d[half] + part * (kColumnsAToken / 2), [&](int j) {
                  return WeightLayout<kHeads>::of(tail.weights, token, t)[(kHeads > 64 ? block % 2 * 4 : 0) + j / 2];
                });
              }
              if (kHeads <= 64 || block % 2 == 1) {  // a token's last columns
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  const float score = sum_quad(sums[half].rows());
                  if (t < 2) finish(token, half, score);
                  sums[half] = HeadSums{};
                }
              }
            }
          }
        }
        if (++stage == stages) {
          stage = 0;
          parity ^= 1;
        }
      }
      next_run<kTokens>(args, piece);
    }
  }
}

// Host: launches the kernel for this shape.
template <ElementFormat kKeys, int kHeads, int kTokens>
absl::Status launch_mma(const Plan& plan, const IndexLogitsArgs& args, cudaStream_t stream) {
  using Shape = MmaShape<kKeys, kHeads, kTokens>;
  // 99 KB is what sm_120 gives a block; with less than two tiles in flight the keys would arrive one by one.
  static_assert(Shape::stages_in(99 * 1024, kMmaRingStagesMax) >= 2, "the ring must fit sm_120");
  const int stages =
      Shape::stages_in(plan.shared_limit, plan.ring_stages_max < kMmaRingStagesMax ? plan.ring_stages_max : kMmaRingStagesMax);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(plan.blocks));
  shape.block = dim3(kMmaThreads);
  shape.shared_bytes = static_cast<size_t>(Shape::shared_bytes(stages));
  return launch("index_logits_cuda", index_logits_mma_kernel<kKeys, kHeads, kTokens>, shape, stream, args, stages);
}

template <ElementFormat kKeys>
absl::Status launch_mma_of(const Plan& plan, const IndexLogitsArgs& args, cudaStream_t stream) {
#define NEEDLE_SHAPE(HEADS, TOKENS) \
  if (plan.heads == HEADS && plan.tokens == TOKENS) return launch_mma<kKeys, HEADS, TOKENS>(plan, args, stream);
  NEEDLE_SHAPE(64, 1)
  NEEDLE_SHAPE(64, 2)
  NEEDLE_SHAPE(64, 4)
  NEEDLE_SHAPE(32, 2)
  NEEDLE_SHAPE(32, 4)
  NEEDLE_SHAPE(32, 8)
  NEEDLE_SHAPE(128, 1)
  NEEDLE_SHAPE(128, 2)
#undef NEEDLE_SHAPE
  return absl::InternalError("index_logits_cuda: no mma.sync kernel of this shape");
}

}  // namespace needle::logits
