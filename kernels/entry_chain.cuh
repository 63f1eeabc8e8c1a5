// The entry chain on the GPU: one row across 16 lanes (128 dimensions) or a warp (512, 576), in registers from its load
// to its stored bytes.
//
// What must stay true:
//  1. A lane holds octets: 8 neighbouring dimensions each. Octet o of the row is on lane o % lanes, turn o / lanes. So
//     loads and stores are 16 bytes wide, RoPE's interleaved pairs and 3 of the Hadamard's 7 stages stay in a lane, and
//     blocks of 32, 64 and 128 dimensions are 4, 8 and 16 neighbouring lanes.
//  2. The order of every sum depends on the row's width alone: equal rows give equal bits wherever they are computed.
//  3. All lanes of a warp call together; a group without a row computes on zeros and writes nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/store.h"

namespace needle {

template <int kDims>
struct RowOfLanes {
  static constexpr int kLanes = kDims == 128 ? 16 : 32;
  static constexpr int kOctets = kDims / 8;
  static constexpr int kTurns = (kOctets + kLanes - 1) / kLanes;  // 1, 2, 3
  float x[kTurns][8];

  __device__ static __forceinline__ int lane() { return static_cast<int>(threadIdx.x) & (kLanes - 1); }
  __device__ static __forceinline__ int octet(int turn) { return turn * kLanes + lane(); }
  // Whether this lane has an octet in that turn; known at compile time but for 576's third turn.
  __device__ static __forceinline__ bool has(int turn) { return (turn + 1) * kLanes <= kOctets || octet(turn) < kOctets; }
};

__device__ __forceinline__ void widen_bf16_octet(const uint4& raw, float (&x)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    x[2 * w] = __uint_as_float(words[w] << 16);
    x[2 * w + 1] = __uint_as_float(words[w] & 0xFFFF0000u);
  }
}
// An octet as it came: one vector of bf16 or two of fp32.
__device__ __forceinline__ void widen_octet(const uint4 (&raw)[1], float (&x)[8]) { widen_bf16_octet(raw[0], x); }
__device__ __forceinline__ void widen_octet(const uint4 (&raw)[2], float (&x)[8]) {
  const uint32_t words[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y, raw[1].z, raw[1].w};
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(words[i]);
}
__device__ __forceinline__ void load_octet(const void* row, RowElement element, int64_t column, float (&x)[8]) {
  if (element == RowElement::kBf16) {
    widen_bf16_octet(*reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(row) + column), x);
  } else {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(row) + column);
    const float4 low = from[0];
    const float4 high = from[1];
    x[0] = low.x;
    x[1] = low.y;
    x[2] = low.z;
    x[3] = low.w;
    x[4] = high.x;
    x[5] = high.y;
    x[6] = high.z;
    x[7] = high.w;
  }
}
__device__ __forceinline__ void load_float_octet(const float* from, float (&x)[8]) { load_octet(from, RowElement::kFp32, 0, x); }

// The same where it stands: nvcc neither moves the load nor keeps its numbers for a later one (ptxas may still move it).
__device__ __forceinline__ void load_float_octet_here(const float* from, float (&x)[8]) {
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(from) : "memory");
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[4]), "=f"(x[5]), "=f"(x[6]), "=f"(x[7]) : "l"(from + 4) : "memory");
}

// Two values to bf16, the first in the low half. NaN becomes 0x7FFF.
__device__ __forceinline__ uint32_t pack_bf16(float first, float second) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}
// Two values to e4m3fn, saturating, the first in the low byte. NaN becomes 0x7F.
__device__ __forceinline__ uint32_t pack_e4m3(float first, float second) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(second), "f"(first));
  return packed;
}
__device__ __forceinline__ float on_bf16_grid(float value) { return round_to_bf16(value); }

template <int kLanes>
__device__ __forceinline__ float sum_lanes(float value) {
#pragma unroll
  for (int step = 1; step < kLanes; step <<= 1) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  return value;
}
// The larger magnitude, or NaN if one of them is.
__device__ __forceinline__ float larger_or_nan(float one, float other) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(one)), "f"(fabsf(other)));
  return larger;
}
// The largest magnitude over neighbouring lanes; NaN if there is one.
template <int kLanes>
__device__ __forceinline__ float amax_lanes(const float (&x)[8]) {
  float largest = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < 8; ++i) largest = larger_or_nan(largest, x[i]);
