#!/usr/bin/env bash
# From nothing to the table of bench/cuda_cost.py, on a machine with a GPU that may have no network:
#
#   bench/cuda.sh prepare   where there is a network: puts wheels and llama.cpp's source into a folder to carry along.
#                           Parts: wheels source size
#   bench/cuda.sh all       on the GPU machine: checks the row kernel, builds what is not built, then measures, what
#                           matters most first. Parts: check tools package first values pinned copies places decode
#                           tests sanitize peers stock
#   bench/cuda.sh build     the package and the stock programs with CUDA: 75 minutes of processor time for one
#                           architecture, about 6 on 16 cores; a build that was stopped goes on where it was.
#                           Parts: tools package peers
#   bench/cuda.sh run       measures and tests what is built. Parts: check values sanitize pinned table tests; and
#                           architectures, which takes longer than the others
#
# Without part names, all parts run except architectures; otherwise the named parts, in the order given.
#
#   --device gpu|cpu        cpu (all, build, run): the same steps without CUDA, as .ci/full runs them
#   --quick                 all, run: a small model, few tests, few pairs: does it still work? Less than a minute
#   --row NAME              run table: this row only, or those of a pattern; may be repeated
#   --limit SECONDS         all, build, run: stop before the machine's own time limit; what is finished is kept,
#                           and the parts that were cut off are named. Give 30 seconds less than the machine does
#   --resume DIR            all, build, run: DIR holds what earlier calls left in $OUT: the package and the stock
#                           programs are unpacked, not built, if they are of the same sources and run on this processor;
#                           all leaves out rows and parts that are finished. prepare size: DIR is carried as well
#   --arch LIST             all, build: CUDA architectures, such as 90 or "80;90"; the GPU's own if left out
#   --package WHEEL         all, build: installs this wheel of the package instead of building one
#   --save PATH             all, run: JSON lines of the table, a file or a folder ($OUT/cuda.jsonl, else bench/results)
#   --python X.Y            prepare: the Python of the GPU machine (3.12)
#   --without "NAME ..."    prepare: packages that the GPU machine has ("cmake numpy")
#   --fit MIB               prepare: how much may be carried, the checkout without ignored files included (64; 0: all)
#
# The GPU machine needs Python with its headers and pip, g++, nvcc and cuBLAS (toolkit or wheels, see vendor/README.md);
# KQVIEW_PYTHON names its Python if that is not python3. The folder KQVIEW_CUDA_KIT (build/cuda-kit) is carried along;
# KQVIEW_CUDA_WORK (build/cuda) holds everything else. One line a part with its seconds; logs stay in the work folder.
# Exit status 1: a part failed or was cut off.
#
# If OUT is set, that folder gets what is worth bringing back, as it comes: cuda.jsonl (the rows of this and of earlier
# calls; a row that is not over yet has its pairs so far), table.txt, printed.txt, logs.tar.gz, and what was built:
# package.tar.gz.N and peers.tar.gz.N, in pieces of 15 MiB, four at most.
#
# A plan for a machine that is bare at each call, takes 90 seconds to start, gives a command 10 minutes and all calls
# together 30, with 64 MiB carried; minutes are for 16 cores and a GPU that decodes a token of the model in 5 ms. After
# each call copy $OUT into build/cuda-back, over what is there; carry build/cuda-kit and that folder:
#
#   bench/cuda.sh all --arch 90 --limit 570                                  9.5
#   bench/cuda.sh all --arch 90 --limit 510 --resume build/cuda-back         8.5
#   bench/cuda.sh all --arch 90 --limit 390 --resume build/cuda-back         6.5
#
# The first call checks the row kernel against float64 (1 minute), builds the package (6) and measures the main rows (2).
# The second one compares values with float64 and measures most of the other rows that need no stock program, the third
# one the rest of them; then it runs the tests (4) and, in what time is left, compute-sanitizer. The stock programs take
# as long to build as the package: they need a fourth call, or the time of the first one with --package, a wheel that
# was built for this Python elsewhere:
#
#   bench/cuda.sh all --arch 90 --limit 570 --resume build/cuda-back peers stock
#
# After a change of the sources the next call begins anew.
set -uo pipefail
exec </dev/null
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

