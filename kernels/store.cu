// store on the GPU, from raw rows and from pooled rows: every number of a raw row is read once, by the one group of lanes
// that pools it, and an entry stays in registers from there to its slot.
//
// Many rows of ratio 4 (prefill): a block has a stretch of rows, looks its sequence up once, finds where its entries go with
// one thread each, and copies each octet of the next entry to shared memory while it works on the one before. Few rows
// (decode), rows of several sequences in one stretch, and entries that reach back into the record go a general way, row by
// row. docs/kernels-performance.md has the figures.
//
// What must stay true:
//  1. Entries and boundaries first, records after, in stream order: the first kernel reads the records as they were.
//  2. An entry's pool reads the same rows in the same order whether they are the call's or carried, so chunking leaves no
//     trace. Ratio 4: softmax over its 8 rows at once. Ratio 128: fold_row(), one row after the other.
//  3. A bad id leaves out that entry, or that sequence where the sequence itself names it: counted, status set.
#include <algorithm>
#include <string>

#include "base/units.h"
#include "kernels/entry_chain.cuh"
#include "kernels/launch.cuh"
#include "kernels/store.h"
#include "kernels/store_device.cuh"
#include "kernels/store_plan.h"

namespace needle {
namespace {

constexpr int kThreads = 128;
constexpr int kFoldThreads = 256;  // ratio 128: a thread two channels
constexpr int kRecordThreads = 512;
constexpr int kWindowRows = 4;       // of input rows, one of which completes an entry of ratio 4
constexpr int kPooledTurns = 4;      // rows that a group of lanes finishes, one after the other
constexpr int kStretchTurnsMax = 8;  // the same of entries

// --------------------------------------------------------------------------------------------------------- pooled rows

// Where a row of a block goes. Found by one thread a row, for the lanes that finish it.
struct RowPlace {
  std::byte* data;  // null: it is not written
  std::byte* scale;
  int64_t position;  // for RoPE, inside the table
};

// A block's rows lie side by side in turns, so that the next turn's row is on its way while one is finished.
template <int kDims>
__global__ void __launch_bounds__(kThreads, kDims == 128 ? 8 : 4)
    store_pooled_kernel(const __grid_constant__ StorePooledArgs args, int turns) {
  using Row = RowOfLanes<kDims>;
  constexpr int kRows = kThreads / Row::kLanes;
  __shared__ RowPlace places[kRows * kPooledTurns];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const bool rotates = args.chain.component.rope != RopeStyle::kNone;
  const int64_t block_first = static_cast<int64_t>(blockIdx.x) * kRows * turns;
  const int64_t first = block_first + threadIdx.x / Row::kLanes;
  const auto load_row = [&](int64_t index) {
    Row row{};
    if (index < args.count) {
      const void* from = device_row_at(args.rows, index);
#pragma unroll
      for (int t = 0; t < Row::kTurns; ++t) {
        if (Row::has(t)) load_octet(from, args.rows.element, 8 * Row::octet(t), row.x[t]);
      }
    }
    return row;
  };
  Row next = load_row(first);
  if (static_cast<int>(threadIdx.x) < kRows * turns) {
    RowPlace place{nullptr, nullptr, 0};
    const int64_t index = block_first + threadIdx.x;
    const int64_t slot = index < args.count ? args.slots[index] : kNoSlot;
    if (rotates && index < args.count) place.position = args.positions[index];
    uint32_t status = 0;
    if (slot != kNoSlot && (slot < 0 || slot >= args.out.page_count * args.out.slots_per_page)) status = kStatusBadSlot;
    if (rotates && (place.position < 0 || place.position >= args.chain.rope.positions)) {
      if (slot != kNoSlot && status == 0) status = kStatusBadPosition;
      place.position = 0;
    }
    if (status != 0) {
      report_count(args.report, &OpReport::skipped_rows, 1);
      report_status(args.report, status);
    } else if (slot != kNoSlot) {
      const DeviceSlot at = device_numbered_slot(args.out, slot);
      place.data = at.data;
      place.scale = at.scale;
    }
    places[threadIdx.x] = place;
  }
  const bool finishes = !rotates || args.chain.rope.positions > 0;
  ChainOperands<kDims> operands{};
  operands.load_weights(args.chain);
  __syncthreads();
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const RowPlace place = places[turn * kRows + static_cast<int>(threadIdx.x) / Row::kLanes];
    const int64_t index = first + turn * kRows;
    Row row = next;
    if (finishes) operands.load_angles(args.chain, place.position);
    if (turn + 1 < turns) next = load_row(index + kRows);
    if (finishes) finish_row(args.chain, operands, true, place.position, row);
    if (place.data != nullptr && args.finished != nullptr) give_finished(row, args.finished + index * args.finished_stride);
    quantise_row(args.chain, row, place.data, place.scale);
  }
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
  const int s = row >= 0 && row < args.rows ? sequence_of_row(args, row) : -1;
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

// e^(weight - maximum), with the maximum given as its product with -log2 e. Never above 1 but for rounding.
__device__ __forceinline__ float share_of_weight(float weight, float minus_maximum) {
  float share;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(__fmaf_rn(weight, kLog2E, minus_maximum)));
  return share;
}

// Softmax over the 8 rows of a ratio-4 entry, one octet of channels: weights are in, values are asked for row by row.
// `value_of(r, value)` gives false for a row that does not exist.
template <class ValueOf>
__device__ __forceinline__ void pool_weighted(const float (&weight)[kRowsPooledOverlap][8], const ValueOf& value_of, float (&x)[8]) {
  float minus_maximum[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float maximum = kEmptyMaximum;
#pragma unroll
    for (int r = 0; r < kRowsPooledOverlap; ++r) maximum = fmaxf(maximum, weight[r][i]);
    minus_maximum[i] = -(maximum * kLog2E);
  }
  float sum[8] = {};
  float weighted[8] = {};
#pragma unroll
  for (int r = 0; r < kRowsPooledOverlap; ++r) {
    float value[8];
    if (!value_of(r, value)) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float share = share_of_weight(weight[r][i], minus_maximum[i]);
      sum[i] += share;
      weighted[i] = __fmaf_rn(share, value[i], weighted[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __fdividef(weighted[i], sum[i]);
}

// Rows from anywhere, of any format.
__device__ __forceinline__ void pool_octet(const StoreRowsArgs& args, const EntryTask& task, int dims, int octet, float (&x)[8]) {
  const int64_t first = task.entry * kOverlapRatio;
  float weight[kRowsPooledOverlap][8];
  const void* kv[kRowsPooledOverlap];
  RowElement kv_element[kRowsPooledOverlap];
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
    for (int i = 0; i < 8; ++i) weight[r][i] += bias[i];
  }
  const auto value_of = [&](int r, float(&value)[8]) {
    if (kv[r] == nullptr) return false;
    load_octet(kv[r], kv_element[r], (r < kOverlapRatio ? 0 : dims) + 8 * octet, value);
    return true;
  };
  pool_weighted(weight, value_of, x);
}

// One octet of channels of the 8 rows behind an entry where all are the call's own and of one element format: copied to
// this thread's own places in shared memory while it works on the octet before, then pooled to the same numbers in the
// same order. Blocks that all loaded and then all computed would leave memory idle half of the time.
template <RowElement kElement>
struct OctetsOfCall {
  static constexpr int kVectors = kElement == RowElement::kBf16 ? 1 : 2;  // 16-byte vectors an octet
  static constexpr int kBytes = kElement == RowElement::kBf16 ? 2 : 4;
  static constexpr int kSharedBytes = 2 * kRowsPooledOverlap * kVectors * 16 * kThreads;  // of a block
  uint4 gate[kRowsPooledOverlap][kVectors];
  uint4 kv[kRowsPooledOverlap][kVectors];

  // Without a group before, the first four rows are not looked at.
  __device__ __forceinline__ static void request(const StoreRowsArgs& args, uint32_t own, int64_t first_row, bool group_before, int dims,
                                                 int octet) {
    const std::byte* kv_from = static_cast<const std::byte*>(args.kv.data) + (first_row * args.kv.row_stride + 8 * octet) * kBytes;
    const std::byte* gate_from = static_cast<const std::byte*>(args.gate.data) + (first_row * args.gate.row_stride + 8 * octet) * kBytes;
#pragma unroll
    for (int r = 0; r < kRowsPooledOverlap; ++r) {
      const int column = (r < kOverlapRatio ? 0 : dims) * kBytes;
      if (r >= kOverlapRatio || group_before) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          copy_vector(own + (2 * r * kVectors + v) * 16 * kThreads, gate_from + column + 16 * v);
          copy_vector(own + ((2 * r + 1) * kVectors + v) * 16 * kThreads, kv_from + column + 16 * v);
        }
      }
      gate_from += args.gate.row_stride * kBytes;
      kv_from += args.kv.row_stride * kBytes;
    }
  }
  __device__ __forceinline__ static void copy_vector(uint32_t to, const std::byte* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  }
  // What was requested, into registers; the places are free for the next request then.
  __device__ __forceinline__ void take(uint32_t own, bool group_before) {
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int r = 0; r < kRowsPooledOverlap; ++r) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        gate[r][v] = shared_vector(own + (2 * r * kVectors + v) * 16 * kThreads);
        kv[r][v] = shared_vector(own + ((2 * r + 1) * kVectors + v) * 16 * kThreads);
      }
    }
    if (group_before) return;
    constexpr uint32_t kNoWeight = kElement == RowElement::kBf16 ? 0xFF80FF80u : 0xFF800000u;  // minus infinity
