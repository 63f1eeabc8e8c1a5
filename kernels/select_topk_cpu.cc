// select_topk, merge_topk and list_slots on the CPU.
//
// How a long row is selected: one pass makes the maximum of every small column of the row. The k-th largest of those is
// reached by k different entries at least, so no entry below it can be among the k best. A second look at the blocks
// that hold such a maximum, a quarter of an ordinary row, keeps the entries that reach it, little more than k, and a
// bisection over their scores leaves k.
//
// What must stay true:
//  1. Entries are ordered by score_order_bits, integers. What is done on scores, maxima and comparisons, runs with
//     denormals on, whatever the mode of the calling thread.
//  2. Kept entries stand in order of position, and every reduction is stable, so of equal scores the lower positions
//     stay. After a reduction among equals only strictly higher scores can still enter: later equals have lost.
//  3. A buffer that fills is reduced, never cut. Between reductions a threshold only rises. Columns whose maximum is
//     above the threshold number fewer than k, so an order of the row made on purpose costs a few reductions.
//  4. A column without a number proves nothing. Where fewer than k columns have one above -inf, every entry is kept and
//     reduced as the buffer fills; counted in report->fallbacks.
//  5. Nothing is allocated; each worker uses its own piece of the caller's scratch.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "kernels/op_report.h"
#include "kernels/select_topk.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define NEEDLE_TARGET_AVX2 __attribute__((target("avx2,fma,f16c,popcnt")))
#define NEEDLE_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,popcnt")))
#endif

namespace needle {
namespace {

// The kept entries are looked at for a full buffer every so many scores.
constexpr int64_t kBlock = 2048;
// Vector twins store whole registers and advance by what they kept.
constexpr int64_t kStorePad = 16;
// Rows up to this length are kept and reduced whole: finding a threshold first would cost as much.
constexpr int64_t kWholeRowMax = 4096;

// Columns of a block are kLanes wide and `depth` scores deep. Deeper columns are fewer to store and to look through,
// but a block with one good entry is read again whole.
constexpr int64_t kDepthUsual = 8;
constexpr int64_t kColumnsMax = 32768;  // of a row; longer rows have deeper columns. 128 KiB of scratch.
constexpr int64_t kLanesMax = 16;

constexpr uint32_t kInfinityKey = 0xFF800000u;
constexpr uint32_t kLowestNumberKey = 0x007FFFFFu;  // -inf
static_assert(score_order_bits(0x7F800000u) == kInfinityKey && score_order_bits(0xFF800000u) == kLowestNumberKey);

constexpr float kScorePadding = -std::numeric_limits<float>::infinity();

// Kept entries, ascending by position.
struct Kept {
  uint32_t* keys = nullptr;
  uint32_t* entries = nullptr;
  int64_t count = 0;
};

struct Seen {
  uint64_t nan = 0;
  uint64_t absent = 0;
};

uint32_t load_bits(const float* score) {
  uint32_t bits;
  std::memcpy(&bits, score, sizeof(bits));
  return bits;
}

// A row cut into `count` blocks of `lanes` columns, and a tail that is shorter than a block. Blocks are taken together
// in groups: the columns of a group are those that the threshold is found from.
struct Blocks {
  int64_t count = 0;  // 0: the row is kept whole
  int64_t depth = 0;
  int64_t lanes = 0;
  int64_t per_group = 1;

  int64_t block_scores() const { return depth * lanes; }
  int64_t group_columns() const { return div_ceil(count, per_group) * lanes; }
};

Blocks blocks_of(int64_t length, int64_t k, int64_t lanes) {
  Blocks blocks;
  blocks.lanes = lanes;
  if (length <= kWholeRowMax || length < 4 * k) return blocks;
  blocks.depth = std::clamp<int64_t>(length / (2 * k), 2, kDepthUsual);
  if (length > kDepthUsual * kColumnsMax) blocks.depth = div_ceil(length, kColumnsMax);
  blocks.count = length / blocks.block_scores();
  // Of m columns of an ordinary row the k-th largest maximum is reached by m x ln(m / (m - k)) entries: 1.15 k for 4 k.
  blocks.per_group = std::max<int64_t>(1, blocks.count * lanes / (4 * k));
  return blocks;
}

// ---------------------------------------------------------------------------------------------------------------
// What each instruction set does its own way. To be called with denormals on.

struct Scanner {
  int64_t lanes;
  // Counts the NaN and the absent ones of scores[0, count).
  void (*count_nan)(const float* scores, int64_t count, Seen& seen);
  // The columns' maxima as order bits, [blocks, lanes] and [groups, lanes], and the NaN of all blocks. A column without
  // a number gives -inf or NaN.
  void (*maxima)(const float* scores, const Blocks& blocks, uint32_t* of_blocks, uint32_t* of_groups, Seen& seen);
  // Bit b is set where a column of block b (of at most 64) reaches the threshold.
  uint64_t (*reaching)(const uint32_t* of_blocks, int64_t blocks, uint32_t threshold);
  // Keeps the entries of scores[0, count) that are not absent and reach `threshold`; `first` is the first one's number.
  void (*keep)(const float* scores, int64_t count, uint32_t first, uint32_t threshold, Kept& kept);
  int64_t (*count_reaching)(const uint32_t* keys, int64_t count, uint32_t threshold);
};

constexpr int64_t kPortableLanes = 8;

void count_nan_portable(const float* scores, int64_t count, Seen& seen) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = load_bits(scores + i);
    const bool absent = bits == kAbsentScoreBits;
    seen.absent += absent ? 1 : 0;
    seen.nan += score_order_bits(bits) == 0u && !absent ? 1 : 0;
  }
}

