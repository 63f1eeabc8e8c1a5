// What both index_logits kernels share: how the work is cut, how a query is read, how a score is finished and written.
//
// What must stay true:
//  1. A *tile* is up to 64 neighbouring slots of one page; a *run* is up to kTokens neighbouring queries of one page-table
//     row, scored together against each of its tiles. The work is the list of all (run, tile), in order; block b of G
//     takes a piece of total / G tiles (or one more), which it finds from device-side lengths by itself. No grid and
//     no launch depends on a length.
//  2. A score is a function of q, weights and one key: 8 steps of 16 in the matrix unit, then in each lane the heads in
//     ascending order in two chains (even and odd columns), then lanes (0 + 1) + (2 + 3). Nothing else enters.
//  3. Only scores of visible entries are written; a tile past every visible length of its run is not loaded.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/bulk_copy.cuh"
#include "kernels/index_logits.h"
#include "kernels/index_logits_launch.h"
#include "kernels/launch.cuh"

namespace needle::logits {

// ---------------------------------------------------------------------------------------------------------------
// Work.

__device__ __forceinline__ uint64_t cache_policy(CachePriority priority) {
  return priority == CachePriority::kNormal      ? cache_evict_normal()
         : priority == CachePriority::kUnchanged ? cache_evict_unchanged()
                                                 : cache_evict_first();
}

struct Run {
  int token = 0;  // first query
  int count = 0;  // queries, 1..kTokens; 0: there are no more
  int row = 0;    // page-table row; -1 where query_row names none
  int tiles = 0;  // tiles up to the longest visible length of the run, within the chunk
};

__device__ __forceinline__ int row_of_query(const IndexLogitsArgs& args, int token) {
  return args.query_row != nullptr ? args.query_row[token] : token / args.queries_per_row;
}

// Entries of the chunk that a query sees which may see `visible` of its row.
__device__ __forceinline__ int entries_of_chunk(const IndexLogitsArgs& args, int visible) {
  // check_index_logits keeps entry_begin + entry_count within int32, and so is everything counted in entries or tiles.
  const int begin = static_cast<int>(args.entry_begin);
  return visible <= begin ? 0 : min(visible - begin, static_cast<int>(args.entry_count));
}
__device__ __forceinline__ int visible_entries(const IndexLogitsArgs& args, int token) {
  return entries_of_chunk(args, args.visible[token]);
}

__device__ __forceinline__ int tiles_of_entries(const IndexLogitsArgs& args, int entries) {
  const int slots = args.keys.slots_per_page;
  if (slots == kTileSlots) return (entries + kTileSlots - 1) >> 6;
  const int tiles_a_page = (slots + kTileSlots - 1) / kTileSlots;
  return entries / slots * tiles_a_page + (entries % slots + kTileSlots - 1) / kTileSlots;
}

// The run that begins at `token`; count 0 where `token` continues a run that began before it.
template <int kTokens>
__device__ __forceinline__ Run run_at(const IndexLogitsArgs& args, int token) {
  Run run;
  run.token = token;
  const int row = row_of_query(args, token);
  int end;  // first token after the run
  if (args.query_row == nullptr) {
    const int within = token % args.queries_per_row;
    if (within % kTokens != 0) return run;
    end = min(token + kTokens, token - within + args.queries_per_row);
  } else {
    if (token % kTokens != 0 && args.query_row[token - 1] == row) return run;
    end = (token / kTokens + 1) * kTokens;
  }
  end = min(end, args.query_count);
  int entries = visible_entries(args, token);
  int count = 1;
  for (; token + count < end; ++count) {
    if (args.query_row != nullptr && args.query_row[token + count] != row) break;
    entries = max(entries, visible_entries(args, token + count));
  }
  run.count = count;
  run.row = row >= 0 && row < args.pages.rows ? row : -1;
  run.tiles = tiles_of_entries(args, entries);
  return run;
}

// A block's piece of the work, walked run by run. Each role of the block walks its own copy.
struct Piece {
  Run run;
  int tile = 0;      // first tile of the run that belongs to the piece
  int64_t left = 0;  // tiles from there to the end of the piece, over all runs
};

__device__ __forceinline__ int tiles_here(const Piece& piece) {
  const int rest = piece.run.tiles - piece.tile;
  return rest < piece.left ? rest : static_cast<int>(piece.left);
}
// To the next run that has tiles. Call only after tiles_here() tiles were taken, while tiles are left.
template <int kTokens>
__device__ __forceinline__ void next_run(const IndexLogitsArgs& args, Piece& piece) {
  piece.left -= tiles_here(piece);
  piece.tile = 0;
  if (piece.left <= 0) return;
  do {
    piece.run = run_at<kTokens>(args, piece.run.token + piece.run.count);
  } while (piece.run.tiles == 0);
}

// This block's share of `total` tiles: [begin, end). Shares differ by one tile at most. One 32-bit division wherever the total
// fits, as a 64-bit one costs a block's start.
struct TileShare {
  int64_t begin, end;
};
__device__ __forceinline__ TileShare share_of_block(int64_t total) {
  const int64_t each = total <= 0x7FFFFFFF ? static_cast<int64_t>(static_cast<uint32_t>(total) / gridDim.x) : total / gridDim.x;
  const int64_t longer = total - each * gridDim.x;  // shares that take one more
  const int64_t begin = each * blockIdx.x + min(static_cast<int64_t>(blockIdx.x), longer);
  return {begin, begin + each + (blockIdx.x < longer ? 1 : 0)};
}

// find_piece() of up to kFewQueries over pages of whole tiles: every warp for itself, neighbouring queries a lane, no barrier.
// Tiles of all of them are below 2^31 then. A block begins 1 us earlier so.
inline constexpr int kFewQueries = 64;
struct FewQueries {
  int each, first, count;  // this lane's: [first, first + count)

