#include "server/attach/process_watch.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/errors.h"

namespace needle::server {

absl::StatusOr<int64_t> process_start_ticks(pid_t pid) {
  std::ifstream stream(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(stream, text);
  // The second field is the command in parentheses and may hold anything; field 22 counts from the last ')'.
  const size_t end = text.rfind(')');
  const std::vector<std::string> fields =
      end == std::string::npos ? std::vector<std::string>() : absl::StrSplit(text.substr(end + 1), ' ', absl::SkipEmpty());
  int64_t ticks = 0;
  if (fields.size() < 20 || !absl::SimpleAtoi(fields[19], &ticks)) {
    return make_error(ErrorCode::kNotFound, absl::StrCat("process ", pid, " has no readable /proc entry; is it in another pid namespace?"));
  }
  return ticks;
}

namespace {

absl::StatusOr<WatchedProcess> watch(pid_t pid, uint32_t uid) {
  absl::StatusOr<int64_t> before = process_start_ticks(pid);
  if (!before.ok()) return before.status();
  FileDescriptor pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // close-on-exec by itself
  if (!pidfd.is_open()) return make_error(ErrorCode::kNotFound, absl::StrCat("pidfd_open(", pid, "): ", std::strerror(errno)));
  absl::StatusOr<int64_t> after = process_start_ticks(pid);
  if (!after.ok() || *after != *before)
    return make_error(ErrorCode::kNotFound, absl::StrCat("process ", pid, " ended while it was looked at"));
  return WatchedProcess{{pid, *before, uid}, std::move(pidfd)};
}

}  // namespace

absl::StatusOr<WatchedProcess> watch_peer(int socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return make_error(ErrorCode::kBug, absl::StrCat("SO_PEERCRED: ", std::strerror(errno)));
  }
  if (peer.pid <= 0) {
    return make_error(ErrorCode::kWrongOwner,
                      "the client's process is not visible from here, so its death could not be seen: run both in one pid namespace");
  }
  return watch(peer.pid, peer.uid);
}

absl::StatusOr<WatchedProcess> watch_process(const ProcessIdentity& identity) {
  absl::StatusOr<WatchedProcess> found = watch(static_cast<pid_t>(identity.pid), identity.uid);
  if (found.ok() && found->identity.start_time_ticks != identity.start_time_ticks) {
    return make_error(ErrorCode::kNotFound, absl::StrCat("process ", identity.pid, " ended; another one has its pid now"));
  }
  return found;
}

}  // namespace needle::server
