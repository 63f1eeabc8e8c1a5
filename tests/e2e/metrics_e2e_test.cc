// What operators see, from real daemons under load: the occupancy identity at every scrape, and a real Prometheus.
#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <atomic>
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