#pragma unroll
  for (int step = 1; step < kLanes; step <<= 1) largest = larger_or_nan(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
  return largest;
}

template <int kDims>
__device__ __forceinline__ void round_row(RowOfLanes<kDims>& row) {
#pragma unroll
  for (int t = 0; t < RowOfLanes<kDims>::kTurns; ++t) {
#pragma unroll
    for (int i = 0; i < 8; ++i) row.x[t][i] = on_bf16_grid(row.x[t][i]);
  }
}

// The chain that a V4 model asks for, and whose choices a kernel compiled for it alone need not make: RMS norm, one rounding,
// interleaved RoPE; of 128 dimensions rotated bf16 index-K, of 512 fp8 main KV.
inline bool is_usual(const EntryChain& chain) {
  const Component& component = chain.component;
  return chain.norm == NormKind::kRms && chain.rounding == RoundingMode::kOnce && component.rope == RopeStyle::kInterleavedLast64 &&
         chain.rope.positions > 0 &&
         (component.head_dim == 128 ? component.hadamard && component.element == ElementFormat::kBf16
                                    : component.element == ElementFormat::kFp8DsMla);
}
// The chain as a kernel sees it: of the usual one, the choices as constants.
template <int kDims, bool kUsual>
__device__ __forceinline__ EntryChain chain_of_kernel(const EntryChain& given) {
  EntryChain chain = given;
  if constexpr (kUsual) {
    chain.norm = NormKind::kRms;
    chain.rounding = RoundingMode::kOnce;
    chain.component.rope = RopeStyle::kInterleavedLast64;
    chain.component.hadamard = kDims == 128;
    chain.component.element = kDims == 128 ? ElementFormat::kBf16 : ElementFormat::kFp8DsMla;
  }
  return chain;
}

// What norm and RoPE read from memory for a row, asked for before anything waits: the row's own loads, these and a page
// table's answer are then under way together.
template <int kDims>
struct ChainOperands {
  float weight[RowOfLanes<kDims>::kTurns][8];
  float angle[8];  // interleaved RoPE: of the one octet of this lane that lies in the last 64 dimensions

  __device__ __forceinline__ void load_weights(const EntryChain& chain) {
    using Row = RowOfLanes<kDims>;
#pragma unroll
    for (int t = 0; t < Row::kTurns; ++t) {
      if (chain.norm != NormKind::kNone && 8 * Row::octet(t) < norm_dims(kDims)) {
        load_float_octet(chain.norm_weight + 8 * Row::octet(t), weight[t]);
      }
    }
  }
  // The same from a copy in shared memory.
  __device__ __forceinline__ void load_weights_from(const float4* copy) {
    using Row = RowOfLanes<kDims>;
#pragma unroll
    for (int t = 0; t < Row::kTurns; ++t) {
      if (8 * Row::octet(t) < norm_dims(kDims)) load_float_octet(reinterpret_cast<const float*>(copy) + 8 * Row::octet(t), weight[t]);
    }
  }
  __device__ __forceinline__ void load_angles(const EntryChain& chain, int64_t position) { load_angles(chain, position, load_float_octet); }
  __device__ __forceinline__ void load_angles_at_once(const EntryChain& chain, int64_t position) {
    load_angles(chain, position, load_float_octet_here);
  }
  template <class Load>
  __device__ __forceinline__ void load_angles(const EntryChain& chain, int64_t position, const Load& load) {
    using Row = RowOfLanes<kDims>;
#pragma unroll
    for (int t = 0; t < Row::kTurns; ++t) {
      const int in_last = Row::octet(t) - (Row::kOctets - kRopeDims / 8);
      if (chain.component.rope == RopeStyle::kInterleavedLast64 && in_last >= 0 && Row::has(t)) {
        load(chain.rope.cos_sin + position * kRopeDims + 8 * in_last, angle);
      }
    }
  }
};

