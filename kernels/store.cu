// store on the GPU, from raw rows and from pooled rows: every number of a raw row is read once, by the one group of lanes
// that pools it, and an entry stays in registers from there to its slot.
//
// Many rows of ratio 4 (prefill): a block has a stretch of rows, looks its sequence up once and finds where its entries go
// with one thread each; two warps ask the bulk copy engine for the rows, a ring of shared memory ahead of the warps that
// pool and finish them. Few rows (decode), rows of several sequences in one stretch, and entries that reach back into the
// record go a general way, row by row. docs/kernels-performance.md has the figures.
//
// What must stay true:
//  1. Entries and boundaries first, records after, in stream order: the first kernel reads the records as they were. The
//     last one may write them as soon as they have been read, and ends after all others.
//  2. An entry's pool reads the same rows in the same order whether they are the call's or carried, so chunking leaves no
//     trace. Ratio 4: softmax over its 8 rows at once. Ratio 128: fold_row(), one row after the other.
//  3. A bad id leaves out that entry, or that sequence where the sequence itself names it: counted, status set.
#include <algorithm>
#include <bit>
#include <string>

#include "base/units.h"
#include "kernels/bulk_copy.cuh"
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
constexpr int kWindowRows = 4;   // of input rows, one of which completes an entry of ratio 4
constexpr int kPooledTurns = 4;  // rows that a group of lanes finishes, one after the other
constexpr int kPooledTogether = 2;
constexpr float kBiasSpreadMax = 32.0f;  // of a channel's position bias over the rows of an entry; see pool

// Of a block of store_stretch_kernel: warps that pool, and warps that ask for rows. A unit costs the thread that asks for it
// a fifth to a third of a microsecond, which is all that memory takes for one of index-K, so two share that work.
constexpr int kPoolWarpsMax = 10;
constexpr int kAskingWarps = 2;
// Entries of a block of store_stretch_kernel.
template <int kDims>
inline constexpr int kStretchEntriesMax = kDims == 128 ? 144 : 96;
constexpr int kRingUnitsMax = 32;
constexpr int kRingUnitsMin = 2;  // what an entry is made of; more, for rows on their way
// What a block has asked for and not got. Memory needs no more to be busy, and what lies in its queues is late: the first
// unit, every small load behind it, and the last units of all blocks together.
constexpr int64_t kBytesOnTheirWay = 80 << 10;
constexpr int64_t kFirstBytes = 48 << 10;  // brought to L2 before it is known what they are

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

// Where slots lie, from what the host knows. Pages nearly always hold a power of two of them, and a shift is no division.
struct SlotNumbers {
  int64_t end;    // of the pool's slots
  int32_t shift;  // log2 of slots_per_page; -1: it is not a power of two
};
SlotNumbers slot_numbers(const MutableLayerView& out) {
  const uint32_t slots = static_cast<uint32_t>(out.slots_per_page);
  return {out.page_count * out.slots_per_page, std::has_single_bit(slots) ? std::countr_zero(slots) : -1};
}

// The usual chain's index-K rows: a group of lanes finishes kPooledTogether of them, all of whose loads are under way at
// once, and every lane finds by itself where its rows go.
template <RowElement kElement>
__global__ void __launch_bounds__(kThreads, 8)
    store_pooled_usual_kernel(const __grid_constant__ StorePooledArgs args, const __grid_constant__ SlotNumbers numbers) {
  using Row = RowOfLanes<128>;
  constexpr int kGroups = kThreads / Row::kLanes;
  constexpr int kVectors = kElement == RowElement::kBf16 ? 1 : 2;
  const EntryChain chain = chain_of_kernel<128, true>(args.chain);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kGroups * kPooledTogether) + threadIdx.x / Row::kLanes;
  wait_for_previous_kernel();
  let_next_kernel_start();
  // In the order in which they are needed, and all before any is: a multiprocessor gives loads back in order.
  ChainOperands<128> operands[kPooledTogether];
  int64_t positions[kPooledTogether];
  int64_t slots[kPooledTogether];
  uint4 raw[kPooledTogether][kVectors];
#pragma unroll
  for (int j = 0; j < kPooledTogether; ++j) positions[j] = args.positions[min(first + j * kGroups, args.count - 1)];
#pragma unroll
  for (int j = 0; j < kPooledTogether; ++j) {
    const int64_t index = min(first + j * kGroups, args.count - 1);
    const uint4* from = static_cast<const uint4*>(device_row_at(args.rows, index)) + kVectors * Row::lane();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) raw[j][v] = from[v];
    slots[j] = args.slots[index];
  }
  operands[0].load_weights(chain);
#pragma unroll
  for (int j = 0; j < kPooledTogether; ++j) {
    const bool in_table = static_cast<uint64_t>(positions[j]) < static_cast<uint64_t>(chain.rope.positions);
    operands[j].load_angles(chain, in_table ? positions[j] : 0);
  }
  Row rows[kPooledTogether];
