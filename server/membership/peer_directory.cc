#include "server/membership/peer_directory.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/units.h"
#include "kernels/format_set.h"
#include "proto/errors.h"
#include "proto/needle.grpc.pb.h"
#include "server/daemon_options.h"
#include "server/wire_convert.h"

namespace needle::server {

namespace {

constexpr uint32_t kHelloVersion = 1;
constexpr int kSilentHellos = 4;

template <class Reply>
struct PendingCall {
  grpc::ClientContext context;
  Reply reply;
};

}  // namespace

class PeerDirectory::Impl {
 public:
  Impl(PeerSelf self, int64_t hello_ms, OnPeer on_peer, Post post, Clock& clock, Log& log)
      : self_(std::move(self)), hello_ms_(hello_ms), on_peer_(std::move(on_peer)), post_(std::move(post)), clock_(clock), log_(log) {}

  ~Impl() {
    {
      MutexLock hold(mutex_);
      stopping_ = true;
      wake_.notify_all();
      for (grpc::ClientContext* context : contexts_) context->TryCancel();
      while (!contexts_.empty()) wake_.wait(mutex_);
    }
    if (thread_.joinable()) thread_.join();
  }

  absl::Status add(const std::string& name, const std::string& address) {
    absl::StatusOr<PeerName> parsed = parse_peer(absl::StrCat(name, "=", address));
    if (!parsed.ok()) return parsed.status();
    if (name == self_.name)
      return make_error(ErrorCode::kInvalid, absl::StrCat("'", name, "' is this daemon's own name; give one of the two another --name"));
    MutexLock hold(mutex_);
    return enter(name, address, true);
  }

  void start() {
    thread_ = std::thread([this] {
      MutexLock hold(mutex_);
      while (!stopping_) {
        for (auto& [name, peer] : peers_) {
          if (!leaving_) say_hello(peer, kSilentHellos * hello_ms_);
        }
        const Condition::Time until = std::chrono::steady_clock::now() + std::chrono::milliseconds(hello_ms_);
        while (!stopping_ && wake_.wait_until(mutex_, until)) {
        }
        // A thread that wakes a whole period late did not run: what peers said meanwhile is read first, and judged next time.
        if (std::chrono::steady_clock::now() - until < std::chrono::milliseconds(hello_ms_)) note_silence();
      }
    });
  }

  void say_goodbye() {
    MutexLock hold(mutex_);
    leaving_ = true;
    for (auto& [name, peer] : peers_) {
      if (peer.state == PeerState::kUp) say_hello(peer, PeerDirectory::kGoodbyeMs);
    }
    const Condition::Time until = std::chrono::steady_clock::now() + std::chrono::milliseconds(PeerDirectory::kGoodbyeMs);
    while (!contexts_.empty() && wake_.wait_until(mutex_, until)) {
    }
  }

  absl::StatusOr<NodeId> find(const std::string& name) const {
    MutexLock hold(mutex_);
    const auto peer = peers_.find(name);
    if (peer != peers_.end()) return peer->second.node;
    std::string known;
    for (const auto& [other, unused] : peers_) absl::StrAppend(&known, known.empty() ? "" : ", ", other);
    return make_error(ErrorCode::kNotFound, absl::StrCat("no peer '", name.substr(0, 64), "'; known: ", known.empty() ? "none" : known,
                                                         ". Name it with --peer or `needlectl peers --add`"));
  }

  absl::Status check_format(NodeId node, const std::string& pool_set) const {
    MutexLock hold(mutex_);
    const Peer* peer = by_node(node);
    if (peer == nullptr || peer->incarnation.is_none()) return absl::OkStatus();  // not heard of yet: the ship's first ask will tell
    for (const PeerPoolSet& ours : self_.sets) {
      if (ours.name != pool_set) continue;
      for (const PeerPoolSet& theirs : peer->sets) {
        if (theirs.name != pool_set) continue;
        const absl::Status same = check_same_format_set(ours.format, theirs.format);
        return same.ok() ? same
                         : make_error(ErrorCode::kFormatMismatch,
                                      absl::StrCat("peer ", peer->name, ", pool ", pool_set, ": ", std::string(same.message())));
      }
      return make_error(ErrorCode::kNotFound, absl::StrCat("peer ", peer->name, " has no pool '", pool_set, "'"));
    }
    return absl::OkStatus();
  }

