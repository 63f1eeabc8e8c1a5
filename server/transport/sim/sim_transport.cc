#include "server/transport/sim/sim_transport.h"

#include <algorithm>
#include <utility>

#include "proto/errors.h"

namespace needle::server {
namespace {

constexpr int64_t kMicro = 1'000;

}  // namespace

SimTransport::SimTransport(SimFabric& fabric, NodeId node, Incarnation life, bool one_sided, int64_t request_pages_max)
    : fabric_(fabric), node_(node), life_(life), self_(std::make_shared<SimTransport*>(this)) {
  traits_.name = one_sided ? "sim-get" : "sim-am";
  traits_.one_sided = one_sided;
  traits_.request_pages_max = request_pages_max;
  fabric_.transports_[node] = self_;
}

SimTransport::~SimTransport() { *self_ = nullptr; }

void SimTransport::later(int64_t delay_ns, std::function<void()> action) {
  fabric_.host_.after(delay_ns, [self = self_, action = std::move(action)] {
    if (*self != nullptr) action();
  });
}

void SimTransport::ready() { fabric_.host_.transport_ready(node_); }

void SimTransport::register_chunk(PoolId pool, ChunkIndex chunk) {
  later(fabric_.rng_.between(1, 3'000) * kMicro, [this, pool, chunk] {
    RegisterCompletion completion{pool, chunk, absl::OkStatus(), "key"};
    if (fabric_.host_.registration_fails()) {
      completion.status = make_error(ErrorCode::kMemory, "the simulated device refuses to register");
      completion.descriptor.clear();
    } else {
      registered_[{pool, chunk}] = true;
    }
    events_.registered.push_back(std::move(completion));
    ready();
  });
}

void SimTransport::release_chunk(PoolId pool, ChunkIndex chunk) {
  registered_.erase({pool, chunk});
  later(fabric_.rng_.between(1, 3'000) * kMicro, [this, pool, chunk] {
    events_.released.push_back({pool, chunk});
    ready();
  });
}

void SimTransport::learn_peer(NodeId, Incarnation, const std::vector<ChunkDescriptor>&) {}

void SimTransport::post(FetchRequest request) {
  Part part;
  part.request = request;
  part.landed.resize(request.pages.size());
  part.checksums.resize(request.pages.size());
  part.missing = request.pages.size();
  parts_.emplace(request.id, std::move(part));
  if (traits_.one_sided) {
    fetch_one_sided(request);
  } else {
    ask_source(request);
  }
}

// Each page is read at a moment of its own and lands at another, whatever the source's daemon does meanwhile.
void SimTransport::fetch_one_sided(const FetchRequest& request) {
  for (size_t index = 0; index < request.pages.size(); ++index) {
    const PageRef source = request.pages[index].source;
    const NodeId peer = request.source;
    const Incarnation peer_incarnation = request.source_incarnation;
    const FetchId id = request.id;
    later(fabric_.host_.message_delay_ns(node_, peer), [this, index, source, peer, peer_incarnation, id] {
      if (!fabric_.host_.link_passes(node_, peer)) return;  // lost: the part never ends by itself
      const std::span<const std::byte> bytes = fabric_.host_.page_bytes(peer, source);
      if (!fabric_.host_.process_exists(peer, peer_incarnation) || bytes.empty()) {
        return end(id, make_error(ErrorCode::kPeerLost, "the peer's memory is gone"));
      }
      later(fabric_.host_.message_delay_ns(peer, node_),
            [this, id, index, copy = std::vector<std::byte>(bytes.begin(), bytes.end())]() mutable { land(id, index, std::move(copy)); });
    });
  }
}

void SimTransport::ask_source(const FetchRequest& request) {
  const int copies = fabric_.host_.duplicates_message() ? 2 : 1;
  for (int copy = 0; copy < copies; ++copy) {
    if (!fabric_.host_.link_passes(node_, request.source)) continue;
    fabric_.host_.after(fabric_.host_.message_delay_ns(node_, request.source), [fabric = &fabric_, request, reader = node_, life = life_] {
      serve(*fabric, request.source, request, reader, life);
    });
  }
}

// At the source: one message a page, each lost, late or doubled on its own.
void SimTransport::serve(SimFabric& fabric, NodeId node, const FetchRequest& request, NodeId reader, Incarnation reader_life) {
  if (!fabric.host_.process_runs(node, request.source_incarnation)) return;
  for (size_t index = 0; index < request.pages.size(); ++index) {
    const std::span<const std::byte> bytes = fabric.host_.page_bytes(node, request.pages[index].source);
    if (bytes.empty()) continue;
    const std::vector<std::byte> copy(bytes.begin(), bytes.end());
    const int copies = fabric.host_.duplicates_message() ? 2 : 1;
    for (int sent = 0; sent < copies; ++sent) {
      if (!fabric.host_.link_passes(node, reader)) continue;
      fabric.host_.after(fabric.host_.message_delay_ns(node, reader), [&fabric, id = request.id, index, copy, reader, reader_life] {
        const auto found = fabric.transports_.find(reader);
        SimTransport* transport = found == fabric.transports_.end() ? nullptr : *found->second;
        if (transport == nullptr || transport->life_ != reader_life) return;
        transport->land(id, index, copy);
      });
    }
  }
}

void SimTransport::land(FetchId id, size_t index, std::vector<std::byte> bytes) {
  const auto found = parts_.find(id);
  const bool wanted = found != parts_.end() && !found->second.landed[index] && (traits_.one_sided || !found->second.ending);
  if (!wanted) {
    ++dropped_;
    return;
  }
  Part& part = found->second;
  const PageRef target = part.request.pages[index].target;
  const std::span<std::byte> memory = fabric_.host_.page_bytes(node_, target);
  if (fabric_.host_.flips_byte()) bytes[fabric_.rng_.below(bytes.size())] ^= std::byte{1};
  if (!memory.empty()) std::copy(bytes.begin(), bytes.end(), memory.begin());
  fabric_.host_.page_landed(node_, target, id);
  part.landed[index] = true;
  part.checksums[index] = fabric_.checksum_(memory);
  if (--part.missing == 0 && !part.ending) end(id, absl::OkStatus());
}

// One completion a part. In one-sided mode a cancelled part lets bytes land until its completion, never after.
void SimTransport::end(FetchId id, absl::Status status) {
  const auto found = parts_.find(id);
  if (found == parts_.end() || found->second.ending) return;
  found->second.ending = true;
  later(fabric_.rng_.between(1, 2'000) * kMicro, [this, id, status] {
    Part& part = parts_.at(id);
    FetchCompletion completion{id, status, {}};
    if (status.ok()) completion.checksums = part.checksums;
    parts_.erase(id);
    events_.fetched.push_back(std::move(completion));
    ready();
  });
}

void SimTransport::cancel(FetchId id) {
  // A one-sided read cannot be called back at once; some implementations need the endpoint closed. Both happen here.
  if (fabric_.rng_.chance(0.5)) end(id, make_error(ErrorCode::kCancelled, "the fetch was cancelled"));
}

void SimTransport::close_peer(NodeId peer) {
  std::vector<FetchId> ids;
  for (const auto& [id, part] : parts_) {
    if (part.request.source == peer) ids.push_back(id);
  }
  for (const FetchId& id : ids) end(id, make_error(ErrorCode::kPeerLost, "the endpoint was closed"));
}

void SimTransport::poll(TransportEvents& events) {
  std::move(events_.fetched.begin(), events_.fetched.end(), std::back_inserter(events.fetched));
  std::move(events_.registered.begin(), events_.registered.end(), std::back_inserter(events.registered));
  std::move(events_.released.begin(), events_.released.end(), std::back_inserter(events.released));
  events_ = TransportEvents();
}

}  // namespace needle::server