kit=$(realpath -m "${KQVIEW_CUDA_KIT:-build/cuda-kit}")
work=$(realpath -m "${KQVIEW_CUDA_WORK:-build/cuda}")
python=${KQVIEW_PYTHON:-python3}
device=gpu quick=() rows=() arch='' package='' save='' resume='' limit=0
target_python=3.12 without='cmake numpy' fit=64
parts=()
has_failed=0
is_built='' is_rebuilt='' # the part that runs, the package
values_most=480 # seconds
most_workers=12  # of pytest; each has a context of its own on the GPU
# What each step can do; architectures only by name.
prepare_parts=(wheels source size)
build_parts=(tools package peers)
run_parts=(check values sanitize pinned table tests)
all_parts=(check tools package first values pinned copies places decode tests sanitize peers stock)
# Rows of `all` by part; every row is among them. A part is a process of its own, so that a crash
# ends one only, and leaves out rows that an earlier one has measured.
declare -A rows_of=(
    [first]='device-rows-4k-1-* cuda-4k-1-*'
    [copies]='cuda-copy cuda-step-to-view'
    [places]='device-rows-16k-1-* device-rows-4k-8-*'
    [decode]='cuda-*k-1-* cuda-*k-8-*'
    [stock]='cuda-*-llama-bench cuda-*-callback-* cuda-*-hf-*'
)
# What can be brought back is limited in number and size of files; four are no pieces of a build.
piece_mib=15 most_pieces=4
sources=(cpp src/kqview vendor CMakeLists.txt pyproject.toml)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore CMAKE_GENERATOR=Ninja PYTHONUNBUFFERED=1

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 2; }
refuse() { echo "cuda.sh: $*" >&2; exit 2; }

# line FORMAT ARGUMENT...: prints it, into what is brought back as well.
# shellcheck disable=SC2059 # the format is ours
line() { printf "$@" | tee -a "$work/printed.txt"; }

# part NAME COMMAND...: runs it into a log of its own and prints a line. Exit status 75 means that
# it cannot be run here, 76 that too little time is left for it.
part() {
    local name=$1 log=$work/$1.log start=$SECONDS status
    shift
    if [ "$limit" -gt 0 ] && [ "$SECONDS" -ge "$limit" ]; then
        line 'left out %-9s: the limit of %d s is reached\n' "$name" "$limit"
        has_failed=1
        return 124
    fi
    "$@" >"$log" 2>&1
    status=$?
    case $status in
        0) line 'ok     %-10s %4d s  %s\n' "$name" $((SECONDS - start)) "$(tail -n 1 "$log")" ;;
        75) line 'not run %-9s %4d s  %s\n' "$name" $((SECONDS - start)) "$(tail -n 1 "$log")" ;;
        76)
            line 'left out %-9s: %s\n' "$name" "$(tail -n 1 "$log")"
            has_failed=1
            ;;
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
    return $status
}

# within SECONDS COMMAND...: ends it after SECONDS, or sooner when the time of all parts is over; 0:
# no time of its own.
within() {
    local most=$1 left
    shift
    if [ "$limit" -gt 0 ]; then
        left=$((limit > SECONDS ? limit - SECONDS : 1))
        [ "$most" -gt 0 ] && [ "$most" -lt "$left" ] || most=$left
    fi
    if [ "$most" = 0 ]; then "$@"; else timeout --signal=INT --kill-after=10 "$most" "$@"; fi
}

# What OUT gets after each part; rows are written there as they are measured, and kept for the next
# run.
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

