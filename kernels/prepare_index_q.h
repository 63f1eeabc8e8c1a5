// prepare_index_q: an index query made comparable with a pool's keys, and its head weights with their factors.
//
//   q[t, h] -> RoPE at the token's position -> Hadamard (if the keys have it) -> bf16, fp8 or fp4
//   head_weights[t, h] = raw[t, h] x 128^-0.5 x heads^-0.5, for fp8 x q_scale[t, h]
//
// No norm: index queries have none (deepseek-v4 reference, Indexer). The Hadamard and the RoPE style come from the very
// Component value that the keys were stored with, so that the two sides cannot differ: rotation on one side alone loses
// recall without an error.
//
// What must stay true:
//  1. The position is the token's own, not its group's.
//  2. fp8's scale is folded into the weight (it is positive, so ReLU commutes with it) and is not given out; fp4's four
//     ue8m0 bytes a head stay with q and the weight has no q scale.
//  3. A position outside the RoPE table: the host refuses (OUT_OF_RANGE); a CUDA twin writes that token's weights as NaN
//     so that no score of it looks like a number, counts it and sets kStatusBadPosition.
//  4. Tolerances as store.h's promise 5, a row being one head. Every CPU instruction set gives the same bits.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "kernels/index_logits.h"
#include "kernels/page_format.h"
#include "kernels/pool_view.h"
#include "kernels/quantise.h"
#include "kernels/rope.h"

namespace needle {

struct PrepareIndexQArgs {
  Component component;  // the pool's index-K
  RopeTableView rope;   // component.rope_table's; not read where component.rope is kNone
  RoundingMode rounding = RoundingMode::kOnce;

  RowsView q;                          // [tokens, heads x 128]
  RowsView raw_weights;                // [tokens, heads]
  const int64_t* positions = nullptr;  // [tokens]; null where component.rope is kNone
  int64_t tokens = 0;
  int32_t heads = 0;  // 1..128

  QueryElement element = QueryElement::kBf16;
  ScaleKind scale = ScaleKind::kNone;  // fp8: any of the three (kVllm: kPowerOfTwo); fp4: kPowerOfTwo; bf16: kNone
  void* out_q = nullptr;               // [tokens, heads, 128] of `element`
  uint8_t* out_q_scale = nullptr;      // [tokens, heads, 4] ue8m0, fp4 alone
  float* out_weights = nullptr;        // [tokens, heads]
  OpReport* report = nullptr;          // required
};

// 128^-0.5 x heads^-0.5, rounded once to fp32.
float index_weight_factor(int32_t heads);

absl::Status check_prepare_index_q(const PrepareIndexQArgs& args);
absl::Status prepare_index_q_ref(const PrepareIndexQArgs& args);
absl::Status prepare_index_q_cpu(const PrepareIndexQArgs& args, CpuIsa isa, Workers& workers);
absl::Status prepare_index_q_cuda(const PrepareIndexQArgs& args, void* stream);

}  // namespace needle
