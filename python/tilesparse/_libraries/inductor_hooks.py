"""One quantization for all layers with one input, in graphs that Inductor compiles.

PyTorch merges equal operators of graphs with a backward pass, but not of those for inference.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .hooks import when_imported

_PASSES = "torch._inductor.fx_passes.post_grad"


def register() -> None:
    """Have Inductor merge equal quantizations, now or as soon as it is imported."""
    when_imported(_PASSES, _add_pass, "compiled layers that share an input quantize it once each")


def _add_pass(module: Any) -> None:
    matcher: Any = importlib.import_module("torch._inductor.pattern_matcher")
    x, dtype = matcher.KeywordArg("x"), matcher.KeywordArg("dtype")
    for operator, arguments in (("quantize", (x, dtype)), ("quantize_groups", (x,))):
        pattern = matcher.CallFunction(getattr(torch.ops.tilesparse, operator).default, *arguments)
        matcher.register_graph_pattern(pattern, pass_dict=module.pass_patterns[0])(_merge)


def _merge(match: Any, x: torch.fx.Node, dtype: int | None = None) -> None:
    """Replace a quantization by the first one of the same x, if nothing is written to in between."""
    node = match.output_node()
    equal = {user for user in x.users if _is_equal(user, node)}
    first = next(user for user in node.graph.nodes if user in equal)
    if first is not node:
        node.replace_all_uses_with(first)
        match.graph.erase_node(node)


def _is_equal(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    return (
        node.target is other.target
        and node.args == other.args
        and node.meta.get("mutation_region_id") == other.meta.get("mutation_region_id")
        and node.meta.get("custom", {}).get("stream") == other.meta.get("custom", {}).get("stream")
    )
