// What operators see, from real daemons under load: the occupancy identity at every scrape, and a real Prometheus.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <sstream>

#include "tests/counts.h"
#include "tests/e2e/processes.h"

namespace needle::testing {
namespace {

using client::Client;
using client::Lease;
using client::Ticket;

// One HTTP GET over a fresh connection; the body.
std::string get(int port, const std::string& path) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\nHost: localhost\r\n\r\n";
    EXPECT_EQ(::write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
    char buffer[65536];
    for (ssize_t got = ::read(fd, buffer, sizeof buffer); got > 0; got = ::read(fd, buffer, sizeof buffer))
      answer.append(buffer, static_cast<size_t>(got));
  }
  ::close(fd);
  const size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? std::string() : answer.substr(body + 4);
}

// Sum of the states of each (pool, kind), beside its capacity.
void expect_identity(const std::string& text) {
  std::map<std::string, double> sums;
  std::map<std::string, double> capacities;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t open = line.find('{');
    const size_t close = line.rfind('}');
    if (line.empty() || line[0] == '#' || open == std::string::npos) continue;
    const std::string name = line.substr(0, open);
    const std::string labels = line.substr(open + 1, close - open - 1);
    const std::string pool = labels.substr(0, labels.find(",state="));
    if (name == "needle_pool_pages") sums[pool] += std::stod(line.substr(close + 1));
    if (name == "needle_pool_capacity_pages") capacities[pool] = std::stod(line.substr(close + 1));
  }
  ASSERT_EQ(sums.size(), 3u) << text.substr(0, 500);
  EXPECT_EQ(sums, capacities);
}

// Stores, reads and gives back, until told to stop.
class Load {
 public:
  Load(const DaemonProcess& daemon, uint64_t first) : client_(daemon.attach("load")), thread_([this, first] { work(first); }) {}
  ~Load() {
    stop_ = true;
    thread_.join();
  }
  int64_t rounds() const { return rounds_; }

 private:
  void work(uint64_t first) {
    CallerThread here;
    for (uint64_t sequence = first; !stop_; ++sequence) {
      absl::StatusOr<Ticket> ticket = client_->reserve(SequenceId(sequence), 300);
      if (!ticket.ok()) continue;
      if (!ticket->seal(300, {}, here).ok()) continue;
      absl::StatusOr<Lease> lease = client_->acquire(SequenceId(sequence));
      ++rounds_;
    }
  }
  std::unique_ptr<Client> client_;
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> rounds_{0};
  std::thread thread_;
};

TEST(Metrics, the_occupancy_identity_holds_at_every_scrape_under_load) {
  Folder folder;
  DaemonProcess daemon(folder, "one", DaemonProcess::default_config());
  daemon.add_argument("--transport-kind=none");
  daemon.start();
  Load first(daemon, 1000);
  Load second(daemon, 1'000'000);
  const int64_t scrapes = count_of("e2e_scrapes");
  for (int64_t i = 0; i < scrapes && !::testing::Test::HasFailure(); ++i) expect_identity(get(daemon.metrics_port(), "/metrics"));
  EXPECT_GT(first.rounds() + second.rounds(), 10) << "there was load";
}

// The value of a series without labels; -1 where it is missing.
double series(const std::string& text, const std::string& name) {
  const size_t at = text.find("\n" + name + " ");
  return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size() + 2));
}

TEST(Metrics, what_an_engine_reads_in_its_own_process_is_counted_at_the_daemon) {
  Folder folder;
  DaemonProcess daemon(folder, "one", DaemonProcess::default_config());
  daemon.add_argument("--transport-kind=none");
  daemon.start();
  const std::unique_ptr<Client> engine = daemon.attach();
  CallerThread here;
  absl::StatusOr<Ticket> ticket = engine->reserve(SequenceId(7), 300);
  ASSERT_TRUE(ticket.ok() && ticket->seal(300, {}, here).ok());
  const absl::StatusOr<Lease> lease = engine->acquire(SequenceId(7));
  ASSERT_TRUE(lease.ok()) << lease.status();
  constexpr int kHeads = 64;
  const std::vector<uint16_t> q(size_t{2} * kHeads * 128, 0x3f80);
  const std::vector<float> weights(size_t{2} * kHeads, 1.0f);
  const std::vector<int64_t> positions = {298, 299};
  client::TopkQuery query;
  query.q = q;
  query.head_weights = weights;
  query.positions = positions;
  query.heads = kHeads;
  query.prepared = true;
  for (int call = 0; call < 3; ++call) ASSERT_TRUE(engine->read_topk(lease->pages(), query, here).ok());
  const std::string text = get(daemon.metrics_port(), "/metrics");
  EXPECT_EQ(series(text, "needle_reads_total"), 3);
  EXPECT_EQ(series(text, "needle_read_queries_total"), 6);
  EXPECT_GT(series(text, "needle_read_entries_total"), 0);
}

