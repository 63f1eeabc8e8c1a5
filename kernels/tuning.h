// Tuning as data: which shape of kernel runs on which compute capability. Algorithms are in *.cuh, launches in *.cu.
//
// What must stay true:
//  1. A choice depends on the device and on host fields of the arguments, never on a length: a captured graph would keep
//     a choice that its lengths no longer deserve.
//  2. Nothing here changes a result (kernels/index_logits_device.cuh, invariant 2), only how fast it comes.
#pragma once

#include <cstdint>

namespace needle {

// index_logits. A block's shared memory holds the queries' operand twice (the next run loads while this one is scored)
// and fills the rest with a ring of key tiles.
struct LogitsTuning {
  bool wgmma = false;             // the sm_90a kernel; false: the mma.sync kernel, which every GPU since sm_90 runs
  int ring_stages_max = 12;       // 12 x 16 KiB in flight a multiprocessor; measured: flat from 6 up on an H200
  int64_t shared_bytes_left = 0;  // of the block's limit, left unused (another kernel's block may start beside)
  int blocks = 0;                 // persistent blocks; 0: one a multiprocessor
};

inline LogitsTuning logits_tuning(int compute_major, int compute_minor, bool sm90a_compiled) {
  LogitsTuning tuning;
  tuning.wgmma = compute_major == 9 && compute_minor == 0 && sm90a_compiled;
  if (compute_major == 12) {
    // 99 KB a block: what is left beside the queries decides; 4 tiles of 16 KiB cover 1.8 TB/s x 0.8 us / 188.
    tuning.ring_stages_max = 5;
  }
  return tuning;
}

}  // namespace needle
