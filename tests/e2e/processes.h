// Real daemons and real client processes for end-to-end tests.
//
// What must stay true:
//  1. Every process started here is dead, and its folder gone, when its object is: also after a failed test.
//  2. Waiting is for a condition with a deadline (eventually()), never for a time.
//  3. What a test can't go on without (a daemon that answers, an attached client) throws, which ends that test at once
//     with the reason and the daemons' logs.
//  4. Pages are filled with words that say (sequence, page position, word), so that a reader can tell whose bytes it sees.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "client/client.h"
#include "proto/attach.h"
#include "proto/needle.grpc.pb.h"
#include "tests/free_port.h"

extern char** environ;

namespace needle::testing {

inline double steady_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Asks until `condition` holds or the deadline passed; true when it held.
inline bool eventually(double seconds, const std::function<bool()>& condition) {
  const double deadline = steady_seconds() + seconds;
  while (!condition()) {
    if (steady_seconds() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

inline pid_t spawn(const std::vector<std::string>& arguments, int standard_in, int standard_out, const std::string& log) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (standard_in >= 0) posix_spawn_file_actions_adddup2(&actions, standard_in, 0);
  if (standard_out >= 0) {
    posix_spawn_file_actions_adddup2(&actions, standard_out, 1);
  } else {
    posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  }
  posix_spawn_file_actions_addopen(&actions, 2, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  pid_t pid = -1;
  EXPECT_EQ(posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), environ), 0) << arguments[0];
  posix_spawn_file_actions_destroy(&actions);
  return pid;
}

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "needle-e2e.XXXXXX").string();
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  ~Folder() {
    if (::testing::Test::HasFailure()) {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(path_)) {
        if (entry.path().extension() != ".log") continue;
        std::ifstream log(entry.path());
        std::fprintf(stderr, "--- %s\n", entry.path().filename().c_str());
        for (std::string line; std::getline(log, line);) std::fprintf(stderr, "%s\n", line.c_str());
      }
    }
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// One needled. Small pools by default: 128 MiB of full-size pages of finished keys.
class DaemonProcess {
 public:
  DaemonProcess(const Folder& folder, std::string name, std::string config, std::string host = "127.0.0.1")
      : folder_(folder.path() / name), name_(std::move(name)), host_(std::move(host)), grpc_port_(free_port()), metrics_port_(free_port()) {
    std::filesystem::create_directories(folder_);
    std::ofstream(folder_ / "needled.toml") << config;
  }
  ~DaemonProcess() {
    kill(SIGCONT);
    kill(SIGKILL);
    wait();
  }

  static std::string default_config(int64_t budget_mib = 128) {
    // 8 MiB more than the chunks: scratch, and so that an eighth of the rest is two whole chunks.
    return "[memory]\nbytes = \"" + std::to_string(budget_mib + 8) +
           "M\"\nscratch_bytes = \"1M\"\nchunk_bytes = \"8M\"\n[pool.default]\nmodel = \"raw\"\nratio_paged = 6\nratio_window = "
           "1\nratio_state = 1\n";
  }

  void add_argument(const std::string& argument) { extra_.push_back(argument); }
  // Takes the place of what start() would say for this flag: a value is given once.
  void replace_argument(const std::string& flag, const std::string& value) { replaced_[flag] = value; }
  void run_under(std::vector<std::string> launcher) { launcher_ = std::move(launcher); }  // which execs the daemon in its place
  void know_peer(const DaemonProcess& peer) { add_argument("--peer=" + peer.name_ + "=" + peer.grpc_address()); }

  void start() {
    std::vector<std::string> arguments = {NEEDLE_NEEDLED,
                                          "--config",
                                          (folder_ / "needled.toml").string(),
                                          "--node-name",
                                          name_,
                                          "--node-runtime-dir",
                                          folder_.string(),
                                          "--listen-grpc",
                                          grpc_address(),
                                          "--listen-metrics",
                                          host_ + ":" + std::to_string(metrics_port_)};
    for (size_t i = 0; i + 1 < arguments.size(); ++i) {
      if (replaced_.count(arguments[i]) > 0) arguments[i + 1] = replaced_.at(arguments[i]);
    }
    arguments.insert(arguments.end(), extra_.begin(), extra_.end());
    arguments.insert(arguments.begin(), launcher_.begin(), launcher_.end());
    pid_ = spawn(arguments, -1, -1, (folder_ / "needled.log").string());
    const bool settled = eventually(20, [&] { return answers() || !running(); });
    if (running() && settled) return;
    // With the log in it: this object and its folder may be gone before the test is known to have failed.
    std::ifstream log(folder_ / "needled.log");
    throw std::runtime_error(name_ + (running() ? " did not answer within 20 s:\n" : " ended before it answered:\n") +
                             std::string(std::istreambuf_iterator<char>(log), {}));
  }
  bool answers() {
    v1::StatusReply reply;
    return read_status(reply);
  }

