# Licences beside the library, and in wheels a software bill of materials: what was compiled into it, in the versions
# of this build. Wheels get the licences from pyproject.toml.
if(is_wheel)
  set(cuda_components "")
  if(TILESPARSE_CUDA)
    string(REGEX MATCH "^[0-9]+\\.[0-9]+" cuda_version "${CMAKE_CUDA_COMPILER_VERSION}")
    get_property(cutlass_version TARGET cutlass PROPERTY VERSION)
    string(CONFIGURE [[
    {"type": "library", "name": "cutlass", "version": "@cutlass_version@", "purl": "pkg:github/nvidia/cutlass@v@cutlass_version@",
     "licenses": [{"license": {"id": "BSD-3-Clause"}}]},
    {"type": "library", "name": "cudart_static", "version": "@cuda_version@", "publisher": "NVIDIA Corporation",
     "licenses": [{"license": {"name": "CUDA Toolkit EULA", "url": "https://docs.nvidia.com/cuda/eula/"}}]},]]
      cuda_components @ONLY)
  endif()
  configure_file(${CMAKE_CURRENT_LIST_DIR}/sbom.cdx.json.in tilesparse.cdx.json @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/tilesparse.cdx.json DESTINATION ${SKBUILD_METADATA_DIR}/sboms COMPONENT python)
elseif(TILESPARSE_INSTALL)
  install(FILES LICENSE third_party/NOTICE.txt DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/tilesparse COMPONENT core)
endif()
