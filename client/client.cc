#include "client/client.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/units.h"
#include "client/session.h"
#include "kernels/checksum_pages.h"
#include "kernels/format_set.h"
#include "kernels/prepare_index_q.h"
#include "kernels/read_entries.h"
#include "kernels/read_topk.h"

namespace needle::client {
namespace {

uint64_t pack(PageId page) { return static_cast<uint64_t>(page.generation.value()) << 32 | page.index.value(); }
PageId unpack(uint64_t page) { return {PageIndex(static_cast<uint32_t>(page)), Generation(static_cast<uint32_t>(page >> 32))}; }

template <class Repeated>
std::vector<PageId> unpack_all(const Repeated& pages) {
  std::vector<PageId> ids;
  ids.reserve(static_cast<size_t>(pages.size()));
  for (uint64_t page : pages) ids.push_back(unpack(page));
  return ids;
}

Pages pages_of(const v1::PageTable& table) {
  return {table.tokens(), unpack_all(table.paged()), unpack_all(table.window()), unpack(table.state())};
}

void fill(std::span<const PageName> names, v1::PageNames* out) {
  for (const PageName& name : names) {
    out->add_high(name.high);
    out->add_low(name.low);
  }
}

std::vector<int32_t> ids_of(const std::vector<PageId>& pages) {
  std::vector<int32_t> ids;
  ids.reserve(pages.size());
  for (const PageId& page : pages) ids.push_back(static_cast<int32_t>(page.index.value()));
  return ids;
}

// A whole pool as bytes, for checksums and copies: one "layer" that is the page's stride.
struct PoolBytes {
  std::byte* base;
  int64_t stride;
};

PoolBytes writable_bytes(const Session& session, PoolKind kind) {
  return {session.pool(kind).write_base, session.pool(kind).wire.page_bytes};
}

// A creating verb that was refused or not answered: its id is spent, so that a copy of the request which is still on its way,
// or was carried out although its answer got lost, leaves nothing open. The first failure is what the caller is told.
void give_up(Session& session, Session::Right right, uint64_t id) {
  constexpr int64_t kGiveUpMsMax = 1'000;  // the daemon is perhaps not there; the session repeats it
  static_cast<void>(session.end_right(right, id, std::min(session.call_ms(), kGiveUpMsMax)));
}

absl::Status only_writers(const Session& session) {
  if (session.writable()) return absl::OkStatus();
  return make_error(ErrorCode::kWrongOwner, "this client attached read-only; attach with writable = true to store");
}

}  // namespace

std::string default_attach_socket(const std::string& instance) {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  return attach::runtime_dir(runtime == nullptr ? "" : runtime, instance) + "/" + attach::kAttachSocketName;
}

std::vector<int32_t> Pages::paged_ids() const { return ids_of(paged); }
std::vector<int32_t> Pages::window_ids() const { return ids_of(window); }

// ---------------------------------------------------------------------------------------------------------------- launch

Launch::Launch(std::shared_ptr<Session> session) : session_(std::move(session)) {}
Launch::Launch(Launch&&) noexcept = default;
Launch& Launch::operator=(Launch&& other) noexcept {
  if (this != &other) {
    Launch ended(std::move(*this));
    session_ = std::move(other.session_);
    number_ = other.number_;
  }
  return *this;
}
Launch::~Launch() {
  if (session_ != nullptr) session_->end_launch(number_);
}

// ----------------------------------------------------------------------------------------------------------------- lease

Lease::Lease(std::shared_ptr<Session> session, LeaseId id, Pages pages) : session_(std::move(session)), id_(id), pages_(std::move(pages)) {
  session_->remember_lease(id_, pages_);
}
Lease::Lease(Lease&&) noexcept = default;
Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    Lease ended(std::move(*this));
    session_ = std::move(other.session_);
    id_ = other.id_;
    pages_ = std::move(other.pages_);
  }
  return *this;
}
Lease::~Lease() {
  // A destructor can't report; the daemon takes the right back with the session at the latest.
  if (session_ != nullptr) static_cast<void>(release());
}

// A refusal for want of rights or pages is counted, whichever way a read learnt of it.
static absl::Status counted(Session& session, absl::Status status) {
  const std::optional<ErrorCode> code = error_code(status);
  if (code == ErrorCode::kStale || code == ErrorCode::kLeaseExpired || code == ErrorCode::kEpochChanged) session.count_stale_read();
  return status;
}

absl::Status Lease::recheck() const {
  if (session_ == nullptr) return make_error(ErrorCode::kConsumed, "the lease was released");
  absl::StatusOr<uint64_t> now = session_->lease_now(id_);
  if (!now.ok()) return counted(*session_, now.status());
  v1::RecheckRequest request;
  request.set_lease(*now);
  const auto add = [&](PoolKind kind, const PageId& page) {
    if (page.index.is_none()) return;
    request.add_pools(session_->pool(kind).wire.pool);
    request.add_pages(pack(page));
  };
  for (const PageId& page : pages_.paged) add(PoolKind::kPaged, page);
  for (const PageId& page : pages_.window) add(PoolKind::kWindow, page);
  add(PoolKind::kState, pages_.state);
  v1::Empty reply;
  return counted(*session_, session_->call(&v1::Needle::Stub::Recheck, request, &reply, session_->call_ms()));
}

