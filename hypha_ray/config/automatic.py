"""Choice of the settings of ``[worker]`` that are ``auto``, by device, model and job; each has a reason.

    facts of the device ─┐
    facts of the model ──┼──► autocast ──► compile ──► fused_loss ──► attention
    job ─────────────────┘

Without a GPU, in reinforcement learning and in replay mode all of them are off. A choice is never what a job's other
settings exclude: `conflicts` is asked before. What was measured is in docs/gpu.md; what wasn't isn't chosen.

Cards have their peaks from NVIDIA's data sheets, of dense matrix products with sums of 32 bits: bfloat16, or float16
before Ampere. A card that isn't listed has no peak here, and neither has a part of one (MIG) or a laptop's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from hypha_ray.config.conflicts import conflicts
from hypha_ray.config.schema import Job
from hypha_ray.texts import significant

Capability: TypeAlias = tuple[int, int]
"""Compute capability of a card, such as (9, 0)."""

FIRST_WITH_BF16: Final[Capability] = (8, 0)
"""Compute capability from which on cards multiply matrices of bfloat16."""
FIRST_WITH_FP16: Final[Capability] = (7, 0)
"""Compute capability from which on cards multiply matrices of float16 faster than others."""
UNLISTED: Final[dict[str, Capability]] = {
    "K80": (3, 7),
    "P100": (6, 0),
    "P4": (6, 1),
    "H20": (9, 0),
    "B300": (10, 3),
    "GB300": (10, 3),
    "RTX-PRO-6000": (12, 0),
}
"""Compute capabilities of cards without a peak here, by Ray's labels; from NVIDIA's list of CUDA GPUs."""
_VENDOR = re.compile(r"^(NVIDIA )?(Tesla |GeForce )?")
AUTO: Final = "auto"
Value: TypeAlias = str | bool
OFF: Final[dict[str, Value]] = {"autocast": "none", "compile": False, "fused_loss": False, "attention": "none"}
"""Settings that can be ``auto``, each with the value that leaves a model as it is; in the order of decisions."""
MIXED_TASKS: Final = frozenset(
    [
        "causal-lm",
        "masked-lm",
        "seq2seq-lm",
        "sequence-classification",
        "token-classification",
        "multiple-choice",
        "question-answering",
        "image-classification",
    ]
)
"""Tasks whose models compute their own layers alone, so that mixed precision changes nothing but their precision."""
SAVED_S: Final = 4.4e-15
"""Seconds that compiling saves for each operation of a step with layers of 768 features, of 6 for each parameter and
token: 66 ms for the Llama of 152 million parameters on 16 × 1024 tokens, on an H200. GPT-2 saves a fifth more."""
SAVED_FEATURES: Final = 768
"""Width of the layers that `SAVED_S` was measured with. What compiling fuses grows with it, and products with its
square."""
COMPILE_S = 20.0
COMPILE_LAYER_S = 2.0
"""Estimated seconds that compiling takes, and of each layer."""
LAYERS_SHARE = 0.9
"""Estimated part of what compiling saves that compiled layers and a compiled loss save."""
LAYERS_S = 4.0
"""Estimated seconds to compile the layers and the loss; the number of layers has no influence."""
CHUNK: Final = 1 << 24
"""Number of logits of a chunk of the fused loss; chunks of a batch with fewer would save little."""


@dataclass(frozen=True, slots=True)
class Card:
    """Kind of a GPU."""

    name: str
    """Name in a dry run."""
    pattern: str
    """Regular expression of the whole name that `torch.cuda.get_device_name` returns, without the vendor's name."""
    tflops: float
    """Dense peak of 16 bits, in 10¹² operations a second."""
    capability: Capability
    source: str
    """Document with the peak."""


