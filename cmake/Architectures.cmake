# The architectures kernels are compiled for, one line each. A number N compiles the folder
# cuda/smN, or the one named below, into native code and PTX, which every later GPU runs; with the suffix "a" into native
# code for that GPU alone.
set(known_architectures
    80
    90a
)
set(folder_of_80 ampere)
set(folder_of_90 hopper)
set(TILESPARSE_ARCHITECTURES "${known_architectures}" CACHE STRING "CUDA architectures to build")

# GPUs that run cuda/ampere from its PTX, which the driver translates when a kernel is first used, unless there is
# native code for them too: 9.0 (float32, few tokens), 10.x and 12.x. 8.6 and 8.9 run that for 8.0 as it is. Each of
# them makes the library larger by a third and its build longer by as much, so that it is for releases.
set(known_native 90 100 120)
set(TILESPARSE_NATIVE "" CACHE STRING "GPUs to compile cuda/ampere for natively as well: some of ${known_native}, or all")
set(native_architectures "${TILESPARSE_NATIVE}")
if(native_architectures STREQUAL "all")
  set(native_architectures ${known_native})
endif()

foreach(architecture IN LISTS TILESPARSE_ARCHITECTURES)
  if(NOT architecture IN_LIST known_architectures)
    message(FATAL_ERROR "TILESPARSE_ARCHITECTURES names ${architecture}; the kernels exist for: ${known_architectures}")
  endif()
endforeach()
foreach(architecture IN LISTS native_architectures)
  if(NOT architecture IN_LIST known_native)
    message(FATAL_ERROR "TILESPARSE_NATIVE names ${architecture}; it may name ${known_native}, or be all")
  endif()
endforeach()
list(TRANSFORM native_architectures APPEND "-real" OUTPUT_VARIABLE native_code)

# 8.9 has the first instruction for float8. Kernels of cuda/ampere that multiply it are compiled for that, too, into native
# code and PTX, which later GPUs run in place of that for 8.0. Boards of Tegra before it, such as Orin, need the latter.
set(float8_code 80 89)
