// needlectl: the operator's CLI. Talks to one daemon over its Unix socket (or HOST:PORT).
//
// What must stay true:
//  1. Every command has a human table and, with --json, one JSON document on standard output; nothing else is written there.
//  2. Exit status: 0 done · 1 refused for good · 2 wrong usage · 3 the daemon cannot be reached · 4 refused for now, retry ·
//     5 accepted but not finished (a deferred resize). A refusal says the daemon's own words on standard error.
//  3. What changes something names what it changed. resize has --dry-run.
//  4. It reads pools through the daemon's RPCs alone: it maps no memory and can break none. probe does (probe.h), and writes
//     into pages that it reserved for itself and gives back.
#include <sys/un.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "client/ctl/daemon.h"
#include "client/ctl/probe.h"
#include "proto/attach.h"
#include "proto/errors.h"
#include "proto/needle.grpc.pb.h"

namespace needle {
namespace {

using nlohmann::json;

// ------------------------------------------------------------------------------------------------------------ printing

std::string bytes_text(int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < 5) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", value, units[unit]);
  return text;
}

class Table {
 public:
  explicit Table(std::vector<std::string> heads) { rows_.push_back(std::move(heads)); }
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  void print() const {
    std::vector<size_t> widths(rows_[0].size(), 0);
    for (const auto& cells : rows_) {
      for (size_t i = 0; i < cells.size(); ++i) widths[i] = std::max(widths[i], cells[i].size());
    }
    for (const auto& cells : rows_) {
      std::string line;
      for (size_t i = 0; i < cells.size(); ++i) {
        line += cells[i];
        if (i + 1 < cells.size()) line.append(widths[i] - cells[i].size() + 2, ' ');
      }
      std::printf("%s\n", line.c_str());
    }
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

void print(const json& document) { std::printf("%s\n", document.dump(2).c_str()); }

std::string number(int64_t value) { return std::to_string(value); }
std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

json json_of(const v1::Occupancy& pool) {
  return {{"kind", pool.kind()},
          {"free", pool.free()},
          {"reserved", pool.reserved()},
          {"sealed_idle", pool.sealed_idle()},
          {"leased", pool.leased()},
          {"draining", pool.draining()},
          {"capacity", pool.capacity()},
          {"gap", pool.gap()},
          {"retiring", pool.retiring()},
          {"chunks", pool.chunks()},
          {"chunk_bytes", pool.chunk_bytes()},
          {"page_bytes", pool.page_bytes()}};
}

json json_of(const v1::PoolSetStatus& set) {
  json pools = json::array();
  for (const auto& pool : set.pools()) pools.push_back(json_of(pool));
  json ratios = json::array();
  for (int64_t ratio : set.ratios()) ratios.push_back(ratio);
  return {{"name", set.name()},
          {"fingerprint", hex(set.fingerprint())},
          {"format", set.format()},
          {"pools", pools},
          {"named_pages", set.named_pages()},
          {"sequences", set.sequences()},
          {"resume_points", set.resume_points()},
          {"revision", set.revision()},
          {"budget_bytes", set.budget_bytes()},
          {"ratios", ratios}};
}

json json_of(const v1::SessionStatus& session) {
  return {{"session", session.session()},  {"client", session.client()},
          {"pid", session.pid()},          {"uid", session.uid()},
          {"silent", session.silent()},    {"tickets", session.tickets()},
          {"leases", session.leases()},    {"pinned_pages", session.pinned_pages()},
          {"pool_set", session.pool_set()}};
}

v1::StatusReply status_of(Daemon& daemon) { return daemon.call(&v1::Operator::Stub::Status, v1::Empty()); }

void expect_pool(const v1::StatusReply& status, const std::string& pool) {
  std::string names;
  for (const auto& set : status.sets()) {
    if (set.name() == pool) return;
    names += names.empty() ? set.name() : ", " + set.name();
  }
  throw Refusal{kRefused, "no pool is named '" + pool + "'; there are: " + names};
}

// ------------------------------------------------------------------------------------------------------------ commands

int status(Daemon& daemon, bool as_json) {
  const v1::StatusReply reply = status_of(daemon);
  if (as_json) {
    json document = {{"node", reply.node()},
                     {"instance", reply.instance()},
                     {"build", reply.build()},
                     {"incarnation", hex(reply.incarnation())},
                     {"stopping", reply.stopping()},
                     {"uptime_seconds", reply.uptime_seconds()},
                     {"transport", reply.transport()},
                     {"memory", reply.memory()},
                     {"tickets_open", reply.tickets_open()},
                     {"leases_open", reply.leases_open()},
                     {"ships_open", reply.ships_open()},
                     {"bytes_in_flight", reply.bytes_in_flight()}};
    document["sets"] = json::array();
    for (const auto& set : reply.sets()) document["sets"].push_back(json_of(set));
    document["clients"] = json::array();
    for (const auto& session : reply.sessions()) document["clients"].push_back(json_of(session));
    document["counters"] = json::object();
    for (const auto& counter : reply.counters()) document["counters"][counter.name()] = counter.value();
    document["facets"] = json::array();
    for (const auto& facet : reply.facets()) {
      document["facets"].push_back({{"name", facet.name()}, {"serving", facet.serving()}, {"detail", facet.detail()}});
    }
    print(document);
    return kDone;
  }
  std::printf("%s (instance %s), incarnation %s, up %.0f s%s\n%s\n", reply.node().c_str(), reply.instance().c_str(),
              hex(reply.incarnation()).c_str(), reply.uptime_seconds(), reply.stopping() ? ", STOPPING" : "", reply.build().c_str());
  std::printf("transport: %s\nmemory: %s\n", reply.transport().c_str(), reply.memory().c_str());
  std::printf("open: %lld tickets, %lld leases, %lld ships, %s in flight\n", static_cast<long long>(reply.tickets_open()),
              static_cast<long long>(reply.leases_open()), static_cast<long long>(reply.ships_open()),
              bytes_text(reply.bytes_in_flight()).c_str());
  Table table({"health", "serving", "detail"});
  for (const auto& facet : reply.facets()) table.row({facet.name(), facet.serving() ? "yes" : "NO", facet.detail()});
  table.print();
  return kDone;
}

int pools(Daemon& daemon, bool as_json, bool with_formats) {
  const v1::StatusReply reply = status_of(daemon);
  if (as_json) {
    json document = json::array();
    for (const auto& set : reply.sets()) document.push_back(json_of(set));
    print(document);
    return kDone;
  }
  Table table({"pool", "kind", "free", "reserved", "idle", "leased", "draining", "capacity", "gap", "retiring", "chunks", "bytes"});
  for (const auto& set : reply.sets()) {
    for (const auto& pool : set.pools()) {
      if (pool.page_bytes() == 0) continue;
      table.row({set.name(), pool.kind(), number(pool.free()), number(pool.reserved()), number(pool.sealed_idle()), number(pool.leased()),
                 number(pool.draining()), number(pool.capacity()), number(pool.gap()), number(pool.retiring()), number(pool.chunks()),
                 bytes_text(pool.chunks() * pool.chunk_bytes())});
    }
  }
  table.print();
  for (const auto& set : reply.sets()) {
    std::printf("%s: budget %s, revision %llu, format %s\n", set.name().c_str(), bytes_text(set.budget_bytes()).c_str(),
                static_cast<unsigned long long>(set.revision()), hex(set.fingerprint()).c_str());
    if (with_formats) std::printf("%s", set.format().c_str());
  }
  return kDone;
}

int clients(Daemon& daemon, bool as_json) {
  const v1::StatusReply reply = status_of(daemon);
  if (as_json) {
    json document = json::array();
    for (const auto& session : reply.sessions()) document.push_back(json_of(session));
    print(document);
    return kDone;
  }
  Table table({"session", "client", "pid", "uid", "pool", "state", "tickets", "leases", "pinned pages"});
  for (const auto& session : reply.sessions()) {
    table.row({std::to_string(session.session()), session.client(), session.pid() == 0 ? "remote" : number(session.pid()),
               std::to_string(session.uid()), session.pool_set(), session.silent() ? "SILENT" : "live", number(session.tickets()),
               number(session.leases()), number(session.pinned_pages())});
  }
  table.print();
  return kDone;
}

int peers(Daemon& daemon, bool as_json, const std::string& add) {
  if (!add.empty()) {
    const size_t equals = add.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == add.size()) {
      throw Refusal{kUsage, "--add wants NAME=HOST:PORT, not '" + add + "'"};
    }
    v1::AddPeerRequest request;
    request.set_name(add.substr(0, equals));
    request.set_address(add.substr(equals + 1));
    daemon.call(&v1::Operator::Stub::AddPeer, request);
  }
  const v1::PeersReply reply = daemon.call(&v1::Operator::Stub::Peers, v1::Empty());
  if (as_json) {
    json document = json::array();
    for (const auto& peer : reply.peers()) {
      document.push_back({{"name", peer.name()},
                          {"address", peer.address()},
                          {"state", peer.state()},
                          {"incarnation", hex(peer.incarnation())},
                          {"last_heard_seconds", peer.last_heard_seconds()},
                          {"transport", peer.transport()},
                          {"detail", peer.detail()}});
    }
    print(document);
    return kDone;
  }
  Table table({"peer", "address", "state", "heard", "transport", "detail"});
  for (const auto& peer : reply.peers()) {
    char heard[32];
    std::snprintf(heard, sizeof heard, "%.1f s ago", peer.last_heard_seconds());
    table.row({peer.name(), peer.address(), peer.state(), peer.incarnation() == 0 ? "never" : heard, peer.transport(), peer.detail()});
  }
  table.print();
  return kDone;
}

int sequences(Daemon& daemon, bool as_json, const std::string& pool, int64_t count_max) {
  json document = json::array();
  Table table({"pool", "sequence", "tokens", "pages", "leases"});
  const v1::StatusReply status = status_of(daemon);
  if (!pool.empty()) expect_pool(status, pool);
  for (const auto& set : status.sets()) {
    if (!pool.empty() && set.name() != pool) continue;
    v1::SequencesRequest request;
    request.set_pool_set(set.name());
    request.set_count_max(count_max);
    const v1::SequencesReply reply = daemon.call(&v1::Operator::Stub::Sequences, request);
    json rows = json::array();
    for (const auto& row : reply.sequences()) {
      rows.push_back({{"sequence", row.sequence()}, {"tokens", row.tokens()}, {"pages", row.pages()}, {"leases", row.leases()}});
      table.row({set.name(), std::to_string(row.sequence()), number(row.tokens()), number(row.pages()), number(row.leases())});
    }
    document.push_back({{"name", set.name()},
                        {"total", reply.total()},
                        {"named_pages", set.named_pages()},
                        {"resume_points", set.resume_points()},
                        {"sequences", rows}});
    if (reply.total() > reply.sequences_size()) {
      table.row({set.name(), "...", "", "", number(reply.sequences_size()) + " of " + number(reply.total())});
    }
  }
  as_json ? print(document) : table.print();
  return kDone;
}

int ship(Daemon& daemon, bool as_json, const std::string& pool, const std::string& peer, uint64_t sequence, int64_t deadline_ms) {
  daemon.open_session(pool);
  v1::ShipStartRequest request;
  request.set_ticket(random_id());
  request.set_lease(random_id());
  request.set_sequence(sequence);
  request.set_peer(peer);
  request.set_deadline_ms(deadline_ms);
  daemon.call(&v1::Needle::Stub::ShipStart, request);
  v1::TicketRequest ticket;
  ticket.set_ticket(request.ticket());
  v1::ShipProgressReply progress;
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed_ms = [&] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin).count();
  };
  v1::LeasedTable table;
  // Asks for progress between short waits, so that an operator sees it move and Ctrl-C ends it. One line, written over and
  // over: only where somebody watches it.
  const bool is_watched = !as_json && ::isatty(STDERR_FILENO) == 1;
  bool is_shown = false;
  while (true) {
    progress = daemon.call(&v1::Needle::Stub::ShipProgress, ticket);
    if (progress.state() == "sealed" || progress.state() == "failed" || elapsed_ms() > deadline_ms) break;
    if (is_watched) {
      std::fprintf(stderr, "\r%s: %lld of %lld pages", progress.state().c_str(), static_cast<long long>(progress.pages_arrived()),
                   static_cast<long long>(progress.pages_known()));
      is_shown = true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  if (is_shown) std::fprintf(stderr, "\n");
  table = daemon.call(&v1::Needle::Stub::ShipWait, ticket, deadline_ms + kCallMs);  // says why, where it failed
  v1::LeaseRequest lease;
  lease.set_lease(request.lease());
  daemon.call(&v1::Needle::Stub::Release, lease);
  if (as_json) {
    print({{"sequence", sequence},
           {"peer", peer},
           {"tokens", table.table().tokens()},
           {"pages", table.table().paged_size()},
           {"bytes", progress.bytes_arrived()},
           {"attempts", progress.attempt()}});
  } else {
    std::printf("sequence %llu from %s: %lld tokens in %d pages, %s, attempt %u\n", static_cast<unsigned long long>(sequence), peer.c_str(),
                static_cast<long long>(table.table().tokens()), table.table().paged_size(), bytes_text(progress.bytes_arrived()).c_str(),
                progress.attempt());
  }
  return kDone;
}

constexpr size_t kFileBytesMax = size_t{64} << 20;  // thousands of queries; a device would be read for ever

std::string read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw Refusal{kUsage, "cannot read " + path + ": " + std::strerror(errno)};
  std::string bytes;
  char block[1 << 16];
  do {
    stream.read(block, sizeof block);
    if (stream.bad()) throw Refusal{kUsage, "cannot read " + path + ": it is a folder, or its device fails"};
    bytes.append(block, static_cast<size_t>(stream.gcount()));
    if (bytes.size() > kFileBytesMax) throw Refusal{kUsage, path + " is larger than 64 MiB"};
  } while (stream);
  return bytes;
}

struct TopkOptions {
  std::string pool;
  uint64_t sequence = 0;
  uint32_t layer = 0;
  uint32_t heads = 64;
  uint32_t k = 512;
  int64_t position = -1;
  std::string query_file;
  std::string weights_file;
  bool prepared = false;
};

int topk(Daemon& daemon, bool as_json, const TopkOptions& options) {
  const std::string q = read_file(options.query_file);
  const std::string weights = read_file(options.weights_file);
  const size_t query_bytes = size_t{options.heads} * 128 * 2;
  if (q.empty() || q.size() % query_bytes != 0 || weights.size() != q.size() / query_bytes * options.heads * 4) {
    throw Refusal{kUsage, "--q wants whole queries of " + std::to_string(query_bytes) + " bytes (bf16) and --weights " +
                              std::to_string(options.heads * 4) + " bytes (fp32) for each; got " + std::to_string(q.size()) + " and " +
                              std::to_string(weights.size())};
  }
  daemon.open_session(options.pool);
  v1::AcquireRequest acquire;
  acquire.set_lease(random_id());
  acquire.set_sequence(options.sequence);
  const v1::AcquireReply held = daemon.call(&v1::Needle::Stub::Acquire, acquire);
  v1::ReadTopkRequest request;
  request.set_lease(acquire.lease());
  request.set_layer(options.layer);
  request.set_heads(options.heads);
  request.set_q(q);
  request.set_head_weights(weights);
  const int64_t position = options.position >= 0 ? options.position : held.table().tokens() - 1;
  for (size_t i = 0; i < q.size() / query_bytes; ++i) request.add_positions(static_cast<uint32_t>(position));
  request.set_q_is_prepared(options.prepared);
  request.set_k(options.k);
  request.set_by_rank(true);
  request.set_with_scores(true);
  request.set_with_slots(true);
  const v1::ReadTopkReply reply = daemon.call(&v1::Needle::Stub::ReadTopk, request, 60'000);
  v1::LeaseRequest lease;
  lease.set_lease(acquire.lease());
  daemon.call(&v1::Needle::Stub::Release, lease);
  json document = {{"sequence", options.sequence},
                   {"variant", reply.variant()},
                   {"nan_scores", reply.nan_scores()},
                   {"absent_entries", reply.absent_entries()},
                   {"queries", json::array()}};
  Table table({"query", "rank", "entry", "slot", "score"});
  for (int row = 0; row < reply.counts_size(); ++row) {
    json members = json::array();
    for (uint32_t i = 0; i < reply.counts(row); ++i) {
      const int at = row * static_cast<int>(reply.stride()) + static_cast<int>(i);
      members.push_back({{"entry", reply.positions(at)}, {"slot", reply.slots(at)}, {"score", reply.scores(at)}});
      char score[32];
      std::snprintf(score, sizeof score, "%.6g", static_cast<double>(reply.scores(at)));
      table.row({std::to_string(row), std::to_string(i), std::to_string(reply.positions(at)), std::to_string(reply.slots(at)), score});
    }
    document["queries"].push_back(members);
  }
  as_json ? print(document) : table.print();
  return kDone;
}

int show_resize(const v1::ResizeReply& reply, bool as_json, bool dry_run) {
  if (as_json) {
    json holders = json::array();
    for (const auto& holder : reply.holders()) {
      holders.push_back(
          {{"session", holder.session()}, {"client", holder.client()}, {"pid", holder.pid()}, {"pinned_bytes", holder.pinned_bytes()}});
    }
    print({{"answer", reply.answer()},
           {"dry_run", dry_run},
           {"revision", reply.revision()},
           {"chunks_to_grow", reply.chunks_to_grow()},
           {"chunks_to_shrink", reply.chunks_to_shrink()},
           {"pages_in_use", reply.pages_in_use()},
           {"holders", holders}});
  } else {
    std::printf("%s%s, revision %llu: %lld chunks to grow, %lld to shrink, %lld pages in use in them\n", reply.answer().c_str(),
                dry_run ? " (dry run, nothing changed)" : "", static_cast<unsigned long long>(reply.revision()),
                static_cast<long long>(reply.chunks_to_grow()), static_cast<long long>(reply.chunks_to_shrink()),
                static_cast<long long>(reply.pages_in_use()));
    for (const auto& holder : reply.holders()) {
      std::printf("  waits for %s (pid %lld): %s pinned\n", holder.client().c_str(), static_cast<long long>(holder.pid()),
                  bytes_text(holder.pinned_bytes()).c_str());
    }
  }
  return reply.answer() == "DEFERRED" && !dry_run ? kDeferred : kDone;
}

// "512M", "2G": powers of 1024, as in the daemon's options.
int64_t parse_size(const std::string& text) {
  char* end = nullptr;
  const bool digit_first = !text.empty() && text[0] >= '0' && text[0] <= '9';
  const long long count = digit_first ? std::strtoll(text.c_str(), &end, 10) : 0;
  const std::string unit = end == nullptr ? "" : end;
  const std::pair<const char*, int64_t> units[] = {
      {"K", int64_t{1} << 10}, {"M", int64_t{1} << 20}, {"G", int64_t{1} << 30}, {"T", int64_t{1} << 40}};
  for (const auto& [name, factor] : units) {
    if (count > 0 && unit == name && count <= INT64_MAX / factor) return count * factor;
  }
  throw Refusal{kUsage, "--bytes wants a size like 512M or 2G, not '" + text + "'"};
}

int probe(Daemon& daemon, bool as_json, const ProbeOptions& options) {
  json document = json::array();
  Table table({"step", "passed", "seconds", "detail"});
  const ProbeOutcome outcome = probe_node(daemon, options);
  for (const ProbeStep& step : outcome.steps) {
    document.push_back({{"name", step.name}, {"passed", step.passed}, {"seconds", step.seconds}, {"detail", step.detail}});
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.3f", step.seconds);
    table.row({step.name, step.passed ? "yes" : "NO", seconds, step.detail});
  }
  as_json ? print(document) : table.print();
  for (const ProbeStep& step : outcome.steps) {
    if (!step.passed) std::fprintf(stderr, "needlectl: step '%s' failed: %s\n", step.name.c_str(), step.detail.c_str());
  }
  return outcome.exit;
}

// CLI11 hands numbers to strtoull, which takes "-1" for the largest id, 010 for 8, and cuts what is too long.
std::string check_id(const std::string& text) {
  const bool hex = text.size() > 2 && text[0] == '0' && (text[1] == 'x' || text[1] == 'X');
  const bool known = hex ? text.find_first_not_of("0123456789abcdefABCDEF", 2) == std::string::npos
                         : !text.empty() && text.find_first_not_of("0123456789") == std::string::npos && (text[0] != '0' || text == "0");
  errno = 0;
  if (known) (void)std::strtoull(text.c_str(), nullptr, 0);
  return known && errno == 0 ? "" : "'" + text + "' is not an id of 0..18446744073709551615, in decimal or as 0x and hex digits";
}

// A name travels as protobuf's string, which is UTF-8; every name that a daemon takes is printable ASCII.
std::string check_name(const std::string& text) {
  const bool printable = std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c <= 0x7e; });
  return printable ? "" : "a name is printable ASCII, 1..63 of a-z 0-9 . _ -";
}

