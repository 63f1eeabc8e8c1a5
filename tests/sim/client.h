// A simulated engine process: attaches to one daemon, stores, reads, ships, adopts and decodes, and checks every byte that
// it was allowed to read.
//
// What must stay true:
//  1. Its code runs only while it is alive and not stopped; what it was about to do when stopped happens first when it
//     wakes. Its kernels (writes to pool memory) run on while it is stopped and end only with its death.
//  2. It keeps the client's side of the contract: fences before it seals, releases, acknowledges or unmaps.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/sim/world.h"

namespace needle::sim {

class Job;

class Client {
 public:
  Client(World& world, Node& node, int number, bool remote);

  const std::string& name() const { return name_; }
  Node& node() { return node_; }
  World& world() { return world_; }
  bool is_alive() const { return alive_; }
  bool is_remote() const { return remote_; }
  SessionId session() const { return session_; }
  uint64_t memory_epoch() const { return memory_epoch_; }
  // Whether its kernels may touch the chunk. While it attaches they do not: it has fenced, and maps what the reply names.
  bool maps(PoolId pool, ChunkIndex chunk) const {
    return alive_ && !remote_ && !attaching_ && memory_epoch_ == node_.memory_epoch && mapped_.contains({pool, chunk});
  }

  void begin();  // a fresh process
  void kill();
  void stop();
  void wake();
  bool is_stopped() const { return stopped_; }
  void receive(SessionId session, SessionEvent event);  // in order, as a stream socket has it
  void daemon_gone();                                   // the attach socket of its daemon closed

  // Runs `action` as this process after a delay: deferred while stopped, dropped when dead.
  void soon(int64_t delay_ns, std::function<void()> action);
  void note(const std::string& line);

  // Sends a request until it is answered; `done` may never be called if the session or process ends before.
  template <class Request>
  void call(const std::shared_ptr<Job>& job, Request request, std::function<void(const absl::StatusOr<typename Request::Reply>&)> done);

  // Kernels: run later, also while the process is stopped. Then `done`, as the process.
  void launch(const std::shared_ptr<Job>& job, std::vector<std::function<void()>> kernels, std::function<void()> done);

  int64_t pending() const { return static_cast<int64_t>(calls_.size()); }
  int64_t jobs() const { return static_cast<int64_t>(jobs_.size()); }
  void finish(const std::shared_ptr<Job>& job);
  void session_is_stale(const std::string& why);

  void hold(LeaseId lease, std::vector<PageRef> pages) { held_[lease] = std::move(pages); }
  void unhold(LeaseId lease) {
    const auto held = held_.find(lease);
    if (held == held_.end()) return;
    if (!held->second.empty()) once_held_ = held->second.front();
    held_.erase(held);
  }

 private:
  friend class Job;
  void attach();
  void attached(const Attach::Reply& reply);
  void beat();
  void work();
  void give_up_session(std::function<void()> then);
  void when_fenced(std::function<void()> then);
  void take(const SessionEvent& event);
  void retire_chunk(PoolId pool, ChunkIndex chunk);
  template <class Request>
  void send(uint64_t call, const Request& request, std::function<void(const absl::StatusOr<typename Request::Reply>&)> done);

  World& world_;
  Node& node_;
  const bool remote_;
  std::string name_;
  bool alive_ = false;
  bool stopped_ = false;
  bool attached_ = false;
  bool attaching_ = false;
  uint64_t life_ = 0;  // of the process
  uint64_t era_ = 0;   // of the session: calls and jobs of an earlier one are dropped
  int64_t pid_ = 0;
  uint64_t instance_ = 0;
  SessionId session_;
  int64_t kernels_ = 0;        // in flight
  uint64_t memory_epoch_ = 0;  // of the host's chunks that it maps
  Epoch epoch_;
  std::vector<std::function<void()>> fence_waiters_;
  std::deque<std::function<void()>> deferred_;
  std::set<uint64_t> calls_;
  uint64_t last_call_ = 0;
  std::set<std::shared_ptr<Job>> jobs_;
  std::set<std::pair<PoolId, ChunkIndex>> mapped_;
  std::vector<std::pair<SessionId, SessionEvent>> early_;  // events that overtook the attach's own reply
  int64_t last_event_ns_ = 0;
  PageRef once_held_;                             // given back, and sometimes claimed again by mistake: a stale handle
  std::map<LeaseId, std::vector<PageRef>> held_;  // pages of open leases, to ask for again after a daemon restart
};

// One thing an engine does, from start to end. Its callbacks run only while the session it began in lives.
class Job : public std::enable_shared_from_this<Job> {
 public:
  explicit Job(Client& client) : client_(client) {}
  virtual ~Job() = default;
  virtual void start() = 0;

