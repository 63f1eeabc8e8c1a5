// What the loop costs: page state changes a second on one core, metadata bytes a page, and how both grow with the pool.
//
//   needle_core_bench [PAGES_MAX]      default 10000000
//
// Work: a full pool, prompts of 64 new named pages each: Reserve (which evicts 64 of the oldest), then Seal of all pages and
// the sequence. A page goes free -> reserved -> sealed -> free: three state changes, each with its metadata writes (a
// record with its CRC, a word). Everything goes through Loop::post and step, as a gRPC handler would. Time is that of
// post and step alone; making requests (hashes) is outside.
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "base/check.h"
#include "base/rng.h"
#include "server/loop.h"
#include "server/pool/pool.h"
#include "tests/server/still_world.h"

namespace needle::server {
namespace {

constexpr int64_t kPromptPages = 64;
constexpr int64_t kPageTokens = 256;

class Bench {
 public:
  explicit Bench(int64_t pages) {
    PoolSetOptions set;
    set.name = "bench";
    set.format = "bench";
    set.window_tokens = 0;
    set.shapes[0] = {8, kPageTokens, 8 * pages, 1};
    set.shapes[2] = {8, 0, 8 * (pages / kPromptPages + 16), 1};
    set.budget_bytes = set.shapes[0].chunk_bytes + set.shapes[2].chunk_bytes;
    set.ratios = {set.shapes[0].chunk_bytes, 0, set.shapes[2].chunk_bytes};
    while (set.ratios[0] > 1'000'000) set.ratios = {set.ratios[0] / 2, 0, set.ratios[2] / 2 + 1};
    CoreOptions options;
    options.node = NodeId(0);
    options.sets.push_back(set);
    options.outcomes_max = 4'096;  // what is measured is pages, not history
    world_ = std::make_unique<StillWorld>(options);
    loop_ = std::make_unique<Loop>(world_->start(), world_->clock);
    Attach attach;
    attach.pool_set = "bench";
    attach.format = "bench";
    attach.process = {1, 1, 0, 1};
    session_ = call(attach).session;
  }

  // One prompt; returns the nanoseconds of post and step.
  int64_t prompt() {
    Reserve reserve;
    reserve.session = session_;
    reserve.ticket = TicketId(++ids_);
    reserve.sequence = SequenceId(ids_);
    reserve.tokens = kPromptPages * kPageTokens;
    Seal seal;
    for (int64_t page = 0; page < kPromptPages; ++page) {
      reserve.names.push_back({rng_.next(), rng_.next()});
      seal.pages.push_back({reserve.names.back(), 1});
    }
    seal.session = session_;
    seal.ticket = reserve.ticket;
    seal.step = 1;
    seal.tokens = reserve.tokens;
    const auto begin = std::chrono::steady_clock::now();
    call(reserve);
    call(seal);
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count();
  }

  int64_t named_pages() const { return world_->core->snapshot().sets[0].named_pages; }
  absl::Status audit() const { return world_->core->audit(); }

 private:
  template <class Request>
  typename Request::Reply call(const Request& request) {
    typename Request::Reply answer{};
    NEEDLE_CHECK(loop_
                     ->post(Call<Request>{request,
                                          [&answer](absl::StatusOr<typename Request::Reply> reply) {
                                            NEEDLE_CHECK(reply.ok(), reply.status().ToString().c_str());
                                            answer = std::move(*reply);
                                          }})
                     .ok(),
                 "the mailbox has room");
    loop_->step(8);
    return answer;
  }

  std::unique_ptr<StillWorld> world_;
  std::unique_ptr<Loop> loop_;
  SessionId session_;
  uint64_t ids_ = 0;
  Rng rng_{1};
};

void run(int64_t pages) {
  Bench bench(pages);
  for (int64_t filled = 0; filled < pages + kPromptPages; filled += kPromptPages) bench.prompt();
  constexpr int64_t kPrompts = 4'000;
  int64_t spent_ns = 0;
  for (int64_t i = 0; i < kPrompts; ++i) spent_ns += bench.prompt();
  const double changes = static_cast<double>(kPrompts * kPromptPages * 3);
  std::printf("%10" PRId64 " %12" PRId64 " %14.0f %10.1f %s\n", pages, bench.named_pages(),
              changes / (static_cast<double>(spent_ns) * 1e-9), static_cast<double>(spent_ns) / changes,
              bench.audit().ok() ? "audit ok" : "AUDIT FAILS");
  std::fflush(stdout);
}

}  // namespace
}  // namespace needle::server

int main(int argc, char** argv) {
  using namespace needle::server;  // NOLINT: main of this program
  const int64_t pages_max = argc > 1 ? std::atoll(argv[1]) : 10'000'000;
  const long besides = static_cast<long>(sizeof(PageInfo) + RecordTable::kBytesPerPage - sizeof(PageName) - sizeof(needle::SequenceId));
  std::printf("metadata a page: %ld B besides name (16), sequence (8) and name index (8 to 16)\n", besides);
  std::printf("%10s %12s %14s %10s\n", "pages", "named", "changes/s", "ns/change");
  for (int64_t pages = 10'000; pages <= pages_max; pages *= 10) run(pages);
  return 0;
}
