#!/bin/sh
# Runs nvcc and fails where ptxas reports that it serialised wgmma instructions (C7510, C7512, C7514,
# C7520): it calls that information, but such a kernel runs at a fraction of its speed.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$@" >"$log" 2>&1
status=$?
cat "$log" >&2
if grep -qE '\(C75(10|12|14|20)\)' "$log"; then
    echo "error: ptxas serialised wgmma instructions" >&2
    exit 1
fi
exit $status
