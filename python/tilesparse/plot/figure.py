"""The figures that `plot` makes. Imports matplotlib."""

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A figure that notebooks show, also those that do not import pyplot."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png", bbox_inches="tight")
        return stream.getvalue()
