// The reference itself, against numbers worked out by hand. Every other twin is then held against the reference.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/index_logits.h"
#include "kernels/quantise.h"

namespace needle {
namespace {

uint16_t bf16(float value) { return static_cast<uint16_t>(bits_of(value) >> 16); }  // exact: all values used here fit

// One sequence of four keys, one query of two heads; the first four dimensions count, the rest are zero.
class WorkedExample : public ::testing::Test {
 protected:
  WorkedExample() {
    const float keys[4][4] = {{.5f, 1, 0, .25f}, {1, 0, 2, -1}, {-.5f, .5f, 1, 0}, {0, -1, 0, 1}};
    const float queries[2][4] = {{1, -.5f, .25f, 2}, {-1, 1, .5f, 0}};
    for (int s = 0; s < 4; ++s) {
      for (int d = 0; d < 4; ++d) pool_[s][d] = bf16(keys[s][d]);
    }
    for (int h = 0; h < 2; ++h) {
      for (int d = 0; d < 4; ++d) q_[h][d] = bf16(queries[h][d]);
    }
    args_.keys.base = reinterpret_cast<const std::byte*>(pool_);
    args_.keys.page_stride = sizeof pool_;
    args_.keys.page_count = 1;
    args_.keys.slots_per_page = 64;
    args_.keys.head_dim = kIndexHeadDim;
    args_.pages.pages = pages_;
    args_.pages.row_stride = 1;
    args_.pages.pages_per_row = 1;
    args_.pages.rows = 1;
    args_.q = q_;
    args_.head_weights = weights_;
    args_.visible = &visible_;
    args_.query_count = 1;
    args_.heads = 2;
    args_.entry_count = 64;
    args_.scores = scores_;
    args_.score_stride = 64;
    args_.report = &report_;
  }

