"""What is kept of a pattern, and calls of the core library."""
