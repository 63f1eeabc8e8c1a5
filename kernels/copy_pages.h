// copy_pages: pages, or the same part of each, from one place to another: gather (into a packed buffer), scatter (out of
// one), page to page, push to and pull from memory of a peer. Optionally with the checksum of what was copied.
//
// What must stay true:
//  1. Copy i moves page_bytes bytes from page from_pages[i] of `from` to page to_pages[i] of `to`. A null list means page
//     i itself. Sources and destinations do not overlap, and no destination is named twice.
//  2. A page id outside its view touches no memory: that copy is skipped, counted in skipped_rows, kStatusAbsentPage set,
//     and its checksum is 0.
//  3. A checksum is checksum_pages' number for the bytes that were read, first_block as given there: what the reader
//     compares with the source's own sum says that the very bytes that it wrote were the right ones.
//  4. On a device either side may be a peer's memory, mapped and reachable. The kernel's loads and stores are the transfer:
//     `blocks_max` bounds how much of this GPU it takes, in blocks of 64 threads (224 with checksums) and 93 KB of shared memory
//     (a kernel that clears the sums of pages above 18 KB goes before, of as many blocks at most). Between two H200s 16 of them move 89 to
//     94 % of what the driver's contiguous copy does, 82 to 93 % with checksums (docs/kernels-performance.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/checksum_pages.h"
#include "kernels/pool_view.h"

namespace needle {

// Places of equal parts: part i of page p at base + p x stride.
struct PagesView {
  const std::byte* base = nullptr;  // 16-byte aligned
  int64_t stride = 0;               // a multiple of 16
  int64_t count = 0;                // valid page ids are [0, count)
};
struct MutablePagesView {
  std::byte* base = nullptr;
  int64_t stride = 0;
  int64_t count = 0;
};

struct CopyPagesArgs {
  PagesView from;
  const int32_t* from_pages = nullptr;  // [count]; null: 0, 1, 2, ...
  MutablePagesView to;
  const int32_t* to_pages = nullptr;  // [count]; null: 0, 1, 2, ...
  int64_t page_bytes = 0;             // a multiple of 16; with checksums of 64
  int32_t count = 0;
  uint64_t* checksums = nullptr;  // [count]; null: none wanted
  uint64_t first_block = 0;       // seed of the first block of each page
  int32_t blocks_max = 0;         // thread blocks at a time; 0: as many as the device is best with
  OpReport* report = nullptr;     // may be null
};

// INVALID_ARGUMENT naming value and limit, before anything is written. Every twin calls it first.
absl::Status check_copy_pages(const CopyPagesArgs& args);
absl::Status copy_pages_ref(const CopyPagesArgs& args);
absl::Status copy_pages_cuda(const CopyPagesArgs& args, void* stream);

}  // namespace needle
