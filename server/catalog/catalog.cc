#include "server/catalog/catalog.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "proto/errors.h"

namespace needle::server {
namespace {

// How many of the oldest resume points compete to go. Their ages are close; what separates them is whether they proved
// useful, and sixteen are enough to find one that did not while keeping the step bounded.
constexpr int kResumeCandidates = 16;

}  // namespace

Catalog::Catalog(PoolTrio& pools, int64_t resume_points_max, Probes& probes)
    : pools_(pools),
      probes_(probes),
      resume_points_max_(resume_points_max),
      names_(pool(PoolKind::kPaged).records(), pool(PoolKind::kPaged).pages_max()) {}

// ------------------------------------------------------------------------------------------------------------------ pages

Match Catalog::match(std::span<const PageName> names) const {
  Match match;
  const Pool& paged = pool(PoolKind::kPaged);
  for (const PageName& name : names) {
    const PageIndex page = names_.find(name);
    if (page.is_none()) break;
    match.pages.push_back(paged.id_of(page));
    if ((paged.info(page).flags & Pool::kFlagResumePoint) == 0) continue;
    match.resume_pages = static_cast<int64_t>(match.pages.size());
    match.resume = resume_point(page);
  }
  return match;
}

void Catalog::insert_page(PageId page, PageId parent) {
  Pool& paged = pool(PoolKind::kPaged);
  names_.insert(paged.records().name(page.index), page.index);
  paged.name(page.index, paged.is_current(parent) ? parent.index : PageIndex::none(), next_use());
}

void Catalog::evict_page(PageIndex page) {
  Pool& paged = pool(PoolKind::kPaged);
  NEEDLE_CHECK(!paged.is_held(page), "a held page is not evicted");
  if ((paged.info(page).flags & Pool::kFlagResumePoint) != 0) drop_resume_point(page);
  names_.erase(page);
  paged.unname(page);
  paged.free(paged.id_of(page));
  probes_.hit(Probe::page_evicted);
}

void Catalog::touch(std::span<const PageId> pages) {
  Pool& paged = pool(PoolKind::kPaged);
  const uint32_t use = next_use();
  for (const PageId& page : pages) paged.touch(page.index, use);
}

void Catalog::drop_page(PoolKind kind, PageId page) {
  Pool& owner = pool(kind);
  if (owner.is_held(page.index)) {
    owner.drain(page);
    probes_.hit(Probe::page_drained);
  } else {
    owner.free(page);
  }
}

// ---------------------------------------------------------------------------------------------------------- resume points

const ResumePoint* Catalog::resume_point(PageIndex boundary) const {
  const auto found = resume_points_.find(boundary);
  return found == resume_points_.end() ? nullptr : &found->second;
}

void Catalog::insert_resume_point(ResumePoint point) {
  const PageIndex boundary = point.boundary.index;
  NEEDLE_CHECK(pool(PoolKind::kPaged).is_named(boundary) && !resume_points_.contains(boundary),
               "a resume point hangs alone on a named page");
  point.facts.last_use = next_use();
  point.age = resume_ages_.insert(resume_ages_.end(), boundary);
  pool(PoolKind::kPaged).set_flag(boundary, Pool::kFlagResumePoint, true);
  resume_points_.emplace(boundary, std::move(point));
  while (resume_points() > resume_points_max_) {  // more than one where earlier ones were leased when their turn came
    const std::optional<PageIndex> victim = least_resume_point();
    if (!victim.has_value()) return;
    drop_resume_point(*victim);
  }
}

void Catalog::hit_resume_point(PageIndex boundary) {
  ResumePoint& point = resume_points_.at(boundary);
  ++point.facts.hits;
  point.facts.last_use = next_use();
  resume_ages_.splice(resume_ages_.end(), resume_ages_, point.age);
}

void Catalog::drop_resume_point(PageIndex boundary) {
  const auto found = resume_points_.find(boundary);
  const ResumePoint point = std::move(found->second);
  resume_ages_.erase(point.age);
  resume_points_.erase(found);
  pool(PoolKind::kPaged).set_flag(boundary, Pool::kFlagResumePoint, false);
  drop_page(PoolKind::kState, point.state);  // the commit goes first
  for (const PageId& page : point.window) drop_page(PoolKind::kWindow, page);
  probes_.hit(Probe::resume_point_evicted);
}

bool Catalog::is_idle(const ResumePoint& point) const { return !pool(PoolKind::kState).is_held(point.state.index); }

std::optional<PageIndex> Catalog::least_resume_point() const {
  std::optional<PageIndex> least;
  int seen = 0;
  for (const PageIndex boundary : resume_ages_) {
    const ResumePoint& point = resume_points_.at(boundary);
    if (!is_idle(point)) continue;
    if (!least.has_value() || worth_less(point.facts, resume_points_.at(*least).facts)) least = boundary;
    if (++seen == kResumeCandidates) break;
  }
  return least;
}

// -------------------------------------------------------------------------------------------------------------- sequences

const StoredSequence* Catalog::sequence(SequenceId sequence) const {
  const auto found = sequences_.find(sequence);
  return found == sequences_.end() ? nullptr : &found->second;
}

void Catalog::insert_sequence(StoredSequence stored) {
  const SequenceId sequence = stored.sequence;
  NEEDLE_CHECK(!sequences_.contains(sequence), "a sequence is stored once");
  stored.last_use = next_use();
  stored.age = sequence_ages_.insert(sequence_ages_.end(), sequence);
  if (!stored.full.empty()) pool(PoolKind::kPaged).add_child(stored.full.back().index);
  sequences_.emplace(sequence, std::move(stored));
  probes_.hit(Probe::sequence_sealed);
}

StoredSequence Catalog::take_sequence(SequenceId sequence) {
  const auto found = sequences_.find(sequence);
  NEEDLE_CHECK(found != sequences_.end(), "only a stored sequence can be taken");
  StoredSequence stored = std::move(found->second);
  sequence_ages_.erase(stored.age);
  sequences_.erase(found);
  if (!stored.full.empty()) pool(PoolKind::kPaged).remove_child(stored.full.back());
  return stored;
}

void Catalog::drop_sequence(SequenceId sequence) {
  const StoredSequence stored = take_sequence(sequence);
  drop_page(PoolKind::kState, stored.state);  // the commit goes first
  for (const PageId& page : stored.window) drop_page(PoolKind::kWindow, page);
  if (!stored.partial.index.is_none()) drop_page(PoolKind::kPaged, stored.partial);
}

std::vector<const StoredSequence*> Catalog::latest_sequences(int64_t count_max) const {
  std::vector<const StoredSequence*> latest;
  for (auto age = sequence_ages_.rbegin(); age != sequence_ages_.rend() && static_cast<int64_t>(latest.size()) < count_max; ++age) {
    latest.push_back(sequence(*age));
  }
  return latest;
}

void Catalog::touch_sequence(SequenceId sequence) {
  StoredSequence& stored = sequences_.at(sequence);
  stored.last_use = next_use();
  sequence_ages_.splice(sequence_ages_.end(), sequence_ages_, stored.age);
  touch(stored.full);
}

bool Catalog::is_idle(const StoredSequence& stored) const { return !pool(PoolKind::kState).is_held(stored.state.index); }

std::optional<SequenceId> Catalog::oldest_sequence() const {
  for (const SequenceId sequence : sequence_ages_) {
    if (is_idle(sequences_.at(sequence))) return sequence;
  }
  return std::nullopt;
}

// --------------------------------------------------------------------------------------------------------------- eviction

bool Catalog::evict_oldest() {
  Pool& paged = pool(PoolKind::kPaged);
  const PageIndex page = paged.oldest_idle();
  const std::optional<SequenceId> sequence = oldest_sequence();
  if (page.is_none() && !sequence.has_value()) return false;
  const bool page_goes =
      !sequence.has_value() || (!page.is_none() && used_before(paged.info(page).last_use, sequences_.at(*sequence).last_use));
  if (page_goes) {
    evict_page(page);
  } else {
    drop_sequence(*sequence);
    probes_.hit(Probe::sequence_evicted);
  }
  return true;
}

bool Catalog::make_room(PoolKind kind, int64_t count) {
  Pool& wanted = pool(kind);
  // Every idle sealed page can be evicted, so this bound saves us from evicting for nothing.
  if (wanted.free_pages() + wanted.occupancy().sealed_idle < count) return false;
  while (wanted.free_pages() < count) {
    if (kind == PoolKind::kPaged) {
      if (!evict_oldest()) return false;
      continue;
    }
    const std::optional<PageIndex> boundary = least_resume_point();
    const std::optional<SequenceId> sequence = oldest_sequence();
    std::optional<uint32_t> boundary_use;
    std::optional<uint32_t> sequence_use;
    if (boundary.has_value()) boundary_use = resume_points_.at(*boundary).facts.last_use;
    if (sequence.has_value()) sequence_use = sequences_.at(*sequence).last_use;
    switch (choose_set_victim(boundary_use, sequence_use)) {
      case SetVictim::kNone: return false;
      case SetVictim::kResumePoint: drop_resume_point(*boundary); break;
      case SetVictim::kSequence:
        drop_sequence(*sequence);
        probes_.hit(Probe::sequence_evicted);
        break;
    }
  }
  return true;
}

void Catalog::vacate(PoolKind kind, ChunkIndex chunk) {
  const auto in_chunk = [&](PageId page) { return !page.index.is_none() && pool(kind).chunk_of(page.index) == chunk; };
  const auto any_in_chunk = [&](const std::vector<PageId>& pages) { return std::any_of(pages.begin(), pages.end(), in_chunk); };

  // Sets first: they sit above pages in the tree. For the paged pool a sequence is struck through any page it needs.
  std::vector<SequenceId> sequences;
  for (const auto& [id, stored] : sequences_) {
    const bool struck = kind == PoolKind::kPaged    ? in_chunk(stored.partial) || any_in_chunk(stored.full)
                        : kind == PoolKind::kWindow ? any_in_chunk(stored.window)
                                                    : in_chunk(stored.state);
    if (struck && is_idle(stored)) sequences.push_back(id);
  }
  std::sort(sequences.begin(), sequences.end());  // the hash map's order differs from run to run
  for (SequenceId sequence : sequences) {
    drop_sequence(sequence);
    probes_.hit(Probe::sequence_evicted);
  }
  if (kind != PoolKind::kPaged) {
    std::vector<PageIndex> boundaries;
    for (const auto& [boundary, point] : resume_points_) {
      const bool struck = kind == PoolKind::kWindow ? any_in_chunk(point.window) : in_chunk(point.state);
      if (struck && is_idle(point)) boundaries.push_back(boundary);
    }
    std::sort(boundaries.begin(), boundaries.end());
    for (PageIndex boundary : boundaries) drop_resume_point(boundary);
    return;
  }

  // A page in the chunk takes its whole subtree along, deepest first. Whoever holds a page holds everything before it,
  // so an idle page has no held descendant. Links only point to parents: one pass marks, a second collects.
  Pool& paged = pool(PoolKind::kPaged);
  enum Mark : uint8_t { kUnknown, kStays, kGoes };
  std::vector<uint8_t> marks(static_cast<size_t>(paged.pages_max()), kUnknown);
  std::vector<std::pair<uint32_t, PageIndex>> going;  // (tokens_end, page): a page's end is larger than its parent's
  for (int64_t start = 0; start < paged.pages_max(); ++start) {
    std::vector<PageIndex> path;
    PageIndex at(static_cast<uint32_t>(start));
    uint8_t verdict = kStays;
    while (true) {
      if (marks[at.value()] != kUnknown) {
        verdict = marks[at.value()];
        break;
      }
      if (!paged.is_named(at)) {
        marks[at.value()] = kStays;
        break;
      }
      path.push_back(at);
      const PageId parent = paged.records().parent(at);
      if (!paged.is_current(parent) || !paged.is_named(parent.index)) break;
      at = parent.index;
    }
    for (auto page = path.rbegin(); page != path.rend(); ++page) {
      const bool struck = verdict == kGoes || (paged.chunk_of(*page) == chunk && !paged.is_held(*page));
      verdict = struck ? kGoes : kStays;
      marks[page->value()] = verdict;
      if (struck) going.emplace_back(paged.records().record(*page).tokens_end, *page);
    }
  }
  std::sort(going.begin(), going.end(), std::greater<>());
  // Sequences that end inside a struck subtree are idle too, and go before it.
  std::vector<SequenceId> ended;
  for (const auto& [id, stored] : sequences_) {
    if (!stored.full.empty() && marks[stored.full.back().index.value()] == kGoes && is_idle(stored)) ended.push_back(id);
  }
  std::sort(ended.begin(), ended.end());
  for (SequenceId sequence : ended) {
    drop_sequence(sequence);
    probes_.hit(Probe::sequence_evicted);
  }
  for (const auto& [end, page] : going) {
    if (paged.is_held(page)) continue;
    if (paged.chunk_of(page) != chunk) probes_.hit(Probe::resize_subtree_evicted);
    evict_page(page);
  }
}

// ------------------------------------------------------------------------------------------------------------------ audit

absl::Status Catalog::audit() const {
  const auto broken = [](const std::string& what) { return make_error(ErrorCode::kBug, "catalog: " + what); };
  const Pool& paged = pool(PoolKind::kPaged);
  const Pool& window = pool(PoolKind::kWindow);
  const Pool& state = pool(PoolKind::kState);
  int64_t named = 0;
  for (int64_t page = 0; page < paged.pages_max(); ++page) {
    const PageIndex index(static_cast<uint32_t>(page));
    const bool has_resume = (paged.info(index).flags & Pool::kFlagResumePoint) != 0;
    if (has_resume != resume_points_.contains(index)) return broken("resume flag of page " + std::to_string(page));
    if (!paged.is_named(index)) continue;
    ++named;
    if (paged.state(index) != PageState::kSealed) return broken("named page not sealed: " + std::to_string(page));
    if (names_.find(paged.records().name(index)) != index) return broken("name not found of page " + std::to_string(page));
  }
  if (named != names_.size()) return broken("name index has " + std::to_string(names_.size()) + " of " + std::to_string(named));
  for (const auto& [boundary, point] : resume_points_) {
    if (!paged.is_current(point.boundary)) return broken("resume point on a page that is gone");
    if (!state.is_current(point.state)) return broken("resume point without its boundary record");
    for (const PageId& page : point.window) {
      if (!window.is_current(page)) return broken("resume point without a window page");
    }
  }
  for (const auto& [id, stored] : sequences_) {
    if (!state.is_current(stored.state)) return broken("sequence " + std::to_string(id.value()) + " without its state");
    for (const PageId& page : stored.window) {
      if (!window.is_current(page)) return broken("sequence " + std::to_string(id.value()) + " without a window page");
    }
    if (!stored.partial.index.is_none() && !paged.is_current(stored.partial)) {
      return broken("sequence " + std::to_string(id.value()) + " without its partial page");
    }
  }
  if (resume_ages_.size() != resume_points_.size() || sequence_ages_.size() != sequences_.size()) {
    return broken("age lists differ from the tables");
  }
  return absl::OkStatus();
}

}  // namespace needle::server
