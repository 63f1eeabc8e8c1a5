// The plan of read_topk, the arguments of its chunks, and the composition on the CPU.
#include "kernels/read_topk.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/op_report.h"
#include "kernels/read_topk_plan.h"

namespace needle {
namespace {

constexpr int64_t kPartAlignment = 64;

absl::Status refuse(absl::string_view field, int64_t value, absl::string_view limit) {
  return absl::InvalidArgumentError(absl::StrCat("read_topk: ", field, " is ", value, ", must be ", limit));
}

int64_t row_element_bytes(RowElement element) { return element == RowElement::kBf16 ? 2 : 4; }

constexpr int64_t kQueryScaleBytes = kIndexHeadDim / 32;

int64_t entries_of(const ReadTopkArgs& args) {
  const int64_t held = static_cast<int64_t>(args.logits.pages.pages_per_row) * args.logits.keys.slots_per_page;
  return args.entries_max > 0 ? std::min(args.entries_max, held) : held;
}

// Query tokens that a chunk must hold whole numbers of, so that a chunk begins at a page-table row.
int32_t queries_together(const ReadTopkArgs& args) { return args.logits.query_row != nullptr ? 1 : args.logits.queries_per_row; }

SelectTopkArgs select_shape(const ReadTopkArgs& args) {
  SelectTopkArgs select;
  select.k = args.k;
  return select;
}

ReadTopkNeeds cpu_needs(const ReadTopkArgs& args, int width) {
  ReadTopkNeeds needs;
  needs.alignment = kPartAlignment;
  needs.select_bytes = select_topk_cpu_scratch(select_shape(args), width);
  needs.remedy = "raise it, lower entries_max or take fewer workers";
  return needs;
}

}  // namespace

ReadTopkPlan read_topk_layout(const ReadTopkArgs& args, const ReadTopkNeeds& needs, int32_t queries) {
  ReadTopkPlan plan;
  plan.queries_a_chunk = queries;
  plan.entries = entries_of(args);
  plan.score_stride = round_up(std::max<int64_t>(plan.entries, 1), needs.alignment / 4);
  int64_t at = round_up(queries * plan.score_stride * 4, needs.alignment);
  const int64_t vectors = static_cast<int64_t>(queries) * args.logits.heads;
  const bool prepares = args.prepare != nullptr;
  plan.q_offset = at;
  at += prepares ? round_up(vectors * query_vector_bytes(args.prepare->element), needs.alignment) : 0;
  plan.q_scale_offset = at;
  at += prepares && args.prepare->element == QueryElement::kFp4 ? round_up(vectors * kQueryScaleBytes, needs.alignment) : 0;
  plan.weights_offset = at;
  at += prepares ? round_up(vectors * 4, needs.alignment) : 0;
  plan.maxima_offset = at;
  if (needs.maxima_group > 0) {
    plan.maxima_stride = round_up(div_ceil(plan.entries, needs.maxima_group), needs.alignment / 4);
    at += queries * plan.maxima_stride * 4;
  }
  plan.select_offset = at;
  plan.select_bytes = needs.select_bytes;
  plan.scratch_bytes = at + plan.select_bytes;
  return plan;
}

absl::StatusOr<ReadTopkPlan> plan_read_topk_within(const ReadTopkArgs& args, const ReadTopkNeeds& needs, int64_t budget_bytes) {
  const int32_t together = queries_together(args);
  const ReadTopkPlan least = read_topk_layout(args, needs, together);
  if (least.scratch_bytes > budget_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("read_topk: budget is ", budget_bytes, " bytes, must be >= ", least.scratch_bytes,
                                                   " for ", together, " query tokens of ", least.entries, " entries, k ", args.k, "; ",
                                                   needs.remedy));
  }
  // Parts are rounded up, so the bytes of n groups are at most n times those of one: divide, then use what is left.
  const int64_t groups_all = std::max<int64_t>(1, div_ceil(args.logits.query_count, together));
  const int64_t a_group = least.scratch_bytes - least.select_bytes;
  int64_t groups = std::min(groups_all, (budget_bytes - least.select_bytes) / a_group);
  if (needs.queries_max > 0) {
    groups = std::min<int64_t>(groups, std::max(1, needs.queries_max / together));
    groups = div_ceil(groups_all, div_ceil(groups_all, groups));  // as many chunks, of one size
  }
  return read_topk_layout(args, needs, static_cast<int32_t>(groups * together));
}

