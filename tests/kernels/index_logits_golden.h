// Scores and selections on what others computed: the golden files of the public implementation, and the real index
// vectors with their float64 top-512 sets. Written once; a twin scores and selects on host arguments.
//
// What must stay true:
//  1. Golden files are known by the tensors they hold; k, heads, entries and ratio are read from them.
//  2. A selection may differ from the golden set only in entries whose float64 score lies within 4e-6, relative, of the
//     last golden member's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/units.h"
#include "gtest/gtest.h"
#include "kernels/index_logits.h"
#include "kernels/quantise.h"
#include "kernels/select_topk.h"
#include "tests/kernels/index_logits_battery.h"
#include "tests/kernels/safetensors.h"
#include "tests/kernels/vectors.h"

namespace needle::testing {

inline constexpr int kGoldenSlots = 64;
inline constexpr double kGoldenNormErrorMax = 2e-6;
inline constexpr double kGoldenTieWidth = 4e-6;

struct GoldenTwin {
  std::string name;
  std::string unavailable;  // why it cannot run here; empty where it can
  LogitsTwin logits;
  std::function<absl::Status(const SelectTopkArgs&)> select;
};

// Keys laid into pages of 64 in scattered order, queries of one sequence that each see their own length.
struct KeysAndQueries {
  int entries = 0;
  int heads = 0;
  ElementFormat element = ElementFormat::kBf16;
  std::vector<uint16_t> key_bits;  // bf16 keys, [entries, 128]
  std::vector<uint8_t> codes;      // fp8 keys, [entries, 128]
  std::vector<float> scales;       // fp8 keys, [entries]
  std::vector<uint16_t> query_bits;
  std::vector<float> weights;
  std::vector<int32_t> visible;

  int queries() const { return static_cast<int>(visible.size()); }

