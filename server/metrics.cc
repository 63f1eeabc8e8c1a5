#include "server/metrics.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <map>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "proto/errors.h"
#include "server/memory/host_memory.h"

namespace needle::server {

const std::vector<MetricRow>& metric_table() {
  using T = MetricType;
  static const auto* const table = new std::vector<MetricRow>{
      {"needle_up", T::kGauge, "", "1 when the loop answered this scrape in time.", "Does the daemon still work, or only its HTTP thread?"},
      {"needle_build_info", T::kInfo, "build,node,transport", "Always 1; what this is and how it ships.",
       "Which build runs where, and which transport was chosen?"},
      {"needle_uptime_seconds", T::kGauge, "", "Seconds since start.", "Did it restart?"},
      {"needle_incarnation_info", T::kInfo, "incarnation", "Always 1; changes at every start.",
       "Is this the daemon that a handle was given by?"},
      {"needle_stopping", T::kGauge, "", "1 while the daemon drains.", "Why is it refusing work?"},
      {"needle_health", T::kGauge, "facet", "1 when the facet serves.", "Which part is not well?"},
      {"needle_pool_pages", T::kGauge, "pool,kind,state",
       "Pages by state: free, reserved, sealed_idle, leased, draining. They sum to needle_pool_capacity_pages.",
       "How full is it, and with what?"},
      {"needle_pool_capacity_pages", T::kGauge, "pool,kind", "Pages that can hold something.", "How large is the pool now?"},
      {"needle_pool_outside_pages", T::kGauge, "pool,kind,state",
       "Pages outside capacity: gap (would cross a chunk edge), retiring (chunk on its way out).",
       "Is a resize under way? How much do chunk edges cost?"},
      {"needle_pool_page_bytes", T::kGauge, "pool,kind", "Bytes a page takes.", "What do pages mean in bytes?"},
      {"needle_pool_chunks", T::kGauge, "pool,kind", "Chunks of memory.", "Did the resize arrive?"},
      {"needle_pool_budget_bytes", T::kGauge, "pool", "Budget of the pool's three kinds together.", "What was it told to use?"},
      {"needle_pool_revision", T::kGauge, "pool", "Revision of the budget; a resize raises it.", "Was it resized?"},
      {"needle_pool_named_pages", T::kGauge, "pool", "Pages that a prefix lookup can find.", "How much of the cache can be hit?"},
      {"needle_pool_sequences", T::kGauge, "pool", "Sealed sequences.", "How many sequences are kept?"},
      {"needle_pool_resume_points", T::kGauge, "pool", "Boundaries from which a prefix can be continued.", "Why do hits not save prefill?"},
      {"needle_sessions", T::kGauge, "state", "Sessions: live, silent.", "How many engines are attached, and is one hanging?"},
      {"needle_session_pinned_pages", T::kGauge, "pid,client", "Pages that a silent but living process still pins.",
       "Which process keeps pages from coming back?"},
      {"needle_tickets_open", T::kGauge, "", "Open tickets.", "How many writes are under way?"},
      {"needle_leases_open", T::kGauge, "", "Open leases.", "How many readers are there?"},
      {"needle_ships_open", T::kGauge, "", "Ships under way.", "Are hand-overs piling up?"},
      {"needle_ship_bytes_in_flight", T::kGauge, "", "Bytes posted to the transport and not completed.", "Is the network the bottleneck?"},
      {"needle_requests_total", T::kCounter, "verb,outcome", "Calls by verb and outcome: OK or a name of proto/errors.h.",
       "What is asked, and what is refused for which cause?"},
      {"needle_request_duration_seconds", T::kHistogram, "verb", "From receipt to answer.", "Which verb is slow?"},
      {"needle_request_pages", T::kHistogram, "verb", "Pages that a call names or gets.", "Are calls batched well?"},
      {"needle_events_total", T::kCounter, "event", "Rare and notable branches of the core, by the name in server/probe.h.",
       "Did that ever happen, and how often?"},
      {"needle_reads_total", T::kCounter, "", "read_topk calls in clients' own processes.", "How much is read?"},
      {"needle_read_queries_total", T::kCounter, "", "Query tokens in them.", "How many decode tokens were served?"},
      {"needle_read_entries_total", T::kCounter, "", "Entries scored.", "How long are contexts?"},
      {"needle_read_bytes_total", T::kCounter, "", "Bytes of index-K read.", "Is the indexer limited by memory?"},
      {"needle_read_nan_scores_total", T::kCounter, "", "Scores that were NaN.", "Is a key or a query broken?"},
      {"needle_read_absent_entries_total", T::kCounter, "", "Visible entries whose page was absent.", "Is a page table wrong?"},
      {"needle_read_stale_total", T::kCounter, "",
       "Reads in clients' own processes that were refused, or whose answer was, because rights or pages were gone.",
       "Are readers too slow for their leases?"},
      {"needle_read_exact_rescans_total", T::kCounter, "", "Times that the fast selection gave up and the exact one answered.",
       "Does the selection's fast path fit the scores?"},
      {"needle_read_duration_seconds", T::kHistogram, "", "read_topk in clients' processes.", "Is the read path within its budget?"},
      {"needle_stores_total", T::kCounter, "", "Store launches in clients' processes, as engines count them.", "How much is written?"},
      {"needle_store_rows_total", T::kCounter, "result", "Rows: stored, skipped.", "Are rows lost on the way in?"},
      {"needle_memory_chunks", T::kGauge, "backing", "Chunks by what backs them: reserved_2m, transparent, plain.", "Were huge pages had?"},
      {"needle_memory_scratch_bytes", T::kGauge, "", "Scratch of the daemon's own kernels.", "What else counts in the budget?"},
      {"needle_keeper_healthy", T::kGauge, "", "1 unless the keeper was lost.", "Would a restart lose the pools?"},
      {"needle_attach_connections", T::kGauge, "", "Connections at the attach socket.", "Who is attached?"},
      {"needle_attach_without_session_connections", T::kGauge, "", "Those of them that have said no Hello yet, or whose session has ended.",
       "Does somebody hold the door?"},
      {"needle_attach_hellos_overdue_total", T::kCounter, "", "Connections closed because no Hello came within five seconds.",
       "Who connects and says nothing?"},
      {"needle_attach_refused_total", T::kCounter, "",
       "Refused attaches: another user, another format, too many connections or too many that wait.", "Is an engine misconfigured?"},
      {"needle_peer_up", T::kGauge, "peer", "1 while the peer answers hellos.", "Can sequences be shipped from it?"},
      {"needle_peer_last_heard_seconds", T::kGauge, "peer", "Age of the last word from it.", "Since when is it silent?"},
      {"needle_peer_messages_dropped_total", T::kCounter, "peer", "Messages to it that were given up.", "Is the control path overloaded?"},
      {"needle_transport_events_total", T::kCounter, "event", "What the transport counted.", "What went wrong on the wire?"},
  };
  return *table;
}

namespace {

const char* type_name(MetricType type) {
  switch (type) {
    case MetricType::kCounter: return "counter";
    case MetricType::kGauge: return "gauge";
    case MetricType::kHistogram: return "histogram";
    case MetricType::kInfo: return "info";
  }
  return "";
}

prometheus::MetricType prometheus_type(MetricType type) {
  switch (type) {
    case MetricType::kCounter: return prometheus::MetricType::Counter;
    case MetricType::kHistogram: return prometheus::MetricType::Histogram;
    default: return prometheus::MetricType::Gauge;
  }
}

using Labels = std::vector<std::string>;  // values, in the order of the row's label names

// Collects values under the table's names. A name that the table lacks is a bug.
class Families {
 public:
  void value(const char* name, const Labels& labels, double value) {
    prometheus::ClientMetric& metric = add(name, labels);
    if (family(name).type == prometheus::MetricType::Counter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
  }

  // `counts` has one more than `bounds`; every one counts its own bucket alone.
  template <class Counts, class Bounds>
  void histogram(const char* name, const Labels& labels, const Counts& counts, const Bounds& bounds, double sum) {
    prometheus::ClientMetric& metric = add(name, labels);
    uint64_t cumulative = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      cumulative += counts[i];
      const double bound = i < bounds.size() ? bounds[i] : std::numeric_limits<double>::infinity();
      metric.histogram.bucket.push_back({cumulative, bound});
    }
    metric.histogram.sample_count = cumulative;
    metric.histogram.sample_sum = sum;
  }

