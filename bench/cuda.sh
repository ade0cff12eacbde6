#!/usr/bin/env bash
# From nothing to the table of bench/cuda.py, on a machine with a GPU that may have no network:
#
#   bench/cuda.sh prepare   where there is a network: wheels and llama.cpp's source, into a folder that travels.
#                           Parts: wheels source size
#   bench/cuda.sh build     the package and the stock programs with CUDA: 75 minutes of processor time for one
#                           architecture, about 6 on 16 cores; a build that was stopped goes on where it was.
#                           Parts: tools package peers
#   bench/cuda.sh run       parts: values sanitize table tests; and architectures, which takes longer than the others
#
# Without the name of a part all of them, architectures left out; else the named ones, in their order.
#
#   --device gpu|cpu        cpu (build, run): the same lines without CUDA, as CI runs them
#   --quick                 run: a small model, few tests, few pairs: does it still work? Less than a minute
#   --row NAME              run table: this row only, or those of a pattern; may be repeated
#   --limit SECONDS         build, run: ends in time for a machine that ends commands after a while; what is
#                           finished by then is kept, and the parts that were cut off are named
#   --arch LIST             build: CUDA architectures, such as 90 or "80;90"; the GPU's own if left out
#   --package WHEEL         build: installs this wheel of the package instead of building one
#   --save PATH             run: JSON lines of the table, a file or a folder ($OUT/cuda.jsonl, else bench/results)
#   --python X.Y            prepare: the Python of the other machine (3.12)
#   --without "NAME ..."    prepare: packages that the other machine has ("cmake numpy")
#   --fit MIB               prepare: what may travel, the checkout without ignored files counted in (64; 0 is any size)
#
# The other machine needs Python with pip, g++, nvcc and cuBLAS (toolkit or wheels, see vendor/README.md); whatever Python is
# called there stands in KQVIEW_PYTHON. Folders: KQVIEW_CUDA_KIT (build/cuda-kit) travels, KQVIEW_CUDA_WORK (build/cuda)
# is where all else goes. One line a part with its seconds; logs stay in the work folder. Exit status 1: a part failed or
# was cut off. If OUT is set, that folder gets what is worth bringing back, as it comes: cuda.jsonl (the rows of this and
# of earlier runs), table.txt, printed.txt and logs.tar.gz.
#
# A plan for a machine that is lent for 45 minutes, 10 a command, with 64 MiB carried; minutes are for 16 cores and a GPU
# that decodes a token of the model in 7 ms:
#
#   bench/cuda.sh build --arch 90 --limit 570                                                             6
#   bench/cuda.sh run values table sanitize --row 'device-rows-*' --limit 570                             9
#   bench/cuda.sh run table --row 'cuda-*k-1-*' --row cuda-copy --row cuda-step-to-view --limit 570       5
#   bench/cuda.sh run table --row 'cuda-*k-8-*' --limit 570                                               8
#   bench/cuda.sh run table --row '*-llama-bench' --row '*-callback-*' --row '*-hf-*' --limit 570         8
#
# The second one says where rows should be computed. In what is left of the time: run tests.
set -uo pipefail
exec </dev/null
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

kit=$(realpath -m "${KQVIEW_CUDA_KIT:-build/cuda-kit}")
work=$(realpath -m "${KQVIEW_CUDA_WORK:-build/cuda}")
python=${KQVIEW_PYTHON:-python3}
device=gpu quick=() rows=() arch='' package='' save='' limit=0
target_python=3.12 without='cmake numpy' fit=64
parts=()
has_failed=0
# What each step can do; architectures only by name.
prepare_parts=(wheels source size)
build_parts=(tools package peers)
run_parts=(values sanitize table tests)
sources=(cpp src/kqview vendor CMakeLists.txt pyproject.toml)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore CMAKE_GENERATOR=Ninja PYTHONUNBUFFERED=1

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 2; }
refuse() { echo "cuda.sh: $*" >&2; exit 2; }

# line FORMAT ARGUMENT...: prints it, into what is brought back as well.
# shellcheck disable=SC2059 # the format is ours
line() { printf "$@" | tee -a "$work/printed.txt"; }

