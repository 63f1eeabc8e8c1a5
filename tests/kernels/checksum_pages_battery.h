// The cases that every twin of checksum_pages must pass. A twin takes host pointers and fills host outputs.
//
// What must stay true:
//  1. Expected numbers are the header's definition written out here in plain scalar code, without the library, so that
//     the definition itself is tested; checksum_pages_test.cc pins it to literal numbers too.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/rng.h"
#include "kernels/checksum_pages.h"

namespace needle::testing {

struct ChecksumTwin {
  std::string name;
  std::string unavailable;
  std::function<absl::Status(const ChecksumPagesArgs&)> sum;
};

// The default secret of the public XXH3 specification.
inline constexpr uint8_t kXxh3Secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90,
    0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d,
    0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28,
    0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e,
    0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b,
    0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83,
    0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16,
    0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

inline uint64_t oracle_word(const void* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, 8);
  return word;
}

// low64 ^ high64 of a 128-bit product, by 32-bit halves.
inline uint64_t oracle_fold(uint64_t a, uint64_t b) {
  const uint64_t low = (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
  const uint64_t cross_a = (a >> 32) * (b & 0xFFFFFFFFu);
  const uint64_t cross_b = (a & 0xFFFFFFFFu) * (b >> 32);
  const uint64_t middle = (low >> 32) + (cross_a & 0xFFFFFFFFu) + cross_b;
  const uint64_t high = (a >> 32) * (b >> 32) + (cross_a >> 32) + (middle >> 32);
  return (a * b) ^ high;
}

inline uint64_t oracle_block(const std::byte* bytes, int64_t length, uint64_t seed) {
  constexpr uint64_t kP32_1 = 0x9E3779B1u, kP32_2 = 0x85EBCA77u, kP32_3 = 0xC2B2AE3Du;
  constexpr uint64_t kP64_1 = 0x9E3779B185EBCA87u, kP64_2 = 0xC2B2AE3D27D4EB4Fu, kP64_3 = 0x165667B19E3779F9u;
  constexpr uint64_t kP64_4 = 0x85EBCA77C2B2AE63u, kP64_5 = 0x27D4EB2F165667C5u;
  uint8_t secret[192];
  for (int i = 0; i < 12; ++i) {
    const uint64_t plus = oracle_word(kXxh3Secret + 16 * i) + seed;
    const uint64_t minus = oracle_word(kXxh3Secret + 16 * i + 8) - seed;
    std::memcpy(secret + 16 * i, &plus, 8);
    std::memcpy(secret + 16 * i + 8, &minus, 8);
  }
  uint64_t acc[8] = {kP32_3, kP64_1, kP64_2, kP64_3, kP64_4, kP32_2, kP64_5, kP32_1};
  const auto stripe = [&](const std::byte* data, const uint8_t* key) {
    for (int i = 0; i < 8; ++i) {
      const uint64_t word = oracle_word(data + 8 * i);
      const uint64_t keyed = word ^ oracle_word(key + 8 * i);
      acc[i ^ 1] += word;
      acc[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
  };
  const int64_t runs = (length - 1) / 1024;
  for (int64_t run = 0; run < runs; ++run) {
    for (int64_t n = 0; n < 16; ++n) stripe(bytes + run * 1024 + n * 64, secret + 8 * n);
    for (int i = 0; i < 8; ++i) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ oracle_word(secret + 128 + 8 * i)) * kP32_1;
  }
  for (int64_t n = 0; n < (length - 1 - runs * 1024) / 64; ++n) stripe(bytes + runs * 1024 + n * 64, secret + 8 * n);
  stripe(bytes + length - 64, secret + 121);
  uint64_t hash = static_cast<uint64_t>(length) * kP64_1;
  for (int i = 0; i < 4; ++i) {
    hash += oracle_fold(acc[2 * i] ^ oracle_word(secret + 11 + 16 * i), acc[2 * i + 1] ^ oracle_word(secret + 19 + 16 * i));
  }
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9u;
  return hash ^ (hash >> 32);
}

inline uint64_t oracle_sum(const std::byte* page, int64_t page_bytes, uint64_t first_block) {
  uint64_t sum = 0;
  for (int64_t begin = 0; begin < page_bytes; begin += 2304) {
    sum += oracle_block(page + begin, std::min<int64_t>(2304, page_bytes - begin), first_block + static_cast<uint64_t>(begin / 2304));
  }
  return sum;
}

// 8-byte aligned bytes.
class PageBytes {
 public:
  PageBytes(int64_t bytes, uint64_t seed) : words_(static_cast<size_t>((bytes + 7) / 8)) {
    Rng rng(seed);
    for (uint64_t& word : words_) word = rng.next();
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(words_.data()); }

 private:
  std::vector<uint64_t> words_;
};

inline void every_page_size_has_the_defined_sum(const ChecksumTwin& twin) {
  // V4-Flash's stride, V3.2's, layers of layer-major pools, and every length around the hash's own steps.
  for (const int64_t page_bytes :
       {int64_t{1165824}, int64_t{3085824}, int64_t{16384}, int64_t{8448}, int64_t{4352}, int64_t{37440}, int64_t{1728}, int64_t{2304},
        int64_t{2304 + 256}, int64_t{241}, int64_t{256}, int64_t{1023}, int64_t{1024}, int64_t{1025}, int64_t{2047}, int64_t{2048},
        int64_t{2049}, int64_t{2303}, int64_t{2 * 2304 + 241}}) {
    const int64_t stride = (page_bytes + 15) / 8 * 8;
    PageBytes pool(3 * stride, static_cast<uint64_t>(page_bytes));
    const std::vector<int32_t> pages = {2, 0, 1, 2};
    std::vector<uint64_t> sums(pages.size(), 1);
    ChecksumPagesArgs args;
    args.base = pool.data();
    args.page_stride = stride;
    args.page_bytes = page_bytes;
    args.page_count = 3;
    args.pages = pages.data();
    args.count = static_cast<int32_t>(pages.size());
    args.checksums = sums.data();
    const absl::Status status = twin.sum(args);
    ASSERT_TRUE(status.ok()) << status;
    for (size_t i = 0; i < pages.size(); ++i) {
      ASSERT_EQ(sums[i], oracle_sum(pool.data() + pages[i] * stride, page_bytes, 0)) << page_bytes << " bytes";
    }
    EXPECT_NE(sums[0], sums[1]);
    EXPECT_EQ(sums[0], sums[3]);
  }
}

inline void every_byte_and_every_place_counts(const ChecksumTwin& twin) {
  const int64_t page_bytes = 3 * 2304 + 512;
  PageBytes pool(page_bytes, 5);
  const int32_t page = 0;
  const auto sum_now = [&] {
    uint64_t sum = 0;
    ChecksumPagesArgs args;
    args.base = pool.data();
    args.page_stride = page_bytes;
    args.page_bytes = page_bytes;
    args.page_count = 1;
    args.pages = &page;
    args.count = 1;
    args.checksums = &sum;
    EXPECT_TRUE(twin.sum(args).ok());
    return sum;
  };
  const uint64_t before = sum_now();
  for (const int64_t at : {int64_t{0}, int64_t{63}, int64_t{2303}, int64_t{2304}, page_bytes - 1}) {
    pool.data()[at] ^= std::byte{1};
    EXPECT_NE(sum_now(), before) << "byte " << at;
    pool.data()[at] ^= std::byte{1};
  }
  EXPECT_EQ(sum_now(), before);
  // Two equal blocks exchange nothing; two different ones do.
  std::vector<std::byte> block(pool.data(), pool.data() + 2304);
  std::memcpy(pool.data(), pool.data() + 2304, 2304);
  std::memcpy(pool.data() + 2304, block.data(), 2304);
  EXPECT_NE(sum_now(), before);
}

inline void parts_of_a_page_add_up(const ChecksumTwin& twin) {
  const int64_t first_bytes = 5 * 2304;
  const int64_t page_bytes = first_bytes + 2304 + 256;
  PageBytes pool(page_bytes, 6);
  const int32_t page = 0;
  uint64_t sum = 0;
  ChecksumPagesArgs args;
  args.base = pool.data();
  args.page_stride = first_bytes;
  args.page_bytes = first_bytes;
  args.page_count = 1;
  args.pages = &page;
  args.count = 1;
  args.checksums = &sum;
  ASSERT_TRUE(twin.sum(args).ok());
  args.base = pool.data() + first_bytes;
  args.page_bytes = page_bytes - first_bytes;
  args.page_stride = args.page_bytes;
  args.first_block = 5;
  args.add = true;
  ASSERT_TRUE(twin.sum(args).ok());
  EXPECT_EQ(sum, oracle_sum(pool.data(), page_bytes, 0));
}

inline void pages_that_are_not_there_sum_to_zero_and_are_counted(const ChecksumTwin& twin) {
  PageBytes pool(2 * 4608, 7);
  const std::vector<int32_t> pages = {-1, 1, 2, 0};
  std::vector<uint64_t> sums(4, 99);
  OpReport report{};
  ChecksumPagesArgs args;
  args.base = pool.data();
  args.page_stride = 4608;
  args.page_bytes = 4608;
  args.page_count = 2;
  args.pages = pages.data();
  args.count = 4;
  args.checksums = sums.data();
  args.report = &report;
  ASSERT_TRUE(twin.sum(args).ok());
  EXPECT_EQ(sums[0], 0u);
  EXPECT_EQ(sums[2], 0u);
  EXPECT_EQ(sums[1], oracle_sum(pool.data() + 4608, 4608, 0));
  EXPECT_EQ(sums[3], oracle_sum(pool.data(), 4608, 0));
  EXPECT_EQ(report.skipped_rows, 2u);
  EXPECT_EQ(report.status, kStatusAbsentPage);
}

inline void refuses_a_bad_page_size_with_value_and_limit(const ChecksumTwin& twin) {
  PageBytes pool(4608, 8);
  const int32_t page = 0;
  uint64_t sum = 7;
  ChecksumPagesArgs args;
  args.base = pool.data();
  args.page_stride = 4608;
  args.page_count = 1;
  args.pages = &page;
  args.count = 1;
  args.checksums = &sum;
  for (const int64_t bad : {int64_t{0}, int64_t{240}, int64_t{2304 + 1}, int64_t{2304 + 240}, kPageBytesMax + 1}) {
    args.page_bytes = bad;
    const absl::Status status = twin.sum(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find("page_bytes is " + std::to_string(bad)), std::string::npos) << status;
  }
  EXPECT_EQ(sum, 7u) << "nothing is written by a refusal";
}

struct ChecksumCase {
  const char* name;
  void (*run)(const ChecksumTwin&);
};

inline const std::vector<ChecksumCase>& checksum_pages_battery() {
  static const std::vector<ChecksumCase> cases = {
      {"every_page_size_has_the_defined_sum", every_page_size_has_the_defined_sum},
      {"every_byte_and_every_place_counts", every_byte_and_every_place_counts},
      {"parts_of_a_page_add_up", parts_of_a_page_add_up},
      {"pages_that_are_not_there_sum_to_zero_and_are_counted", pages_that_are_not_there_sum_to_zero_and_are_counted},
      {"refuses_a_bad_page_size_with_value_and_limit", refuses_a_bad_page_size_with_value_and_limit},
  };
  return cases;
}

}  // namespace needle::testing
