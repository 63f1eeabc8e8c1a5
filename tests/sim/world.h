// A world of daemons, clients and operators in one process, from one seed: the same objects that the daemon links, stepped
// in simulated time over a network and memories that misbehave.
//
// What must stay true:
//  1. Everything comes from the seed: two runs of one seed and one set of faults do the same, to the last message.
//  2. After every step of a daemon all invariants are checked (check_node); a violation throws and names what was seen.
//  3. Faults happen to the world, never inside the core: there is no hook in the code under test.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/rng.h"
#include "base/units.h"
#include "proto/errors.h"
#include "server/core.h"
#include "server/loop.h"
#include "server/probe.h"
#include "server/transport/sim/sim_transport.h"
#include "tests/sim/content.h"

namespace needle::sim {

using namespace needle::server;  // NOLINT: the world speaks the core's words

inline constexpr int64_t kMs = kNanosPerMilli;

struct Violation {
  std::string what;
};

// Which kinds of fault may happen. Names are those of --faults.
struct Faults {
  bool loss = true;         // messages lost, doubled, late, out of order
  bool partition = true;    // one-way and both ways
  bool slow = true;         // receivers that take long
  bool kill_daemon = true;  // also at any metadata write, torn, those of its start included
  bool stop_daemon = true;
  bool kill_client = true;
  bool stop_client = true;  // and wake late
  bool memory = true;       // allocation and registration failures
  bool clock = true;        // jumps, forward and back
  bool corrupt = true;      // a byte flipped on the way

  static const std::vector<std::pair<std::string, bool Faults::*>>& table();
};

struct Totals {
  int64_t operations = 0;  // requests that a daemon answered to a client or operator while faults struck; no heartbeats
  int64_t steps = 0;       // messages that a daemon handled
  int64_t pages_verified = 0;
  int64_t kills_at_write = 0;
  std::map<std::string, uint64_t> probes;
  void add(const Totals& other);
};

class Client;
class World;

struct DaemonKilled {};

// The metadata region of a simulated host. Survives its daemon; may kill it at any write.
class SimMetadata final : public Metadata {
 public:
  SimMetadata(int64_t size, Rng rng) : bytes_(static_cast<size_t>(size)), rng_(rng) {}
  std::span<const std::byte> bytes() const override { return bytes_; }
  void put(int64_t offset, std::span<const std::byte> value) override;
  void kill_after(int64_t writes) { writes_left_ = writes; }
  void wipe() { std::fill(bytes_.begin(), bytes_.end(), std::byte{0}); }

 private:
  std::vector<std::byte> bytes_;
  Rng rng_;
  int64_t writes_left_ = -1;  // negative: no kill planned
};

// One host: its memory, and a daemon that comes and goes.
struct Node final : public Memory, public Outbox, public Clock {
  Node(World& world, NodeId id, CoreOptions options, Rng rng);

  bool chunk_present(PoolId pool, ChunkIndex chunk) const override { return chunks.contains({pool, chunk}); }
  void allocate_chunk(PoolId pool, ChunkIndex chunk, int64_t bytes) override;
  void free_chunk(PoolId pool, ChunkIndex chunk) override;
  void to_session(SessionId session, SessionEvent event) override;
  void to_peer(NodeId peer, PeerMessage message) override;
  int64_t now_ns() const override;

  std::span<std::byte> page(PageRef ref);  // empty when its chunk has no memory
  std::pair<Generation, PageState> word(PageRef ref) const;
  uint64_t recorded_checksum(PageRef ref) const;
  const PoolShape& shape(PoolId pool) const { return options.sets[set_of(pool).value()].shapes[static_cast<size_t>(kind_of(pool))]; }
  bool is_up() const { return core != nullptr; }

  World& world;
  const NodeId id;
  CoreOptions options;
  Rng rng;
  SimMetadata metadata;
  std::map<std::pair<PoolId, ChunkIndex>, std::vector<std::byte>> chunks;
  SilentLog log;

  std::unique_ptr<SimTransport> transport;
  std::unique_ptr<Core> core;
  std::unique_ptr<Loop> loop;
  Incarnation incarnation;
  uint64_t life = 0;          // of the process: raised at each start and kill
  uint64_t memory_epoch = 0;  // raised when all chunks are lost with a daemon that had no keeper
  int64_t clock_ahead_ns = 0;
  bool stopped = false;
  std::deque<Message> while_stopped;
  int64_t tick_at_ns = -1;
  std::map<SessionId, Client*> sessions;          // whom the attach socket reaches
  std::vector<std::vector<uint64_t>> words_seen;  // a pool each: words at the last check, to notice seals
  std::map<std::string, uint64_t> probes;         // of earlier lives
};

class World final : public SimFabricHost {
 public:
  World(uint64_t seed, const Faults& faults, int64_t operations, bool keeps_history);
  ~World() override;

  // Builds daemons and clients; then runs to the end and through the healing. Both throw Violation.
  void begin();
  Totals run();
  const std::vector<std::string>& history() const { return history_; }

  // --- for clients, nodes and the operator
  Rng& rng() { return rng_; }
  int64_t time_ns() const { return now_; }
  void at(int64_t delay_ns, std::function<void()> action);
  bool wants_history() const { return keeps_history_; }
  void note(const std::string& line);
  [[noreturn]] void violated(const std::string& what);
  Node& node(size_t index) { return *nodes_[index]; }
  size_t node_count() const { return nodes_.size(); }
  const Faults& faults() const { return faults_; }
  bool is_healing() const { return healing_; }
  bool is_over() const { return healing_ || totals_.operations >= operations_; }
  Totals& totals() { return totals_; }
  int64_t rpc_delay_ns();
  bool rpc_lost() { return !healing_ && faults_.loss && rng_.chance(loss_); }
  bool rpc_doubled() { return !healing_ && faults_.loss && rng_.chance(loss_); }

