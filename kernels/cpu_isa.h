// Which instruction set a CPU twin runs with. Chosen once from cpuid by the caller, and passed in: a test may force
// any set the machine has, and a result can name the one it came from.
#pragma once

#include <vector>

namespace needle {

enum class CpuIsa { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

// kAvx2 means AVX2 + FMA + F16C; kAvx512 means F + BW + VL + DQ; kAvx512Bf16 adds AVX512_BF16.
bool cpu_has(CpuIsa isa);
CpuIsa best_cpu_isa();
std::vector<CpuIsa> cpu_isas_present();  // ascending, always begins with kPortable
const char* name_of(CpuIsa isa);

}  // namespace needle
