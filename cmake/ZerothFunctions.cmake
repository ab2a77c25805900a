# The functions that every folder of Zeroth uses to declare what it builds.
#
#   zeroth_add_room(<room> SOURCES a.cpp ... [DEPS base device ...] [LIBS fmt::fmt ...] [TORCH])
#       Static, position independent library `zeroth_<room>` with the alias `zeroth::<room>`.
#       DEPS are rooms and must be lower (see ZEROTH_ROOM_LEVELS); LIBS are private outside libraries.
#   zeroth_add_program(<name> SOURCES ... ROOMS ... [LIBS ...] [TORCH])
#       Executable placed in ZEROTH_BIN_DIR and installed if it is built; not built with sanitizers: programs are not
#       the core, and their tests measure processes as they are.
#   zeroth_add_program_parts(<name> SOURCES ... ROOMS ... [LIBS ...])
#       Static library `zeroth_<name>_parts`: what a program is made of, for it, its tests and other programs.
#   zeroth_add_test(<name> SOURCES ... ROOMS ... [LIBS ...] [LABELS unit|conformance|parity|process]
#                   [TIER quick|test|long] [COST core-seconds] [LONG core-seconds]
#                   [TIMEOUT seconds] [SANITIZED_FILTER <gtest filter>] [SANITIZED_COST core-seconds]
#                   [SANITIZED_LONG <gtest filter>|none]
#                   [ONE_THREAD] [OPTIMIZED] [WAITS]
#                   [TORCH] [NO_MAIN])
#       One GoogleTest executable that is one ctest test. The default label is unit, the default timeout 120 s.
#       TIER says which command runs it: quick is make test-quick and make test, test (the default) is make test, long
#       is make test-all. COST declares its processor time on one core, default 1; tools/run-tests holds the sum within
#       the limits of tests/budget.json. LONG: cases whose name begins with `Long` (INSTANTIATE_TEST_SUITE_P(Long, ...),
#       TEST(Long..., )) are a ctest test <name>_long of the long tier, of that cost, and are left out of <name>. Under
#       a sanitizer SANITIZED_FILTER says which cases are enough, SANITIZED_COST what these cost without one (COST
#       without it; a sanitizer multiplies both), SANITIZED_LONG which of the long tier ("Long*" without it), and the
#       thread sanitizer needs no test that is ONE_THREAD: nothing in it is touched by a second thread.
#       OPTIMIZED is for tests that compute much: they run long where sanitizers watch code that is not. WAITS is for
#       tests whose ranks sleep most of the time, until a deadline or a death is noticed: some of them run beside each
#       other.
#   zeroth_add_test_variant(<name> <test> FILTER <gtest filter> ENVIRONMENT VAR=value [LABELS ...] [TIER ...]
#                           [COST ...])
#       Some cases of a test once more, with variables set; a ctest test of its own. Not under sanitizers.
#   zeroth_add_mpi_test(<name> <test> RANKS n FILTER <gtest filter> [LABELS ...] [TIER ...] [COST ...]
#                       [TIMEOUT seconds])
#       Some cases of a test once more, by n ranks that mpirun starts; left out without MPI.
#   zeroth_add_script_test(<name> COMMAND ... [LABELS ...] [TIER ...] [COST ...] [LONG ...] [TIMEOUT seconds]
#                          [WAITS | BESIDE])
#       One ctest test that is a script; exit code 77 with a line "SKIPPED: reason" skips it. With LONG, <name>_long is
#       the same command with ZEROTH_TIER=long in its environment: the script then runs the cases of the long tier
#       alone. BESIDE is for tests of processes in which nothing has little time: two of them run beside each other.
#       What a test of processes leaves, as one of mpirun, is a failure.
#   zeroth_add_benchmark(<name> SOURCES ... ROOMS ... [LIBS ...] [TORCH])
#       Google Benchmark executable under <build>/benchmarks; without benchmark::benchmark_main with NO_MAIN. Built by
#       the target `benchmarks`, not by `all`.
#
# TORCH marks a target that uses LibTorch; where torch was not found it is left out.

include_guard(GLOBAL)
include(GNUInstallDirs)

# Levels of the rooms: a room may depend on rooms of a lower level only. tests/layers holds the same order for includes.
set(ZEROTH_ROOM_LEVELS
  base=0 device=1 hosts=1 io=2 kernels=2 program=2 comm=3 compute=3 offload=3 checkpoint=4 optim=4 parallel=4 shard=4
  zero=5 engine=6 libtorch=7 launcher=7 trace=7 bench=7 doctor=8)

