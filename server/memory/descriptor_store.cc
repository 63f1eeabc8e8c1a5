#include "server/memory/descriptor_store.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "proto/errors.h"
#include "server/memory/descriptor_passing.h"
#include "server/memory/keeper.h"

namespace needle::server {

SystemdStore::SystemdStore(std::string notify_socket, std::string listen_pid, std::string listen_fds, std::string listen_names, Log& log)
    : socket_(std::move(notify_socket)), log_(log) {
  int64_t pid = 0;
  int count = 0;
  if (!absl::SimpleAtoi(listen_pid, &pid) || pid != ::getpid() || !absl::SimpleAtoi(listen_fds, &count)) return;
  const std::vector<std::string> names = absl::StrSplit(listen_names, ':');
  for (int i = 0; i < count && i < static_cast<int>(kKeptMax); ++i) {
    const int fd = 3 + i;  // SD_LISTEN_FDS_START
    if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) continue;
    const std::string name = i < static_cast<int>(names.size()) ? names[static_cast<size_t>(i)] : "";
    kept_.push_back({name, FileDescriptor(fd)});
  }
}

bool SystemdStore::send(const std::string& text, int fd) const {
  if (socket_.empty()) return false;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket_.size() >= sizeof(address.sun_path)) return false;
  std::memcpy(address.sun_path, socket_.data(), socket_.size());
  if (socket_[0] == '@') address.sun_path[0] = '\0';
  const socklen_t length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket_.size());
  FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket.is_open() || ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return false;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(text.data()), text.size());
  const std::span<const int> fds(&fd, fd >= 0 ? 1u : 0u);
  return send_datagram(socket.get(), bytes, fds, true) == SendResult::kSent;
}

void SystemdStore::keep(const std::string& name, int fd) {
  // A name may hold several descriptors there; the last one kept shall win.
  const bool sent = send(absl::StrCat("FDSTOREREMOVE=1\nFDNAME=", name), -1) && send(absl::StrCat("FDSTORE=1\nFDNAME=", name), fd);
  MutexLock hold(mutex_);
  if (!sent && healthy_) log_.write(LogLevel::kWarning, "keeper_lost", {{"store", "systemd"}, {"name", name}});
  healthy_ = healthy_ && sent;
}

void SystemdStore::drop(const std::string& name) { send(absl::StrCat("FDSTOREREMOVE=1\nFDNAME=", name), -1); }

std::vector<KeptDescriptor> SystemdStore::take_kept() { return std::move(kept_); }

bool SystemdStore::healthy() const {
  MutexLock hold(mutex_);
  return healthy_;
}

namespace {

KeeperMessage keeper_message(KeeperVerb verb, const std::string& name) {
  KeeperMessage message;
  message.verb = verb;
  NEEDLE_CHECK(name.size() < sizeof(message.name), "a kept descriptor's name fits its field");
  std::memcpy(message.name, name.data(), name.size());
  return message;
}

absl::StatusOr<FileDescriptor> connect_to_keeper(const std::string& path) {
  absl::StatusOr<FileDescriptor> socket = connect_seqpacket(path);
  if (!socket.ok()) return socket.status();
  ucred owner{};
  socklen_t size = sizeof(owner);
  if (::getsockopt(socket->get(), SOL_SOCKET, SO_PEERCRED, &owner, &size) != 0 || (owner.uid != ::geteuid() && owner.uid != 0)) {
    return make_error(ErrorCode::kWrongOwner,
                      absl::StrCat("the keeper at ", path, " runs as user ", owner.uid, "; it must be this daemon's user or root"));
  }
  return socket;
}

}  // namespace

absl::StatusOr<std::unique_ptr<KeeperStore>> KeeperStore::connect(const std::string& path, Log& log) {
  absl::StatusOr<FileDescriptor> socket = connect_to_keeper(path);
  if (!socket.ok()) return socket.status();
  return std::unique_ptr<KeeperStore>(new KeeperStore(path, *std::move(socket), log));
}

void KeeperStore::failed(const char* what, const std::string& name) {
  if (healthy_) log_.write(LogLevel::kWarning, "keeper_lost", {{"store", path_}, {"verb", what}, {"name", name}});
  healthy_ = false;
}

bool KeeperStore::put(const std::string& name, int fd) {
  const KeeperMessage message = keeper_message(KeeperVerb::kPut, name);
  const std::span<const int> fds(&fd, 1);
  return send_datagram(socket_.get(), std::as_bytes(std::span(&message, 1)), fds, true) == SendResult::kSent;
}

void KeeperStore::remember(const std::string& name, int fd) { held_[name] = FileDescriptor(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

void KeeperStore::keep(const std::string& name, int fd) {
  MutexLock hold(mutex_);
  remember(name, fd);
  if (!put(name, fd)) failed("put", name);
}

void KeeperStore::drop(const std::string& name) {
  const KeeperMessage message = keeper_message(KeeperVerb::kDrop, name);
  MutexLock hold(mutex_);
  held_.erase(name);
  if (send_datagram(socket_.get(), std::as_bytes(std::span(&message, 1)), {}, true) != SendResult::kSent) failed("drop", name);
}

void KeeperStore::tend() {
  MutexLock hold(mutex_);
  if (healthy_) {
    pollfd end{socket_.get(), 0, 0};  // a keeper says nothing unasked: only its end is waited for
    if (::poll(&end, 1, 0) != 0) failed("watch", "");
  }
  if (healthy_) return;
  absl::StatusOr<FileDescriptor> again = connect_to_keeper(path_);
  if (!again.ok()) return;  // the log has the loss, the facet and the gauge show it as long as it lasts
  socket_ = *std::move(again);
  for (const auto& [name, fd] : held_) {
    if (!put(name, fd.get())) return;
  }
  healthy_ = true;
  log_.write(LogLevel::kInfo, "keeper_found_again", {{"store", path_}, {"given", absl::StrCat(held_.size())}});
}

std::vector<KeptDescriptor> KeeperStore::take_kept() {
  const KeeperMessage ask = keeper_message(KeeperVerb::kList, "");
  std::vector<KeptDescriptor> kept;
  MutexLock hold(mutex_);
  if (send_datagram(socket_.get(), std::as_bytes(std::span(&ask, 1)), {}, true) != SendResult::kSent) {
    failed("list", "");
    return kept;
  }
  for (;;) {
    Datagram datagram;
    KeeperMessage entry;
    if (receive_datagram(socket_.get(), sizeof(KeeperMessage) + 1, datagram, true) != ReceiveResult::kReceived ||
        datagram.bytes.size() != sizeof(entry)) {
      failed("list", "");
      return kept;
    }
    std::memcpy(&entry, datagram.bytes.data(), sizeof(entry));
    if (entry.verb == KeeperVerb::kEnd) return kept;
    if (entry.verb != KeeperVerb::kEntry || datagram.fds.size() != 1) continue;
    entry.name[sizeof(entry.name) - 1] = '\0';
    remember(entry.name, datagram.fds[0].get());
    kept.push_back({entry.name, std::move(datagram.fds[0])});
  }
}

bool KeeperStore::healthy() const {
  MutexLock hold(mutex_);
  return healthy_;
}

}  // namespace needle::server
