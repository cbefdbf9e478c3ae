"""The errors that TileSparse raises; each is also the built-in error that a caller would expect.

A text about an argument names it first. All checks come before the first write, so a product that raises one
of these has written nothing.
"""


class TileSparseError(Exception):
    """Base of every error of this package."""


class InvalidArgumentError(TileSparseError, ValueError):
    """An argument is out of range or does not fit the others; the text names it."""


class InvalidTypeError(InvalidArgumentError, TypeError):
    """An argument has a type that is not allowed, such as a list for a tensor; the text names it."""


class InvalidPatternError(InvalidArgumentError):
    """The index arrays or the list of blocks given for a pattern break one of its invariants.

    Raised when a `BlockPattern` is made or read from the buffers of a layer; ``load_state_dict`` reports it
    in its own RuntimeError.
    """


class CheckpointError(InvalidArgumentError):
    """A checkpoint is damaged, newer than this library or does not fit the model; the text names the file."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A file of a checkpoint is missing."""


class UnsupportedError(TileSparseError, NotImplementedError):
    """The request is valid, but nothing here computes it.

    Raised by products without a kernel on the device, by derivatives that do not exist, and by calls that
    are impossible while a CUDA graph is captured.
    """


class NoDeviceError(TileSparseError, RuntimeError):
    """There is no usable CUDA device, or the library was built without CUDA."""


class CudaError(TileSparseError, RuntimeError):
    """The CUDA runtime reported an error.

    Raised by the product or plan whose launch failed. PyTorch reports later errors on the GPU.
    """


class TuneFileError(TileSparseError, OSError):
    """A file of measurements is damaged or foreign, or cannot be read or written.

    Raised by `tilesparse.tuning.tune` before it measures. A program that imports this package gets the
    same text as a warning and goes on with estimates.
    """


class PatternChangedError(TileSparseError, RuntimeError):
    """A pattern was updated while something still depends on the old blocks.

    Raised by a backward pass that would use other blocks than its forward pass did, by the step of an
    optimizer whose states are for another number of blocks than the weight now has, and on a GPU by a call
    that finds that a pattern was written to unnoticed, so that calls before may have used the old blocks, or
    that a product before found another plan in memory than its own.
    """


class UnsynchronizedPatternError(TileSparseError, RuntimeError):
    """Processes that train one model together may have different patterns.

    Raised by the first training step of a layer whose pattern was drawn in this process only, and by
    `tilesparse.distributed.synchronize_patterns` if the layers differ in size.
    """


class InternalError(TileSparseError, RuntimeError):
    """A defect of this package; please report it."""
