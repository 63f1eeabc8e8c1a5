// read_topk: from an index query to the entries it should read. prepare_index_q (optional), index_logits and
// select_topk over chunks of query tokens, so that scratch stays under a stated budget at any context and batch.
//
// What must stay true:
//  1. The whole scratch (scores, prepared queries, selection) fits the budget the plan was made with; scores are never
//     held for more than a chunk. A budget too small for the smallest chunk is refused with the bytes that would do.
//  2. The answer is that of the three operations over the whole batch, bit for bit within one score variant: chunks,
//     budget and threads leave no trace in it.
//  3. Nothing is allocated; the scratch is the caller's, its size is asked first (plan.scratch_bytes).
//  4. NaN and absent entries are counted once (by the logits).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/units.h"
#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "kernels/index_logits.h"
#include "kernels/pool_view.h"
#include "kernels/prepare_index_q.h"
#include "kernels/select_topk.h"

namespace needle {

// 64 query tokens of a million entries, or a 2,048-token prefill chunk of 32,768.
inline constexpr int64_t kReadTopkBudgetDefault = 256 * kMiB;

struct ReadTopkArgs {
  // keys, pages, query_row, queries_per_row, visible, query_count and heads of the whole batch; q, q_element, q_scale
  // and head_weights too, unless `prepare` makes them. entry_begin, entry_count, scores, score_stride and report are
  // not read.
  IndexLogitsArgs logits;

  // Raw queries to prepare, chunk by chunk, in scratch: tokens == query_count; out_q, out_q_scale, out_weights and
  // report are not read. Null: logits.q is prepared already.
  const PrepareIndexQArgs* prepare = nullptr;

  // A host-known bound on visible[] (entries); 0 means the page table's row. Visible lengths past it are cut and
  // reported.
  int64_t entries_max = 0;

  int32_t k = 0;  // 1..8192
  TopkOrder order = TopkOrder::kByPosition;
  int32_t* positions = nullptr;  // [query_count, out_stride], all four as select_topk gives them
  int32_t* slots = nullptr;      // may be null
  float* out_scores = nullptr;   // may be null
  int32_t* counts = nullptr;     // [query_count]
  int64_t out_stride = 0;        // >= k
  OpReport* report = nullptr;    // may be null
};

// How a batch is cut. A pure function of host fields and budget; the same plan serves every step of one shape.
struct ReadTopkPlan {
  int32_t queries_a_chunk = 0;
  int64_t entries = 0;       // score columns that may be used
  int64_t score_stride = 0;  // floats
  int64_t scratch_bytes = 0;
  // Where the parts lie in the scratch, each 64-byte aligned (256 on CUDA).
  int64_t q_offset = 0;
  int64_t q_scale_offset = 0;
  int64_t weights_offset = 0;
  int64_t select_offset = 0;
  int64_t select_bytes = 0;
  int64_t maxima_offset = 0;  // of the maxima that logits leave for selection (select_by_maxima.h)
  int64_t maxima_stride = 0;  // of a query, 4-byte words; 0: none
};

// INVALID_ARGUMENT naming value and limit; nothing that may lie on a device is looked at.
absl::Status check_read_topk(const ReadTopkArgs& args);

// `width` is that of the workers that will run it.
absl::StatusOr<ReadTopkPlan> plan_read_topk_cpu(const ReadTopkArgs& args, int width, int64_t budget_bytes = kReadTopkBudgetDefault);
// scratch: plan.scratch_bytes, 64-byte aligned.
absl::Status read_topk_cpu(const ReadTopkArgs& args, const ReadTopkPlan& plan, CpuIsa isa, Workers& workers, void* scratch,
                           int64_t scratch_bytes);

// All pointers are device pointers but `prepare`; `stream` is a cudaStream_t. Graph-capturable.
absl::StatusOr<ReadTopkPlan> plan_read_topk_cuda(const ReadTopkArgs& args, int64_t budget_bytes = kReadTopkBudgetDefault);
absl::Status read_topk_cuda(const ReadTopkArgs& args, const ReadTopkPlan& plan, void* scratch, int64_t scratch_bytes, void* stream);

// ---------------------------------------------------------------------------------------------------------------
// What every twin shares: the arguments of one chunk. Host code.

struct ReadTopkChunk {
  PrepareIndexQArgs prepare;  // only where args.prepare is given
  IndexLogitsArgs logits;
  SelectTopkArgs select;  // its report is for the caller to set: only status and fallbacks belong in args.report
};

// Query tokens [begin, begin + count) of the batch; begin is a multiple of plan.queries_a_chunk.
ReadTopkChunk read_topk_chunk(const ReadTopkArgs& args, const ReadTopkPlan& plan, int32_t begin, int32_t count, void* scratch);

}  // namespace needle
