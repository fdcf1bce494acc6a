"""The figures of the paper on this machine: PCcheck, CheckFreq, GPM, Gemini and common libraries.

    python -m bench.figures [--quick] [--only fig8,fig12] [--model vgg16] [--every 10,50]
                            [--contender GPM] [--setting N=2] [--rounds 3]
                            [--directory DIR | --image DIR] [--trace FILE]

Root is needed: the disk is a file in --image behind a loop device, limited by the kernel. Without
root, or for a disk as it is, use --directory. Flags choose cells (points of the figures); the last
column of each CSV file has the command for its row. Progress goes to stderr. Writes
bench/results/figures-DATE.md, a picture and a CSV file for each figure, and every run as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from bench import common
from bench.common import GIB, BenchError, exit_code
from bench.figures.disk import Disk, limited, unlimited
from bench.figures.goodput import Sample, make_trace, read_trace
from bench.figures.paper import MODELS, TRACE_STEP_S
from bench.figures.plan import CPU, FIGURES, FULL, QUICK, SMALLEST, Plan
from bench.figures.registry import ALL, OTHERS
from bench.figures.report import Run, write
from bench.figures.rounds import Bench

#: Of the trace that is made when none is given: about as many preemptions as in the paper's.
GPUS, SAMPLES, LOST_AN_HOUR, BACK_AN_HOUR = 64, 215, 7.0, 6.0


def _choice(allowed: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of: {'; '.join(allowed)}")
        return names

    return parse


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="about 15 minutes instead of two hours")
    sizes.add_argument("--smallest", action="store_true", help="each kind of cell once, for tests")
    parser.add_argument("--only", type=_choice(FIGURES), help=", ".join(FIGURES))
    parser.add_argument("--model", type=_choice((*MODELS, CPU, "any")), help=", ".join(MODELS))
    parser.add_argument("--every", type=_numbers, help="intervals, in steps")
    parser.add_argument(
        "--contender", choices=(*ALL, *OTHERS), metavar="NAME", action="append",
        help=f"may be repeated: {'; '.join(ALL)}",
    )  # fmt: skip
    parser.add_argument("--setting", default="", help="of Figures 10 to 14, as in the CSV files")
    parser.add_argument("--rounds", type=int, help="how often each cell is measured")
    parser.add_argument("--size", type=common.parse_sizes, help="of the state, such as 16MiB")
    parser.add_argument("--bandwidth", type=int, help="of the limited disk, in MB/s")
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--directory", type=Path, help="measure this disk as it is")
    places.add_argument("--image", type=Path, default=Path(), help="where the limited disk is made")
    parser.add_argument("--trace", type=Path, help="a CSV file with the header ,Time,GPUs")
    parser.add_argument("--seed", type=int, default=1, help="of the trace made without --trace")
    return parser.parse_args()


def _plan(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else SMALLEST if options.smallest else FULL
    models = tuple(name for name in options.model or () if name in MODELS)
    chosen = {
        "figures": options.only, "models": models, "rounds": options.rounds,
        "contenders": tuple(options.contender or ()),
        "intervals": options.every, "cpu_intervals": options.every,
        "in_flight_intervals": options.every, "setting": options.setting,
        "payload_bytes": options.size[0] if options.size else 0,
        "bandwidth": (options.bandwidth or 0) * 1_000_000,
    }  # fmt: skip
    return replace(plan, **{name: value for name, value in chosen.items() if value})


def _trace(options: argparse.Namespace) -> tuple[list[Sample], str]:
    if options.trace is None:
        made = make_trace(options.seed, GPUS, SAMPLES, TRACE_STEP_S, LOST_AN_HOUR, BACK_AN_HOUR)
        return made, (
            f"made with seed {options.seed}, {GPUS} GPUs, {LOST_AN_HOUR:g} preemptions and "
            f"{BACK_AN_HOUR:g} replacements an hour"
        )
    try:
        with options.trace.open(newline="") as lines:
            return read_trace(lines), options.trace.name
    except OSError as error:
        raise BenchError(f"cannot read {options.trace}: {error.strerror}") from None


@contextlib.contextmanager
def _disks(options: argparse.Namespace, plan: Plan) -> Iterator[tuple[Disk, Disk]]:
    """The disk with a limit, and the disk as it is; with --directory both are the same."""
    common.require_room(options.directory or options.image, plan.image_bytes() + 8 * GIB)
    with unlimited(options.directory or options.image) as fast:
        if options.directory:
            yield fast, fast
        else:
            with limited(options.image, plan.image_bytes(), plan.bandwidth) as slow:
                yield slow, fast


def _interrupt(number: int, _frame: object) -> None:
    """As Ctrl-C, so that the disk is unmounted and detached."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    options = _flags()
    plan = _plan(options)
    warnings.simplefilter("ignore")  # of torch, about its own libraries
    signal.signal(signal.SIGTERM, _interrupt)
    trace, trace_text = _trace(options)
    facts = common.facts_of(options.directory or options.image)
    with _disks(options, plan) as (slow, fast):
        print(*(disk.text() for disk in dict.fromkeys((slow, fast))), sep="\n", file=sys.stderr)
        torch.set_num_threads(1)  # as many as the daemon leaves
        bench = Bench(plan, slow, fast)
        failure: BaseException | None = None
        try:
            bench.run()
        except BaseException as error:  # an hour of measurements is not thrown away
            failure = error
            bench.notes[f"INCOMPLETE: {error!r}"] = None
        run = Run(
            plan, bench.results, slow, fast, trace, trace_text, bench.bandwidth, [*bench.notes]
        )
    if bench.results.figures():
        write(run, facts)
    if failure is not None:
        raise failure
    return 0


if __name__ == "__main__":
    try:
        sys.exit(exit_code(main))
    except KeyboardInterrupt:
        sys.exit(130)
