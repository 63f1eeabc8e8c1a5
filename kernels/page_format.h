// The bytes of a page. This is the only place that turns (page, component, layer, slot) into an offset.
//
// What must stay true:
//  1. A PageFormat is a value: it travels with the pool, at attach and on the wire, as its canonical text; two
//     formats are equal exactly when their texts are, and any difference is refused with both printed.
//  2. Every offset and size is 64-bit: pools exceed 4 GiB and page ids exceed any 32-bit byte offset.
//  3. Padding and unwritten slots are zero on purpose; whole strides are hashed and compared.
//  4. Nothing here reads the environment.
//
// PAGE_FORMAT.md has the same in prose with a page worked through by hand; tests/kernels/page_format_test.cc holds
// every literal of it. Sources of the layouts: SGLang and DeepGEMM for index-K (values of all slots, then scales),
// SGLang and FlashMLA for main KV (584-byte slots padded to 576; V3.2's 656-byte slots).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/units.h"

#if defined(__CUDACC__)
#define NEEDLE_HD __host__ __device__
#else
#define NEEDLE_HD
#endif

namespace needle {

inline constexpr int kPageFormatVersion = 1;

// How the numbers of one slot are stored.
enum class ElementFormat : uint8_t {
  kBf16 = 0,      // head_dim x 2 B, no scale
  kFp8 = 1,       // index-K: head_dim e4m3fn bytes; one fp32 scale a slot, after the values of all slots
  kFp4 = 2,       // index-K: head_dim/2 bytes of e2m1 pairs (even element in the low nibble); head_dim/32 ue8m0 bytes
  kFp8DsMla = 3,  // main KV of V4: 448 e4m3fn + 64 bf16 (576 B); 7 ue8m0 bytes and a zero byte, after all slots' data
  kFp8V32 = 4,    // main KV of V3.2: 512 e4m3fn | 4 fp32 scales | 64 bf16, 656 B side by side
  kFp32Rows = 5,  // compressor state: see kernels/compressor_state.h
};
inline constexpr int kElementFormatCount = 6;

// How an fp8 or fp4 scale is made from a block's amax (at least 1e-4). The stored value is always code x scale.
enum class ScaleKind : uint8_t {
  kNone = 0,
  kAmax = 1,            // amax / 448 in fp32, codes by IEEE division
  kAmaxReciprocal = 2,  // amax / 448 in fp32, codes by multiplication with 1 / scale (SGLang's store kernel)
  kPowerOfTwo = 3,      // 2^ceil(log2(amax / 448)), or / 6 for fp4, from exponent bits
};
inline constexpr int kScaleKindCount = 4;

enum class PoolKind : uint8_t {
  kPaged = 0,   // a page holds every layer's slots of a run of raw tokens
  kWindow = 1,  // sliding-window KV, the same with few live pages a sequence
  kState = 2,   // compressor state: one record a sequence
};

enum class ComponentKind : uint8_t { kIndexK = 0, kMainKv = 1, kWindowKv = 2, kIndexKState = 3, kMainKvState = 4 };

enum class PageOrder : uint8_t {
  kPageMajor = 0,   // page i at base + i x stride, all components and layers inside
  kLayerMajor = 1,  // one array of pages a (component, layer), as engines have it
};

enum class RopeStyle : uint8_t {
  kNone = 0,
  kInterleavedLast64 = 1,  // pairs (2i, 2i+1) of the last 64 dimensions: V4, and main KV everywhere
  kHalfSplitFirst64 = 2,   // pairs (i, i+32) of the first 64 dimensions: V3.2's index-K
};

// How a compressor with ratio > 4 carries its open group between stores.
enum class StateForm : uint8_t {
  kNone = 0,
  kRaw = 1,      // the rows themselves in a ring (ratio 4 always; ratio 128 as SGLang has it)
  kRunning = 2,  // running maximum | sum | weighted sum, 3 x head_dim fp32 (ratio 128)
};

inline constexpr int kRopeDims = 64;           // rotary width everywhere in this family
inline constexpr int kSpeculativeRowsMax = 8;  // tokens a sequence may hold unaccepted
inline constexpr int kComponentsMax = 16;
inline constexpr int kLayersMax = 512;
inline constexpr int kSlotsPerPageMax = 4096;
inline constexpr int kTokensPerPageMax = 65536;
inline constexpr int64_t kPageBytesMax = int64_t{1} << 30;

// The RoPE table a component's keys and their queries share. theta == 0 where the style is kNone.
// yarn_factor == 0 means no YaRN. Formula: deepseek-v4 reference, inv_freq_i = f_i / factor x ramp + f_i x (1 - ramp).
struct RopeParameters {
  double theta = 0;
  double yarn_factor = 0;
  double yarn_original_positions = 0;
  double yarn_beta_fast = 0;
  double yarn_beta_slow = 0;
  friend bool operator==(const RopeParameters&, const RopeParameters&) = default;
};

struct Component {
  ComponentKind kind = ComponentKind::kIndexK;
  int layers = 0;
  int ratio = 1;  // raw tokens an entry covers
  ElementFormat element = ElementFormat::kBf16;
  ScaleKind scale = ScaleKind::kNone;
  int head_dim = 128;
  RopeStyle rope = RopeStyle::kNone;
  RopeParameters rope_table;
  bool hadamard = false;  // rotation of keys, and so of queries
  StateForm state_form = StateForm::kNone;
  int speculative_rows = 0;  // 0..kSpeculativeRowsMax, state components only
  friend bool operator==(const Component&, const Component&) = default;
};

struct PageFormat {
  std::string name;  // the preset it came from or what an operator called it; part of the text, not of the bytes
  PoolKind pool = PoolKind::kPaged;
  PageOrder order = PageOrder::kPageMajor;
  int tokens_per_page = 256;  // 0 for state pools
  std::vector<Component> components;
  friend bool operator==(const PageFormat&, const PageFormat&) = default;
};

// ---------------------------------------------------------------------------------------------------------------
// Bytes inside one layer's part of a page. `slots` is the number of slots of that layer in a page.

struct SlotPlace {
  int64_t data = 0;   // offset of the slot's first value byte from the layer's part of the page
  int64_t scale = 0;  // offset of the slot's first scale byte; equals `data` where there is none
};

NEEDLE_HD constexpr int64_t slot_data_bytes(ElementFormat element, int64_t head_dim) {
  switch (element) {
    case ElementFormat::kBf16: return head_dim * 2;
    case ElementFormat::kFp8: return head_dim;
    case ElementFormat::kFp4: return head_dim / 2;
    case ElementFormat::kFp8DsMla: return 576;
    case ElementFormat::kFp8V32: return 656;
    case ElementFormat::kFp32Rows: return 0;
  }
  return 0;
}

NEEDLE_HD constexpr int64_t slot_scale_bytes(ElementFormat element, int64_t head_dim) {
  switch (element) {
    case ElementFormat::kFp8: return 4;
    case ElementFormat::kFp4: return head_dim / 32;
    case ElementFormat::kFp8DsMla: return 8;
    default: return 0;
  }
}

// Bytes of one layer's part of a page, with its own padding (main KV of V4 pads to 576).
NEEDLE_HD constexpr int64_t layer_page_bytes(ElementFormat element, int64_t head_dim, int64_t slots) {
  const int64_t bytes = slots * (slot_data_bytes(element, head_dim) + slot_scale_bytes(element, head_dim));
  return element == ElementFormat::kFp8DsMla ? (bytes + 575) / 576 * 576 : bytes;
}

NEEDLE_HD constexpr SlotPlace slot_place(ElementFormat element, int64_t head_dim, int64_t slots, int64_t slot) {
  const int64_t data_bytes = slot_data_bytes(element, head_dim);
  if (element == ElementFormat::kFp8V32) return {slot * data_bytes, slot * data_bytes + 512};
  const int64_t scale_bytes = slot_scale_bytes(element, head_dim);
  if (scale_bytes == 0) return {slot * data_bytes, slot * data_bytes};
  return {slot * data_bytes, slots * data_bytes + slot * scale_bytes};
}

static_assert(layer_page_bytes(ElementFormat::kBf16, 128, 64) == 16384);
static_assert(layer_page_bytes(ElementFormat::kFp8, 128, 64) == 8448);
static_assert(layer_page_bytes(ElementFormat::kFp4, 128, 64) == 4352);
static_assert(layer_page_bytes(ElementFormat::kFp8DsMla, 512, 64) == 37440);
static_assert(layer_page_bytes(ElementFormat::kFp8DsMla, 512, 2) == 1728);
static_assert(layer_page_bytes(ElementFormat::kFp8DsMla, 512, 256) == 149760);
static_assert(layer_page_bytes(ElementFormat::kFp8DsMla, 512, 128) == 74880);
static_assert(layer_page_bytes(ElementFormat::kBf16, 512, 64) == 65536);
static_assert(layer_page_bytes(ElementFormat::kFp8V32, 576, 64) == 41984);
static_assert(slot_place(ElementFormat::kFp8, 128, 64, 3).data == 128 * 3);
static_assert(slot_place(ElementFormat::kFp8, 128, 64, 3).scale == 8192 + 4 * 3);
static_assert(slot_place(ElementFormat::kFp4, 128, 64, 3).scale == 4096 + 4 * 3);
static_assert(slot_place(ElementFormat::kFp8DsMla, 512, 64, 3).data == 576 * 3);
static_assert(slot_place(ElementFormat::kFp8DsMla, 512, 64, 3).scale == 576 * 64 + 8 * 3);

// The row that engines gather by, which the stride must be a multiple of.
NEEDLE_HD constexpr int64_t gather_row_bytes(ElementFormat element, int64_t head_dim) {
  return element == ElementFormat::kFp32Rows ? 256 : slot_data_bytes(element, head_dim);
}

// Pages start on this, and so does index-K inside them: 16-byte vectors, 128-byte lines, TMA and ldmatrix all fit.
inline constexpr int64_t kPageAlignment = 256;

// ---------------------------------------------------------------------------------------------------------------
// Bytes of a compressor-state record of one (component, layer). Rows: kernels/compressor_state.h.

inline constexpr int64_t kStateHeaderBytes = 64;

// Rows a ratio-4 ring or a raw ratio-128 ring holds: twice the group where halves overlap, plus the unaccepted ones.
constexpr int64_t state_ring_rows(int64_t ratio, int64_t speculative_rows) { return (ratio == 4 ? 2 * ratio : ratio) + speculative_rows; }
// fp32 numbers of one raw row: kv and score, two halves each where groups overlap (ratio 4).
constexpr int64_t state_row_floats(int64_t ratio, int64_t head_dim) { return (ratio == 4 ? 4 : 2) * head_dim; }

constexpr int64_t state_record_bytes(StateForm form, int64_t ratio, int64_t head_dim, int64_t speculative_rows) {
  const int64_t row_bytes = 4 * state_row_floats(ratio, head_dim);
  if (form == StateForm::kRunning) return kStateHeaderBytes + 3 * 4 * head_dim + speculative_rows * row_bytes;
  return kStateHeaderBytes + state_ring_rows(ratio, speculative_rows) * row_bytes;
}
static_assert(state_record_bytes(StateForm::kRaw, 4, 512, 0) == 64 + 65536);
static_assert(state_record_bytes(StateForm::kRaw, 4, 128, 0) == 64 + 16384);
static_assert(state_record_bytes(StateForm::kRaw, 128, 512, 0) == 64 + 524288);
static_assert(state_record_bytes(StateForm::kRunning, 128, 512, 0) == 64 + 6144);

// ---------------------------------------------------------------------------------------------------------------
// A whole page.

// Where each (component, layer) lies. Computed once from a valid format; immutable.
class PageLayout {
 public:
  // Fails with the field, its value and its limit where the format is impossible. `page_capacity` is the number of
  // pages a layer-major pool is built for (its layers' arrays follow each other); page-major pools ignore it.
  static absl::StatusOr<PageLayout> of(const PageFormat& format, int64_t page_capacity = 0);

