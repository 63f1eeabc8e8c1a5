#include "server/transport/ucx/chunks.h"

#include <cstring>
#include <string>

#include "base/check.h"
#include "proto/errors.h"
#include "server/transport/ucx/wire.h"

namespace needle::server::ucx {

Chunks::Chunks(Context& context, std::vector<PoolPlace> pools) : context_(context), pools_(std::move(pools)) {}

const PoolPlace* Chunks::place_of(PoolId pool) const {
  for (const PoolPlace& place : pools_) {
    if (place.pool == pool) return &place;
  }
  return nullptr;
}

absl::StatusOr<std::string> Chunks::add(PoolId pool, ChunkIndex chunk) {
  const PoolPlace* place = place_of(pool);
  if (place == nullptr || static_cast<int64_t>(chunk.value()) >= place->shape.chunks_max) {
    return make_error(ErrorCode::kInvalid, "chunk " + std::to_string(chunk.value()) + " of pool " + std::to_string(pool.value()) +
                                               " is none that the transport was started with");
  }
  ChunkGeometry geometry;
  geometry.first_byte = static_cast<uint64_t>(chunk.value()) * static_cast<uint64_t>(place->shape.chunk_bytes);
  std::byte* base = place->base + geometry.first_byte;
  geometry.address = reinterpret_cast<uint64_t>(base);
  geometry.bytes = static_cast<uint64_t>(place->shape.chunk_bytes);
  geometry.page_bytes = static_cast<uint64_t>(place->shape.page_bytes);

  std::string key;
  {
    MutexLock hold(mutex_);
    const auto found = entries_.find({pool, chunk});
    if (found != entries_.end()) key = found->second.memory->remote_key();
  }
  if (key.empty()) {  // outside the lock: pinning a chunk takes long. Nobody else adds.
    absl::StatusOr<std::unique_ptr<MappedMemory>> memory = MappedMemory::map(context_, base, place->shape.chunk_bytes);
    if (!memory.ok()) return memory.status();
    key = (*memory)->remote_key();
    MutexLock hold(mutex_);
    entries_[{pool, chunk}].memory = std::move(*memory);
  }
  std::string descriptor(reinterpret_cast<const char*>(&geometry), sizeof geometry);
  descriptor += key;
  if (static_cast<int64_t>(descriptor.size()) <= kDescriptorBytesMax) return descriptor;
  const bool gone = release(pool, chunk);
  NEEDLE_CHECK(gone, "nothing reads a chunk that nobody knows");
  return make_error(ErrorCode::kImpossible, "a chunk's remote key has " + std::to_string(key.size()) + " bytes and a descriptor takes " +
                                                std::to_string(kDescriptorBytesMax) + " in all: name fewer devices");
}

std::optional<PagePlace> Chunks::find(PoolId pool, PageIndex page) const {
  const PoolPlace* place = place_of(pool);
  if (place == nullptr || page.is_none()) return std::nullopt;
  const int64_t first = static_cast<int64_t>(page.value()) * place->shape.page_bytes;
  const int64_t chunk = first / place->shape.chunk_bytes;
  const int64_t last = first + place->shape.page_bytes - 1;
  if (chunk >= place->shape.chunks_max || last / place->shape.chunk_bytes != chunk) return std::nullopt;
  PagePlace found{place->base + first, place->shape.page_bytes, ChunkIndex(static_cast<uint32_t>(chunk)), nullptr};
  MutexLock hold(mutex_);
  const auto entry = entries_.find({pool, found.chunk});
  if (entry == entries_.end() || entry->second.releasing) return std::nullopt;
  found.memory = entry->second.memory->handle();
  return found;
}

void Chunks::start_send(PoolId pool, ChunkIndex chunk) {
  MutexLock hold(mutex_);
  ++entries_.at({pool, chunk}).sends;
}

bool Chunks::end_send(PoolId pool, ChunkIndex chunk) {
  std::unique_ptr<MappedMemory> gone;  // unmapped outside the lock
  MutexLock hold(mutex_);
  const auto entry = entries_.find({pool, chunk});
  NEEDLE_CHECK(entry != entries_.end() && entry->second.sends > 0, "a send ended that had not begun");
  if (--entry->second.sends > 0 || !entry->second.releasing) return false;
  gone = std::move(entry->second.memory);
  entries_.erase(entry);
  return true;
}

bool Chunks::release(PoolId pool, ChunkIndex chunk) {
  std::unique_ptr<MappedMemory> gone;
  MutexLock hold(mutex_);
  const auto entry = entries_.find({pool, chunk});
  if (entry == entries_.end()) return true;
  entry->second.releasing = true;
  if (entry->second.sends > 0) return false;
  gone = std::move(entry->second.memory);
  entries_.erase(entry);
  return true;
}

}  // namespace needle::server::ucx
