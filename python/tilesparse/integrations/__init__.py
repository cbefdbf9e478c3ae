"""What other libraries are told of block-sparse layers."""
