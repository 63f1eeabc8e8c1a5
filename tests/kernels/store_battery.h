// The battery of store, compressor state and commit: every case that a twin must pass, written once and run by the
// references, by every CPU instruction set and by the CUDA twin.
//
// What must stay true:
//  1. A case takes a twin and nothing else. Arguments are host memory; a twin that lives elsewhere copies them there and
//     its outputs back (pages, records, boundary records, finished entries, report).
//  2. Numbers are held against the reference; chunking, speculation, resume, neighbours and threads are held against the
//     same twin, byte for byte.
//  3. Pools start out poisoned where a case is about what is written, and zero where it is about what is taken back.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/rng.h"
#include "base/units.h"
#include "base/workers.h"
#include "kernels/compressor_state.h"
#include "kernels/store.h"
#include "tests/counts.h"
#include "tests/kernels/stored_values.h"

namespace needle::testing {

struct StoreTwin {
  std::string name;
  // A host twin refuses a bad id and writes nothing; a device twin skips that entry alone.
  bool refuses_bad_ids = true;
  // Reads and writes the pool where it lies in host memory: it can be given a sparse pool of 68 GiB.
  bool works_in_host_memory = true;
  // Pools in doubles where the state is raw, so that raw and running state agree closely, not bit for bit.
  bool pools_in_double = false;
  // `threads` is what a CPU twin runs with; others may take it as another grid, or ignore it.
  std::function<absl::Status(const StoreRowsArgs& args, int threads)> rows;
  std::function<absl::Status(const StorePooledArgs& args, int threads)> pooled;
  std::function<absl::Status(const InitStateArgs& args)> init;
  std::function<absl::Status(const CommitStateArgs& args)> commit;
};

struct StoreCase {
  const char* name;
  void (*run)(const StoreTwin& twin);
};

// Bytes that begin on a page's alignment.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t bytes = 0, uint8_t fill = 0)
      : bytes_(bytes), storage_(static_cast<size_t>(bytes + kPageAlignment), static_cast<std::byte>(fill)) {}
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  AlignedBytes(AlignedBytes&&) = default;
  AlignedBytes& operator=(AlignedBytes&&) = default;

  std::byte* data() {
    const uintptr_t address = reinterpret_cast<uintptr_t>(storage_.data());
    return storage_.data() + (round_up(static_cast<int64_t>(address), kPageAlignment) - static_cast<int64_t>(address));
  }
  int64_t size() const { return bytes_; }
  std::vector<std::byte> copy() { return std::vector<std::byte>(data(), data() + bytes_); }

 private:
  int64_t bytes_;
  std::vector<std::byte> storage_;
};

// ---------------------------------------------------------------------------------------------------------- components

inline Component index_k(int ratio, ElementFormat element, ScaleKind scale = ScaleKind::kNone) {
  Component component;
  component.kind = ComponentKind::kIndexK;
  component.layers = 1;
  component.ratio = ratio;
  component.element = element;
  component.scale = scale;
  component.head_dim = 128;
  component.rope = ratio == 1 ? RopeStyle::kHalfSplitFirst64 : RopeStyle::kInterleavedLast64;
  component.hadamard = true;
  return component;
}

inline Component kv_of(ComponentKind kind, int ratio, ElementFormat element) {
  Component component;
  component.kind = kind;
  component.layers = 1;
  component.ratio = ratio;
  component.element = element;
  component.scale = element == ElementFormat::kFp8DsMla ? ScaleKind::kPowerOfTwo
                    : element == ElementFormat::kFp8V32 ? ScaleKind::kAmax
                                                        : ScaleKind::kNone;
  component.head_dim = element == ElementFormat::kFp8V32 ? 576 : 512;
  component.rope = RopeStyle::kInterleavedLast64;
  return component;
}

inline const std::vector<Component>& all_stored_components() {
  static const std::vector<Component> kAll = [] {
    std::vector<Component> all;
    for (int ratio : {1, 4}) {
      all.push_back(index_k(ratio, ElementFormat::kBf16));
      for (ScaleKind scale : {ScaleKind::kAmax, ScaleKind::kAmaxReciprocal, ScaleKind::kPowerOfTwo}) {
        all.push_back(index_k(ratio, ElementFormat::kFp8, scale));
      }
      all.push_back(index_k(ratio, ElementFormat::kFp4, ScaleKind::kPowerOfTwo));
    }
    for (ElementFormat element : {ElementFormat::kBf16, ElementFormat::kFp8DsMla}) {
      all.push_back(kv_of(ComponentKind::kMainKv, 4, element));
      all.push_back(kv_of(ComponentKind::kMainKv, 128, element));
      all.push_back(kv_of(ComponentKind::kWindowKv, 1, element));
    }
    all.push_back(kv_of(ComponentKind::kMainKv, 1, ElementFormat::kFp8V32));
    Component wide = kv_of(ComponentKind::kMainKv, 1, ElementFormat::kBf16);  // V3.2's latent and RoPE, in bf16
    wide.head_dim = 576;
    all.push_back(wide);
    return all;
  }();
  return kAll;
}

inline std::string describe(const Component& component) {
  return std::string(name_of(component.kind)) + " ratio " + std::to_string(component.ratio) + " " + name_of(component.element) + " " +
         name_of(component.scale) + " of " + std::to_string(component.head_dim);
}

// --------------------------------------------------------------------------------------------------------------- world

struct StoreShape {
  Component component;
  NormKind norm = NormKind::kRms;
  RoundingMode rounding = RoundingMode::kOnce;
  StateForm form = StateForm::kRaw;
  int speculative_rows = 0;
  RowElement element = RowElement::kBf16;
  int slots = 8;
  int sequences = 1;
  int tokens = 64;
  uint8_t fill = 0;  // of the pool
};

struct Piece {
  int sequence = 0;
  int64_t first = 0;
  int64_t count = 0;
};

struct CallOptions {
  bool speculative = false;
  int threads = 1;
  std::vector<StoreBoundary> boundaries;
};

// Some sequences, their raw rows, and all memory that a store touches. Two worlds of equal shape and seed differ in
// nothing but what was done to them. Fields may be changed before a call.
class StoreWorld {
 public:
  StoreWorld(const StoreShape& wanted, uint64_t seed)
      : shape(wanted), dims(wanted.component.head_dim), columns(row_halves(wanted.component.ratio) * dims) {
    Rng rng(seed);
    const auto normal = [&rng] { return static_cast<float>(rng.unit() + rng.unit() + rng.unit() + rng.unit() - 2) * 1.7f; };
    const size_t count = static_cast<size_t>(shape.sequences) * static_cast<size_t>(shape.tokens) * static_cast<size_t>(columns);
    kv.resize(count);
    gate.resize(shape.component.ratio > 1 ? count : 0);
    for (float& value : kv) value = round_to_bf16(normal());
    for (float& value : gate) value = round_to_bf16(2.0f * normal());
    for (int i = 0; i < shape.component.ratio * columns; ++i) bias.push_back(normal());
    for (int i = 0; i < norm_dims(dims); ++i) {
      norm_weight.push_back(1.0f + 0.25f * normal());
      norm_bias.push_back(0.25f * normal());
    }
    float frequencies[kRopePairs];
    EXPECT_TRUE(rope_inverse_frequencies({160000, 16, 65536, 32, 1}, frequencies).ok());
    CallerThread alone;
    table.resize(static_cast<size_t>((shape.tokens + 16) * kRopeDims));
    EXPECT_TRUE(build_rope_table(frequencies, 0, shape.tokens + 16, table.data(), alone).ok());

    // Pages in a shuffled order, one page of the pool never used; a stride that is more than the layer needs.
    pages_per_row = static_cast<int>(div_ceil(div_ceil(shape.tokens, shape.component.ratio) + 1, shape.slots));
    page_count = shape.sequences * pages_per_row + 1;
    stride = round_up(layer_page_bytes(shape.component.element, dims, shape.slots), kPageAlignment) + kPageAlignment;
    pool = AlignedBytes(stride * page_count, shape.fill);
    page_ids.resize(static_cast<size_t>(page_count));
    std::iota(page_ids.begin(), page_ids.end(), 0);
    for (size_t i = page_ids.size(); i > 1; --i) std::swap(page_ids[i - 1], page_ids[rng.below(i)]);

    if (shape.component.ratio > 1) {
      state.form = shape.form;
      state.ratio = shape.component.ratio;
      state.head_dim = dims;
      state.speculative_rows = shape.speculative_rows;
      state.stride = round_up(state_record_bytes(state.form, state.ratio, dims, state.speculative_rows), 256);
      state.count = shape.sequences;
      records = AlignedBytes(state.stride * state.count, 0xEE);
      state.base = records.data();
    }
    boundaries.stride = boundary_record_bytes(dims);
    boundaries.count = 16;
    boundary_bytes = AlignedBytes(boundaries.stride * boundaries.count, 0xEE);
    boundaries.base = boundary_bytes.data();
  }

  uint64_t sequence_id(int s) const { return 1000 + static_cast<uint64_t>(s); }

  MutableLayerView view() { return {pool.data(), stride, page_count, shape.slots, dims, shape.component.element, shape.component.scale}; }
  PageTableView pages() const {
    return {page_ids.data(), entry_base.empty() ? nullptr : entry_base.data(), pages_per_row, shape.sequences, pages_per_row};
  }
  EntryChain chain() const {
    EntryChain result;
    result.component = shape.component;
    result.norm = shape.norm;
    result.rounding = shape.rounding;
    result.norm_weight = norm_weight.data();
    result.norm_bias = norm_bias.data();
    result.rope = {table.data(), static_cast<int64_t>(table.size()) / kRopeDims};
    return result;
  }
  std::byte* slot_of(int sequence, int64_t entry, std::byte** scale = nullptr) {
    const int64_t page = page_ids[static_cast<size_t>(sequence * pages_per_row + entry / shape.slots)];
    const SlotPlace place = slot_place(shape.component.element, dims, shape.slots, entry % shape.slots);
    std::byte* base = pool.data() + page * stride;
    if (scale != nullptr) *scale = base + place.scale;
    return base + place.data;
  }

