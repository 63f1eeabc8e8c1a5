// The cases that every twin of select_topk, merge_topk and list_slots must pass: the reference, each CPU instruction
// set, CUDA. A twin takes the arguments with host pointers and fills host outputs.
//
// What must stay true:
//  1. Expectations come from an oracle of this file (a stable sort by plain comparisons), never from a twin.
//  2. Every comparison is bit for bit: members, order, scores, padding, counts and report. Only `fallbacks` is free.
//  3. Output buffers begin poisoned, so what a twin forgets to write is seen.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/rng.h"
#include "kernels/select_topk.h"
#include "tests/counts.h"

namespace needle::testing {

struct SelectTwin {
  std::string name;
  std::string unavailable;  // why it cannot run here; empty where it can
  std::function<absl::Status(const SelectTopkArgs&)> select;
  std::function<absl::Status(const MergeTopkArgs&)> merge;
  std::function<absl::Status(const ListSlotsArgs&)> list;
};

inline uint32_t score_bits(float score) {
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  return bits;
}

inline float score_from_bits(uint32_t bits) {
  float score;
  std::memcpy(&score, &bits, sizeof(score));
  return score;
}

inline const float kInfinity = std::numeric_limits<float>::infinity();
inline const float kNan = score_from_bits(kNanScoreBits);
inline const float kAbsent = score_from_bits(kAbsentScoreBits);
inline constexpr int32_t kPoison = 0x5A5A5A5A;

// ---------------------------------------------------------------------------------------------------------------
// The oracle.

struct Scored {
  int64_t position = 0;
  float score = 0;
  int32_t slot = kNoEntry;
};

// Plain comparisons in double: exact for every float, denormals included.
inline bool oracle_before(const Scored& a, const Scored& b) {
  const bool a_nan = std::isnan(a.score);
  const bool b_nan = std::isnan(b.score);
  if (a_nan != b_nan) return b_nan;
  const double left = a.score;
  const double right = b.score;
  if (!a_nan && left != right) return left > right;
  return a.position < b.position;
}

inline std::vector<Scored> oracle_best(std::vector<Scored> entries, int k, TopkOrder order) {
  entries.erase(std::remove_if(entries.begin(), entries.end(), [](const Scored& e) { return score_bits(e.score) == kAbsentScoreBits; }),
                entries.end());
  std::stable_sort(entries.begin(), entries.end(), oracle_before);
  if (entries.size() > static_cast<size_t>(k)) entries.resize(static_cast<size_t>(k));
  if (order == TopkOrder::kByPosition) {
    std::stable_sort(entries.begin(), entries.end(), [](const Scored& a, const Scored& b) { return a.position < b.position; });
  }
  return entries;
}

// ---------------------------------------------------------------------------------------------------------------
// A selection problem, its run and its verdict.

struct Selection {
  std::vector<int32_t> positions;
  std::vector<int32_t> slots;
  std::vector<float> scores;
  std::vector<int32_t> counts;
  OpReport report{};

  // Bit for bit, without `fallbacks`.
  bool same_bits(const Selection& other) const {
    return positions == other.positions && slots == other.slots && counts == other.counts && scores.size() == other.scores.size() &&
           (scores.empty() || std::memcmp(scores.data(), other.scores.data(), scores.size() * sizeof(float)) == 0) &&
           report.status == other.report.status && report.nan_scores == other.report.nan_scores &&
           report.absent_entries == other.report.absent_entries;
  }
};

struct SelectProblem {
  std::vector<std::vector<float>> rows;  // what the row holds inside its length
  std::vector<int32_t> lengths;          // empty: each row's size
  int k = 1;
  TopkOrder order = TopkOrder::kByPosition;
  int64_t out_stride = 0;  // 0: k rounded up to a multiple of 64
  int64_t slack = 3;       // poisoned scores after the longest row; below 0 gives a stride that must be refused

  // A page table where table_rows > 0.
  int32_t table_rows = 0;
  int32_t pages_per_row = 0;
  std::vector<int32_t> pages;
  std::vector<int32_t> entry_base;
  std::vector<int32_t> row_of;
  int32_t rows_per_table_row = 1;
  int32_t slots_per_page = 0;
  int64_t page_count = 0;
  bool want_slots = false;

