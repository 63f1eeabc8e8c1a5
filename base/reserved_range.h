// A range of addresses that is reserved once and filled and emptied piece by piece: how daemon and client hold a pool.
//
// What must stay true:
//  1. Every address of the range belongs to it at every moment, mapped or PROT_NONE: no other mmap of this process can ever get
//     a place in it, and a stray access ends the process instead of reading what was mapped there next.
//  2. What is mapped is not inherited by a forked child.
//
// Any thread; callers keep apart who works on which piece. Errors are in errno.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>

#include "base/check.h"

namespace needle {

// nullptr where so many bytes of addresses cannot be had.
inline std::byte* reserve_range(size_t bytes) {
  void* place = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return place == MAP_FAILED ? nullptr : static_cast<std::byte*>(place);
}

inline void empty_range(std::byte* address, size_t bytes) {
  void* place = ::mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  NEEDLE_CHECK(place == address, "a reserved range can always be reserved again");
}

// Maps `fd` from its start, shared. False: nothing is mapped there, and the piece is still reserved.
inline bool fill_range(std::byte* address, size_t bytes, int protection, int fd) {
  // First wherever the kernel likes, which also reserves the huge pages of a hugetlb file. A fixed mapping that fails (no huge
  // pages left) has already unmapped what was there: another thread's next mmap would take the hole, and whatever is then put
  // at `address` would lie over that thread's memory.
  void* trial = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  if (trial == MAP_FAILED) return false;
  const bool filled =
      ::mmap(address, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED && ::madvise(address, bytes, MADV_DONTFORK) == 0;
  const int error = errno;
  if (!filled) empty_range(address, bytes);  // at once
  ::munmap(trial, bytes);
  errno = error;
  return filled;
}

}  // namespace needle
