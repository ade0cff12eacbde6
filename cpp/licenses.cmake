# Everything that is linked into the library of a package: its licence goes into the package's
# folder licenses, and a wheel lists it in .dist-info/sboms (vendor/sbom.py):
# name|version|licence|package URL. Included for kqview, and for each package of vendor/backends.

set(licenses ${SKBUILD_PROJECT_NAME}/licenses)
set(linked "llama.cpp|${KQVIEW_LLAMA_COMMIT}|MIT|pkg:github/ggml-org/llama.cpp")
install(FILES ${KQVIEW_LLAMA_SOURCE}/LICENSE DESTINATION ${licenses}
    RENAME LICENSE.llama.cpp COMPONENT kqview)

# Installs the first of these files that exists.
function(kqview_install_license name)
    file(GLOB texts ${ARGN})
    if(texts)
        list(GET texts 0 text)
        install(FILES ${text} DESTINATION ${licenses} RENAME LICENSE.${name} COMPONENT kqview)
    else()
        message(WARNING "The licence of ${name} was not found beside it; add it before handing this build to others")
    endif()
endfunction()

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
        install(FILES ${CMAKE_CURRENT_BINARY_DIR}/LICENSE.${name} DESTINATION ${licenses} COMPONENT kqview)
    endif()
endfunction()
if(TARGET ggml-cpu)
    list(APPEND linked "llamafile||MIT|pkg:github/mozilla-ai/llamafile")
    kqview_install_head_license(llamafile ${KQVIEW_LLAMA_SOURCE}/ggml/src/ggml-cpu/llamafile/sgemm.cpp)
endif()
if(NB_DIR)
    list(APPEND linked "nanobind|${nanobind_VERSION}|BSD-3-Clause|pkg:pypi/nanobind"
        "robin-map||MIT|pkg:github/Tessil/robin-map")
    execute_process(
        COMMAND ${Python_EXECUTABLE} -c "import importlib.metadata as m; \
print(next((str(f.locate()) for f in m.files('nanobind') or () if f.name == 'LICENSE'), ''))"
        OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_license)
    kqview_install_license(nanobind ${nanobind_license})
    kqview_install_head_license(robin_map ${NB_DIR}/ext/robin_map/include/tsl/robin_map.h)
endif()

# The CUDA runtime is linked in, and parts of its headers (CUB, Thrust) are compiled in.
if(GGML_CUDA)
    list(APPEND linked "cuda|${KQVIEW_CUDA_VERSION}|LicenseRef-NVIDIA-CUDA-EULA|")
    set(places "${KQVIEW_CUDA_ROOT}/dist-info")
    foreach(dir IN LISTS KQVIEW_NVIDIA_DIRS)
        list(APPEND places "${dir}/..")
    endforeach()
    list(TRANSFORM places APPEND "/nvidia_cuda_runtime*.dist-info")
    set(texts "${KQVIEW_CUDA_ROOT}/EULA.txt")
    foreach(place IN LISTS places)
        list(APPEND texts "${place}/licenses/License.txt" "${place}/License.txt")
    endforeach()
    kqview_install_license(cuda ${texts} /usr/share/doc/nvidia-cuda-toolkit/copyright)
endif()

# Its headers' C++ is compiled in.
if(GGML_VULKAN)
    list(APPEND linked "vulkan-headers||Apache-2.0 OR MIT|pkg:github/KhronosGroup/Vulkan-Headers")
    kqview_install_license(vulkan ${Vulkan_INCLUDE_DIR}/../share/doc/libvulkan-dev/copyright
        ${Vulkan_INCLUDE_DIR}/../share/licenses/vulkan-headers/*)
endif()

if(SKBUILD_METADATA_DIR)
    set(sbom ${CMAKE_CURRENT_BINARY_DIR}/${SKBUILD_PROJECT_NAME}.cdx.json)
    string(REPLACE "_" "-" name ${SKBUILD_PROJECT_NAME})
    execute_process(
        COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/../vendor/sbom.py
            ${sbom} ${name} ${SKBUILD_PROJECT_VERSION} ${linked}
        COMMAND_ERROR_IS_FATAL ANY)
    install(FILES ${sbom} DESTINATION ${SKBUILD_METADATA_DIR}/sboms COMPONENT kqview)
endif()
