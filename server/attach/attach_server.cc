#include "server/attach/attach_server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/units.h"
#include "kernels/format_set.h"
#include "proto/errors.h"
#include "server/memory/descriptor_passing.h"

namespace needle::server {

namespace {

// Event tags: the listener and the wake descriptor, then two for each connection key.
constexpr uint64_t kListenerTag = 0;
constexpr uint64_t kWakeTag = 1;
constexpr int kAcceptedAtOnce = 16;       // then those are heard: a crowd of clients doesn't fill the room before it said Hello
constexpr int64_t kListenLaterMs = 100;   // descriptors come back with the next client that leaves
constexpr size_t kLoggedBytesMax = 2048;  // a refused format repeats both texts, up to 16 KiB each
constexpr uint64_t socket_tag(uint64_t key) { return key * 2; }
constexpr uint64_t pidfd_tag(uint64_t key) { return key * 2 + 1; }

uint32_t error_index(const absl::Status& status) {
  const std::optional<ErrorCode> code = error_code(status);
  return code.has_value() ? static_cast<uint32_t>(*code) : attach::kNoError;
}

// Builds one datagram: header, body, tails.
class MessageBuilder {
 public:
  template <class Body>
  MessageBuilder(attach::Type type, uint32_t request, const Body& body) {
    header_.type = type;
    header_.request = request;
    bytes_.resize(sizeof(header_));
    append(&body, sizeof(body));
  }
  template <class Item>
  MessageBuilder& tail(const std::vector<Item>& items) {
    append(items.data(), items.size() * sizeof(Item));
    return *this;
  }
  MessageBuilder& tail(const std::string& text) {
    append(text.data(), text.size());
    return *this;
  }
  std::vector<std::byte> take() {
    header_.body_bytes = static_cast<uint32_t>(bytes_.size() - sizeof(header_));
    std::memcpy(bytes_.data(), &header_, sizeof(header_));
    NEEDLE_CHECK(bytes_.size() <= attach::kMessageBytesMax, "a message of ours fits a datagram");
    return std::move(bytes_);
  }

 private:
  void append(const void* data, size_t size) {
    const auto* from = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), from, from + size);
  }
  attach::Header header_;
  std::vector<std::byte> bytes_;
};

}  // namespace

// A message on its way to a client, with everything that keeps its descriptors open until it left.
struct AttachServer::Outgoing {
  std::vector<std::byte> bytes;
  std::vector<int> fds;
  std::vector<std::shared_ptr<const ChunkFiles>> chunks;
  std::vector<FileDescriptor> owned;
};

struct AttachServer::Connection {
  using State = ConnectionState;
  uint64_t key = 0;
  FileDescriptor socket;
  WatchedProcess process;
  State state = State::kNew;  // set_state() changes it
  int64_t leave_by_ns = 0;    // in kNew and kEnded
  SessionId session;
  uint32_t views = 0;
  size_t set = 0;
  std::deque<Outgoing> waiting;
  bool closing = false;  // close once `waiting` is empty
};

AttachServer::AttachServer(AttachOptions options, std::vector<AttachPoolSet> sets, Sources sources, SessionRegistry& registry, Post post,
                           Log& log)
    : options_(std::move(options)),
      sets_(std::move(sets)),
      sources_(std::move(sources)),
      registry_(registry),
      post_(std::move(post)),
      log_(log) {}

absl::StatusOr<std::unique_ptr<AttachServer>> AttachServer::start(AttachOptions options, std::vector<AttachPoolSet> sets, Sources sources,
                                                                  SessionRegistry& registry, Post post, Log& log) {
  absl::StatusOr<FileDescriptor> listener = listen_seqpacket(options.path);
  if (!listener.ok()) return listener.status();
  // Credentials are what lets one in; the file's mode would keep out those that uids names.
  if (!options.uids.empty() && ::chmod(options.path.c_str(), 0666) != 0) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("chmod 0666 ", options.path, ": ", std::strerror(errno)));
  }
  std::unique_ptr<AttachServer> server(
      new AttachServer(std::move(options), std::move(sets), std::move(sources), registry, std::move(post), log));
  server->listener_ = *std::move(listener);
  server->epoll_ = FileDescriptor(::epoll_create1(EPOLL_CLOEXEC));
  server->wake_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!server->epoll_.is_open() || !server->wake_.is_open()) {
    return make_error(ErrorCode::kMemory, absl::StrCat("epoll or eventfd: ", std::strerror(errno), "; raise the limit of open files"));
  }
  server->watch_fd(server->listener_.get(), kListenerTag, EPOLLIN);
  server->watch_fd(server->wake_.get(), kWakeTag, EPOLLIN);
  server->thread_ = std::thread([raw = server.get()] { raw->serve(); });
  return server;
}

