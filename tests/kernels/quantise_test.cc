// The few formats that pages hold, against tables and doubles.
#include "kernels/quantise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/rng.h"
#include "kernels/entry_chain_ref.h"
#include "tests/counts.h"

namespace needle {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kQuietNan = std::numeric_limits<float>::quiet_NaN();

float random_float(Rng& rng) { return float_of_bits(static_cast<uint32_t>(rng.next())); }

TEST(Quantise, every_e4m3_code_is_its_own_nearest) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(float_of_e4m3(static_cast<uint8_t>(code))));
      continue;
    }
    EXPECT_EQ(e4m3_of(float_of_e4m3(static_cast<uint8_t>(code))), code);
  }
  EXPECT_EQ(float_of_e4m3(0x7E), 448.0f);
  EXPECT_EQ(float_of_e4m3(0x01), 0x1p-9f);
  EXPECT_EQ(float_of_e4m3(0x08), 0x1p-6f);
  EXPECT_TRUE(std::signbit(float_of_e4m3(0x80)));
}

TEST(Quantise, e4m3_rounds_ties_to_even_and_saturates) {
  for (int code = 0; code < 0x7E; ++code) {
    const float low = float_of_e4m3(static_cast<uint8_t>(code));
    const float high = float_of_e4m3(static_cast<uint8_t>(code + 1));
    const float middle = (low + high) / 2;
    EXPECT_EQ(e4m3_of(middle), code % 2 == 0 ? code : code + 1) << middle;
    EXPECT_EQ(e4m3_of(std::nextafter(middle, 0.0f)), code);
    EXPECT_EQ(e4m3_of(std::nextafter(middle, kInf)), code + 1);
    EXPECT_EQ(e4m3_of(-middle), 0x80 | e4m3_of(middle));
  }
  for (float large : {448.0f, 449.0f, 1e9f, kInf}) {
    EXPECT_EQ(e4m3_of(large), 0x7E);
    EXPECT_EQ(e4m3_of(-large), 0xFE);
  }
  EXPECT_EQ(e4m3_of(kQuietNan), kE4m3Nan);
  EXPECT_EQ(e4m3_of(-kQuietNan), kE4m3Nan);
  EXPECT_EQ(e4m3_of(-0.0f), 0x80);
}

TEST(Quantise, e2m1_rounds_ties_to_even) {
  const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int code = 0; code < 8; ++code) {
    EXPECT_EQ(float_of_e2m1(static_cast<uint8_t>(code)), values[code]);
    EXPECT_EQ(float_of_e2m1(static_cast<uint8_t>(code | 8)), -values[code]);
    EXPECT_EQ(e2m1_of(values[code]), code);
    if (code == 7) break;
    const float middle = (values[code] + values[code + 1]) / 2;
    EXPECT_EQ(e2m1_of(middle), code % 2 == 0 ? code : code + 1) << middle;
    EXPECT_EQ(e2m1_of(std::nextafter(middle, 0.0f)), code);
    EXPECT_EQ(e2m1_of(std::nextafter(middle, kInf)), code + 1);
  }
  EXPECT_EQ(e2m1_of(0.75f), 2) << "0.75 -> 1.0, as cvt.rn does";
  EXPECT_EQ(e2m1_of(1.75f), 4) << "1.75 -> 2.0";
  EXPECT_EQ(e2m1_of(3.5f), 6) << "3.5 -> 4.0";
  EXPECT_EQ(e2m1_of(kInf), 7);
  EXPECT_EQ(e2m1_of(-0.0f), 8) << "the sign of zero is kept";
  EXPECT_EQ(e2m1_of(kQuietNan), 0);
}

TEST(Quantise, bf16_is_the_nearest_of_the_double) {
  Rng rng(1);
  for (int64_t round = 0; round < testing::count_of("quantise_random_floats"); ++round) {
    const float value = random_float(rng);
    if (!std::isfinite(value)) continue;
    const double nearest = nearest_bf16(static_cast<double>(value));
    EXPECT_EQ(static_cast<double>(round_to_bf16(value)), nearest) << value;
    EXPECT_EQ(float_of_bf16(bf16_of(round_to_bf16(value))), round_to_bf16(value));
  }
  EXPECT_EQ(bf16_of(1.00390625f), 0x3F80) << "a tie goes to even";
  EXPECT_EQ(bf16_of(1.01171875f), 0x3F82);
  EXPECT_EQ(bf16_of(kInf), 0x7F80);
  EXPECT_EQ(bf16_of(3.4e38f), 0x7F80) << "past the largest number lies infinity";
  EXPECT_EQ(bf16_of(kQuietNan), kBf16Nan);
  EXPECT_EQ(bf16_of(float_of_bits(0x7F800001u)), kBf16Nan) << "a signalling NaN does not become infinity";
}

