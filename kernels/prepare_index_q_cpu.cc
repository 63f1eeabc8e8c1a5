#include <array>
#include <cstring>

#include "kernels/entry_chain_cpu.h"
#include "kernels/prepare_index_q.h"
#include "kernels/prepare_index_q_host.h"
#include "kernels/store_host.h"

namespace needle {

absl::Status prepare_index_q_cpu(const PrepareIndexQArgs& args, CpuIsa isa, Workers& workers) {
  if (absl::Status status = check_prepare_index_q(args); !status.ok()) return status;
  if (absl::Status status = admit_prepare_index_q(args); !status.ok()) return status;
  const EntryChainCpu& kernels = entry_chain_cpu(isa);
  const EntryChain chain = query_chain(args);
  const float factor = index_weight_factor(args.heads);
  const int64_t element_bytes = args.q.element == RowElement::kFp32 ? 4 : 2;
  workers.run(args.tokens, [&](int64_t token, int) {
    const std::byte* row = static_cast<const std::byte*>(args.q.data) + token * args.q.row_stride * element_bytes;
    for (int head = 0; head < args.heads; ++head) {
      alignas(64) std::array<float, kIndexHeadDim> x;
      kernels.widen(row + head * kIndexHeadDim * element_bytes, args.q.element, kIndexHeadDim, x.data());
      kernels.finish(chain, true, args.positions == nullptr ? 0 : args.positions[token], x.data());
      const int64_t at = token * args.heads + head;
      std::array<std::byte, 4> scale = {};
      kernels.quantise(chain, x.data(), query_data(args, at), scale.data());
      float weight = raw_value(args.raw_weights.data, args.raw_weights.element, token * args.raw_weights.row_stride + head) * factor;
      if (args.element == QueryElement::kFp8) {
        float of_head;
        std::memcpy(&of_head, scale.data(), sizeof(of_head));
        weight *= of_head;
      }
      if (args.element == QueryElement::kFp4) std::memcpy(args.out_q_scale + 4 * at, scale.data(), 4);
      args.out_weights[at] = weight;
    }
  });
  return absl::OkStatus();
}

}  // namespace needle
