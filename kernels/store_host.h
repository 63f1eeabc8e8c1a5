// What both host twins of store do alike: look at every id before anything is written, and find where a position's raw
// row and an entry's slot lie. No arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/store.h"

namespace needle {

// One position's raw row while a store runs: in the call's own rows, or carried in the record.
struct RawRow {
  const void* kv = nullptr;    // [row_halves x head_dim] of kv_element
  const void* gate = nullptr;  // the same shape; null for ratio 1
  RowElement kv_element = RowElement::kFp32;
  RowElement gate_element = RowElement::kFp32;
};

inline float raw_value(const void* data, RowElement element, int64_t column) {
  return element == RowElement::kFp32 ? static_cast<const float*>(data)[column] : float_of_bf16(static_cast<const uint16_t*>(data)[column]);
}

StateHeader read_header(const std::byte* record);
void write_header(std::byte* record, const StateHeader& header);
inline float* record_rows(std::byte* record) { return reinterpret_cast<float*>(record + kStateHeaderBytes); }
inline const float* record_rows(const std::byte* record) { return reinterpret_cast<const float*>(record + kStateHeaderBytes); }

// A row that a record of `state` carries; `position` is live.
RawRow carried_row(const StateView& state, const std::byte* record, const StateHeader& header, int64_t position);
// The same, or a row of the call itself.
RawRow raw_row_of(const StoreRowsArgs& args, const StoreSequence& sequence, const StateHeader& header, int64_t position);

// Whether the sequence's record expects this store (promise 3). True for ratio 1, with header.next = first_position.
bool sequence_fits(const StoreRowsArgs& args, const StoreSequence& sequence, StateHeader* header);

// The header after the store.
StateHeader header_after(const StoreRowsArgs& args, const StoreSequence& sequence, StateHeader header);

// Where an entry goes; both null where it is skipped. Ids were admitted.
struct EntrySlot {
  std::byte* data = nullptr;
  std::byte* scale = nullptr;
};
EntrySlot entry_slot(const MutableLayerView& out, const PageTableView& pages, int32_t table_row, int64_t entry);
EntrySlot numbered_slot(const MutableLayerView& out, int64_t slot);
// Zeroes value and scale bytes of a slot.
void clear_slot(const MutableLayerView& out, const EntrySlot& slot);

// Everything that makes the call impossible, before anything is written; then counts into args.report what will be
// left out. Call after check_store_*.
absl::Status admit_store_rows(const StoreRowsArgs& args);
absl::Status admit_store_pooled(const StorePooledArgs& args);
absl::Status admit_commit_state(const CommitStateArgs& args);
absl::Status admit_init_state(const InitStateArgs& args);
bool commit_fits(const CommitStateArgs& args, const StateCommit& commit, StateHeader* header);
bool start_fits(const InitStateArgs& args, const StateStart& start);

}  // namespace needle
