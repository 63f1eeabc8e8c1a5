#include "server/listen_address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "proto/errors.h"
#include "server/daemon_options.h"

namespace needle::server {

namespace {

constexpr int kBacklog = 128;

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

absl::StatusOr<Addresses> resolve(const char* option, const std::string& address) {
  const absl::StatusOr<HostPort> parsed = parse_host_port(address);
  if (!parsed.ok()) return make_error(ErrorCode::kInvalid, absl::StrCat("option ", option, ": '", address, "' is not HOST:PORT"));
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* first = nullptr;
  const int failed = ::getaddrinfo(parsed->host.c_str(), absl::StrCat(parsed->port).c_str(), &hints, &first);
  if (failed != 0) {
    return make_error(ErrorCode::kInvalid,
                      absl::StrCat("option ", option, ": '", address, "': host '", parsed->host, "' does not resolve (",
                                   ::gai_strerror(failed), "); write an address, or a name that this machine knows"));
  }
  return Addresses(first, ::freeaddrinfo);
}

absl::Status not_ours(const char* option, const std::string& address, int error) {
  return make_error(ErrorCode::kInvalid, absl::StrCat("option ", option, ": cannot listen at '", address, "': ", std::strerror(error),
                                                      error == EADDRNOTAVAIL ? "; it is no address of this machine" : ""));
}

}  // namespace

absl::Status check_resolves(const char* option, const std::string& address) { return resolve(option, address).status(); }

absl::Status check_listen_address(const char* option, const std::string& address) {
  const absl::StatusOr<Addresses> found = resolve(option, address);
  if (!found.ok()) return found.status();
  int error = 0;
  for (const addrinfo* entry = found->get(); entry != nullptr; entry = entry->ai_next) {
    const FileDescriptor socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_storage any_port{};
    std::memcpy(&any_port, entry->ai_addr, entry->ai_addrlen);
    if (entry->ai_family == AF_INET) reinterpret_cast<sockaddr_in*>(&any_port)->sin_port = 0;
    if (entry->ai_family == AF_INET6) reinterpret_cast<sockaddr_in6*>(&any_port)->sin6_port = 0;
    if (socket.is_open() && ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&any_port), entry->ai_addrlen) == 0)
      return absl::OkStatus();
    error = errno;
  }
  return not_ours(option, address, error);
}

absl::StatusOr<std::vector<FileDescriptor>> listen_tcp_everywhere(const char* option, const std::string& address) {
  const absl::StatusOr<Addresses> found = resolve(option, address);
  if (!found.ok()) return found.status();
  std::vector<FileDescriptor> listeners;
  int error = 0;
  for (const addrinfo* entry = found->get(); entry != nullptr && error != EADDRINUSE; entry = entry->ai_next) {
    bool again = false;  // a hosts file may name one address twice
    for (const addrinfo* before = found->get(); before != entry; before = before->ai_next) {
      again = again || (before->ai_addrlen == entry->ai_addrlen && std::memcmp(before->ai_addr, entry->ai_addr, entry->ai_addrlen) == 0);
    }
    if (again) continue;
    FileDescriptor socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;
    if (socket.is_open()) (void)::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (socket.is_open() && ::bind(socket.get(), entry->ai_addr, entry->ai_addrlen) == 0 && ::listen(socket.get(), kBacklog) == 0) {
      listeners.push_back(std::move(socket));
    } else {
      error = errno;
    }
  }
  if (error == EADDRINUSE) {
    return make_error(ErrorCode::kConflict, absl::StrCat("option ", option, ": another process listens at '", address,
                                                         "'; choose another address or another --instance"));
  }
  if (listeners.empty()) return not_ours(option, address, error);
  return listeners;
}

absl::StatusOr<FileDescriptor> listen_tcp(const char* option, const std::string& address) {
  absl::StatusOr<std::vector<FileDescriptor>> listeners = listen_tcp_everywhere(option, address);
  if (!listeners.ok()) return listeners.status();
  FileDescriptor first = std::move(listeners->front());
  return first;
}

}  // namespace needle::server
