// UCX's handles as owners, and the settings without which UCX does the wrong thing for us.
//
// What must stay true:
//  1. A Context outlives its Workers and MappedMemory; all of them end before main returns (1.22 aborted at exit once
//     when a worker still lived).
//  2. A Worker is used by one thread. A Context may be used by several: it is made for shared workers.
//  3. Endpoints are made with error handling of peers, always: without it a dead peer hangs its requests for ever.
//  4. Endpoints are connected through a listener, never by exchanged worker addresses: in 1.13.1 a peer that dies while
//     those connect aborts *this* process (ucp_request.c:684, "got REP message").
//
// Settings of UCX's transports go in by setenv() before the context, without overwriting what an operator set: in 1.13.1
// ucp_config_modify() of those returns success and does nothing. It does work for UCP's own: TLS, NET_DEVICES, RNDV_SCHEME.
#pragma once

#include <sys/socket.h>
#include <ucp/api/ucp.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace needle::server::ucx {

// "1.13.1", of the library that is loaded, which may be newer than the headers.
std::string library_version();

// A failed UCX call as our PEER_LOST, MEMORY or BUG, whichever its caller has to act on.
absl::Status peer_error(ucs_status_t status, const std::string& what);
absl::Status memory_error(ucs_status_t status, const std::string& what);

// Which transports UCX may use. Empty strings leave the choice to UCX and to UCX_TLS, UCX_NET_DEVICES.
struct FabricSettings {
  std::string transports;  // as UCX_TLS: "tcp", "tcp,posix,sysv", "^posix"
  std::string devices;     // as UCX_NET_DEVICES: "lo", "eth0", "mlx5_0:1"
};

class Context {
 public:
  // Changes the environment: before other threads run.
  static absl::StatusOr<std::unique_ptr<Context>> create(const FabricSettings& settings);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  ucp_context_h handle() const { return context_; }
  bool reaches_device_memory() const;  // this UCX was built with CUDA and found a driver

 private:
  explicit Context(ucp_context_h context) : context_(context) {}
  ucp_context_h context_;
};

class Worker {
 public:
  static absl::StatusOr<std::unique_ptr<Worker>> create(Context& context);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  ucp_worker_h handle() const { return worker_; }
  int event_fd() const { return event_fd_; }  // readable after arm() when progress has something to do

  bool progress() { return ucp_worker_progress(worker_) != 0; }
  // False when events came in meanwhile: progress again. True: wait on event_fd().
  bool arm();
  absl::Status receive(unsigned id, ucp_am_recv_callback_t callback, void* argument);

 private:
  explicit Worker(ucp_worker_h worker) : worker_(worker) {}
  ucp_worker_h worker_;
  int event_fd_ = -1;
};

// An IP address and port, copied between processes as it lies.
struct SocketAddress {
  sockaddr_storage storage{};
  uint32_t bytes = 0;

  static absl::StatusOr<SocketAddress> parse(const std::string& host, int port);  // numeric, IPv4 or IPv6
  std::string text() const;
};

// Where a worker is called. `on_request` runs inside the worker's progress and must pass every request to
// accept_endpoint or ucp_listener_reject.
class Listener {
 public:
  static absl::StatusOr<std::unique_ptr<Listener>> create(Worker& worker, const SocketAddress& where,
                                                          ucp_listener_conn_callback_t on_request, void* argument);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  ucp_listener_h handle() const { return listener_; }
  const SocketAddress& address() const { return address_; }  // with the port that it got

 private:
  explicit Listener(ucp_listener_h listener) : listener_(listener) {}
  ucp_listener_h listener_;
  SocketAddress address_;
};

// One registration of a run of memory that someone else owns.
class MappedMemory {
 public:
  static absl::StatusOr<std::unique_ptr<MappedMemory>> map(Context& context, void* base, int64_t bytes);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  ucp_mem_h handle() const { return memory_; }
  const std::string& remote_key() const { return remote_key_; }  // packed, for the peer's ucp_ep_rkey_unpack

 private:
  MappedMemory(ucp_context_h context, ucp_mem_h memory) : context_(context), memory_(memory) {}
  ucp_context_h context_;
  ucp_mem_h memory_;
  std::string remote_key_;
};

// Both return at once; a peer that is not there is told through `on_error`.
absl::StatusOr<ucp_ep_h> open_endpoint(Worker& worker, const SocketAddress& peer, ucp_err_handler_cb_t on_error, void* argument);
absl::StatusOr<ucp_ep_h> accept_endpoint(Worker& worker, ucp_conn_request_h request, ucp_err_handler_cb_t on_error, void* argument);

// The transports of an endpoint's lanes, as UCX names them: {"tcp"}, {"sysv", "posix"}, {"rc_mlx5"}. 1.13 has no query
// for it, so it is read off ucp_ep_print_info. Known only once the endpoint is connected: a message has come over it.
std::vector<std::string> lanes_of(ucp_ep_h endpoint);

}  // namespace needle::server::ucx
