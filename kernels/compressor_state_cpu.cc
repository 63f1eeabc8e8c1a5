#include "kernels/compressor_state_cpu.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/compressor_state_ref.h"

namespace needle {
namespace {

void zero_floats(float* from, int64_t count) { std::memset(from, 0, static_cast<size_t>(count) * sizeof(float)); }

void copy_raw(const EntryChainCpu& chain, const RawRow& row, int columns, float* kv, float* score) {
  chain.widen(row.kv, row.kv_element, columns, kv);
  chain.widen(row.gate, row.gate_element, columns, score);
}

void zero_current_halves(const StateView& state, float* row) {
  zero_floats(row + state.head_dim, state.head_dim);
  zero_floats(row + 3 * int64_t{state.head_dim}, state.head_dim);
}

void update_raw(const EntryChainCpu& chain, const StateView& state, float* rows, const StateHeader& before, const StateHeader& after,
                absl::FunctionRef<RawRow(int64_t)> row_of) {
  const int64_t row_floats = state_row_floats_of(state);
  const int64_t begin = state_live_begin(state.ratio, after.committed);
  for (int64_t position = state_live_begin(state.ratio, before.committed); position < before.next; ++position) {
    float* row = rows + state_ring_row_offset(state, position);
    if (position < begin || position >= after.next) {
      zero_floats(row, row_floats);
    } else if (state.ratio == kOverlapRatio && !state_keeps_current(position, after.committed) &&
               state_keeps_current(position, before.committed)) {
      zero_current_halves(state, row);
    }
  }
  // Rows that died above and rows that are new may share a place: the dead were cleared first.
  for (int64_t position = std::max(begin, before.next); position < after.next; ++position) {
    float* row = rows + state_ring_row_offset(state, position);
    copy_raw(chain, row_of(position), static_cast<int>(row_floats / 2), row, row + row_floats / 2);
    if (state.ratio == kOverlapRatio && !state_keeps_current(position, after.committed)) zero_current_halves(state, row);
  }
}

void update_running(const EntryChainCpu& chain, const StateView& state, float* partial, const StateHeader& before, const StateHeader& after,
                    const float* position_bias, absl::FunctionRef<RawRow(int64_t)> row_of) {
  const int64_t dims = state.head_dim;
  const int64_t open = after.committed / state.ratio * state.ratio;
  if (open != before.committed / state.ratio * state.ratio) {
    std::fill_n(partial, dims, kEmptyMaximum);
    zero_floats(partial + dims, 2 * dims);
  }
  std::array<PoolRow, 128> rows;
  int count = 0;
  for (int64_t position = std::max(open, before.committed); position < after.committed; ++position) {
    rows[static_cast<size_t>(count++)] = pool_row(row_of(position), position_bias + position % state.ratio * dims, 0);
  }
  chain.fold_rows(rows.data(), count, state.head_dim, partial);

  float* pending = partial + 3 * dims;
  if (after.committed != before.committed) zero_floats(pending, (before.next - before.committed) * 2 * dims);
  if (after.next < before.next) {  // all rejected: the partial stays as it was
    zero_floats(pending + (after.next - after.committed) * 2 * dims, (before.next - after.next) * 2 * dims);
  }
  for (int64_t position = std::max(before.next, after.committed); position < after.next; ++position) {
    float* row = partial + state_pending_row_offset(state, position - after.committed);
    copy_raw(chain, row_of(position), state.head_dim, row, row + dims);
  }
}

}  // namespace

void update_record(const EntryChainCpu& chain, const StateView& state, std::byte* record, const StateHeader& before,
                   const StateHeader& after, const float* position_bias, absl::FunctionRef<RawRow(int64_t)> row_of) {
  if (state.form == StateForm::kRaw) {
    update_raw(chain, state, record_rows(record), before, after, row_of);
  } else {
    update_running(chain, state, record_rows(record), before, after, position_bias, row_of);
  }
  write_header(record, after);
}

absl::Status init_state_cpu(const InitStateArgs& args, Workers& workers) {
  // Nothing here is worth an instruction set: memset and a few rows copied. The reference is as fast, one record a time.
  if (absl::Status status = check_init_state(args); !status.ok()) return status;
  if (absl::Status status = admit_init_state(args); !status.ok()) return status;
  OpReport left_out = {};
  for (int32_t i = 0; i < args.count; ++i) {
    if (args.starts[i].record == -1 || start_fits(args, args.starts[i])) continue;
    left_out.status |= kStatusBadSlot;
    ++left_out.skipped_rows;
  }
  const StateView& state = args.state;
  const int64_t dims = state.head_dim;
  workers.run(args.count, [&](int64_t i, int) {
    const StateStart& start = args.starts[i];
    if (start.record == -1 || !start_fits(args, start)) return;
    std::byte* record = state_record(state, start.record);
    std::memset(record, 0, static_cast<size_t>(state_record_bytes(state.form, state.ratio, dims, state.speculative_rows)));
    float* rows = record_rows(record);
    if (state.form == StateForm::kRunning) std::fill_n(rows, dims, kEmptyMaximum);
    for (int j = 0; start.boundary_record >= 0 && j < kOverlapRatio; ++j) {
      const float* from =
          reinterpret_cast<const float*>(args.boundaries.base + start.boundary_record * args.boundaries.stride) + 2 * j * dims;
      float* row = rows + state_ring_row_offset(state, start.position - kOverlapRatio + j);
      std::copy_n(from, dims, row);
      std::copy_n(from + dims, dims, row + 2 * dims);
    }
    StateHeader header = {};
    header.magic = kStateMagic;
    header.form = static_cast<uint8_t>(state.form);
    header.ratio = static_cast<uint16_t>(state.ratio);
    header.head_dim = static_cast<uint32_t>(dims);
    header.speculative_rows = static_cast<uint32_t>(state.speculative_rows);
    header.sequence = start.sequence;
    header.generation = start.generation;
    header.next = header.committed = start.position;
    write_header(record, header);
  });
  if (args.report != nullptr) {
    args.report->status |= left_out.status;
    args.report->skipped_rows += left_out.skipped_rows;
  }
  return absl::OkStatus();
}

absl::Status commit_state_cpu(const CommitStateArgs& args, CpuIsa isa, Workers& workers) {
  if (absl::Status status = check_commit_state(args); !status.ok()) return status;
  if (args.count == 0) return absl::OkStatus();
  if (absl::Status status = admit_commit_state(args); !status.ok()) return status;
  const EntryChainCpu& chain = entry_chain_cpu(isa);
  workers.run(args.count, [&](int64_t i, int) {
    const StateCommit& commit = args.commits[i];
    StateHeader before;
    if (commit.record == -1 || !commit_fits(args, commit, &before)) return;
    StateHeader after = before;
    after.next = after.committed = before.committed + commit.accepted;
    for (int64_t entry = after.next / args.ratio; entry < before.next / args.ratio; ++entry) {
      clear_slot(args.out, entry_slot(args.out, args.pages, commit.table_row, entry));
    }
    if (args.ratio == 1) return;
    std::byte* record = state_record(args.state, commit.record);
    update_record(chain, args.state, record, before, after, args.position_bias,
                  [&](int64_t position) { return carried_row(args.state, record, before, position); });
  });
  return absl::OkStatus();
}

}  // namespace needle
