"""Keys that exclude each other, with the fix for each pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hypha_ray.config.keys import BESIDE_REPOSITORY
from hypha_ray.config.schema import Job
from hypha_ray.config.tables.rl import RL

SHARDABLE = ("adamw", "sgd", "muon")
"""Inner optimizers that a part of a tensor is enough for, or that gather what they need."""


class Conflict(NamedTuple):
    """Two keys that exclude each other, or settings of the form ``key = value``."""

    one: str
    other: str
    fix: str


def conflicts(job: Job) -> Iterator[Conflict]:
    """All conflicts in a job."""
    replay = job.run.mode == "replay"
    outside = _trainers_outside(job)
    if outside and replay:
        fix = "an external trainer isn't reproducible bit for bit: choose elastic"
        yield Conflict(outside, 'run.mode = "replay"', fix)
    for number, group in enumerate(job.workers):
        if group.command is not None and not group.bridged:
            name = f"workers.{number}"
            yield Conflict(f"{name}.command", f'{name}.kind = "{group.kind}"', 'choose kind = "bridged"')
    strategy = f'sync.strategy = "{job.sync.strategy}"'
    traits = job.sync.traits
    if traits.sends_gradients and job.sync.fragments > 1:
        fix = "leave sync.fragments at 1: gradients are clipped by their norm over all fragments"
        yield Conflict("sync.fragments", strategy, fix)
    if not traits.own_weights and job.rounds.warmup_rounds:
        yield Conflict("rounds.warmup_rounds", strategy, "only DiLoCo has long rounds")
    yield from _of_optimizer(job, strategy, replay)
    if job.sync.in_flight > (job.sync.fragments if job.sync.staggered else 1):
        other = f"sync.fragments = {job.sync.fragments}" if job.sync.stagger else "sync.stagger = false"
        yield Conflict("sync.in_flight", other, "set at least as many fragments, which take turns")
    if job.sync.overlaps:
        yield from _of_overlap(job, replay)
    if not traits.has_barrier:
        yield from _of_asynchrony(job, strategy, replay)
    yield from _of_model(job)
    yield from _of_own_loss(job)
    yield from _of_probe(job, replay)
    if replay and str(job.worker.attention).startswith("flash"):
        fix = "flash attention's sums have no fixed order: choose sdpa or eager"
        yield Conflict("worker.attention", "run.mode", fix)
    yield from _of_sharding(job)
    yield from _of_fused_loss(job)
    yield from _of_scaled_loss(job)
    compared = {"checkpoint.best": job.checkpoint.best, "rounds.patience": job.rounds.patience}
    for name in (name for name, given in compared.items() if given and not job.rounds.evaluate_every):
        fix = "evaluate every few rounds: a single evaluation is the best one"
        yield Conflict(name, "rounds.evaluate_every = 0", fix)
    if job.rl.algorithm is not None:
        yield from _of_rl(job, strategy)


def _of_optimizer(job: Job, strategy: str, replay: bool) -> Iterator[Conflict]:
    """Conflicts of inner optimizers."""
    inner = job.inner_optimizer
    sends_gradients = job.sync.traits.sends_gradients
    name = f'inner_optimizer.name = "{inner.name}"'
    if inner.k_aware and sends_gradients:
        fix = "leave it out: the gradient is already the mean over all workers"
        yield Conflict("inner_optimizer.k_aware", strategy, fix)
    if inner.k_aware and inner.name not in ("adamw", "muon"):
        yield Conflict("inner_optimizer.k_aware", name, "choose adamw or muon")
    if inner.stochastic_rounding and sends_gradients:
        fix = "leave it out: the server steps on weights of float32"
        yield Conflict("inner_optimizer.stochastic_rounding", strategy, fix)
    if inner.name == "adamw8bit":
        others = ((strategy, sends_gradients), ('run.mode = "replay"', replay))
        fix = "choose adamw: a state of 8 bits is neither sent nor saved"
        yield from (Conflict(name, other, fix) for other, excluded in others if excluded)


def _of_probe(job: Job, replay: bool) -> Iterator[Conflict]:
    """Conflicts of batch sizes that are tried, so that they differ between workers."""
    if not job.worker.probe_batch_size:
        return
    probe = "worker.probe_batch_size"
    on_cpu = job.worker.device == "cpu"
    others = (
        ('run.mode = "replay"', replay, "a successor may have less memory: leave it out"),
        ("rl.algorithm", job.rl.algorithm is not None, "the memory of rollouts isn't tried: leave it out"),
        ("rounds.warmup_rounds", job.rounds.warmup_rounds, "its rounds are one batch of each worker: leave one out"),
    )
    yield from (Conflict(probe, other, fix) for other, excluded, fix in others if excluded)
    for number, group in enumerate(job.worker_groups):
        name = f"workers.{number}" if job.workers else "resources.worker"
        if job.processes_in(group) > 1 and job.rl.algorithm is None:
            other = "worker.processes" if job.worker.processes else f"{name}.gpu = {group.gpu:g}"
            yield Conflict(probe, other, "sizes are tried in one process: leave it out, or set worker.processes = 1")
        if not (group.bridged or group.memory_gb or (group.gpu and not on_cpu)):
            yield Conflict(probe, f"{name}.memory_gb = 0", "give workers memory, which batches have to fit into")


def _of_sharding(job: Job) -> Iterator[Conflict]:
    """Conflicts of a model that is shared out to processes."""
    name = job.inner_optimizer.name
    others = (
        ("rl.algorithm", job.rl.algorithm is not None, "policies are held whole: leave it out"),
        (f'inner_optimizer.name = "{name}"', name not in SHARDABLE, f"choose {' or '.join(SHARDABLE)}"),
        ("worker.compile", job.worker.compile is True, "leave one of them out: compiled blocks gather no weights"),
        ("model.lora.rank", job.model.lora.rank is not None, "train all weights, or leave it out"),
        ("inner_optimizer.stochastic_rounding", job.inner_optimizer.stochastic_rounding, "leave one of them out"),
    )
    if job.worker.sharding == "full":
        yield from (Conflict("worker.sharding", other, fix) for other, excluded, fix in others if excluded)


def _of_fused_loss(job: Job) -> Iterator[Conflict]:
    """Conflicts of a loss that is fused with a language model's head."""
    compiled = job.worker.compile is True
    others = (
        ("rl.algorithm", job.rl.algorithm is not None, "policies are trained on probabilities: leave it out"),
        ("worker.compile", compiled, "leave one of them out: the head of a compiled model is part of it"),
        ('worker.sharding = "full"', job.worker.sharding == "full", "leave one of them out: FSDP2 gathers the head"),
    )
    if job.worker.fused_loss is True:
        yield from (Conflict("worker.fused_loss", other, fix) for other, excluded, fix in others if excluded)


