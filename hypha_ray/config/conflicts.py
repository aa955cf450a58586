"""Keys that exclude each other, with the fix for each pair."""

from __future__ import annotations

from collections.abc import Iterator

from hypha_ray.config.exchange_conflicts import (
    Conflict,
    exchange_conflicts,
    external_trainers_key,
    goal_conflicts,
    growth_conflicts,
    strategy_text,
    synchronous_rl_conflicts,
)
from hypha_ray.config.keys import BESIDE_REPOSITORY
from hypha_ray.config.rl import ENVIRONMENT, RL
from hypha_ray.config.schema import Job
from hypha_ray.texts import counted

__all__ = ["SHARDABLE", "Conflict", "conflicts"]

SHARDABLE = ("adamw", "sgd", "muon")
"""Inner optimizers that need only a part of each tensor, or that gather what they need."""
_FOR_GPUS = ("flex_attention", "flash_attention_2", "flash_attention_3")
_REPLAY = 'run.mode = "replay"'
_LEAVE_ONE_OUT = "leave one of them out"


def conflicts(job: Job) -> Iterator[Conflict]:
    """All conflicts in a job."""
    is_replay = job.run.mode == "replay"
    external_key = external_trainers_key(job)
    if external_key and is_replay:
        yield Conflict(external_key, _REPLAY, "an external trainer isn't reproducible bit for bit: choose elastic")
    for number, group in enumerate(job.workers):
        if group.command is not None and not group.bridged:
            kind_key = f'workers.{number}.kind = "{group.kind}"'
            yield Conflict(f"workers.{number}.command", kind_key, 'choose kind = "bridged"')
    if job.rounds.epochs is not None and "update_rounds" in job.rounds.model_fields_set:
        yield Conflict(
            "rounds.epochs", "rounds.update_rounds", f"{_LEAVE_ONE_OUT}: epochs make as many rounds as needed"
        )
    yield from goal_conflicts(job, external_key)
    yield from exchange_conflicts(job)
    yield from _of_optimizer(job)
    yield from _of_model(job)
    yield from _of_own_loss(job)
    yield from _of_computation(job, is_replay)
    if not job.rounds.evaluate_every:
        yield from _of_single_evaluation(job)
    if job.rl.algorithm is not None:
        yield from _of_rl(job)
    if job.preference.loss is not None:
        yield from _of_preferences(job)
    yield from growth_conflicts(job)


def _of_optimizer(job: Job) -> Iterator[Conflict]:
    """Conflicts of inner optimizers."""
    inner = job.inner_optimizer
    strategy = strategy_text(job)
    sends_gradients = job.sync.traits.sends_gradients
    if inner.k_aware and sends_gradients:
        fix = "leave it out: the gradient is already the mean over all workers"
        yield Conflict("inner_optimizer.k_aware", strategy, fix)
    optimizer_key = f'inner_optimizer.name = "{inner.name}"'
    if inner.k_aware and inner.name not in ("adamw", "muon"):
        yield Conflict("inner_optimizer.k_aware", optimizer_key, "choose adamw or muon")
    if inner.stochastic_rounding and sends_gradients:
        fix = "leave it out: the server steps on weights of float32"
        yield Conflict("inner_optimizer.stochastic_rounding", strategy, fix)
    if inner.name == "adamw8bit":
        fix = "choose adamw: a state of 8 bits is neither sent nor saved"
        if sends_gradients:
            yield Conflict(optimizer_key, strategy, fix)
        if job.run.mode == "replay":
            yield Conflict(optimizer_key, _REPLAY, fix)


def _of_computation(job: Job, is_replay: bool) -> Iterator[Conflict]:
    """Conflicts of the ways in which workers compute."""
    worker = job.worker
    if worker.probe_batch_size:
        yield from _of_probe(job, is_replay)
    if is_replay and str(worker.attention).startswith("flash"):
        fix = "flash attention's sums have no fixed order: choose sdpa or eager"
        yield Conflict("worker.attention", "run.mode", fix)
    if worker.attention in _FOR_GPUS and job.rl.algorithm is None:
        yield from _of_attention(job)
    if worker.sharding == "full":
        yield from _of_sharding(job)
    if worker.fused_loss is True:
        yield from _of_fused_loss(job)
    if worker.compile == "layers" and worker.gradient_checkpointing:
        fix = "compile the whole model, or leave one of them out: layers are computed again as they are"
        yield Conflict('worker.compile = "layers"', "worker.gradient_checkpointing", fix)
    if worker.autocast == "fp16":
        yield from _of_scaled_loss(job)