# part NAME COMMAND...: runs it into a log of its own and prints a line; 75 means that it cannot be run here.
part() {
    local name=$1 log=$work/$1.log start=$SECONDS status
    shift
    if [ "$limit" -gt 0 ] && [ "$SECONDS" -ge "$limit" ]; then
        line 'left out %-9s: the limit of %d s is reached\n' "$name" "$limit"
        has_failed=1
        return
    fi
    "$@" >"$log" 2>&1
    status=$?
    case $status in
        0) line 'ok     %-10s %4d s  %s\n' "$name" $((SECONDS - start)) "$(tail -n 1 "$log")" ;;
        75) line 'not run %-9s %4d s  %s\n' "$name" $((SECONDS - start)) "$(tail -n 1 "$log")" ;;
        124 | 137)
            line 'cut off %-9s %4d s  what is finished is kept; %s\n' "$name" $((SECONDS - start)) "$(tail -n 1 "$log")"
            has_failed=1
            ;;
        *)
            line 'FAIL   %-10s %4d s  exit status %d, the end of %s:\n' "$name" $((SECONDS - start)) $status "$log"
            line '%s\n' "$(tail -n 40 "$log" | sed 's/^/       | /')"
            has_failed=1
            ;;
    esac
    bring_back
}

# within SECONDS COMMAND...: ends it after SECONDS, or sooner when the time of all parts is over; 0: no time of its own.
within() {
    local most=$1 left
    shift
    if [ "$limit" -gt 0 ]; then
        left=$((limit > SECONDS ? limit - SECONDS : 1))
        [ "$most" -gt 0 ] && [ "$most" -lt "$left" ] || most=$left
    fi
    if [ "$most" = 0 ]; then "$@"; else timeout --signal=INT --kill-after=10 "$most" "$@"; fi
}

# What OUT gets after each part; rows are written there as they are measured, and kept for the next run.
bring_back() {
    [ -n "${OUT:-}" ] || return 0
    local name logs
    mkdir -p "$OUT"
    mapfile -t logs < <(cd "$work" && compgen -G '*.log')
    [ ${#logs[@]} = 0 ] || tar -C "$work" -czf "$OUT/logs.tar.gz" "${logs[@]}"
    for name in printed.txt table.txt; do [ ! -s "$work/$name" ] || cp "$work/$name" "$OUT/"; done
    if [ -s "$save" ]; then
        [ "$save" -ef "$OUT/cuda.jsonl" ] || cp "$save" "$OUT/cuda.jsonl"
        cp "$OUT/cuda.jsonl" "$work/"
    fi
}

# ---- prepare

download_wheels() {
    # pip takes each of these literally: one for a newer system does not stand for the older ones.
    local platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64) n name
    for n in $(seq 5 35); do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
    "$python" bench/cuda_kit.py requirements >"$work/requirements.txt" || return 1
    rm -rf "$kit/wheels" && mkdir "$kit/wheels" # pip installs no two versions of a package
    "$python" -m pip download --quiet --dest "$kit/wheels" --requirement "$work/requirements.txt" \
        --only-binary=:all: --implementation cp --python-version "$target_python" "${platforms[@]}" || return 1
    for name in $without; do
        rm -f "$kit/wheels/${name//-/_}"-*.whl
    done
    echo "$target_python" >"$kit/python"
    echo "$(find "$kit/wheels" -name '*.whl' | wc -l) wheels, without ${without:-none}"
}

# All that vendor/fetch.py keeps, for tests read it as well: 13 MB.
pack_source() {
    local tree
    tree=$("$python" vendor/fetch.py --print-path) || return 1
    tar -C "$(dirname "$tree")" -czf "$kit/llama.cpp.tar.gz" "$(basename "$tree")" &&
        git describe --always --dirty --exclude='*' >"$kit/commit" &&
        "$python" bench/cuda_kit.py sources bench "${sources[@]}" >"$kit/sources" &&
        du -h "$kit/llama.cpp.tar.gz" | cut -f 1
}

weigh() { "$python" bench/cuda_kit.py weigh "$kit" --fit "$fit"; }

prepare() {
    local name
    for name in "${parts[@]}"; do
        case $name in
            wheels) part wheels download_wheels ;;
            source) part source pack_source ;;
            size) part size weigh ;;
        esac
    done
}

# ---- build

# What a part imports and runs: the package, the wheels of the kit, and then what the machine has. The package lies
# apart, for pip replaces the whole folder bin of its target.
use_site() {
    local scripts
    scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
    export PYTHONPATH=$work/package-site:$work/site${PYTHONPATH:+:$PYTHONPATH}
    export PATH=$work/package-site/bin:$work/site/bin:$PATH:$scripts
    [ -d "$kit" ] || return 0
    export KQVIEW_CACHE_DIR=${KQVIEW_CACHE_DIR:-$work/cache}
    [ -s "$kit/commit" ] || return 0
    KQVIEW_BENCH_COMMIT=$(cat "$kit/commit")
    # The tree may be newer than the kit.
    "$python" bench/cuda_kit.py compare "$kit/sources" 2>/dev/null || KQVIEW_BENCH_COMMIT+=-changed
    export KQVIEW_BENCH_COMMIT
}

