// XXH3_64bits_withSeed of one block longer than 240 bytes, by four neighbouring threads. The arithmetic is written out in
// kernels/checksum_pages.h.
//
// What must stay true:
//  1. Thread j of the four owns accumulators 2 j and 2 j + 1, and so 16 bytes of each 64-byte stripe: the swap between
//     neighbouring accumulators stays inside a thread, and a warp reads eight blocks' stripes at a time.
//  2. Blocks begin on 8 bytes; loads are of 16 where the block does, too. A block may lie in shared memory, on 16 bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/checksum_pages.h"
#include "kernels/shared_memory.cuh"

namespace needle {

inline constexpr uint32_t kXxhPrime32_1 = 0x9E3779B1u;
inline constexpr uint32_t kXxhPrime32_2 = 0x85EBCA77u;
inline constexpr uint32_t kXxhPrime32_3 = 0xC2B2AE3Du;
inline constexpr uint64_t kXxhPrime64_1 = 0x9E3779B185EBCA87ull;
inline constexpr uint64_t kXxhPrime64_2 = 0xC2B2AE3D27D4EB4Full;
inline constexpr uint64_t kXxhPrime64_3 = 0x165667B19E3779F9ull;
inline constexpr uint64_t kXxhPrime64_4 = 0x85EBCA77C2B2AE63ull;
inline constexpr uint64_t kXxhPrime64_5 = 0x27D4EB2F165667C5ull;

// The default secret's 24 words, little endian.
inline constexpr int kXxhSecretWords = 24;
__device__ constexpr uint64_t kXxhSecret[kXxhSecretWords] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull, 0x78e5c0cc4ee679cbull,
    0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull, 0xcb00c391bb52283cull, 0xa32e531b8b65d088ull,
    0x4ef90da297486471ull, 0xd8acdea946ef1938ull, 0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull,
    0x647378d9c97e9fc8ull, 0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

// The block's threads copy the secret to shared memory once: constant memory would serialise four addresses a warp.
__device__ __forceinline__ void load_xxh_secret(uint64_t* secret) {
  if (threadIdx.x < kXxhSecretWords) secret[threadIdx.x] = kXxhSecret[threadIdx.x];
}

struct XxhState {
  const uint64_t* secret;  // shared memory
  uint64_t seed;
  int quarter;  // j
  uint64_t even = 0;
  uint64_t odd = 0;

  __device__ __forceinline__ XxhState(const uint64_t* words, uint64_t seed_in, int j) : secret(words), seed(seed_in), quarter(j) {
    even = j == 0 ? uint64_t{kXxhPrime32_3} : j == 1 ? kXxhPrime64_2 : j == 2 ? kXxhPrime64_4 : kXxhPrime64_5;
    odd = j == 0 ? kXxhPrime64_1 : j == 1 ? kXxhPrime64_3 : j == 2 ? uint64_t{kXxhPrime32_2} : uint64_t{kXxhPrime32_1};
  }

  // Seeded secret word at 8 x index.
  __device__ __forceinline__ uint64_t word(int index) const { return secret[index] + ((index & 1) ? uint64_t{0} - seed : seed); }
  // Seeded secret word at any byte.
  __device__ __forceinline__ uint64_t word_at_byte(int byte) const {
    const int index = byte >> 3;
    const int bits = 8 * (byte & 7);
    return bits == 0 ? word(index) : word(index) >> bits | word(index + 1) << (64 - bits);
  }

