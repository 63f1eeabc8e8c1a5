// The golden files through a twin's store: keys and entries of the public implementation, in every listed chunking, and
// the logits that our own bf16 keys give.
//
// What must stay true:
//  1. Files are told apart by their tensors; a folder in which none is a store's golden fails.
//  2. The tolerance is 2e-5 on the fp32 entry before quantisation, 2e-4 relative norm on logits of our own keys.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "kernels/index_logits.h"
#include "tests/kernels/safetensors.h"
#include "tests/kernels/store_battery.h"

namespace needle::testing {

// One golden file's rows and parameters, and the memory that a store of them touches.
struct GoldenStore {
  std::string name;
  Component component;
  NormKind norm = NormKind::kRms;
  StateForm form = StateForm::kRaw;
  float epsilon = kNormEpsilon;
  int64_t first_position = 0;
  int64_t tokens = 0;
  std::vector<uint16_t> kv;
  std::vector<uint16_t> gate;
  std::vector<float> bias;
  std::vector<float> norm_weight;
  std::vector<float> norm_bias;
  std::vector<float> frequencies;
  std::vector<float> expected;  // [entries, head_dim]

  int64_t entries() const { return tokens / component.ratio; }
};

struct GoldenResult {
  AlignedBytes pool;
  std::vector<int32_t> page_ids;
  int64_t stride = 0;
  int slots = 64;
  std::vector<float> finished;  // [entries, head_dim]
};

inline GoldenResult run_golden(const StoreTwin& twin, const GoldenStore& golden, const std::vector<int64_t>& chunks) {
  const int dims = golden.component.head_dim;
  const int columns = row_halves(golden.component.ratio) * dims;
  GoldenResult result;
  if (golden.component.ratio == 128) result.slots = 2;
  const int64_t pages = div_ceil(golden.entries(), result.slots) + 1;
  result.stride = round_up(layer_page_bytes(golden.component.element, dims, result.slots), kPageAlignment);
  result.pool = AlignedBytes(pages * result.stride);
  for (int64_t page = 0; page < pages; ++page) result.page_ids.push_back(static_cast<int32_t>(pages - 1 - page));
  result.finished.assign(static_cast<size_t>(golden.entries() * dims), std::numeric_limits<float>::quiet_NaN());

  float frequencies[kRopePairs];
  std::copy_n(golden.frequencies.begin(), kRopePairs, frequencies);
  const int64_t positions = golden.first_position + golden.tokens;
  std::vector<float> table(static_cast<size_t>(positions * kRopeDims));
  CallerThread alone;
  EXPECT_TRUE(build_rope_table(frequencies, 0, positions, table.data(), alone).ok());

  StateView state;
  AlignedBytes record;
  OpReport report = {};
  if (golden.component.ratio > 1) {
    state.form = golden.form;
    state.ratio = golden.component.ratio;
    state.head_dim = dims;
    state.stride = state_record_bytes(state.form, state.ratio, dims, 0);
    state.count = 1;
    record = AlignedBytes(state.stride);
    state.base = record.data();
    StateStart start;
    start.sequence = 5;
    start.generation = 1;
    InitStateArgs init;
    init.state = state;
    init.starts = &start;
    init.count = 1;
    init.report = &report;
    EXPECT_TRUE(twin.init(init).ok());
  }
  const int32_t entry_base = static_cast<int32_t>(golden.component.ratio == 1 ? golden.first_position : 0);
  size_t next = 0;
  for (int64_t at = 0; at < golden.tokens;) {
    const int64_t count = std::min(chunks[next++ % chunks.size()], golden.tokens - at);
    StoreSequence sequence;
    sequence.row_count = count;
    sequence.first_position = golden.first_position + at;
    sequence.sequence = 5;
    sequence.generation = 1;
    StoreRowsArgs args;
    args.chain.component = golden.component;
    args.chain.norm = golden.norm;
    args.chain.norm_weight = golden.norm_weight.data();
    args.chain.norm_bias = golden.norm_bias.data();
    args.chain.norm_epsilon = golden.epsilon;
    args.chain.rope = {table.data(), positions};
    args.out = {result.pool.data(), result.stride, pages, result.slots, dims, golden.component.element, golden.component.scale};
    args.pages = {result.page_ids.data(), &entry_base, pages, 1, static_cast<int32_t>(pages)};
    args.kv = {golden.kv.data() + at * columns, columns, RowElement::kBf16};
    if (golden.component.ratio > 1) {
      args.gate = {golden.gate.data() + at * columns, columns, RowElement::kBf16};
      args.position_bias = golden.bias.data();
    }
    args.rows = count;
    args.sequences = &sequence;
    args.sequence_count = 1;
    args.state = state;
    args.report = &report;
    std::vector<float> finished(static_cast<size_t>(count * dims));
    args.finished = finished.data();
    args.finished_stride = dims;
    const absl::Status status = twin.rows(args, 2);
    EXPECT_TRUE(status.ok()) << golden.name << ": " << status;
    for (int64_t i = 0; i < count; ++i) {
      if ((at + i + 1) % golden.component.ratio != 0) continue;
      std::copy_n(finished.begin() + i * dims, dims, result.finished.begin() + (at + i) / golden.component.ratio * dims);
    }
    at += count;
  }
  EXPECT_EQ(report.status, 0u) << golden.name;
  return result;
}

// Every store that the golden folder describes; a window file describes two.
inline std::vector<GoldenStore> golden_stores(const std::vector<SafetensorsFile>& files) {
  std::vector<GoldenStore> stores;
  for (const SafetensorsFile& file : files) {
    GoldenStore store;
    store.name = file.name;
    if (const auto eps = file.metadata.find("eps"); eps != file.metadata.end()) {
      EXPECT_TRUE(absl::SimpleAtof(eps->second, &store.epsilon)) << file.name << " eps " << eps->second;
    }
    if (!file.has("norm_weight")) continue;
    store.norm_weight = file.at("norm_weight").floats();
    const int dims = static_cast<int>(store.norm_weight.size());
    if (file.has("kv") && file.has("gate") && file.has("position_bias") && file.has("rope_inv_freq")) {
      const bool index = file.has("expected_keys");
      const int ratio = static_cast<int>(file.at("position_bias").shape[0]);
      store.component = index ? index_k(ratio, ElementFormat::kBf16) : kv_of(ComponentKind::kMainKv, ratio, ElementFormat::kFp8DsMla);
      store.component.hadamard = false;  // the golden keys are not rotated, nor are their queries
      store.kv = file.at("kv").bf16_bits();
      store.gate = file.at("gate").bf16_bits();
      store.bias = file.at("position_bias").floats();
      store.frequencies = file.at("rope_inv_freq").floats();
      store.tokens = file.at("kv").shape[0];
      store.expected = file.at(index ? "expected_keys" : "expected_entries").floats();
      EXPECT_EQ(store.component.head_dim, dims) << file.name;
      stores.push_back(store);
      if (ratio == 128) {
        store.form = StateForm::kRunning;
        store.name += " (running)";
        stores.push_back(store);
      }
    } else if (file.has("raw_keys") && file.has("norm_bias") && file.has("rope_inv_freq")) {
      store.component = index_k(1, ElementFormat::kBf16);  // half-split on the first 64
      store.component.hadamard = false;
      store.norm = NormKind::kLayer;
      store.norm_bias = file.at("norm_bias").floats();
      store.kv = file.at("raw_keys").bf16_bits();
      store.frequencies = file.at("rope_inv_freq").floats();
      store.tokens = file.at("raw_keys").shape[0];
      store.expected = file.at("expected_keys").floats();
      stores.push_back(store);
    } else if (file.has("raw_kv") && file.has("positions")) {
      store.component = kv_of(ComponentKind::kWindowKv, 1, ElementFormat::kFp8DsMla);
      const std::vector<int64_t> positions = file.at("positions").integers();
      store.first_position = positions.front();
      EXPECT_EQ(positions.back() - positions.front() + 1, static_cast<int64_t>(positions.size())) << file.name;
      store.kv = file.at("raw_kv").bf16_bits();
      store.tokens = file.at("raw_kv").shape[0];
      for (const char* kind : {"main", "compress"}) {
        GoldenStore each = store;
        each.name += std::string(" (") + kind + ")";
        each.frequencies = file.at(std::string("inv_freq_") + kind).floats();
        each.expected = file.at(std::string("expected_") + kind).floats();
        stores.push_back(each);
      }
    }
  }
  return stores;
}

inline void golden_entries_come_out_of_any_chunking(const StoreTwin& twin, const std::vector<SafetensorsFile>& files) {
  const std::vector<GoldenStore> stores = golden_stores(files);
  ASSERT_FALSE(stores.empty()) << "the golden folder holds no raw rows with expected keys or entries";
  for (const GoldenStore& golden : stores) {
    ASSERT_EQ(golden.expected.size(), static_cast<size_t>(golden.entries() * golden.component.head_dim)) << golden.name;
    GoldenResult whole = run_golden(twin, golden, {golden.tokens});
    float worst = 0;
    for (size_t i = 0; i < golden.expected.size(); ++i) {
      ASSERT_FALSE(std::isnan(whole.finished[i])) << golden.name;
      worst = std::max(worst, std::fabs(whole.finished[i] - golden.expected[i]));
    }
    EXPECT_LE(worst, 2e-5f) << golden.name;
    for (const std::vector<int64_t>& chunks :
         std::vector<std::vector<int64_t>>{{1, 2, 3, 1, 4, 5, 127, 129, 640, 588}, {2048, 1, 1, 1, 1, 949}, {1}}) {
      GoldenResult cut = run_golden(twin, golden, chunks);
      EXPECT_TRUE(cut.finished == whole.finished) << golden.name << " in chunks from " << chunks[0];
      EXPECT_TRUE(cut.pool.copy() == whole.pool.copy()) << golden.name << " in chunks from " << chunks[0];
    }
  }
}

inline void logits_of_our_own_keys_match_the_golden_ones(const StoreTwin& twin, const std::vector<SafetensorsFile>& files) {
  int checked = 0;
  for (const SafetensorsFile& file : files) {
    if (!file.has("q") || !file.has("logits_bf16_fp64acc")) continue;
    for (const GoldenStore& golden : golden_stores({file})) {
      GoldenResult keys = run_golden(twin, golden, {golden.tokens});
      const std::vector<uint16_t> q = file.at("q").bf16_bits();
      const std::vector<float> weights = file.at("head_weights").floats();
      const std::vector<int64_t> q_positions = file.at("q_positions").integers();
      const std::vector<float> expected = file.at("logits_bf16_fp64acc").floats();
      const int32_t queries = static_cast<int32_t>(q_positions.size());
      std::vector<int32_t> visible;
      for (int64_t position : q_positions) visible.push_back(static_cast<int32_t>(entries_complete(position + 1, golden.component.ratio)));
      const std::vector<int32_t> query_row(static_cast<size_t>(queries), 0);
      std::vector<float> scores(static_cast<size_t>(queries * golden.entries()));
      IndexLogitsArgs args;
      args.keys = {keys.pool.data(),     keys.stride,     static_cast<int64_t>(keys.page_ids.size()), keys.slots, kIndexHeadDim,
                   ElementFormat::kBf16, ScaleKind::kNone};
      args.pages = {keys.page_ids.data(), nullptr, static_cast<int64_t>(keys.page_ids.size()), 1,
                    static_cast<int32_t>(keys.page_ids.size())};
      args.q = q.data();
      args.head_weights = weights.data();
      args.query_row = query_row.data();
      args.visible = visible.data();
      args.query_count = queries;
      args.heads = static_cast<int32_t>(file.at("head_weights").shape[1]);
      args.entry_count = golden.entries();
      args.scores = scores.data();
      args.score_stride = golden.entries();
      const absl::Status status = index_logits_ref(args);
      ASSERT_TRUE(status.ok()) << status;
      double error = 0;
      double norm = 0;
      for (int32_t t = 0; t < queries; ++t) {
        for (int32_t s = 0; s < visible[static_cast<size_t>(t)]; ++s) {
          const size_t at = static_cast<size_t>(t * golden.entries() + s);
          error += std::pow(static_cast<double>(scores[at]) - static_cast<double>(expected[at]), 2);
          norm += std::pow(static_cast<double>(expected[at]), 2);
        }
      }
      EXPECT_LE(std::sqrt(error / norm), 2e-4) << golden.name;
      ++checked;
    }
  }
  EXPECT_GT(checked, 0) << "the golden folder holds no queries with logits of bf16 keys";
}

}  // namespace needle::testing
