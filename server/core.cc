#include "server/core.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "proto/errors.h"
#include "server/audit.h"
#include "server/holding.h"
#include "server/journeys/adopt.h"
#include "server/journeys/evict.h"
#include "server/journeys/read.h"
#include "server/journeys/resize.h"
#include "server/journeys/restart.h"
#include "server/journeys/session_life.h"
#include "server/journeys/ship.h"
#include "server/journeys/store.h"
#include "server/pool/resize_policy.h"
#include "server/state.h"

namespace needle::server {
namespace {

int64_t pools_offset(const CoreOptions& options) { return RegionTable::bytes(options.sessions_max); }

void build_sets(State& state) {
  int64_t offset = pools_offset(state.options);
  for (size_t index = 0; index < state.options.sets.size(); ++index) {
    auto set = std::make_unique<PoolSet>();
    set->id = PoolSetId(static_cast<uint32_t>(index));
    set->options = state.options.sets[index];
    for (size_t kind = 0; kind < kPoolKinds; ++kind) {
      const PoolShape& shape = set->options.shapes[kind];
      const PoolId id = pool_id(set->id, static_cast<PoolKind>(kind));
      const int64_t pages = Pool::pages_max(shape);
      const EvictionPolicy policy = set->options.eviction;
      set->pools[kind] = std::make_unique<Pool>(id, shape, policy, RecordTable(state.env.metadata, id, offset, pages));
      offset += pages * RecordTable::kBytesPerPage;
    }
    set->catalog = std::make_unique<Catalog>(set->pools, set->options.resume_points_max, state.probes);
    set->resize.budget_bytes = set->options.budget_bytes;
    set->resize.ratios = set->options.ratios;
    state.sets.push_back(std::move(set));
  }
}

Snapshot snapshot_of(const State& state) {
  Snapshot snapshot;
  snapshot.incarnation = state.incarnation;
  snapshot.stopping = state.stopping;
  for (const auto& set : state.sets) {
    Snapshot::Set row;
    row.set = set->id;
    row.name = set->options.name;
    for (size_t kind = 0; kind < kPoolKinds; ++kind) {
      row.pools[kind] = set->pools[kind]->occupancy();
      row.chunks[kind] = set->pools[kind]->chunks_live();
    }
    row.named_pages = set->catalog->named_pages();
    row.sequences = set->catalog->sequences();
    row.resume_points = set->catalog->resume_points();
    row.revision = set->resize.revision;
    row.budget_bytes = set->resize.budget_bytes;
    row.ratios = set->resize.ratios;
    snapshot.sets.push_back(std::move(row));
  }
  for (const auto& [id, session] : state.sessions.all()) {
    snapshot.sessions.push_back({id, session->process, session->standing != Standing::kLive,
                                 static_cast<int64_t>(state.tickets.of_session(id).size()),
                                 static_cast<int64_t>(state.leases.of_session(id).size()), static_cast<int64_t>(session->pins.size())});
  }
  snapshot.tickets_open = state.tickets.size();
  snapshot.leases_open = state.leases.size();
  snapshot.ships_open = state.ships.size();
  snapshot.bytes_in_flight = state.ships.bytes_in_flight;
  for (size_t probe = 0; probe < kProbeCount; ++probe) {
    snapshot.counters.emplace_back(kProbeNames[probe], state.probes.count(static_cast<Probe>(probe)));
  }
  return snapshot;
}

void poll_transport(State& state) {
  TransportEvents events;
  state.env.transport.poll(events);
  for (const RegisterCompletion& registered : events.registered) resize::chunk_registered(state, registered);
  for (const ReleaseCompletion& released : events.released) resize::chunk_released(state, released);
  for (const FetchCompletion& fetched : events.fetched) ship::fetched(state, fetched);
}

int64_t deadline_ns(const State& state) {
  return std::min({state.leases.next_expiry_ns(), session_life::next_silence_ns(state), ship::next_deadline_ns(state)});
}

// A deadline missed by more than this means that the process did not run: it was stopped, starved or suspended. What others
// said meanwhile still waits in sockets and in the mailbox, so the time since the last message is nobody's silence. A lease
// ends by time all the same: its reader counts the same time.
constexpr int64_t kAbsentNs = 100 * kNanosPerMilli;

void take_time(State& state, int64_t now_ns) {
  const int64_t unseen_ns = now_ns - state.now_ns;
  if (unseen_ns > kAbsentNs && deadline_ns(state) < now_ns - kAbsentNs) {
    state.probes.hit(Probe::core_was_absent);
    session_life::forgive(state, unseen_ns);
    ship::forgive(state, unseen_ns);
  }
  state.now_ns = std::max(state.now_ns, now_ns);
}

void tick(State& state) {
  read::expire_leases(state);
  session_life::expire_silent(state);
  state.outcomes.expire(state.now_ns);
  poll_transport(state);
  ship::expire(state);
}

// One line a verb: which journey answers it.
absl::StatusOr<Attach::Reply> answer(State& s, const Attach& r) { return session_life::attach(s, r); }
absl::StatusOr<Nothing> answer(State& s, const Heartbeat& r) { return session_life::heartbeat(s, r); }
absl::StatusOr<Nothing> answer(State& s, const Detach& r) { return session_life::detach(s, r); }
absl::StatusOr<Nothing> answer(State& s, const Acknowledge& r) { return session_life::acknowledge(s, r); }
absl::StatusOr<Nothing> answer(State& s, const ChunkUnmapped& r) { return resize::chunk_unmapped(s, r); }
absl::StatusOr<Lookup::Reply> answer(State& s, const Lookup& r) { return read::lookup(s, r); }
absl::StatusOr<Acquire::Reply> answer(State& s, const Acquire& r) { return read::acquire(s, r); }
absl::StatusOr<Nothing> answer(State& s, const Release& r) { return read::release(s, r); }
absl::StatusOr<Nothing> answer(State& s, const Recheck& r) { return read::recheck(s, r); }
absl::StatusOr<Reserve::Reply> answer(State& s, const Reserve& r) { return store::reserve(s, r); }
absl::StatusOr<TicketView> answer(State& s, const Extend& r) { return store::extend(s, r); }
absl::StatusOr<TicketView> answer(State& s, const Publish& r) { return store::publish(s, r); }
absl::StatusOr<TicketView> answer(State& s, const Truncate& r) { return store::truncate(s, r); }
absl::StatusOr<TicketView> answer(State& s, const SealPages& r) { return store::seal_pages(s, r); }
absl::StatusOr<Nothing> answer(State& s, const SealResumePoint& r) { return store::seal_resume_point(s, r); }
absl::StatusOr<Seal::Reply> answer(State& s, const Seal& r) { return store::seal(s, r); }
absl::StatusOr<Nothing> answer(State& s, const Forfeit& r) { return store::forfeit(s, r); }
absl::StatusOr<Adopt::Reply> answer(State& s, const Adopt& r) { return adopt::adopt(s, r); }
absl::StatusOr<Nothing> answer(State& s, const ShipStart& r) { return ship::start(s, r); }
absl::StatusOr<ShipProgress::Reply> answer(State& s, const ShipProgress& r) { return ship::progress(s, r); }
absl::StatusOr<Nothing> answer(State& s, const ShipCancel& r) { return ship::cancel(s, r); }
absl::StatusOr<Nothing> answer(State& s, const Forget& r) { return evict::forget(s, r); }
absl::StatusOr<ResizeProgress> answer(State& s, const Resize& r) { return resize::resize(s, r); }
absl::StatusOr<ResizeProgress> answer(State& s, const ResizeStatus& r) { return resize::status(s, r); }
absl::StatusOr<ResizeProgress> answer(State& s, const ResizeAbort& r) { return resize::abort(s, r); }
absl::StatusOr<Evict::Reply> answer(State& s, const Evict& r) { return evict::evict(s, r); }
absl::StatusOr<ListSequences::Reply> answer(State& s, const ListSequences& r) { return evict::list_sequences(s, r); }
absl::StatusOr<Nothing> answer(State& s, const Drain&) { return evict::drain(s); }
absl::StatusOr<Snapshot> answer(State& s, const Status&) { return snapshot_of(s); }
absl::StatusOr<Nothing> answer(State& s, const Audit&) {
  if (absl::Status found = audit_state(s); !found.ok()) return found;
  return Nothing{};
}

struct Dispatch {
  State& state;