# Files in which tests/mutations plants faults: objects of their own in every build, for its programs link others in
# their place.
set(ZEROTH_MUTATED_FILES
  csrc/kernels/adamw/adamw.cpp
  src/comm/call_descriptor.cpp
  src/comm/matched_calls.cpp
  src/engine/engine.cpp
  src/zero/layout_tag.cpp
  src/zero/one_sided_exchange.cpp
  src/zero/reduced_shards.cpp)

# Sets ${out} to the level of a room.
function(zeroth_room_level out room)
  foreach(pair IN LISTS ZEROTH_ROOM_LEVELS)
    if(pair MATCHES "^${room}=([0-9]+)$")
      set(${out} ${CMAKE_MATCH_1} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  message(FATAL_ERROR "\"${room}\" is not a room; the rooms and their levels are ${ZEROTH_ROOM_LEVELS}")
endfunction()

# What all of our targets share: language, warnings, arithmetic, sanitizers. Nothing of it is exported.
function(zeroth_set_options target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON)
  # -ffp-contract=off: a fused multiply-add that the compiler chooses would change bits between builds and machines.
  # -Wno-restrict: g++ 12 warns of its own std::string::operator+ (GCC bug 105329).
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off;-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Wno-restrict>)
  if(ZEROTH_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
  endif()
  # Presets release, asan and tsan compile several files as one: headers are read once. Whether a file includes what it
  # uses, the presets core and debug see. -Wsubobject-linkage takes the names of a file's own namespace for those of a
  # header there.
  if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
  endif()
  zeroth_set_sanitizers(${target})
endfunction()

# Rooms, outside libraries and include roots of an executable.
function(zeroth_link_executable target rooms libs torch)
  zeroth_set_options(${target})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/csrc)
  foreach(room IN LISTS rooms)
    target_link_libraries(${target} PRIVATE zeroth::${room})
  endforeach()
  target_link_libraries(${target} PRIVATE ${libs})
  if(torch)
    zeroth_use_torch(${target})
  endif()
endfunction()

# ${out} becomes TRUE for a target that needs torch where torch was not found; it is left out, with a word.
function(zeroth_leave_out out name torch)
  set(${out} FALSE PARENT_SCOPE)
  if(torch AND NOT ZEROTH_TORCH_FOUND)
    message(STATUS "left out: ${name} (not there: torch)")
    set(${out} TRUE PARENT_SCOPE)
  endif()
endfunction()

