"""`python -c TEXT WORDS`, for Program."""

import sys


def main() -> None:
    text = sys.argv.pop(1)
    sys.argv[0] = "-c"
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
