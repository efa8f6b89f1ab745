#!/bin/sh
# Measure context parallelism on 2 or 4 GPUs of one host in about 6 minutes: tests/bench/gpu/context.sh OUT_FOLDER
# First compiles the kernels, on a part of a rank's work per GPU, then runs context.py on all GPUs.
set -eu
out=$1
script=$(dirname "$0")/context.py
gpus=$(nvidia-smi --list-gpus | wc -l)
updates=gdn_32768,gdn_131072,gdn_pack,kda_131072,mamba2_131072,rwkv7_131072
models=gated-deltanet-1.3b,gated-deltanet-h1-1.3b
export NCCL_NVLS_ENABLE=0
mkdir -p "$out"
i=0
for part in "--updates gdn_32768,gdn_131072,gdn_pack" "--updates kda_131072,mamba2_131072,rwkv7_131072" \
    "--steps $models" "--fla gdn_32768"; do
    CUDA_VISIBLE_DEVICES=$((i % gpus)) python "$script" "$out/alone_$i.json" $part --alone "$gpus" >"$out/alone_$i.txt" 2>&1 &
    i=$((i + 1))
done
wait
run() { # NAME SECONDS ARGUMENTS
    name=$1 seconds=$2
    shift 2
    timeout "$seconds" torchrun --nproc-per-node "$gpus" "$script" "$out/$name.json" "$@" >"$out/$name.txt" 2>&1 ||
        echo "$name: exit code $?" >>"$out/$name.txt"
    grep -h '^{\|exit code' "$out/$name.txt"
}
run updates 120 --updates "$updates"
run steps 180 --steps "$models"
run longest 120 --longest gated-deltanet-1.3b 524288
[ "$gpus" -lt 4 ] || run pairs 120 --updates "$updates" --pairs
run fla 60 --fla gdn_32768,gdn_131072
