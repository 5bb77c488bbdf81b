# Functions that the folders' CMakeLists.txt use.

# Everything that heddle's own code, tests and programs need on top of the public headers: the
# internal headers (included from the root) and the libraries under them.
add_library(heddle_internal INTERFACE)
target_include_directories(heddle_internal INTERFACE "${PROJECT_SOURCE_DIR}/include"
                                                     "${PROJECT_SOURCE_DIR}"
                                                     "${PROJECT_BINARY_DIR}/generated")
target_link_libraries(heddle_internal INTERFACE fmt::fmt spdlog::spdlog TBB::tbb hwy::hwy
                                                nlohmann_json::nlohmann_json Threads::Threads Boost::headers
                                                OpenSSL::Crypto OpenSSL::SSL)
target_compile_definitions(heddle_internal INTERFACE $<$<BOOL:${HEDDLE_DCHECKS}>:HEDDLE_DCHECKS>)
# The static runtime finds the driver when it is first called: programs start where there is none.
set(heddle_cuda_libraries $<$<BOOL:${WITH_CUDA}>:CUDA::cudart_static>)
target_link_libraries(heddle_internal INTERFACE ${heddle_cuda_libraries})

configure_file("${PROJECT_SOURCE_DIR}/base/build_info.h.in"
               "${PROJECT_BINARY_DIR}/generated/base/build_info.h" @ONLY)
# What goes into shared libraries has its own, the first found; programs need none, and are compiled alike with
# CUDA and without.
set(HEDDLE_LARGE_TLS ${WITH_CUDA})
configure_file("${PROJECT_SOURCE_DIR}/engine/tls_model.h.in"
               "${PROJECT_BINARY_DIR}/generated/shared/engine/tls_model.h" @ONLY)
set(HEDDLE_LARGE_TLS ON)
configure_file("${PROJECT_SOURCE_DIR}/engine/tls_model.h.in"
               "${PROJECT_BINARY_DIR}/generated/engine/tls_model.h" @ONLY)
set(heddle_shared_headers "${PROJECT_BINARY_DIR}/generated/shared")

# heddle_cache_precompiled(<owner> <headers>)
# Lets ccache find again what was compiled with the precompiled headers of target <owner>, also from another
# folder. Clang writes absolute paths into such a file, so ccache compares a sum beside it instead, here
# that of the headers' preprocessed text, and the file itself stays out of the cache.
function(heddle_cache_precompiled owner headers)
  if(NOT CMAKE_CXX_COMPILER_LAUNCHER STREQUAL HEDDLE_CCACHE_PRECOMPILED)
    return()
  endif()
  set_target_properties(${owner} PROPERTIES CXX_COMPILER_LAUNCHER "")
  list(TRANSFORM headers PREPEND "#include ")
  list(JOIN headers "\n" source)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${owner}.dir")
  file(WRITE "${folder}/headers.cc" "${source}\n")
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -std=c++20 -E -P "${folder}/headers.cc"
                  OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  string(SHA256 sum "${text}")
  file(WRITE "${folder}/cmake_pch.hxx.pch.sum" "${sum}")
endfunction()

# heddle_precompile_headers(<target> <kind>)
# For the sanitizers, headers that most sources include are parsed once: with Clang they take half of the time
# that a test compiles for, with GCC a tenth.
# Targets of one kind ("library", "programs" or "tests") share the result: their flags are the same.
function(heddle_precompile_headers target kind)
  if(NOT HEDDLE_SANITIZE)
    return()
  endif()
  set(owner heddle_precompiled_${kind})
  if(NOT TARGET ${owner})
    set(headers <algorithm> <array> <atomic> <chrono> <functional> <map> <memory> <mutex> <optional>
                <span> <string> <thread> <utility> <vector> <fmt/format.h>)
    add_executable(${owner} "${PROJECT_SOURCE_DIR}/cmake/precompiled.cc")
    target_link_libraries(${owner} PRIVATE heddle_internal)
    if(kind STREQUAL "library")
      target_compile_options(${owner} PRIVATE -fPIC)
    else()
      heddle_quick_options(${owner})
    endif()
    if(kind STREQUAL "tests")
      target_link_libraries(${owner} PRIVATE GTest::gtest_main GTest::gmock)
      list(APPEND headers <random> <gmock/gmock.h> <gtest/gtest.h>)
    endif()
    target_precompile_headers(${owner} PRIVATE ${headers})
    heddle_cache_precompiled(${owner} "${headers}")
  endif()
  target_precompile_headers(${target} REUSE_FROM ${owner})
