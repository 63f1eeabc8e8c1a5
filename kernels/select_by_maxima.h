// Selection that the scores' producer has prepared: beside each 16 neighbouring scores of a row lies the largest of them.
//
// The k-th largest of those maxima is a bound that at least k scores reach, each in a group of its own, so it is never above
// the row's k-th score; and about 1.1 to 1.4 k scores reach it. Only groups whose maximum reaches it are read: a sixteenth
// of the scores and a few kilobytes, in place of the whole row.
//
// What must stay true:
//  1. The answer is select_topk's, bit for bit. Maxima of other numbers than the scores' own would break that.
//  2. NaN and absent entries are not counted here: who made the scores has counted them.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/select_topk.h"

namespace needle {

inline constexpr int kMaximaGroup = 16;           // scores a maximum stands for
inline constexpr int kMaximaTopkMax = 1024;       // the largest k that is selected so
inline constexpr int kMaximaLengthPerK = 32;      // rows shorter than so many k are as soon read whole
inline constexpr int kMaximaLengthMax = 1 << 20;  // a group's number has 16 bits

// orders[row x stride + g]: the largest score_order_bits() of the row's scores [16 g, 16 g + 16) inside its length, 0 where
// none of them is a number; complete up to a multiple of 64 entries. Device memory; each row on a multiple of 16 bytes,
// stride a multiple of 4.
struct GroupMaxima {
  uint32_t* orders = nullptr;
  int64_t stride = 0;
};

// Whether select_by_maxima_cuda is the way for calls of this shape (host-known bounds).
constexpr bool selects_by_maxima(int64_t length_max, int32_t k) {
  return k <= kMaximaTopkMax && length_max >= int64_t{kMaximaLengthPerK} * k && length_max <= kMaximaLengthMax;
}

// As select_topk_cuda, for k <= kMaximaTopkMax; rows of scores on multiples of 64 bytes. No scratch. `fallbacks` counts rows
// that were read whole because more scores reached the bound than there is room for. On the stream it stands right behind
// index_logits_with_maxima_cuda, or behind work that lets nothing start early: it reads lengths and entry_base before it waits.
absl::Status select_by_maxima_cuda(const SelectTopkArgs& args, const GroupMaxima& maxima, void* stream);

}  // namespace needle
