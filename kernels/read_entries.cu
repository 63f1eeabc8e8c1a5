// read_entries on the GPU: a warp takes an entry, each lane eight values at a time.
//
// What must stay true:
//  1. An id is looked up once a warp, by entry_place() of the contract: no second rule for what an id means.
//  2. Stores are 16 bytes wide where the output's strides allow it; the values are the same either way.
#include "base/units.h"
#include "kernels/device_report.cuh"
#include "kernels/launch.cuh"
#include "kernels/quantise.h"
#include "kernels/read_entries.h"

namespace needle {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ void decode_fp8(const std::byte* codes, float scale, uint16_t (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = bf16_of(float_of_e4m3(static_cast<uint8_t>(codes[i])) * scale);
}
__device__ __forceinline__ void copy_bf16(const std::byte* from, uint16_t (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = reinterpret_cast<const uint16_t*>(from)[i];
}
__device__ __forceinline__ float fp32_at(const std::byte* at) { return *reinterpret_cast<const float*>(at); }

// Values 8 x octet .. + 7 of an entry.
__device__ __forceinline__ void decode_octet(const LayerView& layer, const EntryPlace& place, int octet, uint16_t (&out)[8]) {
  switch (layer.element) {
    case ElementFormat::kBf16: copy_bf16(place.data + 16 * octet, out); return;
    case ElementFormat::kFp8: decode_fp8(place.data + 8 * octet, fp32_at(place.scale), out); return;
    case ElementFormat::kFp4: {
      const float scale = float_of_ue8m0(static_cast<uint8_t>(place.scale[octet / 4]));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t byte = static_cast<uint32_t>(place.data[4 * octet + i / 2]);
        out[i] = bf16_of(float_of_e2m1(static_cast<uint8_t>(i % 2 == 0 ? byte & 15u : byte >> 4)) * scale);
      }
      return;
    }
    case ElementFormat::kFp8DsMla:
      if (octet < 56) {
        decode_fp8(place.data + 8 * octet, float_of_ue8m0(static_cast<uint8_t>(place.scale[octet / 8])), out);
      } else {
        copy_bf16(place.data + 448 + 16 * (octet - 56), out);
      }
      return;
    case ElementFormat::kFp8V32:
      if (octet < 64) {
        decode_fp8(place.data + 8 * octet, fp32_at(place.data + 512 + 4 * (octet / 16)), out);
      } else {
        copy_bf16(place.data + 528 + 16 * (octet - 64), out);
      }
      return;
    case ElementFormat::kFp32Rows: return;
  }
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads) read_entries_kernel(const __grid_constant__ ReadEntriesArgs args) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (index >= static_cast<int64_t>(args.rows) * args.ids_per_row) return;
  const int64_t row = index / args.ids_per_row;
  const int64_t column = index - row * args.ids_per_row;
  const EntryPlace place = entry_place(args, row, column);
  if (lane == 0 && place.kind == EntryPlaceKind::kBadSlot) {
    report_count(args.report, &OpReport::skipped_rows, 1);
    report_status(args.report, kStatusBadSlot);
  }
  if (lane == 0 && place.kind == EntryPlaceKind::kAbsentPage) {
    report_count(args.report, &OpReport::absent_entries, 1);
    report_status(args.report, kStatusAbsentPage);
  }
  const bool there = place.kind == EntryPlaceKind::kThere;
  std::byte* out = args.out + row * args.row_stride + column * args.entry_stride;
  const LayerView& layer = args.layer;
  if (args.form == ReadForm::kRaw) {
    const int64_t data_bytes = slot_data_bytes(layer.element, layer.head_dim);
    const int64_t bytes = data_bytes + slot_scale_bytes(layer.element, layer.head_dim);
    constexpr int kUnit = kWide ? 4 : 1;  // scales of every format begin on 4 bytes
    for (int64_t i = lane * kUnit; i < bytes; i += 32 * kUnit) {
      const std::byte* from = !there ? nullptr : i < data_bytes ? place.data + i : place.scale + (i - data_bytes);
      if constexpr (kWide) {
        *reinterpret_cast<uint32_t*>(out + i) = there ? *reinterpret_cast<const uint32_t*>(from) : 0u;
      } else {
        out[i] = there ? *from : std::byte{0};
      }
    }
    return;
  }
  const int octets = static_cast<int>(read_entry_values(layer.element, layer.head_dim) / 8);
  for (int octet = lane; octet < octets; octet += 32) {
    uint16_t values[8] = {};
    if (there) decode_octet(layer, place, octet, values);
    if constexpr (kWide) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = values[2 * w] | static_cast<uint32_t>(values[2 * w + 1]) << 16;
      *reinterpret_cast<uint4*>(out + 16 * octet) = uint4{words[0], words[1], words[2], words[3]};
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) reinterpret_cast<uint16_t*>(out + 16 * octet)[i] = values[i];
    }
  }
}

}  // namespace

absl::Status read_entries_cuda(const ReadEntriesArgs& args, void* stream) {
  absl::Status status = check_read_entries(args);
  if (!status.ok()) return status;
  const int64_t entries = static_cast<int64_t>(args.rows) * args.ids_per_row;
  if (entries == 0) return absl::OkStatus();
  const int64_t unit = args.form == ReadForm::kRaw ? 4 : 16;
  const bool wide =
      reinterpret_cast<uintptr_t>(args.out) % unit == 0 && args.entry_stride % unit == 0 && args.row_stride % unit == 0 &&
      (args.form == ReadForm::kBf16 || (reinterpret_cast<uintptr_t>(args.layer.base) % 4 == 0 && args.layer.page_stride % 4 == 0));
  LaunchShape shape;
  shape.block = dim3(kThreads);
  shape.grid = dim3(static_cast<unsigned>(div_ceil(entries, kWarps)));
  return wide ? launch("read_entries", read_entries_kernel<true>, shape, static_cast<cudaStream_t>(stream), args)
              : launch("read_entries", read_entries_kernel<false>, shape, static_cast<cudaStream_t>(stream), args);
}

}  // namespace needle
