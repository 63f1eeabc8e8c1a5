#include "kernels/cpu_isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdint>

namespace needle {
namespace {

struct Features {
  bool avx2 = false;
  bool avx512 = false;
  bool avx512_bf16 = false;
};

#if defined(__x86_64__)

// What the operating system saves at a context switch. An instruction set that the processor has and the system does
// not save would fault or, worse, lose registers.
uint64_t saved_state_mask() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

constexpr uint64_t kSavesAvx = 0x6;      // XMM and YMM
constexpr uint64_t kSavesAvx512 = 0xE6;  // and opmask, the upper halves, the upper registers

bool bit(uint32_t word, int index) { return ((word >> index) & 1u) != 0; }

// Read from cpuid, not from __builtin_cpu_supports: the two compilers know different names there.
Features read_features() {
  Features features;
  uint32_t a = 0;
  uint32_t b = 0;
  uint32_t c = 0;
  uint32_t d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return features;
  const bool osxsave = bit(c, 27);
  const bool avx = bit(c, 28);
  const bool fma = bit(c, 12);
  const bool f16c = bit(c, 29);
  if (!osxsave || !avx) return features;
  const uint64_t saved = saved_state_mask();
  if ((saved & kSavesAvx) != kSavesAvx) return features;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return features;
  features.avx2 = bit(b, 5) && fma && f16c;
  const bool f = bit(b, 16);
  const bool dq = bit(b, 17);
  const bool bw = bit(b, 30);
  const bool vl = bit(b, 31);
  features.avx512 = features.avx2 && f && dq && bw && vl && (saved & kSavesAvx512) == kSavesAvx512;
  if (features.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) features.avx512_bf16 = bit(a, 5);
  return features;
}

#else

Features read_features() { return Features(); }

#endif

const Features& features() {
  static const Features read = read_features();
  return read;
}

}  // namespace

bool cpu_has(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable: return true;
    case CpuIsa::kAvx2: return features().avx2;
    case CpuIsa::kAvx512: return features().avx512;
    case CpuIsa::kAvx512Bf16: return features().avx512_bf16;
  }
  return false;
}

CpuIsa best_cpu_isa() {
  for (CpuIsa isa : {CpuIsa::kAvx512Bf16, CpuIsa::kAvx512, CpuIsa::kAvx2}) {
    if (cpu_has(isa)) return isa;
  }
  return CpuIsa::kPortable;
}

std::vector<CpuIsa> cpu_isas_present() {
  std::vector<CpuIsa> present;
  for (CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16}) {
    if (cpu_has(isa)) present.push_back(isa);
  }
  return present;
}

const char* name_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable: return "portable";
    case CpuIsa::kAvx2: return "avx2";
    case CpuIsa::kAvx512: return "avx512";
    case CpuIsa::kAvx512Bf16: return "avx512_bf16";
  }
  return "unknown";
}

}  // namespace needle
