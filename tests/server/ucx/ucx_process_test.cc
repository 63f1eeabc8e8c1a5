// Transports in processes of their own: killed, stopped, restarted.
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstdio>
#include <sstream>

#include "base/units.h"
#include "tests/server/ucx/hex.h"
#include "tests/server/ucx/ucx_node.h"

extern char** environ;

namespace needle::server::ucx::testing {
namespace {

constexpr int64_t kPages = 256;  // 64 KiB each: enough to be caught in the middle

// A child that runs ucx_peer.
class PeerProcess {
 public:
  PeerProcess(const NodeSettings& settings, uint64_t seed) : settings_(settings) {
    int to_child[2];
    int from_child[2];
    NEEDLE_CHECK(pipe2(to_child, O_CLOEXEC) == 0 && pipe2(from_child, O_CLOEXEC) == 0, "no pipe");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to_child[0], 0);
    posix_spawn_file_actions_adddup2(&actions, from_child[1], 1);
    std::vector<std::string> words = {
        NEEDLE_UCX_PEER,     std::to_string(settings.node),       std::to_string(settings.incarnation),   settings.transports,
        settings.call,       std::to_string(settings.page_bytes), std::to_string(settings.pages_a_chunk), std::to_string(settings.chunks),
        std::to_string(seed)};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    NEEDLE_CHECK(posix_spawn(&pid_, NEEDLE_UCX_PEER, &actions, nullptr, argv.data(), environ) == 0, "ucx_peer does not start");
    posix_spawn_file_actions_destroy(&actions);
    close(to_child[0]);
    close(from_child[1]);
    write_fd_ = to_child[1];
    read_ = fdopen(from_child[0], "r");
    for (std::string line = read_line(); line != "ready"; line = read_line()) {
      std::istringstream words_in(line);
      std::string what;
      words_in >> what;
      if (what == "address") {
        std::string hex;
        words_in >> hex;
        address = from_hex(hex);
      } else if (what == "chunk") {
        uint32_t pool = 0;
        uint32_t chunk = 0;
        std::string hex;
        words_in >> pool >> chunk >> hex;
        chunks.push_back({PoolId(pool), ChunkIndex(chunk), from_hex(hex)});
      }
    }
  }
  ~PeerProcess() {
    close(write_fd_);
    if (pid_ > 0) {
      kill(pid_, SIGCONT);
      wait();
    }
    std::fclose(read_);
  }
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  NodeId id() const { return NodeId(settings_.node); }
  Incarnation incarnation() const { return Incarnation(settings_.incarnation); }
  void signal(int number) { NEEDLE_CHECK(kill(pid_, number) == 0, "no such child"); }
  void kill_now() {
    signal(SIGKILL);
    wait();
  }
  int stop() {  // end of input: a clean stop; its exit status
    close(write_fd_);
    write_fd_ = -1;
    return wait();
  }
  void say(const std::string& line) {
    const std::string text = line + "\n";
    NEEDLE_CHECK(write(write_fd_, text.data(), text.size()) == static_cast<ssize_t>(text.size()), "the child is gone");
  }
  std::string read_line() {
    char* line = nullptr;
    size_t size = 0;
    const ssize_t length = getline(&line, &size, read_);
    const std::string text(line, length > 0 ? static_cast<size_t>(length - 1) : 0);
    std::free(line);
    NEEDLE_CHECK(length > 0, "the child said no more");
    return text;
  }

  std::string address;
  std::vector<ChunkDescriptor> chunks;

 private:
  int wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }
  const NodeSettings settings_;
  pid_t pid_ = -1;
  int write_fd_ = -1;
  std::FILE* read_ = nullptr;
};

