#include "client/session.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/receive_message.h"
#include "base/reserved_range.h"
#include "base/units.h"
#include "kernels/format_set.h"

namespace needle::client {
namespace {

int64_t steady_ns() { return SteadyClock().now_ns(); }

std::string reason(int error) { return std::string(std::strerror(error)); }

// A Launch that would begin during a re-attach waits this long at most: the daemon answers within milliseconds, and what it
// waits for are launches that are open already.
constexpr int64_t kLaunchPauseMs = 1'000;
// Unanswered endings that are kept for repetition; beyond, the oldest is left to the session's end.
constexpr size_t kEndingsMax = 1'024;

// A datagram and the descriptors that came with it. Descriptors not taken are closed.
struct Datagram {
  std::array<std::byte, attach::kMessageBytesMax> bytes;
  size_t size = 0;
  std::vector<int> fds;
  ~Datagram() {
    for (int fd : fds) {
      if (fd >= 0) ::close(fd);
    }
  }
};

// > 0: a datagram; 0: the peer closed; < 0: -errno.
int receive(int socket, Datagram& datagram) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * attach::kFdsPerMessageMax)> control;
  iovec vector{datagram.bytes.data(), datagram.bytes.size()};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = receive_message(socket, message, MSG_CMSG_CLOEXEC);
  if (got < 0) return -errno;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    std::vector<int> fds(count);
    std::memcpy(fds.data(), CMSG_DATA(part), count * sizeof(int));
    datagram.fds.insert(datagram.fds.end(), fds.begin(), fds.end());
  }
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) return -EMSGSIZE;
  datagram.size = static_cast<size_t>(got);
  return got == 0 ? 0 : 1;
}

// Takes the header off; false where the datagram is not one of ours.
bool take_header(attach::Reader& reader, attach::Header& header) {
  return reader.take(header) && header.magic == attach::kMagic && header.version == attach::kVersion && header.body_bytes == reader.left();
}

absl::Status status_of_answer(const attach::Answer& answer, const std::string& message) {
  if (answer.status == 0) return absl::OkStatus();
  if (answer.error < kErrorTable.size()) {
    return error_from_wire(kErrorTable[answer.error].code, message, static_cast<int64_t>(answer.retry_after_ms));
  }
  return absl::Status(static_cast<absl::StatusCode>(answer.status), message);
}

absl::Status protocol_error(const char* what) {
  return absl::InternalError(absl::StrCat("attach socket: the daemon sent ", what, "; client and daemon are of different builds"));
}

}  // namespace

uint64_t Session::random_id() {
  uint64_t id = 0;
  while (id == 0) {
    NEEDLE_CHECK(::getrandom(&id, sizeof id, 0) == sizeof id, "the kernel gives no random numbers");
  }
  return id;
}

Session::Session(const AttachOptions& options) : options_(options) {}

absl::StatusOr<std::shared_ptr<Session>> Session::open(const AttachOptions& options) {
  std::shared_ptr<Session> session(new Session(options));
  session->wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (session->wake_ < 0) return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", reason(errno)));
  if (absl::Status status = session->connect_and_hello(false); !status.ok()) return status;
  Session* raw = session.get();
  session->thread_ = std::thread([raw] { raw->serve(); });
  return session;
}

Session::~Session() {
  close();
  if (wake_ >= 0) ::close(wake_);
  for (Pool& pool : pools_) {
    const auto bytes = static_cast<size_t>(pool.wire.chunk_bytes * pool.wire.chunks_max);
    if (pool.read_base != nullptr) ::munmap(pool.read_base, bytes);
    if (pool.write_base != nullptr) ::munmap(pool.write_base, bytes);
  }
}

void Session::close() {
  {
    MutexLock hold(mutex_);
    if (stopping_) return;
    stopping_ = true;
  }
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t ignored = ::write(wake_, &one, sizeof one);
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  unmap_everything();
  MutexLock hold(mutex_);
  if (socket_ >= 0) {
    // Clean end: launches have ended and nothing is mapped, so that the daemon frees at once instead of pinning.
    attach::Header header;
    header.type = attach::Type::kDetach;
    [[maybe_unused]] ssize_t sent = ::send(socket_, &header, sizeof header, MSG_NOSIGNAL);
    ::close(socket_);
    socket_ = -1;
  }
  state_ = State::kClosed;
}

