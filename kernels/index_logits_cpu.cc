// The CPU twins of index_logits: portable, AVX2 + FMA, AVX-512, and AVX-512 with BF16 dot products.
//
// Heads lie side by side in a register and keys are broadcast, so that the sum over heads stays in registers until its
// end. A query is packed once a task (its heads transposed), then every key streams past it.
//
// What must stay true:
//  1. The order of every sum is fixed for one instruction set and head count: over dimensions in ascending order in one
//     accumulator a (key, head), over groups of heads in ascending order, then one tree over the lanes. Which keys and
//     queries share a tile, a block, a task or a thread never enters it.
//  2. No byte of a key past the longest visible length of the queries at hand is read.
//  3. fp8 and fp4 codes become bf16 or fp32 exactly (e4m3 and e2m1 x 2^n fit bf16); an fp8 key's scale, being positive,
//     multiplies the finished sum.
//  4. A register's lanes past the last head are masked: their query is zero, and zero x inf would be NaN.
//  5. Scratch is one TaskScratch (about 180 KiB) on the worker's stack.
//
// Tile shapes (heads x keys held in accumulators) follow the register files: 16 registers take 3 groups x 4 keys, 32
// take 4 groups x 5 keys; both leave room for the queries and one key, and hide the latency of the multiply-add.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
// GCC 12's own AVX-512 header reads an undefined register on purpose, and warns about it where it is inlined.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "kernels/index_logits.h"
#include "kernels/quantise.h"

#if defined(__x86_64__)
#define NEEDLE_X86 1
#include <immintrin.h>
#else
#define NEEDLE_X86 0
#endif

// Tiles live in registers only if the loops over their groups and keys are unrolled whole, also at -O2.
#if defined(__clang__)
#define NEEDLE_UNROLL _Pragma("unroll")
#else
#define NEEDLE_UNROLL _Pragma("GCC unroll 16")
#endif

#define NEEDLE_AVX2 __attribute__((target("avx2,fma,f16c")))
#define NEEDLE_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#define NEEDLE_AVX512BF16 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

