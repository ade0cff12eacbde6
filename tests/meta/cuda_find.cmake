# Runs vendor/cuda_find.cmake without a project; tests/meta/test_cuda_build.py passes the variables.
cmake_policy(VERSION 3.20...3.26)  # of the project, or of an older CMake on the PATH what it has of them
include(${CMAKE_CURRENT_LIST_DIR}/../../vendor/cuda_find.cmake)
kqview_find_cuda("${WORK_DIR}" ${IS_NATIVE})
foreach(name NVCC CUDA_VERSION CUDA_ROOT CUDA_HOST_COMPILER CUBLAS_LIBRARY CUBLAS_INCLUDE_DIR CUBLAS_VERSION
        CUBLAS_SOURCE)
    message("${name}=${KQVIEW_${name}}")
endforeach()
