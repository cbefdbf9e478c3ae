"""Block-sparse experts of vLLM: how they are loaded and what they compute.

vLLM's layer of experts (`RoutedExperts`) has no shards: each projection of all experts is one layer of the
checkpoint, ``gate_up`` (or ``up``) and ``down``. Weights that are not kept never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from ...config import LayerSpec
from ...errors import CheckpointError, UnsupportedError
from ...nn.experts import BlockSparseExperts
from .method import tensors_of
from .serving import Span, experts_for_serving, experts_part

if TYPE_CHECKING:
    from .config import TileSparseConfig

PROJECTIONS = ("gate_up", "up", "down")


def swiglu_oai(both: Tensor) -> Tensor:
    """Compute the activation of gpt-oss, whose gates and other features take turns."""
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def gelu_tanh(both: Tensor) -> Tensor:
    """Compute the gated unit with GELU by its tanh."""
    gate, up = both.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


# What is computed between the projections, by vLLM's names; None is what `BlockSparseExperts` has itself.
ACTIVATIONS: dict[str, tuple[str, Callable[[Tensor], Tensor] | None]] = {
    "silu": ("silu", None),
    "gelu": ("gelu", None),
    "gelu_tanh": ("none", gelu_tanh),
    "swigluoai": ("none", swiglu_oai),
    "silu_no_mul": ("silu", None),
    "gelu_no_mul": ("gelu", None),
    "relu2_no_mul": ("none", lambda y: F.relu(y).square()),
}
INTERLEAVED = {"swigluoai"}


class TileSparseExpertsMethod(FusedMoEMethodBase):
    """The method of a layer of block-sparse experts.

    Args:
        layer: of vLLM.
        specs: of both projections, by their names in the layer.
        prefix: vLLM's name of the layer.
        config: of the model.

    After loading the layer has a module ``experts``, a `BlockSparseExperts`.

    Raises:
        UnsupportedError: the layer, or the way it is served, was not tried with such experts.
    """

    def __init__(
        self, layer: Any, specs: Mapping[str, LayerSpec], prefix: str, config: TileSparseConfig
    ) -> None:
        super().__init__(layer.moe_config)
        self._specs, self._prefix, self._config = dict(specs), prefix, config
        self._activation = layer.activation.value
        self._gated = bool(self.moe.is_act_and_mul)
        self._tensors: dict[str, tuple[str, ...]] = {}
        self._given: dict[str, dict[str, Tensor]] = {name: {} for name in specs}
        self._cut: dict[str, Any] = {}
        reason = self._reason_not_served(layer)
        if reason is not None:
            raise UnsupportedError(f"{prefix}: {reason}")

    def _reason_not_served(self, layer: Any) -> str | None:
        parallel = self.moe.moe_parallel_config
        if self._activation not in ACTIVATIONS:
            return f"the activation {self._activation!r} of its experts is not known"
        if self.moe.swiglu_limit is not None and self._activation not in INTERLEAVED:
            return f"its activation has a limit of {self.moe.swiglu_limit}, which is not known"
        if layer.apply_router_weight_on_input:
            return "it multiplies the inputs of experts, not their results, by the weights of the router"
        if parallel.use_ep:
            return "expert parallelism is not supported with block-sparse experts; use tensor parallelism"
        if parallel.dp_size > 1 or parallel.is_sequence_parallel:
            return "data and sequence parallelism were not tried with block-sparse experts"
        if self.moe.is_lora_enabled:
            return "vLLM has LoRA for experts by its own kernels alone, not for block-sparse ones"
        wanted = {"gate_up" if self._gated else "up", "down"}
        if wanted != {*self._specs}:
            return f"its experts need {' and '.join(sorted(wanted))}, got {' and '.join(sorted(self._specs))}"
        return None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register an empty parameter for each tensor of both projections; see vLLM's base class.

        Raises:
            CheckpointError: the projections are of other sizes than vLLM's layer.
        """
        self._own_features, self._dtype = intermediate_size_per_partition, params_dtype
        features = intermediate_size_per_partition * self.moe.moe_parallel_config.tp_size
        shapes = {
            name: (num_experts * hidden_size, features)
            if name == "down"
            else (num_experts * features * (1 + self._gated), hidden_size)
            for name in self._specs
        }
        for name, spec in self._specs.items():
            if spec.experts != num_experts or spec.shape != shapes[name]:
                raise CheckpointError(
                    f"{self._prefix}.{name}: must be {num_experts} experts of {shapes[name]} in all in vLLM, "
                    f"got {spec.experts} of {spec.shape}"
                )
            bias = ("bias",) if self.moe.has_bias else ()
            self._tensors[name] = (*tensors_of(spec), *bias)
            projection = nn.Module()
            for own in self._tensors[name]:
                parameter = nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
                parameter.weight_loader = partial(self._load, name, own)  # type: ignore[attr-defined]
                projection.register_parameter(own, parameter)
            layer.add_module(name, projection)
        # vLLM's own looks for projections by the names of dense ones.
        layer.load_weights = partial(self._load_weights, layer)

    def _load_weights(self, layer: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Keep the tensors that vLLM finds for the layer, and return their names."""
        for name, tensor in weights:
            own = name.removeprefix("routed_experts.")
            projection, _, last = own.rpartition(".")
            if last not in self._tensors.get(projection, ()):
                raise CheckpointError(f"{self._prefix}.{own}: must not be there: experts are block-sparse")
            self._load(projection, last, layer.get_parameter(own), tensor)
            yield own

    def _load(self, name: str, own: str, parameter: nn.Parameter, loaded: Tensor) -> None:
        given, spec = self._given[name], self._specs[name]
        given[own] = loaded
        if len(given) < len(self._tensors[name]):
            return
        columns = self._span_of_rank() if name == "down" else (0, spec.shape[1])
        rows = [(0, spec.shape[0])] if name == "down" else self._rows(spec)
        part = experts_part(f"{self._prefix}.{name}", spec, given, rows, columns, self._dtype)
        self._cut[name] = part.to(parameter.device)
        self._given[name] = {}

    def _span_of_rank(self) -> Span:
        rank = self.moe.moe_parallel_config.tp_rank
        return rank * self._own_features, (rank + 1) * self._own_features

    def _rows(self, spec: LayerSpec) -> list[Span]:
        """Return the features of all experts, gates and others, that this process needs."""
        begin, end = self._span_of_rank()
        halves = 1 + self._gated
        if self._activation in INTERLEAVED:
            begin, end, halves = 2 * begin, 2 * end, 1
        assert spec.experts is not None
        parts = spec.experts * halves
        size = spec.shape[0] // parts
        if size == end - begin:
            return [(0, spec.shape[0])]
        return [(part * size + begin, part * size + end) for part in range(parts)]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the experts ready to compute; vLLM calls it once everything is loaded.

        Raises:
            CheckpointError: a tensor is missing, or a layer of the checkpoint is not in the model.
        """
        if "experts" in layer._modules:
            return
        self._config.check_claimed()
        for name, wanted in self._tensors.items():
            if name not in self._cut:  # which vLLM does not look for in quantized models
                missing = sorted(set(wanted) - set(self._given[name]))
                raise CheckpointError(
                    f"{self._prefix}.{name}: {', '.join(missing)} must be in the checkpoint"
                )
        down, up = (experts_for_serving(self._cut.pop(name)) for name in sorted(self._tensors))
        for name in self._tensors:
            del layer._modules[name]
        activation, function = ACTIVATIONS[self._activation]
        apply_gate = None if function is None else lambda _, both: function(both)
        layer.experts = BlockSparseExperts(
            up, down, gated=self._gated, activation=activation, apply_gate=apply_gate
        )
        layer.experts.requires_grad_(False).eval()

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        """Return vLLM's config of experts that are not quantized: its kernels do not run."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Compute the sum [tokens, hidden] of the results of each token's experts, times their weights.

        Args:
            layer: that vLLM has.
            x: [tokens, hidden].
            topk_weights: [tokens, k], of vLLM's router.
            topk_ids: [tokens, k], the experts that it has chosen.
            shared_experts: which vLLM computes by itself.
            shared_experts_input: of these.
        """
        return layer.experts(x, topk_ids, topk_weights)  # type: ignore[no-any-return]
