"""Run `python -m benchmarks.chaos`."""

from benchmarks.chaos.main import main

if __name__ == "__main__":
    main()
