"""Other projects take the library with find_package, FetchContent and pkg-config, shared and static."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_packaging import PACKAGE, ROOT, SOONEST, copy_for_any_processor, run

CONSUMER = ROOT / "tests" / "cmake"
BOTH = "tilesparse::tilesparse;tilesparse::tilesparse_static"


def configure(build: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    command = ["cmake", "-G", "Ninja", "-S", str(CONSUMER), "-B", str(build), *definitions]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def needed(program: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(.+)\]", run("readelf", "-d", program))


def run_programs(build: Path, *targets: str) -> None:
    """Run programs; those linked to the static library do not look for the shared one."""
    run("cmake", "--build", build)
    for target in targets:
        for program in (build / f"c_{target}", build / f"product_{target}"):
            run(program)
            is_shared = any(name.startswith("libtilesparse.so") for name in needed(program))
            assert is_shared == (target == "tilesparse")


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build folder of a project of which the sources are a part, and which wants all there is."""
    build, sources = tmp_path_factory.mktemp("fetched"), tmp_path_factory.mktemp("sources")
    copy_for_any_processor(sources)
    settings = {"TILESPARSE_STATIC": "ON", "TILESPARSE_INSTALL": "ON", "TILESPARSE_WERROR": "ON", **SOONEST}
    result = configure(build, HOW="FetchContent", TARGETS=BOTH, SOURCES=sources, **settings)
    assert result.returncode == 0, result.stderr
    run("cmake", "--build", build)
    return build


@pytest.fixture(scope="module")
def prefix(fetched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", fetched, "--prefix", prefix)
    return prefix


def test_fetch_content(fetched: Path) -> None:
    run_programs(fetched, "tilesparse", "tilesparse_static")


def test_a_part_of_another_project_installs_nothing_unless_asked(tmp_path: Path) -> None:
    result = configure(tmp_path / "build", HOW="FetchContent")
    assert result.returncode == 0, result.stderr
    assert "tilesparse is compiled without optimisation" in result.stderr  # CMAKE_BUILD_TYPE is empty
    run("cmake", "--install", tmp_path / "build", "--prefix", tmp_path / "prefix", "--component", "core")
    assert not (tmp_path / "prefix").exists()


def test_find_package(prefix: Path, tmp_path: Path) -> None:
    result = configure(tmp_path, CMAKE_PREFIX_PATH=prefix, COMPONENTS="static", TARGETS=BOTH)
    assert result.returncode == 0, result.stderr
    run_programs(tmp_path, "tilesparse", "tilesparse_static")


def test_what_an_installation_does_not_have_is_said(tmp_path: Path) -> None:
    """The wheel's installation has no static library."""
    result = configure(tmp_path, CMAKE_PREFIX_PATH=PACKAGE, COMPONENTS="static")
    assert result.returncode != 0
    assert "has no static library" in " ".join(result.stderr.split())


def test_versions_that_do_not_fit_are_not_found(tmp_path: Path) -> None:
    for version, is_found in (("0.1", True), ("0.2", False)):
        (tmp_path / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(consumer LANGUAGES C)\n"
            f"find_package(tilesparse {version} CONFIG REQUIRED)\n"
        )
        command = ["cmake", "-S", tmp_path, "-B", tmp_path / version, f"-DCMAKE_PREFIX_PATH={PACKAGE}"]
        result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        assert (result.returncode == 0) == is_found, result.stderr


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="pkg-config is not installed")
def test_pkg_config_of_a_static_program(prefix: Path, tmp_path: Path) -> None:
    folder = next(prefix.glob("lib*/pkgconfig"))
    flags = run(
        "env", f"PKG_CONFIG_PATH={folder}", "pkg-config", "--static", "--cflags", "--libs", "tilesparse"
    )
    run("cc", "-static", ROOT / "tests/c/product.c", *flags.split(), "-o", tmp_path / "program")
    run(tmp_path / "program")
    assert needed(tmp_path / "program") == []
