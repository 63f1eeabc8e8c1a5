// The attach socket against a scripted core: what a client is told, and what the core is told about clients.
#include "server/attach/attach_server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <filesystem>

#include "base/units.h"
#include "kernels/format_set.h"
#include "proto/errors.h"
#include "server/memory/descriptor_passing.h"

namespace needle::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kChunkBytes = 2 * kMiB;

std::string format_of(const char* model) { return format_set_text(*preset_formats(model, {})); }

// Says what a core would say, and remembers what it was told. SessionIds count up from 1.
class ScriptedCore {
 public:
  absl::Status post(Message message) {
    std::unique_lock<std::mutex> hold(mutex_);
    if (auto* attach = std::get_if<Call<Attach>>(&message)) {
      last_attach = attach->request;
      absl::StatusOr<Attach::Reply> reply = absl::UnknownError("not answered");
      if (!refuse_attach.ok()) {
        reply = refuse_attach;
      } else {
        Attach::Reply fresh;
        fresh.session = SessionId(next_session_++);
        fresh.incarnation = Incarnation(99);
        fresh.heartbeat_ms = 500;
        for (uint32_t kind = 0; kind < kPoolKinds; ++kind) {
          fresh.pools[kind].pool = PoolId(kind);
          fresh.pools[kind].epoch = Epoch(7);
          if (kind == 0) {
            fresh.pools[kind].shape = {.page_bytes = 65536, .page_tokens = 256, .chunk_bytes = kChunkBytes, .chunks_max = 300};
            for (uint32_t chunk = 0; chunk < static_cast<uint32_t>(chunks); ++chunk) fresh.pools[kind].chunks.push_back(ChunkIndex(chunk));
          }
        }
        reply = std::move(fresh);
      }
      hold.unlock();
      std::move(attach->done)(std::move(reply));
      hold.lock();
    } else if (auto* beat = std::get_if<Call<Heartbeat>>(&message)) {
      heard.push_back("heartbeat");
      hold.unlock();
      std::move(beat->done)(Nothing{});
      hold.lock();
    } else if (auto* detach = std::get_if<Call<Detach>>(&message)) {
      heard.push_back("detach");
      hold.unlock();
      std::move(detach->done)(Nothing{});
      hold.lock();
    } else if (auto* acknowledge = std::get_if<Call<Acknowledge>>(&message)) {
      heard.push_back("acknowledge");
      hold.unlock();
      std::move(acknowledge->done)(Nothing{});
      hold.lock();
    } else if (auto* unmapped = std::get_if<Call<ChunkUnmapped>>(&message)) {
      heard.push_back("unmapped " + std::to_string(unmapped->request.chunk.value()));
      hold.unlock();
      std::move(unmapped->done)(make_error(ErrorCode::kStale, "scripted"));
      hold.lock();
    } else if (const auto* lost = std::get_if<SessionLost>(&message)) {
      heard.push_back("lost " + std::to_string(lost->session.value()));
    } else if (const auto* died = std::get_if<ProcessDied>(&message)) {
      heard.push_back("died " + std::to_string(died->session.value()));
    }
    wake_.notify_all();
    return absl::OkStatus();
  }

  // Waits until the core was told `what`; false after ten seconds.
  bool hears(const std::string& what) {
    std::unique_lock<std::mutex> hold(mutex_);
    return wake_.wait_for(hold, std::chrono::seconds(10), [&] { return std::count(heard.begin(), heard.end(), what) > 0; });
  }
  bool heard_nothing_of(const std::string& what) {
    std::lock_guard<std::mutex> hold(mutex_);
    return std::count(heard.begin(), heard.end(), what) == 0;
  }

  int chunks = 2;
  absl::Status refuse_attach = absl::OkStatus();
  Attach last_attach;
  std::vector<std::string> heard;

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  uint64_t next_session_ = 1;
};

class AttachTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/needle-attach-XXXXXX";
    folder_ = ::mkdtemp(name);
    files_ = std::make_shared<ChunkFiles>();
    const int fd = ::memfd_create("chunk", MFD_CLOEXEC);
    ASSERT_EQ(::ftruncate(fd, kChunkBytes), 0);
    const_cast<ChunkFiles&>(*files_).read_write = FileDescriptor(fd);
    const_cast<ChunkFiles&>(*files_).read_only =
        FileDescriptor(::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC));
    metadata_ = FileDescriptor(::memfd_create("metadata", MFD_CLOEXEC));
    ASSERT_EQ(::ftruncate(metadata_.get(), 4096), 0);
    start({});
  }
  void TearDown() override {
    server_.reset();
    (void)!::system(("rm -rf " + folder_).c_str());
  }
  void start(AttachOptions options) {
    server_.reset();
    options.path = folder_ + "/attach.sock";
    options.node = "node-a";
    options.grpc_target = "unix:" + folder_ + "/grpc.sock";
    options.build = "test";
    AttachPoolSet set{"default", format_of("raw"), {40, 0, 0}, {9600, 0, 0}};
    AttachServer::Sources sources{[this](PoolId pool, ChunkIndex) { return pool == PoolId(0) ? files_ : nullptr; }, metadata_.get(), 4096};
    auto made = AttachServer::start(
        std::move(options), {set}, sources, registry_, [this](Message message) { return core_.post(std::move(message)); }, *log_in_use_);
    ASSERT_TRUE(made.ok()) << made.status();
    server_ = *std::move(made);
  }

  std::string folder_;
  std::shared_ptr<const ChunkFiles> files_;
  FileDescriptor metadata_;
  SilentLog log_;
  Log* log_in_use_ = &log_;
  SessionRegistry registry_;
  ScriptedCore core_;
  std::unique_ptr<AttachServer> server_;

 public:
  // The client's end.
  struct Client {
    FileDescriptor socket;
    Datagram datagram;

    explicit Client(const std::string& folder) { socket = *connect_seqpacket(folder + "/attach.sock"); }
    Client(const std::string&, int) : socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {}  // not connected yet
    bool connect_to(const std::string& folder) const {
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      std::strncpy(address.sun_path, (folder + "/attach.sock").c_str(), sizeof address.sun_path - 1);
      return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    }

    void say(attach::Type type, uint32_t request, const std::string& body, uint16_t version = attach::kVersion) {
      attach::Header header;
      header.type = type;
      header.version = version;
      header.request = request;
      header.body_bytes = static_cast<uint32_t>(body.size());
      const std::string bytes = std::string(reinterpret_cast<const char*>(&header), sizeof(header)) + body;
      send_datagram(socket.get(), std::as_bytes(std::span(bytes)), {}, true);
    }
    void hello(const std::string& pool, const std::string& format, uint32_t views, uint64_t previous = 0,
               std::vector<attach::PageRefWire> held = {}, const std::string& name = "test") {
      attach::Hello body;
      body.previous_session = previous;
      body.views = views;
      body.held_count = static_cast<uint32_t>(held.size());
      body.pool_set_bytes = static_cast<uint32_t>(pool.size());
      body.format_bytes = static_cast<uint32_t>(format.size());
      body.name_bytes = static_cast<uint32_t>(name.size());
      say(attach::Type::kHello, 1,
          std::string(reinterpret_cast<const char*>(&body), sizeof(body)) +
              std::string(reinterpret_cast<const char*>(held.data()), held.size() * sizeof(attach::PageRefWire)) + pool + format + name);
    }
    // The next message's type; its body is left in `body`.
    attach::Header hear() {
      attach::Header header;
      header.type = static_cast<attach::Type>(0);
      if (receive_datagram(socket.get(), attach::kMessageBytesMax, datagram, true) != ReceiveResult::kReceived) return header;
      std::memcpy(&header, datagram.bytes.data(), sizeof(header));
      return header;
    }
    template <class Body>
    Body body() const {
      Body body{};
      EXPECT_GE(datagram.bytes.size(), sizeof(attach::Header) + sizeof(Body));
      std::memcpy(&body, datagram.bytes.data() + sizeof(attach::Header), sizeof(Body));
      return body;
    }
    std::string text_after(size_t body_bytes) const {
      const size_t at = sizeof(attach::Header) + body_bytes;
      return std::string(reinterpret_cast<const char*>(datagram.bytes.data()) + at, datagram.bytes.size() - at);
    }
    attach::Welcome attach_now(const std::string& folder_format, uint32_t views) {
      hello("default", folder_format, views);
      EXPECT_EQ(hear().type, attach::Type::kWelcome);
      const attach::Welcome welcome = body<attach::Welcome>();
      while (hear().type == attach::Type::kChunks) {
      }
      return welcome;
    }
  };
};

