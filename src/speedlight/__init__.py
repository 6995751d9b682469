"""Speedlight: exact attention for PyTorch in pure Python."""

from .api import attention, attention_varlen, merge, warmup
from .errors import UnsupportedError
from .explanation import explain
from .modifiers import Bias, Mask

__version__ = "0.1.0"

__all__ = [
    "Bias",
    "Mask",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_varlen",
    "explain",
    "merge",
    "warmup",
]
