#include "tests/bench/gpu_bench_pool.h"

#include <cuda_fp8.h>

#include "base/rng.h"

namespace needle::bench {
namespace {

__device__ uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

// fp8 pages: codes of roughly normal numbers (never NaN), then scales near 0.005. One thread, 16 bytes.
__global__ void fill_fp8_kernel(uint4* base, int64_t vectors, int64_t stride, int layers, int layer_bytes, int values, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += step) {
    const int64_t in_page = 16 * i % stride;
    const bool scales = in_page < static_cast<int64_t>(layers) * layer_bytes && in_page % layer_bytes >= values;
    uint32_t words[4];
    for (int w = 0; w < 4; ++w) {
      const uint64_t bits = mix(seed + static_cast<uint64_t>(4 * i + w));
      if (scales) {
        words[w] = __float_as_uint(0.004f + 0.002f * static_cast<float>(bits & 0xFFFF) * 0x1p-16f);
      } else {
        uint32_t codes = 0;
        for (int b = 0; b < 4; ++b) {
          const uint32_t byte = static_cast<uint32_t>(bits >> (16 * b)) & 0xFFFFu;
          float value = 0;  // sum of four uniform numbers: near enough to normal
          for (int k = 0; k < 4; ++k) value += static_cast<float>((byte >> (4 * k)) & 15u) - 7.5f;
          codes |= static_cast<uint32_t>(__nv_cvt_float_to_fp8(value * 12.0f, __NV_SATFINITE, __NV_E4M3)) << (8 * b);
        }
        words[w] = codes;
      }
    }
    base[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace

FlashPool::FlashPool(ElementFormat element, cudaStream_t stream) : element_(element) {
  layer_bytes_ = layer_page_bytes(element, 128, 64);
  const int64_t content = kFlashLayers * layer_bytes_ + 21 * 37'440 + 20 * 1'728;
  stride_ = (content + 2'303) / 2'304 * 2'304;
  if (element == ElementFormat::kBf16 && stride_ != kFlashStride) must(cudaErrorInvalidValue, "the Flash stride");
  const int64_t bytes = stride_ * kPoolPages;
  base_ = static_cast<std::byte*>(device_bytes(bytes));
  if (element == ElementFormat::kBf16) {
    fill_normal_bf16(base_, bytes / 2, 1, 1.0f, stream);
  } else {
    fill_fp8_kernel<<<132 * 8, 256, 0, stream>>>(reinterpret_cast<uint4*>(base_), bytes / 16, stride_, kFlashLayers,
                                                 static_cast<int>(layer_bytes_), 64 * 128, 2);
    must(cudaGetLastError(), "fill fp8");
  }
  must(cudaStreamSynchronize(stream), "fill the pool");
}
FlashPool::~FlashPool() { device_free(base_); }

LayerView FlashPool::layer(int index) const {
  LayerView view;
  view.base = base_ + index % kFlashLayers * layer_bytes_;
  view.page_stride = stride_;
  view.page_count = kPoolPages;
  view.slots_per_page = 64;
  view.head_dim = 128;
  view.element = element_;
  view.scale = element_ == ElementFormat::kFp8 ? ScaleKind::kAmax : ScaleKind::kNone;
  return view;
}

PageTables::PageTables(int sets, int rows, int pages, uint64_t seed) : sets_(sets), rows_(rows), pages_(pages) {
  Rng rng(seed);
  std::vector<int32_t> ids;
  const int64_t wanted = static_cast<int64_t>(sets) * rows * pages;
  while (static_cast<int64_t>(ids.size()) < wanted) {  // one whole shuffled pool after the other
    std::vector<int32_t> order(kPoolPages);
    for (int i = 0; i < kPoolPages; ++i) order[static_cast<size_t>(i)] = i;
    for (int i = kPoolPages - 1; i > 0; --i) {
      std::swap(order[static_cast<size_t>(i)], order[rng.below(static_cast<uint64_t>(i) + 1)]);
    }
    ids.insert(ids.end(), order.begin(), order.end());
  }
  ids.resize(static_cast<size_t>(wanted));
  ids_ = static_cast<int32_t*>(device_bytes(wanted * 4));
  must(cudaMemcpy(ids_, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice), "page tables");
}
PageTables::~PageTables() { device_free(ids_); }
PageTableView PageTables::view(int set) const {
  PageTableView view;
  view.pages = ids_ + static_cast<int64_t>(set % sets_) * rows_ * pages_;
  view.row_stride = pages_;
  view.rows = rows_;
  view.pages_per_row = pages_;
  return view;
}

}  // namespace needle::bench
