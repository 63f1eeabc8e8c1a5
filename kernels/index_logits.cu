// Host side of index_logits_cuda: checks, chooses a kernel by device and host fields, launches once.
#include "kernels/index_logits.h"

#include <cuda.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "kernels/index_logits_cuda.h"
#include "kernels/index_logits_launch.h"
#include "kernels/launch.cuh"
#include "kernels/tuning.h"

namespace needle {
namespace {

using logits::kTileSlots;

#ifdef NEEDLE_HAVE_SM90A
// cuTensorMapEncodeTiled, looked up at run time: nothing here links against the driver.
using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                     const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

absl::StatusOr<EncodeTensorMap> encode_tensor_map() {
  static const auto found = []() -> absl::StatusOr<EncodeTensorMap> {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult answer = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &answer);
    if (error != cudaSuccess) return cuda_status(error, "index_logits_cuda: looking up cuTensorMapEncodeTiled");
    if (answer != cudaDriverEntryPointSuccess || entry == nullptr) {
      return absl::UnimplementedError("index_logits_cuda: this driver has no cuTensorMapEncodeTiled; it needs 12.0 or later");
    }
    return reinterpret_cast<EncodeTensorMap>(entry);
  }();
  return found;
}

// A tensor of vectors of 128 bf16 or fp8 elements, read in boxes of 128 bytes a row that arrive in the 128-byte swizzle wgmma
// reads. `rows` of them lie together, `groups` of those `group_stride` bytes apart; a box takes `box_rows` x `box_groups`,
// and what it has beyond the tensor arrives as zeros.
struct VectorTensor {
  int element_bytes;
  const void* base;
  int64_t rows, groups, group_stride;
  int box_rows, box_groups;
};
absl::Status map_vectors(const char* what, const VectorTensor& tensor, CUtensorMap& map) {
  absl::StatusOr<EncodeTensorMap> encode = encode_tensor_map();
  if (!encode.ok()) return encode.status();
  const cuuint64_t extents[3] = {kIndexHeadDim, static_cast<cuuint64_t>(tensor.rows), static_cast<cuuint64_t>(tensor.groups)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(kIndexHeadDim * tensor.element_bytes),
                                 static_cast<cuuint64_t>(tensor.group_stride)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / tensor.element_bytes), static_cast<cuuint32_t>(tensor.box_rows),
                             static_cast<cuuint32_t>(tensor.box_groups)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUtensorMapDataType type = tensor.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const CUresult result =
      (*encode)(&map, type, 3, const_cast<void*>(tensor.base), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return absl::InvalidArgumentError(absl::StrCat("index_logits_cuda: cuTensorMapEncodeTiled refused ", what, " at ",
                                                   reinterpret_cast<uintptr_t>(tensor.base), ", ", tensor.rows, " x ", tensor.groups,
                                                   ", stride ", tensor.group_stride, ": CUresult ", static_cast<int>(result)));
  }
  return absl::OkStatus();
}

// Keys and queries that the matrix unit reads as they are stored.
absl::Status map_operands(const IndexLogitsArgs& args, const logits::Plan& plan, logits::TensorMaps& maps) {
  const LayerView& keys = args.keys;
  const int key_bytes = keys.element == ElementFormat::kBf16 ? 2 : 1;
  if (keys.page_count > 0) {
    const VectorTensor tensor{
        key_bytes, keys.base, keys.slots_per_page, keys.page_count, keys.page_stride, std::min(keys.slots_per_page, kTileSlots), 1};
    if (absl::Status status = map_vectors("keys", tensor, maps.keys); !status.ok()) return status;
  }
  const bool queries_alike = args.q_element == (key_bytes == 2 ? QueryElement::kBf16 : QueryElement::kFp8);
  if (queries_alike) {
    const VectorTensor tensor{key_bytes,  args.q,     args.heads, args.query_count, int64_t{args.heads} * kIndexHeadDim * key_bytes,
                              plan.heads, plan.tokens};
    return map_vectors("queries", tensor, maps.queries);
  }
  return absl::OkStatus();
}
#endif

#ifdef NEEDLE_HAVE_SM90A
constexpr bool kSm90aCompiled = true;
#else
constexpr bool kSm90aCompiled = false;
#endif

LogitsTuning tuning_of(const DeviceFacts& facts) { return logits_tuning(facts.major, facts.minor, kSm90aCompiled); }

// Whether the kernel that would score these writes maxima.
bool writes_maxima(const IndexLogitsArgs& args, const LogitsTuning& tuning) {
  const bool as_stored =
      args.keys.element == ElementFormat::kBf16 || (args.keys.element == ElementFormat::kFp8 && args.q_element == QueryElement::kFp8);
  return tuning.wgmma && as_stored && args.keys.slots_per_page % kTileSlots == 0 && args.entry_begin == 0;
}

int padded_heads(int heads) { return heads <= 32 ? 32 : heads <= 64 ? 64 : 128; }

absl::Status launch_tuned(const IndexLogitsArgs& args, const DeviceFacts& facts, const LogitsTuning& tuning, const GroupMaxima& maxima,
                          void* stream) {
  if (absl::Status status = check_index_logits(args); !status.ok()) return status;
  if (args.query_count == 0 || args.entry_count == 0) return absl::OkStatus();
  if (reinterpret_cast<uintptr_t>(args.q) % 16 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("index_logits_cuda: q lies at ", reinterpret_cast<uintptr_t>(args.q),
                                                   "; queries must start on a multiple of 16 bytes"));
  }
  logits::Plan plan;
  plan.maxima = maxima;
  plan.heads = padded_heads(args.heads);
  plan.tokens = logits::tokens_a_run(plan.heads, args.query_row != nullptr ? kSpeculativeRowsMax : args.queries_per_row);
  plan.blocks = tuning.blocks > 0 ? tuning.blocks : facts.multiprocessors;
  plan.shared_limit = facts.shared_bytes_per_block - tuning.shared_bytes_left;
  const ElementFormat element = args.keys.element;
  const bool all_fp8 = element == ElementFormat::kFp8 && args.q_element == QueryElement::kFp8 && tuning.wgmma;
  const bool converted = element != ElementFormat::kBf16 && !all_fp8;
  plan.ring_stages_max = converted ? tuning.converted_ring_stages_max
                         : all_fp8 ? tuning.fp8_product_ring_stages_max
                                   : tuning.ring_stages_max;
  const int64_t rows = div_ceil(args.query_count, std::max(1, args.queries_per_row));
  const int64_t capacity_bytes =
      rows * div_ceil(args.entry_count, args.keys.slots_per_page) * layer_page_bytes(element, kIndexHeadDim, args.keys.slots_per_page);
  plan.read_once = converted                                           ? tuning.converted_keys_read_once
                   : capacity_bytes >= tuning.keys_read_once_bytes_min ? tuning.keys_read_once
                                                                       : CachePriority::kEvictFirst;
  if (element == ElementFormat::kBf16 && plan.heads * plan.tokens == 64 && capacity_bytes < tuning.keys_read_once_bytes_min) {
    plan.tiles_in_flight = tuning.short_tiles_in_flight;
  }
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
#ifdef NEEDLE_HAVE_SM90A
  if (tuning.wgmma) {
    logits::TensorMaps maps;
    if (element == ElementFormat::kBf16 || all_fp8) {
      if (absl::Status status = map_operands(args, plan, maps); !status.ok()) return status;
    }
    return element == ElementFormat::kBf16  ? logits::launch_sm90_bf16(plan, args, maps, cuda_stream)
           : all_fp8                        ? logits::launch_sm90_fp8_fp8(plan, args, maps, cuda_stream)
           : element == ElementFormat::kFp8 ? logits::launch_sm90_fp8(plan, args, maps, cuda_stream)
                                            : logits::launch_sm90_fp4(plan, args, maps, cuda_stream);
  }
#else
  if (tuning.wgmma) {
    return absl::UnimplementedError(
        "index_logits_cuda: wgmma was asked for, but this build has no sm_90a: add 90a-real to "
        "NEEDLE_CUDA_ARCHITECTURES");
  }
#endif
  return element == ElementFormat::kBf16  ? logits::launch_mma_bf16(plan, args, cuda_stream)
         : element == ElementFormat::kFp8 ? logits::launch_mma_fp8(plan, args, cuda_stream)
                                          : logits::launch_mma_fp4(plan, args, cuda_stream);
}

}  // namespace

