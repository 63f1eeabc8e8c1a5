// Rows of a whole decode read: index_logits, then select_topk on its scores, as two dependent calls; and of prefill under
// a scratch budget.
#include <cstdio>

#include "kernels/index_logits.h"
#include "kernels/select_topk.h"
#include "tests/bench/gpu_bench_pool.h"

namespace needle::bench {
namespace {

constexpr int kHeads = 64;
constexpr int kTopk = 512;

struct Shape {
  const char* id;
  int rows, length, sets;
};

void bench_shape(Bench& bench, const FlashPool& pool, const Shape& shape) {
  cudaStream_t stream = bench.stream();
  const PageTables tables(shape.sets, shape.rows, shape.length / 64, 7);
  const int64_t vectors = int64_t{shape.rows} * kHeads;
  DeviceArray<uint16_t> q(kFlashLayers * vectors * 128);
  DeviceArray<float> weights(kFlashLayers * vectors);
  fill_normal_bf16(q.get(), q.count(), 3, 1.0f, stream);
  fill_normal_f32(weights.get(), weights.count(), 4, 0.011f, 0.0f, stream);
  const DeviceArray<int32_t> visible(std::vector<int32_t>(static_cast<size_t>(shape.rows), shape.length));
  DeviceArray<float> scores(int64_t{shape.rows} * shape.length);
  DeviceArray<int32_t> positions(int64_t{shape.rows} * kTopk), slots(int64_t{shape.rows} * kTopk), counts(shape.rows);
  must(cudaStreamSynchronize(stream), "fill");

  const auto select_args = [&](int call) {
    SelectTopkArgs args;
    args.scores = scores.get();
    args.score_stride = shape.length;
    args.lengths = visible.get();
    args.rows = shape.rows;
    args.length_max = shape.length;
    args.k = kTopk;
    args.pages = tables.view(call);
    args.slots_per_page = 64;
    args.page_count = kPoolPages;
    args.positions = positions.get();
    args.slots = slots.get();
    args.counts = counts.get();
    args.out_stride = kTopk;
    return args;
  };
  const int64_t scratch_bytes = select_topk_cuda_scratch(select_args(0));
  DeviceArray<std::byte> scratch(scratch_bytes > 0 ? scratch_bytes : 1);
  must(cudaMemsetAsync(scratch.get(), 0, static_cast<size_t>(scratch.count()), stream), "scratch");

  const double us = bench.us_a_call(shape.rows * int64_t{shape.length} > 4'000'000 ? 21 : 84, [&](int call) {
    IndexLogitsArgs args;
    args.keys = pool.layer(call);
    args.pages = tables.view(call);
    args.q = q.get() + call % kFlashLayers * vectors * 128;
    args.head_weights = weights.get() + call % kFlashLayers * vectors;
    args.visible = visible.get();
    args.query_count = shape.rows;
    args.heads = kHeads;
    args.entry_count = shape.length;
    args.scores = scores.get();
    args.score_stride = shape.length;
    if (absl::Status status = index_logits_cuda(args, nullptr, 0, stream); !status.ok()) return status;
    return select_topk_cuda(select_args(call), scratch.get(), scratch_bytes, stream);
  });
  char note[96];
  const double bytes = 256.0 * shape.rows * shape.length;
  std::snprintf(note, sizeof note, "two calls; %.2f TB/s of keys", bytes / us * 1e-6);
  bench.record(shape.id, us, note);
}

// Prefill in chunks of queries whose scores stay in half of the L2 cache: logits of a chunk, then its selection. The
// buffer is one chunk's scores, whatever the context.
void bench_prefill_select(Bench& bench) {
  constexpr int kQueries = 4'096;
  constexpr int kKeys = 16'384;
  constexpr int kChunk = 448;  // x 16,384 x 4 B = 29 MB
  constexpr int kPages = kKeys / 64;
  constexpr int kSets = 4;
  constexpr int64_t kScratchBudget = int64_t{256} << 20;
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
  DeviceArray<int32_t> positions(int64_t{kQueries} * kTopk), counts(kQueries);

  const auto logits_args = [&](int call, int first, int count, float* scores) {
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
    args.q = q.get() + int64_t{first} * kHeads * 128;
    args.head_weights = weights.get() + int64_t{first} * kHeads;
    args.query_row = query_row.get() + first;
    args.visible = visible.get() + first;
    args.query_count = count;
    args.heads = kHeads;
    args.entry_count = kKeys;
    args.scores = scores;
    args.score_stride = kKeys;
    return args;
  };
  const auto select_args = [&](int first, int count, const float* scores) {
    SelectTopkArgs args;
    args.scores = scores;
    args.score_stride = kKeys;
    args.lengths = visible.get() + first;
    args.rows = count;
    args.length_max = kKeys;
    args.k = kTopk;
    args.positions = positions.get() + int64_t{first} * kTopk;
    args.counts = counts.get() + first;
    args.out_stride = kTopk;
    return args;
  };
  double logits_us = 0;
  {
    DeviceArray<float> all_scores(int64_t{kQueries} * kKeys);
    logits_us = bench.us_a_call(
        21, [&](int call) { return index_logits_cuda(logits_args(call, 0, kQueries, all_scores.get()), nullptr, 0, stream); });
  }
  DeviceArray<float> scores(int64_t{kChunk} * kKeys);
  const int64_t scratch_bytes = select_topk_cuda_scratch(select_args(0, kChunk, scores.get()));
  if (scores.count() * 4 + scratch_bytes > kScratchBudget) must(absl::ResourceExhaustedError("over 256 MiB"), "scratch");
  DeviceArray<std::byte> scratch(scratch_bytes > 0 ? scratch_bytes : 1);
  must(cudaMemsetAsync(scratch.get(), 0, static_cast<size_t>(scratch.count()), stream), "scratch");
  const double us = bench.us_a_call(21, [&](int call) {
    for (int first = 0; first < kQueries; first += kChunk) {
      const int count = first + kChunk < kQueries ? kChunk : kQueries - first;
      absl::Status status = index_logits_cuda(logits_args(call, first, count, scores.get()), nullptr, 0, stream);
      if (status.ok()) {
        status = select_topk_cuda(select_args(first, count, scores.get()), scratch.get(), scratch_bytes, stream);
      }
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  });
  char note[128];
  std::snprintf(note, sizeof note, "%.3f ms over %.3f ms; %.0f MB of scores and scratch", us * 1e-3, logits_us * 1e-3,
                static_cast<double>(scores.count() * 4 + scratch_bytes) * 1e-6);
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
