// init_state and commit_state on the GPU: one block a record.
#include "kernels/launch.cuh"
#include "kernels/store_device.cuh"

namespace needle {
namespace {

constexpr int kThreads = 256;

__device__ bool start_is_sound(const InitStateArgs& args, const StateStart& start) {
  if (start.record < 0 || start.record >= args.state.count || start.position < 0 || start.position > kStorePositionMax ||
      start.position % args.state.ratio != 0) {
    return false;
  }
  const bool wants_boundary = args.state.ratio == kOverlapRatio && start.position > 0;
  return wants_boundary ? start.boundary_record >= 0 && start.boundary_record < args.boundaries.count && args.boundaries.base != nullptr
                        : start.boundary_record == -1;
}

__global__ void __launch_bounds__(kThreads) init_state_kernel(const __grid_constant__ InitStateArgs args, int64_t floats) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const StateStart start = args.starts[blockIdx.x];
  if (start.record == -1) return;
  if (!start_is_sound(args, start)) {
    if (threadIdx.x == 0) {
      report_count(args.report, &OpReport::skipped_rows, 1);
      report_status(args.report, kStatusBadSlot);
    }
    return;
  }
  const StateView& state = args.state;
  const int dims = state.head_dim;
  std::byte* record = state_record(state, start.record);
  float* rows = reinterpret_cast<float*>(record + kStateHeaderBytes);
  const bool running = state.form == StateForm::kRunning;
  for (int64_t i = threadIdx.x; i < floats; i += kThreads) rows[i] = running && i < dims ? kEmptyMaximum : 0.0f;
  __syncthreads();
  if (start.boundary_record >= 0) {
    // The group before lives on with its overlap halves.
    const float* from = reinterpret_cast<const float*>(args.boundaries.base + start.boundary_record * args.boundaries.stride);
    for (int j = 0; j < kOverlapRatio; ++j) {
      float* row = rows + state_ring_row_offset(state, start.position - kOverlapRatio + j);
      for (int c = threadIdx.x; c < dims; c += kThreads) {
        row[c] = from[2 * j * dims + c];
        row[2 * dims + c] = from[(2 * j + 1) * dims + c];
      }
    }
  }
  if (threadIdx.x != 0) return;
  StateHeader header = {};
  header.magic = kStateMagic;
  header.form = static_cast<uint8_t>(state.form);
  header.ratio = static_cast<uint16_t>(state.ratio);
  header.head_dim = static_cast<uint32_t>(dims);
  header.speculative_rows = static_cast<uint32_t>(state.speculative_rows);
  header.sequence = start.sequence;
  header.generation = start.generation;
  header.next = header.committed = start.position;
  *reinterpret_cast<StateHeader*>(record) = header;
}

__global__ void __launch_bounds__(kThreads) commit_state_kernel(const __grid_constant__ CommitStateArgs args) {
  __shared__ StateHeader shared_header;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const StateCommit commit = args.commits[blockIdx.x];
  if (commit.record == -1) return;
  const auto leave_out = [&](uint32_t status) {
    if (threadIdx.x == 0) {
      report_count(args.report, &OpReport::skipped_rows, 1);
      report_status(args.report, status);
    }
  };
  if ((args.ratio > 1 && (commit.record < 0 || commit.record >= args.state.count)) || commit.table_row < 0 ||
      commit.table_row >= args.pages.rows) {
    return leave_out(kStatusBadSlot);
  }
  StateHeader before = {};
  bool fits = commit.ahead >= 0 && commit.accepted >= 0 && commit.accepted <= commit.ahead && commit.committed >= 0 &&
              commit.committed <= kStorePositionMax;
  if (args.ratio == 1) {
    before.committed = commit.committed;
    before.next = commit.committed + commit.ahead;
  } else {
    if (threadIdx.x == 0) shared_header = *reinterpret_cast<const StateHeader*>(state_record(args.state, commit.record));
    __syncthreads();
    before = shared_header;
    fits = fits && state_header_fits(args.state, before) && before.sequence == commit.sequence && before.generation == commit.generation &&
           before.committed == commit.committed && before.next - before.committed == commit.ahead;
  }
  if (!fits) return leave_out(kStatusStateMismatch);

  for (int64_t entry = (before.committed + commit.accepted) / args.ratio; entry < before.next / args.ratio; ++entry) {
    const DeviceSlot slot = device_entry_slot(args.out, args.pages, commit.table_row, entry);
    if (slot.data == nullptr) continue;
    const int64_t data_bytes = slot_data_bytes(args.out.element, args.out.head_dim);
    const int64_t scale_bytes = slot_scale_bytes(args.out.element, args.out.head_dim);
    for (int64_t i = threadIdx.x; i < data_bytes; i += kThreads) slot.data[i] = std::byte{0};
    for (int64_t i = threadIdx.x; i < scale_bytes; i += kThreads) slot.scale[i] = std::byte{0};
  }
  if (args.ratio == 1) return;
  StateHeader after = before;
  after.next = after.committed = before.committed + commit.accepted;
  update_record_rows(
      args.state, commit.record, before, after, args.position_bias, [](int64_t) { return DeviceRow{}; },
      [] {});  // every row that stays is carried
  if (threadIdx.x == 0) *reinterpret_cast<StateHeader*>(state_record(args.state, commit.record)) = after;
}

}  // namespace

absl::Status init_state_cuda(const InitStateArgs& args, void* stream) {
  absl::Status status = check_init_state(args);
  if (!status.ok() || args.count == 0) return status;
  LaunchShape shape;
  shape.block = dim3(kThreads);
  shape.grid = dim3(static_cast<unsigned>(args.count));
  const StateView& state = args.state;
  const int64_t bytes = state_record_bytes(state.form, state.ratio, state.head_dim, state.speculative_rows);
  return launch("init_state", init_state_kernel, shape, static_cast<cudaStream_t>(stream), args, (bytes - kStateHeaderBytes) / 4);
}

absl::Status commit_state_cuda(const CommitStateArgs& args, void* stream) {
  absl::Status status = check_commit_state(args);
  if (!status.ok() || args.count == 0) return status;
  LaunchShape shape;
  shape.block = dim3(kThreads);
  shape.grid = dim3(static_cast<unsigned>(args.count));
  return launch("commit_state", commit_state_kernel, shape, static_cast<cudaStream_t>(stream), args);
}

}  // namespace needle
