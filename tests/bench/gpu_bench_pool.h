// A page-major pool of V4-Flash's shape and page tables over it, as the goal rows name them.
//
// 64 x 131,072 entries in page-major would be 153 GB. So the pool has 65,536 distinct pages of the Flash stride (76 GB),
// each in two page tables at unrelated places, and successive calls read another of the 21 layers.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/page_format.h"
#include "kernels/pool_view.h"
#include "tests/bench/gpu_bench.h"

namespace needle::bench {

inline constexpr int kFlashLayers = 21;
inline constexpr int64_t kFlashStride = 1'165'824;  // bytes of a bf16 page of 256 tokens, padded
inline constexpr int kPoolPages = 65'536;

// Memory of the pool: plain cudaMalloc, filled with random keys of one element format. Freed with the object.
class FlashPool {
 public:
  explicit FlashPool(ElementFormat element, cudaStream_t stream);
  ~FlashPool();
  FlashPool(const FlashPool&) = delete;
  FlashPool& operator=(const FlashPool&) = delete;

  LayerView layer(int index) const;
  int64_t page_stride() const { return stride_; }
  std::byte* base() const { return base_; }

 private:
  ElementFormat element_;
  int64_t layer_bytes_ = 0;
  int64_t stride_ = 0;
  std::byte* base_ = nullptr;
};

// `sets` page tables of `rows` x `pages` ids each: successive stretches of shuffled pool pages, on the device.
class PageTables {
 public:
  PageTables(int sets, int rows, int pages, uint64_t seed);
  ~PageTables();
  PageTables(const PageTables&) = delete;
  PageTables& operator=(const PageTables&) = delete;
  PageTableView view(int set) const;

 private:
  int sets_, rows_, pages_;
  int32_t* ids_ = nullptr;
};

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t count) : count_(count), data_(static_cast<T*>(device_bytes(count * static_cast<int64_t>(sizeof(T))))) {}
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(static_cast<int64_t>(values.size())) {
    must(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  ~DeviceArray() { device_free(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return data_; }
  int64_t count() const { return count_; }

 private:
  int64_t count_;
  T* data_;
};

}  // namespace needle::bench
