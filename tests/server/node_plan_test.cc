// From options to pools: the budget, its parts, and what is refused with which numbers.
#include "server/node_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/units.h"
#include "kernels/format_set.h"
#include "proto/errors.h"
#include "server/listen_address.h"
#include "server/membership/advertised_host.h"
#include "server/pool/resize_policy.h"

namespace needle::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<NodePlan> plan_of(const std::vector<std::string>& arguments, int64_t available = 24 * kGiB) {
  absl::StatusOr<ParsedOptions> parsed = parse_options(arguments, {});
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return plan_node(parsed->options, {.available_bytes = available, .host_name = "Host.Example", .xdg_runtime_dir = "/run/user/1000"});
}

std::string refusal(const absl::StatusOr<NodePlan>& plan) {
  EXPECT_FALSE(plan.ok());
  EXPECT_TRUE(is_error(plan.status(), ErrorCode::kInvalid)) << plan.status();
  return std::string(plan.status().message());
}

TEST(NodePlan, without_options_it_is_the_documented_default) {
  const auto plan = plan_of({});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->name, "host.example-0");
  EXPECT_EQ(plan->runtime_dir, "/run/user/1000/needle/0");
  EXPECT_EQ(plan->grpc_address, "127.0.0.1:7420");
  EXPECT_EQ(plan->metrics_address, "127.0.0.1:7421");
  EXPECT_EQ(plan->budget_bytes, kGiB);
  ASSERT_EQ(plan->core.sets.size(), 1u);
  EXPECT_EQ(plan->core.sets[0].shapes[0].page_bytes, 1'165'824);  // V4-Flash, bf16 index-K
  EXPECT_EQ(plan->core.sets[0].shapes[0].page_tokens, 256);
  EXPECT_EQ(plan->core.sets[0].window_tokens, 128);
}

TEST(NodePlan, on_a_small_machine_the_default_is_half_of_what_is_available) {
  const auto plan = plan_of({}, 700 * kMiB);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->budget_bytes, 350 * kMiB);
}

TEST(NodePlan, another_instance_has_the_next_ports_and_its_own_folder) {
  const auto plan = plan_of({"--instance=3"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->grpc_address, "127.0.0.1:7426");
  EXPECT_EQ(plan->metrics_address, "127.0.0.1:7427");
  EXPECT_EQ(plan->runtime_dir, "/run/user/1000/needle/3");
  EXPECT_EQ(plan->name, "host.example-3");
}

TEST(NodePlan, a_fraction_is_of_the_memory_available_at_start) {
  const auto plan = plan_of({"--memory-fraction=0.25"}, 8 * kGiB);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->budget_bytes, 2 * kGiB);
  EXPECT_THAT(plan->budget_reason, HasSubstr("0.25"));
}