absl::Status Lease::release() {
  if (session_ == nullptr) return make_error(ErrorCode::kConsumed, "the lease was released before");
  const std::shared_ptr<Session> session = std::exchange(session_, nullptr);
  bool last = false;
  absl::StatusOr<uint64_t> now = session->forget_lease(id_, last);
  if (!now.ok()) return now.status();
  if (!last) return absl::OkStatus();
  return session->end_right(Session::Right::kLease, *now, session->call_ms());
}

// ---------------------------------------------------------------------------------------------------------------- ticket

Ticket::Ticket(std::shared_ptr<Session> session, TicketId id, SequenceId sequence)
    : session_(std::move(session)), rights_(session_->rights()), id_(id), sequence_(sequence) {}
Ticket::Ticket(Ticket&&) noexcept = default;
Ticket& Ticket::operator=(Ticket&& other) noexcept {
  if (this != &other) {
    Ticket ended(std::move(*this));
    session_ = std::move(other.session_);
    rights_ = other.rights_;
    id_ = other.id_;
    sequence_ = other.sequence_;
    step_ = other.step_;
    pages_ = std::move(other.pages_);
    shared_ = other.shared_;
    published_ = other.published_;
    sealed_ = other.sealed_;
    matched_ = other.matched_;
    resume_ = other.resume_;
  }
  return *this;
}
Ticket::~Ticket() {
  if (session_ != nullptr) static_cast<void>(forfeit());
}

absl::Status Ticket::alive() const {
  if (session_ == nullptr) return make_error(ErrorCode::kConsumed, "the ticket has ended: sealed or forfeited");
  return session_->check_rights(rights_);
}

// Takes over the daemon's view; pages that are new to this ticket are zeroed here, in the writer's process, so that every
// byte that is never written is zero when the page is hashed.
absl::Status Ticket::take(const v1::TicketView& view) {
  const auto zero_new = [&](PoolKind kind, const std::vector<PageId>& before, const std::vector<PageId>& now, size_t first_own) {
    const PoolBytes pool = writable_bytes(*session_, kind);
    for (size_t i = first_own; i < now.size(); ++i) {
      if (i < before.size() && before[i] == now[i]) continue;
      if (now[i].index.is_none()) continue;
      std::memset(pool.base + pool.stride * now[i].index.value(), 0, static_cast<size_t>(pool.stride));
    }
  };
  Pages now;
  now.tokens = view.tokens_reserved();
  now.paged = unpack_all(view.paged());
  now.window = unpack_all(view.window());
  now.state = unpack(view.state());
  uint64_t launch = 0;
  if (absl::Status status = session_->begin_launch(launch); !status.ok()) return status;
  // Shared pages and those sealed already belong to everybody: only what lies behind them may be written.
  const auto own = static_cast<size_t>(std::max(view.pages_shared(), view.pages_sealed()));
  zero_new(PoolKind::kPaged, pages_.paged, now.paged, own);
  zero_new(PoolKind::kWindow, pages_.window, now.window, 0);
  zero_new(PoolKind::kState, {pages_.state}, {now.state}, 0);
  session_->end_launch(launch);
  pages_ = std::move(now);
  shared_ = view.pages_shared();
  published_ = view.tokens_published();
  sealed_ = view.pages_sealed();
  return absl::OkStatus();
}

absl::Status Ticket::change_length(LengthVerb verb, int64_t tokens) {
  if (absl::Status status = alive(); !status.ok()) return status;
  v1::ExtendRequest request;
  request.set_ticket(id_.value());
  request.set_step(++step_);
  request.set_tokens(tokens);
  v1::TicketView view;
  const auto rpc = verb == LengthVerb::kExtend    ? &v1::Needle::Stub::Extend
                   : verb == LengthVerb::kPublish ? &v1::Needle::Stub::Publish
                                                  : &v1::Needle::Stub::Truncate;
  if (absl::Status status = session_->call(rpc, request, &view, session_->call_ms()); !status.ok()) return status;
  return take(view);
}

absl::Status Ticket::extend(int64_t tokens) { return change_length(LengthVerb::kExtend, tokens); }
absl::Status Ticket::publish(int64_t tokens) { return change_length(LengthVerb::kPublish, tokens); }
absl::Status Ticket::truncate(int64_t tokens) { return change_length(LengthVerb::kTruncate, tokens); }

absl::StatusOr<std::vector<uint64_t>> Ticket::checksums(PoolKind kind, std::span<const PageId> pages, Workers& workers) const {
  std::vector<uint64_t> sums(pages.size());
  if (pages.empty()) return sums;
  const PoolBytes pool = writable_bytes(*session_, kind);
  const std::vector<int32_t> ids = ids_of(std::vector<PageId>(pages.begin(), pages.end()));
  ChecksumPagesArgs args;
  args.base = pool.base;
  args.page_stride = pool.stride;
  args.page_count = session_->pool(kind).page_count;
  args.page_bytes = pool.stride;
  args.pages = ids.data();
  args.count = static_cast<int32_t>(ids.size());
  args.checksums = sums.data();
  if (absl::Status status = checksum_pages_cpu(args, best_cpu_isa(), workers); !status.ok()) return status;
  return sums;
}

