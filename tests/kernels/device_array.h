// Device memory for tests of CUDA twins: arrays of exactly the bytes that the host has, so that compute-sanitizer sees
// the first byte too many, and what is needed to skip where there is no GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>

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

// Waits for what was launched on the default stream: a fault of the kernel is its Status.
inline absl::Status finish_on_device(const absl::Status& launched) {
  if (!launched.ok()) return launched;
  const cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::DataLossError(cudaGetErrorString(error));
}

}  // namespace needle::testing
