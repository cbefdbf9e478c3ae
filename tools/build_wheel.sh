#!/usr/bin/env bash
# Builds the wheel of the running Python and repairs it for other systems:
#
#   tools/build_wheel.sh FOLDER [option of pip wheel …]
#
# Needs auditwheel and patchelf. Two builds of one commit, in one place and with one compiler, have the same content.
set -euo pipefail
folder=$(realpath -m "$1")
shift
cd "$(dirname "$0")/.."

raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
python -m pip wheel --quiet --no-deps --wheel-dir "$raw" "$@" .
# No library is to be taken in: there is no OpenMP runtime among those that are needed, and no CUDA library.
python -m auditwheel repair --wheel-dir "$folder" "$raw"/*.whl
ls "$folder"/*.whl
