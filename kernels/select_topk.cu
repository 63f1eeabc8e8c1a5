// select_topk on the GPU: one read of the scores.
//
// A row is read once, by one block or by a cluster of blocks that take turns. Its sample is a piece of each of 32 or 64 strands
// of the row, and gives a rank key that about 2 to 3 k entries reach: the *guess*. Where shared memory holds all that a block
// reads, its tiles are the strands' pieces one after the other, so that the sample is the first of them, all are asked for at
// once, and a thread picks what reaches the guess from where it lies. Longer rows stream behind a small sample from front to
// back through a ring (bulk copies); each thread keeps what reaches the guess in a short list, without votes or atomics, and a
// warp gives its lists away when one of them is nearly full and at the end. What a block of a cluster finds goes straight to its
// place in the leading block's pool, which finds the exact k-th and puts the members in order by a bitmap over positions.
// Short rows are not taken here where select_short_rows.cu can take them.
// The parts: select_topk_part.cuh (what a block reads), select_topk_sample.cuh (the guess), select_topk_read.cuh (from scores to
// the pool), select_topk_row.cuh (from the pool to the answer); docs/kernels-performance.md has the figures.
//
// What must stay true:
//  1. A guess is checked, and each block of a cluster has its own: what counts is what reaches the highest. Where more reached
//     it than the pool holds, the k-th best of what the pool does hold is a sound bound, and one block reads the row again
//     with that; where fewer than min(k, present) reached it, one block reads the row slowly, raising its threshold from
//     nothing. Both are counted in OpReport::fallbacks. No entry is ever dropped.
//  2. The answer is a function of the scores: neither guess, plan, timing nor cluster size can change it.
//  3. An instruction that all 32 warps run costs a multiprocessor eight cycles: what few can do is done by few.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "kernels/device_report.cuh"
#include "kernels/launch.cuh"
#include "kernels/select_short_rows.h"
#include "kernels/select_topk.h"
#include "kernels/select_topk_block.cuh"
#include "kernels/select_topk_part.cuh"
#include "kernels/select_topk_plan.h"
#include "kernels/select_topk_read.cuh"
#include "kernels/select_topk_row.cuh"
#include "kernels/select_topk_sample.cuh"
#include "kernels/tuning.h"

