// How store_rows is cut over a GPU: plain numbers from host-known sizes.
//
// What must stay true: a plan changes the time and never a byte; tests run several and compare.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/store.h"

namespace needle {

struct StorePlan {
  // Calls of up to so many rows give each row its own group of lanes, as decode wants it. Longer ones of ratio 4 are cut
  // into stretches that a block looks up once.
  int64_t rows_of_decode = 2048;
  int64_t multiprocessors = 132;               // stretches are made so long that all blocks are resident at once
  int64_t shared_bytes_per_block = 100 << 10;  // at most; both as store_rows_cuda finds the GPU
};

// store_rows_cuda with a plan of the caller's.
absl::Status store_rows_cuda_planned(const StoreRowsArgs& args, const StorePlan& plan, void* stream);

}  // namespace needle
