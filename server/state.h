// Everything a core owns, in one place, for the journeys to work on. Loop thread only.
//
// What must stay true:
//  1. Journeys change state through the modules here; modules never call journeys.
//  2. A pointer to a session, ticket, lease or ship is good until the next call that may end one; nobody stores one.
//  3. now_ns never goes back, whatever the clock does.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "base/rng.h"
#include "base/units.h"
#include "server/catalog/catalog.h"
#include "server/core.h"
#include "server/journeys/resize_state.h"
#include "server/journeys/ship_state.h"
#include "server/leases.h"
#include "server/options.h"
#include "server/outcomes.h"
#include "server/pool/page_record.h"
#include "server/pool/pool.h"
#include "server/probe.h"
#include "server/sessions.h"
#include "server/tickets.h"

namespace needle::server {

struct PoolSet {
  PoolSetId id;
  PoolSetOptions options;
  PoolTrio pools;
  std::unique_ptr<Catalog> catalog;
  ResizeState resize;

  Pool& pool(PoolKind kind) { return *pools[static_cast<size_t>(kind)]; }
  int64_t page_tokens() const { return options.shapes[0].page_tokens; }
  int64_t window_page_tokens() const { return options.shapes[1].page_tokens; }
  // Window pages that a running sequence needs: the trailing window at any offset.
  int64_t window_ring() const { return options.window_tokens == 0 ? 0 : div_ceil(options.window_tokens, window_page_tokens()) + 1; }
  // The window blocks [first, last) that cover the trailing window of `tokens` tokens.
  std::pair<int64_t, int64_t> window_blocks(int64_t tokens) const {
    if (options.window_tokens == 0 || tokens == 0) return {0, 0};
    const int64_t from = tokens > options.window_tokens ? tokens - options.window_tokens : 0;
    return {from / window_page_tokens(), div_ceil(tokens, window_page_tokens())};
  }
};

struct State {
  State(const CoreOptions& core_options, const Environment& environment)
      : options(core_options),
        env(environment),
        region(environment.metadata, core_options.sessions_max),
        sessions(RegionTable::slots(core_options.sessions_max)),
        outcomes(core_options.outcome_remembered_ms * kNanosPerMilli, core_options.outcomes_max, probes) {}

  Pool& pool(PoolId id) { return *sets[set_of(id).value()]->pools[static_cast<size_t>(kind_of(id))]; }
  PoolSet& set(PoolSetId id) { return *sets[id.value()]; }
  uint64_t next_id() {  // unique in this incarnation, and unlike those of any other
    Rng mix(incarnation.value() ^ (++ids_given * 0xD1B54A32D192ED03ull));
    const uint64_t id = mix.next();
    return id == 0 ? next_id() : id;
  }
  bool names_pool(PoolId id) const { return id.value() < sets.size() * kPoolKinds; }

  const CoreOptions options;
  Environment env;
  RegionTable region;
  Epoch epoch;
  Incarnation incarnation;
  int64_t now_ns = 0;
  bool stopping = false;
  uint64_t ids_given = 0;

  Probes probes;
  std::vector<std::unique_ptr<PoolSet>> sets;
  Sessions sessions;
  Tickets tickets;
  Leases leases;
  Ships ships;
  Outcomes outcomes;
  std::vector<PageRef> ghost_pins;
  absl::btree_map<std::pair<PoolId, ChunkIndex>, std::string> descriptors;  // of registered chunks, for peers
};

}  // namespace needle::server
