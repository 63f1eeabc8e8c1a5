// What the CUDA twins of store and of the compressor state share: where an entry goes, where a position's raw row lies,
// and how a record is brought from one header to the next. The rules are those of kernels/store_host.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device_report.cuh"
#include "kernels/store.h"

namespace needle {

struct DeviceSlot {
  std::byte* data = nullptr;
  std::byte* scale = nullptr;
  uint32_t status = 0;  // why there is none
};

// 64-bit division is a subroutine; ids and entries nearly always fit in 32 bits.
__device__ __forceinline__ int64_t quotient(int64_t number, int32_t by) {
  if ((static_cast<uint64_t>(number) >> 32) == 0) return static_cast<uint32_t>(number) / static_cast<uint32_t>(by);
  return number / by;
}

__device__ __forceinline__ DeviceSlot device_numbered_slot(const MutableLayerView& out, int64_t slot) {
  const int64_t page = quotient(slot, out.slots_per_page);
  const SlotPlace place = slot_place(out.element, out.head_dim, out.slots_per_page, slot - page * out.slots_per_page);
  std::byte* part = out.base + page * out.page_stride;
  return {part + place.data, part + place.scale, 0};
}

__device__ __forceinline__ DeviceSlot device_entry_slot(const MutableLayerView& out, const PageTableView& pages, int32_t table_row,
                                                        int64_t entry) {
  const int64_t local = entry - (pages.entry_base == nullptr ? 0 : pages.entry_base[table_row]);
  const int64_t column = quotient(local, out.slots_per_page);
  if (local < 0 || column >= pages.pages_per_row) return {nullptr, nullptr, kStatusBadPageTable};
  const int32_t page = pages.pages[table_row * pages.row_stride + column];
  if (page == kNoPage) return {nullptr, nullptr, kStatusAbsentPage};
  if (page < 0 || page >= out.page_count) return {nullptr, nullptr, kStatusBadSlot};
  const SlotPlace place = slot_place(out.element, out.head_dim, out.slots_per_page, local - column * out.slots_per_page);
  std::byte* part = out.base + page * out.page_stride;
  return {part + place.data, part + place.scale, 0};
}

// A raw row: in the call's own rows, or carried in the record.
struct DeviceRow {
  const void* kv = nullptr;
  const void* gate = nullptr;
  RowElement kv_element = RowElement::kFp32;
  RowElement gate_element = RowElement::kFp32;
};

__device__ __forceinline__ const float* device_record_rows(const StateView& state, int64_t record) {
  return reinterpret_cast<const float*>(state_record(state, record) + kStateHeaderBytes);
}
__device__ __forceinline__ DeviceRow device_carried_row(const StateView& state, int64_t record, int64_t committed, int64_t position) {
  const int64_t offset =
      state.form == StateForm::kRaw ? state_ring_row_offset(state, position) : state_pending_row_offset(state, position - committed);
  const float* row = device_record_rows(state, record) + offset;
  return {row, row + state_row_floats_of(state) / 2, RowElement::kFp32, RowElement::kFp32};
}
__device__ __forceinline__ const void* device_row_at(const RowsView& view, int64_t row) {
  if (view.data == nullptr) return nullptr;
  return static_cast<const std::byte*>(view.data) + row * view.row_stride * (view.element == RowElement::kFp32 ? 4 : 2);
}
__device__ __forceinline__ DeviceRow device_call_row(const StoreRowsArgs& args, const StoreSequence& sequence, int64_t position) {
  const int64_t row = sequence.row_begin + position - sequence.first_position;
  return {device_row_at(args.kv, row), device_row_at(args.gate, row), args.kv.element, args.gate.element};
}
// Past L1: a kernel that begins before its predecessor has ended (update_records_kernel) might find old lines there.
template <class T>
__device__ __forceinline__ T load_past_l1(const T* from) {
  static_assert(alignof(T) == 8 && sizeof(T) % 8 == 0);
  union {
    uint2 words[sizeof(T) / 8];
    T value;
  } copy{};
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 8); ++i) copy.words[i] = __ldcg(reinterpret_cast<const uint2*>(from) + i);
  return copy.value;
}
__device__ __forceinline__ float row_number(const void* data, RowElement element, int64_t column) {
  return element == RowElement::kFp32 ? __ldcg(static_cast<const float*>(data) + column)
                                      : float_of_bf16(__ldcg(static_cast<const uint16_t*>(data) + column));
}

