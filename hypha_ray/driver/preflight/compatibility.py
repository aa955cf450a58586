"""Checks that model and dataset fit each other, by the model's skeleton and the dataset's manifest.

`checks.check_case` runs the list `CHECKS`, cheap ones first. Each takes a `Case` and may raise.
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
from hypha_ray.driver.data_source import DataSource
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.build import Facts, task_of
from hypha_ray.model.checks import require_positions
from hypha_ray.model.execution import check_execution
from hypha_ray.model.layout import layout_of
from hypha_ray.model.lora import has_adapter
from hypha_ray.model.loss_check import reads
from hypha_ray.model.sources import base_of, fetch, hub_token
from hypha_ray.model.task import IGNORE_INDEX, Task

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from hypha_ray.model.lora import ActorCritic


_READ_BYTES = 1 << 30
_COUNTS_OBJECTS = ("instance-segmentation", "universal-segmentation")
"""Tasks whose loss is a mean over all objects in a batch; a sample may have several objects."""
_TRANSCRIBED = ("ctc", "tdt")
"""Tasks whose labels are tokens, but which count scored samples."""


@dataclass(frozen=True, slots=True)
class Case:
    """Job, dataset, and model on torch's meta device, whose tensors have shapes and no values."""

    job: Job
    source: DataSource
    network: PreTrainedModel
    task: Task
    facts: Facts
    with_critic: ActorCritic | None = None
    """The same model beside its critic, which is trained and exchanged with it; None without a critic."""

    @property
    def modules(self) -> nn.Module:
        """All modules that are trained and exchanged."""
        return self.network if self.with_critic is None else self.with_critic

    @property
    def manifest(self) -> Manifest:
        """Manifest of the dataset."""
        return self.source.manifest

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of a sample of each of the dataset's tensors."""
        return self.manifest.shapes

    @property
    def trains_outside_ray(self) -> bool:
        """Whether all trainers are external ones, with losses and settings of their own."""
        return all(group.bridged for group in self.job.worker_groups)


def check_kind(case: Case) -> None:
    """Refuse a dataset of another kind than the job's: without prompts, or without tensors that the model is fed."""
    task, manifest = case.task, case.manifest
    if case.job.rl.algorithm is not None:
        if task.name != "causal-lm":
            problem = "reinforcement learning can't train this model.type"
            fix = "set model.type, or leave rl.algorithm out"
            raise ConfigError("RL001", problem, task.name, "causal-lm", fix)
        if manifest.modality != "prompts":
            problem = f"dataset {manifest.name!r} has no prompts"
            fix = "prepare prompts: --source problems:NAME, or --prompt-column and --answer-column"
            raise DataError("RL002", problem, manifest.modality, "prompts", fix)
    elif case.job.preference.loss is None and not case.trains_outside_ray:
        task_of(case.job.model, case.network).require_tensors(case.shapes.keys())  # Some models take fewer of them.
        if task.classifies and task.labels == "samples" and _has_labels_of_tokens(case):
            problem = f"dataset {manifest.name!r} has labels of tokens, and {task.name} models take those of samples"
            raise DataError("DATA050", problem, fix="prepare it with --label-column, or set model.type")


def _has_labels_of_tokens(case: Case) -> bool:
    """Whether labels are tokens; numbers of 0 and 1 may be those of several classes at once."""
    if getattr(case.network.config, "problem_type", None) is not None:
        return False
    for tensor in case.manifest.tensors:
        if tensor.name == "labels" and tensor.shape == case.shapes.get("input_ids"):
            return (tensor.maximum or 0) > 1
    return False


def check_cut(case: Case) -> None:
    """Refuse more fragments than the model can be cut into."""
    layout_of(case.network, case.job.sync.fragments, case.job.sync.partition)


def check_settings(case: Case) -> None:
    """Refuse an attention or a way of saving memory that the model lacks; trainers outside of Ray have their own."""
    if not case.trains_outside_ray:
        check_execution(case.network, case.job.worker)