namespace needle {
namespace {

constexpr int kDim = kIndexHeadDim;
constexpr int kBlockKeys = 64;                // keys converted and scored at a time: 32 KiB as fp32, an L1 cache
constexpr int kLanesMax = 16;                 // heads in the widest register
constexpr int64_t kPackedBytes = 128 * kKiB;  // queries packed at a time: 4 of 64 heads as fp32, L2-resident
constexpr int kQueriesTogetherMax = 4;
constexpr int64_t kTaskEntriesMin = 1024;  // below it packing the query would show (about 30 keys' time)
constexpr int kTasksPerWorker = 8;         // enough to even out ragged lengths

static_assert(kPackedBytes >= int64_t{kQueriesTogetherMax} * 64 * kDim * 4);
static_assert(kPackedBytes >= int64_t{kQueriesTogetherMax / 2} * kIndexHeadsMax * kDim * 4);

int queries_together(int heads) { return heads <= 64 ? kQueriesTogetherMax : kQueriesTogetherMax / 2; }

// Weights of the heads of one query, zero past the last.
struct HeadWeights {
  alignas(64) float of[kIndexHeadsMax];
};

struct TaskScratch {
  alignas(64) std::byte packed[kPackedBytes];           // [queries together] packed queries
  alignas(64) float keys[kBlockKeys * kDim];            // converted keys of the block at hand, fp32 or bf16
  alignas(64) float lane_sums[kBlockKeys * kLanesMax];  // [key][lane] weighted sums over the groups of heads
  alignas(64) uint16_t query[kIndexHeadsMax * kDim];    // one query as bf16, before it is packed
  alignas(64) float scores[kBlockKeys];
  HeadWeights weights[kQueriesTogetherMax];
};

// What an instruction set brings. Everything else is shared.
struct Twin {
  // [heads][128] bf16 into this set's own order.
  void (*pack_query)(const uint16_t* query, int heads, void* packed);
  // Slots first .. first + count of a page, as this set multiplies them; may return the page itself.
  const void* (*convert_keys)(const std::byte* part, const LayerView& view, int first, int count, float* buffer);
  // scores[i] = sum over heads for key i, without its scale. count <= kBlockKeys.
  void (*score_keys)(const void* packed, const HeadWeights& weights, int heads, const void* keys, int count, float* lane_sums,
                     float* scores);
};

const std::byte* key_data(const std::byte* part, const LayerView& view, int slot) {
  return part + slot_place(view.element, view.head_dim, view.slots_per_page, slot).data;
}
const std::byte* key_scale(const std::byte* part, const LayerView& view, int slot) {
  return part + slot_place(view.element, view.head_dim, view.slots_per_page, slot).scale;
}

// ---------------------------------------------------------------------------------------------------------------------
// Packing for the sets that multiply in fp32. A pass takes up to `groups_a_pass` groups of `lanes` heads:
// [pass][dimension][group of the pass][lane].
template <int kLanes, int kGroupsAPass>
void pack_query_fp32(const uint16_t* query, int heads, void* packed) {
  float* out = static_cast<float*>(packed);
  const int groups = static_cast<int>(div_ceil(heads, kLanes));
  for (int first = 0; first < groups; first += kGroupsAPass) {
    const int width = std::min(kGroupsAPass, groups - first) * kLanes;  // heads of this pass, padded
    for (int lane = 0; lane < width; ++lane) {
      const int head = first * kLanes + lane;
      if (head < heads) {
        for (int d = 0; d < kDim; ++d) out[d * width + lane] = float_of_bf16(query[head * kDim + d]);
      } else {
        for (int d = 0; d < kDim; ++d) out[d * width + lane] = 0.0f;
      }
    }
    out += kDim * width;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Portable: vectors of four floats, which every compiler we use maps to what the machine has. Multiply and add are two
// roundings here, as std::fma without an instruction would be a library call.

using Four = float __attribute__((vector_size(16)));
using FourBits = int32_t __attribute__((vector_size(16)));

constexpr int kPortableLanes = 4;
constexpr int kPortableGroups = 2;
constexpr int kPortableKeys = 4;

Four load_four(const float* from) {
  Four value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
void store_four(float* to, Four value) { std::memcpy(to, &value, sizeof value); }

const void* convert_keys_portable(const std::byte* part, const LayerView& view, int first, int count, float* buffer) {
  float e4m3[256];
  if (view.element == ElementFormat::kFp8) {
    for (int code = 0; code < 256; ++code) e4m3[code] = float_of_e4m3(static_cast<uint8_t>(code));
  }
  for (int i = 0; i < count; ++i) {
    const std::byte* data = key_data(part, view, first + i);
    float* key = buffer + i * kDim;
    if (view.element == ElementFormat::kBf16) {
      for (int d = 0; d < kDim; ++d) {
        uint16_t bits;
        std::memcpy(&bits, data + 2 * d, sizeof bits);
        key[d] = float_of_bf16(bits);
      }
    } else if (view.element == ElementFormat::kFp8) {
      for (int d = 0; d < kDim; ++d) key[d] = e4m3[static_cast<uint8_t>(data[d])];
    } else {
      const std::byte* scales = key_scale(part, view, first + i);
      for (int block = 0; block < kDim / 32; ++block) {
        const float scale = float_of_ue8m0(static_cast<uint8_t>(scales[block]));
        float scaled[16];
        for (uint8_t code = 0; code < 16; ++code) scaled[code] = float_of_e2m1(code) * scale;
        for (int pair = block * 16; pair < block * 16 + 16; ++pair) {
          const uint32_t codes = static_cast<uint8_t>(data[pair]);
          key[2 * pair] = scaled[codes & 15u];
          key[2 * pair + 1] = scaled[codes >> 4];
        }
      }
    }
  }
  return buffer;
}

template <int kGroups, int kKeys>
void tile_portable(const float* packed, const float* weights, int heads_left, const float* keys, bool first_pass, float* lane_sums) {
  Four dot[kGroups][kKeys] = {};
  for (int d = 0; d < kDim; ++d) {
    NEEDLE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const Four query = load_four(packed + (d * kGroups + g) * kPortableLanes);
      NEEDLE_UNROLL
      for (int k = 0; k < kKeys; ++k) dot[g][k] += query * keys[k * kDim + d];
    }
  }
  NEEDLE_UNROLL
  for (int k = 0; k < kKeys; ++k) {
    Four sum = {};
    if (!first_pass) sum = load_four(lane_sums + k * kPortableLanes);
    NEEDLE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      for (int lane = 0; lane < kPortableLanes; ++lane) {
        const float value = dot[g][k][lane];
        const float passed = value < 0.0f || g * kPortableLanes + lane >= heads_left ? 0.0f : value;  // NaN passes
        sum[lane] += weights[g * kPortableLanes + lane] * passed;
      }
    }
    store_four(lane_sums + k * kPortableLanes, sum);
  }
}

template <int kGroups, int kKeys>
void tiles_portable(const float* packed, const float* weights, int heads_left, const float* keys, int count, bool first_pass,
                    float* lane_sums) {
  for (; count >= kKeys; count -= kKeys) {
    tile_portable<kGroups, kKeys>(packed, weights, heads_left, keys, first_pass, lane_sums);
    keys += kKeys * kDim;
    lane_sums += kKeys * kPortableLanes;
  }
  if constexpr (kKeys > 1) {
    if (count > 0) {
      tiles_portable<kGroups, kKeys - 1>(packed, weights, heads_left, keys, count, first_pass, lane_sums);
    }
  }
}

void score_keys_portable(const void* packed, const HeadWeights& weights, int heads, const void* keys, int count, float* lane_sums,
                         float* scores) {
  const float* query = static_cast<const float*>(packed);
  const float* key = static_cast<const float*>(keys);
  for (int head = 0; head < heads; head += kPortableGroups * kPortableLanes) {
    const bool both = heads - head > kPortableLanes;
    if (both) {
      tiles_portable<2, kPortableKeys>(query, weights.of + head, heads - head, key, count, head == 0, lane_sums);
    } else {
      tiles_portable<1, kPortableKeys>(query, weights.of + head, heads - head, key, count, head == 0, lane_sums);
    }
    query += kDim * (both ? 2 : 1) * kPortableLanes;
  }
  for (int i = 0; i < count; ++i) {
    const float* lane = lane_sums + i * kPortableLanes;
    scores[i] = (lane[0] + lane[2]) + (lane[1] + lane[3]);
  }
}

#if NEEDLE_X86

// ---------------------------------------------------------------------------------------------------------------------
// AVX2 + FMA: eight heads a register, keys widened to fp32.

constexpr int kAvx2Lanes = 8;
constexpr int kAvx2Groups = 3;

NEEDLE_AVX2 inline void widen_bf16_avx2(const std::byte* data, float* key) {
  for (int d = 0; d < kDim; d += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 2 * d));
    const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
    _mm256_store_ps(key + d, _mm256_castsi256_ps(wide));
  }
}

NEEDLE_AVX2 inline void widen_fp8_avx2(const std::byte* data, float* key) {
  const __m256i seven_bits = _mm256_set1_epi32(0x7F);
  const __m256i rebias = _mm256_set1_epi32(120 << 23);
  const __m256 denormal_step = _mm256_set1_ps(0x1.0p-9f);
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
  const __m256 sign_bit = _mm256_set1_ps(-0.0f);
  for (int d = 0; d < kDim; d += 8) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(data + d)));
    const __m256i magnitude = _mm256_and_si256(code, seven_bits);
    const __m256 normal = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), rebias));
    const __m256 denormal = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), denormal_step);
    const __m256 is_denormal = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude));
    const __m256 is_nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(magnitude, seven_bits));
    __m256 value = _mm256_blendv_ps(normal, denormal, is_denormal);
    value = _mm256_blendv_ps(value, nan, is_nan);
    const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(code, 24)), sign_bit);
    _mm256_store_ps(key + d, _mm256_or_ps(value, sign));
  }
}