// Holds the reader's thread where its eighth page landed, until the test has done what it wants done in the middle.
class Gate {
 public:
  PageChecksum checksum() {
    return [this](PoolId, std::span<const std::byte> page) {
      std::unique_lock<std::mutex> hold(mutex_);
      if (++landed_ == 8) {
        changed_.notify_all();
        changed_.wait(hold, [this] { return open_; });
      }
      return checksum_of(page);
    };
  }
  bool wait_reached() {
    std::unique_lock<std::mutex> hold(mutex_);
    return changed_.wait_for(hold, std::chrono::seconds(20), [this] { return landed_ >= 8; });
  }
  void open() {
    std::lock_guard<std::mutex> hold(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int landed_ = 0;
  bool open_ = false;
};

struct Fabric {
  const char* name;
  const char* transports;
  const char* call;
};

class UcxProcess : public ::testing::TestWithParam<Fabric> {
 protected:
  NodeSettings settings(uint32_t node, uint64_t incarnation = 1) const {
    NodeSettings made;
    made.node = node;
    made.incarnation = incarnation;
    made.transports = GetParam().transports;
    made.call = GetParam().call;
    made.pages_a_chunk = kPages;
    made.chunks = 1;
    made.bytes_in_flight_max = 8 * made.page_bytes;
    return made;
  }
  void meet(UcxNode& reader, const PeerProcess& source) {
    ASSERT_TRUE(reader.transport().meet_peer(source.id(), source.incarnation(), source.address).ok());
    reader.transport().learn_peer(source.id(), source.incarnation(), source.chunks);
  }
  // The whole pool in parts of four pages.
  void post_all(UcxNode& reader, const PeerProcess& source, uint64_t ticket, uint32_t attempt) {
    for (uint32_t part = 0; part < kPages / 4; ++part) {
      reader.transport().post(reader.request(fetch_id(ticket, attempt, part), source.id(), source.incarnation(), part * 4, 4, part * 4));
    }
  }
  int64_t answers(const UcxNode& reader, uint32_t attempt, bool good) {
    int64_t found = 0;
    for (const auto& [id, done] : reader.fetched) {
      if (id.attempt != attempt) continue;
      EXPECT_EQ(done.size(), 1u) << "a request was answered twice";
      found += done[0].status.ok() == good;
    }
    return found;
  }
  // What the requests of an attempt were answered, for a failure's message.
  static std::string said(UcxNode& reader, uint32_t attempt) {
    reader.wait_for([] { return true; });
    std::string text = "answers:";
    for (const auto& [id, done] : reader.fetched) {
      if (id.attempt == attempt) text += "\n  part " + std::to_string(id.part) + ": " + done[0].status.ToString();
    }
    return text;
  }
  bool all_answered(UcxNode& reader, uint32_t attempt) {
    return reader.wait_for([&] { return answers(reader, attempt, true) + answers(reader, attempt, false) == kPages / 4; });
  }
};

INSTANTIATE_TEST_SUITE_P(Fabrics, UcxProcess,
                         ::testing::Values(Fabric{"tcp_rendezvous", "tcp", "am-rendezvous"}, Fabric{"tcp_eager", "tcp", "am-eager"},
                                           Fabric{"tcp_get", "tcp", "get"},
                                           Fabric{"shared_memory_rendezvous", "tcp,posix,sysv", "am-rendezvous"},
                                           Fabric{"shared_memory_eager", "tcp,posix,sysv", "am-eager"}),
                         [](const auto& fabric) { return fabric.param.name; });

constexpr char kImitatedGet[] =
    "UCX 1.13 aborts a source that answers an imitated get of a reader that is gone: choose_call never takes it here";

TEST_P(UcxProcess, a_source_killed_mid_ship_ends_every_request_and_its_successor_serves) {
  Gate gate;
  UcxNode reader(settings(2), gate.checksum());
  reader.register_chunks();
  auto source = std::make_unique<PeerProcess>(settings(1, 100), 7);
  meet(reader, *source);
  post_all(reader, *source, 5, 1);
  ASSERT_TRUE(gate.wait_reached()) << "the ship did not begin; " << said(reader, 1);
  source->kill_now();
  gate.open();
  ASSERT_TRUE(all_answered(reader, 1));
  EXPECT_GT(answers(reader, 1, false), 0);
  EXPECT_EQ(reader.counters().bytes_in_flight_now, 0);

  // The daemon restarts at the same address in the eyes of its peers: same node, new incarnation.
  source = std::make_unique<PeerProcess>(settings(1, 101), 8);
  reader.transport().post(reader.request(fetch_id(6, 9), source->id(), source->incarnation(), 0, 1, 0));
  EXPECT_TRUE(is_error(reader.wait_answer(fetch_id(6, 9)).status, ErrorCode::kStale)) << "not met yet";
  meet(reader, *source);
  reader.transport().post(reader.request(fetch_id(7, 9), source->id(), Incarnation(100), 0, 1, 0));
  EXPECT_TRUE(is_error(reader.wait_answer(fetch_id(7, 9)).status, ErrorCode::kStale)) << "an old handle";
  post_all(reader, *source, 5, 2);
  ASSERT_TRUE(all_answered(reader, 2));
  EXPECT_EQ(answers(reader, 2, true), kPages / 4);
  for (int64_t i = 0; i < kPages; ++i) EXPECT_TRUE(reader.holds(i, 8, i)) << i;
  EXPECT_EQ(source->stop(), 0);
}

TEST_P(UcxProcess, a_stopped_source_is_found_by_silence_and_serves_again_when_it_wakes) {
  if (std::string(GetParam().name) == "tcp_get") {
    GTEST_SKIP() << kImitatedGet;
  }
  Gate gate;
  UcxNode reader(settings(2), gate.checksum());
  reader.register_chunks();
  PeerProcess source(settings(1), 7);
  meet(reader, source);
  post_all(reader, source, 5, 1);
  ASSERT_TRUE(gate.wait_reached()) << "the ship did not begin; " << said(reader, 1);
  source.signal(SIGSTOP);
  gate.open();
  ASSERT_TRUE(all_answered(reader, 1));
  EXPECT_GT(answers(reader, 1, false), 0);
  EXPECT_EQ(reader.counters().links_silent, 1);
  EXPECT_EQ(reader.counters().links_failed, 0) << "UCX itself noticed a stopped peer";
  EXPECT_EQ(reader.counters().bytes_in_flight_now, 0);
  // Another attempt while it is still stopped: its kernel takes the connection, nobody answers.
  reader.transport().post(reader.request(fetch_id(5, 2), source.id(), source.incarnation(), 0, 1, 0));
  EXPECT_TRUE(is_error(reader.wait_answer(fetch_id(5, 2)).status, ErrorCode::kPeerLost));
  // The pages are ours again: what the source still sends when it wakes must not land in them.
  for (int64_t i = 0; i < kPages; ++i) std::memset(reader.page(i).data(), 0x5C, reader.page(i).size());
  source.signal(SIGCONT);
  bool served = false;
  for (uint32_t attempt = 3; attempt < 8 && !served; ++attempt) {  // as the core does
    reader.transport().post(reader.request(fetch_id(6, attempt), source.id(), source.incarnation(), 0, 1, 0));
    served = reader.wait_answer(fetch_id(6, attempt)).status.ok();
  }
  ASSERT_TRUE(served);
  EXPECT_TRUE(reader.holds(0, 7, 0));
  const std::string untouched(reader.page(0).size(), 0x5C);
  for (int64_t i = 1; i < kPages; ++i) {
    ASSERT_EQ(std::memcmp(reader.page(i).data(), untouched.data(), untouched.size()), 0) << "late bytes landed in page " << i;
  }
  EXPECT_EQ(source.stop(), 0);
}

TEST_P(UcxProcess, a_reader_killed_mid_ship_leaves_nothing_at_the_source) {
  if (std::string(GetParam().name) == "tcp_get") {
    GTEST_SKIP() << kImitatedGet;
  }
  UcxNode source(settings(1));
  source.fill(7);
  const auto chunks = source.register_chunks();
  auto reader = std::make_unique<PeerProcess>(settings(2), 0);
  reader->say("meet 1 1 " + to_hex(source.transport().address()));
  for (const ChunkDescriptor& chunk : chunks) {
    reader->say("learn 1 1 " + std::to_string(chunk.pool.value()) + " " + std::to_string(chunk.chunk.value()) + " " +
                to_hex(chunk.descriptor));
  }
  for (int part = 0; part < kPages / 4; ++part) {
    reader->say("fetch 1 1 5 1 " + std::to_string(part) + " " + std::to_string(part * 4) + " 4 " + std::to_string(part * 4));
  }
  EXPECT_EQ(reader->read_line().substr(0, 8), "fetched ");
  EXPECT_EQ(source.counters().source_links_now, 1);
  reader->kill_now();
  EXPECT_TRUE(source.wait_for([&] {
    return source.counters().source_links_now == 0 && source.counters().sends_now == 0 && source.counters().pages_queued_now == 0;
  }));
  source.transport().release_chunk(PoolId(0), ChunkIndex(0));
  EXPECT_TRUE(source.wait_for([&] { return source.released.size() == 1; }));
}

// The reader meets the source and asks it for all pages, in requests of four; returns when the first of them is answered.
void ask_for_every_page(PeerProcess& reader, UcxNode& source) {
  const auto chunks = source.register_chunks();
  reader.say("meet 1 1 " + to_hex(source.transport().address()));
  for (const ChunkDescriptor& chunk : chunks) {
    reader.say("learn 1 1 " + std::to_string(chunk.pool.value()) + " " + std::to_string(chunk.chunk.value()) + " " +
               to_hex(chunk.descriptor));
  }
  for (int part = 0; part < kPages / 4; ++part) {
    reader.say("fetch 1 1 5 1 " + std::to_string(part) + " " + std::to_string(part * 4) + " 4 " + std::to_string(part * 4));
  }
  EXPECT_EQ(reader.read_line().substr(0, 8), "fetched ");
}

TEST_P(UcxProcess, a_stopped_reader_costs_its_link_and_does_not_hold_the_chunk) {
  if (std::string(GetParam().name) == "shared_memory_rendezvous") {
    GTEST_SKIP() << "UCX 1.13 holds such a rendezvous until the reader wakes, so choose_call never takes it here";
  }
  UcxNode source(settings(1));
  source.fill(7);
  PeerProcess reader(settings(2), 0);
  ask_for_every_page(reader, source);
  reader.signal(SIGSTOP);
  source.transport().release_chunk(PoolId(0), ChunkIndex(0));
  EXPECT_TRUE(source.wait_for([&] { return source.released.size() == 1 && source.counters().source_links_now == 0; }));
  EXPECT_EQ(source.counters().sends_now, 0);
  EXPECT_EQ(source.counters().source_links_silent, 1);
  reader.signal(SIGCONT);
  for (int part = 1; part < kPages / 4; ++part) {  // it learns that its requests are over, each once
    EXPECT_EQ(reader.read_line().substr(0, 8), "fetched ");
  }
  EXPECT_EQ(reader.stop(), 0);
}

// Over every fabric: whatever UCX does with the sends to a reader that neither reads nor dies, the daemon can stop.
TEST_P(UcxProcess, a_source_stops_while_its_reader_is_stopped) {
  UcxNode source(settings(1));
  source.fill(7);
  PeerProcess reader(settings(2), 0);
  ask_for_every_page(reader, source);
  reader.signal(SIGSTOP);
  SteadyClock clock;
  const int64_t before_ns = clock.now_ns();
  source.transport().stop();
  EXPECT_LT(clock.now_ns() - before_ns, int64_t{5} * kNanosPerSecond);
  EXPECT_EQ(source.counters().sends_held_now, source.counters().sends_now);
}

}  // namespace
}  // namespace needle::server::ucx::testing
