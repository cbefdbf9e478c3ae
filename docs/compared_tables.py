"""The tables of what users would pick instead of sparse layers; ``docs/tables.py`` writes them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from expert_tables import of_devices
from gpu_tables import SERVED, served_times
from table_makers import LARGE
from table_parts import cases, runs, short, table

DENSITIES = (0.5, 0.25)
NOT_MEASURED = "-"
Speedups = Iterable[float | None]  # one for each density


IN_SHORT = (  # of the README: what and how, as rows begin
    ("H200, layers of 4096 ↔ 14336 features, blocks of 128", "bfloat16"),
    ("H200, layers of 4096 ↔ 14336 features, blocks of 128", "int8"),
    ("H200, layers of 4096 ↔ 14336 features, blocks of 32", "int8"),
    ("H200, 768 → 3072 features, blocks of 64", "int8"),
    ("H200, a Llama 3 8B block, one token after 8192", "bfloat16"),
    ("H200, 8 layers of Llama 3 8B in Transformers, 8192", "float8"),
    ("H200, 8 layers of Llama 3 8B in Transformers, 8192", "2:4 in float8"),
    ("H200, 8 layers of Llama 3 8B in Transformers, 8192", "2:4 in int8"),
    ("H200, 8 layers of Llama 3 8B in Transformers, one", "2:4 in int4"),
    ("H100, 8192 → 28672 features, one token", "bfloat16"),
    ("H100, 8192 → 28672 features, one token", "int4"),
    ("H200, 128 experts", "bfloat16"),
    ("H200, 128 experts", "float8"),
    ("H100, a Qwen3-MoE layer", "bfloat16"),
    ("two CPU cores, 4096 → 4096 features", "int8"),
    ("two CPU cores, all-MiniLM-L6-v2, 32 × 64 tokens", "int8"),
    ("two CPU cores, all-MiniLM-L6-v2, 32 × 8 to 128 tokens", "int8"),
    ("two CPU cores, vLLM, prefill", "bfloat16"),
)


def compared() -> str:
    """Sparse against dense in 16 or 32 bits, and in 8 or fewer, at two densities."""
    return _table(_lines())


def compared_in_short() -> str:
    """Some of these lines."""
    lines = {(line[0], line[1]): line for line in _lines()}
    return _table(
        next(line for (of, how), line in lines.items() if of.startswith(what) and how == sparse)
        for what, sparse in IN_SHORT
    )


def _table(lines: Iterable[list[str]]) -> str:
    header = ["density .5 / .25", "sparse", "over dense in 16 or 32 bits", "over dense in 8 or 4 bits"]
    return table(header, lines)


def _lines() -> Iterator[list[str]]:
    return chain(_products(), _models(), _decode(), _experts(), _on_cpu())


def _line(what: str, sparse: str, over_16: Speedups | None, over_8: Speedups | None) -> list[str]:
    return [what, sparse, *(NOT_MEASURED if of is None else _both(of) for of in (over_16, over_8))]


def _both(speedups: Speedups) -> str:
    return " / ".join(NOT_MEASURED if one is None else _shown(one) for one in speedups)


def _shown(speedup: float) -> str:
    """Return one decimal, and two where one would hide who is faster."""
    return f"{speedup:.2f}×" if 0.9 <= speedup < 1.1 else f"{speedup:.1f}×"


def _products() -> Iterator[list[str]]:
    """Products on one GPU; in 8 bits, quantizing x counts for both sides."""
    large, small = "layers of 4096 ↔ 14336 features", "768 → 3072 features"
    for label, shapes, block in ((large, LARGE, 128), (large, LARGE, 32), (small, ("bert",), 64)):
        measured = [_eight_bits(shapes, density, block) for density in DENSITIES]
        for name, of, added in (("bfloat16", "sparse_bf16_us", 0), ("int8", "sparse_us", 1)):
            ours = [[one[of] + added * one["quantize_us"] for one in own] for own in measured]
            dense = [[one["dense_bf16_us"] for one in own] for own in measured]
            dense_8 = [[_mean(one["dense_us"]) + one["quantize_us"] for one in own] for own in measured]
            what = f"H200, {label}, blocks of {block}, 8192 tokens"
            yield _line(what, name, _ratios(dense, ours), _ratios(dense_8, ours))


def _eight_bits(shapes: tuple[str, ...], density: float, block: int) -> list[dict[str, Any]]:
    return [
        case["results"][0]
        for case in cases("h200_eight_bits.json#products")
        if (case["dtype"], case["requested_density"], case["block_shape"]) == ("int8", density, [block] * 2)
        and case["shape"] in shapes
    ]


def _ratios(dense: list[list[float]], ours: list[list[float]]) -> list[float]:
    """Return the mean speedup over all shapes, for each density."""
    return [
        statistics.mean(slow / fast for slow, fast in zip(*both, strict=True))
        for both in zip(dense, ours, strict=True)
    ]


def _models() -> Iterator[list[str]]:
    """Whole models in CUDA graphs."""
    block, files = (
        "a Llama 3 8B block, 8192 tokens",
        ("h200_models.json#graph", "h100_models.json#eight_bits"),
    )
    yield _line(f"H200, {block}", "bfloat16", _of_model(files[0], "llama-prefill", "graph"), None)
    yield _line(
        f"H100, {block}, compiled", "int8", None, _of_model(files[1], "llama-prefill", "compile-graph")
    )
    yield _line("H200, ViT-H/14, 64 images", "bfloat16", _of_model(files[0], "vit", "graph"), None)
    products = _of_model("h100_models.json#llama_products_16", "llama-products", "graph")
    yield _line("H100, products of a Llama 3 8B block, 16 tokens", "bfloat16", products, None)
    token = _of_model(files[0], "llama-decode1", "graph")
    yield _line("H200, a Llama 3 8B block, one token after 8192", "bfloat16", token, None)
    yield from _served()


def _served() -> Iterator[list[str]]:
    """Layers of a model of Transformers; 2:4 has half of the values."""
    layers = "H200, 8 layers of Llama 3 8B in Transformers"
    for label, what in (("8192 tokens", "prefill"), ("one token", "decode 1")):
        for storage in ("bfloat16", "float8", "int8", "int4"):
            blocks = f"blocks .5 {storage}", f"blocks .25 {storage}"
            for sparse, forms in ((storage, blocks), (f"2:4 in {storage}", (f"2:4 {storage}", ""))):
                over = [
                    [_served_over(dense, form, what) for form in forms]
                    for dense in ("dense bfloat16", "dense float8")
                ]
                if any(over[0]) or any(over[1]):
                    yield _line(f"{layers}, {label}", sparse, *over)


def _served_over(dense: str, form: str, what: str) -> float | None:
    """Return the speedup over a dense form in the last run that has both."""
    for run in reversed(runs(SERVED)):
        times = served_times(run)
        if form in times and dense in times:
            return times[dense][what] / times[form][what]
    return None


def _of_model(file: str, model: str, mode: str, block: int = 128) -> list[float | None]:
    found = {
        one["density"]: one["speedup"]
        for case in cases(file)
        if (case["model"], case["task"], case["mode"]) == (model, "inference", mode)
        for one in case["results"]
        if one["block_shape"] == [block, block]
    }
    return [found.get(density) for density in DENSITIES]


def _decode() -> Iterator[list[str]]:
    """One token through a large layer, beside dense bfloat16 and PyTorch's dense int4."""
    found: dict[tuple[float, str], dict[str, Any]] = {}
    peer = 0.0
    for case in cases("h100_eight_bits.json#int4"):
        if (case["tokens"], case["block_shape"]) == (1, [128, 128]):
            density = float(case["requested_density"] if "requested_density" in case else case["density"])
            found |= {(density, one["contender"]): one for one in case["results"]}
            named = [one["t_us"] for one in case["results"] if one["contender"].startswith("dense int4")]
            peer = named[0] if named else peer
    of_int4 = [found[density, "int4"] for density in DENSITIES]
    dense = [_mean(one["dense_us"]) for one in of_int4]
    for name, ours in (
        ("bfloat16", [_mean(one["plain_us"]) for one in of_int4]),
        ("int4", [one["t_us"] for one in of_int4]),
    ):
        over = [slow / fast for slow, fast in zip(dense, ours, strict=True)]
        yield _line("H100, 8192 → 28672 features, one token", name, over, [peer / fast for fast in ours])


