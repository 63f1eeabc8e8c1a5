// Between the core's structs and needle.v1's messages: field by field, no decision.
//
// What must stay true:
//  1. from(to(x)) == x for every struct that travels both ways.
//  2. Parallel lists of unequal length are refused, and what a number may not be (a pool kind, a code) is refused: nothing
//     from the wire reaches the core unchecked.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/needle.pb.h"
#include "server/messages.h"

namespace needle::server::wire {

constexpr uint64_t pack(PageId page) { return uint64_t{page.generation.value()} << 32 | page.index.value(); }
constexpr PageId unpack(uint64_t wire) { return {PageIndex(static_cast<uint32_t>(wire)), Generation(static_cast<uint32_t>(wire >> 32))}; }

void put(const PageTable& table, v1::PageTable* out);
void put(const TicketView& view, v1::TicketView* out);
void put(const Reserve::Reply& reply, v1::ReserveReply* out);
void put(const Adopt::Reply& reply, v1::AdoptReply* out);
void put(const ResizeProgress& progress, v1::ResizeReply* out);

absl::StatusOr<std::vector<PageName>> names_of(const v1::PageNames& names);
absl::StatusOr<std::vector<FullPageSeal>> seals_of(const v1::PageSeals& seals);

void put(const absl::Status& status, v1::StatusWire* out);
absl::Status status_of(const v1::StatusWire& wire);

// `from` of the message is left to the caller, who knows the peer's name here.
v1::PeerEnvelope envelope_of(const PeerMessage& message, const std::string& from_name);
absl::StatusOr<PeerMessage> message_of(const v1::PeerEnvelope& envelope);

}  // namespace needle::server::wire
