"""Other names of keys: of the training guide, of hypha, the system that the guide describes, and of other tools."""

from __future__ import annotations

from collections.abc import Sequence

from hypha_ray.config.keys import CONFIG, LABELS, KeyPath, free_table

GUIDE: KeyPath = ("scheduler", "job")
"""The table that contains all tables of a job in the guide."""

CONTAINERS = frozenset([(), GUIDE[:1], GUIDE])
"""Tables that contain only tables of the job file."""

GUIDE_NAMES: dict[KeyPath, KeyPath] = {
    ("type",): ("sync", "strategy"),
    ("dataset_name",): ("dataset", "name"),
    ("scheduler", "status_bridge"): ("telemetry", "status_bridge"),
}
RENAMED: dict[KeyPath, KeyPath] = GUIDE_NAMES | {
    ("status_bridge",): ("telemetry", "status_bridge"),
    ("dataset", "dataset"): ("dataset", "name"),
    ("rounds", "avg_samples_between_updates"): ("rounds", "samples_between_updates"),
    ("resources", "worker", "memory"): ("resources", "worker", "memory_gb"),
    ("resources", "parameter_server", "memory"): ("resources", "parameter_server", "memory_gb"),
}

_PREPARED = "a dataset is preprocessed when it is prepared"
_NO_STORAGE = "Ray doesn't lease disk space"
IGNORED: dict[KeyPath, str] = {
    ("executors",): "a Ray worker needs no executor command",
    ("model", "filenames"): "transformers knows which files it needs",
    ("preprocessor", "filenames"): "transformers knows which files it needs",
    ("preprocessor", "type"): _PREPARED,
    ("preprocessor", "input_names"): _PREPARED,
    ("resources", "worker", "storage"): _NO_STORAGE,
    ("resources", "parameter_server", "storage"): _NO_STORAGE,
}


def without_guide_table(path: Sequence[str]) -> KeyPath:
    """A key as it would be written outside the guide's table."""
    path = tuple(path)
    if path[: len(GUIDE)] == GUIDE:
        return path[len(GUIDE) :]
    return path


def canonical(path: Sequence[str]) -> KeyPath:
    """The schema's name of a key; unknown names are returned unchanged, with ``_`` for ``-``."""
    written = without_guide_table(path)
    name = tuple(part.replace("-", "_") for part in written)
    table = free_table(name)
    if table is not None:  # Keys below it are defined elsewhere, and may have a hyphen.
        name = table + written[len(table) :]
    if name[:1] == CONFIG[:1] and name[1:2] and name[1] in LABELS:
        return (*CONFIG, *name[1:])
    return RENAMED.get(name, name)


