"""Pattern cache and kernel launches."""
