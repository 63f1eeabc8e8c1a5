// The numeric IP address at which peers reach this daemon, made from the address that it tells them (HOST:PORT, the host
// a name or a number). Transports listen there and tell it to peers, who connect to it from other hosts.
//
// Blocks while a name is looked up: once, at start. A wildcard (0.0.0.0, [::]) is an address to listen at and no address to
// be reached at: INVALID, naming listen.advertise. Of a name with several addresses the first IPv4 one is taken, since UCX
// prefers that family too.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace needle::server {

absl::StatusOr<std::string> advertised_host(const std::string& advertise_address);
bool is_loopback(const std::string& numeric_host);

}  // namespace needle::server
