// The reference and the CPU twins of index_logits as the battery takes them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "kernels/index_logits.h"
#include "tests/kernels/index_logits_battery.h"

namespace needle::testing {

// nullopt is the reference.
using CpuTwinName = std::optional<CpuIsa>;

inline std::vector<CpuTwinName> cpu_twin_names() {
  return {std::nullopt, CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16};
}
inline const char* name_of_twin(CpuTwinName twin) { return twin.has_value() ? name_of(*twin) : "reference"; }
inline bool twin_is_present(CpuTwinName twin) { return !twin.has_value() || cpu_has(*twin); }

inline LogitsTwin logits_twin(CpuTwinName name) {
  LogitsTwin twin;
  twin.name = name_of_twin(name);
  if (!name.has_value()) {
    twin.variant = ScoreVariant::kReference;
    twin.run = [](const IndexLogitsArgs& args, int) { return index_logits_ref(args); };
    return twin;
  }
  twin.variant = score_variant(*name);
  twin.run = [isa = *name](const IndexLogitsArgs& args, int threads) {
    WorkerThreads workers(threads);
    return index_logits_cpu(args, isa, workers);
  };
  return twin;
}

}  // namespace needle::testing
