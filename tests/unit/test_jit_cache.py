"""The kernel cache: races, crashes, damage, roots. The compiler is a fake."""

import json
import os
import shutil
import threading
import time

import pytest
from jit_fakes import FakeCompiler, FakeConfig, get, in_processes, kill_when, write_tree

from deep_moe.errors import JitError
from deep_moe.jit import build, cache, paths, report


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The writable root of a fresh cache; its name has a space."""
    tree = write_tree(tmp_path / "include")
    monkeypatch.setattr(build, "include_dir", lambda: tree)
    monkeypatch.setattr(cache, "_private_root", None)
    monkeypatch.delenv("DEEP_MOE_JIT", raising=False)
    path = tmp_path / "kernel cache"
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(path))
    return path


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    fake = FakeCompiler(tmp_path / "journal")
    monkeypatch.setattr(build, "compiler_for", lambda arch: fake)
    return fake


def entries(root):
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def is_good(kernel) -> bool:
    return cache.load_entry(kernel.path.parent, kernel.name) is not None


def test_a_kernel_is_compiled_once_and_then_found(root, compiler):
    first, second = get(), get()
    assert first.compiled and not second.compiled
    assert first == second and first.read() == second.read()
    assert first.path == root / first.name / "kernel.cubin"
    assert (root / first.name / "source.cu").read_text().startswith('#include "deep_moe/kernels/sm90_fp8.cuh"')
    assert report(second) == {"registers": 168, "stack": 0, "spill_stores": 0, "spill_loads": 0, "warnings": []}
    assert compiler.runs() == 1


def test_several_kernels_keep_their_order_and_compile_once_each(root, compiler):
    compiler.seconds = 0.05
    seen = []
    requests = [(FakeConfig(hidden), "mega", "sm_90a") for hidden in (64, 128, 64, 192)]
    kernels = build.get_kernels(requests, num_threads=3, progress=lambda kernel: seen.append(kernel.key))
    assert [kernel.key for kernel in kernels] == [get(hidden).key for hidden in (64, 128, 64, 192)]
    assert compiler.runs() == 3 and sorted(seen) == sorted({kernel.key for kernel in kernels})


@pytest.mark.parametrize("locks", [True, False])
def test_eight_cold_processes_make_one_entry(root, compiler, monkeypatch, locks):
    compiler.seconds = 0.3
    if not locks:

        def no_locks(handle, seconds):
            raise OSError("no locks on this file system")

        monkeypatch.setattr(cache, "_flock_within", no_locks)
    kernels = in_processes(8, get)
    assert len({kernel.read() for kernel in kernels}) == 1
    assert entries(root) == [kernels[0].name] and is_good(kernels[0])
    assert compiler.runs() == 1 if locks else 1 <= compiler.runs() <= 8
    assert not list(root.glob(".tmp-*"))


def test_threads_share_the_work(root, compiler):
    compiler.seconds = 0.1
    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.runs() == 1


def test_killed_while_compiling(root, compiler):
    compiler.seconds = 60
    kill_when(lambda: compiler.runs() == 1, get)
    compiler.seconds = 0
    start = time.monotonic()
    assert is_good(get()) and compiler.runs() == 2
    assert time.monotonic() - start < 5, "the dead process's lock was waited for"


def test_killed_while_publishing(root, compiler, monkeypatch):
    def stuck(*_):
        time.sleep(60)

    with monkeypatch.context() as patch:
        patch.setattr(cache.Cache, "_rename", stuck)
        kill_when(lambda: list(root.glob(".tmp-*/meta.json")), get)
    (leftover,) = root.glob(".tmp-*")
    assert is_good(get()) and leftover.exists(), "a fresh temporary folder may belong to a live process"
    os.utime(leftover, (0, 0))
    assert is_good(get(hidden=64))
    assert not leftover.exists()


def test_a_stuck_lock_holder_delays_but_does_not_stop(root, compiler, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_WAIT_S", 0.2)
    name = get().name
    shutil.rmtree(root / name)
    with cache.Cache(root, []).lock(name):
        assert is_good(get())


@pytest.mark.parametrize("harm", ["truncated", "flipped bit", "empty meta", "no meta", "no binary", "other kernel"])
def test_damage_is_found_and_mended(root, compiler, harm):
    other, kernel = get(hidden=64), get()
    content, folder = kernel.read(), kernel.path.parent
    if harm == "truncated":
        kernel.path.write_bytes(content[:-1])
    elif harm == "flipped bit":
        kernel.path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif harm == "empty meta":
        (folder / "meta.json").write_text("")
    elif harm == "no meta":
        (folder / "meta.json").unlink()
    elif harm == "no binary":
        kernel.path.unlink()
    else:  # built for another layout, copied under this name
        shutil.rmtree(folder)
        shutil.copytree(other.path.parent, folder)
    with pytest.warns(UserWarning, match="damaged"):
        mended = get()
    assert mended.compiled and mended.read() == content and is_good(mended)
    assert len(list(root.glob(".damaged-*"))) == 1


def test_setting_aside_spares_an_entry_that_was_just_repaired(root, compiler):
    kernel = get()
    cache.Cache(root, [])._set_aside(kernel.name)
    assert is_good(kernel)


def test_the_loser_of_a_publishing_race_uses_the_winner(root, compiler):
    kernel = get()
    meta = {"name": kernel.name, "report": {}}
    entry = cache.Cache(root, []).publish(kernel.name, "kernel.cubin", b"late", "source", meta)
    assert entry.path.read_bytes() == kernel.read() and entry.meta == kernel.meta
    assert not list(root.glob(".tmp-*"))


def test_read_only_roots_are_searched_and_left_alone(root, compiler, tmp_path, monkeypatch):
    shipped = get()
    first = tmp_path / "first"
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", f"{first}:{tmp_path / 'absent'}:{root}")
    found = get()
    assert found.path == shipped.path and entries(first) == []
    assert get(hidden=64).path.is_relative_to(first)
    shipped.path.write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        mended = get()
    assert mended.path.is_relative_to(first) and shipped.path.read_bytes() == b""


def test_no_writable_root(root, compiler, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="DEEP_MOE_CACHE_DIR"):
        kernel = get()
    assert is_good(kernel) and get() == kernel and compiler.runs() == 1


def test_a_first_root_that_is_only_readable_still_serves(root, compiler, monkeypatch):
    kernel = get()
    monkeypatch.setattr(cache, "_is_writable", lambda path: False)
    assert get().path == kernel.path
    with pytest.warns(UserWarning, match="this process only"):
        assert not get(hidden=64).path.is_relative_to(root)


def test_a_full_disk_does_not_stop_a_call(root, compiler, monkeypatch):
    publish = cache.Cache.publish

    def full(self, *arguments):
        if self.writable == root:
            raise OSError(28, "No space left on device")
        return publish(self, *arguments)

    monkeypatch.setattr(cache.Cache, "publish", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert is_good(get())


def test_home_unset(root, compiler, monkeypatch):
    monkeypatch.delenv("DEEP_MOE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(paths, "PACKAGE", root / "site-packages" / "deep_moe")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(cache.default_cache_root()) == "/home/somebody/.cache/deep_moe"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no entry in the password database either
    assert cache.default_cache_root() is None
    with pytest.warns(UserWarning, match="DEEP_MOE_CACHE_DIR"):
        assert is_good(get())


def test_forbid_names_the_missing_key(root, compiler, monkeypatch):
    present = get()
    monkeypatch.setenv("DEEP_MOE_JIT", "forbid")
    assert get() == present
    with pytest.raises(JitError, match=r"mega-sm_90a-[0-9a-f]{32} is not in the cache .*warmup"):
        get(hidden=64)
    assert compiler.runs() == 1
    monkeypatch.setenv("DEEP_MOE_JIT", "no")
    with pytest.raises(ValueError, match="allowed: allow, forbid"):
        get(hidden=64)


def test_a_compile_error_publishes_nothing_and_is_raised(root, compiler, monkeypatch):
    def fail(source, arch):
        raise JitError("mega.cu(1): error: everything")

    monkeypatch.setattr(compiler, "compile", fail)
    with pytest.raises(JitError, match="error: everything"):
        build.get_kernels([(FakeConfig(64 * i), "mega", "sm_90a") for i in range(1, 5)])
    assert entries(root) == []


def test_meta_holds_what_a_reader_needs(root, compiler):
    kernel = get()
    meta = json.loads((kernel.path.parent / "meta.json").read_text())
    assert meta["name"] == kernel.name and meta["compiler"] == "fake 1.0" and meta["flags"] == ["-arch=sm_90a"]
    assert meta["size"] == len(kernel.read())