function(zeroth_add_room room)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TORCH" "" "SOURCES;DEPS;LIBS")
  zeroth_check_arguments(zeroth_add_room ${room} "${arg_UNPARSED_ARGUMENTS}" "${arg_SOURCES}")
  zeroth_room_level(level ${room})
  foreach(dep IN LISTS arg_DEPS)
    zeroth_room_level(dep_level ${dep})
    if(NOT dep_level LESS level)
      message(FATAL_ERROR "room ${room} (level ${level}) may not depend on ${dep} (level ${dep_level})")
    endif()
  endforeach()
  zeroth_leave_out(left_out "room ${room}" ${arg_TORCH})
  if(left_out)
    return()
  endif()

  set(target zeroth_${room})
  add_library(${target} STATIC ${arg_SOURCES})
  add_library(zeroth::${room} ALIAS ${target})
  foreach(source IN LISTS arg_SOURCES)
    file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/${source})
    if(path IN_LIST ZEROTH_MUTATED_FILES)
      set_source_files_properties(${source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${room})
  zeroth_set_options(${target})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
           $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/csrc>
           $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/zeroth-kernels>
    PRIVATE ${PROJECT_SOURCE_DIR}/src)
  foreach(dep IN LISTS arg_DEPS)
    target_link_libraries(${target} PRIVATE zeroth_${dep})
  endforeach()
  target_link_libraries(${target} PRIVATE ${arg_LIBS})
  set(component core)
  if(arg_TORCH)
    set(component libtorch)
    zeroth_use_torch(${target} PUBLIC)
    target_compile_definitions(${target} PRIVATE "ZEROTH_TORCH_VERSION=\"${ZEROTH_TORCH_VERSION}\"")
  endif()
  install(TARGETS ${target} EXPORT zeroth-${component} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  set_property(GLOBAL APPEND PROPERTY ZEROTH_ROOMS ${room})
  set_property(GLOBAL APPEND PROPERTY ZEROTH_ROOMS_${component} ${room})
  set_property(GLOBAL APPEND PROPERTY ZEROTH_LIBS_${component} ${arg_LIBS})
endfunction()

function(zeroth_add_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TORCH" "" "SOURCES;ROOMS;LIBS")
  zeroth_check_arguments(zeroth_add_program ${name} "${arg_UNPARSED_ARGUMENTS}" "${arg_SOURCES}")
  zeroth_leave_out(left_out "program ${name}" ${arg_TORCH})
  if(left_out OR ZEROTH_SANITIZE)
    return()
  endif()
  add_executable(${name} ${arg_SOURCES})
  zeroth_link_executable(${name} "${arg_ROOMS}" "${arg_LIBS}" ${arg_TORCH})
  set_target_properties(${name} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${ZEROTH_BIN_DIR} INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} OPTIONAL)
  set_property(GLOBAL APPEND PROPERTY ZEROTH_PROGRAMS ${name})
endfunction()

function(zeroth_add_program_parts name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;ROOMS;LIBS")
  zeroth_check_arguments(zeroth_add_program_parts ${name} "${arg_UNPARSED_ARGUMENTS}" "${arg_SOURCES}")
  set(target zeroth_${name}_parts)
  add_library(${target} STATIC EXCLUDE_FROM_ALL ${arg_SOURCES})
  zeroth_set_options(${target})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  foreach(room IN LISTS arg_ROOMS)
    target_link_libraries(${target} PUBLIC zeroth::${room})
  endforeach()
  target_link_libraries(${target} PUBLIC ${arg_LIBS})
endfunction()

# Half the time to compile, and a test of ours computes little; what it tests, the rooms, keeps the build's level.
function(zeroth_set_test_optimisation target optimized)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  if(ZEROTH_SANITIZE AND NOT optimized)
    target_compile_options(${target} PRIVATE -O0)
  elseif(NOT ZEROTH_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:$<IF:$<BOOL:${optimized}>,-O2,-O1>>)
  endif()
endfunction()

function(zeroth_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "ONE_THREAD;OPTIMIZED;WAITS;TORCH;NO_MAIN"
    "TIER;COST;LONG;TIMEOUT;SANITIZED_FILTER;SANITIZED_COST;SANITIZED_LONG" "SOURCES;ROOMS;LIBS;LABELS")
  zeroth_check_arguments(zeroth_add_test ${name} "${arg_UNPARSED_ARGUMENTS}" "${arg_SOURCES}")
  zeroth_leave_out(left_out "test ${name}" ${arg_TORCH})
  if(left_out OR (arg_ONE_THREAD AND ZEROTH_SANITIZE STREQUAL "thread"))
    return()
  endif()
  add_executable(${name} ${arg_SOURCES})
  zeroth_link_executable(${name} "${arg_ROOMS}" "${arg_LIBS}" ${arg_TORCH})
  zeroth_set_test_optimisation(${name} ${arg_OPTIMIZED})
  if(arg_TORCH)
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON)  # torch's headers, 10 s a file, once
  endif()
  target_link_libraries(${name} PRIVATE GTest::gmock)
  if(NOT arg_NO_MAIN)
    target_link_libraries(${name} PRIVATE GTest::gtest_main)
  endif()
  # tools/run-tests finds the results by this argument and counts passed, failed and skipped cases from the file.
  set(filter)
  if(ZEROTH_SANITIZE AND arg_SANITIZED_FILTER)
    set(filter ${arg_SANITIZED_FILTER})
  endif()
  if(ZEROTH_SANITIZE AND DEFINED arg_SANITIZED_COST)
    set(arg_COST ${arg_SANITIZED_COST})
  endif()
  if(arg_LONG)
    set(long "Long*")
    if(ZEROTH_SANITIZE AND arg_SANITIZED_LONG)
      set(long ${arg_SANITIZED_LONG})
    endif()
    if(NOT long STREQUAL "none")
      set(timeout 120)
      if(arg_TIMEOUT)
        set(timeout ${arg_TIMEOUT})
      endif()
      math(EXPR timeout "3 * ${timeout}")
      add_test(NAME ${name}_long
        COMMAND ${name} "--gtest_output=xml:${PROJECT_BINARY_DIR}/test-results/${name}_long.xml"
                "--gtest_filter=${long}")
      zeroth_set_test_properties(${name}_long "${arg_LABELS}" ${timeout} ${arg_TORCH} ${arg_WAITS} long "${arg_LONG}")
      set_property(TEST ${name}_long APPEND PROPERTY LABELS target:${name})
    endif()
    if(NOT filter)
      set(filter "-Long*")
    elseif(filter MATCHES "-")
      string(APPEND filter ":Long*")
    else()
      string(APPEND filter "-Long*")
    endif()
  endif()
  if(filter)
    set(filter "--gtest_filter=${filter}")
  endif()
  add_test(NAME ${name}
    COMMAND ${name} "--gtest_output=xml:${PROJECT_BINARY_DIR}/test-results/${name}.xml" ${filter})
  zeroth_set_test_properties(${name} "${arg_LABELS}" "${arg_TIMEOUT}" ${arg_TORCH} ${arg_WAITS} "${arg_TIER}"
    "${arg_COST}")
  set_property(TEST ${name} APPEND PROPERTY LABELS target:${name})
endfunction()

# Some cases of a test once more, with variables set.
function(zeroth_add_test_variant name test)
  if(ZEROTH_SANITIZE)
    return()  # what variables choose between has the same numbers, and its own tests for memory
  endif()
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "FILTER;TIER;COST" "ENVIRONMENT;LABELS")
  zeroth_check_arguments(zeroth_add_test_variant ${name} "${arg_UNPARSED_ARGUMENTS}" "${arg_FILTER}")
  add_test(NAME ${name}
    COMMAND ${test} "--gtest_filter=${arg_FILTER}" "--gtest_output=xml:${PROJECT_BINARY_DIR}/test-results/${name}.xml")
  zeroth_set_test_properties(${name} "${arg_LABELS}" "" FALSE FALSE "${arg_TIER}" "${arg_COST}")
  set_tests_properties(${name} PROPERTIES ENVIRONMENT "${arg_ENVIRONMENT}")
