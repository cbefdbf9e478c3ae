"""Models of Diffusers, which has no way to describe or load their block-sparse layers."""

from __future__ import annotations

from functools import wraps
from typing import Any

from .._hooks import adapt, when_imported
from ..errors import UnsupportedError


def register() -> None:
    """Have ``save_pretrained`` refuse block-sparse layers, now or as soon as Diffusers is imported."""
    when_imported(
        "diffusers.models.modeling_utils",
        _refuse_to_save,
        "save_pretrained will write block-sparse layers that nothing loads; use tilesparse.save",
    )


def _refuse_to_save(module: Any) -> None:
    def refusing(save: Any) -> Any:
        @wraps(save)
        def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
            from ..nn.linear import BlockSparseLinear

            for name, layer in self.named_modules():
                if isinstance(layer, BlockSparseLinear):
                    raise UnsupportedError(
                        f"save_pretrained of Diffusers cannot describe the block-sparse layer {name!r}; call "
                        "tilesparse.save and tilesparse.load"
                    )
            return save(self, *args, **kwargs)

        return save_pretrained

    adapt(module.ModelMixin, "save_pretrained", refusing)
