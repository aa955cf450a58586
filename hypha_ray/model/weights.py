"""Comparison of a repository's weights with its model: only a new head may be missing, and nothing unknown.

transformers fills missing tensors with random numbers and drops unknown ones, with a warning at most. Names that begin
with `module.`, or a missing layer, would so train a random model. Both are errors here, before anything is loaded: the
headers of the files go through transformers' own loading on the meta device.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils.logging import disable_progress_bar

from hypha_ray.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
ADAPTER: Final = "adapter_config.json"

Stored: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of a repository's tensors by name."""

_BUFFER = re.compile(r"(^|\.)(masked_bias|position_ids|token_type_ids|inv_freq|num_batches_tracked)$")
"""Buffers that older files have, and that models compute today."""
_POOLER = re.compile(r"(^|\.)pooler\.")
"""Pooler between base model and head, which belongs to either of them by task."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class LoadingReport:
    """Result of loading weights into a model."""

    missing: frozenset[str]
    """Names of the model's tensors that the files lack."""
    unknown: frozenset[str]
    """Names of tensors in the files that the model lacks."""
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """Name, shape in the file and shape in the model of tensors whose shapes differ."""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> LoadingReport:
        """Make a report from the result of `from_pretrained(output_loading_info=True)`."""
        mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        for name, file_shape, model_shape in info["mismatched_keys"]:
            mismatched.append((name, tuple(file_shape), tuple(model_shape)))
        mismatched.sort()
        return cls(frozenset(info["missing_keys"]), frozenset(info["unexpected_keys"]), tuple(mismatched))


def meta_tensors(folder: Path, repository: str) -> dict[str, torch.Tensor]:
    """Return a folder's weights on the meta device; only headers of files are read.

    Raises:
        CheckpointError: a file is missing or damaged, or the folder has an adapter only.

    """
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder, repository):
        try:
            with safe_open(file, "pt") as content:
                for name in content.keys():  # noqa: SIM118  # safe_open is no dict.
                    part = content.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype(), torch.uint8)
                    tensors[name] = torch.empty(part.get_shape(), device="meta", dtype=dtype)
        except (OSError, SafetensorError) as error:
            problem = f"weights of {repository} can't be loaded"
            got = f"{file.name}: {error}"
            raise CheckpointError("MODEL006", problem, got, fix="copy the file afresh") from None
    return tensors


