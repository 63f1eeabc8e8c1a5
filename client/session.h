// One attached session: the socket, the mappings, the RPC channel and the thread that serves the daemon's wishes.
// Internal to the library; shared by a Client and every Ticket, Lease and Ship made from it.
//
// What must stay true:
//  1. Addresses of pools are reserved once, for chunks_max chunks, and never move: a re-attach maps into the same range.
//  2. A chunk is unmapped only when every Launch that began before the daemon asked has ended; then the daemon is told.
//  3. `rights` counts the sessions this object went through. A handle made under an older one answers STALE, except a
//     lease whose every page the new daemon still holds.
//  4. The mutex guards bookkeeping alone; it is never held across an RPC, a mapping call or a callback.
//  5. A re-attach happens while no Launch is open; one that would begin meanwhile waits a bounded time. What the daemon does
//     not name afterwards is unmapped before the next Launch.
//  6. A right that the caller gave up is ended at the daemon sooner or later, also when an answer is lost: unanswered ends
//     are repeated at every heartbeat while the session lives.
//
// Threads: public members may be called from any thread; the event thread alone reads the socket.
#pragma once

#include <grpcpp/grpcpp.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "client/client.h"
#include "proto/attach.h"
#include "proto/errors.h"
#include "proto/needle.grpc.pb.h"
#include "proto/read_counters.h"

namespace needle::client {

class Session : public std::enable_shared_from_this<Session> {
 public:
  struct Pool {
    attach::PoolWire wire;
    std::byte* read_base = nullptr;   // reserved range of the read-only view
    std::byte* write_base = nullptr;  // of the read-write view; null for read-only clients
    int64_t page_count = 0;           // page ids are below this
    int64_t slots_of_words = 0;
  };

  static absl::StatusOr<std::shared_ptr<Session>> open(const AttachOptions& options);
  ~Session();
  void close();  // Detach, join, unmap. Idempotent

  const ModelFormats& formats() const { return formats_; }
  const PageLayout& layout(PoolKind kind) const { return layouts_[static_cast<size_t>(kind)]; }
  bool has_pool(PoolKind kind) const { return pools_[static_cast<size_t>(kind)].wire.page_bytes > 0; }
  const Pool& pool(PoolKind kind) const { return pools_[static_cast<size_t>(kind)]; }
  bool writable() const { return options_.writable; }
  int64_t call_ms() const { return options_.call_ms; }
  std::string node() const;
  std::string build() const;
  attach::ReadCounters* counters() const;  // null until mapped
  void count_stale_read();                 // a read that was refused because its rights are gone

  // ---- launches
  absl::Status begin_launch(uint64_t& launch);
  void end_launch(uint64_t launch);

  // ---- rights
  uint64_t rights() const { return rights_.load(std::memory_order_acquire); }
  // OK where `rights` is the session's present one.
  absl::Status check_rights(uint64_t rights) const;
  void remember_lease(LeaseId lease, const Pages& pages);
  // The daemon's id of a lease now, or STALE; `last` says that no other lease of ours shares it.
  absl::StatusOr<uint64_t> lease_now(LeaseId lease) const;
  absl::StatusOr<uint64_t> forget_lease(LeaseId lease, bool& last);

  // Ends a ticket, lease or ship of the present session, or one that was perhaps never granted: its id is spent either way.
  // An end that is not answered is repeated later.
  enum class Right : uint8_t { kTicket, kLease, kShip };
  absl::Status end_right(Right right, uint64_t id, int64_t deadline_ms);

  // One RPC of needle.v1.Needle with the session's metadata and a deadline. Retried with the same ids while the daemon
  // cannot be reached and the deadline allows: every verb is idempotent.
  template <class Request, class Reply>
  absl::Status call(grpc::Status (v1::Needle::Stub::*verb)(grpc::ClientContext*, const Request&, Reply*), const Request& request,
                    Reply* reply, int64_t deadline_ms) {
    return call_until([&](v1::Needle::Stub& stub, grpc::ClientContext& context) { return (stub.*verb)(&context, request, reply); },
                      deadline_ms);
  }

  static uint64_t random_id();  // never 0

 private:
  enum class State { kLive, kRevoked, kLost, kClosed };
  struct Ending {
    Right right;
    uint64_t id;
    uint64_t rights;
  };
  struct LeaseRow {
    std::vector<attach::PageRefWire> pages;
    uint64_t current = 0;
    uint64_t rights = 0;
  };

  explicit Session(const AttachOptions& options);
  absl::Status connect_and_hello(bool again);
  bool pause_launches();  // true: none is open, and none begins until resume_launches()
  void resume_launches();
  absl::Status receive_welcome(bool again, const std::vector<attach::PageRefWire>& held, uint64_t held_lease, int64_t deadline_ns);
  absl::Status map_chunks(const attach::Chunks& chunks, const uint32_t* indices, std::vector<int>& fds);
  void unmap_chunk(uint32_t pool, uint32_t chunk);
  void unmap_everything();
  void serve();            // the event thread
  bool handle_datagram();  // false: the socket ended
  void finish_retirements();
  void repeat_an_ending();
  void begin_revocation(const std::string& cause);
  absl::Status send(attach::Type type, const void* body, size_t size, uint32_t request);
  absl::Status call_until(const std::function<grpc::Status(v1::Needle::Stub&, grpc::ClientContext&)>& verb, int64_t deadline_ms);
  void log(LogLevel level, std::string_view event, const std::string& detail);

  const AttachOptions options_;
  const uint64_t instance_ = random_id();
  ModelFormats formats_;
  std::array<PageLayout, 3> layouts_;
  std::array<Pool, 3> pools_;
  const std::byte* metadata_ = nullptr;
  int64_t metadata_bytes_ = 0;
  std::atomic<attach::ReadCounters*> counters_{nullptr};

  int socket_ = -1;  // event thread's, after open()
  int wake_ = -1;    // eventfd: a launch ended, or close()
  int64_t heartbeat_ms_ = 500;
  std::thread thread_;

  mutable Mutex mutex_;
  Condition changed_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kLost;
  std::string cause_ ABSL_GUARDED_BY(mutex_);  // of the last revocation or loss
  uint64_t session_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string secret_ ABSL_GUARDED_BY(mutex_);
  std::string node_ ABSL_GUARDED_BY(mutex_);
  std::string build_ ABSL_GUARDED_BY(mutex_);
  std::string target_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<grpc::Channel> channel_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, LeaseRow> leases_ ABSL_GUARDED_BY(mutex_);  // by the id the caller knows
  uint64_t launch_next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::multiset<uint64_t> launches_ ABSL_GUARDED_BY(mutex_);  // open ones, by order of beginning
  struct Retirement {
    uint32_t pool;
    uint32_t chunk;
    uint64_t after;  // launches below this must end first
  };
  std::vector<Retirement> retirements_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<uint32_t, uint32_t>> mapped_ ABSL_GUARDED_BY(mutex_);  // (pool, chunk)
  std::deque<Ending> endings_ ABSL_GUARDED_BY(mutex_);                      // asked for and not answered
  uint64_t stale_reads_waiting_ ABSL_GUARDED_BY(mutex_) = 0;                // counted when there is a session to count them in
  bool pausing_ ABSL_GUARDED_BY(mutex_) = false;                            // a re-attach waits for launches, or is under way
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<uint64_t> rights_{0};
};

}  // namespace needle::client
