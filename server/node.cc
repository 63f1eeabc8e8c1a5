#include "server/node.h"

#include <sys/random.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/units.h"
#include "kernels/checksum_pages.h"
#include "kernels/cpu_isa.h"
#include "kernels/format_set.h"
#include "proto/errors.h"
#include "server/attach/attach_server.h"
#include "server/core.h"
#include "server/loop.h"
#include "server/membership/advertised_host.h"
#include "server/membership/peer_directory.h"
#include "server/memory/host_memory.h"
#include "server/metrics.h"
#include "server/remote_reads.h"
#include "server/service.h"
#include "server/transport/no_transport.h"
#ifdef NEEDLE_HAVE_UCX
#include "server/transport/ucx/ucx_handles.h"
#include "server/transport/ucx/ucx_transport.h"
#endif

#ifndef NEEDLE_BUILD_VERSION
#define NEEDLE_BUILD_VERSION "unknown"
#endif

namespace needle::server {

namespace {

// The door to the loop. Parts that start before it (memory, transport) already have something to say.
class LoopDoor {
 public:
  absl::Status post(Message message) {
    MutexLock hold(mutex_);
    if (loop_ != nullptr) return loop_->post(std::move(message));
    if (closed_) return make_error(ErrorCode::kStopping, "the daemon has stopped");
    early_.push_back(std::move(message));
    return absl::OkStatus();
  }
  void open(Loop& loop) {
    MutexLock hold(mutex_);
    loop_ = &loop;
    for (Message& message : early_) (void)loop.post(std::move(message));
    early_.clear();
  }
  void close() {
    MutexLock hold(mutex_);
    loop_ = nullptr;
    closed_ = true;
  }

 private:
  Mutex mutex_;  // held across Loop::post, which locks its queue alone
  Loop* loop_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Message> early_ ABSL_GUARDED_BY(mutex_);
};

uint64_t random_number() {
  uint64_t value = 0;
  while (::getrandom(&value, sizeof(value), 0) != static_cast<ssize_t>(sizeof(value)) || value == 0) {
  }
  return value;
}

#if defined(__clang__)
constexpr const char* kCompiler = "clang++";
#else
constexpr const char* kCompiler = "g++";
#endif
constexpr int64_t kScrapeWaitMs = 1'000;
constexpr int64_t kChunksWaitMs = 120'000;  // zeroing 100 GiB takes about that long on one core
constexpr int64_t kServiceStopMs = 500;

}  // namespace

std::string build_text() {
  std::string text = absl::StrCat("needle ", NEEDLE_BUILD_VERSION, ", ", kCompiler, " ", __VERSION__, ", cpu kernels ",
                                  name_of(best_cpu_isa()), ", ", service_libraries());
#ifdef NEEDLE_HAVE_UCX
  absl::StrAppend(&text, ", UCX ", ucx::library_version());
#else
  absl::StrAppend(&text, ", without UCX");
#endif
#ifdef NEEDLE_HAVE_CUDA
  absl::StrAppend(&text, ", CUDA twins compiled");
#else
  absl::StrAppend(&text, ", without CUDA");
#endif
  return text;
}

class Node::Impl final : public Outbox {
 public:
  Impl(const ParsedOptions& parsed, const NodePlan& plan, DescriptorStore& store, Log& log)
      : parsed_(parsed), plan_(plan), store_(store), log_(log) {}
  ~Impl() override { stop(); }

