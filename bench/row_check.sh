#!/usr/bin/env bash
# Builds bench/row_check.cu for this machine's GPU and runs it:
#
#   bash bench/row_check.sh [--quick] [--time] [--only WORD] [--seed N]
#   bash bench/row_check.sh --sanitize      memcheck and racecheck over --quick (compute-sanitizer)
#   bash bench/row_check.sh --build         builds it, no more
#
# The program is put into KQVIEW_CUDA_WORK (build/cuda) and is built again when a source is newer.
# KQVIEW_CUDA_ARCH: another architecture than the GPU's own, such as 90. Exit status 1: a value is
# wrong, or a tool found something.
set -euo pipefail
cd "$(dirname "$0")/.."

work=${KQVIEW_CUDA_WORK:-build/cuda}
program=$work/row_check
arch=${KQVIEW_CUDA_ARCH:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d '. ')}
mkdir -p "$work"

build() { # program, options
    local to=$1 source
    shift
    local sources=(cpp/tap/device/cuda/rows.cu bench/row_check.cu)
    local -a all=("${sources[@]}" cpp/tap/device/cuda/rows.h cpp/tap/device/row_step.h bench/row_check.sh)
    local is_new=1
    for source in "${all[@]}"; do
        [[ $to -nt $source ]] || is_new=0
    done
    [[ $is_new = 1 && $(cat "$to.arch" 2>/dev/null) = "$arch" ]] && return
    local start=$SECONDS pids=() pid
    for source in "${sources[@]}"; do
        nvcc -O3 -std=c++20 -lineinfo "$@" -I cpp -gencode="arch=compute_$arch,code=sm_$arch" \
            -c "$source" -o "$to.$(basename "$source" .cu).o" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid"; done
    nvcc -gencode="arch=compute_$arch,code=sm_$arch" "$to.rows.o" "$to.row_check.o" -o "$to"
    echo "$arch" >"$to.arch"
    echo "built for sm_$arch: $((SECONDS - start)) s"
}

build "$program"
case ${1:-} in
--build) ;;
--sanitize)
    shift
    tool=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    if [[ ! -x $tool ]]; then
        echo "no compute-sanitizer here: nothing was checked"
        exit 0
    fi
    for one in memcheck racecheck; do
        echo "$one:"
        "$tool" --tool "$one" --error-exitcode 1 --print-limit 10 "$program" --quick "$@"
    done
    ;;
*) "$program" "$@" ;;
esac
