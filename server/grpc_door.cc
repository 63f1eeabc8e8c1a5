#include "server/grpc_door.h"

#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/errors.h"
#include "server/listen_address.h"
#include "server/memory/descriptor_passing.h"

namespace needle::server {

namespace {

constexpr int kBacklog = 128;
constexpr int kAcceptLaterMs = 100;  // descriptors come back with the next connection that ends

absl::StatusOr<FileDescriptor> listen_unix(const std::string& path) {
  const absl::StatusOr<sockaddr_un> address = unix_address(path);
  if (!address.ok()) return address.status();
  ::unlink(path.c_str());  // the attach socket beside it proves that no other daemon lives here
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open() || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) != 0 ||
      ::chmod(path.c_str(), 0600) != 0 || ::listen(socket.get(), kBacklog) != 0) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("cannot listen at ", path, ": ", std::strerror(errno)));
  }
  return socket;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcDoor>> GrpcDoor::open(const std::string& unix_path, const std::string& tcp_address,
                                                         grpc::experimental::ExternalConnectionAcceptor& server, Log& log) {
  absl::StatusOr<std::vector<FileDescriptor>> listeners = listen_tcp_everywhere("listen.grpc", tcp_address);
  if (!listeners.ok()) return listeners.status();
  absl::StatusOr<FileDescriptor> local = listen_unix(unix_path);
  if (!local.ok()) return local.status();
  listeners->push_back(*std::move(local));
  FileDescriptor wake(::eventfd(0, EFD_CLOEXEC));
  if (!wake.is_open())
    return make_error(ErrorCode::kMemory, absl::StrCat("eventfd: ", std::strerror(errno), "; raise the limit of open files"));
  std::unique_ptr<GrpcDoor> door(new GrpcDoor(unix_path, *std::move(listeners), std::move(wake), server, log));
  door->thread_ = std::thread([raw = door.get()] { raw->serve(); });
  return door;
}

GrpcDoor::GrpcDoor(std::string unix_path, std::vector<FileDescriptor> listeners, FileDescriptor wake,
                   grpc::experimental::ExternalConnectionAcceptor& server, Log& log)
    : unix_path_(std::move(unix_path)), listeners_(std::move(listeners)), wake_(std::move(wake)), server_(server), log_(log) {}

GrpcDoor::~GrpcDoor() {
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
  ::unlink(unix_path_.c_str());
}

void GrpcDoor::serve() {
  bool resting = false;
  for (;;) {
    std::vector<pollfd> waits = {{wake_.get(), POLLIN, 0}};
    for (const FileDescriptor& listener : listeners_) waits.push_back({listener.get(), static_cast<short>(resting ? 0 : POLLIN), 0});
    (void)::poll(waits.data(), waits.size(), resting ? kAcceptLaterMs : -1);
    if (waits[0].revents != 0) return;
    resting = false;
    for (size_t i = 1; i < waits.size(); ++i) {
      if (waits[i].revents != 0 && !accept_one(waits[i].fd)) resting = true;
    }
  }
}

bool GrpcDoor::accept_one(int listener) {
  const auto full = [this](const std::string& cause) {
    if (!said_full_) log_.write(LogLevel::kError, "grpc_accept_failed", {{"cause", cause}});
    said_full_ = true;
    return false;
  };
  FileDescriptor socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.is_open()) {
    if (lacks_descriptors(errno)) return full(std::strerror(errno));
    return true;
  }
  rlimit files{RLIM_INFINITY, RLIM_INFINITY};
  (void)::getrlimit(RLIMIT_NOFILE, &files);
  // The kernel gives the lowest free number, so a high one says that the others are taken.
  if (static_cast<rlim_t>(socket.get()) + kDescriptorsLeft >= files.rlim_cur) {
    return full(absl::StrCat("fewer than ", kDescriptorsLeft, " of ", files.rlim_cur, " descriptors are free; callers are turned away"));
  }
  said_full_ = false;
  const int on = 1;  // refused by a Unix socket, which has no need of it
  (void)::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters caller;
  caller.listener_fd = listener;
  caller.fd = socket.release();
  server_.HandleNewConnection(&caller);
  return true;
}

}  // namespace needle::server