  absl::Status start(std::vector<KeptDescriptor> kept) {
    started_ns_ = clock_.now_ns();
    const DaemonOptions& options = parsed_.options;

    // Metadata first: without it, kept chunks are bytes without meaning.
    absl::StatusOr<std::unique_ptr<MemfdMetadata>> metadata = MemfdMetadata::create(Core::metadata_bytes(plan_.core), store_, kept, log_);
    if (!metadata.ok()) return metadata.status();
    metadata_ = *std::move(metadata);
    if (!metadata_->survived()) {
      for (KeptDescriptor& descriptor : kept) {
        if (!descriptor.fd.is_open() || descriptor.name == kMetadataName) continue;
        store_.drop(descriptor.name);
        descriptor.fd.reset();
      }
    }
    HostMemoryOptions memory;
    memory.huge_pages = options.memory_huge_pages == "off"       ? HugePages::kOff
                        : options.memory_huge_pages == "require" ? HugePages::kRequire
                                                                 : HugePages::kTry;
    memory.numa_node = options.memory_numa_node;
    absl::StatusOr<std::unique_ptr<HostMemory>> host = HostMemory::create(
        memory, plan_.shapes, store_, kept, available_memory_bytes,
        [this](PoolId pool, ChunkIndex chunk, absl::Status status) {
          {
            MutexLock hold(mutex_);
            if (!status.ok() && first_memory_failure_.ok()) first_memory_failure_ = status;
          }
          (void)door_.post(ChunkAllocated{pool, chunk, std::move(status)});
        },
        log_);
    if (!host.ok()) return host.status();
    memory_ = *std::move(host);

    if (absl::Status status = start_transport(); !status.ok()) return status;

    absl::StatusOr<std::unique_ptr<Core>> core =
        Core::start(plan_.core, Environment{clock_, *metadata_, *memory_, *transport_, *this, log_, random_number()});
    if (!core.ok()) return core.status();
    core_ = *std::move(core);
    const Incarnation incarnation = core_->incarnation();
    const Snapshot first = core_->snapshot();  // nobody else has the core yet
    loop_ = std::make_unique<Loop>(*core_, clock_, options.request_queue_max);
    door_.open(*loop_);

    PeerSelf self;
    self.name = plan_.name;
    self.address = plan_.advertise_address;
    self.build = build_text();
    self.incarnation = incarnation;
    self.transport = transport_->traits().name;
    self.transport_address = transport_address_;
    for (size_t i = 0; i < plan_.sets.size(); ++i)
      self.sets.push_back({plan_.core.sets[i].name, plan_.sets[i].text, plan_.sets[i].fingerprint});
    const auto post = [this](Message message) { return door_.post(std::move(message)); };
    peers_ = std::make_unique<PeerDirectory>(
        std::move(self), options.peer_hello_ms, [this](const PeerChange& change) { meet(change); }, post, clock_, log_);
    for (const std::string& peer : options.peers) {
      absl::StatusOr<PeerName> parsed = parse_peer(peer);
      absl::Status added = parsed.ok() ? peers_->add(parsed->name, parsed->address) : parsed.status();
      if (!added.ok()) return added;
    }

    AttachOptions attach;
    attach.path = plan_.runtime_dir + "/" + attach::kAttachSocketName;
    for (const std::string& uid : options.attach_uids)
      attach.uids.push_back(static_cast<uint32_t>(std::stoul(uid)));  // checked when parsed
    attach.connections_max = options.session_count_max;
    attach.node = plan_.name;
    attach.grpc_target = "unix:" + grpc_path();
    attach.grpc_target_of_others = plan_.advertise_address;
    attach.build = build_text();
    std::vector<AttachPoolSet> attach_sets;
    for (size_t i = 0; i < plan_.sets.size(); ++i) {
      AttachPoolSet set;
      set.name = plan_.core.sets[i].name;
      set.format = plan_.sets[i].text;
      for (int kind = 0; kind < kPoolKinds; ++kind) {
        const PoolId pool = pool_id(PoolSetId(static_cast<uint32_t>(i)), static_cast<PoolKind>(kind));
        set.words_offset[static_cast<size_t>(kind)] = Core::page_words_offset(plan_.core, pool);
        set.page_count_max[static_cast<size_t>(kind)] = Core::page_count_max(plan_.core, pool);
        const ModelFormats& formats = plan_.sets[i].formats;
        const PageFormat* const by_kind[kPoolKinds] = {&formats.paged, &formats.window, &formats.state};
        set.mapped[static_cast<size_t>(kind)] = !by_kind[kind]->components.empty();
      }
      attach_sets.push_back(std::move(set));
    }
    AttachServer::Sources sources{[this](PoolId pool, ChunkIndex chunk) { return memory_->files(pool, chunk); }, metadata_->read_only_fd(),
                                  static_cast<int64_t>(metadata_->bytes().size())};
    absl::StatusOr<std::unique_ptr<AttachServer>> server =
        AttachServer::start(std::move(attach), std::move(attach_sets), std::move(sources), registry_, post, log_);
    if (!server.ok()) return server.status();
    attach_ = *std::move(server);
    for (const Snapshot::SessionRow& row : first.sessions) {
      if (row.process.pid != 0) attach_->watch_survivor(row.session, row.process);
    }

    loop_thread_ = std::thread([this] { loop_->run(); });
    if (absl::Status status = wait_for_chunks(); !status.ok()) return status;

    reads_ = std::make_unique<KernelReads>(KernelReads::pools_of(plan_, *memory_), options.topk_threads, plan_.scratch_bytes);
    if (absl::Status status = start_service(); !status.ok()) return status;
    if (absl::Status status = start_metrics(); !status.ok()) return status;
    peers_->start();
    tend();
    log_.write(LogLevel::kInfo, "needled_ready",
               {{"node", plan_.name},
                {"incarnation", absl::StrCat(incarnation.value())},
                {"memory", memory_->description()},
                {"transport", transport_text()},
                {"grpc", plan_.grpc_address},
                {"metrics", plan_.metrics_address}});
    return absl::OkStatus();
  }

