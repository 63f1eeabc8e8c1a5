// Rows of index_logits: decode in bf16 and fp8, several query tokens, ragged lengths, prefill.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/index_logits.h"
#include "tests/bench/gpu_bench_pool.h"

namespace needle::bench {
namespace {

constexpr int kHeads = 64;

// One decode shape: buffers for `sets` calls in rotation, so that neither queries nor scores nor pages stay in L2.
class Decode {
 public:
  Decode(const FlashPool& pool, int rows, int queries_per_row, std::vector<int32_t> lengths, QueryElement q_element, int sets,
         cudaStream_t stream)
      : pool_(pool),
        queries_(rows * queries_per_row),
        queries_per_row_(queries_per_row),
        longest_(*std::max_element(lengths.begin(), lengths.end())),
        q_element_(q_element),
        tables_(sets, rows, (longest_ + 63) / 64, 7),
        q_(int64_t{kFlashLayers} * queries_ * kHeads * 128),
        weights_(int64_t{kFlashLayers} * queries_ * kHeads),
        visible_(visible_of(lengths, queries_per_row)),
        scores_(2 * int64_t{queries_} * longest_) {
    entries_ = 0;
    for (const int32_t length : lengths) entries_ += length;
    if (q_element == QueryElement::kFp8) {
      std::vector<uint8_t> codes(static_cast<size_t>(q_.count()) * 2);
      uint32_t state = 1;
      for (uint8_t& code : codes) {  // any code but NaN
        state = state * 1664525u + 1013904223u;
        code = static_cast<uint8_t>((state >> 24) & 0xF7u);
      }
      must(cudaMemcpy(q_.get(), codes.data(), codes.size(), cudaMemcpyHostToDevice), "fp8 queries");
    } else {
      fill_normal_bf16(q_.get(), q_.count(), 3, 1.0f, stream);
    }
    fill_normal_f32(weights_.get(), weights_.count(), 4, 0.011f, 0.0f, stream);
    must(cudaStreamSynchronize(stream), "fill");
  }

  IndexLogitsArgs args(int call) const {
    IndexLogitsArgs args;
    args.keys = pool_.layer(call);
    args.pages = tables_.view(call);
    const int64_t layer = call % kFlashLayers;
    const int64_t q_bytes = q_element_ == QueryElement::kFp8 ? 128 : 256;
    args.q = reinterpret_cast<const std::byte*>(q_.get()) + layer * queries_ * kHeads * q_bytes;
    args.q_element = q_element_;
    args.head_weights = weights_.get() + layer * queries_ * kHeads;
    args.queries_per_row = queries_per_row_;
    args.visible = visible_.get();
    args.query_count = queries_;
    args.heads = kHeads;
    args.entry_count = longest_;
    args.scores = scores_.get() + (call % 2) * int64_t{queries_} * longest_;
    args.score_stride = longest_;
    return args;
  }
  // Keys once and one fp32 a score.
  double bytes() const {
    const double key = pool_.layer(0).element == ElementFormat::kBf16 ? 256 : 132;
    return static_cast<double>(entries_) * (key + 4.0 * queries_per_row_);
  }
  double key_count() const { return static_cast<double>(entries_); }

 private:
  static std::vector<int32_t> visible_of(const std::vector<int32_t>& lengths, int queries_per_row) {
    std::vector<int32_t> visible;
    for (const int32_t length : lengths) visible.insert(visible.end(), static_cast<size_t>(queries_per_row), length);
    return visible;
  }

