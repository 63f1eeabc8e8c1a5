// RoPE tables against the published numbers and the golden files' own frequencies.
#include "kernels/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/kernels/safetensors.h"

namespace needle {
namespace {

constexpr RopeParameters kCompressed = {160000, 16, 65536, 32, 1};

struct Pair {
  float cosine;
  float sine;
};

Pair at(const RopeParameters& parameters, int64_t position, int i) {
  float frequencies[kRopePairs];
  EXPECT_TRUE(rope_inverse_frequencies(parameters, frequencies).ok());
  float row[kRopeDims];
  CallerThread alone;
  EXPECT_TRUE(build_rope_table(frequencies, position, 1, row, alone).ok());
  return {row[2 * i], row[2 * i + 1]};
}

TEST(Rope, inverse_frequencies_with_and_without_yarn) {
  float frequencies[kRopePairs];
  ASSERT_TRUE(rope_inverse_frequencies(kCompressed, frequencies).ok());
  const std::vector<std::pair<int, double>> expected = {
      {0, 1.0},          {1, 0.6876560219},    {8, 0.05},           {15, 3.635538584e-3}, {16, 2.265625e-3}, {20, 2.969777783e-4},
      {24, 1.953125e-5}, {25, 5.372312671e-6}, {31, 5.680529037e-7}};
  for (const auto& [i, value] : expected) EXPECT_NEAR(static_cast<double>(frequencies[i]) / value, 1.0, 3e-7) << i;
  ASSERT_TRUE(rope_inverse_frequencies({160000}, frequencies).ok());
  EXPECT_NEAR(frequencies[16], 2.5e-3, 1e-9) << "without YaRN";
  ASSERT_TRUE(rope_inverse_frequencies({10000}, frequencies).ok());
  EXPECT_NEAR(frequencies[1], 0.7498942093, 1e-7);
  EXPECT_NEAR(frequencies[16], 0.01, 1e-9);
  EXPECT_NEAR(frequencies[31], 1.333521432e-4, 1e-11);
}

TEST(Rope, cos_and_sin_are_those_of_the_fp32_angle) {
  EXPECT_NEAR(at(kCompressed, 4, 0).cosine, -0.6536436f, 1e-6);
  EXPECT_NEAR(at(kCompressed, 4, 0).sine, -0.7568025f, 1e-6);
  EXPECT_NEAR(at(kCompressed, 4, 1).cosine, -0.9245404f, 1e-6);
  EXPECT_NEAR(at(kCompressed, 4, 16).sine, 0.0090624f, 1e-6);
  EXPECT_NEAR(at(kCompressed, 1000, 16).cosine, -0.6402538f, 4e-5);
  EXPECT_NEAR(at(kCompressed, 65536, 31).sine, 0.0372193f, 1e-6);
  EXPECT_NEAR(at(kCompressed, 524284, 31).cosine, 0.9559781f, 4e-5);
  // The fp32 angle, not the exact one: exact cosines are -0.9384196, -0.9960..., -0.5246689.
  EXPECT_NEAR(at(kCompressed, 1000, 1).cosine, -0.9384351f, 2e-6);
  EXPECT_NEAR(at(kCompressed, 65536, 1).cosine, -0.9968060f, 2e-6);
  EXPECT_NEAR(at(kCompressed, 524284, 1).cosine, -0.5138183f, 2e-6);
}

TEST(Rope, frequencies_equal_those_of_the_golden_files) {
  const absl::StatusOr<std::vector<testing::SafetensorsFile>> files = testing::read_golden();
  ASSERT_TRUE(files.ok()) << files.status();
  int checked = 0;
  for (const testing::SafetensorsFile& file : *files) {
    for (const auto& [name, tensor] : file.tensors) {
      if (name.find("inv_freq") == std::string::npos) continue;
      const std::vector<float> golden = tensor.floats();
      ASSERT_EQ(golden.size(), size_t{kRopePairs});
      // Which table it is shows in its numbers: theta from the second, YaRN from the last.
      bool found = false;
      for (const RopeParameters& parameters : {RopeParameters{10000}, RopeParameters{160000}, kCompressed}) {
        float ours[kRopePairs];
        ASSERT_TRUE(rope_inverse_frequencies(parameters, ours).ok());
        found = found || std::equal(golden.begin(), golden.end(), ours);
      }
      EXPECT_TRUE(found) << file.name << " " << name << " equals none of the family's three tables bit for bit";
      ++checked;
    }
  }
  EXPECT_GT(checked, 0);
}

TEST(Rope, a_table_does_not_depend_on_threads_or_on_where_it_is_cut) {
  float frequencies[kRopePairs];
  ASSERT_TRUE(rope_inverse_frequencies(kCompressed, frequencies).ok());
  std::vector<float> whole(3000 * kRopeDims);
  std::vector<float> cut(3000 * kRopeDims);
  CallerThread alone;
  WorkerThreads three(3);
  ASSERT_TRUE(build_rope_table(frequencies, 0, 3000, whole.data(), three).ok());
  ASSERT_TRUE(build_rope_table(frequencies, 0, 1111, cut.data(), alone).ok());
  ASSERT_TRUE(build_rope_table(frequencies, 1111, 3000 - 1111, cut.data() + 1111 * kRopeDims, alone).ok());
  EXPECT_TRUE(whole == cut);
  EXPECT_EQ(rope_table_bytes(3000), 3000 * 256);
}

TEST(Rope, impossible_parameters_are_named) {
  float frequencies[kRopePairs];
  EXPECT_EQ(rope_inverse_frequencies({0.5}, frequencies).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(rope_inverse_frequencies({160000, 16, 65536, 1, 32}, frequencies).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(rope_inverse_frequencies({10000}, frequencies).ok());
  float row[kRopeDims];
  CallerThread alone;
  EXPECT_EQ(build_rope_table(frequencies, kRopePositionsMax, 1, row, alone).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(build_rope_table(frequencies, -1, 1, row, alone).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(build_rope_table(frequencies, 0, 1, nullptr, alone).code(), absl::StatusCode::kInvalidArgument);
}

TEST(Rope, pairs_lie_where_each_style_says) {
  EXPECT_EQ(rope_pair(RopeStyle::kInterleavedLast64, 128, 0).first, 64);
  EXPECT_EQ(rope_pair(RopeStyle::kInterleavedLast64, 512, 31).second, 511);
  EXPECT_EQ(rope_pair(RopeStyle::kHalfSplitFirst64, 128, 3).first, 3);
  EXPECT_EQ(rope_pair(RopeStyle::kHalfSplitFirst64, 128, 3).second, 35);
}

}  // namespace
}  // namespace needle
