// Sixteen floats as each CPU instruction set has them, with the few operations that the entry chain needs.
//
// What must stay true:
//  1. The same operation gives the same bits in every set: one rounding an operation, fused where the name says fma,
//     sums in one fixed tree. So a result never says which set made it.
//  2. Every function is inlined into a caller that was compiled for its set (GCC and Clang then accept the intrinsics).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/quantise.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define NEEDLE_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define NEEDLE_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#endif

namespace needle {

inline constexpr int kLanes = 16;

#define NEEDLE_LANE_OP static inline __attribute__((always_inline))

struct PortableLanes {
  struct V {
    float lane[kLanes];
  };
  template <class F>
  NEEDLE_LANE_OP V each(F f) {
    V r;
    for (int i = 0; i < kLanes; ++i) r.lane[i] = f(i);
    return r;
  }
  NEEDLE_LANE_OP V broadcast(float x) {
    return each([&](int) { return x; });
  }
  NEEDLE_LANE_OP V load(const float* from) {
    V r;
    std::memcpy(&r, from, sizeof(r));
    return r;
  }
  NEEDLE_LANE_OP void store(float* to, V a) { std::memcpy(to, &a, sizeof(a)); }
  NEEDLE_LANE_OP V load_bf16(const uint16_t* from) {
    return each([&](int i) { return float_of_bf16(from[i]); });
  }
  NEEDLE_LANE_OP void store_bf16(uint16_t* to, V a) {
    for (int i = 0; i < kLanes; ++i) to[i] = bf16_of(a.lane[i]);
  }
  NEEDLE_LANE_OP V round_bf16(V a) {
    return each([&](int i) { return round_to_bf16(a.lane[i]); });
  }
  NEEDLE_LANE_OP void store_e4m3(uint8_t* to, V a) {
    for (int i = 0; i < kLanes; ++i) to[i] = e4m3_of(a.lane[i]);
  }
  NEEDLE_LANE_OP void store_e2m1(uint8_t* to, V a) {
    for (int i = 0; i < kLanes; i += 2) {
      to[i / 2] = static_cast<uint8_t>(e2m1_of(a.lane[i]) | e2m1_of(a.lane[i + 1]) << 4);
    }
  }
  NEEDLE_LANE_OP V add(V a, V b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  NEEDLE_LANE_OP V sub(V a, V b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  NEEDLE_LANE_OP V mul(V a, V b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  NEEDLE_LANE_OP V div(V a, V b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  NEEDLE_LANE_OP V fma(V a, V b, V c) {
    return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
  }
  NEEDLE_LANE_OP V minus_abs(V a) {
    return each([&](int i) { return float_of_bits(bits_of(a.lane[i]) | 0x80000000u); });
  }
  NEEDLE_LANE_OP V select_greater(V a, V b, V yes, V no) {  // a > b ? yes : no
    return each([&](int i) { return a.lane[i] > b.lane[i] ? yes.lane[i] : no.lane[i]; });
  }
  NEEDLE_LANE_OP V power_of_shifted(V shifted) {  // 2^n of n kept in the low bits, as fold_exp2 has it
    return each([&](int i) { return float_of_bits((bits_of(shifted.lane[i]) + 127u) << 23); });
  }
  NEEDLE_LANE_OP V max_magnitude(V a, V b) {  // by bits: NaN above infinity above numbers
    return each([&](int i) {
      const uint32_t x = bits_of(a.lane[i]) & 0x7FFFFFFFu;
      const uint32_t y = bits_of(b.lane[i]) & 0x7FFFFFFFu;
      return float_of_bits(x > y ? x : y);
    });
  }
  NEEDLE_LANE_OP float largest_magnitude(V a) {
    uint32_t largest = 0;
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t x = bits_of(a.lane[i]) & 0x7FFFFFFFu;
      if (x > largest) largest = x;
    }
    return float_of_bits(largest);
  }
  NEEDLE_LANE_OP float sum(V a) {  // lane i + lane i + 8, then 4, 2, 1
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) a.lane[i] += a.lane[i + half];
    }
    return a.lane[0];
  }
  NEEDLE_LANE_OP V dup_even(V a) {
    return each([&](int i) { return a.lane[i & ~1]; });
  }
  NEEDLE_LANE_OP V dup_odd(V a) {
    return each([&](int i) { return a.lane[i | 1]; });
  }
  NEEDLE_LANE_OP V swap_pairs(V a) {
    return each([&](int i) { return a.lane[i ^ 1]; });
  }
  NEEDLE_LANE_OP V sub_add(V a, V b) {  // even lanes a - b, odd lanes a + b
    return each([&](int i) { return i % 2 == 0 ? a.lane[i] - b.lane[i] : a.lane[i] + b.lane[i]; });
  }
  template <int kDistance>
  NEEDLE_LANE_OP V butterfly(V a) {  // lane i joins lane i ^ distance: their sum below, their difference above
    return each([&](int i) { return (i & kDistance) == 0 ? a.lane[i ^ kDistance] + a.lane[i] : a.lane[i ^ kDistance] - a.lane[i]; });
  }
};

#if defined(__x86_64__)

#define NEEDLE_AVX2_OP NEEDLE_TARGET_AVX2 NEEDLE_LANE_OP

struct Avx2Lanes {
  struct V {
    __m256 low, high;
  };
  NEEDLE_AVX2_OP V broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  NEEDLE_AVX2_OP V load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  NEEDLE_AVX2_OP void store(float* to, V a) {
    _mm256_storeu_ps(to, a.low);
    _mm256_storeu_ps(to + 8, a.high);
  }
  NEEDLE_AVX2_OP __m256 widen(__m128i words) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16)); }
  NEEDLE_AVX2_OP V load_bf16(const uint16_t* from) {
    return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
            widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)))};
  }
  NEEDLE_AVX2_OP __m256i bf16_words(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(kBf16Nan), nan);
  }
  NEEDLE_AVX2_OP __m256i pack_words(__m256i low, __m256i high) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8); }
  NEEDLE_AVX2_OP void store_bf16(uint16_t* to, V a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pack_words(bf16_words(a.low), bf16_words(a.high)));
  }
  NEEDLE_AVX2_OP V round_bf16(V a) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bf16_words(a.low), 16)), _mm256_castsi256_ps(_mm256_slli_epi32(bf16_words(a.high), 16))};
  }
  NEEDLE_AVX2_OP __m256i e4m3_codes(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(magnitude, _mm256_set1_epi32(0x0007FFFF)), odd);
    const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(120 << 3));
    const __m256 shifted = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(16384.0f));
    const __m256i small = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x46800000));
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3C800000), magnitude);
    const __m256i is_large = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x43DFFFFF));
    const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000));
    __m256i code = _mm256_blendv_epi8(normal, small, is_small);
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7E), is_large);
    return _mm256_blendv_epi8(_mm256_or_si256(code, sign), _mm256_set1_epi32(kE4m3Nan), is_nan);
  }
  NEEDLE_AVX2_OP __m128i pack_bytes(__m256i low, __m256i high) {
    const __m256i words = pack_words(low, high);
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
  NEEDLE_AVX2_OP void store_e4m3(uint8_t* to, V a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), pack_bytes(e4m3_codes(a.low), e4m3_codes(a.high)));
  }
  NEEDLE_AVX2_OP __m256i e2m1_codes(__m256 a) {
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(a), 28), _mm256_set1_epi32(8));
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
    __m256i steps = _mm256_castps_si256(_mm256_cmp_ps(magnitude, _mm256_set1_ps(0.25f), _CMP_GT_OQ));
    const auto step = [&steps](__m256 reached) NEEDLE_TARGET_AVX2 { steps = _mm256_add_epi32(steps, _mm256_castps_si256(reached)); };
    step(_mm256_cmp_ps(magnitude, _mm256_set1_ps(0.75f), _CMP_GE_OQ));
    step(_mm256_cmp_ps(magnitude, _mm256_set1_ps(1.25f), _CMP_GT_OQ));
    step(_mm256_cmp_ps(magnitude, _mm256_set1_ps(1.75f), _CMP_GE_OQ));
    step(_mm256_cmp_ps(magnitude, _mm256_set1_ps(2.5f), _CMP_GT_OQ));
    step(_mm256_cmp_ps(magnitude, _mm256_set1_ps(3.5f), _CMP_GE_OQ));
    step(_mm256_cmp_ps(magnitude, _mm256_set1_ps(5.0f), _CMP_GT_OQ));
    const __m256i code = _mm256_or_si256(_mm256_sub_epi32(_mm256_setzero_si256(), steps), sign);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_andnot_si256(nan, code);
  }
  NEEDLE_AVX2_OP void store_e2m1(uint8_t* to, V a) {
    const __m128i codes = pack_bytes(e2m1_codes(a.low), e2m1_codes(a.high));
    const __m128i pairs = _mm_maddubs_epi16(codes, _mm_set1_epi16(0x1001));  // even + 16 x odd
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(pairs, pairs));
  }
  NEEDLE_AVX2_OP V add(V a, V b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  NEEDLE_AVX2_OP V sub(V a, V b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
  NEEDLE_AVX2_OP V mul(V a, V b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  NEEDLE_AVX2_OP V div(V a, V b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
  NEEDLE_AVX2_OP V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
  NEEDLE_AVX2_OP V minus_abs(V a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(a.low, sign), _mm256_or_ps(a.high, sign)};
  }
  NEEDLE_AVX2_OP V select_greater(V a, V b, V yes, V no) {
    return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ)),
            _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))};
  }
  NEEDLE_AVX2_OP __m256 power_of_shifted(__m256 a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_set1_epi32(127)), 23));
  }
  NEEDLE_AVX2_OP V power_of_shifted(V a) { return {power_of_shifted(a.low), power_of_shifted(a.high)}; }
  NEEDLE_AVX2_OP __m256 max_magnitude(__m256 a, __m256 b) {
    const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
    return _mm256_castsi256_ps(
        _mm256_max_epu32(_mm256_and_si256(_mm256_castps_si256(a), mask), _mm256_and_si256(_mm256_castps_si256(b), mask)));
  }
  NEEDLE_AVX2_OP V max_magnitude(V a, V b) { return {max_magnitude(a.low, b.low), max_magnitude(a.high, b.high)}; }
  NEEDLE_AVX2_OP float largest_magnitude(V a) {
    const __m256i eight = _mm256_castps_si256(max_magnitude(a.low, a.high));
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xB1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
  }
  NEEDLE_AVX2_OP float sum(V a) {
    const __m256 eight = _mm256_add_ps(a.low, a.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
  }
  NEEDLE_AVX2_OP V dup_even(V a) { return {_mm256_moveldup_ps(a.low), _mm256_moveldup_ps(a.high)}; }
  NEEDLE_AVX2_OP V dup_odd(V a) { return {_mm256_movehdup_ps(a.low), _mm256_movehdup_ps(a.high)}; }
  NEEDLE_AVX2_OP V swap_pairs(V a) { return {_mm256_permute_ps(a.low, 0xB1), _mm256_permute_ps(a.high, 0xB1)}; }
  NEEDLE_AVX2_OP V sub_add(V a, V b) { return {_mm256_addsub_ps(a.low, b.low), _mm256_addsub_ps(a.high, b.high)}; }
  template <int kDistance>
  NEEDLE_AVX2_OP V butterfly(V a) {
    if constexpr (kDistance == 8) {
      return {_mm256_add_ps(a.low, a.high), _mm256_sub_ps(a.low, a.high)};
    } else {
      return {butterfly_in<kDistance>(a.low), butterfly_in<kDistance>(a.high)};
    }
  }
  template <int kDistance>
  NEEDLE_AVX2_OP __m256 butterfly_in(__m256 a) {
    if constexpr (kDistance == 4) {
      const __m256 sign = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
      return _mm256_add_ps(_mm256_permute2f128_ps(a, a, 1), _mm256_xor_ps(a, sign));
    } else if constexpr (kDistance == 2) {
      const __m256 sign = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
      return _mm256_add_ps(_mm256_permute_ps(a, 0x4E), _mm256_xor_ps(a, sign));
    } else {
      const __m256 sign = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
      return _mm256_add_ps(_mm256_permute_ps(a, 0xB1), _mm256_xor_ps(a, sign));
    }
  }
};

