// The host twins of the store side, for its batteries.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/cpu_isa.h"
#include "tests/kernels/store_battery.h"

namespace needle::testing {

inline StoreTwin cpu_store(CpuIsa isa) {
  StoreTwin twin;
  twin.name = name_of(isa);
  twin.rows = [isa](const StoreRowsArgs& args, int threads) {
    WorkerThreads workers(threads);
    return store_rows_cpu(args, isa, workers);
  };
  twin.pooled = [isa](const StorePooledArgs& args, int threads) {
    WorkerThreads workers(threads);
    return store_pooled_cpu(args, isa, workers);
  };
  twin.init = [](const InitStateArgs& args) {
    CallerThread alone;
    return init_state_cpu(args, alone);
  };
  twin.commit = [isa](const CommitStateArgs& args) {
    CallerThread alone;
    return commit_state_cpu(args, isa, alone);
  };
  return twin;
}

inline const std::vector<CpuIsa>& all_cpu_isas() {
  static const std::vector<CpuIsa> kAll = {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16};
  return kAll;
}

// 0 is the reference, 1.. the instruction sets of all_cpu_isas().
inline std::string host_store_name(int which) {
  std::string name = which == 0 ? "ref" : name_of(all_cpu_isas()[static_cast<size_t>(which - 1)]);
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}
inline bool host_store_present(int which) { return which == 0 || cpu_has(all_cpu_isas()[static_cast<size_t>(which - 1)]); }
inline StoreTwin host_store(int which) {
  return which == 0 ? reference_store() : cpu_store(all_cpu_isas()[static_cast<size_t>(which - 1)]);
}
inline constexpr int kHostStores = 5;

}  // namespace needle::testing
