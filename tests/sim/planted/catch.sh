#!/usr/bin/env bash
# catch.sh SOURCE_DIR PATCH CXX MAIN_OBJECT CORE_ARCHIVE SIM_ARCHIVE TRANSPORT_ARCHIVE
# Applies one planted fault to a copy of the sources, compiles what it changed in front of the unchanged archives, and runs
# the simulator. Passes when the simulator finds a violation (or a check stops it) within the seeds of tests/counts.txt.
set -euo pipefail
source_dir=$1 patch=$2 cxx=$3 main=$4 core=$5 sim=$6 transport=$7
column=2; [ "${NEEDLE_ACCEPT:-0}" = 1 ] && column=3
seeds=$(awk -v c=$column '$1 == "planted_seeds" {print $c}' "$source_dir/tests/counts.txt")
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
(cd "$source_dir" && cp -r --parents base proto/errors.h server/*.h server/*.cc server/pool server/catalog server/journeys \
  server/transport/transport.h "$work")
(cd "$work" && patch -p1 --quiet --fuzz=0 <"$patch")
objects=()
for changed in $(sed -n 's|^+++ b/||p' "$patch"); do
  case $changed in *.cc) ;; *) echo "$patch changes $changed: planted faults change .cc files alone"; exit 1 ;; esac
  objects+=("$work/$(basename "$changed").o")
  "$cxx" -std=c++20 -O1 -I"$work" -c "$work/$changed" -o "${objects[-1]}"
done
# shellcheck disable=SC2046
"$cxx" -o "$work/needle_sim" "$main" "${objects[@]}" "$sim" "$transport" "$core" \
  $(pkg-config --libs absl_status absl_statusor absl_cord absl_flat_hash_map absl_btree absl_any_invocable) -lpthread
if "$work/needle_sim" --seeds "1..$seeds" --lines 12 >"$work/log" 2>&1; then
  echo "$(basename "$patch"): not caught in $seeds seeds"; tail -1 "$work/log"; exit 1
fi
echo "$(basename "$patch"): caught"; tail -20 "$work/log"
grep -qE 'violates an invariant|a check failed|needle: bug' "$work/log"  # and not by anything else
