// read_entries: entries gathered by slot, or by position through the page table, and widened to bf16; or as raw bytes.
//
// What must stay true:
//  1. bf16 elements are copied bit for bit. Others are code x scale, rounded to fp32 and then to bf16 (nearest even; a
//     NaN becomes kBf16Nan), the same bits on every twin. kFp8DsMla gives 448 + 64 values, kFp8V32 512 + 64.
//  2. Raw bytes are the slot's data bytes, then its scale bytes (584 of kFp8DsMla, 132 of an fp8 index key), as they
//     are stored; kFp8V32's 656 already hold both.
//  3. kNoSlot / kNoEntry (-1) gives zeros and is not counted: selections are padded with it. Any other id that names no
//     slot gives zeros, is counted in skipped_rows and sets kStatusBadSlot; a position whose page id names no page
//     gives zeros, is counted in absent_entries and sets kStatusAbsentPage.
//  4. Exactly ids_per_row entries of each row are written; bytes between entries and rows are left as they were.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "kernels/pool_view.h"

namespace needle {

enum class ReadForm : uint8_t { kBf16 = 0, kRaw = 1 };

struct ReadEntriesArgs {
  LayerView layer;  // any element format but kFp32Rows

  // Exactly one of the two, as select_topk and list_slots give them out.
  const int32_t* slots = nullptr;      // [rows, id_stride] page x slots_per_page + offset
  const int32_t* positions = nullptr;  // [rows, id_stride] global entry positions
  int32_t rows = 0;
  int32_t ids_per_row = 0;
  int64_t id_stride = 0;  // ids between rows, >= ids_per_row

  PageTableView pages;              // with positions only
  const int32_t* row_of = nullptr;  // [rows] page-table row of each id row; null: row r / rows_per_table_row
  int32_t rows_per_table_row = 1;

  ReadForm form = ReadForm::kBf16;
  std::byte* out = nullptr;    // [rows, ids_per_row] entries
  int64_t entry_stride = 0;    // bytes between entries, >= read_entry_bytes(); a multiple of 2 for kBf16
  int64_t row_stride = 0;      // bytes between rows, >= ids_per_row x entry_stride
  OpReport* report = nullptr;  // may be null
};

// Values of one entry: head_dim, but for kFp8DsMla 512 and for kFp8V32 576.
NEEDLE_HD constexpr int64_t read_entry_values(ElementFormat element, int64_t head_dim) {
  if (element == ElementFormat::kFp8DsMla) return 512;
  if (element == ElementFormat::kFp8V32) return 576;
  return head_dim;
}
NEEDLE_HD constexpr int64_t read_entry_bytes(ElementFormat element, int64_t head_dim, ReadForm form) {
  if (form == ReadForm::kBf16) return 2 * read_entry_values(element, head_dim);
  return slot_data_bytes(element, head_dim) + slot_scale_bytes(element, head_dim);
}
static_assert(read_entry_bytes(ElementFormat::kFp8DsMla, 512, ReadForm::kRaw) == 584);
static_assert(read_entry_bytes(ElementFormat::kFp8V32, 576, ReadForm::kRaw) == 656);
static_assert(read_entry_bytes(ElementFormat::kFp8, 128, ReadForm::kRaw) == 132);
static_assert(read_entry_bytes(ElementFormat::kFp4, 128, ReadForm::kRaw) == 68);

// INVALID_ARGUMENT naming value and limit, before anything is written. Every twin calls it first.
absl::Status check_read_entries(const ReadEntriesArgs& args);

absl::Status read_entries_ref(const ReadEntriesArgs& args);
// AVX-512 sets run the AVX2 code: the operation waits for memory.
absl::Status read_entries_cpu(const ReadEntriesArgs& args, CpuIsa isa, Workers& workers);
absl::Status read_entries_cuda(const ReadEntriesArgs& args, void* stream);

// ---------------------------------------------------------------------------------------------------------------
// What every twin shares: where an id's bytes lie, or why there are none.

enum class EntryPlaceKind : uint8_t { kThere = 0, kSkip = 1, kBadSlot = 2, kAbsentPage = 3 };

struct EntryPlace {
  EntryPlaceKind kind = EntryPlaceKind::kSkip;
  const std::byte* data = nullptr;
  const std::byte* scale = nullptr;
};

NEEDLE_HD inline EntryPlace entry_place(const ReadEntriesArgs& args, int64_t row, int64_t index) {
  const LayerView& layer = args.layer;
  int64_t page = 0;
  int64_t slot = 0;
  if (args.slots != nullptr) {
    const int64_t id = args.slots[row * args.id_stride + index];
    if (id == kNoSlot) return {EntryPlaceKind::kSkip, nullptr, nullptr};
    if (id < 0 || id >= layer.page_count * layer.slots_per_page) return {EntryPlaceKind::kBadSlot, nullptr, nullptr};
    page = id / layer.slots_per_page;
    slot = id % layer.slots_per_page;
  } else {
    const int64_t position = args.positions[row * args.id_stride + index];
    if (position == kNoEntry) return {EntryPlaceKind::kSkip, nullptr, nullptr};
    const int64_t table_row = args.row_of != nullptr ? args.row_of[row] : row / args.rows_per_table_row;
    if (table_row < 0 || table_row >= args.pages.rows) return {EntryPlaceKind::kBadSlot, nullptr, nullptr};
    const int64_t base = args.pages.entry_base != nullptr ? args.pages.entry_base[table_row] : 0;
    const int64_t entry = position - base;
    if (position < 0 || entry < 0 || entry >= static_cast<int64_t>(args.pages.pages_per_row) * layer.slots_per_page) {
      return {EntryPlaceKind::kBadSlot, nullptr, nullptr};
    }
    page = args.pages.pages[table_row * args.pages.row_stride + entry / layer.slots_per_page];
    slot = entry % layer.slots_per_page;
    if (page < 0 || page >= layer.page_count) return {EntryPlaceKind::kAbsentPage, nullptr, nullptr};
  }
  const SlotPlace place = slot_place(layer.element, layer.head_dim, layer.slots_per_page, slot);
  const std::byte* part = layer.base + page * layer.page_stride;
  return {EntryPlaceKind::kThere, part + place.data, part + place.scale};
}

}  // namespace needle
