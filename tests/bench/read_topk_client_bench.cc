// What the client library adds to a local read: Client::read_topk beside read_topk_cpu on the very same views, plan and
// queries, against a real needled.
//
// What must stay true:
//  1. Both calls are timed in turn within one run, so that whatever the machine does meets both.
//  2. The answers are compared: the same positions, or the program ends.
//  3. The bare call allocates nothing: its scratch and outputs are made once. What the library's answer needs (vectors of
//     its own, a launch, its counters) is its cost.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "base/clock.h"
#include "base/rng.h"
#include "kernels/read_topk.h"
#include "tests/bench/bench_process.h"
#include "tests/e2e/processes.h"

namespace {

using namespace needle;

double quantile_us(std::vector<int64_t> ns, double q) {
  const auto at = ns.begin() + static_cast<std::ptrdiff_t>(q * static_cast<double>(ns.size() - 1));
  std::nth_element(ns.begin(), at, ns.end());
  return static_cast<double>(*at) * 1e-3;
}

uint16_t bf16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

void measure(client::Client& client, const client::Pages& pages, int64_t entries, int32_t heads, int32_t k, int64_t repeats, Rng& rng) {
  constexpr int64_t kRatio = 4;
  const SteadyClock clock;
  CallerThread here;
  std::vector<uint16_t> q(static_cast<size_t>(heads) * 128);
  std::vector<float> weights(static_cast<size_t>(heads));
  for (uint16_t& value : q) value = bf16(static_cast<float>(rng.below(2000)) * 1e-3f - 1.0f);
  for (float& value : weights) value = static_cast<float>(rng.below(1000)) * 1e-3f;
  const std::vector<int64_t> position = {entries * kRatio - 1};
  client::TopkQuery query;
  query.q = q;
  query.head_weights = weights;
  query.positions = position;
  query.heads = heads;
  query.prepared = true;
  query.k = k;
  client::Pages visible_pages = pages;
  visible_pages.tokens = entries * kRatio;
  visible_pages.paged.resize(static_cast<size_t>(div_ceil(entries, int64_t{64})));

  const std::vector<int32_t> table = visible_pages.paged_ids();
  const auto visible = static_cast<int32_t>(entries);
  const int64_t stride = round_up(static_cast<int64_t>(k), int64_t{64});
  std::vector<int32_t> positions(static_cast<size_t>(stride));
  std::vector<int32_t> slots(static_cast<size_t>(stride));
  std::vector<float> scores(static_cast<size_t>(stride));
  int32_t count = 0;
  OpReport report{};
  ReadTopkArgs args;
  args.logits.keys = client.layer(PoolKind::kPaged, 0, 0);
  args.logits.pages = {table.data(), nullptr, static_cast<int64_t>(table.size()), 1, static_cast<int32_t>(table.size())};
  args.logits.q = q.data();
  args.logits.head_weights = weights.data();
  args.logits.queries_per_row = 1;
  args.logits.visible = &visible;
  args.logits.query_count = 1;
  args.logits.heads = heads;
  args.entries_max = entries;
  args.k = k;
  args.positions = positions.data();
  args.slots = slots.data();
  args.out_scores = scores.data();
  args.counts = &count;
  args.out_stride = stride;
  args.report = &report;
  const absl::StatusOr<ReadTopkPlan> plan = plan_read_topk_cpu(args, here.width());
  NEEDLE_CHECK(plan.ok(), plan.status().ToString().c_str());
  std::vector<std::byte> scratch(static_cast<size_t>(plan->scratch_bytes) + 64);
  void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  const CpuIsa isa = best_cpu_isa();

  std::vector<int64_t> bare_ns;
  std::vector<int64_t> client_ns;
  for (int64_t i = 0; i < repeats; ++i) {
    const int64_t a = clock.now_ns();
    const absl::Status status = read_topk_cpu(args, *plan, isa, here, aligned, plan->scratch_bytes);
    const int64_t b = clock.now_ns();
    const absl::StatusOr<client::TopkAnswer> answer = client.read_topk(visible_pages, query, here);
    const int64_t c = clock.now_ns();
    NEEDLE_CHECK(status.ok() && answer.ok(), "a read failed");
    if (i % 64 == 0) NEEDLE_CHECK(answer->positions == positions, "the library's answer is not the kernel's");
    if (i < repeats / 10) continue;  // warm
    bare_ns.push_back(b - a);
    client_ns.push_back(c - b);
  }
  std::vector<int64_t> difference_ns(bare_ns.size());
  for (size_t i = 0; i < bare_ns.size(); ++i) difference_ns[i] = client_ns[i] - bare_ns[i];
  std::printf("entries=%" PRId64
              " heads=%d k=%d repeats=%zu kernel_us=%.2f client_us=%.2f beyond_us=%.2f (medians; of the differences: p10 %.2f, median "
              "%.2f, p90 %.2f)\n",
              entries, heads, k, bare_ns.size(), quantile_us(bare_ns, 0.5), quantile_us(client_ns, 0.5),
              quantile_us(client_ns, 0.5) - quantile_us(bare_ns, 0.5), quantile_us(difference_ns, 0.1), quantile_us(difference_ns, 0.5),
              quantile_us(difference_ns, 0.9));
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  needle::testing::Folder folder;
  needle::testing::DaemonProcess daemon(folder, "bench",
                                        needle::testing::DaemonProcess::default_config(512) + "[transport]\nkind = \"none\"\n");
  daemon.start();
  const std::unique_ptr<client::Client> client = daemon.attach();
  NEEDLE_CHECK(client != nullptr, "needled did not start");
  constexpr int64_t kTokens = 65'536;
  absl::StatusOr<client::Ticket> ticket = client->reserve(SequenceId(1), kTokens);
  NEEDLE_CHECK(ticket.ok(), ticket.status().ToString().c_str());
  Rng rng(20261129);
  const MutableLayerView layer = *client->writable_layer(PoolKind::kPaged, 0, 0);
  for (const PageId& page : ticket->pages().paged) {
    auto* values = reinterpret_cast<uint16_t*>(layer.base + layer.page_stride * page.index.value());
    for (int i = 0; i < 64 * 128; ++i) values[i] = bf16(static_cast<float>(rng.below(2000)) * 1e-3f - 1.0f);
  }
  CallerThread here;
  const absl::StatusOr<client::Lease> lease = ticket->seal_and_keep(kTokens, {}, here);
  NEEDLE_CHECK(lease.ok(), lease.status().ToString().c_str());
  for (const int32_t heads : {1, 64}) {
    for (const int64_t entries : {64, 256, 1'024, 4'096, 16'384}) {
      const int64_t repeats = std::clamp<int64_t>(40'000'000 / (entries * heads), 100, 10'000);
      measure(*client, lease->pages(), entries, heads, 512, repeats, rng);
    }
  }
  return 0;
}
