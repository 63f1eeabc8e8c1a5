// The other daemons: their names, addresses, incarnations and formats, and the way to send them a message.
//
// Peers are named by the operator (peers.static, `needlectl peers --add`) or make themselves known by saying hello. A hello goes out
// every hello_ms to each of them and carries what both sides must know before a ship: incarnation, pool sets with their
// formats, and the transport's address. Names are what operators and clients use; a NodeId is a name's 32-bit hash, the
// same in every daemon, which transports use on the wire.
//
// What must stay true:
//  1. A NodeId means one name, whatever restarts at that address. Two names with one hash are refused.
//  2. A changed incarnation or transport address is told to `on_peer` before any message of that incarnation is delivered.
//  3. Sending is best effort: a peer with kSendsMax unanswered messages loses the next ones, counted.
//  4. At most kPeersMax peers, listed or not.
//
// Safe from any thread. gRPC stays in the .cc.
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
#include "server/membership/node_id.h"
#include "server/messages.h"

namespace needle::v1 {
class HelloMessage;
class PeerEnvelope;
}  // namespace needle::v1

namespace needle::server {

struct PeerPoolSet {
  std::string name;
  std::string format;
  uint64_t fingerprint = 0;
};

enum class PeerState : uint8_t { kUnknown, kUp, kSilent, kRefused };
inline constexpr const char* kPeerStateNames[4] = {"unknown", "up", "silent", "refused"};

struct PeerRow {
  std::string name;
  std::string address;
  NodeId node;
  PeerState state = PeerState::kUnknown;
  Incarnation incarnation;
  double last_heard_seconds = -1;  // ago; negative: never
  std::string transport;
  std::string detail;
  std::vector<std::string> pool_sets;
  uint64_t messages_dropped = 0;
};

struct PeerSelf {
  std::string name;
  std::string address;  // where others reach this daemon's Peer service
  std::string build;
  std::vector<PeerPoolSet> sets;
  Incarnation incarnation;
  std::string transport;
  std::string transport_address;
};

struct PeerChange {
  NodeId node;
  std::string name;
  Incarnation incarnation;
  std::string transport;
  std::string transport_address;
};

class PeerDirectory {
 public:
  static constexpr size_t kPeersMax = 256;
  static constexpr int kSendsMax = 1024;
  static constexpr int64_t kGoodbyeMs = 200;

  using OnPeer = std::function<void(const PeerChange&)>;  // must neither block nor call back
  using Post = std::function<absl::Status(Message)>;

  PeerDirectory(PeerSelf self, int64_t hello_ms, OnPeer on_peer, Post post, Clock& clock, Log& log);
  ~PeerDirectory();  // waits for calls under way, a few milliseconds after they are cancelled

  absl::Status add(const std::string& name, const std::string& address);
  void start();        // hellos go out from now on
  void say_goodbye();  // a last hello to every peer that is up, at most kGoodbyeMs long: their silence is then no warning

  absl::StatusOr<NodeId> find(const std::string& name) const;
  // NOT_FOUND, or FORMAT_MISMATCH with both texts when the peer's pool of that name differs from ours.
  absl::Status check_format(NodeId node, const std::string& pool_set) const;
  // PEER_LOST when nobody took the last hello at the peer's address and nothing was heard of it since: a ship from it would
  // wait for its silence to tell the same. A peer that was not asked yet counts as reachable.
  absl::Status check_reachable(NodeId node) const;
  std::vector<PeerRow> rows() const;

  void send(NodeId peer, PeerMessage message);  // never blocks

  // From the Peer service.
  absl::Status on_hello(const v1::HelloMessage& theirs, v1::HelloMessage& ours);
  absl::Status on_deliver(const v1::PeerEnvelope& envelope);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace needle::server
