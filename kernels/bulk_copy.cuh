// Barriers in shared memory and the bulk copies that they count (compute capability 9.0 and later; PTX ISA: mbarrier,
// cp.async.bulk), each as one inline function.
//
// What must stay true:
//  1. Global addresses and byte counts given to a bulk copy are multiples of 16; shared addresses too.
//  2. A barrier's phase completes when its arrivals have come and its announced bytes have landed; a waiter gives the parity it
//     waits for, 0 first.
//  3. A copy may overwrite what a warp has read once that warp has arrived on a barrier that the copy's thread waited for
//     (barrier_arrive_warp), or a block barrier lies between; what threads *wrote* needs shared_written() as well.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/shared_memory.cuh"

namespace needle {

// What one barrier_arrive_warp() counts on its barrier. compute-sanitizer's racecheck does not follow __syncwarp() and then one
// arrival: it credits an arrival to the arriving thread alone, and reports the other lanes' reads. Built with NEEDLE_RACECHECK,
// every lane arrives, and what it then reports as errors is not ordered.
#ifdef NEEDLE_RACECHECK
inline constexpr uint32_t kWarpArrivals = 32;
#else
inline constexpr uint32_t kWarpArrivals = 1;
#endif

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// After the inits, by the thread that made them; a block barrier follows. Makes them visible to the copy engine.
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Once the whole warp has read: true for the lanes that arrive for it.
__device__ __forceinline__ bool arrives_for_warp() {
  __syncwarp();
  return kWarpArrivals == 32 || (threadIdx.x & 31u) == 0;
}
// The whole warp has read what the barrier guards.
__device__ __forceinline__ void barrier_arrive_warp(uint64_t* barrier) {
  if (arrives_for_warp()) barrier_arrive(barrier);
}
// One arrival that also announces bytes which copies will deliver.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
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
// Shared memory written by ordinary stores becomes visible to the copy engine and to wgmma.
__device__ __forceinline__ void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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

// Copies `bytes` and counts them down on the barrier.
__device__ __forceinline__ void bulk_copy(void* to_shared, const void* from_global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to_shared)),
               "l"(from_global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void bulk_copy(void* to_shared, const void* from_global, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   shared_address(to_shared)),
               "l"(from_global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
               : "memory");
}
// The other way. A thread's bulk stores since its last bulk_store_commit() are a group.
__device__ __forceinline__ void bulk_store(void* to_global, const void* from_shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to_global), "r"(shared_address(from_shared)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the thread's last kGroups groups have read their shared memory, or have been written.
template <int kGroups>
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
template <int kGroups>
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}
// Brings `bytes` to L2.
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

}  // namespace needle