absl::Status Ticket::add_full_pages(int64_t tokens, std::span<const PageName> names, Workers& workers, v1::PageSeals* out) const {
  const int64_t page_tokens = session_->pool(PoolKind::kPaged).wire.page_tokens;
  const int64_t full = tokens / page_tokens;
  const int64_t first = std::max(sealed_, shared_);
  if (full <= first) return absl::OkStatus();
  if (full > static_cast<int64_t>(pages_.paged.size())) {
    return make_error(ErrorCode::kInvalid,
                      absl::StrCat("sealing ", tokens, " tokens, but only ", pages_.tokens, " are reserved; extend first"));
  }
  const auto range = std::span(pages_.paged).subspan(static_cast<size_t>(first), static_cast<size_t>(full - first));
  absl::StatusOr<std::vector<uint64_t>> sums = checksums(PoolKind::kPaged, range, workers);
  if (!sums.ok()) return sums.status();
  for (size_t i = 0; i < range.size(); ++i) {
    const size_t position = static_cast<size_t>(first) + i;
    // A page that the caller does not name gets a name that nobody can ask for.
    const PageName name = position < names.size() ? names[position] : PageName{Session::random_id(), Session::random_id()};
    out->add_name_high(name.high);
    out->add_name_low(name.low);
    out->add_checksum((*sums)[i]);
  }
  return absl::OkStatus();
}

absl::Status Ticket::seal_pages(int64_t tokens, std::span<const PageName> names, Workers& workers) {
  if (absl::Status status = alive(); !status.ok()) return status;
  if (tokens > published_) {
    if (absl::Status status = publish(tokens); !status.ok()) return status;  // only what is published may be sealed
  }
  v1::SealPagesRequest request;
  request.set_ticket(id_.value());
  if (absl::Status status = add_full_pages(tokens, names, workers, request.mutable_pages()); !status.ok()) return status;
  if (request.pages().checksum_size() == 0) return absl::OkStatus();
  request.set_step(++step_);
  v1::TicketView view;
  if (absl::Status status = session_->call(&v1::Needle::Stub::SealPages, request, &view, session_->call_ms()); !status.ok()) {
    return status;
  }
  return take(view);
}

absl::StatusOr<Lease> Ticket::end(int64_t tokens, std::span<const PageName> names, Workers& workers, LeaseId lease) {
  if (absl::Status status = alive(); !status.ok()) return status;
  v1::SealRequest request;
  request.set_ticket(id_.value());
  request.set_tokens(tokens);
  request.set_lease(lease.value());
  if (absl::Status status = add_full_pages(tokens, names, workers, request.mutable_pages()); !status.ok()) return status;
  const int64_t page_tokens = session_->pool(PoolKind::kPaged).wire.page_tokens;
  if (tokens % page_tokens != 0) {
    const auto partial = static_cast<size_t>(tokens / page_tokens);
    if (partial >= pages_.paged.size()) {
      return make_error(ErrorCode::kInvalid,
                        absl::StrCat("sealing ", tokens, " tokens, but only ", pages_.tokens, " are reserved; extend first"));
    }
    absl::StatusOr<std::vector<uint64_t>> sums = checksums(PoolKind::kPaged, std::span(pages_.paged).subspan(partial, 1), workers);
    if (!sums.ok()) return sums.status();
    request.set_partial_checksum((*sums)[0]);
  }
  if (session_->has_pool(PoolKind::kWindow) && !pages_.window.empty() && tokens > 0) {
    // The pages that cover the trailing window, oldest first: window pages are a ring over the sequence.
    const int64_t window_tokens = session_->pool(PoolKind::kWindow).wire.page_tokens;
    const int64_t last = (tokens - 1) / window_tokens;
    const int64_t first = std::max<int64_t>(tokens - kWindowTokens, 0) / window_tokens;
    std::vector<PageId> covering;
    for (int64_t page = first; page <= last; ++page) {
      covering.push_back(pages_.window[static_cast<size_t>(page) % pages_.window.size()]);
    }
    absl::StatusOr<std::vector<uint64_t>> sums = checksums(PoolKind::kWindow, covering, workers);
    if (!sums.ok()) return sums.status();
    for (uint64_t sum : *sums) request.add_window_checksums(sum);
  }
  if (session_->has_pool(PoolKind::kState) && !pages_.state.index.is_none()) {
    absl::StatusOr<std::vector<uint64_t>> sums = checksums(PoolKind::kState, std::span(&pages_.state, 1), workers);
    if (!sums.ok()) return sums.status();
    request.set_state_checksum((*sums)[0]);
  }
  request.set_step(++step_);
  v1::SealReply reply;
  if (absl::Status status = session_->call(&v1::Needle::Stub::Seal, request, &reply, session_->call_ms()); !status.ok()) {
    if (!lease.is_none()) give_up(*session_, Session::Right::kLease, lease.value());
    return status;
  }
  const std::shared_ptr<Session> session = std::exchange(session_, nullptr);  // ended: nothing to forfeit any more
  if (lease.is_none()) return Lease();
  return Lease(session, lease, pages_of(reply.table()));
}

absl::Status Ticket::seal(int64_t tokens, std::span<const PageName> names, Workers& workers) {
  return end(tokens, names, workers, LeaseId()).status();
}
absl::StatusOr<Lease> Ticket::seal_and_keep(int64_t tokens, std::span<const PageName> names, Workers& workers) {
  return end(tokens, names, workers, LeaseId(Session::random_id()));
}

absl::Status Ticket::forfeit() {
  if (session_ == nullptr) return make_error(ErrorCode::kConsumed, "the ticket has ended: sealed or forfeited");
  const std::shared_ptr<Session> session = std::exchange(session_, nullptr);
  if (absl::Status status = session->check_rights(rights_); !status.ok()) return status;
  return session->end_right(Session::Right::kTicket, id_.value(), session->call_ms());
}