 protected:
  Rng& rng() { return client_.world().rng(); }
  World& world() { return client_.world(); }
  Node& node() { return client_.node(); }
  const PoolSetOptions& set() { return client_.node().options.sets[0]; }
  int64_t page_tokens() { return set().shapes[0].page_tokens; }
  int64_t window_page_tokens() { return set().shapes[1].page_tokens; }
  std::pair<int64_t, int64_t> window_blocks(int64_t tokens);
  PageRef paged(PageId page) const { return {pool_id(PoolSetId(0), PoolKind::kPaged), page}; }
  PageRef window(PageId page) const { return {pool_id(PoolSetId(0), PoolKind::kWindow), page}; }
  PageRef state(PageId page) const { return {pool_id(PoolSetId(0), PoolKind::kState), page}; }
  uint64_t checksum_of(PageRef page);
  void note(const std::string& line) { client_.note(line); }
  void end() { client_.finish(shared_from_this()); }

  template <class Request>
  void call(Request request, std::function<void(const absl::StatusOr<typename Request::Reply>&)> done) {
    client_.call<Request>(shared_from_this(), std::move(request), std::move(done));
  }
  void launch(std::vector<std::function<void()>> kernels, std::function<void()> done) {
    client_.launch(shared_from_this(), std::move(kernels), std::move(done));
  }
  void pause(std::function<void()> then);
  // Reads everything in the table and checks it, over some time; then goes on.
  void read_table(const PageTable& table, const std::shared_ptr<const Story>& story, std::function<void()> then);
  std::vector<PageRef> pages_of(const PageTable& table);
  // Ends a lease: after the fence, once or by mistake twice.
  void release(LeaseId lease, std::function<void()> then);

  Client& client_;
};

std::shared_ptr<Job> make_job(Client& client);

template <class Request>
void Client::call(const std::shared_ptr<Job>& job, Request request,
                  std::function<void(const absl::StatusOr<typename Request::Reply>&)> done) {
  const uint64_t id = ++last_call_;
  calls_.insert(id);
  (void)job;  // the callback holds the job by `this`; the client holds it in jobs_ while its session lives
  send<Request>(id, request, std::move(done));
}

template <class Request>
void Client::send(uint64_t id, const Request& request, std::function<void(const absl::StatusOr<typename Request::Reply>&)> done) {
  using Answer = absl::StatusOr<typename Request::Reply>;
  const uint64_t life = life_;
  const uint64_t era = era_;
  const auto answered = [this, id, life, era, done](const Answer& answer) {
    if (life != life_ || era != era_ || calls_.erase(id) == 0) return;  // late, doubled, or of an earlier session
    done(answer);
  };
  const int copies = world_.rpc_doubled() ? 2 : 1;
  for (int copy = 0; copy < copies; ++copy) {
    if (world_.rpc_lost()) continue;
    world_.at(world_.rpc_delay_ns(), [this, request, answered, life, era] {
      world_.deliver_call<Request>(node_, request, [this, answered, life, era](const Answer& answer) {
        if (world_.rpc_lost()) return;
        world_.at(world_.rpc_delay_ns(), [this, answer, answered, life, era] {
          if (life != life_ || era != era_) return;
          if (stopped_) {
            deferred_.push_back([answered, answer] { answered(answer); });
          } else {
            answered(answer);
          }
        });
      });
    });
  }
  const int64_t patience_ns = std::is_same_v<Request, ShipWait> ? 200'000'000 : 25'000'000;
  soon(patience_ns, [this, id, request, done, era] {
    if (era == era_ && calls_.contains(id)) send<Request>(id, request, done);
  });
}

}  // namespace needle::sim
