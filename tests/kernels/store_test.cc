// The store battery on the reference and every CPU instruction set, and what holds between them.
#include <gtest/gtest.h>

#include <map>

#include "tests/kernels/store_battery.h"
#include "tests/kernels/store_twins.h"

namespace needle::testing {
namespace {

class Store : public ::testing::TestWithParam<std::tuple<int, size_t>> {};

TEST_P(Store, battery) {
  const auto [which, index] = GetParam();
  if (!host_store_present(which)) GTEST_SKIP() << "this machine has no " << host_store_name(which);
  store_cases()[index].run(host_store(which));
}

INSTANTIATE_TEST_SUITE_P(, Store, ::testing::Combine(::testing::Range(0, kHostStores), ::testing::Range(size_t{0}, store_cases().size())),
                         [](const auto& each) {
                           return host_store_name(std::get<0>(each.param)) + "__" + store_cases()[std::get<1>(each.param)].name;
                         });

TEST(StoreTwins, every_instruction_set_gives_the_same_bits) {
  for (const Component& component : all_stored_components()) {
    for (RoundingMode rounding : {RoundingMode::kOnce, RoundingMode::kRefV4, RoundingMode::kVllm}) {
      if (rounding == RoundingMode::kVllm && component.element == ElementFormat::kFp8 && component.scale != ScaleKind::kPowerOfTwo) {
        continue;
      }
      for (NormKind norm : {NormKind::kRms, NormKind::kLayer, NormKind::kNone}) {
        StoreShape shape = shape_of(component, component.ratio == 128 ? 1 : 6, component.ratio / 2);
        shape.rounding = rounding;
        shape.norm = norm;
        shape.element = norm == NormKind::kLayer ? RowElement::kFp32 : RowElement::kBf16;
        shape.form = component.ratio == 128 ? StateForm::kRunning : StateForm::kRaw;
        StoreWorld portable(shape, 201);
        portable.run(cpu_store(CpuIsa::kPortable), {5});
        for (CpuIsa isa : cpu_isas_present()) {
          StoreWorld world(shape, 201);
          world.run(cpu_store(isa), {11});
          expect_same_bytes(portable, world, describe(component) + " on " + name_of(isa));
          EXPECT_TRUE(portable.finished == world.finished);
        }
      }
    }
  }
}

TEST(StoreTwins, the_reference_and_the_fast_twins_write_the_same_records) {
  Rng rng(202);
  for (StoreShape shape : shapes_with_state()) {
    shape.speculative_rows = 5;
    StoreWorld slow(shape, 203);
    StoreWorld fast(shape, 203);
    const StoreTwin cpu = cpu_store(best_cpu_isa());
    slow.start_all(reference_store());
    fast.start_all(cpu);
    for (int64_t at = 0; at < shape.tokens;) {
      CallOptions options;
      options.speculative = rng.chance(0.4);
      const int64_t count = std::min<int64_t>(rng.between(1, options.speculative ? 5 : 40), shape.tokens - at);
      ASSERT_TRUE(slow.store(reference_store(), {{0, at, count}}, options).ok());
      ASSERT_TRUE(fast.store(cpu, {{0, at, count}}, options).ok());
      EXPECT_TRUE(slow.records.copy() == fast.records.copy()) << describe(shape.component) << " at " << at;
      int64_t accepted = count;
      if (options.speculative) {
        accepted = rng.between(0, count);
        ASSERT_TRUE(slow.commit(reference_store(), 0, at, static_cast<int>(count), static_cast<int>(accepted)).ok());
        ASSERT_TRUE(fast.commit(cpu, 0, at, static_cast<int>(count), static_cast<int>(accepted)).ok());
        EXPECT_TRUE(slow.records.copy() == fast.records.copy()) << describe(shape.component) << " committed at " << at;
      }
      at += accepted;
    }
    EXPECT_EQ(slow.report.status, 0u);
    EXPECT_EQ(fast.report.status, 0u);
  }
}

}  // namespace
}  // namespace needle::testing