#pragma unroll
    for (int r = 0; r < kOverlapRatio; ++r) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        gate[r][v] = uint4{kNoWeight, kNoWeight, kNoWeight, kNoWeight};
        kv[r][v] = uint4{0, 0, 0, 0};
      }
    }
  }
  __device__ __forceinline__ static uint4 shared_vector(uint32_t from) {
    uint4 vector;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w) : "r"(from));
    return vector;
  }
  __device__ __forceinline__ static void widen(const uint4 (&raw)[kVectors], float (&out)[8]) {
    if constexpr (kElement == RowElement::kBf16) {
      widen_bf16_octet(raw[0], out);
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        out[4 * v] = __uint_as_float(raw[v].x);
        out[4 * v + 1] = __uint_as_float(raw[v].y);
        out[4 * v + 2] = __uint_as_float(raw[v].z);
        out[4 * v + 3] = __uint_as_float(raw[v].w);
      }
    }
  }
  // `bias`: [8 rows][2 halves of an octet][octets] vectors in shared memory, each half's vectors side by side.
  __device__ __forceinline__ void pool(const float4* bias, int dims, int octet, float (&x)[8]) const {
    float weight[kRowsPooledOverlap][8];
#pragma unroll
    for (int r = 0; r < kRowsPooledOverlap; ++r) {
      widen(gate[r], weight[r]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 of_row = bias[(2 * r + half) * (dims / 8) + octet];
        weight[r][4 * half] += of_row.x;
        weight[r][4 * half + 1] += of_row.y;
        weight[r][4 * half + 2] += of_row.z;
        weight[r][4 * half + 3] += of_row.w;
      }
    }
    const auto value_of = [&](int r, float(&value)[8]) {
      widen(kv[r], value);
      return true;
    };
    pool_weighted(weight, value_of, x);
  }
};

