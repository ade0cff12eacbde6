# Compiles ggml's AMX code right, for the targets of this folder, or of a TARGET_DIRECTORY: gcc's
# _tile_loadconfig names only 8 of the 64 bytes that the instruction reads, so gcc (12.2, for
# example) drops most of the stores to them, and a prompt of a Q8_0 or Q4 model crashes.
function(kqview_load_amx_tiles)
    get_target_property(backend_dir ggml-cpu SOURCE_DIR)
    set(tiles ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/amx_tiles.h)
    set_source_files_properties(${backend_dir}/ggml-cpu/amx/mmq.cpp ${ARGN} PROPERTIES
        COMPILE_OPTIONS "-include;${tiles}" OBJECT_DEPENDS ${tiles})
endfunction()
