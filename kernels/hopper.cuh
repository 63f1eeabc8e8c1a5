// Barriers and bulk copies of sm_90 and later, each as one inline function (PTX ISA: mbarrier, cp.async.bulk).
#pragma once

#include <cstdint>

#include "kernels/shared_memory.cuh"

namespace needle {

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(shared_address(barrier)) : "memory");
}
// One arrival that also announces bytes which copies will deliver.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// Announces bytes without arriving.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Returns once the phase of this parity has completed; the first phase has parity 0. The instruction sleeps inside.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Hints for the L2 cache: what is read once should leave first, so that scores stay for the selection that follows.
__device__ __forceinline__ uint64_t cache_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t cache_evict_normal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t cache_evict_unchanged() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies `bytes` (a multiple of 16, both ends aligned to 16) and counts them down on the barrier.
__device__ __forceinline__ void bulk_copy(void* to_shared, const void* from_global, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   shared_address(to_shared)),
               "l"(from_global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
               : "memory");
}
// Brings `bytes` (a multiple of 16, aligned to 16) to L2.
__device__ __forceinline__ void prefetch_bulk(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}
// One box of a three-dimensional tensor map, at (x, y, z); out-of-range parts arrive as zeros and count all the same.
__device__ __forceinline__ void tensor_copy(void* to_shared, const void* tensor_map, int x, int y, int z, uint64_t* barrier,
                                            uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to_shared)),
      "l"(tensor_map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tensor_map_prefetch(const void* tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}
// Shared memory written by ordinary stores becomes visible to the copy engine and to wgmma.
__device__ __forceinline__ void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers of a warpgroup (sm_90a and later arch-specific targets).
template <int kRegisters>
__device__ __forceinline__ void keep_registers_at_most() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace needle
