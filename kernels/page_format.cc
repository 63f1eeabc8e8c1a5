#include "kernels/page_format.h"

#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace needle {
namespace {

// Names as they stand in the canonical text. The order is the enum's.
constexpr const char* kElementNames[] = {"bf16", "fp8", "fp4", "fp8_ds_mla", "fp8_v32", "fp32_rows"};
constexpr const char* kScaleNames[] = {"none", "amax", "amax_reciprocal", "power_of_two"};
constexpr const char* kPoolNames[] = {"paged", "window", "state"};
constexpr const char* kComponentNames[] = {"index_k", "main_kv", "window_kv", "index_k_state", "main_kv_state"};
constexpr const char* kOrderNames[] = {"page_major", "layer_major"};
constexpr const char* kRopeNames[] = {"none", "interleaved_last_64", "half_split_first_64"};
constexpr const char* kStateNames[] = {"none", "raw", "running"};

template <class Enum, size_t kCount>
const char* name_in(const char* const (&names)[kCount], Enum value) {
  const auto index = static_cast<size_t>(value);
  return index < kCount ? names[index] : "?";
}

template <class Enum, size_t kCount>
bool find_in(const char* const (&names)[kCount], absl::string_view name, Enum& value) {
  for (size_t index = 0; index < kCount; ++index) {
    if (name == names[index]) {
      value = static_cast<Enum>(index);
      return true;
    }
  }
  return false;
}

template <size_t kCount>
std::string choices(const char* const (&names)[kCount]) {
  std::string text;
  for (const char* name : names) absl::StrAppend(&text, text.empty() ? "" : ", ", name);
  return text;
}

bool is_state(ComponentKind kind) { return kind == ComponentKind::kIndexKState || kind == ComponentKind::kMainKvState; }

absl::Status impossible(absl::string_view where, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("page format: ", where, ": ", what));
}