def _of_attention(job: Job) -> Iterator[Conflict]:
    """Conflicts of an implementation of attention that CPUs can't train with."""
    fix = "CPUs can't train with it: give each worker a GPU, or choose sdpa or eager"
    if job.worker.device == "cpu":
        yield Conflict("worker.attention", "worker.device", fix)
    for number, group in enumerate(job.worker_groups):
        if not (group.bridged or group.gpu):
            table = f"workers.{number}" if job.workers else "resources.worker"
            yield Conflict("worker.attention", f"{table}.gpu = 0", fix)


def _of_probe(job: Job, is_replay: bool) -> Iterator[Conflict]:
    """Conflicts of batch sizes that are tried, so that they differ between workers."""
    probe = "worker.probe_batch_size"
    if is_replay:
        yield Conflict(probe, _REPLAY, "a successor may have less memory: leave it out")
    if job.rl.algorithm is not None:
        yield Conflict(probe, "rl.algorithm", "the memory of rollouts isn't tried: leave it out")
    if job.rounds.warmup_rounds:
        yield Conflict(probe, "rounds.warmup_rounds", "its rounds are one batch of each worker: leave one out")
    is_on_cpu = job.worker.device == "cpu"
    for number, group in enumerate(job.worker_groups):
        table = f"workers.{number}" if job.workers else "resources.worker"
        if job.processes_in(group) > 1 and job.rl.algorithm is None:
            cause = "worker.processes" if job.worker.processes else f"{table}.gpu = {group.gpu:g}"
            yield Conflict(probe, cause, "sizes are tried in one process: leave it out, or set worker.processes = 1")
        on_gpu = group.gpu and not is_on_cpu
        if not (group.bridged or group.memory_gb or on_gpu):
            yield Conflict(probe, f"{table}.memory_gb = 0", "give workers memory, which batches have to fit into")


def _of_sharding(job: Job) -> Iterator[Conflict]:
    """Conflicts of a model that is shared out to processes."""
    sharding = "worker.sharding"
    inner = job.inner_optimizer
    if job.rl.algorithm is not None:
        yield Conflict(sharding, "rl.algorithm", "policies are held whole: leave it out")
    if inner.name not in SHARDABLE:
        yield Conflict(sharding, f'inner_optimizer.name = "{inner.name}"', f"choose {' or '.join(SHARDABLE)}")
    if job.worker.compiles:
        yield Conflict(sharding, "worker.compile", f"{_LEAVE_ONE_OUT}: compiled blocks gather no weights")
    if job.model.lora.rank is not None:
        yield Conflict(sharding, "model.lora.rank", "train all weights, or leave it out")
    if inner.stochastic_rounding:
        yield Conflict(sharding, "inner_optimizer.stochastic_rounding", _LEAVE_ONE_OUT)


def _of_fused_loss(job: Job) -> Iterator[Conflict]:
    """Conflicts of a loss that is fused with a language model's head."""
    fused_loss = "worker.fused_loss"
    if job.rl.algorithm is not None:
        yield Conflict(fused_loss, "rl.algorithm", "policies are trained on probabilities: leave it out")
    if job.worker.compiles:
        yield Conflict(fused_loss, "worker.compile", f"{_LEAVE_ONE_OUT}: the head of a compiled model is part of it")
    if job.worker.sharding == "full":
        yield Conflict(fused_loss, 'worker.sharding = "full"', f"{_LEAVE_ONE_OUT}: FSDP2 gathers the head")


def _of_scaled_loss(job: Job) -> Iterator[Conflict]:
    """Conflicts of losses that are scaled, because gradients have float16's range."""
    autocast = 'worker.autocast = "fp16"'
    if job.rl.data_parallel:
        fix = "gradients of other model workers aren't scaled: choose bf16 or none"
        yield Conflict(autocast, "rl.data_parallel", fix)


def _of_single_evaluation(job: Job) -> Iterator[Conflict]:
    """Conflicts of settings that compare evaluations, if there is only one."""
    fix = "evaluate every few rounds: a single evaluation is the best one"
    if job.checkpoint.best:
        yield Conflict("checkpoint.best", "rounds.evaluate_every = 0", fix)
    if job.rounds.patience:
        yield Conflict("rounds.patience", "rounds.evaluate_every = 0", fix)


