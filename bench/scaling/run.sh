#!/usr/bin/env bash
# How the exchange grows with workers and with server cores, on a machine of 16 cores or so. Builds nothing.
#
#   bench/scaling/run.sh PARAMILL [OUT] [PYTHON]
#
# PARAMILL  the program, as `cargo build --release` makes it
# OUT       folder for the JSON of every run and for table.md [bench/scaling/results]
# PYTHON    one with PyTorch, for the comparison with DDP on gloo [none: no comparison]
#
# ResNet-50 over loopback TCP, one server; workers 1, 2, 4, 8 x data cores 1, 2, 4, 8. The best number of cores for the most
# workers is then set against gloo. What takes too long is left out, and said.
#
# WORKERS, CORES   other numbers, as in WORKERS="1 2"
# ROUNDS, SECONDS_EACH  rounds of each run, and how long each is measured [2, 2]
# CONGESTION       TCP's congestion control, for everybody [the system's]
# MINUTES          how long all of it may take [8]

set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 3 ]; then
    sed -n '2,17p' "$0" | sed 's/^# \{0,1\}//' >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
paramill=$(realpath "$1")
out=${2:-$here/results}
python=${3:-}
workers=${WORKERS:-1 2 4 8}
cores=${CORES:-1 2 4 8}
rounds=${ROUNDS:-2}
seconds=${SECONDS_EACH:-2}
deadline=$((SECONDS + 60 * ${MINUTES:-8} - 10))

if [ ! -x "$paramill" ]; then
    echo "error: $paramill is no program; build it: cargo build --release" >&2
    exit 2
fi
mkdir -p "$out"
congestion=()
if [ -n "${CONGESTION:-}" ]; then
    congestion=(--congestion "$CONGESTION")
fi

# Runs a part of the sweep into a file, within the time that is left.
measure() {
    local file=$1
    shift
    local left=$((deadline - SECONDS))
    if [ "$left" -lt 5 ]; then
        echo "left out for want of time: $file" >&2
        return 0
    fi
    echo "$(date +%T) $file" >&2
    if ! timeout --kill-after=5 "$left" "$paramill" "$@" --json --quiet >"$out/$file.part"; then
        echo "failed: paramill $*" >&2
        rm -f "$out/$file.part"
        return 0
    fi
    mv "$out/$file.part" "$out/$file"
}

exchange() {
    bench_exchange=(bench exchange --model resnet50 --transport tcp --servers 1 --workers "$1" --cores "$2")
    bench_exchange+=(--rounds "$3" --seconds "$seconds" "${congestion[@]}")
}

{
    nproc
    uname -sr
    grep -m1 'model name' /proc/cpuinfo || true
    cat /proc/sys/net/ipv4/tcp_congestion_control
} >"$out/machine.txt"

for w in $workers; do
    for k in $cores; do
        exchange "$w" "$k" "$rounds"
        measure "exchange-w$w-k$k.json" "${bench_exchange[@]}"
    done
done

if [ -n "$python" ]; then
    most=$(printf '%s\n' $workers | sort -n | tail -1)
    best=$("$here/table.py" "$out" --best "$most")
    exchange "$most" "$best" 3
    measure "against-gloo-w$most-k$best.json" "${bench_exchange[@]}" --against gloo --python "$python"
fi

measure kernels.json bench kernels

"$here/table.py" "$out" | tee "$out/table.md"
