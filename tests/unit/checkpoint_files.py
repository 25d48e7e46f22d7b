"""Small checkpoints of every format, with real names and layouts, and the tensors that are to come out of them."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from deep_moe.checkpoint import Checkpoint
from deep_moe.checkpoint.checkpoint import INDEX
from deep_moe.checkpoint.config import CONFIG

E, H, INTER = 8, 320, 192  # channels are no multiples of 128
LAYERS = (1, 11)  # layer 0 is dense; sorted as numbers and not as text
E8M0 = torch.float8_e8m0fnu
GPT_OSS = "model.layers.{}.mlp.experts."


def draw(seed, *shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@dataclass
class Written:
    """A checkpoint in a folder: an index and a file for each expert of each layer, or as `file_of` has it."""

    folder: Path
    tensors: dict[str, torch.Tensor]
    file_of: dict[str, str] = field(default_factory=dict)

    def save(self):
        self.folder.mkdir(exist_ok=True)
        self.file_of = {name: self.file_of.get(name, "model-rest.safetensors") for name in self.tensors}
        for file in set(self.file_of.values()):
            chosen = {name: tensor.clone() for name, tensor in self.tensors.items() if self.file_of[name] == file}
            save_file(chosen, self.folder / file, metadata={"format": "pt"})
        self.save_index()
        return self

    def save_index(self):
        index = {"metadata": {"total_size": 0}, "weight_map": self.file_of}
        (self.folder / INDEX).write_text(json.dumps(index))

    def save_config(self, config):
        (self.folder / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
        return self

    def without(self, *parts):
        """Saved again without the tensors whose names have one of these parts."""
        self.tensors = {
            name: tensor for name, tensor in self.tensors.items() if not any(part in name for part in parts)
        }
        return self.save()

    def open(self, **arguments):
        return Checkpoint(self.folder, **arguments)


def others(prefix):
    """Tensors that are no routed experts."""
    return {
        f"{prefix}embed_tokens.weight": torch.zeros(4, 8, dtype=torch.bfloat16),
        f"{prefix}layers.0.mlp.gate_proj.weight": torch.zeros(4, 8, dtype=torch.bfloat16),
        f"{prefix}layers.1.mlp.shared_experts.gate_proj.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn),
        f"{prefix}layers.1.mlp.shared_experts.gate_proj.weight_scale_inv": torch.ones(1, 1),
        f"{prefix}layers.1.mlp.gate.weight": torch.zeros(4, 8, dtype=torch.bfloat16),
    }


@dataclass(frozen=True)
class Kind:
    """A format whose experts have tensors of their own."""

    format: str
    stem: str
    projections: tuple[str, str, str]  # of gate, up, down
    suffixes: tuple[str, str]
    weight_dtype: torch.dtype
    scale_dtype: torch.dtype

    @property
    def is_fp8(self):
        return self.weight_dtype is torch.float8_e4m3fn

    def matrix(self, seed, rows, columns):
        """Weights and scales as they are in the file."""
        if self.is_fp8:
            weights, shape = draw(seed, rows, columns), (-(-rows // 128), -(-columns // 128))
        else:
            weights, shape = draw(seed, rows, columns // 2), (rows, columns // 32)
        codes = draw(seed + 1, *shape)
        if self.scale_dtype in (torch.float32, torch.bfloat16):
            return weights.view(self.weight_dtype), torch.exp2(codes.float() / 16 - 8).to(self.scale_dtype)
        return weights.view(self.weight_dtype), codes.view(self.scale_dtype)

    def write(self, folder, experts=E, layers=LAYERS):
        tensors, file_of = others(self.stem.partition("layers.")[0]), {}
        for layer in layers:
            for expert in range(experts):
                for turn, (name, (n, k)) in enumerate(
                    zip(self.projections, ((INTER, H), (INTER, H), (H, INTER)), strict=True)
                ):
                    stem = f"{self.stem.format(layer)}{expert}.{name}"
                    pair = self.matrix((layer * E + expert) * 8 + 2 * turn, n, k)
                    for suffix, tensor in zip(self.suffixes, pair, strict=True):
                        tensors[stem + suffix] = tensor
                        file_of[stem + suffix] = f"model-{layer}-{expert}.safetensors"
        return Written(folder, tensors, file_of).save()

    def wanted(self, tensors, layer, owned):
        """Six tensors: weights and scales of gate, up and down, as `transform_weights` takes them."""
        for name in self.projections:
            for suffix in self.suffixes:
                stack = torch.stack([tensors[f"{self.stem.format(layer)}{expert}.{name}{suffix}"] for expert in owned])
                if suffix == self.suffixes[0]:
                    yield stack if self.is_fp8 else stack.view(torch.uint8)
                else:
                    yield self.scales(stack)

    def scales(self, stack):
        if not self.is_fp8:
            return stack
        if stack.dtype in (torch.uint8, E8M0):  # 2^(e - 127), here without the dtype's own conversion
            exponent = stack.view(torch.uint8).double()
            return torch.exp2(exponent - 127).where(exponent < 255, torch.nan).float()
        return stack.float()


NAMED, NUMBERED = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
E4M3, U8 = torch.float8_e4m3fn, torch.uint8
V3 = Kind("deepseek-fp8", "model.layers.{}.mlp.experts.", NAMED, (".weight", ".weight_scale_inv"), E4M3, torch.float32)
V3_BF16 = Kind(V3.format, V3.stem, NAMED, V3.suffixes, E4M3, torch.bfloat16)
V4 = Kind("deepseek-v4", "layers.{}.ffn.experts.", NUMBERED, (".weight", ".scale"), torch.int8, E8M0)
V4_U8 = Kind(V4.format, "model." + V4.stem, NUMBERED, V4.suffixes, torch.int8, U8)
V4_F32 = Kind(V4.format, V4.stem, NUMBERED, V4.suffixes, torch.int8, torch.float32)
V4_FP8 = Kind(V4.format, V4.stem, NUMBERED, V4.suffixes, E4M3, E8M0)
V4_FP8_U8 = Kind(V4.format, V4.stem, NUMBERED, V4.suffixes, E4M3, U8)
PACKED = (".weight_packed", ".weight_scale")
CT = Kind("compressed-tensors-mxfp4", "model.layers.{}.mlp.experts.", NAMED, PACKED, U8, U8)
K3 = Kind(CT.format, "language_model.model.layers.{}.block_sparse_moe.experts.", NUMBERED, PACKED, U8, U8)
KINDS = dict(
    v3=V3, v3_bf16=V3_BF16, v4=V4, v4_u8=V4_U8, v4_f32=V4_F32, v4_fp8=V4_FP8, v4_fp8_u8=V4_FP8_U8, ct=CT, k3=K3
)


def write_gpt_oss(folder, bias=True):
    tensors, file_of = {"model.layers.1.mlp.router.weight": torch.zeros(E, H)}, {}
    for layer in LAYERS:
        for turn, (name, rows, columns) in enumerate((("gate_up_proj", 2 * INTER, H), ("down_proj", H, INTER))):
            stem, seed = GPT_OSS.format(layer) + name, layer * 16 + turn * 4
            parts = {
                "_blocks": draw(seed, E, rows, columns // 32, 16),
                "_scales": draw(seed + 1, E, rows, columns // 32),
                "_bias": draw(seed + 2, E, rows, 2).view(torch.bfloat16)[..., 0],
            }
            for suffix, tensor in parts.items():
                if bias or suffix != "_bias":
                    tensors[stem + suffix] = tensor
                    file_of[stem + suffix] = f"model-{layer}{suffix}.safetensors"  # not one file for a layer
    return Written(folder, tensors, file_of).save()