AttachServer::~AttachServer() {
  {
    MutexLock hold(mutex_);
    stopping_ = true;
  }
  const uint64_t one = 1;
  if (wake_.is_open()) (void)!::write(wake_.get(), &one, sizeof(one));
  if (thread_.joinable()) thread_.join();
  ::unlink(options_.path.c_str());
}

void AttachServer::watch_fd(int fd, uint64_t tag, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0 && errno == EEXIST) ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void AttachServer::run_on_thread(std::function<void()> work) {
  {
    MutexLock hold(mutex_);
    work_.push_back(std::move(work));
  }
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
}

void AttachServer::serve() {
  std::vector<epoll_event> events(64);
  for (;;) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait_ms());
    for (int i = 0; i < count; ++i) {
      const uint64_t tag = events[static_cast<size_t>(i)].data.u64;
      if (tag == kListenerTag) {
        accept_clients();
      } else if (tag == kWakeTag) {
        uint64_t drained = 0;
        (void)!::read(wake_.get(), &drained, sizeof(drained));
      } else if (tag % 2 == 1) {
        process_died(tag / 2);
      } else {
        const auto found = connections_.find(tag / 2);
        if (found == connections_.end()) continue;
        if ((events[static_cast<size_t>(i)].events & EPOLLOUT) != 0) flush(*found->second);
        if ((events[static_cast<size_t>(i)].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) read_from(tag / 2);
      }
    }
    close_overdue();
    // Work from other threads comes in the order in which it was said.
    for (;;) {
      std::function<void()> work;
      {
        MutexLock hold(mutex_);
        if (stopping_) return;
        if (work_.empty()) break;
        work = std::move(work_.front());
        work_.pop_front();
      }
      work();
    }
  }
}

int AttachServer::wait_ms() const {
  int64_t until_ns = listen_again_ns_;
  if (!without_session_.empty() && (until_ns == 0 || without_session_.begin()->first < until_ns))
    until_ns = without_session_.begin()->first;
  if (until_ns == 0) return -1;
  return static_cast<int>(std::max<int64_t>(div_ceil(until_ns - clock_.now_ns(), kNanosPerMilli), 0));
}

// Whoever has no session is asked to get one or to leave.
void AttachServer::set_state(Connection& connection, ConnectionState state) {
  if (connection.state == ConnectionState::kNew && connection.leave_by_ns != 0) {
    const auto waiting = hellos_waiting_.find(connection.process.identity.uid);
    if (--waiting->second == 0) hellos_waiting_.erase(waiting);
  }
  if (connection.leave_by_ns != 0) without_session_.erase({connection.leave_by_ns, connection.key});
  connection.state = state;
  connection.leave_by_ns = 0;
  if (state == ConnectionState::kNew) ++hellos_waiting_[connection.process.identity.uid];
  if (state == ConnectionState::kNew || state == ConnectionState::kEnded) {
    connection.leave_by_ns = clock_.now_ns() + options_.hello_ms * kNanosPerMilli;
    without_session_.insert({connection.leave_by_ns, connection.key});
  }
  without_session_now_.store(static_cast<int64_t>(without_session_.size()), std::memory_order_relaxed);
}

