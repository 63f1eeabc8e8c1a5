// GCC 12 calls the undefined first operand of its own AVX-512 intrinsics uninitialised (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "kernels/entry_chain_cpu.h"

#include <cmath>
#include <cstring>

#include "base/check.h"
#include "kernels/lanes.h"

namespace needle {
namespace {

namespace portable {
using Lanes = PortableLanes;
#define NEEDLE_TARGET
#include "kernels/entry_chain_lanes.inc"
#undef NEEDLE_TARGET
}  // namespace portable

#if defined(__x86_64__)
namespace avx2 {
using Lanes = Avx2Lanes;
#define NEEDLE_TARGET NEEDLE_TARGET_AVX2
#include "kernels/entry_chain_lanes.inc"
#undef NEEDLE_TARGET
}  // namespace avx2

namespace avx512 {
using Lanes = Avx512Lanes;
#define NEEDLE_TARGET NEEDLE_TARGET_AVX512
#include "kernels/entry_chain_lanes.inc"
#undef NEEDLE_TARGET
}  // namespace avx512
#endif

}  // namespace

const EntryChainCpu& entry_chain_cpu(CpuIsa isa) {
  if (isa == CpuIsa::kPortable) return portable::kChain;
#if defined(__x86_64__)
  // bf16 dot products have no use here, so the two AVX-512 sets share their code.
  return isa == CpuIsa::kAvx2 ? avx2::kChain : avx512::kChain;
#else
  NEEDLE_CHECK(false, "this build has no code for the instruction set; cpu_has() would have said so");
  return portable::kChain;
#endif
}

}  // namespace needle
