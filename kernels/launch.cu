#include "kernels/launch.cuh"

#include <array>
#include <mutex>
#include <optional>

#include "absl/strings/str_cat.h"

namespace needle {
namespace {

constexpr int kDevicesMax = 64;  // more GPUs than any host has; facts of further ones are simply not cached

struct FactsCache {
  std::mutex mutex;
  std::array<std::optional<DeviceFacts>, kDevicesMax> facts;  // guarded by mutex
};
FactsCache& facts_cache() {
  static FactsCache* cache = new FactsCache;  // never destroyed: kernels may be launched from exit handlers
  return *cache;
}

// Errors after which the context computes nothing any more (CUDA runtime documentation: "sticky").
bool is_sticky(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice: return true;
    default: return false;
  }
}

}  // namespace

absl::Status cuda_status(cudaError_t error, const char* operation) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // what is not sticky must not be reported a second time by an unrelated call
  const std::string message = absl::StrCat(operation, ": ", cudaGetErrorName(error), " (", cudaGetErrorString(error), ")");
  if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice) {
    return absl::UnavailableError(absl::StrCat(message, "; there is no usable GPU here: use the CPU twins"));
  }
  if (is_sticky(error)) {
    return absl::DataLossError(absl::StrCat(message, "; the CUDA context is lost: end this pool's work, do not retry"));
  }
  if (error == cudaErrorNoKernelImageForDevice) {
    return absl::UnimplementedError(absl::StrCat(message, "; rebuild with this GPU in NEEDLE_CUDA_ARCHITECTURES"));
  }
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  if (error == cudaErrorInvalidValue || error == cudaErrorInvalidConfiguration) {
    return absl::InvalidArgumentError(message);
  }
  return absl::InternalError(message);
}

absl::Status launch_status(const char* operation) { return cuda_status(cudaGetLastError(), operation); }

absl::StatusOr<DeviceFacts> current_device_facts() {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return cuda_status(error, "current_device_facts");
  }
  FactsCache& cache = facts_cache();
  const std::lock_guard<std::mutex> lock(cache.mutex);
  if (device < kDevicesMax && cache.facts[static_cast<size_t>(device)].has_value()) {
    return *cache.facts[static_cast<size_t>(device)];
  }
  DeviceFacts facts;
  facts.device = device;
  int shared = 0;
  int l2 = 0;
  struct Question {
    cudaDeviceAttr attribute;
    int* answer;
  };
  // One attribute at a time: cudaGetDeviceProperties takes milliseconds and may stop other streams.
  for (const Question& question :
       {Question{cudaDevAttrComputeCapabilityMajor, &facts.major}, Question{cudaDevAttrComputeCapabilityMinor, &facts.minor},
        Question{cudaDevAttrMultiProcessorCount, &facts.multiprocessors}, Question{cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared},
        Question{cudaDevAttrL2CacheSize, &l2}}) {
    if (const cudaError_t error = cudaDeviceGetAttribute(question.answer, question.attribute, device); error != cudaSuccess) {
      return cuda_status(error, "current_device_facts");
    }
  }
  facts.shared_bytes_per_block = shared;
  facts.l2_bytes = l2;
  if (device < kDevicesMax) cache.facts[static_cast<size_t>(device)] = facts;
  return facts;
}

}  // namespace needle
