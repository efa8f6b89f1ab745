#!/bin/sh
# Compare the speed of two checkouts on one GPU, in turns: sh compare.sh OLD NEW [OUT]; each is a folder with the package.
# Prints the tables of perf.py, step_kernels.py and host.py of both, three times each.
set -e
old=$1 new=$2 out=${3:-/tmp/compare}
mkdir -p "$out"
for turn in 1 2 3; do
    for side in old new; do
        eval "folder=\$$side"
        links="$out/$side/import"
        mkdir -p "$links"
        ln -sfn "$(realpath "$folder")" "$links/deltazoo"
        cd "$folder/tests/bench/gpu"
        export PYTHONPATH="$links"
        python perf.py > "$out/$side.perf.$turn"
        python perf.py specs > "$out/$side.specs.$turn"
        python step_kernels.py dpgxecaDA1302 > "$out/$side.kernels.$turn"
        python host.py > "$out/$side.host.$turn"
        cd - > /dev/null
    done
done
for table in perf specs kernels host; do
    for turn in 1 2 3; do
        echo "== $table, turn $turn: old, new"
        diff --side-by-side --width=200 "$out/old.$table.$turn" "$out/new.$table.$turn" || true
    done
done
