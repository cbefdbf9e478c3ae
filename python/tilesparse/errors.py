"""The errors TileSparse raises. Each also is the built-in error a caller would expect.

A text about an argument begins with its name. All checks come before the first write, so a product that
raises one of these has written nothing.
"""


class TileSparseError(Exception):
    """Base of every error of this package."""


class InvalidArgumentError(TileSparseError, ValueError):
    """An argument is out of range, or does not fit the others; the text names it.

    Raised by constructors, conversions and products alike: sizes that are no multiple of the block
    shape, tensors of another shape, dtype or device than expected, options that do not exist.
    """


class InvalidTypeError(InvalidArgumentError, TypeError):
    """An argument has a type that is not allowed, such as a list for a tensor; the text names it.

    Raised by all public functions, before anything is computed or changed.
    """


class InvalidPatternError(InvalidArgumentError):
    """The index arrays or the list of blocks given for a pattern break one of its invariants.

    Raised where a `BlockPattern` is made or taken from the buffers of a layer; ``load_state_dict``
    reports it in its own RuntimeError.
    """


class CheckpointError(InvalidArgumentError):
    """A checkpoint is damaged, newer than this library, or does not fit the model; the text names the file.

    Raised by `tilesparse.load` before the model is changed, and by `tilesparse.save` for what a checkpoint
    cannot hold, before a file is.
    """


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A file of a checkpoint is missing.

    Raised by `tilesparse.load`.
    """


class UnsupportedError(TileSparseError, NotImplementedError):
    """The request is valid, but nothing here computes it.

    Raised by products for which the library has no kernel on the device, by derivatives that do not
    exist, and by what cannot be done while a CUDA graph is captured.
    """


class NoDeviceError(TileSparseError, RuntimeError):
    """There is no usable CUDA device, or the library was built without CUDA.

    Raised by the first product or plan on a CUDA device.
    """


class CudaError(TileSparseError, RuntimeError):
    """The CUDA runtime reported an error.

    Raised by the product or the plan whose launch failed. What goes wrong on the GPU later is PyTorch's to
    report.
    """


class TuneFileError(TileSparseError, OSError):
    """The file of what `tilesparse.tune` measures is damaged or foreign, or cannot be read or written.

    Raised by `tilesparse.tune`, before it measures; a program that imports this package gets the same text as
    a warning, and goes on with estimates.
    """


class PatternChangedError(TileSparseError, RuntimeError):
    """A pattern was updated where something still belongs to the blocks of before.

    Raised by a backward pass, which would compute with other blocks than its forward pass did, and by the
    step of an optimizer that keeps states for another number of blocks than a weight now has.
    """


class UnsynchronizedPatternError(TileSparseError, RuntimeError):
    """Processes that train one model together may have different patterns.

    Raised by the first training step of a layer whose pattern its own process made, and by
    `tilesparse.parallel.synchronize_patterns` where the layers differ in size.
    """


class InternalError(TileSparseError, RuntimeError):
    """A defect of this package; please report it.

    Raised where the library meets what its own checks should have excluded.
    """
