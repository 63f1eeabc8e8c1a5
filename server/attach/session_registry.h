// Which sessions exist at the edge: their secrets, processes and names. The attach socket and OpenSession enter them, RPC
// handlers look them up, metrics and the CLI show them.
//
// What must stay true:
//  1. A secret is 128 bits from the kernel, handed out once, compared in constant time, never logged.
//  2. An entry ends when the core ended the session; until then a silent client may still say Acknowledge.
//  3. Read counters of sessions that ended are added to a total that never falls.
//  4. A client's name is printable, whatever the client sent: one that protobuf refuses would blind every look at all sessions.
//
// Safe from any thread; the lock is never held across a call out of here.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/ids.h"
#include "base/mutex.h"
#include "proto/attach.h"
#include "proto/read_counters.h"
#include "server/memory/host_memory.h"
#include "server/messages.h"

namespace needle::server {

using SessionSecret = std::array<uint8_t, attach::kSecretBytes>;

struct SessionEntry {
  SessionId session;
  std::string client;  // what it called itself
  std::string pool_set;
  ProcessIdentity process;
  bool attached = false;  // over the socket; else a remote caller
};

// Sums of the in-process reads of all sessions, past and present (proto/read_counters.h).
struct ReadTotals {
  uint64_t reads = 0, queries = 0, entries_scored = 0, bytes_read = 0, nan_scores = 0, absent_entries = 0, stale_reads = 0,
           exact_rescans = 0, stores = 0, rows_stored = 0, rows_skipped = 0, latency_ns_sum = 0;
  std::array<uint64_t, attach::kReadLatencyBuckets> latency{};
};

absl::StatusOr<SessionSecret> make_secret();

// A caller's text as logs, protobuf's strings and terminals can show it: bytes other than printable ASCII become '?'.
std::string printable(absl::string_view text);

class SessionRegistry {
 public:
  // `counters` may be empty (remote callers have none).
  void add(SessionEntry entry, const SessionSecret& secret, std::unique_ptr<SharedPage> counters);
  void remove(SessionId session);  // unknown ones are fine: ends arrive from several sides

  // OK, or WRONG_OWNER without saying whether the session or the secret was wrong.
  absl::Status check(SessionId session, absl::string_view secret) const;

  std::vector<SessionEntry> entries() const;
  SessionEntry entry(SessionId session) const;  // session none when unknown
  ReadTotals read_totals() const;

 private:
  struct Row {
    SessionEntry entry;
    SessionSecret secret{};
    std::unique_ptr<SharedPage> counters;
  };
  static void add_counters(const SharedPage& page, ReadTotals& totals);

  mutable Mutex mutex_;
  std::map<uint64_t, Row> rows_ ABSL_GUARDED_BY(mutex_);
  ReadTotals ended_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace needle::server