void AttachServer::close_overdue() {
  const int64_t now_ns = clock_.now_ns();
  if (listen_again_ns_ != 0 && listen_again_ns_ <= now_ns) {
    listen_again_ns_ = 0;
    watch_fd(listener_.get(), kListenerTag, EPOLLIN);
  }
  while (!without_session_.empty() && without_session_.begin()->first <= now_ns) {
    const uint64_t key = without_session_.begin()->second;
    Connection& connection = *connections_.at(key);
    if (connection.state == ConnectionState::kNew) {
      hellos_overdue_.fetch_add(1, std::memory_order_relaxed);
      log_.write(LogLevel::kWarning, "attach_hello_overdue",
                 {{"pid", absl::StrCat(connection.process.identity.pid)}, {"limit_ms", absl::StrCat(options_.hello_ms)}});
      answer(
          connection, 0,
          make_error(ErrorCode::kStale, absl::StrCat("no Hello came within ", options_.hello_ms, " ms of the connection; connect anew")));
    }
    close_connection(key);
  }
}

// epoll would report the same caller again at once, for ever.
void AttachServer::listen_later(int error) {
  log_.write(LogLevel::kError, "attach_accept_failed",
             {{"cause", std::string(std::strerror(error))}, {"again_in_ms", absl::StrCat(kListenLaterMs)}});
  watch_fd(listener_.get(), kListenerTag, 0);
  listen_again_ns_ = clock_.now_ns() + kListenLaterMs * kNanosPerMilli;
}

void AttachServer::accept_clients() {
  for (int accepted = 0; accepted < kAcceptedAtOnce; ++accepted) {
    FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.is_open()) {
      if (lacks_descriptors(errno)) listen_later(errno);
      return;
    }
    auto connection = std::make_unique<Connection>();
    connection->key = next_key_++;
    connection->socket = std::move(socket);
    absl::StatusOr<WatchedProcess> process = watch_peer(connection->socket.get());
    absl::Status refused = process.status();
    if (refused.ok()) {
      const uint32_t uid = process->identity.uid;
      const bool allowed = uid == ::geteuid() || uid == 0 || std::count(options_.uids.begin(), options_.uids.end(), uid) > 0;
      if (!allowed) {
        refused = make_error(ErrorCode::kWrongOwner,
                             absl::StrCat("user ", uid, " may not attach to this daemon of user ", ::geteuid(), "; add it to attach.uids"));
      } else if (static_cast<int64_t>(connections_.size()) >= options_.connections_max) {
        refused = make_error(ErrorCode::kBusy, absl::StrCat("there are ", connections_.size(), " connections, the limit"), 1000);
      } else if (const auto waiting = hellos_waiting_.find(uid);
                 waiting != hellos_waiting_.end() && waiting->second >= options_.hellos_waiting_max) {
        refused =
            make_error(ErrorCode::kBusy, absl::StrCat(waiting->second, " connections of user ", uid, " have said no Hello yet, the limit"),
                       options_.hello_ms);
      }
    }
    Connection& entered = *connection;
    if (!refused.ok()) {
      refused_.fetch_add(1, std::memory_order_relaxed);
      log_.write(LogLevel::kWarning, "attach_refused", {{"cause", std::string(refused.message())}});
      answer(entered, 0, refused);  // one datagram into an empty socket buffer; then the socket closes with this scope
      continue;
    }
    connection->process = *std::move(process);
    set_state(entered, ConnectionState::kNew);
    watch_fd(entered.socket.get(), socket_tag(entered.key), EPOLLIN);
    watch_fd(entered.process.pidfd.get(), pidfd_tag(entered.key), EPOLLIN);
    connections_.emplace(entered.key, std::move(connection));
    connections_now_.store(static_cast<int64_t>(connections_.size()), std::memory_order_relaxed);
  }
}

void AttachServer::read_from(uint64_t key) {
  for (int messages = 0; messages < 64; ++messages) {  // then let others be heard; epoll is level-triggered
    const auto found = connections_.find(key);
    if (found == connections_.end()) return;
    Datagram datagram;
    switch (receive_datagram(found->second->socket.get(), attach::kMessageBytesMax, datagram)) {
      case ReceiveResult::kWouldBlock: return;
      case ReceiveResult::kGone: close_connection(key); return;
      case ReceiveResult::kReceived: handle(*found->second, datagram); break;
    }
  }
}

