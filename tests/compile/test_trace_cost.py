"""Tracing costs nothing where it is off: the machine code is that of a kernel that never had a hook."""

import re
import struct
from dataclasses import replace

import pytest

import deep_moe
from deep_moe import trace
from deep_moe.jit.compilers import compiler_for
from deep_moe.jit.paths import include_dir
from deep_moe.jit.render import KernelRequest
from deep_moe.jit.report import parse_ptxas
from deep_moe.jit.source import HeaderTree, Source

ARCH = "sm_90a"
TRACER = "deep_moe/pipe/trace.h"


def configs(trace_events: int) -> list:
    problem = deep_moe.Problem(
        num_experts=256, num_topk=6, hidden=4096, intermediate=2048, max_tokens_per_rank=8192,
        overrides={"trace_events": trace_events},
    )  # fmt: skip
    return problem.configs(8)


def source_of(config) -> Source:
    entry = KernelRequest(config, "mega", ARCH).render()
    return HeaderTree(include_dir()).source("kernel.cu", entry, emulator=False)


def without_hooks(source: Source) -> Source:
    """The headers without any line that traces, as they were before there was a trace."""
    headers = {}
    for name, text in source.headers.items():
        text = re.sub(r"^.*\btrace\.(lap|stall|finish)\(.*\n", "", text, flags=re.M)
        text = re.sub(r"^.*\bTracer<kConfig> trace;\n", "", text, flags=re.M).replace(", trace(p) {}", " {}")
        headers[name] = text.replace(f'#include "{TRACER}"\n', "")
    assert sum(text != source.headers[name] for name, text in headers.items()) >= 8
    del headers[TRACER]
    assert not any(re.search(r"Tracer|\btrace\.(?!h\b)", text) for text in headers.values())
    return replace(source, headers=headers)


def machine_code(cubin: bytes) -> bytes:
    """The kernel's section of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    count, names_at = struct.unpack_from("<HH", cubin, 0x3C)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    names = sections[names_at][4]
    for name, _, _, _, offset, size in sections:
        start = names + name
        if cubin[start : cubin.index(b"\0", start)] == b".text.mega_moe":
            return cubin[offset : offset + size]
    raise AssertionError("no code")


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_off_is_free(variant):
    source = source_of(configs(0)[variant])
    compiler = compiler_for(ARCH)
    off, stripped = (machine_code(compiler.compile(each, ARCH).binary) for each in (source, without_hooks(source)))
    assert len(off) > 10000 and off == stripped


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_on_compiles(variant):
    """With WGMMAs that still overlap, and a little spilling: a traced launch is somewhat slower."""
    binary, log = compiler_for(ARCH).compile(source_of(configs(trace.EVENTS)[variant]), ARCH)
    report = parse_ptxas(log)
    assert report["warnings"] == [] and report["registers"] <= 168 and report["spill_stores"] <= 256
    assert machine_code(binary) != machine_code(compiler_for(ARCH).compile(source_of(configs(0)[variant]), ARCH).binary)
