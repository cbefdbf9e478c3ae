"""Checks wheels and source distributions before anybody gets them.

    python tools/check_distributions.py [--gpus 80,89,90] dist/*

Of a wheel: tags, contents, size, licences, bill of materials, exported symbols, the libraries it needs, and
for which GPUs it has code. Of a source distribution: what it contains. Needs pyelftools, which comes with
auditwheel. Exits with 1 where anything is wrong, after all of it has been printed.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import struct
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 20 * 10**6
CORE = "tilesparse/lib/libtilesparse.so"
NEEDED = {
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libc.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
}
LICENCES = ("LICENSE", "third_party/NOTICE.txt")
TAGS = re.compile(
    r"tilesparse-[\d.]+[\w.]*-(cp310-cp310|cp311-cp311|cp312-abi3)-manylinux_2_\d+_(x86_64|aarch64)\S*\.whl"
)
FATBIN = struct.pack("<I", 0xBA55ED50)  # with which a fat binary of nvcc begins
PTX, CUBIN = 1, 2

# A source distribution has nothing but these and what lies in them.
FOLDERS = "benchmarks cmake cpp cuda docs examples findings python tests third_party tools"
FILES = "CHANGELOG.md CMakeLists.txt CONTRIBUTING.md LICENSE PKG-INFO README.md mkdocs.yml pyproject.toml"
# And it has these, without which nothing is built, offline either.
BUILT_FROM = (
    "pyproject.toml",
    "CMakeLists.txt",
    "cmake/build_backend/tilesparse_backend.py",
    "cuda/ampere/tiles.def",
    "cuda/hopper/tiles.def",
    "cpp/include/tilesparse/tilesparse.h",
    "python/bindings/module.cpp",
    "tests/c/symbols.txt",
    "third_party/NOTICE.txt",
    "third_party/cutlass/LICENSE.txt",
    "third_party/cutlass/include/cutlass/version.h",
    "third_party/cutlass/include/cute/tensor.hpp",
)


class Report:
    """Prints what was found, and keeps in mind what is wrong."""

    def __init__(self) -> None:
        self.failures = 0

    def check(self, holds: bool, text: str) -> None:
        """One line: what must hold, or what was found instead."""
        self.failures += not holds
        print(f"  {'ok  ' if holds else 'FAIL'}  {text}")


def code_in(library: bytes) -> Counter[tuple[str, int]]:
    """How many pieces of GPU code a library has, by ("cubin" or "ptx", compute capability).

    A fat binary is a header (magic, version, its size, bytes that follow) and entries, each with a header of
    its own (kind, attributes, its size, bytes that follow, and in its eighth word the compute capability).
    """
    found: Counter[tuple[str, int]] = Counter()
    start = library.find(FATBIN)
    while start >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", library, start)
        at, end = start + header, start + header + size
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
            capability = struct.unpack_from("<I", library, at + 28)[0]
            found[{PTX: "ptx", CUBIN: "cubin"}.get(kind, str(kind)), capability] += 1
            at += header + size
        start = library.find(FATBIN, end)
    return found


def exported(elf: ELFFile) -> list[str]:
    """Names of the symbols that others can link to."""
    table = elf.get_section_by_name(".dynsym")
    assert isinstance(table, SymbolTableSection)
    return sorted(s.name for s in table.iter_symbols() if s["st_shndx"] != "SHN_UNDEF" and s.name)


def dynamic(elf: ELFFile, tag: str, attribute: str) -> list[str]:
    """Values of one kind of entry in the dynamic section."""
    section = elf.get_section_by_name(".dynamic")
    assert isinstance(section, DynamicSection)
    return [getattr(entry, attribute) for entry in section.iter_tags(tag)]


def check_core(report: Report, library: bytes, gpus: set[int]) -> None:
    """The core library: its symbols, what it needs, its code for GPUs."""
    elf = ELFFile(io.BytesIO(library))
    symbols = (ROOT / "tests/c/symbols.txt").read_text().split()
    report.check(exported(elf) == symbols, f"exports the {len(symbols)} symbols of tests/c/symbols.txt alone")
    needed = set(dynamic(elf, "DT_NEEDED", "needed"))
    system = {name for name in needed if not name.startswith("ld-linux")}
    report.check(system <= NEEDED, f"needs {', '.join(sorted(system))}")
    code = code_in(library)
    listed = ", ".join(f"{count} {kind} {gpu}" for (kind, gpu), count in sorted(code.items()))
    found = {gpu for kind, gpu in code if kind == "cubin"}
    report.check(found == gpus, f"code for GPUs {sorted(gpus) or 'none'}: {listed or 'none'}")
    if gpus:
        for own in (80, 89):
            report.check(
                code["ptx", own] == code["cubin", own], f"PTX for each of {own}, which newer GPUs run"
            )


def check_module(report: Report, module: bytes) -> None:
    """The Python module: its symbol, and where it finds the core library."""
    elf = ELFFile(io.BytesIO(module))
    plain = [name for name in exported(elf) if not name.startswith("_Z")]  # which nanobind's exceptions do
    report.check(plain == ["PyInit__C"], "the module exports PyInit__C alone")
    needed = set(dynamic(elf, "DT_NEEDED", "needed"))
    own = {"libtilesparse.so"}
    system = {name for name in needed if not name.startswith("ld-linux")}
    report.check(own <= system <= NEEDED | own, f"the module needs {', '.join(sorted(system))}")
    paths = dynamic(elf, "DT_RUNPATH", "runpath") + dynamic(elf, "DT_RPATH", "rpath")
    report.check(paths == ["$ORIGIN/lib"], f"the module looks in {paths}")


def check_wheel(report: Report, path: Path, gpus: set[int]) -> None:
    """All that is checked of a wheel."""
    match = TAGS.fullmatch(path.name)
    report.check(match is not None, "tags: cp310, cp311, or abi3 from 3.12 on, and manylinux")
    size = path.stat().st_size
    report.check(size <= MOST_BYTES, f"{size / 1e6:.1f} MB, at most {MOST_BYTES / 1e6:.0f}")
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        folders = {name.split("/")[0] for name in names}
        version = path.name.split("-")[1]
        info = f"tilesparse-{version}.dist-info"
        own = {"tilesparse", "tilesparse_vllm", info}
        report.check(folders == own, f"contains {', '.join(sorted(folders))}")
        stray = [name for name in names if re.search(r"__pycache__|\.(pyc|o|a|cu|cpp)$|/tests?/", name)]
        report.check(not stray, f"nothing stray {stray or ''}")
        for licence in LICENCES:
            report.check(f"{info}/licenses/{licence}" in names, f"licences: {licence}")
        check_bill(report, wheel, info, version, bool(gpus))
        tags = set(re.findall(r"^Tag: (\S+)", wheel.read(f"{info}/WHEEL").decode(), re.MULTILINE))
        report.check({tag.split("-")[0] for tag in tags} == {path.name.split("-")[2]}, f"tags {sorted(tags)}")
        header = wheel.read("tilesparse/include/tilesparse/tilesparse.h").decode()
        report.check(f'#define TS_VERSION "{version}"' in header, f"the header is that of {version}")
        libraries = [name for name in names if re.search(r"\.so(\.\d+)*$", name)]
        modules = [name for name in libraries if re.fullmatch(r"tilesparse/_C\.[\w-]+\.so", name)]
        report.check(len(modules) == 1 and libraries == sorted([*modules, CORE]), f"libraries {libraries}")
        if match is not None and match[1] == "cp312-abi3":
            report.check(modules == ["tilesparse/_C.abi3.so"], "the module says that it has the stable ABI")
        check_core(report, wheel.read(CORE), gpus)
        for name in modules:
            check_module(report, wheel.read(name))


def check_bill(report: Report, wheel: zipfile.ZipFile, info: str, version: str, cuda: bool) -> None:
    """The bill of materials: it names this version and all that was compiled in."""
    bill = json.loads(wheel.read(f"{info}/sboms/tilesparse.cdx.json"))
    names = {component["name"] for component in bill["components"]}
    expected = {"nanobind", "robin-map"} | ({"cutlass", "cudart_static"} if cuda else set())
    report.check(names == expected, f"bill of materials: {', '.join(sorted(names))}")
    versions = [component.get("version", "of nanobind") for component in bill["components"]]
    report.check(bill["metadata"]["component"]["version"] == version and all(versions), f"of {versions}")


def sdist_names(path: Path) -> Iterator[str]:
    """Files, without the folder all of them lie in."""
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            if member.isfile():
                yield member.name.split("/", 1)[1]


def check_sdist(report: Report, path: Path) -> None:
    """All that is checked of a source distribution."""
    names = set(sdist_names(path))
    report.check(path.stat().st_size <= MOST_BYTES, f"{path.stat().st_size / 1e6:.1f} MB")
    expected = {*FOLDERS.split(), *FILES.split()}
    others = [name for name in names if name.split("/")[0] not in expected]
    report.check(not others, f"{len(names)} files, none elsewhere than expected {others[:5] or ''}")
    results = [name for name in names if name.startswith("benchmarks/") and ".json" in name]
    report.check(not results, f"no results of benchmarks {results[:5] or ''}")
    built = [name for name in names if re.search(r"__pycache__|\.(pyc|so|o|whl)$", name)]
    report.check(not built, f"nothing that was built {built[:5] or ''}")
    missing = [name for name in BUILT_FROM if name not in names]
    report.check(not missing, f"what is built from, with the CUTLASS headers {missing or ''}")


def main() -> int:
    """Checks the files named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--gpus", default="80,89,90", help="compute capabilities wheels have code for (%(default)s)"
    )
    arguments = parser.parse_args()
    gpus = {int(gpu) for gpu in arguments.gpus.split(",") if gpu}
    report = Report()
    for path in arguments.files:
        print(path.name)
        if path.suffix == ".whl":
            check_wheel(report, path, gpus)
        elif path.name.endswith(".tar.gz"):
            check_sdist(report, path)
        else:
            report.check(False, "is neither a wheel nor a source distribution")
    print("all is well" if report.failures == 0 else f"{report.failures} checks failed")
    return int(report.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