// `late`: an RMS norm's scale is not applied but given back, for the rotation to apply; 1 otherwise.
template <int kDims>
__device__ __forceinline__ float norm_row(const EntryChain& chain, const ChainOperands<kDims>& operands, bool late,
                                          RowOfLanes<kDims>& row) {
  using Row = RowOfLanes<kDims>;
  constexpr int kNormDims = norm_dims(kDims);
  float mean = 0;
  if (chain.norm == NormKind::kLayer) {
#pragma unroll
    for (int t = 0; t < Row::kTurns; ++t) {
#pragma unroll
      for (int i = 0; i < 8; ++i) mean += 8 * Row::octet(t) < kNormDims ? row.x[t][i] : 0.0f;
    }
    mean = sum_lanes<Row::kLanes>(mean) / static_cast<float>(kNormDims);
  }
  float squares = 0;
#pragma unroll
  for (int t = 0; t < Row::kTurns; ++t) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float centred = 8 * Row::octet(t) < kNormDims ? row.x[t][i] - mean : 0.0f;
      squares = __fmaf_rn(centred, centred, squares);
    }
  }
  const float mean_square = sum_lanes<Row::kLanes>(squares) / static_cast<float>(kNormDims);
  const bool spoilt = !(mean_square < INFINITY);
  const float spoiler = __uint_as_float(0x7FC00000u);
  const float scale = spoilt ? spoiler : rsqrtf(mean_square + chain.norm_epsilon);  // NaN makes every product NaN
#pragma unroll
  for (int t = 0; t < Row::kTurns; ++t) {
    if (8 * Row::octet(t) < kNormDims) {
      if (chain.norm == NormKind::kLayer) {
        float bias[8];
        load_float_octet(chain.norm_bias + 8 * Row::octet(t), bias);
#pragma unroll
        for (int i = 0; i < 8; ++i) row.x[t][i] = (row.x[t][i] - mean) * scale * operands.weight[t][i] + bias[i];
      } else if (late) {
#pragma unroll
        for (int i = 0; i < 8; ++i) row.x[t][i] *= operands.weight[t][i];
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) row.x[t][i] = row.x[t][i] * scale * operands.weight[t][i];
      }
    } else if (spoilt) {
#pragma unroll
      for (int i = 0; i < 8; ++i) row.x[t][i] = spoiler;
    }
  }
  return late ? scale : 1.0f;
}

template <int kDims>
__device__ __forceinline__ void rotate_row(const EntryChain& chain, const ChainOperands<kDims>& operands, int64_t position,
                                           RowOfLanes<kDims>& row) {
  using Row = RowOfLanes<kDims>;
  const float* table = chain.rope.cos_sin + position * kRopeDims;
  if (chain.component.rope == RopeStyle::kInterleavedLast64) {
#pragma unroll
    for (int t = 0; t < Row::kTurns; ++t) {
      const int in_last = Row::octet(t) - (Row::kOctets - kRopeDims / 8);
      if (in_last < 0 || !Row::has(t)) continue;
      const float(&angle)[8] = operands.angle;
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float first = row.x[t][i];
        const float second = row.x[t][i + 1];
        row.x[t][i] = __fmaf_rn(first, angle[i], -(second * angle[i + 1]));
        row.x[t][i + 1] = __fmaf_rn(second, angle[i], first * angle[i + 1]);
      }
    }
    return;
  }
  // Half-split: dimensions i and i + 32, four octets and so four lanes apart. The first 64 lie in turn 0.
  const int octet = Row::octet(0);
  const bool rotates = octet < 8;
  const bool upper = octet >= 4;
  float angle_low[8] = {};
  float angle_high[8] = {};
  if (rotates) {
    load_float_octet(table + 16 * (octet & 3), angle_low);
    load_float_octet(table + 16 * (octet & 3) + 8, angle_high);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, row.x[0][i], 4);
    const float cosine = i < 4 ? angle_low[2 * i & 7] : angle_high[2 * i & 7];
    const float sine = i < 4 ? angle_low[(2 * i + 1) & 7] : angle_high[(2 * i + 1) & 7];
    if (rotates) row.x[0][i] = upper ? row.x[0][i] * cosine + other * sine : row.x[0][i] * cosine - other * sine;
  }
}

// Times `scale`.
__device__ __forceinline__ void hadamard_row(float scale, RowOfLanes<128>& row) {
  float(&x)[8] = row.x[0];
#pragma unroll
  for (int step = 1; step < 8; step <<= 1) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & step) != 0) continue;
      const float low = x[i];
      const float high = x[i + step];
      x[i] = low + high;
      x[i + step] = low - high;
    }
  }
