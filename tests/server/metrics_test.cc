// The table of metrics, the scrape and the documents that speak of them, held together.
#include "server/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "base/clock.h"
#include "proto/errors.h"

namespace needle::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string file_text(const std::string& path) {
  std::ifstream stream(std::string(NEEDLE_SOURCE_DIR) + "/" + path);
  EXPECT_TRUE(stream.good()) << path;
  std::stringstream text;
  text << stream.rdbuf();
  return text.str();
}

Snapshot some_snapshot() {
  Snapshot snapshot;
  snapshot.incarnation = Incarnation(7);
  Snapshot::Set set;
  set.set = PoolSetId(0);
  set.name = "default";
  set.pools[0] = {.free = 5, .reserved = 1, .sealed_idle = 2, .leased = 3, .draining = 4, .capacity = 15, .gap = 1, .retiring = 2};
  snapshot.sets.push_back(set);
  Snapshot::SessionRow silent;
  silent.session = SessionId(3);
  silent.process = {4321, 1, 0};
  silent.silent = true;
  silent.pinned_pages = 9;
  snapshot.sessions.push_back(silent);
  snapshot.counters.emplace_back("lookup_hit", 11);
  return snapshot;
}

class MetricsTest : public ::testing::Test {
 protected:
  MetricSources sources() {
    return {[this] { return loop_answers_ ? absl::StatusOr<Snapshot>(some_snapshot()) : make_error(ErrorCode::kBusy, "stuck"); },
            [] {
              NodeGauges gauges;
              gauges.build = "needle test \"quoted\"";
              gauges.facets = {{"live", true}, {"transport", false}};
              gauges.transport_counters = {{"pages_sent", 12}};
              return gauges;
            },
            [](const Snapshot::Set&, int kind) { return int64_t{1000} * (kind + 1); },
            edge_,
            registry_,
            peers_};
  }

  bool loop_answers_ = true;
  EdgeMetrics edge_;
  SessionRegistry registry_;
  SteadyClock clock_;
  SilentLog log_;
  PeerDirectory peers_{PeerSelf{}, 500, [](const PeerChange&) {}, [](Message) { return absl::OkStatus(); }, clock_, log_};
};

TEST_F(MetricsTest, the_states_of_a_pool_are_shown_and_sum_to_its_capacity) {
  const std::string text = scrape_text(sources());
  EXPECT_THAT(text, HasSubstr("needle_pool_pages{pool=\"default\",kind=\"paged\",state=\"leased\"} 3"));
  EXPECT_THAT(text, HasSubstr("needle_pool_capacity_pages{pool=\"default\",kind=\"paged\"} 15"));
  EXPECT_THAT(text, HasSubstr("needle_session_pinned_pages{pid=\"4321\",client=\"\"} 9"));
  EXPECT_THAT(text, HasSubstr("needle_events_total{event=\"lookup_hit\"} 11"));
  EXPECT_THAT(text, HasSubstr("needle_up 1"));
}

TEST_F(MetricsTest, a_loop_that_does_not_answer_is_down_and_the_scrape_succeeds) {
  loop_answers_ = false;
  const std::string text = scrape_text(sources());
  EXPECT_THAT(text, HasSubstr("needle_up 0"));
  EXPECT_THAT(text, Not(HasSubstr("needle_pool_pages")));
  EXPECT_THAT(text, HasSubstr("needle_keeper_healthy"));
}