// From a pooled (or, with ratio 1, the only) row to its slot. Whole warps call it.
template <int kDims>
__device__ __forceinline__ void finish_entry(const StoreRowsArgs& args, const ChainOperands<kDims>& operands, const EntryTask& task,
                                             RowOfLanes<kDims>& row) {
  const int ratio = args.chain.component.ratio;
  if (args.chain.component.rope == RopeStyle::kNone || args.chain.rope.positions > 0) {
    finish_row(args.chain, operands, ratio > 1, task.there ? task.entry * ratio : 0, row);
  }
  if (task.there && args.finished != nullptr) give_finished(row, args.finished + task.row * args.finished_stride);
  quantise_row(args.chain, row, task.there ? task.slot.data : nullptr, task.slot.scale);
}

// Ratios 1 and 4, rows of any sequences and formats: a group of lanes looks through a window of rows.
template <int kDims>
__device__ __forceinline__ void store_window(const StoreRowsArgs& args, int64_t first_row, int count) {
  using Row = RowOfLanes<kDims>;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const EntryTask task = task_of_row(args, first_row + i, Row::lane() == 0);
    if (!__any_sync(0xFFFFFFFFu, task.there)) continue;
    ChainOperands<kDims> operands{};
    operands.load_weights(args.chain);
    if (args.chain.rope.positions > 0) operands.load_angles(args.chain, task.there ? task.entry * args.chain.component.ratio : 0);
    Row row{};
    if (task.there) {
      const void* own = device_row_at(args.kv, task.row);
#pragma unroll
      for (int t = 0; t < Row::kTurns; ++t) {
        if (!Row::has(t)) continue;
        if (args.chain.component.ratio == 1) {
          load_octet(own, args.kv.element, 8 * Row::octet(t), row.x[t]);
        } else {
          pool_octet(args, task, kDims, Row::octet(t), row.x[t]);
        }
      }
    }
    finish_entry(args, operands, task, row);
  }
}