  int slots_per_page(int component) const { return places_[static_cast<size_t>(component)].slots; }
  int64_t layer_bytes(int component) const { return places_[static_cast<size_t>(component)].layer_bytes; }

  // Byte of page 0's part of (component, layer), from the pool's base; page i's is at + i x page_stride(component).
  int64_t layer_offset(int component, int layer) const;
  int64_t page_stride(int component) const;

  int64_t content_bytes() const { return content_bytes_; }  // sum of all components and layers, no final padding
  int64_t stride_bytes() const { return stride_bytes_; }    // bytes a page takes from the budget
  int64_t pool_bytes(int64_t pages) const { return pages * stride_bytes_; }

 private:
  struct Place {
    int slots = 0;
    int layers = 0;
    int64_t layer_bytes = 0;
    int64_t first_offset = 0;  // of layer 0
    int64_t page_stride = 0;
    int64_t layer_stride = 0;
  };
  std::vector<Place> places_;
  int64_t content_bytes_ = 0;
  int64_t stride_bytes_ = 0;
};

// Everything that makes a format impossible, as a Status naming field, value and limit.
absl::Status check_format(const PageFormat& format);

// Canonical text: one line a component, fixed field order, LF ends. parse(text(f)) == f and text(parse(t)) == t.
std::string format_text(const PageFormat& format);
absl::StatusOr<PageFormat> parse_format(absl::string_view text);

// XXH3-64 of the canonical text. Travels beside it as a quick comparison; a mismatch is explained from the texts.
uint64_t format_fingerprint(const PageFormat& format);

// OK where equal; otherwise FAILED_PRECONDITION with the first differing line and both texts.
absl::Status check_same_format(const PageFormat& ours, const PageFormat& theirs);

// ---------------------------------------------------------------------------------------------------------------
// Presets. `index_k` picks the index-K element format; fp8 uses the named scale kind.

// The three pools of one model. `window` and `state` are empty (no components) for models without them.
inline constexpr int64_t kWindowTokens = 128;  // trailing tokens that V4's attention reads beside what it selects

struct ModelFormats {
  PageFormat paged;
  PageFormat window;
  PageFormat state;
};

struct PresetOptions {
  ElementFormat index_k = ElementFormat::kBf16;
  ScaleKind index_k_scale = ScaleKind::kNone;        // kNone picks the format's usual one: fp8 kAmax, fp4 kPowerOfTwo
  ElementFormat main_kv = ElementFormat::kFp8DsMla;  // kBf16 selectable; V3.2 and GLM-5 take kFp8V32 or kBf16
  int window_tokens_per_page = 64;                   // 64, or 256 as SGLang has it
  StateForm ratio128_state = StateForm::kRunning;    // kRaw as SGLang has it by default
  PageOrder order = PageOrder::kPageMajor;
  int speculative_rows = 0;
};

// deepseek-v4-flash, deepseek-v4-pro, deepseek-v3.2, glm-5, and `raw`: V4-Flash's index-K and page sizes for keys
// that are finished already (no RoPE, no rotation), for tools and tests.
absl::StatusOr<ModelFormats> preset_formats(absl::string_view model, const PresetOptions& options);
std::vector<std::string> preset_names();

const char* name_of(ElementFormat element);
const char* name_of(ScaleKind scale);
const char* name_of(PoolKind pool);
const char* name_of(ComponentKind kind);
const char* name_of(PageOrder order);
const char* name_of(RopeStyle rope);
const char* name_of(StateForm form);

}  // namespace needle
