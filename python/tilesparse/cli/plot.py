"""``tilesparse plot``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..plot.figures import evolution, patterns, tradeoff
from ..plot.saving import FORMATS, check_file, save
from ..plot.sources import load_points, load_snapshots


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the pictures and the options of each."""
    pictures = command.add_subparsers(
        dest="picture", required=True, metavar="patterns | evolution | tradeoff"
    )
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        help=f"a file whose name ends in {', '.join(FORMATS)}",
    )
    layers = argparse.ArgumentParser(add_help=False)
    layers.add_argument("--layers", metavar="REGEX", help="matched against the start of layer names")

    picture = pictures.add_parser("patterns", parents=[output, layers], help="the kept blocks of each layer")
    picture.add_argument("checkpoint", type=Path, help="a folder, of tilesparse.save or save_pretrained")
    picture.set_defaults(draw=_patterns)

    picture = pictures.add_parser(
        "evolution", parents=[output, layers], help="which blocks moved, and how old they are"
    )
    picture.add_argument("snapshots", type=Path, help="a file of tilesparse.plot.save_snapshots")
    picture.set_defaults(draw=_evolution)

    picture = pictures.add_parser("tradeoff", parents=[output], help="quality against time or density")
    picture.add_argument(
        "results", type=Path, nargs="+", help="JSON files: lists of {label, x, y, spread, note}"
    )
    picture.add_argument("--x", required=True, help="label of the horizontal axis, with its unit")
    picture.add_argument("--y", required=True, help="label of the vertical axis")
    picture.add_argument("--log-x", action="store_true", help="logarithmic horizontal axis")
    picture.add_argument("--log-y", action="store_true", help="logarithmic vertical axis")
    picture.set_defaults(draw=_tradeoff)


def main(arguments: argparse.Namespace) -> None:
    """Draw the picture asked for and print its path."""
    arguments.draw(arguments)


def _patterns(arguments: argparse.Namespace) -> None:
    file = check_file(arguments.output)
    _write(patterns(arguments.checkpoint, layers=arguments.layers), file)


def _evolution(arguments: argparse.Namespace) -> None:
    file = check_file(arguments.output)
    _write(evolution(load_snapshots(arguments.snapshots), layers=arguments.layers), file)


def _tradeoff(arguments: argparse.Namespace) -> None:
    file = check_file(arguments.output)
    points = [point for path in arguments.results for point in load_points(path)]
    figure = tradeoff(points, x=arguments.x, y=arguments.y, log_x=arguments.log_x, log_y=arguments.log_y)
    _write([figure], file)


def _write(figures: list[Any], file: Path) -> None:
    for written in save(figures, file):
        print(f"wrote {written}")
