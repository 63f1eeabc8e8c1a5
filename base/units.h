// Counts, sizes and the few conversions between them, so that each multiplication stands in one place.
//
// What must stay true:
//  1. A *token* is a raw position; an *entry* covers `ratio` tokens; bytes are bytes. A name says which it is.
//  2. Every function is total on its stated domain and 64-bit: a pool may exceed 64 GiB.
#pragma once

#include <cstdint>

namespace needle {

inline constexpr int64_t kKiB = int64_t{1} << 10;
inline constexpr int64_t kMiB = int64_t{1} << 20;
inline constexpr int64_t kGiB = int64_t{1} << 30;

inline constexpr int64_t kNanosPerMicro = 1'000;
inline constexpr int64_t kNanosPerMilli = 1'000'000;
inline constexpr int64_t kNanosPerSecond = 1'000'000'000;

// Number of runs of `divisor` that hold `value` things. value >= 0, divisor > 0.
constexpr int64_t div_ceil(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Smallest multiple of `multiple` that is at least `value`. value >= 0, multiple > 0.
constexpr int64_t round_up(int64_t value, int64_t multiple) { return div_ceil(value, multiple) * multiple; }

// Entries complete after the first `tokens` tokens: the entry that a token completes is visible to that token.
// Source: DeepSeek-V4 reference inference, visible entries s < (p + 1) / ratio for a query at position p.
constexpr int64_t entries_complete(int64_t tokens, int64_t ratio) { return tokens / ratio; }

// The first token of entry g, which is also its RoPE position.
constexpr int64_t first_token_of_entry(int64_t entry, int64_t ratio) { return entry * ratio; }

}  // namespace needle
