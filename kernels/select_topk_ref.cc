// select_topk, merge_topk and list_slots as their header defines them, and the checks that every twin calls first.
//
// What must stay true:
//  1. Slow and obvious: every row is sorted whole by rank_key. This file is the definition.
//  2. A check looks at host fields alone and writes nothing.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/op_report.h"
#include "kernels/select_topk.h"

namespace needle {
namespace {

uint32_t bits_of(float score) {
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  return bits;
}

float float_of(uint32_t bits) {
  float score;
  std::memcpy(&score, &bits, sizeof(score));
  return score;
}

bool is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

constexpr float kScorePadding = -std::numeric_limits<float>::infinity();

absl::Status refuse(absl::string_view operation, absl::string_view field, int64_t value, absl::string_view limit) {
  return absl::InvalidArgumentError(absl::StrCat(operation, ": ", field, " is ", value, ", must be ", limit));
}

absl::Status refuse_null(absl::string_view operation, absl::string_view field, absl::string_view remedy) {
  return absl::InvalidArgumentError(absl::StrCat(operation, ": ", field, " is null; ", remedy));
}

// k, order, rows and strides, the same for selection and merge.
absl::Status check_selection_shape(absl::string_view operation, int32_t rows, int32_t k, TopkOrder order, int64_t out_stride) {
  if (rows < 0) return refuse(operation, "rows", rows, ">= 0");
  if (k < 1 || k > kTopkMax) return refuse(operation, "k", k, absl::StrCat("1..", kTopkMax));
  if (order != TopkOrder::kByPosition && order != TopkOrder::kByRank) {
    return refuse(operation, "order", static_cast<int64_t>(order), "0 (by position) or 1 (by rank)");
  }
  if (out_stride < k) return refuse(operation, "out_stride", out_stride, absl::StrCat(">= k = ", k));
  return absl::OkStatus();
}

absl::Status check_slot_space(absl::string_view operation, int32_t slots_per_page, int64_t page_count) {
  if (slots_per_page < 1 || slots_per_page > kSlotsPerPageMax) {
    return refuse(operation, "slots_per_page", slots_per_page, absl::StrCat("1..", kSlotsPerPageMax));
  }
  const int64_t page_limit = std::numeric_limits<int32_t>::max() / slots_per_page;
  if (page_count < 0 || page_count > page_limit) {
    return refuse(operation, "page_count", page_count,
                  absl::StrCat("0..", page_limit, " so that slots fit 32 bits; select positions instead"));
  }
  return absl::OkStatus();
}

absl::Status check_page_table(absl::string_view operation, const PageTableView& pages) {
  if (pages.rows < 0) return refuse(operation, "pages.rows", pages.rows, ">= 0");
  if (pages.pages_per_row < 0 || pages.pages_per_row > pages.row_stride) {
    return refuse(operation, "pages.pages_per_row", pages.pages_per_row, absl::StrCat("0..row_stride = ", pages.row_stride));
  }
  return absl::OkStatus();
}

struct Member {
  uint64_t key = 0;   // rank_key: larger ranks first
  int64_t place = 0;  // what the key stands for: a local entry, or an index into the shards' lists
};

bool ranks_before(const Member& left, const Member& right) { return left.key > right.key; }

}  // namespace

absl::Status check_select_topk(const SelectTopkArgs& args) {
  constexpr absl::string_view kOp = "select_topk";
  absl::Status shape = check_selection_shape(kOp, args.rows, args.k, args.order, args.out_stride);
  if (!shape.ok()) return shape;
  if (args.length_max < 0 || args.length_max > args.score_stride) {
    return refuse(kOp, "length_max", args.length_max, absl::StrCat("0..score_stride = ", args.score_stride));
  }
  if (args.rows_per_table_row < 1) return refuse(kOp, "rows_per_table_row", args.rows_per_table_row, ">= 1");
  if (args.slots_per_page < 0) return refuse(kOp, "slots_per_page", args.slots_per_page, ">= 0");
  if (args.slots != nullptr) {
    if (args.pages.pages == nullptr) return refuse_null(kOp, "pages.pages", "slots need the page table");
    absl::Status space = check_slot_space(kOp, args.slots_per_page, args.page_count);
    if (!space.ok()) return space;
  }
  if (args.pages.pages != nullptr) {
    absl::Status table = check_page_table(kOp, args.pages);
    if (!table.ok()) return table;
  }
  if (args.rows == 0) return absl::OkStatus();
  if (args.pages.pages != nullptr || args.pages.entry_base != nullptr) {
    const int64_t served = static_cast<int64_t>(args.pages.rows) * args.rows_per_table_row;
    if (args.row_of == nullptr && args.rows > served) {
      return refuse(kOp, "rows", args.rows, absl::StrCat("<= pages.rows x rows_per_table_row = ", served));
    }
  }
  if (args.scores == nullptr && args.length_max > 0) return refuse_null(kOp, "scores", "give the score rows");
  if (args.lengths == nullptr) return refuse_null(kOp, "lengths", "give each row's length");
  if (args.positions == nullptr) return refuse_null(kOp, "positions", "the answer goes there");
  if (args.counts == nullptr) return refuse_null(kOp, "counts", "the number of members goes there");
  return absl::OkStatus();
}

absl::Status select_topk_ref(const SelectTopkArgs& args) {
  absl::Status status = check_select_topk(args);
  if (!status.ok()) return status;

  for (int64_t row = 0; row < args.rows; ++row) {
    const VisibleRow visible = visible_row(args, row);
    OpReport found{};
    found.status = visible.status;

    std::vector<Member> members;
    for (int64_t entry = 0; entry < visible.length; ++entry) {
      const uint32_t bits = bits_of(args.scores[row * args.score_stride + entry]);
      if (bits == kAbsentScoreBits) {
        ++found.absent_entries;
        found.status |= kStatusAbsentPage;
        continue;
      }
      if (is_nan(bits)) {
        ++found.nan_scores;
        found.status |= kStatusNanScore;
      }
      members.push_back({rank_key(bits, static_cast<uint32_t>(entry)), entry});
    }
    std::sort(members.begin(), members.end(), ranks_before);
    members.resize(std::min(members.size(), static_cast<size_t>(args.k)));
    if (args.order == TopkOrder::kByPosition) {
      std::sort(members.begin(), members.end(), [](const Member& a, const Member& b) { return a.place < b.place; });
    }

    for (int64_t i = 0; i < args.out_stride; ++i) {
      const int64_t out = row * args.out_stride + i;
      const bool valid = i < static_cast<int64_t>(members.size());
      const Member member = valid ? members[static_cast<size_t>(i)] : Member();
      args.positions[out] = valid ? static_cast<int32_t>(visible.base + member.place) : kNoEntry;
      if (args.out_scores != nullptr) {
        const uint32_t order_bits = static_cast<uint32_t>(member.key >> 32);
        args.out_scores[out] = valid ? float_of(score_bits_of_order(order_bits)) : kScorePadding;
      }
      if (args.slots != nullptr) {
        args.slots[out] = valid ? slot_of_entry(visible.pages, args.page_count, args.slots_per_page, member.place) : kNoEntry;
        if (valid && args.slots[out] == kNoEntry) {
          ++found.absent_entries;
          found.status |= kStatusAbsentPage;
        }
      }
    }
    args.counts[row] = static_cast<int32_t>(members.size());
    add_to_report(args.report, found);
  }
  return absl::OkStatus();
}

absl::Status check_merge_topk(const MergeTopkArgs& args) {
  constexpr absl::string_view kOp = "merge_topk";
  absl::Status shape = check_selection_shape(kOp, args.rows, args.k, args.order, args.out_stride);
  if (!shape.ok()) return shape;
  if (args.shards < 1 || args.shards > kMergeShardsMax) {
    return refuse(kOp, "shards", args.shards, absl::StrCat("1..", kMergeShardsMax));
  }
  if (args.in_stride < 0) return refuse(kOp, "in_stride", args.in_stride, ">= 0");
  if (args.out_slots != nullptr && args.slots == nullptr) {
    return refuse_null(kOp, "slots", "out_slots needs the shards' slots");
  }
  if (args.rows == 0) return absl::OkStatus();
  if (args.positions == nullptr && args.in_stride > 0) return refuse_null(kOp, "positions", "give the shards' lists");
  if (args.scores == nullptr && args.in_stride > 0) return refuse_null(kOp, "scores", "give the shards' scores");
  if (args.counts == nullptr) return refuse_null(kOp, "counts", "give the shards' counts");
  if (args.out_positions == nullptr) return refuse_null(kOp, "out_positions", "the answer goes there");
  if (args.out_counts == nullptr) return refuse_null(kOp, "out_counts", "the number of members goes there");
  return absl::OkStatus();
}

absl::Status merge_topk_ref(const MergeTopkArgs& args) {
  absl::Status status = check_merge_topk(args);
  if (!status.ok()) return status;
  add_to_report(args.report, mixed_variants_of(args));

  for (int64_t row = 0; row < args.rows; ++row) {
    OpReport found{};
    std::vector<Member> members;
    for (int64_t shard = 0; shard < args.shards; ++shard) {
      const int64_t list = shard * args.rows + row;
      const int64_t count = std::clamp<int64_t>(args.counts[list], 0, args.in_stride);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t in = list * args.in_stride + i;
        if (args.positions[in] < 0) continue;
        const uint32_t bits = bits_of(args.scores[in]);
        if (bits == kAbsentScoreBits) {
          ++found.absent_entries;
          found.status |= kStatusAbsentPage;
          continue;
        }
        members.push_back({rank_key(bits, static_cast<uint32_t>(args.positions[in])), in});
      }
    }
    std::sort(members.begin(), members.end(), ranks_before);
    members.resize(std::min(members.size(), static_cast<size_t>(args.k)));
    if (args.order == TopkOrder::kByPosition) {
      std::sort(members.begin(), members.end(),
                [&](const Member& a, const Member& b) { return args.positions[a.place] < args.positions[b.place]; });
    }

    for (int64_t i = 0; i < args.out_stride; ++i) {
      const int64_t out = row * args.out_stride + i;
      const bool valid = i < static_cast<int64_t>(members.size());
      const Member member = valid ? members[static_cast<size_t>(i)] : Member();
      args.out_positions[out] = valid ? args.positions[member.place] : kNoEntry;
      if (args.out_scores != nullptr) {
        const uint32_t order_bits = static_cast<uint32_t>(member.key >> 32);
        args.out_scores[out] = valid ? float_of(score_bits_of_order(order_bits)) : kScorePadding;
      }
      if (args.out_slots != nullptr) args.out_slots[out] = valid ? args.slots[member.place] : kNoEntry;
    }
    args.out_counts[row] = static_cast<int32_t>(members.size());
    add_to_report(args.report, found);
  }
  return absl::OkStatus();
}