// 32 codes of one scale, low nibble first, as bytes 0..15 in order.
struct Nibbles {
  __m128i first;
  __m128i second;
};
NEEDLE_AVX2 inline Nibbles nibbles_of(const std::byte* data) {
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
  const __m128i low = _mm_and_si128(pairs, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(pairs, 4), _mm_set1_epi8(15));
  return {_mm_unpacklo_epi8(low, high), _mm_unpackhi_epi8(low, high)};
}

NEEDLE_AVX2 inline __m256 e2m1_eight_avx2(__m128i codes, __m256 magnitudes) {
  const __m256i code = _mm256_cvtepu8_epi32(codes);
  const __m256 value = _mm256_permutevar8x32_ps(magnitudes, code);  // looks at the low three bits
  return _mm256_xor_ps(value, _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(code, 28)), _mm256_set1_ps(-0.0f)));
}

NEEDLE_AVX2 inline void widen_fp4_avx2(const std::byte* data, const std::byte* scales, float* key) {
  const __m256 e2m1 = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  for (int part = 0; part < kDim / 32; ++part) {
    const __m256 scaled = _mm256_mul_ps(e2m1, _mm256_set1_ps(float_of_ue8m0(static_cast<uint8_t>(scales[part]))));
    const Nibbles codes = nibbles_of(data + part * 16);
    float* out = key + part * 32;
    _mm256_store_ps(out, e2m1_eight_avx2(codes.first, scaled));
    _mm256_store_ps(out + 8, e2m1_eight_avx2(_mm_srli_si128(codes.first, 8), scaled));
    _mm256_store_ps(out + 16, e2m1_eight_avx2(codes.second, scaled));
    _mm256_store_ps(out + 24, e2m1_eight_avx2(_mm_srli_si128(codes.second, 8), scaled));
  }
}

NEEDLE_AVX2 const void* convert_keys_avx2(const std::byte* part, const LayerView& view, int first, int count, float* buffer) {
  for (int i = 0; i < count; ++i) {
    const std::byte* data = key_data(part, view, first + i);
    float* key = buffer + i * kDim;
    switch (view.element) {
      case ElementFormat::kBf16: widen_bf16_avx2(data, key); break;
      case ElementFormat::kFp8: widen_fp8_avx2(data, key); break;
      default: widen_fp4_avx2(data, key_scale(part, view, first + i), key); break;
    }
  }
  return buffer;
}

template <int kGroups, int kKeys>
NEEDLE_AVX2 void tile_avx2(const float* packed, const float* weights, int heads_left, const float* keys, bool first_pass,
                           float* lane_sums) {
  __m256 dot[kGroups][kKeys];
  NEEDLE_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    NEEDLE_UNROLL
    for (int k = 0; k < kKeys; ++k) dot[g][k] = _mm256_setzero_ps();
  }
  for (int d = 0; d < kDim; ++d) {
    __m256 query[kGroups];
    NEEDLE_UNROLL
    for (int g = 0; g < kGroups; ++g) query[g] = _mm256_load_ps(packed + (d * kGroups + g) * kAvx2Lanes);
    NEEDLE_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      const __m256 key = _mm256_broadcast_ss(keys + k * kDim + d);
      NEEDLE_UNROLL
      for (int g = 0; g < kGroups; ++g) dot[g][k] = _mm256_fmadd_ps(query[g], key, dot[g][k]);
    }
  }
  const __m256i lane_index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  NEEDLE_UNROLL
  for (int k = 0; k < kKeys; ++k) {
    __m256 sum = first_pass ? _mm256_setzero_ps() : _mm256_load_ps(lane_sums + k * kAvx2Lanes);
    NEEDLE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const __m256i exists = _mm256_cmpgt_epi32(_mm256_set1_epi32(heads_left - g * kAvx2Lanes), lane_index);
      const __m256 passed = _mm256_max_ps(_mm256_setzero_ps(), dot[g][k]);  // NaN in the second operand is what comes out
      sum = _mm256_fmadd_ps(_mm256_load_ps(weights + g * kAvx2Lanes), _mm256_and_ps(passed, _mm256_castsi256_ps(exists)), sum);
    }
    _mm256_store_ps(lane_sums + k * kAvx2Lanes, sum);
  }
}

