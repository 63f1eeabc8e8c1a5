// read_entries as its header defines it, and the check that every twin calls first.
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/op_report.h"
#include "kernels/quantise.h"
#include "kernels/read_entries.h"

namespace needle {
namespace {

absl::Status refuse(absl::string_view field, int64_t value, absl::string_view limit) {
  return absl::InvalidArgumentError(absl::StrCat("read_entries: ", field, " is ", value, ", must be ", limit));
}

absl::Status refuse_null(absl::string_view field, absl::string_view remedy) {
  return absl::InvalidArgumentError(absl::StrCat("read_entries: ", field, " is null; ", remedy));
}

uint8_t byte_at(const std::byte* bytes, int64_t index) { return static_cast<uint8_t>(bytes[index]); }

float float_at(const std::byte* bytes, int64_t index) {
  float value;
  std::memcpy(&value, bytes + index * 4, sizeof(value));
  return value;
}

uint16_t bf16_at(const std::byte* bytes, int64_t index) {
  uint16_t value;
  std::memcpy(&value, bytes + index * 2, sizeof(value));
  return value;
}

// code x scale in double, once to fp32, once to bf16.
uint16_t widened(float code, float scale) { return bf16_of(static_cast<float>(static_cast<double>(code) * static_cast<double>(scale))); }

// The entry's values, one by one.
uint16_t value_of(const LayerView& layer, const EntryPlace& place, int64_t i) {
  switch (layer.element) {
    case ElementFormat::kBf16: return bf16_at(place.data, i);
    case ElementFormat::kFp8: return widened(float_of_e4m3(byte_at(place.data, i)), float_at(place.scale, 0));
    case ElementFormat::kFp4: {
      const uint8_t pair = byte_at(place.data, i / 2);
      const uint8_t code = i % 2 == 0 ? (pair & 0xF) : (pair >> 4);
      return widened(float_of_e2m1(code), float_of_ue8m0(byte_at(place.scale, i / 32)));
    }
    case ElementFormat::kFp8DsMla:
      if (i >= 448) return bf16_at(place.data + 448, i - 448);
      return widened(float_of_e4m3(byte_at(place.data, i)), float_of_ue8m0(byte_at(place.scale, i / 64)));
    case ElementFormat::kFp8V32:
      if (i >= 512) return bf16_at(place.data + 528, i - 512);
      return widened(float_of_e4m3(byte_at(place.data, i)), float_at(place.scale, i / 128));
    case ElementFormat::kFp32Rows: break;
  }
  return 0;
}

}  // namespace

absl::Status check_read_entries(const ReadEntriesArgs& args) {
  const LayerView& layer = args.layer;
  if (layer.element == ElementFormat::kFp32Rows || static_cast<int>(layer.element) >= kElementFormatCount) {
    return absl::InvalidArgumentError(
        absl::StrCat("read_entries: element format ", static_cast<int>(layer.element), " holds no entries (state rows have no slots)"));
  }
  if (args.form != ReadForm::kBf16 && args.form != ReadForm::kRaw) {
    return refuse("form", static_cast<int64_t>(args.form), "0 (bf16) or 1 (raw)");
  }
  if (layer.slots_per_page < 1 || layer.slots_per_page > kSlotsPerPageMax) {
    return refuse("layer.slots_per_page", layer.slots_per_page, absl::StrCat("1..", kSlotsPerPageMax));
  }
  const int64_t values = read_entry_values(layer.element, layer.head_dim);
  if (layer.head_dim != values || values < 1 || values > 65536) {
    return refuse("layer.head_dim", layer.head_dim,
                  layer.element == ElementFormat::kFp8DsMla || layer.element == ElementFormat::kFp8V32
                      ? absl::StrCat(values, ", as its format has it")
                      : "1..65536");
  }
  if (layer.element == ElementFormat::kFp4 && layer.head_dim % 32 != 0) {
    return refuse("layer.head_dim", layer.head_dim, "a multiple of 32, the block of an fp4 scale");
  }
  if (layer.page_count < 0) return refuse("layer.page_count", layer.page_count, ">= 0");
  const int64_t page_bytes = layer_page_bytes(layer.element, layer.head_dim, layer.slots_per_page);
  if (layer.page_count > 1 && layer.page_stride < page_bytes) {
    return refuse("layer.page_stride", layer.page_stride, absl::StrCat(">= ", page_bytes, ", a page of this layer"));
  }
  if (args.rows < 0) return refuse("rows", args.rows, ">= 0");
  if (args.ids_per_row < 0 || args.ids_per_row > args.id_stride) {
    return refuse("ids_per_row", args.ids_per_row, absl::StrCat("0..id_stride = ", args.id_stride));
  }
  const int64_t entry_bytes = read_entry_bytes(layer.element, layer.head_dim, args.form);
  if (args.entry_stride < entry_bytes) {
    return refuse("entry_stride", args.entry_stride, absl::StrCat(">= ", entry_bytes, ", the bytes of an entry"));
  }
  if (args.form == ReadForm::kBf16 && (args.entry_stride % 2 != 0 || args.row_stride % 2 != 0)) {
    return refuse("entry_stride and row_stride", args.entry_stride, "even for bf16");
  }
  if (args.row_stride < args.ids_per_row * args.entry_stride) {
    return refuse("row_stride", args.row_stride, absl::StrCat(">= ids_per_row x entry_stride = ", args.ids_per_row * args.entry_stride));
  }
  if ((args.slots != nullptr) && (args.positions != nullptr)) {
    return absl::InvalidArgumentError("read_entries: slots and positions are both given; give one");
  }
  if (args.rows == 0 || args.ids_per_row == 0) return absl::OkStatus();
  if (args.slots == nullptr && args.positions == nullptr) return refuse_null("slots", "give slots or positions");
  if (args.out == nullptr) return refuse_null("out", "the entries go there");
  if (layer.base == nullptr && layer.page_count > 0) return refuse_null("layer.base", "give the pool's first page");
  if (args.positions != nullptr) {
    if (args.pages.rows < 0) return refuse("pages.rows", args.pages.rows, ">= 0");
    if (args.pages.pages_per_row < 0 || args.pages.pages_per_row > args.pages.row_stride) {
      return refuse("pages.pages_per_row", args.pages.pages_per_row, absl::StrCat("0..row_stride = ", args.pages.row_stride));
    }
    if (args.pages.pages == nullptr && args.pages.pages_per_row > 0) {
      return refuse_null("pages.pages", "positions need the page table");
    }
    if (args.rows_per_table_row < 1) return refuse("rows_per_table_row", args.rows_per_table_row, ">= 1");
    const int64_t served = static_cast<int64_t>(args.pages.rows) * args.rows_per_table_row;
    if (args.row_of == nullptr && args.rows > served) {
      return refuse("rows", args.rows, absl::StrCat("<= pages.rows x rows_per_table_row = ", served));
    }
  }
  return absl::OkStatus();
}

absl::Status read_entries_ref(const ReadEntriesArgs& args) {
  absl::Status status = check_read_entries(args);
  if (!status.ok()) return status;
  const LayerView& layer = args.layer;
  const int64_t entry_bytes = read_entry_bytes(layer.element, layer.head_dim, args.form);
  const int64_t data_bytes = slot_data_bytes(layer.element, layer.head_dim);

  OpReport found{};
  for (int64_t row = 0; row < args.rows; ++row) {
    for (int64_t index = 0; index < args.ids_per_row; ++index) {
      const EntryPlace place = entry_place(args, row, index);
      std::byte* out = args.out + row * args.row_stride + index * args.entry_stride;
      if (place.kind == EntryPlaceKind::kBadSlot) {
        ++found.skipped_rows;
        found.status |= kStatusBadSlot;
      }
      if (place.kind == EntryPlaceKind::kAbsentPage) {
        ++found.absent_entries;
        found.status |= kStatusAbsentPage;
      }
      for (int64_t i = 0; i < entry_bytes; ++i) out[i] = std::byte{0};
      if (place.kind != EntryPlaceKind::kThere) continue;
      if (args.form == ReadForm::kRaw) {
        for (int64_t i = 0; i < entry_bytes; ++i) {
          out[i] = i < data_bytes ? place.data[i] : place.scale[i - data_bytes];
        }
        continue;
      }
      for (int64_t i = 0; i < read_entry_values(layer.element, layer.head_dim); ++i) {
        const uint16_t value = value_of(layer, place, i);
        std::memcpy(out + 2 * i, &value, sizeof(value));
      }
    }
  }
  add_to_report(args.report, found);
  return absl::OkStatus();
}

}  // namespace needle
