// select_topk, merge_topk and list_slots on the CPU.
//
// How a long row is selected: a strided, jittered sample guesses a threshold that about k entries and a margin reach;
// one pass over the row keeps those that reach it; the kept ones are reduced to k exactly. A guess can be wrong and
// the answer cannot:
//  1. Entries are compared as score_order_bits, integers, so denormals, both zeros and NaN have their exact order
//     whatever the floating-point mode.
//  2. Kept entries stand in order of position, and every reduction is stable, so of equal scores the lower positions
//     stay. After a reduction only strictly higher scores can still enter: later entries of the same score have lost.
//  3. A guess that fewer than k entries reach is seen by the count, and a lower one is tried. A buffer that fills is
//     reduced, never cut; when reductions cost more than they are worth (an order made against the sample),
//     histograms over digits of the order bits find the k-th score and one last pass collects. Each is counted in
//     report->fallbacks.
//  4. Nothing is allocated; each worker uses its own piece of the caller's scratch.
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "kernels/op_report.h"
#include "kernels/select_topk.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define NEEDLE_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define NEEDLE_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#endif

namespace needle {
namespace {

// A row is scanned in blocks of this many scores: 8 KiB, so that the second look at a block finds it in L1.
constexpr int64_t kBlock = 2048;
// Scores whose kept ones are looked for together: flagged as a group first, without a branch each.
constexpr int64_t kGroup = 32;
// Vector twins store whole registers and advance by what they kept.
constexpr int64_t kStorePad = 16;

// Rows up to this length are reduced whole: sampling them would cost as much.
constexpr int64_t kWholeRowMax = 4096;
constexpr int64_t kSampleMin = 1024;
constexpr int64_t kSampleMax = 8192;

// Stands for "absent" where order bits are made for a whole run: above those of +inf, and so of every score.
constexpr uint32_t kAbsentKey = 0xFFFFFFFFu;
constexpr uint32_t kInfinityKey = 0xFF800000u;
constexpr uint32_t kLowestNumberKey = 0x007FFFFFu;  // -inf
constexpr uint32_t kZeroKey = 0x80000000u;
static_assert(score_order_bits(0x7F800000u) == kInfinityKey && score_order_bits(0xFF800000u) == kLowestNumberKey);

constexpr int kReduceBins = 1024;
constexpr int kDigitBins = 2048;

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

uint32_t key_or_absent(uint32_t bits) {
  return bits == kAbsentScoreBits ? kAbsentKey : score_order_bits(bits);
}

// What a threshold means to the quick test of a group. Raw order bits are those of score_order_bits but for NaN and
// -0; `raw - kLowestNumberKey`, unsigned, puts every NaN on top, so that one comparison flags what reaches the
// threshold together with every NaN and absent entry. -0 lies one below +0: a threshold of zero goes down by one.
uint32_t quick_threshold(uint32_t threshold) {
  if (threshold == kZeroKey) --threshold;
  return threshold <= kLowestNumberKey ? 0u : threshold - kLowestNumberKey;
}

// ---------------------------------------------------------------------------------------------------------------
// What each instruction set does its own way. `first` is the block's first local entry.

struct Scanner {
  // Keeps the entries of scores[0, count) whose key is at least `threshold`, and counts NaN and absent ones.
  void (*keep)(const float* scores, int64_t count, uint32_t first, uint32_t threshold, Kept& kept, Seen& seen);
  // keys[i] = key_or_absent(scores[i]).
  void (*keys)(const float* scores, int64_t count, uint32_t* keys);
};

void keep_one(uint32_t bits, uint32_t entry, uint32_t threshold, Kept& kept, Seen& seen) {
  if (bits == kAbsentScoreBits) {
    ++seen.absent;
    return;
  }
  const uint32_t key = score_order_bits(bits);
  if (key == 0u) ++seen.nan;
  if (key < threshold) return;
  kept.keys[kept.count] = key;
  kept.entries[kept.count] = entry;
  ++kept.count;
}

void keep_portable(const float* scores, int64_t count, uint32_t first, uint32_t threshold, Kept& kept, Seen& seen) {
  const uint32_t quick = quick_threshold(threshold);
  const auto reaches = [quick](uint32_t bits) {
    const uint32_t raw = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
    return raw - kLowestNumberKey >= quick;
  };
  int64_t at = 0;
  for (; at + kGroup <= count; at += kGroup) {
    uint32_t any = 0;
    for (int64_t i = 0; i < kGroup; ++i) any |= reaches(load_bits(scores + at + i)) ? 1u : 0u;
    if (any == 0) continue;
    for (int64_t i = at; i < at + kGroup; ++i) {
      const uint32_t bits = load_bits(scores + i);
      if (reaches(bits)) keep_one(bits, first + static_cast<uint32_t>(i), threshold, kept, seen);
    }
  }
  for (; at < count; ++at) keep_one(load_bits(scores + at), first + static_cast<uint32_t>(at), threshold, kept, seen);
}

void keys_portable(const float* scores, int64_t count, uint32_t* keys) {
  for (int64_t i = 0; i < count; ++i) keys[i] = key_or_absent(load_bits(scores + i));
}

#if defined(__x86_64__)

// g++ 12 takes the deliberately undefined merge operands inside its own AVX-512 header for a mistake of the caller.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// Order bits as signed integers: flip the lower 31 bits of negative numbers.
NEEDLE_TARGET_AVX2 inline __m256i signed_order_avx2(__m256i bits) {
  return _mm256_xor_si256(bits, _mm256_and_si256(_mm256_srai_epi32(bits, 31), _mm256_set1_epi32(0x7FFFFFFF)));
}

NEEDLE_TARGET_AVX2 inline __m256i load_avx2(const float* scores) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scores));
}

