#include "server/transport/ucx/reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "proto/errors.h"

namespace needle::server::ucx {
namespace {

struct Control {
  std::string header;
  std::string payload;
};

absl::Status refusal(uint32_t cause, uint32_t position) {
  const std::string page = "page " + std::to_string(position) + " of the request";
  switch (static_cast<RefusalCause>(cause)) {
    case RefusalCause::kQueueFull: return make_error(ErrorCode::kBusy, "the source's queue is full at " + page + ": ask again");
    case RefusalCause::kChunkReleased:
    case RefusalCause::kUnknownPage: break;
  }
  return make_error(ErrorCode::kStale, page + " lies in no chunk that the source still has: ask for a new offer");
}

}  // namespace

bool send_control(ucp_ep_h endpoint, MessageId id, std::string header, std::string payload, bool with_reply) {
  auto control = std::make_unique<Control>(Control{std::move(header), std::move(payload)});
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER | (with_reply ? UCP_AM_SEND_FLAG_REPLY : 0);
  param.cb.send = [](void* request, ucs_status_t, void* kept) {
    delete static_cast<Control*>(kept);
    ucp_request_free(request);
  };
  param.user_data = control.get();
  const ucs_status_ptr_t request = ucp_am_send_nbx(endpoint, id, control->header.data(), control->header.size(), control->payload.data(),
                                                   control->payload.size(), &param);
  if (UCS_PTR_IS_ERR(request)) return false;
  if (request != nullptr) control.release();  // the callback owns it
  return true;
}

Reader::Reader(WorkerThread& thread, const Chunks& chunks, Counters& counters, Log& log, HalfSettings settings, PageChecksum checksum,
               Answer answer)
    : thread_(thread),
      chunks_(chunks),
      counters_(counters),
      log_(log),
      settings_(std::move(settings)),
      checksum_(std::move(checksum)),
      answer_(std::move(answer)) {}

Reader::~Reader() { NEEDLE_CHECK(fetches_.empty(), "a reader ends after its requests"); }

absl::Status Reader::listen() {
  for (const auto& [id, callback] :
       {std::pair{kPage, &Reader::on_page}, std::pair{kRefused, &Reader::on_refused}, std::pair{kPong, &Reader::on_pong},
        std::pair{kWelcome, &Reader::on_welcome}, std::pair{kGoodbye, &Reader::on_goodbye}}) {
    if (absl::Status status = thread_.worker().receive(id, callback, this); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------------------------------------------------------- peers

void Reader::meet(NodeId node, Incarnation incarnation, uint64_t instance, const SocketAddress& address) {
  Peer& peer = peers_[node];
  if (peer.instance == instance) return;
  peer.node = node;
  if (peer.instance != 0) {
    fail_link(peer, make_error(ErrorCode::kPeerLost, "the peer restarted"));
    peer.chunks.clear();
  }
  peer.incarnation = incarnation;
  peer.instance = instance;
  peer.address = address;
}

void Reader::connect(NodeId node) {
  const auto found = peers_.find(node);
  if (stopping_ || found == peers_.end() || found->second.link != nullptr || found->second.address.bytes == 0) return;
  open_link(found->second, thread_.now_ns());
}

void Reader::learn(NodeId node, Incarnation incarnation, const std::vector<ChunkDescriptor>& chunks) {
  Peer& peer = peers_[node];
  peer.node = node;
  if (peer.incarnation != incarnation) {
    peer.chunks.clear();
    peer.incarnation = incarnation;
  }
  for (const ChunkDescriptor& chunk : chunks) {
    RemoteChunk remote;
    if (chunk.descriptor.size() < sizeof remote.geometry) {
      counters_.messages_dropped.fetch_add(1);
      continue;
    }
    std::memcpy(&remote.geometry, chunk.descriptor.data(), sizeof remote.geometry);
    remote.key = chunk.descriptor.substr(sizeof remote.geometry);
    if (remote.geometry.version != kWireVersion || remote.geometry.page_bytes == 0) {
      counters_.messages_dropped.fetch_add(1);
      continue;
    }
    RemoteChunk& known = peer.chunks[{chunk.pool, chunk.chunk}];
    if (known.key != remote.key && peer.link != nullptr) {  // registered anew: the old key is worth nothing
      const auto stale = peer.link->keys.find({chunk.pool, chunk.chunk});
      if (stale != peer.link->keys.end()) {
        ucp_rkey_destroy(stale->second);
        peer.link->keys.erase(stale);
      }
    }
    known = std::move(remote);
  }
}

Reader::Peer* Reader::peer_of_link(const LinkName& name) {
  if (name.reader_instance != settings_.instance) return nullptr;
  for (auto& [node, peer] : peers_) {
    if (peer.link != nullptr && peer.link->name == name) return &peer;
  }
  return nullptr;
}

void Reader::open_link(Peer& peer, int64_t now_ns) {
  const auto held = std::count_if(held_.begin(), held_.end(), [&](const auto& entry) { return entry.second.peer == peer.node; });
  if (held >= kHeldLinksMax) {
    return fail_link(peer, make_error(ErrorCode::kPeerLost, "UCX has not given back pages of " + std::to_string(held) +
                                                                " earlier links to this peer, the most allowed: restart this daemon"));
  }
  auto link = std::make_unique<Link>();
  link->name = {settings_.instance, ++links_made_};
  link->heard_ns = now_ns;
  link->pinged_ns = now_ns;
  absl::StatusOr<ucp_ep_h> endpoint = open_endpoint(thread_.worker(), peer.address, &Reader::on_endpoint_error, this);
  if (!endpoint.ok()) {
    peer.link = std::move(link);  // without an endpoint; fail_link answers its requests
    return fail_link(peer, endpoint.status());
  }
  link->endpoint = *endpoint;
  HelloHeader hello;
  hello.reader_node = settings_.node.value();
  hello.link = link->name;
  hello.source_instance = peer.instance;
  counters_.links_opened.fetch_add(1);
  peer.link = std::move(link);
  if (!send_control(peer.link->endpoint, kHello, bytes_of(hello), "", true)) {
    fail_link(peer, make_error(ErrorCode::kPeerLost, "the endpoint took no message"));
  }
}

// Every request to the peer ends with `cause`; the link is closed on the next turn, outside UCX's callbacks.
void Reader::fail_link(Peer& peer, absl::Status cause, Ending ending) {
  std::vector<FetchId> ended;
  for (auto& [id, fetch] : fetches_) {
    if (fetch.peer == peer.node && fetch.status.ok()) ended.push_back(id);
  }
  if (peer.link != nullptr && peer.link->failure.ok()) {
    peer.link->failure = cause;
    const bool fault = ending == Ending::kFault;
    log_.write(
        fault ? LogLevel::kWarning : LogLevel::kInfo, fault ? "ucx_link_failed" : "ucx_link_closed",
        {{"peer", std::to_string(peer.node.value())}, {"cause", std::string(cause.message())}, {"requests", std::to_string(ended.size())}});
  }
  for (FetchId id : ended) end(fetches_.at(id), cause);
}

void Reader::close_link(Peer& peer, int64_t now_ns) {
  Link& link = *peer.link;
  link.is_closing = true;
  link.closing_since_ns = now_ns;
  for (const auto& [chunk, key] : link.keys) ucp_rkey_destroy(key);
  link.keys.clear();
  if (link.endpoint == nullptr) return;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  link.closing = ucp_ep_close_nbx(link.endpoint, &param);
}

// True when the endpoint is gone and UCX has let go of every page that was landing over it, or does not in time. In 1.13 the
// close itself completes earlier: it ends those requests afterwards, on a later progress.
bool Reader::finish_close(Peer& peer, int64_t now_ns) {
  Link& link = *peer.link;
  const bool overdue = now_ns - link.closing_since_ns > settings_.silence_ns;
  if (UCS_PTR_IS_PTR(link.closing)) {
    if (ucp_request_check_status(link.closing) == UCS_INPROGRESS && !overdue) return false;
    ucp_request_free(link.closing);  // one in progress is freed when it ends
    link.closing = nullptr;
  }
  if (link.landing > 0 && !overdue) return false;
  if (link.landing > 0) {
    held_[link.name.number] = {peer.node, link.landing};
    counters_.links_held.fetch_add(1);
    counters_.pages_held_now.fetch_add(link.landing);
    log_.write(LogLevel::kError, "ucx_pages_held",
               {{"peer", std::to_string(peer.node.value())},
                {"link", std::to_string(link.name.number)},
                {"pages", std::to_string(link.landing)},
                {"ucx", library_version()}});
  }
  add_in_flight(peer, -link.bytes_in_flight);
  peer.link.reset();
  return true;
}

// A page of a link that was given up came back after all.
void Reader::give_back(uint64_t link) {
  const auto held = held_.find(link);
  NEEDLE_CHECK(held != held_.end(), "a page lands over a link that lives or is held");
  counters_.pages_held_now.fetch_sub(1);
  if (--held->second.pages > 0) return;
  log_.write(LogLevel::kInfo, "ucx_pages_given_back",
             {{"peer", std::to_string(held->second.peer.value())}, {"link", std::to_string(link)}});
  held_.erase(held);
}

void Reader::close_peer(NodeId node, const absl::Status& cause) {
  const auto found = peers_.find(node);
  if (found != peers_.end()) fail_link(found->second, cause);
}

// ------------------------------------------------------------------------------------------------------------- requests

void Reader::refuse(const FetchRequest& request, absl::Status status) { answer_({request.id, std::move(status), {}}); }

void Reader::fetch(FetchRequest request) {
  NEEDLE_CHECK(fetches_.find(request.id) == fetches_.end(), "a request is posted once");
  if (stopping_) return refuse(request, make_error(ErrorCode::kStopping, "the transport is stopping"));
  const auto found = peers_.find(request.source);
  if (found == peers_.end() || found->second.address.bytes == 0) {
    return refuse(request, make_error(ErrorCode::kNotFound, "peer " + std::to_string(request.source.value()) +
                                                                " has told no transport address: is it a static peer here?"));
  }
  Peer& peer = found->second;
  if (request.source_incarnation != peer.incarnation) {
    return refuse(request, make_error(ErrorCode::kStale, "the source is another incarnation than the request names"));
  }
  Fetch fetch;
  fetch.id = request.id;
  fetch.peer = request.source;
  fetch.checksums.resize(request.pages.size());
  for (size_t i = 0; i < request.pages.size(); ++i) {
    const FetchPage& asked = request.pages[i];
    const std::optional<PagePlace> target = chunks_.find(asked.target.pool, asked.target.page.index);
    if (!target.has_value()) {
      return refuse(request, make_error(ErrorCode::kInvalid, "target page " + std::to_string(asked.target.page.index.value()) +
                                                                 " lies in no registered chunk of pool " +
                                                                 std::to_string(asked.target.pool.value())));
    }
    Page page;
    page.wanted = {static_cast<uint32_t>(i), asked.source.pool.value(), asked.source.page.index.value(),
                   asked.source.page.generation.value()};
    page.target_pool = asked.target.pool;
    page.target = *target;
    fetch.pages.push_back(page);
  }
  if (fetch.pages.empty()) return refuse(request, absl::OkStatus());
  fetches_.emplace(request.id, std::move(fetch));
  peer.waiting.push_back(request.id);
}

void Reader::cancel(FetchId id) {
  const auto found = fetches_.find(id);
  if (found == fetches_.end() || !found->second.status.ok()) return;
  Peer& peer = peers_.at(found->second.peer);
  end(found->second, make_error(ErrorCode::kCancelled, "the request was cancelled"));
  if (peer.link == nullptr || !peer.link->failure.ok()) return;
  const CancelHeader header{peer.link->name, id.ticket.value(), id.attempt, id.part};
  send_control(peer.link->endpoint, kCancel, bytes_of(header), "");
}

// The request takes nothing more in; it is answered once nothing of it is landing.
void Reader::end(Fetch& fetch, absl::Status status) {
  fetch.status = std::move(status);
  Peer& peer = peers_.at(fetch.peer);
  for (Page& page : fetch.pages) {
    if (page.stage == Stage::kAsked) add_in_flight(peer, -(page.target.page_bytes - page.landed_bytes));
    if (page.stage == Stage::kAsked || page.stage == Stage::kWaiting) page.stage = Stage::kGone;
  }
  std::erase(peer.waiting, fetch.id);
  answer_if_over(fetch);
}

void Reader::answer_if_over(Fetch& fetch) {
  const bool whole = fetch.arrived == static_cast<int64_t>(fetch.pages.size());
  if (fetch.landing > 0 || (fetch.status.ok() && !whole)) return;
  FetchCompletion completion{fetch.id, fetch.status, {}};
  if (fetch.status.ok()) completion.checksums = std::move(fetch.checksums);
  fetches_.erase(fetch.id);
  answer_(std::move(completion));
}

void Reader::add_in_flight(Peer& peer, int64_t bytes) {
  if (peer.link == nullptr) return;
  peer.link->bytes_in_flight += bytes;
  counters_.bytes_in_flight_now.fetch_add(bytes);
}

// ----------------------------------------------------------------------------------------------------------- on the thread

int64_t Reader::turn(int64_t now_ns) {
  // 4.: time that this thread did not see is not the peer's silence.
  if (turned_ns_ != 0 && now_ns - turned_ns_ > settings_.silence_ns / 2) {
    for (auto& [node, peer] : peers_) {
      if (peer.link != nullptr) peer.link->heard_ns = now_ns;
    }
  }
  turned_ns_ = now_ns;
  bool linked = false;
  for (auto& [node, peer] : peers_) {
    tend(peer, now_ns);
    linked = linked || peer.link != nullptr;
  }
  if (stopping_ && !linked) return WorkerThread::kEnd;
  return now_ns + std::min(settings_.heartbeat_ns, settings_.silence_ns / 4);
}

void Reader::tend(Peer& peer, int64_t now_ns) {
  if (peer.link != nullptr && peer.link->failure.ok()) {
    Link& link = *peer.link;
    if (now_ns - link.heard_ns > settings_.silence_ns) {
      counters_.links_silent.fetch_add(1);
      fail_link(peer, make_error(ErrorCode::kPeerLost,
                                 "the source said nothing for " + std::to_string((now_ns - link.heard_ns) / kNanosPerMilli) + " ms"));
    } else if (now_ns - link.pinged_ns >= settings_.heartbeat_ns) {
      link.pinged_ns = now_ns;
      send_control(link.endpoint, kPing, bytes_of(LifeHeader{link.name}), "");
    }
  }
  if (peer.link != nullptr && !peer.link->failure.ok()) {
    if (!peer.link->is_closing) close_link(peer, now_ns);
    if (!finish_close(peer, now_ns)) return;
  }
  if (peer.waiting.empty()) return;
  if (peer.link == nullptr) open_link(peer, now_ns);
  if (peer.link != nullptr && peer.link->failure.ok() && peer.link->is_welcome) pump(peer);
}

// Asks for as much as the bound allows, oldest request first.
void Reader::pump(Peer& peer) {
  while (!peer.waiting.empty() && peer.link != nullptr && peer.link->failure.ok()) {
    Fetch& fetch = fetches_.at(peer.waiting.front());
    if (peer.link->call == Call::kGet) {
      Page& page = fetch.pages[fetch.next];
      if (peer.link->bytes_in_flight > 0 && peer.link->bytes_in_flight + page.target.page_bytes > settings_.bytes_in_flight_max) {
        return;
      }
      ++fetch.next;
      if (fetch.next == fetch.pages.size()) peer.waiting.pop_front();
      get(peer, fetch, page);  // may answer the request: it is not touched after this
      continue;
    }
    if (!ask(peer, fetch)) return;  // may answer the request: it is not touched after this
  }
}

// False: the bound allows no page more. UCX may tell the endpoint's error from inside the send, which ends the request: the
// send comes last.
bool Reader::ask(Peer& peer, Fetch& fetch) {
  Link& link = *peer.link;
  std::string wanted;
  int64_t count = 0;
  while (fetch.next < fetch.pages.size() && count < kWantedPagesMax) {
    Page& page = fetch.pages[fetch.next];
    if (link.bytes_in_flight > 0 && link.bytes_in_flight + page.target.page_bytes > settings_.bytes_in_flight_max) break;
    wanted += bytes_of(page.wanted);
    page.stage = Stage::kAsked;
    add_in_flight(peer, page.target.page_bytes);
    ++fetch.next;
    ++count;
  }
  if (count == 0) return false;
  if (fetch.next == fetch.pages.size()) peer.waiting.pop_front();
  const FetchHeader header{link.name, fetch.id.ticket.value(), fetch.id.attempt, fetch.id.part};
  // A refused message comes with the endpoint's error, which ends the link and this request.
  send_control(link.endpoint, kFetch, bytes_of(header), std::move(wanted));
  return true;
}

ucp_rkey_h Reader::key_of(Peer& peer, PoolId pool, ChunkIndex chunk) {
  const auto known = peer.link->keys.find({pool, chunk});
  if (known != peer.link->keys.end()) return known->second;
  ucp_rkey_h key = nullptr;
  const RemoteChunk& remote = peer.chunks.at({pool, chunk});
  if (ucp_ep_rkey_unpack(peer.link->endpoint, remote.key.data(), &key) != UCS_OK) return nullptr;
  peer.link->keys[{pool, chunk}] = key;
  return key;
}

void Reader::get(Peer& peer, Fetch& fetch, Page& page) {
  const PoolId pool(page.wanted.pool);
  // The page's chunk by the source's own geometry, which may differ from ours.
  const auto inside = std::find_if(peer.chunks.begin(), peer.chunks.end(), [&](const auto& entry) {
    if (entry.first.first != pool) return false;
    const ChunkGeometry& geometry = entry.second.geometry;
    const uint64_t first = uint64_t{page.wanted.index} * geometry.page_bytes;
    return first >= geometry.first_byte && first + geometry.page_bytes <= geometry.first_byte + geometry.bytes;
  });
  if (inside == peer.chunks.end() || inside->second.geometry.page_bytes != static_cast<uint64_t>(page.target.page_bytes)) {
    return end(fetch, refusal(static_cast<uint32_t>(RefusalCause::kUnknownPage), page.wanted.position));
  }
  ucp_rkey_h key = key_of(peer, pool, inside->first.second);
  if (key == nullptr) return end(fetch, make_error(ErrorCode::kPeerLost, "the source's key of a chunk could not be read"));
  const ChunkGeometry& geometry = inside->second.geometry;
  const uint64_t remote = geometry.address + uint64_t{page.wanted.index} * geometry.page_bytes - geometry.first_byte;
  Landing* landing = start_landing(peer, fetch, page);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
  param.cb.send = &Reader::on_got;
  param.user_data = landing;
  param.memh = page.target.memory;
  add_in_flight(peer, page.target.page_bytes);
  const ucs_status_ptr_t request =
      ucp_get_nbx(peer.link->endpoint, page.target.bytes, static_cast<size_t>(page.target.page_bytes), remote, key, &param);
  if (UCS_PTR_IS_PTR(request)) return;
  landed(landing, UCS_PTR_IS_ERR(request) ? UCS_PTR_STATUS(request) : UCS_OK);
}

// The page lands from now on: owned by UCX's callback, or by who finds that there will be none.
Reader::Landing* Reader::start_landing(Peer& peer, Fetch& fetch, Page& page) {
  page.stage = Stage::kLanding;
  ++fetch.landing;
  ++peer.link->landing;
  return new Landing{this, fetch.id, page.wanted.position, peer.link->name.number};
}

void Reader::on_got(void* request, ucs_status_t status, void* argument) {
  Landing* landing = static_cast<Landing*>(argument);
  ucp_request_free(request);
  landing->reader->landed(landing, status);
}

void Reader::on_received(void* request, ucs_status_t status, size_t, void* argument) {
  Landing* landing = static_cast<Landing*>(argument);
  ucp_request_free(request);
  landing->reader->landed(landing, status);
}

void Reader::landed(Landing* landing, ucs_status_t status) {
  const FetchId id = landing->id;
  const uint32_t position = landing->position;
  const uint64_t link = landing->link;
  delete landing;
  const auto found = fetches_.find(id);  // a request is not answered while a page of it lands, unless abandoned
  if (found == fetches_.end()) return give_back(link);
  Fetch& fetch = found->second;
  Page& page = fetch.pages[position];
  NEEDLE_CHECK(page.stage == Stage::kLanding, "a page lands once");
  Peer& peer = peers_.at(fetch.peer);
  if (peer.link != nullptr && peer.link->name.number == link) {
    add_in_flight(peer, -page.target.page_bytes);
    --peer.link->landing;
  } else {
    give_back(link);
  }
  --fetch.landing;
  if (status == UCS_OK) return arrived(fetch, page);
  page.stage = Stage::kGone;
  if (fetch.status.ok()) return end(fetch, peer_error(status, "page " + std::to_string(position) + " did not arrive"));
  answer_if_over(fetch);
}

void Reader::arrived(Fetch& fetch, Page& page) {
  page.stage = Stage::kArrived;
  ++fetch.arrived;
  counters_.pages_arrived.fetch_add(1);
  counters_.bytes_arrived.fetch_add(page.target.page_bytes);
  if (fetch.status.ok()) {
    fetch.checksums[page.wanted.position] = checksum_(page.target_pool, {page.target.bytes, static_cast<size_t>(page.target.page_bytes)});
  }
  answer_if_over(fetch);
}

// ------------------------------------------------------------------------------------------------------- UCX's callbacks

void Reader::on_endpoint_error(void* argument, ucp_ep_h endpoint, ucs_status_t status) {
  Reader* self = static_cast<Reader*>(argument);
  for (auto& [node, peer] : self->peers_) {
    if (peer.link == nullptr || peer.link->endpoint != endpoint || !peer.link->failure.ok()) continue;
    self->counters_.links_failed.fetch_add(1);
    self->fail_link(peer, peer_error(status, "the endpoint to the source failed"));
  }
}

// The peer whose live link a message names, which was heard from by that; none: the message is dropped.
Reader::Peer* Reader::hear(const void* header, size_t header_bytes, size_t expected_bytes, LinkName& name) {
  if (header_bytes == expected_bytes) std::memcpy(&name, header, sizeof name);  // first in every header we take
  Peer* peer = header_bytes == expected_bytes ? peer_of_link(name) : nullptr;
  if (peer == nullptr || !peer->link->failure.ok()) {
    counters_.messages_dropped.fetch_add(1);
    return nullptr;
  }
  peer->link->heard_ns = thread_.now_ns();
  return peer;
}

ucs_status_t Reader::on_pong(void* argument, const void* header, size_t header_bytes, void*, size_t, const ucp_am_recv_param_t*) {
  LinkName name;
  static_cast<Reader*>(argument)->hear(header, header_bytes, sizeof(LifeHeader), name);
  return UCS_OK;
}

ucs_status_t Reader::on_goodbye(void* argument, const void* header, size_t header_bytes, void*, size_t, const ucp_am_recv_param_t*) {
  Reader* self = static_cast<Reader*>(argument);
  LinkName name;
  Peer* peer = self->hear(header, header_bytes, sizeof(LifeHeader), name);
  if (peer != nullptr) self->fail_link(*peer, make_error(ErrorCode::kPeerLost, "the source says goodbye: it stops"), Ending::kAnnounced);
  return UCS_OK;
}

ucs_status_t Reader::on_welcome(void* argument, const void* header, size_t header_bytes, void*, size_t, const ucp_am_recv_param_t*) {
  Reader* self = static_cast<Reader*>(argument);
  LinkName name;
  Peer* peer = self->hear(header, header_bytes, sizeof(WelcomeHeader), name);
  if (peer == nullptr) return UCS_OK;
  WelcomeHeader welcome;
  std::memcpy(&welcome, header, sizeof welcome);
  if (welcome.source_instance != peer->instance) {
    self->fail_link(*peer, make_error(ErrorCode::kStale, "another process answers at the source's address: it restarted"));
    return UCS_OK;
  }
  Link& link = *peer->link;
  const std::vector<std::string> lanes = lanes_of(link.endpoint);
  link.call = self->settings_.call_of(lanes);
  link.is_welcome = true;
  std::string text;
  for (const std::string& lane : lanes) text += (text.empty() ? "" : "+") + lane;
  self->log_.write(LogLevel::kInfo, "ucx_link_opened",
                   {{"peer", std::to_string(peer->node.value())},
                    {"address", peer->address.text()},
                    {"lanes", text},
                    {"call", kCallNames[static_cast<size_t>(link.call)]}});
  return UCS_OK;
}

ucs_status_t Reader::on_refused(void* argument, const void* header, size_t header_bytes, void*, size_t, const ucp_am_recv_param_t*) {
  Reader* self = static_cast<Reader*>(argument);
  LinkName name;
  if (self->hear(header, header_bytes, sizeof(RefusedHeader), name) == nullptr) return UCS_OK;
  RefusedHeader refused;
  std::memcpy(&refused, header, sizeof refused);
  const auto found = self->fetches_.find({TicketId(refused.ticket), refused.attempt, refused.part});
  if (found == self->fetches_.end() || !found->second.status.ok()) {
    self->counters_.messages_dropped.fetch_add(1);
    return UCS_OK;
  }
  self->end(found->second, refusal(refused.cause, refused.position));
  return UCS_OK;
}

ucs_status_t Reader::on_page(void* argument, const void* header, size_t header_bytes, void* data, size_t bytes,
                             const ucp_am_recv_param_t* param) {
  Reader* self = static_cast<Reader*>(argument);
  LinkName name;
  Peer* peer = self->hear(header, header_bytes, sizeof(PageHeader), name);
  if (peer == nullptr) {
    self->counters_.pages_dropped.fetch_add(1);
    return UCS_OK;
  }
  PageHeader page;
  std::memcpy(&page, header, sizeof page);
  return self->take_page(*peer, page, data, bytes, param);
}

ucs_status_t Reader::take_page(Peer& peer, const PageHeader& header, void* data, size_t bytes, const ucp_am_recv_param_t* param) {
  const auto found = fetches_.find({TicketId(header.ticket), header.attempt, header.part});
  Page* page = nullptr;
  if (found != fetches_.end() && found->second.peer == peer.node && header.position < found->second.pages.size()) {
    page = &found->second.pages[header.position];
  }
  const bool offered = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  const uint64_t page_bytes = page != nullptr ? static_cast<uint64_t>(page->target.page_bytes) : 0;
  // An offered page comes whole; an eager one may come in parts, each where the last one ended.
  const bool expected = page != nullptr && page->stage == Stage::kAsked && header.offset == static_cast<uint64_t>(page->landed_bytes) &&
                        bytes > 0 && bytes <= page_bytes - header.offset && (!offered || bytes == page_bytes);
  if (!expected) {
    counters_.pages_dropped.fetch_add(1);
    return UCS_OK;
  }
  Fetch& fetch = found->second;
  if (!offered) {
    std::memcpy(page->target.bytes + header.offset, data, bytes);
    page->landed_bytes += static_cast<int64_t>(bytes);
    add_in_flight(peer, -static_cast<int64_t>(bytes));
    if (page->landed_bytes == page->target.page_bytes) arrived(fetch, *page);
    return UCS_OK;
  }
  Landing* landing = start_landing(peer, fetch, *page);
  ucp_request_param_t receive{};
  receive.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
  receive.cb.recv_am = &Reader::on_received;
  receive.user_data = landing;
  receive.memh = page->target.memory;
  const ucs_status_ptr_t request = ucp_am_recv_data_nbx(thread_.worker().handle(), data, page->target.bytes, bytes, &receive);
  if (!UCS_PTR_IS_PTR(request)) landed(landing, UCS_PTR_IS_ERR(request) ? UCS_PTR_STATUS(request) : UCS_OK);
  return UCS_INPROGRESS;
}

void Reader::stop() {
  stopping_ = true;
  const absl::Status cause = make_error(ErrorCode::kStopping, "the transport is stopping");
  for (auto& [node, peer] : peers_) fail_link(peer, cause, Ending::kAnnounced);
}

// Nothing progresses this worker any more, and its end is next: that is all the certainty there is about those pages.
void Reader::abandon() {
  for (const auto& [id, fetch] : fetches_) {
    answer_({id, make_error(ErrorCode::kStopping, "the transport stopped while UCX held " + std::to_string(fetch.landing) + " pages"), {}});
  }
  fetches_.clear();
}

}  // namespace needle::server::ucx
