// Many random operations by eight clients, with every byte that is read compared with what its writer wrote; the operations
// and their order within a client come from one seed. A small format keeps pages at a few KiB, so that ten thousand
// operations are a matter of seconds; the same with full-size pages follows.
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "base/rng.h"
#include "kernels/format_set.h"
#include "proto/errors.h"
#include "tests/counts.h"
#include "tests/e2e/processes.h"
#include "tests/e2e/small_formats.h"

namespace needle::testing {
namespace {

using client::Client;
using client::Lease;
using client::Ticket;

constexpr uint64_t kSeed = 20261129;
constexpr int kClients = 8;

// What is sealed and how long it is; shared by all clients.
class Ledger {
 public:
  void add(uint64_t sequence, int64_t tokens) {
    std::lock_guard<std::mutex> hold(mutex_);
    sealed_.emplace_back(sequence, tokens);
  }
  std::pair<uint64_t, int64_t> pick(Rng& rng) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (sealed_.empty()) return {0, 0};
    return sealed_[sealed_.size() - 1 - rng.below(std::min<size_t>(sealed_.size(), 48))];  // older ones are mostly evicted
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<uint64_t, int64_t>> sealed_;
};

struct Tally {
  int64_t stored = 0;
  int64_t pages_verified = 0;
  int64_t refused = 0;  // full, busy or evicted: what a caller retries or re-plans
};

// An answer that a busy daemon may give; anything else is a failure of the test.
bool is_expected(const absl::Status& status) {
  return is_error(status, ErrorCode::kOutOfPages) || is_error(status, ErrorCode::kNotFound) || is_error(status, ErrorCode::kBusy);
}

void operate(Client& client, const DaemonProcess& daemon, Ledger& ledger, int number, int64_t operations, Tally& tally) {
  Rng rng(kSeed + static_cast<uint64_t>(number));
  CallerThread here;
  const int64_t page_tokens = 256;
  for (int64_t operation = 0; operation < operations; ++operation) {
    const uint64_t sequence = (static_cast<uint64_t>(number) + 1) << 40 | static_cast<uint64_t>(operation + 1);
    const uint64_t kind = rng.below(100);
    if (kind < 35) {  // store, in one or several seals, or give up half-way
      const int64_t tokens = rng.between(1, 5 * page_tokens);
      absl::StatusOr<Ticket> ticket = client.reserve(SequenceId(sequence), tokens);
      if (!ticket.ok()) {
        EXPECT_TRUE(is_expected(ticket.status())) << ticket.status();
        ++tally.refused;
        continue;
      }
      fill_ticket(client, *ticket, sequence);
      if (kind < 5) {
        EXPECT_TRUE(ticket->forfeit().ok());
        continue;
      }
      if (kind < 15 && tokens >= page_tokens) {
        const absl::Status early = ticket->seal_pages(page_tokens, {}, here);
        EXPECT_TRUE(early.ok()) << early;
      }
      const absl::Status sealed = ticket->seal(tokens, {}, here);
      EXPECT_TRUE(sealed.ok()) << sealed;
      if (sealed.ok()) {
        ledger.add(sequence, tokens);
        ++tally.stored;
      }
    } else if (kind < 85) {  // read another's sequence and compare every byte
      const auto [other, tokens] = ledger.pick(rng);
      if (other == 0) continue;
      absl::StatusOr<Lease> lease = client.acquire(SequenceId(other));
      if (!lease.ok()) {
        EXPECT_TRUE(is_expected(lease.status())) << lease.status();
        ++tally.refused;
        continue;
      }
      EXPECT_EQ(lease->pages().tokens, tokens);
      EXPECT_TRUE(lease_is(client, lease->pages(), other))
          << "sequence " << other << " read by client " << number << ", operation " << operation;
      EXPECT_TRUE(lease->recheck().ok());
      tally.pages_verified += static_cast<int64_t>(lease->pages().paged.size());
      const absl::Status released = lease->release();
      EXPECT_TRUE(released.ok()) << released;
    } else if (kind < 93) {  // go on from another's sequence, then take it back
      const auto [other, tokens] = ledger.pick(rng);
      if (other == 0) continue;
      absl::StatusOr<Lease> lease = client.acquire(SequenceId(other));
      if (!lease.ok()) {
        EXPECT_TRUE(is_expected(lease.status())) << lease.status();
        continue;
      }
      absl::StatusOr<Ticket> ticket = client.adopt(*std::move(lease), SequenceId(sequence), tokens + rng.between(1, page_tokens));
      if (!ticket.ok()) {
        EXPECT_TRUE(is_expected(ticket.status())) << ticket.status();
        ++tally.refused;
        continue;
      }
      client::Pages shared;
      shared.paged.assign(ticket->pages().paged.begin(), ticket->pages().paged.begin() + static_cast<std::ptrdiff_t>(tokens / page_tokens));
      EXPECT_TRUE(lease_is(client, shared, other)) << "adopted sequence " << other;
      tally.pages_verified += static_cast<int64_t>(shared.paged.size());
      EXPECT_TRUE(ticket->forfeit().ok());
    } else {  // an operator makes room
      v1::EvictRequest evict;
      evict.set_pages(rng.between(1, 8));
      v1::EvictReply evicted;
      EXPECT_TRUE(daemon.operate(&v1::Operator::Stub::Evict, evict, &evicted).ok());
    }
  }
}

void run(DaemonProcess& daemon, int64_t operations) {
  Ledger ledger;
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < kClients; ++i) clients.push_back(daemon.attach("stress-" + std::to_string(i)));
  std::vector<Tally> tallies(kClients);
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) {
    ASSERT_NE(clients[static_cast<size_t>(i)], nullptr);
    threads.emplace_back(
        [&, i] { operate(*clients[static_cast<size_t>(i)], daemon, ledger, i, operations / kClients, tallies[static_cast<size_t>(i)]); });
  }
  for (std::thread& thread : threads) thread.join();
  Tally all;
  for (const Tally& tally : tallies) {
    all.stored += tally.stored;
    all.pages_verified += tally.pages_verified;
    all.refused += tally.refused;
  }
  std::printf("%lld sequences stored, %lld pages verified, %lld calls refused\n", static_cast<long long>(all.stored),
              static_cast<long long>(all.pages_verified), static_cast<long long>(all.refused));
  EXPECT_GT(all.stored, operations / 20);
  EXPECT_GT(all.pages_verified, operations / 10);
  EXPECT_TRUE(eventually(5, [&] { return daemon.at_rest(); }));
  daemon.expect_sums();
}

TEST(Stress, small_pages_are_never_mixed_up) {
  Folder folder;
  std::ofstream(folder.path() / "small.txt") << format_set_text(small_formats());
  DaemonProcess daemon(folder, "one",
                       "[memory]\nbytes = \"32M\"\nscratch_bytes = \"1M\"\nchunk_bytes = \"2M\"\n[transport]\nkind = "
                       "\"none\"\n[pool.default]\nformat_file = \"" +
                           (folder.path() / "small.txt").string() + "\"\nratio_paged = 5\nratio_window = 6\nratio_state = 4\n");
  daemon.start();
  run(daemon, count_of("e2e_small_operations"));
}

TEST(Stress, full_size_pages_are_never_mixed_up) {
  Folder folder;
  DaemonProcess daemon(folder, "one",
                       "[memory]\nbytes = \"321M\"\nscratch_bytes = \"1M\"\nchunk_bytes = \"8M\"\n[transport]\nkind = "
                       "\"none\"\n[pool.default]\nmodel = \"raw\"\nratio_paged = "
                       "2\nratio_window = 4\nratio_state = 2\n");
  daemon.start();
  run(daemon, count_of("e2e_full_operations"));
}

}  // namespace
}  // namespace needle::testing
