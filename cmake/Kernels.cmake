# Every paragraph of cuda/<folder>/tiles.def becomes one translation unit, named after its first row, and every folder
# and row one line of the generated tilesparse_kernels.inc that the registry includes. Rows that share a translation unit
# share the time to parse CUTLASS, which takes longer than most kernels do, and are compressed together: what is alike but
# for float16 or bfloat16 takes half of the room. Those of ampere/ are small, because GPUs without code of their own
# compile a unit from PTX when the first of its kernels is used.

# Reads the rows TS_TILE(name, kernel, argument, ...) of a folder, without comments and the lines that hold nothing else;
# a blank line becomes the element "-".
function(read_rows folder result)
  set(file ${PROJECT_SOURCE_DIR}/cuda/${folder}/tiles.def)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} text)
  string(REGEX REPLACE "\n[ \t]*//[^\n]*" "" text "\n${text}")
  string(REGEX REPLACE "[ \t\r]*//[^\n]*" "" text "${text}")
  string(REGEX REPLACE "\n[ \t\r]*\n" "\n-\n" text "${text}")
  string(REGEX REPLACE "[ \t\r]*\n[ \t]*" ";" rows "${text}")
  list(FILTER rows EXCLUDE REGEX "^[ \t]*$")
  set(${result} ${rows} PARENT_SCOPE)
endfunction()

