# Goal: what `cmake --install` leaves behind is complete and relocatable.
# Method: install, rename the prefix, check its content, then configure, build and run project/, and
# c_project/ that knows no C++, with nothing but that prefix.

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

set(prefix "${WORK_DIR}/moved")
file(REMOVE_RECURSE "${WORK_DIR}")
run("${CMAKE_COMMAND}" --install "${HEDDLE_BUILD_DIR}" --prefix "${WORK_DIR}/installed")
file(RENAME "${WORK_DIR}/installed" "${prefix}")

# Public headers, all of them and nothing else.
file(GLOB_RECURSE installed RELATIVE "${prefix}/include" "${prefix}/include/*")
file(GLOB_RECURSE public RELATIVE "${HEDDLE_SOURCE_DIR}/include" "${HEDDLE_SOURCE_DIR}/include/*.h")
if(NOT installed STREQUAL public)
  message(FATAL_ERROR "installed headers: expected\n  ${public}\ngiven\n  ${installed}")
endif()

# No installed text names a directory of this machine.
file(GLOB_RECURSE texts "${prefix}/*.cmake" "${prefix}/*.h")
foreach(text IN LISTS texts)
  file(READ "${text}" content)
  foreach(directory IN ITEMS "${HEDDLE_SOURCE_DIR}" "${HEDDLE_BUILD_DIR}" "${WORK_DIR}")
    string(FIND "${content}" "${directory}" position)
    if(NOT position EQUAL -1)
      message(FATAL_ERROR "${text} names ${directory}: the package is not relocatable")
    endif()
  endforeach()
endforeach()

run("${CMAKE_COMMAND}" -G Ninja -S "${CMAKE_CURRENT_LIST_DIR}/project" -B "${WORK_DIR}/build"
    "-DCMAKE_PREFIX_PATH=${prefix}" "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}")
run("${CMAKE_COMMAND}" --build "${WORK_DIR}/build")
run("${CMAKE_COMMAND}" -G Ninja -S "${CMAKE_CURRENT_LIST_DIR}/c_project" -B "${WORK_DIR}/c_build"
    "-DCMAKE_PREFIX_PATH=${prefix}")
run("${CMAKE_COMMAND}" --build "${WORK_DIR}/c_build")
foreach(program IN ITEMS use_static use_shared)
  execute_process(COMMAND "${WORK_DIR}/build/${program}" OUTPUT_VARIABLE output
                  COMMAND_ERROR_IS_FATAL ANY)
  if(NOT output STREQUAL "sum 42, version 3\n")
    message(FATAL_ERROR "${program}: expected 'sum 42, version 3', given '${output}'")
  endif()
endforeach()
execute_process(COMMAND "${WORK_DIR}/c_build/use_c" OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
if(NOT output STREQUAL "pulled 8\n")
  message(FATAL_ERROR "use_c: expected 'pulled 8', given '${output}'")
endif()
