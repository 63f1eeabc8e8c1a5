// What a stored slot says: its numbers, and how far apart the format's numbers are there. Slow and by table; shares no
// code with any twin but the decoders of kernels/quantise.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/page_format.h"
#include "kernels/quantise.h"

namespace needle::testing {

struct StoredRow {
  std::vector<double> values;
  std::vector<double> steps;  // the larger gap to the value's neighbours in its format
};

inline double bf16_step(double value) {
  if (value == 0) return std::ldexp(1.0, -133);
  return std::ldexp(1.0, std::max(std::ilogb(value), -126) - 7);  // the gap away from zero is the larger one
}

// The larger gap around `magnitude`, a number of the ascending table of codes 0..last.
template <class Decode>
double table_step(double magnitude, int last, Decode decode) {
  for (int code = 0; code <= last; ++code) {
    if (static_cast<double>(decode(static_cast<uint8_t>(code))) < magnitude) continue;
    const double here = static_cast<double>(decode(static_cast<uint8_t>(code)));
    const double below = code > 0 ? here - static_cast<double>(decode(static_cast<uint8_t>(code - 1))) : 0;
    const double above = code < last ? static_cast<double>(decode(static_cast<uint8_t>(code + 1))) - here : 0;
    return std::max(below, above);
  }
  return std::numeric_limits<double>::infinity();
}

inline double e4m3_step(double value) {
  return table_step(std::fabs(value), 0x7E, [](uint8_t code) { return float_of_e4m3(code); });
}
inline double e2m1_step(double value) {
  return table_step(std::fabs(value), 7, [](uint8_t code) { return float_of_e2m1(code); });
}

// `before` is the entry before quantisation: it decides the grid of values that were rounded inside a bf16 container,
// whose scale is stored nowhere.
inline StoredRow read_stored(const Component& component, RoundingMode rounding, const std::byte* data, const std::byte* scale,
                             const std::vector<float>& before) {
  StoredRow row;
  const auto put = [&row](double value, double step) {
    row.values.push_back(value);
    row.steps.push_back(step);
  };
  const auto byte = [](const std::byte* at) { return static_cast<uint8_t>(*at); };
  const auto put_bf16 = [&](const std::byte* from, int count) {
    for (int i = 0; i < count; ++i) {
      uint16_t bits;
      std::memcpy(&bits, from + 2 * i, 2);
      const double value = static_cast<double>(float_of_bf16(bits));
      put(value, std::isfinite(value) ? bf16_step(value) : 0);
    }
  };
  const auto put_fp8 = [&](const std::byte* from, int count, double of_block) {
    for (int i = 0; i < count; ++i) {
      const double code = static_cast<double>(float_of_e4m3(byte(from + i)));
      put(code * of_block, std::isfinite(code) ? e4m3_step(code) * of_block : 0);
    }
  };
  switch (component.element) {
    case ElementFormat::kBf16: {
      put_bf16(data, component.head_dim);
      if (rounding != RoundingMode::kRefV4) break;
      const bool index = component.kind == ComponentKind::kIndexK;
      const int block = index ? 32 : 64;
      for (int begin = 0; begin < component.head_dim - (index ? 0 : kRopeDims); begin += block) {
        double amax = 0;
        for (int i = begin; i < begin + block; ++i) amax = std::max(amax, static_cast<double>(std::fabs(before[static_cast<size_t>(i)])));
        const double plain = std::max(amax, index ? 0x1p-124 : 1e-4) / (index ? 6.0 : 448.0);
        const double of_block = std::exp2(std::ceil(std::log2(plain)));
        for (int i = begin; i < begin + block; ++i) {
          const double code = row.values[static_cast<size_t>(i)] / of_block;
          const double step = index ? e2m1_step(code) : e4m3_step(code);
          row.steps[static_cast<size_t>(i)] = std::isfinite(step) ? step * of_block : of_block;
        }
      }
      break;
    }
    case ElementFormat::kFp8: {
      float of_row;
      std::memcpy(&of_row, scale, 4);
      put_fp8(data, component.head_dim, static_cast<double>(of_row));
      break;
    }
    case ElementFormat::kFp4:
      for (int i = 0; i < component.head_dim; ++i) {
        const double of_block = static_cast<double>(float_of_ue8m0(byte(scale + i / 32)));
        const uint8_t pair = byte(data + i / 2);
        const double code = static_cast<double>(float_of_e2m1(i % 2 == 0 ? pair & 15u : pair >> 4));
        put(code * of_block, e2m1_step(code) * of_block);
      }
      break;
    case ElementFormat::kFp8DsMla:
      for (int block = 0; block < 7; ++block) {
        put_fp8(data + 64 * block, 64, static_cast<double>(float_of_ue8m0(byte(scale + block))));
      }
      put_bf16(data + 448, kRopeDims);
      break;
    case ElementFormat::kFp8V32:
      for (int block = 0; block < 4; ++block) {
        float of_block;
        std::memcpy(&of_block, scale + 4 * block, 4);
        put_fp8(data + 128 * block, 128, static_cast<double>(of_block));
      }
      put_bf16(data + 528, kRopeDims);
      break;
    case ElementFormat::kFp32Rows: break;
  }
  return row;
}

}  // namespace needle::testing
