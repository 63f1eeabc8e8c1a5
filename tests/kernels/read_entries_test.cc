// The battery of read_entries on the reference and on every CPU twin.
#include <gtest/gtest.h>

#include <memory>
#include <ostream>

#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "tests/kernels/read_entries_battery.h"

namespace needle::testing {
namespace {

ReadTwin cpu_twin(CpuIsa isa, int width) {
  ReadTwin twin;
  twin.name = std::string(name_of(isa)) + "_" + std::to_string(width) + "_threads";
  if (!cpu_has(isa)) twin.unavailable = std::string("this machine has no ") + name_of(isa);
  const auto workers = std::make_shared<WorkerThreads>(width);
  twin.read = [=](const ReadEntriesArgs& args) { return read_entries_cpu(args, isa, *workers); };
  return twin;
}

struct TwinCase {
  ReadTwin twin;
  ReadCase test;
};

// What a failure prints of its parameter.
void PrintTo(const TwinCase& param, std::ostream* out) { *out << param.twin.name << " " << param.test.name; }

std::vector<TwinCase> every_twin_and_case() {
  std::vector<ReadTwin> twins = {{"ref", "", read_entries_ref}};
  for (const CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512}) twins.push_back(cpu_twin(isa, 1));
  twins.push_back(cpu_twin(best_cpu_isa(), 3));
  std::vector<TwinCase> all;
  for (const ReadTwin& twin : twins) {
    for (const ReadCase& test : read_entries_battery()) all.push_back({twin, test});
  }
  return all;
}

class ReadEntries : public ::testing::TestWithParam<TwinCase> {};

TEST_P(ReadEntries, battery) {
  const TwinCase& param = GetParam();
  if (!param.twin.unavailable.empty()) GTEST_SKIP() << param.twin.unavailable;
  param.test.run(param.twin);
}

INSTANTIATE_TEST_SUITE_P(twins, ReadEntries, ::testing::ValuesIn(every_twin_and_case()),
                         [](const ::testing::TestParamInfo<TwinCase>& instance) {
                           return instance.param.twin.name + "_" + instance.param.test.name;
                         });

}  // namespace
}  // namespace needle::testing
