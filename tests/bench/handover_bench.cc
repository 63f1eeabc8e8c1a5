// How long a hand-over takes: from Client::ship to the lease on the copy, between two real daemons on the loopback, for
// prompts that are wholly stored when the ship starts. Small ones are what control messages cost; large ones, what bytes do.
//
// What must stay true:
//  1. Every sequence is shipped once: nothing is shared with what the reader has.
//  2. The first ship between the two daemons is shown apart: it may find no link yet.
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

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string lanes = argc > 1 ? argv[1] : "";  // UCX transports of both daemons; empty: the default
  needle::testing::Folder folder;
  needle::testing::DaemonProcess source(folder, "source", needle::testing::DaemonProcess::default_config(1'024));
  needle::testing::DaemonProcess reader(folder, "reader", needle::testing::DaemonProcess::default_config(1'024));
  source.know_peer(reader);
  reader.know_peer(source);
  if (!lanes.empty()) {
    for (auto* daemon : {&source, &reader}) daemon->add_argument("--transport-lanes=" + lanes);
  }
  source.start();
  reader.start();
  NEEDLE_CHECK(needle::testing::eventually(20, [&] { return reader.peer_is("source", "up") && source.peer_is("reader", "up"); }),
               "the daemons do not meet");
  const auto writer = source.attach();
  const auto engine = reader.attach();
  NEEDLE_CHECK(writer != nullptr && engine != nullptr, "no client");
  CallerThread here;
  const SteadyClock clock;
  uint64_t sequence = 0;
  const auto hand_over = [&](int64_t pages) {
    ++sequence;
    absl::StatusOr<client::Ticket> ticket = writer->reserve(SequenceId(sequence), pages * 256);
    NEEDLE_CHECK(ticket.ok(), ticket.status().ToString().c_str());
    needle::testing::fill_ticket(*writer, *ticket, sequence);
    NEEDLE_CHECK(ticket->seal(pages * 256, {}, here).ok(), "not sealed");
    const int64_t start_ns = clock.now_ns();
    absl::StatusOr<client::Ship> ship = engine->ship("source", SequenceId(sequence), 20'000);
    NEEDLE_CHECK(ship.ok(), ship.status().ToString().c_str());
    const absl::StatusOr<client::Lease> lease = ship->wait();
    NEEDLE_CHECK(lease.ok(), lease.status().ToString().c_str());
    const double ms = static_cast<double>(clock.now_ns() - start_ns) * 1e-6;
    NEEDLE_CHECK(needle::testing::lease_is(*engine, lease->pages(), sequence), "other bytes arrived");
    return ms;
  };
  std::printf("first ship of 1 page: %.2f ms\n", hand_over(1));
  const double page_mb = static_cast<double>(engine->layout(PoolKind::kPaged).stride_bytes()) * 1e-6;
  for (const int64_t pages : {1, 4, 16, 64}) {
    std::vector<double> ms;
    for (int64_t i = 0; i < (pages > 16 ? 20 : 60); ++i) ms.push_back(hand_over(pages));
    const double median = at_quantile_ms(ms, 0.5);
    std::printf("pages=%" PRId64 " mb=%.1f ships=%zu median_ms=%.2f p10_ms=%.2f p90_ms=%.2f max_ms=%.2f gb_per_s_of_pages=%.2f\n", pages,
                page_mb * static_cast<double>(pages), ms.size(), median, at_quantile_ms(ms, 0.1), at_quantile_ms(ms, 0.9),
                at_quantile_ms(ms, 1.0), page_mb * static_cast<double>(pages) / median);
  }
  return 0;
}
