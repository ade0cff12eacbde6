# Adds llama.cpp's pinned source unmodified, as static libraries.
# Changes its behaviour from outside:
# - four calls of the `llama` target are renamed, so that the tap can hook in (cpp/tap/tap.cpp);
# - its RPC client gets kqview's socket (cpp/llama/rpc_transport.cpp);
# - its aborts become exceptions (cpp/llama/backend.h);
# - caches whose keys are not rotated are moved without the rotation (kv_cache_rotation.h);
# - memory of caches on the host comes in huge pages, as it is used (cpp/llama/cache_pages.cpp);
# - kqview's matcher evaluates its regular expressions (unicode_regex.h);
# - its graphs are computed by kqview's compute pool (cpp/llama/openmp.cpp).

include(${CMAKE_CURRENT_LIST_DIR}/llama_source.cmake)

set(BUILD_SHARED_LIBS OFF)
foreach(part COMMON TESTS TOOLS EXAMPLES SERVER APP)
    set(LLAMA_BUILD_${part} OFF CACHE BOOL "" FORCE)
endforeach()
if(KQVIEW_PORTABLE)
    set(GGML_NATIVE OFF CACHE BOOL "" FORCE)
    # Each level is an object of its own (cpu_variants.cmake); the rest is for all processors.
    if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|aarch64)$")
        set(KQVIEW_CPU_VARIANTS ON)
        set(KQVIEW_PROCESSOR ${CMAKE_SYSTEM_PROCESSOR})
        foreach(feature SSE42 AVX AVX2 BMI2 FMA F16C)
            set(GGML_${feature} OFF CACHE BOOL "" FORCE)
        endforeach()
    elseif(WIN32)  # one level, of Haswell and Zen (cpp/base/cpu_variant.cpp)
        set(KQVIEW_CPU_FLAGS -march=x86-64-v3)
        foreach(feature SSE42 AVX AVX2 BMI2 FMA F16C)
            set(GGML_${feature} ON CACHE BOOL "" FORCE)
        endforeach()
        add_compile_definitions(KQVIEW_CPU_LEVEL="x86-64-v3")
    endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(arm|aarch64)")
    set(KQVIEW_CPU_FLAGS -mcpu=native)  # Apple's clang before version 15 knows no -march=native
else()
    set(KQVIEW_CPU_FLAGS -march=native)
endif()

# Windows aligns stacks to 16 bytes, and gcc saves AVX registers there as if to 32 (its bug 54412).
if(MINGW)
    add_compile_options(-Wa,-muse-unaligned-vector-move)
endif()

# For layers on other machines. RDMA would become a run-time dependency if the build machine has its
# library.
set(GGML_RPC ON CACHE BOOL "" FORCE)
set(GGML_RPC_RDMA OFF CACHE BOOL "" FORCE)
if(GGML_CUDA)
    include(${CMAKE_CURRENT_LIST_DIR}/cuda.cmake)
endif()
# Whose OpenMP directives kqview's compute pool answers, below. ggml's own threads with another
# compiler's sanitizer: it does not understand the barriers of OpenMP runtimes.
if(CMAKE_C_COMPILER_ID STREQUAL "GNU" OR (CMAKE_C_COMPILER_ID STREQUAL "Clang" AND NOT APPLE))
    set(KQVIEW_COMPUTE_POOL ON)
endif()
if(KQVIEW_COMPUTE_POOL OR KQVIEW_SANITIZE)
    set(GGML_OPENMP OFF CACHE BOOL "" FORCE)
endif()

add_subdirectory(${KQVIEW_LLAMA_SOURCE} llama.cpp EXCLUDE_FROM_ALL SYSTEM)

if(GGML_CUDA)
    get_target_property(KQVIEW_CUDA_ARCHITECTURES ggml-cuda CUDA_ARCHITECTURES)
    list(JOIN KQVIEW_CUDA_ARCHITECTURES "," KQVIEW_CUDA_ARCHITECTURES)
endif()

# Older headers of mingw-w64 (Debian 12) lack what keeps Windows 11 from slowing threads down.
if(MINGW)
    include(CheckSymbolExists)
    check_symbol_exists(THREAD_POWER_THROTTLING_EXECUTION_SPEED windows.h KQVIEW_KNOWS_THROTTLING)
    if(NOT KQVIEW_KNOWS_THROTTLING)
        set_source_files_properties(${KQVIEW_LLAMA_SOURCE}/ggml/src/ggml-cpu/ggml-cpu.c
            TARGET_DIRECTORY ggml-cpu PROPERTIES COMPILE_DEFINITIONS _WIN32_WINNT=0x0601)
    endif()
endif()

include(${CMAKE_CURRENT_LIST_DIR}/amx.cmake)
kqview_load_amx_tiles(TARGET_DIRECTORY ggml-cpu)

# With AVX512-FP16 ggml adds up V in vectors of 128 values, and heads of other sizes value by value:
# with llama.cpp's flash attention of heads of 64 a token at 4,096 took 2.1 times as long, one with
# heads of 128 0.9. Attention of kqview's own needs neither. No level of a wheel has it.
include(CheckCCompilerFlag)
check_c_compiler_flag(-mno-avx512fp16 KQVIEW_KNOWS_AVX512FP16)
if(KQVIEW_KNOWS_AVX512FP16 AND NOT KQVIEW_PORTABLE)
    target_compile_options(ggml-cpu PRIVATE -mno-avx512fp16)