std::string default_target() {
  if (const char* chosen = std::getenv("NEEDLE_SOCKET"); chosen != nullptr && *chosen != 0) return chosen;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  return attach::runtime_dir(runtime == nullptr ? "" : runtime, "0") + "/" + attach::kGrpcSocketName;
}

int run(int argc, char** argv) {
  CLI::App app{
      "needlectl: look at and steer one needle daemon.\n"
      "Exit status: 0 done, 1 refused, 2 wrong usage, 3 unreachable, 4 retry later, 5 accepted but not finished."};
  std::string socket = default_target();
  bool as_json = false;
  app.add_option("--socket", socket, "the daemon's grpc.sock, or HOST:PORT (NEEDLE_SOCKET)")->capture_default_str();
  app.add_flag("--json", as_json, "one JSON document instead of tables");
  app.require_subcommand(1);
  app.fallthrough();

  app.add_subcommand("status", "who it is, what it runs on, health facets");
  bool with_formats = false;
  CLI::App* pools_command = app.add_subcommand("pools", "pages by state; their sum is the capacity");
  pools_command->add_flag("--formats", with_formats, "print the page formats too");
  app.add_subcommand("clients", "attached processes and what they hold");
  const CLI::Validator is_id(check_id, "ID");
  const CLI::Validator is_name(check_name, "");
  std::string add_peer;
  CLI::App* peers_command = app.add_subcommand("peers", "other daemons");
  peers_command->add_option("--add", add_peer, "NAME=HOST:PORT, from now on")->check(is_name);
  int64_t sequences_max = 50;
  std::string sequences_pool;
  CLI::App* sequences_command = app.add_subcommand("sequences", "stored sequences of each pool, latest used first");
  sequences_command->add_option("--pool", sequences_pool, "one pool instead of all")->check(is_name);
  sequences_command->add_option("--limit", sequences_max)->check(CLI::Range(1, 65536));

  std::string pool = "default";
  std::string peer;
  uint64_t sequence = 0;
  int64_t deadline_ms = 60'000;
  CLI::App* ship_command = app.add_subcommand("ship", "fetch a sequence from a peer into this daemon");
  ship_command->add_option("--pool", pool, "pool set")->check(is_name)->capture_default_str();
  ship_command->add_option("--from", peer, "the peer's name")->required()->check(is_name);
  ship_command->add_option("--sequence", sequence, "sequence id")->required()->check(is_id);
  ship_command->add_option("--deadline-ms", deadline_ms, "give up after")->check(CLI::Range(1, 86'400'000))->capture_default_str();

  TopkOptions topk_options;
  topk_options.pool = "default";
  CLI::App* topk_command = app.add_subcommand("topk", "the k best entries of a stored sequence, by the daemon's kernels");
  topk_command->add_option("--pool", topk_options.pool, "pool set")->check(is_name)->capture_default_str();
  topk_command->add_option("--sequence", topk_options.sequence, "sequence id")->required()->check(is_id);
  topk_command->add_option("--layer", topk_options.layer, "layer of index-K")->check(CLI::Range(0, 65535))->capture_default_str();
  topk_command->add_option("--heads", topk_options.heads, "indexer heads")->check(CLI::Range(1, 128))->capture_default_str();
  topk_command->add_option("-k", topk_options.k, "entries wanted")->check(CLI::Range(1, 8192))->capture_default_str();
  topk_command->add_option("--position", topk_options.position, "token position of the query; default: the last token")
      ->check(CLI::Range(int64_t{0}, int64_t{UINT32_MAX}));
  topk_command->add_option("--q", topk_options.query_file, "file of [queries, heads, 128] bf16")->required();
  topk_command->add_option("--weights", topk_options.weights_file, "file of [queries, heads] fp32")->required();
  topk_command->add_flag("--prepared", topk_options.prepared, "RoPE, rotation and weight factors are already applied");

  std::string size;
  std::vector<int64_t> ratios;
  bool dry_run = false;
  bool show_last = false;
  bool abort_it = false;
  int64_t wait_seconds = 0;
  uint64_t revision = 0;
  CLI::App* resize_command = app.add_subcommand("resize", "change a pool set's budget or ratios, live");
  resize_command->add_option("--pool", pool, "pool set")->check(is_name)->capture_default_str();
  resize_command->add_option("--bytes", size, "new budget, like 2G");
  resize_command->add_option("--ratios", ratios, "weights of paged, window and state")->expected(3);
  resize_command->add_option("--revision", revision, "refuse unless this is the next revision")->check(is_id);
  resize_command->add_flag("--dry-run", dry_run, "say what would happen");
  CLI::Option* status_flag = resize_command->add_flag("--status", show_last, "say how far the last one is");
  resize_command->add_option("--wait", wait_seconds, "return when it is applied, or after so many seconds")->check(CLI::Range(1, 86'400));
  CLI::Option* abort_flag = resize_command->add_flag("--abort", abort_it, "take back what was not yet asked of clients");
  // One question a call: what stands beside it would be dropped without a word.
  for (const char* other : {"--bytes", "--ratios", "--revision", "--dry-run", "--wait"}) {
    status_flag->excludes(resize_command->get_option(other));
    abort_flag->excludes(resize_command->get_option(other));
  }
  status_flag->excludes(abort_flag);

  int64_t evict_pages = 0;
  CLI::App* evict_command = app.add_subcommand("evict", "let idle pages or one sequence go");
  evict_command->add_option("--pool", pool, "pool set")->check(is_name)->capture_default_str();
  evict_command->add_option("--pages", evict_pages, "up to so many idle pages")->check(CLI::Range(int64_t{1}, int64_t{1} << 32));
  evict_command->add_option("--sequence", sequence, "forget this sequence; its named pages stay in the prefix cache until room is needed")
      ->check(is_id);

  app.add_subcommand("drain", "take nothing new; what is open goes on to its end");
  app.add_subcommand("audit", "recount everything from scratch and compare");
  app.add_subcommand("options", "every option's value and where it came from");
  ProbeOptions probe_options;
  CLI::App* probe_command = app.add_subcommand(
      "probe", "is it well, end to end? recounts, shows every facet, and stores, seals and selects from a page of its own in each pool");
  probe_command->add_option("--pool", probe_options.pool, "one pool instead of all")->check(is_name);
  probe_command->add_option("--peer", probe_options.peer, "ship that page to this peer too, and compare what arrived")->check(is_name);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const std::vector<std::string> unknown = app.remaining();
    if (app.get_subcommands().empty() && !unknown.empty()) std::fprintf(stderr, "needlectl: unknown command '%s'\n", unknown[0].c_str());
    const int code = app.exit(error);
    return code == 0 ? kDone : kUsage;
  }

  const bool is_path = socket.find('/') != std::string::npos;
  if (socket.empty()) throw Refusal{kUsage, "--socket is empty: give the daemon's grpc.sock or HOST:PORT"};
  if (is_path && socket.size() >= sizeof(sockaddr_un::sun_path)) {
    throw Refusal{kUsage, "--socket is a path of " + std::to_string(socket.size()) + " bytes, the limit is " +
                              std::to_string(sizeof(sockaddr_un::sun_path) - 1) + ": " + socket};
  }
  Daemon daemon(is_path ? "unix:" + socket : socket);
  const auto chosen = [&](const char* name) { return app.got_subcommand(name); };
  if (chosen("status")) return status(daemon, as_json);
  if (chosen("pools")) return pools(daemon, as_json, with_formats);
  if (chosen("clients")) return clients(daemon, as_json);
  if (chosen("peers")) return peers(daemon, as_json, add_peer);
  if (chosen("sequences")) return sequences(daemon, as_json, sequences_pool, sequences_max);
  if (chosen("ship")) return ship(daemon, as_json, pool, peer, sequence, deadline_ms);
  if (chosen("topk")) return topk(daemon, as_json, topk_options);
  if (chosen("resize")) {
    v1::PoolSetRequest named;
    named.set_pool_set(pool);
    if (show_last) return show_resize(daemon.call(&v1::Operator::Stub::ResizeStatus, named), as_json, false);
    if (abort_it) return show_resize(daemon.call(&v1::Operator::Stub::ResizeAbort, named), as_json, false);
    if (size.empty() && ratios.empty()) throw Refusal{kUsage, "resize wants --bytes, --ratios, --status or --abort"};
    v1::ResizeRequest request;
    request.set_pool_set(pool);
    request.set_revision(revision);
    if (!size.empty()) request.set_budget_bytes(parse_size(size));
    for (int64_t ratio : ratios) request.add_ratios(ratio);
    request.set_dry_run(dry_run);
    v1::ResizeReply reply = daemon.call(&v1::Operator::Stub::Resize, request);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(wait_seconds);
    while (!dry_run && reply.answer() == "DEFERRED" && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      reply = daemon.call(&v1::Operator::Stub::ResizeStatus, named);
    }
    return show_resize(reply, as_json, dry_run);
  }
  if (chosen("evict")) {
    if ((evict_pages > 0) == (sequence != 0)) throw Refusal{kUsage, "evict wants either --pages or --sequence"};
    v1::EvictRequest request;
    request.set_pool_set(pool);
    request.set_pages(evict_pages);
    request.set_sequence(sequence);
    const v1::EvictReply reply = daemon.call(&v1::Operator::Stub::Evict, request);
    const std::string freed = number(reply.pages()) + " pages are free again";
    if (as_json)
      print({{"pages", reply.pages()}});
    else if (sequence == 0)
      std::printf("%s\n", freed.c_str());
    else
      std::printf("sequence %llu is stored no more; %s, its named pages stay in the prefix cache until room is needed\n",
                  static_cast<unsigned long long>(sequence), freed.c_str());
    return kDone;
  }
  if (chosen("drain")) {
    daemon.call(&v1::Operator::Stub::Drain, v1::Empty());
    if (as_json)
      print({{"draining", true}});
    else
      std::printf("draining: nothing new is taken; watch `needlectl status`\n");
    return kDone;
  }
  if (chosen("audit")) {
    (void)status_of(daemon);
    daemon.call(&v1::Operator::Stub::Audit, v1::Empty(), 60'000);
    if (as_json)
      print({{"audit", "ok"}});
    else
      std::printf("everything adds up\n");
    return kDone;
  }
  if (chosen("options")) {
    const v1::OptionsReply reply = daemon.call(&v1::Operator::Stub::Options, v1::Empty());
    json document = json::array();
    Table table({"option", "value", "from", "changes"});
    for (const auto& option : reply.options()) {
      document.push_back({{"name", option.name()}, {"value", option.value()}, {"source", option.source()}, {"live", option.live()}});
      table.row({option.name(), option.value(), option.source(), option.live() ? "live" : "restart"});
    }
    as_json ? print(document) : table.print();
    return kDone;
  }
  return probe(daemon, as_json, probe_options);
}

}  // namespace
}  // namespace needle

int main(int argc, char** argv) {
  try {
    const int code = needle::run(argc, argv);
    std::cout.flush();  // CLI11 prints help there
    if (std::cout.good() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    std::fprintf(stderr, "needlectl: standard output cannot be written: %s; what the command did is done\n", std::strerror(errno));
    return needle::kRefused;
  } catch (const needle::Refusal& refusal) {
    std::fprintf(stderr, "needlectl: %s\n", refusal.message.c_str());
    return refusal.exit;
  } catch (const std::exception& error) {  // a library's own, such as no memory or no thread
    std::fprintf(stderr, "needlectl: %s\n", error.what());
    return needle::kRefused;
  }
}
