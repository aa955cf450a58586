"""Checks that model and dataset fit each other, by the model's skeleton and the dataset's manifest.

`checks.check_model` runs the list `CHECKS`, cheap ones first. Each takes a `Case` and may raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hypha_ray.config import Job
from hypha_ray.data.manifest import Manifest
from hypha_ray.driver.datasets.data_source import DataSource
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.checks.loss_check import reads
from hypha_ray.model.checks.positions import require_positions
from hypha_ray.model.execution import check_execution
from hypha_ray.model.layout import layout_of
from hypha_ray.model.loading.build import Facts
from hypha_ray.model.loading.hub import base_of, fetch
from hypha_ray.model.lora import has_adapter
from hypha_ray.model.tasks.task import IGNORE_INDEX, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_READ_BYTES = 1 << 30
_COUNTS_OBJECTS = ("instance-segmentation", "universal-segmentation")
"""Tasks whose loss is a mean over the objects in a batch, of which each sample has some."""
_TRANSCRIBED = ("ctc", "tdt")
"""Tasks whose labels are tokens, and whose scores are samples."""


@dataclass(frozen=True, slots=True)
class Case:
    """Job, dataset, and model on torch's meta device, whose tensors have shapes and no values."""

    job: Job
    source: DataSource
    network: PreTrainedModel
    task: Task
    facts: Facts

    @property
    def manifest(self) -> Manifest:
        """Manifest of the dataset."""
        return self.source.manifest

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of a sample of each of the dataset's tensors."""
        return self.manifest.shapes


def check_cut(case: Case) -> None:
    """Refuse more fragments than the model can be cut into."""
    layout_of(case.network, case.job.sync.fragments, case.job.sync.partition)


def check_settings(case: Case) -> None:
    """Refuse an attention or a saving of memory that the model doesn't know; trainers outside of Ray have their own."""
    if not all(group.bridged for group in case.job.worker_groups):
        check_execution(case.network, case.job.worker)


def check_rounding(case: Case) -> None:
    """Refuse random rounding of weights that aren't of 16 bits, of which none is lost."""
    trained = [parameter for parameter in case.network.parameters() if parameter.requires_grad]
    found = sorted({str(one.dtype).removeprefix("torch.") for one in trained})
    if not case.job.inner_optimizer.stochastic_rounding or "bfloat16" in found:
        return
    what = "inner_optimizer.stochastic_rounding: trained weights are of another dtype"
    fix = "leave it out"
    if not has_adapter(case.job.model):  # Adapters are of float32 in any case.
        fix = 'set dtype = "bfloat16" in [model.config], or leave it out'
    raise ConfigError("OPT008", what, ", ".join(found), "bfloat16", fix)


def check_scaled_loss(case: Case) -> None:
    """Refuse scaled losses of weights of 16 bits, whose gradients overflow or vanish all the same."""
    trained = [parameter for parameter in case.network.parameters() if parameter.requires_grad]
    others = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained} - {"float32"})
    if case.job.worker.autocast == "fp16" and others:
        what = 'worker.autocast = "fp16" trains weights of 32 bits'
        fix = "leave model.config.dtype out, or autocast"
        raise ConfigError("CFG011", what, ", ".join(others), "float32", fix)


def check_processes(case: Case) -> None:
    """Refuse models whose gradient is no sum over parts of a batch, if workers have several processes."""
    job = case.job
    name = type(case.network).__name__
    if all(job.processes_in(group) == 1 for group in job.worker_groups):
        return
    norms = [name for name, module in case.network.named_modules() if isinstance(module, _BatchNorm)]
    if not norms and case.task.name not in _COUNTS_OBJECTS:
        return
    what = f"{name} normalises by statistics of a batch ({norms[0]})" if norms else f"the loss of {name} counts objects"
    fix = "have more workers of one process each: worker.processes = 1"
    raise ConfigError("MODEL021", f"{what}, and the processes of a worker see only parts of it", fix=fix)


def check_best(case: Case) -> None:
    """Refuse to keep the best snapshot of a run that has no evaluations, or to end it by them."""
    compared = {"checkpoint.best": case.job.checkpoint.best, "rounds.patience": case.job.rounds.patience}
    for name in (name for name, given in compared.items() if given and not case.manifest.of("validation")):
        what = f"{name} needs evaluations, and dataset {case.manifest.name!r} has no validation split"
        raise DataError("DATA051", what, fix=f"prepare it with one, or leave {name} out")


def check_ranges(case: Case) -> None:
    """Refuse token ids and labels beyond the model's vocabulary and classes.

    A negative label is allowed only if the loss ignores it, so negative labels are read from the slices.
    """
    text = case.network.config.get_text_config()
    classes = case.facts.num_labels
    measured = getattr(case.network.config, "problem_type", None) in ("regression", "multi_label_classification")
    limit = None if measured or (classes == 1 and case.task.labels == "samples") else classes
    if case.task.name == "multiple-choice":
        limit, *_ = case.shapes.get("input_ids", (None,))
    elif case.task.name in _TRANSCRIBED or (
        case.task.labels in ("shifted", "masked", "positions") and not case.task.classifies
    ):
        limit = case.facts.vocab_size
    case.manifest.require(case.facts.vocab_size, limit)
    limits = {
        "decoder_input_ids": case.facts.vocab_size,
        "token_type_ids": getattr(text, "type_vocab_size", None),
        "class_labels": case.network.config.num_labels,
    }
    for tensor in case.manifest.tensors:
        least = tensor.minimum or 0
        largest = tensor.maximum or 0
        most = limits.get(tensor.name)
        if most and not 0 <= least <= largest < most:
            raise _beyond(case, tensor.name, f"{least} … {largest}", most)
        if tensor.name == "labels" and limit is not None and least < 0:
            _check_low_labels(case, limit)


