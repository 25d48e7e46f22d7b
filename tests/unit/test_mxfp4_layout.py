"""MXFP4 weights in kernel layout: every bit where include/deep_moe/layout/weights.h says, and what a kernel decodes."""

import contextlib

import pytest
import torch
from mxfp4_cases import SUBNORMAL_LUTS, codes_of, decoded_parts, lookup_words, problem_of, random_mxfp4

import deep_moe
from deep_moe import _C, reference

SIZES = [(512, 256), (448, 224), (192, 96), (64, 32), (384, 128), (320, 160)]


def test_constants():
    assert (_C.kMxfp4CodeBytes, _C.kMxfp4PieceBytes, _C.kMxfp4Pieces) == (4096, 4352, 4)
    assert (_C.kMxfp4ExponentBias, _C.kMxfp4MaxExponent, _C.kMxfp4Group) == (8, 14, 32)


def test_every_bit_of_a_piece_is_used_once():
    """Magnitudes, signs and exponents of 256 x 256 weights fill four blocks' codes exactly."""
    bits = torch.zeros(2 * 4 * 4352 * 8, dtype=torch.int64)
    for row in range(256):
        for k in range(256):
            word, element = 8 * _C.mxfp4_word_of(2, row, k), _C.mxfp4_element_of(k)
            assert word % 32 == 0
            bits[word + 4 * element : word + 4 * element + 3] += 1
            bits[word + _C.mxfp4_sign_bit_of(element)] += 1
            if k % 32 == 0:
                byte = _C.mxfp4_exponent_byte_of(2, row, k)
                assert all(_C.mxfp4_exponent_byte_of(2, row, k + i) == byte for i in (1, 15, 31))
                bits[8 * byte : 8 * byte + 8] += 1
    assert (bits == 1).all()


def place_of(k):
    return _C.activation_byte_of(_C.MmaType.Fp8xMxfp4, k)


def test_activations_are_where_the_fragments_have_their_weights():
    """Every place once, K blocks of 64 apart, eight channels together; FP8 keeps the order of channels."""
    assert sorted(map(place_of, range(1024))) == list(range(1024))
    for k in range(1024):
        assert place_of(k) // 64 == k // 64 and place_of(k) == place_of(k // 8 * 8) + k % 8
        assert _C.activation_byte_of(_C.MmaType.Fp8xFp8, k) == k


