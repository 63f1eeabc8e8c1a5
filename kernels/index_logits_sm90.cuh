// index_logits on sm_90a: wgmma, one persistent block a multiprocessor, three or four warpgroups.
//
// Warpgroup 0 feeds: its first warp streams key tiles into a ring (tensor maps for bf16, so that they arrive swizzled;
// plain bulk copies for fp8 and fp4), the other three turn the next run's queries into the matrix operand. The others
// score: tile i of the piece belongs to scoring group i % kGroups, which multiplies 64 keys (rows) by all columns
// (tokens x padded heads) and reduces its accumulators while another one multiplies.
//
// What must stay true:
//  1. The three roles walk the same Piece and so agree on every ring and query-buffer index without talking.
//  2. A ring stage is free again once its four scoring warps have arrived; a query buffer once all scoring
//     warps have.
//  3. One wgmma of all columns a step: a column's sum does not depend on how many columns there are.
//
// Rejected: mma.sync with queries in registers (index_logits_mma.cuh has it): 80 % of the matrix rate, enough for one
// query token but not for four; queries by tensor map: would save nothing and could not convert or permute.
#pragma once

#include <cuda.h>

#include "kernels/index_logits_device.cuh"
#include "kernels/launch.cuh"
#include "kernels/wgmma.cuh"

