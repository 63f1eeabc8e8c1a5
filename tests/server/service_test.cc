// A whole node in this process, asked over gRPC: what each verb answers, who may ask, and how a refusal looks on the wire.
#include "server/service.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>

#include "base/units.h"
#include "kernels/format_set.h"
#include "proto/attach.h"
#include "proto/errors.h"
#include "proto/needle.grpc.pb.h"
#include "server/memory/descriptor_passing.h"
#include "server/memory/host_memory.h"
#include "server/node.h"
#include "server/wire_convert.h"
#include "tests/free_port.h"

namespace needle::server {
namespace {

using needle::testing::free_port;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A daemon without its main(): raw keys in a small pool, no transport unless asked for.
class RunningNode {
 public:
  explicit RunningNode(const std::string& folder, const std::string& name, std::vector<std::string> more = {"--transport-kind=none"}) {
    folder_ = folder + "/" + name;
    (void)!::system(("mkdir -p " + folder_).c_str());
    grpc_ = "127.0.0.1:" + std::to_string(free_port());
    std::vector<std::string> arguments = {"--name",
                                          name,
                                          "--node-runtime-dir",
                                          folder_,
                                          "--listen-grpc",
                                          grpc_,
                                          "--listen-metrics",
                                          "127.0.0.1:" + std::to_string(free_port()),
                                          "--memory-bytes=96M",
                                          "--memory-scratch-bytes=4M",
                                          "--memory-huge-pages=off",
                                          "--pool",
                                          "default:model=raw,ratio_paged=6,ratio_window=2,ratio_state=2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const absl::StatusOr<ParsedOptions> parsed = parse_options(arguments, {});
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    const absl::StatusOr<NodePlan> plan =
        plan_node(parsed->options, {.available_bytes = available_memory_bytes(), .host_name = "test", .xdg_runtime_dir = folder});
    EXPECT_TRUE(plan.ok()) << plan.status();
    absl::StatusOr<std::unique_ptr<Node>> node = Node::start(*parsed, *plan, store_, {}, log_);
    if (!node.ok()) throw std::runtime_error(std::string(node.status().message()));
    if (node.ok()) node_ = *std::move(node);
  }

  std::shared_ptr<grpc::Channel> local() const {
    return grpc::CreateChannel("unix:" + folder_ + "/grpc.sock", grpc::InsecureChannelCredentials());
  }
  std::shared_ptr<grpc::Channel> remote() const { return grpc::CreateChannel(grpc_, grpc::InsecureChannelCredentials()); }
  const std::string& address() const { return grpc_; }
  std::string attach_path() const { return folder_ + "/attach.sock"; }
  Node& node() { return *node_; }

 private:
  SilentLog log_;
  NoDescriptorStore store_;
  std::string folder_;
  std::string grpc_;
  std::unique_ptr<Node> node_;
};

// A caller with a session: each call() gives the status; `error` and `retry_after_ms` are what the trailing metadata said.
class Caller {
 public:
  explicit Caller(std::shared_ptr<grpc::Channel> channel)
      : channel_(std::move(channel)), stub_(v1::Needle::NewStub(channel_)), operator_(v1::Operator::NewStub(channel_)) {}

