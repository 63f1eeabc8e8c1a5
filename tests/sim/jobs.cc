// What simulated engines do: store, read, ship, adopt and decode, read from afar. Each path ends with its rights given back.
#include <algorithm>
#include <memory>
#include <utility>

#include "proto/errors.h"
#include "tests/sim/client.h"

namespace needle::sim {
namespace {

// Errors that a correct engine may meet and lives with; any other is a violation.
bool is_expected(const absl::Status& status) {
  return is_error(status, ErrorCode::kOutOfPages) || is_error(status, ErrorCode::kBusy) || is_error(status, ErrorCode::kStale) ||
         is_error(status, ErrorCode::kNotFound) || is_error(status, ErrorCode::kConflict) || is_error(status, ErrorCode::kStopping);
}

class EngineJob final : public Job {
 public:
  enum Kind { kStore, kRead, kShip, kReadFromAfar };
  EngineJob(Client& client, Kind kind) : Job(client), kind_(kind) {}

  void start() override {
    switch (kind_) {
      case kStore: return store();
      case kRead: return read();
      case kShip: return ship();
      case kReadFromAfar: return read_from_afar();
    }
  }

 private:
  TicketId new_ticket() { return TicketId(rng().next() | 1); }
  LeaseId new_lease() { return LeaseId(rng().next() | 1); }
  SessionId session() { return client_.session(); }

  void stop_at(const absl::Status& status, const std::string& doing) {
    note(doing + " ended with " + std::string(status.message()));
    const bool ran_out = client_.is_remote() && is_error(status, ErrorCode::kLeaseExpired);  // before the answer came
    if (!is_expected(status) && !ran_out)
      world().violated(client_.name() + " met an unexpected error while " + doing + ": " + status.ToString());
    end();
  }

  // A ticket that was refused: a copy of the request may still be on its way, and the forfeit makes sure it opens nothing.
  void give_up_ticket(const absl::Status& status, const std::string& doing) {
    call<Forfeit>({session(), ticket_, true}, [this, status, doing](const absl::StatusOr<Nothing>&) { stop_at(status, doing); });
  }

  // ------------------------------------------------------------------------------------------------------------- store

  void store() {
    story_ = world().pick_story();
    const int64_t tokens_max = static_cast<int64_t>(story_->segments.size()) * page_tokens();
    target_ = rng().between(1, std::min(tokens_max, 5 * page_tokens()));
    Reserve request;
    request.session = session();
    request.ticket = ticket_ = new_ticket();
    request.sequence = sequence_ = SequenceId(rng().next() | 1);
    request.tokens = rng().chance(0.7) ? target_ : rng().between(1, target_);
    const int64_t full = request.tokens / page_tokens();
    request.names = story_->names(rng().chance(0.8) ? full : rng().between(0, full));
    for (int64_t page = 1; page <= full; ++page) {
      if (rng().chance(0.4)) request.resume_tokens_wanted.push_back(page * page_tokens());
    }
    note("reserves " + std::to_string(request.tokens) + " tokens of sequence " + std::to_string(sequence_.value()));
    call<Reserve>(request, [this](const absl::StatusOr<Reserve::Reply>& reply) {
      if (!reply.ok()) return give_up_ticket(reply.status(), "reserving");
      view_ = reply->view;
      slots_ = reply->resume_slots;
      world().known.push_back({sequence_, story_, static_cast<size_t>(node().id.value())});
      check_prefix(*reply);
    });
  }

  // A prefix hit: the pages and the resume point that it promises are whole.
  void check_prefix(const Reserve::Reply& reply) {
    std::vector<std::function<void()>> kernels;
    const auto read = [&](PageRef ref, uint64_t content, int64_t position) {
      kernels.push_back([this, self = shared_from_this(), ref, content, position] {
        world().verify(node(), ref, content, static_cast<uint32_t>(position), client_);
      });
    };
    if (reply.resume_tokens > reply.matched_tokens) world().violated("a resume point lies beyond the matched prefix");
    for (int64_t i = 0; i < view_.pages_shared; ++i) read(paged(view_.paged[static_cast<size_t>(i)]), story_->full_page(i), i);
    if (reply.resume_tokens > 0) {
      const auto [first, last] = window_blocks(reply.resume_tokens);
      if (static_cast<int64_t>(reply.resume_window.size()) != last - first || reply.resume_state.index.is_none()) {
        world().violated("a prefix hit's resume point is not whole: " + std::to_string(reply.resume_window.size()) + " of " +
                         std::to_string(last - first) + " window pages");
      }
      for (int64_t block = first; block < std::min<int64_t>(last, first + static_cast<int64_t>(reply.resume_window.size())); ++block) {
        read(window(reply.resume_window[static_cast<size_t>(block - first)]),
             story_->window_page(reply.resume_tokens, page_tokens(), block), block);
      }
      read(state(reply.resume_state), story_->state_record(reply.resume_tokens, page_tokens()), 0);
    }
    launch(std::move(kernels), [this] { write_on(); });
  }