namespace needle {
namespace {

constexpr int kSampleHits = 16;  // of the k best: so many should be in a sample

// What warp 0 finds out about the row.
template <int kThreads>
__device__ __forceinline__ void plan_part(const SelectTopkArgs& args, const SelectPlan& plan, int64_t row, int rank, RowShared& shared) {
  constexpr int kStrands = kStrandsAWarp * kThreads / 32;
  const VisibleRow visible = visible_row(args, row, LoadNow{});
  Part part;
  part.row = args.scores + row * args.score_stride;
  part.length = static_cast<int>(visible.length);
  part.head = min(part.length, static_cast<int>(((16u - (reinterpret_cast<uintptr_t>(part.row) & 15u)) & 15u) / 4));
  part.vectors = reinterpret_cast<const float4*>(part.row + part.head);
  part.row_vectors = (part.length - part.head) / 4;
  part.strand = (part.row_vectors + kStrands - 1) / kStrands;
  part.guesses = part.row_vectors >= kThreads && args.k < part.length;
  // Each block has a whole piece of each strand for a sample.
  part.blocks_log2 = part.guesses ? min(plan.cluster_log2, 31 - __clz(max(1, part.strand / kPieceVectors))) : 0;
  const int strand_step_log2 = kPieceVectorsLog2 + part.blocks_log2;
  part.by_strands = part.strand <= plan.stages << strand_step_log2;
  part.guesses = part.guesses && (part.by_strands || plan.slots > 0);
  const int row_step_log2 = kTileVectorsLog2<kThreads> + part.blocks_log2;
  part.tiles = part.by_strands ? (part.strand - rank * kPieceVectors + (1 << strand_step_log2) - 1) >> strand_step_log2
                               : max(0, part.row_vectors - rank * kTileVectors<kThreads> + (1 << row_step_log2) - 1) >> row_step_log2;
  // Each block has its own piece of every strand.
  const int strand_log2 = 31 - __clz(max(1, part.row_vectors / kSampleStrands));
  part.sample_log2 = max(kSamplePieceLog2Min, min(min(plan.sample_log2, kSamplePieceLog2Max<kThreads>), strand_log2 - part.blocks_log2));
  if (threadIdx.x == 0) {
    shared.visible = visible;
    shared.part = part;
  }
}

template <int kThreads, int kBlocksPerSm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    select_topk_kernel(const __grid_constant__ SelectTopkArgs args, const __grid_constant__ SelectPlan plan) {
  RowShared& shared = row_shared(plan.capacity);
  SelectShared& pool = select_shared();
  uint64_t* const lists = reinterpret_cast<uint64_t*>(&shared + 1);
  float4* ring = reinterpret_cast<float4*>(lists + plan.slots * kThreads);
  const int rank = plan.cluster > 1 ? static_cast<int>(rank_in_cluster()) : 0;
  const bool leader = rank == 0;
  const int64_t row = blockIdx.x >> plan.cluster_log2;

  // Arguments are constants, whose lines come from memory when they are first looked at: now rather than later.
  asm volatile("" ::"l"(args.scores), "l"(args.lengths), "r"(args.k), "l"(args.positions), "l"(args.out_stride), "r"(plan.slots));
  block_begin<kThreads>();
  if (threadIdx.x < kSampleGroupsMax) shared.group_best[threadIdx.x] = 0;
  if (threadIdx.x == kThreads - 1) {  // not of the warp that plans
    barrier_init(&shared.handed, static_cast<uint32_t>(plan.cluster));
    init_ring<kThreads>(shared, plan.stages);
    shared.sampled = SampleCount{};
  }
  __syncwarp();
  if (plan.cluster > 1) cluster_arrive();

  // A block that begins while the kernel before still runs plans by lengths that may still be written, and reads the row by that
  // plan as soon as it may; meanwhile it looks whether they are the same now. Where they are not it begins once more. Blocks that
  // take the place of others of this kernel have nothing to wait for.
  const Part& part = shared.part;
  const int stages = plan.stages;
  // Behind all of the ring's bytes the sample would wait for microseconds: a tile or two keep memory busy till it is back.
  const int early = min(max(1, stages - 2), stages);
  const uint32_t own_ring = shared_address(ring + threadIdx.x);
  TilePlace place;
  OwnSample sample;
  const auto first_copies_landed = [&] {
    copies_landed<true>();
    for (int tile = 0; !part.by_strands && tile < min(early, part.tiles); ++tile) barrier_wait(&shared.tile_landed[tile], 0);
    __syncthreads();
  };
  bool hinted = blockIdx.x < static_cast<unsigned>(plan.first_blocks);
  if (!hinted) {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
#pragma unroll 1
  for (;; hinted = false) {
    if (threadIdx.x < 32) plan_part<kThreads>(args, plan, row, rank, shared);
    __syncthreads();
    const bool reads = part.guesses && rank < 1 << part.blocks_log2;
    if (hinted) {
      wait_for_previous_kernel();
      let_next_kernel_start();
      if (!reads) {
        __syncthreads();  // everybody knows that
        continue;
      }
    } else {
      if (part.length == 0) {
        if (!leader) return;
        give_padding<kThreads>(args, row, 0);
        if (threadIdx.x == 0) report_status(args.report, shared.visible.status);
        return;
      }
      if (rank >= 1 << part.blocks_log2) return;
      if (!reads) break;
    }
    place = first_by_strands<kThreads>(part, rank);
    if (part.by_strands) {
      ask_for_strands<kThreads>(part, place, own_ring, part.tiles);
      sample = sample_of_strands<kThreads>(part, place, own_ring);
    } else {
      sample = ask_for_sample<kThreads>(part, rank, shared_address(lists));
    }
    if (threadIdx.x == 0 && !part.by_strands) ask_for_first_tiles<kThreads>(shared, ring, part, rank, 0, early);
    __syncwarp();
    if (hinted && threadIdx.x / 32 == 1) {
      const VisibleRow now = visible_row(args, row, LoadNow{});
      if (threadIdx.x == 32)
        shared.planned_right = now.length == shared.visible.length && now.base == shared.visible.base &&
                               now.pages == shared.visible.pages && now.status == shared.visible.status;
    }
    if (threadIdx.x / 32 == kThreads / 32 - 1) {
      const SamplePlan planned = plan_sample<kThreads>(part, args.k);
      if (threadIdx.x == kThreads - 1) shared.sample = planned;
    }
    __syncthreads();
    if (!hinted || shared.planned_right) break;
    first_copies_landed();
    if (threadIdx.x == 0) restart_ring<kThreads>(shared, stages, part.by_strands ? 0 : min(early, part.tiles));
    __syncwarp();
  }

  const int blocks = 1 << part.blocks_log2;
  const FreeMemory memory{reinterpret_cast<uint4*>(lists),
                          static_cast<uint32_t>(plan.slots * kThreads * 8 + plan.stages * kTileBytes<kThreads>)};
  const bool covered = args.k < part.length && memory.covers(args, static_cast<uint32_t>(part.length));
  CompletePool complete{};
  bool guesses = part.guesses;
  if (guesses) {
    guesses = shared.sample.rank != 0;
    if (guesses) {
      uint64_t guess = guess_threshold<kThreads>(shared, part, sample, [&] {
        if (threadIdx.x == 0 && !part.by_strands) ask_for_first_tiles<kThreads>(shared, ring, part, rank, early, stages);
        __syncwarp();
      });
      const uint32_t list = static_cast<uint32_t>(lists - select_keys()) + threadIdx.x;
      PoolPlace own{shared_address(select_keys()), static_cast<uint32_t>(plan.capacity), 0};
      if (blocks > 1) {
        cluster_wait();  // the leader has begun
        own.capacity >>= plan.cluster_log2;
        if (!leader) {
          own.keys = address_in_block(select_keys() + static_cast<uint32_t>(rank) * own.capacity, 0);
          own.barrier = address_in_block(&shared.handed, 0);
        }
      }
      bool together = blocks > 1;
#pragma unroll 1
      for (;;) {
        if (rank == 0 && threadIdx.x < 32 && 4 * part.row_vectors < part.length) offer_edges(plan.capacity, own, guess);
        if (part.by_strands) {
          pick_from_part<kThreads>(part, OwnScores<kThreads>{own_ring, place}, own, guess);
        } else {
          stream_part<kThreads>(shared, ring, part, rank, list, plan, own, guess);
        }
        __syncthreads();
        if (together) {
          if (threadIdx.x == kThreads - 1) hand_over(shared, rank, plan.cluster - blocks + 1, own, guess);
          if (!leader) return;
        }
        bool over;
        bool enough = true;  // keys for a bound
        if (together) {
          if (covered && threadIdx.x < kTailThreads) MemberMap(memory.at, static_cast<uint32_t>(part.length)).clear();
          barrier_wait(&shared.handed, 0);
          PoolFacts facts{};
          if (static_cast<int>(threadIdx.x & 31u) < blocks) facts = shared.pools[threadIdx.x & 31u];
          over = __any_sync(0xFFFFFFFFu, facts.count > own.capacity);
          if (!over && threadIdx.x >= kTailThreads) return;
          const Handed handed = see_pools(facts, plan.cluster_log2, own.capacity);
          guess = handed.highest_guess;
          complete.share = handed.share;
          complete.order_max = handed.order_max;
          complete.extent = static_cast<uint32_t>(plan.capacity);
          // No lists: the others' shares cannot be read.
          enough = handed.held >= static_cast<uint32_t>(args.k) && plan.slots > 0;
          if (args.order == TopkOrder::kByRank) zero_rest(handed, own.capacity);
        } else {
          complete.extent = pool.count;
          complete.share = share_of_run<kTailThreads>(static_cast<int>(complete.extent));
          complete.order_max = pool.order_max;
          over = complete.extent > own.capacity;
          if (covered && !over && threadIdx.x < kTailThreads) MemberMap(memory.at, static_cast<uint32_t>(part.length)).clear();
        }
        complete.low = max(guess, uint64_t{1});
        if (!over) break;
        if (!enough) {
          guesses = false;
          if (threadIdx.x == 0) pool.overflows += 1;
          break;
        }
        // More reached the guess than there is room for. Keys that did are in the pool, and their k-th is a bound.
        shared_written();  // the ring was read and perhaps cleared by threads, and is written by copies again
        __syncthreads();
        guess = block_kth_bound<kThreads>(together ? complete.share : share_of_run<kThreads>(plan.capacity), args.k, 1);
        const bool all_here = part.by_strands && blocks == 1;
        together = false;
        own = PoolPlace{shared_address(select_keys()), static_cast<uint32_t>(plan.capacity), 0};
        __syncthreads();
        if (threadIdx.x == 0) {
          pool.count = 0;
          pool.order_max = 0;
          pool.nan_count = 0;
          pool.absent_count = 0;
          pool.overflows += 1;
        }
        if (!all_here && threadIdx.x == 0) {
          restart_ring<kThreads>(shared, stages, part.by_strands ? 0 : part.tiles);
          shared.part.blocks_log2 = 0;
          shared.part.by_strands = false;
          shared.part.tiles = (part.row_vectors + kTileVectors<kThreads> - 1) / kTileVectors<kThreads>;
          shared_written();
          ask_for_first_tiles<kThreads>(shared, ring, part, 0, 0, stages);
        }
        __syncthreads();
      }
    } else {
      first_copies_landed();
      if (!leader) return;
    }
  }
  if (threadIdx.x >= kTailThreads) return;

  // By what the guess gave; where too few reached it, or nobody could guess, by reading the row slowly and surely.
  Given given{};
#pragma unroll 1
  for (;;) {
    if (!guesses) {
      read_part_slowly<kTailThreads>(part.row, 0, part.length, plan.capacity, args.k, 0);
      complete.extent = pool.count;
      complete.share = share_of_run<kTailThreads>(static_cast<int>(complete.extent));
      complete.low = max(pool.threshold, uint64_t{1});
      complete.order_max = pool.order_max;
      if (covered) MemberMap(memory.at, static_cast<uint32_t>(part.length)).clear();
    }
    uint32_t reaching;
    if (covered) {
      const MemberMap map(memory.at, static_cast<uint32_t>(part.length));
      const AtOnce at_once = give_at_once(args, shared.visible, row, map, complete.share, complete.low, complete.order_max, &given.absent);
      if (at_once.given) {
        given.members = args.k;
        break;
      }
      reaching = at_once.reaching;
    } else {
      reaching = count_reaching(complete.share, complete.low);
    }
    if (!guesses || static_cast<int>(reaching) >= min(args.k, part.length - static_cast<int>(pool.absent_count))) {
      given = give_pool(args, shared.visible, row, static_cast<uint32_t>(part.length), complete, static_cast<int>(reaching), memory);
      break;
    }
    guesses = false;
    if (threadIdx.x == 0) pool.overflows += 1;
  }
  end_row(args, shared.visible, row, given.members, given.absent);
}

int next_power_of_two(int value) {
  int power = 1;
  while (power < value) power <<= 1;
  return power;
}

}  // namespace

int64_t select_topk_shared_bytes(const SelectPlan& plan) {
  return int64_t{sizeof(SelectShared)} + int64_t{plan.capacity} * 8 + int64_t{sizeof(RowShared)} + int64_t{plan.slots} * plan.threads * 8 +
         int64_t{plan.stages} * plan.threads * kStrandsAWarp * 16;
}

SelectPlan plan_select_topk(const SelectTopkArgs& args, const DeviceFacts& facts) {
  const SelectTuning& tuning = select_tuning(facts.major);
  SelectPlan plan;
  // A sample is as small as a fair guess allows: so many of the k best should be in it.
  const int64_t hits = std::max(kSampleHits, args.k / 32);
  plan.sample_log2 = kSamplePieceLog2Min;
  while (plan.sample_log2 < 5 && (int64_t{4 * kSampleStrands} << plan.sample_log2) * args.k < hits * args.length_max) ++plan.sample_log2;
  // A few rows: as many blocks a row as the GPU has room for, so that every multiprocessor reads. Many: one a row.
  const int64_t rows = std::max<int64_t>(args.rows, 1);
  const int cluster_max = rows <= tuning.widest_cluster_rows_max ? tuning.cluster_max : std::min(tuning.cluster_max, 8);
  while (plan.cluster < cluster_max && rows * plan.cluster * 2 <= facts.multiprocessors &&
         args.length_max >= plan.cluster * 2 * tuning.part_entries_min) {
    plan.cluster *= 2;
    plan.cluster_log2 += 1;
  }
  const bool alone = rows * plan.cluster <= facts.multiprocessors;
  const bool whole = alone || args.k > tuning.shared_rows_k_max;  // the multiprocessor to itself
  plan.first_blocks = facts.multiprocessors * (whole ? 1 : 2);
  const int64_t room = whole ? facts.shared_bytes_per_block : tuning.shared_bytes_of_two;
  const int64_t part_bytes = (int64_t{args.length_max} * 4 + plan.cluster - 1) / plan.cluster;
  const auto tile_bytes = [&] { return int64_t{plan.threads} * kStrandsAWarp * 16; };
  const auto tiles_of_part = [&] { return (part_bytes + tile_bytes() - 1) / tile_bytes(); };
  // What all of a block's warps do takes half as long with half of them: little to read is read by few.
  plan.threads = 512;
  if (whole && tiles_of_part() > kStagesMax) plan.threads = 1024;
  for (;; plan.threads = 512) {
    const int least = static_cast<int>(round_up(std::max(next_power_of_two(args.k), args.k + plan.threads), plan.threads));
    // A guess lets about 2.5 k through (k up to 512) or 1.9 k (above), correlated scores more.
    const int least_wanted = whole ? tuning.capacity_min : tuning.shared_capacity_min;
    const int wanted =
        std::max(args.length_max / 1024 > args.k ? least_wanted / 2 * 3 : least_wanted, args.k > 1024 ? args.k * 3 : args.k / 2 * 7);
    plan.capacity = std::max(static_cast<int>(round_up(wanted, plan.threads)), least);
    // All in shared memory at once where it fits, and then no list is needed but to read others' parts again.
    plan.stages = static_cast<int>(std::clamp<int64_t>(tiles_of_part(), 1, kStagesMax));
    plan.slots = 0;
    const bool at_once = tiles_of_part() <= kStagesMax && select_topk_shared_bytes(plan) <= room;
    if (!at_once) plan.stages = 1;
    if (!at_once || plan.cluster > 1) plan.slots = tuning.slots;
    while (select_topk_shared_bytes(plan) > room && plan.capacity - plan.threads >= least) plan.capacity -= plan.threads;
    if (select_topk_shared_bytes(plan) <= room) break;
    if (plan.threads == 512) {
      plan.slots = 0;  // no room for lists: long rows are read slowly
      break;
    }
  }
  const int64_t left = room - select_topk_shared_bytes(plan);
  if (plan.stages < tiles_of_part()) {
    // Deep rings make memory serve multiprocessors the less evenly, the longer it goes on.
    const int64_t stages_wanted = tiles_of_part() >= tuning.long_part_tiles_min ? 3 : kStagesMax;
    plan.stages = static_cast<int>(std::clamp<int64_t>(1 + left / tile_bytes(), 1, std::min(stages_wanted, tiles_of_part())));
  }
  // What room is left lengthens the lists: the longer they are, the fewer times a warp gives them away.
  if (plan.slots > 0) {
    const int64_t more = (room - select_topk_shared_bytes(plan)) / (int64_t{plan.threads} * 8);
    plan.slots = static_cast<int>(std::clamp<int64_t>(plan.slots + more, plan.slots, tuning.slots_max));
  }
  plan.shared_bytes = select_topk_shared_bytes(plan);
  return plan;
}

absl::Status select_topk_cuda_planned(const SelectTopkArgs& args, const SelectPlan& plan, void* stream) {
  absl::Status status = check_select_topk(args);
  if (!status.ok()) return status;
  if (args.rows == 0) return absl::OkStatus();
  const bool possible = (plan.threads == 512 || plan.threads == 1024) && plan.cluster >= 1 && plan.cluster <= kClusterMax &&
                        plan.cluster == 1 << plan.cluster_log2 && plan.stages >= 1 && plan.stages <= kStagesMax &&
                        plan.capacity >= args.k + plan.threads && plan.capacity % plan.threads == 0 &&
                        (plan.slots == 0 || (plan.slots >= 4 && plan.slots <= kSlotsMax)) &&
                        (args.order == TopkOrder::kByPosition || plan.capacity >= next_power_of_two(args.k));
  if (!possible) {
    return absl::InvalidArgumentError(absl::StrCat("select_topk: impossible plan: threads ", plan.threads, ", cluster ", plan.cluster,
                                                   " = 2^", plan.cluster_log2, ", capacity ", plan.capacity, ", slots ", plan.slots,
                                                   ", stages ", plan.stages, " for k = ", args.k));
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.rows) * static_cast<unsigned>(plan.cluster));
  shape.block = dim3(static_cast<unsigned>(plan.threads));
  shape.cluster_x = static_cast<unsigned>(plan.cluster);
  shape.shared_bytes = static_cast<size_t>(select_topk_shared_bytes(plan));
  cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  if (plan.threads == 1024) return launch("select_topk", select_topk_kernel<1024, 1>, shape, cuda_stream, args, plan);
  return launch("select_topk", select_topk_kernel<512, 2>, shape, cuda_stream, args, plan);
}

int64_t select_topk_cuda_scratch(const SelectTopkArgs&) { return 0; }

absl::Status select_topk_cuda(const SelectTopkArgs& args, void*, int64_t, void* stream) {
  absl::Status status = check_select_topk(args);
  if (!status.ok()) return status;
  if (selects_short_rows(args)) return select_short_rows_cuda(args, stream);
  const absl::StatusOr<DeviceFacts> facts = current_device_facts();
  if (!facts.ok()) return facts.status();
  return select_topk_cuda_planned(args, plan_select_topk(args, *facts), stream);
}

}  // namespace needle