void maxima_portable(const float* scores, const Blocks& blocks, uint32_t* of_blocks, uint32_t* of_groups, Seen& seen) {
  std::fill_n(of_groups, blocks.group_columns(), 0u);
  for (int64_t b = 0; b < blocks.count; ++b) {
    uint32_t* const block = of_blocks + b * kPortableLanes;
    uint32_t* const group = of_groups + b / blocks.per_group * kPortableLanes;
    uint32_t high[kPortableLanes] = {};
    uint32_t any_nan = 0;
    for (int64_t row = 0; row < blocks.depth; ++row, scores += kPortableLanes) {
      for (int64_t lane = 0; lane < kPortableLanes; ++lane) {
        const uint32_t key = score_order_bits(load_bits(scores + lane));
        high[lane] = std::max(high[lane], key);
        any_nan |= key == 0u ? 1u : 0u;
      }
    }
    for (int64_t lane = 0; lane < kPortableLanes; ++lane) {
      block[lane] = high[lane];
      group[lane] = std::max(group[lane], high[lane]);
    }
    if (any_nan != 0) count_nan_portable(scores - blocks.block_scores(), blocks.block_scores(), seen);
  }
}

uint64_t reaching_portable(const uint32_t* of_blocks, int64_t blocks, uint32_t threshold) {
  uint64_t reach = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    uint64_t any = 0;
    for (int64_t lane = 0; lane < kPortableLanes; ++lane) {
      any |= of_blocks[b * kPortableLanes + lane] >= threshold ? 1 : 0;
    }
    reach |= any << b;
  }
  return reach;
}

void keep_portable(const float* scores, int64_t count, uint32_t first, uint32_t threshold, Kept& kept) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = load_bits(scores + i);
    const uint32_t key = score_order_bits(bits);
    kept.keys[kept.count] = key;
    kept.entries[kept.count] = first + static_cast<uint32_t>(i);
    kept.count += key >= threshold && bits != kAbsentScoreBits ? 1 : 0;
  }
}

int64_t count_reaching_portable(const uint32_t* keys, int64_t count, uint32_t threshold) {
  int64_t reach = 0;
  for (int64_t i = 0; i < count; ++i) reach += keys[i] >= threshold ? 1 : 0;
  return reach;
}

#if defined(__x86_64__)

// g++ 12 takes the deliberately undefined merge operands inside its own AVX-512 header for a mistake of the caller.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

constexpr int64_t kAvx2Lanes = 8;

// Most vectors of a block that is read again keep nothing: a mask of so many scores comes first, a bit each, then the
// vectors with any.
constexpr int64_t kMaskScores = 64;

// The score that numbers are compared with to reach a threshold above 0: a number reaches it where it is >= this, and
// NaN never does. One past +inf is the order bits of a NaN, reached by none.
float limit_of(uint32_t threshold) {
  const uint32_t bits = score_bits_of_order(std::max(threshold, kLowestNumberKey));
  float limit;
  std::memcpy(&limit, &bits, sizeof(limit));
  return limit;
}

NEEDLE_TARGET_AVX2 inline __m256i load_avx2(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }

NEEDLE_TARGET_AVX2 inline void store_avx2(void* at, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(at), value); }

// score_order_bits of eight scores; absent ones come out as NaN does.
NEEDLE_TARGET_AVX2 inline __m256i order_avx2(__m256i bits) {
  const __m256i top = _mm256_set1_epi32(static_cast<int>(0x80000000u));
  const __m256i magnitude = _mm256_andnot_si256(top, bits);
  __m256i key = _mm256_xor_si256(bits, _mm256_or_si256(_mm256_srai_epi32(bits, 31), top));
  key = _mm256_blendv_epi8(key, top, _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256()));
  return _mm256_andnot_si256(_mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000)), key);
}

NEEDLE_TARGET_AVX2 inline __m256i reaches_avx2(__m256i keys, __m256i threshold) {
  return _mm256_cmpeq_epi32(_mm256_max_epu32(keys, threshold), keys);
}

NEEDLE_TARGET_AVX2 inline uint32_t lanes_of(__m256i mask) { return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(mask))); }

NEEDLE_TARGET_AVX2 void count_nan_avx2(const float* scores, int64_t count, Seen& seen) {
  const __m256i absent = _mm256_set1_epi32(static_cast<int>(kAbsentScoreBits));
  int64_t i = 0;
  for (; i + kAvx2Lanes <= count; i += kAvx2Lanes) {
    const __m256i bits = load_avx2(scores + i);
    const uint32_t gone = lanes_of(_mm256_cmpeq_epi32(bits, absent));
    const uint32_t nan = lanes_of(_mm256_cmpeq_epi32(order_avx2(bits), _mm256_setzero_si256()));
    seen.absent += static_cast<uint64_t>(__builtin_popcount(gone));
    seen.nan += static_cast<uint64_t>(__builtin_popcount(nan & ~gone));
  }
  count_nan_portable(scores + i, count - i, seen);
}

