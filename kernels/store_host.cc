#include "kernels/store_host.h"

#include <bitset>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace needle {
namespace {

enum class EntryFate : uint8_t { kStored, kAbsent, kOutsideRow, kRefused };

EntryFate fate_of(const MutableLayerView& out, const PageTableView& pages, int32_t table_row, int64_t entry, int32_t* page) {
  const int64_t local = entry - (pages.entry_base == nullptr ? 0 : pages.entry_base[table_row]);
  const int64_t column = local / out.slots_per_page;
  if (local < 0 || column >= pages.pages_per_row) return EntryFate::kOutsideRow;
  *page = pages.pages[table_row * pages.row_stride + column];
  if (*page == kNoPage) return EntryFate::kAbsent;
  return *page < 0 || *page >= out.page_count ? EntryFate::kRefused : EntryFate::kStored;
}

absl::Status bad_page(int32_t page, int64_t entry, int32_t table_row, int64_t page_count) {
  return absl::OutOfRangeError(absl::StrCat("page id ", page, " for entry ", entry, " of page-table row ", table_row,
                                            " is outside the pool's 0..", page_count - 1,
                                            "; use -1 for a page that is absent. Nothing was written"));
}

// Finds a record that one call names twice. A record's bit is set by it, or by one that is a multiple of kBits away, so
// that only then the items before need be looked through: a pass over the call, without memory of its own.
class RecordsNamed {
 public:
  // The item before `item` that names the same record, or -1. `record_of(i)`: item i's record, -1 where it names none.
  template <typename RecordOf>
  int64_t before(int64_t item, const RecordOf& record_of) {
    const int64_t record = record_of(item);
    const size_t bit = static_cast<size_t>(record) % kBits;
    if (!seen_[bit]) {
      seen_[bit] = true;
      return -1;
    }
    int64_t other = item - 1;
    while (other >= 0 && record_of(other) != record) --other;
    return other;
  }

 private:
  static constexpr size_t kBits = 8192;  // 1 KiB of stack, as many records as a large pool has
  std::bitset<kBits> seen_;
};

absl::Status named_twice(absl::string_view item, int64_t first, int64_t second, int64_t record) {
  return absl::InvalidArgumentError(absl::StrCat(item, " ", first, " and ", second, " both name state record ", record,
                                                 "; a call may name a record once, make two calls. Nothing was "
                                                 "written"));
}

}  // namespace

StateHeader read_header(const std::byte* record) {
  StateHeader header;
  std::memcpy(&header, record, sizeof(header));
  return header;
}

void write_header(std::byte* record, const StateHeader& header) { std::memcpy(record, &header, sizeof(header)); }

RawRow carried_row(const StateView& state, const std::byte* record, const StateHeader& header, int64_t position) {
  const int64_t offset =
      state.form == StateForm::kRaw ? state_ring_row_offset(state, position) : state_pending_row_offset(state, position - header.committed);
  const float* row = record_rows(record) + offset;
  return {row, row + state_row_floats_of(state) / 2, RowElement::kFp32, RowElement::kFp32};
}

RawRow raw_row_of(const StoreRowsArgs& args, const StoreSequence& sequence, const StateHeader& header, int64_t position) {
  if (position < sequence.first_position) {
    return carried_row(args.state, state_record(args.state, sequence.record), header, position);
  }
  const int64_t row = sequence.row_begin + position - sequence.first_position;
  const auto at = [row](const RowsView& view) -> const void* {
    if (view.data == nullptr) return nullptr;
    const int64_t bytes = view.element == RowElement::kFp32 ? 4 : 2;
    return static_cast<const std::byte*>(view.data) + row * view.row_stride * bytes;
  };
  return {at(args.kv), at(args.gate), args.kv.element, args.gate.element};
}

bool sequence_fits(const StoreRowsArgs& args, const StoreSequence& sequence, StateHeader* header) {
  if (args.chain.component.ratio == 1) {
    *header = StateHeader{};
    header->next = header->committed = sequence.first_position;
    return true;
  }
  *header = read_header(state_record(args.state, sequence.record));
  if (!state_header_fits(args.state, *header) || header->sequence != sequence.sequence || header->generation != sequence.generation ||
      header->next != sequence.first_position) {
    return false;
  }
  const int64_t ahead = header->next - header->committed;
  return args.speculative ? ahead + sequence.row_count <= args.state.speculative_rows : ahead == 0;
}

StateHeader header_after(const StoreRowsArgs& args, const StoreSequence& sequence, StateHeader header) {
  header.next += sequence.row_count;
  if (!args.speculative) header.committed = header.next;
  return header;
}

EntrySlot numbered_slot(const MutableLayerView& out, int64_t slot) {
  if (slot == kNoSlot) return {};
  std::byte* page = out.base + slot / out.slots_per_page * out.page_stride;
  const SlotPlace place = slot_place(out.element, out.head_dim, out.slots_per_page, slot % out.slots_per_page);
  return {page + place.data, page + place.scale};
}

