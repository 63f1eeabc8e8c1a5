// The battery of prepare_index_q: every case that a twin must pass.
//
// What must stay true: as store_battery.h's; numbers against the reference, repeats and threads byte for byte.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/rng.h"
#include "kernels/prepare_index_q.h"
#include "tests/counts.h"
#include "tests/kernels/stored_values.h"

namespace needle::testing {

struct PrepareTwin {
  std::string name;
  bool refuses_bad_positions = true;  // a device twin gives that token NaN weights instead
  std::function<absl::Status(const PrepareIndexQArgs& args, int threads)> run;
};

struct PrepareCase {
  const char* name;
  void (*run)(const PrepareTwin& twin);
};

struct PrepareShape {
  QueryElement element = QueryElement::kBf16;
  ScaleKind scale = ScaleKind::kNone;
  RopeStyle rope = RopeStyle::kInterleavedLast64;
  bool hadamard = true;
  RoundingMode rounding = RoundingMode::kOnce;
  RowElement rows = RowElement::kBf16;
  int tokens = 5;
  int heads = 64;
};

inline std::string describe(const PrepareShape& shape) {
  return "element " + std::to_string(static_cast<int>(shape.element)) + " scale " + name_of(shape.scale) + " rope " + name_of(shape.rope) +
         " hadamard " + std::to_string(shape.hadamard) + " rounding " + std::to_string(static_cast<int>(shape.rounding)) + " heads " +
         std::to_string(shape.heads);
}

class PrepareWorld {
 public:
  PrepareWorld(const PrepareShape& wanted, uint64_t seed) : shape(wanted) {
    Rng rng(seed);
    const auto normal = [&rng] { return static_cast<float>(rng.unit() + rng.unit() + rng.unit() + rng.unit() - 2) * 1.7f; };
    q_stride = shape.heads * kIndexHeadDim + 16;
    weight_stride = shape.heads + 3;
    q.assign(static_cast<size_t>(shape.tokens * q_stride), std::numeric_limits<float>::quiet_NaN());
    weights.assign(static_cast<size_t>(shape.tokens * weight_stride), std::numeric_limits<float>::quiet_NaN());
    for (int token = 0; token < shape.tokens; ++token) {
      for (int i = 0; i < shape.heads * kIndexHeadDim; ++i) q[static_cast<size_t>(token * q_stride + i)] = round_to_bf16(normal());
      for (int head = 0; head < shape.heads; ++head) weights[static_cast<size_t>(token * weight_stride + head)] = round_to_bf16(normal());
      positions.push_back(rng.between(0, kPositions - 1));
    }
    float frequencies[kRopePairs];
    EXPECT_TRUE(rope_inverse_frequencies({160000, 16, 65536, 32, 1}, frequencies).ok());
    table.resize(kPositions * kRopeDims);
    CallerThread alone;
    EXPECT_TRUE(build_rope_table(frequencies, 0, kPositions, table.data(), alone).ok());
  }

  PrepareIndexQArgs args() {
    PrepareIndexQArgs result;
    result.component.kind = ComponentKind::kIndexK;
    result.component.layers = 1;
    result.component.ratio = 4;
    result.component.head_dim = 128;
    result.component.rope = shape.rope;
    result.component.hadamard = shape.hadamard;
    result.rope = {table.data(), kPositions};
    result.rounding = shape.rounding;
    if (shape.rows == RowElement::kBf16) {
      narrow_q.clear();
      narrow_weights.clear();
      for (float value : q) narrow_q.push_back(bf16_of(value));
      for (float value : weights) narrow_weights.push_back(bf16_of(value));
      result.q = {narrow_q.data(), q_stride, RowElement::kBf16};
      result.raw_weights = {narrow_weights.data(), weight_stride, RowElement::kBf16};
    } else {
      result.q = {q.data(), q_stride, RowElement::kFp32};
      result.raw_weights = {weights.data(), weight_stride, RowElement::kFp32};
    }
    result.positions = positions.data();
    result.tokens = shape.tokens;
    result.heads = shape.heads;
    result.element = shape.element;
    result.scale = shape.scale;
    const size_t rows = static_cast<size_t>(shape.tokens * shape.heads);
    out_q.assign(rows * head_bytes(), std::byte{0xCC});
    out_scale.assign(rows * 4, 0xCC);
    out_weights.assign(rows, -777.0f);
    result.out_q = out_q.data();
    result.out_q_scale = out_scale.data();
    result.out_weights = out_weights.data();
    result.report = &report;
    return result;
  }

