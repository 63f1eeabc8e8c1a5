// Adding to an OpReport from a kernel. A null report costs nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/pool_view.h"

namespace needle {

__device__ __forceinline__ void report_status(OpReport* report, uint32_t status) {
  if (report != nullptr && status != 0) atomicOr(&report->status, status);
}
__device__ __forceinline__ void report_count(OpReport* report, uint64_t OpReport::*counter, uint64_t count) {
  if (report != nullptr && count != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&(report->*counter)), static_cast<unsigned long long>(count));
  }
}

}  // namespace needle
