"""Tables of families: keys of the job file, each with its built-in members and the contract of all others.

Modules are named as text, so nothing is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Family:
    """A family: one key of the job file, and the contract of its members."""

    name: str
    """Name of the family, and after ``hypha_ray.`` that of its group of entry points."""
    key: str
    noun: str
    """Noun for a member in messages."""
    members: Mapping[str, str]
    """Built-in members: ``package.module:object`` by name; empty for a name that stands for no member."""
    allowed: str
    """Description of a member, for messages."""
    arguments: int | None = None
    """Number of arguments that a function of the family has; None: members aren't called."""
    keywords: tuple[str, ...] = ()
    """Names of parameters by which a function has another signature, and is called with arguments by name."""
    methods: Mapping[str, int] = field(default_factory=dict)
    """Methods of a member, and the number of their arguments."""
    attributes: tuple[str, ...] = ()
    free_options: bool = False
    """Whether a function is called with its options as they are, a dictionary."""
    trial: str | None = None
    """Function of a name and its options that tries a member on a small example, as ``package.module:function``."""
    unknown: str = "PLG001"
    """Code of the error of an unknown name."""
    unloadable: str = "PLG002"
    """Code of the error of a member that can't be loaded or used."""


SINKS = Family(
    "sinks",
    "telemetry.sinks",
    "telemetry sink",
    {
        "console": "",
        "jsonl": "",
        "prometheus": "hypha_ray.telemetry.sinks.prometheus:Prometheus",
        "otel": "hypha_ray.telemetry.sinks.otel:OpenTelemetry",
        "aim": "hypha_ray.telemetry.sinks.aim:Aim",
        "tensorboard": "hypha_ray.telemetry.sinks.tensorboard:TensorBoard",
        "wandb": "hypha_ray.telemetry.sinks.wandb:WeightsAndBiases",
        "mlflow": "hypha_ray.telemetry.sinks.mlflow:MLflow",
        "trackio": "hypha_ray.telemetry.sinks.trackio:Trackio",
    },
    "a class with the methods of hypha_ray.telemetry.sinks.base.Sink",
    methods={"start": 1, "record": 1, "event": 1, "summary": 1, "close": 0},
    trial="hypha_ray.telemetry.sinks.base:try_sink",
)
CODECS = Family(
    "codecs",
    "sync.codec",
    "codec",
    {
        "fp32": "hypha_ray.codec.base:Fp32",
        "bf16": "hypha_ray.codec.formats:Bf16",
        "fp16": "hypha_ray.codec.formats:Fp16",
        "int8": "hypha_ray.codec.formats:Int8",
        "int4": "hypha_ray.codec.formats:Int4",
        "e3m0": "hypha_ray.codec.formats:E3m0",
        "huffman3": "hypha_ray.members.huffman:Huffman3",
        "huffman2": "hypha_ray.members.huffman:Huffman2",
        "topk": "hypha_ray.members.topk:TopK",
        "visible": "hypha_ray.members.visible:Visible",
    },
    "a class derived from hypha_ray.codec.formats.chunked.Chunked",
    methods={"compress": 1, "expand": 1, "form": 1, "decode": 3, "allocate": 1, "encode_block": 3, "pack": 1},
    attributes=("chunk", "arrays"),
    trial="hypha_ray.members.trials:try_codec",
    unknown="COD001",
)
OUTER_OPTIMIZERS = Family(
    "outer_optimizers",
    "outer_optimizer.name",
    "outer optimizer",
    {
        "nesterov": "hypha_ray.server.outer:nesterov",
        "average": "hypha_ray.server.outer:average",
        "adam": "hypha_ray.server.outer:adam",
    },
    "a class with slots and a method step of 5 arguments",
    methods={"step": 5},
    attributes=("slots",),
    trial="hypha_ray.members.trials:try_outer",
)
MERGE_RULES = Family(
    "merge_rules",
    "sync.merge",
    "merge rule",
    dict.fromkeys(("mean", "trimmed_mean", "median"), ""),
    "a function of deltas and their weights",
    arguments=2,
    trial="hypha_ray.members.trials:try_merge",
)
WEIGHTINGS = Family(
    "weightings",
    "sync.weighting",
    "weighting",
    dict.fromkeys(("samples", "uniform"), ""),
    "a function of the deltas' samples",
    arguments=1,
    trial="hypha_ray.members.trials:try_weighting",
)
INNER_OPTIMIZERS = Family(
    "inner_optimizers",
    "inner_optimizer.name",
    "inner optimizer",
    {"adamw": "", "adamw8bit": "", "sgd": "", "muon": "hypha_ray.members.muon:build"},
    "a class derived from torch.optim.Optimizer",
    methods={"step": 0, "zero_grad": 0, "state_dict": 0},
    trial="hypha_ray.members.trials:try_optimizer",
)
SCHEDULES = Family(
    "schedules",
    "inner_optimizer.schedule",
    "schedule",
    dict.fromkeys(("constant", "linear", "linear-with-warmup", "cosine-with-warmup", "wsd"), ""),
    "a function of step, total_steps and warmup_steps",
    arguments=3,
    trial="hypha_ray.members.trials:try_schedule",
)
REWARDS = Family(
    "rewards",
    "rl.reward.functions",
    "reward function",
    {
        "exact": "hypha_ray.rl.rewards.registered:exact",
        "positions": "hypha_ray.rl.rewards.registered:positions",
        "contains": "hypha_ray.rl.rewards.registered:contains",
        "number": "hypha_ray.rl.rewards.registered:number",
        "format": "hypha_ray.rl.rewards.registered:boxed",
        "length": "hypha_ray.rl.rewards.registered:length",
        "math": "hypha_ray.rl.rewards.registered:equal",
        "code": "hypha_ray.rl.rewards.registered:passes",
        "environment": "hypha_ray.rl.rewards.registered:of_environment",
        "judge": "",
        "model": "",
    },
    "a function of a response, or of completions and columns by name",
    arguments=1,
    keywords=("completions", "completion_ids", "prompts"),
    unknown="RWD003",
    unloadable="RWD004",
)

