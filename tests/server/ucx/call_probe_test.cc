// The choice of the call: what is measured, what is believed, what is never chosen.
#include <gtest/gtest.h>

#include <algorithm>

#include "server/transport/ucx/ucx_transport.h"

namespace needle::server::ucx {
namespace {

CallResult right(Call call, double rate) { return {call, true, rate, ""}; }
CallResult wrong(Call call) { return {call, false, 99.0, "reported success and wrote other bytes"}; }

Call chosen_of(const std::vector<std::string>& lanes, const std::vector<CallResult>& results) {
  std::string reason;
  const absl::StatusOr<Call> chosen = choose_call(lanes, results, reason);
  EXPECT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_FALSE(reason.empty());
  return chosen.value_or(Call::kPut);
}

TEST(ChooseCall, takes_the_fastest_correct_active_message) {
  EXPECT_EQ(chosen_of({"tcp"}, {right(Call::kAmRendezvous, 4), right(Call::kAmEager, 3)}), Call::kAmRendezvous);
  EXPECT_EQ(chosen_of({"tcp"}, {right(Call::kAmRendezvous, 3), right(Call::kAmEager, 4)}), Call::kAmEager);
}

TEST(ChooseCall, sends_pages_inside_messages_where_a_rendezvous_could_hang_on_a_stopped_reader) {
  EXPECT_EQ(chosen_of({"sysv", "posix"}, {right(Call::kAmRendezvous, 9), right(Call::kAmEager, 1)}), Call::kAmEager);
}

TEST(ChooseCall, never_takes_a_call_that_wrote_other_bytes) {
  EXPECT_EQ(chosen_of({"tcp"}, {wrong(Call::kAmRendezvous), right(Call::kAmEager, 1)}), Call::kAmEager);
  EXPECT_EQ(chosen_of({"rc_mlx5"}, {wrong(Call::kGet), right(Call::kAmEager, 1)}), Call::kAmEager);
}

TEST(ChooseCall, gets_only_where_the_lanes_read_one_sidedly) {
  const std::vector<CallResult> results = {right(Call::kAmEager, 1), right(Call::kGet, 50)};
  EXPECT_EQ(chosen_of({"rc_mlx5"}, results), Call::kGet);
  EXPECT_EQ(chosen_of({"tcp", "cuda_ipc"}, results), Call::kGet);
  EXPECT_EQ(chosen_of({"tcp"}, results), Call::kAmEager);
  EXPECT_EQ(chosen_of({"sysv", "posix"}, results), Call::kAmEager);
}

TEST(ChooseCall, never_lets_the_source_write) {
  EXPECT_EQ(chosen_of({"tcp"}, {right(Call::kAmEager, 1), right(Call::kPut, 50), right(Call::kPutVector, 60)}), Call::kAmEager);
}

TEST(ChooseCall, refuses_when_nothing_is_right_and_says_what_went_wrong) {
  std::string reason;
  const absl::StatusOr<Call> chosen = choose_call({"tcp"}, {wrong(Call::kAmEager), right(Call::kPut, 5)}, reason);
  ASSERT_FALSE(chosen.ok());
  EXPECT_NE(std::string(chosen.status().message()).find("am-eager: reported success and wrote other bytes"), std::string::npos)
      << chosen.status();
}

class Probe : public ::testing::TestWithParam<const char*> {};

CallReport probe(const char* transports) {
  SteadyClock clock;
  ThreadProcessorClock processor_clock;
  const absl::StatusOr<std::unique_ptr<Context>> context = Context::create({transports, "lo"});
  EXPECT_TRUE(context.ok()) << context.status();
  ProbeOptions options;
  options.reach = "here";
  options.deadline_ms = 60'000;
  const absl::StatusOr<CallReport> report = probe_calls(**context, clock, processor_clock, options);
  EXPECT_TRUE(report.ok()) << report.status();
  return *report;
}

const CallResult& result_of(const CallReport& report, Call call) {
  return *std::find_if(report.results.begin(), report.results.end(), [&](const CallResult& r) { return r.call == call; });
}

TEST_P(Probe, finds_active_messages_and_get_right_and_rates_every_call) {
  const CallReport report = probe(GetParam());
  EXPECT_EQ(report.results.size(), static_cast<size_t>(kCalls));
  for (Call call : {Call::kAmRendezvous, Call::kAmEager, Call::kGet, Call::kPut}) {
    const CallResult& result = result_of(report, call);
    EXPECT_TRUE(result.correct) << describe(report);
    EXPECT_GT(result.gb_per_s, 0) << describe(report);
  }
  EXPECT_NE(report.chosen, Call::kPut);
  EXPECT_NE(report.chosen, Call::kPutVector);
  EXPECT_NE(describe(report).find(kCallNames[static_cast<size_t>(report.chosen)]), std::string::npos);
}

TEST_P(Probe, catches_the_put_of_a_vector_that_succeeds_with_other_bytes) {
  const CallReport report = probe(GetParam());
  const CallResult& vector = result_of(report, Call::kPutVector);
  if (library_version().rfind("1.13.", 0) != 0) GTEST_SKIP() << "UCX " << library_version() << " is not known to have the bug";
  EXPECT_FALSE(vector.correct) << "this build of 1.13 puts vectors rightly? " << describe(report);
  EXPECT_NE(vector.failure.find("reported success"), std::string::npos) << vector.failure;
}

INSTANTIATE_TEST_SUITE_P(Fabrics, Probe, ::testing::Values("tcp", "tcp,posix,sysv"),
                         [](const auto& fabric) { return fabric.index == 0 ? "tcp" : "shared_memory"; });

TEST(Lanes, are_in_shared_memory_on_one_host_although_errors_are_handled) {
  const CallReport report = probe("tcp,posix,sysv");
  const auto has = [&](const char* lane) { return std::count(report.lanes.begin(), report.lanes.end(), lane) > 0; };
  EXPECT_TRUE(has("posix") || has("sysv")) << describe(report);
}

// The kernel lets 127.0.0.2 be listened at, and UCX finds no interface with it.
TEST(Lanes, of_an_address_that_no_interface_carries_are_an_error_that_names_it) {
  SteadyClock clock;
  ThreadProcessorClock processor_clock;
  const absl::StatusOr<std::unique_ptr<Context>> context = Context::create({"tcp", "lo"});
  ASSERT_TRUE(context.ok()) << context.status();
  ProbeOptions options;
  options.host = "127.0.0.2";
  const absl::StatusOr<CallReport> report = probe_calls(**context, clock, processor_clock, options);
  if (report.ok()) GTEST_SKIP() << "an interface carries 127.0.0.2, or this UCX needs none";
  EXPECT_NE(std::string(report.status().message()).find("127.0.0.2"), std::string::npos) << report.status();
}

TEST(Settings, are_refused_with_the_one_that_is_out_of_bounds) {
  UcxOptions options;
  options.node = NodeId(1);
  options.instance = 1;
  EXPECT_TRUE(validate(options).ok());
  options.silence_ms = options.heartbeat_ms;
  EXPECT_NE(std::string(validate(options).message()).find("silence_ms is 250"), std::string::npos) << validate(options);
  options.silence_ms = 2'000;
  options.call = "put";
  EXPECT_NE(std::string(validate(options).message()).find("'put'"), std::string::npos) << validate(options);
}

}  // namespace
}  // namespace needle::server::ucx