  void kill(int signal) {
    if (pid_ > 0) ::kill(pid_, signal);
  }
  int wait() {
    int status = 0;
    if (pid_ > 0) ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }
  bool running() const {
    siginfo_t ended{};
    return pid_ > 0 && ::waitid(P_PID, static_cast<id_t>(pid_), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == 0;
  }

  const std::string& host() const { return host_; }
  std::string grpc_address() const { return host_ + ":" + std::to_string(grpc_port_); }
  std::string attach_socket() const { return (folder_ / attach::kAttachSocketName).string(); }
  std::string grpc_socket() const { return (folder_ / attach::kGrpcSocketName).string(); }
  int grpc_port() const { return grpc_port_; }
  int metrics_port() const { return metrics_port_; }
  const std::string& name() const { return name_; }
  pid_t pid() const { return pid_; }

  template <class Request, class Reply>
  grpc::Status operate(grpc::Status (v1::Operator::Stub::*verb)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
                       Reply* reply) const {
    const auto channel = grpc::CreateChannel("unix:" + grpc_socket(), grpc::InsecureChannelCredentials());
    v1::Operator::Stub stub(channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    return (stub.*verb)(&context, request, reply);
  }
  bool read_status(v1::StatusReply& reply) const { return operate(&v1::Operator::Stub::Status, v1::Empty(), &reply).ok(); }

  v1::Occupancy occupancy(const std::string& kind, const std::string& pool = "default") const {
    v1::StatusReply reply;
    EXPECT_TRUE(read_status(reply)) << name_;
    for (const auto& set : reply.sets()) {
      if (set.name() != pool) continue;
      for (const auto& found : set.pools()) {
        if (found.kind() == kind) return found;
      }
    }
    ADD_FAILURE() << "no pool " << pool << " " << kind << " at " << name_;
    return {};
  }
  uint64_t counter(const std::string& wanted) const {
    v1::StatusReply reply;
    EXPECT_TRUE(read_status(reply)) << name_;
    for (const auto& counter : reply.counters()) {
      if (counter.name() == wanted) return counter.value();
    }
    return 0;
  }
  bool log_has(const std::string& text) const {
    std::ifstream log(folder_ / "needled.log");
    for (std::string line; std::getline(log, line);) {
      if (line.find(text) != std::string::npos) return true;
    }
    return false;
  }
  bool peer_is(const std::string& peer, const std::string& state) const {
    v1::PeersReply reply;
    if (!operate(&v1::Operator::Stub::Peers, v1::Empty(), &reply).ok()) return false;
    for (const auto& found : reply.peers()) {
      if (found.name() == peer) return found.state() == state;
    }
    return false;
  }
  // Nothing is reserved, leased or draining in any pool.
  bool at_rest() const {
    v1::StatusReply reply;
    if (!read_status(reply)) return false;
    for (const auto& set : reply.sets()) {
      for (const auto& pool : set.pools()) {
        if (pool.reserved() + pool.leased() + pool.draining() != 0) return false;
      }
    }
    return true;
  }
  void expect_sums() const {
    v1::StatusReply reply;
    ASSERT_TRUE(read_status(reply));
    for (const auto& set : reply.sets()) {
      for (const auto& pool : set.pools()) {
        EXPECT_EQ(pool.free() + pool.reserved() + pool.sealed_idle() + pool.leased() + pool.draining(), pool.capacity())
            << name_ << " " << set.name() << " " << pool.kind();
      }
    }
    v1::Empty empty;
    const grpc::Status audit = operate(&v1::Operator::Stub::Audit, v1::Empty(), &empty);
    EXPECT_TRUE(audit.ok()) << audit.error_message();
  }

  client::AttachOptions attach_options(const std::string& client_name = "test", bool writable = true) const {
    client::AttachOptions options;
    options.socket = attach_socket();
    options.client_name = client_name;
    options.writable = writable;
    return options;
  }
  std::unique_ptr<client::Client> attach(const std::string& client_name = "test", bool writable = true) const {
    auto client = client::Client::attach(attach_options(client_name, writable));
    if (!client.ok()) throw std::runtime_error(std::string(client.status().message()));
    return *std::move(client);
  }

 private:
  std::filesystem::path folder_;
  std::string name_;
  std::string host_;
  int grpc_port_;
  int metrics_port_;
  std::vector<std::string> launcher_;
  std::vector<std::string> extra_;
  std::map<std::string, std::string> replaced_;
  pid_t pid_ = -1;
};

// Ports of the IPv4 sockets of a process that listen at this very address, as the kernel tells (gRPC's are IPv6 sockets).
inline std::set<int> listening_ports(pid_t pid, const std::string& host) {
  std::set<std::string> sockets;  // "socket:[inode]"
  for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd")) {
    std::error_code closed_meanwhile;
    sockets.insert(std::filesystem::read_symlink(entry.path(), closed_meanwhile).string());
  }
  in_addr wanted{};
  EXPECT_EQ(::inet_pton(AF_INET, host.c_str(), &wanted), 1);
  std::ifstream table("/proc/" + std::to_string(pid) + "/net/tcp");
  std::set<int> ports;
  for (std::string line; std::getline(table, line);) {
    unsigned address = 0;
    unsigned port = 0;
    unsigned state = 0;
    unsigned long inode = 0;
    if (std::sscanf(line.c_str(), " %*d: %8X:%4X %*8X:%*4X %2X %*s %*s %*s %*s %*s %lu", &address, &port, &state, &inode) != 4) continue;
    constexpr unsigned kListen = 0x0A;
    if (state == kListen && address == wanted.s_addr && sockets.count("socket:[" + std::to_string(inode) + "]") > 0)
      ports.insert(static_cast<int>(port));
  }
  return ports;
}

// A client in a process of its own, driven line by line (client_process.cc), so that a test may kill or stop it.
class ClientProcess {
 public:
  explicit ClientProcess(const Folder& folder, const std::string& name) {
    int in[2];
    int out[2];
    EXPECT_EQ(::pipe2(in, O_CLOEXEC), 0);
    EXPECT_EQ(::pipe2(out, O_CLOEXEC), 0);
    pid_ = spawn({NEEDLE_E2E_CLIENT}, in[0], out[1], (folder.path() / (name + ".log")).string());
    ::close(in[0]);
    ::close(out[1]);
    to_ = in[1];
    from_ = out[0];
  }
  ~ClientProcess() {
    if (pid_ > 0) {
      ::kill(pid_, SIGCONT);
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(to_);
    ::close(from_);
  }

  void say(const std::string& line) {
    const std::string text = line + "\n";
    EXPECT_EQ(::write(to_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  std::string hear() {  // one line, "" at the process's end
    std::string line;
    char c = 0;
    while (::read(from_, &c, 1) == 1) {
      if (c == '\n') return line;
      line.push_back(c);
    }
    return line;
  }
  std::string ask(const std::string& line) {
    say(line);
    return hear();
  }
  void expect_ok(const std::string& line) {
    const std::string answer = ask(line);
    EXPECT_EQ(answer.substr(0, 2), "ok") << line << " -> " << answer;
  }

  void kill(int signal) { ::kill(pid_, signal); }
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int to_ = -1;
  int from_ = -1;
};

// The word at `word` of the page at `position` of a sequence.
inline uint64_t page_word(uint64_t sequence, uint64_t position, uint64_t word) {
  return (sequence * 0x9E3779B97F4A7C15ull) ^ (position << 40) ^ word;
}

inline void fill_page(std::byte* page, int64_t bytes, uint64_t sequence, uint64_t position) {
  auto* words = reinterpret_cast<uint64_t*>(page);
  for (int64_t word = 0; word < bytes / 8; ++word) words[word] = page_word(sequence, position, static_cast<uint64_t>(word));
}

inline bool page_is(const std::byte* page, int64_t bytes, uint64_t sequence, uint64_t position) {
  const auto* words = reinterpret_cast<const uint64_t*>(page);
  for (int64_t word = 0; word < bytes / 8; ++word) {
    if (words[word] != page_word(sequence, position, static_cast<uint64_t>(word))) return false;
  }
  return true;
}

// Fills every page of a ticket: paged by position, window pages as 1000 + ring place, state as 2000.
inline void fill_ticket(client::Client& client, const client::Ticket& ticket, uint64_t sequence) {
  const auto base = [&](PoolKind kind) { return client.writable_layer(kind, 0, 0)->base; };
  const auto stride = [&](PoolKind kind) { return client.layout(kind).stride_bytes(); };
  const client::Pages& pages = ticket.pages();
  for (size_t i = 0; i < pages.paged.size(); ++i) {
    fill_page(base(PoolKind::kPaged) + stride(PoolKind::kPaged) * pages.paged[i].index.value(), stride(PoolKind::kPaged), sequence, i);
  }
  for (size_t i = 0; i < pages.window.size(); ++i) {
    fill_page(base(PoolKind::kWindow) + stride(PoolKind::kWindow) * pages.window[i].index.value(), stride(PoolKind::kWindow), sequence,
              1000 + i);
  }
  if (!pages.state.index.is_none()) {
    fill_page(base(PoolKind::kState) + stride(PoolKind::kState) * pages.state.index.value(), stride(PoolKind::kState), sequence, 2000);
  }
}

inline constexpr int64_t kPage = 256;  // tokens a page, of the daemons here

// Stores `tokens` tokens of words that name `sequence`, sealed.
inline void store(client::Client& client, uint64_t sequence, int64_t tokens) {
  CallerThread here;
  absl::StatusOr<client::Ticket> ticket = client.reserve(SequenceId(sequence), tokens);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  fill_ticket(client, *ticket, sequence);
  const absl::Status sealed = ticket->seal(tokens, {}, here);
  ASSERT_TRUE(sealed.ok()) << sealed;
}

// Whether every paged page under a lease holds its sequence's words.
inline bool lease_is(client::Client& client, const client::Pages& pages, uint64_t sequence) {
  const LayerView layer = client.layer(PoolKind::kPaged, 0, 0);
  for (size_t i = 0; i < pages.paged.size(); ++i) {
    if (!page_is(layer.base + layer.page_stride * pages.paged[i].index.value(), layer.page_stride, sequence, i)) return false;
  }
  return true;
}

}  // namespace needle::testing