TEST_F(AttachTest, a_client_gets_session_secret_layout_and_both_views_of_each_chunk) {
  Client client(folder_);
  client.hello("default", format_of("raw"), attach::kReadOnlyView | attach::kReadWriteView);
  ASSERT_EQ(client.hear().type, attach::Type::kWelcome);
  const attach::Welcome welcome = client.body<attach::Welcome>();
  EXPECT_EQ(welcome.session, 1u);
  EXPECT_EQ(welcome.incarnation, 99u);
  EXPECT_EQ(welcome.heartbeat_ms, 500u);
  EXPECT_EQ(client.datagram.fds.size(), 2u) << "metadata and counters";
  attach::PoolWire pool;
  std::memcpy(&pool, client.datagram.bytes.data() + sizeof(attach::Header) + sizeof(welcome), sizeof(pool));
  EXPECT_EQ(pool.words_offset, 40);
  EXPECT_EQ(pool.page_bytes, 65536);
  EXPECT_EQ(pool.epoch, 7u);
  EXPECT_THAT(client.text_after(sizeof(welcome)), AllOf(HasSubstr(format_of("raw")), HasSubstr("grpc.sock"), HasSubstr("node-a")));
  ASSERT_EQ(client.hear().type, attach::Type::kChunks);
  EXPECT_EQ(client.body<attach::Chunks>().count, 2u);
  ASSERT_EQ(client.datagram.fds.size(), 4u);
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, client.datagram.fds[0].get(), 0), MAP_FAILED)
      << "read only comes first";
  void* writable = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, client.datagram.fds[1].get(), 0);
  EXPECT_NE(writable, MAP_FAILED);
  ::munmap(writable, 4096);
  ASSERT_EQ(client.hear().type, attach::Type::kReady);
  EXPECT_EQ(client.body<attach::Ready>().chunks, 2u);
  EXPECT_TRUE(registry_.check(SessionId(1), {reinterpret_cast<const char*>(welcome.secret), 16}).ok());
  EXPECT_TRUE(is_error(registry_.check(SessionId(1), "0123456789abcdef"), ErrorCode::kStale));
  EXPECT_TRUE(is_error(registry_.check(SessionId(2), {reinterpret_cast<const char*>(welcome.secret), 16}), ErrorCode::kStale));
  EXPECT_TRUE(is_error(registry_.check(SessionId(1), ""), ErrorCode::kStale));
}