def _of_scaled_loss(job: Job) -> Iterator[Conflict]:
    """Conflicts of losses that are scaled, because gradients have float16's range."""
    others = (
        ("rl.algorithm", job.rl.algorithm is not None, "losses of policies aren't scaled: choose bf16 or none"),
        (
            'worker.sharding = "full"',
            job.worker.sharding == "full",
            "shards' gradients aren't scaled: choose bf16 or none",
        ),
        (
            "worker.fused_loss",
            job.worker.fused_loss is True,
            "its gradients are computed before they are scaled: leave one out",
        ),
    )
    if job.worker.autocast == "fp16":
        yield from (Conflict('worker.autocast = "fp16"', other, fix) for other, excluded, fix in others if excluded)


def _of_model(job: Job) -> Iterator[Conflict]:
    """Conflicts between the sources of a model, its labels, and an adapter."""
    others = sorted((job.model.config or {}).keys() - BESIDE_REPOSITORY)
    if job.model.repository is not None and (others or job.model.config == {}):
        fix = (
            "drop model.config to fine-tune, or model.repository for random weights; labels, tokens and dtype may stay"
        )
        yield Conflict("model.repository", ".".join(["model.config", *others[:1]]), fix)
    yield from _of_factory(job)
    yield from _of_datasets(job, replay=job.run.mode == "replay")
    yield from _of_labels(job)
    yield from _of_adapters(job)
    yield from _of_quantization(job)


