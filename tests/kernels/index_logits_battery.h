// The battery of index_logits: every case that a twin must pass, written once and run by the reference, by every CPU
// instruction set and by the CUDA twin.
//
// What must stay true:
//  1. A case takes a twin and nothing else. Arguments are host memory; a twin that lives elsewhere copies them there and
//     its outputs back.
//  2. Numbers are held against index_logits_ref; order, counts, untouched memory and repeats are held bit for bit.
//  3. Scores start out as kUntouched, so that a score which should not have been written is seen.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/rng.h"
#include "base/units.h"
#include "gtest/gtest.h"
#include "kernels/index_logits.h"
#include "kernels/quantise.h"
#include "tests/counts.h"

namespace needle::testing {

struct LogitsTwin {
  std::string name;
  ScoreVariant variant = ScoreVariant::kReference;
  // Reads the pool where it lies in host memory: it can be given fenced pages and a sparse pool of 68 GiB. A twin that
  // copies the whole pool first cannot; fences become poison for it, and it brings its own test of 64-bit offsets.
  bool reads_host_memory = true;
  // Largest relative error where keys and queries are both fp8: a matrix unit that multiplies fp8 keeps fewer bits of the sum.
  double fp8_product_error_max = 2e-6;
  // `threads` is what a CPU twin runs with; others may take it as a different grid, or ignore it.
  std::function<absl::Status(const IndexLogitsArgs& args, int threads)> run;
};

struct LogitsCase {
  const char* name;
  void (*run)(const LogitsTwin& twin);
};

inline constexpr uint32_t kUntouched = 0xDEADBEEFu;
inline constexpr int kThreadsMax = 5;
inline constexpr int64_t kGuardColumns = 7;  // past entry_count in every row of scores; must stay untouched

// A mapping of whole pages of memory, zero at first, given back at the end.
class Mapping {
 public:
  explicit Mapping(int64_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* address = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    error_ = address == MAP_FAILED ? errno : 0;
    address_ = address == MAP_FAILED ? nullptr : static_cast<std::byte*>(address);
  }
  ~Mapping() {
    if (address_ != nullptr) munmap(address_, static_cast<size_t>(bytes_));
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* address() const { return address_; }
  int64_t bytes() const { return bytes_; }
  int error() const { return error_; }

  // Any touch from here on is a crash.
  void fence(int64_t offset, int64_t bytes) const {
    NEEDLE_CHECK(mprotect(address_ + offset, static_cast<size_t>(bytes), PROT_NONE) == 0, "a fence needs whole pages of memory");
  }

 private:
  int64_t bytes_ = 0;
  std::byte* address_ = nullptr;
  int error_ = 0;
};

struct LogitsShape {
  ElementFormat element = ElementFormat::kBf16;
  QueryElement q_element = QueryElement::kBf16;
  int heads = 64;
  int slots = 64;
  int pool_pages = 12;
  int rows = 2;
  int pages_per_row = 4;
  int queries_per_row = 1;
};

// All that a call needs, owned. Fields may be changed before a run.
class LogitsProblem {
 public:
  LogitsProblem(const LogitsShape& wanted, uint64_t seed)
      : shape(wanted),
        // Whole pages of memory, so that a page can be fenced.
        stride(round_up(layer_page_bytes(wanted.element, kIndexHeadDim, wanted.slots), 4096)),
        pool(stride * wanted.pool_pages) {
    NEEDLE_CHECK(pool.error() == 0, "the test's pool could not be mapped");
    Rng rng(seed);
    for (int page = 0; page < shape.pool_pages; ++page) {
      for (int slot = 0; slot < shape.slots; ++slot) randomise_key(page, slot, rng);
    }
    // Distinct pages in shuffled order as far as they last, then again from the start.
    std::vector<int32_t> order(static_cast<size_t>(shape.pool_pages));
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
    for (int i = 0; i < shape.rows * shape.pages_per_row; ++i) table.push_back(order[static_cast<size_t>(i % shape.pool_pages)]);

    const int queries = shape.rows * shape.queries_per_row;
    q.resize(static_cast<size_t>(queries * shape.heads * query_vector_bytes(shape.q_element)));
    for (int i = 0; i < queries * shape.heads; ++i) randomise_query(i, rng);
    for (int i = 0; i < queries * shape.heads; ++i) weights.push_back(static_cast<float>(rng.unit() - 0.4));
    visible.assign(static_cast<size_t>(queries), shape.pages_per_row * shape.slots);
    entry_count = int64_t{shape.pages_per_row} * shape.slots;
  }

  LogitsShape shape;
  int64_t stride;
  Mapping pool;
  std::vector<int32_t> table;  // [rows, pages_per_row]
  std::vector<std::byte> q;
  std::vector<uint8_t> q_scale;
  std::vector<float> weights;
  std::vector<int32_t> visible;
  std::vector<int32_t> query_row;  // empty: by queries_per_row
  int64_t entry_begin = 0;
  int64_t entry_count = 0;

  int queries() const { return static_cast<int>(visible.size()); }
  int64_t score_stride() const { return entry_count + kGuardColumns; }

  LayerView view() const {
    LayerView view;
    view.base = pool.address();
    view.page_stride = stride;
    view.page_count = shape.pool_pages;
    view.slots_per_page = shape.slots;
    view.head_dim = kIndexHeadDim;
    view.element = shape.element;
    if (shape.element == ElementFormat::kFp8) view.scale = ScaleKind::kAmax;
    if (shape.element == ElementFormat::kFp4) view.scale = ScaleKind::kPowerOfTwo;
    return view;
  }

  IndexLogitsArgs args(float* scores, OpReport* report) const {
    IndexLogitsArgs args;
    args.keys = view();
    args.pages.pages = table.data();
    args.pages.row_stride = shape.pages_per_row;
    args.pages.pages_per_row = shape.pages_per_row;
    args.pages.rows = shape.rows;
    args.q = q.data();
    args.q_element = shape.q_element;
    args.q_scale = q_scale.empty() ? nullptr : q_scale.data();
    args.head_weights = weights.data();
    args.query_row = query_row.empty() ? nullptr : query_row.data();
    args.queries_per_row = shape.queries_per_row;
    args.visible = visible.data();
    args.query_count = queries();
    args.heads = shape.heads;
    args.entry_begin = entry_begin;
    args.entry_count = entry_count;
    args.scores = scores;
    args.score_stride = score_stride();
    args.report = report;
    return args;
  }

  std::byte* key_data(int page, int slot) const {
    return pool.address() + page * stride + slot_place(shape.element, kIndexHeadDim, shape.slots, slot).data;
  }
  std::byte* key_scale(int page, int slot) const {
    return pool.address() + page * stride + slot_place(shape.element, kIndexHeadDim, shape.slots, slot).scale;
  }