install_tools() {
    local wheels here
    if [ -d "$kit" ]; then
        here=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        if [ -s "$kit/python" ] && [ "$here" != "$(cat "$kit/python")" ]; then
            echo "the wheels of $kit are for Python $(cat "$kit/python"), but $python is $here; run" \
                "bench/cuda.sh prepare --python $here, or name another Python in KQVIEW_PYTHON"
            return 1
        fi
        mapfile -t wheels < <(compgen -G "$kit/wheels/*.whl")
        [ ${#wheels[@]} = 0 ] || within 0 "$python" -m pip install --quiet --no-index --no-deps --no-compile \
            --upgrade --target "$work/site" "${wheels[@]}" || return
        unpack_source || return
    fi
    within 0 "$python" bench/cuda_kit.py missing
}

unpack_source() {
    mkdir -p "$KQVIEW_CACHE_DIR"
    "$python" vendor/fetch.py --where && return
    if [ ! -f "$kit/llama.cpp.tar.gz" ]; then
        echo "no llama.cpp.tar.gz in $kit; run bench/cuda.sh prepare again, where there is a network"
        return 1
    fi
    within 0 tar -C "$KQVIEW_CACHE_DIR" -xzf "$kit/llama.cpp.tar.gz" || return
    "$python" vendor/fetch.py --where && return
    echo "$kit holds another llama.cpp than vendor/llama.lock.toml names; run bench/cuda.sh prepare again"
    return 1
}

cuda_defines() {
    [ "$device" = gpu ] || return 0
    printf '%s\n' GGML_CUDA=ON ${arch:+"CMAKE_CUDA_ARCHITECTURES=$arch"}
}

build_package() {
    local options=() define
    while read -r define; do options+=(-C "cmake.define.$define"); done < <(cuda_defines)
    [ -n "$package" ] || options+=(-C build-dir="$work/package")
    rm -f "$work/package.sources"
    within 0 "$python" -m pip install -v --no-build-isolation --no-deps --no-compile --upgrade \
        --target "$work/package-site" ${options[@]+"${options[@]}"} "${package:-.}" || return
    "$python" bench/cuda_kit.py sources "${sources[@]}" >"$work/package.sources" || return
    (cd "$work" && "$python" -c 'import kqview; print(*(d["name"] for d in kqview.system_info()["devices"]))')
}

build_peers() {
    local options=() define
    while read -r define; do options+=(--define "$define"); done < <(cuda_defines)
    rm -f "$work/peers" "$work/peers.sources"
    within 0 "$python" bench/peers/build.py ${options[@]+"${options[@]}"} \
        kq-eval-rows llama-bench test-llama-archs rpc-server >"$work/peers.part" || return
    "$python" bench/cuda_kit.py sources bench/peers vendor/llama.lock.toml >"$work/peers.sources" &&
        mv "$work/peers.part" "$work/peers" && cat "$work/peers"
}

build() {
    local name
    use_site
    for name in "${parts[@]}"; do
        case $name in
            tools) part tools install_tools ;;
            package) part package build_package ;;
            peers) part peers build_peers ;;
        esac
        # Without tools a build fails in its own, longer words.
        [ "$name $has_failed" != 'tools 1' ] || return
    done
}

# ---- run

layers() { if [ "$device" = gpu ]; then echo -1; else echo 0; fi; }

find_device() {
    local listing
    for listing in "$work"/{package,peers}.sources; do
        [ ! -f "$listing" ] || "$python" bench/cuda_kit.py compare "$listing" || return
    done
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
    KQVIEW_TEST_GPU_LAYERS=$(layers) within 480 "$python" -m pytest -q -p no:cacheprovider "$@"
}

# Long prompts make other kernels run on a GPU, and take most of the time on a host.
run_values() { run_pytest tests/engine/test_device_values.py ${quick[@]+-k "not 800"}; }

# Those of 128 models of other architectures take longer than all the rest.
many_models=(tests/engine/test_architectures.py tests/engine/test_architectures_cache.py)