  std::vector<prometheus::MetricFamily> take() {
    std::vector<prometheus::MetricFamily> out;
    for (const MetricRow& row : metric_table()) {
      const auto found = families_.find(row.name);
      if (found != families_.end()) out.push_back(std::move(found->second));
    }
    return out;
  }

 private:
  static const MetricRow& row_of(const std::string& name) {
    for (const MetricRow& row : metric_table()) {
      if (name == row.name) return row;
    }
    NEEDLE_CHECK(false, "a metric that the table doesn't have");
    return metric_table().front();
  }

  prometheus::MetricFamily& family(const std::string& name) {
    const auto found = families_.find(name);
    if (found != families_.end()) return found->second;
    const MetricRow& row = row_of(name);
    prometheus::MetricFamily fresh;
    fresh.name = name;
    fresh.help = row.meaning;
    fresh.type = prometheus_type(row.type);
    return families_.emplace(name, std::move(fresh)).first->second;
  }

  prometheus::ClientMetric& add(const char* name, const Labels& labels) {
    prometheus::MetricFamily& target = family(name);
    prometheus::ClientMetric metric;
    std::string names = row_of(name).labels;
    size_t start = 0;
    for (const std::string& value : labels) {
      NEEDLE_CHECK(start <= names.size(), "as many label values as the table has names");
      const size_t end = std::min(names.find(',', start), names.size());
      metric.label.push_back({names.substr(start, end - start), value});
      start = end + 1;
    }
    target.metric.push_back(std::move(metric));
    return target.metric.back();
  }