  // bf16 pools and bf16 queries.
  void set_key(int page, int slot, int d, float value) {
    NEEDLE_CHECK(shape.element == ElementFormat::kBf16, "single key elements are set in bf16 pools");
    const uint16_t bits = bf16_of(value);
    std::memcpy(key_data(page, slot) + 2 * d, &bits, sizeof bits);
  }
  void set_key_bits(int page, int slot, int d, uint16_t bits) { std::memcpy(key_data(page, slot) + 2 * d, &bits, sizeof bits); }
  void set_query_bits(int query, int head, int d, uint16_t bits) {
    NEEDLE_CHECK(shape.q_element == QueryElement::kBf16, "single query elements are set in bf16 queries");
    std::memcpy(q.data() + (static_cast<int64_t>(query) * shape.heads + head) * 256 + 2 * d, &bits, sizeof bits);
  }
  void set_query(int query, int head, int d, float value) { set_query_bits(query, head, d, bf16_of(value)); }
  void zero_keys() { std::memset(pool.address(), 0, static_cast<size_t>(pool.bytes())); }
  void zero_queries() { std::fill(q.begin(), q.end(), std::byte{0}); }

  // NaN in whatever format: all bits set is NaN in bf16, in e4m3, in an fp32 scale and in a ue8m0 scale.
  void poison_slot(int page, int slot) {
    std::memset(key_data(page, slot), 0xFF, static_cast<size_t>(slot_data_bytes(shape.element, kIndexHeadDim)));
    const int64_t scale_bytes = slot_scale_bytes(shape.element, kIndexHeadDim);
    if (scale_bytes > 0) std::memset(key_scale(page, slot), 0xFF, static_cast<size_t>(scale_bytes));
  }

  // The same problem with every sign bit cleared: its reference is the sum of magnitudes that bounds a score's rounding.
  void drop_signs() {
    for (int page = 0; page < shape.pool_pages; ++page) {
      for (int slot = 0; slot < shape.slots; ++slot) {
        drop_signs_of(key_data(page, slot), slot_data_bytes(shape.element, kIndexHeadDim), static_cast<int>(shape.element));
      }
    }
    drop_signs_of(q.data(), static_cast<int64_t>(q.size()), static_cast<int>(shape.q_element));
    for (float& weight : weights) weight = std::fabs(weight);
  }

  LogitsProblem(const LogitsProblem& other)
      : shape(other.shape),
        stride(other.stride),
        pool(other.pool.bytes()),
        table(other.table),
        q(other.q),
        q_scale(other.q_scale),
        weights(other.weights),
        visible(other.visible),
        query_row(other.query_row),
        entry_begin(other.entry_begin),
        entry_count(other.entry_count) {
    if (pool.bytes() > 0) std::memcpy(pool.address(), other.pool.address(), static_cast<size_t>(pool.bytes()));
  }

 private:
  // Element formats and query elements number bf16, fp8 and fp4 alike.
  static_assert(static_cast<int>(ElementFormat::kBf16) == 0 && static_cast<int>(QueryElement::kBf16) == 0);
  static_assert(static_cast<int>(ElementFormat::kFp8) == 1 && static_cast<int>(QueryElement::kFp8) == 1);
  static_assert(static_cast<int>(ElementFormat::kFp4) == 2 && static_cast<int>(QueryElement::kFp4) == 2);

  static void randomise(std::byte* data, int element, Rng& rng) {
    for (int d = 0; d < kIndexHeadDim; ++d) {
      if (element == 0) {
        const uint16_t bits = bf16_of(static_cast<float>((rng.unit() + rng.unit() + rng.unit() - 1.5) * 2));
        std::memcpy(data + 2 * d, &bits, sizeof bits);
      } else if (element == 1) {
        const uint32_t sign = static_cast<uint32_t>(rng.below(2)) << 7;
        data[d] = static_cast<std::byte>(sign | static_cast<uint32_t>(rng.below(0x7F)));
      } else if (d % 2 == 0) {
        data[d / 2] = static_cast<std::byte>(rng.below(256));
      }
    }
  }
  static void drop_signs_of(std::byte* data, int64_t bytes, int element) {
    for (int64_t i = 0; i < bytes; ++i) {
      if (element == 0 && i % 2 == 1) data[i] &= std::byte{0x7F};
      if (element == 1) data[i] &= std::byte{0x7F};
      if (element == 2) data[i] &= std::byte{0x77};
    }
  }
  void randomise_key(int page, int slot, Rng& rng) {
    randomise(key_data(page, slot), static_cast<int>(shape.element), rng);
    if (shape.element == ElementFormat::kFp8) {
      const float scale = static_cast<float>(0.002 + 0.01 * rng.unit());
      std::memcpy(key_scale(page, slot), &scale, sizeof scale);
    } else if (shape.element == ElementFormat::kFp4) {
      for (int part = 0; part < 4; ++part) key_scale(page, slot)[part] = static_cast<std::byte>(rng.between(122, 128));
    }
  }
  void randomise_query(int vector, Rng& rng) {
    randomise(q.data() + vector * query_vector_bytes(shape.q_element), static_cast<int>(shape.q_element), rng);
    if (shape.q_element == QueryElement::kFp4) {
      for (int part = 0; part < 4; ++part) q_scale.push_back(static_cast<uint8_t>(rng.between(122, 128)));
    }
  }
};

struct LogitsOutcome {
  absl::Status status;
  std::vector<float> scores;  // [queries, score_stride]
  OpReport report = {};

