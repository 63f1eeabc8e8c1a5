// The one place that launches. Device code's own helper beside launch.h: every .cu file calls `launch` and nothing else.
//
// What must stay true:
//  1. A launch is all it does: no allocation, no synchronisation, legal while a stream is captured into a graph.
//  2. `overlap_previous` (programmatic dependent launch) lets a kernel's prologue run while the one before it drains.
//     A kernel launched so calls wait_for_previous_kernel() before it reads or writes anything that another kernel
//     may touch, but for hints that it reads again afterwards, past L1; that call returns when the one before has ended and its
//     writes are visible.
#pragma once

#include <cuda_runtime.h>

#include "absl/status/status.h"
#include "kernels/launch.h"

namespace needle {

struct LaunchShape {
  dim3 grid{1, 1, 1};
  dim3 block{1, 1, 1};
  unsigned cluster_x = 1;   // blocks a cluster; > 8 needs the non-portable size, which is asked for then
  size_t shared_bytes = 0;  // dynamic
  bool overlap_previous = true;
};

// What turns a runtime error into a Status; the message names operation, error and, where known, the remedy.
absl::Status cuda_status(cudaError_t error, const char* operation);

template <class... Parameters, class... Arguments>
absl::Status launch(const char* operation, void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                    Arguments&&... arguments) {
  if (shape.shared_bytes >= 32 * 1024) {  // 48 KB without asking, and a kernel's static part counts in them
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(shape.shared_bytes));
    if (error != cudaSuccess) return cuda_status(error, operation);
  }
  if (shape.cluster_x > 8) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return cuda_status(error, operation);
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (shape.cluster_x > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = shape.cluster_x;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  if (shape.overlap_previous) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return cuda_status(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), operation);
}

// Device side of `overlap_previous`.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// A word of another kernel's as memory has it now: a hint before the wait, and the truth behind it. It comes from L2, so that nothing
// old stays in L1, and stays where the program has it, where a load of what is called constant may be moved in front of the wait.
__device__ __forceinline__ int32_t load_now(const int32_t* from) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
struct LoadNow {
  __device__ __forceinline__ int32_t operator()(const int32_t* from) const { return load_now(from); }
};
// From here on the next kernel's blocks may take up room that this kernel's ended blocks leave. It says nothing about
// this kernel's results: the next one still waits for them.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace needle
