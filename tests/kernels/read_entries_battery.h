// The cases that every twin of read_entries must pass. A twin takes host pointers and fills host outputs.
//
// What must stay true:
//  1. Values are expected from this file's own decoding (powers of two in double), never from a twin.
//  2. Every byte of the output is compared, the untouched ones between entries included.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/rng.h"
#include "kernels/read_entries.h"
#include "tests/counts.h"

namespace needle::testing {

struct ReadTwin {
  std::string name;
  std::string unavailable;
  std::function<absl::Status(const ReadEntriesArgs&)> read;
};

inline double decoded_e4m3(uint8_t code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  if ((code & 0x7F) == 0x7F) return std::nan("");
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

inline double decoded_e2m1(uint8_t code) {
  static constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kValues[code & 7] : kValues[code & 7];
}

inline double decoded_ue8m0(uint8_t byte) { return byte == 255 ? std::nan("") : std::ldexp(1.0, byte - 127); }

// To fp32, then to bf16, nearest even each, without the library's rounding code.
inline uint16_t oracle_bf16(double value) {
  const float once = static_cast<float>(value);
  if (std::isnan(once)) return 0x7FFF;
  if (std::isinf(once)) return std::signbit(once) ? 0xFF80 : 0x7F80;
  uint32_t bits;
  std::memcpy(&bits, &once, sizeof(bits));
  const uint32_t kept = bits >> 16;
  const uint32_t rest = bits & 0xFFFF;
  const bool up = rest > 0x8000 || (rest == 0x8000 && (kept & 1) != 0);
  return static_cast<uint16_t>(kept + (up ? 1 : 0));
}

struct ReadPool {
  LayerView layer;
  std::vector<std::byte> bytes;
};

inline const std::vector<ElementFormat>& readable_elements() {
  static const std::vector<ElementFormat> elements = {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4,
                                                      ElementFormat::kFp8DsMla, ElementFormat::kFp8V32};
  return elements;
}

inline int32_t usual_head_dim(ElementFormat element) {
  if (element == ElementFormat::kFp8DsMla) return 512;
  return element == ElementFormat::kFp8V32 ? 576 : 128;
}

// A pool of random bytes: every code, NaN codes and scales of every size among them.
inline ReadPool random_pool(ElementFormat element, int32_t slots_per_page, int64_t page_count, Rng& rng) {
  ReadPool pool;
  pool.layer.slots_per_page = slots_per_page;
  pool.layer.page_count = page_count;
  pool.layer.head_dim = usual_head_dim(element);
  pool.layer.element = element;
  pool.layer.page_stride = layer_page_bytes(element, pool.layer.head_dim, slots_per_page) + 256;
  pool.bytes.resize(static_cast<size_t>(pool.layer.page_stride * page_count));
  for (std::byte& byte : pool.bytes) byte = static_cast<std::byte>(rng.next());
  // Scales mostly near one, so that most values are ordinary numbers.
  for (int64_t page = 0; page < page_count; ++page) {
    for (int64_t slot = 0; slot < slots_per_page; ++slot) {
      const SlotPlace place = slot_place(element, pool.layer.head_dim, slots_per_page, slot);
      std::byte* scale = pool.bytes.data() + page * pool.layer.page_stride + place.scale;
      if (element == ElementFormat::kFp8 || element == ElementFormat::kFp8V32) {
        for (int i = 0; i < (element == ElementFormat::kFp8 ? 1 : 4); ++i) {
          const float value = static_cast<float>(0.001 + rng.unit());
          if (rng.chance(0.9)) std::memcpy(scale + 4 * i, &value, 4);
        }
      } else if (element == ElementFormat::kFp4 || element == ElementFormat::kFp8DsMla) {
        for (int i = 0; i < (element == ElementFormat::kFp4 ? 4 : 7); ++i) {
          if (rng.chance(0.8)) scale[i] = static_cast<std::byte>(rng.between(110, 130));
        }
      }
    }
  }
  pool.layer.base = pool.bytes.data();
  return pool;
}

inline std::vector<std::byte> expected_entry(const LayerView& layer, int64_t page, int64_t slot, ReadForm form) {
  const std::byte* part = layer.base + page * layer.page_stride;
  const SlotPlace place = slot_place(layer.element, layer.head_dim, layer.slots_per_page, slot);
  const int64_t data_bytes = slot_data_bytes(layer.element, layer.head_dim);
  const int64_t scale_bytes = slot_scale_bytes(layer.element, layer.head_dim);
  std::vector<std::byte> out;
  if (form == ReadForm::kRaw) {
    out.assign(part + place.data, part + place.data + data_bytes);
    out.insert(out.end(), part + place.scale, part + place.scale + scale_bytes);
    return out;
  }
  const auto byte = [&](int64_t at) { return static_cast<uint8_t>(part[at]); };
  const auto fp32 = [&](int64_t at) {
    float value;
    std::memcpy(&value, part + at, 4);
    return static_cast<double>(value);
  };
  const auto push = [&](uint16_t value) {
    out.push_back(static_cast<std::byte>(value & 0xFF));
    out.push_back(static_cast<std::byte>(value >> 8));
  };
  const auto push_bf16 = [&](int64_t at) { push(static_cast<uint16_t>(byte(at) | (byte(at + 1) << 8))); };
  switch (layer.element) {
    case ElementFormat::kBf16:
      for (int64_t i = 0; i < layer.head_dim; ++i) push_bf16(place.data + 2 * i);
      break;
    case ElementFormat::kFp8:
      for (int64_t i = 0; i < layer.head_dim; ++i) push(oracle_bf16(decoded_e4m3(byte(place.data + i)) * fp32(place.scale)));
      break;
    case ElementFormat::kFp4:
      for (int64_t i = 0; i < layer.head_dim; ++i) {
        const int nibble = byte(place.data + i / 2) >> (i % 2 == 0 ? 0 : 4);
        push(oracle_bf16(decoded_e2m1(static_cast<uint8_t>(nibble & 15)) * decoded_ue8m0(byte(place.scale + i / 32))));
      }
      break;
    case ElementFormat::kFp8DsMla:
      for (int64_t i = 0; i < 448; ++i) {
        push(oracle_bf16(decoded_e4m3(byte(place.data + i)) * decoded_ue8m0(byte(place.scale + i / 64))));
      }
      for (int64_t i = 0; i < 64; ++i) push_bf16(place.data + 448 + 2 * i);
      break;
    case ElementFormat::kFp8V32:
      for (int64_t i = 0; i < 512; ++i) {
        push(oracle_bf16(decoded_e4m3(byte(place.data + i)) * fp32(place.data + 512 + 4 * (i / 128))));
      }
      for (int64_t i = 0; i < 64; ++i) push_bf16(place.data + 528 + 2 * i);
      break;
    case ElementFormat::kFp32Rows: break;
  }
  return out;
}

// Runs the twin over `ids` and compares every output byte. `where(row, index)` says which (page, slot) is expected, or
// page -1 for zeros.
inline void expect_reads(const ReadTwin& twin, ReadEntriesArgs args, int64_t gap,
                         const std::function<std::pair<int64_t, int64_t>(int64_t, int64_t)>& where) {
  const int64_t entry_bytes = read_entry_bytes(args.layer.element, args.layer.head_dim, args.form);
  args.entry_stride = entry_bytes + gap;
  args.row_stride = args.ids_per_row * args.entry_stride + 3 * gap;
  std::vector<std::byte> out(static_cast<size_t>(args.rows * args.row_stride), std::byte{0x5A});
  std::vector<std::byte> want = out;
  for (int64_t row = 0; row < args.rows; ++row) {
    for (int64_t index = 0; index < args.ids_per_row; ++index) {
      const auto [page, slot] = where(row, index);
      std::byte* at = want.data() + row * args.row_stride + index * args.entry_stride;
      if (page < 0) {
        std::memset(at, 0, static_cast<size_t>(entry_bytes));
        continue;
      }
      const std::vector<std::byte> entry = expected_entry(args.layer, page, slot, args.form);
      ASSERT_EQ(static_cast<int64_t>(entry.size()), entry_bytes);
      std::memcpy(at, entry.data(), entry.size());
    }
  }
  args.out = out.data();
  const absl::Status status = twin.read(args);
  ASSERT_TRUE(status.ok()) << status;
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(static_cast<int>(out[i]), static_cast<int>(want[i])) << name_of(args.layer.element) << " byte " << i << " of " << want.size();
  }
}

inline void slots_of_every_format_widen_exactly(const ReadTwin& twin) {
  for (const ElementFormat element : readable_elements()) {
    for (const int32_t slots_per_page : {1, 2, 64}) {
      for (const ReadForm form : {ReadForm::kBf16, ReadForm::kRaw}) {
        Rng rng(77);
        const ReadPool pool = random_pool(element, slots_per_page, 5, rng);
        std::vector<int32_t> slots;
        for (int i = 0; i < 2 * 70; ++i) slots.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(5 * slots_per_page))));
        slots[3] = -1;
        slots[71] = 5 * slots_per_page;
        slots[72] = -2;
        OpReport report{};
        ReadEntriesArgs args;
        args.layer = pool.layer;
        args.slots = slots.data();
        args.rows = 2;
        args.ids_per_row = 67;
        args.id_stride = 70;
        args.form = form;
        args.report = &report;
        expect_reads(twin, args, form == ReadForm::kRaw ? 3 : 4, [&](int64_t row, int64_t index) {
          const int64_t slot = slots[static_cast<size_t>(row * 70 + index)];
          if (slot < 0 || slot >= 5 * slots_per_page) return std::pair<int64_t, int64_t>{-1, 0};
          return std::pair<int64_t, int64_t>{slot / slots_per_page, slot % slots_per_page};
        });
        if (::testing::Test::HasFatalFailure()) return;
        EXPECT_EQ(report.skipped_rows, 2u) << "-1 is padding and is not counted";
        EXPECT_EQ(report.status, kStatusBadSlot);
        EXPECT_EQ(report.absent_entries, 0u);
      }
    }
  }
}