NEEDLE_TARGET_AVX2 void maxima_avx2(const float* scores, const Blocks& blocks, uint32_t* of_blocks, uint32_t* of_groups, Seen& seen) {
  const __m256 lowest = _mm256_set1_ps(-std::numeric_limits<float>::infinity());
  for (int64_t b = 0; b < blocks.count; of_groups += kAvx2Lanes) {
    __m256 group = lowest;
    for (const int64_t end = std::min(blocks.count, b + blocks.per_group); b < end; ++b) {
      // Of two operands of which one is NaN, max gives the second: NaN never enters.
      __m256 even = lowest;
      __m256 odd = lowest;
      __m256 unordered = _mm256_setzero_ps();
      int64_t row = 0;
      for (; row + 2 <= blocks.depth; row += 2, scores += 2 * kAvx2Lanes) {
        const __m256 first = _mm256_loadu_ps(scores);
        const __m256 second = _mm256_loadu_ps(scores + kAvx2Lanes);
        even = _mm256_max_ps(first, even);
        odd = _mm256_max_ps(second, odd);
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(first, second, _CMP_UNORD_Q));
      }
      for (; row < blocks.depth; ++row, scores += kAvx2Lanes) {
        const __m256 last = _mm256_loadu_ps(scores);
        even = _mm256_max_ps(last, even);
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(last, last, _CMP_UNORD_Q));
      }
      const __m256 high = _mm256_max_ps(even, odd);
      group = _mm256_max_ps(high, group);
      store_avx2(of_blocks, order_avx2(_mm256_castps_si256(high)));
      of_blocks += kAvx2Lanes;
      if (_mm256_movemask_ps(unordered) != 0) {
        count_nan_avx2(scores - blocks.block_scores(), blocks.block_scores(), seen);
      }
    }
    store_avx2(of_groups, order_avx2(_mm256_castps_si256(group)));
  }
}

NEEDLE_TARGET_AVX2 uint64_t reaching_avx2(const uint32_t* of_blocks, int64_t blocks, uint32_t threshold) {
  const __m256i limit = _mm256_set1_epi32(static_cast<int>(threshold));
  uint64_t reach = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const bool any = lanes_of(reaches_avx2(load_avx2(of_blocks + b * kAvx2Lanes), limit)) != 0;
    reach |= static_cast<uint64_t>(any) << b;
  }
  return reach;
}

// Which lanes to take so that those of a mask stand first, in order.
constexpr std::array<std::array<uint8_t, 8>, 256> kCompress = [] {
  std::array<std::array<uint8_t, 8>, 256> table{};
  for (unsigned mask = 0; mask < 256; ++mask) {
    size_t out = 0;
    for (unsigned lane = 0; lane < 8; ++lane) {
      if ((mask >> lane & 1u) != 0) table[mask][out++] = static_cast<uint8_t>(lane);
    }
  }
  return table;
}();

NEEDLE_TARGET_AVX2 void keep_avx2(const float* scores, int64_t count, uint32_t first, uint32_t threshold, Kept& kept) {
  const __m256 limit = _mm256_set1_ps(limit_of(threshold));
  const __m256i absent = _mm256_set1_epi32(static_cast<int>(kAbsentScoreBits));
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  uint32_t* const keys = kept.keys;
  uint32_t* const entries = kept.entries;
  int64_t out = kept.count;
  const int64_t whole = count / kAvx2Lanes * kAvx2Lanes;
  for (int64_t at = 0; at < whole; at += kMaskScores) {
    const int64_t masked = std::min(kMaskScores, whole - at);
    uint64_t reach = 0;
    for (int64_t i = 0; threshold > 0u && i < masked; i += kAvx2Lanes) {
      const __m256 some = _mm256_cmp_ps(_mm256_loadu_ps(scores + at + i), limit, _CMP_GE_OQ);
      reach |= static_cast<uint64_t>(_mm256_movemask_ps(some)) << i;
    }
    for (int64_t i = 0; threshold == 0u && i < masked; i += kAvx2Lanes) {
      const uint32_t gone = lanes_of(_mm256_cmpeq_epi32(load_avx2(scores + at + i), absent));
      reach |= static_cast<uint64_t>(gone ^ 0xFFu) << i;
    }
    while (reach != 0) {
      const int shift = __builtin_ctzll(reach) & ~7;
      const uint32_t keep = static_cast<uint32_t>(reach >> shift & 0xFFu);
      reach &= ~(uint64_t{0xFF} << shift);
      const int64_t i = at + shift;
      const __m256i key = order_avx2(load_avx2(scores + i));
      const __m256i entry = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first + static_cast<uint32_t>(i))), lanes);
      const __m256i take = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kCompress[keep].data())));
      store_avx2(keys + out, _mm256_permutevar8x32_epi32(key, take));
      store_avx2(entries + out, _mm256_permutevar8x32_epi32(entry, take));
      out += __builtin_popcount(keep);
    }
  }
  kept.count = out;
  keep_portable(scores + whole, count - whole, first + static_cast<uint32_t>(whole), threshold, kept);
}

NEEDLE_TARGET_AVX2 int64_t count_reaching_avx2(const uint32_t* keys, int64_t count, uint32_t threshold) {
  const __m256i limit = _mm256_set1_epi32(static_cast<int>(threshold));
  __m256i even = _mm256_setzero_si256();  // minus the number that reach, in each lane
  __m256i odd = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 2 * kAvx2Lanes <= count; i += 2 * kAvx2Lanes) {
    even = _mm256_add_epi32(even, reaches_avx2(load_avx2(keys + i), limit));
    odd = _mm256_add_epi32(odd, reaches_avx2(load_avx2(keys + i + kAvx2Lanes), limit));
  }
  int32_t lanes[kAvx2Lanes];
  store_avx2(lanes, _mm256_add_epi32(even, odd));
  int64_t reach = 0;
  for (const int32_t lane : lanes) reach -= lane;
  return reach + count_reaching_portable(keys + i, count - i, threshold);
}

