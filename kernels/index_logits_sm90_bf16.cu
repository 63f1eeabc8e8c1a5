#include "kernels/index_logits_sm90.cuh"

namespace needle::logits {

absl::Status launch_sm90_bf16(const Plan& plan, const IndexLogitsArgs& args, const CUtensorMap& key_map, cudaStream_t stream) {
  return launch_sm90_of<ElementFormat::kBf16>(plan, args, key_map, stream);
}

}  // namespace needle::logits
