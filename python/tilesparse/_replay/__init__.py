"""Runs a model block by block on batches, as pruning and recovery do."""
