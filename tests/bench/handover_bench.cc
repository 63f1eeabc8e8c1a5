// How long a hand-over takes: from Client::ship to the lease on the copy, between two real daemons on the loopback, for
// prompts that are wholly stored when the ship starts. Small ones are what control messages cost; large ones, what bytes do.
//
// What must stay true:
//  1. Every sequence is shipped once: nothing is shared with what the reader has.
//  2. The first ship between two daemons is shown apart: it may find no link yet.
//  3. The bytes of one page of every ship are compared with what was written.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>

#include "base/clock.h"
#include "tests/bench/bench_process.h"
#include "tests/e2e/processes.h"

namespace {

using namespace needle;

double at_quantile_ms(std::vector<double> ms, double q) {
  std::sort(ms.begin(), ms.end());
  return ms[static_cast<size_t>(q * static_cast<double>(ms.size() - 1))];
}

// Two daemons that have met, and a client of each.
class Handover {
 public:
  explicit Handover(const std::string& lanes) {
    source_.know_peer(reader_);
    reader_.know_peer(source_);
    if (!lanes.empty()) {
      for (auto* daemon : {&source_, &reader_}) daemon->add_argument("--transport-lanes=" + lanes);
    }
    source_.start();
    reader_.start();
    NEEDLE_CHECK(needle::testing::eventually(20, [&] { return reader_.peer_is("source", "up") && source_.peer_is("reader", "up"); }),
                 "the daemons do not meet");
    writer_ = source_.attach();
    engine_ = reader_.attach();
  }

  // A prompt of so many pages; the milliseconds that its ship took.
  double ship(int64_t pages) {
    ++sequence_;
    absl::StatusOr<client::Ticket> ticket = writer_->reserve(SequenceId(sequence_), pages * 256);
    NEEDLE_CHECK(ticket.ok(), ticket.status().ToString().c_str());
    needle::testing::fill_ticket(*writer_, *ticket, sequence_);
    NEEDLE_CHECK(ticket->seal(pages * 256, {}, here_).ok(), "not sealed");
    const int64_t start_ns = clock_.now_ns();
    absl::StatusOr<client::Ship> ship = engine_->ship("source", SequenceId(sequence_), 20'000);
    NEEDLE_CHECK(ship.ok(), ship.status().ToString().c_str());
    const absl::StatusOr<client::Lease> lease = ship->wait();
    NEEDLE_CHECK(lease.ok(), lease.status().ToString().c_str());
    const double ms = static_cast<double>(clock_.now_ns() - start_ns) * 1e-6;
    NEEDLE_CHECK(needle::testing::lease_is(*engine_, lease->pages(), sequence_), "other bytes arrived");
    return ms;
  }

  double page_mb() const { return static_cast<double>(engine_->layout(PoolKind::kPaged).stride_bytes()) * 1e-6; }

 private:
  needle::testing::Folder folder_;
  needle::testing::DaemonProcess source_{folder_, "source", needle::testing::DaemonProcess::default_config(1'024)};
  needle::testing::DaemonProcess reader_{folder_, "reader", needle::testing::DaemonProcess::default_config(1'024)};
  std::unique_ptr<client::Client> writer_;
  std::unique_ptr<client::Client> engine_;
  CallerThread here_;
  const SteadyClock clock_;
  uint64_t sequence_ = 0;
};

// What the very first ship of two daemons costs, over and over, with the next ones beside it.
void first_ships(const std::string& lanes, int pairs) {
  std::vector<double> first;
  std::vector<double> second;
  std::vector<double> third;
  for (int i = 0; i < pairs; ++i) {
    Handover fresh(lanes);
    for (auto* ms : {&first, &second, &third}) ms->push_back(fresh.ship(1));
  }
  for (const auto& [name, ms] : {std::pair{"first", &first}, std::pair{"second", &second}, std::pair{"third", &third}}) {
    std::printf("%s ship of 1 page: pairs=%zu median_ms=%.2f p10_ms=%.2f p90_ms=%.2f max_ms=%.2f\n", name, ms->size(),
                at_quantile_ms(*ms, 0.5), at_quantile_ms(*ms, 0.1), at_quantile_ms(*ms, 0.9), at_quantile_ms(*ms, 1.0));
  }
}

}  // namespace

// usage: handover_bench [LANES [FRESH_PAIRS]]; with pairs, only the first ships of so many fresh pairs
int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string lanes = argc > 1 ? argv[1] : "";  // UCX transports of both daemons; empty: the default
  if (argc > 2) {
    first_ships(lanes, std::atoi(argv[2]));
    return 0;
  }
  Handover pair(lanes);
  std::printf("first ship of 1 page: %.2f ms\n", pair.ship(1));
  for (const int64_t pages : {1, 4, 16, 64}) {
    std::vector<double> ms;
    for (int64_t i = 0; i < (pages > 16 ? 20 : 60); ++i) ms.push_back(pair.ship(pages));
    const double median = at_quantile_ms(ms, 0.5);
    std::printf("pages=%" PRId64 " mb=%.1f ships=%zu median_ms=%.2f p10_ms=%.2f p90_ms=%.2f max_ms=%.2f gb_per_s_of_pages=%.2f\n", pages,
                pair.page_mb() * static_cast<double>(pages), ms.size(), median, at_quantile_ms(ms, 0.1), at_quantile_ms(ms, 0.9),
                at_quantile_ms(ms, 1.0), pair.page_mb() * static_cast<double>(pages) / median);
  }
  return 0;
}
