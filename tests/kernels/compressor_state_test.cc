// The pooling arithmetic and the record's own promises; what needs a store is in store_battery.h.
#include "kernels/compressor_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "tests/counts.h"
#include "tests/kernels/store_battery.h"
#include "tests/kernels/store_twins.h"

namespace needle::testing {
namespace {

double softmax_sum(const std::vector<float>& scores, const std::vector<float>& kv) {
  double maximum = -std::numeric_limits<double>::infinity();
  for (float score : scores) maximum = std::max(maximum, static_cast<double>(score));
  double sum = 0;
  double weighted = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(static_cast<double>(scores[i]) - maximum);
    sum += weight;
    weighted += weight * static_cast<double>(kv[i]);
  }
  return weighted / sum;
}

TEST(Fold, the_exponential_is_within_two_units_in_the_last_place) {
  for (int i = 0; i <= 1'250'000; ++i) {
    const float t = -static_cast<float>(i) * 1e-4f;
    const double exact = std::exp2(static_cast<double>(t));
    ASSERT_NEAR(static_cast<double>(fold_exp2(t)) / exact, 1.0, 2.4e-7) << t;
  }
  EXPECT_EQ(fold_exp2(0.0f), 1.0f);
  EXPECT_EQ(fold_exp2(-0.0f), 1.0f);
  EXPECT_EQ(fold_exp2(-1.0f), 0.5f);
  EXPECT_EQ(fold_exp2(-126.0f), 0x1p-126f);
  EXPECT_EQ(fold_exp2(-127.0f), 0.0f);
  EXPECT_EQ(fold_exp2(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_TRUE(std::isnan(fold_exp2(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Fold, equals_the_softmax_in_doubles) {
  Rng rng(1);
  for (int64_t round = 0; round < count_of("fold_random_groups"); ++round) {
    const int rows = static_cast<int>(rng.between(1, 128));
    const double spread = std::exp2(static_cast<double>(rng.between(-6, 6)));
    std::vector<float> scores;
    std::vector<float> kv;
    PoolPartial partial;
    for (int i = 0; i < rows; ++i) {
      scores.push_back(static_cast<float>((rng.unit() - 0.5) * spread));
      kv.push_back(static_cast<float>(rng.unit() * 2 - 1));
      fold_row(partial, scores.back(), kv.back());
    }
    EXPECT_NEAR(static_cast<double>(pooled_value(partial)), softmax_sum(scores, kv), 1.5e-6);
  }
}

TEST(Fold, two_partials_merge_within_a_millionth) {
  Rng rng(2);
  for (int64_t round = 0; round < count_of("fold_random_groups"); ++round) {
    const int rows = static_cast<int>(rng.between(2, 128));
    const int cut = static_cast<int>(rng.between(0, rows));
    PoolPartial whole;
    PoolPartial parts[2];
    for (int i = 0; i < rows; ++i) {
      const float score = static_cast<float>((rng.unit() - 0.5) * 12);
      const float kv = static_cast<float>(rng.unit() * 2 - 1);
      fold_row(whole, score, kv);
      fold_row(parts[i < cut ? 0 : 1], score, kv);
    }
    const PoolPartial merged = merge_partials(parts[0], parts[1]);
    EXPECT_NEAR(pooled_value(merged), pooled_value(whole), 1e-6f);
    EXPECT_EQ(merged.maximum, whole.maximum);
  }
  PoolPartial some;
  fold_row(some, 0.5f, 2.0f);
  EXPECT_EQ(pooled_value(merge_partials(some, PoolPartial{})), 2.0f) << "nothing adds nothing";
  EXPECT_EQ(pooled_value(merge_partials(PoolPartial{}, some)), 2.0f);
}

TEST(Fold, equal_scores_give_the_plain_mean) {
  PoolPartial partial;
  for (int i = 1; i <= 128; ++i) fold_row(partial, -3.25f, static_cast<float>(i));
  EXPECT_EQ(pooled_value(partial), 64.5f);
}

TEST(Fold, what_is_not_a_number) {
  const float inf = std::numeric_limits<float>::infinity();
  PoolPartial none;
  EXPECT_TRUE(std::isnan(pooled_value(none))) << "no rows";
  PoolPartial weightless;
  fold_row(weightless, -inf, 5.0f);
  EXPECT_TRUE(std::isnan(pooled_value(weightless))) << "no row weighs anything";
  fold_row(weightless, -1000.0f, 7.0f);
  fold_row(weightless, -inf, 5.0f);
  EXPECT_EQ(pooled_value(weightless), 7.0f);
  PoolPartial infinite;
  fold_row(infinite, inf, 1.0f);
  fold_row(infinite, 0.0f, 1.0f);
  EXPECT_TRUE(std::isnan(pooled_value(infinite)));
  for (int which : {0, 1}) {
    PoolPartial spoiled;
    fold_row(spoiled, 0.0f, 1.0f);
    fold_row(spoiled, which == 0 ? NAN : 0.0f, which == 0 ? 1.0f : NAN);
    for (int i = 0; i < 5; ++i) fold_row(spoiled, 100.0f * static_cast<float>(i), 1.0f);
    EXPECT_TRUE(std::isnan(pooled_value(spoiled)));
  }
}

TEST(Fold, the_worked_example_without_overlap) {
  // deepseek-v4 reference 2.13, columns 0 and 1 of the compressor golden, four rows a group.
  const float expected[2][2] = {{1.45563380f, 1.16203406f}, {3.14434789f, 3.51121984f}};
  for (int g = 0; g < 2; ++g) {
    for (int c = 0; c < 2; ++c) {
      PoolPartial partial;
      for (int t = 4 * g; t < 4 * g + 4; ++t) {
        const float bias = static_cast<float>((2 * (t % 4) + c) % 5 - 2) / 4.0f;
        const float score = static_cast<float>((3 * t + 5 * c) % 7 - 3) / 2.0f;
        fold_row(partial, score + bias, 0.5f * static_cast<float>(t + 1) + 0.25f * static_cast<float>(c));
      }
      EXPECT_NEAR(pooled_value(partial), expected[g][c], 1e-6f);
    }
  }
}

TEST(Record, rows_that_nothing_can_need_are_zero) {
  StoreShape shape = shape_of(index_k(4, ElementFormat::kBf16), 20);
  for (int tokens = 1; tokens <= 30; ++tokens) {
    StoreWorld world(shape, 3);
    const StoreTwin twin = cpu_store(best_cpu_isa());
    world.start_all(twin);
    ASSERT_TRUE(world.store(twin, {{0, 0, tokens}}).ok());
    const float* rows = reinterpret_cast<const float*>(world.records.data() + kStateHeaderBytes);
    for (int64_t ring = 0; ring < 8; ++ring) {
      int64_t position = -1;  // the newest token whose place this is
      for (int64_t p = 0; p < tokens; ++p) {
        if (p % 8 == ring) position = p;
      }
      const bool live = position >= state_live_begin(4, tokens);
      const bool current = live && state_keeps_current(position, tokens);
      const float* row = rows + ring * 512;
      for (int half = 0; half < 4; ++half) {
        const bool kept = half % 2 == 0 ? live : current;
        bool zero = true;
        for (int c = 0; c < 128; ++c) zero = zero && row[half * 128 + c] == 0;
        EXPECT_EQ(zero, !kept) << tokens << " tokens, ring row " << ring << ", half " << half;
        if (!kept) continue;
        const std::vector<float>& source = half < 2 ? world.kv : world.gate;
        for (int c = 0; c < 128; ++c) {
          EXPECT_EQ(row[half * 128 + c], source[static_cast<size_t>(position * 256 + half % 2 * 128 + c)]) << "raw, without bias";
        }
      }
    }
  }
}

TEST(Record, what_must_be_shipped_is_small) {
  // Live rows of ratio 4: four before the open group, and the open group's own.
  for (int64_t tokens = 0; tokens < 40; ++tokens) {
    const int64_t live = tokens - state_live_begin(4, tokens);
    EXPECT_EQ(live, tokens < 4 ? tokens : 4 + tokens % 4);
  }
  EXPECT_EQ(state_live_begin(128, 127), 0);
  EXPECT_EQ(state_live_begin(128, 128), 128);
  EXPECT_EQ(boundary_record_bytes(512), 16384);
  EXPECT_EQ(boundary_record_bytes(128), 4096);
}

}  // namespace
}  // namespace needle::testing
