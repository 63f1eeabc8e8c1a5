// store on the GPU, from raw rows and from pooled rows: every number of a raw row is read once, by the one group of lanes
// that pools it, and an entry stays in registers from there to its slot.
//
// What must stay true:
//  1. Entries and boundaries first, records after, in stream order: the first kernel reads the records as they were.
//  2. An entry's pool reads the same rows in the same order whether they are the call's or carried, so chunking leaves no
//     trace. Ratio 4: softmax over its 8 rows at once. Ratio 128: fold_row(), one row after the other.
//  3. A bad id leaves out that entry, or that sequence where the sequence itself names it: counted, status set.
#include <string>

#include "base/units.h"
#include "kernels/entry_chain.cuh"
#include "kernels/launch.cuh"
#include "kernels/store.h"
#include "kernels/store_device.cuh"

namespace needle {
namespace {

constexpr int kThreads = 128;
constexpr int kFoldThreads = 256;  // ratio 128: a thread two channels
constexpr int kWindowRows = 4;     // of input rows, that a group looks through for entries to finish

// --------------------------------------------------------------------------------------------------------- pooled rows

template <int kDims>
__global__ void __launch_bounds__(kThreads) store_pooled_kernel(const __grid_constant__ StorePooledArgs args) {
  using Row = RowOfLanes<kDims>;
  constexpr int kRows = kThreads / Row::kLanes;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / Row::kLanes;
  const bool there = index < args.count;
  Row row{};
  int64_t slot = kNoSlot;
  int64_t position = 0;
  if (there) {
    slot = args.slots[index];
    if (args.chain.component.rope != RopeStyle::kNone) position = args.positions[index];
    const void* from = device_row_at(args.rows, index);
#pragma unroll
    for (int t = 0; t < Row::kTurns; ++t) {
      if (Row::has(t)) load_octet(from, args.rows.element, 8 * Row::octet(t), row.x[t]);
    }
  }
  uint32_t status = 0;
  if (slot != kNoSlot && (slot < 0 || slot >= args.out.page_count * args.out.slots_per_page)) status = kStatusBadSlot;
  if (args.chain.component.rope != RopeStyle::kNone && (position < 0 || position >= args.chain.rope.positions)) {
    if (slot != kNoSlot && status == 0) status = kStatusBadPosition;
    position = 0;
  }
  if (status != 0 && Row::lane() == 0) {
    report_count(args.report, &OpReport::skipped_rows, 1);
    report_status(args.report, status);
  }
  const bool stored = slot != kNoSlot && status == 0;
  if (args.chain.component.rope == RopeStyle::kNone || args.chain.rope.positions > 0) {
    finish_row(args.chain, true, position, row);
  }
  if (stored && args.finished != nullptr) give_finished(row, args.finished + index * args.finished_stride);
  const DeviceSlot place = stored ? device_numbered_slot(args.out, slot) : DeviceSlot{};
  quantise_row(args.chain, row, place.data, place.scale);
}

// ------------------------------------------------------------------------------------------------------------ raw rows

// The sequence whose rows hold `row`, or -1. Sequences ascend by row_begin.
__device__ __forceinline__ int sequence_of_row(const StoreRowsArgs& args, int64_t row) {
  int low = 0;
  int high = args.sequence_count;  // the first that begins after `row` lies in [low, high]
  while (low < high) {
    const int middle = (low + high) / 2;
    if (args.sequences[middle].row_begin <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  // Padding sequences (row_count 0) may begin at the same row as the one that holds it.
  for (int s = low - 1; s >= 0; --s) {
    if (args.sequences[s].row_count == 0) continue;
    return row < args.sequences[s].row_begin + args.sequences[s].row_count ? s : -1;
  }
  return -1;
}

// The entry that a row completes, and all that is needed to make it.
struct EntryTask {
  bool there = false;  // something is to be computed
  StoreSequence sequence;
  StateHeader header;
  int64_t entry = 0;
  int64_t row = 0;
  DeviceSlot slot;
};

// All lanes of a group ask together; `reports` on one of them.
__device__ __forceinline__ EntryTask task_of_row(const StoreRowsArgs& args, int64_t row, bool reports) {
  EntryTask task;
  const int ratio = args.chain.component.ratio;
  const int s = row < args.rows ? sequence_of_row(args, row) : -1;
  if (s < 0) return task;
  task.sequence = args.sequences[s];
  task.row = row;
  if (!sequence_is_sound(args, task.sequence)) {
    if (ratio == 1 && reports) {  // with a ratio, update_records_kernel counts the sequence
      report_count(args.report, &OpReport::skipped_rows, 1);
      report_status(args.report, kStatusBadSlot);
    }
    return task;
  }
  const int64_t position = task.sequence.first_position + row - task.sequence.row_begin;
  if ((position + 1) % ratio != 0) return task;
  if (!device_sequence_fits(args, task.sequence, &task.header)) return task;
  task.entry = position / ratio;
  if (args.chain.component.rope != RopeStyle::kNone && task.entry * ratio >= args.chain.rope.positions) {
    if (reports) {
      report_count(args.report, &OpReport::skipped_rows, 1);
      report_status(args.report, kStatusBadPosition);
    }
    return task;
  }
  task.slot = device_entry_slot(args.out, args.pages, task.sequence.table_row, task.entry);
  if (task.slot.data == nullptr && reports) {
    report_count(args.report, &OpReport::skipped_rows, 1);
    report_status(args.report, task.slot.status);
  }
  task.there = task.slot.data != nullptr || args.finished != nullptr;
  return task;
}

__device__ __forceinline__ DeviceRow row_of_position(const StoreRowsArgs& args, const EntryTask& task, int64_t position) {
  return position < task.sequence.first_position ? device_carried_row(args.state, task.sequence.record, task.header.committed, position)
                                                 : device_call_row(args, task.sequence, position);
}

// Softmax over the 8 rows of a ratio-4 entry, one octet of channels. Scores and weights of all rows are in registers.
__device__ __forceinline__ void pool_octet(const StoreRowsArgs& args, const EntryTask& task, int dims, int octet, float (&x)[8]) {
  const int64_t first = task.entry * kOverlapRatio;
  float weight[kRowsPooledOverlap][8];
  float maximum[8];
  const void* kv[kRowsPooledOverlap];
  RowElement kv_element[kRowsPooledOverlap];
#pragma unroll
  for (int i = 0; i < 8; ++i) maximum[i] = kEmptyMaximum;
#pragma unroll
  for (int r = 0; r < kRowsPooledOverlap; ++r) {
    const int64_t position = first - kOverlapRatio + r;
    const int column = (r < kOverlapRatio ? 0 : dims) + 8 * octet;
    kv[r] = nullptr;
    kv_element[r] = RowElement::kFp32;
    if (position < 0) {  // group 0 has no group before it
#pragma unroll
      for (int i = 0; i < 8; ++i) weight[r][i] = -INFINITY;
      continue;
    }
    const DeviceRow raw = row_of_position(args, task, position);
    kv[r] = raw.kv;
    kv_element[r] = raw.kv_element;
    float bias[8];
    load_float_octet(args.position_bias + (r % kOverlapRatio) * 2 * dims + column, bias);
    load_octet(raw.gate, raw.gate_element, column, weight[r]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      weight[r][i] += bias[i];
      maximum[i] = fmaxf(maximum[i], weight[r][i]);
    }
  }
  float sum[8] = {};
  float weighted[8] = {};
#pragma unroll
  for (int r = 0; r < kRowsPooledOverlap; ++r) {
    if (kv[r] == nullptr) continue;
    float value[8];
    load_octet(kv[r], kv_element[r], (r < kOverlapRatio ? 0 : dims) + 8 * octet, value);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float e = exp2f((weight[r][i] - maximum[i]) * kLog2E);
      sum[i] += e;
      weighted[i] = __fmaf_rn(e, value[i], weighted[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = weighted[i] / sum[i];
}

// Ratios 1 and 4: a group of lanes looks through a window of rows.
template <int kDims>
__global__ void __launch_bounds__(kThreads) store_rows_kernel(const __grid_constant__ StoreRowsArgs args, int window_rows) {
  using Row = RowOfLanes<kDims>;
  constexpr int kGroups = kThreads / Row::kLanes;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t window = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / Row::kLanes;
  const int ratio = args.chain.component.ratio;
#pragma unroll 1
  for (int i = 0; i < window_rows; ++i) {
    const EntryTask task = task_of_row(args, window * window_rows + i, Row::lane() == 0);
    if (!__any_sync(0xFFFFFFFFu, task.there)) continue;
    Row row{};
    if (task.there) {
      const void* own = device_row_at(args.kv, task.row);
#pragma unroll
      for (int t = 0; t < Row::kTurns; ++t) {
        if (!Row::has(t)) continue;
        if (ratio == 1) {
          load_octet(own, args.kv.element, 8 * Row::octet(t), row.x[t]);
        } else {
          pool_octet(args, task, kDims, Row::octet(t), row.x[t]);
        }
      }
    }
    if (args.chain.component.rope == RopeStyle::kNone || args.chain.rope.positions > 0) {
      finish_row(args.chain, ratio > 1, task.there ? task.entry * ratio : 0, row);
    }
    if (task.there && args.finished != nullptr) give_finished(row, args.finished + task.row * args.finished_stride);
    quantise_row(args.chain, row, task.there ? task.slot.data : nullptr, task.slot.scale);
  }
}

// Ratio 128: a block an entry, a thread two channels, then one warp finishes the row.
template <int kDims>
__global__ void __launch_bounds__(kFoldThreads) fold_rows_kernel(const __grid_constant__ StoreRowsArgs args, int window_rows) {
  using Row = RowOfLanes<kDims>;
  __shared__ float pooled[kDims];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int ratio = args.chain.component.ratio;
#pragma unroll 1
  for (int i = 0; i < window_rows; ++i) {
    const EntryTask task = task_of_row(args, static_cast<int64_t>(blockIdx.x) * window_rows + i, threadIdx.x == 0);
    if (!task.there) continue;  // the same for the whole block
    const int64_t first = task.entry * ratio;
    const bool running = args.state.form == StateForm::kRunning && task.header.committed > first;
    const int64_t begin = running ? task.header.committed : first;
    const int64_t end = first + ratio;
    for (int c = 2 * static_cast<int>(threadIdx.x); c < kDims; c += 2 * kFoldThreads) {
      PoolPartial partial[2];
      if (running) {
        const float* carried = device_record_rows(args.state, task.sequence.record);
#pragma unroll
        for (int h = 0; h < 2; ++h) partial[h] = {carried[c + h], carried[kDims + c + h], carried[2 * kDims + c + h]};
      }
#pragma unroll 4
      for (int64_t position = begin; position < end; ++position) {
        const DeviceRow raw = row_of_position(args, task, position);
        const float2 bias = *reinterpret_cast<const float2*>(args.position_bias + position % ratio * kDims + c);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          fold_row(partial[h], row_number(raw.gate, raw.gate_element, c + h) + (h == 0 ? bias.x : bias.y),
                   row_number(raw.kv, raw.kv_element, c + h));
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) pooled[c + h] = pooled_value(partial[h]);
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // of 128 dimensions both half-warps compute, and the first writes
      Row row{};
#pragma unroll
      for (int t = 0; t < Row::kTurns; ++t) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (Row::has(t)) row.x[t][e] = pooled[8 * Row::octet(t) + e];
        }
      }
      const bool writes = threadIdx.x < Row::kLanes;
      if (args.chain.component.rope == RopeStyle::kNone || args.chain.rope.positions > 0) {
        finish_row(args.chain, true, first, row);
      }
      if (writes && args.finished != nullptr) give_finished(row, args.finished + task.row * args.finished_stride);
      quantise_row(args.chain, row, writes ? task.slot.data : nullptr, task.slot.scale);
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kFoldThreads) write_boundaries_kernel(const __grid_constant__ StoreRowsArgs args) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const StoreBoundary boundary = args.boundary_requests[blockIdx.x];
  if (boundary.boundary_record == -1) return;
  bool sound = boundary.boundary_record >= 0 && boundary.boundary_record < args.boundaries.count && boundary.sequence >= 0 &&
               boundary.sequence < args.sequence_count;
  EntryTask task;
  if (sound) {
    task.sequence = args.sequences[boundary.sequence];
    if (task.sequence.row_count == 0) return;
    sound = sequence_is_sound(args, task.sequence) && boundary.position > 0 && boundary.position % kOverlapRatio == 0 &&
            boundary.position >= task.sequence.first_position &&
            boundary.position <= task.sequence.first_position + task.sequence.row_count;
  }
  if (!sound) {
    if (threadIdx.x == 0) {
      report_count(args.report, &OpReport::skipped_rows, 1);
      report_status(args.report, kStatusBadSlot);
    }
    return;
  }
  if (!device_sequence_fits(args, task.sequence, &task.header)) return;
  const int dims = args.chain.component.head_dim;
  float* record = reinterpret_cast<float*>(args.boundaries.base + boundary.boundary_record * args.boundaries.stride);
  for (int j = 0; j < kOverlapRatio; ++j) {
    const DeviceRow row = row_of_position(args, task, boundary.position - kOverlapRatio + j);
    for (int c = threadIdx.x; c < dims; c += kFoldThreads) {
      record[2 * j * dims + c] = row_number(row.kv, row.kv_element, c);
      record[(2 * j + 1) * dims + c] = row_number(row.gate, row.gate_element, c);
    }
  }
}

__global__ void __launch_bounds__(kFoldThreads) update_records_kernel(const __grid_constant__ StoreRowsArgs args) {
  __shared__ StateHeader shared_header;
  __shared__ bool shared_fits;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const StoreSequence sequence = args.sequences[blockIdx.x];
  if (sequence.row_count == 0) return;
  const bool sound = sequence_is_sound(args, sequence);
  if (threadIdx.x == 0) {
    shared_fits = sound && device_sequence_fits(args, sequence, &shared_header);
    if (!shared_fits) {
      report_count(args.report, &OpReport::skipped_rows, sequence.row_count > 0 ? static_cast<uint64_t>(sequence.row_count) : 1u);
      report_status(args.report, sound ? kStatusStateMismatch : kStatusBadSlot);
    }
  }
  __syncthreads();
  if (!shared_fits) return;
  const StateHeader before = shared_header;
  StateHeader after = before;
  after.next += sequence.row_count;
  if (!args.speculative) after.committed = after.next;
  update_record_rows(args.state, sequence.record, before, after, args.position_bias,
                     [&](int64_t position) { return device_call_row(args, sequence, position); });
  if (threadIdx.x == 0) *reinterpret_cast<StateHeader*>(state_record(args.state, sequence.record)) = after;
}

absl::Status launch_entries(const StoreRowsArgs& args, cudaStream_t stream) {
  const int ratio = args.chain.component.ratio;
  const int dims = args.chain.component.head_dim;
  const int window = ratio == 1 ? 1 : kWindowRows;
  LaunchShape shape;
  if (ratio == 128) {
    shape.block = dim3(kFoldThreads);
    shape.grid = dim3(static_cast<unsigned>(div_ceil(args.rows, window)));
    return dims == 128 ? launch("store_rows", fold_rows_kernel<128>, shape, stream, args, window)
                       : launch("store_rows", fold_rows_kernel<512>, shape, stream, args, window);
  }
  shape.block = dim3(kThreads);
  const int groups = dims == 128 ? kThreads / 16 : kThreads / 32;
  shape.grid = dim3(static_cast<unsigned>(div_ceil(div_ceil(args.rows, window), groups)));
  switch (dims) {
    case 128: return launch("store_rows", store_rows_kernel<128>, shape, stream, args, window);
    case 512: return launch("store_rows", store_rows_kernel<512>, shape, stream, args, window);
    default: return launch("store_rows", store_rows_kernel<576>, shape, stream, args, window);
  }
}

// Rows that 16-byte loads may read.
absl::Status check_vectors(const char* what, const RowsView& rows) {
  const int64_t bytes = rows.row_stride * (rows.element == RowElement::kFp32 ? 4 : 2);
  if (reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && bytes % 16 == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(std::string("store: ") + what + " begins at or repeats every " + std::to_string(bytes) +
                                    " bytes; on a GPU both must be multiples of 16");
}

}  // namespace

absl::Status store_pooled_cuda(const StorePooledArgs& args, void* stream) {
  absl::Status possible = check_store_pooled(args);
  if (!possible.ok() || args.count == 0) return possible;
  absl::Status vectors = check_vectors("rows", args.rows);
  if (!vectors.ok()) return vectors;
  LaunchShape shape;
  shape.block = dim3(kThreads);
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  const int dims = args.chain.component.head_dim;
  shape.grid = dim3(static_cast<unsigned>(div_ceil(args.count, dims == 128 ? kThreads / 16 : kThreads / 32)));
  switch (dims) {
    case 128: return launch("store_pooled", store_pooled_kernel<128>, shape, cuda_stream, args);
    case 512: return launch("store_pooled", store_pooled_kernel<512>, shape, cuda_stream, args);
    default: return launch("store_pooled", store_pooled_kernel<576>, shape, cuda_stream, args);
  }
}

int64_t store_rows_cuda_scratch(const StoreRowsArgs&) { return 0; }

absl::Status store_rows_cuda(const StoreRowsArgs& args, void*, int64_t, void* stream) {
  absl::Status possible = check_store_rows(args);
  if (!possible.ok() || args.rows == 0 || args.sequence_count == 0) return possible;
  absl::Status kv_vectors = check_vectors("kv", args.kv);
  if (!kv_vectors.ok()) return kv_vectors;
  absl::Status gate_vectors = args.gate.data == nullptr ? absl::OkStatus() : check_vectors("gate", args.gate);
  if (!gate_vectors.ok()) return gate_vectors;
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  const int ratio = args.chain.component.ratio;
  absl::Status entries = launch_entries(args, cuda_stream);
  if (!entries.ok()) return entries;
  LaunchShape shape;
  shape.block = dim3(kFoldThreads);
  if (args.boundary_count > 0) {
    shape.grid = dim3(static_cast<unsigned>(args.boundary_count));
    absl::Status written = launch("store_rows", write_boundaries_kernel, shape, cuda_stream, args);
    if (!written.ok()) return written;
  }
  if (ratio == 1) return absl::OkStatus();
  shape.grid = dim3(static_cast<unsigned>(args.sequence_count));
  return launch("store_rows", update_records_kernel, shape, cuda_stream, args);
}

}  // namespace needle