def _of_model(job: Job) -> Iterator[Conflict]:
    """Conflicts between the sources of a model, its labels, and an adapter."""
    model = job.model
    if model.repository is not None and model.config is not None:
        excluded_keys = sorted(model.config.keys() - BESIDE_REPOSITORY)
        if excluded_keys or not model.config:
            first_key = ".".join(["model.config", *excluded_keys[:1]])
            fix = (
                "drop model.config to fine-tune, or model.repository for random weights; "
                "labels, tokens and dtype may stay"
            )
            yield Conflict("model.repository", first_key, fix)
    if model.factory is not None:
        yield from _of_factory(job)
    yield from _of_datasets(job)
    yield from _of_labels(job)
    if model.lora.rank is not None:
        yield from _of_adapters(job)
    if model.quantization is not None:
        yield from _of_quantization(job)


def _of_factory(job: Job) -> Iterator[Conflict]:
    """Conflicts of a model that a user's own function builds."""
    factory = "model.factory"
    model = job.model
    if model.repository is not None:
        yield Conflict(factory, "model.repository", f"{_LEAVE_ONE_OUT}: a factory's weights are random")
    if model.config is not None:
        yield Conflict(factory, "model.config", f"{_LEAVE_ONE_OUT}, and give model.factory_options")
    if model.lora.rank is not None:
        yield Conflict(factory, "model.lora.rank", "leave it out: adapters are of pretrained models")
    if job.rl.algorithm is not None:
        yield Conflict(factory, "rl.algorithm", "policies are models of transformers: give model.repository")


def _of_own_loss(job: Job) -> Iterator[Conflict]:
    """Conflicts of a loss and of metrics that the job brings."""
    loss = "model.loss"
    metrics = "model.metrics"
    trains_policies = job.rl.algorithm is not None
    external_key = external_trainers_key(job)
    if job.model.loss is not None:
        if job.worker.fused_loss is True:
            yield Conflict(loss, "worker.fused_loss", "leave it out: the loss is computed from logits")
        if trains_policies:
            yield Conflict(loss, "rl.algorithm", "set rl.loss: policies are trained on rewards")
        if external_key is not None:
            yield Conflict(loss, external_key, "leave it out: an external trainer has its own loss")
    if job.model.metrics and trains_policies:
        yield Conflict(metrics, "rl.algorithm", "leave it out: evaluations are of rewards")
    if job.model.metrics and external_key is not None:
        yield Conflict(metrics, external_key, "leave it out: an external trainer reports a loss alone")


def _of_datasets(job: Job) -> Iterator[Conflict]:
    """Conflicts between the sources of samples, and with their order."""
    dataset = job.dataset
    if dataset.mix and (dataset.path or dataset.name):
        source = "dataset.path" if dataset.path else "dataset.name"
        yield Conflict("dataset.mix", source, "name all datasets in [[dataset.mix]]")
    if dataset.locality == "prefer":
        locality = "dataset.locality"
        if dataset.path is not None:
            fix = "all its slices are in one place: serve it in parts, under a name"
            yield Conflict(locality, "dataset.path", fix)
        if dataset.mix:
            yield Conflict(locality, "dataset.mix", "a mixture is drawn alike for all workers: leave it out")
        if job.run.mode == "replay":
            yield Conflict(locality, "run.mode", "the order of samples would depend on machines: choose elastic")


def _of_labels(job: Job) -> Iterator[Conflict]:
    """Conflicts between the number of labels and their names."""
    config = job.model.config or {}
    for name in ("id2label", "label2id"):
        labels = config.get(name)
        if isinstance(labels, dict) and config.get("num_labels", len(labels)) != len(labels):
            yield Conflict("model.config.num_labels", f"model.config.{name}", "give as many, or leave num_labels out")


def _of_adapters(job: Job) -> Iterator[Conflict]:
    """Conflicts of adapters, whose frozen base model has to be the same for all workers."""
    if job.model.repository is None and job.model.config is not None:
        fix = "name a pretrained model in model.repository, or drop the adapter"
        yield Conflict("model.lora.rank", "model.config", fix)
    external_key = external_trainers_key(job)
    if external_key is not None:
        fix = "an external trainer's base model can't be proved: train all weights, or have Ray start the workers"
        yield Conflict("model.lora.rank", external_key, fix)


def _of_quantization(job: Job) -> Iterator[Conflict]:
    """Conflicts of quantized weights, which aren't trained."""
    quantization = "model.quantization"
    model = job.model
    if model.lora.rank is None:
        fix = "set it: only frozen weights below a new adapter may be"
        yield Conflict(quantization, "model.lora.rank = none", fix)
    if model.type != "causal-lm":
        yield Conflict(quantization, f'model.type = "{model.type}"', "leave it out: other tasks train their head")
    if job.rl.algorithm is not None:
        yield Conflict(quantization, "rl.algorithm", "leave it out: policies have whole weights")
    if job.worker.compiles:
        yield Conflict(quantization, "worker.compile", _LEAVE_ONE_OUT)