endfunction()

# heddle_optimise_sources(<file>...)
# For sources of tests and programs that run longer than they compile.
function(heddle_optimise_sources)
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS -O2 SKIP_PRECOMPILE_HEADERS ON)
endfunction()

# heddle_compile_together(<target> <count>)
# So many of its C++ sources become one translation unit: headers, which they share, take most of the time that
# they compile for. Names in anonymous namespaces then have to differ within the target.
function(heddle_compile_together target count)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${HEDDLE_UNITY} UNITY_BUILD_BATCH_SIZE ${count})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # To GCC such a source is a header, in which no class may have a field from an anonymous namespace.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
  endif()
endfunction()

# heddle_add_library(<name> SOURCES <file>... [LIBS <target>...])
# One folder's part of the library. Its objects go into both heddle::heddle and
# heddle::heddle_shared.
function(heddle_add_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBS")
  if(NOT arg_SOURCES)
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE heddle_internal ${arg_LIBS})
    return()
  endif()
  add_library(${name} OBJECT ${arg_SOURCES})
  target_link_libraries(${name} PUBLIC heddle_internal ${arg_LIBS})
  target_include_directories(${name} BEFORE PRIVATE "${heddle_shared_headers}")
  heddle_precompile_headers(${name} library)
  heddle_compile_together(${name} 8)
  set_property(GLOBAL APPEND PROPERTY HEDDLE_OBJECT_LIBRARIES ${name})
endfunction()

# heddle_quick_options(<target>)
# How tests and programs are compiled: the library in them is optimised, they themselves would only take
# longer to compile, but for heddle_optimise_sources. What is released or measured is of another
# preset, which optimises all.
function(heddle_quick_options target)
  target_compile_options(${target} PRIVATE
    "$<$<AND:$<CONFIG:RelWithDebInfo>,$<COMPILE_LANGUAGE:C,CXX>>:-O0;-g1>")
endfunction()

# heddle_check_fewer_pointers(<target>)
# For kernels: the address sanitizer sees what they touch; what the other one would say about pointers that touch
# nothing takes half of the time that they compile for.
function(heddle_check_fewer_pointers target)
  if(HEDDLE_SANITIZE MATCHES "undefined")
    target_compile_options(${target} PRIVATE -fno-sanitize=pointer-overflow,object-size,vptr,function)
  endif()
endfunction()

# heddle_kernel_options(<target>)
# How sources with SIMD kernels are compiled.
function(heddle_kernel_options target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD OFF)  # each source is compiled once for each SIMD target
  target_compile_options(${target} PRIVATE
    # The same bits on targets with and without fused multiply-add, and on GPUs.
    $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off> $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false>
    # What converts elements is constexpr, and so need not be written twice.
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
    # Sums of what lies in the first-level cache lose 20% without.
    $<$<COMPILE_LANGUAGE:CXX>:-falign-loops=64>)
  # A target is compiled where it differs from its neighbour: SSSE3 alone is rare (such a machine takes
  # the portable fallback), and what AVX3_DL has beyond AVX3 no kernel uses.
  set(disabled "HWY_SSSE3|HWY_AVX3_DL")
  if(HEDDLE_SANITIZE)
    # The fallback and one target show what sanitizers look for; all of them would take minutes.
    string(APPEND disabled "|HWY_SSE4|HWY_AVX3")
    heddle_check_fewer_pointers(${target})
  else()
    # Unrolls the arrays of vectors into registers.
    target_compile_options(${target} PRIVATE
      $<$<AND:$<NOT:$<CONFIG:Debug>>,$<COMPILE_LANGUAGE:CXX>>:-O3>
      # Where variables are in inlined vectors takes a third of the compile time to note.
      $<$<AND:$<CONFIG:RelWithDebInfo>,$<COMPILE_LANGUAGE:CXX>>:-g1>)
  endif()
  target_compile_definitions(${target} PRIVATE "HWY_DISABLED_TARGETS=(${disabled})")
endfunction()

