"""SymmBuffer and LocalGroup: creation, views, meeting and parting of ranks. On the emulator."""

import gc
import threading
import warnings

import pytest
import torch
from geometries import GEOMETRIES

import deep_moe
from deep_moe import _C
from deep_moe.buffer.backend import timeout_ns
from deep_moe.buffer.status import abort_error
from deep_moe.buffer.symm_buffer import _abandoned

SMALL = GEOMETRIES["small"].problem()


@pytest.fixture
def group():
    return deep_moe.LocalGroup(2, "cpu")


def create(group, problem=SMALL, **options):
    return group.run(lambda rank: deep_moe.SymmBuffer(rank, problem, **options))


def destroy(group, buffers):
    group.run(lambda rank: buffers[rank.rank()].destroy())


# SymmBuffer


def test_a_new_buffer(group):
    buffers = create(group)
    config = SMALL.configs(2)[0]
    for rank, buffer in enumerate(buffers):
        assert (buffer.rank, buffer.num_ranks, buffer.problem) == (rank, 2, SMALL)
        assert (buffer.topk_idx == -1).all()
        words = {
            name: int.from_bytes(bytes(buffer.field("header").view(-1)[offset : offset + size].tolist()), "little")
            for name, offset, size in _C.header_fields()
        }
        expected = dict(magic=_C.kBufferMagic, num_ranks=2, layout_hash=_C.buffer_layout_hash(config))
        assert words == {name: expected.get(name, 0) for name in words}
        for name, *_ in _C.buffer_fields(config):
            if name not in ("header", "topk_idx"):
                assert not buffer.field(name).view(-1).view(torch.uint8).any(), name
    destroy(group, buffers)


def test_views(group):
    buffers = create(group)
    buffer = buffers[1]
    tokens, hidden = SMALL.max_tokens_per_rank, SMALL.hidden
    assert (buffer.x.shape, buffer.x.dtype) == ((tokens, hidden), torch.float8_e4m3fn)
    assert (buffer.x_sf.shape, buffer.x_sf.dtype) == ((tokens, 1), torch.float32)
    assert (buffer.topk_idx.shape, buffer.topk_idx.dtype) == ((tokens, 1), torch.int32)
    assert (buffer.topk_weights.shape, buffer.topk_weights.dtype) == ((tokens, 1), torch.float32)
    assert (buffer.num_tokens.shape, buffer.num_tokens.dtype) == ((), torch.int32)
    buffer.topk_idx[3, 0] = 7
    assert buffer.field("topk_idx")[3, 0, 0] == 7
    with pytest.raises(ValueError, match="field is 'y'; it must be one of header, count_flags"):
        buffer.field("y")
    destroy(group, buffers)


def test_size_is_known_before_allocating(group):
    buffers = create(group)
    assert buffers[0]._provider.memory.nbytes == SMALL.buffer_bytes(2)
    destroy(group, buffers)


def test_one_rank_needs_no_group():
    problem = GEOMETRIES["main-1"].problem()
    buffer = deep_moe.SymmBuffer(None, problem, device="cpu")
    assert (buffer.rank, buffer.num_ranks) == (0, 1)
    buffer.destroy()


def test_engine_writes_the_views_itself(worlds):
    """Without `stage`: the staged bytes, the count, and then a y with room for more."""
    world = worlds("small")
    inputs = world.inputs([5, 3], seed=4)
    expected = world.call(inputs)

    def write_views(rank):
        buffer, given = rank.buffer, inputs[rank.group.rank()]
        staged, n = given.staged(SMALL.num_experts), given.num_tokens
        buffer.x.view(torch.uint8)[:n] = staged.x.view(torch.uint8)
        buffer.x_sf[:n], buffer.topk_idx[:n], buffer.topk_weights[:n] = (
            staged.x_sf,
            staged.topk_idx,
            staged.topk_weights,
        )
        buffer.num_tokens.fill_(n)
        y = deep_moe.testing.poison(torch.empty(n + 2, SMALL.hidden, dtype=torch.bfloat16))
        rank.mega(y)
        return y

    for rank, y in enumerate(world.run(write_views)):
        n = inputs[rank].num_tokens
        assert torch.equal(y[:n], expected[rank].y)
        assert y[n:].isnan().all()


