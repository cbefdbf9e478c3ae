"""Results of the plugin for vLLM, without vLLM: in inference mode, compiled in pieces, in CUDA graphs.

Layers are cut, merged and stored as the plugin does, and compared with the layers of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import DEVICES, randn
from torch import Tensor, nn

from tilesparse import BlockSparseLinear
from tilesparse.integrations.vllm.serving import dense_part, for_serving, merged, multiplied, sparse_part

HIDDEN, ROWS = 256, (256, 128, 128)  # of q, k and v
SIZES = (1, 2, 8, 33)  # tokens that are captured
STORED: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"nm": (2, 4)},
    "compressed": {"nm": (2, 4), "storage": "compressed"},
    "int8": {"storage": "int8"},
    "2:4 float8": {"nm": (2, 4), "storage": "float8_e4m3fn"},
    "int4": {"storage": "int4"},
    "int8 W8A8": {"storage": "int8", "activations": "int8"},
}


class Attention(nn.Module):
    """q, k and v as vLLM has them, what it does not compile, and the layer after that."""

    def __init__(self, name: str, device: str, dense_k: bool = False) -> None:
        super().__init__()
        self.own = nn.ModuleList(
            sparse(HIDDEN, rows, name, seed).to(device) for seed, rows in enumerate((*ROWS, HIDDEN))
        )
        if dense_k:
            self.own[1] = nn.Linear(HIDDEN, ROWS[1], bias=False, dtype=torch.bfloat16, device=device)
        parts = [part_of(layer) for layer in self.own]
        self.qkv = nn.ModuleList(for_serving(part) for part in merged(parts[:3]))
        self.output = nn.ModuleList([for_serving(parts[3])])
        self.requires_grad_(False).eval()
        self.first: Callable[[Tensor], Tensor] = lambda x: multiplied(self.qkv, x)
        self.second: Callable[[Tensor], Tensor] = lambda x: multiplied(self.output, x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).split(ROWS, -1)
        return self.second(between(q, k, v))

    def expected(self, x: Tensor) -> Tensor:
        """The same by the layers of the checkpoint."""
        q, k, v, output = self.own
        return output(between(q(x), k(x), v(x)))


def sparse(columns: int, rows: int, name: str, seed: int) -> BlockSparseLinear:
    generator = torch.Generator().manual_seed(seed)
    options: Any = {"block_shape": (64, 32), "generator": generator, "dtype": torch.bfloat16, **STORED[name]}
    return BlockSparseLinear(columns, rows, False, 0.25, **options)


def part_of(layer: Any) -> nn.Module:
    rows, columns = [(0, layer.out_features)], (0, layer.in_features)
    if isinstance(layer, nn.Linear):
        return dense_part(layer.weight, rows, columns, torch.bfloat16)
    return sparse_part("layer", layer.spec, layer.state_dict(), rows, columns, torch.bfloat16)


def between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stands for attention: it needs all three, and mixes tokens."""
    return q * torch.cat([k, v], -1).tanh().sum(0, keepdim=True)


def x_of(tokens: int, device: str, seed: int = 0) -> Tensor:
    return randn(tokens, HIDDEN, dtype=torch.bfloat16, device=device, seed=seed)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.03, atol=0.03 * float(expected.abs().max()))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("device", DEVICES)
def test_merged_layers_in_inference_mode(name: str, device: str) -> None:
    with torch.inference_mode():  # in which vLLM makes its model, too
        model = Attention(name, device)
        assert len(model.qkv) == 1
        for tokens in SIZES:
            x = x_of(tokens, device)
            assert_same(model(x), model.expected(x))


@pytest.mark.parametrize("name", ["plain", "int8 W8A8"])
@pytest.mark.parametrize("dense_k", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_pieces_compiled_for_any_number_of_tokens(name: str, dense_k: bool, device: str) -> None:
    model = Attention(name, device, dense_k)
    assert len(model.qkv) == (3 if dense_k else 1)
    compile_pieces(model)
    with torch.inference_mode():
        for tokens in SIZES:
            x = x_of(tokens, device)
            assert_same(model(x), model.expected(x))


def compile_pieces(model: Attention) -> None:
    """Compile what lies before and after attention, each as one graph, as vLLM does."""
    options: Any = {"fullgraph": True, "dynamic": True}
    model.first, model.second = (torch.compile(piece, **options) for piece in (model.first, model.second))


@pytest.mark.gpu
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_graphs_for_numbers_of_tokens_in_one_pool(name: str, compiled: bool) -> None:
    """The largest first, with inputs and outputs in buffers that all sizes share."""
    model = Attention(name, "cuda")
    if compiled:
        compile_pieces(model)
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    source, result = (torch.zeros(max(SIZES), HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    with torch.inference_mode():
        for tokens in SIZES:
            model(source[:tokens])
        pool = torch.cuda.graph_pool_handle()
        for tokens in sorted(SIZES, reverse=True):
            graphs[tokens] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[tokens], pool=pool):
                result[:tokens] = model(source[:tokens])
        for seed, tokens in enumerate((*SIZES, *reversed(SIZES))):
            x = x_of(tokens, "cuda", seed)
            source[:tokens] = x
            graphs[tokens].replay()
            assert_same(result[:tokens], model.expected(x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", STORED)
def test_each_piece_in_a_graph_of_its_own(name: str) -> None:
    """Piecewise graphs: attention runs between two replays."""
    model, tokens = Attention(name, "cuda"), 8
    compile_pieces(model)
    with torch.inference_mode():
        x = x_of(tokens, "cuda")
        model(x)
        captured = []
        for piece, source in ((model.first, x.clone()), (model.second, x.clone())):
            graph = torch.cuda.CUDAGraph()
            piece(source)
            with torch.cuda.graph(graph):
                result = piece(source)
            captured.append((graph, source, result))
        for seed in range(3):
            x = x_of(tokens, "cuda", seed)
            (first, source, qkv), (second, mixed, y) = captured
            source.copy_(x)
            first.replay()
            mixed.copy_(between(*qkv.split(ROWS, -1)))
            second.replay()
            assert_same(y, model.expected(x))
