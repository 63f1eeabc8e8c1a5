// The journeys and the faults with real processes: daemons, clients that are killed and stopped, sockets, mapped memory.
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>

#include "proto/errors.h"
#include "server/memory/file_descriptor.h"
#include "tests/e2e/processes.h"

namespace needle::testing {
namespace {

using client::Client;
using client::Lease;
using client::Ticket;
using server::FileDescriptor;

constexpr double kReclaimSeconds = 5;  // what is promised after a kill

class Pair : public ::testing::Test {
 protected:
  void start() {
    prefill_.know_peer(decode_);
    decode_.know_peer(prefill_);
    prefill_.start();
    decode_.start();
    const bool met = eventually(20, [&] { return decode_.peer_is("prefill", "up") && prefill_.peer_is("decode", "up"); });
    if (!met) throw std::runtime_error("the daemons did not meet within 20 s; their logs follow");
  }
  Folder folder_;
  DaemonProcess prefill_{folder_, "prefill", DaemonProcess::default_config()};
  DaemonProcess decode_{folder_, "decode", DaemonProcess::default_config()};
};

class Single : public ::testing::Test {
 protected:
  Folder folder_;
  DaemonProcess daemon_{folder_, "one", DaemonProcess::default_config()};
};

TEST_F(Pair, a_sequence_is_stored_shipped_adopted_and_read) {
  start();
  auto writer = prefill_.attach("prefill-engine");
  auto reader = decode_.attach("decode-engine");
  const int64_t tokens = 5 * kPage + 100;
  store(*writer, 7, tokens);
  auto ship = reader->ship("prefill", SequenceId(7), 20'000);
  ASSERT_TRUE(ship.ok()) << ship.status();
  absl::StatusOr<Lease> lease = ship->wait();
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_EQ(lease->pages().tokens, tokens);
  EXPECT_EQ(lease->pages().paged.size(), 6u);
  EXPECT_TRUE(lease_is(*reader, lease->pages(), 7));
  EXPECT_TRUE(lease->recheck().ok());
  auto ticket = reader->adopt(*std::move(lease), SequenceId(8), tokens + kPage);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_GE(ticket->pages().tokens, tokens + kPage);
  ASSERT_TRUE(ticket->publish(tokens + 8).ok());
  ASSERT_TRUE(ticket->truncate(tokens + 4).ok());
  EXPECT_EQ(ticket->tokens_published(), tokens + 4);
  EXPECT_TRUE(ticket->forfeit().ok());
  EXPECT_TRUE(eventually(kReclaimSeconds, [&] { return prefill_.at_rest() && decode_.at_rest(); }));
  prefill_.expect_sums();
  decode_.expect_sums();
}

TEST_F(Pair, pages_travel_while_later_ones_are_still_being_stored) {
  start();
  auto writer = prefill_.attach();
  auto reader = decode_.attach();
  CallerThread here;
  const int64_t tokens = 8 * kPage;
  absl::StatusOr<Ticket> ticket = writer->reserve(SequenceId(9), tokens);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  fill_ticket(*writer, *ticket, 9);
  ASSERT_TRUE(ticket->seal_pages(2 * kPage, {}, here).ok());
  auto ship = reader->ship("prefill", SequenceId(9), 20'000);
  ASSERT_TRUE(ship.ok()) << ship.status();
  EXPECT_TRUE(eventually(10, [&] {
    const auto view = ship->progress();
    return view.ok() && view->pages_arrived >= 2 && !view->source_complete;
  })) << "the first pages did not arrive before the sequence was sealed";
  ASSERT_TRUE(ticket->seal(tokens, {}, here).ok());
  absl::StatusOr<Lease> lease = ship->wait();
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_TRUE(lease_is(*reader, lease->pages(), 9));
}

TEST_F(Single, two_clients_share_the_pages_of_a_common_prefix) {
  daemon_.start();
  auto first = daemon_.attach("first");
  auto second = daemon_.attach("second");
  CallerThread here;
  std::vector<int32_t> prompt(3 * kPage);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i % 1000);
  const auto names = client::name_pages({"raw", "1", 1, ""}, prompt, kPage);
  absl::StatusOr<Ticket> ticket = first->reserve(SequenceId(21), 3 * kPage, names);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  fill_ticket(*first, *ticket, 21);
  const std::vector<PageId> stored = ticket->pages().paged;
  absl::StatusOr<Lease> kept = ticket->seal_and_keep(3 * kPage, names, here);
  ASSERT_TRUE(kept.ok()) << kept.status();
  const auto match = second->lookup(names);
  ASSERT_TRUE(match.ok()) << match.status();
  EXPECT_EQ(match->matched_tokens, 3 * kPage);
  absl::StatusOr<Lease> shared = second->acquire(SequenceId(21));
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_EQ(shared->pages().paged, stored) << "the same pages, not copies";
  EXPECT_TRUE(lease_is(*second, shared->pages(), 21));
  EXPECT_EQ(daemon_.occupancy("paged").leased(), 3);
  // Other tokens, or another tenant, share nothing.
  const auto other = client::name_pages({"raw", "1", 1, "tenant"}, prompt, kPage);
  EXPECT_EQ(second->lookup(other)->matched_tokens, 0);
}

TEST_F(Single, a_read_only_readers_write_ends_that_process_alone) {
  daemon_.start();
  auto writer = daemon_.attach();
  store(*writer, 3, 2 * kPage);
  ClientProcess reader(folder_, "reader");
  reader.expect_ok("attach " + daemon_.attach_socket() + " ro");
  reader.expect_ok("acquire 3");
  reader.expect_ok("check");
  reader.say("write_through_read_only_view");
  EXPECT_EQ(reader.hear(), "") << "the process ends without an answer";
  const int status = reader.wait();
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << status;
  EXPECT_TRUE(eventually(kReclaimSeconds, [&] { return daemon_.at_rest(); }));
  absl::StatusOr<Lease> lease = writer->acquire(SequenceId(3));
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_TRUE(lease_is(*writer, lease->pages(), 3)) << "the data is untouched";
}

TEST_F(Single, another_format_is_refused_with_both_printed) {
  daemon_.start();
  client::AttachOptions options = daemon_.attach_options();
  PresetOptions fp8;
  fp8.index_k = ElementFormat::kFp8;
  options.formats = *preset_formats("raw", fp8);
  options.reconnect = false;
  const auto client = Client::attach(options);
  ASSERT_FALSE(client.ok());
  const std::string message(client.status().message());
  EXPECT_NE(message.find("element=fp8 "), std::string::npos) << message;
  EXPECT_NE(message.find("element=bf16"), std::string::npos) << message;
}

// Ships from one daemon to the other, and looks where their transports listen.
void expect_ship_between(DaemonProcess& source, DaemonProcess& reader) {
  source.know_peer(reader);
  reader.know_peer(source);
  source.start();
  reader.start();
  ASSERT_TRUE(eventually(20, [&] { return reader.peer_is(source.name(), "up") && source.peer_is(reader.name(), "up"); }));
  for (const DaemonProcess* daemon : {&source, &reader}) {
    std::set<int> ports = listening_ports(daemon->pid(), daemon->host());
    EXPECT_EQ(ports.erase(daemon->metrics_port()), 1u);
    EXPECT_GE(ports.size(), 1u) << daemon->name() << ": the transport listens at " << daemon->host();
  }
  auto writer = source.attach();
  store(*writer, 11, 3 * kPage + 100);
  auto engine = reader.attach();
  auto ship = engine->ship(source.name(), SequenceId(11), 20'000);
  ASSERT_TRUE(ship.ok()) << ship.status();
  const absl::StatusOr<Lease> lease = ship->wait();
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_TRUE(lease_is(*engine, lease->pages(), 11));
}

// The first address of this machine that other machines could dial; empty: none.
std::string outer_address() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return "";
  std::string found;
  for (const ifaddrs* entry = first; entry != nullptr && found.empty(); entry = entry->ifa_next) {
    constexpr unsigned kWanted = IFF_UP | IFF_RUNNING;
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET || (entry->ifa_flags & (kWanted | IFF_LOOPBACK)) != kWanted)
      continue;
    char text[INET_ADDRSTRLEN] = "";
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr, text, sizeof text);
    found = text;
  }
  ::freeifaddrs(first);
  return found;
}

TEST(Hosts, daemons_listen_and_ship_at_the_address_that_they_advertise) {
  const std::string address = outer_address();
  if (address.empty()) GTEST_SKIP() << "this machine has no address but the loopback's";
  Folder folder;
  DaemonProcess source(folder, "source", DaemonProcess::default_config(), address);
  DaemonProcess reader(folder, "reader", DaemonProcess::default_config(), address);
  expect_ship_between(source, reader);
}

// Two network namespaces with a cable between them: neither daemon sees the other's loopback, as on two hosts.
class Cable {
 public:
  static constexpr const char* kHosts[2] = {"198.51.100.1", "198.51.100.2"};
  Cable() {
    const std::string ends[2] = {"needle-a" + std::to_string(::getpid()), "needle-b" + std::to_string(::getpid())};
    laid_ = ip("netns add " + ends[0]) && ip("netns add " + ends[1]) &&
            ip("-n " + ends[0] + " link add end type veth peer name end netns " + ends[1]);
    for (int i = 0; i < 2 && laid_; ++i) {
      const std::string in = "-n " + ends[i];
      laid_ = ip(in + " link set lo up") && ip(in + " addr add " + kHosts[i] + "/24 dev end") && ip(in + " link set end up");
      launchers_[i] = {"/usr/bin/env", "ip", "netns", "exec", ends[i]};
    }
    for (const std::string& end : ends) {  // the kernel lets up to a second pass before it calls a link running
      laid_ = laid_ && eventually(10, [&] { return ip("-n " + end + " link show dev end | grep -q 'state UP'"); });
    }
  }
  ~Cable() {
    for (const char* end : {"needle-a", "needle-b"}) ip("netns del " + (end + std::to_string(::getpid())));
  }
  bool laid() const { return laid_; }
  const std::vector<std::string>& launcher(int end) const { return launchers_[end]; }

