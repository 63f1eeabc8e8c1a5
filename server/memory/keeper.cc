#include "server/memory/keeper.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/memory/descriptor_passing.h"

namespace needle::server {

absl::StatusOr<std::unique_ptr<Keeper>> Keeper::listen(const std::string& path, Log& log) {
  absl::StatusOr<FileDescriptor> listener = listen_seqpacket(path);
  if (!listener.ok()) return listener.status();
  return std::unique_ptr<Keeper>(new Keeper(path, *std::move(listener), log));
}

Keeper::~Keeper() { ::unlink(path_.c_str()); }

void Keeper::run(int stop_fd) {
  for (;;) {
    std::vector<pollfd> waited = {{stop_fd, POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const auto& [fd, owned] : connections_) waited.push_back({fd, POLLIN, 0});
    if (::poll(waited.data(), waited.size(), -1) < 0 && errno != EINTR) return;
    if (waited[0].revents != 0) return;
    if (waited[1].revents != 0) {
      FileDescriptor connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      ucred peer{};
      socklen_t size = sizeof(peer);
      if (connection.is_open() && ::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) {
        if (peer.uid == ::geteuid() || peer.uid == 0) {
          const int fd = connection.get();
          connections_.emplace(fd, std::move(connection));
        } else {
          log_.write(LogLevel::kWarning, "keeper_refused", {{"uid", absl::StrCat(peer.uid)}});
        }
      }
    }
    for (size_t i = 2; i < waited.size(); ++i) {
      if (waited[i].revents != 0 && !serve(waited[i].fd)) connections_.erase(waited[i].fd);
    }
  }
}

bool Keeper::serve(int connection) {
  Datagram datagram;
  const ReceiveResult result = receive_datagram(connection, sizeof(KeeperMessage) + 1, datagram);
  if (result == ReceiveResult::kWouldBlock) return true;
  KeeperMessage message;
  if (result == ReceiveResult::kGone || datagram.bytes.size() != sizeof(message)) return false;
  std::memcpy(&message, datagram.bytes.data(), sizeof(message));
  message.name[sizeof(message.name) - 1] = '\0';
  if (message.magic != kKeeperMagic) return false;
  switch (message.verb) {
    case KeeperVerb::kPut:
      if (datagram.fds.size() != 1 || message.name[0] == '\0') return false;
      if (kept_.size() >= kKeptMax && kept_.count(message.name) == 0) {
        log_.write(LogLevel::kError, "keeper_full", {{"limit", absl::StrCat(kKeptMax)}, {"name", message.name}});
        return false;
      }
      kept_[message.name] = std::move(datagram.fds[0]);
      return true;
    case KeeperVerb::kDrop: kept_.erase(message.name); return true;
    case KeeperVerb::kList: return list(connection);
    default: return false;
  }
}

bool Keeper::list(int connection) {
  KeeperMessage entry;
  entry.verb = KeeperVerb::kEntry;
  for (const auto& [name, fd] : kept_) {
    std::memset(entry.name, 0, sizeof(entry.name));
    std::memcpy(entry.name, name.data(), std::min(name.size(), sizeof(entry.name) - 1));
    const int raw = fd.get();
    // Waiting is right: a daemon that starts reads on, and nobody else is served meanwhile that could be starved for long.
    if (send_datagram(connection, std::as_bytes(std::span(&entry, 1)), std::span(&raw, 1), true) != SendResult::kSent) return false;
  }
  entry = {};
  entry.verb = KeeperVerb::kEnd;
  return send_datagram(connection, std::as_bytes(std::span(&entry, 1)), {}, true) == SendResult::kSent;
}

}  // namespace needle::server
