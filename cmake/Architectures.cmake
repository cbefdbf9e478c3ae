# The architectures kernels are compiled for, one line each. A number N compiles cuda/smN into native code
# and PTX, which every later GPU runs; with the suffix "a" into native code for that GPU alone.
set(known_architectures
    80
    90a
)
set(TILESPARSE_ARCHITECTURES "${known_architectures}" CACHE STRING "CUDA architectures to build")

foreach(architecture IN LISTS TILESPARSE_ARCHITECTURES)
  if(NOT architecture IN_LIST known_architectures)
    message(FATAL_ERROR "TILESPARSE_ARCHITECTURES names ${architecture}; the kernels exist for: ${known_architectures}")
  endif()
endforeach()
