#!/usr/bin/env bash
# The ship's data path as a share of the bare UCX loop, in one run: the two programs in turn, same call, page size, memfd
# footprint, rotation and UCX settings; medians of the repeats, since single runs differ by half on a virtual machine.
#
#   tests/bench/ship_beside_loop.sh FOLDER_OF_BENCHES [REPEATS]      default 7
set -euo pipefail
cd "$1"
repeats="${2:-7}"
export UCX_NET_DEVICES=lo UCX_RNDV_SCHEME=get_zcopy UCX_WARN_UNUSED_ENV_VARS=n
lines="$(mktemp)"
trap 'rm -f "$lines"' EXIT
median() { sort -n | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }

compare() { # name, UCX_TLS, call, share wanted in percent
  : >"$lines"
  for _ in $(seq "$repeats"); do
    UCX_TLS="$2" ./ucx_loop_bench --call="$3" --rounds=2 | sed 's/^/loop /' | tee -a "$lines"
    ./ucx_ship_bench --transports="$2" --call="$3" --rounds=2 2>/dev/null | tee -a "$lines"
  done
  local loop ship
  loop="$(grep '^loop' "$lines" | sed 's/.*gb_per_s=\([0-9.]*\).*/\1/' | median)"
  ship="$(grep ' ship ' "$lines" | sed 's/.*gb_per_s=\([0-9.]*\).*/\1/' | median)"
  awk -v l="$loop" -v s="$ship" -v n="$1" -v w="$4" \
    'BEGIN {printf "== %s: median ship %.2f GB/s (checksums on) of median loop %.2f GB/s: %.0f %%, wanted %d %%\n", n, s, l, 100 * s / l, w}'
}

perftest() { # name, UCX_TLS, port
  UCX_TLS="$2" taskset -c 1 ucx_perftest -p "$3" >/dev/null 2>&1 &
  local server=$!
  sleep 0.7
  UCX_TLS="$2" taskset -c 0 ucx_perftest -p "$3" 127.0.0.1 -t ucp_am_bw -s 1165824 -n 1500 -w 100 -f |
    awk -v n="$1" '$1 == 1500 {printf "ucx_perftest %s, ucp_am_bw of 1,165,824 B: %s MB/s (cache-warm: one buffer)\n", n, $5}'
  wait "$server" || true
}

compare "TCP, am-rendezvous" tcp am-rendezvous 80
compare "shared memory, am-eager" posix,sysv,tcp am-eager 60
if command -v ucx_perftest >/dev/null; then
  perftest TCP tcp 13377
  perftest "shared memory" posix,sysv,tcp 13477
fi