  // ------------------------------------------------------------------------------------------------- the writer's loop

  std::function<void()> kernel(PageRef ref, uint64_t content, int64_t position) {
    return [this, self = shared_from_this(), ref, content, position, sequence = sequence_] {
      world().client_writes(node(), ref, content, static_cast<uint32_t>(position), sequence, client_);
    };
  }

  void write_on() {
    if (world().is_over() && rng().chance(0.5)) return forfeit(false);
    if (rng().chance(0.04)) return forfeit(rng().chance(0.5));
    if (view_.tokens_published >= target_) return rng().chance(0.15) ? truncate() : finish();
    if (view_.tokens_reserved < target_ && view_.tokens_published == view_.tokens_reserved) return extend();
    chunk_end_ = std::min({view_.tokens_published + rng().between(1, 2 * page_tokens()), view_.tokens_reserved, target_});
    launch(page_kernels(view_.tokens_published, chunk_end_), [this] { publish(); });
  }

  // Writes of every page touched by tokens [from, to), with the content that it has at `to`.
  std::vector<std::function<void()>> page_kernels(int64_t from, int64_t to) {
    std::vector<std::function<void()>> kernels;
    const int64_t first = std::max(from / page_tokens(), view_.pages_sealed);
    for (int64_t page = first; page * page_tokens() < to; ++page) {
      const bool full = (page + 1) * page_tokens() <= to;
      kernels.push_back(kernel(paged(view_.paged[static_cast<size_t>(page)]),
                               full ? story_->full_page(page) : story_->partial_page(to, page_tokens()), page));
    }
    return kernels;
  }

  void extend() {
    Extend request{session(), ticket_, ++step_, std::min(target_, view_.tokens_reserved + rng().between(1, 2 * page_tokens()))};
    call<Extend>(request, [this](const absl::StatusOr<TicketView>& view) {
      if (!view.ok() && is_error(view.status(), ErrorCode::kOutOfPages)) return forfeit(false);
      if (!view.ok()) return stop_at(view.status(), "extending");
      view_ = *view;
      write_on();
    });
  }

  void publish() {
    Publish request{session(), ticket_, ++step_, chunk_end_};
    call<Publish>(request, [this](const absl::StatusOr<TicketView>& view) {
      if (!view.ok()) return stop_at(view.status(), "publishing");
      view_ = *view;
      if (rng().chance(0.6)) return seal_pages();
      pause([this] { write_on(); });
    });
  }

  void truncate() {
    const int64_t least = std::max<int64_t>(view_.pages_sealed * page_tokens(), view_.tokens_published - 3);
    Truncate request{session(), ticket_, ++step_, rng().between(least, view_.tokens_published)};
    call<Truncate>(request, [this](const absl::StatusOr<TicketView>& view) {
      if (!view.ok()) return stop_at(view.status(), "truncating");
      view_ = *view;
      // What lies in the last page now is rewritten when it is written on, or by finish().
      write_on();
    });
  }

  void seal_pages() {
    SealPages request{session(), ticket_, ++step_, {}};
    const int64_t full = view_.tokens_published / page_tokens();
    for (int64_t page = view_.pages_sealed; page < full; ++page) {
      request.pages.push_back({story_->name(page + 1), checksum_of(paged(view_.paged[static_cast<size_t>(page)]))});
    }
    call<SealPages>(request, [this](const absl::StatusOr<TicketView>& view) {
      if (!view.ok()) return stop_at(view.status(), "sealing pages");
      view_ = *view;
      write_resume_point();
    });
  }

  void write_resume_point() {
    const auto ready = std::find_if(slots_.begin(), slots_.end(),
                                    [&](const ResumeSlot& slot) { return slot.tokens <= view_.pages_sealed * page_tokens(); });
    if (ready == slots_.end() || rng().chance(0.2)) return pause([this] { write_on(); });
    const ResumeSlot slot = *ready;
    slots_.erase(ready);
    std::vector<std::function<void()>> kernels;
    const auto [first, last] = window_blocks(slot.tokens);
    for (int64_t block = first; block < last; ++block) {
      kernels.push_back(
          kernel(window(slot.window[static_cast<size_t>(block - first)]), story_->window_page(slot.tokens, page_tokens(), block), block));
    }
    kernels.push_back(kernel(state(slot.state), story_->state_record(slot.tokens, page_tokens()), 0));
    launch(std::move(kernels), [this, slot] {
      SealResumePoint request{session(), ticket_, slot.tokens, {}, checksum_of(state(slot.state))};
      for (const PageId& page : slot.window) request.window_checksums.push_back(checksum_of(window(page)));
      call<SealResumePoint>(request, [this](const absl::StatusOr<Nothing>& reply) {
        if (!reply.ok()) return stop_at(reply.status(), "sealing a resume point");
        write_resume_point();
      });
    });
  }

