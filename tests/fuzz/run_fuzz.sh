#!/usr/bin/env bash
# run_fuzz.sh BINARY COUNTS: runs a fuzz target for as long as the table of counts says (column `accept` under
# NEEDLE_ACCEPT=1), from its seeds (seeds/NAME, if it has any) and a corpus in a folder of its own. A finding's input is
# left there and named.
set -euo pipefail
binary="$1"
counts="$2"
column=2
[ "${NEEDLE_ACCEPT:-0}" = 1 ] && column=3
seconds="$(awk -v column="$column" '$1 == "fuzz_seconds" {print $column}' "$counts")"
[ -n "$seconds" ] || { echo "run_fuzz: $counts has no row fuzz_seconds" >&2; exit 1; }
folder="$(mktemp -d "${TMPDIR:-/tmp}/needle-fuzz.XXXXXX")"
seeds="$(dirname "$0")/seeds/$(basename "$binary" .bin)"
[ -d "$seeds" ] || seeds=""
if "$binary" -max_total_time="$seconds" -max_len=16384 -len_control=0 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$folder/" "$folder" ${seeds:+"$seeds"}; then
  rm -rf "$folder"
else
  echo "run_fuzz: the input that failed is in $folder" >&2
  exit 1
fi