  absl::Status check_reachable(NodeId node) const {
    MutexLock hold(mutex_);
    const Peer* peer = by_node(node);
    if (peer == nullptr || !peer->unreachable) return absl::OkStatus();
    return make_error(ErrorCode::kPeerLost, absl::StrCat("peer '", peer->name, "' at ", peer->address, " takes no connection: ",
                                                         peer->detail, ". Is needled running there, and is that its address?"));
  }

  std::vector<PeerRow> rows() const {
    MutexLock hold(mutex_);
    std::vector<PeerRow> rows;
    const int64_t now = clock_.now_ns();
    for (const auto& [name, peer] : peers_) {
      PeerRow row;
      row.name = name;
      row.address = peer.address;
      row.node = peer.node;
      row.state = peer.state;
      row.incarnation = peer.incarnation;
      row.last_heard_seconds = peer.heard_ns == 0 ? -1 : static_cast<double>(now - peer.heard_ns) * 1e-9;
      row.transport = peer.transport;
      row.detail = peer.detail;
      for (const PeerPoolSet& set : peer.sets) row.pool_sets.push_back(set.name);
      row.messages_dropped = peer.dropped;
      rows.push_back(std::move(row));
    }
    return rows;
  }

  void send(NodeId node, const PeerMessage& message) {
    MutexLock hold(mutex_);
    Peer* peer = by_node(node);
    if (peer == nullptr || stopping_ || peer->sends >= kSendsMax) {
      if (peer != nullptr) ++peer->dropped;
      return;
    }
    auto* call = new PendingCall<v1::Empty>;
    const v1::PeerEnvelope envelope = wire::envelope_of(message, self_.name);
    auto* request = new v1::PeerEnvelope(envelope);
    call->context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    contexts_.push_back(&call->context);
    ++peer->sends;
    peer->stub->async()->Deliver(&call->context, request, &call->reply, [this, call, request, node](const grpc::Status& status) {
      MutexLock hold_in_callback(mutex_);
      finish(&call->context);
      if (Peer* found = by_node(node)) {
        --found->sends;
        if (!status.ok()) ++found->dropped;
      }
      delete request;
      delete call;
    });
  }

  absl::Status on_hello(const v1::HelloMessage& theirs, v1::HelloMessage& ours) {
    {
      MutexLock hold(mutex_);
      fill(ours);
    }
    if (theirs.version() != kHelloVersion) {
      return make_error(ErrorCode::kInvalid,
                        absl::StrCat("peer protocol ", theirs.version(), " is not spoken here; this daemon speaks ", kHelloVersion));
    }
    if (theirs.node() == self_.name) {
      return make_error(ErrorCode::kConflict, absl::StrCat("both daemons are named '", self_.name, "'; give one of them another --name"));
    }
    absl::StatusOr<PeerName> parsed = parse_peer(absl::StrCat(theirs.node(), "=", theirs.address()));
    if (!parsed.ok()) return parsed.status();
    MutexLock hold(mutex_);
    if (absl::Status status = enter(parsed->name, parsed->address, false); !status.ok()) return status;
    heard(peers_.at(parsed->name), theirs);
    return absl::OkStatus();
  }

  absl::Status on_deliver(const v1::PeerEnvelope& envelope) {
    absl::StatusOr<PeerMessage> message = wire::message_of(envelope);
    if (!message.ok()) return message.status();
    {
      MutexLock hold(mutex_);
      const auto peer = peers_.find(envelope.from());
      if (peer == peers_.end() || peer->second.incarnation.is_none()) {
        return make_error(ErrorCode::kNotFound,
                          absl::StrCat("'", envelope.from().substr(0, 64), "' has not said hello to this daemon yet"));
      }
      if (peer->second.incarnation != message->from_incarnation) {
        return make_error(ErrorCode::kStale, absl::StrCat("'", peer->first, "' speaks as an incarnation that has not said hello here"));
      }
      peer->second.heard_ns = clock_.now_ns();
      peer->second.unreachable = false;
      message->from = peer->second.node;
    }
    return post_(*std::move(message));
  }