# The header that defines TS_ROW_<kernel>, the rows of one kind of kernel: of this folder, or of one that others share.
function(find_header folder kernel result)
  get_property(header GLOBAL PROPERTY tilesparse_header_${folder}_${kernel})
  if(NOT header)
    file(GLOB headers RELATIVE ${PROJECT_SOURCE_DIR}/cuda ${PROJECT_SOURCE_DIR}/cuda/${folder}/*.cuh
         ${PROJECT_SOURCE_DIR}/cuda/stream/*.cuh)
    foreach(candidate IN LISTS headers)
      file(STRINGS ${PROJECT_SOURCE_DIR}/cuda/${candidate} found REGEX "^#define TS_ROW_${kernel}[(]")
      if(found)
        set(header ${candidate})
      endif()
    endforeach()
    set_property(GLOBAL PROPERTY tilesparse_header_${folder}_${kernel} "${header}")
  endif()
  set(${result} "${header}" PARENT_SCOPE)
endfunction()

# Reads one row: sets <name>, <header> and <instance> in the caller.
function(parse_row folder row)
  if(NOT row MATCHES "^TS_TILE\\(([a-z0-9_]+), *([a-z0-9_]+)(, *[^,()]+)*\\)$")
    message(FATAL_ERROR "cuda/${folder}/tiles.def: malformed row\n  ${row}\n"
                        "A row reads TS_TILE(name, kernel, argument, ...) with lower-case name and kernel.")
  endif()
  set(name ${CMAKE_MATCH_1})
  set(kernel ${CMAKE_MATCH_2})
  find_header(${folder} ${kernel} header)
  if(NOT header)
    message(FATAL_ERROR "cuda/${folder}/tiles.def: no header defines TS_ROW_${kernel} for the row\n  ${row}")
  endif()
  string(REGEX REPLACE "^TS_TILE\\([a-z0-9_]+, *[a-z0-9_]+" "TS_ROW_${kernel}(${name}" instance "${row}")
  set(name ${name} PARENT_SCOPE)
  set(header ${header} PARENT_SCOPE)
  set(instance "${instance}" PARENT_SCOPE)
endfunction()

# Compiles CUDA sources for some architectures and links them into tilesparse.
function(add_objects name code)
  add_library(tilesparse_${name} OBJECT ${ARGN})
  target_include_directories(tilesparse_${name} PRIVATE ${PROJECT_SOURCE_DIR}/cuda)
  target_link_libraries(tilesparse_${name} PRIVATE cutlass)
  target_compile_options(tilesparse_${name} PRIVATE --expt-relaxed-constexpr --compress-mode=size -Xcompiler=-Wall,-Wextra)
  set(launcher sh ${PROJECT_SOURCE_DIR}/cmake/nvcc_checked.sh ${CMAKE_CXX_COMPILER_LAUNCHER})
  set_target_properties(tilesparse_${name} PROPERTIES
    CUDA_ARCHITECTURES "${code}" CUDA_VISIBILITY_PRESET hidden CUDA_COMPILER_LAUNCHER "${launcher}"
    JOB_POOL_COMPILE nvcc UNITY_BUILD OFF)
  target_link_libraries(tilesparse PRIVATE tilesparse_${name})
endfunction()

# Compiles all rows of one architecture into an object library and links it into tilesparse, and with it what
# is decided for its kernels, select.cpp, if there is something to decide.
function(add_architecture architecture)
  string(REGEX REPLACE "[a-z]$" "" number ${architecture})
  set(folder sm${number})
  if(DEFINED folder_of_${number})
    set(folder ${folder_of_${number}})
  endif()
  set(names "")
  set(entries "")
  set(sources "")
  set(select ${PROJECT_SOURCE_DIR}/cuda/${folder}/select.cpp)
  if(EXISTS ${select})
    target_sources(tilesparse PRIVATE ${select})
  endif()
  read_rows(${folder} rows)
  set(unit "") # the name of the current translation unit
  foreach(row IN LISTS rows)
    if(row STREQUAL "-")
      set(unit "")
      continue()
    endif()
    parse_row(${folder} "${row}")
    if(name IN_LIST names)
      message(FATAL_ERROR "cuda/${folder}/tiles.def: two rows are named ${name}")
    endif()
    list(APPEND names ${name})
    string(APPEND entries "TS_KERNEL(sm${number}, ${name})\n")
    if(NOT unit)
      set(unit ${name})
      list(APPEND sources ${unit})
    endif()
    list(APPEND headers_${unit} "#include \"${header}\"")
    string(APPEND content_${unit} "${instance}\n")
  endforeach()
  foreach(unit IN LISTS sources)
    list(REMOVE_DUPLICATES headers_${unit})
    list(JOIN headers_${unit} "\n" headers)
    file(CONFIGURE OUTPUT generated/${folder}/${unit}.cu CONTENT "${headers}\n\n${content_${unit}}" @ONLY)
  endforeach()
  list(TRANSFORM sources PREPEND ${PROJECT_BINARY_DIR}/generated/${folder}/)
  list(TRANSFORM sources APPEND .cu)
  # Rows for 8.0 stay in front: the first one of kernels with equal estimates is chosen.
  set(registry "${entries}${registry}" PARENT_SCOPE)

  set(code ${architecture})
  if(architecture MATCHES "a$")
    set(code ${architecture}-real)
  elseif(architecture EQUAL 80)
    list(APPEND code ${native_code})
    set(float8_sources ${sources})
    list(FILTER float8_sources INCLUDE REGEX "/sm80_[a-z0-9_]+_f8_")
    list(FILTER sources EXCLUDE REGEX "/sm80_[a-z0-9_]+_f8_")
    if(float8_sources)
      add_objects(${folder}_float8 "${float8_code};${native_code}" ${float8_sources})
    endif()
  endif()
  add_objects(${folder} "${code}" ${sources})
endfunction()

# Compiles the sources of a folder that are the same code for every architecture, and links them into tilesparse.
function(add_common folder)
  string(REGEX REPLACE "([0-9]+)a" "\\1-real" code "${TILESPARSE_ARCHITECTURES}")
  list(APPEND code ${native_code})
  list(REMOVE_DUPLICATES code)
  list(TRANSFORM ARGN PREPEND ${PROJECT_SOURCE_DIR}/cuda/${folder}/)
  add_objects(${folder} "${code}" ${ARGN})
  if("90-real" IN_LIST code)
    target_compile_definitions(tilesparse_${folder} PRIVATE TILESPARSE_NATIVE_90)
  endif()
endfunction()

# Enables CUDA with nvcc from CUDACXX, PATH, CUDA_HOME or CUDA_PATH.
macro(enable_cuda)
  if(NOT CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
    find_program(NVCC nvcc PATHS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
    if(NOT NVCC)
      message(FATAL_ERROR "There is no nvcc. Install the CUDA toolkit 12.4 or newer and set CUDA_HOME or CUDACXX, or "
                          "build with pip, which fetches one, or without CUDA: -DTILESPARSE_CUDA=OFF")
    endif()
    set(CMAKE_CUDA_COMPILER ${NVCC})
  endif()
  set(CMAKE_CUDA_ARCHITECTURES OFF) # stated by target
  set(CMAKE_CUDA_STANDARD 17)
  enable_language(CUDA)
  # For the host alone: launches of hundreds of kernels, which take twice the room by -O2. nvcc gives each a static
  # variable that is worked out where it is called by <<<>>>, which none is; all others are constants.
  string(REPLACE "-O3" "-Xcompiler=-Os,-fno-threadsafe-statics" CMAKE_CUDA_FLAGS_RELEASE
                 "${CMAKE_CUDA_FLAGS_RELEASE}")
  if(native_code AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    message(FATAL_ERROR "TILESPARSE_NATIVE needs nvcc 12.8 or newer; ${CMAKE_CUDA_COMPILER} is "
                        "${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
    message(FATAL_ERROR "tilesparse needs nvcc 12.4 or newer; ${CMAKE_CUDA_COMPILER} is ${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
endmacro()

# nvcc takes up to 4 GB: bounds how many run at a time (Ninja).
function(bound_parallel_nvcc)
  cmake_host_system_information(RESULT memory QUERY AVAILABLE_PHYSICAL_MEMORY)
  math(EXPR jobs "${memory} / 4000")
  if(jobs LESS 1)
    set(jobs 1)
  endif()
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS nvcc=${jobs})
endfunction()

set(registry "")
if(TILESPARSE_CUDA)
  include(Architectures)
  enable_cuda()
  bound_parallel_nvcc()
  add_subdirectory(third_party/cutlass)
  # Kernels for 9.0 take longest, and are compiled first: else one core would wait for the last of them.
  set(longest_first ${TILESPARSE_ARCHITECTURES})
  list(REVERSE longest_first)
  foreach(architecture IN LISTS longest_first)
    add_architecture(${architecture})
  endforeach()
  add_common(plans plans.cu)
  add_common(values values.cu)
  add_common(elementwise combine.cu gate.cu group_sums.cu groups.cu quantize.cu skip.cu sums.cu)
  target_compile_definitions(tilesparse PRIVATE TILESPARSE_CUDA)
  target_include_directories(tilesparse SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  set_target_properties(tilesparse PROPERTIES LINKER_LANGUAGE CUDA CUDA_RUNTIME_LIBRARY Static
                                              CUDA_ARCHITECTURES OFF CUDA_STANDARD 17)
endif()
file(CONFIGURE OUTPUT generated/tilesparse_kernels.inc CONTENT "${registry}" @ONLY)
target_include_directories(tilesparse PRIVATE ${PROJECT_BINARY_DIR}/generated)
