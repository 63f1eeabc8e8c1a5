// Any bytes as scores, lengths, page tables and shards' lists: selection, merge, slot lists and reads answer as the
// reference does, on every CPU twin there is, and touch nothing outside their arrays (each is allocated to its size).
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "base/check.h"
#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "kernels/read_entries.h"
#include "kernels/select_topk.h"

namespace needle {
namespace {

struct FreeAligned {
  void operator()(void* memory) const { std::free(memory); }
};

std::unique_ptr<void, FreeAligned> scratch_of(int64_t bytes) {
  return std::unique_ptr<void, FreeAligned>(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)));
}

// Scores from few patterns and from any bits: ties, NaN, absent and infinities are then common.
std::vector<float> scores_from(FuzzedDataProvider& input, size_t count) {
  static constexpr uint32_t kCommon[] = {0x00000000u, 0x80000000u, 0x7F800000u,      0xFF800000u, kNanScoreBits,
                                         0xFFC00000u, 0x3F800000u, kAbsentScoreBits, 0x00000001u, 0x80000001u};
  const bool any_bits = input.ConsumeBool();
  uint32_t state = input.ConsumeIntegral<uint32_t>() | 1u;
  std::vector<float> scores(count);
  for (float& score : scores) {
    // A short input still fills long rows: past its end a small generator goes on.
    state = state * 1664525u + 1013904223u;
    const uint32_t drawn = input.remaining_bytes() > 0 ? input.ConsumeIntegral<uint8_t>() * 0x01010101u ^ state : state;
    const uint32_t bits = any_bits ? drawn : kCommon[(drawn >> 24) % 10];
    std::memcpy(&score, &bits, sizeof(bits));
  }
  return scores;
}

std::vector<int32_t> integers_from(FuzzedDataProvider& input, size_t count, int32_t low, int32_t high) {
  std::vector<int32_t> values(count);
  for (int32_t& value : values) value = input.ConsumeIntegralInRange<int32_t>(low, high);
  return values;
}

struct Output {
  std::vector<int32_t> positions, slots, counts;
  std::vector<uint32_t> score_bits;
  OpReport report{};

  Output(size_t rows, size_t stride) : positions(rows * stride), slots(rows * stride), counts(rows), score_bits(rows * stride) {}
  float* scores() { return reinterpret_cast<float*>(score_bits.data()); }
};

void must_agree(const Output& got, const Output& want, bool slots_too) {
  NEEDLE_CHECK(got.positions == want.positions, "positions differ from the reference");
  NEEDLE_CHECK(got.counts == want.counts, "counts differ from the reference");
  NEEDLE_CHECK(got.score_bits == want.score_bits, "scores differ from the reference");
  NEEDLE_CHECK(!slots_too || got.slots == want.slots, "slots differ from the reference");
  NEEDLE_CHECK(got.report.status == want.report.status, "status differs from the reference");
  NEEDLE_CHECK(got.report.nan_scores == want.report.nan_scores, "NaN count differs from the reference");
  NEEDLE_CHECK(got.report.absent_entries == want.report.absent_entries, "absent count differs from the reference");
}

