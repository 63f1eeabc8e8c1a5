#include "server/metrics_http.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/units.h"
#include "proto/errors.h"
#include "server/listen_address.h"

namespace needle::server {

namespace {

constexpr int64_t kAcceptLaterMs = 100;  // descriptors come back with the next connection that ends

std::string answer_of(const char* status, const std::string& type, const std::string& body, bool head_only) {
  return absl::StrCat("HTTP/1.1 ", status, "\r\nContent-Type: ", type, "\r\nContent-Length: ", body.size(), "\r\nConnection: close\r\n\r\n",
                      head_only ? "" : body);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsHttp>> MetricsHttp::start(MetricsHttpOptions options, std::function<std::string()> page) {
  absl::StatusOr<FileDescriptor> listener = listen_tcp("listen.metrics", options.address);
  if (!listener.ok()) return listener.status();
  FileDescriptor wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.is_open())
    return make_error(ErrorCode::kMemory, absl::StrCat("eventfd: ", std::strerror(errno), "; raise the limit of open files"));
  std::unique_ptr<MetricsHttp> server(new MetricsHttp(std::move(options), std::move(page), *std::move(listener), std::move(wake)));
  server->thread_ = std::thread([raw = server.get()] { raw->serve(); });
  return server;
}

MetricsHttp::MetricsHttp(MetricsHttpOptions options, std::function<std::string()> page, FileDescriptor listener, FileDescriptor wake)
    : options_(std::move(options)), page_(std::move(page)), listener_(std::move(listener)), wake_(std::move(wake)) {}

MetricsHttp::~MetricsHttp() {
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
}

void MetricsHttp::serve() {
  for (;;) {
    int64_t until_ns = accept_again_ns_;
    std::vector<pollfd> waits = {{wake_.get(), POLLIN, 0}, {listener_.get(), static_cast<short>(accept_again_ns_ == 0 ? POLLIN : 0), 0}};
    for (const auto& [fd, connection] : connections_) {
      waits.push_back({fd, static_cast<short>(connection.answer.empty() ? POLLIN : POLLOUT), 0});
      if (until_ns == 0 || connection.deadline_ns < until_ns) until_ns = connection.deadline_ns;
    }
    const int64_t left_ms = until_ns == 0 ? -1 : std::max<int64_t>(div_ceil(until_ns - clock_.now_ns(), kNanosPerMilli), 0);
    (void)::poll(waits.data(), waits.size(), static_cast<int>(left_ms));
    if (waits[0].revents != 0) return;

    std::string page;  // made once a turn
    for (size_t i = 2; i < waits.size(); ++i) {
      if (waits[i].revents == 0) continue;
      Connection& connection = connections_.at(waits[i].fd);
      bool open = connection.answer.empty() ? read_request(connection) : write_answer(connection);
      if (open && connection.whole && connection.answer.empty()) {
        if (page.empty()) page = page_();
        connection.answer = answer_of("200 OK", "text/plain; version=0.0.4; charset=utf-8", page, connection.head_only);
      }
      if (open && !connection.answer.empty() && connection.sent == 0) {
        connection.deadline_ns = clock_.now_ns() + options_.answer_ms * kNanosPerMilli;
        open = write_answer(connection);
      }
      if (!open) connections_.erase(waits[i].fd);
    }
    const int64_t now_ns = clock_.now_ns();
    for (auto row = connections_.begin(); row != connections_.end();) {
      row = row->second.deadline_ns <= now_ns ? connections_.erase(row) : std::next(row);
    }
    if (accept_again_ns_ != 0 && accept_again_ns_ <= now_ns) accept_again_ns_ = 0;
    if (waits[1].revents != 0) accept_all(now_ns);
  }
}

void MetricsHttp::accept_all(int64_t now_ns) {
  for (;;) {
    FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.is_open()) {
      if (lacks_descriptors(errno)) {
        make_room();
        accept_again_ns_ = now_ns + kAcceptLaterMs * kNanosPerMilli;
      }
      return;
    }
    if (static_cast<int64_t>(connections_.size()) >= options_.connections_max) make_room();
    const int fd = socket.get();
    Connection& connection = connections_[fd];
    connection.socket = std::move(socket);
    connection.deadline_ns = now_ns + options_.request_ms * kNanosPerMilli;
    // A scraper sends its request with the connection: it is served in the next turn, before anybody can push it out.
  }
}

// The one whose time is up first goes, rather one that has not asked than one that is being answered.
void MetricsHttp::make_room() {
  const auto out = std::min_element(connections_.begin(), connections_.end(), [](const auto& a, const auto& b) {
    return std::make_pair(!a.second.answer.empty(), a.second.deadline_ns) < std::make_pair(!b.second.answer.empty(), b.second.deadline_ns);
  });
  if (out != connections_.end()) connections_.erase(out);
}

// A bad request has its answer when this returns.
bool MetricsHttp::read_request(Connection& connection) {
  char buffer[4096];
  const ssize_t got = ::recv(connection.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return false;
  connection.request.append(buffer, static_cast<size_t>(got));
  const auto refuse = [&connection](const char* status, const std::string& why) {
    connection.answer = answer_of(status, "text/plain; charset=utf-8", why + "\n", connection.head_only);
    return true;
  };
  if (connection.request.find("\r\n\r\n") == std::string::npos && connection.request.find("\n\n") == std::string::npos) {
    if (static_cast<int64_t>(connection.request.size()) < options_.request_bytes_max) return true;
    return refuse("431 Request Header Fields Too Large", absl::StrCat("a request has at most ", options_.request_bytes_max, " bytes"));
  }
  const std::vector<std::string> words = absl::StrSplit(connection.request.substr(0, connection.request.find_first_of("\r\n")), ' ');
  if (words.size() != 3 || !absl::StartsWith(words[2], "HTTP/")) return refuse("400 Bad Request", "this is no HTTP request");
  connection.head_only = words[0] == "HEAD";
  if (words[0] != "GET" && words[0] != "HEAD") return refuse("405 Method Not Allowed", "only GET and HEAD are answered");
  if (words[1].substr(0, words[1].find('?')) != "/metrics") return refuse("404 Not Found", "there is only /metrics");
  connection.whole = true;
  return true;
}

bool MetricsHttp::write_answer(Connection& connection) {
  while (connection.sent < connection.answer.size()) {
    const ssize_t sent = ::send(connection.socket.get(), connection.answer.data() + connection.sent,
                                connection.answer.size() - connection.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    connection.sent += static_cast<size_t>(sent);
  }
  // What the caller sent beyond its request is read off: a close over unread bytes would reset the connection under its answer.
  char rest[4096];
  for (int i = 0; i < 16 && ::recv(connection.socket.get(), rest, sizeof rest, MSG_DONTWAIT) > 0; ++i) {
  }
  return false;
}

}  // namespace needle::server
