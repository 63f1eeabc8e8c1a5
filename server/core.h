// The core of needled: pools, catalog, tickets, leases, sessions and journeys of one daemon, stepped by messages.
//
// Owned by node (daemon) or world (simulator), used by one thread, the loop. It starts no thread, reads no clock but the
// one it was given, draws no chance of its own, opens nothing.
//
// What must stay true:
//  1. handle() runs to completion: no message waits inside another. Waiting is a state of a journey and ends by a later
//     message or by next_deadline_ns().
//  2. After every handle() audit() is OK, for every order, loss and repetition of messages.
//  3. All that must survive a kill is in the metadata region before a reply or an outgoing message tells of it.
//
// Callers must send Tick no later than they care for timeouts, and must not call from inside a completion or the outbox.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/log.h"
#include "server/messages.h"
#include "server/options.h"
#include "server/pool/memory.h"
#include "server/transport/transport.h"

namespace needle::server {

// Everything that comes from outside. All of it outlives the core.
struct Environment {
  Clock& clock;
  Metadata& metadata;
  Memory& memory;
  Transport& transport;
  Outbox& outbox;
  Log& log;
  uint64_t incarnation_seed = 0;  // random; the incarnation is drawn from it and never repeats for a pool's life
};

class Core {
 public:
  // Bytes that the metadata region must have for these options: pages x (word + record) + sessions + header.
  static int64_t metadata_bytes(const CoreOptions& options);
  // Where a pool's page words lie in that region (pool/page_record.h), and how many there are: clients map them.
  static int64_t page_words_offset(const CoreOptions& options, PoolId pool);
  static int64_t page_count_max(const CoreOptions& options, PoolId pool);

  // Rebuilds pools and catalog from the metadata region when it holds a valid one of the same layout, else formats it.
  // Then asks memory for the chunks that the budget wants and that are missing; they arrive by ChunkAllocated.
  static absl::StatusOr<std::unique_ptr<Core>> start(const CoreOptions& options, const Environment& environment);

  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  void handle(Message message);
  int64_t next_deadline_ns() const;  // when the next Tick is due; INT64_MAX when nothing waits

  Incarnation incarnation() const;
  Snapshot snapshot() const;
  absl::Status audit() const;  // O(everything)
  bool drained() const;        // after Drain: no ticket, lease, ship or pinned page is left

 private:
  class Impl;
  explicit Core(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace needle::server