 private:
  struct Peer {
    std::string name;
    std::string address;
    NodeId node;
    bool listed = false;
    PeerState state = PeerState::kUnknown;
    Incarnation incarnation;
    int64_t heard_ns = 0;
    std::string transport;
    std::string transport_address;
    std::string detail;
    std::vector<PeerPoolSet> sets;
    std::shared_ptr<grpc::Channel> channel;
    std::unique_ptr<v1::Peer::Stub> stub;
    int sends = 0;
    bool hello_under_way = false;
    bool unreachable = false;  // the last hello found nobody at the address, and nothing was heard since
    uint64_t dropped = 0;
  };

  Peer* by_node(NodeId node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (auto& [name, peer] : peers_) {
      if (peer.node == node) return &peer;
    }
    return nullptr;
  }
  const Peer* by_node(NodeId node) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return const_cast<Impl*>(this)->by_node(node); }

  // A listed address stays when the peer announces another one.
  absl::Status enter(const std::string& name, const std::string& address, bool listed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    auto found = peers_.find(name);
    if (found == peers_.end()) {
      if (peers_.size() >= kPeersMax)
        return make_error(ErrorCode::kBusy, absl::StrCat("there are ", peers_.size(), " peers, the limit"), 1000);
      Peer peer;
      peer.name = name;
      peer.node = node_id_of(name);
      if (peer.node == node_id_of(self_.name) || by_node(peer.node) != nullptr) {
        return make_error(ErrorCode::kConflict,
                          absl::StrCat("peer name '", name, "' has the same 32-bit id as another daemon's; give it another --name"));
      }
      found = peers_.emplace(name, std::move(peer)).first;
    }
    Peer& peer = found->second;
    if (peer.listed && !listed) return absl::OkStatus();
    peer.listed = peer.listed || listed;
    if (peer.address == address) return absl::OkStatus();
    peer.address = address;
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);  // a restarted peer is found within a second
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    peer.channel = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
    peer.stub = v1::Peer::NewStub(peer.channel);
    return absl::OkStatus();
  }

  void fill(v1::HelloMessage& hello) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    hello.set_version(kHelloVersion);
    hello.set_node(self_.name);
    hello.set_incarnation(self_.incarnation.value());
    hello.set_address(self_.address);
    hello.set_transport(self_.transport);
    hello.set_transport_address(self_.transport_address);
    hello.set_build(self_.build);
    hello.set_leaving(leaving_);
    for (const PeerPoolSet& set : self_.sets) {
      v1::PoolSetFormat* wire = hello.add_sets();
      wire->set_name(set.name);
      wire->set_format(set.format);
      wire->set_fingerprint(set.fingerprint);
    }
  }

  // Under the lock, so that on_peer_ has returned before a message of that incarnation gets through.
  void heard(Peer& peer, const v1::HelloMessage& theirs) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Incarnation incarnation(theirs.incarnation());
    if (incarnation != peer.incarnation || theirs.transport_address() != peer.transport_address) {
      on_peer_({peer.node, peer.name, incarnation, theirs.transport(), theirs.transport_address()});
      log_.write(LogLevel::kInfo, peer.incarnation.is_none() ? "peer_met" : "peer_restarted",
                 {{"peer", peer.name},
                  {"address", peer.address},
                  {"incarnation", absl::StrCat(theirs.incarnation())},
                  {"transport", theirs.transport()}});
    }
    if (theirs.leaving() && peer.state == PeerState::kUp) log_.write(LogLevel::kInfo, "peer_left", {{"peer", peer.name}});
    if (!theirs.leaving() && peer.state == PeerState::kSilent) log_.write(LogLevel::kInfo, "peer_heard_again", {{"peer", peer.name}});
    // A peer that speaks takes connections. One that started after us would else miss our messages until gRPC tries again.
    if (peer.channel->GetState(true) == GRPC_CHANNEL_TRANSIENT_FAILURE)
      grpc::experimental::ChannelResetConnectionBackoff(peer.channel.get());
    peer.incarnation = incarnation;
    peer.transport = theirs.transport();
    peer.transport_address = theirs.transport_address();
    peer.heard_ns = clock_.now_ns();
    peer.unreachable = false;
    peer.state = theirs.leaving() ? PeerState::kSilent : PeerState::kUp;
    peer.detail = theirs.leaving() ? "it said goodbye" : "";
    peer.sets.clear();
    for (const v1::PoolSetFormat& set : theirs.sets()) {
      if (peer.sets.size() >= 64) break;
      peer.sets.push_back({set.name(), set.format(), set.fingerprint()});
    }
  }

  // A goodbye goes out beside a hello that is under way.
  void say_hello(Peer& peer, int64_t deadline_ms) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if ((peer.hello_under_way && !leaving_) || stopping_) return;
    auto* call = new PendingCall<v1::HelloMessage>;
    auto* request = new v1::HelloMessage;
    fill(*request);
    call->context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms));
    contexts_.push_back(&call->context);
    peer.hello_under_way = true;
    peer.stub->async()->Hello(&call->context, request, &call->reply, [this, call, request, name = peer.name](const grpc::Status& status) {
      {
        MutexLock hold(mutex_);
        Peer& found = peers_.at(name);
        found.hello_under_way = false;
        if (status.ok() && call->reply.node() == name) {
          heard(found, call->reply);
        } else if (status.ok()) {
          found.state = PeerState::kRefused;
          found.detail = absl::StrCat("the daemon at ", found.address, " calls itself '", call->reply.node().substr(0, 64), "'");
        } else {
          const bool unreachable =
              status.error_code() == grpc::StatusCode::UNAVAILABLE || status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
          if (!unreachable) found.state = PeerState::kRefused;
          found.unreachable = status.error_code() == grpc::StatusCode::UNAVAILABLE;  // a deadline may be the peer's slowness
          found.detail = status.error_message();
        }
        finish(&call->context);
      }
      delete request;
      delete call;
    });
  }

  void finish(grpc::ClientContext* context) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    contexts_.erase(std::find(contexts_.begin(), contexts_.end(), context));
    if (contexts_.empty()) wake_.notify_all();
  }

  void note_silence() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const int64_t now = clock_.now_ns();
    for (auto& [name, peer] : peers_) {
      if (peer.state != PeerState::kUp || now - peer.heard_ns <= kSilentHellos * hello_ms_ * kNanosPerMilli) continue;
      peer.state = PeerState::kSilent;
      log_.write(LogLevel::kWarning, "peer_silent", {{"peer", name}, {"cause", peer.detail.empty() ? "no hello came back" : peer.detail}});
    }
  }

  const PeerSelf self_;
  const int64_t hello_ms_;
  const OnPeer on_peer_;
  const Post post_;
  Clock& clock_;
  Log& log_;
  mutable Mutex mutex_;
  Condition wake_;
  std::map<std::string, Peer> peers_ ABSL_GUARDED_BY(mutex_);
  std::vector<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mutex_);  // calls under way
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;  // every hello from now on is a goodbye
  std::thread thread_;
};

