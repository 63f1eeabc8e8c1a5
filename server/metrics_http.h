// One page of text over HTTP, for scrapers: GET /metrics and nothing else.
//
// What must stay true:
//  1. Nobody waits for a slow caller. One thread polls; a connection that sends nothing, half a request, or doesn't read its
//     answer costs a descriptor until its deadline and holds up no other.
//  2. Everything has a bound: connections (the one that has had the longest makes room), request bytes, time.
//  3. One request a connection, answered with Connection: close. Requests that are whole in one turn of the thread share one page, so
//     that a page that takes its time (a loop that does not answer) is made once for all who wait.
//
// A library's server with a thread for each connection was tried first: four hundred half-open connections keep any fixed
// number of threads busy until they time out, and a scrape waits behind them.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "server/memory/file_descriptor.h"

namespace needle::server {

struct MetricsHttpOptions {
  std::string address;            // HOST:PORT
  int64_t connections_max = 128;  // a scraper needs one
  int64_t request_ms = 5'000;     // to send a whole request: half of Prometheus' shortest usual scrape timeout
  int64_t answer_ms = 10'000;     // to read the answer
  int64_t request_bytes_max = 16'384;
};

class MetricsHttp {
 public:
  // `page` is called on the server's thread. INVALID: the address is none of this machine; CONFLICT: the port is taken.
  static absl::StatusOr<std::unique_ptr<MetricsHttp>> start(MetricsHttpOptions options, std::function<std::string()> page);
  ~MetricsHttp();

 private:
  struct Connection {
    FileDescriptor socket;
    std::string request;
    std::string answer;  // empty until the request is whole
    size_t sent = 0;
    int64_t deadline_ns = 0;
    bool whole = false;  // the request has come, and is a good one
    bool head_only = false;
  };
  MetricsHttp(MetricsHttpOptions options, std::function<std::string()> page, FileDescriptor listener, FileDescriptor wake);
  void serve();
  void accept_all(int64_t now_ns);
  void make_room();
  bool read_request(Connection& connection);  // false: close it
  bool write_answer(Connection& connection);  // false: close it

  const MetricsHttpOptions options_;
  const std::function<std::string()> page_;
  FileDescriptor listener_;
  FileDescriptor wake_;                    // written once, to stop
  SteadyClock clock_;                      // poll waits in it too
  std::map<int, Connection> connections_;  // by descriptor
  int64_t accept_again_ns_ = 0;            // 0: the listener is watched
  std::thread thread_;
};

}  // namespace needle::server
