// The C++ client library: what prefill and decode engines link.
//
//   attach -> views of the pools -> reserve, store with the kernels in this process, seal      (prefill)
//          -> ship from a named peer, adopt, extend, truncate                                  (decode)
//          -> acquire, prepare_index_q + read_topk or read_entries in this process, release    (read)
//
// What must stay true:
//  1. A right is an object: Ticket and Lease are move-only, and dropping one gives the right back. Handles never outlive
//     the daemon's incarnation: after a restart they answer STALE, but for leases over pages that a keeper preserved.
//  2. Memory is mapped once, at one address, for the life of the Client: growing maps more behind it, shrinking unmaps a
//     chunk only when no Launch that began before is still open. Pointers in captured graphs stay good.
//  3. A Launch brackets every kernel that touches the pools, the library's own included. It is refused with STALE once
//     the session's rights were revoked; revocation waits for open Launches before it unmaps and acknowledges.
//  4. The library never retries under another id and never falls back silently: a slower path is named in the reply.
//  5. Every wait has a deadline: AttachOptions::call_ms, or the argument that says so.
//
// Threads: a Client may be used from any number of threads; a Ticket, Lease or Ship by one at a time. One event thread a
// Client sends heartbeats and serves the daemon's wishes. Errors: proto/errors.h says what a caller does.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/ids.h"
#include "base/log.h"
#include "base/workers.h"
#include "client/page_names.h"
#include "kernels/compressor_state.h"
#include "kernels/page_format.h"
#include "kernels/pool_view.h"
#include "kernels/rope.h"

namespace needle::v1 {  // proto/needle.proto; its headers stay out of engines' builds
class PageSeals;
class TicketView;
}  // namespace needle::v1

namespace needle::client {

class Session;  // client/session.h: the attach socket, the mappings, the RPCs

struct AttachOptions {
  std::string socket;  // the daemon's attach.sock; empty: the default instance's
  std::string pool_set = "default";
  std::string client_name = "engine";  // shown to operators
  // What this engine reads and writes. Empty (no components in `paged`): take the daemon's, for tools that adapt.
  ModelFormats formats;
  bool writable = true;     // false: read-only mappings alone; a stray write ends this process and nothing else
  int64_t call_ms = 5'000;  // deadline of a call that names none
  bool reconnect = true;    // attach again when the daemon comes back
  Log* log = nullptr;       // null: silent; must outlive the client
};

// A sequence's pages. Indices are what kernels' page tables take (int32); generations go to the daemon with every call, so that
// a stale id is refused.
struct Pages {
  int64_t tokens = 0;          // raw tokens that the pages hold (a lease) or may hold (a ticket)
  std::vector<PageId> paged;   // from token 0
  std::vector<PageId> window;  // a lease: oldest first; a ticket: a ring, page of token t at (t / window tokens) % size
  PageId state;                // none where the model has no state pool

  std::vector<int32_t> paged_ids() const;
  std::vector<int32_t> window_ids() const;
};

// A right to read. Released on destruction.
class Lease {
 public:
  Lease() = default;  // of nothing
  Lease(Lease&&) noexcept;
  Lease& operator=(Lease&&) noexcept;
  ~Lease();

  const Pages& pages() const { return pages_; }
  LeaseId id() const { return id_; }

  // After the last byte was read: OK, or what was read must not be used (STALE, LEASE_EXPIRED).
  absl::Status recheck() const;
  absl::Status release();  // a second one answers CONSUMED

 private:
  friend class Client;
  friend class Ticket;
  friend class Ship;
  Lease(std::shared_ptr<Session> session, LeaseId id, Pages pages);
  std::shared_ptr<Session> session_;
  LeaseId id_;
  Pages pages_;
};

// Checksums of pages as their writer saw them (kernels/checksum_pages.h). Empty `name` for pages that are not shared.
struct SealedPage {
  PageName name;
  uint64_t checksum = 0;
};

// A right to complete one write. Forfeited on destruction unless sealed.
class Ticket {
 public:
  Ticket(Ticket&&) noexcept;
  Ticket& operator=(Ticket&&) noexcept;
  ~Ticket();

  TicketId id() const { return id_; }
  SequenceId sequence() const { return sequence_; }
  const Pages& pages() const { return pages_; }  // tokens = reserved
  int64_t tokens_published() const { return published_; }
  int64_t pages_sealed() const { return sealed_; }
  int64_t matched_tokens() const { return matched_; }  // stored already, at reserve
  int64_t resume_tokens() const { return resume_; }    // recompute from here

