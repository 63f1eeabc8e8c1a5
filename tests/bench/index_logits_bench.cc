// Scoring on one core, beside that core's own peak: a loop of nothing but the instruction the twin multiplies with
// (vdpbf16ps, or a fused multiply-add in fp32). Shapes are those of DeepSeek-V4: 64 heads, pages of 64 keys in shuffled
// order. Figures with `best` come from the fastest repeat, and on one thread they and the peak count that thread's own
// processor time: other work on a shared machine then takes little away. Answers are checked by the tests, not here.
#include <benchmark/benchmark.h>

#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/rng.h"
#include "base/units.h"
#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "kernels/index_logits.h"
#include "kernels/quantise.h"

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own AVX-512 header
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace needle {
namespace {

int64_t thread_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * kNanosPerSecond + now.tv_nsec;
}

constexpr int kHeads = 64;
constexpr int kSlots = 64;

// ---------------------------------------------------------------------------------------------------------------------
// Peaks: independent chains, enough of them to hide the latency on any core we know.

constexpr int64_t kPeakRounds = 2'000'000;

#if defined(__clang__)
#define NEEDLE_UNROLL _Pragma("unroll")
#else
#define NEEDLE_UNROLL _Pragma("GCC unroll 20")  // or the chains would live in memory at -O2
#endif

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) float peak_loop_avx2() {
  __m256 sum[12];
  NEEDLE_UNROLL
  for (__m256& chain : sum) {
    chain = _mm256_set1_ps(1.0f);
    __asm__ volatile("" : "+x"(chain));  // or equal chains would become one
  }
  __m256 factor = _mm256_set1_ps(0.999999f);
  for (int64_t i = 0; i < kPeakRounds; ++i) {
    NEEDLE_UNROLL
    for (__m256& chain : sum) chain = _mm256_fmadd_ps(chain, factor, factor);
    __asm__ volatile("" : "+x"(factor));
  }
  __m256 all = sum[0];
  NEEDLE_UNROLL
  for (int i = 1; i < 12; ++i) all = _mm256_add_ps(all, sum[i]);
  return _mm256_cvtss_f32(all);
}

__attribute__((target("avx512f"))) float peak_loop_avx512() {
  __m512 sum[20];
  NEEDLE_UNROLL
  for (__m512& chain : sum) {
    chain = _mm512_set1_ps(1.0f);
    __asm__ volatile("" : "+v"(chain));
  }
  __m512 factor = _mm512_set1_ps(0.999999f);
  for (int64_t i = 0; i < kPeakRounds; ++i) {
    NEEDLE_UNROLL
    for (__m512& chain : sum) chain = _mm512_fmadd_ps(chain, factor, factor);
    __asm__ volatile("" : "+v"(factor));
  }
  __m512 all = sum[0];
  NEEDLE_UNROLL
  for (int i = 1; i < 20; ++i) all = _mm512_add_ps(all, sum[i]);
  return _mm512_cvtss_f32(all);
}

__attribute__((target("avx512f,avx512bf16"))) float peak_loop_avx512bf16() {
  __m512 sum[20];
  NEEDLE_UNROLL
  for (__m512& chain : sum) {
    chain = _mm512_setzero_ps();
    __asm__ volatile("" : "+v"(chain));
  }
  __m512i pair = _mm512_set1_epi32(0x3C003C00);
  for (int64_t i = 0; i < kPeakRounds; ++i) {
    NEEDLE_UNROLL
    for (__m512& chain : sum) chain = _mm512_dpbf16_ps(chain, (__m512bh)pair, (__m512bh)pair);
    __asm__ volatile("" : "+v"(pair));
  }
  __m512 all = sum[0];
  NEEDLE_UNROLL
  for (int i = 1; i < 20; ++i) all = _mm512_add_ps(all, sum[i]);
  return _mm512_cvtss_f32(all);
}
#endif

// FLOP/s of this core's own multiply instruction; 0 where the set has no single one (portable).
double peak_of(CpuIsa isa) {
  float (*loop)() = nullptr;
  double flop = 0;
#if defined(__x86_64__)
  if (isa == CpuIsa::kAvx2) loop = peak_loop_avx2, flop = 12.0 * 8 * 2;
  if (isa == CpuIsa::kAvx512) loop = peak_loop_avx512, flop = 20.0 * 16 * 2;
  if (isa == CpuIsa::kAvx512Bf16) loop = peak_loop_avx512bf16, flop = 20.0 * 16 * 4;
#endif
  if (loop == nullptr || !cpu_has(isa)) return 0;
  double best = 0;
  for (int i = 0; i < 20; ++i) {
    const int64_t begin = thread_ns();
    benchmark::DoNotOptimize(loop());
    const int64_t took = thread_ns() - begin;
    best = std::max(best, flop * static_cast<double>(kPeakRounds) / (static_cast<double>(took) * 1e-9));
  }
  return best;
}

