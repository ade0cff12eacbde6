# Obtains llama.cpp's pinned source (vendor/fetch.py): sets KQVIEW_LLAMA_SOURCE, its folder, and
# KQVIEW_LLAMA_COMMIT.

execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/fetch.py --print-path
    OUTPUT_VARIABLE KQVIEW_LLAMA_SOURCE
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE kqview_fetch_result)
if(NOT kqview_fetch_result EQUAL 0)
    message(FATAL_ERROR "llama.cpp's source could not be obtained; the line above says why and what to do")
endif()
message(STATUS "llama.cpp source: ${KQVIEW_LLAMA_SOURCE}")

file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/llama.lock.toml kqview_commit_line REGEX "^commit *=")
string(REGEX MATCH "[0-9a-f]+\"" KQVIEW_LLAMA_COMMIT "${kqview_commit_line}")
string(REPLACE "\"" "" KQVIEW_LLAMA_COMMIT "${KQVIEW_LLAMA_COMMIT}")
if(NOT "$ENV{KQVIEW_LLAMA_CPP_DIR}" STREQUAL "")
    set(KQVIEW_LLAMA_COMMIT "unpinned (KQVIEW_LLAMA_CPP_DIR)")
endif()
