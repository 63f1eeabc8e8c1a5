// A peer that speaks the wire by hand and says what no honest one would: pages twice, late, torn, of other requests.
// It is a bare UCX worker, progressed by the test's own thread.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "server/transport/ucx/reader.h"
#include "server/transport/ucx/ucx_handles.h"
#include "server/transport/ucx/wire.h"

namespace needle::server::ucx::testing {

class FakePeer {
 public:
  static constexpr uint64_t kInstance = 0xFA4E;

  FakePeer() {
    context_ = std::move(*Context::create({"tcp", "lo"}));
    worker_ = std::move(*Worker::create(*context_));
    listener_ = std::move(*Listener::create(*worker_, *SocketAddress::parse("127.0.0.1", 0), &FakePeer::on_request, this));
    NEEDLE_CHECK(worker_->receive(kHello, &FakePeer::on_hello, this).ok(), "no handler");
    NEEDLE_CHECK(worker_->receive(kFetch, &FakePeer::on_fetch, this).ok(), "no handler");
    NEEDLE_CHECK(worker_->receive(kCancel, &FakePeer::on_cancel, this).ok(), "no handler");
    NEEDLE_CHECK(worker_->receive(kPing, &FakePeer::on_ping, this).ok(), "no handler");
    NEEDLE_CHECK(worker_->receive(kWelcome, &FakePeer::on_welcome, this).ok(), "no handler");
    NEEDLE_CHECK(worker_->receive(kRefused, &FakePeer::on_refused, this).ok(), "no handler");
  }
  ~FakePeer() {
    listener_.reset();
    for (ucp_ep_h endpoint : endpoints_) {
      ucp_request_param_t param{};
      param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
      param.flags = UCP_EP_CLOSE_FLAG_FORCE;
      const ucs_status_ptr_t request = ucp_ep_close_nbx(endpoint, &param);
      if (!UCS_PTR_IS_PTR(request)) continue;
      while (ucp_request_check_status(request) == UCS_INPROGRESS) worker_->progress();
      ucp_request_free(request);
    }
  }

  std::string address() const {
    AddressHeader header;
    header.instance = kInstance;
    header.socket_bytes = listener_->address().bytes;
    return bytes_of(header) + std::string(reinterpret_cast<const char*>(&listener_->address().storage), header.socket_bytes);
  }
  void progress() {
    worker_->progress();
    for (ucp_conn_request_h request : std::exchange(requests_, {})) {
      endpoints_.push_back(*accept_endpoint(*worker_, request, &FakePeer::on_error, nullptr));
    }
  }
  void connect(const SocketAddress& peer) { endpoints_.push_back(*open_endpoint(*worker_, peer, &FakePeer::on_error, nullptr)); }
  void say(MessageId id, std::string header, std::string payload) {
    NEEDLE_CHECK(!endpoints_.empty(), "nobody to speak to");
    send_control(endpoints_.back(), id, std::move(header), std::move(payload), id == kHello);
  }

  struct Wanted {
    FetchHeader fetch;
    WantedPage page;
  };
  std::vector<HelloHeader> hellos;
  std::vector<Wanted> wanted;
  std::vector<CancelHeader> cancels;
  std::vector<RefusedHeader> refusals;
  std::vector<WelcomeHeader> welcomes;
  int64_t pings = 0;
  bool answers_pings = true;
  uint64_t instance = kInstance;

 private:
  static FakePeer* self(void* argument) { return static_cast<FakePeer*>(argument); }
  static void on_request(ucp_conn_request_h request, void* argument) { self(argument)->requests_.push_back(request); }
  static void on_error(void*, ucp_ep_h, ucs_status_t) {}
  static ucs_status_t on_hello(void* argument, const void* header, size_t, void*, size_t, const ucp_am_recv_param_t*) {
    HelloHeader hello;
    std::memcpy(&hello, header, sizeof hello);
    self(argument)->hellos.push_back(hello);
    self(argument)->say(kWelcome, bytes_of(WelcomeHeader{hello.link, self(argument)->instance}), "");
    return UCS_OK;
  }
  static ucs_status_t on_welcome(void* argument, const void* header, size_t, void*, size_t, const ucp_am_recv_param_t*) {
    WelcomeHeader welcome;
    std::memcpy(&welcome, header, sizeof welcome);
    self(argument)->welcomes.push_back(welcome);
    return UCS_OK;
  }
  static ucs_status_t on_fetch(void* argument, const void* header, size_t, void* data, size_t bytes, const ucp_am_recv_param_t*) {
    Wanted wanted;
    std::memcpy(&wanted.fetch, header, sizeof wanted.fetch);
    for (size_t at = 0; at < bytes; at += sizeof(WantedPage)) {
      std::memcpy(&wanted.page, static_cast<const char*>(data) + at, sizeof wanted.page);
      self(argument)->wanted.push_back(wanted);
    }
    return UCS_OK;
  }
  static ucs_status_t on_cancel(void* argument, const void* header, size_t, void*, size_t, const ucp_am_recv_param_t*) {
    CancelHeader cancel;
    std::memcpy(&cancel, header, sizeof cancel);
    self(argument)->cancels.push_back(cancel);
    return UCS_OK;
  }
  static ucs_status_t on_refused(void* argument, const void* header, size_t, void*, size_t, const ucp_am_recv_param_t*) {
    RefusedHeader refused;
    std::memcpy(&refused, header, sizeof refused);
    self(argument)->refusals.push_back(refused);
    return UCS_OK;
  }
  static ucs_status_t on_ping(void* argument, const void* header, size_t, void*, size_t, const ucp_am_recv_param_t*) {
    ++self(argument)->pings;
    LifeHeader ping;
    std::memcpy(&ping, header, sizeof ping);
    if (self(argument)->answers_pings) self(argument)->say(kPong, bytes_of(ping), "");
    return UCS_OK;
  }

  std::unique_ptr<Context> context_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Listener> listener_;
  std::vector<ucp_conn_request_h> requests_;
  std::vector<ucp_ep_h> endpoints_;
};

inline std::string page_header(const FetchHeader& fetch, uint32_t position, uint64_t offset = 0) {
  PageHeader header;
  header.link = fetch.link;
  header.ticket = fetch.ticket;
  header.attempt = fetch.attempt;
  header.part = fetch.part;
  header.position = position;
  header.offset = offset;
  return bytes_of(header);
}

}  // namespace needle::server::ucx::testing
