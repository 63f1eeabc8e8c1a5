// The mailbox in front of the core, and the thread-side loop over it.
//
// post() may be called from any thread; everything else belongs to the one loop thread. The simulator uses step() and
// never run(), so that the daemon and the simulator pass through the same code.
//
// What must stay true:
//  1. Messages are handled in the order in which post() accepted them.
//  2. The mailbox is bounded: a full one refuses calls with BUSY, and the refused message's completion is called by post()
//     with that status, so nobody waits for ever. A full one drops what peers say: they ask again. Events of this host
//     (SessionLost, ProcessDied, ChunkAllocated, TransportReady) are always taken, since losing one would lose memory;
//     sessions, chunks and posted fetches bound their number.
//  3. The lock guards the queue alone and is never held across the core, a completion or the outbox.
//  4. Every call is answered: those that wait when run() ends get STOPPING.
#pragma once

#include <cstdint>
#include <deque>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "server/core.h"

namespace needle::server {

class Loop {
 public:
  // 16,384 calls: at a million state changes a second the oldest waits some tens of milliseconds.
  static constexpr int64_t kCallsMaxDefault = 16'384;

  Loop(Core& core, Clock& clock, int64_t calls_max = kCallsMaxDefault);

  absl::Status post(Message message);  // any thread

  // Handles up to `messages_max` waiting messages and a due Tick; returns how many were handled. Never waits.
  int64_t step(int64_t messages_max);

  // Handles messages until stop(); sleeps between them until the next deadline.
  void run();
  void stop();  // any thread; run() returns after the messages in hand

 private:
  bool take(Message& message);
  bool tick_if_due();
  void refuse_the_rest();

  Core& core_;
  Clock& clock_;
  const int64_t calls_max_;
  Mutex mutex_;
  Condition wake_;
  std::deque<Message> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace needle::server
