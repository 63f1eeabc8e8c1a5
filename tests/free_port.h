// A TCP port of the loopback for a server that a test is about to start.
//
// 1. Below the range that the kernel gives to outgoing connections and to bind(0) (32,768 and up by default): there, a
//    port seen free a moment ago may be anybody's by the time the server binds it.
// 2. Never one that this process was given before; processes start at places that their ids scatter.
#ifndef NEEDLE_TESTS_FREE_PORT_H_
#define NEEDLE_TESTS_FREE_PORT_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace needle::testing {

inline int free_port() {
  constexpr uint32_t kFirst = 10'000;
  constexpr uint32_t kCount = 20'000;
  static std::atomic<uint32_t> next{static_cast<uint32_t>(::getpid()) * 2'654'435'761u};
  for (uint32_t attempt = 0; attempt < kCount; ++attempt) {
    const uint32_t port = kFirst + next.fetch_add(1) % kCount;
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    const bool bound = ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    ::close(fd);
    if (bound) return static_cast<int>(port);
  }
  throw std::runtime_error("no port of the loopback between 10000 and 29999 is free");
}

}  // namespace needle::testing

#endif  // NEEDLE_TESTS_FREE_PORT_H_
