// How read_topk cuts a batch, alike on CPU and GPU: what lies in the scratch, and how many query tokens fit a budget.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/read_topk.h"

namespace needle {

// What differs between the twins.
struct ReadTopkNeeds {
  int64_t alignment = 64;    // of every part of the scratch
  int64_t select_bytes = 0;  // scratch of one chunk's selection, whatever its queries
  int maxima_group = 0;      // scores a maximum that logits leave for selection stands for; 0: none are left
  int32_t queries_max = 0;   // query tokens that a chunk should not exceed; 0: the budget alone decides
  const char* remedy = "";   // ends the refusal of a budget that is too small
};

// The most query tokens a chunk that the budget allows, or INVALID_ARGUMENT naming the bytes that would do.
absl::StatusOr<ReadTopkPlan> plan_read_topk_within(const ReadTopkArgs& args, const ReadTopkNeeds& needs, int64_t budget_bytes);

// The layout of a chunk of this many query tokens.
ReadTopkPlan read_topk_layout(const ReadTopkArgs& args, const ReadTopkNeeds& needs, int32_t queries);

// INVALID_ARGUMENT where the plan was made for other arguments, or the scratch does not hold it; `needed` is the plan's
// layout for these arguments.
absl::Status admit_read_topk_plan(const char* operation, const ReadTopkArgs& args, const ReadTopkPlan& plan, const ReadTopkPlan& needed,
                                  const void* scratch, int64_t scratch_bytes, int64_t alignment);

}  // namespace needle
