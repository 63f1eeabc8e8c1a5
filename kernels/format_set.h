// The formats of a pool set (paged, window, state) as one text: what attach, ship and Hello compare.
//
// What must stay true:
//  1. The text is the canonical texts of the formats that exist, in the order paged, window, state; it is equal exactly
//     when they all are. A model without window or state pool has no section for it.
//  2. parse(text(f)) == f and text(parse(t)) == t; anything else is refused with the section and the reason.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/page_format.h"

namespace needle {

std::string format_set_text(const ModelFormats& formats);
absl::StatusOr<ModelFormats> parse_format_set(absl::string_view text);
uint64_t format_set_fingerprint(absl::string_view text);  // XXH3-64

// OK where equal; else FAILED_PRECONDITION with the first differing line and both texts.
absl::Status check_same_format_set(absl::string_view ours, absl::string_view theirs);

}  // namespace needle
