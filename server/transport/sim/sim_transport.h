// A transport over a simulated fabric: the same interface as UCX, every freedom that the interface grants taken to its
// limit. Owned by a simulated world, single-threaded.
//
// What must stay true:
//  1. Everything that transport.h promises, nothing more: no order, late completions, parts that never end by themselves.
//  2. Bytes move in time: a page is read at one moment and lands at a later one. One-sided mode reads the source's memory
//     without asking its daemon, also when that daemon is stopped; message mode needs it running.
//  3. All chance comes from the fabric's Rng, all time from its scheduler.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/rng.h"
#include "server/transport/transport.h"

namespace needle::server {

// What the fabric needs of the world around it.
class SimFabricHost {
 public:
  virtual ~SimFabricHost() = default;
  virtual int64_t now_ns() const = 0;
  virtual void after(int64_t delay_ns, std::function<void()> action) = 0;
  virtual bool link_passes(NodeId from, NodeId to) = 0;  // a partition says no, a lossy link sometimes
  virtual bool duplicates_message() = 0;
  virtual int64_t message_delay_ns(NodeId from, NodeId to) = 0;
  virtual bool process_runs(NodeId node, Incarnation incarnation) = 0;     // alive and not stopped
  virtual bool process_exists(NodeId node, Incarnation incarnation) = 0;   // alive, perhaps stopped
  virtual std::span<std::byte> page_bytes(NodeId node, PageRef page) = 0;  // empty when the chunk has no memory
  virtual void page_landed(NodeId node, PageRef page, FetchId id) = 0;     // bytes were just written there by the fabric
  virtual void transport_ready(NodeId node) = 0;
  virtual bool registration_fails() = 0;
  virtual bool flips_byte() = 0;
};

class SimTransport;

// Connects the transports of all nodes. Outlives them.
class SimFabric {
 public:
  using Checksum = uint64_t (*)(std::span<const std::byte>);
  SimFabric(SimFabricHost& host, Rng rng, Checksum checksum) : host_(host), rng_(rng), checksum_(checksum) {}

 private:
  friend class SimTransport;
  SimFabricHost& host_;
  Rng rng_;
  Checksum checksum_;
  std::map<NodeId, std::shared_ptr<SimTransport*>> transports_;  // the present one of each node; null while it is down
};

class SimTransport final : public Transport {
 public:
  SimTransport(SimFabric& fabric, NodeId node, Incarnation life, bool one_sided, int64_t request_pages_max);
  ~SimTransport() override;

  const TransportTraits& traits() const override { return traits_; }
  void register_chunk(PoolId pool, ChunkIndex chunk) override;
  void release_chunk(PoolId pool, ChunkIndex chunk) override;
  void learn_peer(NodeId peer, Incarnation incarnation, const std::vector<ChunkDescriptor>& chunks) override;
  void post(FetchRequest request) override;
  void cancel(FetchId id) override;
  void close_peer(NodeId peer) override;
  void poll(TransportEvents& events) override;

  int64_t dropped() const { return dropped_; }  // data for parts that are not posted

 private:
  struct Part {
    FetchRequest request;
    std::vector<bool> landed;
    std::vector<uint64_t> checksums;
    size_t missing = 0;
    bool ending = false;  // cancelled or closed: the completion is under way
  };
  // Runs `action` after a delay unless this process is gone by then.
  void later(int64_t delay_ns, std::function<void()> action);
  void fetch_one_sided(const FetchRequest& request);
  void ask_source(const FetchRequest& request);
  static void serve(SimFabric& fabric, NodeId node, const FetchRequest& request, NodeId reader, Incarnation reader_life);
  void land(FetchId id, size_t index, std::vector<std::byte> bytes);
  void end(FetchId id, absl::Status status);
  void ready();

  SimFabric& fabric_;
  const NodeId node_;
  const Incarnation life_;  // of the process, for this fabric alone
  TransportTraits traits_;
  std::shared_ptr<SimTransport*> self_;  // null inside once destroyed: what actions check before they run
  std::map<FetchId, Part> parts_;
  std::map<std::pair<PoolId, ChunkIndex>, bool> registered_;
  TransportEvents events_;
  int64_t dropped_ = 0;
};

}  // namespace needle::server
