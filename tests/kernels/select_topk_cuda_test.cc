// The battery of select_topk, merge_topk and list_slots on the CUDA twin, under its own plan and under plans that it
// would not choose: every cluster width, both block sizes, the smallest buffer and ring. Plans may not change an answer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "base/units.h"
#include "kernels/select_by_maxima.h"
#include "kernels/select_short_rows.h"
#include "kernels/select_topk_plan.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/late_words.h"
#include "tests/kernels/select_topk_battery.h"

namespace needle::testing {
namespace {

using Select = std::function<absl::Status(const SelectTopkArgs&)>;

// What stands in an array before it is written, kept as long as the call lasts.
using OldWords = std::vector<int32_t>;

// Scores, lengths and tables of the arguments, written while the kernel under test already runs; what stands there before are
// lengths of nothing, of more than a row holds, shorter ones and the right ones, and scores that would win.
absl::Status writes_them_late(DeviceCopies& copies, const SelectTopkArgs& host, SelectTopkArgs& args, OldWords (&old)[kLateArrays]) {
  const auto late = [&](OldWords& words, const void* device, int64_t count, int32_t before) -> LateWords {
    if (device == nullptr) return {};
    if (words.empty()) words.assign(static_cast<size_t>(count), before);
    return {copies.in_out(words.data(), count), static_cast<const int32_t*>(device), count};
  };
  for (int64_t row = 0; row < host.rows; ++row) {
    const int32_t right = host.lengths[row];
    const int32_t lengths[] = {0, right, 0x7FFFFFFF, static_cast<int32_t>(host.length_max), -5, right / 3, right - 1};
    old[0].push_back(lengths[(row + host.length_max + host.k) % 7]);
  }
  const LateWords lengths = late(old[0], args.lengths, host.rows, 0);
  const LateWords scores = late(old[1], args.scores, host.rows * host.score_stride, 0x7F800000);
  const LateWords bases = late(old[2], args.pages.entry_base, host.pages.rows, 12345);
  // Where row_of comes late too, what was planned by is nothing.
  const bool rows_come_late = (host.length_max + host.k) % 2 == 0;
  if (!rows_come_late && host.row_of != nullptr) old[3].assign(host.row_of, host.row_of + host.rows);
  const LateWords rows = late(old[3], args.row_of, host.rows, 0x7FFFFFFF);
  args.lengths = lengths.to;
  args.scores = reinterpret_cast<const float*>(scores.to);
  args.pages.entry_base = bases.to;
  args.row_of = rows.to;
  return write_words_late({lengths, scores, bases, rows}, nullptr);
}

// Runs `select` on device copies of everything that the arguments name.
enum class Inputs { kThere, kWrittenLate };
absl::Status select_on_device(const SelectTopkArgs& host, const Select& select, Inputs inputs = Inputs::kThere) {
  absl::Status possible = check_select_topk(host);
  if (!possible.ok()) return select(host);  // refused before any pointer is looked at
  const int64_t cells = host.rows * host.out_stride;
  DeviceCopies copies;
  SelectTopkArgs args = host;
  args.scores = copies.in(host.scores, host.rows * host.score_stride);
  args.lengths = copies.in(host.lengths, host.rows);
  args.pages.pages = copies.in(host.pages.pages, host.pages.rows * host.pages.row_stride);
  args.pages.entry_base = copies.in(host.pages.entry_base, host.pages.rows);
  args.row_of = copies.in(host.row_of, host.rows);
  args.positions = copies.in_out(host.positions, cells);
  args.slots = copies.in_out(host.slots, cells);
  args.out_scores = copies.in_out(host.out_scores, cells);
  args.counts = copies.in_out(host.counts, host.rows);
  args.report = copies.in_out(host.report, 1);
  OldWords old[kLateArrays];
  absl::Status done = inputs == Inputs::kThere ? absl::OkStatus() : writes_them_late(copies, host, args, old);
  if (done.ok()) done = finish_on_device(select(args));
  if (done.ok()) copies.read_back();
  return done;
}

absl::Status merge_on_device(const MergeTopkArgs& host) {
  absl::Status possible = check_merge_topk(host);
  if (!possible.ok()) return merge_topk_cuda(host, nullptr, 0, nullptr);
  const int64_t lists = int64_t{host.shards} * host.rows;
  const int64_t cells = host.rows * host.out_stride;
  DeviceCopies copies;
  MergeTopkArgs args = host;
  args.positions = copies.in(host.positions, lists * host.in_stride);
  args.scores = copies.in(host.scores, lists * host.in_stride);
  args.counts = copies.in(host.counts, lists);
  args.slots = copies.in(host.slots, lists * host.in_stride);
  args.out_positions = copies.in_out(host.out_positions, cells);
  args.out_scores = copies.in_out(host.out_scores, cells);
  args.out_slots = copies.in_out(host.out_slots, cells);
  args.out_counts = copies.in_out(host.out_counts, host.rows);
  args.report = copies.in_out(host.report, 1);
  absl::Status done = finish_on_device(merge_topk_cuda(args, nullptr, 0, nullptr));
  if (done.ok()) copies.read_back();
  return done;
}

absl::Status list_on_device(const ListSlotsArgs& host) {
  absl::Status possible = check_list_slots(host);
  if (!possible.ok()) return list_slots_cuda(host, nullptr);
  const int64_t cells = host.rows * host.out_stride;
  DeviceCopies copies;
  ListSlotsArgs args = host;
  args.pages.pages = copies.in(host.pages.pages, host.pages.rows * host.pages.row_stride);
  args.pages.entry_base = copies.in(host.pages.entry_base, host.pages.rows);
  args.lengths = copies.in(host.lengths, host.rows);
  args.positions = copies.in_out(host.positions, cells);
  args.slots = copies.in_out(host.slots, cells);
  args.counts = copies.in_out(host.counts, host.rows);
  args.report = copies.in_out(host.report, 1);
  absl::Status done = finish_on_device(list_slots_cuda(args, nullptr));
  if (done.ok()) copies.read_back();
  return done;
}

// The scores of rows that lie `stride` apart; what lies between them would win.
std::vector<float> scores_apart(const SelectTopkArgs& host, int64_t stride) {
  std::vector<float> scores(static_cast<size_t>(host.rows * stride), std::numeric_limits<float>::infinity());
  for (int64_t row = 0; row < host.rows; ++row) {
    const float* from = host.scores + row * host.score_stride;
    std::copy(from, from + host.score_stride, scores.begin() + row * stride);
  }
  return scores;
}

// select_by_maxima, with maxima made here from the scores, rows moved to where it wants them, and what it leaves to the
// scores' maker (NaN and absent entries) counted here. Calls that it is not made for go to select_topk_cuda.
absl::Status select_by_maxima_on_device(const SelectTopkArgs& host) {
  if (!check_select_topk(host).ok() || host.k > kMaximaTopkMax || host.length_max > kMaximaLengthMax) {
    return select_on_device(host, [](const SelectTopkArgs& args) { return select_topk_cuda(args, nullptr, 0, nullptr); });
  }
  SelectTopkArgs moved = host;
  moved.score_stride = round_up(std::max<int64_t>(host.score_stride, 1), kMaximaGroup);
  const std::vector<float> scores = scores_apart(host, moved.score_stride);
  GroupMaxima maxima;
  maxima.stride = round_up(div_ceil(host.length_max, kMaximaGroup), 4);
  std::vector<uint32_t> orders(static_cast<size_t>(host.rows * maxima.stride), 0xFFFFFFFFu);  // as left by another
  OpReport counted{};
  for (int64_t row = 0; row < host.rows; ++row) {
    const float* from = host.scores + row * host.score_stride;
    const int64_t length = visible_row(host, row).length;
    std::fill_n(orders.begin() + row * maxima.stride, round_up(length, 4 * kMaximaGroup) / kMaximaGroup, 0u);
    for (int64_t i = 0; i < length; ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, &from[i], 4);
      uint32_t& order = orders[static_cast<size_t>(row * maxima.stride + i / kMaximaGroup)];
      order = std::max(order, score_order_bits(bits));
      counted.absent_entries += bits == kAbsentScoreBits;
      counted.nan_scores += bits != kAbsentScoreBits && from[i] != from[i];
    }
  }
  moved.scores = scores.data();
  DeviceArray<uint32_t> there(orders.data(), static_cast<int64_t>(orders.size()));
  maxima.orders = there.get();
  absl::Status done = select_on_device(moved, [&](const SelectTopkArgs& args) { return select_by_maxima_cuda(args, maxima, nullptr); });
  if (done.ok() && host.report != nullptr) {
    host.report->nan_scores += counted.nan_scores;
    host.report->absent_entries += counted.absent_entries;
    host.report->status |= (counted.nan_scores != 0 ? kStatusNanScore : 0u) | (counted.absent_entries != 0 ? kStatusAbsentPage : 0u);
  }
  return done;
}

// select_short_rows, with rows moved to where it wants them. Calls that it is not made for go to select_topk_cuda.
absl::Status select_short_rows_on_device(const SelectTopkArgs& host, Inputs inputs) {
  SelectTopkArgs moved = host;
  moved.score_stride = round_up(std::max<int64_t>(host.score_stride, 1), 4);
  if (!check_select_topk(host).ok() || !selects_short_rows(moved)) {
    return select_on_device(
        host, [](const SelectTopkArgs& args) { return select_topk_cuda(args, nullptr, 0, nullptr); }, inputs);
  }
  const std::vector<float> scores = scores_apart(host, moved.score_stride);
  moved.scores = scores.data();
  return select_on_device(
      moved, [](const SelectTopkArgs& args) { return select_short_rows_cuda(args, nullptr); }, inputs);
}

SelectTwin twin_of(const std::string& name, const Select& select, Inputs inputs = Inputs::kThere) {
  SelectTwin twin;
  twin.name = name;
  twin.unavailable = no_gpu_because();
  twin.select = [=](const SelectTopkArgs& args) { return select_on_device(args, select, inputs); };
  twin.merge = merge_on_device;
  twin.list = list_on_device;
  return twin;
}

// A plan for any arguments with the given shape, and the least capacity that k allows.
Select planned(int threads, int cluster, int stages, int slots, int capacity_wanted) {
  return [=](const SelectTopkArgs& args) {
    int capacity = std::max(capacity_wanted, args.k + threads);
    if (args.order == TopkOrder::kByRank) {
      int power = 1;
      while (power < args.k) power <<= 1;
      capacity = std::max(capacity, power);
    }
    int log2 = 0;
    while (1 << log2 < cluster) ++log2;
    SelectPlan plan{threads, cluster, log2, (capacity + threads - 1) / threads * threads, stages, slots, 0};
    plan.shared_bytes = select_topk_shared_bytes(plan);
    return select_topk_cuda_planned(args, plan, nullptr);
  };
}

// A call that is refused, or not, before anything that it names is looked at.
SelectTopkArgs the_best_of_one(const float* score, int32_t& cell) {
  SelectTopkArgs args;
  args.scores = score;
  args.score_stride = 1;
  args.lengths = &cell;
  args.rows = 1;
  args.length_max = 1;
  args.k = 1;
  args.positions = &cell;
  args.counts = &cell;
  args.out_stride = 1;
  return args;
}

SelectTwin twin_by_maxima() {
  SelectTwin twin = twin_of("cuda_by_maxima", {});
  twin.select = select_by_maxima_on_device;
  return twin;
}

SelectTwin twin_of_short_rows(const std::string& name, Inputs inputs) {
  SelectTwin twin = twin_of(name, {});
  twin.select = [=](const SelectTopkArgs& args) { return select_short_rows_on_device(args, inputs); };
  return twin;
}

std::vector<SelectTwin> cuda_twins() {
  return {
      twin_by_maxima(),
      twin_of_short_rows("cuda_short_rows", Inputs::kThere),
      twin_of_short_rows("cuda_short_rows_behind_a_late_writer", Inputs::kWrittenLate),
      twin_of("cuda", [](const SelectTopkArgs& args) { return select_topk_cuda(args, nullptr, 0, nullptr); }),
      twin_of("cuda_one_block_of_1024", planned(1024, 1, 3, 6, 4096)),
      twin_of("cuda_smallest_buffers", planned(512, 1, 1, 4, 0)),
      twin_of("cuda_without_lists", planned(1024, 1, 1, 0, 4096)),
      twin_of("cuda_cluster_of_2", planned(1024, 2, 3, 6, 4096)),
      twin_of("cuda_cluster_of_8", planned(1024, 8, 2, 5, 4096)),
      twin_of("cuda_cluster_of_16_small", planned(512, 16, 4, 4, 0)),
      twin_of(
          "cuda_behind_a_late_writer", [](const SelectTopkArgs& args) { return select_topk_cuda(args, nullptr, 0, nullptr); },
          Inputs::kWrittenLate),
      twin_of("cuda_streams_behind_a_late_writer", planned(1024, 2, 1, 6, 4096), Inputs::kWrittenLate),
  };
}

struct TwinCase {
  SelectTwin twin;
  SelectCase test;
};

std::vector<TwinCase> every_twin_and_case() {
  std::vector<TwinCase> all;
  for (const SelectTwin& twin : cuda_twins()) {
    for (const SelectCase& test : select_topk_battery()) all.push_back({twin, test});
  }
  return all;
}

class SelectTopkCuda : public ::testing::TestWithParam<TwinCase> {};

TEST_P(SelectTopkCuda, battery) {
  const TwinCase& param = GetParam();
  if (!param.twin.unavailable.empty()) GTEST_SKIP() << param.twin.unavailable;
  param.test.run(param.twin);
}

INSTANTIATE_TEST_SUITE_P(twins, SelectTopkCuda, ::testing::ValuesIn(every_twin_and_case()),
                         [](const ::testing::TestParamInfo<TwinCase>& instance) {
                           return instance.param.twin.name + "_" + instance.param.test.name;
                         });

// What compute-sanitizer runs: every kernel on every path, one row a call. Racecheck sees a hazard in a ring only where a stage is
// filled again, so rows that are streamed go round their ring more than once; a tile has 8 scores a thread. (Not here: blocks of 1,024
// threads in clusters, on which racecheck does not end.)
struct SmallTwin {
  SelectTwin twin;
  int64_t length;
};

std::vector<SmallTwin> small_twins() {
  return {
      {twin_by_maxima(), 3001},
      {twin_of_short_rows("short_rows", Inputs::kThere), 9001},
      {twin_of("cuda", [](const SelectTopkArgs& args) { return select_topk_cuda(args, nullptr, 0, nullptr); }), 9001},
      {twin_of("all_in_the_ring", planned(512, 1, 3, 4, 0)), 9001},
      {twin_of("ring_of_one", planned(512, 1, 1, 4, 0)), 9001},                    // 3 tiles
      {twin_of("ring_of_two", planned(512, 1, 2, 4, 0)), 17001},                   // 5 tiles
      {twin_of("ring_of_one_of_1024_threads", planned(1024, 1, 1, 4, 0)), 17001},  // 3 tiles
      {twin_of("without_lists", planned(512, 1, 1, 0, 0)), 9001},                  // read slowly
      {twin_of("cluster_of_2", planned(512, 2, 1, 4, 0)), 17001},                  // 3 tiles and 2
      {twin_of("cluster_of_4", planned(512, 4, 2, 4, 0)), 17001},                  // all in their rings
      {twin_of("cluster_of_16", planned(512, 16, 1, 4, 0)), 17001},                // 2 tiles and 1 in four blocks, none in the others
      {twin_of("cluster_of_2_behind_a_late_writer", planned(512, 2, 1, 4, 0), Inputs::kWrittenLate), 17001},
  };
}

struct SmallRow {
  const char* name;
  int k;
  float (*score)(int64_t position, Rng& rng);
};

const SmallRow kSmallRows[] = {
    {"usual", 40, [](int64_t, Rng& rng) { return gaussian(rng); }},
    {"ascending", 40, [](int64_t i, Rng&) { return static_cast<float>(i); }},
    {"more_equal_than_there_is_room_for", 40, [](int64_t, Rng&) { return 1.0f; }},
    {"fewer_numbers_than_k", 700, [](int64_t i, Rng& rng) { return i % 30 == 7  ? gaussian(rng)
                                                                   : i % 2 == 0 ? kNan
                                                                                : kAbsent; }},
};

class SelectTopkCudaSmallRow : public ::testing::TestWithParam<std::tuple<SmallTwin, SmallRow>> {};

TEST_P(SelectTopkCudaSmallRow, is_selected_from_in_both_orders) {
  const auto& [small, row] = GetParam();
  if (!small.twin.unavailable.empty()) GTEST_SKIP() << small.twin.unavailable;
  Rng rng(77);
  const auto& score = row.score;
  SelectProblem problem = problem_of(row_by(small.length, [&](int64_t i) { return score(i, rng); }), row.k);
  expect_exact(small.twin, problem);
  problem.order = TopkOrder::kByRank;
  expect_exact(small.twin, problem);
}

INSTANTIATE_TEST_SUITE_P(twins, SelectTopkCudaSmallRow,
                         ::testing::Combine(::testing::ValuesIn(small_twins()), ::testing::ValuesIn(kSmallRows)), [](const auto& instance) {
                           return std::get<0>(instance.param).twin.name + "_" + std::get<1>(instance.param).name;
                         });

// select_by_maxima's other kernels: of rows longer than shared memory holds, and of more rows than there are multiprocessors.
TEST(SelectTopkCudaSmall, by_maxima_takes_long_rows) {
  const SelectTwin twin = twin_by_maxima();
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  Rng rng(78);
  SelectProblem problem = problem_of(row_by(17001, [&](int64_t) { return gaussian(rng); }), 40);
  expect_exact(twin, problem);
  problem.rows = {row_by(17001, [](int64_t) { return 1.0f; })};
  expect_exact(twin, problem);
}

TEST(SelectTopkCudaSmall, by_maxima_takes_many_rows) {
  const SelectTwin twin = twin_by_maxima();
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  Rng rng(79);
  SelectProblem problem;
  problem.k = 8;
  for (int row = 0; row <= current_device_facts()->multiprocessors; ++row) {
    problem.rows.push_back(row_by(row % 50, [&](int64_t) { return gaussian(rng); }));
  }
  expect_exact(twin, problem);
}

TEST(SelectTopkCudaSmall, a_row_shorter_than_k_is_taken_whole) {
  Rng rng(80);
  const SelectProblem problem = problem_of(row_by(39, [&](int64_t) { return gaussian(rng); }), 40);
  for (const SmallTwin& small : small_twins()) {
    if (!small.twin.unavailable.empty()) GTEST_SKIP() << small.twin.unavailable;
    SCOPED_TRACE(small.twin.name);
    expect_exact(small.twin, problem);
  }
}

TEST(SelectTopkCudaSmall, merges_and_lists) {
  const SelectTwin twin = cuda_twins()[0];
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  a_merge_skips_padding_and_absent_members(twin);
  lists_every_present_entry_in_order(twin);
}

// Lengths around what a row's copy, a thread, a warp and the block hold, few and many of them wanted.
TEST(SelectShortRowsCuda, every_adversarial_row_of_any_length) {
  const SelectTwin twin = twin_of_short_rows("cuda_short_rows", Inputs::kThere);
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  Rng rng(81);
  for (const NamedRow& row : adversarial_rows()) {
    for (const int longest : {64, 1025, 16384}) {
      SelectProblem problem;
      for (const int64_t length : {16384, 16383, 16381, 12345, 8193, 2048, 1025, 1023, 512, 100, 65, 64, 63, 33, 32, 31, 5, 4, 3, 1, 0}) {
        if (length <= longest) problem.rows.push_back(row.make(length, rng));
      }
      for (const int k : {1, 16, 40, 512, 1024, 2048}) {
        SCOPED_TRACE(::testing::Message() << row.name << " to " << longest << " k " << k);
        problem.k = k;
        expect_exact(twin, problem);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Of one row or of many.
TEST(SelectShortRowsCuda, select_topk_goes_there) {
  const SelectTwin twin = twin_of("cuda", [](const SelectTopkArgs& args) {
    EXPECT_TRUE(selects_short_rows(args));
    return select_topk_cuda(args, nullptr, 0, nullptr);
  });
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  Rng rng(82);
  SelectProblem problem = problem_of(row_by(2000, [&](int64_t) { return gaussian(rng); }), 100);
  problem.slack = 4;
  expect_exact(twin, problem);
  while (problem.rows.size() < 300) {
    problem.rows.push_back(row_by(static_cast<int64_t>(rng.below(2000)), [&](int64_t) { return gaussian(rng); }));
  }
  expect_exact(twin, problem);
}

// All that is not equal, and no outlier, goes the fast way.
TEST(SelectShortRowsCuda, counts_rows_that_fell_back) {
  const SelectTwin twin = twin_of_short_rows("cuda_short_rows", Inputs::kThere);
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  Rng rng(83);
  const auto fallbacks = [&](const std::vector<float>& row, int k = 512) {
    const SelectProblem problem = problem_of(row, k);
    const absl::StatusOr<Selection> got = run_selection(twin, problem);
    EXPECT_TRUE(got.ok()) << got.status();
    if (got.ok()) expect_same_selection(*got, expected_selection(problem));
    return got.ok() ? got->report.fallbacks : 0;
  };
  EXPECT_EQ(fallbacks(row_by(9001, [&](int64_t) { return gaussian(rng); })), 0u);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(fallbacks(row_by(16384, [&](int64_t) { return gaussian(rng); }), 16), 0u);
  EXPECT_EQ(fallbacks(row_by(9001, [&](int64_t) { return 1.1f + 0.01f * gaussian(rng); })), 0u);
  EXPECT_EQ(fallbacks(row_by(512, [](int64_t) { return 1.0f; })), 0u) << "all are taken";
  EXPECT_EQ(fallbacks(row_by(9001, [](int64_t) { return 1.0f; })), 1u);
  EXPECT_EQ(fallbacks(row_by(9001, [&](int64_t i) { return i == 77 ? kNan : gaussian(rng); })), 1u);
  EXPECT_EQ(fallbacks(row_by(9001, [](int64_t i) { return i < 300 ? 1.0f : kAbsent; })), 0u)
      << "most groups of the sample have no number, so there is no guess";
}

TEST(SelectShortRowsCuda, refuses_what_it_is_not_made_for) {
  alignas(16) float scores[8] = {};
  int32_t cell = 1;
  SelectTopkArgs args = the_best_of_one(scores, cell);
  args.score_stride = 4;
  args.out_stride = kTopkMax;
  ASSERT_TRUE(selects_short_rows(args));
  const auto refused = [&](const std::string& named, const auto& change) {
    SelectTopkArgs other = args;
    change(other);
    const absl::Status status = select_short_rows_cuda(other, nullptr);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << named;
    EXPECT_NE(std::string(status.message()).find(named), std::string::npos) << status;
  };
  refused("order 1,", [](SelectTopkArgs& other) { other.order = TopkOrder::kByRank; });
  refused("length_max 16388,", [](SelectTopkArgs& other) { other.score_stride = other.length_max = kShortRowMax + 4; });
  refused("k 2049,", [](SelectTopkArgs& other) { other.k = kShortRowsTopkMax + 1; });
  refused("scores 4 bytes past", [](SelectTopkArgs& other) { other.scores += 1; });
  refused("score_stride 5,", [](SelectTopkArgs& other) { other.score_stride = 5; });
}

// A call by maxima is of another kernel where registers hold its longest row.
TEST(SelectByMaximaCuda, every_adversarial_row_around_what_registers_hold) {
  const SelectTwin twin = twin_by_maxima();
  if (!twin.unavailable.empty()) GTEST_SKIP() << twin.unavailable;
  Rng rng(79);
  for (const NamedRow& row : adversarial_rows()) {
    for (const std::vector<int64_t>& lengths :
         {std::vector<int64_t>{16384, 16383, 16369, 12345, 8193, 1025}, {16385, 16384}, {33000, 1025}}) {
      SelectProblem problem;
      for (const int64_t length : lengths) problem.rows.push_back(row.make(length, rng));
      for (const int k : {1, 40, 512, 1024}) {
        for (const TopkOrder order : {TopkOrder::kByPosition, TopkOrder::kByRank}) {
          SCOPED_TRACE(::testing::Message() << row.name << " to " << lengths[0] << " k " << k << " order " << static_cast<int>(order));
          problem.k = k;
          problem.order = order;
          expect_exact(twin, problem);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(SelectTopkCudaRepair, a_guess_that_is_too_high_is_counted_and_repaired) {
  const std::string reason = no_gpu_because();
  if (!reason.empty()) GTEST_SKIP() << reason;
  // Fewer numbers than k among absent entries: a sample sees some of them, and no threshold but 0 keeps them all.
  SelectProblem problem;
  problem.k = 2000;
  Rng rng(78);
  problem.rows = {row_by(60000, [&](int64_t i) { return i % 30 == 7 ? gaussian(rng) : kAbsent; }),
                  row_by(60000, [&](int64_t i) { return i < 30000 ? kNan : static_cast<float>(i % 7); })};
  for (const SelectTwin& twin : cuda_twins()) {
    SCOPED_TRACE(twin.name);
    expect_exact(twin, problem);
  }
}

TEST(SelectTopkCudaPlan, refuses_an_impossible_plan_before_any_launch) {
  float score = 0;
  int32_t cell = 0;
  const SelectTopkArgs args = the_best_of_one(&score, cell);
  for (const SelectPlan& plan :
       {SelectPlan{256, 1, 0, 4096, 1, 4, 0}, SelectPlan{512, 3, 1, 4096, 1, 4, 0}, SelectPlan{512, 32, 5, 4096, 1, 4, 0},
        SelectPlan{512, 1, 0, 512, 1, 4, 0}, SelectPlan{512, 1, 0, 4096, 0, 4, 0}, SelectPlan{512, 1, 0, 4097, 1, 4, 0},
        SelectPlan{512, 1, 0, 4096, 1, 3, 0}, SelectPlan{512, 1, 0, 4096, 5, 4, 0}}) {
    EXPECT_EQ(select_topk_cuda_planned(args, plan, nullptr).code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(SelectTopkCudaPlan, every_plan_fits_its_gpu) {
  for (const DeviceFacts& facts : {DeviceFacts{0, 9, 0, 132, 232448, 60 << 20}, DeviceFacts{0, 10, 0, 148, 232448, 126 << 20},
                                   DeviceFacts{0, 12, 0, 188, 101376, 128 << 20}}) {
    for (const int rows : {1, 4, 16, 64, 256, 4096}) {
      for (const int k : {1, 512, 1024, 2048, 8192}) {
        for (const int length : {1, 513, 16384, 131072, 1048576}) {
          SelectTopkArgs args;
          args.rows = rows;
          args.k = k;
          args.length_max = length;
          const SelectPlan plan = plan_select_topk(args, facts);
          EXPECT_LE(plan.shared_bytes, facts.shared_bytes_per_block) << rows << " " << k << " " << length;
          EXPECT_GE(plan.capacity, k + plan.threads);
          EXPECT_GE(plan.capacity, k == 8192 ? 8192 : k);
          EXPECT_GE(plan.stages, 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace needle::testing