// ------------------------------------------------------------------------------------------------------------------ ship

Ship::Ship(std::shared_ptr<Session> session, TicketId ticket, LeaseId lease, int64_t deadline_ms)
    : session_(std::move(session)), rights_(session_->rights()), ticket_(ticket), lease_(lease), deadline_ms_(deadline_ms) {}
Ship::Ship(Ship&&) noexcept = default;
Ship& Ship::operator=(Ship&& other) noexcept {
  if (this != &other) {
    Ship ended(std::move(*this));
    session_ = std::move(other.session_);
    rights_ = other.rights_;
    ticket_ = other.ticket_;
    lease_ = other.lease_;
    deadline_ms_ = other.deadline_ms_;
  }
  return *this;
}
Ship::~Ship() {
  if (session_ != nullptr) static_cast<void>(cancel());
}

absl::StatusOr<ShipView> Ship::progress() const {
  if (session_ == nullptr) return make_error(ErrorCode::kConsumed, "the ship has ended");
  if (absl::Status status = session_->check_rights(rights_); !status.ok()) return status;
  v1::TicketRequest request;
  request.set_ticket(ticket_.value());
  v1::ShipProgressReply reply;
  if (absl::Status status = session_->call(&v1::Needle::Stub::ShipProgress, request, &reply, session_->call_ms()); !status.ok()) {
    return status;
  }
  return ShipView{reply.state(),         reply.attempt(),       reply.pages_known(),
                  reply.pages_arrived(), reply.bytes_arrived(), reply.source_complete()};
}

absl::StatusOr<Lease> Ship::wait() {
  if (session_ == nullptr) return make_error(ErrorCode::kConsumed, "the ship has ended");
  if (absl::Status status = session_->check_rights(rights_); !status.ok()) return status;
  v1::TicketRequest request;
  request.set_ticket(ticket_.value());
  v1::LeasedTable reply;
  // The daemon answers at its own deadline at the latest; the call's is a little later, so that its reason arrives.
  if (absl::Status status = session_->call(&v1::Needle::Stub::ShipWait, request, &reply, deadline_ms_ + session_->call_ms());
      !status.ok()) {
    return status;
  }
  const std::shared_ptr<Session> session = std::exchange(session_, nullptr);
  return Lease(session, lease_, pages_of(reply.table()));
}

absl::Status Ship::cancel() {
  if (session_ == nullptr) return make_error(ErrorCode::kConsumed, "the ship has ended");
  const std::shared_ptr<Session> session = std::exchange(session_, nullptr);
  if (absl::Status status = session->check_rights(rights_); !status.ok()) return status;
  absl::Status status = session->end_right(Session::Right::kShip, ticket_.value(), session->call_ms());
  // It was sealed first, and its lease granted to nobody who would give it back.
  if (is_error(status, ErrorCode::kConsumed)) give_up(*session, Session::Right::kLease, lease_.value());
  return status;
}

// ---------------------------------------------------------------------------------------------------------------- client

// Scratch of reads under way, kept between them: a read on a decode path allocates nothing after its first.
class Client::ScratchPool {
 public:
  class Loan {
   public:
    Loan(ScratchPool& pool, int64_t bytes) : pool_(pool), block_(pool.take(bytes)) {}
    ~Loan() { pool_.give(std::move(block_)); }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    void* bytes() {
      const uintptr_t past = reinterpret_cast<uintptr_t>(block_.data()) % 64;
      return block_.data() + (64 - past) % 64;
    }

   private:
    ScratchPool& pool_;
    std::vector<std::byte> block_;
  };

 private:
  std::vector<std::byte> take(int64_t bytes) {
    const auto wanted = static_cast<size_t>(bytes) + 64;
    {
      MutexLock hold(mutex_);
      for (std::vector<std::byte>& block : free_) {
        if (block.size() < wanted) continue;
        std::vector<std::byte> found = std::move(block);
        block = std::move(free_.back());
        free_.pop_back();
        return found;
      }
    }
    return std::vector<std::byte>(wanted);
  }
  void give(std::vector<std::byte> block) {
    MutexLock hold(mutex_);
    if (free_.size() < kBlocksMax) free_.push_back(std::move(block));
  }

  static constexpr size_t kBlocksMax = 16;  // as many reads side by side as a small engine has threads
  Mutex mutex_;
  std::vector<std::vector<std::byte>> free_ ABSL_GUARDED_BY(mutex_);
};

struct Client::RopeTables {
  Mutex mutex;
  struct Row {
    RopeParameters parameters;
    std::vector<float> cos_sin;
  };
  static constexpr uint64_t kPositionsLeast = 4096;
  std::vector<std::unique_ptr<Row>> rows ABSL_GUARDED_BY(mutex);  // never shrinks: views into it are given out
};

Client::Client(std::shared_ptr<Session> session)
    : session_(std::move(session)), rope_tables_(std::make_unique<RopeTables>()), scratch_(std::make_unique<ScratchPool>()) {}

absl::StatusOr<std::unique_ptr<Client>> Client::attach(const AttachOptions& options) {
  absl::StatusOr<std::shared_ptr<Session>> session = Session::open(options);
  if (!session.ok()) return session.status();
  return std::unique_ptr<Client>(new Client(*session));
}

Client::~Client() { session_->close(); }

const ModelFormats& Client::formats() const { return session_->formats(); }
const PageLayout& Client::layout(PoolKind kind) const { return session_->layout(kind); }
std::string Client::node() const { return session_->node(); }
std::string Client::build() const { return session_->build(); }

