"""Compile every kernel of some models into the cache; needs no GPU and no CUDA toolkit."""

import argparse
import time

from ..jit import Kernel, KernelRequest, get_kernels
from ..jit.render import ARCHES
from .presets import Preset, Presets, load_presets
from .progress import ProgressBar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", metavar="NAME", help="presets, see --list; `all` for every one")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1], metavar="N", help="sizes of the group (default 1)")
    parser.add_argument("--arch", default="sm_90a", choices=ARCHES, help="default sm_90a")
    parser.add_argument("--max-tokens", type=int, default=8192, metavar="T", help="tokens per rank (default 8192)")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at a time (default: one per CPU)")
    parser.add_argument("--list", action="store_true", help="list the models and leave")


def run(arguments: argparse.Namespace) -> int:
    presets = load_presets()
    if arguments.list:
        list_models(presets)
        return 0
    if not arguments.model:
        raise ValueError("--model is missing; `--list` shows the names")
    names = [preset.name for preset in presets.models] if arguments.model == ["all"] else arguments.model
    requests = model_requests(presets, names, arguments.ranks, arguments.arch, arguments.max_tokens)
    start = time.monotonic()
    bar = ProgressBar(len(requests))
    kernels = get_kernels(requests, arguments.jobs, progress=lambda kernel: bar.advance(_describe(kernel)))
    compiled = sum(kernel.compiled for kernel in kernels)
    print(
        f"{len(kernels)} kernels ready for {arguments.arch} in {time.monotonic() - start:.1f} s "
        f"({compiled} compiled, {len(kernels) - compiled} found)"
    )
    return 0


def model_requests(
    presets: Presets, names: list[str], ranks: list[int], arch: str, max_tokens: int
) -> list[KernelRequest]:
    """The distinct kernels that the named models need on each number of ranks."""
    rendered: dict[str, KernelRequest] = {}
    for name in names:
        problem = presets.find(name).problem(max_tokens)
        for num_ranks in ranks:
            for config in problem.configs(num_ranks):
                for kind in ("mega", "stage"):
                    request = KernelRequest(config, kind, arch)
                    rendered.setdefault(request.render(), request)
    return list(rendered.values())


def list_models(presets: Presets) -> None:
    """Prints a table of the presets, then the refused models with the reasons."""
    width = 2 + max(map(len, [*(preset.name for preset in presets.models), *presets.refused]))
    print(f"{'model':<{width}}{'mma type':<11}{'hidden':>6}{'inter':>8}{'experts':>9}{'top-k':>7}  notes")
    for preset in presets.models:
        shape, notes = preset.arguments, "; ".join(_notes(preset))
        sizes = f"{shape['hidden']:>6}{shape['intermediate']:>8}{shape['num_experts']:>9}{shape['num_topk']:>7}"
        print(f"{preset.name:<{width}}{shape.get('mma_type', 'fp8xfp8'):<11}{sizes}  {notes}".rstrip())
    print("\nnot supported:")
    for name, reason in presets.refused.items():
        print(f"{name:<{width}}{reason}")


def _notes(preset: Preset) -> list[str]:
    """What a row of the table says besides the sizes."""
    shape = preset.arguments
    notes = [f"also {', '.join(preset.aliases)}"] if preset.aliases else []
    notes += [shape["activation"]] if "activation" in shape else []
    notes += [f"clamp {shape['activation_clamp']:g}"] if "activation_clamp" in shape else []
    notes += ["biases"] if shape.get("bias") else []
    notes += [preset.note] if preset.note else []
    return notes


def _describe(kernel: Kernel) -> str:
    if not kernel.compiled:
        return f"{kernel.name} (found)"
    return f"{kernel.name} ({kernel.meta['compile_seconds']:.1f} s)"
