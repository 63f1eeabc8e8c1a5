// Rows of read_topk: decode as one call, and prefill under the scratch budget.
#include <cstdio>

#include "kernels/index_logits.h"
#include "kernels/read_topk.h"
#include "tests/bench/gpu_bench_pool.h"

namespace needle::bench {
namespace {

constexpr int kHeads = 64;
constexpr int kTopk = 512;

struct Shape {
  const char* id;
  int rows, length, sets;
};

ReadTopkArgs read_args(const IndexLogitsArgs& logits, const DeviceArray<int32_t>& positions, const DeviceArray<int32_t>& slots,
                       const DeviceArray<int32_t>& counts) {
  ReadTopkArgs args;
  args.logits = logits;
  args.k = kTopk;
  args.positions = positions.get();
  args.slots = slots.get();
  args.counts = counts.get();
  args.out_stride = kTopk;
  return args;
}

void bench_shape(Bench& bench, const FlashPool& pool, const Shape& shape) {
  cudaStream_t stream = bench.stream();
  const PageTables tables(shape.sets, shape.rows, shape.length / 64, 7);
  const int64_t vectors = int64_t{shape.rows} * kHeads;
  DeviceArray<uint16_t> q(kFlashLayers * vectors * 128);
  DeviceArray<float> weights(kFlashLayers * vectors);
  fill_normal_bf16(q.get(), q.count(), 3, 1.0f, stream);
  fill_normal_f32(weights.get(), weights.count(), 4, 0.011f, 0.0f, stream);
  const DeviceArray<int32_t> visible(std::vector<int32_t>(static_cast<size_t>(shape.rows), shape.length));
  DeviceArray<int32_t> positions(int64_t{shape.rows} * kTopk), slots(int64_t{shape.rows} * kTopk), counts(shape.rows);
  const DeviceArray<OpReport> report(std::vector<OpReport>(1, OpReport{}));
  must(cudaStreamSynchronize(stream), "fill");

  const auto args_of = [&](int call) {
    IndexLogitsArgs logits;
    logits.keys = pool.layer(call);
    logits.pages = tables.view(call);
    logits.q = q.get() + call % kFlashLayers * vectors * 128;
    logits.head_weights = weights.get() + call % kFlashLayers * vectors;
    logits.visible = visible.get();
    logits.query_count = shape.rows;
    logits.heads = kHeads;
    return read_args(logits, positions, slots, counts);
  };
  const absl::StatusOr<ReadTopkPlan> plan = plan_read_topk_cuda(args_of(0));
  must(plan.status(), "plan_read_topk_cuda");
  DeviceArray<std::byte> scratch(plan->scratch_bytes);
  const double us =
      bench.us_a_call([&](int call) { return read_topk_cuda(args_of(call), *plan, scratch.get(), plan->scratch_bytes, stream); });
  // Fallbacks are counted in a call of their own, as a report costs launches.
  ReadTopkArgs reported = args_of(0);
  reported.report = report.get();
  must(read_topk_cuda(reported, *plan, scratch.get(), plan->scratch_bytes, stream), "read_topk_cuda");
  must(cudaStreamSynchronize(stream), "read_topk_cuda");
  OpReport found{};
  must(cudaMemcpy(&found, report.get(), sizeof found, cudaMemcpyDeviceToHost), "report");
  char note[128];
  const double bytes = 256.0 * shape.rows * shape.length;
  std::snprintf(note, sizeof note, "%.2f TB/s of keys; %d tokens a chunk, %.0f MB of scratch, %llu fallbacks", bytes / us * 1e-6,
                plan->queries_a_chunk, static_cast<double>(plan->scratch_bytes) * 1e-6, static_cast<unsigned long long>(found.fallbacks));
  bench.record(shape.id, us, note);
}

// Prefill under the default budget, beside the logits alone.
void bench_prefill_select(Bench& bench) {
  constexpr int kQueries = 4'096;
  constexpr int kKeys = 16'384;
  constexpr int kPages = kKeys / 64;
  constexpr int kSets = 4;
  cudaStream_t stream = bench.stream();
  const int64_t page_bytes = layer_page_bytes(ElementFormat::kBf16, 128, 64);
  DeviceArray<uint16_t> keys(kSets * kPages * page_bytes / 2);
  DeviceArray<uint16_t> q(int64_t{kQueries} * kHeads * 128);
  DeviceArray<float> weights(int64_t{kQueries} * kHeads);
  fill_normal_bf16(keys.get(), keys.count(), 8, 1.0f, stream);
  fill_normal_bf16(q.get(), q.count(), 9, 1.0f, stream);
  fill_normal_f32(weights.get(), weights.count(), 10, 0.011f, 0.0f, stream);
  std::vector<int32_t> ids(kPages);
  for (int i = 0; i < kPages; ++i) ids[static_cast<size_t>(i)] = (i * 77) % kPages;
  const DeviceArray<int32_t> table(ids);
  const DeviceArray<int32_t> visible(std::vector<int32_t>(kQueries, kKeys));
  const DeviceArray<int32_t> query_row(std::vector<int32_t>(kQueries, 0));
  DeviceArray<int32_t> positions(int64_t{kQueries} * kTopk), slots(int64_t{kQueries} * kTopk), counts(kQueries);

  const auto logits_args = [&](int call) {
    IndexLogitsArgs args;
    args.keys.base = reinterpret_cast<const std::byte*>(keys.get()) + call % kSets * kPages * page_bytes;
    args.keys.page_stride = page_bytes;
    args.keys.page_count = kPages;
    args.keys.slots_per_page = 64;
    args.keys.head_dim = 128;
    args.keys.element = ElementFormat::kBf16;
    args.pages.pages = table.get();
    args.pages.row_stride = kPages;
    args.pages.rows = 1;
    args.pages.pages_per_row = kPages;
    args.q = q.get();
    args.head_weights = weights.get();
    args.query_row = query_row.get();
    args.visible = visible.get();
    args.query_count = kQueries;
    args.heads = kHeads;
    args.entry_count = kKeys;
    args.score_stride = kKeys;
    return args;
  };
  double logits_us = 0;
  {
    DeviceArray<float> all_scores(int64_t{kQueries} * kKeys);
    logits_us = bench.us_a_call([&](int call) {
      IndexLogitsArgs args = logits_args(call);
      args.scores = all_scores.get();
      return index_logits_cuda(args, nullptr, 0, stream);
    });
  }
  const ReadTopkArgs first = read_args(logits_args(0), positions, slots, counts);
  const absl::StatusOr<ReadTopkPlan> plan = plan_read_topk_cuda(first);
  must(plan.status(), "plan_read_topk_cuda");
  DeviceArray<std::byte> scratch(plan->scratch_bytes);
  const double us = bench.us_a_call([&](int call) {
    return read_topk_cuda(read_args(logits_args(call), positions, slots, counts), *plan, scratch.get(), plan->scratch_bytes, stream);
  });
  char note[128];
  std::snprintf(note, sizeof note, "%.3f ms over %.3f ms; %d tokens a chunk, %.0f MB of scratch", us * 1e-3, logits_us * 1e-3,
                plan->queries_a_chunk, static_cast<double>(plan->scratch_bytes) * 1e-6);
  bench.record("prefill.select.bf16.4096x16384", 100 * (us / logits_us - 1), note);
}

}  // namespace

void bench_select(Bench& bench) {
  const FlashPool pool(ElementFormat::kBf16, bench.stream());
  for (const Shape& shape : {Shape{"select.bf16.64x131072", 64, 131'072, 1}, Shape{"select.bf16.16x131072", 16, 131'072, 2},
                             Shape{"select.bf16.64x16384", 64, 16'384, 4}, Shape{"select.bf16.16x16384", 16, 16'384, 16},
                             Shape{"select.bf16.1x131072", 1, 131'072, 32}}) {
    bench_shape(bench, pool, shape);
  }
}

void bench_select_prefill(Bench& bench) { bench_prefill_select(bench); }

}  // namespace needle::bench
