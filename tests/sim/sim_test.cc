// The fixed part of the simulator: the seeds that every change must survive (counts in tests/counts.txt).
#include <cstdio>

#include <gtest/gtest.h>

#include "tests/counts.h"
#include "tests/sim/world.h"

namespace needle::sim {
namespace {

constexpr int kShards = 4;  // so that ctest spreads them over cores

// Operations a run before everything heals. Enough for some thirty faults to strike, few enough to read a history.
constexpr int64_t kOperations = 500;

void run_shard(int shard) {
  const int64_t seeds = needle::testing::count_of("sim_seeds");
  Totals totals;
  int64_t runs = 0;
  for (int64_t seed = 1 + shard; seed <= seeds; seed += kShards) {
    ++runs;
    World world(static_cast<uint64_t>(seed), Faults(), kOperations, false);
    try {
      world.begin();
      totals.add(world.run());
    } catch (const Violation& violation) {
      FAIL() << "seed " << seed << ": " << violation.what << "\nreplay: ./dev sim --seed " << seed;
    }
  }
  EXPECT_GE(totals.operations, runs * kOperations) << "runs ended before they had done their work";
  std::printf("%lld runs: %lld operations under faults, %lld steps, %lld pages verified, %lld kills at a metadata write, 0 violations\n",
              static_cast<long long>(runs), static_cast<long long>(totals.operations), static_cast<long long>(totals.steps),
              static_cast<long long>(totals.pages_verified), static_cast<long long>(totals.kills_at_write));
}

TEST(Sim, no_invariant_breaks_under_all_faults_first_quarter) { run_shard(0); }
TEST(Sim, no_invariant_breaks_under_all_faults_second_quarter) { run_shard(1); }
TEST(Sim, no_invariant_breaks_under_all_faults_third_quarter) { run_shard(2); }
TEST(Sim, no_invariant_breaks_under_all_faults_last_quarter) { run_shard(3); }

TEST(Sim, one_seed_twice_does_the_same_to_the_last_message) {
  std::vector<std::string> histories[2];
  for (std::vector<std::string>& history : histories) {
    World world(7, Faults(), 300, true);
    world.begin();
    world.run();
    history = world.history();
  }
  EXPECT_EQ(histories[0], histories[1]);
}

}  // namespace
}  // namespace needle::sim
