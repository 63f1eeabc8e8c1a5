// What is stored in one pool set and can be found again: named full pages (a prefix tree held by parent links), resume
// points at page boundaries, and sealed sequences.
//
// Owned by the core's state, loop thread only. Knows pools, not sessions, tickets or journeys.
//
// What must stay true:
//  1. Every named page is sealed, and its name covers every token from 0 to its end: a page found by name is right content
//     at that position whatever happened to the pages before it.
//  2. A resume point hangs on a named page, has all its pages, and goes before that page does.
//  3. A sequence counts as a child of its last full page, so that page is no leaf while the sequence is stored.
//  4. Sets (2, 3) become findable after their commit record was written and are lost before it is undone.
//  5. Nothing that is held is evicted. A set that is dropped while held drains: no longer found, freed with its last holder.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "server/catalog/name_index.h"
#include "server/catalog/resume_policy.h"
#include "server/pool/pool.h"
#include "server/probe.h"

namespace needle::server {

using PoolTrio = std::array<std::unique_ptr<Pool>, kPoolKinds>;

struct StoredSequence {
  SequenceId sequence;
  int64_t tokens = 0;
  std::vector<PageId> full;    // from position 0
  PageId partial;              // index none when tokens is a multiple of the page
  std::vector<PageId> window;  // oldest first
  PageId state;
  uint32_t last_use = 0;
  std::list<SequenceId>::iterator age;
};

struct ResumePoint {
  PageId boundary;  // the named page it hangs on
  int64_t tokens = 0;
  std::vector<PageId> window;
  PageId state;
  ResumeFacts facts;
  std::list<PageIndex>::iterator age;
};

struct Match {
  std::vector<PageId> pages;            // the leading pages that are stored
  int64_t resume_pages = 0;             // how many of them up to the last resume point
  const ResumePoint* resume = nullptr;  // at resume_pages; null when 0. Valid until the catalog changes
};

class Catalog {
 public:
  Catalog(PoolTrio& pools, int64_t resume_points_max, Probes& probes);

  // --- pages
  uint32_t next_use() { return ++use_; }
  PageIndex find(const PageName& name) const { return names_.find(name); }
  Match match(std::span<const PageName> names) const;
  // A page sealed as kNamed with `parent` in its record enters the tree.
  void insert_page(PageId page, PageId parent);
  void evict_page(PageIndex page);  // idle; its resume point goes with it
  void touch(std::span<const PageId> pages);
  int64_t named_pages() const { return names_.size(); }

  // --- resume points
  const ResumePoint* resume_point(PageIndex boundary) const;
  void insert_resume_point(ResumePoint point);
  void hit_resume_point(PageIndex boundary);
  int64_t resume_points() const { return static_cast<int64_t>(resume_points_.size()); }

  // --- sequences
  const StoredSequence* sequence(SequenceId sequence) const;
  void insert_sequence(StoredSequence stored);        // the sequence must not be stored
  void drop_sequence(SequenceId sequence);            // undone: pages free, or draining while held
  StoredSequence take_sequence(SequenceId sequence);  // out of the catalog, pages untouched; the caller undoes its commit
  void touch_sequence(SequenceId sequence);
  int64_t sequences() const { return static_cast<int64_t>(sequences_.size()); }
  std::vector<const StoredSequence*> latest_sequences(int64_t count_max) const;

  // --- eviction: makes `count` pages of a pool free if idle pages allow it. All or nothing is the caller's reserve().
  bool make_room(PoolKind kind, int64_t count);
  // Evicts whatever lies idle in a retiring chunk, with all that continues it.
  void vacate(PoolKind kind, ChunkIndex chunk);
  bool evict_oldest();  // one idle page or sequence of the paged pool

  absl::Status audit() const;

 private:
  Pool& pool(PoolKind kind) { return *pools_[static_cast<size_t>(kind)]; }
  const Pool& pool(PoolKind kind) const { return *pools_[static_cast<size_t>(kind)]; }
  bool is_idle(const ResumePoint& point) const;
  bool is_idle(const StoredSequence& stored) const;
  void drop_page(PoolKind kind, PageId page);
  void drop_resume_point(PageIndex boundary);
  std::optional<PageIndex> least_resume_point() const;  // idle
  std::optional<SequenceId> oldest_sequence() const;    // idle

  PoolTrio& pools_;
  Probes& probes_;
  const int64_t resume_points_max_;
  uint32_t use_ = 0;
  NameIndex names_;
  absl::flat_hash_map<PageIndex, ResumePoint> resume_points_;
  std::list<PageIndex> resume_ages_;  // oldest first
  absl::flat_hash_map<SequenceId, StoredSequence> sequences_;
  std::list<SequenceId> sequence_ages_;  // oldest first
};

}  // namespace needle::server
