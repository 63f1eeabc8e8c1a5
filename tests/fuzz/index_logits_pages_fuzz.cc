// Arbitrary page tables, rows, lengths and chunks into index_logits: whatever they say, no byte outside the pool, the
// table or the scores is touched, and every twin writes the same entries in the same way as the reference.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "base/workers.h"
#include "kernels/cpu_isa.h"
#include "kernels/index_logits.h"
#include "kernels/quantise.h"

namespace {

using namespace needle;

constexpr uint32_t kUntouched = 0xDEADBEEFu;

// Bytes of the input in turn, zeros after its end.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t byte() { return at_ < size_ ? data_[at_++] : uint8_t{0}; }
  int below(int bound) { return byte() % bound; }
  int32_t word() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value = value << 8 | byte();
    return static_cast<int32_t>(value);
  }
  // Mostly near the valid range, sometimes anything.
  int32_t id(int valid) { return byte() < 200 ? below(valid + 3) - 1 : word(); }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

struct FreeAligned {
  void operator()(std::byte* memory) const { std::free(memory); }
};

struct Outcome {
  std::vector<float> scores;
  OpReport report = {};
  absl::Status status;
};

// Numbers between about 0.5 and 6, a little different from slot to slot.
void fill(std::byte* pool, const LayerView& keys) {
  for (int64_t page = 0; page < keys.page_count; ++page) {
    for (int slot = 0; slot < keys.slots_per_page; ++slot) {
      const SlotPlace place = slot_place(keys.element, kIndexHeadDim, keys.slots_per_page, slot);
      std::byte* part = pool + page * keys.page_stride;
      for (int d = 0; d < kIndexHeadDim; ++d) {
        const uint32_t vary = static_cast<uint32_t>(page * 31 + slot * 7 + d);
        const uint16_t bf16 = static_cast<uint16_t>(0x3F00u + vary % 97u);
        if (keys.element == ElementFormat::kBf16) std::memcpy(part + place.data + 2 * d, &bf16, sizeof bf16);
        if (keys.element == ElementFormat::kFp8) part[place.data + d] = static_cast<std::byte>(0x30u + vary % 13u);
        if (keys.element == ElementFormat::kFp4) part[place.data + d / 2] = static_cast<std::byte>(vary % 256u);
      }
      const float one = 1.0f;
      if (keys.element == ElementFormat::kFp8) std::memcpy(part + place.scale, &one, sizeof one);
      if (keys.element == ElementFormat::kFp4) std::memset(part + place.scale, 127, 4);
    }
  }
}

void fail(const char* what, const char* twin) {
  std::fprintf(stderr, "index_logits: %s differs between the reference and %s\n", what, twin);
  std::abort();
}

void compare(const Outcome& due, const Outcome& got, const char* twin) {
  if (due.status.code() != got.status.code()) fail("the status", twin);
  if (due.report.status != got.report.status) fail("the report's status", twin);
  if (due.report.nan_scores != got.report.nan_scores) fail("the count of NaN scores", twin);
  if (due.report.absent_entries != got.report.absent_entries) fail("the count of absent entries", twin);
  for (size_t i = 0; i < due.scores.size(); ++i) {
    const uint32_t due_bits = bits_of(due.scores[i]);
    const bool number = std::isfinite(due.scores[i]) && due_bits != kUntouched;
    if (!number && bits_of(got.scores[i]) != due_bits) fail("what was written", twin);
    if (number && !(std::fabs(got.scores[i] - due.scores[i]) <= 1e-3f)) fail("a score", twin);  // |score| < 2,000 here
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  IndexLogitsArgs args;
  args.keys.element = static_cast<ElementFormat>(input.below(3));
  args.keys.slots_per_page = 1 + input.below(9);
  args.keys.head_dim = kIndexHeadDim;
  args.keys.page_count = input.below(6);
  const int64_t part_bytes = layer_page_bytes(args.keys.element, kIndexHeadDim, args.keys.slots_per_page);
  args.keys.page_stride = (part_bytes + 255) / 256 * 256;

  // The last page ends with its part, so that a read past it is seen.
  const int64_t pool_bytes = args.keys.page_count == 0 ? 0 : (args.keys.page_count - 1) * args.keys.page_stride + part_bytes;
  void* memory = nullptr;
  if (pool_bytes > 0 && posix_memalign(&memory, 256, static_cast<size_t>(pool_bytes)) != 0) return 0;
  const std::unique_ptr<std::byte, FreeAligned> pool(static_cast<std::byte*>(memory));
  fill(pool.get(), args.keys);
  args.keys.base = pool.get();

  args.pages.rows = input.below(4);
  args.pages.pages_per_row = input.below(6);
  args.pages.row_stride = args.pages.pages_per_row + input.below(3);
  std::vector<int32_t> table(static_cast<size_t>(args.pages.rows * args.pages.row_stride));
  for (int32_t& id : table) id = input.id(static_cast<int>(args.keys.page_count));
  args.pages.pages = table.data();

  args.heads = 1 + input.below(20);
  args.query_count = input.below(7);
  args.queries_per_row = 1 + input.below(10);
  std::vector<int32_t> rows;
  if (input.below(2) == 1) {
    for (int t = 0; t < args.query_count; ++t) rows.push_back(input.id(args.pages.rows));
    rows.push_back(0);  // an address also for no queries
    args.query_row = rows.data();
  }
  args.entry_begin = input.byte() < 230 ? int64_t{input.below(4)} * args.keys.slots_per_page : int64_t{input.word()};
  args.entry_count = input.below(60);
  args.score_stride = args.entry_count + input.below(3) - (input.byte() == 255 ? 1 : 0);
  std::vector<int32_t> visible(static_cast<size_t>(args.query_count) + 1);
  for (int32_t& length : visible) length = input.id(60);
  args.visible = visible.data();
  const std::vector<uint16_t> q(static_cast<size_t>(args.query_count * args.heads * kIndexHeadDim) + 1, uint16_t{0x3D80});
  args.q = q.data();
  std::vector<float> weights(static_cast<size_t>(args.query_count * args.heads) + 1);
  for (float& weight : weights) weight = static_cast<float>(input.byte()) / 256.0f - 0.5f;
  args.head_weights = weights.data();

  const auto run = [&](auto&& call) {
    Outcome outcome;
    outcome.scores.assign(static_cast<size_t>(args.query_count) * static_cast<size_t>(std::max<int64_t>(args.score_stride, 0)) + 1,
                          float_of_bits(kUntouched));
    args.scores = outcome.scores.data();
    args.report = &outcome.report;
    outcome.status = call();
    return outcome;
  };
  const Outcome due = run([&] { return index_logits_ref(args); });
  CallerThread caller;
  for (CpuIsa isa : cpu_isas_present()) {
    compare(due, run([&] { return index_logits_cpu(args, isa, caller); }), name_of(isa));
  }
  return 0;
}