  grpc::Status open(const std::string& pool = "", const std::string& format = "") {
    v1::OpenSessionRequest request;
    request.set_pool_set(pool);
    request.set_format(format);
    request.set_client("test");
    v1::OpenSessionReply reply;
    const grpc::Status status = call(&v1::Needle::Stub::OpenSession, request, &reply);
    session = reply.session();
    secret = reply.secret();
    format_text = reply.format();
    return status;
  }
  // A session of this process that maps nothing: writers must be processes whose death can be seen.
  void attach(const RunningNode& node) {
    socket_ = *connect_seqpacket(node.attach_path());
    attach::Hello hello;
    attach::Header header;
    header.body_bytes = sizeof(hello);
    std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
    bytes.append(reinterpret_cast<const char*>(&hello), sizeof(hello));
    send_datagram(socket_.get(), std::as_bytes(std::span(bytes)), {}, true);
    Datagram datagram;
    ASSERT_EQ(receive_datagram(socket_.get(), attach::kMessageBytesMax, datagram, true), ReceiveResult::kReceived);
    attach::Reader reader(datagram.bytes.data(), datagram.bytes.size());
    attach::Welcome welcome;
    ASSERT_TRUE(reader.take(header) && header.type == attach::Type::kWelcome && reader.take(welcome));
    session = welcome.session;
    secret.assign(reinterpret_cast<const char*>(welcome.secret), sizeof(welcome.secret));
  }
  template <class Request, class Reply>
  grpc::Status call(grpc::Status (v1::Needle::Stub::*verb)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
                    Reply* reply) {
    return finish([&](grpc::ClientContext* context) { return (stub_.get()->*verb)(context, request, reply); });
  }
  template <class Request, class Reply>
  grpc::Status operate(grpc::Status (v1::Operator::Stub::*verb)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
                       Reply* reply) {
    return finish([&](grpc::ClientContext* context) { return (operator_.get()->*verb)(context, request, reply); });
  }
  v1::Occupancy paged() {
    v1::StatusReply reply;
    EXPECT_TRUE(operate(&v1::Operator::Stub::Status, v1::Empty(), &reply).ok());
    return reply.sets_size() > 0 ? reply.sets(0).pools(0) : v1::Occupancy();
  }
  // Stores `tokens` tokens under a sequence id and seals them; pages hold whatever they held.
  grpc::Status store(uint64_t sequence, int64_t tokens, uint64_t ticket = 0) {
    v1::ReserveRequest reserve;
    reserve.set_ticket(ticket != 0 ? ticket : sequence + 1000);
    reserve.set_sequence(sequence);
    reserve.set_tokens(tokens);
    v1::ReserveReply reserved;
    if (grpc::Status status = call(&v1::Needle::Stub::Reserve, reserve, &reserved); !status.ok()) return status;
    v1::SealRequest seal;
    seal.set_ticket(reserve.ticket());
    seal.set_step(1);
    seal.set_tokens(tokens);
    for (int64_t page = 0; page < tokens / 256; ++page) {
      seal.mutable_pages()->add_name_high(sequence);
      seal.mutable_pages()->add_name_low(static_cast<uint64_t>(page) + 1);
      seal.mutable_pages()->add_checksum(0);
    }
    const int64_t window_pages =
        std::min<int64_t>(reserved.view().window_size(), 1 + (tokens - 1) / 64 - std::max<int64_t>(0, tokens - 128) / 64);
    for (int64_t page = 0; page < window_pages; ++page) seal.add_window_checksums(0);
    v1::SealReply sealed;
    return call(&v1::Needle::Stub::Seal, seal, &sealed);
  }

  uint64_t session = 0;
  std::string secret;
  std::string format_text;
  std::string error;
  std::string retry_after_ms;

 private:
  template <class Call>
  grpc::Status finish(Call call) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    if (session != 0) {
      context.AddMetadata(attach::kSessionMetadata, std::to_string(session));
      context.AddMetadata(attach::kSecretMetadata, secret);
    }
    const grpc::Status status = call(&context);
    const auto text = [&](const char* key) {
      const auto found = context.GetServerTrailingMetadata().find(key);
      return found == context.GetServerTrailingMetadata().end() ? std::string() : std::string(found->second.data(), found->second.size());
    };
    error = text(attach::kErrorMetadata);
    retry_after_ms = text(attach::kRetryAfterMetadata);
    return status;
  }

