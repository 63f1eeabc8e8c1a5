#!/usr/bin/env bash
# compute-sanitizer over the small cases of the CUDA tests: memcheck, synccheck and initcheck on one folder of test
# binaries, racecheck on another, whose kernels were built for it (NEEDLE_RACECHECK, see kernels/bulk_copy.cuh). Prints one line a
# test and tool; fails where one reports anything, does not end, or ran no case.
#
# usage: sanitize_gpu.sh FOLDER RACECHECK_FOLDER   the folders of index_logits_cuda_test and the others
#        sanitize_gpu.sh --why-not                 says why it cannot run here, or nothing
#        sanitize_gpu.sh --tests                   names the binaries
#
# NEEDLE_JOBS processes run side by side (default: as many as processors), each with a share of a test's cases: under racecheck one
# case, which takes seconds to a minute. NEEDLE_SANITIZE_SECONDS_MAX ends one that takes longer (300); NEEDLE_SANITIZE_LOGS is
# where what they print is kept.
set -euo pipefail

tests=(select_topk store index_logits read_topk pages)
if [ "${1:-}" = --tests ]; then
  printf '%s_cuda_test\n' "${tests[@]}"
  exit 0
fi
# Those of pages are small as they are, but for one.
export filter='*Small*:ChecksumPagesCuda.*:ReadEntriesCuda.*:CopyPagesCuda.equals*'
export seconds_max="${NEEDLE_SANITIZE_SECONDS_MAX:-300}"  # of one process

if ! command -v compute-sanitizer >/dev/null; then
  why="compute-sanitizer is not on PATH: it comes with the CUDA toolkit"
elif ! { nvidia-smi -L 2>/dev/null | grep '^GPU' >/dev/null; }; then  # -q would leave while nvidia-smi still writes
  why="no GPU: nvidia-smi lists none"
else
  why=""
fi
if [ "${1:-}" = --why-not ]; then
  echo "$why"
  exit 0
fi
[ $# -eq 2 ] || { sed -n '2,13s/^# \?//p' "$0" >&2; exit 2; }
[ -z "$why" ] || { echo "sanitize_gpu: $why" >&2; exit 1; }
for number in NEEDLE_JOBS NEEDLE_SANITIZE_SECONDS_MAX; do
  [[ "${!number:-1}" =~ ^[1-9][0-9]{0,5}$ ]] || { echo "sanitize_gpu: $number is '${!number}': give a whole number, 1 to 999999" >&2; exit 2; }
done
folder="$1" racecheck_folder="$2"
logs="${NEEDLE_SANITIZE_LOGS:-}"
if [ -z "$logs" ]; then
  logs="$(mktemp -d)"
  trap 'rm -rf "$logs"' EXIT
fi
export logs

run_share() {  # BINARY TEST TOOL SHARE SHARES
  local log="$logs/$2.$3.$4" begin=$SECONDS rc=0 tool_pid
  # In the background, as `timeout` leaves the terminal's process group: what interrupts this script ends the tools too.
  GTEST_TOTAL_SHARDS="$5" GTEST_SHARD_INDEX="$4" timeout -k 10 "$seconds_max" compute-sanitizer --tool "$3" "$1" --gtest_filter="$filter" \
    >"$log" 2>&1 &
  tool_pid=$!
  trap 'kill "$tool_pid"; exit 255' INT TERM
  wait "$tool_pid" || rc=$?
  echo "needle: exit code $rc, $((SECONDS - begin)) s" >>"$log"
}
export -f run_share

jobs() {  # racecheck, which takes longest, first
  local tool test binary cases shares share
  for tool in racecheck memcheck synccheck initcheck; do
    for test in "${tests[@]}"; do
      binary="$folder/${test}_cuda_test"
      [ $tool != racecheck ] || binary="$racecheck_folder/${test}_cuda_test"
      cases="$("$binary" --gtest_list_tests --gtest_filter="$filter" | grep -c '^  ')" || cases=0
      [ "$cases" -gt 0 ] || { echo "sanitize_gpu: $binary lists no case of $filter" >&2; exit 1; }
      shares=$cases
      [ $tool = racecheck ] || shares=$((cases < 4 ? cases : 4))
      for ((share = 0; share < shares; ++share)); do echo "$binary $test $tool $share $shares"; done
    done
  done
}
rm -f "$logs"/*.{memcheck,synccheck,initcheck,racecheck}.*  # of an earlier run
jobs >"$logs/jobs"
xargs -P "${NEEDLE_JOBS:-$(nproc)}" -L 1 bash -c 'run_share "$@"' run_share <"$logs/jobs"

failed=0
for tool in memcheck synccheck initcheck racecheck; do
  for test in "${tests[@]}"; do
    shares=0 clean=0 cases=0 longest=0
    for log in "$logs/$test.$tool".*; do
      shares=$((shares + 1))
      passed="$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$log")"
      seconds="$(sed -n 's/^needle: exit code [0-9]*, \([0-9]*\) s$/\1/p' "$log")"
      cases=$((cases + ${passed:-0}))
      [ "$seconds" -le "$longest" ] || longest=$seconds
      # A case that was skipped is none that is clean.
      if grep -q '^needle: exit code 0,' "$log" && ! grep -q '^\[  SKIPPED \]' "$log" && [ "${passed:-0}" -gt 0 ] &&
        grep -qE '^=+ (ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\))$' "$log"; then
        clean=$((clean + 1))
      else
        echo "$tool, share ${log##*.} of $test:"
        grep -E '^=|FAILED|Failure|^needle' "$log" | head -40
      fi
    done
    verdict=clean
    [ "$clean" -eq "$shares" ] && [ "$cases" -gt 0 ] || { verdict="NOT CLEAN: $((shares - clean)) of $shares processes"; failed=1; }
    printf '%-9s %-22s %3d cases passed, longest process %3d s: %s\n' "$tool" "${test}_cuda_test" "$cases" "$longest" "$verdict"
  done
done
exit $failed
