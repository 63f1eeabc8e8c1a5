// Runs every family of rows, prints the table, and fails where a row is absent (exit 1) or missed (exit 2).
//
//   needle_bench [--only=prefix] [--list]
#include "tests/bench/gpu_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "kernels/launch.h"

#ifndef NEEDLE_COMMIT
#define NEEDLE_COMMIT "unknown commit"
#endif

namespace needle::bench {

void bench_logits(Bench& bench);
void bench_peer(Bench& bench);
void bench_prefill_logits(Bench& bench);
void bench_select(Bench& bench);
void bench_select_prefill(Bench& bench);

namespace {

struct Family {
  const char* prefix;
  void (*measure)(Bench& bench);
};
// One entry a family: the rows whose id begins with one of its prefixes are its own.
const std::vector<Family> kFamilies = {
    {"logits.", bench_logits},
    {"prefill.bf16.", bench_prefill_logits},
    {"topk.", bench_topk},
    {"store.", bench_store},
    {"pages.", bench_pages},
    {"select.", bench_select},
    {"prefill.select.", bench_select_prefill},
    {"peer.", bench_peer},
};

__global__ void empty_kernel() {}

// Counter-based: number i depends on (seed, i) alone.
__device__ uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}
__device__ float2 normal_pair(uint64_t seed, int64_t index) {
  const uint64_t bits = mix(mix(seed) + static_cast<uint64_t>(index) * 0x9E3779B97F4A7C15ull);
  const float radius_in = (static_cast<float>(static_cast<uint32_t>(bits >> 40)) + 0.5f) * 0x1p-24f;
  const float angle_in = static_cast<float>(static_cast<uint32_t>(bits) >> 8) * 0x1p-24f;
  const float radius = sqrtf(-2.0f * logf(radius_in));
  float sine, cosine;
  sincospif(2.0f * angle_in, &sine, &cosine);
  return {radius * cosine, radius * sine};
}
__device__ uint32_t bf16_bits(float value) {  // finite inputs only
  const uint32_t bits = __float_as_uint(value);
  return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

__global__ void fill_bf16_kernel(uint4* out, int64_t vectors, uint64_t seed, float scale) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += step) {
    uint32_t words[4];
    for (int w = 0; w < 4; ++w) {
      const float2 pair = normal_pair(seed, 4 * i + w);
      words[w] = bf16_bits(pair.x * scale) | (bf16_bits(pair.y * scale) << 16);
    }
    out[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
__global__ void fill_f32_kernel(float* out, int64_t count, uint64_t seed, float scale, float mean) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const float2 pair = normal_pair(seed, i >> 1);
    out[i] = mean + scale * ((i & 1) ? pair.y : pair.x);
  }
}

}  // namespace

void must(absl::Status status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "needle_bench: %s: %s\n", what, std::string(status.message()).c_str());
  std::exit(3);
}
void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "needle_bench: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(3);
}

void* device_bytes(int64_t bytes) {
  void* pointer = nullptr;
  if (const cudaError_t error = cudaMalloc(&pointer, static_cast<size_t>(bytes)); error != cudaSuccess) {
    std::fprintf(stderr, "needle_bench: %lld bytes of device memory: %s\n", static_cast<long long>(bytes), cudaGetErrorString(error));
    std::exit(3);
  }
  return pointer;
}
void device_free(void* pointer) { must(cudaFree(pointer), "cudaFree"); }

void fill_normal_bf16(void* pointer, int64_t count, uint64_t seed, float scale, cudaStream_t stream) {
  fill_bf16_kernel<<<132 * 8, 256, 0, stream>>>(static_cast<uint4*>(pointer), count / 8, seed, scale);
  must(cudaGetLastError(), "fill bf16");
}
void fill_normal_f32(float* pointer, int64_t count, uint64_t seed, float scale, float mean, cudaStream_t stream) {
  fill_f32_kernel<<<132 * 8, 256, 0, stream>>>(pointer, count, seed, scale, mean);
  must(cudaGetLastError(), "fill fp32");
}

double Bench::us_a_call(const std::function<absl::Status(int)>& body) {
  // A short graph tells about how long a call takes; its own replay is in that, so that a call seems long rather than short:
  // kGraphUs allows for it.
  const double about_us = us_a_replay(kCallsLeast, body, 1) / kCallsLeast;
  const int calls = std::max(kCallsLeast, static_cast<int>(std::ceil(kGraphUs / about_us)));
  return us_a_replay(calls, body) / calls;
}

double Bench::us_a_replay(int calls, const std::function<absl::Status(int)>& body, int replays) {
  must(cudaStreamSynchronize(stream_), "before a graph");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "begin capture");
  for (int i = 0; i < calls; ++i) must(body(i), "a call under capture");
  must(cudaStreamEndCapture(stream_, &graph), "end capture");
  must(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  must(cudaGraphUpload(executable, stream_), "upload");
  for (int i = 0; i < 2; ++i) must(cudaGraphLaunch(executable, stream_), "warm-up");
  must(cudaStreamSynchronize(stream_), "warm-up");
  const double us = us_of([&] { must(cudaGraphLaunch(executable, stream_), "replay"); }, replays);
  must(cudaGraphExecDestroy(executable), "destroy");
  must(cudaGraphDestroy(graph), "destroy");
  return us;
}

double Bench::us_of(const std::function<void()>& work, int times) {
  std::vector<double> microseconds;
  for (int i = 0; i < times; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    must(cudaStreamSynchronize(stream_), "timed work");
    const std::chrono::duration<double, std::micro> wall = std::chrono::steady_clock::now() - begin;
    microseconds.push_back(wall.count());
  }
  std::sort(microseconds.begin(), microseconds.end());
  return microseconds[microseconds.size() / 2];
}

