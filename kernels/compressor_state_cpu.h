// A record's update in place, for the fast twins of store and commit.
#pragma once

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "kernels/entry_chain_cpu.h"
#include "kernels/store_host.h"

namespace needle {

// Brings a record from `before` to `after`: the same bytes as rebuild_record_ref, touching only what changes. `row_of`
// gives the raw row of any position in [before.committed, after.next) that is not in the record's final part yet.
void update_record(const EntryChainCpu& chain, const StateView& state, std::byte* record, const StateHeader& before,
                   const StateHeader& after, const float* position_bias, absl::FunctionRef<RawRow(int64_t)> row_of);

inline PoolRow pool_row(const RawRow& row, const float* bias, int64_t first_column) {
  const auto at = [first_column](const void* data, RowElement element) -> const void* {
    return static_cast<const std::byte*>(data) + first_column * (element == RowElement::kFp32 ? 4 : 2);
  };
  return {at(row.kv, row.kv_element), at(row.gate, row.gate_element), bias + first_column, row.kv_element, row.gate_element};
}

}  // namespace needle
