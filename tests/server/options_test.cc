// The one table of options: every way to say a value, and every way to say it wrong.
#include "server/daemon_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "base/rng.h"
#include "base/units.h"
#include "proto/errors.h"

namespace needle::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Words = std::vector<std::string>;

absl::StatusOr<ParsedOptions> read(const Words& arguments, const Words& environment = {}, const std::string& file = "") {
  return parse_options_with_file(arguments, environment, "test.toml", file);
}

std::string refusal(const absl::StatusOr<ParsedOptions>& parsed) {
  EXPECT_FALSE(parsed.ok()) << "accepted";
  if (parsed.ok()) return "";
  EXPECT_TRUE(is_error(parsed.status(), ErrorCode::kInvalid)) << parsed.status();
  return std::string(parsed.status().message());
}

TEST(Options, nothing_said_gives_the_documented_defaults) {
  const auto parsed = read({});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->action, OptionAction::kRun);
  EXPECT_EQ(parsed->options.session_heartbeat_ms, 500);
  EXPECT_EQ(parsed->options.memory_scratch_bytes, 32 * kMiB);
  ASSERT_EQ(parsed->options.pools.size(), 1u);
  EXPECT_EQ(parsed->options.pools[0].name, "default");
  EXPECT_EQ(parsed->options.pools[0].model, "deepseek-v4-flash");
  EXPECT_EQ(parsed->options.pools[0].index_k, "bf16");
}

TEST(Options, flags_beat_variables_and_variables_beat_the_file) {
  const std::string file = "[memory]\nbytes = \"1G\"\nchunk_bytes = \"32M\"\nscratch_bytes = \"4M\"\n";
  const auto parsed = read({"--memory-bytes=3G"}, {"NEEDLE_MEMORY_BYTES=2G", "NEEDLE_MEMORY_CHUNK_BYTES=64M", "HOME=/"}, file);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->options.memory_bytes, 3 * kGiB);
  EXPECT_EQ(parsed->options.memory_chunk_bytes, 64 * kMiB);
  EXPECT_EQ(parsed->options.memory_scratch_bytes, 4 * kMiB);
  for (const OptionProvenance& row : parsed->provenance) {
    if (row.name == "memory.bytes") {
      EXPECT_EQ(row.source, "flag --memory-bytes");
    }
    if (row.name == "memory.chunk_bytes") {
      EXPECT_EQ(row.source, "environment NEEDLE_MEMORY_CHUNK_BYTES");
    }
    if (row.name == "memory.scratch_bytes") {
      EXPECT_EQ(row.source, "file test.toml");
    }
    if (row.name == "lease.duration") {
      EXPECT_EQ(row.source, "default");
    }
  }
}

TEST(Options, sizes_and_durations_carry_their_unit) {
  EXPECT_EQ(*parse_size("512M"), 512 * kMiB);
  EXPECT_EQ(*parse_size("2GiB"), 2 * kGiB);
  EXPECT_EQ(*parse_size("7B"), 7);
  EXPECT_EQ(*parse_size("0"), 0);
  EXPECT_EQ(*parse_duration_ms("250ms"), 250);
  EXPECT_EQ(*parse_duration_ms("5s"), 5000);
  EXPECT_EQ(*parse_duration_ms("2h"), 7'200'000);
  for (const char* wrong : {"", "M", "512", "512MB", "512 M", "-1M", "1.5G", "0x10M", "9999999999999999999G", "9000000T", "1k", "1\0M"}) {
    EXPECT_FALSE(parse_size(wrong).ok()) << wrong;
  }
  for (const char* wrong : {"", "s", "5", "5sec", "5 s", "-5s", "1.5s", "9999999999999s", "5us"}) {
    EXPECT_FALSE(parse_duration_ms(wrong).ok()) << wrong;
  }
}

TEST(Options, size_text_reads_back_equal) {
  for (int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{1023}, kKiB, 3 * kMiB, kGiB + kMiB, 16 * kGiB * 1024}) {
    EXPECT_EQ(*parse_size(size_text(bytes)), bytes);
  }
}