  __device__ __forceinline__ explicit FewQueries(const IndexLogitsArgs& args)
      : each((args.query_count + 31) / 32), first(static_cast<int>(threadIdx.x % 32) * each), count(min(each, args.query_count - first)) {}
};
__device__ __forceinline__ bool has_few_queries(const IndexLogitsArgs& args) {
  return args.query_count <= kFewQueries && args.keys.slots_per_page % kTileSlots == 0;
}
__device__ __forceinline__ Piece piece_of_few(const Run (&runs)[kFewQueries / 32]) {
  const int lane = threadIdx.x % 32;
  int mine = 0;
#pragma unroll
  for (int i = 0; i < kFewQueries / 32; ++i) mine += runs[i].tiles;
  int up_to = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, up_to, step);
    if (lane >= step) up_to += other;
  }
  const TileShare share = share_of_block(__shfl_sync(0xFFFFFFFFu, up_to, 31));
  Piece piece;
  if (share.begin >= share.end) return piece;
  // The lane whose runs hold the share's first tile tells the others.
  const int begin = static_cast<int>(share.begin);
  const int owner = __ffs(static_cast<int>(__ballot_sync(0xFFFFFFFFu, up_to > begin))) - 1;
  Run run = runs[0];
  int tile = begin - (up_to - mine);
#pragma unroll
  for (int i = 1; i < kFewQueries / 32; ++i) {
    if (tile >= run.tiles) {
      tile -= run.tiles;
      run = runs[i];
    }
  }
  piece.run.token = __shfl_sync(0xFFFFFFFFu, run.token, owner);
  piece.run.count = __shfl_sync(0xFFFFFFFFu, run.count, owner);
  piece.run.row = __shfl_sync(0xFFFFFFFFu, run.row, owner);
  piece.run.tiles = __shfl_sync(0xFFFFFFFFu, run.tiles, owner);
  piece.tile = __shfl_sync(0xFFFFFFFFu, tile, owner);
  piece.left = share.end - share.begin;
  return piece;
}
template <int kTokens>
__device__ __forceinline__ Piece find_piece_of_few(const IndexLogitsArgs& args) {
  const FewQueries mine(args);
  Run runs[kFewQueries / 32];
#pragma unroll
  for (int i = 0; i < kFewQueries / 32; ++i) {
    if (i < mine.count) runs[i] = run_at<kTokens>(args, mine.first + i);
  }
  return piece_of_few(runs);
}

