// The attach socket: processes of this host come here for a session, memory descriptors and a secret, and their life and
// death is watched here. The messages are in proto/attach.h.
//
// One thread of its own (epoll). It posts messages to the core and takes the core's answers and events over a queue, so
// the order in which the core said things is the order in which a client hears them.
//
// What must stay true:
//  1. Credentials are checked at accept, before a byte is read: the daemon's user, root, or a listed user.
//  2. The end of a connection is silence, not death: SessionLost at once, ProcessDied when the pidfd says so, and in between
//     the client's pages stay pinned. After a clean Detach or Acknowledge neither is posted.
//  3. A client hears of a chunk (Welcome, Chunks) with its descriptors, and of nothing that the core did not say.
//  4. Everything has a bound: connections, message size, messages waiting for a client that doesn't read (it is then
//     disconnected, which is silence), and connections without a session, in number for each user and in time: one that
//     says no Hello, or stays after its session's end, is closed after hello_ms.
//  5. Where a descriptor cannot be had, callers wait at the door: the thread looks again later and doesn't spin.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "proto/attach.h"
#include "server/attach/process_watch.h"
#include "server/attach/session_registry.h"
#include "server/memory/file_descriptor.h"
#include "server/memory/host_memory.h"
#include "server/messages.h"

namespace needle::server {

struct Datagram;

struct AttachPoolSet {
  std::string name;
  std::string format;                              // canonical texts
  std::array<int64_t, kPoolKinds> words_offset{};  // of the page words in the metadata region
  std::array<int64_t, kPoolKinds> page_count_max{};
  // Whether clients map this pool. A format without state has bare commit records, which are the daemon's alone: such a
  // pool is announced with stride 0, its chunks are not sent, and its unmapping is answered here.
  std::array<bool, kPoolKinds> mapped{true, true, true};
};

struct AttachOptions {
  std::string path;
  std::vector<uint32_t> uids;  // besides our own and root; where any is named, every user may knock at `path`
  int64_t connections_max = 1024;
  int64_t messages_waiting_max = 4096;
  int64_t hello_ms = 5'000;          // a client library says Hello right after it connected; this is a stopped or a hostile one
  int64_t hellos_waiting_max = 128;  // for each user, so that one of `uids` cannot shut out another: as many as may wait to be accepted
  std::string node;
  std::string grpc_target;            // told to our own user and root: the Unix socket, at which operators are heard too
  std::string grpc_target_of_others;  // told to the users of `uids`
  std::string build;
};

class AttachServer {
 public:
  using Post = std::function<absl::Status(Message)>;  // to the loop; any thread

  // What a client gets: descriptors of chunks (null when absent by now) and of the metadata region.
  struct Sources {
    std::function<std::shared_ptr<const ChunkFiles>(PoolId, ChunkIndex)> chunk_files;
    int metadata_fd = -1;
    int64_t metadata_bytes = 0;
  };

  static absl::StatusOr<std::unique_ptr<AttachServer>> start(AttachOptions options, std::vector<AttachPoolSet> sets, Sources sources,
                                                             SessionRegistry& registry, Post post, Log& log);
  ~AttachServer();  // stops: connections close, which clients take for the daemon's end

  // From the core's outbox, on the loop thread. Never blocks. True when the session has a connection or is being attached.
  void to_session(SessionId session, SessionEvent event);

  // A session that was rebuilt after a restart: its process is watched until it attaches again or dies.
  void watch_survivor(SessionId session, const ProcessIdentity& identity);

  // A session ended by another door (RPC Acknowledge or CloseSession).
  void forget(SessionId session);

  int64_t connections() const { return connections_now_.load(std::memory_order_relaxed); }
  int64_t without_session() const { return without_session_now_.load(std::memory_order_relaxed); }
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  uint64_t hellos_overdue() const { return hellos_overdue_.load(std::memory_order_relaxed); }

 private:
  struct Connection;
  struct Outgoing;
  enum class ConnectionState { kNew, kAttaching, kAttached, kEnding, kEnded };  // kEnding: Detach or Acknowledge is on its way

  AttachServer(AttachOptions options, std::vector<AttachPoolSet> sets, Sources sources, SessionRegistry& registry, Post post, Log& log);
  void serve();
  void run_on_thread(std::function<void()> work);  // any thread
  int wait_ms() const;
  void set_state(Connection& connection, ConnectionState state);
  void close_overdue();
  void accept_clients();
  void listen_later(int error);
  void read_from(uint64_t key);
  void handle(Connection& connection, Datagram& datagram);
  void hello(Connection& connection, uint32_t request, attach::Reader reader);
  void attached(uint64_t key, uint32_t request, size_t set, absl::StatusOr<Attach::Reply> reply, ProcessIdentity process,
                std::string client);
  void send_chunks(Connection& connection, PoolId pool, const std::vector<ChunkIndex>& chunks, uint32_t* sent);
  void deliver(SessionId session, const SessionEvent& event);
  void answer(Connection& connection, uint32_t request, const absl::Status& status);
  void send(Connection& connection, Outgoing message);
  void flush(Connection& connection);
  void close_connection(uint64_t key);
  void process_died(uint64_t key);
  void ended(SessionId session);
  template <class Request>
  void post_call(uint64_t key, uint32_t request, Request message, bool ends_session);
  void watch_fd(int fd, uint64_t tag, uint32_t events);

  const AttachOptions options_;
  const std::vector<AttachPoolSet> sets_;
  const Sources sources_;
  SessionRegistry& registry_;
  const Post post_;
  Log& log_;

  FileDescriptor listener_;
  FileDescriptor epoll_;
  FileDescriptor wake_;
  std::thread thread_;
  Mutex mutex_;
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  // The server's thread only.
  uint64_t next_key_ = 16;
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::map<uint64_t, uint64_t> by_session_;  // session -> connection key
  struct Watched {
    SessionId session;
    FileDescriptor pidfd;
  };
  std::map<uint64_t, Watched> watched_;                     // key -> process whose session has no connection
  std::map<uint32_t, int64_t> hellos_waiting_;              // user -> connections in kNew
  std::set<std::pair<int64_t, uint64_t>> without_session_;  // (deadline, key) of those in kNew and kEnded
  int64_t listen_again_ns_ = 0;                             // 0: the listener is watched
  SteadyClock clock_;                                       // epoll_wait counts in it too
  std::atomic<int64_t> connections_now_{0};
  std::atomic<int64_t> without_session_now_{0};
  std::atomic<uint64_t> hellos_overdue_{0};
  std::atomic<uint64_t> refused_{0};
};

}  // namespace needle::server