TEST(Options, an_unknown_key_is_named_with_its_source_and_the_nearest_known_one) {
  EXPECT_THAT(refusal(read({}, {}, "[memory]\nbites = \"1G\"\n")),
              AllOf(HasSubstr("memory.bites"), HasSubstr("file test.toml"), HasSubstr("memory.bytes")));
  EXPECT_THAT(refusal(read({"--memory-bites=1G"})), AllOf(HasSubstr("--memory-bites"), HasSubstr("--memory-bytes")));
  EXPECT_THAT(refusal(read({}, {"NEEDLE_MEMORY_BITES=1G"})), HasSubstr("NEEDLE_MEMORY_BITES"));
  EXPECT_THAT(refusal(read({}, {}, "[pool.a]\nindexk = \"fp8\"\n")), AllOf(HasSubstr("pool.a.indexk"), HasSubstr("index_k")));
  EXPECT_THAT(refusal(read({}, {}, "bytes = \"1G\"\n")), HasSubstr("sections"));
  EXPECT_THAT(refusal(read({"serve"})), HasSubstr("'serve'"));
}

TEST(Options, a_wrong_unit_names_key_value_and_what_is_taken) {
  EXPECT_THAT(refusal(read({"--memory-bytes", "12Q"})),
              AllOf(HasSubstr("memory.bytes"), HasSubstr("'12Q'"), HasSubstr("unknown unit"), HasSubstr("16M..16T")));
  EXPECT_THAT(refusal(read({}, {}, "[memory]\nbytes = 1073741824\n")), AllOf(HasSubstr("no unit"), HasSubstr("512M")));
  EXPECT_THAT(refusal(read({}, {}, "[lease]\nduration = 5\n")), AllOf(HasSubstr("lease.duration"), HasSubstr("5s")));
}

TEST(Options, an_impossible_value_names_key_value_and_limit) {
  EXPECT_THAT(refusal(read({"--memory-bytes=1M"})), AllOf(HasSubstr("'1M'"), HasSubstr("0 or 16M..16T")));
  EXPECT_THAT(refusal(read({"--memory-chunk-bytes=3M"})), HasSubstr("multiple of 2M"));
  EXPECT_THAT(refusal(read({"--memory-fraction=1.5"})), HasSubstr("0..0.95"));
  EXPECT_THAT(refusal(read({"--memory-fraction=nan"})), HasSubstr("not a number"));
  EXPECT_THAT(refusal(read({"--memory-huge-pages=yes"})), HasSubstr("off|try|require"));
  EXPECT_THAT(refusal(read({"--instance=64"})), HasSubstr("0..63"));
  EXPECT_THAT(refusal(read({"--listen-grpc=localhost"})), HasSubstr("HOST:PORT"));
  EXPECT_THAT(refusal(read({"--listen-grpc=localhost:0"})), HasSubstr("1..65535"));
  EXPECT_THAT(refusal(read({"--peer", "p"})), HasSubstr("NAME=HOST:PORT"));
  EXPECT_THAT(refusal(read({"--peer", "p=h:1", "--peer", "p=h:2"})), HasSubstr("named twice"));
  EXPECT_THAT(refusal(read({"--attach-uids=root"})), HasSubstr("numeric"));
  EXPECT_THAT(refusal(read({"--pool", "Big Pool"})), HasSubstr("'Big Pool'"));
  EXPECT_THAT(refusal(read({"--pool", "a:model=gpt"})), AllOf(HasSubstr("pool.a.model"), HasSubstr("'gpt'")));
  EXPECT_THAT(refusal(read({"--pool", "a:window_page_tokens=100"})), HasSubstr("neither 64 nor 256"));
}

TEST(Options, values_that_contradict_each_other_are_both_named) {
  EXPECT_THAT(refusal(read({"--memory-bytes=1G", "--memory-fraction=0.5"})),
              AllOf(HasSubstr("memory.bytes"), HasSubstr("memory.fraction")));
  EXPECT_THAT(refusal(read({"--session-silence=900ms"})), AllOf(HasSubstr("session.silence"), HasSubstr("session.heartbeat")));
  EXPECT_THAT(refusal(read({"--ship-silence=100ms", "--ship-retry=200ms"})), AllOf(HasSubstr("ship.silence"), HasSubstr("ship.retry")));
  EXPECT_THAT(refusal(read({"--ship-deadline=1h"})), AllOf(HasSubstr("ship.deadline"), HasSubstr("ship.deadline_max")));
  EXPECT_THAT(refusal(read({"--memory-bytes=2G", "--memory-bytes-max=1G"})), HasSubstr("memory.bytes_max"));
}