template <int kDims>
__device__ __noinline__ void store_window_out_of_line(const StoreRowsArgs& args, int64_t first_row) {
  store_window<kDims>(args, first_row, kWindowRows);
}

// One row a group of lanes, or none (-1).
template <int kDims>
__device__ __noinline__ void store_row_out_of_line(const StoreRowsArgs& args, int64_t row) {
  store_window<kDims>(args, row, 1);
}

template <int kDims>
__global__ void __launch_bounds__(kThreads) store_rows_kernel(const __grid_constant__ StoreRowsArgs args, int window_rows) {
  constexpr int kGroups = kThreads / RowOfLanes<kDims>::kLanes;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t window = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / RowOfLanes<kDims>::kLanes;
  store_window<kDims>(args, window * window_rows, window_rows);
}

// What a block of store_stretch_kernel knows of its rows.
struct Stretch {
  int64_t first_position;  // of its sequence's rows in this call
  int64_t to_position;     // position of a row = row + this
  int64_t end;             // of its rows
  int32_t table_row;
};

// Ratio 4, many rows, kv and gate of one format: a block has a stretch of rows that nearly always are one sequence's, which
// it looks up once; one thread an entry finds where that goes, and a group of lanes pools and finishes it. Blocks with rows
// of several sequences go the general way.
template <int kDims, RowElement kElement>
__global__ void __launch_bounds__(kThreads, kElement == RowElement::kBf16 && kDims == 128 ? 4 : 3)
    store_stretch_kernel(const __grid_constant__ StoreRowsArgs args, int turns) {
  using Row = RowOfLanes<kDims>;
  constexpr int kGroups = kThreads / Row::kLanes;
  __shared__ Stretch stretch;
  __shared__ int kind;  // 1: the stretch is one sequence's; 0: it is not; -1: it is, and is left out
  __shared__ RowPlace places[kGroups * kStretchTurnsMax];
  __shared__ float4 bias[2 * kRowsPooledOverlap * Row::kOctets];
  extern __shared__ uint4 row_octets[];
  const uint32_t own_octets = static_cast<uint32_t>(__cvta_generic_to_shared(row_octets + threadIdx.x));
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * (kGroups * kWindowRows) * turns;
  if (threadIdx.x == 0) {
    const int64_t end = min(args.rows, begin + (kGroups * kWindowRows) * turns);
    const int s = sequence_of_row(args, begin);
    kind = 0;
    if (s >= 0) {
      const StoreSequence sequence = args.sequences[s];
      if (end <= sequence.row_begin + sequence.row_count) {
        StateHeader header;
        kind = sequence_is_sound(args, sequence) && device_sequence_fits(args, sequence, &header) ? 1 : -1;
        stretch = {sequence.first_position, sequence.first_position - sequence.row_begin, end, sequence.table_row};
      }
    }
  }
  __syncthreads();
  if (kind < 0) return;
  const int group = static_cast<int>(threadIdx.x) / Row::kLanes;
  if (kind == 0) {
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      store_window_out_of_line<kDims>(args, begin + (turn * kGroups + group) * kWindowRows);
    }
    return;
  }
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kRowsPooledOverlap * Row::kOctets; i += kThreads) {
    const int r = i / (2 * Row::kOctets);
    const int half = i / Row::kOctets % 2;
    const int column = (r < kOverlapRatio ? 0 : kDims) + 8 * (i % Row::kOctets) + 4 * half;
    bias[i] = *reinterpret_cast<const float4*>(args.position_bias + (r % kOverlapRatio) * 2 * kDims + column);
  }
  // The one row of a window that completes an entry is the same one in all of them.
  const int64_t first_row = begin + 3 - ((stretch.to_position + begin) & 3);
  const int64_t first_entry = (stretch.to_position + first_row) / kOverlapRatio;
  // From this entry on, and in entry 0, no row is carried. The few others reach back into the record: they come last.
  const int64_t whole_from = (stretch.first_position + kOverlapRatio - 1) / kOverlapRatio + 1;
  const auto is_whole = [&](int64_t entry) { return entry >= whole_from || (entry == 0 && stretch.first_position == 0); };
  const auto entry_at = [&](int turn) { return first_entry + turn * kGroups + group; };
  const auto row_at = [&](int turn) { return first_row + static_cast<int64_t>(turn * kGroups + group) * kWindowRows; };
  const auto request = [&](int turn, int t) {
    if (turn < turns && row_at(turn) < stretch.end && is_whole(entry_at(turn))) {
      OctetsOfCall<kElement>::request(args, own_octets, row_at(turn) - (kRowsPooledOverlap - 1), entry_at(turn) > 0, kDims, Row::octet(t));
    }
  };
  request(0, 0);
  if (static_cast<int>(threadIdx.x) < kGroups * turns) {
    RowPlace place{nullptr, nullptr, 0};
    const int64_t entry = first_entry + threadIdx.x;
    const bool rotates = args.chain.component.rope != RopeStyle::kNone;
    uint32_t status = 0;
    if (first_row + static_cast<int64_t>(threadIdx.x) * kWindowRows < stretch.end && is_whole(entry)) {
      if (rotates && entry * kOverlapRatio >= args.chain.rope.positions) {
        status = kStatusBadPosition;
      } else {
        place.position = entry * kOverlapRatio;
        const DeviceSlot slot = device_entry_slot(args.out, args.pages, stretch.table_row, entry);
        place.data = slot.data;
        place.scale = slot.scale;
        status = slot.data == nullptr ? slot.status : 0u;
      }
    }
    if (status != 0) {
      report_count(args.report, &OpReport::skipped_rows, 1);
      report_status(args.report, status);
    }
    places[threadIdx.x] = place;
  }
  __syncthreads();
  const bool finishes = args.chain.component.rope == RopeStyle::kNone || args.chain.rope.positions > 0;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const bool there = row_at(turn) < stretch.end && is_whole(entry_at(turn));
    const RowPlace place = places[turn * kGroups + group];
    ChainOperands<kDims> operands{};
    if (finishes) operands.load_angles(args.chain, place.position);
    Row row{};
