"""Run `python -m benchmarks.profile`."""

from .main import main

if __name__ == "__main__":
    main()
