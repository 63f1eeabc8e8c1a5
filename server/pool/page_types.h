// The words that pools, catalog and journeys share about pages.
//
// What must stay true:
//  1. A page is (pool, index, generation). A handle whose generation differs from the page's is stale, whatever its state.
//  2. A pool set is the paged, window and state pool of one page format under one budget. Pool ids are dense:
//     pool = 3 x set + kind, so an id needs no table to be understood.
//  3. A page name is 128 bits of a collision-resistant hash over (namespace, chained hash at the page's end). Zero is "unnamed".
#pragma once

#include <compare>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace needle::server {

using PoolSetId = Id<struct PoolSetIdTag, uint32_t, 0xFFFFFFFFu>;

enum class PoolKind : uint8_t { kPaged = 0, kWindow = 1, kState = 2 };
inline constexpr int kPoolKinds = 3;
inline constexpr const char* kPoolKindNames[kPoolKinds] = {"paged", "window", "state"};

constexpr PoolId pool_id(PoolSetId set, PoolKind kind) { return PoolId(set.value() * kPoolKinds + static_cast<uint32_t>(kind)); }
constexpr PoolSetId set_of(PoolId pool) { return PoolSetId(pool.value() / kPoolKinds); }
constexpr PoolKind kind_of(PoolId pool) { return static_cast<PoolKind>(pool.value() % kPoolKinds); }

// free -> reserved -> sealed -> draining -> free; reserved -> draining; sealed -> free when nobody holds it.
// `leased` is a count on sealed, not a state. The numbers lie in the metadata region: never renumber.
enum class PageState : uint8_t { kFree = 0, kReserved = 1, kSealed = 2, kDraining = 3 };
inline constexpr const char* kPageStateNames[4] = {"free", "reserved", "sealed", "draining"};

struct PageRef {
  PoolId pool;
  PageId page;
  friend constexpr auto operator<=>(const PageRef&, const PageRef&) = default;
};

struct PageName {
  uint64_t high = 0;
  uint64_t low = 0;
  constexpr bool is_none() const { return high == 0 && low == 0; }
  friend constexpr auto operator<=>(const PageName&, const PageName&) = default;

  template <class Hash>
  friend Hash AbslHashValue(Hash state, const PageName& name) {
    return Hash::combine(std::move(state), name.high, name.low);
  }
};
static_assert(sizeof(PageName) == 16, "page names lie in records and on the wire");

// Where the pages of a pool lie. Page i starts at byte i x page_bytes of the pool's range; a page that would cross a
// chunk edge is a gap and is never handed out.
struct PoolShape {
  int64_t page_bytes = 0;   // the stride
  int64_t page_tokens = 0;  // raw tokens a page; for state pools 0: one record a sequence
  int64_t chunk_bytes = 0;
  int64_t chunks_max = 0;  // bounds the address range and the metadata region
};

// The pages of a sequence up to `tokens`, in order of position. `paged` covers token 0 onwards, the last one partly
// filled unless tokens is a multiple of page_tokens; `window` covers the trailing window, oldest first.
// A lease on a bare prefix that ends at a resume point has the same shape.
struct PageTable {
  int64_t tokens = 0;
  std::vector<PageId> paged;
  std::vector<PageId> window;
  PageId state;
};

}  // namespace needle::server
