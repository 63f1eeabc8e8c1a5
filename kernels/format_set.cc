#include "kernels/format_set.h"

#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace needle {

namespace {

constexpr absl::string_view kSectionStart = "needle-page-format ";

// Cuts the text before every version line. The first section must begin at byte 0.
std::vector<absl::string_view> sections_of(absl::string_view text) {
  std::vector<absl::string_view> sections;
  size_t start = 0;
  while (start < text.size()) {
    size_t next = text.find(absl::StrCat("\n", kSectionStart), start);
    next = next == absl::string_view::npos ? text.size() : next + 1;
    sections.push_back(text.substr(start, next - start));
    start = next;
  }
  return sections;
}

}  // namespace

std::string format_set_text(const ModelFormats& formats) {
  std::string text;
  for (const PageFormat* format : {&formats.paged, &formats.window, &formats.state}) {
    if (!format->components.empty()) text += format_text(*format);
  }
  return text;
}

absl::StatusOr<ModelFormats> parse_format_set(absl::string_view text) {
  ModelFormats formats;
  int last_kind = -1;
  for (absl::string_view section : sections_of(text)) {
    absl::StatusOr<PageFormat> format = parse_format(section);
    if (!format.ok()) return format.status();
    const int kind = static_cast<int>(format->pool);
    if (kind <= last_kind) {
      return absl::InvalidArgumentError(absl::StrCat("pool set format: the ", name_of(format->pool),
                                                     " format comes twice or out of order; the order is paged, window, state"));
    }
    last_kind = kind;
    PageFormat* const places[] = {&formats.paged, &formats.window, &formats.state};
    *places[kind] = *std::move(format);
  }
  if (formats.paged.components.empty()) {
    return absl::InvalidArgumentError("pool set format: the paged format is missing; it is the first section");
  }
  return formats;
}

uint64_t format_set_fingerprint(absl::string_view text) { return XXH3_64bits(text.data(), text.size()); }

absl::Status check_same_format_set(absl::string_view ours, absl::string_view theirs) {
  if (ours == theirs) return absl::OkStatus();
  const std::vector<absl::string_view> our_lines = absl::StrSplit(ours, '\n');
  const std::vector<absl::string_view> their_lines = absl::StrSplit(theirs, '\n');
  size_t line = 0;
  while (line < our_lines.size() && line < their_lines.size() && our_lines[line] == their_lines[line]) ++line;
  const absl::string_view our_line = line < our_lines.size() ? our_lines[line] : "(end)";
  const absl::string_view their_line = line < their_lines.size() ? their_lines[line] : "(end)";
  return absl::FailedPreconditionError(absl::StrCat(
      "page formats differ at line ", line + 1, ": ours '", our_line, "', theirs '", their_line,
      "'. Bytes of one are not bytes of the other: start both sides with the same format.\n--- ours\n", ours, "--- theirs\n", theirs));
}

}  // namespace needle
