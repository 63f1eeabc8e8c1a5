// Needle-in-a-haystack cells at the level of keys: which stored keys make up a context of a given length with one
// needle's window at a given depth.
//
// What must stay true:
//  1. A cell is a pure function of (context length, depth, needle span): the same cell on every machine.
//  2. Keys come in windows of kWindowKeys that were encoded together; a window is moved whole, so each key keeps the
//     surroundings it was made in. Only the last one before the needle's may be cut.
//  3. Every other needle that happens to lie in the context stays there: a cell never makes the haystack easier.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace needle::recall {

inline constexpr int64_t kWindowKeys = 128;

// The needle's keys in the full haystack, [start, end), inside one window.
struct NeedleSpan {
  int64_t start = 0;
  int64_t end = 0;
};

// source[e] = the haystack key that is entry e of the cell.
struct NeedleCell {
  std::vector<int32_t> source;
  NeedleSpan span;  // where the needle lies in the cell
};

// A context of `entries` entries: the haystack's other windows in order, cut to entries - 128, with the needle's window
// inserted at entry floor(depth x (entries - 128)). Contexts shorter than a window are consecutive keys of the needle's
// own window that hold its whole span, with `depth` as the span's place in them where there is room.
// INVALID_ARGUMENT where the haystack has too few keys or the span does not fit.
absl::StatusOr<NeedleCell> make_needle_cell(int64_t haystack_keys, NeedleSpan needle, int64_t entries, double depth);

// Where another span of the haystack lies in the cell; empty (start == end) where it was cut away or split.
NeedleSpan find_span(const NeedleCell& cell, NeedleSpan span);

}  // namespace needle::recall