EntrySlot entry_slot(const MutableLayerView& out, const PageTableView& pages, int32_t table_row, int64_t entry) {
  int32_t page = 0;
  if (fate_of(out, pages, table_row, entry, &page) != EntryFate::kStored) return {};
  const int64_t local = entry - (pages.entry_base == nullptr ? 0 : pages.entry_base[table_row]);
  return numbered_slot(out, int64_t{page} * out.slots_per_page + local % out.slots_per_page);
}

void clear_slot(const MutableLayerView& out, const EntrySlot& slot) {
  if (slot.data == nullptr) return;
  std::memset(slot.data, 0, static_cast<size_t>(slot_data_bytes(out.element, out.head_dim)));
  std::memset(slot.scale, 0, static_cast<size_t>(slot_scale_bytes(out.element, out.head_dim)));
}

absl::Status admit_store_rows(const StoreRowsArgs& args) {
  const int64_t ratio = args.chain.component.ratio;
  const auto record_of = [&args](int64_t s) { return args.sequences[s].row_count > 0 ? args.sequences[s].record : int64_t{-1}; };
  RecordsNamed records;
  OpReport left_out = {};
  int64_t row_end = 0;
  for (int32_t s = 0; s < args.sequence_count; ++s) {
    const StoreSequence& sequence = args.sequences[s];
    if (sequence.row_count < 0 || sequence.row_begin < row_end || sequence.row_begin > args.rows ||
        sequence.row_count > args.rows - sequence.row_begin) {
      return absl::OutOfRangeError(absl::StrCat("sequence ", s, " has rows ", sequence.row_begin, " + ", sequence.row_count,
                                                "; they must lie in 0..", args.rows, " and begin at or after ", row_end,
                                                ", where the sequence before ends. Nothing was written"));
    }
    row_end = sequence.row_begin + sequence.row_count;
    if (sequence.row_count == 0) continue;
    if (sequence.first_position < 0 || sequence.first_position > kStorePositionMax - sequence.row_count) {
      return absl::OutOfRangeError(
          absl::StrCat("sequence ", s, " begins at position ", sequence.first_position, "; positions are 0..2^40. Nothing was written"));
    }
    if (sequence.table_row < 0 || sequence.table_row >= args.pages.rows) {
      return absl::OutOfRangeError(
          absl::StrCat("sequence ", s, " names page-table row ", sequence.table_row, " of ", args.pages.rows, ". Nothing was written"));
    }
    if (ratio > 1 && (sequence.record < 0 || sequence.record >= args.state.count)) {
      return absl::OutOfRangeError(
          absl::StrCat("sequence ", s, " names state record ", sequence.record, " of ", args.state.count, ". Nothing was written"));
    }
    if (ratio > 1) {
      if (const int64_t other = records.before(s, record_of); other >= 0) {
        return named_twice("sequences", other, s, sequence.record);
      }
    }
    StateHeader header;
    if (!sequence_fits(args, sequence, &header)) {
      left_out.status |= kStatusStateMismatch;
      left_out.skipped_rows += static_cast<uint64_t>(sequence.row_count);
      continue;
    }
    const int64_t entry_end = (sequence.first_position + sequence.row_count) / ratio;
    for (int64_t entry = sequence.first_position / ratio; entry < entry_end; ++entry) {
      if (args.chain.component.rope != RopeStyle::kNone && entry * ratio >= args.chain.rope.positions) {
        return absl::OutOfRangeError(absl::StrCat("entry ", entry, " of sequence ", s, " is at position ", entry * ratio,
                                                  ", past the RoPE table's ", args.chain.rope.positions,
                                                  " positions; build a longer table. Nothing was written"));
      }
      int32_t page = 0;
      switch (fate_of(args.out, args.pages, sequence.table_row, entry, &page)) {
        case EntryFate::kStored: continue;
        case EntryFate::kAbsent: left_out.status |= kStatusAbsentPage; break;
        case EntryFate::kOutsideRow: left_out.status |= kStatusBadPageTable; break;
        case EntryFate::kRefused: return bad_page(page, entry, sequence.table_row, args.out.page_count);
      }
      ++left_out.skipped_rows;
    }
  }
  for (int32_t b = 0; b < args.boundary_count; ++b) {
    const StoreBoundary& boundary = args.boundary_requests[b];
    if (boundary.boundary_record == -1) continue;
    if (boundary.boundary_record < 0 || boundary.boundary_record >= args.boundaries.count || boundary.sequence < 0 ||
        boundary.sequence >= args.sequence_count) {
      return absl::OutOfRangeError(absl::StrCat("boundary ", b, " names record ", boundary.boundary_record, " of ", args.boundaries.count,
                                                " and sequence ", boundary.sequence, " of ", args.sequence_count, ". Nothing was written"));
    }
    const StoreSequence& sequence = args.sequences[boundary.sequence];
    if (boundary.position <= 0 || boundary.position % kOverlapRatio != 0 || boundary.position < sequence.first_position ||
        boundary.position > sequence.first_position + sequence.row_count) {
      return absl::OutOfRangeError(absl::StrCat("boundary ", b, " is at position ", boundary.position,
                                                "; it must be a positive multiple of 4 in ", sequence.first_position, "..",
                                                sequence.first_position + sequence.row_count, ". Nothing was written"));
    }
  }
  args.report->status |= left_out.status;
  args.report->skipped_rows += left_out.skipped_rows;
  return absl::OkStatus();
}

