// The battery of index_logits on the reference and on every CPU instruction set.
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/workers.h"
#include "gtest/gtest.h"
#include "kernels/cpu_isa.h"
#include "kernels/index_logits.h"
#include "tests/kernels/index_logits_battery.h"
#include "tests/kernels/index_logits_cpu_twins.h"

namespace needle::testing {
namespace {

class IndexLogits : public ::testing::TestWithParam<std::tuple<CpuTwinName, LogitsCase>> {};

TEST_P(IndexLogits, keeps_its_promise) {
  const auto& [twin, battery_case] = GetParam();
  if (!twin_is_present(twin)) GTEST_SKIP() << "this machine has no " << name_of_twin(twin) << "; it has " << name_of(best_cpu_isa());
  battery_case.run(logits_twin(twin));
}

INSTANTIATE_TEST_SUITE_P(Cpu, IndexLogits, ::testing::Combine(::testing::ValuesIn(cpu_twin_names()), ::testing::ValuesIn(logits_battery())),
                         [](const auto& instance) {
                           return std::string(name_of_twin(std::get<0>(instance.param))) + "_" + std::get<1>(instance.param).name;
                         });

TEST(IndexLogitsCpu, says_so_when_an_instruction_set_is_missing) {
  LogitsProblem problem(LogitsShape{}, 1);
  for (CpuIsa isa : {CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16}) {
    if (cpu_has(isa)) continue;
    const LogitsOutcome outcome = outcome_of(problem, [&](const IndexLogitsArgs& args) {
      CallerThread caller;
      return index_logits_cpu(args, isa, caller);
    });
    EXPECT_EQ(outcome.status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(outcome.status.ToString().find(name_of(isa)), std::string::npos) << outcome.status;
    EXPECT_EQ(bits_of(outcome.scores[0]), kUntouched);
  }
}

TEST(IndexLogitsCpu, gives_each_instruction_set_a_variant_of_its_own) {
  EXPECT_EQ(score_variant(CpuIsa::kPortable), ScoreVariant::kCpuPortable);
  EXPECT_EQ(score_variant(CpuIsa::kAvx2), ScoreVariant::kCpuAvx2);
  EXPECT_EQ(score_variant(CpuIsa::kAvx512), ScoreVariant::kCpuAvx512);
  EXPECT_EQ(score_variant(CpuIsa::kAvx512Bf16), ScoreVariant::kCpuAvx512Bf16);
  EXPECT_TRUE(flushes_denormals(ScoreVariant::kCpuAvx512Bf16));
  EXPECT_FALSE(flushes_denormals(ScoreVariant::kReference));
  EXPECT_FALSE(flushes_denormals(ScoreVariant::kCpuAvx2));
}

}  // namespace
}  // namespace needle::testing
