// Where a resize stands. The journey is in resize.cc.
//
// grow:   allocating -> registering -> (live)
// shrink: waiting for its pages -> for its mappings -> for the transport -> (absent)
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "base/ids.h"
#include "server/messages.h"

namespace needle::server {

struct GrowStep {
  enum Phase : uint8_t { kWanted, kAllocating, kRegistering };
  PoolKind kind;
  ChunkIndex chunk;
  Phase phase = kWanted;
};

struct ShrinkStep {
  enum Phase : uint8_t { kPages, kMappings, kTransport, kReleased };
  PoolKind kind;
  ChunkIndex chunk;
  Phase phase = kPages;
  std::vector<SessionId> awaited;  // in kMappings: who has not unmapped yet
};

struct ResizeState {
  uint64_t revision = 0;
  int64_t budget_bytes = 0;
  BudgetRatios ratios{};
  std::vector<GrowStep> grow;
  std::vector<ShrinkStep> shrink;
  absl::Status failure;  // of memory or registration, until the next resize

  bool is_active() const { return !grow.empty() || !shrink.empty(); }
};

}  // namespace needle::server
