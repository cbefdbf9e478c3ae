"""``tilesparse demo``: a small GPT on real text, trained dense and block-sparse side by side."""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._progress import Progress
from ..errors import InvalidArgumentError
from ..nn.linear import BlockSparseLinear
from ..patch.patcher import BlockSparseModelPatcher
from ..patch.reports import PatchReport
from .options import DTYPES, add_device, parse_block, parse_count, parse_density

VOCABULARY = 256  # tokens are bytes
TEXT_BYTES = 8 << 20
VALIDATION_BATCHES = 16
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Size:
    """Shape of the model and of one batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int


SIZES = {
    "tiny": Size(layers=1, width=64, heads=2, context=32, batch=4),
    "small": Size(layers=4, width=512, heads=8, context=128, batch=8),
    "medium": Size(layers=8, width=1024, heads=16, context=512, batch=16),
    "large": Size(layers=8, width=2048, heads=16, context=1024, batch=8),
}


@dataclass(frozen=True)
class Settings:
    """One run of the demo."""

    size: Size
    device: torch.device
    dtype: torch.dtype
    density: float
    block_shape: tuple[int, int]
    steps: int
    text: Path | None = None


class Attention(nn.Module):
    """Causal self-attention on [batch, tokens, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, tokens, width] to the same shape; a token attends to those before."""
        q, k, v = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, tokens, width] to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder that predicts the next byte: tokens [batch, context] -> logits [..., VOCABULARY]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Parameter(0.02 * torch.randn(size.context, size.width))
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, context, VOCABULARY] of tokens [batch, context]."""
        x = self.tokens(tokens) + self.positions
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