  FileDescriptor socket_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Needle::Stub> stub_;
  std::unique_ptr<v1::Operator::Stub> operator_;
};

class ServiceTest : public ::testing::Test {
 protected:
  ServiceTest() {
    char name[] = "/tmp/needle-service-XXXXXX";
    folder_ = ::mkdtemp(name);
  }
  ~ServiceTest() override { (void)!::system(("rm -rf " + folder_).c_str()); }
  std::string folder_;
};

TEST_F(ServiceTest, an_attached_process_stores_and_a_remote_caller_reads) {
  RunningNode node(folder_, "a");
  Caller writer(node.local());
  writer.attach(node);
  const grpc::Status stored = writer.store(7, 512);
  ASSERT_TRUE(stored.ok()) << stored.error_message();
  Caller caller(node.remote());
  ASSERT_TRUE(caller.open().ok());
  EXPECT_EQ(caller.format_text, format_set_text(*preset_formats("raw", {})));
  EXPECT_FALSE(caller.store(8, 512).ok()) << "nobody could see a remote writer die";
  EXPECT_EQ(caller.error, "WRONG_OWNER");
  v1::AcquireRequest acquire;
  acquire.set_lease(99);
  acquire.set_sequence(7);
  v1::AcquireReply acquired;
  ASSERT_TRUE(caller.call(&v1::Needle::Stub::Acquire, acquire, &acquired).ok());
  EXPECT_EQ(acquired.table().tokens(), 512);
  EXPECT_EQ(acquired.table().paged_size(), 2);
  Caller local(node.local());
  EXPECT_EQ(local.paged().leased(), 2);
  v1::LeaseRequest release;
  release.set_lease(99);
  v1::Empty nothing;
  EXPECT_TRUE(caller.call(&v1::Needle::Stub::Release, release, &nothing).ok());
  EXPECT_EQ(local.paged().leased(), 0);
  EXPECT_FALSE(caller.call(&v1::Needle::Stub::Release, release, &nothing).ok());
  EXPECT_EQ(caller.error, "CONSUMED");
}

TEST_F(ServiceTest, calls_without_the_session_s_secret_are_refused) {
  RunningNode node(folder_, "a");
  Caller nobody(node.local());
  v1::Empty nothing;
  EXPECT_FALSE(nobody.call(&v1::Needle::Stub::Heartbeat, v1::Empty(), &nothing).ok());
  EXPECT_EQ(nobody.error, "WRONG_OWNER");
  Caller owner(node.local());
  ASSERT_TRUE(owner.open().ok());
  EXPECT_TRUE(owner.call(&v1::Needle::Stub::Heartbeat, v1::Empty(), &nothing).ok());
  Caller thief(node.local());
  thief.session = owner.session;
  thief.secret = std::string(16, 'x');
  EXPECT_FALSE(thief.call(&v1::Needle::Stub::Heartbeat, v1::Empty(), &nothing).ok());
  EXPECT_EQ(thief.error, "STALE");
  thief.secret = owner.secret.substr(0, 15);
  EXPECT_FALSE(thief.call(&v1::Needle::Stub::Heartbeat, v1::Empty(), &nothing).ok());
}

TEST_F(ServiceTest, a_closed_session_is_known_no_more) {
  RunningNode node(folder_, "a");
  Caller caller(node.local());
  ASSERT_TRUE(caller.open().ok());
  v1::Empty nothing;
  EXPECT_TRUE(caller.call(&v1::Needle::Stub::CloseSession, v1::Empty(), &nothing).ok());
  EXPECT_FALSE(caller.call(&v1::Needle::Stub::Heartbeat, v1::Empty(), &nothing).ok());
  EXPECT_EQ(caller.error, "STALE");
}

TEST_F(ServiceTest, another_format_is_refused_with_both_texts) {
  RunningNode node(folder_, "a");
  Caller caller(node.local());
  const grpc::Status status = caller.open("default", format_set_text(*preset_formats("deepseek-v4-flash", {})));
  EXPECT_EQ(caller.error, "FORMAT_MISMATCH");
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("--- ours"), HasSubstr("name raw"), HasSubstr("name deepseek-v4-flash")));
  EXPECT_FALSE(caller.open("nowhere").ok());
  EXPECT_EQ(caller.error, "NOT_FOUND");
}