// score_order_bits of eight scores; absent ones come out as NaN does.
NEEDLE_TARGET_AVX2 inline __m256i exact_order_avx2(__m256i bits) {
  const __m256i top = _mm256_set1_epi32(static_cast<int>(0x80000000u));
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
  __m256i key = _mm256_xor_si256(signed_order_avx2(bits), top);
  key = _mm256_blendv_epi8(key, top, _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256()));
  return _mm256_andnot_si256(_mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000)), key);
}

NEEDLE_TARGET_AVX2 inline uint32_t lanes_of(__m256i mask) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
}

// A threshold of 0 keeps everything that is there.
NEEDLE_TARGET_AVX2 void keep_all_avx2(const float* scores, int64_t count, uint32_t first, Kept& kept, Seen& seen) {
  const __m256i absent = _mm256_set1_epi32(static_cast<int>(kAbsentScoreBits));
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i bits = load_avx2(scores + i);
    if (lanes_of(_mm256_cmpeq_epi32(bits, absent)) != 0) {
      keep_portable(scores + i, 8, first + static_cast<uint32_t>(i), 0u, kept, seen);
      continue;
    }
    const __m256i key = exact_order_avx2(bits);
    const __m256i entries =
        _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first + static_cast<uint32_t>(i))), lanes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(kept.keys + kept.count), key);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(kept.entries + kept.count), entries);
    kept.count += 8;
    seen.nan += static_cast<uint64_t>(__builtin_popcount(lanes_of(_mm256_cmpeq_epi32(key, _mm256_setzero_si256()))));
  }
  keep_portable(scores + i, count - i, first + static_cast<uint32_t>(i), 0u, kept, seen);
}