absl::Status Session::connect_and_hello(bool again) {
  const std::string path = options_.socket.empty() ? default_attach_socket() : options_.socket;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return absl::InvalidArgumentError(
        absl::StrCat("attach socket path has ", path.size(), " characters, at most ", sizeof address.sun_path - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0) return absl::ResourceExhaustedError(absl::StrCat("socket: ", reason(errno)));
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    const int error = errno;
    ::close(fd);
    return absl::UnavailableError(
        absl::StrCat("no daemon answers at ", path, ": ", reason(error), ". Start needled, or name its attach socket"));
  }
  {
    MutexLock hold(mutex_);
    if (socket_ >= 0) ::close(socket_);
    socket_ = fd;
  }

  if (again && !pause_launches()) {
    return absl::UnavailableError("launches are still open; attaching again waits for their end");
  }
  attach::Hello hello;
  hello.instance = instance_;
  const std::string format = options_.formats.paged.components.empty() ? "" : format_set_text(options_.formats);
  std::vector<attach::PageRefWire> held;
  uint64_t held_lease = 0;
  if (again) {
    MutexLock hold(mutex_);
    hello.previous_session = session_;
    for (const auto& [id, row] : leases_) {
      if (row.rights != rights_.load()) continue;
      if (held.size() + row.pages.size() > attach::kHeldPagesMax) break;
      held.insert(held.end(), row.pages.begin(), row.pages.end());
    }
    if (!held.empty()) {
      held_lease = random_id();
      hello.held_epoch = pools_[static_cast<size_t>(PoolKind::kPaged)].wire.epoch;  // one epoch a pool set
    }
  }
  hello.held_lease = held_lease;
  hello.held_count = static_cast<uint32_t>(held.size());
  hello.views = attach::kReadOnlyView | (options_.writable ? attach::kReadWriteView : 0u);
  hello.pool_set_bytes = static_cast<uint32_t>(options_.pool_set.size());
  hello.format_bytes = static_cast<uint32_t>(format.size());
  hello.name_bytes = static_cast<uint32_t>(options_.client_name.size());
  std::string body(reinterpret_cast<const char*>(&hello), sizeof hello);
  body.append(reinterpret_cast<const char*>(held.data()), held.size() * sizeof(attach::PageRefWire));
  body.append(options_.pool_set).append(format).append(options_.client_name);
  // A daemon that refuses this user may have closed already: its answer says why.
  if (absl::Status status = send(attach::Type::kHello, body.data(), body.size(), 1); !status.ok() && !absl::IsUnavailable(status)) {
    return status;
  }
  const int64_t deadline_ns = steady_ns() + options_.call_ms * kNanosPerMilli;
  return receive_welcome(again, held, held_lease, deadline_ns);
}

bool Session::pause_launches() {
  MutexLock hold(mutex_);
  pausing_ = true;
  const Condition::Time until = std::chrono::steady_clock::now() + std::chrono::milliseconds(options_.call_ms);
  while (!stopping_ && !launches_.empty() && changed_.wait_until(mutex_, until)) {
  }
  return launches_.empty() && !stopping_;
}

void Session::resume_launches() {
  {
    MutexLock hold(mutex_);
    pausing_ = false;
  }
  changed_.notify_all();
}

absl::Status Session::send(attach::Type type, const void* body, size_t size, uint32_t request) {
  if (sizeof(attach::Header) + size > attach::kMessageBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("attach message of ", size, " bytes, at most ", attach::kMessageBytesMax - sizeof(attach::Header)));
  }
  attach::Header header;
  header.type = type;
  header.request = request;
  header.body_bytes = static_cast<uint32_t>(size);
  iovec parts[2] = {{&header, sizeof header}, {const_cast<void*>(body), size}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = size > 0 ? 2 : 1;
  if (::sendmsg(socket_, &message, MSG_NOSIGNAL) < 0) {
    return absl::UnavailableError(absl::StrCat("attach socket: ", reason(errno)));
  }
  return absl::OkStatus();
}

