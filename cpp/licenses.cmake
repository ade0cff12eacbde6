# Everything that is linked into the module: its licence goes beside it, in kqview/licenses, and a
# wheel lists it in .dist-info/sboms (vendor/sbom.py): name|version|licence|package URL.

set(linked "llama.cpp|${KQVIEW_LLAMA_COMMIT}|MIT|pkg:github/ggml-org/llama.cpp"
    "llamafile||MIT|pkg:github/mozilla-ai/llamafile")
install(FILES ${KQVIEW_LLAMA_SOURCE}/LICENSE DESTINATION kqview/licenses
    RENAME LICENSE.llama.cpp COMPONENT kqview)

execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.metadata as m; \
print(next((str(f.locate()) for f in m.files('nanobind') or () if f.name == 'LICENSE'), ''))"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_license)
list(APPEND linked "nanobind|${nanobind_VERSION}|BSD-3-Clause|pkg:pypi/nanobind"
    "robin-map||MIT|pkg:github/Tessil/robin-map")
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

# The CUDA runtime is linked in, and parts of its headers (CUB, Thrust) are compiled in.
if(GGML_CUDA)
    list(APPEND linked "cuda|${KQVIEW_CUDA_VERSION}|LicenseRef-NVIDIA-CUDA-EULA|")
    set(wheels)
    foreach(dir IN LISTS KQVIEW_NVIDIA_DIRS)
        list(APPEND wheels "${dir}/../nvidia_cuda_runtime*.dist-info")
    endforeach()
    set(texts "${KQVIEW_CUDA_ROOT}/EULA.txt")
    foreach(dir "${KQVIEW_CUDA_ROOT}/dist-info/nvidia_cuda_runtime*.dist-info" ${wheels})
        list(APPEND texts "${dir}/licenses/License.txt" "${dir}/License.txt")
    endforeach()
    list(APPEND texts /usr/share/doc/nvidia-cuda-toolkit/copyright)
    file(GLOB texts ${texts})
    if(texts)
        list(GET texts 0 cuda_license)
        install(FILES ${cuda_license} DESTINATION kqview/licenses RENAME LICENSE.cuda COMPONENT kqview)
    else()
        message(WARNING "NVIDIA's licence was not found beside its toolkit; add it before handing this build to others")
    endif()
endif()

if(SKBUILD_METADATA_DIR)
    set(sbom ${CMAKE_CURRENT_BINARY_DIR}/kqview.cdx.json)
    execute_process(
        COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/../vendor/sbom.py
            ${sbom} ${SKBUILD_PROJECT_VERSION} ${linked}
        COMMAND_ERROR_IS_FATAL ANY)
    install(FILES ${sbom} DESTINATION ${SKBUILD_METADATA_DIR}/sboms COMPONENT kqview)
endif()
