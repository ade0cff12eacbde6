# A build for any machine (KQVIEW_PORTABLE) holds ggml's CPU backend and kqview's own kernels once
# for each level of the processor, and uses the best one it has (cpp/base/cpu_variant.h).
# vendor/cpu_variants.py says how they live in one module. Included by cpp/CMakeLists.txt, whose
# directory has the source files' properties and the module.
#
# A level: its name, what the compiler is told, and when a processor has it. The lowest comes first,
# and each one includes what the one before it has, except that AVX2 may have VNNI without AVX-512.

set(KQVIEW_CPU_LEVELS "" CACHE STRING "CPU levels of a portable build, lowest first; empty: all (developers)")
set(levels)
macro(kqview_cpu_level name flags)
    list(APPEND levels ${name})
    set(flags_${name} ${flags})
    set(needs_${name} ${ARGN})
endmacro()
if(KQVIEW_PROCESSOR STREQUAL "x86_64")
    set(vnni -mavx512vnni -mavx512vbmi)
    set(amx -mamx-tile -mamx-int8 -mamx-bf16)
    # What CPUID answers: leaf, subleaf, register (0 is EAX), and the bits that must be set; and
    # those of XCR0: registers that the system saves. Compilers' own names of features differ.
    set(needs_v2 "1, 0, 2, 0x982201, 0"  # SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT
        "0x80000001, 0, 2, 1, 0")  # LAHF
    set(needs_v3 ${needs_v2} "1, 0, 2, 0x38401000, 6"  # FMA, MOVBE, OSXSAVE, AVX, F16C
        "7, 0, 1, 0x128, 6" "0x80000001, 0, 2, 0x20, 0")  # BMI, AVX2, BMI2; LZCNT
    set(needs_v4 ${needs_v3} "7, 0, 1, 0xd0030000, 0xe6")  # AVX-512 F, DQ, CD, BW, VL
    set(needs_vnni ${needs_v4} "7, 0, 2, 0x802, 0xe6")  # VBMI, VNNI
    set(needs_bf16 ${needs_vnni} "7, 1, 0, 0x20, 0xe6")
    kqview_cpu_level(sse42 "-march=x86-64-v2" ${needs_v2})
    kqview_cpu_level(avx2 "-march=x86-64-v3" ${needs_v3})
    kqview_cpu_level(avx2_vnni "-march=x86-64-v3;-mavxvnni" ${needs_v3} "7, 1, 0, 0x10, 6")
    kqview_cpu_level(avx512 "-march=x86-64-v4" ${needs_v4})
    kqview_cpu_level(avx512_vnni "-march=x86-64-v4;${vnni}" ${needs_vnni})
    kqview_cpu_level(avx512_bf16 "-march=x86-64-v4;${vnni};-mavx512bf16" ${needs_bf16})
    kqview_cpu_level(amx "-march=x86-64-v4;${vnni};-mavx512bf16;${amx}"
        ${needs_bf16} "7, 0, 3, 0x3400000, 0x600e6")  # BF16, TILE, INT8
    set(condition "kqview_has_cpuid(@)")
else()
    kqview_cpu_level(armv8 "-march=armv8-a" "AT_HWCAP, 1 << 1")
    kqview_cpu_level(dotprod "-march=armv8.2-a+dotprod+fp16" "AT_HWCAP, 1 << 10" "AT_HWCAP, 1 << 20")
    kqview_cpu_level(i8mm "-march=armv8.2-a+dotprod+fp16+i8mm"
        "AT_HWCAP, 1 << 10" "AT_HWCAP, 1 << 20" "AT_HWCAP2, 1 << 13")
    # No level has SVE: with it, llama.cpp's flash attention is less exact than EXACTNESS.md allows
    # (RELEASING.md). Bits of the kernel's interface: ASIMD, ASIMDHP, ASIMDDP; of the second word
    # I8MM.
    set(condition "kqview_has_hwcap(@)")
endif()
if(KQVIEW_CPU_LEVELS)
    set(levels ${KQVIEW_CPU_LEVELS})
endif()

get_target_property(backend_dir ggml-cpu SOURCE_DIR)
get_target_property(backend_sources ggml-cpu SOURCES)
list(FILTER backend_sources INCLUDE REGEX "\\.(c|cpp)$")
list(TRANSFORM backend_sources PREPEND ${backend_dir}/)
# The target itself is compiled for no level; ggml's registry must link to something.
set_property(TARGET ggml-cpu PROPERTY SOURCES ggml-cpu/hbm.cpp)

set_source_files_properties(${backend_dir}/ggml-cpu/ggml-cpu.cpp PROPERTIES
    COMPILE_DEFINITIONS ggml_graph_compute=kqview_cpu_graph_compute)
kqview_load_amx_tiles()

set(out ${CMAKE_CURRENT_BINARY_DIR}/cpu_variants)
set(arguments)
set(objects)
set(depends)
foreach(level IN LISTS levels)
    set(target kqview_cpu_${level})
    add_library(${target} OBJECT EXCLUDE_FROM_ALL ${backend_sources} ${KQVIEW_KERNEL_SOURCES})
    target_compile_definitions(${target} PRIVATE $<TARGET_PROPERTY:ggml-cpu,COMPILE_DEFINITIONS>)
    target_include_directories(${target} SYSTEM PRIVATE $<TARGET_PROPERTY:ggml-cpu,INCLUDE_DIRECTORIES>
        ${backend_dir} ${backend_dir}/ggml-cpu ${backend_dir}/../include)
    target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
    # The compiler's unique symbols would be one for all levels.
    target_compile_options(${target} PRIVATE ${flags_${level}} -w $<$<COMPILE_LANGUAGE:C>:-fexceptions>
        $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique>)
    if(KQVIEW_COMPUTE_POOL)
        target_compile_options(${target} PRIVATE -fopenmp)
    endif()
    file(GENERATE OUTPUT ${out}/${level}.txt CONTENT "$<JOIN:$<TARGET_OBJECTS:${target}>,\n>\n")
    set(all)
    foreach(need IN LISTS needs_${level})
        string(REPLACE "@" "${need}" term "${condition}")
        list(APPEND all "${term}")
    endforeach()
    list(JOIN all " && " all)
    list(APPEND arguments "${level}|${all}|${out}/${level}.txt")
    list(APPEND objects ${out}/${level}.o)
    list(APPEND depends $<TARGET_OBJECTS:${target}>)
endforeach()

set(outside $<TARGET_OBJECTS:kqview_core> $<TARGET_FILE:llama> $<TARGET_FILE:ggml> $<TARGET_FILE:ggml-base>)
file(GENERATE OUTPUT ${out}/outside.txt CONTENT "$<JOIN:${outside},\n>\n")
add_custom_command(
    OUTPUT ${objects} ${out}/cpu_variants.c
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/cpu_variants.py ${out} ${KQVIEW_PROCESSOR}
        ${CMAKE_LINKER} ${CMAKE_NM} ${CMAKE_OBJCOPY} ${out}/outside.txt ${arguments}
    DEPENDS ${CMAKE_CURRENT_LIST_DIR}/cpu_variants.py ${out}/outside.txt ${outside} ${depends}
    VERBATIM)
set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
target_sources(_core PRIVATE ${objects} ${out}/cpu_variants.c)
