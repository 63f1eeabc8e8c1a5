// copy_pages on the GPU: 16-byte loads, eight in flight a thread, and stores that leave no trace in the caches' way.
//
// What must stay true:
//  1. Work is cut into pieces of 8 KiB (16 where blocks_max bounds the grid, 64 hash blocks with a checksum), handed out by
//     a grid that strides over them.
//  2. With a checksum the very registers that were stored are hashed; nothing is read twice.
#include <algorithm>

#include "base/units.h"
#include "kernels/copy_pages.h"
#include "kernels/device_report.cuh"
#include "kernels/launch.cuh"
#include "kernels/xxh3_block.cuh"

namespace needle {
namespace {

constexpr int kThreads = 256;  // where few blocks must do much
constexpr int kHashBlocksAPiece = kThreads / 4;
// Where blocks are many: small ones, so that another begins as soon as one has ended.
constexpr int kSmallThreads = 64;
constexpr int kSmallBlocks = 12;  // a multiprocessor, at least
constexpr int kSmallVectors = 8;
constexpr int kVectors = 4;

struct PagePair {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
};

__device__ __forceinline__ PagePair page_pair(const CopyPagesArgs& args, int64_t i) {
  const int64_t from = args.from_pages == nullptr ? i : args.from_pages[i];
  const int64_t to = args.to_pages == nullptr ? i : args.to_pages[i];
  if (from < 0 || from >= args.from.count || to < 0 || to >= args.to.count) return {};
  return {args.from.base + from * args.from.stride, args.to.base + to * args.to.stride};
}

__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// Out of line: it needs registers that the copy has no use for.
__device__ __noinline__ void report_skipped(OpReport* report) {
  report_count(report, &OpReport::skipped_rows, 1);
  report_status(report, kStatusAbsentPage);
}

// Number: 32 bits where every number of a piece fits, as 64-bit division is a subroutine.
template <int kBlock, int kVectorsAThread, int kBlocks, class Number>
__global__ void __launch_bounds__(kBlock, kBlocks)
    copy_pages_kernel(const __grid_constant__ CopyPagesArgs args, uint32_t pieces_a_page, Number pieces) {
  constexpr int kPieceVectors = kBlock * kVectorsAThread;
  wait_for_previous_kernel();
  let_next_kernel_start();
#pragma unroll 1
  for (Number piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const Number i = piece / pieces_a_page;
    const int64_t part = static_cast<int64_t>(piece - i * pieces_a_page);
    const PagePair pages = page_pair(args, static_cast<int64_t>(i));
    if (pages.from == nullptr) {
      if (part == 0 && threadIdx.x == 0) report_skipped(args.report);
      continue;
    }
    const int64_t first = part * kPieceVectors + threadIdx.x;
    const uint4* from = reinterpret_cast<const uint4*>(pages.from) + first;
    uint4* to = reinterpret_cast<uint4*>(pages.to) + first;
    const int left = static_cast<int>(min(args.page_bytes / 16 - first, int64_t{kPieceVectors}));
    uint4 held[kVectorsAThread];
#pragma unroll
    for (int v = 0; v < kVectorsAThread; ++v) {
      if (v * kBlock < left) held[v] = load_once(from + v * kBlock);
    }
#pragma unroll
    for (int v = 0; v < kVectorsAThread; ++v) {
      if (v * kBlock < left) __stcs(to + v * kBlock, held[v]);
    }
  }
}

template <int kBlock, int kVectorsAThread, int kBlocks>
absl::Status launch_copies(const CopyPagesArgs& args, int64_t blocks_max, cudaStream_t stream) {
  const int64_t pieces_a_page = div_ceil(args.page_bytes / 16, int64_t{kBlock} * kVectorsAThread);
  const int64_t pieces = pieces_a_page * args.count;
  LaunchShape shape;
  shape.block = dim3(kBlock);
  shape.grid = dim3(static_cast<unsigned>(std::min(pieces, blocks_max)));
  const uint32_t each = static_cast<uint32_t>(pieces_a_page);
  // Below 2^31, so that no step of the grid wraps.
  return pieces < (int64_t{1} << 31)
             ? launch("copy_pages", copy_pages_kernel<kBlock, kVectorsAThread, kBlocks, uint32_t>, shape, stream, args, each,
                      static_cast<uint32_t>(pieces))
             : launch("copy_pages", copy_pages_kernel<kBlock, kVectorsAThread, kBlocks, int64_t>, shape, stream, args, each, pieces);
}

__global__ void zero_sums_kernel(uint64_t* checksums, int count) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) checksums[i] = 0;
}

__global__ void __launch_bounds__(kThreads, 4)
    copy_and_sum_kernel(const __grid_constant__ CopyPagesArgs args, uint32_t pieces_a_page, int64_t pieces) {
  __shared__ uint64_t secret[kXxhSecretWords];
  load_xxh_secret(secret);
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();
#pragma unroll 1
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const int64_t i = piece / pieces_a_page;
    const int64_t part = piece - i * pieces_a_page;
    const PagePair pages = page_pair(args, i);
    if (pages.from == nullptr) {
      if (part == 0 && threadIdx.x == 0) report_skipped(args.report);
      continue;
    }
    const int64_t block = part * kHashBlocksAPiece + static_cast<int64_t>(threadIdx.x / 4);
    const int64_t begin = block * kChecksumBlockBytes;
    const int64_t length = max(int64_t{0}, min(kChecksumBlockBytes, args.page_bytes - begin));
    std::byte* to = pages.to + begin;
    uint64_t sum = xxh3_block<true>(secret, pages.from + begin, length, args.first_block + static_cast<uint64_t>(block),
                                    [to](int64_t offset, uint64_t first, uint64_t second) {
                                      *reinterpret_cast<ulonglong2*>(to + offset) = ulonglong2{first, second};
                                    });
#pragma unroll
    for (int step = 4; step < 32; step <<= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if ((threadIdx.x & 31u) == 0 && sum != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&args.checksums[i]), static_cast<unsigned long long>(sum));
    }
  }
}

}  // namespace

absl::Status copy_pages_cuda(const CopyPagesArgs& args, void* stream) {
  absl::Status possible = check_copy_pages(args);
  if (!possible.ok() || args.count == 0) return possible;
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) return facts.status();
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.checksums == nullptr) {
    // Many more blocks than fit at once: the hardware hands them out as others end, which a striding grid would not.
    return args.blocks_max > 0
               ? launch_copies<kThreads, kVectors, 1>(args, args.blocks_max, cuda_stream)
               : launch_copies<kSmallThreads, kSmallVectors, kSmallBlocks>(args, int64_t{facts->multiprocessors} * 512, cuda_stream);
  }
  LaunchShape shape;
  shape.block = dim3(kThreads);
  shape.grid = dim3(static_cast<unsigned>(div_ceil(args.count, kThreads)));
  absl::Status zeroed = launch("copy_pages", zero_sums_kernel, shape, cuda_stream, args.checksums, args.count);
  if (!zeroed.ok()) return zeroed;
  const int64_t pieces_a_page = div_ceil(checksum_blocks(args.page_bytes), kHashBlocksAPiece);
  const int64_t pieces = pieces_a_page * args.count;
  const int64_t blocks = args.blocks_max > 0 ? args.blocks_max : int64_t{facts->multiprocessors} * 256;
  shape.grid = dim3(static_cast<unsigned>(std::min(pieces, blocks)));
  return launch("copy_pages", copy_and_sum_kernel, shape, cuda_stream, args, static_cast<uint32_t>(pieces_a_page), pieces);
}

}  // namespace needle
