#!/usr/bin/env bash
# Everything that needs a GPU, in four parts of under nine minutes each. One table of all that is known comes last.
#
#     tools/gpu_check.sh [--part N] [--out FOLDER] [--wheels FOLDER] [--device cpu]
#
#   1  Transformer Engine's kernels, numbers against a CPU's, LLaVA against Transformers, windowed attention, the doctor
#   2  the other tests that need a GPU
#   3  Qwen2.5-VL against Transformers
#   4  LLaVA with and without each option: layers, FP8, recomputation, offload, CUDA graphs
#
# Without --part, all. Results go into FOLDER (gpu-check) as .json, .xml, .log and steps.tsv, and stay there: each part
# adds its own, and one that is ended early leaves what it has. `tools/gpu_summary.py FOLDER` prints the table again.
# --wheels installs what the folder holds for this check alone, without a network: for machines that lack packages.
# --device cpu rehearses on a CPU: toys are measured, tests are skipped with their reasons.
# PYTHON chooses the interpreter, PYTHONPATH is kept. Exit status 1 if any step failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

out=gpu-check wheels='' device=cuda part='' python=${PYTHON:-python3}
while [ $# -gt 0 ]; do
    case $1 in
        --part | --out | --wheels | --device) declare "${1#--}=${2:?$1 expects a value}" && shift 2 ;;
        *) echo "gpu_check.sh: unknown option $1: see the head of this file" >&2 && exit 2 ;;
    esac
done
[[ ${part:-1} =~ ^[1-4]$ ]] || { echo "gpu_check.sh: --part is 1, 2, 3 or 4, not $part" >&2 && exit 2; }
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit

site=
if [ -n "$wheels" ]; then # thousands of files: beside the few results, not among them
    site=${TMPDIR:-/tmp}/megavlm-gpu-check-$(id -u)
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
        -c requirements/gpu.txt "$wheels"/*.whl || exit
    site=$site:
fi
export PYTHONPATH=$site$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 NVTE_FRAMEWORK=pytorch
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# CUDA's headers, for kernels that Transformer Engine compiles when it first needs them; without them it must not try.
if [ -z "${NVTE_CUDA_INCLUDE_DIR:-}" ]; then
    nvcc=$(command -v nvcc) && nvcc=$(readlink -f "$nvcc")
    cuda=${CUDA_HOME:-$(dirname "$(dirname "${nvcc:-/none/bin/nvcc}")")}
    if [ -f "$cuda/include/cuda_runtime.h" ]; then export NVTE_CUDA_INCLUDE_DIR=$cuda/include; else export NVTE_DISABLE_NVRTC=1; fi
fi

size=(--rounds 2 --steps 5)
if [ "$device" = cpu ]; then
    export CUDA_VISIBLE_DEVICES=
    size=(--small --rounds 1 --steps 2 --warm-up 1)
fi
compile=(--their-compile)
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-n 4)

# step NAME SECONDS COMMAND…: runs it under its own limit. Its words go into NAME.log, its status and seconds into
# steps.tsv; the line that says "running" stays there where nobody is left to say how it ended.
step() {
    local name=$1 limit=$2 began=$SECONDS status
    shift 2
    rm -f "$out/$name".{json,xml,log}
    echo "== $name"
    printf '%s\trunning\t0\t%s\n' "$name" "$limit" >>"$out/steps.tsv"
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1 & # and wait: only so does bash hear a signal meanwhile
    child=$!
    wait "$child"
    status=$?
    printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - began))" "$limit" >>"$out/steps.tsv"
    tail -n 40 "$out/$name.log"
}

tests() {
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$python" -m pytest -m gpu -v -rfEs --tb=short --show-capture=no -p no:cacheprovider \
        --junitxml="$out/$name.xml" "$@"
}

benchmark() {
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$python" benchmarks/gpu_vlm.py --device "$device" --out "$out/$name.json" "${size[@]}" "$@"
}

part_1() {
    tests numerics 130 tests/gpu/test_smoke.py tests/gpu/test_numerics.py
    benchmark llava 270 --only LLaVA --minutes 3.6 "${compile[@]}"
    step windows 50 "$python" benchmarks/attention_windows.py --device "$device" --out "$out/windows.json"
    step doctor 60 "$python" tools/doctor.py --json "$out/doctor.json"
}
part_2() { tests tests 510 tests/gpu --ignore tests/gpu/test_smoke.py --ignore tests/gpu/test_numerics.py "${workers[@]}"; }
part_3() { benchmark qwen 510 --only Qwen --minutes 8 "${compile[@]}"; }
part_4() { benchmark ablation 510 --only LLaVA --ablate --minutes 8; }

child=
trap '"$python" tools/gpu_summary.py "$out"; exit' EXIT
trap 'kill "$child" 2>/dev/null; exit 1' TERM INT
for number in ${part:-1 2 3 4}; do "part_$number"; done