  size_t head_bytes() const { return shape.element == QueryElement::kBf16 ? 256 : shape.element == QueryElement::kFp8 ? 128 : 64; }

  // Row token x heads + head as numbers. fp8's scale is in the weight alone, so it is divided out of it.
  StoredRow head(size_t row, const std::vector<float>& before) {
    Component component;
    component.kind = ComponentKind::kIndexK;
    component.element = shape.element == QueryElement::kBf16  ? ElementFormat::kBf16
                        : shape.element == QueryElement::kFp8 ? ElementFormat::kFp8
                                                              : ElementFormat::kFp4;
    const std::byte* scale = reinterpret_cast<const std::byte*>(out_scale.data() + 4 * row);
    float folded = 0;
    if (shape.element == QueryElement::kFp8) {
      const size_t at =
          row / static_cast<size_t>(shape.heads) * static_cast<size_t>(weight_stride) + row % static_cast<size_t>(shape.heads);
      folded =
          static_cast<float>(static_cast<double>(out_weights[row]) * std::sqrt(128.0 * shape.heads) / static_cast<double>(weights[at]));
      scale = reinterpret_cast<const std::byte*>(&folded);
    }
    return read_stored(component, shape.rounding, out_q.data() + row * head_bytes(), scale, before);
  }

  // What the reference would store in fp32, by hand in doubles: the definition once more, apart from every twin.
  std::vector<float> by_hand(size_t row) const {
    const size_t token = row / static_cast<size_t>(shape.heads);
    const size_t from = token * static_cast<size_t>(q_stride) + row % static_cast<size_t>(shape.heads) * kIndexHeadDim;
    std::vector<double> x(q.begin() + static_cast<int64_t>(from), q.begin() + static_cast<int64_t>(from) + kIndexHeadDim);
    const auto round_stage = [&] {
      for (double& value : x) {
        if (shape.rounding == RoundingMode::kRefV4) value = static_cast<double>(round_to_bf16(static_cast<float>(value)));
      }
    };
    if (shape.rope != RopeStyle::kNone) {
      for (int i = 0; i < 32; ++i) {
        const size_t first = static_cast<size_t>(shape.rope == RopeStyle::kInterleavedLast64 ? 64 + 2 * i : i);
        const size_t second = shape.rope == RopeStyle::kInterleavedLast64 ? first + 1 : first + 32;
        const double cosine = static_cast<double>(table[static_cast<size_t>(positions[token] * 64 + 2 * i)]);
        const double sine = static_cast<double>(table[static_cast<size_t>(positions[token] * 64 + 2 * i + 1)]);
        const double a = x[first];
        const double b = x[second];
        x[first] = a * cosine - b * sine;
        x[second] = a * sine + b * cosine;
      }
      round_stage();
    }
    if (shape.hadamard) {
      std::vector<double> rotated(128, 0.0);
      for (unsigned i = 0; i < 128; ++i) {
        for (unsigned j = 0; j < 128; ++j) rotated[i] += (__builtin_popcount(i & j) % 2 == 0 ? x[j] : -x[j]) / std::sqrt(128.0);
      }
      x = rotated;
      round_stage();
    }
    std::vector<float> result(x.begin(), x.end());
    if (shape.rounding == RoundingMode::kVllm) {
      for (float& value : result) value = round_to_bf16(value);
    }
    return result;
  }

