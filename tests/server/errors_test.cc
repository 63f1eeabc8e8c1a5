// Errors over the wire: what one end made arrives at the other as the same error.
#include "proto/errors.h"

#include <gtest/gtest.h>

namespace needle {
namespace {

TEST(Errors, an_error_survives_the_wire_with_its_code_message_and_hint) {
  for (const ErrorRow& row : kErrorTable) {
    const absl::Status made = make_error(row.code, "17 pages, 16 allowed: ask for fewer", 20);
    const std::optional<ErrorCode> code = error_of_name(row.name);
    ASSERT_TRUE(code.has_value()) << row.name;
    const absl::Status arrived =
        error_from_wire(*code, std::string(made.message()), parse_retry_after_ms(std::to_string(retry_after_ms(made))));
    EXPECT_EQ(arrived, made) << "payloads included";
  }
}

TEST(Errors, a_name_that_is_none_of_ours_is_no_error_of_ours) {
  EXPECT_FALSE(error_of_name("").has_value());
  EXPECT_FALSE(error_of_name("STALE ").has_value());
  EXPECT_FALSE(error_of_name("stale").has_value());
}

TEST(Errors, only_the_message_of_its_own_name_is_cut) {
  EXPECT_EQ(std::string(error_from_wire(ErrorCode::kStale, "BUSY: x", 0).message()), "STALE: BUSY: x");
  EXPECT_EQ(std::string(error_from_wire(ErrorCode::kStale, "STALE: STALE: x", 0).message()), "STALE: STALE: x");
  EXPECT_EQ(std::string(error_from_wire(ErrorCode::kStale, "", 0).message()), "STALE: ");
}

TEST(Errors, a_hint_is_digits_of_at_most_a_day_or_nothing) {
  EXPECT_EQ(parse_retry_after_ms("0"), 0);
  EXPECT_EQ(parse_retry_after_ms("20"), 20);
  EXPECT_EQ(parse_retry_after_ms("86400000"), 86'400'000);
  for (const char* bad : {"", "86400001", "-1", "+1", "1.5", "20ms", " 20", "99999999999999999999999"}) {
    EXPECT_EQ(parse_retry_after_ms(bad), 0) << bad;
  }
}

}  // namespace
}  // namespace needle
