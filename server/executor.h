// One thread that runs what the loop hands it, in order: conversions, socket writes and reads that must not hold the loop.
//
// What must stay true:
//  1. Work is run in the order in which it was given; everything given before stop() is run before stop() returns.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "absl/functional/any_invocable.h"

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
      std::lock_guard<std::mutex> hold(mutex_);
      work_.push_back(std::move(work));
    }
    wake_.notify_one();
  }

  void stop() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> hold(mutex_);
    for (;;) {
      wake_.wait(hold, [this] { return stopping_ || !work_.empty(); });
      if (work_.empty()) return;
      Work work = std::move(work_.front());
      work_.pop_front();
      hold.unlock();
      std::move(work)();
      hold.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Work> work_;  // guarded by mutex_; bounded by the loop's own queue, whose answers these are
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;     // last: it uses all of the above
};

}  // namespace needle::server
