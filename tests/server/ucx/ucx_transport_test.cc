// Two transports in one process, and one against a peer that lies.
#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "tests/server/ucx/fake_peer.h"
#include "tests/server/ucx/ucx_node.h"

namespace needle::server::ucx::testing {
namespace {

struct Fabric {
  const char* name;
  const char* transports;
  const char* call;
  int64_t message_bytes_max;
};

class UcxShip : public ::testing::TestWithParam<Fabric> {
 protected:
  NodeSettings settings(uint32_t node) const {
    NodeSettings made;
    made.node = node;
    made.transports = GetParam().transports;
    made.call = GetParam().call;
    made.message_bytes_max = GetParam().message_bytes_max;
    return made;
  }
};

INSTANTIATE_TEST_SUITE_P(Calls, UcxShip,
                         ::testing::Values(Fabric{"tcp_auto", "tcp", "auto", 0}, Fabric{"tcp_rendezvous", "tcp", "am-rendezvous", 0},
                                           Fabric{"tcp_eager", "tcp", "am-eager", 0},
                                           Fabric{"tcp_eager_in_parts", "tcp", "am-eager", 10'000}, Fabric{"tcp_get", "tcp", "get", 0},
                                           Fabric{"shared_memory_auto", "tcp,posix,sysv", "auto", 0},
                                           Fabric{"shared_memory_rendezvous", "tcp,posix,sysv", "am-rendezvous", 0},
                                           Fabric{"shared_memory_get", "tcp,posix,sysv", "get", 0}),
                         [](const auto& fabric) { return fabric.param.name; });

TEST_P(UcxShip, pages_arrive_bit_for_bit_with_their_checksums) {
  UcxNode source(settings(1));
  UcxNode reader(settings(2));
  source.fill(7);
  reader.register_chunks();
  reader.meet(source, source.register_chunks());
  // Two requests whose targets lie across both chunks, in another order than their sources.
  reader.transport().post(reader.request(fetch_id(5, 1, 0), source.id(), source.incarnation(), 0, 40, 60));
  reader.transport().post(reader.request(fetch_id(5, 1, 1), source.id(), source.incarnation(), 100, 20, 0));
  for (const auto& [part, first, count, target] : {std::tuple{0u, 0, 40, 60}, std::tuple{1u, 100, 20, 0}}) {
    const FetchCompletion& done = reader.wait_answer(fetch_id(5, 1, part));
    ASSERT_TRUE(done.status.ok()) << done.status;
    ASSERT_EQ(done.checksums.size(), static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      ASSERT_TRUE(reader.holds(target + i, 7, first + i)) << "part " << part << " page " << i;
      EXPECT_EQ(done.checksums[static_cast<size_t>(i)], checksum_of(source.page(first + i)));
    }
  }
  EXPECT_EQ(reader.counters().pages_arrived, 60);
  EXPECT_EQ(reader.counters().pages_dropped, 0);
  EXPECT_EQ(reader.counters().bytes_in_flight_now, 0);
}

TEST_P(UcxShip, full_size_pages_arrive) {
  NodeSettings large = settings(1);
  large.page_bytes = 1'165'824;
  large.pages_a_chunk = 4;
  large.bytes_in_flight_max = 1;  // less than a page: one at a time
  UcxNode source(large);
  large.node = 2;
  UcxNode reader(large);
  source.fill(3);
  reader.register_chunks();
  reader.meet(source, source.register_chunks());
  reader.transport().post(reader.request(fetch_id(9), source.id(), source.incarnation(), 0, 8, 0));
  const FetchCompletion& done = reader.wait_answer(fetch_id(9));
  ASSERT_TRUE(done.status.ok()) << done.status;
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(reader.holds(i, 3, i)) << i;
}

TEST_P(UcxShip, two_ships_at_once_keep_bytes_in_flight_bounded) {
  NodeSettings bounded = settings(2);
  bounded.bytes_in_flight_max = 3 * bounded.page_bytes;
  std::atomic<int64_t> most{0};
  std::atomic<UcxNode*> looked_at{nullptr};
  UcxNode source(settings(1));
  UcxNode reader(bounded, [&](PoolId, std::span<const std::byte> page) {
    UcxNode* node = looked_at.load();
    if (node != nullptr) most.store(std::max(most.load(), node->counters().bytes_in_flight_now.load()));
    return checksum_of(page);
  });
  looked_at = &reader;
  source.fill(1);
  reader.register_chunks();
  reader.meet(source, source.register_chunks());
  for (uint64_t ticket : {11, 12}) {
    const int64_t at = ticket == 11 ? 0 : 64;
    reader.transport().post(reader.request(fetch_id(ticket), source.id(), source.incarnation(), at, 60, at));
  }
  for (uint64_t ticket : {11, 12}) {
    EXPECT_TRUE(reader.wait_answer(fetch_id(ticket)).status.ok());
    const int64_t at = ticket == 11 ? 0 : 64;
    for (int64_t i = 0; i < 60; ++i) EXPECT_TRUE(reader.holds(at + i, 1, at + i));
  }
  EXPECT_GT(most, 0);
  EXPECT_LE(most, bounded.bytes_in_flight_max);
  looked_at = nullptr;
}

TEST_P(UcxShip, a_cancelled_request_is_answered_once_and_the_next_one_works) {
  UcxNode source(settings(1));
  UcxNode reader(settings(2));
  source.fill(7);
  reader.register_chunks();
  reader.meet(source, source.register_chunks());
  reader.transport().post(reader.request(fetch_id(5), source.id(), source.incarnation(), 0, 64, 0));
  reader.transport().cancel(fetch_id(5));
  const FetchCompletion& cancelled = reader.wait_answer(fetch_id(5));
  EXPECT_TRUE(is_error(cancelled.status, ErrorCode::kCancelled)) << cancelled.status;
  EXPECT_TRUE(cancelled.checksums.empty());
  reader.transport().post(reader.request(fetch_id(5, 2), source.id(), source.incarnation(), 64, 64, 0));
  EXPECT_TRUE(reader.wait_answer(fetch_id(5, 2)).status.ok());
  for (int i = 0; i < 64; ++i) EXPECT_TRUE(reader.holds(i, 7, 64 + i)) << "page " << i << " holds what the first attempt brought";
  EXPECT_EQ(reader.fetched[fetch_id(5)].size(), 1u);
  EXPECT_TRUE(reader.wait_for([&] { return source.counters().pages_queued_now == 0 && source.counters().sends_now == 0; }));
}

TEST_P(UcxShip, closing_the_peer_ends_every_request_and_a_new_attempt_takes_a_new_endpoint) {
  UcxNode source(settings(1));
  UcxNode reader(settings(2));
  source.fill(7);
  reader.register_chunks();
  reader.meet(source, source.register_chunks());
  for (uint32_t part = 0; part < 4; ++part) {
    reader.transport().post(reader.request(fetch_id(5, 1, part), source.id(), source.incarnation(), part * 32, 32, part * 32));
  }
  reader.transport().close_peer(source.id());
  for (uint32_t part = 0; part < 4; ++part) {
    const FetchCompletion& done = reader.wait_answer(fetch_id(5, 1, part));
    EXPECT_TRUE(is_error(done.status, ErrorCode::kPeerLost)) << done.status;
  }
  reader.transport().post(reader.request(fetch_id(5, 2), source.id(), source.incarnation(), 64, 64, 0));
  EXPECT_TRUE(reader.wait_answer(fetch_id(5, 2)).status.ok());
  for (int i = 0; i < 64; ++i) EXPECT_TRUE(reader.holds(i, 7, 64 + i));
  EXPECT_TRUE(reader.wait_for([&] { return source.counters().source_links_now == 1; }));
}

TEST_P(UcxShip, a_byte_that_flips_on_its_way_shows_in_the_checksum) {
  UcxNode source(settings(1));
  std::atomic<int> landed{0};
  UcxNode reader(settings(2), [&](PoolId, std::span<const std::byte> page) {
    // The wire's fault, made where the page lands and before anyone looks at it.
    if (landed.fetch_add(1) == 2) const_cast<std::byte&>(page[page.size() / 2]) ^= std::byte{0x10};
    return checksum_of(page);
  });
  source.fill(7);
  reader.register_chunks();
  reader.meet(source, source.register_chunks());
  reader.transport().post(reader.request(fetch_id(5), source.id(), source.incarnation(), 0, 8, 0));
  const FetchCompletion& done = reader.wait_answer(fetch_id(5));
  ASSERT_TRUE(done.status.ok()) << done.status;
  int different = 0;
  for (int i = 0; i < 8; ++i) different += done.checksums[static_cast<size_t>(i)] != checksum_of(source.page(i));
  EXPECT_EQ(different, 1);
}

TEST_P(UcxShip, stopping_answers_what_is_under_way) {
  UcxNode source(settings(1));
  UcxNode reader(settings(2));
  reader.register_chunks();
  reader.meet(source, source.register_chunks());
  for (uint32_t part = 0; part < 3; ++part) {
    reader.transport().post(reader.request(fetch_id(5, 1, part), source.id(), source.incarnation(), 0, 64, 0));
  }
  reader.transport().stop();
  reader.transport().post(reader.request(fetch_id(5, 1, 3), source.id(), source.incarnation(), 0, 1, 0));
  for (uint32_t part = 0; part < 4; ++part) {
    const FetchCompletion& done = reader.wait_answer(fetch_id(5, 1, part));
    EXPECT_TRUE(done.status.ok() || is_error(done.status, ErrorCode::kStopping)) << done.status;
    EXPECT_EQ(reader.fetched[fetch_id(5, 1, part)].size(), 1u);
  }
}

TEST_P(UcxShip, both_daemons_read_from_each_other_at_once) {
  UcxNode left(settings(1));
  UcxNode right(settings(2));
  left.fill(1);
  right.fill(2);
  const auto of_left = left.register_chunks();
  const auto of_right = right.register_chunks();
  left.meet(right, of_right);
  right.meet(left, of_left);
  left.transport().post(left.request(fetch_id(1), right.id(), right.incarnation(), 0, 60, 64));
  right.transport().post(right.request(fetch_id(1), left.id(), left.incarnation(), 0, 60, 64));
  EXPECT_TRUE(left.wait_answer(fetch_id(1)).status.ok());
  EXPECT_TRUE(right.wait_answer(fetch_id(1)).status.ok());
  for (int i = 0; i < 60; ++i) {
    EXPECT_TRUE(left.holds(64 + i, 2, i));
    EXPECT_TRUE(right.holds(64 + i, 1, i));
  }
}

// ------------------------------------------------------------------------------------------------- what is asked wrongly

TEST(UcxTransport, refuses_what_cannot_be_fetched_and_says_why) {
  NodeSettings settings;
  UcxNode source(settings);
  settings.node = 2;
  UcxNode reader(settings);
  const auto chunks = source.register_chunks();

  reader.transport().post(reader.request(fetch_id(1), NodeId(77), Incarnation(1), 0, 1, 0));
  EXPECT_TRUE(is_error(reader.wait_answer(fetch_id(1)).status, ErrorCode::kNotFound)) << "an unknown peer";

  reader.meet(source, chunks);
  reader.transport().post(reader.request(fetch_id(2), source.id(), source.incarnation(), 0, 1, 0));
  EXPECT_TRUE(is_error(reader.wait_answer(fetch_id(2)).status, ErrorCode::kInvalid)) << "an unregistered target";

  reader.register_chunks();
  reader.transport().post(reader.request(fetch_id(3), source.id(), Incarnation(99), 0, 1, 0));
  EXPECT_TRUE(is_error(reader.wait_answer(fetch_id(3)).status, ErrorCode::kStale)) << "another incarnation";

  reader.transport().post(reader.request(fetch_id(4), source.id(), source.incarnation(), 1'000, 1, 0));
  EXPECT_TRUE(is_error(reader.wait_answer(fetch_id(4)).status, ErrorCode::kStale)) << "a page outside the source's chunks";
  EXPECT_EQ(source.counters().pages_refused, 1);

  EXPECT_TRUE(is_error(reader.transport().meet_peer(NodeId(3), Incarnation(1), "nonsense"), ErrorCode::kInvalid));
  reader.transport().post(reader.request(fetch_id(5), source.id(), source.incarnation(), 3, 1, 0));
  EXPECT_TRUE(reader.wait_answer(fetch_id(5)).status.ok()) << "the link outlives a refusal";
}

TEST(UcxTransport, refuses_a_chunk_that_it_was_not_started_with) {
  UcxNode node{NodeSettings{}};
  node.transport().register_chunk(PoolId(0), ChunkIndex(99));
  node.transport().register_chunk(PoolId(9), ChunkIndex(0));
  ASSERT_TRUE(node.wait_for([&] { return node.registered.size() == 2; }));
  for (const RegisterCompletion& done : node.registered) EXPECT_TRUE(is_error(done.status, ErrorCode::kInvalid));
}

TEST(UcxTransport, registering_twice_answers_twice_with_one_registration) {
  UcxNode node{NodeSettings{}};
  const auto once = node.register_chunks();
  const auto again = node.register_chunks();
  EXPECT_EQ(once[0].descriptor, again[0].descriptor);
}

TEST(UcxTransport, a_released_chunk_is_answered_and_gives_no_page_any_more) {
  NodeSettings settings;
  UcxNode source(settings);
  settings.node = 2;
  UcxNode reader(settings);
  reader.register_chunks();
  reader.meet(source, source.register_chunks());
  source.transport().release_chunk(PoolId(0), ChunkIndex(1));
  source.transport().release_chunk(PoolId(0), ChunkIndex(55));  // never was: answered all the same
  ASSERT_TRUE(source.wait_for([&] { return source.released.size() == 2; }));
  reader.transport().post(reader.request(fetch_id(1), source.id(), source.incarnation(), 64, 1, 0));
  EXPECT_TRUE(is_error(reader.wait_answer(fetch_id(1)).status, ErrorCode::kStale));
  reader.transport().post(reader.request(fetch_id(2), source.id(), source.incarnation(), 63, 1, 0));
  EXPECT_TRUE(reader.wait_answer(fetch_id(2)).status.ok());
  source.transport().register_chunk(PoolId(0), ChunkIndex(1));
  ASSERT_TRUE(source.wait_for([&] { return source.registered.size() == 1; }));
  reader.transport().post(reader.request(fetch_id(3), source.id(), source.incarnation(), 64, 1, 0));
  EXPECT_TRUE(reader.wait_answer(fetch_id(3)).status.ok());
}

// -------------------------------------------------------------------------------------------------------- a lying source

class LyingSource : public ::testing::Test {
 protected:
  LyingSource() : reader_(with_call()) {
    reader_.register_chunks();
    EXPECT_TRUE(reader_.transport().meet_peer(NodeId(9), Incarnation(1), liar_.address()).ok());
  }
  static NodeSettings with_call() {
    NodeSettings settings;
    settings.node = 2;
    settings.call = "am-eager";
    settings.page_bytes = 4'096;
    return settings;
  }
  bool wait(const std::function<bool()>& condition) {
    return reader_.wait_for([&] {
      for (int i = 0; i < 100; ++i) liar_.progress();
      return condition();
    });
  }
  void ask(FetchId id, int64_t pages) {
    const size_t before = liar_.wanted.size();
    reader_.transport().post(reader_.request(id, NodeId(9), Incarnation(1), 0, pages, 0));
    ASSERT_TRUE(wait([&] { return liar_.wanted.size() == before + static_cast<size_t>(pages); }));
  }
  bool answered(FetchId id) { return reader_.fetched.count(id) != 0; }
  std::string page(char filler) { return std::string(4'096, filler); }
  bool holds(int64_t index, char filler) {
    const std::string expected = page(filler);
    return std::memcmp(reader_.page(index).data(), expected.data(), expected.size()) == 0;
  }
  int64_t dropped() { return reader_.counters().pages_dropped; }

  FakePeer liar_;
  UcxNode reader_;
};

TEST_F(LyingSource, data_under_an_old_attempt_is_dropped) {
  ask(fetch_id(5, 1), 2);
  const FetchHeader first = liar_.wanted[0].fetch;
  reader_.transport().cancel(fetch_id(5, 1));
  ASSERT_TRUE(wait([&] { return answered(fetch_id(5, 1)) && !liar_.cancels.empty(); }));
  EXPECT_EQ(liar_.cancels[0].attempt, 1u);
  ask(fetch_id(5, 2), 2);
  const FetchHeader second = liar_.wanted[2].fetch;
  liar_.say(kPage, page_header(second, 0), page('n'));
  liar_.say(kPage, page_header(first, 0), page('o'));
  liar_.say(kPage, page_header(first, 1), page('o'));
  liar_.say(kPage, page_header(second, 1), page('n'));
  ASSERT_TRUE(wait([&] { return answered(fetch_id(5, 2)); }));
  EXPECT_TRUE(reader_.fetched[fetch_id(5, 2)][0].status.ok());
  EXPECT_TRUE(holds(0, 'n') && holds(1, 'n'));
  EXPECT_EQ(dropped(), 2);
}

TEST_F(LyingSource, a_page_that_comes_twice_lands_once) {
  ask(fetch_id(5), 2);
  const FetchHeader fetch = liar_.wanted[0].fetch;
  liar_.say(kPage, page_header(fetch, 0), page('a'));
  liar_.say(kPage, page_header(fetch, 0), page('b'));
  liar_.say(kPage, page_header(fetch, 1), page('c'));
  ASSERT_TRUE(wait([&] { return answered(fetch_id(5)); }));
  liar_.say(kPage, page_header(fetch, 1), page('d'));  // after the answer: the pages are no longer ours
  ASSERT_TRUE(wait([&] { return dropped() == 2; }));
  EXPECT_TRUE(holds(0, 'a') && holds(1, 'c'));
  EXPECT_EQ(reader_.fetched[fetch_id(5)].size(), 1u);
}

TEST_F(LyingSource, what_does_not_fit_is_dropped) {
  ask(fetch_id(5), 1);
  FetchHeader fetch = liar_.wanted[0].fetch;
  liar_.say(kPage, page_header(fetch, 7), page('x'));                        // a position that was not asked for
  liar_.say(kPage, page_header(fetch, 0, 4'095), page('x'));                 // past the page's end
  liar_.say(kPage, page_header(fetch, 0, 1'024), page('x').substr(0, 100));  // a hole before it
  liar_.say(kPage, page_header(fetch, 0), page('x') + "y");                  // longer than the page
  liar_.say(kPage, page_header(fetch, 0), "");                               // nothing
  liar_.say(kPage, "short", page('x'));                                      // no header of ours
  FetchHeader other_link = fetch;
  other_link.link.number += 1;
  liar_.say(kPage, page_header(other_link, 0), page('x'));
  FetchHeader other_ticket = fetch;
  other_ticket.ticket += 1;
  liar_.say(kPage, page_header(other_ticket, 0), page('x'));
  ASSERT_TRUE(wait([&] { return dropped() == 8; })) << dropped();
  EXPECT_FALSE(answered(fetch_id(5)));
  liar_.say(kPage, page_header(fetch, 0, 0), page('p').substr(0, 96));
  liar_.say(kPage, page_header(fetch, 0, 96), page('p').substr(96));
  ASSERT_TRUE(wait([&] { return answered(fetch_id(5)); }));
  EXPECT_TRUE(holds(0, 'p'));
}

TEST_F(LyingSource, that_is_another_process_than_was_meant_gets_no_request) {
  liar_.instance += 1;  // what was there before restarted, and another daemon got its port
  reader_.transport().post(reader_.request(fetch_id(5), NodeId(9), Incarnation(1), 0, 1, 0));
  ASSERT_TRUE(wait([&] { return answered(fetch_id(5)); }));
  EXPECT_TRUE(is_error(reader_.fetched[fetch_id(5)][0].status, ErrorCode::kStale)) << reader_.fetched[fetch_id(5)][0].status;
  EXPECT_TRUE(liar_.wanted.empty());
}

TEST_F(LyingSource, silence_alone_ends_the_link_and_nothing_lands_afterwards) {
  ask(fetch_id(5), 2);
  const FetchHeader fetch = liar_.wanted[0].fetch;
  liar_.say(kPage, page_header(fetch, 0), page('a'));
  ASSERT_TRUE(wait([&] { return reader_.counters().pages_arrived == 1; }));
  liar_.answers_pings = false;  // it lives and its socket is open: only its silence tells
  ASSERT_TRUE(wait([&] { return answered(fetch_id(5)); }));
  EXPECT_TRUE(is_error(reader_.fetched[fetch_id(5)][0].status, ErrorCode::kPeerLost)) << reader_.fetched[fetch_id(5)][0].status;
  EXPECT_EQ(reader_.counters().links_silent, 1);
  EXPECT_EQ(reader_.counters().links_failed, 0);
  EXPECT_GT(liar_.pings, 0);
}

TEST_F(LyingSource, a_peer_that_answers_pings_is_not_silent_however_long_it_takes) {
  ask(fetch_id(5), 1);
  const int64_t pings_a_silence = 1'000 / 50;
  ASSERT_TRUE(wait([&] { return liar_.pings > 2 * pings_a_silence; }));
  EXPECT_FALSE(answered(fetch_id(5)));
  liar_.say(kPage, page_header(liar_.wanted[0].fetch, 0), page('z'));
  ASSERT_TRUE(wait([&] { return answered(fetch_id(5)); }));
  EXPECT_TRUE(holds(0, 'z'));
}

// -------------------------------------------------------------------------------------------------------- a lying reader

TEST(LyingReader, is_not_believed) {
  NodeSettings settings;
  settings.page_bytes = 4'096;
  UcxNode source(settings);
  source.register_chunks();
  AddressHeader address;
  std::memcpy(&address, source.transport().address().data(), sizeof address);
  SocketAddress socket;
  socket.bytes = address.socket_bytes;
  std::memcpy(&socket.storage, source.transport().address().data() + sizeof address, socket.bytes);
  FakePeer liar;
  liar.connect(socket);
  const auto wait = [&](const std::function<bool()>& condition) {
    return source.wait_for([&] {
      for (int i = 0; i < 100; ++i) liar.progress();
      return condition();
    });
  };
  HelloHeader hello;
  hello.reader_node = 8;
  hello.link = {FakePeer::kInstance, 1};
  hello.source_instance = address.instance;
  FetchHeader fetch;
  fetch.link = hello.link;
  liar.say(kFetch, bytes_of(fetch), bytes_of(WantedPage{}));  // before it said who it is
  liar.say(kHello, "short", "");
  HelloHeader other_version = hello;
  other_version.version += 1;
  liar.say(kHello, bytes_of(other_version), "");
  ASSERT_TRUE(wait([&] { return source.counters().messages_dropped == 3; }));
  EXPECT_TRUE(liar.welcomes.empty());

  liar.say(kHello, bytes_of(hello), "");
  ASSERT_TRUE(wait([&] { return liar.welcomes.size() == 1; }));
  EXPECT_EQ(liar.welcomes[0].source_instance, address.instance);
  liar.say(kFetch, bytes_of(fetch), std::string(17, 'x'));  // no whole number of pages
  liar.say(kFetch, bytes_of(fetch), std::string(sizeof(WantedPage) * (kWantedPagesMax + 1), '\0'));
  ASSERT_TRUE(wait([&] { return source.counters().messages_dropped == 5; }));
  WantedPage far;
  far.pool = 0;
  far.index = 0xFFFFFFFEu;
  WantedPage other_pool;
  other_pool.pool = 0xFFFFFFFFu;
  liar.say(kFetch, bytes_of(fetch), bytes_of(far) + bytes_of(other_pool));
  ASSERT_TRUE(wait([&] { return liar.refusals.size() == 2; }));
  EXPECT_EQ(source.counters().pages_refused, 2);
  EXPECT_EQ(source.counters().pages_sent, 0);
}

}  // namespace
}  // namespace needle::server::ucx::testing
