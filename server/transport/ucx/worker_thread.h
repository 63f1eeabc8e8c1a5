// The thread that progresses one UCX worker, and the door through which others hand it work.
//
// What must stay true:
//  1. Only this thread touches the worker and what lives on it. Others post tasks, which run on it in order.
//  2. It sleeps when there is nothing to do: armed, on the worker's descriptor, until an event, a task or the time that
//     `turn` asked for. It spins for `spin_ns` first, because a page is often followed by the next.
//  3. Where UCX can't be armed although nothing moves (sends wait for room in a queue in shared memory, which no event
//     announces), it naps, longer each time: a reader that does not drain costs the source no core.
//  4. The lock guards the tasks alone and is not held while one runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "server/loop.h"
#include "server/transport/ucx/ucx_handles.h"

namespace needle::server::ucx {

class WorkerThread {
 public:
  using Task = absl::AnyInvocable<void()>;
  // Called on the thread after every round that did something, and when its time has come; returns when it wants to be
  // called next at the latest, or kEnd to end the thread.
  using Turn = std::function<int64_t(int64_t now_ns)>;
  static constexpr int64_t kEnd = -1;

  static absl::StatusOr<std::unique_ptr<WorkerThread>> create(Context& context, const Clock& clock, int64_t spin_ns);
  ~WorkerThread();
  WorkerThread(const WorkerThread&) = delete;
  WorkerThread& operator=(const WorkerThread&) = delete;

  Worker& worker() { return *worker_; }
  int64_t now_ns() const { return now_ns_; }  // on the thread: the time at which this round began
  void start(const char* name, Turn turn);
  void post(Task task);  // any thread
  void join();           // after the turn was made to return kEnd

 private:
  WorkerThread(std::unique_ptr<Worker> worker, const Clock& clock, int64_t spin_ns, int wake_fd);
  void run();
  bool run_tasks();
  void sleep_until(int64_t due_ns);
  void nap(int64_t ns);

  std::unique_ptr<Worker> worker_;
  const Clock& clock_;
  const int64_t spin_ns_;
  const int wake_fd_;
  int64_t now_ns_ = 0;
  Turn turn_;
  std::thread thread_;
  Mutex mutex_;
  std::vector<Task> tasks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace needle::server::ucx