  // All lengths are absolute, in raw tokens. CONSUMED once the ticket has ended, STALE after the rights were revoked.
  absl::Status extend(int64_t tokens);    // new pages come zeroed; OUT_OF_PAGES: nothing was added
  absl::Status publish(int64_t tokens);   // this process may read its own pages up to here
  absl::Status truncate(int64_t tokens);  // takes back published tokens that were not sealed

  // Seals the next full pages in order. `names` may be shorter than the pages: the rest get random names, so that no
  // prefix finds them. Computes each page's checksum here, in the writer's process, before the daemon is told.
  absl::Status seal_pages(int64_t tokens, std::span<const PageName> names, Workers& workers);

  // Ends the ticket: the sequence of `tokens` becomes readable as one unit. Its remaining full pages, the partial one,
  // window and state are checksummed here. With `keep`, the reply is a lease on it.
  absl::Status seal(int64_t tokens, std::span<const PageName> names, Workers& workers);
  absl::StatusOr<Lease> seal_and_keep(int64_t tokens, std::span<const PageName> names, Workers& workers);

  // Gives up. All Launches that wrote have ended: the pages are free at once.
  absl::Status forfeit();

 private:
  friend class Client;
  enum class LengthVerb { kExtend, kPublish, kTruncate };
  Ticket(std::shared_ptr<Session> session, TicketId id, SequenceId sequence);
  absl::Status alive() const;
  absl::Status take(const v1::TicketView& view);
  absl::Status change_length(LengthVerb verb, int64_t tokens);
  absl::StatusOr<std::vector<uint64_t>> checksums(PoolKind kind, std::span<const PageId> pages, Workers& workers) const;
  absl::Status add_full_pages(int64_t tokens, std::span<const PageName> names, Workers& workers, v1::PageSeals* out) const;
  absl::StatusOr<Lease> end(int64_t tokens, std::span<const PageName> names, Workers& workers, LeaseId lease);
  std::shared_ptr<Session> session_;
  uint64_t rights_ = 0;
  TicketId id_;
  SequenceId sequence_;
  uint64_t step_ = 0;
  Pages pages_;
  int64_t shared_ = 0;
  int64_t published_ = 0;
  int64_t sealed_ = 0;
  int64_t matched_ = 0;
  int64_t resume_ = 0;
};

struct ShipView {
  std::string state;  // asking, fetching, confirming, sealed, failed
  uint32_t attempt = 0;
  int64_t pages_known = 0;
  int64_t pages_arrived = 0;
  int64_t bytes_arrived = 0;
  bool source_complete = false;
};

// A ship under way into this daemon's pools. Cancelled on destruction unless it was waited for.
class Ship {
 public:
  Ship(Ship&&) noexcept;
  Ship& operator=(Ship&&) noexcept;
  ~Ship();

  absl::StatusOr<ShipView> progress() const;
  absl::StatusOr<Lease> wait();  // until it ends, at most its deadline; PEER_LOST, CORRUPT, FORFEITED: nothing was published
  absl::Status cancel();

 private:
  friend class Client;
  Ship(std::shared_ptr<Session> session, TicketId ticket, LeaseId lease, int64_t deadline_ms);
  std::shared_ptr<Session> session_;
  uint64_t rights_ = 0;
  TicketId ticket_;
  LeaseId lease_;
  int64_t deadline_ms_ = 0;
};

// Open while kernels of this process may touch the pools.
class Launch {
 public:
  Launch(Launch&&) noexcept;
  Launch& operator=(Launch&&) noexcept;
  ~Launch();

