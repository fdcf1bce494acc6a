"""The entry of `pccheckctl` and of `python -m pccheckctl`."""

import sys

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main() -> int:
    """Ctrl-C ends without a traceback also while modules are imported."""
    try:
        from pccheckctl import cli

        return cli.main()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