inline void positions_go_through_the_page_table(const ReadTwin& twin) {
  for (const ElementFormat element : readable_elements()) {
    Rng rng(78);
    const int32_t slots_per_page = 64;
    const ReadPool pool = random_pool(element, slots_per_page, 6, rng);
    const std::vector<int32_t> pages = {5, 0, -1, 3, /*row 1*/ 1, 6, 2, 2};
    const std::vector<int32_t> base = {1000, 0};
    std::vector<int32_t> positions = {1000, 1063, 1064, 1127, 1128, 1255, 1256, 999, -1, -7,   // row 0 of the table
                                      0,    63,   64,   127,  128,  255,  256,  1,   -1, 200,  // row 1
                                      1001, 1002, 1003, 1004, 1200, 1201, 5,    -1,  -1, -1};
    const std::vector<int32_t> row_of = {0, 1, 0};
    OpReport report{};
    ReadEntriesArgs args;
    args.layer = pool.layer;
    args.positions = positions.data();
    args.rows = 3;
    args.ids_per_row = 10;
    args.id_stride = 10;
    args.pages = {pages.data(), base.data(), 4, 2, 4};
    args.row_of = row_of.data();
    args.report = &report;
    uint64_t bad = 0;
    uint64_t absent = 0;
    expect_reads(twin, args, 0, [&](int64_t row, int64_t index) {
      const int64_t position = positions[static_cast<size_t>(row * 10 + index)];
      if (position == -1) return std::pair<int64_t, int64_t>{-1, 0};
      const int64_t table_row = row_of[static_cast<size_t>(row)];
      const int64_t entry = position - base[static_cast<size_t>(table_row)];
      if (position < 0 || entry < 0 || entry >= 256) {
        ++bad;
        return std::pair<int64_t, int64_t>{-1, 0};
      }
      const int64_t page = pages[static_cast<size_t>(table_row * 4 + entry / 64)];
      if (page < 0 || page >= 6) {
        ++absent;
        return std::pair<int64_t, int64_t>{-1, 0};
      }
      return std::pair<int64_t, int64_t>{page, entry % 64};
    });
    EXPECT_EQ(report.skipped_rows, bad);
    EXPECT_EQ(report.absent_entries, absent);
    EXPECT_GT(bad, 0u);
    EXPECT_GT(absent, 0u);
    EXPECT_EQ(report.status, kStatusBadSlot | kStatusAbsentPage);
  }
}

