// Who is at the other end of a socket, and a descriptor that tells when it has died.
//
// What must stay true:
//  1. A process is (pid, start time): a pid that was given to another process in between is never taken for the first.
//     The start time is read, the pidfd opened, and the start time read again; only equal readings count.
#pragma once

#include <sys/types.h>

#include "absl/status/statusor.h"
#include "server/memory/file_descriptor.h"
#include "server/messages.h"

namespace needle::server {

struct WatchedProcess {
  ProcessIdentity identity;
  FileDescriptor pidfd;  // readable once the process is dead
};

absl::StatusOr<WatchedProcess> watch_peer(int socket);
// A process known from before a restart: NOT_FOUND when it is gone or another one has its pid.
absl::StatusOr<WatchedProcess> watch_process(const ProcessIdentity& identity);
absl::StatusOr<int64_t> process_start_ticks(pid_t pid);

}  // namespace needle::server
