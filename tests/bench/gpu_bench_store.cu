// Rows store.* and pages.*: what moves bytes.
#include "kernels/checksum_pages.h"
#include "kernels/copy_pages.h"
#include "kernels/store.h"
#include "tests/bench/gpu_bench.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <vector>

namespace needle::bench {
namespace {

constexpr int kRotation = 24;

template <class T>
T* device_copy(const std::vector<T>& host) {
  T* device = static_cast<T*>(device_bytes(static_cast<int64_t>(host.size() * sizeof(T))));
  must(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "copy in");
  return device;
}

EntryChain chain_of(ComponentKind kind, int dims, int ratio, ElementFormat element, Bench& bench, int64_t positions,
                    std::vector<void*>& owned) {
  EntryChain chain;
  chain.component.kind = kind;
  chain.component.layers = 1;
  chain.component.ratio = ratio;
  chain.component.element = element;
  chain.component.scale = element == ElementFormat::kFp8DsMla ? ScaleKind::kPowerOfTwo : ScaleKind::kNone;
  chain.component.head_dim = dims;
  chain.component.rope = RopeStyle::kInterleavedLast64;
  chain.component.hadamard = kind == ComponentKind::kIndexK;
  float* weights = static_cast<float*>(device_bytes(dims * 4));
  float* table = static_cast<float*>(device_bytes(positions * kRopeDims * 4));
  fill_normal_f32(weights, dims, 3, 0.1f, 1.0f, bench.stream());
  fill_normal_f32(table, positions * kRopeDims, 4, 0.5f, 0.0f, bench.stream());
  owned.insert(owned.end(), {weights, table});
  chain.norm_weight = weights;
  chain.rope = {table, positions};
  return chain;
}

OpReport* report_of(Bench& bench, std::vector<void*>& owned) {
  OpReport* report = static_cast<OpReport*>(device_bytes(sizeof(OpReport)));
  must(cudaMemsetAsync(report, 0, sizeof(OpReport), bench.stream()), "report");
  owned.push_back(report);
  return report;
}

// 16,384 pooled index-K rows into bf16 pages, as a prefill chunk of one layer brings them.
void pooled_rows(Bench& bench, const char* id, RowElement element) {
  std::vector<void*> owned;
  constexpr int64_t kRows = 16384;
  const int64_t bytes = element == RowElement::kFp32 ? 4 : 2;
  StorePooledArgs args;
  args.chain = chain_of(ComponentKind::kIndexK, 128, 4, ElementFormat::kBf16, bench, 65536, owned);
  std::byte* rows = static_cast<std::byte*>(device_bytes(kRows * 128 * bytes * kRotation));
  if (element == RowElement::kFp32) {
    fill_normal_f32(reinterpret_cast<float*>(rows), kRows * 128 * kRotation, 5, 1.0f, 0.0f, bench.stream());
  } else {
    fill_normal_bf16(rows, kRows * 128 * kRotation, 5, 1.0f, bench.stream());
  }
  std::byte* pool = static_cast<std::byte*>(device_bytes(kRows * 256 * kRotation));
  std::vector<int64_t> slots(kRows);
  std::vector<int64_t> positions(kRows);
  for (int64_t i = 0; i < kRows; ++i) {
    slots[static_cast<size_t>(i)] = (i / 64 * 37 % 256) * 64 + i % 64;
    positions[static_cast<size_t>(i)] = 4 * i;
  }
  args.slots = device_copy(slots);
  args.positions = device_copy(positions);
  args.count = kRows;
  args.report = report_of(bench, owned);
  args.out = {pool, 16384, 256, 64, 128, ElementFormat::kBf16, ScaleKind::kNone};
  owned.insert(owned.end(), {rows, pool, const_cast<int64_t*>(args.slots), const_cast<int64_t*>(args.positions)});
  const double us = bench.us_a_call([&](int i) {
    args.rows = {rows + int64_t{i % kRotation} * kRows * 128 * bytes, 128, element};
    args.out.base = pool + int64_t{i % kRotation} * kRows * 256;
    return store_pooled_cuda(args, bench.stream());
  });
  char note[64];
  std::snprintf(note, sizeof(note), "%.0f GB/s moved", double(kRows) * 128.0 * double(bytes + 2) * 1e-3 / us);
  bench.record(id, us, note);
  for (void* pointer : owned) device_free(pointer);
}

// Raw rows of one sequence at ratio 4, bf16, into its pages; record kept up. Bytes: rows read, entries written.
void raw_rows(Bench& bench, const char* id, ComponentKind kind, int dims, ElementFormat element, int64_t rows) {
  std::vector<void*> owned;
  StoreRowsArgs args;
  args.chain = chain_of(kind, dims, 4, element, bench, rows * 2, owned);
  const int64_t columns = 2 * dims;
  const int rotation = static_cast<int>(std::clamp<int64_t>((int64_t{4} << 30) / (rows * columns * 4), 2, kRotation));
  std::byte* kv = static_cast<std::byte*>(device_bytes(rows * columns * 2 * rotation));
  std::byte* gate = static_cast<std::byte*>(device_bytes(rows * columns * 2 * rotation));
  fill_normal_bf16(kv, rows * columns * rotation, 6, 1.0f, bench.stream());
  fill_normal_bf16(gate, rows * columns * rotation, 7, 1.0f, bench.stream());
  float* bias = static_cast<float*>(device_bytes(4 * columns * 4));
  fill_normal_f32(bias, 4 * columns, 8, 0.1f, 0.0f, bench.stream());
  const int64_t pages = rows / 256;
  const int64_t part = layer_page_bytes(element, dims, 64);
  std::byte* pool = static_cast<std::byte*>(device_bytes(pages * part * rotation));
  std::vector<int32_t> table(static_cast<size_t>(pages));
  for (int64_t i = 0; i < pages; ++i) table[static_cast<size_t>(i)] = static_cast<int32_t>((i * 37 + 11) % pages);
  const int64_t record_bytes = state_record_bytes(StateForm::kRaw, 4, dims, 0);
  std::byte* records = static_cast<std::byte*>(device_bytes(record_bytes * rotation));
  args.state = {records, record_bytes, rotation, StateForm::kRaw, 4, dims, 0};
  std::vector<StateStart> starts(static_cast<size_t>(rotation));
  std::vector<StoreSequence> sequences(static_cast<size_t>(rotation));
  for (int r = 0; r < rotation; ++r) {
    starts[static_cast<size_t>(r)] = {r, 1, 0, -1, 1, 0};
    sequences[static_cast<size_t>(r)] = {0, rows, 0, r, 1, 1, 0};
  }
  InitStateArgs init;
  init.state = args.state;
  init.starts = device_copy(starts);
  init.count = rotation;
  StoreSequence* listed = device_copy(sequences);
  int32_t* listed_pages = device_copy(table);
  args.pages = {listed_pages, nullptr, pages, 1, static_cast<int32_t>(pages)};
  args.position_bias = bias;
  args.rows = rows;
  args.sequence_count = 1;
  args.report = report_of(bench, owned);
  owned.insert(owned.end(), {kv, gate, bias, pool, records, const_cast<StateStart*>(init.starts), listed, listed_pages});
  // A record is stored into once, then begun anew: all of them at a rotation's first call, which is one small kernel in
  // `rotation` calls and stays in the figure.
  const double us = bench.us_a_call([&](int i) -> absl::Status {
    const int64_t turn = i % rotation;
    if (turn == 0) must(init_state_cuda(init, bench.stream()), "init_state");
    args.kv = {kv + turn * rows * columns * 2, columns, RowElement::kBf16};
    args.gate = {gate + turn * rows * columns * 2, columns, RowElement::kBf16};
    args.out = {pool + turn * pages * part, part, pages, 64, dims, element, args.chain.component.scale};
    args.sequences = listed + turn;
    return store_rows_cuda(args, nullptr, 0, bench.stream());
  });
  OpReport report;
  must(cudaMemcpy(&report, args.report, sizeof(report), cudaMemcpyDeviceToHost), "report");
  const double moved = double(rows) * double(columns) * 4 + double(pages) * double(part);
  const double copy = bench.copy_bytes_a_us(static_cast<int64_t>(moved));
  char note[128];
  std::snprintf(note, sizeof(note), "%.1f us, %.0f of %.0f GB/s, %llu skipped", us, moved * 1e-3 / us, copy * 1e-3,
                static_cast<unsigned long long>(report.skipped_rows));
  bench.record(id, report.skipped_rows == 0 ? 100.0 * moved / us / copy : 0.0, note);
  for (void* pointer : owned) device_free(pointer);
}

constexpr int64_t kFlashStride = 1165824;
constexpr int64_t kPages = 2048;

void page_rows(Bench& bench) {
  // One pool of 3 x 2,048 pages; calls rotate over layers and over thirds of the pool.
  constexpr int64_t kPool = 3 * kPages;
  std::byte* pool = static_cast<std::byte*>(device_bytes(kPool * kFlashStride));
  fill_normal_bf16(pool, kPool * kFlashStride / 2, 9, 1.0f, bench.stream());
  std::byte* packed = static_cast<std::byte*>(device_bytes(kPages * 16384 * kRotation));
  std::vector<int32_t> ids(static_cast<size_t>(kPool));
  for (int64_t i = 0; i < kPool; ++i) ids[static_cast<size_t>(i)] = static_cast<int32_t>((i * 1021 + 7) % kPool);
  int32_t* listed = device_copy(ids);
  uint64_t* sums = static_cast<uint64_t*>(device_bytes(kPages * 8));

  CopyPagesArgs gather;
  gather.page_bytes = 16384;
  gather.count = static_cast<int32_t>(kPages);
  const auto gather_once = [&](int i) {
    gather.from = {pool + int64_t{i % 21} * 16384, kFlashStride, kPool};
    gather.from_pages = listed + (i % 3) * kPages;
    gather.to = {packed + int64_t{i % kRotation} * kPages * 16384, 16384, kPages};
    return copy_pages_cuda(gather, bench.stream());
  };
  const double gather_us = bench.us_a_call(gather_once);
  const double gather_moved = 2.0 * double(kPages) * 16384;
  const double gather_copy = bench.copy_bytes_a_us(static_cast<int64_t>(gather_moved));
  char note[128];
  std::snprintf(note, sizeof(note), "%.1f us, %.0f of %.0f GB/s", gather_us, gather_moved * 1e-3 / gather_us, gather_copy * 1e-3);
  bench.record("pages.gather", 100.0 * gather_moved / gather_us / gather_copy, note);

  // With the checksum of what was copied folded in, and of whole pages: no goals, two lines.
  gather.checksums = sums;
  const double summed_us = bench.us_a_call(gather_once);
  std::printf("  the same gather with checksums %.1f us, %.0f of %.0f GB/s\n", summed_us, gather_moved * 1e-3 / summed_us,
              gather_copy * 1e-3);
  constexpr int32_t kWhole = 1'024;
  std::byte* whole_to = static_cast<std::byte*>(device_bytes(kWhole * kFlashStride));
  CopyPagesArgs whole;
  whole.from = {pool, kFlashStride, kPool};
  whole.to = {whole_to, kFlashStride, kWhole};
  whole.page_bytes = kFlashStride;
  whole.count = kWhole;
  const double whole_moved = 2.0 * kWhole * double(kFlashStride);
  const double whole_copy = bench.copy_bytes_a_us(static_cast<int64_t>(whole_moved));
  for (const bool with_sums : {false, true}) {
    whole.checksums = with_sums ? sums : nullptr;
    const double whole_us = bench.us_a_call([&](int i) {
      whole.from_pages = listed + i % 6 * kWhole;
      return copy_pages_cuda(whole, bench.stream());
    });
    std::printf("  1,024 whole pages%s %.1f us, %.0f of %.0f GB/s\n", with_sums ? " with checksums" : "", whole_us,
                whole_moved * 1e-3 / whole_us, whole_copy * 1e-3);
  }
  device_free(whole_to);

  ChecksumPagesArgs sum;
  sum.base = pool;
  sum.page_stride = kFlashStride;
  sum.page_bytes = kFlashStride;
  sum.page_count = kPool;
  sum.count = static_cast<int32_t>(kPages);
  sum.checksums = sums;
  const double sum_us = bench.us_a_call([&](int i) {
    sum.pages = listed + (i % 3) * kPages;
    return checksum_pages_cuda(sum, bench.stream());
  });
  const double sum_read = double(kPages) * double(kFlashStride);
  const double sum_copy = bench.copy_bytes_a_us(static_cast<int64_t>(sum_read));
  std::snprintf(note, sizeof(note), "%.1f us, %.0f of %.0f GB/s", sum_us, sum_read * 1e-3 / sum_us, sum_copy * 1e-3);
  bench.record("pages.checksum", 100.0 * sum_read / sum_us / sum_copy, note);
  for (void* pointer : {static_cast<void*>(pool), static_cast<void*>(packed), static_cast<void*>(listed), static_cast<void*>(sums)}) {
    device_free(pointer);
  }
}

}  // namespace

void bench_store(Bench& bench) {
  pooled_rows(bench, "store.pooled.bf16", RowElement::kBf16);
  pooled_rows(bench, "store.pooled.fp32", RowElement::kFp32);
  raw_rows(bench, "store.rows.index_k", ComponentKind::kIndexK, 128, ElementFormat::kBf16, 65536);
  raw_rows(bench, "store.rows.main_kv", ComponentKind::kMainKv, 512, ElementFormat::kFp8DsMla, 32768);
}

void bench_pages(Bench& bench) { page_rows(bench); }

}  // namespace needle::bench
