// Rounding to the few formats that pages hold: bf16, e4m3fn, e2m1 and the ue8m0 scale byte. Inline, host and device.
//
// What must stay true:
//  1. Every rounding is to nearest, ties to even, from fp32. Saturating formats clamp to their largest number first.
//  2. A NaN becomes the format's one NaN: bf16 0x7FFF, e4m3fn 0x7F, ue8m0 0xFF (what the hardware's conversions give).
//     e2m1 has none: a block with a NaN or an infinity is marked in its scale.
//  3. A block that holds a NaN or an infinity is stored as NaN whole (scale NaN, codes NaN), never as a number.
//  4. The sign of a value that rounds to zero is kept (0x80 in e4m3fn, 0x8 in e2m1), as the hardware's conversions do.
//  5. A power-of-two scale is rounded up, from exponent bits and never through a logarithm.
//
// e4m3fn: 1-4-3 bits, largest 448, no infinity (OCP 8-bit Floating Point Specification 1.0). e2m1, ue8m0: OCP
// Microscaling Formats 1.0. Scale rules and floors: deepseek-v4 reference, SGLang and vLLM, as ScaleKind names them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/page_format.h"

// Inlined for certain: a CPU twin's function with an instruction set of its own must not call out to the baseline.
#define NEEDLE_HD_INLINE NEEDLE_HD inline __attribute__((always_inline))

namespace needle {

// At which points of the chain pool -> norm -> RoPE -> rotation -> store a value is rounded.
enum class RoundingMode : uint8_t {
  kOnce = 0,   // fp32 until the stored format's own rounding
  kRefV4 = 1,  // bf16 after each stage; index keys (and queries) in a bf16 container are fp4-rounded first, main and
               // window KV in a bf16 container fp8-rounded on its first 448 dimensions: as the model was trained
  kVllm = 2,   // bf16 once, before quantisation; fp8 scales must be powers of two
};

inline constexpr float kFp8Max = 448.0f;
inline constexpr float kFp4Max = 6.0f;
inline constexpr float kAmaxFloor = 1e-4f;                // of every stored scale
inline constexpr float kRefV4Fp4AmaxFloor = 0x1.8p-124f;  // 6 x 2^-126: of the fp4 rounding inside a bf16 container
inline constexpr uint16_t kBf16Nan = 0x7FFF;
inline constexpr uint8_t kE4m3Nan = 0x7F;
inline constexpr uint8_t kUe8m0Nan = 0xFF;

NEEDLE_HD_INLINE uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

NEEDLE_HD_INLINE float float_of_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

NEEDLE_HD_INLINE bool is_nan_bits(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }
NEEDLE_HD_INLINE bool is_finite_bits(uint32_t bits) { return (bits & 0x7F800000u) != 0x7F800000u; }

// ------------------------------------------------------------------------------------------------------------ bf16

NEEDLE_HD_INLINE uint16_t bf16_of(float value) {
  const uint32_t bits = bits_of(value);
  if (is_nan_bits(bits)) return kBf16Nan;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
NEEDLE_HD_INLINE float float_of_bf16(uint16_t value) { return float_of_bits(static_cast<uint32_t>(value) << 16); }
NEEDLE_HD_INLINE float round_to_bf16(float value) { return float_of_bf16(bf16_of(value)); }

// ---------------------------------------------------------------------------------------------------------- e4m3fn

NEEDLE_HD_INLINE uint8_t e4m3_of(float value) {
  const uint32_t bits = bits_of(value);
  if (is_nan_bits(bits)) return kE4m3Nan;
  const uint32_t sign = (bits >> 24) & 0x80u;
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude >= 0x43E00000u) return static_cast<uint8_t>(sign | 0x7Eu);  // 448 and above saturate
  if (magnitude < 0x3C800000u) {
    // Below 2^-6 the grid is multiples of 2^-9: adding 2^14 leaves exactly those bits, rounded to nearest even.
    const float shifted = float_of_bits(magnitude) + 16384.0f;
    return static_cast<uint8_t>(sign | (bits_of(shifted) - 0x46800000u));
  }
  magnitude += 0x0007FFFFu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((magnitude >> 20) - (120u << 3)));  // exponent bias 127 -> 7
}

NEEDLE_HD_INLINE float float_of_e4m3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7Fu;
  if (magnitude == 0x7Fu) return float_of_bits(sign | 0x7FC00000u);
  if (magnitude < 8u) {
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return float_of_bits(sign | bits_of(value));
  }
  return float_of_bits(sign | ((magnitude + (120u << 3)) << 20));
}

