#include "server/pool/pool.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "proto/errors.h"

namespace needle::server {
namespace {

// How far an uncovered page may look for its place by age. A page that finds none goes to the young end and stays longer
// than its age deserves: one miss fewer or more, never a wrong answer. 64 steps keep eviction O(1).
constexpr int kPlaceSteps = 64;

}  // namespace

int64_t Pool::pages_max(const PoolShape& shape) {
  return shape.page_bytes == 0 ? 0 : shape.chunk_bytes * shape.chunks_max / shape.page_bytes;
}

Pool::Pool(PoolId id, const PoolShape& shape, EvictionPolicy policy, const RecordTable& records)
    : id_(id),
      shape_(shape),
      policy_(policy),
      pages_max_(pages_max(shape)),
      records_(records),
      infos_(pages_max_),
      chunks_(static_cast<size_t>(shape.chunks_max)) {}

bool Pool::is_gap(int64_t page) const {
  const int64_t first_byte = page * shape_.page_bytes;
  const int64_t last_byte = first_byte + shape_.page_bytes - 1;
  return first_byte / shape_.chunk_bytes != last_byte / shape_.chunk_bytes;
}

ChunkIndex Pool::chunk_of(PageIndex page) const {
  return ChunkIndex(static_cast<uint32_t>(int64_t{page.value()} * shape_.page_bytes / shape_.chunk_bytes));
}

std::pair<int64_t, int64_t> Pool::pages_of(ChunkIndex chunk) const {
  const int64_t first_byte = int64_t{chunk.value()} * shape_.chunk_bytes;
  return {(first_byte + shape_.page_bytes - 1) / shape_.page_bytes,
          std::min((first_byte + shape_.chunk_bytes) / shape_.page_bytes, pages_max_)};
}

PageClass Pool::class_of(PageIndex page) const {
  const ChunkState chunk = chunks_[chunk_of(page).value()].state;
  if (chunk == ChunkState::kAbsent) return PageClass::kAbsent;
  const PageInfo& info = infos_[page.value()];
  switch (records_.state(page)) {
    case PageState::kFree:
      if (is_gap(page.value())) return PageClass::kGap;
      return chunk == ChunkState::kRetiring ? PageClass::kRetiring : PageClass::kFree;
    case PageState::kReserved: return PageClass::kReserved;
    case PageState::kSealed:
      if (info.leases > 0) return PageClass::kLeased;
      return info.pins > 0 ? PageClass::kDraining : PageClass::kSealedIdle;
    case PageState::kDraining: return PageClass::kDraining;
  }
  return PageClass::kAbsent;
}

bool Pool::is_current(PageId page) const {
  if (page.index.is_none() || page.index.value() >= pages_max_) return false;
  if (chunks_[chunk_of(page.index).value()].state == ChunkState::kAbsent) return false;
  return records_.generation(page.index) == page.generation && state(page.index) == PageState::kSealed;
}

int64_t& Pool::count_of(PageClass page_class) {
  switch (page_class) {
    case PageClass::kGap: return occupancy_.gap;
    case PageClass::kRetiring: return occupancy_.retiring;
    case PageClass::kFree: return occupancy_.free;
    case PageClass::kReserved: return occupancy_.reserved;
    case PageClass::kSealedIdle: return occupancy_.sealed_idle;
    case PageClass::kLeased: return occupancy_.leased;
    case PageClass::kDraining: return occupancy_.draining;
    case PageClass::kAbsent: break;
  }
  return absent_;
}

void Pool::push_back(List& list, PageIndex page) {
  PageInfo& info = infos_[page.value()];
  info.previous = list.tail;
  info.next = 0;
  if (list.tail != 0) infos_[list.tail - 1].next = page.value() + 1;
  list.tail = page.value() + 1;
  if (list.head == 0) list.head = list.tail;
  ++list.count;
}

void Pool::push_front(List& list, PageIndex page) {
  if (list.head == 0) return push_back(list, page);
  insert_before(list, page, from_link(list.head));
}

void Pool::insert_before(List& list, PageIndex page, PageIndex before) {
  PageInfo& info = infos_[page.value()];
  PageInfo& successor = infos_[before.value()];
  info.previous = successor.previous;
  info.next = before.value() + 1;
  if (successor.previous != 0) infos_[successor.previous - 1].next = page.value() + 1;
  if (successor.previous == 0) list.head = page.value() + 1;
  successor.previous = page.value() + 1;
  ++list.count;
}

void Pool::remove(List& list, PageIndex page) {
  PageInfo& info = infos_[page.value()];
  if (info.previous != 0) infos_[info.previous - 1].next = info.next;
  if (info.next != 0) infos_[info.next - 1].previous = info.previous;
  if (list.head == page.value() + 1) list.head = info.next;
  if (list.tail == page.value() + 1) list.tail = info.previous;
  info.previous = info.next = 0;
  --list.count;
}

void Pool::unlist(PageIndex page) {
  PageInfo& info = infos_[page.value()];
  if ((info.flags & kFlagListed) == 0) return;
  info.flags = static_cast<uint16_t>(info.flags & ~kFlagListed);
  remove(idle_, page);
}

void Pool::list_if_idle(PageIndex page, bool uncovered) {
  PageInfo& info = infos_[page.value()];
  const bool candidate = (info.flags & kFlagNamed) != 0 && is_candidate(policy_, {info.children, info.last_use});
  if (!candidate) return unlist(page);
  if ((info.flags & kFlagListed) != 0) return;
  info.flags |= kFlagListed;
  if (!uncovered) return push_back(idle_, page);

  // Its last continuation was evicted just now, so it is about as old as the oldest: look for its place from that end.
  PageIndex place = list_head(idle_);
  for (int step = 0; step < kPlaceSteps && !place.is_none(); ++step) {
    if (!used_before(infos_[place.value()].last_use, info.last_use)) return insert_before(idle_, page, place);
    place = from_link(infos_[place.value()].next);
  }
  push_back(idle_, page);
}

void Pool::after(PageIndex page, PageClass was, bool uncovered) {
  const PageClass now = class_of(page);
  if (now != was) {
    --count_of(was);
    ++count_of(now);
    Chunk& chunk = chunks_[chunk_of(page).value()];
    const auto used = [](PageClass c) { return c >= PageClass::kReserved; };
    chunk.used_pages += (used(now) ? 1 : 0) - (used(was) ? 1 : 0);
    chunk.idle_pages += (now == PageClass::kSealedIdle ? 1 : 0) - (was == PageClass::kSealedIdle ? 1 : 0);
    if (was == PageClass::kFree) remove(free_, page);
    if (was == PageClass::kSealedIdle) unlist(page);
    if (now == PageClass::kFree) push_front(free_, page);
    if (now == PageClass::kRetiring) --occupancy_.capacity;
    if (was == PageClass::kRetiring) ++occupancy_.capacity;
  }
  if (now == PageClass::kSealedIdle) list_if_idle(page, uncovered);
}

bool Pool::reserve(int64_t count, uint16_t owner, std::vector<PageId>& pages) {
  if (count > occupancy_.free) return false;
  for (int64_t taken = 0; taken < count; ++taken) {
    const PageIndex page = list_head(free_);
    NEEDLE_CHECK(!is_held(page), "a free page is held");
    const uint32_t next = records_.generation(page).value() + 1;
    const Generation generation(next == 0 ? 1 : next);
    PageRecord record;
    record.generation = generation;
    record.owner = owner;
    records_.write_record(page, record);
    records_.write_word(page, generation, PageState::kReserved);
    after(page, PageClass::kFree);
    infos_[page.value()] = PageInfo{};
    pages.push_back({page, generation});
  }
  return true;
}

void Pool::seal(PageId page, PageRecord record) {
  NEEDLE_CHECK(state(page.index) == PageState::kReserved, "only a reserved page can be sealed");
  NEEDLE_CHECK(records_.generation(page.index) == page.generation, "a page is sealed in the generation it was reserved in");
  record.generation = page.generation;
  const PageClass was = class_of(page.index);
  records_.write_record(page.index, record);
  records_.write_word(page.index, page.generation, PageState::kSealed);
  after(page.index, was);
}

PageId Pool::reopen(PageId page, uint16_t owner) {
  NEEDLE_CHECK(is_current(page) && !is_held(page.index), "only a sealed page that nobody holds can be reopened");
  NEEDLE_CHECK(!is_named(page.index), "a named page's bytes never change");
  const PageClass was = class_of(page.index);
  const Generation generation(page.generation.value() + 1 == 0 ? 1 : page.generation.value() + 1);
  PageRecord record;
  record.generation = generation;
  record.owner = owner;
  // Not sealed any more before the record goes: a sealed word never stands beside another generation's record.
  records_.write_word(page.index, page.generation, PageState::kDraining);
  records_.write_record(page.index, record);
  records_.write_word(page.index, generation, PageState::kReserved);
  after(page.index, was);
  return {page.index, generation};
}

void Pool::name(PageIndex page, PageIndex parent, uint32_t use) {
  PageInfo& info = infos_[page.value()];
  NEEDLE_CHECK(state(page) == PageState::kSealed && (info.flags & kFlagNamed) == 0, "a sealed page is named once");
  const PageClass was = class_of(page);
  info.flags |= kFlagNamed;
  info.last_use = use;
  after(page, was);
  if (!parent.is_none()) add_child(parent);
}

void Pool::unname(PageIndex page) {
  NEEDLE_CHECK(is_named(page), "only a named page can lose its name");
  unlist(page);
  infos_[page.value()].flags = static_cast<uint16_t>(infos_[page.value()].flags & ~kFlagNamed);
  const PageId parent = records_.parent(page);
  if (!parent.index.is_none()) remove_child(parent);
}

void Pool::drain(PageId page) {
  const PageState from = state(page.index);
  NEEDLE_CHECK(records_.generation(page.index) == page.generation, "a page is drained in its own generation");
  NEEDLE_CHECK(from == PageState::kReserved || from == PageState::kSealed, "only a page with content can drain");
  NEEDLE_CHECK(!is_named(page.index), "a page leaves the prefix tree before it drains");
  const PageClass was = class_of(page.index);
  records_.write_word(page.index, page.generation, PageState::kDraining);
  after(page.index, was);
  settle(page.index);
}

void Pool::settle(PageIndex page) {
  if (state(page) != PageState::kDraining || is_held(page)) return;
  const PageClass was = class_of(page);
  records_.write_word(page, records_.generation(page), PageState::kFree);
  after(page, was);
  ++drained_then_freed_;
}

void Pool::free(PageId page) {
  NEEDLE_CHECK(records_.generation(page.index) == page.generation, "a page is freed in its own generation");
  NEEDLE_CHECK(!is_held(page.index) && !is_named(page.index), "a held or named page cannot be freed");
  const PageClass was = class_of(page.index);
  NEEDLE_CHECK(was == PageClass::kReserved || was == PageClass::kSealedIdle, "only a page with content can be freed");
  records_.write_word(page.index, page.generation, PageState::kFree);
  after(page.index, was);
}

void Pool::lease(PageIndex page) {
  NEEDLE_CHECK(state(page) == PageState::kSealed, "only sealed pages are leased");
  const PageClass was = class_of(page);
  ++infos_[page.value()].leases;
  after(page, was);
}

void Pool::unlease(PageIndex page) {
  NEEDLE_CHECK(infos_[page.value()].leases > 0, "a lease was given back twice");
  const PageClass was = class_of(page);
  --infos_[page.value()].leases;
  after(page, was);
  settle(page);
}

void Pool::pin(PageIndex page) {
  NEEDLE_CHECK(infos_[page.value()].pins < 0xFFFF, "more pins than sessions and fetches can make");
  const PageClass was = class_of(page);
  ++infos_[page.value()].pins;
  after(page, was);
}

void Pool::unpin(PageIndex page) {
  NEEDLE_CHECK(infos_[page.value()].pins > 0, "a pin was taken out twice");
  const PageClass was = class_of(page);
  --infos_[page.value()].pins;
  after(page, was);
  settle(page);
}

void Pool::add_child(PageIndex page) {
  ++infos_[page.value()].children;
  if (class_of(page) == PageClass::kSealedIdle) list_if_idle(page, false);
}

void Pool::remove_child(PageId page) {
  PageInfo& info = infos_[page.index.value()];
  const bool same = records_.generation(page.index) == page.generation && (info.flags & kFlagNamed) != 0;
  if (!same || info.children == 0) return;
  --info.children;
  if (class_of(page.index) == PageClass::kSealedIdle) list_if_idle(page.index, true);
}

void Pool::touch(PageIndex page, uint32_t use) {
  PageInfo& info = infos_[page.value()];
  info.last_use = use;
  if ((info.flags & kFlagListed) == 0) return;
  remove(idle_, page);
  push_back(idle_, page);
}

void Pool::set_flag(PageIndex page, uint16_t flag, bool on) {
  PageInfo& info = infos_[page.value()];
  info.flags = static_cast<uint16_t>(on ? info.flags | flag : info.flags & ~flag);
}

void Pool::add_chunk(ChunkIndex chunk) {
  Chunk& entry = chunks_[chunk.value()];
  NEEDLE_CHECK(entry.state == ChunkState::kAbsent, "a chunk is added once");
  entry = Chunk{};
  entry.state = ChunkState::kLive;
  ++chunks_live_;
  const auto [first, last] = pages_of(chunk);
  entry.pages = last - first;
  occupancy_.capacity += entry.pages;
  for (int64_t page = last - 1; page >= first; --page) {
    const PageIndex index(static_cast<uint32_t>(page));
    ++count_of(class_of(index));
    if (class_of(index) == PageClass::kFree) push_front(free_, index);
    if (class_of(index) >= PageClass::kReserved) ++entry.used_pages;
    if (class_of(index) == PageClass::kSealedIdle) ++entry.idle_pages;
  }
  // The page that begins in this chunk and ends in the next, if there is one.
  if (last < pages_max_ && is_gap(last) && chunk_of(PageIndex(static_cast<uint32_t>(last))) == chunk) ++occupancy_.gap;
}

void Pool::retire_chunk(ChunkIndex chunk) {
  Chunk& entry = chunks_[chunk.value()];
  NEEDLE_CHECK(entry.state == ChunkState::kLive, "only a live chunk can retire");
  const auto [first, last] = pages_of(chunk);
  std::vector<PageIndex> free_now;
  for (int64_t page = first; page < last; ++page) {
    const PageIndex index(static_cast<uint32_t>(page));
    if (class_of(index) == PageClass::kFree) free_now.push_back(index);
  }
  entry.state = ChunkState::kRetiring;
  --chunks_live_;
  for (PageIndex page : free_now) after(page, PageClass::kFree);
}

void Pool::restore_chunk(ChunkIndex chunk) {
  Chunk& entry = chunks_[chunk.value()];
  NEEDLE_CHECK(entry.state == ChunkState::kRetiring, "only a retiring chunk can be restored");
  entry.state = ChunkState::kLive;
  ++chunks_live_;
  const auto [first, last] = pages_of(chunk);
  for (int64_t page = first; page < last; ++page) {
    const PageIndex index(static_cast<uint32_t>(page));
    if (class_of(index) == PageClass::kFree) after(index, PageClass::kRetiring);
  }
}

void Pool::remove_chunk(ChunkIndex chunk) {
  Chunk& entry = chunks_[chunk.value()];
  NEEDLE_CHECK(entry.state == ChunkState::kRetiring && entry.used_pages == 0, "only an empty retiring chunk is removed");
  const auto [first, last] = pages_of(chunk);
  occupancy_.retiring -= last - first;
  if (last < pages_max_ && is_gap(last) && chunk_of(PageIndex(static_cast<uint32_t>(last))) == chunk) --occupancy_.gap;
  entry = Chunk{};
}

void Pool::force_free(PageIndex page) {
  NEEDLE_CHECK(!is_held(page) && !is_named(page), "a held or named page cannot be freed");
  const PageClass was = class_of(page);
  records_.write_word(page, records_.generation(page), PageState::kFree);
  after(page, was);
}

absl::Status Pool::audit() const {
  const auto differs = [this](const std::string& what, int64_t counted, int64_t kept) {
    return make_error(ErrorCode::kBug, "pool " + std::to_string(id_.value()) + ": " + what + " recounted " + std::to_string(counted) +
                                           ", kept " + std::to_string(kept));
  };
  Occupancy recount;
  std::vector<Chunk> chunks(chunks_.size());
  int64_t listed = 0;
  for (int64_t page = 0; page < pages_max_; ++page) {
    const PageIndex index(static_cast<uint32_t>(page));
    const PageClass found = class_of(index);
    const PageInfo& info = infos_[page];
    Chunk& chunk = chunks[chunk_of(index).value()];
    switch (found) {
      case PageClass::kAbsent: break;
      case PageClass::kGap: ++recount.gap; break;
      case PageClass::kRetiring: ++recount.retiring; break;
      case PageClass::kFree: ++recount.free; break;
      case PageClass::kReserved: ++recount.reserved; break;
      case PageClass::kSealedIdle: ++recount.sealed_idle; break;
      case PageClass::kLeased: ++recount.leased; break;
      case PageClass::kDraining: ++recount.draining; break;
    }
    if (found >= PageClass::kReserved) ++chunk.used_pages;
    if (found == PageClass::kSealedIdle) ++chunk.idle_pages;
    const bool should_list =
        found == PageClass::kSealedIdle && (info.flags & kFlagNamed) != 0 && is_candidate(policy_, {info.children, info.last_use});
    if (should_list != ((info.flags & kFlagListed) != 0)) return differs("idle list membership of page", page, should_list);
    if (should_list) ++listed;
    if (found < PageClass::kReserved && is_held(index)) return differs("holders of unused page", page, 0);
    const PageState word = state(index);
    if (found == PageClass::kDraining && word == PageState::kDraining && !is_held(index)) {
      return differs("unheld draining page", page, 0);
    }
    if (word == PageState::kSealed && found != PageClass::kAbsent && !records_.intact(index)) {
      return differs("sealed page without a whole record", page, 0);
    }
  }
  recount.capacity = recount.free + recount.reserved + recount.sealed_idle + recount.leased + recount.draining;
  if (recount.free != occupancy_.free) return differs("free", recount.free, occupancy_.free);
  if (recount.reserved != occupancy_.reserved) return differs("reserved", recount.reserved, occupancy_.reserved);
  if (recount.sealed_idle != occupancy_.sealed_idle) {
    return differs("sealed_idle", recount.sealed_idle, occupancy_.sealed_idle);
  }
  if (recount.leased != occupancy_.leased) return differs("leased", recount.leased, occupancy_.leased);
  if (recount.draining != occupancy_.draining) return differs("draining", recount.draining, occupancy_.draining);
  if (recount.gap != occupancy_.gap) return differs("gap", recount.gap, occupancy_.gap);
  if (recount.retiring != occupancy_.retiring) return differs("retiring", recount.retiring, occupancy_.retiring);
  if (recount.capacity != occupancy_.capacity) return differs("capacity", recount.capacity, occupancy_.capacity);
  if (listed != idle_.count) return differs("idle list", listed, idle_.count);
  if (occupancy_.free != free_.count) return differs("free list", occupancy_.free, free_.count);
  for (size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    if (chunks_[chunk].state == ChunkState::kAbsent) continue;
    if (chunks[chunk].used_pages != chunks_[chunk].used_pages) {
      return differs("used pages of chunk " + std::to_string(chunk), chunks[chunk].used_pages, chunks_[chunk].used_pages);
    }
    if (chunks[chunk].idle_pages != chunks_[chunk].idle_pages) {
      return differs("idle pages of chunk " + std::to_string(chunk), chunks[chunk].idle_pages, chunks_[chunk].idle_pages);
    }
  }
  return absl::OkStatus();
}

}  // namespace needle::server