  absl::Status start(const StoreTwin& twin, int sequence, int64_t position = 0, int64_t boundary = -1) {
    if (shape.component.ratio == 1) return absl::OkStatus();
    StateStart begin;
    begin.record = sequence;
    begin.sequence = sequence_id(sequence);
    begin.generation = 7;
    begin.position = position;
    begin.boundary_record = boundary;
    InitStateArgs args;
    args.state = state;
    args.boundaries = boundaries;
    args.starts = &begin;
    args.count = 1;
    args.report = &report;
    return twin.init(args);
  }
  void start_all(const StoreTwin& twin) {
    for (int s = 0; s < shape.sequences; ++s) ASSERT_TRUE(start(twin, s).ok());
  }

  absl::Status store(const StoreTwin& twin, const std::vector<Piece>& pieces, const CallOptions& options = {}) {
    // The call's own rows: a stride wider than the row, a gap between sequences, NaN in every byte nobody should read.
    int64_t rows = gap;
    for (const Piece& piece : pieces) rows += piece.count + gap;
    const int64_t row_stride = columns + row_padding;
    std::vector<float> call_kv(static_cast<size_t>(rows * row_stride), std::numeric_limits<float>::quiet_NaN());
    std::vector<float> call_gate = call_kv;
    std::vector<StoreSequence> call;
    int64_t row = gap;
    for (const Piece& piece : pieces) {
      StoreSequence sequence;
      sequence.row_begin = row;
      sequence.row_count = piece.count;
      sequence.first_position = piece.first;
      sequence.record = piece.sequence;
      sequence.sequence = sequence_id(piece.sequence) + wrong_sequence;
      sequence.generation = 7 + wrong_generation;
      sequence.table_row = piece.sequence;
      call.push_back(sequence);
      for (int64_t i = 0; i < piece.count; ++i, ++row) {
        const int64_t from = (int64_t{piece.sequence} * shape.tokens + piece.first + i) * columns;
        std::copy_n(kv.begin() + from, columns, call_kv.begin() + row * row_stride);
        if (!gate.empty()) std::copy_n(gate.begin() + from, columns, call_gate.begin() + row * row_stride);
      }
      row += gap;
    }
    StoreSequence padding;
    padding.row_begin = rows;
    padding.record = -5;
    padding.table_row = -5;
    call.push_back(padding);

    std::vector<uint16_t> narrow_kv;
    std::vector<uint16_t> narrow_gate;
    StoreRowsArgs args;
    args.chain = chain();
    args.out = view();
    args.pages = pages();
    if (shape.element == RowElement::kBf16) {
      for (float value : call_kv) narrow_kv.push_back(bf16_of(value));
      for (float value : call_gate) narrow_gate.push_back(bf16_of(value));
      args.kv = {narrow_kv.data(), row_stride, RowElement::kBf16};
      args.gate = {narrow_gate.data(), row_stride, RowElement::kBf16};
    } else {
      args.kv = {call_kv.data(), row_stride, RowElement::kFp32};
      args.gate = {call_gate.data(), row_stride, RowElement::kFp32};
    }
    if (shape.component.ratio == 1) {
      args.gate = {};
    } else {
      args.position_bias = bias.data();
    }
    args.rows = rows;
    args.sequences = call.data();
    args.sequence_count = static_cast<int32_t>(call.size());
    args.state = state;
    args.speculative = options.speculative;
    args.boundaries = boundaries;
    args.boundary_requests = options.boundaries.data();
    args.boundary_count = static_cast<int32_t>(options.boundaries.size());
    std::vector<float> call_finished(static_cast<size_t>(rows * dims), kUnfinished);
    args.finished = call_finished.data();
    args.finished_stride = dims;
    args.report = &report;
    const absl::Status status = twin.rows(args, options.threads);
    if (!status.ok()) return status;
    for (const StoreSequence& sequence : call) {
      for (int64_t i = 0; i < sequence.row_count; ++i) {
        const float* from = call_finished.data() + (sequence.row_begin + i) * dims;
        if (from[0] == kUnfinished) continue;
        const int64_t entry = (sequence.first_position + i) / shape.component.ratio;
        EXPECT_EQ((sequence.first_position + i + 1) % shape.component.ratio, 0) << "an entry before its last token";
        finished[{sequence.table_row, entry}] = std::vector<float>(from, from + dims);
      }
    }
    return status;
  }

  absl::Status commit(const StoreTwin& twin, int sequence, int64_t committed, int ahead, int accepted) {
    StateCommit decision;
    decision.record = shape.component.ratio > 1 ? sequence : 0;
    decision.sequence = sequence_id(sequence);
    decision.generation = 7;
    decision.committed = committed;
    decision.ahead = ahead;
    decision.accepted = accepted;
    decision.table_row = sequence;
    CommitStateArgs args;
    args.ratio = shape.component.ratio;
    args.state = state;
    args.out = view();
    args.pages = pages();
    args.position_bias = bias.data();
    args.commits = &decision;
    args.count = 1;
    args.report = &report;
    return twin.commit(args);
  }

  // Every sequence from its first token to its last, in chunks of the given lengths (repeated as needed).
  void run(const StoreTwin& twin, const std::vector<int>& chunks, const CallOptions& options = {}) {
    start_all(twin);
    size_t next = 0;
    for (int64_t at = 0; at < shape.tokens;) {
      const int64_t count = std::min<int64_t>(chunks[next++ % chunks.size()], shape.tokens - at);
      std::vector<Piece> pieces;
      for (int s = 0; s < shape.sequences; ++s) pieces.push_back({s, at, count});
      const absl::Status status = store(twin, pieces, options);
      ASSERT_TRUE(status.ok()) << status;
      at += count;
    }
  }

  int64_t entries() const { return shape.tokens / shape.component.ratio; }

  static constexpr float kUnfinished = -12345.678f;

  StoreShape shape;
  int dims;
  int columns;
  std::vector<float> kv;    // [sequences, tokens, columns]
  std::vector<float> gate;  // the same; empty for ratio 1
  std::vector<float> bias;
  std::vector<float> norm_weight;
  std::vector<float> norm_bias;
  std::vector<float> table;
  std::vector<int32_t> page_ids;    // [sequences, pages_per_row] and one page that no sequence has
  std::vector<int32_t> entry_base;  // [sequences]; empty: 0
  int pages_per_row = 0;
  int page_count = 0;
  int64_t stride = 0;
  AlignedBytes pool;
  AlignedBytes records;
  StateView state;
  AlignedBytes boundary_bytes;
  BoundaryView boundaries;
  OpReport report = {};
  int64_t gap = 3;  // rows before, between and behind the sequences of a call
  int64_t row_padding = 8;
  uint64_t wrong_sequence = 0;  // added to the right one
  uint32_t wrong_generation = 0;
  std::map<std::pair<int, int64_t>, std::vector<float>> finished;  // (sequence, entry) -> before quantisation
};

inline StoreTwin reference_store() {
  return {"ref",
          true,
          true,
          true,
          [](const StoreRowsArgs& args, int) { return store_rows_ref(args); },
          [](const StorePooledArgs& args, int) { return store_pooled_ref(args); },
          [](const InitStateArgs& args) { return init_state_ref(args); },
          [](const CommitStateArgs& args) { return commit_state_ref(args); }};
}

inline void expect_same_bytes(StoreWorld& one, StoreWorld& other, const std::string& what) {
  EXPECT_TRUE(one.pool.copy() == other.pool.copy()) << what << ": pages differ";
  EXPECT_TRUE(one.records.copy() == other.records.copy()) << what << ": state records differ";
}

// --------------------------------------------------------------------------------------------------------------- cases

inline StoreShape shape_of(const Component& component, int groups, int more = 0) {
  StoreShape shape;
  shape.component = component;
  shape.tokens = groups * component.ratio + more;
  return shape;
}

// Every stored number of `world` against the reference's entry before quantisation.
inline void expect_stored_near(StoreWorld& world, StoreWorld& truth, int64_t* values, int64_t* beyond) {
  for (const auto& [place, finished] : truth.finished) {
    std::vector<float> entry = finished;
    if (world.shape.rounding == RoundingMode::kVllm) {  // its one stage rounding lies between the two
      for (float& value : entry) value = round_to_bf16(value);
    }
    std::byte* scale = nullptr;
    const std::byte* data = world.slot_of(place.first, place.second, &scale);
    const StoredRow stored = read_stored(world.shape.component, world.shape.rounding, data, scale, entry);
    float largest = 0;
    for (float value : entry) largest = std::max(largest, std::fabs(value));
    for (int c = 0; c < world.dims; ++c) {
      const double error = std::fabs(stored.values[c] - static_cast<double>(entry[c]));
      const double allowed = 0.5 * stored.steps[c] + 4e-6 * static_cast<double>(largest);
      ++*values;
      if (error <= allowed) continue;
      ++*beyond;
      EXPECT_LE(error, allowed + 2 * stored.steps[c])
          << describe(world.shape.component) << " entry " << place.second << " channel " << c << ": stored " << stored.values[c]
          << ", reference " << entry[c] << ", step " << stored.steps[c];
    }
  }
}

inline void stored_values_lie_within_half_a_step(const StoreTwin& twin) {
  for (const Component& component : all_stored_components()) {
    for (RowElement element : {RowElement::kBf16, RowElement::kFp32}) {
      for (NormKind norm : {NormKind::kRms, NormKind::kLayer, NormKind::kNone}) {
        StoreShape shape = shape_of(component, component.ratio == 128 ? 2 : 12, component.ratio - 1);
        shape.element = element;
        shape.norm = norm;
        shape.form = component.ratio == 128 && element == RowElement::kFp32 ? StateForm::kRunning : StateForm::kRaw;
        StoreWorld world(shape, 11);
        StoreWorld truth(shape, 11);
        world.run(twin, {shape.tokens});
        truth.run(reference_store(), {shape.tokens});
        ASSERT_EQ(static_cast<int64_t>(truth.finished.size()), truth.entries());
        int64_t values = 0;
        int64_t beyond = 0;
        expect_stored_near(world, truth, &values, &beyond);
        EXPECT_EQ(beyond, 0) << describe(component) << " norm " << static_cast<int>(norm);
        EXPECT_EQ(world.report.status, 0u);
        for (const auto& [place, entry] : truth.finished) {
          const auto mine = world.finished.find(place);
          ASSERT_NE(mine, world.finished.end());
          for (int c = 0; c < world.dims; ++c) ASSERT_NEAR(mine->second[c], entry[c], 2e-5);
        }
      }
    }
  }
}

