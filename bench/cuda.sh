#!/usr/bin/env bash
# From nothing to the table of bench/cuda.py, on a machine with a GPU that may have no network:
#
#   bench/cuda.sh prepare   where there is a network: wheels and llama.cpp's source, into a folder that travels
#   bench/cuda.sh build     the package and the stock programs with CUDA: 75 minutes of processor time for one
#                           architecture, about 6 on 16 cores; a build that was stopped goes on where it was.
#                           Parts: tools package peers
#   bench/cuda.sh run       parts: values sanitize table tests; and architectures, which takes longer than the others
#
# Without the name of a part all of them, architectures left out.
#
#   --device gpu|cpu        cpu (build, run): the same lines without CUDA, as CI runs them
#   --quick                 run: a small model, few tests, few pairs: does it still work? Less than a minute
#   --arch LIST             build: CUDA architectures, such as 90 or "80;90"; the GPU's own if left out
#   --save PATH             run: JSON lines of the table, a file or a folder (bench/results)
#   --python X.Y            prepare: the Python of the other machine (3.12)
#   --without "NAME ..."    prepare: packages that the other machine has, to keep the folder small
#
# The other machine needs Python with pip, g++, nvcc and cuBLAS (toolkit or wheels, see vendor/README.md); whatever Python is
# called there stands in KQVIEW_PYTHON. Folders: KQVIEW_CUDA_KIT (build/cuda-kit) travels, KQVIEW_CUDA_WORK (build/cuda)
# is where all else goes. One line a part with its seconds; logs stay in the work folder. Exit status 1: a part failed.
set -uo pipefail
exec </dev/null
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

kit=$(realpath -m "${KQVIEW_CUDA_KIT:-build/cuda-kit}")
work=$(realpath -m "${KQVIEW_CUDA_WORK:-build/cuda}")
python=${KQVIEW_PYTHON:-python3}
device=gpu quick=() arch='' save=bench/results target_python=3.12 without=''
parts=()
has_failed=0
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore CMAKE_GENERATOR=Ninja PYTHONUNBUFFERED=1

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 2; }

# part NAME COMMAND...: runs it into a log of its own and prints a line; 75 means that it cannot be run here.
part() {
    local name=$1 log=$work/$1.log start=$SECONDS status
    shift
    "$@" >"$log" 2>&1
    status=$?
    case $status in
        0) printf 'ok     %-10s %4d s  %s\n' "$name" $((SECONDS - start)) "$(tail -n 1 "$log")" ;;
        75) printf 'not run %-9s %4d s  %s\n' "$name" $((SECONDS - start)) "$(tail -n 1 "$log")" ;;
        *)
            printf 'FAIL   %-10s %4d s  exit status %d, the end of %s:\n' "$name" $((SECONDS - start)) $status "$log"
            tail -n 40 "$log" | sed 's/^/       | /'
            has_failed=1
            ;;
    esac
}

# ---- prepare

download_wheels() {
    "$python" - >"$work/requirements.txt" <<'PYTHON' || return 1
import tomllib
with open("pyproject.toml", "rb") as stream:
    content = tomllib.load(stream)
extras = content["project"]["optional-dependencies"]
wanted = [r for extra in ("cli", "chat", "constraints", "test") for r in extras[extra] if not r.startswith("kqview[")]
built = [r for r in content["build-system"]["requires"] if r != "pip"]
print(*content["project"]["dependencies"], *wanted, *built, "cmake>=3.26", "ninja", sep="\n")
PYTHON
    mkdir -p "$kit/wheels"
    # pip takes each of these literally: one for a newer system does not stand for the older ones.
    local platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64) n name
    for n in $(seq 5 35); do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
    "$python" -m pip download --quiet --dest "$kit/wheels" --requirement "$work/requirements.txt" \
        --only-binary=:all: --implementation cp --python-version "$target_python" "${platforms[@]}" || return 1
    for name in $without; do
        rm -f "$kit/wheels/${name//-/_}"-*.whl
    done
    echo "$(find "$kit/wheels" -name '*.whl' | wc -l) wheels"
}

pack_source() {
    local tree
    tree=$("$python" vendor/fetch.py --print-path) || return 1
    tar -C "$(dirname "$tree")" -czf "$kit/llama.cpp.tar.gz" "$(basename "$tree")" &&
        git describe --always --dirty --exclude='*' >"$kit/commit" &&
        du -sh "$kit" | sed 's/\t.*/ to carry/'
}

prepare() {
    part wheels download_wheels
    part source pack_source
}

# ---- build

# Everything that a part imports lies in one folder, before what the machine's own Python has.
use_site() {
    export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH} PATH=$work/site/bin:$PATH
    [ -d "$kit" ] || return 0
    export KQVIEW_CACHE_DIR=${KQVIEW_CACHE_DIR:-$work/cache}
    KQVIEW_BENCH_COMMIT=$(cat "$kit/commit")
    export KQVIEW_BENCH_COMMIT
}

install_tools() {
    if [ ! -d "$kit" ]; then
        echo "no $kit: the Python in use has what it needs, and pip may download"
        return
    fi
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$work/site" \
        "$kit"/wheels/*.whl &&
        mkdir -p "$KQVIEW_CACHE_DIR" && tar -C "$KQVIEW_CACHE_DIR" -xzf "$kit/llama.cpp.tar.gz" &&
        "$python" vendor/fetch.py --print-path
}

