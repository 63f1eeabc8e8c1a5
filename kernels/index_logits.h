// index_logits: the indexer's score of every visible entry, read straight from the pages.
//
//   score[t, s] = sum over heads h of head_weights[t, h] x max(0, q[t, h] . k[s])
//
// (DeepSeek-V3.2 and V4 reference inference, Indexer.forward.) k[s] is the stored key: bf16 as it is, fp8 and fp4 as
// code x scale. Weights may be negative; nothing is normalised.
//
// What must stay true (promises that every twin keeps):
//  1. Only entries s < visible[t] are scored; no byte past them influences anything, and a page that lies wholly past
//     every query's visible length is not touched. scores[t, s] for s >= visible[t] is left as it was.
//  2. ReLU passes NaN on. A NaN score is written as kNanScoreBits and counted; an entry whose page id is -1 or outside
//     the pool is written as kAbsentScoreBits, counted, and sets kStatusAbsentPage. -0 may be written as either zero.
//     A visible entry past the row's pages_per_row, or of a row that the page table lacks, names no page either: it is
//     absent, and kStatusBadPageTable is set too, so that selection never meets a score that nobody wrote.
//  3. A score is bitwise the same within one variant whatever the batch, page order, chunking, thread count, grid or
//     repeat: it depends on q, weights and that key alone. `variant` names (twin, architecture) and travels with the
//     scores; two variants agree within the tolerance, not bit for bit.
//  4. Against float64 on the stored values: relative norm error <= 2e-6; <= 1e-3 where kCudaSm90 multiplies fp8 keys by fp8
//     queries, as its matrix unit keeps about 14 bits of such a sum (bf16 queries over fp8 keys keep the 2e-6). Denormal bf16 inputs and denormal fp32 results may
//     count as zero (flushes_denormals() says which variants do).
//  5. fp8 scales are positive and finite, and ue8m0 bytes of fp4 at most 252, as the store makes them; a key that is not
//     so gets an unspecified score (NaN where its scale is NaN) and harms nothing else.
//  6. Nothing is allocated. Scratch is asked for first and is the caller's.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "kernels/pool_view.h"

namespace needle {

inline constexpr int kIndexHeadsMax = 128;
inline constexpr int kIndexHeadDim = 128;  // the only head dim of this family

enum class QueryElement : uint8_t {
  kBf16 = 0,
  kFp8 = 1,  // e4m3fn; the query's scale is already folded into head_weights
  kFp4 = 2,  // e2m1 pairs, low nibble first; q_scale holds head_dim/32 ue8m0 bytes a (query, head)
};
// Bytes of one (query, head), without its scales.
constexpr int64_t query_vector_bytes(QueryElement element) {
  return element == QueryElement::kBf16 ? 2 * kIndexHeadDim : element == QueryElement::kFp8 ? kIndexHeadDim : kIndexHeadDim / 2;
}

struct IndexLogitsArgs {
  LayerView keys;       // index-K: kBf16, kFp8 or kFp4, head_dim 128
  PageTableView pages;  // row = sequence

  const void* q = nullptr;  // [query_count, heads, 128] of q_element
  QueryElement q_element = QueryElement::kBf16;
  const uint8_t* q_scale = nullptr;     // [query_count, heads, 4] ue8m0, kFp4 only
  const float* head_weights = nullptr;  // [query_count, heads], all factors included
  const int32_t* query_row = nullptr;   // [query_count] page-table row; null: query t belongs to row t / queries_per_row
  int32_t queries_per_row = 1;          // decode: 1..8 query tokens a sequence, in order of position
  const int32_t* visible = nullptr;     // [query_count] entries of its row that the query sees, local
  int32_t query_count = 0;
  int32_t heads = 0;  // 1..128

  // The chunk of local entries to score, so that a caller can bound the score buffer. Entry s goes to column
  // s - entry_begin. entry_begin must be a multiple of slots_per_page.
  int64_t entry_begin = 0;
  int64_t entry_count = 0;

  float* scores = nullptr;     // [query_count, score_stride]
  int64_t score_stride = 0;    // floats, >= entry_count
  OpReport* report = nullptr;  // may be null
};

// INVALID_ARGUMENT naming value and limit, before anything is written. Every twin calls it first. The arrays that
// live on a device (visible, query_row, page ids) are not looked at.
absl::Status check_index_logits(const IndexLogitsArgs& args);

// The definition: double sums in order of head and dimension, one rounding to fp32 at the end.
// `flush_denormals` treats denormal bf16 inputs and denormal results as zero, as some fast variants do.
absl::Status index_logits_ref(const IndexLogitsArgs& args, bool flush_denormals = false);

// Threads are the caller's; scratch is inside the worker's stack.
absl::Status index_logits_cpu(const IndexLogitsArgs& args, CpuIsa isa, Workers& workers);

// Bytes of device scratch that index_logits_cuda wants for these arguments (host fields only are read).
int64_t index_logits_cuda_scratch(const IndexLogitsArgs& args);
// `stream` is a cudaStream_t. All pointers are device pointers. Graph-capturable; see kernels/launch.h.
absl::Status index_logits_cuda(const IndexLogitsArgs& args, void* scratch, int64_t scratch_bytes, void* stream);

// Which variant's bits a twin gives: equal ids promise equal bits for equal inputs.
enum class ScoreVariant : uint32_t {
  kReference = 1,
  kCpuPortable = 2,
  kCpuAvx2 = 3,
  kCpuAvx512 = 4,
  kCpuAvx512Bf16 = 5,
  kCudaSm90 = 16,  // wgmma / mma.sync as tuned for 9.0a
  kCudaSm100 = 17,
  kCudaSm120 = 18,
  kCudaPlain = 19,  // the fall-back without architecture-specific instructions
};
ScoreVariant score_variant(CpuIsa isa);
absl::StatusOr<ScoreVariant> score_variant_cuda();  // of the current device, in this build
bool flushes_denormals(ScoreVariant variant);

}  // namespace needle
