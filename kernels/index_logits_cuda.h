// index_logits_cuda with its tuning given: for tests that must see the same bits from another grid or ring, and for
// benchmarks that try shapes. Everybody else calls index_logits_cuda.
#pragma once

#include "absl/status/status.h"
#include "kernels/index_logits.h"
#include "kernels/tuning.h"

namespace needle {

absl::Status index_logits_cuda_tuned(const IndexLogitsArgs& args, const LogitsTuning& tuning, void* stream);

}  // namespace needle