absl::Status Session::receive_welcome(bool again, const std::vector<attach::PageRefWire>& held, uint64_t held_lease, int64_t deadline_ns) {
  bool welcomed = false;
  std::set<std::pair<uint32_t, uint32_t>> named;  // chunks that the daemon has now
  for (;;) {
    const int64_t left_ms = (deadline_ns - steady_ns()) / kNanosPerMilli;
    pollfd wait{socket_, POLLIN, 0};
    if (left_ms <= 0 || ::poll(&wait, 1, static_cast<int>(left_ms)) == 0) {
      return absl::DeadlineExceededError(absl::StrCat("the daemon did not finish the attach within ", options_.call_ms, " ms"));
    }
    auto datagram = std::make_unique<Datagram>();
    const int got = receive(socket_, *datagram);
    if (got <= 0) {
      return absl::UnavailableError(absl::StrCat("the daemon ended the attach", got < 0 ? absl::StrCat(": ", reason(-got)) : ""));
    }
    attach::Reader reader(datagram->bytes.data(), datagram->size);
    attach::Header header;
    if (!take_header(reader, header)) return protocol_error("a message with a wrong header");
    if (header.type == attach::Type::kAnswer) {
      attach::Answer answer;
      if (!reader.take(answer)) return protocol_error("a cut answer");
      const std::byte* text = reader.take_bytes(answer.message_bytes);
      if (text == nullptr) return protocol_error("a cut answer");
      absl::Status status = status_of_answer(answer, std::string(reinterpret_cast<const char*>(text), answer.message_bytes));
      if (!status.ok()) return status;
      continue;
    }
    if (header.type == attach::Type::kReady) {
      if (!welcomed) return protocol_error("Ready before Welcome");
      break;
    }
    if (header.type == attach::Type::kChunks) {
      attach::Chunks chunks;
      if (!welcomed || !reader.take(chunks)) return protocol_error("Chunks out of place");
      const std::byte* indices = reader.take_bytes(size_t{chunks.count} * sizeof(uint32_t));
      if (indices == nullptr) return protocol_error("a cut list of chunks");
      std::vector<uint32_t> copy(chunks.count);
      std::memcpy(copy.data(), indices, copy.size() * sizeof(uint32_t));
      if (absl::Status status = map_chunks(chunks, copy.data(), datagram->fds); !status.ok()) return status;
      for (uint32_t chunk : copy) named.insert({chunks.pool, chunk});
      continue;
    }
    if (header.type != attach::Type::kWelcome) return protocol_error("an unexpected message during attach");

    attach::Welcome welcome;
    if (!reader.take(welcome)) return protocol_error("a cut Welcome");
    std::array<attach::PoolWire, attach::kPoolsPerSet> wires;
    for (attach::PoolWire& wire : wires) {
      if (!reader.take(wire)) return protocol_error("a cut Welcome");
    }
    std::set<std::array<uint32_t, 3>> still;
    for (uint32_t i = 0; i < welcome.held_count; ++i) {
      attach::PageRefWire page;
      if (!reader.take(page)) return protocol_error("a cut Welcome");
      still.insert({page.pool, page.index, page.generation});
    }
    const auto text = [&](uint32_t bytes, std::string& out) {
      const std::byte* run = reader.take_bytes(bytes);
      if (run == nullptr) return false;
      out.assign(reinterpret_cast<const char*>(run), bytes);
      return true;
    };
    std::string format;
    std::string target;
    std::string node;
    std::string build;
    if (!text(welcome.format_bytes, format) || !text(welcome.target_bytes, target) || !text(welcome.node_bytes, node) ||
        !text(welcome.build_bytes, build)) {
      return protocol_error("a cut Welcome");
    }
    if (datagram->fds.size() != 2) return protocol_error("a Welcome without its two descriptors");
    if (!again) {
      absl::StatusOr<ModelFormats> formats = parse_format_set(format);
      if (!formats.ok()) return formats.status();
      formats_ = *formats;
      const PageFormat* each[3] = {&formats_.paged, &formats_.window, &formats_.state};
      for (size_t kind = 0; kind < 3; ++kind) {
        pools_[kind].wire = wires[kind];
        if (each[kind]->components.empty() || wires[kind].page_bytes == 0) continue;
        const int64_t range = wires[kind].chunk_bytes * wires[kind].chunks_max;
        pools_[kind].page_count = range / wires[kind].page_bytes;
        absl::StatusOr<PageLayout> layout = PageLayout::of(*each[kind], pools_[kind].page_count);
        if (!layout.ok()) return layout.status();
        layouts_[kind] = *layout;
        pools_[kind].read_base = reserve_range(static_cast<size_t>(range));
        if (options_.writable) pools_[kind].write_base = reserve_range(static_cast<size_t>(range));
        if (pools_[kind].read_base == nullptr || (options_.writable && pools_[kind].write_base == nullptr)) {
          return absl::ResourceExhaustedError(
              absl::StrCat("cannot reserve ", range, " bytes of addresses for pool ", wires[kind].pool, ": ", reason(errno)));
        }
      }
    } else {
      for (size_t kind = 0; kind < 3; ++kind) {
        const attach::PoolWire& old = pools_[kind].wire;
        if (old.page_bytes != wires[kind].page_bytes || old.chunk_bytes != wires[kind].chunk_bytes ||
            old.chunks_max != wires[kind].chunks_max) {
          return make_error(ErrorCode::kEpochChanged,
                            absl::StrCat("pool ", wires[kind].pool, " came back with another shape: detach and attach anew"));
        }
        pools_[kind].wire = wires[kind];
      }
    }
    if (metadata_ != nullptr) ::munmap(const_cast<std::byte*>(metadata_), static_cast<size_t>(metadata_bytes_));
    void* metadata = ::mmap(nullptr, static_cast<size_t>(welcome.metadata_bytes), PROT_READ, MAP_SHARED, datagram->fds[0], 0);
    void* counters = ::mmap(nullptr, static_cast<size_t>(welcome.counters_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, datagram->fds[1], 0);
    metadata_ = metadata == MAP_FAILED ? nullptr : static_cast<const std::byte*>(metadata);
    metadata_bytes_ = welcome.metadata_bytes;
    if (metadata_ == nullptr || counters == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat("cannot map the daemon's metadata: ", reason(errno)));
    }
    // The page of an earlier session stays mapped: a read on another thread may be counting in it.
    auto* counted = static_cast<attach::ReadCounters*>(counters);
    counted->version = 1;
    counted->magic = attach::kReadCountersMagic;  // the daemon believes no page without it
    counters_.store(counted, std::memory_order_release);

    MutexLock hold(mutex_);
    session_ = welcome.session;
    incarnation_ = welcome.incarnation;
    secret_.assign(reinterpret_cast<const char*>(welcome.secret), sizeof welcome.secret);
    heartbeat_ms_ = std::max<int64_t>(welcome.heartbeat_ms, 1);
    node_ = node;
    build_ = build;
    if (target_ != target || channel_ == nullptr) {
      target_ = target;
      grpc::ChannelArguments arguments;
      arguments.SetMaxReceiveMessageSize(64 << 20);
      arguments.SetMaxSendMessageSize(64 << 20);
      // The daemon may be back within milliseconds of its death; gRPC's own back-off would wait a second and more.
      arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
      arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 50);
      arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
      channel_ = grpc::CreateCustomChannel(target_, grpc::InsecureChannelCredentials(), arguments);
    }
    const uint64_t rights = rights_.load() + 1;
    // Leases that the new daemon still holds whole go on under one id; the others answer STALE from now on.
    for (auto row = leases_.begin(); row != leases_.end();) {
      const bool whole = welcome.held_lease != 0 && !held.empty() && row->second.rights == rights - 1 &&
                         std::all_of(row->second.pages.begin(), row->second.pages.end(), [&](const auto& page) {
                           return still.count({page.pool, page.index, page.generation}) != 0;
                         });
      if (!whole) {
        row = leases_.erase(row);
        continue;
      }
      row->second.current = held_lease;
      row->second.rights = rights;
      ++row;
    }
    rights_.store(rights, std::memory_order_release);
    retirements_.clear();  // of the earlier session: whatever it still awaited ended with it
    welcomed = true;
  }
  std::set<std::pair<uint32_t, uint32_t>> gone;
  {
    MutexLock hold(mutex_);
    std::set_difference(mapped_.begin(), mapped_.end(), named.begin(), named.end(), std::inserter(gone, gone.end()));
  }
  for (const auto& [pool, chunk] : gone) unmap_chunk(pool, chunk);
  MutexLock hold(mutex_);
  state_ = State::kLive;
  counters()->stale_reads.fetch_add(std::exchange(stale_reads_waiting_, 0), std::memory_order_relaxed);
  cause_.clear();
  changed_.notify_all();
  return absl::OkStatus();
}

