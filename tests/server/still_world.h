// What a core needs around it when nothing goes wrong: memory that is always to be had, no peers, nobody to tell. For tests
// and benchmarks of the core alone; worlds in which things go wrong are tests/sim.
//
// What must stay true:
//  1. Nothing here has bytes of pages: the core never touches them.
//  2. settle() answers what the core asked of memory and transport, as the daemon's threads would.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "server/core.h"
#include "server/pool/pool.h"
#include "server/transport/no_transport.h"

namespace needle::server {

// Zeroed, and like a memfd without cost until it is touched.
class ArrayMetadata final : public Metadata {
 public:
  explicit ArrayMetadata(int64_t size) : bytes_(size), size_(static_cast<size_t>(size)) {}
  std::span<const std::byte> bytes() const override { return {&bytes_[0], size_}; }
  void put(int64_t offset, std::span<const std::byte> value) override { std::memcpy(&bytes_[offset], value.data(), value.size()); }
  std::byte& raw(int64_t offset) { return bytes_[offset]; }

 private:
  LazyArray<std::byte> bytes_;
  size_t size_;
};

class AddressesOnly final : public Memory {
 public:
  bool chunk_present(PoolId pool, ChunkIndex chunk) const override { return present.contains({pool, chunk}); }
  void allocate_chunk(PoolId pool, ChunkIndex chunk, int64_t) override { wanted.emplace_back(pool, chunk); }
  void free_chunk(PoolId pool, ChunkIndex chunk) override {
    present.erase({pool, chunk});
    freed.emplace_back(pool, chunk);
  }

  std::set<std::pair<PoolId, ChunkIndex>> present;
  std::vector<std::pair<PoolId, ChunkIndex>> wanted;
  std::vector<std::pair<PoolId, ChunkIndex>> freed;
};

// Remembers what was said to sessions and peers.
class Listener final : public Outbox {
 public:
  void to_session(SessionId session, SessionEvent event) override { events.emplace_back(session, std::move(event)); }
  void to_peer(NodeId peer, PeerMessage message) override { messages.emplace_back(peer, std::move(message)); }

  std::vector<std::pair<SessionId, SessionEvent>> events;
  std::vector<std::pair<NodeId, PeerMessage>> messages;
};

class HandClock final : public Clock {
 public:
  int64_t now_ns() const override { return now; }
  int64_t now = 1;
};

// One host: start() is a daemon's start, also after another one was killed.
class StillWorld {
 public:
  explicit StillWorld(CoreOptions core_options)
      : options(std::move(core_options)), metadata(Core::metadata_bytes(options)), transport("a still world", [] {}) {}

  Core& start() {
    core.reset();
    absl::StatusOr<std::unique_ptr<Core>> started = Core::start(options, {clock, metadata, memory, transport, outbox, log, ++starts_});
    NEEDLE_CHECK(started.ok(), started.status().ToString().c_str());
    core = std::move(*started);
    settle();
    return *core;
  }
  void settle() {
    while (!memory.wanted.empty()) {
      const auto [pool, chunk] = memory.wanted.back();
      memory.wanted.pop_back();
      memory.present.insert({pool, chunk});
      core->handle(ChunkAllocated{pool, chunk, absl::OkStatus()});
      core->handle(TransportReady{});
    }
    core->handle(TransportReady{});
  }
  template <class Request>
  absl::StatusOr<typename Request::Reply> call(const Request& request) {
    absl::StatusOr<typename Request::Reply> answer = absl::UnknownError("not answered");
    core->handle(Call<Request>{request, [&answer](absl::StatusOr<typename Request::Reply> reply) { answer = std::move(reply); }});
    return answer;
  }

  CoreOptions options;
  HandClock clock;
  ArrayMetadata metadata;
  AddressesOnly memory;
  NoTransport transport;
  Listener outbox;
  SilentLog log;
  std::unique_ptr<Core> core;

 private:
  uint64_t starts_ = 0;
};

}  // namespace needle::server
