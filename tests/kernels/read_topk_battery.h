// What every twin of read_topk must do: answer as its three operations do over the whole batch, whatever the budget, and
// stay inside it. Written once; a twin is a name and three functions on host arguments.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "base/workers.h"
#include "kernels/quantise.h"
#include "kernels/read_topk.h"

namespace needle::testing {

// Functions on host arguments; a twin elsewhere copies there and back.
struct ReadTopkTwin {
  std::string name;
  std::string unavailable;        // why it cannot run here; empty where it can
  std::vector<int> widths = {1};  // workers to try, where the twin has any
  bool cuts_for_cache = false;    // a chunk may be smaller than the budget allows
  std::function<absl::StatusOr<ReadTopkPlan>(const ReadTopkArgs&, int width, int64_t budget)> plan;
  // Runs on scratch of exactly these bytes, with a guard behind them that it looks at afterwards.
  std::function<absl::Status(const ReadTopkArgs&, const ReadTopkPlan&, int width, int64_t scratch_bytes)> run;
  // The three operations over the whole batch at once, on the same twin's instructions; selection by the reference.
  std::function<absl::Status(const PrepareIndexQArgs&)> prepare;
  std::function<absl::Status(const IndexLogitsArgs&)> logits;
};

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

inline float small_number(Rng& rng) { return static_cast<float>(rng.unit() * 2 - 1); }

// A key of random finite values.
inline void fill_key(ElementFormat element, std::byte* data, std::byte* scale, Rng& rng) {
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

inline int64_t out_stride_of(const ReadTopkArgs& args) { return round_up(args.k, 64); }

inline void point_at(Answer& answer, ReadTopkArgs& args) {
  const size_t cells = static_cast<size_t>(args.logits.query_count * out_stride_of(args));
  answer.positions.assign(cells, 77);
  answer.slots.assign(cells, 77);
  answer.scores.assign(cells, 77);
  answer.counts.assign(static_cast<size_t>(args.logits.query_count), 77);
  args.positions = answer.positions.data();
  args.slots = answer.slots.data();
  args.out_scores = answer.scores.data();
  args.counts = answer.counts.data();
  args.out_stride = out_stride_of(args);
  args.report = &answer.report;
}

inline Answer read_with(const ReadTopkTwin& twin, ReadTopkArgs args, int width, int64_t budget) {
  Answer answer;
  point_at(answer, args);
  const absl::StatusOr<ReadTopkPlan> plan = twin.plan(args, width, budget);
  EXPECT_TRUE(plan.ok()) << plan.status();
  if (!plan.ok()) return answer;
  EXPECT_LE(plan->scratch_bytes, budget);
  answer.queries_a_chunk = plan->queries_a_chunk;
  const absl::Status status = twin.run(args, *plan, width, plan->scratch_bytes);
  EXPECT_TRUE(status.ok()) << status;
  return answer;
}

// The three operations over the whole batch at once.
inline Answer whole_batch(const ReadTopkTwin& twin, ReadTopkArgs args) {
  Answer answer;
  point_at(answer, args);
  const int64_t vectors = int64_t{args.logits.query_count} * args.logits.heads;
  std::vector<uint16_t> q(static_cast<size_t>(vectors * 128));
  std::vector<float> weights(static_cast<size_t>(vectors));
  IndexLogitsArgs logits = args.logits;
  if (args.prepare != nullptr) {
    PrepareIndexQArgs prepare = *args.prepare;
    prepare.out_q = q.data();
    prepare.out_weights = weights.data();
    prepare.report = &answer.report;
    EXPECT_EQ(twin.prepare(prepare), absl::OkStatus());
    logits.q = q.data();
    logits.head_weights = weights.data();
  }
  const int64_t entries = int64_t{args.logits.pages.pages_per_row} * args.logits.keys.slots_per_page;
  std::vector<float> scores(static_cast<size_t>(args.logits.query_count * entries));
  logits.entry_count = entries;
  logits.scores = scores.data();
  logits.score_stride = entries;
  logits.report = &answer.report;
  EXPECT_EQ(twin.logits(logits), absl::OkStatus());
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

inline void expect_same(const Answer& got, const Answer& want) {
  EXPECT_EQ(got.positions, want.positions);
  EXPECT_EQ(got.slots, want.slots);
  EXPECT_EQ(got.counts, want.counts);
  EXPECT_EQ(std::memcmp(got.scores.data(), want.scores.data(), want.scores.size() * 4), 0);
  EXPECT_EQ(got.report.status, want.report.status);
  EXPECT_EQ(got.report.absent_entries, want.report.absent_entries);
  EXPECT_EQ(got.report.nan_scores, want.report.nan_scores);
}

inline void answers_as_its_operations_do_whatever_the_budget(const ReadTopkTwin& twin) {
  const Batch batch(1);
  const Answer want = whole_batch(twin, batch.args);
  EXPECT_GT(want.report.absent_entries, 0u) << "the batch should have absent pages";
  for (const int width : twin.widths) {
    const absl::StatusOr<ReadTopkPlan> all = twin.plan(batch.args, width, kReadTopkBudgetDefault);
    ASSERT_TRUE(all.ok()) << all.status();
    EXPECT_EQ(all->queries_a_chunk, batch.queries());
    const int64_t group = (all->scratch_bytes - all->select_bytes) / batch.sequences + 1024;
    for (const int64_t budget : {kReadTopkBudgetDefault, all->select_bytes + group, all->select_bytes + 2 * group}) {
      SCOPED_TRACE(::testing::Message() << "width " << width << " budget " << budget);
      const Answer got = read_with(twin, batch.args, width, budget);
      EXPECT_EQ(got.queries_a_chunk < batch.queries(), budget < kReadTopkBudgetDefault);
      expect_same(got, want);
    }
  }
}

inline void reads_every_key_format(const ReadTopkTwin& twin) {
  for (const ElementFormat element : {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4}) {
    SCOPED_TRACE(needle::name_of(element));
    const Batch batch(11, element);
    const Answer want = whole_batch(twin, batch.args);
    const absl::StatusOr<ReadTopkPlan> all = twin.plan(batch.args, 2, kReadTopkBudgetDefault);
    ASSERT_TRUE(all.ok()) << all.status();
    const Answer got = read_with(twin, batch.args, 2, all->scratch_bytes - 1);
    EXPECT_LT(got.queries_a_chunk, batch.queries());
    expect_same(got, want);
  }
}

inline void follows_query_rows_across_chunks(const ReadTopkTwin& twin) {
  Batch batch(2);
  std::vector<int32_t> query_row;
  Rng rng(3);
  for (int32_t i = 0; i < batch.queries(); ++i) query_row.push_back(static_cast<int32_t>(rng.below(5)));
  batch.args.logits.query_row = query_row.data();
  const Answer want = whole_batch(twin, batch.args);
  const absl::StatusOr<ReadTopkPlan> all = twin.plan(batch.args, 1, kReadTopkBudgetDefault);
  ASSERT_TRUE(all.ok()) << all.status();
  const int64_t small = all->select_bytes + (all->scratch_bytes - all->select_bytes) / 3;
  const Answer got = read_with(twin, batch.args, 1, small);
  EXPECT_LT(got.queries_a_chunk, batch.queries());
  expect_same(got, want);
}

inline void refuses_a_budget_or_scratch_too_small_with_the_bytes_that_would_do(const ReadTopkTwin& twin) {
  Batch batch(4);
  Answer answer;
  point_at(answer, batch.args);
  const absl::StatusOr<ReadTopkPlan> refused = twin.plan(batch.args, 1, 1000);
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(refused.status().message());
  const size_t at = message.find("must be >= ");
  ASSERT_NE(at, std::string::npos) << message;
  const int64_t needed = std::stoll(message.substr(at + 11));
  EXPECT_TRUE(twin.plan(batch.args, 1, needed).ok());
  EXPECT_FALSE(twin.plan(batch.args, 1, needed - 1).ok());

  const absl::StatusOr<ReadTopkPlan> plan = twin.plan(batch.args, 1, kReadTopkBudgetDefault);
  ASSERT_TRUE(plan.ok());
  const absl::Status status = twin.run(batch.args, *plan, 1, plan->scratch_bytes - 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(status.message()).find(std::to_string(plan->scratch_bytes)), std::string::npos) << status;
  EXPECT_EQ(answer.counts[0], 77) << "nothing is written by a refusal";
}

inline void cuts_visible_lengths_at_the_stated_bound_and_says_so(const ReadTopkTwin& twin) {
  Batch batch(5);
  batch.args.entries_max = 100;
  for (int32_t& visible : batch.visible) visible = 150;
  const Answer got = read_with(twin, batch.args, 1, kReadTopkBudgetDefault);
  EXPECT_NE(got.report.status & kStatusBadPageTable, 0u);
  for (int32_t i = 0; i < batch.queries(); ++i) {
    for (int32_t j = 0; j < got.counts[static_cast<size_t>(i)]; ++j) {
      const int32_t base = batch.entry_base[static_cast<size_t>(i / batch.queries_per_row)];
      EXPECT_LT(got.positions[static_cast<size_t>(i * out_stride_of(batch.args) + j)] - base, 100);
    }
  }
}

inline void an_empty_batch_is_an_answer(const ReadTopkTwin& twin) {
  Batch batch(6);
  batch.args.logits.query_count = 0;
  batch.prepare.tokens = 0;
  const Answer got = read_with(twin, batch.args, 1, kReadTopkBudgetDefault);
  EXPECT_EQ(got.report.status, 0u);
}

// One token a sequence, 64 heads, long and short contexts, whatever the scores look like: what a decode step asks for, and
// where a twin may keep candidates instead of reading all scores again.
enum class ScoreShape { kRandom, kAscending, kDescending, kAllEqual, kTwoValues, kCrowded, kWithNan };

struct DecodeBatch {
  static constexpr int kHeads = 64;
  std::vector<int32_t> visible = {20000, 0, 1, 9000, 63, 64, 65, 511, 512, 513, 3000, 4096, 12345, 700, 0};
  std::unique_ptr<std::byte, FreeAligned> keys;
  std::vector<int32_t> pages;
  std::vector<int32_t> entry_base;
  std::vector<uint16_t> q;
  std::vector<float> weights;
  ReadTopkArgs args;

  // Every head sees a key's first element, so a key's score is that element where it is positive and 0 elsewhere.
  DecodeBatch(ScoreShape shape, int32_t k, uint64_t seed) {
    Rng rng(seed);
    const int32_t pages_a_row = 20000 / 64 + 1;
    const auto sequences = static_cast<int32_t>(visible.size());
    const int64_t page_bytes = layer_page_bytes(ElementFormat::kBf16, 128, 64);
    std::vector<int32_t> order;
    for (const int32_t length : visible) {
      for (int32_t i = 0; i < div_ceil(length, 64); ++i) order.push_back(static_cast<int32_t>(order.size()));
    }
    const auto page_count = static_cast<int64_t>(order.size());
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
    keys.reset(static_cast<std::byte*>(std::aligned_alloc(kPageAlignment, static_cast<size_t>(page_count * page_bytes))));
    std::memset(keys.get(), 0, static_cast<size_t>(page_count * page_bytes));
    pages.assign(static_cast<size_t>(sequences * pages_a_row), kNoPage);
    size_t next = 0;
    for (int32_t s = 0; s < sequences; ++s) {
      entry_base.push_back(s * 7);
      const int32_t length = visible[static_cast<size_t>(s)];
      for (int32_t e = 0; e < length; ++e) {
        int32_t& page = pages[static_cast<size_t>(s * pages_a_row + e / 64)];
        if (e % 64 == 0) page = order[next++];
        uint16_t value = bf16_of(value_of(shape, e, length, rng));
        if (shape == ScoreShape::kWithNan && rng.chance(0.01)) value = 0x7FC0;
        std::memcpy(keys.get() + page * page_bytes + slot_place(ElementFormat::kBf16, 128, 64, e % 64).data, &value, sizeof value);
      }
    }
    if (shape == ScoreShape::kRandom) {
      for (int32_t& page : pages) page = rng.chance(0.02) ? kNoPage : page;
    }
    q.assign(static_cast<size_t>(sequences * kHeads * 128), 0);
    for (size_t i = 0; i < q.size(); i += 128) q[i] = bf16_of(1.0f);
    weights.assign(static_cast<size_t>(sequences * kHeads), 1.0f / kHeads);
    args.logits.keys.base = keys.get();
    args.logits.keys.page_stride = page_bytes;
    args.logits.keys.page_count = page_count;
    args.logits.keys.slots_per_page = 64;
    args.logits.keys.head_dim = 128;
    args.logits.pages = {pages.data(), entry_base.data(), pages_a_row, sequences, pages_a_row};
    args.logits.q = q.data();
    args.logits.head_weights = weights.data();
    args.logits.visible = visible.data();
    args.logits.query_count = sequences;
    args.logits.heads = kHeads;
    args.k = k;
  }

 private:
  static float value_of(ScoreShape shape, int32_t entry, int32_t length, Rng& rng) {
    switch (shape) {
      case ScoreShape::kAscending: return 1.0f + static_cast<float>(entry);
      case ScoreShape::kDescending: return static_cast<float>(length - entry);
      case ScoreShape::kAllEqual: return 1.0f;
      case ScoreShape::kTwoValues: return rng.chance(0.5) ? 1.0f : 1.0078125f;
      case ScoreShape::kCrowded:  // the best lie together at two thirds of the context
        return std::abs(entry - 2 * length / 3) < 300 ? 10.0f + small_number(rng) : small_number(rng);
      default: return small_number(rng) * 3.0f;
    }
  }
};

inline void answers_for_one_token_a_sequence(const ReadTopkTwin& twin) {
  for (const ScoreShape shape : {ScoreShape::kRandom, ScoreShape::kAscending, ScoreShape::kDescending, ScoreShape::kAllEqual,
                                 ScoreShape::kTwoValues, ScoreShape::kCrowded, ScoreShape::kWithNan}) {
    for (const int32_t k : {1, 512, 600}) {
      SCOPED_TRACE(::testing::Message() << "score shape " << static_cast<int>(shape) << ", k " << k);
      const DecodeBatch batch(shape, k, 12);
      const Answer want = whole_batch(twin, batch.args);
      EXPECT_EQ(want.report.absent_entries > 0, shape == ScoreShape::kRandom);
      EXPECT_EQ(want.report.nan_scores > 0, shape == ScoreShape::kWithNan);
      expect_same(read_with(twin, batch.args, 1, kReadTopkBudgetDefault), want);
      ReadTopkArgs silent = batch.args;  // no report, no slots, no scores
      Answer bare;
      point_at(bare, silent);
      silent.report = nullptr;
      silent.slots = nullptr;
      silent.out_scores = nullptr;
      const absl::StatusOr<ReadTopkPlan> plan = twin.plan(silent, 1, kReadTopkBudgetDefault);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_EQ(twin.run(silent, *plan, 1, plan->scratch_bytes), absl::OkStatus());
      EXPECT_EQ(bare.positions, want.positions);
      EXPECT_EQ(bare.counts, want.counts);
    }
  }
}

// A million tokens of context and 8,192 query tokens, at every ratio: the plan alone, which is host arithmetic.
inline void plans_a_million_tokens_within_the_default_budget(const ReadTopkTwin& twin) {
  Batch batch(7);
  for (const int64_t entries : {1048576, 262144, 8192}) {
    for (const int width : twin.widths) {
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
      const absl::StatusOr<ReadTopkPlan> plan = twin.plan(args, width, kReadTopkBudgetDefault);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_LE(plan->scratch_bytes, kReadTopkBudgetDefault);
      // The budget is used: one more query token would not fit, or all of them do.
      const int64_t a_query = (plan->scratch_bytes - plan->select_bytes) / plan->queries_a_chunk;
      EXPECT_TRUE(twin.cuts_for_cache || plan->queries_a_chunk == 8192 || plan->scratch_bytes + 2 * a_query > kReadTopkBudgetDefault);
    }
  }
}

// The real thing: one sequence whose table names few pages a million entries long, some query tokens.
inline void reads_a_context_of_a_million_entries(const ReadTopkTwin& twin) {
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
  const Answer want = whole_batch(twin, batch.args);
  const int64_t three_rows = 3 * 1048576 * 4;
  const Answer got = read_with(twin, batch.args, 2, three_rows + 2 * kMiB);
  expect_same(got, want);
  EXPECT_EQ(got.counts[0], 60);
}

struct ReadTopkCase {
  const char* name;
  void (*run)(const ReadTopkTwin& twin);
};
inline void PrintTo(const ReadTopkCase& battery_case, std::ostream* out) { *out << battery_case.name; }

inline std::vector<ReadTopkCase> read_topk_battery() {
#define NEEDLE_CASE(NAME) \
  ReadTopkCase { #NAME, NAME }
  return {
      NEEDLE_CASE(answers_as_its_operations_do_whatever_the_budget),
      NEEDLE_CASE(reads_every_key_format),
      NEEDLE_CASE(follows_query_rows_across_chunks),
      NEEDLE_CASE(refuses_a_budget_or_scratch_too_small_with_the_bytes_that_would_do),
      NEEDLE_CASE(cuts_visible_lengths_at_the_stated_bound_and_says_so),
      NEEDLE_CASE(an_empty_batch_is_an_answer),
      NEEDLE_CASE(answers_for_one_token_a_sequence),
      NEEDLE_CASE(plans_a_million_tokens_within_the_default_budget),
      NEEDLE_CASE(reads_a_context_of_a_million_entries),
  };
#undef NEEDLE_CASE
}

}  // namespace needle::testing