namespace {

double copy_rate(Bench& bench, int64_t one) {
  const int rotation = static_cast<int>(std::clamp<int64_t>((int64_t{1} << 30) / one, 2, 32));
  char* from = static_cast<char*>(device_bytes(one * rotation));
  char* to = static_cast<char*>(device_bytes(one * rotation));
  fill_normal_bf16(from, one * rotation / 2, 11, 1.0f, bench.stream());
  const double us = bench.us_a_call([&](int i) {
    const int64_t at = one * (i % rotation);
    must(cudaMemcpyAsync(to + at, from + at, static_cast<size_t>(one), cudaMemcpyDeviceToDevice, bench.stream()), "copy");
    return absl::OkStatus();
  });
  device_free(from);
  device_free(to);
  return 2.0 * static_cast<double>(one) / us;
}

}  // namespace

double Bench::copy_bytes_a_us(int64_t bytes_moved) {
  // Copies of some sizes run at two thirds of the rate of their neighbours here (570 MB and 1,093 MB on an H200), which says
  // nothing about memory: the best of two sizes, 2 MiB apart, is the reference.
  const int64_t step = bytes_moved >= (int64_t{64} << 20) ? int64_t{2} << 20 : 256;
  const int64_t one = std::max<int64_t>(bytes_moved / 2 / step, 1) * step;
  const double rate = copy_rate(*this, one);
  return step == 256 ? rate : std::max(rate, copy_rate(*this, one + step));
}

void Bench::record(const std::string& id, double value, std::string note) {
  const auto known = std::find_if(goals().begin(), goals().end(), [&](const Goal& goal) { return id == goal.id; });
  if (known == goals().end()) {
    std::fprintf(stderr, "needle_bench: a figure for %s, which is no row of the goal table\n", id.c_str());
    std::exit(3);
  }
  std::printf("  %-34s %10.2f %s  %s\n", id.c_str(), value, known->unit, note.c_str());
  std::fflush(stdout);
  figures_[id] = {value, std::move(note)};
}
double Bench::value_of(const std::string& id) const {
  const auto found = figures_.find(id);
  return found == figures_.end() ? std::nan("") : found->second.value;
}

namespace {

int clock_mhz(int device) {
  int kilohertz = 0;
  return cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, device) == cudaSuccess ? kilohertz / 1000 : 0;
}

int run(const std::string& only) {
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) {
    std::fprintf(stderr, "needle_bench: %s\n", std::string(facts.status().message()).c_str());
    return 3;
  }
  cudaDeviceProp properties{};
  must(cudaGetDeviceProperties(&properties, facts->device), "device properties");
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Bench bench(stream);
  std::printf("needle_bench %s on %s, sm_%d%d, %d multiprocessors, up to %d MHz\n", NEEDLE_COMMIT, properties.name, facts->major,
              facts->minor, facts->multiprocessors, clock_mhz(facts->device));
  const auto empty = [&](int) {
    empty_kernel<<<1, 32, 0, stream>>>();
    must(cudaGetLastError(), "empty kernel");
    return absl::OkStatus();
  };
  std::printf("empty kernel %.2f us a call, %.1f us as a graph of its own; ", bench.us_a_call(empty), bench.us_a_replay(1, empty, 101));
  std::printf("copy of 2 GB %.0f GB/s (read + written)\n", bench.copy_bytes_a_us(2'000'000'000) * 1e-3);
  std::fflush(stdout);

  for (const Family& family : kFamilies) {
    if (only.empty() || only.rfind(family.prefix, 0) == 0 || std::string(family.prefix).rfind(only, 0) == 0) {
      family.measure(bench);
    }
  }

  int absent = 0;
  int missed = 0;
  std::printf("\n| work | goal | value | verdict | anchor | note |\n|---|---:|---:|---|---|---|\n");
  for (const Goal& goal : goals()) {
    if (!only.empty() && std::string(goal.id).rfind(only, 0) != 0) continue;
    const auto found = bench.figures().find(goal.id);
    if (found == bench.figures().end()) {
      ++absent;
      std::printf("| %s | %g %s | - | ABSENT | %s | |\n", goal.work, goal.goal, goal.unit, goal.anchor);
      continue;
    }
    const double value = found->second.value;
    const bool pass = goal.better == Better::kLower ? value <= goal.goal : value >= goal.goal;  // NaN never passes
    missed += pass ? 0 : 1;
    std::printf("| %s | %s %g %s | %.2f | %s | %s | %s |\n", goal.work, goal.better == Better::kLower ? "<=" : ">=", goal.goal, goal.unit,
                value, pass ? "pass" : "MISS", goal.anchor, found->second.note.c_str());
  }
  std::printf("\n%d absent, %d missed\n", absent, missed);
  return absent > 0 ? 1 : missed > 0 ? 2 : 0;
}

}  // namespace
}  // namespace needle::bench

int main(int argc, char** argv) {
  std::string only;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--only=", 7) == 0) {
      only = argv[i] + 7;
    } else if (std::strcmp(argv[i], "--list") == 0) {
      for (const needle::bench::Goal& goal : needle::bench::goals()) std::printf("%s\t%s\n", goal.id, goal.work);
      return 0;
    } else {
      std::fprintf(stderr, "usage: needle_bench [--only=prefix] [--list]\n");
      return 3;
    }
  }
  return needle::bench::run(only);
}
