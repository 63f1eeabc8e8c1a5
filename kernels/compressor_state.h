// The compressor's memory between two stores: one record a (sequence, layer, component), and the arithmetic that
// pools raw rows into an entry.
//
// A compressor with ratio r pools r tokens (and for r == 4 also the r before them, through their overlap half) into one
// entry. What it must carry from one store to the next is a record in a state pool: a 64-byte header, then fp32 rows.
//
// What must stay true:
//  1. A record's bytes are a function of the sequence's tokens alone: not of how they were cut into stores, nor of
//     tokens that were written ahead and rejected. Rows that no later entry can need are zero.
//  2. Rows are folded strictly in order of position, one at a time, by fold_row(): any chunking, the raw and the
//     running form give the same bits. (A twin may bring its own exponential, if it uses it on every path.)
//  3. Raw rows hold raw scores; the position bias is added when a row is folded (SGLang's convention, not vLLM's).
//  4. A store whose sequence, generation or first position is not the record's own changes nothing (kStatusStateMismatch).
//  5. next - committed tokens are written ahead and unaccepted; there are at most speculative_rows of them, and only
//     commit decides. Everything before `committed` is final.
//
// Record layout after the header:
//   kRaw, ratio 4    ring of 8 + speculative_rows rows, the row of position p at p % ring:
//                    [kv overlap d | kv current d | score overlap d | score current d]
//                    Live: the tokens of the open group and those after it; of the group before, the overlap halves
//                    (their current halves are zero). "Open group" is the one that `committed` lies in.
//   kRaw, ratio 128  ring of 128 + speculative_rows rows: [kv d | score d]. Live: from the open group's first token on.
//   kRunning         [maximum d | sum d | weighted d] over the committed tokens of the open group (kEmptyMaximum, 0, 0
//                    where there are none), then speculative_rows rows [kv d | score d], that of position p at
//                    p - committed.
//
// A boundary record is what a ratio-4 compressor needs at a page boundary P (a multiple of 4) to go on from it: the four
// rows P-4..P-1, overlap half: 4 x [kv d | score d] fp32. A record initialised from it equals, byte for byte, the one
// that a run from the start has at P. Ratio 128 needs none at a multiple of 128: its state is empty there.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "kernels/page_format.h"
#include "kernels/pool_view.h"
#include "kernels/quantise.h"

