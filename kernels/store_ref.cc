#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/compressor_state_ref.h"
#include "kernels/entry_chain_ref.h"
#include "kernels/store.h"
#include "kernels/store_host.h"

namespace needle {
namespace {

absl::Status refuse(absl::string_view what) { return absl::InvalidArgumentError(absl::StrCat("store: ", what)); }

absl::Status check_rows(absl::string_view name, const RowsView& rows, int64_t columns) {
  if (rows.data == nullptr) return refuse(absl::StrCat(name, " rows are null"));
  if (rows.row_stride < columns) {
    return refuse(absl::StrCat(name, " row stride is ", rows.row_stride, " elements, a row has ", columns));
  }
  if (rows.element != RowElement::kBf16 && rows.element != RowElement::kFp32) {
    return refuse(absl::StrCat(name, " rows have element ", static_cast<int>(rows.element), ", must be bf16 or fp32"));
  }
  return absl::OkStatus();
}

absl::Status check_out(const Component& component, const MutableLayerView& out) {
  if (out.element != component.element || out.scale != component.scale || out.head_dim != component.head_dim) {
    return refuse(absl::StrCat("the view is ", name_of(out.element), "/", name_of(out.scale), " with head_dim ", out.head_dim,
                               ", the component ", name_of(component.element), "/", name_of(component.scale), " with head_dim ",
                               component.head_dim));
  }
  if (out.page_count < 0 || out.slots_per_page < 1 || out.slots_per_page > kSlotsPerPageMax) {
    return refuse(
        absl::StrCat("the view has ", out.page_count, " pages of ", out.slots_per_page, " slots; slots a page are 1..", kSlotsPerPageMax));
  }
  if (out.base == nullptr && out.page_count > 0) return refuse("the view's base is null");
  const int64_t bytes = layer_page_bytes(out.element, out.head_dim, out.slots_per_page);
  if (out.page_count > 1 && out.page_stride < bytes) {
    return refuse(absl::StrCat("page stride ", out.page_stride, " is below the layer's ", bytes, " bytes"));
  }
  return absl::OkStatus();
}

absl::Status check_chain(const EntryChain& chain, const MutableLayerView& out, bool any_rows) {
  const Component& component = chain.component;
  const bool index_k = component.kind == ComponentKind::kIndexK;
  if (!index_k && component.kind != ComponentKind::kMainKv && component.kind != ComponentKind::kWindowKv) {
    return refuse(absl::StrCat("entries of ", name_of(component.kind), " are not stored, only index_k, main_kv, window_kv"));
  }
  const int dims = component.head_dim;
  if (index_k ? dims != 128 : dims != 512 && dims != 576) {
    return refuse(absl::StrCat(name_of(component.kind), " has head_dim ", dims, ", must be ", index_k ? "128" : "512 or 576"));
  }
  bool fits = false;
  switch (component.element) {
    case ElementFormat::kBf16: fits = component.scale == ScaleKind::kNone; break;
    case ElementFormat::kFp8: fits = index_k && component.scale != ScaleKind::kNone; break;
    case ElementFormat::kFp4: fits = index_k && component.scale == ScaleKind::kPowerOfTwo; break;
    case ElementFormat::kFp8DsMla: fits = dims == 512 && component.scale == ScaleKind::kPowerOfTwo; break;
    case ElementFormat::kFp8V32: fits = dims == 576 && component.scale == ScaleKind::kAmax; break;
    case ElementFormat::kFp32Rows: break;
  }
  if (!fits) {
    return absl::UnimplementedError(absl::StrCat("store: ", name_of(component.kind), " in ", name_of(component.element), " with scale ",
                                                 name_of(component.scale), " and head_dim ", dims, " is no format of this service"));
  }
  if (component.hadamard && !index_k) return refuse("the Hadamard rotation is index_k's alone");
  switch (chain.rounding) {
    case RoundingMode::kOnce:
    case RoundingMode::kRefV4: break;
    case RoundingMode::kVllm:
      if (component.element == ElementFormat::kFp8 && component.scale != ScaleKind::kPowerOfTwo) {
        return absl::UnimplementedError(
            absl::StrCat("store: rounding mode vllm has power_of_two scales for fp8 index_k, not ", name_of(component.scale)));
      }
      break;
    default: return refuse(absl::StrCat("rounding mode ", static_cast<int>(chain.rounding), " is none of 0..2"));
  }
  if (chain.norm != NormKind::kNone && chain.norm != NormKind::kRms && chain.norm != NormKind::kLayer) {
    return refuse(absl::StrCat("norm kind ", static_cast<int>(chain.norm), " is none of 0..2"));
  }
  if (chain.norm != NormKind::kNone && chain.norm_weight == nullptr) return refuse("norm_weight is null");
  if (chain.norm == NormKind::kLayer && chain.norm_bias == nullptr) return refuse("norm_bias is null, LayerNorm has one");
  if (chain.norm != NormKind::kNone && !(chain.norm_epsilon >= 0)) {
    return refuse(absl::StrCat("norm_epsilon is ", chain.norm_epsilon, ", must be at least 0"));
  }
  if (component.rope != RopeStyle::kNone && any_rows &&
      (chain.rope.cos_sin == nullptr || chain.rope.positions < 1 || chain.rope.positions > kRopePositionsMax)) {
    return refuse(absl::StrCat("the RoPE table is ", chain.rope.cos_sin == nullptr ? "null" : "given", " with ", chain.rope.positions,
                               " positions; 1..", kRopePositionsMax, " are possible"));
  }
  return check_out(component, out);
}

// Softmax over the rows in doubles, in two passes.
double pool_channel(const std::vector<RawRow>& rows, const std::vector<const float*>& biases, const std::vector<int>& first_columns,
                    int channel) {
  double maximum = -std::numeric_limits<double>::infinity();
  std::vector<double> scores(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    const int column = first_columns[r] + channel;
    scores[r] = static_cast<double>(raw_value(rows[r].gate, rows[r].gate_element, column)) + static_cast<double>(biases[r][column]);
    if (std::isnan(scores[r])) return scores[r];
    maximum = std::max(maximum, scores[r]);
  }
  double sum = 0;
  double weighted = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    const double weight = std::exp(scores[r] - maximum);
    sum += weight;
    weighted += weight * static_cast<double>(raw_value(rows[r].kv, rows[r].kv_element, first_columns[r] + channel));
  }
  return weighted / sum;
}

// A running record carries fp32, so with it pooling is the fold itself, from the first row to the last: doubles would
// make the bits depend on where the chunks were cut.
double fold_channel(const std::vector<RawRow>& rows, const std::vector<const float*>& biases, const float* carried, int dims, int channel) {
  PoolPartial partial;
  if (carried != nullptr) partial = {carried[channel], carried[dims + channel], carried[2 * dims + channel]};
  for (size_t r = 0; r < rows.size(); ++r) {
    fold_row(partial, raw_value(rows[r].gate, rows[r].gate_element, channel) + biases[r][channel],
             raw_value(rows[r].kv, rows[r].kv_element, channel));
  }
  return static_cast<double>(pooled_value(partial));
}

void pool_entry(const StoreRowsArgs& args, const StoreSequence& sequence, const StateHeader& header, int64_t entry, double* x) {
  const int ratio = args.chain.component.ratio;
  const int dims = args.chain.component.head_dim;
  const int columns = row_halves(ratio) * dims;
  const int64_t first = entry * ratio;
  if (ratio == 1) {
    const RawRow row = raw_row_of(args, sequence, header, entry);
    for (int c = 0; c < dims; ++c) x[c] = static_cast<double>(raw_value(row.kv, row.kv_element, c));
    return;
  }
  std::vector<RawRow> rows;
  std::vector<const float*> biases;
  std::vector<int> first_columns;
  const auto take = [&](int64_t position, int first_column) {
    rows.push_back(raw_row_of(args, sequence, header, position));
    biases.push_back(args.position_bias + position % ratio * columns);
    first_columns.push_back(first_column);
  };
  const float* carried = nullptr;
  if (ratio == kOverlapRatio) {
    for (int j = 0; j < ratio && entry > 0; ++j) take(first - ratio + j, 0);
    for (int j = 0; j < ratio; ++j) take(first + j, dims);
  } else {
    int64_t begin = first;
    if (args.state.form == StateForm::kRunning && header.committed > first) {
      carried = record_rows(state_record(args.state, sequence.record));
      begin = header.committed;
    }
    for (int64_t position = begin; position < first + ratio; ++position) take(position, 0);
  }
  const bool running = ratio != kOverlapRatio && args.state.form == StateForm::kRunning;
  for (int c = 0; c < dims; ++c) {
    x[c] = running ? fold_channel(rows, biases, carried, dims, c) : pool_channel(rows, biases, first_columns, c);
  }
}

}  // namespace