  bool same_bits(const LogitsOutcome& other) const {
    return scores.size() == other.scores.size() &&
           (scores.empty() || std::memcmp(scores.data(), other.scores.data(), scores.size() * sizeof(float)) == 0);
  }
};

using LogitsCall = std::function<absl::Status(const IndexLogitsArgs&)>;

inline LogitsOutcome outcome_of(const LogitsProblem& problem, const LogitsCall& call) {
  LogitsOutcome outcome;
  outcome.scores.assign(static_cast<size_t>(problem.queries() * problem.score_stride()), float_of_bits(kUntouched));
  outcome.status = call(problem.args(outcome.scores.data(), &outcome.report));
  return outcome;
}
inline LogitsOutcome run_twin(const LogitsTwin& twin, const LogitsProblem& problem, int threads = 1) {
  return outcome_of(problem, [&](const IndexLogitsArgs& args) { return twin.run(args, threads); });
}
inline LogitsOutcome run_reference(const LogitsTwin& twin, const LogitsProblem& problem) {
  const bool flush = flushes_denormals(twin.variant);
  return outcome_of(problem, [&](const IndexLogitsArgs& args) { return index_logits_ref(args, flush); });
}

// Holds an outcome against the reference: what is not a number bit for bit, numbers within the promise.
inline void expect_matches_reference(const LogitsTwin& twin, const LogitsProblem& problem, const LogitsOutcome& got) {
  ASSERT_TRUE(got.status.ok()) << got.status;
  const LogitsOutcome due = run_reference(twin, problem);
  ASSERT_TRUE(due.status.ok()) << due.status;
  LogitsProblem magnitudes_problem(problem);
  magnitudes_problem.drop_signs();
  const LogitsOutcome magnitudes = run_reference(twin, magnitudes_problem);

  EXPECT_EQ(got.report.status, due.report.status);
  EXPECT_EQ(got.report.nan_scores, due.report.nan_scores);
  EXPECT_EQ(got.report.absent_entries, due.report.absent_entries);
  EXPECT_EQ(got.report.skipped_rows, 0u);

  const bool fp8_product = problem.shape.element == ElementFormat::kFp8 && problem.shape.q_element == QueryElement::kFp8;
  const double error_max = fp8_product ? twin.fp8_product_error_max : 2e-6;
  double error_square = 0;
  double norm_square = 0;
  int64_t numbers = 0;
  int64_t shown = 0;
  for (size_t i = 0; i < due.scores.size() && shown < 5; ++i) {
    const std::string place = absl::StrCat("query ", static_cast<int64_t>(i) / problem.score_stride(), ", column ",
                                           static_cast<int64_t>(i) % problem.score_stride());
    const uint32_t due_bits = bits_of(due.scores[i]);
    const uint32_t got_bits = bits_of(got.scores[i]);
    if (due_bits == kUntouched || !std::isfinite(due.scores[i])) {
      if (got_bits != due_bits) ++shown;
      EXPECT_EQ(got_bits, due_bits) << place << (due_bits == kUntouched ? ": written past the length" : "");
      continue;
    }
    const double error = static_cast<double>(got.scores[i]) - static_cast<double>(due.scores[i]);
    const double bound = error_max * static_cast<double>(magnitudes.scores[i]) + static_cast<double>(std::numeric_limits<float>::min());
    if (!(std::fabs(error) <= bound)) ++shown;
    EXPECT_LE(std::fabs(error), bound) << place << ": " << got.scores[i] << " for " << due.scores[i];
    error_square += error * error;
    norm_square += static_cast<double>(due.scores[i]) * static_cast<double>(due.scores[i]);
    ++numbers;
  }
  if (numbers >= 32) {
    EXPECT_LE(std::sqrt(error_square), error_max * std::sqrt(norm_square)) << "relative norm error";
  }
}

inline void expect_agrees(const LogitsTwin& twin, const LogitsProblem& problem, int threads = 1) {
  expect_matches_reference(twin, problem, run_twin(twin, problem, threads));
}

// ---------------------------------------------------------------------------------------------------------------------
// The cases.

// deepseek-v4's tiny example, in 128 dimensions: two heads, four keys.
inline void gives_the_worked_example(const LogitsTwin& twin) {
  LogitsShape shape;
  shape.heads = 2;
  shape.rows = 1;
  shape.pages_per_row = 1;
  LogitsProblem problem(shape, 1);
  problem.zero_keys();
  problem.zero_queries();
  const float keys[4][4] = {{.5f, 1, 0, .25f}, {1, 0, 2, -1}, {-.5f, .5f, 1, 0}, {0, -1, 0, 1}};
  const float queries[2][4] = {{1, -.5f, .25f, 2}, {-1, 1, .5f, 0}};
  for (int d = 0; d < 4; ++d) {
    for (int s = 0; s < 4; ++s) problem.set_key(problem.table[0], s, d, keys[s][d]);
    for (int h = 0; h < 2; ++h) problem.set_query(0, h, d, queries[h][d]);
  }
  problem.weights = {.6f, -.3f};
  problem.visible = {4};
  const LogitsOutcome outcome = run_twin(twin, problem);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_FLOAT_EQ(outcome.scores[0], .15f);
  EXPECT_EQ(outcome.scores[1], 0.0f);
  EXPECT_FLOAT_EQ(outcome.scores[2], -.45f);
  EXPECT_FLOAT_EQ(outcome.scores[3], 1.5f);
  EXPECT_EQ(bits_of(outcome.scores[4]), kUntouched);
  EXPECT_EQ(outcome.report.status, 0u);
}

inline void agrees_for_every_pair_of_key_and_query_formats(const LogitsTwin& twin) {
  for (ElementFormat element : {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4}) {
    for (QueryElement q_element : {QueryElement::kBf16, QueryElement::kFp8, QueryElement::kFp4}) {
      SCOPED_TRACE(absl::StrCat("keys ", static_cast<int>(element), ", queries ", static_cast<int>(q_element)));
      LogitsShape shape;
      shape.element = element;
      shape.q_element = q_element;
      expect_agrees(twin, LogitsProblem(shape, 2));
    }
  }
}

inline void agrees_for_any_number_of_heads(const LogitsTwin& twin) {
  for (int heads : {1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 96, 100, 127, 128}) {
    SCOPED_TRACE(absl::StrCat(heads, " heads"));
    LogitsShape shape;
    shape.heads = heads;
    shape.pages_per_row = 2;
    expect_agrees(twin, LogitsProblem(shape, 3));
  }
}

inline void agrees_for_any_page_size(const LogitsTwin& twin) {
  for (ElementFormat element : {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4}) {
    for (int slots : {1, 2, 3, 5, 32, 63, 64, 65, 128, 256}) {
      SCOPED_TRACE(absl::StrCat("element ", static_cast<int>(element), ", ", slots, " slots a page"));
      LogitsShape shape;
      shape.element = element;
      shape.slots = slots;
      shape.heads = 17;
      expect_agrees(twin, LogitsProblem(shape, 4));
    }
  }
}

// Every stored code is converted exactly: with one-hot queries a score is code x scale to the bit.
inline void converts_every_fp8_code_exactly(const LogitsTwin& twin) {
  for (int sign = 0; sign < 2; ++sign) {
    LogitsShape shape;
    shape.element = ElementFormat::kFp8;
    shape.heads = 1;
    shape.rows = 1;
    shape.pages_per_row = 2;
    LogitsProblem problem(shape, 5);
    problem.zero_keys();
    problem.zero_queries();
    problem.set_query(0, 0, 37, sign == 0 ? 1.0f : -1.0f);
    problem.weights = {1.0f};
    const float scale = 0x1.234p-7f;
    for (int code = 0; code < 128; ++code) {
      const int page = problem.table[static_cast<size_t>(code / 64)];
      std::memcpy(problem.key_scale(page, code % 64), &scale, sizeof scale);
      problem.key_data(page, code % 64)[37] = static_cast<std::byte>(code | (sign << 7));
    }
    const LogitsOutcome outcome = run_twin(twin, problem);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    for (uint8_t code = 0; code < 127; ++code) {
      EXPECT_EQ(outcome.scores[code], float_of_e4m3(code) * scale) << "code " << int{code} << ", sign " << sign;
    }
    EXPECT_EQ(bits_of(outcome.scores[127]), kNanScoreBits) << "e4m3fn has one NaN a sign";
    EXPECT_EQ(outcome.report.nan_scores, 1u);
  }
}

inline void converts_every_fp4_code_and_scale_exactly(const LogitsTwin& twin) {
  LogitsShape shape;
  shape.element = ElementFormat::kFp4;
  shape.heads = 2;
  shape.rows = 1;
  shape.pages_per_row = 4;
  LogitsProblem problem(shape, 6);
  problem.weights = {1.0f, -1.0f};  // head 0 sees the positive codes, head 1 the negative ones
  for (int d : {0, 31, 32, 77, 127}) {
    problem.zero_keys();
    problem.zero_queries();
    problem.set_query(0, 0, d, 1.0f);
    problem.set_query(0, 1, d, -1.0f);
    for (int scale_byte = 0; scale_byte < 256; ++scale_byte) {
      const int page = problem.table[static_cast<size_t>(scale_byte / 64)];
      const int code = (scale_byte * 7 + d) % 16;
      problem.key_data(page, scale_byte % 64)[d / 2] = static_cast<std::byte>(d % 2 == 0 ? code : code << 4);
      problem.key_scale(page, scale_byte % 64)[d / 32] = static_cast<std::byte>(scale_byte);
    }
    const LogitsOutcome outcome = run_twin(twin, problem);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    // Below byte 3 values may be denormal, which some variants flush; above 252 the largest code leaves fp32.
    for (int scale_byte = 3; scale_byte <= 252; ++scale_byte) {
      const uint8_t code = static_cast<uint8_t>((scale_byte * 7 + d) % 16);
      EXPECT_EQ(outcome.scores[static_cast<size_t>(scale_byte)], float_of_e2m1(code) * float_of_ue8m0(static_cast<uint8_t>(scale_byte)))
          << "dimension " << d << ", code " << int{code} << ", scale byte " << scale_byte;
    }
    EXPECT_EQ(bits_of(outcome.scores[255]), kNanScoreBits) << "ue8m0 255 is NaN";
  }
}

inline void takes_weights_of_any_sign(const LogitsTwin& twin) {
  for (float sign : {1.0f, -1.0f, 0.0f}) {
    SCOPED_TRACE(sign);
    LogitsProblem problem(LogitsShape{}, 7);
    for (float& weight : problem.weights) weight = std::fabs(weight) * sign;
    expect_agrees(twin, problem);
  }
}

inline void passes_a_nan_key_on_alone_under_weights_of_either_sign(const LogitsTwin& twin) {
  for (ElementFormat element : {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4}) {
    for (float sign : {1.0f, -1.0f}) {
      SCOPED_TRACE(absl::StrCat("element ", static_cast<int>(element), ", weights of sign ", sign));
      LogitsShape shape;
      shape.element = element;
      LogitsProblem problem(shape, 8);
      for (float& weight : problem.weights) weight = (std::fabs(weight) + 0.01f) * sign;
      const LogitsOutcome before = run_twin(twin, problem);
      problem.poison_slot(problem.table[1], 30);  // row 0, entry 94
      const LogitsOutcome after = run_twin(twin, problem);
      expect_matches_reference(twin, problem, after);
      EXPECT_EQ(after.report.nan_scores, 1u);
      EXPECT_EQ(after.report.status, uint32_t{kStatusNanScore});
      for (size_t i = 0; i < after.scores.size(); ++i) {
        if (i == 94) {
          EXPECT_EQ(bits_of(after.scores[i]), kNanScoreBits);
        } else {
          EXPECT_EQ(bits_of(after.scores[i]), bits_of(before.scores[i])) << "a neighbour changed at " << i;
        }
      }
    }
  }
}

inline void passes_one_nan_element_on_whatever_its_payload(const LogitsTwin& twin) {
  for (uint16_t pattern : {uint16_t{0x7FC0}, uint16_t{0x7F81}, uint16_t{0xFFC0}, uint16_t{0xFFFF}}) {
    for (int d : {0, 1, 64, 127}) {
      LogitsProblem problem(LogitsShape{}, 9);
      problem.set_key_bits(problem.table[0], 3, d, pattern);
      const LogitsOutcome outcome = run_twin(twin, problem);
      EXPECT_EQ(bits_of(outcome.scores[3]), kNanScoreBits) << "pattern " << pattern << " in dimension " << d;
      EXPECT_EQ(outcome.report.nan_scores, 1u);
      expect_matches_reference(twin, problem, outcome);
    }
  }
}

inline void counts_every_score_when_all_keys_are_nan(const LogitsTwin& twin) {
  LogitsProblem problem(LogitsShape{}, 10);
  for (int page = 0; page < problem.shape.pool_pages; ++page) {
    for (int slot = 0; slot < problem.shape.slots; ++slot) problem.poison_slot(page, slot);
  }
  problem.visible = {256, 131};
  const LogitsOutcome outcome = run_twin(twin, problem);
  expect_matches_reference(twin, problem, outcome);
  EXPECT_EQ(outcome.report.nan_scores, 256u + 131u);
}

inline void passes_nan_and_infinity_of_queries_and_weights_on(const LogitsTwin& twin) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (float value : {infinity, -infinity, nan}) {
    SCOPED_TRACE(value);
    LogitsProblem with_weight(LogitsShape{}, 11);
    with_weight.weights[5] = value;
    expect_agrees(twin, with_weight);
    LogitsProblem with_query(LogitsShape{}, 12);
    with_query.set_query(1, 40, 99, value);
    expect_agrees(twin, with_query);
  }
}

// +-inf in one element makes each head's dot +-inf; heads past the last one must not turn that into 0 x inf.
inline void gives_infinite_keys_infinite_scores(const LogitsTwin& twin) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (int heads : {1, 5, 31, 64}) {
    for (float value : {infinity, -infinity}) {
      for (float sign : {1.0f, -1.0f}) {
        SCOPED_TRACE(absl::StrCat(heads, " heads, key ", value, ", weights of sign ", sign));
        LogitsShape shape;
        shape.heads = heads;
        LogitsProblem problem(shape, 13);
        for (float& weight : problem.weights) weight = (std::fabs(weight) + 0.01f) * sign;
        for (int h = 0; h < heads; ++h) problem.set_query(0, h, 50, 0.5f);
        problem.set_key(problem.table[0], 17, 50, value);
        const LogitsOutcome outcome = run_twin(twin, problem);
        expect_matches_reference(twin, problem, outcome);
        EXPECT_EQ(outcome.scores[17], value > 0 ? sign * infinity : 0.0f);
      }
    }
  }
}

