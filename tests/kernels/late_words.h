// A kernel that lets the next one start and only then writes what that one reads: what reads ahead of its wait is caught out.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace needle::testing {

// Copies `count` words between device arrays, 200 us after the next kernel on the stream may have started.
absl::Status write_words_late(int32_t* to, const int32_t* from, int count, void* stream);

}  // namespace needle::testing
