"""Comparison of a repository's weights with its model: only a new head may be missing, and nothing unknown.

transformers fills missing tensors with random numbers and drops unknown ones, with a warning at most. Names that begin
with `module.`, or a missing layer, would so train a random model. Both are errors here, before anything is loaded: the
headers of the files go through transformers' own loading on the meta device.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Set
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
        wrong = sorted((name, tuple(found), tuple(wanted)) for name, found, wanted in info["mismatched_keys"])
        return cls(frozenset(info["missing_keys"]), frozenset(info["unexpected_keys"]), tuple(wrong))


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
            what = f"weights of {repository} can't be loaded"
            got = f"{file.name}: {error}"
            raise CheckpointError("MODEL006", what, got, fix="copy the file afresh") from None
    return tensors


def weight_files(folder: Path, repository: str) -> list[Path]:
    """Return the files that transformers reads.

    Raises:
        CheckpointError: a file is missing, or the folder has an adapter only.

    """
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    what = f"weights of {repository} can't be loaded"
    index = folder / INDEX
    there = sorted(file.name for file in folder.glob("*.safetensors"))
    if not index.is_file():
        refuse_adapter(folder, repository)
        got = _some(there) or "no *.safetensors"
        fix = "copy the whole folder that save_pretrained() wrote"
        raise CheckpointError("MODEL006", what, got, f"{WHOLE}, or {INDEX} and its files", fix)
    try:
        wanted = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("MODEL006", what, f"{INDEX}: {error!r}", fix="copy the file afresh") from None
    absent = [name for name in wanted if not (folder / name).is_file()]
    if absent or not wanted:
        got = f"{len(absent)} of {len(wanted)} files of {INDEX} aren't there: {_some(absent)}"
        raise CheckpointError("MODEL006", what, got, fix="copy the whole folder that save_pretrained() wrote")
    return [folder / name for name in wanted]


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
    whole = any((folder / name).is_file() for name in (WHOLE, INDEX))
    if not whole and ((folder / ADAPTER).is_file() or (folder / "adapter_model.safetensors").is_file()):
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
    loaded: LoadingReport,
    shapes: Stored,
    repository: str,
    *,
    whole: bool,
    relabelled: bool = False,
) -> list[str]:
    """Refuse weights of a repository that aren't the model's; only the head may be new.

    Args:
        network: model; only its names are read.
        loaded: result of loading its weights.
        shapes: shapes of the repository's tensors.
        repository: name for messages.
        whole: the head must be in the repository, too.
        relabelled: the job sets the labels, so that a head with others is replaced.

    Returns:
        Notes for the user about a new head and about a dropped one.

    Raises:
        CheckpointError: any other tensor is missing, unknown or of another shape.

    """
    saved = getattr(network.config, "architectures", None) or ()
    others = bool(saved) and type(network).__name__ not in saved
    wrong = {name for name, _, _ in loaded.mismatched}
    gone = {name for name in loaded.missing if not _BUFFER.search(name)} | wrong
    may_be_new = (gone - wrong if others or not saved else set()) | (gone if relabelled else set())
    head = set() if whole else {name for name in may_be_new if is_of_head(network, name, gone)}
    if not (others or relabelled):
        head -= _damaged_head(network, head, gone)
    dropped = {name for name in loaded.unknown if not _is_buffer(name, shapes)}
    needed = {name for name in dropped if _is_needed(network, name, others)}
    if gone - head or needed:
        raise _misfit(repository, loaded, gone - head, needed | (dropped if gone - head else set()))
    new_head = _note(repository, "lack the head, which begins with random numbers", head)
    return [*new_head, *_note(repository, "are more than this model has; left out", dropped)]


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


def _damaged_head(network: PreTrainedModel, head: set[str], gone: set[str]) -> set[str]:
    """Return a head's tensors whose module is partly in the files: the head is damaged, not new."""
    there = {_module(name) for name in network.state_dict().keys() - gone}
    return {name for name in head if _module(name) in there}


def is_of_head(network: PreTrainedModel, name: str, gone: Set[str] = frozenset()) -> bool:
    """Return whether a tensor belongs to the head, not to the base model."""
    if _POOLER.search(name):
        return True
    prefix = network.base_model_prefix
    if prefix and hasattr(network, prefix):
        return not name.startswith(f"{prefix}.")
    part = name.partition(".")[0]
    others = (other for other in network.state_dict() if other.partition(".")[0] == part)
    return not _is_headless(network) and set(others) <= gone


def _is_needed(network: PreTrainedModel, name: str, others: bool) -> bool:
    """Return whether an unknown tensor belongs to the base model, or to a module of the model's head.

    Args:
        network: model.
        name: name of the tensor.
        others: the file's head is for another task.

    """
    if _POOLER.search(name):
        return False
    prefix = network.base_model_prefix
    first = name.partition(".")[0]
    trunk = network.base_model
    parts = {child for child, _ in trunk.named_children()}
    if (prefix and first == prefix) or (first in parts and (trunk is not network or _is_headless(network))):
        return True
    return not others and _module(name) in {module for module, _ in network.named_modules() if module}


def _is_headless(network: PreTrainedModel) -> bool:
    """Return whether a model has no head, such as `BertModel`."""
    return type(network).__name__.endswith(("Model", "EncoderModel"))


def _is_buffer(name: str, shapes: Stored) -> bool:
    """Return whether a tensor is a buffer of older files, such as the causal mask `attn.bias`."""
    return bool(_BUFFER.search(name)) or (name.endswith(".bias") and len(shapes.get(name, ())) > 2)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _misfit(repository: str, loaded: LoadingReport, missing: set[str], unknown: set[str]) -> CheckpointError:
    shapes = {name: f"{name} {list(found)} for {list(wanted)}" for name, found, wanted in loaded.mismatched}
    kinds = {
        "missing": sorted(missing - shapes.keys()),
        "unknown": sorted(unknown),
        "of another shape": [text for name, text in shapes.items() if name in missing],
    }
    got = "; ".join(f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds.items() if names)
    return CheckpointError(
        "MODEL006", f"weights of {repository} aren't those of its model", got, fix=_advice(missing, unknown)
    )


def _advice(missing: set[str], unknown: set[str]) -> str:
    """Return advice: a prefix of all names, for example, comes from a wrapper that was saved."""
    for name in sorted(unknown):
        for wanted in missing:
            if name.endswith(f".{wanted}"):
                prefix = name.removesuffix(wanted)
                return f"take the prefix {prefix!r} off all names, or save the model inside its wrapper instead"
    if unknown and not missing:
        return "mend config.json, which describes a smaller model than the file has"
    return "copy the whole folder that save_pretrained() wrote, with config.json and weights of one model"


def _note(repository: str, what: str, names: set[str]) -> list[str]:
    return [f"weights of {repository} {what} ({_some(sorted(names))})"] if names else []


def _some(names: Iterable[str]) -> str:
    """Return the first few names and the number of further ones."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
