// Pools, records, the name index and the pure policies, each as a sentence.
#include <algorithm>
#include <map>
#include <vector>

#include <gtest/gtest.h>

#include "base/rng.h"
#include "proto/errors.h"
#include "server/catalog/name_index.h"
#include "server/catalog/resume_policy.h"
#include "server/options.h"
#include "server/pool/page_record.h"
#include "server/pool/pool.h"
#include "server/pool/resize_policy.h"
#include "tests/server/still_world.h"

namespace needle::server {
namespace {

// Chunks of 1000 bytes with pages of 300: three pages a chunk, and gaps between.
class PoolTest : public ::testing::Test {
 protected:
  PoolTest()
      : metadata_(Pool::pages_max(kShape) * RecordTable::kBytesPerPage),
        pool_(PoolId(0), kShape, EvictionPolicy::kLeavesFirst, RecordTable(metadata_, PoolId(0), 0, Pool::pages_max(kShape))) {
    pool_.add_chunk(ChunkIndex(0));
    pool_.add_chunk(ChunkIndex(1));
  }
  PageId reserve_one() {
    std::vector<PageId> pages;
    EXPECT_TRUE(pool_.reserve(1, 0, pages));
    return pages[0];
  }
  PageId seal_one(uint64_t name, PageId parent = {}) {
    const PageId page = reserve_one();
    PageRecord record;
    record.name = {name, name};
    record.parent = parent;
    record.role_bits = PageRecord::bits(PageRole::kNamed);
    pool_.seal(page, record);
    pool_.name(page.index, parent.index, static_cast<uint32_t>(name));
    return page;
  }
  static constexpr PoolShape kShape{300, 8, 1000, 4};
  ArrayMetadata metadata_;
  Pool pool_;
};

TEST_F(PoolTest, pages_that_would_cross_a_chunk_edge_are_gaps_outside_capacity) {
  // Bytes 900..1199 cross the edge at 1000: page 3. Chunk 1 has pages 4 and 5 (1200..1799), page 6 ends at 2099.
  EXPECT_EQ(pool_.occupancy().capacity, 5);
  EXPECT_EQ(pool_.occupancy().gap, 2);
  std::vector<PageId> pages;
  ASSERT_TRUE(pool_.reserve(5, 0, pages));
  for (const PageId& page : pages) EXPECT_NE(page.index.value() % 7, 3u) << "page 3 is a gap";
  EXPECT_TRUE(pool_.audit().ok()) << pool_.audit();
}

TEST_F(PoolTest, a_batch_is_reserved_whole_or_not_at_all) {
  std::vector<PageId> pages;
  EXPECT_FALSE(pool_.reserve(6, 0, pages));
  EXPECT_TRUE(pages.empty());
  EXPECT_EQ(pool_.free_pages(), 5);
}

TEST_F(PoolTest, a_handle_of_an_earlier_generation_is_not_current) {
  const PageId first = seal_one(1);
  EXPECT_TRUE(pool_.is_current(first));
  pool_.unname(first.index);
  pool_.free(first);
  const PageId second = seal_one(2);
  ASSERT_EQ(second.index, first.index);
  EXPECT_FALSE(pool_.is_current(first));
  EXPECT_TRUE(pool_.is_current(second));
}

TEST_F(PoolTest, a_draining_page_is_free_only_after_its_last_holder) {
  const PageId page = reserve_one();
  pool_.pin(page.index);
  pool_.pin(page.index);
  pool_.drain(page);
  EXPECT_EQ(pool_.occupancy().draining, 1);
  pool_.unpin(page.index);
  EXPECT_EQ(pool_.occupancy().draining, 1);
  pool_.unpin(page.index);
  EXPECT_EQ(pool_.occupancy().draining, 0);
  EXPECT_EQ(pool_.free_pages(), 5);
}

TEST_F(PoolTest, a_page_that_others_continue_is_no_candidate_for_eviction) {
  const PageId head = seal_one(1);
  const PageId leaf = seal_one(2, head);
  EXPECT_EQ(pool_.idle_candidates(), 1);
  EXPECT_EQ(pool_.oldest_idle(), leaf.index);
  pool_.unname(leaf.index);
  EXPECT_EQ(pool_.oldest_idle(), head.index);
}

TEST_F(PoolTest, a_retiring_chunk_leaves_capacity_page_by_page) {
  const PageId kept = reserve_one();
  const ChunkIndex chunk = pool_.chunk_of(kept.index);
  pool_.retire_chunk(chunk);
  EXPECT_EQ(pool_.chunk(chunk).used_pages, 1);
  EXPECT_TRUE(pool_.audit().ok()) << pool_.audit();
  pool_.free(kept);
  EXPECT_EQ(pool_.chunk(chunk).used_pages, 0);
  EXPECT_TRUE(pool_.audit().ok()) << pool_.audit();
  pool_.remove_chunk(chunk);
  EXPECT_TRUE(pool_.audit().ok()) << pool_.audit();
}

TEST(Record, crc32c_gives_the_published_check_value) {
  const char digits[] = "123456789";
  EXPECT_EQ(crc32c(0, std::as_bytes(std::span(digits, 9))), 0xE3069283u);
}

TEST(Record, any_flipped_bit_and_any_other_place_is_noticed) {
  ArrayMetadata metadata(4 * RecordTable::kBytesPerPage);
  RecordTable table(metadata, PoolId(1), 0, 4);
  PageRecord record;
  record.name = {1, 2};
  record.generation = Generation(3);
  table.write_record(PageIndex(2), record);
  ASSERT_TRUE(table.intact(PageIndex(2)));
  constexpr int64_t kBytes = sizeof(PageRecord);
  const int64_t at = 4 * 8 + 2 * kBytes;
  for (int64_t bit = 0; bit < kBytes * 8; ++bit) {
    metadata.raw(at + bit / 8) ^= std::byte{static_cast<unsigned char>(1u << (bit % 8))};
    EXPECT_FALSE(table.intact(PageIndex(2))) << "bit " << bit;
    metadata.raw(at + bit / 8) ^= std::byte{static_cast<unsigned char>(1u << (bit % 8))};
  }
  std::copy_n(&metadata.raw(at), kBytes, &metadata.raw(at + kBytes));
  EXPECT_FALSE(table.intact(PageIndex(3))) << "a record copied to another page's place";
}

TEST(NameIndexTest, agrees_with_a_map_through_random_inserts_and_erases) {
  constexpr int64_t kPages = 64;
  ArrayMetadata metadata(kPages * RecordTable::kBytesPerPage);
  RecordTable table(metadata, PoolId(0), 0, kPages);
  NameIndex index(table, kPages);
  std::map<uint32_t, PageName> model;
  Rng rng(1);
  for (int step = 0; step < 20'000; ++step) {
    const PageIndex page(static_cast<uint32_t>(rng.below(kPages)));
    if (model.contains(page.value())) {
      index.erase(page);
      model.erase(page.value());
    } else {
      PageRecord record;
      record.name = {rng.next(), rng.below(16) * 128 + rng.below(3)};  // crowded on purpose
      if (!index.find(record.name).is_none()) continue;
      table.write_record(page, record);
      index.insert(record.name, page);
      model[page.value()] = record.name;
    }
    ASSERT_EQ(index.size(), static_cast<int64_t>(model.size()));
    for (const auto& [held, name] : model) ASSERT_EQ(index.find(name).value(), held) << "step " << step;
  }
}

TEST(ResizePolicy, targets_never_cost_more_than_the_budget_and_leave_no_pool_without_a_chunk) {
  const std::array<PoolShape, kPoolKinds> shapes = {PoolShape{10, 1, 1000, 100}, PoolShape{10, 1, 500, 100}, PoolShape{10, 0, 100, 100}};
  Rng rng(2);
  for (int i = 0; i < 10'000; ++i) {
    const int64_t budget = rng.between(0, 100'000);
    const BudgetRatios ratios = {rng.between(0, 9), rng.between(0, 9), rng.between(0, 9)};
    const absl::StatusOr<ChunkTargets> targets = chunk_targets(budget, ratios, shapes);
    if (ratios[0] + ratios[1] + ratios[2] == 0) {
      EXPECT_TRUE(is_error(targets.status(), ErrorCode::kInvalid));
    } else if (budget < 1600) {
      EXPECT_TRUE(is_error(targets.status(), ErrorCode::kImpossible));
    } else {
      ASSERT_TRUE(targets.ok()) << targets.status();
      EXPECT_LE((*targets)[0] * 1000 + (*targets)[1] * 500 + (*targets)[2] * 100, budget);
      for (int64_t chunks : *targets) EXPECT_GE(chunks, 1);
    }
  }
}

TEST(ResizePolicy, the_chunk_with_the_fewest_held_pages_retires_first_then_the_least_cached_then_the_highest) {
  const std::vector<ChunkFacts> chunks = {{0, 2, 0}, {1, 0, 5}, {2, 0, 1}, {3, 0, 1}};
  EXPECT_EQ(choose_chunks_to_retire(chunks, 3), (std::vector<int64_t>{3, 2, 1}));
}

TEST(ResumePolicy, a_proven_boundary_outlives_an_unproven_one_whatever_their_age) {
  EXPECT_TRUE(worth_less({.last_use = 9, .hits = 0, .branch = false}, {.last_use = 1, .hits = 0, .branch = true}));
  EXPECT_FALSE(worth_less({.last_use = 1, .hits = 3, .branch = false}, {.last_use = 9, .hits = 0, .branch = false}));
  EXPECT_TRUE(worth_less({.last_use = 1, .hits = 1, .branch = false}, {.last_use = 2, .hits = 1, .branch = false}));
}

TEST(ResumePolicy, the_older_set_goes_and_at_equal_age_the_resume_point) {
  EXPECT_EQ(choose_set_victim(5, 4), SetVictim::kSequence);
  EXPECT_EQ(choose_set_victim(4, 4), SetVictim::kResumePoint);
  EXPECT_EQ(choose_set_victim(std::nullopt, 4), SetVictim::kSequence);
  EXPECT_EQ(choose_set_victim(std::nullopt, std::nullopt), SetVictim::kNone);
}

TEST(EvictionPolicyTest, only_the_reference_policy_takes_pages_that_others_continue) {
  EXPECT_FALSE(is_candidate(EvictionPolicy::kLeavesFirst, {.children = 1, .last_use = 0}));
  EXPECT_TRUE(is_candidate(EvictionPolicy::kLruReference, {.children = 1, .last_use = 0}));
  EXPECT_TRUE(used_before(0xFFFFFFFFu, 1)) << "use ticks wrap";
}

TEST(Options, the_first_option_out_of_bounds_is_named_with_its_limits) {
  CoreOptions options;
  PoolSetOptions set;
  set.name = "a";
  set.format = "b";
  set.shapes = {PoolShape{8, 8, 64, 1}, PoolShape{8, 8, 64, 1}, PoolShape{8, 0, 64, 1}};
  options.sets.push_back(set);
  EXPECT_TRUE(validate(options).ok()) << validate(options);
  options.silence_ms = 1;
  EXPECT_NE(std::string(validate(options).message()).find("silence_ms is 1, allowed are 501"), std::string::npos) << validate(options);
}

TEST(Errors, every_code_is_in_its_own_row_and_survives_the_status) {
  for (size_t i = 0; i < kErrorTable.size(); ++i) {
    EXPECT_EQ(static_cast<size_t>(kErrorTable[i].code), i);
    const absl::Status status = make_error(kErrorTable[i].code, "x", 20);
    EXPECT_TRUE(is_error(status, kErrorTable[i].code));
    EXPECT_EQ(retry_after_ms(status), 20);
  }
  EXPECT_EQ(error_code(absl::InternalError("another's")), ErrorCode::kBug);
}

}  // namespace
}  // namespace needle::server
