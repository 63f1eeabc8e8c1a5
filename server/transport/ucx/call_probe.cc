#include "server/transport/ucx/call_probe.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>

#include "base/check.h"
#include "base/units.h"
#include "proto/errors.h"

namespace needle::server::ucx {
namespace {

constexpr unsigned kProbeMessage = 9;

struct ProbePage {
  uint64_t index = 0;
};

// Two workers with an endpoint to each other, driven by one thread.
class Pair {
 public:
  Pair(Context& context, const Clock& clock, const ProbeOptions& options)
      : context_(context),
        clock_(clock),
        options_(options),
        source_bytes_(static_cast<size_t>(options.pages * options.page_bytes)),
        target_bytes_(source_bytes_.size()) {}

  ~Pair() {
    close(to_reader_);
    close(to_source_);
    for (ucp_rkey_h key : keys_) {
      if (key != nullptr) ucp_rkey_destroy(key);  // null where open() failed
    }
  }

  absl::Status open() {
    for (auto* side : {&reader_, &source_}) {
      absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::create(context_);
      if (!worker.ok()) return worker.status();
      *side = std::move(*worker);
    }
    if (absl::Status status = reader_->receive(kProbeMessage, &Pair::on_page, this); !status.ok()) return status;
    const absl::StatusOr<SocketAddress> where = SocketAddress::parse(options_.host, 0);
    if (!where.ok()) return where.status();
    absl::StatusOr<std::unique_ptr<Listener>> listener = Listener::create(*source_, *where, &Pair::on_request, this);
    if (!listener.ok()) return listener.status();
    listener_ = std::move(*listener);
    absl::StatusOr<ucp_ep_h> endpoint = open_endpoint(*reader_, listener_->address(), &Pair::on_error, this);
    if (!endpoint.ok()) return endpoint.status();
    to_source_ = *endpoint;
    if (!progress_until([this] { return request_ != nullptr; }))
      return peer_error(status_, "the probe does not reach itself at " + listener_->address().text() +
                                     " (UCX wants an address that an interface carries)");
    endpoint = accept_endpoint(*source_, request_, &Pair::on_error, this);
    if (!endpoint.ok()) return endpoint.status();
    to_reader_ = *endpoint;
    // Keys and lanes are there once the connection is: each side sends the other nothing, and sees it done.
    for (ucp_ep_h ep : {to_source_, to_reader_}) {
      ucp_request_param_t param = request_param();
      note(ucp_ep_flush_nbx(ep, &param));
    }
    if (!progress_until([this] { return pending_ == 0; }))
      return peer_error(status_, "the probe does not connect to itself at " + listener_->address().text() +
                                     " (UCX wants an address that an interface carries)");
    for (auto [memory, bytes, from, key] : {std::tuple{&source_memory_, &source_bytes_, to_source_, &keys_[0]},
                                            std::tuple{&target_memory_, &target_bytes_, to_reader_, &keys_[1]}}) {
      absl::StatusOr<std::unique_ptr<MappedMemory>> mapped =
          MappedMemory::map(context_, bytes->data(), static_cast<int64_t>(bytes->size()));
      if (!mapped.ok()) return mapped.status();
      *memory = std::move(*mapped);
      const ucs_status_t status = ucp_ep_rkey_unpack(from, (*memory)->remote_key().data(), key);
      if (status != UCS_OK) return memory_error(status, "a remote key could not be read");
    }
    return absl::OkStatus();
  }

  std::vector<std::string> lanes() const { return lanes_of(to_source_); }

