// read_topk gives what its three operations give over the whole batch, whatever the budget, and stays inside it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "base/workers.h"
#include "kernels/quantise.h"
#include "kernels/read_topk.h"

namespace needle::testing {
namespace {

struct FreeAligned {
  void operator()(void* memory) const { std::free(memory); }
};

// Scratch with a guard behind it, so that a byte too many is seen.
class GuardedScratch {
 public:
  explicit GuardedScratch(int64_t bytes) : bytes_(bytes) {
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(64, static_cast<size_t>((bytes + 64 + 63) / 64 * 64))));
    std::memset(memory_.get() + bytes, 0x5A, 64);
  }
  void* data() { return memory_.get(); }
  bool guard_is_whole() const {
    for (int64_t i = 0; i < 64; ++i) {
      if (memory_.get()[bytes_ + i] != std::byte{0x5A}) return false;
    }
    return true;
  }

 private:
  int64_t bytes_;
  std::unique_ptr<std::byte, FreeAligned> memory_;
};

float small_number(Rng& rng) { return static_cast<float>(rng.unit() * 2 - 1); }

// A key of random finite values.
void fill_key(ElementFormat element, std::byte* data, std::byte* scale, Rng& rng) {
  if (element == ElementFormat::kBf16) {
    for (int64_t i = 0; i < 128; ++i) {
      const uint16_t value = bf16_of(small_number(rng));
      std::memcpy(data + 2 * i, &value, sizeof(value));
    }
    return;
  }
  for (int64_t i = 0; i < slot_data_bytes(element, 128); ++i) {
    data[i] =
        element == ElementFormat::kFp8 ? static_cast<std::byte>(e4m3_of(small_number(rng) * kFp8Max)) : static_cast<std::byte>(rng.next());
  }
  const float factor = 1.0f / kFp8Max;
  if (element == ElementFormat::kFp8) std::memcpy(scale, &factor, sizeof(factor));
  if (element == ElementFormat::kFp4) std::memset(scale, 125, 4);
}

// A batch of sequences with shuffled pages, some absent, and raw queries.
struct Batch {
  int32_t sequences = 5;
  int32_t queries_per_row = 3;
  int32_t heads = 4;
  int32_t pages_per_row = 7;
  int32_t k = 40;
  Component component;
  std::unique_ptr<std::byte, FreeAligned> keys;
  std::vector<int32_t> pages;
  std::vector<int32_t> entry_base;
  std::vector<uint16_t> q;
  std::vector<float> weights;
  std::vector<int32_t> visible;
  PrepareIndexQArgs prepare;
  ReadTopkArgs args;

  int32_t queries() const { return sequences * queries_per_row; }

  explicit Batch(uint64_t seed, ElementFormat element = ElementFormat::kBf16) {
    Rng rng(seed);
    const int64_t page_count = 20;
    const int64_t page_bytes = layer_page_bytes(element, 128, 64);
    keys.reset(static_cast<std::byte*>(std::aligned_alloc(kPageAlignment, static_cast<size_t>(page_count * page_bytes))));
    for (int64_t page = 0; page < page_count; ++page) {
      for (int64_t slot = 0; slot < 64; ++slot) {
        const SlotPlace place = slot_place(element, 128, 64, slot);
        fill_key(element, keys.get() + page * page_bytes + place.data, keys.get() + page * page_bytes + place.scale, rng);
      }
    }
    for (int32_t i = 0; i < sequences * pages_per_row; ++i) {
      pages.push_back(rng.chance(0.1) ? kNoPage : static_cast<int32_t>(rng.below(20)));
    }
    for (int32_t s = 0; s < sequences; ++s) entry_base.push_back(s * 1000);
    for (int64_t i = 0; i < int64_t{queries()} * heads * 128; ++i) q.push_back(bf16_of(small_number(rng)));
    for (int32_t i = 0; i < queries() * heads; ++i) weights.push_back(small_number(rng));
    for (int32_t i = 0; i < queries(); ++i) {
      visible.push_back(static_cast<int32_t>(rng.between(0, int64_t{pages_per_row} * 64)));
    }
    LayerView layer;
    layer.base = keys.get();
    layer.element = element;
    layer.page_stride = page_bytes;
    layer.page_count = page_count;
    layer.slots_per_page = 64;
    layer.head_dim = 128;
    args.logits.keys = layer;
    args.logits.pages = {pages.data(), entry_base.data(), pages_per_row, sequences, pages_per_row};
    args.logits.queries_per_row = queries_per_row;
    args.logits.visible = visible.data();
    args.logits.query_count = queries();
    args.logits.heads = heads;
    args.k = k;

    component.hadamard = true;
    prepare.component = component;
    prepare.q = {q.data(), int64_t{heads} * 128, RowElement::kBf16};
    prepare.raw_weights = {weights.data(), heads, RowElement::kFp32};
    prepare.tokens = queries();
    prepare.heads = heads;
    args.prepare = &prepare;
  }
};

