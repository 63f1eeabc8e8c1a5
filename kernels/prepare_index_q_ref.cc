#include <array>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/entry_chain_ref.h"
#include "kernels/prepare_index_q.h"
#include "kernels/prepare_index_q_host.h"

namespace needle {
namespace {

absl::Status refuse(absl::string_view what) { return absl::InvalidArgumentError(absl::StrCat("prepare_index_q: ", what)); }

}  // namespace

float index_weight_factor(int32_t heads) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(kIndexHeadDim) * heads)); }

EntryChain query_chain(const PrepareIndexQArgs& args) {
  EntryChain chain;
  chain.component = args.component;
  chain.norm = NormKind::kNone;
  chain.rounding = args.rounding;
  chain.rope = args.rope;
  chain.component.scale = args.scale;
  switch (args.element) {
    case QueryElement::kBf16: chain.component.element = ElementFormat::kBf16; break;
    case QueryElement::kFp8: chain.component.element = ElementFormat::kFp8; break;
    case QueryElement::kFp4: chain.component.element = ElementFormat::kFp4; break;
  }
  return chain;
}

absl::Status admit_prepare_index_q(const PrepareIndexQArgs& args) {
  if (args.component.rope == RopeStyle::kNone) return absl::OkStatus();
  for (int64_t token = 0; token < args.tokens; ++token) {
    if (args.positions[token] < 0 || args.positions[token] >= args.rope.positions) {
      return absl::OutOfRangeError(absl::StrCat("prepare_index_q: position ", args.positions[token], " of token ", token,
                                                " is outside the RoPE table's 0..", args.rope.positions - 1,
                                                "; build a longer table. Nothing was written"));
    }
  }
  return absl::OkStatus();
}

absl::Status check_prepare_index_q(const PrepareIndexQArgs& args) {
  if (args.report == nullptr) return refuse("the report is null");
  if (args.component.kind != ComponentKind::kIndexK || args.component.head_dim != kIndexHeadDim) {
    return refuse(absl::StrCat("the component is ", name_of(args.component.kind), " with head_dim ", args.component.head_dim,
                               ", must be index_k with 128"));
  }
  if (args.heads < 1 || args.heads > kIndexHeadsMax) {
    return refuse(absl::StrCat("heads is ", args.heads, ", must be 1..", kIndexHeadsMax));
  }
  if (args.tokens < 0) return refuse(absl::StrCat("tokens is ", args.tokens));
  bool scale_fits = false;
  switch (args.element) {
    case QueryElement::kBf16: scale_fits = args.scale == ScaleKind::kNone; break;
    case QueryElement::kFp8:
      scale_fits = args.rounding == RoundingMode::kVllm ? args.scale == ScaleKind::kPowerOfTwo : args.scale != ScaleKind::kNone;
      break;
    case QueryElement::kFp4: scale_fits = args.scale == ScaleKind::kPowerOfTwo; break;
  }
  if (!scale_fits) {
    return refuse(absl::StrCat("query element ", static_cast<int>(args.element), " with scale ", name_of(args.scale),
                               "; bf16 has none, fp4 power_of_two, fp8 any (rounding mode vllm: power_of_two)"));
  }
  if (args.rounding != RoundingMode::kOnce && args.rounding != RoundingMode::kRefV4 && args.rounding != RoundingMode::kVllm) {
    return refuse(absl::StrCat("rounding mode ", static_cast<int>(args.rounding), " is none of 0..2"));
  }
  if (args.tokens == 0) return absl::OkStatus();
  if (args.q.data == nullptr || args.q.row_stride < int64_t{args.heads} * kIndexHeadDim) {
    return refuse(absl::StrCat("q is ", args.q.data == nullptr ? "null" : "given", " with row stride ", args.q.row_stride, ", a row has ",
                               int64_t{args.heads} * kIndexHeadDim));
  }
  if (args.raw_weights.data == nullptr || args.raw_weights.row_stride < args.heads) {
    return refuse(absl::StrCat("raw_weights is ", args.raw_weights.data == nullptr ? "null" : "given", " with row stride ",
                               args.raw_weights.row_stride, ", a row has ", args.heads));
  }
  if (args.out_q == nullptr || args.out_weights == nullptr) return refuse("an output is null");
  if (args.element == QueryElement::kFp4 && args.out_q_scale == nullptr) return refuse("out_q_scale is null for fp4");
  if (args.component.rope != RopeStyle::kNone) {
    if (args.positions == nullptr) return refuse("positions are null");
    if (args.rope.cos_sin == nullptr || args.rope.positions < 1) return refuse("the RoPE table is empty");
  }
  return absl::OkStatus();
}

absl::Status prepare_index_q_ref(const PrepareIndexQArgs& args) {
  if (absl::Status status = check_prepare_index_q(args); !status.ok()) return status;
  if (absl::Status status = admit_prepare_index_q(args); !status.ok()) return status;
  const EntryChain chain = query_chain(args);
  for (int64_t token = 0; token < args.tokens; ++token) {
    for (int head = 0; head < args.heads; ++head) {
      std::array<double, kIndexHeadDim> x = {};
      for (int c = 0; c < kIndexHeadDim; ++c) {
        x[static_cast<size_t>(c)] = row_value_ref(args.q, token, int64_t{head} * kIndexHeadDim + c);
      }
      finish_entry_ref(chain, true, args.positions == nullptr ? 0 : args.positions[token], x.data());
      const int64_t row = token * args.heads + head;
      std::array<std::byte, 4> scale = {};
      quantise_entry_ref(chain, x.data(), query_data(args, row), scale.data());
      double weight = row_value_ref(args.raw_weights, token, head) / std::sqrt(static_cast<double>(kIndexHeadDim) * args.heads);
      if (args.element == QueryElement::kFp8) {
        float of_head;
        std::memcpy(&of_head, scale.data(), 4);
        weight *= static_cast<double>(of_head);
      }
      if (args.element == QueryElement::kFp4) std::memcpy(args.out_q_scale + 4 * row, scale.data(), 4);
      args.out_weights[row] = static_cast<float>(weight);
    }
  }
  return absl::OkStatus();
}

}  // namespace needle