TEST_F(AttachTest, another_user_gets_in_where_uids_names_it_and_is_pointed_to_the_tcp_port) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  constexpr uid_t kNamed = 65534;
  constexpr uid_t kUnnamed = 65533;
  constexpr int kOutOfReach = 6;
  AttachOptions options;
  options.uids = {kNamed};
  options.grpc_target_of_others = "127.0.0.1:7420";
  start(std::move(options));
  ASSERT_EQ(::chmod(folder_.c_str(), 0711), 0);
  const std::string format = format_of("raw");
  const auto as_user = [&](uid_t user) {  // 0: in, with the TCP port; 1: refused; else something else
    const pid_t child = ::fork();
    if (child == 0) {
      if (::setuid(user) != 0) ::_exit(9);
      if (::access(std::filesystem::path(folder_).parent_path().c_str(), X_OK) != 0) ::_exit(kOutOfReach);
      Client client(folder_);
      client.hello("default", format, attach::kReadOnlyView);
      const attach::Type heard = client.hear().type;
      if (heard == attach::Type::kAnswer) ::_exit(1);
      if (heard != attach::Type::kWelcome) ::_exit(8);
      const std::string told = client.text_after(sizeof(attach::Welcome));
      ::_exit(told.find("127.0.0.1:7420") != std::string::npos && told.find("grpc.sock") == std::string::npos ? 0 : 7);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  const int named = as_user(kNamed);
  if (named == kOutOfReach) GTEST_SKIP() << "other users cannot reach the folder above " << folder_;
  EXPECT_EQ(named, 0);
  EXPECT_EQ(as_user(kUnnamed), 1);
}

TEST_F(AttachTest, many_chunks_come_in_messages_of_at_most_253_descriptors) {
  core_.chunks = 300;
  Client client(folder_);
  client.hello("default", "", attach::kReadOnlyView | attach::kReadWriteView);
  ASSERT_EQ(client.hear().type, attach::Type::kWelcome);
  size_t chunks = 0;
  while (client.hear().type == attach::Type::kChunks) {
    EXPECT_LE(client.datagram.fds.size(), 253u);
    EXPECT_EQ(client.datagram.fds.size(), 2 * client.body<attach::Chunks>().count);
    chunks += client.body<attach::Chunks>().count;
  }
  EXPECT_EQ(chunks, 300u);
  EXPECT_EQ(client.body<attach::Ready>().chunks, 300u);
}

TEST_F(AttachTest, another_format_is_refused_with_both_printed_and_the_core_hears_nothing) {
  Client client(folder_);
  client.hello("default", format_of("deepseek-v4-flash"), attach::kReadOnlyView);
  ASSERT_EQ(client.hear().type, attach::Type::kAnswer);
  EXPECT_EQ(client.body<attach::Answer>().error, static_cast<uint32_t>(ErrorCode::kFormatMismatch));
  EXPECT_THAT(client.text_after(sizeof(attach::Answer)),
              AllOf(HasSubstr("--- ours"), HasSubstr("--- theirs"), HasSubstr("name raw"), HasSubstr("name deepseek-v4-flash")));
  EXPECT_EQ(static_cast<int>(client.hear().type), 0) << "closed";
  EXPECT_TRUE(core_.last_attach.pool_set.empty());
}

TEST_F(AttachTest, an_unknown_pool_names_those_that_exist) {
  Client client(folder_);
  client.hello("other", "", attach::kReadOnlyView);
  ASSERT_EQ(client.hear().type, attach::Type::kAnswer);
  EXPECT_THAT(client.text_after(sizeof(attach::Answer)), AllOf(HasSubstr("'other'"), HasSubstr("default")));
}

TEST_F(AttachTest, a_refusal_of_the_core_reaches_the_client_with_its_hint) {
  core_.refuse_attach = make_error(ErrorCode::kBusy, "sessions are full", 70);
  Client client(folder_);
  client.hello("default", "", 0);
  ASSERT_EQ(client.hear().type, attach::Type::kAnswer);
  EXPECT_EQ(client.body<attach::Answer>().error, static_cast<uint32_t>(ErrorCode::kBusy));
  EXPECT_EQ(client.body<attach::Answer>().retry_after_ms, 70u);
}

TEST_F(AttachTest, a_closed_socket_is_silence_and_the_process_is_watched_on) {
  const pid_t child = ::fork();
  if (child == 0) {  // attaches, closes its socket, lives on until killed
    {
      Client client(folder_);
      client.attach_now("", attach::kReadOnlyView);
    }
    for (;;) ::pause();
  }
  EXPECT_TRUE(core_.hears("lost 1"));
  EXPECT_TRUE(core_.heard_nothing_of("died 1"));
  EXPECT_FALSE(registry_.entry(SessionId(1)).session.is_none()) << "it may still acknowledge";
  ::kill(child, SIGKILL);
  EXPECT_TRUE(core_.hears("died 1"));
  int status = 0;
  ::waitpid(child, &status, 0);
}

TEST_F(AttachTest, a_killed_client_is_lost_and_dead) {
  const pid_t child = ::fork();
  if (child == 0) {
    Client client(folder_);
    client.attach_now("", attach::kReadOnlyView);
    client.say(attach::Type::kHeartbeat, 0, "");
    for (;;) ::pause();
  }
  EXPECT_TRUE(core_.hears("heartbeat"));
  ::kill(child, SIGKILL);
  EXPECT_TRUE(core_.hears("lost 1"));
  EXPECT_TRUE(core_.hears("died 1"));
  int status = 0;
  ::waitpid(child, &status, 0);
}

TEST_F(AttachTest, a_clean_detach_leaves_neither_silence_nor_death) {
  Client client(folder_);
  client.attach_now("", attach::kReadOnlyView);
  client.say(attach::Type::kDetach, 5, "");
  const attach::Header answer = client.hear();
  EXPECT_EQ(answer.type, attach::Type::kAnswer);
  EXPECT_EQ(answer.request, 5u);
  EXPECT_EQ(client.body<attach::Answer>().status, 0u);
  EXPECT_TRUE(registry_.entry(SessionId(1)).session.is_none());
  client.socket.reset();
  Client next(folder_);  // a second conversation proves that the first one's end was handled
  EXPECT_EQ(next.attach_now("", 0).session, 2u);
  EXPECT_TRUE(core_.heard_nothing_of("lost 1"));
}

TEST_F(AttachTest, growth_retirement_and_revocation_reach_the_client_in_order) {
  Client client(folder_);
  client.attach_now("", attach::kReadOnlyView | attach::kReadWriteView);
  server_->to_session(SessionId(1), ChunkMapped{PoolId(0), ChunkIndex(5)});
  server_->to_session(SessionId(1), ChunkRetiring{PoolId(0), ChunkIndex(1)});
  server_->to_session(SessionId(1), Revoked{"silence of 2000 ms"});
  ASSERT_EQ(client.hear().type, attach::Type::kChunks);
  EXPECT_EQ(client.datagram.fds.size(), 2u);
  ASSERT_EQ(client.hear().type, attach::Type::kChunkRetiring);
  EXPECT_EQ(client.body<attach::ChunkName>().chunk, 1u);
  ASSERT_EQ(client.hear().type, attach::Type::kRevoked);
  EXPECT_EQ(client.text_after(sizeof(attach::Revoked)), "silence of 2000 ms");
  const attach::ChunkName name{0, 1};
  client.say(attach::Type::kChunkUnmapped, 8, std::string(reinterpret_cast<const char*>(&name), sizeof(name)));
  EXPECT_EQ(client.hear().request, 8u);
  EXPECT_EQ(client.body<attach::Answer>().error, static_cast<uint32_t>(ErrorCode::kStale));
  client.say(attach::Type::kAcknowledge, 9, "");
  EXPECT_EQ(client.hear().request, 9u);
  EXPECT_TRUE(core_.hears("acknowledge"));
  EXPECT_TRUE(registry_.entry(SessionId(1)).session.is_none());
}

TEST_F(AttachTest, a_client_without_views_has_its_unmapping_said_for_it) {
  Client client(folder_);
  client.attach_now("", 0);
  server_->to_session(SessionId(1), ChunkRetiring{PoolId(0), ChunkIndex(3)});
  EXPECT_TRUE(core_.hears("unmapped 3"));
}

TEST_F(AttachTest, what_was_held_before_a_restart_is_told_to_the_core) {
  Client client(folder_);
  client.hello("default", "", attach::kReadOnlyView, 77, {{0, 12, 3, 0}, {2, 1, 9, 0}});
  ASSERT_EQ(client.hear().type, attach::Type::kWelcome);
  EXPECT_EQ(core_.last_attach.previous, SessionId(77));
  ASSERT_EQ(core_.last_attach.held.size(), 2u);
  EXPECT_EQ(core_.last_attach.held[1], (PageRef{PoolId(2), {PageIndex(1), Generation(9)}}));
  EXPECT_EQ(core_.last_attach.process.pid, ::getpid());
  EXPECT_GT(core_.last_attach.process.start_time_ticks, 0);
}

TEST_F(AttachTest, a_session_of_another_process_cannot_be_continued) {
  const pid_t child = ::fork();
  if (child == 0) {
    Client client(folder_);
    client.attach_now("", 0);
    client.say(attach::Type::kHeartbeat, 0, "");
    for (;;) ::pause();
  }
  ASSERT_TRUE(core_.hears("heartbeat"));
  Client thief(folder_);
  thief.hello("default", "", attach::kReadOnlyView, 1);
  EXPECT_EQ(thief.hear().type, attach::Type::kAnswer);
  EXPECT_EQ(thief.body<attach::Answer>().error, static_cast<uint32_t>(ErrorCode::kWrongOwner));
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
}

TEST_F(AttachTest, a_survivor_that_is_gone_is_reported_dead_at_once) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  int status = 0;
  ::waitpid(child, &status, 0);
  server_->watch_survivor(SessionId(40), {child, 12345, 0});
  EXPECT_TRUE(core_.hears("died 40"));
  server_->watch_survivor(SessionId(41), {::getpid(), 1, 0});  // our pid, another start time
  EXPECT_TRUE(core_.hears("died 41"));
}

