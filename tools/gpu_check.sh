#!/usr/bin/env bash
# Everything that needs a GPU, in five parts of under nine minutes each. One table of all that is known comes last.
#
#     tools/gpu_check.sh [--part N] [--out FOLDER] [--wheels FOLDER] [--nccl FILE] [--device cpu]
#     tools/gpu_check.sh --minutes N [--items A,B] [--rehearse] [--out FOLDER] [--wheels FOLDER] [--nccl FILE]
#
# The second way runs what half an hour should decide (tools/gpu_half_hour.py), not the parts:
#   1  Transformer Engine's kernels, numbers against a CPU's, LLaVA against Transformers, windowed attention, the doctor
#   2  the other tests that need a GPU
#   3  Qwen2.5-VL against Transformers
#   4  LLaVA with and without each option: layers, FP8, recomputation, offload
#   5  parallel layouts against one process, over NCCL: on four GPUs, else all ranks on one
#
# Without --part, all. Results go into FOLDER (gpu-check) as .json, .xml, .log and steps.tsv, and stay there: each part
# adds its own, and one that is ended early leaves what it has. `tools/gpu_summary.py FOLDER` prints the table again.
# --wheels installs what the folder holds for this check alone, without a network: for machines that lack packages.
# --nccl preloads this libnccl.so.2 (or .so.2.xz): ranks that share a GPU need 2.30 or newer, and part 5 is skipped without.
# --device cpu rehearses on a CPU: toys are measured, tests are skipped with their reasons, a few layouts run on gloo.
# PYTHON chooses the interpreter, PYTHONPATH is kept. Exit status 1 if any step failed.
set -uo pipefail

out='' wheels='' nccl='' device=cuda part='' minutes='' items='' rehearse='' python=${PYTHON:-python3}
while [ $# -gt 0 ]; do
    case $1 in
        --part | --out | --wheels | --nccl | --device | --minutes | --items)
            declare "${1#--}=${2:?$1 expects a value}" && shift 2 ;;
        --rehearse) rehearse=$1 && shift ;;
        *) echo "gpu_check.sh: unknown option $1: see the head of this file" >&2 && exit 2 ;;
    esac