constexpr int64_t kAvx512Lanes = 16;

NEEDLE_TARGET_AVX512 inline __m512i load_avx512(const void* at) { return _mm512_loadu_si512(at); }

// score_order_bits of sixteen scores; absent ones come out as NaN does.
NEEDLE_TARGET_AVX512 inline __m512i order_avx512(__m512i bits) {
  const __m512i top = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  const __m512i doubled = _mm512_add_epi32(bits, bits);  // shifts the sign out
  const __mmask16 is_number = _mm512_cmple_epu32_mask(doubled, _mm512_set1_epi32(static_cast<int>(0xFF000000u)));
  // bits ^ (sign ? all ones : top bit). 0x1E is the truth table of a ^ (b | c).
  const __m512i raw = _mm512_ternarylogic_epi32(bits, _mm512_srai_epi32(bits, 31), top, 0x1E);
  return _mm512_maskz_mov_epi32(is_number, _mm512_mask_mov_epi32(raw, _mm512_testn_epi32_mask(doubled, doubled), top));
}

NEEDLE_TARGET_AVX512 void count_nan_avx512(const float* scores, int64_t count, Seen& seen) {
  const __m512i absent = _mm512_set1_epi32(static_cast<int>(kAbsentScoreBits));
  int64_t i = 0;
  for (; i + kAvx512Lanes <= count; i += kAvx512Lanes) {
    const __m512i bits = load_avx512(scores + i);
    const __m512i key = order_avx512(bits);
    const uint32_t gone = _mm512_cmpeq_epi32_mask(bits, absent);
    const uint32_t nan = _mm512_testn_epi32_mask(key, key);
    seen.absent += static_cast<uint64_t>(__builtin_popcount(gone));
    seen.nan += static_cast<uint64_t>(__builtin_popcount(nan & ~gone));
  }
  count_nan_portable(scores + i, count - i, seen);
}

NEEDLE_TARGET_AVX512 void maxima_avx512(const float* scores, const Blocks& blocks, uint32_t* of_blocks, uint32_t* of_groups, Seen& seen) {
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int64_t b = 0; b < blocks.count; of_groups += kAvx512Lanes) {
    __m512 group = lowest;
    for (const int64_t end = std::min(blocks.count, b + blocks.per_group); b < end; ++b) {
      __m512 even = lowest;  // as in maxima_avx2
      __m512 odd = lowest;
      uint32_t unordered = 0;
      int64_t row = 0;
      for (; row + 2 <= blocks.depth; row += 2, scores += 2 * kAvx512Lanes) {
        const __m512 first = _mm512_loadu_ps(scores);
        const __m512 second = _mm512_loadu_ps(scores + kAvx512Lanes);
        even = _mm512_max_ps(first, even);
        odd = _mm512_max_ps(second, odd);
        unordered |= _mm512_cmp_ps_mask(first, second, _CMP_UNORD_Q);
      }
      for (; row < blocks.depth; ++row, scores += kAvx512Lanes) {
        const __m512 last = _mm512_loadu_ps(scores);
        even = _mm512_max_ps(last, even);
        unordered |= _mm512_cmp_ps_mask(last, last, _CMP_UNORD_Q);
      }
      const __m512 high = _mm512_max_ps(even, odd);
      group = _mm512_max_ps(high, group);
      _mm512_storeu_si512(of_blocks, order_avx512(_mm512_castps_si512(high)));
      of_blocks += kAvx512Lanes;
      if (unordered != 0) count_nan_avx512(scores - blocks.block_scores(), blocks.block_scores(), seen);
    }
    _mm512_storeu_si512(of_groups, order_avx512(_mm512_castps_si512(group)));
  }
}

NEEDLE_TARGET_AVX512 uint64_t reaching_avx512(const uint32_t* of_blocks, int64_t blocks, uint32_t threshold) {
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(threshold));
  uint64_t reach = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const bool any = _mm512_cmpge_epu32_mask(load_avx512(of_blocks + b * kAvx512Lanes), limit) != 0;
    reach |= static_cast<uint64_t>(any) << b;
  }
  return reach;
}