#pragma unroll
  for (int j = 0; j < kPooledTogether; ++j) {
    if (first + j * kGroups >= args.count) slots[j] = kNoSlot;
    // kNoSlot is outside the pool too. One comparison each, nearly always the only ones.
    const bool in_table = static_cast<uint64_t>(positions[j]) < static_cast<uint64_t>(chain.rope.positions);
    const bool in_pool = static_cast<uint64_t>(slots[j]) < static_cast<uint64_t>(numbers.end);
    if (!in_table || !in_pool) {
      if (slots[j] != kNoSlot && Row::lane() == 0) {
        report_count(args.report, &OpReport::skipped_rows, 1);
        report_status(args.report, in_pool ? kStatusBadPosition : kStatusBadSlot);
      }
      slots[j] = kNoSlot;
    }
    widen_octet(raw[j], rows[j].x[0]);
  }
#pragma unroll
  for (int j = 0; j < kPooledTogether; ++j) {
    if (j > 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) operands[j].weight[0][i] = operands[0].weight[0][i];
    }
    finish_row(chain, operands[j], true, positions[j], rows[j]);
    std::byte* data = nullptr;
    if (slots[j] != kNoSlot) {
      const int64_t page = numbers.shift >= 0 ? slots[j] >> numbers.shift : quotient(slots[j], args.out.slots_per_page);
      const int64_t in_page = slots[j] - page * args.out.slots_per_page;
      data = args.out.base + page * args.out.page_stride + in_page * 256;
      if (args.finished != nullptr) give_finished(rows[j], args.finished + (first + j * kGroups) * args.finished_stride);
    }
    quantise_row(chain, rows[j], data, nullptr);
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

// Softmax over the 8 rows of a ratio-4 entry, in a channel: a row's share is e^(gate - top gate + bias - top bias), with the
// tops over all eight. No share is above 1, and the top gate's row keeps at least e^-kBiasSpreadMax, whatever the gates: so
// the bias part is worked out beforehand, and the top gate is found among the gates as they came. Channels whose bias
// spreads further are scored first (gate + bias takes the gate's place, and no bias is left).
__device__ __forceinline__ float bias_exponent(float bias, float top_bias) { return (bias - top_bias) * kLog2E; }
__device__ __forceinline__ bool spreads_too_far(float top_bias, float low_bias) { return !(top_bias - low_bias <= kBiasSpreadMax); }
__device__ __forceinline__ float share_of_row(float gate, float top_gate, float bias_exponent) {
  float share;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(__fmaf_rn(gate - top_gate, kLog2E, bias_exponent)));
  return share;
}
__device__ __forceinline__ float pooled_share(float weighted, float sum) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
  return weighted * inverse;
}

// One octet of channels; rows from anywhere, of any format.
__device__ __forceinline__ void pool_octet(const StoreRowsArgs& args, const EntryTask& task, int dims, int octet, float (&x)[8]) {
  const int64_t first = task.entry * kOverlapRatio;
  const auto bias_of = [&](int r, float(&bias)[8]) {
    load_float_octet_here(args.position_bias + (r % kOverlapRatio) * 2 * dims + (r < kOverlapRatio ? 0 : dims) + 8 * octet, bias);
  };
  float gate[kRowsPooledOverlap][8];
  const void* kv[kRowsPooledOverlap];
  RowElement kv_element[kRowsPooledOverlap];
#pragma unroll
  for (int r = 0; r < kRowsPooledOverlap; ++r) {
    const int64_t position = first - kOverlapRatio + r;
    kv[r] = nullptr;
    kv_element[r] = RowElement::kFp32;
    if (position < 0) {  // group 0 has no group before it
#pragma unroll
      for (int i = 0; i < 8; ++i) gate[r][i] = -INFINITY;
      continue;
    }
    const DeviceRow raw = row_of_position(args, task, position);
    kv[r] = raw.kv;
    kv_element[r] = raw.kv_element;
    load_octet(raw.gate, raw.gate_element, (r < kOverlapRatio ? 0 : dims) + 8 * octet, gate[r]);
  }
  float top_bias[8];
  float low_bias[8];
  bias_of(0, top_bias);
  bias_of(0, low_bias);
#pragma unroll
  for (int r = 1; r < kRowsPooledOverlap; ++r) {
    float bias[8];
    bias_of(r, bias);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      top_bias[i] = fmaxf(top_bias[i], bias[i]);
      low_bias[i] = fminf(low_bias[i], bias[i]);
    }
  }
  bool scored = false;  // some channel is
#pragma unroll
  for (int i = 0; i < 8; ++i) scored |= spreads_too_far(top_bias[i], low_bias[i]);
  if (scored) {
#pragma unroll
    for (int r = 0; r < kRowsPooledOverlap; ++r) {
      float bias[8];
      bias_of(r, bias);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (spreads_too_far(top_bias[i], low_bias[i])) gate[r][i] += bias[i];
      }
    }
  }
  float top_gate[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    top_gate[i] = gate[0][i];
#pragma unroll
    for (int r = 1; r < kRowsPooledOverlap; ++r) top_gate[i] = fmaxf(top_gate[i], gate[r][i]);
  }
  float sum[8] = {};
  float weighted[8] = {};
