// The golden files and the real vectors on the reference and the CPU twins.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <tuple>

#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "tests/kernels/index_logits_cpu_twins.h"
#include "tests/kernels/index_logits_golden.h"

namespace needle::testing {
namespace {

GoldenTwin golden_twin(CpuTwinName name) {
  GoldenTwin twin;
  twin.name = name_of_twin(name);
  if (!twin_is_present(name)) twin.unavailable = "this machine has no " + twin.name;
  twin.logits = logits_twin(name);
  twin.select = [](const SelectTopkArgs& args) {
    WorkerThreads workers(2);
    const int64_t scratch_bytes = select_topk_cpu_scratch(args, workers.width());
    void* scratch = std::aligned_alloc(64, static_cast<size_t>(round_up(std::max<int64_t>(scratch_bytes, 64), 64)));
    absl::Status status = select_topk_cpu(args, best_cpu_isa(), workers, scratch, scratch_bytes);
    std::free(scratch);
    return status;
  };
  return twin;
}

class GoldenLogits : public ::testing::TestWithParam<CpuTwinName> {};

TEST_P(GoldenLogits, reproduces_float64_sums_over_bf16_keys) {
  const GoldenTwin twin = golden_twin(GetParam());
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  reproduces_float64_sums_over_bf16_keys(twin);
}

TEST_P(GoldenLogits, selects_the_set_of_float64_sums_over_bf16_keys) {
  const GoldenTwin twin = golden_twin(GetParam());
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  selects_the_set_of_float64_sums_over_bf16_keys(twin);
}

INSTANTIATE_TEST_SUITE_P(Cpu, GoldenLogits, ::testing::ValuesIn(cpu_twin_names()),
                         [](const auto& instance) { return std::string(name_of_twin(instance.param)); });

class RealVectors : public ::testing::TestWithParam<std::tuple<CpuTwinName, const char*, const char*>> {};

TEST_P(RealVectors, give_the_golden_top_512) {
  const auto& [name, set, format] = GetParam();
  const GoldenTwin twin = golden_twin(name);
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  give_the_golden_top_512(twin, set, format);
}

INSTANTIATE_TEST_SUITE_P(Cpu, RealVectors,
                         ::testing::Combine(::testing::Values(CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16),
                                            ::testing::ValuesIn(kVectorSets), ::testing::ValuesIn(kVectorFormats)),
                         [](const auto& instance) {
                           return std::string(name_of_twin(std::get<0>(instance.param))) + "_" + std::get<1>(instance.param) + "_" +
                                  std::get<2>(instance.param);
                         });

}  // namespace
}  // namespace needle::testing
