// The battery of index_logits on the CUDA twin: on the kernel that this GPU would be given, and on the mma.sync kernel
// that every GPU can run. `threads` becomes the grid: no grid may change a bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/index_logits_cuda.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/index_logits_battery.h"
#include "tests/kernels/index_logits_cuda_twins.h"
#include "tests/kernels/late_words.h"

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

// What compute-sanitizer runs: every kernel shape, small, with an absent page and partial tiles. Racecheck sees a hazard in a ring
// only where a stage is filled again: one block takes all rows, about 20 tiles through the shortest ring (2, 3 or 4 stages) and
// 5 runs through its two query buffers.
struct SmallKernels {
  const char* name;
  bool wgmma;
  ElementFormat keys;
  QueryElement queries;
};

const SmallKernels kSmallKernels[] = {
    {"sm90a_bf16", true, ElementFormat::kBf16, QueryElement::kBf16},  {"sm90a_fp8", true, ElementFormat::kFp8, QueryElement::kBf16},
    {"sm90a_fp8_fp8", true, ElementFormat::kFp8, QueryElement::kFp8}, {"sm90a_fp4", true, ElementFormat::kFp4, QueryElement::kFp4},
    {"mma_bf16", false, ElementFormat::kBf16, QueryElement::kBf16},   {"mma_fp8", false, ElementFormat::kFp8, QueryElement::kFp8},
    {"mma_fp4", false, ElementFormat::kFp4, QueryElement::kBf16},
};

class IndexLogitsCudaSmallKernels : public ::testing::TestWithParam<SmallKernels> {};

