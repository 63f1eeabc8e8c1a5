// copy_pages on the GPU, in two ways.
//
// Without a bound on its blocks and without checksums: 16-byte loads, eight in flight a thread, by many small blocks.
// Else through rings in shared memory, by the bulk copy engine: one thread asks for pieces of pages, another sends them on,
// and where checksums are wanted a warp a place sums what lies there. A few such blocks keep as much on its way as a link
// to a peer takes, which registers cannot hold.
//
// What must stay true:
//  1. Work is cut into pieces (8 KiB; in rings up to eight hash blocks, pages into equal ones), handed out by a grid that
//     strides over them.
//  2. With a checksum the very bytes of shared memory that were sent on are summed; nothing is read twice.
//  3. A ring's place is filled again once its bytes have been read by the engine that sends them on, and summed.
#include <algorithm>

#include "base/units.h"
#include "kernels/bulk_copy.cuh"
#include "kernels/copy_pages.h"
#include "kernels/device_report.cuh"
#include "kernels/launch.cuh"
#include "kernels/xxh3_block.cuh"

namespace needle {
namespace {

// Without a ring: small blocks, so that another begins as soon as one has ended.
constexpr int kThreads = 64;
constexpr int kVectors = 8;
constexpr int kBlocks = 12;  // a multiprocessor, at least

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
template <class Number>
__global__ void __launch_bounds__(kThreads, kBlocks)
    copy_pages_kernel(const __grid_constant__ CopyPagesArgs args, uint32_t pieces_a_page, Number pieces) {
  constexpr int kPieceVectors = kThreads * kVectors;
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
    uint4 held[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v * kThreads < left) held[v] = load_once(from + v * kThreads);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v * kThreads < left) __stcs(to + v * kThreads, held[v]);
    }
  }
}

absl::Status launch_copies(const CopyPagesArgs& args, int multiprocessors, cudaStream_t stream) {
  const int64_t pieces_a_page = div_ceil(args.page_bytes / 16, int64_t{kThreads} * kVectors);
  const int64_t pieces = pieces_a_page * args.count;
  LaunchShape shape;
  shape.block = dim3(kThreads);
  // Many more blocks than fit at once: the hardware hands them out as others end, which a striding grid would not.
  shape.grid = dim3(static_cast<unsigned>(std::min(pieces, int64_t{multiprocessors} * 512)));
  const uint32_t each = static_cast<uint32_t>(pieces_a_page);
  // Below 2^31, so that no step of the grid wraps.
  return pieces < (int64_t{1} << 31)
             ? launch("copy_pages", copy_pages_kernel<uint32_t>, shape, stream, args, each, static_cast<uint32_t>(pieces))
             : launch("copy_pages", copy_pages_kernel<int64_t>, shape, stream, args, each, pieces);
}

// Rings. Five places of 18 KB fit beside one another in 99 KB, and twice in a multiprocessor of sm_90.
constexpr int kPlaces = 5;
constexpr int kHashBlocksAPiece = 8;  // a warp's
constexpr int64_t kPieceBytesMax = kHashBlocksAPiece * kChecksumBlockBytes;
constexpr int kSending = 1;  // pieces that may still be read by the engine while the next one is sent on
constexpr int kRingsAMultiprocessor = 2;

struct Piece {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  uint32_t bytes = 0;  // 0: of an absent page, or behind the last piece
  int32_t copy = 0;    // which of the list
  int32_t part = 0;    // of its page
};

struct Ring {
  alignas(128) std::byte places[kPlaces][kPieceBytesMax];
  Piece pieces[kPlaces];
  uint64_t full[kPlaces];   // the piece has come
  uint64_t empty[kPlaces];  // it has been sent on, and summed
  uint64_t secret[kXxhSecretWords];
};
static_assert(sizeof(Ring) <= 99 * 1024, "shared memory of a block of sm_120");

// How pages are cut: all pieces of piece_bytes, a whole number of hash blocks, but the last one of a page.
struct Cut {
  int64_t pieces = 0;  // in all
  uint32_t pieces_a_page = 0;
  uint32_t piece_bytes = 0;
};