  std::map<std::string, prometheus::MetricFamily> families_;
};

template <size_t kBounds>
void add_histogram(Families& families, const char* name, const Labels& labels, const EdgeHistogram<kBounds>& histogram,
                   const std::array<double, kBounds>& bounds) {
  std::array<uint64_t, kBounds + 1> counts{};
  uint64_t total = 0;
  for (size_t i = 0; i <= kBounds; ++i) total += counts[i] = histogram.counts[i].load(std::memory_order_relaxed);
  if (total > 0) families.histogram(name, labels, counts, bounds, histogram.sum.load(std::memory_order_relaxed));
}

void add_core(Families& families, const MetricSources& sources, const Snapshot& snapshot) {
  families.value("needle_incarnation_info", {absl::StrCat(snapshot.incarnation.value())}, 1);
  families.value("needle_stopping", {}, snapshot.stopping ? 1 : 0);
  for (const Snapshot::Set& set : snapshot.sets) {
    for (int kind = 0; kind < kPoolKinds; ++kind) {
      const Occupancy& pages = set.pools[static_cast<size_t>(kind)];
      const std::string kind_name = kPoolKindNames[kind];
      const auto state = [&](const char* name, int64_t count) {
        families.value("needle_pool_pages", {set.name, kind_name, name}, static_cast<double>(count));
      };
      state("free", pages.free);
      state("reserved", pages.reserved);
      state("sealed_idle", pages.sealed_idle);
      state("leased", pages.leased);
      state("draining", pages.draining);
      families.value("needle_pool_capacity_pages", {set.name, kind_name}, static_cast<double>(pages.capacity));
      families.value("needle_pool_outside_pages", {set.name, kind_name, "gap"}, static_cast<double>(pages.gap));
      families.value("needle_pool_outside_pages", {set.name, kind_name, "retiring"}, static_cast<double>(pages.retiring));
      families.value("needle_pool_page_bytes", {set.name, kind_name}, static_cast<double>(sources.page_bytes(set, kind)));
      families.value("needle_pool_chunks", {set.name, kind_name}, static_cast<double>(set.chunks[static_cast<size_t>(kind)]));
    }
    families.value("needle_pool_budget_bytes", {set.name}, static_cast<double>(set.budget_bytes));
    families.value("needle_pool_revision", {set.name}, static_cast<double>(set.revision));
    families.value("needle_pool_named_pages", {set.name}, static_cast<double>(set.named_pages));
    families.value("needle_pool_sequences", {set.name}, static_cast<double>(set.sequences));
    families.value("needle_pool_resume_points", {set.name}, static_cast<double>(set.resume_points));
  }
  int64_t silent = 0;
  for (const Snapshot::SessionRow& row : snapshot.sessions) {
    silent += row.silent ? 1 : 0;
    if (row.silent && row.pinned_pages > 0) {
      families.value("needle_session_pinned_pages", {absl::StrCat(row.process.pid), sources.registry.entry(row.session).client},
                     static_cast<double>(row.pinned_pages));
    }
  }
  families.value("needle_sessions", {"live"}, static_cast<double>(static_cast<int64_t>(snapshot.sessions.size()) - silent));
  families.value("needle_sessions", {"silent"}, static_cast<double>(silent));
  families.value("needle_tickets_open", {}, static_cast<double>(snapshot.tickets_open));
  families.value("needle_leases_open", {}, static_cast<double>(snapshot.leases_open));
  families.value("needle_ships_open", {}, static_cast<double>(snapshot.ships_open));
  families.value("needle_ship_bytes_in_flight", {}, static_cast<double>(snapshot.bytes_in_flight));
  for (const auto& [name, count] : snapshot.counters) families.value("needle_events_total", {name}, static_cast<double>(count));
}

std::vector<prometheus::MetricFamily> collect(const MetricSources& sources) {
  Families families;
  const absl::StatusOr<Snapshot> snapshot = sources.snapshot();
  families.value("needle_up", {}, snapshot.ok() ? 1 : 0);
  if (snapshot.ok()) add_core(families, sources, *snapshot);

  const NodeGauges node = sources.node();
  families.value("needle_build_info", {node.build, node.node, node.transport}, 1);
  families.value("needle_uptime_seconds", {}, node.uptime_seconds);
  for (const auto& [facet, serving] : node.facets) families.value("needle_health", {facet}, serving ? 1 : 0);
  for (int backing = 0; backing < 3; ++backing) {
    families.value("needle_memory_chunks", {kPageBackingNames[backing]}, static_cast<double>(node.chunks_by_backing[backing]));
  }
  families.value("needle_memory_scratch_bytes", {}, static_cast<double>(node.scratch_bytes));
  families.value("needle_keeper_healthy", {}, node.keeper_healthy ? 1 : 0);
  families.value("needle_attach_connections", {}, static_cast<double>(node.attach_connections));
  families.value("needle_attach_without_session_connections", {}, static_cast<double>(node.attach_without_session));
  families.value("needle_attach_hellos_overdue_total", {}, static_cast<double>(node.attach_hellos_overdue));
  families.value("needle_attach_refused_total", {}, static_cast<double>(node.attach_refused));
  for (const NamedValue& counter : node.transport_counters) families.value("needle_transport_events_total", {counter.name}, counter.value);

  for (size_t row = 0; row < kVerbCount; ++row) {
    const Verb verb = static_cast<Verb>(row);
    for (size_t outcome = 0; outcome < EdgeMetrics::kOutcomes; ++outcome) {
      const uint64_t count = sources.edge.outcome(verb, outcome);
      // OK is shown from the start, so that a rate over it exists; refusals appear when they happen.
      if (count > 0 || outcome == 0)
        families.value("needle_requests_total", {kVerbNames[row], EdgeMetrics::outcome_name(outcome)}, static_cast<double>(count));
    }
    add_histogram(families, "needle_request_duration_seconds", {kVerbNames[row]}, sources.edge.duration(verb), kDurationBounds);
    add_histogram(families, "needle_request_pages", {kVerbNames[row]}, sources.edge.pages(verb), kPagesBounds);
  }

  const ReadTotals reads = sources.registry.read_totals();
  families.value("needle_reads_total", {}, static_cast<double>(reads.reads));
  families.value("needle_read_queries_total", {}, static_cast<double>(reads.queries));
  families.value("needle_read_entries_total", {}, static_cast<double>(reads.entries_scored));
  families.value("needle_read_bytes_total", {}, static_cast<double>(reads.bytes_read));
  families.value("needle_read_nan_scores_total", {}, static_cast<double>(reads.nan_scores));
  families.value("needle_read_absent_entries_total", {}, static_cast<double>(reads.absent_entries));
  families.value("needle_read_stale_total", {}, static_cast<double>(reads.stale_reads));
  families.value("needle_read_exact_rescans_total", {}, static_cast<double>(reads.exact_rescans));
  families.value("needle_stores_total", {}, static_cast<double>(reads.stores));
  families.value("needle_store_rows_total", {"stored"}, static_cast<double>(reads.rows_stored));
  families.value("needle_store_rows_total", {"skipped"}, static_cast<double>(reads.rows_skipped));
  std::array<double, attach::kReadLatencyBuckets - 1> bounds{};
  for (size_t i = 0; i < bounds.size(); ++i) bounds[i] = 1e-6 * static_cast<double>(uint64_t{1} << i);
  families.histogram("needle_read_duration_seconds", {}, reads.latency, bounds, static_cast<double>(reads.latency_ns_sum) * 1e-9);

  for (const PeerRow& peer : sources.peers.rows()) {
    families.value("needle_peer_up", {peer.name}, peer.state == PeerState::kUp ? 1 : 0);
    families.value("needle_peer_last_heard_seconds", {peer.name}, peer.last_heard_seconds);
    families.value("needle_peer_messages_dropped_total", {peer.name}, static_cast<double>(peer.messages_dropped));
  }
  return families.take();
}

}  // namespace

std::string metrics_reference() {
  std::string text =
      "# Metrics of needled\n\n"
      "Made from the table in `server/metrics.cc`; a test holds the two together. Scraped at `listen.metrics` (default\n"
      "127.0.0.1:7421), `/metrics`. Every scrape is one snapshot taken on the loop: for each pool and kind,\n"
      "`sum by (pool, kind) (needle_pool_pages) == needle_pool_capacity_pages`, always.\n\n"
      "| metric | type | labels | what it is | the question it answers |\n|---|---|---|---|---|\n";
  for (const MetricRow& row : metric_table()) {
    absl::StrAppend(&text, "| `", row.name, "` | ", type_name(row.type), " | ", *row.labels == '\0' ? "–" : row.labels, " | ", row.meaning,
                    " | ", row.question, " |\n");
  }
  return text;
}

std::string scrape_text(const MetricSources& sources) { return prometheus::TextSerializer().Serialize(collect(sources)); }

absl::StatusOr<std::unique_ptr<MetricsHttp>> serve_metrics(const std::string& address, MetricSources sources) {
  MetricsHttpOptions options;
  options.address = address;
  return MetricsHttp::start(std::move(options), [sources = std::move(sources)] { return scrape_text(sources); });
}

}  // namespace needle::server
