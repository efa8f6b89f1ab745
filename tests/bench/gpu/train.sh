#!/bin/bash
# Measure `deltazoo train` on all GPUs of this host in less than 4 minutes: bash train.sh [seconds] [gpus] [parts]
#
# From the repository's root, with the package importable. See train.py for the rows and their parts.
export OUT="${OUT:-build/train}"
exec timeout "$((${1:-230} + 8))" python3 "$(dirname "$0")/train.py" "${1:-230}" ${2:+"$2"} ${3:+"$3"}