NEEDLE_TARGET_AVX512 void keep_avx512(const float* scores, int64_t count, uint32_t first, uint32_t threshold, Kept& kept) {
  const __m512 limit = _mm512_set1_ps(limit_of(threshold));
  const __m512i absent = _mm512_set1_epi32(static_cast<int>(kAbsentScoreBits));
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  uint32_t* const keys = kept.keys;
  uint32_t* const entries = kept.entries;
  int64_t out = kept.count;
  const int64_t whole = count / kAvx512Lanes * kAvx512Lanes;
  for (int64_t at = 0; at < whole; at += kMaskScores) {
    const int64_t masked = std::min(kMaskScores, whole - at);
    uint64_t reach = 0;
    for (int64_t i = 0; threshold > 0u && i < masked; i += kAvx512Lanes) {
      const __mmask16 some = _mm512_cmp_ps_mask(_mm512_loadu_ps(scores + at + i), limit, _CMP_GE_OQ);
      reach |= static_cast<uint64_t>(some) << i;
    }
    for (int64_t i = 0; threshold == 0u && i < masked; i += kAvx512Lanes) {
      const __mmask16 there = _mm512_cmpneq_epi32_mask(load_avx512(scores + at + i), absent);
      reach |= static_cast<uint64_t>(there) << i;
    }
    while (reach != 0) {
      const int shift = __builtin_ctzll(reach) & ~15;
      const __mmask16 keep = static_cast<__mmask16>(reach >> shift & 0xFFFFu);
      reach &= ~(uint64_t{0xFFFF} << shift);
      const int64_t i = at + shift;
      const __m512i key = order_avx512(load_avx512(scores + i));
      const __m512i entry = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first + static_cast<uint32_t>(i))), lanes);
      // Compress in the register and store it whole: a compressing store is microcoded on some processors.
      _mm512_storeu_si512(keys + out, _mm512_maskz_compress_epi32(keep, key));
      _mm512_storeu_si512(entries + out, _mm512_maskz_compress_epi32(keep, entry));
      out += __builtin_popcount(keep);
    }
  }
  kept.count = out;
  keep_portable(scores + whole, count - whole, first + static_cast<uint32_t>(whole), threshold, kept);
}

NEEDLE_TARGET_AVX512 int64_t count_reaching_avx512(const uint32_t* keys, int64_t count, uint32_t threshold) {
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(threshold));
  int64_t reach = 0;
  int64_t i = 0;
  for (; i + kAvx512Lanes <= count; i += kAvx512Lanes) {
    reach += __builtin_popcount(_mm512_cmpge_epu32_mask(load_avx512(keys + i), limit));
  }
  return reach + count_reaching_portable(keys + i, count - i, threshold);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

// The default floating-point mode, for as long as it lives: with denormals-are-zero a comparison would confuse them.
// What is to run in it must be behind a call that the compiler cannot look into, as a Scanner's are.
class DenormalsOn {
 public:
  DenormalsOn() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DenormalsOn() { _mm_setcsr(before_); }
  DenormalsOn(const DenormalsOn&) = delete;
  DenormalsOn& operator=(const DenormalsOn&) = delete;

 private:
  unsigned before_;
};

#else

struct DenormalsOn {
  DenormalsOn() {}  // the portable twin has no floating-point step
};

#endif  // __x86_64__

Scanner scanner_for(CpuIsa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case CpuIsa::kAvx512Bf16:
    case CpuIsa::kAvx512: return {kAvx512Lanes, count_nan_avx512, maxima_avx512, reaching_avx512, keep_avx512, count_reaching_avx512};
    case CpuIsa::kAvx2: return {kAvx2Lanes, count_nan_avx2, maxima_avx2, reaching_avx2, keep_avx2, count_reaching_avx2};
    case CpuIsa::kPortable: break;
  }
#else
  (void)isa;
#endif
  return {kPortableLanes, count_nan_portable, maxima_portable, reaching_portable, keep_portable, count_reaching_portable};
}

// ---------------------------------------------------------------------------------------------------------------
// The k-th largest of a run of keys.

struct Cut {
  uint32_t key = 0;
  int64_t reach = 0;  // keys at or above it: k to k + slack, or more where `key` is the k-th largest itself, with equals
};

// Bisection: a count is one vector pass, and a pass over the few keys there are is cheaper than a histogram of them.
// 1 <= k <= count.
Cut kth_largest(const Scanner& scanner, const uint32_t* keys, int64_t count, int64_t k, int64_t slack) {
  Cut cut{0u, count};
  uint32_t high = kInfinityKey + 1;  // reached by none
  while (cut.reach > k + slack && high - cut.key > 1) {
    const uint32_t middle = cut.key + (high - cut.key) / 2;
    const int64_t reach = scanner.count_reaching(keys, count, middle);
    if (reach >= k) {
      cut = {middle, reach};
    } else {
      high = middle;
    }
  }
  return cut;
}

// Leaves the k best of `kept`, still ascending by position. Returns what later entries must reach to be among them.
uint32_t reduce(const Scanner& scanner, Kept& kept, int64_t k) {
  const Cut cut = kth_largest(scanner, kept.keys, kept.count, k, 0);
  const bool equals = cut.reach > k;
  int64_t equal_left = equals ? k - scanner.count_reaching(kept.keys, kept.count, cut.key + 1) : kept.count;
  int64_t out = 0;
  for (int64_t i = 0; i < kept.count; ++i) {
    const uint32_t key = kept.keys[i];
    const bool equal = key == cut.key && equal_left > 0;
    equal_left -= equal ? 1 : 0;
    kept.keys[out] = key;
    kept.entries[out] = kept.entries[i];
    out += (key > cut.key || equal) ? 1 : 0;
  }
  kept.count = out;
  return equals ? cut.key + 1 : cut.key;
}

// ---------------------------------------------------------------------------------------------------------------
// One worker's piece of the scratch.

struct SelectScratch {
  uint32_t* keys = nullptr;       // [capacity + kStorePad]
  uint32_t* entries = nullptr;    // [capacity + kStorePad]
  uint32_t* of_blocks = nullptr;  // [kColumnsMax]
  uint32_t* of_groups = nullptr;  // [kColumnsMax], or less where k is small
  uint64_t* ranks = nullptr;      // [k]
};

