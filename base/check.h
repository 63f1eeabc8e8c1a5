// NEEDLE_CHECK: a broken invariant is a bug, and a bug stops the process.
//
// What must stay true:
//  1. A check never guards bad input. Input from outside gets an absl::Status that names value, limit and remedy.
//  2. A check is always compiled in: a service that holds other people's memory does not run on after a bug.
//  3. The message names what was observed, never a guess at the cause.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace needle::internal {

[[noreturn]] inline void check_failed(const char* file, int line, const char* expression, const char* message) {
  std::fprintf(stderr, "needle: bug at %s:%d: %s is false. %s\n", file, line, expression, message);
  std::fflush(stderr);
  std::abort();
}

}  // namespace needle::internal

#define NEEDLE_CHECK(expression, message) \
  (static_cast<bool>(expression) ? static_cast<void>(0) : ::needle::internal::check_failed(__FILE__, __LINE__, #expression, message))
