"""SymmBuffer: the memory that all ranks of a layer share, its kernels and its launch plans."""

import bisect
import struct
import warnings
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..config import Problem
from ..errors import DeepMoeError
from ..trace import Trace, TraceArray
from .arguments import checked_device, checked_num_sms, checked_switch, collective_of
from .backend import Backend, EmulatorBackend, GpuBackend
from .collective import together
from .digest import compare, digest_of
from .local_group import LocalRank, current_rank
from .providers import Provider, make_provider

_DTYPES = {
    "u8": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "u32": torch.int32,
    "u64": torch.int64,
    "f32": torch.float32,
}


class SymmBuffer:
    """The symmetric buffer of a layer shape: created once, collectively, and used by every layer with that shape.

    Compiles and loads all kernel variants, allocates, compares the problem with the other ranks and connects their
    memory. Of fixed size: `problem.buffer_bytes(ranks)`.

    Args:
        group: a `torch.distributed` process group, a rank of a `LocalGroup`, or None for one rank.
        problem: equal on all ranks.
        device: the rank's device. Default: that of the LocalGroup, else the current GPU, else the CPU (emulator).
        num_sms: the most SMs (thread blocks) that a launch uses. Default: all of the device; of a LocalGroup rank, its
            share of the device.

    Attributes:
        problem, device, num_sms; rank, num_ranks: this rank, and how many there are.
        check_ids: whether `stage` checks expert ids (DEEP_MOE_CHECK=1).
        x, x_sf, topk_idx, topk_weights, num_tokens: views of the staged inputs; an engine may write them itself.

    Raises:
        TypeError, ValueError: an argument is wrong.
        MismatchError: ranks disagree; raised on all of them.
        DeviceError: no GPU, not an SM90, or GPUs that do not reach each other.
        JitError: a kernel does not compile.
    """

    def __init__(self, group: Any, problem: Problem, device: Any = None, num_sms: int | None = None) -> None:
        self._destroyed = True  # until it is complete
        self.plans: dict[tuple, Any] = {}  # by the weights' keys and the bound class
        self._collective = collective = collective_of(group)
        self.rank, self.num_ranks = collective.rank(), collective.size()

        def describe() -> dict[str, Any]:
            if not isinstance(problem, Problem):
                raise TypeError(f"problem is a {type(problem).__name__}; it must be a deep_moe.Problem")
            self.problem = problem
            self.device = checked_device(group, self.num_ranks, device)
            self.num_sms = checked_num_sms(group, self.device, num_sms)
            self._configs = problem.configs(self.num_ranks)
            self.check_ids = checked_switch("DEEP_MOE_CHECK")
            return digest_of(problem, self._configs, self.device.type)

        compare(collective, together(collective, "describe its symmetric buffer", describe))
        self._bounds = problem.bound_classes(self.num_ranks)
        self._backend, self._provider = together(collective, "create its symmetric buffer", lambda: self._create(group))
        self._peers = self._provider.exchange(collective)
        self._staged_tokens: int | None = None  # rows of the last `stage`; None: the engine writes the views
        self._fields = {name: rest for name, *rest in _C.buffer_fields(self._configs[0])}
        self.address_range = (self._peers[self.rank], self._peers[self.rank] + _C.buffer_bytes(self._configs[0]))
        self._local_rank = group if isinstance(group, LocalRank) else None
        self._initialise()
        self._backend.bind(self._peers[self.rank])
        collective.barrier()
        self._destroyed = False

    def _create(self, group: Any) -> tuple[Backend, Provider]:
        """The local, slow part: compile, load, allocate."""
        configs, local = self._configs, isinstance(group, LocalRank)
        if self.device.type == "cpu":
            world = group.group.world if local else _C.emu.World(1)
            backend = EmulatorBackend(world, configs, self.num_sms, self.rank)
        else:
            world = None
            backend = GpuBackend(self.device, configs, self.num_sms, group.group.id if local else 0, self.rank)
        self._trace = TraceArray(configs, self.device, backend.max_sms())
        num_bytes = _C.buffer_bytes(configs[0])
        return backend, make_provider(group, self.rank, self.num_ranks, self.device, world, num_bytes)

    def _initialise(self) -> None:
        """Zeros, no experts, and the words that say what this memory is."""
        config = self._configs[0]
        words = {
            "magic": _C.kBufferMagic,
            "num_ranks": config.num_ranks,
            "layout_hash": _C.buffer_layout_hash(config),
        }
        self._provider.memory.zero_()
        header = bytearray(self._fields["header"][3])
        for name, offset, size in _C.header_fields():
            struct.pack_into({4: "<I", 8: "<Q"}[size], header, offset, words.get(name, 0))
        self.field("header").view(-1).copy_(torch.frombuffer(header, dtype=torch.uint8))
        self.field("topk_idx").fill_(-1)
        self._backend.synchronize()

    def field(self, name: str) -> Tensor:
        """A view of one field of this rank's memory, by its name in include/deep_moe/layout/buffer.h.

        Three dimensions, trailing ones where the field needs fewer; u32 appears as int32 and u64 as int64.
        """
        if self._provider is None:
            raise ValueError("this SymmBuffer was destroyed; create a new one")
        if name not in self._fields:
            raise ValueError(f"field is {name!r}; it must be one of {', '.join(self._fields)}")
        dtype, shape, offset, num_bytes = self._fields[name]
        return self._provider.memory[offset : offset + num_bytes].view(_DTYPES[dtype]).view(shape)

    @property
    def x(self) -> Tensor:
        """e4m3 [max_tokens, H]: staged activations. With MXFP4 weights not in the order of channels: of every 64 the
        eights 0, 4, 1, 5, 2, 6, 3, 7 follow each other (include/deep_moe/layout/weights.h)."""
        return self.field("x").squeeze(2)

    @property
    def x_sf(self) -> Tensor:
        """fp32 [max_tokens, ceil(H/128)]: scale of each token's 128-channel groups."""
        return self.field("x_sf").squeeze(2)

    @property
    def topk_idx(self) -> Tensor:
        """int32 [max_tokens, K]: expert ids; -1 (or anything outside [0, E)) means no expert."""
        return self.field("topk_idx").squeeze(2)

    @property
    def topk_weights(self) -> Tensor:
        """fp32 [max_tokens, K]."""
        return self.field("topk_weights").squeeze(2)

    @property
    def num_tokens(self) -> Tensor:
        """int32 scalar: how many tokens the next launch takes.

        `stage` writes it. An engine that writes the views itself writes it too; asking for it tells the buffer that the
        rows of y need not be those of the last `stage`.
        """
        self._staged_tokens = None
        return self._header_word("num_tokens")

    def _header_word(self, name: str) -> Tensor:
        """int32 scalar: a word of this rank's header."""
        begin, end = next((offset, offset + size) for field, offset, size in _C.header_fields() if field == name)
        return self.field("header").view(-1)[begin:end].view(torch.int32).view(())

    def variant_of(self, num_tokens_bound: int | None) -> int:
        """Index of the bound class, as in `problem.bound_classes`. None: the last."""
        if num_tokens_bound is None:
            return len(self._bounds) - 1
        if type(num_tokens_bound) is not int or not 0 <= num_tokens_bound <= self._bounds[-1]:
            raise ValueError(
                f"num_tokens_bound is {num_tokens_bound!r}; it must be an integer from 0 to max_tokens_per_rank "
                f"({self._bounds[-1]}), and in the same class of {self._bounds} on all ranks"
            )
        return bisect.bisect_left(self._bounds, num_tokens_bound)

    def make_plan(self, l1: Any, l2: Any, variant: int) -> Any:
        """A launch plan for these weights (checked by the caller) and bound class; kept for the life of the buffer."""
        clamp, alpha = self.problem.activation_clamp, self.problem.activation_alpha
        arguments = _C.MegaArguments(
            config=self._configs[variant],
            rank=self.rank,
            peers=self._peers,
            l1_weights=l1.weight.data_ptr(),
            l1_scales=l1.scales.data_ptr(),
            l2_weights=l2.weight.data_ptr(),
            l2_scales=l2.scales.data_ptr(),
            host_status=self._backend.host_status,
            timeout_ns=self._backend.timeout_ns,
            activation_clamp=float("inf") if clamp is None else clamp,
            activation_alpha=0.0 if alpha is None else alpha,
            l1_biases=0 if l1.bias is None else l1.bias.data_ptr(),
            l2_biases=0 if l2.bias is None else l2.bias.data_ptr(),
            trace=self._trace.address,
            trace_bytes=self._trace.num_bytes,
        )
        plan = self.plans[l1.key, l2.key, variant] = self._backend.mega_plan(variant, arguments)
        return plan

    @property
    def staged_tokens(self) -> int | None:
        """Rows of the last `stage`; None before it, and for an engine that writes the views itself."""
        return self._staged_tokens

    def launch_stage(self, call: "_C.StageCall", tokens: int) -> None:
        """Launches `stage` (arguments checked by the caller)."""
        self._backend.stage(call)
        self._staged_tokens = tokens

    def launch_mega(self, plan: Any, y: int, y_stride: int, y_rows: int, recv_stats: int) -> None:
        """Launches a plan (arguments checked by the caller)."""
        backend = self._backend
        backend.check()
        self._check_rank()
        plan.run(backend.stream(), y, y_stride, y_rows, recv_stats)

    def clear_trace(self) -> None:
        """Forgets what was traced; asynchronous on the current stream. No launch may be in flight."""
        self._trace.clear()

    def trace(self) -> Trace:
        """What every warp role of every SM did in the last launch of this rank; waits for its end.

        Raises:
            ValueError: the problem does not override trace_events, or nothing was launched since `clear_trace`.
        """
        recv_counts = self.field("recv_counts").squeeze(2)
        self._backend.synchronize()
        return self._trace.read(self.rank, recv_counts)

    def check_usable(self) -> None:
        """ValueError when it was destroyed; PeerTimeout or MismatchError when an earlier launch gave up."""
        if self._destroyed:
            raise ValueError("this SymmBuffer was destroyed; create a new one")
        self._check_rank()
        self._backend.check()

    def _check_rank(self) -> None:
        """ValueError in the thread of another rank of the same LocalGroup."""
        here = current_rank.get()
        if here is not self._local_rank and here is not None and self._local_rank is not None:
            if here.group is self._local_rank.group:
                raise ValueError(
                    f"this SymmBuffer belongs to rank {self.rank}, but this is the thread of rank {here.rank()}; "
                    "use the buffer that this rank created"
                )

    def destroy(self) -> None:
        """Frees the memory. Collective: every rank calls it. A second call does nothing.

        Raises PeerTimeout or MismatchError, after freeing, when a launch gave up and no call has said so yet.
        """
        if self._destroyed:
            return
        self._check_rank()
        self.plans.clear()
        self._backend.synchronize()
        error = self._unreported_error()
        self._collective.barrier()
        self._provider.close_imports()
        self._collective.barrier()
        self._destroyed = True  # not before: when another rank does not come, destroy() can be tried again
        self._provider.free()
        self._trace.free()
        self._provider = None
        if error is not None:
            raise error

    def _unreported_error(self) -> DeepMoeError | None:
        if self._backend.reported:
            return None
        try:
            self._backend.check()
        except DeepMoeError as error:
            return error
        return None

    def __del__(self) -> None:
        if getattr(self, "_destroyed", True):
            return
        warnings.warn("a SymmBuffer was not destroyed; call destroy() on all ranks", ResourceWarning, stacklevel=2)
        if self.num_ranks > 1:
            # Other ranks may still use this memory, and a finaliser must not meet them: leave it mapped.
            _abandoned.append(self._provider)


_abandoned: list[Provider] = []
