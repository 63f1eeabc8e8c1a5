// select_topk, merge_topk, list_slots: which entries the model reads.
//
// The order (one total order, everywhere): higher score first, then lower position. -0 equals +0. NaN (any pattern but
// kAbsentScoreBits) ranks below -inf, still before nothing at all, and is counted. Absent entries and positions past
// the length never enter. Denormal scores are ordered exactly, on every twin.
//
// What must stay true:
//  1. Exact and reproducible: given the same scores, the same answer bit for bit on any twin, device, grid, split or
//     merge of shards. A full candidate buffer never drops an entry; what is done instead is counted in
//     report->fallbacks.
//  2. count = min(k, entries that are not absent). Valid members come first (ascending by position, or in the total
//     order on request), then -1 up to out_stride.
//  3. length <= k: every entry that is not absent is taken; scores are still read, to skip absent ones and count NaN.
//  4. Positions given out are global: entry_base of the row + local entry (>= 0 and below 2^31 - 1).
//  5. Nothing past a row's length decides anything, and a length past what the row can hold is cut (visible_row below) and
//     reported; nothing is allocated. On a device lengths, row_of and entry_base are looked at before the kernel before on the
//     stream has ended, and again after it: they are readable memory from the launch on, and so are scores up to length_max, of which
//     some may be read, and not used, where a length has just become smaller.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "kernels/pool_view.h"

namespace needle {

inline constexpr int kTopkMax = 8192;
inline constexpr int kMergeShardsMax = 1024;

enum class TopkOrder : uint8_t { kByPosition = 0, kByRank = 1 };

struct SelectTopkArgs {
  const float* scores = nullptr;     // [rows, score_stride]; on a GPU short rows go faster on multiples of 16 bytes
  int64_t score_stride = 0;          // floats
  const int32_t* lengths = nullptr;  // [rows] valid local entries, 0..length_max; negative counts as 0
  int32_t rows = 0;
  int32_t length_max = 0;  // host-known bound on lengths (capacity), <= score_stride; sizes scratch and grids
  int32_t k = 0;           // 1..8192
  TopkOrder order = TopkOrder::kByPosition;

  // For global positions and physical slots. pages.pages may be null when slots is null; entry_base null means 0.
  // Where pages.pages and slots_per_page are given, lengths past the page table's row are cut (slots or not).
  PageTableView pages;
  const int32_t* row_of = nullptr;  // [rows] page-table row of each score row; null: row r / rows_per_table_row
  int32_t rows_per_table_row = 1;
  int32_t slots_per_page = 0;  // needed for slots only
  int64_t page_count = 0;      // needed for slots only; page_count x slots_per_page <= 2^31 - 1

