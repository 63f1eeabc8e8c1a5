// Lines peer.*: what copy_pages moves to and from another GPU's memory, beside the driver's own copy. They have no goals, as
// most machines have one GPU; where none is in reach, one line says so.
#include "kernels/copy_pages.h"
#include "tests/bench/gpu_bench_pool.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

namespace needle::bench {
namespace {

constexpr int kRotation = 24;
constexpr int kPeerPoolPages = 6'144;

// The first GPU whose memory the current one reaches; -1: none.
int reachable_peer() {
  int here = 0;
  int count = 0;
  must(cudaGetDevice(&here), "device");
  must(cudaGetDeviceCount(&count), "device count");
  for (int there = 0; there < count; ++there) {
    int reaches = 0;
    if (there != here) must(cudaDeviceCanAccessPeer(&reaches, here, there), "peer access");
    if (reaches != 0) return there;
  }
  std::printf("  peer: nothing to measure, %s\n", count < 2 ? "as there is one GPU" : "as this GPU reaches no other's memory");
  return -1;
}

// Memory of `device`, for as long as the family runs.
std::byte* bytes_on(int device, int64_t bytes) {
  int here = 0;
  must(cudaGetDevice(&here), "device");
  must(cudaSetDevice(device), "device");
  std::byte* memory = static_cast<std::byte*>(device_bytes(bytes));
  must(cudaSetDevice(here), "device");
  return memory;
}

// What is copied in a call: as many parts of pages, from scattered pages of one pool to scattered pages of the other.
struct Work {
  const char* name;
  int64_t page_bytes;
  int32_t pages;
  int layers;  // successive calls copy other parts of the pages
};

struct Pools {
  std::byte* here;
  std::byte* there;
  const int32_t* ids;  // of all pages, scattered
  uint64_t* sums;
  int gpu_here;
  int gpu_there;
};

// The driver refuses to capture its copy between GPUs into a graph (CUDA 13.0): as many as last kGraphUs, one behind the other
// on a stream. To give one to the stream takes about 3 us, far less than it lasts.
double us_a_copy(Bench& bench, double bytes, const std::function<void(int64_t)>& copy) {
  constexpr double kAboutBytesAUs = 400'000;
  const int64_t calls = std::max<int64_t>(kCallsLeast, std::llround(kGraphUs * kAboutBytesAUs / bytes));
  const auto copies = [&] {
    for (int64_t i = 0; i < calls; ++i) copy(i);
  };
  (void)bench.us_of(copies, 1);  // warms up
  return bench.us_of(copies) / static_cast<double>(calls);
}

void bench_direction(Bench& bench, const Pools& pools, const Work& work, bool push) {
  std::byte* from = push ? pools.here : pools.there;
  std::byte* to = push ? pools.there : pools.here;
  const int turns = kPeerPoolPages / work.pages;
  const double moved = static_cast<double>(work.page_bytes) * work.pages;
  const auto rate = [&](int32_t blocks_max, bool sums) {
    const double us = bench.us_a_call([&](int i) {
      CopyPagesArgs args;
      const int64_t part = i % work.layers * work.page_bytes;
      args.from = {from + part, kFlashStride, kPeerPoolPages};
      args.to = {to + part, kFlashStride, kPeerPoolPages};
      args.from_pages = pools.ids + i % turns * work.pages;
      args.to_pages = pools.ids + (i + 1) % turns * work.pages;
      args.page_bytes = work.page_bytes;
      args.count = work.pages;
      args.checksums = sums ? pools.sums : nullptr;
      args.blocks_max = blocks_max;
      return copy_pages_cuda(args, bench.stream());
    });
    return moved * 1e-3 / us;
  };
  const int64_t one = work.page_bytes * work.pages;
  const int gpu_to = push ? pools.gpu_there : pools.gpu_here;
  const int gpu_from = push ? pools.gpu_here : pools.gpu_there;
  const int64_t places = std::min<int64_t>(kRotation, kPeerPoolPages * kFlashStride / one);
  const double copy_us = us_a_copy(bench, moved, [&](int64_t i) {
    const int64_t at = i % places * one;
    must(cudaMemcpyPeerAsync(to + at, gpu_to, from + at, gpu_from, static_cast<size_t>(one), bench.stream()), "cudaMemcpyPeerAsync");
  });
  std::printf("  peer.%s.%s: cudaMemcpyPeerAsync of as many contiguous bytes %.0f GB/s (%.1f us)\n", push ? "push" : "pull", work.name,
              moved * 1e-3 / copy_us, copy_us);
  for (const bool sums : {false, true}) {
    std::printf("  peer.%s.%s%s, GB/s:", push ? "push" : "pull", work.name, sums ? " with checksums" : "");
    for (const int32_t blocks_max : {4, 8, 16, 32, 64}) std::printf(" %.0f by %d blocks,", rate(blocks_max, sums), blocks_max);
    std::printf(" %.0f unbounded\n", rate(0, sums));
    std::fflush(stdout);
  }
}

}  // namespace

void bench_peer(Bench& bench) {
  const int peer = reachable_peer();
  if (peer < 0) return;
  must(cudaDeviceEnablePeerAccess(peer, 0), "cudaDeviceEnablePeerAccess");
  int here = 0;
  must(cudaGetDevice(&here), "device");
  constexpr int64_t kBytes = kPeerPoolPages * kFlashStride;
  std::vector<int32_t> ids(kPeerPoolPages);
  for (int i = 0; i < kPeerPoolPages; ++i) ids[static_cast<size_t>(i)] = (i * 1021 + 7) % kPeerPoolPages;
  const DeviceArray<int32_t> listed(ids);
  const DeviceArray<uint64_t> sums(std::vector<uint64_t>(2'048, 0));
  const Pools pools{bytes_on(here, kBytes), bytes_on(peer, kBytes), listed.get(), sums.get(), here, peer};
  fill_normal_bf16(pools.here, kBytes / 2, 21, 1.0f, bench.stream());
  fill_normal_bf16(pools.there, kBytes / 2, 22, 1.0f, bench.stream());
  for (const Work& work :
       {Work{"2,048 index-K parts of 16,384 B", 16'384, 2'048, kFlashLayers}, Work{"256 whole pages", kFlashStride, 256, 1}}) {
    for (const bool push : {true, false}) bench_direction(bench, pools, work, push);
  }
  device_free(pools.here);
  device_free(pools.there);
  must(cudaDeviceDisablePeerAccess(peer), "cudaDeviceDisablePeerAccess");
}

}  // namespace needle::bench
