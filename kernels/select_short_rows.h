// select_topk of rows that shared memory holds whole, in the order of positions: prefill's, and decode's of short contexts. Three blocks
// share a multiprocessor, as the instructions that a row takes count for more than what it waits for.
//
// What must stay true:
//  1. The answer is select_topk's, bit for bit.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/select_topk.h"

namespace needle {

inline constexpr int kShortRowMax = 16384;      // entries
inline constexpr int kShortRowsTopkMax = 2048;  // the largest k that is selected so

// Whether select_topk_cuda goes this way: in the order of positions, rows on multiples of 16 bytes.
bool selects_short_rows(const SelectTopkArgs& args);

// As select_topk_cuda, for calls that go this way; others are INVALID_ARGUMENT. No scratch. `fallbacks` counts rows that were chosen from
// exactly after all: their scores are too equal, not numbers, or not what a sample promised.
absl::Status select_short_rows_cuda(const SelectTopkArgs& args, void* stream);

}  // namespace needle
