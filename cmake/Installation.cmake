# Installed files, in the component `core`: headers, libraries, and how CMake and pkg-config find them.
include(CMakePackageConfigHelpers)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tilesparse)

install(DIRECTORY cpp/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT core)
install(TARGETS tilesparse EXPORT tilesparse COMPONENT core)
install(EXPORT tilesparse NAMESPACE tilesparse:: FILE tilesparseTargets.cmake DESTINATION ${config_dir} COMPONENT core)
if(TILESPARSE_STATIC) # a component of its own, since what it needs has to be found first
  install(TARGETS tilesparse_static EXPORT tilesparse_static COMPONENT core)
  install(EXPORT tilesparse_static NAMESPACE tilesparse:: FILE tilesparseStaticTargets.cmake
          DESTINATION ${config_dir} COMPONENT core)
endif()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tilesparseConfig.cmake.in tilesparseConfig.cmake
                              INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(tilesparseConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tilesparseConfig.cmake ${PROJECT_BINARY_DIR}/tilesparseConfigVersion.cmake
        DESTINATION ${config_dir} COMPONENT core)

# Everything from where the file lies, so that an installation may be moved, also one whose LIBDIR is an absolute path.
set(pc_dir ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pc_prefix ${pc_dir} ${CMAKE_INSTALL_PREFIX})
file(RELATIVE_PATH pc_includedir ${pc_dir} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
set(pc_libraries_private "") # of the static library
if(TILESPARSE_STATIC)
  if(TILESPARSE_CUDA)
    set(cudart "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt ")
  endif()
  set(pc_libraries_private "-lstdc++ -lm ${cudart}-lpthread -ldl")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/tilesparse.pc.in tilesparse.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tilesparse.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT core)