def _of_factory(job: Job) -> Iterator[Conflict]:
    """Conflicts of a model that a user's own function builds."""
    model = job.model
    others = (
        ("model.repository", model.repository is not None, "leave one of them out: a factory's weights are random"),
        ("model.config", model.config is not None, "leave one of them out, and give model.factory_options"),
        ("model.lora.rank", model.lora.rank is not None, "leave it out: adapters are of pretrained models"),
        ("rl.algorithm", job.rl.algorithm is not None, "policies are models of transformers: give model.repository"),
    )
    if model.factory is not None:
        yield from (Conflict("model.factory", other, fix) for other, excluded, fix in others if excluded)


def _of_own_loss(job: Job) -> Iterator[Conflict]:
    """Conflicts of a loss and of metrics that the job brings."""
    outside = _trainers_outside(job)
    policies = job.rl.algorithm is not None
    others = (
        ("worker.fused_loss", job.worker.fused_loss is True, "leave it out: the loss is computed from logits"),
        ("rl.algorithm", policies, "set rl.loss: policies are trained on rewards"),
        (outside or "", outside is not None, "leave it out: an external trainer has its own loss"),
    )
    if job.model.loss is not None:
        yield from (Conflict("model.loss", other, fix) for other, excluded, fix in others if excluded)
    if job.model.metrics and policies:
        yield Conflict("model.metrics", "rl.algorithm", "leave it out: evaluations are of rewards")
    if job.model.metrics and outside is not None:
        yield Conflict("model.metrics", outside, "leave it out: an external trainer reports a loss alone")


def _of_datasets(job: Job, replay: bool) -> Iterator[Conflict]:
    data = job.dataset
    if data.mix and (data.path or data.name):
        other = "dataset.path" if data.path else "dataset.name"
        yield Conflict("dataset.mix", other, "name all datasets in [[dataset.mix]]")
    if data.locality == "prefer":
        others = (
            ("dataset.path", data.path is not None, "all its slices are in one place: serve it in parts, under a name"),
            ("dataset.mix", bool(data.mix), "a mixture is drawn alike for all workers: leave it out"),
            ("run.mode", replay, "the order of samples would depend on machines: choose elastic"),
        )
        yield from (Conflict("dataset.locality", other, fix) for other, excluded, fix in others if excluded)


def _of_rl(job: Job, strategy: str) -> Iterator[Conflict]:
    """Conflicts of reinforcement learning."""
    rl = job.rl
    if (outside := _trainers_outside(job)) is not None and job.sync.traits.sends_gradients:
        yield Conflict(outside, strategy, "losses of external policies are means over other things: choose diloco")
    if job.worker.processes is not None:
        fix = "set rl.model_workers, and rl.data_parallel for gradients of all: a worker has processes of one kind"
        yield Conflict("worker.processes", "rl.algorithm", fix)
    if job.worker.gradient_checkpointing:
        yield Conflict("worker.gradient_checkpointing", "rl.algorithm", "a policy is in evaluation mode: leave it out")
    if job.sync.traits.sends_gradients:
        yield from _of_synchronous_rl(rl, strategy)
    if rl.is_asynchronous and rl.model_workers == 1:
        yield Conflict("rl.staleness", "rl.model_workers = 1", "set rl.model_workers to 2 or more: others respond")
    if rl.kl and rl.reference == "none":
        yield Conflict("rl.kl", 'rl.reference = "none"', "set rl.reference to initial or round, or leave rl.kl at 0")
    if not rl.has_critic and rl.group_size == 1:
        fix = "take groups of two responses or more, which are each other's baseline; or rl.algorithm ppo"
        yield Conflict("rl.group_size", f"rl.advantage = {rl.recipe.advantage!r}", fix)
    yield from _of_rewards(rl)
    yield from _of_data_parallelism(rl)
    engine = f'rl.generation.engine = "{rl.generation.engine}"'
    if rl.generation.engine != "native" and job.run.mode == "replay":
        yield Conflict(engine, 'run.mode = "replay"', "only the native one is reproducible to the bit: choose elastic")
    if rl.generation.engine == "continuous" and job.worker.autocast not in ("none", "auto"):
        yield Conflict(engine, "worker.autocast", "leave that out, or give the weights 16 bits: model.config.dtype")
    if rl.generation.engine == "server":
        yield from _of_generation_servers(job)