inline void stage_rounded_values_lie_within_half_a_step_but_for_one_in_a_hundred(const StoreTwin& twin) {
  for (const Component& component : all_stored_components()) {
    for (RoundingMode rounding : {RoundingMode::kRefV4, RoundingMode::kVllm}) {
      if (rounding == RoundingMode::kVllm && component.element == ElementFormat::kFp8 && component.scale != ScaleKind::kPowerOfTwo) {
        continue;  // refused: see unsupported_formats_are_refused_with_a_reason
      }
      StoreShape shape = shape_of(component, component.ratio == 128 ? 3 : 24);
      shape.rounding = rounding;
      StoreWorld world(shape, 12);
      StoreWorld truth(shape, 12);
      world.run(twin, {shape.tokens});
      truth.run(reference_store(), {shape.tokens});
      int64_t values = 0;
      int64_t beyond = 0;
      expect_stored_near(world, truth, &values, &beyond);
      EXPECT_LE(beyond * 100, values) << describe(component) << " rounding " << static_cast<int>(rounding);
    }
  }
}

inline void rounding_modes_differ_where_they_should(const StoreTwin& twin) {
  const auto pages_in = [&](const Component& component, RoundingMode rounding) {
    StoreShape shape = shape_of(component, 8);
    shape.rounding = rounding;
    StoreWorld world(shape, 13);
    world.run(twin, {shape.tokens});
    return world.pool.copy();
  };
  for (const Component& component : {index_k(4, ElementFormat::kBf16), kv_of(ComponentKind::kMainKv, 4, ElementFormat::kFp8DsMla)}) {
    EXPECT_NE(pages_in(component, RoundingMode::kOnce), pages_in(component, RoundingMode::kRefV4));
    if (component.element != ElementFormat::kBf16) {
      EXPECT_NE(pages_in(component, RoundingMode::kOnce), pages_in(component, RoundingMode::kVllm));
    }
  }
  // Inside a bf16 container the trained form leaves at most fifteen magnitudes and zero in a block of 32 (fp4).
  StoreShape shape = shape_of(index_k(4, ElementFormat::kBf16), 4);
  shape.rounding = RoundingMode::kRefV4;
  StoreWorld world(shape, 13);
  world.run(twin, {shape.tokens});
  for (int64_t entry = 0; entry < world.entries(); ++entry) {
    const uint16_t* key = reinterpret_cast<const uint16_t*>(world.slot_of(0, entry));
    for (int block = 0; block < 128; block += 32) {
      std::vector<uint16_t> magnitudes;
      for (int i = 0; i < 32; ++i) magnitudes.push_back(key[block + i] & 0x7FFFu);
      std::sort(magnitudes.begin(), magnitudes.end());
      magnitudes.erase(std::unique(magnitudes.begin(), magnitudes.end()), magnitudes.end());
      EXPECT_LE(magnitudes.size(), 8u);
    }
  }
}

inline std::vector<StoreShape> shapes_with_state() {
  std::vector<StoreShape> shapes;
  StoreShape shape = shape_of(index_k(4, ElementFormat::kBf16), 37, 3);
  shapes.push_back(shape);
  shape = shape_of(kv_of(ComponentKind::kMainKv, 4, ElementFormat::kFp8DsMla), 19, 1);
  shapes.push_back(shape);
  shape = shape_of(kv_of(ComponentKind::kMainKv, 128, ElementFormat::kFp8DsMla), 2, 77);
  shape.slots = 2;
  shapes.push_back(shape);
  shape.form = StateForm::kRunning;
  shape.element = RowElement::kFp32;
  shapes.push_back(shape);
  return shapes;
}

inline void any_chunking_gives_the_same_bytes(const StoreTwin& twin) {
  for (const StoreShape& shape : shapes_with_state()) {
    StoreWorld whole(shape, 21);
    whole.run(twin, {shape.tokens});
    for (const std::vector<int>& chunks : std::vector<std::vector<int>>{{1}, {1, 2, 3, 1, 4, 5, 127, 129}, {7}, {4}, {128, 1}}) {
      StoreWorld cut(shape, 21);
      cut.run(twin, chunks);
      expect_same_bytes(whole, cut, describe(shape.component) + " in chunks from " + std::to_string(chunks[0]));
      EXPECT_TRUE(whole.finished == cut.finished);
    }
  }
  Rng rng(22);
  for (int64_t round = 0; round < count_of("store_chunkings"); ++round) {
    const std::vector<StoreShape> shapes = shapes_with_state();
    StoreShape shape = shapes[rng.below(shapes.size())];
    shape.tokens = static_cast<int>(rng.between(1, shape.component.ratio == 128 ? 400 : 90));
    shape.sequences = static_cast<int>(rng.between(1, 3));
    std::vector<int> chunks;
    for (int i = 0; i < 9; ++i) chunks.push_back(static_cast<int>(rng.chance(0.3) ? 1 : rng.between(1, 70)));
    StoreWorld whole(shape, 23 + static_cast<uint64_t>(round));
    StoreWorld cut(shape, 23 + static_cast<uint64_t>(round));
    whole.run(twin, {shape.tokens});
    cut.run(twin, chunks);
    expect_same_bytes(whole, cut, describe(shape.component));
  }
}

// Rows side by side and rows apart; calls that begin at, before and within a group.
inline void long_runs_of_rows_give_the_bytes_of_short_ones(const StoreTwin& twin) {
  for (const Component& component : {index_k(4, ElementFormat::kBf16), kv_of(ComponentKind::kMainKv, 4, ElementFormat::kFp8DsMla)}) {
    for (const RowElement element : {RowElement::kBf16, RowElement::kFp32}) {
      StoreShape shape = shape_of(component, 175, 1);
      shape.element = element;
      StoreWorld truth(shape, 24);
      truth.run(reference_store(), {shape.tokens});
      StoreWorld small(shape, 24);
      small.run(twin, {9});
      for (const int64_t padding : {0, 16}) {
        for (const std::vector<int>& chunks : std::vector<std::vector<int>>{{701}, {5, 300, 396}, {400, 301}}) {
          StoreWorld large(shape, 24);
          large.gap = 0;
          large.row_padding = padding;
          large.run(twin, chunks);
          const std::string what = describe(component) + ", rows " + std::to_string(padding) + " apart, from " + std::to_string(chunks[0]);
          expect_same_bytes(small, large, what);
          EXPECT_TRUE(small.finished == large.finished) << what;
          int64_t values = 0;
          int64_t beyond = 0;
          expect_stored_near(large, truth, &values, &beyond);
          EXPECT_EQ(beyond, 0) << what;
        }
      }
    }
  }
}

// One call with all of a sequence's rows and no others.
inline void expect_run_pooled_right(const StoreTwin& twin, const StoreShape& shape) {
  StoreWorld truth(shape, 25);
  truth.run(reference_store(), {shape.tokens});
  StoreWorld world(shape, 25);
  world.gap = 0;
  world.run(twin, {shape.tokens});
  int64_t values = 0;
  int64_t beyond = 0;
  expect_stored_near(world, truth, &values, &beyond);
  EXPECT_EQ(beyond, 0) << describe(shape.component);
}

// Short, and longer than a ring of rows: small enough for a tool that watches every access.
inline void a_run_of_rows_is_pooled_right(const StoreTwin& twin) {
  for (const Component& component : {index_k(4, ElementFormat::kBf16), kv_of(ComponentKind::kMainKv, 4, ElementFormat::kFp8DsMla)}) {
    expect_run_pooled_right(twin, shape_of(component, component.head_dim == 128 ? 60 : 30, 1));
  }
}

inline void raw_and_running_state_give_the_same_pages(const StoreTwin& twin) {
  for (const std::vector<int>& chunks : std::vector<std::vector<int>>{{1000}, {1}, {5, 131, 60}}) {
    StoreShape shape = shape_of(kv_of(ComponentKind::kMainKv, 128, ElementFormat::kBf16), 3, 9);
    StoreWorld raw(shape, 31);
    shape.form = StateForm::kRunning;
    StoreWorld running(shape, 31);
    raw.run(twin, chunks);
    running.run(twin, chunks);
    if (!twin.pools_in_double) {
      EXPECT_TRUE(raw.pool.copy() == running.pool.copy());
      EXPECT_TRUE(raw.finished == running.finished);
      continue;
    }
    for (const auto& [place, entry] : raw.finished) {
      for (size_t c = 0; c < entry.size(); ++c) EXPECT_NEAR(running.finished[place][c], entry[c], 4e-6);
    }
  }
}

