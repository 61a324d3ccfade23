"""Run `python -m benchmarks.chaos`."""

from .main import main

if __name__ == "__main__":
    main()
