// merge_topk and list_slots on the GPU: a block a row.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/device_report.cuh"
#include "kernels/launch.cuh"
#include "kernels/select_topk.h"
#include "kernels/select_topk_block.cuh"

namespace needle {
namespace {

constexpr int kSetThreads = 256;  // of a merge's or a list's block

// One block a row. Lists are offered stretch by stretch; a full buffer raises the threshold to the exact k-th so far.
__global__ void __launch_bounds__(kSetThreads, 1) merge_topk_kernel(const __grid_constant__ MergeTopkArgs args, int capacity) {
  SelectShared& shared = select_shared();
  uint64_t* keys = select_keys();
  block_begin<kSetThreads>();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  __syncthreads();

  // The key of item `place` of the row's lists laid end to end, each in_stride long; 0 for what does not count.
  const auto key_at = [&](int64_t place, uint32_t* absent) -> uint64_t {
    const int64_t shard = place / args.in_stride;
    const int64_t item = place - shard * args.in_stride;
    const int64_t list = shard * args.rows + row;
    if (item >= args.counts[list]) return 0;
    const int32_t position = args.positions[list * args.in_stride + item];
    if (position < 0) return 0;
    const uint32_t bits = __float_as_uint(args.scores[list * args.in_stride + item]);
    if (bits == kAbsentScoreBits) {
      *absent += 1;
      return 0;
    }
    return rank_key(bits, static_cast<uint32_t>(position));
  };

  const int64_t total = static_cast<int64_t>(args.shards) * args.in_stride;
  uint32_t absent = 0;
  uint32_t order_max = 0;
  uint64_t threshold = 0;
  for (int64_t first = 0; first < total;) {
    int held = static_cast<int>(shared.count);
    if (held + kSetThreads > capacity) {
      note_order_max(order_max);
      block_raise_threshold<kSetThreads>(held, args.k);
      threshold = shared.threshold;
      held = static_cast<int>(shared.count);
    }
    __syncthreads();
    const int64_t stretches = min(static_cast<int64_t>((capacity - held) / kSetThreads), (total - first + kSetThreads - 1) / kSetThreads);
    for (int64_t stretch = 0; stretch < stretches; ++stretch, first += kSetThreads) {
      const int64_t place = first + threadIdx.x;
      const uint64_t key = place < total ? key_at(place, &absent) : 0;
      const bool take = key != 0 && key >= threshold;
      if (take) order_max = max(order_max, order_bits_of_key(key));
      append_key(take, key, static_cast<uint32_t>(capacity));
    }
    __syncthreads();
  }
  note_order_max(order_max);
  if (args.report != nullptr) {
    absent = __reduce_add_sync(0xFFFFFFFFu, absent);
    if ((threadIdx.x & 31) == 0 && absent != 0) {
      report_status(args.report, kStatusAbsentPage);
      report_count(args.report, &OpReport::absent_entries, absent);
    }
    if (threadIdx.x == 0) report_count(args.report, &OpReport::fallbacks, shared.overflows);
  }
  __syncthreads();

  const int count = static_cast<int>(shared.count);
  const int members = min(args.k, count);
  uint64_t bound = max(threshold, uint64_t{1});  // below the threshold lies what was offered and dropped
  if (count > args.k) bound = block_kth_bound<kSetThreads>(share_of_run<kSetThreads>(count), args.k, threshold);
  block_keep_at_least<kSetThreads>(count, bound);
  const bool by_position = args.order == TopkOrder::kByPosition;
  const auto turned = [](uint64_t key) { return key << 32 | key >> 32; };  // larger = lower position
  if (by_position) {
    for (int i = threadIdx.x; i < members; i += kSetThreads) keys[i] = turned(keys[i]);
    __syncthreads();
  }
  block_sort_descending<kSetThreads>(members);
  for (int64_t i = threadIdx.x; i < args.out_stride; i += kSetThreads) {
    const bool valid = i < members;
    const uint64_t key = !valid ? 0 : by_position ? turned(keys[i]) : keys[i];
    const int64_t out = row * args.out_stride + i;
    args.out_positions[out] = valid ? static_cast<int32_t>(position_of_key(key)) : kNoEntry;
    if (args.out_scores != nullptr) args.out_scores[out] = valid ? score_of_key(key) : -INFINITY;
    if (args.out_slots != nullptr && !valid) args.out_slots[out] = kNoEntry;
  }
  if (threadIdx.x == 0) args.out_counts[row] = members;
  if (args.out_slots == nullptr || members == 0) return;
  uint32_t ignored = 0;
  for (int64_t place = threadIdx.x; place < total; place += kSetThreads) {
    const uint64_t key = key_at(place, &ignored);
    if (key == 0 || key < bound) continue;
    const uint64_t number = by_position ? turned(key) : key;
    int low = 0;  // the first index whose number is <= `number`; it is there
    int high = members - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (keys[middle] > number) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const int64_t shard = place / args.in_stride;
    const int64_t in = (shard * args.rows + row) * args.in_stride + (place - shard * args.in_stride);
    args.out_slots[row * args.out_stride + low] = args.slots[in];
  }
}

// -------------------------------------------------------------------------------------------------------- list_slots

__global__ void __launch_bounds__(kSetThreads) list_slots_kernel(const __grid_constant__ ListSlotsArgs args) {
  constexpr int kEntriesAThread = 8;
  __shared__ uint32_t warp_sums[32];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const int64_t table_row = row / args.rows_per_table_row;
  const int32_t* pages = args.pages.pages + table_row * args.pages.row_stride;
  const int64_t base = args.pages.entry_base != nullptr ? args.pages.entry_base[table_row] : 0;
  const int64_t held = static_cast<int64_t>(args.pages.pages_per_row) * args.slots_per_page;
  const int64_t limit = min(held, args.out_stride);
  int64_t length = max(args.lengths[row], 0);
  const bool cut = length > limit;
  if (cut) length = limit;

  uint32_t absent = 0;
  int64_t given = 0;
  for (int64_t first = 0; first < length; first += kSetThreads * kEntriesAThread) {
    const int64_t mine = first + static_cast<int64_t>(threadIdx.x) * kEntriesAThread;
    int32_t slots[kEntriesAThread];
    uint32_t present = 0;
#pragma unroll
    for (int i = 0; i < kEntriesAThread; ++i) {
      slots[i] = kNoEntry;
      if (mine + i < length) {
        slots[i] = slot_of_entry(pages, args.page_count, args.slots_per_page, mine + i);
        present += slots[i] != kNoEntry;
        absent += slots[i] == kNoEntry;
      }
    }
    uint32_t total;
    int64_t out = row * args.out_stride + given + block_exclusive_scan<kSetThreads>(warp_sums, present, &total);
#pragma unroll
    for (int i = 0; i < kEntriesAThread; ++i) {
      if (slots[i] == kNoEntry) continue;
      args.slots[out] = slots[i];
      if (args.positions != nullptr) args.positions[out] = static_cast<int32_t>(base + mine + i);
      ++out;
    }
    given += total;
    __syncthreads();
  }
  for (int64_t i = given + threadIdx.x; i < args.out_stride; i += kSetThreads) {
    args.slots[row * args.out_stride + i] = kNoEntry;
    if (args.positions != nullptr) args.positions[row * args.out_stride + i] = kNoEntry;
  }
  if (threadIdx.x == 0) args.counts[row] = static_cast<int32_t>(given);
  if (args.report == nullptr) return;
  absent = __reduce_add_sync(0xFFFFFFFFu, absent);
  if ((threadIdx.x & 31) == 0 && absent != 0) {
    report_status(args.report, kStatusAbsentPage);
    report_count(args.report, &OpReport::absent_entries, absent);
  }
  if (threadIdx.x == 0 && cut) report_status(args.report, kStatusBadPageTable);
}

__global__ void add_status_kernel(OpReport* report, uint32_t status) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  atomicOr(&report->status, status);
}

int next_power_of_two(int value) {
  int power = 1;
  while (power < value) power <<= 1;
  return power;
}

}  // namespace

