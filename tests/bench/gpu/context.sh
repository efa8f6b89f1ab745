#!/bin/sh
# Measure context parallelism on 2 or 4 GPUs of one host in about 5 minutes: tests/bench/gpu/context.sh OUT_FOLDER
# First compiles the kernels, one work per GPU, then runs context.py on all GPUs: updates, FLA's, and steps of models.
set -eu
out=$1
script=$(dirname "$0")/context.py
gpus=$(nvidia-smi --list-gpus | wc -l)
export NCCL_NVLS_ENABLE=0
mkdir -p "$out"
i=0
for works in gdn_131072,gdn_32768 kda_131072 mamba2_131072,gdn_pack rwkv7_131072; do
    CUDA_VISIBLE_DEVICES=$((i % gpus)) python "$script" "$out/model_$i.json" "$works" --model "$gpus" >"$out/model_$i.txt" 2>&1 &
    i=$((i + 1))
done
wait
torchrun --nproc-per-node "$gpus" "$script" "$out/updates.json" | tee "$out/updates.txt"
torchrun --nproc-per-node "$gpus" "$script" "$out/steps.json" gated-deltanet-1.3b,gated-deltanet-h1-1.3b --step |
    tee "$out/steps.txt"