def test_plans_are_kept(worlds):
    world = worlds("small")
    inputs = world.inputs([2, 2])
    world.call(inputs, bound=8)
    plans = [dict(rank.buffer.plans) for rank in world.ranks]
    world.call(inputs, bound=8)
    for rank, before in zip(world.ranks, plans, strict=True):
        assert all(rank.buffer.plans[key] is plan for key, plan in before.items())
        assert len(rank.buffer.plans) == len(before)


# Ranks that disagree or fail


@pytest.mark.parametrize(
    "name, value",
    [
        *(("max_tokens_per_rank", 100), ("num_experts", 4), ("hidden", 256), ("activation", "swigluoai")),
        *(("activation_clamp", 10.0), ("bias", True)),
    ],
)
def test_ranks_with_different_problems_all_raise_the_same(group, name, value):
    other = deep_moe.Problem(**{**SMALL.facts(), name: value})
    errors = []

    def attempt(rank):
        try:
            deep_moe.SymmBuffer(rank, other if rank.rank() else SMALL)
        except deep_moe.MismatchError as error:
            errors.append(str(error))

    group.run(attempt)
    assert len(errors) == 2 and errors[0] == errors[1]
    assert f"{name} is {getattr(SMALL, name)!r} on rank 0 but {value!r} on rank 1" in errors[0]
    assert "create it with the same problem" in errors[0]


def test_ranks_with_different_alphas_all_raise_the_same(group):
    """The number of one rank is the default of the activation: the message still tells it."""
    oai = {**SMALL.facts(), "activation": "swigluoai"}
    problems = [deep_moe.Problem(**{**oai, "activation_alpha": alpha}) for alpha in (None, 1.0)]

    def attempt(rank):
        with pytest.raises(deep_moe.MismatchError, match="activation_alpha is 1.702 on rank 0 but 1.0 on rank 1"):
            deep_moe.SymmBuffer(rank, problems[rank.rank()])

    group.run(attempt)


def test_a_different_version_is_named(group, monkeypatch):
    from deep_moe.buffer import symm_buffer

    honest = symm_buffer.digest_of

    def digest(*args):
        found = honest(*args)
        return {**found, "deep_moe version": "0.0.9"} if threading.current_thread().name == "rank 1" else found

    monkeypatch.setattr(symm_buffer, "digest_of", digest)
    with pytest.raises(deep_moe.MismatchError, match="deep_moe version is .* on rank 0 but '0.0.9' on rank 1"):
        create(group)


def test_a_rank_that_cannot_create_its_part_fails_all(group):
    errors = [None, None]

    def attempt(rank):
        try:
            deep_moe.SymmBuffer(rank, SMALL, num_sms=0 if rank.rank() else None)
        except Exception as error:
            errors[rank.rank()] = error

    group.run(attempt)
    assert isinstance(errors[1], ValueError) and "num_sms is 0" in str(errors[1])
    assert isinstance(errors[0], deep_moe.DeepMoeError)
    assert "rank 1 could not describe its symmetric buffer: ValueError: num_sms is 0" in str(errors[0])


def test_a_rank_without_memory_fails_all(group, monkeypatch):
    from deep_moe.buffer import symm_buffer

    honest = symm_buffer.make_provider

    def provider(group, rank, *rest):
        if rank == 1:
            raise MemoryError("no memory")
        return honest(group, rank, *rest)

    monkeypatch.setattr(symm_buffer, "make_provider", provider)
    with pytest.raises((MemoryError, deep_moe.DeepMoeError), match="no memory"):
        create(group)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: deep_moe.SymmBuffer("world", SMALL), TypeError, ["group is a str", "LocalGroup", "None"]),
        (lambda: deep_moe.SymmBuffer(None, dict()), TypeError, ["problem is a dict", "deep_moe.Problem"]),
        (lambda: deep_moe.SymmBuffer(None, SMALL, device="nowhere"), ValueError, ["device is 'nowhere'"]),
        (lambda: deep_moe.SymmBuffer(None, SMALL, device="meta"), ValueError, ["device is meta", "emulator"]),
        (lambda: deep_moe.SymmBuffer(None, SMALL, device="cpu", num_sms="2"), ValueError, ["num_sms is '2'"]),
        (lambda: deep_moe.LocalGroup(0, "cpu"), ValueError, ["num_ranks is 0", "1 to 72"]),
        (lambda: deep_moe.LocalGroup(2, "tpu"), ValueError, ["device is 'tpu'", '"cpu"']),
        (lambda: deep_moe.LocalGroup(2, []), ValueError, ["device is []"]),
        (lambda: deep_moe.LocalGroup(2, ["cpu", "cuda"]), ValueError, ["device is ['cpu', 'cuda']"]),
    ],
)
def test_wrong_arguments_are_named(make, error, words):
    with pytest.raises(error) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_experts_that_ranks_cannot_share():
    group = deep_moe.LocalGroup(3, "cpu")
    with pytest.raises(ValueError, match="num_experts is 2, which 3 ranks cannot share equally"):
        create(group)


