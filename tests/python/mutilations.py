"""Mutilated checkpoints: ways to damage or forge one that the tests know, from tiny valid ones."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilesparse.io.manifest import CONFIG, INDEX, WEIGHTS

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
Change = Callable[[Any], object]


class Mutilation(NamedTuple):
    """A change in words, the valid checkpoint it is made to, and the function of its copy that makes it."""

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
    yield from _indices()


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
                yield Mutilation(f"{file.name} ends at {place}", base, _writing(file.name, data[:place]))
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
            yield Mutilation(f"{name} missing", base, _replacing(name, lambda at: None))
            yield Mutilation(f"{name} a folder", base, _replacing(name, Path.mkdir))
            for target in (name, "nothing"):
                link = _replacing(name, lambda at, target=target: at.symlink_to(target))
                yield Mutilation(f"{name} a link to {target}", base, link)
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
    near = (0, 1, 2, length - 8, length - 1, length + 1, length + 8)
    for number in (*near, 10**8, 10**8 + 1, 2**31, 2**60, 2**63 - 1, 2**63, 2**64 - 1):
        text = f"header of {number} bytes"
        yield Mutilation(text, "bare", _writing(WEIGHTS, number.to_bytes(8, "little") + data[8:]))
    raw_headers = [b"", b"null", b"[]", b'"text"', b"{}", b"{", b"{]", b" " * 64, b"\0" * 64]
    raw_headers += [b'{"a":1}', b'{"a":NaN}', b'{"a":{}}', b'{"a":null}', b"[" * 100_000, b'{"a":' * 100_000]
    raw_headers += [b'{"__metadata__":1}', b'{"__metadata__":{"a":1}}']
    raw_headers += [b'{"\xff":{"dtype":"F32","shape":[],"data_offsets":[0,0]}}']
    raw_headers += [b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}']
    for raw in raw_headers:
        file = len(raw).to_bytes(8, "little") + raw + data[8 + length :]
        yield Mutilation(f"header {raw[:30]!r} of {len(raw)} bytes", "bare", _writing(WEIGHTS, file))


def _headers(bases: Bases) -> Iterator[Mutilation]:
    header = _read_header(bases.bare / WEIGHTS)[0]
    header.pop("__metadata__", None)
    end = max(entry["data_offsets"][1] for entry in header.values())
    changes: list[tuple[str, Change]] = []
    for number in (-1, 2**31, 2**62, 2**64, 10**30, 0.5, "1", None, True, [], {}):
        for name in ("sparse.weight", "sparse.slot", "embedding.weight"):
            changes.append((f"{name}: shape[0] {number!r}", _put(name, "shape", 0, number)))
            changes.append((f"{name}: offset {number!r}", _put(name, "data_offsets", 1, number)))
    for shape in ([0], [0, 2**62], [2**63, 0], [2**40, 2**40, 0]):
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [end, end]}
        changes.append((f"a second embedding of shape {shape}", _put("output.weight", entry)))
    for name, entry in header.items():
        changes.append((f"{name} left out", _drop(name)))
        changes.append((f"{name} renamed", _rename(name, name + "s")))
        changes.append((f"{name} of one dimension more", _put(name, "shape", [*entry["shape"], 1])))
        changes.append((f"{name} overlapping", _put(name, "data_offsets", [0, 4])))
        for dtype in ("F16", "F32", "I32", "U32", "I8", "F64", "F4", "X", "", None, 1):
            if entry["dtype"] != dtype:
                changes.append((f"{name}: dtype {dtype!r}", _put(name, "dtype", dtype)))
    for text, change in changes:
        yield Mutilation(text, "bare", _with_header(change))


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
                changed = [*values[:place], number, *values[place + 1 :]]
                written = torch.tensor(changed, dtype=torch.int32).numpy().tobytes()
                text = f"{layer}.{array}[{place}] = {number}"
                yield Mutilation(text, "bare", _writing(WEIGHTS, data[:start] + written + data[end:]))
    start, end = (begin + offset for offset in header["masked.mask"]["data_offsets"])
    for place, byte in ((start, 2), (end - 1, 255), ((start + end) // 2, 128)):
        written = data[:place] + bytes([byte]) + data[place + 1 :]
        yield Mutilation(f"masked.mask with a byte {byte}", "bare", _writing(WEIGHTS, written))
    written = data[:start] + b"\1" * (end - start) + data[end:]  # more than two of four neighbours
    yield Mutilation("masked.mask of ones", "bare", _writing(WEIGHTS, written))


def _configs(bases: Bases) -> Iterator[Mutilation]:
    hostile: list[Any] = [None, -1, 0, 7, 2**31, 2**63, 10**400, 0.5, float("nan"), float("inf"), "32", ""]
    hostile += [[], {}, True, False, "x" * 10_000, [1], [32, 32, 32], [-32, 32], ["32", "32"], [[32], 32]]
    hostile += [[2**40, 2**40], [float("nan"), 32], {"a": 1}, [16, 16], [2, 4], "float64", "compressed"]
    strange = ["", ".", "..", "../sparse", "sparse.weight", "norm", "x" * 10_000, "sparse\0", "embedding"]
    changes: list[tuple[str, Change]] = []
    for layer, entry in json.loads((bases.single / CONFIG).read_text())["tilesparse"]["layers"].items():
        for field, value in entry.items():
            for given in hostile:
                # A file does not say what values in 8 bits were before.
                harmless = (field, given) == ("dtype", "float64") and entry["storage"] == "int8"
                harmless |= field == "transposable" and given is True and entry["nm"] == [2, 4]
                if not (given == value and type(given) is type(value)) and not harmless:
                    changes.append((f"{layer}: {field} {given!r:.40}", _put("layers", layer, field, given)))
            changes.append((f"{layer}: no {field}", _drop("layers", layer, field)))
        for name in strange:
            changes.append((f"{layer} named {name[:20]!r}", _rename("layers", layer, name)))
            changes.append((f"{layer} as {name[:20]!r}, too", _put("layers", name, entry)))
        changes.append((f"no {layer}", _drop("layers", layer)))
    for key in ("version", "layers", "ties", "files"):
        for given in hostile:
            if (key, given) not in (("ties", {}), ("files", None)):
                changes.append((f"{key} {given!r:.40}", _put(key, given)))
    for what, change in changes:
        yield Mutilation(what, "single", _with_section(change))
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


def _indices() -> Iterator[Mutilation]:
    hostile: list[Any] = [None, 1, "", ".", "..", "../../etc/passwd", "/etc/passwd", "a/../" + FIRST, [], {}]
    hostile += ["x" * 5000, "../bare/model.safetensors", "/proc/self/mem", f"{FIRST}\0", f"./{FIRST}"]
    hostile += [f"{FIRST}\n", SECOND, INDEX, CONFIG, "..\\" + FIRST, "nothing.safetensors"]
    hostile += ["~/x.safetensors", " ", "é.safetensors"]
    changes = [(f"{given!r:.40}", _put("weight_map", "sparse.weight", given)) for given in hostile]
    changes += [(f"{given!r:.40} more", _put("weight_map", "more", given)) for given in hostile]
    changes += [(f"weight_map {given!r}", _put("weight_map", given)) for given in (None, [], "x", 1, {})]
    for guarded in (True, False):
        for text, change in changes:
            yield Mutilation(f"{INDEX}: {text}", "sharded", _with_index(change, guarded))


def _put(*path_and_value: Any) -> Change:
    """Change what lies at a path of keys."""
    *path, key, value = path_and_value
    return lambda content: _at(content, path).__setitem__(key, value)


def _drop(*path: Any) -> Change:
    return lambda content: _at(content, path[:-1]).pop(path[-1])


def _rename(*path_and_name: Any) -> Change:
    *path, key, name = path_and_name

    def rename(content: Any) -> None:
        inner = _at(content, path)
        inner[name] = inner.pop(key)

    return rename


def _at(content: Any, path: Any) -> Any:
    for key in path:
        content = content[key]
    return content


def _writing(*files_and_data: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, data in zip(files_and_data[::2], files_and_data[1::2], strict=True):
            (folder / name).write_bytes(data)

    return write


def _replacing(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return replace


def _read_header(file: Path) -> tuple[dict[str, Any], int, bytes]:
    """The header, where the tensors begin, and the whole file."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:begin]), begin, data


