// Arbitrary text into the page format's parser: it is refused with a reason, or it is the canonical text of a format and
// is read back as that format. Nothing else may happen.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "kernels/page_format.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<needle::PageFormat> format = needle::parse_format(text);
  if (!format.ok()) {
    if (format.status().message().empty()) std::abort();
    return 0;
  }
  const std::string canonical = needle::format_text(*format);
  const absl::StatusOr<needle::PageFormat> again = needle::parse_format(canonical);
  if (canonical != std::string(text) || !again.ok() || !(*again == *format)) {
    std::fprintf(stderr, "page_format: accepted text is not canonical, or is not read back as its format:\n%s\n", canonical.c_str());
    std::abort();
  }
  return 0;
}
