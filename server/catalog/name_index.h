// From a page's name to the page: open addressing over page indices; the names themselves stay in the records.
//
// Owned by the catalog, loop thread only.
//
// What must stay true:
//  1. Sized once for every page the pool can ever have, load <= 1/2: no growth, so no pause at ten million pages.
//  2. Erasing shifts later entries back; there are no tombstones, so probes stay short for ever.
//  3. Names come from a collision-resistant hash, so their low bits are the hash here.
#pragma once

#include <bit>
#include <cstdint>

#include "base/check.h"
#include "server/pool/pool.h"

namespace needle::server {

class NameIndex {
 public:
  NameIndex(const RecordTable& records, int64_t pages_max)
      : records_(records),
        mask_(std::bit_ceil(static_cast<uint64_t>(pages_max < 4 ? 8 : 2 * pages_max)) - 1),
        slots_(static_cast<int64_t>(mask_ + 1)) {}

  int64_t size() const { return size_; }

  PageIndex find(const PageName& name) const {
    for (uint64_t slot = name.low & mask_;; slot = (slot + 1) & mask_) {
      const uint32_t entry = slots_[static_cast<int64_t>(slot)];
      if (entry == 0) return PageIndex::none();
      if (records_.name(PageIndex(entry - 1)) == name) return PageIndex(entry - 1);
    }
  }

  void insert(const PageName& name, PageIndex page) {
    NEEDLE_CHECK(static_cast<uint64_t>(size_) <= mask_ / 2, "more names than pages");
    uint64_t slot = name.low & mask_;
    while (slots_[static_cast<int64_t>(slot)] != 0) slot = (slot + 1) & mask_;
    slots_[static_cast<int64_t>(slot)] = page.value() + 1;
    ++size_;
  }

  // The page's record must still hold its name.
  void erase(PageIndex page) {
    uint64_t hole = records_.name(page).low & mask_;
    while (slots_[static_cast<int64_t>(hole)] != page.value() + 1) {
      NEEDLE_CHECK(slots_[static_cast<int64_t>(hole)] != 0, "a named page is missing from the name index");
      hole = (hole + 1) & mask_;
    }
    for (uint64_t slot = (hole + 1) & mask_; slots_[static_cast<int64_t>(slot)] != 0; slot = (slot + 1) & mask_) {
      const PageIndex other(slots_[static_cast<int64_t>(slot)] - 1);
      const uint64_t home = records_.name(other).low & mask_;
      const bool may_move = ((slot - home) & mask_) >= ((slot - hole) & mask_);
      if (!may_move) continue;
      slots_[static_cast<int64_t>(hole)] = slots_[static_cast<int64_t>(slot)];
      hole = slot;
    }
    slots_[static_cast<int64_t>(hole)] = 0;
    --size_;
  }

 private:
  const RecordTable& records_;
  const uint64_t mask_;
  LazyArray<uint32_t> slots_;  // page index + 1; 0 is empty
  int64_t size_ = 0;
};

}  // namespace needle::server
