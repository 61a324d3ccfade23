"""A stand-in for vLLM 0.24.0: its names, its connector's book-keeping, fake tokens. Nothing of vLLM runs."""

__version__ = "0.24.0+standin"