void fuzz_select(FuzzedDataProvider& input) {
  SelectTopkArgs args;
  args.rows = input.ConsumeIntegralInRange<int32_t>(0, 4);
  args.k = input.ConsumeIntegralInRange<int32_t>(0, input.ConsumeBool() ? 40 : kTopkMax + 1);
  args.order = input.ConsumeBool() ? TopkOrder::kByRank : TopkOrder::kByPosition;
  args.score_stride = input.ConsumeIntegralInRange<int64_t>(0, input.ConsumeBool() ? 200 : 20000);
  args.length_max = input.ConsumeIntegralInRange<int32_t>(-1, static_cast<int32_t>(args.score_stride) + 1);
  args.out_stride = std::max<int64_t>(0, args.k + input.ConsumeIntegralInRange<int64_t>(-1, 65));
  args.rows_per_table_row = input.ConsumeIntegralInRange<int32_t>(0, 3);
  args.slots_per_page = input.ConsumeIntegralInRange<int32_t>(0, 80);
  args.page_count = input.ConsumeIntegralInRange<int64_t>(-1, 50);
  args.pages.rows = input.ConsumeIntegralInRange<int32_t>(0, 5);
  args.pages.pages_per_row = input.ConsumeIntegralInRange<int32_t>(0, 30);
  args.pages.row_stride = args.pages.pages_per_row + input.ConsumeIntegralInRange<int32_t>(-1, 3);
  const bool with_table = input.ConsumeBool();
  const bool with_slots = input.ConsumeBool();
  const size_t rows = static_cast<size_t>(args.rows);
  const std::vector<int32_t> lengths = integers_from(input, rows, -3, args.length_max + 5 > -3 ? args.length_max + 5 : -3);
  const std::vector<int32_t> pages =
      integers_from(input, static_cast<size_t>(std::max<int64_t>(0, args.pages.rows * args.pages.row_stride)), -2, 52);
  const std::vector<int32_t> entry_base = integers_from(input, static_cast<size_t>(args.pages.rows), 0, 1 << 30);
  const std::vector<int32_t> row_of = integers_from(input, rows, -1, 6);
  const bool with_row_of = input.ConsumeBool();
  const std::vector<float> scores = scores_from(input, rows * static_cast<size_t>(args.score_stride));
  args.scores = scores.data();
  args.lengths = lengths.data();
  if (with_table) args.pages.pages = pages.data();
  if (input.ConsumeBool()) args.pages.entry_base = entry_base.data();
  if (with_row_of) args.row_of = row_of.data();

  const auto point_at = [&](Output& out) {
    args.positions = out.positions.data();
    args.slots = with_slots ? out.slots.data() : nullptr;
    args.out_scores = out.scores();
    args.counts = out.counts.data();
    args.report = &out.report;
  };
  Output want(rows, static_cast<size_t>(args.out_stride));
  point_at(want);
  const bool accepted = select_topk_ref(args).ok();
  for (const CpuIsa isa : cpu_isas_present()) {
    Output got(rows, static_cast<size_t>(args.out_stride));
    point_at(got);
    CallerThread caller;
    const int64_t bytes = select_topk_cpu_scratch(args, 1);
    const auto scratch = scratch_of(bytes);
    NEEDLE_CHECK(select_topk_cpu(args, isa, caller, scratch.get(), bytes).ok() == accepted, "a twin refuses otherwise");
    if (accepted) must_agree(got, want, true);
  }
}

void fuzz_merge(FuzzedDataProvider& input) {
  MergeTopkArgs args;
  args.shards = input.ConsumeIntegralInRange<int32_t>(0, 6);
  args.rows = input.ConsumeIntegralInRange<int32_t>(0, 3);
  args.in_stride = input.ConsumeIntegralInRange<int64_t>(0, 900);
  args.k = input.ConsumeIntegralInRange<int32_t>(0, input.ConsumeBool() ? 30 : 1200);
  args.order = input.ConsumeBool() ? TopkOrder::kByRank : TopkOrder::kByPosition;
  args.out_stride = args.k + input.ConsumeIntegralInRange<int64_t>(0, 64);
  const size_t lists = static_cast<size_t>(args.shards) * static_cast<size_t>(args.rows);
  const size_t cells = lists * static_cast<size_t>(args.in_stride);
  const std::vector<int32_t> counts = integers_from(input, lists, -2, static_cast<int32_t>(args.in_stride) + 3);
  const std::vector<float> scores = scores_from(input, cells);
  // No position twice in a row, as the contract has it: a stride walks over all of them. Some are made -1.
  std::vector<int32_t> positions(cells);
  const uint32_t skip = input.ConsumeIntegral<uint8_t>();
  for (size_t i = 0; i < cells; ++i) {
    const uint32_t walked = static_cast<uint32_t>(i) * 2654435761u;
    positions[i] = skip != 0 && (walked >> 20) % 64 == skip % 64 ? -1 : static_cast<int32_t>(walked & 0x7FFFFFFFu);
  }
  std::vector<int32_t> slots(cells);
  for (size_t i = 0; i < cells; ++i) slots[i] = static_cast<int32_t>(i);
  args.positions = positions.data();
  args.scores = scores.data();
  args.counts = counts.data();
  args.slots = slots.data();
  const auto point_at = [&](Output& out) {
    args.out_positions = out.positions.data();
    args.out_scores = out.scores();
    args.out_slots = out.slots.data();
    args.out_counts = out.counts.data();
    args.report = &out.report;
  };
  const size_t rows = static_cast<size_t>(args.rows);
  Output want(rows, static_cast<size_t>(args.out_stride));
  point_at(want);
  const bool accepted = merge_topk_ref(args).ok();
  Output got(rows, static_cast<size_t>(args.out_stride));
  point_at(got);
  CallerThread caller;
  const int64_t bytes = merge_topk_cpu_scratch(args, 1);
  const auto scratch = scratch_of(bytes);
  NEEDLE_CHECK(merge_topk_cpu(args, caller, scratch.get(), bytes).ok() == accepted, "a twin refuses otherwise");
  // Two positions of the walk may differ in the dropped top bit alone; which slot goes with them is then open.
  if (accepted) must_agree(got, want, false);
}

