// The arithmetic of the entry chain on a CPU, one row at a time, for each instruction set. Internal to the fast twins of
// store, prepare_index_q and the compressor state.
//
// What must stay true:
//  1. Every set gives the same bits (kernels/lanes.h, promise 1).
//  2. Rows and buffers need no alignment beyond their element's; head_dim is a multiple of 64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu_isa.h"
#include "kernels/store.h"

namespace needle {

// A raw row's half as pooling reads it: column 0 of the half.
struct PoolRow {
  const void* kv = nullptr;
  const void* gate = nullptr;
  const float* bias = nullptr;
  RowElement kv_element = RowElement::kFp32;
  RowElement gate_element = RowElement::kFp32;
};

struct EntryChainCpu {
  // x[channels] = rows in fp32.
  void (*widen)(const void* row, RowElement element, int channels, float* x);
  // Folds rows, in order, into partial = [maximum | sum | weighted], `channels` each.
  void (*fold_rows)(const PoolRow* rows, int count, int channels, float* partial);
  // The same from `carried` (null: from nothing) straight to pooled values.
  void (*pool_rows)(const PoolRow* rows, int count, int channels, const float* carried, float* x);
  // Norm, RoPE, Hadamard in place, with the mode's roundings, up to where quantisation begins.
  void (*finish)(const EntryChain& chain, bool after_pool, int64_t position, float* x);
  // One slot. May round x to bf16 in place where the mode does.
  void (*quantise)(const EntryChain& chain, float* x, std::byte* data, std::byte* scale);
};

// The set that `isa` names; one that this build has no code for is a bug of the caller (cpu_has() says).
const EntryChainCpu& entry_chain_cpu(CpuIsa isa);

}  // namespace needle
