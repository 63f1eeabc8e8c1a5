// How select_topk is cut over a GPU: plain numbers, made from host-known sizes and the device's facts, tuned by table.
//
// What must stay true:
//  1. A plan changes the time and never the answer; tests run several and compare bit for bit.
//  2. A plan depends on capacities alone (rows, length_max, k), so a captured graph keeps it whatever the lengths are.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/launch.h"
#include "kernels/select_topk.h"

namespace needle {

struct SelectPlan {
  int threads = 0;  // a block: 512 or 1024
  int cluster = 1;  // blocks that share a row, each with its part: 1, 2, 4, 8 or 16
  int cluster_log2 = 0;
  int capacity = 0;  // rank keys that the pool holds, a multiple of threads, >= k + threads
  int stages = 0;    // of the ring of score tiles, each two 16-byte vectors a thread: 1..4
  int slots = 0;     // entries of a thread's list: 4..32, or 0: no lists, rows are read slowly
  int64_t shared_bytes = 0;
  int sample_log2 = 4;            // of rows that are streamed: 16-byte vectors of each of 64 strands that make a sample, 3..5
  int first_blocks = 0x7FFFFFFF;  // that can begin while the kernel before still runs
};

SelectPlan plan_select_topk(const SelectTopkArgs& args, const DeviceFacts& facts);

// select_topk_cuda with a plan of the caller's. Refuses plans that the device or `k` rules out.
absl::Status select_topk_cuda_planned(const SelectTopkArgs& args, const SelectPlan& plan, void* stream);

// Dynamic shared memory of a plan; the plan's shared_bytes is this.
int64_t select_topk_shared_bytes(const SelectPlan& plan);

}  // namespace needle