template <int kGroups, int kKeys>
NEEDLE_AVX2 void tiles_avx2(const float* packed, const float* weights, int heads_left, const float* keys, int count, bool first_pass,
                            float* lane_sums) {
  for (; count >= kKeys; count -= kKeys) {
    tile_avx2<kGroups, kKeys>(packed, weights, heads_left, keys, first_pass, lane_sums);
    keys += kKeys * kDim;
    lane_sums += kKeys * kAvx2Lanes;
  }
  if constexpr (kKeys > 1) {
    if (count > 0) tiles_avx2<kGroups, kKeys - 1>(packed, weights, heads_left, keys, count, first_pass, lane_sums);
  }
}

// Four keys' lanes to four scores at a time; rows past `count` in the last four are zeroed first and not written out.
NEEDLE_AVX2 void sum_lanes_avx2(float* lane_sums, int count, float* scores) {
  for (int i = count; i % 4 != 0; ++i) _mm256_store_ps(lane_sums + i * kAvx2Lanes, _mm256_setzero_ps());
  for (int i = 0; i < count; i += 4) {
    const float* row = lane_sums + i * kAvx2Lanes;
    const __m256 a = _mm256_load_ps(row);
    const __m256 b = _mm256_load_ps(row + kAvx2Lanes);
    const __m256 c = _mm256_load_ps(row + 2 * kAvx2Lanes);
    const __m256 d = _mm256_load_ps(row + 3 * kAvx2Lanes);
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));  // a02 b02 a13 b13, twice
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256d ab_pairs = _mm256_castps_pd(ab);
    const __m256d cd_pairs = _mm256_castps_pd(cd);
    const __m256 abcd =
        _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab_pairs, cd_pairs)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab_pairs, cd_pairs)));
    _mm_storeu_ps(scores + i, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
  }
}

NEEDLE_AVX2 void score_keys_avx2(const void* packed, const HeadWeights& weights, int heads, const void* keys, int count, float* lane_sums,
                                 float* scores) {
  const float* query = static_cast<const float*>(packed);
  const float* key = static_cast<const float*>(keys);
  for (int head = 0; head < heads;) {
    const int left = heads - head;
    const int groups = std::min(kAvx2Groups, static_cast<int>(div_ceil(left, kAvx2Lanes)));
    const float* weight = weights.of + head;
    if (groups == 3) {
      tiles_avx2<3, 4>(query, weight, left, key, count, head == 0, lane_sums);
    } else if (groups == 2) {
      tiles_avx2<2, 6>(query, weight, left, key, count, head == 0, lane_sums);
    } else {
      tiles_avx2<1, 8>(query, weight, left, key, count, head == 0, lane_sums);
    }
    query += kDim * groups * kAvx2Lanes;
    head += groups * kAvx2Lanes;
  }
  sum_lanes_avx2(lane_sums, count, scores);
}

// ---------------------------------------------------------------------------------------------------------------------
// AVX-512: sixteen heads a register, keys widened to fp32.

constexpr int kAvx512Lanes = 16;
constexpr int kAvx512Groups = 4;

// Lanes of a group that hold a head, `heads_left` counting from the group's first.
NEEDLE_AVX512 inline __mmask16 heads_mask(int heads_left) {
  return heads_left >= kAvx512Lanes ? static_cast<__mmask16>(0xFFFF) : static_cast<__mmask16>((1u << heads_left) - 1u);
}

NEEDLE_AVX512 inline void widen_bf16_avx512(const std::byte* data, float* key) {
  for (int d = 0; d < kDim; d += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 2 * d));
    _mm512_store_ps(key + d, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  }
}

NEEDLE_AVX512 inline void widen_fp8_avx512(const std::byte* data, float* key) {
  const __m512i seven_bits = _mm512_set1_epi32(0x7F);
  const __m512i sign_bit = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  for (int d = 0; d < kDim; d += 16) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + d)));
    const __m512i magnitude = _mm512_and_si512(code, seven_bits);
    __m512 value = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23)));
    const __mmask16 is_denormal = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
    value = _mm512_mask_mul_ps(value, is_denormal, _mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(0x1.0p-9f));
    const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, seven_bits);
    const __m512i bits = _mm512_mask_mov_epi32(_mm512_castps_si512(value), is_nan, _mm512_set1_epi32(0x7FC00000));
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi32(code, 24), sign_bit);
    _mm512_store_ps(key + d, _mm512_castsi512_ps(_mm512_or_si512(bits, sign)));
  }
}

NEEDLE_AVX512 inline __m512 e2m1_all() {
  return _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
}

NEEDLE_AVX512 inline void widen_fp4_avx512(const std::byte* data, const std::byte* scales, float* key) {
  for (int part = 0; part < kDim / 32; ++part) {
    const __m512 scaled = _mm512_mul_ps(e2m1_all(), _mm512_set1_ps(float_of_ue8m0(static_cast<uint8_t>(scales[part]))));
    const Nibbles codes = nibbles_of(data + part * 16);
    _mm512_store_ps(key + part * 32, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes.first), scaled));
    _mm512_store_ps(key + part * 32 + 16, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes.second), scaled));
  }
}