void fuzz_tables(FuzzedDataProvider& input) {
  const int32_t slots_per_page = input.ConsumeIntegralInRange<int32_t>(1, 70);
  const int64_t page_count = input.ConsumeIntegralInRange<int64_t>(0, 8);
  const int32_t pages_per_row = input.ConsumeIntegralInRange<int32_t>(0, 9);
  const int32_t table_rows = input.ConsumeIntegralInRange<int32_t>(1, 3);
  const std::vector<int32_t> pages = integers_from(input, static_cast<size_t>(pages_per_row * table_rows), -2, 10);
  const std::vector<int32_t> entry_base = integers_from(input, static_cast<size_t>(table_rows), 0, 1000);
  const PageTableView table = {pages.data(), entry_base.data(), pages_per_row, table_rows, pages_per_row};

  ListSlotsArgs list;
  list.pages = table;
  list.rows_per_table_row = input.ConsumeIntegralInRange<int32_t>(1, 2);
  list.rows = table_rows * list.rows_per_table_row;
  list.slots_per_page = slots_per_page;
  list.page_count = page_count;
  list.out_stride = input.ConsumeIntegralInRange<int64_t>(0, 700);
  const size_t rows = static_cast<size_t>(list.rows);
  const std::vector<int32_t> lengths = integers_from(input, rows, -2, 800);
  list.lengths = lengths.data();
  const auto point_at = [&](Output& out) {
    list.positions = out.positions.data();
    list.slots = out.slots.data();
    list.counts = out.counts.data();
    list.report = &out.report;
  };
  Output want(rows, static_cast<size_t>(list.out_stride));
  point_at(want);
  NEEDLE_CHECK(list_slots_ref(list).ok(), "a list within the contract is refused");
  Output got(rows, static_cast<size_t>(list.out_stride));
  point_at(got);
  CallerThread caller;
  NEEDLE_CHECK(list_slots_cpu(list, caller).ok(), "a list within the contract is refused");
  must_agree(got, want, true);

  // Any positions and slots, read from a pool of just these pages.
  static constexpr ElementFormat kElements[] = {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4, ElementFormat::kFp8DsMla,
                                                ElementFormat::kFp8V32};
  ReadEntriesArgs read;
  read.layer.element = input.PickValueInArray(kElements);
  read.layer.head_dim = static_cast<int32_t>(read_entry_values(read.layer.element, 128));
  read.layer.slots_per_page = slots_per_page;
  read.layer.page_count = page_count;
  read.layer.page_stride = layer_page_bytes(read.layer.element, read.layer.head_dim, slots_per_page);
  std::vector<std::byte> pool(static_cast<size_t>(read.layer.page_stride * page_count));
  uint32_t state = input.ConsumeIntegral<uint32_t>();
  for (std::byte& byte : pool) byte = static_cast<std::byte>((state = state * 1664525u + 1013904223u) >> 24);
  read.layer.base = pool.data();
  read.rows = table_rows;
  read.ids_per_row = input.ConsumeIntegralInRange<int32_t>(0, 20);
  read.id_stride = read.ids_per_row;
  const std::vector<int32_t> ids = integers_from(input, static_cast<size_t>(read.rows * read.ids_per_row), -3, 1700);
  if (input.ConsumeBool()) {
    read.slots = ids.data();
  } else {
    read.positions = ids.data();
    read.pages = table;
  }
  read.form = input.ConsumeBool() ? ReadForm::kRaw : ReadForm::kBf16;
  read.entry_stride = read_entry_bytes(read.layer.element, read.layer.head_dim, read.form);
  read.row_stride = read.entry_stride * read.ids_per_row;
  std::vector<std::byte> want_bytes(static_cast<size_t>(read.row_stride * read.rows));
  OpReport want_report{};
  read.out = want_bytes.data();
  read.report = &want_report;
  const bool accepted = read_entries_ref(read).ok();
  for (const CpuIsa isa : cpu_isas_present()) {
    std::vector<std::byte> got_bytes(want_bytes.size());
    OpReport got_report{};
    read.out = got_bytes.data();
    read.report = &got_report;
    NEEDLE_CHECK(read_entries_cpu(read, isa, caller).ok() == accepted, "a twin refuses otherwise");
    NEEDLE_CHECK(got_bytes == want_bytes, "entries differ from the reference");
    NEEDLE_CHECK(std::memcmp(&got_report, &want_report, sizeof(OpReport)) == 0, "report differs from the reference");
  }
}

}  // namespace
}  // namespace needle

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  switch (input.ConsumeIntegralInRange<int>(0, 2)) {
    case 0: needle::fuzz_select(input); break;
    case 1: needle::fuzz_merge(input); break;
    default: needle::fuzz_tables(input); break;
  }
  return 0;
}
