# What can be chosen at configure time, and the compiler flags that follow.

option(HEDDLE_BUILD_TOOLS "Build the heddle command" ${PROJECT_IS_TOP_LEVEL})
option(HEDDLE_BUILD_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(HEDDLE_BUILD_BENCHMARKS "Build the benchmarks" ${PROJECT_IS_TOP_LEVEL})
option(HEDDLE_BUILD_PYTHON "Build the Python package, if Python and nanobind are there"
       ${PROJECT_IS_TOP_LEVEL})
option(HEDDLE_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(HEDDLE_DCHECKS "Check invariants at run time (DCHECK)" OFF)
option(HEDDLE_UNITY "Compile sources several at a time: less time for all, more for one" ON)
option(HEDDLE_WARNINGS_AS_ERRORS "Stop at the first warning" ${PROJECT_IS_TOP_LEVEL})
set(WITH_CUDA "AUTO" CACHE STRING "Build for CUDA GPUs: ON, OFF, or AUTO: if nvcc 12 or newer is there")
set(WITH_NCCL "AUTO" CACHE STRING "Build with NCCL: ON, OFF, or AUTO: if it is there and CUDA is built in")
set_property(CACHE WITH_CUDA WITH_NCCL PROPERTY STRINGS AUTO ON OFF)
set(HEDDLE_SANITIZE "" CACHE STRING "Sanitizers to build with: address,undefined or thread")

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)  # one set of objects makes both libraries
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_COMPILE_WARNING_AS_ERROR ${HEDDLE_WARNINGS_AS_ERRORS})

add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra>"
                    $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-Wthread-safety>)
else()
  # Nobody replaces heddle's functions at load time; without this, position-independent code may not
  # inline its own. Clang assumes it anyway.
  add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-fno-semantic-interposition>)
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC 12 reports overlapping copies inside std::string that cannot happen (GCC bug 105651).
    add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-Wno-restrict>)
  endif()
endif()

if(HEDDLE_SANITIZE)
  set(flags -fsanitize=${HEDDLE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  if(HEDDLE_SANITIZE STREQUAL "address,undefined")
    # Accesses beyond an object, which the address sanitizer sees: a tenth of the compile time.
    list(APPEND flags -fno-sanitize=object-size)
  endif()
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:${flags}>")
  add_link_options(-fsanitize=${HEDDLE_SANITIZE})
endif()

# What every test sees in its environment.
set(HEDDLE_TEST_ENVIRONMENT "")
if(HEDDLE_SANITIZE MATCHES "thread")
  list(APPEND HEDDLE_TEST_ENVIRONMENT "TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1")
elseif(HEDDLE_SANITIZE)
  list(APPEND HEDDLE_TEST_ENVIRONMENT "ASAN_OPTIONS=detect_stack_use_after_return=1"
                                      "UBSAN_OPTIONS=print_stacktrace=1")
endif()

find_program(HEDDLE_CCACHE ccache)
if(HEDDLE_CCACHE AND PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${HEDDLE_CCACHE}")
  if(HEDDLE_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # See heddle_cache_precompiled. Of a header Clang takes the precompiled form beside it by itself, in
    # words that ccache understands.
    set(HEDDLE_CCACHE_PRECOMPILED env CCACHE_SLOPPINESS=pch_defines,time_macros
                                  CCACHE_PCH_EXTSUM=true "${HEDDLE_CCACHE}")
    set(CMAKE_CXX_COMPILER_LAUNCHER "${HEDDLE_CCACHE_PRECOMPILED}")
    set(CMAKE_CXX_COMPILE_OPTIONS_USE_PCH -include <PCH_HEADER>)
  endif()
endif()
