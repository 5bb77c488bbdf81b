# The libraries that heddle uses. A missing required one stops the configure, all of them named at
# once; an optional one is only reported (HeddleSummary).

# heddle_require(<package> <Debian package>): finds a CMake package or remembers that it is missing.
macro(heddle_require package debian_package)
  find_package(${package} QUIET)
  if(NOT ${package}_FOUND)
    list(APPEND heddle_missing "${package} (Debian package ${debian_package})")
  endif()
endmacro()

set(THREADS_PREFER_PTHREAD_FLAG ON)
heddle_require(Threads libc6-dev)
heddle_require(TBB libtbb-dev)
heddle_require(hwy libhwy-dev)
heddle_require(fmt libfmt-dev)
heddle_require(spdlog libspdlog-dev)
heddle_require(nlohmann_json nlohmann-json3-dev)
heddle_require(Boost libboost1.81-dev)  # the headers: Asio
heddle_require(OpenSSL libssl-dev)
find_path(HEDDLE_XXHASH_INCLUDE_DIR xxhash.h)  # all of it is in the header
if(HEDDLE_XXHASH_INCLUDE_DIR)
  file(STRINGS "${HEDDLE_XXHASH_INCLUDE_DIR}/xxhash.h" version_parts
       REGEX "^#define XXH_VERSION_[A-Z]+ +[0-9]+")
  string(REGEX MATCHALL "[0-9]+" version_parts "${version_parts}")
  list(JOIN version_parts "." HEDDLE_XXHASH_VERSION)
else()
  list(APPEND heddle_missing "xxHash (Debian package libxxhash-dev)")
endif()
if(HEDDLE_BUILD_TOOLS OR HEDDLE_BUILD_EXAMPLES OR HEDDLE_BUILD_BENCHMARKS)
  heddle_require(CLI11 libcli11-dev)
endif()
if(HEDDLE_BUILD_BENCHMARKS)
  heddle_require(benchmark libbenchmark-dev)
endif()
if(HEDDLE_BUILD_TESTS)
  heddle_require(GTest libgtest-dev)
  heddle_require(rapidcheck librapidcheck-dev)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(NOT Python3_Interpreter_FOUND)
    list(APPEND heddle_missing "Python3 interpreter (Debian package python3)")
  endif()
endif()

if(heddle_missing)
  list(JOIN heddle_missing "\n  " heddle_missing_lines)
  message(FATAL_ERROR "heddle needs what is not installed here:\n  ${heddle_missing_lines}\n"
                      "On Debian, tools/setup.sh installs it.")
endif()

# The optional parts: each sets HEDDLE_<PART>_VERSION, empty if it was not found.
include(HeddleCuda)

# The Python package needs an interpreter with its headers, and nanobind. tools/setup.sh puts both
# into a virtual environment, which is taken unless another interpreter is named.
set(HEDDLE_PYTHON_VERSION "")
if(HEDDLE_BUILD_PYTHON)
  set(environment "${PROJECT_SOURCE_DIR}/build/venv/bin/python")
  if(NOT DEFINED Python_EXECUTABLE AND EXISTS "${environment}")
    set(Python_EXECUTABLE "${environment}" CACHE FILEPATH "The Python that the package is built for")
  endif()
  find_package(Python 3.11 QUIET COMPONENTS Interpreter
               OPTIONAL_COMPONENTS Development.Module Development.SABIModule)
  if(Python_Interpreter_FOUND AND Python_Development.Module_FOUND)
    execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
                    OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_package(nanobind CONFIG QUIET)
    if(nanobind_FOUND)
      set(HEDDLE_PYTHON_VERSION "${Python_VERSION}, nanobind ${nanobind_VERSION}")
    endif()
  endif()
endif()

# For examples/perl: Perl's FFI::Platypus.
find_package(Perl QUIET)
set(HEDDLE_PERL_FFI_VERSION "")
if(PERL_FOUND)
  execute_process(COMMAND "${PERL_EXECUTABLE}" -MFFI::Platypus -e "print FFI::Platypus->VERSION"
                  OUTPUT_VARIABLE HEDDLE_PERL_FFI_VERSION ERROR_QUIET)
endif()
