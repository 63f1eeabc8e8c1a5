#include "recall/measures.h"

#include <gtest/gtest.h>

#include <limits>

namespace needle::recall {
namespace {

TEST(ExactLogits, give_the_worked_example) {
  // Two heads, four keys; only the first four dimensions are used (a published worked example of the formula).
  std::vector<float> q(2 * 128, 0.0f);
  std::vector<float> keys(4 * 128, 0.0f);
  const float heads[2][4] = {{1, -.5f, .25f, 2}, {-1, 1, .5f, 0}};
  const float rows[4][4] = {{.5f, 1, 0, .25f}, {1, 0, 2, -1}, {-.5f, .5f, 1, 0}, {0, -1, 0, 1}};
  for (size_t d = 0; d < 4; ++d) {
    for (size_t h = 0; h < 2; ++h) q[h * 128 + d] = heads[h][d];
    for (size_t s = 0; s < 4; ++s) keys[s * 128 + d] = rows[s][d];
  }
  const std::vector<float> weights = {.6f, -.3f};
  const std::vector<double> logits = exact_logits(keys, {q, weights});
  EXPECT_NEAR(logits[0], .15, 1e-7);
  EXPECT_NEAR(logits[1], 0, 1e-7);
  EXPECT_NEAR(logits[2], -.45, 1e-7);
  EXPECT_NEAR(logits[3], 1.5, 1e-7);
  EXPECT_EQ(exact_topk(logits, 2), (std::vector<int32_t>{3, 0}));
  EXPECT_EQ(rank_of(logits, 2), 3);
}

TEST(ExactTopk, ties_go_to_the_lower_position_and_nan_ranks_last) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> logits = {1, nan, 2, 1, -inf, 2};
  EXPECT_EQ(exact_topk(logits, 9), (std::vector<int32_t>{2, 5, 0, 3, 4, 1}));
  EXPECT_EQ(rank_of(logits, 3), 3);
}

TEST(Overlap, counts_members_of_the_reference) {
  EXPECT_DOUBLE_EQ(overlap(std::vector<int32_t>{1, 2, 3}, std::vector<int32_t>{3, 4}), 0.5);
  EXPECT_DOUBLE_EQ(overlap({}, {}), 1.0);
}

TEST(JudgeSelection, lets_near_ties_stand_for_one_another_and_nothing_else) {
  const std::vector<double> logits = {10, 9, 8.0, 8.0 - 1e-6, 1};
  EXPECT_TRUE(judge_selection(std::vector<int32_t>{0, 1, 2}, logits, 3, 4e-6).exact);
  const SelectionVerdict near = judge_selection(std::vector<int32_t>{0, 1, 3}, logits, 3, 4e-6);
  EXPECT_TRUE(near.exact);
  EXPECT_EQ(near.missing, 1);
  const SelectionVerdict wrong = judge_selection(std::vector<int32_t>{0, 2, 3}, logits, 3, 4e-6);
  EXPECT_FALSE(wrong.exact);
  EXPECT_EQ(wrong.beyond_tolerance, 1);
  EXPECT_NEAR(wrong.worst_gap, (9 - (8 - 1e-6)) / 8, 1e-12);
}

TEST(JudgeSelection, reports_foreign_repeated_and_too_few_entries) {
  const std::vector<double> logits = {3, 2, 1};
  EXPECT_EQ(judge_selection(std::vector<int32_t>{0, 7}, logits, 2, 0).foreign, 1);
  EXPECT_EQ(judge_selection(std::vector<int32_t>{0, 0}, logits, 2, 0).foreign, 1);
  const SelectionVerdict few = judge_selection(std::vector<int32_t>{0}, logits, 2, 1);
  EXPECT_EQ(few.wrong_count, -1);
  EXPECT_FALSE(few.exact);
  EXPECT_FALSE(judge_selection({}, logits, 2, 1).exact);
}

}  // namespace
}  // namespace needle::recall
