"""Run `python -m benchmarks.plane`."""

from benchmarks.plane.main import main

if __name__ == "__main__":
    main()
