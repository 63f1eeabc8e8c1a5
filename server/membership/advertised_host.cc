#include "server/membership/advertised_host.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "proto/errors.h"
#include "server/daemon_options.h"

namespace needle::server {

absl::StatusOr<std::string> advertised_host(const std::string& advertise_address) {
  const absl::StatusOr<HostPort> parsed = parse_host_port(advertise_address);
  if (!parsed.ok())
    return make_error(ErrorCode::kInvalid,
                      absl::StrCat("the advertised address '", advertise_address, "' is ", std::string(parsed.status().message())));

  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* first = nullptr;
  const int failed = ::getaddrinfo(parsed->host.c_str(), nullptr, &hints, &first);
  if (failed != 0) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("the advertised host '", parsed->host, "' has no address (", gai_strerror(failed),
                                                        "); set listen.advertise to an address of this host that peers reach"));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> found(first, ::freeaddrinfo);
  const addrinfo* chosen = nullptr;
  for (const addrinfo* entry = first; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family == AF_INET || (entry->ai_family == AF_INET6 && chosen == nullptr)) chosen = entry;
    if (entry->ai_family == AF_INET) break;
  }
  char text[NI_MAXHOST] = "";
  if (chosen == nullptr || ::getnameinfo(chosen->ai_addr, chosen->ai_addrlen, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("the advertised host '", parsed->host,
                                                        "' has neither an IPv4 nor an IPv6 address; set listen.advertise"));
  }
  const std::string host = text;
  if (host == "0.0.0.0" || host == "::") {
    return make_error(ErrorCode::kInvalid, absl::StrCat("peers cannot reach the wildcard address ", advertise_address,
                                                        "; set listen.advertise to an address of this host that peers reach"));
  }
  return host;
}

bool is_loopback(const std::string& numeric_host) {
  in_addr v4{};
  if (::inet_pton(AF_INET, numeric_host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == IN_LOOPBACKNET;
  return numeric_host == "::1";
}

}  // namespace needle::server
