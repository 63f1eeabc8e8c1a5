// Addresses of this machine that an operator names: whether they resolve, whether they are ours, and sockets that listen there.
//
// INVALID names the option, its value and what to do where no state of other processes could help; CONFLICT is a port that
// another process has.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/memory/file_descriptor.h"

namespace needle::server {

// That the host resolves. `option` is for the message.
absl::Status check_resolves(const char* option, const std::string& address);
// That it resolves to an address of this machine. Its port is not looked at: the daemon may be running.
absl::Status check_listen_address(const char* option, const std::string& address);
// A listening, non-blocking TCP socket, at the first address that the host resolves to and this machine has.
absl::StatusOr<FileDescriptor> listen_tcp(const char* option, const std::string& address);
// One for each of them; never none.
absl::StatusOr<std::vector<FileDescriptor>> listen_tcp_everywhere(const char* option, const std::string& address);

}  // namespace needle::server
