"""Private names of PyTorch used for speed, with public replacements where they are missing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.autograd import forward_ad, profiler

from ..errors import UnsupportedError


def _of_pytorch(name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(torch._C, name, otherwise)
    return found


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# The current stream of a CUDA device, as an integer.
current_stream: Callable[[int], int] = _of_pytorch("_cuda_getCurrentRawStream", _current_stream)
current_device: Callable[[], int] = _of_pytorch("_cuda_getDevice", torch.cuda.current_device)
# True if autocast may be on for some device.
is_any_autocast_enabled: Callable[[], bool] = _of_pytorch("_is_any_autocast_enabled", lambda: True)
# True if a transform of ``torch.func`` is active. PyTorch raises for operators that it does not expect there.
transforms_active: Callable[[], bool] = _of_pytorch("_are_functorch_transforms_active", lambda: False)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_when_compiled(function: _Function) -> _Function:
    """Have compiled code take the function's result for a constant.

    This is ``torch.compiler.assume_constant_result`` without importing the compiler, which takes about as
    long as importing PyTorch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def with_normal_tensors(function: _Function) -> _Function:
    """Have a function make tensors that can be trained and written to, also within inference mode."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return cast(_Function, call)


@constant_when_compiled
def tf32_allowed() -> bool:
    """Return True if PyTorch's settings allow TF32 for float32 products; compiled code asks when traced."""
    if hasattr(torch._C, "_get_fp32_precision_getter"):  # PyTorch 2.9 and later
        return bool(torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32")
    return bool(torch.backends.cuda.matmul.allow_tf32)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Compute float32 products in float32, whatever the settings.

    Since PyTorch 2.9 the settings have two forms, and one cannot be read after the other was used.
    """
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        setting = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(setting)
        return
    every: Any = torch.backends
    backends = [every.cuda.matmul, every.mkldnn.matmul]
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _keys(*names: str) -> int:
    keys = 0
    for name in names:
        keys |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return keys


# The keys that the dispatcher adds to those of tensors without any mode, transform or tracer. Inference mode
# leaves autograd's keys out.
_PLAIN_MODES = {_keys("BackendSelect", "ADInplaceOrView"), _keys("BackendSelect")}
_CAN_TELL = all(
    hasattr(owner, name)
    for owner, name in (
        (torch._C, "_dispatch_tls_local_include_set"),
        (torch._C, "_len_torch_function_stack"),
        (forward_ad, "_current_level"),
        (profiler, "_is_profiler_enabled"),
    )
)


def refuse_fakes(name: str) -> None:
    """Raise where FakeTensorMode is active: what it makes has no contents, and patterns do."""
    if type(torch.empty(0, device="cpu")).__name__ == "FakeTensor":
        raise UnsupportedError(
            f"{name} must not be made under FakeTensorMode, where a pattern would have no contents; make it "
            "before the mode is entered, and convert its tensors by mode.from_tensor where it needs fake ones"
        )


def version(tensor: torch.Tensor) -> int:
    """Return PyTorch's count of writes to a tensor; -1 for one made in inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def may_be_watched(profiled: bool = False) -> bool:
    """Return True if a mode, transform, tracer or profiler may act on operators, or this is unknown.

    ``profiled``: whether a profiler may.
    """
    return (
        not _CAN_TELL
        or torch._C._dispatch_tls_local_include_set().raw_repr() not in _PLAIN_MODES
        or torch._C._len_torch_function_stack() > 0
        or forward_ad._current_level >= 0
        or (not profiled and profiler._is_profiler_enabled)
    )


def is_forward_mode() -> bool:
    """Return True if forward-mode differentiation may be active."""
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


def is_leaf_added_to(node: Any) -> bool | None:
    """Return True if the backward pass under way adds to the ``grad`` of a leaf, given by its node.

    None: it returns the gradient to its caller, as ``torch.autograd.grad`` does.
    """
    ask = getattr(torch._C, "_will_engine_execute_node", None)
    if ask is None:
        return True
    try:
        return bool(ask(node))
    except RuntimeError:
        return None


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if something is called before or after each step of this optimizer."""
    hooks = (getattr(optimizer, f"_optimizer_step_{when}_hooks", ()) for when in ("pre", "post"))
    return any(map(len, hooks))


def default_store() -> Any:
    """Return the store of the default process group, or None if PyTorch does not expose it."""
    ask = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return None if ask is None else ask()


def is_exporting() -> bool:
    """Return True while torch.export traces; PyTorch 2.11 says so of all code that it compiles."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def of_example(number: int) -> int | None:
    """Return the value of a traced number in the example, without a guard; None if it depends on data."""
    node = getattr(number, "node", None)
    hint: int | None = number if node is None else node.hint
    return hint


INLINED = 8  # entries of a constant, up to which AOTInductor writes it into its code


def packaging() -> Any:
    """Return Inductor's settings while it makes a package ahead of time, otherwise None."""
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if virtualized is None or getattr(virtualized.V, "aot_compilation", False) is not True:
        return None
    return sys.modules["torch._inductor.config"]


def with_own_number(parent: torch.nn.Module, hook: Any) -> Any:
    """Give a hook that is always called a number that is the same in all modules of a kind.

    PyTorch counts hooks of the whole process, and compiled code asks for the number. With those numbers every
    layer of a model would be compiled by itself.
    """
    number = min(0, *parent._forward_hooks) - 1
    for hooks in (parent._forward_hooks, parent._forward_hooks_always_called):
        hooks[number] = hooks.pop(hook.id)  # type: ignore[assignment]
    hook.id = number
    return hook