absl::Status check_component(const PageFormat& format, const Component& component, size_t position) {
  const std::string where = absl::StrCat("component ", position, " (", name_of(component.kind), ")");
  if (component.layers < 1 || component.layers > kLayersMax) {
    return impossible(where, absl::StrCat("layers is ", component.layers, ", must be 1..", kLayersMax));
  }
  if (component.ratio < 1 || component.ratio > 1024) {
    return impossible(where, absl::StrCat("ratio is ", component.ratio, ", must be 1..1024"));
  }
  const bool state_pool = format.pool == PoolKind::kState;
  if (is_state(component.kind) != state_pool) {
    return impossible(where,
                      state_pool ? "a state pool holds only *_state components" : "compressor state belongs in a pool of kind state");
  }
  if ((component.kind == ComponentKind::kWindowKv) != (format.pool == PoolKind::kWindow)) {
    return impossible(where, "window_kv and pools of kind window belong together and to nothing else");
  }
  if (state_pool) {
    if (component.element != ElementFormat::kFp32Rows || component.scale != ScaleKind::kNone) {
      return impossible(where, "compressor state is fp32_rows with scale none");
    }
    if (component.ratio != 4 && component.ratio != 128) {
      return impossible(where, absl::StrCat("ratio is ", component.ratio, "; state is defined for 4 and 128"));
    }
    if (component.state_form == StateForm::kNone || (component.ratio == 4 && component.state_form != StateForm::kRaw)) {
      return impossible(where, "state form is raw for ratio 4, raw or running for ratio 128");
    }
    if (component.speculative_rows < 0 || component.speculative_rows > kSpeculativeRowsMax) {
      return impossible(where, absl::StrCat("speculative_rows is ", component.speculative_rows, ", must be 0..", kSpeculativeRowsMax));
    }
    if (component.head_dim != 128 && component.head_dim != 512) {
      return impossible(where, absl::StrCat("head_dim is ", component.head_dim, ", must be 128 or 512"));
    }
    if (component.hadamard || component.rope != RopeStyle::kNone) {
      return impossible(where, "state holds raw rows: rope and rotation are none");
    }
    return absl::OkStatus();
  }
  if (component.state_form != StateForm::kNone || component.speculative_rows != 0) {
    return impossible(where, "state form and speculative_rows belong to state components");
  }
  if (format.tokens_per_page % component.ratio != 0) {
    return impossible(where, absl::StrCat("ratio ", component.ratio, " does not divide tokens_per_page ", format.tokens_per_page));
  }
  const int slots = format.tokens_per_page / component.ratio;
  if (slots > kSlotsPerPageMax) {
    return impossible(where, absl::StrCat(slots, " slots a page, at most ", kSlotsPerPageMax));
  }
  if (component.rope == RopeStyle::kNone) {
    if (!(component.rope_table == RopeParameters{})) return impossible(where, "rope none has no rope table");
  } else {
    const RopeParameters& table = component.rope_table;
    if (!(table.theta >= 1.0 && table.theta <= 1e9)) {
      return impossible(where, absl::StrCat("theta is ", table.theta, ", must be 1..1e9"));
    }
    const bool yarn = table.yarn_factor != 0;
    if (yarn && !(table.yarn_factor >= 1 && table.yarn_factor <= 1024 && table.yarn_original_positions >= 1 &&
                  table.yarn_original_positions <= 1e9 && table.yarn_beta_slow > 0 && table.yarn_beta_fast > table.yarn_beta_slow &&
                  table.yarn_beta_fast <= 1e6)) {
      return impossible(where, "yarn wants factor 1..1024, original positions 1..1e9 and 0 < beta_slow < beta_fast <= 1e6");
    }
    RopeParameters plain;
    plain.theta = table.theta;
    if (!yarn && !(table == plain)) {
      return impossible(where, "yarn parameters without a yarn factor");
    }
  }
  if (component.hadamard && component.kind != ComponentKind::kIndexK) {
    return impossible(where, "the Hadamard rotation is index_k's alone");
  }
  switch (component.element) {
    case ElementFormat::kBf16:
      if (component.scale != ScaleKind::kNone) return impossible(where, "bf16 has scale none");
      break;
    case ElementFormat::kFp8:
    case ElementFormat::kFp4:
      if (component.kind != ComponentKind::kIndexK) return impossible(where, "fp8 and fp4 are index_k formats");
      if (component.scale == ScaleKind::kNone) return impossible(where, "fp8 and fp4 need a scale kind");
      if (component.element == ElementFormat::kFp4 && component.scale != ScaleKind::kPowerOfTwo) {
        return impossible(where, "fp4 scales are ue8m0 bytes: power_of_two");
      }
      break;
    case ElementFormat::kFp8DsMla:
      if (component.kind == ComponentKind::kIndexK) return impossible(where, "fp8_ds_mla is a KV format");
      if (component.scale != ScaleKind::kPowerOfTwo) return impossible(where, "fp8_ds_mla has power_of_two scales");
      if (component.head_dim != 512) {
        return impossible(where, absl::StrCat("fp8_ds_mla has head_dim 512, not ", component.head_dim));
      }
      break;
    case ElementFormat::kFp8V32:
      if (component.kind == ComponentKind::kIndexK) return impossible(where, "fp8_v32 is a KV format");
      if (component.scale != ScaleKind::kAmax) return impossible(where, "fp8_v32 has amax scales");
      if (component.head_dim != 576) {
        return impossible(where, absl::StrCat("fp8_v32 has head_dim 576 (512 + 64), not ", component.head_dim));
      }
      break;
    case ElementFormat::kFp32Rows: return impossible(where, "fp32_rows belongs to state components");
  }
  if (component.kind == ComponentKind::kIndexK) {
    if (component.head_dim != 128) {
      return impossible(where, absl::StrCat("index_k has head_dim 128, not ", component.head_dim));
    }
  } else if (component.head_dim != 512 && component.head_dim != 576) {
    return impossible(where, absl::StrCat("head_dim is ", component.head_dim, ", must be 512 or 576"));
  }
  return absl::OkStatus();
}