endfunction()

# Every rank runs the same cases; rank 0 writes the results, and an end of any other with an error is one of the whole.
function(zeroth_add_mpi_test name test)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "RANKS;FILTER;TIER;COST;TIMEOUT" "LABELS")
  zeroth_check_arguments(zeroth_add_mpi_test ${name} "${arg_UNPARSED_ARGUMENTS}" "${arg_RANKS}")
  if(NOT TARGET zeroth_mpi)
    message(STATUS "left out: test ${name} (not there: MPI)")
    return()
  endif()
  math(EXPR others "${arg_RANKS} - 1")
  set(filter "--gtest_filter=${arg_FILTER}")
  add_test(NAME ${name}
    COMMAND ${ZEROTH_LEAVES_NOTHING} ${MPIEXEC_EXECUTABLE} ${ZEROTH_MPIEXEC_FLAGS}
            -n 1 $<TARGET_FILE:${test}> "--gtest_output=xml:${PROJECT_BINARY_DIR}/test-results/${name}.xml" ${filter}
            : -n ${others} $<TARGET_FILE:${test}> ${filter})
  zeroth_set_test_properties(${name} "${arg_LABELS}" "${arg_TIMEOUT}" FALSE FALSE "${arg_TIER}" "${arg_COST}")
  set_tests_properties(${name} PROPERTIES ENVIRONMENT
    "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;ZEROTH_MPI_LIBRARY=$<TARGET_FILE:zeroth_mpi>")
endfunction()

# In front of the command of a test that starts processes: it fails if one of them leaves anything.
set(ZEROTH_LEAVES_NOTHING python3 -B ${PROJECT_SOURCE_DIR}/tests/support/left_behind.py)

function(zeroth_add_script_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "WAITS;BESIDE" "TIER;COST;LONG;TIMEOUT" "COMMAND;LABELS")
  zeroth_check_arguments(zeroth_add_script_test ${name} "${arg_UNPARSED_ARGUMENTS}" "${arg_COMMAND}")
  list(GET arg_COMMAND 0 program)
  if("process" IN_LIST arg_LABELS)
    list(PREPEND arg_COMMAND ${ZEROTH_LEAVES_NOTHING})
  endif()
  set(tests ${name})
  add_test(NAME ${name} COMMAND ${arg_COMMAND})
  zeroth_set_test_properties(${name} "${arg_LABELS}" "${arg_TIMEOUT}" FALSE ${arg_WAITS} "${arg_TIER}" "${arg_COST}")
  if(arg_LONG)
    list(APPEND tests ${name}_long)
    add_test(NAME ${name}_long COMMAND ${arg_COMMAND})
    zeroth_set_test_properties(${name}_long "${arg_LABELS}" "${arg_TIMEOUT}" FALSE ${arg_WAITS} long "${arg_LONG}")
    set_tests_properties(${name}_long PROPERTIES ENVIRONMENT ZEROTH_TIER=long)
  endif()
  set_tests_properties(${tests} PROPERTIES SKIP_RETURN_CODE 77)
  if(TARGET ${program})
    set_property(TEST ${tests} APPEND PROPERTY LABELS target:${program})
  endif()
  if(arg_BESIDE)
    set_tests_properties(${tests} PROPERTIES RUN_SERIAL OFF PROCESSORS 3)
  endif()
