# Finds what GGML_CUDA=ON needs, or says what is missing: nvcc, cuBLAS of the same major version, a
# C++ compiler that nvcc supports. Only searches and sets variables, so
# tests/meta/test_cuda_build.py runs it as a script, with a fake nvcc.
#
# cuBLAS is in the toolkit or in NVIDIA's wheels, as far as the building interpreter sees them.
# pip's isolated build has another sys.path but the same interpreter, so the script lists its
# site-packages explicitly; KQVIEW_NVIDIA_DIR names any other place.

if(NOT DEFINED KQVIEW_SYSTEM_ROOT)
    set(KQVIEW_SYSTEM_ROOT /usr)  # prefix of distribution packages; NVIDIA's are in its local/cuda
endif()

function(kqview_cuda_fail what remedy)
    message(FATAL_ERROR "GGML_CUDA=ON: ${what}\n${remedy}\nWithout GGML_CUDA=ON kqview builds for the CPU.")
endfunction()

# The "nvidia" folders that the wheels share.
function(kqview_nvidia_dirs result)
    if(KQVIEW_NVIDIA_DIR)
        if(NOT IS_DIRECTORY "${KQVIEW_NVIDIA_DIR}")
            kqview_cuda_fail("KQVIEW_NVIDIA_DIR is ${KQVIEW_NVIDIA_DIR}, no such folder."
                "It is the folder \"nvidia\" in the site-packages that the nvidia-* wheels are installed in.")
        endif()
        set(${result} "${KQVIEW_NVIDIA_DIR}" PARENT_SCOPE)
        return()
    endif()
    execute_process(
        COMMAND "${Python_EXECUTABLE}" -c "import site, sys, sysconfig
known = [*map(sysconfig.get_path, ('purelib', 'platlib')), *site.getsitepackages(), site.getusersitepackages()]
print(*dict.fromkeys(f'{path}/nvidia' for path in known + sys.path if path), sep=';', end='')"
        OUTPUT_VARIABLE dirs ERROR_QUIET)
    set(${result} "${dirs}" PARENT_SCOPE)
endfunction()

# Sets KQVIEW_NVCC, KQVIEW_CUDA_VERSION ("13.0") and KQVIEW_CUDA_ROOT, the toolkit's folder.
function(kqview_find_nvcc nvidia_dirs)
    set(hints)
    foreach(root "${CUDAToolkit_ROOT}" "$ENV{CUDAToolkit_ROOT}" "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
        if(root)
            list(APPEND hints "${root}/bin")
        endif()
    endforeach()
    set(wheels)
    foreach(dir IN LISTS nvidia_dirs)
        file(GLOB found "${dir}/cu[0-9]*/bin")
        list(APPEND wheels ${found})
    endforeach()
    set(nvcc "${CMAKE_CUDA_COMPILER}")
    if(NOT nvcc)
        set(nvcc "$ENV{CUDACXX}")
    endif()
    if(NOT nvcc)
        unset(nvcc)
        find_program(nvcc NAMES nvcc HINTS ${hints} PATHS "${KQVIEW_SYSTEM_ROOT}/local/cuda/bin" ${wheels} NO_CACHE)
    endif()
    if(NOT nvcc)
        kqview_cuda_fail("no CUDA toolkit: nvcc is not on the PATH, nor in CUDA_HOME, /usr/local/cuda or wheels."
            "Install the CUDA toolkit, or name its compiler: -C cmake.define.CMAKE_CUDA_COMPILER=/path/to/nvcc")
    endif()
    execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE status)
    if(NOT status EQUAL 0 OR NOT text MATCHES "release ([0-9]+\\.[0-9]+)")
        string(STRIP "${text}" text)
        kqview_cuda_fail("${nvcc} --version says no CUDA release (status ${status}): ${text}"
            "Name a working compiler: -C cmake.define.CMAKE_CUDA_COMPILER=/path/to/nvcc")
    endif()
    set(version "${CMAKE_MATCH_1}")
    # nvcc may be a link or a script next to others; it knows its own folder.
    get_filename_component(root "${nvcc}" REALPATH)
    get_filename_component(root "${root}/../.." ABSOLUTE)
    execute_process(COMMAND "${nvcc}" --dryrun -x cu -c /dev/null -o /dev/null
        OUTPUT_VARIABLE text ERROR_VARIABLE text)
    if(text MATCHES "#\\$ TOP=([^\r\n]+)")
        get_filename_component(root "${CMAKE_MATCH_1}" REALPATH)
    endif()
    set(KQVIEW_NVCC "${nvcc}" PARENT_SCOPE)
    set(KQVIEW_CUDA_VERSION "${version}" PARENT_SCOPE)
    set(KQVIEW_CUDA_ROOT "${root}" PARENT_SCOPE)
