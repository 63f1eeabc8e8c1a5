#include <algorithm>
#include <array>

#include "kernels/compressor_state_cpu.h"
#include "kernels/entry_chain_cpu.h"
#include "kernels/store.h"
#include "kernels/store_host.h"

namespace needle {
namespace {

// Input rows a task looks at: an entry's work is 8 or 128 rows of pooling, or one row's chain. Small enough to spread
// a prefill chunk over many threads, large enough to hide a task's cost (under a microsecond).
int64_t rows_per_task(int ratio) { return ratio == 1 ? 32 : std::max(ratio, 64); }

void pool_entry(const EntryChainCpu& chain, const StoreRowsArgs& args, const StoreSequence& sequence, const StateHeader& header,
                int64_t entry, float* x) {
  const int ratio = args.chain.component.ratio;
  const int dims = args.chain.component.head_dim;
  const int64_t first = entry * ratio;
  if (ratio == 1) {
    const RawRow row = raw_row_of(args, sequence, header, entry);
    chain.widen(row.kv, row.kv_element, dims, x);
    return;
  }
  std::array<PoolRow, 128> rows;
  int count = 0;
  const auto take = [&](int64_t position, int first_column) {
    const float* bias = args.position_bias + position % ratio * row_halves(ratio) * dims;
    rows[static_cast<size_t>(count++)] = pool_row(raw_row_of(args, sequence, header, position), bias, first_column);
  };
  const float* carried = nullptr;
  if (ratio == kOverlapRatio) {
    for (int64_t position = std::max<int64_t>(first - ratio, 0); position < first; ++position) take(position, 0);
    for (int64_t position = first; position < first + ratio; ++position) take(position, dims);
  } else {
    int64_t begin = first;
    if (args.state.form == StateForm::kRunning && header.committed > first) {
      carried = record_rows(state_record(args.state, sequence.record));
      begin = header.committed;
    }
    for (int64_t position = begin; position < first + ratio; ++position) take(position, 0);
  }
  chain.pool_rows(rows.data(), count, dims, carried, x);
}

// The entries of one sequence that rows [row_begin, row_end) complete.
void store_entries(const EntryChainCpu& chain, const StoreRowsArgs& args, const StoreSequence& sequence, int64_t row_begin,
                   int64_t row_end) {
  StateHeader header;
  if (!sequence_fits(args, sequence, &header)) return;
  const int ratio = args.chain.component.ratio;
  const int64_t position_of_row = sequence.first_position - sequence.row_begin;
  const int64_t entry_end = (position_of_row + row_end) / ratio;
  for (int64_t entry = (position_of_row + row_begin) / ratio; entry < entry_end; ++entry) {
    const EntrySlot slot = entry_slot(args.out, args.pages, sequence.table_row, entry);
    if (slot.data == nullptr && args.finished == nullptr) continue;
    alignas(64) std::array<float, kStoreHeadDimMax> x;
    pool_entry(chain, args, sequence, header, entry, x.data());
    chain.finish(args.chain, ratio > 1, entry * ratio, x.data());
    if (args.finished != nullptr) {
      const int64_t row = entry * ratio + ratio - 1 - position_of_row;
      std::copy_n(x.begin(), args.chain.component.head_dim, args.finished + row * args.finished_stride);
    }
    if (slot.data != nullptr) chain.quantise(args.chain, x.data(), slot.data, slot.scale);
  }
}

void write_boundary(const EntryChainCpu& chain, const StoreRowsArgs& args, const StoreBoundary& boundary) {
  if (boundary.boundary_record == -1) return;
  const StoreSequence& sequence = args.sequences[boundary.sequence];
  StateHeader header;
  if (sequence.row_count == 0 || !sequence_fits(args, sequence, &header)) return;
  const int dims = args.chain.component.head_dim;
  float* record = reinterpret_cast<float*>(args.boundaries.base + boundary.boundary_record * args.boundaries.stride);
  for (int j = 0; j < kOverlapRatio; ++j) {
    const RawRow row = raw_row_of(args, sequence, header, boundary.position - kOverlapRatio + j);
    chain.widen(row.kv, row.kv_element, dims, record + 2 * j * dims);
    chain.widen(row.gate, row.gate_element, dims, record + (2 * j + 1) * dims);
  }
}

}  // namespace

absl::Status store_rows_cpu(const StoreRowsArgs& args, CpuIsa isa, Workers& workers) {
  if (absl::Status status = check_store_rows(args); !status.ok()) return status;
  if (args.rows == 0 || args.sequence_count == 0) return absl::OkStatus();
  if (absl::Status status = admit_store_rows(args); !status.ok()) return status;
  const EntryChainCpu& chain = entry_chain_cpu(isa);
  const StoreSequence* sequences_end = args.sequences + args.sequence_count;

  // Entries and boundaries read the records as they were; the records change when both are done.
  const int64_t task_rows = rows_per_task(args.chain.component.ratio);
  workers.run(div_ceil(args.rows, task_rows), [&](int64_t task, int) {
    const int64_t begin = task * task_rows;
    const int64_t end = std::min(begin + task_rows, args.rows);
    const StoreSequence* sequence =
        std::upper_bound(args.sequences, sequences_end, begin, [](int64_t row, const StoreSequence& s) { return row < s.row_begin; });
    if (sequence != args.sequences) --sequence;
    for (; sequence != sequences_end && sequence->row_begin < end; ++sequence) {
      const int64_t from = std::max(begin, sequence->row_begin);
      const int64_t to = std::min(end, sequence->row_begin + sequence->row_count);
      if (from < to) store_entries(chain, args, *sequence, from, to);
    }
  });
  workers.run(args.boundary_count, [&](int64_t b, int) { write_boundary(chain, args, args.boundary_requests[b]); });
  if (args.chain.component.ratio == 1) return absl::OkStatus();
  workers.run(args.sequence_count, [&](int64_t s, int) {
    const StoreSequence& sequence = args.sequences[s];
    StateHeader header;
    if (sequence.row_count == 0 || !sequence_fits(args, sequence, &header)) return;
    update_record(chain, args.state, state_record(args.state, sequence.record), header, header_after(args, sequence, header),
                  args.position_bias, [&](int64_t position) { return raw_row_of(args, sequence, header, position); });
  });
  return absl::OkStatus();
}

absl::Status store_pooled_cpu(const StorePooledArgs& args, CpuIsa isa, Workers& workers) {
  if (absl::Status status = check_store_pooled(args); !status.ok()) return status;
  if (absl::Status status = admit_store_pooled(args); !status.ok()) return status;
  const EntryChainCpu& chain = entry_chain_cpu(isa);
  const int dims = args.chain.component.head_dim;
  const int64_t element_bytes = args.rows.element == RowElement::kFp32 ? 4 : 2;
  constexpr int64_t kRowsPerTask = 32;
  workers.run(div_ceil(args.count, kRowsPerTask), [&](int64_t task, int) {
    const int64_t end = std::min(args.count, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) {
      if (args.slots[row] == kNoSlot) continue;
      alignas(64) std::array<float, kStoreHeadDimMax> x;
      chain.widen(static_cast<const std::byte*>(args.rows.data) + row * args.rows.row_stride * element_bytes, args.rows.element, dims,
                  x.data());
      chain.finish(args.chain, true, args.positions == nullptr ? 0 : args.positions[row], x.data());
      if (args.finished != nullptr) std::copy_n(x.begin(), dims, args.finished + row * args.finished_stride);
      const EntrySlot slot = numbered_slot(args.out, args.slots[row]);
      chain.quantise(args.chain, x.data(), slot.data, slot.scale);
    }
  });
  return absl::OkStatus();
}

}  // namespace needle
