// What single messages do to a core, where the simulator's clients would never send them or its world never stands so.
#include <gtest/gtest.h>

#include "proto/errors.h"
#include "server/outcomes.h"
#include "tests/server/still_world.h"

namespace needle::server {
namespace {

constexpr int64_t kPageTokens = 8;

CoreOptions small_options() {
  CoreOptions options;
  PoolSetOptions set;
  set.name = "a";
  set.format = "f";
  set.window_tokens = 0;
  set.shapes[0] = {8, kPageTokens, 8 * 16, 4};
  set.shapes[2] = {8, 0, 8 * 16, 4};
  set.budget_bytes = 4 * 8 * 16;
  set.ratios = {1, 0, 1};
  options.node = NodeId(1);
  options.sessions_max = 3;
  options.sets.push_back(set);
  return options;
}

class CoreTest : public ::testing::Test {
 protected:
  CoreTest() : world_(small_options()) { world_.start(); }

  Attach attach_of(int64_t pid, SessionId previous = SessionId()) {
    Attach attach;
    attach.pool_set = "a";
    attach.format = "f";
    attach.process = {pid, pid * 10, 0, static_cast<uint64_t>(pid)};
    attach.previous = previous;
    return attach;
  }
  SessionId attached(int64_t pid) {
    const absl::StatusOr<Attach::Reply> reply = world_.call(attach_of(pid));
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.ok() ? reply->session : SessionId();
  }
  Reserve reserve_of(SessionId session, uint64_t ticket, std::vector<PageName> names = {}) {
    Reserve reserve;
    reserve.session = session;
    reserve.ticket = TicketId(ticket);
    reserve.sequence = SequenceId(1000 + ticket);
    reserve.tokens = std::max<int64_t>(1, static_cast<int64_t>(names.size())) * kPageTokens;
    reserve.names = std::move(names);
    return reserve;
  }
  // One named page, its resume point, and the sequence; all idle afterwards unless a lease is asked for.
  void store_with_resume_point(SessionId session, uint64_t id, LeaseId lease) {
    Reserve reserve = reserve_of(session, id, {{id, id}});
    reserve.resume_tokens_wanted = {kPageTokens};
    ASSERT_TRUE(world_.call(reserve).ok());
    ASSERT_TRUE(world_.call(Publish{session, TicketId(id), 1, kPageTokens}).ok());
    ASSERT_TRUE(world_.call(SealPages{session, TicketId(id), 2, {{{id, id}, 1}}}).ok());
    ASSERT_TRUE(world_.call(SealResumePoint{session, TicketId(id), kPageTokens, {}, 1}).ok());
    Seal seal;
    seal.session = session;
    seal.ticket = TicketId(id);
    seal.step = 3;
    seal.tokens = kPageTokens;
    ASSERT_TRUE(world_.call(seal).ok());
    if (!lease.is_none()) {
      ASSERT_TRUE(world_.call(Acquire{session, lease, SequenceId(), {{id, id}}}).ok());
    }
  }
  void expect_sound() { EXPECT_TRUE(world_.core->audit().ok()) << world_.core->audit(); }

  StillWorld world_;
};

// ---------------------------------------------------------------------------------------------------------------- sessions

TEST_F(CoreTest, clients_attach_again_after_a_restart_although_their_ghosts_take_every_place) {
  for (int64_t pid = 1; pid <= 3; ++pid) attached(pid);
  world_.start();
  EXPECT_TRUE(is_error(world_.call(attach_of(4)).status(), ErrorCode::kBusy));
  for (int64_t pid = 1; pid <= 3; ++pid) {
    const absl::StatusOr<Attach::Reply> again = world_.call(attach_of(pid));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->ended.size(), 1u);
  }
  EXPECT_TRUE(is_error(world_.call(attach_of(4)).status(), ErrorCode::kBusy));
  EXPECT_EQ(world_.core->snapshot().sessions.size(), 3u);
  expect_sound();
  world_.start();
  EXPECT_EQ(world_.core->snapshot().sessions.size(), 3u) << "each has a slot of its own in the metadata region";
}

TEST_F(CoreTest, pages_held_under_an_earlier_epoch_are_not_leased_again) {
  const SessionId session = attached(1);
  store_with_resume_point(session, 7, LeaseId(70));
  const absl::StatusOr<Acquire::Reply> leased = world_.call(Acquire{session, LeaseId(70), SequenceId(), {{7, 7}}});
  ASSERT_TRUE(leased.ok());
  Attach again = attach_of(1, session);
  again.held = {{pool_id(PoolSetId(0), PoolKind::kPaged), leased->table.paged[0]}};
  again.held_lease = LeaseId(71);
  again.held_epoch = Epoch(12345);
  const absl::StatusOr<Attach::Reply> reply = world_.call(again);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->held.empty());
  expect_sound();
}