absl::Status admit_read_topk_plan(const char* operation, const ReadTopkArgs& args, const ReadTopkPlan& plan, const ReadTopkPlan& needed,
                                  const void* scratch, int64_t scratch_bytes, int64_t alignment) {
  if (plan.queries_a_chunk < 1 || plan.queries_a_chunk % queries_together(args) != 0 || plan.entries != entries_of(args)) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": the plan was made for other arguments; plan again"));
  }
  if (scratch == nullptr || scratch_bytes < needed.scratch_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": scratch_bytes is ", scratch == nullptr ? 0 : scratch_bytes,
                                                   ", must be >= ", needed.scratch_bytes, " for this plan"));
  }
  if (reinterpret_cast<uintptr_t>(scratch) % static_cast<uintptr_t>(alignment) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": scratch must be ", alignment, "-byte aligned"));
  }
  return absl::OkStatus();
}

absl::Status check_read_topk(const ReadTopkArgs& args) {
  const IndexLogitsArgs& logits = args.logits;
  if (logits.query_count < 0) return refuse("query_count", logits.query_count, ">= 0");
  if (logits.heads < 1 || logits.heads > kIndexHeadsMax) {
    return refuse("heads", logits.heads, absl::StrCat("1..", kIndexHeadsMax));
  }
  if (logits.queries_per_row < 1) return refuse("queries_per_row", logits.queries_per_row, ">= 1");
  if (args.k < 1 || args.k > kTopkMax) return refuse("k", args.k, absl::StrCat("1..", kTopkMax));
  if (args.entries_max < 0) return refuse("entries_max", args.entries_max, ">= 0, 0 for the page table's row");
  if (entries_of(args) > std::numeric_limits<int32_t>::max()) {
    return refuse("entries_max", entries_of(args), "below 2^31, so that positions fit 32 bits");
  }
  if (logits.keys.slots_per_page < 1) return refuse("keys.slots_per_page", logits.keys.slots_per_page, ">= 1");
  if (args.prepare != nullptr && args.prepare->tokens != logits.query_count) {
    return refuse("prepare->tokens", args.prepare->tokens, absl::StrCat("query_count = ", logits.query_count));
  }
  if (args.prepare != nullptr && args.prepare->heads != logits.heads) {
    return refuse("prepare->heads", args.prepare->heads, absl::StrCat("heads = ", logits.heads));
  }
  return absl::OkStatus();
}

absl::StatusOr<ReadTopkPlan> plan_read_topk_cpu(const ReadTopkArgs& args, int width, int64_t budget_bytes) {
  absl::Status status = check_read_topk(args);
  if (!status.ok()) return status;
  if (width < 1) return refuse("width", width, ">= 1");

  return plan_read_topk_within(args, cpu_needs(args, width), budget_bytes);
}