def _with_header(change: Change) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        header, begin, data = _read_header(folder / WEIGHTS)
        change(header)
        text = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[begin:])

    return apply


def _with_json(name: str, change: Change) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def _with_section(change: Change) -> Callable[[Path], None]:
    return _with_json(CONFIG, lambda config: change(config["tilesparse"]))


def _with_index(change: Change, guarded: bool) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        _with_json(INDEX, change)(folder)
        if not guarded:
            _with_section(_drop("files"))(folder)

    return apply


def damaged(path: Path, generator: random.Random) -> str:
    """Damage a file at random, as its kind allows, and say how."""
    data = bytearray(path.read_bytes())
    size = len(data)
    if path.suffix == ".safetensors" and generator.random() < 0.5:
        size = 8 + int.from_bytes(data[:8], "little")  # the header
    place, count = generator.randrange(size), generator.choice([1, 1, 2, 8])
    kind = generator.choice(["cut", "flip", "change", "insert", "delete", "repeat", "number"])
    if kind == "cut":
        del data[place:]
    elif kind == "flip":
        for _ in range(count):
            data[generator.randrange(size)] ^= 1 << generator.randrange(8)
    elif kind == "change":
        for _ in range(count):
            data[generator.randrange(size)] = generator.choice([0, 32, 45, 48, 57, 101, 127, 128, 255])
    elif kind == "insert":
        data[place:place] = generator.randbytes(count)
    elif kind == "delete":
        del data[place : place + count]
    elif kind == "repeat":
        data[place:place] = data[place : place + generator.randrange(1, 40)]
    else:  # another number in place of one
        numbers = [*re.finditer(rb"\d+", data[:size])]
        found = generator.choice(numbers or [re.match(b"", b"")])
        other = generator.choice([b"0", b"-1", b"3", b"64", b"2147483648", b"9223372036854775807", b"1e5"])
        data[found.start() : found.end()] = other
    path.write_bytes(data)
    return f"{path.name}: {kind} at {place} of {size}"