# Makes heddle::heddle (static) and heddle::heddle_shared of all folders.
function(heddle_bundle_libraries)
  get_property(folders GLOBAL PROPERTY HEDDLE_OBJECT_LIBRARIES)
  add_library(heddle STATIC)
  add_library(heddle_shared SHARED)
  foreach(target IN ITEMS heddle heddle_shared)
    foreach(folder IN LISTS folders)
      target_sources(${target} PRIVATE $<TARGET_OBJECTS:${folder}>)
    endforeach()
    target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
    target_compile_features(${target} PUBLIC cxx_std_20)
    target_link_libraries(${target} PRIVATE fmt::fmt spdlog::spdlog TBB::tbb hwy::hwy
                                            Threads::Threads Boost::headers OpenSSL::Crypto OpenSSL::SSL
                                            ${heddle_cuda_libraries})
    set_target_properties(${target} PROPERTIES OUTPUT_NAME heddle EXPORT_NAME ${target}
                                               VERSION ${PROJECT_VERSION}
                                               SOVERSION ${PROJECT_VERSION_MAJOR}
                                               LINKER_LANGUAGE CXX)
    add_library(heddle::${target} ALIAS ${target})
  endforeach()
endfunction()

# heddle_add_executable(<name> SOURCES <file>... [LIBS <target>...])
# A program that may include internal headers and links the static library.
function(heddle_add_executable name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBS")
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE heddle::heddle heddle_internal ${arg_LIBS})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)  # .cu sources need no other linker
  heddle_quick_options(${name})
  if("GTest::gtest_main" IN_LIST arg_LIBS)
    heddle_precompile_headers(${name} tests)
  else()
    heddle_precompile_headers(${name} programs)
  endif()
endfunction()

# heddle_add_test_objects(<name> SOURCES <file>...)
# What several test programs have among their sources, compiled once. They name it among their LIBS.
function(heddle_add_test_objects name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  add_library(${name} OBJECT EXCLUDE_FROM_ALL ${arg_SOURCES})
  target_link_libraries(${name} PUBLIC heddle_internal GTest::gtest GTest::gmock)
  target_compile_options(${name} PRIVATE -fPIE)  # as programs are, whose precompiled headers it has
  heddle_quick_options(${name})
  heddle_precompile_headers(${name} tests)
endfunction()

# heddle_add_test(<name> SOURCES <file>... [LIBS <target>...] [LABELS <label>...] [TIMEOUT <seconds>]
#                 [EACH_TEST])
# A GoogleTest program; each of its suites becomes a ctest of its own, named <name>.<suite>, labelled
# with the folder if not otherwise. A process a suite, not a test: starting thousands of processes
# cost more than their tests. EACH_TEST: each test, for long ones that should run side by side.
function(heddle_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "EACH_TEST" "TIMEOUT" "SOURCES;LIBS;LABELS")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
  endif()
  if(NOT arg_LABELS)
    get_filename_component(arg_LABELS "${CMAKE_CURRENT_SOURCE_DIR}" NAME)
  endif()
  heddle_add_executable(${name} SOURCES ${arg_SOURCES} $<TARGET_OBJECTS:heddle_hang_report>
                        LIBS ${arg_LIBS} GTest::gtest_main GTest::gmock)
  heddle_compile_together(${name} 4)
  if("gpu" IN_LIST arg_LABELS)
    if(NOT TARGET gpu_tests)
      add_custom_target(gpu_tests)
    endif()
    add_dependencies(gpu_tests ${name})
    set_property(TARGET gpu_tests APPEND PROPERTY HEDDLE_PROGRAMS "${CMAKE_CURRENT_BINARY_DIR}/${name}")
  endif()
  # ctest lists the suites when it starts; the build does not have to run the program.
  set(list_file "${CMAKE_CURRENT_BINARY_DIR}/${name}_suites.cmake")
  file(CONFIGURE OUTPUT "${list_file}" @ONLY CONTENT [[
set(name "@name@")
set(program "@CMAKE_CURRENT_BINARY_DIR@/@name@")
set(each_test "@arg_EACH_TEST@")
set(timeout "@arg_TIMEOUT@")
set(labels "@arg_LABELS@")
set(environment "@HEDDLE_TEST_ENVIRONMENT@")
include("@PROJECT_SOURCE_DIR@/cmake/HeddleListSuites.cmake")
]])
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${list_file}")
endfunction()

# heddle_add_command_test(<name> COMMAND <argument>... LABELS <label>... [TIMEOUT <seconds>]
#                         [ENVIRONMENT <NAME=value>...])
# A command as a test. It sees what every test sees in its environment: add_test alone would run it
# under a sanitizer without the settings that the sanitizer needs.
function(heddle_add_command_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "COMMAND;LABELS;ENVIRONMENT")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
  endif()
  add_test(NAME ${name} COMMAND ${arg_COMMAND})
  set_tests_properties(${name} PROPERTIES
    LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
    ENVIRONMENT "${HEDDLE_TEST_ENVIRONMENT};${arg_ENVIRONMENT}")
endfunction()