absl::Status check_store_rows(const StoreRowsArgs& args) {
  const Component& component = args.chain.component;
  if (args.report == nullptr) return refuse("the report is null; it says which sequences were left out");
  if (args.rows < 0 || args.sequence_count < 0 || args.boundary_count < 0) {
    return refuse(
        absl::StrCat("counts are negative: rows ", args.rows, ", sequences ", args.sequence_count, ", boundaries ", args.boundary_count));
  }
  if (component.ratio != 1 && component.ratio != kOverlapRatio && component.ratio != 128) {
    return absl::UnimplementedError(absl::StrCat("store: ratio is ", component.ratio, ", must be 1, 4 or 128"));
  }
  const bool any = args.rows > 0 && args.sequence_count > 0;
  if (absl::Status status = check_chain(args.chain, args.out, any); !status.ok()) return status;
  if (component.ratio > 1 && component.head_dim == 576) return refuse("head_dim 576 has no compressor: ratio must be 1");
  const int64_t columns = int64_t{row_halves(component.ratio)} * component.head_dim;
  if (component.ratio > 1) {
    const StateView& state = args.state;
    if (state.ratio != component.ratio || state.head_dim != component.head_dim) {
      return refuse(absl::StrCat("state is of ratio ", state.ratio, " and head_dim ", state.head_dim, ", the component of ",
                                 component.ratio, " and ", component.head_dim));
    }
    if (absl::Status status = check_state_view(state); !status.ok()) return status;
    if (args.speculative && state.speculative_rows == 0) {
      return refuse("a speculative store needs a state format with speculative_rows > 0");
    }
  }
  if (args.boundary_count > 0) {
    if (component.ratio != kOverlapRatio) return refuse("boundary records are ratio 4's alone");
    if (args.speculative) return refuse("a speculative store writes no boundary record: its tokens may be taken back");
    if (args.boundary_requests == nullptr || args.boundaries.base == nullptr) return refuse("boundaries are null");
    if (args.boundaries.stride < boundary_record_bytes(component.head_dim)) {
      return refuse(absl::StrCat("boundary stride ", args.boundaries.stride, " is below a record's ",
                                 boundary_record_bytes(component.head_dim), " bytes"));
    }
  }
  if (!any) return absl::OkStatus();
  if (args.sequences == nullptr) return refuse("sequences are null");
  if (args.pages.pages == nullptr || args.pages.rows < 1 || args.pages.pages_per_row < 0 ||
      args.pages.row_stride < args.pages.pages_per_row) {
    return refuse(absl::StrCat("the page table has ", args.pages.rows, " rows of ", args.pages.pages_per_row, " ids at stride ",
                               args.pages.row_stride, (args.pages.pages == nullptr ? ", null" : "")));
  }
  if (absl::Status status = check_rows("kv", args.kv, columns); !status.ok()) return status;
  if (component.ratio > 1) {
    if (absl::Status status = check_rows("gate", args.gate, columns); !status.ok()) return status;
    if (args.position_bias == nullptr) return refuse("position_bias is null");
  }
  if (args.finished != nullptr && args.finished_stride < component.head_dim) {
    return refuse(absl::StrCat("finished_stride is ", args.finished_stride, ", an entry has ", component.head_dim));
  }
  return absl::OkStatus();
}

