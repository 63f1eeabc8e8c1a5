#include "kernels/index_logits_mma.cuh"

namespace needle::logits {

absl::Status launch_mma_fp8(const Plan& plan, const IndexLogitsArgs& args, cudaStream_t stream) {
  return launch_mma_of<ElementFormat::kFp8>(plan, args, stream);
}

}  // namespace needle::logits
