// Which idle pages go first: pure functions of what is known about a page. The catalog applies them.
//
// What must stay true:
//  1. A decision depends on its arguments alone.
//  2. Leased, pinned, reserved and draining pages are never candidates; the catalog doesn't even ask.
//  3. kLeavesFirst never evicts a page that another stored page continues: a prefix hit is lost from its end inwards.
//     kLruReference is the textbook rule that public traces were measured with; it may orphan the tail of a prefix.
#pragma once

#include <cstdint>

namespace needle::server {

enum class EvictionPolicy : uint8_t { kLeavesFirst, kLruReference };

struct IdlePage {
  uint32_t children = 0;  // stored pages and sequences that continue this one
  uint32_t last_use = 0;  // tick of the catalog's use counter
};

constexpr bool is_candidate(EvictionPolicy policy, const IdlePage& page) {
  return policy == EvictionPolicy::kLruReference || page.children == 0;
}

// Ticks wrap after 2^32 uses; two live pages are never 2^31 uses apart in practice, and a wrong answer costs one miss.
constexpr bool used_before(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) < 0; }

}  // namespace needle::server