  const FlashPool& pool_;
  int queries_;
  int queries_per_row_;
  int longest_;
  QueryElement q_element_;
  PageTables tables_;
  DeviceArray<uint16_t> q_;  // large enough for any element
  DeviceArray<float> weights_;
  DeviceArray<int32_t> visible_;
  DeviceArray<float> scores_;
  int64_t entries_;
};

std::string rate_note(Bench& bench, double bytes, double us) {
  char text[160];
  const double copy = bench.copy_bytes_a_us(static_cast<int64_t>(bytes));
  std::snprintf(text, sizeof text, "%.0f MB, %.2f TB/s, %.0f %% of a copy of as many bytes (%.1f us)", bytes * 1e-6, bytes / us * 1e-6,
                100 * bytes / us / copy, bytes / copy);
  return text;
}

// No kernel reads keys twice as fast as memory copies: one that does has not read them.
double time_logits(Bench& bench, const Decode& decode) {
  const double us = bench.us_a_call([&](int call) { return index_logits_cuda(decode.args(call), nullptr, 0, bench.stream()); });
  const double copy_us = decode.bytes() / bench.copy_bytes_a_us(static_cast<int64_t>(decode.bytes()));
  must(us > copy_us / 2 ? absl::OkStatus()
                        : absl::InternalError(absl::StrCat(us, " us a call, where a copy of as many bytes takes ", copy_us,
                                                           ": the kernel did not do its work; run the tests")),
       "index_logits_cuda");
  return us;
}

// TFLOP/s of an 8,192-cubed bf16 product through whatever cuBLAS the machine has; nothing where it has none.
std::optional<double> matrix_tflops(Bench& bench) {
  void* library = nullptr;
  for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
  }
  if (library == nullptr) return std::nullopt;
  using Create = int (*)(void**);
  using SetStream = int (*)(void*, cudaStream_t);
  using GemmEx = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*, void*, int,
                         int, int, int);
  const auto create = reinterpret_cast<Create>(dlsym(library, "cublasCreate_v2"));
  const auto set_stream = reinterpret_cast<SetStream>(dlsym(library, "cublasSetStream_v2"));
  const auto gemm = reinterpret_cast<GemmEx>(dlsym(library, "cublasGemmEx"));
  void* handle = nullptr;
  if (create == nullptr || set_stream == nullptr || gemm == nullptr || create(&handle) != 0) return std::nullopt;
  constexpr int kSide = 8'192;
  constexpr int kBf16 = 14, kComputeF32 = 68, kTransposed = 1, kPlain = 0, kDefault = -1;  // cublas_api.h, library_types.h
  const int64_t count = int64_t{kSide} * kSide;
  DeviceArray<uint16_t> a(count), b(count), c(count);
  fill_normal_bf16(a.get(), count, 5, 1.0f, bench.stream());
  fill_normal_bf16(b.get(), count, 6, 1.0f, bench.stream());
  set_stream(handle, bench.stream());
  const float one = 1.0f, zero = 0.0f;
  const auto multiply = [&](int) {
    const int status = gemm(handle, kTransposed, kPlain, kSide, kSide, kSide, &one, a.get(), kBf16, kSide, b.get(), kBf16, kSide, &zero,
                            c.get(), kBf16, kSide, kComputeF32, kDefault);
    return status == 0 ? absl::OkStatus() : absl::InternalError("cublasGemmEx");
  };
  must(multiply(0), "cuBLAS warm-up");
  const double us = bench.us_a_call(multiply);
  return 2.0 * kSide * kSide * kSide / us * 1e-6;
}

