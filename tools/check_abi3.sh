#!/usr/bin/env bash
# Checks that a wheel of the stable ABI keeps to it, and loads its module under other Pythons, without PyTorch:
#
#   tools/check_abi3.sh WHEEL PYTHON …
#
# Needs abi3audit.
set -euo pipefail
wheel=$1
shift

python -m abi3audit --strict "$wheel"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python -m zipfile -e "$wheel" "$folder"
for python in "$@"; do
    "$python" - "$folder/tilesparse/_C.abi3.so" <<'EOF'
import importlib.util, sys

spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print("Python %d.%d loads tilesparse %s for %s" % (*sys.version_info[:2], module.version(), module.architectures()))
EOF
done
