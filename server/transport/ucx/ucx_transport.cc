#include "server/transport/ucx/ucx_transport.h"

#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "proto/errors.h"
#include "server/loop.h"
#include "server/transport/ucx/source.h"
#include "server/transport/ucx/wire.h"
#include "server/transport/ucx/worker_thread.h"

namespace needle::server::ucx {
namespace {

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> words;
  for (size_t at = 0; at <= list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    if (comma > at) words.push_back(list.substr(at, comma - at));
    at = comma + 1;
  }
  return words;
}

// The same transports without those that end at this host; nothing when none is left.
std::optional<std::string> network_transports(const std::string& configured) {
  std::string list = configured;
  if (const char* environment = std::getenv("UCX_TLS"); list.empty() && environment != nullptr) list = environment;
  if (list.empty() || list == "all") return "^sm,self";
  if (list[0] == '^') return list + ",sm,self";
  std::string left;
  for (const std::string& transport : split(list)) {
    if (!is_host_only(transport)) left += (left.empty() ? "" : ",") + transport;
  }
  if (left.empty()) return std::nullopt;
  return left;
}

std::optional<Call> call_named(const std::string& name) {
  for (int i = 0; i < kCalls; ++i) {
    const Call call = static_cast<Call>(i);
    if (name == kCallNames[i] && call != Call::kPut && call != Call::kPutVector) return call;
  }
  return std::nullopt;
}

}  // namespace

int64_t ThreadProcessorClock::now_ns() const {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * kNanosPerSecond + now.tv_nsec;
}