NEEDLE_TARGET_AVX2 void keep_avx2(const float* scores, int64_t count, uint32_t first, uint32_t threshold, Kept& kept,
                                  Seen& seen) {
  if (threshold == 0u) return keep_all_avx2(scores, count, first, kept, seen);
  // Subtracting in signed order bits gives the unsigned difference with its top bit flipped: compare signed.
  const uint32_t quick = quick_threshold(threshold);
  const __m256i offset = _mm256_set1_epi32(static_cast<int>(kLowestNumberKey));
  // "below quick" is `limit > difference`; with quick == 0 nothing is below.
  const __m256i limit = _mm256_set1_epi32(static_cast<int>(quick ^ 0x80000000u));

  uint16_t flagged[kBlock / kGroup];
  int64_t flagged_count = 0;
  const int64_t whole = count / kGroup * kGroup;
  for (int64_t at = 0; at < whole; at += kGroup) {
    __m256i below = _mm256_cmpgt_epi32(limit, _mm256_sub_epi32(signed_order_avx2(load_avx2(scores + at)), offset));
    for (int64_t lane = 8; lane < kGroup; lane += 8) {
      const __m256i order = signed_order_avx2(load_avx2(scores + at + lane));
      below = _mm256_and_si256(below, _mm256_cmpgt_epi32(limit, _mm256_sub_epi32(order, offset)));
    }
    flagged[flagged_count] = static_cast<uint16_t>(at);
    flagged_count += _mm256_movemask_epi8(below) != -1 ? 1 : 0;
  }

  for (int64_t f = 0; f < flagged_count; ++f) {
    const int64_t at = flagged[f];
    uint32_t reach = 0;
    uint32_t nan = 0;
    uint32_t gone = 0;
    for (int64_t lane = 0; lane < kGroup; lane += 8) {
      const __m256i bits = load_avx2(scores + at + lane);
      const __m256i below = _mm256_cmpgt_epi32(limit, _mm256_sub_epi32(signed_order_avx2(bits), offset));
      const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
      reach |= (lanes_of(below) ^ 0xFFu) << lane;
      nan |= lanes_of(_mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000))) << lane;
      gone |= lanes_of(_mm256_cmpeq_epi32(bits, _mm256_set1_epi32(static_cast<int>(kAbsentScoreBits)))) << lane;
    }
    // No NaN reaches a threshold above 0.
    reach &= ~nan;
    seen.nan += static_cast<uint64_t>(__builtin_popcount(nan & ~gone));
    seen.absent += static_cast<uint64_t>(__builtin_popcount(gone));
    for (; reach != 0; reach &= reach - 1) {
      const int64_t i = at + __builtin_ctz(reach);
      keep_one(load_bits(scores + i), first + static_cast<uint32_t>(i), threshold, kept, seen);
    }
  }
  keep_portable(scores + whole, count - whole, first + static_cast<uint32_t>(whole), threshold, kept, seen);
}

NEEDLE_TARGET_AVX2 void keys_avx2(const float* scores, int64_t count, uint32_t* keys) {
  const __m256i absent = _mm256_set1_epi32(static_cast<int>(kAbsentScoreBits));
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i bits = load_avx2(scores + i);
    const __m256i key = _mm256_or_si256(exact_order_avx2(bits), _mm256_cmpeq_epi32(bits, absent));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys + i), key);
  }
  keys_portable(scores + i, count - i, keys + i);
}

NEEDLE_TARGET_AVX512 inline __m512i load_avx512(const float* scores) {
  return _mm512_loadu_si512(static_cast<const void*>(scores));
}

// Order bits but for NaN and -0: bits ^ (sign ? all ones : top bit). 0x1E is the truth table of a ^ (b | c).
NEEDLE_TARGET_AVX512 inline __m512i raw_order_avx512(__m512i bits) {
  const __m512i top = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  return _mm512_ternarylogic_epi32(bits, _mm512_srai_epi32(bits, 31), top, 0x1E);
}

