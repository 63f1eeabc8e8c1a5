// store: from the rows that an engine's own projections gave to entries in pages.
//
//   raw rows    -> pool over the window -> norm -> RoPE -> Hadamard -> quantise -> write through the page table
//   pooled rows ->                         norm -> RoPE -> Hadamard -> quantise -> write to slots
//
// One call serves one layer of one component (main KV, window KV or index-K) for a batch of sequences.
//
// The chain, for a row x of head_dim d = component.head_dim (deepseek-v4 reference, Compressor; SGLang
// fused_norm_rope_v2):
//   pool      ratio 4: per channel, softmax over 8 rows (kRowsPooled): the group before through its overlap half
//             (columns 0..d-1), then the group itself through its current half (columns d..2d-1). Group 0 has no group
//             before it. ratio 128: the group's 128 rows, one half. ratio 1: the row itself; no gate, bias or state.
//             score = gate + position_bias[position % ratio].
//   norm      over all d; of a 576-wide row (V3.2's latent and its 64 RoPE dimensions) over the first 512 alone.
//             RMS: x / sqrt(mean(x^2) + eps) x weight. Layer: (x - mean) / sqrt(variance + eps) x weight + bias.
//   RoPE      at the position of the entry's first token (entry x ratio), style and table as the component says.
//   Hadamard  index-K alone, if component.hadamard: Sylvester order, H[i][j] = (-1)^popcount(i & j), x 128^-0.5.
//   quantise  as component.element and component.scale say. Main KV: 448 fp8 in blocks of 64 + 64 bf16, or 512 fp8 in
//             blocks of 128 + 64 bf16 (V3.2), or bf16. Index-K: bf16, fp8, fp4.
// Where the chain rounds on its way: RoundingMode (kernels/quantise.h).
//
// What must stay true:
//  1. An entry is written when its last token is stored, and never before. Its bits depend on the sequence's tokens
//     alone: not on chunking, batch, page order, threads or grid, nor on whether the run began at a boundary record.
//  2. The whole slot is written: scale bytes, the eighth scale byte of main KV as 0. Nothing outside the slot is.
//  3. A sequence whose record does not expect it (another sequence or generation, another next position, tokens ahead
//     unaccepted or too many) is left out whole: no entry, no state, no boundary. kStatusStateMismatch; its rows are
//     counted in skipped_rows. The other sequences of the batch are stored.
//  4. Ids. Host twins refuse a page or slot outside the pool (OUT_OF_RANGE, nothing written at all); a CUDA twin skips
//     that entry alone: kStatusBadSlot, skipped_rows. kNoSlot skips on purpose and is not counted. A page-table id
//     kNoPage skips the entry (kStatusAbsentPage, skipped_rows), an entry outside its table row likewise
//     (kStatusBadPageTable), a position outside the RoPE table likewise (kStatusBadPosition; the host refuses it).
//     Skipped entries still advance the state.
//  5. Against a double reference with the same stage roundings: mode kOnce, every stored value v within half a step at v
//     plus 4e-6 x max|row|; kRefV4 and kVllm, at most 1 % of values beyond that, by at most two steps. A row that holds
//     a NaN or an infinity spoils that entry alone (and the next of ratio 4): behind a norm the whole entry is stored as
//     NaN, without one the value (bf16) or its block (fp8). A sum of squares that overflows fp32 counts as an infinity.
//  6. Nothing is allocated; no limit on tokens or sequences but the types'; 64-bit offsets.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/workers.h"
#include "kernels/compressor_state.h"
#include "kernels/cpu_isa.h"
#include "kernels/page_format.h"
#include "kernels/pool_view.h"
#include "kernels/quantise.h"
#include "kernels/rope.h"