def _of_synchronous_rl(rl: RL, strategy: str) -> Iterator[Conflict]:
    """Conflicts of steps whose prompts are divided among workers, and which are those of one worker on all of them."""
    one_step = "leave it at 1: a round is one step of the server"
    part = "each worker sees a part of the prompts"
    whole = rl.recipe.advantage in ("batch_std", "gae")
    others = (
        ("rl.epochs", rl.epochs > 1, one_step),
        ("rl.minibatches", rl.minibatches > 1, one_step),
        ("rl.staleness", rl.is_asynchronous, "leave it at 0: a round is one step of the server"),
        ("rl.advantage" if rl.advantage else "rl.algorithm", whole, f"choose grpo, dapo or another of groups: {part}"),
        ("rl.kl_target", rl.kl_target is not None, f"leave it out: {part}, and would adapt a coefficient of its own"),
        ('rl.reference = "average"', rl.reference == "average", "choose initial: only steps of a worker are averaged"),
    )
    yield from (Conflict(name, strategy, fix) for name, wrong, fix in others if wrong)


def _of_rewards(rl: RL) -> Iterator[Conflict]:
    """Conflicts of reward functions, their weights and their tasks."""
    functions = "rl.reward.functions"
    tasks = rl.reward.tasks
    if rl.reward.weights and len(rl.reward.weights) != len(rl.reward.functions):
        fix = f"give {len(rl.reward.functions)} weights, one for each function"
        yield Conflict("rl.reward.weights", functions, fix)
    for number, task in enumerate(tasks):
        key = f"rl.reward.tasks.{number}"
        if not task.functions or set(task.functions) - set(rl.reward.functions):
            yield Conflict(f"{key}.functions", functions, "give a task one or more of the functions")
        if not task.name or task.name in (other.name for other in tasks[:number]):
            yield Conflict(f"{key}.name", "rl.reward.tasks", "name each task once")


def _of_data_parallelism(rl: RL) -> Iterator[Conflict]:
    """Conflicts of gradients that are computed in parts, of which a step has one set."""
    others = (
        ("rl.epochs", rl.epochs > 1, "leave it at 1: gradients are of the weights that responses were made with"),
        ("rl.minibatches", rl.minibatches > 1, "leave it at 1: parts are of the whole batch"),
        ("rl.staleness", rl.staleness > 0, "leave one of them out: rollout workers have older weights"),
        (f"rl.advantage = {rl.recipe.advantage!r}", rl.has_critic, "choose an algorithm without a critic"),
    )
    yield from (Conflict("rl.data_parallel", name, fix) for name, wrong, fix in others if wrong and rl.data_parallel)


def _of_generation_servers(job: Job) -> Iterator[Conflict]:
    """Conflicts of servers that generate."""
    server = job.rl.generation.server
    engine = 'rl.generation.engine = "server"'
    if job.rl.model_workers > 1:
        yield Conflict("rl.model_workers", engine, "leave it at 1: the server generates beside the worker")
    if job.model.lora.rank is not None:
        fix = "train all weights, or generate natively: adapters aren't handed over"
        yield Conflict("model.lora.rank", engine, fix)
    if (server.command is None) == (not server.urls):
        yield Conflict("rl.generation.server.command", "rl.generation.server.urls", "give one of them")
    elif server.urls and len(set(server.urls)) < job.num_workers:
        fix = f"give {job.num_workers} different addresses: each worker has weights of its own between exchanges"
        yield Conflict("rl.generation.server.urls", "workers" if job.workers else "resources.num_workers", fix)


