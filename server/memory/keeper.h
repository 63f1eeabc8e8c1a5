// The keeper: a tiny process that holds a daemon's descriptors while no daemon runs. It maps nothing, links no CUDA and
// has no state but the descriptors; whoever restarts the daemon leaves it alone.
//
// Spoken over a SOCK_SEQPACKET Unix socket, one message a datagram:
//   PUT name + one descriptor   -> nothing
//   DROP name                   -> nothing
//   LIST                        -> one ENTRY name + one descriptor each, then END
//
// What must stay true:
//  1. Only the keeper's own user (and root) is served; anyone else's connection is closed.
//  2. At most kKeptMax descriptors are held, and no more than the limit of open files has room for beside the connections;
//     one more is refused by closing that connection, which the daemon reports.
//  3. A connection's end changes nothing: that is the moment the keeper exists for.
//  4. At most kKeeperConnectionsMax connections are open. One more, and a lack of descriptors, costs the oldest that has said
//     nothing its place; where all have spoken the newest is refused. The thread never spins on a caller it cannot take in.
//  5. A LIST speaks of everything that was said before it, by whomever: a daemon's last PUTs may still lie in its socket when the
//     next daemon asks.
//  6. A client that does not read its LIST is closed after kListWaitMs; nobody else, nor a signal, waits longer for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/log.h"
#include "server/memory/file_descriptor.h"

namespace needle::server {

inline constexpr uint32_t kKeeperMagic = 0x706B654Eu;
inline constexpr size_t kKeptMax = 4096;             // chunks of 1 GiB: 4 TiB
inline constexpr size_t kKeeperConnectionsMax = 64;  // one a daemon, and a few that come and go
inline constexpr int64_t kListWaitMs = 2'000;        // for the room of one entry
enum class KeeperVerb : uint32_t { kPut = 1, kDrop = 2, kList = 3, kEntry = 4, kEnd = 5 };
struct KeeperMessage {
  uint32_t magic = kKeeperMagic;
  KeeperVerb verb = KeeperVerb::kPut;
  char name[64] = {};  // zero-ended
};
static_assert(sizeof(KeeperMessage) == 72);

class Keeper {
 public:
  // Listens at `path`; fails when another keeper answers there.
  static absl::StatusOr<std::unique_ptr<Keeper>> listen(const std::string& path, Log& log);
  ~Keeper();

  // Serves until `stop_fd` becomes readable.
  void run(int stop_fd);
  size_t kept_max() const { return kept_max_; }
  size_t kept_count() const { return kept_.size(); }  // from run()'s thread, or after it

 private:
  Keeper(std::string path, FileDescriptor listener, size_t kept_max, Log& log)
      : path_(std::move(path)), listener_(std::move(listener)), kept_max_(kept_max), log_(log) {}
  struct Connection {
    FileDescriptor socket;
    uint64_t number = 0;  // in the order of accept
    bool has_spoken = false;
    bool wants_list = false;
  };
  enum class Heard { kNothing, kMessage, kEnd };  // kEnd: close it
  void accept_one();
  bool make_room();
  Heard hear(int fd, Connection& connection);
  void answer_lists();
  bool list(int connection);  // false: close it

  const std::string path_;
  FileDescriptor listener_;
  const size_t kept_max_;
  Log& log_;
  std::map<std::string, FileDescriptor> kept_;
  std::map<int, Connection> connections_;
  uint64_t accepted_ = 0;
  bool resting_ = false;  // out of descriptors: nobody is accepted for a moment
};

}  // namespace needle::server
