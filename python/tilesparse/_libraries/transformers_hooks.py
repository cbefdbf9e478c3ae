"""Import `tilesparse.integrations.transformers` once Transformers has been imported, never before."""

from __future__ import annotations

import importlib
import json
import sys
from functools import wraps
from typing import Any

from .hooks import TRANSFORMERS, adapt, when_imported

_METHODS = "transformers.quantizers.auto"  # where Transformers keeps them
_HF = "tilesparse.integrations.transformers"


def register() -> None:
    """Register the quantization method of Transformers, now or as soon as it is imported."""
    when_imported(
        _METHODS,
        lambda module: _import_hf(),
        "from_pretrained will not load block-sparse layers, and save_pretrained will not describe them",
    )
    when_imported(
        "transformers.modeling_utils",
        _describe_before_saving,
        "call follow(model) before save_pretrained if layers were not put in by the patcher",
    )


def configurations(model: Any) -> dict[str, dict[str, Any]]:
    """Return what ``save_pretrained`` writes beside the weights, by file; nothing for models of others.

    Without the type of the model `from_pretrained` would make the largest of its class, from defaults.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return {}
    if _HF in sys.modules:
        sys.modules[_HF].follow_to_save(model)
    own = json.loads(model.config.to_json_string())
    own |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    found = {"config.json": own}
    if model.can_generate():
        found["generation_config.json"] = json.loads(model.generation_config.to_json_string())
    return found


def _describe_before_saving(module: Any) -> None:
    def describing(save: Any) -> Any:
        @wraps(save)
        def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _HF in sys.modules:
                sys.modules[_HF].follow_to_save(self)
            return save(self, *args, **kwargs)

        return save_pretrained

    adapt(TRANSFORMERS, module.PreTrainedModel, "save_pretrained", describing)


def _import_hf() -> None:
    importlib.import_module(_HF)