def tensor_shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def weight_files(folder: Path, repository: str) -> list[Path]:
    """Return the files that transformers reads.

    Raises:
        CheckpointError: a file is missing, or the folder has an adapter only.

    """
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    problem = f"weights of {repository} can't be loaded"
    fix = "copy the whole folder that save_pretrained() wrote"
    index = folder / INDEX
    if not index.is_file():
        refuse_adapter(folder, repository)
        present_names = sorted(file.name for file in folder.glob("*.safetensors"))
        got = _first_names(present_names) or "no *.safetensors"
        raise CheckpointError("MODEL006", problem, got, f"{WHOLE}, or {INDEX} and its files", fix)
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(content["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("MODEL006", problem, f"{INDEX}: {error!r}", fix="copy the file afresh") from None
    absent_names = [name for name in names if not (folder / name).is_file()]
    if absent_names or not names:
        got = f"{len(absent_names)} of {len(names)} files of {INDEX} aren't there: {_first_names(absent_names)}"
        raise CheckpointError("MODEL006", problem, got, fix=fix)
    return [folder / name for name in names]


def is_whole(folder: Path) -> bool:
    """Return whether a folder, such as a snapshot in the hub's cache, has all of its weights."""
    try:
        return bool(weight_files(folder, folder.name))
    except CheckpointError:
        return False


def refuse_adapter(folder: Path, repository: str) -> None:
    """Refuse a folder with an adapter and no model.

    Raises:
        CheckpointError: the folder has an adapter only.

    """
    has_model = (folder / WHOLE).is_file() or (folder / INDEX).is_file()
    has_adapter = (folder / ADAPTER).is_file() or (folder / "adapter_model.safetensors").is_file()
    if has_adapter and not has_model:
        raise CheckpointError(
            "MODEL006",
            f"{repository} holds an adapter without its model",
            "adapter_model.safetensors",
            WHOLE,
            "merge it into its base model (peft: merge_and_unload()), and give the folder where that is saved",
        )


def simulate_loading(network: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> LoadingReport:
    """Load meta tensors into a meta model with transformers' own code; the model can't be used afterwards."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    conversions = get_model_conversion_mapping(network)
    config = LoadStateDictConfig(device_map={"": "meta"}, dtype=torch.float32, weight_mapping=conversions)
    with quiet():
        info, _ = convert_and_load_state_dict_in_model(network, dict(tensors), config)
        network.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        network._adjust_missing_and_unexpected_keys(info)
    return LoadingReport.of(info.to_dict())


def require_fit(
    network: PreTrainedModel,
    loading_report: LoadingReport,
    shapes: Stored,
    repository: str,
    *,
    needs_all: bool,
    relabelled: bool = False,
) -> list[str]:
    """Refuse weights of a repository that aren't the model's; only the head may be new.

    Args:
        network: model; only its names are read.
        loading_report: result of loading its weights.
        shapes: shapes of the repository's tensors.
        repository: name for messages.
        needs_all: the head must be in the repository, too.
        relabelled: the job sets the labels, so that a head with others is replaced.

    Returns:
        Notes for the user about a new head and about a dropped one.

    Raises:
        CheckpointError: any other tensor is missing, unknown or of another shape.

    """
    architectures = getattr(network.config, "architectures", None) or ()
    other_architecture = bool(architectures) and type(network).__name__ not in architectures
    mismatched = {name for name, _, _ in loading_report.mismatched}
    missing = {name for name in loading_report.missing if not _BUFFER.search(name)} | mismatched
    new_head: set[str] = set()
    if not needs_all:
        may_be_new: set[str] = set()
        if relabelled:
            may_be_new = missing
        elif other_architecture or not architectures:
            may_be_new = missing - mismatched
        new_head = {name for name in may_be_new if is_of_head(network, name, missing)}
    if not (other_architecture or relabelled):
        new_head -= _damaged_head(network, new_head, missing)
    missing_body = missing - new_head
    dropped_names = {name for name in loading_report.unknown if not _is_buffer(name, shapes)}
    unknown_names = {name for name in dropped_names if _is_needed(network, name, other_architecture)}
    if missing_body:
        raise _misfit(repository, loading_report, missing_body, dropped_names)
    if unknown_names:
        raise _misfit(repository, loading_report, missing_body, unknown_names)
    notes = _note(repository, "lack the head, which begins with random numbers", new_head)
    notes += _note(repository, "are more than this model has; left out", dropped_names)
    return notes


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' own report of loading, a table on standard error; ours is an error or a note."""
    disable_progress_bar()
    with silenced("transformers.modeling_utils"):
        yield


@contextmanager
def silenced(logger: str) -> Iterator[None]:
    """Silence a logger of a library, whose reports are errors or notes of ours."""
    logging.getLogger(logger).addFilter(_says_nothing)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(_says_nothing)


def _says_nothing(_: logging.LogRecord) -> bool:
    return False


def _damaged_head(network: PreTrainedModel, head: set[str], missing: set[str]) -> set[str]:
    """Return a head's tensors whose module is partly in the files: the head is damaged, not new."""
    loaded_names = network.state_dict().keys() - missing
    loaded_modules = {_module(name) for name in loaded_names}
    return {name for name in head if _module(name) in loaded_modules}


def is_of_head(network: PreTrainedModel, name: str, missing: Set[str] = frozenset()) -> bool:
    """Return whether a tensor belongs to the head, not to the base model.

    If the base model has no prefix, a missing tensor is of the head if all tensors of its outermost module are missing.
    """
    if _POOLER.search(name):
        return True
    prefix = network.base_model_prefix
    if prefix and hasattr(network, prefix):
        return not name.startswith(f"{prefix}.")
    if _is_headless(network):
        return False
    for tensor in network.state_dict():
        if _outermost_module(tensor) == _outermost_module(name) and tensor not in missing:
            return False
    return True


def _is_needed(network: PreTrainedModel, name: str, other_architecture: bool) -> bool:
    """Return whether an unknown tensor belongs to the base model, or to a module of the model's head.

    Args:
        network: model.
        name: name of the tensor.
        other_architecture: the file's head is for another task.

    """
    if _POOLER.search(name):
        return False
    prefix = network.base_model_prefix
    outermost = _outermost_module(name)
    if prefix and outermost == prefix:
        return True
    base = network.base_model
    has_body = base is not network or _is_headless(network)
    if has_body and outermost in dict(base.named_children()):
        return True
    module = _module(name)
    return bool(module) and not other_architecture and module in dict(network.named_modules())


def _is_headless(network: PreTrainedModel) -> bool:
    """Return whether a model has no head, such as `BertModel`."""
    return type(network).__name__.endswith(("Model", "EncoderModel"))


def _is_buffer(name: str, shapes: Stored) -> bool:
    """Return whether a tensor is a buffer of older files, such as the causal mask `attn.bias`."""
    if _BUFFER.search(name):
        return True
    dimensions = len(shapes.get(name, ()))
    return name.endswith(".bias") and dimensions > 2


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _outermost_module(name: str) -> str:
    return name.partition(".")[0]


def _misfit(
    repository: str, loading_report: LoadingReport, missing_names: set[str], unknown_names: set[str]
) -> CheckpointError:
    mismatched: list[str] = []
    lacking_names = set(missing_names)
    for name, file_shape, model_shape in loading_report.mismatched:
        if name in missing_names:
            mismatched.append(f"{name} {list(file_shape)} for {list(model_shape)}")
            lacking_names.discard(name)
    kinds = {"missing": sorted(lacking_names), "unknown": sorted(unknown_names), "of another shape": mismatched}
    counts: list[str] = []
    for kind, names in kinds.items():
        if names:
            counts.append(f"{len(names)} {kind} ({_first_names(names)})")
    problem = f"weights of {repository} aren't those of its model"
    return CheckpointError("MODEL006", problem, "; ".join(counts), fix=_advice(missing_names, unknown_names))


def _advice(missing_names: set[str], unknown_names: set[str]) -> str:
    """Return advice: a prefix of all names, for example, comes from a wrapper that was saved."""
    for name in sorted(unknown_names):
        for missing_name in missing_names:
            if name.endswith(f".{missing_name}"):
                prefix = name.removesuffix(missing_name)
                return f"take the prefix {prefix!r} off all names, or save the model inside its wrapper instead"
    if unknown_names and not missing_names:
        return "mend config.json, which describes a smaller model than the file has"
    return "copy the whole folder that save_pretrained() wrote, with config.json and weights of one model"


def _note(repository: str, statement: str, names: set[str]) -> list[str]:
    """Return a note about tensors of a repository; none if there are no tensors."""
    if not names:
        return []
    examples = _first_names(sorted(names))
    return [f"weights of {repository} {statement} ({examples})"]


def _first_names(names: Sequence[str]) -> str:
    """Return the first few names and the number of further ones."""
    text = ", ".join(names[:_SHOWN])
    more_count = len(names) - _SHOWN
    return f"{text} and {more_count} more" if more_count > 0 else text
