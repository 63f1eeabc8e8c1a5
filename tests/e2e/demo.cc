// The main job on real data: store on a prefill daemon, ship while storing, select on a decode daemon, and hold every
// answer against float64.
//
//   needle_demo --prefill ATTACH_SOCKET --decode ATTACH_SOCKET --prefill-name NAME [--quick] [--sabotage WHAT]
//
// What must stay true:
//  1. Exits non-zero when a bf16 needle of the sweep is missed, any served set differs from float64 on the stored keys by
//     more than kTolerance, or a daemon's accounting does not add up. Everything else is reported, not judged.
//  2. Keys that float64 sees are read from the decode daemon's own pages, with arithmetic of this file, not the kernels'.
//  3. Nothing is tuned to make a format fail or pass: cells follow recall/needle_cells.h, data is as published.
//
// --sabotage flight | pool | table shows that the checks bite: one byte of a sealed page changed at the source, one byte
// of a key of an exact set changed in the decode pool, one page-table entry exchanged. Each must end in exit status 3.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/units.h"
#include "client/client.h"
#include "kernels/compressor_state.h"
#include "kernels/format_set.h"
#include "kernels/quantise.h"
#include "kernels/store.h"
#include "proto/attach.h"
#include "proto/needle.grpc.pb.h"
#include "recall/measures.h"
#include "recall/needle_cells.h"
#include "tests/kernels/safetensors.h"
#include "tests/kernels/vectors.h"