// Room for the kept entries: twice k and a block, so that a reduction is paid by at least k entries that entered.
int64_t kept_capacity(int64_t k) { return std::max<int64_t>(2 * k, kWholeRowMax) + kBlock; }

int64_t kept_bytes(int64_t k) { return round_up((kept_capacity(k) + kStorePad) * 4, 64); }

// Groups of blocks are at least 4 k columns, so at most twice that, where the row has so many, and one group more.
int64_t group_bytes(int64_t k) { return round_up(std::min<int64_t>(8 * k + 2 * kLanesMax, kColumnsMax) * 4, 64); }

int64_t select_piece_bytes(int64_t k) { return 2 * kept_bytes(k) + kColumnsMax * 4 + group_bytes(k) + round_up(k * 8, 64); }

SelectScratch select_piece(void* scratch, int64_t k, int worker) {
  std::byte* at = static_cast<std::byte*>(scratch) + worker * select_piece_bytes(k);
  SelectScratch piece;
  piece.keys = reinterpret_cast<uint32_t*>(at);
  piece.entries = reinterpret_cast<uint32_t*>(at += kept_bytes(k));
  piece.of_blocks = reinterpret_cast<uint32_t*>(at += kept_bytes(k));
  piece.of_groups = reinterpret_cast<uint32_t*>(at += kColumnsMax * 4);
  piece.ranks = reinterpret_cast<uint64_t*>(at + group_bytes(k));
  return piece;
}

// ---------------------------------------------------------------------------------------------------------------
// One row.

struct RowScan {
  const float* scores = nullptr;
  int64_t length = 0;
  int64_t k = 0;
  const Scanner& scanner;
  const SelectScratch& scratch;
};

// Keeps what reaches `threshold` of the entries [begin, end). A full buffer is reduced, and raises the threshold.
void keep_range(const RowScan& row, int64_t begin, int64_t end, uint32_t& threshold, Kept& kept) {
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    if (kept.count + count > kept_capacity(row.k)) threshold = reduce(row.scanner, kept, row.k);
    row.scanner.keep(row.scores + at, count, static_cast<uint32_t>(at), threshold, kept);
  }
}

// A score, as order bits, that the row's k best reach; 0 where the columns prove none. Counts NaN and absent entries.
uint32_t threshold_of(const RowScan& row, const Blocks& blocks, Seen& seen) {
  row.scanner.maxima(row.scores, blocks, row.scratch.of_blocks, row.scratch.of_groups, seen);
  // A threshold a little too low is good enough, and found sooner.
  const int64_t slack = row.k / 16;
  Cut cut = kth_largest(row.scanner, row.scratch.of_groups, blocks.group_columns(), row.k, slack);
  // Where the best stand together, as in a sorted row, the narrower columns prove a higher one; among equals they do not.
  const int64_t columns = blocks.count * blocks.lanes;
  if (cut.reach <= row.k + slack && row.scanner.count_reaching(row.scratch.of_blocks, columns, cut.key) > 2 * row.k) {
    cut = kth_largest(row.scanner, row.scratch.of_blocks, columns, row.k, slack);
  }
  return cut.key > kLowestNumberKey ? cut.key : 0u;
}

// Keeps all that can be among the k best, ascending by position, and counts NaN and absent entries.
void keep_candidates(const RowScan& row, Kept& kept, Seen& seen, uint64_t& fallbacks) {
  const Blocks blocks = blocks_of(row.length, row.k, row.scanner.lanes);
  const int64_t tail = blocks.count * blocks.block_scores();
  row.scanner.count_nan(row.scores + tail, row.length - tail, seen);
  uint32_t threshold = 0;
  if (blocks.count > 0) {
    threshold = threshold_of(row, blocks, seen);
    fallbacks += threshold == 0u ? 1 : 0;
  }
  if (threshold == 0u) return keep_range(row, 0, row.length, threshold, kept);

  constexpr int64_t kAtOnce = 64;  // blocks, one bit each
  constexpr int64_t kLineScores = 16;
  const int64_t prefetched = std::min<int64_t>(blocks.block_scores(), 8 * kLineScores);
  for (int64_t first = 0; first < blocks.count; first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, blocks.count - first);
    uint64_t reach = row.scanner.reaching(row.scratch.of_blocks + first * blocks.lanes, count, threshold);
    for (uint64_t left = reach; left != 0; left &= left - 1) {
      const float* const block = row.scores + (first + __builtin_ctzll(left)) * blocks.block_scores();
      for (int64_t line = 0; line < prefetched; line += kLineScores) __builtin_prefetch(block + line);
    }
    for (; reach != 0; reach &= reach - 1) {
      const int64_t at = (first + __builtin_ctzll(reach)) * blocks.block_scores();
      keep_range(row, at, at + blocks.block_scores(), threshold, kept);
    }
  }
  keep_range(row, tail, row.length, threshold, kept);
}

// Fills `kept` with the row's k best (all that are present, if fewer), ascending by position.
void select_row(const RowScan& row, Kept& kept, Seen& seen, uint64_t& fallbacks) {
  const DenormalsOn mode;
  kept = {row.scratch.keys, row.scratch.entries, 0};
  keep_candidates(row, kept, seen, fallbacks);
  if (kept.count > row.k) reduce(row.scanner, kept, row.k);
}