def check_rounding(case: Case) -> None:
    """Refuse stochastic rounding unless weights have 16 bits: in 32 bits, updates aren't lost by rounding."""
    dtypes = _trained_dtypes(case)
    if not case.job.inner_optimizer.stochastic_rounding or "bfloat16" in dtypes:
        return
    problem = "inner_optimizer.stochastic_rounding: trained weights are of another dtype"
    fix = "leave it out"
    if not has_adapter(case.job.model):  # Adapters are of float32 in any case.
        fix = 'set dtype = "bfloat16" in [model.config], or leave it out'
    raise ConfigError("OPT008", problem, ", ".join(sorted(dtypes)), "bfloat16", fix)


def check_scaled_loss(case: Case) -> None:
    """Refuse scaled losses for weights of 16 bits: their gradients overflow or vanish nevertheless."""
    half_dtypes = sorted(_trained_dtypes(case) - {"float32"})
    if case.job.worker.autocast == "fp16" and half_dtypes:
        problem = 'worker.autocast = "fp16" trains weights of 32 bits'
        fix = "leave model.config.dtype out, or autocast"
        raise ConfigError("CFG011", problem, ", ".join(half_dtypes), "float32", fix)


def _trained_dtypes(case: Case) -> set[str]:
    trained_parameters = [parameter for parameter in case.network.parameters() if parameter.requires_grad]
    return {str(parameter.dtype).removeprefix("torch.") for parameter in trained_parameters}


def check_processes(case: Case) -> None:
    """Refuse models whose gradient is no sum over parts of a batch, if workers have several processes."""
    job = case.job
    if all(job.processes_in(group) == 1 for group in job.worker_groups):
        return
    model_name = type(case.network).__name__
    norms = [name for name, module in case.network.named_modules() if isinstance(module, _BatchNorm)]
    if norms:
        problem = f"{model_name} normalises by statistics of a batch ({norms[0]})"
    elif case.task.name in _COUNTS_OBJECTS:
        problem = f"the loss of {model_name} counts objects"
    else:
        return
    fix = "have more workers of one process each: worker.processes = 1"
    raise ConfigError("MODEL021", f"{problem}, and the processes of a worker see only parts of it", fix=fix)


def check_best(case: Case) -> None:
    """Refuse to keep the best snapshot of a run that has no evaluations, or to end it by them."""
    if case.manifest.of("validation"):
        return
    settings = {"checkpoint.best": case.job.checkpoint.best, "rounds.patience": case.job.rounds.patience}
    for name, value in settings.items():
        if value:
            problem = f"{name} needs evaluations, and dataset {case.manifest.name!r} has no validation split"
            raise DataError("DATA051", problem, fix=f"prepare it with one, or leave {name} out")


def check_ranges(case: Case) -> None:
    """Refuse token ids and labels beyond the model's vocabulary and classes.

    A negative label is allowed only if the loss ignores it, so negative labels are read from the slices.
    """
    text = case.network.config.get_text_config()
    label_limit = _label_limit(case)
    case.manifest.require(case.facts.vocab_size, label_limit)
    limits = {
        "decoder_input_ids": case.facts.vocab_size,
        "token_type_ids": getattr(text, "type_vocab_size", None),
        "class_labels": case.network.config.num_labels,
    }
    for tensor in case.manifest.tensors:
        minimum = tensor.minimum or 0
        maximum = tensor.maximum or 0
        limit = limits.get(tensor.name)
        if limit and not 0 <= minimum <= maximum < limit:
            raise _out_of_range(case, tensor.name, f"{minimum} … {maximum}", limit)
        if tensor.name == "labels" and label_limit is not None and minimum < 0:
            _check_low_labels(case, label_limit)


def _label_limit(case: Case) -> int | None:
    """Number of values that a label may have; None if labels aren't class numbers or tokens."""
    if case.task.name == "multiple-choice":
        choices, *_ = case.shapes.get("input_ids", (None,))
        return choices
    labels_are_tokens = case.task.labels in ("shifted", "masked", "positions") and not case.task.classifies
    if case.task.name in _TRANSCRIBED or labels_are_tokens:
        return case.facts.vocab_size
    if getattr(case.network.config, "problem_type", None) in ("regression", "multi_label_classification"):
        return None
    classes = case.facts.num_labels
    if classes == 1 and case.task.labels == "samples":
        return None
    return classes


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
        scored_negatives = labels[(labels < 0) & (labels != IGNORE_INDEX)]
        if scored_negatives.size:
            raise _out_of_range(case, "labels", str(int(scored_negatives.min())), limit)
        read_bytes += sum(array.nbytes for array in slice_.values())


