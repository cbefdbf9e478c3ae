"""README for the package index, where links to files of the repository lead nowhere.

They are made absolute if pyproject.toml names the repository, as ``Source`` in ``[project.urls]``, and else
become what they say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
# [text](path) and ![text](path), where the path is neither an address nor a heading of README itself.
_LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://|mailto:|#)([^)\s]+)\)")


def adapt(text: str, repository: str | None, version: str) -> str:
    """`text` with its relative links leading to the files of a version, or without them."""

    def replace(link: re.Match[str]) -> str:
        image, words, path = link.groups()
        if repository is None:
            return words
        kind = "raw" if image else "blob"
        return f"{image}[{words}]({repository}/{kind}/v{version}/{path})"

    return _LINK.sub(replace, text)


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Return the readme, as scikit-build-core asks a provider of metadata, after that of the version."""
    if settings:
        raise RuntimeError(f"tilesparse_readme has no settings, got {', '.join(settings)}")
    repository = project.get("urls", {}).get("Source")
    text = adapt((_ROOT / "README.md").read_text(encoding="utf-8"), repository, project["version"])
    return {"readme": {"content-type": "text/markdown", "text": text}}
