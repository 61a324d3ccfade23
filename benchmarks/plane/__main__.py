"""Run `python -m benchmarks.plane`."""

from .main import main

if __name__ == "__main__":
    main()