  int32_t* positions = nullptr;  // [rows, out_stride] global entry positions, -1 padded
  // [rows, out_stride] page x slots_per_page + offset, -1 padded; may be null. A member whose page names nothing
  // although its score is a number (scores made elsewhere) keeps its place with slot -1, counted as absent.
  int32_t* slots = nullptr;
  // [rows, out_stride] of the members, NaN canonical, -0 as +0, padded with -inf; may be null
  float* out_scores = nullptr;
  int32_t* counts = nullptr;  // [rows] valid members
  int64_t out_stride = 0;     // >= k; engines want a multiple of 64
  // nan_scores: NaN entries inside the lengths. absent_entries: entries scored as absent. May be null.
  OpReport* report = nullptr;
};

// INVALID_ARGUMENT naming value and limit, before anything is written. Every twin calls it first; nothing that may
// lie on a device is looked at.
absl::Status check_select_topk(const SelectTopkArgs& args);
absl::Status select_topk_ref(const SelectTopkArgs& args);
// Scratch for the CPU twin: select_topk_cpu_scratch(args, width) bytes, 64-byte aligned.
int64_t select_topk_cpu_scratch(const SelectTopkArgs& args, int width);
absl::Status select_topk_cpu(const SelectTopkArgs& args, CpuIsa isa, Workers& workers, void* scratch, int64_t scratch_bytes);
int64_t select_topk_cuda_scratch(const SelectTopkArgs& args);
absl::Status select_topk_cuda(const SelectTopkArgs& args, void* scratch, int64_t scratch_bytes, void* stream);

// merge_topk: the k best of several shards' lists by the same order. Associative and commutative; lists may be in
// either order. A shard's members beyond its count are ignored (a count past in_stride or negative is cut to the
// range); members with a negative position are skipped; a member with an absent score is skipped and counted. NaN
// members take part (below -inf) and are not counted again: the selection that made the list counted them.
struct MergeTopkArgs {
  const int32_t* positions = nullptr;  // [shards, rows, in_stride] global positions; no position twice in a row
  const float* scores = nullptr;       // [shards, rows, in_stride]
  const int32_t* counts = nullptr;     // [shards, rows]
  const int32_t* slots = nullptr;      // [shards, rows, in_stride]; may be null
  const uint32_t* variants = nullptr;  // [shards] ScoreVariant of each shard, host memory; null: not checked
  int32_t shards = 0;                  // 1..1024
  int32_t rows = 0;
  int64_t in_stride = 0;
  int32_t k = 0;  // 1..8192
  TopkOrder order = TopkOrder::kByPosition;
  int32_t* out_positions = nullptr;  // [rows, out_stride]
  float* out_scores = nullptr;       // [rows, out_stride], as in selection; may be null
  int32_t* out_slots = nullptr;      // [rows, out_stride]; may be null, needs slots
  int32_t* out_counts = nullptr;     // [rows]
  int64_t out_stride = 0;
  OpReport* report = nullptr;
};

absl::Status check_merge_topk(const MergeTopkArgs& args);
absl::Status merge_topk_ref(const MergeTopkArgs& args);
int64_t merge_topk_cpu_scratch(const MergeTopkArgs& args, int width);
absl::Status merge_topk_cpu(const MergeTopkArgs& args, Workers& workers, void* scratch, int64_t scratch_bytes);
int64_t merge_topk_cuda_scratch(const MergeTopkArgs& args);
absl::Status merge_topk_cuda(const MergeTopkArgs& args, void* scratch, int64_t scratch_bytes, void* stream);

// list_slots: for layers that read every entry (ratio 128, or length <= k): the first `length` entries' positions and
// slots in order, -1 padded. Absent pages are skipped and counted, as in selection.
struct ListSlotsArgs {
  PageTableView pages;
  const int32_t* lengths = nullptr;  // [rows] entries to list; rows = pages.rows x rows_per_table_row
  int32_t rows = 0;
  int32_t rows_per_table_row = 1;
  int32_t slots_per_page = 0;
  int64_t page_count = 0;
  int32_t* positions = nullptr;  // [rows, out_stride]; may be null
  int32_t* slots = nullptr;      // [rows, out_stride]
  int32_t* counts = nullptr;     // [rows]
  int64_t out_stride = 0;        // lengths beyond it are cut to it and set kStatusBadPageTable
  OpReport* report = nullptr;
};

absl::Status check_list_slots(const ListSlotsArgs& args);
absl::Status list_slots_ref(const ListSlotsArgs& args);
absl::Status list_slots_cpu(const ListSlotsArgs& args, Workers& workers);
absl::Status list_slots_cuda(const ListSlotsArgs& args, void* stream);

// ---------------------------------------------------------------------------------------------------------------
// What every twin shares, on host and device.

// One score row's way to positions and slots, with the length that may be read.
struct VisibleRow {
  int64_t length = 0;              // 0..length_max
  int64_t base = 0;                // global position of local entry 0
  const int32_t* pages = nullptr;  // this row's page ids; null without a page table
  uint32_t status = 0;             // kStatusBadPageTable where the length was cut or the table row does not exist
};

// `load` reads an element of the caller's arrays.
template <class Load>
NEEDLE_HD inline VisibleRow visible_row(const SelectTopkArgs& args, int64_t row, const Load& load) {
  VisibleRow out;
  const int32_t length = load(args.lengths + row);
  out.length = length < 0 ? 0 : length;
  int64_t limit = args.length_max;
  if (args.pages.pages != nullptr || args.pages.entry_base != nullptr) {
    const int32_t table_row = args.row_of != nullptr ? load(args.row_of + row) : static_cast<int32_t>(row) / args.rows_per_table_row;
    if (table_row < 0 || table_row >= args.pages.rows) {
      limit = 0;
      out.length = out.length > 0 ? out.length : 1;  // reported even where the length is 0
    } else {
      if (args.pages.entry_base != nullptr) out.base = load(args.pages.entry_base + table_row);
      if (args.pages.pages != nullptr) out.pages = args.pages.pages + table_row * args.pages.row_stride;
      if (args.pages.pages != nullptr && args.slots_per_page > 0) {
        const int64_t held = static_cast<int64_t>(args.pages.pages_per_row) * args.slots_per_page;
        limit = held < limit ? held : limit;
      }
    }
  }
  if (out.length > limit) {
    out.length = limit;
    out.status = kStatusBadPageTable;
  }
  return out;
}
struct PlainLoad {
  template <class T>
  NEEDLE_HD T operator()(const T* from) const {
    return *from;
  }
};
NEEDLE_HD inline VisibleRow visible_row(const SelectTopkArgs& args, int64_t row) { return visible_row(args, row, PlainLoad{}); }

// Slot of a local entry inside the row's length, or kNoEntry where its page names nothing.
NEEDLE_HD inline int32_t slot_of_entry(const int32_t* pages, int64_t page_count, int32_t slots_per_page, int64_t entry) {
  const int32_t page = pages[entry / slots_per_page];
  if (page < 0 || page >= page_count) return kNoEntry;
  return static_cast<int32_t>(static_cast<int64_t>(page) * slots_per_page + entry % slots_per_page);
}

// The status a merge of shards scored by different variants carries. Host side: variants is host memory.
inline OpReport mixed_variants_of(const MergeTopkArgs& args) {
  OpReport found{};
  for (int32_t shard = 1; args.variants != nullptr && shard < args.shards; ++shard) {
    if (args.variants[shard] != args.variants[0]) found.status = kStatusMixedVariants;
  }
  return found;
}

// The order as one number: a larger key ranks first. Bits of the score made monotone (NaN 0, -inf above it), then the
// position inverted. `absent` scores must be kept out before. Unique for each position.
NEEDLE_HD constexpr uint32_t score_order_bits(uint32_t score_bits) {
  if ((score_bits & 0x7FFFFFFFu) > 0x7F800000u) return 0u;   // NaN, below -inf (which maps to 0x007FFFFF)
  if ((score_bits & 0x7FFFFFFFu) == 0u) return 0x80000000u;  // both zeros
  return (score_bits & 0x80000000u) ? ~score_bits : (score_bits | 0x80000000u);
}
// The score of a member back from its order bits: NaN canonical, -0 as +0.
NEEDLE_HD constexpr uint32_t score_bits_of_order(uint32_t order_bits) {
  if (order_bits == 0u) return kNanScoreBits;
  return (order_bits & 0x80000000u) ? (order_bits & 0x7FFFFFFFu) : ~order_bits;
}
NEEDLE_HD constexpr uint64_t rank_key(uint32_t score_bits, uint32_t position) {
  return (static_cast<uint64_t>(score_order_bits(score_bits)) << 32) | (0xFFFFFFFFu - position);
}
#ifdef __CUDACC__
// score_order_bits() without branches.
__device__ __forceinline__ uint32_t order_bits_of(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 becomes +0
  const uint32_t order = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return score == score ? order : 0u;
}
#endif
static_assert(score_order_bits(0xFF800000u) == 0x007FFFFFu, "-inf stays above NaN");
static_assert(score_order_bits(0x80000000u) == score_order_bits(0u), "-0 equals +0");
static_assert(score_order_bits(0x00000001u) > score_order_bits(0u), "the smallest denormal is above zero");
static_assert(score_order_bits(0x80000001u) < score_order_bits(0u), "and its negative below");
static_assert(score_bits_of_order(score_order_bits(0xC0490FDBu)) == 0xC0490FDBu);
static_assert(score_bits_of_order(score_order_bits(0x00000001u)) == 0x00000001u);
static_assert(score_bits_of_order(score_order_bits(0x80000000u)) == 0x00000000u);

}  // namespace needle