double cached_peak_of(CpuIsa isa) {
  static const double peaks[] = {peak_of(CpuIsa::kPortable), peak_of(CpuIsa::kAvx2), peak_of(CpuIsa::kAvx512),
                                 peak_of(CpuIsa::kAvx512Bf16)};
  return peaks[static_cast<int>(isa)];
}

// ---------------------------------------------------------------------------------------------------------------------

struct FreeAligned {
  void operator()(std::byte* memory) const { std::free(memory); }
};

struct Workload {
  int rows = 1;           // sequences
  int64_t context = 0;    // entries of each
  int queries_a_row = 1;  // decode tokens, or prefill queries with causal lengths over the last of the context
  bool prefill = false;
  ElementFormat element = ElementFormat::kBf16;
};

struct Problem {
  explicit Problem(const Workload& load) {
    const int64_t pages_a_row = div_ceil(load.context, kSlots);
    const int64_t pages = pages_a_row * load.rows;
    const int64_t stride = round_up(layer_page_bytes(load.element, kIndexHeadDim, kSlots), kPageAlignment);
    pool.reset(static_cast<std::byte*>(std::aligned_alloc(4096, static_cast<size_t>(round_up(pages * stride, 4096)))));
    Rng rng(7);
    for (int64_t page = 0; page < pages; ++page) {
      for (int slot = 0; slot < kSlots; ++slot) {
        const SlotPlace place = slot_place(load.element, kIndexHeadDim, kSlots, slot);
        std::byte* part = pool.get() + page * stride;
        if (load.element == ElementFormat::kBf16) {
          for (int d = 0; d < kIndexHeadDim; ++d) {
            const uint16_t bits = bf16_of(static_cast<float>(rng.unit() - 0.5));
            std::memcpy(part + place.data + 2 * d, &bits, 2);
          }
        } else {
          const int64_t bytes = slot_data_bytes(load.element, kIndexHeadDim);
          for (int64_t i = 0; i < bytes; ++i) part[place.data + i] = static_cast<std::byte>(rng.below(0x7F));
          const float scale = 0.01f;
          if (load.element == ElementFormat::kFp8) std::memcpy(part + place.scale, &scale, sizeof scale);
          if (load.element == ElementFormat::kFp4) std::memset(part + place.scale, 120, 4);
        }
      }
    }
    for (int64_t i = 0; i < pages; ++i) table.push_back(static_cast<int32_t>(i));
    for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[rng.below(i)]);
    const int queries = load.rows * load.queries_a_row;
    for (int64_t i = 0; i < int64_t{queries} * kHeads * kIndexHeadDim; ++i) q.push_back(bf16_of(static_cast<float>(rng.unit() - 0.5)));
    for (int i = 0; i < queries * kHeads; ++i) weights.push_back(static_cast<float>(rng.unit() - 0.3));
    for (int t = 0; t < queries; ++t) {
      rows.push_back(t / load.queries_a_row);
      const int64_t hidden = load.prefill ? (load.queries_a_row - 1 - t % load.queries_a_row) / 4 : 0;
      visible.push_back(static_cast<int32_t>(load.context - hidden));
      key_visits += load.context - hidden;
    }
    scores.resize(static_cast<size_t>(queries) * static_cast<size_t>(load.context));

    args.keys.base = pool.get();
    args.keys.page_stride = stride;
    args.keys.page_count = pages;
    args.keys.slots_per_page = kSlots;
    args.keys.head_dim = kIndexHeadDim;
    args.keys.element = load.element;
    args.pages.pages = table.data();
    args.pages.row_stride = pages_a_row;
    args.pages.rows = load.rows;
    args.pages.pages_per_row = static_cast<int32_t>(pages_a_row);
    args.q = q.data();
    args.head_weights = weights.data();
    args.query_row = rows.data();
    args.visible = visible.data();
    args.query_count = queries;
    args.heads = kHeads;
    args.entry_count = load.context;
    args.scores = scores.data();
    args.score_stride = load.context;
  }

  std::unique_ptr<std::byte, FreeAligned> pool;
  std::vector<int32_t> table;
  std::vector<uint16_t> q;
  std::vector<float> weights;
  std::vector<int32_t> rows;
  std::vector<int32_t> visible;
  std::vector<float> scores;
  int64_t key_visits = 0;  // (query, key) pairs scored a call
  IndexLogitsArgs args;
};