struct Answer {
  std::vector<int32_t> positions;
  std::vector<int32_t> slots;
  std::vector<float> scores;
  std::vector<int32_t> counts;
  OpReport report{};
  int32_t queries_a_chunk = 0;
};

constexpr int64_t kOutStride = 64;

void point_at(Answer& answer, ReadTopkArgs& args) {
  const size_t cells = static_cast<size_t>(args.logits.query_count * kOutStride);
  answer.positions.assign(cells, 77);
  answer.slots.assign(cells, 77);
  answer.scores.assign(cells, 77);
  answer.counts.assign(static_cast<size_t>(args.logits.query_count), 77);
  args.positions = answer.positions.data();
  args.slots = answer.slots.data();
  args.out_scores = answer.scores.data();
  args.counts = answer.counts.data();
  args.out_stride = kOutStride;
  args.report = &answer.report;
}

Answer read_with(ReadTopkArgs args, CpuIsa isa, int width, int64_t budget) {
  Answer answer;
  point_at(answer, args);
  WorkerThreads workers(width);
  const absl::StatusOr<ReadTopkPlan> plan = plan_read_topk_cpu(args, width, budget);
  EXPECT_TRUE(plan.ok()) << plan.status();
  if (!plan.ok()) return answer;
  EXPECT_LE(plan->scratch_bytes, budget);
  answer.queries_a_chunk = plan->queries_a_chunk;
  GuardedScratch scratch(plan->scratch_bytes);
  const absl::Status status = read_topk_cpu(args, *plan, isa, workers, scratch.data(), plan->scratch_bytes);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(scratch.guard_is_whole());
  return answer;
}

// The three operations over the whole batch at once.
Answer whole_batch(ReadTopkArgs args, CpuIsa isa) {
  Answer answer;
  point_at(answer, args);
  CallerThread workers;
  const int64_t vectors = int64_t{args.logits.query_count} * args.logits.heads;
  std::vector<uint16_t> q(static_cast<size_t>(vectors * 128));
  std::vector<float> weights(static_cast<size_t>(vectors));
  PrepareIndexQArgs prepare = *args.prepare;
  prepare.out_q = q.data();
  prepare.out_weights = weights.data();
  prepare.report = &answer.report;
  EXPECT_EQ(prepare_index_q_cpu(prepare, isa, workers), absl::OkStatus());
  const int64_t entries = int64_t{args.logits.pages.pages_per_row} * args.logits.keys.slots_per_page;
  std::vector<float> scores(static_cast<size_t>(args.logits.query_count * entries));
  IndexLogitsArgs logits = args.logits;
  logits.q = q.data();
  logits.head_weights = weights.data();
  logits.entry_count = entries;
  logits.scores = scores.data();
  logits.score_stride = entries;
  logits.report = &answer.report;
  EXPECT_EQ(index_logits_cpu(logits, isa, workers), absl::OkStatus());
  SelectTopkArgs select;
  select.scores = scores.data();
  select.score_stride = entries;
  select.lengths = logits.visible;
  select.rows = logits.query_count;
  select.length_max = static_cast<int32_t>(entries);
  select.k = args.k;
  select.pages = logits.pages;
  select.row_of = logits.query_row;
  select.rows_per_table_row = logits.queries_per_row;
  select.slots_per_page = logits.keys.slots_per_page;
  select.page_count = logits.keys.page_count;
  select.positions = args.positions;
  select.slots = args.slots;
  select.out_scores = args.out_scores;
  select.counts = args.counts;
  select.out_stride = args.out_stride;
  EXPECT_EQ(select_topk_ref(select), absl::OkStatus());
  return answer;
}