TEST_F(MetricsTest, requests_are_counted_by_verb_and_outcome_with_duration_and_size) {
  edge_.record(Verb::reserve, absl::OkStatus(), 30'000, 5);
  edge_.record(Verb::reserve, make_error(ErrorCode::kOutOfPages, "none"), 1'000, 0);
  const std::string text = scrape_text(sources());
  EXPECT_THAT(text, HasSubstr("needle_requests_total{verb=\"reserve\",outcome=\"OK\"} 1"));
  EXPECT_THAT(text, HasSubstr("needle_requests_total{verb=\"reserve\",outcome=\"OUT_OF_PAGES\"} 1"));
  EXPECT_THAT(text, HasSubstr("needle_request_duration_seconds_count{verb=\"reserve\"} 2"));
  EXPECT_THAT(text, HasSubstr("needle_request_duration_seconds_bucket{verb=\"reserve\",le=\"4e-05\"} 2"));
  EXPECT_THAT(text, HasSubstr("needle_request_pages_count{verb=\"reserve\"} 1"));
}

TEST_F(MetricsTest, the_scrape_follows_promtool_s_rules) {
  if (std::system("command -v promtool >/dev/null 2>&1") != 0) GTEST_SKIP() << "promtool (package prometheus) is not installed";
  edge_.record(Verb::seal, absl::OkStatus(), 30'000, 5);
  std::FILE* lint = ::popen("promtool check metrics 2>&1", "w");
  ASSERT_NE(lint, nullptr);
  const std::string text = scrape_text(sources());
  std::fwrite(text.data(), 1, text.size(), lint);
  EXPECT_EQ(::pclose(lint), 0);
}

TEST(MetricsDocument, is_made_from_the_table) {
  EXPECT_EQ(file_text("monitoring/METRICS.md"), metrics_reference()) << "run: needled --metrics-reference > monitoring/METRICS.md";
}

TEST(MetricsDocument, names_follow_prometheus) {
  std::set<std::string> names;
  for (const MetricRow& row : metric_table()) {
    const std::string name = row.name;
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(name.rfind("needle_", 0), 0u) << name;
    EXPECT_EQ(row.type == MetricType::kCounter, name.size() > 6 && name.substr(name.size() - 6) == "_total") << name;
    EXPECT_EQ(row.type == MetricType::kInfo, name.size() > 5 && name.substr(name.size() - 5) == "_info") << name;
    EXPECT_STRNE(row.question, "") << name;
  }
}

// Every metric that a rule, the runbook or a dashboard speaks of exists; recorded series have colons and are their own.
TEST(MetricsDocument, rules_and_dashboards_name_only_metrics_that_exist) {
  std::set<std::string> known;
  for (const MetricRow& row : metric_table()) {
    known.insert(row.name);
    if (row.type == MetricType::kHistogram) {
      for (const char* suffix : {"_bucket", "_sum", "_count"}) known.insert(std::string(row.name) + suffix);
    }
  }
  const std::regex word("[a-zA-Z0-9_:]*needle_[a-z_]+[a-z0-9_:]*");
  const std::set<std::string> files = {"monitoring/needle.rules.yml", "monitoring/dashboards/needle.json"};
  for (const std::string& file : files) {
    const std::string text = file_text(file);
    std::set<std::string> recorded;
    const std::regex record("record: *([a-zA-Z0-9_:]+)");
    for (auto found = std::sregex_iterator(text.begin(), text.end(), record); found != std::sregex_iterator(); ++found)
      recorded.insert((*found)[1]);
    const std::string rules = file_text("monitoring/needle.rules.yml");
    for (auto found = std::sregex_iterator(rules.begin(), rules.end(), record); found != std::sregex_iterator(); ++found)
      recorded.insert((*found)[1]);
    // A rule group's name is its own.
    const std::string spoken = std::regex_replace(text, std::regex("- name: *[a-z_]+"), "");
    int seen = 0;
    for (auto found = std::sregex_iterator(spoken.begin(), spoken.end(), word); found != std::sregex_iterator(); ++found) {
      const std::string name = found->str();
      if (name.find(':') != std::string::npos || recorded.count(name) > 0) continue;
      ++seen;
      EXPECT_TRUE(known.count(name) > 0) << file << " names " << name;
    }
    EXPECT_GT(seen, 3) << file;
  }
}

TEST(MetricsDocument, promtool_accepts_the_rules) {
  if (std::system("command -v promtool >/dev/null 2>&1") != 0) GTEST_SKIP() << "promtool (package prometheus) is not installed";
  EXPECT_EQ(std::system("promtool check rules " NEEDLE_SOURCE_DIR "/monitoring/needle.rules.yml"), 0);
}

}  // namespace
}  // namespace needle::server
