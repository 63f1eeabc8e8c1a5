#include "server/memory/descriptor_passing.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/receive_message.h"
#include "proto/attach.h"
#include "proto/errors.h"

namespace needle::server {

absl::StatusOr<sockaddr_un> unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("socket path '", path, "' is ", path.size(), " bytes; the limit is ",
                                                        sizeof(address.sun_path) - 1, ". Choose a shorter node.runtime_dir"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

SendResult send_datagram(int socket, std::span<const std::byte> bytes, std::span<const int> fds, bool wait) {
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::vector<char> control(fds.empty() ? 0 : CMSG_SPACE(fds.size() * sizeof(int)), 0);
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  for (;;) {
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT));
    if (sent >= 0) return SendResult::kSent;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == ENOBUFS ? SendResult::kWouldBlock : SendResult::kGone;
  }
}

ReceiveResult receive_datagram(int socket, size_t bytes_max, Datagram& datagram, bool wait) {
  datagram.bytes.resize(bytes_max);
  datagram.fds.clear();
  iovec part{datagram.bytes.data(), bytes_max};
  std::vector<char> control(CMSG_SPACE(attach::kFdsPerMessageMax * sizeof(int)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t size = receive_message(socket, message, MSG_CMSG_CLOEXEC | (wait ? 0 : MSG_DONTWAIT));
  if (size < 0 && errno == EAGAIN) return ReceiveResult::kWouldBlock;
  if (size < 0) return ReceiveResult::kGone;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      datagram.fds.emplace_back(fd);
    }
  }
  if (size == 0 || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) return ReceiveResult::kGone;
  datagram.bytes.resize(static_cast<size_t>(size));
  return ReceiveResult::kReceived;
}

absl::StatusOr<FileDescriptor> connect_seqpacket(const std::string& path) {
  absl::StatusOr<sockaddr_un> address = unix_address(path);
  if (!address.ok()) return address.status();
  FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.is_open() || ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) != 0) {
    return make_error(ErrorCode::kNotFound, absl::StrCat("nobody listens at ", path, ": ", std::strerror(errno)));
  }
  return socket;
}

absl::StatusOr<FileDescriptor> listen_seqpacket(const std::string& path) {
  absl::StatusOr<sockaddr_un> address = unix_address(path);
  if (!address.ok()) return address.status();
  if (connect_seqpacket(path).ok()) {
    return make_error(ErrorCode::kConflict, absl::StrCat("another process listens at ", path, "; choose another --instance"));
  }
  struct stat found {};
  if (::lstat(path.c_str(), &found) == 0) {
    if (!S_ISSOCK(found.st_mode)) {
      return make_error(ErrorCode::kInvalid,
                        absl::StrCat(path, " exists and is not a socket; remove it or choose another node.runtime_dir"));
    }
    ::unlink(path.c_str());  // left behind by a killed owner
  }
  FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // The folder or the umask keeps others out between bind and chmod.
  if (!socket.is_open() || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) != 0 ||
      ::chmod(path.c_str(), 0600) != 0 || ::listen(socket.get(), 128) != 0) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("cannot listen at ", path, ": ", std::strerror(errno)));
  }
  return socket;
}

}  // namespace needle::server