#pragma unroll
    for (int t = 0; t < Row::kTurns; ++t) {
      OctetsOfCall<kElement> octets;
      octets.take(own_octets, entry_at(turn) > 0);
      request(t + 1 < Row::kTurns ? turn : turn + 1, t + 1 < Row::kTurns ? t + 1 : 0);
      if (there) octets.pool(bias, kDims, Row::octet(t), row.x[t]);
    }
    operands.load_weights(args.chain);
    if (finishes) finish_row(args.chain, operands, true, place.position, row);
    const bool in_table = args.chain.component.rope == RopeStyle::kNone || entry_at(turn) * kOverlapRatio < args.chain.rope.positions;
    if (there && in_table && args.finished != nullptr) give_finished(row, args.finished + row_at(turn) * args.finished_stride);
    quantise_row(args.chain, row, place.data, place.scale);
  }
  if (first_entry >= whole_from || is_whole(first_entry)) return;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const bool carried = row_at(turn) < stretch.end && !is_whole(entry_at(turn));
    if (!__any_sync(0xFFFFFFFFu, carried)) return;  // entries ascend
    store_row_out_of_line<kDims>(args, carried ? row_at(turn) : -1);
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

// It begins to read while the kernels in front still run: none of them writes what it reads (entries go to pages, boundaries
// to their own records), and what earlier kernels wrote is there, since those in front let it start only after they had
// waited for them. It writes only after they have ended, for they read the records; and no block ends before that, so that
// whoever waits for this kernel has waited for them.
__global__ void __launch_bounds__(kRecordThreads) update_records_kernel(const __grid_constant__ StoreRowsArgs args) {
  __shared__ StateHeader shared_header;
  __shared__ bool shared_fits;
  const StoreSequence sequence = load_past_l1(args.sequences + blockIdx.x);
  if (threadIdx.x == 0) {
    shared_fits = false;
    if (sequence.row_count != 0) {
      const bool sound = sequence_is_sound(args, sequence);
      StateHeader header;
      shared_fits = sound && device_sequence_fits(args, sequence, &header);
      shared_header = header;
      if (!shared_fits) {
        report_count(args.report, &OpReport::skipped_rows, sequence.row_count > 0 ? static_cast<uint64_t>(sequence.row_count) : 1u);
        report_status(args.report, sound ? kStatusStateMismatch : kStatusBadSlot);
      }
    }
  }
  __syncthreads();
  const auto wait = [] {
    wait_for_previous_kernel();
    let_next_kernel_start();
  };
  if (!shared_fits) {
    wait();
    return;
  }
  const StateHeader before = shared_header;
  StateHeader after = before;
  after.next += sequence.row_count;
  if (!args.speculative) after.committed = after.next;
  update_record_rows(
      args.state, sequence.record, before, after, args.position_bias,
      [&](int64_t position) { return device_call_row(args, sequence, position); }, wait);
  if (threadIdx.x == 0) *reinterpret_cast<StateHeader*>(state_record(args.state, sequence.record)) = after;
}