// Whether the ids that a sequence names exist at all; a host twin refuses the call where they do not.
__device__ __forceinline__ bool sequence_is_sound(const StoreRowsArgs& args, const StoreSequence& sequence) {
  return sequence.row_begin >= 0 && sequence.row_count >= 0 && sequence.row_begin <= args.rows &&
         sequence.row_count <= args.rows - sequence.row_begin && sequence.first_position >= 0 &&
         sequence.first_position <= kStorePositionMax - sequence.row_count && sequence.table_row >= 0 &&
         sequence.table_row < args.pages.rows &&
         (args.chain.component.ratio == 1 || (sequence.record >= 0 && sequence.record < args.state.count));
}
__device__ __forceinline__ bool device_sequence_fits(const StoreRowsArgs& args, const StoreSequence& sequence, StateHeader* header) {
  if (args.chain.component.ratio == 1) {
    header->next = header->committed = sequence.first_position;
    return true;
  }
  *header = load_past_l1(reinterpret_cast<const StateHeader*>(state_record(args.state, sequence.record)));
  if (!state_header_fits(args.state, *header) || header->sequence != sequence.sequence || header->generation != sequence.generation ||
      header->next != sequence.first_position) {
    return false;
  }
  const int64_t ahead = header->next - header->committed;
  return args.speculative ? ahead + sequence.row_count <= args.state.speculative_rows : ahead == 0;
}

// Brings a record's rows from `before` to `after`, by the whole block; the header is the caller's. `row_of(position)` gives
// the rows from before.next on. Every thread calls `before_writing` once: of the raw form, after it has asked for the
// first of those rows. In place: a row stays at its ring slot for as long as it lives, and each thread keeps to its own
// columns of the running form.
template <class RowOf, class BeforeWriting>
__device__ void update_record_rows(const StateView& state, int64_t record, const StateHeader& before, const StateHeader& after,
                                   const float* position_bias, const RowOf& row_of, const BeforeWriting& before_writing) {
  float* rows = reinterpret_cast<float*>(state_record(state, record) + kStateHeaderBytes);
  const int dims = state.head_dim;
  if (state.form == StateForm::kRaw) {
    const int ring = static_cast<int>(state_ring_rows_of(state));
    const int width = static_cast<int>(state_row_floats_of(state)) / 2;
    const int64_t live = state_live_begin(state.ratio, after.committed);
    const int live_slot = static_cast<int>(live % ring);
    const bool halves = state.ratio == kOverlapRatio;
    // Every number by its own turn of some thread, a few turns' loads under way together.
    constexpr int kTogether = 8;
    const int step = static_cast<int>(blockDim.x);
    if (static_cast<int>(threadIdx.x) >= ring * width) before_writing();
    for (int first = static_cast<int>(threadIdx.x); first < ring * width; first += kTogether * step) {
      float kv[kTogether];
      float gate[kTogether];
      bool writes[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int number = first + i * step;
        const int slot = number / width;
        const int c = number - slot * width;
        const int64_t position = live + (slot >= live_slot ? slot - live_slot : slot - live_slot + ring);
        const bool lives = position < after.next;
        const bool fresh = lives && position >= before.next;
        const bool kept = lives && (!halves || state_keeps_current(position, after.committed) || c < dims);
        writes[i] = number < ring * width && (fresh || !kept);
        kv[i] = 0.0f;
        gate[i] = 0.0f;
        if (writes[i] && kept) {
          const DeviceRow raw = row_of(position);
          kv[i] = row_number(raw.kv, raw.kv_element, c);
          gate[i] = row_number(raw.gate, raw.gate_element, c);
        }
      }
      if (first == static_cast<int>(threadIdx.x)) before_writing();
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int number = first + i * step;
        const int slot = number / width;
        float* row = rows + static_cast<int64_t>(slot) * 2 * width + (number - slot * width);
        if (writes[i]) {
          row[0] = kv[i];
          row[width] = gate[i];
        }
      }
    }
    return;
  }
  before_writing();
  const int64_t open = after.committed / state.ratio * state.ratio;
  const bool goes_on = open == before.committed / state.ratio * state.ratio;
  for (int c = threadIdx.x; c < dims; c += static_cast<int>(blockDim.x)) {
    PoolPartial partial;
    if (goes_on) partial = {rows[c], rows[dims + c], rows[2 * dims + c]};
    for (int64_t position = max(open, before.committed); position < after.committed; ++position) {
      const DeviceRow raw = position < before.next ? device_carried_row(state, record, before.committed, position) : row_of(position);
      fold_row(partial, row_number(raw.gate, raw.gate_element, c) + position_bias[position % state.ratio * dims + c],
               row_number(raw.kv, raw.kv_element, c));
    }
    rows[c] = partial.maximum;
    rows[dims + c] = partial.sum;
    rows[2 * dims + c] = partial.weighted;
    for (int ahead = 0; ahead < state.speculative_rows; ++ahead) {
      float* row = rows + state_pending_row_offset(state, ahead);
      const int64_t position = after.committed + ahead;
      if (position >= after.next) {
        row[c] = 0.0f;
        row[dims + c] = 0.0f;
      } else if (position >= before.next) {
        const DeviceRow raw = row_of(position);
        row[c] = row_number(raw.kv, raw.kv_element, c);
        row[dims + c] = row_number(raw.gate, raw.gate_element, c);
      }
    }
  }
}

}  // namespace needle