TEST_F(AttachTest, another_version_is_told_which_one_is_spoken) {
  Client client(folder_);
  client.say(attach::Type::kHello, 1, "", 9);
  ASSERT_EQ(client.hear().type, attach::Type::kAnswer);
  EXPECT_THAT(client.text_after(sizeof(attach::Answer)), AllOf(HasSubstr("version 9"), HasSubstr("speaks 2")));
}

TEST_F(AttachTest, connections_beyond_the_limit_are_told_to_come_back) {
  AttachOptions options;
  options.connections_max = 1;
  start(options);
  Client first(folder_);
  first.attach_now("", 0);
  Client second(folder_);
  ASSERT_EQ(second.hear().type, attach::Type::kAnswer);
  EXPECT_EQ(second.body<attach::Answer>().error, static_cast<uint32_t>(ErrorCode::kBusy));
}

TEST_F(AttachTest, a_connection_that_says_no_hello_is_closed_in_time_and_counted) {
  AttachOptions options;
  options.hello_ms = 500;
  start(options);
  Client attached(folder_);
  attached.attach_now("", 0);
  Client ended(folder_);
  ended.attach_now("", 0);
  ended.say(attach::Type::kDetach, 5, "");
  EXPECT_EQ(ended.hear().request, 5u);
  Client silent(folder_);
  Client talks_of_other_things(folder_);
  talks_of_other_things.say(attach::Type::kHeartbeat, 7, "");
  EXPECT_EQ(talks_of_other_things.hear().request, 7u);
  for (Client* client : {&silent, &talks_of_other_things}) {
    ASSERT_EQ(client->hear().type, attach::Type::kAnswer);
    EXPECT_THAT(client->text_after(sizeof(attach::Answer)), HasSubstr("no Hello came within 500 ms"));
    EXPECT_EQ(static_cast<int>(client->hear().type), 0) << "closed";
  }
  EXPECT_EQ(static_cast<int>(ended.hear().type), 0) << "nor does one stay after its session's end";
  EXPECT_EQ(server_->hellos_overdue(), 2u);
  EXPECT_EQ(server_->refused(), 0u);
  attached.say(attach::Type::kHeartbeat, 8, "");
  EXPECT_EQ(attached.hear().request, 8u) << "a session's connection stays";
  EXPECT_EQ(server_->connections(), 1);
  EXPECT_EQ(server_->without_session(), 0);
}

