// Rows topk.*: exact top-k of score rows, alone.
#include "kernels/select_topk.h"
#include "kernels/select_topk_plan.h"
#include "tests/bench/gpu_bench.h"

#include <algorithm>
#include <vector>

namespace needle::bench {
namespace {

constexpr int kRotation = 24;  // sets of rows, so that large cases come from DRAM every time

struct Rows {
  float* scores;
  int32_t* lengths;
  int32_t* positions;
  int32_t* counts;
  OpReport* report;
  int rows;
  int length;
  int k;
};

Rows rows_of(int rows, int length, int k, float scale, float mean, cudaStream_t stream) {
  Rows made{};
  made.rows = rows;
  made.length = length;
  made.k = k;
  const int64_t scores = int64_t{rows} * length * kRotation;
  made.scores = static_cast<float*>(device_bytes(scores * 4));
  fill_normal_f32(made.scores, scores, 7, scale, mean, stream);
  made.lengths = static_cast<int32_t*>(device_bytes(int64_t{rows} * 4));
  const std::vector<int32_t> lengths(static_cast<size_t>(rows), length);
  must(cudaMemcpyAsync(made.lengths, lengths.data(), lengths.size() * 4, cudaMemcpyHostToDevice, stream), "lengths");
  must(cudaStreamSynchronize(stream), "lengths");
  made.positions = static_cast<int32_t*>(device_bytes(int64_t{rows} * k * 4));
  made.counts = static_cast<int32_t*>(device_bytes(int64_t{rows} * 4));
  made.report = static_cast<OpReport*>(device_bytes(sizeof(OpReport)));
  must(cudaMemsetAsync(made.report, 0, sizeof(OpReport), stream), "report");
  return made;
}

void free_rows(const Rows& made) {
  for (void* pointer : {static_cast<void*>(made.scores), static_cast<void*>(made.lengths), static_cast<void*>(made.positions),
                        static_cast<void*>(made.counts), static_cast<void*>(made.report)}) {
    device_free(pointer);
  }
}

SelectTopkArgs args_of(const Rows& made, int turn) {
  SelectTopkArgs args;
  args.scores = made.scores + int64_t{turn % kRotation} * made.rows * made.length;
  args.score_stride = made.length;
  args.lengths = made.lengths;
  args.rows = made.rows;
  args.length_max = made.length;
  args.k = made.k;
  args.positions = made.positions;
  args.counts = made.counts;
  args.out_stride = made.k;
  args.report = made.report;
  return args;
}

double select_us(Bench& bench, int rows, int length, int k, float scale, float mean, uint64_t* fallbacks) {
  const Rows made = rows_of(rows, length, k, scale, mean, bench.stream());
  const double us = bench.us_a_call([&](int i) { return select_topk_cuda(args_of(made, i), nullptr, 0, bench.stream()); });
  // Of one rotation: how many calls a figure is made of depends on the GPU.
  must(cudaMemset(made.report, 0, sizeof(OpReport)), "report");
  for (int i = 0; i < kRotation; ++i) must(select_topk_cuda(args_of(made, i), nullptr, 0, bench.stream()), "select_topk");
  must(cudaStreamSynchronize(bench.stream()), "select_topk");
  OpReport report;
  must(cudaMemcpy(&report, made.report, sizeof(report), cudaMemcpyDeviceToHost), "report");
  *fallbacks = report.fallbacks;
  free_rows(made);
  return us;
}

void select_row(Bench& bench, const char* id, int rows, int length) {
  uint64_t fallbacks = 0;
  const double us = select_us(bench, rows, length, 512, 1.0f, 0.0f, &fallbacks);
  char note[96];
  std::snprintf(note, sizeof(note), "%.0f GB/s of scores, %llu fallbacks", double(rows) * length * 4e-3 / us,
                static_cast<unsigned long long>(fallbacks));
  bench.record(id, us, note);
}

}  // namespace

void bench_topk(Bench& bench) {
  select_row(bench, "topk.1x131072", 1, 131072);
  select_row(bench, "topk.64x131072", 64, 131072);
  select_row(bench, "topk.256x131072", 256, 131072);
  select_row(bench, "topk.64x524288", 64, 524288);
  const double normal = bench.value_of("topk.64x131072");
  uint64_t fallbacks = 0;
  const double low_contrast = select_us(bench, 64, 131072, 512, 0.01f, 1.1f, &fallbacks);
  const double equal = select_us(bench, 64, 131072, 512, 0.0f, 1.0f, &fallbacks);
  char note[96];
  std::snprintf(note, sizeof(note), "1.1 + 0.01 z %.1f us, all equal %.1f us", low_contrast, equal);
  bench.record("topk.low_contrast", std::max(low_contrast, equal) / normal, note);
  const double k1024 = select_us(bench, 64, 131072, 1024, 1.0f, 0.0f, &fallbacks);
  const double k2048 = select_us(bench, 64, 131072, 2048, 1.0f, 0.0f, &fallbacks);
  std::snprintf(note, sizeof(note), "k = 1,024 %.1f us, k = 2,048 %.1f us", k1024, k2048);
  bench.record("topk.k2048", std::max(k1024, k2048) / normal, note);
  // Rows that shared memory holds, as prefill has them: no goal, one line.
  const double prefill = select_us(bench, 1024, 16384, 512, 1.0f, 0.0f, &fallbacks);
  const double prefill_equal = select_us(bench, 1024, 16384, 512, 0.0f, 1.0f, &fallbacks);
  std::printf("  top-512 of 1,024 x 16,384 %.1f us, all equal %.1f us\n", prefill, prefill_equal);
}

}  // namespace needle::bench
