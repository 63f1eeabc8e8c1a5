// The message API of the core: everything that may be said to it, and everything it may say.
//
// An RPC handler, the attach socket, a pidfd watcher, a transport thread and the simulator all do the same: fill a struct
// below, give it a completion where it has a Reply, and post it to the Loop (server/loop.h). The completion is called once
// on the loop thread, at once for every verb but ShipWait, and must not block: hand the reply to your own executor.
//
// What must stay true:
//  1. Every request is idempotent. Verbs that create take the id from the caller (TicketId, LeaseId: random 64 bits, unique
//     in the session); a repeat returns the first outcome for outcome_remembered_ms. Verbs that change a ticket carry
//     `step`, which the caller raises by one for each new change: an equal step is a repeat, a lower one arrived late.
//     A caller that gives up on a creating verb says so with its ending verb (Forfeit, Release, ShipCancel), also when the
//     creating one was refused or never answered: the id is then spent, and a copy still on its way opens nothing.
//  2. Ids of sessions, tickets and leases are worth nothing after the daemon's incarnation changed: STALE.
//  3. A reply never promises what a later message must confirm, except where its comment says so.
//  4. Counts are bounded by server/options.h; a request beyond a bound changes nothing and says which.
//
// Words: see ARCHITECTURE.md. Errors: proto/errors.h says what the caller does.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "base/ids.h"
#include "server/pool/page_types.h"
#include "server/transport/transport.h"