void AttachServer::handle(Connection& connection, Datagram& datagram) {
  const uint64_t key = connection.key;
  attach::Reader reader(datagram.bytes.data(), datagram.bytes.size());
  attach::Header header;
  const bool whole = reader.take(header) && header.magic == attach::kMagic && header.body_bytes == reader.left() && datagram.fds.empty();
  if (!whole) {
    log_.write(LogLevel::kWarning, "attach_malformed",
               {{"pid", absl::StrCat(connection.process.identity.pid)}, {"bytes", absl::StrCat(datagram.bytes.size())}});
    close_connection(key);
    return;
  }
  if (header.version != attach::kVersion) {
    answer(connection, header.request,
           make_error(ErrorCode::kInvalid, absl::StrCat("attach version ", header.version, " is not spoken here; this daemon speaks ",
                                                        attach::kVersion, ". Use a client library of the daemon's build")));
    connection.closing = true;
    flush(connection);
    return;
  }
  if (header.type == attach::Type::kHello) {
    hello(connection, header.request, reader);
    return;
  }
  if (connection.state != Connection::State::kAttached) {
    answer(connection, header.request, make_error(ErrorCode::kStale, "no session on this connection; say Hello first"));
    return;
  }
  const SessionId session = connection.session;
  switch (header.type) {
    case attach::Type::kHeartbeat: post_call(key, header.request, Heartbeat{session}, false); return;
    case attach::Type::kAcknowledge: post_call(key, header.request, Acknowledge{session}, true); return;
    case attach::Type::kDetach: post_call(key, header.request, Detach{session}, true); return;
    case attach::Type::kChunkUnmapped: {
      attach::ChunkName name;
      if (!reader.take(name)) {
        answer(connection, header.request, make_error(ErrorCode::kInvalid, "ChunkUnmapped is too short to name a pool and a chunk"));
        return;
      }
      post_call(key, header.request, ChunkUnmapped{session, PoolId(name.pool), ChunkIndex(name.chunk)}, false);
      return;
    }
    default: break;
  }
  answer(connection, header.request,
         make_error(ErrorCode::kInvalid, absl::StrCat("attach message of type ", static_cast<int>(header.type), " is not for a daemon")));
}

template <class Request>
void AttachServer::post_call(uint64_t key, uint32_t request, Request message, bool ends_session) {
  const SessionId session = message.session;
  if (ends_session) set_state(*connections_.at(key), Connection::State::kEnding);
  // A refused post calls the completion too, so the result needs no second look.
  (void)post_(Call<Request>{std::move(message), [this, key, request, session, ends_session](absl::StatusOr<Nothing> reply) {
                              run_on_thread([this, key, request, session, ends_session, status = reply.status()] {
                                if (ends_session && status.ok()) ended(session);
                                const auto found = connections_.find(key);
                                if (found == connections_.end()) return;
                                if (ends_session)
                                  set_state(*found->second, status.ok() ? Connection::State::kEnded : Connection::State::kAttached);
                                if (request != 0 || !status.ok()) answer(*found->second, request, status);
                              });
                            }});
}