done
for name in out wheels nccl; do [ -z "${!name}" ] || declare "$name=$(realpath -m -- "${!name}")"; done
[[ $python != */* ]] || python=$(realpath -s -- "$python") # a link in a virtual environment stays one
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
[[ ${part:-1} =~ ^[1-5]$ ]] || { echo "gpu_check.sh: --part is 1, 2, 3, 4 or 5, not $part" >&2 && exit 2; }
if [ -n "$minutes" ]; then others=$part${device#cuda}; else others=$items$rehearse; fi # options of the other way
[ -z "$others" ] || { echo 'gpu_check.sh: --items and --rehearse need --minutes, which takes no --part or --device' >&2 && exit 2; }
[ -z "$nccl" ] || [ -f "$nccl" ] || { echo "gpu_check.sh: --nccl $nccl is no file: name a libnccl.so.2" >&2 && exit 2; }
if [[ $nccl = *.xz ]]; then
    unpacked=${TMPDIR:-/tmp}/megavlm-gpu-check-$(id -u)-libnccl.so.2
    "$python" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
        "$nccl" "$unpacked" || exit
    nccl=$unpacked
fi

site=
if [ -n "$wheels" ]; then # thousands of files: beside the few results, not among them
    site=${TMPDIR:-/tmp}/megavlm-gpu-check-$(id -u)
    if [ "$(cat "$site/wheels" 2>/dev/null)" != "$(ls "$wheels")" ]; then # else a call before this one installed them
        "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
            -c requirements/gpu.txt "$wheels"/*.whl || exit
        ls "$wheels" >"$site/wheels"
    fi
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

if [ -n "$minutes" ]; then
    exec "$python" tools/gpu_half_hour.py --minutes "$minutes" --spent "$SECONDS" ${items:+--items "$items"} ${nccl:+--nccl "$nccl"} \
        ${out:+--out "$out"} $rehearse
fi
out=$(realpath -m "${out:-gpu-check}") && mkdir -p "$out" || exit

size=(--rounds 2 --steps 5)
if [ "$device" = cpu ]; then
    export CUDA_VISIBLE_DEVICES=
    size=(--small --rounds 1 --steps 2 --warm-up 1)
fi
compile=(--their-compile)
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-n 4)

ending=(--kill-after=5)

# step NAME SECONDS COMMAND…: runs it under its own limit. Its words go into NAME.log, its status and seconds into
# steps.tsv; the line that says "running" stays there where nobody is left to say how it ended.
step() {
    local name=$1 limit=$2 began=$SECONDS status
    shift 2
    rm -f "$out/$name".{json,xml,log}
    echo "== $name"
    printf '%s\trunning\t0\t%s\n' "$name" "$limit" >>"$out/steps.tsv"
    timeout "${ending[@]}" "$limit" "$@" >"$out/$name.log" 2>&1 & # and wait: only so does bash hear a signal meanwhile
    child=$!
    wait "$child"
    status=$?
    printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - began))" "$limit" >>"$out/steps.tsv"
    tail -n 40 "$out/$name.log"
}

# skip NAME REASON: says why a step does not run, here and in steps.tsv.
skip() {
    rm -f "$out/$1".{json,xml,log}
    echo "== $1: skipped: $2"
    printf '%s\tskipped\t%s\t0\n' "$1" "$2" >>"$out/steps.tsv"
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
    step doctor 60 "$python" -m megavlm doctor --json "$out/doctor.json"
}
part_2() { tests tests 510 tests/gpu --ignore tests/gpu/test_smoke.py --ignore tests/gpu/test_numerics.py "${workers[@]}"; }
part_3() { benchmark qwen 510 --only Qwen2.5 --minutes 8 "${compile[@]}"; }
part_4() { benchmark ablation 510 --only LLaVA --ablate --minutes 8; }

# Asks the NCCL that is loaded for its version: torch.cuda.nccl.version() is what torch was compiled with.
devices_and_nccl='
import ctypes, torch
found = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
print(torch.cuda.device_count(), found.value)'

# Lets all ranks use the first GPU: under MPS if there is one; without it they take turns, and collectives are slow.
share_a_gpu() {
    export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
    mps=$(PATH=$PATH:/usr/local/nvidia/bin command -v nvidia-cuda-mps-control) || return 0
    export CUDA_MPS_PIPE_DIRECTORY=$scratch/pipe CUDA_MPS_LOG_DIRECTORY=$scratch/log
    mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    env -u LD_PRELOAD -u CUDA_VISIBLE_DEVICES "$mps" -d || mps= # the daemon would number devices anew for its clients
}

part_5() { # the last: what it exports is for nothing else
    local devices version name files=() ending=(--signal=INT --kill-after=20) # pytest then still prints its summary
    for name in parity experts context_parallel sharding gpu_defaults tensor_split resume lora fp8; do
        files+=("tests/dist/test_$name.py")
    done
    # These compare fp32, for which Transformer Engine would use TF32: where it cannot be loaded, layers are torch's.
    echo 'raise ImportError("hidden from these tests")' >"$scratch/transformer_engine.py"
    export PYTHONPATH=$scratch:$PYTHONPATH
    unset CUDA_DEVICE_MAX_CONNECTIONS # the tests' own runs leave it alone: streams of ZeRO-2 and 3 must overtake
    if [ "$device" = cpu ]; then
        files+=(-k 'dp2-no-image or tp2-etp1 or cp2-dp2 or bit_for_bit or 3-in-1 or stages_below or rounded_operands')
    else
        export LD_PRELOAD=$nccl${LD_PRELOAD:+:$LD_PRELOAD}
        read -r devices version <<<"$("$python" -c "$devices_and_nccl" 2>/dev/null)"
        if [ "${devices:-0}" = 0 ]; then
            skip layouts 'needs a CUDA device, and a torch with NCCL as a library of its own'
            return
        elif [ "$devices" -lt 4 ]; then
            if [ "$version" -lt 23000 ]; then
                skip layouts "ranks share a GPU from NCCL 2.30 (23000) on, this is $version: name a newer one with --nccl"
                return
            fi
            share_a_gpu
        fi
    fi
    tests layouts 510 -m 'not slow and not gpu' "${files[@]}"
}

finish() {
    [ -z "$mps" ] || echo quit | timeout 20 "$mps"
    rm -rf "$scratch"
    "$python" tools/gpu_summary.py "$out"
    exit "$?" # without a number it would be the status from before
}

child='' mps='' scratch=$(mktemp -d)
trap finish EXIT
trap 'kill "$child" 2>/dev/null; exit 1' TERM INT
for number in ${part:-1 2 3 4 5}; do "part_$number"; done