absl::Status admit_store_pooled(const StorePooledArgs& args) {
  const int64_t slots = args.out.page_count * args.out.slots_per_page;
  for (int64_t row = 0; row < args.count; ++row) {
    if (args.slots[row] == kNoSlot) continue;
    if (args.slots[row] < 0 || args.slots[row] >= slots) {
      return absl::OutOfRangeError(absl::StrCat("slot ", args.slots[row], " of row ", row, " is outside the pool's 0..", slots - 1,
                                                "; use -1 to skip a row. Nothing was written"));
    }
    if (args.chain.component.rope != RopeStyle::kNone && (args.positions[row] < 0 || args.positions[row] >= args.chain.rope.positions)) {
      return absl::OutOfRangeError(absl::StrCat("position ", args.positions[row], " of row ", row, " is outside the RoPE table's 0..",
                                                args.chain.rope.positions - 1, "; build a longer table. Nothing was written"));
    }
  }
  return absl::OkStatus();
}

bool commit_fits(const CommitStateArgs& args, const StateCommit& commit, StateHeader* header) {
  if (commit.ahead < 0 || commit.accepted < 0 || commit.accepted > commit.ahead || commit.committed < 0 ||
      commit.committed > kStorePositionMax) {
    return false;
  }
  if (args.ratio == 1) {
    *header = StateHeader{};
    header->committed = commit.committed;
    header->next = commit.committed + commit.ahead;
    return true;
  }
  *header = read_header(state_record(args.state, commit.record));
  return state_header_fits(args.state, *header) && header->sequence == commit.sequence && header->generation == commit.generation &&
         header->committed == commit.committed && header->next - header->committed == commit.ahead;
}

absl::Status admit_commit_state(const CommitStateArgs& args) {
  const auto record_of = [&args](int64_t c) { return args.commits[c].record; };
  RecordsNamed records;
  OpReport left_out = {};
  for (int32_t c = 0; c < args.count; ++c) {
    const StateCommit& commit = args.commits[c];
    if (commit.record == -1) continue;
    if (args.ratio > 1 && (commit.record < 0 || commit.record >= args.state.count)) {
      return absl::OutOfRangeError(
          absl::StrCat("commit ", c, " names state record ", commit.record, " of ", args.state.count, ". Nothing was changed"));
    }
    if (args.ratio > 1) {
      if (const int64_t other = records.before(c, record_of); other >= 0) {
        return named_twice("commits", other, c, commit.record);
      }
    }
    if (commit.table_row < 0 || commit.table_row >= args.pages.rows) {
      return absl::OutOfRangeError(
          absl::StrCat("commit ", c, " names page-table row ", commit.table_row, " of ", args.pages.rows, ". Nothing was changed"));
    }
    StateHeader header;
    if (!commit_fits(args, commit, &header)) {
      left_out.status |= kStatusStateMismatch;
      ++left_out.skipped_rows;
      continue;
    }
    for (int64_t entry = (header.committed + commit.accepted) / args.ratio; entry < header.next / args.ratio; ++entry) {
      int32_t page = 0;
      if (fate_of(args.out, args.pages, commit.table_row, entry, &page) == EntryFate::kRefused) {
        return bad_page(page, entry, commit.table_row, args.out.page_count);
      }
    }
  }
  if (args.report != nullptr) {
    args.report->status |= left_out.status;
    args.report->skipped_rows += left_out.skipped_rows;
  }
  return absl::OkStatus();
}

bool start_fits(const InitStateArgs& args, const StateStart& start) {
  if (start.record < 0 || start.record >= args.state.count || start.position < 0 || start.position > kStorePositionMax ||
      start.position % args.state.ratio != 0) {
    return false;
  }
  const bool wants_boundary = args.state.ratio == kOverlapRatio && start.position > 0;
  return wants_boundary ? start.boundary_record >= 0 && start.boundary_record < args.boundaries.count && args.boundaries.base != nullptr
                        : start.boundary_record == -1;
}

absl::Status admit_init_state(const InitStateArgs& args) {
  const auto record_of = [&args](int64_t i) { return args.starts[i].record; };
  RecordsNamed records;
  for (int32_t i = 0; i < args.count; ++i) {
    if (args.starts[i].record < 0 || args.starts[i].record >= args.state.count) continue;  // skipped
    if (const int64_t other = records.before(i, record_of); other >= 0) {
      return named_twice("starts", other, i, args.starts[i].record);
    }
  }
  return absl::OkStatus();
}

}  // namespace needle
