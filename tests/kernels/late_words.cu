#include "tests/kernels/late_words.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/launch.cuh"

namespace needle::testing {
namespace {

struct LateArrays {
  LateWords of[kLateArrays];
};

__global__ void late_words_kernel(LateArrays arrays) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  uint64_t begun, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begun < 200'000);  // ns: the next kernel's blocks have long come to their wait
  for (const LateWords& words : arrays.of) {
    for (int64_t i = threadIdx.x; i < words.count; i += blockDim.x) words.to[i] = words.from[i];
  }
}

}  // namespace

absl::Status write_words_late(std::initializer_list<LateWords> arrays, void* stream) {
  NEEDLE_CHECK(arrays.size() <= kLateArrays, "more arrays than kLateArrays");
  LateArrays all{};
  std::copy(arrays.begin(), arrays.end(), all.of);
  LaunchShape shape;
  shape.block = dim3(1024);
  return launch("write_words_late", late_words_kernel, shape, static_cast<cudaStream_t>(stream), all);
}

}  // namespace needle::testing
