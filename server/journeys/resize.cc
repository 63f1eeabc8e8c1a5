#include "server/journeys/resize.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "proto/errors.h"
#include "server/holding.h"
#include "server/pool/resize_policy.h"

namespace needle::server::resize {
namespace {

int64_t bytes_held(const PoolSet& set) {
  int64_t bytes = 0;
  for (const auto& pool : set.pools) {
    for (int64_t chunk = 0; chunk < pool->shape().chunks_max; ++chunk) {
      if (pool->chunk(ChunkIndex(static_cast<uint32_t>(chunk))).state != Pool::ChunkState::kAbsent) bytes += pool->shape().chunk_bytes;
    }
  }
  for (const GrowStep& step : set.resize.grow) {
    if (step.phase != GrowStep::kWanted) bytes += set.options.shapes[static_cast<size_t>(step.kind)].chunk_bytes;
  }
  return bytes;
}

ResizeProgress progress_of(const State& state, const PoolSet& set) {
  ResizeProgress progress;
  progress.answer = set.resize.is_active() ? ResizeAnswer::kDeferred : ResizeAnswer::kApplied;
  progress.revision = set.resize.revision;
  progress.chunks_to_grow = static_cast<int64_t>(set.resize.grow.size());
  progress.chunks_to_shrink = static_cast<int64_t>(set.resize.shrink.size());
  for (const auto& [id, session] : state.sessions.all()) {
    int64_t pinned = 0;
    for (const ShrinkStep& step : set.resize.shrink) {
      if (std::count(step.awaited.begin(), step.awaited.end(), id) == 0) continue;
      pinned += set.options.shapes[static_cast<size_t>(step.kind)].chunk_bytes;
    }
    if (pinned > 0) progress.holders.push_back({id, pinned});
  }
  for (const ShrinkStep& step : set.resize.shrink) {
    progress.pages_in_use += set.pools[static_cast<size_t>(step.kind)]->chunk(step.chunk).used_pages;
  }
  return progress;
}

absl::StatusOr<PoolSet*> known_set(State& state, PoolSetId id) {
  if (id.value() < state.sets.size()) return state.sets[id.value()].get();
  return make_error(ErrorCode::kNotFound,
                    "pool set " + std::to_string(id.value()) + " does not exist, there are " + std::to_string(state.sets.size()));
}

GrowStep* growing(PoolSet& set, PoolKind kind, ChunkIndex chunk, GrowStep::Phase phase) {
  for (GrowStep& step : set.resize.grow) {
    if (step.kind == kind && step.chunk == chunk && step.phase == phase) return &step;
  }
  return nullptr;
}

void drop_step(PoolSet& set, const GrowStep* step) { set.resize.grow.erase(set.resize.grow.begin() + (step - set.resize.grow.data())); }

// A chunk that could not be had: the resize ends smaller, and says why until the next one.
void give_up(State& state, PoolSet& set, GrowStep* step, Probe probe, const std::string& what, const absl::Status& cause) {
  set.resize.failure =
      make_error(ErrorCode::kMemory, "chunk " + std::to_string(step->chunk.value()) + " of the " +
                                         kPoolKindNames[static_cast<size_t>(step->kind)] + " pool could not be " + what + ": " +
                                         std::string(cause.message()) + "; the pool stays smaller, resize again when there is memory");
  state.probes.hit(probe);
  state.env.log.write(LogLevel::kWarning, kProbeNames[static_cast<size_t>(probe)],
                      {{"chunk", std::to_string(step->chunk.value())}, {"cause", std::string(cause.message())}});
  drop_step(set, step);
}

// Everyone who maps the chunk is asked to let go; a silent one is awaited until it wakes or dies.
void ask_to_unmap(State& state, PoolSet& set, ShrinkStep& step) {
  step.phase = ShrinkStep::kMappings;
  for (const auto& [id, session] : state.sessions.all()) {
    if (session->is_remote() || session->set != set.id) continue;
    step.awaited.push_back(id);
    state.env.outbox.to_session(id, ChunkRetiring{pool_id(set.id, step.kind), step.chunk});
  }
}

// Whether the step is done.
bool advance_shrink(State& state, PoolSet& set, ShrinkStep& step) {
  Pool& pool = set.pool(step.kind);
  if (step.phase == ShrinkStep::kPages) {
    if (pool.chunk(step.chunk).idle_pages > 0) set.catalog->vacate(step.kind, step.chunk);
    if (pool.chunk(step.chunk).used_pages > 0) return false;
    ask_to_unmap(state, set, step);
  }
  if (!step.awaited.empty()) {
    state.probes.hit(Probe::resize_waited_for_session);
    return false;
  }
  if (step.phase == ShrinkStep::kMappings) {
    step.phase = ShrinkStep::kTransport;  // a late peer may still be reading
    state.env.transport.release_chunk(pool.id(), step.chunk);
  }
  if (step.phase != ShrinkStep::kReleased) return false;
  state.descriptors.erase({pool.id(), step.chunk});
  pool.remove_chunk(step.chunk);
  state.env.memory.free_chunk(pool.id(), step.chunk);
  state.probes.hit(Probe::resize_chunk_shrunk);
  return true;
}

}  // namespace

void plan(State& state, PoolSet& set, const ChunkTargets& targets) {
  for (size_t kind = 0; kind < kPoolKinds; ++kind) {
    Pool& pool = *set.pools[kind];
    const PoolKind pool_kind = static_cast<PoolKind>(kind);
    int64_t missing = targets[kind] - pool.chunks_live();
    if (missing < 0) {
      std::vector<ChunkFacts> facts;
      for (int64_t chunk = 0; chunk < pool.shape().chunks_max; ++chunk) {
        const Pool::Chunk& entry = pool.chunk(ChunkIndex(static_cast<uint32_t>(chunk)));
        if (entry.state == Pool::ChunkState::kLive) facts.push_back({chunk, entry.used_pages - entry.idle_pages, entry.idle_pages});
      }
      for (int64_t chunk : choose_chunks_to_retire(facts, -missing)) {
        const ChunkIndex index(static_cast<uint32_t>(chunk));
        pool.retire_chunk(index);
        set.resize.shrink.push_back({pool_kind, index, ShrinkStep::kPages, {}});
      }
    }
    for (int64_t chunk = 0; chunk < pool.shape().chunks_max && missing > 0; ++chunk) {
      const ChunkIndex index(static_cast<uint32_t>(chunk));
      if (pool.chunk(index).state != Pool::ChunkState::kAbsent) continue;
      set.resize.grow.push_back({pool_kind, index, GrowStep::kWanted});
      --missing;
    }
  }
  advance(state);
}

void advance(State& state) {
  for (const auto& entry : state.sets) {
    PoolSet& set = *entry;
    if (!set.resize.is_active()) continue;
    std::erase_if(set.resize.shrink, [&](ShrinkStep& step) { return advance_shrink(state, set, step); });
    for (GrowStep& step : set.resize.grow) {
      if (step.phase != GrowStep::kWanted) continue;
      const int64_t bytes = set.options.shapes[static_cast<size_t>(step.kind)].chunk_bytes;
      if (bytes_held(set) + bytes > set.resize.budget_bytes) break;
      step.phase = GrowStep::kAllocating;
      state.env.memory.allocate_chunk(pool_id(set.id, step.kind), step.chunk, bytes);
    }
    if (!set.resize.is_active()) state.probes.hit(Probe::resize_applied);
  }
}

absl::StatusOr<ResizeProgress> resize(State& state, const Resize& request) {
  const absl::StatusOr<PoolSet*> known = known_set(state, request.set);
  if (!known.ok()) return known.status();
  PoolSet& set = **known;
  ResizeState& job = set.resize;
  // A repeat of the resize that is under way, or done, is told how it stands.
  const bool repeat = request.revision == job.revision && request.budget_bytes == job.budget_bytes && request.ratios == job.ratios;
  if (repeat && !request.dry_run) return progress_of(state, set);
  if (request.revision != job.revision + 1) {
    state.probes.hit(Probe::resize_refused);
    return make_error(ErrorCode::kStale, "the revision is " + std::to_string(request.revision) + ", the next one is " +
                                             std::to_string(job.revision + 1) + ": look at the present budget and decide again");
  }
  if (job.is_active()) {
    state.probes.hit(Probe::resize_refused);
    return make_error(ErrorCode::kConflict, "resize " + std::to_string(job.revision) + " is still under way: wait, or abort it",
                      state.options.retry_after_ms);
  }
  int64_t range_bytes = 0;
  for (const PoolShape& shape : set.options.shapes) range_bytes += shape.chunk_bytes * shape.chunks_max;
  if (request.budget_bytes > range_bytes) {
    state.probes.hit(Probe::resize_refused);
    return make_error(ErrorCode::kImpossible, "the budget is " + std::to_string(request.budget_bytes) +
                                                  " bytes, the pools' address ranges have " + std::to_string(range_bytes) +
                                                  " together: ask for less, or restart with larger ranges");
  }
  const absl::StatusOr<ChunkTargets> targets = chunk_targets(request.budget_bytes, request.ratios, set.options.shapes);
  if (!targets.ok()) {
    state.probes.hit(Probe::resize_refused);
    return targets.status();
  }
  if (request.dry_run) {
    ResizeProgress progress;
    progress.revision = job.revision;
    for (size_t kind = 0; kind < kPoolKinds; ++kind) {
      const int64_t change = (*targets)[kind] - set.pools[kind]->chunks_live();
      progress.chunks_to_grow += std::max<int64_t>(0, change);
      progress.chunks_to_shrink += std::max<int64_t>(0, -change);
    }
    progress.answer = progress.chunks_to_grow + progress.chunks_to_shrink == 0 ? ResizeAnswer::kApplied : ResizeAnswer::kDeferred;
    return progress;
  }
  job.revision = request.revision;
  job.budget_bytes = request.budget_bytes;
  job.ratios = request.ratios;
  job.failure = absl::OkStatus();
  plan(state, set, *targets);
  const ResizeProgress progress = progress_of(state, set);
  if (progress.answer == ResizeAnswer::kDeferred) state.probes.hit(Probe::resize_deferred);
  return progress;
}

absl::StatusOr<ResizeProgress> status(State& state, const ResizeStatus& request) {
  const absl::StatusOr<PoolSet*> known = known_set(state, request.set);
  if (!known.ok()) return known.status();
  if (!(*known)->resize.is_active() && !(*known)->resize.failure.ok()) return (*known)->resize.failure;
  return progress_of(state, **known);
}

absl::StatusOr<ResizeProgress> abort(State& state, const ResizeAbort& request) {
  const absl::StatusOr<PoolSet*> known = known_set(state, request.set);
  if (!known.ok()) return known.status();
  PoolSet& set = **known;
  std::erase_if(set.resize.grow, [](const GrowStep& step) { return step.phase == GrowStep::kWanted; });
  std::erase_if(set.resize.shrink, [&](const ShrinkStep& step) {
    if (step.phase != ShrinkStep::kPages) return false;
    set.pool(step.kind).restore_chunk(step.chunk);
    return true;
  });
  state.probes.hit(Probe::resize_aborted);
  return progress_of(state, set);
}

absl::StatusOr<Nothing> chunk_unmapped(State& state, const ChunkUnmapped& request) {
  // A revoked session may say this too: it concerns memory, not rights.
  const Session* session = state.sessions.find(request.session);
  if (session == nullptr) {
    return make_error(ErrorCode::kStale, "session " + std::to_string(request.session.value()) + " is unknown here: attach anew");
  }
  if (!state.names_pool(request.pool)) {
    return make_error(ErrorCode::kNotFound, "pool " + std::to_string(request.pool.value()) + " does not exist");
  }
  PoolSet& set = state.set(set_of(request.pool));
  for (ShrinkStep& step : set.resize.shrink) {
    if (step.kind == kind_of(request.pool) && step.chunk == request.chunk) std::erase(step.awaited, request.session);
  }
  return Nothing{};
}

void chunk_allocated(State& state, const ChunkAllocated& event) {
  PoolSet& set = state.set(set_of(event.pool));
  GrowStep* step = growing(set, kind_of(event.pool), event.chunk, GrowStep::kAllocating);
  if (step == nullptr) {
    state.probes.hit(Probe::unknown_event_dropped);
    return;
  }
  if (!event.status.ok()) return give_up(state, set, step, Probe::chunk_allocation_failed, "allocated", event.status);
  step->phase = GrowStep::kRegistering;
  state.env.transport.register_chunk(event.pool, event.chunk);
}

void chunk_registered(State& state, const RegisterCompletion& event) {
  PoolSet& set = state.set(set_of(event.pool));
  Pool& pool = state.pool(event.pool);
  GrowStep* step = growing(set, kind_of(event.pool), event.chunk, GrowStep::kRegistering);
  if (step == nullptr) {  // a chunk that survived a restart
    const bool present = pool.chunk(event.chunk).state != Pool::ChunkState::kAbsent;
    if (present && event.status.ok()) {
      pool.set_registered(event.chunk, true);
      state.descriptors[{event.pool, event.chunk}] = event.descriptor;
    }
    if (!event.status.ok()) state.probes.hit(Probe::chunk_registration_failed);
    return;
  }
  if (!event.status.ok()) {
    state.env.memory.free_chunk(event.pool, event.chunk);
    return give_up(state, set, step, Probe::chunk_registration_failed, "registered", event.status);
  }
  state.descriptors[{event.pool, event.chunk}] = event.descriptor;
  drop_step(set, step);
  pool.add_chunk(event.chunk);
  pool.set_registered(event.chunk, true);
  state.probes.hit(Probe::resize_chunk_grown);
  for (const auto& [id, session] : state.sessions.all()) {
    if (!session->is_remote() && session->set == set.id) state.env.outbox.to_session(id, ChunkMapped{event.pool, event.chunk});
  }
}

void chunk_released(State& state, const ReleaseCompletion& event) {
  PoolSet& set = state.set(set_of(event.pool));
  for (ShrinkStep& step : set.resize.shrink) {
    const bool awaited = step.kind == kind_of(event.pool) && step.chunk == event.chunk && step.phase == ShrinkStep::kTransport;
    if (awaited) step.phase = ShrinkStep::kReleased;
  }
}

void forget_session(State& state, SessionId session) {
  for (const auto& set : state.sets) {
    for (ShrinkStep& step : set->resize.shrink) std::erase(step.awaited, session);
  }
}

bool is_unmapping(const PoolSet& set, PoolKind kind, ChunkIndex chunk) {
  return std::any_of(set.resize.shrink.begin(), set.resize.shrink.end(),
                     [&](const ShrinkStep& step) { return step.kind == kind && step.chunk == chunk && step.phase != ShrinkStep::kPages; });
}

}  // namespace needle::server::resize
