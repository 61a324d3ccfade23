"""A stand-in for vLLM 0.24 and 0.32: its names, its connector's book-keeping, fake tokens.

Nothing of vLLM runs.
"""

from vllm.standin.release import VERSION

__version__ = f"{VERSION}+standin"