// Connections that never finish a request, as a port scanner or a hung proxy leaves them.
TEST(Metrics, four_hundred_half_open_connections_do_not_hold_up_a_scrape) {
  Folder folder;
  DaemonProcess daemon(folder, "one", DaemonProcess::default_config());
  daemon.add_argument("--transport-kind=none");
  daemon.start();
  std::vector<int> half_open;
  for (int i = 0; i < 400; ++i) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(daemon.metrics_port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    if (i % 2 == 0) {
      ASSERT_EQ(::send(fd, "GET /met", 8, MSG_NOSIGNAL), 8);
    }
    half_open.push_back(fd);
  }
  const double begin = steady_seconds();
  EXPECT_EQ(series(get(daemon.metrics_port(), "/metrics"), "needle_up"), 1);
  EXPECT_LT(steady_seconds() - begin, 4) << "less than the time in which half a request may be finished";
  for (int fd : half_open) ::close(fd);
}

// The names and types of monitoring/METRICS.md.
std::map<std::string, std::string> documented_metrics() {
  std::ifstream stream(NEEDLE_SOURCE_DIR "/monitoring/METRICS.md");
  std::map<std::string, std::string> types;
  for (std::string line; std::getline(stream, line);) {
    const size_t end = line.find("` | ");
    if (line.rfind("| `needle_", 0) == 0 && end != std::string::npos)
      types[line.substr(3, end - 3)] = line.substr(end + 4, line.find(' ', end + 4) - end - 4);
  }
  return types;
}

// The largest value that each documented metric ever had; a histogram's is its count.
class Seen {
 public:
  void scrape(const DaemonProcess& daemon) {
    std::istringstream lines(get(daemon.metrics_port(), "/metrics"));
    for (std::string line; std::getline(lines, line);) {
      if (line.empty() || line[0] == '#') continue;
      std::string name = line.substr(0, line.find_first_of("{ "));
      const size_t count = name.rfind("_count");
      if (count != std::string::npos && count + 6 == name.size()) name.resize(count);
      const double value = std::stod(line.substr(line.rfind(' ')));
      const auto found = largest_.emplace(name, value).first;
      found->second = std::max(found->second, value);
    }
  }
  bool has(const std::string& name) const { return largest_.count(name) > 0; }
  double largest(const std::string& name) const { return has(name) ? largest_.at(name) : 0; }

 private:
  std::map<std::string, double> largest_;
};