// The same of a query a row, in two steps: lengths, and the piece that follows from them. A block that begins while the kernel before
// still runs reads lengths as a hint, when they may still be written, and once more for good when it has ended: where they are the
// same it knows its piece at once, and its first page ids were asked for along with them. A launch takes 1 us less so. Both are read
// from L2, so that nothing old stays in L1; a hint that is wrong only asks for page ids that nobody uses.
struct RowLengths {
  int32_t visible[kFewQueries / 32];  // of this lane's queries

  __device__ __forceinline__ static bool fits(const IndexLogitsArgs& args) {
    return args.query_row == nullptr && args.queries_per_row == 1 && has_few_queries(args);
  }
  __device__ __forceinline__ explicit RowLengths(const IndexLogitsArgs& args) {
    const FewQueries mine(args);
#pragma unroll
    for (int i = 0; i < kFewQueries / 32; ++i) {
      visible[i] = 0;
      if (i < mine.count) visible[i] = load_now(args.visible + mine.first + i);
    }
  }
  __device__ __forceinline__ bool same(const RowLengths& other) const {
    bool same = true;
#pragma unroll
    for (int i = 0; i < kFewQueries / 32; ++i) same = same && visible[i] == other.visible[i];
    return __all_sync(0xFFFFFFFFu, same);
  }
  __device__ __forceinline__ Piece piece(const IndexLogitsArgs& args) const {
    const FewQueries mine(args);
    Run runs[kFewQueries / 32];
#pragma unroll
    for (int i = 0; i < kFewQueries / 32; ++i) {
      const int token = mine.first + i;
      runs[i] = {token, 1, token < args.pages.rows ? token : -1, tiles_of_entries(args, entries_of_chunk(args, visible[i]))};
    }
    return piece_of_few(runs);
  }
};

// All threads of the block: finds this block's piece. `sums` is one int64 a warp, `found` where the answer lands.
template <int kTokens, int kThreads>
__device__ __forceinline__ Piece find_piece(const IndexLogitsArgs& args, int64_t* sums, Piece* found) {
  if (has_few_queries(args)) {
    __syncthreads();  // as below: what the block has set up is there
    return find_piece_of_few<kTokens>(args);
  }
  const int each = (args.query_count + kThreads - 1) / kThreads;
  const int first = min(static_cast<int>(threadIdx.x) * each, args.query_count);
  const int last = min(first + each, args.query_count);
  int64_t mine = 0;
  for (int token = first; token < last; ++token) mine += run_at<kTokens>(args, token).tiles;
  int64_t before = mine;  // inclusive scan over the lanes
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(0xFFFFFFFFu, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) sums[warp] = before;
  if (threadIdx.x == 0) found->left = 0;
  __syncthreads();
  int64_t total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  before -= mine;
  const auto [begin, end] = share_of_block(total);
  if (begin < end && begin >= before && begin < before + mine) {
    int64_t at = before;
    for (int token = first;; ++token) {
      const Run run = run_at<kTokens>(args, token);
      if (begin < at + run.tiles) {
        *found = Piece{run, static_cast<int>(begin - at), end - begin};
        break;
      }
      at += run.tiles;
    }
  }
  __syncthreads();
  return *found;
}

// Where tile `tile` of a row lies: table column, first slot in the page, first entry of the chunk, slots in the tile.
struct TilePlace {
  int column = 0;
  int entry = 0;  // relative to entry_begin
  int slot = 0;
  int slots = 0;
};
__device__ __forceinline__ TilePlace place_of_tile(const IndexLogitsArgs& args, int first_column, int tile) {
  const int slots = args.keys.slots_per_page;
  if (slots == kTileSlots) return {first_column + tile, tile * kTileSlots, 0, kTileSlots};
  const int tiles_a_page = (slots + kTileSlots - 1) / kTileSlots;
  const int page = tile / tiles_a_page;
  const int slot = tile % tiles_a_page * kTileSlots;
  return {first_column + page, page * slots + slot, slot, min(kTileSlots, slots - slot)};
}
// The page id at a column of a row, kNoPage where the table has none or the pool has no such page. In two steps, as an address may be
// known before the table may be read.
__device__ __forceinline__ const int32_t* page_place(const IndexLogitsArgs& args, int row, int column) {
  return row < 0 || column >= args.pages.pages_per_row ? nullptr : args.pages.pages + row * args.pages.row_stride + column;
}
__device__ __forceinline__ int32_t page_in_pool(const IndexLogitsArgs& args, int32_t page) {
  return page >= 0 && page < args.keys.page_count ? page : kNoPage;
}
__device__ __forceinline__ int32_t page_at(const IndexLogitsArgs& args, const int32_t* place) {
  return page_in_pool(args, place != nullptr ? __ldg(place) : kNoPage);
}
__device__ __forceinline__ int32_t page_at(const IndexLogitsArgs& args, int row, int column) {
  return page_at(args, page_place(args, row, column));
}
// The same of a place that was known before the kernel before had ended.
__device__ __forceinline__ int32_t page_now_at(const IndexLogitsArgs& args, const int32_t* place) {
  return page_in_pool(args, place != nullptr ? load_now(place) : kNoPage);
}

