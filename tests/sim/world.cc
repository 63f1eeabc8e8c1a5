#include "tests/sim/world.h"

#include <algorithm>
#include <sstream>

#include "proto/errors.h"
#include "server/pool/pool.h"
#include "tests/sim/client.h"

namespace needle::sim {
namespace {

// How long a run may take in simulated time before its faults are healed, and how long everything then has to come to
// rest: longer than any deadline in draw_options.
constexpr int64_t kRunNsMax = 120'000 * kMs;
constexpr int64_t kHealNs = 20'000 * kMs;
constexpr int64_t kFaultEveryMs = 25;

std::string describe(PageRef page) {
  return "page " + std::to_string(page.page.index.value()) + " generation " + std::to_string(page.page.generation.value()) + " of the " +
         kPoolKindNames[static_cast<size_t>(kind_of(page.pool))] + " pool";
}

}  // namespace

const std::vector<std::pair<std::string, bool Faults::*>>& Faults::table() {
  static const std::vector<std::pair<std::string, bool Faults::*>> rows = {{"loss", &Faults::loss},
                                                                           {"partition", &Faults::partition},
                                                                           {"slow", &Faults::slow},
                                                                           {"kill_daemon", &Faults::kill_daemon},
                                                                           {"stop_daemon", &Faults::stop_daemon},
                                                                           {"kill_client", &Faults::kill_client},
                                                                           {"stop_client", &Faults::stop_client},
                                                                           {"memory", &Faults::memory},
                                                                           {"clock", &Faults::clock},
                                                                           {"corrupt", &Faults::corrupt}};
  return rows;
}

void Totals::add(const Totals& other) {
  operations += other.operations;
  steps += other.steps;
  pages_verified += other.pages_verified;
  kills_at_write += other.kills_at_write;
  for (const auto& [name, count] : other.probes) probes[name] += count;
}

// ---------------------------------------------------------------------------------------------------------------- the host

void SimMetadata::put(int64_t offset, std::span<const std::byte> value) {
  if (writes_left_ == 0) {
    writes_left_ = -1;
    // Torn at 8-byte granularity: some leading words arrive. A single word arrives whole or not at all.
    const size_t words = value.size() / 8;
    const size_t written = static_cast<size_t>(rng_.below(words + 1)) * 8;
    std::copy_n(value.begin(), written, bytes_.begin() + offset);
    throw DaemonKilled{};
  }
  if (writes_left_ > 0) --writes_left_;
  std::copy(value.begin(), value.end(), bytes_.begin() + offset);
}

Node::Node(World& owner, NodeId node_id, CoreOptions core_options, Rng chance)
    : world(owner), id(node_id), options(std::move(core_options)), rng(chance), metadata(Core::metadata_bytes(options), Rng(rng.next())) {
  for (const PoolShape& shape : options.sets[0].shapes) {
    words_seen.emplace_back(static_cast<size_t>(Pool::pages_max(shape)), 0);
  }
}

void Node::allocate_chunk(PoolId pool, ChunkIndex chunk, int64_t bytes) {
  world.at(rng.between(100, 5'000) * 1'000, [this, pool, chunk, bytes, was = life] {
    if (was != life) return;
    if (world.allocation_fails()) {
      return world.deliver(*this, ChunkAllocated{pool, chunk, make_error(ErrorCode::kMemory, "the simulated host is full")});
    }
    chunks[{pool, chunk}] = std::vector<std::byte>(static_cast<size_t>(bytes));
    world.deliver(*this, ChunkAllocated{pool, chunk, absl::OkStatus()});
  });
}

void Node::free_chunk(PoolId pool, ChunkIndex chunk) {
  world.chunk_goes(*this, pool, chunk);
  chunks.erase({pool, chunk});
}

void Node::to_session(SessionId session, SessionEvent event) {
  const auto client = sessions.find(session);
  if (client != sessions.end()) client->second->receive(session, std::move(event));
}

void Node::to_peer(NodeId peer, PeerMessage message) {
  const int copies = world.duplicates_message() ? 2 : 1;
  for (int copy = 0; copy < copies; ++copy) {
    if (!world.link_passes(id, peer)) continue;
    world.at(world.message_delay_ns(id, peer), [this, peer, message] { world.deliver(world.node(peer.value()), message); });
  }
}

int64_t Node::now_ns() const { return world.time_ns() + clock_ahead_ns; }

std::span<std::byte> Node::page(PageRef ref) {
  const PoolShape& pool = shape(ref.pool);
  const int64_t at = int64_t{ref.page.index.value()} * pool.page_bytes;
  const auto chunk = chunks.find({ref.pool, ChunkIndex(static_cast<uint32_t>(at / pool.chunk_bytes))});
  if (chunk == chunks.end()) return {};
  return std::span(chunk->second).subspan(static_cast<size_t>(at % pool.chunk_bytes), static_cast<size_t>(pool.page_bytes));
}

namespace {

RecordTable records_of(Node& node, PoolId pool) {
  int64_t offset = RegionTable::bytes(node.options.sessions_max);
  for (uint32_t before = 0; before < pool.value(); ++before) {
    offset += Pool::pages_max(node.shape(PoolId(before))) * RecordTable::kBytesPerPage;
  }
  return {node.metadata, pool, offset, Pool::pages_max(node.shape(pool))};
}

}  // namespace

std::pair<Generation, PageState> Node::word(PageRef ref) const {
  const RecordTable records = records_of(const_cast<Node&>(*this), ref.pool);
  return {records.generation(ref.page.index), records.state(ref.page.index)};
}

uint64_t Node::recorded_checksum(PageRef ref) const {
  return records_of(const_cast<Node&>(*this), ref.pool).record(ref.page.index).checksum;
}

// --------------------------------------------------------------------------------------------------------------- the world

World::World(uint64_t seed, const Faults& faults, int64_t operations, bool keeps_history)
    : rng_(seed), faults_(faults), operations_(operations), keeps_history_(keeps_history) {}

void World::begin() {
  if (faults_.loss) loss_ = rng_.unit() * 0.1;
  delay_us_max_ = rng_.between(200, faults_.slow ? 20'000 : 2'000);
  one_sided_ = rng_.chance(0.5);
  fabric_ = std::make_unique<SimFabric>(*this, Rng(rng_.next()), &checksum);
  const int64_t node_count = rng_.between(2, 3);
  shared_options_ = draw_options(NodeId(0));
  for (int64_t index = 0; index < node_count; ++index) {
    CoreOptions options = shared_options_;
    options.node = NodeId(static_cast<uint32_t>(index));
    int64_t least_bytes = 0;  // one chunk a pool
    for (const PoolShape& shape : options.sets[0].shapes) least_bytes += shape.chunk_bytes;
    options.sets[0].budget_bytes = std::max(least_bytes, options.sets[0].budget_bytes * rng_.between(60, 120) / 100);
    nodes_.push_back(std::make_unique<Node>(*this, options.node, options, Rng(rng_.next())));
  }
  for (const auto& node : nodes_) start_daemon(*node);
  int number = 0;
  for (const auto& node : nodes_) {
    const int64_t locals = rng_.between(1, 3);
    for (int64_t i = 0; i < locals; ++i) clients_.push_back(std::make_unique<Client>(*this, *node, number++, false));
    if (rng_.chance(0.6)) clients_.push_back(std::make_unique<Client>(*this, *node, number++, true));
  }
  for (const auto& client : clients_) client->begin();
  at(kFaultEveryMs * kMs, [this] { cause_faults(); });
  at(50 * kMs, [this] { operate(); });
  for (const auto& node : nodes_) at(50 * kMs, [this, &host = *node] { watch_processes(host); });
}

World::~World() = default;

CoreOptions World::draw_options(NodeId id) {
  CoreOptions options;
  options.node = id;
  PoolSetOptions set;
  set.name = "sim";
  set.format = "sim: two layers, 8 tokens a page";
  set.window_tokens = 8;
  const auto shape = [&](int64_t page_bytes, int64_t page_tokens, int64_t pages_a_chunk, int64_t chunks_max) {
    // Usually the stride does not divide the chunk, so that some pages would cross an edge.
    return PoolShape{page_bytes, page_tokens, page_bytes * pages_a_chunk + (rng_.chance(0.7) ? page_bytes / 2 : 0), chunks_max};
  };
  set.shapes[0] = shape(256, 8, rng_.between(4, 8), 6);
  set.shapes[1] = shape(128, 4, rng_.between(6, 12), 6);
  set.shapes[2] = shape(128, 0, rng_.between(4, 8), 6);
  set.ratios = {4, 2, 1};
  set.budget_bytes = 7 * set.shapes[0].chunk_bytes * rng_.between(60, 140) / 100;
  set.resume_points_max = rng_.between(2, 12);
  options.sets.push_back(set);
  options.heartbeat_ms = 40;
  options.silence_ms = rng_.between(120, 400);
  options.lease_ms = rng_.between(60, 300);
  options.outcome_remembered_ms = 8'000;
  options.ship_deadline_ms = 3'000;
  options.ship_deadline_ms_max = 10'000;
  options.ship_retry_ms = rng_.between(5, 40);
  options.ship_silence_ms = 3 * options.lease_ms;
  options.ship_poll_ms = rng_.between(1, 5);
  options.fetch_ms = rng_.between(40, 200);
  options.ship_attempts_max = rng_.between(2, 8);
  options.bytes_in_flight_max = rng_.between(1, 12) * 200;
  options.retry_after_ms = rng_.between(2, 20);
  options.sessions_max = 24;
  options.tickets_max = rng_.chance(0.2) ? 3 : 64;
  options.leases_max = rng_.chance(0.2) ? 6 : 128;
  options.ships_max = rng_.chance(0.2) ? 1 : 16;
  options.outcomes_max = 4'096;
  options.pages_per_request_max = 64;
  options.offer_pages_max = rng_.between(1, 6);
  return options;
}

void World::at(int64_t delay_ns, std::function<void()> action) {
  events_.push({now_ + std::max<int64_t>(delay_ns, 0), order_++, std::move(action)});
}

void World::note(const std::string& line) {
  if (!keeps_history_) return;
  char when[32];
  std::snprintf(when, sizeof(when), "%12.3f ms  ", static_cast<double>(now_) / static_cast<double>(kMs));
  history_.push_back(when + line);
}

void World::violated(const std::string& what) {
  note("VIOLATION: " + what);
  throw Violation{what};
}

int64_t World::rpc_delay_ns() {
  const bool slow = !healing_ && faults_.slow && rng_.chance(0.03);
  return slow ? rng_.between(1, 100) * kMs : rng_.between(10'000, 1 * kMs);
}

// ------------------------------------------------------------------------------------------------------------------ fabric

bool World::link_passes(NodeId from, NodeId to) {
  if (healing_) return true;
  if (cut_.contains({from, to})) return false;
  return !faults_.loss || !rng_.chance(loss_);
}

int64_t World::message_delay_ns(NodeId, NodeId) {
  if (healing_) return rng_.between(10, 500) * 1'000;
  return rng_.between(10, rng_.chance(0.1) ? 3 * delay_us_max_ : delay_us_max_ / 4 + 10) * 1'000;
}

bool World::process_runs(NodeId id, Incarnation incarnation) { return process_exists(id, incarnation) && !nodes_[id.value()]->stopped; }

bool World::process_exists(NodeId id, Incarnation incarnation) {
  const Node& node = *nodes_[id.value()];
  return node.is_up() && node.core->incarnation() == incarnation;
}

std::span<std::byte> World::page_bytes(NodeId id, PageRef page) { return nodes_[id.value()]->page(page); }

void World::page_landed(NodeId id, PageRef page, FetchId fetch) {
  Node& node = *nodes_[id.value()];
  const auto [generation, state] = node.word(page);
  const bool may_land =
      !node.page(page).empty() && generation == page.page.generation && (state == PageState::kReserved || state == PageState::kDraining);
  if (may_land) return;
  violated("bytes of attempt " + std::to_string(fetch.attempt) + " landed at node " + std::to_string(id.value()) + " in " + describe(page) +
           ", which is " + kPageStateNames[static_cast<size_t>(state)] + " in generation " + std::to_string(generation.value()));
}

void World::transport_ready(NodeId id) {
  Node& node = *nodes_[id.value()];
  at(rng_.between(1, 100) * 1'000, [this, &node, life = node.life] {
    if (node.life == life) deliver(node, TransportReady{});
  });
}

// ----------------------------------------------------------------------------------------------------------------- daemons

void World::deliver(Node& node, Message message) {
  if (!node.is_up()) return;  // whoever waits for an answer asks again
  if (node.stopped) {
    node.while_stopped.push_back(std::move(message));
    return;
  }
  hand_over(node, std::move(message));
}

void World::hand_over(Node& node, Message message) {
  try {
    (void)node.loop->post(std::move(message));
    while (node.is_up() && node.loop->step(1) > 0) ++totals_.steps;
  } catch (const DaemonKilled&) {
    ++totals_.kills_at_write;
    kill_daemon(node, "at a metadata write");
    return;
  }
  check_node(node);
  schedule_tick(node);
}

void World::schedule_tick(Node& node) {
  const int64_t due = node.core->next_deadline_ns();
  if (due == INT64_MAX) return;
  const int64_t when = std::max(now_, due - node.clock_ahead_ns);
  if (node.tick_at_ns >= now_ && node.tick_at_ns <= when) return;
  node.tick_at_ns = when;
  at(when - now_, [this, &node, life = node.life, when] {
    if (node.life != life || node.tick_at_ns != when) return;
    node.tick_at_ns = -1;
    deliver(node, Tick{});
  });
}

void World::start_daemon(Node& node) {
  ++node.life;
  node.stopped = false;
  node.while_stopped.clear();
  node.tick_at_ns = -1;
  note("daemon " + std::to_string(node.id.value()) + " starts");
  if (!healing_ && faults_.kill_daemon && rng_.chance(0.15)) node.metadata.kill_after(rng_.between(0, 12));
  node.transport = std::make_unique<SimTransport>(*fabric_, node.id, Incarnation(node.life), one_sided_, node.rng.between(1, 3));
  try {
    absl::StatusOr<std::unique_ptr<Core>> core =
        Core::start(node.options, {node, node.metadata, node, *node.transport, node, node.log, node.rng.next()});
    if (!core.ok()) violated("daemon " + std::to_string(node.id.value()) + " did not start: " + core.status().ToString());
    node.core = std::move(*core);
  } catch (const DaemonKilled&) {
    ++totals_.kills_at_write;
    node.transport.reset();
    note("daemon " + std::to_string(node.id.value()) + " is killed while it starts");
    at(node.rng.between(1, 50) * kMs, [this, &node] { start_daemon(node); });
    return;
  }
  node.loop = std::make_unique<Loop>(*node.core, node);
  for (std::vector<uint64_t>& words : node.words_seen) std::fill(words.begin(), words.end(), 0);
  for (const auto& [name, count] : node.core->snapshot().counters) {
    if (name == "restart_record_bad" && count > 0) violated("a kill left a sealed page without its whole record");
  }
  check_node(node);
  schedule_tick(node);
}

void World::collect_probes(Node& node) {
  for (const auto& [name, count] : node.core->snapshot().counters) totals_.probes[name] += count;
}

void World::kill_daemon(Node& node, const std::string& why) {
  if (!node.is_up()) return;
  note("daemon " + std::to_string(node.id.value()) + " is killed " + why);
  collect_probes(node);
  ++node.life;
  node.loop.reset();
  node.core.reset();
  node.transport.reset();
  node.stopped = false;
  node.while_stopped.clear();
  node.sessions.clear();
  node.metadata.kill_after(-1);
  if (!healing_ && rng_.chance(0.1)) {  // no keeper: the bytes are gone, and sometimes the metadata with them
    note("its memory is lost");
    node.chunks.clear();
    ++node.memory_epoch;
    if (rng_.chance(0.5)) node.metadata.wipe();
  }
  for (const auto& client : clients_) {
    if (&client->node() == &node) client->daemon_gone();
  }
  at(rng_.between(5, 200) * kMs, [this, &node] { start_daemon(node); });
}

void World::check_node(Node& node) {
  if (absl::Status found = node.core->audit(); !found.ok()) violated("node " + std::to_string(node.id.value()) + ": " + found.ToString());
  for (uint32_t pool = 0; pool < node.words_seen.size(); ++pool) {
    const RecordTable records = records_of(node, PoolId(pool));
    std::vector<uint64_t>& seen = node.words_seen[pool];
    for (size_t page = 0; page < seen.size(); ++page) {
      const PageIndex index(static_cast<uint32_t>(page));
      const uint64_t word = (uint64_t{records.generation(index).value()} << 2) | static_cast<uint64_t>(records.state(index));
      if (word == seen[page]) continue;
      seen[page] = word;
      const PageRef ref{PoolId(pool), {index, records.generation(index)}};
      const std::span<const std::byte> bytes = node.page(ref);
      if (records.state(index) != PageState::kSealed || bytes.empty()) continue;
      ++totals_.pages_verified;
      if (checksum(bytes) != records.record(index).checksum) {
        violated("node " + std::to_string(node.id.value()) + " sealed " + describe(ref) + " with other bytes than its record says");
      }
    }
  }
}

std::string World::counts_of(const Node& node) {
  std::ostringstream text;
  const Snapshot snapshot = node.core->snapshot();
  for (const Snapshot::Set& set : snapshot.sets) {
    for (const Occupancy& pool : set.pools) {
      text << pool.free << '/' << pool.reserved << '/' << pool.sealed_idle << '/' << pool.leased << '/' << pool.draining << ' ';
    }
    text << "named " << set.named_pages << " sequences " << set.sequences << " resume " << set.resume_points;
  }
  text << " tickets " << snapshot.tickets_open << " leases " << snapshot.leases_open << " ships " << snapshot.ships_open << " pins ";
  for (const Snapshot::SessionRow& session : snapshot.sessions) text << session.pinned_pages << ' ';
  return text.str();
}

// ----------------------------------------------------------------------------------------------------------------- clients

std::shared_ptr<const Story> World::pick_story() {
  Story story;
  if (!stories.empty() && rng_.chance(0.75)) {
    const Story& base = *stories[rng_.below(stories.size())];
    if (rng_.chance(0.4)) return std::make_shared<const Story>(base);
    story.segments.assign(base.segments.begin(), base.segments.begin() + rng_.between(0, static_cast<int64_t>(base.segments.size())));
  }
  while (story.segments.size() < 7) story.segments.push_back(rng_.next());
  auto made = std::make_shared<const Story>(std::move(story));
  if (stories.size() < 8) {
    stories.push_back(made);
  } else {
    stories[rng_.below(stories.size())] = made;
  }
  return made;
}

void World::client_writes(Node& node, PageRef page, uint64_t content, uint32_t position, SequenceId sequence, const Client& who) {
  if (who.memory_epoch() != node.memory_epoch) return;  // into chunks that nobody else has any more
  const std::span<std::byte> bytes = node.page(page);
  if (bytes.empty()) violated(who.name() + " wrote to " + describe(page) + ", whose chunk was unmapped under it");
  const auto [generation, state] = node.word(page);
  const bool is_its_own = generation == page.page.generation && (state == PageState::kReserved || state == PageState::kDraining);
  if (!is_its_own) {
    violated(who.name() + " wrote to " + describe(page) + ", which is " + kPageStateNames[static_cast<size_t>(state)] + " in generation " +
             std::to_string(generation.value()) + ": a page in two hands");
  }
  fill_page(bytes, content, position, page.page.generation.value(), sequence.value());
}

void World::client_copies(Node& node, PageRef from, PageRef to, const Client& who) {
  if (who.memory_epoch() != node.memory_epoch) return;
  const std::span<std::byte> source = node.page(from);
  const std::span<std::byte> target = node.page(to);
  if (source.empty() || target.empty()) violated(who.name() + " copied " + describe(from) + " and a chunk was unmapped under it");
  const auto [generation, state] = node.word(to);
  if (generation != to.page.generation || (state != PageState::kReserved && state != PageState::kDraining)) {
    violated(who.name() + " copied into " + describe(to) + ": a page in two hands");
  }
  std::copy(source.begin(), source.end(), target.begin());
}

void World::verify(Node& node, PageRef page, uint64_t content, uint32_t position, const Client& who) {
  if (who.memory_epoch() != node.memory_epoch) return;
  const std::span<const std::byte> bytes = node.page(page);
  if (bytes.empty()) violated(who.name() + " read " + describe(page) + ", whose chunk was unmapped under it");
  const auto [generation, state] = node.word(page);
  if (generation != page.page.generation || state == PageState::kFree) {
    violated(who.name() + " read " + describe(page) + " under a lease, and it is " + kPageStateNames[static_cast<size_t>(state)] +
             " in generation " + std::to_string(generation.value()));
  }
  const std::string wrong = what_is_wrong(bytes, content, position);
  if (!wrong.empty()) violated(who.name() + " read wrong bytes in " + describe(page) + ": " + wrong);
  ++totals_.pages_verified;
}

void World::chunk_goes(const Node& node, PoolId pool, ChunkIndex chunk) {
  for (const auto& client : clients_) {
    if (&client->node() != &node || !client->maps(pool, chunk)) continue;
    violated("chunk " + std::to_string(chunk.value()) + " of pool " + std::to_string(pool.value()) + " of node " +
             std::to_string(node.id.value()) + " is freed while " + client->name() + " maps it");
  }
}

void World::process_died(int64_t pid) {
  pids_.erase(pid);
  for (const auto& node : nodes_) {
    at(rng_.between(0, 30) * kMs, [this, &host = *node, life = node->life, pid] {
      if (host.life != life || !host.is_up() || host.stopped) return;
      for (const Snapshot::SessionRow& session : host.core->snapshot().sessions) {
        if (session.process.pid != pid) continue;
        if (rng_.chance(0.5)) deliver(host, SessionLost{session.session});
        if (host.is_up()) deliver(host, ProcessDied{session.session});
        return;
      }
    });
  }
}

void World::watch_processes(Node& node) {
  at(50 * kMs, [this, &node] { watch_processes(node); });
  if (!node.is_up() || node.stopped) return;
  for (const Snapshot::SessionRow& session : node.core->snapshot().sessions) {
    if (session.process.pid == 0 || pid_lives(session.process.pid)) continue;
    deliver(node, ProcessDied{session.session});
    if (!node.is_up()) return;
  }
}

// ------------------------------------------------------------------------------------------------------------------ faults

void World::cause_faults() {
  if (healing_) return;
  at(rng_.between(1, 2 * kFaultEveryMs) * kMs, [this] { cause_faults(); });
  Node& node = *nodes_[rng_.below(nodes_.size())];
  Client& client = *clients_[rng_.below(clients_.size())];
  switch (rng_.below(16)) {
    case 0:
      if (faults_.kill_daemon && rng_.chance(0.5)) kill_daemon(node, "from outside");
      break;
    case 1:
    case 2:
      if (faults_.kill_daemon && node.is_up()) node.metadata.kill_after(rng_.between(0, 40));
      break;
    case 3:
      if (!faults_.stop_daemon || !node.is_up() || node.stopped) break;
      note("daemon " + std::to_string(node.id.value()) + " is stopped");
      node.stopped = true;
      at(rng_.between(20, 800) * kMs, [this, &node, life = node.life] {
        if (node.life != life) return;
        note("daemon " + std::to_string(node.id.value()) + " wakes");
        node.stopped = false;
        while (node.is_up() && !node.stopped && !node.while_stopped.empty()) {
          Message message = std::move(node.while_stopped.front());
          node.while_stopped.pop_front();
          deliver(node, std::move(message));
        }
        if (node.is_up() && !node.stopped) deliver(node, Tick{});
      });
      break;
    case 4:
    case 5:
      if (!faults_.kill_client || !client.is_alive()) break;
      client.kill();
      at(rng_.between(10, 400) * kMs, [&client] { client.begin(); });
      break;
    case 6:
    case 7:
    case 8:
      if (!faults_.stop_client || !client.is_alive() || client.is_stopped()) break;
      client.stop();
      at(rng_.between(20, 1'200) * kMs, [&client] {
        if (client.is_alive() && client.is_stopped()) client.wake();
      });
      break;
    case 9:
    case 10: {
      if (!faults_.partition) break;
      const NodeId from = node.id;
      const NodeId to = nodes_[rng_.below(nodes_.size())]->id;
      if (from == to) break;
      const bool both_ways = rng_.chance(0.5);
      note("link " + std::to_string(from.value()) + " to " + std::to_string(to.value()) + " is cut" + (both_ways ? " both ways" : ""));
      cut_.insert({from, to});
      if (both_ways) cut_.insert({to, from});
      at(rng_.between(10, 600) * kMs, [this, from, to] {
        cut_.erase({from, to});
        cut_.erase({to, from});
      });
      break;
    }
    case 11:
      if (!faults_.clock || !rng_.chance(0.4)) break;
      node.clock_ahead_ns += rng_.between(1, 3'000) * kMs;
      if (rng_.chance(0.3)) node.clock_ahead_ns = rng_.between(0, node.clock_ahead_ns);  // back, by up to all it was ahead
      note("the clock of node " + std::to_string(node.id.value()) + " jumps");
      deliver(node, Tick{});
      break;
    case 12:
      // An attach socket breaks while its process lives.
      if (faults_.loss && client.is_alive() && !client.session().is_none()) deliver(client.node(), SessionLost{client.session()});
      break;
    default: break;
  }
}

void World::operate() {
  if (healing_) return;
  at(rng_.between(10, 120) * kMs, [this] { operate(); });
  Node& node = *nodes_[rng_.below(nodes_.size())];
  if (!node.is_up() || node.stopped) return;
  const Snapshot snapshot = node.core->snapshot();
  const Snapshot::Set& set = snapshot.sets[0];
  switch (rng_.below(8)) {
    case 0:
    case 1:
    case 2: {
      Resize request;
      request.set = set.set;
      request.revision = set.revision + (rng_.chance(0.9) ? 1 : 2);
      request.budget_bytes = node.options.sets[0].budget_bytes * rng_.between(40, 160) / 100;
      request.ratios = {rng_.between(2, 6), rng_.between(1, 3), rng_.between(1, 2)};
      request.dry_run = rng_.chance(0.1);
      note("operator resizes node " + std::to_string(node.id.value()) + " to " + std::to_string(request.budget_bytes) + " bytes");
      deliver_call<Resize>(node, request, [](const absl::StatusOr<ResizeProgress>&) {});
      break;
    }
    case 3: deliver_call<ResizeAbort>(node, {set.set}, [](const absl::StatusOr<ResizeProgress>&) {}); break;
    case 4: deliver_call<ResizeStatus>(node, {set.set}, [](const absl::StatusOr<ResizeProgress>&) {}); break;
    case 5: {
      Evict request{set.set, rng_.between(0, 4), SequenceId()};
      if (!known.empty() && rng_.chance(0.5)) request.sequence = known[rng_.below(known.size())].sequence;
      deliver_call<Evict>(node, request, [](const absl::StatusOr<Evict::Reply>&) {});
      break;
    }
    case 6: deliver_call<Status>(node, {}, [](const absl::StatusOr<Snapshot>&) {}); break;
    default:
      deliver_call<Audit>(node, {}, [this](const absl::StatusOr<Nothing>& reply) {
        if (!reply.ok()) violated("audit: " + reply.status().ToString());
      });
  }
}

// --------------------------------------------------------------------------------------------------------------- the run

void World::heal() {
  note("everything heals");
  healing_ = true;
  cut_.clear();
  for (const auto& node : nodes_) {
    node->metadata.kill_after(-1);
    if (!node->stopped) continue;
    node->stopped = false;
    while (!node->while_stopped.empty()) {
      Message message = std::move(node->while_stopped.front());
      node->while_stopped.pop_front();
      deliver(*node, std::move(message));
    }
    deliver(*node, Tick{});
  }
  for (const auto& client : clients_) {
    if (client->is_alive() && client->is_stopped()) client->wake();
  }
}

// After the healing nothing may be left open: every ticket, lease and ship has ended, no page waits for anybody.
void World::check_rest() {
  for (const auto& client : clients_) {
    if (client->is_alive() && (client->pending() > 0 || client->jobs() > 0)) {
      violated(client->name() + " waits for ever: " + std::to_string(client->pending()) + " calls and " + std::to_string(client->jobs()) +
               " jobs are open");
    }
  }
  for (const auto& node : nodes_) {
    const std::string name = "node " + std::to_string(node->id.value());
    if (!node->is_up()) violated(name + " is not up after the healing");
    const Snapshot rest = node->core->snapshot();
    const std::string counts = counts_of(*node);
    if (rest.tickets_open + rest.leases_open + rest.ships_open + rest.bytes_in_flight > 0) violated(name + " is not at rest: " + counts);
    for (const Occupancy& pool : rest.sets[0].pools) {
      if (pool.reserved + pool.leased + pool.draining > 0) violated(name + " has pages that nobody will give back: " + counts);
      if (pool.free + pool.reserved + pool.sealed_idle + pool.leased + pool.draining != pool.capacity) {
        violated(name + " has occupancy that does not sum up: " + counts);
      }
    }
    bool applied = false;
    deliver_call<ResizeStatus>(*node, {PoolSetId(0)}, [&applied](const absl::StatusOr<ResizeProgress>& reply) {
      applied = !reply.ok() || reply->answer == ResizeAnswer::kApplied;  // an error: it ended for want of memory
    });
    if (!applied) violated(name + " never ends its resize");
    deliver_call<Drain>(*node, {}, [](const absl::StatusOr<Nothing>&) {});
    if (!node->core->drained()) violated(name + " does not drain");
    collect_probes(*node);
  }
}

Totals World::run() {
  int64_t heal_at = -1;
  while (!events_.empty()) {
    // A copy of the action, since it may push events.
    const Event event = events_.top();
    events_.pop();
    now_ = event.time;
    if (heal_at < 0 && (totals_.operations >= operations_ || now_ > kRunNsMax)) {
      heal();
      heal_at = now_;
    }
    if (heal_at >= 0 && now_ > heal_at + kHealNs) break;
    event.action();
  }
  check_rest();
  return totals_;
}

}  // namespace needle::sim