void AttachServer::hello(Connection& connection, uint32_t request, attach::Reader reader) {
  const auto refuse = [&](const absl::Status& status) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    log_.write(
        LogLevel::kWarning, "attach_refused",
        {{"pid", absl::StrCat(connection.process.identity.pid)}, {"cause", std::string(status.message().substr(0, kLoggedBytesMax))}});
    answer(connection, request, status);
    connection.closing = true;
    flush(connection);
  };
  attach::Hello body;
  if (!reader.take(body) || body.held_count > attach::kHeldPagesMax || body.pool_set_bytes > attach::kNameBytesMax ||
      body.format_bytes > attach::kFormatBytesMax || body.name_bytes > attach::kNameBytesMax ||
      reader.left() != body.held_count * sizeof(attach::PageRefWire) + body.pool_set_bytes + body.format_bytes + body.name_bytes) {
    return refuse(make_error(ErrorCode::kInvalid, "Hello's lengths disagree with its size or exceed a limit of proto/attach.h"));
  }
  if (connection.state != Connection::State::kNew) return refuse(make_error(ErrorCode::kInvalid, "this connection has said Hello before"));
  Attach attach;
  for (uint32_t i = 0; i < body.held_count; ++i) {
    attach::PageRefWire held;
    if (!reader.take(held)) return refuse(make_error(ErrorCode::kInvalid, "Hello is too short"));
    attach.held.push_back({PoolId(held.pool), {PageIndex(held.index), Generation(held.generation)}});
  }
  const auto text = [&reader](uint32_t size) {
    const std::byte* bytes = reader.take_bytes(size);
    return bytes == nullptr ? std::string() : std::string(reinterpret_cast<const char*>(bytes), size);
  };
  std::string pool_set = text(body.pool_set_bytes);
  std::string format = text(body.format_bytes);
  std::string client = text(body.name_bytes);
  if (pool_set.empty() && sets_.size() == 1) pool_set = sets_[0].name;
  size_t set = 0;
  while (set < sets_.size() && sets_[set].name != pool_set) ++set;
  if (set == sets_.size()) {
    std::string known;
    for (const AttachPoolSet& other : sets_) absl::StrAppend(&known, known.empty() ? "" : ", ", other.name);
    return refuse(make_error(ErrorCode::kNotFound, absl::StrCat("no pool '", printable(pool_set), "' here; there are: ", known)));
  }
  if (!format.empty()) {
    const absl::Status same = check_same_format_set(sets_[set].format, format);
    if (!same.ok()) return refuse(make_error(ErrorCode::kFormatMismatch, std::string(same.message())));
  }
  if ((body.views & ~uint32_t{attach::kReadOnlyView | attach::kReadWriteView}) != 0) {
    return refuse(make_error(ErrorCode::kInvalid,
                             absl::StrCat("views ", body.views, " has an unknown bit; bits are 1 (read only) and 2 (read and write)")));
  }
  if (body.previous_session != 0) {
    const SessionEntry previous = registry_.entry(SessionId(body.previous_session));
    const ProcessIdentity& process = connection.process.identity;
    if (!previous.session.is_none() &&
        (previous.process.pid != process.pid || previous.process.start_time_ticks != process.start_time_ticks)) {
      return refuse(make_error(ErrorCode::kWrongOwner, absl::StrCat("session ", body.previous_session, " belongs to another process")));
    }
  }
  set_state(connection, Connection::State::kAttaching);
  connection.views = body.views;
  connection.set = set;
  attach.pool_set = sets_[set].name;
  attach.format = sets_[set].format;
  attach.process = connection.process.identity;
  attach.process.instance = body.instance;
  attach.previous = SessionId(body.previous_session);
  attach.held_epoch = Epoch(body.held_epoch);
  attach.held_lease = LeaseId(body.held_lease);
  (void)post_(Call<Attach>{std::move(attach), [this, key = connection.key, request, set, process = connection.process.identity,
                                               client](absl::StatusOr<Attach::Reply> reply) {
                             run_on_thread([this, key, request, set, process, client, reply = std::move(reply)]() mutable {
                               attached(key, request, set, std::move(reply), process, std::move(client));
                             });
                           }});
}

