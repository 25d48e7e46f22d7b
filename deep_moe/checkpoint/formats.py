"""The checkpoint formats: names of expert tensors, and what their bytes mean.

Sources of the names and layouts:
    deepseek-fp8: README_WEIGHTS.md and inference/fp8_cast_bf16.py of https://github.com/deepseek-ai/DeepSeek-V3. The
        scales multiply, in spite of "_inv".
    deepseek-v4: load_weights and _make_deepseek_v4_weights_mapper in vLLM's models/deepseek_v4.py. Experts are MXFP4,
        or under the same names FP8 (`expert_dtype` "fp8", as in the -Base models) with e8m0 scales of 128x128 blocks.
    compressed-tensors-mxfp4: compressors/mxfp4 and pack_fp4_to_uint8 in compressors/nvfp4/helpers.py of
        https://github.com/vllm-project/compressed-tensors. Kimi K3 names its experts
        language_model.model.layers.L.block_sparse_moe.experts.E.{w1,w2,w3}, others ....mlp.experts.E.gate_proj.
    gpt-oss-mxfp4: Mxfp4GptOssExperts and convert_moe_packed_tensors in transformers' integrations/mxfp4.py; gate and up
        in turns by _apply_gate in its models/gpt_oss.
In all MXFP4 formats the low nibble is the even column, and a scale byte e means 2^(e - 127).
"""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Encoding:
    """What weights and scales are, once their bytes are in memory.

    weight_dtypes, scale_dtypes: by what a file may call them, what the bytes are.
    block: rows and columns of a matrix that share a scale. per_byte: columns in a byte.
    wanted_scales: the dtype that scales are converted to, by value; None leaves them.
    """

    mma_type: str
    weight_dtypes: Mapping[str, torch.dtype]
    scale_dtypes: Mapping[str, torch.dtype]
    block: tuple[int, int]
    per_byte: int = 1
    wanted_scales: torch.dtype | None = None

    def weight_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns // self.per_byte

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.block[0]), -(-columns // self.block[1])


E8M0 = torch.float8_e8m0fnu
FP8_BLOCKS = Encoding(
    "fp8xfp8",
    {"F8_E4M3": torch.float8_e4m3fn},
    {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": E8M0, "U8": E8M0},
    block=(128, 128),
    wanted_scales=torch.float32,
)
MXFP4 = Encoding(
    "fp8xmxfp4",
    {"U8": torch.uint8, "I8": torch.uint8},
    {"U8": torch.uint8, "F8_E8M0": E8M0, "F32": torch.float32},
    block=(1, 32),
    per_byte=2,
)
BIAS_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}

# By role, the spellings of a projection's name.
SEPARATE = ({"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}, {"gate": "w1", "up": "w3", "down": "w2"})
STACKED = ({"gate_up": "gate_up_proj", "down": "down_proj"},)


@dataclass(frozen=True)
class Format:
    """Suffixes of the tensors of an expert's projection, and the encodings that they may have.

    stacked: one tensor [num_experts, ...] holds all experts, with gate and up rows in turns and weights in groups of 16
    bytes; else each expert has its own.
    """

    name: str
    weight: str
    scales: str
    encodings: tuple[Encoding, ...]
    stacked: bool = False
    bias: str = ""

    @property
    def projections(self) -> tuple[dict[str, str], ...]:
        return STACKED if self.stacked else SEPARATE

    def __str__(self) -> str:
        first = next(iter(self.projections[0].values()))
        stem = first if self.stacked else f"E.{first}"
        return f"{self.name} ({stem}{self.weight} and {stem}{self.scales})"


FORMATS = (
    Format("deepseek-fp8", ".weight", ".weight_scale_inv", (FP8_BLOCKS,)),
    Format("deepseek-v4", ".weight", ".scale", (MXFP4, FP8_BLOCKS)),
    Format("compressed-tensors-mxfp4", ".weight_packed", ".weight_scale", (MXFP4,)),
    Format("gpt-oss-mxfp4", "_blocks", "_scales", (MXFP4,), stacked=True, bias="_bias"),
)

_SPELLINGS = sorted({name for roles in (*SEPARATE, *STACKED) for name in roles.values()})
_EXPERT_TENSOR = re.compile(  # stem, layer, expert or None, projection, suffix
    r"((?:.*?\.)?layers\.(\d+)\.(?:.*?\.)?experts\.)(?:(\d+)\.)?" + rf"({'|'.join(_SPELLINGS)})((?:[._].*)?)"
)


@dataclass(frozen=True)
class ExpertNames:
    """The tensor names of a layer's experts.

    num_experts: None where they are stacked, so that only the tensors' shapes tell.
    """

    stem: str
    format: Format
    projections: Mapping[str, str]
    num_experts: int | None

    def tensor(self, role: str, suffix: str, expert: int = 0) -> str:
        """The name of one tensor; expert counts where they are not stacked."""
        number = "" if self.num_experts is None else f"{expert}."
        return f"{self.stem}{number}{self.projections[role]}{suffix}"

    def missing(self, listed: Container[str]) -> str | None:
        """The first tensor that the layer needs and that is not `listed`, if any; biases may be absent."""
        for expert in range(self.num_experts or 1):
            for role in self.projections:
                for suffix in (self.format.weight, self.format.scales):
                    name = self.tensor(role, suffix, expert)
                    if name not in listed:
                        return name
        return None


@dataclass
class _Group:
    """What the names with one stem have in common."""

    layer: int
    example: str
    experts: set[int] = field(default_factory=set)
    spellings: set[str] = field(default_factory=set)
    suffixes: set[str] = field(default_factory=set)

    def format(self) -> Format | None:
        """None where it is none of FORMATS, as with weights that are not quantised."""
        for candidate in FORMATS:
            if {candidate.weight, candidate.scales} <= self.suffixes and candidate.stacked != bool(self.experts):
                return candidate
        return None

    def names(self, stem: str, kind: Format) -> ExpertNames:
        projections = max(kind.projections, key=lambda roles: len(self.spellings & {*roles.values()}))
        return ExpertNames(stem, kind, projections, max(self.experts) + 1 if self.experts else None)


def find_layers(names: Iterable[str], prefix: str) -> dict[int, ExpertNames]:
    """The layers whose experts have one of FORMATS, by number.

    Args:
        names: of all tensors of the checkpoint.
        prefix: what the names of interest begin with.

    Raises:
        ValueError: none is known, formats are mixed, or two parts of the model have a layer of the same number.
    """
    groups = _group(name for name in names if name.startswith(prefix))
    known = {stem: kind for stem, group in groups.items() if (kind := group.format())}
    if not known:
        examples = ", ".join(group.example for group in groups.values()) or "no tensors of experts"
        raise ValueError(
            f"no layer has experts of a known format. Looked for {prefix}...layers.L....experts. with one of: "
            f"{'; '.join(map(str, FORMATS))}. Found {examples[:300]}"
        )
    first, layers = next(iter(known)), {}
    for stem, kind in known.items():
        if kind is not known[first]:
            raise ValueError(
                f"formats are mixed: {stem} has {kind}, {first} has {known[first]}; name the part of the model that is "
                "wanted with prefix=, or convert one of them"
            )
        other = layers.setdefault(groups[stem].layer, groups[stem].names(stem, kind))
        if other.stem != stem:
            raise ValueError(
                f"layer {groups[stem].layer} has experts under {other.stem} and under {stem}: name the part of the "
                "model that is wanted with prefix="
            )
    return dict(sorted(layers.items()))


def _group(names: Iterable[str]) -> dict[str, _Group]:
    """By stem: what stands before the number of an expert, or before a projection."""
    groups: dict[str, _Group] = {}
    for name in names:
        match = _EXPERT_TENSOR.fullmatch(name) if "experts." in name else None
        if match is None:
            continue
        stem, layer, expert, projection, suffix = match.groups()
        group = groups.get(stem)
        if group is None:
            group = groups[stem] = _Group(int(layer), name)
        if expert is not None:
            group.experts.add(int(expert))
        group.spellings.add(projection)
        group.suffixes.add(suffix)
    return groups