// A run in which tokens are written ahead, guesses among them, and decided again and again.
inline void rejected_tokens_leave_no_trace(const StoreTwin& twin) {
  Rng rng(41);
  for (int64_t round = 0; round < count_of("store_speculations"); ++round) {
    std::vector<StoreShape> shapes = shapes_with_state();
    shapes.push_back(shape_of(kv_of(ComponentKind::kWindowKv, 1, ElementFormat::kFp8DsMla), 40));
    shapes.push_back(shape_of(index_k(1, ElementFormat::kFp8, ScaleKind::kAmax), 40));
    shapes.push_back(shape_of(index_k(4, ElementFormat::kFp4, ScaleKind::kPowerOfTwo), 20));
    StoreShape shape = shapes[static_cast<size_t>(round) % shapes.size()];
    shape.speculative_rows = static_cast<int>(rng.between(1, kSpeculativeRowsMax));
    shape.tokens = shape.component.ratio == 128 ? 280 : 40;
    StoreWorld ahead(shape, 42 + static_cast<uint64_t>(round));
    StoreWorld plain(shape, 42 + static_cast<uint64_t>(round));
    StoreWorld guesses(shape, 9000 + static_cast<uint64_t>(round));
    ahead.start_all(twin);
    plain.start_all(twin);

    int64_t at = shape.component.ratio == 128 ? rng.between(100, 127) : 0;
    if (at > 0) {
      ASSERT_TRUE(ahead.store(twin, {{0, 0, at}}).ok());
      ASSERT_TRUE(plain.store(twin, {{0, 0, at}}).ok());
    }
    for (int step = 0; step < 12; ++step) {
      const int written = static_cast<int>(std::min<int64_t>(rng.between(1, shape.speculative_rows), shape.tokens - at));
      if (written == 0) break;
      const int accepted = static_cast<int>(rng.between(0, written));
      const std::vector<float> kv = ahead.kv;
      const std::vector<float> gate = ahead.gate;
      for (int64_t p = at + accepted; p < at + written; ++p) {
        std::copy_n(guesses.kv.begin() + p * ahead.columns, ahead.columns, ahead.kv.begin() + p * ahead.columns);
        if (!gate.empty()) std::copy_n(guesses.gate.begin() + p * ahead.columns, ahead.columns, ahead.gate.begin() + p * ahead.columns);
      }
      CallOptions speculative;
      speculative.speculative = true;
      const int first_part = static_cast<int>(rng.between(1, written));  // in one call or two
      ASSERT_TRUE(ahead.store(twin, {{0, at, first_part}}, speculative).ok());
      if (first_part < written) {
        ASSERT_TRUE(ahead.store(twin, {{0, at + first_part, written - first_part}}, speculative).ok());
      }
      ASSERT_TRUE(ahead.commit(twin, 0, at, written, accepted).ok());
      ahead.kv = kv;
      ahead.gate = gate;
      if (accepted > 0) {
        ASSERT_TRUE(plain.store(twin, {{0, at, accepted}}).ok());
      }
      at += accepted;
      ASSERT_EQ(ahead.report.status, 0u) << describe(shape.component);
      expect_same_bytes(ahead, plain,
                        describe(shape.component) + " after " + std::to_string(at) + " tokens, " + std::to_string(accepted) + " of " +
                            std::to_string(written) + " accepted");
      if (::testing::Test::HasFailure()) return;
    }
    // And the run goes on from there as if nothing had been.
    if (at < shape.tokens) {
      ASSERT_TRUE(ahead.store(twin, {{0, at, shape.tokens - at}}).ok());
      ASSERT_TRUE(plain.store(twin, {{0, at, shape.tokens - at}}).ok());
    }
    expect_same_bytes(ahead, plain, describe(shape.component) + " at the end");
  }
}

inline void a_run_resumed_from_a_boundary_record_gives_the_same_bytes(const StoreTwin& twin) {
  for (const Component& component : {index_k(4, ElementFormat::kBf16), kv_of(ComponentKind::kMainKv, 4, ElementFormat::kFp8DsMla)}) {
    StoreShape shape = shape_of(component, 24, 2);
    for (const std::vector<int>& chunks : std::vector<std::vector<int>>{{98}, {1}, {30, 3, 31}}) {
      StoreWorld cold(shape, 51);
      cold.start_all(twin);
      const std::vector<int64_t> positions = {4, 32, 64, 96};
      size_t next = 0;
      for (int64_t at = 0; at < shape.tokens;) {
        const int64_t count = std::min<int64_t>(chunks[next++ % chunks.size()], shape.tokens - at);
        CallOptions options;
        for (size_t b = 0; b < positions.size(); ++b) {
          // Also where the chunk begins on the boundary: all four rows are in the record then.
          if (at > positions[b] || positions[b] > at + count) continue;
          options.boundaries.push_back({positions[b], static_cast<int64_t>(b), 0, 0});
        }
        options.boundaries.push_back({at + count - (at + count) % 4, -1, 0, 0});  // skipped, whatever it says
        ASSERT_TRUE(cold.store(twin, {{0, at, count}}, options).ok());
        at += count;
      }
      for (size_t b = 0; b < positions.size(); ++b) {
        StoreWorld warm(shape, 51);
        std::copy_n(cold.boundary_bytes.data(), cold.boundary_bytes.size(), warm.boundary_bytes.data());
        ASSERT_TRUE(warm.start(twin, 0, positions[b], static_cast<int64_t>(b)).ok());
        StoreWorld upto(shape, 51);
        upto.start_all(twin);
        ASSERT_TRUE(upto.store(twin, {{0, 0, positions[b]}}).ok());
        EXPECT_TRUE(warm.records.copy() == upto.records.copy()) << "the record at " << positions[b];
        ASSERT_TRUE(warm.store(twin, {{0, positions[b], shape.tokens - positions[b]}}).ok());
        EXPECT_EQ(warm.report.status, 0u);
        EXPECT_TRUE(warm.records.copy() == cold.records.copy());
        for (int64_t entry = positions[b] / 4; entry < cold.entries(); ++entry) {
          std::byte* cold_scale = nullptr;
          std::byte* warm_scale = nullptr;
          const std::byte* cold_data = cold.slot_of(0, entry, &cold_scale);
          const std::byte* warm_data = warm.slot_of(0, entry, &warm_scale);
          EXPECT_EQ(std::memcmp(cold_data, warm_data, static_cast<size_t>(slot_data_bytes(component.element, cold.dims))), 0);
          EXPECT_EQ(std::memcmp(cold_scale, warm_scale, static_cast<size_t>(slot_scale_bytes(component.element, cold.dims))), 0);
        }
      }
    }
  }
}

inline void a_store_that_the_record_does_not_expect_writes_nothing(const StoreTwin& twin) {
  for (StoreShape shape : shapes_with_state()) {
    shape.sequences = 2;
    shape.speculative_rows = 4;
    struct Wrong {
      const char* name;
      uint64_t sequence;
      uint32_t generation;
      int64_t first;
      int64_t count;
      bool speculative;
      int already_ahead;
    };
    const std::vector<Wrong> wrongs = {{"another sequence", 1, 0, 10, 5, false, 0},
                                       {"another generation", 0, 1, 10, 5, false, 0},
                                       {"a position too far", 0, 0, 11, 5, false, 0},
                                       {"a position already stored", 0, 0, 9, 5, false, 0},
                                       {"plain rows while tokens are ahead", 0, 0, 12, 5, false, 2},
                                       {"more ahead than the format has rows for", 0, 0, 12, 3, true, 2}};
    for (const Wrong& wrong : wrongs) {
      StoreWorld world(shape, 61);
      world.start_all(twin);
      ASSERT_TRUE(world.store(twin, {{0, 0, 10}, {1, 0, 10}}).ok());
      CallOptions speculative;
      speculative.speculative = true;
      if (wrong.already_ahead > 0) {
        ASSERT_TRUE(world.store(twin, {{0, 10, wrong.already_ahead}}, speculative).ok());
      }
      const std::vector<std::byte> pool = world.pool.copy();
      const std::vector<std::byte> records = world.records.copy();
      ASSERT_EQ(world.report.status, 0u);
      world.wrong_sequence = wrong.sequence;
      world.wrong_generation = wrong.generation;
      CallOptions options;
      options.speculative = wrong.speculative;
      if (shape.component.ratio == 4 && !wrong.speculative) options.boundaries.push_back({12, 0, 0, 0});
      ASSERT_TRUE(world.store(twin, {{0, wrong.first, wrong.count}}, options).ok()) << wrong.name;
      EXPECT_EQ(world.report.status, uint32_t{kStatusStateMismatch}) << wrong.name;
      EXPECT_EQ(world.report.skipped_rows, static_cast<uint64_t>(wrong.count)) << wrong.name;
      EXPECT_TRUE(world.pool.copy() == pool) << wrong.name;
      EXPECT_TRUE(world.records.copy() == records) << wrong.name;
      EXPECT_EQ(world.boundary_bytes.data()[0], std::byte{0xEE}) << wrong.name;
    }
    // The neighbour in the batch is stored all the same.
    StoreWorld world(shape, 61);
    StoreWorld alone(shape, 61);
    world.start_all(twin);
    alone.start_all(twin);
    ASSERT_TRUE(world.store(twin, {{0, 3, 7}, {1, 0, 20}}).ok());
    ASSERT_TRUE(alone.store(twin, {{1, 0, 20}}).ok());
    EXPECT_EQ(world.report.status, uint32_t{kStatusStateMismatch});
    expect_same_bytes(world, alone, "the neighbour");
    // A record that was never initialised expects nobody.
    StoreWorld fresh(shape, 61);
    ASSERT_TRUE(fresh.store(twin, {{0, 0, 8}}).ok());
    EXPECT_EQ(fresh.report.status, uint32_t{kStatusStateMismatch});
  }
}

inline void a_commit_that_does_not_fit_changes_nothing(const StoreTwin& twin) {
  for (StoreShape shape : shapes_with_state()) {
    shape.speculative_rows = 8;
    StoreWorld world(shape, 62);
    world.start_all(twin);
    ASSERT_TRUE(world.store(twin, {{0, 0, 10}}).ok());
    CallOptions speculative;
    speculative.speculative = true;
    ASSERT_TRUE(world.store(twin, {{0, 10, 5}}, speculative).ok());
    const std::vector<std::byte> pool = world.pool.copy();
    const std::vector<std::byte> records = world.records.copy();
    for (const auto& [committed, ahead, accepted] :
         std::vector<std::array<int, 3>>{{9, 5, 1}, {10, 4, 1}, {10, 5, 6}, {10, 5, -1}, {10, 6, 5}}) {
      world.report = {};
      ASSERT_TRUE(world.commit(twin, 0, committed, ahead, accepted).ok());
      EXPECT_EQ(world.report.status, uint32_t{kStatusStateMismatch});
      EXPECT_TRUE(world.pool.copy() == pool);
      EXPECT_TRUE(world.records.copy() == records);
    }
    world.report = {};
    ASSERT_TRUE(world.commit(twin, 0, 10, 5, 5).ok());
    EXPECT_EQ(world.report.status, 0u);
    ASSERT_TRUE(world.commit(twin, 0, 15, 0, 0).ok());
    EXPECT_EQ(world.report.status, 0u) << "nothing ahead is nothing to decide";
  }
}