CARDS: Final = (
    Card("B200", "B200", 2250.0, (10, 0), "HGX B200 data sheet: 36 PFLOPS of 8 cards, with sparsity"),
    Card("GB200", "GB200", 2500.0, (10, 0), "GB200 NVL72 data sheet: 360 PFLOPS of 72 cards, with sparsity"),
    Card("H200", "H200", 989.4, (9, 0), "H200 data sheet: 1979 TFLOPS with sparsity"),
    Card("H200 NVL", "H200 NVL", 835.5, (9, 0), "H200 data sheet: 1671 TFLOPS with sparsity"),
    Card("GH200", r"GH200 (\d+GB|144G HBM3e)", 989.4, (9, 0), "GH200 data sheet: 1979 TFLOPS with sparsity"),
    Card("H100 SXM", r"H100 \d+GB HBM3", 989.4, (9, 0), "H100 data sheet: 1979 TFLOPS with sparsity"),
    Card("H100 PCIe", r"H100 PCIe|H100 80GB HBM2e", 756.5, (9, 0), "H100 data sheet: 1513 TFLOPS with sparsity"),
    Card("H100 NVL", "H100 NVL", 835.5, (9, 0), "H100 data sheet: 1671 TFLOPS with sparsity"),
    Card("A100", r"A100-(SXM4|PCIE)-\d+GB|A100 80GB PCIe", 312.0, (8, 0), "A100 data sheet"),
    Card("A40", "A40", 149.7, (8, 6), "A40 data sheet"),
    Card("A30", "A30", 165.0, (8, 0), "A30 data sheet"),
    Card("A10", "A10", 125.0, (8, 6), "A10 data sheet"),
    Card("A10G", "A10G", 70.0, (8, 6), "A10G data sheet"),
    Card("L40S", "L40S", 362.05, (8, 9), "L40S data sheet"),
    Card("L40", "L40", 181.05, (8, 9), "L40 data sheet"),
    Card("L4", "L4", 121.0, (8, 9), "L4 data sheet: 242 TFLOPS with sparsity"),
    Card("RTX 4090", "RTX 4090", 165.2, (8, 9), "Ada GPU architecture, appendix A"),
    Card("RTX 3090", "RTX 3090", 71.0, (8, 6), "Ampere GA102 GPU architecture, appendix A"),
    Card("T4", "T4", 65.0, (7, 5), "T4 data sheet, float16"),
    Card("V100 SXM2", r"V100-SXM\d-\d+GB(-LS)?", 125.0, (7, 0), "V100 data sheet, float16"),
    Card("V100 PCIe", r"V100-PCIE-\d+GB", 112.0, (7, 0), "V100 data sheet, float16"),
    Card("V100S", r"V100S-PCIE-\d+GB", 130.0, (7, 0), "V100 data sheet, float16"),
)
"""Cards that are known."""


def find_card(device_name: str) -> Card | None:
    """Return the card with the name that torch gives a device; None if it isn't listed."""
    name = _VENDOR.sub("", device_name.strip())
    return next((card for card in CARDS if re.fullmatch(card.pattern, name)), None)


def capability_of(label: str) -> Capability | None:
    """Return the compute capability of GPUs with a label of Ray, such as H100 or A100-80G; None for others."""
    for card in CARDS:
        series, *_ = card.name.split()
        if re.fullmatch(rf"{series}(-\d+G)?", label):
            return card.capability
    return UNLISTED.get(label)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Device that a worker computes on."""

    type: str
    """``cpu`` or ``cuda``."""
    name: str = ""
    """Name that torch gives a GPU."""
    capability: Capability | None = None
    """Compute capability; None without CUDA, as on a card of another vendor."""
    compiles: bool = False
    """Whether the machine has what torch.compile needs: Triton, a C compiler and Python's headers."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Model that a worker trains, as far as settings depend on it."""

    task: str
    parameters: int
    layers: int | None = None
    """Number of layers; None if it isn't known."""
    features: int | None = None
    """Width of a layer; None if it isn't known."""
    vocabulary: int | None = None
    """Number of logits of a token; None for models without."""
    narrow: bool = False
    """Whether weights have 16 bits."""
    foreign: bool = False
    """Whether its code isn't that of transformers."""
    routed: bool = False
    """Whether it has experts, each of which some tokens pass through."""
    adapted: bool = False
    """Whether it is an adapter on frozen weights."""
    has_sdpa: bool = False
    """Whether torch's attention is its own choice."""
    fuses: bool = False
    """Whether its loss can be fused with its head."""