absl::Status launch_entries(const StoreRowsArgs& args, const StorePlan& plan, cudaStream_t stream) {
  const int ratio = args.chain.component.ratio;
  const int dims = args.chain.component.head_dim;
  const bool few = ratio == 1 || args.rows <= plan.rows_of_decode;
  const int window = few ? 1 : kWindowRows;
  LaunchShape shape;
  if (ratio == 128) {
    shape.block = dim3(kFoldThreads);
    shape.grid = dim3(static_cast<unsigned>(div_ceil(args.rows, window)));
    return dims == 128 ? launch("store_rows", fold_rows_kernel<128>, shape, stream, args, window)
                       : launch("store_rows", fold_rows_kernel<512>, shape, stream, args, window);
  }
  shape.block = dim3(kThreads);
  const int groups = dims == 128 ? kThreads / 16 : kThreads / 32;
  const int64_t blocks = div_ceil(div_ceil(args.rows, window), groups);
  if (!few && args.kv.element == args.gate.element && (dims == 128 || dims == 512)) {
    // So many turns that all blocks are resident at once: by registers 4 or 3 a multiprocessor, by shared memory 2.
    const int resident = args.kv.element == RowElement::kFp32 ? 2 : dims == 128 ? 4 : 3;
    const int turns = static_cast<int>(std::clamp<int64_t>(div_ceil(blocks, plan.multiprocessors * resident), 1, kStretchTurnsMax));
    shape.grid = dim3(static_cast<unsigned>(div_ceil(blocks, turns)));
    constexpr RowElement kBf16 = RowElement::kBf16;
    constexpr RowElement kFp32 = RowElement::kFp32;
    const bool bf16 = args.kv.element == kBf16;
    shape.shared_bytes = static_cast<size_t>(bf16 ? OctetsOfCall<kBf16>::kSharedBytes : OctetsOfCall<kFp32>::kSharedBytes);
    return launch("store_rows",
                  dims == 128 ? (bf16 ? store_stretch_kernel<128, kBf16> : store_stretch_kernel<128, kFp32>)
                              : (bf16 ? store_stretch_kernel<512, kBf16> : store_stretch_kernel<512, kFp32>),
                  shape, stream, args, turns);
  }
  shape.grid = dim3(static_cast<unsigned>(blocks));
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
  const int64_t rows_a_turn = dims == 128 ? kThreads / 16 : kThreads / 32;
  const int turns =
      static_cast<int>(std::clamp<int64_t>(div_ceil(div_ceil(args.count, rows_a_turn), 8 * StorePlan{}.multiprocessors), 1, kPooledTurns));
  shape.grid = dim3(static_cast<unsigned>(div_ceil(args.count, rows_a_turn * turns)));
  switch (dims) {
    case 128: return launch("store_pooled", store_pooled_kernel<128>, shape, cuda_stream, args, turns);
    case 512: return launch("store_pooled", store_pooled_kernel<512>, shape, cuda_stream, args, turns);
    default: return launch("store_pooled", store_pooled_kernel<576>, shape, cuda_stream, args, turns);
  }
}

int64_t store_rows_cuda_scratch(const StoreRowsArgs&) { return 0; }

absl::Status store_rows_cuda(const StoreRowsArgs& args, void*, int64_t, void* stream) {
  return store_rows_cuda_planned(args, StorePlan{}, stream);
}

absl::Status store_rows_cuda_planned(const StoreRowsArgs& args, const StorePlan& plan, void* stream) {
  absl::Status possible = check_store_rows(args);
  if (!possible.ok() || args.rows == 0 || args.sequence_count == 0) return possible;
  absl::Status kv_vectors = check_vectors("kv", args.kv);
  if (!kv_vectors.ok()) return kv_vectors;
  absl::Status gate_vectors = args.gate.data == nullptr ? absl::OkStatus() : check_vectors("gate", args.gate);
  if (!gate_vectors.ok()) return gate_vectors;
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  const int ratio = args.chain.component.ratio;
  absl::Status entries = launch_entries(args, plan, cuda_stream);
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
  shape.block = dim3(kRecordThreads);
  return launch("store_rows", update_records_kernel, shape, cuda_stream, args);
}

}  // namespace needle
