// index_logits on sm_90a: wgmma, one persistent block a multiprocessor, three or four warpgroups.
//
// Warpgroup 0 feeds: its first warp streams key tiles into a ring (tensor maps where the matrix unit reads them as they are,
// so that they arrive swizzled; bulk copies where they are converted), the other three turn the next run's queries into the
// matrix operand. The others score: ring stage i belongs to scoring group i % kGroups, which multiplies 64 keys (rows) by all
// columns (tokens x padded heads) and reduces its accumulators while another one multiplies.
//
// What must stay true:
//  1. The three roles walk the same Piece and so agree on every ring and query-buffer index without talking.
//  2. A ring stage is free again once its four scoring warps have arrived; a query buffer once all scoring
//     warps have.
//  3. A ring stage belongs to one scoring group for good. Were it handed around, a group that is a whole ring ahead would
//     take the phase before for its own, as a barrier tells phases apart by parity alone.
//  4. One wgmma of all columns a step: a column's sum does not depend on how many columns there are.
//  5. A warp gives back what it has read by barrier_arrive_warp(). On `turn` lane 0 arrives alone: a turn orders multiplications
//     and no memory.
//  6. A tile is asked for only once all but the last `in_flight` before it have come: one queue for all of memory serves blocks
//     unevenly where it is long, and whatever else is read waits in it.
//  7. Between a multiplication's start and its end nothing is called and nothing branches around it: the compiler would wait.
//
// Rejected, with figures in docs/kernels-performance.md: mma.sync (80 % of the matrix rate); bf16 queries read by threads
// instead of by tensor map (their loads wait behind the ring's, 30 us a start with four tokens); deeper rings; keys of
// fp8 and fp4 through shared memory a second time; converted fp8 keys by tensor map, read without bank conflicts.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "kernels/index_logits_device.cuh"
#include "kernels/launch.cuh"
#include "kernels/wgmma.cuh"

