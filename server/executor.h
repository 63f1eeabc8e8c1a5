// One thread that runs what the loop hands it, in order: conversions, socket writes and reads that must not hold the loop.
//
// What must stay true:
//  1. Work is run in the order in which it was given; everything given before stop() is run before stop() returns.
#pragma once

#include <deque>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "base/mutex.h"

namespace needle::server {

class Executor {
 public:
  using Work = absl::AnyInvocable<void() &&>;

  Executor() : thread_([this] { serve(); }) {}
  ~Executor() { stop(); }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  void run(Work work) {
    {
      MutexLock hold(mutex_);
      work_.push_back(std::move(work));
    }
    wake_.notify_one();
  }

  void stop() {
    {
      MutexLock hold(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void serve() {
    for (;;) {
      Work work;
      {
        MutexLock hold(mutex_);
        while (!stopping_ && work_.empty()) wake_.wait(mutex_);
        if (work_.empty()) return;
        work = std::move(work_.front());
        work_.pop_front();
      }
      std::move(work)();
    }
  }

  Mutex mutex_;
  Condition wake_;
  std::deque<Work> work_ ABSL_GUARDED_BY(mutex_);  // bounded by the loop's own queue, whose answers these are
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace needle::server
