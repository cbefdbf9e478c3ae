"""Files: atomic replacement, and reading and writing tensors."""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import platformdirs
import torch
from torch import Tensor

from .errors import CheckpointError, CheckpointNotFoundError, InvalidArgumentError

VARIABLE = "TILESPARSE_TUNE_FILE"


def tune_file() -> Path | None:
    """Return the path of the measurements: ``TILESPARSE_TUNE_FILE``, or tune.json in the user's cache.

    It is None if the variable is empty or the user has no home: no file is read or written.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    try:
        cache = platformdirs.user_cache_path("tilesparse")
    except RuntimeError:  # a user without a home
        return None
    return cache / "tune.json" if cache.is_absolute() else None


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a file with a name of its own that takes the place of ``path`` once it is complete."""
    target = Path(os.path.realpath(path))  # a link stays a link
    # Not of tempfile, whose files nobody else may read.
    temporary = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


STORABLE = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in STORABLE.items()}
_CHECKSUM = "crc32:"  # in front of a tensor's name: the key of its checksum in the metadata of the file
_UNKNOWN = "0" * 8
_CHUNK = 1 << 24  # bytes at a time
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class StoredTensor(NamedTuple):
    """Place of a tensor in a file, and its kind."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int  # byte of the file
    checksum: str | None  # of its bytes: crc32, eight hexadecimal digits


def in_threads(function: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    """Map in threads, which files and checksums let run."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def crc32(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def checksum(tensor: Tensor) -> str:
    """Return the CRC-32 of the bytes of a tensor."""
    crc = 0
    for chunk in _chunks(_on_host(tensor)):
        crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file with checksums as its metadata, and return the checksum of its header."""
    # The widest first, so that all are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    metadata = {"format": "pt", **{_CHECKSUM + name: _UNKNOWN for name in names}}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        dtype, shape = _NAMES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    length = len(_header_bytes(header))
    file.write_bytes(b"")

    def write(name: str) -> str:
        crc = 0
        with file.open("r+b") as stream:
            stream.seek(length + header[name]["data_offsets"][0])
            for chunk in _chunks(_on_host(tensors[name])):
                crc = zlib.crc32(chunk, crc)
                stream.write(chunk)
        return f"{crc:08x}"

    checksums = in_threads(write, names)
    metadata |= {_CHECKSUM + name: crc for name, crc in zip(names, checksums, strict=True)}
    written = _header_bytes(header)
    with file.open("r+b") as stream:
        stream.write(written)
        stream.flush()
        os.fsync(stream.fileno())
    return crc32(written)


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _chunks(tensor: Tensor) -> Iterable[memoryview]:
    """Yield the memory of a contiguous tensor on the host."""
    if tensor.numel() == 0:
        return
    data = tensor.view(-1).view(torch.uint8).numpy().data
    for begin in range(0, len(data), _CHUNK):
        yield data[begin : begin + _CHUNK]


def read_header(file: Path) -> tuple[dict[str, StoredTensor], str]:
    """Return the tensors of a safetensors file, and the checksum of its header.

    safetensors checks the header: that the tensors fill the file without gap or overlap above all, so that
    none is larger than the file.
    """
    from safetensors import safe_open

    with opened(file) as stream:
        try:
            with safe_open(file, framework="pt"):
                pass
        except Exception as error:
            raise CheckpointError(f"{file.name}: no safetensors file: {sentence(error)}") from error
        prefix = stream.read(8)
        text = stream.read(int.from_bytes(prefix, "little"))
    header = parsed(file.name, text)
    metadata = header.pop("__metadata__", None) or {}
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in STORABLE:
            raise CheckpointError(f"{file.name}: {name!r}: dtype {entry['dtype']} is not known here")
        start = len(prefix) + len(text) + entry["data_offsets"][0]
        dtype, checksum = STORABLE[entry["dtype"]], metadata.get(_CHECKSUM + name)
        tensors[name] = StoredTensor(file, name, tuple(entry["shape"]), dtype, start, checksum)
    return tensors, crc32(prefix + text)


def read_tensor(stored: StoredTensor) -> Tensor:
    """Read a tensor to the host and verify its checksum."""
    file, name = stored.file.name, stored.name
    tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    checksum = 0
    with opened(stored.file) as stream:
        stream.seek(stored.start)
        for chunk in _chunks(tensor):
            if stream.readinto(chunk) != len(chunk):
                raise CheckpointError(f"{file}: {name!r}: the file ends within it")
            if stored.checksum is not None:
                checksum = zlib.crc32(chunk, checksum)
    if stored.checksum is not None and stored.checksum != f"{checksum:08x}":
        raise CheckpointError(
            f"{file}: {name!r}: damaged, its checksum is {checksum:08x}, not {stored.checksum[:8]!r}"
        )
    if stored.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise CheckpointError(f"{file}: {name!r}: bools that are neither 0 nor 1")
    return tensor


def opened(file: Path) -> BufferedReader:
    try:
        if file.is_fifo():  # which would let everything wait
            raise OSError("a pipe, no file")
        return file.open("rb")
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{file.name}: missing in {str(file.parent)!r}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file.name}: cannot be read: {sentence(error)}") from error


def read_json(file: Path) -> tuple[dict[str, Any], str]:
    """Return the content of a JSON file, and its checksum."""
    with opened(file) as stream:
        text = stream.read()
    return parsed(file.name, text), crc32(text)


def parsed(file: str, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: no JSON: {sentence(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must be a JSON object, got {shown(content)}")
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> str:
    """Write a JSON file, and return its checksum."""
    text = (json.dumps(content, indent=2) + "\n").encode()
    with file.open("wb") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    return crc32(text)


def checked_texts(key: str, given: object) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values()):
        raise InvalidArgumentError(f"{key} must be an object of texts, got {shown(given)}")
    return given


@contextmanager
def named(place: str) -> Iterator[None]:
    """Name the place in a checkpoint in errors."""
    try:
        yield
    except InvalidArgumentError as error:
        raise CheckpointError(f"{place}: {error}") from error


def few(names: Iterable[str]) -> str:
    first, *others = [shown(name) for name in names]
    more = f" and {len(others) - 2} more" if len(others) > 2 else ""
    return ", ".join([first, *others[:2]]) + more


def shown(given: object) -> str:
    """Return the text of a value, short enough for a sentence."""
    try:
        text = repr(given)
    except (ValueError, RecursionError):  # a number of very many digits, or very deep nesting
        return f"something of type {type(given).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"


def sentence(error: BaseException) -> str:
    """Return the text of an error in one short line."""
    return " ".join(str(error).split())[:200]