namespace needle::logits {

inline constexpr int kSm90LoaderThreads = 96;

template <int kHeads, int kTokens, int kStagesMax>
struct alignas(16) Sm90Control {
  uint64_t full[kStagesMax];
  uint64_t empty[kStagesMax];
  uint64_t query_full[2];
  uint64_t query_empty[2];
  uint64_t turn[2];
  int64_t sums[20];
  Piece piece;
  int32_t present[kStagesMax];  // 1: the tile is there; 0: its page is absent; -1: past the page table
  alignas(16) float weights[2][WeightLayout<kHeads>::kToken * kTokens];
  int32_t limits[2][kTokens];  // entries of the chunk that each token of the run sees
};

template <ElementFormat kKeys, MmaElement kMma, int kHeads, int kTokens>
struct Sm90Shape {
  static constexpr int kColumns = kHeads * kTokens;
  static constexpr MmaElement kElement = kMma;
  // Keys that the matrix unit reads where the copy engine put them, 128 bytes a row in its swizzle; others pass through
  // registers, where they are converted.
  static constexpr bool kKeysAreOperand = kKeys == ElementFormat::kBf16 || kMma == MmaElement::kE4m3;
  static constexpr bool kScaled = kKeys == ElementFormat::kFp8;  // one fp32 a key, multiplied in at the end
  // Keys that are converted: a tile's multiplications run while the tile before is reduced, in a second set of accumulators,
  // and while the tile after is read.
  static constexpr bool kPipelined = !kKeysAreOperand && kColumns == 64;
  static constexpr int kSteps = kMma == MmaElement::kE4m3 ? 4 : 8;  // of 32 bytes each
  static constexpr int kQueryBytes = kColumns * 32 * kSteps;
  // A tile's values; its scales follow at once, or behind the ring where tiles must begin on a multiple of 1,024.
  static constexpr int kScaleBytes = kScaled && kKeysAreOperand ? kTileSlots * 4 : 0;
  static constexpr int kStageBytes = kScaleBytes > 0 ? KeyTraits<kKeys>::kTileBytes : KeyTraits<kKeys>::kStageBytes;
  // Scoring groups of one warpgroup. Up to 128 columns memory rules, and what counts is tiles in the making: three groups (four
  // leave each too few registers for keys that are converted). With 256 columns the matrix unit rules, and shared memory's
  // bandwidth beside it: one wide multiplication by each of two groups, weights in registers, and turns, as two groups that
  // start together would multiply together and reduce together and leave the matrix unit idle meanwhile.
  static constexpr bool kTakeTurns = kColumns == 256;
  static constexpr int kGroups = kTakeTurns ? 2 : 3;
  static constexpr bool kWeightsInRegisters = kGroups < 4;
  static constexpr int kThreads = 128 * (1 + kGroups);
  static constexpr int kLoaderRegisters = kGroups == 2 ? 40 : 56;
  static constexpr int kScoringRegisters = kGroups == 2 ? 232 : 152;
  static constexpr int kStagesMax = kColumns == 256 ? 8 : 24;  // every byte counts beside 128 KiB of queries
  using Control = Sm90Control<kHeads, kTokens, kStagesMax>;
  // Shared memory: barriers and small things first, then the queries' operand twice and the ring, whose tiles begin on 1,024.
  static constexpr int kControlBytes = static_cast<int>((sizeof(Control) + 1023) / 1024 * 1024);
  static constexpr int64_t shared_bytes(int stages) {
    return kControlBytes + 2 * int64_t{kQueryBytes} + int64_t{kStageBytes + kScaleBytes} * stages;
  }
  static constexpr int stages_in(int64_t limit, int most) {
    const int64_t fit = (limit - shared_bytes(0)) / (kStageBytes + kScaleBytes);
    const int stages = static_cast<int>(fit < most ? fit : most) / kGroups * kGroups;  // as many for each group
    return stages < kGroups ? kGroups : stages;
  }
};

// How many entries each query of the run sees.
template <int kTokens>
__device__ __forceinline__ void load_limits(const IndexLogitsArgs& args, const Run& run, int thread, int32_t* limits) {
  if (thread < kTokens) limits[thread] = thread < run.count ? visible_entries(args, run.token + thread) : 0;
}

// The queries of a run as B operand: row n = token x kHeads + head, 128-byte swizzle, in two tiles of 64 columns. bf16
// queries for bf16 keys come by tensor map; everything else is converted here, and permuted as KeyTraits says. Sixteen
// threads share a row, eight elements each; all loads of a batch are in flight together.
template <ElementFormat kKeys, int kHeads, int kTokens, QueryElement kQuery>
__device__ __forceinline__ void convert_queries(const IndexLogitsArgs& args, const Run& run, int thread, std::byte* operand,
                                                float* weights) {
  using Traits = KeyTraits<kKeys>;
  constexpr int kColumns = kHeads * kTokens;
  constexpr int kRowsAtOnce = kSm90LoaderThreads / 16;
  constexpr int kBatch = kColumns == 256 ? 2 : 4;  // more would not fit the registers that scoring leaves
  const int chunk = thread % 16;
#pragma unroll 1
  for (int n0 = thread / 16; n0 < kColumns; n0 += kBatch * kRowsAtOnce) {  // a warp has two rows: it stays whole
    QueryChunk raw[kBatch];
    float weight[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int n = n0 + i * kRowsAtOnce;
      const int token = n / kHeads, head = n % kHeads;
      const int64_t vector = static_cast<int64_t>(run.token + token) * args.heads + head;
      raw[i] = QueryChunk{};
      weight[i] = 0.0f;
      if (n < kColumns && token < run.count && head < args.heads) {
        raw[i] = query_chunk<kQuery>(args, vector, chunk);
        if (chunk == 0) weight[i] = __ldg(args.head_weights + vector);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int n = n0 + i * kRowsAtOnce;
      QueryScale scale{1.0f, 1.0f};
      if constexpr (Traits::kHalf) {
        float largest = 0;
#pragma unroll
        for (int p = 0; p < 4; ++p) largest = larger_finite(largest, pair_of_chunk<kQuery>(raw[i], p));
        for (int step = 8; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
        scale = scale_of_largest(largest);
      }
      if (n < kColumns) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          // bf16 keys keep the natural order: their tiles are read by the matrix unit itself.
          const int at = kKeys == ElementFormat::kBf16 ? 4 * chunk + p : Traits::pair_place(4 * chunk + p);
          std::byte* const to = operand + at / 32 * (kColumns * 128) + n * 128 + ((at / 4 % 8) ^ (n & 7)) * 16 + at % 4 * 4;
          *reinterpret_cast<uint32_t*>(to) = query_word<Traits::kHalf>(pair_of_chunk<kQuery>(raw[i], p), scale.scale);
        }
        if (chunk == 0) weights[WeightLayout<kHeads>::place(n)] = weight[i] * scale.inverse;
      }
    }
  }
}

template <ElementFormat kKeys, MmaElement kMma, int kHeads, int kTokens>
__global__ void __launch_bounds__(Sm90Shape<kKeys, kMma, kHeads, kTokens>::kThreads, 1)
    index_logits_sm90_kernel(const __grid_constant__ IndexLogitsArgs args, const __grid_constant__ CUtensorMap key_map,
                             const __grid_constant__ CUtensorMap query_map, const GroupMaxima maxima, int stages, int in_flight,
                             CachePriority read_once) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = Sm90Shape<kKeys, kMma, kHeads, kTokens>;
  using Traits = KeyTraits<kKeys>;
  constexpr int kColumns = Shape::kColumns;
  extern __shared__ __align__(1024) std::byte shared[];
  auto& control = *reinterpret_cast<typename Shape::Control*>(shared);
  std::byte* const queries = shared + Shape::kControlBytes;
  std::byte* const ring = queries + 2 * Shape::kQueryBytes;
  float* const scales = reinterpret_cast<float*>(ring + Shape::kStageBytes * stages);  // kTileSlots a stage

  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 32) {  // warp 0 asks for lengths meanwhile
    for (int s = 0; s < stages; ++s) {
      barrier_init(&control.full[s], 1);
      barrier_init(&control.empty[s], 4 * kWarpArrivals);
    }
    for (int b = 0; b < 2; ++b) {
      barrier_init(&control.query_full[b], kSm90LoaderThreads);
      barrier_init(&control.query_empty[b], 4 * Shape::kGroups * kWarpArrivals);
      barrier_init(&control.turn[b], 4);
    }
    barrier_init_done();
    if (Shape::kKeysAreOperand) {
      tensor_map_prefetch(&key_map);
      tensor_map_prefetch(&query_map);
    }
  }
  const int first_column = static_cast<int>(args.entry_begin) / args.keys.slots_per_page;
  // Where the page id of a piece's tile stands; nullptr past its end in this run.
  const auto page_place_of = [&](const Piece& piece, int tile) {
    const bool mine = tile < piece.tile + tiles_here(piece);
    return mine ? page_place(args, piece.run.row, place_of_tile(args, first_column, tile).column) : nullptr;
  };
  Piece piece;
  bool hint_holds = false;
  int32_t hinted_page = kNoPage;  // of the feeding warp's first tiles
  if (RowLengths::fits(args)) {
    const RowLengths hint(args);
    piece = hint.piece(args);
    const int32_t* const place = warp == 0 ? page_place_of(piece, piece.tile + lane) : nullptr;
    wait_for_previous_kernel();
    let_next_kernel_start();  // only now: select_by_maxima reads lengths before it waits
    hinted_page = page_now_at(args, place);
    const RowLengths lengths(args);
    __syncthreads();  // what the block has set up is there
    hint_holds = lengths.same(hint);
    if (!hint_holds) piece = lengths.piece(args);
  } else {
    wait_for_previous_kernel();
    let_next_kernel_start();
    piece = find_piece<kTokens, Shape::kThreads>(args, control.sums, &control.piece);
  }
  if (piece.left == 0) return;

  if (warp < 4) {
    keep_registers_at_most<Shape::kLoaderRegisters>();
    if (warp == 0) {
      // Keys that several runs read (prefill) stay in L2 as anything does; keys read once make room for scores.
      const uint64_t policy = args.query_row == nullptr ? cache_policy(read_once) : cache_evict_normal();
      // Lane l feeds tile l of every 32. A few lanes wait, announce and copy side by side: one alone would take longer to
      // issue a tile of fp8 than memory to deliver it. All 32 at once would drain the ring before they refill it.
      // Never more than there are stages. One by one for racecheck: lanes side by side issue their copies in turn and together, so
      // that the tool takes each for a copy by lanes that have not waited for its stage.
      constexpr int kTogether = kWarpArrivals == 1 ? Shape::kGroups : 1;
      int stage = 0;        // of the tile at `base`
      uint32_t parity = 1;  // the ring starts empty
      while (piece.left > 0) {
        const int end = piece.tile + tiles_here(piece);
        int32_t next_page = hint_holds ? hinted_page : page_at(args, page_place_of(piece, piece.tile + lane));
        hint_holds = false;
        for (int base = piece.tile; base < end; base += 32) {
          const int32_t page = next_page;
          next_page = page_at(args, page_place_of(piece, base + 32 + lane));
          const int here = min(end - base, 32);
          const int my_stage = (stage + lane) % stages;
          const uint32_t my_parity = parity ^ (static_cast<uint32_t>((stage + lane) / stages) & 1u);
          for (int first = 0; first < here; first += kTogether) {
            if (lane / kTogether == first / kTogether && lane < here) {
              const TilePlace place = place_of_tile(args, first_column, base + lane);
              std::byte* const to = ring + Shape::kStageBytes * my_stage;
              uint64_t* const full = &control.full[my_stage];
              const int earlier = my_stage - in_flight;
              barrier_wait(&control.full[earlier < 0 ? earlier + stages : earlier], earlier < 0 ? my_parity : my_parity ^ 1u);
              barrier_wait(&control.empty[my_stage], my_parity);
              if (page < 0) {
                control.present[my_stage] = piece.run.row >= 0 && place.column < args.pages.pages_per_row ? 0 : -1;
                barrier_arrive(full);
              } else {
                control.present[my_stage] = 1;
                if constexpr (kMma == MmaElement::kE4m3) {
                  const uint32_t value_bytes = static_cast<uint32_t>(min(kTileSlots, args.keys.slots_per_page)) * 128;
                  const uint32_t scale_bytes = static_cast<uint32_t>((place.slots * 4 + 15) / 16 * 16);
                  const std::byte* from = args.keys.base + page * args.keys.page_stride + args.keys.slots_per_page * 128;
                  barrier_arrive_expect(full, value_bytes + scale_bytes);
                  tensor_copy(to, &key_map, 0, place.slot, page, full, policy);
                  bulk_copy(scales + my_stage * kTileSlots, from + place.slot * 4, scale_bytes, full, policy);
                } else if constexpr (kKeys == ElementFormat::kBf16) {
                  const uint32_t half_bytes = static_cast<uint32_t>(min(kTileSlots, args.keys.slots_per_page)) * 128;
                  barrier_arrive_expect(full, 2 * half_bytes);
                  tensor_copy(to, &key_map, 0, place.slot, page, full, policy);
                  tensor_copy(to + kTileSlots * 128, &key_map, 64, place.slot, page, full, policy);
                } else {
                  constexpr int kRow = Traits::kTileBytes / kTileSlots;
                  const std::byte* from = args.keys.base + page * args.keys.page_stride;
                  if (args.keys.slots_per_page == kTileSlots) {  // scales follow values there as they do here
                    barrier_arrive_expect(full, Shape::kStageBytes);
                    bulk_copy(to, from, Shape::kStageBytes, full, policy);
                  } else {
                    const uint32_t scale_bytes = static_cast<uint32_t>((place.slots * 4 + 15) / 16 * 16);
                    const uint32_t value_bytes = static_cast<uint32_t>(place.slots * kRow);
                    barrier_arrive_expect(full, value_bytes + scale_bytes);
                    bulk_copy(to, from + place.slot * kRow, value_bytes, full, policy);
                    bulk_copy(to + Traits::kTileBytes, from + args.keys.slots_per_page * kRow + place.slot * 4, scale_bytes, full, policy);
                  }
                }
              }
            }
            __syncwarp();
          }
          parity ^= static_cast<uint32_t>((stage + here) / stages) & 1u;
          stage = (stage + here) % stages;
        }
        next_run<kTokens>(args, piece);
      }
    } else {
      const int thread = static_cast<int>(threadIdx.x) - 32;
      const auto load_queries = [&](const Run& run, int buffer) {
        std::byte* const operand = queries + buffer * Shape::kQueryBytes;
        float* const weights = control.weights[buffer];
        if (Shape::kKeysAreOperand && (kMma == MmaElement::kE4m3 || args.q_element == QueryElement::kBf16)) {
          if (thread == 0) {
            expect_bytes(&control.query_full[buffer], Shape::kQueryBytes);
            for (int half = 0; half < Shape::kSteps / 4; ++half) {
              tensor_copy(operand + half * (kColumns * 128), &query_map, 64 * half, 0, run.token, &control.query_full[buffer],
                          cache_evict_normal());
            }
          }
          load_limits<kTokens>(args, run, kSm90LoaderThreads - 1 - thread, control.limits[buffer]);  // where no thread has a weight, or few
          for (int n = thread; n < kColumns; n += kSm90LoaderThreads) {
            const int token = n / kHeads, head = n % kHeads;
            weights[WeightLayout<kHeads>::place(n)] =
                token < run.count && head < args.heads
                    ? __ldg(args.head_weights + static_cast<int64_t>(run.token + token) * args.heads + head)
                    : 0.0f;
          }
          barrier_arrive(&control.query_full[buffer]);
          return;
        }
        load_limits<kTokens>(args, run, thread, control.limits[buffer]);
        if (args.q_element == QueryElement::kBf16) {
          convert_queries<kKeys, kHeads, kTokens, QueryElement::kBf16>(args, run, thread, operand, weights);
        } else if (args.q_element == QueryElement::kFp8) {
          convert_queries<kKeys, kHeads, kTokens, QueryElement::kFp8>(args, run, thread, operand, weights);
        } else {
          convert_queries<kKeys, kHeads, kTokens, QueryElement::kFp4>(args, run, thread, operand, weights);
        }
        shared_written();
        barrier_arrive(&control.query_full[buffer]);
      };
      int buffer = 0;
      uint32_t parity = 1;
      while (piece.left > 0) {
        barrier_wait(&control.query_empty[buffer], parity);
        load_queries(piece.run, buffer);
        buffer ^= 1;
        parity ^= buffer == 0 ? 1 : 0;
        next_run<kTokens>(args, piece);
      }
    }
  } else {
    take_registers<Shape::kScoringRegisters>();
    const int group = warp / 4 - 1;  // scores what arrives in ring stages group, group + kGroups ..
    const int t = lane % 4;
    const int row = 16 * (warp % 4) + lane / 4;  // and row + 8
    const int my_row = row + 8 * (t & 1);        // the one whose sum this lane ends with
    const uint32_t ring_tile = wgmma_tile_start(shared_address(ring));
    int stage = group, buffer = 0;
    int ahead = group;  // tiles of the other groups before this one's next
    uint32_t parity = 0, query_parity = 0;
    uint32_t turn_parity = group == 0 ? 1 : 0;  // the first turn is group 0's
    float d[Shape::kPipelined ? 2 : 1][kColumns / 2];
    LeftOut left_out;
    while (piece.left > 0) {
      barrier_wait(&control.query_full[buffer], query_parity);
      const uint32_t query_tile = __shfl_sync(0xFFFFFFFFu, wgmma_tile_start(shared_address(queries + buffer * Shape::kQueryBytes)), 0);
      float4 weight[Shape::kWeightsInRegisters ? kColumns / 16 : 1] = {};
      if constexpr (Shape::kWeightsInRegisters) {
#pragma unroll
        for (int i = 0; i < kColumns / 16; ++i) {
          weight[i] = WeightLayout<kHeads>::of(control.weights[buffer], i / (kHeads / 16), t)[i % (kHeads / 16)];
        }
      }
      const int limit = control.limits[buffer][0];  // of the only token, where there is one
      float* const run_scores = args.scores + piece.run.token * args.score_stride;
      const int end = piece.tile + tiles_here(piece);
      int tile = piece.tile + ahead;
      struct Tile {
        int index, present;
        float scale;  // of the key whose score this lane ends with
      };
      const auto next_stage = [&] {
        stage += Shape::kGroups;
        if (stage >= stages) {
          stage = group;
          parity ^= 1;
        }
      };
      // The largest of the warp's 16 scores of a token; of two tokens where `token` is the lane's own.
      const auto note_maxima = [&](int token, uint32_t order, const TilePlace& place) {
        uint32_t largest;
        if constexpr (kTokens == 1) {
          largest = __reduce_max_sync(0xFFFFFFFFu, order);
        } else {
          const uint32_t of_first = __reduce_max_sync(0xFFFFFFFFu, t < 2 ? order : 0u);
          const uint32_t of_second = __reduce_max_sync(0xFFFFFFFFu, t < 2 ? 0u : order);
          largest = t < 2 ? of_first : of_second;
        }
        // All four groups of the tile, so that the last vector of four is complete; of a token that sees the tile.
        if ((kTokens == 1 ? lane != 0 : lane != 0 && lane != 2)) return;
        if (place.entry >= (kTokens == 1 ? limit : control.limits[buffer][token])) return;
        maxima.orders[(piece.run.token + token) * maxima.stride + (place.entry + 16 * (warp % 4)) / kMaximaGroup] = largest;
      };
      // The scores of a tile whose products are in `products`.
      const auto reduce = [&](float(&products)[kColumns / 2], const Tile& done) {
        const auto sum_of = [&](int token) {
          HeadSums sums;
          add_heads<kHeads>(sums, products + token * (kHeads / 2), [&](int j) {
            if constexpr (Shape::kWeightsInRegisters) return weight[token * (kHeads / 16) + j / 2];
            return WeightLayout<kHeads>::of(control.weights[buffer], token, t)[j / 2];
          });
          return sums.rows();
        };
        clear_padding<kColumns, kHeads>(products, args.heads);
        const TilePlace place = place_of_tile(args, first_column, done.index);
        const bool in_tile = my_row < place.slots;
        const int entry = place.entry + my_row;
        const auto finish = [&](int token, float score) {
          const bool visible = in_tile && entry < (kTokens == 1 ? limit : control.limits[buffer][token]);
          // Of converted keys the next tile's multiplication is in flight here, and nothing may branch around it.
          if constexpr (Shape::kKeysAreOperand) {
            if (maxima.orders != nullptr) note_maxima(token, visible && done.present > 0 ? order_bits_of(score) : 0u, place);
          }
          if (!visible || (kTokens == 1 && t >= 2)) return;  // two lanes hold the same score of an only token
          float* const to = run_scores + token * args.score_stride + entry;
          if (done.present > 0) {
            write_score(to, score, left_out);
          } else {
            write_absent(to, done.present == 0, left_out);
          }
        };
        if constexpr (kTokens == 1) {
          float score = sum_quad(sum_of(0));
          if constexpr (Shape::kScaled) score *= done.scale;
          finish(0, score);
        } else {
#pragma unroll
          for (int token = 0; token < kTokens; token += 2) {
            float score = sum_quad_two(sum_of(token), sum_of(token + 1));
            if constexpr (Shape::kScaled) score *= done.scale;
            finish(token + t / 2, score);
          }
        }
      };
      if constexpr (Shape::kKeysAreOperand) {
        for (; tile < end; tile += Shape::kGroups) {
          barrier_wait(&control.full[stage], parity);
          Tile now{tile, control.present[stage], 1.0f};
          if constexpr (Shape::kScaled) now.scale = scales[stage * kTileSlots + my_row];
          const uint32_t key_tile = __shfl_sync(0xFFFFFFFFu, ring_tile + static_cast<uint32_t>(Shape::kStageBytes / 16 * stage), 0);
          if constexpr (Shape::kTakeTurns) barrier_wait(&control.turn[group], turn_parity);
          wgmma_begin();
#pragma unroll
          for (int s = 0; s < Shape::kSteps; ++s) {
            wgmma_shared<kColumns, Shape::kElement>(d[0], wgmma_tile_at(key_tile, (s / 4) * (kTileSlots * 128) + (s % 4) * 32),
                                                    wgmma_tile_at(query_tile, (s / 4) * (kColumns * 128) + (s % 4) * 32), s);
          }
          wgmma_commit();
          if (Shape::kTakeTurns && lane == 0) barrier_arrive(&control.turn[1 - group]);
          wgmma_wait<0>();
          wgmma_result(d[0]);
          barrier_arrive_warp(&control.empty[stage]);
          turn_parity ^= 1;
          next_stage();
          reduce(d[0], now);
        }
      } else {
        uint32_t a[8][4];
        StoredRows<kKeys> rows;
        const auto fetch = [&](int index) {
          barrier_wait(&control.full[stage], parity);
          const std::byte* const keys = ring + Shape::kStageBytes * stage;
          Tile now{index, control.present[stage], 1.0f};
          rows = load_rows<kKeys>(keys, row, t);
          if constexpr (Shape::kScaled) now.scale = *reinterpret_cast<const float*>(keys + Traits::kTileBytes + my_row * 4);
          barrier_arrive_warp(&control.empty[stage]);
          next_stage();
          return now;
        };
        const auto multiply = [&](float(&products)[kColumns / 2]) {
          convert_rows<kKeys>(rows, a);
#pragma unroll
          for (int s = 0; s < 8; ++s) wgmma_operand(a[s]);
          if constexpr (Shape::kTakeTurns) barrier_wait(&control.turn[group], turn_parity);
          wgmma_begin();
#pragma unroll
          for (int s = 0; s < 8; ++s) {
            wgmma_registers<kColumns, Shape::kElement>(products, a[s], wgmma_tile_at(query_tile, (s / 4) * (kColumns * 128) + (s % 4) * 32),
                                                       s);
          }
          wgmma_commit();
          if (Shape::kTakeTurns && lane == 0) barrier_arrive(&control.turn[1 - group]);
          turn_parity ^= 1;
        };
        if constexpr (!Shape::kPipelined) {
          for (; tile < end; tile += Shape::kGroups) {
            const Tile now = fetch(tile);
            multiply(d[0]);
            wgmma_wait<0>();
            wgmma_result(d[0]);
            reduce(d[0], now);
          }
        } else if (tile < end) {
          // The multiplication in flight meets no branch but the loop's own: the compiler would end it there.
          Tile now = fetch(tile);
          multiply(d[0]);
          tile += Shape::kGroups;
          for (; tile + Shape::kGroups < end; tile += 2 * Shape::kGroups) {
            const Tile next = fetch(tile);
            wgmma_wait<0>();
            wgmma_result(d[0]);
            multiply(d[1]);
            reduce(d[0], now);
            now = fetch(tile + Shape::kGroups);
            wgmma_wait<0>();
            wgmma_result(d[1]);
            multiply(d[0]);
            reduce(d[1], next);
          }
          wgmma_wait<0>();
          wgmma_result(d[0]);
          reduce(d[0], now);
          if (tile < end) {
            now = fetch(tile);
            multiply(d[0]);
            wgmma_wait<0>();
            wgmma_result(d[0]);
            reduce(d[0], now);
            tile += Shape::kGroups;
          }
        }
      }
      ahead = tile - end;
      left_out.report(args.report);
      barrier_arrive_warp(&control.query_empty[buffer]);
      buffer ^= 1;
      query_parity ^= buffer == 0 ? 1 : 0;
      next_run<kTokens>(args, piece);
    }
  }