inline void batch_page_order_and_threads_do_not_matter(const StoreTwin& twin) {
  for (StoreShape shape : shapes_with_state()) {
    shape.sequences = 3;
    StoreWorld first(shape, 71);
    first.run(twin, {50});
    for (int threads : {1, 2, 3, 5}) {
      for (int64_t repeat = 0; repeat < count_of("store_repeats"); ++repeat) {
        StoreWorld again(shape, 71);
        CallOptions options;
        options.threads = threads;
        again.run(twin, {50}, options);
        expect_same_bytes(first, again, std::to_string(threads) + " threads");
      }
    }
    StoreWorld alone(shape, 71);
    std::swap(alone.page_ids.front(), alone.page_ids.back());
    std::reverse(alone.page_ids.begin(), alone.page_ids.end() - 1);
    alone.start_all(twin);
    for (int s : {2, 0, 1}) ASSERT_TRUE(alone.store(twin, {{s, 0, shape.tokens}}).ok());
    EXPECT_TRUE(first.records.copy() == alone.records.copy());
    const size_t data_bytes = static_cast<size_t>(slot_data_bytes(shape.component.element, first.dims));
    const size_t scale_bytes = static_cast<size_t>(slot_scale_bytes(shape.component.element, first.dims));
    for (int s = 0; s < shape.sequences; ++s) {
      for (int64_t entry = 0; entry < first.entries(); ++entry) {
        std::byte* one_scale = nullptr;
        std::byte* other_scale = nullptr;
        const std::byte* one = first.slot_of(s, entry, &one_scale);
        const std::byte* other = alone.slot_of(s, entry, &other_scale);
        EXPECT_EQ(std::memcmp(one, other, data_bytes), 0);
        EXPECT_EQ(std::memcmp(one_scale, other_scale, scale_bytes), 0);
      }
    }
  }
}

inline void the_whole_slot_is_written_and_nothing_else(const StoreTwin& twin) {
  for (const Component& component : all_stored_components()) {
    StoreShape shape = shape_of(component, component.ratio == 128 ? 2 : 11, component.ratio / 2);
    StoreWorld clean(shape, 81);
    shape.fill = 0xA5;
    StoreWorld poisoned(shape, 81);
    clean.run(twin, {shape.tokens});
    poisoned.run(twin, {shape.tokens});
    const size_t data_bytes = static_cast<size_t>(slot_data_bytes(component.element, clean.dims));
    const size_t scale_bytes = static_cast<size_t>(slot_scale_bytes(component.element, clean.dims));
    for (int64_t entry = 0; entry < clean.entries(); ++entry) {
      std::byte* clean_scale = nullptr;
      std::byte* scale = nullptr;
      std::byte* clean_data = clean.slot_of(0, entry, &clean_scale);
      std::byte* data = poisoned.slot_of(0, entry, &scale);
      EXPECT_EQ(std::memcmp(data, clean_data, data_bytes), 0) << describe(component);
      EXPECT_EQ(std::memcmp(scale, clean_scale, scale_bytes), 0) << describe(component);
      if (component.element == ElementFormat::kFp8DsMla) {
        EXPECT_EQ(scale[7], std::byte{0});
      }
      std::memset(data, 0xA5, data_bytes);
      std::memset(scale, 0xA5, scale_bytes);
    }
    const std::vector<std::byte> rest = poisoned.pool.copy();
    EXPECT_TRUE(std::all_of(rest.begin(), rest.end(), [](std::byte b) { return b == std::byte{0xA5}; })) << describe(component);
  }
}

