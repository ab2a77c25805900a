# ZEROTH_SANITIZE: "" or "address,undefined" or "thread". Reports end the test; there are no suppressions.
include_guard(GLOBAL)

set(ZEROTH_SANITIZE "" CACHE STRING "Sanitizers for all of our targets: empty, address,undefined or thread")
set_property(CACHE ZEROTH_SANITIZE PROPERTY STRINGS "" "address,undefined" "thread")
if(NOT ZEROTH_SANITIZE MATCHES "^(|address,undefined|thread)$")
  message(FATAL_ERROR "ZEROTH_SANITIZE is \"${ZEROTH_SANITIZE}\"; it is empty, \"address,undefined\" or \"thread\"")
endif()

# Every object counts its branches for libFuzzer; the targets of tests/fuzz are linked with its main().
option(ZEROTH_FUZZ "Fuzz targets for clang's libFuzzer" OFF)
if(ZEROTH_FUZZ AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR
    "ZEROTH_FUZZ needs clang, which has libFuzzer (Debian: apt-get install clang); "
    "the compiler is ${CMAKE_CXX_COMPILER}")
endif()

# What a sanitized build costs is code that the compiler adds. Left out: `null` and `object-size`, whose faults the
# address sanitizer reports too, and `vptr`, a call through a pointer to another class than it says, which needs a cast
# that we do not have.
function(zeroth_set_sanitizers target)
  if(NOT ZEROTH_SANITIZE)
    return()
  endif()
  set(options -fsanitize=${ZEROTH_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g1 -O1)
  if(ZEROTH_SANITIZE MATCHES undefined)
    list(APPEND options -fno-sanitize=null,object-size,vptr)
  endif()
  if(ZEROTH_FUZZ)
    list(APPEND options -fsanitize=fuzzer-no-link -Wno-unknown-warning-option)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${options}>")
  target_link_options(${target} PRIVATE -fsanitize=${ZEROTH_SANITIZE})
endfunction()
