// The battery of read_topk on the CUDA twin, and what a device adds: a captured graph, reports counted once, and a kernel before
// it that writes lengths and page ids when this one's blocks have begun.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/read_topk.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/index_logits_cuda_twins.h"
#include "tests/kernels/late_words.h"
#include "tests/kernels/read_topk_battery.h"

namespace needle::testing {
namespace {

PrepareIndexQArgs prepare_on_device(DeviceCopies& copies, const PrepareIndexQArgs& host) {
  PrepareIndexQArgs args = host;
  const auto rows = [&](const RowsView& view, int64_t columns) {
    const int64_t element = view.element == RowElement::kBf16 ? 2 : 4;
    return copies.in_bytes(view.data, reach(host.tokens, view.row_stride, columns) * element);
  };
  args.q.data = rows(host.q, int64_t{host.heads} * kIndexHeadDim);
  args.raw_weights.data = rows(host.raw_weights, host.heads);
  args.positions = copies.in(host.positions, host.tokens);
  args.rope.cos_sin = copies.in(host.rope.cos_sin, host.rope.positions * 64);
  return args;
}

// Scratch of exactly so many bytes, with a guard behind them.
class GuardedDeviceScratch {
 public:
  explicit GuardedDeviceScratch(int64_t bytes) : bytes_(bytes), filled_(static_cast<size_t>(bytes + kGuard), std::byte{0x5A}) {
    memory_.emplace(filled_.data(), static_cast<int64_t>(filled_.size()));
  }
  void* data() const { return memory_->get(); }
  bool guard_is_whole() {
    memory_->read_back(filled_.data());
    for (int64_t i = 0; i < kGuard; ++i) {
      if (filled_[static_cast<size_t>(bytes_ + i)] != std::byte{0x5A}) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 256;
  int64_t bytes_;
  std::vector<std::byte> filled_;
  std::optional<DeviceArray<std::byte>> memory_;
};

enum class Launched { kDirectly, kAsGraphTwice, kBehindALateWriter };

absl::Status read_on_device(const ReadTopkArgs& host, const ReadTopkPlan& plan, int64_t scratch_bytes, Launched launched) {
  DeviceCopies copies;
  ReadTopkArgs args = host;
  args.logits = logits_inputs(copies, host.logits);
  PrepareIndexQArgs prepare;
  if (host.prepare != nullptr) {
    prepare = prepare_on_device(copies, *host.prepare);
    args.prepare = &prepare;
  }
  const int64_t cells = host.logits.query_count * host.out_stride;
  args.positions = copies.in_out(host.positions, cells);
  args.slots = copies.in_out(host.slots, cells);
  args.out_scores = copies.in_out(host.out_scores, cells);
  args.counts = copies.in_out(host.counts, host.logits.query_count);
  args.report = copies.in_out(host.report, 1);
  GuardedDeviceScratch scratch(scratch_bytes);
  absl::Status done;
  std::vector<int32_t> no_pages, no_lengths;
  if (launched == Launched::kBehindALateWriter && check_read_topk(host).ok()) {
    // Until then there is nothing that could be taken for a length or a page.
    const int pages = static_cast<int>(host.logits.pages.rows * host.logits.pages.row_stride);
    no_pages.assign(static_cast<size_t>(pages), 0x7FFFFFFF);
    no_lengths.assign(static_cast<size_t>(host.logits.query_count), 0x7FFFFFFF);
    int32_t* const page_ids = copies.in_out(no_pages.data(), pages);
    int32_t* const lengths = copies.in_out(no_lengths.data(), host.logits.query_count);
    done = write_words_late({{page_ids, args.logits.pages.pages, pages}, {lengths, args.logits.visible, host.logits.query_count}}, nullptr);
    args.logits.pages.pages = page_ids;
    args.logits.visible = lengths;
    if (!done.ok()) return done;
  }
  if (launched != Launched::kAsGraphTwice) {
    done = finish_on_device(read_topk_cuda(args, plan, scratch.data(), scratch_bytes, nullptr));
  } else {
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    must_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    must_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    done = read_topk_cuda(args, plan, scratch.data(), scratch_bytes, stream);
    must_cuda(cudaStreamEndCapture(stream, &graph));
    if (done.ok()) {
      must_cuda(cudaGraphInstantiate(&executable, graph, 0));
      for (int replay = 0; replay < 2; ++replay) {
        if (replay == 1 && args.report != nullptr) must_cuda(cudaMemsetAsync(args.report, 0, sizeof(OpReport), stream));
        must_cuda(cudaGraphLaunch(executable, stream));
      }
      done = finish_on_device(absl::OkStatus());
      must_cuda(cudaGraphExecDestroy(executable));
    }
    must_cuda(cudaGraphDestroy(graph));
    must_cuda(cudaStreamDestroy(stream));
  }
  if (!done.ok()) return done;
  EXPECT_TRUE(scratch.guard_is_whole());
  copies.read_back();
  return done;
}

ReadTopkTwin cuda_twin(Launched launched) {
  ReadTopkTwin twin;
  twin.name = "cuda";
  twin.unavailable = no_gpu_because();
  twin.cuts_for_cache = true;
  twin.plan = [](const ReadTopkArgs& args, int, int64_t budget) { return plan_read_topk_cuda(args, budget); };
  twin.run = [launched](const ReadTopkArgs& args, const ReadTopkPlan& plan, int, int64_t scratch_bytes) {
    return read_on_device(args, plan, scratch_bytes, launched);
  };
  twin.prepare = [](const PrepareIndexQArgs& host) {
    DeviceCopies copies;
    PrepareIndexQArgs args = prepare_on_device(copies, host);
    const int64_t vectors = host.tokens * host.heads;
    args.out_q = copies.in_out_bytes(host.out_q, vectors * query_vector_bytes(host.element));
    args.out_q_scale = copies.in_out(host.out_q_scale, vectors * (kIndexHeadDim / 32));
    args.out_weights = copies.in_out(host.out_weights, vectors);
    args.report = copies.in_out(host.report, 1);
    absl::Status done = finish_on_device(prepare_index_q_cuda(args, nullptr));
    if (done.ok()) copies.read_back();
    return done;
  };
  twin.logits = [](const IndexLogitsArgs& host) {
    DeviceCopies copies;
    IndexLogitsArgs args = logits_inputs(copies, host);
    args.scores = copies.in_out(host.scores, host.query_count * host.score_stride);
    args.report = copies.in_out(host.report, 1);
    absl::Status done = finish_on_device(index_logits_cuda(args, nullptr, 0, nullptr));
    if (done.ok()) copies.read_back();
    return done;
  };
  return twin;
}

class ReadTopkCuda : public ::testing::TestWithParam<std::tuple<Launched, ReadTopkCase>> {};

TEST_P(ReadTopkCuda, keeps_its_promise) {
  const auto& [launched, battery_case] = GetParam();
  const ReadTopkTwin twin = cuda_twin(launched);
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  battery_case.run(twin);
}

std::string name_of_instance(const ::testing::TestParamInfo<std::tuple<Launched, ReadTopkCase>>& instance) {
  const Launched launched = std::get<0>(instance.param);
  return std::string(launched == Launched::kDirectly       ? "directly"
                     : launched == Launched::kAsGraphTwice ? "as_a_graph"
                                                           : "behind_a_late_writer") +
         "_" + std::get<1>(instance.param).name;
}

// The small ones are what compute-sanitizer runs: a few hundred entries a sequence. What goes round a ring more than once is in the
// kernels' own tests.
std::vector<ReadTopkCase> cases_that_are_small(bool small) {
  std::vector<ReadTopkCase> cases = read_topk_battery();
  std::erase_if(cases, [small](const ReadTopkCase& battery_case) {
    return small == (battery_case.run == answers_for_one_token_a_sequence || battery_case.run == reads_a_context_of_a_million_entries);
  });
  return cases;
}

const auto kEveryLaunch = ::testing::Values(Launched::kDirectly, Launched::kAsGraphTwice, Launched::kBehindALateWriter);

INSTANTIATE_TEST_SUITE_P(Small, ReadTopkCuda, ::testing::Combine(kEveryLaunch, ::testing::ValuesIn(cases_that_are_small(true))),
                         name_of_instance);
INSTANTIATE_TEST_SUITE_P(Large, ReadTopkCuda, ::testing::Combine(kEveryLaunch, ::testing::ValuesIn(cases_that_are_small(false))),
                         name_of_instance);

}  // namespace
}  // namespace needle::testing