inline void turns_infinity_minus_infinity_into_nan(const LogitsTwin& twin) {
  const float infinity = std::numeric_limits<float>::infinity();
  LogitsProblem problem(LogitsShape{}, 14);
  problem.set_key(problem.table[0], 5, 10, infinity);  // both signs of weight see it: inf - inf over heads
  problem.set_key(problem.table[0], 6, 10, infinity);  // and inside one dot
  problem.set_key(problem.table[0], 6, 90, -infinity);
  problem.set_query(0, 3, 10, 1.0f);
  problem.set_query(0, 3, 90, 1.0f);
  expect_agrees(twin, problem);
}

inline void keeps_scores_beyond_what_fp16_holds(const LogitsTwin& twin) {
  LogitsProblem problem(LogitsShape{}, 15);
  for (int slot = 0; slot < 64; ++slot) {
    for (int d = 0; d < kIndexHeadDim; ++d) problem.set_key(problem.table[0], slot, d, static_cast<float>(1000 + slot * 37 + d));
  }
  const LogitsOutcome outcome = run_twin(twin, problem);
  expect_matches_reference(twin, problem, outcome);
  EXPECT_GT(*std::max_element(outcome.scores.begin(), outcome.scores.begin() + 64), 65504.0f);
}

// Denormal inputs and denormal results count as they are, or as zero in a variant that says so.
inline void treats_denormals_as_its_variant_says(const LogitsTwin& twin) {
  LogitsShape shape;
  shape.heads = 2;
  shape.rows = 1;
  shape.pages_per_row = 1;
  LogitsProblem problem(shape, 16);
  problem.zero_keys();
  problem.zero_queries();
  const int page = problem.table[0];
  problem.set_query(0, 0, 0, 0x1.0p100f);
  problem.set_query(0, 1, 1, 0x1.0p-70f);
  problem.weights = {1.0f, 0x1.0p100f};
  problem.set_key_bits(page, 0, 0, 0x0001);  // the smallest denormal bf16, 2^-133
  problem.set_key_bits(page, 1, 0, 0x007F);  // the largest
  problem.set_key_bits(page, 2, 0, 0x0080);  // the smallest normal
  problem.set_key(page, 3, 1, 0x1.0p-70f);   // a denormal product, 2^-140
  problem.set_key(page, 4, 1, 0x1.0p-56f);   // a normal product, 2^-126
  const LogitsOutcome outcome = run_twin(twin, problem);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  const bool flush = flushes_denormals(twin.variant);
  EXPECT_EQ(outcome.scores[0], flush ? 0.0f : 0x1.0p-33f);
  EXPECT_EQ(outcome.scores[1], flush ? 0.0f : 0x1.FCp-27f);
  EXPECT_EQ(outcome.scores[2], 0x1.0p-26f);
  EXPECT_EQ(outcome.scores[3], flush ? 0.0f : 0x1.0p-40f);
  EXPECT_EQ(outcome.scores[4], 0x1.0p-26f);
  expect_matches_reference(twin, problem, outcome);
}