NEEDLE_AVX512 const void* convert_keys_avx512(const std::byte* part, const LayerView& view, int first, int count, float* buffer) {
  for (int i = 0; i < count; ++i) {
    const std::byte* data = key_data(part, view, first + i);
    float* key = buffer + i * kDim;
    switch (view.element) {
      case ElementFormat::kBf16: widen_bf16_avx512(data, key); break;
      case ElementFormat::kFp8: widen_fp8_avx512(data, key); break;
      default: widen_fp4_avx512(data, key_scale(part, view, first + i), key); break;
    }
  }
  return buffer;
}

// The end of a tile, shared by both AVX-512 twins.
template <int kGroups, int kKeys>
NEEDLE_AVX512 inline void add_heads_avx512(const __m512 (&dot)[kGroups][kKeys], const float* weights, int heads_left, bool first_pass,
                                           float* lane_sums) {
  NEEDLE_UNROLL
  for (int k = 0; k < kKeys; ++k) {
    __m512 sum = first_pass ? _mm512_setzero_ps() : _mm512_load_ps(lane_sums + k * kAvx512Lanes);
    NEEDLE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      // NaN in the second operand of max is what comes out.
      const __m512 passed = _mm512_maskz_max_ps(heads_mask(heads_left - g * kAvx512Lanes), _mm512_setzero_ps(), dot[g][k]);
      sum = _mm512_fmadd_ps(_mm512_load_ps(weights + g * kAvx512Lanes), passed, sum);
    }
    _mm512_store_ps(lane_sums + k * kAvx512Lanes, sum);
  }
}

template <int kGroups, int kKeys>
NEEDLE_AVX512 void tile_avx512(const float* packed, const float* weights, int heads_left, const float* keys, bool first_pass,
                               float* lane_sums) {
  __m512 dot[kGroups][kKeys];
  NEEDLE_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    NEEDLE_UNROLL
    for (int k = 0; k < kKeys; ++k) dot[g][k] = _mm512_setzero_ps();
  }
  for (int d = 0; d < kDim; ++d) {
    __m512 query[kGroups];
    NEEDLE_UNROLL
    for (int g = 0; g < kGroups; ++g) query[g] = _mm512_load_ps(packed + (d * kGroups + g) * kAvx512Lanes);
    NEEDLE_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      const __m512 key = _mm512_set1_ps(keys[k * kDim + d]);
      NEEDLE_UNROLL
      for (int g = 0; g < kGroups; ++g) dot[g][k] = _mm512_fmadd_ps(query[g], key, dot[g][k]);
    }
  }
  add_heads_avx512<kGroups, kKeys>(dot, weights, heads_left, first_pass, lane_sums);
}

template <int kGroups, int kKeys>
NEEDLE_AVX512 void tiles_avx512(const float* packed, const float* weights, int heads_left, const float* keys, int count, bool first_pass,
                                float* lane_sums) {
  for (; count >= kKeys; count -= kKeys) {
    tile_avx512<kGroups, kKeys>(packed, weights, heads_left, keys, first_pass, lane_sums);
    keys += kKeys * kDim;
    lane_sums += kKeys * kAvx512Lanes;
  }
  if constexpr (kKeys > 1) {
    if (count > 0) tiles_avx512<kGroups, kKeys - 1>(packed, weights, heads_left, keys, count, first_pass, lane_sums);
  }
}

// Four keys' lanes to four scores at a time; rows past `count` in the last four are zeroed first.
NEEDLE_AVX512 void sum_lanes_avx512(float* lane_sums, int count, float* scores) {
  for (int i = count; i % 4 != 0; ++i) _mm512_store_ps(lane_sums + i * kAvx512Lanes, _mm512_setzero_ps());
  for (int i = 0; i < count; i += 4) {
    const float* row = lane_sums + i * kAvx512Lanes;
    const __m512 a = _mm512_load_ps(row);
    const __m512 b = _mm512_load_ps(row + kAvx512Lanes);
    const __m512 c = _mm512_load_ps(row + 2 * kAvx512Lanes);
    const __m512 d = _mm512_load_ps(row + 3 * kAvx512Lanes);
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d ab_pairs = _mm512_castps_pd(ab);
    const __m512d cd_pairs = _mm512_castps_pd(cd);
    const __m512 abcd =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab_pairs, cd_pairs)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab_pairs, cd_pairs)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(scores + i, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
}

NEEDLE_AVX512 void score_keys_avx512(const void* packed, const HeadWeights& weights, int heads, const void* keys, int count,
                                     float* lane_sums, float* scores) {
  const float* query = static_cast<const float*>(packed);
  const float* key = static_cast<const float*>(keys);
  for (int head = 0; head < heads;) {
    const int left = heads - head;
    const int groups = std::min(kAvx512Groups, static_cast<int>(div_ceil(left, kAvx512Lanes)));
    const float* weight = weights.of + head;
    switch (groups) {
      case 4: tiles_avx512<4, 5>(query, weight, left, key, count, head == 0, lane_sums); break;
      case 3: tiles_avx512<3, 6>(query, weight, left, key, count, head == 0, lane_sums); break;
      case 2: tiles_avx512<2, 8>(query, weight, left, key, count, head == 0, lane_sums); break;
      default: tiles_avx512<1, 8>(query, weight, left, key, count, head == 0, lane_sums); break;
    }
    query += kDim * groups * kAvx512Lanes;
    head += groups * kAvx512Lanes;
  }
  sum_lanes_avx512(lane_sums, count, scores);
}

