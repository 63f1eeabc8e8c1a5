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
#include <bit>
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
constexpr int kWindowRows = 4;   // of input rows, one of which completes an entry of ratio 4
constexpr int kPooledTurns = 4;  // rows that a group of lanes finishes, one after the other
constexpr int kPooledTogether = 2;
constexpr int kStretchThreadsMax = 256;
constexpr int kStretchBlocks = 2;        // a multiprocessor
constexpr float kBiasSpreadMax = 32.0f;  // of a channel's position bias over the rows of an entry; see pool
// Entries of a block of store_stretch_kernel.
template <int kDims>
inline constexpr int kStretchEntriesMax = kDims == 128 ? 72 : 48;

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

// One octet of channels of the 8 rows behind an entry where all are the call's own and of one element format. They pass
// through this thread's own places in shared memory: a row's next octet is on its way there as soon as the row was read, so
// memory is asked evenly and registers hold one row at a time. The same numbers in the same order as pool_octet.
template <RowElement kElement>
struct OctetsOfCall {
  static constexpr int kVectors = kElement == RowElement::kBf16 ? 1 : 2;  // 16-byte vectors an octet
  static constexpr int kBytes = kElement == RowElement::kBf16 ? 2 : 4;
  static constexpr int kPlaceBytes = 32 * 16;  // of a warp's vectors side by side
  static constexpr int kWarpBytes = 2 * kRowsPooledOverlap * kVectors * kPlaceBytes;

  __device__ __forceinline__ static uint32_t gate_place(uint32_t own, int r, int v) { return own + (2 * r * kVectors + v) * kPlaceBytes; }
  __device__ __forceinline__ static uint32_t kv_place(uint32_t own, int r, int v) {
    return own + ((2 * r + 1) * kVectors + v) * kPlaceBytes;
  }

