#include "kernels/index_logits_sm90.cuh"

namespace needle::logits {

absl::Status launch_sm90_bf16(const Plan& plan, const IndexLogitsArgs& args, const TensorMaps& maps, cudaStream_t stream) {
  return launch_sm90_of<ElementFormat::kBf16, MmaElement::kBf16>(plan, args, maps, stream);
}

}  // namespace needle::logits