inline void absent_pages_are_skipped_and_bad_ones_never_touched(const StoreTwin& twin) {
  StoreShape shape = shape_of(index_k(4, ElementFormat::kFp8, ScaleKind::kAmax), 30);
  StoreWorld full(shape, 91);
  full.run(twin, {shape.tokens});

  StoreWorld holes(shape, 91);
  holes.page_ids[1] = kNoPage;
  holes.run(twin, {shape.tokens});
  EXPECT_EQ(holes.report.status, uint32_t{kStatusAbsentPage});
  EXPECT_EQ(holes.report.skipped_rows, static_cast<uint64_t>(shape.slots));
  EXPECT_TRUE(holes.records.copy() == full.records.copy()) << "the state goes on past an absent page";
  std::byte* missing = full.pool.data() + full.page_ids[1] * full.stride;
  std::memset(missing, 0, static_cast<size_t>(full.stride));
  EXPECT_TRUE(holes.pool.copy() == full.pool.copy());

  // A table row that begins later and ends sooner: entries outside it have no place.
  StoreWorld window(shape, 91);
  window.entry_base = {8};
  window.pages_per_row = 2;
  window.run(twin, {shape.tokens});
  EXPECT_EQ(window.report.status, uint32_t{kStatusBadPageTable});
  EXPECT_EQ(window.report.skipped_rows, 30u - 16u);

  for (int32_t bad : {-2, 1000000, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
    StoreWorld world(shape, 91);
    world.page_ids[2] = bad;
    world.start_all(twin);
    const std::vector<std::byte> records = world.records.copy();
    const absl::Status status = world.store(twin, {{0, 0, shape.tokens}});
    if (twin.refuses_bad_ids) {
      EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
      EXPECT_NE(status.message().find(std::to_string(bad)), absl::string_view::npos) << "the message names the value";
      const std::vector<std::byte> pool = world.pool.copy();
      EXPECT_TRUE(std::all_of(pool.begin(), pool.end(), [](std::byte b) { return b == std::byte{0}; }));
      EXPECT_TRUE(world.records.copy() == records);
    } else {
      ASSERT_TRUE(status.ok());
      EXPECT_EQ(world.report.status, uint32_t{kStatusBadSlot});
      EXPECT_EQ(world.report.skipped_rows, static_cast<uint64_t>(shape.slots));
    }
  }
}

// ------------------------------------------------------------------------------------------------------- pooled rows

struct PooledCall {
  std::vector<float> rows;
  std::vector<int64_t> slots;
  std::vector<int64_t> positions;
  std::vector<float> finished;
};

inline absl::Status store_pooled(const StoreTwin& twin, StoreWorld& world, PooledCall& call, int threads = 1) {
  StorePooledArgs args;
  args.chain = world.chain();
  args.out = world.view();
  std::vector<uint16_t> narrow;
  if (world.shape.element == RowElement::kBf16) {
    for (float value : call.rows) narrow.push_back(bf16_of(value));
    args.rows = {narrow.data(), world.dims, RowElement::kBf16};
  } else {
    args.rows = {call.rows.data(), world.dims, RowElement::kFp32};
  }
  args.slots = call.slots.data();
  args.positions = call.positions.empty() ? nullptr : call.positions.data();
  args.count = static_cast<int64_t>(call.slots.size());
  call.finished.assign(call.rows.size(), StoreWorld::kUnfinished);
  args.finished = call.finished.data();
  args.finished_stride = world.dims;
  args.report = &world.report;
  return twin.pooled(args, threads);
}

inline PooledCall pooled_rows_of(StoreWorld& world, int count) {
  PooledCall call;
  std::vector<int64_t> slots(static_cast<size_t>(world.page_count * world.shape.slots));
  std::iota(slots.begin(), slots.end(), 0);
  Rng rng(5);
  for (size_t i = slots.size(); i > 1; --i) std::swap(slots[i - 1], slots[rng.below(i)]);
  for (int i = 0; i < count; ++i) {
    for (int c = 0; c < world.dims; ++c) call.rows.push_back(world.kv[static_cast<size_t>(i * world.columns + c)]);
    call.slots.push_back(slots[static_cast<size_t>(i)]);
    call.positions.push_back((i * 5) % world.shape.tokens);
  }
  return call;
}

inline void pooled_rows_take_the_same_chain(const StoreTwin& twin) {
  for (const Component& component : all_stored_components()) {
    for (RowElement element : {RowElement::kBf16, RowElement::kFp32}) {
      StoreShape shape = shape_of(component, component.ratio == 128 ? 1 : 40);
      shape.element = element;
      StoreWorld world(shape, 101);
      StoreWorld truth(shape, 101);
      const int count = std::min(19, world.page_count * shape.slots);
      PooledCall call = pooled_rows_of(world, count);
      PooledCall expected = call;
      ASSERT_TRUE(store_pooled(twin, world, call, 2).ok());
      ASSERT_TRUE(store_pooled(reference_store(), truth, expected).ok());
      for (int i = 0; i < count; ++i) {
        const SlotPlace place = slot_place(component.element, world.dims, shape.slots, call.slots[static_cast<size_t>(i)] % shape.slots);
        const std::byte* page = world.pool.data() + call.slots[static_cast<size_t>(i)] / shape.slots * world.stride;
        const std::vector<float> entry(expected.finished.begin() + i * world.dims, expected.finished.begin() + (i + 1) * world.dims);
        const StoredRow stored = read_stored(component, shape.rounding, page + place.data, page + place.scale, entry);
        float largest = 0;
        for (float value : entry) largest = std::max(largest, std::fabs(value));
        for (int c = 0; c < world.dims; ++c) {
          EXPECT_NEAR(call.finished[static_cast<size_t>(i * world.dims + c)], entry[static_cast<size_t>(c)], 2e-5);
          EXPECT_LE(std::fabs(stored.values[c] - static_cast<double>(entry[static_cast<size_t>(c)])),
                    0.5 * stored.steps[c] + 4e-6 * static_cast<double>(largest))
              << describe(component);
        }
      }
    }
  }
}

inline void slot_minus_one_skips_and_a_slot_outside_the_pool_is_never_written(const StoreTwin& twin) {
  StoreShape shape = shape_of(index_k(4, ElementFormat::kBf16), 40);
  shape.fill = 0x5A;
  StoreWorld world(shape, 111);
  PooledCall call = pooled_rows_of(world, 6);
  const std::vector<int64_t> kept = call.slots;
  call.slots[0] = kNoSlot;
  call.slots[3] = kNoSlot;
  ASSERT_TRUE(store_pooled(twin, world, call).ok());
  EXPECT_EQ(world.report.status, 0u);
  EXPECT_EQ(world.report.skipped_rows, 0u) << "a skip on purpose is not counted";
  for (size_t i : {size_t{0}, size_t{3}}) {
    const std::byte* slot = world.pool.data() + kept[i] / shape.slots * world.stride + kept[i] % shape.slots * 256;
    EXPECT_EQ(slot[0], std::byte{0x5A});
  }
  const int64_t slots = int64_t{world.page_count} * shape.slots;
  for (int64_t bad :
       {slots, slots + 1, int64_t{-2}, int64_t{1} << 32, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    StoreWorld fresh(shape, 111);
    PooledCall wrong = pooled_rows_of(fresh, 6);
    wrong.slots[4] = bad;
    const absl::Status status = store_pooled(twin, fresh, wrong);
    if (twin.refuses_bad_ids) {
      EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << bad;
      const std::vector<std::byte> pool = fresh.pool.copy();
      EXPECT_TRUE(std::all_of(pool.begin(), pool.end(), [](std::byte b) { return b == std::byte{0x5A}; }));
    } else {
      ASSERT_TRUE(status.ok());
      EXPECT_EQ(fresh.report.status, uint32_t{kStatusBadSlot});
      EXPECT_EQ(fresh.report.skipped_rows, 1u);
    }
  }
  StoreWorld past(shape, 111);
  PooledCall late = pooled_rows_of(past, 6);
  late.positions[2] = static_cast<int64_t>(past.table.size()) / kRopeDims;
  const absl::Status status = store_pooled(twin, past, late);
  if (twin.refuses_bad_ids) {
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  } else {
    EXPECT_EQ(past.report.status, uint32_t{kStatusBadPosition});
  }
  PooledCall none;
  EXPECT_TRUE(store_pooled(twin, past, none).ok()) << "an empty call is no error";
}

// deepseek-v4 reference: x[i] = (((37 i) mod 128) - 64) / 64, y = H x 128^-0.5.
inline void the_hadamard_and_quantiser_give_the_golden_bytes(const StoreTwin& twin) {
  PooledCall call;
  for (int i = 0; i < 128; ++i) call.rows.push_back(static_cast<float>((37 * i) % 128 - 64) / 64.0f);
  call.slots = {2};
  constexpr int kScaleAt = 256;  // behind the longest value part
  const auto stored = [&](ElementFormat element, ScaleKind scale, std::vector<float>* finished) {
    StoreShape shape = shape_of(index_k(4, element, scale), 4);
    shape.component.rope = RopeStyle::kNone;
    shape.norm = NormKind::kNone;
    shape.element = RowElement::kFp32;
    StoreWorld world(shape, 1);
    EXPECT_TRUE(store_pooled(twin, world, call).ok());
    *finished = call.finished;
    const SlotPlace place = slot_place(element, 128, shape.slots, 2);
    std::vector<uint8_t> bytes(kScaleAt + 8);
    std::memcpy(bytes.data(), world.pool.data() + place.data,
                static_cast<size_t>(std::min<int64_t>(slot_data_bytes(element, 128), kScaleAt)));
    std::memcpy(bytes.data() + kScaleAt, world.pool.data() + place.scale,
                static_cast<size_t>(std::min<int64_t>(slot_scale_bytes(element, 128), 8)));
    return bytes;
  };
  std::vector<float> y;
  std::vector<uint8_t> bytes = stored(ElementFormat::kFp8, ScaleKind::kAmax, &y);
  const std::vector<float> head = {-0.0883883f, -0.0883883f, -0.1767767f, 0.0f, 0.0f, -0.3535534f};
  for (size_t i = 0; i < head.size(); ++i) EXPECT_NEAR(y[i], head[i], 1e-6);
  EXPECT_NEAR(y[127], 0.7071068f, 1e-6);
  double squares = 0;
  float largest = 0;
  for (float value : y) {
    squares += static_cast<double>(value) * static_cast<double>(value);
    largest = std::max(largest, std::fabs(value));
  }
  EXPECT_NEAR(squares, 42.671875, 1e-4);
  EXPECT_NEAR(largest, 2.12132034f, 1e-6);
  const auto first8 = [&bytes] { return std::vector<uint8_t>(bytes.begin(), bytes.begin() + 8); };
  float scale = 0;
  std::memcpy(&scale, bytes.data() + kScaleAt, 4);
  EXPECT_NEAR(scale, 0.0047350898f, 1e-9);
  EXPECT_EQ(first8(), (std::vector<uint8_t>{0xd9, 0xd9, 0xe1, 0x00, 0x00, 0xe9, 0x00, 0x00}));
  bytes = stored(ElementFormat::kFp8, ScaleKind::kAmaxReciprocal, &y);
  EXPECT_EQ(first8(), (std::vector<uint8_t>{0xd9, 0xd9, 0xe1, 0x00, 0x00, 0xe9, 0x00, 0x00}));
  bytes = stored(ElementFormat::kFp8, ScaleKind::kPowerOfTwo, &y);
  std::memcpy(&scale, bytes.data() + kScaleAt, 4);
  EXPECT_EQ(scale, 0.0078125f);
  EXPECT_EQ(first8(), (std::vector<uint8_t>{0xd3, 0xd3, 0xdb, 0x00, 0x00, 0xe3, 0x00, 0x00}));

  call.rows.assign(128, 0.0f);  // a zero row: scale 1e-4 / 448, every byte zero
  bytes = stored(ElementFormat::kFp8, ScaleKind::kAmax, &y);
  std::memcpy(&scale, bytes.data() + kScaleAt, 4);
  EXPECT_NEAR(scale, 2.2321e-7f, 1e-11);
  EXPECT_EQ(std::count(bytes.begin(), bytes.begin() + 128, 0), 128);
  call.rows[0] = 1.0f;  // H e0 is 0.0883883 everywhere
  bytes = stored(ElementFormat::kBf16, ScaleKind::kNone, &y);
  for (float value : y) EXPECT_NEAR(value, 0.08838834764831845f, 1e-9);
}

// deepseek-v4 reference, the compressor's worked example (two channels), carried by channels 0 and 1 of 128.
inline void the_compressor_gives_the_golden_pools(const StoreTwin& twin) {
  StoreShape shape = shape_of(index_k(4, ElementFormat::kBf16), 3);
  shape.component.rope = RopeStyle::kNone;
  shape.component.hadamard = false;
  shape.norm = NormKind::kNone;
  shape.element = RowElement::kFp32;
  const auto pooled = [&](bool swap_halves, bool swap_bias, bool no_bias) {
    StoreWorld world(shape, 1);
    std::fill(world.kv.begin(), world.kv.end(), 0.0f);
    std::fill(world.gate.begin(), world.gate.end(), 0.0f);
    std::fill(world.bias.begin(), world.bias.end(), 0.0f);
    for (int c = 0; c < 4; ++c) {
      const int half = c / 2;
      const auto column = [&](bool swapped) { return static_cast<size_t>((swapped ? 1 - half : half) * 128 + c % 2); };
      for (int t = 0; t < 12; ++t) {
        const size_t row = static_cast<size_t>(t * 256);
        world.kv[row + column(swap_halves)] = 0.5f * static_cast<float>(t + 1) + 0.25f * static_cast<float>(c) - (c >= 2 ? 1.0f : 0.0f);
        world.gate[row + column(swap_halves)] = static_cast<float>((3 * t + 5 * c) % 7 - 3) / 2.0f;
      }
      for (int j = 0; j < 4 && !no_bias; ++j) {
        world.bias[static_cast<size_t>(j * 256) + column(swap_bias)] = static_cast<float>((2 * j + c) % 5 - 2) / 4.0f;
      }
    }
    world.run(twin, {12});
    std::vector<std::array<float, 2>> values;
    for (int64_t g = 0; g < 3; ++g) values.push_back({world.finished[{0, g}][0], world.finished[{0, g}][1]});
    return values;
  };
  const auto right = pooled(false, false, false);
  const std::vector<std::array<float, 2>> golden = {{0.76121984f, 1.20574274f}, {1.89375911f, 2.22467162f}, {3.93262159f, 4.49897681f}};
  const std::vector<std::array<float, 2>> normed = {{0.75496571f, 1.19583645f}, {0.91669639f, 1.07687848f}, {0.93073209f, 1.06477118f}};
  for (size_t g = 0; g < 3; ++g) {
    for (size_t c = 0; c < 2; ++c) {
      EXPECT_NEAR(right[g][c], golden[g][c], 2e-6);
      const double mean_square = 0.5 * (std::pow(static_cast<double>(right[g][0]), 2) + std::pow(static_cast<double>(right[g][1]), 2));
      EXPECT_NEAR(static_cast<double>(right[g][c]) / std::sqrt(mean_square + 1e-6), static_cast<double>(normed[g][c]), 2e-6);
    }
  }
  // The usual mistakes give other numbers, so that a twin which makes one of them cannot pass above.
  const auto swapped_halves = pooled(true, false, false);
  const auto swapped_bias = pooled(false, true, false);
  const auto without_bias = pooled(false, false, true);
  const std::array<float, 3> if_halves = {1.392837f, 1.577928f, 4.774329f};
  const std::array<float, 3> if_bias = {0.781983f, 1.850631f, 3.991434f};
  const std::array<float, 3> if_none = {0.786328f, 1.892363f, 3.870831f};
  for (size_t g = 0; g < 3; ++g) {
    EXPECT_NEAR(swapped_halves[g][0], if_halves[g], 2e-6);
    EXPECT_NEAR(swapped_bias[g][0], if_bias[g], 2e-6);
    EXPECT_NEAR(without_bias[g][0], if_none[g], 2e-6);
  }
  EXPECT_NEAR(without_bias[1][1], 2.120831f, 2e-6);
}

inline void rows_that_are_not_numbers_spoil_their_own_entries_alone(const StoreTwin& twin) {
  const float kInf = std::numeric_limits<float>::infinity();
  const float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (const Component& component : all_stored_components()) {
    for (float bad : {kNaN, kInf, -kInf, 3e38f}) {
      for (bool in_gate : {false, true}) {
        if (in_gate && (component.ratio == 1 || !(bad > 0 || std::isnan(bad)) || bad == 3e38f)) continue;
        StoreShape shape = shape_of(component, component.ratio == 128 ? 3 : 8);
        shape.element = RowElement::kFp32;
        shape.form = component.ratio == 128 ? StateForm::kRunning : StateForm::kRaw;
        StoreWorld good(shape, 121);
        StoreWorld spoiled(shape, 121);
        const int64_t victim = component.ratio == 128 ? 1 : 3;
        const int64_t row = victim * component.ratio + component.ratio / 2;
        for (int half = 0; half < row_halves(component.ratio); ++half) {
          (in_gate ? spoiled.gate : spoiled.kv)[static_cast<size_t>(row * spoiled.columns + half * spoiled.dims + 5)] = bad;
        }
        good.run(twin, {3});
        spoiled.run(twin, {3});
        for (int64_t entry = 0; entry < good.entries(); ++entry) {
          const bool touched = entry == victim || (component.ratio == 4 && entry == victim + 1);
          std::byte* good_scale = nullptr;
          std::byte* scale = nullptr;
          const std::byte* good_data = good.slot_of(0, entry, &good_scale);
          const std::byte* data = spoiled.slot_of(0, entry, &scale);
          if (!touched) {
            EXPECT_EQ(std::memcmp(data, good_data, static_cast<size_t>(slot_data_bytes(component.element, good.dims))), 0)
                << describe(component) << " entry " << entry;
            EXPECT_EQ(std::memcmp(scale, good_scale, static_cast<size_t>(slot_scale_bytes(component.element, good.dims))), 0);
            continue;
          }
          const StoredRow stored = read_stored(component, shape.rounding, data, scale, good.finished[{0, entry}]);
          for (int c = 0; c < good.dims; ++c) {
            ASSERT_TRUE(std::isnan(stored.values[c])) << describe(component) << " entry " << entry << " channel " << c << " after " << bad;
          }
        }
      }
    }
  }
}

inline void a_minus_infinite_score_weighs_nothing(const StoreTwin& twin) {
  StoreShape shape = shape_of(kv_of(ComponentKind::kMainKv, 128, ElementFormat::kBf16), 1);
  shape.form = StateForm::kRunning;
  StoreWorld world(shape, 131);
  StoreWorld truth(shape, 131);
  for (StoreWorld* each : {&world, &truth}) {
    for (int row = 0; row < 128; row += 3) std::fill_n(each->gate.begin() + row * 512, 512, -std::numeric_limits<float>::infinity());
  }
  world.run(twin, {1});
  truth.run(reference_store(), {128});
  for (int c = 0; c < 512; ++c)
    EXPECT_NEAR((world.finished[{0, 0}][static_cast<size_t>(c)]), (truth.finished[{0, 0}][static_cast<size_t>(c)]), 2e-5);
}

// Position biases far apart (a kernel may split gate and bias, or find the largest score first), and one that masks a row.
inline void a_position_bias_that_spreads_far_is_pooled_right(const StoreTwin& twin) {
  for (const Component& component : {index_k(4, ElementFormat::kBf16), kv_of(ComponentKind::kMainKv, 4, ElementFormat::kFp8DsMla)}) {
    for (float spread : {20.0f, 31.9f, 33.0f, 500.0f, std::numeric_limits<float>::infinity()}) {
      StoreShape shape = shape_of(component, 12, 3);
      StoreWorld whole(shape, 141);
      StoreWorld cut(shape, 141);
      StoreWorld truth(shape, 141);
      for (StoreWorld* world : {&whole, &cut, &truth}) {
        for (int c = 0; c < world->dims; c += 3) {  // row 2 of the group, in both of its halves
          world->bias[static_cast<size_t>(2 * world->columns + c)] = -spread;
          world->bias[static_cast<size_t>(2 * world->columns + world->dims + c)] = -spread;
        }
      }
      whole.run(twin, {shape.tokens});
      cut.run(twin, {5});
      truth.run(reference_store(), {shape.tokens});
      expect_same_bytes(whole, cut, describe(component) + " with a bias of -" + std::to_string(spread));
      int64_t values = 0;
      int64_t beyond = 0;
      expect_stored_near(whole, truth, &values, &beyond);
      EXPECT_EQ(beyond, 0) << describe(component) << " with a bias of -" << spread;
    }
  }
}

// All gates alike, and so far apart that one row takes all.
inline void gates_of_any_size_are_pooled_right(const StoreTwin& twin) {
  for (float factor : {0.0f, 1e30f}) {
    StoreShape shape = shape_of(index_k(4, ElementFormat::kBf16), 12, 3);
    StoreWorld world(shape, 151);
    StoreWorld truth(shape, 151);
    for (StoreWorld* each : {&world, &truth}) {
      for (float& gate : each->gate) gate = round_to_bf16(gate * factor);
      if (factor > 1) std::fill(each->bias.begin(), each->bias.end(), 0.0f);
    }
    world.run(twin, {shape.tokens});
    truth.run(reference_store(), {shape.tokens});
    int64_t values = 0;
    int64_t beyond = 0;
    expect_stored_near(world, truth, &values, &beyond);
    EXPECT_EQ(beyond, 0) << "gates x " << factor;
  }
}

inline void pages_past_4_and_64_gib_are_written_where_they_lie(const StoreTwin& twin) {
  if (!twin.works_in_host_memory) GTEST_SKIP() << twin.name << " copies whole pools; it has a test of its own for this";
  const int64_t stride = 1165824;  // V4-Flash's
  const int64_t pages = 68 * kGiB / stride;
  void* address =
      mmap(nullptr, static_cast<size_t>(pages * stride), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) GTEST_SKIP() << "no 68 GiB of address space here: " << std::strerror(errno);
  StoreShape shape = shape_of(index_k(4, ElementFormat::kBf16), 24);
  StoreWorld near(shape, 141);
  near.run(twin, {shape.tokens});
  StoreWorld far(shape, 141);
  far.start_all(twin);
  far.page_ids = {static_cast<int32_t>(5 * kGiB / stride), static_cast<int32_t>(65 * kGiB / stride), static_cast<int32_t>(pages - 1), 0, 0};
  std::byte* base = static_cast<std::byte*>(address);
  std::vector<StoreSequence> call(1);
  call[0].row_count = shape.tokens;
  call[0].sequence = far.sequence_id(0);
  call[0].generation = 7;
  std::vector<uint16_t> kv;
  std::vector<uint16_t> gate;
  for (float value : far.kv) kv.push_back(bf16_of(value));
  for (float value : far.gate) gate.push_back(bf16_of(value));
  StoreRowsArgs args;
  args.chain = far.chain();
  args.out = far.view();
  args.out.base = base;
  args.out.page_stride = stride;
  args.out.page_count = pages;
  args.pages = far.pages();
  args.kv = {kv.data(), far.columns, RowElement::kBf16};
  args.gate = {gate.data(), far.columns, RowElement::kBf16};
  args.position_bias = far.bias.data();
  args.rows = shape.tokens;
  args.sequences = call.data();
  args.sequence_count = 1;
  args.state = far.state;
  args.report = &far.report;
  const absl::Status status = twin.rows(args, 1);
  EXPECT_TRUE(status.ok()) << status;
  for (int64_t entry = 0; entry < far.entries(); ++entry) {
    const int64_t page = far.page_ids[static_cast<size_t>(entry / shape.slots)];
    EXPECT_EQ(std::memcmp(base + page * stride + entry % shape.slots * 256, near.slot_of(0, entry), 256), 0) << entry;
  }
  // The pooled entry reaches as far.
  std::vector<float> pooled(128, 1.0f);
  const int64_t slot = (pages - 2) * shape.slots + 5;
  const int64_t position = 0;
  StorePooledArgs one;
  one.chain = far.chain();
  one.out = args.out;
  one.rows = {pooled.data(), 128, RowElement::kFp32};
  one.slots = &slot;
  one.positions = &position;
  one.count = 1;
  one.report = &far.report;
  EXPECT_TRUE(twin.pooled(one, 1).ok());
  EXPECT_NE(base[(pages - 2) * stride + 5 * 256], std::byte{0});
  munmap(address, static_cast<size_t>(pages * stride));
}

inline void unsupported_formats_are_refused_with_a_reason(const StoreTwin& twin) {
  // Every (kind, element, scale) that exists, for both entries: stored, or refused with a reason. Nothing in between.
  for (ComponentKind kind : {ComponentKind::kIndexK, ComponentKind::kMainKv, ComponentKind::kWindowKv}) {
    for (int element = 0; element < kElementFormatCount; ++element) {
      for (int scale = 0; scale < kScaleKindCount; ++scale) {
        Component component = kind == ComponentKind::kIndexK ? index_k(4, ElementFormat::kBf16) : kv_of(kind, 1, ElementFormat::kBf16);
        component.element = static_cast<ElementFormat>(element);
        component.scale = static_cast<ScaleKind>(scale);
        if (component.element == ElementFormat::kFp8V32) component.head_dim = kind == ComponentKind::kIndexK ? 128 : 576;
        PageFormat format;
        format.name = "cell";
        format.pool = kind == ComponentKind::kWindowKv ? PoolKind::kWindow : PoolKind::kPaged;
        format.components = {component};
        format.components[0].rope_table.theta = 10000;
        const bool exists = check_format(format).ok();
        StoreShape shape = shape_of(component, 8);
        StoreWorld world(shape, 151);
        world.start_all(twin);
        const absl::Status rows = world.store(twin, {{0, 0, shape.tokens}});
        PooledCall call = pooled_rows_of(world, 2);
        const absl::Status pooled = store_pooled(twin, world, call);
        EXPECT_EQ(rows.ok(), exists) << describe(component) << ": " << rows;
        EXPECT_EQ(pooled.ok(), exists) << describe(component) << ": " << pooled;
        if (!exists) {
          EXPECT_EQ(rows.code(), absl::StatusCode::kUnimplemented);
          EXPECT_FALSE(rows.message().empty());
        }
      }
    }
  }
  StoreShape shape = shape_of(index_k(4, ElementFormat::kFp8, ScaleKind::kAmax), 2);
  shape.rounding = RoundingMode::kVllm;
  StoreWorld world(shape, 151);
  EXPECT_EQ(world.store(twin, {{0, 0, 8}}).code(), absl::StatusCode::kUnimplemented) << "vLLM's scales are powers of two";
}

inline void wrong_arguments_are_named_before_anything_is_written(const StoreTwin& twin) {
  StoreShape shape = shape_of(index_k(4, ElementFormat::kBf16), 8);
  StoreWorld world(shape, 161);
  std::vector<StoreSequence> call(1);
  call[0].row_count = 8;
  call[0].sequence = world.sequence_id(0);
  call[0].generation = 7;
  StoreRowsArgs right;
  right.chain = world.chain();
  right.out = world.view();
  right.pages = world.pages();
  right.kv = {world.kv.data(), world.columns, RowElement::kFp32};
  right.gate = {world.gate.data(), world.columns, RowElement::kFp32};
  right.position_bias = world.bias.data();
  right.rows = 8;
  right.sequences = call.data();
  right.sequence_count = 1;
  right.state = world.state;
  right.report = &world.report;
  const auto refused = [&](const char* what, const std::function<void(StoreRowsArgs&)>& spoil) {
    StoreRowsArgs args = right;
    spoil(args);
    EXPECT_EQ(twin.rows(args, 1).code(), absl::StatusCode::kInvalidArgument) << what;
  };
  refused("no report", [](StoreRowsArgs& a) { a.report = nullptr; });
  refused("no kv", [](StoreRowsArgs& a) { a.kv.data = nullptr; });
  refused("no gate", [](StoreRowsArgs& a) { a.gate.data = nullptr; });
  refused("a stride below the row", [](StoreRowsArgs& a) { a.kv.row_stride = 255; });
  refused("no bias", [](StoreRowsArgs& a) { a.position_bias = nullptr; });
  refused("no norm weight", [](StoreRowsArgs& a) { a.chain.norm_weight = nullptr; });
  refused("LayerNorm without bias", [](StoreRowsArgs& a) { a.chain.norm = NormKind::kLayer, a.chain.norm_bias = nullptr; });
  refused("no RoPE table", [](StoreRowsArgs& a) { a.chain.rope = {}; });
  refused("another element in the view", [](StoreRowsArgs& a) { a.out.element = ElementFormat::kFp8; });
  refused("no pool", [](StoreRowsArgs& a) { a.out.base = nullptr; });
  refused("no page table", [](StoreRowsArgs& a) { a.pages.pages = nullptr; });
  refused("no sequences", [](StoreRowsArgs& a) { a.sequences = nullptr; });
  refused("no state", [](StoreRowsArgs& a) { a.state.base = nullptr; });
  refused("state of another ratio", [](StoreRowsArgs& a) { a.state.ratio = 128; });
  refused("running form at ratio 4", [](StoreRowsArgs& a) { a.state.form = StateForm::kRunning; });
  refused("speculation without rows for it", [](StoreRowsArgs& a) { a.speculative = true; });
  refused("negative counts", [](StoreRowsArgs& a) { a.sequence_count = -1; });
  refused("boundaries without memory", [](StoreRowsArgs& a) { a.boundary_count = 1; });
  refused("a short finished stride", [&](StoreRowsArgs& a) { a.finished = world.kv.data(), a.finished_stride = 127; });
  const std::vector<std::byte> pool = world.pool.copy();
  EXPECT_TRUE(std::all_of(pool.begin(), pool.end(), [](std::byte b) { return b == std::byte{0}; }));
  if (!twin.refuses_bad_ids) return;
  const auto out_of_range = [&](const char* what, const std::function<void(StoreSequence&)>& spoil) {
    ASSERT_TRUE(world.start(twin, 0).ok());
    const StoreSequence kept = call[0];
    spoil(call[0]);
    EXPECT_EQ(twin.rows(right, 1).code(), absl::StatusCode::kOutOfRange) << what;
    call[0] = kept;
  };
  out_of_range("rows past the end", [](StoreSequence& s) { s.row_count = 9; });
  out_of_range("rows before the start", [](StoreSequence& s) { s.row_begin = -1; });
  out_of_range("a negative position", [](StoreSequence& s) { s.first_position = -1; });
  out_of_range("no such table row", [](StoreSequence& s) { s.table_row = 1; });
  out_of_range("no such record", [](StoreSequence& s) { s.record = 1; });
}

// A record named twice would advance once or twice as threads happen to run.
inline void a_record_named_twice_in_one_call_is_refused(const StoreTwin& twin) {
  if (!twin.refuses_bad_ids) return;
  StoreShape shape = shape_of(index_k(4, ElementFormat::kBf16), 8);
  shape.sequences = 3;
  shape.speculative_rows = 8;
  StoreWorld world(shape, 181);
  const auto expect_refused = [](const absl::Status& status, const char* items) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(status.message().find(items), absl::string_view::npos) << status;
  };

  std::vector<StateStart> starts(3);
  for (int i = 0; i < 3; ++i) {
    starts[static_cast<size_t>(i)].record = i;
    starts[static_cast<size_t>(i)].sequence = world.sequence_id(i);
    starts[static_cast<size_t>(i)].generation = 7;
  }
  InitStateArgs init;
  init.state = world.state;
  init.starts = starts.data();
  init.count = 3;
  const std::vector<std::byte> before = world.records.copy();
  starts[2].record = 0;
  expect_refused(twin.init(init), "starts 0 and 2 both name state record 0");
  EXPECT_EQ(world.records.copy(), before);
  starts[2].record = -1;
  starts[1].record = -1;
  EXPECT_TRUE(twin.init(init).ok()) << "what is skipped may be named often";
  starts[1].record = 1;
  starts[2].record = 2;
  ASSERT_TRUE(twin.init(init).ok());

  std::vector<StoreSequence> sequences(3);
  for (int i = 0; i < 3; ++i) {
    StoreSequence& sequence = sequences[static_cast<size_t>(i)];
    sequence.row_begin = 8 * i;
    sequence.row_count = 8;
    sequence.record = i;
    sequence.sequence = world.sequence_id(i);
    sequence.generation = 7;
    sequence.table_row = i;
  }
  StoreRowsArgs store;
  store.chain = world.chain();
  store.out = world.view();
  store.pages = world.pages();
  store.kv = {world.kv.data(), world.columns, RowElement::kFp32};
  store.gate = {world.gate.data(), world.columns, RowElement::kFp32};
  store.position_bias = world.bias.data();
  store.rows = 24;
  store.sequences = sequences.data();
  store.sequence_count = 3;
  store.state = world.state;
  store.speculative = true;
  store.report = &world.report;
  const std::vector<std::byte> pool = world.pool.copy();
  const std::vector<std::byte> records = world.records.copy();
  sequences[1].record = 0;
  sequences[1].sequence = world.sequence_id(0);
  expect_refused(twin.rows(store, 2), "sequences 0 and 1 both name state record 0");
  EXPECT_EQ(world.pool.copy(), pool);
  EXPECT_EQ(world.records.copy(), records);
  sequences[1].row_count = 0;  // padding
  ASSERT_TRUE(twin.rows(store, 2).ok());

  std::vector<StateCommit> commits(3);
  for (int i = 0; i < 3; ++i) {
    StateCommit& commit = commits[static_cast<size_t>(i)];
    commit.record = i == 1 ? 2 : i;
    commit.sequence = world.sequence_id(static_cast<int>(commit.record));
    commit.generation = 7;
    commit.ahead = 8;
    commit.accepted = 4;
    commit.table_row = static_cast<int32_t>(commit.record);
  }
  CommitStateArgs commit;
  commit.ratio = 4;
  commit.state = world.state;
  commit.out = world.view();
  commit.pages = world.pages();
  commit.position_bias = world.bias.data();
  commit.commits = commits.data();
  commit.count = 3;
  const std::vector<std::byte> ahead = world.records.copy();
  expect_refused(twin.commit(commit), "commits 1 and 2 both name state record 2");
  EXPECT_EQ(world.records.copy(), ahead);
  commits[1].record = -1;
  EXPECT_TRUE(twin.commit(commit).ok());
  EXPECT_NE(world.records.copy(), ahead);
}

inline void init_clears_a_record_whatever_it_held(const StoreTwin& twin) {
  for (StoreShape shape : shapes_with_state()) {
    shape.speculative_rows = 3;
    StoreWorld used(shape, 171);
    StoreWorld fresh(shape, 171);
    used.run(twin, {shape.tokens});
    CallOptions none;
    ASSERT_TRUE(used.start(twin, 0).ok());
    ASSERT_TRUE(fresh.start(twin, 0).ok());
    const size_t bytes = static_cast<size_t>(state_record_bytes(shape.form, shape.component.ratio, used.dims, 3));
    EXPECT_EQ(std::memcmp(used.records.data(), fresh.records.data(), bytes), 0);
    // A start that cannot be is skipped and counted.
    used.report = {};
    ASSERT_TRUE(used.start(twin, 0, 3).ok());
    EXPECT_EQ(used.report.status, uint32_t{kStatusBadSlot});
    EXPECT_EQ(std::memcmp(used.records.data(), fresh.records.data(), bytes), 0);
  }
}

inline const std::vector<StoreCase>& store_cases() {
#define NEEDLE_CASE(name) \
  { #name, name }
  static const std::vector<StoreCase> kCases = {
      NEEDLE_CASE(stored_values_lie_within_half_a_step),
      NEEDLE_CASE(stage_rounded_values_lie_within_half_a_step_but_for_one_in_a_hundred),
      NEEDLE_CASE(rounding_modes_differ_where_they_should),
      NEEDLE_CASE(any_chunking_gives_the_same_bytes),
      NEEDLE_CASE(long_runs_of_rows_give_the_bytes_of_short_ones),
      NEEDLE_CASE(a_run_of_rows_is_pooled_right),
      NEEDLE_CASE(raw_and_running_state_give_the_same_pages),
      NEEDLE_CASE(rejected_tokens_leave_no_trace),
      NEEDLE_CASE(a_run_resumed_from_a_boundary_record_gives_the_same_bytes),
      NEEDLE_CASE(a_store_that_the_record_does_not_expect_writes_nothing),
      NEEDLE_CASE(a_commit_that_does_not_fit_changes_nothing),
      NEEDLE_CASE(batch_page_order_and_threads_do_not_matter),
      NEEDLE_CASE(the_whole_slot_is_written_and_nothing_else),
      NEEDLE_CASE(absent_pages_are_skipped_and_bad_ones_never_touched),
      NEEDLE_CASE(pooled_rows_take_the_same_chain),
      NEEDLE_CASE(slot_minus_one_skips_and_a_slot_outside_the_pool_is_never_written),
      NEEDLE_CASE(the_hadamard_and_quantiser_give_the_golden_bytes),
      NEEDLE_CASE(the_compressor_gives_the_golden_pools),
      NEEDLE_CASE(rows_that_are_not_numbers_spoil_their_own_entries_alone),
      NEEDLE_CASE(a_minus_infinite_score_weighs_nothing),
      NEEDLE_CASE(a_position_bias_that_spreads_far_is_pooled_right),
      NEEDLE_CASE(gates_of_any_size_are_pooled_right),
      NEEDLE_CASE(pages_past_4_and_64_gib_are_written_where_they_lie),
      NEEDLE_CASE(unsupported_formats_are_refused_with_a_reason),
      NEEDLE_CASE(wrong_arguments_are_named_before_anything_is_written),
      NEEDLE_CASE(init_clears_a_record_whatever_it_held),
      NEEDLE_CASE(a_record_named_twice_in_one_call_is_refused),
  };
#undef NEEDLE_CASE
  return kCases;
}

}  // namespace needle::testing
