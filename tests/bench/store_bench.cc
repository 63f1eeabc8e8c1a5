// What the store side costs on one core of this machine: rows to finished slots, by component and instruction set.
// bytes_per_second counts rows read and slots written.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/rng.h"
#include "base/units.h"
#include "kernels/cpu_isa.h"
#include "kernels/prepare_index_q.h"
#include "kernels/store.h"

namespace needle {
namespace {

std::vector<uint16_t> random_bf16(int64_t count, uint64_t seed) {
  Rng rng(seed);
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) value = bf16_of(static_cast<float>(rng.unit() * 4 - 2));
  return values;
}

struct Table {
  explicit Table(int64_t positions) : cos_sin(static_cast<size_t>(positions * kRopeDims)) {
    float frequencies[kRopePairs];
    CallerThread alone;
    if (!rope_inverse_frequencies({160000, 16, 65536, 32, 1}, frequencies).ok() ||
        !build_rope_table(frequencies, 0, positions, cos_sin.data(), alone).ok()) {
      std::abort();
    }
    view = {cos_sin.data(), positions};
  }
  std::vector<float> cos_sin;
  RopeTableView view;
};

Component component_of(ComponentKind kind, int ratio, ElementFormat element, ScaleKind scale) {
  Component component;
  component.kind = kind;
  component.layers = 1;
  component.ratio = ratio;
  component.element = element;
  component.scale = scale;
  component.head_dim = kind == ComponentKind::kIndexK ? 128 : 512;
  component.rope = RopeStyle::kInterleavedLast64;
  component.hadamard = kind == ComponentKind::kIndexK;
  return component;
}

// A prefill chunk of one sequence that goes on and on.
void store_rows(benchmark::State& bench, Component component, CpuIsa isa) {
  const int64_t tokens = 4096;
  const int dims = component.head_dim;
  const int64_t columns = int64_t{row_halves(component.ratio)} * dims;
  const std::vector<uint16_t> kv = random_bf16(tokens * columns, 1);
  const std::vector<uint16_t> gate = random_bf16(tokens * columns, 2);
  const std::vector<float> bias(static_cast<size_t>(component.ratio * columns), 0.25f);
  const std::vector<float> weight(static_cast<size_t>(dims), 1.0f);
  const Table table(tokens);
  const int slots = 64;
  const int64_t entries = tokens / component.ratio;
  const int64_t stride = round_up(layer_page_bytes(component.element, dims, slots), kPageAlignment);
  const int64_t pages = div_ceil(entries, slots);
  std::vector<std::byte> pool(static_cast<size_t>(pages * stride + 64));
  std::vector<int32_t> page_ids(static_cast<size_t>(pages));
  for (size_t i = 0; i < page_ids.size(); ++i) page_ids[i] = static_cast<int32_t>(i);

  OpReport report = {};
  CallerThread alone;
  StateView state;
  std::vector<std::byte> record;
  StateStart start;
  start.sequence = 1;
  if (component.ratio > 1) {
    state.form = component.ratio == 4 ? StateForm::kRaw : StateForm::kRunning;
    state.ratio = component.ratio;
    state.head_dim = dims;
    state.stride = state_record_bytes(state.form, state.ratio, dims, 0);
    state.count = 1;
    record.resize(static_cast<size_t>(state.stride));
    state.base = record.data();
  }
  StoreSequence sequence;
  sequence.row_count = tokens;
  sequence.sequence = 1;
  StoreRowsArgs args;
  args.chain.component = component;
  args.chain.norm_weight = weight.data();
  args.chain.rope = table.view;
  args.out = {pool.data(), stride, pages, slots, dims, component.element, component.scale};
  args.pages = {page_ids.data(), nullptr, pages, 1, static_cast<int32_t>(pages)};
  args.kv = {kv.data(), columns, RowElement::kBf16};
  if (component.ratio > 1) {
    args.gate = {gate.data(), columns, RowElement::kBf16};
    args.position_bias = bias.data();
  }
  args.rows = tokens;
  args.sequences = &sequence;
  args.sequence_count = 1;
  args.state = state;
  args.report = &report;
  for (auto _ : bench) {
    if (component.ratio > 1) {
      InitStateArgs init;
      init.state = state;
      init.starts = &start;
      init.count = 1;
      if (!init_state_cpu(init, alone).ok()) bench.SkipWithError("init failed");
    }
    if (!store_rows_cpu(args, isa, alone).ok() || report.status != 0) bench.SkipWithError("store failed");
  }
  const int64_t bytes = tokens * columns * (component.ratio > 1 ? 4 : 2) + entries * slot_data_bytes(component.element, dims);
  bench.SetBytesProcessed(static_cast<int64_t>(bench.iterations()) * bytes);
  bench.counters["tokens/s"] = benchmark::Counter(static_cast<double>(bench.iterations() * tokens), benchmark::Counter::kIsRate);
}

void prepare(benchmark::State& bench, QueryElement element, ScaleKind scale, CpuIsa isa) {
  const int64_t tokens = 64;
  const int heads = 64;
  const std::vector<uint16_t> q = random_bf16(tokens * heads * 128, 3);
  const std::vector<uint16_t> weights = random_bf16(tokens * heads, 4);
  const Table table(4096);
  std::vector<int64_t> positions(static_cast<size_t>(tokens), 1000);
  std::vector<std::byte> out(static_cast<size_t>(tokens * heads * 256));
  std::vector<uint8_t> out_scale(static_cast<size_t>(tokens * heads * 4));
  std::vector<float> out_weights(static_cast<size_t>(tokens * heads));
  OpReport report = {};
  PrepareIndexQArgs args;
  args.component = component_of(ComponentKind::kIndexK, 4, ElementFormat::kBf16, ScaleKind::kNone);
  args.rope = table.view;
  args.q = {q.data(), heads * 128, RowElement::kBf16};
  args.raw_weights = {weights.data(), heads, RowElement::kBf16};
  args.positions = positions.data();
  args.tokens = tokens;
  args.heads = heads;
  args.element = element;
  args.scale = scale;
  args.out_q = out.data();
  args.out_q_scale = out_scale.data();
  args.out_weights = out_weights.data();
  args.report = &report;
  CallerThread alone;
  for (auto _ : bench) {
    if (!prepare_index_q_cpu(args, isa, alone).ok()) bench.SkipWithError("prepare failed");
  }
  bench.counters["queries/s"] = benchmark::Counter(static_cast<double>(bench.iterations() * tokens), benchmark::Counter::kIsRate);
}

const bool kRegistered = [] {
  for (CpuIsa isa : cpu_isas_present()) {
    if (isa == CpuIsa::kAvx512Bf16) continue;  // the same code as kAvx512
    const std::string on = std::string("/") + name_of(isa);
    const auto rows = [&](const char* name, Component component) {
      benchmark::RegisterBenchmark((std::string("store_rows/") + name + on).c_str(),
                                   [component, isa](benchmark::State& bench) { store_rows(bench, component, isa); });
    };
    rows("index_k_ratio4_bf16", component_of(ComponentKind::kIndexK, 4, ElementFormat::kBf16, ScaleKind::kNone));
    rows("index_k_ratio4_fp8", component_of(ComponentKind::kIndexK, 4, ElementFormat::kFp8, ScaleKind::kAmax));
    rows("main_kv_ratio4_fp8_ds_mla", component_of(ComponentKind::kMainKv, 4, ElementFormat::kFp8DsMla, ScaleKind::kPowerOfTwo));
    rows("main_kv_ratio128_fp8_ds_mla", component_of(ComponentKind::kMainKv, 128, ElementFormat::kFp8DsMla, ScaleKind::kPowerOfTwo));
    rows("window_kv_fp8_ds_mla", component_of(ComponentKind::kWindowKv, 1, ElementFormat::kFp8DsMla, ScaleKind::kPowerOfTwo));
    benchmark::RegisterBenchmark((std::string("prepare_index_q/bf16") + on).c_str(),
                                 [isa](benchmark::State& bench) { prepare(bench, QueryElement::kBf16, ScaleKind::kNone, isa); });
    benchmark::RegisterBenchmark((std::string("prepare_index_q/fp8") + on).c_str(),
                                 [isa](benchmark::State& bench) { prepare(bench, QueryElement::kFp8, ScaleKind::kAmax, isa); });
  }
  return true;
}();

}  // namespace
}  // namespace needle
