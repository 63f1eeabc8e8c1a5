// The bulk copy engine and its barriers (compute capability 9.0 and later), as four small functions.
//
// What must stay true:
//  1. Global addresses and byte counts given to a bulk copy are multiples of 16; shared addresses too.
//  2. A barrier's phase flips when its expected bytes have landed; a waiter gives the parity it waits for, 0 first.
//  3. Shared memory that ordinary code read may be overwritten by a bulk copy once a block barrier lies between; shared
//     memory that ordinary code *wrote* and the engine reads next needs fence_before_bulk_store() as well.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/shared_memory.cuh"

namespace needle {

// 16 bytes from a shared address.
__device__ __forceinline__ float4 load_shared_vector(uint32_t address) {
  float4 vector;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(vector.x), "=f"(vector.y), "=f"(vector.z), "=f"(vector.w) : "r"(address));
  return vector;
}

// Two words to a shared address that is a multiple of 8.
__device__ __forceinline__ void store_shared_pair(uint32_t address, uint32_t low, uint32_t high) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// After the inits, by the thread that made them; a block barrier follows.
__device__ __forceinline__ void barrier_inits_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni finished;\n"
      "bra.uni again;\n"
      "finished:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void fence_before_bulk_store() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's groups still read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until at most kPending of this thread's groups have not been written.
template <int kPending>
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace needle