TEST(Metrics, every_documented_metric_is_produced_and_every_counter_counts) {
  Folder folder;
  DaemonProcess one(folder, "one", DaemonProcess::default_config());
  DaemonProcess two(folder, "two", DaemonProcess::default_config());
  one.know_peer(two);
  two.know_peer(one);
  one.start();
  two.start();
  ASSERT_TRUE(eventually(20, [&] { return one.peer_is("two", "up") && two.peer_is("one", "up"); }));
  Seen seen;
  CallerThread here;

  // A caller that says nothing, and one that asks for a pool that isn't there.
  const int silent = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, one.attach_socket().c_str(), sizeof address.sun_path - 1);
  ASSERT_EQ(::connect(silent, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  client::AttachOptions wrong = one.attach_options();
  wrong.pool_set = "nowhere";
  EXPECT_FALSE(Client::attach(wrong).ok());

  // Keys that are NaN, in a row so long that the fast selection looks for a threshold and finds none.
  const std::unique_ptr<Client> engine = one.attach("engine");
  constexpr int64_t kTokens = 68 * kPage;
  absl::StatusOr<Ticket> ticket = engine->reserve(SequenceId(7), kTokens);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  const MutableLayerView keys = *engine->writable_layer(PoolKind::kPaged, 0, 0);
  for (const PageId& page : ticket->pages().paged) {
    auto* values = reinterpret_cast<uint16_t*>(keys.base + keys.page_stride * page.index.value());
    std::fill_n(values, int64_t{keys.slots_per_page} * keys.head_dim, uint16_t{0x7fc0});
  }
  OpReport stored{};
  stored.skipped_rows = 3;
  engine->count_store(kTokens, stored);
  ASSERT_TRUE(ticket->seal(kTokens, {}, here).ok());
  EXPECT_FALSE(engine->acquire(SequenceId(8)).ok());
  absl::StatusOr<Lease> lease = engine->acquire(SequenceId(7));
  ASSERT_TRUE(lease.ok()) << lease.status();
  constexpr int kHeads = 64;
  const std::vector<uint16_t> q(size_t{kHeads} * 128, 0x3f80);
  const std::vector<float> weights(kHeads, 1.0f);
  const std::vector<int64_t> positions = {kTokens - 1};
  client::TopkQuery query;
  query.q = q;
  query.head_weights = weights;
  query.positions = positions;
  query.heads = kHeads;
  query.prepared = true;
  query.k = 16;
  ASSERT_TRUE(engine->read_topk(lease->pages(), query, here).ok());
  client::Pages holes = lease->pages();
  holes.paged[3] = PageId();
  ASSERT_TRUE(engine->read_topk(holes, query, here).ok());

  // A reader that is stopped until its rights are gone learns of it when it looks again.
  ClientProcess reader(folder, "reader");
  reader.expect_ok("attach " + one.attach_socket() + " ro");
  reader.expect_ok("acquire 7");
  lease->release().IgnoreError();
  reader.kill(SIGSTOP);
  EXPECT_TRUE(eventually(20, [&] {
    seen.scrape(one);
    return seen.largest("needle_session_pinned_pages") > 0;
  }));
  reader.kill(SIGCONT);
  EXPECT_NE(reader.ask("recheck").find("STALE"), std::string::npos);

  // A ship that arrives, and one whose source has just died.
  {
    const std::unique_ptr<Client> decode = two.attach("decode");
    absl::StatusOr<client::Ship> ship = decode->ship("one", SequenceId(7), 20'000);
    ASSERT_TRUE(ship.ok()) << ship.status();
    EXPECT_TRUE(ship->wait().ok());
  }
  seen.scrape(two);
  // Stopped first: a ship from a peer that is known to be dead is refused, and nothing is sent that could be lost.
  two.kill(SIGSTOP);
  absl::StatusOr<client::Ship> lost = engine->ship("two", SequenceId(7), 20'000);
  EXPECT_TRUE(lost.ok()) << lost.status();
  two.kill(SIGKILL);
  two.wait();

  EXPECT_TRUE(eventually(20, [&] {
    seen.scrape(one);
    return seen.largest("needle_attach_hellos_overdue_total") > 0 && seen.largest("needle_read_stale_total") > 0 &&
           seen.largest("needle_peer_messages_dropped_total") > 0;
  }));
  ::close(silent);
  const std::map<std::string, std::string> documented = documented_metrics();
  EXPECT_GT(documented.size(), 40u);
  for (const auto& [name, type] : documented) {
    EXPECT_TRUE(seen.has(name)) << name << " was never in a scrape";
    if (type == "counter" || type == "histogram") {
      EXPECT_GT(seen.largest(name), 0) << name << ": nothing that happened here counted in it";
    }
  }
}

// Stands at a port before the daemon that belongs there: takes connections and resets each at once.
void reset_connections(int port, int count) {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int yes = 1;
  ::setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  const timeval patience{20, 0};  // of accept()
  ::setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address), 0) << strerror(errno);
  ASSERT_EQ(::listen(listener, 1), 0);
  for (int i = 0; i < count; ++i) {
    const int connection = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    ASSERT_GE(connection, 0) << "connection " << i << ": " << strerror(errno);
    const linger reset{1, 0};
    ::setsockopt(connection, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    ::close(connection);
  }
  ::close(listener);
}

TEST(Metrics, a_source_that_long_waited_for_its_reader_answers_its_first_ship) {
  Folder folder;
  DaemonProcess source(folder, "source", DaemonProcess::default_config());
  DaemonProcess reader(folder, "reader", DaemonProcess::default_config());
  source.know_peer(reader);
  reader.know_peer(source);
  source.start();
  // After that many failures the source tries again once a second, and the reader starts in less.
  ASSERT_NO_FATAL_FAILURE(reset_connections(reader.grpc_port(), 7));
  reader.start();
  ASSERT_TRUE(eventually(20, [&] { return source.peer_is("reader", "up") && reader.peer_is("source", "up"); }));
  const std::unique_ptr<Client> prefill = source.attach("prefill");
  const std::unique_ptr<Client> decode = reader.attach("decode");
  store(*prefill, 1, kPage);
  absl::StatusOr<client::Ship> ship = decode->ship("source", SequenceId(1), 20'000);
  ASSERT_TRUE(ship.ok()) << ship.status();
  EXPECT_TRUE(ship->wait().ok());
  // One answer may meet the connection in the making. An unreachable reader loses one every 50 ms.
  const double dropped = series(get(source.metrics_port(), "/metrics"), "needle_peer_messages_dropped_total{peer=\"reader\"}");
  EXPECT_GE(dropped, 0) << "the series is there";
  EXPECT_LE(dropped, 1);
}

TEST(Metrics, a_real_prometheus_scrapes_both_daemons) {
  if (std::system("command -v prometheus >/dev/null 2>&1") != 0) GTEST_SKIP() << "prometheus is not installed";
  Folder folder;
  DaemonProcess first(folder, "first", DaemonProcess::default_config());
  DaemonProcess second(folder, "second", DaemonProcess::default_config());
  for (DaemonProcess* daemon : {&first, &second}) {
    daemon->add_argument("--transport-kind=none");
    daemon->start();
  }
  const std::string config = (folder.path() / "prometheus.yml").string();
  std::ofstream(config) << "global:\n  scrape_interval: 200ms\nrule_files:\n  - " NEEDLE_SOURCE_DIR
                           "/monitoring/needle.rules.yml\nscrape_configs:\n  - job_name: needle\n    static_configs:\n"
                        << "      - targets: ['127.0.0.1:" << first.metrics_port() << "', '127.0.0.1:" << second.metrics_port() << "']\n";
  const int port = free_port();
  const pid_t prometheus = spawn({"/bin/sh", "-c",
                                  "exec prometheus --config.file=" + config + " --storage.tsdb.path=" + (folder.path() / "data").string() +
                                      " --web.listen-address=127.0.0.1:" + std::to_string(port)},
                                 -1, -1, (folder.path() / "prometheus.log").string());
  // Ten scrapes of each, as Prometheus itself counted them, and none of them failed.
  const bool scraped = eventually(60, [&] {
    const std::string answer = get(port, "/api/v1/query?query=min(count_over_time(needle_up%5B5m%5D))");
    const size_t value = answer.rfind(",\"");
    return answer.find("\"success\"") != std::string::npos && value != std::string::npos && std::atoi(answer.c_str() + value + 2) >= 10;
  });
  EXPECT_TRUE(scraped);
  const std::string up = get(port, "/api/v1/query?query=sum(min_over_time(up%5B5m%5D))");
  EXPECT_NE(up.find(",\"2\"]"), std::string::npos) << up;
  const std::string identity =
      get(port, "/api/v1/query?query=count(sum%20by(instance,pool,kind)(needle_pool_pages)!=needle_pool_capacity_pages)");
  EXPECT_NE(identity.find("\"result\":[]"), std::string::npos) << identity;
  ::kill(prometheus, SIGKILL);
  ::waitpid(prometheus, nullptr, 0);
}

}  // namespace
}  // namespace needle::testing