  static constexpr int64_t kPositions = 4096;
  PrepareShape shape;
  int64_t q_stride = 0;
  int64_t weight_stride = 0;
  std::vector<float> q;
  std::vector<float> weights;
  std::vector<uint16_t> narrow_q;
  std::vector<uint16_t> narrow_weights;
  std::vector<int64_t> positions;
  std::vector<float> table;
  std::vector<std::byte> out_q;
  std::vector<uint8_t> out_scale;
  std::vector<float> out_weights;
  OpReport report = {};
};

inline std::vector<PrepareShape> all_prepare_shapes() {
  std::vector<PrepareShape> shapes;
  const std::vector<std::pair<QueryElement, ScaleKind>> kinds = {{QueryElement::kBf16, ScaleKind::kNone},
                                                                 {QueryElement::kFp8, ScaleKind::kAmax},
                                                                 {QueryElement::kFp8, ScaleKind::kAmaxReciprocal},
                                                                 {QueryElement::kFp8, ScaleKind::kPowerOfTwo},
                                                                 {QueryElement::kFp4, ScaleKind::kPowerOfTwo}};
  for (const auto& [element, scale] : kinds) {
    for (RopeStyle rope : {RopeStyle::kNone, RopeStyle::kInterleavedLast64, RopeStyle::kHalfSplitFirst64}) {
      for (bool hadamard : {false, true}) {
        for (RoundingMode rounding : {RoundingMode::kOnce, RoundingMode::kRefV4, RoundingMode::kVllm}) {
          if (rounding == RoundingMode::kVllm && element == QueryElement::kFp8 && scale != ScaleKind::kPowerOfTwo) continue;
          PrepareShape shape;
          shape.element = element;
          shape.scale = scale;
          shape.rope = rope;
          shape.hadamard = hadamard;
          shape.rounding = rounding;
          shape.rows = hadamard ? RowElement::kBf16 : RowElement::kFp32;
          shape.heads = hadamard ? 12 : 5;
          shapes.push_back(shape);
        }
      }
    }
  }
  return shapes;
}

inline void queries_lie_within_half_a_step(const PrepareTwin& twin) {
  for (const PrepareShape& shape : all_prepare_shapes()) {
    PrepareWorld world(shape, 1);
    const absl::Status status = twin.run(world.args(), 1);
    ASSERT_TRUE(status.ok()) << describe(shape) << ": " << status;
    EXPECT_EQ(world.report.status, 0u);
    int64_t values = 0;
    int64_t beyond = 0;
    for (size_t row = 0; row < world.out_weights.size(); ++row) {
      const std::vector<float> expected = world.by_hand(row);
      const StoredRow stored = world.head(row, expected);
      float largest = 0;
      for (float value : expected) largest = std::max(largest, std::fabs(value));
      for (size_t c = 0; c < 128; ++c) {
        const double error = std::fabs(stored.values[c] - static_cast<double>(expected[c]));
        const double allowed = 0.5 * stored.steps[c] + 4e-6 * static_cast<double>(largest);
        ++values;
        if (error <= allowed) continue;
        ++beyond;
        EXPECT_LE(error, allowed + 2 * stored.steps[c]) << describe(shape) << " row " << row << " channel " << c;
      }
    }
    EXPECT_LE(beyond * 100, shape.rounding == RoundingMode::kOnce ? 0 : values) << describe(shape);
  }
}

inline void weights_carry_both_factors_and_fp8s_scale_alone(const PrepareTwin& twin) {
  for (int heads : {1, 2, 8, 32, 64, 100, 128}) {
    for (QueryElement element : {QueryElement::kBf16, QueryElement::kFp8, QueryElement::kFp4}) {
      PrepareShape shape;
      shape.heads = heads;
      shape.tokens = 3;
      shape.element = element;
      shape.scale = element == QueryElement::kBf16  ? ScaleKind::kNone
                    : element == QueryElement::kFp8 ? ScaleKind::kAmax
                                                    : ScaleKind::kPowerOfTwo;
      PrepareWorld world(shape, 2);
      ASSERT_TRUE(twin.run(world.args(), 1).ok());
      for (size_t row = 0; row < world.out_weights.size(); ++row) {
        const size_t at = row / static_cast<size_t>(heads) * static_cast<size_t>(world.weight_stride) + row % static_cast<size_t>(heads);
        double expected = static_cast<double>(world.weights[at]) / std::sqrt(128.0) / std::sqrt(static_cast<double>(heads));
        if (element == QueryElement::kFp8) {
          double amax = 0;
          for (float value : world.by_hand(row)) amax = std::max(amax, static_cast<double>(std::fabs(value)));
          expected *= std::max(amax, 1e-4) / 448;
        }
        EXPECT_NEAR(world.out_weights[row], expected, 1e-6 * std::fabs(expected)) << describe(shape);
      }
    }
  }
  EXPECT_EQ(index_weight_factor(64), 0.011048543456039806f);
}

inline void rotation_on_both_sides_leaves_the_dot_product(const PrepareTwin& twin) {
  // The same vector as query 0 and query 1: their dot product is the same with and without rotation, at equal positions.
  double dots[2];
  for (bool hadamard : {false, true}) {
    PrepareShape shape;
    shape.hadamard = hadamard;
    shape.heads = 1;
    shape.tokens = 2;
    PrepareWorld world(shape, 3);
    world.positions = {77, 77};
    ASSERT_TRUE(twin.run(world.args(), 1).ok());
    const StoredRow one = world.head(0, {});
    const StoredRow other = world.head(1, {});
    double dot = 0;
    for (size_t c = 0; c < 128; ++c) dot += one.values[c] * other.values[c];
    dots[hadamard] = dot;
  }
  EXPECT_NEAR(dots[0], dots[1], 0.25) << "bf16 rounding alone lies between the two";
}

inline void queries_do_not_depend_on_neighbours_threads_or_repeats(const PrepareTwin& twin) {
  for (const PrepareShape& each : all_prepare_shapes()) {
    PrepareShape shape = each;
    shape.tokens = 7;
    PrepareWorld first(shape, 4);
    ASSERT_TRUE(twin.run(first.args(), 1).ok());
    for (int threads : {1, 3}) {
      PrepareWorld again(shape, 4);
      ASSERT_TRUE(twin.run(again.args(), threads).ok());
      EXPECT_TRUE(first.out_q == again.out_q);
      EXPECT_TRUE(first.out_weights == again.out_weights);
      EXPECT_TRUE(first.out_scale == again.out_scale);
    }
    PrepareWorld alone(shape, 4);
    PrepareIndexQArgs args = alone.args();
    args.q.data = static_cast<const std::byte*>(args.q.data) + 3 * alone.q_stride * (shape.rows == RowElement::kBf16 ? 2 : 4);
    args.raw_weights.data =
        static_cast<const std::byte*>(args.raw_weights.data) + 3 * alone.weight_stride * (shape.rows == RowElement::kBf16 ? 2 : 4);
    args.positions += 3;
    args.tokens = 1;
    ASSERT_TRUE(twin.run(args, 1).ok());
    const size_t heads = static_cast<size_t>(shape.heads);
    EXPECT_EQ(std::memcmp(alone.out_q.data(), first.out_q.data() + 3 * heads * first.head_bytes(), heads * first.head_bytes()), 0);
    EXPECT_TRUE(
        std::equal(alone.out_weights.begin(), alone.out_weights.begin() + shape.heads, first.out_weights.begin() + 3 * shape.heads));
  }
}

inline void a_query_that_is_not_a_number_never_looks_like_one(const PrepareTwin& twin) {
  for (const PrepareShape& each : all_prepare_shapes()) {
    if (!each.hadamard) continue;
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      PrepareWorld good(each, 5);
      PrepareWorld world(each, 5);
      world.q[static_cast<size_t>(world.q_stride + 2 * kIndexHeadDim + 100)] = bad;  // token 1, head 2
      ASSERT_TRUE(twin.run(good.args(), 1).ok());
      ASSERT_TRUE(twin.run(world.args(), 1).ok());
      const size_t victim = static_cast<size_t>(each.heads) + 2;
      for (size_t row = 0; row < world.out_weights.size(); ++row) {
        if (row != victim) {
          ASSERT_EQ(
              std::memcmp(world.out_q.data() + row * world.head_bytes(), good.out_q.data() + row * world.head_bytes(), world.head_bytes()),
              0);
          continue;
        }
        const StoredRow stored = world.head(row, world.by_hand(row));
        if (each.element == QueryElement::kBf16 && each.rounding != RoundingMode::kRefV4) {
          for (double value : stored.values) EXPECT_FALSE(std::isfinite(value)) << describe(each);
        } else {
          for (double value : stored.values) EXPECT_TRUE(std::isnan(value)) << describe(each);
        }
      }
    }
  }
}