float score_of_key(uint32_t key) {
  const uint32_t bits = score_bits_of_order(key);
  float score;
  std::memcpy(&score, &bits, sizeof(score));
  return score;
}

void write_row(const SelectTopkArgs& args, int64_t row, const VisibleRow& visible, Kept& kept, uint64_t* ranks, OpReport& found) {
  if (args.order == TopkOrder::kByRank) {
    for (int64_t i = 0; i < kept.count; ++i) {
      ranks[i] = (static_cast<uint64_t>(kept.keys[i]) << 32) | (0xFFFFFFFFu - kept.entries[i]);
    }
    std::sort(ranks, ranks + kept.count, std::greater<uint64_t>());
    for (int64_t i = 0; i < kept.count; ++i) {
      kept.keys[i] = static_cast<uint32_t>(ranks[i] >> 32);
      kept.entries[i] = 0xFFFFFFFFu - static_cast<uint32_t>(ranks[i]);
    }
  }

  const int64_t begin = row * args.out_stride;
  const int64_t padding = args.out_stride - kept.count;
  for (int64_t i = 0; i < kept.count; ++i) {
    args.positions[begin + i] = static_cast<int32_t>(visible.base + kept.entries[i]);
  }
  std::fill_n(args.positions + begin + kept.count, padding, kNoEntry);
  if (args.out_scores != nullptr) {
    for (int64_t i = 0; i < kept.count; ++i) args.out_scores[begin + i] = score_of_key(kept.keys[i]);
    std::fill_n(args.out_scores + begin + kept.count, padding, kScorePadding);
  }
  if (args.slots != nullptr) {
    uint64_t missing = 0;
    for (int64_t i = 0; i < kept.count; ++i) {
      const int32_t slot = slot_of_entry(visible.pages, args.page_count, args.slots_per_page, kept.entries[i]);
      args.slots[begin + i] = slot;
      missing += slot == kNoEntry ? 1 : 0;
    }
    std::fill_n(args.slots + begin + kept.count, padding, kNoEntry);
    if (missing > 0) {
      found.absent_entries += missing;
      found.status |= kStatusAbsentPage;
    }
  }
  args.counts[row] = static_cast<int32_t>(kept.count);
}

absl::Status check_scratch(absl::string_view operation, const void* scratch, int64_t given, int64_t needed) {
  if (given < needed || (scratch == nullptr && needed > 0)) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": scratch_bytes is ", scratch == nullptr ? 0 : given,
                                                   ", must be >= ", needed, " for this k and worker width"));
  }
  if (reinterpret_cast<uintptr_t>(scratch) % 64 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": scratch must be 64-byte aligned"));
  }
  return absl::OkStatus();
}

absl::Status check_isa(absl::string_view operation, CpuIsa isa) {
  if (cpu_has(isa)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(operation, ": this machine has no ", name_of(isa), "; pass best_cpu_isa() or one of cpu_isas_present()"));
}

}  // namespace

int64_t select_topk_cpu_scratch(const SelectTopkArgs& args, int width) {
  if (args.k < 1 || args.k > kTopkMax || width < 1) return 0;
  return width * select_piece_bytes(args.k);
}

absl::Status select_topk_cpu(const SelectTopkArgs& args, CpuIsa isa, Workers& workers, void* scratch, int64_t scratch_bytes) {
  absl::Status status = check_select_topk(args);
  if (!status.ok()) return status;
  status = check_isa("select_topk_cpu", isa);
  if (!status.ok()) return status;
  status = check_scratch("select_topk_cpu", scratch, scratch_bytes, select_topk_cpu_scratch(args, workers.width()));
  if (!status.ok()) return status;

  const Scanner scanner = scanner_for(isa);
  const auto select_one = [&](int64_t row, int worker) {
    const SelectScratch piece = select_piece(scratch, args.k, worker);
    const VisibleRow visible = visible_row(args, row);
    const RowScan scan{args.scores + row * args.score_stride, visible.length, args.k, scanner, piece};
    OpReport found{};
    Kept kept{piece.keys, piece.entries, 0};
    Seen seen;
    select_row(scan, kept, seen, found.fallbacks);

    found.status = visible.status;
    found.nan_scores = seen.nan;
    found.absent_entries = seen.absent;
    if (seen.nan > 0) found.status |= kStatusNanScore;
    if (seen.absent > 0) found.status |= kStatusAbsentPage;
    write_row(args, row, visible, kept, piece.ranks, found);
    add_to_report(args.report, found);
  };
  workers.run(args.rows, std::ref(select_one));
  return absl::OkStatus();
}

// ---------------------------------------------------------------------------------------------------------------
// merge_topk: candidates by their rank key, unique a position, in a buffer that is reduced to k when it is full.

namespace {

struct Candidate {
  uint64_t rank;
  int64_t source;  // index into the shards' lists
};

int64_t merge_capacity(int64_t k) { return 2 * k + 1024; }

bool candidate_before(const Candidate& a, const Candidate& b) { return a.rank > b.rank; }

}  // namespace

int64_t merge_topk_cpu_scratch(const MergeTopkArgs& args, int width) {
  if (args.k < 1 || args.k > kTopkMax || width < 1) return 0;
  return width * round_up(merge_capacity(args.k) * static_cast<int64_t>(sizeof(Candidate)), 64);
}