  template <class Request>
  void operator()(Call<Request>& call) const {
    // Answered before anything else is sent: an event must not overtake the reply that makes its session known.
    std::move(call.done)(answer(state, call.request));
  }
  void operator()(Call<ShipWait>& call) const { ship::wait(state, std::move(call)); }
  void operator()(const SessionLost& event) const { session_life::lost(state, event); }
  void operator()(const ProcessDied& event) const { session_life::died(state, event); }
  void operator()(const PeerMessage& message) const { ship::peer_message(state, message); }
  void operator()(const ChunkAllocated& event) const { resize::chunk_allocated(state, event); }
  void operator()(const TransportReady&) const { poll_transport(state); }
  void operator()(const Tick&) const { tick(state); }
};

}  // namespace

class Core::Impl {
 public:
  Impl(const CoreOptions& options, const Environment& environment) : state(options, environment) {}
  State state;
};

Core::Core(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Core::~Core() = default;

int64_t Core::metadata_bytes(const CoreOptions& options) {
  int64_t bytes = pools_offset(options);
  for (const PoolSetOptions& set : options.sets) {
    for (const PoolShape& shape : set.shapes) bytes += Pool::pages_max(shape) * RecordTable::kBytesPerPage;
  }
  return bytes;
}

int64_t Core::page_words_offset(const CoreOptions& options, PoolId pool) {
  int64_t offset = pools_offset(options);
  for (uint32_t before = 0; before < pool.value(); ++before) offset += page_count_max(options, PoolId(before)) * RecordTable::kBytesPerPage;
  return offset;
}

int64_t Core::page_count_max(const CoreOptions& options, PoolId pool) {
  return Pool::pages_max(options.sets[set_of(pool).value()].shapes[static_cast<size_t>(kind_of(pool))]);
}

absl::StatusOr<std::unique_ptr<Core>> Core::start(const CoreOptions& options, const Environment& environment) {
  if (absl::Status bad = validate(options); !bad.ok()) return bad;
  const int64_t needed = metadata_bytes(options);
  if (static_cast<int64_t>(environment.metadata.bytes().size()) < needed) {
    return make_error(ErrorCode::kMemory, "the metadata region has " + std::to_string(environment.metadata.bytes().size()) +
                                              " bytes, these pools need " + std::to_string(needed));
  }
  auto impl = std::make_unique<Impl>(options, environment);
  State& state = impl->state;
  state.incarnation = Incarnation(Rng(environment.incarnation_seed).next() | 1);
  state.now_ns = environment.clock.now_ns();
  build_sets(state);
  restart::rebuild(state);
  for (const auto& set : state.sets) {
    const absl::StatusOr<ChunkTargets> targets = chunk_targets(set->resize.budget_bytes, set->resize.ratios, set->options.shapes);
    if (!targets.ok()) return targets.status();
    resize::plan(state, *set, *targets);
  }
  return std::unique_ptr<Core>(new Core(std::move(impl)));
}

void Core::handle(Message message) {
  State& state = impl_->state;
  take_time(state, state.env.clock.now_ns());
  std::visit(Dispatch{state}, message);
  resize::advance(state);
}

int64_t Core::next_deadline_ns() const { return deadline_ns(impl_->state); }

Incarnation Core::incarnation() const { return impl_->state.incarnation; }
Snapshot Core::snapshot() const { return snapshot_of(impl_->state); }
absl::Status Core::audit() const { return audit_state(impl_->state); }
bool Core::drained() const { return evict::drained(impl_->state); }

}  // namespace needle::server