@dataclass(frozen=True, slots=True)
class SettingChoice:
    """Value of a setting, and the reason for it."""

    value: Value
    reason: str


Decision: TypeAlias = Callable[[Job, DeviceFacts, ModelFacts], SettingChoice]


def automatic(job: Job) -> list[str]:
    """Names of the settings that are ``auto`` in a job."""
    return [name for name in OFF if getattr(job.worker, name) == AUTO]


def left_off(job: Job, device: DeviceFacts) -> str | None:
    """Return why all settings are off whatever the model is; None if they depend on it."""
    if job.rl.algorithm is not None:
        return "reinforcement learning: policies are computed as they are"
    if job.run.mode == "replay":
        return "replay mode: equal bits come first"
    if device.type != "cuda":
        return "no GPU"
    if device.capability is None:
        return "nothing was measured on such a GPU"
    return None


def choose(job: Job, device: DeviceFacts, model: ModelFacts | None = None) -> dict[str, SettingChoice]:
    """Choose the settings that are ``auto``.

    Args:
        job: the job file.
        device: the worker's device.
        model: the worker's model; None if `left_off` has a reason.

    Returns:
        The choice of each of them, by its name.

    """
    reason = left_off(job, device)
    if model is None or reason is not None:
        reason = reason or "nothing is known of the model"
        return {name: SettingChoice(OFF[name], reason) for name in automatic(job)}
    chosen: dict[str, SettingChoice] = {}
    for name in automatic(job):
        choice = _DECISIONS[name](job, device, model)
        excluding_key = _excluding_key(job, name, choice.value)
        if excluding_key is not None:
            choice = SettingChoice(OFF[name], f"{excluding_key} excludes it")
        chosen[name] = choice
        job = job.with_worker({name: choice.value}, {})
    return chosen


def chosen_job(job: Job, device: DeviceFacts, model: ModelFacts | None = None) -> Job:
    """Return the job with the chosen settings in the place of ``auto``, and the reasons for them."""
    choices = choose(job, device, model)
    values = {name: choice.value for name, choice in choices.items()}
    reasons = {name: choice.reason for name, choice in choices.items()}
    return job.with_worker(values, reasons)


def settings_of(job: Job) -> dict[str, Value]:
    """Return the settings of a job that can be ``auto``, by their names."""
    return {name: getattr(job.worker, name) for name in OFF}


def settings_told(job: Job) -> tuple[dict[str, Value], dict[str, str]]:
    """Return a worker's settings, with reasons for chosen ones; none in reinforcement learning, which has its own."""
    if job.rl.algorithm is not None:
        return {}, {}
    return settings_of(job), dict(job.reasons)


