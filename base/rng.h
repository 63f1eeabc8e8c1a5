// The only source of chance: a small seeded generator, the same numbers on every machine and compiler.
//
// What must stay true:
//  1. Equal seeds give equal sequences for ever: simulator seeds in bug reports depend on it.
//  2. Not for secrets. Session secrets come from the kernel (getrandom).
//
// Source of the algorithm: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
#pragma once

#include <cstdint>

#include "base/check.h"

namespace needle {

class Rng {
 public:
  explicit constexpr Rng(uint64_t seed) : state_(seed) {}

  constexpr uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ull;
    uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    return mixed ^ (mixed >> 31);
  }

  // Uniform in [0, bound). The bias of the multiply-shift method is below bound / 2^64.
  constexpr uint64_t below(uint64_t bound) {
    NEEDLE_CHECK(bound > 0, "a draw from an empty range");
    // The upper half of a 64 x 64 bit product, from four 32-bit ones: there is no 128-bit type in the standard.
    const uint64_t draw = next();
    const uint64_t low = (draw & 0xFFFFFFFFu) * (bound & 0xFFFFFFFFu);
    const uint64_t middle = (draw >> 32) * (bound & 0xFFFFFFFFu) + (low >> 32);
    const uint64_t cross = (draw & 0xFFFFFFFFu) * (bound >> 32) + (middle & 0xFFFFFFFFu);
    return (draw >> 32) * (bound >> 32) + (middle >> 32) + (cross >> 32);
  }

  // Uniform in [low, high].
  constexpr int64_t between(int64_t low, int64_t high) { return low + static_cast<int64_t>(below(static_cast<uint64_t>(high - low) + 1)); }

  // Uniform in [0, 1) with 53 bits.
  constexpr double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

  constexpr bool chance(double probability) { return unit() < probability; }

 private:
  uint64_t state_;
};

}  // namespace needle
