// needlectl as an operator runs it: what each command prints, as a table and as JSON, and with which status it ends.
#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "client/ctl/daemon.h"
#include "kernels/format_set.h"
#include "tests/e2e/processes.h"

namespace needle::testing {
namespace {

using nlohmann::json;

struct Ended {
  int exit = -1;
  std::string out;
  std::string error;
};

std::string text_of(const std::filesystem::path& path) {
  std::ifstream stream(path);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void write_file(const std::filesystem::path& path, const void* bytes, size_t size) {
  std::ofstream(path, std::ios::binary).write(static_cast<const char*>(bytes), static_cast<std::streamsize>(size));
}

class Needlectl : public ::testing::Test {
 protected:
  Ended run(const DaemonProcess& daemon, std::vector<std::string> arguments) { return run_at(daemon.grpc_socket(), std::move(arguments)); }

  Ended run_at(const std::string& socket, std::vector<std::string> arguments, const std::string& output = "") {
    const std::filesystem::path out = output.empty() ? folder_.path() / "ctl.out" : std::filesystem::path(output);
    const std::filesystem::path error = folder_.path() / "ctl.err";
    std::filesystem::remove(error);
    std::vector<std::string> command = {NEEDLE_NEEDLECTL, "--socket", socket};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const int fd = ::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const pid_t pid = spawn(command, -1, fd, error.string());
    ::close(fd);
    int status = 0;
    ::waitpid(pid, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status, output.empty() ? text_of(out) : "", text_of(error)};
  }

  // Ends well, prints one JSON document and nothing beside it.
  json run_json(const DaemonProcess& daemon, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "--json");
    const Ended ended = run(daemon, arguments);
    EXPECT_EQ(ended.exit, 0) << arguments[1] << ": " << ended.error;
    EXPECT_EQ(ended.error, "") << arguments[1];
    json document = json::parse(ended.out, nullptr, false);
    EXPECT_FALSE(document.is_discarded()) << arguments[1] << " printed " << ended.out;
    return document;
  }

  // Ends with `exit`, says `words` on standard error and nothing on standard output.
  void expect_refused(const DaemonProcess& daemon, const std::vector<std::string>& arguments, int exit, const std::string& words) {
    const Ended ended = run(daemon, arguments);
    EXPECT_EQ(ended.exit, exit) << arguments[0] << ": " << ended.error;
    EXPECT_NE(ended.error.find(words), std::string::npos) << arguments[0] << " said: " << ended.error;
    EXPECT_EQ(ended.out, "") << arguments[0];
  }

  Folder folder_;
  DaemonProcess daemon_{folder_, "one", DaemonProcess::default_config()};
};

TEST_F(Needlectl, looks_are_a_table_and_one_json_document) {
  daemon_.start();
  auto writer = daemon_.attach("prefill-engine");
  store(*writer, 7, 3 * kPage);
  auto lease = writer->acquire(SequenceId(7));
  ASSERT_TRUE(lease.ok());
  for (const char* look : {"status", "pools", "clients", "peers", "sequences", "options", "audit"}) {
    const Ended table = run(daemon_, {look});
    EXPECT_EQ(table.exit, 0) << look << ": " << table.error;
    EXPECT_NE(table.out, "") << look;
    EXPECT_EQ(table.error, "") << look;
  }

  const json status = run_json(daemon_, {"status"});
  EXPECT_EQ(status["node"], "one");
  EXPECT_EQ(status["leases_open"], 1);
  EXPECT_EQ(status["sets"][0]["sequences"], 1);

  const json pools = run_json(daemon_, {"pools"});
  for (const json& pool : pools[0]["pools"]) {
    const int64_t sum = pool["free"].get<int64_t>() + pool["reserved"].get<int64_t>() + pool["sealed_idle"].get<int64_t>() +
                        pool["leased"].get<int64_t>() + pool["draining"].get<int64_t>();
    EXPECT_EQ(sum, pool["capacity"]) << pool["kind"];
  }
  EXPECT_EQ(pools[0]["pools"][0]["leased"], 3);

  const json clients = run_json(daemon_, {"clients"});
  ASSERT_EQ(clients.size(), 1u);
  EXPECT_EQ(clients[0]["client"], "prefill-engine");
  EXPECT_EQ(clients[0]["pid"], ::getpid());
  EXPECT_EQ(clients[0]["leases"], 1);

  const json sequences = run_json(daemon_, {"sequences"});
  EXPECT_EQ(sequences[0]["sequences"][0]["sequence"], 7);
  EXPECT_EQ(sequences[0]["sequences"][0]["tokens"], 3 * kPage);
  EXPECT_EQ(run_json(daemon_, {"sequences", "--pool", "default"}), sequences);

  EXPECT_EQ(run_json(daemon_, {"audit"})["audit"], "ok");
  EXPECT_GT(run_json(daemon_, {"options"}).size(), 20u);
  EXPECT_NE(run(daemon_, {"pools", "--formats"}).out.find("element=bf16"), std::string::npos);
}

TEST_F(Needlectl, a_shipped_sequence_is_selected_from) {
  DaemonProcess decode(folder_, "decode", DaemonProcess::default_config());
  daemon_.know_peer(decode);
  decode.know_peer(daemon_);
  daemon_.start();
  decode.start();
  ASSERT_TRUE(eventually(20, [&] { return decode.peer_is("one", "up") && daemon_.peer_is("decode", "up"); }));
  auto writer = daemon_.attach();
  store(*writer, 11, 4 * kPage + 100);

  EXPECT_EQ(run_json(decode, {"peers"})[0]["state"], "up");
  const Ended shipped = run(decode, {"ship", "--from", "one", "--sequence", "11"});
  EXPECT_EQ(shipped.exit, 0) << shipped.error;
  EXPECT_EQ(shipped.error, "") << "progress is for a terminal";
  EXPECT_NE(shipped.out.find("1124 tokens in 5 pages"), std::string::npos) << shipped.out;
  EXPECT_EQ(run_json(decode, {"sequences"})[0]["sequences"][0]["sequence"], 11);
  store(*writer, 21, 2 * kPage);
  const json twice[] = {run_json(decode, {"ship", "--from", "one", "--sequence", "21"}),
                        run_json(decode, {"ship", "--from", "one", "--sequence", "21"})};
  EXPECT_GT(twice[0]["bytes"], 0) << "a ship that has ended still says what it brought";
  EXPECT_EQ(twice[0]["attempts"], 1);
  EXPECT_LT(twice[1]["bytes"], twice[0]["bytes"]) << "full pages were there already";

  std::vector<uint16_t> q(2 * 64 * 128, 0x3f80);  // two queries of ones, bf16
  std::vector<float> weights(2 * 64, 1.0f);
  const std::string q_file = folder_.path() / "q";
  const std::string weights_file = folder_.path() / "weights";
  write_file(q_file, q.data(), q.size() * sizeof q[0]);
  write_file(weights_file, weights.data(), weights.size() * sizeof weights[0]);
  const json best = run_json(decode, {"topk", "--sequence", "11", "-k", "16", "--q", q_file, "--weights", weights_file, "--prepared"});
  ASSERT_EQ(best["queries"].size(), 2u);
  EXPECT_EQ(best["queries"][0].size(), 16u);
  EXPECT_EQ(best["queries"][0], best["queries"][1]) << "two equal queries";
  EXPECT_EQ(best["absent_entries"], 0);

  expect_refused(decode, {"topk", "--sequence", "11", "--heads", "32", "--q", q_file, "--weights", q_file}, 2, "--weights 128 bytes");
  expect_refused(decode, {"topk", "--sequence", "12", "--q", q_file, "--weights", weights_file}, 1, "NOT_FOUND");
  expect_refused(decode, {"ship", "--from", "nobody", "--sequence", "11"}, 1, "nobody");
  const Ended unknown = run(decode, {"ship", "--from", "one", "--sequence", "99", "--deadline-ms", "3000"});
  EXPECT_EQ(unknown.exit, 1) << unknown.out << unknown.error;
  EXPECT_NE(unknown.error.find("99"), std::string::npos) << unknown.error;
  EXPECT_TRUE(eventually(5, [&] { return decode.at_rest() && daemon_.at_rest(); })) << "refused commands left rights behind";
  EXPECT_EQ(run_json(decode, {"clients"}).size(), 0u) << "every command closed its session";
}

// What an operator counts before and after: pages by state, sequences, sessions.
std::string accounting(const DaemonProcess& daemon) {
  v1::StatusReply reply;
  EXPECT_TRUE(daemon.read_status(reply));
  std::string text = "sessions " + std::to_string(reply.sessions_size()) + " leases " + std::to_string(reply.leases_open()) + "\n";
  for (const auto& set : reply.sets()) {
    text += set.name() + " sequences " + std::to_string(set.sequences()) + " named " + std::to_string(set.named_pages()) + "\n";
    for (const auto& pool : set.pools()) text += pool.ShortDebugString() + "\n";
  }
  return text;
}

TEST_F(Needlectl, a_probe_stores_selects_and_ships_and_leaves_nothing_behind) {
  const std::string pools =
      "[pool.fp8]\nmodel = \"deepseek-v4-flash\"\nindex_k = \"fp8\"\n[pool.v32]\nmodel = \"deepseek-v3.2\"\n"
      "[pool.fp4]\nmodel = \"raw\"\nindex_k = \"fp4\"\n";
  const std::string config = DaemonProcess::default_config(512) + pools;
  DaemonProcess one(folder_, "first", config);
  DaemonProcess two(folder_, "second", config);
  one.know_peer(two);
  two.know_peer(one);
  one.start();
  two.start();
  ASSERT_TRUE(eventually(20, [&] { return one.peer_is("second", "up") && two.peer_is("first", "up"); }));
  auto engine = one.attach("live-engine");  // a pool that lives: a sequence, a lease and an open ticket
  store(*engine, 7, 3 * kPage);
  auto lease = engine->acquire(SequenceId(7));
  ASSERT_TRUE(lease.ok()) << lease.status();
  auto open = engine->reserve(SequenceId(8), kPage);
  ASSERT_TRUE(open.ok()) << open.status();
  const std::string first_before = accounting(one);
  const std::string second_before = accounting(two);

  const json probe = run_json(one, {"probe", "--peer", "second"});
  std::set<std::string> names;
  for (const json& step : probe) {
    EXPECT_TRUE(step["passed"]) << step.dump();
    EXPECT_GE(step["seconds"], 0) << step.dump();
    names.insert(step["name"]);
  }
  EXPECT_EQ(names.size(), probe.size()) << "every step has a name of its own";
  for (const char* pool : {"default", "fp8", "v32", "fp4"}) {
    for (const char* step : {"attach ", "room ", "store ", "read_topk ", "read_topk by the daemon ", "clean "}) {
      EXPECT_EQ(names.count(std::string(step) + pool), 1u) << step << pool;
    }
    for (const char* step : {"ship ", "read back ", "clean "}) {
      EXPECT_EQ(names.count(std::string(step) + pool + " to second"), 1u) << step << pool;
    }
  }
  EXPECT_EQ(names.count("accounting after"), 1u);
  EXPECT_TRUE(eventually(10, [&] { return accounting(one) == first_before && accounting(two) == second_before; }))
      << accounting(one) << accounting(two);
  EXPECT_TRUE(lease_is(*engine, lease->pages(), 7)) << "nobody's bytes were touched";
  EXPECT_TRUE(lease->recheck().ok());
  one.expect_sums();
  two.expect_sums();

  const Ended alone = run(one, {"probe", "--pool", "default"});
  EXPECT_EQ(alone.exit, 0) << alone.error;
  EXPECT_NE(alone.out.find("agree with the reference kernel"), std::string::npos) << alone.out;
  EXPECT_EQ(alone.out.find("v32"), std::string::npos) << alone.out;
}

// A slow step of a probe lies between two pools that are read back.
TEST_F(Needlectl, a_session_that_fell_silent_does_not_stand_in_the_way_of_the_next) {
  daemon_.start();
  const auto sessions = [this] { return run_json(daemon_, {"clients"}).size(); };
  Daemon operator_end("unix:" + daemon_.grpc_socket());
  operator_end.open_session("default");
  EXPECT_EQ(sessions(), 1u);
  EXPECT_TRUE(eventually(20, [&] { return sessions() == 0; }));
  EXPECT_NO_THROW(operator_end.open_session("default"));
  EXPECT_EQ(sessions(), 1u);
}

TEST_F(Needlectl, a_probe_that_fails_names_the_step_and_leaves_nothing_behind_either) {
  daemon_.start();
  const std::string before = accounting(daemon_);
  const Ended nobody = run(daemon_, {"probe", "--peer", "nobody"});
  EXPECT_EQ(nobody.exit, 1);
  EXPECT_NE(nobody.error.find("step 'ship default to nobody' failed"), std::string::npos) << nobody.error;
  EXPECT_TRUE(eventually(10, [&] { return accounting(daemon_) == before; })) << accounting(daemon_);

  auto engine = daemon_.attach("engine");
  auto all = engine->reserve(SequenceId(1), daemon_.occupancy("paged").free() * kPage);
  ASSERT_TRUE(all.ok()) << all.status();
  const Ended full = run(daemon_, {"probe"});
  EXPECT_EQ(full.exit, 4) << full.out << full.error;
  EXPECT_NE(full.error.find("step 'room default' failed"), std::string::npos) << full.error;
  EXPECT_NE(full.error.find("paged pool has 0 free pages"), std::string::npos) << full.error;
  EXPECT_TRUE(all->forfeit().ok());

  const Ended remote = run_at(daemon_.grpc_address(), {"probe"});
  EXPECT_EQ(remote.exit, 1) << remote.out << remote.error;
  expect_refused(daemon_, {"probe", "--pool", "other"}, 1, "'other'");
}

TEST_F(Needlectl, a_probe_of_a_pool_without_index_keys_says_that_it_cannot) {
  const std::filesystem::path format = folder_.path() / "no-index.format";
  ModelFormats formats = *preset_formats("deepseek-v4-flash", PresetOptions());
  std::erase_if(formats.paged.components, [](const Component& part) { return part.kind == ComponentKind::kIndexK; });
  std::erase_if(formats.state.components, [](const Component& part) { return part.kind == ComponentKind::kIndexK; });
  const std::string text = format_set_text(formats);
  write_file(format, text.data(), text.size());
  DaemonProcess keyless(folder_, "keyless",
                        DaemonProcess::default_config(256) + "[pool.keyless]\nformat_file = \"" + format.string() + "\"\n");
  keyless.start();
  const Ended ended = run(keyless, {"probe"});
  EXPECT_EQ(ended.exit, 1) << ended.out << ended.error;
  EXPECT_NE(ended.error.find("step 'attach keyless' failed: this pool's format has no index-K"), std::string::npos) << ended.error;
  EXPECT_NE(ended.out.find("read_topk default"), std::string::npos) << "the other pool was looked at: " << ended.out;
}

TEST_F(Needlectl, a_ship_shows_its_progress_on_a_terminal) {
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (terminal < 0) GTEST_SKIP() << "this machine has no pseudo-terminals: " << strerror(errno);
  ASSERT_EQ(::grantpt(terminal), 0);
  ASSERT_EQ(::unlockpt(terminal), 0);
  const std::string screen = ::ptsname(terminal);
  const int kept_open = ::open(screen.c_str(), O_RDWR | O_NOCTTY | O_CLOEXEC);  // else what was written goes with its last writer
  if (kept_open < 0) GTEST_SKIP() << screen << " cannot be opened (is /dev/pts mounted?): " << strerror(errno);
  DaemonProcess decode(folder_, "decode", DaemonProcess::default_config());
  daemon_.know_peer(decode);
  decode.know_peer(daemon_);
  daemon_.start();
  decode.start();
  ASSERT_TRUE(eventually(20, [&] { return decode.peer_is("one", "up") && daemon_.peer_is("decode", "up"); }));
  auto writer = daemon_.attach();
  CallerThread here;
  absl::StatusOr<client::Ticket> ticket = writer->reserve(SequenceId(11), 4 * kPage);  // not sealed: its ship waits
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  fill_ticket(*writer, *ticket, 11);
  std::string shown;
  const auto shows = [&](const std::string& words) {
    return eventually(20, [&] {
      pollfd ready{terminal, POLLIN, 0};
      char text[4096];
      if (::poll(&ready, 1, 0) == 1) {
        const ssize_t size = ::read(terminal, text, sizeof text);
        if (size > 0) shown.append(text, static_cast<size_t>(size));
      }
      return shown.find(words) != std::string::npos;
    });
  };
  const pid_t pid =
      spawn({NEEDLE_NEEDLECTL, "--socket", decode.grpc_socket(), "ship", "--from", "one", "--sequence", "11"}, -1, -1, screen);
  EXPECT_TRUE(shows("pages\r")) << shown;  // shown, and shown again over it
  EXPECT_TRUE(ticket->seal(4 * kPage, {}, here).ok());
  EXPECT_TRUE(shows("1024 tokens in 4 pages")) << shown;
  EXPECT_NE(shown.find("pages\r\n"), std::string::npos) << shown;
  int status = 0;
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
  ::close(kept_open);
  ::close(terminal);
}

TEST_F(Needlectl, a_ship_from_an_address_that_refuses_is_refused_at_once) {
  daemon_.add_argument("--peer=ghost=127.0.0.1:" + std::to_string(free_port()));
  daemon_.start();
  ASSERT_TRUE(eventually(20, [&] { return run_json(daemon_, {"peers"})[0]["detail"] != ""; }));
  const double before = steady_seconds();
  expect_refused(daemon_, {"ship", "--from", "ghost", "--sequence", "11"}, 1, "peer 'ghost' at 127.0.0.1:");
  EXPECT_LT(steady_seconds() - before, 1.0) << "it waited for the silence of a peer that is known not to be there";
  EXPECT_TRUE(eventually(5, [&] { return daemon_.at_rest(); }));
}

TEST_F(Needlectl, a_resize_is_shown_before_during_and_after) {
  daemon_.start();
  auto writer = daemon_.attach("holder");
  const int64_t before = daemon_.occupancy("paged").capacity();

  const json plan = run_json(daemon_, {"resize", "--bytes", "64M", "--dry-run"});
  EXPECT_EQ(plan["dry_run"], true);
  EXPECT_GT(plan["chunks_to_shrink"], 0);
  EXPECT_EQ(daemon_.occupancy("paged").capacity(), before) << "a dry run changed something";

  auto held = writer->reserve(SequenceId(1), (daemon_.occupancy("paged").free() - 2) * kPage);
  ASSERT_TRUE(held.ok()) << held.status();
  const Ended deferred = run(daemon_, {"resize", "--bytes", "64M"});
  EXPECT_EQ(deferred.exit, 5) << deferred.out << deferred.error;
  EXPECT_NE(deferred.out.find("DEFERRED"), std::string::npos) << deferred.out;
  EXPECT_NE(deferred.out.find("waits for holder"), std::string::npos) << deferred.out;
  ASSERT_TRUE(held->forfeit().ok());
  EXPECT_TRUE(eventually(10, [&] { return run(daemon_, {"resize", "--status"}).exit == 0; }));
  EXPECT_LT(daemon_.occupancy("paged").capacity(), before);

  const Ended grown = run(daemon_, {"resize", "--bytes", "128M", "--wait", "10"});
  EXPECT_EQ(grown.exit, 0) << grown.out << grown.error;
  EXPECT_EQ(daemon_.occupancy("paged").capacity(), before);
  expect_refused(daemon_, {"resize", "--bytes", "64X"}, 2, "'64X'");
  expect_refused(daemon_, {"resize"}, 2, "--bytes");
  expect_refused(daemon_, {"resize", "--bytes", "1K"}, 1, "IMPOSSIBLE");
  expect_refused(daemon_, {"resize", "--bytes", "64M", "--revision", "1"}, 1, "STALE");
  daemon_.expect_sums();
}

TEST_F(Needlectl, evict_and_drain_name_what_they_did) {
  daemon_.start();
  auto writer = daemon_.attach();
  store(*writer, 21, 3 * kPage);
  store(*writer, 22, 2 * kPage);
  const Ended forgotten = run(daemon_, {"evict", "--sequence", "21"});
  EXPECT_EQ(forgotten.exit, 0) << forgotten.error;
  EXPECT_NE(forgotten.out.find("sequence 21 is stored no more"), std::string::npos) << forgotten.out;
  EXPECT_EQ(run_json(daemon_, {"sequences"})[0]["total"], 1);
  EXPECT_GT(run_json(daemon_, {"evict", "--pages", "100"})["pages"], 0) << "named pages of both sequences lay idle";
  EXPECT_EQ(daemon_.occupancy("paged").sealed_idle(), 0);
  expect_refused(daemon_, {"evict"}, 2, "either --pages or --sequence");
  expect_refused(daemon_, {"evict", "--sequence", "21"}, 1, "21");
  EXPECT_EQ(run(daemon_, {"evict", "--pages", "-3"}).exit, 2);

  EXPECT_EQ(run(daemon_, {"drain"}).exit, 0);
  EXPECT_FALSE(writer->reserve(SequenceId(23), kPage).ok()) << "a draining daemon takes nothing new";
}

TEST_F(Needlectl, wrong_usage_and_absent_daemons_have_statuses_of_their_own) {
  daemon_.start();
  EXPECT_EQ(run(daemon_, {"--help"}).exit, 0);
  EXPECT_EQ(run(daemon_, {}).exit, 2);
  EXPECT_EQ(run(daemon_, {"frobnicate"}).exit, 2);
  EXPECT_EQ(run(daemon_, {"ship", "--from", "one"}).exit, 2) << "without --sequence";
  EXPECT_EQ(run(daemon_, {"topk", "--sequence", "1", "-k", "9000", "--q", "x", "--weights", "y"}).exit, 2);
  expect_refused(daemon_, {"peers", "--add", "no-equals"}, 2, "NAME=HOST:PORT");
  expect_refused(daemon_, {"sequences", "--pool", "other"}, 1, "'other'");
  expect_refused(daemon_, {"resize", "--pool", "other", "--bytes", "64M"}, 1, "other");
  expect_refused(daemon_, {"topk", "--sequence", "1", "--q", "/nowhere", "--weights", "/nowhere"}, 2, "/nowhere");
  for (const char* id : {"-1", "010", "1.5", "99999999999999999999", "0x", "7 "}) {  // none of them may become another sequence's
    EXPECT_EQ(run(daemon_, {"evict", "--sequence", id}).exit, 2) << id;
  }
  expect_refused(daemon_, {"evict", "--sequence", "0xff"}, 1, "255");
  expect_refused(daemon_, {"topk", "--sequence", "1", "--q", "/", "--weights", "/"}, 2, "folder");
  EXPECT_EQ(run(daemon_, {"ship", "--from", "a\xff", "--sequence", "1"}).exit, 2);
  EXPECT_EQ(run(daemon_, {"resize", "--status", "--bytes", "64M"}).exit, 2) << "one of the two would be dropped without a word";
  EXPECT_EQ(run_at("", {"status"}).exit, 2);
  EXPECT_EQ(run_at("/" + std::string(200, 'a'), {"status"}).exit, 2);
  const Ended full = run_at(daemon_.grpc_socket(), {"pools"}, "/dev/full");
  EXPECT_EQ(full.exit, 1);
  EXPECT_NE(full.error.find("No space left"), std::string::npos) << full.error;
  const Ended absent = run_at((folder_.path() / "nobody.sock").string(), {"status"});
  EXPECT_EQ(absent.exit, 3);
  EXPECT_NE(absent.error.find("nobody.sock"), std::string::npos) << absent.error;
}

}  // namespace
}  // namespace needle::testing
