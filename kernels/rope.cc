#include "kernels/rope.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace needle {
namespace {

constexpr double kPi = 3.14159265358979323846;

// Where the ramp begins or ends: the dimension that turns `rotations` times over the original positions. The stacks
// compute this in Python, so in double.
double correction_dimension(const RopeParameters& parameters, double rotations) {
  return kRopeDims * std::log(parameters.yarn_original_positions / (rotations * 2 * kPi)) / (2 * std::log(parameters.theta));
}

}  // namespace

absl::Status rope_inverse_frequencies(const RopeParameters& parameters, float (&inverse_frequencies)[kRopePairs]) {
  if (!(parameters.theta >= 1.0 && parameters.theta <= 1e9)) {
    return absl::InvalidArgumentError(absl::StrCat("RoPE theta is ", parameters.theta, ", must be 1..1e9"));
  }
  const bool yarn = parameters.yarn_factor > 0;
  double low = 0;
  double high = 0;
  if (yarn) {
    if (!(parameters.yarn_original_positions >= 1 && parameters.yarn_beta_slow > 0 &&
          parameters.yarn_beta_fast > parameters.yarn_beta_slow)) {
      return absl::InvalidArgumentError(absl::StrCat("YaRN wants original positions >= 1 and 0 < beta_slow < beta_fast, not ",
                                                     parameters.yarn_original_positions, ", ", parameters.yarn_beta_slow, ", ",
                                                     parameters.yarn_beta_fast));
    }
    low = std::max(std::floor(correction_dimension(parameters, parameters.yarn_beta_fast)), 0.0);
    high = std::min(std::ceil(correction_dimension(parameters, parameters.yarn_beta_slow)), kRopeDims - 1.0);
    if (low == high) high += 0.001;  // the stacks' own guard against a division by zero
  }
  for (int i = 0; i < kRopePairs; ++i) {
    // pow correctly rounded to fp32 by way of double, then the reciprocal in fp32, as torch's 1.0 / theta ** (2i / 64).
    const float power = static_cast<float>(std::pow(parameters.theta, 2.0 * i / kRopeDims));
    const float plain = 1.0f / power;
    if (!yarn) {
      inverse_frequencies[i] = plain;
      continue;
    }
    const float ramp = std::clamp((static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f, 1.0f);
    const float keep = 1.0f - ramp;
    inverse_frequencies[i] = plain / static_cast<float>(parameters.yarn_factor) * (1.0f - keep) + plain * keep;
  }
  return absl::OkStatus();
}

absl::Status build_rope_table(const float (&inverse_frequencies)[kRopePairs], int64_t first, int64_t count, float* table,
                              Workers& workers) {
  if (first < 0 || count < 0 || first > kRopePositionsMax - count) {
    return absl::InvalidArgumentError(absl::StrCat("RoPE positions [", first, ", ", first, " + ", count, ") leave [0, ", kRopePositionsMax,
                                                   "), where fp32 counts positions exactly"));
  }
  if (table == nullptr && count > 0) return absl::InvalidArgumentError("RoPE table is null");
  constexpr int64_t kPositionsPerTask = 512;
  workers.run(div_ceil(count, kPositionsPerTask), [&](int64_t task, int) {
    const int64_t end = std::min(count, (task + 1) * kPositionsPerTask);
    for (int64_t at = task * kPositionsPerTask; at < end; ++at) {
      const float position = static_cast<float>(first + at);
      float* row = table + at * kRopeDims;
      for (int i = 0; i < kRopePairs; ++i) {
        const float angle = inverse_frequencies[i] * position;  // one fp32 rounding: the stacks' own angle
        row[2 * i] = static_cast<float>(std::cos(static_cast<double>(angle)));
        row[2 * i + 1] = static_cast<float>(std::sin(static_cast<double>(angle)));
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace needle
