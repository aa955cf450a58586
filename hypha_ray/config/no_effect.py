"""Keys that have no effect because of other settings: harmless, but probably a mistake.

Keys that change nothing in a simulation, or whose effect no record of a run tells, are refused there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypha_ray.config.keys import EACH, KeyPath, arrays, keys, schema_path, shown
from hypha_ray.config.rl import JUDGE, MODEL, RL, SLOW
from hypha_ray.config.schema import Job
from hypha_ray.config.training import OF_LENGTH, SMOOTHED, WITHOUT_FILES, Preference
from hypha_ray.errors import ConfigError
from hypha_ray.plugins import is_built_in

_OF_TRAINERS = (
    "rounds.accumulation worker.device worker.processes worker.sharding worker.autocast worker.compile worker.attention"
    " worker.gradient_checkpointing worker.fused_loss worker.probe_batch_size"
)
UNTOLD: tuple[tuple[str, ...], ...] = (
    ("model",),
    ("preprocessor",),
    ("dataset",),
    ("rl",),
    ("bridge",),
    ("inner_optimizer", "name"),
    ("inner_optimizer", "name_options"),
    ("inner_optimizer", "stochastic_rounding"),
    ("outer_optimizer", "name"),
    ("outer_optimizer", "name_options"),
    ("preference", "loss"),
    ("preference", "loss_options"),
    ("preference", "reference"),
    ("sync", "clip"),
    ("sync", "merge"),
    ("sync", "merge_options"),
    ("resources", "gpu_type"),
    ("resources", "min_gpus"),
    ("resources", "parameter_server"),
    ("resources", "worker"),
    ("worker", "device"),
    ("worker", "processes"),
    ("worker", "sharding"),
    ("worker", "autocast"),
    ("worker", "compile"),
    ("worker", "attention"),
    ("worker", "gradient_checkpointing"),
    ("worker", "fused_loss"),
    ("rounds", "accumulation"),
    ("rounds", "min_delta"),
    ("rounds", "patience"),
)
"""Tables and keys that change the time of a batch or of a merge in a way that no record of another setting tells."""
WITHOUT_EFFECT: tuple[tuple[str, ...], ...] = (
    ("telemetry",),
    ("inner_optimizer",),
    ("outer_optimizer",),
    ("preference",),
    ("checkpoint", "best"),
    ("checkpoint", "export_dtype"),
    ("checkpoint", "failures"),
    ("checkpoint", "keep"),
    ("checkpoint", "push"),
    ("resources", "generator"),
    ("resources", "max_price_per_hour"),
    ("resources", "min_memory_mb"),
    ("resources", "parameter_server_price"),
    ("resources", "strategy"),
    ("resources", "worker_price"),
    ("sync", "codec_options"),
    ("sync", "delayed_nesterov"),
    ("sync", "downward_codec_options"),
    ("sync", "error_feedback"),
    ("sync", "mixing"),
    ("sync", "norm_gate"),
    ("sync", "strikes"),
    ("sync", "trim"),
    ("sync", "weighting"),
    ("sync", "weighting_options"),
    ("run", "name"),
    ("run", "dir"),
    ("run", "notes"),
    ("run", "seed"),
    ("run", "tags"),
)
"""Tables and keys that change nothing that is simulated, the keys of `UNTOLD` aside."""
SNAPSHOTS: tuple[tuple[str, ...], ...] = (("checkpoint", "every_rounds"), ("checkpoint", "mirror"))
"""Keys that change when snapshots are written; a scenario says how long one takes, and the records of a run don't."""


def keys_without_effect(job: Job) -> dict[KeyPath, str]:
    """The keys that aren't at their default but have no effect, each with the reason."""
    causes: dict[KeyPath, str] = {}
    """Name of the key that makes each key idle; if several do, the last of them."""
    for cause, names in _idle_keys(job):
        for name in names.split():
            for path in _paths(job, tuple(name.split("."))):
                causes[path] = cause
    reasons = {}
    for path, cause in causes.items():
        default = keys()[schema_path(path)].default
        if _value(job, path) != default:
            reasons[path] = f"beside {_shown(job, cause)}"
    return reasons


def _paths(job: Job, path: KeyPath) -> Iterator[KeyPath]:
    """The paths that a key of the schema has in a job: one, or one for each table of an array."""
    if EACH not in path:
        yield path
        return
    index = path.index(EACH)
    array = path[:index]
    key = path[index + 1 :]
    tables = _value(job, array)
    assert isinstance(tables, list)
    for number in range(len(tables)):
        yield (*array, str(number), *key)


