// One datagram with descriptors, and its receipt.
//
// What must stay true:
//  1. Received descriptors are close-on-exec and owned at once: a malformed message leaks none.
//  2. Nothing is sent by halves: SOCK_SEQPACKET and SOCK_DGRAM take a message whole or not at all.
#pragma once

#include <sys/un.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/memory/file_descriptor.h"

namespace needle::server {

enum class SendResult { kSent, kWouldBlock, kGone };
SendResult send_datagram(int socket, std::span<const std::byte> bytes, std::span<const int> fds, bool wait = false);

struct Datagram {
  std::vector<std::byte> bytes;
  std::vector<FileDescriptor> fds;
};
enum class ReceiveResult { kReceived, kWouldBlock, kGone };
// A message longer than `bytes_max`, or with more descriptors than the kernel could hand over, counts as kGone.
ReceiveResult receive_datagram(int socket, size_t bytes_max, Datagram& datagram, bool wait = false);

// The address of a socket in the file system; INVALID where `path` is empty or longer than the kernel takes.
absl::StatusOr<sockaddr_un> unix_address(const std::string& path);

// A listening SOCK_SEQPACKET socket of mode 0600 at `path`. A stale file is replaced; a live owner is an error.
absl::StatusOr<FileDescriptor> listen_seqpacket(const std::string& path);
absl::StatusOr<FileDescriptor> connect_seqpacket(const std::string& path);

}  // namespace needle::server
