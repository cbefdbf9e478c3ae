"""Operators ``torch.ops.tilesparse.*``, their gradients, and the fast path past the dispatcher."""