ENVIRONMENTS = Family(
    "environments",
    "rl.environment",
    "environment",
    {
        "calculator": "hypha_ray.rl.environments.calculator:Calculator",
        "number_game": "hypha_ray.rl.environments.number_game:NumberGame",
    },
    "a class with the methods reset and step",
    methods={"reset": 1, "step": 1},
)
RL_LOSSES = Family(
    "rl_losses",
    "rl.loss",
    "policy loss",
    {"clipped": "hypha_ray.rl.algorithms.policy_losses:loss"},
    "a function of hypha_ray.rl.algorithms.policy_losses.LossInputs",
    arguments=1,
    trial="hypha_ray.rl.algorithms.policy_losses:try_loss",
)
ADVANTAGES = Family(
    "advantages",
    "rl.advantage",
    "advantage",
    {
        "group_std": "hypha_ray.rl.algorithms.advantages:group_std",
        "group_mean": "hypha_ray.rl.algorithms.advantages:group_mean",
        "leave_one_out": "hypha_ray.rl.algorithms.advantages:leave_one_out",
        "batch_std": "hypha_ray.rl.algorithms.advantages:batch_std",
        "batch_scale": "hypha_ray.rl.algorithms.advantages:batch_scale",
        "gae": "",
    },
    "a function of rewards and lengths, both [prompts, group]",
    arguments=2,
    trial="hypha_ray.rl.algorithms.advantages:try_advantages",
)
METRICS = Family(
    "metrics",
    "model.metrics",
    "metric",
    {
        "macro_f1": "hypha_ray.model.metrics:MacroF1",
        "top5": "hypha_ray.model.metrics:Top5",
    },
    "a class with the methods of hypha_ray.model.metrics.Metric",
    methods={"sums": 2, "figure": 1},
    trial="hypha_ray.model.metrics:try_metric",
)
MODEL_LOSSES = Family(
    "model_losses",
    "model.loss",
    "loss",
    {},
    "a function of the model's output and of its inputs, which returns a loss of each sample",
    arguments=2,
)
PREFERENCE_LOSSES = Family(
    "preference_losses",
    "preference.loss",
    "loss of preferences",
    {name: f"hypha_ray.model.preferences.losses:{name}" for name in ("dpo", "robust", "ipo", "simpo", "orpo", "kto")},
    "a function of hypha_ray.model.preferences.losses.PreferenceInputs, which returns a loss of each sample",
    arguments=1,
    trial="hypha_ray.model.preferences.losses:try_loss",
)
MODEL_FACTORIES = Family(
    "model_factories",
    "model.factory",
    "model builder",
    {},
    "a function of a dictionary of options, which returns a transformers.PreTrainedModel",
    arguments=1,
    free_options=True,
)
DATASET_KINDS = Family(
    "dataset_kinds",
    "--kind",
    "kind of dataset",
    {
        "documents": "hypha_ray.data.kinds.documents:KIND",
        "images": "hypha_ray.data.kinds.media:IMAGES",
        "recordings": "hypha_ray.data.kinds.media:RECORDINGS",
        "prompts": "hypha_ray.data.kinds.prompts:KIND",
        "chats": "hypha_ray.data.kinds.chats:KIND",
        "texts": "hypha_ray.data.kinds.labelled_texts:KIND",
        "pairs": "hypha_ray.data.kinds.pairs:KIND",
        "preferences": "hypha_ray.data.kinds.preferences:KIND",
    },
    "a function of rows and of a tokenizer, which returns samples",
    arguments=2,
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        SINKS,
        CODECS,
        OUTER_OPTIMIZERS,
        MERGE_RULES,
        WEIGHTINGS,
        INNER_OPTIMIZERS,
        SCHEDULES,
        REWARDS,
        ENVIRONMENTS,
        RL_LOSSES,
        ADVANTAGES,
        METRICS,
        MODEL_LOSSES,
        PREFERENCE_LOSSES,
        MODEL_FACTORIES,
        DATASET_KINDS,
    )
}
"""All families by name."""
