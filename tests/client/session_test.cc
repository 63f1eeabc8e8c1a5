// The client library against a scripted daemon: what it says when answers get lost and when the daemon comes back.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "client/client.h"
#include "kernels/format_set.h"
#include "proto/errors.h"
#include "proto/needle.grpc.pb.h"
#include "server/attach/attach_server.h"
#include "server/memory/descriptor_passing.h"

namespace needle::client {
namespace {

using server::Attach;
using server::Call;
using server::Message;
using server::Nothing;

// What is open at the daemon, as one line each: "ticket 7".
class Rights {
 public:
  void open(const std::string& right) {
    std::lock_guard<std::mutex> hold(mutex_);
    open_.insert(right);
  }
  void end(const std::string& right) {
    std::lock_guard<std::mutex> hold(mutex_);
    open_.erase(right);
    ended_.insert(right);
    wake_.notify_all();
  }
  bool none_is_open() {  // now, or within ten seconds
    std::unique_lock<std::mutex> hold(mutex_);
    return wake_.wait_for(hold, std::chrono::seconds(10), [this] { return open_.empty(); });
  }
  std::set<std::string> open_now() {
    std::lock_guard<std::mutex> hold(mutex_);
    return open_;
  }
  size_t ended() {
    std::lock_guard<std::mutex> hold(mutex_);
    return ended_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::set<std::string> open_;
  std::set<std::string> ended_;
};

// Carries out what it is asked, and then loses the answer where it was told to.
class LossyService final : public v1::Needle::Service {
 public:
  explicit LossyService(Rights& rights) : rights_(rights) {}

  grpc::Status Reserve(grpc::ServerContext*, const v1::ReserveRequest* request, v1::ReserveReply*) override {
    return grant("ticket " + std::to_string(request->ticket()));
  }
  grpc::Status Acquire(grpc::ServerContext*, const v1::AcquireRequest* request, v1::AcquireReply*) override {
    return grant("lease " + std::to_string(request->lease()));
  }
  grpc::Status ShipStart(grpc::ServerContext*, const v1::ShipStartRequest* request, v1::Empty*) override {
    rights_.open("lease " + std::to_string(request->lease()));  // as if it had been sealed at once
    return grant("ship " + std::to_string(request->ticket()));
  }
  grpc::Status Forfeit(grpc::ServerContext*, const v1::ForfeitRequest* request, v1::Empty*) override {
    return end("ticket " + std::to_string(request->ticket()));
  }
  grpc::Status Release(grpc::ServerContext*, const v1::LeaseRequest* request, v1::Empty*) override {
    return end("lease " + std::to_string(request->lease()));
  }
  grpc::Status ShipCancel(grpc::ServerContext*, const v1::TicketRequest* request, v1::Empty*) override {
    return end("ship " + std::to_string(request->ticket()));
  }

  std::atomic<bool> loses_grants{false};
  std::atomic<int> endings_to_lose{0};

 private:
  grpc::Status grant(const std::string& right) {
    rights_.open(right);
    return loses_grants ? lost() : grpc::Status::OK;
  }
  grpc::Status end(const std::string& right) {
    if (endings_to_lose.fetch_sub(1) > 0) return lost();
    rights_.end(right);
    return grpc::Status::OK;
  }
  static grpc::Status lost() { return {grpc::StatusCode::UNKNOWN, "the connection was torn before the answer came"}; }