// ---------------------------------------------------------------------------------------------------------------------
// AVX-512 BF16: vdpbf16ps adds two bf16 products to each of sixteen fp32 lanes. A lane is a head; its query is packed
// as pairs (d, d + 1), and a pair of the key is broadcast. bf16 pages are read where they lie.

// [pass][pair of dimensions][group of the pass][lane], two bf16 each.
void pack_query_avx512bf16(const uint16_t* query, int heads, void* packed) {
  uint32_t* out = static_cast<uint32_t*>(packed);
  const int groups = static_cast<int>(div_ceil(heads, kAvx512Lanes));
  for (int first = 0; first < groups; first += kAvx512Groups) {
    const int width = std::min(kAvx512Groups, groups - first) * kAvx512Lanes;
    for (int lane = 0; lane < width; ++lane) {
      const int head = first * kAvx512Lanes + lane;
      for (int pair = 0; pair < kDim / 2; ++pair) {
        uint32_t both = 0;
        if (head < heads) std::memcpy(&both, query + head * kDim + 2 * pair, sizeof both);
        out[pair * width + lane] = both;
      }
    }
    out += kDim / 2 * width;
  }
}

NEEDLE_AVX512 inline void bf16_of_fp8_avx512(const std::byte* data, uint16_t* key) {
  // bf16 patterns of the eight magnitudes below the first normal, 0 .. 7 x 2^-9.
  const __m512i denormals = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
  const __m512i seven_bits = _mm512_set1_epi16(0x7F);
  for (int d = 0; d < kDim; d += 32) {
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + d)));
    const __m512i magnitude = _mm512_and_si512(code, seven_bits);
    __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 is_denormal = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    bits = _mm512_mask_permutexvar_epi16(bits, is_denormal, magnitude, denormals);
    const __mmask32 is_nan = _mm512_cmpeq_epu16_mask(magnitude, seven_bits);
    bits = _mm512_mask_mov_epi16(bits, is_nan, _mm512_set1_epi16(0x7FC0));
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(code, 8), _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
    _mm512_store_si512(key + d, _mm512_or_si512(bits, sign));
  }
}

NEEDLE_AVX512 inline void bf16_of_fp4_avx512(const std::byte* data, const std::byte* scales, uint16_t* key) {
  for (int part = 0; part < kDim / 32; ++part) {
    const __m512 scaled = _mm512_mul_ps(e2m1_all(), _mm512_set1_ps(float_of_ue8m0(static_cast<uint8_t>(scales[part]))));
    // The scaled values end in zeros, so their upper halves are their bf16 patterns.
    const __m256i sixteen = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(scaled), 16));
    const Nibbles codes = nibbles_of(data + part * 16);
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(codes.first), codes.second, 1);
    const __m512i values = _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(both), _mm512_castsi256_si512(sixteen));
    _mm512_store_si512(key + part * 32, values);
  }
}

NEEDLE_AVX512 const void* convert_keys_avx512bf16(const std::byte* part, const LayerView& view, int first, int count, float* buffer) {
  if (view.element == ElementFormat::kBf16) return key_data(part, view, first);
  // The buffer is this set's own; every other set keeps floats in it.
  // cppcheck-suppress invalidPointerCast
  uint16_t* out = reinterpret_cast<uint16_t*>(buffer);
  for (int i = 0; i < count; ++i) {
    const std::byte* data = key_data(part, view, first + i);
    if (view.element == ElementFormat::kFp8) {
      bf16_of_fp8_avx512(data, out + i * kDim);
    } else {
      bf16_of_fp4_avx512(data, key_scale(part, view, first + i), out + i * kDim);
    }
  }
  return buffer;
}

template <int kGroups, int kKeys>
NEEDLE_AVX512BF16 void tile_avx512bf16(const uint32_t* packed, const float* weights, int heads_left, const std::byte* keys, bool first_pass,
                                       float* lane_sums) {
  __m512 dot[kGroups][kKeys];
  NEEDLE_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    NEEDLE_UNROLL
    for (int k = 0; k < kKeys; ++k) dot[g][k] = _mm512_setzero_ps();
  }
  for (int pair = 0; pair < kDim / 2; ++pair) {
    __m512i query[kGroups];
    NEEDLE_UNROLL
    for (int g = 0; g < kGroups; ++g) query[g] = _mm512_load_si512(packed + (pair * kGroups + g) * kAvx512Lanes);
    NEEDLE_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      int both;
      std::memcpy(&both, keys + (k * kDim + 2 * pair) * 2, sizeof both);
      const __m512i key = _mm512_set1_epi32(both);
      NEEDLE_UNROLL
      for (int g = 0; g < kGroups; ++g) dot[g][k] = _mm512_dpbf16_ps(dot[g][k], (__m512bh)query[g], (__m512bh)key);
    }
  }
  add_heads_avx512<kGroups, kKeys>(dot, weights, heads_left, first_pass, lane_sums);
}

