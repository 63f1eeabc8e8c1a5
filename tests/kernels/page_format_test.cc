// Every literal of PAGE_FORMAT.md, and what a wrong format is told.
#include "kernels/page_format.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <string>

#include "base/rng.h"
#include "kernels/pool_view.h"
#include "tests/counts.h"

namespace needle {
namespace {

ModelFormats formats_of(const char* model, PresetOptions options = {}) {
  absl::StatusOr<ModelFormats> formats = preset_formats(model, options);
  EXPECT_TRUE(formats.ok()) << formats.status();
  return *formats;
}

int64_t content_of(const PageFormat& format) {
  absl::StatusOr<PageLayout> layout = PageLayout::of(format, 16);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return layout->content_bytes();
}

int64_t paged_content(const char* model, ElementFormat index_k) {
  PresetOptions options;
  options.index_k = index_k;
  return content_of(formats_of(model, options).paged);
}

TEST(PageFormat, content_bytes_of_a_page_are_the_published_ones) {
  EXPECT_EQ(paged_content("deepseek-v4-flash", ElementFormat::kFp8), 998'208);
  EXPECT_EQ(paged_content("deepseek-v4-flash", ElementFormat::kBf16), 1'164'864);
  EXPECT_EQ(paged_content("deepseek-v4-flash", ElementFormat::kFp4), 912'192);
  EXPECT_EQ(paged_content("deepseek-v4-pro", ElementFormat::kFp8), 1'430'208);
  EXPECT_EQ(paged_content("deepseek-v4-pro", ElementFormat::kBf16), 1'668'288);
  EXPECT_EQ(paged_content("deepseek-v4-pro", ElementFormat::kFp4), 1'307'328);
  EXPECT_EQ(paged_content("deepseek-v3.2", ElementFormat::kFp8), 3'076'352);
  EXPECT_EQ(4 * paged_content("deepseek-v3.2", ElementFormat::kFp8), 12'305'408);
  EXPECT_EQ(4 * paged_content("deepseek-v3.2", ElementFormat::kBf16), 14'241'792);
}

TEST(PageFormat, strides_are_padded_to_256_and_to_the_row_that_engines_gather) {
  EXPECT_EQ(PageLayout::of(formats_of("deepseek-v4-flash").paged)->stride_bytes(), 1'165'824);
  for (const std::string& model : preset_names()) {
    for (ElementFormat main_kv : {ElementFormat::kFp8DsMla, ElementFormat::kBf16}) {
      PresetOptions options;
      options.main_kv = main_kv;
      const PageFormat paged = formats_of(model.c_str(), options).paged;
      const PageLayout layout = *PageLayout::of(paged);
      EXPECT_EQ(layout.stride_bytes() % 256, 0) << model;
      for (const Component& component : paged.components) {
        if (component.kind == ComponentKind::kIndexK) continue;
        EXPECT_EQ(layout.stride_bytes() % gather_row_bytes(component.element, component.head_dim), 0) << model;
      }
      EXPECT_LT(layout.stride_bytes() - layout.content_bytes(), 10'496 * 2) << "padding stays small";
    }
  }
}

TEST(PageFormat, the_worked_page_of_the_document_holds) {
  const PageFormat flash = formats_of("deepseek-v4-flash").paged;
  const PageLayout layout = *PageLayout::of(flash);
  // index-K: 21 layers x 16,384 B
  EXPECT_EQ(layout.layer_offset(0, 0), 0);
  EXPECT_EQ(layout.layer_offset(0, 20), 327'680);
  // ratio-4 KV: 21 x 37,440 B
  EXPECT_EQ(layout.layer_offset(1, 0), 344'064);
  EXPECT_EQ(layout.layer_offset(1, 20), 1'092'864);
  // ratio-128 KV: 20 x 1,728 B
  EXPECT_EQ(layout.layer_offset(2, 0), 1'130'304);
  EXPECT_EQ(layout.layer_offset(2, 19), 1'163'136);
  EXPECT_EQ(layout.content_bytes(), 1'164'864);
  EXPECT_EQ(layout.slots_per_page(0), 64);
  EXPECT_EQ(layout.slots_per_page(2), 2);
  for (int component = 0; component < 3; ++component) EXPECT_EQ(layout.page_stride(component), 1'165'824);
  // entry 5 of layer 3 in page 7: index-K, then its KV's first scale byte
  EXPECT_EQ(7 * layout.page_stride(0) + layout.layer_offset(0, 3) + slot_place(ElementFormat::kBf16, 128, 64, 5).data, 8'211'200);
  EXPECT_EQ(slot_place(ElementFormat::kFp8DsMla, 512, 64, 5).scale, 36'904);
}

TEST(PageFormat, window_and_state_pools_have_the_published_sizes) {
  EXPECT_EQ(content_of(formats_of("deepseek-v4-flash").window), 1'609'920);  // 43 x 37,440
  PresetOptions sglang;
  sglang.window_tokens_per_page = 256;
  sglang.ratio128_state = StateForm::kRaw;
  EXPECT_EQ(content_of(formats_of("deepseek-v4-flash", sglang).window), 6'439'680);
  EXPECT_EQ(content_of(formats_of("deepseek-v4-pro", sglang).window), 9'135'360);
  const auto state_rows = [](const PageFormat& state, size_t component) {
    const PageLayout layout = *PageLayout::of(state);
    return (layout.layer_bytes(static_cast<int>(component)) - kStateHeaderBytes) * state.components[component].layers;
  };
  const PageFormat raw = formats_of("deepseek-v4-flash", sglang).state;
  EXPECT_EQ(state_rows(raw, 0), 344'064);
  EXPECT_EQ(state_rows(raw, 1), 1'376'256);
  EXPECT_EQ(state_rows(raw, 2), 10'485'760);
  EXPECT_EQ(state_rows(formats_of("deepseek-v4-flash").state, 2), 122'880);
  EXPECT_EQ(state_rows(formats_of("deepseek-v4-pro").state, 2), 190'464);
}

TEST(PageFormat, index_k_and_strides_are_256_aligned_and_ratio_4_layers_start_on_64) {
  for (const char* model : {"deepseek-v4-flash", "deepseek-v4-pro"}) {
    for (ElementFormat index_k : {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4}) {
      PresetOptions options;
      options.index_k = index_k;
      const PageFormat paged = formats_of(model, options).paged;
      const PageLayout layout = *PageLayout::of(paged);
      for (int layer = 0; layer < paged.components[0].layers; ++layer) {
        EXPECT_EQ(layout.layer_offset(0, layer) % 256, 0);
        EXPECT_EQ(layout.layer_offset(1, layer) % 64, 0);
      }
    }
  }
}

TEST(PageFormat, no_two_slots_share_a_byte_and_none_leaves_its_page) {
  struct Shape {
    ElementFormat element;
    int head_dim;
    int slots;
  };
  const Shape shapes[] = {{ElementFormat::kBf16, 128, 64},     {ElementFormat::kFp8, 128, 64},     {ElementFormat::kFp4, 128, 64},
                          {ElementFormat::kFp8DsMla, 512, 64}, {ElementFormat::kFp8DsMla, 512, 2}, {ElementFormat::kFp8DsMla, 512, 256},
                          {ElementFormat::kFp8V32, 576, 64},   {ElementFormat::kBf16, 512, 64}};
  for (const Shape& shape : shapes) {
    const int64_t bytes = layer_page_bytes(shape.element, shape.head_dim, shape.slots);
    std::string owner(static_cast<size_t>(bytes), '\0');
    const auto claim = [&](int64_t begin, int64_t count) {
      for (int64_t at = begin; at < begin + count; ++at) {
        ASSERT_LT(at, bytes) << name_of(shape.element);
        ASSERT_EQ(owner[static_cast<size_t>(at)], '\0') << name_of(shape.element) << " byte " << at;
        owner[static_cast<size_t>(at)] = 1;
      }
    };
    for (int slot = 0; slot < shape.slots; ++slot) {
      const SlotPlace place = slot_place(shape.element, shape.head_dim, shape.slots, slot);
      claim(place.data, slot_data_bytes(shape.element, shape.head_dim));
      if (shape.element != ElementFormat::kFp8V32) claim(place.scale, slot_scale_bytes(shape.element, shape.head_dim));
    }
  }
}

TEST(PageFormat, layer_major_places_every_layer_in_an_array_of_its_own) {
  PresetOptions options;
  options.order = PageOrder::kLayerMajor;
  const PageFormat paged = formats_of("deepseek-v4-flash", options).paged;
  EXPECT_FALSE(PageLayout::of(paged).ok()) << "the arrays' lengths need the capacity";
  const PageLayout layout = *PageLayout::of(paged, 100);
  EXPECT_EQ(layout.page_stride(0), 16'384);
  EXPECT_EQ(layout.page_stride(1), 37'440);
  EXPECT_EQ(layout.layer_offset(0, 1), 1'638'400);
  EXPECT_EQ(layout.layer_offset(1, 0), 21 * 1'638'400);
}

TEST(PageFormat, text_and_value_are_the_same_thing) {
  for (const std::string& model : preset_names()) {
    for (ElementFormat index_k : {ElementFormat::kBf16, ElementFormat::kFp8, ElementFormat::kFp4}) {
      PresetOptions options;
      options.index_k = index_k;
      const ModelFormats formats = formats_of(model.c_str(), options);
      for (const PageFormat* format : {&formats.paged, &formats.window, &formats.state}) {
        if (format->components.empty()) continue;
        const std::string text = format_text(*format);
        absl::StatusOr<PageFormat> parsed = parse_format(text);
        ASSERT_TRUE(parsed.ok()) << parsed.status();
        EXPECT_EQ(*parsed, *format);
        EXPECT_EQ(format_text(*parsed), text);
        EXPECT_EQ(format_fingerprint(*parsed), format_fingerprint(*format));
      }
    }
  }
}

TEST(PageFormat, a_difference_is_refused_with_both_formats_printed) {
  PresetOptions fp8;
  fp8.index_k = ElementFormat::kFp8;
  const PageFormat ours = formats_of("deepseek-v4-flash").paged;
  const PageFormat theirs = formats_of("deepseek-v4-flash", fp8).paged;
  EXPECT_NE(format_fingerprint(ours), format_fingerprint(theirs));
  const absl::Status status = check_same_format(ours, theirs);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  const std::string message(status.message());
  EXPECT_NE(message.find("element=bf16"), std::string::npos);
  EXPECT_NE(message.find("element=fp8 "), std::string::npos);
  EXPECT_NE(message.find("line 6"), std::string::npos);
  EXPECT_TRUE(check_same_format(ours, ours).ok());
}

TEST(PageFormat, every_meaning_of_the_bytes_changes_the_fingerprint) {
  const PageFormat base = formats_of("deepseek-v4-flash").paged;
  const auto differs = [&](auto change) {
    PageFormat other = base;
    change(other);
    EXPECT_NE(format_fingerprint(other), format_fingerprint(base));
  };
  differs([](PageFormat& f) { f.components[0].hadamard = false; });
  differs([](PageFormat& f) { f.components[0].rope_table.theta = 40000; });
  differs([](PageFormat& f) { f.components[0].rope_table = {160000, 0, 0, 0, 0}; });
  differs([](PageFormat& f) { f.components[0].rope = RopeStyle::kHalfSplitFirst64; });
  differs([](PageFormat& f) { f.components[0].layers = 20; });
  differs([](PageFormat& f) { f.order = PageOrder::kLayerMajor; });
  differs([](PageFormat& f) { f.tokens_per_page = 512; });
  PresetOptions amax;
  amax.index_k = ElementFormat::kFp8;
  amax.index_k_scale = ScaleKind::kAmax;
  PresetOptions power = amax;
  power.index_k_scale = ScaleKind::kPowerOfTwo;
  EXPECT_NE(format_fingerprint(formats_of("deepseek-v4-flash", amax).paged),
            format_fingerprint(formats_of("deepseek-v4-flash", power).paged));
}

TEST(PageFormat, bad_formats_are_told_the_field_the_value_and_the_limit) {
  const PageFormat good = formats_of("deepseek-v4-flash").paged;
  const auto refused = [&](auto change, const char* words) {
    PageFormat bad = good;
    change(bad);
    const absl::Status status = check_format(bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_NE(std::string(status.message()).find(words), std::string::npos) << status;
    EXPECT_FALSE(PageLayout::of(bad).ok());
  };
  refused([](PageFormat& f) { f.name = "Bad Name"; }, "'Bad Name' may hold");
  refused([](PageFormat& f) { f.name = ""; }, "0 characters");
  refused([](PageFormat& f) { f.components.clear(); }, "has 0, must have 1..16");
  refused([](PageFormat& f) { f.tokens_per_page = 0; }, "is 0, must be 1..65536");
  refused([](PageFormat& f) { f.tokens_per_page = 258; }, "does not divide");
  refused([](PageFormat& f) { f.components[0].layers = 513; }, "layers is 513, must be 1..512");
  refused([](PageFormat& f) { f.components[0].head_dim = 64; }, "head_dim 128, not 64");
  refused([](PageFormat& f) { f.components[0].element = ElementFormat::kFp8; }, "need a scale kind");
  refused([](PageFormat& f) { f.components[1].hadamard = true; }, "index_k's alone");
  refused([](PageFormat& f) { f.components[1].scale = ScaleKind::kAmax; }, "power_of_two scales");
  refused([](PageFormat& f) { f.components[0].rope_table.theta = -1; }, "theta is -1");
  refused([](PageFormat& f) { f.components[0].speculative_rows = 1; }, "belong to state components");
  PageFormat swapped = good;
  std::swap(swapped.components[0], swapped.components[2]);
  const absl::StatusOr<PageLayout> layout = PageLayout::of(swapped);
  EXPECT_NE(std::string(layout.status().message()).find("list index_k first"), std::string::npos) << layout.status();
}

TEST(PageFormat, damaged_text_is_refused_and_never_misread) {
  const std::string good = format_text(formats_of("deepseek-v4-flash").paged);
  EXPECT_FALSE(parse_format("").ok());
  EXPECT_FALSE(parse_format(good.substr(0, good.size() - 1)).ok()) << "cut before its last line feed";
  EXPECT_FALSE(parse_format(good + "\n").ok());
  EXPECT_FALSE(parse_format(std::string(20000, 'x') + "\n").ok());
  Rng rng(7);
  const int64_t rounds = testing::count_of("page_format_damage");
  for (int64_t round = 0; round < rounds; ++round) {
    std::string text = good;
    const size_t at = rng.below(text.size());
    switch (rng.below(3)) {
      case 0: text[at] = static_cast<char>(rng.below(256)); break;
      case 1: text.erase(at, 1 + rng.below(8)); break;
      default: text.insert(at, 1, static_cast<char>(32 + rng.below(95)));
    }
    absl::StatusOr<PageFormat> parsed = parse_format(text);
    if (!parsed.ok()) continue;
    EXPECT_EQ(format_text(*parsed), text) << "what is accepted is canonical, so it means one thing";
    EXPECT_TRUE(PageLayout::of(*parsed, 4).ok() || parsed->components[0].kind != ComponentKind::kIndexK);
  }
}

TEST(PageFormat, offsets_past_4_and_64_gib_reach_their_own_bytes) {
  const PageLayout layout = *PageLayout::of(formats_of("deepseek-v4-flash").paged);
  const int64_t pages = 80'000;  // 93 GB of address space, none of it backed until touched
  const auto length = static_cast<size_t>(layout.pool_bytes(pages));
  void* memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "this machine refuses a sparse mapping of " << length << " bytes";
  auto* base = static_cast<char*>(memory);
  const int64_t page_ids[] = {0, 3'684, 3'685, 58'944, 58'945, pages - 1};  // around 2^32 and 64 GiB
  int64_t mark = 1;
  for (int64_t page : page_ids) {
    for (int layer : {0, 20}) {
      const int64_t at = page * layout.page_stride(0) + layout.layer_offset(0, layer) + slot_place(ElementFormat::kBf16, 128, 64, 63).data;
      std::memcpy(base + at, &mark, sizeof mark);
      ++mark;
    }
  }
  mark = 1;
  for (int64_t page : page_ids) {
    for (int layer : {0, 20}) {
      int64_t found = 0;
      std::memcpy(&found, base + page * 1'165'824 + layer * 16'384 + 63 * 256, sizeof found);
      EXPECT_EQ(found, mark) << "page " << page << " layer " << layer;
      ++mark;
    }
  }
  munmap(memory, length);
}

TEST(PageFormat, unknown_presets_are_told_the_known_ones) {
  const absl::StatusOr<ModelFormats> formats = preset_formats("deepseek-v9", {});
  EXPECT_EQ(formats.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(std::string(formats.status().message()).find("deepseek-v4-flash"), std::string::npos);
}

}  // namespace
}  // namespace needle
