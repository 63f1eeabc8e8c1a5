// The battery of select_topk, merge_topk and list_slots on the reference and on every CPU twin.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <ostream>

#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "tests/kernels/select_topk_battery.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace needle::testing {
namespace {

struct FreeAligned {
  void operator()(void* memory) const { std::free(memory); }
};
using Scratch = std::unique_ptr<void, FreeAligned>;

Scratch scratch_of(int64_t bytes) { return Scratch(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64))); }

SelectTwin cpu_twin(CpuIsa isa, int width) {
  SelectTwin twin;
  twin.name = std::string(name_of(isa)) + "_" + std::to_string(width) + "_threads";
  if (!cpu_has(isa)) twin.unavailable = std::string("this machine has no ") + name_of(isa);
  const auto workers = std::make_shared<WorkerThreads>(width);
  twin.select = [=](const SelectTopkArgs& args) {
    const int64_t bytes = select_topk_cpu_scratch(args, width);
    const Scratch scratch = scratch_of(bytes);
    return select_topk_cpu(args, isa, *workers, scratch.get(), bytes);
  };
  twin.merge = [=](const MergeTopkArgs& args) {
    const int64_t bytes = merge_topk_cpu_scratch(args, width);
    const Scratch scratch = scratch_of(bytes);
    return merge_topk_cpu(args, *workers, scratch.get(), bytes);
  };
  twin.list = [=](const ListSlotsArgs& args) { return list_slots_cpu(args, *workers); };
  return twin;
}

std::vector<SelectTwin> host_twins() {
  std::vector<SelectTwin> twins = {{"ref", "", select_topk_ref, merge_topk_ref, list_slots_ref}};
  for (const CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512}) twins.push_back(cpu_twin(isa, 1));
  twins.push_back(cpu_twin(best_cpu_isa(), 3));
  return twins;
}

struct TwinCase {
  SelectTwin twin;
  SelectCase test;
};

// What a failure prints of its parameter.
void PrintTo(const TwinCase& param, std::ostream* out) { *out << param.twin.name << " " << param.test.name; }

std::vector<TwinCase> every_twin_and_case() {
  std::vector<TwinCase> all;
  for (const SelectTwin& twin : host_twins()) {
    for (const SelectCase& test : select_topk_battery()) all.push_back({twin, test});
  }
  return all;
}

class SelectTopk : public ::testing::TestWithParam<TwinCase> {};

TEST_P(SelectTopk, battery) {
  const TwinCase& param = GetParam();
  if (!param.twin.unavailable.empty()) GTEST_SKIP() << param.twin.unavailable;
  param.test.run(param.twin);
}

INSTANTIATE_TEST_SUITE_P(twins, SelectTopk, ::testing::ValuesIn(every_twin_and_case()),
                         [](const ::testing::TestParamInfo<TwinCase>& instance) {
                           return instance.param.twin.name + "_" + instance.param.test.name;
                         });

#if defined(__x86_64__)
TEST(SelectTopkMode, denormals_keep_their_order_where_the_calling_thread_ignores_them) {
  constexpr unsigned kFlushToZero = 0x8000;
  constexpr unsigned kDenormalsAreZero = 0x0040;
  CallerThread caller;
  for (const CpuIsa isa : cpu_isas_present()) {
    SelectTwin twin = cpu_twin(isa, 1);
    twin.select = [isa, &caller](const SelectTopkArgs& args) {
      const int64_t bytes = select_topk_cpu_scratch(args, 1);
      const Scratch scratch = scratch_of(bytes);
      const unsigned mode = _mm_getcsr();
      const unsigned ignoring = mode | kFlushToZero | kDenormalsAreZero;
      _mm_setcsr(ignoring);
      const absl::Status status = select_topk_cpu(args, isa, caller, scratch.get(), bytes);
      EXPECT_EQ(_mm_getcsr(), ignoring);
      _mm_setcsr(mode);
      return status;
    };
    Rng rng(20260140);
    for (const int64_t length : {100, 5000, 40000}) {
      std::vector<float> row;
      for (int64_t i = 0; i < length; ++i) {
        const uint32_t sign = rng.chance(0.5) ? 0x80000000u : 0u;
        row.push_back(score_from_bits(sign | static_cast<uint32_t>(rng.below(0x00800000))));
      }
      SCOPED_TRACE(::testing::Message() << name_of(isa) << " length " << length);
      expect_exact(twin, problem_of(row, 64));
    }
  }
}
#endif

}  // namespace
}  // namespace needle::testing
