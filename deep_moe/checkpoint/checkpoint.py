"""Checkpoint: a folder of safetensors files."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    from safetensors import SafetensorError, safe_open
except ImportError as error:
    raise ImportError(
        "deep_moe.checkpoint needs the safetensors package: pip install 'deep_moe[checkpoint]'"
    ) from error

from .config import expected_experts, is_integer
from .formats import ExpertNames, find_layers
from .plan import Source, Stack, num_experts, plan_layer
from .shards import ExpertShards, allocate, shards_in

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """The routed experts of a checkpoint: `model.safetensors.index.json` and its files, or one `model.safetensors`.

    Opening it reads names only. Each file is opened once, when it is first needed, so a rank needs only the files with
    its own experts, and reads only their pages. Tensors of shared experts, attention and the like are left alone. As
    files are mapped, to truncate one while its experts are read ends the process.

    Args:
        directory: the folder.
        prefix: look only at tensors whose names begin with it, such as "model."; needed where two parts of a model,
            such as a draft model, have experts in layers of the same number.
        num_experts: of each layer, which is refused if it has more or fewer. None: what config.json in the folder says
            (n_routed_experts, num_local_experts or num_experts, there or in its text_config). Where it says nothing, or
            several things, the highest expert that is listed tells, and if that one is missing nobody notices.

    Attributes:
        directory: Path.
        format: "deepseek-fp8", "deepseek-v4", "compressed-tensors-mxfp4" or "gpt-oss-mxfp4", found from the tensors'
            names; `deep_moe.checkpoint.formats` has them with their sources.
        moe_layers: numbers of the layers with experts of this format, ascending.

    Raises:
        TypeError: prefix. FileNotFoundError: no checkpoint in this folder. ValueError: num_experts; its index or
            config.json cannot be read, its format is not known, or formats are mixed.
    """

    def __init__(self, directory: str | PathLike[str], prefix: str = "", num_experts: int | None = None) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix is a {type(prefix).__name__}; it must be a string, empty for all tensors")
        self.directory = Path(directory)
        self._expected = expected_experts(self.directory, num_experts)
        self._files: dict[str, safe_open] = {}
        self._file_of = self._read_index()
        self._layers = find_layers(self._file_of, prefix)
        self.moe_layers = tuple(self._layers)
        self.format = self._layers[self.moe_layers[0]].format.name

    def num_experts(self, layer: int) -> int:
        """Experts of a layer, of all ranks together.

        Raises:
            ValueError: the layer has no experts, misses tensors, or has another number of experts than expected.
                FileNotFoundError: the file of gpt-oss's stacked experts, which alone tells their number, is missing.
        """
        total = num_experts(self._names(layer), self._find)
        if self._expected and total != self._expected.number:
            raise ValueError(
                f"layer {layer} has {total} experts, but {self._expected}: are all files of one model? If they are "
                f"right, pass num_experts={total}"
            )
        return total

    def experts(
        self,
        layer: int,
        rank: int = 0,
        num_ranks: int = 1,
        device: str | torch.device = "cpu",
        out: ExpertShards | None = None,
    ) -> ExpertShards:
        """The experts of a rank: those from rank * E / num_ranks on, E / num_ranks of them. Nothing else is read.

        Args:
            layer: one of `moe_layers`.
            rank, num_ranks: of the group that shares the layer.
            device: where the result lies. Other devices than the CPU need, for a moment, host memory for the largest of
                its tensors.
            out: the result of an earlier call for a layer of the same sizes, whose memory is reused: it then holds this
                layer. Biases that it has not are put into new memory.

        Raises:
            TypeError: out. ValueError: layer, rank, num_ranks, device or out; a tensor is missing or has a wrong dtype
                or shape; the number of experts is not the expected one; a file is truncated. FileNotFoundError: a file
                is missing. All of it before data are read.
        """
        names, place = self._names(layer), _device(device)
        owned = _owned(self.num_experts(layer), rank, num_ranks)
        todo = plan_layer(names, self._find, self._file_of, owned)
        storage = allocate(todo, place, out)
        with ThreadPoolExecutor() as pool:  # copies wait for page faults; one thread leaves memory and disks idle
            for name, stack in todo.stacks.items():
                _fill(storage[name], stack, pool)
        return shards_in(storage, todo.encoding.mma_type)

    def close(self) -> None:
        """Closes the files; results stay. A later call opens what it needs again."""
        self._files.clear()  # which hold their mappings

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.directory)!r}, {self.format}, {len(self.moe_layers)} MoE layers)"

    def _names(self, layer: int) -> ExpertNames:
        """Of a layer, of which every tensor is listed: ranks notice alike what is missing, whoever owns it."""
        if not is_integer(layer) or layer not in self._layers:
            raise ValueError(f"layer is {layer!r}; the layers with {self.format} experts are {list(self.moe_layers)}")
        names, expected = self._layers[layer], self._expected
        if expected and names.num_experts is not None:  # beyond the highest that is listed, more may be missing
            names = replace(names, num_experts=max(names.num_experts, expected.number))
        absent = names.missing(self._file_of)
        if absent:
            raise ValueError(
                f"{absent} is missing: {self.directory} lists no such tensor{f', but {expected}' if expected else ''}; "
                "the checkpoint is incomplete, download it again"
            )
        return names

    def _read_index(self) -> dict[str, str]:
        """The file of each tensor."""
        index = self.directory / INDEX
        if index.is_file():
            try:
                file_of = json.loads(index.read_bytes())["weight_map"]
                return {str(name): str(file) for name, file in file_of.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{index} has no readable weight_map ({error!r}): download it again") from error
        if (self.directory / SINGLE).is_file():
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        raise FileNotFoundError(
            f"{self.directory} holds no checkpoint: there is neither {INDEX} nor {SINGLE} in it; directory must be the "
            "folder with the safetensors files"
        )

    def _file(self, name: str) -> safe_open:
        if name not in self._files:
            path = self.directory / name
            if path.is_dir():
                raise ValueError(
                    f"{path} is a directory; it must be a safetensors file: move it away and download the file"
                )
            try:
                self._files[name] = safe_open(path, framework="pt")
            except FileNotFoundError:  # `_find` knows which tensor it is wanted for
                raise
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} cannot be read ({error}): if it is truncated or a Git LFS pointer, download it again"
                ) from error
        return self._files[name]

    def _find(self, name: str) -> Source:
        """A tensor that is listed."""
        file = self._file_of[name]
        try:
            return Source(name, file, self._file(file).get_slice(name))
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.directory / file} is missing; {INDEX} says that {name} is in it: download it"
            ) from error
        except SafetensorError as error:
            raise ValueError(
                f"{name} is not in {self.directory / file}, where {INDEX} says that it is: the files are of different "
                "checkpoints; download them again"
            ) from error


def _owned(total: int, rank: int, num_ranks: int) -> range:
    """Numbers of the rank's experts."""
    _check_range("num_ranks", num_ranks, 1, total)
    _check_range("rank", rank, 0, num_ranks - 1)
    if total % num_ranks:
        raise ValueError(
            f"num_ranks is {num_ranks}, but the layer has {total} experts, which is no multiple of it: the ranks could "
            "not share them equally"
        )
    local = total // num_ranks
    return range(rank * local, (rank + 1) * local)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not is_integer(value) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; it must be an integer from {low} to {high}")


def _device(device: str | torch.device) -> torch.device:
    """With its number, as tensors have it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:  # torch's, as the kind of device has it
        reason = str(error).partition("\n")[0].partition(". ")[0][:250]  # it can be pages
        raise ValueError(
            f"device is {device!r}, which torch cannot use ({reason}): pass one of this machine, such as 'cpu' or "
            "'cuda:0'"
        ) from error


def _fill(target: Tensor, stack: Stack, pool: ThreadPoolExecutor) -> None:
    """Reads a stack into its memory; for a GPU by way of pinned memory, so that threads share the reading there too."""
    on_host = target.device.type == "cpu"
    host = target if on_host else torch.empty(target.shape, dtype=target.dtype, pin_memory=target.is_cuda)
    for _ in pool.map(Source.copy_to, stack.sources, host, repeat(stack.stored)):  # which raises what a thread raised
        pass
    if not on_host:
        target.copy_(host)