// ------------------------------------------------------------------------------------------------------------ e2m1

// 0, .5, 1, 1.5, 2, 3, 4, 6 with a sign in bit 3. A NaN gives 0: its block's scale says so.
NEEDLE_HD_INLINE uint8_t e2m1_of(float value) {
  const uint32_t bits = bits_of(value);
  if (is_nan_bits(bits)) return 0;
  const uint8_t sign = static_cast<uint8_t>((bits >> 28) & 8u);
  const float magnitude = float_of_bits(bits & 0x7FFFFFFFu);
  uint8_t code = 0;  // ties go to the even code: .25 -> 0, .75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4
  code = static_cast<uint8_t>(code + (magnitude > 0.25f));
  code = static_cast<uint8_t>(code + (magnitude >= 0.75f));
  code = static_cast<uint8_t>(code + (magnitude > 1.25f));
  code = static_cast<uint8_t>(code + (magnitude >= 1.75f));
  code = static_cast<uint8_t>(code + (magnitude > 2.5f));
  code = static_cast<uint8_t>(code + (magnitude >= 3.5f));
  code = static_cast<uint8_t>(code + (magnitude > 5.0f));
  return static_cast<uint8_t>(sign | code);
}

NEEDLE_HD_INLINE float float_of_e2m1(uint8_t code) {
  const uint32_t magnitude = code & 7u;
  const float value =
      magnitude < 2u ? 0.5f * static_cast<float>(magnitude) : float_of_bits((126u + (magnitude >> 1)) << 23 | (magnitude & 1u) << 22);
  return (code & 8u) != 0u ? -value : value;
}

// ----------------------------------------------------------------------------------------------------------- ue8m0

// The exponent byte of the smallest power of two that is at least `scale` (a positive fp32); 0xFF for NaN and inf.
NEEDLE_HD_INLINE uint8_t ue8m0_of(float scale) {
  const uint32_t bits = bits_of(scale);
  if (!is_finite_bits(bits)) return kUe8m0Nan;
  return static_cast<uint8_t>((bits >> 23) + ((bits & 0x007FFFFFu) != 0u ? 1u : 0u));
}
NEEDLE_HD_INLINE float float_of_ue8m0(uint8_t byte) {
  if (byte == kUe8m0Nan) return float_of_bits(0x7FC00000u);
  return byte == 0 ? 0x1p-127f : float_of_bits(static_cast<uint32_t>(byte) << 23);
}

// ---------------------------------------------------------------------------------------------------------- scales

// The scale of an fp8 block from its largest magnitude. `amax` NaN or inf gives NaN (promise 3).
NEEDLE_HD_INLINE float fp8_scale(ScaleKind kind, float amax) {
  if (!is_finite_bits(bits_of(amax))) return float_of_bits(0x7FC00000u);
  const float plain = (amax > kAmaxFloor ? amax : kAmaxFloor) / kFp8Max;
  return kind == ScaleKind::kPowerOfTwo ? float_of_ue8m0(ue8m0_of(plain)) : plain;
}

// The ue8m0 byte of an fp8 block of main KV: ue8m0_of(amax / 448), without the division. 448 is 1.75 x 2^8, so the quotient is
// above a power of two exactly where the mantissa is above 1.75; the tests compare the two for every mantissa.
NEEDLE_HD_INLINE uint8_t fp8_scale_byte(float amax) {
  const uint32_t bits = bits_of(amax > kAmaxFloor ? amax : kAmaxFloor);
  return is_finite_bits(bits_of(amax)) ? static_cast<uint8_t>(((bits + 0x001FFFFFu) >> 23) - 8u) : kUe8m0Nan;
}

// The ue8m0 byte of an fp4 block of 32.
NEEDLE_HD_INLINE uint8_t fp4_scale_byte(float amax, float floor = kAmaxFloor) {
  if (!is_finite_bits(bits_of(amax))) return kUe8m0Nan;
  return ue8m0_of((amax > floor ? amax : floor) / kFp4Max);
}

// A value's code under a scale. `inverse` is 1 / scale in fp32 and is used by kAmaxReciprocal alone.
NEEDLE_HD_INLINE uint8_t fp8_code(ScaleKind kind, float value, float scale, float inverse) {
  return e4m3_of(kind == ScaleKind::kAmaxReciprocal ? value * inverse : value / scale);
}

}  // namespace needle