def _names_below(*table: str) -> str:
    """Names of all keys in a table of the schema and in those below it, separated by spaces."""
    return " ".join(".".join(path) for path in keys() if path[: len(table)] == table)


def _idle_keys(job: Job) -> Iterator[tuple[str, str]]:
    """Pairs of a key and the names of the keys that have no effect beside its value."""
    yield from _of_sync(job)
    yield from _of_optimizers(job)
    yield from _of_rl(job)
    yield from _of_preferences(job.preference)
    groups = "workers" if job.workers else "bridge.commands"
    if not any(group.dials_in for group in job.worker_groups):
        yield groups, "bridge.listen bridge.certificate bridge.key"
    if all(group.bridged for group in job.worker_groups):
        yield groups, _OF_TRAINERS
    elif all(job.processes_in(group) == 1 for group in job.worker_groups):
        yield "worker.processes", "worker.sharding"
    if "aim" not in job.telemetry.sinks:
        yield "telemetry.sinks", "telemetry.aim_repository"
    if WITHOUT_FILES.issuperset(job.telemetry.sinks):
        yield "telemetry.sinks", "telemetry.trackers"
    if job.model.repository is None:
        yield "model.repository", "model.revision"
    if job.model.lora.rank is None:
        yield "model.lora.rank", _names_below("model", "lora")
    if not any("://" in (part.path or "") for part in job.dataset.parts):
        yield "dataset.path", "dataset.cache_gb"
    if job.preprocessor.repository is None:
        yield "preprocessor.repository", "preprocessor.revision"
    if job.model.repository is None and job.preprocessor.repository is None:
        yield "model.repository", "model.token model.trust_remote_code"
    if job.rounds.patience is None:
        yield "rounds.patience", "rounds.min_delta"
    if job.run.mode == "replay":
        yield "run.mode", "sync.dynamic_local_steps"


def _of_rl(job: Job) -> Iterator[tuple[str, str]]:
    rl = job.rl
    if rl.algorithm is None:
        yield "rl.algorithm", _names_below("rl")
        return
    yield "rl.algorithm", "worker.compile worker.attention model.input_names model.lora.dropout"
    if rl.generation.engine != "server":
        yield "rl.generation.engine", _names_below("rl", "generation", "server")
    if rl.environment is None:
        yield "rl.environment", f"rl.environment_options {_names_below('rl', 'episode')}"
    yield from _of_processes(rl)
    if rl.reference == "none":
        yield "rl.reference", "rl.kl_estimator rl.offload_reference"
    if not job.rounds.evaluate_every:
        yield "rounds.evaluate_every", "rl.evaluation.every_steps"
    if rl.reference != "average":
        yield "rl.reference", "rl.reference_rate"
    if not rl.kl:
        yield "rl.kl", "rl.kl_place rl.kl_target"
    if rl.recipe.kl_place == "loss":
        yield "rl.kl_place", "rl.kl_target"
    if not rl.has_critic:
        yield "rl.algorithm", _names_below("rl", "critic")
    if rl.kl_target is None:
        yield "rl.kl_target", "rl.kl_horizon"
    if not rl.evaluation.temperature:
        yield "rl.evaluation.temperature", "rl.evaluation.top_p rl.evaluation.top_k"


def _of_preferences(preference: Preference) -> Iterator[tuple[str, str]]:
    """Keys that the loss doesn't read; a loss of one's own may read all."""
    loss = preference.loss
    if loss is None:
        yield "preference.loss", _names_below("preference")
        return
    if not is_built_in("preference_losses", loss):
        return
    if loss not in SMOOTHED:
        yield "preference.loss", "preference.label_smoothing"
    if loss != "simpo":
        yield "preference.loss", "preference.gamma"
    if loss != "kto":
        yield "preference.loss", "preference.desirable_weight preference.undesirable_weight"
    if loss in OF_LENGTH:
        yield "preference.loss", "preference.reference"


def _of_processes(rl: RL) -> Iterator[tuple[str, str]]:
    """Keys about rewards and model workers."""
    for name in (JUDGE, MODEL):
        if name not in rl.reward.functions:
            yield "rl.reward.functions", _names_below("rl", "reward", name)
    if rl.reward.deadline_s == "none":
        yield "rl.reward.deadline_s", "rl.reward.processes"
    if not any(map(_is_limited, rl.reward.functions)):
        yield "rl.reward.functions", "rl.reward.deadline_s rl.reward.processes"
    if rl.model_workers == 1:
        yield "rl.model_workers", "rl.data_parallel"
    if not rl.generators:
        yield "rl.generators", f"rl.generation.request_prompts {_names_below('resources', 'generator')}"


