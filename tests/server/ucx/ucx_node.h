// A daemon's worth of transport for tests: one pool in a memfd, a transport over it, and waiting with a deadline.
//
// What must stay true:
//  1. Nothing sleeps: wait_for() is woken by the transport's `ready` and looks again at least every few milliseconds
//     for what has no event (counters).
//  2. Page i of a node filled with `seed` holds words that name seed, page and place, so that a page in the wrong place,
//     of the wrong page or torn is seen.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/check.h"
#include "proto/errors.h"
#include "server/transport/ucx/ucx_transport.h"

namespace needle::server::ucx::testing {

struct NodeSettings {
  uint32_t node = 1;
  uint64_t incarnation = 1;
  uint64_t instance = 0;  // 0: drawn
  std::string transports = "tcp";
  std::string call = "auto";
  int64_t page_bytes = 65'536;
  int64_t pages_a_chunk = 64;
  int64_t chunks = 2;
  int64_t heartbeat_ms = 50;
  int64_t silence_ms = 1'000;
  int64_t bytes_in_flight_max = int64_t{4} << 20;
  int64_t message_bytes_max = 0;
};

inline uint64_t word_of(uint64_t seed, uint64_t page, uint64_t place) {
  return (page + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull + place;
}

inline uint64_t checksum_of(std::span<const std::byte> page) {
  uint64_t sum = 0xCBF29CE484222325ull;
  for (size_t i = 0; i + 8 <= page.size(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, page.data() + i, 8);
    sum = (sum ^ word) * 0x100000001B3ull;
    sum ^= sum >> 29;
  }
  return sum;
}

class UcxNode {
 public:
  static constexpr uint32_t kPool = 0;

  explicit UcxNode(const NodeSettings& settings, PageChecksum checksum = {}) : settings_(settings) {
    const auto bytes = static_cast<size_t>(settings.page_bytes * settings.pages_a_chunk * settings.chunks);
    const int fd = memfd_create("ucx_node", MFD_CLOEXEC);
    NEEDLE_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0, "no memory for a test pool");
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEEDLE_CHECK(mapped != MAP_FAILED, "a test pool cannot be mapped");
    close(fd);
    memory_ = {static_cast<std::byte*>(mapped), bytes};

    UcxOptions options;
    options.node = NodeId(settings.node);
    options.instance = settings.instance != 0 ? settings.instance : static_cast<uint64_t>(getpid()) << 32 | ++instances_made();
    options.fabric = {settings.transports, "lo"};
    options.call = settings.call;
    options.heartbeat_ms = settings.heartbeat_ms;
    options.silence_ms = settings.silence_ms;
    options.bytes_in_flight_max = settings.bytes_in_flight_max;
    options.message_bytes_max = settings.message_bytes_max;
    PoolPlace place;
    place.pool = PoolId(kPool);
    place.base = memory_.data();
    place.shape = {settings.page_bytes, 256, settings.page_bytes * settings.pages_a_chunk, settings.chunks};
    UcxEnvironment environment{clock_, processor_clock_, log_, {place}, std::move(checksum), [this] { wake(); }};
    if (!environment.checksum) {
      environment.checksum = [](PoolId, std::span<const std::byte> page) { return checksum_of(page); };
    }
    absl::StatusOr<std::unique_ptr<UcxTransport>> started = UcxTransport::start(options, std::move(environment));
    NEEDLE_CHECK(started.ok(), started.status().ToString().c_str());
    transport_ = std::move(*started);
  }

  ~UcxNode() {
    transport_.reset();
    munmap(memory_.data(), memory_.size());
  }

  UcxTransport& transport() { return *transport_; }
  const Counters& counters() const { return transport_->counters(); }
  Incarnation incarnation() const { return Incarnation(settings_.incarnation); }
  NodeId id() const { return NodeId(settings_.node); }
  int64_t pages() const { return settings_.pages_a_chunk * settings_.chunks; }

  std::span<std::byte> page(int64_t index) {
    return memory_.subspan(static_cast<size_t>(index * settings_.page_bytes), static_cast<size_t>(settings_.page_bytes));
  }
  void fill(uint64_t seed) {
    for (int64_t i = 0; i < pages(); ++i) {
      for (size_t at = 0; at < page(i).size(); at += 8) {
        const uint64_t word = word_of(seed, static_cast<uint64_t>(i), at);
        std::memcpy(page(i).data() + at, &word, 8);
      }
    }
  }
  bool holds(int64_t index, uint64_t seed, int64_t source_page) {
    for (size_t at = 0; at < page(index).size(); at += 8) {
      const uint64_t word = word_of(seed, static_cast<uint64_t>(source_page), at);
      if (std::memcmp(page(index).data() + at, &word, 8) != 0) return false;
    }
    return true;
  }

  // Registers every chunk; their descriptors.
  std::vector<ChunkDescriptor> register_chunks() {
    for (int64_t i = 0; i < settings_.chunks; ++i) {
      transport_->register_chunk(PoolId(kPool), ChunkIndex(static_cast<uint32_t>(i)));
    }
    NEEDLE_CHECK(wait_for([this] { return static_cast<int64_t>(registered.size()) >= settings_.chunks; }),
                 "chunks were not registered in time");
    std::vector<ChunkDescriptor> made;
    for (const RegisterCompletion& done : registered) {
      NEEDLE_CHECK(done.status.ok(), done.status.ToString().c_str());
      made.push_back({done.pool, done.chunk, done.descriptor});
    }
    registered.clear();
    return made;
  }

  void meet(UcxNode& other, const std::vector<ChunkDescriptor>& chunks) {
    NEEDLE_CHECK(transport_->meet_peer(other.id(), other.incarnation(), other.transport().address()).ok(), "no address");
    transport_->learn_peer(other.id(), other.incarnation(), chunks);
  }

  // Source pages [first, first + count) to target pages from `target_first` on.
  FetchRequest request(FetchId fetch, NodeId source, Incarnation incarnation, int64_t first, int64_t count, int64_t target_first) const {
    FetchRequest made;
    made.id = fetch;
    made.source = source;
    made.source_incarnation = incarnation;
    for (int64_t i = 0; i < count; ++i) {
      const auto page = [](int64_t index) { return PageRef{PoolId(kPool), {PageIndex(static_cast<uint32_t>(index)), Generation(1)}}; };
      made.pages.push_back({page(first + i), page(target_first + i)});
    }
    return made;
  }

  // True as soon as `condition` holds; false after the deadline.
  bool wait_for(const std::function<bool()>& condition, int64_t deadline_ms = 20'000) {
    const int64_t deadline_ns = clock_.now_ns() + deadline_ms * 1'000'000;
    for (;;) {
      TransportEvents events;
      transport_->poll(events);
      for (FetchCompletion& done : events.fetched) fetched[done.id].push_back(std::move(done));
      for (RegisterCompletion& done : events.registered) registered.push_back(std::move(done));
      for (const ReleaseCompletion& done : events.released) released.push_back(done);
      if (condition()) return true;
      if (clock_.now_ns() >= deadline_ns) return false;
      std::unique_lock<std::mutex> hold(mutex_);
      woken_.wait_for(hold, std::chrono::milliseconds(5), [this] { return ready_; });
      ready_ = false;
    }
  }

  // The one answer to a request.
  const FetchCompletion& wait_answer(FetchId id, int64_t deadline_ms = 20'000) {
    NEEDLE_CHECK(wait_for([&] { return fetched.count(id) != 0; }, deadline_ms), "a request was not answered in time");
    return fetched[id].front();
  }

  std::map<FetchId, std::vector<FetchCompletion>> fetched;  // every answer, so that a second one is seen
  std::vector<RegisterCompletion> registered;
  std::vector<ReleaseCompletion> released;

 private:
  static uint32_t& instances_made() {
    static uint32_t made = 0;
    return made;
  }
  void wake() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      ready_ = true;
    }
    woken_.notify_one();
  }

  const NodeSettings settings_;
  SteadyClock clock_;
  ThreadProcessorClock processor_clock_;
  SilentLog log_;
  std::span<std::byte> memory_;
  std::mutex mutex_;
  std::condition_variable woken_;
  bool ready_ = false;
  std::unique_ptr<UcxTransport> transport_;
};

constexpr FetchId fetch_id(uint64_t ticket, uint32_t attempt = 1, uint32_t part = 0) { return {TicketId(ticket), attempt, part}; }

}  // namespace needle::server::ucx::testing