PeerDirectory::PeerDirectory(PeerSelf self, int64_t hello_ms, OnPeer on_peer, Post post, Clock& clock, Log& log)
    : impl_(std::make_unique<Impl>(std::move(self), hello_ms, std::move(on_peer), std::move(post), clock, log)) {}
PeerDirectory::~PeerDirectory() = default;
absl::Status PeerDirectory::add(const std::string& name, const std::string& address) { return impl_->add(name, address); }
void PeerDirectory::start() { impl_->start(); }
void PeerDirectory::say_goodbye() { impl_->say_goodbye(); }
absl::StatusOr<NodeId> PeerDirectory::find(const std::string& name) const { return impl_->find(name); }
absl::Status PeerDirectory::check_reachable(NodeId node) const { return impl_->check_reachable(node); }
absl::Status PeerDirectory::check_format(NodeId node, const std::string& pool_set) const { return impl_->check_format(node, pool_set); }
std::vector<PeerRow> PeerDirectory::rows() const { return impl_->rows(); }
void PeerDirectory::send(NodeId peer, PeerMessage message) { impl_->send(peer, message); }
absl::Status PeerDirectory::on_hello(const v1::HelloMessage& theirs, v1::HelloMessage& ours) { return impl_->on_hello(theirs, ours); }
absl::Status PeerDirectory::on_deliver(const v1::PeerEnvelope& envelope) { return impl_->on_deliver(envelope); }

}  // namespace needle::server
