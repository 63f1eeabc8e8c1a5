// The bare UCX loop: the ceiling that a ship is measured against.
//
// Two processes on one host, each with one memfd of `--pages` pages. One UCP call moves page after page, the window kept
// full, and nothing else happens: no tickets, no checksums, no core. What the transport reaches is quoted as a share of it.
//
// What must stay true:
//  1. Call, page size, memfd footprint and rotation are those of the ship. Source page i goes to target page (i x step)
//     mod pages, with a step that is odd and far, so that neither side streams through its cache.
//  2. The clock runs on the receiving side, from the first page to the last, after one unmeasured round.
//  3. Rates mean little on a machine with other work, since both sides spin: processor time a GB is printed beside.
//  4. With --verify every arrived page is compared with what the source wrote (outside the measured time).
//
// UCX is steered by its own UCX_ variables, set by whoever starts the program; the two that lanes in shared memory need
// together with error handling are set here, because the transport sets them too.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/clock.h"
#include "tests/bench/bench_process.h"

namespace {

using namespace needle::bench;

enum class Call { kAmEager, kAmRendezvous, kGet, kPut };

struct Settings {
  Call call = Call::kAmEager;
  int64_t page_bytes = 1'165'824;  // V4-Flash with bf16 index-K
  int64_t pages = 440;             // 513 MB a side
  int64_t message_bytes = 0;       // 0: one message a page
  int64_t window = 8;              // messages
  int64_t rounds = 4;              // measured passes over the footprint
  bool verify = false;
  bool pin = true;
  bool print_lanes = false;
};

struct MessageHeader {
  uint64_t target_page = 0;
  uint64_t offset = 0;
};

struct Invitation {  // what each side tells the other before the first byte
  uint64_t base = 0;
  uint64_t address_bytes = 0;
  uint64_t rkey_bytes = 0;
};

void check_ok(ucs_status_t status, const char* what) {
  if (status == UCS_OK) return;
  std::fprintf(stderr, "ucx_loop_bench: %s: %s\n", what, ucs_status_string(status));
  std::exit(1);
}

uint64_t word_of(uint64_t page, uint64_t position) { return (page + 1) * 0x9E3779B97F4A7C15ull ^ position; }

class Side {
 public:
  Side(const Settings& settings, int channel, bool source) : settings_(settings), channel_(channel) {
    bytes_ = settings.page_bytes * settings.pages;
    const int fd = memfd_create("ucx_loop_bench", MFD_CLOEXEC);
    NEEDLE_CHECK(fd >= 0 && fallocate(fd, 0, 0, bytes_) == 0, "no memory for the footprint");
    void* mapped = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEEDLE_CHECK(mapped != MAP_FAILED, "the footprint cannot be mapped");
    close(fd);
    base_ = static_cast<std::byte*>(mapped);
    if (source) {
      for (int64_t page = 0; page < settings.pages; ++page) {
        auto* words = reinterpret_cast<uint64_t*>(base_ + page * settings.page_bytes);
        for (int64_t i = 0; i < settings.page_bytes / 8; ++i) words[i] = word_of(page, i);
      }
    } else {
      std::memset(base_, 0, static_cast<size_t>(bytes_));
    }

    setenv("UCX_POSIX_ERROR_HANDLING", "y", 0);
    setenv("UCX_SYSV_ERROR_HANDLING", "y", 0);
    ucp_config_t* config = nullptr;
    check_ok(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_AM | UCP_FEATURE_RMA;
    check_ok(ucp_init(&params, config, &context_), "ucp_init");
    ucp_config_release(config);
    ucp_worker_params_t worker_params{};
    worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
    check_ok(ucp_worker_create(context_, &worker_params, &worker_), "ucp_worker_create");

    ucp_mem_map_params_t map{};
    map.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
    map.address = base_;
    map.length = static_cast<size_t>(bytes_);
    check_ok(ucp_mem_map(context_, &map, &memory_), "ucp_mem_map");
    exchange();
  }

  ~Side() {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    wait(ucp_ep_close_nbx(endpoint_, &param));
    if (remote_key_ != nullptr) ucp_rkey_destroy(remote_key_);
    ucp_mem_unmap(context_, memory_);
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
    munmap(base_, static_cast<size_t>(bytes_));
  }

  void print_lanes() const { ucp_ep_print_info(endpoint_, stderr); }
  void barrier() {
    const char token = 'x';
    write_all(channel_, &token, 1);
    for (;;) {  // the other side may need our progress to get there
      ucp_worker_progress(worker_);
      pollfd ready{channel_, POLLIN, 0};
      if (::poll(&ready, 1, 0) == 1) break;
    }
    char answer = 0;
    read_all(channel_, &answer, 1);
  }

  int64_t messages_a_round() const { return settings_.pages * parts(); }

  // The side that calls UCP's function: source of AM and put, reader of get.
  void drive(int64_t messages) {
    for (int64_t i = 0; i < messages; ++i) {
      while (outstanding_ >= settings_.window) ucp_worker_progress(worker_);
      issue(i % messages_a_round());
    }
    while (outstanding_ > 0) ucp_worker_progress(worker_);
    if (settings_.call == Call::kPut) {
      ucp_request_param_t param{};
      wait(ucp_ep_flush_nbx(endpoint_, &param));
    }
  }

  void receive(int64_t messages) {
    arrived_ = 0;
    while (arrived_ < messages) ucp_worker_progress(worker_);
  }

  void expect_pages() {
    ucp_am_handler_param_t param{};
    param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    param.id = 1;
    param.cb = &Side::on_page;
    param.arg = this;
    check_ok(ucp_worker_set_am_recv_handler(worker_, &param), "ucp_worker_set_am_recv_handler");
  }

  int64_t wrong_pages() const {
    int64_t wrong = 0;
    for (int64_t page = 0; page < settings_.pages; ++page) {
      const auto* words = reinterpret_cast<const uint64_t*>(base_ + target_of(page) * settings_.page_bytes);
      for (int64_t i = 0; i < settings_.page_bytes / 8; ++i) {
        if (words[i] != word_of(page, i)) {
          ++wrong;
          break;
        }
      }
    }
    return wrong;
  }

 private:
  int64_t parts() const {
    return settings_.message_bytes == 0 ? 1 : (settings_.page_bytes + settings_.message_bytes - 1) / settings_.message_bytes;
  }
  int64_t target_of(int64_t page) const { return page * 167 % settings_.pages; }

  void exchange() {
    ucp_address_t* address = nullptr;
    size_t address_bytes = 0;
    check_ok(ucp_worker_get_address(worker_, &address, &address_bytes), "ucp_worker_get_address");
    void* key = nullptr;
    size_t key_bytes = 0;
    check_ok(ucp_rkey_pack(context_, memory_, &key, &key_bytes), "ucp_rkey_pack");
    const Invitation mine{reinterpret_cast<uint64_t>(base_), address_bytes, key_bytes};
    write_all(channel_, &mine, sizeof mine);
    write_all(channel_, address, address_bytes);
    write_all(channel_, key, key_bytes);
    ucp_worker_release_address(worker_, address);
    ucp_rkey_buffer_release(key);

    Invitation theirs;
    read_all(channel_, &theirs, sizeof theirs);
    std::vector<char> peer_address(theirs.address_bytes);
    std::vector<char> peer_key(theirs.rkey_bytes);
    read_all(channel_, peer_address.data(), peer_address.size());
    read_all(channel_, peer_key.data(), peer_key.size());
    remote_base_ = theirs.base;
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(peer_address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = [](void*, ucp_ep_h, ucs_status_t status) { check_ok(status, "the endpoint"); };
    check_ok(ucp_ep_create(worker_, &params, &endpoint_), "ucp_ep_create");
    check_ok(ucp_ep_rkey_unpack(endpoint_, peer_key.data(), &remote_key_), "ucp_ep_rkey_unpack");
  }

  void wait(ucs_status_ptr_t request) {
    if (request == nullptr) return;
    if (UCS_PTR_IS_ERR(request)) return;
    while (ucp_request_check_status(request) == UCS_INPROGRESS) ucp_worker_progress(worker_);
    ucp_request_free(request);
  }

  static void on_sent(void* request, ucs_status_t status, void* self) {
    check_ok(status, "a request");
    --static_cast<Side*>(self)->outstanding_;
    ucp_request_free(request);
  }

  static void on_data(void* request, ucs_status_t status, size_t, void* self) {
    check_ok(status, "a receive");
    ++static_cast<Side*>(self)->arrived_;
    ucp_request_free(request);
  }

  static ucs_status_t on_page(void* arg, const void* header, size_t header_bytes, void* data, size_t bytes,
                              const ucp_am_recv_param_t* param) {
    Side* self = static_cast<Side*>(arg);
    MessageHeader where;
    NEEDLE_CHECK(header_bytes == sizeof where, "not our message");
    std::memcpy(&where, header, sizeof where);
    std::byte* target = self->base_ + where.target_page * self->settings_.page_bytes + where.offset;
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
      std::memcpy(target, data, bytes);
      ++self->arrived_;
      return UCS_OK;
    }
    ucp_request_param_t receive{};
    receive.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    receive.cb.recv_am = &Side::on_data;
    receive.user_data = self;
    const ucs_status_ptr_t request = ucp_am_recv_data_nbx(self->worker_, data, target, bytes, &receive);
    if (UCS_PTR_IS_ERR(request)) check_ok(UCS_PTR_STATUS(request), "ucp_am_recv_data_nbx");
    if (request == nullptr) ++self->arrived_;
    return UCS_INPROGRESS;
  }

  void issue(int64_t message) {
    const int64_t page = message / parts();
    const int64_t part_bytes = settings_.message_bytes == 0 ? settings_.page_bytes : settings_.message_bytes;
    const int64_t offset = message % parts() * part_bytes;
    const auto bytes = static_cast<size_t>(std::min(part_bytes, settings_.page_bytes - offset));
    const int64_t target = target_of(page);
    const int64_t here = page * settings_.page_bytes + offset;
    const int64_t there = target * settings_.page_bytes + offset;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = &Side::on_sent;
    param.user_data = this;
    ucs_status_ptr_t request = nullptr;
    switch (settings_.call) {
      case Call::kGet: request = ucp_get_nbx(endpoint_, base_ + there, bytes, remote_base_ + here, remote_key_, &param); break;
      case Call::kPut: request = ucp_put_nbx(endpoint_, base_ + here, bytes, remote_base_ + there, remote_key_, &param); break;
      case Call::kAmEager:
      case Call::kAmRendezvous: {
        MessageHeader& header = headers_[next_header_++ % headers_.size()];
        header = {static_cast<uint64_t>(target), static_cast<uint64_t>(offset)};
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = settings_.call == Call::kAmEager ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV;
        request = ucp_am_send_nbx(endpoint_, 1, &header, sizeof header, base_ + here, bytes, &param);
        break;
      }
    }
    if (UCS_PTR_IS_ERR(request)) check_ok(UCS_PTR_STATUS(request), "a call");
    if (request != nullptr) ++outstanding_;
  }

  const Settings settings_;
  const int channel_;
  int64_t bytes_ = 0;
  std::byte* base_ = nullptr;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_mem_h memory_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  ucp_rkey_h remote_key_ = nullptr;
  uint64_t remote_base_ = 0;
  int64_t outstanding_ = 0;
  int64_t arrived_ = 0;
  // A header must stay valid until its request completes (no UCP_AM_SEND_FLAG_COPY_HEADER before 1.14).
  std::vector<MessageHeader> headers_ = std::vector<MessageHeader>(4096);
  size_t next_header_ = 0;
};

int run_source(const Settings& settings, int channel) {
  if (settings.pin) pin_to(1);
  Side side(settings, channel, true);
  if (settings.call == Call::kGet) {
    side.barrier();
    side.barrier();
    const double start_s = processor_seconds();
    side.barrier();
    const double used_s = processor_seconds() - start_s;
    write_all(channel, &used_s, sizeof used_s);
    return 0;
  }
  side.barrier();
  side.drive(side.messages_a_round());
  side.barrier();
  const double start_s = processor_seconds();
  side.drive(side.messages_a_round() * settings.rounds);
  const double used_s = processor_seconds() - start_s;
  side.barrier();
  write_all(channel, &used_s, sizeof used_s);
  return 0;
}

int run_reader(const Settings& settings, int channel, const char* name) {
  if (settings.pin) pin_to(0);
  Side side(settings, channel, false);
  const needle::SteadyClock clock;
  const bool counts = settings.call == Call::kAmEager || settings.call == Call::kAmRendezvous;
  if (counts) side.expect_pages();
  if (settings.print_lanes) side.print_lanes();
  side.barrier();
  const auto pass = [&](int64_t messages) {
    if (settings.call == Call::kGet) side.drive(messages);
    if (counts) side.receive(messages);
  };
  pass(side.messages_a_round());
  side.barrier();
  const double start_s = processor_seconds();
  const int64_t start_ns = clock.now_ns();
  pass(side.messages_a_round() * settings.rounds);
  if (settings.call == Call::kPut) side.barrier();  // the source's flush
  const double seconds = static_cast<double>(clock.now_ns() - start_ns) * 1e-9;
  const double reader_s = processor_seconds() - start_s;
  if (settings.call != Call::kPut) side.barrier();
  double source_s = 0;
  read_all(channel, &source_s, sizeof source_s);
  const double bytes = static_cast<double>(settings.page_bytes * settings.pages * settings.rounds);
  const int64_t wrong = settings.verify ? side.wrong_pages() : 0;
  unsigned major = 0;
  unsigned minor = 0;
  unsigned patch = 0;
  ucp_get_version(&major, &minor, &patch);
  std::printf(
      "ucx=%u.%u.%u call=%s page_bytes=%lld message_bytes=%lld pages=%lld window=%lld rounds=%lld seconds=%.3f "
      "gb_per_s=%.3f reader_cpu_ms_per_gb=%.0f source_cpu_ms_per_gb=%.0f wrong_pages=%s\n",
      major, minor, patch, name, static_cast<long long>(settings.page_bytes), static_cast<long long>(settings.message_bytes),
      static_cast<long long>(settings.pages), static_cast<long long>(settings.window), static_cast<long long>(settings.rounds), seconds,
      bytes / seconds * 1e-9, reader_s / bytes * 1e12, source_s / bytes * 1e12,
      settings.verify ? std::to_string(wrong).c_str() : "unchecked");
  return wrong == 0 ? 0 : 1;
}

bool parse(int argc, char** argv, Settings& settings, std::string& name) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const std::string key = argument.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    if (key == "--call") {
      name = value;
      if (value == "am-eager")
        settings.call = Call::kAmEager;
      else if (value == "am-rendezvous")
        settings.call = Call::kAmRendezvous;
      else if (value == "get")
        settings.call = Call::kGet;
      else if (value == "put")
        settings.call = Call::kPut;
      else
        return false;
    } else if (key == "--page-bytes")
      settings.page_bytes = std::atoll(value.c_str());
    else if (key == "--message-bytes")
      settings.message_bytes = std::atoll(value.c_str());
    else if (key == "--pages")
      settings.pages = std::atoll(value.c_str());
    else if (key == "--window")
      settings.window = std::atoll(value.c_str());
    else if (key == "--rounds")
      settings.rounds = std::atoll(value.c_str());
    else if (argument == "--verify")
      settings.verify = true;
    else if (argument == "--no-pin")
      settings.pin = false;
    else if (argument == "--lanes")
      settings.print_lanes = true;
    else
      return false;
  }
  return settings.page_bytes > 0 && settings.page_bytes % 8 == 0 && settings.pages > 0 && settings.window > 0 && settings.window <= 4096 &&
         settings.rounds > 0 && settings.message_bytes >= 0;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  std::string name = "am-eager";
  if (!parse(argc, argv, settings, name)) {
    std::fprintf(stderr,
                 "usage: ucx_loop_bench [--call=am-eager|am-rendezvous|get|put] [--page-bytes=N] [--message-bytes=N]\n"
                 "                      [--pages=N] [--window=N] [--rounds=N] [--verify] [--no-pin] [--lanes]\n");
    return 2;
  }
  int channel[2];
  NEEDLE_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0, "no socket pair");
  const pid_t source = fork();
  NEEDLE_CHECK(source >= 0, "no second process");
  if (source == 0) {
    close(channel[0]);
    return run_source(settings, channel[1]);
  }
  close(channel[1]);
  const int result = run_reader(settings, channel[0], name.c_str());
  int status = 0;
  waitpid(source, &status, 0);
  return result != 0 ? result : (WIFEXITED(status) ? WEXITSTATUS(status) : 1);
}