#pragma unroll
  for (int step = 1; step < 16; step <<= 1) {
    const float sign = (threadIdx.x & static_cast<unsigned>(step)) != 0 ? -1.0f : 1.0f;  // the upper lane: other - own
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(0xFFFFFFFFu, x[i], step));
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= scale * 0.08838834764831845f;  // 128^-0.5
}

// Norm, RoPE and rotation, with the mode's roundings, up to where quantisation begins.
template <int kDims>
__device__ __forceinline__ void finish_row(const EntryChain& chain, const ChainOperands<kDims>& operands, bool after_pool, int64_t position,
                                           RowOfLanes<kDims>& row) {
  const bool by_stage = chain.rounding == RoundingMode::kRefV4;
  // The rotation multiplies by a constant at its end: without a rounding on the way, by the norm's scale as well.
  const bool late = kDims == 128 && chain.norm == NormKind::kRms && chain.component.hadamard && !by_stage;
  float scale = 1.0f;
  if (after_pool && by_stage) round_row(row);
  if (chain.norm != NormKind::kNone) {
    scale = norm_row(chain, operands, late, row);
    if (by_stage) round_row(row);
  }
  if (chain.component.rope != RopeStyle::kNone) {
    rotate_row(chain, operands, position, row);
    if (by_stage) round_row(row);
  }
  if constexpr (kDims == 128) {
    if (chain.component.hadamard) {
      hadamard_row(scale, row);
      if (by_stage) round_row(row);
    }
  }
}

// The same, with its operands loaded here.
template <int kDims>
__device__ __forceinline__ void finish_row(const EntryChain& chain, bool after_pool, int64_t position, RowOfLanes<kDims>& row) {
  ChainOperands<kDims> operands{};
  operands.load_weights(chain);
  operands.load_angles(chain, position);
  finish_row(chain, operands, after_pool, position, row);
}

// -------------------------------------------------------------------------------------------------------- quantisation

__device__ __forceinline__ void put_bf16_octet(const float (&x)[8], std::byte* at) {
  *reinterpret_cast<uint4*>(at) = uint4{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}
__device__ __forceinline__ void put_fp8_octet(ScaleKind kind, const float (&x)[8], float scale, std::byte* at) {
  float y[8];
  if (kind == ScaleKind::kAmaxReciprocal) {
    const float inverse = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = x[i] * inverse;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = x[i] / scale;
  }
  *reinterpret_cast<uint2*>(at) =
      uint2{pack_e4m3(y[0], y[1]) | pack_e4m3(y[2], y[3]) << 16, pack_e4m3(y[4], y[5]) | pack_e4m3(y[6], y[7]) << 16};
}
// By a power of two: multiplying with its inverse is exact, and NaN for NaN.
__device__ __forceinline__ void put_fp8_octet_shifted(const float (&x)[8], uint8_t scale_byte, std::byte* at) {
  const float inverse =
      scale_byte == kUe8m0Nan ? __uint_as_float(0x7FC00000u) : __uint_as_float(static_cast<uint32_t>(254 - scale_byte) << 23);
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = x[i] * inverse;
  *reinterpret_cast<uint2*>(at) =
      uint2{pack_e4m3(y[0], y[1]) | pack_e4m3(y[2], y[3]) << 16, pack_e4m3(y[4], y[5]) | pack_e4m3(y[6], y[7]) << 16};
}
__device__ __forceinline__ void put_fp4_octet(const float (&x)[8], uint8_t scale_byte, std::byte* at) {
  const float scale = float_of_ue8m0(scale_byte);
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) codes |= static_cast<uint32_t>(e2m1_of(x[i] / scale)) << (4 * i);
  *reinterpret_cast<uint32_t*>(at) = codes;
}
__device__ __forceinline__ void put_fp32_scale(float scale, std::byte* at) {
  *reinterpret_cast<uint32_t*>(at) = is_nan_bits(__float_as_uint(scale)) ? 0x7FC00000u : __float_as_uint(scale);
}