@dataclass
class Trainee:
    """A model in training, and the seconds each of its steps took."""

    name: str
    model: nn.Module
    settings: Settings

    def __post_init__(self) -> None:
        self.seconds: list[float] = []
        self.loss = float("nan")
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, LEARNING_RATE, total_steps=self.settings.steps + 1
        )

    def step(self, batch: Tensor) -> None:
        """Run and time one step of training."""
        synchronize(self.settings.device)
        start = time.perf_counter()
        loss = self._loss(batch)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        synchronize(self.settings.device)
        self.seconds.append(time.perf_counter() - start)
        self._schedule.step()
        self.loss = loss.item()

    @torch.no_grad()
    def validate(self, batches: Sequence[Tensor]) -> float:
        """Return the mean loss in nats per byte."""
        return statistics.fmean(self._loss(batch).item() for batch in batches)

    def seconds_per_step(self) -> float:
        """Return the median time of a step, without the first tenth of the steps."""
        return statistics.median(self.seconds[len(self.seconds) // 10 :])

    def _loss(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch [batch, context + 1] of bytes."""
        dtype = self.settings.dtype
        with torch.autocast(self.settings.device.type, dtype, enabled=dtype != torch.float32):
            logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def run(settings: Settings) -> None:
    """Train both models and print the comparison.

    Raises:
        InvalidArgumentError: there is too little text, or the model cannot be cut into the blocks.
    """
    torch.manual_seed(0)
    training, validation = load_text(settings.text, settings.size.context)
    dense = GPT(settings.size).to(settings.device)
    sparse, report = make_sparse(dense, settings)
    print(_introduction(settings, report, len(training)))
    trainees = [Trainee("dense", dense, settings), Trainee("sparse", sparse, settings)]
    train(trainees, training)
    batches = list(_batches(validation, settings, VALIDATION_BATCHES, seed=1))
    print(_table(trainees, [trainee.validate(batches) for trainee in trainees]))


def make_sparse(dense: GPT, settings: Settings) -> tuple[nn.Module, PatchReport]:
    """Return a copy with block-sparse transformer blocks, initialised anew for their smaller fan-in."""
    sparse = copy.deepcopy(dense)
    patcher = BlockSparseModelPatcher()
    patcher.add_pattern(
        r"blocks\.\d+\.(attention\.(inputs|output)|mlp\.[02])",
        {"density": settings.density, "block_shape": settings.block_shape},
        fullmatch=True,
    )
    report = patcher.patch_model(sparse)
    for layer in report.skipped:
        raise InvalidArgumentError(f"layer {layer.name!r}: {layer.reason}")
    for module in sparse.modules():
        if isinstance(module, BlockSparseLinear):
            module.reset_parameters()
    return sparse, report


def train(trainees: Sequence[Trainee], text: Tensor) -> None:
    """Train all on the same batches, in turns, so that a busy machine slows all of them."""
    settings = trainees[0].settings
    progress = Progress(settings.steps)
    for index, batch in enumerate(_batches(text, settings, settings.steps, seed=0)):
        for trainee in trainees if index % 2 else reversed(trainees):
            trainee.step(batch)
        losses = "  ".join(f"{trainee.name} loss {trainee.loss:.3f}" for trainee in trainees)
        progress.show(index + 1, losses)


def load_text(path: Path | None, context: int) -> tuple[Tensor, Tensor]:
    """Return (training, validation) bytes, uint8, of a file or of the standard library's Python sources."""
    if path is None:
        files = _library_sources()
    elif path.is_file():
        files = [path]
    else:
        raise InvalidArgumentError(f"text must be a file, got {path}")
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    held_out = len(text) // 10
    if held_out <= context:
        raise InvalidArgumentError(
            f"text must have more than {10 * context} bytes, found {len(text)}; name another file"
        )
    data = torch.frombuffer(text, dtype=torch.uint8)
    return data[:-held_out], data[-held_out:]


def _library_sources() -> list[Path]:
    """Return the .py files of the running Python, always in the same random order."""
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages"})
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    random.Random(0).shuffle(files)
    return files


def _batches(text: Tensor, settings: Settings, count: int, seed: int) -> Iterator[Tensor]:
    """Yield random windows [batch, context + 1] of the text, int64 on the device."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(settings.size.context + 1)
    for _ in range(count):
        starts = torch.randint(
            len(text) - settings.size.context, (settings.size.batch, 1), generator=generator
        )
        yield text[starts + window].long().to(settings.device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _introduction(settings: Settings, report: PatchReport, text_bytes: int) -> str:
    size, (bn, bk) = settings.size, settings.block_shape
    return (
        f"GPT of {size.layers} layers, width {size.width}, {size.batch} x {size.context} bytes per step, "
        f"{settings.steps} steps on {text_bytes / 1e6:.1f} MB of text\n"
        f"{len(report.layers)} linear layers made block-sparse: density {settings.density:g}, "
        f"blocks {bn}x{bk}, {str(settings.dtype).removeprefix('torch.')} on {settings.device}"
    )


def _table(trainees: Sequence[Trainee], losses: Sequence[float]) -> str:
    parameters = [list(trainee.model.parameters()) for trainee in trainees]
    seconds = [trainee.seconds_per_step() for trainee in trainees]
    rows = [
        ("", [trainee.name for trainee in trainees]),
        ("validation loss (nats per byte)", [f"{loss:.3f}" for loss in losses]),
        ("parameters", [f"{sum(p.numel() for p in group):,}" for group in parameters]),
        ("bytes of weights", [f"{sum(p.nbytes for p in group):,}" for group in parameters]),
        ("time per step", [f"{1e3 * value:.1f} ms" for value in seconds]),
        ("speedup", [f"{seconds[0] / value:.2f}x" for value in seconds]),
    ]
    return "\n".join(f"{name:32}" + "".join(f"{cell:>16}" for cell in cells) for name, cells in rows)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument(
        "--density", type=parse_density, default=0.25, help="fraction of blocks kept (%(default)s)"
    )
    command.add_argument("--block", type=parse_block, help="32, or 32x64 for out x in (32; on a GPU 64)")
    command.add_argument("--size", choices=SIZES, help="size of the model (small; on a GPU medium or large)")
    command.add_argument("--steps", type=parse_count, help="training steps (80; on a GPU 300)")
    add_device(command)
    command.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="dtype of products, by autocast; parameters are float32 (float32; on a GPU bfloat16)",
    )
    command.add_argument("--text", type=Path, help="a file to train on")


def main(arguments: argparse.Namespace) -> None:
    """Train with the options; the device decides those that are not given."""
    device = arguments.device
    size, dtype, block, steps = ("small", "float32", (32, 32), 80)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        size = "large" if memory > 32 << 30 else "medium"
        dtype, block, steps = ("bfloat16", (64, 64), 300)
    run(
        Settings(
            size=SIZES[arguments.size or size],
            device=device,
            dtype=DTYPES[arguments.dtype or dtype],
            density=arguments.density,
            block_shape=arguments.block or block,
            steps=arguments.steps or steps,
            text=arguments.text,
        )
    )