def test_cpu_over_several_processes_is_refused(group):
    class ProcessGroupOfTwo:
        def rank(self):
            return 0

        def size(self):
            return 2

    from deep_moe.buffer.arguments import checked_device

    with pytest.raises(ValueError, match=r'LocalGroup\(2, "cpu"\)'):
        checked_device(ProcessGroupOfTwo(), 2, "cpu")


@pytest.mark.skipif(_C.driver.missing() is None, reason="there is a CUDA driver")
def test_without_a_driver_a_gpu_call_says_what_is_missing():
    for make in (lambda: deep_moe.LocalGroup(2, "cuda"), lambda: deep_moe.SymmBuffer(None, SMALL, device="cuda:0")):
        with pytest.raises(deep_moe.DeviceError, match="no CUDA driver.*install an NVIDIA driver"):
            make()


def test_timeout_variable(monkeypatch):
    monkeypatch.setenv("DEEP_MOE_TIMEOUT", "2.5")
    assert timeout_ns() == 2_500_000_000
    monkeypatch.setenv("DEEP_MOE_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="DEEP_MOE_TIMEOUT is 'soon'.*seconds"):
        timeout_ns()


# The end of a buffer


def test_destroy_twice_and_use_after_it(group):
    buffers = create(group)
    destroy(group, buffers)
    destroy(group, buffers)
    buffers[0].destroy()
    x, idx, weights = torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    with pytest.raises(ValueError, match="this SymmBuffer was destroyed; create a new one"):
        deep_moe.stage(buffers[0], x, idx, weights)
    with pytest.raises(ValueError, match="destroyed"):
        deep_moe.fp8_mega_moe(x, None, None, buffers[0])
    with pytest.raises(ValueError, match="destroyed"):
        _ = buffers[0].x


def test_destroy_in_any_order(group):
    first, second = create(group), create(group)

    def end(rank):
        own = [first[rank.rank()], second[rank.rank()]]
        for buffer in own:
            buffer.destroy()

    group.run(end)


def test_a_rank_that_does_not_destroy_leaves_no_hang(group):
    buffers = create(group)
    with pytest.raises(deep_moe.PeerTimeout, match="rank 0 waited for all ranks to meet, but rank 1 has returned"):
        group.run(lambda rank: buffers[0].destroy() if rank.rank() == 0 else None)


def test_finaliser_warns_and_frees_nothing_that_peers_may_use(group):
    buffers = create(group)
    gc.collect()  # what earlier tests left behind
    before = len(_abandoned)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffers.clear()
        gc.collect()
    assert sum("not destroyed" in str(w.message) for w in caught) == 2
    assert len(_abandoned) == before + 2


def test_a_rank_that_does_not_launch(worlds):
    """The others time out by name; then every call says so again, and destroy frees without saying it twice."""
    world = deep_moe.testing.World(SMALL, 2, "cpu", worlds.weights_of(SMALL, "zero-mean", 0))
    inputs = world.inputs([3, 3])
    with pytest.raises(deep_moe.PeerTimeout, match="rank 0 waited too long for the row counts of rank 1"):
        world.run(lambda rank: rank.call(inputs[0]) if rank.group.rank() == 0 else None)
    with pytest.raises(deep_moe.PeerTimeout, match="row counts of rank 1"):
        world.run(lambda rank: rank.call(inputs[rank.group.rank()]))
    world.close()


def test_destroy_reports_what_no_call_has_reported(worlds):
    world = deep_moe.testing.World(SMALL, 2, "cpu", worlds.weights_of(SMALL, "zero-mean", 0))
    inputs = world.inputs([3, 3])
    with pytest.raises(deep_moe.PeerTimeout):
        world.run(lambda rank: rank.call(inputs[0]) if rank.group.rank() == 0 else None)
    reports = []

    def end(rank):
        try:
            rank.buffer.destroy()
        except deep_moe.PeerTimeout as error:
            reports.append((rank.group.rank(), str(error)))

    world._group.run(lambda group: end(world.ranks[group.rank()]))
    assert [rank for rank, _ in reports] == [1] and "row counts of rank 1" in reports[0][1]


# Abort records


@pytest.mark.parametrize(
    "site, index, words",
    [
        (_C.WaitSite.CountFlag, 5, ["rank 3", "row counts of rank 5", "dispatch"]),
        (_C.WaitSite.DoneFlag, 6, ["rank 3", "outputs of rank 6", "combine"]),
        (_C.WaitSite.RowsArrived, 17, ["rank 3", "row block 17", "L1"]),
        (_C.WaitSite.L1Done, 4, ["rank 3", "row block 4", "L2"]),
        (_C.WaitSite.RingSlot, 9, ["rank 3", "ring slot", "9"]),
        (_C.WaitSite.RouteCounts, 0, ["rank 3", "its own blocks"]),
        (_C.WaitSite.Pipeline, 2, ["rank 3", "barrier 2", "defect"]),
    ],
)
def test_a_timeout_names_rank_phase_and_peer(site, index, words):
    error = abort_error(_C.abort_record(_C.AbortCode.Timeout, site, 3, index))
    assert type(error) is deep_moe.PeerTimeout
    for word in [*words, "destroy it on all ranks"]:
        assert word in str(error)


def test_a_bound_mismatch_names_both_ranks():
    error = abort_error(_C.abort_record(_C.AbortCode.BoundMismatch, _C.WaitSite.CountFlag, 1, 4))
    assert type(error) is deep_moe.MismatchError
    assert "on rank 4 than on rank 1" in str(error) and "num_tokens_bound" in str(error)


# LocalGroup


def test_run_returns_results_in_rank_order(group):
    four = deep_moe.LocalGroup(4, "cpu")
    assert four.run(lambda rank: (rank.rank(), rank.size())) == [(r, 4) for r in range(4)]
    assert four.run(lambda rank: rank.all_gather(rank.rank() * 10)) == [[0, 10, 20, 30]] * 4


def test_repeated_gathers_do_not_mix():
    four = deep_moe.LocalGroup(4, "cpu")

    def many(rank):
        return [rank.all_gather((step, rank.rank())) for step in range(200)]

    for result in four.run(many):
        assert result == [[(step, rank) for rank in range(4)] for step in range(200)]


def test_the_first_error_is_raised_after_all_ranks_ended():
    three = deep_moe.LocalGroup(3, "cpu")
    ended = []

    def body(rank):
        if rank.rank() == 1:
            raise KeyError("the cause")
        try:
            rank.barrier()
        finally:
            ended.append(rank.rank())

    with pytest.raises(KeyError, match="the cause"):
        three.run(body)
    assert sorted(ended) == [0, 2]
    assert three.run(lambda rank: rank.all_gather(1)) == [[1, 1, 1]] * 3  # and the group is still good


def test_waiting_for_a_rank_that_ended_names_it():
    three = deep_moe.LocalGroup(3, "cpu")
    errors = []

    def body(rank):
        if rank.rank() == 2:
            return
        try:
            rank.barrier()
        except deep_moe.PeerTimeout as error:
            errors.append(str(error))

    three.run(body)
    assert len(errors) == 2 and all("rank 2 has returned" in error for error in errors)


def test_meeting_outside_run_is_refused(group):
    with pytest.raises(deep_moe.PeerTimeout, match="rank 1 is not running: LocalGroup.run starts the ranks"):
        group.ranks[0].barrier()
    buffers = create(group)
    with pytest.raises(deep_moe.PeerTimeout, match="rank 1 has returned"):
        buffers[0].destroy()


def test_run_inside_run_is_refused(group):
    with pytest.raises(RuntimeError, match="running already"):
        group.run(lambda rank: group.run(lambda inner: None))


def test_emulator_options_reach_the_threads(group):
    with deep_moe.emulator.options(seed=11, num_sms=3):
        seen = group.run(lambda rank: deep_moe.emulator.current())
    assert [(options.seed, options.num_sms) for options in seen] == [(11, 3)] * 2