// ----------------------------------------------------------------------------------------------------------------- restart

TEST_F(CoreTest, a_kill_inside_the_write_of_the_header_keeps_what_living_processes_may_touch) {
  const SessionId session = attached(1);
  ASSERT_TRUE(world_.call(reserve_of(session, 7)).ok());
  // The next start writes the header anew and is killed after its fourth word: the fifth is still the old one.
  world_.core.reset();
  uint64_t word;
  std::memcpy(&word, &world_.metadata.raw(24), sizeof(word));
  word ^= 0x5A5A;
  std::memcpy(&world_.metadata.raw(24), &word, sizeof(word));
  world_.start();
  const Snapshot found = world_.core->snapshot();
  EXPECT_EQ(found.sessions.size(), 1u) << "the process that was attached may still write";
  EXPECT_EQ(found.sets[0].pools[0].draining, 1) << "its page is not anybody else's before it dies or attaches anew";
  expect_sound();
}

TEST_F(CoreTest, chunks_whose_records_are_not_understood_are_given_up_and_not_handed_out) {
  const SessionId session = attached(1);
  ASSERT_TRUE(world_.call(reserve_of(session, 7)).ok());
  const std::set<std::pair<PoolId, ChunkIndex>> before = world_.memory.present;
  ASSERT_FALSE(before.empty());
  world_.options.sets[0].format = "another";  // of the same sizes: the region and the chunks survive, their meaning does not
  world_.start();
  EXPECT_EQ(world_.memory.freed.size(), before.size()) << "whoever maps them keeps them; nobody gets them";
  EXPECT_EQ(world_.core->snapshot().sets[0].pools[0].free, 32);
  expect_sound();
}

// ----------------------------------------------------------------------------------------------------------------- silence

constexpr int64_t kSecond = 1'000'000'000;

TEST_F(CoreTest, time_in_which_the_daemon_did_not_run_is_nobodys_silence) {
  const SessionId session = attached(1);
  const ShipStart start{session, TicketId(5), SequenceId(9), NodeId(2), LeaseId(6), 0};
  ASSERT_TRUE(world_.call(start).ok());
  world_.clock.now += 10 * kSecond;  // stopped, and going on again: what client and source said meanwhile is not read yet
  world_.core->handle(Tick{});
  EXPECT_TRUE(world_.call(Heartbeat{session}).ok());
  EXPECT_TRUE(world_.call(ShipProgress{session, TicketId(5)}).ok()) << "its source may have answered";
  expect_sound();
}

TEST_F(CoreTest, a_client_and_a_source_silent_while_the_daemon_runs_are_found) {
  const SessionId session = attached(1);
  const ShipStart start{session, TicketId(5), SequenceId(9), NodeId(2), LeaseId(6), 0};
  ASSERT_TRUE(world_.call(start).ok());
  for (const int64_t end = world_.clock.now + 2 * kSecond; world_.clock.now < end; world_.clock.now += kSecond / 50) {
    EXPECT_FALSE(world_.core->snapshot().sessions[0].silent);
    world_.core->handle(Tick{});
  }
  world_.core->handle(Tick{});
  EXPECT_TRUE(world_.core->snapshot().sessions[0].silent);
  EXPECT_EQ(world_.core->snapshot().ships_open, 0);
  expect_sound();
}

// ---------------------------------------------------------------------------------------------------------------- outcomes

TEST_F(CoreTest, waiting_for_a_ship_that_was_never_one_says_so) {
  const SessionId session = attached(1);
  ASSERT_TRUE(world_.call(Forfeit{session, TicketId(5), true}).ok());  // spent before it was granted
  EXPECT_TRUE(is_error(world_.call(ShipWait{session, TicketId(5)}).status(), ErrorCode::kConsumed));
}

TEST_F(CoreTest, one_ticket_id_is_one_ticket_whatever_the_verb) {
  const SessionId session = attached(1);
  ShipStart start{session, TicketId(5), SequenceId(9), NodeId(2), LeaseId(6), 0};
  ASSERT_TRUE(world_.call(start).ok());
  EXPECT_TRUE(is_error(world_.call(reserve_of(session, 5)).status(), ErrorCode::kConflict));
  EXPECT_TRUE(is_error(world_.call(Forfeit{session, TicketId(5), true}).status(), ErrorCode::kConflict));
  ASSERT_TRUE(world_.call(reserve_of(session, 6)).ok());
  start.ticket = TicketId(6);
  start.lease = LeaseId(8);
  EXPECT_TRUE(is_error(world_.call(start).status(), ErrorCode::kConflict));
  EXPECT_TRUE(is_error(world_.call(ShipCancel{session, TicketId(6)}).status(), ErrorCode::kConflict));
  EXPECT_TRUE(world_.call(ShipCancel{session, TicketId(5)}).ok());
  EXPECT_TRUE(is_error(world_.call(ShipWait{session, TicketId(5)}).status(), ErrorCode::kCancelled));
  expect_sound();
}

