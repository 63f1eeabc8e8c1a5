#include "tests/sim/client.h"

#include <algorithm>

#include "proto/errors.h"

namespace needle::sim {
Client::Client(World& world, Node& node, int number, bool remote)
    : world_(world), node_(node), remote_(remote), name_((remote ? "remote" : "client") + std::to_string(number)) {}

void Client::note(const std::string& line) {
  if (world_.wants_history()) world_.note(name_ + "@" + std::to_string(node_.id.value()) + " " + line);
}

void Client::begin() {
  alive_ = true;
  stopped_ = false;
  attached_ = attaching_ = false;
  ++life_;
  ++era_;
  pid_ = world_.new_pid();
  instance_ = world_.rng().next();
  kernels_ = 0;
  session_ = SessionId();
  note("begins as pid " + std::to_string(pid_));
  soon(world_.rng().between(0, 5) * kMs, [this] { attach(); });
}

void Client::kill() {
  note("is killed");
  alive_ = false;
  stopped_ = false;
  ++life_;
  ++era_;
  node_.sessions.erase(session_);
  calls_.clear();
  jobs_.clear();
  deferred_.clear();
  fence_waiters_.clear();
  mapped_.clear();
  held_.clear();
  once_held_ = PageRef();
  kernels_ = 0;
  world_.process_died(pid_);
}

void Client::stop() {
  note("is stopped");
  stopped_ = true;
}

void Client::wake() {
  note("wakes");
  stopped_ = false;
  while (!stopped_ && alive_ && !deferred_.empty()) {
    const std::function<void()> action = std::move(deferred_.front());
    deferred_.pop_front();
    action();
  }
}

void Client::soon(int64_t delay_ns, std::function<void()> action) {
  world_.at(delay_ns, [this, life = life_, action = std::move(action)] {
    if (life != life_ || !alive_) return;
    if (stopped_) {
      deferred_.push_back([this, life, action] {
        if (life == life_) action();
      });
    } else {
      action();
    }
  });
}

// --------------------------------------------------------------------------------------------------------------- session

void Client::attach() {
  if (attached_ || attaching_) return;
  attaching_ = true;
  Attach request;
  request.pool_set = node_.options.sets[0].name;
  request.format = node_.options.sets[0].format;
  if (world_.rng().chance(0.05)) request.format = "another format";
  if (!remote_) request.process = {pid_, pid_ * 10, 0, instance_};
  for (const auto& [lease, pages] : held_) request.held.insert(request.held.end(), pages.begin(), pages.end());
  if (!once_held_.pool.is_none() && world_.rng().chance(0.3)) request.held.push_back(once_held_);
  if (!request.held.empty()) request.held_lease = LeaseId(world_.rng().next() | 1);
  request.held_epoch = epoch_;
  // Before it attaches anew it has fenced, and unmapped every chunk without held pages (messages.h, Attach).
  std::erase_if(mapped_, [&](const auto& chunk) {
    return std::none_of(request.held.begin(), request.held.end(), [&](const PageRef& ref) {
      const int64_t at = int64_t{ref.page.index.value()} * node_.shape(ref.pool).page_bytes / node_.shape(ref.pool).chunk_bytes;
      return ref.pool == chunk.first && at == chunk.second.value();
    });
  });
  held_.clear();
  // The attach socket neither loses nor reorders; it ends with its daemon.
  const uint64_t life = life_;
  soon(world_.rng().between(1, 300) * 1'000, [this, request, life] {
    const uint64_t daemon_life = node_.life;
    if (!node_.is_up() || node_.stopped) {
      attaching_ = false;
      for (const PageRef& ref : request.held) held_[request.held_lease].push_back(ref);
      return soon(20 * kMs, [this] { attach(); });
    }
    world_.deliver_call<Attach>(node_, request, [this, request, life, daemon_life](const absl::StatusOr<Attach::Reply>& reply) {
      if (life != life_) {
        if (reply.ok() && !remote_)
          world_.at(0, [this, reply, daemon_life] {
            if (node_.life == daemon_life && node_.is_up()) world_.deliver(node_, ProcessDied{reply->session});
          });
        return;
      }
      if (reply.ok()) node_.sessions[reply->session] = this;
      soon(world_.rng().between(1, 300) * 1'000, [this, reply, daemon_life] {
        attaching_ = false;
        if (daemon_life != node_.life) return attach();  // the socket ended before the answer came
        if (reply.ok()) return attached(*reply);
        soon(20 * kMs, [this] { attach(); });
      });
    });
    if (!node_.is_up() || node_.life != daemon_life) {  // killed while it worked on it: the socket ends
      attaching_ = false;
      for (const PageRef& ref : request.held) held_[request.held_lease].push_back(ref);
      soon(20 * kMs, [this] { attach(); });
    }
  });
}

