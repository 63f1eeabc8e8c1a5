// The chain norm -> RoPE -> Hadamard -> quantise in doubles, slow and obvious: the definition that store and
// prepare_index_q share. Internal to their references.
//
// What must stay true:
//  1. Doubles between the stage roundings; a rounding goes from the double to the format in one step.
//  2. Stored scales are what the format stores: the codes are those of the stored scale.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/store.h"

namespace needle {

double nearest_bf16(double value);
double nearest_e4m3(double value);  // clamps to +-448
double nearest_e2m1(double value);  // clamps to +-6

double row_value_ref(const RowsView& rows, int64_t row, int64_t column);

// Norm, RoPE and Hadamard of x[head_dim] in place, with the mode's roundings, up to where quantisation begins.
// `after_pool`: x came from pooling and kRefV4 rounds it first.
void finish_entry_ref(const EntryChain& chain, bool after_pool, int64_t position, double* x);

// Quantises x[head_dim] into one slot: every value byte and every scale byte of it.
void quantise_entry_ref(const EntryChain& chain, const double* x, std::byte* data, std::byte* scale);

}  // namespace needle
