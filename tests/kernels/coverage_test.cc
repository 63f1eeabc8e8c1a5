// Which element format of which component every operation takes, on which twin, and the case that proves it. Each cell
// of component x element format x operation x twin is either exercised by a named case or unsupported with a reason;
// a cell that no row speaks for fails, and so does a row that the code contradicts.
//
// A new operation, or a new format of one: add rows to kRows. A new twin file (kernels/op_cpu.cc, kernels/op.cu): nothing
// to add, but some test of tests/kernels/ must run the battery on it, or its cells fail.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cpu_isa.h"
#include "kernels/index_logits.h"
#include "kernels/page_format.h"
#include "kernels/read_entries.h"

namespace needle::testing {
namespace {

constexpr int kKindCount = 5;

constexpr uint32_t bit(ElementFormat element) { return 1u << static_cast<int>(element); }
constexpr uint32_t bit(ComponentKind kind) { return 1u << static_cast<int>(kind); }

constexpr uint32_t kAllElements = (1u << kElementFormatCount) - 1;
constexpr uint32_t kIndexKeys = bit(ComponentKind::kIndexK);
constexpr uint32_t kKv = bit(ComponentKind::kMainKv) | bit(ComponentKind::kWindowKv);
constexpr uint32_t kStates = bit(ComponentKind::kIndexKState) | bit(ComponentKind::kMainKvState);
constexpr uint32_t kIndexFormats = bit(ElementFormat::kBf16) | bit(ElementFormat::kFp8) | bit(ElementFormat::kFp4);
constexpr uint32_t kKvFormats = bit(ElementFormat::kBf16) | bit(ElementFormat::kFp8DsMla) | bit(ElementFormat::kFp8V32);
constexpr uint32_t kRowsFormat = bit(ElementFormat::kFp32Rows);

// ---------------------------------------------------------------------------------------------------------------
// The table.

struct Row {
  const char* operation;  // the stem of kernels/<stem>_ref.cc, or one of its entries
  uint32_t kinds;
  uint32_t elements;
  const char* proof_file;   // in tests/kernels; the battery, or the test of an operation that has none
  const char* proof_case;   // a case of it; null: unsupported
  const char* unsupported;  // the reason
};

constexpr const char* kStateRows = "state rows are folded by the store, they are never read as entries";
constexpr const char* kOnlyIndexKeys = "only index keys are scored";

const Row kRows[] = {
    {"store", kIndexKeys, kIndexFormats, "store_battery.h", "stored_values_lie_within_half_a_step", nullptr},
    {"store", kKv, kKvFormats, "store_battery.h", "stored_values_lie_within_half_a_step", nullptr},
    {"store", kStates, kRowsFormat, "store_battery.h", "any_chunking_gives_the_same_bytes", nullptr},
    {"compressor_state", kStates, kRowsFormat, "store_battery.h", "init_clears_a_record_whatever_it_held", nullptr},
    {"compressor_state", kIndexKeys | kKv, kAllElements, nullptr, nullptr, "pages hold entries, not state records"},
    {"prepare_index_q", kIndexKeys, kIndexFormats, "prepare_index_q_battery.h", "queries_lie_within_half_a_step", nullptr},
    {"prepare_index_q", kKv | kStates, kAllElements, nullptr, nullptr, "queries are prepared for index keys alone"},
    {"index_logits", kIndexKeys, kIndexFormats, "index_logits_battery.h", "agrees_for_every_pair_of_key_and_query_formats", nullptr},
    {"index_logits", kKv, kAllElements, nullptr, nullptr, kOnlyIndexKeys},
    {"index_logits", kStates, kAllElements, nullptr, nullptr, kOnlyIndexKeys},
    {"select_topk", kIndexKeys, kIndexFormats, "select_topk_battery.h", "every_adversarial_row_when_long", nullptr},
    {"select_topk", kKv | kStates, kAllElements, nullptr, nullptr, "scores come from index keys alone"},
    {"merge_topk", kIndexKeys, kIndexFormats, "select_topk_battery.h", "a_merge_equals_the_selection_of_the_whole", nullptr},
    {"merge_topk", kKv | kStates, kAllElements, nullptr, nullptr, "scores come from index keys alone"},
    {"list_slots", kIndexKeys, kIndexFormats, "select_topk_battery.h", "lists_every_present_entry_in_order", nullptr},
    {"list_slots", kKv, kKvFormats, "select_topk_battery.h", "lists_every_present_entry_in_order", nullptr},
    {"list_slots", kStates, kAllElements, nullptr, nullptr, kStateRows},
    {"read_topk", kIndexKeys, kIndexFormats, "read_topk_battery.h", "reads_every_key_format", nullptr},
    {"read_topk", kKv | kStates, kAllElements, nullptr, nullptr, kOnlyIndexKeys},
    {"read_entries", kIndexKeys, kIndexFormats, "read_entries_battery.h", "slots_of_every_format_widen_exactly", nullptr},
    {"read_entries", kKv, kKvFormats, "read_entries_battery.h", "slots_of_every_format_widen_exactly", nullptr},
    {"read_entries", kStates, kAllElements, nullptr, nullptr, kStateRows},
    {"checksum_pages", kIndexKeys, kIndexFormats, "checksum_pages_battery.h", "every_page_size_has_the_defined_sum", nullptr},
    {"checksum_pages", kKv, kKvFormats, "checksum_pages_battery.h", "every_page_size_has_the_defined_sum", nullptr},
    {"checksum_pages", kStates, kRowsFormat, "checksum_pages_battery.h", "every_page_size_has_the_defined_sum", nullptr},
};

// (component, element format) that no page format can have, whatever the operation. check_format must agree.
struct NoFormat {
  uint32_t kinds;
  uint32_t elements;
  const char* reason;
};
const NoFormat kNoFormats[] = {
    {kIndexKeys, bit(ElementFormat::kFp8DsMla) | bit(ElementFormat::kFp8V32), "main KV's layouts of 512 and 576 dimensions"},
    {kIndexKeys | kKv, kRowsFormat, "fp32 rows are compressor state's"},
    {kKv, bit(ElementFormat::kFp8) | bit(ElementFormat::kFp4), "index-K's layouts; KV's fp8 keeps RoPE dimensions in bf16"},
    {kStates, kAllElements & ~kRowsFormat, "compressor state is fp32 rows"},
};

// Where an operation's twins lie, by the source file that would hold each.
struct Operation {
  const char* name;
  const char* stem;     // kernels/<stem>_ref.cc, _cpu.cc, .cu
  const char* battery;  // included by every test that runs it
};
const Operation kOperations[] = {
    {"store", "store", "store_battery.h"},
    {"compressor_state", "compressor_state", "store_battery.h"},
    {"prepare_index_q", "prepare_index_q", "prepare_index_q_battery.h"},
    {"index_logits", "index_logits", "index_logits_battery.h"},
    {"select_topk", "select_topk", "select_topk_battery.h"},
    {"merge_topk", "select_topk", "select_topk_battery.h"},
    {"list_slots", "select_topk", "select_topk_battery.h"},
    {"read_topk", "read_topk", "read_topk_battery.h"},
    {"read_entries", "read_entries", "read_entries_battery.h"},
    {"checksum_pages", "checksum_pages", "checksum_pages_battery.h"},
};

// ---------------------------------------------------------------------------------------------------------------
// What the tree says.

std::filesystem::path source_root() { return NEEDLE_SOURCE_DIR; }

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Every file of tests/kernels that mentions `words` and whose name ends in `suffix`.
bool some_test_mentions(const std::string& words, const std::string& suffix) {
  for (const auto& entry : std::filesystem::directory_iterator(source_root() / "tests" / "kernels")) {
    const std::string name = entry.path().filename().string();
    if (name == "coverage_test.cc" || name.size() < suffix.size() ||
        name.compare(name.size() - suffix.size(), suffix.size(), suffix) != 0) {
      continue;
    }
    if (text_of(entry.path()).find(words) != std::string::npos) return true;
  }
  return false;
}

bool has_source(const std::string& file) { return std::filesystem::exists(source_root() / "kernels" / file); }

Component component_of(ComponentKind kind, ElementFormat element, ScaleKind scale) {
  Component component;
  component.kind = kind;
  component.layers = 2;
  component.ratio = 4;
  component.element = element;
  component.scale = scale;
  const bool index = kind == ComponentKind::kIndexK || kind == ComponentKind::kIndexKState;
  component.head_dim = index ? 128 : (element == ElementFormat::kFp8V32 ? 576 : 512);
  const bool state = kind == ComponentKind::kIndexKState || kind == ComponentKind::kMainKvState;
  if (state) component.state_form = StateForm::kRaw;
  if (kind == ComponentKind::kWindowKv) component.ratio = 1;
  return component;
}

// Whether any page format may hold it, under any scale kind.
bool format_exists(ComponentKind kind, ElementFormat element) {
  for (int scale = 0; scale < kScaleKindCount; ++scale) {
    PageFormat format;
    format.name = "cell";
    const bool state = kind == ComponentKind::kIndexKState || kind == ComponentKind::kMainKvState;
    format.pool = state ? PoolKind::kState : kind == ComponentKind::kWindowKv ? PoolKind::kWindow : PoolKind::kPaged;
    format.tokens_per_page = state ? 0 : 64;
    format.components = {component_of(kind, element, static_cast<ScaleKind>(scale))};
    if (check_format(format).ok()) return true;
  }
  return false;
}

template <class Body>
void for_each_cell(const Body& body) {
  for (int kind = 0; kind < kKindCount; ++kind) {
    for (int element = 0; element < kElementFormatCount; ++element) {
      body(static_cast<ComponentKind>(kind), static_cast<ElementFormat>(element));
    }
  }
}

const char* no_format_reason(ComponentKind kind, ElementFormat element) {
  for (const NoFormat& no : kNoFormats) {
    if ((no.kinds & bit(kind)) != 0 && (no.elements & bit(element)) != 0) return no.reason;
  }
  return nullptr;
}

const Row* row_for(const std::string& operation, ComponentKind kind, ElementFormat element) {
  for (const Row& row : kRows) {
    if (operation == row.operation && (row.kinds & bit(kind)) != 0 && (row.elements & bit(element)) != 0) return &row;
  }
  return nullptr;
}

// ---------------------------------------------------------------------------------------------------------------

TEST(Coverage, formats_that_cannot_be_are_listed_with_a_reason_and_no_others) {
  for_each_cell([](ComponentKind kind, ElementFormat element) {
    EXPECT_EQ(no_format_reason(kind, element) == nullptr, format_exists(kind, element))
        << name_of(kind) << " in " << name_of(element)
        << (format_exists(kind, element) ? " is a format, yet listed as none" : " is no format, and not listed so");
  });
}

TEST(Coverage, every_cell_is_exercised_by_name_or_unsupported_with_a_reason) {
  for (const Operation& operation : kOperations) {
    for_each_cell([&](ComponentKind kind, ElementFormat element) {
      if (no_format_reason(kind, element) != nullptr) return;
      const Row* row = row_for(operation.name, kind, element);
      ASSERT_NE(row, nullptr) << "no row for " << operation.name << " of " << name_of(kind) << " in " << name_of(element);
      EXPECT_NE(row->proof_case == nullptr, row->unsupported == nullptr) << "one of the two, " << operation.name;
    });
  }
}

TEST(Coverage, every_named_case_stands_where_the_row_says) {
  for (const Row& row : kRows) {
    if (row.proof_case == nullptr) continue;
    if (row.proof_file == nullptr) {
      EXPECT_TRUE(some_test_mentions(row.proof_case, ".h") || some_test_mentions(row.proof_case, ".cc"))
          << "nothing in tests/kernels speaks of " << row.proof_case;
      continue;
    }
    const std::string text = text_of(source_root() / "tests" / "kernels" / row.proof_file);
    EXPECT_NE(text.find(row.proof_case), std::string::npos)
        << "tests/kernels/" << row.proof_file << " has no case " << row.proof_case << " for " << row.operation;
  }
}

TEST(Coverage, every_twin_that_is_there_is_run_by_a_test) {
  for (const Operation& operation : kOperations) {
    const std::string stem = operation.stem;
    const std::string entry = operation.name;
    // Files that hold a twin, and the ending of the test that must run it.
    const bool cpu = has_source(stem + "_cpu.cc") || has_source(stem + ".cc");
    EXPECT_TRUE(cpu) << "kernels/" << stem << "_cpu.cc is missing";
    const std::string battery = operation.battery != nullptr ? operation.battery : entry;
    EXPECT_TRUE(some_test_mentions(battery, ".cc")) << "no test in tests/kernels runs " << battery;
    // CUDA: unsupported until its file is there; from then on the battery must run on it.
    if (has_source(stem + ".cu")) {
      EXPECT_TRUE(some_test_mentions(battery, ".cu") || some_test_mentions(stem + "_cuda", ".cc"))
          << "kernels/" << stem << ".cu is there and no test of tests/kernels runs " << battery << " on it";
    }
  }
}

TEST(Coverage, scoring_and_reading_refuse_what_the_table_calls_unsupported) {
  alignas(256) static std::byte page[1 << 20];
  for (int element_index = 0; element_index < kElementFormatCount; ++element_index) {
    const ElementFormat element = static_cast<ElementFormat>(element_index);
    LayerView layer;
    layer.base = page;
    layer.page_count = 1;
    layer.slots_per_page = 64;
    layer.element = element;
    layer.head_dim = static_cast<int32_t>(read_entry_values(element, 128));
    layer.page_stride = (layer_page_bytes(element, layer.head_dim, 64) + 255) / 256 * 256;

    IndexLogitsArgs logits;
    logits.keys = layer;
    logits.heads = 64;
    const bool scored = row_for("index_logits", ComponentKind::kIndexK, element) != nullptr &&
                        row_for("index_logits", ComponentKind::kIndexK, element)->proof_case != nullptr;
    EXPECT_EQ(check_index_logits(logits).ok(), scored) << name_of(element) << ": " << check_index_logits(logits);

    ReadEntriesArgs read;
    read.layer = layer;
    read.entry_stride = 4096;
    bool readable = false;
    for (int kind = 0; kind < kKindCount; ++kind) {
      const Row* row = row_for("read_entries", static_cast<ComponentKind>(kind), element);
      readable = readable || (row != nullptr && row->proof_case != nullptr);
    }
    EXPECT_EQ(check_read_entries(read).ok(), readable) << name_of(element) << ": " << check_read_entries(read);
  }
}

// Every operation has a check_<operation>(const ...Args&) in its contract; so the catalogue cannot forget one.
TEST(Coverage, the_catalogue_has_a_row_for_every_operation) {
  const std::string catalogue = text_of(source_root() / "kernels" / "README.md");
  const std::regex check("absl::Status check_([a-z_]+)\\(const [A-Za-z]+Args&");
  int operations = 0;
  for (const auto& entry : std::filesystem::directory_iterator(source_root() / "kernels")) {
    if (entry.path().extension() != ".h") continue;
    const std::string text = text_of(entry.path());
    for (std::sregex_iterator found(text.begin(), text.end(), check), end; found != end; ++found, ++operations) {
      EXPECT_NE(catalogue.find("**" + (*found)[1].str() + "**"), std::string::npos)
          << "kernels/README.md has no row for " << (*found)[1] << " of " << entry.path().filename();
    }
  }
  EXPECT_GE(operations, 13) << "the contracts are not written as this test expects";
}

TEST(Coverage, the_catalogue_names_only_files_that_exist) {
  const std::string catalogue = text_of(source_root() / "kernels" / "README.md");
  const std::regex file("`([A-Za-z0-9_/]+\\.(?:h|cc|cu|cuh|md))`");
  for (std::sregex_iterator found(catalogue.begin(), catalogue.end(), file), end; found != end; ++found) {
    const std::string name = (*found)[1];
    if (name.find("op.") == 0 || name.find("op_ref") == 0 || name.find("op_cpu") == 0 || name.find("op_battery") != std::string::npos) {
      continue;  // the pattern of a stem
    }
    EXPECT_TRUE(has_source(name) || has_source("../tests/kernels/" + name) || has_source("../" + name)) << name;
  }
}

}  // namespace
}  // namespace needle::testing
