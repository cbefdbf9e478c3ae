#!/usr/bin/env bash
# Checks that need a GPU, on the machine's first one:
#
#   tools/gpu_checks.sh SUMMARY [COMMIT]
#
# A fixed sample of every CUDA kernel under compute-sanitizer; the tests marked `gpu`, among them every kernel as smaller
# GPUs would run it; and 10^6 hostile calls of the C interface with a GPU in reach. Needs an installed tilesparse[test],
# compute-sanitizer and g++. SUMMARY, a JSON file, says what each check found; what cannot run or fails makes the exit
# status 1. Logs stay in build/gpu-checks. COMMIT is that of sources outside of a repository. JOBS sets the number of
# processes that share the GPU (6), except by tests marked `alone`.
set -uo pipefail
summary=$(realpath -m "$1")
cd "$(dirname "$0")/.." || exit
logs=build/gpu-checks
rm -rf "$logs" && mkdir -p "$logs"
jobs=${JOBS:-6}
export TILESPARSE_REQUIRE_GPU=1
pytest=(python -m pytest -q -p no:cacheprovider --maxprocesses="$jobs" -n "$jobs")
# Each layout and storage of each kernel, sums in several parts, grouped products, and the kernels that expand values.
sample=("${pytest[@]}" tests/python/test_kernels.py
    -k "test_small or (each_group and uneven) or expanded_values")

check() { # NAME COMMAND …: runs it, keeps its output and what the summary needs
    local name=$1 begin=$SECONDS status=0
    shift
    printf '=== %s\n' "$name"
    "$@" >"$logs/$name.txt" 2>&1 || status=$?
    printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - begin))" >>"$logs/checks.tsv"
    tail -n 1 "$logs/$name.txt"
}

sanitize() { # TOOL [option …]
    local tool=$1
    shift
    compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 9 "$@" "${sample[@]}"
}

# initcheck does not see what TMA stores, so that whoever reads a result seems to read memory that was never written:
# only reads by kernels of this library count.
initcheck() {
    local log=$logs/initcheck-all.txt
    compute-sanitizer --tool initcheck --target-processes all --print-limit 100000 "${sample[@]}" >"$log" 2>&1 || true
    if grep -A 1 'Uninitialized __global__' "$log" | grep -E ' at .*ts::(sm|plans|values|sums|tma)'; then return 1; fi
    grep -E '^[0-9]+ passed' "$log" # the tests themselves
}

# Warps of the kernel in float64 tell each other by volatile words what they need, which racecheck takes for races.
racecheck() {
    local log=$logs/racecheck-all.txt
    compute-sanitizer --tool racecheck --target-processes all --print-limit 100000 "${sample[@]}" >"$log" 2>&1 || true
    if grep 'Race reported' "$log" | grep -v dds_f64_kernel; then return 1; fi
    grep -E '^[0-9]+ passed' "$log"
}

fuzz() { # the ABI, with products on the GPU
    local folder
    folder=$(python -c "import pathlib, tilesparse; print(pathlib.Path(tilesparse._C.libraries()[0]).parent)")
    g++ -std=c++17 -O1 -I cpp/include tests/cpp/fuzz_abi.cpp -o "$logs/fuzz_abi" \
        -L "$folder" -Wl,-rpath,"$folder" -ltilesparse -lpthread && "$logs/fuzz_abi" 1000000
}

check memcheck sanitize memcheck --leak-check no
check racecheck racecheck
check synccheck sanitize synccheck
check initcheck initcheck
check fuzz fuzz
check tests "${pytest[@]}" -m "gpu and not alone" tests/python
check alone python -m pytest -q -p no:cacheprovider -m "gpu and alone" tests/python
python - "$logs" "$summary" "${2:-}" <<'END'
import sys
from pathlib import Path

sys.path.insert(0, "benchmarks")
from harness import environment, write_json

logs, summary, commit = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] or None
checks = {}
for name, status, seconds in (line.split("\t") for line in (logs / "checks.tsv").read_text().splitlines()):
    lines = (logs / f"{name}.txt").read_text(errors="replace").splitlines()
    said = [line.strip("= ") for line in lines if line.strip()]
    checks[name] = {"passed": status == "0", "seconds": int(seconds), "says": said[-1] if said else ""}
write_json(summary, {"environment": environment(commit), "checks": checks})
failed = [name for name, check in checks.items() if not check["passed"]]
print(f"failed: {', '.join(failed)}" if failed else f"all {len(checks)} checks passed")
sys.exit(bool(failed))
END