#define NEEDLE_AVX512_OP NEEDLE_TARGET_AVX512 NEEDLE_LANE_OP

struct Avx512Lanes {
  using V = __m512;
  NEEDLE_AVX512_OP V broadcast(float x) { return _mm512_set1_ps(x); }
  NEEDLE_AVX512_OP V load(const float* from) { return _mm512_loadu_ps(from); }
  NEEDLE_AVX512_OP void store(float* to, V a) { _mm512_storeu_ps(to, a); }
  NEEDLE_AVX512_OP V load_bf16(const uint16_t* from) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
  NEEDLE_AVX512_OP __m512i bf16_words(V a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd), 16);
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(kBf16Nan));
  }
  NEEDLE_AVX512_OP void store_bf16(uint16_t* to, V a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(bf16_words(a)));
  }
  NEEDLE_AVX512_OP V round_bf16(V a) { return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_words(a), 16)); }
  NEEDLE_AVX512_OP void store_e4m3(uint8_t* to, V a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(magnitude, _mm512_set1_epi32(0x0007FFFF)), odd);
    const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(120 << 3));
    const __m512 shifted = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(16384.0f));
    const __m512i small = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x46800000));
    __m512i code = _mm512_mask_mov_epi32(normal, _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x3C800000)), small);
    code = _mm512_mask_mov_epi32(code, _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x43DFFFFF)), _mm512_set1_epi32(0x7E));
    code = _mm512_mask_mov_epi32(_mm512_or_si512(code, sign), _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7F800000)),
                                 _mm512_set1_epi32(kE4m3Nan));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(code));
  }
  NEEDLE_AVX512_OP void store_e2m1(uint8_t* to, V a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 28), _mm512_set1_epi32(8));
    const __m512 magnitude = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
    const __m512i one = _mm512_set1_epi32(1);
    __m512i code = _mm512_setzero_si512();
    code = _mm512_mask_add_epi32(code, _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(0.25f), _CMP_GT_OQ), code, one);
    code = _mm512_mask_add_epi32(code, _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(0.75f), _CMP_GE_OQ), code, one);
    code = _mm512_mask_add_epi32(code, _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(1.25f), _CMP_GT_OQ), code, one);
    code = _mm512_mask_add_epi32(code, _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(1.75f), _CMP_GE_OQ), code, one);
    code = _mm512_mask_add_epi32(code, _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(2.5f), _CMP_GT_OQ), code, one);
    code = _mm512_mask_add_epi32(code, _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(3.5f), _CMP_GE_OQ), code, one);
    code = _mm512_mask_add_epi32(code, _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(5.0f), _CMP_GT_OQ), code, one);
    code = _mm512_maskz_or_epi32(_mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), code, sign);
    const __m128i pairs = _mm_maddubs_epi16(_mm512_cvtepi32_epi8(code), _mm_set1_epi16(0x1001));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(pairs, pairs));
  }
  NEEDLE_AVX512_OP V add(V a, V b) { return _mm512_add_ps(a, b); }
  NEEDLE_AVX512_OP V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  NEEDLE_AVX512_OP V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  NEEDLE_AVX512_OP V div(V a, V b) { return _mm512_div_ps(a, b); }
  NEEDLE_AVX512_OP V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  NEEDLE_AVX512_OP V minus_abs(V a) { return _mm512_or_ps(a, _mm512_set1_ps(-0.0f)); }
  NEEDLE_AVX512_OP V select_greater(V a, V b, V yes, V no) { return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), yes); }
  NEEDLE_AVX512_OP V power_of_shifted(V a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(127)), 23));
  }
  NEEDLE_AVX512_OP V max_magnitude(V a, V b) {
    const __m512i mask = _mm512_set1_epi32(0x7FFFFFFF);
    return _mm512_castsi512_ps(
        _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), mask), _mm512_and_si512(_mm512_castps_si512(b), mask)));
  }
  NEEDLE_AVX512_OP float largest_magnitude(V a) {
    return float_of_bits(_mm512_reduce_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7FFFFFFF))));
  }
  NEEDLE_AVX512_OP float sum(V a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
  }
  NEEDLE_AVX512_OP V dup_even(V a) { return _mm512_moveldup_ps(a); }
  NEEDLE_AVX512_OP V dup_odd(V a) { return _mm512_movehdup_ps(a); }
  NEEDLE_AVX512_OP V swap_pairs(V a) { return _mm512_permute_ps(a, 0xB1); }
  NEEDLE_AVX512_OP V sub_add(V a, V b) { return _mm512_mask_sub_ps(_mm512_add_ps(a, b), 0x5555, a, b); }
  template <int kDistance>
  NEEDLE_AVX512_OP V butterfly(V a) {
    constexpr __mmask16 kAbove = kDistance == 8 ? 0xFF00 : kDistance == 4 ? 0xF0F0 : kDistance == 2 ? 0xCCCC : 0xAAAA;
    __m512 other;
    if constexpr (kDistance == 8) {
      other = _mm512_shuffle_f32x4(a, a, 0x4E);
    } else if constexpr (kDistance == 4) {
      other = _mm512_shuffle_f32x4(a, a, 0xB1);
    } else if constexpr (kDistance == 2) {
      other = _mm512_permute_ps(a, 0x4E);
    } else {
      other = _mm512_permute_ps(a, 0xB1);
    }
    return _mm512_mask_sub_ps(_mm512_add_ps(other, a), kAbove, other, a);
  }
};

#endif  // defined(__x86_64__)

}  // namespace needle
