// The battery of index_logits on the CUDA twin: on the kernel that this GPU would be given, and on the mma.sync kernel
// that every GPU can run. `threads` becomes the grid: no grid may change a bit.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "kernels/index_logits_cuda.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/index_logits_battery.h"

namespace needle::testing {
namespace {

absl::Status logits_on_device(const IndexLogitsArgs& host, const LogitsTuning& tuning) {
  absl::Status possible = check_index_logits(host);
  if (!possible.ok()) return index_logits_cuda_tuned(host, tuning, nullptr);  // refused before any pointer is looked at
  const int64_t vectors = int64_t{host.query_count} * host.heads;
  const DeviceArray<std::byte> pool(host.keys.base, host.keys.page_stride * host.keys.page_count);
  const DeviceArray<int32_t> pages(host.pages.pages, host.pages.rows * host.pages.row_stride);
  const DeviceArray<std::byte> q(static_cast<const std::byte*>(host.q), vectors * query_vector_bytes(host.q_element));
  const DeviceArray<uint8_t> q_scale(host.q_scale, vectors * (kIndexHeadDim / 32));
  const DeviceArray<float> weights(host.head_weights, vectors);
  const DeviceArray<int32_t> query_row(host.query_row, host.query_count);
  const DeviceArray<int32_t> visible(host.visible, host.query_count);
  const DeviceArray<float> scores(host.scores, host.query_count * host.score_stride);
  const DeviceArray<OpReport> report(host.report, 1);
  IndexLogitsArgs args = host;
  args.keys.base = pool.get();
  args.pages.pages = pages.get();
  args.q = q.get();
  args.q_scale = q_scale.get();
  args.head_weights = weights.get();
  args.query_row = query_row.get();
  args.visible = visible.get();
  args.scores = scores.get();
  args.report = report.get();
  absl::Status done = finish_on_device(index_logits_cuda_tuned(args, tuning, nullptr));
  if (!done.ok()) return done;
  scores.read_back(host.scores);
  report.read_back(host.report);
  return done;
}

struct CudaTwin {
  const char* name;
  bool wgmma;
};
void PrintTo(const CudaTwin& twin, std::ostream* out) { *out << twin.name; }

LogitsTwin logits_twin(const CudaTwin& cuda) {
  LogitsTwin twin;
  twin.name = cuda.name;
  twin.variant = cuda.wgmma ? ScoreVariant::kCudaSm90 : ScoreVariant::kCudaPlain;
  twin.reads_host_memory = false;
  twin.run = [wgmma = cuda.wgmma](const IndexLogitsArgs& args, int threads) {
    LogitsTuning tuning;
    tuning.wgmma = wgmma;
    tuning.blocks = threads == 1 ? 0 : 3 * threads;
    tuning.ring_stages_max = threads == 1 ? 12 : 4 + threads;
    tuning.converted_ring_stages_max = tuning.ring_stages_max;
    return logits_on_device(args, tuning);
  };
  return twin;
}

class IndexLogitsCuda : public ::testing::TestWithParam<std::tuple<CudaTwin, LogitsCase>> {};

TEST_P(IndexLogitsCuda, keeps_its_promise) {
  const auto& [cuda, battery_case] = GetParam();
  const std::string reason = no_gpu_because();
  if (!reason.empty()) GTEST_SKIP() << reason;
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (cuda.wgmma && (facts->major != 9 || facts->minor != 0)) {
    GTEST_SKIP() << "the wgmma kernel runs on compute capability 9.0; this GPU has " << facts->major << "." << facts->minor;
  }
  battery_case.run(logits_twin(cuda));
}

INSTANTIATE_TEST_SUITE_P(Gpu, IndexLogitsCuda,
                         ::testing::Combine(::testing::Values(CudaTwin{"sm90a", true}, CudaTwin{"mma", false}),
                                            ::testing::ValuesIn(logits_battery())),
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
    for (const ElementFormat element : {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4}) {
      for (const int heads : {32, 64, 128}) {
        for (const int queries_per_row : {1, 2, 4, 8}) {
          LogitsShape shape;
          shape.element = element;
          shape.heads = heads;
          shape.queries_per_row = queries_per_row;
          shape.rows = 3;
          LogitsProblem problem(shape, 31);
          problem.table[1] = kNoPage;
          for (size_t t = 0; t < problem.visible.size(); ++t) problem.visible[t] = 250 - static_cast<int>(37 * t % 190);
          SCOPED_TRACE(absl::StrCat(wgmma ? "wgmma" : "mma", ", element ", static_cast<int>(element), ", ", heads, " heads, ",
                                    queries_per_row, " queries a row"));
          expect_agrees(logits_twin(CudaTwin{"", wgmma}), problem, 2);
        }
      }
    }
  }
}

}  // namespace
}  // namespace needle::testing
