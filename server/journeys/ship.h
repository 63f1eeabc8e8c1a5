// The ship journey, both ends: start -> ask -> fetch -> confirm -> seal | fail.
//
// What must stay true:
//  1. The reader drives and alone decides that a ship is complete. The source only leases; its lease ends by release or time.
//  2. Nothing of a ship is readable before every page of every pool has arrived with the offered checksum and the source
//     has confirmed, after the last byte, that its lease never broke. Then all of it is published as one sequence.
//  3. A posted part owns its target pages until its completion. An abandoned attempt's pages drain, pinned by their parts,
//     and a later attempt gets other pages; what comes late is told by (ticket, attempt) and changes nothing.
//  4. Every ship ends: by success, by a terminal answer of the source, by too many attempts, by the source's silence, or by its deadline.
#pragma once

#include "absl/status/statusor.h"
#include "server/state.h"

namespace needle::server::ship {

absl::StatusOr<Nothing> start(State& state, const ShipStart& request);
absl::StatusOr<ShipProgress::Reply> progress(State& state, const ShipProgress& request);
void wait(State& state, Call<ShipWait> call);
absl::StatusOr<Nothing> cancel(State& state, const ShipCancel& request);

void peer_message(State& state, const PeerMessage& message);
void fetched(State& state, const FetchCompletion& completion);

void forgive(State& state, int64_t absent_ns);  // time in which this daemon did not run: no source was silent, no part overdue
void expire(State& state);                      // deadlines, retries, overdue parts
int64_t next_deadline_ns(const State& state);

void fail(State& state, TicketId wire, const absl::Status& cause);

}  // namespace needle::server::ship
