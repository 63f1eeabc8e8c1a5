// The launches that index_logits.cu chooses from: one function a kind of kernel and key format, each in a file of its own
// so that they compile side by side.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/index_logits.h"
#include "kernels/select_by_maxima.h"
#include "kernels/tuning.h"

namespace needle::logits {

inline constexpr int kTileSlots = 64;  // slots of a page that are scored as one

struct Plan {
  int heads = 64;  // padded: 32, 64 or 128
  int tokens = 1;  // queries a run, tokens_a_run()
  int blocks = 0;
  int64_t shared_limit = 0;  // bytes a block may use
  int ring_stages_max = 0;
  int tiles_in_flight = 1 << 20;  // of a block, asked for and not yet there; at least one for each scoring group
  CachePriority read_once = CachePriority::kEvictFirst;
  GroupMaxima maxima;  // where wanted; the kernels that gives_maxima() names write them
};

// Queries a run for so many padded heads and so many queries a page-table row: as many as fit 256 columns and are there.
constexpr int tokens_a_run(int heads, int queries_a_row) {
  if (heads <= 32) return queries_a_row <= 2 ? 2 : queries_a_row <= 4 ? 4 : 8;
  if (heads <= 64) return queries_a_row <= 1 ? 1 : queries_a_row <= 2 ? 2 : 4;
  return queries_a_row <= 1 ? 1 : 2;
}

// Tensor maps of keys and queries, both bf16 or both fp8; queries alone are not read where they are converted on the way.
struct TensorMaps {
  CUtensorMap keys{};
  CUtensorMap queries{};
};

// sm_90a (index_logits_sm90.cuh).
absl::Status launch_sm90_bf16(const Plan& plan, const IndexLogitsArgs& args, const TensorMaps& maps, cudaStream_t stream);
absl::Status launch_sm90_fp8(const Plan& plan, const IndexLogitsArgs& args, const TensorMaps& maps, cudaStream_t stream);
absl::Status launch_sm90_fp8_fp8(const Plan& plan, const IndexLogitsArgs& args, const TensorMaps& maps, cudaStream_t stream);
absl::Status launch_sm90_fp4(const Plan& plan, const IndexLogitsArgs& args, const TensorMaps& maps, cudaStream_t stream);

// Every GPU since sm_90 (index_logits_mma.cuh).
absl::Status launch_mma_bf16(const Plan& plan, const IndexLogitsArgs& args, cudaStream_t stream);
absl::Status launch_mma_fp8(const Plan& plan, const IndexLogitsArgs& args, cudaStream_t stream);
absl::Status launch_mma_fp4(const Plan& plan, const IndexLogitsArgs& args, cudaStream_t stream);

}  // namespace needle::logits
