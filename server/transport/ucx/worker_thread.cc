#include "server/transport/ucx/worker_thread.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/units.h"
#include "proto/errors.h"

namespace needle::server::ucx {
namespace {

// Rounds of progress before tasks and time are looked at again: one round handles up to a few dozen fragments.
constexpr int kProgressRounds = 64;
// The longest sleep. Anything that matters wakes us; this bounds what a lost event would cost.
constexpr int64_t kSleepMsMax = 200;
// The first nap is shorter than a full queue in shared memory takes to drain (half a megabyte: 200 us); the longest bounds
// what a reader that does not drain costs to a few percent of a core.
constexpr int64_t kNapNsMin = 20 * kNanosPerMicro;
constexpr int64_t kNapNsMax = kNanosPerMilli;
constexpr unsigned long kTimerSlackNs = 1'000;  // the default of 50 us is longer than the first naps

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerThread>> WorkerThread::create(Context& context, const Clock& clock, int64_t spin_ns) {
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::create(context);
  if (!worker.ok()) return worker.status();
  const int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd < 0) {
    return make_error(ErrorCode::kMemory, std::string("no event descriptor for a transport thread: ") + strerror(errno));
  }
  return std::unique_ptr<WorkerThread>(new WorkerThread(std::move(*worker), clock, spin_ns, wake_fd));
}

WorkerThread::WorkerThread(std::unique_ptr<Worker> worker, const Clock& clock, int64_t spin_ns, int wake_fd)
    : worker_(std::move(worker)), clock_(clock), spin_ns_(spin_ns), wake_fd_(wake_fd) {}

WorkerThread::~WorkerThread() {
  join();
  close(wake_fd_);
}

void WorkerThread::start(const char* name, Turn turn) {
  turn_ = std::move(turn);
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), name);
}

void WorkerThread::join() {
  if (thread_.joinable()) thread_.join();
}

void WorkerThread::post(Task task) {
  {
    MutexLock hold(mutex_);
    tasks_.push_back(std::move(task));
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t done = write(wake_fd_, &one, sizeof one);  // full means: already awake
}

bool WorkerThread::run_tasks() {
  std::vector<Task> taken;
  {
    MutexLock hold(mutex_);
    taken.swap(tasks_);
  }
  for (Task& task : taken) task();
  return !taken.empty();
}

void WorkerThread::sleep_until(int64_t due_ns) {
  const int64_t wait_ms = std::clamp<int64_t>((due_ns - clock_.now_ns()) / kNanosPerMilli + 1, 0, kSleepMsMax);
  pollfd sources[2] = {{worker_->event_fd(), POLLIN, 0}, {wake_fd_, POLLIN, 0}};
  poll(sources, 2, static_cast<int>(wait_ms));
  uint64_t ignored = 0;
  if ((sources[1].revents & POLLIN) != 0) {
    [[maybe_unused]] const ssize_t done = read(wake_fd_, &ignored, sizeof ignored);
  }
}

void WorkerThread::nap(int64_t ns) {
  pollfd tasks{wake_fd_, POLLIN, 0};  // UCX's descriptor is left out: not armed, it may be readable all the time
  const timespec wait{0, static_cast<long>(ns)};
  ppoll(&tasks, 1, &wait, nullptr);
}

void WorkerThread::run() {
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  int64_t due_ns = 0;
  int64_t nap_ns = 0;
  int64_t busy_ns = clock_.now_ns();
  for (;;) {
    now_ns_ = clock_.now_ns();
    bool worked = run_tasks();
    for (int round = 0; round < kProgressRounds && worker_->progress(); ++round) worked = true;
    if (worked || now_ns_ >= due_ns) {
      due_ns = turn_(now_ns_);
      if (due_ns == kEnd) return;
    }
    if (worked) {
      busy_ns = now_ns_;
      nap_ns = 0;
    }
    if (now_ns_ - busy_ns < spin_ns_) continue;
    if (worker_->arm()) {
      sleep_until(due_ns);
    } else {
      if (nap_ns > 0) nap(nap_ns);  // the first refusal may only mean that something came in meanwhile
      nap_ns = std::clamp(2 * nap_ns, kNapNsMin, kNapNsMax);
    }
  }
}

}  // namespace needle::server::ucx
