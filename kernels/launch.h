// CUDA launches: the one place that turns runtime errors into Status, and the properties a plan may ask for.
//
// What must stay true:
//  1. No operation allocates, synchronises or reads device memory from the host; a launch is all it does on `stream`.
//  2. A sticky error (the context is gone) is DATA_LOSS and ends the pool's work; it is never retried.
//  3. "No GPU here" is UNAVAILABLE with the driver's own reason: cudaErrorInsufficientDriver and cudaErrorNoDevice both
//     mean it.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace needle {

struct DeviceFacts {
  int device = 0;
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  int64_t shared_bytes_per_block = 0;  // opt-in maximum
  int64_t l2_bytes = 0;
};

// Facts of the calling thread's current device; cached after the first call for that device.
absl::StatusOr<DeviceFacts> current_device_facts();

// The Status of the last launch on this thread, with `operation` in the message.
absl::Status launch_status(const char* operation);

}  // namespace needle