def _of_rl(job: Job) -> Iterator[Conflict]:
    """Conflicts of reinforcement learning."""
    rl = job.rl
    sends_gradients = job.sync.traits.sends_gradients
    external_key = external_trainers_key(job)
    if external_key is not None and sends_gradients:
        fix = "losses of external policies are means over other things: choose diloco"
        yield Conflict(external_key, strategy_text(job), fix)
    if external_key is not None and rl.environment is not None:
        fix = "an external trainer plays no episodes: have Ray start the workers"
        yield Conflict("rl.environment", external_key, fix)
    if job.worker.processes is not None:
        fix = "set rl.model_workers, and rl.data_parallel for gradients of all: a worker has processes of one kind"
        yield Conflict("worker.processes", "rl.algorithm", fix)
    if job.worker.gradient_checkpointing:
        yield Conflict("worker.gradient_checkpointing", "rl.algorithm", "a policy is in evaluation mode: leave it out")
    if sends_gradients:
        yield from synchronous_rl_conflicts(rl, strategy_text(job))
    if rl.is_asynchronous and rl.model_workers == 1 and not rl.generators:
        fix = "set rl.model_workers to 2 or more, or rl.generators: others respond"
        yield Conflict("rl.staleness", "rl.model_workers = 1", fix)
    if rl.generators:
        yield from _of_generators(job)
    if rl.kl and rl.reference == "none":
        yield Conflict("rl.kl", 'rl.reference = "none"', "set rl.reference to initial or round, or leave rl.kl at 0")
    if not rl.has_critic and rl.group_size == 1:
        fix = "take groups of two responses or more, which are each other's baseline; or rl.algorithm ppo"
        yield Conflict("rl.group_size", _advantage(rl), fix)
    if rl.mask_truncated and rl.has_critic:
        fix = "leave it out: with a critic, a response that is cut off has the reward that it gets"
        yield Conflict("rl.mask_truncated", _advantage(rl), fix)
    if rl.refill:
        yield from _of_refill(rl)
    yield from _of_rewards(rl)
    if rl.data_parallel:
        yield from _of_data_parallelism(rl)
    yield from _of_generation(job)


def _of_preferences(job: Job) -> Iterator[Conflict]:
    """Conflicts of training on preferences."""
    loss = "preference.loss"
    worker = job.worker
    if job.rl.algorithm is not None:
        yield Conflict(loss, "rl.algorithm", _LEAVE_ONE_OUT)
    if job.model.loss is not None:
        yield Conflict(loss, "model.loss", f"{_LEAVE_ONE_OUT}: a loss of preferences compares answers")
    if job.model.metrics:
        yield Conflict(loss, "model.metrics", "leave it out: evaluations are of rewards")
    if job.model.type != "causal-lm":
        yield Conflict(loss, f'model.type = "{job.model.type}"', "leave it out: answers are those of causal-lm models")
    if job.model.input_names is not None:
        yield Conflict(loss, "model.input_names", "leave it out: tensors are those of preferences")
    if worker.fused_loss is True:
        yield Conflict(loss, "worker.fused_loss", "leave it out: the loss is computed from probabilities of tokens")
    if worker.compiles:
        yield Conflict(loss, "worker.compile", "leave it out: preferences are computed as they are")
    if worker.sharding == "full" and job.preference.uses_reference and job.preference.reference == "initial":
        fix = 'prepare the dataset with --reference MODEL, and set preference.reference = "dataset"'
        yield Conflict('preference.reference = "initial"', 'worker.sharding = "full"', fix)
    if job.preference.loss == "kto" and job.rounds.max_batch_size == 1:
        fix = "take batches of two samples or more: the divergence is a mean over a batch"
        yield Conflict('preference.loss = "kto"', "rounds.max_batch_size = 1", fix)
    external_key = external_trainers_key(job)
    if external_key is not None:
        yield Conflict(loss, external_key, "have Ray start the workers: an external trainer has its own loss")


def _advantage(rl: RL) -> str:
    advantage = rl.recipe.advantage
    return f"rl.advantage = {advantage!r}"


