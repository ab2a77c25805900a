# LibTorch from the torch wheel, through our own imported targets zeroth::torch_cpu and zeroth::c10.
#
# find_package(Torch) is not used: with a CUDA wheel its configuration enables the CUDA language, which fails with
# CMake 3.25 and CUDA 13. Torch is not imported either (seconds, and half a gigabyte); its folder and version are read.
#
# Python: -DPython_EXECUTABLE=..., else build/venv/bin/python of this source tree, else python3.
# In: ZEROTH_TORCH (ON, OFF, AUTO); ZEROTH_TORCH_DIR, the folder of torch where Python does not find it.
# Out: ZEROTH_TORCH_FOUND, _VERSION, _DIR, _PYTHON.
# This file is installed beside ZerothConfig.cmake and used there too.
include_guard(GLOBAL)

set(ZEROTH_TORCH_FOUND OFF)
if(ZEROTH_TORCH STREQUAL "OFF")
  return()
endif()

if(NOT Python_EXECUTABLE)
  if(EXISTS ${CMAKE_CURRENT_LIST_DIR}/../build/venv/bin/python)
    cmake_path(SET ZEROTH_TORCH_PYTHON NORMALIZE ${CMAKE_CURRENT_LIST_DIR}/../build/venv/bin/python)
  else()
    find_program(zeroth_found_python python3 NO_CACHE)
    set(ZEROTH_TORCH_PYTHON ${zeroth_found_python})
  endif()
else()
  set(ZEROTH_TORCH_PYTHON ${Python_EXECUTABLE})
endif()

execute_process(
  COMMAND ${ZEROTH_TORCH_PYTHON} -c "import importlib.util as u, pathlib, runpy
p = pathlib.Path('${ZEROTH_TORCH_DIR}' or u.find_spec('torch').submodule_search_locations[0])
print(p, runpy.run_path(str(p / 'version.py'))['__version__'], sep=';', end='')"
  OUTPUT_VARIABLE zeroth_torch_answer RESULT_VARIABLE zeroth_torch_status ERROR_QUIET)
if(NOT zeroth_torch_status EQUAL 0)
  if(SKBUILD)
    message(FATAL_ERROR
      "${ZEROTH_TORCH_PYTHON} has no torch: pip builds in an environment of its own, where there is none. "
      "Install beside the torch that you have:\n    pip install .")
  endif()
  if(ZEROTH_TORCH STREQUAL "ON")
    message(FATAL_ERROR
      "ZEROTH_TORCH is ON, but ${ZEROTH_TORCH_PYTHON} has no torch. Run tools/setup, or give the Python "
      "that has it by -DPython_EXECUTABLE=..., or build the core alone with -DZEROTH_TORCH=OFF.")
  endif()
  if(NOT CMAKE_FIND_PACKAGE_NAME)  # find_package(Zeroth) has a text of its own
    message(STATUS "torch: not found by ${ZEROTH_TORCH_PYTHON}; the core is built without the LibTorch adapter")
  endif()
  return()
endif()
list(GET zeroth_torch_answer 0 ZEROTH_TORCH_DIR)
list(GET zeroth_torch_answer 1 ZEROTH_TORCH_VERSION)
message(STATUS "torch: ${ZEROTH_TORCH_VERSION} in ${ZEROTH_TORCH_DIR}")
set(ZEROTH_TORCH_FOUND ON)

foreach(zeroth_lib c10 torch_cpu)
  if(NOT TARGET zeroth::${zeroth_lib})
    add_library(zeroth::${zeroth_lib} SHARED IMPORTED GLOBAL)
    set_target_properties(zeroth::${zeroth_lib} PROPERTIES
      IMPORTED_LOCATION ${ZEROTH_TORCH_DIR}/lib/lib${zeroth_lib}.so
      INTERFACE_INCLUDE_DIRECTORIES
      "${ZEROTH_TORCH_DIR}/include;${ZEROTH_TORCH_DIR}/include/torch/csrc/api/include")
  endif()
endforeach()
target_link_libraries(zeroth::torch_cpu INTERFACE zeroth::c10)
# The wheel was built with them; without them its headers declare less.
target_compile_definitions(zeroth::torch_cpu INTERFACE USE_DISTRIBUTED USE_C10D)

# A file that includes torch takes 1.5 GB to compile: no more of them at a time than the memory holds.
cmake_host_system_information(RESULT zeroth_memory_mib QUERY TOTAL_PHYSICAL_MEMORY)
math(EXPR zeroth_torch_jobs "${zeroth_memory_mib} / 2560")
if(zeroth_torch_jobs LESS 1)
  set(zeroth_torch_jobs 1)
endif()
set_property(GLOBAL APPEND PROPERTY JOB_POOLS zeroth_torch=${zeroth_torch_jobs})

# zeroth_use_torch(<target> [PUBLIC])
function(zeroth_use_torch target)
  set(scope PRIVATE)
  if("PUBLIC" IN_LIST ARGN)
    set(scope PUBLIC)
  endif()
  target_link_libraries(${target} ${scope} zeroth::torch_cpu)
  set_target_properties(${target} PROPERTIES JOB_POOL_COMPILE zeroth_torch)
endfunction()