int64_t index_logits_cuda_scratch(const IndexLogitsArgs&) { return 0; }

absl::Status index_logits_cuda(const IndexLogitsArgs& args, void* scratch, int64_t scratch_bytes, void* stream) {
  (void)scratch;
  if (scratch_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("index_logits_cuda: scratch_bytes is ", scratch_bytes));
  }
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) return facts.status();
  return launch_tuned(args, *facts, tuning_of(*facts), GroupMaxima{}, stream);
}

absl::StatusOr<ScoreVariant> score_variant_cuda() {
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) return facts.status();
  if (tuning_of(*facts).wgmma) return ScoreVariant::kCudaSm90;
  if (facts->major == 10) return ScoreVariant::kCudaSm100;
  if (facts->major == 12) return ScoreVariant::kCudaSm120;
  return ScoreVariant::kCudaPlain;
}

absl::Status index_logits_cuda_tuned(const IndexLogitsArgs& args, const LogitsTuning& tuning, void* stream) {
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) return facts.status();
  return launch_tuned(args, *facts, tuning, GroupMaxima{}, stream);
}

absl::StatusOr<bool> index_logits_gives_maxima(const IndexLogitsArgs& args) {
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) return facts.status();
  return writes_maxima(args, tuning_of(*facts));
}

absl::Status index_logits_with_maxima_cuda(const IndexLogitsArgs& args, const GroupMaxima& maxima, void* stream) {
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) return facts.status();
  const LogitsTuning tuning = tuning_of(*facts);
  if (!writes_maxima(args, tuning)) {
    return absl::UnimplementedError(
        "index_logits_with_maxima_cuda: this device, key format or page size has no kernel that writes maxima; call index_logits_cuda");
  }
  const int64_t stride_least = div_ceil(args.entry_count, kTileSlots) * (kTileSlots / kMaximaGroup);
  if (maxima.orders == nullptr || maxima.stride < stride_least) {
    return absl::InvalidArgumentError(absl::StrCat("index_logits_with_maxima_cuda: maxima.stride is ",
                                                   maxima.orders == nullptr ? 0 : maxima.stride, ", must be >= ", stride_least));
  }
  return launch_tuned(args, *facts, tuning, maxima, stream);
}

}  // namespace needle
