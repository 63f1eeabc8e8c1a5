// A kernel that lets the next one start and only then writes what that one reads: what reads ahead of its wait is caught out.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "absl/status/status.h"

namespace needle::testing {

struct LateWords {
  int32_t* to = nullptr;
  const int32_t* from = nullptr;
  int64_t count = 0;
};
inline constexpr int kLateArrays = 4;

// Copies each array's words between device arrays, kLateArrays of them at most, 200 us after the next kernel on the stream may
// have started.
absl::Status write_words_late(std::initializer_list<LateWords> arrays, void* stream);

}  // namespace needle::testing