def test_a_word_feeds_two_registers_of_the_fragment():
    """PTX ISA, wgmma m64nNk32: lane 4 g + q has rows g and g + 8 of its warp, k = 4 q and 16 + 4 q."""
    for row in range(64):
        for k in range(128):
            warp, v, g, place = row // 16, row % 16 // 8, row % 8, place_of(k)
            q, wgmma = place % 16 // 4, place // 32
            assert _C.mxfp4_word_of(1, row, k) == ((warp * 2 + v) * 32 + 4 * g + q) * 16 + wgmma * 4
            assert _C.mxfp4_element_of(k) == k % 4 + 4 * (place % 32 // 16)


def test_a_lane_needs_four_exponents():
    """Of its two rows and the two halves of a K block; they are one word."""
    for row in range(64):
        for k in range(128):
            warp, v, g, q = row // 16, row % 16 // 8, row % 8, place_of(k) % 16 // 4
            word = 4096 + ((warp * 8 + g) * 2 + q // 2) * 4
            assert _C.mxfp4_exponent_byte_of(1, row, k) == word + v * 2 + k // 64


def expected_l1_l2(problem, weights, base):
    """The transformed bytes [experts, bytes], weight by weight; `base`: exponent code of stored exponent 0.

    Also which exponent bytes belong to weights.
    """
    config, (h, i) = problem.configs(1)[0], (problem.hidden, problem.intermediate)
    memory = {"l1": _C.l1_weight_bytes(config), "l2": _C.l2_weight_bytes(config)}
    memory = {kind: torch.zeros(problem.num_experts, size, dtype=torch.int64) for kind, size in memory.items()}
    known = {kind: torch.zeros(bytes_.shape[1], dtype=torch.bool) for kind, bytes_ in memory.items()}
    matrices = (
        ("l1", weights.gate, [_C.l1_row_of(c, False) for c in range(i)], config.l1_k_blocks),
        ("l1", weights.up, [_C.l1_row_of(c, True) for c in range(i)], config.l1_k_blocks),
        ("l2", weights.down, [_C.l2_row_of(c) for c in range(h)], config.l2_k_blocks),
    )
    for kind, (packed, scales), rows, k_blocks in matrices:
        codes, columns = codes_of(packed), range(packed.shape[2] * 2)
        for row, at in enumerate(rows):
            words = torch.tensor([_C.mxfp4_word_of(k_blocks, at, k) for k in columns])
            elements = [_C.mxfp4_element_of(k) for k in columns]
            signs = torch.tensor([_C.mxfp4_sign_bit_of(element) for element in elements])
            for places, values in (
                (4 * torch.tensor(elements), codes[:, row].long() & 7),
                (signs, codes[:, row].long() >> 3),
            ):
                at_byte, in_byte = words + places // 8, places % 8
                memory[kind].index_add_(1, at_byte, values << in_byte)  # bits do not overlap, so a sum is an or
            stored = [_C.mxfp4_exponent_byte_of(k_blocks, at, k) for k in columns[::32]]
            memory[kind][:, stored] = scales[:, row].long() - base
            known[kind][stored] = True
    return [(memory[kind], known[kind]) for kind in ("l1", "l2")]


@pytest.mark.parametrize("storage", ["new", "reused"])
@pytest.mark.parametrize("hidden, intermediate", SIZES)
def test_every_weight_is_where_the_kernel_reads_it(hidden, intermediate, storage):
    """And padding is zeros, with exponents that send no kernel to its slow path, whatever was in the memory."""
    problem = problem_of(hidden, intermediate)
    weights = random_mxfp4(problem, (110, 121))
    for _, scales in (weights.gate, weights.up, weights.down):
        scales[:, :, 0::4] = 120  # in every block
    config, out = problem.configs(1)[0], None
    if storage == "reused":
        sizes = (_C.l1_weight_bytes(config), _C.l2_weight_bytes(config))
        out = [torch.full((2 * size,), 0xEE, dtype=torch.uint8) for size in sizes]
    result = deep_moe.transform_weights(problem, weights.gate_up, weights.down, out=out)
    base = 120 - _C.kMxfp4MaxExponent
    for part, (wanted, known) in zip(result, expected_l1_l2(problem, weights, base), strict=True):
        assert part.weight.dtype is torch.uint8 and part.weight.shape[3:] == (4, 4352)
        found = part.weight.flatten(1).long()
        exponents = torch.zeros(4352, dtype=torch.bool)
        exponents[4096:] = True
        padding = exponents.repeat(found.shape[1] // 4352) & ~known
        assert torch.equal(found[:, ~padding], wanted[:, ~padding])
        # The neutral one is the block's largest, or 2^0 in a block of padding.
        assert set(found[:, padding].unique().tolist()) <= {_C.kMxfp4ExponentBias, _C.kMxfp4MaxExponent}


@pytest.mark.parametrize("hidden, intermediate", SIZES)
def test_missing_blocks_have_scale_zero(hidden, intermediate):
    problem = problem_of(hidden, intermediate)
    weights = random_mxfp4(problem, (120, 121))
    l1, l2 = deep_moe.transform_weights(problem, weights.gate_up, weights.down)
    h_blocks, i_blocks = -(-hidden // 128), -(-intermediate // 128)
    wanted = torch.zeros(2, i_blocks, _C.scale_records(h_blocks), 2)
    wanted[:, :, :h_blocks] = 2.0 ** (120 - 127 - 6)
    assert torch.equal(l1.scales, wanted)
    wanted = torch.zeros(2, -(-h_blocks // 2), 2, _C.scale_records(i_blocks))
    wanted.flatten(1, 2)[:, :h_blocks, :i_blocks] = 2.0 ** (120 - 127 - 6)
    assert torch.equal(l2.scales, wanted.mT)


def test_lookup_tables_are_e4m3():
    """Of the kernel's decoder: all magnitudes at all exponents, by arithmetic where it holds, else by table."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for r in range(-8, 7):
        table = b"".join(word.tobytes() for word in lookup_words(torch.tensor([r]).numpy()))
        wanted = magnitudes * 2.0**r
        assert torch.equal(wanted.to(torch.float8_e4m3fn).float(), wanted)  # exact
        assert torch.equal(torch.frombuffer(bytearray(table), dtype=torch.float8_e4m3fn).float(), wanted), r
    assert min(SUBNORMAL_LUTS) == -_C.kMxfp4ExponentBias


@pytest.mark.parametrize("exponents", [(112, 124), (107, 122), (0, 20), (60, 200)], ids=lambda span: f"{span}")
@pytest.mark.parametrize("hidden, intermediate", [(448, 224), (192, 96)])
def test_what_a_kernel_decodes_is_dequantize(hidden, intermediate, exponents):
    """Lookups and signs of one lane after the other. The last spans are too wide, and their rounding is decoded too."""
    problem = problem_of(hidden, intermediate)
    weights = random_mxfp4(problem, exponents, seed=4)
    with pytest.warns(UserWarning) if exponents[1] - exponents[0] > 15 else contextlib.nullcontext():
        l1, l2 = deep_moe.transform_weights(problem, weights.gate_up, weights.down)
    gate_up, down = torch.cat(decoded_parts(problem, l1), 1), decoded_parts(problem, l2)[0]
    for part, decoded in ((l1, gate_up), (l2, down)):
        natural = part.dequantize()
        assert natural.dtype is torch.float32
        assert torch.equal(decoded.float(), natural) and torch.equal(decoded.signbit(), natural.signbit())
    encoded = [reference.dequantize_blocks(*reference.encode_mxfp4(*pair)) for pair in weights.gate_up]
    assert torch.equal(l1.dequantize(), torch.cat(encoded, 1))
    assert torch.equal(l2.dequantize(), reference.dequantize_blocks(*reference.encode_mxfp4(*weights.down)))
    if exponents == (112, 124):  # a span of 12: no table
        for part in (l1, l2):
            assert part.weight[..., 4096:].min() >= _C.kMxfp4ExponentBias - 5
