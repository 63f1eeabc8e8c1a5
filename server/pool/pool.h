// One pool: its chunks, the state of each page, who holds it, and which pages are free or idle.
//
// Owned by the core's state, loop thread only. Knows nothing of journeys, sessions or time.
//
// What must stay true:
//  1. A page is in exactly one class of Occupancy (or absent); counts change with it in O(1); audit() recounts them.
//  2. A page leaves `free` only through reserve(), with its generation raised and recorded before this returns.
//  3. A page becomes free only when it has neither leases nor pins. `leases` are rights to read; `pins` are everything
//     that may still touch the bytes without a right: a silent process, a posted fetch.
//  4. Each page is on at most one list: free, or idle (sealed, named, unheld, and a candidate of the eviction policy).
//
// The price: 24 bytes here, 8 + 56 in the metadata region; 64 without name and sequence, and 8 in the name index.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "server/catalog/eviction_policy.h"
#include "server/messages.h"
#include "server/pool/page_record.h"
#include "server/pool/page_types.h"

namespace needle::server {

enum class PageClass : uint8_t { kAbsent, kGap, kRetiring, kFree, kReserved, kSealedIdle, kLeased, kDraining };
inline constexpr int kPageClasses = 8;

// Zeroed memory that costs nothing until it is touched: tables are sized for the whole address range of a pool.
template <class T>
class LazyArray {
 public:
  explicit LazyArray(int64_t count);
  T& operator[](int64_t index) { return data_.get()[index]; }
  const T& operator[](int64_t index) const { return data_.get()[index]; }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }  // NOLINT: pairs with calloc
  };
  std::unique_ptr<T, Free> data_;
};

struct PageInfo {
  uint32_t leases = 0;
  uint16_t pins = 0;
  uint16_t flags = 0;
  uint32_t children = 0;  // stored pages and sequences that continue this page
  uint32_t previous = 0;  // in its list: page index + 1, 0 at the ends
  uint32_t next = 0;
  uint32_t last_use = 0;  // tick of the catalog's use counter
};
static_assert(sizeof(PageInfo) == 24, "stated in the price above");
static_assert(sizeof(PageInfo) + RecordTable::kBytesPerPage - sizeof(PageName) - sizeof(SequenceId) <= 64,
              "at most 64 bytes a page besides its names");

class Pool {
 public:
  static constexpr uint16_t kFlagNamed = 1;        // in the name index
  static constexpr uint16_t kFlagResumePoint = 2;  // a resume point hangs on this boundary
  static constexpr uint16_t kFlagListed = 4;       // on the idle list

  Pool(PoolId id, const PoolShape& shape, EvictionPolicy policy, const RecordTable& records);

  static int64_t pages_max(const PoolShape& shape);

  PoolId id() const { return id_; }
  const PoolShape& shape() const { return shape_; }
  int64_t pages_max() const { return pages_max_; }
  const RecordTable& records() const { return records_; }
  const Occupancy& occupancy() const { return occupancy_; }
  int64_t free_pages() const { return occupancy_.free; }
  const PageInfo& info(PageIndex page) const { return infos_[page.value()]; }

  PageState state(PageIndex page) const { return records_.state(page); }
  PageId id_of(PageIndex page) const { return {page, records_.generation(page)}; }
  PageClass class_of(PageIndex page) const;
  bool is_named(PageIndex page) const { return (infos_[page.value()].flags & kFlagNamed) != 0; }
  bool is_held(PageIndex page) const { return infos_[page.value()].leases != 0 || infos_[page.value()].pins != 0; }

  // The page is what the handle says: in range, of this generation, and sealed (its bytes are final).
  bool is_current(PageId page) const;

