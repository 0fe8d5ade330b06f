#!/usr/bin/env bash
# Everything that needs a GPU, in under nine minutes: the doctor, the tests marked `gpu`, the benchmark. One table comes last.
#
#     tools/gpu_check.sh [--out FOLDER] [--wheels FOLDER] [--device cpu]
#
# --wheels installs what the folder holds for this run alone, without a network: for machines that lack packages.
# --device cpu rehearses on a CPU: toys are measured, tests are skipped with their reasons.
# PYTHON chooses the interpreter, PYTHONPATH is kept. Exit status 1 if any part failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

out=gpu-check wheels='' device=cuda python=${PYTHON:-python3}
while [ $# -gt 0 ]; do
    case $1 in
        --out | --wheels | --device) declare "${1#--}=${2:?$1 expects a value}" && shift 2 ;;
        *) echo "gpu_check.sh: unknown option $1: see the head of this file" >&2 && exit 2 ;;
    esac
done
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit
rm -f "$out"/*.json "$out"/*.xml "$out"/*.log "$out"/parts.tsv

site=
if [ -n "$wheels" ]; then
    site=$out/site:
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$out/site" \
        "$wheels"/*.whl || exit
fi
export PYTHONPATH=$site$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 NVTE_FRAMEWORK=pytorch
# Where Transformer Engine finds CUDA's headers for kernels that it compiles when it first needs them.
[ -n "${CUDA_HOME:-}" ] && export NVTE_CUDA_INCLUDE_DIR="${NVTE_CUDA_INCLUDE_DIR:-$CUDA_HOME/include}"
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
size=(--rounds 1 --steps 6)
if [ "$device" = cpu ]; then
    export CUDA_VISIBLE_DEVICES=
    size=(--small --rounds 1 --steps 2 --warm-up 1)
fi

# part NAME SECONDS COMMAND…: runs it under its own limit; its status and seconds go into parts.tsv, its words into a log.
part() {
    local name=$1 limit=$2 began=$SECONDS status
    shift 2
    echo "== $name"
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - began))" "$limit" >>"$out/parts.tsv"
    tail -n 40 "$out/$name.log"
}

part doctor 60 "$python" tools/doctor.py --json "$out/doctor.json"
part tests 220 "$python" -m pytest -m gpu tests/gpu -q -rfEs --tb=short --show-capture=no -p no:cacheprovider \
    --junitxml="$out/tests.xml"
part benchmark 230 "$python" benchmarks/gpu_vlm.py --device "$device" --minutes 3 --out "$out/benchmark.json" "${size[@]}"
"$python" tools/gpu_summary.py "$out"