def _out_of_range(case: Case, name: str, got: str, limit: int) -> DataError:
    problem = f"{name} of dataset {case.manifest.name!r} are out of the model's range"
    allowed = f"0 … {limit - 1}"
    if name == "labels":
        allowed += f", or {IGNORE_INDEX} where nothing is to be scored"
    return DataError("DATA023", problem, got, allowed, "prepare the dataset for this model, or choose another model")


def check_positions(case: Case) -> None:
    """Refuse sequences that are longer than the model has positions for."""
    require_positions(case.network, case.task, case.shapes, f"dataset {case.manifest.name!r}")


def check_special_tokens(case: Case) -> None:
    """Refuse a model that needs a special token which its configuration lacks.

    A decoder that classifies looks for the last token before padding; a translation begins with a start token.
    """
    config = case.network.config
    pads = case.task.name == "sequence-classification" and case.job.rounds.max_batch_size > 1
    if pads and _lacks_token(case, config.get_text_config(), "pad_token_id"):
        raise _missing_token(case, "pad_token_id", "the token that short texts are padded with")
    starts = config.is_encoder_decoder and "labels" in case.shapes and "decoder_input_ids" not in case.shapes
    if starts and _lacks_token(case, config, "decoder_start_token_id"):
        raise _missing_token(case, "decoder_start_token_id", "for T5 the same as pad_token_id")


def _lacks_token(case: Case, config: PretrainedConfig, key: str) -> bool:
    """Whether a configuration has no such token, and the model's code reads it."""
    return getattr(config, key, None) is None and reads(case.network, key)


def _missing_token(case: Case, key: str, hint: str) -> ConfigError:
    architecture = type(case.network).__name__
    problem = f"{architecture} needs {key} for {case.task.name}, and its configuration has none"
    return ConfigError("MODEL018", problem, fix=f"set {key} in [model.config]: {hint}")


def check_channels(case: Case) -> None:
    """Refuse images with another number of channels than the model's."""
    channels, *_ = case.shapes.get("images", (case.facts.channels,))
    if case.facts.channels not in (None, channels):
        problem = f"the images of dataset {case.manifest.name!r} don't fit the model"
        fix = "set num_channels in model.config, or prepare the images for this model"
        raise DataError("DATA025", problem, f"{channels} channels", f"{case.facts.channels}", fix)


def check_image_size(case: Case) -> None:
    """Refuse images of a size that the model refuses on the meta device, where nothing is computed.

    The loss check covers models of images and texts, because it feeds both.
    """
    shape = case.shapes.get("images")
    takes_text = any(keyword == "input_ids" for _, keyword in case.task.tensors)
    if shape is None or len(shape) != 3 or case.task.modality != "image" or takes_text:
        return
    try:
        case.network.eval()(pixel_values=torch.empty(1, *shape, device="meta"))
    except ValueError as error:
        problem = f"the images of dataset {case.manifest.name!r} don't fit the model"
        fix = "set image_size in model.config, or prepare the images for this model"
        raise DataError("DATA025", problem, " ".join(str(error).split()), fix=fix) from None
    except Exception:  # A failure for lack of values says nothing about sizes.
        return


def compare_tokens(case: Case) -> list[str]:
    """Compare the dataset's tokens with the tokenizer in the model's repository.

    Returns:
        A note if they differ: a job may give a model a new vocabulary, but usually it is a mistake.

    """
    model, _ = base_of(case.job.model)
    repository = model.repository
    if not repository:
        return []
    if case.source.has_tokens_of(fetch(repository, model.revision, hub_token(model))):
        return []
    difference = f"the numbers in dataset {case.manifest.name!r} are other tokens than those of {repository}"
    return [f"{difference}: unless it is to learn a new vocabulary, prepare the dataset with --tokenizer {repository}"]


Check: TypeAlias = Callable[[Case], None]

CHECKS: Final[tuple[Check, ...]] = (
    check_kind,
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
