"""Run `python -m benchmarks.gpu`."""

from benchmarks.gpu.main import main

main()