template <int kGroups, int kKeys>
NEEDLE_AVX512BF16 void tiles_avx512bf16(const uint32_t* packed, const float* weights, int heads_left, const std::byte* keys, int count,
                                        bool first_pass, float* lane_sums) {
  for (; count >= kKeys; count -= kKeys) {
    tile_avx512bf16<kGroups, kKeys>(packed, weights, heads_left, keys, first_pass, lane_sums);
    keys += kKeys * kDim * 2;
    lane_sums += kKeys * kAvx512Lanes;
  }
  if constexpr (kKeys > 1) {
    if (count > 0) {
      tiles_avx512bf16<kGroups, kKeys - 1>(packed, weights, heads_left, keys, count, first_pass, lane_sums);
    }
  }
}

NEEDLE_AVX512BF16 void score_keys_avx512bf16(const void* packed, const HeadWeights& weights, int heads, const void* keys, int count,
                                             float* lane_sums, float* scores) {
  const uint32_t* query = static_cast<const uint32_t*>(packed);
  const std::byte* key = static_cast<const std::byte*>(keys);
  for (int head = 0; head < heads;) {
    const int left = heads - head;
    const int groups = std::min(kAvx512Groups, static_cast<int>(div_ceil(left, kAvx512Lanes)));
    const float* weight = weights.of + head;
    switch (groups) {
      case 4: tiles_avx512bf16<4, 5>(query, weight, left, key, count, head == 0, lane_sums); break;
      case 3: tiles_avx512bf16<3, 6>(query, weight, left, key, count, head == 0, lane_sums); break;
      case 2: tiles_avx512bf16<2, 8>(query, weight, left, key, count, head == 0, lane_sums); break;
      default: tiles_avx512bf16<1, 8>(query, weight, left, key, count, head == 0, lane_sums); break;
    }
    query += kDim / 2 * groups * kAvx512Lanes;
    head += groups * kAvx512Lanes;
  }
  sum_lanes_avx512(lane_sums, count, scores);
}

#endif  // NEEDLE_X86

Twin twin_of(CpuIsa isa) {
  switch (isa) {
#if NEEDLE_X86
    case CpuIsa::kAvx2: return {pack_query_fp32<kAvx2Lanes, kAvx2Groups>, convert_keys_avx2, score_keys_avx2};
    case CpuIsa::kAvx512: return {pack_query_fp32<kAvx512Lanes, kAvx512Groups>, convert_keys_avx512, score_keys_avx512};
    case CpuIsa::kAvx512Bf16: return {pack_query_avx512bf16, convert_keys_avx512bf16, score_keys_avx512bf16};
#endif
    default: return {pack_query_fp32<kPortableLanes, kPortableGroups>, convert_keys_portable, score_keys_portable};
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What all twins share: which entries of which queries meet.

// Query t as [heads][128] bf16, in place where it is stored so, else exactly converted into `buffer`.
const uint16_t* query_as_bf16(const IndexLogitsArgs& args, int64_t t, uint16_t* buffer) {
  const int64_t count = int64_t{args.heads} * kDim;
  if (args.q_element == QueryElement::kBf16) return static_cast<const uint16_t*>(args.q) + t * count;
  const uint8_t* codes = static_cast<const uint8_t*>(args.q);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = t * count + i;
    float value;
    if (args.q_element == QueryElement::kFp8) {
      value = float_of_e4m3(codes[at]);
    } else {
      const uint32_t pair = codes[at / 2];
      value = float_of_e2m1(static_cast<uint8_t>(at % 2 == 0 ? pair & 15u : pair >> 4)) * float_of_ue8m0(args.q_scale[at / 32]);
    }
    buffer[i] = static_cast<uint16_t>(bits_of(value) >> 16);
  }
  return buffer;
}

int64_t table_row_of(const IndexLogitsArgs& args, int64_t t) {
  return args.query_row != nullptr ? args.query_row[t] : t / args.queries_per_row;
}

// Columns of the chunk that query t sees, 0..entry_count.
int64_t columns_seen(const IndexLogitsArgs& args, int64_t t) {
  return std::clamp<int64_t>(args.visible[t] - args.entry_begin, 0, args.entry_count);
}

void mark_absent(float* scores, int64_t count, OpReport& found) {
  std::fill_n(scores, std::max<int64_t>(count, 0), float_of_bits(kAbsentScoreBits));
  if (count <= 0) return;
  found.status |= kStatusAbsentPage;
  found.absent_entries += static_cast<uint64_t>(count);
}

// Scales the sums of one block, makes NaN canonical, and writes them out.
void write_scores(const float* sums, const LayerView& view, const std::byte* part, int first, int count, float* scores, OpReport& found) {
  const bool scaled = view.element == ElementFormat::kFp8;
  const std::byte* scales = key_scale(part, view, first);  // fp32, side by side in slot order
  uint64_t nans = 0;
  for (int i = 0; i < count; ++i) {
    float score = sums[i];
    if (scaled) {
      float scale;
      std::memcpy(&scale, scales + i * sizeof scale, sizeof scale);
      score *= scale;
    }
    const bool is_nan = score != score;
    nans += is_nan ? 1 : 0;
    scores[i] = is_nan ? float_of_bits(kNanScoreBits) : score;
  }
  if (nans == 0) return;
  found.status |= kStatusNanScore;
  found.nan_scores += nans;
}

// Queries first .. first + count, all of one table row, against columns begin .. end of the chunk. begin is at a page.
void score_run(const IndexLogitsArgs& args, const Twin& twin, int64_t first, int count, int64_t begin, int64_t end, TaskScratch& scratch,
               OpReport& found) {
  const LayerView& view = args.keys;
  int64_t seen[kQueriesTogetherMax] = {};
  int64_t longest = 0;
  for (int i = 0; i < count; ++i) {
    seen[i] = std::min(columns_seen(args, first + i), end);
    longest = std::max(longest, seen[i]);
  }
  if (longest <= begin) return;

  const int64_t packed_bytes = kPackedBytes / queries_together(args.heads);
  for (int i = 0; i < count; ++i) {
    if (seen[i] <= begin) continue;
    twin.pack_query(query_as_bf16(args, first + i, scratch.query), args.heads, scratch.packed + i * packed_bytes);
    const float* weights = args.head_weights + (first + i) * args.heads;
    std::copy_n(weights, args.heads, scratch.weights[i].of);
    std::fill(scratch.weights[i].of + args.heads, scratch.weights[i].of + kIndexHeadsMax, 0.0f);
  }

  const int64_t row = table_row_of(args, first);
  const bool row_exists = row >= 0 && row < args.pages.rows;
  for (int64_t column = begin; column < longest; column += view.slots_per_page) {
    const int64_t table_column = (args.entry_begin + column) / view.slots_per_page;
    const bool in_table = row_exists && table_column < args.pages.pages_per_row;
    if (!in_table) found.status |= kStatusBadPageTable;
    const int64_t page = in_table ? args.pages.pages[row * args.pages.row_stride + table_column] : kNoPage;
    const int64_t page_end = std::min<int64_t>(column + view.slots_per_page, longest);
    if (page < 0 || page >= view.page_count) {
      for (int i = 0; i < count; ++i) {
        mark_absent(args.scores + (first + i) * args.score_stride + column, std::min(seen[i], page_end) - column, found);
      }
      continue;
    }
    const std::byte* part = view.base + page * view.page_stride;
    for (int64_t block = column; block < page_end; block += kBlockKeys) {
      const int slot = static_cast<int>(block - column);
      const int keys_at_hand = static_cast<int>(std::min<int64_t>(kBlockKeys, page_end - block));
      const void* keys = twin.convert_keys(part, view, slot, keys_at_hand, scratch.keys);
      for (int i = 0; i < count; ++i) {
        const int keys_seen = static_cast<int>(std::min<int64_t>(keys_at_hand, seen[i] - block));
        if (keys_seen <= 0) continue;
        twin.score_keys(scratch.packed + i * packed_bytes, scratch.weights[i], args.heads, keys, keys_seen, scratch.lane_sums,
                        scratch.scores);
        write_scores(scratch.scores, view, part, slot, keys_seen, args.scores + (first + i) * args.score_stride + block, found);
      }
    }
  }
}

void add_to_report(OpReport* report, const OpReport& found) {
  if (report == nullptr || found.status == 0) return;
  std::atomic_ref<uint32_t>(report->status).fetch_or(found.status, std::memory_order_relaxed);
  std::atomic_ref<uint64_t>(report->nan_scores).fetch_add(found.nan_scores, std::memory_order_relaxed);
  std::atomic_ref<uint64_t>(report->absent_entries).fetch_add(found.absent_entries, std::memory_order_relaxed);
}

}  // namespace