// ---------------------------------------------------------------------------------------------------------------
// Queries. Elements 2 p and 2 p + 1 of head `head` of query `token` as numbers.

__device__ __forceinline__ float float_of_bf16_bits(uint32_t bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ float2 float2_of_e4m3x2(uint16_t codes) {
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
  return __half22float2(__half2(halves));
}
__device__ __forceinline__ float float_of_e2m1_code(uint32_t code) {
  const float magnitude =
      (code & 6u) == 0 ? 0.5f * static_cast<float>(code & 1u) : __uint_as_float(((126u + ((code >> 1) & 3u)) << 23) | ((code & 1u) << 22));
  return (code & 8u) != 0 ? -magnitude : magnitude;
}
__device__ __forceinline__ float float_of_ue8m0_code(uint32_t code) {
  return code == 255u ? __uint_as_float(0x7FC00000u) : code == 0u ? __uint_as_float(0x00400000u) : __uint_as_float(code << 23);
}

template <QueryElement kQuery>
__device__ __forceinline__ float2 query_pair(const IndexLogitsArgs& args, int64_t vector, int pair) {
  if constexpr (kQuery == QueryElement::kBf16) {
    const uint32_t bits = __ldg(static_cast<const uint32_t*>(args.q) + vector * (kIndexHeadDim / 2) + pair);
    return {float_of_bf16_bits(bits & 0xFFFFu), float_of_bf16_bits(bits >> 16)};
  } else if constexpr (kQuery == QueryElement::kFp8) {
    return float2_of_e4m3x2(__ldg(static_cast<const uint16_t*>(args.q) + vector * (kIndexHeadDim / 2) + pair));
  } else {
    const uint32_t codes = __ldg(static_cast<const uint8_t*>(args.q) + vector * (kIndexHeadDim / 2) + pair);
    const float scale = float_of_ue8m0_code(__ldg(args.q_scale + vector * (kIndexHeadDim / 32) + pair / 16));
    return {float_of_e2m1_code(codes & 15u) * scale, float_of_e2m1_code(codes >> 4) * scale};
  }
}
__device__ __forceinline__ float2 query_pair(const IndexLogitsArgs& args, int64_t vector, int pair) {
  switch (args.q_element) {
    case QueryElement::kFp8: return query_pair<QueryElement::kFp8>(args, vector, pair);
    case QueryElement::kFp4: return query_pair<QueryElement::kFp4>(args, vector, pair);
    default: return query_pair<QueryElement::kBf16>(args, vector, pair);
  }
}

// Eight neighbouring elements as they lie in memory, and the same as numbers.
struct QueryChunk {
  uint4 bits;
  uint32_t scale;  // ue8m0, fp4 only
};
template <QueryElement kQuery>
__device__ __forceinline__ QueryChunk query_chunk(const IndexLogitsArgs& args, int64_t vector, int chunk) {
  QueryChunk raw = {};
  if constexpr (kQuery == QueryElement::kBf16) {
    raw.bits = __ldg(static_cast<const uint4*>(args.q) + vector * (kIndexHeadDim / 8) + chunk);
  } else if constexpr (kQuery == QueryElement::kFp8) {
    const uint2 bits = __ldg(static_cast<const uint2*>(args.q) + vector * (kIndexHeadDim / 8) + chunk);
    raw.bits.x = bits.x;
    raw.bits.y = bits.y;
  } else {
    raw.bits.x = __ldg(static_cast<const uint32_t*>(args.q) + vector * (kIndexHeadDim / 8) + chunk);
    raw.scale = __ldg(args.q_scale + vector * (kIndexHeadDim / 32) + chunk / 4);
  }
  return raw;
}
template <QueryElement kQuery>
__device__ __forceinline__ float2 pair_of_chunk(const QueryChunk& raw, int pair) {
  if constexpr (kQuery == QueryElement::kBf16) {
    const uint32_t bits = pair == 0 ? raw.bits.x : pair == 1 ? raw.bits.y : pair == 2 ? raw.bits.z : raw.bits.w;
    return {float_of_bf16_bits(bits & 0xFFFFu), float_of_bf16_bits(bits >> 16)};
  } else if constexpr (kQuery == QueryElement::kFp8) {
    return float2_of_e4m3x2(static_cast<uint16_t>((pair < 2 ? raw.bits.x : raw.bits.y) >> (16 * (pair % 2))));
  } else {
    const uint32_t codes = raw.bits.x >> (8 * pair);
    const float scale = float_of_ue8m0_code(raw.scale);
    return {float_of_e2m1_code(codes & 15u) * scale, float_of_e2m1_code((codes >> 4) & 15u) * scale};
  }
}

// ---------------------------------------------------------------------------------------------------------------
// Keys as matrix operands. A lane reads 16-byte chunks of its two rows and feeds them to the matrix unit in the order
// in which they lie; the query is permuted to match, so the dot product is the same sum over the same pairs.
//
// Step s of 8, lane t of a quad, takes element_of(s, t, 0..3): the first two as k = 2t, 2t + 1, the last two as
// k = 2t + 8, 2t + 9. pair_place is the inverse for a pair of neighbours: 4 (2 step + half) + t, in words of two.

template <ElementFormat kKeys>
struct KeyTraits;

template <>
struct KeyTraits<ElementFormat::kBf16> {
  static constexpr bool kHalf = false;                 // matrix element: f16 if true, bf16 if false
  static constexpr int kTileBytes = kTileSlots * 256;  // values of a whole tile
  static constexpr int kStageBytes = kTileBytes;
  // chunks t, t + 4, t + 8, t + 12 of 8 elements, two steps each
  __device__ static constexpr int element_of(int step, int t, int i) { return 8 * (t + 4 * (step / 2)) + 4 * (step % 2) + i; }
  __device__ static constexpr int pair_place(int pair) { return 4 * (2 * (2 * (pair / 16) + pair % 4 / 2) + pair % 2) + pair / 4 % 4; }
};
template <>
struct KeyTraits<ElementFormat::kFp8> {
  static constexpr bool kHalf = true;  // e4m3 -> f16 is exact and one instruction
  static constexpr int kTileBytes = kTileSlots * 128;
  static constexpr int kStageBytes = kTileBytes + kTileSlots * 4;
  // chunks t, t + 4 of 16 elements, four steps each
  __device__ static constexpr int element_of(int step, int t, int i) { return 16 * (t + 4 * (step / 4)) + 4 * (step % 4) + i; }
  __device__ static constexpr int pair_place(int pair) { return 4 * (2 * (4 * (pair / 32) + pair % 8 / 2) + pair % 2) + pair / 8 % 4; }
};
template <>
struct KeyTraits<ElementFormat::kFp4> {
  static constexpr bool kHalf = false;  // e2m1 x 2^n is exact in bf16, whose exponents reach as far as the scale's
  static constexpr int kTileBytes = kTileSlots * 64;
  static constexpr int kStageBytes = kTileBytes + kTileSlots * 4;
  // chunk t of 32 elements, which is also scale block t
  __device__ static constexpr int element_of(int step, int t, int i) { return 32 * t + 4 * step + i; }
  __device__ static constexpr int pair_place(int pair) { return 4 * (2 * (pair % 16 / 2) + pair % 2) + pair / 16; }
};

__device__ __forceinline__ uint32_t half2_of_e4m3x2(uint32_t codes) {
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return static_cast<uint32_t>(halves.x) | (static_cast<uint32_t>(halves.y) << 16);
}
// Four e2m1 codes in the low 16 bits -> two bf16 pairs, times `scale` (a bf16 power of two in both halves).
__device__ __forceinline__ void bf16_of_e2m1x4(uint32_t codes, uint32_t scale, uint32_t& first, uint32_t& second) {
  // bf16 of 0 .5 1 1.5 2 3 4 6, low bytes and high bytes, looked up by the magnitude bits
  const uint32_t select = codes & 0x7777u;
  const uint32_t low = __byte_perm(0xC0800000u, 0xC0804000u, select);
  const uint32_t high = __byte_perm(0x3F3F3F00u, 0x40404040u, select);
  first = __byte_perm(low, high, 0x5140u) | ((codes << 12) & 0x8000u) | ((codes << 24) & 0x80000000u);
  second = __byte_perm(low, high, 0x7362u) | ((codes << 4) & 0x8000u) | ((codes << 16) & 0x80000000u);
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(first) : "r"(scale));
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(second) : "r"(scale));
}
__device__ __forceinline__ uint32_t bf16_scale_of_ue8m0(uint32_t code) {  // 2^(code - 127) twice; 255 is NaN
  const uint32_t one = code == 255u ? 0x7FC0u : code == 0u ? 0x0040u : code << 7;
  return one | (one << 16);
}