namespace {

const PageFormat& format_of(const Session& session, PoolKind kind) {
  const ModelFormats& formats = session.formats();
  return kind == PoolKind::kPaged ? formats.paged : kind == PoolKind::kWindow ? formats.window : formats.state;
}

template <class View, class Byte>
View view_of(const Session& session, PoolKind kind, int component, int layer, Byte* base) {
  const PageFormat& format = format_of(session, kind);
  NEEDLE_CHECK(component >= 0 && component < static_cast<int>(format.components.size()), "no such component in the format");
  const Component& part = format.components[static_cast<size_t>(component)];
  NEEDLE_CHECK(layer >= 0 && layer < part.layers, "no such layer in the component");
  const PageLayout& layout = session.layout(kind);
  View view;
  view.base = base + layout.layer_offset(component, layer);
  view.page_stride = layout.page_stride(component);
  view.page_count = session.pool(kind).page_count;
  view.slots_per_page = layout.slots_per_page(component);
  view.head_dim = part.head_dim;
  view.element = part.element;
  view.scale = part.scale;
  return view;
}

}  // namespace

LayerView Client::layer(PoolKind kind, int component, int layer) const {
  return view_of<LayerView, const std::byte>(*session_, kind, component, layer, session_->pool(kind).read_base);
}

absl::StatusOr<MutableLayerView> Client::writable_layer(PoolKind kind, int component, int layer) const {
  if (absl::Status status = only_writers(*session_); !status.ok()) return status;
  return view_of<MutableLayerView, std::byte>(*session_, kind, component, layer, session_->pool(kind).write_base);
}

absl::StatusOr<StateView> Client::state_view(int component, int layer) const {
  if (absl::Status status = only_writers(*session_); !status.ok()) return status;
  const PageFormat& format = session_->formats().state;
  if (component < 0 || component >= static_cast<int>(format.components.size())) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("state component ", component, " of ", format.components.size()));
  }
  const Component& part = format.components[static_cast<size_t>(component)];
  const PageLayout& layout = session_->layout(PoolKind::kState);
  StateView view;
  view.base = session_->pool(PoolKind::kState).write_base + layout.layer_offset(component, layer);
  view.stride = layout.page_stride(component);
  view.count = session_->pool(PoolKind::kState).page_count;
  view.form = part.state_form;
  view.ratio = part.ratio;
  view.head_dim = part.head_dim;
  view.speculative_rows = part.speculative_rows;
  return view;
}

absl::StatusOr<RopeTableView> Client::rope_table(const RopeParameters& parameters, int64_t positions) {
  if (positions < 1 || positions > kRopePositionsMax) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("a RoPE table of ", positions, " positions, must be 1..", kRopePositionsMax));
  }
  MutexLock hold(rope_tables_->mutex);
  for (const auto& row : rope_tables_->rows) {
    const auto have = static_cast<int64_t>(row->cos_sin.size()) / kRopeDims;
    if (row->parameters == parameters && have >= positions) return RopeTableView{row->cos_sin.data(), have};
  }
  // Doubled, since none is ever freed: together they stay below twice the largest, however a context grows.
  static_assert(std::has_single_bit(static_cast<uint64_t>(kRopePositionsMax)));
  positions = static_cast<int64_t>(std::max(RopeTables::kPositionsLeast, std::bit_ceil(static_cast<uint64_t>(positions))));
  auto row = std::make_unique<RopeTables::Row>();
  row->parameters = parameters;
  row->cos_sin.resize(static_cast<size_t>(positions * kRopeDims));
  float inverse_frequencies[kRopePairs];
  if (absl::Status status = rope_inverse_frequencies(parameters, inverse_frequencies); !status.ok()) return status;
  CallerThread here;
  if (absl::Status status = build_rope_table(inverse_frequencies, 0, positions, row->cos_sin.data(), here); !status.ok()) {
    return status;
  }
  rope_tables_->rows.push_back(std::move(row));
  return RopeTableView{rope_tables_->rows.back()->cos_sin.data(), positions};
}

absl::StatusOr<Launch> Client::launch() const {
  Launch launch(session_);
  if (absl::Status status = session_->begin_launch(launch.number_); !status.ok()) {
    launch.session_ = nullptr;
    return status;
  }
  return launch;
}

void Client::count_store(int64_t rows, const OpReport& report) const {
  attach::ReadCounters* counters = session_->counters();
  if (counters == nullptr) return;
  const uint64_t skipped = std::min(report.skipped_rows, static_cast<uint64_t>(std::max<int64_t>(rows, 0)));
  counters->stores.fetch_add(1, std::memory_order_relaxed);
  counters->rows_stored.fetch_add(static_cast<uint64_t>(std::max<int64_t>(rows, 0)) - skipped, std::memory_order_relaxed);
  counters->rows_skipped.fetch_add(skipped, std::memory_order_relaxed);
}

absl::StatusOr<Ticket> Client::reserve(SequenceId sequence, int64_t tokens, std::span<const PageName> names) {
  if (absl::Status status = only_writers(*session_); !status.ok()) return status;
  v1::ReserveRequest request;
  request.set_ticket(Session::random_id());
  request.set_sequence(sequence.value());
  request.set_tokens(tokens);
  fill(names, request.mutable_names());
  v1::ReserveReply reply;
  if (absl::Status status = session_->call(&v1::Needle::Stub::Reserve, request, &reply, session_->call_ms()); !status.ok()) {
    give_up(*session_, Session::Right::kTicket, request.ticket());
    return status;
  }
  Ticket ticket(session_, TicketId(request.ticket()), sequence);
  ticket.matched_ = reply.matched_tokens();
  ticket.resume_ = reply.resume_tokens();
  if (absl::Status status = ticket.take(reply.view()); !status.ok()) return status;
  return ticket;
}

