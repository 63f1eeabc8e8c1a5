#include "kernels/entry_chain_ref.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

namespace needle {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The nearest of 2^k values by magnitude; of two equally near the one with the even code.
template <int kCodes, class Decode>
double nearest_of(double value, Decode decode) {
  if (std::isnan(value)) return kNan;
  const double magnitude = std::fabs(value);
  int best = 0;
  for (int code = 1; code < kCodes; ++code) {
    const double here = std::fabs(decode(static_cast<uint8_t>(code)) - magnitude);
    const double there = std::fabs(decode(static_cast<uint8_t>(best)) - magnitude);
    if (here < there || (here == there && code % 2 == 0)) best = code;
  }
  return std::copysign(decode(static_cast<uint8_t>(best)), value);
}

// max(amax, floor) / limit rounded up to a power of two; NaN where the block is not finite.
double power_of_two_scale(double amax, double floor, double limit) {
  if (!std::isfinite(amax)) return kNan;
  int exponent = 0;
  const double fraction = std::frexp(std::max(amax, floor) / limit, &exponent);  // in [.5, 1)
  return std::ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
}

double amax_of(const double* x, int count) {
  double amax = 0;
  for (int i = 0; i < count; ++i) {
    if (std::isnan(x[i])) return kNan;
    amax = std::max(amax, std::fabs(x[i]));
  }
  return amax;
}

uint8_t scale_byte(double scale) { return std::isnan(scale) ? kUe8m0Nan : static_cast<uint8_t>(std::ilogb(scale) + 127); }

// The exact code of a double that is on the format's grid, sign of zero kept.
uint8_t e4m3_code(double on_grid) { return std::isnan(on_grid) ? kE4m3Nan : e4m3_of(static_cast<float>(on_grid)); }
uint8_t e2m1_code(double on_grid) { return e2m1_of(static_cast<float>(on_grid)); }

double fp8_quotient(ScaleKind kind, double value, double scale) {
  if (kind != ScaleKind::kAmaxReciprocal) return value / scale;
  return value * static_cast<double>(1.0f / static_cast<float>(scale));
}

void put_bf16(const double* x, int count, std::byte* out) {
  for (int i = 0; i < count; ++i) {
    const uint16_t bits = bf16_of(static_cast<float>(nearest_bf16(x[i])));
    std::memcpy(out + 2 * i, &bits, 2);
  }
}

void put_fp8(ScaleKind kind, const double* x, int count, double scale, std::byte* out) {
  for (int i = 0; i < count; ++i) {
    out[i] = static_cast<std::byte>(std::isnan(scale) ? kE4m3Nan : e4m3_code(nearest_e4m3(fp8_quotient(kind, x[i], scale))));
  }
}

// The reference's own rounding inside a bf16 container: index keys to fp4, KV to fp8 on its first 448 dimensions.
void round_as_trained(const Component& component, double* x) {
  if (component.kind == ComponentKind::kIndexK) {
    for (int block = 0; block < component.head_dim; block += 32) {
      const double scale = power_of_two_scale(amax_of(x + block, 32), kRefV4Fp4AmaxFloor, kFp4Max);
      for (int i = block; i < block + 32; ++i) x[i] = nearest_e2m1(x[i] / scale) * scale;
    }
    return;
  }
  for (int block = 0; block + kRopeDims < component.head_dim; block += 64) {
    const double scale = power_of_two_scale(amax_of(x + block, 64), kAmaxFloor, kFp8Max);
    for (int i = block; i < block + 64; ++i) x[i] = nearest_e4m3(x[i] / scale) * scale;
  }
}

void norm(const EntryChain& chain, double* x) {
  const int dims = norm_dims(chain.component.head_dim);
  if (chain.norm == NormKind::kNone) return;
  double mean = 0;
  if (chain.norm == NormKind::kLayer) {
    for (int i = 0; i < dims; ++i) mean += x[i];
    mean /= dims;
  }
  double squares = 0;
  for (int i = 0; i < dims; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const bool in_range = squares <= static_cast<double>(FLT_MAX);  // false for NaN too
  const double scale = in_range ? 1.0 / std::sqrt(squares / dims + static_cast<double>(chain.norm_epsilon)) : kNan;
  for (int i = 0; i < dims; ++i) {
    x[i] = (x[i] - mean) * scale * static_cast<double>(chain.norm_weight[i]);
    if (chain.norm == NormKind::kLayer) x[i] += static_cast<double>(chain.norm_bias[i]);
  }
  if (!in_range) std::fill(x, x + chain.component.head_dim, kNan);
}

void rotate_by_position(const EntryChain& chain, int64_t position, double* x) {
  if (chain.component.rope == RopeStyle::kNone) return;
  const float* row = chain.rope.cos_sin + position * kRopeDims;
  for (int i = 0; i < kRopePairs; ++i) {
    const RopePair pair = rope_pair(chain.component.rope, chain.component.head_dim, i);
    const double cosine = static_cast<double>(row[2 * i]);
    const double sine = static_cast<double>(row[2 * i + 1]);
    const double first = x[pair.first];
    const double second = x[pair.second];
    x[pair.first] = first * cosine - second * sine;
    x[pair.second] = first * sine + second * cosine;
  }
}

void hadamard(double* x, int dims) {
  std::array<double, 128> rotated;
  for (int i = 0; i < dims; ++i) {
    double sum = 0;
    for (int j = 0; j < dims; ++j) sum += __builtin_parity(static_cast<unsigned>(i & j)) ? -x[j] : x[j];
    rotated[static_cast<size_t>(i)] = sum / std::sqrt(static_cast<double>(dims));
  }
  std::copy_n(rotated.begin(), dims, x);
}

}  // namespace

double nearest_bf16(double value) {
  if (!std::isfinite(value) || value == 0) return value;
  const int exponent = std::max(std::ilogb(value), -126);  // denormals share the last exponent
  const double step = std::ldexp(1.0, exponent - 7);
  const double rounded = std::nearbyint(value / step) * step;
  return std::fabs(rounded) >= 0x1p128 ? std::copysign(HUGE_VAL, value) : rounded;
}

double nearest_e4m3(double value) {
  return nearest_of<0x7F>(value, [](uint8_t code) { return static_cast<double>(float_of_e4m3(code)); });
}

double nearest_e2m1(double value) {
  return nearest_of<8>(value, [](uint8_t code) { return static_cast<double>(float_of_e2m1(code)); });
}

double row_value_ref(const RowsView& rows, int64_t row, int64_t column) {
  const int64_t at = row * rows.row_stride + column;
  if (rows.element == RowElement::kFp32) return static_cast<double>(static_cast<const float*>(rows.data)[at]);
  return static_cast<double>(float_of_bf16(static_cast<const uint16_t*>(rows.data)[at]));
}

void finish_entry_ref(const EntryChain& chain, bool after_pool, int64_t position, double* x) {
  const int dims = chain.component.head_dim;
  const auto round_stage = [&] {
    if (chain.rounding != RoundingMode::kRefV4) return;
    for (int i = 0; i < dims; ++i) x[i] = nearest_bf16(x[i]);
  };
  if (after_pool) round_stage();
  if (chain.norm != NormKind::kNone) {
    norm(chain, x);
    round_stage();
  }
  if (chain.component.rope != RopeStyle::kNone) {
    rotate_by_position(chain, position, x);
    round_stage();
  }
  if (chain.component.hadamard) {
    hadamard(x, dims);
    round_stage();
  }
}

void quantise_entry_ref(const EntryChain& chain, const double* x, std::byte* data, std::byte* scale) {
  const Component& component = chain.component;
  const int dims = component.head_dim;
  std::array<double, kStoreHeadDimMax> values;
  std::copy_n(x, dims, values.begin());
  if (chain.rounding == RoundingMode::kVllm) {
    for (int i = 0; i < dims; ++i) values[static_cast<size_t>(i)] = nearest_bf16(x[i]);
  }
  switch (component.element) {
    case ElementFormat::kBf16:
      if (chain.rounding == RoundingMode::kRefV4) round_as_trained(component, values.data());
      put_bf16(values.data(), dims, data);
      return;
    case ElementFormat::kFp8: {
      const double amax = amax_of(values.data(), dims);
      const float stored = component.scale == ScaleKind::kPowerOfTwo
                               ? static_cast<float>(power_of_two_scale(amax, kAmaxFloor, kFp8Max))
                               : static_cast<float>(std::isfinite(amax) ? std::max<double>(amax, kAmaxFloor) / 448 : kNan);
      put_fp8(component.scale, values.data(), dims, static_cast<double>(stored), data);
      const uint32_t bits = std::isnan(stored) ? 0x7FC00000u : bits_of(stored);
      std::memcpy(scale, &bits, 4);
      return;
    }
    case ElementFormat::kFp4:
      for (int block = 0; block < dims / 32; ++block) {
        const double* from = values.data() + 32 * block;
        const double of_block = power_of_two_scale(amax_of(from, 32), kAmaxFloor, kFp4Max);
        scale[block] = static_cast<std::byte>(scale_byte(of_block));
        for (int i = 0; i < 32; i += 2) {
          const unsigned low = std::isnan(of_block) ? 0u : e2m1_code(nearest_e2m1(from[i] / of_block));
          const unsigned high = std::isnan(of_block) ? 0u : e2m1_code(nearest_e2m1(from[i + 1] / of_block));
          data[16 * block + i / 2] = static_cast<std::byte>(low | high << 4);
        }
      }
      return;
    case ElementFormat::kFp8DsMla:
      for (int block = 0; block < 7; ++block) {
        const double* from = values.data() + 64 * block;
        const double of_block = power_of_two_scale(amax_of(from, 64), kAmaxFloor, kFp8Max);
        put_fp8(ScaleKind::kPowerOfTwo, from, 64, of_block, data + 64 * block);
        scale[block] = static_cast<std::byte>(scale_byte(of_block));
      }
      scale[7] = std::byte{0};
      put_bf16(values.data() + 448, 64, data + 448);
      return;
    case ElementFormat::kFp8V32:
      for (int block = 0; block < 4; ++block) {
        const double* from = values.data() + 128 * block;
        const double amax = amax_of(from, 128);
        const float stored = static_cast<float>(std::isfinite(amax) ? std::max<double>(amax, kAmaxFloor) / 448 : kNan);
        put_fp8(ScaleKind::kAmax, from, 128, static_cast<double>(stored), data + 128 * block);
        const uint32_t bits = std::isnan(stored) ? 0x7FC00000u : bits_of(stored);
        std::memcpy(scale + 4 * block, &bits, 4);
      }
      put_bf16(values.data() + 512, 64, data + 528);
      return;
    case ElementFormat::kFp32Rows: return;  // check_store_* refused it
  }
}

}  // namespace needle
