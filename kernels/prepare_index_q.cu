// prepare_index_q on the GPU: one head across 16 lanes, the very chain that stored the keys (kernels/entry_chain.cuh).
#include "base/units.h"
#include "kernels/device_report.cuh"
#include "kernels/entry_chain.cuh"
#include "kernels/launch.cuh"
#include "kernels/prepare_index_q.h"
#include "kernels/prepare_index_q_host.h"

namespace needle {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadsABlock = kThreads / RowOfLanes<128>::kLanes;

__global__ void __launch_bounds__(kThreads)
    prepare_index_q_kernel(const __grid_constant__ PrepareIndexQArgs args, const __grid_constant__ EntryChain chain, float weight_factor) {
  using Row = RowOfLanes<128>;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t rows = args.tokens * args.heads;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kHeadsABlock + threadIdx.x / Row::kLanes;
  const bool there = index < rows;
  const int64_t token = there ? index / args.heads : 0;
  const int64_t head = there ? index - token * args.heads : 0;

  int64_t position = 0;
  bool bad_position = false;
  if (chain.component.rope != RopeStyle::kNone && there) {
    position = args.positions[token];
    bad_position = position < 0 || position >= chain.rope.positions;
    if (bad_position) position = 0;
  }
  Row row{};
  if (there) {
    const int64_t at = token * args.q.row_stride + head * kIndexHeadDim;
    const int element_bytes = args.q.element == RowElement::kFp32 ? 4 : 2;
    load_octet(static_cast<const std::byte*>(args.q.data) + at * element_bytes, args.q.element, 8 * Row::lane(), row.x[0]);
  }
  if (chain.component.rope == RopeStyle::kNone || chain.rope.positions > 0) finish_row(chain, false, position, row);

  float scale = 1.0f;
  std::byte* data = nullptr;
  std::byte* scale_bytes = nullptr;
  __shared__ uint32_t unfolded[kHeadsABlock];  // where the chain leaves an fp8 query's scale
  if (there) {
    data = static_cast<std::byte*>(args.out_q) + index * slot_data_bytes(chain.component.element, kIndexHeadDim);
    if (args.element == QueryElement::kFp4) scale_bytes = reinterpret_cast<std::byte*>(args.out_q_scale) + 4 * index;
    if (args.element == QueryElement::kFp8) scale_bytes = reinterpret_cast<std::byte*>(&unfolded[threadIdx.x / Row::kLanes]);
  }
  quantise_row(chain, row, data, scale_bytes);
  if (!there || Row::lane() != 0) return;
  if (args.element == QueryElement::kFp8) scale = __uint_as_float(unfolded[threadIdx.x / Row::kLanes]);
  const int64_t at = token * args.raw_weights.row_stride + head;
  const float raw = args.raw_weights.element == RowElement::kFp32 ? static_cast<const float*>(args.raw_weights.data)[at]
                                                                  : float_of_bf16(static_cast<const uint16_t*>(args.raw_weights.data)[at]);
  float weight = raw * weight_factor;
  if (args.element == QueryElement::kFp8) weight *= scale;
  args.out_weights[index] = bad_position ? __uint_as_float(0x7FC00000u) : weight;
  if (bad_position && head == 0) {
    report_count(args.report, &OpReport::skipped_rows, 1);
    report_status(args.report, kStatusBadPosition);
  }
}

}  // namespace

absl::Status prepare_index_q_cuda(const PrepareIndexQArgs& args, void* stream) {
  absl::Status status = check_prepare_index_q(args);
  if (!status.ok() || args.tokens == 0) return status;
  LaunchShape shape;
  shape.block = dim3(kThreads);
  shape.grid = dim3(static_cast<unsigned>(div_ceil(args.tokens * args.heads, kHeadsABlock)));
  return launch("prepare_index_q", prepare_index_q_kernel, shape, static_cast<cudaStream_t>(stream), args, query_chain(args),
                index_weight_factor(args.heads));
}

}  // namespace needle
