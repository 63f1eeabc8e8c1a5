// The door to memory: chunks of bytes and the metadata region. Implementations: memfd and cuMem chunks in the daemon,
// plain arrays in the simulator. Owned by node or test; called by the loop thread alone.
//
// What must stay true:
//  1. Nothing here blocks. Allocation may take long (zeroing, NUMA binding, fallocate), so it is asked for and answered
//     later by a ChunkAllocated message to the loop; it may fail, and then nothing is left behind.
//  2. A chunk that was answered OK stays mapped, at its place in the pool's range, until free_chunk.
//  3. The metadata region outlives the process whenever the chunks do. put() is ordered: after a kill at any moment the
//     region holds a prefix of the puts made, the last one possibly torn at 8-byte granularity; an 8-byte put is never torn.
//
// Callers must not free a chunk that a transport still has registered or that a client has not unmapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/ids.h"

namespace needle::server {

class Metadata {
 public:
  virtual ~Metadata() = default;
  virtual std::span<const std::byte> bytes() const = 0;
  virtual void put(int64_t offset, std::span<const std::byte> value) = 0;  // offset and size are multiples of 8
};

class Memory {
 public:
  virtual ~Memory() = default;

  // Chunks that hold bytes now; after a restart with a keeper, those that survived.
  virtual bool chunk_present(PoolId pool, ChunkIndex chunk) const = 0;

  // Answered by ChunkAllocated{pool, chunk, status}. At most one request a chunk at a time.
  virtual void allocate_chunk(PoolId pool, ChunkIndex chunk, int64_t bytes) = 0;
  virtual void free_chunk(PoolId pool, ChunkIndex chunk) = 0;
};

}  // namespace needle::server
