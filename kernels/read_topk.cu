// read_topk on the GPU: prepare_index_q (where asked for), index_logits and select_topk, chunk after chunk on the caller's
// stream.
//
// What must stay true:
//  1. A chunk's scores are read before the next chunk's are written: one stream, no events.
//  2. Where logits can leave maxima for selection and rows are long enough for them, they do: decided by host fields, so
//     that a captured graph keeps it.
//  3. Absent entries and NaN are counted by the logits alone. Selection by maxima counts neither and reports to the caller;
//     the other reports into the scratch, and of that only status and fallbacks enter the caller's report. Where the caller
//     has none, nothing is launched for it.
#include "kernels/read_topk.h"

#include <algorithm>
#include <limits>

#include "kernels/device_report.cuh"
#include "kernels/index_logits_cuda.h"
#include "kernels/launch.cuh"
#include "kernels/read_topk_plan.h"
#include "kernels/select_by_maxima.h"

namespace needle {
namespace {

constexpr int64_t kPartAlignment = 256;
constexpr int64_t kReportBytes = 256;  // an OpReport, behind the selection's own scratch

// Query tokens a page-table row up to which a batch counts as decode: its logits wait for memory, so that cutting it costs
// more than scores that leave L2 (a launch is 5 us, 33 MB of scores 8 us of which most are hidden).
constexpr int kDecodeQueriesMax = 8;
constexpr int kPrefillQueriesMin = 1024;

absl::StatusOr<ReadTopkNeeds> cuda_needs(const ReadTopkArgs& args) {
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) return facts.status();
  ReadTopkNeeds needs;
  needs.alignment = kPartAlignment;
  SelectTopkArgs select;
  select.k = args.k;
  select.order = args.order;
  select.rows = args.logits.query_count;
  needs.select_bytes = round_up(select_topk_cuda_scratch(select), kPartAlignment) + kReportBytes;
  needs.remedy = "raise it or lower entries_max";
  if (args.logits.query_row != nullptr || args.logits.queries_per_row > kDecodeQueriesMax) {
    // Prefill computes longer than it reads. Scores that stay in half of the L2 cache save their way through memory, and
    // fewer chunks save launches and the selection's start (4,096 x 16,384 on an H200: 2,040 us in chunks of 480 queries,
    // 1,970 of 1,024 or 2,048, 2,060 to 2,230 in one).
    const int64_t row_bytes = 4 * std::max<int64_t>(1, read_topk_layout(args, needs, 1).score_stride);
    const int64_t rows = std::max<int64_t>(kPrefillQueriesMin, facts->l2_bytes / 2 / row_bytes);
    needs.queries_max = static_cast<int32_t>(std::min<int64_t>(rows, std::numeric_limits<int32_t>::max()));
  } else {
    // Decode waits for its selection, and a row by its maxima is ready sooner; prefill asks for throughput, which reading
    // whole rows has more of (4,096 x 16,384: 9.6 % beside the logits, by maxima 20 %).
    IndexLogitsArgs logits = args.logits;
    logits.entry_begin = 0;
    if (args.prepare != nullptr) logits.q_element = args.prepare->element;
    const absl::StatusOr<bool> gives_maxima = index_logits_gives_maxima(logits);
    if (!gives_maxima.ok()) return gives_maxima.status();
    if (*gives_maxima && selects_by_maxima(read_topk_layout(args, needs, 1).entries, args.k)) needs.maxima_group = kMaximaGroup;
  }
  return needs;
}

__global__ void clear_report_kernel(OpReport* selected) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  *selected = OpReport{};
}
__global__ void fold_report_kernel(const OpReport* selected, OpReport* report) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  report_status(report, selected->status);
  report_count(report, &OpReport::fallbacks, selected->fallbacks);
}

absl::Status admit(const ReadTopkArgs& args, const ReadTopkChunk& chunk) {
  if (args.prepare != nullptr) {
    if (absl::Status status = check_prepare_index_q(chunk.prepare); !status.ok()) return status;
  }
  if (absl::Status status = check_index_logits(chunk.logits); !status.ok()) return status;
  return check_select_topk(chunk.select);
}

}  // namespace

absl::StatusOr<ReadTopkPlan> plan_read_topk_cuda(const ReadTopkArgs& args, int64_t budget_bytes) {
  if (absl::Status status = check_read_topk(args); !status.ok()) return status;
  const absl::StatusOr<ReadTopkNeeds> needs = cuda_needs(args);
  if (!needs.ok()) return needs.status();
  return plan_read_topk_within(args, *needs, budget_bytes);
}

absl::Status read_topk_cuda(const ReadTopkArgs& args, const ReadTopkPlan& plan, void* scratch, int64_t scratch_bytes, void* stream) {
  if (absl::Status status = check_read_topk(args); !status.ok()) return status;
  const absl::StatusOr<ReadTopkNeeds> needs = cuda_needs(args);
  if (!needs.ok()) return needs.status();
  const ReadTopkPlan needed = read_topk_layout(args, *needs, std::max(plan.queries_a_chunk, 1));
  if (absl::Status status = admit_read_topk_plan("read_topk_cuda", args, plan, needed, scratch, scratch_bytes, kPartAlignment);
      !status.ok()) {
    return status;
  }
  if (args.logits.query_count == 0) return absl::OkStatus();

  std::byte* const select_scratch = static_cast<std::byte*>(scratch) + needed.select_offset;
  const int64_t select_bytes = needed.select_bytes - kReportBytes;
  OpReport* const selected = reinterpret_cast<OpReport*>(select_scratch + select_bytes);
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  const bool by_maxima = needed.maxima_stride > 0;
  const bool folds_report = args.report != nullptr && !by_maxima;
  for (int32_t begin = 0; begin < args.logits.query_count; begin += needed.queries_a_chunk) {
    const int32_t count = std::min(needed.queries_a_chunk, args.logits.query_count - begin);
    ReadTopkChunk chunk = read_topk_chunk(args, needed, begin, count, scratch);
    chunk.select.report = folds_report ? selected : args.report;
    if (begin == 0) {
      // Refusals come before the first launch: the chunks' arguments differ in pointers and counts alone.
      if (absl::Status status = admit(args, chunk); !status.ok()) return status;
      if (folds_report) {
        absl::Status status = launch("read_topk_cuda", clear_report_kernel, LaunchShape{}, cuda_stream, selected);
        if (!status.ok()) return status;
      }
    }
    if (args.prepare != nullptr) {
      if (absl::Status status = prepare_index_q_cuda(chunk.prepare, stream); !status.ok()) return status;
    }
    if (by_maxima) {
      const GroupMaxima maxima{reinterpret_cast<uint32_t*>(static_cast<std::byte*>(scratch) + needed.maxima_offset), needed.maxima_stride};
      if (absl::Status status = index_logits_with_maxima_cuda(chunk.logits, maxima, stream); !status.ok()) return status;
      if (absl::Status status = select_by_maxima_cuda(chunk.select, maxima, stream); !status.ok()) return status;
    } else {
      if (absl::Status status = index_logits_cuda(chunk.logits, nullptr, 0, stream); !status.ok()) return status;
      if (absl::Status status = select_topk_cuda(chunk.select, select_scratch, select_bytes, stream); !status.ok()) return status;
    }
  }
  if (!folds_report) return absl::OkStatus();
  return launch("read_topk_cuda", fold_report_kernel, LaunchShape{}, cuda_stream, selected, args.report);
}

}  // namespace needle
