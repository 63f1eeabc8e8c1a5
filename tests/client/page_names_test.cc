#include "client/page_names.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

namespace needle::client {
namespace {

std::vector<int32_t> tokens_from(int32_t first, size_t count) {
  std::vector<int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

const NameSpace kSpace = {"deepseek-v4-flash", "0731", 42, ""};

TEST(PageNames, name_full_pages_only) {
  EXPECT_TRUE(name_pages(kSpace, tokens_from(0, 255), 256).empty());
  EXPECT_EQ(name_pages(kSpace, tokens_from(0, 256), 256).size(), 1u);
  EXPECT_EQ(name_pages(kSpace, tokens_from(0, 1000), 256).size(), 3u);
}

TEST(PageNames, are_equal_exactly_as_far_as_the_prefixes_are) {
  std::vector<int32_t> a = tokens_from(0, 1024);
  std::vector<int32_t> b = a;
  b[600] += 1;
  const auto left = name_pages(kSpace, a, 256);
  const auto right = name_pages(kSpace, b, 256);
  EXPECT_EQ(left[0], right[0]);
  EXPECT_EQ(left[1], right[1]);
  EXPECT_FALSE(left[2] == right[2]);
  EXPECT_FALSE(left[3] == right[3]) << "equal tokens after another prefix are another page";
}

TEST(PageNames, differ_between_namespaces) {
  const std::vector<int32_t> tokens = tokens_from(0, 256);
  std::set<std::pair<uint64_t, uint64_t>> seen;
  for (const NameSpace& space : {kSpace, NameSpace{"deepseek-v4-pro", "0731", 42, ""}, NameSpace{"deepseek-v4-flash", "0813", 42, ""},
                                 NameSpace{"deepseek-v4-flash", "0731", 43, ""}, NameSpace{"deepseek-v4-flash", "0731", 42, "tenant"},
                                 NameSpace{"deepseek-v4-flash0731", "", 42, ""}}) {
    const PageName name = name_pages(space, tokens, 256)[0];
    EXPECT_TRUE(seen.insert({name.high, name.low}).second);
  }
}

TEST(PageNames, of_engine_hashes_follow_the_hash) {
  const std::vector<uint8_t> one = {1, 2, 3};
  const std::vector<uint8_t> two = {1, 2, 3, 0};
  EXPECT_EQ(name_of_engine_hash(kSpace, one), name_of_engine_hash(kSpace, one));
  EXPECT_FALSE(name_of_engine_hash(kSpace, one) == name_of_engine_hash(kSpace, two));
}

}  // namespace
}  // namespace needle::client
