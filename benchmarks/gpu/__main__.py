"""Run `python -m benchmarks.gpu`."""

from .main import main

main()