absl::Status Session::map_chunks(const attach::Chunks& chunks, const uint32_t* indices, std::vector<int>& fds) {
  const size_t views = options_.writable ? 2 : 1;
  if (fds.size() != chunks.count * views) return protocol_error("chunks without their descriptors");
  Pool* pool = nullptr;
  for (Pool& candidate : pools_) {
    if (candidate.wire.pool == chunks.pool && candidate.read_base != nullptr) pool = &candidate;
  }
  if (pool == nullptr) return protocol_error("chunks of a pool that it did not announce");
  const auto bytes = static_cast<size_t>(pool->wire.chunk_bytes);
  for (uint32_t i = 0; i < chunks.count; ++i) {
    if (indices[i] >= static_cast<uint64_t>(pool->wire.chunks_max)) return protocol_error("a chunk past the pool's range");
    const size_t offset = bytes * indices[i];
    if (!fill_range(pool->read_base + offset, bytes, PROT_READ, fds[i * views]) ||
        (options_.writable && !fill_range(pool->write_base + offset, bytes, PROT_READ | PROT_WRITE, fds[i * views + 1]))) {
      return absl::ResourceExhaustedError(absl::StrCat("cannot map chunk ", indices[i], " of pool ", chunks.pool, ": ", reason(errno)));
    }
    MutexLock hold(mutex_);
    mapped_.insert({chunks.pool, indices[i]});
  }
  return absl::OkStatus();
}