// A lane's share of a tile that lies in shared memory as it lies in its page: rows `row` and `row + 8`, as they are stored.
template <ElementFormat kKeys>
struct StoredRows {
  static constexpr int kChunks = kKeys == ElementFormat::kBf16 ? 4 : kKeys == ElementFormat::kFp8 ? 2 : 1;  // of 16 bytes
  uint4 low[kChunks], high[kChunks];
  uint32_t low_scale = 0, high_scale = 0;  // fp4: ue8m0 of the lane's 32 elements
};
template <ElementFormat kKeys>
__device__ __forceinline__ StoredRows<kKeys> load_rows(const std::byte* tile, int row, int t) {
  using Rows = StoredRows<kKeys>;
  constexpr int kRowBytes = KeyTraits<kKeys>::kTileBytes / kTileSlots;
  Rows rows;
#pragma unroll
  for (int i = 0; i < Rows::kChunks; ++i) {
    rows.low[i] = *reinterpret_cast<const uint4*>(tile + row * kRowBytes + (t + 4 * i) * 16);
    rows.high[i] = *reinterpret_cast<const uint4*>(tile + (row + 8) * kRowBytes + (t + 4 * i) * 16);
  }
  if constexpr (kKeys == ElementFormat::kFp4) {
    const std::byte* scales = tile + KeyTraits<kKeys>::kTileBytes;
    rows.low_scale = static_cast<uint32_t>(scales[row * 4 + t]);
    rows.high_scale = static_cast<uint32_t>(scales[(row + 8) * 4 + t]);
  }
  return rows;
}
// The same as A operand, converted exactly.
template <ElementFormat kKeys>
__device__ __forceinline__ void convert_rows(const StoredRows<kKeys>& rows, uint32_t (&a)[8][4]) {
#pragma unroll
  for (int i = 0; i < StoredRows<kKeys>::kChunks; ++i) {
    const uint32_t lows[4] = {rows.low[i].x, rows.low[i].y, rows.low[i].z, rows.low[i].w};
    const uint32_t highs[4] = {rows.high[i].x, rows.high[i].y, rows.high[i].z, rows.high[i].w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kKeys == ElementFormat::kBf16) {  // words 0 and 1 are step 2 i, words 2 and 3 step 2 i + 1
        a[2 * i + w / 2][2 * (w % 2)] = lows[w];
        a[2 * i + w / 2][2 * (w % 2) + 1] = highs[w];
      } else if constexpr (kKeys == ElementFormat::kFp8) {
        a[4 * i + w][0] = half2_of_e4m3x2(lows[w] & 0xFFFFu);
        a[4 * i + w][1] = half2_of_e4m3x2(highs[w] & 0xFFFFu);
        a[4 * i + w][2] = half2_of_e4m3x2(lows[w] >> 16);
        a[4 * i + w][3] = half2_of_e4m3x2(highs[w] >> 16);
      } else {
        const uint32_t low_scale = bf16_scale_of_ue8m0(rows.low_scale);
        const uint32_t high_scale = bf16_scale_of_ue8m0(rows.high_scale);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          bf16_of_e2m1x4(lows[w] >> (16 * half), low_scale, a[2 * w + half][0], a[2 * w + half][2]);
          bf16_of_e2m1x4(highs[w] >> (16 * half), high_scale, a[2 * w + half][1], a[2 * w + half][3]);
        }
      }
    }
  }
}
template <ElementFormat kKeys>
__device__ __forceinline__ void read_keys(const std::byte* tile, int row, int t, uint32_t (&a)[8][4]) {
  convert_rows<kKeys>(load_rows<kKeys>(tile, row, t), a);
}