  void to_session(SessionId session, SessionEvent event) override {
    if (attach_ != nullptr) attach_->to_session(session, std::move(event));
  }
  void to_peer(NodeId peer, PeerMessage message) override {
    if (peers_ != nullptr) peers_->send(peer, std::move(message));
  }

  std::vector<ServiceFacet> facets() {
    const bool drains = draining_.load();
    const bool memory_whole = memory_failure().ok();
    const bool ships = transport_->traits().name != "none";
    std::vector<ServiceFacet> facets;
    facets.push_back({"live", true, "the loop answers"});
    facets.push_back({"ready", memory_whole && !drains,
                      drains         ? "draining"
                      : memory_whole ? "takes work"
                                     : "a chunk could not be allocated"});
    facets.push_back({"pools", memory_whole, memory_whole ? memory_->description() : std::string(memory_failure().message())});
    facets.push_back({"transport", ships, transport_text()});
    facets.push_back({"keeper", store_.healthy(), store_.kind()});
    return facets;
  }

  void tend() {
    store_.tend();
    for (const ServiceFacet& facet : facets()) service_->set_serving(facet.name, facet.serving);
  }

  void drain() {
    if (draining_.exchange(true)) return;
    log_.write(LogLevel::kInfo, "drain_started", {});
    (void)door_.post(Call<Drain>{{}, [](absl::StatusOr<Nothing>) {}});
    tend();
  }

  bool drained() {
    const absl::StatusOr<Snapshot> now = snapshot();
    if (!now.ok()) return false;
    if (now->tickets_open + now->leases_open + now->ships_open > 0) return false;
    for (const Snapshot::SessionRow& row : now->sessions) {
      if (row.pinned_pages > 0) return false;
    }
    return true;
  }

  bool drain_was_asked() const { return draining_.load(); }

  void stop() {
    if (stopped_) return;
    stopped_ = true;
    if (peers_ != nullptr) peers_->say_goodbye();
    metrics_.reset();
    if (service_ != nullptr) service_->stop(kServiceStopMs);
    service_.reset();
    if (loop_ != nullptr) loop_->stop();
    if (loop_thread_.joinable()) loop_thread_.join();
    door_.close();
    peers_.reset();
    attach_.reset();
    reads_.reset();
    loop_.reset();
#ifdef NEEDLE_HAVE_UCX
    if (ucx_ != nullptr) ucx_->stop();
#endif
    core_.reset();
    transport_.reset();
    memory_.reset();
    metadata_.reset();
  }

