#include "kernels/index_logits_sm90.cuh"

namespace needle::logits {

absl::Status launch_sm90_fp8(const Plan& plan, const IndexLogitsArgs& args, const CUtensorMap& key_map, cudaStream_t stream) {
  return launch_sm90_of<ElementFormat::kFp8>(plan, args, key_map, stream);
}

}  // namespace needle::logits