TEST_P(IndexLogitsCudaSmallKernels, agree_in_every_shape) {
  const SmallKernels& kernels = GetParam();
  const CudaTwin cuda{kernels.name, kernels.wgmma};
  const std::string reason = cannot_run_because(cuda);
  if (!reason.empty()) GTEST_SKIP() << reason;
  LogitsTwin twin = logits_twin(cuda);
  twin.run = [&](const IndexLogitsArgs& args, int) {
    LogitsTuning tuning;
    tuning.wgmma = kernels.wgmma;
    tuning.blocks = 1;
    tuning.ring_stages_max = kernels.wgmma ? 3 : 4;
    tuning.converted_ring_stages_max = tuning.ring_stages_max;
    tuning.fp8_product_ring_stages_max = tuning.ring_stages_max;
    return logits_on_device(args, tuning);
  };
  for (const auto& [heads, tokens] : {std::pair{64, 1}, {64, 2}, {64, 4}, {32, 2}, {32, 4}, {32, 8}, {128, 1}, {128, 2}}) {
    SCOPED_TRACE(absl::StrCat(heads, " heads, ", tokens, " queries a row"));
    LogitsShape shape;
    shape.element = kernels.keys;
    shape.q_element = kernels.queries;
    shape.heads = heads;
    shape.queries_per_row = tokens;
    shape.rows = 5;
    shape.slots = tokens < 4 ? 64 : 32;  // of a tile, or of half a tile
    LogitsProblem problem(shape, 31);
    problem.table[1] = kNoPage;
    const int most = shape.slots * shape.pages_per_row - 6;
    for (size_t t = 0; t < problem.visible.size(); ++t) problem.visible[t] = most - static_cast<int>(13 * t % 90);
    expect_agrees(twin, problem);
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, IndexLogitsCudaSmallKernels, ::testing::ValuesIn(kSmallKernels),
                         [](const auto& instance) { return std::string(instance.param.name); });

// Lengths and page ids count as the kernel before left them, however early a block begins.
TEST(IndexLogitsCudaSmall, takes_lengths_and_pages_as_the_kernel_before_left_them) {
  for (const bool wgmma : {true, false}) {
    const std::string reason = cannot_run_because(CudaTwin{"", wgmma});
    if (!reason.empty()) GTEST_SKIP() << reason;
    for (const int queries_per_row : {1, 2}) {
      for (const int rows : {1, 40}) {
        SCOPED_TRACE(absl::StrCat(wgmma ? "wgmma" : "mma", ", ", rows, " rows of ", queries_per_row));
        LogitsShape shape;
        shape.rows = rows;
        shape.queries_per_row = queries_per_row;
        LogitsProblem problem(shape, 44);
        for (size_t t = 0; t < problem.visible.size(); ++t) problem.visible[t] = 250 - static_cast<int>(37 * t % 190);
        const auto words = [&](int count, int32_t value) { return std::vector<int32_t>(static_cast<size_t>(count), value); };
        // What stands there before: nothing, longer rows, and numbers that nothing has been checked for.
        for (const int32_t old_length : {0, 256, 0x7FFFFFFF, -5}) {
          const LogitsOutcome got = outcome_of(problem, [&](const IndexLogitsArgs& host) {
            DeviceCopies copies;
            IndexLogitsArgs args = logits_inputs(copies, host);
            const int pages = static_cast<int>(host.pages.rows * host.pages.row_stride);
            std::vector<int32_t> old_lengths = words(host.query_count, old_length);
            std::vector<int32_t> old_pages = words(pages, 0x7FFFFFFF);
            int32_t* const lengths = copies.in_out(old_lengths.data(), host.query_count);
            int32_t* const page_ids = copies.in_out(old_pages.data(), pages);
            args.scores = copies.in_out(host.scores, host.query_count * host.score_stride);
            args.report = copies.in_out(host.report, 1);
            absl::Status done = write_words_late({{page_ids, args.pages.pages, pages}, {lengths, args.visible, host.query_count}}, nullptr);
            args.visible = lengths;
            args.pages.pages = page_ids;
            LogitsTuning tuning;
            tuning.wgmma = wgmma;
            if (done.ok()) done = finish_on_device(index_logits_cuda_tuned(args, tuning, nullptr));
            if (done.ok()) copies.read_back();
            return done;
          });
          ASSERT_TRUE(got.status.ok()) << got.status;
          EXPECT_TRUE(got.same_bits(run_twin(logits_twin(CudaTwin{"", wgmma}), problem))) << "where lengths were " << old_length;
        }
      }
    }
  }
}

// What selection is left with: of every 16 scores as they were written the largest, and zeros up to the tile's end.
TEST(IndexLogitsCudaMaxima, are_those_of_the_scores) {
  const std::string reason = cannot_run_because(CudaTwin{"", true});
  if (!reason.empty()) GTEST_SKIP() << reason;
  for (const QueryElement element : {QueryElement::kBf16, QueryElement::kFp8}) {
    for (const int heads : {20, 64, 128}) {
      for (const int queries_per_row : {1, 2, 3, 4, 8}) {
        for (const int slots : {64, 128}) {
          SCOPED_TRACE(absl::StrCat("element ", static_cast<int>(element), ", ", heads, " heads, ", queries_per_row, " queries a row, ",
                                    slots, " slots"));
          LogitsShape shape;
          shape.element = static_cast<ElementFormat>(element);
          shape.q_element = element;
          shape.heads = heads;
          shape.slots = slots;
          shape.queries_per_row = queries_per_row;
          shape.rows = 5;
          LogitsProblem problem(shape, 41);
          problem.table[2] = kNoPage;
          problem.poison_slot(problem.table[0], 3);
          for (size_t t = 0; t < problem.visible.size(); ++t) problem.visible[t] = static_cast<int>(53 * t % 257);
          const int64_t stride = round_up(problem.entry_count, 64) / kMaximaGroup;
          std::vector<uint32_t> orders(static_cast<size_t>(problem.queries() * stride), 0xABCDABCDu);
          const LogitsOutcome got = outcome_of(problem, [&](const IndexLogitsArgs& host) {
            DeviceCopies copies;
            IndexLogitsArgs args = logits_inputs(copies, host);
            args.scores = copies.in_out(host.scores, host.query_count * host.score_stride);
            args.report = copies.in_out(host.report, 1);
            const GroupMaxima maxima{copies.in_out(orders.data(), static_cast<int64_t>(orders.size())), stride};
            absl::Status done = finish_on_device(index_logits_with_maxima_cuda(args, maxima, nullptr));
            if (done.ok()) copies.read_back();
            return done;
          });
          ASSERT_TRUE(got.status.ok()) << got.status;
          EXPECT_TRUE(got.same_bits(run_twin(logits_twin(CudaTwin{"", true}), problem)));
          for (int64_t query = 0; query < problem.queries(); ++query) {
            const int64_t visible = problem.visible[static_cast<size_t>(query)];
            for (int64_t group = 0; group < stride; ++group) {
              uint32_t want = 0;
              for (int64_t entry = 16 * group; entry < std::min(visible, 16 * group + 16); ++entry) {
                const float score = got.scores[static_cast<size_t>(query * problem.score_stride() + entry)];
                uint32_t bits = 0;
                std::memcpy(&bits, &score, sizeof bits);
                want = std::max(want, score_order_bits(bits));
              }
              if (16 * group >= round_up(visible, 64)) want = 0xABCDABCDu;  // nobody's
              ASSERT_EQ(orders[static_cast<size_t>(query * stride + group)], want) << "query " << query << ", group " << group;
            }
          }
        }
      }
    }
  }
}

TEST(IndexLogitsCudaMaxima, are_refused_where_no_kernel_writes_them) {
  const std::string reason = no_gpu_because();
  if (!reason.empty()) GTEST_SKIP() << reason;
  LogitsShape shape;
  shape.slots = 32;
  LogitsProblem problem(shape, 42);
  uint32_t order = 0;
  const LogitsOutcome got = outcome_of(problem, [&](const IndexLogitsArgs& host) {
    return index_logits_with_maxima_cuda(host, GroupMaxima{&order, 64}, nullptr);
  });
  EXPECT_EQ(got.status.code(), absl::StatusCode::kUnimplemented) << got.status;
}

}  // namespace
}  // namespace needle::testing