TEST_F(ServiceTest, out_of_pages_is_answered_at_once_with_a_hint) {
  RunningNode node(folder_, "a");
  Caller caller(node.local());
  caller.attach(node);
  v1::ReserveRequest reserve;
  reserve.set_ticket(1);
  reserve.set_sequence(1);
  reserve.set_tokens(256 * 60'000);
  v1::ReserveReply reserved;
  EXPECT_FALSE(caller.call(&v1::Needle::Stub::Reserve, reserve, &reserved).ok());
  EXPECT_EQ(caller.error, "OUT_OF_PAGES");
  EXPECT_EQ(caller.retry_after_ms, "20");
}

TEST_F(ServiceTest, operators_are_heard_over_the_unix_socket_alone) {
  RunningNode node(folder_, "a");
  v1::StatusReply status;
  Caller remote(node.remote());
  EXPECT_FALSE(remote.operate(&v1::Operator::Stub::Status, v1::Empty(), &status).ok());
  EXPECT_EQ(remote.error, "WRONG_OWNER");
  Caller local(node.local());
  ASSERT_TRUE(local.operate(&v1::Operator::Stub::Status, v1::Empty(), &status).ok());
  EXPECT_EQ(status.node(), "a");
  EXPECT_GT(status.sets(0).pools(0).capacity(), 0);
  RunningNode open(folder_, "b", {"--transport-kind=none", "--listen-remote-operators"});
  Caller allowed(open.remote());
  EXPECT_TRUE(allowed.operate(&v1::Operator::Stub::Status, v1::Empty(), &status).ok());
}

TEST_F(ServiceTest, parallel_lists_of_unequal_length_are_refused) {
  RunningNode node(folder_, "a");
  Caller caller(node.local());
  ASSERT_TRUE(caller.open().ok());
  v1::LookupRequest lookup;
  lookup.mutable_names()->add_high(1);
  v1::LookupReply found;
  EXPECT_FALSE(caller.call(&v1::Needle::Stub::Lookup, lookup, &found).ok());
  EXPECT_EQ(caller.error, "INVALID");
}

TEST_F(ServiceTest, sequences_are_listed_evicted_and_gone) {
  RunningNode node(folder_, "a");
  Caller caller(node.local());
  caller.attach(node);
  ASSERT_TRUE(caller.store(11, 256).ok());
  ASSERT_TRUE(caller.store(12, 600).ok());
  v1::SequencesRequest request;
  request.set_count_max(10);
  v1::SequencesReply listed;
  ASSERT_TRUE(caller.operate(&v1::Operator::Stub::Sequences, request, &listed).ok());
  ASSERT_EQ(listed.sequences_size(), 2);
  EXPECT_EQ(listed.sequences(0).sequence(), 12u) << "latest used first";
  EXPECT_EQ(listed.sequences(0).tokens(), 600);
  v1::EvictRequest evict;
  evict.set_sequence(12);
  v1::EvictReply evicted;
  ASSERT_TRUE(caller.operate(&v1::Operator::Stub::Evict, evict, &evicted).ok());
  EXPECT_FALSE(caller.operate(&v1::Operator::Stub::Evict, evict, &evicted).ok());
  EXPECT_EQ(caller.error, "NOT_FOUND");
  v1::Empty nothing;
  EXPECT_TRUE(caller.operate(&v1::Operator::Stub::Audit, v1::Empty(), &nothing).ok());
}

TEST_F(ServiceTest, a_resize_is_rehearsed_then_applied_and_a_stale_revision_refused) {
  RunningNode node(folder_, "a");
  Caller caller(node.local());
  const int64_t before = caller.paged().capacity();
  v1::ResizeRequest resize;
  resize.set_budget_bytes(140 * kMiB);
  resize.set_dry_run(true);
  v1::ResizeReply reply;
  grpc::Status status = caller.operate(&v1::Operator::Stub::Resize, resize, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_GT(reply.chunks_to_grow(), 0);
  EXPECT_EQ(caller.paged().capacity(), before);
  resize.set_dry_run(false);
  status = caller.operate(&v1::Operator::Stub::Resize, resize, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (caller.paged().capacity() <= before && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_GT(caller.paged().capacity(), before);
  resize.set_revision(1);
  resize.set_budget_bytes(96 * kMiB);
  for (int i = 0; i < 2; ++i) status = caller.operate(&v1::Operator::Stub::Resize, resize, &reply);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(caller.error, ::testing::AnyOf("STALE", "CONFLICT"));
  resize.set_revision(0);
  resize.add_ratios(1);
  EXPECT_FALSE(caller.operate(&v1::Operator::Stub::Resize, resize, &reply).ok());
  EXPECT_EQ(caller.error, "INVALID");
}

TEST_F(ServiceTest, daemon_side_reads_find_a_stored_key_first) {
  RunningNode node(folder_, "a");
  Caller caller(node.local());
  caller.attach(node);
  ASSERT_TRUE(caller.store(7, 256).ok());  // fresh pages are zero: every key is zero, every score too
  v1::ReadTopkRequest request;
  request.set_sequence(7);
  request.set_layer(2);
  request.set_heads(1);
  request.set_q(std::string(256, '\0'));
  const float one = 1;
  request.set_head_weights(std::string(reinterpret_cast<const char*>(&one), 4));
  request.add_positions(255);
  request.set_q_is_prepared(true);
  request.set_k(5);
  request.set_with_scores(true);
  v1::ReadTopkReply reply;
  const grpc::Status status = caller.call(&v1::Needle::Stub::ReadTopk, request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(std::vector<int>(reply.positions().begin(), reply.positions().end()), (std::vector<int>{0, 1, 2, 3, 4}))
      << "ties go to the lower position";
  EXPECT_EQ(reply.counts(0), 5u);
  v1::ReadEntriesRequest entries;
  entries.set_sequence(7);
  entries.add_entries(63);
  entries.add_entries(-1);
  v1::ReadEntriesReply read;
  ASSERT_TRUE(caller.call(&v1::Needle::Stub::ReadEntries, entries, &read).ok());
  EXPECT_EQ(read.data_bytes(), 256u);
  EXPECT_EQ(read.data().size(), 512u);
  entries.add_entries(64);
  EXPECT_FALSE(caller.call(&v1::Needle::Stub::ReadEntries, entries, &read).ok());
  EXPECT_EQ(caller.error, "INVALID");
  v1::AcquireRequest acquire;  // the same under a lease of the caller's own
  acquire.set_lease(77);
  acquire.set_sequence(7);
  v1::AcquireReply acquired;
  ASSERT_TRUE(caller.call(&v1::Needle::Stub::Acquire, acquire, &acquired).ok());
  v1::ReadTopkRequest leased = request;
  leased.set_sequence(0);
  leased.set_lease(77);
  v1::ReadTopkReply under_lease;
  ASSERT_TRUE(caller.call(&v1::Needle::Stub::ReadTopk, leased, &under_lease).ok());
  EXPECT_EQ(under_lease.SerializeAsString(), reply.SerializeAsString());
  leased.set_lease(78);
  EXPECT_FALSE(caller.call(&v1::Needle::Stub::ReadTopk, leased, &under_lease).ok());
  EXPECT_EQ(caller.error, "NOT_FOUND");
  v1::LeaseRequest release;
  release.set_lease(77);
  v1::Empty nothing;
  ASSERT_TRUE(caller.call(&v1::Needle::Stub::Release, release, &nothing).ok());
  request.set_layer(1000);
  EXPECT_FALSE(caller.call(&v1::Needle::Stub::ReadTopk, request, &reply).ok());
  EXPECT_EQ(caller.error, "INVALID");
  Caller counter(node.local());
  EXPECT_EQ(counter.paged().leased(), 0) << "reads give their leases back";
}

TEST_F(ServiceTest, peers_meet_learn_each_other_s_formats_and_know_a_stranger) {
  RunningNode first(folder_, "a");
  RunningNode second(folder_, "b", {"--transport-kind=none", "--peers-hello=50ms", "--peer=a=" + first.address()});
  Caller caller(second.local());
  v1::PeersReply peers;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  do {
    peers.Clear();
    ASSERT_TRUE(caller.operate(&v1::Operator::Stub::Peers, v1::Empty(), &peers).ok());
  } while (peers.peers(0).state() != "up" && std::chrono::steady_clock::now() < deadline);
  EXPECT_EQ(peers.peers(0).state(), "up");
  EXPECT_EQ(peers.peers(0).pool_sets(0), "default");
  Caller other(first.local());
  peers.Clear();
  ASSERT_TRUE(other.operate(&v1::Operator::Stub::Peers, v1::Empty(), &peers).ok());
  ASSERT_EQ(peers.peers_size(), 1) << "who says hello is known";
  EXPECT_EQ(peers.peers(0).name(), "b");
  ASSERT_TRUE(caller.open().ok());
  v1::ShipStartRequest ship;
  ship.set_ticket(5);
  ship.set_sequence(5);
  ship.set_peer("nobody");
  v1::Empty nothing;
  const grpc::Status status = caller.call(&v1::Needle::Stub::ShipStart, ship, &nothing);
  EXPECT_EQ(caller.error, "NOT_FOUND");
  EXPECT_THAT(status.error_message(), HasSubstr("known: a"));
}

TEST_F(ServiceTest, a_drain_refuses_new_work_and_says_so_in_health) {
  RunningNode node(folder_, "a");
  Caller caller(node.local());
  caller.attach(node);
  v1::Empty nothing;
  ASSERT_TRUE(caller.operate(&v1::Operator::Stub::Drain, v1::Empty(), &nothing).ok());
  EXPECT_FALSE(caller.store(7, 256).ok());
  EXPECT_EQ(caller.error, "STOPPING");
  EXPECT_TRUE(node.node().drained());
  v1::StatusReply status;
  ASSERT_TRUE(caller.operate(&v1::Operator::Stub::Status, v1::Empty(), &status).ok());
  for (const v1::Facet& facet : status.facets()) {
    if (facet.name() == "ready") {
      EXPECT_FALSE(facet.serving());
    }
    if (facet.name() == "live") {
      EXPECT_TRUE(facet.serving());
    }
  }
}

TEST_F(ServiceTest, a_port_that_is_taken_is_a_clean_error) {
  RunningNode first(folder_, "a");
  const absl::StatusOr<ParsedOptions> parsed =
      parse_options({"--name=b", "--node-runtime-dir=" + folder_, "--listen-grpc=" + first.address(), "--memory-bytes=96M",
                     "--memory-scratch-bytes=4M", "--transport-kind=none", "--pool=default:model=raw"},
                    {});
  const absl::StatusOr<NodePlan> plan =
      plan_node(parsed->options, {.available_bytes = available_memory_bytes(), .host_name = "test", .xdg_runtime_dir = folder_});
  ASSERT_TRUE(plan.ok()) << plan.status();
  SilentLog log;
  NoDescriptorStore store;
  const auto node = Node::start(*parsed, *plan, store, {}, log);
  ASSERT_FALSE(node.ok());
  EXPECT_THAT(std::string(node.status().message()), HasSubstr("another --instance"));
}

TEST_F(ServiceTest, a_node_starts_and_stops_cleanly_many_times) {
  for (int round = 0; round < 5; ++round) {
    RunningNode node(folder_, "a");
    Caller caller(node.local());
    caller.attach(node);
    ASSERT_TRUE(caller.store(7, 300).ok());
  }
}

TEST(WireConvert, peer_messages_survive_the_wire) {
  PeerMessage message;
  message.from_incarnation = Incarnation(5);
  message.to_incarnation = Incarnation(6);
  ShipOffer offer;
  offer.ticket = TicketId(9);
  offer.attempt = 3;
  offer.status = make_error(ErrorCode::kForfeited, "the writer gave up", 0);
  offer.lease = LeaseId(8);
  offer.first_page = 4;
  offer.pages = {{{PoolId(0), {PageIndex(7), Generation(2)}}, {1, 2}, 512, 0xFEDCBA9876543210u}};
  offer.partial = {{{PoolId(0), {PageIndex(8), Generation(1)}}, {}, 600, 5}};
  offer.window = {{{PoolId(1), {PageIndex(3), Generation(1)}}, {}, 600, 6}};
  offer.state = {{PoolId(2), {PageIndex(1), Generation(4)}}, {}, 600, 7};
  offer.complete = true;
  offer.tokens = 600;
  offer.chunks = {{PoolId(1), ChunkIndex(2), std::string("\0key", 4)}};
  message.body = offer;
  const auto back = wire::message_of(wire::envelope_of(message, "a"));
  ASSERT_TRUE(back.ok()) << back.status();
  const auto& read = std::get<ShipOffer>(back->body);
  EXPECT_EQ(read.pages[0].page, offer.pages[0].page);
  EXPECT_EQ(read.pages[0].checksum, offer.pages[0].checksum);
  EXPECT_EQ(read.state.page, offer.state.page);
  EXPECT_EQ(read.partial[0].tokens_end, 600);
  EXPECT_EQ(read.window.size(), 1u);
  EXPECT_EQ(read.chunks[0].descriptor, offer.chunks[0].descriptor);
  EXPECT_EQ(read.status, offer.status);
  EXPECT_TRUE(is_error(read.status, ErrorCode::kForfeited));
  EXPECT_EQ(back->to_incarnation, Incarnation(6));
}

TEST(WireConvert, an_empty_or_crooked_envelope_is_refused) {
  EXPECT_TRUE(is_error(wire::message_of(v1::PeerEnvelope()).status(), ErrorCode::kInvalid));
  v1::PeerEnvelope crooked;
  crooked.mutable_offer()->mutable_pages()->add_pool(1);
  EXPECT_TRUE(is_error(wire::message_of(crooked).status(), ErrorCode::kInvalid));
  v1::PeerEnvelope fat;
  fat.mutable_offer()->add_chunks()->set_registration(std::string(5000, 'x'));
  EXPECT_TRUE(is_error(wire::message_of(fat).status(), ErrorCode::kInvalid));
}

}  // namespace
}  // namespace needle::server