NEEDLE_TARGET_AVX512 void keep_avx512(const float* scores, int64_t count, uint32_t first, uint32_t threshold,
                                      Kept& kept, Seen& seen) {
  const uint32_t quick_bits = quick_threshold(threshold);
  const __m512i quick = _mm512_set1_epi32(static_cast<int>(quick_bits));
  const __m512i offset = _mm512_set1_epi32(static_cast<int>(kLowestNumberKey));
  const __m512i exact = _mm512_set1_epi32(static_cast<int>(threshold));
  const __m512i absent = _mm512_set1_epi32(static_cast<int>(kAbsentScoreBits));
  const __m512i top = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  const __m512i doubled_infinity = _mm512_set1_epi32(static_cast<int>(0xFF000000u));
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);

  uint16_t flagged[kBlock / kGroup];
  int64_t flagged_count = 0;
  const int64_t whole = count / kGroup * kGroup;
  for (int64_t at = 0; at < whole; at += kGroup) {
    const __m512i low = _mm512_sub_epi32(raw_order_avx512(load_avx512(scores + at)), offset);
    const __m512i high = _mm512_sub_epi32(raw_order_avx512(load_avx512(scores + at + 16)), offset);
    // The larger of the two reaches the threshold where either does.
    const __mmask16 reach = _mm512_cmpge_epu32_mask(_mm512_max_epu32(low, high), quick);
    flagged[flagged_count] = static_cast<uint16_t>(at);
    flagged_count += reach != 0 ? 1 : 0;
  }

  for (int64_t f = 0; f < flagged_count; ++f) {
    for (int64_t at = flagged[f]; at < flagged[f] + kGroup; at += 16) {
      const __m512i bits = load_avx512(scores + at);
      const __m512i doubled = _mm512_add_epi32(bits, bits);  // shifts the sign out
      const __mmask16 is_absent = _mm512_cmpeq_epi32_mask(bits, absent);
      const __mmask16 is_nan = _mm512_cmpgt_epu32_mask(doubled, doubled_infinity);
      __m512i key = _mm512_mask_mov_epi32(raw_order_avx512(bits), _mm512_testn_epi32_mask(doubled, doubled), top);
      key = _mm512_maskz_mov_epi32(static_cast<__mmask16>(~is_nan), key);
      const __mmask16 keep =
          static_cast<__mmask16>(_mm512_cmpge_epu32_mask(key, exact) & static_cast<__mmask16>(~is_absent));
      const __m512i entries =
          _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first + static_cast<uint32_t>(at))), lanes);
      // Compress in the register and store it whole: a compressing store is microcoded on some processors.
      _mm512_storeu_si512(static_cast<void*>(kept.keys + kept.count), _mm512_maskz_compress_epi32(keep, key));
      _mm512_storeu_si512(static_cast<void*>(kept.entries + kept.count), _mm512_maskz_compress_epi32(keep, entries));
      kept.count += __builtin_popcount(keep);
      seen.absent += static_cast<uint64_t>(__builtin_popcount(is_absent));
      seen.nan += static_cast<uint64_t>(__builtin_popcount(static_cast<uint32_t>(is_nan & ~is_absent)));
    }
  }
  keep_portable(scores + whole, count - whole, first + static_cast<uint32_t>(whole), threshold, kept, seen);
}

NEEDLE_TARGET_AVX512 void keys_avx512(const float* scores, int64_t count, uint32_t* keys) {
  const __m512i absent = _mm512_set1_epi32(static_cast<int>(kAbsentScoreBits));
  const __m512i top = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  const __m512i doubled_infinity = _mm512_set1_epi32(static_cast<int>(0xFF000000u));
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512i bits = load_avx512(scores + i);
    const __m512i doubled = _mm512_add_epi32(bits, bits);
    const __mmask16 is_nan = _mm512_cmpgt_epu32_mask(doubled, doubled_infinity);
    __m512i key = _mm512_mask_mov_epi32(raw_order_avx512(bits), _mm512_testn_epi32_mask(doubled, doubled), top);
    key = _mm512_maskz_mov_epi32(static_cast<__mmask16>(~is_nan), key);
    key = _mm512_mask_mov_epi32(key, _mm512_cmpeq_epi32_mask(bits, absent), _mm512_set1_epi32(-1));
    _mm512_storeu_si512(static_cast<void*>(keys + i), key);
  }
  keys_portable(scores + i, count - i, keys + i);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif  // __x86_64__