// d += A x B, 16 x 8 x 16.
template <bool kHalf>
__device__ __forceinline__ void mma(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kHalf) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The power of two that a head of queries is multiplied by where the matrix element is f16, and its inverse for the head's
// weight. f16 then keeps every bf16 number exactly that lies within 2^-31 of the head's largest (brought to 2^14); what is
// below is cut at 2^-39 of it, far under the fp32 sum's own rounding.
struct QueryScale {
  float scale, inverse;
};
__device__ __forceinline__ QueryScale scale_of_largest(float largest) {
  int power = 14 - (static_cast<int>(__float_as_uint(largest) >> 23) - 127);
  power = largest == 0.0f ? 0 : min(max(power, -113), 126);
  return {__uint_as_float(static_cast<uint32_t>(127 + power) << 23), __uint_as_float(static_cast<uint32_t>(127 - power) << 23)};
}
// Two query elements as one word of the matrix element. bf16 holds bf16, fp8 and fp4 x 2^n exactly.
template <bool kHalf>
__device__ __forceinline__ uint32_t query_word(float2 pair, float scale) {
  if constexpr (kHalf) {
    const __half2 halves = __floats2half2_rn(pair.x * scale, pair.y * scale);
    return reinterpret_cast<const uint32_t&>(halves);
  } else {
    const __nv_bfloat162 halves = __floats2bfloat162_rn(pair.x, pair.y);
    return reinterpret_cast<const uint32_t&>(halves);
  }
}
__device__ __forceinline__ float larger_finite(float largest, float2 pair) {
  if (isfinite(pair.x)) largest = fmaxf(largest, fabsf(pair.x));
  if (isfinite(pair.y)) largest = fmaxf(largest, fabsf(pair.y));
  return largest;
}