namespace needle::logits {

inline constexpr int kSm90LoaderThreads = 96;
inline constexpr int kRingStagesMax = 24;

template <int kColumns, int kTokens>
struct alignas(16) Sm90Tail {
  uint64_t full[kRingStagesMax];
  uint64_t empty[kRingStagesMax];
  uint64_t query_full[2];
  uint64_t query_empty[2];
  uint64_t turn[2];
  int64_t sums[16];
  Piece piece;
  int32_t present[kRingStagesMax];  // 1: the tile is there; 0: its page is absent; -1: past the page table
  float weights[2][kColumns];
  int32_t limits[2][kTokens];       // entries of the chunk that each token of the run sees
};

template <ElementFormat kKeys, int kHeads, int kTokens>
struct Sm90Shape {
  static constexpr int kColumns = kHeads * kTokens;
  static constexpr int kQueryBytes = kColumns * kIndexHeadDim * 2;
  static constexpr int kStageBytes = KeyTraits<kKeys>::kStageBytes;
  // Scoring warpgroups. With one token the multiplication is short and latencies rule: three hide them (and the conversion
  // of fp8 and fp4). With more tokens the matrix unit rules: two, which take turns at it.
  static constexpr int kGroups = kColumns == 64 ? 3 : 2;
  static constexpr int kThreads = 128 * (1 + kGroups);
  static constexpr int kLoaderRegisters = 72;
  static constexpr int kScoringRegisters = kGroups == 3 ? 144 : 216;
  // Two groups that start together would multiply together and reduce together, and leave the matrix unit idle half of
  // the time; so one begins when the other has issued its multiplications.
  static constexpr bool kTakeTurns = kGroups == 2;
  using Tail = Sm90Tail<kColumns, kTokens>;
  static constexpr int64_t shared_bytes(int stages) {
    return 2 * int64_t{kQueryBytes} + int64_t{kStageBytes} * stages + static_cast<int64_t>(sizeof(Tail));
  }
  static constexpr int stages_in(int64_t shared_bytes, int most) {
    const int64_t fit = (shared_bytes - shared_bytes_fixed()) / kStageBytes;
    return static_cast<int>(fit < most ? fit : most);
  }
  static constexpr int64_t shared_bytes_fixed() { return 2 * int64_t{kQueryBytes} + static_cast<int64_t>(sizeof(Tail)); }
};

// The queries of a run as B operand: row n = token x kHeads + head, 128-byte swizzle, in two tiles of 64 columns.
// bf16 keys keep the natural order of the head dim; fp8 and fp4 keys want it as KeyTraits says.
template <ElementFormat kKeys, int kHeads, int kTokens>
__device__ __forceinline__ void load_queries(const IndexLogitsArgs& args, const Run& run, int thread, std::byte* operand,
                                             float* weights, int32_t* limits) {
  constexpr int kColumns = kHeads * kTokens;
  constexpr int kRowsAtOnce = kSm90LoaderThreads / 16;
  const int chunk = thread % 16;  // 16 bytes of a row: step chunk / 2, k 8 (chunk % 2) ..
  const auto place = [&](int n) {
    return operand + (chunk / 8) * (kColumns * 128) + n * 128 + (((chunk % 8) ^ (n & 7)) * 16);
  };
  const bool as_it_is = kKeys == ElementFormat::kBf16 && args.q_element == QueryElement::kBf16;
  if (as_it_is) {
    // All loads first: a store that waits for one would hold back the next.
    constexpr int kWeightsEach = (kColumns + kSm90LoaderThreads - 1) / kSm90LoaderThreads;
    float weight[kWeightsEach];
#pragma unroll
    for (int i = 0; i < kWeightsEach; ++i) {
      const int n = thread + i * kSm90LoaderThreads;
      const int token = n / kHeads, head = n % kHeads;
      weight[i] = n < kColumns && token < run.count && head < args.heads
                      ? __ldg(args.head_weights + static_cast<int64_t>(run.token + token) * args.heads + head)
                      : 0.0f;
    }
    const uint4* q = static_cast<const uint4*>(args.q) + (static_cast<int64_t>(run.token) * args.heads) * 16 + chunk;
    constexpr int kBatch = kColumns == 64 ? 11 : 8;  // loads in flight a thread: one token's all at once
    for (int n0 = thread / 16; n0 < kColumns; n0 += kBatch * kRowsAtOnce) {
      uint4 bits[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int n = n0 + i * kRowsAtOnce;
        const int token = n / kHeads, head = n % kHeads;
        bits[i] = make_uint4(0, 0, 0, 0);
        if (n < kColumns && token < run.count && head < args.heads) bits[i] = __ldg(q + (token * args.heads + head) * 16);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int n = n0 + i * kRowsAtOnce;
        if (n < kColumns) *reinterpret_cast<uint4*>(place(n)) = bits[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kWeightsEach; ++i) {
      const int n = thread + i * kSm90LoaderThreads;
      if (n < kColumns) weights[n] = weight[i];
    }
  } else {
    for (int n0 = 0; n0 < kColumns; n0 += kRowsAtOnce) {  // whole warps take part in the shuffles below
      const int n = n0 + thread / 16;
      const int token = n / kHeads, head = n % kHeads;
      const bool there = n < kColumns && token < run.count && head < args.heads;
      const int64_t vector = static_cast<int64_t>(run.token + token) * args.heads + head;
      float2 pairs[4];
      float largest = 0;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int element = kKeys == ElementFormat::kBf16 ? 8 * chunk + 2 * t
                                                          : KeyTraits<kKeys>::element_of(chunk / 2, t, 2 * (chunk % 2));
        pairs[t] = there ? query_pair(args, vector, element / 2) : make_float2(0, 0);
        largest = larger_finite(largest, pairs[t]);
      }
      QueryScale scale{1.0f, 1.0f};
      if constexpr (KeyTraits<kKeys>::kHalf) {
        for (int step = 8; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
        scale = scale_of_largest(largest);
      }
      uint32_t words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) words[t] = query_word<KeyTraits<kKeys>::kHalf>(pairs[t], scale.scale);
      if (n < kColumns) {
        *reinterpret_cast<uint4*>(place(n)) = make_uint4(words[0], words[1], words[2], words[3]);
        if (chunk == 0) weights[n] = there ? __ldg(args.head_weights + vector) * scale.inverse : 0.0f;
      }
    }
  }
  if (thread < kTokens) {
    limits[thread] = thread < run.count ? static_cast<int32_t>(visible_entries(args, run.token + thread)) : 0;
  }
}

template <ElementFormat kKeys, int kHeads, int kTokens>
__global__ void __launch_bounds__(Sm90Shape<kKeys, kHeads, kTokens>::kThreads, 1)
    index_logits_sm90_kernel(const __grid_constant__ IndexLogitsArgs args, const __grid_constant__ CUtensorMap key_map,
                             int stages) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = Sm90Shape<kKeys, kHeads, kTokens>;
  using Traits = KeyTraits<kKeys>;
  constexpr int kColumns = Shape::kColumns;
  // With 128 accumulators a lane has no room for 64 weights: it reads them from shared memory as it goes.
  constexpr bool kWeightsInRegisters = kColumns < 256;
  constexpr MmaElement kElement = Traits::kHalf ? MmaElement::kF16 : MmaElement::kBf16;
  extern __shared__ __align__(1024) std::byte shared[];
  std::byte* const queries = shared;
  std::byte* const ring = shared + 2 * Shape::kQueryBytes;
  auto& tail = *reinterpret_cast<typename Shape::Tail*>(ring + Shape::kStageBytes * stages);

  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      barrier_init(&tail.full[s], 1);
      barrier_init(&tail.empty[s], 4);
    }
    for (int b = 0; b < 2; ++b) {
      barrier_init(&tail.query_full[b], kSm90LoaderThreads);
      barrier_init(&tail.query_empty[b], 4 * Shape::kGroups);
      barrier_init(&tail.turn[b], 4);
    }
    barrier_init_done();
    if (kKeys == ElementFormat::kBf16) tensor_map_prefetch(&key_map);
  }
  let_next_kernel_start();
  wait_for_previous_kernel();
  Piece piece = find_piece<kTokens, Shape::kThreads>(args, tail.sums, &tail.piece);
  if (piece.left == 0) return;
  const int64_t first_column = args.entry_begin / args.keys.slots_per_page;

  if (warp < 4) {
    keep_registers_at_most<Shape::kLoaderRegisters>();
    if (warp == 0) {
      // Keys that several runs read (prefill) stay in L2 as anything does; keys read once make room for scores.
      const uint64_t policy = args.query_row == nullptr ? cache_evict_first() : cache_evict_normal();
      int stage = 0;
      uint32_t parity = 1;  // the ring starts empty
      while (piece.left > 0) {
        const int64_t end = piece.tile + tiles_here(piece);
        int32_t next_page = kNoPage;
        if (piece.tile + lane < end) {
          next_page = page_at(args, piece.run.row, place_of_tile(args, first_column, piece.tile + lane).column);
        }
        for (int64_t base = piece.tile; base < end; base += 32) {
          const int32_t my_page = next_page;
          if (base + 32 + lane < end) {
            next_page = page_at(args, piece.run.row, place_of_tile(args, first_column, base + 32 + lane).column);
          }
          const int here = static_cast<int>(end - base < 32 ? end - base : 32);
          for (int i = 0; i < here; ++i) {
            const int32_t page = __shfl_sync(0xFFFFFFFFu, my_page, i);
            if (lane == 0) {
              const TilePlace place = place_of_tile(args, first_column, base + i);
              std::byte* const to = ring + Shape::kStageBytes * stage;
              uint64_t* const full = &tail.full[stage];
              barrier_wait(&tail.empty[stage], parity);
              if (page < 0) {
                tail.present[stage] = piece.run.row >= 0 && place.column < args.pages.pages_per_row ? 0 : -1;
                barrier_arrive(full);
              } else {
                tail.present[stage] = 1;
                if constexpr (kKeys == ElementFormat::kBf16) {
                  const uint32_t half_bytes = static_cast<uint32_t>(min(kTileSlots, args.keys.slots_per_page)) * 128;
                  barrier_arrive_expect(full, 2 * half_bytes);
                  tensor_copy(to, &key_map, 0, place.slot, page, full, policy);
                  tensor_copy(to + kTileSlots * 128, &key_map, 64, place.slot, page, full, policy);
                } else {
                  constexpr int kRow = Traits::kTileBytes / kTileSlots;
                  const std::byte* from = args.keys.base + page * args.keys.page_stride;
                  const uint32_t scale_bytes = static_cast<uint32_t>((place.slots * 4 + 15) / 16 * 16);
                  const uint32_t value_bytes = static_cast<uint32_t>(place.slots * kRow);
                  barrier_arrive_expect(full, value_bytes + scale_bytes);
                  bulk_copy(to, from + place.slot * kRow, value_bytes, full, policy);
                  bulk_copy(to + Traits::kTileBytes, from + args.keys.slots_per_page * kRow + place.slot * 4, scale_bytes,
                            full, policy);
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
      const int thread = static_cast<int>(threadIdx.x) - 32;
      int buffer = 0;
      uint32_t parity = 1;
      while (piece.left > 0) {
        barrier_wait(&tail.query_empty[buffer], parity);
        load_queries<kKeys, kHeads, kTokens>(args, piece.run, thread, queries + buffer * Shape::kQueryBytes,
                                             tail.weights[buffer], tail.limits[buffer]);
        shared_written();
        barrier_arrive(&tail.query_full[buffer]);
        buffer ^= 1;
        parity ^= buffer == 0 ? 1 : 0;
        next_run<kTokens>(args, piece);
      }
    }
  } else {
    take_registers<Shape::kScoringRegisters>();
    const int group = warp / 4 - 1;
    const int t = lane % 4;
    const int row = 16 * (warp % 4) + lane / 4;  // and row + 8
    int stage = 0, buffer = 0, turn = 0;
    uint32_t parity = 0, query_parity = 0;
    uint32_t turn_parity = group == 0 ? 1 : 0;  // the first turn is group 0's
    float d[kColumns / 2];
    while (piece.left > 0) {
      barrier_wait(&tail.query_full[buffer], query_parity);
      const uint32_t query_address = shared_address(queries + buffer * Shape::kQueryBytes);
      float2 weight[kWeightsInRegisters ? kColumns / 8 : 1] = {};  // of columns 8 j + 2 t and the next
      const float2* const weight_at = reinterpret_cast<const float2*>(&tail.weights[buffer][2 * t]);
      if constexpr (kWeightsInRegisters) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) weight[j] = weight_at[4 * j];
      }
      const auto sum_of = [&](int token) {
        HeadSums sums;
        add_heads<kHeads>(sums, d + token * (kHeads / 2), [&](int j) {
          if constexpr (kWeightsInRegisters) return weight[token * (kHeads / 8) + j];
          return weight_at[4 * (token * (kHeads / 8) + j)];
        });
        return sums.rows();
      };
      const int64_t end = piece.tile + tiles_here(piece);
      for (int64_t tile = piece.tile; tile < end; ++tile) {
        if (turn == group) {
          barrier_wait(&tail.full[stage], parity);
          const std::byte* const keys = ring + Shape::kStageBytes * stage;
          const int present = tail.present[stage];
          const TilePlace place = place_of_tile(args, first_column, tile);
          const int my_row = row + 8 * (t & 1);  // the row whose sum this lane ends with
          const int64_t entry = place.entry + my_row;
          float scale = 1.0f;
          if constexpr (kKeys == ElementFormat::kBf16) {
            const uint32_t key_address = shared_address(keys);
            if constexpr (Shape::kTakeTurns) barrier_wait(&tail.turn[group], turn_parity);
            wgmma_begin();
#pragma unroll
            for (int s = 0; s < 8; ++s) {
              wgmma_shared<kColumns, kElement>(d, wgmma_tile(key_address + (s / 4) * (kTileSlots * 128) + (s % 4) * 32),
                                               wgmma_tile(query_address + (s / 4) * (kColumns * 128) + (s % 4) * 32), s);
            }
            wgmma_commit();
            if constexpr (Shape::kTakeTurns) {
              if (lane == 0) barrier_arrive(&tail.turn[1 - group]);
            }
            wgmma_wait<0>();
            if (lane == 0) barrier_arrive(&tail.empty[stage]);
          } else {
            uint32_t a[8][4];
            read_keys<kKeys>(keys, row, t, a);
            if constexpr (kKeys == ElementFormat::kFp8) {
              scale = *reinterpret_cast<const float*>(keys + Traits::kTileBytes + my_row * 4);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&tail.empty[stage]);
#pragma unroll
            for (int s = 0; s < 8; ++s) wgmma_operand(a[s]);
            if constexpr (Shape::kTakeTurns) barrier_wait(&tail.turn[group], turn_parity);
            wgmma_begin();
#pragma unroll
            for (int s = 0; s < 8; ++s) {
              wgmma_registers<kColumns, kElement>(
                  d, a[s], wgmma_tile(query_address + (s / 4) * (kColumns * 128) + (s % 4) * 32), s);
            }
            wgmma_commit();
            if constexpr (Shape::kTakeTurns) {
              if (lane == 0) barrier_arrive(&tail.turn[1 - group]);
            }
            wgmma_wait<0>();
          }
          turn_parity ^= 1;
          clear_padding<kColumns, kHeads>(d, args.heads);
          const bool in_tile = my_row < place.slots;
          const auto finish = [&](int token, float score) {
            if (!in_tile || entry >= tail.limits[buffer][token]) return;
            const int64_t at = (piece.run.token + token) * args.score_stride + entry;
            if (present > 0) {
              write_score(args, at, score);
            } else {
              write_absent(args, at, present == 0);
            }
          };
          if constexpr (kTokens == 1) {
            float score = sum_quad(sum_of(0));
            if constexpr (kKeys == ElementFormat::kFp8) score *= scale;
            if (t < 2) finish(0, score);
          } else {
#pragma unroll
            for (int token = 0; token < kTokens; token += 2) {
              float score = sum_quad_two(sum_of(token), sum_of(token + 1));
              if constexpr (kKeys == ElementFormat::kFp8) score *= scale;
              finish(token + t / 2, score);
            }
          }
        }
        turn = turn + 1 == Shape::kGroups ? 0 : turn + 1;
        if (++stage == stages) {
          stage = 0;
          parity ^= 1;
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&tail.query_empty[buffer]);
      buffer ^= 1;
      query_parity ^= buffer == 0 ? 1 : 0;
      next_run<kTokens>(args, piece);
    }
  }
#endif
}

// Host: launches the kernel for this shape; the ring fills the block's shared memory up to ring_stages_max.
template <ElementFormat kKeys, int kHeads, int kTokens>
absl::Status launch_sm90(const Plan& plan, const IndexLogitsArgs& args, const CUtensorMap& key_map, cudaStream_t stream) {
  using Shape = Sm90Shape<kKeys, kHeads, kTokens>;
  static_assert(Shape::stages_in(227 * 1024, kRingStagesMax) >= 4, "the ring needs at least two tiles a scoring group");
  const int stages = Shape::stages_in(plan.shared_limit, plan.ring_stages_max < kRingStagesMax ? plan.ring_stages_max : kRingStagesMax);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(plan.blocks));
  shape.block = dim3(Shape::kThreads);
  shape.shared_bytes = static_cast<size_t>(Shape::shared_bytes(stages));
  return launch("index_logits_cuda", index_logits_sm90_kernel<kKeys, kHeads, kTokens>, shape, stream, args, key_map, stages);
}

template <ElementFormat kKeys>
absl::Status launch_sm90_of(const Plan& plan, const IndexLogitsArgs& args, const CUtensorMap& key_map, cudaStream_t stream) {
#define NEEDLE_SHAPE(HEADS, TOKENS) \
  if (plan.heads == HEADS && plan.tokens == TOKENS) return launch_sm90<kKeys, HEADS, TOKENS>(plan, args, key_map, stream);
  NEEDLE_SHAPE(64, 1)
  NEEDLE_SHAPE(64, 2)
  NEEDLE_SHAPE(64, 4)
  NEEDLE_SHAPE(32, 2)
  NEEDLE_SHAPE(32, 4)
  NEEDLE_SHAPE(32, 8)
  NEEDLE_SHAPE(128, 1)
  NEEDLE_SHAPE(128, 2)
#undef NEEDLE_SHAPE
  return absl::InternalError("index_logits_cuda: no wgmma kernel of this shape");
}

}  // namespace needle::logits