Scanner scanner_for(CpuIsa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case CpuIsa::kAvx512Bf16:
    case CpuIsa::kAvx512:
      return {keep_avx512, keys_avx512};
    case CpuIsa::kAvx2:
      return {keep_avx2, keys_avx2};
    case CpuIsa::kPortable:
      break;
  }
#else
  (void)isa;
#endif
  return {keep_portable, keys_portable};
}

// ---------------------------------------------------------------------------------------------------------------
// The k-th largest of a run of keys, and how many keys equal to it belong to the k largest.

struct Cut {
  uint32_t key = 0;
  int64_t equal = 0;        // that belong to the k largest
  int64_t equal_total = 0;  // in the run
};

// Bins over the range that is left, until the crossing bin is small or one key wide: at most four rounds, whatever the
// keys. 1 <= k <= count.
Cut kth_largest(const uint32_t* keys, int64_t count, int64_t k, uint32_t* bins) {
  uint32_t low = keys[0];
  uint32_t high = keys[0];
  for (int64_t i = 1; i < count; ++i) {
    low = std::min(low, keys[i]);
    high = std::max(high, keys[i]);
  }
  int64_t in_range = count;
  for (;;) {
    if (low == high) return {low, k, in_range};
    const int width = 32 - __builtin_clz(high - low);
    const int shift = std::max(0, width - 10);
    std::fill_n(bins, kReduceBins, 0u);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t offset = keys[i] - low;
      if (offset <= high - low) ++bins[offset >> shift];
    }
    int64_t bin = (high - low) >> shift;
    while (k > static_cast<int64_t>(bins[bin])) k -= bins[bin--];
    const uint32_t bin_low = low + (static_cast<uint32_t>(bin) << shift);
    in_range = bins[bin];
    if (shift == 0) return {bin_low, k, in_range};
    const uint32_t bin_high = std::min(high, bin_low + ((1u << shift) - 1));

    constexpr int64_t kSmall = 64;
    if (in_range <= kSmall) {
      uint32_t small[kSmall];
      int64_t gathered = 0;
      for (int64_t i = 0; i < count; ++i) {
        if (keys[i] - bin_low <= bin_high - bin_low) small[gathered++] = keys[i];
      }
      std::sort(small, small + gathered, std::greater<uint32_t>());
      const uint32_t key = small[k - 1];
      return {key, k - (std::find(small, small + gathered, key) - small), std::count(small, small + gathered, key)};
    }
    low = bin_low;
    high = bin_high;
  }
}

// Leaves the k best of `kept`, still ascending by position, and returns the k-th key.
uint32_t reduce(Kept& kept, int64_t k, uint32_t* bins) {
  const Cut cut = kth_largest(kept.keys, kept.count, k, bins);
  int64_t out = 0;
  if (cut.equal == cut.equal_total) {
    for (int64_t i = 0; i < kept.count; ++i) {
      const uint32_t key = kept.keys[i];
      kept.keys[out] = key;
      kept.entries[out] = kept.entries[i];
      out += key >= cut.key ? 1 : 0;
    }
    kept.count = out;
    return cut.key;
  }
  int64_t equal_left = cut.equal;
  for (int64_t i = 0; i < kept.count; ++i) {
    const uint32_t key = kept.keys[i];
    const bool equal = key == cut.key && equal_left > 0;
    equal_left -= equal ? 1 : 0;
    kept.keys[out] = key;
    kept.entries[out] = kept.entries[i];
    out += (key > cut.key || equal) ? 1 : 0;
  }
  kept.count = out;
  return cut.key;
}

// ---------------------------------------------------------------------------------------------------------------
// One worker's piece of the scratch.

struct SelectScratch {
  uint32_t* keys = nullptr;     // [capacity + kStorePad]
  uint32_t* entries = nullptr;  // [capacity + kStorePad]
  uint32_t* bins = nullptr;     // [kDigitBins x 4]
  uint64_t* ranks = nullptr;    // [k]
};

// Room for the kept entries: twice k and a block, so that a reduction is paid by at least k entries that entered.
int64_t kept_capacity(int64_t k) {
  return std::max<int64_t>(2 * k, kWholeRowMax) + kBlock;
}