// ---------------------------------------------------------------------------------------------------------------
// Scores.

__device__ __forceinline__ float relu(float value) {  // passes NaN
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(value));
  return value;
}

// Sum of one token's heads in one lane, for its two rows: even and odd columns apart, heads ascending.
struct HeadSums {
  float low_even = 0, low_odd = 0, high_even = 0, high_odd = 0;
  __device__ __forceinline__ float2 rows() const { return {low_even + low_odd, high_even + high_odd}; }
};
// Adds the next kColumns columns. d[4 j + 2 i + b] is row g + 8 i, column 8 j + 2 t + b; weight_of(j), j even, are the
// weights of columns 8 j + 2 t, 8 j + 2 t + 1, 8 j + 8 + 2 t and 8 j + 9 + 2 t.
template <int kColumns, class WeightOf>
__device__ __forceinline__ void add_heads(HeadSums& sums, const float* d, const WeightOf& weight_of) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    const float4 weight = weight_of(j);
    sums.low_even = __fmaf_rn(weight.x, relu(d[4 * j]), sums.low_even);
    sums.low_odd = __fmaf_rn(weight.y, relu(d[4 * j + 1]), sums.low_odd);
    sums.high_even = __fmaf_rn(weight.x, relu(d[4 * j + 2]), sums.high_even);
    sums.high_odd = __fmaf_rn(weight.y, relu(d[4 * j + 3]), sums.high_odd);
    sums.low_even = __fmaf_rn(weight.z, relu(d[4 * j + 4]), sums.low_even);
    sums.low_odd = __fmaf_rn(weight.w, relu(d[4 * j + 5]), sums.low_odd);
    sums.high_even = __fmaf_rn(weight.z, relu(d[4 * j + 6]), sums.high_even);
    sums.high_odd = __fmaf_rn(weight.w, relu(d[4 * j + 7]), sums.high_odd);
  }
}
// Head weights in shared memory, in the order in which a lane of a quad reads them: 16 bytes at a time, each lane's own
// together, and padded where the quad's four reads would otherwise meet in a bank.
template <int kHeads>
struct WeightLayout {
  static constexpr int kLane = kHeads / 4 + (kHeads > 32 ? 4 : 0);  // floats from one lane of the quad to the next
  static constexpr int kToken = 4 * kLane;