endfunction()

function(zeroth_add_benchmark name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TORCH;NO_MAIN" "" "SOURCES;ROOMS;LIBS")
  zeroth_check_arguments(zeroth_add_benchmark ${name} "${arg_UNPARSED_ARGUMENTS}" "${arg_SOURCES}")
  zeroth_leave_out(left_out "benchmark ${name}" ${arg_TORCH})
  if(left_out)
    return()
  endif()
  add_executable(${name} EXCLUDE_FROM_ALL ${arg_SOURCES})
  zeroth_link_executable(${name} "${arg_ROOMS}" "${arg_LIBS}" ${arg_TORCH})
  add_dependencies(benchmarks ${name})
  target_link_libraries(${name} PRIVATE benchmark::benchmark)
  if(NOT arg_NO_MAIN)
    target_link_libraries(${name} PRIVATE benchmark::benchmark_main)
  endif()
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/benchmarks)
endfunction()

# A misspelt keyword must not be read as one more source or be dropped.
function(zeroth_check_arguments function name unparsed required)
  if(unparsed)
    message(FATAL_ERROR "${function}(${name}): what is \"${unparsed}\"?")
  endif()
  if(NOT required)
    message(FATAL_ERROR "${function}(${name}): nothing to build or run is given")
  endif()
endfunction()

# The room whose share of the budget a test takes: that of its folder, or the word behind process/ and parity/.
function(zeroth_test_room out)
  file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR}/tests ${CMAKE_CURRENT_SOURCE_DIR})
  set(room docs)  # layers, docs, package, benchmarks, mutations
  if(folder MATCHES "gpt")
    set(room trainers)
  elseif(folder MATCHES "^unit/(.*)$")
    set(room ${CMAKE_MATCH_1})
  elseif(folder MATCHES "^conformance")
    set(room comm)
  elseif(folder MATCHES "^process/launcher")
    set(room launcher)
  elseif(folder MATCHES "^(parity|process)")
    set(room engine)
  elseif(folder MATCHES "^python")
    set(room python)
  elseif(folder MATCHES "^cuda")
    set(room kernels)
  elseif(folder MATCHES "^fuzz")
    set(room base)
  endif()
  set(${out} ${room} PARENT_SCOPE)
endfunction()

# Labels, time limits and how many thirds of a core a test takes (tools/run-tests gives ctest as many as there are).
# Tests that start processes run alone, because what they are given a deadline for takes longer on busy cores; those
# that WAIT leave them idle. What tools/run-tests has to know beside that are labels: tier:, cost:, room:, target: and
# waits.
function(zeroth_set_test_properties name labels timeout torch waits tier cost)
  if(NOT labels)
    set(labels unit)
  endif()
  foreach(label IN LISTS labels)
    if(NOT label MATCHES "^(unit|conformance|parity|process)$")
      message(FATAL_ERROR "test ${name}: the labels are unit, conformance, parity and process, not \"${label}\"")
    endif()
  endforeach()
  if(NOT timeout)
    set(timeout 120)
  endif()
  if(NOT tier)
    set(tier test)
  endif()
  if(NOT tier MATCHES "^(quick|test|long)$")
    message(FATAL_ERROR "test ${name}: the tiers are quick, test and long, not \"${tier}\"")
  endif()
  if(cost STREQUAL "")
    set(cost 1)
  endif()
  if(NOT cost MATCHES "^[0-9]+$")
    message(FATAL_ERROR "test ${name}: its cost is a whole number of core-seconds, not \"${cost}\"")
  endif()
  if(ZEROTH_SANITIZE MATCHES "thread")
    math(EXPR cost "4 * ${cost}")  # what sanitizers cost on the average
  elseif(ZEROTH_SANITIZE)
    math(EXPR cost "2 * ${cost}")
  endif()
  zeroth_test_room(room)
  if(name MATCHES "^torch_")
    set(room libtorch)
  endif()
  set(thirds 3)
  if(waits)
    set(thirds 2)
  elseif(torch OR NOT labels STREQUAL "unit")
    set(thirds 6)
  endif()
  list(APPEND labels tier:${tier} cost:${cost} room:${room})
  if(waits)
    list(APPEND labels waits)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT ${timeout} PROCESSORS ${thirds})
  if("process" IN_LIST labels AND NOT waits)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
  endif()
endfunction()
