# Puts the licence of everything that is linked into the module beside it, in kqview/licenses.

install(FILES ${KQVIEW_LLAMA_SOURCE}/LICENSE DESTINATION kqview/licenses
    RENAME LICENSE.llama.cpp COMPONENT kqview)

execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.metadata as m; \
print(next((str(f.locate()) for f in m.files('nanobind') or () if f.name == 'LICENSE'), ''))"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_license)
if(nanobind_license)
    install(FILES ${nanobind_license} DESTINATION kqview/licenses RENAME LICENSE.nanobind COMPONENT kqview)
else()
    message(WARNING "nanobind's licence was not found beside it; add it before handing this build to others")
endif()

# Some parts have their licence only as the first comment of a source file.
function(kqview_install_head_license name source)
    if(EXISTS ${source})
        file(READ ${source} text LIMIT 4096)
        string(FIND "${text}" "SOFTWARE.\n" end)
        if(end EQUAL -1)
            message(FATAL_ERROR "${source} does not start with its licence; correct cpp/licenses.cmake")
        endif()
        string(SUBSTRING "${text}" 0 ${end} text)
        file(CONFIGURE OUTPUT LICENSE.${name} CONTENT "${text}SOFTWARE.\n" @ONLY)
        install(FILES ${CMAKE_CURRENT_BINARY_DIR}/LICENSE.${name} DESTINATION kqview/licenses COMPONENT kqview)
    endif()
endfunction()
kqview_install_head_license(llamafile ${KQVIEW_LLAMA_SOURCE}/ggml/src/ggml-cpu/llamafile/sgemm.cpp)
kqview_install_head_license(robin_map ${NB_DIR}/ext/robin_map/include/tsl/robin_map.h)
