"""bench/peers/chain.py without a GPU: its kernels in Triton's interpreter, and compiled for sm_90.

Triton decides at its import whether kernels are interpreted, so they run in a process of their own: this file.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deep_moe import reference, testing

BENCH = Path(__file__).parents[2] / "bench"
# tokens, experts, topk, hidden, intermediate, clamp, routing
CASES = {
    "one token": (1, 4, 2, 256, 128, None, "random"),
    "clamp": (3, 4, 2, 128, 256, 0.5, "random"),
    "holes and duplicates": (6, 3, 3, 128, 128, None, "with_holes"),
    "more rows than a block": (70, 2, 2, 128, 128, None, "random"),
    "nobody": (2, 4, 2, 128, 128, None, "nobody"),
}


def bench_modules():
    """(chain, shapes); the scripts of bench/ import each other as neighbours. Skips without Triton."""
    pytest.importorskip("triton", reason="the chain's kernels are written in Triton, which is not installed")
    sys.path.insert(0, str(BENCH))
    try:
        import shapes
        from peers import chain
    finally:
        sys.path.remove(str(BENCH))
    return chain, shapes


def convert(data, source, target, rounding_mode):
    """Instead of the interpreter's conversion of floats, which cuts off instead of rounding: torch's."""
    names = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    values = torch.frombuffer(bytearray(data.tobytes()), dtype=names[source.name]).to(names[target.name])
    return values.view(getattr(torch, f"uint{target.primitive_bitwidth}")).numpy().reshape(data.shape)


def interpreted(chain, shapes, tokens, experts, topk, hidden, intermediate, clamp, routing) -> dict[str, float]:
    """Errors of the chain and of the reference, in this process."""
    shape = shapes.Shape("tiny", hidden, intermediate, topk, experts, clamp)
    problem = shape.problem(1, tokens + 3)
    weights, generator = testing.random_weights(problem, seed=1), testing.generator_of(2)
    ids = getattr(testing.Routing.of(problem, 1), routing)(0, tokens, generator)
    x = testing.random_activations(problem, tokens)
    staged = reference.stage(x, ids, torch.rand(tokens, topk, generator=generator), experts)
    layer = chain.Chain(shape, weights, tokens + 3)
    testing.poison(layer.slots)  # where nobody writes, nobody may read
    layer.stage(staged)
    y = testing.poison(torch.empty(tokens, hidden, dtype=torch.bfloat16))
    layer.launch(y)
    wanted = reference.layer(staged, weights.gate_up, weights.down, reference.Activation(clamp=clamp))
    return {"error": testing.error_of(y, wanted).worst_row, "bar": testing.error_bar(problem, 1)}


def main() -> None:
    """Run CASES and print their errors as JSON."""
    modules = bench_modules()
    from triton.runtime import interpreter

    interpreter._convert_float = convert
    print(json.dumps({name: interpreted(*modules, *case) for name, case in CASES.items()}))


@pytest.fixture(scope="module")
def errors() -> dict:
    pytest.importorskip("triton", reason="the chain's kernels are written in Triton, which is not installed")
    paths = os.pathsep.join([str(BENCH.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_the_chain_is_the_reference(errors, name):
    """The interpreter adds up as numpy does, so even the requantised codes are the reference's."""
    assert errors[name]["error"] <= 0.1 * errors[name]["bar"], errors[name]


