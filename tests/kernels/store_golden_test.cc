// Golden keys and entries from the reference and every CPU instruction set.
#include <gtest/gtest.h>

#include "tests/kernels/store_golden.h"
#include "tests/kernels/store_twins.h"

namespace needle::testing {
namespace {

class StoreGolden : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!host_store_present(GetParam())) GTEST_SKIP() << "this machine has no " << host_store_name(GetParam());
    absl::StatusOr<std::vector<SafetensorsFile>> read = read_golden();
    ASSERT_TRUE(read.ok()) << read.status();
    files_ = *std::move(read);
  }
  std::vector<SafetensorsFile> files_;
};

TEST_P(StoreGolden, entries_come_out_of_any_chunking) { golden_entries_come_out_of_any_chunking(host_store(GetParam()), files_); }

TEST_P(StoreGolden, logits_of_our_own_keys_match) { logits_of_our_own_keys_match_the_golden_ones(host_store(GetParam()), files_); }

INSTANTIATE_TEST_SUITE_P(, StoreGolden, ::testing::Range(0, kHostStores), [](const auto& each) { return host_store_name(each.param); });

}  // namespace
}  // namespace needle::testing
