// The transport over UCX: TCP and shared memory with the distribution's UCX, RDMA and CUDA where UCX has them.
//
// Two workers, two threads: a reader that asks for pages and lands them, a source that serves them (reader.h, source.h).
// Calls from the loop become tasks on them; results wait in a queue for poll(), and `ready` says that it has something.
// README.md tells which call moves a page, and what was learned about UCX the hard way.
//
// What must stay true, beyond transport.h:
//  1. start() blocks for some tenths of a second (contexts, probe); nothing after it does, but stop().
//  2. The pools' ranges stay where they are for the transport's life; chunks in them are touched from the answer to
//     register_chunk to the answer to release_chunk.
//  3. stop() answers every request, closes every endpoint, unregisters every chunk, then ends the threads and UCX.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/log.h"
#include "server/transport/transport.h"
#include "server/transport/ucx/call_probe.h"
#include "server/transport/ucx/chunks.h"
#include "server/transport/ucx/counters.h"
#include "server/transport/ucx/reader.h"

namespace needle::server::ucx {

struct UcxOptions {
  NodeId node;
  uint64_t instance = 0;  // random and new at every start: tells this process from the last one at the same address
  FabricSettings fabric;
  std::string host = "127.0.0.1";                   // numeric address of this host on the fabric: listened on, and told to peers
  int port = 0;                                     // 0: any free one, since peers are told it
  std::string call = "auto";                        // or a name of kCallNames that is no put: for tests and for proving a fabric
  int64_t heartbeat_ms = 250;                       // a reader pings each source it has a link to
  int64_t silence_ms = 2'000;                       // eight pings unanswered, then the link is closed; long enough to pin a chunk meanwhile
  int64_t bytes_in_flight_max = int64_t{16} << 20;  // a link; fourteen pages of V4-Flash
  int64_t sends_in_flight_max = 8;                  // a link, at the source; given to UCX at once
  int64_t message_bytes_max = 0;                    // of a part of an eager page; 0: pages go whole
  int64_t spin_us = 20;                             // before a thread sleeps
};

// All outlives the transport.
struct UcxEnvironment {
  const Clock& clock;
  const Clock& processor_clock;  // of the calling thread: the probe rates calls by it
  Log& log;
  std::vector<PoolPlace> pools;
  PageChecksum checksum;
  std::function<void()> ready;  // from a transport's thread: poll() has something
};

// The processor time of the calling thread.
class ThreadProcessorClock final : public Clock {
 public:
  int64_t now_ns() const override;
};

absl::Status validate(const UcxOptions& options);

class UcxTransport final : public Transport {
 public:
  static absl::StatusOr<std::unique_ptr<UcxTransport>> start(const UcxOptions& options, UcxEnvironment environment);
  ~UcxTransport() override;

  // What membership tells peers, and what it heard from them. Opaque bytes; INVALID when they are not an address.
  const std::string& address() const;
  absl::Status meet_peer(NodeId peer, Incarnation incarnation, const std::string& address);
  void connect_peer(NodeId peer);  // opens the link to a peer that was met, ahead of its first request

  const std::vector<CallReport>& reports() const;  // of the start-up probe, one a reach
  const Counters& counters() const;
  void stop();  // idempotent; poll() once more afterwards for the last answers

  const TransportTraits& traits() const override;
  void register_chunk(PoolId pool, ChunkIndex chunk) override;
  void release_chunk(PoolId pool, ChunkIndex chunk) override;
  void learn_peer(NodeId peer, Incarnation incarnation, const std::vector<ChunkDescriptor>& chunks) override;
  void post(FetchRequest request) override;
  void cancel(FetchId id) override;
  void close_peer(NodeId peer) override;
  void poll(TransportEvents& events) override;

 private:
  struct Parts;
  explicit UcxTransport(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace needle::server::ucx