  Rights& rights_;
};

class SessionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/needle-client-XXXXXX";
    folder_ = ::mkdtemp(name);
    metadata_ = server::FileDescriptor(::memfd_create("metadata", MFD_CLOEXEC));
    ASSERT_EQ(::ftruncate(metadata_.get(), 4096), 0);
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + folder_ + "/grpc.sock", grpc::InsecureServerCredentials());
    builder.RegisterService(&service_);
    grpc_ = builder.BuildAndStart();
    start();
  }
  void TearDown() override {
    attach_.reset();
    grpc_->Shutdown();
    (void)!::system(("rm -rf " + folder_).c_str());
  }
  void start() {
    attach_.reset();
    server::AttachOptions options;
    options.path = folder_ + "/attach.sock";
    options.grpc_target = "unix:" + folder_ + "/grpc.sock";
    server::AttachPoolSet set{"default", format_set_text(*preset_formats("raw", {})), {}, {}, {false, false, false}};
    server::AttachServer::Sources sources{[](PoolId, ChunkIndex) { return nullptr; }, metadata_.get(), 4096};
    auto made = server::AttachServer::start(
        std::move(options), {set}, sources, registry_, [this](Message message) { return post(std::move(message)); }, log_);
    ASSERT_TRUE(made.ok()) << made.status();
    attach_ = *std::move(made);
  }
  absl::Status post(Message message) {
    if (auto* attach = std::get_if<Call<Attach>>(&message)) {
      std::unique_lock<std::mutex> hold(mutex_);
      attaches_.push_back(attach->request);
      launch_was_open_ = launch_was_open_ || launch_is_open_;
      Attach::Reply reply;
      reply.session = SessionId(attaches_.size());
      reply.incarnation = Incarnation(1);
      reply.heartbeat_ms = 5;
      for (uint32_t kind = 0; kind < server::kPoolKinds; ++kind) {
        reply.pools[kind].pool = PoolId(kind);
        reply.pools[kind].epoch = Epoch(7);
      }
      hold.unlock();
      std::move(attach->done)(std::move(reply));
      wake_.notify_all();
    } else if (auto* beat = std::get_if<Call<server::Heartbeat>>(&message)) {
      std::move(beat->done)(Nothing{});
    } else if (auto* detach = std::get_if<Call<server::Detach>>(&message)) {
      std::move(detach->done)(Nothing{});
    }
    return absl::OkStatus();
  }
  bool attached_times(size_t times) {
    std::unique_lock<std::mutex> hold(mutex_);
    return wake_.wait_for(hold, std::chrono::seconds(10), [&] { return attaches_.size() >= times; });
  }
  std::unique_ptr<Client> client() {
    AttachOptions options;
    options.socket = folder_ + "/attach.sock";
    options.writable = true;
    absl::StatusOr<std::unique_ptr<Client>> made = Client::attach(options);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }

  std::string folder_;
  server::FileDescriptor metadata_;
  SilentLog log_;
  server::SessionRegistry registry_;
  Rights rights_;
  LossyService service_{rights_};
  std::unique_ptr<grpc::Server> grpc_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Attach> attaches_;
  std::atomic<bool> launch_is_open_{false};
  bool launch_was_open_ = false;
  std::unique_ptr<server::AttachServer> attach_;
};