def _of_generators(job: Job) -> Iterator[Conflict]:
    """Conflicts of machines that only respond."""
    key = "rl.generators"
    rl = job.rl
    if rl.model_workers > 1:
        yield Conflict(key, "rl.model_workers", "leave that at 1: generators respond")
    if rl.refill:
        yield Conflict(key, "rl.refill", f"{_LEAVE_ONE_OUT}: generators respond to whole batches")
    if rl.generation.engine == "server":
        yield Conflict(key, 'rl.generation.engine = "server"', f"{_LEAVE_ONE_OUT}: the server generates for its worker")
    if job.sync.traits.sends_gradients:
        yield Conflict(key, strategy_text(job), "leave it at 0, or choose diloco")
    generator = job.resources.generator
    kinds = {(group.cpu, group.gpu, group.gpu_type) for group in job.worker_groups}
    if job.run.mode == "replay" and kinds != {(generator.cpu, generator.gpu, generator.gpu_type)}:
        fix = "give generators the workers' cpu, gpu and gpu_type: others may respond in other bits"
        yield Conflict("resources.generator", _REPLAY, fix)


def _of_refill(rl: RL) -> Iterator[Conflict]:
    """Conflicts of prompts in the place of those whose groups have no signal."""
    refill = "rl.refill"
    if not rl.recipe.drop_equal_groups:
        fix = "set it to true: only groups that are left out are replaced"
        yield Conflict(refill, "rl.drop_equal_groups = false", fix)
    if rl.is_asynchronous:
        yield Conflict(refill, "rl.staleness", f"{_LEAVE_ONE_OUT}: batches ahead have their prompts already")
    if rl.has_critic:
        yield Conflict(refill, _advantage(rl), "choose an algorithm of groups")


def _of_rewards(rl: RL) -> Iterator[Conflict]:
    """Conflicts of reward functions, their weights and their tasks."""
    key = "rl.reward.functions"
    functions = rl.reward.functions
    if rl.environment is not None and ENVIRONMENT not in functions:
        fix = f'put "{ENVIRONMENT}" into {key}: with a weight of 0 it is recorded alone'
        yield Conflict("rl.environment", key, fix)
    if rl.environment is None and ENVIRONMENT in functions:
        yield Conflict(key, "no rl.environment", f'name one, or leave "{ENVIRONMENT}" out')
    if rl.reward.weights and len(rl.reward.weights) != len(functions):
        fix = f"give {counted(len(functions), 'weight')}, one for each function"
        yield Conflict("rl.reward.weights", key, fix)
    names = set[str]()
    for number, task in enumerate(rl.reward.tasks):
        table = f"rl.reward.tasks.{number}"
        if not task.functions or set(task.functions) - set(functions):
            yield Conflict(f"{table}.functions", key, "give a task one or more of the functions")
        if not task.name or task.name in names:
            yield Conflict(f"{table}.name", "rl.reward.tasks", "name each task once")
        names.add(task.name)


def _of_data_parallelism(rl: RL) -> Iterator[Conflict]:
    """Conflicts of gradients that are computed in parts, of which a step has one set."""
    data_parallel = "rl.data_parallel"
    if rl.epochs > 1:
        fix = "leave it at 1: gradients are of the weights that responses were made with"
        yield Conflict(data_parallel, "rl.epochs", fix)
    if rl.minibatches > 1:
        yield Conflict(data_parallel, "rl.minibatches", "leave it at 1: parts are of the whole batch")
    if rl.staleness > 0:
        yield Conflict(data_parallel, "rl.staleness", f"{_LEAVE_ONE_OUT}: rollout workers have older weights")
    if rl.has_critic:
        yield Conflict(data_parallel, _advantage(rl), "choose an algorithm without a critic")


def _of_generation(job: Job) -> Iterator[Conflict]:
    """Conflicts of engines that generate."""
    name = job.rl.generation.engine
    engine_key = f'rl.generation.engine = "{name}"'
    if name != "native" and job.run.mode == "replay":
        yield Conflict(engine_key, _REPLAY, "only the native one is reproducible to the bit: choose elastic")
    if name == "continuous" and job.worker.autocast not in ("none", "auto"):
        yield Conflict(engine_key, "worker.autocast", "leave that out, or give the weights 16 bits: model.config.dtype")
    if name != "server":
        return
    server = job.rl.generation.server
    if job.rl.model_workers > 1:
        yield Conflict("rl.model_workers", engine_key, "leave it at 1: the server generates beside the worker")
    if job.model.lora.rank is not None:
        fix = "train all weights, or generate natively: adapters aren't handed over"
        yield Conflict("model.lora.rank", engine_key, fix)
    if (server.command is None) == (not server.urls):
        yield Conflict("rl.generation.server.command", "rl.generation.server.urls", "give one of them")
    elif server.urls and len(set(server.urls)) < job.num_workers:
        fix = f"give {job.num_workers} different addresses: each worker has weights of its own between exchanges"
        count_key = "workers" if job.workers else "resources.num_workers"
        yield Conflict("rl.generation.server.urls", count_key, fix)
