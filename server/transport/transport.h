// The south waist: how sealed pages move between daemons. UCX, GPU peer copies and the simulated fabric stand behind it.
// Owned by node or test; called by the loop thread alone.
//
// What must stay true:
//  1. Nothing blocks: every call returns at once; results come out of poll(). An implementation with threads of its own
//     posts a TransportReady message to the loop when poll() has something.
//  2. Every post() yields exactly one completion, whatever happens, and only after no byte can land in its destination
//     pages any more. cancel() and close_peer() only hasten that completion. Until it comes the pages must not be reused.
//  3. Nothing is ordered: completions of one attempt, of several attempts and of several peers come in any order, and a
//     completion may come after its attempt was abandoned. The core drops it by (ticket, attempt).
//  4. Data that arrives for a (ticket, attempt, part) that is not posted is dropped and counted, never written.
//  5. The source's processor may not take part (one-sided get): no generation is checked there. The reader asks the
//     source to confirm its lease after the last byte, and that answer alone makes the bytes good.
//  6. A released chunk is answered too, once nothing reads or writes it any more: a peer whose lease ran out may still
//     be fetching from it. Its memory may be unmapped from that answer on, not from the call.
//
// Callers must not release a chunk that a posted request of their own names (the core counts them).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/ids.h"
#include "server/pool/page_types.h"

namespace needle::server {

// What the fabric can do; asked at start and shown in health. No field changes while a transport lives.
struct TransportTraits {
  std::string name;        // "ucx-get", "ucx-am", "peer-copy", "sim"
  bool one_sided = false;  // reads without the source's processor
  bool reaches_device_memory = false;
  int64_t request_pages_max = 64;  // pages one FetchRequest may name
  int64_t message_bytes_best = 0;  // size at which this fabric is fastest; 0: no preference
};

// A registered chunk as a peer needs it: opaque to the core, carried in a ship's offer. At most kDescriptorBytesMax.
struct ChunkDescriptor {
  PoolId pool;
  ChunkIndex chunk;
  std::string descriptor;
};
inline constexpr int64_t kDescriptorBytesMax = 1024;

// Names one posted request. `part` counts the requests of an attempt.
struct FetchId {
  TicketId ticket;
  uint32_t attempt = 0;
  uint32_t part = 0;
  friend constexpr auto operator<=>(const FetchId&, const FetchId&) = default;
};

struct FetchPage {
  PageRef source;
  PageRef target;
};

struct FetchRequest {
  FetchId id;
  NodeId source;
  Incarnation source_incarnation;
  std::vector<FetchPage> pages;  // pools of the same kind on both sides
};

struct FetchCompletion {
  FetchId id;
  absl::Status status;
  // Of the target pages, in the request's order, computed off the loop as the bytes landed; empty unless status is OK.
  std::vector<uint64_t> checksums;
};

struct RegisterCompletion {
  PoolId pool;
  ChunkIndex chunk;
  absl::Status status;
  std::string descriptor;
};

struct ReleaseCompletion {
  PoolId pool;
  ChunkIndex chunk;
};

struct TransportEvents {
  std::vector<FetchCompletion> fetched;
  std::vector<RegisterCompletion> registered;
  std::vector<ReleaseCompletion> released;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const TransportTraits& traits() const = 0;

  // Makes a chunk reachable by peers and usable as a destination. Answered by a RegisterCompletion; may fail (memlock,
  // peermem, dma-buf), and then the chunk is not registered. Asking again for a registered chunk answers again.
  virtual void register_chunk(PoolId pool, ChunkIndex chunk) = 0;
  // Answered by a ReleaseCompletion, always; also for a chunk that is not registered. At most one call a chunk at a time.
  virtual void release_chunk(PoolId pool, ChunkIndex chunk) = 0;

  // The peer's chunks, from its offer; replaces what was known of those chunks.
  virtual void learn_peer(NodeId peer, Incarnation incarnation, const std::vector<ChunkDescriptor>& chunks) = 0;

  virtual void post(FetchRequest request) = 0;
  virtual void cancel(FetchId id) = 0;
  virtual void close_peer(NodeId peer) = 0;  // forced: every request to it completes with an error

  virtual void poll(TransportEvents& events) = 0;  // appends; empties the queue
};

}  // namespace needle::server