absl::Status store_rows_ref(const StoreRowsArgs& args) {
  if (absl::Status status = check_store_rows(args); !status.ok()) return status;
  if (args.rows == 0) return absl::OkStatus();
  if (absl::Status status = admit_store_rows(args); !status.ok()) return status;
  const int ratio = args.chain.component.ratio;
  const int dims = args.chain.component.head_dim;
  for (int32_t s = 0; s < args.sequence_count; ++s) {
    const StoreSequence& sequence = args.sequences[s];
    StateHeader header;
    if (sequence.row_count == 0 || !sequence_fits(args, sequence, &header)) continue;

    const int64_t entry_end = (sequence.first_position + sequence.row_count) / ratio;
    for (int64_t entry = sequence.first_position / ratio; entry < entry_end; ++entry) {
      std::array<double, kStoreHeadDimMax> x;
      pool_entry(args, sequence, header, entry, x.data());
      finish_entry_ref(args.chain, ratio > 1, entry * ratio, x.data());
      if (args.finished != nullptr) {
        const int64_t row = sequence.row_begin + entry * ratio + ratio - 1 - sequence.first_position;
        for (int c = 0; c < dims; ++c) {
          args.finished[row * args.finished_stride + c] = static_cast<float>(x[static_cast<size_t>(c)]);
        }
      }
      const EntrySlot slot = entry_slot(args.out, args.pages, sequence.table_row, entry);
      if (slot.data != nullptr) quantise_entry_ref(args.chain, x.data(), slot.data, slot.scale);
    }

    for (int32_t b = 0; b < args.boundary_count; ++b) {
      const StoreBoundary& boundary = args.boundary_requests[b];
      if (boundary.sequence != s || boundary.boundary_record == -1) continue;
      float* record = reinterpret_cast<float*>(args.boundaries.base + boundary.boundary_record * args.boundaries.stride);
      for (int j = 0; j < kOverlapRatio; ++j) {
        const RawRow row = raw_row_of(args, sequence, header, boundary.position - kOverlapRatio + j);
        for (int c = 0; c < dims; ++c) {
          record[2 * j * dims + c] = raw_value(row.kv, row.kv_element, c);
          record[(2 * j + 1) * dims + c] = raw_value(row.gate, row.gate_element, c);
        }
      }
    }

    if (ratio > 1) {
      rebuild_record_ref(args.state, state_record(args.state, sequence.record), header, header_after(args, sequence, header),
                         args.position_bias, [&](int64_t position) { return raw_row_of(args, sequence, header, position); });
    }
  }
  return absl::OkStatus();
}

