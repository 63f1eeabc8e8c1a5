#include "recall/needle_cells.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace needle::recall {

absl::StatusOr<NeedleCell> make_needle_cell(int64_t haystack_keys, NeedleSpan needle, int64_t entries, double depth) {
  const int64_t window = needle.start / kWindowKeys;
  const int64_t window_begin = window * kWindowKeys;
  if (haystack_keys % kWindowKeys != 0 || needle.start < 0 || needle.end <= needle.start || needle.end > haystack_keys ||
      needle.end > window_begin + kWindowKeys) {
    return absl::InvalidArgumentError(absl::StrCat("needle span [", needle.start, ", ", needle.end, ") is not inside one window of ",
                                                   kWindowKeys, " keys of a haystack of ", haystack_keys));
  }
  if (!(depth >= 0 && depth <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("needle depth ", depth, " is not in 0..1"));
  }
  const int64_t length = needle.end - needle.start;
  NeedleCell cell;
  if (entries < kWindowKeys) {
    if (entries < length) {
      return absl::InvalidArgumentError(absl::StrCat("a context of ", entries, " entries cannot hold a needle of ", length));
    }
    // The first key such that the span begins at depth x the room left, kept inside the window.
    const auto wanted = static_cast<int64_t>(std::floor(depth * static_cast<double>(entries - length)));
    const int64_t lowest = std::max(window_begin, needle.end - entries);
    const int64_t highest = std::min(needle.start, window_begin + kWindowKeys - entries);
    const int64_t first = std::clamp(needle.start - wanted, lowest, highest);
    cell.source.resize(static_cast<size_t>(entries));
    std::iota(cell.source.begin(), cell.source.end(), static_cast<int32_t>(first));
    cell.span = {needle.start - first, needle.end - first};
    return cell;
  }
  if (entries > haystack_keys) {
    return absl::InvalidArgumentError(
        absl::StrCat("a context of ", entries, " entries needs as many keys, the haystack has ", haystack_keys));
  }
  const int64_t others = entries - kWindowKeys;
  const auto insert_at = static_cast<int64_t>(std::floor(depth * static_cast<double>(others)));
  cell.source.reserve(static_cast<size_t>(entries));
  const auto append_window = [&] {
    for (int64_t key = window_begin; key < window_begin + kWindowKeys; ++key) {
      cell.source.push_back(static_cast<int32_t>(key));
    }
  };
  for (int64_t other = 0; other < others; ++other) {
    if (other == insert_at) append_window();
    const int64_t key = other < window_begin ? other : other + kWindowKeys;
    cell.source.push_back(static_cast<int32_t>(key));
  }
  if (insert_at == others) append_window();
  cell.span = {insert_at + needle.start - window_begin, insert_at + needle.end - window_begin};
  return cell;
}

NeedleSpan find_span(const NeedleCell& cell, NeedleSpan span) {
  const auto first = std::find(cell.source.begin(), cell.source.end(), static_cast<int32_t>(span.start));
  if (first == cell.source.end()) return {};
  const int64_t begin = first - cell.source.begin();
  const int64_t length = span.end - span.start;
  if (begin + length > static_cast<int64_t>(cell.source.size())) return {};
  for (int64_t i = 0; i < length; ++i) {
    if (cell.source[static_cast<size_t>(begin + i)] != span.start + i) return {};
  }
  return {begin, begin + length};
}

}  // namespace needle::recall