absl::Status validate(const UcxOptions& options) {
  struct Bound {
    const char* name;
    int64_t value;
    int64_t least;
    int64_t most;
  };
  const Bound bounds[] = {
      {"heartbeat_ms", options.heartbeat_ms, 1, 60'000},
      {"silence_ms", options.silence_ms, 2 * options.heartbeat_ms, 600'000},
      {"bytes_in_flight_max", options.bytes_in_flight_max, 1, int64_t{1} << 40},
      {"sends_in_flight_max", options.sends_in_flight_max, 1, 1'024},
      {"message_bytes_max", options.message_bytes_max, 0, int64_t{1} << 30},
      {"spin_us", options.spin_us, 0, 1'000'000},
  };
  for (const Bound& bound : bounds) {
    if (bound.value >= bound.least && bound.value <= bound.most) continue;
    return make_error(ErrorCode::kInvalid, std::string(bound.name) + " is " + std::to_string(bound.value) + ", allowed are " +
                                               std::to_string(bound.least) + " to " + std::to_string(bound.most));
  }
  if (options.node.is_none() || options.instance == 0) {
    return make_error(ErrorCode::kInvalid, "a transport needs a node id and a random instance that is not 0");
  }
  if (options.call != "auto" && !call_named(options.call).has_value()) {
    return make_error(ErrorCode::kInvalid, "call is '" + options.call + "', allowed are auto, am-rendezvous, am-eager and get");
  }
  return absl::OkStatus();
}

struct UcxTransport::Parts {
  Parts(const UcxOptions& wanted, UcxEnvironment given) : options(wanted), environment(std::move(given)) {}

  void push(const std::function<void(TransportEvents&)>& change) {
    bool was_empty = false;
    {
      MutexLock hold(mutex);
      was_empty = events.fetched.empty() && events.registered.empty() && events.released.empty();
      change(events);
    }
    if (was_empty && environment.ready) environment.ready();
  }

  const UcxOptions options;
  const UcxEnvironment environment;
  TransportTraits traits;
  std::string address;
  std::vector<CallReport> reports;
  Counters counters;
  bool stopped = false;

  Mutex mutex;
  TransportEvents events ABSL_GUARDED_BY(mutex);

  // Die in the reverse order: the workers while what their callbacks name still lives, then the chunks, the context last.
  std::unique_ptr<Context> context;
  std::unique_ptr<Chunks> chunks;
  std::unique_ptr<Reader> reader;
  std::unique_ptr<Source> source;
  std::unique_ptr<WorkerThread> reader_thread;
  std::unique_ptr<WorkerThread> source_thread;
};

absl::StatusOr<std::unique_ptr<UcxTransport>> UcxTransport::start(const UcxOptions& options, UcxEnvironment environment) {
  if (absl::Status status = validate(options); !status.ok()) return status;
  auto parts = std::make_unique<Parts>(options, std::move(environment));
  const UcxEnvironment& env = parts->environment;

  absl::StatusOr<std::unique_ptr<Context>> context = Context::create(options.fabric);
  if (!context.ok()) return context.status();
  parts->context = std::move(*context);

  // The probe: over what peers on this host would get, and over what all others would.
  const auto probe = [&](Context& over, const char* reach) -> absl::Status {
    ProbeOptions how;
    how.reach = reach;
    how.host = options.host;
    absl::StatusOr<CallReport> report = probe_calls(over, env.clock, env.processor_clock, how);
    if (!report.ok()) return report.status();
    if (const std::optional<Call> forced = call_named(options.call)) {
      report->chosen = *forced;
      report->reason = "the configuration says so";
    }
    if (!is_on_this_host(report->lanes)) report->reach = "network";
    env.log.write(LogLevel::kInfo, "ucx_call_chosen", {{"ucx", library_version()}, {"report", describe(*report)}});
    parts->reports.push_back(std::move(*report));
    return absl::OkStatus();
  };
  if (absl::Status status = probe(*parts->context, "host"); !status.ok()) return status;
  if (parts->reports[0].reach == "host") {
    if (const std::optional<std::string> transports = network_transports(options.fabric.transports)) {
      absl::StatusOr<std::unique_ptr<Context>> network = Context::create({*transports, options.fabric.devices});
      if (network.ok()) {
        if (absl::Status status = probe(**network, "network"); !status.ok()) return status;
      } else {
        env.log.write(LogLevel::kWarning, "ucx_no_network", {{"cause", std::string(network.status().message())}});
      }
    }
  }

  HalfSettings half;
  half.node = options.node;
  half.instance = options.instance;
  half.heartbeat_ns = options.heartbeat_ms * kNanosPerMilli;
  half.silence_ns = options.silence_ms * kNanosPerMilli;
  half.bytes_in_flight_max = options.bytes_in_flight_max;
  half.sends_in_flight_max = options.sends_in_flight_max;
  half.message_bytes_max = options.message_bytes_max;
  half.call_of = [reports = parts->reports](const std::vector<std::string>& lanes) {
    const char* reach = is_on_this_host(lanes) ? "host" : "network";
    for (const CallReport& report : reports) {
      if (report.reach == reach) return report.chosen;
    }
    return reports[0].chosen;
  };

  parts->chunks = std::make_unique<Chunks>(*parts->context, env.pools);
  for (auto* thread : {&parts->reader_thread, &parts->source_thread}) {
    absl::StatusOr<std::unique_ptr<WorkerThread>> made = WorkerThread::create(*parts->context, env.clock, options.spin_us * kNanosPerMicro);
    if (!made.ok()) return made.status();
    *thread = std::move(*made);
  }
  Parts* raw = parts.get();
  parts->reader = std::make_unique<Reader>(
      *parts->reader_thread, *parts->chunks, parts->counters, env.log, half, env.checksum,
      [raw](FetchCompletion done) { raw->push([&](TransportEvents& events) { events.fetched.push_back(std::move(done)); }); });
  parts->source =
      std::make_unique<Source>(*parts->source_thread, *parts->chunks, parts->counters, env.log, half, [raw](PoolId pool, ChunkIndex chunk) {
        raw->push([&](TransportEvents& events) { events.released.push_back({pool, chunk}); });
      });
  if (absl::Status status = parts->reader->listen(); !status.ok()) return status;
  const absl::StatusOr<SocketAddress> where = SocketAddress::parse(options.host, options.port);
  if (!where.ok()) return where.status();
  if (absl::Status status = parts->source->listen(*where); !status.ok()) return status;

  AddressHeader header;
  header.instance = options.instance;
  const SocketAddress& listening = parts->source->address();
  header.socket_bytes = listening.bytes;
  parts->address = bytes_of(header) + std::string(reinterpret_cast<const char*>(&listening.storage), listening.bytes);
  parts->traits.name = std::string("ucx-") + kCallNames[static_cast<size_t>(parts->reports[0].chosen)];
  parts->traits.one_sided =
      std::any_of(parts->reports.begin(), parts->reports.end(), [](const CallReport& report) { return report.chosen == Call::kGet; });
  parts->traits.reaches_device_memory = false;  // eager pages are copied by the processor; GPU pools need get throughout
  parts->traits.request_pages_max = kWantedPagesMax;
  parts->reader_thread->start("ucx-reader", [raw](int64_t now_ns) { return raw->reader->turn(now_ns); });
  parts->source_thread->start("ucx-source", [raw](int64_t now_ns) { return raw->source->turn(now_ns); });
  return std::unique_ptr<UcxTransport>(new UcxTransport(std::move(parts)));
}

UcxTransport::UcxTransport(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

UcxTransport::~UcxTransport() { stop(); }

void UcxTransport::stop() {
  if (parts_->stopped) return;
  parts_->stopped = true;
  // Readers first: their requests name chunks. Then sources, then chunks, workers and the context, by ~Parts.
  parts_->reader_thread->post([this] { parts_->reader->stop(); });
  parts_->reader_thread->join();
  parts_->reader->abandon();
  parts_->source_thread->post([this] { parts_->source->stop(); });
  parts_->source_thread->join();
}

const std::string& UcxTransport::address() const { return parts_->address; }
const std::vector<CallReport>& UcxTransport::reports() const { return parts_->reports; }
const Counters& UcxTransport::counters() const { return parts_->counters; }
const TransportTraits& UcxTransport::traits() const { return parts_->traits; }

absl::Status UcxTransport::meet_peer(NodeId peer, Incarnation incarnation, const std::string& address) {
  AddressHeader header;
  SocketAddress socket;
  if (address.size() > sizeof header) std::memcpy(&header, address.data(), sizeof header);
  if (address.size() <= sizeof header || header.magic != kWireMagic || header.instance == 0) {
    return make_error(ErrorCode::kInvalid, "these " + std::to_string(address.size()) + " bytes are no UCX transport's address");
  }
  if (header.version != kWireVersion) {
    return make_error(ErrorCode::kInvalid, "the peer's transport speaks version " + std::to_string(header.version) + ", this one " +
                                               std::to_string(kWireVersion) + ": use equal releases");
  }
  if (header.socket_bytes > sizeof socket.storage || address.size() != sizeof header + header.socket_bytes) {
    return make_error(ErrorCode::kInvalid, "a UCX transport's address is cut short or too long");
  }
  socket.bytes = header.socket_bytes;
  std::memcpy(&socket.storage, address.data() + sizeof header, socket.bytes);
  if (socket.storage.ss_family != AF_INET && socket.storage.ss_family != AF_INET6) {
    return make_error(ErrorCode::kInvalid, "a UCX transport's address is of neither IPv4 nor IPv6");
  }
  parts_->reader_thread->post(
      [this, peer, incarnation, instance = header.instance, socket] { parts_->reader->meet(peer, incarnation, instance, socket); });
  return absl::OkStatus();
}

void UcxTransport::connect_peer(NodeId peer) {
  parts_->reader_thread->post([this, peer] { parts_->reader->connect(peer); });
}

void UcxTransport::register_chunk(PoolId pool, ChunkIndex chunk) {
  parts_->source_thread->post([this, pool, chunk] {
    absl::StatusOr<std::string> descriptor = parts_->chunks->add(pool, chunk);
    RegisterCompletion done{pool, chunk, descriptor.status(), descriptor.ok() ? std::move(*descriptor) : std::string()};
    parts_->push([&](TransportEvents& events) { events.registered.push_back(std::move(done)); });
  });
}

void UcxTransport::release_chunk(PoolId pool, ChunkIndex chunk) {
  if (parts_->stopped) return parts_->source->release(pool, chunk);  // no thread is left to disturb
  parts_->source_thread->post([this, pool, chunk] { parts_->source->release(pool, chunk); });
}

void UcxTransport::learn_peer(NodeId peer, Incarnation incarnation, const std::vector<ChunkDescriptor>& chunks) {
  parts_->reader_thread->post([this, peer, incarnation, chunks] { parts_->reader->learn(peer, incarnation, chunks); });
}

void UcxTransport::post(FetchRequest request) {
  if (parts_->stopped) {
    return parts_->push([&](TransportEvents& events) {
      events.fetched.push_back({request.id, make_error(ErrorCode::kStopping, "the transport has stopped"), {}});
    });
  }
  parts_->reader_thread->post([this, request = std::move(request)]() mutable { parts_->reader->fetch(std::move(request)); });
}

void UcxTransport::cancel(FetchId id) {
  parts_->reader_thread->post([this, id] { parts_->reader->cancel(id); });
}

void UcxTransport::close_peer(NodeId peer) {
  parts_->reader_thread->post(
      [this, peer] { parts_->reader->close_peer(peer, make_error(ErrorCode::kPeerLost, "the endpoint was closed by the core")); });
}

void UcxTransport::poll(TransportEvents& events) {
  TransportEvents taken;
  {
    MutexLock hold(parts_->mutex);
    std::swap(taken, parts_->events);
  }
  std::move(taken.fetched.begin(), taken.fetched.end(), std::back_inserter(events.fetched));
  std::move(taken.registered.begin(), taken.registered.end(), std::back_inserter(events.registered));
  std::move(taken.released.begin(), taken.released.end(), std::back_inserter(events.released));
}

}  // namespace needle::server::ucx