_KEYS = {
    "run.name": "name run_name experiment experiment_name project project_name wandb_name wandb_run_name",
    "run.dir": "out output out_dir output_dir save_dir logging_dir log_dir work_dir",
    "run.seed": "seed random_seed data_seed",
    "run.notes": "notes description comment",
    "run.tags": "tags wandb_tags",
    "model.repository": "model model_name model_id model_path model_name_or_path base_model pretrained checkpoint_path",
    "model.trust_remote_code": "trust_remote_code",
    "model.lora.rank": "lora lora_r lora_rank rank use_peft peft use_lora finetuning_type adapter",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "lora_target_modules target_modules lora_target lora_targets lora_target_linear",
    "model.quantization": "load_in_4bit load_in_8bit quantize bits",
    "preprocessor.repository": "tokenizer tokenizer_name processor tokenizer_name_or_path tokenizer_path"
    " tokenizer_type",
    "dataset.path": "data dataset data_dir data_path datasets dataset_name dataset_path train_file train_data"
    " train_files data_files dataset_prepared_path",
    "rounds.update_rounds": "steps max_steps num_steps iterations rounds total_steps total_training_steps",
    "rounds.epochs": "epochs num_epochs num_train_epochs max_epochs total_epochs n_epochs",
    "rounds.max_batch_size": "batch_size train_batch_size per_device_train_batch_size micro_batch_size mini_batch_size"
    " global_batch_size total_batch_size micro_bs per_gpu_train_batch_size",
    "rounds.accumulation": "gradient_accumulation_steps grad_accum accumulate_grad_batches",
    "rounds.samples_between_updates": "local_steps inner_steps sync_every",
    "rounds.evaluate_every": "eval_steps eval_every eval_interval evaluation_strategy eval_strategy test_freq"
    " evals_per_epoch run_val_every_n_steps val_check_interval",
    "inner_optimizer.learning_rate": "lr learning_rate inner_lr peak_lr",
    "inner_optimizer.name": "optim optimizer",
    "inner_optimizer.weight_decay": "weight_decay wd",
    "inner_optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "inner_optimizer.epsilon": "adam_epsilon eps",
    "inner_optimizer.warmup_steps": "warmup warmup_steps num_warmup_steps warmup_ratio lr_warmup_steps",
    "inner_optimizer.schedule": "scheduler lr_scheduler lr_scheduler_type lr_schedule",
    "inner_optimizer.clip_norm": "max_grad_norm grad_clip gradient_clip_val clip clip_grad_norm",
    "outer_optimizer.learning_rate": "outer_lr outer_learning_rate",
    "outer_optimizer.momentum": "momentum outer_momentum",
    "sync.codec": "compression codec should_quantize",
    "resources.num_workers": "workers nodes num_nodes nnodes num_processes world_size num_workers num_replicas"
    " num_replica_groups",
    "resources.worker.gpu": "gpu gpus num_gpus n_gpus ngpus nproc_per_node devices n_gpus_per_node gpus_per_node",
    "resources.worker.cpu": "cpu cpus num_cpus",
    "worker.autocast": "bf16 fp16 amp dtype precision mixed_precision torch_dtype",
    "worker.device": "device no_cuda use_cpu",
    "worker.attention": "attn_implementation attn flash_attn flash_attention use_flash_attention_2 xformers_attention"
    " sdp_attention attention",
    "worker.sharding": "deepspeed ds_config fsdp zero_stage zero fsdp_config",
    "worker.compile": "compile torch_compile torch_compile_backend",
    "worker.gradient_checkpointing": "gradient_checkpointing activation_checkpointing enable_activation_checkpointing"
    " enable_gradient_checkpointing gradient_checkpointing_kwargs",
    "checkpoint.every_rounds": "save_steps save_every save_interval save_strategy save_freq saves_per_epoch"
    " checkpoint_interval",
    "checkpoint.keep": "save_total_limit keep_checkpoints",
    "checkpoint.push": "push_to_hub hub_model_id",
    "preference.loss": "loss_type pref_loss dpo_loss_type",
    "preference.reference": "ref_model reference_model precompute_ref_log_probs reference_free",
    "rl.algorithm": "adv_estimator advantage_estimator",
    "rl.group_size": "num_generations num_samples_per_prompt n_samples_per_prompt rollout_n rollouts_per_example"
    " n_rollouts",
    "rl.minibatches": "num_minibatches num_mini_batches ppo_mini_batch_size",
    "rl.kl": "kl_coef init_kl_coef kl_loss_coef kl_coeff",
    "rl.generation.engine": "use_vllm vllm vllm_mode rollout_name",
    "rl.generation.max_response_tokens": "max_completion_length max_new_tokens max_response_length max_tokens"
    " response_length",
    "rl.reward.functions": "reward_funcs reward_functions reward_func reward_fn reward_function custom_reward_function",
    "rl.reward.weights": "reward_weights",
    "run.mode": "full_determinism deterministic use_deterministic_algorithms",
    "model.revision": "model_revision",
    "model.lora.modules_to_save": "lora_modules_to_save",
    "model.lora.dora": "use_dora peft_use_dora",
    "model.lora.rslora": "use_rslora peft_use_rslora",
    "rounds.patience": "early_stopping_patience early_stopping",
    "rounds.min_delta": "early_stopping_threshold",
    "inner_optimizer.schedule_options": "lr_scheduler_kwargs",
    "inner_optimizer.name_options": "optim_args optimizer_kwargs",
    "inner_optimizer.min_lr_rate": "cosine_min_lr_ratio min_lr_ratio min_lr",
    "outer_optimizer.name": "outer_optim outer_optimizer",
    "sync.fragments": "num_fragments",
    "sync.delay_steps": "fragment_sync_delay",
    "sync.mixing": "fragment_update_alpha",
    "resources.min_workers": "min_replica_size min_replicas",
    "worker.fused_loss": "use_liger_kernel use_liger liger_fused_linear_cross_entropy",
    "worker.prefetch_mb": "dataloader_num_workers dataloader_prefetch_factor",
    "worker.probe_batch_size": "auto_find_batch_size",
    "worker.report_every_s": "logging_steps log_every_n_steps log_interval",
    "checkpoint.best": "load_best_model_at_end metric_for_best_model",
    "preference.label_smoothing": "label_smoothing",
    "preference.beta": "dpo_beta pref_beta",
    "preference.gamma": "simpo_gamma",
    "rl.epochs": "ppo_epochs num_ppo_epochs num_iterations",
    "rl.clip_low": "clip_range cliprange clip_eps clip_ratio clip_ratio_low",
    "rl.clip_high": "clip_ratio_high epsilon_high",
    "rl.dual_clip": "clip_ratio_c",
    "rl.aggregation": "loss_agg_mode",
    "rl.ratio": "importance_sampling_level",
    "rl.staleness": "max_async_level async_level",
    "rl.entropy": "ent_coef entropy_coef entropy_coeff",
    "rl.kl_estimator": "kl_loss_type kl_penalty",
    "rl.kl_target": "target_kl",
    "rl.reference_rate": "ref_model_mixup_alpha",
    "rl.environment": "env env_id environment environments",
    "rl.generation.temperature": "temperature",
    "rl.generation.server.urls": "vllm_server_host vllm_server_port vllm_server_base_url",
    "rl.reward.model.repository": "reward_model reward_model_path",
    "rl.critic.gae_lambda": "lam gae_lambda",
    "rl.critic.value_clip": "cliprange_value",
    "rl.critic.learning_rate": "critic_lr critic_learning_rate",
    "telemetry.trackers": "wandb_dir",
    "rl.evaluation.top_p": "top_p",
    "rl.evaluation.top_k": "top_k",
    "telemetry.sinks": "report_to metric_logger logger wandb_project wandb_entity loggers wandb tensorboard mlflow"
    " trackio log_with",
}
_RESUME = frozenset(("resume_from_checkpoint", "resume_from", "load", "ckpt", "ckpt_path", "checkpoint", "restore"))
_FILE = frozenset(("config", "config_file", "cfg", "conf", "job", "job_file", "file"))
OF_PREPARE = {
    "seq_len": "max_length max_seq_length max_seq_len seq_length sequence_len block_size cutoff_len context_length"
    " max_prompt_length",
    "pack": "packing sample_packing packed eval_sample_packing",
    "chat_template": "chat_template_path",
    "text_column": "text_field dataset_text_field text_key",
    "validation_samples": "max_eval_samples",
    "max_samples": "max_train_samples",
    "chat": "assistant_only_loss completion_only_loss train_on_inputs",
    "split": "dataset_split train_split dataset_train_split",
    "subset": "dataset_config dataset_config_name",
    "system": "system_prompt default_system_prompt",
    "validation_fraction": "val_size val_set_size test_size validation_split",
}
"""Names that other tools have for settings of a dataset, by the option of prepare that they mean."""
_NEEDLESS = {
    "an evaluation has the training's batches": "eval_batch_size per_device_eval_batch_size batch_size_val",
    "Ray starts and connects the processes": "local_rank node_rank master_addr master_port rdzv_endpoint rdzv_backend"
    " standalone ddp_backend ddp_find_unused_parameters lighthouse replica_id",
    "samples are in random order, and each is used once in an epoch": "shuffle shuffle_dataset ignore_data_skip"
    " dataloader_drop_last group_by_length",
    "samples are cut and padded in preparation": "padding_free pad_to_sequence_len pad_to_max_length truncation",
    "weights are saved as safetensors": "save_safetensors",
    "the command says what is done": "do_train do_eval do_predict",
    "a run has a folder of its own; --resume NAME goes on with one": "overwrite_output_dir resume_mode",
    "the model's inputs are the dataset's tensors": "remove_unused_columns label_names dataset_num_proc",
}
"""Reasons for which a job needs no setting, with the names that other tools have for it."""
_UNNEEDED = {name: reason for reason, names in _NEEDLESS.items() for name in names.split()}
_PREPARED_BY = {name: option for option, names in OF_PREPARE.items() for name in (option, *names.split())}
"""The option of prepare that a flag means."""
HABITS = {name: key for key, names in _KEYS.items() for name in names.split()}
"""The key that a flag of other tools means, by the flag's name with ``_`` for ``-``."""