int64_t select_piece_bytes(int64_t k) {
  const int64_t kept = round_up((kept_capacity(k) + kStorePad) * 4, 64);
  return 2 * kept + kDigitBins * 4 * 4 + round_up(k * 8, 64);
}

SelectScratch select_piece(void* scratch, int64_t k, int worker) {
  std::byte* at = static_cast<std::byte*>(scratch) + worker * select_piece_bytes(k);
  const int64_t kept = round_up((kept_capacity(k) + kStorePad) * 4, 64);
  SelectScratch piece;
  piece.keys = reinterpret_cast<uint32_t*>(at);
  piece.entries = reinterpret_cast<uint32_t*>(at + kept);
  piece.bins = reinterpret_cast<uint32_t*>(at + 2 * kept);
  piece.ranks = reinterpret_cast<uint64_t*>(at + 2 * kept + kDigitBins * 4 * 4);
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

enum class PassEnd { kDone, kTooManyReductions };

// Keeps what reaches `threshold`, reducing to the k best whenever the buffer is full.
PassEnd pass_over_row(const RowScan& row, uint32_t threshold, int64_t reductions_max, Kept& kept, Seen& seen) {
  const int64_t capacity = kept_capacity(row.k);
  kept = {row.scratch.keys, row.scratch.entries, 0};
  seen = Seen();
  int64_t reductions = 0;
  for (int64_t at = 0; at < row.length; at += kBlock) {
    const int64_t count = std::min(kBlock, row.length - at);
    if (kept.count + count > capacity) {
      if (++reductions > reductions_max) return PassEnd::kTooManyReductions;
      threshold = reduce(kept, row.k, row.scratch.bins) + 1;
    }
    row.scanner.keep(row.scores + at, count, static_cast<uint32_t>(at), threshold, kept, seen);
  }
  return PassEnd::kDone;
}

// Keys of a jittered, strided sample, into scratch.keys. Absent entries are left out. The jitter is a fixed sequence
// of the position in the sample, so that periodic rows do not meet the stride.
int64_t sample_row(const RowScan& row, int64_t sample, uint32_t* keys) {
  const uint64_t stride = static_cast<uint64_t>(row.length / sample);
  int64_t taken = 0;
  for (int64_t j = 0; j < sample; ++j) {
    const uint32_t mixed = static_cast<uint32_t>(j) * 0x9E3779B1u;
    const uint64_t jitter = (static_cast<uint64_t>(mixed ^ (mixed >> 15)) * stride) >> 32;
    const uint32_t bits = load_bits(row.scores + static_cast<uint64_t>(j) * stride + jitter);
    keys[taken] = score_order_bits(bits);
    taken += bits != kAbsentScoreBits ? 1 : 0;
  }
  return taken;
}

int64_t square_root_up(int64_t value) {
  int64_t root = 0;
  while (root * root < value) ++root;
  return root;
}

// The exact k-th key by digits of 11, 11 and 10 bits, or a lower bound that few enough entries reach. At most three
// reads of the row. 0 where fewer than k entries are present.
uint32_t threshold_by_digits(const RowScan& row) {
  constexpr int kDigits[] = {11, 11, 10};
  const int64_t room = kept_capacity(row.k) - kBlock;
  uint32_t* keys = row.scratch.keys;  // one block at a time
  uint32_t low = 0;
  int left = 32;
  int64_t above = 0;  // entries with keys past the range [low, low + 2^left)
  for (const int digit : kDigits) {
    const int shift = left - digit;
    // Four copies, so that runs of one value do not wait for each other's increment.
    uint32_t* bins = row.scratch.bins;
    std::fill_n(bins, kDigitBins * 4, 0u);
    const uint32_t span = left == 32 ? 0xFFFFFFFFu : (1u << left) - 1;
    for (int64_t at = 0; at < row.length; at += kBlock) {
      const int64_t count = std::min(kBlock, row.length - at);
      row.scanner.keys(row.scores + at, count, keys);
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t offset = keys[i] - low;
        if (offset <= span) ++bins[(offset >> shift) * 4 + static_cast<uint32_t>(i & 3)];
      }
    }
    // Bins past +inf hold absent entries alone.
    int64_t bin = std::min<int64_t>((int64_t{1} << digit) - 1, (kInfinityKey - low) >> shift);
    int64_t inside = 0;
    for (;; --bin) {
      const uint32_t* copies = bins + bin * 4;
      inside = int64_t{copies[0]} + copies[1] + copies[2] + copies[3];
      if (above + inside >= row.k || bin == 0) break;
      above += inside;
    }
    low += static_cast<uint32_t>(bin) << shift;
    left = shift;
    if (above + inside <= room) break;
  }
  return low;
}

