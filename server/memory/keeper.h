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
//  2. At most kKeptMax descriptors are held; one more is refused by closing that connection, which the daemon reports.
//  3. A connection's end changes nothing: that is the moment the keeper exists for.
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
inline constexpr size_t kKeptMax = 4096;  // chunks of 1 GiB: 4 TiB
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
  size_t kept_count() const { return kept_.size(); }  // from run()'s thread, or after it

 private:
  Keeper(std::string path, FileDescriptor listener, Log& log) : path_(std::move(path)), listener_(std::move(listener)), log_(log) {}
  bool serve(int connection);  // false: close it
  bool list(int connection);

  const std::string path_;
  FileDescriptor listener_;
  Log& log_;
  std::map<std::string, FileDescriptor> kept_;
  std::map<int, FileDescriptor> connections_;
};

}  // namespace needle::server