int64_t merge_topk_cuda_scratch(const MergeTopkArgs&) { return 0; }

absl::Status merge_topk_cuda(const MergeTopkArgs& args, void*, int64_t, void* stream) {
  absl::Status status = check_merge_topk(args);
  if (!status.ok()) return status;
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  const OpReport mixed = mixed_variants_of(args);
  if (mixed.status != 0 && args.report != nullptr) {
    absl::Status noted = launch("merge_topk", add_status_kernel, LaunchShape{}, cuda_stream, args.report, mixed.status);
    if (!noted.ok()) return noted;
  }
  if (args.rows == 0) return absl::OkStatus();
  // Room for the sort's next power of two, and for a stretch beyond k before the threshold must rise.
  const int capacity = std::max(next_power_of_two(args.k), args.k + 2 * kSetThreads);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.rows));
  shape.block = dim3(kSetThreads);
  shape.shared_bytes = sizeof(SelectShared) + static_cast<size_t>(capacity) * 8;
  return launch("merge_topk", merge_topk_kernel, shape, cuda_stream, args, capacity);
}

absl::Status list_slots_cuda(const ListSlotsArgs& args, void* stream) {
  absl::Status status = check_list_slots(args);
  if (!status.ok()) return status;
  if (args.rows == 0) return absl::OkStatus();
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.rows));
  shape.block = dim3(kSetThreads);
  return launch("list_slots", list_slots_kernel, shape, static_cast<cudaStream_t>(stream), args);
}

}  // namespace needle