inline void writes_nothing_past_the_length(const LogitsTwin& twin) {
  for (ElementFormat element : {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4}) {
    for (int length : {-3, 0, 1, 2, 3, 4, 5, 6, 7, 9, 13, 63, 64, 65, 66, 127, 128, 129, 191, 250, 255, 256}) {
      SCOPED_TRACE(absl::StrCat("element ", static_cast<int>(element), ", length ", length));
      LogitsShape shape;
      shape.element = element;
      shape.heads = 20;
      LogitsProblem problem(shape, 17);
      problem.visible = {length, 256};
      const LogitsOutcome clean = run_twin(twin, problem);
      for (int s = std::max(length, 0); s < 256; ++s) problem.poison_slot(problem.table[static_cast<size_t>(s / 64)], s % 64);
      const LogitsOutcome poisoned = run_twin(twin, problem);
      expect_matches_reference(twin, problem, poisoned);
      EXPECT_TRUE(poisoned.same_bits(clean)) << "bytes past the length reached a score";
      EXPECT_EQ(poisoned.report.nan_scores, 0u);
    }
  }
}

// Pages wholly past every query's length are not touched: here a touch is a crash.
inline void never_touches_a_page_past_the_length(const LogitsTwin& twin) {
  for (ElementFormat element : {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4}) {
    for (int length : {0, 1, 63, 64, 65, 128, 192, 255}) {
      SCOPED_TRACE(absl::StrCat("element ", static_cast<int>(element), ", length ", length));
      LogitsShape shape;
      shape.element = element;
      shape.rows = 1;
      shape.queries_per_row = 3;
      LogitsProblem problem(shape, 18);
      problem.visible = {length, std::max(length - 1, 0), length / 2};
      const LogitsOutcome clean = run_twin(twin, problem);
      for (int page = 0; page < shape.pool_pages; ++page) {
        const auto begin = problem.table.begin();
        const auto used = begin + div_ceil(length, shape.slots);
        if (std::find(begin, used, page) != used) continue;
        if (twin.reads_host_memory) {
          problem.pool.fence(page * problem.stride, problem.stride);
        } else {
          for (int slot = 0; slot < shape.slots; ++slot) problem.poison_slot(page, slot);
        }
      }
      for (int threads : {1, 3}) {
        const LogitsOutcome fenced = run_twin(twin, problem, threads);
        ASSERT_TRUE(fenced.status.ok()) << fenced.status;
        EXPECT_TRUE(fenced.same_bits(clean));
        EXPECT_EQ(fenced.report.status, 0u);
      }
    }
  }
}

inline void writes_absent_where_a_page_id_names_no_page(const LogitsTwin& twin) {
  LogitsShape shape;
  shape.queries_per_row = 2;
  LogitsProblem problem(shape, 19);
  problem.visible = {256, 100, 256, 130};
  const LogitsOutcome whole = run_twin(twin, problem);
  for (int32_t id : {kNoPage, INT_MIN, -2, shape.pool_pages, INT_MAX}) {
    SCOPED_TRACE(id);
    LogitsProblem damaged(problem);
    damaged.table[1] = id;  // row 0, entries 64..127
    const LogitsOutcome outcome = run_twin(twin, damaged);
    expect_matches_reference(twin, damaged, outcome);
    EXPECT_EQ(outcome.report.status, uint32_t{kStatusAbsentPage});
    EXPECT_EQ(outcome.report.absent_entries, 64u + 36u);
    for (int t = 0; t < 4; ++t) {
      for (int64_t s = 0; s < damaged.score_stride(); ++s) {
        const size_t at = static_cast<size_t>(t * damaged.score_stride() + s);
        const bool absent = t < 2 && s >= 64 && s < std::min(128, damaged.visible[static_cast<size_t>(t)]);
        EXPECT_EQ(bits_of(outcome.scores[at]), absent ? kAbsentScoreBits : bits_of(whole.scores[at])) << t << ", " << s;
      }
    }
  }
}

