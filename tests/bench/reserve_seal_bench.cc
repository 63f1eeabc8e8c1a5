// Pages a second through the front door: Reserve and Seal of whole prompts, through gRPC on the Unix socket, by clients in
// processes of their own against a real needled.
//
// Metadata alone: names and checksums are made up, nobody writes or reads a page's bytes. The format is the small one, so
// that the pools hold many pages; they are full after the first seconds, and every reserve evicts. A call names all pages of
// a prompt (--pages): batching by the prompt is how engines call.
//
// What must stay true:
//  1. The clock runs while all clients are in their loop; a page counts when the Seal that named it has been answered.
//  2. Each client is one process with one session and one call under way, as one engine's thread has.
//  3. The processor time of daemon and clients is printed beside: on a small machine they share its cores.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "base/clock.h"
#include "base/rng.h"
#include "client/session.h"
#include "tests/bench/bench_process.h"
#include "tests/e2e/processes.h"
#include "tests/e2e/small_formats.h"

namespace {

using namespace needle;
using namespace needle::bench;

struct Settings {
  int64_t clients = 4;
  int64_t pages = 64;  // a prompt, and so a call
  int64_t seconds = 5;
  int64_t budget_mib = 512;
};

struct Tally {
  int64_t pages = 0;
  int64_t prompts = 0;
  double seconds = 0;
  double processor_seconds = 0;
  double reserve_us_median = 0;
  double seal_us_median = 0;
};

constexpr int64_t kPageTokens = 256;
constexpr int64_t kWindowPageTokens = 64;

double median_us(std::vector<int64_t>& ns) {
  if (ns.empty()) return 0;
  std::nth_element(ns.begin(), ns.begin() + static_cast<std::ptrdiff_t>(ns.size() / 2), ns.end());
  return static_cast<double>(ns[ns.size() / 2]) * 1e-3;
}

// Stores prompts until `until_ns`.
Tally store_prompts(client::Session& session, Rng& rng, const Settings& settings, int64_t until_ns) {
  const SteadyClock clock;
  Tally tally;
  std::vector<int64_t> reserve_ns;
  std::vector<int64_t> seal_ns;
  const double processor_start_s = processor_seconds();
  const int64_t start_ns = clock.now_ns();
  const int64_t tokens = settings.pages * kPageTokens;
  const int64_t window_first = std::max<int64_t>(0, tokens - kWindowTokens) / kWindowPageTokens;
  const int64_t window_pages = tokens / kWindowPageTokens - window_first;
  while (clock.now_ns() < until_ns) {
    v1::ReserveRequest reserve;
    v1::SealRequest seal;
    reserve.set_ticket(client::Session::random_id());
    reserve.set_sequence(client::Session::random_id());
    reserve.set_tokens(tokens);
    seal.set_ticket(reserve.ticket());
    seal.set_step(1);
    seal.set_tokens(tokens);
    for (int64_t page = 0; page < settings.pages; ++page) {
      const uint64_t high = rng.next() | 1;
      const uint64_t low = rng.next();
      reserve.mutable_names()->add_high(high);
      reserve.mutable_names()->add_low(low);
      seal.mutable_pages()->add_name_high(high);
      seal.mutable_pages()->add_name_low(low);
      seal.mutable_pages()->add_checksum(rng.next());
    }
    for (int64_t page = 0; page < window_pages; ++page) seal.add_window_checksums(rng.next());
    seal.set_state_checksum(rng.next());
    const int64_t before_ns = clock.now_ns();
    v1::ReserveReply reserved;
    absl::Status status = session.call(&v1::Needle::Stub::Reserve, reserve, &reserved, 10'000);
    NEEDLE_CHECK(status.ok(), status.ToString().c_str());
    const int64_t between_ns = clock.now_ns();
    v1::SealReply sealed;
    status = session.call(&v1::Needle::Stub::Seal, seal, &sealed, 10'000);
    NEEDLE_CHECK(status.ok(), status.ToString().c_str());
    seal_ns.push_back(clock.now_ns() - between_ns);
    reserve_ns.push_back(between_ns - before_ns);
    tally.pages += settings.pages;
    ++tally.prompts;
  }
  tally.seconds = static_cast<double>(clock.now_ns() - start_ns) * 1e-9;
  tally.processor_seconds = processor_seconds() - processor_start_s;
  tally.reserve_us_median = median_us(reserve_ns);
  tally.seal_us_median = median_us(seal_ns);
  return tally;
}

// Forked before anything of gRPC is touched; hears the socket's path, says when it is warm, hears the start.
int run_client(const Settings& settings, int number, int in, int out) {
  client::AttachOptions options;
  options.socket = read_text(in);
  if (options.socket.empty()) return 1;
  options.client_name = "bench-" + std::to_string(number);
  absl::StatusOr<std::shared_ptr<client::Session>> session = client::Session::open(options);
  NEEDLE_CHECK(session.ok(), session.status().ToString().c_str());
  Rng rng(20261129 + static_cast<uint64_t>(number));
  const SteadyClock clock;
  store_prompts(**session, rng, settings, clock.now_ns() + 1'000'000'000);
  write_text(out, "warm");
  read_text(in);
  const Tally tally = store_prompts(**session, rng, settings, clock.now_ns() + settings.seconds * 1'000'000'000);
  write_all(out, &tally, sizeof tally);
  (*session)->close();
  return 0;
}

double process_seconds(pid_t pid) {  // user and kernel, of another process
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(stat, text);
  long long user = 0;
  long long kernel = 0;
  std::sscanf(text.c_str() + text.rfind(')'), ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lld %lld", &user, &kernel);
  return static_cast<double>(user + kernel) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

struct Helper {
  pid_t pid = -1;
  int to = -1;
  int from = -1;
};

int run(const Settings& settings) {
  std::vector<Helper> helpers;
  for (int64_t i = 0; i < settings.clients; ++i) {
    int in[2];
    int out[2];
    NEEDLE_CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0, "no pipes");
    const pid_t pid = fork();
    NEEDLE_CHECK(pid >= 0, "no client process");
    if (pid == 0) {
      close(in[1]);
      close(out[0]);
      std::exit(run_client(settings, static_cast<int>(i), in[0], out[1]));
    }
    close(in[0]);
    close(out[1]);
    helpers.push_back({pid, in[1], out[0]});
  }
  needle::testing::Folder folder;
  std::ofstream(folder.path() / "small.txt") << format_set_text(needle::testing::small_formats());
  // By pages: a prompt takes `pages` of 16 KiB, a ring of window pages of 37 KiB and a record of 16 KiB.
  const std::string budget = std::to_string(settings.budget_mib);
  needle::testing::DaemonProcess daemon(folder, "bench",
                                        "[memory]\nbytes = \"" + budget +
                                            "M\"\nscratch_bytes = \"1M\"\nchunk_bytes = \"2M\"\n[transport]\nkind = \"none\"\n"
                                            "[pool.default]\nformat_file = \"" +
                                            (folder.path() / "small.txt").string() +
                                            "\"\nratio_paged = 5\nratio_window = 2\nratio_state = 1\n");
  daemon.start();
  NEEDLE_CHECK(daemon.running() && daemon.answers(), "needled did not start");
  for (const Helper& helper : helpers) write_text(helper.to, daemon.attach_socket());
  for (const Helper& helper : helpers) read_text(helper.from);
  const double daemon_start_s = process_seconds(daemon.pid());
  for (const Helper& helper : helpers) write_text(helper.to, "go");
  Tally all;
  double seconds_max = 0;
  double reserve_us = 0;
  double seal_us = 0;
  for (const Helper& helper : helpers) {
    Tally tally;
    read_all(helper.from, &tally, sizeof tally);
    all.pages += tally.pages;
    all.prompts += tally.prompts;
    all.processor_seconds += tally.processor_seconds;
    seconds_max = std::max(seconds_max, tally.seconds);
    reserve_us += tally.reserve_us_median / static_cast<double>(settings.clients);
    seal_us += tally.seal_us_median / static_cast<double>(settings.clients);
  }
  const double daemon_s = process_seconds(daemon.pid()) - daemon_start_s;
  for (const Helper& helper : helpers) waitpid(helper.pid, nullptr, 0);
  std::printf("clients=%" PRId64 " pages_a_call=%" PRId64
              " seconds=%.2f pages_per_s=%.0f calls_per_s=%.0f reserve_us=%.0f seal_us=%.0f "
              "daemon_cores=%.2f clients_cores=%.2f\n",
              settings.clients, settings.pages, seconds_max, static_cast<double>(all.pages) / seconds_max,
              2 * static_cast<double>(all.prompts) / seconds_max, reserve_us, seal_us, daemon_s / seconds_max,
              all.processor_seconds / seconds_max);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  const std::map<std::string, int64_t*> numbers = {{"--clients", &settings.clients},
                                                   {"--pages", &settings.pages},
                                                   {"--seconds", &settings.seconds},
                                                   {"--budget-mib", &settings.budget_mib}};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const auto number = numbers.find(argument.substr(0, equals));
    if (equals == std::string::npos || number == numbers.end() || (*number->second = std::atoll(argument.c_str() + equals + 1)) <= 0) {
      std::fprintf(stderr, "usage: reserve_seal_bench [--clients=N] [--pages=N] [--seconds=N] [--budget-mib=N]\n");
      return 2;
    }
  }
  return run(settings);
}
