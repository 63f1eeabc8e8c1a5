// Adding to an OpReport that several threads, or several operations, share.
//
// What must stay true:
//  1. Every addition is atomic, so one report may serve a batch and any number of threads.
//  2. A null report is allowed everywhere and costs nothing.
#pragma once

#include <cstdint>

#include "kernels/pool_view.h"

namespace needle {

// What one row, or one worker, found; summed up without atomics before it is added.
inline void add_to_report(OpReport* report, const OpReport& found) {
  if (report == nullptr) return;
  if (found.status != 0) __atomic_fetch_or(&report->status, found.status, __ATOMIC_RELAXED);
  if (found.nan_scores != 0) __atomic_fetch_add(&report->nan_scores, found.nan_scores, __ATOMIC_RELAXED);
  if (found.absent_entries != 0) __atomic_fetch_add(&report->absent_entries, found.absent_entries, __ATOMIC_RELAXED);
  if (found.skipped_rows != 0) __atomic_fetch_add(&report->skipped_rows, found.skipped_rows, __ATOMIC_RELAXED);
  if (found.fallbacks != 0) __atomic_fetch_add(&report->fallbacks, found.fallbacks, __ATOMIC_RELAXED);
}

}  // namespace needle
