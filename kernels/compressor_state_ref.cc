#include "kernels/compressor_state_ref.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"

namespace needle {
namespace {

absl::Status refuse(absl::string_view what) { return absl::InvalidArgumentError(absl::StrCat("compressor state: ", what)); }

void copy_half(const RawRow& row, int64_t first_column, int64_t dims, float* kv, float* score) {
  for (int64_t c = 0; c < dims; ++c) {
    kv[c] = raw_value(row.kv, row.kv_element, first_column + c);
    score[c] = raw_value(row.gate, row.gate_element, first_column + c);
  }
}

void clear_rejected(const CommitStateArgs& args, const StateCommit& commit, const StateHeader& before) {
  const int64_t kept = (commit.committed + commit.accepted) / args.ratio;
  for (int64_t entry = kept; entry < before.next / args.ratio; ++entry) {
    clear_slot(args.out, entry_slot(args.out, args.pages, commit.table_row, entry));
  }
}

}  // namespace

absl::Status check_state_view(const StateView& state) {
  if (state.ratio != kOverlapRatio && state.ratio != 128) {
    return refuse(absl::StrCat("ratio is ", state.ratio, ", must be 4 or 128"));
  }
  if (state.head_dim != 128 && state.head_dim != 512) {
    return refuse(absl::StrCat("head_dim is ", state.head_dim, ", must be 128 or 512"));
  }
  if (state.speculative_rows < 0 || state.speculative_rows > kSpeculativeRowsMax) {
    return refuse(absl::StrCat("speculative_rows is ", state.speculative_rows, ", must be 0..", kSpeculativeRowsMax));
  }
  if (state.form != StateForm::kRaw && !(state.form == StateForm::kRunning && state.ratio != kOverlapRatio)) {
    return refuse(absl::StrCat("form is ", name_of(state.form), "; ratio 4 is raw, ratio 128 raw or running"));
  }
  if (state.count < 0 || (state.base == nullptr && state.count > 0)) {
    return refuse(absl::StrCat("the view has ", state.count, " records", state.base == nullptr ? " at null" : ""));
  }
  const int64_t bytes = state_record_bytes(state.form, state.ratio, state.head_dim, state.speculative_rows);
  if ((state.count > 1 && state.stride < bytes) || state.stride % 16 != 0) {
    return refuse(absl::StrCat("stride is ", state.stride, ", must be a multiple of 16 and at least ", bytes));
  }
  if (reinterpret_cast<uintptr_t>(state.base) % 16 != 0) return refuse("the base is not 16-byte aligned");
  return absl::OkStatus();
}

void rebuild_record_ref(const StateView& state, std::byte* record, const StateHeader& before, const StateHeader& after,
                        const float* position_bias, const std::function<RawRow(int64_t)>& row_of) {
  const int64_t dims = state.head_dim;
  std::vector<float> rows(
      static_cast<size_t>((state_record_bytes(state.form, state.ratio, dims, state.speculative_rows) - kStateHeaderBytes) / 4));
  if (state.form == StateForm::kRaw) {
    for (int64_t position = state_live_begin(state.ratio, after.committed); position < after.next; ++position) {
      float* row = rows.data() + state_ring_row_offset(state, position);
      const RawRow raw = row_of(position);
      if (state.ratio != kOverlapRatio) {
        copy_half(raw, 0, dims, row, row + dims);
        continue;
      }
      copy_half(raw, 0, dims, row, row + 2 * dims);
      if (state_keeps_current(position, after.committed)) copy_half(raw, dims, dims, row + dims, row + 3 * dims);
    }
  } else {
    const int64_t open = after.committed / state.ratio * state.ratio;
    const bool goes_on = open == before.committed / state.ratio * state.ratio;
    const float* carried = record_rows(record);
    for (int64_t c = 0; c < dims; ++c) {
      PoolPartial partial;
      if (goes_on) partial = {carried[c], carried[dims + c], carried[2 * dims + c]};
      for (int64_t position = std::max(open, before.committed); position < after.committed; ++position) {
        const RawRow raw = row_of(position);
        fold_row(partial, raw_value(raw.gate, raw.gate_element, c) + position_bias[position % state.ratio * dims + c],
                 raw_value(raw.kv, raw.kv_element, c));
      }
      rows[static_cast<size_t>(c)] = partial.maximum;
      rows[static_cast<size_t>(dims + c)] = partial.sum;
      rows[static_cast<size_t>(2 * dims + c)] = partial.weighted;
    }
    for (int64_t position = after.committed; position < after.next; ++position) {
      float* row = rows.data() + state_pending_row_offset(state, position - after.committed);
      copy_half(row_of(position), 0, dims, row, row + dims);
    }
  }
  write_header(record, after);
  std::memcpy(record_rows(record), rows.data(), rows.size() * sizeof(float));
}

absl::Status check_init_state(const InitStateArgs& args) {
  if (absl::Status status = check_state_view(args.state); !status.ok()) return status;
  if (args.count < 0 || (args.count > 0 && args.starts == nullptr)) {
    return refuse(absl::StrCat("init has ", args.count, " starts", args.starts == nullptr ? " at null" : ""));
  }
  if (args.boundaries.base != nullptr && args.boundaries.count > 1 && args.boundaries.stride < boundary_record_bytes(args.state.head_dim)) {
    return refuse(absl::StrCat("boundary stride ", args.boundaries.stride, " is below a record's ",
                               boundary_record_bytes(args.state.head_dim), " bytes"));
  }
  return absl::OkStatus();
}

absl::Status init_state_ref(const InitStateArgs& args) {
  if (absl::Status status = check_init_state(args); !status.ok()) return status;
  if (absl::Status status = admit_init_state(args); !status.ok()) return status;
  const int64_t dims = args.state.head_dim;
  for (int32_t i = 0; i < args.count; ++i) {
    const StateStart& start = args.starts[i];
    if (start.record == -1) continue;
    if (!start_fits(args, start)) {
      if (args.report != nullptr) {
        args.report->status |= kStatusBadSlot;
        ++args.report->skipped_rows;
      }
      continue;
    }
    StateHeader header = {};
    header.magic = kStateMagic;
    header.form = static_cast<uint8_t>(args.state.form);
    header.ratio = static_cast<uint16_t>(args.state.ratio);
    header.head_dim = static_cast<uint32_t>(dims);
    header.speculative_rows = static_cast<uint32_t>(args.state.speculative_rows);
    header.sequence = start.sequence;
    header.generation = start.generation;
    header.next = header.committed = start.position;
    std::vector<float> halves(static_cast<size_t>(4 * dims));  // kv and score, the current halves zero
    StateHeader fresh = header;
    fresh.committed = -args.state.ratio;  // of no group that the record could go on with
    rebuild_record_ref(args.state, state_record(args.state, start.record), fresh, header, nullptr, [&](int64_t position) {
      const float* from = reinterpret_cast<const float*>(args.boundaries.base + start.boundary_record * args.boundaries.stride);
      from += (position - start.position + kOverlapRatio) * 2 * dims;
      std::copy_n(from, dims, halves.begin());
      std::copy_n(from + dims, dims, halves.begin() + 2 * dims);
      return RawRow{halves.data(), halves.data() + 2 * dims, RowElement::kFp32, RowElement::kFp32};
    });
  }
  return absl::OkStatus();
}

absl::Status check_commit_state(const CommitStateArgs& args) {
  if (args.count < 0 || (args.count > 0 && args.commits == nullptr)) {
    return refuse(absl::StrCat("commit has ", args.count, " commits", args.commits == nullptr ? " at null" : ""));
  }
  if (args.ratio != 1) {
    if (args.state.ratio != args.ratio) {
      return refuse(absl::StrCat("state is of ratio ", args.state.ratio, ", the commit of ", args.ratio));
    }
    if (absl::Status status = check_state_view(args.state); !status.ok()) return status;
    if (args.state.form == StateForm::kRunning && args.position_bias == nullptr) return refuse("position_bias is null");
    if (args.out.head_dim != args.state.head_dim) {
      return refuse(absl::StrCat("entries have head_dim ", args.out.head_dim, ", state ", args.state.head_dim));
    }
  }
  if (args.count == 0) return absl::OkStatus();
  if (args.out.slots_per_page < 1 || (args.out.base == nullptr && args.out.page_count > 0)) {
    return refuse("the view that entries went to is empty");
  }
  if (args.pages.pages == nullptr || args.pages.rows < 1 || args.pages.row_stride < args.pages.pages_per_row) {
    return refuse(absl::StrCat("the page table has ", args.pages.rows, " rows of ", args.pages.pages_per_row, " ids at stride ",
                               args.pages.row_stride));
  }
  return absl::OkStatus();
}

absl::Status commit_state_ref(const CommitStateArgs& args) {
  if (absl::Status status = check_commit_state(args); !status.ok()) return status;
  if (absl::Status status = admit_commit_state(args); !status.ok()) return status;
  for (int32_t i = 0; i < args.count; ++i) {
    const StateCommit& commit = args.commits[i];
    StateHeader before;
    if (commit.record == -1 || !commit_fits(args, commit, &before)) continue;
    clear_rejected(args, commit, before);
    if (args.ratio == 1) continue;
    StateHeader after = before;
    after.next = after.committed = before.committed + commit.accepted;
    std::byte* record = state_record(args.state, commit.record);
    rebuild_record_ref(args.state, record, before, after, args.position_bias,
                       [&](int64_t position) { return carried_row(args.state, record, before, position); });
  }
  return absl::OkStatus();
}

}  // namespace needle
