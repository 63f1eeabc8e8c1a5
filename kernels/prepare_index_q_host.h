// What both host twins of prepare_index_q do alike.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "kernels/prepare_index_q.h"
#include "kernels/store.h"

namespace needle {

// The keys' own chain without a norm, storing in the query's element format.
EntryChain query_chain(const PrepareIndexQArgs& args);
// OUT_OF_RANGE where a position has no row in the RoPE table. Call after check_prepare_index_q.
absl::Status admit_prepare_index_q(const PrepareIndexQArgs& args);
// Where row = token x heads + head of out_q begins.
inline std::byte* query_data(const PrepareIndexQArgs& args, int64_t row) {
  const ElementFormat element = query_chain(args).component.element;
  return static_cast<std::byte*>(args.out_q) + row * slot_data_bytes(element, kIndexHeadDim);
}

}  // namespace needle