 private:
  std::string grpc_path() const { return plan_.runtime_dir + "/" + attach::kGrpcSocketName; }

  absl::Status start_transport() {
    const DaemonOptions& options = parsed_.options;
    std::string why = "transport.kind is none";
    const auto ready = [this] { (void)door_.post(TransportReady{}); };
    if (options.transport_kind != "none") {
#ifdef NEEDLE_HAVE_UCX
      absl::StatusOr<std::unique_ptr<ucx::UcxTransport>> started = start_ucx(ready);
      if (started.ok()) {
        ucx_ = started->get();
        transport_address_ = ucx_->address();
        transport_ = *std::move(started);
        return absl::OkStatus();
      }
      why = std::string(started.status().message());
#else
      why = "this daemon was built without UCX";
#endif
      if (options.transport_kind == "ucx") return make_error(ErrorCode::kImpossible, absl::StrCat("transport.kind is ucx, but ", why));
      log_.write(LogLevel::kWarning, "transport_absent", {{"cause", why}});
    }
    transport_absence_ = why;
    transport_ = std::make_unique<NoTransport>(why, ready);
    return absl::OkStatus();
  }

#ifdef NEEDLE_HAVE_UCX
  absl::StatusOr<std::unique_ptr<ucx::UcxTransport>> start_ucx(std::function<void()> ready) {
    const DaemonOptions& options = parsed_.options;
    absl::StatusOr<std::string> host = advertised_host(plan_.advertise_address);
    if (!host.ok()) return host.status();
    ucx::UcxOptions ucx_options;
    ucx_options.node = plan_.core.node;
    ucx_options.instance = random_number();
    ucx_options.host = *host;
    ucx_options.fabric.transports = options.transport_lanes;
    ucx_options.fabric.devices = options.transport_devices;
    if (ucx_options.fabric.devices.empty() && is_loopback(*host)) ucx_options.fabric.devices = "lo";
    ucx::UcxEnvironment environment{clock_, processor_clock_, log_, {}, page_checksum(), std::move(ready)};
    for (size_t pool = 0; pool < plan_.shapes.size(); ++pool) {
      if (plan_.shapes[pool].page_bytes == 0) continue;
      const PoolId id{static_cast<uint32_t>(pool)};
      environment.pools.push_back({id, memory_->base(id), plan_.shapes[pool]});
    }
    return ucx::UcxTransport::start(ucx_options, std::move(environment));
  }

  // The number that the writer's process computed before its seal, of the page as it landed. Of a bare commit record, which
  // clients neither map nor write, it said 0.
  ucx::PageChecksum page_checksum() const {
    std::set<PoolId> bare;
    for (size_t i = 0; i < plan_.sets.size(); ++i) {
      if (plan_.sets[i].formats.state.components.empty()) bare.insert(pool_id(PoolSetId(static_cast<uint32_t>(i)), PoolKind::kState));
    }
    return [bare = std::move(bare)](PoolId pool, std::span<const std::byte> page) {
      if (bare.count(pool) > 0) return uint64_t{0};
      ChecksumPagesArgs args;
      args.base = page.data();
      args.page_stride = args.page_bytes = static_cast<int64_t>(page.size());
      args.page_count = 1;
      const int32_t first = 0;
      args.pages = &first;
      args.count = 1;
      uint64_t checksum = 0;
      args.checksums = &checksum;
      CallerThread here;
      const absl::Status status = checksum_pages_cpu(args, best_cpu_isa(), here);
      NEEDLE_CHECK(status.ok(), "a pool's page can be summed");
      return checksum;
    };
  }
#endif

  void meet(const PeerChange& change) {
#ifdef NEEDLE_HAVE_UCX
    if (ucx_ == nullptr || change.transport_address.empty()) return;
    const absl::Status met = ucx_->meet_peer(change.node, change.incarnation, change.transport_address);
    if (!met.ok())
      return log_.write(LogLevel::kWarning, "peer_transport_refused", {{"peer", change.name}, { "cause", std::string(met.message()) }});
    ucx_->connect_peer(change.node);  // tens of milliseconds that the first ship would wait for
#else
    (void)change;
#endif
  }