// Fills `kept` with the row's k best (all that are present, if fewer), ascending by position.
void select_row(const RowScan& row, Kept& kept, Seen& seen, uint64_t& fallbacks) {
  constexpr int64_t kAnyNumber = std::numeric_limits<int64_t>::max();
  if (row.length <= std::max<int64_t>(kWholeRowMax, 2 * row.k)) {
    pass_over_row(row, 0u, kAnyNumber, kept, seen);
    if (kept.count > row.k) reduce(kept, row.k, row.scratch.bins);
    return;
  }

  const int64_t sample = std::clamp(row.length / 64, kSampleMin, std::min(kSampleMax, kept_capacity(row.k)));
  // Members expected in the sample, and five standard deviations of a row without structure.
  const int64_t expected = div_ceil(row.k * sample, row.length);
  int64_t rank = expected + 5 * square_root_up(expected) + 4;
  // A reduction costs about as much as a digit pass over four times its entries.
  const int64_t reductions_max = row.length / (4 * kept_capacity(row.k)) + 2;
  for (int attempt = 0; attempt < 2; ++attempt, rank *= 4) {
    const int64_t taken = sample_row(row, sample, row.scratch.keys);  // overwritten by each pass
    const uint32_t guess = rank <= taken ? kth_largest(row.scratch.keys, taken, rank, row.scratch.bins).key : 0u;
    if (pass_over_row(row, guess, reductions_max, kept, seen) == PassEnd::kTooManyReductions) {
      ++fallbacks;
      break;
    }
    if (kept.count >= row.k || guess == 0u) {
      if (kept.count > row.k) reduce(kept, row.k, row.scratch.bins);
      return;
    }
    ++fallbacks;
  }

  pass_over_row(row, threshold_by_digits(row), kAnyNumber, kept, seen);
  if (kept.count > row.k) reduce(kept, row.k, row.scratch.bins);
}

float score_of_key(uint32_t key) {
  const uint32_t bits = score_bits_of_order(key);
  float score;
  std::memcpy(&score, &bits, sizeof(score));
  return score;
}

void write_row(const SelectTopkArgs& args, int64_t row, const VisibleRow& visible, Kept& kept, uint64_t* ranks,
               OpReport& found) {
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
  return absl::InvalidArgumentError(absl::StrCat(operation, ": this machine has no ", name_of(isa),
                                                 "; pass best_cpu_isa() or one of cpu_isas_present()"));
}

}  // namespace

int64_t select_topk_cpu_scratch(const SelectTopkArgs& args, int width) {
  if (args.k < 1 || args.k > kTopkMax || width < 1) return 0;
  return width * select_piece_bytes(args.k);
}

absl::Status select_topk_cpu(const SelectTopkArgs& args, CpuIsa isa, Workers& workers, void* scratch,
                             int64_t scratch_bytes) {
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

int64_t merge_capacity(int64_t k) {
  return 2 * k + 1024;
}

bool candidate_before(const Candidate& a, const Candidate& b) {
  return a.rank > b.rank;
}

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
      std::sort(kept, kept + count, [](const Candidate& a, const Candidate& b) {
        return static_cast<uint32_t>(a.rank) > static_cast<uint32_t>(b.rank);
      });
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