namespace needle {
namespace {

using client::Client;
using client::Lease;
using client::Pages;
using client::Ship;
using client::Ticket;
using client::TopkAnswer;
using client::TopkQuery;

constexpr int kDim = 128;
constexpr int kTopk = 512;
constexpr int kTokensPerEntry = 4;
constexpr double kTolerance = 4e-6;                 // relative, of the k-th logit: fp32 sums against float64
constexpr int64_t kPrefillChunkTokens = 2048;       // a usual prefill chunk
constexpr double kPrefillTokensPerSecond = 50'000;  // pace of the stored-while-shipped run: a fast prefill engine
constexpr int64_t kShipMs = 60'000;

int failures = 0;

void fail(const std::string& what) {
  std::printf("  FAILED: %s\n", what.c_str());
  ++failures;
}

[[noreturn]] void stop(const std::string& what) {
  std::fprintf(stderr, "needle_demo: %s\n", what.c_str());
  std::exit(1);
}

template <class Value>
Value need(absl::StatusOr<Value> value, const char* what) {
  if (!value.ok()) stop(absl::StrCat(what, ": ", value.status().ToString()));
  return *std::move(value);
}
void need(const absl::Status& status, const char* what) {
  if (!status.ok()) stop(absl::StrCat(what, ": ", status.ToString()));
}

double seconds_now() { return static_cast<double>(SteadyClock().now_ns()) / 1e9; }

struct Arguments {
  std::string prefill;
  std::string decode;
  std::string prefill_name = "prefill";
  bool quick = false;
  std::string sabotage;
};

// ---------------------------------------------------------------------------------------------------- one side each

struct Engine {
  std::unique_ptr<Client> client;
  std::string pool_set;
};

Engine attach(const std::string& socket, const std::string& pool_set, const ModelFormats& formats, const char* name) {
  client::AttachOptions options;
  options.socket = socket;
  options.pool_set = pool_set;
  options.formats = formats;
  options.client_name = name;
  options.call_ms = 20'000;
  return {need(Client::attach(options), "attach"), pool_set};
}

ModelFormats raw_formats(ElementFormat index_k) {
  PresetOptions options;
  options.index_k = index_k;
  return need(preset_formats("raw", options), "the raw preset");
}

// One key = one entry, finished already: rows go through the store kernel of this process into layer 0.
void store_keys(Client& prefill, const Ticket& ticket, const std::vector<uint16_t>& keys, int64_t first_entry, int64_t count,
                Workers& workers) {
  const MutableLayerView layer = need(prefill.writable_layer(PoolKind::kPaged, 0, 0), "index-K view");
  const std::vector<int32_t> pages = ticket.pages().paged_ids();
  std::vector<int64_t> slots(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t entry = first_entry + i;
    const int64_t page = pages[static_cast<size_t>(entry / layer.slots_per_page)];
    slots[static_cast<size_t>(i)] = page * layer.slots_per_page + entry % layer.slots_per_page;
  }
  OpReport report{};
  StorePooledArgs args;
  args.chain.component = prefill.formats().paged.components[0];
  args.chain.norm = NormKind::kNone;
  args.out = layer;
  args.rows = {keys.data() + first_entry * kDim, kDim, RowElement::kBf16};
  args.slots = slots.data();
  args.count = count;
  args.report = &report;
  const client::Launch launch = need(prefill.launch(), "launch");
  need(store_pooled_cpu(args, best_cpu_isa(), workers), "store");
  if (report.status != 0) stop(absl::StrCat("store reported status ", report.status));
}

struct Shipped {
  Lease lease;
  int64_t bytes = 0;
  double ship_seconds = 0;
  double first_page_seconds = -1;  // after the first chunk's store began
  double last_store_seconds = -1;
};

uint64_t next_sequence = 1;

// Stores `keys` as a new sequence on the prefill side and ships it to the decode side. `paced`: the ship starts after the
// first chunk and runs beside the others, which come at a prefill engine's pace.
Shipped store_and_ship(Engine& prefill, Engine& decode, const std::string& peer, const std::vector<uint16_t>& keys, bool paced,
                       const std::string& sabotage) {
  WorkerThreads workers(1);
  const auto entries = static_cast<int64_t>(keys.size()) / kDim;
  const int64_t tokens = entries * kTokensPerEntry;
  const SequenceId sequence(static_cast<uint64_t>(SteadyClock().now_ns()) << 8 | (next_sequence++ & 0xFF));
  Ticket ticket = need(prefill.client->reserve(sequence, tokens), "reserve");
  Shipped result;
  const double begin = seconds_now();
  const int64_t chunk = kPrefillChunkTokens / kTokensPerEntry;
  std::unique_ptr<Ship> ship;
  std::thread watcher;
  std::atomic<bool> stored{false};
  std::atomic<double> first_page{-1.0};
  const std::vector<PageId> pages = ticket.pages().paged;
  for (int64_t at = 0; at < entries; at += chunk) {
    const int64_t count = std::min(chunk, entries - at);
    if (paced) {
      const double due = begin + static_cast<double>(at * kTokensPerEntry) / kPrefillTokensPerSecond;
      const double wait = due - seconds_now();
      if (wait > 0) std::this_thread::sleep_for(std::chrono::duration<double>(wait));
    }
    store_keys(*prefill.client, ticket, keys, at, count, workers);
    result.last_store_seconds = seconds_now() - begin;
    const int64_t done = (at + count) * kTokensPerEntry;
    if (done < tokens) need(ticket.seal_pages(done, {}, workers), "seal pages");
    if (sabotage == "flight" && ship == nullptr) {
      // The page was sealed with its checksum and not yet shipped: what arrives is another byte.
      const MutableLayerView layer = need(prefill.client->writable_layer(PoolKind::kPaged, 0, 0), "index-K view");
      layer.base[layer.page_stride * pages[0].index.value() + 5] ^= std::byte{1};
    }
    if (paced && ship == nullptr) {
      ship = std::make_unique<Ship>(need(decode.client->ship(peer, sequence, kShipMs), "ship"));
      watcher = std::thread([&] {
        while (!stored.load()) {
          const auto view = ship->progress();
          if (view.ok() && view->pages_arrived > 0) {
            first_page.store(seconds_now() - begin);
            return;
          }
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      });
    }
  }
  need(ticket.seal(tokens, {}, workers), "seal");
  stored = true;
  if (watcher.joinable()) watcher.join();
  result.first_page_seconds = first_page.load();
  const double ship_begin = seconds_now();
  if (ship == nullptr) ship = std::make_unique<Ship>(need(decode.client->ship(peer, sequence, kShipMs), "ship"));
  absl::StatusOr<Lease> lease = ship->wait();
  result.ship_seconds = seconds_now() - ship_begin;
  if (!lease.ok()) {
    if (!sabotage.empty()) {
      std::printf("  the ship failed, as it must: %s\n", std::string(lease.status().message()).c_str());
      std::exit(3);
    }
    stop(absl::StrCat("ship: ", lease.status().ToString()));
  }
  result.lease = *std::move(lease);
  const auto stride = [&](PoolKind kind) { return decode.client->layout(kind).stride_bytes(); };
  const Pages& arrived = result.lease.pages();
  result.bytes = static_cast<int64_t>(arrived.paged.size()) * stride(PoolKind::kPaged) +
                 static_cast<int64_t>(arrived.window.size()) * stride(PoolKind::kWindow) +
                 (arrived.state.index.is_none() ? 0 : stride(PoolKind::kState));
  return result;
}

// The stored keys of layer 0 as the decode daemon's pages hold them, widened with this file's own arithmetic.
std::vector<float> stored_keys(const Client& decode, const Pages& pages, int64_t entries) {
  const LayerView layer = decode.layer(PoolKind::kPaged, 0, 0);
  std::vector<float> keys(static_cast<size_t>(entries * kDim));
  for (int64_t entry = 0; entry < entries; ++entry) {
    const int64_t page = pages.paged[static_cast<size_t>(entry / layer.slots_per_page)].index.value();
    const SlotPlace place = slot_place(layer.element, layer.head_dim, layer.slots_per_page, entry % layer.slots_per_page);
    const std::byte* bytes = layer.base + layer.page_stride * page;
    float* key = keys.data() + entry * kDim;
    if (layer.element == ElementFormat::kBf16) {
      for (int d = 0; d < kDim; ++d) {
        uint16_t bits;
        std::memcpy(&bits, bytes + place.data + 2 * d, sizeof bits);
        key[d] = float_of_bf16(bits);
      }
      continue;
    }
    float scale;
    std::memcpy(&scale, bytes + place.scale, sizeof scale);
    for (int d = 0; d < kDim; ++d) key[d] = float_of_e4m3(static_cast<uint8_t>(bytes[place.data + d])) * scale;
  }
  return keys;
}

// --------------------------------------------------------------------------------------------------------- (a) golden

// Raw kv/gate rows of the public implementation through the whole fused store, against its expected keys, rotated.
void check_golden_store(Engine& prefill) {
  std::printf("\n(a) fused store: pool, norm, RoPE, rotation and rounding against the public implementation's keys\n");
  int files = 0;
  for (const auto& path : std::filesystem::directory_iterator(std::filesystem::path(NEEDLE_SOURCE_DIR) / "tests" / "golden")) {
    if (path.path().extension() != ".safetensors") continue;
    const testing::SafetensorsFile file = need(testing::read_safetensors(path.path()), "golden file");
    if (!file.has("kv") || !file.has("gate") || !file.has("expected_keys") || !file.has("rope_inv_freq")) continue;
    const std::vector<float> kv = file.at("kv").floats();
    const std::vector<float> gate = file.at("gate").floats();
    const std::vector<float> bias = file.at("position_bias").floats();
    const std::vector<float> norm = file.at("norm_weight").floats();
    const std::vector<float> expected = file.at("expected_keys").floats();
    const std::vector<float> frequencies = file.at("rope_inv_freq").floats();
    Component component = prefill.client->formats().paged.components[0];
    float ours[kRopePairs];
    need(rope_inverse_frequencies(component.rope_table, ours), "RoPE frequencies");
    bool same_rope = true;
    for (int i = 0; i < kRopePairs; ++i) {
      same_rope = same_rope && std::fabs(frequencies[static_cast<size_t>(i)] - ours[i]) <= 1e-6f * ours[i];
    }
    if (!same_rope) continue;  // a file of another RoPE table than this pool's
    const int64_t tokens = file.at("kv").shape[0];
    const int64_t entries = tokens / kTokensPerEntry;
    Ticket ticket = need(prefill.client->reserve(SequenceId(static_cast<uint64_t>(SteadyClock().now_ns())), tokens), "reserve");
    CallerThread here;
    const StateView state = need(prefill.client->state_view(0, 0), "state view");
    OpReport report{};
    const StateStart start{static_cast<int64_t>(ticket.pages().state.index.value()), 1, 0, -1, 1, 0};
    InitStateArgs init;
    init.state = state;
    init.starts = &start;
    init.count = 1;
    init.report = &report;
    const client::Launch launch = need(prefill.client->launch(), "launch");
    need(init_state_cpu(init, here), "init state");
    const std::vector<int32_t> pages = ticket.pages().paged_ids();
    StoreSequence sequence;
    sequence.row_count = tokens;
    sequence.record = start.record;
    sequence.sequence = 1;
    sequence.generation = 1;
    StoreRowsArgs args;
    args.chain.component = component;
    args.chain.norm = NormKind::kRms;
    args.chain.norm_weight = norm.data();
    args.chain.rope = need(prefill.client->rope_table(component.rope_table, 4096), "RoPE table");
    args.out = need(prefill.client->writable_layer(PoolKind::kPaged, 0, 0), "index-K view");
    args.pages = {pages.data(), nullptr, static_cast<int64_t>(pages.size()), 1, static_cast<int32_t>(pages.size())};
    args.kv = {kv.data(), 2 * kDim, RowElement::kFp32};
    args.gate = {gate.data(), 2 * kDim, RowElement::kFp32};
    args.position_bias = bias.data();
    args.rows = tokens;
    args.sequences = &sequence;
    args.sequence_count = 1;
    args.state = state;
    args.report = &report;
    need(store_rows_cpu(args, best_cpu_isa(), here), "fused store");
    if (report.status != 0) stop(absl::StrCat("fused store reported status ", report.status));
    const std::vector<float> stored = stored_keys(*prefill.client, ticket.pages(), entries);
    int64_t beyond = 0;
    double worst = 0;
    for (int64_t entry = 0; entry < entries; ++entry) {
      double rotated[kDim];
      double largest = 0;
      for (int i = 0; i < kDim; ++i) {
        double sum = 0;
        for (int j = 0; j < kDim; ++j) {
          const double sign = __builtin_popcount(static_cast<unsigned>(i & j)) % 2 == 0 ? 1 : -1;
          sum += sign * static_cast<double>(expected[static_cast<size_t>(entry * kDim + j)]);
        }
        rotated[i] = sum * 0.08838834764831845;
        largest = std::max(largest, std::fabs(rotated[i]));
      }
      for (int i = 0; i < kDim; ++i) {
        const double value = stored[static_cast<size_t>(entry * kDim + i)];
        const double step = std::ldexp(1.0, std::ilogb(std::max(std::fabs(value), 1e-30)) - 7);
        const double error = std::fabs(value - rotated[i]);
        worst = std::max(worst, error / largest);
        // The golden keys are fp32 results of another summation order: 2e-5 of the row beside the half step.
        if (error > 0.5 * step + 2e-5 * largest) ++beyond;
      }
    }
    std::printf("  %lld tokens -> %lld entries; largest difference %.2e of the row, beyond half a bf16 step: %lld of %lld\n",
                static_cast<long long>(tokens), static_cast<long long>(entries), worst, static_cast<long long>(beyond),
                static_cast<long long>(entries * kDim));
    if (beyond != 0) fail("the fused store differs from the public implementation");
    ++files;
  }
  if (files == 0) fail("no golden file with this pool's RoPE table was found");
}

// ------------------------------------------------------------------------------------------------------- (c) selection

struct Asked {
  recall::SelectionVerdict verdict;
  bool found = false;
  int64_t rank = 0;
  double overlap = 0;  // with float64 on the unquantised (bf16) keys
};

// Asks query `row` of `set` of the decode side's own pages.
Asked ask(Engine& decode, const Pages& pages, const testing::VectorSet& set, int row, const std::vector<float>& stored,
          const std::vector<float>& original, recall::NeedleSpan span, bool swap_table, double& read_seconds) {
  const auto heads = static_cast<size_t>(set.heads);
  const auto q = std::span(set.query_bits).subspan(static_cast<size_t>(row) * heads * kDim, heads * kDim);
  const auto weights = std::span(set.weights).subspan(static_cast<size_t>(row) * heads, heads);
  const int64_t position = pages.tokens - 1;
  TopkQuery query;
  query.q = q;
  query.head_weights = weights;
  query.positions = std::span(&position, 1);
  query.heads = set.heads;
  query.prepared = true;  // the published weights carry their factors, and these keys have neither RoPE nor rotation
  query.k = kTopk;
  CallerThread here;
  Pages table = pages;
  if (swap_table && table.paged.size() > 1) table.paged[0] = table.paged[1];
  const double begin = seconds_now();
  const TopkAnswer answer = need(decode.client->read_topk(table, query, here), "read_topk");
  read_seconds += seconds_now() - begin;
  const std::vector<int32_t> served(answer.positions.begin(), answer.positions.begin() + answer.counts[0]);
  std::vector<float> wide(q.size());
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = float_of_bf16(q[i]);
  const recall::QueryView view{wide, weights};
  const std::vector<double> on_stored = recall::exact_logits(stored, view);
  Asked asked;
  asked.verdict = recall::judge_selection(served, on_stored, kTopk, kTolerance);
  const std::vector<double> on_original = recall::exact_logits(original, view);
  asked.overlap = recall::overlap(served, recall::exact_topk(on_original, kTopk));
  if (span.end > span.start) {
    int32_t best = static_cast<int32_t>(span.start);
    for (int64_t entry = span.start; entry < span.end; ++entry) {
      if (on_original[static_cast<size_t>(entry)] > on_original[static_cast<size_t>(best)]) best = static_cast<int32_t>(entry);
    }
    asked.found = std::find(served.begin(), served.end(), best) != served.end();
    asked.rank = recall::rank_of(on_original, best);
  }
  return asked;
}

std::vector<float> widen(const std::vector<uint16_t>& keys) {
  std::vector<float> wide(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) wide[i] = float_of_bf16(keys[i]);
  return wide;
}

std::vector<uint16_t> keys_of_cell(const testing::VectorSet& set, const recall::NeedleCell& cell) {
  std::vector<uint16_t> keys(cell.source.size() * kDim);
  for (size_t i = 0; i < cell.source.size(); ++i) {
    std::memcpy(keys.data() + i * kDim, set.key_bits.data() + static_cast<size_t>(cell.source[i]) * kDim, kDim * 2);
  }
  return keys;
}

struct SpanList {
  std::vector<recall::NeedleSpan> spans;
  std::vector<int> rows;
};

SpanList read_spans(const char* meta_name) {
  std::ifstream stream(testing::vectors_dir() / meta_name);
  const nlohmann::json meta = nlohmann::json::parse(stream, nullptr, false);
  if (!meta.is_object() || !meta.contains("needles")) stop(absl::StrCat(meta_name, " holds no needles"));
  SpanList list;
  for (const auto& needle : meta["needles"]) {
    list.spans.push_back({needle["start"].get<int64_t>(), needle["end"].get<int64_t>()});
    list.rows.push_back(needle["query_row"].get<int>());
  }
  return list;
}

void judge(const Asked& asked, bool bf16, bool must_find, const std::string& what, const std::string& sabotage) {
  if (!asked.verdict.exact) {
    const std::string message =
        absl::StrCat(what, ": the served set differs from float64 on the stored keys (", asked.verdict.beyond_tolerance, " members beyond ",
                     kTolerance, " relative, worst gap ", asked.verdict.worst_gap, ", ", asked.verdict.foreign, " foreign, count off by ",
                     asked.verdict.wrong_count, ")");
    if (!sabotage.empty()) {
      std::printf("  caught, as it must be: %s\n", message.c_str());
      std::exit(3);
    }
    fail(message);
  }
  if (bf16 && must_find && !asked.found) fail(absl::StrCat(what, ": the needle is not in the served set"));
}

struct FormatRun {
  const char* name;
  ElementFormat element;
  Engine prefill;
  Engine decode;
};

void sweep(FormatRun& run, const Arguments& arguments, const testing::VectorSet& set, const SpanList& needles) {
  const bool bf16 = run.element == ElementFormat::kBf16;
  std::printf("\n(c) needle sweep, set %s, %s index-K: needles of the served top %d, from the decode daemon's own pages\n",
              set.name.c_str(), run.name, kTopk);
  std::printf("  %8s %8s %7s  %-18s %9s %9s\n", "tokens", "entries", "depth", "found", "rank", "overlap");
  std::vector<int64_t> lengths = {338, 943, 1850, 4509, 10498, 22597};
  if (arguments.quick) lengths = {338, 4509, 22597};
  size_t cell_index = 0;
  for (int64_t tokens : lengths) {
    for (double depth : {0.05, 0.5, 0.95}) {
      const size_t needle = cell_index++ % needles.spans.size();
      const int64_t entries = tokens / kTokensPerEntry;
      const recall::NeedleCell cell = need(recall::make_needle_cell(set.keys, needles.spans[needle], entries, depth), "cell");
      const std::vector<uint16_t> keys = keys_of_cell(set, cell);
      Shipped shipped = store_and_ship(run.prefill, run.decode, arguments.prefill_name, keys, false, arguments.sabotage);
      double read_seconds = 0;
      const std::vector<float> stored = stored_keys(*run.decode.client, shipped.lease.pages(), entries);
      const Asked asked =
          ask(run.decode, shipped.lease.pages(), set, needles.rows[needle], stored, widen(keys), cell.span, false, read_seconds);
      std::printf("  %8lld %8lld %7.2f  %-18s %9lld %8.1f%%\n", static_cast<long long>(tokens), static_cast<long long>(entries), depth,
                  entries <= kTopk ? "yes (all selected)"
                  : asked.found    ? "yes"
                                   : "NO",
                  static_cast<long long>(asked.rank), 100 * asked.overlap);
      judge(asked, bf16, true, absl::StrCat(run.name, " ", tokens, " tokens, depth ", depth), arguments.sabotage);
      need(shipped.lease.recheck(), "recheck");
      need(shipped.lease.release(), "release");
    }
  }
}

// The whole haystack: stored at a prefill engine's pace, shipped meanwhile, all questions asked.
void whole_haystack(FormatRun& run, const Arguments& arguments, const testing::VectorSet& set, const SpanList& needles, bool must_find,
                    bool go_on) {
  const bool bf16 = run.element == ElementFormat::kBf16;
  std::printf("\n(b,c) set %s, %s index-K: %d entries = %d tokens, shipped while being stored (paced at %.0f tokens/s)\n", set.name.c_str(),
              run.name, set.keys, set.keys * kTokensPerEntry, kPrefillTokensPerSecond);
  Shipped shipped = store_and_ship(run.prefill, run.decode, arguments.prefill_name, set.key_bits, true, arguments.sabotage);
  std::printf(
      "  first page arrived %.3f s after the first chunk's store began, last chunk stored at %.3f s, whole unit sealed "
      "%.3f s after the source's seal (%lld bytes)\n",
      shipped.first_page_seconds, shipped.last_store_seconds, shipped.ship_seconds, static_cast<long long>(shipped.bytes));
  if (shipped.first_page_seconds < 0 || shipped.first_page_seconds >= shipped.last_store_seconds) {
    fail("no page arrived before the last chunk was stored: the ship did not overlap the store");
  }
  const Pages pages = shipped.lease.pages();
  if (arguments.sabotage == "pool") {
    // One byte of the best entry of the first question, in the decode daemon's own page, after its checksum was verified.
    const MutableLayerView layer = need(run.decode.client->writable_layer(PoolKind::kPaged, 0, 0), "index-K view");
    std::vector<float> wide(static_cast<size_t>(set.heads) * kDim);
    const size_t base = static_cast<size_t>(needles.rows[0]) * wide.size();
    for (size_t i = 0; i < wide.size(); ++i) wide[i] = float_of_bf16(set.query_bits[base + i]);
    const auto weights = std::span(set.weights).subspan(static_cast<size_t>(needles.rows[0] * set.heads), static_cast<size_t>(set.heads));
    const std::vector<int32_t> best = recall::exact_topk(recall::exact_logits(widen(set.key_bits), {wide, weights}), 1);
    const int64_t page = pages.paged[static_cast<size_t>(best[0] / layer.slots_per_page)].index.value();
    const SlotPlace place = slot_place(layer.element, layer.head_dim, layer.slots_per_page, best[0] % layer.slots_per_page);
    layer.base[layer.page_stride * page + place.data + 1] ^= std::byte{0x80};  // a sign
    layer.base[layer.page_stride * page + place.data + 3] ^= std::byte{0x40};  // an exponent
  }
  const std::vector<float> original = widen(set.key_bits);
  // With a flipped byte, float64 must see what was verified, not what lies there now.
  const std::vector<float> stored = arguments.sabotage == "pool" && bf16 ? original : stored_keys(*run.decode.client, pages, set.keys);
  int found = 0;
  int asked_count = 0;
  double overlap_sum = 0;
  double overlap_worst = 1;
  int64_t rank_worst = 0;
  double read_seconds = 0;
  const size_t step = arguments.quick ? 4 : 1;
  for (size_t i = 0; i < needles.spans.size(); i += step) {
    const Asked asked =
        ask(run.decode, pages, set, needles.rows[i], stored, original, needles.spans[i], arguments.sabotage == "table", read_seconds);
    judge(asked, bf16, must_find, absl::StrCat(run.name, " ", set.name, " question ", i), arguments.sabotage);
    found += asked.found ? 1 : 0;
    ++asked_count;
    overlap_sum += asked.overlap;
    overlap_worst = std::min(overlap_worst, asked.overlap);
    rank_worst = std::max(rank_worst, asked.rank);
  }
  const double key_bytes = static_cast<double>(slot_data_bytes(run.element, kDim) + slot_scale_bytes(run.element, kDim));
  std::printf(
      "  asked %d questions: target found %d, worst rank %lld; overlap@%d with float64 on bf16 keys: mean %.2f %%, worst "
      "query %.2f %%\n",
      asked_count, found, static_cast<long long>(rank_worst), kTopk, 100 * overlap_sum / asked_count, 100 * overlap_worst);
  std::printf("  read: %.1f M keys/s, %.2f GB/s of index-K on one thread (%d heads)\n", asked_count * set.keys / read_seconds / 1e6,
              asked_count * set.keys * key_bytes / read_seconds / 1e9, set.heads);
  need(shipped.lease.recheck(), "recheck");
  if (!go_on) {
    need(shipped.lease.release(), "release");
    return;
  }
  // Decode goes on: the sequence is adopted, one more page of keys is appended by the decode engine, and selection sees it.
  const int64_t more = 64;
  Ticket ticket = need(run.decode.client->adopt(std::move(shipped.lease), SequenceId(static_cast<uint64_t>(SteadyClock().now_ns())),
                                                pages.tokens + more * kTokensPerEntry),
                       "adopt");
  std::vector<uint16_t> longer = set.key_bits;
  longer.insert(longer.end(), set.key_bits.begin(), set.key_bits.begin() + more * kDim);
  CallerThread here;
  store_keys(*run.decode.client, ticket, longer, set.keys, more, here);
  need(ticket.publish(pages.tokens + more * kTokensPerEntry), "publish");
  Pages grown = ticket.pages();
  const std::vector<float> stored_grown = stored_keys(*run.decode.client, grown, set.keys + more);
  const Asked asked = ask(run.decode, grown, set, needles.rows[0], stored_grown, widen(longer), needles.spans[0], false, read_seconds);
  judge(asked, bf16, must_find, absl::StrCat(run.name, " after adopt"), arguments.sabotage);
  std::printf("  adopted by the decode engine, %lld entries appended and selected from: %s\n", static_cast<long long>(more),
              asked.verdict.exact ? "exact" : "NOT exact");
  need(ticket.forfeit(), "forfeit");
}

// ---------------------------------------------------------------------------------------------------------- accounting

void show_bytes_of_handovers(FormatRun& run, const Arguments& arguments, const testing::VectorSet& set) {
  std::printf("\nbytes a hand-over (pages, window, state), beside what SGLang's set is for the same format\n");
  // SGLang: whole pages of content; window pages of 256 tokens with their state; raw ratio-128 state unless the length is
  // a multiple of 128. Sizes: 6,439,680 + 1,376,256 + 344,064 a window page set, 10,485,760 raw state (public source).
  for (int64_t tokens : {int64_t{1000}, int64_t{8200}}) {
    std::vector<uint16_t> keys(set.key_bits.begin(), set.key_bits.begin() + tokens / kTokensPerEntry * kDim);
    Shipped shipped = store_and_ship(run.prefill, run.decode, arguments.prefill_name, keys, false, "");
    const int64_t pages = div_ceil(tokens, 256);
    const int64_t windows = (tokens - 1) / 256 - std::max<int64_t>(tokens - 128, 0) / 256 + 1;
    const int64_t content = run.decode.client->layout(PoolKind::kPaged).content_bytes();
    const int64_t sglang = pages * content + windows * (6'439'680 + 1'376'256 + 344'064) + (tokens % 128 != 0 ? 10'485'760 : 0);
    std::printf("  %6lld tokens: needle %.2f MB in %.1f ms (%.2f GB/s, checksums on), SGLang's set %.2f MB\n",
                static_cast<long long>(tokens), static_cast<double>(shipped.bytes) / 1e6, shipped.ship_seconds * 1e3,
                static_cast<double>(shipped.bytes) / shipped.ship_seconds / 1e9, static_cast<double>(sglang) / 1e6);
    need(shipped.lease.release(), "release");
  }
}

void check_accounting(const std::string& attach_socket, const char* name) {
  const std::string folder = attach_socket.substr(0, attach_socket.rfind('/'));
  const auto channel = grpc::CreateChannel(absl::StrCat("unix:", folder, "/", attach::kGrpcSocketName), grpc::InsecureChannelCredentials());
  v1::Operator::Stub stub(channel);
  grpc::ClientContext context;
  v1::StatusReply reply;
  const grpc::Status status = stub.Status(&context, v1::Empty(), &reply);
  if (!status.ok()) {
    fail(absl::StrCat(name, ": no status: ", status.error_message()));
    return;
  }
  for (const v1::PoolSetStatus& set : reply.sets()) {
    for (const v1::Occupancy& pool : set.pools()) {
      if (pool.capacity() == 0) continue;
      const int64_t sum = pool.free() + pool.reserved() + pool.sealed_idle() + pool.leased() + pool.draining();
      std::printf("  %-8s %-9s %-7s free %5lld reserved %3lld sealed %4lld leased %4lld draining %3lld = %5lld of %5lld\n", name,
                  set.name().c_str(), pool.kind().c_str(), static_cast<long long>(pool.free()), static_cast<long long>(pool.reserved()),
                  static_cast<long long>(pool.sealed_idle()), static_cast<long long>(pool.leased()),
                  static_cast<long long>(pool.draining()), static_cast<long long>(sum), static_cast<long long>(pool.capacity()));
      if (sum != pool.capacity()) fail(absl::StrCat(name, ": occupancy does not add up to the capacity"));
      if (pool.reserved() + pool.leased() + pool.draining() != 0) {
        fail(absl::StrCat(name, " ", set.name(), " ", pool.kind(), ": pages are still held after every right was given back"));
      }
    }
  }
  grpc::ClientContext audit_context;
  v1::Empty empty;
  const grpc::Status audit = stub.Audit(&audit_context, v1::Empty(), &empty);
  if (!audit.ok()) fail(absl::StrCat(name, ": the audit found: ", audit.error_message()));
}

int run(const Arguments& arguments) {
  const double begin = seconds_now();
  const testing::VectorSet retr = need(testing::read_vectors("retr"), "set retr");
  const testing::VectorSet records = need(testing::read_vectors("records"), "set records");
  const SpanList needles = read_spans("meta.json");
  const SpanList record_spans = read_spans("records.meta.json");

  if (arguments.sabotage.empty()) {
    PresetOptions flash;
    Engine prefill = attach(arguments.prefill, "default", need(preset_formats("deepseek-v4-flash", flash), "preset"), "demo-prefill");
    check_golden_store(prefill);
  }
  std::vector<FormatRun> runs;
  for (const auto& [name, element] : {std::pair{"bf16", ElementFormat::kBf16}, std::pair{"fp8", ElementFormat::kFp8}}) {
    const std::string set = absl::StrCat("raw-", name);
    runs.push_back({name, element, attach(arguments.prefill, set, raw_formats(element), "demo-prefill"),
                    attach(arguments.decode, set, raw_formats(element), "demo-decode")});
    if (!arguments.sabotage.empty()) break;
  }
  for (FormatRun& run : runs) {
    if (arguments.sabotage.empty()) sweep(run, arguments, retr, needles);
    whole_haystack(run, arguments, retr, needles, true, arguments.sabotage.empty() && run.element == ElementFormat::kBf16);
    if (arguments.sabotage.empty()) whole_haystack(run, arguments, records, record_spans, false, false);
  }
  if (!arguments.sabotage.empty()) stop("the sabotage was not noticed");
  std::printf("\nSingle needles survive fp8 on this data; the records set is where formats differ: compare its worst query above.\n");
  show_bytes_of_handovers(runs[0], arguments, retr);

  std::printf("\noccupancy, in pages, after every right was given back\n");
  runs.clear();  // detaches
  check_accounting(arguments.prefill, "prefill");
  check_accounting(arguments.decode, "decode");
  std::printf("\n%s: %d failure%s in %.1f s\n", failures == 0 ? "all checks passed" : "FAILED", failures, failures == 1 ? "" : "s",
              seconds_now() - begin);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace needle

int main(int argc, char** argv) {
  needle::Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= argc) needle::stop(flag + " wants a value");
      return argv[++i];
    };
    if (flag == "--prefill")
      arguments.prefill = value();
    else if (flag == "--decode")
      arguments.decode = value();
    else if (flag == "--prefill-name")
      arguments.prefill_name = value();
    else if (flag == "--quick")
      arguments.quick = true;
    else if (flag == "--sabotage")
      arguments.sabotage = value();
    else
      needle::stop("unknown argument " + flag);
  }
  if (arguments.prefill.empty() || arguments.decode.empty()) needle::stop("--prefill and --decode name the attach sockets");
  const std::string& sabotage = arguments.sabotage;
  if (!sabotage.empty() && sabotage != "flight" && sabotage != "pool" && sabotage != "table") {
    needle::stop("--sabotage is flight, pool or table, not " + sabotage);
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  return needle::run(arguments);
}