__device__ __forceinline__ Piece piece_at(const CopyPagesArgs& args, const Cut& cut, int64_t number) {
  Piece piece;
  if (number >= cut.pieces) return piece;
  const int64_t copy = number / cut.pieces_a_page;
  piece.copy = static_cast<int32_t>(copy);
  piece.part = static_cast<int32_t>(number - copy * cut.pieces_a_page);
  const PagePair pages = page_pair(args, copy);
  if (pages.from == nullptr) {
    if (piece.part == 0) report_skipped(args.report);
    return piece;
  }
  const int64_t begin = static_cast<int64_t>(piece.part) * cut.piece_bytes;
  piece.from = pages.from + begin;
  piece.to = pages.to + begin;
  piece.bytes = static_cast<uint32_t>(min(int64_t{cut.piece_bytes}, args.page_bytes - begin));
  return piece;
}
template <class T>
__device__ __forceinline__ T* pointer_of_lane(T* pointer, int lane) {
  return reinterpret_cast<T*>(__shfl_sync(0xFFFFFFFFu, reinterpret_cast<unsigned long long>(pointer), lane));
}
__device__ __forceinline__ Piece piece_of_lane(const Piece& piece, int lane) {
  Piece of_lane;
  of_lane.from = pointer_of_lane(piece.from, lane);
  of_lane.to = pointer_of_lane(piece.to, lane);
  of_lane.bytes = __shfl_sync(0xFFFFFFFFu, piece.bytes, lane);
  of_lane.copy = __shfl_sync(0xFFFFFFFFu, piece.copy, lane);
  of_lane.part = __shfl_sync(0xFFFFFFFFu, piece.part, lane);
  return of_lane;
}

// The place of a warp's next piece, and the parity of that place's current filling.
struct Turn {
  int place = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++place == kPlaces) {
      place = 0;
      parity ^= 1;
    }
  }
};

// One warp: page ids are read 32 pieces ahead, a piece a lane; lane 0 asks for the bytes.
__device__ __forceinline__ void fill_ring(Ring& ring, const CopyPagesArgs& args, const Cut& cut, int64_t mine) {
  const int lane = static_cast<int>(threadIdx.x & 31u);
  const auto ahead = [&](int64_t n) { return piece_at(args, cut, blockIdx.x + (n + lane) * gridDim.x); };
  Piece next = ahead(0);
  Piece now;
  Turn turn;
#pragma unroll 1
  for (int64_t n = 0; n < mine; ++n, turn.next()) {
    if (n % 32 == 0) {
      now = next;
      next = ahead(n + 32);
    }
    const Piece piece = piece_of_lane(now, static_cast<int>(n % 32));
    if (lane == 0) {
      if (n >= kPlaces) barrier_wait(&ring.empty[turn.place], turn.parity ^ 1);
      ring.pieces[turn.place] = piece;
      if (piece.bytes == 0) {
        barrier_arrive(&ring.full[turn.place]);
      } else {
        barrier_arrive_expect(&ring.full[turn.place], piece.bytes);
        bulk_copy(ring.places[turn.place], piece.from, piece.bytes, &ring.full[turn.place]);
      }
    }
  }
}

// One thread.
__device__ __forceinline__ void send_on(Ring& ring, int64_t mine) {
  Turn turn;
  Turn sent;
#pragma unroll 1
  for (int64_t n = 0; n < mine; ++n, turn.next()) {
    barrier_wait(&ring.full[turn.place], turn.parity);
    const Piece& piece = ring.pieces[turn.place];
    if (piece.bytes > 0) bulk_store(piece.to, ring.places[turn.place], piece.bytes);
    bulk_store_commit();
    if (n < kSending) continue;
    bulk_store_wait_read<kSending>();
    barrier_arrive(&ring.empty[sent.place]);
    sent.next();
  }
  bulk_store_wait<0>();
}

// One warp, which has a place of its own and so meets every filling of it: a barrier's parity cannot mislead it.
__device__ __forceinline__ void sum_place(Ring& ring, const CopyPagesArgs& args, const Cut& cut, int64_t mine, int place) {
  const int group = static_cast<int>(threadIdx.x & 31u) / 4;
  const uint64_t hash_blocks = cut.piece_bytes / kChecksumBlockBytes;
  const SharedBlock block{shared_address(ring.places[place]) + static_cast<uint32_t>(group * kChecksumBlockBytes)};
  uint32_t parity = 0;
#pragma unroll 1
  for (int64_t n = place; n < mine; n += kPlaces, parity ^= 1) {
    barrier_wait(&ring.full[place], parity);
    const int64_t length = max(int64_t{0}, min(kChecksumBlockBytes, int64_t{ring.pieces[place].bytes} - group * kChecksumBlockBytes));
    const int32_t copy = ring.pieces[place].copy;
    const uint64_t first_block = args.first_block + static_cast<uint64_t>(ring.pieces[place].part) * hash_blocks;
    const uint64_t hash = xxh3_block(ring.secret, block, length, first_block + static_cast<uint64_t>(group));
    barrier_arrive_warp(&ring.empty[place]);
    const uint64_t sum = sum_of_groups(hash);
    if ((threadIdx.x & 31u) != 0) continue;
    if (cut.pieces_a_page == 1) {
      args.checksums[copy] = sum;
    } else if (sum != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&args.checksums[copy]), static_cast<unsigned long long>(sum));
    }
  }
}

