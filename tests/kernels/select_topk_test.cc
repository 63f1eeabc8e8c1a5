// The battery of select_topk, merge_topk and list_slots on the reference and on every CPU twin.
#include <gtest/gtest.h>

#include "tests/kernels/select_topk_battery.h"

namespace needle::testing {
namespace {

std::vector<SelectTwin> host_twins() {
  return {{"ref", "", select_topk_ref, merge_topk_ref, list_slots_ref}};
}

struct TwinCase {
  SelectTwin twin;
  SelectCase test;
};

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

}  // namespace
}  // namespace needle::testing
