// The definition of index_logits, and the properties that every twin shares.
//
// What must stay true:
//  1. This file is slow and obvious: one loop a formula, double sums in order of head and dimension.
//  2. check_index_logits looks at host fields only, so that the CUDA twin can call it too.
#include "kernels/index_logits.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/quantise.h"

namespace needle {
namespace {

absl::Status refuse(absl::string_view what, int64_t value, absl::string_view limit) {
  return absl::InvalidArgumentError(absl::StrCat("index_logits: ", what, " is ", value, "; ", limit));
}

bool holds_index_keys(ElementFormat element) {
  return element == ElementFormat::kBf16 || element == ElementFormat::kFp8 || element == ElementFormat::kFp4;
}

struct Rounding {
  bool flush = false;

  // An fp32 number as a flushing variant sees it.
  double number(double value) const {
    return flush && std::fabs(value) < static_cast<double>(std::numeric_limits<float>::min()) ? 0.0 : value;
  }
};

// The numbers of one stored key.
void read_key(const std::byte* part, const LayerView& keys, int slot, Rounding rounding, double* key) {
  const SlotPlace place = slot_place(keys.element, keys.head_dim, keys.slots_per_page, slot);
  for (int d = 0; d < kIndexHeadDim; ++d) {
    if (keys.element == ElementFormat::kBf16) {
      uint16_t bits;
      std::memcpy(&bits, part + place.data + 2 * d, sizeof bits);
      key[d] = rounding.number(float_of_bf16(bits));
    } else if (keys.element == ElementFormat::kFp8) {
      float scale;
      std::memcpy(&scale, part + place.scale, sizeof scale);
      key[d] = static_cast<double>(float_of_e4m3(static_cast<uint8_t>(part[place.data + d]))) * static_cast<double>(scale);
    } else {
      const uint32_t pair = static_cast<uint8_t>(part[place.data + d / 2]);
      const float scale = float_of_ue8m0(static_cast<uint8_t>(part[place.scale + d / 32]));
      key[d] = rounding.number(static_cast<double>(float_of_e2m1(static_cast<uint8_t>(d % 2 == 0 ? pair & 15u : pair >> 4))) *
                               static_cast<double>(scale));
    }
  }
}

// The numbers of head h of query t.
void read_query(const IndexLogitsArgs& args, int64_t t, int h, Rounding rounding, double* query) {
  const int64_t first = (t * args.heads + h) * kIndexHeadDim;
  for (int d = 0; d < kIndexHeadDim; ++d) {
    if (args.q_element == QueryElement::kBf16) {
      query[d] = rounding.number(float_of_bf16(static_cast<const uint16_t*>(args.q)[first + d]));
    } else if (args.q_element == QueryElement::kFp8) {
      query[d] = float_of_e4m3(static_cast<const uint8_t*>(args.q)[first + d]);
    } else {
      const uint32_t pair = static_cast<const uint8_t*>(args.q)[(first + d) / 2];
      const float scale = float_of_ue8m0(args.q_scale[(first + d) / 32]);
      query[d] = rounding.number(static_cast<double>(float_of_e2m1(static_cast<uint8_t>(d % 2 == 0 ? pair & 15u : pair >> 4))) *
                                 static_cast<double>(scale));
    }
  }
}

double relu(double value) { return value < 0.0 ? 0.0 : value; }  // NaN is not below zero and passes

}  // namespace

absl::Status check_index_logits(const IndexLogitsArgs& args) {
  const LayerView& keys = args.keys;
  if (!holds_index_keys(keys.element)) {
    return refuse("the keys' element format", static_cast<int>(keys.element),
                  "index-K is bf16 (0), fp8 (1) or fp4 (2): pass the index-K component's view");
  }
  if (keys.head_dim != kIndexHeadDim) return refuse("head_dim", keys.head_dim, "the one supported is 128");
  if (keys.slots_per_page < 1 || keys.slots_per_page > kSlotsPerPageMax) {
    return refuse("slots_per_page", keys.slots_per_page, absl::StrCat("it must be 1..", kSlotsPerPageMax));
  }
  if (keys.page_count < 0 || keys.page_count > std::numeric_limits<int32_t>::max()) {
    return refuse("page_count", keys.page_count, "it must be 0..2^31-1, as page ids are int32");
  }
  const int64_t part_bytes = layer_page_bytes(keys.element, keys.head_dim, keys.slots_per_page);
  if (keys.page_count > 0) {
    if (keys.base == nullptr) return refuse("keys.base", 0, "a pool with pages needs an address");
    if (reinterpret_cast<uintptr_t>(keys.base) % kPageAlignment != 0) {
      return refuse("keys.base modulo 256", static_cast<int64_t>(reinterpret_cast<uintptr_t>(keys.base) % kPageAlignment),
                    "index-K starts on a multiple of 256 bytes");
    }
    if (keys.page_stride < part_bytes) {
      return refuse("page_stride", keys.page_stride, absl::StrCat("a layer's part of a page takes ", part_bytes, " bytes"));
    }
    if (keys.page_stride % kPageAlignment != 0) {
      return refuse("page_stride", keys.page_stride, "it must be a multiple of 256 bytes: pad the pages");
    }
    if (keys.page_stride > std::numeric_limits<int64_t>::max() / keys.page_count) {
      return refuse("page_stride", keys.page_stride, absl::StrCat("times page_count ", keys.page_count, " it exceeds 63 bits"));
    }
  }
  if (args.q_element != QueryElement::kBf16 && args.q_element != QueryElement::kFp8 && args.q_element != QueryElement::kFp4) {
    return refuse("q_element", static_cast<int>(args.q_element), "it must be bf16 (0), fp8 (1) or fp4 (2)");
  }
  if (args.heads < 1 || args.heads > kIndexHeadsMax) return refuse("heads", args.heads, "it must be 1..128");
  if (args.query_count < 0) return refuse("query_count", args.query_count, "it must not be negative");
  if (args.entry_begin < 0 || args.entry_begin % keys.slots_per_page != 0) {
    return refuse("entry_begin", args.entry_begin,
                  absl::StrCat("a chunk begins at a page: a multiple of slots_per_page ", keys.slots_per_page));
  }
  if (args.entry_count < 0 || args.entry_begin > std::numeric_limits<int32_t>::max() - args.entry_count) {
    return refuse("entry_count", args.entry_count,
                  absl::StrCat("with entry_begin ", args.entry_begin, " it must stay within 0..2^31-1 entries"));
  }
  if (args.score_stride < args.entry_count) {
    return refuse("score_stride", args.score_stride, absl::StrCat("a row of scores takes entry_count ", args.entry_count));
  }
  const PageTableView& pages = args.pages;
  if (pages.rows < 0) return refuse("pages.rows", pages.rows, "it must not be negative");
  if (pages.pages_per_row < 0) return refuse("pages.pages_per_row", pages.pages_per_row, "it must not be negative");
  if (pages.row_stride < pages.pages_per_row) {
    return refuse("pages.row_stride", pages.row_stride, absl::StrCat("a row of the page table takes pages_per_row ", pages.pages_per_row));
  }
  if (args.queries_per_row < 1 || (args.query_row == nullptr && args.queries_per_row > kSpeculativeRowsMax)) {
    return refuse("queries_per_row", args.queries_per_row,
                  absl::StrCat("it must be 1..", kSpeculativeRowsMax, "; longer runs of queries name their rows in query_row"));
  }
  if (args.query_count == 0 || args.entry_count == 0) return absl::OkStatus();  // nothing is read or written
  if (args.query_row == nullptr && static_cast<int64_t>(pages.rows) * args.queries_per_row < static_cast<int64_t>(args.query_count)) {
    return refuse("pages.rows", pages.rows, absl::StrCat(args.query_count, " queries at ", args.queries_per_row, " a row need more rows"));
  }
  if (pages.pages == nullptr && pages.pages_per_row > 0) {
    return refuse("pages.pages", 0, "a page table with columns needs an address");
  }
  if (args.q == nullptr) return refuse("q", 0, "queries need an address");
  if (args.q_element == QueryElement::kFp4 && args.q_scale == nullptr) {
    return refuse("q_scale", 0, "fp4 queries come with head_dim/32 ue8m0 bytes a (query, head)");
  }
  if (args.head_weights == nullptr) return refuse("head_weights", 0, "head weights need an address");
  if (args.visible == nullptr) return refuse("visible", 0, "visible lengths need an address");
  if (args.scores == nullptr) return refuse("scores", 0, "scores need an address");
  return absl::OkStatus();
}

absl::Status index_logits_ref(const IndexLogitsArgs& args, bool flush_denormals) {
  if (absl::Status status = check_index_logits(args); !status.ok()) return status;
  const Rounding rounding{flush_denormals};
  const LayerView& keys = args.keys;
  OpReport found = {};

  for (int64_t t = 0; t < args.query_count; ++t) {
    const int64_t row = args.query_row != nullptr ? args.query_row[t] : t / args.queries_per_row;
    const bool row_exists = row >= 0 && row < args.pages.rows;
    const int64_t end = std::min<int64_t>(args.visible[t], args.entry_begin + args.entry_count);
    double query[kIndexHeadsMax][kIndexHeadDim];
    for (int h = 0; h < args.heads; ++h) read_query(args, t, h, rounding, query[h]);

    for (int64_t s = args.entry_begin; s < end; ++s) {
      float* score = args.scores + t * args.score_stride + (s - args.entry_begin);
      const int64_t column = s / keys.slots_per_page;
      int64_t page = kNoPage;
      if (row_exists && column < args.pages.pages_per_row) {
        page = args.pages.pages[row * args.pages.row_stride + column];
      } else {
        found.status |= kStatusBadPageTable;
      }
      if (page < 0 || page >= keys.page_count) {
        *score = float_of_bits(kAbsentScoreBits);
        found.status |= kStatusAbsentPage;
        ++found.absent_entries;
        continue;
      }

      const std::byte* part = keys.base + page * keys.page_stride;
      double key[kIndexHeadDim];
      read_key(part, keys, static_cast<int>(s % keys.slots_per_page), rounding, key);
      double sum = 0;
      for (int h = 0; h < args.heads; ++h) {
        double dot = 0;
        for (int d = 0; d < kIndexHeadDim; ++d) dot += query[h][d] * key[d];
        sum += static_cast<double>(args.head_weights[t * args.heads + h]) * relu(rounding.number(dot));
      }
      *score = static_cast<float>(rounding.number(sum));
      if (std::isnan(*score)) {
        *score = float_of_bits(kNanScoreBits);
        found.status |= kStatusNanScore;
        ++found.nan_scores;
      }
    }
  }
  if (args.report != nullptr) {
    args.report->status |= found.status;
    args.report->nan_scores += found.nan_scores;
    args.report->absent_entries += found.absent_entries;
  }
  return absl::OkStatus();
}

ScoreVariant score_variant(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable: return ScoreVariant::kCpuPortable;
    case CpuIsa::kAvx2: return ScoreVariant::kCpuAvx2;
    case CpuIsa::kAvx512: return ScoreVariant::kCpuAvx512;
    case CpuIsa::kAvx512Bf16: return ScoreVariant::kCpuAvx512Bf16;
  }
  return ScoreVariant::kReference;
}

// vdpbf16ps takes denormal inputs as zero and flushes denormal results, whatever MXCSR says.
bool flushes_denormals(ScoreVariant variant) { return variant == ScoreVariant::kCpuAvx512Bf16; }

}  // namespace needle
