// A row's sample, and the guess that it gives: a rank key that about 2 to 3 k entries reach.
//
// What must stay true:
//  1. No answer depends on the guess: it is checked by whoever uses it. Approximate arithmetic will do.
//  2. All blocks of a cluster plan alike, each with pieces of its own.
#pragma once

#include "kernels/select_topk_part.cuh"

namespace needle {

// Of groups whose bests lie below the k-th key with probability `below`, so many do but for once in 1e5 rows; 0: perhaps none.
__device__ __forceinline__ int rank_of_guess(float groups, float below) {
  const float mean = groups * below;
  const float variance = mean * (1.0f - below);
  return max(0, static_cast<int>(mean - kSampleSigmas * variance * rsqrtf(variance + 1e-6f)));
}

// A group of g scores has its best below the k-th key with probability u = (1 - k/length)^g. Of the groups about
// groups x u do, +- sqrt(groups x u x (1 - u)); the guess is taken so far below that mean that it lies above the
// k-th key about once in 1e5 rows of independent scores. Correlated neighbours only move it down, to more candidates.
// Approximate arithmetic will do: no answer depends on it.
template <int kThreads>
__device__ __forceinline__ SamplePlan plan_sample(const Part& part, int k) {
  const int length = part.length;
  const int vectors = kSampleStrands << part.sample_log2;
  // Who has a vector of it; by strands each has two.
  const int holders = part.by_strands ? kThreads / kPieceVectors * min(part.strand, kPieceVectors) : min(vectors, kThreads);
  const int values_log2_max = part.by_strands || vectors > kThreads ? 3 : 2;
  SamplePlan plan;
  const float entry_share = __fdividef(static_cast<float>(k), static_cast<float>(length));
  // Candidates cost by their number: many groups for many candidates.
  const bool many = k > 512;
  plan.groups_log2 = many ? 7 : 6;
  const float groups = many ? 128.0f : 64.0f;
  const float threads = static_cast<float>(holders) / groups;  // of a group
  const float a_thread = __fdividef(many ? 1.0f : 0.7f, threads * entry_share);
  const int values_log2 = a_thread < 1.0f ? 0 : min(31 - __clz(static_cast<int>(a_thread)), values_log2_max);
  plan.values = 1 << values_log2;
  const float group_scores = threads * static_cast<float>(plan.values);
  const float below = exp2f(group_scores * __log2f(1.0f - entry_share));
  plan.rank = rank_of_guess(groups, below);
  plan.share = 1.0f - exp2f(__fdividef(__log2f(__fdividef(static_cast<float>(plan.rank), groups)), group_scores));
  return plan;
}

// Adds how many of four are smaller than `own`, and 65,536 for each that equals it.
__device__ __forceinline__ void count_against(const uint4& four, uint32_t own, uint32_t* counted) {
  const auto count = [&](uint32_t there) { *counted += there < own ? 1u : there == own ? 65536u : 0u; };
  count(four.x);
  count(four.y);
  count(four.z);
  count(four.w);
}

// This thread's scores of the sample: two vectors at most.
struct OwnSample {
  uint32_t at;    // shared address of the first; the second lies kThreads further on
  bool there[2];  // false: no such vector
  int strand;     // decides with `lane` to which group the scores belong
  int lane;       // of the piece's kGroupsOfPiece or fewer parts
  int lanes_log2;
};
// Of a part by strands: its first tile.
template <int kThreads>
__device__ __forceinline__ OwnSample sample_of_strands(const Part& part, const TilePlace& place, uint32_t ring) {
  const int lane = static_cast<int>(threadIdx.x & 31u);
  const int of_piece = part.strand >= kPieceVectors ? lane / (kPieceVectors / kGroupsOfPiece) : lane * kGroupsOfPiece / part.strand;
  return {ring, {place.left[0] > 0, place.left[1] > 0}, static_cast<int>(threadIdx.x / 32), of_piece, kGroupsOfPieceLog2};
}
// Of a row that is streamed: a piece of each of 64 strands, asked for here. It lies where the lists will.
template <int kThreads>
__device__ __forceinline__ OwnSample ask_for_sample(const Part& part, int rank, uint32_t memory) {
  const int strand_vectors = (part.row_vectors + kSampleStrands - 1) / kSampleStrands;
  const int piece_log2 = part.sample_log2;
  const int in_piece = static_cast<int>(threadIdx.x) & ((1 << piece_log2) - 1);
  OwnSample own;
  own.at = memory + threadIdx.x * 16;
  own.strand = static_cast<int>(threadIdx.x) >> piece_log2;
  own.lanes_log2 = min(piece_log2, kGroupsOfPieceLog2);
  own.lane = in_piece >> (piece_log2 - own.lanes_log2);
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int strand = own.strand + v * (kThreads >> piece_log2);
    const int vector = strand * strand_vectors + (rank << piece_log2) + in_piece;
    own.there[v] = strand < kSampleStrands && vector < part.row_vectors;
    if (own.there[v]) copy_vector(own.at + v * kThreads * 16, part.vectors + vector);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");  // there is no other group, as copies_landed() counts them
  return own;
}

// A rank key that about 2 to 3 k entries reach, for every thread, from the sample. A group's pieces are spread over the whole
// row, so that groups are alike however scores drift with position, and a run of high scores is in few of them. Where groups
// agree on the guess's score, the sample tells what share of its equals is wanted; spread evenly over the row, that share lies
// before a position. `when_back` is called once this thread's scores are back. Two block barriers, or three.
template <int kThreads, class WhenBack>
__device__ __forceinline__ uint64_t guess_threshold(RowShared& shared, const Part& part, const OwnSample& sample,
                                                    const WhenBack& when_back) {
  const SamplePlan plan = shared.sample;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float none = __uint_as_float(kAbsentScoreBits);
  copies_landed<false>();
  when_back();
  float4 first = load_shared_vector(sample.at);
  float4 second = load_shared_vector(sample.at + kThreads * 16);
  if (!sample.there[0]) first = float4{none, none, none, none};
  if (!sample.there[1]) second = float4{none, none, none, none};
  float best = first.x;  // fmaxf() ignores NaN
  if (plan.values >= 2) best = fmaxf(best, first.y);
  if (plan.values >= 4) best = fmaxf(best, fmaxf(first.z, first.w));
  if (plan.values >= 8) best = fmaxf(best, fmaxf(fmaxf(second.x, second.y), fmaxf(second.z, second.w)));
  const uint32_t best_order = order_bits_of(best);
  const int classes = (1 << plan.groups_log2) >> sample.lanes_log2;  // of strands
  const int group_here = (sample.strand & (classes - 1)) << sample.lanes_log2 | sample.lane;
  if (best_order != 0) {
    max_to_word(shared_address(&shared.group_best[group_here]), best_order);
  }
  __syncthreads();
  if (threadIdx.x < kRankThreads) {
    // Rank of each group's best among all, by four or eight neighbouring threads.
    const int sharers_log2 = kRankThreadsLog2 - plan.groups_log2;
    const int sharer = static_cast<int>(threadIdx.x) & ((1 << sharers_log2) - 1);
    const int group = static_cast<int>(threadIdx.x) >> sharers_log2;
    const uint32_t own = shared.group_best[group];
    const uint4* const bests = reinterpret_cast<const uint4*>(shared.group_best);
    uint32_t counted = 0;
#pragma unroll 2
    for (int other = sharer; other < (1 << plan.groups_log2) / 4; other += 1 << sharers_log2) count_against(bests[other], own, &counted);
    counted += __shfl_xor_sync(0xFFFFFFFFu, counted, 1);
    counted += __shfl_xor_sync(0xFFFFFFFFu, counted, 2);
    if (sharers_log2 == 3) counted += __shfl_xor_sync(0xFFFFFFFFu, counted, 4);
    const int smaller = static_cast<int>(counted % 65536u);
    const int equal = static_cast<int>(counted / 65536u);
    if (sharer == 0 && smaller < plan.rank && plan.rank <= smaller + equal) {  // equal ones say the same
      shared.guess_order = own;
      shared.guess_ties = static_cast<uint32_t>(equal);
    }
  }
  __syncthreads();
  const uint32_t order = shared.guess_order;
  uint32_t before = 0xFFFFFFFFu;  // of scores that equal the guess's, those up to here are in
  if (order != 0 && shared.guess_ties > 1) {
    const float score[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    uint32_t above = 0;
    uint32_t equal = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t there = order_bits_of(score[i]);
      above += there > order ? 1u : 0u;
      equal += there == order ? 1u : 0u;
    }
    above = __reduce_add_sync(0xFFFFFFFFu, above);
    equal = __reduce_add_sync(0xFFFFFFFFu, equal);
    const uint32_t all = __reduce_add_sync(0xFFFFFFFFu, (sample.there[0] ? 4u : 0u) + (sample.there[1] ? 4u : 0u));
    if (lane == 0) {
      atomicAdd(&shared.sampled.above, above);
      atomicAdd(&shared.sampled.equal, equal);
      atomicAdd(&shared.sampled.all, all);
    }
    __syncthreads();
    const SampleCount sampled = shared.sampled;
    const float wanted = plan.share * static_cast<float>(sampled.all) - static_cast<float>(sampled.above);
    const float share = __fdividef(fmaxf(wanted, 0.0f), static_cast<float>(max(sampled.equal, 1u)));
    if (share < 1.0f) before = static_cast<uint32_t>(share * static_cast<float>(part.length));
  }
  return static_cast<uint64_t>(order) << 32 | (0xFFFFFFFFu - before);
}

}  // namespace needle
