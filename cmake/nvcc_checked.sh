#!/bin/sh
# Runs nvcc and fails where ptxas reports that it serialised wgmma instructions: it calls that
# information, but such a kernel runs at a fraction of its speed.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$@" >"$log" 2>&1
status=$?
cat "$log" >&2
if grep -q 'wgmma.mma_async instructions are serialized' "$log"; then
    echo "error: ptxas serialised wgmma instructions" >&2
    exit 1
fi
exit $status
