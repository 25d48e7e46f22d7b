"""Plant known faults in copies of the device headers, one at a time, and see whether the emulator's tests notice."""

import argparse
import time

GOAL = 0.95  # of the mutants are caught


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--seeds", type=int, default=3, help="schedules of every case")


def run(arguments: argparse.Namespace) -> int:
    from ..testing import mutation
    from ..testing.mutants import MUTANTS

    mutants = [mutant for mutant in MUTANTS if arguments.only in mutant.name]
    if not mutants:
        raise ValueError(f"--only {arguments.only!r} is in no mutant's name")
    width = max(len(mutant.name) for mutant in mutants)

    def show(outcome: mutation.Outcome) -> None:
        name = outcome.mutant.name if outcome.mutant else "(unmutated)"
        reason = outcome.mutant.survives if outcome.mutant else ""
        survived = f"SURVIVED ({reason})" if reason else "SURVIVED"
        text = outcome.caught or (survived if outcome.mutant else "passes")
        print(f"{name:<{width}}  {outcome.seconds:5.1f} s  {text}", flush=True)

    start = time.monotonic()
    first, *outcomes = mutation.try_mutants([None, *mutants], arguments.seeds, arguments.jobs, show)
    caught = sum(bool(outcome.caught) for outcome in outcomes)
    print(f"\n{time.monotonic() - start:.0f} s")
    print(f"{len(mutants)} mutants, {caught} caught ({100 * caught / len(mutants):.0f} %)")
    return 0 if not first.caught and caught >= GOAL * len(mutants) else 1
