#include "client/ctl/probe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/rng.h"
#include "base/workers.h"
#include "client/client.h"
#include "kernels/cpu_isa.h"
#include "kernels/index_logits.h"
#include "kernels/quantise.h"
#include "kernels/store.h"

namespace needle {

namespace {

using client::Client;
using client::Lease;
using client::TopkAnswer;
using client::TopkQuery;

constexpr int kHeads = 64;
constexpr int kQueries = 2;
constexpr int kTopk = 16;
constexpr int64_t kShipMs = 20'000;
// The same stored keys in fp32 and in double: kernels/index_logits.h promises 2e-6 of the row's norm.
constexpr double kSameKeys = 1e-5;
// Keys that the reference stored: a value in a hundred may be a step away (kernels/store.h), which no score of 128 x 64 products
// shows as more than this.
constexpr double kSameRows = 2e-2;

[[noreturn]] void refuse(const std::string& what, int exit = kRefused) { throw Refusal{exit, what}; }

void need(const absl::Status& status, const char* what) {
  if (status.ok()) return;
  const std::optional<ErrorCode> code = error_code(status);
  const bool later = code.has_value() && error_row(*code).action == ErrorAction::kRetry;
  refuse(absl::StrCat(what, ": ", std::string(status.message())), later ? kRetryLater : kRefused);
}
template <class Value>
Value need(absl::StatusOr<Value> value, const char* what) {
  need(value.status(), what);
  return *std::move(value);
}

class Probe {
 public:
  Probe(Daemon& daemon, const ProbeOptions& options) : daemon_(daemon), options_(options) {}

