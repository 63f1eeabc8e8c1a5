// Threads that a caller lends to an operation. Operations never start a thread of their own.
//
// What must stay true:
//  1. run() returns after body(index, worker) was called once for every index in [0, count), and with 0 <= worker < width().
//  2. Two calls of one worker never overlap, so `worker` may name a private scratch area.
//  3. Results never depend on width() or on who took which index: an operation writes disjoint outputs a call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/check.h"

namespace needle {

class Workers {
 public:
  virtual ~Workers() = default;
  virtual int width() const = 0;
  virtual void run(int64_t count, const std::function<void(int64_t index, int worker)>& body) = 0;
};

class CallerThread final : public Workers {
 public:
  int width() const override { return 1; }
  void run(int64_t count, const std::function<void(int64_t, int)>& body) override {
    for (int64_t index = 0; index < count; ++index) body(index, 0);
  }
};

// The caller's thread and width - 1 threads of its own, idle between runs. One run() at a time: the owner serialises.
class WorkerThreads final : public Workers {
 public:
  explicit WorkerThreads(int width) {
    NEEDLE_CHECK(width >= 1, "a worker set needs at least the caller");
    for (int worker = 1; worker < width; ++worker) threads_.emplace_back([this, worker] { serve(worker); });
  }
  WorkerThreads(const WorkerThreads&) = delete;
  WorkerThreads& operator=(const WorkerThreads&) = delete;

  ~WorkerThreads() override {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int width() const override { return static_cast<int>(threads_.size()) + 1; }

  void run(int64_t count, const std::function<void(int64_t, int)>& body) override {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      body_ = &body;
      count_ = count;
      next_.store(0, std::memory_order_relaxed);
      busy_ = static_cast<int>(threads_.size());
      ++round_;
    }
    wake_.notify_all();
    take(0, count, body);
    std::unique_lock<std::mutex> hold(mutex_);
    done_.wait(hold, [this] { return busy_ == 0; });
    body_ = nullptr;
  }

 private:
  void take(int worker, int64_t count, const std::function<void(int64_t, int)>& body) {
    for (int64_t index = next_.fetch_add(1); index < count; index = next_.fetch_add(1)) body(index, worker);
  }

  void serve(int worker) {
    uint64_t seen_round = 0;
    for (;;) {
      const std::function<void(int64_t, int)>* body = nullptr;
      int64_t count = 0;
      {
        std::unique_lock<std::mutex> hold(mutex_);
        wake_.wait(hold, [&] { return stopping_ || round_ != seen_round; });
        if (stopping_) return;
        seen_round = round_;
        body = body_;
        count = count_;
      }
      take(worker, count, *body);
      {
        std::lock_guard<std::mutex> hold(mutex_);
        --busy_;
      }
      done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  const std::function<void(int64_t, int)>* body_ = nullptr;  // guarded by mutex_, valid during a round
  int64_t count_ = 0;                                        // guarded by mutex_
  uint64_t round_ = 0;                                       // guarded by mutex_
  int busy_ = 0;                                             // guarded by mutex_: threads still in this round
  bool stopping_ = false;                                    // guarded by mutex_
  std::atomic<int64_t> next_{0};
  std::vector<std::thread> threads_;
};

}  // namespace needle
