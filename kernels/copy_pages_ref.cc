// copy_pages as its header defines it, and the check that every twin calls first.
#include "kernels/copy_pages.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/op_report.h"

namespace needle {
namespace {

absl::Status refuse(absl::string_view field, int64_t value, absl::string_view limit) {
  return absl::InvalidArgumentError(absl::StrCat("copy_pages: ", field, " is ", value, ", must be ", limit));
}

absl::Status check_side(absl::string_view side, const std::byte* base, int64_t stride, int64_t pages, int64_t bytes) {
  if (pages < 0) return refuse(absl::StrCat(side, ".count"), pages, ">= 0");
  if (pages > 0 && base == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("copy_pages: ", side, ".base is null; give its first byte"));
  }
  if (reinterpret_cast<uintptr_t>(base) % 16 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("copy_pages: ", side, ".base must be 16-byte aligned"));
  }
  if (stride % 16 != 0) return refuse(absl::StrCat(side, ".stride"), stride, "a multiple of 16");
  if (pages > 1 && stride < bytes) {
    return refuse(absl::StrCat(side, ".stride"), stride, absl::StrCat(">= page_bytes = ", bytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status check_copy_pages(const CopyPagesArgs& args) {
  if (args.count < 0) return refuse("count", args.count, ">= 0");
  if (args.blocks_max < 0) return refuse("blocks_max", args.blocks_max, ">= 0");
  if (args.page_bytes < 16 || args.page_bytes > kPageBytesMax || args.page_bytes % 16 != 0) {
    return refuse("page_bytes", args.page_bytes, absl::StrCat("a multiple of 16 in 16..", kPageBytesMax));
  }
  if (args.checksums != nullptr) {
    const int64_t last = args.page_bytes % kChecksumBlockBytes;
    if (args.page_bytes % 64 != 0 || (last != 0 && last < kChecksumBlockLeast)) {
      return refuse("page_bytes", args.page_bytes,
                    "a multiple of 64 whose last block of 2,304 is none or longer than 240, where checksums are wanted");
    }
  }
  absl::Status from = check_side("from", args.from.base, args.from.stride, args.from.count, args.page_bytes);
  if (!from.ok()) return from;
  return check_side("to", args.to.base, args.to.stride, args.to.count, args.page_bytes);
}

absl::Status copy_pages_ref(const CopyPagesArgs& args) {
  absl::Status status = check_copy_pages(args);
  if (!status.ok()) return status;
  OpReport found{};
  for (int32_t i = 0; i < args.count; ++i) {
    const int64_t from = args.from_pages == nullptr ? i : args.from_pages[i];
    const int64_t to = args.to_pages == nullptr ? i : args.to_pages[i];
    if (args.checksums != nullptr) args.checksums[i] = 0;
    if (from < 0 || from >= args.from.count || to < 0 || to >= args.to.count) {
      found.status |= kStatusAbsentPage;
      ++found.skipped_rows;
      continue;
    }
    const std::byte* bytes = args.from.base + from * args.from.stride;
    std::memcpy(args.to.base + to * args.to.stride, bytes, static_cast<size_t>(args.page_bytes));
    if (args.checksums == nullptr) continue;
    const int32_t first = 0;
    ChecksumPagesArgs sum;
    sum.base = bytes;
    sum.page_stride = args.page_bytes;
    sum.page_bytes = args.page_bytes;
    sum.page_count = 1;
    sum.first_block = args.first_block;
    sum.pages = &first;
    sum.count = 1;
    sum.checksums = &args.checksums[i];
    status = checksum_pages_ref(sum);
    if (!status.ok()) return status;
  }
  add_to_report(args.report, found);
  return absl::OkStatus();
}

}  // namespace needle