void expect_same(const Answer& got, const Answer& want) {
  EXPECT_EQ(got.positions, want.positions);
  EXPECT_EQ(got.slots, want.slots);
  EXPECT_EQ(got.counts, want.counts);
  EXPECT_EQ(std::memcmp(got.scores.data(), want.scores.data(), want.scores.size() * 4), 0);
  EXPECT_EQ(got.report.status, want.report.status);
  EXPECT_EQ(got.report.absent_entries, want.report.absent_entries);
  EXPECT_EQ(got.report.nan_scores, want.report.nan_scores);
}

TEST(ReadTopk, answers_as_its_operations_do_whatever_the_budget) {
  const Batch batch(1);
  for (const CpuIsa isa : cpu_isas_present()) {
    const Answer want = whole_batch(batch.args, isa);
    EXPECT_GT(want.report.absent_entries, 0u) << "the batch should have absent pages";
    for (const int width : {1, 3}) {
      const absl::StatusOr<ReadTopkPlan> all = plan_read_topk_cpu(batch.args, width);
      ASSERT_TRUE(all.ok()) << all.status();
      EXPECT_EQ(all->queries_a_chunk, batch.queries());
      const int64_t group = (all->scratch_bytes - all->select_bytes) / batch.sequences + 1024;
      for (const int64_t budget : {kReadTopkBudgetDefault, all->select_bytes + group, all->select_bytes + 2 * group}) {
        SCOPED_TRACE(::testing::Message() << name_of(isa) << " width " << width << " budget " << budget);
        const Answer got = read_with(batch.args, isa, width, budget);
        EXPECT_EQ(got.queries_a_chunk < batch.queries(), budget < kReadTopkBudgetDefault);
        expect_same(got, want);
      }
    }
  }
}

TEST(ReadTopk, reads_every_key_format) {
  for (const ElementFormat element : {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4}) {
    SCOPED_TRACE(needle::name_of(element));
    const Batch batch(11, element);
    const Answer want = whole_batch(batch.args, best_cpu_isa());
    const absl::StatusOr<ReadTopkPlan> all = plan_read_topk_cpu(batch.args, 2);
    ASSERT_TRUE(all.ok()) << all.status();
    const Answer got = read_with(batch.args, best_cpu_isa(), 2, all->scratch_bytes - 1);
    EXPECT_LT(got.queries_a_chunk, batch.queries());
    expect_same(got, want);
  }
}

TEST(ReadTopk, follows_query_rows_across_chunks) {
  Batch batch(2);
  std::vector<int32_t> query_row;
  Rng rng(3);
  for (int32_t i = 0; i < batch.queries(); ++i) query_row.push_back(static_cast<int32_t>(rng.below(5)));
  batch.args.logits.query_row = query_row.data();
  const Answer want = whole_batch(batch.args, best_cpu_isa());
  const absl::StatusOr<ReadTopkPlan> all = plan_read_topk_cpu(batch.args, 1);
  ASSERT_TRUE(all.ok()) << all.status();
  const int64_t small = all->select_bytes + (all->scratch_bytes - all->select_bytes) / 3;
  const Answer got = read_with(batch.args, best_cpu_isa(), 1, small);
  EXPECT_LT(got.queries_a_chunk, batch.queries());
  expect_same(got, want);
}

TEST(ReadTopk, refuses_a_budget_or_scratch_too_small_with_the_bytes_that_would_do) {
  Batch batch(4);
  Answer answer;
  point_at(answer, batch.args);
  const absl::StatusOr<ReadTopkPlan> refused = plan_read_topk_cpu(batch.args, 1, 1000);
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(refused.status().message());
  const size_t at = message.find("must be >= ");
  ASSERT_NE(at, std::string::npos) << message;
  const int64_t needed = std::stoll(message.substr(at + 11));
  EXPECT_TRUE(plan_read_topk_cpu(batch.args, 1, needed).ok());
  EXPECT_FALSE(plan_read_topk_cpu(batch.args, 1, needed - 1).ok());

  const absl::StatusOr<ReadTopkPlan> plan = plan_read_topk_cpu(batch.args, 1);
  ASSERT_TRUE(plan.ok());
  GuardedScratch scratch(plan->scratch_bytes);
  CallerThread caller;
  const absl::Status status = read_topk_cpu(batch.args, *plan, CpuIsa::kPortable, caller, scratch.data(), plan->scratch_bytes - 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(status.message()).find(std::to_string(plan->scratch_bytes)), std::string::npos) << status;
  EXPECT_EQ(answer.counts[0], 77) << "nothing is written by a refusal";
}

