// The CUDA twins of index_logits as the battery and the golden tests take them: the wgmma kernel of sm_90a, and the
// mma.sync kernel that every GPU can run. `threads` becomes the grid, the ring and how
// much of it is in flight: none may change a bit.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/index_logits_cuda.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/index_logits_battery.h"

namespace needle::testing {

// Device copies of what index_logits reads; scores and report stay the caller's business.
inline IndexLogitsArgs logits_inputs(DeviceCopies& copies, const IndexLogitsArgs& host) {
  IndexLogitsArgs args = host;
  const int64_t vectors = int64_t{host.query_count} * host.heads;
  args.keys.base = static_cast<const std::byte*>(copies.in_bytes(host.keys.base, host.keys.page_stride * host.keys.page_count));
  args.pages.pages = copies.in(host.pages.pages, host.pages.rows * host.pages.row_stride);
  args.pages.entry_base = copies.in(host.pages.entry_base, host.pages.rows);
  args.q = copies.in_bytes(host.q, vectors * query_vector_bytes(host.q_element));
  args.q_scale = copies.in(host.q_scale, vectors * (kIndexHeadDim / 32));
  args.head_weights = copies.in(host.head_weights, vectors);
  args.query_row = copies.in(host.query_row, host.query_count);
  args.visible = copies.in(host.visible, host.query_count);
  return args;
}

inline absl::Status logits_on_device(const IndexLogitsArgs& host, const LogitsTuning& tuning) {
  absl::Status possible = check_index_logits(host);
  if (!possible.ok()) return index_logits_cuda_tuned(host, tuning, nullptr);  // refused before any pointer is looked at
  DeviceCopies copies;
  IndexLogitsArgs args = logits_inputs(copies, host);
  args.scores = copies.in_out(host.scores, host.query_count * host.score_stride);
  args.report = copies.in_out(host.report, 1);
  absl::Status done = finish_on_device(index_logits_cuda_tuned(args, tuning, nullptr));
  if (done.ok()) copies.read_back();
  return done;
}

struct CudaTwin {
  const char* name;
  bool wgmma;
};
inline void PrintTo(const CudaTwin& twin, std::ostream* out) { *out << twin.name; }

inline LogitsTwin logits_twin(const CudaTwin& cuda) {
  LogitsTwin twin;
  twin.name = cuda.name;
  twin.variant = cuda.wgmma ? ScoreVariant::kCudaSm90 : ScoreVariant::kCudaPlain;
  twin.reads_host_memory = false;
  if (cuda.wgmma) twin.fp8_product_error_max = 1e-3;
  twin.run = [wgmma = cuda.wgmma](const IndexLogitsArgs& args, int threads) {
    LogitsTuning tuning;
    tuning.wgmma = wgmma;
    tuning.blocks = threads == 1 ? 0 : 3 * threads;
    tuning.ring_stages_max = threads == 1 ? 12 : 4 + threads;
    tuning.short_tiles_in_flight = 2 + threads;
    tuning.converted_ring_stages_max = tuning.ring_stages_max;
    tuning.fp8_product_ring_stages_max = tuning.ring_stages_max;
    return logits_on_device(args, tuning);
  };
  return twin;
}

// Empty where it can.
inline std::string cannot_run_because(const CudaTwin& twin) {
  std::string reason = no_gpu_because();
  if (!reason.empty() || !twin.wgmma) return reason;
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (facts->major == 9 && facts->minor == 0) return "";
  return absl::StrCat("the wgmma kernel runs on compute capability 9.0; this GPU has ", facts->major, ".", facts->minor);
}

inline constexpr CudaTwin kCudaTwins[] = {{"sm90a", true}, {"mma", false}};

}  // namespace needle::testing