 private:
  friend class Client;
  explicit Launch(std::shared_ptr<Session> session);
  std::shared_ptr<Session> session_;
  uint64_t number_ = 0;
};

// In raw tokens, from the start.
struct Match {
  int64_t matched_tokens = 0;  // stored already
  int64_t resume_tokens = 0;   // the furthest of them with all that is needed to go on: recompute from here
};

// One sequence's index queries. The score is kernels/index_logits.h's, the order kernels/select_topk.h's.
struct TopkQuery {
  int32_t layer = 0;                    // of the index-K component
  std::span<const uint16_t> q;          // [queries, heads, 128] bf16; raw unless `prepared`
  std::span<const float> head_weights;  // [queries, heads]; raw unless `prepared`
  std::span<const int64_t> positions;   // [queries] token positions; entries complete at them are visible
  int32_t heads = 0;                    // 1..128
  bool prepared = false;                // RoPE, rotation and weight factors are already applied
  int32_t k = 512;                      // 1..8192
  bool by_rank = false;                 // else ascending by position
};

struct TopkAnswer {
  int64_t stride = 0;              // members a query, -1 padded
  std::vector<int32_t> positions;  // [queries, stride] entries, ascending unless by_rank
  std::vector<int32_t> slots;      // [queries, stride] page x slots + offset, for the engine's attention
  std::vector<float> scores;       // [queries, stride], -inf padded
  std::vector<int32_t> counts;     // [queries]
  uint32_t variant = 0;            // ScoreVariant
  OpReport report{};               // what had to be left out
};

class Client {
 public:
  // UNAVAILABLE, without a code of ours: no daemon there. FORMAT_MISMATCH: both texts are in the message. WRONG_OWNER: a user that attach.uids lacks.
  static absl::StatusOr<std::unique_ptr<Client>> attach(const AttachOptions& options);
  ~Client();  // closes the session; the caller's Launches have ended
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // ---- pools
  const ModelFormats& formats() const;
  const PageLayout& layout(PoolKind kind) const;
  // One layer of one component, counted in the order of the format's text, for kernels in this process; good for the life of
  // the client, to be used within a Launch. The read-only view for reads, the other for stores (WRONG_OWNER in a read-only client).
  LayerView layer(PoolKind kind, int component, int layer) const;
  absl::StatusOr<MutableLayerView> writable_layer(PoolKind kind, int component, int layer) const;
  // The state records of one (component, layer): a ticket's record is its pages().state.index.
  absl::StatusOr<StateView> state_view(int component, int layer) const;
  // A component's RoPE table for at least `positions` positions, 1..2^24: built once, owned by the client and never freed before it.
  absl::StatusOr<RopeTableView> rope_table(const RopeParameters& parameters, int64_t positions);
  absl::StatusOr<Launch> launch() const;  // STALE once the session's rights were revoked
  std::string node() const;               // the daemon's name
  std::string build() const;              // and what it was built with

  // ---- store
  // `tokens` raw tokens; a name a full page, as many as are known. OUT_OF_PAGES and BUSY carry a hint when to ask again.
  absl::StatusOr<Ticket> reserve(SequenceId sequence, int64_t tokens, std::span<const PageName> names = {});

  // What one launch of a store kernel was given and what its report says, for the daemon's needle_store metrics: engines run those
  // kernels themselves, so nobody else can count them.
  void count_store(int64_t rows, const OpReport& report) const;

  // ---- read
  // `names`: from the first full page on. No match is zero tokens here; acquire_prefix wants one that ends at a resume point, else
  // NOT_FOUND.
  absl::StatusOr<Match> lookup(std::span<const PageName> names) const;
  absl::StatusOr<Lease> acquire(SequenceId sequence) const;
  absl::StatusOr<Lease> acquire_prefix(std::span<const PageName> names) const;
  // In this process, over the mapped pool; the caller holds the lease or ticket that `pages` is of. A decode engine with its own
  // buffers calls the kernels itself.
  absl::StatusOr<TopkAnswer> read_topk(const Pages& pages, const TopkQuery& query, Workers& workers);
  // Entries of one layer of one component, widened to bf16 [entries.size(), values]; -1 gives zeros.
  absl::StatusOr<std::vector<uint16_t>> read_entries(const Pages& pages, int component, int layer, std::span<const int32_t> entries,
                                                     Workers& workers);
  // By the daemon's kernels: for tools, and for sequences whose pages this process does not map.
  absl::StatusOr<TopkAnswer> read_topk_remote(const Lease& lease, const TopkQuery& query);

  // ---- ship and go on
  // Asks this daemon to fetch the sequence from `peer`, a name of peers.static. deadline_ms: at most ship.deadline_max.
  // NOT_FOUND: no such peer. FORMAT_MISMATCH: both texts are in the message.
  absl::StatusOr<Ship> ship(const std::string& peer, SequenceId sequence, int64_t deadline_ms);
  // Full pages stay shared; the partial page, window and state become the ticket's own (copied here if others read them).
  // `tokens`: the absolute length to reserve for. The lease is taken; where adopt is refused (OUT_OF_PAGES, ...) it is released.
  absl::StatusOr<Ticket> adopt(Lease lease, SequenceId continuation, int64_t tokens);

 private:
  explicit Client(std::shared_ptr<Session> session);
  int index_k_component() const;  // -1 where the set has none
  absl::Status check_query(const TopkQuery& query, int component) const;
  absl::StatusOr<Lease> acquire_either(SequenceId sequence, std::span<const PageName> names) const;
  std::shared_ptr<Session> session_;
  struct RopeTables;
  std::unique_ptr<RopeTables> rope_tables_;
  class ScratchPool;
  std::unique_ptr<ScratchPool> scratch_;
};

// $XDG_RUNTIME_DIR/needle/INSTANCE/attach.sock, or /run/needle/INSTANCE/attach.sock.
std::string default_attach_socket(const std::string& instance = "0");

}  // namespace needle::client