  // Everything that the seal publishes is written now, with the content of the final length.
  void finish() {
    const int64_t tokens = view_.tokens_published;
    if (tokens == 0) return forfeit(true);
    std::vector<std::function<void()>> kernels = page_kernels(view_.pages_sealed * page_tokens(), tokens);
    const auto [first, last] = window_blocks(tokens);
    for (int64_t block = first; block < last; ++block) {
      kernels.push_back(kernel(window(ring_page(block)), story_->window_page(tokens, page_tokens(), block), block));
    }
    kernels.push_back(kernel(state(view_.state), story_->state_record(tokens, page_tokens()), 0));
    launch(std::move(kernels), [this, tokens] { seal(tokens); });
  }

  PageId ring_page(int64_t block) { return view_.window[static_cast<size_t>(block) % view_.window.size()]; }

  void seal(int64_t tokens) {
    Seal request;
    request.session = session();
    request.ticket = ticket_;
    request.step = ++step_;
    request.tokens = tokens;
    for (int64_t page = view_.pages_sealed; (page + 1) * page_tokens() <= tokens; ++page) {
      request.pages.push_back({story_->name(page + 1), checksum_of(paged(view_.paged[static_cast<size_t>(page)]))});
    }
    if (tokens % page_tokens() != 0)
      request.partial_checksum = checksum_of(paged(view_.paged[static_cast<size_t>(tokens / page_tokens())]));
    const auto [first, last] = window_blocks(tokens);
    for (int64_t block = first; block < last; ++block) request.window_checksums.push_back(checksum_of(window(ring_page(block))));
    request.state_checksum = checksum_of(state(view_.state));
    if (rng().chance(0.7)) request.lease = new_lease();
    call<Seal>(request, [this, lease = request.lease](const absl::StatusOr<Seal::Reply>& reply) {
      if (!reply.ok()) return stop_at(reply.status(), "sealing");
      note("sealed sequence " + std::to_string(sequence_.value()));
      if (lease.is_none()) return end();
      client_.hold(lease, pages_of(reply->table));
      use(lease, reply->table);
    });
  }

  // Gives up: sometimes with kernels still in flight and without a promise, which the fence makes good later.
  void forfeit(bool kernels_in_flight) {
    if (!kernels_in_flight) {
      return call<Forfeit>({session(), ticket_, true}, [this](const absl::StatusOr<Nothing>& reply) {
        if (!reply.ok()) return stop_at(reply.status(), "forfeiting");
        end();
      });
    }
    note("forfeits with kernels in flight");
    const int64_t from = view_.tokens_published;
    const auto fenced = std::make_shared<bool>(false);
    const auto answered = std::make_shared<bool>(false);
    const auto both = [this, fenced, answered] {
      if (!*fenced || !*answered) return;
      call<Forfeit>({session(), ticket_, true}, [this](const absl::StatusOr<Nothing>& reply) {
        if (!reply.ok()) return stop_at(reply.status(), "forfeiting again");
        end();
      });
    };
    launch(page_kernels(from, view_.tokens_reserved), [fenced, both] {
      *fenced = true;
      both();
    });
    call<Forfeit>({session(), ticket_, false}, [this, answered, both](const absl::StatusOr<Nothing>& reply) {
      if (!reply.ok()) return stop_at(reply.status(), "forfeiting");
      *answered = true;
      both();
    });
  }

  // --------------------------------------------------------------------------------------------- what a lease is good for

  // Reads all of it; then lets it go, or goes on from it.
  void use(LeaseId lease, const PageTable& table) {
    read_table(table, story_, [this, lease, table] {
      const bool can_grow = table.tokens < static_cast<int64_t>(story_->segments.size()) * page_tokens();
      if (can_grow && !sequence_.is_none() && !world().is_over() && rng().chance(0.5)) return adopt(lease, table);
      release(lease, [this] { end(); });
    });
  }

