#include "server/transport/ucx/ucx_handles.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "proto/errors.h"

namespace needle::server::ucx {
namespace {

// Whether a UCX_TLS list takes this transport in. A name set for a transport that is not used would be warned of.
bool takes(const std::string& list, const char* transport) {
  if (list.empty() || list == "all") return true;
  const bool names = list.find(transport) != std::string::npos || list.find("sm") != std::string::npos ||
                     list.find("shm") != std::string::npos || list.find("mm") != std::string::npos;
  return list[0] == '^' ? !names : names;
}

// Without this, error handling of peers drops lanes in shared memory: 1 GB/s instead of 8 to 19 on one host.
void prepare_environment(const FabricSettings& settings) {
  std::string list = settings.transports;
  if (const char* operators = std::getenv("UCX_TLS"); list.empty() && operators != nullptr) list = operators;
  if (takes(list, "posix")) setenv("UCX_POSIX_ERROR_HANDLING", "y", 0);
  if (takes(list, "sysv")) setenv("UCX_SYSV_ERROR_HANDLING", "y", 0);
  setenv("UCX_TCP_CM_REUSEADDR", "y", 0);  // else a restart at a fixed port waits for the last one's connections to fade
#if defined(__SANITIZE_THREAD__)
  // UCX's hook of madvise crashes in the teardown of a thread under ThreadSanitizer.
  setenv("UCX_MEM_EVENTS", "n", 0);
#endif
}

absl::Status error_of(ErrorCode code, ucs_status_t status, const std::string& what) {
  return make_error(code, what + ": UCX " + library_version() + " says '" + ucs_status_string(status) + "'");
}

}  // namespace

std::string library_version() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned patch = 0;
  ucp_get_version(&major, &minor, &patch);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

absl::Status peer_error(ucs_status_t status, const std::string& what) { return error_of(ErrorCode::kPeerLost, status, what); }

absl::Status memory_error(ucs_status_t status, const std::string& what) { return error_of(ErrorCode::kMemory, status, what); }

absl::StatusOr<std::unique_ptr<Context>> Context::create(const FabricSettings& settings) {
  prepare_environment(settings);
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return memory_error(status, "UCX's configuration could not be read");
  // The reader pulls: under the other rendezvous schemes the source writes into the reader's pages.
  const std::pair<const char*, std::string> wanted[] = {
      {"TLS", settings.transports}, {"NET_DEVICES", settings.devices}, {"RNDV_SCHEME", "get_zcopy"}};
  for (const auto& [name, value] : wanted) {
    if (value.empty()) continue;
    status = ucp_config_modify(config, name, value.c_str());
    if (status == UCS_OK) continue;
    ucp_config_release(config);
    return memory_error(status, std::string("UCX refused ") + name + "=" + value);
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;
  ucp_context_h context = nullptr;
  status = ucp_init(&params, config, &context);
  ucp_config_release(config);
  if (status != UCS_OK) {
    return memory_error(status, "no UCX context with transports '" + settings.transports + "' on devices '" + settings.devices +
                                    "' (ucx_info -d lists what there is)");
  }
  return std::unique_ptr<Context>(new Context(context));
}

Context::~Context() { ucp_cleanup(context_); }

bool Context::reaches_device_memory() const {
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  if (ucp_context_query(context_, &attributes) != UCS_OK) return false;
  return (attributes.memory_types & (uint64_t{1} << UCS_MEMORY_TYPE_CUDA)) != 0;
}

absl::StatusOr<std::unique_ptr<Worker>> Worker::create(Context& context) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SINGLE;
  ucp_worker_h handle = nullptr;
  ucs_status_t status = ucp_worker_create(context.handle(), &params, &handle);
  if (status != UCS_OK) return memory_error(status, "no UCX worker");
  std::unique_ptr<Worker> worker(new Worker(handle));
  status = ucp_worker_get_efd(handle, &worker->event_fd_);
  if (status != UCS_OK) return memory_error(status, "a UCX worker has no event descriptor");
  return worker;
}

Worker::~Worker() { ucp_worker_destroy(worker_); }

bool Worker::arm() { return ucp_worker_arm(worker_) == UCS_OK; }

absl::Status Worker::receive(unsigned id, ucp_am_recv_callback_t callback, void* argument) {
  ucp_am_handler_param_t param{};
  param.field_mask =
      UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = id;
  param.flags = UCP_AM_FLAG_WHOLE_MSG;
  param.cb = callback;
  param.arg = argument;
  const ucs_status_t status = ucp_worker_set_am_recv_handler(worker_, &param);
  return status == UCS_OK ? absl::OkStatus() : memory_error(status, "UCX refused a message handler");
}

absl::StatusOr<std::unique_ptr<MappedMemory>> MappedMemory::map(Context& context, void* base, int64_t bytes) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = base;
  params.length = static_cast<size_t>(bytes);
  ucp_mem_h handle = nullptr;
  ucs_status_t status = ucp_mem_map(context.handle(), &params, &handle);
  if (status != UCS_OK) {
    return memory_error(
        status, "UCX could not register " + std::to_string(bytes) + " bytes (memlock limit, peer memory module or dma-buf support)");
  }
  std::unique_ptr<MappedMemory> memory(new MappedMemory(context.handle(), handle));
  void* key = nullptr;
  size_t key_bytes = 0;
  status = ucp_rkey_pack(context.handle(), handle, &key, &key_bytes);
  if (status != UCS_OK) return memory_error(status, "UCX gave no key for a registered chunk");
  memory->remote_key_.assign(static_cast<const char*>(key), key_bytes);
  ucp_rkey_buffer_release(key);
  return memory;
}