TEST(Outcomes, a_sequence_that_is_forgotten_and_forfeited_again_is_remembered_from_then_on) {
  Probes probes;
  Outcomes outcomes(/*remembered_ns=*/100, /*outcomes_max=*/10, probes);
  const OutcomeKey key{SessionId(), 7, OutcomeKey::kSequence};
  outcomes.remember(key, {}, 0);
  outcomes.erase_sequence(SequenceId(7));  // written anew
  outcomes.remember(key, {}, 90);          // and given up again
  outcomes.expire(100);
  EXPECT_NE(outcomes.find(key), nullptr);
  outcomes.expire(190);
  EXPECT_EQ(outcomes.find(key), nullptr);
}

// ------------------------------------------------------------------------------------------------------- budgets and quotas

TEST_F(CoreTest, resume_points_return_to_their_quota_once_they_are_idle) {
  const SessionId ghost = attached(1);
  for (uint64_t id = 1; id <= 5; ++id) store_with_resume_point(ghost, id, LeaseId());
  world_.options.sets[0].resume_points_max = 2;
  world_.start();
  EXPECT_EQ(world_.core->snapshot().sets[0].resume_points, 5) << "a process of before the restart may still read them";
  world_.core->handle(ProcessDied{ghost});
  store_with_resume_point(attached(2), 6, LeaseId());
  EXPECT_EQ(world_.core->snapshot().sets[0].resume_points, 2);
  expect_sound();
}

TEST_F(CoreTest, a_budget_beyond_the_address_range_is_impossible_and_says_what_is_possible) {
  Resize resize;
  resize.set = PoolSetId(0);
  resize.revision = 1;
  resize.budget_bytes = 9 * 8 * 16;
  resize.ratios = {1, 0, 1};
  const absl::Status refused = world_.call(resize).status();
  EXPECT_TRUE(is_error(refused, ErrorCode::kImpossible)) << refused;
  EXPECT_NE(std::string(refused.message()).find("1024"), std::string::npos) << refused;
  resize.budget_bytes = 8 * 8 * 16;
  EXPECT_TRUE(world_.call(resize).ok());
}

TEST_F(CoreTest, what_a_ticket_made_is_forgotten_by_its_own_session_while_its_lease_holds_and_by_no_other) {
  const SessionId session = attached(1);
  const SessionId other = attached(2);
  Reserve reserve = reserve_of(session, 5);
  reserve.tokens = kPageTokens - 1;  // no full page: nothing of it has a name
  ASSERT_TRUE(world_.call(reserve).ok());
  EXPECT_TRUE(is_error(world_.call(Forget{session, TicketId(5)}).status(), ErrorCode::kStale)) << "it made nothing yet";
  Seal seal;
  seal.session = session;
  seal.ticket = TicketId(5);
  seal.step = 1;
  seal.tokens = kPageTokens - 1;
  seal.lease = LeaseId(6);
  ASSERT_TRUE(world_.call(seal).ok());
  EXPECT_TRUE(is_error(world_.call(Forget{other, TicketId(5)}).status(), ErrorCode::kStale));
  EXPECT_TRUE(world_.call(Acquire{other, LeaseId(9), SequenceId(1005), {}}).ok());
  EXPECT_TRUE(world_.call(Forget{session, TicketId(5)}).ok());
  EXPECT_TRUE(world_.call(Forget{session, TicketId(5)}).ok()) << "a repeat is fine";
  EXPECT_TRUE(is_error(world_.call(Acquire{other, LeaseId(10), SequenceId(1005), {}}).status(), ErrorCode::kNotFound));
  EXPECT_TRUE(world_.call(Release{other, LeaseId(9)}).ok()) << "a lease outlives it";
  EXPECT_TRUE(world_.call(Release{session, LeaseId(6)}).ok());
  EXPECT_TRUE(is_error(world_.call(Forget{session, TicketId(5)}).status(), ErrorCode::kStale))
      << "after the release nothing says which it was";
  const Snapshot after = world_.core->snapshot();
  EXPECT_EQ(after.sets[0].sequences, 0);
  EXPECT_EQ(after.sets[0].pools[0].free, after.sets[0].pools[0].capacity);
}

}  // namespace
}  // namespace needle::server
