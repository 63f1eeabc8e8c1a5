// RoPE tables: cos and sin of fp32 angles, exactly as the stacks that must be matched build them.
//
//   angle[p, i] = fp32(inv_freq[i]) x fp32(p), rounded to fp32; the table holds its cos and sin, rounded to fp32.
//
// At position 524,284 the fp32 angle of dimension 1 is 1.3e-2 rad away from the exact one: a table built "better" than
// the model's rotates keys that its queries do not match. (deepseek-v4 reference: torch.outer in fp32, then polar.)
//
// What must stay true:
//  1. A table is read-only after it was built and belongs to whoever built it (rope_table_bytes): a client, or one remote read.
//  2. One layout for both styles: [positions, 32, 2] interleaved cos, sin. The style decides which dimensions a pair
//     joins, not how the table lies.
//  3. A pool's keys and its queries use the one table; two engines agree on it by RopeParameters or by the inverse
//     frequencies themselves, which rope_inverse_frequencies() need not be asked for.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/workers.h"
#include "kernels/page_format.h"
#include "kernels/pool_view.h"

namespace needle {

inline constexpr int kRopePairs = kRopeDims / 2;
inline constexpr int64_t kRopePositionsMax = int64_t{1} << 24;  // fp32 counts positions exactly up to here

// Host or device memory, as the operation that gets it.
struct RopeTableView {
  const float* cos_sin = nullptr;  // [positions, 32, 2]
  int64_t positions = 0;           // valid positions are [0, positions)
};

constexpr int64_t rope_table_bytes(int64_t positions) { return positions * kRopeDims * int64_t{sizeof(float)}; }

// The 32 inverse frequencies of `parameters`, every step in fp32 as torch does it; YaRN where yarn_factor > 0:
//   f_i = theta^(-2i/64); low = floor(64 ln(original/(2 pi beta_fast)) / (2 ln theta)), high = ceil(the same with
//   beta_slow); ramp = clip((i - low) / (high - low), 0, 1); inv_freq_i = f_i / factor x ramp + f_i x (1 - ramp).
absl::Status rope_inverse_frequencies(const RopeParameters& parameters, float (&inverse_frequencies)[kRopePairs]);

// Fills table[positions, 32, 2] for positions [first, first + count).
absl::Status build_rope_table(const float (&inverse_frequencies)[kRopePairs], int64_t first, int64_t count, float* table, Workers& workers);

// The pair of dimensions that pair i joins, in a row of `head_dim`.
struct RopePair {
  int first;
  int second;
};
NEEDLE_HD constexpr RopePair rope_pair(RopeStyle style, int head_dim, int i) {
  if (style == RopeStyle::kHalfSplitFirst64) return {i, i + kRopePairs};
  return {head_dim - kRopeDims + 2 * i, head_dim - kRopeDims + 2 * i + 1};
}

}  // namespace needle
