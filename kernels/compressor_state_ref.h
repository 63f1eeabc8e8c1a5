// The definition of a record's bytes, for the references of store and commit.
#pragma once

#include <cstddef>
#include <functional>

#include "absl/status/status.h"
#include "kernels/compressor_state.h"
#include "kernels/store_host.h"

namespace needle {

absl::Status check_state_view(const StateView& state);

// Writes the record that `after` describes: zero everywhere, then the rows that are live. `before` is the header that the
// record has now; `row_of` gives the raw row of any position in [live begin of before, after.next) that is not folded.
void rebuild_record_ref(const StateView& state, std::byte* record, const StateHeader& before, const StateHeader& after,
                        const float* position_bias, const std::function<RawRow(int64_t)>& row_of);

}  // namespace needle
