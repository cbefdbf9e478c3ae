file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/generated/tilesparse_kernels.inc "")
target_include_directories(tilesparse PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/generated)