inline void writes_absent_past_the_page_table(const LogitsTwin& twin) {
  LogitsProblem problem(LogitsShape{}, 20);
  problem.entry_count = 400;  // the table has 256 entries a row
  problem.visible = {300, INT_MAX};
  const LogitsOutcome outcome = run_twin(twin, problem);
  expect_matches_reference(twin, problem, outcome);
  EXPECT_EQ(outcome.report.status, uint32_t{kStatusAbsentPage} | uint32_t{kStatusBadPageTable});
  EXPECT_EQ(outcome.report.absent_entries, 44u + 144u);
  problem.shape.rows = 1;  // the second query now names a row that the table lacks
  problem.query_row = {0, 1};
  problem.visible = {256, 10};
  problem.entry_count = 256;
  for (int32_t row : {1, -1, INT_MAX, INT_MIN}) {
    problem.query_row[1] = row;
    const LogitsOutcome lost = run_twin(twin, problem);
    expect_matches_reference(twin, problem, lost);
    EXPECT_EQ(lost.report.absent_entries, 10u);
    EXPECT_EQ(lost.report.status, uint32_t{kStatusAbsentPage} | uint32_t{kStatusBadPageTable});
  }
}

inline void scores_a_repeated_page_the_same_each_time(const LogitsTwin& twin) {
  LogitsProblem problem(LogitsShape{}, 21);
  for (int32_t& id : problem.table) id = problem.table[0];
  const LogitsOutcome outcome = run_twin(twin, problem);
  expect_matches_reference(twin, problem, outcome);
  for (size_t s = 64; s < 256; ++s) EXPECT_EQ(bits_of(outcome.scores[s]), bits_of(outcome.scores[s % 64])) << s;
}

inline void has_nothing_to_do_for_an_empty_batch(const LogitsTwin& twin) {
  LogitsProblem problem(LogitsShape{}, 22);
  std::vector<float> scores(2000, float_of_bits(kUntouched));
  OpReport report = {};
  IndexLogitsArgs no_queries = problem.args(scores.data(), &report);
  no_queries.query_count = 0;
  EXPECT_TRUE(twin.run(no_queries, 2).ok());
  IndexLogitsArgs no_entries = problem.args(scores.data(), &report);
  no_entries.entry_count = 0;
  EXPECT_TRUE(twin.run(no_entries, 2).ok());
  problem.visible = {0, 0};
  EXPECT_TRUE(twin.run(problem.args(scores.data(), &report), 2).ok());
  IndexLogitsArgs no_pool = problem.args(scores.data(), &report);
  no_pool.keys.base = nullptr;
  no_pool.keys.page_count = 0;
  EXPECT_TRUE(twin.run(no_pool, 2).ok());
  for (float score : scores) EXPECT_EQ(bits_of(score), kUntouched);
  EXPECT_EQ(report.status, 0u);
}

inline void adds_to_a_report_and_does_without_one(const LogitsTwin& twin) {
  LogitsProblem problem(LogitsShape{}, 23);
  problem.table[2] = kNoPage;
  problem.poison_slot(problem.table[0], 0);
  std::vector<float> scores(static_cast<size_t>(problem.queries() * problem.score_stride()));
  OpReport report = {};
  for (int round = 0; round < 3; ++round) ASSERT_TRUE(twin.run(problem.args(scores.data(), &report), 2).ok());
  EXPECT_EQ(report.absent_entries, 3u * 64u);
  EXPECT_EQ(report.nan_scores, 3u);
  EXPECT_EQ(report.status, uint32_t{kStatusAbsentPage} | uint32_t{kStatusNanScore});
  EXPECT_EQ(report.fallbacks, 0u);
  EXPECT_TRUE(twin.run(problem.args(scores.data(), nullptr), 2).ok());
}

inline void refuses_bad_arguments_before_it_writes(const LogitsTwin& twin) {
  LogitsProblem problem(LogitsShape{}, 24);
  std::vector<float> scores(static_cast<size_t>(problem.queries() * problem.score_stride()), float_of_bits(kUntouched));
  for (int which = 0; which < 5; ++which) {
    IndexLogitsArgs args = problem.args(scores.data(), nullptr);
    if (which == 0) args.heads = 129;
    if (which == 1) args.entry_begin = 1;
    if (which == 2) args.keys.element = ElementFormat::kFp8V32;
    if (which == 3) args.keys.page_stride -= 256 * 64;
    if (which == 4) args.score_stride = args.entry_count - 1;
    EXPECT_EQ(twin.run(args, 1).code(), absl::StatusCode::kInvalidArgument) << which;
  }
  for (float score : scores) EXPECT_EQ(bits_of(score), kUntouched);
}

// Decode: one to eight query tokens a sequence, each with its own length.
inline void scores_several_query_tokens_a_sequence(const LogitsTwin& twin) {
  for (int tokens = 1; tokens <= 8; ++tokens) {
    for (int heads : {16, 80}) {  // at most 64 heads four queries are packed together, beyond it two
      SCOPED_TRACE(absl::StrCat(tokens, " tokens, ", heads, " heads"));
      LogitsShape shape;
      shape.rows = 2;
      shape.heads = heads;
      shape.queries_per_row = tokens;
      LogitsProblem problem(shape, 25);
      for (int t = 0; t < problem.queries(); ++t) problem.visible[static_cast<size_t>(t)] = 120 + 64 * (t / tokens) + (t % tokens) / 4;
      expect_agrees(twin, problem, 2);
    }
  }
}

// Prefill: ragged chunks of several sequences in one batch, lengths growing by causality.
inline void scores_causal_ragged_prefill(const LogitsTwin& twin) {
  LogitsShape shape;
  shape.rows = 3;
  shape.queries_per_row = 8;  // 24 queries
  shape.heads = 32;
  LogitsProblem problem(shape, 26);
  problem.query_row.clear();
  problem.visible.clear();
  for (int i = 0; i < 24; ++i) {  // 5 queries of row 2, 18 of row 0, 1 of row 1
    const int row = i < 5 ? 2 : i < 23 ? 0 : 1;
    problem.query_row.push_back(row);
    problem.visible.push_back(row == 2 ? 200 + i : row == 0 ? (i - 5) * 9 : 256);
  }
  problem.shape.queries_per_row = 1;
  for (int threads : {1, 2, kThreadsMax}) expect_agrees(twin, problem, threads);
}

