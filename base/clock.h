// The only door to time. Nothing below main() and the tests calls the system's clock itself.
//
// What must stay true:
//  1. Time is monotonic nanoseconds since an arbitrary start; wall-clock time never decides anything.
//  2. A Clock is safe to read from any thread.
#pragma once

#include <chrono>
#include <cstdint>

namespace needle {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t now_ns() const = 0;
};

class SteadyClock final : public Clock {
 public:
  int64_t now_ns() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
};

}  // namespace needle