#pragma unroll
  for (int r = 0; r < kRowsPooledOverlap; ++r) {
    if (kv[r] == nullptr) continue;
    float bias[8];
    float value[8];
    bias_of(r, bias);
    load_octet(kv[r], kv_element[r], (r < kOverlapRatio ? 0 : dims) + 8 * octet, value);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float exponent = spreads_too_far(top_bias[i], low_bias[i]) ? 0.0f : bias_exponent(bias[i], top_bias[i]);
      const float share = share_of_row(gate[r][i], top_gate[i], exponent);
      sum[i] += share;
      weighted[i] = __fmaf_rn(share, value[i], weighted[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = pooled_share(weighted[i], sum[i]);
}

// Rows of a call, all of one sequence and one element format, as they lie in the ring of shared memory: units of as many
// whole groups of 4 rows as a warp finishes entries at a time, gate rows before kv rows. An entry reads the overlap half of
// the group before its own, which may lie in the unit before, and the current half of its own.
template <int kDims, RowElement kElement>
struct RingUnit {
  static constexpr int kBytes = kElement == RowElement::kBf16 ? 2 : 4;
  static constexpr int kVectors = kElement == RowElement::kBf16 ? 1 : 2;  // 16-byte vectors an octet
  static constexpr int kEntries = 32 / RowOfLanes<kDims>::kLanes;
  static constexpr int kRows = kOverlapRatio * kEntries;
  static constexpr int kHalfBytes = kDims * kBytes;
  static constexpr int kRowBytes = 2 * kHalfBytes;
  static constexpr int kGroupBytes = kOverlapRatio * kRowBytes;
  static constexpr int kKvAt = kRows * kRowBytes;
  static constexpr int kUnitBytes = 2 * kKvAt;
  // The group before a stretch's first entry, of which the overlap half alone is read: rows of gate and kv side by side.
  static constexpr int kFirstGroupBytes = kGroupBytes;

  // The larger gates of two rows: bf16 as pairs, two in an instruction.
  __device__ __forceinline__ static uint32_t larger_gates(uint32_t one, uint32_t other) {
    uint32_t larger;
    if constexpr (kElement == RowElement::kBf16) {
      asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(one), "r"(other));
    } else {
      larger = __float_as_uint(fmaxf(__uint_as_float(one), __uint_as_float(other)));
    }
    return larger;
  }
  // Volatile, so that the compiler keeps no fp32 gates in registers from their maximum to their shares.
  __device__ __forceinline__ static uint4 vector_at(uint32_t from) {
    uint4 vector;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w) : "r"(from));
    return vector;
  }
  // One octet of channels of the 8 rows behind an entry: the same numbers in the same order as pool_octet. `before`,
  // `before_kv` and `own` are where its gates (kv) of the two groups' first rows lie. `exponents`: [8 rows][2 halves of an octet][octets] vectors of
  // bias_exponent, each half's vectors side by side.
  __device__ __forceinline__ static void pool(uint32_t before, uint32_t before_kv, uint32_t own, const float4* exponents, int octet,
                                              float (&x)[8]) {
    constexpr bool kKeepsGates = kElement == RowElement::kBf16;
    const auto gate_at = [&](int r) { return (r < kOverlapRatio ? before : own) + (r % kOverlapRatio) * kRowBytes; };
    const auto kv_at = [&](int r) { return (r < kOverlapRatio ? before_kv : own + kKvAt) + (r % kOverlapRatio) * kRowBytes; };
    uint4 kept[kKeepsGates ? kRowsPooledOverlap : 1][kVectors];
    float top_gate[8];
    {
      uint4 top[kVectors];
#pragma unroll
      for (int r = 0; r < kRowsPooledOverlap; ++r) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const uint4 gate = vector_at(gate_at(r) + 16 * v);
          if constexpr (kKeepsGates) kept[r][v] = gate;
          if (r == 0) {
            top[v] = gate;
          } else {
            top[v] = uint4{larger_gates(top[v].x, gate.x), larger_gates(top[v].y, gate.y), larger_gates(top[v].z, gate.z),
                           larger_gates(top[v].w, gate.w)};
          }
        }
      }
      widen_octet(top, top_gate);
    }
    float sum[8] = {};
    float weighted[8] = {};