  // Moves the first `pages` once; false when that did not end in time or UCX said no.
  bool move(Call call, int64_t pages, std::string& failure) {
    arrived_ = 0;
    pending_ = 0;
    status_ = UCS_OK;
    const int64_t deadline_ns = clock_.now_ns() + options_.deadline_ms * kNanosPerMilli;
    for (int64_t page = 0; page < pages && status_ == UCS_OK; ++page) issue(call, page);
    const bool counts = call == Call::kAmEager || call == Call::kAmRendezvous;
    bool flushed = call != Call::kPut && call != Call::kPutVector;
    while (status_ == UCS_OK && (pending_ > 0 || (counts && arrived_ < pages) || !flushed)) {
      if (pending_ == 0 && !flushed) {
        flushed = true;
        ucp_request_param_t param = request_param();
        note(ucp_ep_flush_nbx(to_reader_, &param));
      }
      reader_->progress();
      source_->progress();
      if (clock_.now_ns() < deadline_ns) continue;
      failure = "not done after " + std::to_string(options_.deadline_ms) + " ms";
      return false;
    }
    if (status_ == UCS_OK) return true;
    failure = ucs_status_string(status_);
    return false;
  }

  void fill(uint64_t seed) {
    for (size_t i = 0; i + 8 <= source_bytes_.size(); i += 8) {
      const uint64_t word = (i + 1) * 0x9E3779B97F4A7C15ull ^ seed;
      std::memcpy(source_bytes_.data() + i, &word, 8);
    }
    std::memset(target_bytes_.data(), 0xA5, target_bytes_.size());
  }

  int64_t wrong_pages() const {
    int64_t wrong = 0;
    for (int64_t page = 0; page < options_.pages; ++page) {
      const size_t at = static_cast<size_t>(page * options_.page_bytes);
      const size_t there = static_cast<size_t>(target_of(page) * options_.page_bytes);
      wrong += std::memcmp(source_bytes_.data() + at, target_bytes_.data() + there, static_cast<size_t>(options_.page_bytes)) != 0;
    }
    return wrong;
  }

 private:
  // False: an error, or not in time.
  bool progress_until(const std::function<bool()>& condition) {
    const int64_t deadline_ns = clock_.now_ns() + options_.deadline_ms * kNanosPerMilli;
    while (status_ == UCS_OK && !condition()) {
      reader_->progress();
      source_->progress();
      if (clock_.now_ns() >= deadline_ns) status_ = UCS_ERR_TIMED_OUT;
    }
    return status_ == UCS_OK;
  }

  int64_t target_of(int64_t page) const { return options_.pages - 1 - page; }
  std::byte* source_page(int64_t page) { return source_bytes_.data() + page * options_.page_bytes; }
  std::byte* target_page(int64_t page) { return target_bytes_.data() + target_of(page) * options_.page_bytes; }

  ucp_request_param_t request_param() {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = &Pair::on_done;
    param.user_data = this;
    return param;
  }

  void note(ucs_status_ptr_t request) {
    if (UCS_PTR_IS_ERR(request)) {
      status_ = UCS_PTR_STATUS(request);
    } else if (request != nullptr) {
      ++pending_;
    }
  }

  void issue(Call call, int64_t page) {
    const size_t bytes = static_cast<size_t>(options_.page_bytes);
    ucp_request_param_t param = request_param();
    switch (call) {
      case Call::kGet:
        return note(ucp_get_nbx(to_source_, target_page(page), bytes, reinterpret_cast<uint64_t>(source_page(page)), keys_[0], &param));
      case Call::kPut:
        return note(ucp_put_nbx(to_reader_, source_page(page), bytes, reinterpret_cast<uint64_t>(target_page(page)), keys_[1], &param));
      case Call::kPutVector: {
        for (size_t i = 0; i < vector_.size(); ++i) {
          vector_[i] = {source_page(page) + i * bytes / vector_.size(), bytes / vector_.size()};
        }
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
        param.datatype = UCP_DATATYPE_IOV;
        note(ucp_put_nbx(to_reader_, vector_.data(), vector_.size(), reinterpret_cast<uint64_t>(target_page(page)), keys_[1], &param));
        // The vector must stay until the request is done: one at a time.
        progress_until([this] { return pending_ == 0; });
        return;
      }
      case Call::kAmEager:
      case Call::kAmRendezvous: {
        headers_[static_cast<size_t>(page) % headers_.size()].index = static_cast<uint64_t>(page);
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = call == Call::kAmEager ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV;
        return note(ucp_am_send_nbx(to_reader_, kProbeMessage, &headers_[static_cast<size_t>(page) % headers_.size()], sizeof(ProbePage),
                                    source_page(page), bytes, &param));
      }
    }
  }

