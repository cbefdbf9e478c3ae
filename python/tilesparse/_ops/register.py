"""Registration of operators: kernels, fakes and gradients by the names of their schemas."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .._checks import Index, check_index
from .._runtime.lookup import prepared
from .._runtime.private import INLINED, packaging
from ..errors import UnsupportedError
from .autograd import Product, autograd_of, transformable
from .schemas import LIB

DEVICES = "CPU", "CUDA"


def _rebundled(
    function: Callable[..., Any], factors: int, pattern_of: Callable[[Index], Any], absent: tuple[Any, ...]
) -> Callable[..., Any]:
    """Wrap a function to take the fields of the pattern one by one, and without the absent arguments."""
    fields = len(Index._fields)
    second = (None,) if factors == 1 else ()

    def flat(*arguments: Any) -> Any:
        crow, col, slot, shape, block_shape = arguments[factors : factors + fields]
        pattern = pattern_of(Index(crow, col, slot, tuple(shape), tuple(block_shape)))
        return function(*arguments[:factors], *second, pattern, *absent, *arguments[factors + fields :])

    return flat


def _checked(index: Index) -> Index:
    check_index(index)
    settings = packaging()
    if settings is not None:
        _check_packaging(settings, [array.shape[0] for array in index[:3]])
    return index


def _check_packaging(settings: Any, sizes: list[int]) -> None:
    """Raise for settings under which AOTInductor would silently break patterns."""
    if settings.aot_inductor.use_runtime_constant_folding:
        raise UnsupportedError(
            "aot_inductor.use_runtime_constant_folding must be False, got True: AOTInductor calls other "
            "operators than these in the code that it folds"
        )
    if min(sizes) <= INLINED and not settings.always_keep_tensor_constants:
        raise UnsupportedError(
            f"pattern must have arrays of more than {INLINED} entries, got {sizes}: AOTInductor writes "
            "smaller arrays into its code, where load_constants does not reach them and every call prepares "
            'the pattern anew; compile with inductor_configs={"always_keep_tensor_constants": True}'
        )


def register(
    name: str,
    factors: int,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    absent: tuple[Any, ...] = (),
    looks: bool = False,
) -> Any:
    pattern_of = partial(prepared, looking=looks)
    checked_fake = _rebundled(fake, factors, _checked, absent)
    torch.library.register_fake(f"tilesparse::{name}", checked_fake, lib=LIB)
    for device in DEVICES:
        LIB.impl(name, _rebundled(kernel, factors, pattern_of, absent), device)
    return getattr(torch.ops.tilesparse, name).default


_REST = None, None, 0, False  # bias, residual, activation and feature_major, of which operators take the last


def differentiable(
    name: str,
    factors: int,
    functions: tuple[Any, Any, Any],
    optional: int = 0,
    options: int = 0,
    looks: bool = False,
    kept: slice = slice(None),
) -> Product:
    kernel, fake, gradients = functions
    absent = _REST[: len(_REST) - optional - options]
    op = register(name, factors, kernel, fake, absent, looks)
    backward, setup_context = autograd_of(gradients, factors, optional, options, kept)
    torch.library.register_autograd(f"tilesparse::{name}", backward, setup_context=setup_context, lib=LIB)
    rest = slice(len(absent), None)
    return Product(op, rest, kernel, gradients, transformable(op, backward, setup_context), looks, kept)


def register_plainly(
    name: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    devices: tuple[str, ...] = DEVICES,
    gradients: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
) -> Any:
    """Register an operator without a pattern; ``gradients``: (backward, setup_context)."""
    torch.library.register_fake(f"tilesparse::{name}", fake, lib=LIB)
    for device in devices:
        LIB.impl(name, kernel, device)
    if gradients is not None:
        backward, setup_context = gradients
        torch.library.register_autograd(f"tilesparse::{name}", backward, setup_context=setup_context, lib=LIB)
    return getattr(torch.ops.tilesparse, name).default
