#!/bin/bash
# Check and measure a commit on a GPU: bash all.sh [suite] [large] [check] [times] [tune] [peers]
#
# From the repository's root, with the package and pytest-xdist installed. Without arguments all parts run in this order.
# On an H200 with 16 cores they take 10 (suite), 10 (large: the slow tests), 3, 4, 2 and 3 minutes. A failure in one part
# does not stop the others.

scripts=$(dirname "$0")
tests=tests/backends

part() {
    echo "== $1"
    case $1 in
    suite) OMP_NUM_THREADS=1 python3 -m pytest -q -n 15 --dist worksteal ;;
    large) OMP_NUM_THREADS=1 python3 -m pytest -q -n 15 --dist worksteal -m slow $tests/test_triton.py $tests/test_triton_gpu.py ;;
    check) python3 "$scripts/check.py" ;;
    times)
        python3 "$scripts/perf.py"
        python3 "$scripts/layer.py"
        python3 "$scripts/decode.py" "16 x" "16/32"
        ;;
    tune) deltazoo tune --shape decode_64 --shape decode_1 --shape dense_1x2048 \
        --shape "B=8 T=2048 H=8 K=256 V=256" --budget 90 --out "${TUNED:-tuned.json}" ;;
    peers) python3 "$scripts/peers.py" "${PEERS:-peers.json}" pd1 triton,flash_qla,fla ;;
    *) echo "a part must be suite, large, check, times, tune or peers, got $1" ;;
    esac
}

[ $# -gt 0 ] || set -- suite large check times tune peers
for name in "$@"; do
    part "$name"
done
