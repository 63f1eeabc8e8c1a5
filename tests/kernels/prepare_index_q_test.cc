// The prepare_index_q battery on the reference and every CPU instruction set, and what holds between them.
#include <gtest/gtest.h>

#include "tests/kernels/prepare_index_q_battery.h"
#include "tests/kernels/store_twins.h"

namespace needle::testing {
namespace {

PrepareTwin host_prepare(int which) {
  if (which == 0) return {"ref", true, [](const PrepareIndexQArgs& args, int) { return prepare_index_q_ref(args); }};
  const CpuIsa isa = all_cpu_isas()[static_cast<size_t>(which - 1)];
  return {name_of(isa), true, [isa](const PrepareIndexQArgs& args, int threads) {
            WorkerThreads workers(threads);
            return prepare_index_q_cpu(args, isa, workers);
          }};
}

class PrepareIndexQ : public ::testing::TestWithParam<std::tuple<int, size_t>> {};

TEST_P(PrepareIndexQ, battery) {
  const auto [which, index] = GetParam();
  if (!host_store_present(which)) GTEST_SKIP() << "this machine has no " << host_store_name(which);
  prepare_cases()[index].run(host_prepare(which));
}

INSTANTIATE_TEST_SUITE_P(, PrepareIndexQ,
                         ::testing::Combine(::testing::Range(0, kHostStores), ::testing::Range(size_t{0}, prepare_cases().size())),
                         [](const auto& each) {
                           return host_store_name(std::get<0>(each.param)) + "__" + prepare_cases()[std::get<1>(each.param)].name;
                         });

TEST(PrepareIndexQTwins, every_instruction_set_gives_the_same_bits) {
  for (const PrepareShape& shape : all_prepare_shapes()) {
    PrepareWorld portable(shape, 11);
    CallerThread alone;
    ASSERT_TRUE(prepare_index_q_cpu(portable.args(), CpuIsa::kPortable, alone).ok());
    for (CpuIsa isa : cpu_isas_present()) {
      PrepareWorld world(shape, 11);
      ASSERT_TRUE(prepare_index_q_cpu(world.args(), isa, alone).ok());
      EXPECT_TRUE(portable.out_q == world.out_q) << describe(shape) << " on " << name_of(isa);
      EXPECT_TRUE(portable.out_weights == world.out_weights) << describe(shape) << " on " << name_of(isa);
      EXPECT_TRUE(portable.out_scale == world.out_scale) << describe(shape) << " on " << name_of(isa);
    }
  }
}

}  // namespace
}  // namespace needle::testing