#pragma unroll
    for (int r = 0; r < kRowsPooledOverlap; ++r) {
      uint4 raw_gate[kVectors];
      uint4 raw_kv[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (kKeepsGates) {
          raw_gate[v] = kept[r][v];
        } else {
          raw_gate[v] = vector_at(gate_at(r) + 16 * v);
        }
        raw_kv[v] = vector_at(kv_at(r) + 16 * v);
      }
      float gate[8];
      float value[8];
      widen_octet(raw_gate, gate);
      widen_octet(raw_kv, value);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 of_row = exponents[(2 * r + half) * (kDims / 8) + octet];
        const float exponent[4] = {of_row.x, of_row.y, of_row.z, of_row.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = 4 * half + e;
          const float share = share_of_row(gate[i], top_gate[i], exponent[e]);
          sum[i] = r == 0 ? share : sum[i] + share;
          weighted[i] = __fmaf_rn(share, value[i], weighted[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = pooled_share(weighted[i], sum[i]);
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
__device__ __noinline__ void store_window_out_of_line(const StoreRowsArgs& args, int64_t first_row, int count) {
  store_window<kDims>(args, first_row, count);
}

template <int kDims>
__global__ void __launch_bounds__(kThreads, 2) store_rows_kernel(const __grid_constant__ StoreRowsArgs args, int window_rows) {
  constexpr int kGroups = kThreads / RowOfLanes<kDims>::kLanes;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t window = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / RowOfLanes<kDims>::kLanes;
  store_window<kDims>(args, window * window_rows, window_rows);
}

// Where an entry of a stretch goes. Found by one thread, for the lanes that finish it.
struct EntryPlace {
  std::byte* data;  // null: it is not written
  std::byte* scale;
};

// How a call's windows of rows are cut into blocks' stretches, and the ring of each.
struct Stretches {
  int64_t windows_each;  // of kWindowRows rows; the first `one_more` blocks have one more
  int64_t one_more;
  int32_t units;  // of the ring
  int32_t ahead;  // units on their way
};

// Ratio 4, many rows, kv and gate of one format: a block has a stretch of rows that nearly always are one sequence's. A thread
// of each of its last two warps asks for them, unit by unit, one for gates and one for kv. The other warps take units in turn:
// wait for one and for the one before it, pool, give both back and finish the entries. The ring has a multiple of their number
// of units, so that a warp sees every filling of the places that it waits for, and a barrier's parity cannot mislead it.
// Blocks with rows of several sequences, and calls whose bias spreads too far, go the general way.
// A block lets the next kernel start once it has read all that it needs from the records, and not before it ends where it
// goes the general way: update_records_kernel counts on it.
template <int kDims, RowElement kElement, bool kUsual>
__global__ void __launch_bounds__(32 * (kPoolWarpsMax + kAskingWarps), 1)
    store_stretch_kernel(const __grid_constant__ StoreRowsArgs args, const __grid_constant__ Stretches stretches) {
  using Row = RowOfLanes<kDims>;
  using Unit = RingUnit<kDims, kElement>;
  __shared__ EntryPlace places[kStretchEntriesMax<kDims>];
  __shared__ float4 exponents[2 * kRowsPooledOverlap * Row::kOctets];
  __shared__ float4 weights[norm_dims(kDims) / 4];
  __shared__ uint64_t first_landed;                   // the group before the first entry is there
  __shared__ uint64_t landed[kRingUnitsMax];          // a unit's rows are
  __shared__ uint64_t emptied[kRingUnitsMax];         // both its readers have read it
  __shared__ uint64_t known;                          // places, exponents and weights are there, and the next two
  __shared__ bool fits;                               // the sequence's record expects these rows
  __shared__ uint32_t far;                            // some channel's bias spreads too far
  __shared__ uint64_t carried_read;                   // what entries reach back for has been read from the record
  extern __shared__ __align__(128) std::byte ring[];  // units; then the overlap halves of the group before the first entry
  std::byte* const first_group = ring + stretches.units * Unit::kUnitBytes;
  const EntryChain chain = chain_of_kernel<kDims, kUsual>(args.chain);
  const int thread = static_cast<int>(threadIdx.x);
  const int pool_threads = static_cast<int>(blockDim.x) - 32 * kAskingWarps;
  const int pool_warps = pool_threads / 32;
  const bool asks = thread >= pool_threads;
  if (thread == pool_threads) {
    barrier_init(&first_landed, kAskingWarps);
    for (int u = 0; u < stretches.units; ++u) {
      barrier_init(&landed[u], kAskingWarps);
      barrier_init(&emptied[u], 2 * kWarpArrivals);
    }
    barrier_init(&known, static_cast<uint32_t>(pool_threads));
    barrier_init(&carried_read, static_cast<uint32_t>(pool_threads));
    barrier_init_done();
    far = 0;
  }
  __syncthreads();  // while the kernel before is at work
  const int64_t block = static_cast<int64_t>(blockIdx.x);
  const int64_t begin = (block * stretches.windows_each + min(block, stretches.one_more)) * kWindowRows;
  const int windows = static_cast<int>(stretches.windows_each) + (block < stretches.one_more ? 1 : 0);
  const int64_t end = min(args.rows, begin + int64_t{windows} * kWindowRows);
  const int64_t kv_row_bytes = args.kv.row_stride * Unit::kBytes;
  const int64_t gate_row_bytes = args.gate.row_stride * Unit::kBytes;
  wait_for_previous_kernel();
  // The first rows come to L2 while the sequence is looked up, without which nobody knows where its groups begin. By a warp
  // with nothing to look up first.
  if (thread == pool_warps / 2 * 32 - 32 && kv_row_bytes == Unit::kRowBytes && gate_row_bytes == Unit::kRowBytes) {
    const uint32_t bytes = static_cast<uint32_t>(min((end - begin) * Unit::kRowBytes, kFirstBytes / 2));
    prefetch_bulk(static_cast<const std::byte*>(args.gate.data) + begin * Unit::kRowBytes, bytes);
    prefetch_bulk(static_cast<const std::byte*>(args.kv.data) + begin * Unit::kRowBytes, bytes);
  }
  // What needs no sequence, before the rows are in its way.
  if (!asks) {
    static_assert(2 * Row::kOctets == norm_dims(kDims) / 4);
    for (int c = thread; c < 2 * Row::kOctets; c += pool_threads) {
      const int half = c / Row::kOctets;
      const int octet = c % Row::kOctets;
      float4 weight{};
      if (chain.norm != NormKind::kNone) weight = reinterpret_cast<const float4*>(chain.norm_weight)[c];
      float4 bias[kRowsPooledOverlap];
#pragma unroll
      for (int r = 0; r < kRowsPooledOverlap; ++r) {
        const int column = (r < kOverlapRatio ? 0 : kDims) + 8 * octet + 4 * half;
        bias[r] = *reinterpret_cast<const float4*>(args.position_bias + (r % kOverlapRatio) * 2 * kDims + column);
      }
      float4 top = bias[0];
      float4 low = bias[0];
#pragma unroll
      for (int r = 1; r < kRowsPooledOverlap; ++r) {
        top = {fmaxf(top.x, bias[r].x), fmaxf(top.y, bias[r].y), fmaxf(top.z, bias[r].z), fmaxf(top.w, bias[r].w)};
        low = {fminf(low.x, bias[r].x), fminf(low.y, bias[r].y), fminf(low.z, bias[r].z), fminf(low.w, bias[r].w)};
      }
      if (spreads_too_far(top.x, low.x) || spreads_too_far(top.y, low.y) || spreads_too_far(top.z, low.z) ||
          spreads_too_far(top.w, low.w)) {
        atomicOr(&far, 1u);
      }
#pragma unroll
      for (int r = 0; r < kRowsPooledOverlap; ++r) {
        exponents[(2 * r + half) * Row::kOctets + octet] = {bias_exponent(bias[r].x, top.x), bias_exponent(bias[r].y, top.y),
                                                            bias_exponent(bias[r].z, top.z), bias_exponent(bias[r].w, top.w)};
      }
      weights[c] = weight;
    }
  }
  // Every thread looks up where the sequence lies: what it asks for then need not wait for another's answer.
  const int s = args.sequence_count == 1 ? 0 : sequence_of_row(args, begin);
  const StoreSequence& sequence = args.sequences[max(s, 0)];
  const int64_t first_position = sequence.first_position;
  const int64_t row_begin = sequence.row_begin;
  const bool one = s >= 0 && row_begin >= 0 && begin >= row_begin && end <= row_begin + sequence.row_count;
  const bool sane =
      one && first_position >= 0 && first_position <= kStorePositionMax && sequence.table_row >= 0 && sequence.table_row < args.pages.rows;
  // The one row of a window that completes an entry is the same one in all of them.
  const int64_t to_position = first_position - row_begin;  // from a row
  const int64_t first_row = begin + 3 - ((to_position + begin) & 3);
  const int64_t first_entry = (to_position + first_row) / kOverlapRatio;
  const int count = sane && first_row < end ? static_cast<int>(end - first_row + kWindowRows - 1) / kWindowRows : 0;
  // Before this one entries reach back into the record, but for entry 0 of a sequence that begins here: the general way.
  const int64_t whole_entry = first_position == 0 ? 0 : (first_position + kOverlapRatio - 1) / kOverlapRatio + 1;
  const int whole_from = static_cast<int>(min(max(whole_entry - first_entry, int64_t{0}), static_cast<int64_t>(count)));
  const int units = (count - whole_from + Unit::kEntries - 1) / Unit::kEntries;
  const bool no_group_before = first_entry + whole_from == 0;
  const bool finishes = chain.component.rope == RopeStyle::kNone || chain.rope.positions > 0;
  const auto in_table = [&](int i) {
    return chain.component.rope == RopeStyle::kNone || (first_entry + i) * kOverlapRatio < chain.rope.positions;
  };

  if (asks) {
    if (thread % 32 != 0) return;
    const bool of_gates = thread == pool_threads;
    const int64_t row_bytes = of_gates ? gate_row_bytes : kv_row_bytes;
    const bool close_together = row_bytes == Unit::kRowBytes;
    const uint64_t once = cache_evict_first();
    // Of the next unit to ask for: its first row.
    const std::byte* from = static_cast<const std::byte*>(of_gates ? args.gate.data : args.kv.data) +
                            (first_row + int64_t{kWindowRows} * whole_from - (kOverlapRatio - 1)) * row_bytes;
    const auto ask_for_first_group = [&] {
      if (no_group_before) {  // the other warps put it there
        barrier_arrive(&first_landed);
        return;
      }
      barrier_arrive_expect(&first_landed, kOverlapRatio * Unit::kHalfBytes);
      std::byte* const to = first_group + (of_gates ? 0 : Unit::kHalfBytes);
#pragma unroll
      for (int r = 0; r < kOverlapRatio; ++r) {
        bulk_copy(to + r * Unit::kRowBytes, from + (r - kOverlapRatio) * row_bytes, Unit::kHalfBytes, &first_landed, once);
      }
    };
    const int last_rows = kOverlapRatio * (count - whole_from - (units - 1) * Unit::kEntries);
    const auto ask = [&](int place, bool last) {
      std::byte* const to = ring + place * Unit::kUnitBytes + (of_gates ? 0 : Unit::kKvAt);
      uint64_t* const barrier = &landed[place];
      if (!last && close_together) {
        barrier_arrive_expect(barrier, Unit::kKvAt);
        bulk_copy(to, from, Unit::kKvAt, barrier, once);
      } else {
        // Of the stretch's last group the overlap half is another block's.
        const int whole_rows = last ? last_rows - kOverlapRatio : Unit::kRows;
        barrier_arrive_expect(barrier, whole_rows * Unit::kRowBytes + (last ? kOverlapRatio * Unit::kHalfBytes : 0));
#pragma unroll 1
        for (int r = 0; r < whole_rows; ++r) bulk_copy(to + r * Unit::kRowBytes, from + r * row_bytes, Unit::kRowBytes, barrier, once);
        if (last) {
#pragma unroll
          for (int r = 0; r < kOverlapRatio; ++r) {
            bulk_copy(to + (whole_rows + r) * Unit::kRowBytes + Unit::kHalfBytes, from + (whole_rows + r) * row_bytes + Unit::kHalfBytes,
                      Unit::kHalfBytes, barrier, once);
          }
        }
      }
      from += Unit::kRows * row_bytes;
    };
    // Unit u once unit u - ahead has landed, and its place is free.
    int ahead_place = 0;
    uint32_t ahead_parity = 0;
    const auto wait_ahead = [&](int u) {
      if (u < stretches.ahead) return;
      barrier_wait(&landed[ahead_place], ahead_parity);
      if (++ahead_place == stretches.units) {
        ahead_place = 0;
        ahead_parity ^= 1;
      }
    };
    const int at_once = min(units, stretches.units);
#pragma unroll 1
    for (int u = 0; u < at_once; ++u) {
      wait_ahead(u);
      if (u == 0) ask_for_first_group();
      ask(u, u + 1 == units);
    }
    barrier_wait(&known, 0);
    if (!one || far != 0 || !fits) {
      if (units > 0) barrier_wait(&first_landed, 0);  // nothing may arrive once the block has ended
      for (int u = 0; u < at_once; ++u) barrier_wait(&landed[u], 0);
      return;
    }
    if (of_gates && whole_from == 0) let_next_kernel_start();
    int place = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int left = units - at_once; left > 0; --left) {
      wait_ahead(stretches.units);
      barrier_wait(&emptied[place], parity);
      ask(place, left == 1);
      if (++place == stretches.units) {
        place = 0;
        parity ^= 1;
      }
    }
    if (of_gates && whole_from > 0) {
      barrier_wait(&carried_read, 0);
      let_next_kernel_start();
    }
    return;
  }
  if (thread / 32 == pool_warps / 2) {  // neither the first, which has the exponents, nor the last, which has places
    StateHeader header;
    const StoreSequence whole = sequence;
    const bool fit = sane && sequence_is_sound(args, whole) && device_sequence_fits(args, whole, &header);
    if (thread % 32 == 0) fits = fit;
  }
  if (no_group_before && units > 0) {                                                        // rows that weigh nothing
    constexpr uint32_t kNoGate = kElement == RowElement::kBf16 ? 0xFF80FF80u : 0xFF800000u;  // minus infinity
    for (int at = 16 * thread; at < kOverlapRatio * Unit::kHalfBytes; at += 16 * pool_threads) {
      std::byte* const to = first_group + at / Unit::kHalfBytes * Unit::kRowBytes + at % Unit::kHalfBytes;
      *reinterpret_cast<uint4*>(to) = uint4{kNoGate, kNoGate, kNoGate, kNoGate};
      *reinterpret_cast<uint4*>(to + Unit::kHalfBytes) = uint4{0, 0, 0, 0};
    }
  }
  uint32_t status = 0;
  int skipped = 0;
  for (int i = pool_threads - 1 - thread; i >= 0 && i < count; i += pool_threads) {
    EntryPlace place{nullptr, nullptr};
    if (i >= whole_from) {
      uint32_t reason = kStatusBadPosition;
      if (in_table(i)) {
        const DeviceSlot slot = device_entry_slot(args.out, args.pages, sequence.table_row, first_entry + i);
        place = {slot.data, slot.scale};
        reason = slot.status;
      }
      status |= reason;
      skipped += reason != 0 ? 1 : 0;
    }
    places[i] = place;
  }
  barrier_arrive(&known);
  barrier_wait(&known, 0);
  const bool general = !one || far != 0;
  if (one && !fits) return;  // said by update_records_kernel
  const int groups = pool_threads / Row::kLanes;
  const int group = thread / Row::kLanes;
  if (general) {
#pragma unroll 1
    for (int first = 0; first < windows; first += groups) {
      const bool has = first + group < windows;
      store_window_out_of_line<kDims>(args, has ? begin + int64_t{first + group} * kWindowRows : -kWindowRows, kWindowRows);
    }
    return;
  }
  report_count(args.report, &OpReport::skipped_rows, static_cast<uint64_t>(skipped));
  report_status(args.report, status);

  // By the last warps: their units land last.
  {
    const int mine = groups - 1 - group;
    const int first_of_warp = Row::kLanes == 16 ? mine & ~1 : mine;
#pragma unroll 1
    for (int i = 0; first_of_warp + i < whole_from; i += groups) {
      store_window_out_of_line<kDims>(args, mine + i < whole_from ? first_row + int64_t{mine + i} * kWindowRows : -1, 1);
    }
    if (whole_from > 0) barrier_arrive(&carried_read);
  }
  const int of_unit = Row::kLanes == 16 ? group & 1 : 0;  // which entry of a unit
  const uint32_t ring_at = shared_address(ring);
  const uint32_t column = 8 * Row::lane() * Unit::kBytes;
#pragma unroll 1
  for (int u = thread / 32; u < units; u += pool_warps) {
    const int turn = u / stretches.units;
    const int place = u - turn * stretches.units;
    const int turn_before = place == 0 ? turn - 1 : turn;
    const int place_before = place == 0 ? stretches.units - 1 : place - 1;
    const uint32_t own_unit = ring_at + place * Unit::kUnitBytes + column;
    const uint32_t own = own_unit + of_unit * Unit::kGroupBytes + Unit::kHalfBytes;
    uint32_t before = own_unit;  // of a unit's second entry the first is before
    uint32_t before_kv = own_unit + Unit::kKvAt;
    if (of_unit == 0) {
      before = ring_at + place_before * Unit::kUnitBytes + (Unit::kEntries - 1) * Unit::kGroupBytes + column;
      before_kv = before + Unit::kKvAt;
      if (u == 0) {
        before = shared_address(first_group) + column;
        before_kv = before + Unit::kHalfBytes;
      }
    }
    const int i = whole_from + u * Unit::kEntries + of_unit;
    const bool there = i < count;
    const EntryPlace to = there ? places[i] : EntryPlace{nullptr, nullptr};
    const int64_t position = there && in_table(i) ? (first_entry + i) * kOverlapRatio : 0;
    Row row;
    ChainOperands<kDims> operands{};
    if (finishes) operands.load_angles_at_once(chain, position);
    barrier_wait(u == 0 ? &first_landed : &landed[place_before], u == 0 ? 0 : turn_before & 1);
    barrier_wait(&landed[place], turn & 1);
#pragma unroll
    for (int t = 0; t < Row::kTurns; ++t) {
      constexpr int kTurnBytes = 8 * Row::kLanes * Unit::kBytes;
      Unit::pool(before + t * kTurnBytes, before_kv + t * kTurnBytes, own + t * kTurnBytes, exponents, Row::octet(t), row.x[t]);
    }
    if (arrives_for_warp()) {
      if (u > 0) barrier_arrive(&emptied[place_before]);
      barrier_arrive(&emptied[place]);
    }
    if (chain.norm != NormKind::kNone) operands.load_weights_from(weights);
    if (finishes) finish_row(chain, operands, true, position, row);
    if (there && in_table(i) && args.finished != nullptr) {
      give_finished(row, args.finished + (first_row + int64_t{i} * kWindowRows) * args.finished_stride);
    }
    quantise_row(chain, row, to.data, to.scale);
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
// waited for them. It writes only after they have read the records: after their end, or at once where the kernel in front let
// it start only then (`records_are_read`). No block ends before they do, so that whoever waits for this kernel has waited
// for them.
__global__ void __launch_bounds__(kRecordThreads) update_records_kernel(const __grid_constant__ StoreRowsArgs args, bool records_are_read) {
  __shared__ StateHeader shared_header;
  __shared__ bool shared_fits;
  let_next_kernel_start();  // it waits for this one's end, and so for those in front
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
  if (!shared_fits) {
    wait_for_previous_kernel();
    return;
  }
  const StateHeader before = shared_header;
  StateHeader after = before;
  after.next += sequence.row_count;
  if (!args.speculative) after.committed = after.next;
  update_record_rows(
      args.state, sequence.record, before, after, args.position_bias,
      [&](int64_t position) { return device_call_row(args, sequence, position); },
      [&] {
        if (!records_are_read) wait_for_previous_kernel();
      });
  if (threadIdx.x == 0) *reinterpret_cast<StateHeader*>(state_record(args.state, sequence.record)) = after;
  if (records_are_read) wait_for_previous_kernel();
}

// Of a stretch's block beside its ring: places, exponents, weights, barriers, the group before.
template <int kDims, RowElement kElement>
constexpr int64_t kStretchKnownBytes = int64_t{sizeof(EntryPlace)} * kStretchEntriesMax<kDims> + (4 * kRowsPooledOverlap + 4) * kDims +
                                       16 * kRingUnitsMax + RingUnit<kDims, kElement>::kFirstGroupBytes + 256;
// Whether the shortest ring fits a block: fp32 rows of 512 dimensions do not fit the 99 KB of 12.0. A plan of 0 bytes wants it anyway.
template <int kDims, RowElement kElement>
bool ring_fits(const StorePlan& plan) {
  return plan.shared_bytes_per_block == 0 ||
         plan.shared_bytes_per_block >= kStretchKnownBytes<kDims, kElement> + kRingUnitsMin * RingUnit<kDims, kElement>::kUnitBytes;
}

template <int kDims, RowElement kElement>
absl::Status launch_stretches(const StoreRowsArgs& args, const StorePlan& plan, cudaStream_t stream) {
  using Unit = RingUnit<kDims, kElement>;
  // All blocks are resident at once, if stretches may be so long; else as many rounds of them as it takes, of equal length.
  // Two multiprocessors are left to update_records_kernel, which has then read all it needs before the last block ends.
  const int64_t windows = div_ceil(args.rows, kWindowRows);
  const int64_t a_round = std::max<int64_t>(plan.multiprocessors - 2, 1);
  const int64_t rounds = div_ceil(windows, a_round * kStretchEntriesMax<kDims>);
  const int64_t blocks = std::min(windows, rounds * a_round);
  Stretches stretches;
  stretches.windows_each = windows / blocks;
  stretches.one_more = windows % blocks;
  const int64_t units = std::clamp<int64_t>((plan.shared_bytes_per_block - kStretchKnownBytes<kDims, kElement>) / Unit::kUnitBytes,
                                            kRingUnitsMin, kRingUnitsMax);
  const int64_t warps = std::min<int64_t>(units, kPoolWarpsMax);
  stretches.units = static_cast<int32_t>(units / warps * warps);
  stretches.ahead = static_cast<int32_t>(std::clamp<int64_t>(kBytesOnTheirWay / Unit::kUnitBytes, 1, stretches.units));
  LaunchShape shape;
  shape.block = dim3(static_cast<unsigned>(32 * (warps + kAskingWarps)));
  shape.grid = dim3(static_cast<unsigned>(blocks));
  shape.shared_bytes = static_cast<size_t>(stretches.units) * Unit::kUnitBytes + Unit::kFirstGroupBytes;
  constexpr bool kMayBeUsual = kElement == RowElement::kBf16;
  return launch("store_rows",
                kMayBeUsual && is_usual(args.chain) ? store_stretch_kernel<kDims, kElement, kMayBeUsual>
                                                    : store_stretch_kernel<kDims, kElement, false>,
                shape, stream, args, stretches);
}

// Who stores runs of rows through a ring: one kernel a width and kind of row.
struct RingStore {
  int dims;
  RowElement element;
  bool (*fits)(const StorePlan& plan);
  absl::Status (*launch)(const StoreRowsArgs& args, const StorePlan& plan, cudaStream_t stream);
};
template <int kDims, RowElement kElement>
constexpr RingStore kRingStore{kDims, kElement, ring_fits<kDims, kElement>, launch_stretches<kDims, kElement>};
constexpr RingStore kRingStores[] = {kRingStore<128, RowElement::kBf16>, kRingStore<128, RowElement::kFp32>,
                                     kRingStore<512, RowElement::kBf16>, kRingStore<512, RowElement::kFp32>};

// `lets_records_go`: the next kernel starts once the records have been read.
absl::Status launch_entries(const StoreRowsArgs& args, const StorePlan& plan, cudaStream_t stream, bool* lets_records_go) {
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
  for (const RingStore& store : kRingStores) {
    if (few || dims != store.dims || args.kv.element != store.element || args.gate.element != store.element || !store.fits(plan)) continue;
    *lets_records_go = true;
    return store.launch(args, plan, stream);
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
  if (dims == 128 && is_usual(args.chain)) {
    shape.grid = dim3(static_cast<unsigned>(div_ceil(args.count, kThreads / 16 * kPooledTogether)));
    return launch("store_pooled",
                  args.rows.element == RowElement::kBf16 ? store_pooled_usual_kernel<RowElement::kBf16>
                                                         : store_pooled_usual_kernel<RowElement::kFp32>,
                  shape, cuda_stream, args, slot_numbers(args.out));
  }
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
  StorePlan plan;
  if (args.rows > plan.rows_of_decode) {
    const absl::StatusOr<DeviceFacts> facts = current_device_facts();
    if (!facts.ok()) return facts.status();
    plan.multiprocessors = facts->multiprocessors;
    plan.shared_bytes_per_block = facts->shared_bytes_per_block;
  }
  return store_rows_cuda_planned(args, plan, stream);
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
  bool records_are_read = false;
  absl::Status entries = launch_entries(args, plan, cuda_stream, &records_are_read);
  if (!entries.ok()) return entries;
  LaunchShape shape;
  shape.block = dim3(kFoldThreads);
  if (args.boundary_count > 0) {
    shape.grid = dim3(static_cast<unsigned>(args.boundary_count));
    absl::Status written = launch("store_rows", write_boundaries_kernel, shape, cuda_stream, args);
    if (!written.ok()) return written;
    records_are_read = false;  // boundaries read them too
  }
  if (ratio == 1) return absl::OkStatus();
  shape.grid = dim3(static_cast<unsigned>(args.sequence_count));
  shape.block = dim3(kRecordThreads);
  return launch("store_rows", update_records_kernel, shape, cuda_stream, args, records_are_read);
}

}  // namespace needle