void AttachServer::attached(uint64_t key, uint32_t request, size_t set, absl::StatusOr<Attach::Reply> reply, ProcessIdentity process,
                            std::string client) {
  // What the process was before is over; the core has given all of that up in the same step.
  for (SessionId earlier : reply.ok() ? reply->ended : std::vector<SessionId>()) {
    const auto old = by_session_.find(earlier.value());
    const auto old_connection = old == by_session_.end() ? connections_.end() : connections_.find(old->second);
    if (old_connection != connections_.end()) set_state(*old_connection->second, Connection::State::kEnded);
    ended(earlier);
  }
  const auto found = connections_.find(key);
  if (found == connections_.end()) {  // it left while the core was thinking; its pidfd waits under the same key
    const auto watched = watched_.find(key);
    if (watched == watched_.end()) return;
    if (!reply.ok()) {
      watched_.erase(watched);
      return;
    }
    watched->second.session = reply->session;
    (void)post_(SessionLost{reply->session});
    watch_fd(watched->second.pidfd.get(), pidfd_tag(key), EPOLLIN);
    return;
  }
  Connection& connection = *found->second;
  const auto refuse = [&](const absl::Status& status) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    set_state(connection, Connection::State::kEnded);
    answer(connection, request, status);
    connection.closing = true;
    flush(connection);
  };
  if (!reply.ok()) return refuse(reply.status());
  const absl::StatusOr<SessionSecret> secret = make_secret();
  absl::StatusOr<SharedPage> counters = make_shared_page(attach::kReadCountersBytes);
  if (!secret.ok() || !counters.ok()) {
    (void)post_(SessionLost{reply->session});
    (void)post_(Call<Acknowledge>{{reply->session}, [](absl::StatusOr<Nothing>) {}});  // it never got a mapping
    return refuse(!secret.ok() ? secret.status() : counters.status());
  }
  connection.session = reply->session;
  set_state(connection, Connection::State::kAttached);
  by_session_[connection.session.value()] = key;

  attach::Welcome welcome;
  welcome.session = reply->session.value();
  welcome.incarnation = reply->incarnation.value();
  std::memcpy(welcome.secret, secret->data(), secret->size());
  welcome.held_lease = reply->held_lease.value();
  welcome.metadata_bytes = sources_.metadata_bytes;
  welcome.counters_bytes = attach::kReadCountersBytes;
  welcome.heartbeat_ms = static_cast<uint32_t>(reply->heartbeat_ms);
  std::vector<attach::PoolWire> pools;
  for (int kind = 0; kind < kPoolKinds; ++kind) {
    const PoolLayout& layout = reply->pools[static_cast<size_t>(kind)];
    attach::PoolWire pool;
    pool.pool = layout.pool.value();
    pool.kind = static_cast<uint32_t>(kind);
    pool.epoch = layout.epoch.value();
    pool.page_bytes = sets_[set].mapped[static_cast<size_t>(kind)] ? layout.shape.page_bytes : 0;
    pool.page_tokens = layout.shape.page_tokens;
    pool.chunk_bytes = layout.shape.chunk_bytes;
    pool.chunks_max = layout.shape.chunks_max;
    pool.words_offset = sets_[set].words_offset[static_cast<size_t>(kind)];
    pool.page_count_max = sets_[set].page_count_max[static_cast<size_t>(kind)];
    pools.push_back(pool);
    welcome.pool_set = set_of(layout.pool).value();
  }
  std::vector<attach::PageRefWire> held;
  for (const PageRef& page : reply->held) held.push_back({page.pool.value(), page.page.index.value(), page.page.generation.value(), 0});
  welcome.held_count = static_cast<uint32_t>(held.size());
  welcome.format_bytes = static_cast<uint32_t>(sets_[set].format.size());
  const bool ours = process.uid == ::geteuid() || process.uid == 0;
  const std::string& target = ours ? options_.grpc_target : options_.grpc_target_of_others;
  welcome.target_bytes = static_cast<uint32_t>(target.size());
  welcome.node_bytes = static_cast<uint32_t>(options_.node.size());
  welcome.build_bytes = static_cast<uint32_t>(options_.build.size());

  auto page = std::make_unique<SharedPage>(*std::move(counters));
  Outgoing message;
  message.bytes = MessageBuilder(attach::Type::kWelcome, request, welcome)
                      .tail(pools)
                      .tail(held)
                      .tail(sets_[set].format)
                      .tail(target)
                      .tail(options_.node)
                      .tail(options_.build)
                      .take();
  message.owned.emplace_back(::dup(page->fd.get()));  // the registry's copy may end before this message leaves
  message.fds = {sources_.metadata_fd, message.owned.back().get()};
  registry_.add({reply->session, std::move(client), sets_[set].name, process, true}, *secret, std::move(page));
  send(connection, std::move(message));

  attach::Ready ready;
  if (connection.views != 0) {
    for (const PoolLayout& layout : reply->pools) send_chunks(connection, layout.pool, layout.chunks, &ready.chunks);
  }
  Outgoing last;
  last.bytes = MessageBuilder(attach::Type::kReady, request, ready).take();
  send(connection, std::move(last));
  log_.write(LogLevel::kInfo, "session_attached",
             {{"session", absl::StrCat(reply->session.value())},
              {"pid", absl::StrCat(process.pid)},
              {"pool", sets_[set].name},
              {"chunks", absl::StrCat(ready.chunks)}});
}

