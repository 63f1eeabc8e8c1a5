// Device memory for tests of CUDA twins: arrays of exactly the bytes that the host has, so that compute-sanitizer sees
// the first byte too many, and what is needed to skip where there is no GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/check.h"
#include "kernels/launch.h"

namespace needle::testing {

// Why no CUDA twin can run here; empty where one can.
inline std::string no_gpu_because() {
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  return facts.ok() ? "" : std::string(facts.status().message());
}

inline void must_cuda(cudaError_t error) { NEEDLE_CHECK(error == cudaSuccess, cudaGetErrorString(error)); }

// A copy of `count` elements in device memory; null for null.
template <class T>
class DeviceArray {
 public:
  DeviceArray(const T* host, int64_t count) : count_(host == nullptr ? 0 : count) {
    if (host == nullptr) return;
    must_cuda(cudaMalloc(reinterpret_cast<void**>(&device_), bytes() > 0 ? bytes() : 1));
    if (bytes() > 0) must_cuda(cudaMemcpy(device_, host, bytes(), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() {
    if (device_ != nullptr) (void)cudaFree(device_);
  }

  T* get() const { return device_; }
  void read_back(T* host) const {
    if (bytes() > 0) must_cuda(cudaMemcpy(host, device_, bytes(), cudaMemcpyDeviceToHost));
  }

 private:
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(T); }

  T* device_ = nullptr;
  int64_t count_ = 0;
};

// Device copies of a call's arrays for as long as the call lasts, each as long as the host's.
class DeviceCopies {
 public:
  DeviceCopies() = default;
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;
  ~DeviceCopies() {
    for (const Copy& copy : copies_) (void)cudaFree(copy.device);
  }

  // What the operation reads. Null stays null.
  template <class T>
  const T* in(const T* host, int64_t count) {
    return static_cast<const T*>(add(host, count * static_cast<int64_t>(sizeof(T)), nullptr));
  }
  const void* in_bytes(const void* host, int64_t bytes) { return add(host, bytes, nullptr); }
  // What it writes, or both.
  template <class T>
  T* in_out(T* host, int64_t count) {
    return static_cast<T*>(add(host, count * static_cast<int64_t>(sizeof(T)), host));
  }
  void* in_out_bytes(void* host, int64_t bytes) { return add(host, bytes, host); }

  // Everything written, back to the host.
  void read_back() const {
    for (const Copy& copy : copies_) {
      if (copy.host != nullptr && copy.bytes > 0) {
        must_cuda(cudaMemcpy(copy.host, copy.device, static_cast<size_t>(copy.bytes), cudaMemcpyDeviceToHost));
      }
    }
  }

 private:
  struct Copy {
    void* device;
    void* host;
    int64_t bytes;
  };
  void* add(const void* from, int64_t bytes, void* back) {
    if (from == nullptr) return nullptr;
    void* device = nullptr;
    must_cuda(cudaMalloc(&device, static_cast<size_t>(bytes > 0 ? bytes : 1)));
    if (bytes > 0) must_cuda(cudaMemcpy(device, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
    copies_.push_back({device, back, bytes});
    return device;
  }

  std::vector<Copy> copies_;
};

// Bytes that `count` parts at a stride reach over.
inline int64_t reach(int64_t count, int64_t stride, int64_t part) { return count > 0 ? (count - 1) * stride + part : 0; }

// Waits for what was launched on the default stream: a fault of the kernel is its Status.
inline absl::Status finish_on_device(const absl::Status& launched) {
  if (!launched.ok()) return launched;
  const cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::DataLossError(cudaGetErrorString(error));
}

}  // namespace needle::testing
