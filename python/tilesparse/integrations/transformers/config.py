"""The ``quantization_config`` of a model with block-sparse layers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...checkpoint.manifest import check_section, section
from ...config import METHOD


@register_quantization_config(METHOD)
class TileSparseConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a model with block-sparse layers, a section as in `checkpoint.section`.

    One that `follow` has made reads the layers of its model whenever it is asked. Copies and pickles hold
    what was read last, unless the model is copied along.

    Args:
        section: ``version`` and ``layers``.

    Raises:
        InvalidArgumentError: the section is of a newer version, or wrong.
    """

    quant_method = METHOD

    def __init__(self, **section: Any) -> None:
        section.pop("quant_method", None)
        check_section(section)
        self._section = section
        self._model: Callable[[], nn.Module | None] = _nobody
        self.untied: dict[str, str] = {}  # pairs that the model has shared before
        self.instead_of: Any = None  # the configuration that the model had before, others may have it still

    @classmethod
    def of(cls, model: nn.Module) -> TileSparseConfig:
        """One that follows a model."""
        config = cls(**section(model))
        config._model = weakref.ref(model)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The section as it is written: of the layers as they are now, if the model is still there."""
        model = self._model()
        if model is not None:
            self._section = section(model)
        return {"quant_method": METHOD, **copy.deepcopy(self._section)}

    def is_plain(self) -> bool:
        """Whether all layers can be trained."""
        return all(entry["storage"] == "plain" for entry in self.to_dict()["layers"].values())

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict, which Transformers expects a configuration to be that was not loaded from a file."""
        return self.to_dict().get(key, default)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.to_dict().items())

    def __deepcopy__(self, memo: dict[int, Any]) -> TileSparseConfig:
        copied = TileSparseConfig(**self.to_dict())
        with_it = memo.get(id(self._model()))
        if isinstance(with_it, nn.Module):
            copied._model, copied.untied = weakref.ref(with_it), self.untied
        return copied

    def __reduce__(self) -> tuple[Callable[..., TileSparseConfig], tuple[dict[str, Any]]]:
        return _rebuild, (self.to_dict(),)


def _nobody() -> None:
    """The model of a configuration without one."""


def _rebuild(section: dict[str, Any]) -> TileSparseConfig:
    return TileSparseConfig(**section)


def method_of(config: Any) -> Any:
    """Return the name of the method of a quantization_config, which may be a dict."""
    if isinstance(config, Mapping):  # of a model that was not made by from_pretrained
        return config.get("quant_method")
    return None if config is None else config.quant_method


def owner_of(config: Any) -> nn.Module | None:
    """The model that a configuration follows; another one may hold the same."""
    return config._model() if isinstance(config, TileSparseConfig) else None