cuda_defines() {
    [ "$device" = gpu ] || return 0
    printf '%s\n' GGML_CUDA=ON ${arch:+"CMAKE_CUDA_ARCHITECTURES=$arch"}
}

build_package() {
    local options=() define
    while read -r define; do options+=(-C "cmake.define.$define"); done < <(cuda_defines)
    "$python" -m pip install -v --no-build-isolation --no-deps --no-compile --upgrade --target "$work/site" \
        -C build-dir="$work/package" ${options[@]+"${options[@]}"} . &&
        (cd "$work" && "$python" -c 'import kqview; print(*(d["name"] for d in kqview.system_info()["devices"]))')
}

build_peers() {
    local options=() define
    while read -r define; do options+=(--define "$define"); done < <(cuda_defines)
    "$python" bench/peers/build.py ${options[@]+"${options[@]}"} \
        kq-eval-rows llama-bench test-llama-archs rpc-server >"$work/peers" &&
        cat "$work/peers"
}

build() {
    use_site
    local name
    for name in "${parts[@]:-all}"; do
        case $name in
            all) part tools install_tools; part package build_package; part peers build_peers ;;
            tools) part tools install_tools ;;
            package) part package build_package ;;
            peers) part peers build_peers ;;
            *) usage ;;
        esac
    done
}

# ---- run

layers() { if [ "$device" = gpu ]; then echo -1; else echo 0; fi; }

find_device() {
    "$python" -m kqview info || return 1
    "$python" - "$device" <<'PYTHON'
import sys
import kqview
found = [d["description"] for d in kqview.system_info()["devices"] if d["type"] in ("GPU", "IGPU")]
print(*found or ["no GPU"], sep=", ")
sys.exit(sys.argv[1] == "gpu" and not found)
PYTHON
}

run_pytest() {
    KQVIEW_TEST_GPU_LAYERS=$(layers) timeout 480 "$python" -m pytest -q -p no:cacheprovider "$@"
}

run_values() { run_pytest tests/engine/test_device_values.py; }

# Those of 128 models of other architectures take longer than all the rest.
many_models=(tests/engine/test_architectures.py tests/engine/test_architectures_cache.py)

run_tests() {
    if [ ${#quick[@]} -gt 0 ]; then
        run_pytest tests/engine/test_system_info.py tests/engine/test_tap.py
    else
        run_pytest tests/engine "${many_models[@]/#/--ignore=}"
    fi
}

run_architectures() {
    [ ${#quick[@]} -eq 0 ] || { echo "not in a quick run"; return 75; }
    run_pytest "${many_models[@]}"
}

# sanitize TOOL: a short run under compute-sanitizer; what is not a GPU's runs without it.
sanitize() {
    local checker=()
    if [ "$device" = gpu ]; then
        command -v compute-sanitizer || { echo "no compute-sanitizer on the PATH"; return 75; }
        checker=(compute-sanitizer --tool "$1" --error-exitcode 99)
    fi
    timeout 300 ${checker[@]+"${checker[@]}"} "$python" bench/cuda_exercise.py --layers "$(layers)" --tokens 3
}

run_pinned() {
    [ "$device" = gpu ] || { echo "the host has no copy to measure"; return 75; }
    "$python" bench/pinned.py
}

run_table() {
    local options=(--device "$device" ${quick[@]+"${quick[@]}"})
    # One thread where others may use the machine: two would wait for each other.
    if [ ${#quick[@]} -gt 0 ]; then options+=(--threads 1); else options+=(--tokens 64 --save "$save"); fi
    timeout 580 "$python" bench/cuda.py "${options[@]}"
}

show_table() { sed -n '/ms: p10/,$p' "$work/table.log"; }

run() {
    [ ! -d "$work/site" ] || use_site
    [ ! -s "$work/peers" ] || { KQVIEW_PEERS_DIR=$(cat "$work/peers") && export KQVIEW_PEERS_DIR; }
    local name
    part device find_device
    [ $has_failed = 0 ] || return
    for name in "${parts[@]:-all}"; do
        case $name in
            all) part values run_values; part memcheck sanitize memcheck; part racecheck sanitize racecheck
                 part pinned run_pinned; part table run_table; part tests run_tests ;;
            values) part values run_values ;;
            tests) part tests run_tests ;;
            architectures) part architectures run_architectures ;;
            sanitize) part memcheck sanitize memcheck; part racecheck sanitize racecheck ;;
            table) part pinned run_pinned; part table run_table ;;
            *) usage ;;
        esac
    done
    [ ! -f "$work/table.log" ] || show_table
}

[ $# -gt 0 ] || usage
step=$1
shift
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=${2:?}; shift ;;
        --quick) quick=(--quick) ;;
        --arch) arch=${2:?}; shift ;;
        --save) save=${2:?}; shift ;;
        --python) target_python=${2:?}; shift ;;
        --without) without=${2?}; shift ;;
        tools | package | peers | values | tests | architectures | sanitize | table) parts+=("$1") ;;
        *) usage ;;
    esac
    shift
done
case $device in gpu | cpu) ;; *) usage ;; esac
mkdir -p "$work"
case $step in
    prepare) mkdir -p "$kit"; prepare ;;
    build) build ;;
    run) run ;;
    *) usage ;;
esac
echo "took $SECONDS s"
exit $has_failed