 private:
  static bool ip(const std::string& arguments) { return std::system(("(ip " + arguments + ") >/dev/null 2>&1").c_str()) == 0; }
  bool laid_ = false;
  std::vector<std::string> launchers_[2];
};

TEST(Hosts, daemons_of_two_network_namespaces_ship_over_the_wire_between_them) {
  Cable cable;
  if (!cable.laid()) GTEST_SKIP() << "network namespaces need root and the ip command";
  Folder folder;
  DaemonProcess source(folder, "source", DaemonProcess::default_config(), Cable::kHosts[0]);
  DaemonProcess reader(folder, "reader", DaemonProcess::default_config(), Cable::kHosts[1]);
  source.run_under(cable.launcher(0));
  reader.run_under(cable.launcher(1));
  for (DaemonProcess* daemon : {&source, &reader}) daemon->add_argument("--transport-lanes=tcp");  // hosts share no memory
  expect_ship_between(source, reader);
}

TEST(Hosts, a_wildcard_address_alone_starts_no_transport_and_says_what_to_set) {
  Folder folder;
  DaemonProcess daemon(folder, "wild", DaemonProcess::default_config(), "0.0.0.0");
  daemon.start();
  v1::StatusReply status;
  ASSERT_TRUE(daemon.read_status(status));
  EXPECT_EQ(status.transport().rfind("none: ", 0), 0u) << status.transport();
  EXPECT_NE(status.transport().find("listen.advertise"), std::string::npos) << status.transport();
}

TEST_F(Pair, a_ship_between_different_formats_is_refused) {
  DaemonProcess other(folder_, "other", DaemonProcess::default_config() + "index_k = \"fp8\"\n");
  other.know_peer(prefill_);
  prefill_.start();
  other.start();
  auto writer = prefill_.attach();
  auto reader = other.attach();
  store(*writer, 5, kPage);
  ASSERT_TRUE(eventually(20, [&] { return other.peer_is("prefill", "up") || other.peer_is("prefill", "refused"); }));
  auto ship = reader->ship("prefill", SequenceId(5), 10'000);
  absl::Status end = ship.status();
  if (ship.ok()) end = ship->wait().status();
  EXPECT_TRUE(is_error(end, ErrorCode::kFormatMismatch)) << end;
  EXPECT_TRUE(eventually(kReclaimSeconds, [&] { return other.at_rest(); }));
}

TEST_F(Single, a_killed_client_gives_everything_back_within_five_seconds) {
  daemon_.start();
  auto writer = daemon_.attach();
  store(*writer, 30, kPage);
  ClientProcess victim(folder_, "victim");
  victim.expect_ok("attach " + daemon_.attach_socket());
  victim.expect_ok("reserve 31 " + std::to_string(4 * kPage));
  victim.expect_ok("acquire 30");
  EXPECT_EQ(daemon_.occupancy("paged").reserved(), 4);
  EXPECT_EQ(daemon_.occupancy("paged").leased(), 1);
  victim.kill(SIGKILL);
  victim.wait();
  EXPECT_TRUE(eventually(kReclaimSeconds, [&] { return daemon_.at_rest(); }));
  daemon_.expect_sums();
}

TEST_F(Single, a_stopped_client_keeps_its_pages_pinned_until_it_wakes_or_dies) {
  daemon_.start();
  auto writer = daemon_.attach();
  ClientProcess victim(folder_, "victim");
  victim.expect_ok("attach " + daemon_.attach_socket());
  victim.expect_ok("reserve 41 " + std::to_string(4 * kPage));
  const v1::Occupancy before = daemon_.occupancy("paged");
  EXPECT_EQ(before.reserved(), 4);
  victim.kill(SIGSTOP);
  ASSERT_TRUE(eventually(10, [&] { return daemon_.occupancy("paged").draining() == 4; })) << "silence revokes";
  // Ask for everything that is left: the pinned pages must not be among it.
  const int64_t free_pages = daemon_.occupancy("paged").free();
  absl::StatusOr<Ticket> rest = writer->reserve(SequenceId(42), free_pages * kPage);
  ASSERT_TRUE(rest.ok()) << rest.status();
  const absl::StatusOr<Ticket> more = writer->reserve(SequenceId(43), kPage);
  EXPECT_TRUE(is_error(more.status(), ErrorCode::kOutOfPages)) << more.status();
  EXPECT_EQ(daemon_.occupancy("paged").draining(), 4) << "time alone frees nothing of a living process";
  v1::StatusReply status;
  ASSERT_TRUE(daemon_.read_status(status));
  bool pinned = false;
  for (const auto& session : status.sessions()) pinned = pinned || (session.pid() == victim.pid() && session.pinned_pages() >= 4);
  EXPECT_TRUE(pinned) << "pinned pages are shown beside the process that pins them";
  victim.kill(SIGCONT);
  EXPECT_TRUE(eventually(kReclaimSeconds, [&] { return daemon_.occupancy("paged").draining() == 0; })) << "it wakes, unmaps, acknowledges";
  EXPECT_TRUE(rest->forfeit().ok());
  EXPECT_TRUE(eventually(kReclaimSeconds, [&] { return daemon_.at_rest(); }));
}

TEST_F(Single, out_of_pages_answers_at_once_with_a_hint) {
  daemon_.start();
  auto writer = daemon_.attach();
  const int64_t all = daemon_.occupancy("paged").free();
  const double begin = steady_seconds();
  const absl::StatusOr<Ticket> ticket = writer->reserve(SequenceId(50), (all + 1) * kPage);
  EXPECT_LT(steady_seconds() - begin, 2.0);
  ASSERT_FALSE(ticket.ok());
  EXPECT_TRUE(is_error(ticket.status(), ErrorCode::kOutOfPages) || is_error(ticket.status(), ErrorCode::kImpossible)) << ticket.status();
  absl::StatusOr<Ticket> most = writer->reserve(SequenceId(51), all * kPage);
  ASSERT_TRUE(most.ok()) << most.status();
  const absl::StatusOr<Ticket> one_more = writer->reserve(SequenceId(52), kPage);
  EXPECT_TRUE(is_error(one_more.status(), ErrorCode::kOutOfPages)) << one_more.status();
  EXPECT_GT(retry_after_ms(one_more.status()), 0);
  EXPECT_TRUE(most->forfeit().ok());
  EXPECT_TRUE(writer->reserve(SequenceId(53), kPage).ok());
}

TEST_F(Single, consumed_and_foreign_handles_are_refused) {
  daemon_.start();
  auto writer = daemon_.attach();
  CallerThread here;
  absl::StatusOr<Ticket> ticket = writer->reserve(SequenceId(60), kPage);
  ASSERT_TRUE(ticket.ok());
  EXPECT_TRUE(ticket->forfeit().ok());
  EXPECT_TRUE(is_error(ticket->forfeit(), ErrorCode::kConsumed));
  EXPECT_TRUE(is_error(ticket->seal(kPage, {}, here), ErrorCode::kConsumed));
  store(*writer, 61, kPage);
  absl::StatusOr<Lease> lease = writer->acquire(SequenceId(61));
  ASSERT_TRUE(lease.ok());
  EXPECT_TRUE(lease->release().ok());
  EXPECT_TRUE(is_error(lease->release(), ErrorCode::kConsumed));
  EXPECT_TRUE(is_error(writer->acquire(SequenceId(999)).status(), ErrorCode::kNotFound));
  // The id of another session's lease, said by this one.
  auto other = daemon_.attach("other");
  absl::StatusOr<Lease> theirs = other->acquire(SequenceId(61));
  ASSERT_TRUE(theirs.ok());
  const auto channel = grpc::CreateChannel("unix:" + daemon_.grpc_socket(), grpc::InsecureChannelCredentials());
  v1::Needle::Stub stub(channel);
  grpc::ClientContext context;
  v1::LeaseRequest request;
  request.set_lease(theirs->id().value());
  v1::Empty reply;
  const grpc::Status without_rights = stub.Release(&context, request, &reply);
  EXPECT_FALSE(without_rights.ok()) << "a call without a session's secret";
  EXPECT_TRUE(theirs->recheck().ok());
}

// A ship of half a sequence: its first four pages are sealed and at least one has arrived.
class HalfShipped : public Pair {
 protected:
  void SetUp() override {
    start();
    writer_ = prefill_.attach();
    reader_ = decode_.attach();
    absl::StatusOr<Ticket> ticket = writer_->reserve(SequenceId(70), 8 * kPage);
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    ticket_ = *std::move(ticket);
    fill_ticket(*writer_, *ticket_, 70);
    ASSERT_TRUE(ticket_->seal_pages(4 * kPage, {}, here_).ok());
    leased_before_ = prefill_.occupancy("paged").leased();
    absl::StatusOr<client::Ship> ship = reader_->ship("prefill", SequenceId(70), 60'000);
    ASSERT_TRUE(ship.ok()) << ship.status();
    ship_ = *std::move(ship);
    ASSERT_TRUE(eventually(10, [&] {
      const auto view = ship_->progress();
      return view.ok() && view->pages_arrived > 0;
    }));
  }
  bool source_is_as_before() const { return prefill_.occupancy("paged").leased() == leased_before_; }

  CallerThread here_;
  int64_t leased_before_ = 0;  // of the source's pages
  std::unique_ptr<Client> writer_;
  std::unique_ptr<Client> reader_;
  std::optional<Ticket> ticket_;
  std::optional<client::Ship> ship_;
};

TEST_F(HalfShipped, a_killed_source_leaves_the_reader_at_rest) {
  prefill_.kill(SIGKILL);
  prefill_.wait();
  EXPECT_TRUE(eventually(kReclaimSeconds, [&] { return decode_.at_rest(); })) << "though the ship had a minute left";
  const absl::StatusOr<Lease> lease = ship_->wait();
  EXPECT_TRUE(is_error(lease.status(), ErrorCode::kPeerLost)) << lease.status();
  decode_.expect_sums();
}

TEST_F(HalfShipped, a_killed_reader_daemon_leaves_the_source_at_rest) {
  decode_.kill(SIGKILL);
  decode_.wait();
  EXPECT_TRUE(eventually(kReclaimSeconds, [&] { return source_is_as_before(); })) << "a remote reader's lease ends by time";
  ASSERT_TRUE(ticket_->seal(8 * kPage, {}, here_).ok());
  EXPECT_TRUE(eventually(kReclaimSeconds, [&] { return prefill_.at_rest(); }));
  prefill_.expect_sums();
}

TEST_F(HalfShipped, a_killed_readers_client_leaves_both_at_rest) {
  ClientProcess engine(folder_, "engine");
  engine.expect_ok("attach " + decode_.attach_socket());
  EXPECT_TRUE(ship_->cancel().ok());
  engine.expect_ok("ship prefill 70 60000");
  engine.kill(SIGKILL);
  engine.wait();
  EXPECT_TRUE(eventually(kReclaimSeconds, [&] { return decode_.at_rest() && source_is_as_before(); }));
  ASSERT_TRUE(ticket_->seal(8 * kPage, {}, here_).ok());
  decode_.expect_sums();
  prefill_.expect_sums();
}

TEST_F(Pair, a_stopped_peer_is_found_by_silence_and_a_restarted_one_has_another_incarnation) {
  start();
  auto writer = prefill_.attach();
  store(*writer, 90, 2 * kPage);
  prefill_.kill(SIGSTOP);
  EXPECT_TRUE(eventually(10, [&] { return decode_.peer_is("prefill", "silent"); }));
  prefill_.kill(SIGCONT);
  EXPECT_TRUE(eventually(10, [&] { return decode_.peer_is("prefill", "up"); }));
  prefill_.kill(SIGKILL);
  prefill_.wait();
  prefill_.start();
  EXPECT_TRUE(eventually(20, [&] { return decode_.peer_is("prefill", "up"); }));
  const absl::StatusOr<Lease> old = writer->acquire(SequenceId(90));
  EXPECT_FALSE(old.ok()) << "the sequence was lost with its daemon";
}

TEST_F(Pair, a_cancelled_ship_leaves_nothing) {
  start();
  auto writer = prefill_.attach();
  auto reader = decode_.attach();
  CallerThread here;
  absl::StatusOr<Ticket> ticket = writer->reserve(SequenceId(100), 6 * kPage);
  ASSERT_TRUE(ticket.ok());
  fill_ticket(*writer, *ticket, 100);
  ASSERT_TRUE(ticket->seal_pages(3 * kPage, {}, here).ok());
  auto ship = reader->ship("prefill", SequenceId(100), 10'000);
  ASSERT_TRUE(ship.ok());
  EXPECT_TRUE(ship->cancel().ok());
  EXPECT_TRUE(eventually(kReclaimSeconds, [&] { return decode_.at_rest(); }));
  EXPECT_TRUE(ticket->forfeit().ok());
  EXPECT_TRUE(eventually(10, [&] { return prefill_.at_rest(); }));
  decode_.expect_sums();
  prefill_.expect_sums();
}

TEST_F(Single, a_keeper_brings_sealed_pages_and_catalog_through_a_kill) {
  DaemonProcess keeper(folder_, "keeper", DaemonProcess::default_config());
  const std::string socket = (folder_.path() / "keeper.sock").string();
  const pid_t keeper_pid = spawn({NEEDLE_NEEDLED, "--keeper", "--memory-keeper", socket}, -1, -1, (folder_.path() / "keeper.log").string());
  ASSERT_TRUE(eventually(10, [&] { return std::filesystem::exists(socket); }));
  daemon_.add_argument("--memory-keeper=" + socket);
  daemon_.start();
  auto client = daemon_.attach();
  store(*client, 110, 3 * kPage);
  absl::StatusOr<Lease> lease = client->acquire(SequenceId(110));
  ASSERT_TRUE(lease.ok()) << lease.status();
  daemon_.kill(SIGKILL);
  daemon_.wait();
  daemon_.start();
  EXPECT_TRUE(eventually(10, [&] {
    absl::StatusOr<Lease> again = client->acquire(SequenceId(110));
    return again.ok() && lease_is(*client, again->pages(), 110);
  })) << "the bytes and their name are still there";
  EXPECT_TRUE(lease_is(*client, lease->pages(), 110));
  EXPECT_TRUE(lease->recheck().ok()) << "what was leased is leased again";
  daemon_.expect_sums();
  ::kill(keeper_pid, SIGKILL);
  ::waitpid(keeper_pid, nullptr, 0);
}

TEST_F(Single, a_shrink_waits_for_every_holder_and_then_is_applied) {
  daemon_.start();
  auto writer = daemon_.attach();
  const int64_t all = daemon_.occupancy("paged").free();
  absl::StatusOr<Ticket> reserved = writer->reserve(SequenceId(120), (all - 4) * kPage);
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  store(*writer, 121, 2 * kPage);
  absl::StatusOr<Lease> lease = writer->acquire(SequenceId(121));
  ASSERT_TRUE(lease.ok());
  ClientProcess stopped(folder_, "stopped");
  stopped.expect_ok("attach " + daemon_.attach_socket());
  stopped.expect_ok("acquire 121");
  v1::ResizeRequest request;
  request.set_pool_set("default");
  request.set_budget_bytes(int64_t{64} << 20);
  v1::ResizeReply reply;
  grpc::Status status = daemon_.operate(&v1::Operator::Stub::Resize, request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.answer(), "DEFERRED");
  EXPECT_GT(reply.pages_in_use(), 0);
  stopped.kill(SIGSTOP);
  EXPECT_TRUE(lease_is(*writer, lease->pages(), 121)) << "what is leased stays readable during the shrink";
  EXPECT_TRUE(reserved->forfeit().ok());
  EXPECT_TRUE(lease->release().ok());
  v1::PoolSetRequest named;
  named.set_pool_set("default");
  stopped.kill(SIGKILL);
  stopped.wait();
  EXPECT_TRUE(eventually(10, [&] {
    v1::ResizeReply progress;
    return daemon_.operate(&v1::Operator::Stub::ResizeStatus, named, &progress).ok() && progress.answer() == "APPLIED";
  }));
  EXPECT_LT(daemon_.occupancy("paged").capacity(), all);
  daemon_.expect_sums();
}

// A caller of either gRPC socket that says nothing.
FileDescriptor knock(const DaemonProcess& daemon, bool local) {
  FileDescriptor caller(::socket(local ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un unix_address{};
  unix_address.sun_family = AF_UNIX;
  daemon.grpc_socket().copy(unix_address.sun_path, sizeof(unix_address.sun_path) - 1);
  sockaddr_in tcp_address{};
  tcp_address.sin_family = AF_INET;
  tcp_address.sin_port = htons(static_cast<uint16_t>(daemon.grpc_port()));
  tcp_address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto* address = local ? reinterpret_cast<const sockaddr*>(&unix_address) : reinterpret_cast<const sockaddr*>(&tcp_address);
  EXPECT_EQ(::connect(caller.get(), address, local ? sizeof(unix_address) : sizeof(tcp_address)), 0) << std::strerror(errno);
  return caller;
}

TEST_F(Single, a_crowd_that_takes_every_descriptor_does_not_shut_the_door_for_good) {
  daemon_.start();
  const auto open_files = [this] {
    const std::filesystem::directory_iterator listed("/proc/" + std::to_string(daemon_.pid()) + "/fd");
    return static_cast<rlim_t>(std::distance(begin(listed), end(listed)));
  };
  rlimit before{};
  ASSERT_EQ(::prlimit(daemon_.pid(), RLIMIT_NOFILE, nullptr, &before), 0);
  rlimit few = before;
  few.rlim_cur = open_files() + 64 + 20;
  ASSERT_EQ(::prlimit(daemon_.pid(), RLIMIT_NOFILE, &few, nullptr), 0);
  std::vector<FileDescriptor> crowd;
  for (int i = 0; i < 80; ++i) crowd.push_back(knock(daemon_, i % 2 == 0));
  EXPECT_TRUE(eventually(10, [&] { return daemon_.log_has("fewer than 64 of"); }));
  EXPECT_LE(open_files() + 50, few.rlim_cur) << "the last ones are for others";
  auto engine = daemon_.attach();
  crowd.clear();
  EXPECT_TRUE(eventually(10, [&] { return daemon_.answers(); }));

  few.rlim_cur = 3;  // now not one is left
  ASSERT_EQ(::prlimit(daemon_.pid(), RLIMIT_NOFILE, &few, nullptr), 0);
  crowd.push_back(knock(daemon_, true));
  crowd.push_back(knock(daemon_, false));
  EXPECT_TRUE(eventually(10, [&] { return daemon_.log_has("Too many open files"); }));
  ASSERT_EQ(::prlimit(daemon_.pid(), RLIMIT_NOFILE, &before, nullptr), 0);
  EXPECT_TRUE(eventually(10, [&] { return daemon_.answers(); }));
  store(*engine, 150, kPage);
  daemon_.expect_sums();
}

TEST_F(Single, sigterm_ends_a_daemon_cleanly) {
  daemon_.start();
  auto client = daemon_.attach();
  store(*client, 130, kPage);
  client.reset();
  daemon_.kill(SIGTERM);
  const int status = daemon_.wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(Pair, a_clean_stop_is_announced_and_warns_nobody) {
  start();
  auto writer = prefill_.attach();
  auto reader = decode_.attach();
  store(*writer, 140, kPage);
  auto ship = reader->ship("prefill", SequenceId(140), 20'000);
  ASSERT_TRUE(ship.ok()) << ship.status();
  ASSERT_TRUE(ship->wait().ok());
  writer.reset();
  prefill_.kill(SIGTERM);
  const int status = prefill_.wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(eventually(5, [&] { return decode_.log_has("event=peer_left") && decode_.log_has("event=ucx_link_closed"); }));
  for (const DaemonProcess* daemon : {&prefill_, &decode_}) {
    EXPECT_FALSE(daemon->log_has("event=ucx_link_failed")) << daemon->name();
    EXPECT_FALSE(daemon->log_has("event=peer_silent")) << daemon->name();
  }
}

TEST_F(Single, a_keeper_without_a_fixed_budget_is_refused_and_says_what_to_set) {
  const std::string log = (folder_.path() / "refused.log").string();
  const pid_t pid =
      spawn({NEEDLE_NEEDLED, "--node-runtime-dir", folder_.path().string(), "--memory-keeper", (folder_.path() / "keeper.sock").string()},
            -1, -1, log);
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  std::ifstream text(log);
  const std::string said{std::istreambuf_iterator<char>(text), {}};
  EXPECT_NE(said.find("set memory.bytes"), std::string::npos) << said;
}

// What the daemon says where it ends before it answers.
std::string refusal_of(DaemonProcess& daemon) {
  try {
    daemon.start();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "it started";
}

TEST_F(Single, a_listen_address_that_does_not_resolve_is_invalid_and_not_a_conflict) {
  daemon_.replace_argument("--listen-grpc", "no-such-host.invalid:7420");
  const std::string said = refusal_of(daemon_);
  EXPECT_NE(said.find("INVALID: option listen.grpc: 'no-such-host.invalid:7420'"), std::string::npos) << said;
  EXPECT_EQ(WEXITSTATUS(daemon_.wait()), 1);
}

TEST_F(Single, too_low_a_limit_of_address_space_is_said_before_a_library_aborts) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer maps terabytes";
#endif
  daemon_.run_under({"/bin/sh", "-c", "ulimit -v 550000; exec \"$@\"", "sh"});
  const std::string said = refusal_of(daemon_);
  EXPECT_NE(said.find("the limit of address space is 537 MiB"), std::string::npos) << said;
  const int status = daemon_.wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 2) << status;
  DaemonProcess enough(folder_, "enough", DaemonProcess::default_config());
  enough.run_under({"/bin/sh", "-c", "ulimit -v 1600000; exec \"$@\"", "sh"});
  EXPECT_NO_THROW(enough.start());
}

TEST_F(Single, a_configuration_check_refuses_what_a_start_would_stumble_over) {
  const auto check = [&](const std::string& flag) {
    const std::filesystem::path out = folder_.path() / "check.out";
    std::filesystem::remove(out);
    const pid_t pid = spawn({NEEDLE_NEEDLED, "--check-config", "--memory-bytes=1G", flag}, -1, -1, out.string());
    int status = 0;
    ::waitpid(pid, &status, 0);
    std::ifstream stream(out);
    return std::to_string(WEXITSTATUS(status)) + " " + std::string(std::istreambuf_iterator<char>(stream), {});
  };
  for (const auto& [flag, words] : std::vector<std::pair<std::string, std::string>>{
           {"--listen-grpc=no-such-host.invalid:1", "1 needled: INVALID: option listen.grpc: 'no-such-host.invalid:1'"},
           {"--listen-metrics=192.0.2.1:1", "1 needled: INVALID: option listen.metrics: cannot listen at '192.0.2.1:1'"},
           {"--listen-advertise=no-such-host.invalid:1", "1 needled: INVALID: option listen.advertise: 'no-such-host.invalid:1'"},
           {"--memory-numa-node=1023", "1 needled: INVALID: option memory.numa_node: this machine has no node 1023"},
           {"--node-runtime-dir=/run/" + std::string(120, 'a'), "1 needled: INVALID: option node.runtime_dir: '/run/aaa"},
       }) {
    EXPECT_EQ(check(flag).rfind(words, 0), 0u) << check(flag);
  }
  const std::string later = check("--peer=p=no-such-host.invalid:1");  // a peer's name may come to be known
  EXPECT_EQ(later.rfind("0 ", 0), 0u) << later;
  EXPECT_NE(later.find("for now, INVALID: option peers.static: 'no-such-host.invalid:1'"), std::string::npos) << later;
}

TEST_F(Single, metrics_are_served_and_the_states_sum_up) {
  daemon_.start();
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(daemon_.metrics_port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const std::string get = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  ASSERT_EQ(::write(fd, get.data(), get.size()), static_cast<ssize_t>(get.size()));
  std::string page;
  char block[4096];
  for (ssize_t got = 0; (got = ::read(fd, block, sizeof block)) > 0;) page.append(block, static_cast<size_t>(got));
  ::close(fd);
  EXPECT_NE(page.find("needle_"), std::string::npos) << page;
  EXPECT_NE(page.find("# TYPE"), std::string::npos);
}

}  // namespace
}  // namespace needle::testing
