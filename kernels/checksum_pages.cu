// checksum_pages on the GPU: four threads a block of 2,304 bytes, eight blocks a warp, as much in flight as memory wants.
//
// What must stay true:
//  1. Sums mod 2^64 may meet in any order, so pages are shared out by runs of blocks and added with one atomic a warp.
//  2. Every byte is read once.
#include "base/units.h"
#include "kernels/checksum_pages.h"
#include "kernels/device_report.cuh"
#include "kernels/launch.cuh"
#include "kernels/xxh3_block.cuh"

namespace needle {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksAWarp = 8;
constexpr int kBlocksAGroup = kThreads / 4;  // hash blocks that a thread block does in one go

__global__ void prepare_sums_kernel(const __grid_constant__ ChecksumPagesArgs args) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= args.count) return;
  if (!args.add) args.checksums[i] = 0;
  if (args.pages[i] < 0 || args.pages[i] >= args.page_count) {
    report_count(args.report, &OpReport::skipped_rows, 1);
    report_status(args.report, kStatusAbsentPage);
  }
}

// blockIdx.x: page in the list x group of hash blocks.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads, 4)
    checksum_pages_kernel(const __grid_constant__ ChecksumPagesArgs args, uint32_t groups_a_page) {
  __shared__ uint64_t secret[kXxhSecretWords];
  load_xxh_secret(secret);
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();
  const uint32_t listed = blockIdx.x / groups_a_page;
  const uint32_t group = blockIdx.x % groups_a_page;
  const int64_t page = args.pages[listed];
  if (page < 0 || page >= args.page_count) return;
  const int64_t block = static_cast<int64_t>(group) * kBlocksAGroup + static_cast<int64_t>(threadIdx.x / 4);
  const int64_t begin = block * kChecksumBlockBytes;
  const int64_t length = max(int64_t{0}, min(kChecksumBlockBytes, args.page_bytes - begin));
  const GlobalBlock<kAligned> bytes{args.base + page * args.page_stride + begin};
  const uint64_t sum = sum_of_groups(xxh3_block(secret, bytes, length, args.first_block + static_cast<uint64_t>(block)));
  if ((threadIdx.x & 31u) == 0 && sum != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&args.checksums[listed]), static_cast<unsigned long long>(sum));
  }
}
static_assert(kBlocksAWarp * 4 == 32, "four threads a hash block");

}  // namespace

absl::Status checksum_pages_cuda(const ChecksumPagesArgs& args, void* stream) {
  absl::Status possible = check_checksum_pages(args);
  if (!possible.ok() || args.count == 0) return possible;
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  LaunchShape shape;
  shape.block = dim3(kThreads);
  shape.grid = dim3(static_cast<unsigned>(div_ceil(args.count, kThreads)));
  absl::Status prepared = launch("checksum_pages", prepare_sums_kernel, shape, cuda_stream, args);
  if (!prepared.ok()) return prepared;
  const int64_t groups = div_ceil(checksum_blocks(args.page_bytes), kBlocksAGroup);
  if (groups * args.count > int64_t{0x7FFFFFFF}) {
    return absl::InvalidArgumentError("checksum_pages: more than 2^31 - 1 groups of blocks; sum fewer pages a call");
  }
  shape.grid = dim3(static_cast<unsigned>(groups * args.count));
  const bool aligned = reinterpret_cast<uintptr_t>(args.base) % 16 == 0 && args.page_stride % 16 == 0;
  return aligned ? launch("checksum_pages", checksum_pages_kernel<true>, shape, cuda_stream, args, static_cast<uint32_t>(groups))
                 : launch("checksum_pages", checksum_pages_kernel<false>, shape, cuda_stream, args, static_cast<uint32_t>(groups));
}

}  // namespace needle
