// The battery of read_topk on the CPU twins.
#include "kernels/read_topk.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "kernels/cpu_isa.h"
#include "tests/kernels/read_topk_battery.h"

namespace needle::testing {
namespace {

ReadTopkTwin cpu_twin(CpuIsa isa) {
  ReadTopkTwin twin;
  twin.name = name_of(isa);
  if (!cpu_has(isa)) twin.unavailable = "this machine has no " + twin.name;
  twin.widths = {1, 3, 16};
  twin.plan = plan_read_topk_cpu;
  twin.run = [isa](const ReadTopkArgs& args, const ReadTopkPlan& plan, int width, int64_t scratch_bytes) {
    WorkerThreads workers(width);
    GuardedScratch scratch(scratch_bytes);
    absl::Status status = read_topk_cpu(args, plan, isa, workers, scratch.data(), scratch_bytes);
    EXPECT_TRUE(scratch.guard_is_whole());
    return status;
  };
  twin.prepare = [isa](const PrepareIndexQArgs& args) {
    CallerThread workers;
    return prepare_index_q_cpu(args, isa, workers);
  };
  twin.logits = [isa](const IndexLogitsArgs& args) {
    CallerThread workers;
    return index_logits_cpu(args, isa, workers);
  };
  return twin;
}

class ReadTopk : public ::testing::TestWithParam<std::tuple<CpuIsa, ReadTopkCase>> {};

TEST_P(ReadTopk, keeps_its_promise) {
  const auto& [isa, battery_case] = GetParam();
  const ReadTopkTwin twin = cpu_twin(isa);
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  battery_case.run(twin);
}

INSTANTIATE_TEST_SUITE_P(Cpu, ReadTopk,
                         ::testing::Combine(::testing::Values(CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16),
                                            ::testing::ValuesIn(read_topk_battery())),
                         [](const auto& instance) {
                           return std::string(name_of(std::get<0>(instance.param))) + "_" + std::get<1>(instance.param).name;
                         });

}  // namespace
}  // namespace needle::testing