# keep NAME FILE...: packs FILEs of the work folder into OUT; the last one is missing in an archive
# that was cut short.
keep() {
    local name=$1 archive=$work/$1.tar.gz n_bytes n_pieces n_others
    shift
    within 0 tar -C "$work" -czf "$archive" "$@" || return
    n_bytes=$(stat -c %s "$archive")
    n_pieces=$(((n_bytes + piece_mib * 1048576 - 1) / (piece_mib * 1048576)))
    n_others=$(find "$OUT" -name '*.tar.gz.[0-9]' ! -name "$name.*" | wc -l)
    if [ $((n_pieces + n_others)) -gt "$most_pieces" ]; then
        rm "$archive"
        echo "$name is $((n_bytes / 1000000)) MB in $n_pieces pieces of $piece_mib MiB, but only" \
            "$((most_pieces - n_others)) more may be brought back"
        return 75
    fi
    rm -f "$OUT/$name".tar.gz.[0-9]
    split -d -a 1 -b "${piece_mib}M" "$archive" "$OUT/$name.tar.gz." && rm "$archive" &&
        echo "$name: $((n_bytes / 1000000)) MB, pieces of $piece_mib MiB: $n_pieces"
}

# What earlier calls brought back: what they built, if it is of these sources, and the rows and
# lines that they left.
take_earlier() {
    local name pieces
    if [ ! -d "$resume" ]; then
        echo "no folder $resume; --resume names the one that holds what earlier calls left in OUT"
        return 1
    fi
    for name in package peers; do
        mapfile -t pieces < <(compgen -G "$resume/$name.tar.gz.[0-9]")
        [ ! -e "$work/$name.sources" ] && [ ${#pieces[@]} -gt 0 ] || continue
        if cat "${pieces[@]}" | within 0 tar -C "$work" -xz && has_sources "$name" &&
            "$python" bench/cuda_kit.py processor "$work/$name.cpu"; then
            echo "$name is here"
        else
            rm -f "$work/$name.sources"
            echo "so $name has to be built again"
        fi
    done
    [ ! -s "$work/package.sources" ] || [ -s "$work/printed.txt" ] || [ ! -s "$resume/printed.txt" ] ||
        cp "$resume/printed.txt" "$work/"
    [ -s "$work/cuda.jsonl" ] || [ ! -s "$resume/cuda.jsonl" ] || cp "$resume/cuda.jsonl" "$work/"
    return 0
} 2>&1

# has_sources NAME: was it built, and from the sources of this tree?
has_sources() { [ -s "$work/$1.sources" ] && "$python" bench/cuda_kit.py compare "$work/$1.sources"; }

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

weigh() { "$python" bench/cuda_kit.py weigh "$kit" ${resume:+"$resume"} --fit "$fit"; }

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

# What a part imports and runs: the package, the wheels of the kit, and then what the machine has.
# The package lies apart, for pip replaces the whole folder bin of its target.
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

say_kit() {
    [ -d "$kit" ] ||
        line 'no kit: there is no folder %s; carry it, unless this machine has all that it would hold\n' "$kit"
}

install_tools() {
    local wheels here checks=(--device "$device" --arch "$arch" --work "$work")
    [ -z "$package" ] && ! is_kept package || checks+=(--no-build)
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
        is_kept package || unpack_source || return
    fi
    within 0 "$python" bench/cuda_kit.py missing "${checks[@]}" && return
    [ -d "$kit" ] || echo "There is no kit here, no folder $kit: carry it"
    return 1
}

# is_kept NAME: does this call use what is built? Only `build` alone builds once more.
is_kept() { [ "$step$resume" != build ] && has_sources "$1" >/dev/null 2>&1; }

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
    local options=() define start=$SECONDS
    # Where it does not start, it is built again.
    if is_kept package && list_devices; then return; fi
    while read -r define; do options+=(-C "cmake.define.$define"); done < <(cuda_defines)
    [ -n "$package" ] || options+=(-C build-dir="$work/package")
    is_built=yes
    rm -f "$work"/package.{sources,seconds}
    within 0 "$python" -m pip install -v --no-build-isolation --no-deps --no-compile --upgrade \
        --target "$work/package-site" ${options[@]+"${options[@]}"} "${package:-.}" || return
    [ -n "$package" ] || echo $((SECONDS - start)) >"$work/package.seconds"
    "$python" bench/cuda_kit.py processor >"$work/package.cpu" &&
        "$python" bench/cuda_kit.py sources "${sources[@]}" >"$work/package.sources" || return
    list_devices
}

list_devices() {
    (cd "$work" && "$python" -c 'import kqview; print(*(d["name"] for d in kqview.system_info()["devices"]))')
}

keep_package() {
    local files=(package-site)
    [ ! -s "$work/package.seconds" ] || files+=(package.seconds)
    keep package "${files[@]}" package.cpu package.sources
}

build_peers() {
    local options=() programs=(kq-eval-rows llama-bench) define folder needed
    is_kept peers && [ -x "$work/peers/llama-bench" ] && { echo "$work/peers"; return; }
    # They take about as long as the package; the rows after them need some time as well.
    if [ "$limit" -gt 0 ] && [ "$step" = all ] && [ -s "$work/package.seconds" ]; then
        needed=$(($(cat "$work/package.seconds") * 11 / 10 + 30))
        if [ $((limit - SECONDS)) -lt "$needed" ]; then
            echo "they take about $needed s to build, and $((limit - SECONDS)) s are left"
            return 76
        fi
    fi
    # The others are for tests, and large.
    [ "$step" = all ] || programs+=(test-llama-archs rpc-server)
    while read -r define; do options+=(--define "$define"); done < <(cuda_defines)
    [ ! -d "$kit" ] || unpack_source || return
    is_built=yes
    rm -rf "$work/peers" "$work/peers.sources"
    folder=$(within 0 "$python" bench/peers/build.py ${options[@]+"${options[@]}"} \
        "${programs[@]}") || return
    mkdir "$work/peers" && (cd "$folder" && cp -r "${programs[@]/#rpc-server/ggml-rpc-server}" "$work/peers") || return
    strip "$work/peers"/*
    "$python" bench/cuda_kit.py processor >"$work/peers.cpu" &&
        "$python" bench/cuda_kit.py sources bench/peers vendor/llama.lock.toml >"$work/peers.sources" &&
        echo "$work/peers"
}

build() {
    local name
    use_site
    say_kit
    for name in "${parts[@]}"; do
        # Without tools a build fails in its own, longer words.
        build_part "$name" || [ "$name" != tools ] || return
    done
}

# What was built in this call is brought back at once.
build_part() {
    is_built=''
    case $1 in
        tools) part tools install_tools; return ;;
        package) part package build_package ;;
        peers) part peers build_peers ;;
    esac || return
    [ -n "$is_built" ] || return 0
    [ "$1" != package ] || is_rebuilt=yes
    [ -n "${OUT:-}" ] || return 0
    case $1 in
        package) part keep-package keep_package ;;
        peers) part keep-peers keep peers peers peers.cpu peers.sources ;;
    esac
    return 0
}

# ---- run

layers() { if [ "$device" = gpu ]; then echo -1; else echo 0; fi; }

find_device() {
    local listing
    for listing in "$work"/{package,peers}.sources; do
        [ ! -f "$listing" ] || "$python" bench/cuda_kit.py compare "$listing" || return
    done
    if [ ! -d "$work/package-site" ] && ! "$python" -c 'import kqview'; then
        echo "nothing is built in $work, and $python has no kqview; run bench/cuda.sh all, or build first," \
            "or name with --resume the folder with what an earlier call brought back"
        return 1
    fi
    "$python" -m kqview info || return 1
    "$python" - "$device" <<'PYTHON'
import sys
import kqview
found = [d["description"] for d in kqview.system_info()["devices"] if d["type"] in ("GPU", "IGPU")]
print(*found or ["no GPU"], sep=", ")
sys.exit(sys.argv[1] == "gpu" and not found)
PYTHON
}

# Only the plugins that these tests need: others of the machine may warn, slow down or change what
# is run. A warning of its versions of packages is no failure here. A process for each core: tests
# of tiny models wait for launches, not for the GPU.
run_pytest() {
    local most=$1 workers
    shift
    workers=$(nproc)
    [ "$workers" -le "$most_workers" ] || workers=$most_workers
    PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 KQVIEW_TEST_GPU_LAYERS=$(layers) within "$most" "$python" -m pytest -q \
        -p no:cacheprovider -p pytest_asyncio.plugin -p _hypothesis_pytestplugin -W default \
        -p xdist.plugin -n "$workers" --dist worksteal \
        -m "full or not full" --continue-on-collection-errors -rfE "$@"
}

# run_values PLACE: where rows of layers on devices are computed, as Engine's device_rows says it.
# Long prompts make other kernels run on a GPU, and take most of the time on a host.
run_values() {
    local -x KQVIEW_TEST_DEVICE_ROWS=$1
    [ "$device $1" != 'cpu beside' ] || { echo "the host has one place to compute rows"; return 75; }
    run_pytest "$values_most" tests/engine/test_device_values.py ${quick[@]+-k "not 800"}
}

# Those of 128 models of other architectures take longer than all the rest.
many_models=(tests/engine/test_architectures.py tests/engine/test_architectures_cache.py
    tests/engine/test_device_architectures.py)

# Here cuBLAS keeps float32, so that texts and rows do not depend on how many tokens of a prompt are
# computed at once; values of a build as it is used are those of run_values.
run_tests() {
    local -x NVIDIA_TF32_OVERRIDE=0
    if [ ${#quick[@]} -gt 0 ]; then
        run_pytest 480 tests/engine/test_system_info.py tests/engine/test_tap.py -k "not every_head_shape"
    else
        run_pytest 480 tests/engine "${many_models[@]/#/--ignore=}"
    fi
}

run_architectures() {
    local -x NVIDIA_TF32_OVERRIDE=0
    [ ${#quick[@]} -eq 0 ] || { echo "not in a quick run"; return 75; }
    run_pytest 480 "${many_models[@]}"
}

# check_rows OPTION...: the row kernel against float64.
check_rows() {
    [ "$device" = gpu ] || { echo "the host has no row kernel"; return 75; }
    KQVIEW_CUDA_WORK=$work KQVIEW_CUDA_ARCH=${arch%%;*} within 150 bash bench/row_check.sh "$@"
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

# measure OPTION...: rows of the table.
measure() {
    local options=(--device "$device" --save "$save" ${quick[@]+"${quick[@]}"} "$@")
    # One thread where others may use the machine: two would wait for each other.
    if [ ${#quick[@]} -gt 0 ]; then options+=(--threads 1); else options+=(--tokens 64); fi
    within 0 "$python" bench/cuda_cost.py "${options[@]}"
}

# measure_part NAME: the rows of that part of `all`, but those that are saved.
measure_part() {
    local options=(--missing) pattern
    read -ra patterns <<<"${rows_of[$1]}"
    for pattern in "${patterns[@]}"; do options+=(--row "$pattern"); done
    part "$1" measure "${options[@]}"
    write_table "$1"
}

# write_table PART: all rows that are saved, those of a part that was cut off too, and what PART
# could not measure.
write_table() {
    [ -s "$save" ] || return 0
    "$python" bench/cuda_table.py "$save" --print >"$work/table.txt" 2>&1
    grep -s '^not measured' "$work/$1.log" >>"$work/table.txt"
    bring_back
}

show_table() { [ ! -s "$work/table.txt" ] || line '%s\n' "$(cat "$work/table.txt")"; }

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

# Rows say which build they are of.
use_build() {
    [ -s "$work/package.sources" ] || return 0
    KQVIEW_BENCH_BUILD=$(sha256sum <"$work/package.sources" | cut -c 1-12)
    export KQVIEW_BENCH_BUILD
}
use_peers() { [ ! -s "$work/peers.sources" ] || export KQVIEW_PEERS_DIR=$work/peers; }

run() {
    local name
    [ ! -d "$work/package-site" ] || use_site
    use_peers
    choose_results
    part device find_device || return
    use_build
    # Before anything else takes its time.
    [ ${#rows[@]} = 0 ] || "$python" bench/cuda_cost.py --list "${rows[@]}" >"$work/rows.log" || exit 2
    for name in "${parts[@]}"; do run_part "$name"; done
}

run_part() {
    case $1 in
        values)
            was_finished values || part values run_values 'in graph'
            was_finished values-beside || part values-beside run_values beside
            ;;
        tests) part tests run_tests ;;
        architectures) part architectures run_architectures ;;
        check) part check check_rows ;;
        sanitize)
            part rows-sanitize check_rows --sanitize
            part memcheck sanitize memcheck
            part racecheck sanitize racecheck
            ;;
        pinned) part pinned run_pinned ;;
        table)
            part table measure ${rows[@]+"${rows[@]}"}
            write_table table
            show_table
            ;;
    esac
}

# ---- all

# What an earlier call finished is left out.
everything() {
    local name has_device=''
    use_site
    say_kit
    has_sources peers >/dev/null 2>&1 || rm -f "$work/peers.sources"
    use_peers
    choose_results
    values_most=150 # there are rows to measure after them
    for name in "${parts[@]}"; do
        case $name in
            check)
                was_finished check || run_part check
                continue
                ;;
            tools | package)
                build_part "$name" || return
                continue
                ;;
            peers)
                build_part peers
                use_peers
                continue
                ;;
        esac
        if [ -z "$has_device" ]; then
            part device find_device || return
            use_build
            has_device=1
        fi
        case $name in
            first) measure_part first; show_table ;;
            copies | places | decode | stock) measure_part "$name" ;;
            tests) was_finished tests || run_part tests ;;
            sanitize) was_finished racecheck || run_part sanitize ;;
            *) run_part "$name" ;;
        esac
    done
    show_table
}

# was_finished PART: did it end well in an earlier call of `all` that had this package?
was_finished() {
    [ "$step" = all ] && [ -n "$resume" ] && [ -z "$is_rebuilt" ] && grep -q "^ok     $1 " "$work/printed.txt" &&
        line 'earlier %-9s was finished by an earlier call\n' "$1"
}

[ $# -gt 0 ] || usage
step=$1
call="bench/cuda.sh $*"
shift
case $step in
    prepare) known=("${prepare_parts[@]}") ;;
    build) known=("${build_parts[@]}") ;;
    run) known=("${run_parts[@]}" architectures) ;;
    all) known=("${all_parts[@]}") ;;
    -h | --help) usage ;;
    *) refuse "no step '$step'; there are prepare, all, build and run (--help says more)" ;;
esac
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage ;;
        --quick) quick=(--quick) ;;
        --device | --row | --limit | --resume | --arch | --package | --save | --python | --without | --fit)
            [ $# -gt 1 ] || refuse "$1 needs a value"
            case $1 in
                --device) device=$2 ;;
                --row) rows+=(--row "$2") ;;
                --limit) limit=$2 ;;
                --resume) resume=$2 ;;
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
[ ${#rows[@]} = 0 ] || [ "$step" = run ] || refuse "--row goes with run table, not with $step"
mkdir -p "$work"
[ -z "$resume" ] || resume=$(realpath -m "$resume")
earlier=''
if [ -n "$resume" ] && [ "$step" != prepare ]; then
    take_earlier >"$work/resume.log" || refuse "$(cat "$work/resume.log")"
    earlier=$(cat "$work/resume.log")
fi
line '%s\n' "== $call" ${earlier:+"$earlier"}
case $step in
    prepare) mkdir -p "$kit"; [ ${#parts[@]} -gt 0 ] || parts=("${prepare_parts[@]}"); prepare ;;
    build) [ ${#parts[@]} -gt 0 ] || parts=("${build_parts[@]}"); build ;;
    run) [ ${#parts[@]} -gt 0 ] || parts=("${run_parts[@]}"); run ;;
    all) [ ${#parts[@]} -gt 0 ] || parts=("${all_parts[@]}"); everything ;;
esac
line 'took %d s\n' "$SECONDS"
bring_back
exit $has_failed