void Client::attached(const Attach::Reply& reply) {
  if (attached_) return;
  attached_ = true;
  ++era_;
  session_ = reply.session;
  epoch_ = reply.pools[0].epoch;
  memory_epoch_ = node_.memory_epoch;
  mapped_.clear();  // what it held in a chunk that is not named any more is not good any more either
  for (const PoolLayout& layout : reply.pools) {
    for (ChunkIndex chunk : layout.chunks) mapped_.insert({layout.pool, chunk});
  }
  note("attached as session " + std::to_string(session_.value()));
  beat();
  const std::vector<std::pair<SessionId, SessionEvent>> early = std::move(early_);
  early_.clear();
  for (const auto& [session, event] : early) {
    if (session == session_) take(event);
  }
  if (!attached_) return;
  for (int job = 0; job < 2; ++job) soon(world_.rng().between(0, 20) * kMs, [this] { work(); });
  if (reply.held_lease.is_none()) return;
  // Pages it read before its daemon restarted, leased again: they still are what they were.
  const LeaseId lease = reply.held_lease;
  soon(world_.rng().between(1, 50) * kMs, [this, lease, era = era_, session = session_] {
    if (era != era_) return;
    Release request{session, lease};
    call<Release>(nullptr, request, [](const absl::StatusOr<Nothing>&) {});
  });
}

void Client::beat() {
  const uint64_t era = era_;
  if (!attached_) return;
  if (!world_.rpc_lost()) {
    world_.at(world_.rpc_delay_ns(), [this, era, session = session_, process = life_] {
      world_.deliver_call<Heartbeat>(node_, Heartbeat{session}, [this, era, process](const absl::StatusOr<Nothing>& reply) {
        if (reply.ok() || era != era_ || process != life_) return;
        const std::string why = std::string(reply.status().message());
        soon(world_.rpc_delay_ns(), [this, era, why] {
          if (era == era_) session_is_stale(why);
        });
      });
    });
  }
  soon(node_.options.heartbeat_ms * kMs, [this, era] {
    if (era == era_) beat();
  });
}