  void close(ucp_ep_h endpoint) {
    if (endpoint == nullptr) return;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    const ucs_status_ptr_t request = ucp_ep_close_nbx(endpoint, &param);
    if (request == nullptr || UCS_PTR_IS_ERR(request)) return;
    while (ucp_request_check_status(request) == UCS_INPROGRESS) {
      reader_->progress();
      source_->progress();
    }
    ucp_request_free(request);
  }

  static void on_request(ucp_conn_request_h request, void* self) { static_cast<Pair*>(self)->request_ = request; }
  static void on_error(void* self, ucp_ep_h, ucs_status_t status) { static_cast<Pair*>(self)->status_ = status; }

  static void on_done(void* request, ucs_status_t status, void* argument) {
    Pair* self = static_cast<Pair*>(argument);
    --self->pending_;
    if (status != UCS_OK) self->status_ = status;
    ucp_request_free(request);
  }

  static void on_data(void* request, ucs_status_t status, size_t, void* argument) {
    Pair* self = static_cast<Pair*>(argument);
    --self->pending_;
    ++self->arrived_;
    if (status != UCS_OK) self->status_ = status;
    ucp_request_free(request);
  }

  static ucs_status_t on_page(void* argument, const void* header, size_t header_bytes, void* data, size_t bytes,
                              const ucp_am_recv_param_t* param) {
    Pair* self = static_cast<Pair*>(argument);
    ProbePage page;
    NEEDLE_CHECK(header_bytes == sizeof page, "the probe hears another program");
    std::memcpy(&page, header, sizeof page);
    NEEDLE_CHECK(static_cast<int64_t>(page.index) < self->options_.pages, "the probe hears another program");
    if (static_cast<int64_t>(bytes) != self->options_.page_bytes) {
      self->status_ = UCS_ERR_MESSAGE_TRUNCATED;
      return UCS_OK;
    }
    std::byte* target = self->target_page(static_cast<int64_t>(page.index));
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
      std::memcpy(target, data, bytes);
      ++self->arrived_;
      return UCS_OK;
    }
    ucp_request_param_t receive{};
    receive.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    receive.cb.recv_am = &Pair::on_data;
    receive.user_data = self;
    const ucs_status_ptr_t request = ucp_am_recv_data_nbx(self->reader_->handle(), data, target, bytes, &receive);
    if (request == nullptr) ++self->arrived_;
    self->note(request);
    return UCS_INPROGRESS;
  }

  Context& context_;
  const Clock& clock_;
  const ProbeOptions options_;
  std::vector<std::byte> source_bytes_;
  std::vector<std::byte> target_bytes_;
  // Before the workers, so that they outlive what UCX may still do with them.
  std::unique_ptr<MappedMemory> source_memory_;
  std::unique_ptr<MappedMemory> target_memory_;
  std::unique_ptr<Worker> reader_;
  std::unique_ptr<Worker> source_;
  std::unique_ptr<Listener> listener_;
  ucp_conn_request_h request_ = nullptr;
  ucp_ep_h to_source_ = nullptr;
  ucp_ep_h to_reader_ = nullptr;
  std::array<ucp_rkey_h, 2> keys_{};
  std::array<ProbePage, 64> headers_{};
  std::array<ucp_dt_iov_t, 4> vector_{};
  int64_t pending_ = 0;
  int64_t arrived_ = 0;
  ucs_status_t status_ = UCS_OK;
};

bool is_choosable(Call call, const std::vector<std::string>& lanes) {
  return call == Call::kAmEager || (call == Call::kAmRendezvous && !is_on_this_host(lanes));
}

}  // namespace

bool is_host_only(const std::string& transport) {
  static constexpr const char* kNames[] = {"posix", "sysv", "cma", "xpmem", "knem", "self", "sm", "shm", "mm"};
  return std::any_of(std::begin(kNames), std::end(kNames), [&](const char* name) { return transport == name; });
}

bool is_on_this_host(const std::vector<std::string>& lanes) { return std::any_of(lanes.begin(), lanes.end(), is_host_only); }

