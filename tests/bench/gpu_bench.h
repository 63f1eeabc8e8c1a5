// needle_bench: what the GPU kernels must reach, and what they reach on the GPU at hand.
//
// What must stay true:
//  1. Every goal is a row of kGoals (gpu_bench_goals.cc). A row that nothing measured fails the run.
//  2. A figure is the wall time of one CUDA graph of dependent calls over rotating layers and pages, divided by the number
//     of calls. Nothing is subtracted: launch gaps are in it. The median of several replays. At least 21 calls, and as many
//     as last about kGraphUs, by a short graph's time; rows, references and both sides of a ratio alike.
//  3. Inputs are random, never zeros; the pool is larger than any cache; answers are checked by the tests, not here.
//  4. Public anchors (another kernel on the same kind of GPU, or a floor) are printed beside and never compared by code.
//
// A new family of rows: add its goals to gpu_bench_goals.cc, one file gpu_bench_<family>.cu with a function
// `void bench_<family>(Bench& bench)`, and that function to kFamilies in gpu_bench.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace needle::bench {

enum class Better { kLower, kHigher };

struct Goal {
  const char* id;    // family.row, unique
  const char* work;  // what is timed, as a person would say it
  double goal;       // in `unit`
  const char* unit;  // us, ms, % or x
  Better better;
  const char* anchor;  // public figures or floors on the same kind of GPU
};
const std::vector<Goal>& goals();

struct Figure {
  double value = 0;
  std::string note;  // rate, bytes, fallbacks: whatever a reader needs beside the value
};

// To launch a graph and to wait for it costs 7 us with one kernel in it (a run prints how much), and up to 20 with many. With
// 21 calls of 16 us that would be up to 6 % of the figure; of a graph that lasts this long it is less than half a percent.
inline constexpr double kGraphUs = 5'000;
inline constexpr int kCallsLeast = 21;

// What a run has: one stream, ceilings measured in the same run, and the figures so far.
class Bench {
 public:
  explicit Bench(cudaStream_t stream) : stream_(stream) {}

  cudaStream_t stream() const { return stream_; }

  // Captures body(0), body(1), ... into one graph on stream(), as many calls as rule 2 asks for, replays it and returns the
  // median microseconds a call. body launches on stream() and returns its Status; a failure ends the process with the
  // message. i goes up to any number: body takes it modulo its own rotation, and makes anew at the rotation's first call what
  // may be used but once.
  double us_a_call(const std::function<absl::Status(int)>& body);
  // The same for a given number of calls: the median microseconds of a whole replay.
  double us_a_replay(int calls, const std::function<absl::Status(int)>& body, int replays = 7);

  // Median microseconds of some times `work`, from its launch on stream() until the stream is done.
  double us_of(const std::function<void()>& work, int times = 7);

  // Bytes a microsecond that a device-to-device copy moves, read plus written, for a copy of about this many bytes in
  // all (so that small figures are compared with small copies), over rotating buffers.
  double copy_bytes_a_us(int64_t bytes_moved);

  void record(const std::string& id, double value, std::string note = "");
  const std::map<std::string, Figure>& figures() const { return figures_; }
  double value_of(const std::string& id) const;  // of a row recorded before; NaN where absent

 private:
  cudaStream_t stream_;
  std::map<std::string, Figure> figures_;
};

// Device memory of the run's length: plain cudaMalloc; ends the process with the size where there is none.
void* device_bytes(int64_t bytes);
void device_free(void* pointer);
// Standard normal bf16 or fp32 numbers, the same for the same seed.
void fill_normal_bf16(void* pointer, int64_t count, uint64_t seed, float scale, cudaStream_t stream);
void fill_normal_f32(float* pointer, int64_t count, uint64_t seed, float scale, float mean, cudaStream_t stream);
void must(absl::Status status, const char* what);
void must(cudaError_t error, const char* what);

// The families, one file each.
void bench_topk(Bench& bench);
void bench_store(Bench& bench);
void bench_pages(Bench& bench);

}  // namespace needle::bench