inline void repeats_bit_for_bit_on_any_number_of_threads(const LogitsTwin& twin) {
  LogitsShape shape;
  shape.rows = 3;
  shape.queries_per_row = 5;
  shape.slots = 64;
  shape.pool_pages = 70;
  shape.pages_per_row = 40;  // 2,560 entries: more than one piece a query where threads share the work
  LogitsProblem problem(shape, 27);
  problem.poison_slot(problem.table[3], 11);
  problem.table[50] = kNoPage;
  for (int t = 0; t < problem.queries(); ++t) problem.visible[static_cast<size_t>(t)] = 2560 - 131 * t;
  const LogitsOutcome first = run_twin(twin, problem);
  ASSERT_TRUE(first.status.ok()) << first.status;
  const int repeats = twin.variant == ScoreVariant::kReference ? 2 : 20;  // the reference is slow and has one thread
  for (int i = 0; i < repeats; ++i) {
    const int threads = 1 + i % kThreadsMax;
    const LogitsOutcome again = run_twin(twin, problem, threads);
    EXPECT_TRUE(again.same_bits(first)) << "repeat " << i << " on " << threads << " threads";
    EXPECT_EQ(again.report.nan_scores, first.report.nan_scores);
    EXPECT_EQ(again.report.absent_entries, first.report.absent_entries);
  }
}

// A query's scores do not depend on its place in the batch, on its neighbours, nor on where its pages lie.
inline void gives_a_query_the_same_bits_anywhere_in_any_batch(const LogitsTwin& twin) {
  for (ElementFormat element : {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4}) {
    SCOPED_TRACE(static_cast<int>(element));
    LogitsShape shape;
    shape.element = element;
    shape.rows = 1;
    shape.pages_per_row = 3;
    LogitsProblem alone(shape, 28);
    alone.visible = {170};
    const LogitsOutcome due = run_twin(twin, alone);
    ASSERT_TRUE(due.status.ok()) << due.status;

    LogitsShape crowded = shape;
    crowded.rows = 7;
    for (int place = 0; place < crowded.rows; ++place) {
      LogitsProblem batch(crowded, static_cast<uint64_t>(100 + place));
      // The same three pages in other places of another pool.
      const int32_t homes[3] = {(place + 5) % 12, (place * 3 + 1) % 12 == (place + 5) % 12 ? (place + 6) % 12 : (place * 3 + 1) % 12, 0};
      int32_t ids[3] = {homes[0], homes[1], 0};
      while (ids[2] == ids[0] || ids[2] == ids[1]) ++ids[2];
      for (int i = 0; i < 3; ++i) {
        std::memcpy(batch.pool.address() + ids[i] * batch.stride, alone.pool.address() + alone.table[static_cast<size_t>(i)] * alone.stride,
                    static_cast<size_t>(alone.stride));
        batch.table[static_cast<size_t>(place * 3 + i)] = ids[i];
      }
      std::copy(alone.q.begin(), alone.q.end(), batch.q.begin() + static_cast<int64_t>(alone.q.size()) * place);
      std::copy(alone.weights.begin(), alone.weights.end(), batch.weights.begin() + shape.heads * place);
      for (int t = 0; t < crowded.rows; ++t) batch.visible[static_cast<size_t>(t)] = t == place ? 170 : 192 - 31 * t;
      const LogitsOutcome got = run_twin(twin, batch, 1 + place % 3);
      ASSERT_TRUE(got.status.ok()) << got.status;
      for (int64_t s = 0; s < 170; ++s) {
        EXPECT_EQ(bits_of(got.scores[static_cast<size_t>(place * batch.score_stride() + s)]), bits_of(due.scores[static_cast<size_t>(s)]))
            << "place " << place << ", entry " << s;
      }
    }
  }
}

// A shorter length, one more query token beside it, or a prefill batch: the shared entries keep their bits.
inline void gives_an_entry_the_same_bits_at_any_length(const LogitsTwin& twin) {
  LogitsShape shape;
  shape.rows = 1;
  shape.queries_per_row = 8;
  LogitsProblem problem(shape, 29);
  const int64_t query_bytes = static_cast<int64_t>(problem.q.size()) / 8;
  for (int t = 1; t < 8; ++t) {
    std::copy_n(problem.q.begin(), query_bytes, problem.q.begin() + query_bytes * t);
    std::copy_n(problem.weights.begin(), shape.heads, problem.weights.begin() + shape.heads * t);
  }
  problem.visible = {256, 255, 254, 253, 66, 62, 3, 1};
  const LogitsOutcome outcome = run_twin(twin, problem);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  for (int t = 1; t < 8; ++t) {
    for (int s = 0; s < problem.visible[static_cast<size_t>(t)]; ++s) {
      EXPECT_EQ(bits_of(outcome.scores[static_cast<size_t>(t * problem.score_stride() + s)]),
                bits_of(outcome.scores[static_cast<size_t>(s)]))
          << "query " << t << ", entry " << s;
    }
  }
}

inline void gives_the_same_bits_in_chunks(const LogitsTwin& twin) {
  LogitsShape shape;
  shape.slots = 16;
  shape.pool_pages = 30;
  shape.pages_per_row = 13;
  shape.queries_per_row = 2;
  LogitsProblem problem(shape, 30);
  problem.visible = {208, 207, 55, 48};
  problem.table[4] = kNoPage;
  const LogitsOutcome whole = run_twin(twin, problem);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  for (int chunk_pages : {1, 2, 5, 12}) {
    OpReport sum = {};
    for (int64_t begin = 0; begin < 208; begin += chunk_pages * 16) {
      LogitsProblem chunk(problem);
      chunk.entry_begin = begin;
      chunk.entry_count = std::min<int64_t>(chunk_pages * 16, 208 - begin);
      const LogitsOutcome part = run_twin(twin, chunk, 2);
      ASSERT_TRUE(part.status.ok()) << part.status;
      sum.absent_entries += part.report.absent_entries;
      for (int t = 0; t < 4; ++t) {
        for (int64_t s = 0; s < chunk.score_stride(); ++s) {
          const uint32_t got = bits_of(part.scores[static_cast<size_t>(t * chunk.score_stride() + s)]);
          const uint32_t due =
              s < chunk.entry_count ? bits_of(whole.scores[static_cast<size_t>(t * problem.score_stride() + begin + s)]) : kUntouched;
          EXPECT_EQ(got, due) << "chunk at " << begin << ", query " << t << ", column " << s;
        }
      }
    }
    EXPECT_EQ(sum.absent_entries, whole.report.absent_entries);
  }
}