MappedMemory::~MappedMemory() { ucp_mem_unmap(context_, memory_); }

absl::StatusOr<SocketAddress> SocketAddress::parse(const std::string& host, int port) {
  SocketAddress address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
    address.bytes = sizeof *v4;
  } else if (inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
    address.bytes = sizeof *v6;
  } else {
    return make_error(ErrorCode::kInvalid, "'" + host + "' is no numeric IP address");
  }
  return address;
}

std::string SocketAddress::text() const {
  char host[INET6_ADDRSTRLEN] = "?";
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&storage);
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&storage);
  if (storage.ss_family == AF_INET6) {
    inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof host);
    return "[" + std::string(host) + "]:" + std::to_string(ntohs(v6->sin6_port));
  }
  inet_ntop(AF_INET, &v4->sin_addr, host, sizeof host);
  return std::string(host) + ":" + std::to_string(ntohs(v4->sin_port));
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::create(Worker& worker, const SocketAddress& where,
                                                           ucp_listener_conn_callback_t on_request, void* argument) {
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&where.storage);
  params.sockaddr.addrlen = where.bytes;
  params.conn_handler.cb = on_request;
  params.conn_handler.arg = argument;
  ucp_listener_h handle = nullptr;
  ucs_status_t status = ucp_listener_create(worker.handle(), &params, &handle);
  if (status != UCS_OK) {
    return memory_error(status, "UCX cannot listen on " + where.text() + " (is the address this host's, the port free?)");
  }
  std::unique_ptr<Listener> listener(new Listener(handle));
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  status = ucp_listener_query(handle, &attributes);
  if (status != UCS_OK) return memory_error(status, "UCX does not tell where it listens");
  listener->address_ = where;
  std::memcpy(&listener->address_.storage, &attributes.sockaddr, where.bytes);
  return listener;
}

Listener::~Listener() { ucp_listener_destroy(listener_); }

namespace {

absl::StatusOr<ucp_ep_h> create_endpoint(Worker& worker, ucp_ep_params_t params, ucp_err_handler_cb_t on_error, void* argument) {
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_error;
  params.err_handler.arg = argument;
  ucp_ep_h endpoint = nullptr;
  const ucs_status_t status = ucp_ep_create(worker.handle(), &params, &endpoint);
  if (status != UCS_OK) return peer_error(status, "no endpoint to the peer");
  return endpoint;
}

}  // namespace

absl::StatusOr<ucp_ep_h> open_endpoint(Worker& worker, const SocketAddress& peer, ucp_err_handler_cb_t on_error, void* argument) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_SOCK_ADDR | UCP_EP_PARAM_FIELD_FLAGS;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&peer.storage);
  params.sockaddr.addrlen = peer.bytes;
  return create_endpoint(worker, params, on_error, argument);
}

absl::StatusOr<ucp_ep_h> accept_endpoint(Worker& worker, ucp_conn_request_h request, ucp_err_handler_cb_t on_error, void* argument) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  return create_endpoint(worker, params, on_error, argument);
}

std::vector<std::string> lanes_of(ucp_ep_h endpoint) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* memory = open_memstream(&text, &size);
  if (memory == nullptr) return {};
  ucp_ep_print_info(endpoint, memory);
  std::fclose(memory);
  const std::string info(text, size);
  std::free(text);
  std::vector<std::string> lanes;  // "lane[0]:  1:sysv/memory.0 md[1] ..."
  for (size_t at = info.find("lane["); at != std::string::npos; at = info.find("lane[", at + 1)) {
    const size_t end = info.find('\n', at);
    const size_t slash = info.find('/', at);
    if (slash == std::string::npos || slash > end) continue;
    const size_t colon = info.rfind(':', slash);
    if (colon == std::string::npos || colon < at) continue;
    lanes.push_back(info.substr(colon + 1, slash - colon - 1));
  }
  return lanes;
}

}  // namespace needle::server::ucx