bool reads_one_sidedly(const std::vector<std::string>& lanes) {
  static constexpr const char* kPrefixes[] = {"rc", "dc", "cuda_ipc", "cma", "xpmem", "knem"};
  return std::any_of(lanes.begin(), lanes.end(), [](const std::string& lane) {
    return std::any_of(std::begin(kPrefixes), std::end(kPrefixes), [&](const char* prefix) { return lane.rfind(prefix, 0) == 0; });
  });
}

absl::StatusOr<Call> choose_call(const std::vector<std::string>& lanes, const std::vector<CallResult>& results, std::string& reason) {
  const CallResult* best = nullptr;
  for (const CallResult& result : results) {
    if (!result.correct) continue;
    if (result.call == Call::kGet && reads_one_sidedly(lanes)) {
      reason = "the lanes read one-sidedly";
      return Call::kGet;
    }
    if (is_choosable(result.call, lanes) && (best == nullptr || result.gb_per_s > best->gb_per_s)) best = &result;
  }
  if (best != nullptr) {
    reason = is_on_this_host(lanes) ? "correct, and a stopped reader holds nothing of it" : "the faster correct active message";
    return best->call;
  }
  std::string table;
  for (const CallResult& result : results) {
    table += std::string(" ") + kCallNames[static_cast<size_t>(result.call)] + ": " + result.failure + ";";
  }
  return make_error(ErrorCode::kImpossible, "no UCX call moves pages rightly here:" + table + " choose other transports or another UCX");
}

absl::StatusOr<CallReport> probe_calls(Context& context, const Clock& clock, const Clock& processor_clock, const ProbeOptions& options) {
  NEEDLE_CHECK(options.pages > 0 && options.pages <= 64 && options.page_bytes > 0 && options.page_bytes % 32 == 0,
               "the probe's pages are its own");
  CallReport report;
  report.reach = options.reach;
  std::unique_ptr<Pair> pair;
  for (int i = 0; i < kCalls; ++i) {
    CallResult result;
    result.call = static_cast<Call>(i);
    if (pair == nullptr) {
      pair = std::make_unique<Pair>(context, clock, options);
      if (absl::Status status = pair->open(); !status.ok()) return status;
      report.lanes = pair->lanes();
    }
    // The first page connects and warms; then all are measured and compared.
    bool done = pair->move(result.call, 1, result.failure);
    if (done) {
      pair->fill(static_cast<uint64_t>(i) + 1);
      const int64_t start_ns = processor_clock.now_ns();
      done = pair->move(result.call, options.pages, result.failure);
      const int64_t used_ns = std::max<int64_t>(processor_clock.now_ns() - start_ns, 1);
      result.gb_per_s = static_cast<double>(options.pages * options.page_bytes) / static_cast<double>(used_ns);
    }
    if (done) {
      const int64_t wrong = pair->wrong_pages();
      if (wrong > 0) {
        result.failure =
            "reported success and wrote other bytes in " + std::to_string(wrong) + " of " + std::to_string(options.pages) + " pages";
      }
      result.correct = wrong == 0;
    } else {
      pair.reset();  // a call that fails costs its endpoints
    }
    report.results.push_back(std::move(result));
  }
  const absl::StatusOr<Call> chosen = choose_call(report.lanes, report.results, report.reason);
  if (!chosen.ok()) return chosen.status();
  report.chosen = *chosen;
  return report;
}

std::string describe(const CallReport& report) {
  std::string lanes;
  for (const std::string& lane : report.lanes) lanes += (lanes.empty() ? "" : "+") + lane;
  std::string text = report.reach + " (" + lanes + "): " + kCallNames[static_cast<size_t>(report.chosen)] + ", " + report.reason + ".";
  for (const CallResult& result : report.results) {
    char rate[48];
    std::snprintf(rate, sizeof rate, "%.2f GB/s of processor time", result.gb_per_s);
    text += std::string(" ") + kCallNames[static_cast<size_t>(result.call)] + "=" +
            (result.correct ? rate : "failed (" + result.failure + ")") + ";";
  }
  return text;
}

}  // namespace needle::server::ucx
