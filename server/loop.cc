#include "server/loop.h"

#include <algorithm>
#include <chrono>
#include <type_traits>
#include <utility>

#include "proto/errors.h"

namespace needle::server {
namespace {

// A sleeping loop looks at its clock at least this often, in case the clock was suspended under it.
constexpr int64_t kSleepMsMax = 1'000;

template <class T>
struct IsCall : std::false_type {};
template <class Request>
struct IsCall<Call<Request>> : std::true_type {};

bool is_call(const Message& message) {
  return std::visit([](const auto& m) { return IsCall<std::decay_t<decltype(m)>>::value; }, message);
}

void answer(Message& message, const absl::Status& status) {
  std::visit(
      [&](auto& m) {
        if constexpr (IsCall<std::decay_t<decltype(m)>>::value) std::move(m.done)(status);
      },
      message);
}

}  // namespace

Loop::Loop(Core& core, Clock& clock, int64_t calls_max) : core_(core), clock_(clock), calls_max_(calls_max) {}

absl::Status Loop::post(Message message) {
  absl::Status refused;
  {
    MutexLock hold(mutex_);
    const bool may_be_refused = is_call(message) || std::holds_alternative<PeerMessage>(message);
    if (stopping_ && may_be_refused) {
      refused = make_error(ErrorCode::kStopping, "the loop has stopped");
    } else if (may_be_refused && static_cast<int64_t>(queue_.size()) >= calls_max_) {
      refused = make_error(ErrorCode::kBusy, "the mailbox holds " + std::to_string(calls_max_) + " messages: retry", 1);
    } else {
      queue_.push_back(std::move(message));
    }
  }
  if (refused.ok()) {
    wake_.notify_one();
    return refused;
  }
  answer(message, refused);
  return refused;
}

bool Loop::take(Message& message) {
  MutexLock hold(mutex_);
  if (queue_.empty()) return false;
  message = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

bool Loop::tick_if_due() {
  if (core_.next_deadline_ns() > clock_.now_ns()) return false;
  core_.handle(Tick{});
  return true;
}

int64_t Loop::step(int64_t messages_max) {
  int64_t handled = tick_if_due() ? 1 : 0;
  Message message = Tick{};
  while (handled < messages_max && take(message)) {
    core_.handle(std::move(message));
    ++handled;
  }
  return handled;
}

void Loop::run() {
  // Between ticks at most this many messages, so that a flood of calls does not hold back timeouts.
  constexpr int64_t kBurst = 256;
  while (true) {
    const int64_t handled = step(kBurst);
    MutexLock hold(mutex_);
    if (stopping_) break;
    if (handled > 0 || !queue_.empty()) continue;
    const int64_t wait_ns = std::clamp<int64_t>(core_.next_deadline_ns() - clock_.now_ns(), 0, kSleepMsMax * 1'000'000);
    wake_.wait_until(mutex_, std::chrono::steady_clock::now() + std::chrono::nanoseconds(wait_ns));
  }
  refuse_the_rest();
}

void Loop::refuse_the_rest() {
  Message message = Tick{};
  while (take(message)) answer(message, make_error(ErrorCode::kStopping, "the loop has stopped"));
}

void Loop::stop() {
  {
    MutexLock hold(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
}

}  // namespace needle::server
