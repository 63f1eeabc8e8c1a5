// Who holds the memory's descriptors over the daemon's death: systemd's store, a keeper process, or nobody.
//
// A memfd lives as long as somebody has it open. The store is that somebody: at the next start it hands the same
// descriptors out again, and the daemon finds its sealed pages in them.
//
// What must stay true:
//  1. keep() and drop() never fail the caller: a store that cannot hold something says so in healthy() and the log, and
//     the daemon serves on. What was not kept is lost at a restart, and that is visible before it happens.
//  2. The store holds duplicates: closing the original changes nothing there.
//  3. Names are 1..60 of a-z 0-9 and dash; one descriptor a name, the last one kept wins.
//  4. A keeper that was lost (killed, restarted) gets everything again from tend(); until then healthy() says no.
//
// Safe from any thread.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/log.h"
#include "base/mutex.h"
#include "server/memory/file_descriptor.h"

namespace needle::server {

struct KeptDescriptor {
  std::string name;
  FileDescriptor fd;
};

class DescriptorStore {
 public:
  virtual ~DescriptorStore() = default;
  virtual void keep(const std::string& name, int fd) = 0;
  virtual void drop(const std::string& name) = 0;
  virtual std::vector<KeptDescriptor> take_kept() = 0;  // what survived; once, at start
  virtual std::string kind() const = 0;                 // "none", "systemd", "keeper PATH"
  virtual bool healthy() const = 0;
  virtual void tend() {}  // about once a second: notices a loss, and tries to make it good
};

class NoDescriptorStore final : public DescriptorStore {
 public:
  void keep(const std::string&, int) override {}
  void drop(const std::string&) override {}
  std::vector<KeptDescriptor> take_kept() override { return {}; }
  std::string kind() const override { return "none"; }
  bool healthy() const override { return true; }
};

// systemd's file descriptor store, spoken by hand: FDSTORE=1 datagrams to $NOTIFY_SOCKET; at start LISTEN_FDS and
// LISTEN_FDNAMES. It survives restart and crash of the service, not stop followed by start, and needs
// FileDescriptorStoreMax in the unit. systemd does not answer, so healthy() tells only whether the datagram left.
class SystemdStore final : public DescriptorStore {
 public:
  // `notify_socket`, `listen_pid`, `listen_fds`, `listen_names`: the environment's values, empty where unset.
  SystemdStore(std::string notify_socket, std::string listen_pid, std::string listen_fds, std::string listen_names, Log& log);
  void keep(const std::string& name, int fd) override;
  void drop(const std::string& name) override;
  std::vector<KeptDescriptor> take_kept() override;
  std::string kind() const override { return "systemd"; }
  bool healthy() const override;

  // Any other notification, such as READY=1; false when there is nobody to tell.
  bool notify(const std::string& text) const { return send(text, -1); }

 private:
  bool send(const std::string& text, int fd) const;

  const std::string socket_;
  std::vector<KeptDescriptor> kept_;
  Log& log_;
  mutable Mutex mutex_;
  bool healthy_ ABSL_GUARDED_BY(mutex_) = true;
};

// A client of `needled --keeper` (keeper.h).
class KeeperStore final : public DescriptorStore {
 public:
  // Fails when no keeper listens at `path`, or when it belongs to another user.
  static absl::StatusOr<std::unique_ptr<KeeperStore>> connect(const std::string& path, Log& log);
  void keep(const std::string& name, int fd) override;
  void drop(const std::string& name) override;
  std::vector<KeptDescriptor> take_kept() override;
  std::string kind() const override { return "keeper " + path_; }
  bool healthy() const override;
  void tend() override;

 private:
  KeeperStore(std::string path, FileDescriptor socket, Log& log) : path_(std::move(path)), log_(log), socket_(std::move(socket)) {}
  bool put(const std::string& name, int fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void remember(const std::string& name, int fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void failed(const char* what, const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string path_;
  Log& log_;
  mutable Mutex mutex_;
  FileDescriptor socket_ ABSL_GUARDED_BY(mutex_);
  bool healthy_ ABSL_GUARDED_BY(mutex_) = true;
  std::map<std::string, FileDescriptor> held_ ABSL_GUARDED_BY(mutex_);  // what a keeper that starts anew is to be given
};

}  // namespace needle::server