def habit(name: str) -> str | None:
    """Remedy for a flag of other tools, given without its dashes; None for one that isn't known."""
    name = name.lower().replace("-", "_")
    if name in _FILE:
        return "give the job file without a flag: `@ job.toml`"
    if name in _RESUME:
        return "did you mean `--resume NAME`?"
    if name in HABITS:
        return f"did you mean `{HABITS[name]}`?"
    if name in _PREPARED_BY:
        flag = _PREPARED_BY[name].replace("_", "-")
        return f"give it to jobs/prepare.py as --{flag}"
    if name in _UNNEEDED:
        return f"leave it out: {_UNNEEDED[name]}"
    return None


def habit_in_table(path: Sequence[str]) -> str | None:
    """Remedy for a key in a table of other tools, such as ``actor.optim.lr``; None for one that isn't known."""
    likely_names = [f"{path[-2]}_{path[-1]}", f"{path[0]}_{path[-1]}", path[-1]]
    return next(filter(None, map(habit, likely_names)), None)


def habit_inside(path: Sequence[str]) -> str | None:
    """The key that the last part of an unknown key means in the table where it stands; None if it means none there."""
    name = path[-1].lower().replace("-", "_")
    key = HABITS.get(name, "")
    table = key.split(".")[:-1]
    return key if key and table == list(path[:-1]) else None