def meta_weights(shape) -> testing.Weights:
    """Shapes and dtypes without memory."""
    e, h, i = shape.experts_per_rank, shape.hidden, shape.intermediate
    return testing.Weights(
        *(
            (
                torch.empty(e, n, k, dtype=torch.float8_e4m3fn, device="meta"),
                torch.empty(e, n // 128, k // 128, device="meta"),
            )
            for n, k in ((i, h), (i, h), (h, i))
        )
    )


class Recorder:
    """In place of a kernel: keeps grid and arguments of its launch."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.grid, self.args, self.kwargs = grid, args, kwargs

        return launch

    def compiled(self):
        """The recorded launch compiled for sm_90."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        types = {torch.float8_e4m3fn: "*fp8e4nv", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
        place = self.kernel.arg_names.index
        constants = {name: value for name, value in self.kwargs.items() if name.isupper()}
        operands = dict(zip(self.kernel.arg_names, self.args, strict=False))
        tensors = {name: types[value.dtype] for name, value in operands.items() if isinstance(value, torch.Tensor)}
        source = ASTSource(
            self.kernel,
            dict.fromkeys(operands, "i32") | tensors | dict.fromkeys(constants, "constexpr"),
            {(place(name),): value for name, value in constants.items()},
            {(place(name),): [["tt.divisibility", 16]] for name in tensors},
        )
        options = {name: value for name, value in self.kwargs.items() if name.islower()}
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(cubin: bytes, path: Path) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread."""
    import triton

    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", text).groups())


@pytest.mark.parametrize("name, tokens, residents", [("flash", 1, (1, 2)), ("v3", 8, (2, 2)), ("flash", 64, (2, 2))])
def test_the_chain_compiles_for_hopper(monkeypatch, tmp_path, name, tokens, residents):
    """As many programs fit on an SM as planned, nothing spills, and wgmma multiplies."""
    chain, shapes = bench_modules()
    if not chain.OVERLAP:
        pytest.skip("TRITON_INTERPRET is set, and interpreted kernels cannot be compiled")
    shape = shapes.SHAPES[name]
    kernels = {each: Recorder(getattr(chain, each)) for each in ("gate_up_kernel", "down_kernel", "combine_kernel")}
    for each, recorder in kernels.items():
        monkeypatch.setattr(chain, each, recorder)
    layer = chain.Chain(shape, meta_weights(shape), 8192)
    layer.tokens = tokens
    layer.launch(torch.empty(tokens, shape.hidden, dtype=torch.bfloat16, device="meta"))
    gate_up, down, combine = kernels.values()
    touched = min(tokens * shape.topk, shape.experts_per_rank)
    assert gate_up.grid == (shape.intermediate // 128, touched) and down.grid == (shape.hidden // 128, touched)
    for recorder, resident in zip((gate_up, down), residents, strict=True):
        kernel = recorder.compiled()
        registers, stack = resources(kernel.asm["cubin"], tmp_path / "kernel.cubin")
        assert recorder.kwargs["num_stages"] >= 3 and "wgmma.mma_async" in kernel.asm["ptx"]
        assert (kernel.metadata.shared + chain.RESERVED_BYTES) * resident <= chain.SHARED_BYTES
        assert registers * 32 * chain.NUM_WARPS * resident <= 65536 and stack == 0
    assert "griddepcontrol.wait" in combine.compiled().asm["ptx"]


def test_the_chain_says_what_it_does_not_run():
    chain, shapes = bench_modules()
    import peers

    two = SimpleNamespace(size=2)
    with pytest.raises(peers.Unsupported, match="one rank, and there are 2"):
        chain.Peer(shapes.SHAPES["flash"], two, None, 64)
    with pytest.raises(peers.Unsupported, match="hidden 192.*multiples of 128"):
        chain.Peer(shapes.Shape("odd", 192, 128, 2, 4), SimpleNamespace(size=1), None, 64)


def test_the_chain_captures_once_for_each_count_and_result(monkeypatch):
    """A replay writes to the y that was captured."""
    chain, shapes = bench_modules()
    shape, log = shapes.Shape("tiny", 128, 128, 2, 4), []
    monkeypatch.setattr(chain.Peer, "launch", lambda peer, y: log.append("launch"))

    def captured(body):
        body()
        return SimpleNamespace(replay=lambda: log.append("replay"))

    monkeypatch.setattr(chain, "captured", captured)
    weights = testing.random_weights(shape.problem(1, 64))
    peer = chain.Peer(shape, SimpleNamespace(size=1), weights, 64)
    ys = [torch.empty(64, 128, dtype=torch.bfloat16) for _ in range(2)]
    for tokens, y, launches in ((3, ys[0], 2), (3, ys[0], 0), (3, ys[1], 2), (4, ys[1], 2), (3, ys[0], 0)):
        ids, scales = torch.zeros(tokens, 2, dtype=torch.int32), torch.ones(tokens, 1)
        log.clear()
        peer.stage(reference.Staged(torch.zeros(tokens, 128).to(chain.E4M3), scales, ids, torch.ones(tokens, 2)))
        peer.call(y)
        assert log == ["launch"] * launches + ["replay"]
    assert peer.max_tokens == 64 and chain.Peer(shape, SimpleNamespace(size=1), weights, 300).max_tokens == 256
    peer.close()


if __name__ == "__main__":
    main()
