#include "server/wire_convert.h"

#include "absl/strings/str_cat.h"
#include "proto/errors.h"

namespace needle::server::wire {

namespace {

template <class Field>
void put_pages(const std::vector<PageId>& pages, Field* out) {
  out->Reserve(static_cast<int>(pages.size()));
  for (PageId page : pages) out->Add(pack(page));
}

void put_pages(const std::vector<ShippedPage>& pages, v1::ShippedPages* out) {
  for (const ShippedPage& page : pages) {
    out->add_pool(page.page.pool.value());
    out->add_page(pack(page.page.page));
    out->add_name_high(page.name.high);
    out->add_name_low(page.name.low);
    out->add_tokens_end(page.tokens_end);
    out->add_checksum(page.checksum);
  }
}

absl::StatusOr<std::vector<ShippedPage>> shipped_of(const v1::ShippedPages& wire) {
  const int count = wire.pool_size();
  if (wire.page_size() != count || wire.name_high_size() != count || wire.name_low_size() != count || wire.tokens_end_size() != count ||
      wire.checksum_size() != count) {
    return make_error(ErrorCode::kInvalid, "shipped pages: parallel lists differ in length");
  }
  std::vector<ShippedPage> pages(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    pages[static_cast<size_t>(i)] = {
        {PoolId(wire.pool(i)), unpack(wire.page(i))}, {wire.name_high(i), wire.name_low(i)}, wire.tokens_end(i), wire.checksum(i)};
  }
  return pages;
}

}  // namespace

void put(const PageTable& table, v1::PageTable* out) {
  out->set_tokens(table.tokens);
  put_pages(table.paged, out->mutable_paged());
  put_pages(table.window, out->mutable_window());
  out->set_state(pack(table.state));
}

void put(const TicketView& view, v1::TicketView* out) {
  out->set_ticket(view.ticket.value());
  out->set_tokens_reserved(view.tokens_reserved);
  out->set_tokens_published(view.tokens_published);
  out->set_pages_sealed(view.pages_sealed);
  put_pages(view.paged, out->mutable_paged());
  out->set_pages_shared(view.pages_shared);
  put_pages(view.window, out->mutable_window());
  out->set_state(pack(view.state));
}

void put(const Reserve::Reply& reply, v1::ReserveReply* out) {
  put(reply.view, out->mutable_view());
  out->set_matched_tokens(reply.matched_tokens);
  out->set_resume_tokens(reply.resume_tokens);
  put_pages(reply.resume_window, out->mutable_resume_window());
  out->set_resume_state(pack(reply.resume_state));
  for (const ResumeSlot& slot : reply.resume_slots) {
    v1::ResumeSlot* wire = out->add_resume_slots();
    wire->set_tokens(slot.tokens);
    put_pages(slot.window, wire->mutable_window());
    wire->set_state(pack(slot.state));
  }
}

void put(const Adopt::Reply& reply, v1::AdoptReply* out) {
  put(reply.view, out->mutable_view());
  for (const Adopt::Copy& copy : reply.copies) {
    v1::PageCopy* wire = out->add_copies();
    wire->set_pool_from(copy.from.pool.value());
    wire->set_page_from(pack(copy.from.page));
    wire->set_pool_to(copy.to.pool.value());
    wire->set_page_to(pack(copy.to.page));
  }
  out->set_lease_consumed(reply.lease_consumed);
}

void put(const ResizeProgress& progress, v1::ResizeReply* out) {
  out->set_answer(progress.answer == ResizeAnswer::kApplied ? "APPLIED" : "DEFERRED");
  out->set_revision(progress.revision);
  out->set_chunks_to_grow(progress.chunks_to_grow);
  out->set_chunks_to_shrink(progress.chunks_to_shrink);
  out->set_pages_in_use(progress.pages_in_use);
  for (const ResizeProgress::Holder& holder : progress.holders) {
    v1::ResizeHolder* wire = out->add_holders();
    wire->set_session(holder.session.value());
    wire->set_pinned_bytes(holder.pinned_bytes);
  }
}

absl::StatusOr<std::vector<PageName>> names_of(const v1::PageNames& names) {
  if (names.high_size() != names.low_size()) return make_error(ErrorCode::kInvalid, "page names: `high` and `low` differ in length");
  std::vector<PageName> out(static_cast<size_t>(names.high_size()));
  for (int i = 0; i < names.high_size(); ++i) out[static_cast<size_t>(i)] = {names.high(i), names.low(i)};
  return out;
}

absl::StatusOr<std::vector<FullPageSeal>> seals_of(const v1::PageSeals& seals) {
  if (seals.name_high_size() != seals.name_low_size() || seals.name_high_size() != seals.checksum_size()) {
    return make_error(ErrorCode::kInvalid, "page seals: `name_high`, `name_low` and `checksum` differ in length");
  }
  std::vector<FullPageSeal> out(static_cast<size_t>(seals.checksum_size()));
  for (int i = 0; i < seals.checksum_size(); ++i)
    out[static_cast<size_t>(i)] = {{seals.name_high(i), seals.name_low(i)}, seals.checksum(i)};
  return out;
}

void put(const absl::Status& status, v1::StatusWire* out) {
  out->set_code(static_cast<int>(status.code()));
  const std::optional<ErrorCode> code = error_code(status);
  if (code.has_value()) {
    out->set_error(error_row(*code).name);
    const std::string full(status.message());
    out->set_message(std::string(message_without_name(*code, full)));
  }
  out->set_retry_after_ms(retry_after_ms(status));
}

absl::Status status_of(const v1::StatusWire& wire) {
  if (wire.code() == 0) return absl::OkStatus();
  if (const std::optional<ErrorCode> code = error_of_name(wire.error()))
    return error_from_wire(*code, wire.message(), wire.retry_after_ms());
  return make_error(ErrorCode::kBug, absl::StrCat("the peer answered code ", wire.code(), " with the unknown error '",
                                                  wire.error().substr(0, 40), "': ", wire.message()));
}

v1::PeerEnvelope envelope_of(const PeerMessage& message, const std::string& from_name) {
  v1::PeerEnvelope envelope;
  envelope.set_from(from_name);
  envelope.set_from_incarnation(message.from_incarnation.value());
  envelope.set_to_incarnation(message.to_incarnation.value());
  if (const auto* ask = std::get_if<ShipAsk>(&message.body)) {
    v1::ShipAsk* wire = envelope.mutable_ask();
    wire->set_ticket(ask->ticket.value());
    wire->set_attempt(ask->attempt);
    wire->set_sequence(ask->sequence.value());
    wire->set_pool_set(ask->pool_set);
    wire->set_format(ask->format);
    wire->set_pages_known(ask->pages_known);
  } else if (const auto* offer = std::get_if<ShipOffer>(&message.body)) {
    v1::ShipOffer* wire = envelope.mutable_offer();
    wire->set_ticket(offer->ticket.value());
    wire->set_attempt(offer->attempt);
    put(offer->status, wire->mutable_status());
    wire->set_lease(offer->lease.value());
    wire->set_first_page(offer->first_page);
    put_pages(offer->pages, wire->mutable_pages());
    wire->set_complete(offer->complete);
    wire->set_tokens(offer->tokens);
    put_pages(offer->partial, wire->mutable_partial());
    put_pages(offer->window, wire->mutable_window());
    if (!offer->state.page.page.index.is_none()) put_pages(std::vector<ShippedPage>{offer->state}, wire->mutable_state());
    for (const ChunkDescriptor& chunk : offer->chunks) {
      v1::ChunkDescriptor* descriptor = wire->add_chunks();
      descriptor->set_pool(chunk.pool.value());
      descriptor->set_chunk(chunk.chunk.value());
      descriptor->set_registration(chunk.descriptor);
    }
  } else if (const auto* confirm = std::get_if<ShipConfirm>(&message.body)) {
    v1::ShipConfirm* wire = envelope.mutable_confirm();
    wire->set_ticket(confirm->ticket.value());
    wire->set_attempt(confirm->attempt);
    wire->set_lease(confirm->lease.value());
  } else if (const auto* confirmed = std::get_if<ShipConfirmed>(&message.body)) {
    v1::ShipConfirmed* wire = envelope.mutable_confirmed();
    wire->set_ticket(confirmed->ticket.value());
    wire->set_attempt(confirmed->attempt);
    wire->set_lease(confirmed->lease.value());
    put(confirmed->status, wire->mutable_status());
  } else if (const auto* release = std::get_if<ShipRelease>(&message.body)) {
    v1::ShipConfirm* wire = envelope.mutable_release();
    wire->set_ticket(release->ticket.value());
    wire->set_attempt(release->attempt);
    wire->set_lease(release->lease.value());
  }
  return envelope;
}

absl::StatusOr<PeerMessage> message_of(const v1::PeerEnvelope& envelope) {
  PeerMessage message;
  message.from_incarnation = Incarnation(envelope.from_incarnation());
  message.to_incarnation = Incarnation(envelope.to_incarnation());
  switch (envelope.body_case()) {
    case v1::PeerEnvelope::kAsk: {
      const v1::ShipAsk& wire = envelope.ask();
      message.body =
          ShipAsk{TicketId(wire.ticket()), wire.attempt(), SequenceId(wire.sequence()), wire.pool_set(), wire.format(), wire.pages_known()};
      return message;
    }
    case v1::PeerEnvelope::kOffer: {
      const v1::ShipOffer& wire = envelope.offer();
      ShipOffer offer;
      offer.ticket = TicketId(wire.ticket());
      offer.attempt = wire.attempt();
      offer.status = status_of(wire.status());
      offer.lease = LeaseId(wire.lease());
      offer.first_page = wire.first_page();
      offer.complete = wire.complete();
      offer.tokens = wire.tokens();
      absl::StatusOr<std::vector<ShippedPage>> lists[] = {shipped_of(wire.pages()), shipped_of(wire.partial()), shipped_of(wire.window()),
                                                          shipped_of(wire.state())};
      for (const auto& list : lists) {
        if (!list.ok()) return list.status();
      }
      if (lists[1]->size() > 1 || lists[3]->size() > 1)
        return make_error(ErrorCode::kInvalid, "an offer has at most one partial page and one state page");
      offer.pages = *std::move(lists[0]);
      offer.partial = *std::move(lists[1]);
      offer.window = *std::move(lists[2]);
      if (!lists[3]->empty()) offer.state = lists[3]->front();
      for (const v1::ChunkDescriptor& chunk : wire.chunks()) {
        if (static_cast<int64_t>(chunk.registration().size()) > kDescriptorBytesMax) {
          return make_error(ErrorCode::kInvalid, absl::StrCat("a chunk's registration of ", chunk.registration().size(),
                                                              " bytes; the limit is ", kDescriptorBytesMax));
        }
        offer.chunks.push_back({PoolId(chunk.pool()), ChunkIndex(chunk.chunk()), chunk.registration()});
      }
      message.body = std::move(offer);
      return message;
    }
    case v1::PeerEnvelope::kConfirm:
      message.body = ShipConfirm{TicketId(envelope.confirm().ticket()), envelope.confirm().attempt(), LeaseId(envelope.confirm().lease())};
      return message;
    case v1::PeerEnvelope::kConfirmed:
      message.body = ShipConfirmed{TicketId(envelope.confirmed().ticket()), envelope.confirmed().attempt(),
                                   LeaseId(envelope.confirmed().lease()), status_of(envelope.confirmed().status())};
      return message;
    case v1::PeerEnvelope::kRelease:
      message.body = ShipRelease{TicketId(envelope.release().ticket()), envelope.release().attempt(), LeaseId(envelope.release().lease())};
      return message;
    case v1::PeerEnvelope::BODY_NOT_SET: break;
  }
  return make_error(ErrorCode::kInvalid, "a peer's message without a body, or of a kind that this build does not know");
}

}  // namespace needle::server::wire