#endif
}

// Host: launches the kernel for this shape; the ring fills the block's shared memory up to ring_stages_max.
template <ElementFormat kKeys, MmaElement kMma, int kHeads, int kTokens>
absl::Status launch_sm90(const Plan& plan, const IndexLogitsArgs& args, const TensorMaps& maps, cudaStream_t stream) {
  using Shape = Sm90Shape<kKeys, kMma, kHeads, kTokens>;
  // 227 KiB is what sm_90 gives a block. Six tiles of bf16 are three in the making for each of the two groups.
  static_assert(Shape::stages_in(227 * 1024, Shape::kStagesMax) >= (Shape::kGroups == 2 ? 6 : Shape::kGroups),
                "the ring has become too short");
  const int most = plan.ring_stages_max < Shape::kStagesMax ? plan.ring_stages_max : Shape::kStagesMax;
  const int stages = Shape::stages_in(plan.shared_limit, most);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(plan.blocks));
  shape.block = dim3(Shape::kThreads);
  shape.shared_bytes = static_cast<size_t>(Shape::shared_bytes(stages));
  return launch("index_logits_cuda", index_logits_sm90_kernel<kKeys, kMma, kHeads, kTokens>, shape, stream, args, maps.keys, maps.queries,
                plan.maxima, stages, std::clamp(plan.tiles_in_flight, Shape::kGroups, stages), plan.read_once);
}

template <ElementFormat kKeys, MmaElement kMma>
absl::Status launch_sm90_of(const Plan& plan, const IndexLogitsArgs& args, const TensorMaps& maps, cudaStream_t stream) {
#define NEEDLE_SHAPE(HEADS, TOKENS) \
  if (plan.heads == HEADS && plan.tokens == TOKENS) return launch_sm90<kKeys, kMma, HEADS, TOKENS>(plan, args, maps, stream);
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
