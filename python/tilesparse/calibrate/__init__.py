"""Calibration of models on data, as pruning and quantization share it."""
