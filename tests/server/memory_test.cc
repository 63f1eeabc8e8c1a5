// Host memory and its keepers, on the real kernel: what is promised of a chunk, of the metadata region, and over a death.
#include "server/memory/host_memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <future>
#include <map>
#include <thread>

#include "base/units.h"
#include "proto/errors.h"
#include "server/memory/descriptor_passing.h"
#include "server/memory/keeper.h"

namespace needle::server {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kChunkBytes = 2 * kMiB;
const PoolShape kShape = {.page_bytes = 65536, .page_tokens = 256, .chunk_bytes = kChunkBytes, .chunks_max = 8};
const PoolShape kNoPool = {};

// A folder that goes with the test.
class Folder {
 public:
  Folder() {
    char name[] = "/tmp/needle-memory-XXXXXX";
    path_ = ::mkdtemp(name);
  }
  ~Folder() { (void)!::system(("rm -rf " + path_).c_str()); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

class RecordingLog final : public Log {
 public:
  void write(LogLevel, std::string_view event, std::initializer_list<LogField>) override {
    std::lock_guard<std::mutex> hold(mutex_);
    ++events_[std::string(event)];
  }
  int count(const std::string& event) {
    std::lock_guard<std::mutex> hold(mutex_);
    return events_[event];
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int> events_;
};

// Host memory with its answers collected.
struct Bench {
  explicit Bench(HostMemoryOptions options = {.huge_pages = HugePages::kOff}, int64_t available = kGiB, DescriptorStore* with = nullptr,
                 std::vector<KeptDescriptor> survivors = {}) {
    auto made = HostMemory::create(
        options, {kShape, kNoPool, kShape}, with == nullptr ? none : *with, survivors, [available] { return available; },
        [this](PoolId pool, ChunkIndex chunk, absl::Status status) {
          std::lock_guard<std::mutex> hold(mutex);
          answers.push_back({pool, chunk, std::move(status)});
          wake.notify_all();
        },
        log);
    EXPECT_TRUE(made.ok()) << made.status();
    memory = *std::move(made);
  }
  absl::Status allocate(PoolId pool, ChunkIndex chunk) {
    memory->allocate_chunk(pool, chunk, kChunkBytes);
    std::unique_lock<std::mutex> hold(mutex);
    wake.wait(hold, [&] { return !answers.empty() && answers.back().chunk == chunk && answers.back().pool == pool; });
    absl::Status status = answers.back().status;
    answers.clear();
    return status;
  }

  struct Answered {
    PoolId pool;
    ChunkIndex chunk;
    absl::Status status;
  };
  RecordingLog log;
  NoDescriptorStore none;
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<Answered> answers;
  std::unique_ptr<HostMemory> memory;
};

TEST(HostMemory, a_chunk_lies_at_its_place_zeroed_sealed_and_private) {
  Bench bench;
  ASSERT_TRUE(bench.allocate(PoolId(0), ChunkIndex(3)).ok());
  std::byte* const place = bench.memory->base(PoolId(0)) + 3 * kChunkBytes;
  EXPECT_EQ(place[0], std::byte{0});
  EXPECT_EQ(place[kChunkBytes - 1], std::byte{0});
  const auto files = bench.memory->files(PoolId(0), ChunkIndex(3));
  ASSERT_NE(files, nullptr);
  struct stat found {};
  ASSERT_EQ(::fstat(files->read_write.get(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777u, 0600u);
  EXPECT_EQ(found.st_size, kChunkBytes);
  EXPECT_GE(found.st_blocks * 512, kChunkBytes) << "all of its pages exist before anyone writes";
  EXPECT_EQ(::fcntl(files->read_write.get(), F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
            F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  EXPECT_NE(::fcntl(files->read_write.get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_NE(::ftruncate(files->read_write.get(), 4096), 0);
  EXPECT_NE(::ftruncate(files->read_write.get(), 2 * kChunkBytes), 0);
}

TEST(HostMemory, the_read_only_descriptor_shows_the_bytes_and_cannot_be_mapped_for_writing) {
  Bench bench;
  ASSERT_TRUE(bench.allocate(PoolId(2), ChunkIndex(0)).ok());
  bench.memory->base(PoolId(2))[77] = std::byte{42};
  const int fd = bench.memory->files(PoolId(2), ChunkIndex(0))->read_only.get();
  void* seen = ::mmap(nullptr, kChunkBytes, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(seen, MAP_FAILED);
  EXPECT_EQ(static_cast<std::byte*>(seen)[77], std::byte{42});
  EXPECT_NE(::mprotect(seen, kChunkBytes, PROT_READ | PROT_WRITE), 0);
  EXPECT_EQ(::mmap(nullptr, kChunkBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  ::munmap(seen, kChunkBytes);
}

TEST(HostMemory, a_read_only_reader_s_write_ends_that_process_alone) {
  Bench bench;
  ASSERT_TRUE(bench.allocate(PoolId(0), ChunkIndex(0)).ok());
  const int fd = bench.memory->files(PoolId(0), ChunkIndex(0))->read_only.get();
  const pid_t child = ::fork();
  if (child == 0) {
    void* seen = ::mmap(nullptr, kChunkBytes, PROT_READ, MAP_SHARED, fd, 0);
    if (seen == MAP_FAILED) ::_exit(3);
    ::signal(SIGSEGV, SIG_DFL);
    static_cast<volatile char*>(seen)[0] = 1;
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status)) << "the write went through";
  EXPECT_EQ(bench.memory->base(PoolId(0))[0], std::byte{0});
}

TEST(HostMemory, a_forked_child_does_not_inherit_the_mapping) {
  Bench bench;
  ASSERT_TRUE(bench.allocate(PoolId(0), ChunkIndex(0)).ok());
  const volatile std::byte* place = bench.memory->base(PoolId(0));
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGSEGV, SIG_DFL);
    ::_exit(static_cast<int>(place[0]));
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
}

TEST(HostMemory, a_full_machine_is_an_error_that_says_what_is_left) {
  Bench bench({.huge_pages = HugePages::kOff, .spare_bytes = 100 * kMiB}, 101 * kMiB);
  const absl::Status status = bench.allocate(PoolId(0), ChunkIndex(0));
  EXPECT_TRUE(is_error(status, ErrorCode::kMemory)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("101 MiB are available"));
  EXPECT_FALSE(bench.memory->chunk_present(PoolId(0), ChunkIndex(0)));
  EXPECT_EQ(bench.log.count("chunk_allocation_failed"), 1);
}

TEST(HostMemory, huge_pages_are_had_or_their_absence_is_said_once) {
  Bench bench({.huge_pages = HugePages::kTry});
  ASSERT_TRUE(bench.allocate(PoolId(0), ChunkIndex(0)).ok());
  ASSERT_TRUE(bench.allocate(PoolId(0), ChunkIndex(1)).ok());
  const int64_t reserved = bench.memory->chunks_with(PageBacking::kReserved2M);
  EXPECT_EQ(bench.log.count("huge_pages_fall_back"), reserved == 2 ? 0 : 1);
  EXPECT_EQ(reserved + bench.memory->chunks_with(PageBacking::kTransparent) + bench.memory->chunks_with(PageBacking::kPlain), 2);
}

TEST(HostMemory, required_huge_pages_that_are_missing_refuse_the_chunk) {
  Bench bench({.huge_pages = HugePages::kRequire});
  const absl::Status status = bench.allocate(PoolId(0), ChunkIndex(0));
  if (status.ok()) GTEST_SKIP() << "this machine has huge pages for memfd";
  EXPECT_TRUE(is_error(status, ErrorCode::kMemory));
  EXPECT_THAT(std::string(status.message()), HasSubstr("require"));
}

TEST(HostMemory, a_freed_chunk_is_gone_at_once_and_can_be_made_again) {
  Bench bench;
  ASSERT_TRUE(bench.allocate(PoolId(0), ChunkIndex(2)).ok());
  bench.memory->base(PoolId(0))[2 * kChunkBytes] = std::byte{9};
  const auto held = bench.memory->files(PoolId(0), ChunkIndex(2));  // as a message on its way would
  bench.memory->free_chunk(PoolId(0), ChunkIndex(2));
  EXPECT_FALSE(bench.memory->chunk_present(PoolId(0), ChunkIndex(2)));
  EXPECT_NE(::fcntl(held->read_write.get(), F_GETFD), -1) << "a queued descriptor stays open";
  ASSERT_TRUE(bench.allocate(PoolId(0), ChunkIndex(2)).ok());
  EXPECT_EQ(bench.memory->base(PoolId(0))[2 * kChunkBytes], std::byte{0});
}

TEST(HostMemory, an_unknown_chunk_has_no_files) {
  Bench bench;
  EXPECT_EQ(bench.memory->files(PoolId(0), ChunkIndex(7)), nullptr);
  EXPECT_EQ(bench.memory->files(PoolId(1), ChunkIndex(0)), nullptr);
  EXPECT_EQ(bench.memory->files(PoolId(9), ChunkIndex(0)), nullptr);
}

TEST(HostMemory, a_bad_numa_node_is_a_clean_error) {
  Bench bench({.huge_pages = HugePages::kOff, .numa_node = 1000});
  EXPECT_TRUE(is_error(bench.allocate(PoolId(0), ChunkIndex(0)), ErrorCode::kMemory));
}

TEST(MemfdMetadata, put_is_seen_through_the_read_only_descriptor) {
  NoDescriptorStore none;
  SilentLog log;
  std::vector<KeptDescriptor> kept;
  auto made = MemfdMetadata::create(100'000, none, kept, log);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_FALSE((*made)->survived());
  const uint64_t words[2] = {0x1122334455667788u, 7};
  (*made)->put(4096, std::as_bytes(std::span(words)));
  void* seen = ::mmap(nullptr, 100'000, PROT_READ, MAP_SHARED, (*made)->read_only_fd(), 0);
  ASSERT_NE(seen, MAP_FAILED);
  EXPECT_EQ(std::memcmp(static_cast<std::byte*>(seen) + 4096, words, sizeof(words)), 0);
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_WRITE, MAP_SHARED, (*made)->read_only_fd(), 0), MAP_FAILED);
  ::munmap(seen, 100'000);
}

// A keeper in a thread, until the end of the scope.
class KeeperThread {
 public:
  explicit KeeperThread(const std::string& path) : KeeperThread(path, silent_) {}
  KeeperThread(const std::string& path, Log& log) : log_(log), stop_(::eventfd(0, EFD_CLOEXEC)) {
    auto made = Keeper::listen(path, log_);
    EXPECT_TRUE(made.ok()) << made.status();
    keeper_ = *std::move(made);
    thread_ = std::thread([this] { keeper_->run(stop_.get()); });
  }
  ~KeeperThread() {
    const uint64_t one = 1;
    (void)!::write(stop_.get(), &one, sizeof(one));
    thread_.join();
  }

 private:
  SilentLog silent_;
  Log& log_;
  FileDescriptor stop_;
  std::unique_ptr<Keeper> keeper_;
  std::thread thread_;
};

TEST(Keeper, memory_and_metadata_outlive_their_daemon) {
  Folder folder;
  KeeperThread keeper(folder / "keeper.sock");
  SilentLog log;
  const uint64_t word = 0xABCDEF;
  {
    auto store = KeeperStore::connect(folder / "keeper.sock", log);
    ASSERT_TRUE(store.ok()) << store.status();
    std::vector<KeptDescriptor> kept = (*store)->take_kept();
    EXPECT_TRUE(kept.empty());
    auto metadata = MemfdMetadata::create(8192, **store, kept, log);
    ASSERT_TRUE(metadata.ok());
    (*metadata)->put(0, std::as_bytes(std::span(&word, 1)));
    Bench bench({.huge_pages = HugePages::kOff}, kGiB, store->get());
    ASSERT_TRUE(bench.allocate(PoolId(0), ChunkIndex(1)).ok());
    ASSERT_TRUE(bench.allocate(PoolId(2), ChunkIndex(5)).ok());
    bench.memory->base(PoolId(0))[kChunkBytes + 5] = std::byte{77};
  }
  auto store = KeeperStore::connect(folder / "keeper.sock", log);
  ASSERT_TRUE(store.ok()) << store.status();
  std::vector<KeptDescriptor> kept = (*store)->take_kept();
  EXPECT_EQ(kept.size(), 3u);
  auto metadata = MemfdMetadata::create(8192, **store, kept, log);
  ASSERT_TRUE(metadata.ok());
  EXPECT_TRUE((*metadata)->survived());
  EXPECT_EQ(std::memcmp((*metadata)->bytes().data(), &word, 8), 0);
  Bench bench({.huge_pages = HugePages::kOff}, kGiB, store->get(), std::move(kept));
  EXPECT_TRUE(bench.memory->chunk_present(PoolId(0), ChunkIndex(1)));
  EXPECT_TRUE(bench.memory->chunk_present(PoolId(2), ChunkIndex(5)));
  EXPECT_FALSE(bench.memory->chunk_present(PoolId(0), ChunkIndex(0)));
  EXPECT_EQ(bench.memory->base(PoolId(0))[kChunkBytes + 5], std::byte{77});
}

TEST(Keeper, a_kept_chunk_of_another_size_is_refused_and_said) {
  Folder folder;
  KeeperThread keeper(folder / "keeper.sock");
  SilentLog log;
  auto store = KeeperStore::connect(folder / "keeper.sock", log);
  ASSERT_TRUE(store.ok());
  FileDescriptor odd(::memfd_create("odd", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(odd.get(), 4096), 0);
  (*store)->keep(chunk_name(PoolId(0), ChunkIndex(0)), odd.get());
  std::vector<KeptDescriptor> kept = (*store)->take_kept();
  ASSERT_EQ(kept.size(), 1u);
  Bench bench({.huge_pages = HugePages::kOff}, kGiB, store->get(), std::move(kept));
  EXPECT_FALSE(bench.memory->chunk_present(PoolId(0), ChunkIndex(0)));
  EXPECT_EQ(bench.log.count("kept_chunk_refused"), 1);
  EXPECT_TRUE((*store)->take_kept().empty()) << "the keeper was told to drop it";
}

TEST(Keeper, malformed_messages_end_their_connection_only) {
  Folder folder;
  KeeperThread keeper(folder / "keeper.sock");
  auto hostile = connect_seqpacket(folder / "keeper.sock");
  ASSERT_TRUE(hostile.ok());
  const std::byte junk[72] = {std::byte{1}};
  send_datagram(hostile->get(), junk, {}, true);
  Datagram end;
  EXPECT_EQ(receive_datagram(hostile->get(), 100, end, true), ReceiveResult::kGone);
  SilentLog log;
  auto store = KeeperStore::connect(folder / "keeper.sock", log);
  ASSERT_TRUE(store.ok());
  EXPECT_TRUE((*store)->take_kept().empty());
  EXPECT_TRUE((*store)->healthy());
}

// A caller of the keeper that says what it is told to, and no more.
FileDescriptor knock(const std::string& path) {
  auto caller = connect_seqpacket(path);
  EXPECT_TRUE(caller.ok()) << caller.status();
  return *std::move(caller);
}
bool say(const FileDescriptor& caller, KeeperVerb verb, const std::string& name, std::span<const int> fds = {}) {
  KeeperMessage message;
  message.verb = verb;
  std::memcpy(message.name, name.data(), name.size());
  return send_datagram(caller.get(), std::as_bytes(std::span(&message, 1)), fds, true) == SendResult::kSent;
}

// A daemon that dies leaves its last messages in its socket; the next one must not be told less than the keeper holds.
TEST(Keeper, a_list_holds_what_was_said_before_it) {
  Folder folder;
  const std::string path = folder / "keeper.sock";
  SilentLog log;
  auto keeper = Keeper::listen(path, log);
  ASSERT_TRUE(keeper.ok()) << keeper.status();
  // All of it is said before the keeper looks: by one that goes on, one that has gone, and one that asks.
  const FileDescriptor memory(::memfd_create("memory", MFD_CLOEXEC));
  const int fd = memory.get();
  const FileDescriptor stays = knock(path);
  FileDescriptor goes = knock(path);
  const FileDescriptor asks = knock(path);
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(say(stays, KeeperVerb::kPut, absl::StrCat("s", i), std::span(&fd, 1)));
    ASSERT_TRUE(say(goes, KeeperVerb::kPut, absl::StrCat("g", i), std::span(&fd, 1)));
  }
  ASSERT_TRUE(say(goes, KeeperVerb::kDrop, "s4"));
  goes.reset();
  ASSERT_TRUE(say(asks, KeeperVerb::kList, ""));
  FileDescriptor stop(::eventfd(0, EFD_CLOEXEC));
  std::thread thread([&] { (*keeper)->run(stop.get()); });
  std::vector<std::string> names;
  Datagram entry;
  KeeperMessage message;
  while (receive_datagram(asks.get(), sizeof(message), entry, true) == ReceiveResult::kReceived) {
    ASSERT_EQ(entry.bytes.size(), sizeof(message));
    std::memcpy(&message, entry.bytes.data(), sizeof(message));
    if (message.verb == KeeperVerb::kEnd) break;
    names.push_back(message.name);
  }
  const uint64_t one = 1;
  ASSERT_EQ(::write(stop.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  thread.join();
  EXPECT_EQ(names, (std::vector<std::string>{"g0", "g1", "g2", "g3", "g4", "s0", "s1", "s2", "s3"}));
}

TEST(Keeper, callers_that_say_nothing_make_room_for_one_that_speaks) {
  Folder folder;
  RecordingLog log;
  KeeperThread keeper(folder / "keeper.sock", log);
  auto first = KeeperStore::connect(folder / "keeper.sock", log);
  ASSERT_TRUE(first.ok());
  EXPECT_TRUE((*first)->take_kept().empty());
  std::vector<FileDescriptor> mute;
  for (size_t i = 0; i < 2 * kKeeperConnectionsMax; ++i) mute.push_back(knock(folder / "keeper.sock"));
  auto second = KeeperStore::connect(folder / "keeper.sock", log);
  ASSERT_TRUE(second.ok());
  EXPECT_TRUE((*second)->take_kept().empty());
  (*first)->tend();
  EXPECT_TRUE((*first)->healthy()) << "who has spoken stays";
  EXPECT_TRUE((*second)->healthy());
  Datagram end;
  EXPECT_EQ(receive_datagram(mute.front().get(), 100, end, true), ReceiveResult::kGone);
  EXPECT_EQ(receive_datagram(mute.back().get(), 100, end), ReceiveResult::kWouldBlock) << "the oldest go first";
  EXPECT_EQ(log.count("keeper_refused"), 0);
}

TEST(Keeper, where_all_have_spoken_the_newest_is_refused) {
  Folder folder;
  RecordingLog log;
  KeeperThread keeper(folder / "keeper.sock", log);
  std::vector<FileDescriptor> callers;
  Datagram answer;
  for (size_t i = 0; i < kKeeperConnectionsMax; ++i) {
    callers.push_back(knock(folder / "keeper.sock"));
    ASSERT_TRUE(say(callers.back(), KeeperVerb::kList, ""));
    ASSERT_EQ(receive_datagram(callers.back().get(), 100, answer, true), ReceiveResult::kReceived);
  }
  const FileDescriptor late = knock(folder / "keeper.sock");
  EXPECT_EQ(receive_datagram(late.get(), 100, answer, true), ReceiveResult::kGone);
  EXPECT_EQ(log.count("keeper_refused"), 1);
  callers.pop_back();
  const FileDescriptor next = knock(folder / "keeper.sock");
  ASSERT_TRUE(say(next, KeeperVerb::kList, ""));
  EXPECT_EQ(receive_datagram(next.get(), 100, answer, true), ReceiveResult::kReceived);
}

TEST(Keeper, without_a_descriptor_it_rests_between_looks_and_takes_the_caller_in_when_there_is_one) {
  Folder folder;
  RecordingLog log;
  KeeperThread keeper(folder / "keeper.sock", log);
  FileDescriptor caller(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = folder / "keeper.sock";
  std::memcpy(address.sun_path, path.data(), path.size());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none_left = before;
  none_left.rlim_cur = static_cast<rlim_t>(caller.get()) + 1;  // the lowest free number was taken last
  const auto began = std::chrono::steady_clock::now();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none_left), 0);
  const bool connected = ::connect(caller.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  const auto give_up = began + std::chrono::seconds(20);
  while (connected && log.count("keeper_accept_failed") < 4 && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
  const auto took = std::chrono::steady_clock::now() - began;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_TRUE(connected);
  EXPECT_GE(log.count("keeper_accept_failed"), 4);
  EXPECT_GE(took, std::chrono::milliseconds(300)) << "three rests of 100 ms";
  ASSERT_TRUE(say(caller, KeeperVerb::kList, ""));
  Datagram answer;
  EXPECT_EQ(receive_datagram(caller.get(), 100, answer, true), ReceiveResult::kReceived);
}

TEST(Keeper, a_wait_that_fails_does_not_end_it) {
  Folder folder;
  RecordingLog log;
  KeeperThread keeper(folder / "keeper.sock", log);
  const FileDescriptor caller = knock(folder / "keeper.sock");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit fewer_than_watched = before;
  fewer_than_watched.rlim_cur = 1;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &fewer_than_watched), 0);
  const bool said = say(caller, KeeperVerb::kList, "");  // wakes it: the next wait is refused
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (log.count("keeper_wait_failed") == 0 && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(said);
  EXPECT_GE(log.count("keeper_wait_failed"), 1);
  Datagram answer;
  EXPECT_EQ(receive_datagram(caller.get(), 100, answer, true), ReceiveResult::kReceived);
}

TEST(Keeper, holds_as_many_as_the_limit_of_open_files_has_room_for_and_says_when_it_is_full) {
  Folder folder;
  RecordingLog log;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = kKeeperConnectionsMax + 16;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const absl::Status too_few = Keeper::listen(folder / "none.sock", log).status();
  few.rlim_cur += 2;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  KeeperThread keeper(folder / "keeper.sock", log);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(is_error(too_few, ErrorCode::kMemory)) << too_few;
  EXPECT_THAT(std::string(too_few.message()), HasSubstr("the limit of open files is 80"));
  FileDescriptor fd(::memfd_create("x", MFD_CLOEXEC));
  const int raw = fd.get();
  const FileDescriptor caller = knock(folder / "keeper.sock");
  Datagram answer;
  EXPECT_TRUE(say(caller, KeeperVerb::kPut, "a", std::span(&raw, 1)));
  EXPECT_TRUE(say(caller, KeeperVerb::kPut, "b", std::span(&raw, 1)));
  EXPECT_TRUE(say(caller, KeeperVerb::kPut, "b", std::span(&raw, 1))) << "a name that is held takes no more room";
  EXPECT_TRUE(say(caller, KeeperVerb::kPut, "c", std::span(&raw, 1)));
  EXPECT_EQ(receive_datagram(caller.get(), 100, answer, true), ReceiveResult::kGone);
  EXPECT_EQ(log.count("keeper_full"), 1);
}

TEST(Keeper, a_caller_that_does_not_read_its_list_is_closed_and_others_are_served) {
  Folder folder;
  SilentLog log;
  KeeperThread keeper(folder / "keeper.sock");
  FileDescriptor fd(::memfd_create("x", MFD_CLOEXEC));
  const int raw = fd.get();
  constexpr int kEntries = 600;  // more than a socket's buffer takes
  const FileDescriptor deaf = knock(folder / "keeper.sock");
  for (int i = 0; i < kEntries; ++i) ASSERT_TRUE(say(deaf, KeeperVerb::kPut, "chunk-" + std::to_string(i), std::span(&raw, 1)));
  ASSERT_TRUE(say(deaf, KeeperVerb::kList, ""));
  pollfd begun{deaf.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&begun, 1, 20'000), 1) << "the list begins once all are held";
  const FileDescriptor other = knock(folder / "keeper.sock");
  ASSERT_TRUE(say(other, KeeperVerb::kList, ""));
  const auto entries_of = [](const FileDescriptor& caller, ReceiveResult& last) {
    int entries = 0;
    for (Datagram datagram;;) {
      last = receive_datagram(caller.get(), sizeof(KeeperMessage) + 1, datagram, true);
      if (last != ReceiveResult::kReceived || datagram.fds.empty()) return entries;
      ++entries;
    }
  };
  ReceiveResult last = ReceiveResult::kGone;
  EXPECT_EQ(entries_of(other, last), kEntries);
  EXPECT_EQ(last, ReceiveResult::kReceived) << "the end of the list";
  EXPECT_LT(entries_of(deaf, last), kEntries);
  EXPECT_EQ(last, ReceiveResult::kGone);
}

TEST(Keeper, that_goes_away_while_it_says_what_it_holds_is_not_taken_for_an_empty_one) {
  Folder folder;
  RecordingLog log;
  auto listener = listen_seqpacket(folder / "keeper.sock");
  ASSERT_TRUE(listener.ok());
  auto store = KeeperStore::connect(folder / "keeper.sock", log);
  ASSERT_TRUE(store.ok());
  FileDescriptor(::accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
  EXPECT_TRUE((*store)->take_kept().empty());
  EXPECT_FALSE((*store)->healthy()) << "so that a daemon does not start on it";
  EXPECT_EQ(log.count("keeper_lost"), 1);
}

TEST(Keeper, a_second_keeper_at_the_same_place_is_refused_and_a_dead_one_s_socket_is_replaced) {
  Folder folder;
  SilentLog log;
  {
    KeeperThread keeper(folder / "keeper.sock");
    EXPECT_TRUE(is_error(Keeper::listen(folder / "keeper.sock", log).status(), ErrorCode::kConflict));
  }
  {
    auto abandoned = listen_seqpacket(folder / "keeper.sock");  // closed without unlink, as a kill would
    ASSERT_TRUE(abandoned.ok());
  }
  EXPECT_TRUE(Keeper::listen(folder / "keeper.sock", log).ok());
}

TEST(Keeper, a_lost_keeper_is_noticed_and_the_daemon_serves_on) {
  Folder folder;
  RecordingLog log;
  std::unique_ptr<KeeperStore> store;
  {
    KeeperThread keeper(folder / "keeper.sock");
    store = *KeeperStore::connect(folder / "keeper.sock", log);
  }
  FileDescriptor fd(::memfd_create("x", MFD_CLOEXEC));
  store->keep("pool-0-chunk-0", fd.get());
  EXPECT_FALSE(store->healthy());
  EXPECT_EQ(log.count("keeper_lost"), 1);
}

TEST(Keeper, that_was_restarted_is_given_everything_again) {
  Folder folder;
  RecordingLog log;
  std::unique_ptr<KeeperStore> store;
  FileDescriptor before(::memfd_create("before", MFD_CLOEXEC));
  FileDescriptor during(::memfd_create("during", MFD_CLOEXEC));
  FileDescriptor dropped(::memfd_create("dropped", MFD_CLOEXEC));
  {
    KeeperThread keeper(folder / "keeper.sock");
    store = *KeeperStore::connect(folder / "keeper.sock", log);
    store->keep("before", before.get());
    store->keep("dropped", dropped.get());
  }
  store->tend();
  EXPECT_FALSE(store->healthy()) << "an idle daemon notices too";
  store->keep("during", during.get());
  store->drop("dropped");
  store->tend();
  EXPECT_FALSE(store->healthy()) << "nobody listens yet";
  KeeperThread keeper(folder / "keeper.sock");
  store->tend();
  EXPECT_TRUE(store->healthy());
  EXPECT_EQ(log.count("keeper_lost"), 1);
  EXPECT_EQ(log.count("keeper_found_again"), 1);
  auto next = *KeeperStore::connect(folder / "keeper.sock", log);
  const std::vector<KeptDescriptor> kept = next->take_kept();
  ASSERT_EQ(kept.size(), 2u);
  const auto inode = [](int fd) {
    struct stat found {};
    ::fstat(fd, &found);
    return found.st_ino;
  };
  EXPECT_EQ(kept[0].name, "before");
  EXPECT_EQ(inode(kept[0].fd.get()), inode(before.get()));
  EXPECT_EQ(kept[1].name, "during");
  EXPECT_EQ(inode(kept[1].fd.get()), inode(during.get()));
}

// What systemd would receive.
TEST(SystemdStore, keeps_and_drops_by_name_and_takes_back_what_it_was_started_with) {
  Folder folder;
  const std::string path = folder / "notify";
  FileDescriptor manager(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  ASSERT_EQ(::bind(manager.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  SilentLog log;
  SystemdStore store(path, "", "", "", log);
  FileDescriptor fd(::memfd_create("x", MFD_CLOEXEC));
  store.keep("metadata", fd.get());
  Datagram datagram;
  const auto text = [&] { return std::string(reinterpret_cast<const char*>(datagram.bytes.data()), datagram.bytes.size()); };
  ASSERT_EQ(receive_datagram(manager.get(), 4096, datagram, true), ReceiveResult::kReceived);
  EXPECT_EQ(text(), "FDSTOREREMOVE=1\nFDNAME=metadata");
  ASSERT_EQ(receive_datagram(manager.get(), 4096, datagram, true), ReceiveResult::kReceived);
  EXPECT_EQ(text(), "FDSTORE=1\nFDNAME=metadata");
  EXPECT_EQ(datagram.fds.size(), 1u);
  store.drop("metadata");
  ASSERT_EQ(receive_datagram(manager.get(), 4096, datagram, true), ReceiveResult::kReceived);
  EXPECT_EQ(text(), "FDSTOREREMOVE=1\nFDNAME=metadata");
  EXPECT_TRUE(store.notify("READY=1"));
  EXPECT_TRUE(store.take_kept().empty()) << "descriptors meant for another process are not taken";
}

TEST(AvailableMemory, is_positive_and_at_most_the_machine) {
  const int64_t available = available_memory_bytes();
  EXPECT_GT(available, 0);
  EXPECT_LE(available, int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE));
}

}  // namespace
}  // namespace needle::server
