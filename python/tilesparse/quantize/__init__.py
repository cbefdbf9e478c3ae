"""Whole models in 8 and 4 bits, with scales chosen on calibration data; see `tilesparse.quantize_`."""
