#include "server/journeys/restart.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "base/check.h"

namespace needle::server::restart {
namespace {

constexpr uint64_t kMagic = 0x316174654D6C646Eull;  // "ndlMeta1" in memory
constexpr uint64_t kLayoutVersion = 2;              // 2: two headers, a spare session slot

// Everything that decides where a word or record lies, or what bytes mean.
uint64_t layout_of(const State& state) {
  uint64_t hash = kLayoutVersion;
  const auto mix = [&](uint64_t value) { hash = Rng(hash ^ value * 0x9E3779B97F4A7C15ull).next(); };
  mix(static_cast<uint64_t>(state.options.sessions_max));
  for (const auto& set : state.sets) {
    for (const std::string& text : {set->options.name, set->options.format}) {
      mix(text.size());
      mix(crc32c(1, std::as_bytes(std::span(text))));
      mix(crc32c(2, std::as_bytes(std::span(text))));
    }
    for (const PoolShape& shape : set->options.shapes) {
      mix(static_cast<uint64_t>(shape.page_bytes));
      mix(static_cast<uint64_t>(shape.page_tokens));
      mix(static_cast<uint64_t>(shape.chunk_bytes));
      mix(static_cast<uint64_t>(shape.chunks_max));
    }
  }
  return hash;
}

template <class Visit>
void for_each_pool(State& state, Visit visit) {
  for (const auto& set : state.sets) {
    for (const auto& pool : set->pools) visit(*set, *pool);
  }
}

template <class Visit>
void for_each_page(const Pool& pool, Visit visit) {
  for (int64_t page = 0; page < pool.pages_max(); ++page) visit(PageIndex(static_cast<uint32_t>(page)));
}

bool chunk_is_live(const Pool& pool, PageIndex page) { return pool.chunk(pool.chunk_of(page)).state == Pool::ChunkState::kLive; }

// Pages of chunks whose bytes are gone; true when there were any.
bool free_lost_pages(State& state) {
  bool lost = false;
  for_each_pool(state, [&](PoolSet&, Pool& pool) {
    RecordTable records = pool.records();
    for_each_page(pool, [&](PageIndex page) {
      if (records.state(page) == PageState::kFree || state.env.memory.chunk_present(pool.id(), pool.chunk_of(page))) return;
      records.write_word(page, records.generation(page), PageState::kFree);
      lost = true;
    });
  });
  return lost;
}

// Without records nobody can tell who may still write where. Whoever maps such a chunk keeps it; nobody is given it again.
void give_up_surviving_chunks(State& state) {
  for_each_pool(state, [&](PoolSet&, Pool& pool) {
    for (int64_t chunk = 0; chunk < pool.shape().chunks_max; ++chunk) {
      const ChunkIndex index(static_cast<uint32_t>(chunk));
      if (state.env.memory.chunk_present(pool.id(), index)) state.env.memory.free_chunk(pool.id(), index);
    }
  });
}

void add_surviving_chunks(State& state) {
  for_each_pool(state, [&](PoolSet&, Pool& pool) {
    for (int64_t chunk = 0; chunk < pool.shape().chunks_max; ++chunk) {
      const ChunkIndex index(static_cast<uint32_t>(chunk));
      if (!state.env.memory.chunk_present(pool.id(), index)) continue;
      pool.add_chunk(index);
      state.env.transport.register_chunk(pool.id(), index);
    }
  });
}

// Sessions of the earlier process, by slot.
std::map<int64_t, Session*> read_ghosts(State& state) {
  std::map<int64_t, Session*> ghosts;
  for (int64_t slot = 0; slot < state.region.slots(); ++slot) {
    const std::optional<SessionSlot> found = state.region.session(slot);
    if (!found.has_value() || found->set >= state.sets.size()) continue;
    auto ghost = std::make_unique<Session>();
    ghost->id = SessionId(found->session);
    ghost->slot = slot;
    ghost->set = PoolSetId(found->set);
    ghost->process = {found->pid, found->start_time_ticks, 0, found->instance};
    ghost->standing = Standing::kGhost;
    ghosts[slot] = &state.sessions.add(std::move(ghost));
  }
  return ghosts;
}

// Takes a page out of use: free, or draining while a ghost pins it.
void discard(Pool& pool, PageIndex page) {
  if (!pool.is_held(page)) return pool.force_free(page);
  if (pool.state(page) != PageState::kDraining) pool.drain(pool.id_of(page));
}

// Pins what ghosts may touch and ends what nobody completed. What stays sealed afterwards has a whole record.
void settle_pages(State& state, const std::map<int64_t, Session*>& ghosts) {
  for_each_pool(state, [&](PoolSet&, Pool& pool) {
    for_each_page(pool, [&](PageIndex page) {
      if (!chunk_is_live(pool, page) || pool.state(page) == PageState::kFree) return;
      const PageRecord record = pool.records().record(page);
      const bool whole = pool.records().intact(page) && record.generation == pool.records().generation(page);
      const PageRef ref{pool.id(), pool.id_of(page)};
      const auto pin_together = [&] {
        if (ghosts.empty()) return;
        pool.pin(page);
        state.ghost_pins.push_back(ref);
      };
      if (pool.state(page) == PageState::kSealed) {
        pin_together();
        if (whole && record.role() != PageRole::kOpen) return;
        state.probes.hit(Probe::restart_record_bad);
        return discard(pool, page);
      }
      // Reserved or draining: whose was it?
      const auto owner = ghosts.find(record.owner);
      if (!whole || record.role() != PageRole::kOpen) {
        pin_together();
      } else if (owner != ghosts.end()) {
        pool.pin(page);
        owner->second->pins.push_back({ref, TicketId()});
      }
      state.probes.hit(pool.is_held(page) ? Probe::restart_page_drained : Probe::restart_page_freed);
      discard(pool, page);
    });
  });
}

// Named pages, parents before children. A page whose parent is gone is content that nobody can reach in order: it goes.
void rebuild_tree(State& state, PoolSet& set) {
  Pool& paged = set.pool(PoolKind::kPaged);
  std::vector<std::pair<uint32_t, PageIndex>> named;  // (tokens_end, page)
  for_each_page(paged, [&](PageIndex page) {
    if (!chunk_is_live(paged, page) || paged.state(page) != PageState::kSealed) return;
    const PageRecord record = paged.records().record(page);
    if (record.role() == PageRole::kNamed) named.emplace_back(record.tokens_end, page);
  });
  std::sort(named.begin(), named.end());
  for (const auto& [end, page] : named) {
    const PageId parent = paged.records().parent(page);
    const bool rooted = parent.index.is_none() ? end == set.page_tokens() : paged.is_current(parent) && paged.is_named(parent.index);
    if (!rooted || !set.catalog->find(paged.records().name(page)).is_none()) {
      state.probes.hit(Probe::restart_orphan_dropped);
      discard(paged, page);
      continue;
    }
    set.catalog->insert_page(paged.id_of(page), parent);
  }
}

// The full pages from token 0 to `last`, or nothing when the chain is broken.
std::optional<std::vector<PageId>> chain_to(PoolSet& set, PageId last, int64_t pages) {
  const Pool& paged = set.pool(PoolKind::kPaged);
  std::vector<PageId> chain(static_cast<size_t>(pages));
  PageId at = last;
  for (auto place = chain.rbegin(); place != chain.rend(); ++place) {
    if (!paged.is_current(at) || !paged.is_named(at.index)) return std::nullopt;
    *place = at;
    at = paged.records().parent(at.index);
  }
  if (!at.index.is_none()) return std::nullopt;
  return chain;
}

// Members of one set share role, sequence and the page they hang on.
using SetKey = std::tuple<PageRole, SequenceId, PageId>;
using Members = std::map<SetKey, std::vector<std::pair<uint16_t, PageId>>>;  // (ordinal, page)

Members members_of(const Pool& pool) {
  Members members;
  for_each_page(pool, [&](PageIndex page) {
    if (!chunk_is_live(pool, page) || pool.state(page) != PageState::kSealed) return;
    const PageRecord record = pool.records().record(page);
    if (record.role() != PageRole::kSequenceMember && record.role() != PageRole::kResumeMember) return;
    members[{record.role(), record.sequence, record.parent}].emplace_back(record.ordinal(), pool.id_of(page));
  });
  for (auto& [key, pages] : members) std::sort(pages.begin(), pages.end());
  return members;
}

// The window members of a commit, in order; nothing when one is missing or one too many is there.
std::optional<std::vector<PageId>> take_members(Members& members, const SetKey& key, uint16_t count) {
  std::vector<PageId> pages;
  const auto found = members.find(key);
  if (found != members.end()) {
    for (size_t i = 0; i < found->second.size(); ++i) {
      if (found->second[i].first != i) return std::nullopt;
      pages.push_back(found->second[i].second);
    }
  }
  if (pages.size() != count) return std::nullopt;
  if (found != members.end()) members.erase(found);
  return pages;
}

void discard_members(State& state, Pool& pool, const Members& members) {
  for (const auto& [key, pages] : members) {
    for (const auto& [ordinal, page] : pages) {
      state.probes.hit(Probe::restart_set_incomplete);
      discard(pool, page.index);
    }
  }
}

bool rebuild_sequence(State& state, PoolSet& set, PageIndex commit, const PageRecord& record, Members& windows, Members& partials) {
  StoredSequence stored;
  stored.sequence = record.sequence;
  stored.tokens = record.tokens_end;
  stored.state = set.pool(PoolKind::kState).id_of(commit);
  if (set.catalog->sequence(record.sequence) != nullptr) return false;
  const std::optional<std::vector<PageId>> chain = chain_to(set, record.parent, stored.tokens / set.page_tokens());
  if (!chain.has_value()) return false;
  const SetKey key{PageRole::kSequenceMember, record.sequence, record.parent};
  const auto partial = partials.find(key);
  const bool wants_partial = stored.tokens % set.page_tokens() != 0;
  if (wants_partial && (partial == partials.end() || partial->second.size() != 1)) return false;
  const std::optional<std::vector<PageId>> window = take_members(windows, key, record.ordinal());
  if (!window.has_value()) return false;
  if (wants_partial) {
    stored.partial = partial->second[0].second;
    partials.erase(partial);
  }
  stored.full = *chain;
  stored.window = *window;
  set.catalog->insert_sequence(std::move(stored));
  state.probes.hit(Probe::restart_sequence_kept);
  return true;
}

bool rebuild_resume_point(State& state, PoolSet& set, PageIndex commit, const PageRecord& record, Members& windows) {
  const Pool& paged = set.pool(PoolKind::kPaged);
  const bool hangs =
      paged.is_current(record.parent) && paged.is_named(record.parent.index) && set.catalog->resume_point(record.parent.index) == nullptr;
  if (!hangs) return false;
  const std::optional<std::vector<PageId>> window =
      take_members(windows, {PageRole::kResumeMember, record.sequence, record.parent}, record.ordinal());
  if (!window.has_value()) return false;
  ResumePoint point;
  point.boundary = record.parent;
  point.tokens = record.tokens_end;
  point.window = *window;
  point.state = set.pool(PoolKind::kState).id_of(commit);
  set.catalog->insert_resume_point(std::move(point));
  state.probes.hit(Probe::restart_resume_point_kept);
  return true;
}

void rebuild_sets(State& state, PoolSet& set) {
  Pool& states = set.pool(PoolKind::kState);
  Members windows = members_of(set.pool(PoolKind::kWindow));
  Members partials = members_of(set.pool(PoolKind::kPaged));
  for_each_page(states, [&](PageIndex page) {
    if (!chunk_is_live(states, page) || states.state(page) != PageState::kSealed) return;
    const PageRecord record = states.records().record(page);
    const bool kept = record.role() == PageRole::kSequenceCommit ? rebuild_sequence(state, set, page, record, windows, partials)
                                                                 : rebuild_resume_point(state, set, page, record, windows);
    if (kept) return;
    state.probes.hit(Probe::restart_set_incomplete);
    discard(states, page);
  });
  discard_members(state, set.pool(PoolKind::kWindow), windows);
  discard_members(state, set.pool(PoolKind::kPaged), partials);
}

}  // namespace

void rebuild(State& state) {
  const uint64_t layout = layout_of(state);
  const std::optional<RegionHeader> header = state.region.header();
  const bool known = header.has_value() && header->magic == kMagic && header->layout == layout;
  if (!known) {
    // A zeroed region needs no formatting: zero words are free pages. Anything else is wiped before the header names it.
    give_up_surviving_chunks(state);
    if (!state.region.is_blank()) {
      for (int64_t slot = 0; slot < state.region.slots(); ++slot) state.region.clear_session(slot);
      for_each_pool(state, [&](PoolSet&, Pool& pool) {
        RecordTable records = pool.records();
        for_each_page(pool, [&](PageIndex page) { records.write_word(page, Generation(), PageState::kFree); });
      });
    }
    state.epoch = Epoch(state.incarnation.value());
    state.region.write_header({kMagic, layout, state.epoch.value(), state.incarnation.value(), 0, 0});
    return;
  }
  const bool lost = free_lost_pages(state);
  state.epoch = lost ? Epoch(state.incarnation.value()) : Epoch(header->epoch);
  NEEDLE_CHECK(header->incarnation != state.incarnation.value(), "an incarnation was drawn twice");
  state.region.write_header({kMagic, layout, state.epoch.value(), state.incarnation.value(), 0, 0});
  add_surviving_chunks(state);
  settle_pages(state, read_ghosts(state));
  for (const auto& set : state.sets) {
    rebuild_tree(state, *set);
    rebuild_sets(state, *set);
  }
  state.probes.hit(Probe::restart_rebuilt);
}

}  // namespace needle::server::restart