  // --- pages
  // Takes exactly `count` free pages or none; appends them. The owner's slot goes into the records.
  bool reserve(int64_t count, uint16_t owner, std::vector<PageId>& pages);
  void seal(PageId page, PageRecord record);                  // reserved -> sealed
  PageId reopen(PageId page, uint16_t owner);                 // sealed, unheld -> reserved, next generation
  void name(PageIndex page, PageIndex parent, uint32_t use);  // enters the prefix tree; parent none at token 0
  void unname(PageIndex page);                                // leaves it; the page itself stays
  void drain(PageId page);                                    // reserved or sealed -> draining; frees when unheld
  void free(PageId page);                                     // reserved, or sealed and unheld -> free
  void lease(PageIndex page);
  void unlease(PageIndex page);
  void pin(PageIndex page);
  void unpin(PageIndex page);
  void add_child(PageIndex page);
  void remove_child(PageId page);  // ignored when the page is no longer what the handle says
  void touch(PageIndex page, uint32_t use);
  void set_flag(PageIndex page, uint16_t flag, bool on);

  PageIndex oldest_idle() const { return list_head(idle_); }
  int64_t idle_candidates() const { return idle_.count; }
  PageIndex next_idle(PageIndex page) const { return from_link(infos_[page.value()].next); }

  // --- chunks: absent -> live -> retiring -> absent
  enum class ChunkState : uint8_t { kAbsent, kLive, kRetiring };
  struct Chunk {
    ChunkState state = ChunkState::kAbsent;
    bool registered = false;  // with the transport
    int64_t pages = 0;        // without gaps
    int64_t used_pages = 0;   // neither free nor retiring
    int64_t idle_pages = 0;   // sealed and unheld
  };
  int64_t chunks_live() const { return chunks_live_; }
  const Chunk& chunk(ChunkIndex chunk) const { return chunks_[chunk.value()]; }
  ChunkIndex chunk_of(PageIndex page) const;
  void set_registered(ChunkIndex chunk, bool registered) { chunks_[chunk.value()].registered = registered; }
  void add_chunk(ChunkIndex chunk);      // its pages become free, in whatever generation their words say
  void retire_chunk(ChunkIndex chunk);   // free pages leave capacity; used ones follow as they become free
  void restore_chunk(ChunkIndex chunk);  // undoes retire_chunk
  void remove_chunk(ChunkIndex chunk);   // retiring and unused
  // Pages wholly inside the chunk, in order.
  std::pair<int64_t, int64_t> pages_of(ChunkIndex chunk) const;  // [first, last)

  // --- restart: a page found in doubt or unwanted becomes free under its word's generation
  void force_free(PageIndex page);

  absl::Status audit() const;
  uint64_t drained_then_freed() const { return drained_then_freed_; }

 private:
  struct List {
    uint32_t head = 0;
    uint32_t tail = 0;
    int64_t count = 0;
  };
  static PageIndex from_link(uint32_t link) { return link == 0 ? PageIndex::none() : PageIndex(link - 1); }
  static PageIndex list_head(const List& list) { return from_link(list.head); }
  bool is_gap(int64_t page) const;
  void push_back(List& list, PageIndex page);
  void push_front(List& list, PageIndex page);
  void insert_before(List& list, PageIndex page, PageIndex before);
  void remove(List& list, PageIndex page);

  // Moves the page between classes: counts, chunk counts and lists follow. Called around every change.
  void after(PageIndex page, PageClass was, bool uncovered = false);
  int64_t& count_of(PageClass page_class);
  void settle(PageIndex page);  // draining and unheld -> free
  void list_if_idle(PageIndex page, bool uncovered);
  void unlist(PageIndex page);

  const PoolId id_;
  const PoolShape shape_;
  const EvictionPolicy policy_;
  const int64_t pages_max_;
  RecordTable records_;
  LazyArray<PageInfo> infos_;
  std::vector<Chunk> chunks_;
  int64_t chunks_live_ = 0;
  Occupancy occupancy_;
  int64_t absent_ = 0;  // where counts of absent pages go; never read
  List free_;
  List idle_;
  uint64_t drained_then_freed_ = 0;
};

template <class T>
LazyArray<T>::LazyArray(int64_t count)
    : data_(static_cast<T*>(std::calloc(static_cast<size_t>(count > 0 ? count : 1), sizeof(T)))) {  // NOLINT
  static_assert(std::is_trivially_copyable_v<T>, "zero bytes must be a value");
}

}  // namespace needle::server
