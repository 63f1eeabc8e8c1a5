// checksum_pages: one 64-bit number for all bytes of a page, the same on any device, computed in any order.
//
// The number, exactly. A run of `page_bytes` bytes is cut into blocks of 2,304 bytes, the last one short:
//
//   sum over blocks b of XXH3_64bits_withSeed(bytes of block b, its length, seed = first_block + b)   mod 2^64
//
// XXH3_64bits_withSeed is that of the public XXH3 specification and of xxhash.h >= 0.8.0 (Y. Collet, BSD). Every block
// must be longer than 240 bytes (the check sees to it), so that only the long-input path exists: strides are multiples
// of 256 bytes, and so are their last blocks. Written out for a twin that has no xxhash.h:
//   * secret: the 192 default bytes kSecret; for i in 0..11 the words at 16 i and 16 i + 8 are + seed and - seed
//     (little endian, mod 2^64). Seed 0 leaves the secret as it is.
//   * acc[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1}.
//   * stripe n (64 bytes; n counts from 0 again after each 16): for lane i, d = word i of the stripe,
//     k = d ^ secret word at 8 n + 8 i;  acc[i ^ 1] += d;  acc[i] += low32(k) x high32(k).
//   * after every 16 stripes (1,024 bytes) with bytes left:
//     acc[i] = (acc[i] ^ (acc[i] >> 47) ^ secret word at 128 + 8 i) x P32_1.
//     Of length L there are floor((L - 1) / 1024) such runs, then floor((L - 1 - 1024 x runs) / 64) more stripes.
//   * the last stripe is the last 64 bytes of the block (it may overlap) with the secret from byte 121.
//   * result: avalanche(L x P64_1 + sum over i in 0..3 of fold(acc[2 i] ^ s(11 + 16 i), acc[2 i + 1] ^ s(19 + 16 i))),
//     where s(j) is the secret word at byte j, fold(a, b) = low64 ^ high64 of a x b, and
//     avalanche(h): h ^= h >> 37; h *= 0x165667919E3779F9; h ^= h >> 32.
// A whole 2,304-byte block: 2 runs of 16 stripes, 3 more stripes, the last stripe; the last 256 bytes hold 4 stripes.
// tests/kernels/checksum_pages_battery.h holds numbers to check a twin against.
//
// What must stay true:
//  1. Every byte counts, padding included: a page's unwritten bytes are zeroed before its seal. A page of zeros has a
//     sum of its own, and equal blocks at different places give different terms.
//  2. A page whose parts lie apart (layer-major pools) is the sum over its parts, each beginning at the block after the
//     previous part's last: first_block says where, `add` sums up.
//  3. A page id outside the pool touches no memory: its sum is 0 (with `add`, left as it was), counted in skipped_rows,
//     kStatusAbsentPage set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "kernels/pool_view.h"

namespace needle {

// The row that V4's page strides are a multiple of: a whole number of blocks a page, small enough to share a page out.
inline constexpr int64_t kChecksumBlockBytes = 2304;
inline constexpr int64_t kChecksumBlockLeast = 241;  // the shortest input on XXH3's long path

NEEDLE_HD constexpr int64_t checksum_blocks(int64_t page_bytes) { return (page_bytes + kChecksumBlockBytes - 1) / kChecksumBlockBytes; }

struct ChecksumPagesArgs {
  const std::byte* base = nullptr;  // page 0's first byte; 8-byte aligned
  int64_t page_stride = 0;          // bytes between pages, a multiple of 8
  int64_t page_bytes = 0;           // bytes of a page to sum: the whole stride in a page-major pool
  int64_t page_count = 0;
  uint64_t first_block = 0;        // seed of the first block
  const int32_t* pages = nullptr;  // [count] page ids
  int32_t count = 0;
  bool add = false;               // add to what checksums[] holds instead of setting it
  uint64_t* checksums = nullptr;  // [count]
  OpReport* report = nullptr;     // may be null
};

// INVALID_ARGUMENT naming value and limit, before anything is written. Every twin calls it first.
absl::Status check_checksum_pages(const ChecksumPagesArgs& args);
absl::Status checksum_pages_ref(const ChecksumPagesArgs& args);
// Shares out runs of blocks, not pages, so that one page keeps every worker busy; sums mod 2^64 may meet in any order.
absl::Status checksum_pages_cpu(const ChecksumPagesArgs& args, CpuIsa isa, Workers& workers);
absl::Status checksum_pages_cuda(const ChecksumPagesArgs& args, void* stream);

}  // namespace needle
