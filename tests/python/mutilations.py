"""Mutilated checkpoints: every way to damage or forge one that the tests know, from tiny valid ones."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilesparse.io.manifest import CONFIG, INDEX, WEIGHTS

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


class Mutilation(NamedTuple):
    """What was done, to which of the valid checkpoints, and the function of its copy that does it."""

    text: str
    base: str
    apply: Callable[[Path], object]


class Bases(NamedTuple):
    """Valid checkpoints of one model: with checksums in one file and in two, another model's, and without."""

    single: Path
    sharded: Path
    other: Path  # sharded as well, of the same form but with other weights
    bare: Path  # one file, without checksums, so that what they would find is up to the other checks


def mutilations(bases: Bases, seed: int = 0) -> Iterator[Mutilation]:
    generator = random.Random(seed)
    yield from _cuts(bases, generator)
    yield from _flips(bases, generator)
    yield from _missing(bases)
    yield from _swaps(bases)
    yield from _raw_headers(bases)
    yield from _headers(bases)
    yield from _patterns(bases)
    yield from _configs(bases)
    yield from _indices(bases)


def _cuts(bases: Bases, generator: random.Random) -> Iterator[Mutilation]:
    for base in ("single", "sharded", "bare"):
        for file in sorted(getattr(bases, base).iterdir()):
            data = file.read_bytes()
            length, size = int.from_bytes(data[:8], "little"), len(data)
            places = {0, 1, 7, 8, 9, size // 2, size - 9, size - 8, size - 3}
            if file.suffix == ".safetensors":
                places |= {4, 8 + length // 2, 7 + length, 8 + length, 9 + length, size - 1}
            places |= {generator.randrange(size - 2) for _ in range(6)}
            for place in sorted(places):
                cut = data[:place]
                yield Mutilation(f"{file.name} ends at {place}", base, _writing(file.name, cut))
            for more in (b"\0", b"}", data):
                text = f"{len(more)} bytes behind {file.name}"
                yield Mutilation(text, base, _writing(file.name, data + more))
            yield Mutilation(f"{file.name} of zeros", base, _writing(file.name, bytes(size)))


def _flips(bases: Bases, generator: random.Random) -> Iterator[Mutilation]:
    for base in ("single", "sharded"):
        for file in sorted(getattr(bases, base).iterdir()):
            data = file.read_bytes()
            header = 8 + int.from_bytes(data[:8], "little")
            ranges = [(0, len(data))]
            if file.suffix == ".safetensors":
                ranges = [(0, 8), (8, header), (header, len(data))]
            for begin, end in ranges:
                for _ in range(25):
                    place, bit = generator.randrange(begin, end), 1 << generator.randrange(8)
                    flipped = data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]
                    text = f"{file.name}: byte {place} with bit {bit:#x} flipped"
                    yield Mutilation(text, base, _writing(file.name, flipped))


def _missing(bases: Bases) -> Iterator[Mutilation]:
    for base in ("single", "sharded", "bare"):
        for file in sorted(getattr(bases, base).iterdir()):
            name = file.name
            yield Mutilation(f"{name} missing", base, lambda at, name=name: (at / name).unlink())
            yield Mutilation(f"{name} a folder", base, _making_folder(name))
            yield Mutilation(f"{name} a link to itself", base, _linking(name, name))
            yield Mutilation(f"{name} a link to nothing", base, _linking(name, "nothing"))
        yield Mutilation("no folder", base, shutil.rmtree)


def _swaps(bases: Bases) -> Iterator[Mutilation]:
    first, second = ((bases.sharded / name).read_bytes() for name in (FIRST, SECOND))
    yield Mutilation("shards swapped", "sharded", _writing(FIRST, second, SECOND, first))
    yield Mutilation("shard 1 twice", "sharded", _writing(SECOND, first))
    for name in (FIRST, SECOND, INDEX, CONFIG):
        data = (bases.other / name).read_bytes()
        if data != (bases.sharded / name).read_bytes():
            yield Mutilation(f"{name} of another checkpoint", "sharded", _writing(name, data))
    single = (bases.single / WEIGHTS).read_bytes()
    yield Mutilation("a single file beside the shards", "sharded", _writing(WEIGHTS, single))


def _raw_headers(bases: Bases) -> Iterator[Mutilation]:
    data = (bases.bare / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    for number in (0, 1, 2, length - 8, length - 1, length + 1, length + 8, 10**8, 10**8 + 1, 2**31, 2**60):
        text = f"header of {number} bytes"
        yield Mutilation(text, "bare", _writing(WEIGHTS, number.to_bytes(8, "little") + data[8:]))
    for number in (2**63 - 1, 2**63, 2**64 - 1):
        text = f"header of {number} bytes"
        yield Mutilation(text, "bare", _writing(WEIGHTS, number.to_bytes(8, "little") + data[8:]))
    for raw in (
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b"{",
        b"{]",
        b'{"a":1}',
        b'{"a":NaN}',
        b'{"a":{}}',
        b'{"a":null}',
        b'{"__metadata__":1}',
        b'{"__metadata__":{"a":1}}',
        b'{"\xff":{"dtype":"F32","shape":[],"data_offsets":[0,0]}}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
        b" " * 64,
        b"\0" * 64,
    ):
        file = len(raw).to_bytes(8, "little") + raw + data[8 + length :]
        yield Mutilation(f"header {raw[:30]!r} of {len(raw)} bytes", "bare", _writing(WEIGHTS, file))


def _headers(bases: Bases) -> Iterator[Mutilation]:
    numbers = (-1, 2**31, 2**62, 2**64, 10**30, 0.5, "1", None, True, [], {})
    for number in numbers:
        for name in ("sparse.weight", "sparse.slot", "embedding.weight"):

            def set_shape(header: Any, name: str = name, number: Any = number) -> None:
                header[name]["shape"][0] = number

            def set_offset(header: Any, name: str = name, number: Any = number) -> None:
                header[name]["data_offsets"][1] = number

            yield Mutilation(f"{name}: shape[0] {number!r}", "bare", _with_header(set_shape))
            yield Mutilation(f"{name}: offset {number!r}", "bare", _with_header(set_offset))
    for shape in ([0], [0, 2**62], [2**63, 0], [2**40, 2**40, 0]):

        def add(header: Any, shape: Any = shape) -> None:
            end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
            header["output.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end]}

        yield Mutilation(f"a second embedding of shape {shape}", "bare", _with_header(add))
    names = list(_read_header(bases.bare / WEIGHTS)[0])
    for name in names:
        if name == "__metadata__":
            continue

        def remove(header: Any, name: str = name) -> None:
            del header[name]

        def rename(header: Any, name: str = name) -> None:
            header[name + "s"] = header.pop(name)

        def flatten(header: Any, name: str = name) -> None:
            header[name]["shape"] = [*header[name]["shape"], 1]

        def overlap(header: Any, name: str = name) -> None:
            header[name]["data_offsets"] = [0, 4]

        for what, change in (
            ("left out", remove),
            ("renamed", rename),
            ("of one dimension more", flatten),
            ("overlapping", overlap),
        ):
            yield Mutilation(f"{name} {what}", "bare", _with_header(change))
        for dtype in ("F16", "F32", "I32", "U32", "I8", "F64", "F4", "X", "", None, 1):

            def set_dtype(header: Any, name: str = name, dtype: Any = dtype) -> None:
                header[name]["dtype"] = dtype

            if _read_header(bases.bare / WEIGHTS)[0][name]["dtype"] != dtype:
                yield Mutilation(f"{name}: dtype {dtype!r}", "bare", _with_header(set_dtype))


def _patterns(bases: Bases) -> Iterator[Mutilation]:
    """Contents that no checksum guards."""
    header, begin, data = _read_header(bases.bare / WEIGHTS)
    for layer in ("sparse", "stored", "masked"):
        for array in ("crow_indices", "col_indices", "slot"):
            start, end = (begin + offset for offset in header[f"{layer}.{array}"]["data_offsets"])
            count = (end - start) // 4
            values = torch.frombuffer(bytearray(data[start:end]), dtype=torch.int32).tolist()
            outside = (-1, 10**6, 2**31 - 1, -(2**31))
            changes = [(place, number) for place in (0, count // 2, count - 1) for number in outside]
            # The first block row has two blocks, and then the same one twice.
            changes.append((1, values[0] if array != "crow_indices" else count))
            for place, number in changes:
                changed = list(values)
                changed[place] = number
                written = torch.tensor(changed, dtype=torch.int32).numpy().tobytes()
                text = f"{layer}.{array}[{place}] = {number}"
                yield Mutilation(text, "bare", _writing(WEIGHTS, data[:start] + written + data[end:]))
    start, end = (begin + offset for offset in header["masked.mask"]["data_offsets"])
    for place, byte in ((start, 2), (end - 1, 255), ((start + end) // 2, 128)):
        written = data[:place] + bytes([byte]) + data[place + 1 :]
        yield Mutilation(f"masked.mask with a byte {byte}", "bare", _writing(WEIGHTS, written))


def _configs(bases: Bases) -> Iterator[Mutilation]:
    hostile: list[Any] = [None, -1, 0, 7, 2**31, 2**63, 10**400, 0.5, float("nan"), float("inf"), "32", ""]
    hostile += [[], {}, True, False, "x" * 10_000, [1], [32, 32, 32], [-32, 32], ["32", "32"], [[32], 32]]
    hostile += [[2**40, 2**40], [float("nan"), 32], {"a": 1}, [16, 16], [2, 4], "float64", "compressed"]
    layers = json.loads((bases.single / CONFIG).read_text())["tilesparse"]["layers"]
    for layer, entry in layers.items():
        for field, value in entry.items():
            for given in hostile:
                # Of values in 8 bits the file does not say what they were before.
                harmless = (field, given) == ("dtype", "float64") and entry["storage"] == "int8"
                harmless |= field == "transposable" and given is True and entry["nm"] == [2, 4]
                if (given == value and type(given) is type(value)) or harmless:
                    continue

                def set_field(own: Any, path: tuple[str, str] = (layer, field), given: Any = given) -> None:
                    own["layers"][path[0]][path[1]] = given

                yield Mutilation(f"{layer}: {field} {given!r:.40}", "single", _with_section(set_field))

            def drop_field(own: Any, path: tuple[str, str] = (layer, field)) -> None:
                del own["layers"][path[0]][path[1]]

            yield Mutilation(f"{layer}: no {field}", "single", _with_section(drop_field))
        for name in (
            "",
            ".",
            "..",
            "../sparse",
            "sparse.weight",
            "norm",
            "x" * 10_000,
            "sparse\0",
            "embedding",
        ):

            def rename(own: Any, layer: str = layer, name: str = name) -> None:
                own["layers"][name] = own["layers"].pop(layer)

            def add(own: Any, layer: str = layer, name: str = name) -> None:
                own["layers"][name] = own["layers"][layer]

            yield Mutilation(f"{layer} named {name[:20]!r}", "single", _with_section(rename))
            yield Mutilation(f"{layer} as {name[:20]!r}, too", "single", _with_section(add))

        def drop(own: Any, layer: str = layer) -> None:
            del own["layers"][layer]

        yield Mutilation(f"no {layer}", "single", _with_section(drop))
    for key in ("version", "layers", "ties", "files"):
        for given in hostile:
            if (key, given) in (("ties", {}), ("files", None)):
                continue

            def set_key(own: Any, key: str = key, given: Any = given) -> None:
                own[key] = given

            yield Mutilation(f"{key} {given!r:.40}", "single", _with_section(set_key))
    text = (bases.single / CONFIG).read_bytes()
    for config in (
        b"",
        b"null",
        b"{}",
        b"[" * 1_000_000,
        b'{"tilesparse":' * 100_000,
        b'{"tilesparse": null}',
        b'{"tilesparse": ' + b"9" * 10_000 + b"}",
        text.decode().encode("utf-16"),
        b"\xff" + text,
        text[:-2] + b', "quantization_config": {"quant_method": "tilesparse"}}',
        text.replace(b'"tilesparse"', b'"tilesparsity"'),
    ):
        yield Mutilation(f"{CONFIG} {config[:30]!r}", "single", _writing(CONFIG, config))


def _indices(bases: Bases) -> Iterator[Mutilation]:
    hostile: list[Any] = [
        None,
        1,
        "",
        ".",
        "..",
        "../../etc/passwd",
        "/etc/passwd",
        "a/../" + FIRST,
        "x" * 5000,
    ]
    hostile += [
        "../bare/model.safetensors",
        "/proc/self/mem",
        f"{FIRST}\0",
        f"./{FIRST}",
        f"{FIRST}\n",
        [],
        {},
    ]
    hostile += [
        SECOND,
        INDEX,
        CONFIG,
        "..\\" + FIRST,
        "nothing.safetensors",
        "~/x.safetensors",
        " ",
        "é.safetensors",
    ]
    for guarded in (True, False):
        for given in hostile:

            def set_file(index: Any, given: Any = given) -> None:
                index["weight_map"]["sparse.weight"] = given

            def add_name(index: Any, given: Any = given) -> None:
                index["weight_map"]["more"] = given

            yield Mutilation(f"{INDEX}: {given!r:.40}", "sharded", _with_index(set_file, guarded))
            yield Mutilation(f"{INDEX}: {given!r:.40} more", "sharded", _with_index(add_name, guarded))
        for key in (None, [], "x", 1, {}):

            def set_map(index: Any, key: Any = key) -> None:
                index["weight_map"] = key

            yield Mutilation(f"{INDEX}: weight_map {key!r}", "sharded", _with_index(set_map, guarded))


def _writing(*files_and_data: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, data in zip(files_and_data[::2], files_and_data[1::2], strict=True):
            (folder / name).write_bytes(data)

    return write


def _making_folder(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return make


def _linking(name: str, target: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return link


def _read_header(file: Path) -> tuple[dict[str, Any], int, bytes]:
    """The header, where the tensors begin, and the whole file."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:begin]), begin, data


def _with_header(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        header, begin, data = _read_header(folder / WEIGHTS)
        change(header)
        text = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[begin:])

    return apply


def _with_section(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        change(config["tilesparse"])
        (folder / CONFIG).write_text(json.dumps(config))

    return apply


def _with_index(change: Callable[[Any], object], guarded: bool) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))
        if not guarded:
            _with_section(lambda own: own.pop("files"))(folder)

    return apply
