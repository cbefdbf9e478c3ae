"""A byte-level mixture of experts, and the text that it learns: Python sources of installed packages."""

from __future__ import annotations

import copy
import random
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import rate_of
from torch import Tensor, nn
from torch.nn import functional as F

from tilesparse.cli.demo import GPT, Size, synchronize
from tilesparse.functional import gated
from tilesparse.nn.routing import combined, gathered, routing_of

# Whole packages, named before any training; the files of all others are trained on.
HELD_OUT = ("asyncio", "email", "huggingface_hub", "jinja2", "networkx", "unittest")
HEAD = 64  # features of an attention head
BALANCE = 0.01  # weight of the loss that balances experts
WARM_UP = 0.02  # of the time
STEPS_AT_A_TIME = 10  # limit of how far the host may run ahead


class Experts(nn.Module):
    """Dense experts down_e(silu(gate_e(x)) ⊙ up_e(x)) with the interface that Transformers' experts have.

    bfloat16 on a GPU is one grouped product for each projection, anything else a loop over experts.
    """

    def __init__(self, experts: int, width: int, intermediate: int) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.has_post_expert_norm = True, False, False
        self.is_transposed, self.is_concatenated = False, True
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(_uniform(experts, 2 * intermediate, width))
        self.down_proj = nn.Parameter(_uniform(experts, width, intermediate))
        self.act_fn = nn.SiLU()

    def _default_apply_gate(self, gate_up: Tensor) -> Tensor:
        return gated(gate_up, activation="silu")

    _apply_gate = _default_apply_gate

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map hidden_states [tokens, width] to the weighted sum over each token's experts."""
        routing = routing_of(top_k_index, self.num_experts)
        x = gathered(hidden_states, routing)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = self._apply_gate(_grouped(x, self.gate_up_proj, routing.offsets))
        y = _grouped(y, self.down_proj, routing.offsets)
        return combined(y, top_k_weights, routing).to(hidden_states.dtype)


def _uniform(experts: int, out_features: int, in_features: int) -> Tensor:
    return torch.empty(experts, out_features, in_features).uniform_(-1, 1) / in_features**0.5


def _grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    weight = weight.to(x.dtype)
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, weight.mT, offs=offsets[1:])
    parts = x.split(offsets.diff().tolist())
    return torch.cat([F.linear(part, own) for part, own in zip(parts, weight, strict=True)])


class Mixture(nn.Module):
    """A router and its experts: each token takes the ``top_k`` best ones, by their renormalised shares.

    Attributes:
        balance: the loss of Fedus et al., "Switch Transformers" (JMLR 2022), of the last call in training.
    """

    balance: Tensor | None = None

    def __init__(self, width: int, experts: int, intermediate: int, top_k: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts: nn.Module = Experts(experts, width, intermediate)
        self.top_k = top_k

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return (index, weights) [..., top_k] of the router's logits [..., experts]."""
        shares, index = logits.float().softmax(-1).topk(self.top_k)
        return index, shares / shares.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., width] to the same shape."""
        hidden = x.flatten(0, -2)
        logits = self.router(hidden)
        index, weights = self.route(logits)
        if self.training:
            chosen = F.one_hot(index, logits.shape[-1]).float().mean((0, 1))
            self.balance = logits.shape[-1] * (chosen * logits.float().softmax(-1).mean(0)).sum()
        return self.experts(hidden, index, weights).view(x.shape)


def language_model(size: Size, experts: int, intermediate: int, top_k: int) -> GPT:
    """Return a GPT of bytes with a mixture in the place of each MLP."""
    model = GPT(size)
    for block in model.blocks:
        block.mlp = Mixture(size.width, experts, intermediate, top_k)
    return model


def mixtures(model: nn.Module) -> dict[str, Mixture]:
    """Return the mixtures of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Mixture)}


def without_experts(model: nn.Module, kept: Mapping[str, Sequence[int]]) -> nn.Module:
    """Return a copy of a dense model with some experts of each mixture; routers know only these."""
    model = copy.deepcopy(model)
    for name, mixture in mixtures(model).items():
        numbers: Any = list(kept[name])
        for module, parameter in (
            (mixture.router, "weight"),
            (mixture.experts, "gate_up_proj"),
            (mixture.experts, "down_proj"),
        ):
            setattr(module, parameter, nn.Parameter(module.get_parameter(parameter).detach()[numbers]))
        mixture.router.out_features = mixture.experts.num_experts = len(numbers)  # type: ignore[assignment]
        mixture.top_k = min(mixture.top_k, len(numbers))
    return model


