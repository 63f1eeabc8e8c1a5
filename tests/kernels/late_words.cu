#include "tests/kernels/late_words.h"

#include "kernels/launch.cuh"

namespace needle::testing {
namespace {

__global__ void late_words_kernel(int32_t* to, const int32_t* from, int count) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  uint64_t begun, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begun < 200'000);  // ns: the next kernel's blocks have long come to their wait
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) to[i] = from[i];
}

}  // namespace

absl::Status write_words_late(int32_t* to, const int32_t* from, int count, void* stream) {
  LaunchShape shape;
  shape.block = dim3(64);
  return launch("write_words_late", late_words_kernel, shape, static_cast<cudaStream_t>(stream), to, from, count);
}

}  // namespace needle::testing
