#!/usr/bin/env bash
# What an idle daemon costs: processor time over a while, and memory beyond its pools. Two daemons that know each other (so
# that hellos and pings go on), with the default pools; the first is measured.
#
#   tests/bench/idle_daemon.sh NEEDLED [SECONDS]      default 30
set -euo pipefail
needled="$1"
seconds="${2:-30}"
folder="$(mktemp -d)"
pids=()
cleanup() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  rm -rf "$folder"
}
trap cleanup EXIT

for i in 0 1; do
  "$needled" --instance "$((50 + i))" --node-name "idle-$i" --node-runtime-dir "$folder/$i" \
    --peer "idle-$((1 - i))=127.0.0.1:$((7420 + 2 * (51 - i)))" >"$folder/$i.log" 2>&1 &
  pids+=($!)
done
for i in 0 1; do
  for _ in $(seq 300); do grep -q event=peer_met "$folder/$i.log" && break; sleep 0.1; done
  grep -q event=peer_met "$folder/$i.log"
done
sleep 3
pid="${pids[0]}"
ticks() { sed 's/.*) //' "/proc/$pid/stat" | awk '{print $12 + $13}'; }
switches() { cat "/proc/$pid"/task/*/status | awk '/^voluntary_ctxt_switches/ {n += $2} END {print n}'; }
before="$(ticks)"
woken="$(switches)"
sleep "$seconds"
after="$(ticks)"
awk -v t="$((after - before))" -v hz="$(getconf CLK_TCK)" -v s="$seconds" -v w="$(($(switches) - woken))" \
  'BEGIN {printf "processor: %.2f s in %d s, %.2f %% of a core; %.0f wake-ups a second\n", t / hz, s, 100 * t / hz / s, w / s}'
awk '/^[0-9a-f]+-[0-9a-f]+ / {name = $6; pool = name ~ /memfd:.*(chunk|pool)/}
     /^Rss:/ {if (pool) pools += $2; else {other += $2; by[name == "" ? "[anonymous]" : name] += $2}}
     END {printf "memory: %.1f MiB resident in pool chunks, %.1f MiB beyond them; of that the largest:\n", pools / 1024, other / 1024
          for (n in by) if (by[n] > 1024) printf "  %8.1f MiB %s\n", by[n] / 1024, n}' "/proc/$pid/smaps" | { read -r first; echo "$first"; sort -rn; }
echo "smaps_rollup:" && grep -E '^(Rss|Pss|Pss_Anon|Pss_File|Pss_Shmem|Private_Dirty)' "/proc/$pid/smaps_rollup"