class Text:
    """Bytes of sources: windows [batch, context + 1] that all contenders see in the same order."""

    def __init__(self, context: int, batch: int, most: int, held_out: int, device: torch.device) -> None:
        parts, self.sizes = load_packages(most)
        self._training, other = (
            torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).to(device) for part in parts
        )
        self._batch, self._window = batch, torch.arange(context + 1, device=device)
        self._generator = torch.Generator()
        self.restart(0)
        self.held_out = self.windows(other, held_out).split(batch)

    def restart(self, seed: int) -> None:
        """Begin the order of a seed."""
        self._generator.manual_seed(seed)

    def batch(self) -> Tensor:
        """Return the next batch of training text, int64."""
        return self.windows(self._training, self._batch)

    def windows(self, text: Tensor, count: int) -> Tensor:
        """Return so many windows at random places."""
        starts = torch.randint(len(text) - len(self._window), (count, 1), generator=self._generator)
        if text.is_cuda:
            starts = starts.pin_memory().to(text.device, non_blocking=True)
        return text[starts + self._window].long()


def load_packages(most: int) -> tuple[tuple[list[bytes], list[bytes]], dict[str, Any]]:
    """Return (training, held out) files of this installation, and how many bytes each part has.

    Of files that begin or end alike, such as copies in several packages, only one is taken.
    """
    roots = sorted((Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")), key=str, reverse=True)
    files = sorted({file for root in roots for file in root.rglob("*.py") if file.is_file()})
    random.Random(0).shuffle(files)
    files.sort(key=lambda file: _package(file, roots) not in HELD_OUT)  # of copies, the one held out counts
    parts: tuple[list[bytes], list[bytes]] = [], []
    seen: set[bytes] = set()
    sizes = dict.fromkeys(HELD_OUT, 0)
    training = 0
    for file in files:
        text, package = file.read_bytes(), _package(file, roots)
        ends = {text[:1000], text[-1000:]}
        if len(text) < 100 or not ends.isdisjoint(seen):
            continue
        seen |= ends
        if package in HELD_OUT:
            sizes[package] += len(text)
            parts[1].append(text)
        else:
            training += len(text)
            parts[0].append(text)
        if training > most:
            break
    return parts, {"training": training, "held_out": sizes}


def _package(file: Path, roots: Sequence[Path]) -> str:
    """Return the package of a file below the first root that holds it, the deepest."""
    root = next(root for root in roots if root in file.parents)
    return file.relative_to(root).parts[0].removesuffix(".py")


class Clock:
    """Progress of something that takes so many seconds of the device."""

    def __init__(self, seconds: float, device: torch.device) -> None:
        self._seconds, self._device, self._calls = seconds, device, 0
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._start

    def progress(self) -> float:
        """Return the progress from 0 on, and let the device catch up at times."""
        self._calls += 1
        if self._calls % STEPS_AT_A_TIME == 0:
            synchronize(self._device)
        return self.seconds() / self._seconds

    def rate(self) -> float:
        """Return the factor of the learning rate."""
        return rate_of(min(1.0, self.seconds() / self._seconds), WARM_UP)

    def batches(self, text: Text) -> Iterator[Tensor]:
        """Yield batches until the end."""
        while self.progress() < 1:
            yield text.batch()


def train(
    model: nn.Module, text: Text, seconds: float, learning_rate: float, device: torch.device
) -> dict[str, Any]:
    """Train a mixture from scratch for some seconds; return what to record."""
    optimizer = torch.optim.AdamW(
        model.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    model.train()
    clock, steps, loss = Clock(seconds, device), 0, torch.zeros(())
    for batch in clock.batches(text):
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        balance = torch.stack([mixture.balance for mixture in mixtures(model).values()])  # type: ignore[misc]
        (loss + BALANCE * balance.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * clock.rate()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 200 == 0:
            print(f"step {steps}: {float(loss):.4f} nats, {clock.seconds():.0f} s", flush=True)
    synchronize(device)
    for mixture in mixtures(model).values():
        mixture.balance = None
    model.eval()
    return {"steps": steps, "seconds": round(clock.seconds(), 2)}
