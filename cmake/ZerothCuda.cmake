# ZEROTH_CUDA: AUTO (where nvcc is found), ON, OFF. Builds the module library zeroth_cuda, which is loaded at run time,
# so that nothing else needs a CUDA library.
include_guard(GLOBAL)

set(ZEROTH_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO (where nvcc is found), ON, OFF")
set_property(CACHE ZEROTH_CUDA PROPERTY STRINGS AUTO ON OFF)
set(ZEROTH_CUDA_FOUND OFF)
if(ZEROTH_CUDA STREQUAL "OFF")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  find_program(ZEROTH_NVCC nvcc PATHS /usr/local/cuda/bin)
  mark_as_advanced(ZEROTH_NVCC)
  if(ZEROTH_NVCC)
    set(CMAKE_CUDA_COMPILER ${ZEROTH_NVCC})
  endif()
endif()
if(NOT CMAKE_CUDA_COMPILER)
  if(ZEROTH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ZEROTH_CUDA is ON, but there is no nvcc: put it on PATH or set CMAKE_CUDA_COMPILER")
  endif()
  message(STATUS "nvcc: not found; the CUDA kernels are not built")
  return()
endif()

# Set before the language is enabled: CMake's own default is an architecture that nvcc 13 no longer knows.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90")
endif()
enable_language(CUDA)
set(ZEROTH_CUDA_FOUND ON)

# zeroth_add_cuda_module(SOURCES a.cu ...)
# CUDA_STANDARD stays unset: CMake 3.25 knows no CUDA 20 and would add -std=c++17 behind our -std=c++20.
function(zeroth_add_cuda_module)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "SOURCES")
  add_library(zeroth_cuda MODULE ${arg_SOURCES})
  set_target_properties(zeroth_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static POSITION_INDEPENDENT_CODE ON)
  target_include_directories(zeroth_cuda PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/csrc)
  # A module may be linked with symbols missing; then it could not be loaded.
  target_link_options(zeroth_cuda PRIVATE -Wl,-z,defs)
  # -fmad=false: the same bits as the CPU kernels, which are built with -ffp-contract=off. --no-compress: the test
  # cuda_ptx reads the PTX that drivers of other devices will compile; the module is a quarter larger.
  target_compile_options(zeroth_cuda PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-fmad=false;--no-compress;-Xcompiler=-ffp-contract=off,-Wall,-Wextra>)
endfunction()