ReadTopkChunk read_topk_chunk(const ReadTopkArgs& args, const ReadTopkPlan& plan, int32_t begin, int32_t count, void* scratch) {
  std::byte* parts = static_cast<std::byte*>(scratch);
  ReadTopkChunk chunk;

  IndexLogitsArgs& logits = chunk.logits;
  logits = args.logits;
  logits.query_count = count;
  logits.visible += begin;
  logits.entry_begin = 0;
  logits.entry_count = plan.entries;
  logits.scores = reinterpret_cast<float*>(parts);
  logits.score_stride = plan.score_stride;
  logits.report = args.report;
  if (logits.query_row != nullptr) {
    logits.query_row += begin;
  } else {
    const int64_t first_row = begin / logits.queries_per_row;
    if (logits.pages.pages != nullptr) logits.pages.pages += first_row * logits.pages.row_stride;
    if (logits.pages.entry_base != nullptr) logits.pages.entry_base += first_row;
    logits.pages.rows -= static_cast<int32_t>(first_row);
  }

  if (args.prepare != nullptr) {
    PrepareIndexQArgs& prepare = chunk.prepare;
    prepare = *args.prepare;
    const auto rows_from = [begin](RowsView rows) {
      rows.data = static_cast<const std::byte*>(rows.data) + begin * rows.row_stride * row_element_bytes(rows.element);
      return rows;
    };
    prepare.q = rows_from(prepare.q);
    prepare.raw_weights = rows_from(prepare.raw_weights);
    if (prepare.positions != nullptr) prepare.positions += begin;
    prepare.tokens = count;
    prepare.out_q = parts + plan.q_offset;
    prepare.out_q_scale = prepare.element == QueryElement::kFp4 ? reinterpret_cast<uint8_t*>(parts + plan.q_scale_offset) : nullptr;
    prepare.out_weights = reinterpret_cast<float*>(parts + plan.weights_offset);
    prepare.report = args.report;
    logits.q = prepare.out_q;
    logits.q_element = prepare.element;
    logits.q_scale = prepare.out_q_scale;
    logits.head_weights = prepare.out_weights;
  } else {
    const int64_t vectors = static_cast<int64_t>(begin) * logits.heads;
    logits.q = static_cast<const std::byte*>(logits.q) + vectors * query_vector_bytes(logits.q_element);
    if (logits.q_scale != nullptr) logits.q_scale += vectors * kQueryScaleBytes;
    logits.head_weights += vectors;
  }

  SelectTopkArgs& select = chunk.select;
  select.scores = logits.scores;
  select.score_stride = plan.score_stride;
  select.lengths = logits.visible;
  select.rows = count;
  select.length_max = static_cast<int32_t>(plan.entries);
  select.k = args.k;
  select.order = args.order;
  select.pages = logits.pages;
  select.row_of = logits.query_row;
  select.rows_per_table_row = logits.queries_per_row;
  select.slots_per_page = logits.keys.slots_per_page;
  select.page_count = logits.keys.page_count;
  const int64_t out = begin * args.out_stride;
  select.positions = args.positions + out;
  select.slots = args.slots != nullptr ? args.slots + out : nullptr;
  select.out_scores = args.out_scores != nullptr ? args.out_scores + out : nullptr;
  select.counts = args.counts + begin;
  select.out_stride = args.out_stride;
  return chunk;
}

absl::Status read_topk_cpu(const ReadTopkArgs& args, const ReadTopkPlan& plan, CpuIsa isa, Workers& workers, void* scratch,
                           int64_t scratch_bytes) {
  absl::Status status = check_read_topk(args);
  if (!status.ok()) return status;
  const ReadTopkPlan needed = read_topk_layout(args, cpu_needs(args, workers.width()), std::max(plan.queries_a_chunk, 1));
  status = admit_read_topk_plan("read_topk_cpu", args, plan, needed, scratch, scratch_bytes, kPartAlignment);
  if (!status.ok()) return status;

  for (int32_t begin = 0; begin < args.logits.query_count; begin += needed.queries_a_chunk) {
    const int32_t count = std::min(needed.queries_a_chunk, args.logits.query_count - begin);
    ReadTopkChunk chunk = read_topk_chunk(args, needed, begin, count, scratch);
    OpReport selected{};
    chunk.select.report = &selected;
    // Refusals come before the first write, but for a later chunk's: the arguments differ in pointers alone.
    status = check_select_topk(chunk.select);
    if (!status.ok()) return status;
    if (args.prepare != nullptr) {
      status = prepare_index_q_cpu(chunk.prepare, isa, workers);
      if (!status.ok()) return status;
    }
    status = index_logits_cpu(chunk.logits, isa, workers);
    if (!status.ok()) return status;
    status = select_topk_cpu(chunk.select, isa, workers, static_cast<std::byte*>(scratch) + needed.select_offset, needed.select_bytes);
    if (!status.ok()) return status;
    selected.nan_scores = 0;
    selected.absent_entries = 0;
    add_to_report(args.report, selected);
  }
  return absl::OkStatus();
}

}  // namespace needle
