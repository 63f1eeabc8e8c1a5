#include "tests/bench/gpu_bench.h"

namespace needle::bench {

// Anchors: DeepGEMM, vLLM's and a public Triton kernel, SGLang, timed the same way on an H200 before, not by this
// program.
// Floors: bytes at the 4.33 TB/s that reading scattered pages reached there.
const std::vector<Goal>& goals() {
  static const std::vector<Goal> table = {
      {"logits.bf16.64x131072", "decode logits bf16, 64 x 131,072", 535, "us", Better::kLower, "Triton bf16 764; floor 496"},
      {"select.bf16.64x131072", "decode logits + exact top-512 bf16, 64 x 131,072", 545, "us", Better::kLower,
       "Triton 764 + SGLang 29 (inexact)"},
      {"select.bf16.16x131072", "decode logits + exact top-512 bf16, 16 x 131,072", 146, "us", Better::kLower,
       "Triton 196 + 20; floor 124"},
      {"select.bf16.64x16384", "decode logits + exact top-512 bf16, 64 x 16,384", 74, "us", Better::kLower, "Triton 104 + 6"},
      {"select.bf16.16x16384", "decode logits + exact top-512 bf16, 16 x 16,384 (stretch 22)", 24, "us", Better::kLower, "Triton 29 + 6"},
      {"select.bf16.1x131072", "decode logits + exact top-512 bf16, 1 x 131,072 (stretch 16)", 18, "us", Better::kLower, "Triton 17 + 10"},
      {"logits.bf16.16x131072.2q", "decode logits bf16, 16 x 131,072, 2 query tokens over this run's 1", 1.1, "x", Better::kLower,
       "memory floor 1.0"},
      {"logits.bf16.16x131072.4q", "decode logits bf16, 16 x 131,072, 4 query tokens", 230, "us", Better::kLower,
       "tensor floor 174 to 201"},
      {"logits.bf16.ragged", "decode logits bf16, 64 rows of 1K to 256K, rate over the uniform rate", 90, "%", Better::kHigher, "-"},
      {"logits.fp8.64x131072", "decode logits fp8 keys, q unquantised, 64 x 131,072", 290, "us", Better::kLower,
       "DeepGEMM 276 with q in fp8; Triton fp8 2,520; floor 256"},
      {"logits.fp8q.64x131072", "decode logits fp8 keys, q in fp8, 64 x 131,072", 280, "us", Better::kLower, "DeepGEMM 276; floor 256"},
      {"prefill.bf16.4096x16384", "prefill logits bf16, 4,096 x 16,384, of this run's bf16 matrix rate", 82, "%", Better::kHigher,
       "DeepGEMM fp8 0.99 ms; cuBLAS bf16 682 to 790 TFLOP/s"},
      {"prefill.select.bf16.4096x16384", "the same with exact top-512, 256 MiB of scratch, more time", 10, "%", Better::kLower, "-"},
      {"topk.1x131072", "exact top-512, 1 x 131,072", 8, "us", Better::kLower, "SGLang v2 10.0 (inexact), CUB 12"},
      {"topk.64x131072", "exact top-512, 64 x 131,072", 16, "us", Better::kLower,
       "SGLang v2 28.7 (inexact), vLLM and FlashInfer 44; one read 7.8"},
      {"topk.256x131072", "exact top-512, 256 x 131,072", 45, "us", Better::kLower,
       "SGLang v2 66 (inexact), vLLM and FlashInfer 106; one read 31"},
      {"topk.64x524288", "exact top-512, 64 x 524,288", 45, "us", Better::kLower, "SGLang v2 98 (inexact), FlashInfer 165; one read 31"},
      {"topk.low_contrast", "top-512 of 64 x 131,072 low-contrast and all-equal rows, over the normal row", 2, "x", Better::kLower, "-"},
      {"topk.k2048", "top-1,024 and top-2,048 of 64 x 131,072, over top-512", 1.3, "x", Better::kLower, "-"},
      {"store.pooled.bf16", "store of 16,384 pooled index-K rows, bf16 in, bf16 out", 5, "us", Better::kLower, "SGLang fp8 6.1"},
      {"store.pooled.fp32", "store of 16,384 pooled index-K rows, fp32 in, bf16 out", 6.5, "us", Better::kLower, "SGLang fp8 6.1"},
      {"store.rows.index_k", "index-K store from 65,536 raw bf16 rows, of a copy of as many bytes", 80, "%", Better::kHigher, "-"},
      {"store.rows.main_kv", "main-KV store (fp8) from 32,768 raw bf16 rows, of a copy of as many bytes", 80, "%", Better::kHigher, "-"},
      {"pages.gather", "copy_pages gather of 131,072 entries of one layer's index-K, of a copy of as many bytes", 88, "%", Better::kHigher,
       "-"},
      {"pages.checksum", "checksum_pages over 2,048 whole pages, bytes read, of a copy of as many bytes", 80, "%", Better::kHigher, "-"},
  };
  return table;
}

}  // namespace needle::bench