// Page ids whose byte offsets pass 4 GiB and 64 GiB.
inline void reaches_pages_beyond_64_gib(const LogitsTwin& twin) {
  if (!twin.reads_host_memory) GTEST_SKIP() << twin.name << " copies its pool; 68 GiB of mostly nothing are not copied";
  for (ElementFormat element : {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4}) {
    SCOPED_TRACE(static_cast<int>(element));
    LogitsShape shape;
    shape.element = element;
    shape.rows = 1;
    shape.pages_per_row = 6;
    shape.pool_pages = 6;
    LogitsProblem near(shape, 31);
    std::iota(near.table.begin(), near.table.end(), 0);
    const LogitsOutcome due = run_twin(twin, near);
    ASSERT_TRUE(due.status.ok()) << due.status;

    const int64_t stride = 1165824;  // a DeepSeek-V4-Flash page
    const int64_t pages = 68 * kGiB / stride;
    const Mapping far(pages * stride);
    ASSERT_EQ(far.error(), 0) << "68 GiB of address space could not be reserved: " << std::strerror(far.error());
    const std::vector<int32_t> ids = {0,
                                      static_cast<int32_t>(2 * kGiB / stride),
                                      static_cast<int32_t>(4 * kGiB / stride),
                                      static_cast<int32_t>(4 * kGiB / stride + 1),
                                      static_cast<int32_t>(64 * kGiB / stride + 1),
                                      static_cast<int32_t>(pages - 1)};
    const int64_t part_bytes = layer_page_bytes(element, kIndexHeadDim, shape.slots);
    for (size_t i = 0; i < ids.size(); ++i) {
      std::memcpy(far.address() + ids[i] * stride, near.pool.address() + static_cast<int64_t>(i) * near.stride,
                  static_cast<size_t>(part_bytes));
    }
    LogitsOutcome got;
    got.scores.assign(due.scores.size(), float_of_bits(kUntouched));
    IndexLogitsArgs args = near.args(got.scores.data(), &got.report);
    args.keys.base = far.address();
    args.keys.page_stride = stride;
    args.keys.page_count = pages;
    args.pages.pages = ids.data();
    got.status = twin.run(args, 2);
    ASSERT_TRUE(got.status.ok()) << got.status;
    EXPECT_TRUE(got.same_bits(due));
    EXPECT_EQ(got.report.status, 0u);
  }
}

inline void agrees_with_the_reference_on_random_shapes(const LogitsTwin& twin) {
  const int64_t rounds = count_of("index_logits_random_shapes");
  for (int64_t round = 0; round < rounds; ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    Rng rng(0x10617 + static_cast<uint64_t>(round));
    LogitsShape shape;
    shape.element = static_cast<ElementFormat>(rng.below(3));
    shape.q_element = static_cast<QueryElement>(rng.below(3));
    shape.heads = static_cast<int>(rng.chance(0.5) ? rng.between(1, 128) : int64_t{8} << rng.below(4));
    shape.slots = static_cast<int>(rng.chance(0.5) ? 64 : rng.between(1, 100));
    shape.rows = static_cast<int>(rng.between(1, 4));
    shape.pages_per_row = static_cast<int>(rng.between(1, std::max<int64_t>(1, 200 / shape.slots)));
    shape.pool_pages = static_cast<int>(rng.between(1, 12));
    shape.queries_per_row = static_cast<int>(rng.between(1, 4));
    LogitsProblem problem(shape, rng.next());
    const int entries = shape.pages_per_row * shape.slots;
    for (int32_t& length : problem.visible) length = static_cast<int32_t>(rng.between(-1, entries + 1));
    for (int32_t& id : problem.table) {
      if (rng.chance(0.1)) id = static_cast<int32_t>(rng.between(-2, shape.pool_pages + 1));
    }
    if (rng.chance(0.4)) {
      for (int t = 0; t < problem.queries(); ++t)
        problem.query_row.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(shape.rows))));
    }
    if (rng.chance(0.2)) {
      problem.poison_slot(static_cast<int>(rng.below(static_cast<uint64_t>(shape.pool_pages))),
                          static_cast<int>(rng.below(static_cast<uint64_t>(shape.slots))));
    }
    if (rng.chance(0.3)) {
      problem.entry_begin = rng.between(0, shape.pages_per_row) * shape.slots;
      problem.entry_count = rng.between(0, entries - problem.entry_begin + 10);
    }
    expect_agrees(twin, problem, static_cast<int>(rng.between(1, 3)));
    if (::testing::Test::HasFailure()) return;  // one shape's report is enough
  }
}

inline std::vector<LogitsCase> logits_battery() {
#define NEEDLE_LOGITS_CASE(name) \
  LogitsCase { #name, name }
  return {
      NEEDLE_LOGITS_CASE(gives_the_worked_example),
      NEEDLE_LOGITS_CASE(agrees_for_every_pair_of_key_and_query_formats),
      NEEDLE_LOGITS_CASE(agrees_for_any_number_of_heads),
      NEEDLE_LOGITS_CASE(agrees_for_any_page_size),
      NEEDLE_LOGITS_CASE(converts_every_fp8_code_exactly),
      NEEDLE_LOGITS_CASE(converts_every_fp4_code_and_scale_exactly),
      NEEDLE_LOGITS_CASE(takes_weights_of_any_sign),
      NEEDLE_LOGITS_CASE(passes_a_nan_key_on_alone_under_weights_of_either_sign),
      NEEDLE_LOGITS_CASE(passes_one_nan_element_on_whatever_its_payload),
      NEEDLE_LOGITS_CASE(counts_every_score_when_all_keys_are_nan),
      NEEDLE_LOGITS_CASE(passes_nan_and_infinity_of_queries_and_weights_on),
      NEEDLE_LOGITS_CASE(gives_infinite_keys_infinite_scores),
      NEEDLE_LOGITS_CASE(turns_infinity_minus_infinity_into_nan),
      NEEDLE_LOGITS_CASE(keeps_scores_beyond_what_fp16_holds),
      NEEDLE_LOGITS_CASE(treats_denormals_as_its_variant_says),
      NEEDLE_LOGITS_CASE(writes_nothing_past_the_length),
      NEEDLE_LOGITS_CASE(never_touches_a_page_past_the_length),
      NEEDLE_LOGITS_CASE(writes_absent_where_a_page_id_names_no_page),
      NEEDLE_LOGITS_CASE(writes_absent_past_the_page_table),
      NEEDLE_LOGITS_CASE(scores_a_repeated_page_the_same_each_time),
      NEEDLE_LOGITS_CASE(has_nothing_to_do_for_an_empty_batch),
      NEEDLE_LOGITS_CASE(adds_to_a_report_and_does_without_one),
      NEEDLE_LOGITS_CASE(refuses_bad_arguments_before_it_writes),
      NEEDLE_LOGITS_CASE(scores_several_query_tokens_a_sequence),
      NEEDLE_LOGITS_CASE(scores_causal_ragged_prefill),
      NEEDLE_LOGITS_CASE(repeats_bit_for_bit_on_any_number_of_threads),
      NEEDLE_LOGITS_CASE(gives_a_query_the_same_bits_anywhere_in_any_batch),
      NEEDLE_LOGITS_CASE(gives_an_entry_the_same_bits_at_any_length),
      NEEDLE_LOGITS_CASE(gives_the_same_bits_in_chunks),
      NEEDLE_LOGITS_CASE(reaches_pages_beyond_64_gib),
      NEEDLE_LOGITS_CASE(agrees_with_the_reference_on_random_shapes),
  };
#undef NEEDLE_LOGITS_CASE
}

}  // namespace needle::testing
