// Where gRPC's callers come in: we accept, and hand each connection to the server.
//
// gRPC 1.51 (Debian 12, Ubuntu 24.04) closes a listener for good at the first accept that fails for want of a descriptor: a crowd
// of callers that say nothing would leave a daemon that nobody can reach any more. So gRPC never listens here.
//
// What must stay true:
//  1. Without a descriptor, callers wait at the door: the thread looks again later and does not spin.
//  2. Callers never take the last kDescriptorsLeft descriptors: chunks, clients that attach and links to peers need some.
//  3. The Unix socket's mode is 0600 before anybody can connect to it.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/log.h"
#include "server/memory/file_descriptor.h"

namespace grpc::experimental {
class ExternalConnectionAcceptor;
}

namespace needle::server {

class GrpcDoor {
 public:
  static constexpr int kDescriptorsLeft = 64;

  // `server` belongs to one that has started. A socket that was left behind at `unix_path` is replaced.
  static absl::StatusOr<std::unique_ptr<GrpcDoor>> open(const std::string& unix_path, const std::string& tcp_address,
                                                        grpc::experimental::ExternalConnectionAcceptor& server, Log& log);
  ~GrpcDoor();  // before the server's shutdown

 private:
  GrpcDoor(std::string unix_path, std::vector<FileDescriptor> listeners, FileDescriptor wake,
           grpc::experimental::ExternalConnectionAcceptor& server, Log& log);
  void serve();
  bool accept_one(int listener);  // false: nobody may come in for a moment

  const std::string unix_path_;
  const std::vector<FileDescriptor> listeners_;
  const FileDescriptor wake_;
  grpc::experimental::ExternalConnectionAcceptor& server_;
  Log& log_;
  std::thread thread_;
  bool said_full_ = false;
};

}  // namespace needle::server
