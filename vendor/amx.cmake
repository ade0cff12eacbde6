# Some compilers (gcc 12.2, for example) drop most of the stores to the block that _tile_loadconfig
# reads; a Q8_0 or Q4 prefill then crashes in ldtilecfg. This check loads such a block and reads it
# back; if that fails, the build leaves AMX out.
if(GGML_NATIVE AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    include(CheckCXXSourceRuns)
    set(CMAKE_REQUIRED_FLAGS "-O2 -march=native")
    check_cxx_source_runs([[
        #if defined(__AMX_INT8__) && defined(__linux__)
        #include <immintrin.h>
        #include <cstring>
        #include <sys/syscall.h>
        #include <unistd.h>
        struct tiles { unsigned char palette, row, gap[14]; unsigned short bytes[16]; unsigned char rows[16]; };
        __attribute__((noinline)) void load() {
            alignas(64) tiles t = {};
            t.palette = 1;
            for (int i = 0; i < 8; ++i) { t.rows[i] = 16; t.bytes[i] = 64; }
            _tile_loadconfig(&t);
        }
        int main() {
            if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) { return 0; }
            load();
            alignas(64) unsigned char back[64];
            std::memset(back, 0xff, sizeof(back));
            _tile_storeconfig(back);
            return back[0] == 1 && back[16] == 64 && back[48] == 16 && back[55] == 16 ? 0 : 1;
        }
        #else
        int main() { return 0; }
        #endif
    ]] KQVIEW_AMX_TILES_LOAD)
    unset(CMAKE_REQUIRED_FLAGS)
    if(NOT KQVIEW_AMX_TILES_LOAD)
        message(STATUS "AMX left out: this compiler does not load its tile configuration")
        target_compile_options(ggml-cpu PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
    endif()
endif()