absl::Status index_logits_cpu(const IndexLogitsArgs& args, CpuIsa isa, Workers& workers) {
  if (absl::Status status = check_index_logits(args); !status.ok()) return status;
  if (!cpu_has(isa)) {
    return absl::FailedPreconditionError(absl::StrCat("index_logits: instruction set ", name_of(isa),
                                                      " was asked for and this machine has at most ", name_of(best_cpu_isa()),
                                                      "; ask best_cpu_isa()"));
  }
  if (args.query_count == 0 || args.entry_count == 0) return absl::OkStatus();

  // A task is a few neighbouring queries and a piece of the chunk. Its size follows the work and the threads at hand;
  // by (1) above no score depends on it.
  const int together = queries_together(args.heads);
  const int64_t groups = div_ceil(args.query_count, together);
  int64_t longest = 0;
  for (int64_t t = 0; t < args.query_count; ++t) longest = std::max(longest, columns_seen(args, t));
  if (longest == 0) return absl::OkStatus();
  const int64_t pieces_wanted = workers.width() == 1 ? 1 : div_ceil(int64_t{workers.width()} * kTasksPerWorker, groups);
  const int64_t piece = round_up(std::max(div_ceil(longest, pieces_wanted), kTaskEntriesMin), args.keys.slots_per_page);
  const int64_t pieces = div_ceil(longest, piece);

  const Twin twin = twin_of(isa);
  const auto task = [&](int64_t index, int) {
    TaskScratch scratch;
    OpReport found = {};
    const int64_t begin = index % pieces * piece;
    const int64_t end = std::min(begin + piece, longest);
    const int64_t group_end = std::min<int64_t>((index / pieces + 1) * together, args.query_count);
    for (int64_t first = index / pieces * together; first < group_end;) {
      int64_t last = first + 1;
      while (last < group_end && table_row_of(args, last) == table_row_of(args, first)) ++last;
      score_run(args, twin, first, static_cast<int>(last - first), begin, end, scratch, found);
      first = last;
    }
    add_to_report(args.report, found);
  };
  workers.run(groups * pieces, [&task](int64_t index, int worker) { task(index, worker); });
  return absl::OkStatus();
}

}  // namespace needle
