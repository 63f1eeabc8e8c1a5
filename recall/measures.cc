#include "recall/measures.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <unordered_set>

#include "base/check.h"

namespace needle::recall {
namespace {

constexpr size_t kDims = 128;

bool ranks_before(std::span<const double> logits, int32_t a, int32_t b) {
  const double left = logits[static_cast<size_t>(a)];
  const double right = logits[static_cast<size_t>(b)];
  const bool left_nan = std::isnan(left);
  const bool right_nan = std::isnan(right);
  if (left_nan != right_nan) return right_nan;
  if (!left_nan && left != right) return left > right;
  return a < b;
}

}  // namespace

std::vector<double> exact_logits(std::span<const float> keys, const QueryView& query) {
  const size_t heads = query.weights.size();
  NEEDLE_CHECK(query.q.size() == heads * kDims, "a query has 128 values a head");
  NEEDLE_CHECK(keys.size() % kDims == 0, "a key has 128 values");
  std::vector<double> logits(keys.size() / kDims);
  for (size_t entry = 0; entry < logits.size(); ++entry) {
    const float* key = keys.data() + entry * kDims;
    double logit = 0;
    for (size_t head = 0; head < heads; ++head) {
      const float* q = query.q.data() + head * kDims;
      // Four sums side by side: double has bits to spare, and the compiler may use them all at once.
      double sum[4] = {0, 0, 0, 0};
      for (size_t d = 0; d < kDims; d += 4) {
        for (size_t lane = 0; lane < 4; ++lane) sum[lane] += static_cast<double>(q[d + lane]) * key[d + lane];
      }
      const double dot = (sum[0] + sum[1]) + (sum[2] + sum[3]);
      logit += static_cast<double>(query.weights[head]) * (dot > 0 || std::isnan(dot) ? dot : 0.0);
    }
    logits[entry] = logit;
  }
  return logits;
}

std::vector<int32_t> exact_topk(std::span<const double> logits, int64_t k) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto kept = static_cast<std::ptrdiff_t>(std::min<int64_t>(k, static_cast<int64_t>(order.size())));
  std::partial_sort(order.begin(), order.begin() + kept, order.end(), [&](int32_t a, int32_t b) { return ranks_before(logits, a, b); });
  order.resize(static_cast<size_t>(kept));
  return order;
}

int64_t rank_of(std::span<const double> logits, int32_t entry) {
  int64_t rank = 0;
  for (int32_t other = 0; other < static_cast<int32_t>(logits.size()); ++other) {
    if (other != entry && ranks_before(logits, other, entry)) ++rank;
  }
  return rank;
}

double overlap(std::span<const int32_t> served, std::span<const int32_t> reference) {
  if (reference.empty()) return 1.0;
  const std::unordered_set<int32_t> have(served.begin(), served.end());
  int64_t shared = 0;
  for (int32_t entry : reference) shared += have.count(entry) != 0 ? 1 : 0;
  return static_cast<double>(shared) / static_cast<double>(reference.size());
}

SelectionVerdict judge_selection(std::span<const int32_t> served, std::span<const double> logits, int64_t k, double relative_tolerance) {
  SelectionVerdict verdict;
  const auto entries = static_cast<int64_t>(logits.size());
  std::unordered_set<int32_t> have;
  double worst_served = std::numeric_limits<double>::infinity();
  for (int32_t entry : served) {
    if (entry < 0 || entry >= entries || !have.insert(entry).second) {
      ++verdict.foreign;
      continue;
    }
    worst_served = std::min(worst_served, logits[static_cast<size_t>(entry)]);
  }
  verdict.wrong_count = static_cast<int64_t>(served.size()) - std::min(k, entries);
  const std::vector<int32_t> best = exact_topk(logits, k);
  const double kth = best.empty() ? 0.0 : logits[static_cast<size_t>(best.back())];
  const double scale = std::max(std::abs(kth), std::numeric_limits<double>::min());
  for (int32_t entry : best) {
    if (have.count(entry) != 0) continue;
    ++verdict.missing;
    const double gap = (logits[static_cast<size_t>(entry)] - worst_served) / scale;
    verdict.worst_gap = std::max(verdict.worst_gap, gap);
    if (!(gap < relative_tolerance)) ++verdict.beyond_tolerance;
  }
  verdict.exact = verdict.foreign == 0 && verdict.wrong_count == 0 && verdict.beyond_tolerance == 0;
  return verdict;
}

}  // namespace needle::recall