TEST(ReadTopk, cuts_visible_lengths_at_the_stated_bound_and_says_so) {
  Batch batch(5);
  batch.args.entries_max = 100;
  for (int32_t& visible : batch.visible) visible = 150;
  const Answer got = read_with(batch.args, best_cpu_isa(), 1, kReadTopkBudgetDefault);
  EXPECT_NE(got.report.status & kStatusBadPageTable, 0u);
  for (int32_t i = 0; i < batch.queries(); ++i) {
    for (int32_t j = 0; j < got.counts[static_cast<size_t>(i)]; ++j) {
      const int32_t base = batch.entry_base[static_cast<size_t>(i / batch.queries_per_row)];
      EXPECT_LT(got.positions[static_cast<size_t>(i * kOutStride + j)] - base, 100);
    }
  }
}

TEST(ReadTopk, an_empty_batch_is_an_answer) {
  Batch batch(6);
  batch.args.logits.query_count = 0;
  batch.prepare.tokens = 0;
  const Answer got = read_with(batch.args, best_cpu_isa(), 1, kReadTopkBudgetDefault);
  EXPECT_EQ(got.report.status, 0u);
}

// A million tokens of context and 8,192 query tokens, at every ratio: the plan alone, which is host arithmetic.
TEST(ReadTopk, plans_a_million_tokens_within_the_default_budget) {
  Batch batch(7);
  for (const int64_t entries : {1048576, 262144, 8192}) {
    for (const int width : {1, 16}) {
      ReadTopkArgs args = batch.args;
      PrepareIndexQArgs prepare = batch.prepare;
      args.logits.pages.pages_per_row = static_cast<int32_t>(entries / 64);
      args.logits.pages.row_stride = entries / 64;
      args.logits.pages.rows = 1;
      args.logits.queries_per_row = 8192;
      const std::vector<int32_t> query_row(8192, 0);
      args.logits.query_row = query_row.data();
      args.logits.query_count = 8192;
      args.logits.heads = 64;
      prepare.tokens = 8192;
      prepare.heads = 64;
      args.prepare = &prepare;
      args.k = 2048;
      const absl::StatusOr<ReadTopkPlan> plan = plan_read_topk_cpu(args, width);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_LE(plan->scratch_bytes, kReadTopkBudgetDefault);
      // The budget is used: one more query token would not fit, or all of them do.
      const int64_t a_query = (plan->scratch_bytes - plan->select_bytes) / plan->queries_a_chunk;
      EXPECT_TRUE(plan->queries_a_chunk == 8192 || plan->scratch_bytes + 2 * a_query > kReadTopkBudgetDefault);
    }
  }
}

// The real thing: one sequence whose table names few pages a million entries long, some query tokens.
TEST(ReadTopk, reads_a_context_of_a_million_entries) {
  Batch batch(8);
  std::vector<int32_t> pages(1048576 / 64);
  Rng rng(9);
  for (int32_t& page : pages) page = static_cast<int32_t>(rng.below(20));
  batch.args.logits.pages = {pages.data(), nullptr, static_cast<int64_t>(pages.size()), 1, static_cast<int32_t>(pages.size())};
  batch.args.logits.queries_per_row = 3;
  batch.args.logits.query_count = 3;
  batch.prepare.tokens = 3;
  for (int32_t& visible : batch.visible) visible = 1048576;
  batch.args.k = 60;
  const Answer want = whole_batch(batch.args, best_cpu_isa());
  const int64_t three_rows = 3 * 1048576 * 4;
  const Answer got = read_with(batch.args, best_cpu_isa(), 2, three_rows + 2 * kMiB);
  expect_same(got, want);
  EXPECT_EQ(got.counts[0], 60);
}

}  // namespace
}  // namespace needle::testing
