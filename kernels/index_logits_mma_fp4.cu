#include "kernels/index_logits_mma.cuh"

namespace needle::logits {

absl::Status launch_mma_fp4(const Plan& plan, const IndexLogitsArgs& args, cudaStream_t stream) {
  return launch_mma_of<ElementFormat::kFp4>(plan, args, stream);
}

}  // namespace needle::logits
