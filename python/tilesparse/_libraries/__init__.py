"""What the package says to optional libraries without importing them."""