absl::StatusOr<Match> Client::lookup(std::span<const PageName> names) const {
  v1::LookupRequest request;
  fill(names, request.mutable_names());
  v1::LookupReply reply;
  if (absl::Status status = session_->call(&v1::Needle::Stub::Lookup, request, &reply, session_->call_ms()); !status.ok()) {
    return status;
  }
  return Match{reply.matched_tokens(), reply.resume_tokens()};
}

absl::StatusOr<Lease> Client::acquire_either(SequenceId sequence, std::span<const PageName> names) const {
  v1::AcquireRequest request;
  request.set_lease(Session::random_id());
  request.set_sequence(sequence.value());
  fill(names, request.mutable_names());
  v1::AcquireReply reply;
  if (absl::Status status = session_->call(&v1::Needle::Stub::Acquire, request, &reply, session_->call_ms()); !status.ok()) {
    give_up(*session_, Session::Right::kLease, request.lease());
    return status;
  }
  return Lease(session_, LeaseId(request.lease()), pages_of(reply.table()));
}

absl::StatusOr<Lease> Client::acquire(SequenceId sequence) const { return acquire_either(sequence, {}); }
absl::StatusOr<Lease> Client::acquire_prefix(std::span<const PageName> names) const { return acquire_either(SequenceId(), names); }

absl::StatusOr<Ship> Client::ship(const std::string& peer, SequenceId sequence, int64_t deadline_ms) {
  v1::ShipStartRequest request;
  request.set_ticket(Session::random_id());
  request.set_sequence(sequence.value());
  request.set_peer(peer);
  request.set_lease(Session::random_id());
  request.set_deadline_ms(deadline_ms);
  v1::Empty reply;
  if (absl::Status status = session_->call(&v1::Needle::Stub::ShipStart, request, &reply, session_->call_ms()); !status.ok()) {
    give_up(*session_, Session::Right::kShip, request.ticket());
    give_up(*session_, Session::Right::kLease, request.lease());
    return status;
  }
  return Ship(session_, TicketId(request.ticket()), LeaseId(request.lease()), deadline_ms);
}

absl::StatusOr<Ticket> Client::adopt(Lease lease, SequenceId continuation, int64_t tokens) {
  if (absl::Status status = only_writers(*session_); !status.ok()) return status;
  absl::StatusOr<uint64_t> now = session_->lease_now(lease.id());
  if (!now.ok()) return now.status();
  v1::AdoptRequest request;
  request.set_lease(*now);
  request.set_ticket(Session::random_id());
  request.set_sequence(continuation.value());
  request.set_tokens(tokens);
  v1::AdoptReply reply;
  if (absl::Status status = session_->call(&v1::Needle::Stub::Adopt, request, &reply, session_->call_ms()); !status.ok()) {
    give_up(*session_, Session::Right::kTicket, request.ticket());
    return status;
  }
  Ticket ticket(session_, TicketId(request.ticket()), continuation);
  // Pages that come with content (moved or shared) must not be zeroed: they count as seen before.
  ticket.pages_ = lease.pages();
  if (!reply.lease_consumed()) ticket.pages_.window.clear();
  if (!reply.lease_consumed()) ticket.pages_.state = {};
  const auto adopted = [&](std::vector<PageId>& seen, const auto& now_pages) {
    const std::vector<PageId> fresh = unpack_all(now_pages);
    std::vector<PageId> kept(fresh.size());
    for (size_t i = 0; i < fresh.size(); ++i) {
      if (std::find(seen.begin(), seen.end(), fresh[i]) != seen.end()) kept[i] = fresh[i];
    }
    seen = std::move(kept);
  };
  adopted(ticket.pages_.paged, reply.view().paged());
  adopted(ticket.pages_.window, reply.view().window());
  if (absl::Status status = ticket.take(reply.view()); !status.ok()) return status;
  {
    absl::StatusOr<Launch> copying = launch();
    if (!copying.ok()) return copying.status();
    for (const v1::PageCopy& copy : reply.copies()) {
      for (PoolKind kind : {PoolKind::kPaged, PoolKind::kWindow, PoolKind::kState}) {
        if (!session_->has_pool(kind) || session_->pool(kind).wire.pool != copy.pool_to()) continue;
        const PoolBytes bytes = writable_bytes(*session_, kind);
        std::memcpy(bytes.base + bytes.stride * unpack(copy.page_to()).index.value(),
                    session_->pool(kind).read_base + bytes.stride * unpack(copy.page_from()).index.value(),
                    static_cast<size_t>(bytes.stride));
      }
    }
  }
  if (reply.lease_consumed()) {
    bool last = false;
    static_cast<void>(session_->forget_lease(lease.id(), last));
    lease.session_ = nullptr;
  } else if (absl::Status status = lease.release(); !status.ok()) {
    return status;
  }
  return ticket;
}

// ------------------------------------------------------------------------------------------------------------------ read

