// The mailbox: many threads post, one handles; a full or stopped one refuses and nobody waits for ever.
#include <atomic>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "proto/errors.h"
#include "server/loop.h"
#include "tests/server/still_world.h"

namespace needle::server {
namespace {

class LoopTest : public ::testing::Test {
 protected:
  LoopTest() : world_(options()), core_(&world_.start()) {}
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
  StillWorld world_;
  Core* core_;
  SteadyClock clock_;
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

TEST_F(LoopTest, what_waits_when_the_loop_stops_is_answered_and_not_dropped) {
  Loop loop(*core_, clock_);
  int answered = 0;
  int refused = 0;
  for (int i = 0; i < 1'000; ++i) {  // more than one burst
    (void)loop.post(Call<Status>{{}, [&](absl::StatusOr<Snapshot> reply) {
                                   ++answered;
                                   refused += is_error(reply.status(), ErrorCode::kStopping) ? 1 : 0;
                                 }});
  }
  loop.stop();
  loop.run();
  EXPECT_EQ(answered, 1'000);
  EXPECT_GT(refused, 0);
}

TEST_F(LoopTest, a_flood_from_a_peer_is_dropped_at_the_bound_and_events_of_this_host_are_not) {
  Loop loop(*core_, clock_, 2);
  const PeerMessage message{NodeId(1), Incarnation(1), Incarnation(), ShipRelease{}};
  EXPECT_TRUE(loop.post(message).ok());
  EXPECT_TRUE(loop.post(message).ok());
  EXPECT_TRUE(is_error(loop.post(message), ErrorCode::kBusy));
  EXPECT_TRUE(loop.post(SessionLost{SessionId(1)}).ok());
  EXPECT_TRUE(loop.post(ChunkAllocated{PoolId(0), ChunkIndex(0), absl::OkStatus()}).ok());
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
