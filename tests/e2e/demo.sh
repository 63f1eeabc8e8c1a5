#!/usr/bin/env bash
# ./dev demo [--quick] [--keep] [--no-build] [--sabotage WHAT]
# Builds, starts a prefill and a decode daemon on loopback, and runs the whole journey on real vectors (demo.cc).
#   --quick      fewer cells and questions: under 40 s after the build
#   --keep       leaves the daemons up, and says how to stop them
#   --no-build   runs what lies in build/ already
#   --sabotage   flight | pool | table: shows that the checks bite (exit status 3)
set -euo pipefail
cd "$(dirname "$0")/../.."

quick=() keep= build=1 sabotage=()
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=(--quick) ;;
    --keep) keep=1 ;;
    --no-build) build= ;;
    --sabotage) [ $# -gt 1 ] || { echo "demo: --sabotage wants flight, pool or table" >&2; exit 2; }
      sabotage=(--sabotage "$2"); shift ;;
    *) echo "demo: unknown argument $1; see the head of tests/e2e/demo.sh" >&2; exit 2 ;;
  esac
  shift
done

if [ -n "$build" ]; then
  cmake --preset dev >/dev/null
  cmake --build build -j "${NEEDLE_JOBS:-$(nproc)}" --target needled needlectl needle_demo
fi
for binary in server/needled client/ctl/needlectl tests/e2e/needle_demo; do
  [ -x "build/$binary" ] || { echo "demo: build/$binary is missing; run without --no-build" >&2; exit 2; }
done

work="$(mktemp -d /tmp/needle-demo.XXXXXX)"
pids=()
stop_daemons() {
  [ "${#pids[@]}" -eq 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true
  [ "${#pids[@]}" -eq 0 ] || wait "${pids[@]}" 2>/dev/null || true
  rm -rf "$work"
}
[ -n "$keep" ] || trap stop_daemons EXIT

# Ports that nothing listens on now: a demo must not meet another one.
free_ports() {
  local port=17420 found=()
  while [ "${#found[@]}" -lt 4 ]; do
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || found+=("$port")
    port=$((port + 1))
  done
  echo "${found[@]}"
}
read -r grpc_prefill metrics_prefill grpc_decode metrics_decode <<<"$(free_ports)"

start_daemon() { # name, grpc port, metrics port, peer name, peer port
  mkdir -p "$work/$1"
  ./build/server/needled --config tests/e2e/demo.toml --node-name "$1" --node-runtime-dir "$work/$1" \
    --listen-grpc "127.0.0.1:$2" --listen-metrics "127.0.0.1:$3" --peer "$4=127.0.0.1:$5" \
    >"$work/$1/log" 2>&1 &
  pids+=("$!")
}
start_daemon prefill "$grpc_prefill" "$metrics_prefill" decode "$grpc_decode"
start_daemon decode "$grpc_decode" "$metrics_decode" prefill "$grpc_prefill"

wait_for_daemons() {
  local tries name
  for name in prefill decode; do
    for ((tries = 0; tries < 200; ++tries)); do
      ./build/client/ctl/needlectl --socket "$work/$name/grpc.sock" peers --json 2>/dev/null | grep -q '"up"' && break
      kill -0 "${pids[@]}" 2>/dev/null || break 2
      read -rt 0.1 <> <(:) || true
    done
  done
}
wait_for_daemons
for pid in "${pids[@]}"; do
  kill -0 "$pid" 2>/dev/null || { echo "demo: a daemon did not start:" >&2; tail -n 20 "$work"/*/log >&2; exit 1; }
done

status=0
./build/tests/e2e/needle_demo --prefill "$work/prefill/attach.sock" --decode "$work/decode/attach.sock" \
  --prefill-name prefill "${quick[@]}" "${sabotage[@]}" || status=$?
[ "$status" -eq 0 ] || [ "${#sabotage[@]}" -gt 0 ] || tail -n 5 "$work"/*/log >&2

echo "metrics: http://127.0.0.1:$metrics_prefill/metrics (prefill), http://127.0.0.1:$metrics_decode/metrics (decode)"
if [ -n "$keep" ]; then
  echo "the daemons stay up; try: ./build/client/ctl/needlectl --socket $work/decode/grpc.sock status"
  echo "stop them with: kill ${pids[*]}"
else
  echo "try next: ./dev demo --no-build --keep, then ./build/client/ctl/needlectl --help"
fi
exit "$status"
