// Which UCX call moves pages: measured and checked at start, because calls differ tenfold between versions and fabrics,
// and one of them (1.13's put of a vector) reports success and writes other bytes.
//
// Two workers of this process move a few pages by each call, over the very lanes that a peer would get; the bytes are read
// back and compared. The rate is bytes over *processor* time of this thread, which does both sides' work: so a busy
// machine does not change the answer, and a fabric that moves bytes by itself looks as fast as it is.
//
// What must stay true:
//  1. A call is chosen only if every byte it moved was right.
//  2. The source never writes into a reader's memory: puts are measured to show what this UCX does, and never chosen.
//  3. Get is chosen where the lanes read one-sidedly (RDMA, CUDA), and nowhere else: where UCX imitates it in software,
//     the source's UCX reads whatever address the message names, also one that was unmapped since.
//  4. Over shared memory a page travels inside its message: in 1.13 a rendezvous with a stopped reader is not ended by a
//     forced close of its endpoint, and would hold the chunk until the reader wakes or dies.
//  5. choose_call is a pure function of what was measured.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "server/transport/ucx/ucx_handles.h"

namespace needle::server::ucx {

enum class Call : uint8_t {
  kAmRendezvous,  // the source offers a page by active message, the reader's receive brings it in place
  kAmEager,       // the page travels inside the active message, the reader copies it in place
  kGet,           // the reader reads the source's memory
  kPut,           // the source writes: measured, never chosen
  kPutVector,     // the same from a vector: wrong bytes in 1.13
};
inline constexpr int kCalls = 5;
inline constexpr const char* kCallNames[kCalls] = {"am-rendezvous", "am-eager", "get", "put", "put-vector"};

struct CallResult {
  Call call = Call::kAmEager;
  bool correct = false;
  double gb_per_s = 0;  // of processor time; both sides in one thread
  std::string failure;  // empty when correct
};

struct CallReport {
  std::string reach;  // "host": peers on this host; "network": all others
  std::vector<std::string> lanes;
  std::vector<CallResult> results;
  Call chosen = Call::kAmEager;
  std::string reason;  // why `chosen`
};

struct ProbeOptions {
  std::string reach;
  std::string host = "127.0.0.1";         // where the two workers meet
  int64_t page_bytes = int64_t{1} << 20;  // about a page of V4-Flash
  int64_t pages = 6;
  int64_t deadline_ms = 5'000;  // a call; what is slower is as bad as wrong
};

bool reads_one_sidedly(const std::vector<std::string>& lanes);
bool is_on_this_host(const std::vector<std::string>& lanes);  // any lane in shared memory
bool is_host_only(const std::string& transport);

// The best correct call, or IMPOSSIBLE with the table of what went wrong.
absl::StatusOr<Call> choose_call(const std::vector<std::string>& lanes, const std::vector<CallResult>& results, std::string& reason);

// Moves pages by every call. `processor_clock` gives this thread's processor time. Blocks for some tens of milliseconds.
absl::StatusOr<CallReport> probe_calls(Context& context, const Clock& clock, const Clock& processor_clock, const ProbeOptions& options);

// One line a call, for logs and the CLI.
std::string describe(const CallReport& report);

}  // namespace needle::server::ucx
