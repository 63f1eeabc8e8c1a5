// index_logits_cuda with more said: its tuning, for tests that must see the same bits from another grid or ring and for
// benchmarks that try shapes; and with the maxima that select_by_maxima reads. Everybody else calls index_logits_cuda.
#pragma once

#include "absl/status/status.h"
#include "kernels/index_logits.h"
#include "kernels/select_by_maxima.h"
#include "kernels/tuning.h"

namespace needle {

absl::Status index_logits_cuda_tuned(const IndexLogitsArgs& args, const LogitsTuning& tuning, void* stream);

// Whether the kernel that would score these on the current device can write maxima: wgmma, keys that it reads as they are
// stored (bf16, or fp8 under fp8 queries), pages of a multiple of 64 slots, entry_begin 0.
absl::StatusOr<bool> index_logits_gives_maxima(const IndexLogitsArgs& args);

// index_logits_cuda that also writes, of each query's row, the maxima of the scores it wrote (select_by_maxima.h; length =
// visible entries of the query). UNIMPLEMENTED where index_logits_gives_maxima says no.
absl::Status index_logits_with_maxima_cuda(const IndexLogitsArgs& args, const GroupMaxima& maxima, void* stream);

}  // namespace needle