absl::Status check_store_pooled(const StorePooledArgs& args) {
  if (args.report == nullptr) return refuse("the report is null");
  if (args.count < 0) return refuse(absl::StrCat("count is ", args.count));
  if (absl::Status status = check_chain(args.chain, args.out, args.count > 0); !status.ok()) return status;
  if (args.count == 0) return absl::OkStatus();
  if (absl::Status status = check_rows("pooled", args.rows, args.chain.component.head_dim); !status.ok()) return status;
  if (args.slots == nullptr) return refuse("slots are null");
  if (args.positions == nullptr && args.chain.component.rope != RopeStyle::kNone) return refuse("positions are null");
  if (args.finished != nullptr && args.finished_stride < args.chain.component.head_dim) {
    return refuse(absl::StrCat("finished_stride is ", args.finished_stride, ", an entry has ", args.chain.component.head_dim));
  }
  return absl::OkStatus();
}

absl::Status store_pooled_ref(const StorePooledArgs& args) {
  if (absl::Status status = check_store_pooled(args); !status.ok()) return status;
  if (absl::Status status = admit_store_pooled(args); !status.ok()) return status;
  const int dims = args.chain.component.head_dim;
  for (int64_t row = 0; row < args.count; ++row) {
    if (args.slots[row] == kNoSlot) continue;
    std::array<double, kStoreHeadDimMax> x;
    for (int c = 0; c < dims; ++c) x[static_cast<size_t>(c)] = row_value_ref(args.rows, row, c);
    finish_entry_ref(args.chain, true, args.positions == nullptr ? 0 : args.positions[row], x.data());
    for (int c = 0; c < dims && args.finished != nullptr; ++c) {
      args.finished[row * args.finished_stride + c] = static_cast<float>(x[static_cast<size_t>(c)]);
    }
    const EntrySlot slot = numbered_slot(args.out, args.slots[row]);
    quantise_entry_ref(args.chain, x.data(), slot.data, slot.scale);
  }
  return absl::OkStatus();
}

}  // namespace needle
