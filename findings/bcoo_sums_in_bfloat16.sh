#!/usr/bin/env bash
# A product with JAX's BCOO in bfloat16 adds up in bfloat16, and so stops adding.
#
# Package:   jax 0.10.2, jax.experimental.sparse.BCOO, on the CPU
# Guess:     W @ x has the accuracy of the dense product, whose factors are bfloat16 and whose sums are float32.
# Behaviour: the products of a row are added one after another to a bfloat16 number. It has 8 bits: from 256 on, adding 1
#            changes nothing. Nothing warns, and jit gives the same.
# Seen:      1024 ones times 1024 ones: dense 1024, BCOO 256
#            normal numbers, 1024 features, density .1: relative error .0017 dense, .0118 BCOO
# Matters:   who checks a block-sparse product in bfloat16 against BCOO, or trains through it, meets sums that are wrong by
#            percents where inputs are positive, such as after ReLU. Cast to float32 first.
#
# Exits with 0 while this is so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 numpy

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO


def product(w, x):
    return w @ x


ones = jnp.ones((1, 1024), jnp.bfloat16)
dense = float(product(ones, ones.T)[0, 0])
sparse = float(product(BCOO.fromdense(ones), ones.T)[0, 0])
jitted = float(jax.jit(product)(BCOO.fromdense(ones), ones.T)[0, 0])
print("1024 ones times 1024 ones: dense", dense, "BCOO", sparse, "BCOO under jit", jitted)

numbers = np.random.default_rng(0)
w = numbers.standard_normal((1024, 1024)) * (numbers.random((1024, 1024)) < 0.1)
w, x = (jnp.asarray(one, jnp.bfloat16) for one in (w, numbers.standard_normal((1024, 16))))
exact = np.asarray(w, np.float64) @ np.asarray(x, np.float64)
errors = [
    np.linalg.norm(np.asarray(product(one, x), np.float64) - exact) / np.linalg.norm(exact)
    for one in (w, BCOO.fromdense(w))
]
print("normal numbers, relative errors: dense %.4f, BCOO %.4f" % tuple(errors))
assert dense == 1024 and sparse == jitted == 256 and errors[1] > 4 * errors[0], "this has changed"
PYTHON
