# Builds ggml's CUDA backend with what cuda_find.cmake found. Included before llama.cpp is added, by
# the package and by bench/peers. Changes three of ggml's defaults, so that the result can be
# imported, and runs on the CPU, on a machine without a GPU, driver or toolkit:
# - libcudart is linked statically. Nothing else needs it: libcublas has its own.
# - No virtual memory management (GGML_CUDA_NO_VMM): it links libcuda, which only a driver installs.
#   With it, ggml's scratch memory would waste less. If there is a driver or its stub, the option
#   -C cmake.define.GGML_CUDA_NO_VMM=OFF restores it.
# - No NCCL, which would be one more library to find; it matters only if several GPUs share one
# layer.

include(${CMAKE_CURRENT_LIST_DIR}/cuda_find.cmake)

if(NOT Python_EXECUTABLE)
    find_package(Python REQUIRED COMPONENTS Interpreter)
endif()
set(KQVIEW_NVIDIA_DIR "" CACHE PATH "Folder \"nvidia\" of the site-packages with the nvidia-* wheels, if elsewhere")
set(GGML_CUDA_NO_VMM ON CACHE BOOL "")
set(GGML_CUDA_NCCL OFF CACHE BOOL "")

set(is_native OFF)
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND "$ENV{CUDAARCHS}" STREQUAL "")
    if(NOT DEFINED GGML_NATIVE OR GGML_NATIVE)
        set(is_native ON)
    endif()
elseif(CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
    set(is_native ON)
endif()
kqview_find_cuda("${CMAKE_CURRENT_BINARY_DIR}/cuda_find" ${is_native})

set(CMAKE_CUDA_COMPILER "${KQVIEW_NVCC}" CACHE FILEPATH "nvcc")
set(CMAKE_CUDA_HOST_COMPILER "${KQVIEW_CUDA_HOST_COMPILER}" CACHE FILEPATH "C++ compiler that nvcc calls")
if(NOT CUDAToolkit_ROOT)
    set(CUDAToolkit_ROOT "${KQVIEW_CUDA_ROOT}")
endif()
# CMake looks for libcublas.so, but wheels have only libcublas.so.13.
set(CUDA_cublas_LIBRARY "${KQVIEW_CUBLAS_LIBRARY}" CACHE FILEPATH "" FORCE)
set(CUDA_cublasLt_LIBRARY "${KQVIEW_CUBLASLT_LIBRARY}" CACHE FILEPATH "" FORCE)
find_package(CUDAToolkit REQUIRED)
target_include_directories(CUDA::cublas INTERFACE "${KQVIEW_CUBLAS_INCLUDE_DIR}")
if(CUDA_cudart_static_LIBRARY)
    set_target_properties(CUDA::cudart PROPERTIES
        IMPORTED_LOCATION "${CUDA_cudart_static_LIBRARY}"
        INTERFACE_LINK_LIBRARIES CUDA::cudart_static_deps)
endif()
if(NOT GGML_CUDA_NO_VMM AND NOT TARGET CUDA::cuda_driver)
    kqview_cuda_fail("GGML_CUDA_NO_VMM=OFF links libcuda, and there is neither a driver nor the toolkit's stub of it."
        "Leave GGML_CUDA_NO_VMM out, or install the stub (package cuda-driver-dev).")
endif()

# Where the module looks for libcublas at run time: beside kqview in site-packages, where the wheel
# puts it (the extra "cuda"); then, in a build for this machine only, where it was found at build
# time.
get_filename_component(kqview_cublas_dir "${KQVIEW_CUBLAS_LIBRARY}" DIRECTORY)
if(KQVIEW_CUDA_VERSION VERSION_LESS 13)
    set(KQVIEW_CUDA_RPATH "$ORIGIN/../nvidia/cublas/lib")
else()
    string(REGEX MATCH "^[0-9]+" kqview_cuda_major "${KQVIEW_CUDA_VERSION}")
    set(KQVIEW_CUDA_RPATH "$ORIGIN/../nvidia/cu${kqview_cuda_major}/lib")
endif()
if(NOT KQVIEW_PORTABLE)
    list(APPEND KQVIEW_CUDA_RPATH "${kqview_cublas_dir}")
endif()

message(STATUS "CUDA ${KQVIEW_CUDA_VERSION} in ${KQVIEW_CUDA_ROOT}, C++ compiler ${KQVIEW_CUDA_HOST_COMPILER}")
message(STATUS "cuBLAS ${KQVIEW_CUBLAS_VERSION} of the ${KQVIEW_CUBLAS_SOURCE}: ${KQVIEW_CUBLAS_LIBRARY}")
