// The chunks that UCX may read and write: which are registered, where they lie, and how many sends read them now.
//
// Written by the source's thread, read by both. One registration a chunk.
//
// What must stay true:
//  1. A chunk is unmapped from UCX only when no send reads it; its release is answered after that.
//  2. A page is found only whole inside one registered chunk.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "server/loop.h"
#include "server/pool/page_types.h"
#include "server/transport/ucx/ucx_handles.h"

namespace needle::server::ucx {

// A pool's place in this process. The range stays for the life of the transport; chunks come and go inside it.
struct PoolPlace {
  PoolId pool;
  std::byte* base = nullptr;
  PoolShape shape;
};

struct PagePlace {
  std::byte* bytes = nullptr;
  int64_t page_bytes = 0;
  ChunkIndex chunk;
  ucp_mem_h memory = nullptr;
};

class Chunks {
 public:
  Chunks(Context& context, std::vector<PoolPlace> pools);

  // Registers, or finds that it is; the descriptor for peers.
  absl::StatusOr<std::string> add(PoolId pool, ChunkIndex chunk);

  // A page of a registered chunk that is not being released.
  std::optional<PagePlace> find(PoolId pool, PageIndex page) const;

  void start_send(PoolId pool, ChunkIndex chunk);
  // True when it was the last send of a chunk that waits for its release, which is done now.
  bool end_send(PoolId pool, ChunkIndex chunk);
  // True when it is done at once, false when sends still read the chunk.
  bool release(PoolId pool, ChunkIndex chunk);

 private:
  struct Entry {
    std::unique_ptr<MappedMemory> memory;
    int64_t sends = 0;
    bool releasing = false;
  };
  const PoolPlace* place_of(PoolId pool) const;

  Context& context_;
  const std::vector<PoolPlace> pools_;
  mutable Mutex mutex_;
  std::map<std::pair<PoolId, ChunkIndex>, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace needle::server::ucx