  __device__ __forceinline__ void take(uint64_t first, uint64_t second, uint64_t key_first, uint64_t key_second) {
    const uint64_t a = first ^ key_first;
    const uint64_t b = second ^ key_second;
    even += second + uint64_t{static_cast<uint32_t>(a)} * static_cast<uint32_t>(a >> 32);
    odd += first + uint64_t{static_cast<uint32_t>(b)} * static_cast<uint32_t>(b >> 32);
  }
  __device__ __forceinline__ void stripe(uint64_t first, uint64_t second, int n) {
    take(first, second, word(n + 2 * quarter), word(n + 2 * quarter + 1));
  }
  __device__ __forceinline__ void scramble() {
    even = (even ^ (even >> 47) ^ word(16 + 2 * quarter)) * kXxhPrime32_1;
    odd = (odd ^ (odd >> 47) ^ word(17 + 2 * quarter)) * kXxhPrime32_1;
  }
  __device__ __forceinline__ void last_stripe(uint64_t first, uint64_t second) {
    take(first, second, word_at_byte(121 + 16 * quarter), word_at_byte(129 + 16 * quarter));
  }
  // All four threads get the hash.
  __device__ __forceinline__ uint64_t finish(int64_t length) const {
    const uint64_t a = even ^ word_at_byte(11 + 16 * quarter);
    const uint64_t b = odd ^ word_at_byte(19 + 16 * quarter);
    uint64_t sum = (a * b) ^ __umul64hi(a, b);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    sum += static_cast<uint64_t>(length) * kXxhPrime64_1;
    sum ^= sum >> 37;
    sum *= 0x165667919E3779F9ull;
    return sum ^ sum >> 32;
  }
};

// A word from any byte address.
__device__ __forceinline__ uint64_t word_at(const std::byte* at) {
  if ((reinterpret_cast<uintptr_t>(at) & 7u) == 0) return *reinterpret_cast<const uint64_t*>(at);
  uint64_t word = 0;
#pragma unroll 1
  for (int i = 7; i >= 0; --i) word = word << 8 | static_cast<uint64_t>(at[i]);
  return word;
}

// A block in global memory: 16 bytes of a stripe, and 16 bytes of the last one, which may begin anywhere. `kAligned`: the
// block begins on 16 bytes.
template <bool kAligned>
struct GlobalBlock {
  const std::byte* base;

  __device__ __forceinline__ ulonglong2 stripe(int64_t offset) const {
    const std::byte* at = base + offset;
    if constexpr (kAligned) return __ldg(reinterpret_cast<const ulonglong2*>(at));
    return {*reinterpret_cast<const uint64_t*>(at), *reinterpret_cast<const uint64_t*>(at + 8)};
  }
  __device__ __forceinline__ ulonglong2 last_stripe(int64_t offset) const { return {word_at(base + offset), word_at(base + offset + 8)}; }
};

// A block in shared memory that begins on 16 bytes and is a multiple of 16 long.
struct SharedBlock {
  uint32_t base;  // shared address

  __device__ __forceinline__ ulonglong2 stripe(int64_t offset) const {
    const uint4 four = load_vector(base + static_cast<uint32_t>(offset));
    return {four.x | uint64_t{four.y} << 32, four.z | uint64_t{four.w} << 32};
  }
  __device__ __forceinline__ ulonglong2 last_stripe(int64_t offset) const { return stripe(offset); }
};

// The hash of a block; the four threads of a quarter group call it together, and whole warps do (a group with nothing to
// do gives `length` 0).
template <class Block>
__device__ __forceinline__ uint64_t xxh3_block(const uint64_t* secret, const Block& block, int64_t length, uint64_t seed) {
  const int quarter = static_cast<int>(threadIdx.x & 3u);
  const int64_t mine = 16 * quarter;
  XxhState state(secret, seed, quarter);
  if (length == kChecksumBlockBytes) {
    constexpr int kStripes = static_cast<int>(kChecksumBlockBytes / 64);  // 36: two runs of 16, three, the last
    constexpr int kBatch = 6;
#pragma unroll
    for (int batch = 0; batch < kStripes; batch += kBatch) {
      ulonglong2 words[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) words[i] = block.stripe(64 * (batch + i) + mine);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int n = batch + i;
        if (n == kStripes - 1) {
          state.last_stripe(words[i].x, words[i].y);
        } else {
          state.stripe(words[i].x, words[i].y, n % 16);
          if (n % 16 == 15) state.scramble();
        }
      }
    }
  } else if (length > 0) {
    const int64_t stripes = (length - 1) / 64;  // before the last
#pragma unroll 1
    for (int64_t n = 0; n < stripes; ++n) {
      const ulonglong2 words = block.stripe(64 * n + mine);
      state.stripe(words.x, words.y, static_cast<int>(n % 16));
      if (n % 16 == 15) state.scramble();
    }
    const ulonglong2 words = block.last_stripe(length - 64 + mine);
    state.last_stripe(words.x, words.y);
  }
  const uint64_t hash = state.finish(length);
  return length == 0 ? 0 : hash;
}
// The sum of what the groups of a warp have.
__device__ __forceinline__ uint64_t sum_of_groups(uint64_t hash) {
#pragma unroll
  for (int step = 4; step < 32; step <<= 1) hash += __shfl_xor_sync(0xFFFFFFFFu, hash, step);
  return hash;
}

}  // namespace needle