absl::Status check_list_slots(const ListSlotsArgs& args) {
  constexpr absl::string_view kOp = "list_slots";
  if (args.rows < 0) return refuse(kOp, "rows", args.rows, ">= 0");
  if (args.rows_per_table_row < 1) return refuse(kOp, "rows_per_table_row", args.rows_per_table_row, ">= 1");
  if (args.out_stride < 0) return refuse(kOp, "out_stride", args.out_stride, ">= 0");
  absl::Status space = check_slot_space(kOp, args.slots_per_page, args.page_count);
  if (!space.ok()) return space;
  absl::Status table = check_page_table(kOp, args.pages);
  if (!table.ok()) return table;
  if (args.rows == 0) return absl::OkStatus();
  const int64_t served = static_cast<int64_t>(args.pages.rows) * args.rows_per_table_row;
  if (args.rows > served) {
    return refuse(kOp, "rows", args.rows, absl::StrCat("<= pages.rows x rows_per_table_row = ", served));
  }
  if (args.pages.pages == nullptr && args.pages.pages_per_row > 0) {
    return refuse_null(kOp, "pages.pages", "give the page table");
  }
  if (args.lengths == nullptr) return refuse_null(kOp, "lengths", "give each row's length");
  if (args.slots == nullptr && args.out_stride > 0) return refuse_null(kOp, "slots", "the list goes there");
  if (args.counts == nullptr) return refuse_null(kOp, "counts", "the number of entries goes there");
  return absl::OkStatus();
}

