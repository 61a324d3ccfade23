"""Run `python -m benchmarks.profile`."""

from benchmarks.profile.main import main

if __name__ == "__main__":
    main()