namespace needle {

inline constexpr uint32_t kStateMagic = 0x3154534E;              // "NST1"; a record that was never initialised holds 0
inline constexpr int kOverlapRatio = 4;                          // the ratio whose groups overlap
inline constexpr float kEmptyMaximum = -3.4028234663852886e38f;  // of no rows; finite, so that -inf scores weigh nothing

struct StateHeader {
  uint32_t magic;
  uint8_t form;  // StateForm
  uint8_t reserved0;
  uint16_t ratio;
  uint32_t head_dim;
  uint32_t speculative_rows;
  uint64_t sequence;
  uint32_t generation;
  uint32_t reserved1;
  int64_t next;       // position of the token that the next store must begin with
  int64_t committed;  // tokens before it are final; next - committed are written ahead
  int64_t reserved2[2];
};
static_assert(sizeof(StateHeader) == kStateHeaderBytes);

// One (component, layer) of a state pool: record i at base + i x stride. 16-byte aligned.
struct StateView {
  std::byte* base = nullptr;
  int64_t stride = 0;
  int64_t count = 0;  // valid record indices are [0, count)
  StateForm form = StateForm::kNone;
  int32_t ratio = 0;
  int32_t head_dim = 0;
  int32_t speculative_rows = 0;
};

// Boundary records of one (component, layer): record i at base + i x stride, boundary_record_bytes() each.
struct BoundaryView {
  std::byte* base = nullptr;
  int64_t stride = 0;
  int64_t count = 0;
};
NEEDLE_HD constexpr int64_t boundary_record_bytes(int64_t head_dim) { return kOverlapRatio * 2 * head_dim * int64_t{sizeof(float)}; }
static_assert(21 * (boundary_record_bytes(512) + boundary_record_bytes(128)) == 430080, "430 KB a resume point");

// ------------------------------------------------------------------------------------------------- places in a record

NEEDLE_HD inline std::byte* state_record(const StateView& state, int64_t record) { return state.base + record * state.stride; }
NEEDLE_HD constexpr int64_t state_ring_rows_of(const StateView& state) {
  return (state.ratio == kOverlapRatio ? 2 * kOverlapRatio : state.ratio) + state.speculative_rows;
}
NEEDLE_HD constexpr int64_t state_row_floats_of(const StateView& state) {
  return (state.ratio == kOverlapRatio ? 4 : 2) * int64_t{state.head_dim};
}
// Floats from the record's first float after the header. Raw: ring row of a position.
NEEDLE_HD constexpr int64_t state_ring_row_offset(const StateView& state, int64_t position) {
  return position % state_ring_rows_of(state) * state_row_floats_of(state);
}
// Running: pending row `ahead` = position - committed.
NEEDLE_HD constexpr int64_t state_pending_row_offset(const StateView& state, int64_t ahead) {
  return 3 * int64_t{state.head_dim} + ahead * state_row_floats_of(state);
}
// First position whose row a raw record keeps when `committed` tokens are final.
NEEDLE_HD constexpr int64_t state_live_begin(int64_t ratio, int64_t committed) {
  const int64_t open = committed / ratio * ratio;
  return ratio == kOverlapRatio && open > 0 ? open - ratio : open;
}
// Whether a ratio-4 record keeps the current half of a position's row (the overlap half of live rows is always kept).
NEEDLE_HD constexpr bool state_keeps_current(int64_t position, int64_t committed) {
  return position >= committed / kOverlapRatio * kOverlapRatio;
}

NEEDLE_HD inline bool state_header_fits(const StateView& state, const StateHeader& header) {
  return header.magic == kStateMagic && header.form == static_cast<uint8_t>(state.form) &&
         header.ratio == static_cast<uint16_t>(state.ratio) && header.head_dim == static_cast<uint32_t>(state.head_dim) &&
         header.speculative_rows == static_cast<uint32_t>(state.speculative_rows);
}

// --------------------------------------------------------------------------------------------------------- arithmetic

// 2^t for t <= 0, relative error below 1e-7; 0 below 2^-126; NaN for NaN.
NEEDLE_HD_INLINE float fold_exp2(float t) {
  if (t < -126.0f) return 0.0f;
  const float shifted = t + 12582912.0f;  // 1.5 x 2^23: rounds t to the nearest integer n, kept in the low bits
  const float f = t - (shifted - 12582912.0f);
  float p = 0x1.44138ap-13f;  // (2^f - 1) / f on [-.5, .5], interpolated at the Chebyshev nodes
  p = std::fma(p, f, 0x1.5f089p-10f);
  p = std::fma(p, f, 0x1.3b2a54p-7f);
  p = std::fma(p, f, 0x1.c6af6cp-5f);
  p = std::fma(p, f, 0x1.ebfbep-3f);
  p = std::fma(p, f, 0x1.62e43p-1f);
  p = std::fma(p, f, 1.0f);
  return p * float_of_bits((bits_of(shifted) + 127u) << 23);
}

// A softmax-weighted sum of one channel over some rows, in online form.
struct PoolPartial {
  float maximum = kEmptyMaximum;
  float sum = 0.0f;       // of 2^((score - maximum) log2 e)
  float weighted = 0.0f;  // of the same x kv
};

inline constexpr float kLog2E = 1.4426950408889634f;

// Adds one row. `score` has its position bias. A -inf score weighs nothing; NaN in score or kv stays NaN.
NEEDLE_HD_INLINE void fold_row(PoolPartial& partial, float score, float kv) {
  const float difference = score - partial.maximum;
  const float e = fold_exp2(-std::fabs(difference) * kLog2E);
  const bool raise = difference > 0.0f;
  const float keep = raise ? e : 1.0f;
  const float take = raise ? 1.0f : e;
  partial.sum = std::fma(partial.sum, keep, take);
  partial.weighted = std::fma(partial.weighted, keep, kv * take);
  if (raise) partial.maximum = score;
}

// Joins two partials over disjoint rows: within 1e-6 of folding the second's rows after the first's, not bit for bit.
NEEDLE_HD_INLINE PoolPartial merge_partials(const PoolPartial& first, const PoolPartial& second) {
  const float difference = second.maximum - first.maximum;
  const float e = fold_exp2(-std::fabs(difference) * kLog2E);
  const bool raise = difference > 0.0f;
  const float keep = raise ? e : 1.0f;
  const float take = raise ? 1.0f : e;
  return {raise ? second.maximum : first.maximum, std::fma(first.sum, keep, second.sum * take),
          std::fma(first.weighted, keep, second.weighted * take)};
}

// The pooled channel. A +inf score has no softmax: NaN, as no rows at all.
NEEDLE_HD_INLINE float pooled_value(const PoolPartial& partial) {
  if (!(partial.maximum < INFINITY)) return NAN;
  return partial.weighted / partial.sum;
}

// ---------------------------------------------------------------------------------------------------------- init_state

struct StateStart {
  int64_t record = 0;
  uint64_t sequence = 0;
  int64_t position = 0;          // of the first token to come; a multiple of ratio
  int64_t boundary_record = -1;  // ratio 4 and position > 0: the boundary to go on from; otherwise -1
  uint32_t generation = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(StateStart) == 40);

struct InitStateArgs {
  StateView state;
  BoundaryView boundaries;             // base may be null where no start names one
  const StateStart* starts = nullptr;  // [count], no record twice (the host refuses it); record -1 skips
  int32_t count = 0;
  OpReport* report = nullptr;  // a bad record, position or boundary skips that start: kStatusBadSlot, skipped_rows
};

// Clears the whole record, speculative rows too, then begins it.
absl::Status check_init_state(const InitStateArgs& args);
absl::Status init_state_ref(const InitStateArgs& args);
absl::Status init_state_cpu(const InitStateArgs& args, Workers& workers);
absl::Status init_state_cuda(const InitStateArgs& args, void* stream);

// -------------------------------------------------------------------------------------------------------- commit_state

struct StateCommit {
  int64_t record = 0;  // -1 skips; ratio 1 has no record: 0
  uint64_t sequence = 0;
  int64_t committed = 0;  // position of the first token written ahead; must be the record's
  uint32_t generation = 0;
  int32_t ahead = 0;      // tokens written ahead: next - committed of the record
  int32_t accepted = 0;   // 0..ahead; the others are taken back
  int32_t table_row = 0;  // of `pages`
};
static_assert(sizeof(StateCommit) == 40);

// Decides the tokens written ahead. Afterwards record and pages are, byte for byte, as if only the accepted ones had
// been stored: rejected rows are zero, and so are the slots (values and scale) of entries that a rejected token
// completed. For ratio 1 (window KV, V3.2's index-K) there is no record and only slots are cleared.
struct CommitStateArgs {
  int32_t ratio = 1;
  StateView state;       // ratio > 1; base null otherwise
  MutableLayerView out;  // the layer that the entries went to
  PageTableView pages;
  const float* position_bias = nullptr;  // [ratio, coff x head_dim] fp32; read for the running form alone
  const StateCommit* commits = nullptr;  // [count], no record twice (the host refuses it)
  int32_t count = 0;
  OpReport* report = nullptr;  // a commit that does not fit its record changes nothing: kStatusStateMismatch
};

absl::Status check_commit_state(const CommitStateArgs& args);
absl::Status commit_state_ref(const CommitStateArgs& args);
// Every instruction set gives the same bits.
absl::Status commit_state_cpu(const CommitStateArgs& args, CpuIsa isa, Workers& workers);
absl::Status commit_state_cuda(const CommitStateArgs& args, void* stream);

}  // namespace needle
