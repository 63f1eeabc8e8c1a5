// The mailbox: many threads post, one handles; a full or stopped one refuses and nobody waits for ever.
#include <atomic>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "proto/errors.h"
#include "server/loop.h"

namespace needle::server {
namespace {

class ArrayMetadata final : public Metadata {
 public:
  explicit ArrayMetadata(int64_t size) : bytes_(static_cast<size_t>(size)) {}
  std::span<const std::byte> bytes() const override { return bytes_; }
  void put(int64_t offset, std::span<const std::byte> value) override { std::copy(value.begin(), value.end(), bytes_.begin() + offset); }

 private:
  std::vector<std::byte> bytes_;
};

class AllMemory final : public Memory {
 public:
  bool chunk_present(PoolId, ChunkIndex) const override { return true; }
  void allocate_chunk(PoolId, ChunkIndex, int64_t) override {}
  void free_chunk(PoolId, ChunkIndex) override {}
};

class NoTransport final : public Transport {
 public:
  const TransportTraits& traits() const override { return traits_; }
  void register_chunk(PoolId, ChunkIndex) override {}
  void release_chunk(PoolId, ChunkIndex) override {}
  void learn_peer(NodeId, Incarnation, const std::vector<ChunkDescriptor>&) override {}
  void post(FetchRequest) override {}
  void cancel(FetchId) override {}
  void close_peer(NodeId) override {}
  void poll(TransportEvents&) override {}

 private:
  TransportTraits traits_;
};

class NoOutbox final : public Outbox {
 public:
  void to_session(SessionId, SessionEvent) override {}
  void to_peer(NodeId, PeerMessage) override {}
};

class LoopTest : public ::testing::Test {
 protected:
  LoopTest() : metadata_(Core::metadata_bytes(options())) {
    auto core = Core::start(options(), {clock_, metadata_, memory_, transport_, outbox_, log_, 1});
    EXPECT_TRUE(core.ok()) << core.status();
    core_ = std::move(*core);
  }
  static CoreOptions options() {
    CoreOptions options;
    PoolSetOptions set;
    set.name = "a";
    set.format = "f";
    set.window_tokens = 0;
    set.shapes[0] = {8, 8, 512, 1};
    set.shapes[2] = {8, 0, 512, 1};
    set.budget_bytes = 1024;
    set.ratios = {1, 0, 1};
    options.node = NodeId(0);
    options.sessions_max = 8;
    options.sets.push_back(set);
    return options;
  }
  SteadyClock clock_;
  ArrayMetadata metadata_;
  AllMemory memory_;
  NoTransport transport_;
  NoOutbox outbox_;
  SilentLog log_;
  std::unique_ptr<Core> core_;
};

TEST_F(LoopTest, every_call_posted_from_many_threads_is_answered_once) {
  Loop loop(*core_, clock_);
  std::thread runner([&] { loop.run(); });
  std::atomic<int> answered{0};
  std::vector<std::thread> posters;
  for (int thread = 0; thread < 4; ++thread) {
    posters.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        (void)loop.post(Call<Status>{{}, [&](absl::StatusOr<Snapshot>) { answered.fetch_add(1); }});
      }
    });
  }
  for (std::thread& poster : posters) poster.join();
  while (answered.load() < 2'000) std::this_thread::yield();
  loop.stop();
  runner.join();
  EXPECT_EQ(answered.load(), 2'000);
}

TEST_F(LoopTest, a_full_mailbox_refuses_calls_with_busy_and_still_takes_events) {
  Loop loop(*core_, clock_, 2);
  int busy = 0;
  for (int i = 0; i < 5; ++i) {
    (void)loop.post(Call<Status>{{}, [&](absl::StatusOr<Snapshot> reply) { busy += is_error(reply.status(), ErrorCode::kBusy) ? 1 : 0; }});
  }
  EXPECT_EQ(busy, 3);
  EXPECT_TRUE(loop.post(ProcessDied{SessionId(1)}).ok());
  EXPECT_EQ(loop.step(16), 3);
}

TEST_F(LoopTest, an_attach_with_another_format_is_refused_with_both_printed) {
  Loop loop(*core_, clock_);
  Attach attach;
  attach.pool_set = "a";
  attach.format = "g";
  absl::Status status;
  (void)loop.post(Call<Attach>{attach, [&](absl::StatusOr<Attach::Reply> reply) { status = reply.status(); }});
  loop.step(1);
  EXPECT_TRUE(is_error(status, ErrorCode::kFormatMismatch));
  EXPECT_NE(std::string(status.message()).find("\n  f\n"), std::string::npos) << status;
  EXPECT_NE(std::string(status.message()).find("\n  g"), std::string::npos) << status;
}

}  // namespace
}  // namespace needle::server