inline void a_position_outside_the_table_gives_no_score(const PrepareTwin& twin) {
  for (int64_t bad : {int64_t{-1}, PrepareWorld::kPositions, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    PrepareWorld world(PrepareShape{}, 6);
    world.positions[2] = bad;
    const absl::Status status = twin.run(world.args(), 1);
    if (twin.refuses_bad_positions) {
      EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
      for (float weight : world.out_weights) EXPECT_EQ(weight, -777.0f) << "nothing was written";
      continue;
    }
    ASSERT_TRUE(status.ok());
    EXPECT_EQ(world.report.status, uint32_t{kStatusBadPosition});
    EXPECT_EQ(world.report.skipped_rows, 1u);
    for (size_t head = 0; head < 64; ++head) {
      EXPECT_TRUE(std::isnan(world.out_weights[2 * 64 + head]));
      EXPECT_FALSE(std::isnan(world.out_weights[3 * 64 + head]));
    }
  }
}

inline void wrong_query_arguments_are_named(const PrepareTwin& twin) {
  const auto refused = [&](const char* what, const std::function<void(PrepareIndexQArgs&)>& spoil) {
    PrepareWorld world(PrepareShape{}, 7);
    PrepareIndexQArgs args = world.args();
    spoil(args);
    EXPECT_EQ(twin.run(args, 1).code(), absl::StatusCode::kInvalidArgument) << what;
    EXPECT_EQ(world.out_weights[0], -777.0f);
  };
  refused("no heads", [](PrepareIndexQArgs& a) { a.heads = 0; });
  refused("too many heads", [](PrepareIndexQArgs& a) { a.heads = 129; });
  refused("main KV", [](PrepareIndexQArgs& a) { a.component.kind = ComponentKind::kMainKv; });
  refused("no q", [](PrepareIndexQArgs& a) { a.q.data = nullptr; });
  refused("a short row", [](PrepareIndexQArgs& a) { a.q.row_stride = 64 * 128 - 1; });
  refused("no weights", [](PrepareIndexQArgs& a) { a.raw_weights.data = nullptr; });
  refused("no positions", [](PrepareIndexQArgs& a) { a.positions = nullptr; });
  refused("no table", [](PrepareIndexQArgs& a) { a.rope = {}; });
  refused("no output", [](PrepareIndexQArgs& a) { a.out_q = nullptr; });
  refused("no report", [](PrepareIndexQArgs& a) { a.report = nullptr; });
  refused("bf16 with a scale", [](PrepareIndexQArgs& a) { a.scale = ScaleKind::kAmax; });
  refused("fp4 without a place for its scales", [](PrepareIndexQArgs& a) {
    a.element = QueryElement::kFp4;
    a.scale = ScaleKind::kPowerOfTwo;
    a.out_q_scale = nullptr;
  });
  refused("vLLM's fp8 with a plain scale", [](PrepareIndexQArgs& a) {
    a.element = QueryElement::kFp8;
    a.scale = ScaleKind::kAmax;
    a.rounding = RoundingMode::kVllm;
  });
  PrepareWorld world(PrepareShape{}, 7);
  PrepareIndexQArgs none = world.args();
  none.tokens = 0;
  EXPECT_TRUE(twin.run(none, 1).ok()) << "an empty batch is no error";
}

inline const std::vector<PrepareCase>& prepare_cases() {
#define NEEDLE_CASE(name) \
  { #name, name }
  static const std::vector<PrepareCase> kCases = {
      NEEDLE_CASE(queries_lie_within_half_a_step),
      NEEDLE_CASE(weights_carry_both_factors_and_fp8s_scale_alone),
      NEEDLE_CASE(rotation_on_both_sides_leaves_the_dot_product),
      NEEDLE_CASE(queries_do_not_depend_on_neighbours_threads_or_repeats),
      NEEDLE_CASE(a_query_that_is_not_a_number_never_looks_like_one),
      NEEDLE_CASE(a_position_outside_the_table_gives_no_score),
      NEEDLE_CASE(wrong_query_arguments_are_named),
  };
#undef NEEDLE_CASE
  return kCases;
}

}  // namespace needle::testing
