// The golden files and the real vectors on the CUDA twins, scored and selected on the device.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "kernels/select_topk.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/index_logits_cuda_twins.h"
#include "tests/kernels/index_logits_golden.h"

namespace needle::testing {
namespace {

absl::Status select_on_device(const SelectTopkArgs& host) {
  DeviceCopies copies;
  SelectTopkArgs args = host;
  args.scores = copies.in(host.scores, host.rows * host.score_stride);
  args.lengths = copies.in(host.lengths, host.rows);
  args.positions = copies.in_out(host.positions, host.rows * host.out_stride);
  args.counts = copies.in_out(host.counts, host.rows);
  absl::Status done = finish_on_device(select_topk_cuda(args, nullptr, 0, nullptr));
  if (done.ok()) copies.read_back();
  return done;
}

GoldenTwin golden_twin(const CudaTwin& cuda) {
  GoldenTwin twin;
  twin.name = cuda.name;
  twin.unavailable = cannot_run_because(cuda);
  twin.logits = logits_twin(cuda);
  twin.select = select_on_device;
  return twin;
}

class GoldenLogitsCuda : public ::testing::TestWithParam<CudaTwin> {};

TEST_P(GoldenLogitsCuda, reproduces_float64_sums_over_bf16_keys) {
  const GoldenTwin twin = golden_twin(GetParam());
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  reproduces_float64_sums_over_bf16_keys(twin);
}

TEST_P(GoldenLogitsCuda, selects_the_set_of_float64_sums_over_bf16_keys) {
  const GoldenTwin twin = golden_twin(GetParam());
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  selects_the_set_of_float64_sums_over_bf16_keys(twin);
}

INSTANTIATE_TEST_SUITE_P(Gpu, GoldenLogitsCuda, ::testing::ValuesIn(kCudaTwins),
                         [](const auto& instance) { return std::string(instance.param.name); });

class RealVectorsCuda : public ::testing::TestWithParam<std::tuple<CudaTwin, const char*, const char*>> {};

TEST_P(RealVectorsCuda, give_the_golden_top_512) {
  const auto& [cuda, set, format] = GetParam();
  const GoldenTwin twin = golden_twin(cuda);
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  give_the_golden_top_512(twin, set, format);
}

TEST_P(RealVectorsCuda, score_within_the_norm_of_float64) {
  const auto& [cuda, set, format] = GetParam();
  const GoldenTwin twin = golden_twin(cuda);
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  real_vectors_score_within_the_norm(twin, set, format);
}

INSTANTIATE_TEST_SUITE_P(Gpu, RealVectorsCuda,
                         ::testing::Combine(::testing::ValuesIn(kCudaTwins), ::testing::ValuesIn(kVectorSets),
                                            ::testing::ValuesIn(kVectorFormats)),
                         [](const auto& instance) {
                           return std::string(std::get<0>(instance.param).name) + "_" + std::get<1>(instance.param) + "_" +
                                  std::get<2>(instance.param);
                         });

}  // namespace
}  // namespace needle::testing