absl::Status Client::check_query(const TopkQuery& query, int component) const {
  const Component& part = formats().paged.components[static_cast<size_t>(component)];
  if (query.layer < 0 || query.layer >= part.layers) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("layer is ", query.layer, ", index_k has ", part.layers));
  }
  if (query.heads < 1 || query.heads > kIndexHeadsMax) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("heads is ", query.heads, ", must be 1..", kIndexHeadsMax));
  }
  const size_t queries = query.positions.size();
  const auto heads = static_cast<size_t>(query.heads);
  if (query.q.size() != queries * heads * kIndexHeadDim || query.head_weights.size() != queries * heads) {
    return make_error(ErrorCode::kInvalid,
                      absl::StrCat(queries, " queries of ", heads, " heads want ", queries * heads * kIndexHeadDim, " query values and ",
                                   queries * heads, " weights, got ", query.q.size(), " and ", query.head_weights.size()));
  }
  if (query.k < 1 || query.k > kTopkMax) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("k is ", query.k, ", must be 1..", kTopkMax));
  }
  for (int64_t position : query.positions) {
    if (position < 0 || position >= kRopePositionsMax) {
      return make_error(ErrorCode::kInvalid, absl::StrCat("query position ", position, ", must be 0..", kRopePositionsMax - 1));
    }
  }
  return absl::OkStatus();
}

int Client::index_k_component() const {
  const std::vector<Component>& components = formats().paged.components;
  for (size_t i = 0; i < components.size(); ++i) {
    if (components[i].kind == ComponentKind::kIndexK) return static_cast<int>(i);
  }
  return -1;
}

namespace {

// What Prometheus learns of reads in this process: plain adds to a page that the daemon scrapes.
void count_read(const Session& session, const ReadTopkArgs& args, const OpReport& report, int64_t ns) {
  attach::ReadCounters* counters = session.counters();
  if (counters == nullptr) return;
  const auto add = [](std::atomic<uint64_t>& counter, uint64_t value) { counter.fetch_add(value, std::memory_order_relaxed); };
  const LayerView& keys = args.logits.keys;
  uint64_t scored = 0;
  for (int32_t i = 0; i < args.logits.query_count; ++i) scored += static_cast<uint64_t>(args.logits.visible[i]);
  add(counters->reads, 1);
  add(counters->queries, static_cast<uint64_t>(args.logits.query_count));
  add(counters->entries_scored, scored);
  add(counters->bytes_read, static_cast<uint64_t>(args.entries_max * (slot_data_bytes(keys.element, keys.head_dim) +
                                                                      slot_scale_bytes(keys.element, keys.head_dim))));
  add(counters->nan_scores, report.nan_scores);
  add(counters->absent_entries, report.absent_entries);
  add(counters->exact_rescans, report.fallbacks);
  const int64_t micros = ns / kNanosPerMicro;
  size_t bucket = 0;
  while (bucket + 1 < attach::kReadLatencyBuckets && micros >= (int64_t{1} << bucket)) ++bucket;
  add(counters->latency[bucket], 1);
  add(counters->latency_ns_sum, static_cast<uint64_t>(ns));
}

}  // namespace

absl::StatusOr<TopkAnswer> Client::read_topk(const Pages& pages, const TopkQuery& query, Workers& workers) {
  const int component = index_k_component();
  if (component < 0) return make_error(ErrorCode::kInvalid, "this pool set has no index_k");
  if (absl::Status status = check_query(query, component); !status.ok()) return status;
  const Component& part = formats().paged.components[static_cast<size_t>(component)];
  const auto queries = static_cast<int32_t>(query.positions.size());
  TopkAnswer answer;
  answer.stride = round_up(query.k, 64);  // engines' attention wants index rows of a multiple of 64
  const auto members = static_cast<size_t>(answer.stride * queries);
  answer.positions.assign(members, kNoEntry);
  answer.slots.assign(members, kNoEntry);
  answer.scores.assign(members, -std::numeric_limits<float>::infinity());
  answer.counts.assign(static_cast<size_t>(queries), 0);
  answer.variant = static_cast<uint32_t>(score_variant(best_cpu_isa()));
  if (queries == 0) return answer;

  absl::StatusOr<Launch> open = launch();
  if (!open.ok()) return counted(*session_, open.status());
  const std::vector<int32_t> table = pages.paged_ids();
  const int64_t entries = entries_complete(pages.tokens, part.ratio);
  std::vector<int32_t> visible(static_cast<size_t>(queries));
  for (size_t i = 0; i < visible.size(); ++i) {
    visible[i] = static_cast<int32_t>(std::min(entries_complete(query.positions[i] + 1, part.ratio), entries));
  }
  ReadTopkArgs args;
  args.logits.keys = layer(PoolKind::kPaged, component, query.layer);
  args.logits.pages = {table.data(), nullptr, static_cast<int64_t>(table.size()), 1, static_cast<int32_t>(table.size())};
  args.logits.q = query.q.data();
  args.logits.head_weights = query.head_weights.data();
  args.logits.queries_per_row = queries;
  args.logits.visible = visible.data();
  args.logits.query_count = queries;
  args.logits.heads = query.heads;
  PrepareIndexQArgs prepare;
  if (!query.prepared) {
    prepare.component = part;
    if (part.rope != RopeStyle::kNone) {
      const int64_t furthest = *std::max_element(query.positions.begin(), query.positions.end());
      absl::StatusOr<RopeTableView> rope = rope_table(part.rope_table, furthest + 1);
      if (!rope.ok()) return rope.status();
      prepare.rope = *rope;
      prepare.positions = query.positions.data();
    }
    prepare.q = {query.q.data(), int64_t{query.heads} * kIndexHeadDim, RowElement::kBf16};
    prepare.raw_weights = {query.head_weights.data(), query.heads, RowElement::kFp32};
    prepare.tokens = queries;
    prepare.heads = query.heads;
    args.prepare = &prepare;
  }
  args.entries_max = entries;
  args.k = query.k;
  args.order = query.by_rank ? TopkOrder::kByRank : TopkOrder::kByPosition;
  args.positions = answer.positions.data();
  args.slots = answer.slots.data();
  args.out_scores = answer.scores.data();
  args.counts = answer.counts.data();
  args.out_stride = answer.stride;
  args.report = &answer.report;
  if (entries == 0) return answer;  // nothing is visible yet: every row is padding
  absl::StatusOr<ReadTopkPlan> plan = plan_read_topk_cpu(args, workers.width());
  if (!plan.ok()) return plan.status();
  const int64_t begin_ns = SteadyClock().now_ns();
  ScratchPool::Loan scratch(*scratch_, plan->scratch_bytes);
  if (absl::Status status = read_topk_cpu(args, *plan, best_cpu_isa(), workers, scratch.bytes(), plan->scratch_bytes); !status.ok()) {
    return status;
  }
  count_read(*session_, args, answer.report, SteadyClock().now_ns() - begin_ns);
  return answer;
}