  __device__ static constexpr int place(int column) {  // token x kHeads + head
    const int head = column % kHeads;
    return column / kHeads * kToken + head % 8 / 2 * kLane + head / 8 * 2 + head % 2;
  }
  __device__ static const float4* of(const float* weights, int token, int t) {
    return reinterpret_cast<const float4*>(weights + token * kToken + t * kLane);
  }
};
// Columns past the last head are products with zero, but an infinite key makes them NaN: they must not enter the sum.
// d is `kColumns` columns of tokens padded to kHeads columns each, the first of them column `first`.
template <int kColumns, int kHeads>
__device__ __forceinline__ void clear_padding(float* d, int heads, int first = 0) {
  if (heads == kHeads) return;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      if ((first + 8 * j + 2 * t + b) % kHeads >= heads) d[4 * j + b] = d[4 * j + 2 + b] = 0.0f;
    }
  }
}
// Sums over the quad with two shuffles for two rows: lanes with even t end with the low row, odd t with the high one.
__device__ __forceinline__ float sum_quad(float2 rows) {
  const bool odd = (threadIdx.x & 1) != 0;
  float keep = odd ? rows.y : rows.x;
  const float give = odd ? rows.x : rows.y;
  keep += __shfl_xor_sync(0xFFFFFFFFu, give, 1);
  keep += __shfl_xor_sync(0xFFFFFFFFu, keep, 2);
  return keep;
}

// The same for two tokens with three shuffles: lanes t = 0, 1 end with `first`, t = 2, 3 with `second`.
__device__ __forceinline__ float sum_quad_two(float2 first, float2 second) {
  const bool odd = (threadIdx.x & 1) != 0;
  const bool upper = (threadIdx.x & 2) != 0;
  float one = odd ? first.y : first.x;
  float two = odd ? second.y : second.x;
  one += __shfl_xor_sync(0xFFFFFFFFu, odd ? first.x : first.y, 1);
  two += __shfl_xor_sync(0xFFFFFFFFu, odd ? second.x : second.y, 1);
  return (upper ? two : one) + __shfl_xor_sync(0xFFFFFFFFu, upper ? one : two, 2);
}

__device__ __noinline__ inline void report_left_out(OpReport* report, uint32_t status, uint32_t nans, uint32_t absent) {
  if (report == nullptr) return;
  atomicOr(&report->status, status);
  if (nans != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&report->nan_scores), static_cast<unsigned long long>(nans));
  if (absent != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&report->absent_entries), static_cast<unsigned long long>(absent));
  }
}

// What a thread left out, to be reported where a call does no harm: between a multiplication's start and its end it would
// make the compiler wait.
struct LeftOut {
  uint32_t nans = 0, absent = 0, status = 0;

  __device__ __forceinline__ void report(OpReport* to) {
    if ((nans | absent) == 0) return;
    report_left_out(to, status, nans, absent);
    *this = LeftOut{};
  }
};
// Writes one score; NaN in its one pattern, and counted.
__device__ __forceinline__ void write_score(float* place, float score, LeftOut& left_out) {
  if (score != score) {
    score = __uint_as_float(kNanScoreBits);
    ++left_out.nans;
    left_out.status |= kStatusNanScore;
  }
  *place = score;
}
// Writes one entry of an absent page.
__device__ __forceinline__ void write_absent(float* place, bool in_table, LeftOut& left_out) {
  *place = __uint_as_float(kAbsentScoreBits);
  ++left_out.absent;
  left_out.status |= kStatusAbsentPage | (in_table ? 0u : kStatusBadPageTable);
}

}  // namespace needle::logits