  alignas(256) uint16_t pool_[64][kIndexHeadDim] = {};
  uint16_t q_[2][kIndexHeadDim] = {};
  float weights_[2] = {.6f, -.3f};
  int32_t pages_[1] = {0};
  int32_t visible_ = 4;
  float scores_[64] = {};
  OpReport report_ = {};
  IndexLogitsArgs args_;
};

TEST_F(WorkedExample, a_negative_weight_ranks_the_best_match_of_its_head_last) {
  ASSERT_TRUE(index_logits_ref(args_).ok());
  EXPECT_FLOAT_EQ(scores_[0], .15f);
  EXPECT_EQ(scores_[1], 0.0f);
  EXPECT_FLOAT_EQ(scores_[2], -.45f);
  EXPECT_FLOAT_EQ(scores_[3], 1.5f);
  EXPECT_EQ(report_.status, 0u);
}

TEST_F(WorkedExample, relu_comes_before_the_weight) {
  weights_[0] = -.6f;
  ASSERT_TRUE(index_logits_ref(args_).ok());
  EXPECT_FLOAT_EQ(scores_[3], -1.5f);  // head 0: -.6 x relu(2.5); head 1: relu(-1) = 0
}

TEST_F(WorkedExample, flushing_takes_denormal_inputs_and_results_as_zero) {
  weights_[0] = 1.0f;
  weights_[1] = 0.0f;
  std::memset(pool_, 0, sizeof pool_);
  std::memset(q_, 0, sizeof q_);
  q_[0][0] = bf16(0x1.0p100f);
  pool_[0][0] = 0x0001;             // 2^-133, a denormal input
  pool_[1][0] = bf16(0x1.0p-126f);  // the smallest normal one
  q_[0][1] = bf16(0x1.0p-70f);
  pool_[2][1] = bf16(0x1.0p-70f);  // a denormal product
  ASSERT_TRUE(index_logits_ref(args_).ok());
  EXPECT_EQ(scores_[0], 0x1.0p-33f);
  EXPECT_EQ(scores_[1], 0x1.0p-26f);
  EXPECT_EQ(scores_[2], 0x1.0p-140f);
  ASSERT_TRUE(index_logits_ref(args_, /*flush_denormals=*/true).ok());
  EXPECT_EQ(scores_[0], 0.0f);
  EXPECT_EQ(scores_[1], 0x1.0p-26f);
  EXPECT_EQ(scores_[2], 0.0f);
}

TEST_F(WorkedExample, refuses_what_it_cannot_score_and_names_value_and_limit) {
  const auto refused = [&](auto change, const char* words) {
    IndexLogitsArgs args = args_;
    change(args);
    scores_[0] = 77.0f;
    const absl::Status status = index_logits_ref(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_NE(status.ToString().find(words), std::string::npos) << status;
    EXPECT_EQ(scores_[0], 77.0f) << "something was written before the refusal: " << words;
  };
  refused([](IndexLogitsArgs& args) { args.heads = 0; }, "heads is 0; it must be 1..128");
  refused([](IndexLogitsArgs& args) { args.heads = 129; }, "heads is 129; it must be 1..128");
  refused([](IndexLogitsArgs& args) { args.keys.head_dim = 64; }, "head_dim is 64");
  refused([](IndexLogitsArgs& args) { args.keys.element = ElementFormat::kFp8DsMla; }, "element format is 3");
  refused([](IndexLogitsArgs& args) { args.keys.slots_per_page = 0; }, "slots_per_page is 0");
  refused([](IndexLogitsArgs& args) { args.keys.page_stride = 16128; }, "page_stride is 16128; a layer's part of a page takes 16384");
  refused([](IndexLogitsArgs& args) { args.keys.page_stride = 16384 + 128; }, "multiple of 256");
  refused([](IndexLogitsArgs& args) { args.keys.base += 128; }, "keys.base modulo 256 is 128");
  refused([](IndexLogitsArgs& args) { args.keys.base = nullptr; }, "keys.base");
  refused([](IndexLogitsArgs& args) { args.keys.page_count = -1; }, "page_count is -1");
  refused([](IndexLogitsArgs& args) { args.keys.page_count = int64_t{1} << 31; }, "page_count is 2147483648");
  refused([](IndexLogitsArgs& args) { args.keys.page_stride = int64_t{1} << 62, args.keys.page_count = 3; }, "exceeds 63 bits");
  refused([](IndexLogitsArgs& args) { args.q_element = static_cast<QueryElement>(9); }, "q_element is 9");
  refused([](IndexLogitsArgs& args) { args.q_element = QueryElement::kFp4; }, "q_scale");
  refused([](IndexLogitsArgs& args) { args.query_count = -1; }, "query_count is -1");
  refused([](IndexLogitsArgs& args) { args.query_count = 2; }, "2 queries at 1 a row need more rows");
  refused([](IndexLogitsArgs& args) { args.queries_per_row = 0; }, "queries_per_row is 0");
  refused([](IndexLogitsArgs& args) { args.queries_per_row = 9; }, "queries_per_row is 9");
  refused([](IndexLogitsArgs& args) { args.entry_begin = 32; }, "entry_begin is 32");
  refused([](IndexLogitsArgs& args) { args.entry_begin = -64; }, "entry_begin is -64");
  refused([](IndexLogitsArgs& args) { args.entry_count = -1; }, "entry_count is -1");
  refused([](IndexLogitsArgs& args) { args.entry_count = int64_t{1} << 31; }, "entry_count is 2147483648");
  refused([](IndexLogitsArgs& args) { args.score_stride = 63; }, "score_stride is 63");
  refused([](IndexLogitsArgs& args) { args.pages.pages_per_row = 2; }, "pages.row_stride is 1");
  refused([](IndexLogitsArgs& args) { args.pages.rows = -1; }, "pages.rows is -1");
  refused([](IndexLogitsArgs& args) { args.pages.pages = nullptr; }, "pages.pages");
  refused([](IndexLogitsArgs& args) { args.q = nullptr; }, "q is 0");
  refused([](IndexLogitsArgs& args) { args.head_weights = nullptr; }, "head_weights");
  refused([](IndexLogitsArgs& args) { args.visible = nullptr; }, "visible");
  refused([](IndexLogitsArgs& args) { args.scores = nullptr; }, "scores");
}

// Every code of the small formats, from the definition of a floating-point number.
TEST(StoredNumbers, e4m3_is_the_fn_kind) {
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code >> 3) & 15;
    const int mantissa = code & 7;
    const float value = float_of_e4m3(static_cast<uint8_t>(code));
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(value)) << code;
      continue;
    }
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    EXPECT_EQ(static_cast<double>(value), code < 128 ? magnitude : -magnitude) << code;
    EXPECT_EQ(std::signbit(value), code >= 128) << code;
  }
  EXPECT_EQ(float_of_e4m3(0x7E), 448.0f);
}

TEST(StoredNumbers, e2m1_has_eight_magnitudes_and_a_sign) {
  const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (uint8_t code = 0; code < 16; ++code) {
    EXPECT_EQ(std::fabs(float_of_e2m1(code)), magnitudes[code & 7]) << code;
    EXPECT_EQ(std::signbit(float_of_e2m1(code)), code >= 8) << code;
  }
}

TEST(StoredNumbers, ue8m0_is_a_power_of_two) {
  for (int byte = 0; byte < 255; ++byte) {
    EXPECT_EQ(static_cast<double>(float_of_ue8m0(static_cast<uint8_t>(byte))), std::ldexp(1.0, byte - 127)) << byte;
  }
  EXPECT_TRUE(std::isnan(float_of_ue8m0(255)));
}

}  // namespace
}  // namespace needle
