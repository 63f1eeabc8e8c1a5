#include "recall/needle_cells.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace needle::recall {
namespace {

constexpr int64_t kHaystack = 16384;
constexpr NeedleSpan kNeedle = {573, 589};  // window 4, keys 512..639

TEST(NeedleCell, holds_every_key_once_and_the_needle_where_it_says) {
  for (int64_t tokens : {338, 943, 1850, 4509, 10498, 22597, 65536}) {
    for (double depth : {0.05, 0.5, 0.95}) {
      const int64_t entries = tokens / 4;
      const absl::StatusOr<NeedleCell> cell = make_needle_cell(kHaystack, kNeedle, entries, depth);
      ASSERT_TRUE(cell.ok()) << cell.status();
      ASSERT_EQ(static_cast<int64_t>(cell->source.size()), entries);
      const std::set<int32_t> distinct(cell->source.begin(), cell->source.end());
      EXPECT_EQ(static_cast<int64_t>(distinct.size()), entries);
      EXPECT_LT(*distinct.rbegin(), kHaystack);
      for (int64_t i = kNeedle.start; i < kNeedle.end; ++i) {
        EXPECT_EQ(cell->source[static_cast<size_t>(cell->span.start + i - kNeedle.start)], i);
      }
      if (entries >= kWindowKeys) {
        const auto inserted = static_cast<int64_t>(depth * static_cast<double>(entries - kWindowKeys));
        EXPECT_EQ(cell->span.start, inserted + kNeedle.start % kWindowKeys);
      }
    }
  }
}

TEST(NeedleCell, at_full_length_is_the_haystack_with_one_window_moved) {
  const NeedleCell cell = *make_needle_cell(kHaystack, kNeedle, kHaystack, 0);
  EXPECT_EQ(cell.source[0], 512);
  EXPECT_EQ(cell.source[127], 639);
  EXPECT_EQ(cell.source[128], 0);
  EXPECT_EQ(cell.source[128 + 511], 511);
  EXPECT_EQ(cell.source[128 + 512], 640);
  const NeedleCell last = *make_needle_cell(kHaystack, kNeedle, kHaystack, 1);
  EXPECT_EQ(last.source.back(), 639);
  const NeedleSpan other = find_span(last, {15947, 15963});
  EXPECT_EQ(other.start, 15947 - 128);
}

TEST(NeedleCell, says_when_another_span_was_cut_away) {
  const NeedleCell cell = *make_needle_cell(kHaystack, kNeedle, 235, 0.5);
  const NeedleSpan gone = find_span(cell, {15947, 15963});
  EXPECT_EQ(gone.start, gone.end);
}

TEST(NeedleCell, refuses_what_cannot_be_built) {
  EXPECT_FALSE(make_needle_cell(kHaystack, kNeedle, kHaystack + 1, 0.5).ok());
  EXPECT_FALSE(make_needle_cell(kHaystack, kNeedle, 15, 0.5).ok());
  EXPECT_FALSE(make_needle_cell(kHaystack, {120, 140}, 1000, 0.5).ok()) << "a span across two windows";
  EXPECT_FALSE(make_needle_cell(kHaystack, kNeedle, 1000, 1.5).ok());
  EXPECT_FALSE(make_needle_cell(kHaystack, {5, 5}, 1000, 0.5).ok());
}

}  // namespace
}  // namespace needle::recall