def _check_low_labels(case: Case, limit: int) -> None:
    """Read labels and refuse negative ones that are scored; only the first part of a large dataset is read."""
    read_bytes = 0
    for info in case.manifest.slices:
        if read_bytes > _READ_BYTES:
            return
        try:
            slice_ = case.source.read(info)
        except DataError:
            if case.job.dataset.allow_quarantine:
                continue
            raise
        labels = np.asarray(slice_["labels"], np.int64)
        wrong = labels[(labels < 0) & (labels != IGNORE_INDEX)]
        if wrong.size:
            raise _beyond(case, "labels", str(int(wrong.min())), limit)
        read_bytes += sum(array.nbytes for array in slice_.values())


def _beyond(case: Case, name: str, got: str, limit: int) -> DataError:
    what = f"{name} of dataset {case.manifest.name!r} are out of the model's range"
    fix = "prepare the dataset for this model, or choose another model"
    also = f", or {IGNORE_INDEX} where nothing is to be scored" if name == "labels" else ""
    return DataError("DATA023", what, got, f"0 … {limit - 1}{also}", fix)


def check_positions(case: Case) -> None:
    """Refuse sequences that are longer than the model has positions for."""
    require_positions(case.network, case.task, case.shapes, case.manifest.name)


def check_special_tokens(case: Case) -> None:
    """Refuse a model that needs a special token which its configuration lacks.

    A decoder that classifies looks for the last token before padding; a translation begins with a start token.
    """
    config = case.network.config
    texts = case.network.config.get_text_config()
    pads = case.task.name == "sequence-classification" and case.job.rounds.max_batch_size > 1
    starts = config.is_encoder_decoder and "labels" in case.shapes and "decoder_input_ids" not in case.shapes
    if pads and getattr(texts, "pad_token_id", None) is None and reads(case.network, "pad_token_id"):
        raise _lacks(case, "pad_token_id", "the token that short texts are padded with")
    start = "decoder_start_token_id"
    if starts and getattr(config, start, None) is None and reads(case.network, start):
        raise _lacks(case, start, "for T5 the same as pad_token_id")


def _lacks(case: Case, key: str, hint: str) -> ConfigError:
    what = f"{type(case.network).__name__} needs {key} for {case.task.name}, and its configuration has none"
    return ConfigError("MODEL018", what, fix=f"set {key} in [model.config]: {hint}")


def check_channels(case: Case) -> None:
    """Refuse images with another number of channels than the model's."""
    channels, *_ = case.shapes.get("images", (case.facts.channels,))
    if case.facts.channels not in (None, channels):
        what = f"the images of dataset {case.manifest.name!r} don't fit the model"
        fix = "set num_channels in model.config, or prepare the images for this model"
        raise DataError("DATA025", what, f"{channels} channels", f"{case.facts.channels}", fix)


def check_image_size(case: Case) -> None:
    """Refuse images of a size that the model refuses on the meta device, where nothing is computed.

    The loss check covers models of images and texts, because it feeds both.
    """
    shape = case.shapes.get("images")
    beside = {"input_ids"} & {keyword for _, keyword in case.task.tensors}
    if shape is None or len(shape) != 3 or case.task.modality != "image" or beside:
        return
    try:
        case.network.eval()(pixel_values=torch.empty(1, *shape, device="meta"))
    except ValueError as error:
        what = f"the images of dataset {case.manifest.name!r} don't fit the model"
        fix = "set image_size in model.config, or prepare the images for this model"
        raise DataError("DATA025", what, " ".join(str(error).split()), fix=fix) from None
    except Exception:  # A failure for lack of values tells nothing about sizes.
        return


def compare_tokens(case: Case) -> list[str]:
    """Compare the dataset's tokens with those that the model's repository was saved with.

    Returns:
        A note if they differ: a job may give a model a new vocabulary, though few mean to.

    """
    model, _ = base_of(case.job.model)
    if not (repository := model.repository):
        return []
    token = model.token.get_secret_value() if model.token else None
    if case.source.has_tokens_of(fetch(repository, model.revision, token)):
        return []
    what = f"the numbers in dataset {case.manifest.name!r} are other tokens than those of {repository}"
    return [f"{what}: unless it is to learn a new vocabulary, prepare the dataset with --tokenizer {repository}"]


Check: TypeAlias = Callable[[Case], None]

CHECKS: Final[tuple[Check, ...]] = (
    check_cut,
    check_settings,
    check_rounding,
    check_scaled_loss,
    check_processes,
    check_best,
    check_special_tokens,
    check_positions,
    check_channels,
    check_image_size,
    check_ranges,
)
"""All checks of a model and its dataset, in order."""