absl::Status list_slots_ref(const ListSlotsArgs& args) {
  absl::Status status = check_list_slots(args);
  if (!status.ok()) return status;

  for (int64_t row = 0; row < args.rows; ++row) {
    OpReport found{};
    const int64_t table_row = row / args.rows_per_table_row;
    const int32_t* pages = args.pages.pages + table_row * args.pages.row_stride;
    const int64_t base = args.pages.entry_base != nullptr ? args.pages.entry_base[table_row] : 0;
    const int64_t held = static_cast<int64_t>(args.pages.pages_per_row) * args.slots_per_page;
    int64_t length = std::max<int64_t>(args.lengths[row], 0);
    if (length > std::min(held, args.out_stride)) {
      length = std::min(held, args.out_stride);
      found.status |= kStatusBadPageTable;
    }

    int64_t count = 0;
    for (int64_t entry = 0; entry < length; ++entry) {
      const int32_t slot = slot_of_entry(pages, args.page_count, args.slots_per_page, entry);
      if (slot == kNoEntry) {
        ++found.absent_entries;
        found.status |= kStatusAbsentPage;
        continue;
      }
      const int64_t out = row * args.out_stride + count;
      args.slots[out] = slot;
      if (args.positions != nullptr) args.positions[out] = static_cast<int32_t>(base + entry);
      ++count;
    }
    args.counts[row] = static_cast<int32_t>(count);
    for (int64_t i = count; i < args.out_stride; ++i) {
      args.slots[row * args.out_stride + i] = kNoEntry;
      if (args.positions != nullptr) args.positions[row * args.out_stride + i] = kNoEntry;
    }
    add_to_report(args.report, found);
  }
  return absl::OkStatus();
}

}  // namespace needle
