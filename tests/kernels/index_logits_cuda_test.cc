// The battery of index_logits on the CUDA twin: on the kernel that this GPU would be given, and on the mma.sync kernel
// that every GPU can run. `threads` becomes the grid: no grid may change a bit.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/index_logits_cuda.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/index_logits_battery.h"
#include "tests/kernels/index_logits_cuda_twins.h"

namespace needle::testing {
namespace {

class IndexLogitsCuda : public ::testing::TestWithParam<std::tuple<CudaTwin, LogitsCase>> {};

TEST_P(IndexLogitsCuda, keeps_its_promise) {
  const auto& [cuda, battery_case] = GetParam();
  const std::string reason = cannot_run_because(cuda);
  if (!reason.empty()) GTEST_SKIP() << reason;
  battery_case.run(logits_twin(cuda));
}

INSTANTIATE_TEST_SUITE_P(Gpu, IndexLogitsCuda, ::testing::Combine(::testing::ValuesIn(kCudaTwins), ::testing::ValuesIn(logits_battery())),
                         [](const auto& instance) {
                           return std::string(std::get<0>(instance.param).name) + "_" + std::get<1>(instance.param).name;
                         });

TEST(IndexLogitsCudaVariant, is_named_after_the_device) {
  const std::string reason = no_gpu_because();
  if (!reason.empty()) GTEST_SKIP() << reason;
  const absl::StatusOr<ScoreVariant> variant = score_variant_cuda();
  ASSERT_TRUE(variant.ok()) << variant.status();
  EXPECT_GE(static_cast<uint32_t>(*variant), static_cast<uint32_t>(ScoreVariant::kCudaSm90));
  EXPECT_LE(static_cast<uint32_t>(*variant), static_cast<uint32_t>(ScoreVariant::kCudaPlain));
  EXPECT_FALSE(flushes_denormals(*variant));
}

// What compute-sanitizer runs: every kernel shape and key format once, small, with an absent page and partial tiles.
TEST(IndexLogitsCudaSmall, runs_every_kernel_shape) {
  const std::string reason = no_gpu_because();
  if (!reason.empty()) GTEST_SKIP() << reason;
  const bool hopper = current_device_facts()->major == 9 && current_device_facts()->minor == 0;
  for (const bool wgmma : {true, false}) {
    if (wgmma && !hopper) continue;
    // fp8 keys twice: converted for bf16 queries, multiplied as they are by fp8 queries.
    const std::pair<ElementFormat, QueryElement> formats[] = {{ElementFormat::kBf16, QueryElement::kBf16},
                                                              {ElementFormat::kFp8, QueryElement::kBf16},
                                                              {ElementFormat::kFp8, QueryElement::kFp8},
                                                              {ElementFormat::kFp4, QueryElement::kBf16}};
    for (const auto& [element, q_element] : formats) {
      for (const int heads : {32, 64, 128}) {
        for (const int queries_per_row : {1, 2, 4, 8}) {
          LogitsShape shape;
          shape.element = element;
          shape.q_element = q_element;
          shape.heads = heads;
          shape.queries_per_row = queries_per_row;
          shape.rows = 3;
          LogitsProblem problem(shape, 31);
          problem.table[1] = kNoPage;
          for (size_t t = 0; t < problem.visible.size(); ++t) problem.visible[t] = 250 - static_cast<int>(37 * t % 190);
          SCOPED_TRACE(absl::StrCat(wgmma ? "wgmma" : "mma", ", keys ", static_cast<int>(element), ", queries ",
                                    static_cast<int>(q_element), ", ", heads, " heads, ", queries_per_row, " queries a row"));
          expect_agrees(logits_twin(CudaTwin{"", wgmma}), problem, 2);
        }
      }
    }
  }
}

}  // namespace
}  // namespace needle::testing