  std::string transport_text() const {
    if (transport_ == nullptr) return "none";
    std::string text = transport_->traits().name;
    if (text == "none") return absl::StrCat("none: ", transport_absence_);
#ifdef NEEDLE_HAVE_UCX
    if (ucx_ != nullptr) {
      for (const ucx::CallReport& report : ucx_->reports())
        absl::StrAppend(&text, "; ", report.reach, ": ", ucx::kCallNames[static_cast<size_t>(report.chosen)]);
    }
#endif
    return text;
  }

  absl::Status memory_failure() {
    MutexLock hold(mutex_);
    return first_memory_failure_;
  }

  // All chunks that the budget wants, or the reason why one cannot be had.
  absl::Status wait_for_chunks() {
    const int64_t deadline_ns = clock_.now_ns() + kChunksWaitMs * kNanosPerMilli;
    while (!memory_->idle()) {
      if (clock_.now_ns() > deadline_ns)
        return make_error(ErrorCode::kMemory,
                          absl::StrCat("memory was not ready after ", kChunksWaitMs / 1000, " s: ", memory_->description()));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return memory_failure();
  }

  absl::StatusOr<Snapshot> snapshot() {
    auto promise = std::make_shared<std::promise<absl::StatusOr<Snapshot>>>();  // second owner: an answer that comes too late
    std::future<absl::StatusOr<Snapshot>> future = promise->get_future();
    (void)door_.post(Call<Status>{{}, [promise](absl::StatusOr<Snapshot> reply) { promise->set_value(std::move(reply)); }});
    if (future.wait_for(std::chrono::milliseconds(kScrapeWaitMs)) != std::future_status::ready) {
      return make_error(ErrorCode::kBusy, absl::StrCat("the loop did not answer within ", kScrapeWaitMs, " ms"));
    }
    return future.get();
  }

  double uptime_seconds() const { return static_cast<double>(clock_.now_ns() - started_ns_) * 1e-9; }

  absl::Status start_service() {
    ServiceOptions options;
    options.unix_path = grpc_path();
    options.tcp_address = plan_.grpc_address;
    options.remote_operators = parsed_.options.listen_remote_operators;
    options.node = plan_.name;
    options.instance = absl::StrCat(parsed_.options.node_instance);
    options.build = build_text();
    options.options = parsed_.provenance;
    for (size_t i = 0; i < plan_.sets.size(); ++i) {
      options.sets.push_back({PoolSetId(static_cast<uint32_t>(i)), plan_.core.sets[i].name, plan_.sets[i].text, plan_.sets[i].fingerprint,
                              plan_.core.sets[i].shapes});
    }
    ServiceDoors doors{[this](Message message) { return door_.post(std::move(message)); },
                       registry_,
                       *peers_,
                       edge_,
                       [this] {
                         NodeStatus status;
                         status.uptime_seconds = uptime_seconds();
                         status.transport = transport_text();
                         status.memory = memory_->description();
                         status.facets = facets();
                         return status;
                       },
                       [this](SessionId session) { attach_->forget(session); },
                       [this] { drain(); },
                       reads_.get(),
                       clock_,
                       log_};
    absl::StatusOr<std::unique_ptr<Service>> service = Service::start(std::move(options), std::move(doors));
    if (!service.ok()) return service.status();
    service_ = *std::move(service);
    return absl::OkStatus();
  }

  NodeGauges gauges() {
    NodeGauges gauges;
    gauges.build = build_text();
    gauges.node = plan_.name;
    gauges.transport = transport_->traits().name;
    gauges.uptime_seconds = uptime_seconds();
    for (int backing = 0; backing < 3; ++backing)
      gauges.chunks_by_backing[backing] = memory_->chunks_with(static_cast<PageBacking>(backing));
    gauges.scratch_bytes = plan_.scratch_bytes;
    gauges.keeper_healthy = store_.healthy();
    gauges.attach_connections = attach_->connections();
    gauges.attach_without_session = attach_->without_session();
    gauges.attach_refused = attach_->refused();
    gauges.attach_hellos_overdue = attach_->hellos_overdue();
    for (const ServiceFacet& facet : facets()) gauges.facets.emplace_back(facet.name, facet.serving);
#ifdef NEEDLE_HAVE_UCX
    if (ucx_ != nullptr) {
      const ucx::Counters& counters = ucx_->counters();
      const auto add = [&gauges](const char* name, const std::atomic<int64_t>& value) {
        gauges.transport_counters.push_back({name, static_cast<double>(value.load())});
      };
      add("pages_arrived", counters.pages_arrived);
      add("bytes_arrived", counters.bytes_arrived);
      add("pages_dropped", counters.pages_dropped);
      add("messages_dropped", counters.messages_dropped);
      add("links_opened", counters.links_opened);
      add("links_failed", counters.links_failed);
      add("links_silent", counters.links_silent);
      add("links_held", counters.links_held);
      add("pages_sent", counters.pages_sent);
      add("pages_refused", counters.pages_refused);
      add("source_links_silent", counters.source_links_silent);
      add("source_links_failed", counters.source_links_failed);
      add("source_links_held", counters.source_links_held);
    }
#endif
    return gauges;
  }

  absl::Status start_metrics() {
    MetricSources sources{[this] { return snapshot(); },
                          [this] { return gauges(); },
                          [this](const Snapshot::Set& set, int kind) {
                            return plan_.core.sets[set.set.value()].shapes[static_cast<size_t>(kind)].page_bytes;
                          },
                          edge_,
                          registry_,
                          *peers_};
    absl::StatusOr<std::unique_ptr<MetricsHttp>> metrics = serve_metrics(plan_.metrics_address, std::move(sources));
    if (!metrics.ok()) return metrics.status();
    metrics_ = *std::move(metrics);
    return absl::OkStatus();
  }

  const ParsedOptions parsed_;
  const NodePlan plan_;
  DescriptorStore& store_;
  Log& log_;
  SteadyClock clock_;
#ifdef NEEDLE_HAVE_UCX
  ucx::ThreadProcessorClock processor_clock_;
  ucx::UcxTransport* ucx_ = nullptr;  // the same object as transport_, when it is UCX
#endif
  int64_t started_ns_ = 0;
  std::atomic<bool> draining_{false};
  bool stopped_ = false;
  Mutex mutex_;
  absl::Status first_memory_failure_ ABSL_GUARDED_BY(mutex_);
  std::string transport_address_;
  std::string transport_absence_;

  // In the order of start; stop() lets go of them in reverse.
  LoopDoor door_;
  SessionRegistry registry_;
  EdgeMetrics edge_;
  std::unique_ptr<MemfdMetadata> metadata_;
  std::unique_ptr<HostMemory> memory_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Core> core_;
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<PeerDirectory> peers_;
  std::unique_ptr<AttachServer> attach_;
  std::thread loop_thread_;
  std::unique_ptr<KernelReads> reads_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<MetricsHttp> metrics_;
};

Node::Node(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Node::~Node() = default;

absl::StatusOr<std::unique_ptr<Node>> Node::start(const ParsedOptions& parsed, const NodePlan& plan, DescriptorStore& store,
                                                  std::vector<KeptDescriptor> kept, Log& log) {
  auto impl = std::make_unique<Impl>(parsed, plan, store, log);
  if (absl::Status status = impl->start(std::move(kept)); !status.ok()) return status;
  return std::unique_ptr<Node>(new Node(std::move(impl)));
}

void Node::tend() { impl_->tend(); }
void Node::drain() { impl_->drain(); }
bool Node::drained() { return impl_->drained(); }
bool Node::drain_was_asked() const { return impl_->drain_was_asked(); }
void Node::stop() { impl_->stop(); }

}  // namespace needle::server
