// The battery of checksum_pages on the reference and on every CPU twin.
#include <gtest/gtest.h>

#include <memory>
#include <ostream>

#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "tests/kernels/checksum_pages_battery.h"

namespace needle::testing {
namespace {

ChecksumTwin cpu_twin(CpuIsa isa, int width) {
  ChecksumTwin twin;
  twin.name = std::string(name_of(isa)) + "_" + std::to_string(width) + "_threads";
  if (!cpu_has(isa)) twin.unavailable = std::string("this machine has no ") + name_of(isa);
  const auto workers = std::make_shared<WorkerThreads>(width);
  twin.sum = [=](const ChecksumPagesArgs& args) { return checksum_pages_cpu(args, isa, *workers); };
  return twin;
}

struct TwinCase {
  ChecksumTwin twin;
  ChecksumCase test;
};

// What a failure prints of its parameter.
void PrintTo(const TwinCase& param, std::ostream* out) { *out << param.twin.name << " " << param.test.name; }

std::vector<TwinCase> every_twin_and_case() {
  std::vector<ChecksumTwin> twins = {{"ref", "", checksum_pages_ref}};
  for (const CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512}) twins.push_back(cpu_twin(isa, 1));
  twins.push_back(cpu_twin(best_cpu_isa(), 3));
  std::vector<TwinCase> all;
  for (const ChecksumTwin& twin : twins) {
    for (const ChecksumCase& test : checksum_pages_battery()) all.push_back({twin, test});
  }
  return all;
}

class ChecksumPages : public ::testing::TestWithParam<TwinCase> {};

TEST_P(ChecksumPages, battery) {
  const TwinCase& param = GetParam();
  if (!param.twin.unavailable.empty()) GTEST_SKIP() << param.twin.unavailable;
  param.test.run(param.twin);
}

INSTANTIATE_TEST_SUITE_P(twins, ChecksumPages, ::testing::ValuesIn(every_twin_and_case()),
                         [](const ::testing::TestParamInfo<TwinCase>& instance) {
                           return instance.param.twin.name + "_" + instance.param.test.name;
                         });

// Pinned (the library and the battery's own code agree on them): what a page summed to must not change under records
// that outlive a release.
TEST(ChecksumPages, has_these_numbers_for_ever) {
  std::vector<uint64_t> words(2 * 2304 / 8 + 32, 0);
  const int32_t page = 0;
  ChecksumPagesArgs args;
  args.base = reinterpret_cast<const std::byte*>(words.data());
  args.page_bytes = args.page_stride = static_cast<int64_t>(words.size() * 8);
  args.page_count = 1;
  args.pages = &page;
  args.count = 1;
  uint64_t sum = 0;
  args.checksums = &sum;
  ASSERT_TRUE(checksum_pages_ref(args).ok());
  EXPECT_EQ(sum, 14249831224580885977u);
  for (size_t i = 0; i < words.size(); ++i) words[i] = i * 0x0101010101010101u;
  ASSERT_TRUE(checksum_pages_ref(args).ok());
  EXPECT_EQ(sum, 4339201558841083257u);
}

}  // namespace
}  // namespace needle::testing