TEST(Options, pools_come_from_every_source_and_merge_by_name) {
  const auto parsed = read({"--pool", "b:share=3", "--pool=c"}, {"NEEDLE_POOLS=b:index_k=fp8; d"},
                           "[pool.a]\nmodel = \"deepseek-v3.2\"\n[pool.b]\nindex_k = \"fp4\"\nratio_state = 9\n");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->options.pools.size(), 4u);
  EXPECT_EQ(parsed->options.pools[0].model, "deepseek-v3.2");
  EXPECT_EQ(parsed->options.pools[1].index_k, "fp8");
  EXPECT_EQ(parsed->options.pools[1].ratio_state, 9);
  EXPECT_EQ(parsed->options.pools[1].share, 3);
}

TEST(Options, a_repeated_peer_flag_adds_to_the_list_and_replaces_the_file_s) {
  const auto parsed = read({"--peer", "a=h:1", "--peer=b=h:2"}, {}, "[peers]\nstatic = [\"z=h:9\"]\n");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->options.peers, (Words{"a=h:1", "b=h:2"}));
}

TEST(Options, switches_need_no_value_and_actions_are_recognised) {
  EXPECT_TRUE(read({"--listen-remote-operators"})->options.listen_remote_operators);
  EXPECT_FALSE(read({"--listen-remote-operators=false"})->options.listen_remote_operators);
  EXPECT_EQ(read({"--check-config"})->action, OptionAction::kCheckConfig);
  EXPECT_EQ(read({"--version"})->action, OptionAction::kVersion);
  EXPECT_THAT(refusal(read({"--memory-bytes"})), HasSubstr("needs a value"));
}

TEST(Options, a_broken_file_is_refused_with_its_line) {
  EXPECT_THAT(refusal(read({}, {}, "[memory]\nbytes = \n")), AllOf(HasSubstr("test.toml"), HasSubstr("line 2")));
  EXPECT_THAT(refusal(parse_options({"--config", "/nonexistent/needle.toml"}, {})), HasSubstr("cannot be read"));
  EXPECT_THAT(refusal(read({}, {}, "[memory.bytes]\nx = 1\n")), HasSubstr("memory.bytes"));
  EXPECT_THAT(refusal(read({}, {}, "[pool]\na = 1\n")), HasSubstr("[pool.a]"));
}

TEST(Options, hostile_bytes_are_refused_or_read_but_never_crash) {
  Rng rng(20260729);
  const std::string good = "[memory]\nbytes = \"1G\"\n[pool.a]\nindex_k = \"fp8\"\n[peers]\nstatic = [\"a=h:1\"]\n";
  int refused = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string text = good;
    const int64_t edits = rng.between(1, 6);
    for (int64_t i = 0; i < edits; ++i) {
      const size_t at = rng.below(text.size());
      switch (rng.below(4)) {
        case 0: text[at] = static_cast<char>(rng.below(256)); break;
        case 1: text.erase(at, rng.below(8) + 1); break;
        case 2: text.insert(at, text.substr(rng.below(text.size()), rng.below(16))); break;
        default: text.insert(at, 1, "[]{}=\"'#\n.\\"[rng.below(11)]); break;
      }
      if (text.empty()) text = "x";
    }
    if (!read({}, {}, text).ok()) ++refused;
  }
  EXPECT_GT(refused, 1000);
  EXPECT_LT(refused, 3000);
}

TEST(Options, a_message_shows_control_bytes_and_cuts_long_values) {
  const std::string message = refusal(read({"--node-log-level", std::string("a\x1b[31m") + std::string(5000, 'x')}));
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
  EXPECT_LT(message.size(), 400u);
}

TEST(Options, names_are_unique_in_all_three_spellings) {
  std::set<std::string> seen;
  for (const auto& row : option_table()) {
    std::string plain = row.name;
    for (char& c : plain) c = c == '.' || c == '_' ? '-' : c;
    EXPECT_TRUE(seen.insert(plain).second) << row.name;
    EXPECT_STRNE(row.meaning, "");
    EXPECT_STRNE(row.reason, "");
  }
}

TEST(Options, the_reference_in_docs_is_the_table) {
  std::ifstream stream(NEEDLE_SOURCE_DIR "/docs/options.md");
  std::stringstream text;
  text << stream.rdbuf();
  EXPECT_EQ(text.str(), options_reference()) << "run: needled --reference > docs/options.md";
}