namespace needle::server {

struct Nothing {};

// ---------------------------------------------------------------------------------------------- sessions (attach socket)

struct ProcessIdentity {
  int64_t pid = 0;  // 0: a remote client, whose rights end by time alone
  int64_t start_time_ticks = 0;
  uint32_t uid = 0;
  uint64_t instance = 0;  // of one attached client in that process: random, kept over its attaches; 0: not given
};

struct PoolLayout {
  PoolId pool;
  Epoch epoch;
  PoolShape shape;
  std::vector<ChunkIndex> chunks;  // present now; later ones are told by ChunkMapped
};

// A process takes part in a pool set; its format is the set's canonical text and must be equal. An earlier session of the
// same process ends with this call: the one named `previous`, and, where the client gives its instance, every one of that
// instance and set (its reply was lost, it was revoked, or its daemon is gone); it is let in also where all places are taken.
// So before it calls, the client has fenced everything but reads of `held`; and it never again touches a chunk without held
// pages that the reply does not name. What of `held` still is what it was is leased to it again.
struct Attach {
  struct Reply {
    SessionId session;
    Incarnation incarnation;
    int64_t heartbeat_ms = 0;  // how often to send Heartbeat
    std::array<PoolLayout, kPoolKinds> pools;
    std::vector<PageRef> held;     // of the held pages: those that are still good, now under lease `held_lease`
    LeaseId held_lease;            // none when `held` is empty
    std::vector<SessionId> ended;  // earlier sessions that ended with this call
  };
  std::string pool_set;
  std::string format;
  ProcessIdentity process;
  SessionId previous;
  Epoch held_epoch;    // of the pools that `held` is of: after another one nothing of it is good. None: not known
  LeaseId held_lease;  // the caller's id for the lease over `held`
  std::vector<PageRef> held;
};

struct Heartbeat {  // also renews every lease of the session; any other request counts as one
  using Reply = Nothing;
  SessionId session;
};
struct Detach {  // clean: all launches fenced, everything unmapped. Ends all rights; open tickets are forfeited and freed
  using Reply = Nothing;
  SessionId session;
};
struct Acknowledge {  // a revoked session says: fenced and unmapped. Frees what it pinned and ends the session
  using Reply = Nothing;
  SessionId session;
};
struct ChunkUnmapped {  // answer to ChunkRetiring, after the fence of the last launch that named the chunk
  using Reply = Nothing;
  SessionId session;
  PoolId pool;
  ChunkIndex chunk;
};
struct SessionLost {  // the socket ended. Rights end now; pages stay pinned until Acknowledge or ProcessDied
  SessionId session;
};
struct ProcessDied {  // its pidfd said so: nothing of it can touch memory any more
  SessionId session;
};

// ------------------------------------------------------------------------------------------------------------ read journey

struct Lookup {
  struct Reply {
    int64_t matched_tokens = 0;  // pages present
    int64_t resume_tokens = 0;   // largest boundary <= matched_tokens with a whole resume point; recompute from here
  };
  SessionId session;
  std::vector<PageName> names;  // one a full page, from token 0
};

// Leases a sealed sequence, or (sequence none) the longest stored prefix of `names` that ends at a resume point.
struct Acquire {
  struct Reply {
    LeaseId lease;
    PageTable table;
    int64_t renew_ms = 0;
  };
  SessionId session;
  LeaseId lease;
  SequenceId sequence;
  std::vector<PageName> names;
};
struct Release {  // after the fence of the last read. A second release answers CONSUMED
  using Reply = Nothing;
  SessionId session;
  LeaseId lease;
};
struct Recheck {  // after the last byte of a read: OK, or the bytes must not be used (LEASE_EXPIRED, STALE)
  using Reply = Nothing;
  SessionId session;
  LeaseId lease;
  std::vector<PageRef> pages;  // what was read; empty: the lease as a whole
};

// ----------------------------------------------------------------------------------------------------------- store journey

// The state of an open ticket: the reply of every verb that changes one.
struct TicketView {
  TicketId ticket;
  int64_t tokens_reserved = 0;
  int64_t tokens_published = 0;
  int64_t pages_sealed = 0;   // leading full pages that are sealed (shared ones included)
  std::vector<PageId> paged;  // all positions from 0; the first `pages_shared` are other writers' and read-only
  int64_t pages_shared = 0;
  std::vector<PageId> window;  // a ring: the window page of token t is window[(t / window_tokens) % size]
  PageId state;
};

struct ResumeSlot {  // where to write a resume point: sealed by SealResumePoint
  int64_t tokens = 0;
  std::vector<PageId> window;  // oldest first
  PageId state;                // boundary record
};

struct Reserve {
  struct Reply {
    TicketView view;
    int64_t matched_tokens = 0;
    int64_t resume_tokens = 0;          // recompute from here; positions below matched_tokens are already stored
    std::vector<PageId> resume_window;  // the resume point to read, leased with the ticket; empty when resume_tokens is 0
    PageId resume_state;
    std::vector<ResumeSlot> resume_slots;  // those of `resume_tokens_wanted` that got pages; it is a cache, not a promise
  };
  SessionId session;
  TicketId ticket;
  SequenceId sequence;
  int64_t tokens = 0;
  std::vector<PageName> names;                // of the full pages known now
  std::vector<int64_t> resume_tokens_wanted;  // page boundaries: ends of prefill chunks, last full page of the prompt
};
struct Extend {  // reserves pages up to `tokens`, an absolute count; a smaller one than now changes nothing
  using Reply = TicketView;
  SessionId session;
  TicketId ticket;
  uint64_t step = 0;
  int64_t tokens = 0;
};
struct Publish {  // absolute, never back (Truncate does that): the owner may read its own open pages up to here
  using Reply = TicketView;
  SessionId session;
  TicketId ticket;
  uint64_t step = 0;
  int64_t tokens = 0;
};
struct Truncate {  // takes back published tokens that were not sealed (rejected speculation)
  using Reply = TicketView;
  SessionId session;
  TicketId ticket;
  uint64_t step = 0;
  int64_t tokens = 0;
};

struct FullPageSeal {
  PageName name;
  uint64_t checksum = 0;
};
// Seals the next full pages in order. From the reply on, others may lease and ship them.
// Where a name is already stored, the existing page takes the position and the private one stays the writer's until its
// ticket ends: view.paged shows the page that counts.
struct SealPages {
  using Reply = TicketView;
  SessionId session;
  TicketId ticket;
  uint64_t step = 0;
  std::vector<FullPageSeal> pages;
};
struct SealResumePoint {  // the page at its boundary must be sealed
  using Reply = Nothing;
  SessionId session;
  TicketId ticket;
  int64_t tokens = 0;
  std::vector<uint64_t> window_checksums;
  uint64_t state_checksum = 0;
};
// Ends the ticket: the sequence becomes readable as one unit, all pools or none. The caller's fence has passed on every
// write. With `lease` set, the caller reads on under that lease and the reply's table; else it gives up its own pages.
struct Seal {
  struct Reply {
    SequenceId sequence;
    LeaseId lease;
    PageTable table;
  };
  SessionId session;
  TicketId ticket;
  uint64_t step = 0;
  int64_t tokens = 0;
  std::vector<FullPageSeal> pages;         // remaining full pages
  uint64_t partial_checksum = 0;           // of the last page, when tokens is not a multiple of page_tokens
  std::vector<uint64_t> window_checksums;  // oldest first, of the window pages that cover the trailing window
  uint64_t state_checksum = 0;
  LeaseId lease;
};
struct Forfeit {
  using Reply = Nothing;
  SessionId session;
  TicketId ticket;
  bool fenced = false;  // true: no write can land any more, pages are free at once; false: they drain until Acknowledge
};

// Goes on from a leased sequence. Full pages stay shared. The partial page, window and state become the ticket's own:
// moved when nobody else holds them (the lease is then consumed and `copies` empty), else to be copied by the caller on
// its stream, which then releases the lease after the copies' fence.
struct Adopt {
  struct Copy {
    PageRef from;
    PageRef to;
  };
  struct Reply {
    TicketView view;
    std::vector<Copy> copies;
    bool lease_consumed = false;
  };
  SessionId session;
  LeaseId lease;
  TicketId ticket;
  SequenceId sequence;  // of the continuation
  int64_t tokens = 0;   // reserve up to here at once
};

// ------------------------------------------------------------------------------------------------------------ ship journey

enum class ShipState : uint8_t { kAsking, kFetching, kConfirming, kSealed, kFailed };
inline constexpr const char* kShipStateNames[5] = {"asking", "fetching", "confirming", "sealed", "failed"};

// The reader's daemon fetches a sequence, also while it is still being stored, and seals it here as one unit.
struct ShipStart {
  using Reply = Nothing;  // accepted; ShipWait tells the end
  SessionId session;
  TicketId ticket;
  SequenceId sequence;
  NodeId source;
  LeaseId lease;  // granted on completion, so that the caller can Adopt
  int64_t deadline_ms = 0;
};
struct ShipProgress {
  struct Reply {
    ShipState state = ShipState::kAsking;
    uint32_t attempt = 0;
    int64_t pages_known = 0;
    int64_t pages_arrived = 0;
    int64_t bytes_arrived = 0;
    bool source_complete = false;
  };
  SessionId session;
  TicketId ticket;
};
struct ShipWait {  // answers when the ship ends; bounded by its deadline
  struct Reply {
    LeaseId lease;
    PageTable table;
  };
  SessionId session;
  TicketId ticket;
};
struct ShipCancel {
  using Reply = Nothing;
  SessionId session;
  TicketId ticket;
};
// What this session's sealed ticket or ship made is found by nobody from now on; leases on it hold. Asked while its own lease
// is open, which says that it is still the same. A repeat is fine.
struct Forget {
  using Reply = Nothing;
  SessionId session;
  TicketId ticket;
};

// -------------------------------------------------------------------------------------------------------------- operators

using BudgetRatios = std::array<int64_t, kPoolKinds>;  // weights of paged, window, state; none negative, sum positive

enum class ResizeAnswer : uint8_t { kApplied, kDeferred };
struct ResizeProgress {
  ResizeAnswer answer = ResizeAnswer::kApplied;
  uint64_t revision = 0;
  int64_t chunks_to_grow = 0;
  int64_t chunks_to_shrink = 0;
  int64_t pages_in_use = 0;  // in the retiring chunks: reserved, leased or draining
  struct Holder {
    SessionId session;
    int64_t pinned_bytes = 0;  // of retiring chunks it has not unmapped
  };
  std::vector<Holder> holders;
};
// A new budget and ratios for a pool set. `revision` must be the current one + 1 (STALE otherwise); CONFLICT while an
// earlier resize is deferred; IMPOSSIBLE when the budget has no room for one chunk a pool, or is larger than all address
// ranges together. A pool whose share exceeds its own range gets the range; the rest of that share stays unused.
struct Resize {
  using Reply = ResizeProgress;
  PoolSetId set;
  uint64_t revision = 0;
  int64_t budget_bytes = 0;
  BudgetRatios ratios{};
  bool dry_run = false;
};
struct ResizeStatus {
  using Reply = ResizeProgress;
  PoolSetId set;
};
struct ResizeAbort {  // chunks that clients were not yet told to unmap come back; the others go on retiring
  using Reply = ResizeProgress;
  PoolSetId set;
};
struct Evict {  // up to `pages` idle pages of the paged pool, or one sequence
  struct Reply {
    int64_t pages = 0;
  };
  PoolSetId set;
  int64_t pages = 0;
  SequenceId sequence;
};
struct ListSequences {  // sealed sequences, latest used first
  struct Row {
    SequenceId sequence;
    int64_t tokens = 0;
    int64_t pages = 0;  // of all kinds
    int64_t leases = 0;
  };
  struct Reply {
    int64_t total = 0;
    std::vector<Row> rows;  // at most count_max
  };
  PoolSetId set;
  int64_t count_max = 0;
};
struct Drain {  // takes nothing new from now on; what is open goes on to its end
  using Reply = Nothing;
};

struct Occupancy {  // pages; free + reserved + sealed_idle + leased + draining = capacity, always
  int64_t free = 0;
  int64_t reserved = 0;
  int64_t sealed_idle = 0;
  int64_t leased = 0;
  int64_t draining = 0;
  int64_t capacity = 0;
  int64_t gap = 0;       // outside capacity: would cross a chunk edge
  int64_t retiring = 0;  // outside capacity: free pages of a chunk on its way out
  friend constexpr bool operator==(const Occupancy&, const Occupancy&) = default;
};
struct Snapshot {  // one consistent view, for metrics, health and the CLI
  struct Set {
    PoolSetId set;
    std::string name;
    std::array<Occupancy, kPoolKinds> pools;
    std::array<int64_t, kPoolKinds> chunks{};
    int64_t named_pages = 0;
    int64_t sequences = 0;
    int64_t resume_points = 0;
    uint64_t revision = 0;
    int64_t budget_bytes = 0;
    BudgetRatios ratios{};
  };
  struct SessionRow {
    SessionId session;
    ProcessIdentity process;
    bool silent = false;
    int64_t tickets = 0;
    int64_t leases = 0;
    int64_t pinned_pages = 0;
  };
  Incarnation incarnation;
  bool stopping = false;
  std::vector<Set> sets;
  std::vector<SessionRow> sessions;
  int64_t tickets_open = 0;
  int64_t leases_open = 0;
  int64_t ships_open = 0;
  int64_t bytes_in_flight = 0;
  std::vector<std::pair<std::string, uint64_t>> counters;  // every probe by name (server/probe.h)
};
struct Status {
  using Reply = Snapshot;
};
struct Audit {  // recounts everything from scratch and compares; a difference is an error that names it
  using Reply = Nothing;
};

// ------------------------------------------------------------------------------- between daemons (best effort, any order)

struct ShippedPage {
  PageRef page;
  PageName name;           // none for the partial page, window and state
  int64_t tokens_end = 0;  // tokens of the sequence up to the end of this page's content
  uint64_t checksum = 0;
};
// Reader to source; repeated until answered. Renews the source's lease.
struct ShipAsk {
  TicketId ticket;
  uint32_t attempt = 0;
  SequenceId sequence;
  std::string pool_set;
  std::string format;
  int64_t pages_known = 0;  // leading full pages of this attempt that the reader already has an offer for
};
// Source to reader. Pages from `first_page` on; when `complete`, also partial, window and state.
struct ShipOffer {
  TicketId ticket;
  uint32_t attempt = 0;
  absl::Status status;
  LeaseId lease;
  int64_t first_page = 0;
  std::vector<ShippedPage> pages;
  bool complete = false;
  int64_t tokens = 0;                // of the sequence, when complete
  std::vector<ShippedPage> partial;  // none or one
  std::vector<ShippedPage> window;
  ShippedPage state;
  std::vector<ChunkDescriptor> chunks;
};
// Reader to source, after the last byte: is the lease whole and every page still of its generation?
struct ShipConfirm {
  TicketId ticket;
  uint32_t attempt = 0;
  LeaseId lease;
};
struct ShipConfirmed {
  TicketId ticket;
  uint32_t attempt = 0;
  LeaseId lease;
  absl::Status status;
};
struct ShipRelease {
  TicketId ticket;
  uint32_t attempt = 0;
  LeaseId lease;
};
struct PeerMessage {
  NodeId from;
  Incarnation from_incarnation;
  Incarnation to_incarnation;  // none when not yet known; else the receiver refuses a mismatch
  std::variant<ShipAsk, ShipOffer, ShipConfirm, ShipConfirmed, ShipRelease> body;
};

// ------------------------------------------------------------------------------------------------ from memory and transport

struct ChunkAllocated {
  PoolId pool;
  ChunkIndex chunk;
  absl::Status status;
};
struct TransportReady {};  // poll() has something
struct Tick {};            // time has passed; the loop sends it at Core::next_deadline_ns()

// --------------------------------------------------------------------------------------------------------------- outgoing

// To an attached client, over its socket; lost with it. The client answers ChunkRetiring with ChunkUnmapped and Revoked
// with Acknowledge, each after the fence of its last launch.
struct ChunkMapped {
  PoolId pool;
  ChunkIndex chunk;
};
struct ChunkRetiring {
  PoolId pool;
  ChunkIndex chunk;
};
struct Revoked {
  std::string cause;
};
using SessionEvent = std::variant<ChunkMapped, ChunkRetiring, Revoked>;

class Outbox {
 public:
  virtual ~Outbox() = default;
  virtual void to_session(SessionId session, SessionEvent event) = 0;  // never blocks
  virtual void to_peer(NodeId peer, PeerMessage message) = 0;          // best effort, never blocks
};

// ---------------------------------------------------------------------------------------------------------- the envelope

template <class Request>
using Completion = absl::AnyInvocable<void(absl::StatusOr<typename Request::Reply>) &&>;

template <class Request>
struct Call {
  Request request;
  Completion<Request> done;
};

using Message =
    std::variant<Call<Attach>, Call<Heartbeat>, Call<Detach>, Call<Acknowledge>, Call<ChunkUnmapped>, SessionLost, ProcessDied,
                 Call<Lookup>, Call<Acquire>, Call<Release>, Call<Recheck>, Call<Reserve>, Call<Extend>, Call<Publish>, Call<Truncate>,
                 Call<SealPages>, Call<SealResumePoint>, Call<Seal>, Call<Forfeit>, Call<Adopt>, Call<ShipStart>, Call<ShipProgress>,
                 Call<ShipWait>, Call<ShipCancel>, Call<Forget>, Call<Resize>, Call<ResizeStatus>, Call<ResizeAbort>, Call<Evict>,
                 Call<ListSequences>, Call<Drain>, Call<Status>, Call<Audit>, PeerMessage, ChunkAllocated, TransportReady, Tick>;

}  // namespace needle::server