def steps_of(job: Job) -> int:
    """Number of a worker's steps in the whole run, if all workers are equally fast."""
    if job.sync.traits.sends_gradients:
        return job.rounds.update_rounds
    samples_of_all = job.num_workers * job.rounds.max_batch_size
    steps_in_round = -(-job.rounds.samples_between_updates // samples_of_all)
    return job.rounds.update_rounds * steps_in_round


def step_operations(job: Job, model: ModelFacts) -> float | None:
    """Operations of a step: 6 for each parameter and token; None if samples have no known length."""
    if job.sample_tokens is None:
        return None
    batch_size = job.rounds.max_batch_size
    return 6.0 * model.parameters * batch_size * job.sample_tokens


def _autocast(job: Job, device: DeviceFacts, model: ModelFacts) -> SettingChoice:
    reason = next(_reasons_against_autocast(job, model), None)
    if reason is not None:
        return SettingChoice("none", reason)
    assert device.capability is not None
    if device.capability >= FIRST_WITH_BF16:
        return SettingChoice("bf16", "the card multiplies bfloat16")
    if device.capability >= FIRST_WITH_FP16:
        return SettingChoice("fp16", "the card multiplies float16 and not bfloat16")
    return SettingChoice("none", "the card multiplies no matrices of 16 bits faster")


def _reasons_against_autocast(job: Job, model: ModelFacts) -> Iterator[str]:
    if model.narrow:
        yield "weights have 16 bits already"
    if job.model.quantization is not None:
        yield "not measured with quantized weights"
    if model.foreign:
        yield "the model's code isn't that of transformers"
    if model.task not in MIXED_TASKS:
        yield f"not tried with {model.task}"


def _compile(job: Job, device: DeviceFacts, model: ModelFacts) -> SettingChoice:
    reason = next(_reasons_against_compiling(job, device, model), None)
    if reason is not None:
        return SettingChoice(False, reason)
    operations = step_operations(job, model)
    if operations is None or model.layers is None or model.features is None:
        return SettingChoice(False, "the length of a step isn't known")
    steps = steps_of(job)
    wide_features = max(model.features, SAVED_FEATURES)
    saved_s = steps * operations * SAVED_S * SAVED_FEATURES / wide_features
    needed_s = COMPILE_S + COMPILE_LAYER_S * model.layers
    estimate = f"{steps} steps would save {_seconds_text(saved_s)}, and compiling takes {_seconds_text(needed_s)}"
    if saved_s > needed_s:
        return SettingChoice(True, estimate)
    layers_save_s = LAYERS_SHARE * saved_s
    estimate += f"; its layers alone {_seconds_text(layers_save_s)}, and {_seconds_text(LAYERS_S)}"
    return SettingChoice("layers" if layers_save_s > LAYERS_S else False, estimate)


def _seconds_text(seconds: float) -> str:
    return f"about {significant(seconds, 2)} s" if seconds >= 0.01 else "less than 0.01 s"


def _reasons_against_compiling(job: Job, device: DeviceFacts, model: ModelFacts) -> Iterator[str]:
    """Reasons to compile neither a model nor its layers, however long the run is."""
    assert device.capability is not None
    worker = job.worker
    if device.capability < FIRST_WITH_BF16:
        yield "not measured on cards before Ampere"
    if not device.compiles:
        yield "the machine lacks Triton, a C compiler or Python's headers"
    if model.task != "causal-lm" or model.foreign or model.routed:
        yield "measured with dense causal models alone"
    if job.model.loss is not None:
        yield "not measured with a loss of the job's own"
    if model.adapted or job.model.lora.rank is not None:
        yield "not measured with adapters"
    if worker.gradient_checkpointing:
        yield "not measured with worker.gradient_checkpointing"
    if worker.attention not in (AUTO, "none", "sdpa"):
        yield f"not measured with {worker.attention}"
    if worker.probe_batch_size:
        yield "each trial of worker.probe_batch_size would compile"
    if any(job.processes_in(group) > 1 for group in job.worker_groups):
        yield "not measured with several processes of a worker"


def _fused_loss(job: Job, device: DeviceFacts, model: ModelFacts) -> SettingChoice:
    if not model.fuses:
        return SettingChoice(False, f"the model ({model.task}) has no loss that can be fused with its head")
    if job.sample_tokens and model.vocabulary:
        tokens = job.sample_tokens * job.rounds.max_batch_size // job.rounds.accumulation
        if 0 < tokens * model.vocabulary <= CHUNK:
            return SettingChoice(False, "the logits of a batch are one chunk")
    return SettingChoice(True, "saves the memory of all logits, in the same time")


def _attention(job: Job, device: DeviceFacts, model: ModelFacts) -> SettingChoice:
    if not model.has_sdpa:
        return SettingChoice("none", "the model's own choice isn't sdpa")
    return SettingChoice("sdpa", "the one that was measured")


_DECISIONS: Final[dict[str, Decision]] = {
    "autocast": _autocast,
    "compile": _compile,
    "fused_loss": _fused_loss,
    "attention": _attention,
}


def _excluding_key(job: Job, name: str, value: Value) -> str | None:
    """Return the key that excludes a value of a setting; None if nothing does."""
    without_setting = set(conflicts(job.with_worker({name: OFF[name]}, {})))
    for conflict in conflicts(job.with_worker({name: value}, {})):
        if conflict not in without_setting:
            return conflict.second if conflict.first == f"worker.{name}" else conflict.first
    return None