inline void every_fp8_code_under_many_scales(const ReadTwin& twin) {
  Rng rng(79);
  ReadPool pool = random_pool(ElementFormat::kFp8, 64, 8, rng);
  for (int64_t page = 0; page < 8; ++page) {
    std::byte* part = pool.bytes.data() + page * pool.layer.page_stride;
    for (int64_t slot = 0; slot < 64; ++slot) {
      for (int64_t i = 0; i < 128; ++i) part[slot * 128 + i] = static_cast<std::byte>(i + 128 * (slot % 2));
      uint32_t bits = static_cast<uint32_t>(rng.next());  // any scale: NaN, infinite, denormal, negative
      if (slot == 0) bits = 0x00000001u;
      if (slot == 1) bits = 0x7F7FFFFFu;
      std::memcpy(part + 8192 + 4 * slot, &bits, 4);
    }
  }
  std::vector<int32_t> slots(512);
  for (int32_t i = 0; i < 512; ++i) slots[static_cast<size_t>(i)] = i;
  ReadEntriesArgs args;
  args.layer = pool.layer;
  args.slots = slots.data();
  args.rows = 1;
  args.ids_per_row = 512;
  args.id_stride = 512;
  expect_reads(twin, args, 0, [](int64_t, int64_t index) { return std::pair<int64_t, int64_t>{index / 64, index % 64}; });
}

