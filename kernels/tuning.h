// Tuning as data: which shape of kernel runs on which compute capability. Algorithms are in *.cuh, launches in *.cu.
//
// What must stay true:
//  1. A choice depends on the device and on host fields of the arguments, never on a length: a captured graph would keep
//     a choice that its lengths no longer deserve.
//  2. Nothing here changes a result (kernels/index_logits_device.cuh, invariant 2), only how fast it comes.
#pragma once

#include <cstdint>

namespace needle {

// How keys that are read once stand in L2 against everything else.
enum class CachePriority { kEvictFirst, kNormal, kUnchanged };

// index_logits. A block's shared memory holds the queries' operand twice (the next run loads while this one is scored)
// and fills the rest with a ring of key tiles.
struct LogitsTuning {
  bool wgmma = false;  // the sm_90a kernel; false: the mma.sync kernel, which every GPU since sm_90 runs
  // Key tiles in flight. On an H200 64 x 131,072 bf16 keys took 536 us with 6 or 9 stages and 562 with 12: more only
  // lengthens memory's queue, and every other load waits in it (16 x 16,384: 21.7 us with 6, 22.7 with 9, 23.4 with 12).
  int ring_stages_max = 6;
  // The same for fp8 and fp4 keys, whose tiles are smaller; those that are converted are held longer (64 x 131,072 fp8: 320
  // to 340 us with any of 6 to 15; 16 x 16,384: 26.3, 25.5 and 25.5 with 6, 9 and 12).
  int converted_ring_stages_max = 9;
  // fp8 keys that meet fp8 queries as they are (64 x 131,072: 281 us with 9, 275 with 12, 274 with 15).
  int fp8_product_ring_stages_max = 15;
  // Of keys that the matrix unit reads as they are. 64 x 131,072 (2.1 GB): bf16 533 us with evict-first, 600 normal, 520
  // unchanged; fp8 product 287, 300, 275. Less is read faster with evict-first (16 x 16,384 bf16: 21.3 us, unchanged 21.8), so
  // a call whose capacity is below this keeps that.
  CachePriority keys_read_once = CachePriority::kUnchanged;
  int64_t keys_read_once_bytes_min = int64_t{400} << 20;
  // Below that, of bf16 keys and one query token a row: tiles that a block has asked for and not got. With more, memory serves
  // blocks unevenly; with fewer, long calls would not fill it (logits and selection, us, without a bound, with 4, with 3:
  // 64 x 16,384 79.1, 78.8, 76.3; 16 x 16,384 27.8, 27.8, 27.3; 16 x 131,072 147.3, 148.3, 152.7).
  int short_tiles_in_flight = 3;
  // Of keys that are converted (fp8: 335, 340 and 344 us).
  CachePriority converted_keys_read_once = CachePriority::kEvictFirst;
  int64_t shared_bytes_left = 0;  // of the block's limit, left unused (another kernel's block may start beside)
  int blocks = 0;                 // persistent blocks; 0: one a multiprocessor
};

inline LogitsTuning logits_tuning(int compute_major, int compute_minor, bool sm90a_compiled) {
  LogitsTuning tuning;
  tuning.wgmma = compute_major == 9 && compute_minor == 0 && sm90a_compiled;
  if (compute_major == 12) {
    // 99 KB a block: what is left beside the queries decides. 4 tiles of 16 KiB cover 1.8 TB/s x 0.8 us / 188. Not measured.
    tuning.ring_stages_max = 4;
    tuning.converted_ring_stages_max = 8;
  }
  return tuning;
}

// select_topk. A row a compute capability; "by analogy" where no such GPU was at hand.
struct SelectTuning {
  int major;                    // compute capability
  int cluster_max;              // blocks that may share a row
  int widest_cluster_rows_max;  // up to so many rows clusters of more than 8 are used
  int part_entries_min;         // a part of a row is at least so long
  int capacity_min;             // rank keys that the pool holds at least
  int shared_capacity_min;      // the same where blocks share a multiprocessor
  int slots;                    // entries that a thread's list holds at least: 4 or more
  int slots_max;                // and at most
  int long_part_tiles_min;      // from so many tiles on a block's ring is kept short
  int shared_rows_k_max;        // above this k a block takes the whole multiprocessor, so that its buffer fits
  int64_t shared_bytes_of_two;  // dynamic shared memory with which two blocks share a multiprocessor
};

inline constexpr SelectTuning kSelectTuning[] = {
    {9, 16, 4, 4096, 4096, 3072, 6, 12, 16, 1024, 113 * 1024},   // H200
    {10, 16, 4, 4096, 4096, 3072, 6, 12, 16, 1024, 113 * 1024},  // by analogy with 9.0
    {12, 8, 0, 4096, 3072, 3072, 4, 12, 16, 1024, 99 * 1024},    // by analogy; 99 KB a block, which stays alone
};

inline constexpr const SelectTuning& select_tuning(int major) {
  for (const SelectTuning& row : kSelectTuning) {
    if (row.major == major) return row;
  }
  return kSelectTuning[2];  // an unknown GPU gets the plan that asks for least
}

}  // namespace needle