// The addresses stay reserved: a stray access ends this process instead of reading what was mapped there next.
void Session::unmap_chunk(uint32_t pool_id, uint32_t chunk) {
  for (Pool& pool : pools_) {
    if (pool.wire.pool != pool_id || pool.read_base == nullptr) continue;
    const auto bytes = static_cast<size_t>(pool.wire.chunk_bytes);
    for (std::byte* base : {pool.read_base, pool.write_base}) {
      if (base != nullptr) empty_range(base + bytes * chunk, bytes);
    }
  }
  MutexLock hold(mutex_);
  mapped_.erase({pool_id, chunk});
}

void Session::unmap_everything() {
  std::set<std::pair<uint32_t, uint32_t>> mapped;
  {
    MutexLock hold(mutex_);
    mapped = mapped_;
    retirements_.clear();
  }
  for (const auto& [pool, chunk] : mapped) unmap_chunk(pool, chunk);
}

// ------------------------------------------------------------------------------------------------------ the event thread

void Session::serve() {
  int64_t next_heartbeat_ns = steady_ns();
  int64_t next_attempt_ns = 0;
  for (;;) {
    State state;
    {
      MutexLock hold(mutex_);
      if (stopping_) return;
      state = state_;
    }
    const int64_t now = steady_ns();
    if (state == State::kLost) {
      if (!options_.reconnect) {
        MutexLock hold(mutex_);
        while (!stopping_) changed_.wait(mutex_);
        return;
      }
      if (now >= next_attempt_ns) {
        const absl::Status status = connect_and_hello(rights_.load() > 0);
        resume_launches();
        if (status.ok()) {
          log(LogLevel::kInfo, "client_reattached", node());
          next_heartbeat_ns = steady_ns();
          continue;
        }
        // Ten tries a second: the daemon is usually back within a second, and a try costs one system call.
        next_attempt_ns = steady_ns() + 100 * kNanosPerMilli;
      }
      pollfd wait{wake_, POLLIN, 0};
      ::poll(&wait, 1, 50);
      uint64_t drained = 0;
      [[maybe_unused]] ssize_t ignored = ::read(wake_, &drained, sizeof drained);
      continue;
    }
    if (now >= next_heartbeat_ns) {
      if (!send(attach::Type::kHeartbeat, nullptr, 0, 0).ok()) {
        MutexLock hold(mutex_);
        state_ = State::kLost;
        cause_ = "the daemon's socket is gone";
        continue;
      }
      next_heartbeat_ns = now + heartbeat_ms_ * kNanosPerMilli;
      repeat_an_ending();
    }
    pollfd waits[2] = {{socket_, POLLIN, 0}, {wake_, POLLIN, 0}};
    const int64_t left_ms = std::max<int64_t>((next_heartbeat_ns - steady_ns()) / kNanosPerMilli, 0);
    ::poll(waits, 2, static_cast<int>(std::min<int64_t>(left_ms + 1, 1000)));
    if ((waits[1].revents & POLLIN) != 0) {
      uint64_t drained = 0;
      [[maybe_unused]] ssize_t ignored = ::read(wake_, &drained, sizeof drained);
    }
    if ((waits[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0 && !handle_datagram()) {
      log(LogLevel::kWarning, "client_lost_daemon", node());
      MutexLock hold(mutex_);
      state_ = State::kLost;
      cause_ = "the daemon ended the connection";
      changed_.notify_all();
      continue;
    }
    finish_retirements();
  }
}

bool Session::handle_datagram() {
  auto datagram = std::make_unique<Datagram>();
  const int got = receive(socket_, *datagram);
  if (got == -EAGAIN) return true;
  if (got <= 0) return false;
  attach::Reader reader(datagram->bytes.data(), datagram->size);
  attach::Header header;
  if (!take_header(reader, header)) return false;
  switch (header.type) {
    case attach::Type::kChunks: {
      attach::Chunks chunks;
      if (!reader.take(chunks)) return false;
      const std::byte* indices = reader.take_bytes(size_t{chunks.count} * sizeof(uint32_t));
      if (indices == nullptr) return false;
      std::vector<uint32_t> copy(chunks.count);
      std::memcpy(copy.data(), indices, copy.size() * sizeof(uint32_t));
      const absl::Status status = map_chunks(chunks, copy.data(), datagram->fds);
      if (!status.ok()) log(LogLevel::kError, "client_chunk_not_mapped", std::string(status.message()));
      return status.ok();
    }
    case attach::Type::kChunkRetiring: {
      attach::ChunkName name;
      if (!reader.take(name)) return false;
      MutexLock hold(mutex_);
      retirements_.push_back({name.pool, name.chunk, launch_next_});
      return true;
    }
    case attach::Type::kRevoked: {
      attach::Revoked revoked;
      if (!reader.take(revoked)) return false;
      const std::byte* text = reader.take_bytes(revoked.cause_bytes);
      if (text == nullptr) return false;
      begin_revocation(std::string(reinterpret_cast<const char*>(text), revoked.cause_bytes));
      return true;
    }
    default: return true;  // answers to messages that nobody waits for
  }
}

void Session::begin_revocation(const std::string& cause) {
  log(LogLevel::kWarning, "client_revoked", cause);
  MutexLock hold(mutex_);
  state_ = State::kRevoked;
  cause_ = cause;
  leases_.clear();
  rights_.fetch_add(1);
  changed_.notify_all();
}

void Session::finish_retirements() {
  std::vector<Retirement> ready;
  bool acknowledge = false;
  {
    MutexLock hold(mutex_);
    const uint64_t oldest = launches_.empty() ? launch_next_ : *launches_.begin();
    for (auto retirement = retirements_.begin(); retirement != retirements_.end();) {
      if (oldest >= retirement->after) {
        ready.push_back(*retirement);
        retirement = retirements_.erase(retirement);
      } else {
        ++retirement;
      }
    }
    acknowledge = state_ == State::kRevoked && launches_.empty();
  }
  for (const Retirement& retirement : ready) {
    unmap_chunk(retirement.pool, retirement.chunk);
    const attach::ChunkName name{retirement.pool, retirement.chunk};
    if (absl::Status status = send(attach::Type::kChunkUnmapped, &name, sizeof name, 0); !status.ok()) {
      log(LogLevel::kWarning, "client_send_failed", std::string(status.message()));
    }
  }
  if (!acknowledge) return;
  unmap_everything();
  if (absl::Status status = send(attach::Type::kAcknowledge, nullptr, 0, 0); !status.ok()) {
    log(LogLevel::kWarning, "client_send_failed", std::string(status.message()));
  }
  MutexLock hold(mutex_);
  state_ = State::kLost;  // attaches again as a new session, if the caller wants that
}

// -------------------------------------------------------------------------------------------------------- any thread

absl::Status Session::begin_launch(uint64_t& launch) {
  MutexLock hold(mutex_);
  // Bounded, since the caller may itself hold the Launch that the re-attach waits for.
  const Condition::Time until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kLaunchPauseMs);
  while (pausing_ && !stopping_ && changed_.wait_until(mutex_, until)) {
  }
  if (pausing_ && !stopping_) {
    return make_error(ErrorCode::kBusy, "the session is attaching again and waits for open launches to end: retry", heartbeat_ms_);
  }
  if (state_ == State::kRevoked || state_ == State::kClosed || stopping_) {
    return make_error(ErrorCode::kStale,
                      absl::StrCat("this session's rights are gone (", cause_.empty() ? "closed" : cause_, "); acquire or reserve anew"));
  }
  // kLost still allows reads: the memory is mapped, and what was leased is checked again after the re-attach.
  launch = launch_next_++;
  launches_.insert(launch);
  return absl::OkStatus();
}

void Session::end_launch(uint64_t launch) {
  bool wake = false;
  {
    MutexLock hold(mutex_);
    launches_.erase(launches_.find(launch));
    wake = !retirements_.empty() || (state_ == State::kRevoked && launches_.empty());
    if (pausing_ && launches_.empty()) changed_.notify_all();
  }
  if (!wake) return;
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t ignored = ::write(wake_, &one, sizeof one);
}

absl::Status Session::check_rights(uint64_t rights) const {
  MutexLock hold(mutex_);
  if (rights == rights_.load() && state_ != State::kRevoked && state_ != State::kClosed) return absl::OkStatus();
  return make_error(ErrorCode::kStale, absl::StrCat("the handle belongs to an earlier session with the daemon",
                                                    cause_.empty() ? "" : absl::StrCat(" (", cause_, ")"), "; acquire or reserve anew"));
}

void Session::remember_lease(LeaseId lease, const Pages& pages) {
  LeaseRow row;
  const auto add = [&](PoolKind kind, const PageId& page) {
    if (!page.index.is_none()) row.pages.push_back({pool(kind).wire.pool, page.index.value(), page.generation.value(), 0});
  };
  for (const PageId& page : pages.paged) add(PoolKind::kPaged, page);
  for (const PageId& page : pages.window) add(PoolKind::kWindow, page);
  add(PoolKind::kState, pages.state);
  MutexLock hold(mutex_);
  row.current = lease.value();
  row.rights = rights_.load();
  leases_[lease.value()] = std::move(row);
}

absl::StatusOr<uint64_t> Session::lease_now(LeaseId lease) const {
  MutexLock hold(mutex_);
  const auto row = leases_.find(lease.value());
  if (row == leases_.end() || row->second.rights != rights_.load()) {
    return make_error(ErrorCode::kStale, absl::StrCat("lease ", lease.value(), " ended with an earlier session; acquire anew"));
  }
  return row->second.current;
}

absl::StatusOr<uint64_t> Session::forget_lease(LeaseId lease, bool& last) {
  MutexLock hold(mutex_);
  const auto row = leases_.find(lease.value());
  if (row == leases_.end() || row->second.rights != rights_.load()) {
    return make_error(ErrorCode::kStale, absl::StrCat("lease ", lease.value(), " ended with an earlier session"));
  }
  const uint64_t current = row->second.current;
  leases_.erase(row);
  last = std::none_of(leases_.begin(), leases_.end(), [&](const auto& other) { return other.second.current == current; });
  return current;
}

absl::Status Session::end_right(Right right, uint64_t id, int64_t deadline_ms) {
  const uint64_t rights = rights_.load();
  v1::Empty reply;
  absl::Status status;
  if (right == Right::kTicket) {
    v1::ForfeitRequest request;
    request.set_ticket(id);
    request.set_fenced(true);
    status = call(&v1::Needle::Stub::Forfeit, request, &reply, deadline_ms);
  } else if (right == Right::kLease) {
    v1::LeaseRequest request;
    request.set_lease(id);
    status = call(&v1::Needle::Stub::Release, request, &reply, deadline_ms);
  } else {
    v1::TicketRequest request;
    request.set_ticket(id);
    status = call(&v1::Needle::Stub::ShipCancel, request, &reply, deadline_ms);
  }
  const bool answered = status.ok() || error_code(status) != ErrorCode::kBug;
  if (answered) return status;
  MutexLock hold(mutex_);
  if (endings_.size() == kEndingsMax) endings_.pop_front();
  endings_.push_back({right, id, rights});
  return status;
}

// One a heartbeat, with a short deadline: heartbeats matter more.
void Session::repeat_an_ending() {
  Ending ending;
  {
    MutexLock hold(mutex_);
    while (!endings_.empty() && endings_.front().rights != rights_.load()) endings_.pop_front();  // ended with its session
    if (endings_.empty()) return;
    ending = endings_.front();
    endings_.pop_front();
  }
  static_cast<void>(end_right(ending.right, ending.id, std::max<int64_t>(heartbeat_ms_ / 2, 1)));
}

std::string Session::node() const {
  MutexLock hold(mutex_);
  return node_;
}
std::string Session::build() const {
  MutexLock hold(mutex_);
  return build_;
}
// The daemon closes a session's counters when it has acknowledged, which is just when reads are refused.
void Session::count_stale_read() {
  MutexLock hold(mutex_);
  if (state_ == State::kLive) {
    counters()->stale_reads.fetch_add(1, std::memory_order_relaxed);
  } else {
    ++stale_reads_waiting_;
  }
}
attach::ReadCounters* Session::counters() const { return counters_.load(std::memory_order_acquire); }

void Session::log(LogLevel level, std::string_view event, const std::string& detail) {
  if (options_.log != nullptr) options_.log->write(level, event, {{"client", options_.client_name}, {"detail", detail}});
}

absl::Status Session::call_until(const std::function<grpc::Status(v1::Needle::Stub&, grpc::ClientContext&)>& verb, int64_t deadline_ms) {
  const auto deadline = std::chrono::system_clock::now() + std::chrono::milliseconds(deadline_ms);
  for (;;) {
    std::shared_ptr<grpc::Channel> channel;
    grpc::ClientContext context;
    context.set_deadline(deadline);
    {
      MutexLock hold(mutex_);
      if (state_ == State::kClosed) return make_error(ErrorCode::kStale, "the client was closed");
      channel = channel_;
      context.AddMetadata(attach::kSessionMetadata, std::to_string(session_));
      context.AddMetadata(attach::kSecretMetadata, secret_);
    }
    const uint64_t rights = rights_.load();
    v1::Needle::Stub stub(channel);
    const grpc::Status status = verb(stub, context);
    if (status.ok()) return absl::OkStatus();
    const auto& trailing = context.GetServerTrailingMetadata();
    const auto text = [&trailing](const char* key) {
      const auto found = trailing.find(key);
      return found == trailing.end() ? std::string_view() : std::string_view(found->second.data(), found->second.size());
    };
    if (const std::optional<ErrorCode> code = error_of_name(text(attach::kErrorMetadata))) {
      return error_from_wire(*code, status.error_message(), parse_retry_after_ms(text(attach::kRetryAfterMetadata)));
    }
    // Without a name of ours the call never reached the core, so the same request may be sent again.
    const bool unreached = status.error_code() == grpc::StatusCode::UNAVAILABLE;
    if (!unreached || std::chrono::system_clock::now() + std::chrono::milliseconds(20) >= deadline) {
      return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    }
    MutexLock hold(mutex_);
    changed_.wait_for_ms(mutex_, 20);
    if (rights_.load() != rights) {
      return make_error(ErrorCode::kStale, "the daemon restarted while the call was under way; start anew");
    }
  }
}

}  // namespace needle::client
