// The full scan behind Audit: recounts every right and every page from the tables that grant them, and compares.
//
// What must stay true: it trusts no counter; a difference is reported with the page and both numbers, and changes nothing.
#pragma once

#include "absl/status/status.h"
#include "server/state.h"

namespace needle::server {

absl::Status audit_state(const State& state);

}  // namespace needle::server
