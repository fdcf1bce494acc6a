"""What all targets do alike: their words, and one line a step."""

from __future__ import annotations

import argparse
import time


def words(**more: int) -> argparse.ArgumentParser:
    """LOG --steps N --pace S, and a whole number for each other name, with its default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("log", help="a line is appended to this file at each step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds of sleep in each step")
    for name, usual in more.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    return parser


class Log:
    """Takes the lines. Each is whole in the file when the call returns."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._file = open(options.log, "a", buffering=1)  # noqa: SIM115, PTH123
        self._pace = options.pace

    def step(self, number: int, *told: object) -> None:
        self.line(number, *told)
        time.sleep(self._pace)

    def line(self, *told: object) -> None:
        text = " ".join(map(str, told))
        self._file.write(text + "\n")
        print(text, flush=True)