def _is_limited(function: str) -> bool:
    """Whether a reward function has a limit of time, and other processes if there is one."""
    return function in SLOW or not is_built_in("rewards", function)


def _of_sync(job: Job) -> Iterator[tuple[str, str]]:
    sync = job.sync
    if sync.traits.has_barrier:
        yield "sync.strategy", "sync.delayed_nesterov sync.period sync.arrival_grace_s sync.max_staleness"
    if not sync.traits.own_weights:
        yield "sync.strategy", "sync.stagger"
    if sync.traits.sends_gradients:
        yield "sync.strategy", "sync.dynamic_local_steps"
    if sync.codec == sync.downward_codec == "fp32":
        yield "sync.codec", "sync.error_feedback"
    if sync.fragments == 1:
        yield "sync.fragments", "sync.stagger sync.partition"
    if sync.quorum is None:
        yield "sync.quorum", "sync.grace_s"
    if sync.merge != "trimmed_mean":
        yield "sync.merge", "sync.trim"
    if sync.merge in ("trimmed_mean", "median"):
        yield "sync.merge", "sync.weighting"


def _of_optimizers(job: Job) -> Iterator[tuple[str, str]]:
    inner = job.inner_optimizer
    outer = job.outer_optimizer
    if inner.name != "muon":
        yield "inner_optimizer.name", "inner_optimizer.muon_learning_rate inner_optimizer.muon_step_length"
    if inner.name in ("adamw", "adamw8bit", "muon"):
        yield "inner_optimizer.name", "inner_optimizer.momentum"
    if inner.name == "sgd":
        yield "inner_optimizer.name", "inner_optimizer.betas inner_optimizer.epsilon"
    if inner.schedule == "constant":
        yield "inner_optimizer.schedule", "inner_optimizer.min_lr_rate inner_optimizer.total_steps"
    if outer.name != "adam":
        yield "outer_optimizer.name", "outer_optimizer.betas outer_optimizer.epsilon"
    if outer.name != "nesterov":
        yield "outer_optimizer.name", "outer_optimizer.momentum"
    if outer.schedule == "constant":
        yield "outer_optimizer.schedule", "outer_optimizer.final_learning_rate"
    if outer.name == "average":
        yield (
            "outer_optimizer.name",
            "outer_optimizer.learning_rate outer_optimizer.schedule outer_optimizer.final_learning_rate",
        )
    if job.sync.traits.sends_gradients:
        yield "sync.strategy", _names_below("outer_optimizer")


def _value(job: Job, path: KeyPath) -> object:
    value: Any = job
    for part in path:
        value = value[int(part)] if isinstance(value, list) else getattr(value, part)
    return value


def _shown(job: Job, name: str) -> str:
    if (name,) in arrays():
        return f"the [[{name}]] of the job"
    value = _value(job, tuple(name.split(".")))
    return f"no {name}" if value is None else f"{name} = {shown(value)}"


def require_told(keys: Sequence[tuple[str, str]], job: Job) -> None:
    """Refuse settings whose effect on times isn't in the records, and those without an effect.

    Args:
        keys: dotted keys and texts of their values.
        job: the job with these settings.

    Raises:
        ConfigError: SIM003.

    """
    idle_keys = keys_without_effect(job)
    for key, value in keys:
        path = tuple(key.replace("-", "_").split("."))
        if is_below(path, (*UNTOLD, *SNAPSHOTS)):
            problem = f"{key} changes times that only a run with it can tell"
            raise ConfigError("SIM003", problem, value, fix="leave it out, and start from a run that has it")
        if is_below(path, WITHOUT_EFFECT):
            raise ConfigError("SIM003", f"{key} changes nothing that is simulated", value, fix="leave it out")
        if path in idle_keys:
            raise ConfigError("SIM003", f"{key} changes nothing {idle_keys[path]}", value, fix="leave it out")


def is_below(path: Sequence[str], tables: Sequence[tuple[str, ...]]) -> bool:
    """Whether a path is one of these tables or keys, or leads into one."""
    return any(tuple(path[: len(table)]) == table for table in tables)