void Client::receive(SessionId session, SessionEvent event) {
  last_event_ns_ = std::max(last_event_ns_ + 1, world_.time_ns() + world_.rng().between(1, 300) * 1'000);
  soon(last_event_ns_ - world_.time_ns(), [this, session, event] {
    if (attached_ && session == session_) return take(event);
    if (attaching_) early_.emplace_back(session, event);
  });
}

void Client::take(const SessionEvent& event) {
  if (const auto* mapped = std::get_if<ChunkMapped>(&event)) mapped_.insert({mapped->pool, mapped->chunk});
  if (const auto* retiring = std::get_if<ChunkRetiring>(&event)) retire_chunk(retiring->pool, retiring->chunk);
  if (const auto* revoked = std::get_if<Revoked>(&event)) session_is_stale("revoked: " + revoked->cause);
}

void Client::retire_chunk(PoolId pool, ChunkIndex chunk) {
  note("is asked to unmap chunk " + std::to_string(chunk.value()) + " of pool " + std::to_string(pool.value()));
  when_fenced([this, pool, chunk, era = era_] {
    if (era != era_) return;
    mapped_.erase({pool, chunk});
    call<ChunkUnmapped>(nullptr, ChunkUnmapped{session_, pool, chunk}, [](const absl::StatusOr<Nothing>&) {});
  });
}

void Client::daemon_gone() {
  if (!alive_) return;
  soon(world_.rng().between(0, 3) * kMs, [this] {
    if (!attached_) return;
    note("sees its daemon's socket end");
    // What it reads under open leases it may go on reading: those pages are asked for again.
    attached_ = false;
    ++era_;
    calls_.clear();
    jobs_.clear();
    session_ = SessionId();
    when_fenced([this] { attach(); });
  });
}

void Client::session_is_stale(const std::string& why) {
  if (!attached_) return;
  note("lost its session: " + why);
  attached_ = false;
  ++era_;
  calls_.clear();
  jobs_.clear();
  held_.clear();
  const SessionId old = session_;
  node_.sessions.erase(old);
  session_ = SessionId();
  when_fenced([this, old] {
    mapped_.clear();
    // Acknowledge, or simply attach anew: both promise the same.
    if (remote_ || world_.rng().chance(0.3)) return attach();
    call<Acknowledge>(nullptr, Acknowledge{old}, [this](const absl::StatusOr<Nothing>&) { attach(); });
  });
}

// --------------------------------------------------------------------------------------------------------------- kernels

void Client::launch(const std::shared_ptr<Job>&, std::vector<std::function<void()>> kernels, std::function<void()> done) {
  const auto left = std::make_shared<size_t>(kernels.size());
  const uint64_t era = era_;
  if (kernels.empty())
    return soon(0, [this, era, done] {
      if (era == era_) done();
    });
  for (std::function<void()>& kernel : kernels) {
    ++kernels_;
    const int64_t long_ns = world_.rng().chance(0.05) ? 400 * kMs : 3 * kMs;
    world_.at(world_.rng().between(10'000, long_ns), [this, life = life_, era, left, done, kernel = std::move(kernel)] {
      if (life != life_) return;  // died with its process
      kernel();
      --kernels_;
      if (--*left == 0)
        soon(0, [this, era, done] {
          if (era == era_) done();
        });
      if (kernels_ > 0) return;
      const std::vector<std::function<void()>> waiters = std::move(fence_waiters_);
      fence_waiters_.clear();
      for (const std::function<void()>& waiter : waiters) soon(0, waiter);
    });
  }
}

void Client::when_fenced(std::function<void()> then) {
  if (kernels_ == 0) return soon(0, std::move(then));
  fence_waiters_.push_back(std::move(then));
}

// ------------------------------------------------------------------------------------------------------------------ jobs

void Client::work() {
  if (!attached_ || world_.is_over()) return;
  if (jobs_.size() >= 3)
    return soon(20 * kMs, [this, era = era_] {
      if (era == era_) work();
    });
  const std::shared_ptr<Job> job = make_job(*this);
  jobs_.insert(job);
  job->start();
}

void Client::finish(const std::shared_ptr<Job>& job) {
  jobs_.erase(job);
  soon(world_.rng().between(0, 30) * kMs, [this, era = era_] {
    if (era == era_) work();
  });
}

std::pair<int64_t, int64_t> Job::window_blocks(int64_t tokens) {
  const int64_t width = set().window_tokens;
  const int64_t from = tokens > width ? tokens - width : 0;
  return {from / window_page_tokens(), (tokens + window_page_tokens() - 1) / window_page_tokens()};
}

uint64_t Job::checksum_of(PageRef page) { return checksum(node().page(page)); }

void Job::pause(std::function<void()> then) {
  client_.soon(rng().between(0, 20) * kMs, [this, self = shared_from_this(), session = client_.session(), then] {
    if (session == client_.session()) then();
  });
}

std::vector<PageRef> Job::pages_of(const PageTable& table) {
  std::vector<PageRef> pages;
  for (const PageId& page : table.paged) pages.push_back(paged(page));
  for (const PageId& page : table.window) pages.push_back(window(page));
  pages.push_back(state(table.state));
  return pages;
}

void Job::read_table(const PageTable& table, const std::shared_ptr<const Story>& story, std::function<void()> then) {
  std::vector<std::function<void()>> kernels;
  const int64_t full = table.tokens / page_tokens();
  const auto read = [&](PageRef ref, uint64_t content, int64_t position) {
    kernels.push_back([this, self = shared_from_this(), ref, content, position] {
      world().verify(node(), ref, content, static_cast<uint32_t>(position), client_);
    });
  };
  for (size_t i = 0; i < table.paged.size(); ++i) {
    const int64_t position = static_cast<int64_t>(i);
    read(paged(table.paged[i]), position < full ? story->full_page(position) : story->partial_page(table.tokens, page_tokens()), position);
  }
  const auto [first, last] = window_blocks(table.tokens);
  if (static_cast<int64_t>(table.window.size()) != last - first) {
    world().violated(client_.name() + " got " + std::to_string(table.window.size()) + " window pages for " + std::to_string(table.tokens) +
                     " tokens, " + std::to_string(last - first) + " cover the window");
  }
  for (int64_t block = first; block < std::min<int64_t>(last, first + static_cast<int64_t>(table.window.size())); ++block) {
    read(window(table.window[static_cast<size_t>(block - first)]), story->window_page(table.tokens, page_tokens(), block), block);
  }
  read(state(table.state), story->state_record(table.tokens, page_tokens()), 0);
  launch(std::move(kernels), std::move(then));
}

void Job::release(LeaseId lease, std::function<void()> then) {
  client_.unhold(lease);
  call<Release>({client_.session(), lease}, [this, lease, then](const absl::StatusOr<Nothing>& reply) {
    // A remote reader's lease may have ended by time since it was last checked.
    const bool ran_out = client_.is_remote() && is_error(reply.status(), ErrorCode::kLeaseExpired);
    const bool over = is_error(reply.status(), ErrorCode::kConsumed) || is_error(reply.status(), ErrorCode::kStale) || ran_out;
    if (!reply.ok() && !over) {
      world().violated(client_.name() + " could not release: " + reply.status().ToString());
    }
    if (!rng().chance(0.1)) return then();
    // By mistake a second time: it must be refused.
    call<Release>({client_.session(), lease}, [this, then](const absl::StatusOr<Nothing>& again) {
      if (again.ok()) world().violated(client_.name() + " released a lease twice, and both succeeded");
      then();
    });
  });
}

}  // namespace needle::sim