void AttachServer::send_chunks(Connection& connection, PoolId pool, const std::vector<ChunkIndex>& chunks, uint32_t* sent) {
  const bool read_only = (connection.views & attach::kReadOnlyView) != 0;
  const bool read_write = (connection.views & attach::kReadWriteView) != 0;
  const size_t per_chunk = (read_only ? 1u : 0u) + (read_write ? 1u : 0u);
  if (per_chunk == 0 || !sets_[connection.set].mapped[static_cast<size_t>(kind_of(pool))]) return;
  Outgoing message;
  std::vector<uint32_t> indices;
  const auto leave = [&] {
    if (indices.empty()) return;
    message.bytes =
        MessageBuilder(attach::Type::kChunks, 0, attach::Chunks{pool.value(), static_cast<uint32_t>(indices.size())}).tail(indices).take();
    if (sent != nullptr) *sent += static_cast<uint32_t>(indices.size());
    indices.clear();
    send(connection, std::exchange(message, {}));
  };
  for (ChunkIndex chunk : chunks) {
    std::shared_ptr<const ChunkFiles> files = sources_.chunk_files(pool, chunk);
    if (files == nullptr) continue;  // freed meanwhile; the core will say ChunkRetiring, which is harmless for an unknown one
    if (message.fds.size() + per_chunk > static_cast<size_t>(attach::kFdsPerMessageMax)) leave();
    if (read_only) message.fds.push_back(files->read_only.get());
    if (read_write) message.fds.push_back(files->read_write.get());
    indices.push_back(chunk.value());
    message.chunks.push_back(std::move(files));
  }
  leave();
}

void AttachServer::to_session(SessionId session, SessionEvent event) {
  run_on_thread([this, session, event = std::move(event)] { deliver(session, event); });
}

void AttachServer::deliver(SessionId session, const SessionEvent& event) {
  const auto key = by_session_.find(session.value());
  const auto found = key == by_session_.end() ? connections_.end() : connections_.find(key->second);
  if (found == connections_.end()) {
    // Nobody to tell. A remote caller's session is over with its rights: there is nothing of it that could be pinned.
    const SessionEntry entry = registry_.entry(session);
    if (std::holds_alternative<Revoked>(event) && !entry.session.is_none() && !entry.attached) registry_.remove(session);
    return;
  }
  Connection& connection = *found->second;
  Outgoing message;
  if (const auto* mapped = std::get_if<ChunkMapped>(&event)) {
    send_chunks(connection, mapped->pool, {mapped->chunk}, nullptr);
    return;
  }
  if (const auto* retiring = std::get_if<ChunkRetiring>(&event)) {
    if (connection.views == 0 || !sets_[connection.set].mapped[static_cast<size_t>(kind_of(retiring->pool))]) {  // nothing of it is mapped
      post_call(connection.key, 0, ChunkUnmapped{session, retiring->pool, retiring->chunk}, false);
      return;
    }
    message.bytes =
        MessageBuilder(attach::Type::kChunkRetiring, 0, attach::ChunkName{retiring->pool.value(), retiring->chunk.value()}).take();
  } else if (const auto* revoked = std::get_if<Revoked>(&event)) {
    std::string cause = revoked->cause.substr(0, 1024);
    log_.write(LogLevel::kWarning, "session_revoked", {{"session", absl::StrCat(session.value())}, {"cause", cause}});
    message.bytes = MessageBuilder(attach::Type::kRevoked, 0, attach::Revoked{static_cast<uint32_t>(cause.size()), 0}).tail(cause).take();
  }
  send(connection, std::move(message));
}

void AttachServer::watch_survivor(SessionId session, const ProcessIdentity& identity) {
  run_on_thread([this, session, identity] {
    absl::StatusOr<WatchedProcess> process = watch_process(identity);
    if (!process.ok()) {
      (void)post_(ProcessDied{session});
      return;
    }
    const uint64_t key = next_key_++;
    watch_fd(process->pidfd.get(), pidfd_tag(key), EPOLLIN);
    watched_.emplace(key, Watched{session, std::move(process->pidfd)});
  });
}