TEST(NodePlan, pools_share_the_budget_less_scratch_and_nothing_exceeds_it) {
  const auto plan = plan_of({"--memory-bytes=4G", "--memory-scratch-bytes=64M", "--pool", "a:share=1", "--pool", "b:share=3,index_k=fp8"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  int64_t sum = plan->scratch_bytes;
  for (const PoolSetOptions& set : plan->core.sets) {
    sum += set.budget_bytes;
    const auto chunks = chunk_targets(set.budget_bytes, set.ratios, set.shapes);
    ASSERT_TRUE(chunks.ok()) << chunks.status();
    int64_t spent = 0;
    for (size_t kind = 0; kind < kPoolKinds; ++kind) {
      EXPECT_GE((*chunks)[kind], 1);
      EXPECT_GE(set.shapes[kind].chunk_bytes, 4 * set.shapes[kind].page_bytes);
      spent += (*chunks)[kind] * set.shapes[kind].chunk_bytes;
    }
    EXPECT_LE(spent, set.budget_bytes);
    EXPECT_GE(spent, set.budget_bytes * 8 / 10) << "little is lost to chunk sizes";
  }
  EXPECT_LE(sum, 4 * kGiB);
  EXPECT_EQ(plan->core.sets[1].budget_bytes / plan->core.sets[0].budget_bytes, 3);
  EXPECT_EQ(plan->core.sets[1].shapes[0].page_bytes % 2304, 0);
  EXPECT_NE(plan->sets[0].fingerprint, plan->sets[1].fingerprint);
}

TEST(NodePlan, a_model_without_window_or_state_still_has_a_commit_record) {
  const auto plan = plan_of({"--pool", "a:model=deepseek-v3.2"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const PoolSetOptions& set = plan->core.sets[0];
  EXPECT_EQ(set.shapes[1].page_bytes, 0);
  EXPECT_EQ(set.window_tokens, 0);
  EXPECT_EQ(set.ratios[1], 0);
  EXPECT_EQ(set.shapes[2].page_bytes, kCommitRecordBytes);
  EXPECT_EQ(set.shapes[0].page_tokens, 64);
}

TEST(NodePlan, every_preset_and_element_format_makes_a_plan) {
  for (const char* model : {"deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v3.2", "glm-5", "raw"}) {
    for (const char* element : {"bf16", "fp8", "fp4"}) {
      const auto plan = plan_of({"--memory-bytes=8G", "--pool", std::string("a:model=") + model + ",index_k=" + element});
      EXPECT_TRUE(plan.ok()) << model << " " << element << ": " << plan.status();
    }
  }
}

TEST(NodePlan, a_format_from_a_file_takes_the_place_of_the_model) {
  const std::string path = ::testing::TempDir() + "/formats.txt";
  std::ofstream(path) << format_set_text(*preset_formats("raw", {}));
  const auto plan = plan_of({"--pool", "a:format_file=" + path});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->sets[0].formats.paged.name, "raw");
  std::ofstream(path) << "needle-page-format 1\nname broken\n";
  EXPECT_THAT(refusal(plan_of({"--pool", "a:format_file=" + path})), HasSubstr("format_file"));
  EXPECT_THAT(refusal(plan_of({"--pool", "a:format_file=/nonexistent"})), HasSubstr("cannot be read"));
  EXPECT_THAT(refusal(plan_of({"--pool", "a:format_file=" + ::testing::TempDir()})), HasSubstr("cannot be read"));
  EXPECT_THAT(refusal(plan_of({"--pool", "a:format_file=/dev/zero"})), HasSubstr("larger than 1M"));
}

TEST(NodePlan, address_ranges_of_too_many_chunks_name_the_options_and_the_remedy) {
  EXPECT_THAT(refusal(plan_of({"--memory-bytes=64M", "--memory-bytes-max=16T"})),
              AllOf(HasSubstr("memory.bytes_max"), HasSubstr("1048576"), HasSubstr("raise memory.chunk_bytes")));
}

TEST(NodePlan, a_socket_path_that_no_socket_takes_is_refused_with_key_value_and_limit) {
  const std::string deep = "/run/" + std::string(100, 'a');
  EXPECT_THAT(refusal(plan_of({"--node-runtime-dir=" + deep})),
              AllOf(HasSubstr("node.runtime_dir"), HasSubstr(deep), HasSubstr("limit is 107")));
  EXPECT_THAT(refusal(plan_of({"--memory-keeper=" + deep + "/keeper", "--memory-bytes=1G"})),
              AllOf(HasSubstr("memory.keeper"), HasSubstr("limit is 107")));
  const std::string fits = "/run/" + std::string(107 - 5 - 12, 'a');  // and "/attach.sock"
  EXPECT_TRUE(plan_of({"--node-runtime-dir=" + fits}).ok());
  EXPECT_FALSE(plan_of({"--node-runtime-dir=" + fits + "a"}).ok());
}

TEST(NodePlan, a_numa_node_that_this_machine_lacks_is_refused_with_those_that_it_has) {
  const auto plan_on = [](const char* flag, std::vector<int> nodes) {
    return plan_node(parse_options({flag}, {})->options,
                     {.available_bytes = 24 * kGiB, .host_name = "h", .xdg_runtime_dir = "/run", .numa_nodes = std::move(nodes)});
  };
  EXPECT_THAT(refusal(plan_on("--memory-numa-node=3", {0, 1})), AllOf(HasSubstr("memory.numa_node"), HasSubstr("3"), HasSubstr("0, 1")));
  EXPECT_TRUE(plan_on("--memory-numa-node=1", {0, 1}).ok());
  EXPECT_TRUE(plan_on("--memory-numa-node=-1", {0}).ok());
  EXPECT_TRUE(plan_on("--memory-numa-node=3", {}).ok()) << "where the kernel doesn't say, the start will";
}

TEST(NodePlan, limits_of_the_process_that_are_too_low_are_named_with_what_is_needed) {
  const absl::StatusOr<NodePlan> plan = plan_of({"--memory-bytes=1G"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto limits = [](int64_t files, int64_t addresses) {
    return ProcessLimits{.open_files = files, .address_bytes = addresses, .processors = 8};
  };
  EXPECT_TRUE(check_limits(*plan, {}).ok());
  const std::string files(check_limits(*plan, limits(100, INT64_MAX)).message());
  EXPECT_THAT(files, AllOf(HasSubstr("open files is 100"), HasSubstr("ulimit -n")));
  const std::string addresses(check_limits(*plan, limits(INT64_MAX, kGiB)).message());
  EXPECT_THAT(addresses, AllOf(HasSubstr("address space is 1024 MiB"), HasSubstr("ulimit -v"), HasSubstr("memory.bytes_max")));
  EXPECT_TRUE(check_limits(*plan, limits(4096, 16 * kGiB)).ok());
}

TEST(ListenAddress, must_resolve_and_be_one_of_this_machine) {
  EXPECT_TRUE(check_listen_address("listen.grpc", "127.0.0.1:7420").ok());
  EXPECT_TRUE(check_listen_address("listen.grpc", "localhost:7420").ok());
  EXPECT_TRUE(check_listen_address("listen.grpc", "0.0.0.0:7420").ok());
  for (const char* address : {"no-such-host.invalid:7420", "192.0.2.1:7420"}) {
    const absl::Status refused = check_listen_address("listen.grpc", address);
    EXPECT_TRUE(is_error(refused, ErrorCode::kInvalid)) << refused;
    EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr("listen.grpc"), HasSubstr(address)));
  }
}

TEST(AdvertisedHost, is_the_numeric_address_of_what_peers_are_told) {
  const auto address_of = [](const char* advertised) {
    const absl::StatusOr<std::string> host = advertised_host(advertised);
    return host.ok() ? *host : host.status().ToString();
  };
  EXPECT_EQ(address_of("127.0.0.2:7420"), "127.0.0.2");
  EXPECT_EQ(address_of("[::1]:7420"), "::1");
  EXPECT_EQ(address_of("localhost:7420"), "127.0.0.1");
  EXPECT_TRUE(is_loopback("127.0.0.2"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_FALSE(is_loopback("192.0.2.1"));
}

TEST(AdvertisedHost, refuses_what_no_peer_can_dial_and_names_the_option) {
  for (const char* address : {"0.0.0.0:7420", "[::]:7420", "no-such-host.invalid:7420"}) {
    const absl::StatusOr<std::string> host = advertised_host(address);
    EXPECT_TRUE(is_error(host.status(), ErrorCode::kInvalid)) << address;
    EXPECT_THAT(std::string(host.status().message()), HasSubstr("listen.advertise")) << address;
  }
}

TEST(NodePlan, impossible_budgets_name_what_would_do) {
  EXPECT_THAT(refusal(plan_of({"--memory-bytes=48G"})), AllOf(HasSubstr("49152 MiB"), HasSubstr("24576 MiB available")));
  EXPECT_THAT(refusal(plan_of({"--memory-bytes=66M", "--memory-scratch-bytes=32M", "--memory-chunk-bytes=32M"})),
              HasSubstr("one chunk of each kind"));
  EXPECT_THAT(refusal(plan_of({}, 40 * kMiB)), HasSubstr("scratch"));
  EXPECT_THAT(refusal(plan_of({"--memory-chunk-bytes=2M", "--pool", "a:model=deepseek-v3.2"})), HasSubstr("do not hold one paged page"));
  EXPECT_THAT(refusal(plan_of({"--listen-grpc=127.0.0.1:9", "--listen-metrics=127.0.0.1:9"})), HasSubstr("both"));
}

}  // namespace
}  // namespace needle::server