  // What is copied next to the places: from row 0 on, and whether at all.
  struct Request {
    const std::byte* kv;
    const std::byte* gate;
    bool before;  // the group before, which entry 0 lacks
    bool own;     // the group itself
  };
  // Rows are asked for in order, of gate and of kv each.
  __device__ __forceinline__ static void ask_gate(uint32_t own, Request& request, const StoreRowsArgs& args, int dims, int r) {
    if (r < kOverlapRatio ? request.before : request.own) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        copy_vector(gate_place(own, r, v), request.gate + (r < kOverlapRatio ? 0 : dims) * kBytes + 16 * v);
      }
    }
    request.gate += args.gate.row_stride * kBytes;
  }
  __device__ __forceinline__ static void ask_kv(uint32_t own, Request& request, const StoreRowsArgs& args, int dims, int r) {
    if (r < kOverlapRatio ? request.before : request.own) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        copy_vector(kv_place(own, r, v), request.kv + (r < kOverlapRatio ? 0 : dims) * kBytes + 16 * v);
      }
    }
    request.kv += args.kv.row_stride * kBytes;
  }
  __device__ __forceinline__ static void copy_vector(uint32_t to, const std::byte* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  }
  __device__ __forceinline__ static void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
  // The group before entry 0: rows that weigh nothing.
  __device__ __forceinline__ static void put_no_group(uint32_t own) {
    constexpr uint32_t kNoGate = kElement == RowElement::kBf16 ? 0xFF80FF80u : 0xFF800000u;  // minus infinity
#pragma unroll
    for (int r = 0; r < kOverlapRatio; ++r) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        put_words(gate_place(own, r, v), kNoGate);
        put_words(kv_place(own, r, v), 0);
      }
    }
  }
  __device__ __forceinline__ static void put_words(uint32_t to, uint32_t word) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(word) : "memory");
  }
  __device__ __forceinline__ static uint4 vector_at(uint32_t from) {
    uint4 vector;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                 : "r"(from)
                 : "memory");
    return vector;
  }
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
  // `exponents`: [8 rows][2 halves of an octet][octets] vectors of bias_exponent, each half's vectors side by side.
  // `next` is asked for on the way.
  template <int kDims>
  __device__ __forceinline__ static void pool(uint32_t own, const float4* exponents, int octet, const StoreRowsArgs& args, Request next,
                                              float (&x)[8]) {
    float top_gate[8];
    {
      uint4 top[kVectors];
#pragma unroll
      for (int r = 0; r < kRowsPooledOverlap; ++r) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const uint4 gate = vector_at(gate_place(own, r, v));
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
        raw_gate[v] = vector_at(gate_place(own, r, v));
        raw_kv[v] = vector_at(kv_place(own, r, v));
      }
      ask_gate(own, next, args, kDims, r);
      ask_kv(own, next, args, kDims, r);
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

// Ratio 4, many rows, kv and gate of one format: a block has a stretch of rows that nearly always are one sequence's, whose
// whole entries its groups of lanes pool and finish, each at its own pace. Blocks with rows of several sequences, and calls
// whose bias spreads too far, go the general way.
template <int kDims, RowElement kElement, bool kUsual>
__global__ void __launch_bounds__(kStretchThreadsMax, kStretchBlocks)
    store_stretch_kernel(const __grid_constant__ StoreRowsArgs args, int entries) {
  using Row = RowOfLanes<kDims>;
  using Octets = OctetsOfCall<kElement>;
  __shared__ EntryPlace places[kStretchEntriesMax<kDims>];
  __shared__ float4 exponents[2 * kRowsPooledOverlap * Row::kOctets];
  __shared__ float4 weights[norm_dims(kDims) / 4];
  __shared__ bool fits;  // the sequence's record expects these rows
  extern __shared__ uint4 octets_of_warps[];
  const EntryChain chain = chain_of_kernel<kDims, kUsual>(args.chain);
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int groups = threads / Row::kLanes;
  const int group = thread / Row::kLanes;
  const uint32_t own =
      static_cast<uint32_t>(__cvta_generic_to_shared(octets_of_warps)) + thread / 32 * Octets::kWarpBytes + thread % 32 * 16;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * entries * kWindowRows;
  const int64_t end = min(args.rows, begin + entries * kWindowRows);
  wait_for_previous_kernel();
  let_next_kernel_start();
  // Every thread looks up where the sequence lies: what it asks for then need not wait for another's answer.
  const int s = args.sequence_count == 1 ? 0 : sequence_of_row(args, begin);
  const StoreSequence& sequence = args.sequences[max(s, 0)];
  const int64_t first_position = sequence.first_position;
  const int64_t row_begin = sequence.row_begin;
  const bool one = s >= 0 && begin >= row_begin && end <= row_begin + sequence.row_count;
  const bool sane =
      one && first_position >= 0 && first_position <= kStorePositionMax && sequence.table_row >= 0 && sequence.table_row < args.pages.rows;
  bool far = false;
  for (int c = thread; c < 2 * Row::kOctets; c += threads) {
    const int half = c / Row::kOctets;
    const int octet = c % Row::kOctets;
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
    far |= spreads_too_far(top.x, low.x) || spreads_too_far(top.y, low.y) || spreads_too_far(top.z, low.z) || spreads_too_far(top.w, low.w);
#pragma unroll
    for (int r = 0; r < kRowsPooledOverlap; ++r) {
      exponents[(2 * r + half) * Row::kOctets + octet] = {bias_exponent(bias[r].x, top.x), bias_exponent(bias[r].y, top.y),
                                                          bias_exponent(bias[r].z, top.z), bias_exponent(bias[r].w, top.w)};
    }
  }
  if (chain.norm != NormKind::kNone) {
    for (int c = thread; c < norm_dims(kDims) / 4; c += threads) weights[c] = reinterpret_cast<const float4*>(chain.norm_weight)[c];
  }
  // The one row of a window that completes an entry is the same one in all of them.
  const int64_t to_position = first_position - row_begin;  // from a row
  const int64_t first_row = begin + 3 - ((to_position + begin) & 3);
  const int64_t first_entry = (to_position + first_row) / kOverlapRatio;
  const int count = sane && first_row < end ? static_cast<int>(end - first_row + kWindowRows - 1) / kWindowRows : 0;
  // Before this one entries reach back into the record, but for entry 0 of a sequence that begins here: they come last.
  const int64_t whole_entry = first_position == 0 ? 0 : (first_position + kOverlapRatio - 1) / kOverlapRatio + 1;
  const int whole_from = static_cast<int>(min(max(whole_entry - first_entry, int64_t{0}), static_cast<int64_t>(count)));
  const auto is_whole = [&](int i) { return i >= whole_from && i < count; };

  // Octet t of entry i. Of the next entry the rows lie 4 x groups on.
  const int64_t kv_row_bytes = args.kv.row_stride * Octets::kBytes;
  const int64_t gate_row_bytes = args.gate.row_stride * Octets::kBytes;
  const int64_t group_row = first_row - (kRowsPooledOverlap - 1) + kWindowRows * group;
  const std::byte* kv_rows = static_cast<const std::byte*>(args.kv.data) + group_row * kv_row_bytes + 8 * Row::lane() * Octets::kBytes;
  const std::byte* gate_rows =
      static_cast<const std::byte*>(args.gate.data) + group_row * gate_row_bytes + 8 * Row::lane() * Octets::kBytes;
  const int64_t kv_step = kv_row_bytes * (kWindowRows * groups);
  const int64_t gate_step = gate_row_bytes * (kWindowRows * groups);
  const int no_group_before = first_entry == 0 ? 0 : -1;  // the entry that is a sequence's first
  const auto request_of = [&](int i, int t) {
    constexpr int kTurnBytes = 8 * Row::kLanes * Octets::kBytes;
    return typename Octets::Request{kv_rows + t * kTurnBytes, gate_rows + t * kTurnBytes, is_whole(i) && i != no_group_before, is_whole(i)};
  };
  if (thread < 32) {
    StateHeader header;
    const StoreSequence whole = sequence;
    const bool fit = sane && sequence_is_sound(args, whole) && device_sequence_fits(args, whole, &header);
    if (thread == 0) fits = fit;
  }
  uint32_t status = 0;
  int skipped = 0;
  for (int i = threads - 1 - thread; i < count; i += threads) {  // by the last threads: the first have enough to do
    EntryPlace place{nullptr, nullptr};
    if (is_whole(i)) {
      uint32_t reason = kStatusBadPosition;
      if (chain.component.rope == RopeStyle::kNone || (first_entry + i) * kOverlapRatio < chain.rope.positions) {
        const DeviceSlot slot = device_entry_slot(args.out, args.pages, sequence.table_row, first_entry + i);
        place = {slot.data, slot.scale};
        reason = slot.status;
      }
      status |= reason;
      skipped += reason != 0 ? 1 : 0;
    }
    places[i] = place;
  }
  // A multiprocessor gives loads back in order, so that whatever is loaded after the rows waits for them: rows come last.
  {
    typename Octets::Request request = request_of(group, 0);
#pragma unroll
    for (int r = 0; r < kRowsPooledOverlap; ++r) {
      Octets::ask_gate(own, request, args, kDims, r);
      Octets::ask_kv(own, request, args, kDims, r);
    }
  }
  far = __syncthreads_or(far ? 1 : 0) != 0;
  if (!one || far) {
    Octets::wait();
    if (one && !fits) return;  // said by update_records_kernel
#pragma unroll 1
    for (int first = 0; first < entries; first += groups) {
      const bool has = first + group < entries;
      store_window_out_of_line<kDims>(args, has ? begin + (first + group) * kWindowRows : -kWindowRows, kWindowRows);
    }
    return;
  }
  if (!fits) {
    Octets::wait();
    return;
  }
  report_count(args.report, &OpReport::skipped_rows, static_cast<uint64_t>(skipped));
  report_status(args.report, status);

  const bool finishes = chain.component.rope == RopeStyle::kNone || chain.rope.positions > 0;
  const int pair = Row::kLanes == 16 ? group & 1 : 0;  // two groups of a warp go on together
#pragma unroll 1
  for (int i = group; i - pair < count; i += groups) {
    const bool there = is_whole(i);
    const EntryPlace place = there ? places[i] : EntryPlace{nullptr, nullptr};
    const int64_t entry = first_entry + i;
    const bool in_table = chain.component.rope == RopeStyle::kNone || entry * kOverlapRatio < chain.rope.positions;
    const int64_t position = there && in_table ? entry * kOverlapRatio : 0;
    Row row;
    ChainOperands<kDims> operands{};
    Octets::wait();
    if (finishes) operands.load_angles_at_once(chain, position);  // before the next rows, behind which it would come back
#pragma unroll
    for (int t = 0; t < Row::kTurns; ++t) {
      if (t > 0) Octets::wait();
      if (i == no_group_before && there) Octets::put_no_group(own);
      if (t + 1 == Row::kTurns) {
        kv_rows += kv_step;
        gate_rows += gate_step;
      }
      Octets::template pool<kDims>(own, exponents, Row::octet(t), args,
                                   t + 1 < Row::kTurns ? request_of(i, t + 1) : request_of(i + groups, 0), row.x[t]);
    }
    if (chain.norm != NormKind::kNone) operands.load_weights_from(weights);
    if (finishes) finish_row(chain, operands, true, position, row);
    if (there && in_table && args.finished != nullptr) {
      give_finished(row, args.finished + (first_row + static_cast<int64_t>(i) * kWindowRows) * args.finished_stride);
    }
    quantise_row(chain, row, place.data, place.scale);
  }
#pragma unroll 1
  for (int i = group; i - pair < whole_from; i += groups) {
    store_window_out_of_line<kDims>(args, i < whole_from ? first_row + static_cast<int64_t>(i) * kWindowRows : -1, 1);
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

template <RowElement kElement>
absl::Status launch_stretches(const StoreRowsArgs& args, const StorePlan& plan, cudaStream_t stream) {
  const int dims = args.chain.component.head_dim;
  // Two blocks a multiprocessor, of as many warps as shared memory has places for.
  const int64_t entries_max = dims == 128 ? kStretchEntriesMax<128> : kStretchEntriesMax<512>;
  const int64_t known_bytes = (4 * kRowsPooledOverlap + 4) * dims + int64_t{sizeof(EntryPlace)} * entries_max + 128;
  const int64_t block_bytes = (plan.shared_bytes_per_block + 1024) / kStretchBlocks - 1024;
  constexpr int64_t kWarpBytes = OctetsOfCall<kElement>::kWarpBytes;
  const int64_t warps = std::clamp<int64_t>((block_bytes - known_bytes) / kWarpBytes, 1, kStretchThreadsMax / 32);
  // And all of them resident at once, if stretches may be so long.
  const int64_t entries = div_ceil(args.rows, kWindowRows);
  const int64_t stretch = std::clamp<int64_t>(div_ceil(entries, kStretchBlocks * plan.multiprocessors), 1, entries_max);
  LaunchShape shape;
  shape.block = dim3(static_cast<unsigned>(32 * warps));
  shape.grid = dim3(static_cast<unsigned>(div_ceil(entries, stretch)));
  shape.shared_bytes = static_cast<size_t>(warps * kWarpBytes);
  const bool usual = kElement == RowElement::kBf16 && is_usual(args.chain);
  constexpr bool kMayBeUsual = kElement == RowElement::kBf16;
  return launch("store_rows",
                dims == 128 ? (usual ? store_stretch_kernel<128, kElement, kMayBeUsual> : store_stretch_kernel<128, kElement, false>)
                            : (usual ? store_stretch_kernel<512, kElement, kMayBeUsual> : store_stretch_kernel<512, kElement, false>),
                shape, stream, args, static_cast<int>(stretch));
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
    return args.kv.element == RowElement::kBf16 ? launch_stretches<RowElement::kBf16>(args, plan, stream)
                                                : launch_stretches<RowElement::kFp32>(args, plan, stream);
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