def _experts() -> Iterator[list[str]]:
    """Products of experts, beside the faster of two dense ways, and a layer of them beside Transformers'."""
    found = {
        case["density"]: one["speedup"]
        for case in cases("h200_experts.json#products")
        if (case["name"], case["block_shape"], case["routing"]) == ("many-8192", [128, 128], "even")
        for one in case["results"]
        if one["op"] == "forward"
    }
    yield _line(
        "H200, 128 experts, 8192 tokens", "bfloat16", [found.get(density) for density in DENSITIES], None
    )
    for device, measured in of_devices("eight_bits"):
        eight = {
            case["density"]: case["results"][0]
            for case in measured
            if (case["name"], case["block_shape"], case["routing"], case["dtype"])
            == ("many-8192", [128, 128], "even", "float8")
        }
        one = [eight[density] for density in DENSITIES]
        ours = [each["whole_us"] for each in one]
        quantizing = [each["whole_us"] - each["t_us"] for each in one]  # counts for both sides
        over = [each["grouped_bf16_us"] / us for each, us in zip(one, ours, strict=True)]
        over_8 = [
            (each["grouped_us"] + more) / us for each, more, us in zip(one, quantizing, ours, strict=True)
        ]
        yield _line(f"{device}, 128 experts, 8192 tokens", "float8", over, over_8)
    layers = {
        case["density"]: one["speedup"]
        for case in cases("h100_experts.json#layer")
        if case["block_shape"] == [128, 128]
        for one in case["results"]
        if one["op"] == "layer forward"
    }
    yield _line(
        "H100, a Qwen3-MoE layer, 8192 tokens",
        "bfloat16",
        [layers.get(density) for density in DENSITIES],
        None,
    )


