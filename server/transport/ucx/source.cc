#include "server/transport/ucx/source.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "base/check.h"
#include "base/units.h"

namespace needle::server::ucx {

Source::Source(WorkerThread& thread, Chunks& chunks, Counters& counters, Log& log, HalfSettings settings, Released released)
    : thread_(thread), chunks_(chunks), counters_(counters), log_(log), settings_(std::move(settings)), released_(std::move(released)) {}

absl::Status Source::listen(const SocketAddress& where) {
  for (const auto& [id, callback] : {std::pair{kHello, &Source::on_hello}, std::pair{kFetch, &Source::on_fetch},
                                     std::pair{kCancel, &Source::on_cancel}, std::pair{kPing, &Source::on_ping}}) {
    if (absl::Status status = thread_.worker().receive(id, callback, this); !status.ok()) return status;
  }
  absl::StatusOr<std::unique_ptr<Listener>> listener = Listener::create(thread_.worker(), where, &Source::on_request, this);
  if (!listener.ok()) return listener.status();
  listener_ = std::move(*listener);
  return absl::OkStatus();
}

void Source::release(PoolId pool, ChunkIndex chunk) {
  if (chunks_.release(pool, chunk)) released_(pool, chunk);
}

// ---------------------------------------------------------------------------------------------------------------- links

void Source::on_request(ucp_conn_request_h request, void* self) { static_cast<Source*>(self)->requests_.push_back(request); }

void Source::accept_waiting() {
  std::vector<ucp_conn_request_h> requests;
  requests.swap(requests_);
  for (ucp_conn_request_h request : requests) {
    if (stopping_ || links_.size() >= kLinksMax) {
      ucp_listener_reject(listener_->handle(), request);
      counters_.messages_dropped.fetch_add(1);
      continue;
    }
    absl::StatusOr<ucp_ep_h> endpoint = accept_endpoint(thread_.worker(), request, &Source::on_endpoint_error, this);
    if (!endpoint.ok()) {
      log_.write(LogLevel::kWarning, "ucx_reader_not_accepted", {{"cause", std::string(endpoint.status().message())}});
      continue;
    }
    Link& link = links_[++links_made_];
    link.endpoint = *endpoint;
    link.heard_ns = thread_.now_ns();
    counters_.source_links_now.fetch_add(1);
  }
}

void Source::welcome(Link& link, const HelloHeader& hello) {
  int64_t held = 0;
  for (auto& [number, other] : links_) {
    held += other.is_held && other.reader.value() == hello.reader_node;
    if (&other == &link || other.failure != nullptr || other.reader.value() != hello.reader_node) continue;
    const bool late = other.name.reader_instance == hello.link.reader_instance && other.name.number >= hello.link.number;
    if (late) return fail(link, "the reader has opened a later one");  // of before this process was stopped, say
    fail(other, "the reader opened another");
  }
  if (held >= kHeldLinksMax) return fail(link, "UCX has not ended sends of earlier links of this reader");
  link.name = hello.link;
  link.reader = NodeId(hello.reader_node);
  link.call = settings_.call_of(lanes_of(link.endpoint));
  link.heard_ns = thread_.now_ns();
  send_control(link.endpoint, kWelcome, bytes_of(WelcomeHeader{link.name, settings_.instance}), "");
}

void Source::fail(Link& link, const char* cause) {
  if (link.failure != nullptr) return;
  link.failure = cause;
  count_queued(-static_cast<int64_t>(link.queue.size()));
  link.queue.clear();
  log_.write(LogLevel::kInfo, "ucx_reader_link_ended",
             {{"reader", std::to_string(link.reader.value())}, {"cause", cause}, {"sends", std::to_string(link.sends)}});
}

bool Source::close(Link& link, int64_t now_ns) {
  if (!link.is_closing) {
    link.is_closing = true;
    link.closing_since_ns = now_ns;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    link.closing = ucp_ep_close_nbx(link.endpoint, &param);
  }
  const bool overdue = now_ns - link.closing_since_ns > settings_.silence_ns;
  if (UCS_PTR_IS_PTR(link.closing)) {
    if (ucp_request_check_status(link.closing) == UCS_INPROGRESS && !overdue) return false;
    ucp_request_free(link.closing);  // one in progress is freed when it ends
    link.closing = nullptr;
  }
  if (link.sends > 0 && overdue && !link.is_held) {
    link.is_held = true;
    counters_.source_links_now.fetch_sub(1);
    counters_.source_links_held.fetch_add(1);
    counters_.sends_held_now.fetch_add(link.sends);
    log_.write(LogLevel::kError, "ucx_sends_held",
               {{"reader", std::to_string(link.reader.value())}, {"sends", std::to_string(link.sends)}, {"ucx", library_version()}});
  }
  return link.sends == 0;
}

int64_t Source::turn(int64_t now_ns) {
  const bool paused = turned_ns_ != 0 && now_ns - turned_ns_ > settings_.silence_ns / 2;
  turned_ns_ = now_ns;
  accept_waiting();
  for (auto entry = links_.begin(); entry != links_.end();) {
    Link& link = entry->second;
    if (paused) link.heard_ns = now_ns;  // time that this thread did not see is not the reader's silence
    if (link.failure == nullptr && stopping_ && now_ns - stopping_since_ns_ > kGoodbyeNs) fail(link, "the transport is stopping");
    if (link.failure == nullptr && now_ns - link.heard_ns > settings_.silence_ns) {
      counters_.source_links_silent.fetch_add(1);
      fail(link, "the reader is silent");
    }
    if (link.failure == nullptr) {
      if (!stopping_) pump(entry->first, link);
      ++entry;
    } else if (close(link, now_ns)) {
      if (!link.is_held) counters_.source_links_now.fetch_sub(1);
      entry = links_.erase(entry);
    } else {
      ++entry;
    }
  }
  const bool over = std::all_of(links_.begin(), links_.end(), [](const auto& entry) { return entry.second.is_held; });
  if (stopping_ && over) {
    listener_.reset();  // on this thread, before the worker ends
    return WorkerThread::kEnd;
  }
  if (stopping_) return now_ns + kNanosPerMilli;
  return now_ns + std::min(settings_.heartbeat_ns, settings_.silence_ns / 4);
}

// The reader closes the endpoint when it hears the goodbye: closing it here could overtake the message.
void Source::stop() {
  stopping_ = true;
  stopping_since_ns_ = thread_.now_ns();
  for (auto& [number, link] : links_) {
    const bool told =
        !link.reader.is_none() && link.failure == nullptr && send_control(link.endpoint, kGoodbye, bytes_of(LifeHeader{link.name}), "");
    if (!told) fail(link, "the transport is stopping");
  }
}

// ---------------------------------------------------------------------------------------------------------------- pages

void Source::refuse(Link& link, const Item& item, RefusalCause cause) {
  counters_.pages_refused.fetch_add(1);
  RefusedHeader header;
  header.link = link.name;
  header.ticket = item.ticket;
  header.attempt = item.attempt;
  header.part = item.part;
  header.position = item.position;
  header.cause = static_cast<uint32_t>(cause);
  send_control(link.endpoint, kRefused, bytes_of(header), "");
}

void Source::pump(uint64_t number, Link& link) {
  while (link.failure == nullptr && !link.queue.empty() && link.sends < settings_.sends_in_flight_max) {
    if (!send_next(number, link)) return;
  }
}

bool Source::send_next(uint64_t number, Link& link) {
  // A copy, taken off the queue before the send: UCX may tell the endpoint's error from inside it, which empties the queue.
  const Item item = link.queue.front();
  const std::optional<PagePlace> place = chunks_.find(item.pool, item.page);
  const bool whole = link.call != Call::kAmEager || settings_.message_bytes_max == 0;
  const int64_t left = place.has_value() ? place->page_bytes - item.sent_bytes : 0;
  const int64_t bytes = whole ? left : std::min(left, settings_.message_bytes_max);
  if (bytes == left) {
    link.queue.pop_front();
    count_queued(-1);
  } else {
    link.queue.front().sent_bytes += bytes;
  }
  if (!place.has_value()) {
    refuse(link, item, RefusalCause::kChunkReleased);
    return true;
  }

  Send* send = new Send{this, number, item.pool, place->chunk, bytes == left, {}};
  send->header.link = link.name;
  send->header.ticket = item.ticket;
  send->header.attempt = item.attempt;
  send->header.part = item.part;
  send->header.offset = static_cast<uint64_t>(item.sent_bytes);
  send->header.position = item.position;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMH;
  param.flags = link.call == Call::kAmEager ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV;
  param.cb.send = &Source::on_sent;
  param.user_data = send;
  param.memh = place->memory;
  chunks_.start_send(item.pool, place->chunk);
  ++link.sends;
  counters_.sends_now.fetch_add(1);
  // The header lies in `send`, which lives until the send is done: 1.13 cannot copy headers.
  const ucs_status_ptr_t request = ucp_am_send_nbx(link.endpoint, kPage, &send->header, sizeof send->header, place->bytes + item.sent_bytes,
                                                   static_cast<size_t>(bytes), &param);
  if (UCS_PTR_IS_PTR(request)) return true;
  sent(send, UCS_PTR_IS_ERR(request) ? UCS_PTR_STATUS(request) : UCS_OK);
  return !UCS_PTR_IS_ERR(request);
}

void Source::on_sent(void* request, ucs_status_t status, void* argument) {
  Send* send = static_cast<Send*>(argument);
  ucp_request_free(request);
  send->source->sent(send, status);
}

void Source::sent(Send* send, ucs_status_t status) {
  const auto found = links_.find(send->link);
  NEEDLE_CHECK(found != links_.end() && found->second.sends > 0, "a link outlives its sends");
  --found->second.sends;
  counters_.sends_now.fetch_sub(1);
  if (found->second.is_held) counters_.sends_held_now.fetch_sub(1);
  if (status == UCS_OK && send->last) counters_.pages_sent.fetch_add(1);
  if (status != UCS_OK) fail(found->second, "a send failed");
  if (chunks_.end_send(send->pool, send->chunk)) released_(send->pool, send->chunk);
  delete send;
}

// ------------------------------------------------------------------------------------------------------- UCX's callbacks

void Source::on_endpoint_error(void* argument, ucp_ep_h endpoint, ucs_status_t) {
  Source* self = static_cast<Source*>(argument);
  Link* link = self->link_over(endpoint);
  if (link == nullptr || link->failure != nullptr) return;
  if (self->stopping_) return self->fail(*link, "the reader closed after our goodbye");
  self->counters_.source_links_failed.fetch_add(1);
  self->fail(*link, "the endpoint to the reader failed");
}

Source::Link* Source::link_over(ucp_ep_h endpoint) {
  for (auto& [number, link] : links_) {
    if (link.endpoint == endpoint && !link.is_closing) return &link;
  }
  return nullptr;
}

Source::Link* Source::hear(const void* header, size_t header_bytes, size_t expected_bytes) {
  LinkName name;
  if (header_bytes == expected_bytes) std::memcpy(&name, header, sizeof name);
  for (auto& [number, link] : links_) {
    if (header_bytes != expected_bytes || link.name != name || link.reader.is_none() || link.failure != nullptr) continue;
    link.heard_ns = thread_.now_ns();
    return &link;
  }
  counters_.messages_dropped.fetch_add(1);
  return nullptr;
}

ucs_status_t Source::on_hello(void* argument, const void* header, size_t header_bytes, void*, size_t, const ucp_am_recv_param_t* param) {
  Source* self = static_cast<Source*>(argument);
  HelloHeader hello;
  if (header_bytes == sizeof hello) std::memcpy(&hello, header, sizeof hello);
  const bool named = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
  Link* link = named ? self->link_over(param->reply_ep) : nullptr;
  const bool meant = header_bytes == sizeof hello && hello.magic == kWireMagic && hello.version == kWireVersion;
  if (!meant || link == nullptr || link->failure != nullptr || self->stopping_) {
    self->counters_.messages_dropped.fetch_add(1);
    return UCS_OK;
  }
  self->welcome(*link, hello);
  return UCS_OK;
}

ucs_status_t Source::on_fetch(void* argument, const void* header, size_t header_bytes, void* data, size_t bytes,
                              const ucp_am_recv_param_t* param) {
  Source* self = static_cast<Source*>(argument);
  Link* link = self->hear(header, header_bytes, sizeof(FetchHeader));
  if (link == nullptr) return UCS_OK;
  const bool offered = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  if (offered || bytes % sizeof(WantedPage) != 0 || bytes > kWantedPagesMax * sizeof(WantedPage)) {
    self->counters_.messages_dropped.fetch_add(1);
    return UCS_OK;
  }
  FetchHeader fetch;
  std::memcpy(&fetch, header, sizeof fetch);
  for (size_t at = 0; at < bytes && link->failure == nullptr; at += sizeof(WantedPage)) {  // a refusal may find the reader gone
    WantedPage wanted;
    std::memcpy(&wanted, static_cast<const char*>(data) + at, sizeof wanted);
    const Item item{fetch.ticket, fetch.attempt, fetch.part, wanted.position, PoolId(wanted.pool), PageIndex(wanted.index)};
    if (!self->chunks_.find(item.pool, item.page).has_value()) {
      self->refuse(*link, item, RefusalCause::kUnknownPage);
    } else if (link->queue.size() >= kQueuedPagesMax) {
      self->refuse(*link, item, RefusalCause::kQueueFull);
    } else {
      link->queue.push_back(item);
      self->count_queued(1);
    }
  }
  return UCS_OK;  // pump() runs on this round's turn
}

ucs_status_t Source::on_cancel(void* argument, const void* header, size_t header_bytes, void*, size_t, const ucp_am_recv_param_t*) {
  Source* self = static_cast<Source*>(argument);
  Link* link = self->hear(header, header_bytes, sizeof(CancelHeader));
  if (link == nullptr) return UCS_OK;
  CancelHeader cancel;
  std::memcpy(&cancel, header, sizeof cancel);
  const size_t gone = std::erase_if(link->queue, [&](const Item& item) {
    return item.ticket == cancel.ticket && item.attempt == cancel.attempt && item.part == cancel.part;
  });
  self->count_queued(-static_cast<int64_t>(gone));
  return UCS_OK;
}

ucs_status_t Source::on_ping(void* argument, const void* header, size_t header_bytes, void*, size_t, const ucp_am_recv_param_t*) {
  Source* self = static_cast<Source*>(argument);
  Link* link = self->hear(header, header_bytes, sizeof(LifeHeader));
  if (link != nullptr) send_control(link->endpoint, kPong, bytes_of(LifeHeader{link->name}), "");
  return UCS_OK;
}

}  // namespace needle::server::ucx