// As the model was trained (RoundingMode::kRefV4 in a bf16 container).
template <int kDims>
__device__ __forceinline__ void round_as_trained(const Component& component, RowOfLanes<kDims>& row) {
  using Row = RowOfLanes<kDims>;
#pragma unroll
  for (int t = 0; t < Row::kTurns; ++t) {
    float(&x)[8] = row.x[t];
    if (component.kind == ComponentKind::kIndexK) {
      const float scale = float_of_ue8m0(fp4_scale_byte(amax_lanes<4>(x), kRefV4Fp4AmaxFloor));
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = float_of_e2m1(e2m1_of(x[i] / scale)) * scale;
    } else {
      const float scale = float_of_ue8m0(fp8_scale_byte(amax_lanes<8>(x)));
      if (8 * Row::octet(t) + kRopeDims < kDims) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = float_of_e4m3(e4m3_of(x[i] / scale)) * scale;
      }
    }
  }
}

// One slot. `data` null: nothing is written, but all lanes take part.
template <int kDims>
__device__ __forceinline__ void quantise_row(const EntryChain& chain, RowOfLanes<kDims>& row, std::byte* data, std::byte* scale) {
  using Row = RowOfLanes<kDims>;
  const Component& component = chain.component;
  const bool writes = data != nullptr;
  if (chain.rounding == RoundingMode::kVllm) round_row(row);
  if (component.element == ElementFormat::kBf16) {
    if (chain.rounding == RoundingMode::kRefV4) round_as_trained(component, row);
#pragma unroll
    for (int t = 0; t < Row::kTurns; ++t) {
      if (writes && Row::has(t)) put_bf16_octet(row.x[t], data + 16 * Row::octet(t));
    }
    return;
  }
  if constexpr (kDims == 128) {
    if (component.element == ElementFormat::kFp8) {
      const float of_row = fp8_scale(component.scale, amax_lanes<16>(row.x[0]));
      if (writes) put_fp8_octet(component.scale, row.x[0], of_row, data + 8 * Row::lane());
      if (writes && Row::lane() == 0) put_fp32_scale(of_row, scale);
    } else if (component.element == ElementFormat::kFp4) {
      const uint8_t byte = fp4_scale_byte(amax_lanes<4>(row.x[0]));
      if (writes) put_fp4_octet(row.x[0], byte, data + 4 * Row::lane());
      if (writes && (Row::lane() & 3) == 0) scale[Row::lane() / 4] = static_cast<std::byte>(byte);
    }
  }
  if constexpr (kDims == 512) {
    if (component.element == ElementFormat::kFp8DsMla) {
#pragma unroll
      for (int t = 0; t < Row::kTurns; ++t) {
        const int octet = Row::octet(t);
        const uint8_t byte = fp8_scale_byte(amax_lanes<8>(row.x[t]));
        if (!writes) continue;
        if (octet < 56) {
          put_fp8_octet_shifted(row.x[t], byte, data + 8 * octet);
        } else {
          put_bf16_octet(row.x[t], data + 448 + 16 * (octet - 56));
        }
        if ((octet & 7) == 0) scale[octet / 8] = octet < 56 ? static_cast<std::byte>(byte) : std::byte{0};
      }
    }
  }
  if constexpr (kDims == 576) {
    if (component.element == ElementFormat::kFp8V32) {
#pragma unroll
      for (int t = 0; t < Row::kTurns; ++t) {
        const int octet = Row::octet(t);
        const float of_block = fp8_scale(ScaleKind::kAmax, amax_lanes<16>(row.x[t]));
        if (!writes || !Row::has(t)) continue;
        if (octet < 64) {
          put_fp8_octet(ScaleKind::kAmax, row.x[t], of_block, data + 8 * octet);
          if ((octet & 15) == 0) put_fp32_scale(of_block, scale + octet / 4);
        } else {
          put_bf16_octet(row.x[t], data + 528 + 16 * (octet - 64));
        }
      }
    }
  }
}

template <int kDims>
__device__ __forceinline__ void give_finished(const RowOfLanes<kDims>& row, float* out) {
  using Row = RowOfLanes<kDims>;
#pragma unroll
  for (int t = 0; t < Row::kTurns; ++t) {
    if (!Row::has(t)) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) out[8 * Row::octet(t) + i] = row.x[t][i];
  }
}

}  // namespace needle