void bench_decode(Bench& bench) {
  cudaStream_t stream = bench.stream();
  std::optional<FlashPool> pool(std::in_place, ElementFormat::kBf16, stream);
  const auto uniform = [](int rows, int length) { return std::vector<int32_t>(static_cast<size_t>(rows), length); };
  double uniform_rate = 0;
  {
    const Decode decode(*pool, 64, 1, uniform(64, 131'072), QueryElement::kBf16, 1, stream);
    const double us = time_logits(bench, decode);
    uniform_rate = decode.key_count() / us;
    bench.record("logits.bf16.64x131072", us, rate_note(bench, decode.bytes(), us));
  }
  {
    // 64 lengths from 1K to 256K in equal ratios, in no order.
    std::vector<int32_t> lengths;
    for (int i = 0; i < 64; ++i) lengths.push_back(static_cast<int32_t>(1024.0 * std::exp2(8.0 * ((i * 37) % 64) / 63.0)));
    const Decode decode(*pool, 64, 1, lengths, QueryElement::kBf16, 1, stream);
    const double us = time_logits(bench, decode);
    char note[96];
    std::snprintf(note, sizeof note, "%.2f us for %.2f M keys", us, decode.key_count() * 1e-6);
    bench.record("logits.bf16.ragged", 100 * decode.key_count() / us / uniform_rate, note);
  }
  double one_token_us = 0;
  for (const int tokens : {1, 2, 4}) {
    const Decode decode(*pool, 16, tokens, uniform(16, 131'072), QueryElement::kBf16, 2, stream);
    const double us = time_logits(bench, decode);
    const std::string note = rate_note(bench, decode.bytes(), us);
    if (tokens == 1) {
      one_token_us = us;
      std::printf("  16 x 131,072 logits only %.2f us  %s\n", us, note.c_str());
    } else if (tokens == 2) {
      char ratio[240];
      std::snprintf(ratio, sizeof ratio, "%.1f us over %.1f us; %s", us, one_token_us, note.c_str());
      bench.record("logits.bf16.16x131072.2q", us / one_token_us, ratio);
    } else {
      bench.record("logits.bf16.16x131072.4q", us, note);
    }
  }
  struct Small {
    int rows, length, sets;
  };
  for (const Small& small : {Small{64, 16'384, 4}, Small{16, 16'384, 16}, Small{1, 131'072, 32}, Small{16, 4'096, 64}}) {
    const Decode decode(*pool, small.rows, 1, uniform(small.rows, small.length), QueryElement::kBf16, small.sets, stream);
    const double us = time_logits(bench, decode);
    std::printf("  %d x %d logits only %.2f us  %.2f TB/s\n", small.rows, small.length, us, decode.bytes() / us * 1e-6);
  }
  pool.reset();
  pool.emplace(ElementFormat::kFp8, stream);
  for (const QueryElement element : {QueryElement::kBf16, QueryElement::kFp8}) {
    const Decode decode(*pool, 64, 1, uniform(64, 131'072), element, 1, stream);
    const double us = time_logits(bench, decode);
    bench.record(element == QueryElement::kBf16 ? "logits.fp8.64x131072" : "logits.fp8q.64x131072", us,
                 rate_note(bench, decode.bytes(), us));
  }
}

void bench_prefill(Bench& bench) {
  constexpr int kQueries = 4'096;
  constexpr int kKeys = 16'384;
  constexpr int kSets = 4;
  cudaStream_t stream = bench.stream();
  const std::optional<double> ceiling = matrix_tflops(bench);
  // A pool of its own: packed pages of one layer, kSets of them.
  const int64_t page_bytes = layer_page_bytes(ElementFormat::kBf16, 128, 64);
  constexpr int kPages = kKeys / 64;
  DeviceArray<uint16_t> keys(kSets * kPages * page_bytes / 2);
  fill_normal_bf16(keys.get(), keys.count(), 8, 1.0f, stream);
  DeviceArray<uint16_t> q(int64_t{kSets} * kQueries * kHeads * 128);
  fill_normal_bf16(q.get(), q.count(), 9, 1.0f, stream);
  DeviceArray<float> weights(int64_t{kSets} * kQueries * kHeads);
  fill_normal_f32(weights.get(), weights.count(), 10, 0.011f, 0.0f, stream);
  std::vector<int32_t> ids(kPages);
  for (int i = 0; i < kPages; ++i) ids[static_cast<size_t>(i)] = (i * 77) % kPages;
  const DeviceArray<int32_t> table(ids);
  const DeviceArray<int32_t> visible(std::vector<int32_t>(kQueries, kKeys));
  const DeviceArray<int32_t> rows(std::vector<int32_t>(kQueries, 0));
  DeviceArray<float> scores(int64_t{kQueries} * kKeys);
  const double us = bench.us_a_call([&](int call) {
    const int64_t set = call % kSets;
    IndexLogitsArgs args;
    args.keys.base = reinterpret_cast<const std::byte*>(keys.get()) + set * kPages * page_bytes;
    args.keys.page_stride = page_bytes;
    args.keys.page_count = kPages;
    args.keys.slots_per_page = 64;
    args.keys.head_dim = 128;
    args.keys.element = ElementFormat::kBf16;
    args.pages.pages = table.get();
    args.pages.row_stride = kPages;
    args.pages.rows = 1;
    args.pages.pages_per_row = kPages;
    args.q = q.get() + set * kQueries * kHeads * 128;
    args.head_weights = weights.get() + set * kQueries * kHeads;
    args.query_row = rows.get();
    args.visible = visible.get();
    args.query_count = kQueries;
    args.heads = kHeads;
    args.entry_count = kKeys;
    args.scores = scores.get();
    args.score_stride = kKeys;
    return index_logits_cuda(args, nullptr, 0, stream);
  });
  const double tflops = 2.0 * kQueries * static_cast<double>(kKeys) * kHeads * 128 / us * 1e-6;
  char note[160];
  std::snprintf(note, sizeof note, "%.3f ms, %.0f TFLOP/s; cuBLAS bf16 8,192-cubed %.0f", us * 1e-3, tflops, ceiling.value_or(0));
  bench.record("prefill.bf16.4096x16384", ceiling ? 100 * tflops / *ceiling : std::nan(""), note);
}

}  // namespace

void bench_logits(Bench& bench) { bench_decode(bench); }
void bench_prefill_logits(Bench& bench) { bench_prefill(bench); }

}  // namespace needle::bench