  void adopt(LeaseId lease, const PageTable& table) {
    const int64_t tokens_max = static_cast<int64_t>(story_->segments.size()) * page_tokens();
    target_ = std::min(tokens_max, table.tokens + rng().between(1, 2 * page_tokens()));
    Adopt request;
    request.session = session();
    request.lease = lease;
    request.ticket = ticket_ = new_ticket();
    request.sequence = sequence_;
    request.tokens = rng().between(table.tokens, target_);
    step_ = 0;
    slots_.clear();
    note("adopts sequence " + std::to_string(sequence_.value()) + " at " + std::to_string(table.tokens) + " tokens");
    call<Adopt>(request, [this, lease, table](const absl::StatusOr<Adopt::Reply>& reply) {
      if (!reply.ok()) return release(lease, [this, status = reply.status()] { give_up_ticket(status, "adopting"); });
      view_ = reply->view;
      if (reply->lease_consumed) {
        client_.unhold(lease);
        return check_adopted(table);
      }
      std::vector<std::function<void()>> kernels;
      for (const Adopt::Copy& copy : reply->copies) {
        kernels.push_back([this, self = shared_from_this(), copy] { world().client_copies(node(), copy.from, copy.to, client_); });
      }
      launch(std::move(kernels), [this, lease, table] { release(lease, [this, table] { check_adopted(table); }); });
    });
  }

  // The private pages hold what the sequence held.
  void check_adopted(const PageTable& table) {
    std::vector<std::function<void()>> kernels;
    const auto read = [&](PageRef ref, uint64_t content, int64_t position) {
      kernels.push_back([this, self = shared_from_this(), ref, content, position] {
        world().verify(node(), ref, content, static_cast<uint32_t>(position), client_);
      });
    };
    const int64_t full = table.tokens / page_tokens();
    if (table.tokens % page_tokens() != 0) {
      read(paged(view_.paged[static_cast<size_t>(full)]), story_->partial_page(table.tokens, page_tokens()), full);
    }
    const auto [first, last] = window_blocks(table.tokens);
    for (int64_t block = first; block < last; ++block) {
      read(window(ring_page(block)), story_->window_page(table.tokens, page_tokens(), block), block);
    }
    read(state(view_.state), story_->state_record(table.tokens, page_tokens()), 0);
    launch(std::move(kernels), [this] { write_on(); });
  }

  // -------------------------------------------------------------------------------------------------------------- read

  void read() {
    acquire([this](LeaseId lease, const PageTable& table) {
      client_.hold(lease, pages_of(table));
      use(lease, table);
    });
  }

  void acquire(std::function<void(LeaseId, const PageTable&)> then) {
    if (world().known.empty()) return end();
    const World::Known& chosen = world().known[rng().below(world().known.size())];
    story_ = chosen.story;
    Acquire request;
    request.session = session();
    request.lease = new_lease();
    if (rng().chance(0.6)) {
      request.sequence = sequence_ = chosen.sequence;
    } else {
      sequence_ = SequenceId();
      request.names = story_->names(static_cast<int64_t>(story_->segments.size()));
    }
    call<Acquire>(request, [this, then, lease = request.lease](const absl::StatusOr<Acquire::Reply>& reply) {
      if (!reply.ok()) {
        // A copy of the request may still be on its way: the release makes sure that it opens nothing.
        return call<Release>({session(), lease},
                             [this, status = reply.status()](const absl::StatusOr<Nothing>&) { stop_at(status, "acquiring"); });
      }
      then(reply->lease, reply->table);
    });
  }