  ProbeOutcome run() {
    const v1::StatusReply status = daemon_.call(&v1::Operator::Stub::Status, v1::Empty());
    node_ = status.node();
    std::string known;
    bool found = options_.pool.empty();
    for (const auto& set : status.sets()) {
      absl::StrAppend(&known, known.empty() ? "" : ", ", set.name());
      found = found || set.name() == options_.pool;
    }
    if (!found) refuse(absl::StrCat("no pool is named '", options_.pool, "'; there are: ", known));
    ask_daemon();
    for (const auto& set : status.sets()) {
      if (options_.pool.empty() || options_.pool == set.name()) probe_pool(set);
    }
    step("accounting after", [this] {
      daemon_.call(&v1::Operator::Stub::Audit, v1::Empty(), 60'000);
      return std::string("every count equals a recount");
    });
    return std::move(outcome_);
  }

 private:
  // Runs one step and notes it; false when it failed.
  bool step(const std::string& name, const std::function<std::string()>& work) {
    const int64_t begin_ns = clock_.now_ns();
    ProbeStep done{name, true, 0, ""};
    try {
      done.detail = work();
    } catch (const Refusal& refusal) {
      done.passed = false;
      done.detail = refusal.message;
      if (outcome_.exit == kDone) outcome_.exit = refusal.exit;
    }
    done.seconds = static_cast<double>(clock_.now_ns() - begin_ns) * 1e-9;
    outcome_.steps.push_back(done);
    return done.passed;
  }

  void ask_daemon() {
    v1::ProbeRequest request;
    request.set_peer(options_.peer);
    const v1::ProbeReply reply = daemon_.call(&v1::Operator::Stub::Probe, request, 120'000);
    for (const auto& said : reply.steps()) {
      outcome_.steps.push_back({said.name(), said.passed(), said.seconds(), said.detail()});
      if (!said.passed() && outcome_.exit == kDone) outcome_.exit = kRefused;
    }
  }

  // ------------------------------------------------------------------------------------------------------- one pool set

  struct alignas(kPageAlignment) Aligned {
    std::byte bytes[kPageAlignment] = {};
  };
  struct Scratch {
    std::unique_ptr<Client> client;
    Lease lease;
    SequenceId sequence{random_id()};
    bool sealed = false;
    int component = -1;  // of index-K
    int layers = 0;
    int64_t tokens = 0;
    int64_t entries = 0;
    std::vector<std::vector<Aligned>> stored;  // [layer] one page's part as the reference stores it
    std::vector<uint16_t> q;
    std::vector<float> weights;
    std::vector<int64_t> positions;
  };

  void probe_pool(const v1::PoolSetStatus& set) {
    Scratch scratch;
    const auto named = [&set](const char* what) { return absl::StrCat(what, " ", set.name()); };
    const bool here = step(named("attach"), [&] { return attach(set, scratch); }) && step(named("room"), [&] { return check_room(set); }) &&
                      step(named("store"), [&] { return store(scratch); }) &&
                      step(named("read_topk"),
                           [&] {
                             return read(scratch, "in this process", [&](const TopkQuery& query) {
                               CallerThread one;
                               return scratch.client->read_topk(scratch.lease.pages(), query, one);
                             });
                           }) &&
                      step(named("read_topk by the daemon"), [&] {
                        return read(scratch, "by the daemon's kernels",
                                    [&](const TopkQuery& query) { return scratch.client->read_topk_remote(scratch.lease, query); });
                      });
    if (here && !options_.peer.empty()) probe_peer(set, scratch);
    if (scratch.client != nullptr) step(named("clean"), [&] { return clean(set, scratch); });
  }

  std::string attach(const v1::PoolSetStatus& set, Scratch& scratch) {
    constexpr absl::string_view kUnix = "unix:";
    const std::string& target = daemon_.target();
    if (target.substr(0, kUnix.size()) != std::string(kUnix)) {
      refuse(absl::StrCat("the kernels' steps need the daemon's Unix sockets, and --socket is ", target, "; run the probe on its host"));
    }
    const std::string grpc = target.substr(kUnix.size());
    const size_t slash = grpc.rfind('/');
    client::AttachOptions options;
    options.socket = grpc.substr(0, slash == std::string::npos ? 0 : slash + 1) + attach::kAttachSocketName;
    options.pool_set = set.name();
    options.client_name = "needlectl-probe";
    options.reconnect = false;
    scratch.client = need(Client::attach(options), "attach");
    const ModelFormats& formats = scratch.client->formats();
    for (size_t i = 0; i < formats.paged.components.size(); ++i) {
      if (formats.paged.components[i].kind == ComponentKind::kIndexK) scratch.component = static_cast<int>(i);
    }
    if (scratch.component < 0) refuse("this pool's format has no index-K: there is nothing that could be selected from");
    const Component& part = formats.paged.components[static_cast<size_t>(scratch.component)];
    scratch.layers = part.layers;
    scratch.tokens = formats.paged.tokens_per_page - part.ratio;  // less than a page: it gets no name, and leaves nothing
    scratch.entries = entries_complete(scratch.tokens, part.ratio);
    if (part.head_dim != kIndexHeadDim || scratch.entries < 1) {
      refuse(absl::StrCat("this pool's index-K has head dim ", part.head_dim, " and ", scratch.entries,
                          " entries in less than a page; the kernels take head dim ", kIndexHeadDim, " and the probe one entry or more"));
    }
    return absl::StrCat("build ", scratch.client->build());
  }

  std::string check_room(const v1::PoolSetStatus& set) {
    const v1::StatusReply now = daemon_.call(&v1::Operator::Stub::Status, v1::Empty());
    std::string detail;
    for (const auto& row : now.sets()) {
      if (row.name() != set.name()) continue;
      for (const auto& pool : row.pools()) {
        if (pool.capacity() == 0) continue;
        const int64_t wanted = pool.kind() == "window" ? kWindowPagesMost : 1;
        if (pool.free() < wanted) {
          refuse(absl::StrCat("the ", pool.kind(), " pool has ", pool.free(), " free pages of ", pool.capacity(), ", the probe wants ",
                              wanted, " and evicts nothing; evict some, or ask again when it is less full"),
                 kRetryLater);
        }
        absl::StrAppend(&detail, detail.empty() ? "" : ", ", pool.free(), " ", pool.kind());
      }
    }
    return absl::StrCat("free pages: ", detail);
  }

  std::string store(Scratch& scratch) {
    Client& client = *scratch.client;
    const Component& part = client.formats().paged.components[static_cast<size_t>(scratch.component)];
    client::Ticket ticket = need(client.reserve(scratch.sequence, scratch.tokens), "reserve");
    const std::vector<int32_t> pages = ticket.pages().paged_ids();
    const auto count = static_cast<size_t>(scratch.entries);
    std::vector<int64_t> slots(count);
    std::vector<int64_t> slots_of_one_page(count);
    std::vector<int64_t> positions(count);
    Rng rng(scratch.sequence.value());
    const auto normal = [&rng] {  // good enough a bell: the sum of eight
      double sum = 0;
      for (int i = 0; i < 8; ++i) sum += static_cast<double>(rng.below(2001)) / 1000.0 - 1.0;
      return static_cast<float>(sum / 1.6);
    };
    for (int layer = 0; layer < scratch.layers; ++layer) {
      const MutableLayerView out = need(client.writable_layer(PoolKind::kPaged, scratch.component, layer), "view");
      for (size_t i = 0; i < count; ++i) {
        const auto entry = static_cast<int64_t>(i);
        slots_of_one_page[i] = entry;
        slots[i] = int64_t{pages[0]} * out.slots_per_page + entry;
        positions[i] = first_token_of_entry(entry, part.ratio);
      }
      std::vector<uint16_t> rows(count * kIndexHeadDim);
      for (uint16_t& value : rows) value = bf16_of(normal());
      OpReport report{};
      StorePooledArgs args;
      args.chain.component = part;
      args.chain.norm = NormKind::kNone;
      if (part.rope != RopeStyle::kNone) {
        args.chain.rope = need(client.rope_table(part.rope_table, scratch.tokens), "RoPE table");
        args.positions = positions.data();
      }
      args.out = out;
      args.rows = {rows.data(), kIndexHeadDim, RowElement::kBf16};
      args.slots = slots.data();
      args.count = scratch.entries;
      args.report = &report;
      {
        const client::Launch launch = need(client.launch(), "launch");
        CallerThread one;
        need(store_pooled_cpu(args, best_cpu_isa(), one), "store_pooled");
      }
      if (report.status != 0) refuse(absl::StrCat("store_pooled reported status ", report.status, " in layer ", layer));
      client.count_store(scratch.entries, report);

      std::vector<Aligned> page(static_cast<size_t>(div_ceil(out.page_stride, kPageAlignment)));
      args.out.base = page.data()->bytes;
      args.out.page_count = 1;
      args.slots = slots_of_one_page.data();
      need(store_pooled_ref(args), "the reference's store_pooled");
      scratch.stored.push_back(std::move(page));
    }
    scratch.q.resize(size_t{kQueries} * kHeads * kIndexHeadDim);
    scratch.weights.resize(size_t{kQueries} * kHeads);
    for (uint16_t& value : scratch.q) value = bf16_of(normal());
    for (float& value : scratch.weights) value = normal();
    scratch.positions = {scratch.tokens / 2, scratch.tokens - 1};
    CallerThread one;
    scratch.lease = need(ticket.seal_and_keep(scratch.tokens, {}, one), "seal");
    scratch.sealed = true;
    return absl::StrCat(scratch.entries, " entries in each of ", scratch.layers, " layers, by ", name_of(best_cpu_isa()), ", and sealed");
  }

  TopkQuery query_of(const Scratch& scratch, int layer) const {
    TopkQuery query;
    query.layer = layer;
    query.q = scratch.q;
    query.head_weights = scratch.weights;
    query.positions = scratch.positions;
    query.heads = kHeads;
    query.prepared = true;
    query.k = kTopk;
    return query;
  }

  std::vector<float> reference_scores(const Scratch& scratch, const LayerView& keys, int32_t page, std::vector<int32_t>& visible) const {
    const Component& part = scratch.client->formats().paged.components[static_cast<size_t>(scratch.component)];
    visible.clear();
    for (int64_t position : scratch.positions) {
      visible.push_back(static_cast<int32_t>(std::min(entries_complete(position + 1, part.ratio), scratch.entries)));
    }
    IndexLogitsArgs args;
    args.keys = keys;
    args.pages = {&page, nullptr, 1, 1, 1};
    args.q = scratch.q.data();
    args.head_weights = scratch.weights.data();
    args.queries_per_row = kQueries;
    args.visible = visible.data();
    args.query_count = kQueries;
    args.heads = kHeads;
    args.entry_count = scratch.entries;
    args.score_stride = scratch.entries;
    std::vector<float> scores(static_cast<size_t>(kQueries * scratch.entries));
    args.scores = scores.data();
    need(index_logits_ref(args), "the reference's index_logits");
    return scores;
  }

  // The answer's members and scores, against the reference over the keys that lie in the pool and over those that the reference stored.
  void compare(const Scratch& scratch, int layer, const TopkAnswer& answer) const {
    const LayerView in_pool = scratch.client->layer(PoolKind::kPaged, scratch.component, layer);
    LayerView by_reference = in_pool;
    by_reference.base = scratch.stored[static_cast<size_t>(layer)].data()->bytes;
    by_reference.page_count = 1;
    std::vector<int32_t> visible;
    const std::vector<float> tight = reference_scores(scratch, in_pool, scratch.lease.pages().paged_ids()[0], visible);
    const std::vector<float> loose = reference_scores(scratch, by_reference, 0, visible);
    if (answer.report.nan_scores != 0 || answer.report.absent_entries != 0) {
      refuse(absl::StrCat("layer ", layer, ": ", answer.report.nan_scores, " scores are NaN and ", answer.report.absent_entries,
                          " entries absent"));
    }
    for (int row = 0; row < kQueries; ++row) {
      const auto at = [&](const std::vector<float>& scores, int32_t entry) {
        return static_cast<double>(scores[static_cast<size_t>(row * scratch.entries + entry)]);
      };
      const int32_t seen = visible[static_cast<size_t>(row)];
      const int32_t wanted = std::min<int32_t>(kTopk, seen);
      if (answer.counts[static_cast<size_t>(row)] != wanted) {
        refuse(absl::StrCat("layer ", layer, ", query ", row, ": ", answer.counts[static_cast<size_t>(row)], " entries, wanted ", wanted));
      }
      std::vector<double> ordered;
      ordered.reserve(static_cast<size_t>(seen));
      for (int32_t entry = 0; entry < seen; ++entry) ordered.push_back(at(tight, entry));
      std::sort(ordered.begin(), ordered.end(), std::greater<>());
      const double scale = std::max(std::fabs(ordered.front()), std::fabs(ordered.back()));
      std::set<int32_t> members;
      for (int32_t i = 0; i < wanted; ++i) {
        const size_t place = static_cast<size_t>(row * answer.stride + i);
        const int32_t entry = answer.positions[place];
        const auto score = static_cast<double>(answer.scores[place]);
        if (entry < 0 || entry >= seen || !members.insert(entry).second) {
          refuse(absl::StrCat("layer ", layer, ", query ", row, ": entry ", entry, " is not one of ", seen, ", or named twice"));
        }
        if (!(std::fabs(score - at(tight, entry)) <= kSameKeys * scale) ||
            at(tight, entry) < ordered[static_cast<size_t>(wanted) - 1] - kSameKeys * scale) {
          refuse(absl::StrCat("layer ", layer, ", query ", row, ": entry ", entry, " scored ", score, ", the reference kernel gives ",
                              at(tight, entry), " and its ", wanted, "th best is ", ordered[static_cast<size_t>(wanted) - 1]));
        }
        if (!(std::fabs(score - at(loose, entry)) <= kSameRows * scale)) {
          refuse(absl::StrCat("layer ", layer, ", query ", row, ": entry ", entry, " scored ", score, ", and ", at(loose, entry),
                              " over the keys as the reference kernel stores them"));
        }
      }
    }
  }

  std::string read(const Scratch& scratch, const char* where,
                   const std::function<absl::StatusOr<TopkAnswer>(const TopkQuery&)>& read_topk) {
    for (int layer = 0; layer < scratch.layers; ++layer) compare(scratch, layer, need(read_topk(query_of(scratch, layer)), "read_topk"));
    return absl::StrCat(kQueries, " queries in each of ", scratch.layers, " layers ", where, " agree with the reference kernel");
  }

  // Steps run one after another, so a failed clean cannot hide what failed before it.
  std::string clean(const v1::PoolSetStatus& set, Scratch& scratch) {
    scratch.lease = Lease();
    if (scratch.sealed) {
      v1::EvictRequest request;
      request.set_pool_set(set.name());
      request.set_sequence(scratch.sequence.value());
      daemon_.call(&v1::Operator::Stub::Evict, request);
    }
    scratch.client.reset();
    return scratch.sealed ? "the scratch sequence is gone, the session closed" : "nothing was sealed, the session closed";
  }

  // ------------------------------------------------------------------------------------------------------------ the peer

  void probe_peer(const v1::PoolSetStatus& set, const Scratch& scratch) {
    std::unique_ptr<Daemon> peer;
    v1::ShipStartRequest ship;
    bool arrived = false;
    const auto named = [&](const char* what) { return absl::StrCat(what, " ", set.name(), " to ", options_.peer); };
    const bool shipped = step(named("ship"), [&] {
      std::string address;
      const v1::PeersReply peers = daemon_.call(&v1::Operator::Stub::Peers, v1::Empty());
      for (const auto& row : peers.peers()) {
        if (row.name() == options_.peer) address = row.address();
      }
      if (address.empty()) refuse(absl::StrCat("no peer is named '", options_.peer, "' here"));
      peer = std::make_unique<Daemon>(address);
      peer->open_session(set.name());
      ship.set_ticket(random_id());
      ship.set_lease(random_id());
      ship.set_sequence(scratch.sequence.value());
      ship.set_peer(node_);
      ship.set_deadline_ms(kShipMs);
      peer->call(&v1::Needle::Stub::ShipStart, ship);
      v1::TicketRequest ticket;
      ticket.set_ticket(ship.ticket());
      // Progress is asked for between short waits: a session that only waits would fall silent.
      const int64_t deadline_ns = clock_.now_ns() + kShipMs * kNanosPerMilli;
      while (clock_.now_ns() < deadline_ns) {
        const std::string state = peer->call(&v1::Needle::Stub::ShipProgress, ticket).state();
        if (state == "sealed" || state == "failed") break;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      const v1::LeasedTable table = peer->call(&v1::Needle::Stub::ShipWait, ticket, kShipMs + kCallMs);
      arrived = true;
      const int pages = table.table().paged_size() + table.table().window_size() + 1;
      return absl::StrCat(pages, " pages to ", address, ", every checksum equal on arrival");
    });
    if (shipped) step(named("read back"), [&] { return read_back(set, scratch, *peer); });
    if (peer == nullptr) return;
    step(named("clean"), [&] {
      if (arrived) {
        v1::TicketRequest ticket;
        ticket.set_ticket(ship.ticket());
        peer->call(&v1::Needle::Stub::Forget, ticket);
        v1::LeaseRequest lease;
        lease.set_lease(ship.lease());
        peer->call(&v1::Needle::Stub::Release, lease);
      }
      peer.reset();  // its session ends, and a ship that is under way with it
      return std::string(arrived ? "the copy is forgotten, its lease released" : "nothing had arrived");
    });
  }

  std::string read_back(const v1::PoolSetStatus& set, const Scratch& scratch, Daemon& peer) {
    daemon_.open_session(set.name());
    int64_t bytes = 0;
    for (int layer = 0; layer < scratch.layers; ++layer) {
      v1::ReadEntriesRequest entries;
      entries.set_sequence(scratch.sequence.value());
      entries.set_component(static_cast<uint32_t>(scratch.component));
      entries.set_layer(static_cast<uint32_t>(layer));
      for (int64_t entry = 0; entry < scratch.entries; ++entry) entries.add_entries(static_cast<int32_t>(entry));
      const v1::ReadEntriesReply ours = daemon_.call(&v1::Needle::Stub::ReadEntries, entries);
      const v1::ReadEntriesReply theirs = peer.call(&v1::Needle::Stub::ReadEntries, entries);
      if (ours.data() != theirs.data() || ours.scales() != theirs.scales()) {
        refuse(absl::StrCat("layer ", layer, ": the entries read back from the peer are not those that were sent"));
      }
      bytes += static_cast<int64_t>(ours.data().size() + ours.scales().size());

      v1::ReadTopkRequest topk;
      topk.set_sequence(scratch.sequence.value());
      topk.set_layer(static_cast<uint32_t>(layer));
      topk.set_heads(kHeads);
      topk.set_q(scratch.q.data(), scratch.q.size() * sizeof scratch.q[0]);
      topk.set_head_weights(scratch.weights.data(), scratch.weights.size() * sizeof scratch.weights[0]);
      for (int64_t position : scratch.positions) topk.add_positions(static_cast<uint32_t>(position));
      topk.set_q_is_prepared(true);
      topk.set_k(kTopk);
      topk.set_with_scores(true);
      const v1::ReadTopkReply reply = peer.call(&v1::Needle::Stub::ReadTopk, topk);
      TopkAnswer answer;
      answer.stride = reply.stride();
      answer.positions.assign(reply.positions().begin(), reply.positions().end());
      answer.scores.assign(reply.scores().begin(), reply.scores().end());
      answer.counts.assign(reply.counts().begin(), reply.counts().end());
      answer.report.nan_scores = reply.nan_scores();
      answer.report.absent_entries = reply.absent_entries();
      if (answer.counts.size() != size_t{kQueries} || answer.positions.size() < static_cast<size_t>(kQueries * answer.stride) ||
          answer.scores.size() < static_cast<size_t>(kQueries * answer.stride) || answer.stride < kTopk) {
        refuse(absl::StrCat("layer ", layer, ": the peer's answer has not the shape that was asked for"));
      }
      compare(scratch, layer, answer);
    }
    daemon_.close_session();  // the next pool is read back long after this one
    return absl::StrCat(bytes, " bytes of index-K are equal, and its kernels select what the reference does");
  }

  static constexpr int64_t kWindowPagesMost = 4;  // the ring of a ticket: 128 tokens and the page being written, in pages of 64

  Daemon& daemon_;
  const ProbeOptions& options_;
  SteadyClock clock_;
  std::string node_;
  ProbeOutcome outcome_;
};

}  // namespace

ProbeOutcome probe_node(Daemon& daemon, const ProbeOptions& options) { return Probe(daemon, options).run(); }

}  // namespace needle