endfunction()

# Uses cuBLAS from these folders if it has the wanted major version; otherwise appends what it found
# to `seen`.
macro(kqview_try_cublas wanted_major source include_dirs library_dirs)
    if(NOT KQVIEW_CUBLAS_LIBRARY)
        find_file(header NAMES cublas_api.h PATHS ${include_dirs} NO_DEFAULT_PATH NO_CACHE)
        set(version)
        if(header)
            file(STRINGS "${header}" lines REGEX "define CUBLAS_VER_(MAJOR|MINOR)")
            string(REGEX REPLACE ".*MAJOR +([0-9]+).*MINOR +([0-9]+).*" "\\1.\\2" version "${lines}")
            get_filename_component(include_dir "${header}" DIRECTORY)
        endif()
        foreach(name cublas cublasLt)
            find_file(${name} NAMES lib${name}.so.${wanted_major} PATHS ${library_dirs} NO_DEFAULT_PATH NO_CACHE)
        endforeach()
        if(version MATCHES "^${wanted_major}\\." AND cublas AND cublasLt)
            set(KQVIEW_CUBLAS_LIBRARY "${cublas}")
            set(KQVIEW_CUBLASLT_LIBRARY "${cublasLt}")
            set(KQVIEW_CUBLAS_INCLUDE_DIR "${include_dir}")
            set(KQVIEW_CUBLAS_VERSION "${version}")
            set(KQVIEW_CUBLAS_SOURCE "${source}")
        elseif(version AND NOT version MATCHES "^${wanted_major}\\.")
            list(APPEND seen "cuBLAS ${version} in ${include_dir}")
        elseif(version)
            list(APPEND seen "headers without libcublas.so.${wanted_major} in ${include_dir}")
        elseif(cublas)
            list(APPEND seen "${cublas} without headers")
        endif()
        unset(header)
        unset(cublas)
        unset(cublasLt)
    endif()
endmacro()

# Sets KQVIEW_CUBLAS_{LIBRARY,INCLUDE_DIR,VERSION,SOURCE} and KQVIEW_CUBLASLT_LIBRARY; SOURCE is
# toolkit or wheels.
function(kqview_find_cublas nvidia_dirs)
    string(REGEX MATCH "^[0-9]+" major "${KQVIEW_CUDA_VERSION}")
    set(KQVIEW_CUBLAS_LIBRARY)
    set(seen)
    set(places)
    file(GLOB targets "${KQVIEW_CUDA_ROOT}/targets/*-linux")
    foreach(root "${KQVIEW_CUDA_ROOT}" ${targets} "${KQVIEW_SYSTEM_ROOT}")
        list(APPEND places "${root}")
        file(GLOB multiarch "${root}/lib/*-linux-gnu")
        kqview_try_cublas(${major} toolkit "${root}/include" "${root}/lib64;${root}/lib;${multiarch}")
    endforeach()
    # Wheels of CUDA 13 share one folder; those of CUDA 12 have one each.
    foreach(dir IN LISTS nvidia_dirs)
        foreach(part "cu${major}" cublas)
            if(IS_DIRECTORY "${dir}/${part}")
                list(APPEND places "${dir}/${part}")
                kqview_try_cublas(${major} wheels "${dir}/${part}/include" "${dir}/${part}/lib")
            endif()
        endforeach()
    endforeach()
    if(NOT KQVIEW_CUBLAS_LIBRARY)
        set(wheel nvidia-cublas==${major}.*)
        if(major LESS 13)
            set(wheel nvidia-cublas-cu${major})
        endif()
        list(JOIN places ", " places)
        list(JOIN seen ", " seen)
        if(NOT seen)
            set(seen "nothing")
        endif()
        kqview_cuda_fail(
            "cuBLAS ${major}, with headers, is needed by nvcc ${KQVIEW_CUDA_VERSION}; found: ${seen}; looked in: ${places}."
            "Run pip install '${wheel}' with the Python that builds, or install the toolkit's cuBLAS. Wheels elsewhere: \
-C cmake.define.KQVIEW_NVIDIA_DIR=<site-packages>/nvidia")
    endif()
    foreach(name CUBLAS_LIBRARY CUBLASLT_LIBRARY CUBLAS_INCLUDE_DIR CUBLAS_VERSION CUBLAS_SOURCE)
        set(KQVIEW_${name} "${KQVIEW_${name}}" PARENT_SCOPE)
    endforeach()