TEST_F(SessionTest, a_right_whose_grant_was_never_heard_of_is_given_back) {
  const std::unique_ptr<Client> engine = client();
  service_.loses_grants = true;
  EXPECT_FALSE(engine->reserve(SequenceId(1), 256, {}).ok());
  EXPECT_EQ(rights_.open_now(), std::set<std::string>());
  EXPECT_FALSE(engine->acquire(SequenceId(1)).ok());
  EXPECT_EQ(rights_.open_now(), std::set<std::string>());
  EXPECT_FALSE(engine->ship("peer", SequenceId(1), 1'000).ok());
  EXPECT_EQ(rights_.open_now(), std::set<std::string>());
  EXPECT_EQ(rights_.ended(), 4u) << "a ticket, a lease, and a ship with its lease";
}

TEST_F(SessionTest, a_client_that_is_refused_before_it_was_heard_reads_why) {
  const server::FileDescriptor door = *server::listen_seqpacket(folder_ + "/refusing.sock");
  std::thread refuser([&] {
    const auto readable = [](int fd) {
      pollfd wait{fd, POLLIN, 0};
      ASSERT_EQ(::poll(&wait, 1, 10'000), 1);
    };
    readable(door.get());
    const server::FileDescriptor client(::accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC));
    readable(client.get());  // Hello is here, and stays unread
    const std::string words = "user 7 may not attach";
    attach::Answer answer;
    answer.status = static_cast<uint32_t>(absl::StatusCode::kPermissionDenied);
    answer.error = static_cast<uint32_t>(ErrorCode::kWrongOwner);
    answer.message_bytes = static_cast<uint32_t>(words.size());
    attach::Header header;
    header.type = attach::Type::kAnswer;
    header.body_bytes = static_cast<uint32_t>(sizeof answer + words.size());
    const std::string bytes = std::string(reinterpret_cast<const char*>(&header), sizeof header) +
                              std::string(reinterpret_cast<const char*>(&answer), sizeof answer) + words;
    server::send_datagram(client.get(), std::as_bytes(std::span(bytes)), {});
  });
  AttachOptions options;
  options.socket = folder_ + "/refusing.sock";
  const absl::Status refused = Client::attach(options).status();
  refuser.join();
  EXPECT_TRUE(is_error(refused, ErrorCode::kWrongOwner)) << refused;
}

TEST_F(SessionTest, the_daemon_sees_what_the_engine_counts) {
  const std::unique_ptr<Client> engine = client();
  OpReport report{};
  report.skipped_rows = 2;
  engine->count_store(5, report);
  engine->count_store(7, OpReport{});
  const server::ReadTotals totals = registry_.read_totals();
  EXPECT_EQ(totals.stores, 2u);
  EXPECT_EQ(totals.rows_stored, 10u);
  EXPECT_EQ(totals.rows_skipped, 2u);
}

TEST_F(SessionTest, a_growing_context_takes_few_rope_tables_and_the_old_ones_stay_good) {
  const std::unique_ptr<Client> engine = client();
  const RopeParameters parameters{10'000, 0, 0, 0, 0};
  std::map<const float*, int64_t> tables;
  float first_cosine = 0;
  for (int64_t positions = 1; positions <= 20'000; positions += 100) {
    const absl::StatusOr<RopeTableView> table = engine->rope_table(parameters, positions);
    ASSERT_TRUE(table.ok()) << table.status();
    EXPECT_GE(table->positions, positions);
    tables[table->cos_sin] = table->positions;
    first_cosine = tables.begin()->first[kRopeDims];
    EXPECT_EQ(table->cos_sin[kRopeDims], first_cosine) << "position 1";
  }
  EXPECT_EQ(tables.size(), 4u) << "4,096 to 32,768 positions";
  EXPECT_FALSE(engine->rope_table(parameters, 0).ok());
  EXPECT_FALSE(engine->rope_table(parameters, kRopePositionsMax + 1).ok());
}

TEST_F(SessionTest, an_ending_that_is_not_answered_is_repeated_until_it_is) {
  const std::unique_ptr<Client> engine = client();
  absl::StatusOr<Ticket> ticket = engine->reserve(SequenceId(1), 256, {});
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  absl::StatusOr<Lease> lease = engine->acquire(SequenceId(1));
  ASSERT_TRUE(lease.ok()) << lease.status();
  service_.endings_to_lose = 5;
  EXPECT_FALSE(ticket->forfeit().ok());
  EXPECT_FALSE(lease->release().ok());
  EXPECT_TRUE(rights_.none_is_open());
}

TEST_F(SessionTest, a_client_is_one_instance_however_often_it_attaches) {
  const std::unique_ptr<Client> engine = client();
  start();  // the daemon restarts
  ASSERT_TRUE(attached_times(2));
  const std::unique_ptr<Client> other = client();
  std::lock_guard<std::mutex> hold(mutex_);
  EXPECT_NE(attaches_[0].process.instance, 0u);
  EXPECT_EQ(attaches_[1].process.instance, attaches_[0].process.instance);
  EXPECT_EQ(attaches_[1].previous, SessionId(1));
  EXPECT_NE(attaches_[2].process.instance, attaches_[0].process.instance);
}

TEST_F(SessionTest, what_is_held_over_a_restart_names_its_epoch) {
  const std::unique_ptr<Client> engine = client();
  absl::StatusOr<Lease> lease = engine->acquire(SequenceId(1));
  ASSERT_TRUE(lease.ok()) << lease.status();
  start();
  ASSERT_TRUE(attached_times(2));
  std::lock_guard<std::mutex> hold(mutex_);
  EXPECT_EQ(attaches_[0].held_epoch, Epoch());
  EXPECT_EQ(attaches_[1].held_epoch, Epoch(7));
  EXPECT_FALSE(attaches_[1].held.empty());
}

TEST_F(SessionTest, a_client_attaches_again_only_when_its_launches_have_ended) {
  const std::unique_ptr<Client> engine = client();
  {
    absl::StatusOr<Launch> launch = engine->launch();
    ASSERT_TRUE(launch.ok()) << launch.status();
    launch_is_open_ = true;
    start();
    while (attach_->connections() == 0) std::this_thread::yield();  // it is back, and would like to attach
    launch_is_open_ = false;                                        // by the kernel's fence, an instant before the bracket closes
  }
  ASSERT_TRUE(attached_times(2));
  std::lock_guard<std::mutex> hold(mutex_);
  EXPECT_FALSE(launch_was_open_) << "what it had in flight could have landed in somebody else's page";
}

}  // namespace
}  // namespace needle::client