template <bool kSums>
constexpr int kRingThreads = 64 + (kSums ? 32 * kPlaces : 0);

template <bool kSums>
__global__ void __launch_bounds__(kRingThreads<kSums>, 1)
    copy_by_rings_kernel(const __grid_constant__ CopyPagesArgs args, const __grid_constant__ Cut cut) {
  extern __shared__ __align__(128) std::byte shared[];
  Ring& ring = *reinterpret_cast<Ring*>(shared);
  if (threadIdx.x == 0) {
    for (int place = 0; place < kPlaces; ++place) {
      barrier_init(&ring.full[place], 1);
      barrier_init(&ring.empty[place], kSums ? 1 + kWarpArrivals : 1);
    }
    barrier_init_done();
  }
  if constexpr (kSums) load_xxh_secret(ring.secret);
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  // At least one: there are no more blocks than pieces.
  const int64_t mine = (cut.pieces - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (warp == 0) {
    fill_ring(ring, args, cut, mine);
  } else if (warp == 1) {
    if (threadIdx.x == 32) send_on(ring, mine);
  } else {
    if constexpr (kSums) sum_place(ring, args, cut, mine, warp - 2);
  }
}

template <bool kSums>
absl::Status launch_rings(const CopyPagesArgs& args, int64_t blocks, cudaStream_t stream) {
  const int64_t pieces_a_page = div_ceil(args.page_bytes, kPieceBytesMax);
  Cut cut;
  cut.pieces = pieces_a_page * args.count;
  cut.pieces_a_page = static_cast<uint32_t>(pieces_a_page);
  cut.piece_bytes = static_cast<uint32_t>(div_ceil(div_ceil(args.page_bytes, pieces_a_page), kChecksumBlockBytes) * kChecksumBlockBytes);
  LaunchShape shape;
  shape.block = dim3(kRingThreads<kSums>);
  shape.grid = dim3(static_cast<unsigned>(std::min(cut.pieces, blocks)));
  shape.shared_bytes = sizeof(Ring);
  return launch("copy_pages", copy_by_rings_kernel<kSums>, shape, stream, args, cut);
}

__global__ void zero_sums_kernel(uint64_t* checksums, int count) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) checksums[i] = 0;
}
absl::Status zero_sums(const CopyPagesArgs& args, cudaStream_t stream) {
  LaunchShape shape;
  shape.block = dim3(256);
  const int64_t blocks = div_ceil(args.count, 256);
  shape.grid = dim3(static_cast<unsigned>(args.blocks_max > 0 ? std::min<int64_t>(blocks, args.blocks_max) : blocks));
  return launch("copy_pages", zero_sums_kernel, shape, stream, args.checksums, args.count);
}

}  // namespace

absl::Status copy_pages_cuda(const CopyPagesArgs& args, void* stream) {
  absl::Status possible = check_copy_pages(args);
  if (!possible.ok() || args.count == 0) return possible;
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) return facts.status();
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.checksums == nullptr) {
    return args.blocks_max > 0 ? launch_rings<false>(args, args.blocks_max, cuda_stream)
                               : launch_copies(args, facts->multiprocessors, cuda_stream);
  }
  if (args.page_bytes > kPieceBytesMax) {  // sums of several pieces meet
    absl::Status zeroed = zero_sums(args, cuda_stream);
    if (!zeroed.ok()) return zeroed;
  }
  const int64_t blocks = args.blocks_max > 0 ? args.blocks_max : int64_t{facts->multiprocessors} * kRingsAMultiprocessor;
  return launch_rings<true>(args, blocks, cuda_stream);
}

}  // namespace needle