void AttachServer::forget(SessionId session) {
  run_on_thread([this, session] {
    const auto key = by_session_.find(session.value());
    if (key != by_session_.end()) {
      const auto found = connections_.find(key->second);
      if (found != connections_.end()) set_state(*found->second, Connection::State::kEnded);
    }
    ended(session);
  });
}

void AttachServer::ended(SessionId session) {
  registry_.remove(session);
  by_session_.erase(session.value());
  for (auto watched = watched_.begin(); watched != watched_.end();) {
    watched = watched->second.session == session ? watched_.erase(watched) : std::next(watched);
  }
}

void AttachServer::answer(Connection& connection, uint32_t request, const absl::Status& status) {
  attach::Answer body;
  body.status = static_cast<uint32_t>(status.code());
  body.error = error_index(status);
  body.retry_after_ms = static_cast<uint64_t>(retry_after_ms(status));
  // Both format texts fit; anything longer is cut rather than lost.
  const std::string message(status.message().substr(0, attach::kMessageBytesMax - 1024));
  body.message_bytes = static_cast<uint32_t>(message.size());
  Outgoing outgoing;
  outgoing.bytes = MessageBuilder(attach::Type::kAnswer, request, body).tail(message).take();
  send(connection, std::move(outgoing));
}

void AttachServer::send(Connection& connection, Outgoing message) {
  connection.waiting.push_back(std::move(message));
  flush(connection);
}

void AttachServer::flush(Connection& connection) {
  const auto close_later = [this, key = connection.key] { run_on_thread([this, key] { close_connection(key); }); };
  while (!connection.waiting.empty()) {
    const Outgoing& message = connection.waiting.front();
    switch (send_datagram(connection.socket.get(), message.bytes, message.fds)) {
      case SendResult::kSent: connection.waiting.pop_front(); continue;
      case SendResult::kGone:
        connection.waiting.clear();
        close_later();
        return;
      case SendResult::kWouldBlock: break;
    }
    if (static_cast<int64_t>(connection.waiting.size()) > options_.messages_waiting_max) {
      log_.write(LogLevel::kWarning, "client_not_reading",
                 {{"session", absl::StrCat(connection.session.value())}, {"waiting", absl::StrCat(connection.waiting.size())}});
      connection.waiting.clear();
      close_later();
      return;
    }
    watch_fd(connection.socket.get(), socket_tag(connection.key), EPOLLIN | EPOLLOUT);
    return;
  }
  if (connections_.count(connection.key) > 0) watch_fd(connection.socket.get(), socket_tag(connection.key), EPOLLIN);
  if (connection.closing) close_later();
}

void AttachServer::close_connection(uint64_t key) {
  const auto found = connections_.find(key);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  const bool silent = connection.state == Connection::State::kAttached;
  const bool ending = connection.state == Connection::State::kEnding;  // if that end fails, death is still seen
  if (silent) (void)post_(SessionLost{connection.session});
  if (silent || ending || connection.state == Connection::State::kAttaching) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.process.pidfd.get(), nullptr);
    const auto watched = watched_.emplace(key, Watched{connection.session, std::move(connection.process.pidfd)}).first;
    if (silent || ending) watch_fd(watched->second.pidfd.get(), pidfd_tag(key), EPOLLIN);  // while attaching: when its session is known
  }
  if (silent || ending) by_session_.erase(connection.session.value());
  set_state(connection, Connection::State::kAttaching);  // it waits for nothing any more
  connections_.erase(found);
  connections_now_.store(static_cast<int64_t>(connections_.size()), std::memory_order_relaxed);
}

void AttachServer::process_died(uint64_t key) {
  // A child may hold the dead process's socket open: its death is seen here all the same.
  close_connection(key);
  const auto watched = watched_.find(key);
  if (watched == watched_.end() || watched->second.session.is_none()) return;
  const SessionId session = watched->second.session;
  (void)post_(ProcessDied{session});
  log_.write(LogLevel::kInfo, "client_process_died", {{"session", absl::StrCat(session.value())}});
  ended(session);
}

}  // namespace needle::server
