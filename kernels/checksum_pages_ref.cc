// checksum_pages as its header defines it, by the hash's own library, and the check that every twin calls first.
#include "absl/strings/str_cat.h"
#include "kernels/checksum_pages.h"
#include "kernels/op_report.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace needle {
namespace {

absl::Status refuse(absl::string_view field, int64_t value, absl::string_view limit) {
  return absl::InvalidArgumentError(absl::StrCat("checksum_pages: ", field, " is ", value, ", must be ", limit));
}

}  // namespace

absl::Status check_checksum_pages(const ChecksumPagesArgs& args) {
  if (args.count < 0) return refuse("count", args.count, ">= 0");
  if (args.page_count < 0) return refuse("page_count", args.page_count, ">= 0");
  if (args.page_bytes < kChecksumBlockLeast || args.page_bytes > kPageBytesMax) {
    return refuse("page_bytes", args.page_bytes, absl::StrCat(kChecksumBlockLeast, "..", kPageBytesMax));
  }
  const int64_t last = args.page_bytes % kChecksumBlockBytes;
  if (last != 0 && last < kChecksumBlockLeast) {
    return refuse("page_bytes", args.page_bytes,
                  absl::StrCat("such that its last block of ", last, " bytes is none or >= ", kChecksumBlockLeast,
                               "; pad the page to a multiple of 256"));
  }
  if (args.page_count > 1 && args.page_stride < args.page_bytes) {
    return refuse("page_stride", args.page_stride, absl::StrCat(">= page_bytes = ", args.page_bytes));
  }
  if (args.page_stride % 8 != 0) return refuse("page_stride", args.page_stride, "a multiple of 8");
  if (args.count == 0) return absl::OkStatus();
  if (args.base == nullptr && args.page_count > 0) {
    return absl::InvalidArgumentError("checksum_pages: base is null; give the pool's first byte");
  }
  if (reinterpret_cast<uintptr_t>(args.base) % 8 != 0) {
    return absl::InvalidArgumentError("checksum_pages: base must be 8-byte aligned");
  }
  if (args.pages == nullptr) return absl::InvalidArgumentError("checksum_pages: pages is null; give the page ids");
  if (args.checksums == nullptr) {
    return absl::InvalidArgumentError("checksum_pages: checksums is null; the sums go there");
  }
  return absl::OkStatus();
}

absl::Status checksum_pages_ref(const ChecksumPagesArgs& args) {
  absl::Status status = check_checksum_pages(args);
  if (!status.ok()) return status;

  OpReport found{};
  for (int64_t i = 0; i < args.count; ++i) {
    if (!args.add) args.checksums[i] = 0;
    const int64_t page = args.pages[i];
    if (page < 0 || page >= args.page_count) {
      ++found.skipped_rows;
      found.status |= kStatusAbsentPage;
      continue;
    }
    const std::byte* bytes = args.base + page * args.page_stride;
    for (int64_t block = 0; block < checksum_blocks(args.page_bytes); ++block) {
      const int64_t begin = block * kChecksumBlockBytes;
      const int64_t length = args.page_bytes - begin < kChecksumBlockBytes ? args.page_bytes - begin : kChecksumBlockBytes;
      args.checksums[i] +=
          XXH3_64bits_withSeed(bytes + begin, static_cast<size_t>(length), args.first_block + static_cast<uint64_t>(block));
    }
  }
  add_to_report(args.report, found);
  return absl::OkStatus();
}

}  // namespace needle
