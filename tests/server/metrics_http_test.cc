// The page that Prometheus reads, against callers that are slow, rude or too many.
#include "server/metrics_http.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <atomic>

#include "proto/errors.h"
#include "tests/free_port.h"

namespace needle::server {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class MetricsHttpTest : public ::testing::Test {
 protected:
  void start(MetricsHttpOptions options = {}) {
    options.address = "127.0.0.1:" + std::to_string(port_);
    auto started = MetricsHttp::start(options, [this] {
      ++pages_made_;
      return page_;
    });
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
  }
  FileDescriptor dial() const {
    FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port_));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    const timeval limit{10, 0};
    EXPECT_EQ(::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), 0);
    return socket;
  }
  static void say(const FileDescriptor& socket, const std::string& text) {
    EXPECT_EQ(::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  }
  // Until the server closes; what came so far where it doesn't within the limit.
  static std::string hear(const FileDescriptor& socket) {
    std::string text;
    char buffer[65536];
    for (ssize_t got = 0; (got = ::recv(socket.get(), buffer, sizeof buffer, 0)) > 0;) text.append(buffer, static_cast<size_t>(got));
    return text;
  }
  std::string get(const std::string& request = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") const {
    const FileDescriptor socket = dial();
    say(socket, request);
    return hear(socket);
  }

  const int port_ = testing::free_port();
  std::string page_ = "needle_up 1\n";
  std::atomic<int> pages_made_{0};
  std::unique_ptr<MetricsHttp> server_;
};

TEST_F(MetricsHttpTest, a_scrape_gets_the_page_as_it_is_now) {
  start();
  EXPECT_THAT(get(), AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("text/plain; version=0.0.4"), HasSubstr("Content-Length: 12\r\n"),
                           EndsWith("\r\n\r\nneedle_up 1\n")));
  EXPECT_THAT(get("GET /metrics?x=1 HTTP/1.0\n\n"), EndsWith("needle_up 1\n"));
  EXPECT_THAT(get("HEAD /metrics HTTP/1.1\r\n\r\n"), AllOf(HasSubstr("Content-Length: 12\r\n"), EndsWith("\r\n\r\n")));
  EXPECT_EQ(pages_made_, 3);
}

TEST_F(MetricsHttpTest, what_is_no_scrape_is_told_so_and_makes_no_page) {
  start();
  EXPECT_THAT(get("GET / HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(get("POST /metrics HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(get("\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(get(std::string("\x16\x03\x01", 3) + std::string(50, '\0') + "\n\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(get("GET /metrics HTTP/1.1\r\nX: " + std::string(20'000, 'x')), StartsWith("HTTP/1.1 431 "));
  EXPECT_EQ(pages_made_, 0);
}

// None of them ever times out here: only that they hold up nobody lets the scrape through.
TEST_F(MetricsHttpTest, four_hundred_half_open_connections_do_not_hold_up_a_scrape) {
  MetricsHttpOptions options;
  options.request_ms = options.answer_ms = 3'600'000;
  start(options);
  std::vector<FileDescriptor> half_open;
  for (int i = 0; i < 400; ++i) {
    half_open.push_back(dial());
    if (i % 2 == 0) say(half_open.back(), "GET /metr");
  }
  for (int i = 0; i < 3; ++i) EXPECT_THAT(get(), EndsWith("needle_up 1\n"));
}

TEST_F(MetricsHttpTest, a_caller_that_does_not_read_holds_up_nobody) {
  MetricsHttpOptions options;
  options.request_ms = options.answer_ms = 3'600'000;
  options.connections_max = 4;
  page_ = std::string(size_t{16} << 20, 'x');  // more than the kernel buffers
  start(options);
  std::vector<FileDescriptor> deaf;
  for (int i = 0; i < 6; ++i) {
    deaf.push_back(dial());
    say(deaf.back(), "GET /metrics HTTP/1.1\r\n\r\n");
  }
  EXPECT_GT(get().size(), page_.size());
}

TEST_F(MetricsHttpTest, half_a_request_is_waited_for_until_its_time_is_up) {
  MetricsHttpOptions options;
  options.request_ms = 200;
  start(options);
  const FileDescriptor half = dial();
  say(half, "GET /metrics HT");
  EXPECT_EQ(hear(half), "");
}

TEST_F(MetricsHttpTest, an_address_that_cannot_be_had_says_whose_fault_it_is) {
  start();
  const auto page = [] { return std::string(); };
  MetricsHttpOptions options;
  options.address = "127.0.0.1:" + std::to_string(port_);
  absl::Status taken = MetricsHttp::start(options, page).status();
  EXPECT_TRUE(is_error(taken, ErrorCode::kConflict)) << taken;
  EXPECT_THAT(std::string(taken.message()), AllOf(HasSubstr("listen.metrics"), HasSubstr(options.address)));
  options.address = "no-such-host.invalid:7421";
  absl::Status unknown = MetricsHttp::start(options, page).status();
  EXPECT_TRUE(is_error(unknown, ErrorCode::kInvalid)) << unknown;
  EXPECT_THAT(std::string(unknown.message()), AllOf(HasSubstr("listen.metrics"), HasSubstr("no-such-host.invalid"), HasSubstr("resolve")));
  options.address = "192.0.2.1:7421";  // TEST-NET: nobody's
  absl::Status not_ours = MetricsHttp::start(options, page).status();
  EXPECT_TRUE(is_error(not_ours, ErrorCode::kInvalid)) << not_ours;
  EXPECT_THAT(std::string(not_ours.message()), HasSubstr("no address of this machine"));
}

}  // namespace
}  // namespace needle::server
