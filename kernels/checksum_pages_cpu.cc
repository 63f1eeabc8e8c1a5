// checksum_pages on the CPU: the long path of XXH3 with its eight lanes in two AVX2 registers or one AVX-512 register,
// and the library's own code where neither is there.
//
// What must stay true:
//  1. The number is that of XXH3_64bits_withSeed: the tests compare every path with the library.
//  2. Nothing is allocated; runs of blocks add into their page's sum atomically, and addition mod 2^64 has no order.
#include <algorithm>
#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "kernels/checksum_pages.h"
#include "kernels/op_report.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define NEEDLE_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define NEEDLE_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#endif

namespace needle {
namespace {

// Blocks a worker takes at a time: 147 KB, so that a page of a megabyte is shared out and the hand-over is paid for.
constexpr int64_t kRunBlocks = 64;

using HashBlock = uint64_t (*)(const std::byte* bytes, int64_t length, uint64_t seed);

uint64_t hash_block_library(const std::byte* bytes, int64_t length, uint64_t seed) {
  return XXH3_64bits_withSeed(bytes, static_cast<size_t>(length), seed);
}

#if defined(__x86_64__)

// g++ 12 takes the deliberately undefined merge operands inside its own AVX-512 header for a mistake of the caller.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

constexpr int64_t kStripe = 64;
constexpr int64_t kStripesARun = 16;  // (192 bytes of secret - 64) / 8
constexpr int64_t kRunBytes = kStripe * kStripesARun;
constexpr int64_t kSecretBytes = 192;
constexpr int64_t kScrambleSecret = 128;  // the secret's last 64 bytes
constexpr int64_t kLastSecret = 121;      // and seven before them
constexpr int64_t kMergeSecret = 11;

constexpr uint64_t kInitial[8] = {XXH_PRIME32_3, XXH_PRIME64_1, XXH_PRIME64_2, XXH_PRIME64_3,
                                  XXH_PRIME64_4, XXH_PRIME32_2, XXH_PRIME64_5, XXH_PRIME32_1};

uint64_t word_at(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

uint64_t merge_lanes(const uint64_t* lanes, const uint8_t* secret, int64_t length) {
  uint64_t hash = static_cast<uint64_t>(length) * XXH_PRIME64_1;
  for (int i = 0; i < 4; ++i) {
    const uint8_t* words = secret + kMergeSecret + 16 * i;
    hash += XXH3_mul128_fold64(lanes[2 * i] ^ word_at(words), lanes[2 * i + 1] ^ word_at(words + 8));
  }
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9ull;
  return hash ^ (hash >> 32);
}

NEEDLE_TARGET_AVX2 inline __m256i load_avx2(const void* bytes) { return _mm256_loadu_si256(static_cast<const __m256i*>(bytes)); }

NEEDLE_TARGET_AVX2 inline __m256i accumulated_avx2(__m256i lanes, const void* data, const void* secret) {
  const __m256i words = load_avx2(data);
  const __m256i keyed = _mm256_xor_si256(words, load_avx2(secret));
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  const __m256i swapped = _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(product, _mm256_add_epi64(lanes, swapped));
}

NEEDLE_TARGET_AVX2 inline __m256i scrambled_avx2(__m256i lanes, const void* secret) {
  const __m256i prime = _mm256_set1_epi64x(static_cast<int64_t>(XXH_PRIME32_1));
  const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), load_avx2(secret));
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

NEEDLE_TARGET_AVX2 uint64_t hash_block_avx2(const std::byte* bytes, int64_t length, uint64_t seed) {
  alignas(64) uint8_t secret[kSecretBytes];
  const int64_t signed_seed = static_cast<int64_t>(seed);
  const __m256i spread =
      _mm256_sub_epi64(_mm256_setr_epi64x(signed_seed, 0, signed_seed, 0), _mm256_setr_epi64x(0, signed_seed, 0, signed_seed));
  for (int64_t i = 0; i < kSecretBytes; i += 32) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(secret + i), _mm256_add_epi64(load_avx2(XXH3_kSecret + i), spread));
  }

  __m256i low = load_avx2(kInitial);
  __m256i high = load_avx2(kInitial + 4);
  const int64_t runs = (length - 1) / kRunBytes;
  for (int64_t run = 0; run < runs; ++run, bytes += kRunBytes) {
    for (int64_t stripe = 0; stripe < kStripesARun; ++stripe) {
      low = accumulated_avx2(low, bytes + stripe * kStripe, secret + 8 * stripe);
      high = accumulated_avx2(high, bytes + stripe * kStripe + 32, secret + 8 * stripe + 32);
    }
    low = scrambled_avx2(low, secret + kScrambleSecret);
    high = scrambled_avx2(high, secret + kScrambleSecret + 32);
  }
  const int64_t rest = length - runs * kRunBytes;
  for (int64_t stripe = 0; stripe < (rest - 1) / kStripe; ++stripe) {
    low = accumulated_avx2(low, bytes + stripe * kStripe, secret + 8 * stripe);
    high = accumulated_avx2(high, bytes + stripe * kStripe + 32, secret + 8 * stripe + 32);
  }
  const std::byte* last = bytes + rest - kStripe;
  low = accumulated_avx2(low, last, secret + kLastSecret);
  high = accumulated_avx2(high, last + 32, secret + kLastSecret + 32);

