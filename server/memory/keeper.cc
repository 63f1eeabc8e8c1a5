#include "server/memory/keeper.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/errors.h"
#include "server/memory/descriptor_passing.h"

namespace needle::server {

namespace {

constexpr size_t kOwnDescriptors = 16;  // standard streams, listener, signals, and one that is being received
constexpr int kQueuedMax = 1024;        // messages that a socket holds, and some more
constexpr int kAcceptLaterMs = 100;     // descriptors come back with the next connection that ends

}  // namespace

absl::StatusOr<std::unique_ptr<Keeper>> Keeper::listen(const std::string& path, Log& log) {
  rlimit files{RLIM_INFINITY, RLIM_INFINITY};
  (void)::getrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_cur <= kKeeperConnectionsMax + kOwnDescriptors) {
    return make_error(ErrorCode::kMemory, absl::StrCat("the limit of open files is ", files.rlim_cur, "; a keeper takes ",
                                                       kKeeperConnectionsMax + kOwnDescriptors,
                                                       " and one for each chunk and the metadata; raise it (ulimit -n)"));
  }
  absl::StatusOr<FileDescriptor> listener = listen_seqpacket(path);
  if (!listener.ok()) return listener.status();
  const size_t room = std::min<size_t>(files.rlim_cur - kKeeperConnectionsMax - kOwnDescriptors, kKeptMax);
  return std::unique_ptr<Keeper>(new Keeper(path, *std::move(listener), room, log));
}

Keeper::~Keeper() { ::unlink(path_.c_str()); }

void Keeper::run(int stop_fd) {
  for (;;) {
    std::vector<pollfd> waited = {{stop_fd, POLLIN, 0}, {listener_.get(), static_cast<short>(resting_ ? 0 : POLLIN), 0}};
    for (const auto& [fd, connection] : connections_) waited.push_back({fd, POLLIN, 0});
    if (::poll(waited.data(), waited.size(), resting_ ? kAcceptLaterMs : -1) < 0 && errno != EINTR) {
      // No memory, or a limit below the descriptors that are open: to end here would lose what is held.
      log_.write(LogLevel::kError, "keeper_wait_failed", {{"cause", std::strerror(errno)}, {"again_in_ms", absl::StrCat(kAcceptLaterMs)}});
      if (::poll(waited.data(), 1, kAcceptLaterMs) > 0) return;
      continue;
    }
    if (waited[0].revents != 0) return;
    for (size_t i = 2; i < waited.size(); ++i) {
      const auto row = connections_.find(waited[i].fd);
      if (waited[i].revents != 0 && hear(row->first, row->second) == Heard::kEnd) connections_.erase(row);
    }
    answer_lists();
    resting_ = false;
    if (waited[1].revents != 0) accept_one();  // last, for it may give a number of `waited` to somebody else
  }
}

// One a turn: whoever speaks at once is heard before the next caller can take the place.
void Keeper::accept_one() {
  FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!socket.is_open()) {
    if (!lacks_descriptors(errno)) return;
    const int cause = errno;
    make_room();
    resting_ = true;  // poll would report the same caller again at once
    log_.write(LogLevel::kError, "keeper_accept_failed",
               {{"cause", std::strerror(cause)}, {"again_in_ms", absl::StrCat(kAcceptLaterMs)}, {"held", absl::StrCat(kept_.size())}});
    return;
  }
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return;
  if (peer.uid != ::geteuid() && peer.uid != 0) {
    log_.write(LogLevel::kWarning, "keeper_refused", {{"uid", absl::StrCat(peer.uid)}});
    return;
  }
  if (connections_.size() >= kKeeperConnectionsMax && !make_room()) {
    log_.write(LogLevel::kWarning, "keeper_refused", {{"pid", absl::StrCat(peer.pid)}, {"connections", absl::StrCat(connections_.size())}});
    return;
  }
  const timeval wait = {kListWaitMs / 1000, (kListWaitMs % 1000) * 1000};
  (void)::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
  const int fd = socket.get();
  connections_.emplace(fd, Connection{std::move(socket), accepted_++});
}

bool Keeper::make_room() {
  auto oldest = connections_.end();
  for (auto row = connections_.begin(); row != connections_.end(); ++row) {
    if (!row->second.has_spoken && (oldest == connections_.end() || row->second.number < oldest->second.number)) oldest = row;
  }
  if (oldest == connections_.end()) return false;
  connections_.erase(oldest);
  return true;
}

// One message, if there is one.
Keeper::Heard Keeper::hear(int fd, Connection& connection) {
  Datagram datagram;
  const ReceiveResult result = receive_datagram(fd, sizeof(KeeperMessage) + 1, datagram);
  if (result == ReceiveResult::kWouldBlock) return Heard::kNothing;
  KeeperMessage message;
  if (result == ReceiveResult::kGone || datagram.bytes.size() != sizeof(message)) return Heard::kEnd;
  std::memcpy(&message, datagram.bytes.data(), sizeof(message));
  message.name[sizeof(message.name) - 1] = '\0';
  if (message.magic != kKeeperMagic) return Heard::kEnd;
  connection.has_spoken = true;
  switch (message.verb) {
    case KeeperVerb::kPut:
      if (datagram.fds.size() != 1 || message.name[0] == '\0') return Heard::kEnd;
      if (kept_.size() >= kept_max_ && kept_.count(message.name) == 0) {
        log_.write(LogLevel::kError, "keeper_full", {{"limit", absl::StrCat(kept_max_)}, {"name", message.name}});
        return Heard::kEnd;
      }
      kept_[message.name] = std::move(datagram.fds[0]);
      return Heard::kMessage;
    case KeeperVerb::kDrop: kept_.erase(message.name); return Heard::kMessage;
    case KeeperVerb::kList: connection.wants_list = true; return Heard::kMessage;
    default: return Heard::kEnd;
  }
}

void Keeper::answer_lists() {
  const auto wants_list = [](const auto& row) { return row.second.wants_list; };
  if (std::none_of(connections_.begin(), connections_.end(), wants_list)) return;
  for (auto row = connections_.begin(); row != connections_.end();) {
    Heard heard = Heard::kMessage;
    for (int i = 0; i < kQueuedMax && heard == Heard::kMessage && !row->second.wants_list; ++i) heard = hear(row->first, row->second);
    row = heard == Heard::kEnd ? connections_.erase(row) : std::next(row);
  }
  for (auto row = connections_.begin(); row != connections_.end();) {
    const bool answered = !std::exchange(row->second.wants_list, false) || list(row->first);
    row = answered ? std::next(row) : connections_.erase(row);
  }
}

bool Keeper::list(int connection) {
  KeeperMessage entry;
  entry.verb = KeeperVerb::kEntry;
  for (const auto& [name, fd] : kept_) {
    std::memset(entry.name, 0, sizeof(entry.name));
    std::memcpy(entry.name, name.data(), std::min(name.size(), sizeof(entry.name) - 1));
    const int raw = fd.get();
    // Waiting is right: a daemon that starts reads on, and for one that does not the socket's own deadline ends the wait.
    if (send_datagram(connection, std::as_bytes(std::span(&entry, 1)), std::span(&raw, 1), true) != SendResult::kSent) return false;
  }
  entry = {};
  entry.verb = KeeperVerb::kEnd;
  return send_datagram(connection, std::as_bytes(std::span(&entry, 1)), {}, true) == SendResult::kSent;
}

}  // namespace needle::server