void score(benchmark::State& state, CpuIsa isa, const Workload& load, int threads) {
  Problem problem(load);
  WorkerThreads workers(threads);
  const SteadyClock wall;
  const auto now_ns = [&] { return threads == 1 ? thread_ns() : wall.now_ns(); };
  int64_t best_ns = INT64_MAX;
  for (auto _ : state) {
    const int64_t begin = now_ns();
    const absl::Status status = index_logits_cpu(problem.args, isa, workers);
    best_ns = std::min(best_ns, now_ns() - begin);
    if (!status.ok()) state.SkipWithError(status.ToString().c_str());
    benchmark::ClobberMemory();
  }
  const double visits = static_cast<double>(problem.key_visits);
  const double flop = visits * kHeads * kIndexHeadDim * 2;
  const double key_bytes = static_cast<double>(layer_page_bytes(load.element, kIndexHeadDim, kSlots)) / kSlots;
  state.counters["Mkeys/s"] = benchmark::Counter(visits * 1e-6 * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
  const double best_s = static_cast<double>(best_ns) * 1e-9;
  state.counters["best_Mkeys/s"] = visits / best_s * 1e-6;
  state.counters["best_GB/s"] = visits * key_bytes / best_s * 1e-9;
  state.counters["best_GFLOP/s"] = flop / best_s * 1e-9;
  const double peak = cached_peak_of(isa) * threads;
  if (peak > 0) state.counters["best_%_of_peak"] = 100 * flop / best_s / peak;
}

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  std::string family;
  std::string model;
  std::string name;
  for (std::string line; std::getline(info, line) && !line.empty();) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    if (line.rfind("cpu family", 0) == 0) family = line.substr(colon + 2);
    if (line.rfind("model\t", 0) == 0) model = line.substr(colon + 2);
    if (line.rfind("model name", 0) == 0) name = line.substr(colon + 2);
  }
  return name + " (family " + family + ", model " + model + ")";
}

int register_all() {
  benchmark::AddCustomContext("cpu", cpu_model());
  if (!cpu_has(CpuIsa::kAvx512Bf16)) {
    benchmark::AddCustomContext("index_logits",
                                std::string("this machine has no AVX-512 BF16; its best set is ") + name_of(best_cpu_isa()));
  }
  for (CpuIsa isa : cpu_isas_present()) {
    if (cached_peak_of(isa) > 0) {
      benchmark::AddCustomContext(std::string("peak of one core, ") + name_of(isa),
                                  std::to_string(static_cast<int64_t>(cached_peak_of(isa) * 1e-9)) + " GFLOP/s");
    }
    const auto add = [&](const std::string& shape, const Workload& load, int threads) {
      benchmark::RegisterBenchmark(("index_logits/" + std::string(name_of(isa)) + "/" + shape).c_str(),
                                   [=](benchmark::State& state) { score(state, isa, load, threads); })
          ->Unit(benchmark::kMillisecond)
          ->UseRealTime();
    };
    using enum ElementFormat;
    add("decode_1x4096_bf16", {.context = 4096}, 1);
    add("decode_1x16384_bf16", {.context = 16384}, 1);
    add("decode_1x16384_fp8", {.context = 16384, .element = kFp8}, 1);
    add("decode_1x16384_fp4", {.context = 16384, .element = kFp4}, 1);
    if (isa == CpuIsa::kPortable) continue;
    add("decode_1x131072_bf16", {.context = 131072}, 1);
    add("decode_16x4096_bf16", {.rows = 16, .context = 4096}, 1);
    add("decode_4x8192_bf16_4_tokens", {.rows = 4, .context = 8192, .queries_a_row = 4}, 1);
    add("decode_4x8192_fp8_4_tokens", {.rows = 4, .context = 8192, .queries_a_row = 4, .element = kFp8}, 1);
    add("prefill_16x16384_bf16", {.context = 16384, .queries_a_row = 16, .prefill = true}, 1);
    add("prefill_16x16384_fp8", {.context = 16384, .queries_a_row = 16, .prefill = true, .element = kFp8}, 1);
    add("prefill_16x16384_bf16_2_threads", {.context = 16384, .queries_a_row = 16, .prefill = true}, 2);
  }
  return 0;
}
const int registered = register_all();

}  // namespace
}  // namespace needle
