// Public request traces replayed through the catalog: under lru_reference the hit rates are known to the last digit shown
// (tests/data/traces/README.md). The default policy's rates are printed beside.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/rng.h"
#include "server/catalog/catalog.h"
#include "tests/server/still_world.h"

namespace needle::server {
namespace {

using Row = std::vector<uint64_t>;  // the row's block ids

std::vector<Row> read_trace(const std::string& name) {
  const char* folder = std::getenv("NEEDLE_TRACES_DIR");
  const std::string path = std::string(folder != nullptr ? folder : NEEDLE_SOURCE_DIR "/tests/data/traces") + "/" + name + ".jsonl.xz";
  std::FILE* pipe = popen(("xz -dc '" + path + "'").c_str(), "r");
  std::vector<Row> rows;
  std::string line;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) {
    if (c != '\n') {
      line.push_back(static_cast<char>(c));
      continue;
    }
    Row row;
    size_t at = line.find("\"hash_ids\"");
    at = at == std::string::npos ? at : line.find('[', at);
    while (at != std::string::npos && line[at] != ']') {
      char* end = nullptr;
      row.push_back(std::strtoull(line.c_str() + at + 1, &end, 10));
      at = static_cast<size_t>(end - line.c_str());
      while (at < line.size() && line[at] == ' ') ++at;
    }
    rows.push_back(std::move(row));
    line.clear();
  }
  pclose(pipe);
  return rows;
}

// A paged pool of `capacity` one-block pages, and its catalog.
class Cache {
 public:
  Cache(int64_t capacity, EvictionPolicy policy) : policy_(policy), metadata_(capacity * RecordTable::kBytesPerPage) {
    const PoolShape shape{8, 512, 8 * capacity, 1};
    const PoolShape none{0, 0, 0, 0};
    pools_[0] = std::make_unique<Pool>(PoolId(0), shape, policy, RecordTable(metadata_, PoolId(0), 0, capacity));
    for (uint32_t kind = 1; kind < kPoolKinds; ++kind) {
      pools_[kind] = std::make_unique<Pool>(PoolId(kind), none, policy, RecordTable(metadata_, PoolId(kind), 0, 0));
    }
    pools_[0]->add_chunk(ChunkIndex(0));
    catalog_ = std::make_unique<Catalog>(pools_, 0, probes_);
  }

  // Hits, and the row stored as the policy's own rule has it.
  int64_t play(const Row& row) {
    std::vector<PageName> names;
    for (uint64_t id : row) names.push_back({id + 1, Rng(id).next()});
    const Match match = catalog_->match(names);
    if (policy_ == EvictionPolicy::kLruReference) {
      store_as_reference(names);
    } else {
      store_as_reserve_does(names, match);
    }
    return static_cast<int64_t>(match.pages.size());
  }

  absl::Status audit() const {
    if (absl::Status found = pools_[0]->audit(); !found.ok()) return found;
    return catalog_->audit();
  }

 private:
  Pool& pool() { return *pools_[0]; }

  PageId insert(const PageName& name, PageId parent, int64_t position) {
    std::vector<PageId> page;
    NEEDLE_CHECK(pool().reserve(1, kOwnerDaemon, page), "room was made");
    PageRecord record;
    record.name = name;
    record.parent = parent;
    record.tokens_end = static_cast<uint32_t>((position + 1) * 512);
    record.role_bits = PageRecord::bits(PageRole::kNamed);
    pool().seal(page[0], record);
    catalog_->insert_page(page[0], parent);
    return page[0];
  }

  void store_as_reference(const std::vector<PageName>& names) {
    PageId parent;
    for (size_t i = 0; i < names.size(); ++i) {
      const PageIndex found = catalog_->find(names[i]);
      if (!found.is_none()) {
        parent = pool().id_of(found);
        catalog_->touch(std::span(&parent, 1));
        continue;
      }
      if (pool().free_pages() == 0) catalog_->evict_oldest();
      parent = insert(names[i], parent, static_cast<int64_t>(i));
    }
  }

  // As the store journey: the prefix is held while room is made, and everything is let go at the end.
  void store_as_reserve_does(const std::vector<PageName>& names, const Match& match) {
    std::vector<PageId> held = match.pages;
    for (const PageId& page : held) pool().lease(page.index);
    catalog_->touch(held);
    const int64_t missing = static_cast<int64_t>(names.size() - held.size());
    if (catalog_->make_room(PoolKind::kPaged, missing)) {
      for (size_t i = held.size(); i < names.size(); ++i) {
        held.push_back(insert(names[i], i == 0 ? PageId{} : held.back(), static_cast<int64_t>(i)));
        pool().lease(held.back().index);
      }
    }
    for (auto page = held.rbegin(); page != held.rend(); ++page) pool().unlease(page->index);
  }

  const EvictionPolicy policy_;
  ArrayMetadata metadata_;
  Probes probes_;
  PoolTrio pools_;
  std::unique_ptr<Catalog> catalog_;
};

std::string hit_rate(const std::vector<Row>& rows, int64_t capacity, EvictionPolicy policy) {
  Cache cache(capacity, policy);
  int64_t hits = 0;
  int64_t blocks = 0;
  for (const Row& row : rows) {
    hits += cache.play(row);
    blocks += static_cast<int64_t>(row.size());
  }
  EXPECT_TRUE(cache.audit().ok()) << cache.audit();
  char text[16];
  std::snprintf(text, sizeof(text), "%.3f", static_cast<double>(hits) / static_cast<double>(blocks));
  return text;
}

struct Expected {
  int64_t capacity;
  const char* rate;
};

constexpr int64_t kWithoutLimit = 200'000;  // more than the distinct blocks of either trace

void expect_rates(const std::string& trace, const std::vector<Expected>& expected) {
  const std::vector<Row> rows = read_trace(trace);
  ASSERT_FALSE(rows.empty()) << trace << " could not be read: is xz installed?";
  std::printf("%s\n  capacity  lru_reference  default\n", trace.c_str());
  for (const Expected& row : expected) {
    const std::string reference = hit_rate(rows, row.capacity, EvictionPolicy::kLruReference);
    const std::string leaves_first = hit_rate(rows, row.capacity, EvictionPolicy::kLeavesFirst);
    std::printf("  %8" PRId64 "  %13s  %7s\n", row.capacity, reference.c_str(), leaves_first.c_str());
    EXPECT_EQ(reference, row.rate) << trace << " at " << row.capacity << " blocks";
  }
}

TEST(TraceReplay, conversation_trace_gives_the_published_hit_rates) {
  expect_rates("mooncake_conversation_trace", {{kWithoutLimit, "0.366"}, {30'000, "0.326"}, {10'000, "0.211"}, {1'000, "0.044"}});
}

TEST(TraceReplay, synthetic_trace_gives_the_published_hit_rates) {
  expect_rates("mooncake_synthetic_trace", {{kWithoutLimit, "0.640"}, {30'000, "0.624"}, {10'000, "0.423"}, {1'000, "0.082"}});
}

}  // namespace
}  // namespace needle::server
