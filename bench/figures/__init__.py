"""The figures of the paper, measured on this machine: `python -m bench.figures --help`."""
