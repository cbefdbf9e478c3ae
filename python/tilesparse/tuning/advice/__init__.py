"""Advice on whether block sparsity pays for a model: times of its layers, dense, in 8 bits and sparse."""

from .advising import DENSITIES as DENSITIES
from .advising import advise
from .contenders import Contender
from .report import AdviceReport, Estimate, MeasuredProduct

__all__ = ["AdviceReport", "Contender", "Estimate", "MeasuredProduct", "advise"]
