// read_entries on the CPU: runs of ids over the caller's threads, fp8 widened eight codes at a time.
//
// What must stay true:
//  1. The same bits as the reference: code x scale is one fp32 product (a code has four significant bits, so the double
//     product rounds to the same fp32), then one rounding to bf16.
//  2. Nothing is allocated; each id writes its own bytes.
#include <algorithm>
#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "kernels/op_report.h"
#include "kernels/quantise.h"
#include "kernels/read_entries.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define NEEDLE_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#endif

namespace needle {
namespace {

// Ids a thread takes at a time: enough to pay for the hand-over, few enough to share a small batch.
constexpr int64_t kRun = 32;

using WidenFp8 = void (*)(const std::byte* codes, int64_t count, float scale, std::byte* out);

void put(std::byte* out, int64_t index, uint16_t value) { std::memcpy(out + 2 * index, &value, sizeof(value)); }

void widen_fp8_portable(const std::byte* codes, int64_t count, float scale, std::byte* out) {
  for (int64_t i = 0; i < count; ++i) put(out, i, bf16_of(float_of_e4m3(static_cast<uint8_t>(codes[i])) * scale));
}

#if defined(__x86_64__)

// An e4m3 code moved into a half's fields is the value x 2^-8, denormals included: exponent bias 7 against 15. The
// code 0x7F would be 480 there and is made NaN by hand.
NEEDLE_TARGET_AVX2 void widen_fp8_avx2(const std::byte* codes, int64_t count, float scale, std::byte* out) {
  const __m128i magnitude_mask = _mm_set1_epi16(0x7F);
  const __m128i sign_mask = _mm_set1_epi16(0x80);
  const __m256 unbias = _mm256_set1_ps(256.0f);
  const __m256 factor = _mm256_set1_ps(scale);
  const __m256i half_step = _mm256_set1_epi32(0x7FFF);
  const __m256i nan = _mm256_set1_epi32(kBf16Nan);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i code = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    const __m128i magnitude = _mm_and_si128(code, magnitude_mask);
    const __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), _mm_slli_epi16(_mm_and_si128(code, sign_mask), 8));
    const __m256i code_nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(magnitude, magnitude_mask));
    const __m256 value = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtph_ps(half), unbias), factor);
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i value_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(half_step, odd)), 16);
    rounded = _mm256_blendv_epi8(rounded, nan, _mm256_or_si256(code_nan, value_nan));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), _mm256_castsi256_si128(packed));
  }
  widen_fp8_portable(codes + i, count - i, scale, out + 2 * i);
}

#endif  // __x86_64__

WidenFp8 widen_fp8_for(CpuIsa isa) {
#if defined(__x86_64__)
  if (isa != CpuIsa::kPortable) return widen_fp8_avx2;
#else
  (void)isa;
#endif
  return widen_fp8_portable;
}

float float_at(const std::byte* bytes, int64_t index) {
  float value;
  std::memcpy(&value, bytes + index * 4, sizeof(value));
  return value;
}

void widen_fp4(const std::byte* pairs, const std::byte* scales, int64_t count, std::byte* out) {
  for (int64_t block = 0; block < count / 32; ++block) {
    const float scale = float_of_ue8m0(static_cast<uint8_t>(scales[block]));
    uint16_t values[16];
    for (uint8_t code = 0; code < 16; ++code) values[code] = bf16_of(float_of_e2m1(code) * scale);
    for (int64_t i = 0; i < 16; ++i) {
      const uint8_t pair = static_cast<uint8_t>(pairs[block * 16 + i]);
      put(out, block * 32 + 2 * i, values[pair & 0xF]);
      put(out, block * 32 + 2 * i + 1, values[pair >> 4]);
    }
  }
}

void widen_entry(const LayerView& layer, const EntryPlace& place, WidenFp8 widen_fp8, std::byte* out) {
  switch (layer.element) {
    case ElementFormat::kBf16: std::memcpy(out, place.data, static_cast<size_t>(layer.head_dim) * 2); return;
    case ElementFormat::kFp8: widen_fp8(place.data, layer.head_dim, float_at(place.scale, 0), out); return;
    case ElementFormat::kFp4: widen_fp4(place.data, place.scale, layer.head_dim, out); return;
    case ElementFormat::kFp8DsMla:
      for (int64_t block = 0; block < 7; ++block) {
        const float scale = float_of_ue8m0(static_cast<uint8_t>(place.scale[block]));
        widen_fp8(place.data + block * 64, 64, scale, out + block * 128);
      }
      std::memcpy(out + 448 * 2, place.data + 448, 128);
      return;
    case ElementFormat::kFp8V32:
      for (int64_t block = 0; block < 4; ++block) {
        widen_fp8(place.data + block * 128, 128, float_at(place.scale, block), out + block * 256);
      }
      std::memcpy(out + 512 * 2, place.data + 528, 128);
      return;
    case ElementFormat::kFp32Rows: return;  // refused by the check
  }
}

}  // namespace

absl::Status read_entries_cpu(const ReadEntriesArgs& args, CpuIsa isa, Workers& workers) {
  absl::Status status = check_read_entries(args);
  if (!status.ok()) return status;
  if (!cpu_has(isa)) {
    return absl::InvalidArgumentError(
        absl::StrCat("read_entries_cpu: this machine has no ", name_of(isa), "; pass best_cpu_isa() or one of cpu_isas_present()"));
  }
  const LayerView& layer = args.layer;
  const int64_t entry_bytes = read_entry_bytes(layer.element, layer.head_dim, args.form);
  const int64_t data_bytes = slot_data_bytes(layer.element, layer.head_dim);
  const WidenFp8 widen_fp8 = widen_fp8_for(isa);
  const int64_t runs_per_row = div_ceil(args.ids_per_row, kRun);

  const auto read_run = [&](int64_t run, int) {
    const int64_t row = run / runs_per_row;
    const int64_t begin = run % runs_per_row * kRun;
    const int64_t end = std::min<int64_t>(begin + kRun, args.ids_per_row);
    OpReport found{};
    for (int64_t index = begin; index < end; ++index) {
      const EntryPlace place = entry_place(args, row, index);
      std::byte* out = args.out + row * args.row_stride + index * args.entry_stride;
      if (place.kind != EntryPlaceKind::kThere) {
        std::memset(out, 0, static_cast<size_t>(entry_bytes));
        found.skipped_rows += place.kind == EntryPlaceKind::kBadSlot ? 1 : 0;
        found.absent_entries += place.kind == EntryPlaceKind::kAbsentPage ? 1 : 0;
      } else if (args.form == ReadForm::kRaw) {
        std::memcpy(out, place.data, static_cast<size_t>(data_bytes));
        std::memcpy(out + data_bytes, place.scale, static_cast<size_t>(entry_bytes - data_bytes));
      } else {
        widen_entry(layer, place, widen_fp8, out);
      }
    }
    if (found.skipped_rows > 0) found.status |= kStatusBadSlot;
    if (found.absent_entries > 0) found.status |= kStatusAbsentPage;
    add_to_report(args.report, found);
  };
  workers.run(args.rows * runs_per_row, std::ref(read_run));
  return absl::OkStatus();
}

}  // namespace needle