endif()

target_compile_definitions(llama PRIVATE
    ggml_backend_sched_alloc_graph=kqview_sched_alloc_graph
    ggml_backend_sched_graph_compute_async=kqview_sched_graph_compute_async
    ggml_backend_sched_reserve=kqview_sched_reserve
    ggml_backend_sched_reserve_size=kqview_sched_reserve_size)

# Replaces the RPC client's socket by cpp/llama/rpc_transport.cpp: with llama.cpp's own, a server
# that goes away ends the process.
set_source_files_properties(${KQVIEW_LLAMA_SOURCE}/ggml/src/ggml-rpc/ggml-rpc.cpp
    TARGET_DIRECTORY ggml-rpc PROPERTIES COMPILE_DEFINITIONS socket_t=kqview_rpc_socket_t)

# Only this file: elsewhere llama.cpp checks for a rotation first.
set_source_files_properties(${KQVIEW_LLAMA_SOURCE}/src/llama-kv-cache.cpp
    TARGET_DIRECTORY llama PROPERTIES
    COMPILE_OPTIONS "-include;${CMAKE_CURRENT_LIST_DIR}/kv_cache_rotation.h"
    OBJECT_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/kv_cache_rotation.h)

# A cache, and the buffer of a context's outputs, is cleared once it is allocated, which would take
# memory for all of it (cpp/llama/cache_pages.cpp).
foreach(cache kv-cache kv-cache-dsv4 memory-recurrent context)
    set_source_files_properties(${KQVIEW_LLAMA_SOURCE}/src/llama-${cache}.cpp TARGET_DIRECTORY llama
        PROPERTIES COMPILE_DEFINITIONS ggml_backend_buffer_clear=kqview_backend_buffer_clear)
endforeach()

# llama.cpp joins only the files of its models, sixteen at a time. So are, of the others, the small
# ones that spend most of their time on headers and have no compiler options of their own.
if(KQVIEW_UNITY)
    foreach(file llama llama-adapter llama-arch llama-batch llama-chat llama-cparams llama-hparams
            llama-impl llama-io llama-kv-cache-dsa llama-kv-cache-dsa-iswa llama-kv-cache-iswa
            llama-kv-cache-msa llama-memory llama-memory-hybrid llama-memory-hybrid-idx
            llama-memory-hybrid-iswa llama-mmap llama-model-saver unicode-data)
        set_source_files_properties(${KQVIEW_LLAMA_SOURCE}/src/${file}.cpp TARGET_DIRECTORY llama
            PROPERTIES SKIP_UNITY_BUILD_INCLUSION OFF)
    endforeach()
endif()

# On kqview's threads, an abort of ggml is an exception (cpp/llama/backend.h), which must unwind
# through C code. It must not leave the CPU's compute threads, so the CPU backend computes graphs
# through a kqview function that marks this.
foreach(target ggml-base ggml-cpu)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:C>:-fexceptions>)
endforeach()
set_source_files_properties(${KQVIEW_LLAMA_SOURCE}/ggml/src/ggml-cpu/ggml-cpu.cpp
    TARGET_DIRECTORY ggml-cpu PROPERTIES COMPILE_DEFINITIONS ggml_graph_compute=kqview_cpu_graph_compute)

# What gcc and clang compile OpenMP to is answered by kqview's compute pool (cpp/llama/openmp.cpp),
# which knows the directives of graphs. The other ones, in ggml-base's tables for quantising to IQ2
# and IQ3, are left out.
if(KQVIEW_COMPUTE_POOL)
    target_compile_definitions(ggml-cpu PRIVATE GGML_USE_OPENMP)
    target_compile_options(ggml-cpu PRIVATE -fopenmp)
    target_include_directories(ggml-cpu PRIVATE ${CMAKE_CURRENT_LIST_DIR}/openmp)
endif()

# std::regex recurses for every character of a run, so a long word ends the process.
set(kqview_regex ${CMAKE_CURRENT_LIST_DIR}/unicode_regex.h)
set_source_files_properties(${KQVIEW_LLAMA_SOURCE}/src/unicode.cpp TARGET_DIRECTORY llama PROPERTIES
    COMPILE_OPTIONS "-I${CMAKE_CURRENT_SOURCE_DIR}/cpp;-include;${kqview_regex}"
    OBJECT_DEPENDS "${kqview_regex};${CMAKE_CURRENT_SOURCE_DIR}/cpp/base/token_regex.h")

# kqview does not quantise models, and nothing else refers to this file.
get_target_property(kqview_llama_files llama SOURCES)
list(REMOVE_ITEM kqview_llama_files llama-quant.cpp)
set_property(TARGET llama PROPERTY SOURCES ${kqview_llama_files})

# Most of the library describes graphs, or reads a file once. That is compiled with fewer
# optimisations, in two thirds of the time; what works on each token is compiled with all.
if(CMAKE_BUILD_TYPE STREQUAL "Release" AND NOT MSVC)
    target_compile_options(llama PRIVATE -O1)
    foreach(file llama-context llama-graph llama-kv-cache llama-kv-cache-dsv4 llama-memory-recurrent
            llama-sampler llama-vocab unicode)
        set_property(SOURCE ${KQVIEW_LLAMA_SOURCE}/src/${file}.cpp TARGET_DIRECTORY llama
            APPEND PROPERTY COMPILE_OPTIONS -O3)
    endforeach()
endif()