endfunction()

# Sets KQVIEW_CUDA_HOST_COMPILER: the build's own compiler if nvcc supports it, else the newest
# supported g++. The test compiles a kernel, which also detects missing headers. `arch_flag` is the
# flag that "native" becomes, or empty.
function(kqview_find_host_compiler work_dir arch_flag)
    set(given "${CMAKE_CUDA_HOST_COMPILER}")
    if(NOT given)
        set(given "$ENV{CUDAHOSTCXX}")
    endif()
    set(candidates "${given}")
    if(NOT given)
        set(candidates "${CMAKE_CXX_COMPILER}")
        foreach(below_20 RANGE 11)
            math(EXPR number "20 - ${below_20}")
            find_program(found NAMES g++-${number} NO_CACHE)
            if(found)
                list(APPEND candidates "${found}")
            endif()
            unset(found)
        endforeach()
    endif()
    file(WRITE "${work_dir}/probe.cu"
        "#include <cublas_v2.h>\n#include <cuda_fp16.h>\n__global__ void kernel(half *x) { x[0] = x[1]; }\n")
    set(failures)
    foreach(compiler IN LISTS candidates)
        execute_process(
            COMMAND "${KQVIEW_NVCC}" -ccbin "${compiler}" ${arch_flag} -isystem "${KQVIEW_CUBLAS_INCLUDE_DIR}"
                -c "${work_dir}/probe.cu" -o "${work_dir}/probe.o"
            OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE status)
        if(status EQUAL 0)
            if(arch_flag AND text MATCHES "find valid GPU")
                kqview_cuda_fail("no GPU on this machine, so \"native\" names no architecture."
                    "Name those to build for: -C cmake.define.CMAKE_CUDA_ARCHITECTURES=90 (a list has semicolons: \"80;90\")")
            endif()
            set(KQVIEW_CUDA_HOST_COMPILER "${compiler}" PARENT_SCOPE)
            return()
        endif()
        # The line with the reason, such as "gcc versions later than 15 are not supported".
        string(REGEX MATCH "[^\r\n]*([Ee]rror|fatal)[^\r\n]*" why "${text}")
        string(SUBSTRING "${why}" 0 300 why)
        list(APPEND failures "  ${compiler}: ${why}")
    endforeach()
    list(JOIN failures "\n" failures)
    kqview_cuda_fail("nvcc ${KQVIEW_CUDA_VERSION} (${KQVIEW_NVCC}) compiles no kernel with\n${failures}"
        "Install a g++ that this toolkit takes, or name one: -C cmake.define.CMAKE_CUDA_HOST_COMPILER=/path/to/g++")
endfunction()

# Runs all of the above. `work_dir` gets a few small files; `is_native`: build for this machine's
# GPU.
macro(kqview_find_cuda work_dir is_native)
    kqview_nvidia_dirs(KQVIEW_NVIDIA_DIRS)
    kqview_find_nvcc("${KQVIEW_NVIDIA_DIRS}")
    kqview_find_cublas("${KQVIEW_NVIDIA_DIRS}")
    if(${is_native})
        kqview_find_host_compiler("${work_dir}" -arch=native)
    else()
        kqview_find_host_compiler("${work_dir}" "")
    endif()
endmacro()
