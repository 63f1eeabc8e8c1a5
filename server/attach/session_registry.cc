#include "server/attach/session_registry.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/errors.h"

namespace needle::server {

absl::StatusOr<SessionSecret> make_secret() {
  SessionSecret secret{};
  size_t have = 0;
  while (have < secret.size()) {
    const ssize_t got = ::getrandom(secret.data() + have, secret.size() - have, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return make_error(ErrorCode::kBug, absl::StrCat("getrandom: ", std::strerror(errno)));
    have += static_cast<size_t>(got);
  }
  return secret;
}

std::string printable(absl::string_view text) {
  std::string shown(text);
  for (char& c : shown) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return shown;
}

void SessionRegistry::add(SessionEntry entry, const SessionSecret& secret, std::unique_ptr<SharedPage> counters) {
  entry.client = printable(entry.client);
  MutexLock hold(mutex_);
  const uint64_t key = entry.session.value();
  rows_.insert_or_assign(key, Row{std::move(entry), secret, std::move(counters)});
}

void SessionRegistry::remove(SessionId session) {
  MutexLock hold(mutex_);
  const auto row = rows_.find(session.value());
  if (row == rows_.end()) return;
  if (row->second.counters != nullptr) add_counters(*row->second.counters, ended_);
  rows_.erase(row);
}

absl::Status SessionRegistry::check(SessionId session, absl::string_view secret) const {
  SessionSecret wanted{};
  bool known = false;
  {
    MutexLock hold(mutex_);
    const auto row = rows_.find(session.value());
    known = row != rows_.end();
    if (known) wanted = row->second.secret;
  }
  uint8_t difference = known && secret.size() == wanted.size() ? 0 : 1;
  for (size_t i = 0; i < wanted.size(); ++i) {
    difference = static_cast<uint8_t>(difference | (wanted[i] ^ (i < secret.size() ? static_cast<uint8_t>(secret[i]) : 0)));
  }
  if (difference == 0) return absl::OkStatus();
  // STALE rather than WRONG_OWNER for unknown ids would tell a guesser which sessions exist.
  return make_error(ErrorCode::kStale, absl::StrCat("session ", session.value(), " is not known here under that secret; attach again"));
}

std::vector<SessionEntry> SessionRegistry::entries() const {
  MutexLock hold(mutex_);
  std::vector<SessionEntry> entries;
  for (const auto& [key, row] : rows_) entries.push_back(row.entry);
  return entries;
}

SessionEntry SessionRegistry::entry(SessionId session) const {
  MutexLock hold(mutex_);
  const auto row = rows_.find(session.value());
  return row == rows_.end() ? SessionEntry{} : row->second.entry;
}

void SessionRegistry::add_counters(const SharedPage& page, ReadTotals& totals) {
  const auto& counters = *reinterpret_cast<const attach::ReadCounters*>(page.data);
  if (counters.magic != attach::kReadCountersMagic) return;  // the client never wrote: nothing to add
  const auto load = [](const std::atomic<uint64_t>& value) { return value.load(std::memory_order_relaxed); };
  totals.reads += load(counters.reads);
  totals.queries += load(counters.queries);
  totals.entries_scored += load(counters.entries_scored);
  totals.bytes_read += load(counters.bytes_read);
  totals.nan_scores += load(counters.nan_scores);
  totals.absent_entries += load(counters.absent_entries);
  totals.stale_reads += load(counters.stale_reads);
  totals.exact_rescans += load(counters.exact_rescans);
  totals.stores += load(counters.stores);
  totals.rows_stored += load(counters.rows_stored);
  totals.rows_skipped += load(counters.rows_skipped);
  totals.latency_ns_sum += load(counters.latency_ns_sum);
  for (int i = 0; i < attach::kReadLatencyBuckets; ++i) totals.latency[static_cast<size_t>(i)] += load(counters.latency[i]);
}

ReadTotals SessionRegistry::read_totals() const {
  MutexLock hold(mutex_);
  ReadTotals totals = ended_;
  for (const auto& [key, row] : rows_) {
    if (row.counters != nullptr) add_counters(*row.counters, totals);
  }
  return totals;
}

}  // namespace needle::server