namespace needle {

enum class NormKind : uint8_t { kNone = 0, kRms = 1, kLayer = 2 };

inline constexpr float kNormEpsilon = 1e-6f;
inline constexpr int kRowsPooledOverlap = 2 * kOverlapRatio;
inline constexpr int kStoreHeadDimMax = 576;
inline constexpr int64_t kStorePositionMax = int64_t{1} << 40;

// Halves a raw row has: an overlap half and a current half at ratio 4.
NEEDLE_HD constexpr int row_halves(int ratio) { return ratio == kOverlapRatio ? 2 : 1; }
// Dimensions the norm spans.
NEEDLE_HD constexpr int norm_dims(int head_dim) { return head_dim == 576 ? 512 : head_dim; }

// How an entry is finished; the same for raw and pooled rows. Style, rotation and quantisation come from `component`,
// which is the pool's own, so that prepare_index_q cannot differ from it.
struct EntryChain {
  Component component;
  NormKind norm = NormKind::kRms;
  RoundingMode rounding = RoundingMode::kOnce;
  const float* norm_weight = nullptr;  // [norm_dims] fp32; kNone: not read
  const float* norm_bias = nullptr;    // [norm_dims] fp32; kLayer alone
  float norm_epsilon = kNormEpsilon;
  RopeTableView rope;  // component.rope_table's; not read where component.rope is kNone
};

// ----------------------------------------------------------------------------------------------------------- raw rows

// One sequence's part of a call. Lies where the kernel runs.
struct StoreSequence {
  int64_t row_begin = 0;       // its first row in kv and gate
  int64_t row_count = 0;       // 0: padding
  int64_t first_position = 0;  // of its first row
  int64_t record = 0;          // in `state`; ratio 1: not read
  uint64_t sequence = 0;       // must be the record's
  uint32_t generation = 0;     // must be the record's
  int32_t table_row = 0;       // of `pages`
};
static_assert(sizeof(StoreSequence) == 48);

// A page boundary whose boundary record is wanted. Lies where the kernel runs. Ratio 4 alone.
struct StoreBoundary {
  int64_t position = 0;         // multiple of 4; first_position <= position <= first_position + row_count, > 0
  int64_t boundary_record = 0;  // in `boundaries`; -1 skips
  int32_t sequence = 0;         // index in `sequences`
  uint32_t reserved = 0;
};
static_assert(sizeof(StoreBoundary) == 24);

struct StoreRowsArgs {
  EntryChain chain;
  MutableLayerView out;  // element, scale and head_dim equal the component's
  PageTableView pages;   // row = sequence; local entry = entry - entry_base[row]

  RowsView kv;                           // [rows, row_halves x head_dim]
  RowsView gate;                         // the same shape; data null for ratio 1
  const float* position_bias = nullptr;  // [ratio, row_halves x head_dim] fp32; null for ratio 1
  int64_t rows = 0;                      // rows that kv and gate have: host-known bound on row_begin + row_count

  // [sequence_count], ascending by row_begin, rows disjoint, no record twice (the host refuses it; a CUDA twin does not
  // look). Padding has row_count 0 and keeps the order (row_begin = rows will do); nothing else of it is looked at.
  const StoreSequence* sequences = nullptr;
  int32_t sequence_count = 0;

  StateView state;           // ratio > 1
  bool speculative = false;  // the rows are written ahead of acceptance; needs state.speculative_rows > 0 (ratio > 1)

  BoundaryView boundaries;
  const StoreBoundary* boundary_requests = nullptr;  // [boundary_count]; none in a speculative call
  int32_t boundary_count = 0;

  // Optional, for audits that compare formats: the entry that row i completes as it is before quantisation, in fp32, at
  // finished + i x finished_stride floats. Rows that complete nothing are left as they were.
  float* finished = nullptr;
  int64_t finished_stride = 0;

  OpReport* report = nullptr;  // required
};

// INVALID_ARGUMENT naming value and limit; host fields only. Every twin calls it first.
absl::Status check_store_rows(const StoreRowsArgs& args);
// The definition: doubles between the stage roundings; softmax in two passes (with running state: fold_row, in fp32).
absl::Status store_rows_ref(const StoreRowsArgs& args);
// Every instruction set gives the same bits.
absl::Status store_rows_cpu(const StoreRowsArgs& args, CpuIsa isa, Workers& workers);
int64_t store_rows_cuda_scratch(const StoreRowsArgs& args);
absl::Status store_rows_cuda(const StoreRowsArgs& args, void* scratch, int64_t scratch_bytes, void* stream);

// -------------------------------------------------------------------------------------------------------- pooled rows

struct StorePooledArgs {
  EntryChain chain;
  MutableLayerView out;
  RowsView rows;                       // [count, head_dim], pooled already
  const int64_t* slots = nullptr;      // [count] page x slots_per_page + offset; kNoSlot skips; none twice
  const int64_t* positions = nullptr;  // [count] RoPE positions; null where component.rope is kNone
  int64_t count = 0;
  float* finished = nullptr;  // as above, by row; may be null
  int64_t finished_stride = 0;
  OpReport* report = nullptr;  // required
};

absl::Status check_store_pooled(const StorePooledArgs& args);
absl::Status store_pooled_ref(const StorePooledArgs& args);
absl::Status store_pooled_cpu(const StorePooledArgs& args, CpuIsa isa, Workers& workers);
absl::Status store_pooled_cuda(const StorePooledArgs& args, void* stream);

}  // namespace needle