inline void an_empty_read_is_an_answer(const ReadTwin& twin) {
  Rng rng(80);
  const ReadPool pool = random_pool(ElementFormat::kBf16, 64, 1, rng);
  ReadEntriesArgs args;
  args.layer = pool.layer;
  args.entry_stride = 256;
  EXPECT_TRUE(twin.read(args).ok());
}

inline void refuses_a_bad_read_with_value_and_limit(const ReadTwin& twin) {
  Rng rng(81);
  const ReadPool pool = random_pool(ElementFormat::kFp8DsMla, 2, 1, rng);
  const int32_t slot = 0;
  std::byte out[1024];
  ReadEntriesArgs good;
  good.layer = pool.layer;
  good.slots = &slot;
  good.rows = 1;
  good.ids_per_row = 1;
  good.id_stride = 1;
  good.entry_stride = 1024;
  good.row_stride = 1024;
  good.out = out;
  ASSERT_TRUE(twin.read(good).ok());
  const auto message_for = [&](const std::function<void(ReadEntriesArgs&)>& spoil) {
    ReadEntriesArgs args = good;
    spoil(args);
    const absl::Status status = twin.read(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const auto holds = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(holds(message_for([](ReadEntriesArgs& a) { a.entry_stride = 1022; }), "entry_stride is 1022, must be >= 1024"));
  EXPECT_TRUE(holds(message_for([](ReadEntriesArgs& a) { a.layer.head_dim = 448; }), "head_dim is 448, must be 512"));
  EXPECT_TRUE(holds(message_for([](ReadEntriesArgs& a) { a.layer.element = ElementFormat::kFp32Rows; }), "state rows"));
  EXPECT_TRUE(holds(message_for([&](ReadEntriesArgs& a) { a.positions = &slot; }), "both given"));
  EXPECT_TRUE(holds(message_for([](ReadEntriesArgs& a) { a.slots = nullptr; }), "slots is null"));
  EXPECT_TRUE(holds(message_for([](ReadEntriesArgs& a) { a.row_stride = 100; }), "row_stride is 100"));
}

struct ReadCase {
  const char* name;
  void (*run)(const ReadTwin&);
};

inline const std::vector<ReadCase>& read_entries_battery() {
  static const std::vector<ReadCase> cases = {
      {"slots_of_every_format_widen_exactly", slots_of_every_format_widen_exactly},
      {"positions_go_through_the_page_table", positions_go_through_the_page_table},
      {"every_fp8_code_under_many_scales", every_fp8_code_under_many_scales},
      {"an_empty_read_is_an_answer", an_empty_read_is_an_answer},
      {"refuses_a_bad_read_with_value_and_limit", refuses_a_bad_read_with_value_and_limit},
  };
  return cases;
}

}  // namespace needle::testing
