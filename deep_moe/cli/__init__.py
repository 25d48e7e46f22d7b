"""The command line: `env` (what is here, what is missing), `warmup` (fill the kernel cache), `demo` (run a layer),
`mutate` (test the tests)."""

import argparse
import os
import sys
from collections.abc import Sequence

from ..errors import DeepMoeError
from . import demo, env, mutate, warmup


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the result is the exit status: 0 fine, 1 a check failed or an error, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m deep_moe", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in (("env", env), ("warmup", warmup), ("demo", demo), ("mutate", mutate)):
        summary = module.__doc__.strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (DeepMoeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `... | head`: not worth a traceback, now or when the interpreter flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
