// Views: what every kernel takes. Plain data, host and device alike; nothing here owns memory.
//
// What must stay true:
//  1. A view is trivially copyable and says shape and unit beside each field.
//  2. A kernel reads pages where they lie: base + page x stride + offset, 64-bit, no gathered copy.
//  3. An id that names nothing (-1 or outside the pool) never makes a kernel touch memory: a read yields no entry for
//     it, a store skips that row; both are counted in the OpReport and set its status word.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/page_format.h"

namespace needle {

inline constexpr int32_t kNoPage = -1;   // in page tables
inline constexpr int64_t kNoSlot = -1;   // in slot lists: skip this row, on purpose
inline constexpr int32_t kNoEntry = -1;  // padding in selections

// One layer of one component over a whole pool, read only. Slot s of page p begins at
// base + p x page_stride + slot_place(element, head_dim, slots_per_page, s).
struct LayerView {
  const std::byte* base = nullptr;  // page 0's part of this layer; kPageAlignment-aligned for index-K
  int64_t page_stride = 0;          // bytes between this layer's parts of neighbouring pages
  int64_t page_count = 0;           // valid page ids are [0, page_count)
  int32_t slots_per_page = 0;
  int32_t head_dim = 0;
  ElementFormat element = ElementFormat::kBf16;
  ScaleKind scale = ScaleKind::kNone;
};

struct MutableLayerView {
  std::byte* base = nullptr;
  int64_t page_stride = 0;
  int64_t page_count = 0;
  int32_t slots_per_page = 0;
  int32_t head_dim = 0;
  ElementFormat element = ElementFormat::kBf16;
  ScaleKind scale = ScaleKind::kNone;

  NEEDLE_HD operator LayerView() const { return {base, page_stride, page_count, slots_per_page, head_dim, element, scale}; }
};

// Page tables of a batch. Row r, local entry e lies in page pages[r x row_stride + e / slots_per_page],
// slot e % slots_per_page. Global position of a local entry = entry_base[r] + e.
struct PageTableView {
  const int32_t* pages = nullptr;       // [rows, row_stride] page ids, kNoPage where absent
  const int32_t* entry_base = nullptr;  // [rows] first entry's global position; null means 0 everywhere
  int64_t row_stride = 0;               // page ids between rows
  int32_t rows = 0;
  int32_t pages_per_row = 0;  // ids that may be read in a row, <= row_stride
};

enum class RowElement : uint8_t { kBf16 = 0, kFp32 = 1 };

// Rows of numbers that an engine's own matrix products gave: row i, column c at data + (i x row_stride + c) elements.
struct RowsView {
  const void* data = nullptr;
  int64_t row_stride = 0;  // elements between rows, >= columns; CUDA wants 16-byte multiples and an aligned base
  RowElement element = RowElement::kBf16;
};

// Bits of OpReport::status. A set bit says that something was left out of the answer; the counts say how often.
enum OpStatusBit : uint32_t {
  kStatusAbsentPage = 1u << 0,     // a page id inside the visible length named no page
  kStatusBadSlot = 1u << 1,        // a slot outside the pool (not kNoSlot): that row was not stored
  kStatusNanScore = 1u << 2,       // a score was NaN
  kStatusStateMismatch = 1u << 3,  // a store's first position was not the state record's next: nothing written
  kStatusMixedVariants = 1u << 4,  // shards of a merge were scored by different kernel variants
  kStatusStale = 1u << 5,          // kept for rights that were revoked while a kernel ran; no kernel sets it yet
  kStatusBadPageTable = 1u << 6,   // a visible length past the page table's row: cut to the row
  kStatusBadPosition = 1u << 7,    // a position outside the RoPE table or the sequence: that row was skipped
};

// What an operation had to leave out. Zeroed by the caller; kernels add atomically, so one report may serve a batch.
struct OpReport {
  uint32_t status;
  uint32_t reserved;
  uint64_t nan_scores;
  uint64_t absent_entries;
  uint64_t skipped_rows;
  uint64_t fallbacks;  // times that a fast path gave up and the exact one answered; never a wrong answer
};
static_assert(sizeof(OpReport) == 40);

// Scores that are not numbers. A NaN score is always written as kNanScore; an entry whose page is absent as
// kAbsentScore, which selection skips. Bit patterns, so that they survive a copy.
inline constexpr uint32_t kNanScoreBits = 0x7FC00000u;
inline constexpr uint32_t kAbsentScoreBits = 0x7FC0AB5Eu;

}  // namespace needle
