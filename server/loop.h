// The mailbox in front of the core, and the thread-side loop over it.
//
// post() may be called from any thread; everything else belongs to the one loop thread. The simulator uses step() and
// never run(), so that the daemon and the simulator pass through the same code.
//
// What must stay true:
//  1. Messages are handled in the order in which post() accepted them.
//  2. The mailbox is bounded: a full one refuses with BUSY, and the refused message's completion is called by post()
//     with that status, so nobody waits for ever. Messages without a completion (SessionLost, ProcessDied, PeerMessage,
//     ChunkAllocated, TransportReady) have a reserve of their own: losing one would lose memory.
//  3. The lock guards the queue alone and is never held across the core, a completion or the outbox.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "server/core.h"

namespace needle::server {

// std::mutex with clang's annotations: absl::Mutex is invisible to ThreadSanitizer in distribution builds.
class ABSL_LOCKABLE Mutex {
 public:
  void lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }
  std::mutex& native() ABSL_LOCK_RETURNED(this) { return mutex_; }

 private:
  std::mutex mutex_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

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
  void stop();  // any thread; run() returns after the message in hand

 private:
  bool take(Message& message);
  bool tick_if_due();

  Core& core_;
  Clock& clock_;
  const int64_t calls_max_;
  Mutex mutex_;
  std::condition_variable_any wake_;
  std::deque<Message> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace needle::server
