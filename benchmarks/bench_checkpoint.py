"""Memory and time that saving and loading a checkpoint take.

    python benchmarks/bench_checkpoint.py --output checkpoint.json

A model of block-sparse layers is saved as one file and as several, and loaded into a model on the meta
device, each in a fresh process. The files are in the page cache. Peaks are of the memory of the process, on
the host, above what it had before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import parsed, positive, recording, run_benchmark
from torch import nn

import tilesparse
from tilesparse import BlockSparseLinear
from tilesparse.checkpoint import save

FEATURES, DENSITY, BLOCK_SHAPE = 4096, 0.25, 64
# Options of the layers, and the bytes of a kept weight.
FORMS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 2),
    "2:4 int8": ({"nm": (2, 4), "storage": "int8"}, 0.6875),
}
SHARDS = (1, 5)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if the GPU gave up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("checkpoint.json"), help="as JSON (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    parser.add_argument("--megabytes", type=positive, default=320, help="of all files, about (%(default)s)")
    parser.add_argument("--commit", help="of the sources (default: ask git)")
    arguments = parsed(parser, argv)
    return run_benchmark(arguments, _run)


def _run(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    for form in FORMS:
        layers = _layers(form, arguments.megabytes)
        for shards in SHARDS:
            case: dict[str, Any] = {"form": form, "device": arguments.device, "layers": layers, "results": []}
            document["cases"].append(case)
            with recording(case, f"{form}, {shards}"), tempfile.TemporaryDirectory() as folder:
                saving = _in_fresh_process(_save, form, layers, shards, folder)
                loading = _in_fresh_process(_load, form, layers, folder, arguments.device)
                sizes = [file.stat().st_size for file in Path(folder).glob("*.safetensors")]
                case |= {"files": len(sizes), "bytes": sum(sizes)}
                for call, result in (("save", saving), ("load", loading)):
                    ratio = result["peak_bytes"] / sum(sizes)
                    case["results"].append({"call": call, **result, "ratio": round(ratio, 4)})
                    print(
                        f"  {form:10} {len(sizes)} x {sum(sizes) / len(sizes) / 1e6:4.0f} MB {call}: peak "
                        f"{ratio:5.3f} of the files, {result['seconds']:6.3f} s",
                        flush=True,
                    )


def _layers(form: str, megabytes: int) -> int:
    """How many take as much memory."""
    return max(1, round(megabytes * 1e6 / (FEATURES**2 * DENSITY * FORMS[form][1])))


def _in_fresh_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _save(form: str, layers: int, shards: int, folder: str) -> dict[str, Any]:
    model = _model(form, layers)
    per_file = -(-layers // shards) * sum(tensor.nbytes for tensor in model[0].state_dict().values())
    return _measured(lambda: save(model, folder, max_shard_size=per_file))


def _load(form: str, layers: int, folder: str, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as small:
        save(nn.Linear(2, 2), small)
        tilesparse.load(nn.Linear(2, 2), small, device=device)  # what is imported or set up late
    return _measured(lambda: tilesparse.load(lambda: _model(form, layers), folder, device=device))


def _model(form: str, layers: int) -> nn.Sequential:
    options = {"density": DENSITY, "block_shape": BLOCK_SHAPE, "dtype": torch.bfloat16, **FORMS[form][0]}
    return nn.Sequential(*(BlockSparseLinear(FEATURES, FEATURES, **options) for _ in range(layers)))


def _measured(call: Callable[[], object]) -> dict[str, Any]:
    """The seconds of a call, and by how many bytes the process then had more memory than before, at most."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, start = _memory("VmRSS"), time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 4), "peak_bytes": _memory("VmHWM") - before}


def _memory(field: str) -> int:
    """Bytes of this process, from Linux: VmRSS is what it has, VmHWM what it had at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status: {field} missing")


if __name__ == "__main__":
    sys.exit(main())
