# ZEROTH_SANITIZE: "" or "address,undefined" or "thread". Reports end the test; there are no suppressions.
include_guard(GLOBAL)

set(ZEROTH_SANITIZE "" CACHE STRING "Sanitizers for all of our targets: empty, address,undefined or thread")
set_property(CACHE ZEROTH_SANITIZE PROPERTY STRINGS "" "address,undefined" "thread")
if(NOT ZEROTH_SANITIZE MATCHES "^(|address,undefined|thread)$")
  message(FATAL_ERROR "ZEROTH_SANITIZE is \"${ZEROTH_SANITIZE}\"; it is empty, \"address,undefined\" or \"thread\"")
endif()

function(zeroth_set_sanitizers target)
  if(NOT ZEROTH_SANITIZE)
    return()
  endif()
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${ZEROTH_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all;-g1;-O1>)
  target_link_options(${target} PRIVATE -fsanitize=${ZEROTH_SANITIZE})
endfunction()
