// How long selection takes on one core, row order by row order: no order may cost four times the ordinary one. Answers
// are checked by the tests, not here.
//
// A row of 131,072 is 512 KiB. 1x131072 selects from one row again and again: what index_logits has just written lies in
// the cache in the same way. 64x131072 takes 64 rows in turn, 32 MiB, more than the cache a core has to itself, and so
// measures the memory as well. best_us is the quickest call: a neighbour's work on a shared machine is not in it.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "base/workers.h"
#include "kernels/select_topk.h"

namespace needle {
namespace {

constexpr int kRotatingRows = 64;

float gaussian(Rng& rng) {
  double sum = 0;
  for (int i = 0; i < 12; ++i) sum += rng.unit();
  return static_cast<float>(sum - 6.0);
}

enum class RowOrder {
  kOrdinary,
  kAscending,
  kDescending,
  kSawtooth,
  kBestLast,
  kBestInOneRun,
  kAllEqual,
  kTwoValues,
  kOneBin,
  kHalfNan,
  kMostlyAbsent,
};
const char* name_of(RowOrder order) {
  switch (order) {
    case RowOrder::kOrdinary: return "ordinary";
    case RowOrder::kAscending: return "ascending";
    case RowOrder::kDescending: return "descending";
    case RowOrder::kSawtooth: return "sawtooth";
    case RowOrder::kBestLast: return "best_last";
    case RowOrder::kBestInOneRun: return "best_in_one_run";
    case RowOrder::kAllEqual: return "all_equal";
    case RowOrder::kTwoValues: return "two_values";
    case RowOrder::kMostlyAbsent: return "mostly_absent";
    case RowOrder::kOneBin: return "one_half_precision_bin";
    case RowOrder::kHalfNan: return "half_nan";
  }
  return "";
}

std::vector<float> scores_of(RowOrder order, int64_t length, int64_t rows) {
  Rng rng(7);
  std::vector<float> scores(static_cast<size_t>(rows * length));
  for (int64_t row = 0; row < rows; ++row) {
    float* out = scores.data() + row * length;
    for (int64_t i = 0; i < length; ++i) {
      const float ordinary = gaussian(rng);
      switch (order) {
        case RowOrder::kOrdinary:
        case RowOrder::kAscending:
        case RowOrder::kDescending: out[i] = ordinary; break;
        case RowOrder::kSawtooth: out[i] = static_cast<float>(i % 4096); break;
        case RowOrder::kBestLast: out[i] = i * 8 >= length * 7 ? 10.0f + static_cast<float>(i) : ordinary; break;
        case RowOrder::kBestInOneRun: out[i] = i >= length / 3 && i < length / 3 + 700 ? 50.0f + ordinary : ordinary; break;
        case RowOrder::kAllEqual: out[i] = 0.75f; break;
        case RowOrder::kTwoValues: out[i] = rng.chance(0.5) ? 0.5f : 0.75f; break;
        case RowOrder::kMostlyAbsent:
          out[i] = ordinary;
          if (i % 512 != 77) std::memcpy(&out[i], &kAbsentScoreBits, sizeof(out[i]));
          break;
        case RowOrder::kOneBin: out[i] = 1.1f + 0.01f * ordinary; break;
        case RowOrder::kHalfNan: out[i] = rng.chance(0.5) ? std::nanf("") : ordinary; break;
      }
    }
    if (order == RowOrder::kAscending) std::sort(out, out + length);
    if (order == RowOrder::kDescending) std::sort(out, out + length, std::greater<float>());
  }
  return scores;
}

void select_rows(benchmark::State& state, CpuIsa isa, RowOrder order, int64_t length, int k, int64_t rows) {
  const std::vector<float> scores = scores_of(order, length, rows);
  const std::vector<int32_t> lengths(1, static_cast<int32_t>(length));
  std::vector<int32_t> positions(static_cast<size_t>(k));
  int32_t count = 0;
  OpReport report{};
  SelectTopkArgs args;
  args.score_stride = length;
  args.lengths = lengths.data();
  args.rows = 1;
  args.length_max = static_cast<int32_t>(length);
  args.k = k;
  args.positions = positions.data();
  args.counts = &count;
  args.out_stride = k;
  args.report = &report;
  CallerThread caller;
  const int64_t bytes = select_topk_cpu_scratch(args, 1);
  const std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)), std::free);
  int64_t row = 0;
  double best_us = std::numeric_limits<double>::infinity();
  for (auto _ : state) {
    args.scores = scores.data() + row * length;
    row = (row + 1) % rows;
    const auto begin = std::chrono::steady_clock::now();
    if (!select_topk_cpu(args, isa, caller, scratch.get(), bytes).ok()) state.SkipWithError("refused");
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    best_us = std::min(best_us, took.count());
    benchmark::DoNotOptimize(positions.data());
  }
  state.counters["best_us"] = best_us;
  state.SetBytesProcessed(state.iterations() * length * 4);
  state.counters["fallbacks"] = benchmark::Counter(static_cast<double>(report.fallbacks), benchmark::Counter::kAvgIterations);
}

const bool kRegistered = [] {
  for (const CpuIsa isa : cpu_isas_present()) {
    if (isa == CpuIsa::kAvx512Bf16) continue;  // selection is the same there
    const auto add = [isa](RowOrder order, int64_t length, int k, int64_t rows) {
      const std::string name = std::string("select_topk/") + needle::name_of(isa) + "/" + name_of(order) + "/" + std::to_string(rows) +
                               "x" + std::to_string(length) + "/k" + std::to_string(k);
      benchmark::RegisterBenchmark(name.c_str(), select_rows, isa, order, length, k, rows)->Unit(benchmark::kMicrosecond);
    };
    for (const RowOrder order : {RowOrder::kOrdinary, RowOrder::kAscending, RowOrder::kDescending, RowOrder::kSawtooth, RowOrder::kBestLast,
                                 RowOrder::kBestInOneRun, RowOrder::kAllEqual, RowOrder::kTwoValues, RowOrder::kOneBin, RowOrder::kHalfNan,
                                 RowOrder::kMostlyAbsent}) {
      add(order, 131072, 512, 1);
      add(order, 131072, 512, kRotatingRows);
    }
    for (const int k : {1024, 2048, 8192}) add(RowOrder::kOrdinary, 131072, k, 1);
    for (const int64_t length : {4096, 8192, 16384, 32768}) add(RowOrder::kOrdinary, length, 512, 1);
    add(RowOrder::kOrdinary, 16384, 2048, 1);
  }
  return true;
}();

}  // namespace
}  // namespace needle