// The stride's multiple: the page alignment and every row that engines gather by.
int64_t stride_multiple(const PageFormat& format) {
  int64_t multiple = kPageAlignment;
  for (const Component& component : format.components) {
    if (component.kind == ComponentKind::kIndexK) continue;  // index-K is read by our kernels, not gathered by rows
    multiple = std::lcm(multiple, gather_row_bytes(component.element, component.head_dim));
  }
  return multiple;
}

std::string number_text(double value) {
  char text[32];
  for (int digits = 6; digits <= 17; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, value);
    if (std::strtod(text, nullptr) == value) break;
  }
  return text;
}

}  // namespace

const char* name_of(ElementFormat element) { return name_in(kElementNames, element); }
const char* name_of(ScaleKind scale) { return name_in(kScaleNames, scale); }
const char* name_of(PoolKind pool) { return name_in(kPoolNames, pool); }
const char* name_of(ComponentKind kind) { return name_in(kComponentNames, kind); }
const char* name_of(PageOrder order) { return name_in(kOrderNames, order); }
const char* name_of(RopeStyle rope) { return name_in(kRopeNames, rope); }
const char* name_of(StateForm form) { return name_in(kStateNames, form); }

absl::Status check_format(const PageFormat& format) {
  if (format.name.empty() || format.name.size() > 64) {
    return impossible("name", absl::StrCat("has ", format.name.size(), " characters, must have 1..64"));
  }
  for (char c : format.name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '.' || c == '_';
    if (!plain) return impossible("name", absl::StrCat("'", format.name, "' may hold a-z, 0-9, '-', '.' and '_'"));
  }
  if (format.components.empty() || format.components.size() > static_cast<size_t>(kComponentsMax)) {
    return impossible("components", absl::StrCat("has ", format.components.size(), ", must have 1..", kComponentsMax));
  }
  if (format.pool == PoolKind::kState) {
    if (format.tokens_per_page != 0) {
      return impossible("tokens_per_page", absl::StrCat("is ", format.tokens_per_page, ", a state pool has 0"));
    }
  } else if (format.tokens_per_page < 1 || format.tokens_per_page > kTokensPerPageMax) {
    return impossible("tokens_per_page", absl::StrCat("is ", format.tokens_per_page, ", must be 1..", kTokensPerPageMax));
  }
  for (size_t position = 0; position < format.components.size(); ++position) {
    if (absl::Status status = check_component(format, format.components[position], position); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<PageLayout> PageLayout::of(const PageFormat& format, int64_t page_capacity) {
  if (absl::Status status = check_format(format); !status.ok()) return status;
  PageLayout layout;
  int64_t offset = 0;
  for (const Component& component : format.components) {
    Place place;
    place.layers = component.layers;
    if (format.pool == PoolKind::kState) {
      place.slots = 1;
      place.layer_bytes = state_record_bytes(component.state_form, component.ratio, component.head_dim, component.speculative_rows);
    } else {
      place.slots = format.tokens_per_page / component.ratio;
      place.layer_bytes = layer_page_bytes(component.element, component.head_dim, place.slots);
    }
    place.first_offset = offset;
    place.layer_stride = place.layer_bytes;
    offset += place.layer_bytes * component.layers;
    layout.places_.push_back(place);
  }
  layout.content_bytes_ = offset;
  layout.stride_bytes_ = round_up(offset, stride_multiple(format));
  if (layout.stride_bytes_ > kPageBytesMax) {
    return impossible("page", absl::StrCat(layout.stride_bytes_, " bytes a page, at most ", kPageBytesMax, "; use fewer tokens_per_page"));
  }
  if (format.order == PageOrder::kPageMajor) {
    for (size_t index = 0; index < layout.places_.size(); ++index) {
      Place& place = layout.places_[index];
      place.page_stride = layout.stride_bytes_;
      if (format.components[index].kind == ComponentKind::kIndexK && place.first_offset % kPageAlignment != 0) {
        return impossible(absl::StrCat("component ", index),
                          absl::StrCat("index_k would start at byte ", place.first_offset, " of the page, not a multiple of ",
                                       kPageAlignment, "; list index_k first"));
      }
    }
    return layout;
  }
  if (page_capacity < 1) {
    return impossible("order", absl::StrCat("layer_major needs the pool's page capacity, got ", page_capacity));
  }
  int64_t begin = 0;
  layout.stride_bytes_ = 0;
  for (Place& place : layout.places_) {
    place.first_offset = begin;
    place.page_stride = place.layer_bytes;
    place.layer_stride = round_up(place.layer_bytes * page_capacity, kPageAlignment);
    begin += place.layer_stride * place.layers;
    layout.stride_bytes_ += place.layer_bytes * place.layers;
  }
  return layout;
}

int64_t PageLayout::layer_offset(int component, int layer) const {
  const Place& place = places_[static_cast<size_t>(component)];
  return place.first_offset + place.layer_stride * layer;
}

int64_t PageLayout::page_stride(int component) const { return places_[static_cast<size_t>(component)].page_stride; }

std::string format_text(const PageFormat& format) {
  std::string text = absl::StrCat("needle-page-format ", kPageFormatVersion, "\nname ", format.name, "\npool ", name_of(format.pool),
                                  "\norder ", name_of(format.order), "\ntokens_per_page ", format.tokens_per_page, "\n");
  for (const Component& component : format.components) {
    absl::StrAppend(&text, "component ", name_of(component.kind), " layers=", component.layers, " ratio=", component.ratio,
                    " element=", name_of(component.element), " scale=", name_of(component.scale), " head_dim=", component.head_dim,
                    " rope=", name_of(component.rope), " theta=", number_text(component.rope_table.theta),
                    " yarn=", number_text(component.rope_table.yarn_factor), ":", number_text(component.rope_table.yarn_original_positions),
                    ":", number_text(component.rope_table.yarn_beta_fast), ":", number_text(component.rope_table.yarn_beta_slow),
                    " rotation=", component.hadamard ? "hadamard" : "none", " state=", name_of(component.state_form),
                    " speculative_rows=", component.speculative_rows, "\n");
  }
  return text;
}

namespace {

// Reads "key=value" fields of one line in their fixed order; the first problem is kept and named.
class FieldReader {
 public:
  FieldReader(int line, std::vector<absl::string_view> words) : line_(line), words_(std::move(words)) {}

  absl::string_view word(absl::string_view what) {
    if (next_ >= words_.size()) {
      fail(absl::StrCat(what, " is missing"));
      return "";
    }
    return words_[next_++];
  }

  absl::string_view field(absl::string_view key) {
    absl::string_view text = word(key);
    if (text.size() <= key.size() || text.substr(0, key.size()) != key || text[key.size()] != '=') {
      fail(absl::StrCat("expected ", key, "=..., found '", text, "'"));
      return "";
    }
    return text.substr(key.size() + 1);
  }

  int integer(absl::string_view key) { return to_integer(key, field(key)); }

  int to_integer(absl::string_view key, absl::string_view text) {
    int value = 0;
    if (!absl::SimpleAtoi(text, &value)) fail(absl::StrCat(key, ": '", text, "' is not a whole number"));
    return value;
  }

  double to_double(absl::string_view key, absl::string_view text) {
    double value = 0;
    if (!absl::SimpleAtod(text, &value) || !std::isfinite(value)) {
      fail(absl::StrCat(key, ": '", text, "' is not a finite number"));
    }
    return value;
  }

  template <class Enum, size_t kCount>
  Enum choice(absl::string_view key, const char* const (&names)[kCount], absl::string_view text) {
    Enum value{};
    if (!find_in(names, text, value)) fail(absl::StrCat(key, ": '", text, "' is none of ", choices(names)));
    return value;
  }

  absl::Status end() {
    if (next_ < words_.size()) fail(absl::StrCat("unexpected '", words_[next_], "'"));
    return status_;
  }

 private:
  void fail(absl::string_view what) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat("page format text, line ", line_, ": ", what));
  }

  int line_;
  std::vector<absl::string_view> words_;
  size_t next_ = 0;
  absl::Status status_;
};

constexpr size_t kFormatTextMax = 16384;  // sixteen components of at most about 300 characters, three times over

}  // namespace

absl::StatusOr<PageFormat> parse_format(absl::string_view text) {
  if (text.size() > kFormatTextMax) {
    return absl::InvalidArgumentError(absl::StrCat("page format text has ", text.size(), " bytes, at most ", kFormatTextMax));
  }
  if (text.empty() || text.back() != '\n') {
    return absl::InvalidArgumentError("page format text must end with a line feed: it may have been cut");
  }
  text.remove_suffix(1);
  PageFormat format;
  int line = 0;
  for (absl::string_view row : absl::StrSplit(text, '\n')) {
    ++line;
    FieldReader reader(line, absl::StrSplit(row, ' '));
    const absl::string_view head = reader.word("a line");
    constexpr absl::string_view kHeads[] = {"needle-page-format", "name", "pool", "order", "tokens_per_page"};
    const absl::string_view expected = line <= 5 ? kHeads[line - 1] : absl::string_view("component");
    if (head != expected) {
      return absl::InvalidArgumentError(absl::StrCat("page format text, line ", line, ": expected '", expected, "', found '", head, "'"));
    }
    if (line == 1) {
      const int version = reader.to_integer("version", reader.word("version"));
      if (version != kPageFormatVersion) {
        return absl::InvalidArgumentError(
            absl::StrCat("page format text, line 1: version ", version, " is not spoken here, only ", kPageFormatVersion));
      }
    } else if (line == 2) {
      const absl::string_view name = reader.word("name");
      format.name.assign(name.data(), name.size());
    } else if (line == 3) {
      format.pool = reader.choice<PoolKind>("pool", kPoolNames, reader.word("pool"));
    } else if (line == 4) {
      format.order = reader.choice<PageOrder>("order", kOrderNames, reader.word("order"));
    } else if (line == 5) {
      format.tokens_per_page = reader.to_integer("tokens_per_page", reader.word("tokens_per_page"));
    } else {
      if (format.components.size() == static_cast<size_t>(kComponentsMax)) {
        return absl::InvalidArgumentError(absl::StrCat("page format text, line ", line, ": more than ", kComponentsMax, " components"));
      }
      Component component;
      component.kind = reader.choice<ComponentKind>("component", kComponentNames, reader.word("component kind"));
      component.layers = reader.integer("layers");
      component.ratio = reader.integer("ratio");
      component.element = reader.choice<ElementFormat>("element", kElementNames, reader.field("element"));
      component.scale = reader.choice<ScaleKind>("scale", kScaleNames, reader.field("scale"));
      component.head_dim = reader.integer("head_dim");
      component.rope = reader.choice<RopeStyle>("rope", kRopeNames, reader.field("rope"));
      component.rope_table.theta = reader.to_double("theta", reader.field("theta"));
      const std::vector<absl::string_view> yarn = absl::StrSplit(reader.field("yarn"), ':');
      if (yarn.size() != 4) {
        return absl::InvalidArgumentError(
            absl::StrCat("page format text, line ", line, ": yarn is factor:original:beta_fast:beta_slow, found ", yarn.size(), " parts"));
      }
      component.rope_table.yarn_factor = reader.to_double("yarn factor", yarn[0]);
      component.rope_table.yarn_original_positions = reader.to_double("yarn original positions", yarn[1]);
      component.rope_table.yarn_beta_fast = reader.to_double("yarn beta_fast", yarn[2]);
      component.rope_table.yarn_beta_slow = reader.to_double("yarn beta_slow", yarn[3]);
      constexpr const char* kRotationNames[] = {"none", "hadamard"};
      component.hadamard = reader.choice<int>("rotation", kRotationNames, reader.field("rotation")) == 1;
      component.state_form = reader.choice<StateForm>("state", kStateNames, reader.field("state"));
      component.speculative_rows = reader.integer("speculative_rows");
      format.components.push_back(component);
    }
    if (absl::Status status = reader.end(); !status.ok()) return status;
  }
  if (absl::Status status = check_format(format); !status.ok()) return status;
  // One format, one text: a second spelling of a number would give a second fingerprint.
  if (format_text(format) != absl::StrCat(text, "\n")) {
    return absl::InvalidArgumentError("page format text is not canonical: a number is spelled in another way than format_text() does");
  }
  return format;
}

uint64_t format_fingerprint(const PageFormat& format) {
  const std::string text = format_text(format);
  return XXH3_64bits(text.data(), text.size());
}

absl::Status check_same_format(const PageFormat& ours, const PageFormat& theirs) {
  const std::string our_text = format_text(ours);
  const std::string their_text = format_text(theirs);
  if (our_text == their_text) return absl::OkStatus();
  const std::vector<std::string> our_lines = absl::StrSplit(our_text, '\n');
  const std::vector<std::string> their_lines = absl::StrSplit(their_text, '\n');
  size_t line = 0;
  while (line < our_lines.size() && line < their_lines.size() && our_lines[line] == their_lines[line]) ++line;
  const std::string our_line = line < our_lines.size() ? our_lines[line] : "(end)";
  const std::string their_line = line < their_lines.size() ? their_lines[line] : "(end)";
  return absl::FailedPreconditionError(
      absl::StrCat("page formats differ at line ", line + 1, ": ours '", our_line, "', theirs '", their_line,
                   "'. Bytes of one are not bytes of the other: start both sides with the same format.\n--- ours\n", our_text,
                   "--- theirs\n", their_text));
}

namespace {

constexpr RopeParameters kCompressedRope = {160000, 16, 65536, 32, 1};  // V4 layers with ratio 4 or 128
constexpr RopeParameters kWindowRope = {10000, 0, 0, 0, 0};             // V4 layers with ratio 0
constexpr RopeParameters kV32Rope = {10000, 40, 4096, 32, 1};           // V3.2: defaults of its reference inference

// What differs between the V4 models. Layers' kinds: compress_ratios of each model's config.json.
struct V4Layers {
  int ratio4;
  int ratio128;
  int ratio0;
};

Component index_k_component(int layers, int ratio, RopeStyle rope, const RopeParameters& table, bool hadamard,
                            const PresetOptions& options) {
  ScaleKind scale = options.index_k_scale;
  if (scale == ScaleKind::kNone && options.index_k == ElementFormat::kFp8) scale = ScaleKind::kAmax;
  if (scale == ScaleKind::kNone && options.index_k == ElementFormat::kFp4) scale = ScaleKind::kPowerOfTwo;
  Component component;
  component.kind = ComponentKind::kIndexK;
  component.layers = layers;
  component.ratio = ratio;
  component.element = options.index_k;
  component.scale = scale;
  component.head_dim = 128;
  component.rope = rope;
  component.rope_table = table;
  component.hadamard = hadamard;
  return component;
}

Component kv_component(ComponentKind kind, int layers, int ratio, ElementFormat element, int head_dim, const RopeParameters& table) {
  ScaleKind scale = ScaleKind::kNone;
  if (element == ElementFormat::kFp8DsMla) scale = ScaleKind::kPowerOfTwo;
  if (element == ElementFormat::kFp8V32) scale = ScaleKind::kAmax;
  Component component;
  component.kind = kind;
  component.layers = layers;
  component.ratio = ratio;
  component.element = element;
  component.scale = scale;
  component.head_dim = head_dim;
  component.rope = RopeStyle::kInterleavedLast64;
  component.rope_table = table;
  return component;
}

Component state_component(ComponentKind kind, int layers, int ratio, int head_dim, StateForm form, int speculative) {
  Component component;
  component.kind = kind;
  component.layers = layers;
  component.ratio = ratio;
  component.element = ElementFormat::kFp32Rows;
  component.head_dim = head_dim;
  component.state_form = form;
  component.speculative_rows = speculative;
  return component;
}

ModelFormats v4_formats(absl::string_view model, V4Layers layers, const PresetOptions& options) {
  const std::string name(model.data(), model.size());
  ModelFormats formats;
  formats.paged = {name, PoolKind::kPaged, options.order, 256, {}};
  formats.paged.components.push_back(index_k_component(layers.ratio4, 4, RopeStyle::kInterleavedLast64, kCompressedRope, true, options));
  formats.paged.components.push_back(kv_component(ComponentKind::kMainKv, layers.ratio4, 4, options.main_kv, 512, kCompressedRope));
  formats.paged.components.push_back(kv_component(ComponentKind::kMainKv, layers.ratio128, 128, options.main_kv, 512, kCompressedRope));
  // Every layer has the sliding window; those that compress share the compressed layers' RoPE table.
  formats.window = {name, PoolKind::kWindow, options.order, options.window_tokens_per_page, {}};
  formats.window.components.push_back(
      kv_component(ComponentKind::kWindowKv, layers.ratio4 + layers.ratio128, 1, options.main_kv, 512, kCompressedRope));
  if (layers.ratio0 > 0) {
    formats.window.components.push_back(kv_component(ComponentKind::kWindowKv, layers.ratio0, 1, options.main_kv, 512, kWindowRope));
  }
  formats.state = {name, PoolKind::kState, options.order, 0, {}};
  formats.state.components.push_back(
      state_component(ComponentKind::kIndexKState, layers.ratio4, 4, 128, StateForm::kRaw, options.speculative_rows));
  formats.state.components.push_back(
      state_component(ComponentKind::kMainKvState, layers.ratio4, 4, 512, StateForm::kRaw, options.speculative_rows));
  formats.state.components.push_back(
      state_component(ComponentKind::kMainKvState, layers.ratio128, 128, 512, options.ratio128_state, options.speculative_rows));
  return formats;
}

ModelFormats v32_formats(absl::string_view model, int layers, RopeStyle index_rope, bool hadamard, const RopeParameters& table,
                         const PresetOptions& options) {
  const ElementFormat main_kv = options.main_kv == ElementFormat::kFp8DsMla ? ElementFormat::kFp8V32 : options.main_kv;
  ModelFormats formats;
  formats.paged = {std::string(model.data(), model.size()), PoolKind::kPaged, options.order, 64, {}};
  formats.paged.components.push_back(index_k_component(layers, 1, index_rope, table, hadamard, options));
  formats.paged.components.push_back(kv_component(ComponentKind::kMainKv, layers, 1, main_kv, 576, table));
  return formats;
}

}  // namespace

std::vector<std::string> preset_names() { return {"deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v3.2", "glm-5", "raw"}; }

absl::StatusOr<ModelFormats> preset_formats(absl::string_view model, const PresetOptions& options) {
  ModelFormats formats;
  if (model == "deepseek-v4-flash") {
    formats = v4_formats(model, {21, 20, 2}, options);
  } else if (model == "deepseek-v4-pro") {
    formats = v4_formats(model, {30, 31, 0}, options);
  } else if (model == "deepseek-v3.2") {
    formats = v32_formats(model, 61, RopeStyle::kHalfSplitFirst64, true, kV32Rope, options);
  } else if (model == "glm-5") {
    // V3.2's geometry with 78 layers (config.json of GLM-5); half-split RoPE and rotation of the indexer as in the
    // training implementation that NVIDIA NeMo AutoModel follows (models/glm_moe_dsa).
    RopeParameters table;
    table.theta = 1000000;
    formats = v32_formats(model, 78, RopeStyle::kHalfSplitFirst64, true, table, options);
  } else if (model == "raw") {
    // Finished keys: V4-Flash's layout, one row = one key = one entry of four tokens.
    formats = v4_formats(model, {21, 20, 2}, options);
    formats.paged.components[0].rope = RopeStyle::kNone;
    formats.paged.components[0].rope_table = {};
    formats.paged.components[0].hadamard = false;
  } else {
    std::string known;
    for (const std::string& name : preset_names()) absl::StrAppend(&known, known.empty() ? "" : ", ", name);
    return absl::NotFoundError(absl::StrCat("no page format preset '", model, "'; known: ", known));
  }
  for (const PageFormat* format : {&formats.paged, &formats.window, &formats.state}) {
    if (format->components.empty()) continue;
    if (absl::Status status = check_format(*format); !status.ok()) return status;
  }
  return formats;
}

}  // namespace needle