TEST(Quantise, codes_are_the_nearest_of_the_double) {
  Rng rng(2);
  for (int64_t round = 0; round < testing::count_of("quantise_random_floats"); ++round) {
    const float value = static_cast<float>((rng.unit() - 0.5) * std::exp2(static_cast<double>(rng.between(-14, 10))));
    EXPECT_EQ(static_cast<double>(float_of_e4m3(e4m3_of(value))), nearest_e4m3(static_cast<double>(value))) << value;
    EXPECT_EQ(static_cast<double>(float_of_e2m1(e2m1_of(value))), nearest_e2m1(static_cast<double>(value))) << value;
  }
}

TEST(Quantise, ue8m0_rounds_scales_up) {
  const auto byte_of_amax = [](float amax) { return static_cast<int>(fp8_scale_byte(amax)); };
  EXPECT_EQ(byte_of_amax(448), 127);
  EXPECT_EQ(byte_of_amax(449), 128);
  EXPECT_EQ(byte_of_amax(7), 121);
  EXPECT_EQ(byte_of_amax(3.5f), 120);
  EXPECT_EQ(byte_of_amax(1), 119);
  EXPECT_EQ(byte_of_amax(0), 105);
  EXPECT_EQ(byte_of_amax(1e-4f), 105);
  EXPECT_EQ(byte_of_amax(kInf), kUe8m0Nan);
  EXPECT_EQ(byte_of_amax(kQuietNan), kUe8m0Nan);
  EXPECT_TRUE(std::isnan(float_of_ue8m0(kUe8m0Nan)));
  EXPECT_EQ(float_of_ue8m0(127), 1.0f);
  EXPECT_EQ(float_of_ue8m0(0), 0x1p-127f);
  Rng rng(3);
  for (int64_t round = 0; round < testing::count_of("quantise_random_floats"); ++round) {
    const float scale = std::fabs(random_float(rng));
    if (!std::isfinite(scale) || scale < 0x1p-126f || scale > 0x1p127f) continue;
    const float up = float_of_ue8m0(ue8m0_of(scale));
    EXPECT_GE(up, scale);
    EXPECT_LT(up / 2, scale);
  }
}

TEST(Quantise, the_byte_of_an_fp8_block_is_that_of_its_quotient_for_every_mantissa) {
  const auto by_division = [](float amax) { return ue8m0_of((amax > kAmaxFloor ? amax : kAmaxFloor) / kFp8Max); };
  for (uint32_t exponent : {112u, 113u, 127u, 254u}) {  // around the floor, in the middle, the last
    for (uint32_t mantissa = 0; mantissa < (1u << 23); ++mantissa) {
      const float amax = float_of_bits(exponent << 23 | mantissa);
      if (fp8_scale_byte(amax) != by_division(amax)) FAIL() << amax;
    }
  }
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (uint32_t mantissa : {0u, 1u, 0x5FFFFFu, 0x600000u, 0x600001u, 0x7FFFFFu}) {
      const float amax = float_of_bits(exponent << 23 | mantissa);
      EXPECT_EQ(fp8_scale_byte(amax), by_division(amax)) << amax;
    }
  }
}

TEST(Quantise, scales_follow_their_kind) {
  EXPECT_EQ(fp8_scale(ScaleKind::kAmax, 448), 1.0f);
  EXPECT_EQ(fp8_scale(ScaleKind::kAmax, 0), 1e-4f / 448.0f);
  EXPECT_EQ(fp8_scale(ScaleKind::kAmaxReciprocal, 7), 7.0f / 448.0f);
  EXPECT_EQ(fp8_scale(ScaleKind::kPowerOfTwo, 7), 0x1p-6f);
  EXPECT_EQ(fp8_scale(ScaleKind::kPowerOfTwo, 7.001f), 0x1p-5f);
  EXPECT_TRUE(std::isnan(fp8_scale(ScaleKind::kAmax, kInf)));
  EXPECT_EQ(fp4_scale_byte(6), 127);
  EXPECT_EQ(fp4_scale_byte(6.1f), 128);
  EXPECT_EQ(float_of_ue8m0(fp4_scale_byte(0, kRefV4Fp4AmaxFloor)), 0x1p-126f);
}

}  // namespace
}  // namespace needle
