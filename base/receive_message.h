// recvmsg as both ends of the attach socket and the keeper's ends need it.
//
// What must stay true:
//  1. A signal (EINTR) is no answer: the call is made again.
//  2. ECONNRESET is said once, where the other end closed before it had read all of ours. What that end wrote before, such as
//     a refusal, is still to be had: the call is made again, once.
#pragma once

#include <sys/socket.h>

#include <cerrno>

namespace needle {

inline ssize_t receive_message(int socket, msghdr& message, int flags) {
  bool reset = false;
  for (;;) {
    const ssize_t got = ::recvmsg(socket, &message, flags);
    if (got >= 0) return got;
    if (errno == EINTR) continue;
    if (errno != ECONNRESET || reset) return got;
    reset = true;
  }
}

}  // namespace needle