def _of_adapters(job: Job) -> Iterator[Conflict]:
    """Conflicts of adapters, whose frozen base model has to be the same for all workers."""
    if job.model.lora.rank is None:
        return
    if job.model.repository is None and job.model.config is not None:
        fix = "name a pretrained model in model.repository, or drop the adapter"
        yield Conflict("model.lora.rank", "model.config", fix)
    if (outside := _trainers_outside(job)) is not None:
        fix = "an external trainer's base model can't be proved: train all weights, or have Ray start the workers"
        yield Conflict("model.lora.rank", outside, fix)


def _of_quantization(job: Job) -> Iterator[Conflict]:
    """Conflicts of quantized weights, which aren't trained."""
    model = job.model
    others = (
        ("model.lora.rank = none", model.lora.rank is None, "set it: only frozen weights below a new adapter may be"),
        (f'model.type = "{model.type}"', model.type != "causal-lm", "leave it out: other tasks train their head"),
        ("rl.algorithm", job.rl.algorithm is not None, "leave it out: policies have whole weights"),
        ("worker.compile", job.worker.compile is True, "leave one of them out"),
    )
    if model.quantization is not None:
        yield from (Conflict("model.quantization", other, fix) for other, excluded, fix in others if excluded)


def _of_labels(job: Job) -> Iterator[Conflict]:
    """Conflicts between the number of labels and their names."""
    told = job.model.config or {}
    for name in ("id2label", "label2id"):
        names = told.get(name)
        if isinstance(names, dict) and told.get("num_labels", len(names)) != len(names):
            yield Conflict("model.config.num_labels", f"model.config.{name}", "give as many, or leave num_labels out")


def _trainers_outside(job: Job) -> str | None:
    """Key that gives the job trainers outside of Ray; None if it has none."""
    bridged = (f"workers.{number}.kind" for number, group in enumerate(job.workers) if group.bridged)
    return next(bridged, "bridge.commands" if job.bridge.commands else None)


def _of_overlap(job: Job, replay: bool) -> Iterator[Conflict]:
    """Conflicts of strategies in which workers have weights of their own."""
    name = "delay_steps" if job.sync.delay_steps else "mixing" if job.sync.mixing else "fragments"
    way_out = "; or set sync.stagger = false" if name == "fragments" else ""
    outside = _trainers_outside(job)
    others = (
        ("run.mode", replay, "workers' own weights aren't saved: choose elastic"),
        ("sync.strategy", not job.sync.traits.own_weights, "only DiLoCo workers have weights of their own"),
        (outside or "", outside is not None, "an external trainer starts each round from the global weights"),
    )
    yield from (Conflict(f"sync.{name}", other, why + way_out) for other, excluded, why in others if excluded)


def _of_asynchrony(job: Job, strategy: str, replay: bool) -> Iterator[Conflict]:
    """Conflicts of options that need the deltas or weights of all workers at the same time."""
    sync = job.sync
    outer = job.outer_optimizer.name
    others = (
        ("run.mode", replay, "the order of arrival isn't reproducible: choose elastic"),
        ("sync.downward_codec", sync.downward_codec != "fp32", "workers have different weights: choose fp32"),
        ("sync.quorum", sync.quorum is not None, "deltas are merged as they arrive: leave it out"),
        ("sync.merge", sync.merge != "mean", "a single delta has no median: choose mean"),
        (
            "sync.weighting",
            sync.weighting not in ("samples", "uniform"),
            "deltas are merged one by one: choose samples",
        ),
        (
            "outer_optimizer.name",
            outer not in ("nesterov", "average"),
            "only momentum can be delayed: choose nesterov or average",
        ),
    )
    yield from (Conflict(name, strategy, fix) for name, wrong, fix in others if wrong)
