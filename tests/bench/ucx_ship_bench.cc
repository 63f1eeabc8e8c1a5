// The ship's data path: the transport moving pages between two processes' memfd memory, every page summed as it lands.
// Printed in the form of ucx_loop_bench.cc, to be quoted as a share of it: same page, footprint, rotation and fabric.
//
// What must stay true:
//  1. Two processes, a transport each, nothing of the core: what the core adds is measured elsewhere.
//  2. Every checksum that comes back is compared with the source's, computed before; a difference ends the program.
//  3. The clock runs on the reading side over `--rounds` passes, after one unmeasured pass.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/check.h"
#include "kernels/checksum_pages.h"
#include "server/transport/ucx/ucx_transport.h"
#include "tests/bench/bench_process.h"

namespace {

using namespace needle;
using namespace needle::bench;
using namespace needle::server;
using namespace needle::server::ucx;

struct Settings {
  std::string transports = "tcp";
  std::string call = "auto";
  int64_t page_bytes = 1'165'824;
  int64_t pages = 440;
  int64_t message_bytes = 0;
  int64_t bytes_in_flight = int64_t{16} << 20;
  int64_t sends = 8;
  int64_t spin_us = 20;
  int64_t request_pages = 16;
  int64_t requests = 4;
  int64_t rounds = 4;
  bool checksums = true;
  bool pin = true;
  bool log = false;
};

constexpr PoolId kPool(0);

uint64_t sum_of(std::span<const std::byte> page) {
  uint64_t sum = 0;
  const int32_t id = 0;
  ChecksumPagesArgs args;
  args.base = page.data();
  args.page_stride = static_cast<int64_t>(page.size());
  args.page_bytes = args.page_stride;
  args.page_count = 1;
  args.pages = &id;
  args.count = 1;
  args.checksums = &sum;
  CallerThread alone;
  static const CpuIsa isa = best_cpu_isa();
  NEEDLE_CHECK(checksum_pages_cpu(args, isa, alone).ok(), "the page cannot be summed");
  return sum;
}

class Daemon {
 public:
  Daemon(const Settings& settings, uint32_t node) : settings_(settings), log_(stderr, settings.log ? LogLevel::kInfo : LogLevel::kWarning) {
    const size_t bytes = static_cast<size_t>(settings.page_bytes * settings.pages);
    const int fd = memfd_create("ucx_ship_bench", MFD_CLOEXEC);
    NEEDLE_CHECK(fd >= 0 && fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0, "no memory for the footprint");
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEEDLE_CHECK(mapped != MAP_FAILED, "the footprint cannot be mapped");
    close(fd);
    memory_ = {static_cast<std::byte*>(mapped), bytes};
    std::memset(memory_.data(), 0, bytes);
    UcxOptions options;
    options.node = NodeId(node);
    options.instance = static_cast<uint64_t>(getpid());
    options.fabric = {settings.transports, "lo"};
    options.call = settings.call;
    options.bytes_in_flight_max = settings.bytes_in_flight;
    options.sends_in_flight_max = settings.sends;
    options.message_bytes_max = settings.message_bytes;
    options.spin_us = settings.spin_us;
    PoolPlace place;
    place.pool = kPool;
    place.base = memory_.data();
    place.shape = {settings.page_bytes, 256, static_cast<int64_t>(bytes), 1};
    const bool sums = settings.checksums;
    UcxEnvironment environment{clock_,
                               processor_clock_,
                               log_,
                               {place},
                               [sums](PoolId, std::span<const std::byte> page) { return sums ? sum_of(page) : uint64_t{0}; },
                               [this] {
                                 std::lock_guard<std::mutex> hold(mutex_);
                                 ready_ = true;
                                 woken_.notify_one();
                               }};
    absl::StatusOr<std::unique_ptr<UcxTransport>> started = UcxTransport::start(options, std::move(environment));
    NEEDLE_CHECK(started.ok(), started.status().ToString().c_str());
    transport_ = std::move(*started);
    transport_->register_chunk(kPool, ChunkIndex(0));
    TransportEvents events;
    while (events.registered.empty()) wait(events);
    NEEDLE_CHECK(events.registered[0].status.ok(), "the footprint cannot be registered");
    descriptor_ = events.registered[0].descriptor;
  }