absl::StatusOr<std::vector<uint16_t>> Client::read_entries(const Pages& pages, int component, int layer_index,
                                                           std::span<const int32_t> entries, Workers& workers) {
  const std::vector<Component>& components = formats().paged.components;
  if (component < 0 || component >= static_cast<int>(components.size())) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("component is ", component, ", the format has ", components.size()));
  }
  const Component& part = components[static_cast<size_t>(component)];
  if (layer_index < 0 || layer_index >= part.layers) {
    return make_error(ErrorCode::kInvalid, absl::StrCat("layer is ", layer_index, ", the component has ", part.layers));
  }
  const int64_t visible = entries_complete(pages.tokens, part.ratio);
  for (int32_t entry : entries) {
    if (entry < kNoEntry || entry >= visible) {
      return make_error(ErrorCode::kInvalid, absl::StrCat("entry is ", entry, ", the sequence has ", visible));
    }
  }
  absl::StatusOr<Launch> open = launch();
  if (!open.ok()) return counted(*session_, open.status());
  const std::vector<int32_t> table = pages.paged_ids();
  const int64_t values = read_entry_values(part.element, part.head_dim);
  std::vector<uint16_t> out(entries.size() * static_cast<size_t>(values));
  OpReport report{};
  ReadEntriesArgs args;
  args.layer = layer(PoolKind::kPaged, component, layer_index);
  args.positions = entries.data();
  args.rows = entries.empty() ? 0 : 1;
  args.ids_per_row = static_cast<int32_t>(entries.size());
  args.id_stride = static_cast<int64_t>(entries.size());
  args.pages = {table.data(), nullptr, static_cast<int64_t>(table.size()), 1, static_cast<int32_t>(table.size())};
  args.out = reinterpret_cast<std::byte*>(out.data());
  args.entry_stride = 2 * values;
  args.row_stride = args.entry_stride * args.ids_per_row;
  args.report = &report;
  if (absl::Status status = read_entries_cpu(args, best_cpu_isa(), workers); !status.ok()) return status;
  if (report.status != 0) {
    return counted(*session_, make_error(ErrorCode::kStale, absl::StrCat(report.absent_entries, " of ", entries.size(),
                                                                         " entries have no page any more; acquire anew")));
  }
  return out;
}

absl::StatusOr<TopkAnswer> Client::read_topk_remote(const Lease& lease, const TopkQuery& query) {
  const int component = index_k_component();
  if (component < 0) return make_error(ErrorCode::kInvalid, "this pool set has no index_k");
  if (absl::Status status = check_query(query, component); !status.ok()) return status;
  absl::StatusOr<uint64_t> now = session_->lease_now(lease.id());
  if (!now.ok()) return now.status();
  v1::ReadTopkRequest request;
  request.set_lease(*now);
  request.set_layer(static_cast<uint32_t>(query.layer));
  request.set_heads(static_cast<uint32_t>(query.heads));
  request.set_q(query.q.data(), query.q.size_bytes());
  request.set_head_weights(query.head_weights.data(), query.head_weights.size_bytes());
  for (int64_t position : query.positions) request.add_positions(static_cast<uint32_t>(position));
  request.set_q_is_prepared(query.prepared);
  request.set_k(static_cast<uint32_t>(query.k));
  request.set_by_rank(query.by_rank);
  request.set_with_scores(true);
  request.set_with_slots(true);
  v1::ReadTopkReply reply;
  if (absl::Status status = session_->call(&v1::Needle::Stub::ReadTopk, request, &reply, session_->call_ms()); !status.ok()) {
    return status;
  }
  TopkAnswer answer;
  answer.stride = reply.stride();
  answer.positions.assign(reply.positions().begin(), reply.positions().end());
  answer.slots.assign(reply.slots().begin(), reply.slots().end());
  answer.scores.assign(reply.scores().begin(), reply.scores().end());
  answer.counts.assign(reply.counts().begin(), reply.counts().end());
  answer.variant = reply.variant();
  answer.report.status = reply.report_status();
  answer.report.nan_scores = reply.nan_scores();
  answer.report.absent_entries = reply.absent_entries();
  return answer;
}

}  // namespace needle::client
