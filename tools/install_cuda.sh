#!/usr/bin/env bash
# Installs the CUDA compiler that wheels are built with into a manylinux_2_28 container, and ccache, so that the
# kernels are compiled once for all Pythons. CUDA 12.9 knows every GPU that wheels have code for, and what it links
# runs with drivers from 525 on.
set -euo pipefail
case $(uname -m) in
    x86_64) folder=x86_64 ;;
    aarch64) folder=sbsa ;;
    *) echo "there is no CUDA toolkit for $(uname -m)" >&2 && exit 1 ;;
esac
dnf --assumeyes --quiet install dnf-plugins-core epel-release
dnf config-manager --add-repo \
    "https://developer.download.nvidia.com/compute/cuda/repos/rhel8/$folder/cuda-rhel8.repo"
dnf --assumeyes --quiet install ccache cuda-nvcc-12-9 cuda-cudart-devel-12-9 cuda-cccl-12-9