  std::span<std::byte> page(int64_t index) {
    return memory_.subspan(static_cast<size_t>(index * settings_.page_bytes), static_cast<size_t>(settings_.page_bytes));
  }
  UcxTransport& transport() { return *transport_; }
  const std::string& descriptor() const { return descriptor_; }
  const Clock& clock() const { return clock_; }

  void wait(TransportEvents& events) {
    {
      std::unique_lock<std::mutex> hold(mutex_);
      woken_.wait(hold, [this] { return ready_; });
      ready_ = false;
    }
    transport_->poll(events);
  }

 private:
  const Settings settings_;
  SteadyClock clock_;
  ThreadProcessorClock processor_clock_;
  StreamLog log_;
  std::span<std::byte> memory_;
  std::mutex mutex_;
  std::condition_variable woken_;
  bool ready_ = false;
  std::string descriptor_;
  std::unique_ptr<UcxTransport> transport_;
};

int run_source(const Settings& settings, int channel) {
  if (settings.pin) pin_to(1);
  Daemon daemon(settings, 1);
  std::vector<uint64_t> sums;
  for (int64_t i = 0; i < settings.pages; ++i) {
    auto* words = reinterpret_cast<uint64_t*>(daemon.page(i).data());
    for (int64_t w = 0; w < settings.page_bytes / 8; ++w)
      words[w] = static_cast<uint64_t>(i + 1) * 0x9E3779B97F4A7C15ull ^ static_cast<uint64_t>(w);
    sums.push_back(settings.checksums ? sum_of(daemon.page(i)) : 0);
  }
  write_text(channel, daemon.transport().address());
  write_text(channel, daemon.descriptor());
  write_all(channel, sums.data(), sums.size() * sizeof(uint64_t));
  for (int mark = 0; mark < 2; ++mark) {  // asked for before and after the measured passes
    char token = 0;
    read_all(channel, &token, 1);
    const double used_s = processor_seconds();
    write_all(channel, &used_s, sizeof used_s);
  }
  char end = 0;
  read_all(channel, &end, 1);
  return 0;
}

// Every page once, in requests of `request_pages`, `requests` of them under way.
void pass(Daemon& daemon, const Settings& settings, const std::vector<uint64_t>& sums, uint32_t attempt) {
  const int64_t parts = (settings.pages + settings.request_pages - 1) / settings.request_pages;
  int64_t posted = 0;
  int64_t answered = 0;
  const auto post = [&] {
    FetchRequest request;
    request.id = {TicketId(1), attempt, static_cast<uint32_t>(posted)};
    request.source = NodeId(1);
    request.source_incarnation = Incarnation(1);
    for (int64_t i = posted * settings.request_pages; i < std::min(settings.pages, (posted + 1) * settings.request_pages); ++i) {
      const auto ref = [](int64_t index) { return PageRef{kPool, {PageIndex(static_cast<uint32_t>(index)), Generation(1)}}; };
      request.pages.push_back({ref(i), ref(i * 167 % settings.pages)});
    }
    daemon.transport().post(std::move(request));
    ++posted;
  };
  while (answered < parts) {
    while (posted < parts && posted - answered < settings.requests) post();
    TransportEvents events;
    daemon.wait(events);
    for (const FetchCompletion& done : events.fetched) {
      NEEDLE_CHECK(done.status.ok(), done.status.ToString().c_str());
      for (size_t i = 0; i < done.checksums.size(); ++i) {
        NEEDLE_CHECK(done.checksums[i] == sums[done.id.part * static_cast<size_t>(settings.request_pages) + i],
                     "a page arrived with another checksum");
      }
      ++answered;
    }
  }
}

int run_reader(const Settings& settings, int channel) {
  if (settings.pin) pin_to(0);
  Daemon daemon(settings, 2);
  const std::string address = read_text(channel);
  const std::string descriptor = read_text(channel);
  std::vector<uint64_t> sums(static_cast<size_t>(settings.pages));
  read_all(channel, sums.data(), sums.size() * sizeof(uint64_t));
  NEEDLE_CHECK(daemon.transport().meet_peer(NodeId(1), Incarnation(1), address).ok(), "the source has no address");
  daemon.transport().learn_peer(NodeId(1), Incarnation(1), {{kPool, ChunkIndex(0), descriptor}});
  const auto source_seconds = [&] {
    const char token = 'x';
    write_all(channel, &token, 1);
    double used_s = 0;
    read_all(channel, &used_s, sizeof used_s);
    return used_s;
  };
  pass(daemon, settings, sums, 1);
  const double source_start_s = source_seconds();
  const double reader_start_s = processor_seconds();
  const int64_t start_ns = daemon.clock().now_ns();
  for (int64_t round = 0; round < settings.rounds; ++round) pass(daemon, settings, sums, static_cast<uint32_t>(2 + round));
  const double seconds = static_cast<double>(daemon.clock().now_ns() - start_ns) * 1e-9;
  const double reader_s = processor_seconds() - reader_start_s;
  const double source_s = source_seconds() - source_start_s;
  const char end = 'x';
  write_all(channel, &end, 1);
  const double bytes = static_cast<double>(settings.page_bytes * settings.pages * settings.rounds);
  std::printf(
      "ucx=%s ship transport=%s page_bytes=%lld message_bytes=%lld pages=%lld in_flight=%lld rounds=%lld checksums=%s "
      "seconds=%.3f gb_per_s=%.3f reader_cpu_ms_per_gb=%.0f source_cpu_ms_per_gb=%.0f\n",
      library_version().c_str(), daemon.transport().traits().name.c_str(), static_cast<long long>(settings.page_bytes),
      static_cast<long long>(settings.message_bytes), static_cast<long long>(settings.pages),
      static_cast<long long>(settings.bytes_in_flight), static_cast<long long>(settings.rounds), settings.checksums ? "on" : "off", seconds,
      bytes / seconds * 1e-9, reader_s / bytes * 1e12, source_s / bytes * 1e12);
  return 0;
}

bool parse(int argc, char** argv, Settings& settings) {
  const std::map<std::string, int64_t*> numbers = {
      {"--page-bytes", &settings.page_bytes},       {"--pages", &settings.pages},       {"--message-bytes", &settings.message_bytes},
      {"--in-flight", &settings.bytes_in_flight},   {"--sends", &settings.sends},       {"--spin-us", &settings.spin_us},
      {"--request-pages", &settings.request_pages}, {"--requests", &settings.requests}, {"--rounds", &settings.rounds}};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const std::string key = argument.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    if (const auto number = numbers.find(key); number != numbers.end())
      *number->second = std::atoll(value.c_str());
    else if (key == "--transports")
      settings.transports = value;
    else if (key == "--call")
      settings.call = value;
    else if (argument == "--no-checksums")
      settings.checksums = false;
    else if (argument == "--no-pin")
      settings.pin = false;
    else if (argument == "--log")
      settings.log = true;
    else
      return false;
  }
  return settings.page_bytes > 0 && settings.page_bytes % 256 == 0 && settings.pages > 0 && settings.request_pages > 0 &&
         settings.request_pages <= 64 && settings.requests > 0 && settings.rounds > 0;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  if (!parse(argc, argv, settings)) {
    std::fprintf(stderr,
                 "usage: ucx_ship_bench [--transports=tcp|tcp,posix,sysv] [--call=auto|am-rendezvous|am-eager|get] [--pages=N]\n"
                 "                      [--page-bytes=N] [--message-bytes=N] [--in-flight=BYTES] [--sends=N] [--spin-us=N]\n"
                 "                      [--request-pages=N] [--requests=N] [--rounds=N] [--no-checksums] [--no-pin] [--log]\n");
    return 2;
  }
  int channel[2];
  NEEDLE_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0, "no socket pair");
  const pid_t source = fork();
  NEEDLE_CHECK(source >= 0, "no second process");
  if (source == 0) {
    close(channel[0]);
    return run_source(settings, channel[1]);
  }
  close(channel[1]);
  const int result = run_reader(settings, channel[0]);
  int status = 0;
  waitpid(source, &status, 0);
  return result != 0 ? result : (WIFEXITED(status) ? WEXITSTATUS(status) : 1);
}