  int64_t longest() const {
    int64_t most = 0;
    for (const std::vector<float>& row : rows) most = std::max<int64_t>(most, static_cast<int64_t>(row.size()));
    return most;
  }
  int64_t stride_out() const { return out_stride > 0 ? out_stride : (k + 63) / 64 * 64; }
};

inline SelectProblem problem_of(std::vector<float> row, int k, TopkOrder order = TopkOrder::kByPosition) {
  SelectProblem problem;
  problem.rows.push_back(std::move(row));
  problem.k = k;
  problem.order = order;
  return problem;
}

// Runs the twin. Past each row's values lie the largest scores there are: a twin that reads on selects them.
inline absl::StatusOr<Selection> run_selection(const SelectTwin& twin, const SelectProblem& problem) {
  const int64_t rows = static_cast<int64_t>(problem.rows.size());
  const int64_t stride = problem.longest() + problem.slack;
  std::vector<float> scores(static_cast<size_t>(rows * std::max(stride, problem.longest())), kInfinity);
  std::vector<int32_t> lengths = problem.lengths;
  for (int64_t r = 0; r < rows; ++r) {
    const std::vector<float>& row = problem.rows[static_cast<size_t>(r)];
    std::copy(row.begin(), row.end(), scores.begin() + r * stride);
    if (problem.lengths.empty()) lengths.push_back(static_cast<int32_t>(row.size()));
  }

  Selection out;
  const size_t cells = static_cast<size_t>(rows * problem.stride_out());
  out.positions.assign(cells, kPoison);
  out.scores.assign(cells, score_from_bits(0x5A5A5A5A));
  if (problem.want_slots) out.slots.assign(cells, kPoison);
  out.counts.assign(static_cast<size_t>(rows), kPoison);

  SelectTopkArgs args;
  args.scores = scores.data();
  args.score_stride = stride;
  args.lengths = lengths.data();
  args.rows = static_cast<int32_t>(rows);
  args.length_max = static_cast<int32_t>(problem.longest());
  args.k = problem.k;
  args.order = problem.order;
  if (problem.table_rows > 0) {
    args.pages.pages = problem.pages.empty() ? nullptr : problem.pages.data();
    args.pages.entry_base = problem.entry_base.empty() ? nullptr : problem.entry_base.data();
    args.pages.rows = problem.table_rows;
    args.pages.pages_per_row = problem.pages_per_row;
    args.pages.row_stride = problem.pages_per_row;
  }
  args.row_of = problem.row_of.empty() ? nullptr : problem.row_of.data();
  args.rows_per_table_row = problem.rows_per_table_row;
  args.slots_per_page = problem.slots_per_page;
  args.page_count = problem.page_count;
  args.positions = out.positions.data();
  args.slots = problem.want_slots ? out.slots.data() : nullptr;
  args.out_scores = out.scores.data();
  args.counts = out.counts.data();
  args.out_stride = problem.stride_out();
  args.report = &out.report;
  const absl::Status status = twin.select(args);
  if (!status.ok()) return status;
  return out;
}

inline Selection expected_selection(const SelectProblem& problem) {
  Selection out;
  const int64_t stride = problem.stride_out();
  for (size_t r = 0; r < problem.rows.size(); ++r) {
    int64_t length = problem.lengths.empty() ? static_cast<int64_t>(problem.rows[r].size()) : problem.lengths[r];
    length = std::max<int64_t>(length, 0);
    int64_t limit = problem.longest();
    int64_t base = 0;
    const int32_t* pages = nullptr;
    if (problem.table_rows > 0) {
      const int64_t table_row = problem.row_of.empty() ? static_cast<int64_t>(r) / problem.rows_per_table_row : problem.row_of[r];
      if (table_row < 0 || table_row >= problem.table_rows) {
        limit = 0;
        out.report.status |= kStatusBadPageTable;
      } else {
        if (!problem.entry_base.empty()) base = problem.entry_base[static_cast<size_t>(table_row)];
        if (!problem.pages.empty()) {
          pages = problem.pages.data() + table_row * problem.pages_per_row;
          if (problem.slots_per_page > 0) {
            limit = std::min<int64_t>(limit, int64_t{problem.pages_per_row} * problem.slots_per_page);
          }
        }
      }
    }
    if (length > limit) {
      length = limit;
      out.report.status |= kStatusBadPageTable;
    }

    std::vector<Scored> entries;
    for (int64_t e = 0; e < length; ++e) {
      const float score = problem.rows[r][static_cast<size_t>(e)];
      if (score_bits(score) == kAbsentScoreBits) {
        ++out.report.absent_entries;
        out.report.status |= kStatusAbsentPage;
      } else if (std::isnan(score)) {
        ++out.report.nan_scores;
        out.report.status |= kStatusNanScore;
      }
      entries.push_back({base + e, score, kNoEntry});
      if (problem.want_slots) {
        const int32_t page = pages[e / problem.slots_per_page];
        if (page >= 0 && page < problem.page_count) {
          entries.back().slot = page * problem.slots_per_page + static_cast<int32_t>(e % problem.slots_per_page);
        }
      }
    }
    const std::vector<Scored> best = oracle_best(std::move(entries), problem.k, problem.order);
    out.counts.push_back(static_cast<int32_t>(best.size()));
    for (int64_t i = 0; i < stride; ++i) {
      const bool valid = i < static_cast<int64_t>(best.size());
      const Scored member = valid ? best[static_cast<size_t>(i)] : Scored{kNoEntry, -kInfinity, kNoEntry};
      out.positions.push_back(static_cast<int32_t>(member.position));
      float score = member.score;
      if (std::isnan(score)) score = kNan;
      out.scores.push_back(score_bits(score) == 0x80000000u ? 0.0f : score);
      if (problem.want_slots) {
        out.slots.push_back(member.slot);
        if (valid && member.slot == kNoEntry) {
          ++out.report.absent_entries;
          out.report.status |= kStatusAbsentPage;
        }
      }
    }
  }
  return out;
}

inline void expect_same_selection(const Selection& got, const Selection& want) {
  ASSERT_EQ(got.counts, want.counts);
  ASSERT_EQ(got.positions.size(), want.positions.size());
  for (size_t i = 0; i < want.positions.size(); ++i) {
    ASSERT_EQ(got.positions[i], want.positions[i]) << "cell " << i;
    ASSERT_EQ(score_bits(got.scores[i]), score_bits(want.scores[i])) << "score of cell " << i;
  }
  ASSERT_EQ(got.slots, want.slots);
  EXPECT_EQ(got.report.status, want.report.status);
  EXPECT_EQ(got.report.nan_scores, want.report.nan_scores);
  EXPECT_EQ(got.report.absent_entries, want.report.absent_entries);
}

inline void expect_exact(const SelectTwin& twin, const SelectProblem& problem) {
  const absl::StatusOr<Selection> got = run_selection(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  expect_same_selection(*got, expected_selection(problem));
}

// ---------------------------------------------------------------------------------------------------------------
// Rows that have broken top-k kernels.

struct NamedRow {
  const char* name;
  std::function<std::vector<float>(int64_t length, Rng& rng)> make;
};

inline float gaussian(Rng& rng) {
  double sum = 0;
  for (int i = 0; i < 12; ++i) sum += rng.unit();
  return static_cast<float>(sum - 6.0);
}

inline std::vector<float> row_by(int64_t length, const std::function<float(int64_t)>& value) {
  std::vector<float> row(static_cast<size_t>(length));
  for (int64_t i = 0; i < length; ++i) row[static_cast<size_t>(i)] = value(i);
  return row;
}

inline const std::vector<NamedRow>& adversarial_rows() {
  static const std::vector<NamedRow> rows = {
      {"ordinary", [](int64_t n, Rng& rng) { return row_by(n, [&](int64_t) { return gaussian(rng); }); }},
      {"all_equal", [](int64_t n, Rng&) { return row_by(n, [](int64_t) { return 0.75f; }); }},
      {"all_zero_of_both_signs", [](int64_t n, Rng& rng) { return row_by(n, [&](int64_t) { return rng.chance(0.5) ? 0.0f : -0.0f; }); }},
      {"two_values", [](int64_t n, Rng& rng) { return row_by(n, [&](int64_t) { return rng.chance(0.5) ? 1.0f : 2.0f; }); }},
      {"zeros_around_few_numbers",
       [](int64_t n, Rng& rng) {
         return row_by(n, [&](int64_t) {
           if (rng.chance(0.02)) return gaussian(rng);
           return rng.chance(0.5) ? 0.0f : -0.0f;
         });
       }},
      {"inside_one_half_precision_bin",
       [](int64_t n, Rng& rng) { return row_by(n, [&](int64_t) { return 1.1f + 0.01f * gaussian(rng); }); }},
      {"one_unit_in_the_last_place_apart",
       [](int64_t n, Rng& rng) {
         return row_by(n, [&](int64_t) { return score_from_bits(0x3F800000u + static_cast<uint32_t>(rng.below(16))); });
       }},
      {"past_half_precision",
       [](int64_t n, Rng& rng) { return row_by(n, [&](int64_t) { return 70000.0f * (1.0f + std::fabs(gaussian(rng))); }); }},
      {"denormals",
       [](int64_t n, Rng& rng) {
         return row_by(n, [&](int64_t) {
           const uint32_t sign = rng.chance(0.5) ? 0x80000000u : 0u;
           return score_from_bits(sign | static_cast<uint32_t>(rng.below(0x00800000)));
         });
       }},
      {"infinities",
       [](int64_t n, Rng& rng) {
         return row_by(n, [&](int64_t) {
           if (rng.chance(0.3)) return rng.chance(0.5) ? kInfinity : -kInfinity;
           return gaussian(rng);
         });
       }},
      {"all_minus_infinity", [](int64_t n, Rng&) { return row_by(n, [](int64_t) { return -kInfinity; }); }},
      {"one_nan",
       [](int64_t n, Rng& rng) {
         std::vector<float> row = row_by(n, [&](int64_t) { return gaussian(rng); });
         if (n > 0) row[static_cast<size_t>(n / 2)] = kNan;
         return row;
       }},
      {"all_nan", [](int64_t n, Rng&) { return row_by(n, [](int64_t) { return kNan; }); }},
      {"nan_of_every_kind",
       [](int64_t n, Rng& rng) {
         return row_by(n, [&](int64_t) {
           if (rng.chance(0.5)) return gaussian(rng);
           const uint32_t sign = rng.chance(0.5) ? 0x80000000u : 0u;
           return score_from_bits(sign | 0x7F800000u | static_cast<uint32_t>(rng.between(1, 0x7FFFFF)));
         });
       }},
      {"few_numbers_among_nan",
       [](int64_t n, Rng& rng) { return row_by(n, [&](int64_t i) { return i % 97 == 5 ? gaussian(rng) : kNan; }); }},
      {"nan_and_minus_infinity",
       [](int64_t n, Rng& rng) { return row_by(n, [&](int64_t) { return rng.chance(0.5) ? kNan : -kInfinity; }); }},
      {"absent_stripes",
       [](int64_t n, Rng& rng) { return row_by(n, [&](int64_t i) { return i / 64 % 3 == 1 ? kAbsent : gaussian(rng); }); }},
      {"all_absent", [](int64_t n, Rng&) { return row_by(n, [](int64_t) { return kAbsent; }); }},
      {"few_present", [](int64_t n, Rng& rng) { return row_by(n, [&](int64_t i) { return i % 61 == 60 ? gaussian(rng) : kAbsent; }); }},
      {"ascending", [](int64_t n, Rng&) { return row_by(n, [](int64_t i) { return static_cast<float>(i) - 100.0f; }); }},
      {"descending", [](int64_t n, Rng&) { return row_by(n, [](int64_t i) { return 100.0f - static_cast<float>(i); }); }},
      {"sawtooth", [](int64_t n, Rng&) { return row_by(n, [](int64_t i) { return static_cast<float>(i % 64); }); }},
      {"sawtooth_long", [](int64_t n, Rng&) { return row_by(n, [](int64_t i) { return static_cast<float>(i % 1000) * 0.001f; }); }},
      {"best_at_the_end",
       [](int64_t n, Rng& rng) { return row_by(n, [&](int64_t i) { return i * 8 >= n * 7 ? static_cast<float>(i) : gaussian(rng); }); }},
      {"best_in_one_run",
       [](int64_t n, Rng& rng) {
         return row_by(n, [&](int64_t i) { return i >= n / 3 && i < n / 3 + 700 ? 50.0f + gaussian(rng) : gaussian(rng); });
       }},
      {"one_giant_among_equals", [](int64_t n, Rng&) { return row_by(n, [n](int64_t i) { return i == n - 1 ? 3e38f : -1.0f; }); }},
      {"any_bits",
       [](int64_t n, Rng& rng) { return row_by(n, [&](int64_t) { return score_from_bits(static_cast<uint32_t>(rng.next())); }); }},
  };
  return rows;
}

// ---------------------------------------------------------------------------------------------------------------
// The cases.

inline void equal_scores_go_to_the_lower_position(const SelectTwin& twin) {
  SelectProblem problem = problem_of({1, 3, 3, 2, 3, 2, 3}, 3);
  const absl::StatusOr<Selection> got = run_selection(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(std::vector<int32_t>(got->positions.begin(), got->positions.begin() + 4), (std::vector<int32_t>{1, 2, 4, -1}));
  EXPECT_EQ(got->counts[0], 3);
}

inline void negative_zero_equals_zero(const SelectTwin& twin) {
  SelectProblem problem = problem_of({-1, -0.0f, 0.0f, -0.0f, 0.0f, -1}, 3, TopkOrder::kByRank);
  const absl::StatusOr<Selection> got = run_selection(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(std::vector<int32_t>(got->positions.begin(), got->positions.begin() + 3), (std::vector<int32_t>{1, 2, 3}));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(score_bits(got->scores[static_cast<size_t>(i)]), 0u);
}

inline void nan_ranks_below_minus_infinity_and_is_counted(const SelectTwin& twin) {
  SelectProblem problem = problem_of({kNan, -kInfinity, score_from_bits(0xFFFFFFFFu), 5, -kInfinity}, 4, TopkOrder::kByRank);
  const absl::StatusOr<Selection> got = run_selection(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(std::vector<int32_t>(got->positions.begin(), got->positions.begin() + 5), (std::vector<int32_t>{3, 1, 4, 0, -1}));
  EXPECT_EQ(score_bits(got->scores[3]), kNanScoreBits);
  EXPECT_EQ(got->report.nan_scores, 2u);
  EXPECT_EQ(got->report.status, kStatusNanScore);
}

inline void absent_entries_never_enter_and_are_counted(const SelectTwin& twin) {
  SelectProblem problem = problem_of({kAbsent, 1, kAbsent, kNan, kAbsent}, 4);
  const absl::StatusOr<Selection> got = run_selection(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->counts[0], 2);
  EXPECT_EQ(std::vector<int32_t>(got->positions.begin(), got->positions.begin() + 3), (std::vector<int32_t>{1, 3, -1}));
  EXPECT_EQ(got->report.absent_entries, 3u);
  EXPECT_EQ(got->report.nan_scores, 1u);
  EXPECT_EQ(got->report.status, kStatusAbsentPage | kStatusNanScore);
}

inline void selects_nothing_past_the_length(const SelectTwin& twin) {
  SelectProblem problem = problem_of({1, 2, 3, 100, 200}, 4);
  problem.lengths = {3};
  const absl::StatusOr<Selection> got = run_selection(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->counts[0], 3);
  EXPECT_EQ(std::vector<int32_t>(got->positions.begin(), got->positions.begin() + 4), (std::vector<int32_t>{0, 1, 2, -1}));
  EXPECT_EQ(got->report.status, 0u);
}

inline void a_negative_length_is_an_empty_row(const SelectTwin& twin) {
  SelectProblem problem = problem_of({1, 2, 3}, 2);
  problem.rows.push_back({4, 5, 6});
  problem.lengths = {-7, std::numeric_limits<int32_t>::min()};
  expect_exact(twin, problem);
}

inline void a_length_past_the_capacity_is_cut_and_reported(const SelectTwin& twin) {
  SelectProblem problem = problem_of({1, 2, 3}, 5);
  problem.lengths = {std::numeric_limits<int32_t>::max()};
  const absl::StatusOr<Selection> got = run_selection(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->counts[0], 3);
  EXPECT_EQ(got->report.status, kStatusBadPageTable);
}

inline void an_empty_batch_is_an_answer(const SelectTwin& twin) {
  SelectProblem problem;
  problem.k = 512;
  const absl::StatusOr<Selection> got = run_selection(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->report.status, 0u);
}

inline void every_adversarial_row_at_every_edge_length(const SelectTwin& twin) {
  Rng rng(20260101);
  for (const NamedRow& row : adversarial_rows()) {
    for (const int k : {1, 2, 31, 512, 1024}) {
      SelectProblem problem;
      problem.k = k;
      for (const int64_t length : {0, 1, 3, k - 1, k, k + 1, 2 * k + 13, 63, 64, 65, 1023, 4097, 9001}) {
        problem.rows.push_back(row.make(length, rng));
      }
      for (const TopkOrder order : {TopkOrder::kByPosition, TopkOrder::kByRank}) {
        SCOPED_TRACE(::testing::Message() << row.name << " k " << k << " order " << static_cast<int>(order));
        problem.order = order;
        expect_exact(twin, problem);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

inline void every_adversarial_row_when_long(const SelectTwin& twin) {
  Rng rng(20260102);
  for (const NamedRow& row : adversarial_rows()) {
    SelectProblem problem;
    problem.rows = {row.make(131072, rng), row.make(50021, rng)};
    for (const int k : {512, 2048}) {
      SCOPED_TRACE(::testing::Message() << row.name << " k " << k);
      problem.k = k;
      expect_exact(twin, problem);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

// A part of a row may guess far above all that the other parts have kept, and keep nothing itself: its equals lie behind the
// place up to which it thought them wanted.
inline void best_scores_that_are_equal_and_come_in_runs(const SelectTwin& twin) {
  constexpr int64_t kLength = 131072;
  Rng rng(20260106);
  const auto low = [&](int64_t) { return std::min(0.1f * gaussian(rng), 0.99f); };
  SelectProblem problem;
  problem.k = 512;
  for (const int64_t part : {0, 1, 7, 15}) {
    std::vector<float> row = row_by(kLength, low);
    for (const int64_t begin : {122880 + 128 * part, 126976 + 128 * part}) std::fill_n(row.begin() + begin, 128, 2.0f);
    problem.rows.push_back(std::move(row));
  }
  for (int i = 0; i < 28; ++i) {
    std::vector<float> row = row_by(kLength, low);
    for (int runs = 1 + i % 3; runs > 0; --runs) {
      const int64_t length = 32 * (1 + static_cast<int64_t>(rng.below(256)));
      const int64_t begin = 32 * static_cast<int64_t>(rng.below(static_cast<uint64_t>((kLength - length) / 32)));
      std::fill_n(row.begin() + begin, length, 2.0f);
    }
    problem.rows.push_back(std::move(row));
  }
  expect_exact(twin, problem);
  if (::testing::Test::HasFatalFailure()) return;
  for (size_t i = 0; i < problem.rows.size(); i += 5) {  // a row alone is cut into more parts
    SCOPED_TRACE(::testing::Message() << "row " << i << " alone");
    expect_exact(twin, problem_of(problem.rows[i], 512));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

inline void every_k_from_one_to_the_largest(const SelectTwin& twin) {
  Rng rng(20260103);
  SelectProblem problem;
  problem.rows = {row_by(20011, [&](int64_t) { return std::floor(gaussian(rng) * 50.0f); }),
                  row_by(8192, [&](int64_t) { return gaussian(rng); })};
  for (const int k : {1, 2, 3, 5, 7, 64, 127, 1000, 2047, 2048, 4095, 5000, 8191, 8192}) {
    SCOPED_TRACE(k);
    problem.k = k;
    expect_exact(twin, problem);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

inline void one_million_entries(const SelectTwin& twin) {
  Rng rng(20260104);
  SelectProblem problem = problem_of(row_by(1048576, [&](int64_t) { return gaussian(rng); }), 512);
  expect_exact(twin, problem);
  problem.rows[0] = row_by(1048576, [](int64_t i) { return static_cast<float>(i); });
  problem.k = 2048;
  expect_exact(twin, problem);
}

inline void sorted_rows_do_not_depend_on_their_direction(const SelectTwin& twin) {
  Rng rng(20260105);
  SelectProblem problem = problem_of(row_by(70000, [&](int64_t) { return gaussian(rng); }), 1024);
  std::sort(problem.rows[0].begin(), problem.rows[0].end());
  expect_exact(twin, problem);
  std::reverse(problem.rows[0].begin(), problem.rows[0].end());
  expect_exact(twin, problem);
}

inline void padding_reaches_the_end_of_the_output_stride(const SelectTwin& twin) {
  Rng rng(20260106);
  for (const int64_t out_stride : {5, 6, 64, 192, 1000}) {
    SelectProblem problem = problem_of(row_by(100, [&](int64_t) { return gaussian(rng); }), 5);
    problem.rows.push_back({});
    problem.rows.push_back({1, 2});
    problem.out_stride = out_stride;
    SCOPED_TRACE(out_stride);
    expect_exact(twin, problem);
  }
}

// A batch whose page-table rows serve several query rows each, pages in any order, some repeated, some absent.
inline SelectProblem paged_problem(Rng& rng, int32_t slots_per_page, int32_t rows_per_table_row, int k) {
  SelectProblem problem;
  problem.k = k;
  problem.table_rows = 3;
  problem.pages_per_row = 9;
  problem.slots_per_page = slots_per_page;
  problem.page_count = 40;
  problem.rows_per_table_row = rows_per_table_row;
  problem.want_slots = true;
  for (int32_t i = 0; i < problem.table_rows * problem.pages_per_row; ++i) {
    const double draw = rng.unit();
    if (draw < 0.1) {
      problem.pages.push_back(kNoPage);
    } else if (draw < 0.2) {
      problem.pages.push_back(static_cast<int32_t>(problem.page_count + static_cast<int64_t>(rng.below(5))));
    } else {
      problem.pages.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(problem.page_count))));
    }
  }
  for (int32_t r = 0; r < problem.table_rows; ++r) {
    problem.entry_base.push_back(static_cast<int32_t>(rng.below(1u << 30)));
    for (int32_t q = 0; q < rows_per_table_row; ++q) {
      const int64_t length = rng.between(0, int64_t{problem.pages_per_row} * slots_per_page);
      std::vector<float> row = row_by(length, [&](int64_t) { return gaussian(rng); });
      for (int64_t e = 0; e < length; ++e) {
        const int32_t page = problem.pages[static_cast<size_t>(r * problem.pages_per_row + e / slots_per_page)];
        if (page < 0 || page >= problem.page_count) row[static_cast<size_t>(e)] = kAbsent;
      }
      problem.rows.push_back(std::move(row));
    }
  }
  return problem;
}

inline void positions_are_global_and_slots_physical(const SelectTwin& twin) {
  Rng rng(20260107);
  for (const int32_t slots_per_page : {1, 2, 64, 100, 256}) {
    for (const int32_t rows_per_table_row : {1, 2, 4}) {
      for (const int k : {1, 60, 700}) {
        SCOPED_TRACE(::testing::Message() << slots_per_page << " slots, " << rows_per_table_row << " rows, k " << k);
        SelectProblem problem = paged_problem(rng, slots_per_page, rows_per_table_row, k);
        expect_exact(twin, problem);
        problem.order = TopkOrder::kByRank;
        expect_exact(twin, problem);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

inline void rows_may_name_their_table_row(const SelectTwin& twin) {
  Rng rng(20260108);
  SelectProblem problem = paged_problem(rng, 64, 1, 50);
  for (std::vector<float>& row : problem.rows) row.resize(1);
  problem.row_of = {2, 0, 1};
  expect_exact(twin, problem);
}

inline void a_row_without_a_table_row_is_empty_and_reported(const SelectTwin& twin) {
  Rng rng(20260109);
  SelectProblem problem = paged_problem(rng, 64, 1, 50);
  for (std::vector<float>& row : problem.rows) row.resize(1);
  problem.row_of = {3, -1, 1};
  expect_exact(twin, problem);
}

inline void a_length_past_the_table_row_is_cut_and_reported(const SelectTwin& twin) {
  Rng rng(20260110);
  SelectProblem problem = paged_problem(rng, 64, 1, 512);
  for (std::vector<float>& row : problem.rows) {
    row.resize(static_cast<size_t>(problem.pages_per_row) * 64 + 77, 9.0f);
  }
  expect_exact(twin, problem);
  const absl::StatusOr<Selection> got = run_selection(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_NE(got->report.status & kStatusBadPageTable, 0u);
}

inline void a_member_whose_page_is_absent_has_no_slot_and_is_counted(const SelectTwin& twin) {
  Rng rng(20260111);
  SelectProblem problem = paged_problem(rng, 2, 1, 18);
  problem.pages.assign(problem.pages.size(), kNoPage);
  problem.pages[0] = 39;
  for (std::vector<float>& row : problem.rows) row = row_by(18, [&](int64_t) { return gaussian(rng); });
  expect_exact(twin, problem);
}

inline void twenty_repeats_are_bitwise_equal(const SelectTwin& twin) {
  Rng rng(20260112);
  SelectProblem problem = problem_of(row_by(30000, [&](int64_t) { return std::floor(gaussian(rng) * 20.0f); }), 777);
  problem.rows.push_back(row_by(9000, [&](int64_t) { return gaussian(rng); }));
  const absl::StatusOr<Selection> first = run_selection(twin, problem);
  ASSERT_TRUE(first.ok()) << first.status();
  for (int repeat = 1; repeat < 20; ++repeat) {
    const absl::StatusOr<Selection> again = run_selection(twin, problem);
    ASSERT_TRUE(again.ok()) << again.status();
    ASSERT_TRUE(again->same_bits(*first)) << "repeat " << repeat;
  }
}

inline void a_row_does_not_depend_on_its_batch(const SelectTwin& twin) {
  Rng rng(20260113);
  SelectProblem batch;
  batch.k = 100;
  for (int r = 0; r < 33; ++r) {
    batch.rows.push_back(row_by(rng.between(0, 12000), [&](int64_t) { return gaussian(rng); }));
  }
  const absl::StatusOr<Selection> together = run_selection(twin, batch);
  ASSERT_TRUE(together.ok()) << together.status();
  for (size_t r = 0; r < batch.rows.size(); ++r) {
    const absl::StatusOr<Selection> alone = run_selection(twin, problem_of(batch.rows[r], batch.k));
    ASSERT_TRUE(alone.ok()) << alone.status();
    const auto begin = together->positions.begin() + static_cast<int64_t>(r) * batch.stride_out();
    ASSERT_TRUE(std::equal(alone->positions.begin(), alone->positions.end(), begin)) << "row " << r;
  }
}

inline void random_shapes_agree_with_the_oracle(const SelectTwin& twin) {
  const int64_t rounds = count_of("select_topk_random_shapes");
  for (int64_t round = 0; round < rounds; ++round) {
    Rng rng(static_cast<uint64_t>(1000 + round));
    SelectProblem problem;
    problem.k = static_cast<int>(rng.chance(0.2) ? rng.between(1, kTopkMax) : rng.between(1, 600));
    problem.order = rng.chance(0.5) ? TopkOrder::kByPosition : TopkOrder::kByRank;
    problem.out_stride = problem.k + rng.between(0, 70);
    problem.slack = rng.between(0, 9);
    const int64_t rows = rng.between(1, 5);
    for (int64_t r = 0; r < rows; ++r) {
      const NamedRow& kind = adversarial_rows()[rng.below(adversarial_rows().size())];
      const int64_t length = rng.chance(0.3) ? rng.between(0, 40000) : rng.between(0, 3000);
      problem.rows.push_back(kind.make(length, rng));
    }
    SCOPED_TRACE(::testing::Message() << "round " << round);
    expect_exact(twin, problem);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

inline void refuses_what_it_cannot_do_with_value_and_limit(const SelectTwin& twin) {
  const auto message_for = [&](const std::function<void(SelectProblem&)>& spoil) {
    SelectProblem problem = problem_of({1, 2, 3}, 2);
    spoil(problem);
    const absl::StatusOr<Selection> got = run_selection(twin, problem);
    EXPECT_EQ(got.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(got.status().message());
  };
  EXPECT_NE(message_for([](SelectProblem& p) {
              p.k = 0;
              p.out_stride = 64;
            }).find("k is 0, must be 1..8192"),
            std::string::npos);
  EXPECT_NE(message_for([](SelectProblem& p) { p.k = 8193; }).find("k is 8193"), std::string::npos);
  EXPECT_NE(message_for([](SelectProblem& p) { p.out_stride = 1; }).find("out_stride is 1, must be >= k = 2"), std::string::npos);
  EXPECT_NE(message_for([](SelectProblem& p) { p.slack = -1; }).find("length_max is 3"), std::string::npos);
  EXPECT_NE(message_for([](SelectProblem& p) { p.want_slots = true; }).find("pages.pages is null"), std::string::npos);
  EXPECT_NE(message_for([](SelectProblem& p) { p.rows_per_table_row = 0; }).find("rows_per_table_row is 0"), std::string::npos);
  EXPECT_NE(message_for([](SelectProblem& p) {
              p.want_slots = true;
              p.table_rows = 1;
              p.pages_per_row = 1;
              p.pages = {0};
              p.slots_per_page = 64;
              p.page_count = int64_t{1} << 26;
            }).find("page_count is 67108864"),
            std::string::npos);
}

// ---------------------------------------------------------------------------------------------------------------
// merge_topk.

struct Merge {
  std::vector<int32_t> positions;
  std::vector<float> scores;
  std::vector<int32_t> slots;
  std::vector<int32_t> counts;
  OpReport report{};
};

struct MergeProblem {
  std::vector<std::vector<std::vector<Scored>>> shards;  // [shard][row] lists
  int k = 1;
  TopkOrder order = TopkOrder::kByPosition;
  int64_t in_stride = 0;
  std::vector<uint32_t> variants;
};

inline absl::StatusOr<Merge> run_merge(const SelectTwin& twin, const MergeProblem& problem) {
  const size_t shards = problem.shards.size();
  const size_t rows = shards == 0 ? 0 : problem.shards[0].size();
  const size_t stride = static_cast<size_t>(problem.in_stride);
  std::vector<int32_t> positions(shards * rows * stride, 3);  // past a list's count: members nobody may take
  std::vector<float> scores(positions.size(), kInfinity);
  std::vector<int32_t> slots(positions.size(), kPoison);
  std::vector<int32_t> counts(shards * rows);
  for (size_t s = 0; s < shards; ++s) {
    for (size_t r = 0; r < rows; ++r) {
      const std::vector<Scored>& list = problem.shards[s][r];
      counts[s * rows + r] = static_cast<int32_t>(list.size());
      for (size_t i = 0; i < list.size(); ++i) {
        const size_t at = (s * rows + r) * stride + i;
        positions[at] = static_cast<int32_t>(list[i].position);
        scores[at] = list[i].score;
        slots[at] = list[i].slot;
      }
    }
  }
  const int64_t out_stride = (problem.k + 63) / 64 * 64;
  Merge out;
  out.positions.assign(rows * static_cast<size_t>(out_stride), kPoison);
  out.scores.assign(out.positions.size(), 1.0f);
  out.slots.assign(out.positions.size(), kPoison);
  out.counts.assign(rows, kPoison);
  MergeTopkArgs args;
  args.positions = positions.data();
  args.scores = scores.data();
  args.counts = counts.data();
  args.slots = slots.data();
  args.variants = problem.variants.empty() ? nullptr : problem.variants.data();
  args.shards = static_cast<int32_t>(shards);
  args.rows = static_cast<int32_t>(rows);
  args.in_stride = problem.in_stride;
  args.k = problem.k;
  args.order = problem.order;
  args.out_positions = out.positions.data();
  args.out_scores = out.scores.data();
  args.out_slots = out.slots.data();
  args.out_counts = out.counts.data();
  args.out_stride = out_stride;
  args.report = &out.report;
  const absl::Status status = twin.merge(args);
  if (!status.ok()) return status;
  return out;
}

inline void expect_merge_exact(const SelectTwin& twin, const MergeProblem& problem) {
  const absl::StatusOr<Merge> got = run_merge(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  const size_t stride = (static_cast<size_t>(problem.k) + 63) / 64 * 64;
  uint64_t absent = 0;
  for (size_t r = 0; r < problem.shards[0].size(); ++r) {
    std::vector<Scored> all;
    for (const auto& shard : problem.shards) {
      for (const Scored& member : shard[r]) {
        if (member.position < 0) continue;
        absent += score_bits(member.score) == kAbsentScoreBits ? 1 : 0;
        all.push_back(member);
      }
    }
    const std::vector<Scored> best = oracle_best(std::move(all), problem.k, problem.order);
    ASSERT_EQ(got->counts[r], static_cast<int32_t>(best.size()));
    for (size_t i = 0; i < stride; ++i) {
      const bool valid = i < best.size();
      ASSERT_EQ(got->positions[r * stride + i], valid ? best[i].position : kNoEntry) << "row " << r << " cell " << i;
      ASSERT_EQ(got->slots[r * stride + i], valid ? best[i].slot : kNoEntry);
      float score = valid ? best[i].score : -kInfinity;
      if (std::isnan(score)) score = kNan;
      ASSERT_EQ(score_bits(got->scores[r * stride + i]), score == 0.0f ? 0u : score_bits(score));
    }
  }
  EXPECT_EQ(got->report.absent_entries, absent);
  EXPECT_EQ((got->report.status & kStatusAbsentPage) != 0, absent > 0);
}

// Splits rows of scores into shards of runs of positions, each reduced to its own best k.
inline MergeProblem sharded(const std::vector<std::vector<float>>& rows, int shards, int k, Rng& rng) {
  MergeProblem problem;
  problem.k = k;
  problem.in_stride = k + 5;
  problem.shards.resize(static_cast<size_t>(shards));
  for (const std::vector<float>& row : rows) {
    const int64_t length = static_cast<int64_t>(row.size());
    for (int s = 0; s < shards; ++s) {
      std::vector<Scored> entries;
      for (int64_t e = length * s / shards; e < length * (s + 1) / shards; ++e) {
        entries.push_back({e, row[static_cast<size_t>(e)], static_cast<int32_t>(e * 3 % 100003)});
      }
      const TopkOrder order = rng.chance(0.5) ? TopkOrder::kByPosition : TopkOrder::kByRank;
      problem.shards[static_cast<size_t>(s)].push_back(oracle_best(std::move(entries), k, order));
    }
  }
  return problem;
}

inline void a_merge_equals_the_selection_of_the_whole(const SelectTwin& twin) {
  Rng rng(20260120);
  for (const NamedRow& kind : adversarial_rows()) {
    for (const int shards : {1, 2, 7}) {
      const int k = 100;
      const std::vector<std::vector<float>> rows = {kind.make(3000, rng), kind.make(50, rng), kind.make(0, rng)};
      MergeProblem problem = sharded(rows, shards, k, rng);
      for (const TopkOrder order : {TopkOrder::kByPosition, TopkOrder::kByRank}) {
        problem.order = order;
        SCOPED_TRACE(::testing::Message() << kind.name << " shards " << shards);
        expect_merge_exact(twin, problem);
        SelectProblem whole;
        whole.rows = rows;
        whole.k = k;
        whole.order = order;
        const absl::StatusOr<Selection> selected = run_selection(twin, whole);
        const absl::StatusOr<Merge> merged = run_merge(twin, problem);
        ASSERT_TRUE(selected.ok() && merged.ok());
        ASSERT_EQ(merged->positions, selected->positions);
        ASSERT_EQ(merged->counts, selected->counts);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

inline std::vector<std::vector<Scored>> lists_of(const Merge& merge, int k) {
  std::vector<std::vector<Scored>> rows;
  const size_t stride = (static_cast<size_t>(k) + 63) / 64 * 64;
  for (size_t r = 0; r < merge.counts.size(); ++r) {
    std::vector<Scored> list;
    for (size_t i = 0; i < static_cast<size_t>(merge.counts[r]); ++i) {
      const size_t at = r * stride + i;
      list.push_back({merge.positions[at], merge.scores[at], merge.slots[at]});
    }
    rows.push_back(std::move(list));
  }
  return rows;
}

inline void a_merge_is_associative_and_commutative(const SelectTwin& twin) {
  Rng rng(20260121);
  const int k = 64;
  MergeProblem whole = sharded(
      {row_by(5000, [&](int64_t) { return std::floor(gaussian(rng) * 10.0f); }), row_by(90, [&](int64_t) { return gaussian(rng); })}, 3, k,
      rng);
  const absl::StatusOr<Merge> at_once = run_merge(twin, whole);
  ASSERT_TRUE(at_once.ok()) << at_once.status();

  std::vector<size_t> turn = {0, 1, 2};
  do {
    MergeProblem pair = whole;
    pair.shards = {whole.shards[turn[0]], whole.shards[turn[1]]};
    pair.order = rng.chance(0.5) ? TopkOrder::kByPosition : TopkOrder::kByRank;
    const absl::StatusOr<Merge> first = run_merge(twin, pair);
    ASSERT_TRUE(first.ok()) << first.status();
    MergeProblem rest = whole;
    rest.shards = {whole.shards[turn[2]], lists_of(*first, k)};
    const absl::StatusOr<Merge> last = run_merge(twin, rest);
    ASSERT_TRUE(last.ok()) << last.status();
    EXPECT_EQ(last->positions, at_once->positions);
    EXPECT_EQ(last->slots, at_once->slots);
    EXPECT_EQ(last->counts, at_once->counts);
  } while (std::next_permutation(turn.begin(), turn.end()));
}

inline void a_merge_skips_padding_and_absent_members(const SelectTwin& twin) {
  MergeProblem problem;
  problem.k = 4;
  problem.in_stride = 4;
  problem.shards = {{{{7, 1.0f, 70}, {-1, kInfinity, 1}, {3, kAbsent, 2}, {9, kNan, 90}}}, {{{8, -kInfinity, 80}, {2, 1.0f, 20}}}};
  expect_merge_exact(twin, problem);
  problem.order = TopkOrder::kByRank;
  const absl::StatusOr<Merge> got = run_merge(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(std::vector<int32_t>(got->positions.begin(), got->positions.begin() + 5), (std::vector<int32_t>{2, 7, 8, 9, -1}));
  EXPECT_EQ(got->report.nan_scores, 0u);
}

inline void a_merge_of_mixed_variants_says_so(const SelectTwin& twin) {
  MergeProblem problem;
  problem.k = 2;
  problem.in_stride = 2;
  problem.shards = {{{{1, 1.0f, 1}}}, {{{2, 2.0f, 2}}}, {{{3, 3.0f, 3}}}};
  problem.variants = {5, 5, 5};
  absl::StatusOr<Merge> got = run_merge(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->report.status, 0u);
  problem.variants = {5, 5, 16};
  got = run_merge(twin, problem);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->report.status, kStatusMixedVariants);
  EXPECT_EQ(got->positions[0], 2);
  EXPECT_EQ(got->positions[1], 3);
}

inline void random_merges_agree_with_the_oracle(const SelectTwin& twin) {
  const int64_t rounds = count_of("merge_topk_random_shapes");
  for (int64_t round = 0; round < rounds; ++round) {
    Rng rng(static_cast<uint64_t>(5000 + round));
    const int k = static_cast<int>(rng.between(1, rng.chance(0.1) ? 8192 : 300));
    std::vector<std::vector<float>> rows;
    for (int64_t r = rng.between(1, 3); r > 0; --r) {
      const NamedRow& kind = adversarial_rows()[rng.below(adversarial_rows().size())];
      rows.push_back(kind.make(rng.between(0, 4000), rng));
    }
    MergeProblem problem = sharded(rows, static_cast<int>(rng.between(1, 40)), k, rng);
    problem.order = rng.chance(0.5) ? TopkOrder::kByPosition : TopkOrder::kByRank;
    SCOPED_TRACE(::testing::Message() << "round " << round);
    expect_merge_exact(twin, problem);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// ---------------------------------------------------------------------------------------------------------------
// list_slots.

inline void lists_every_present_entry_in_order(const SelectTwin& twin) {
  Rng rng(20260130);
  for (const int32_t slots_per_page : {1, 2, 64, 100}) {
    const int32_t pages_per_row = 11;
    const int32_t table_rows = 3;
    const int32_t rows_per_table_row = 2;
    const int64_t page_count = 30;
    std::vector<int32_t> pages;
    for (int i = 0; i < pages_per_row * table_rows; ++i) pages.push_back(static_cast<int32_t>(rng.between(-1, 31)));
    const std::vector<int32_t> base = {0, 1000, 77};
    const int64_t held = int64_t{pages_per_row} * slots_per_page;
    const std::vector<int32_t> lengths = {0,  static_cast<int32_t>(held),    static_cast<int32_t>(held - 1), 1,
                                          -5, static_cast<int32_t>(held + 9)};
    for (const int64_t out_stride : {held + 20, held - 1, int64_t{1}}) {
      std::vector<int32_t> positions(lengths.size() * static_cast<size_t>(out_stride), kPoison);
      std::vector<int32_t> slots(positions.size(), kPoison);
      std::vector<int32_t> counts(lengths.size(), kPoison);
      OpReport report{};
      ListSlotsArgs args;
      args.pages = {pages.data(), base.data(), pages_per_row, table_rows, pages_per_row};
      args.lengths = lengths.data();
      args.rows = static_cast<int32_t>(lengths.size());
      args.rows_per_table_row = rows_per_table_row;
      args.slots_per_page = slots_per_page;
      args.page_count = page_count;
      args.positions = positions.data();
      args.slots = slots.data();
      args.counts = counts.data();
      args.out_stride = out_stride;
      args.report = &report;
      const absl::Status status = twin.list(args);
      ASSERT_TRUE(status.ok()) << status;

      uint64_t absent = 0;
      for (size_t r = 0; r < lengths.size(); ++r) {
        const size_t table_row = r / static_cast<size_t>(rows_per_table_row);
        std::vector<int32_t> want_positions;
        std::vector<int32_t> want_slots;
        for (int64_t e = 0; e < std::min<int64_t>({lengths[r], held, out_stride}); ++e) {
          const int32_t page = pages[table_row * static_cast<size_t>(pages_per_row) + static_cast<size_t>(e / slots_per_page)];
          if (page < 0 || page >= page_count) {
            ++absent;
            continue;
          }
          want_positions.push_back(static_cast<int32_t>(base[table_row] + e));
          want_slots.push_back(static_cast<int32_t>(page * slots_per_page + e % slots_per_page));
        }
        EXPECT_EQ(counts[r], static_cast<int32_t>(want_slots.size()));
        want_positions.resize(static_cast<size_t>(out_stride), kNoEntry);
        want_slots.resize(static_cast<size_t>(out_stride), kNoEntry);
        const auto at = static_cast<int64_t>(r) * out_stride;
        EXPECT_TRUE(std::equal(want_positions.begin(), want_positions.end(), positions.begin() + at)) << "row " << r;
        EXPECT_TRUE(std::equal(want_slots.begin(), want_slots.end(), slots.begin() + at)) << "row " << r;
      }
      EXPECT_EQ(report.absent_entries, absent);
      EXPECT_EQ(report.status, kStatusBadPageTable | (absent > 0 ? kStatusAbsentPage : 0u));
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------

struct SelectCase {
  const char* name;
  void (*run)(const SelectTwin&);
};

#define NEEDLE_SELECT_CASE(name) \
  { #name, name }
inline const std::vector<SelectCase>& select_topk_battery() {
  static const std::vector<SelectCase> cases = {
      NEEDLE_SELECT_CASE(equal_scores_go_to_the_lower_position),
      NEEDLE_SELECT_CASE(negative_zero_equals_zero),
      NEEDLE_SELECT_CASE(nan_ranks_below_minus_infinity_and_is_counted),
      NEEDLE_SELECT_CASE(absent_entries_never_enter_and_are_counted),
      NEEDLE_SELECT_CASE(selects_nothing_past_the_length),
      NEEDLE_SELECT_CASE(a_negative_length_is_an_empty_row),
      NEEDLE_SELECT_CASE(a_length_past_the_capacity_is_cut_and_reported),
      NEEDLE_SELECT_CASE(an_empty_batch_is_an_answer),
      NEEDLE_SELECT_CASE(every_adversarial_row_at_every_edge_length),
      NEEDLE_SELECT_CASE(every_adversarial_row_when_long),
      NEEDLE_SELECT_CASE(best_scores_that_are_equal_and_come_in_runs),
      NEEDLE_SELECT_CASE(every_k_from_one_to_the_largest),
      NEEDLE_SELECT_CASE(one_million_entries),
      NEEDLE_SELECT_CASE(sorted_rows_do_not_depend_on_their_direction),
      NEEDLE_SELECT_CASE(padding_reaches_the_end_of_the_output_stride),
      NEEDLE_SELECT_CASE(positions_are_global_and_slots_physical),
      NEEDLE_SELECT_CASE(rows_may_name_their_table_row),
      NEEDLE_SELECT_CASE(a_row_without_a_table_row_is_empty_and_reported),
      NEEDLE_SELECT_CASE(a_length_past_the_table_row_is_cut_and_reported),
      NEEDLE_SELECT_CASE(a_member_whose_page_is_absent_has_no_slot_and_is_counted),
      NEEDLE_SELECT_CASE(twenty_repeats_are_bitwise_equal),
      NEEDLE_SELECT_CASE(a_row_does_not_depend_on_its_batch),
      NEEDLE_SELECT_CASE(random_shapes_agree_with_the_oracle),
      NEEDLE_SELECT_CASE(refuses_what_it_cannot_do_with_value_and_limit),
      NEEDLE_SELECT_CASE(a_merge_equals_the_selection_of_the_whole),
      NEEDLE_SELECT_CASE(a_merge_is_associative_and_commutative),
      NEEDLE_SELECT_CASE(a_merge_skips_padding_and_absent_members),
      NEEDLE_SELECT_CASE(a_merge_of_mixed_variants_says_so),
      NEEDLE_SELECT_CASE(random_merges_agree_with_the_oracle),
      NEEDLE_SELECT_CASE(lists_every_present_entry_in_order),
  };
  return cases;
}
#undef NEEDLE_SELECT_CASE

}  // namespace needle::testing
