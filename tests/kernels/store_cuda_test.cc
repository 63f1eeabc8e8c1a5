// The batteries of store, of the compressor state and of prepare_index_q on the CUDA twins (store_cuda and
// compressor_state_cuda are one battery, as on the host).
#include <gtest/gtest.h>

#include <cctype>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/store_plan.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/prepare_index_q_battery.h"
#include "tests/kernels/store_battery.h"

namespace needle::testing {
namespace {

int64_t row_bytes(const RowsView& rows, int64_t count, int64_t columns) {
  return reach(count, rows.row_stride, columns) * (rows.element == RowElement::kFp32 ? 4 : 2);
}

EntryChain chain_on_device(const EntryChain& host, DeviceCopies& copies) {
  EntryChain chain = host;
  chain.norm_weight = copies.in(host.norm_weight, norm_dims(host.component.head_dim));
  chain.norm_bias = copies.in(host.norm_bias, norm_dims(host.component.head_dim));
  chain.rope.cos_sin = copies.in(host.rope.cos_sin, host.rope.positions * kRopeDims);
  return chain;
}

MutableLayerView layer_on_device(const MutableLayerView& host, DeviceCopies& copies) {
  MutableLayerView layer = host;
  layer.base = copies.in_out(host.base,
                             reach(host.page_count, host.page_stride, layer_page_bytes(host.element, host.head_dim, host.slots_per_page)));
  return layer;
}

StateView state_on_device(const StateView& host, DeviceCopies& copies) {
  StateView state = host;
  state.base = copies.in_out(
      host.base, reach(host.count, host.stride, state_record_bytes(host.form, host.ratio, host.head_dim, host.speculative_rows)));
  return state;
}

PageTableView table_on_device(const PageTableView& host, DeviceCopies& copies) {
  PageTableView pages = host;
  pages.pages = copies.in(host.pages, host.rows * host.row_stride);
  pages.entry_base = copies.in(host.entry_base, host.rows);
  return pages;
}

absl::Status rows_on_device(const StoreRowsArgs& host, const StorePlan& plan) {
  if (!check_store_rows(host).ok()) return store_rows_cuda(host, nullptr, 0, nullptr);
  DeviceCopies copies;
  const int64_t dims = host.chain.component.head_dim;
  const int64_t columns = row_halves(host.chain.component.ratio) * dims;
  StoreRowsArgs args = host;
  args.chain = chain_on_device(host.chain, copies);
  args.out = layer_on_device(host.out, copies);
  args.pages = table_on_device(host.pages, copies);
  args.kv.data = copies.in_bytes(host.kv.data, row_bytes(host.kv, host.rows, columns));
  args.gate.data = copies.in_bytes(host.gate.data, row_bytes(host.gate, host.rows, columns));
  args.position_bias = copies.in(host.position_bias, host.chain.component.ratio * columns);
  args.sequences = copies.in(host.sequences, host.sequence_count);
  if (host.chain.component.ratio > 1) args.state = state_on_device(host.state, copies);
  args.boundaries.base =
      copies.in_out(host.boundaries.base, reach(host.boundaries.count, host.boundaries.stride, boundary_record_bytes(dims)));
  args.boundary_requests = copies.in(host.boundary_requests, host.boundary_count);
  args.finished = copies.in_out(host.finished, reach(host.rows, host.finished_stride, dims));
  args.report = copies.in_out(host.report, 1);
  const absl::Status done = finish_on_device(store_rows_cuda_planned(args, plan, nullptr));
  if (done.ok()) copies.read_back();
  return done;
}

absl::Status pooled_on_device(const StorePooledArgs& host) {
  if (!check_store_pooled(host).ok()) return store_pooled_cuda(host, nullptr);
  DeviceCopies copies;
  const int64_t dims = host.chain.component.head_dim;
  StorePooledArgs args = host;
  args.chain = chain_on_device(host.chain, copies);
  args.out = layer_on_device(host.out, copies);
  args.rows.data = copies.in_bytes(host.rows.data, row_bytes(host.rows, host.count, dims));
  args.slots = copies.in(host.slots, host.count);
  args.positions = copies.in(host.positions, host.count);
  args.finished = copies.in_out(host.finished, reach(host.count, host.finished_stride, dims));
  args.report = copies.in_out(host.report, 1);
  const absl::Status done = finish_on_device(store_pooled_cuda(args, nullptr));
  if (done.ok()) copies.read_back();
  return done;
}

absl::Status init_on_device(const InitStateArgs& host) {
  if (!check_init_state(host).ok()) return init_state_cuda(host, nullptr);
  DeviceCopies copies;
  InitStateArgs args = host;
  args.state = state_on_device(host.state, copies);
  args.boundaries.base =
      copies.in_out(host.boundaries.base, reach(host.boundaries.count, host.boundaries.stride, boundary_record_bytes(host.state.head_dim)));
  args.starts = copies.in(host.starts, host.count);
  args.report = copies.in_out(host.report, 1);
  const absl::Status done = finish_on_device(init_state_cuda(args, nullptr));
  if (done.ok()) copies.read_back();
  return done;
}

absl::Status commit_on_device(const CommitStateArgs& host) {
  if (!check_commit_state(host).ok()) return commit_state_cuda(host, nullptr);
  DeviceCopies copies;
  CommitStateArgs args = host;
  if (host.ratio > 1) args.state = state_on_device(host.state, copies);
  args.out = layer_on_device(host.out, copies);
  args.pages = table_on_device(host.pages, copies);
  args.position_bias = copies.in(host.position_bias, int64_t{host.ratio} * row_halves(host.ratio) * host.out.head_dim);
  args.commits = copies.in(host.commits, host.count);
  args.report = copies.in_out(host.report, 1);
  const absl::Status done = finish_on_device(commit_state_cuda(args, nullptr));
  if (done.ok()) copies.read_back();
  return done;
}

// Under its own plan, or under those of long calls: stretches of one entry, of many that two warps work through with the
// least shared memory, and of many with as much as this GPU has.
StoreTwin cuda_store(const std::string& name, const StorePlan& plan) {
  StoreTwin twin;
  twin.name = name;
  twin.refuses_bad_ids = false;
  twin.works_in_host_memory = false;
  twin.rows = [plan](const StoreRowsArgs& args, int) { return rows_on_device(args, plan); };
  twin.pooled = [](const StorePooledArgs& args, int) { return pooled_on_device(args); };
  twin.init = init_on_device;
  twin.commit = commit_on_device;
  return twin;
}

const std::vector<StoreTwin>& cuda_stores() {
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  const int64_t shared_bytes = facts.ok() ? facts->shared_bytes_per_block : StorePlan{}.shared_bytes_per_block;
  static const std::vector<StoreTwin> kTwins = {cuda_store("cuda", StorePlan{}), cuda_store("short_stretches", StorePlan{0, 1 << 20}),
                                                cuda_store("long_stretches", StorePlan{0, 1, 0}),
                                                cuda_store("deep_rings", StorePlan{0, 1, shared_bytes})};
  return kTwins;
}

class StoreCuda : public ::testing::TestWithParam<std::tuple<size_t, size_t>> {};

TEST_P(StoreCuda, battery) {
  if (const std::string reason = no_gpu_because(); !reason.empty()) GTEST_SKIP() << reason;
  store_cases()[std::get<1>(GetParam())].run(cuda_stores()[std::get<0>(GetParam())]);
}
INSTANTIATE_TEST_SUITE_P(
    , StoreCuda, ::testing::Combine(::testing::Range(size_t{0}, cuda_stores().size()), ::testing::Range(size_t{0}, store_cases().size())),
    [](const auto& each) { return cuda_stores()[std::get<0>(each.param)].name + "_" + store_cases()[std::get<1>(each.param)].name; });

// What compute-sanitizer runs: every kernel, in cases that are small. Racecheck sees a hazard in a ring only where a place is
// filled again: 20 or 10 entries of ratio 4 (10 units) go through the shortest ring, which has two.
struct SmallRun {
  const char* name;
  Component component;
  RowElement element = RowElement::kBf16;
  StateForm form = StateForm::kRaw;
};

std::vector<SmallRun> small_runs() {
  const Component index = index_k(4, ElementFormat::kBf16);
  const Component main = kv_of(ComponentKind::kMainKv, 4, ElementFormat::kFp8DsMla);
  const Component folded = kv_of(ComponentKind::kMainKv, 128, ElementFormat::kBf16);
  return {{"the_usual_index", index},
          {"another_index", index_k(4, ElementFormat::kFp4, ScaleKind::kPowerOfTwo)},
          {"index_of_fp32_rows", index, RowElement::kFp32},
          {"the_usual_main", main},
          {"another_main", kv_of(ComponentKind::kMainKv, 4, ElementFormat::kBf16)},
          {"main_of_fp32_rows", main, RowElement::kFp32},
          {"folded_index", index_k(128, ElementFormat::kBf16)},
          {"folded_main", folded},
          {"folded_main_by_running_state", folded, RowElement::kBf16, StateForm::kRunning}};
}

class StoreCudaSmallRun : public ::testing::TestWithParam<SmallRun> {};

TEST_P(StoreCudaSmallRun, is_pooled_right) {
  if (const std::string reason = no_gpu_because(); !reason.empty()) GTEST_SKIP() << reason;
  const SmallRun& run = GetParam();
  StoreShape shape = shape_of(run.component, run.component.ratio == 128 ? 1 : run.component.head_dim == 128 ? 20 : 10, 1);
  shape.element = run.element;
  shape.form = run.form;
  expect_run_pooled_right(cuda_store("ring_of_two", StorePlan{0, 1, 0}), shape);
}
INSTANTIATE_TEST_SUITE_P(, StoreCudaSmallRun, ::testing::ValuesIn(small_runs()),
                         [](const auto& each) { return std::string(each.param.name); });

TEST(StoreCudaSmall, a_run_resumed_from_a_boundary_record_has_the_same_record) {
  if (const std::string reason = no_gpu_because(); !reason.empty()) GTEST_SKIP() << reason;
  const StoreTwin twin = cuda_store("cuda", StorePlan{});
  const StoreShape shape = shape_of(index_k(4, ElementFormat::kBf16), 6, 1);
  CallOptions options;
  options.boundaries.push_back({12, 0, 0, 0});
  StoreWorld cold(shape, 51);
  cold.start_all(twin);
  ASSERT_TRUE(cold.store(twin, {{0, 0, shape.tokens}}, options).ok());
  StoreWorld warm(shape, 51);
  std::copy_n(cold.boundary_bytes.data(), cold.boundary_bytes.size(), warm.boundary_bytes.data());
  ASSERT_TRUE(warm.start(twin, 0, 12, 0).ok());
  StoreWorld upto(shape, 51);
  upto.start_all(twin);
  ASSERT_TRUE(upto.store(twin, {{0, 0, 12}}).ok());
  EXPECT_TRUE(warm.records.copy() == upto.records.copy());
}

const StoreCase kSmallCases[] = {
#define NEEDLE_CASE(name) \
  { #name, name }
    NEEDLE_CASE(the_whole_slot_is_written_and_nothing_else),
    NEEDLE_CASE(pooled_rows_take_the_same_chain),
    NEEDLE_CASE(a_commit_that_does_not_fit_changes_nothing),
    NEEDLE_CASE(init_clears_a_record_whatever_it_held),
#undef NEEDLE_CASE
};

class StoreCudaSmallCase : public ::testing::TestWithParam<StoreCase> {};

TEST_P(StoreCudaSmallCase, of_the_battery) {
  if (const std::string reason = no_gpu_because(); !reason.empty()) GTEST_SKIP() << reason;
  GetParam().run(cuda_store("cuda", StorePlan{}));
}
INSTANTIATE_TEST_SUITE_P(, StoreCudaSmallCase, ::testing::ValuesIn(kSmallCases),
                         [](const auto& each) { return std::string(each.param.name); });

absl::Status prepare_on_device(const PrepareIndexQArgs& host) {
  if (!check_prepare_index_q(host).ok()) return prepare_index_q_cuda(host, nullptr);
  DeviceCopies copies;
  PrepareIndexQArgs args = host;
  const int64_t heads = host.tokens * host.heads;
  const int64_t bytes = host.element == QueryElement::kBf16 ? 256 : host.element == QueryElement::kFp8 ? 128 : 64;
  args.rope.cos_sin = copies.in(host.rope.cos_sin, host.rope.positions * kRopeDims);
  args.q.data = copies.in_bytes(host.q.data, row_bytes(host.q, host.tokens, int64_t{host.heads} * kIndexHeadDim));
  args.raw_weights.data = copies.in_bytes(host.raw_weights.data, row_bytes(host.raw_weights, host.tokens, host.heads));
  args.positions = copies.in(host.positions, host.tokens);
  args.out_q = copies.in_out_bytes(host.out_q, heads * bytes);
  args.out_q_scale = copies.in_out(host.out_q_scale, heads * 4);
  args.out_weights = copies.in_out(host.out_weights, heads);
  args.report = copies.in_out(host.report, 1);
  const absl::Status done = finish_on_device(prepare_index_q_cuda(args, nullptr));
  if (done.ok()) copies.read_back();
  return done;
}

PrepareTwin cuda_prepare() {
  return {"cuda", false, [](const PrepareIndexQArgs& args, int) { return prepare_on_device(args); }};
}

class PrepareIndexQCuda : public ::testing::TestWithParam<size_t> {};

TEST_P(PrepareIndexQCuda, battery) {
  if (const std::string reason = no_gpu_because(); !reason.empty()) GTEST_SKIP() << reason;
  prepare_cases()[GetParam()].run(cuda_prepare());
}
INSTANTIATE_TEST_SUITE_P(, PrepareIndexQCuda, ::testing::Range(size_t{0}, prepare_cases().size()),
                         [](const auto& each) { return std::string(prepare_cases()[each.param].name); });

TEST(PrepareIndexQCudaSmall, weights_carry_both_factors_and_fp8s_scale_alone) {
  if (const std::string reason = no_gpu_because(); !reason.empty()) GTEST_SKIP() << reason;
  weights_carry_both_factors_and_fp8s_scale_alone(cuda_prepare());
}

}  // namespace
}  // namespace needle::testing
