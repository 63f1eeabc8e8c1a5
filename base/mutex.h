// A mutex and a condition that clang's thread-safety analysis (-Wthread-safety) understands and ThreadSanitizer sees into.
// absl's, in distribution builds, is invisible to the latter.
//
// What must stay true:
//  1. What a mutex guards says so: ABSL_GUARDED_BY. No lock is held across a transport, a kernel, an RPC or a callback.
//  2. A wait is a loop over guarded state under a MutexLock; there are no predicates, which the analysis cannot follow.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"

namespace needle {

class ABSL_LOCKABLE Mutex {
 public:
  void lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  friend class Condition;
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

class Condition {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void wait(Mutex& mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Borrowed borrowed(mutex.mutex_);
    condition_.wait(borrowed.lock);
  }
  // Also returns without a notification. False when `until` has passed.
  bool wait_until(Mutex& mutex, Time until) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Borrowed borrowed(mutex.mutex_);
    return condition_.wait_until(borrowed.lock, until) == std::cv_status::no_timeout;
  }
  bool wait_for_ms(Mutex& mutex, int64_t ms) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return wait_until(mutex, std::chrono::steady_clock::now() + std::chrono::milliseconds(ms));
  }
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

 private:
  struct Borrowed {  // for the time of a wait; the caller's MutexLock goes on holding it
    explicit Borrowed(std::mutex& mutex) : lock(mutex, std::adopt_lock) {}
    ~Borrowed() { lock.release(); }
    std::unique_lock<std::mutex> lock;
  };
  std::condition_variable condition_;
};

}  // namespace needle
