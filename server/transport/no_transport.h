// The transport of a daemon that ships nothing: UCX absent, failed to start, or switched off. Pools work; every fetch fails
// with the reason, and health says so.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "proto/errors.h"
#include "server/transport/transport.h"

namespace needle::server {

class NoTransport final : public Transport {
 public:
  // `ready`: something is to be polled; called from within register_chunk, release_chunk and post, on the loop thread.
  NoTransport(std::string reason, std::function<void()> ready) : reason_(std::move(reason)), ready_(std::move(ready)) {
    traits_.name = "none";
  }

  const TransportTraits& traits() const override { return traits_; }
  void register_chunk(PoolId pool, ChunkIndex chunk) override {
    events_.registered.push_back({pool, chunk, absl::OkStatus(), ""});
    ready_();
  }
  void release_chunk(PoolId pool, ChunkIndex chunk) override {
    events_.released.push_back({pool, chunk});
    ready_();
  }
  void learn_peer(NodeId, Incarnation, const std::vector<ChunkDescriptor>&) override {}
  void post(FetchRequest request) override {
    events_.fetched.push_back({request.id, make_error(ErrorCode::kPeerLost, "this daemon has no transport: " + reason_), {}});
    ready_();
  }
  void cancel(FetchId) override {}
  void close_peer(NodeId) override {}
  void poll(TransportEvents& events) override {
    for (auto& event : events_.fetched) events.fetched.push_back(std::move(event));
    for (auto& event : events_.registered) events.registered.push_back(std::move(event));
    for (auto& event : events_.released) events.released.push_back(event);
    events_ = {};
  }

 private:
  const std::string reason_;
  const std::function<void()> ready_;
  TransportTraits traits_;
  TransportEvents events_;
};

}  // namespace needle::server