TEST_F(AttachTest, only_so_many_wait_to_say_hello) {
  AttachOptions options;
  options.hello_ms = 600'000;
  options.hellos_waiting_max = 3;
  start(options);
  std::vector<std::unique_ptr<Client>> waiting;
  for (int i = 0; i < 3; ++i) waiting.push_back(std::make_unique<Client>(folder_));
  Client refused(folder_);
  ASSERT_EQ(refused.hear().type, attach::Type::kAnswer);
  EXPECT_EQ(refused.body<attach::Answer>().error, static_cast<uint32_t>(ErrorCode::kBusy));
  EXPECT_THAT(refused.text_after(sizeof(attach::Answer)), HasSubstr("no Hello yet"));
  EXPECT_EQ(server_->refused(), 1u);
  EXPECT_EQ(server_->without_session(), 3);
  waiting[0]->attach_now("", 0);
  EXPECT_EQ(server_->without_session(), 2);
  Client next(folder_);  // there is room again
  next.attach_now("", 0);
}

// Counts lines by event.
class CountingLog final : public Log {
 public:
  void write(LogLevel, std::string_view event, std::initializer_list<LogField>) override {
    std::lock_guard<std::mutex> hold(mutex_);
    ++counts_[std::string(event)];
    wake_.notify_all();
  }
  bool waits_for(const std::string& event) {
    std::unique_lock<std::mutex> hold(mutex_);
    return wake_.wait_for(hold, std::chrono::seconds(10), [&] { return counts_[event] > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<std::string, int> counts_;
};

class AttachLog : public AttachTest {
 protected:
  CountingLog counted_;
};

TEST_F(AttachLog, without_a_descriptor_a_caller_waits_at_the_door_until_there_is_one) {
  log_in_use_ = &counted_;
  start({});
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  Client client(folder_, 0);
  rlimit none_left = before;
  none_left.rlim_cur = static_cast<rlim_t>(client.socket.get()) + 1;  // the lowest free number was taken last
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none_left), 0);
  const bool connected = client.connect_to(folder_);
  const bool said = counted_.waits_for("attach_accept_failed");
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_TRUE(connected);
  EXPECT_TRUE(said);
  client.attach_now("", 0);
}

TEST_F(AttachTest, hostile_messages_end_their_connection_and_nobody_else_s) {
  Client good(folder_);
  good.attach_now("", 0);
  uint64_t seed = 1;
  for (int round = 0; round < 400; ++round) {
    Client bad(folder_);
    attach::Hello body;
    std::string bytes(reinterpret_cast<const char*>(&body), sizeof(body));
    for (int i = 0; i < 8; ++i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      bytes[(seed >> 33) % bytes.size()] = static_cast<char>(seed >> 56);
    }
    if (round % 3 == 0) bytes.resize((seed >> 20) % 60);
    if (round % 5 == 0) bytes += std::string((seed >> 20) % 60'000, 'x');
    bad.say(static_cast<attach::Type>(round % 7 == 0 ? 200 : 1), 1, bytes);
    bad.say(attach::Type::kChunkUnmapped, 2, "");
  }
  const std::byte junk[3] = {};
  Client short_one(folder_);
  send_datagram(short_one.socket.get(), junk, {}, true);
  EXPECT_EQ(static_cast<int>(short_one.hear().type), 0);
  good.say(attach::Type::kHeartbeat, 3, "");
  EXPECT_EQ(good.hear().request, 3u);
}

TEST_F(AttachTest, a_name_that_no_log_or_message_can_carry_is_made_printable) {
  Client client(folder_);
  client.hello("default", "", 0, 0, {}, "engine\xff\n\x1b[31m");
  ASSERT_EQ(client.hear().type, attach::Type::kWelcome);
  const std::vector<SessionEntry> entries = registry_.entries();
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].client, "engine???[31m");
}