TEST(Options, help_names_every_option) {
  const std::string help = options_help();
  for (const auto& row : pool_option_table()) EXPECT_THAT(help, HasSubstr(row.name));
  EXPECT_THAT(help, HasSubstr("--memory-bytes"));
}

TEST(Options, a_configuration_that_is_no_readable_file_is_refused_and_not_taken_for_an_empty_one) {
  const std::string folder = ::testing::TempDir();
  for (const Words& arguments : {Words{"--config", folder}, Words{"--config=" + folder}}) {
    EXPECT_THAT(refusal(parse_options(arguments, {})), AllOf(HasSubstr("cannot be read"), HasSubstr("folder")));
  }
  EXPECT_THAT(refusal(parse_options({}, {"NEEDLE_CONFIG=" + folder})), HasSubstr("cannot be read"));
  EXPECT_THAT(refusal(parse_options({"--config", ""}, {})), HasSubstr("needs a path"));
  EXPECT_THAT(refusal(parse_options({"--config="}, {})), HasSubstr("needs a path"));
  EXPECT_THAT(refusal(parse_options({"--config", "/dev/zero"}, {})), HasSubstr("larger than 1M"));
}

TEST(Options, a_key_of_endless_parts_ends_in_words_and_not_in_the_parser_s_stack) {
  std::string file = "[memory]\na";
  for (int i = 0; i < 200'000; ++i) file += ".a";
  EXPECT_THAT(refusal(read({}, {}, file + " = 1\n")), AllOf(HasSubstr("line 2"), HasSubstr("8192")));
  file.resize(8'000);
  EXPECT_THAT(refusal(read({}, {}, file + "a = 1\n")), HasSubstr("memory.a"));
}

TEST(Options, a_flag_does_not_take_the_next_flag_for_its_value) {
  EXPECT_THAT(refusal(read({"--pool", "--check-config"})), AllOf(HasSubstr("--pool needs a value"), HasSubstr("--pool=VALUE")));
  EXPECT_THAT(refusal(read({"--name", "--peer", "a=b:1"})), HasSubstr("--name needs a value"));
  EXPECT_TRUE(read({"--memory-numa-node", "-1"}).ok());
}

TEST(Options, both_spellings_of_a_peer_add_to_one_list) {
  const auto parsed = read({"--peer", "a=h:1", "--peers-static", "b=h:2", "--peer=c=h:3"}, {"NEEDLE_PEERS_STATIC=d=h:4"});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->options.peers, (Words{"a=h:1", "b=h:2", "c=h:3"}));
}

TEST(Options, a_value_given_twice_is_refused_with_both_named) {
  EXPECT_THAT(refusal(read({"--memory-bytes=1G", "--memory-bytes", "2G"})),
              AllOf(HasSubstr("memory.bytes"), HasSubstr("twice"), HasSubstr("'1G'"), HasSubstr("'2G'")));
  EXPECT_THAT(refusal(read({"--instance=1", "--node-instance=2"})), AllOf(HasSubstr("flag --instance and flag --node-instance")));
  EXPECT_THAT(refusal(read({"--listen-remote-operators", "--listen-remote-operators=false"})), HasSubstr("'true' and 'false'"));
  EXPECT_THAT(refusal(read({"--config", "a", "--config=b"})), HasSubstr("'a' and 'b'"));
  EXPECT_THAT(refusal(read({"--pool", "a:share=1", "--pool", "a:share=2"})), AllOf(HasSubstr("pool.a.share"), HasSubstr("'1' and '2'")));
  EXPECT_THAT(refusal(read({}, {"NEEDLE_POOLS=a:share=1;a:share=1"})), HasSubstr("pool.a.share"));
  EXPECT_TRUE(read({"--pool", "a:share=1", "--pool", "a:index_k=fp8"}).ok());
  EXPECT_TRUE(read({"--attach-uids=1", "--attach-uids=2"}).ok());
}

TEST(Options, a_count_is_digits_alone) {
  for (const char* text : {" 1", "1 ", "+1", "", "-", "0x1", "1e3", "--1"}) {
    EXPECT_THAT(refusal(read({std::string("--topk-threads=") + text})), HasSubstr("whole number")) << text;
  }
}

}  // namespace
}  // namespace needle::server
