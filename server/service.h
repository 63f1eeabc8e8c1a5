// The gRPC front: needle.v1's three services, health with facets, and reflection. It translates; it decides nothing but who
// may ask.
//
// What must stay true:
//  1. Every RPC becomes one message to the loop and is answered from an executor thread of its own: the loop never writes to a
//     socket, and gRPC's threads never wait for the loop.
//  2. Verbs of the Needle service act for the session whose secret came as metadata, and for no other.
//  3. Operator verbs are taken over the Unix socket; over TCP only when listen.remote_operators says so.
//  4. "" and "live" say that the loop answers; "ready" that work may be sent here. Neither ever depends on a peer: a dead
//     prefill node must not get the decode nodes restarted.
//
// gRPC stays in the .cc.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/log.h"
#include "server/attach/session_registry.h"
#include "server/daemon_options.h"
#include "server/edge_metrics.h"
#include "server/membership/peer_directory.h"
#include "server/messages.h"

namespace needle::v1 {
class ReadTopkRequest;
class ReadTopkReply;
class ReadEntriesRequest;
class ReadEntriesReply;
}  // namespace needle::v1

namespace needle::server {

struct ServiceFacet {
  std::string name;
  bool serving = false;
  std::string detail;
};

// The parts of Status that the core doesn't know.
struct NodeStatus {
  double uptime_seconds = 0;
  std::string transport;
  std::string memory;
  std::vector<ServiceFacet> facets;
};

struct ServicePoolSet {
  PoolSetId set;
  std::string name;
  std::string format;
  uint64_t fingerprint = 0;
  std::array<PoolShape, kPoolKinds> shapes;
};

struct ServiceOptions {
  std::string unix_path;
  std::string tcp_address;  // HOST:PORT
  bool remote_operators = false;
  std::string node;
  std::string instance;
  std::string build;
  std::vector<ServicePoolSet> sets;
  std::vector<OptionProvenance> options;
};

// Reads of the daemon's own kernels for callers that map nothing. Called on the executor; may take milliseconds.
class RemoteReads {
 public:
  virtual ~RemoteReads() = default;
  virtual absl::Status read_topk(const PageTable& table, PoolSetId set, const v1::ReadTopkRequest& request, v1::ReadTopkReply& reply) = 0;
  virtual absl::Status read_entries(const PageTable& table, PoolSetId set, const v1::ReadEntriesRequest& request,
                                    v1::ReadEntriesReply& reply) = 0;
};

std::string service_libraries();  // "gRPC 1.51.1, protobuf 3.21.12"

// Everything the service needs from the node. All of it outlives the service.
struct ServiceDoors {
  std::function<absl::Status(Message)> post;
  SessionRegistry& registry;
  PeerDirectory& peers;
  EdgeMetrics& metrics;
  std::function<NodeStatus()> status;
  std::function<void(SessionId)> session_ended;  // by RPC: the attach server forgets it
  std::function<void()> drain;                   // an operator asked for it: as SIGTERM, without the exit
  RemoteReads* reads = nullptr;                  // null: read_topk and read_entries are answered IMPOSSIBLE
  Clock& clock;
  Log& log;
};

class Service {
 public:
  static absl::StatusOr<std::unique_ptr<Service>> start(ServiceOptions options, ServiceDoors doors);
  ~Service();

  // Health facets; unknown names become known.
  void set_serving(const std::string& facet, bool serving);

  // Refuses new calls, waits up to the deadline for those under way, then cancels them.
  void stop(int64_t deadline_ms);

 private:
  class Impl;
  explicit Service(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace needle::server
