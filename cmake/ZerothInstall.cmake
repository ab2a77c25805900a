# cmake --install: headers, rooms, the programs that are built, and what find_package(Zeroth) reads. The target
# zeroth_package builds all of it; `make train` and `make train-cpp` build the rooms and some programs.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)

set(zeroth_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Zeroth)
install(DIRECTORY include/zeroth DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
# Some public headers name kernel argument types; they are found through the targets, not by a bare include path.
install(DIRECTORY csrc/kernels DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/zeroth-kernels FILES_MATCHING PATTERN "*.h")

get_property(zeroth_rooms GLOBAL PROPERTY ZEROTH_ROOMS)
get_property(zeroth_core_rooms GLOBAL PROPERTY ZEROTH_ROOMS_core)
get_property(zeroth_libtorch_rooms GLOBAL PROPERTY ZEROTH_ROOMS_libtorch)
get_property(zeroth_programs GLOBAL PROPERTY ZEROTH_PROGRAMS)
get_property(zeroth_libs GLOBAL PROPERTY ZEROTH_LIBS_core)
get_property(zeroth_torch_libs GLOBAL PROPERTY ZEROTH_LIBS_libtorch)

list(TRANSFORM zeroth_rooms PREPEND zeroth_ OUTPUT_VARIABLE zeroth_room_targets)
add_custom_target(zeroth_package DEPENDS ${zeroth_room_targets} ${zeroth_programs})

# The first rule of the installation (CMakeLists.txt) runs this: nothing is installed of a build that lacks a room.
list(TRANSFORM zeroth_room_targets REPLACE "(.+)" "$<TARGET_FILE:\\1>" OUTPUT_VARIABLE zeroth_room_files)
file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/require_rooms.cmake CONTENT "\
foreach(file IN ITEMS ${zeroth_room_files})
  if(NOT EXISTS \"\${file}\")
    message(FATAL_ERROR
      \"There is no \${file} yet, so there is nothing to install. Build first:\\n\"
      \"    cmake --build ${PROJECT_BINARY_DIR} --target zeroth_package\")
  endif()
endforeach()
")

# Static libraries pass their outside libraries on to whoever links them: fmt::fmt is looked for as fmt, and so on.
set(ZEROTH_DEPENDENCIES)
foreach(lib IN LISTS zeroth_libs zeroth_torch_libs)
  if(lib MATCHES "^([A-Za-z0-9_]+)::")
    list(APPEND ZEROTH_DEPENDENCIES ${CMAKE_MATCH_1})
  endif()
endforeach()
list(REMOVE_DUPLICATES ZEROTH_DEPENDENCIES)
list(REMOVE_ITEM ZEROTH_DEPENDENCIES zeroth)
list(JOIN zeroth_rooms " " ZEROTH_INSTALLED_ROOMS)
list(JOIN ZEROTH_DEPENDENCIES " " ZEROTH_DEPENDENCIES)

configure_package_config_file(cmake/ZerothConfig.cmake.in ${PROJECT_BINARY_DIR}/ZerothConfig.cmake
  INSTALL_DESTINATION ${zeroth_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/ZerothConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ZerothConfig.cmake ${PROJECT_BINARY_DIR}/ZerothConfigVersion.cmake
  DESTINATION ${zeroth_package_dir})

if(zeroth_core_rooms)
  install(EXPORT zeroth-core NAMESPACE zeroth:: DESTINATION ${zeroth_package_dir})
endif()
if(zeroth_libtorch_rooms)
  install(EXPORT zeroth-libtorch NAMESPACE zeroth:: DESTINATION ${zeroth_package_dir})
  install(FILES cmake/ZerothTorch.cmake DESTINATION ${zeroth_package_dir})
endif()
