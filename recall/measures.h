// What a selection is worth: overlap, rank and the comparison with float64 that every recall figure here rests on.
//
// What must stay true:
//  1. Truth is float64 on the *stored* keys: sum over heads of weight x max(0, q . k), no rounding in between. A measure
//     never asks the kernels that it judges.
//  2. Ties and near-ties are not errors: two entries whose float64 logits differ by less than the stated relative
//     tolerance may stand for one another. The tolerance is an argument, never hidden.
//  3. Order of selections does not matter; positions past the context and repeats are faults and reported as such.
//  4. Pure functions: no pool, no clock, no chance.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace needle::recall {

// One indexer query: heads x 128 values and a weight a head.
struct QueryView {
  std::span<const float> q;        // [heads, 128]
  std::span<const float> weights;  // [heads]
};

// logit[s] for every key. keys [entries, 128] in the precision they are stored in, widened.
// Formula: DeepSeek-V3.2 and V4 reference inference, Indexer.forward.
std::vector<double> exact_logits(std::span<const float> keys, const QueryView& query);

// The k best entries of `logits`, best first: score descending, then lower position (needle's one total order).
std::vector<int32_t> exact_topk(std::span<const double> logits, int64_t k);

// 0-based rank of `entry` under the same order.
int64_t rank_of(std::span<const double> logits, int32_t entry);

// Share of `reference` that is in `served`, 0..1; 1 where reference is empty.
double overlap(std::span<const int32_t> served, std::span<const int32_t> reference);

struct SelectionVerdict {
  bool exact = false;            // same set but for near-ties within the tolerance, and no fault below
  int64_t missing = 0;           // members of the exact top k that are not served
  int64_t foreign = 0;           // served entries outside the context, or served twice
  int64_t wrong_count = 0;       // served count minus min(k, entries)
  int64_t beyond_tolerance = 0;  // missing members better than the worst served one by more than the tolerance
  double worst_gap = 0;          // largest such relative gap, also below the tolerance
};

// Compares a served selection (no padding) with the float64 logits. `relative_tolerance` is of the k-th logit's size.
SelectionVerdict judge_selection(std::span<const int32_t> served, std::span<const double> logits, int64_t k, double relative_tolerance);

}  // namespace needle::recall