  void deliver(Node& node, Message message);  // to a daemon, through its stop and its kill
  template <class Request>
  void deliver_call(Node& node, const Request& request, std::function<void(const absl::StatusOr<typename Request::Reply>&)> done);
  void kill_daemon(Node& node, const std::string& why);
  void start_daemon(Node& node);
  void check_node(Node& node);
  void process_died(int64_t pid);
  void chunk_goes(const Node& node, PoolId pool, ChunkIndex chunk);  // its memory is about to be freed
  bool pid_lives(int64_t pid) const { return pids_.contains(pid); }
  int64_t new_pid() {
    pids_.insert(++last_pid_);
    return last_pid_;
  }

  // What was ever stored, for readers to look for.
  struct Known {
    SequenceId sequence;
    std::shared_ptr<const Story> story;
    size_t node;
  };
  std::vector<Known> known;
  std::vector<std::shared_ptr<const Story>> stories;
  std::shared_ptr<const Story> pick_story();

  // A write or read of pool memory by a client's kernel, checked against the page's word.
  void client_writes(Node& node, PageRef page, uint64_t content, uint32_t position, SequenceId sequence, const Client& who);
  void client_copies(Node& node, PageRef from, PageRef to, const Client& who);
  void verify(Node& node, PageRef page, uint64_t content, uint32_t position, const Client& who);

  // --- SimFabricHost
  int64_t now_ns() const override { return now_; }
  void after(int64_t delay_ns, std::function<void()> action) override { at(delay_ns, std::move(action)); }
  bool link_passes(NodeId from, NodeId to) override;
  bool duplicates_message() override { return rpc_doubled(); }
  int64_t message_delay_ns(NodeId from, NodeId to) override;
  bool process_runs(NodeId node, Incarnation incarnation) override;
  bool process_exists(NodeId node, Incarnation incarnation) override;
  std::span<std::byte> page_bytes(NodeId node, PageRef page) override;
  void page_landed(NodeId node, PageRef page, FetchId id) override;
  void transport_ready(NodeId node) override;
  bool registration_fails() override { return !healing_ && faults_.memory && rng_.chance(0.03); }
  bool flips_byte() override { return !healing_ && faults_.corrupt && rng_.chance(0.004); }
  bool allocation_fails() { return !healing_ && faults_.memory && rng_.chance(0.1); }

 private:
  friend struct Node;
  struct Event {
    int64_t time;
    uint64_t order;
    std::function<void()> action;
    bool operator>(const Event& other) const { return std::pair(time, order) > std::pair(other.time, other.order); }
  };
  void step_node(Node& node);
  void hand_over(Node& node, Message message);  // to a running daemon's core, with its kill
  static std::string counts_of(const Node& node);
  void schedule_tick(Node& node);
  void cause_faults();
  void operate();
  void watch_processes(Node& node);
  void heal();
  void check_rest();
  CoreOptions draw_options(NodeId id);
  void collect_probes(Node& node);

  Rng rng_;
  const Faults faults_;
  const int64_t operations_;
  const bool keeps_history_;
  bool healing_ = false;
  double loss_ = 0;
  int64_t delay_us_max_ = 1000;
  int64_t now_ = 0;
  uint64_t order_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::unique_ptr<SimFabric> fabric_;
  bool one_sided_ = false;
  CoreOptions shared_options_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::set<std::pair<NodeId, NodeId>> cut_;  // one-way
  std::set<int64_t> pids_;
  int64_t last_pid_ = 100;
  std::vector<std::string> history_;
  Totals totals_;
};

// Whether a second delivery of the same request must change nothing. Attach begins a new session by design, Evict asks for
// more each time, and a second ShipWait waits as well.
template <class Request>
inline constexpr bool kRepeatable =
    !std::is_same_v<Request, Attach> && !std::is_same_v<Request, Evict> && !std::is_same_v<Request, ShipWait>;

// Delivers a call; sometimes a second time at once, to see that a retry changes nothing.
template <class Request>
void World::deliver_call(Node& node, const Request& request, std::function<void(const absl::StatusOr<typename Request::Reply>&)> done) {
  const auto first = std::make_shared<absl::Status>(absl::UnknownError("not answered"));
  deliver(node, Call<Request>{request, [this, done, first](absl::StatusOr<typename Request::Reply> reply) {
                                *first = reply.status();
                                if (!healing_ && !std::is_same_v<Request, Heartbeat>) ++totals_.operations;
                                done(reply);
                              }});
  if constexpr (kRepeatable<Request>) {
    if (!first->ok() || !node.is_up() || node.stopped || !rng_.chance(0.1)) return;
    const std::string before = counts_of(node);
    const auto second = std::make_shared<absl::Status>(absl::UnknownError("not answered"));
    hand_over(node, Call<Request>{request, [second](absl::StatusOr<typename Request::Reply> reply) { *second = reply.status(); }});
    if (!node.is_up()) return;  // a planned kill struck
    const bool same = second->ok() || is_error(*second, ErrorCode::kConsumed) || is_error(*second, ErrorCode::kStale);
    if (!same) violated("a request that succeeded failed when repeated: " + second->ToString());
    const std::string after_repeat = counts_of(node);
    if (before != after_repeat) violated("a repeated request changed counts from " + before + " to " + after_repeat);
  }
}

}  // namespace needle::sim
