# CUDA and NCCL. After this, WITH_CUDA and WITH_NCCL are ON or OFF for the folders that ask, whatever
# their cache entries said; HEDDLE_CUDA_VERSION and HEDDLE_NCCL_VERSION say what is built in, or why
# nothing is: "off".

foreach(option IN ITEMS WITH_CUDA WITH_NCCL)
  if(NOT ${option} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${option} is '${${option}}', expected ON, OFF or AUTO")
  endif()
endforeach()

set(HEDDLE_CUDA_VERSION "")
set(HEDDLE_NCCL_VERSION "")
set(cuda_wanted "${WITH_CUDA}")
set(nccl_wanted "${WITH_NCCL}")
set(WITH_CUDA OFF)
set(WITH_NCCL OFF)

# --- CUDA ----------------------------------------------------------------------------------------

if(cuda_wanted STREQUAL "OFF")
  set(HEDDLE_CUDA_VERSION "off")
else()
  # Where this is 3.25 or more, the module of CMake 3.25 takes for granted that there is libnvToolsExt, which CUDA 13 has
  # no more, and ends the configure.
  set(minimum "${CMAKE_MINIMUM_REQUIRED_VERSION}")
  set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
  find_package(CUDAToolkit 12 QUIET)
  set(CMAKE_MINIMUM_REQUIRED_VERSION "${minimum}")
  set(cuda_why "no CUDA Toolkit of version 12 or newer was found")
  if(CUDAToolkit_FOUND)
    # Code for the A100's and the H100's generation, and PTX that later ones translate for themselves.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES "80-real;90" CACHE STRING "GPUs to build for, as CMake names them")
    endif()
    if(cuda_wanted STREQUAL "ON")
      if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
        set(CMAKE_CUDA_COMPILER "${CUDAToolkit_NVCC_EXECUTABLE}")
      endif()
      enable_language(CUDA)
      set(WITH_CUDA ON)
    else()
      # A compiler that is set the check takes for one that works. It configures a project of its own, which sees
      # the environment and no variables.
      set(names CUDACXX CUDAHOSTCXX CUDAFLAGS)
      set(variables CUDAToolkit_NVCC_EXECUTABLE CMAKE_CUDA_HOST_COMPILER CMAKE_CUDA_FLAGS)
      foreach(name variable IN ZIP_LISTS names variables)
        if(${variable} AND NOT DEFINED ENV{${name}})
          set(ENV{${name}} "${${variable}}")
        endif()
      endforeach()
      include(CheckLanguage)
      check_language(CUDA)
      if(CMAKE_CUDA_COMPILER)
        enable_language(CUDA)
        set(WITH_CUDA ON)
      else()
        message(STATUS "CUDA ${CUDAToolkit_VERSION} is there, but its compiler does not work here")
      endif()
    endif()
  endif()
  if(WITH_CUDA)
    set(HEDDLE_CUDA_VERSION "${CUDAToolkit_VERSION}")
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      # CMake 3.25 does not know that nvcc 12 and newer have C++20.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
      list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    # -Wextra would complain of what nvcc itself generates.
    add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>"
                        "$<$<COMPILE_LANGUAGE:CUDA>:--display-error-number>")
    if(HEDDLE_WARNINGS_AS_ERRORS)
      add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
    endif()
    if(HEDDLE_CCACHE AND PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
      set(CMAKE_CUDA_COMPILER_LAUNCHER "${HEDDLE_CCACHE}")
    endif()
  elseif(cuda_wanted STREQUAL "ON")
    message(FATAL_ERROR "WITH_CUDA is ON, but ${cuda_why}")
  endif()
endif()

# --- CUPTI ---------------------------------------------------------------------------------------

# Part of the CUDA Toolkit, in its own folders or among the others. Its header is compiled in; the
# library is loaded when a trace first wants it: programs start where there is none.
if(WITH_CUDA)
  set(cupti_hints "${CUDAToolkit_LIBRARY_ROOT}/extras/CUPTI")
  find_path(HEDDLE_CUPTI_INCLUDE_DIR cupti.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${cupti_hints}
            PATH_SUFFIXES include)
  find_library(HEDDLE_CUPTI_LIBRARY cupti HINTS ${CUDAToolkit_LIBRARY_DIR} ${cupti_hints}
               PATH_SUFFIXES lib64 lib)
  if(HEDDLE_CUPTI_INCLUDE_DIR AND HEDDLE_CUPTI_LIBRARY)
    add_library(heddle_cupti INTERFACE)
    target_include_directories(heddle_cupti SYSTEM INTERFACE "${HEDDLE_CUPTI_INCLUDE_DIR}"
                                                             ${CUDAToolkit_INCLUDE_DIRS})
    file(REAL_PATH "${HEDDLE_CUPTI_LIBRARY}" cupti_file)
    target_compile_definitions(heddle_cupti INTERFACE
      HEDDLE_CUPTI_NAME="libcupti.so.${CUDAToolkit_VERSION_MAJOR}" HEDDLE_CUPTI_FILE="${cupti_file}")
    target_link_libraries(heddle_cupti INTERFACE ${CMAKE_DL_LIBS})
  endif()
endif()

# --- NCCL ----------------------------------------------------------------------------------------

# Beside the CUDA Toolkit, in the system's folders, or from PyPI (nvidia-nccl-cu13) in build/venv.
if(nccl_wanted STREQUAL "OFF" OR (NOT WITH_CUDA AND nccl_wanted STREQUAL "AUTO"))
  set(HEDDLE_NCCL_VERSION "off")
else()
  file(GLOB from_pypi "${PROJECT_SOURCE_DIR}/build/venv/lib/python*/site-packages/nvidia/nccl")
  find_path(HEDDLE_NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${from_pypi}
            PATH_SUFFIXES include)
  find_library(HEDDLE_NCCL_LIBRARY NAMES nccl libnccl.so.2
               HINTS ${CUDAToolkit_LIBRARY_DIR} ${from_pypi} PATH_SUFFIXES lib)
  if(WITH_CUDA AND HEDDLE_NCCL_INCLUDE_DIR AND HEDDLE_NCCL_LIBRARY)
    set(WITH_NCCL ON)
    file(STRINGS "${HEDDLE_NCCL_INCLUDE_DIR}/nccl.h" version_parts
         REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) [0-9]+")
    string(REGEX MATCHALL "[0-9]+" version_parts "${version_parts}")
    list(JOIN version_parts "." HEDDLE_NCCL_VERSION)
    add_library(heddle_nccl INTERFACE)
    target_include_directories(heddle_nccl SYSTEM INTERFACE "${HEDDLE_NCCL_INCLUDE_DIR}")
    # Loaded when it is first needed, not linked: programs start where there is none.
    file(REAL_PATH "${HEDDLE_NCCL_LIBRARY}" nccl_file)
    target_compile_definitions(heddle_nccl INTERFACE HEDDLE_NCCL_FILE="${nccl_file}")
    target_link_libraries(heddle_nccl INTERFACE CUDA::cudart_static ${CMAKE_DL_LIBS})
  elseif(nccl_wanted STREQUAL "ON")
    message(FATAL_ERROR "WITH_NCCL is ON, but heddle is built without CUDA or nccl.h and libnccl "
                        "were not found (PyPI: nvidia-nccl-cu13)")
  endif()
endif()