absl::Status merge_topk_cpu(const MergeTopkArgs& args, Workers& workers, void* scratch, int64_t scratch_bytes) {
  absl::Status status = check_merge_topk(args);
  if (!status.ok()) return status;
  status = check_scratch("merge_topk_cpu", scratch, scratch_bytes, merge_topk_cpu_scratch(args, workers.width()));
  if (!status.ok()) return status;
  add_to_report(args.report, mixed_variants_of(args));

  const int64_t piece_bytes = merge_topk_cpu_scratch(args, 1);
  const int64_t capacity = merge_capacity(args.k);
  const auto merge_one = [&](int64_t row, int worker) {
    Candidate* kept = reinterpret_cast<Candidate*>(static_cast<std::byte*>(scratch) + worker * piece_bytes);
    int64_t count = 0;
    uint64_t threshold = 0;  // ranks at or below it have lost; 0 until the buffer was full once
    OpReport found{};
    const auto reduce_to_k = [&] {
      std::nth_element(kept, kept + args.k - 1, kept + count, candidate_before);
      count = args.k;
      threshold = kept[args.k - 1].rank;
    };
    for (int64_t shard = 0; shard < args.shards; ++shard) {
      const int64_t list = shard * args.rows + row;
      const int64_t members = std::clamp<int64_t>(args.counts[list], 0, args.in_stride);
      for (int64_t i = 0; i < members; ++i) {
        const int64_t in = list * args.in_stride + i;
        if (args.positions[in] < 0) continue;
        const uint32_t bits = load_bits(args.scores + in);
        if (bits == kAbsentScoreBits) {
          ++found.absent_entries;
          continue;
        }
        const uint64_t rank = rank_key(bits, static_cast<uint32_t>(args.positions[in]));
        if (rank <= threshold) continue;
        kept[count++] = {rank, in};
        if (count == capacity) reduce_to_k();
      }
    }
    if (count > args.k) reduce_to_k();
    if (args.order == TopkOrder::kByRank) {
      std::sort(kept, kept + count, candidate_before);
    } else {  // the position is the rank's lower half, inverted
      std::sort(kept, kept + count,
                [](const Candidate& a, const Candidate& b) { return static_cast<uint32_t>(a.rank) > static_cast<uint32_t>(b.rank); });
    }

    const int64_t begin = row * args.out_stride;
    const int64_t padding = args.out_stride - count;
    for (int64_t i = 0; i < count; ++i) {
      args.out_positions[begin + i] = args.positions[kept[i].source];
      if (args.out_scores != nullptr) {
        args.out_scores[begin + i] = score_of_key(static_cast<uint32_t>(kept[i].rank >> 32));
      }
      if (args.out_slots != nullptr) args.out_slots[begin + i] = args.slots[kept[i].source];
    }
    std::fill_n(args.out_positions + begin + count, padding, kNoEntry);
    if (args.out_scores != nullptr) std::fill_n(args.out_scores + begin + count, padding, kScorePadding);
    if (args.out_slots != nullptr) std::fill_n(args.out_slots + begin + count, padding, kNoEntry);
    args.out_counts[row] = static_cast<int32_t>(count);
    if (found.absent_entries > 0) found.status |= kStatusAbsentPage;
    add_to_report(args.report, found);
  };
  workers.run(args.rows, std::ref(merge_one));
  return absl::OkStatus();
}

// ---------------------------------------------------------------------------------------------------------------
// list_slots: whole runs of a page's slots at a time.

absl::Status list_slots_cpu(const ListSlotsArgs& args, Workers& workers) {
  absl::Status status = check_list_slots(args);
  if (!status.ok()) return status;

  const auto list_one = [&](int64_t row, int) {
    const int64_t table_row = row / args.rows_per_table_row;
    const int32_t* pages = args.pages.pages + table_row * args.pages.row_stride;
    const int64_t base = args.pages.entry_base != nullptr ? args.pages.entry_base[table_row] : 0;
    const int64_t held = static_cast<int64_t>(args.pages.pages_per_row) * args.slots_per_page;
    const int64_t limit = std::min(held, args.out_stride);
    OpReport found{};
    int64_t length = std::max<int64_t>(args.lengths[row], 0);
    if (length > limit) {
      length = limit;
      found.status |= kStatusBadPageTable;
    }

    const int64_t begin = row * args.out_stride;
    int64_t count = 0;
    for (int64_t entry = 0; entry < length; entry += args.slots_per_page) {
      const int64_t run = std::min<int64_t>(args.slots_per_page, length - entry);
      const int32_t page = pages[entry / args.slots_per_page];
      if (page < 0 || page >= args.page_count) {
        found.absent_entries += static_cast<uint64_t>(run);
        found.status |= kStatusAbsentPage;
        continue;
      }
      const int32_t first_slot = page * args.slots_per_page;
      const int32_t first_position = static_cast<int32_t>(base + entry);
      for (int32_t i = 0; i < run; ++i) args.slots[begin + count + i] = first_slot + i;
      if (args.positions != nullptr) {
        for (int32_t i = 0; i < run; ++i) args.positions[begin + count + i] = first_position + i;
      }
      count += run;
    }
    std::fill_n(args.slots + begin + count, args.out_stride - count, kNoEntry);
    if (args.positions != nullptr) std::fill_n(args.positions + begin + count, args.out_stride - count, kNoEntry);
    args.counts[row] = static_cast<int32_t>(count);
    add_to_report(args.report, found);
  };
  workers.run(args.rows, std::ref(list_one));
  return absl::OkStatus();
}

}  // namespace needle
