"""A one-rank layer in both tile classes, small enough for compute-sanitizer (not collected by pytest):

compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sm90/sanitizer_layer.py
compute-sanitizer --tool synccheck --error-exitcode 1 python tests/sm90/sanitizer_layer.py
compute-sanitizer --tool racecheck --kernel-name regex=stage --error-exitcode 1 python tests/sm90/sanitizer_layer.py
"""

import os
import sys

os.environ.setdefault("DEEP_MOE_TIMEOUT", "200")  # instrumented kernels are slow

import deep_moe  # noqa: E402
from deep_moe import testing  # noqa: E402


def main() -> int:
    problem = deep_moe.Problem(
        num_experts=16, num_topk=4, hidden=576, intermediate=208, max_tokens_per_rank=512, activation_clamp=10.0
    )
    with testing.World(problem, 1, "cuda", num_sms=8) as world:
        for count, bound in ((40, 64), (300, 512)):
            for quantised in (False, True):
                inputs = world.inputs([count], world.routing.with_holes, quantised=quantised)
                world.call_and_check(inputs, bound=bound)
                print(f"{count} tokens, bound {bound}, quantised {quantised}: right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
