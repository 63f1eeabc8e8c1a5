// Shared memory by its 32-bit address, worked out once: from a pointer the compiler would begin at the block's place in its cluster
// each time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace needle {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ void store_word(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
// 16 bytes.
__device__ __forceinline__ uint4 load_vector(uint32_t address) {
  uint4 four;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "r"(address)
               : "memory");
  return four;
}
__device__ __forceinline__ void store_vector(uint32_t address, uint4 four) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(four.x), "r"(four.y), "r"(four.z), "r"(four.w) : "memory");
}
// 16 bytes that a copy brought and no thread writes meanwhile.
__device__ __forceinline__ float4 load_shared_vector(uint32_t address) {
  float4 vector;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(vector.x), "=f"(vector.y), "=f"(vector.z), "=f"(vector.w) : "r"(address));
  return vector;
}
// Two words to an address that is a multiple of 8.
__device__ __forceinline__ void store_shared_pair(uint32_t address, uint32_t low, uint32_t high) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}
__device__ __forceinline__ void add_one_to_word(uint32_t address) {
  asm volatile("red.relaxed.cta.shared::cta.add.u32 [%0], 1;" ::"r"(address) : "memory");
}
__device__ __forceinline__ void max_to_word(uint32_t address, uint32_t value) {
  asm volatile("red.relaxed.cta.shared::cta.max.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void or_to_word(uint32_t address, uint32_t bits) {
  asm volatile("red.relaxed.cta.shared::cta.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}

}  // namespace needle
