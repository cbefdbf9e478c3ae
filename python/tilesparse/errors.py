"""The errors TileSparse raises. Each also is the built-in error a caller would expect."""


class TileSparseError(Exception):
    """Base of every error of this package."""


class InvalidArgumentError(TileSparseError, ValueError):
    """An argument is out of range, or does not fit the others; the text names it."""


class InvalidPatternError(InvalidArgumentError):
    """The arrays of a pattern break one of its invariants."""


class UnsupportedError(TileSparseError, NotImplementedError):
    """The request is valid, but nothing here computes it."""


class NoDeviceError(TileSparseError, RuntimeError):
    """There is no usable CUDA device, or the library was built without CUDA."""


class CudaError(TileSparseError, RuntimeError):
    """The CUDA runtime reported an error."""


class PatternChangedError(TileSparseError, RuntimeError):
    """A pattern was updated between a forward pass and its backward pass."""


class UnsynchronizedPatternError(TileSparseError, RuntimeError):
    """Processes that train one model together may have drawn different patterns."""


class InternalError(TileSparseError, RuntimeError):
    """A defect of this package; please report it."""