  alignas(32) uint64_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 4), high);
  return merge_lanes(lanes, secret, length);
}

NEEDLE_TARGET_AVX512 inline __m512i accumulated_avx512(__m512i lanes, const void* data, const void* secret) {
  const __m512i words = _mm512_loadu_si512(data);
  const __m512i keyed = _mm512_xor_si512(words, _mm512_loadu_si512(secret));
  const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
  const __m512i swapped = _mm512_shuffle_epi32(words, static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(1, 0, 3, 2)));
  return _mm512_add_epi64(product, _mm512_add_epi64(lanes, swapped));
}

NEEDLE_TARGET_AVX512 inline __m512i scrambled_avx512(__m512i lanes, const void* secret) {
  const __m512i prime = _mm512_set1_epi64(static_cast<int64_t>(XXH_PRIME32_1));
  const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47)), _mm512_loadu_si512(secret));
  const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
  return _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
}

NEEDLE_TARGET_AVX512 uint64_t hash_block_avx512(const std::byte* bytes, int64_t length, uint64_t seed) {
  alignas(64) uint8_t secret[kSecretBytes];
  const __m512i plus = _mm512_set1_epi64(static_cast<int64_t>(seed));
  for (int64_t i = 0; i < kSecretBytes; i += 64) {
    const __m512i word = _mm512_loadu_si512(XXH3_kSecret + i);
    const __m512i sum = _mm512_mask_sub_epi64(_mm512_add_epi64(word, plus), 0xAA, word, plus);
    _mm512_store_si512(secret + i, sum);
  }

  __m512i lanes = _mm512_loadu_si512(kInitial);
  const int64_t runs = (length - 1) / kRunBytes;
  for (int64_t run = 0; run < runs; ++run, bytes += kRunBytes) {
    for (int64_t stripe = 0; stripe < kStripesARun; ++stripe) {
      lanes = accumulated_avx512(lanes, bytes + stripe * kStripe, secret + 8 * stripe);
    }
    lanes = scrambled_avx512(lanes, secret + kScrambleSecret);
  }
  const int64_t rest = length - runs * kRunBytes;
  for (int64_t stripe = 0; stripe < (rest - 1) / kStripe; ++stripe) {
    lanes = accumulated_avx512(lanes, bytes + stripe * kStripe, secret + 8 * stripe);
  }
  lanes = accumulated_avx512(lanes, bytes + rest - kStripe, secret + kLastSecret);

  alignas(64) uint64_t out[8];
  _mm512_store_si512(out, lanes);
  return merge_lanes(out, secret, length);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif  // __x86_64__

HashBlock hash_block_for(CpuIsa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case CpuIsa::kAvx512Bf16:
    case CpuIsa::kAvx512: return hash_block_avx512;
    case CpuIsa::kAvx2: return hash_block_avx2;
    case CpuIsa::kPortable: break;
  }
#else
  (void)isa;
#endif
  return hash_block_library;
}

}  // namespace

absl::Status checksum_pages_cpu(const ChecksumPagesArgs& args, CpuIsa isa, Workers& workers) {
  absl::Status status = check_checksum_pages(args);
  if (!status.ok()) return status;
  if (!cpu_has(isa)) {
    return absl::InvalidArgumentError(
        absl::StrCat("checksum_pages_cpu: this machine has no ", name_of(isa), "; pass best_cpu_isa() or one of cpu_isas_present()"));
  }

  OpReport found{};
  for (int64_t i = 0; i < args.count; ++i) {
    if (!args.add) args.checksums[i] = 0;
    if (args.pages[i] >= 0 && args.pages[i] < args.page_count) continue;
    ++found.skipped_rows;
    found.status |= kStatusAbsentPage;
  }
  add_to_report(args.report, found);

  const HashBlock hash_block = hash_block_for(isa);
  const int64_t blocks = checksum_blocks(args.page_bytes);
  const int64_t runs = div_ceil(blocks, kRunBlocks);
  const auto sum_run = [&](int64_t index, int) {
    const int64_t i = index / runs;
    const int64_t page = args.pages[i];
    if (page < 0 || page >= args.page_count) return;
    const std::byte* bytes = args.base + page * args.page_stride;
    const int64_t first = index % runs * kRunBlocks;
    uint64_t sum = 0;
    for (int64_t block = first; block < std::min(first + kRunBlocks, blocks); ++block) {
      const int64_t begin = block * kChecksumBlockBytes;
      const int64_t length = std::min(kChecksumBlockBytes, args.page_bytes - begin);
      sum += hash_block(bytes + begin, length, args.first_block + static_cast<uint64_t>(block));
    }
    __atomic_fetch_add(&args.checksums[i], sum, __ATOMIC_RELAXED);
  };
  workers.run(args.count * runs, std::ref(sum_run));
  return absl::OkStatus();
}

}  // namespace needle