  // Float64 score of one entry on the stored values.
  double exact_score(int query, int entry) const {
    double key[kIndexHeadDim];
    for (int d = 0; d < kIndexHeadDim; ++d) {
      const size_t at = static_cast<size_t>(entry) * kIndexHeadDim + static_cast<size_t>(d);
      key[d] = element == ElementFormat::kBf16
                   ? static_cast<double>(float_of_bf16(key_bits[at]))
                   : static_cast<double>(float_of_e4m3(codes[at])) * static_cast<double>(scales[static_cast<size_t>(entry)]);
    }
    double sum = 0;
    for (int h = 0; h < heads; ++h) {
      const size_t vector = static_cast<size_t>(query) * static_cast<size_t>(heads) + static_cast<size_t>(h);
      double dot = 0;
      for (int d = 0; d < kIndexHeadDim; ++d) {
        dot += static_cast<double>(float_of_bf16(query_bits[vector * kIndexHeadDim + static_cast<size_t>(d)])) * key[d];
      }
      sum += static_cast<double>(weights[vector]) * std::max(0.0, dot);
    }
    return sum;
  }
};

// Scores of all queries, [queries, entries]; columns past a query's length are left NaN.
inline std::vector<float> score(const LogitsTwin& twin, const KeysAndQueries& problem) {
  const int pages = static_cast<int>(div_ceil(problem.entries, kGoldenSlots));
  const int64_t stride = layer_page_bytes(problem.element, kIndexHeadDim, kGoldenSlots);
  const Mapping pool(stride * pages);
  NEEDLE_CHECK(pool.error() == 0, "the test's pool could not be mapped");
  std::vector<int32_t> table(static_cast<size_t>(pages));
  for (int i = 0; i < pages; ++i) table[static_cast<size_t>(i)] = pages - 1 - i;  // reversed: local order is not pool order
  for (int s = 0; s < problem.entries; ++s) {
    std::byte* part = pool.address() + table[static_cast<size_t>(s / kGoldenSlots)] * stride;
    const SlotPlace place = slot_place(problem.element, kIndexHeadDim, kGoldenSlots, s % kGoldenSlots);
    if (problem.element == ElementFormat::kBf16) {
      std::memcpy(part + place.data, &problem.key_bits[static_cast<size_t>(s) * kIndexHeadDim], kIndexHeadDim * 2);
    } else {
      std::memcpy(part + place.data, &problem.codes[static_cast<size_t>(s) * kIndexHeadDim], kIndexHeadDim);
      std::memcpy(part + place.scale, &problem.scales[static_cast<size_t>(s)], sizeof(float));
    }
  }
  std::vector<float> scores(static_cast<size_t>(problem.queries()) * static_cast<size_t>(problem.entries), std::nanf(""));
  const std::vector<int32_t> rows(static_cast<size_t>(problem.queries()), 0);
  OpReport report = {};
  IndexLogitsArgs args;
  args.keys.base = pool.address();
  args.keys.page_stride = stride;
  args.keys.page_count = pages;
  args.keys.slots_per_page = kGoldenSlots;
  args.keys.head_dim = kIndexHeadDim;
  args.keys.element = problem.element;
  args.pages.pages = table.data();
  args.pages.row_stride = pages;
  args.pages.pages_per_row = pages;
  args.pages.rows = 1;
  args.q = problem.query_bits.data();
  args.head_weights = problem.weights.data();
  args.query_row = rows.data();
  args.visible = problem.visible.data();
  args.query_count = problem.queries();
  args.heads = problem.heads;
  args.entry_count = problem.entries;
  args.scores = scores.data();
  args.score_stride = problem.entries;
  args.report = &report;
  const absl::Status status = twin.run(args, 2);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(report.status, 0u);
  return scores;
}

// The k best positions of each row.
inline std::vector<std::set<int32_t>> select(const GoldenTwin& twin, const std::vector<float>& scores, const KeysAndQueries& problem,
                                             int k) {
  std::vector<int32_t> positions(static_cast<size_t>(problem.queries()) * static_cast<size_t>(k));
  std::vector<int32_t> counts(static_cast<size_t>(problem.queries()));
  SelectTopkArgs args;
  args.scores = scores.data();
  args.score_stride = problem.entries;
  args.lengths = problem.visible.data();
  args.rows = problem.queries();
  args.length_max = problem.entries;
  args.k = k;
  args.positions = positions.data();
  args.counts = counts.data();
  args.out_stride = k;
  const absl::Status status = twin.select(args);
  EXPECT_TRUE(status.ok()) << status;
  std::vector<std::set<int32_t>> chosen;
  for (int t = 0; t < problem.queries(); ++t) {
    const auto begin = positions.begin() + static_cast<int64_t>(t) * k;
    EXPECT_EQ(counts[static_cast<size_t>(t)], std::min(k, problem.visible[static_cast<size_t>(t)]));
    chosen.emplace_back(begin, begin + counts[static_cast<size_t>(t)]);
  }
  return chosen;
}

// ---------------------------------------------------------------------------------------------------------------------
// Golden files.

inline bool holds_logits(const SafetensorsFile& file) { return file.has("expected_logits") && file.has("logits_bf16_fp64acc"); }

inline KeysAndQueries problem_of(const SafetensorsFile& file) {
  KeysAndQueries problem;
  const Tensor& keys = file.at("expected_keys");
  const Tensor& q = file.at("q");
  problem.entries = static_cast<int>(keys.shape[0]);
  problem.heads = static_cast<int>(q.shape[1]);
  for (float value : keys.floats()) problem.key_bits.push_back(bf16_of(value));
  for (float value : q.floats()) problem.query_bits.push_back(bf16_of(value));
  problem.weights = file.at("head_weights").floats();
  const auto ratio = file.metadata.find("compress_ratio");
  EXPECT_NE(ratio, file.metadata.end()) << file.name << " does not say its compress_ratio";
  const int64_t tokens_an_entry = ratio == file.metadata.end() ? 1 : std::atoll(ratio->second.c_str());
  for (int64_t position : file.at("q_positions").integers()) {
    problem.visible.push_back(static_cast<int32_t>(std::min<int64_t>(entries_complete(position + 1, tokens_an_entry), problem.entries)));
  }
  return problem;
}

inline void reproduces_float64_sums_over_bf16_keys(const GoldenTwin& twin) {
  const auto files = read_golden();
  ASSERT_TRUE(files.ok()) << files.status();
  int judged = 0;
  for (const SafetensorsFile& file : *files) {
    if (!holds_logits(file)) continue;
    SCOPED_TRACE(file.name);
    ++judged;
    const KeysAndQueries problem = problem_of(file);
    const std::vector<float> scores = score(twin.logits, problem);
    const std::vector<float> due = file.at("logits_bf16_fp64acc").floats();
    ASSERT_EQ(due.size(), scores.size());
    double error_square = 0;
    double norm_square = 0;
    for (int t = 0; t < problem.queries(); ++t) {
      for (int s = 0; s < problem.entries; ++s) {
        const size_t at = static_cast<size_t>(t) * static_cast<size_t>(problem.entries) + static_cast<size_t>(s);
        if (s >= problem.visible[static_cast<size_t>(t)]) {
          EXPECT_FALSE(std::isfinite(due[at])) << "the file shows query " << t << " an entry that causality hides: " << s;
          continue;
        }
        const double error = static_cast<double>(scores[at]) - static_cast<double>(due[at]);
        error_square += error * error;
        norm_square += static_cast<double>(due[at]) * static_cast<double>(due[at]);
      }
    }
    const double relative = std::sqrt(error_square / norm_square);
    std::printf("%s on %s: relative norm error %.2e\n", twin.name.c_str(), file.name.c_str(), relative);
    EXPECT_LE(relative, kGoldenNormErrorMax);
  }
  EXPECT_GT(judged, 0) << golden_dir() << " holds no file with expected_logits and logits_bf16_fp64acc";
}

inline void selects_the_set_of_float64_sums_over_bf16_keys(const GoldenTwin& twin) {
  const auto files = read_golden();
  ASSERT_TRUE(files.ok()) << files.status();
  int judged = 0;
  for (const SafetensorsFile& file : *files) {
    if (!holds_logits(file) || !file.has("expected_topk")) continue;
    SCOPED_TRACE(file.name);
    const KeysAndQueries problem = problem_of(file);
    const int k = static_cast<int>(file.at("expected_topk").shape[1]);
    const std::vector<float> due = file.at("logits_bf16_fp64acc").floats();
    const auto chosen = select(twin, score(twin.logits, problem), problem, k);
    for (int t = 0; t < problem.queries(); ++t) {
      const float* row = due.data() + static_cast<int64_t>(t) * problem.entries;
      std::vector<int32_t> order(static_cast<size_t>(problem.visible[static_cast<size_t>(t)]));
      for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return row[a] > row[b]; });
      const size_t count = std::min(order.size(), static_cast<size_t>(k));
      if (count == 0) continue;
      const double last = static_cast<double>(row[order[count - 1]]);
      const std::set<int32_t> golden(order.begin(), order.begin() + static_cast<int64_t>(count));
      ASSERT_EQ(chosen[static_cast<size_t>(t)].size(), golden.size());
      for (int32_t s = 0; s < problem.visible[static_cast<size_t>(t)]; ++s) {
        if (golden.count(s) == chosen[static_cast<size_t>(t)].count(s)) continue;
        EXPECT_LE(std::fabs(static_cast<double>(row[s]) - last), kGoldenTieWidth * std::fabs(last)) << "query " << t << ", entry " << s;
      }
      ++judged;
    }
  }
  EXPECT_GT(judged, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Real vectors.

// Sylvester's order, scaled by 128^-0.5, then rounded to bf16.
inline std::vector<uint16_t> rotate(const std::vector<uint16_t>& bits) {
  std::vector<uint16_t> rotated(bits.size());
  double values[kIndexHeadDim];
  for (size_t first = 0; first < bits.size(); first += kIndexHeadDim) {
    for (int d = 0; d < kIndexHeadDim; ++d) values[d] = static_cast<double>(float_of_bf16(bits[first + static_cast<size_t>(d)]));
    for (int half = 1; half < kIndexHeadDim; half *= 2) {
      for (int d = 0; d < kIndexHeadDim; ++d) {
        if ((d & half) != 0) continue;
        const double low = values[d];
        values[d] = low + values[d + half];
        values[d + half] = low - values[d + half];
      }
    }
    for (int d = 0; d < kIndexHeadDim; ++d) {
      rotated[first + static_cast<size_t>(d)] = bf16_of(static_cast<float>(values[d] / std::sqrt(static_cast<double>(kIndexHeadDim))));
    }
  }
  return rotated;
}

inline KeysAndQueries problem_of(const VectorSet& set, const std::string& format) {
  KeysAndQueries problem;
  problem.entries = set.keys;
  problem.heads = set.heads;
  const bool rotated = format == "fp8_had_ue8m0";
  problem.key_bits = rotated ? rotate(set.key_bits) : set.key_bits;
  problem.query_bits = rotated ? rotate(set.query_bits) : set.query_bits;
  problem.weights = set.weights;
  problem.visible.assign(static_cast<size_t>(set.queries), set.keys);
  if (format == "bf16") return problem;

  problem.element = ElementFormat::kFp8;
  const ScaleKind kind = format == "fp8" ? ScaleKind::kAmax : ScaleKind::kPowerOfTwo;
  for (int s = 0; s < set.keys; ++s) {
    const uint16_t* key = problem.key_bits.data() + static_cast<int64_t>(s) * kIndexHeadDim;
    float amax = 0;
    for (int d = 0; d < kIndexHeadDim; ++d) amax = std::max(amax, std::fabs(float_of_bf16(key[d])));
    const float scale = fp8_scale(kind, amax);
    problem.scales.push_back(scale);
    for (int d = 0; d < kIndexHeadDim; ++d) problem.codes.push_back(fp8_code(kind, float_of_bf16(key[d]), scale, 1.0f / scale));
  }
  return problem;
}

inline void give_the_golden_top_512(const GoldenTwin& twin, const char* name, const char* format) {
  const auto set = read_vectors(name);
  ASSERT_TRUE(set.ok()) << set.status();
  const auto golden_of_format = set->top512.find(format);
  if (golden_of_format == set->top512.end()) {
    // The hard set has no rotated form; bf16 is never missing (read_vectors sees to it).
    GTEST_SKIP() << vectors_dir() << " has no golden set of " << name << " in " << format;
  }
  const std::vector<int32_t>& golden_sets = golden_of_format->second;
  const KeysAndQueries problem = problem_of(*set, format);
  const auto chosen = select(twin, score(twin.logits, problem), problem, kVectorTopk);
  int swaps = 0;
  for (int t = 0; t < set->queries; ++t) {
    const auto begin = golden_sets.begin() + static_cast<int64_t>(t) * kVectorTopk;
    const std::set<int32_t> golden(begin, begin + kVectorTopk);
    const double last = problem.exact_score(t, *(begin + kVectorTopk - 1));
    ASSERT_EQ(chosen[static_cast<size_t>(t)].size(), golden.size());
    std::vector<int32_t> differing;
    std::set_symmetric_difference(golden.begin(), golden.end(), chosen[static_cast<size_t>(t)].begin(),
                                  chosen[static_cast<size_t>(t)].end(), std::back_inserter(differing));
    for (int32_t entry : differing) {
      EXPECT_LT(std::fabs(problem.exact_score(t, entry) - last), kGoldenTieWidth * std::fabs(last)) << "query " << t << ", entry " << entry;
    }
    swaps += static_cast<int>(differing.size()) / 2;
  }
  std::printf("%s, %s in %s: %d of %d members swapped within %.0e\n", twin.name.c_str(), name, format, swaps, set->queries * kVectorTopk,
              kGoldenTieWidth);
  // What the format costs against unrounded keys, where the set says.
  const auto unrounded = set->top512.find("f32");
  if (unrounded == set->top512.end()) return;
  double worst = 1;
  double sum = 0;
  for (int t = 0; t < set->queries; ++t) {
    int kept = 0;
    for (int i = 0; i < kVectorTopk; ++i)
      kept += static_cast<int>(chosen[static_cast<size_t>(t)].count(unrounded->second[static_cast<size_t>(t * kVectorTopk + i)]));
    worst = std::min(worst, kept / double{kVectorTopk});
    sum += kept / double{kVectorTopk};
  }
  std::printf("%s in %s keeps %.4f of the unrounded keys' top 512, worst query %.4f\n", name, format, sum / set->queries, worst);
}

// Every stored score of some queries against float64.
inline void real_vectors_score_within_the_norm(const GoldenTwin& twin, const char* name, const char* format) {
  const auto set = read_vectors(name);
  ASSERT_TRUE(set.ok()) << set.status();
  const KeysAndQueries problem = problem_of(*set, format);
  const std::vector<float> scores = score(twin.logits, problem);
  constexpr int kQueriesJudged = 4;
  double error_square = 0;
  double norm_square = 0;
  for (int i = 0; i < kQueriesJudged; ++i) {
    const int t = i * (problem.queries() - 1) / (kQueriesJudged - 1);
    for (int s = 0; s < problem.entries; ++s) {
      const double due = problem.exact_score(t, s);
      const double error =
          static_cast<double>(scores[static_cast<size_t>(t) * static_cast<size_t>(problem.entries) + static_cast<size_t>(s)]) - due;
      error_square += error * error;
      norm_square += due * due;
    }
  }
  const double relative = std::sqrt(error_square / norm_square);
  std::printf("%s, %s in %s: relative norm error %.2e\n", twin.name.c_str(), name, format, relative);
  EXPECT_LE(relative, kGoldenNormErrorMax);
}

inline constexpr const char* kVectorSets[] = {"attn", "retr", "records"};
inline constexpr const char* kVectorFormats[] = {"bf16", "fp8", "fp8_ue8m0", "fp8_had_ue8m0"};

}  // namespace needle::testing