run_tests() {
    if [ ${#quick[@]} -gt 0 ]; then
        run_pytest tests/engine/test_system_info.py tests/engine/test_tap.py -k "not every_head_shape"
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
    within 300 ${checker[@]+"${checker[@]}"} "$python" bench/cuda_exercise.py --layers "$(layers)" --tokens 3
}

run_pinned() {
    [ "$device" = gpu ] || { echo "the host has no copy to measure"; return 75; }
    within 60 "$python" bench/pinned.py
}

run_table() {
    local options=(--device "$device" --save "$save" ${quick[@]+"${quick[@]}"} ${rows[@]+"${rows[@]}"})
    # One thread where others may use the machine: two would wait for each other.
    if [ ${#quick[@]} -gt 0 ]; then options+=(--threads 1); else options+=(--tokens 64); fi
    within 0 "$python" bench/cuda.py "${options[@]}"
}

# All rows that were saved so far, those of a table that was cut off too.
show_table() {
    [ -s "$save" ] || return 0
    "$python" bench/cuda_table.py "$save" --print >"$work/table.txt" 2>&1
    line '%s\n' "$(cat "$work/table.txt"; grep '^not measured' "$work/table.log")"
    bring_back
}

choose_results() {
    if [ -n "${OUT:-}" ]; then
        mkdir -p "$OUT"
        : "${save:=$OUT/cuda.jsonl}"
        [ ! -s "$work/cuda.jsonl" ] || [ -e "$OUT/cuda.jsonl" ] || cp "$work/cuda.jsonl" "$OUT/"
    elif [ ${#quick[@]} -gt 0 ]; then
        : "${save:=$work/quick.jsonl}"
    fi
    : "${save:=bench/results}"
    case $save in *.jsonl) ;; *) save=$save/$(date -u +%F).jsonl ;; esac
}

run() {
    local name
    [ ! -d "$work/package-site" ] || use_site
    [ ! -s "$work/peers" ] || { KQVIEW_PEERS_DIR=$(cat "$work/peers") && export KQVIEW_PEERS_DIR; }
    choose_results
    part device find_device
    [ $has_failed = 0 ] || return
    # Before anything else takes its time.
    [ ${#rows[@]} = 0 ] || "$python" bench/cuda.py --list "${rows[@]}" >"$work/rows.log" || exit 2
    for name in "${parts[@]}"; do
        case $name in
            values) part values run_values ;;
            tests) part tests run_tests ;;
            architectures) part architectures run_architectures ;;
            sanitize) part memcheck sanitize memcheck; part racecheck sanitize racecheck ;;
            table) [ ${#rows[@]} -gt 0 ] || part pinned run_pinned; part table run_table; show_table ;;
        esac
    done
}

[ $# -gt 0 ] || usage
step=$1
shift
case $step in
    prepare) known=("${prepare_parts[@]}") ;;
    build) known=("${build_parts[@]}") ;;
    run) known=("${run_parts[@]}" architectures) ;;
    -h | --help) usage ;;
    *) refuse "no step '$step'; there are prepare, build and run (--help says more)" ;;
esac
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage ;;
        --quick) quick=(--quick) ;;
        --device | --row | --limit | --arch | --package | --save | --python | --without | --fit)
            [ $# -gt 1 ] || refuse "$1 needs a value"
            case $1 in
                --device) device=$2 ;;
                --row) rows+=(--row "$2") ;;
                --limit) limit=$2 ;;
                --arch) arch=$2 ;;
                --package) package=$2 ;;
                --save) save=$2 ;;
                --python) target_python=$2 ;;
                --without) without=$2 ;;
                --fit) fit=$2 ;;
            esac
            shift
            ;;
        -*) refuse "no option '$1' (--help names them)" ;;
        *)
            [[ " ${known[*]} " == *" $1 "* ]] || refuse "no part '$1' of $step; there are ${known[*]}"
            parts+=("$1")
            ;;
    esac
    shift
done
case $device in gpu | cpu) ;; *) refuse "--device is '$device', but can be gpu or cpu" ;; esac
[[ $limit =~ ^[0-9]+$ ]] || refuse "--limit is '$limit', but must be a number of seconds"
[[ $fit =~ ^[0-9]+$ ]] || refuse "--fit is '$fit', but must be a number of MiB"
mkdir -p "$work"
: >"$work/printed.txt"
case $step in
    prepare) mkdir -p "$kit"; [ ${#parts[@]} -gt 0 ] || parts=("${prepare_parts[@]}"); prepare ;;
    build) [ ${#parts[@]} -gt 0 ] || parts=("${build_parts[@]}"); build ;;
    run) [ ${#parts[@]} -gt 0 ] || parts=("${run_parts[@]}"); run ;;
esac
line 'took %d s\n' "$SECONDS"
bring_back
exit $has_failed