def _on_cpu() -> Iterator[list[str]]:
    two = "two CPU cores"
    products = {
        case["density"]: case
        for case in cases("cpu_eight_bits.json#two_threads")
        if (case["tokens"], case["in_features"], case["out_features"], case["block"]) == (512, 4096, 4096, 32)
    }
    dense = {density: min(case["dense_us"].values()) for density, case in products.items()}
    what = f"{two}, 4096 → 4096 features, 512 tokens"
    for name, ours in (
        ("bfloat16", [products[density]["own_us"]["bfloat16"] for density in DENSITIES]),
        ("int8", [products[density]["int8_us"] for density in DENSITIES]),
    ):
        over = [dense[density] / time for density, time in zip(DENSITIES, ours, strict=True)]
        yield _line(what, name, None, over)
    yield from _minilm(two)
    tokens = {
        (case["model"], case["measure"]): case["speedup"]
        for case in cases("cpu_vllm.json")
        if case["measure"] in ("prefill", "decode 1")
    }
    for measure in ("prefill", "decode 1"):
        for name in ("bfloat16", "int8 W8A8"):
            over = [tokens.get((f"{name} {short}", measure)) for short in (".5", ".25")]
            label = measure.replace("decode 1", "decode, one sequence")
            yield _line(f"{two}, vLLM, {label}", name.removesuffix(" W8A8"), over, None)


def _minilm(two: str) -> Iterator[list[str]]:
    """The sentence encoder, beside the fastest other runtime, which is OpenVINO in all cases."""
    for texts in ("32 × 64", "32 × 8 to 128"):
        measured = {
            (case["contender"], case["density"]): one["ms"]
            for case in cases("cpu_embeddings.json")
            for one in case["results"]
            if one["case"] == texts
        }
        dense = {name: ms for (name, density), ms in measured.items() if density is None}
        ours = [measured["tilesparse int8", density] for density in DENSITIES]
        in_8 = min(ms for name, ms in dense.items() if name.endswith("int8"))
        in_16 = min(ms for name, ms in dense.items() if not name.endswith("int8"))
        over = ([best / ms for ms in ours] for best in (in_16, in_8))
        yield _line(f"{two}, all-MiniLM-L6-v2, {texts} tokens; dense: OpenVINO", "int8", *over)


def advised() -> str:
    """Times that `advise` estimated for models, and what models made so took, in ms."""
    header = ["H100", "dense", "dense float8, estimated"]
    header += [f"density {short(density)}, estimated / measured" for density in DENSITIES]
    lines = []
    for case in cases("h100_advise.json"):
        float8 = next(one for one in case["results"] if one["contender"].startswith("dense float8"))
        made = [one for one in case["results"] if "measured_ms" in one]
        cells = [f"{case['dense_ms']:.2f}", f"{float8['estimated_ms']:.2f}"]
        for density in DENSITIES:
            (one,) = [one for one in made if one["contender"].startswith(f"density {density:g},")]
            how = one["contender"].split(", ", 1)[1].replace("_e4m3fn", "")
            cells.append(f"{one['estimated_ms']:.2f} / {one['measured_ms']:.2f} ({how})")
        lines.append([case["name"], *cells])
    return table(
        [*header, "recommended"],
        [
            [*line, "dense" if case["recommended"] is None else case["recommended"].split(",")[0]]
            for line, case in zip(lines, cases("h100_advise.json"), strict=True)
        ],
    )


def _mean(times: Iterable[float]) -> float:
    return statistics.mean(times)


COMPARED_TABLES: dict[str, Callable[[], str]] = {
    maker.__name__: maker for maker in (compared, compared_in_short, advised)
}
