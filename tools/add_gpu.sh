#!/usr/bin/env bash
# tools/add_gpu.sh NAME [SECONDS]: times all kernels on the GPU of this machine, fits estimates to them, and builds the
# library again with the new coefficients. NAME begins the file of results, as a100; see docs/developers/plans.md.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?name of the file, as a100} seconds=${2:-1500}
python benchmarks/bench_kernels.py --budget "$seconds" --output "benchmarks/results/${name}_kernels.json"
python benchmarks/fit_estimates.py --left-out
pip install --no-build-isolation -e .