TEST_F(AttachTest, a_client_that_stops_reading_is_disconnected_not_waited_for) {
  AttachOptions options;
  options.messages_waiting_max = 50;
  start(options);
  Client client(folder_);
  client.attach_now("", attach::kReadOnlyView);
  for (int i = 0; i < 5000; ++i) server_->to_session(SessionId(1), Revoked{std::string(1000, 'x')});
  EXPECT_TRUE(core_.hears("lost 1"));
}

TEST_F(AttachTest, read_counters_are_summed_and_outlive_their_session) {
  Client client(folder_);
  client.hello("default", "", 0);
  ASSERT_EQ(client.hear().type, attach::Type::kWelcome);
  void* page = ::mmap(nullptr, attach::kReadCountersBytes, PROT_READ | PROT_WRITE, MAP_SHARED, client.datagram.fds[1].get(), 0);
  ASSERT_NE(page, MAP_FAILED);
  auto* counters = static_cast<attach::ReadCounters*>(page);
  counters->reads.store(5);
  EXPECT_EQ(registry_.read_totals().reads, 0u) << "an unsigned page is not believed";
  counters->magic = attach::kReadCountersMagic;
  EXPECT_EQ(registry_.read_totals().reads, 5u);
  EXPECT_EQ(client.hear().type, attach::Type::kReady);
  client.say(attach::Type::kDetach, 5, "");
  EXPECT_EQ(client.hear().request, 5u);
  EXPECT_EQ(registry_.read_totals().reads, 5u);
  ::munmap(page, attach::kReadCountersBytes);
}

}  // namespace
}  // namespace needle::server