  // A reader without a mapping: page by page over time, under a lease that time can end. Only the recheck makes it good.
  void read_from_afar() {
    acquire([this](LeaseId lease, const PageTable& table) {
      std::vector<Wanted> wanted;
      const int64_t full = table.tokens / page_tokens();
      for (size_t i = 0; i < table.paged.size(); ++i) {
        const int64_t position = static_cast<int64_t>(i);
        wanted.push_back({paged(table.paged[i]),
                          position < full ? story_->full_page(position) : story_->partial_page(table.tokens, page_tokens()), position});
      }
      const auto [first, last] = window_blocks(table.tokens);
      if (static_cast<int64_t>(table.window.size()) != last - first) {
        world().violated(client_.name() + " got " + std::to_string(table.window.size()) + " window pages where " +
                         std::to_string(last - first) + " cover the window");
      }
      for (int64_t block = first; block < std::min<int64_t>(last, first + static_cast<int64_t>(table.window.size())); ++block) {
        wanted.push_back(
            {window(table.window[static_cast<size_t>(block - first)]), story_->window_page(table.tokens, page_tokens(), block), block});
      }
      read_next(lease, std::move(wanted), 0, "");
    });
  }
  struct Wanted {
    PageRef ref;
    uint64_t content;
    int64_t position;
  };
  void read_next(LeaseId lease, std::vector<Wanted> wanted, size_t at, std::string wrong) {
    if (at == wanted.size()) {
      Recheck request{session(), lease, {}};
      for (const Wanted& page : wanted) request.pages.push_back(page.ref);
      return call<Recheck>(request, [this, lease, wrong](const absl::StatusOr<Nothing>& reply) {
        if (reply.ok() && !wrong.empty()) {
          world().violated(client_.name() + " was told that its bytes are good, and they are not: " + wrong);
        }
        if (reply.ok()) return release(lease, [this] { end(); });
        note("must not use what it read: " + std::string(reply.status().message()));
        end();
      });
    }
    const int64_t delay_ns =
        rng().chance(0.15) ? rng().between(0, 2 * node().options.lease_ms) * 1'000'000 : rng().between(0, 20) * 1'000'000;
    client_.soon(delay_ns, [this, self = shared_from_this(), was = session(), lease, wanted = std::move(wanted), at, wrong]() mutable {
      if (was != session()) return;
      const std::span<const std::byte> bytes = node().page(wanted[at].ref);
      std::string found =
          bytes.empty() ? "the page has no memory" : what_is_wrong(bytes, wanted[at].content, static_cast<uint32_t>(wanted[at].position));
      ++world().totals().pages_verified;
      read_next(lease, std::move(wanted), at + 1, wrong.empty() ? std::move(found) : std::move(wrong));
    });
  }

  // -------------------------------------------------------------------------------------------------------------- ship

  void ship() {
    std::vector<World::Known> elsewhere;
    for (const World::Known& known : world().known) {
      if (known.node != node().id.value()) elsewhere.push_back(known);
    }
    if (elsewhere.empty()) return store();
    // Mostly a recent one: it may still be being stored.
    const size_t recent = std::min<size_t>(elsewhere.size(), 6);
    const World::Known chosen = elsewhere[elsewhere.size() - 1 - rng().below(rng().chance(0.8) ? recent : elsewhere.size())];
    story_ = chosen.story;
    sequence_ = chosen.sequence;
    ShipStart request;
    request.session = session();
    request.ticket = ticket_ = new_ticket();
    request.sequence = sequence_;
    request.source = world().node(chosen.node).id;
    request.lease = new_lease();
    request.deadline_ms = rng().between(100, 4'000);
    note("ships sequence " + std::to_string(sequence_.value()) + " from node " + std::to_string(chosen.node));
    call<ShipStart>(request, [this](const absl::StatusOr<Nothing>& reply) {
      const bool ended = is_error(reply.status(), ErrorCode::kConsumed);  // a late repeat of the start: the wait tells how
      if (!reply.ok() && !ended) {
        return call<ShipCancel>({session(), ticket_},
                                [this, status = reply.status()](const absl::StatusOr<Nothing>&) { stop_at(status, "starting a ship"); });
      }
      if (rng().chance(0.1)) {
        pause([this] { call<ShipCancel>({session(), ticket_}, [](const absl::StatusOr<Nothing>&) {}); });
      }
      if (rng().chance(0.2)) call<ShipProgress>({session(), ticket_}, [](const absl::StatusOr<ShipProgress::Reply>&) {});
      call<ShipWait>({session(), ticket_}, [this](const absl::StatusOr<ShipWait::Reply>& done) {
        if (!done.ok()) {
          note("ship ended with " + std::string(done.status().message()));
          return end();
        }
        if (done->table.tokens == 0) return end();  // a repeated answer after the lease was given back
        note("has sequence " + std::to_string(sequence_.value()) + " with " + std::to_string(done->table.tokens) + " tokens");
        client_.hold(done->lease, pages_of(done->table));
        use(done->lease, done->table);
      });
    });
  }

  const Kind kind_;
  std::shared_ptr<const Story> story_;
  SequenceId sequence_;
  TicketId ticket_;
  uint64_t step_ = 0;
  int64_t target_ = 0;
  int64_t chunk_end_ = 0;
  TicketView view_;
  std::vector<ResumeSlot> slots_;
};

}  // namespace

std::shared_ptr<Job> make_job(Client& client) {
  if (client.is_remote()) return std::make_shared<EngineJob>(client, EngineJob::kReadFromAfar);
  const double draw = client.world().rng().unit();
  const EngineJob::Kind kind = draw < 0.5 ? EngineJob::kStore : draw < 0.7 ? EngineJob::kRead : EngineJob::kShip;
  return std::make_shared<EngineJob>(client, kind);
}

}  // namespace needle::sim
