"""Other names of keys: of the training guide, of hypha, the system that the guide describes, and of other tools."""

from __future__ import annotations

from collections.abc import Sequence

from hypha_ray.config.keys import CONFIG, LABELS, KeyPath, free_table, key_at

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
_KEYS = {
    "run.name": "name run_name experiment experiment_name project project_name wandb_name wandb_run_name exp_name"
    " wandb_run_id mlflow_run_name mlflow_experiment_name ray_run_name",
    "run.dir": "out output out_dir output_dir save_dir logging_dir log_dir work_dir default_local_dir logging_path"
    " metric_output_dir dump_folder checkpoint_folder",
    "run.seed": "seed random_seed data_seed data_loader_seed",
    "run.notes": "notes description comment",
    "run.tags": "tags wandb_tags",
    "model.repository": "model model_name model_id model_path model_name_or_path base_model pretrained"
    " checkpoint_path hf_config_path checkpointer checkpoint_dir",
    "model.trust_remote_code": "trust_remote_code trust_remote_code_model",
    "model.lora.rank": "lora lora_r lora_rank rank use_peft peft use_lora finetuning_type adapter peft_config"
    " lora_model_dir qlora r peft_r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "lora_target_modules target_modules lora_target lora_targets lora_target_linear"
    " lora_attn_modules apply_lora_to_mlp lora_target_parameters",
    "model.quantization": "load_in_4bit load_in_8bit quantize bits quantization quantization_bit bnb_4bit_quant_type"
    " quantization_config",
    "preprocessor.repository": "tokenizer tokenizer_name processor tokenizer_name_or_path tokenizer_path"
    " tokenizer_type",
    "dataset.path": "data dataset data_dir data_path datasets dataset_name dataset_path train_file train_data"
    " train_files data_files dataset_prepared_path pretraining_dataset val_files eval_dataset test_datasets data_name"
    " dataset_name_or_path",
    "rounds.update_rounds": "steps max_steps num_steps iterations rounds total_steps total_training_steps"
    " max_steps_per_epoch total_episodes",
    "rounds.epochs": "epochs num_epochs num_train_epochs max_epochs total_epochs n_epochs",
    "rounds.max_batch_size": "batch_size train_batch_size per_device_train_batch_size micro_batch_size"
    " mini_batch_size global_batch_size total_batch_size micro_bs per_gpu_train_batch_size micro_batch_size_per_gpu"
    " ppo_micro_batch_size ppo_micro_batch_size_per_gpu gen_batch_size batch_size_per_device",
    "rounds.accumulation": "gradient_accumulation_steps grad_accum accumulate_grad_batches",
    "rounds.samples_between_updates": "local_steps inner_steps sync_every h",
    "rounds.evaluate_every": "eval_steps eval_every eval_interval evaluation_strategy eval_strategy test_freq"
    " evals_per_epoch run_val_every_n_steps val_check_interval eval_delay eval_on_start",
    "inner_optimizer.learning_rate": "lr learning_rate inner_lr peak_lr",
    "inner_optimizer.name": "optim optimizer fused optimizer_in_bwd use_muon use_adam_mini optim_bits optim_type",
    "inner_optimizer.weight_decay": "weight_decay wd",
    "inner_optimizer.betas": "betas adam_beta1 adam_beta2 beta1 beta2 betas1 betas2",
    "inner_optimizer.epsilon": "adam_epsilon eps",
    "inner_optimizer.warmup_steps": "warmup warmup_steps num_warmup_steps warmup_ratio lr_warmup_steps",
    "inner_optimizer.schedule": "scheduler lr_scheduler lr_scheduler_type lr_schedule scheduler_type",
    "inner_optimizer.clip_norm": "max_grad_norm grad_clip gradient_clip_val clip clip_grad_norm gradient_clipping"
    " clip_grad max_norm",
    "outer_optimizer.learning_rate": "outer_lr outer_learning_rate",
    "outer_optimizer.momentum": "momentum outer_momentum",
    "sync.codec": "compression codec should_quantize",
    "resources.num_workers": "workers nodes num_nodes nnodes num_processes world_size num_workers num_replicas"
    " num_replica_groups ray_num_workers dp_replicate_size data_parallel_size",
    "resources.worker.gpu": "gpu gpus num_gpus n_gpus ngpus nproc_per_node devices n_gpus_per_node gpus_per_node"
    " trainer_gpu_ids inference_gpu_ids num_train_gpus num_infer_gpus",
    "resources.worker.cpu": "cpu cpus num_cpus",
    "worker.autocast": "bf16 fp16 amp dtype precision mixed_precision torch_dtype bf16_full_eval fp16_full_eval"
    " bfloat16 float16 param_dtype pure_bf16 half_precision_backend model_optimization_dtype"
    " model_reduce_dtype model_dtype model_torch_dtype",
    "worker.device": "device no_cuda use_cpu device_map",
    "worker.attention": "attn_implementation attn flash_attn flash_attention use_flash_attention_2"
    " xformers_attention sdp_attention attention flex_attention sage_attention eager_attention use_remove_padding"
    " model_attn",
    "worker.sharding": "deepspeed ds_config fsdp zero_stage zero fsdp_config fsdp_strategy fsdp_version"
    " dp_shard_size data_parallel_shard_degree fsdp_cpu_offload param_offload optimizer_offload fsdp_size"
    " model_fsdp_cpu_offload",
    "worker.compile": "compile torch_compile torch_compile_backend torch_compile_mode use_torch_compile"
    " torch_compile_options deepcompile",
    "worker.gradient_checkpointing": "gradient_checkpointing activation_checkpointing model_ac"
    " enable_activation_checkpointing enable_gradient_checkpointing gradient_checkpointing_kwargs"
    " activation_checkpointing_kwargs activation_offloading enable_activation_offloading ac_mode"
    " activation_checkpoint",
    "checkpoint.every_rounds": "ckpt_interval weights_interval save_steps save_every save_interval"
    " save_strategy save_freq saves_per_epoch"
    " checkpoint_interval",
    "checkpoint.keep": "save_total_limit keep_checkpoints max_actor_ckpt_to_keep",
    "checkpoint.push": "push_to_hub hub_model_id hub_strategy hub_private_repo hub_revision hub_always_push",
    "preference.loss": "pref_loss dpo_loss_type rpo_alpha cpo_alpha f_divergence_type use_weighting"
    " dpo_use_weighting loss_weights ld_alpha discopop_tau",
    "preference.reference": "ref_model reference_model precompute_ref_log_probs reference_free",
    "rl.algorithm": "adv_estimator advantage_estimator rl algorithm policy_loss loss_mode",
    "rl.group_size": "num_generations num_samples_per_prompt n_samples_per_prompt rollout_n rollouts_per_example"
    " n_rollouts generation_n",
    "rl.minibatches": "num_minibatches num_mini_batches ppo_mini_batch_size",
    "rl.kl": "kl_tau kl_coef init_kl_coef kl_loss_coef kl_coeff",
    "rl.generation.engine": "use_vllm vllm vllm_mode rollout_name use_transformers_paged"
    " use_transformers_continuous_batching",
    "rl.generation.max_response_tokens": "max_completion_length max_new_tokens max_response_length max_tokens"
    " response_length generation_max_length max_generated_tokens generation_max_new_tokens",
    "rl.reward.functions": "reward_funcs reward_functions reward_func reward_fn reward_function custom_reward_function"
    " overlong_buffer enable_overlong_buffer overlong_penalty_factor",
    "rl.reward.weights": "reward_weights",
    "run.mode": "full_determinism deterministic use_deterministic_algorithms",
    "model.revision": "model_revision",
    "model.lora.modules_to_save": "lora_modules_to_save",
    "model.lora.dora": "use_dora peft_use_dora",
    "model.lora.rslora": "use_rslora peft_use_rslora",
    "rounds.patience": "early_stopping_patience early_stopping",
    "rounds.min_delta": "early_stopping_threshold",
    "inner_optimizer.schedule_options": "lr_scheduler_kwargs lr_scheduler_options",
    "inner_optimizer.name_options": "optim_args optimizer_kwargs",
    "inner_optimizer.min_lr_rate": "cosine_min_lr_ratio min_lr_ratio min_lr min_lr_factor",
    "outer_optimizer.name": "outer_optim outer_optimizer",
    "sync.fragments": "num_fragments",
    "sync.delay_steps": "fragment_sync_delay",
    "sync.mixing": "fragment_update_alpha",
    "resources.min_workers": "min_replica_size min_replicas",
    "worker.fused_loss": "use_liger_kernel use_liger liger_fused_linear_cross_entropy use_liger_loss"
    " use_fused_kernels chunked_cross_entropy liger_kernel_config enable_liger_kernel",
    "worker.prefetch_mb": "dataloader_num_workers dataloader_prefetch_factor dataloader_persistent_workers"
    " prefetch_factor",
    "worker.probe_batch_size": "auto_find_batch_size",
    "worker.report_every_s": "logging_steps log_every_n_steps log_interval",
    "checkpoint.best": "load_best_model_at_end metric_for_best_model greater_is_better",
    "preference.label_smoothing": "label_smoothing dpo_label_smoothing",
    "preference.beta": "dpo_beta pref_beta rl_beta orpo_alpha",
    "preference.gamma": "simpo_gamma",
    "rl.epochs": "ppo_epochs num_ppo_epochs num_iterations",
    "rl.clip_low": "clip_range cliprange clip_eps clip_ratio clip_ratio_low",
    "rl.clip_high": "clip_ratio_high epsilon_high",
    "rl.dual_clip": "clip_ratio_c delta",
    "rl.aggregation": "loss_agg_mode",
    "rl.ratio": "importance_sampling_level",
    "rl.staleness": "max_async_level async_level max_staleness",
    "rl.entropy": "ent_coef entropy_coef entropy_coeff",
    "rl.kl_estimator": "kl_loss_type kl_penalty",
    "rl.kl_target": "target_kl",
    "rl.reference_rate": "ref_model_mixup_alpha",
    "rl.environment": "env env_id environment environments tools tool_config_path multi_turn rollout_func",
    "rl.generation.temperature": "temperature rollout_temperature generation_temperature",
    "rl.generation.server.urls": "vllm_server_host vllm_server_port vllm_server_base_url",
    "rl.reward.model.repository": "reward_model reward_model_path",
    "rl.critic.gae_lambda": "lam gae_lambda lmbda",
    "rl.critic.value_clip": "cliprange_value value_clip_range",
    "rl.critic.learning_rate": "critic_lr critic_learning_rate",
    "telemetry.trackers": "wandb_dir",
    "rl.evaluation.top_p": "top_p",
    "rl.evaluation.top_k": "top_k",
    "model.config": "model_init_kwargs rope_scaling overrides_of_model_config override_config train_from_scratch"
    " base_model_config hf_overrides",
    "model.loss": "use_dft_loss loss",
    "model.metrics": "compute_metrics include_for_metrics",
    "dataset.mix.*.weight": "interleave_probs mix_strategy",
    "inner_optimizer.decay_steps": "num_decay_steps",
    "checkpoint.export_dtype": "save_dtype export_dtype",
    "preference.desirable_weight": "kto_desirable_weight kto_chosen_weight desirable_weight",
    "preference.undesirable_weight": "kto_undesirable_weight kto_rejected_weight undesirable_weight",
    "rl.advantage": "scale_rewards norm_adv_by_std_in_grpo normalize_advantages whiten_rewards",
    "rl.behaviour_cap": "vllm_importance_sampling_correction vllm_importance_sampling_cap rollout_is_threshold",
    "rl.kl_horizon": "horizon",
    "rl.kl_place": "use_kl_in_reward use_kl_loss",
    "rl.reference": "sync_ref_model",
    "rl.shown_responses": "log_completions num_completions_to_print log_val_generations num_sample_generations",
    "rl.drop_equal_groups": "online_difficulty_filtering filter_groups skip_zero_advantage_batches",
    "rl.mask_truncated": "mask_truncated_completions overlong_filtering overlong_filter",
    "rl.refill": "oversampling_factor max_num_gen_batches",
    "rl.episode.turns": "max_turns max_assistant_turns max_tool_calling_iterations",
    "rl.generation.server.command": "vllm_gpu_memory_utilization vllm_tensor_parallel_size gpu_memory_utilization"
    " tensor_parallel_size enforce_eager max_model_len vllm_max_model_length vllm_enable_sleep_mode"
    " enable_prefix_caching",
    "rl.generation.server.deadline_s": "vllm_server_timeout request_timeout",
    "rl.evaluation.samples": "num_generations_eval",
    "rl.reward.deadline_s": "reward_timeout",
    "rl.reward.judge.url": "judge sandbox_fusion",
    "resources.worker.memory_gb": "max_memory gpu_memory_limit",
    "preference.loss rl.loss": "loss_type",
    "preference.beta rl.kl": "beta",
    "preference.gamma rl.critic.discount": "gamma",
    "rl.clip_low inner_optimizer.epsilon": "epsilon",
    "telemetry.sinks": "report_to metric_logger logger wandb_project wandb_entity loggers wandb tensorboard mlflow"
    " trackio log_with use_wandb use_mlflow use_tensorboard use_trackio use_comet use_swanlab"
    " enable_wandb enable_tensorboard"
    " trackio_space_id trackio_bucket_id trackio_static_space_id",
}
_REMEDIES = {
    "give the job file without a flag: `@ job.toml`": "config config_file cfg conf job job_file file",
    "did you mean `--resume NAME`?": "resume_from_checkpoint resume_from load ckpt ckpt_path checkpoint restore"
    " ckpt_resume_step resume_step",
    "set the environment variable HF_TOKEN": "hub_token hf_token hf_hub_token",
    "set the environment variable HF_HOME": "cache_dir",
}
"""Remedies that name no key, with the names that other tools have for what they do."""
OF_PREPARE = {
    "seq_len": "max_length max_seq_length max_seq_len seq_length sequence_len block_size cutoff_len context_length"
    " max_prompt_length prompt_length model_max_length filter_overlong_prompts eval_sequence_len",
    "pack": "packing sample_packing packed eval_sample_packing eval_packing neat_packing packing_strategy",
    "chat_template": "chat_template_path chat_template_jinja custom_chat_template template",
    "text_column": "text_field dataset_text_field text_key",
    "prompt_column": "prompt_key field_prompt",
    "chosen_column": "field_chosen",
    "rejected_column": "field_rejected",
    "image_column": "image_key",
    "tokenizer": "tokenizer_config special_tokens pad_token eos_token bos_token add_tokens additional_special_tokens",
    "validation_samples": "max_eval_samples val_max_samples eval_num_examples",
    "max_samples": "max_train_samples train_max_samples",
    "chat": "assistant_only_loss completion_only_loss train_on_inputs train_on_input train_on_prompt roles_to_train"
    " mask_history",
    "split": "dataset_split train_split dataset_train_split",
    "subset": "dataset_config dataset_config_name",
    "system": "system_prompt default_system_prompt default_system default_system_message new_system_prompt",
    "validation_fraction": "val_size val_set_size test_size validation_split",
}
"""Names that other tools have for settings of a dataset, by the option of prepare that they mean."""
_NEEDLESS = {
    "an evaluation has the training's batches": "eval_batch_size per_device_eval_batch_size batch_size_val",
    "Ray starts and connects the processes": "local_rank node_rank master_addr master_port rdzv_endpoint rdzv_backend"
    " standalone ddp_backend ddp_find_unused_parameters lighthouse replica_id ddp ddp_timeout ddp_bucket_cap_mb"
    " ddp_broadcast_buffers ddp_static_graph accelerator_config accelerate_config nccl_timeout ray_init"
    " weight_broadcast_type parallel_dp parallel_tp",
    "samples are in random order, and each is used once in an epoch": "shuffle shuffle_dataset ignore_data_skip"
    " dataloader_drop_last group_by_length dataloader_in_order sortish_sampler train_sampling_strategy"
    " dataloader_multiprocessing_context length_column_name disable_shuffling curriculum_sampling buffer_type",
    "samples are cut and padded in preparation": "padding_free pad_to_sequence_len pad_to_max_length truncation"
    " truncation_mode pad_to_multiple_of padding_value label_pad_token_id padding_side data_collator is_encoder_decoder"
    " use_logits_to_keep group_by_modality_length",
    "weights are saved as safetensors": "save_safetensors",
    "the command says what is done": "do_train do_eval do_predict",
    "a run has a folder of its own; --resume NAME goes on with one": "overwrite_output_dir resume_mode clean",
    "the model's inputs are the dataset's tensors": "remove_unused_columns label_names data_type"
    " dataset_num_proc dataset_kwargs"
    " preprocessing_num_workers dataset_processes skip_prepare_dataset overwrite_cache streaming",
    "float32 keeps its precision, and worker.autocast has the fast formats": "tf32 fp32_norms cast_lm_head_to_fp32"
    " upcast_layernorm",
    "a run prints a line for each round, and metrics.jsonl has all records": "disable_tqdm log_level logging_strategy"
    " logging_first_step logging_nan_inf_filter log_on_each_node log_level_replica include_num_input_tokens_seen"
    " include_tokens_per_second log_peak_memory_stats plot_loss debug skip_memory_metrics profiler enable_profiling",
    "an evaluation computes loss and metrics in batches": "prediction_loss_only eval_accumulation_steps"
    " eval_do_concat_batches batch_eval_metrics eval_use_gather_object predict_with_generate"
    " generate_during_eval generation_num_beams",
    "memory is managed by the worker": "torch_empty_cache_steps gc_steps low_cpu_mem_usage dataloader_pin_memory"
    " pin_memory use_cache offload_params ds3_gather_for_generation",
    "a snapshot has all that resuming needs": "save_only_model save_on_each_node save_first_step async_save"
    " enable_jit_checkpoint restore_callback_states_from_checkpoint"
    " save_adapter_weights_only",
    "preferences are trained without dropout, and so are policies": "disable_dropout",
    "means are over all tokens of a batch": "average_tokens_across_devices",
    "no sequence and no matrix is split over processes, see worker.sharding": "sequence_parallel_size"
    " sequence_parallel_degree context_parallel_size ulysses_sequence_parallel_size pipeline_parallel_size"
    " tensor_parallel_degree expert_parallel_size parallelism_config",
    "nothing of the kind is built in": "neftune_noise_alpha noisy_embedding_alpha label_smoothing_factor relora"
    " optim_target_modules use_galore use_apollo lisa_n_layers pissa_init loftq_config loraplus_lr_ratio"
    " embedding_lr unfrozen_parameters freeze_trainable_layers freeze_vision_tower missing_eos_penalty min_p"
    " repetition_penalty generation_kwargs",
}
"""Reasons for which a job needs no setting, with the names that other tools have for it."""
_KEYLESS = {name: remedy for remedy, names in _REMEDIES.items() for name in names.split()}
"""The remedy for a flag that means no key and no option."""
_KEYLESS |= {name: f"leave it out: {reason}" for reason, names in _NEEDLESS.items() for name in names.split()}
_PREPARED_BY = {name: option for option, names in OF_PREPARE.items() for name in (option, *names.split())}
"""The option of prepare that a flag means."""
HABITS = {name: key for key, names in _KEYS.items() for name in names.split()}
"""The keys that a flag of other tools can mean, one or more, by the flag's name with ``_`` for ``-``."""

_OF_WHOLE_TABLES = frozenset({"enable", "enabled", "name", "type", "mode"})
"""Keys that choose what their table is about, such as ``optimizer.name``."""


def without_guide_table(path: Sequence[str]) -> KeyPath:
    """A key as it would be written outside the guide's table."""
    path = tuple(path)
    if path[: len(GUIDE)] == GUIDE:
        return path[len(GUIDE) :]
    return path


def canonical(path: Sequence[str]) -> KeyPath:
    """The schema's name of a key; unknown names are returned unchanged, with ``_`` for ``-``."""
    written_path = without_guide_table(path)
    name = tuple(part.replace("-", "_") for part in written_path)
    table = free_table(name)
    if table is not None:  # Keys below it are defined elsewhere, and may have a hyphen.
        name = table + written_path[len(table) :]
    if name[:1] == CONFIG[:1] and name[1:2] and name[1] in LABELS:
        return (*CONFIG, *name[1:])
    return RENAMED.get(name, name)


def habit(name: str) -> str | None:
    """Remedy for a flag of other tools, given without its dashes; None for one that isn't known."""
    name = name.lower().replace("-", "_")
    if name in HABITS:
        likely_keys = "`, or `".join(HABITS[name].split())
        return f"did you mean `{likely_keys}`?"
    if name in _PREPARED_BY:
        flag = _PREPARED_BY[name].replace("_", "-")
        return f"give it to jobs/prepare.py as --{flag}"
    return _KEYLESS.get(name)


def habit_in_table(path: Sequence[str]) -> str | None:
    """Remedy for a key in a table of other tools, such as ``actor.optim.lr``; None for one that isn't known."""
    table = path[-2]
    last_name = path[-1]
    likely_names = [f"{table}_{last_name}", f"{path[0]}_{last_name}"]
    if last_name in _OF_WHOLE_TABLES:
        likely_names.append(table)
    return next(filter(None, map(habit, [*likely_names, last_name])), None)


def habit_inside(path: Sequence[str]) -> str | None:
    """The key that the last part of an unknown key means in the table where it stands, or in one below that.

    A key of the same name as one of another table counts, such as the outer learning rate. None if it means none there.
    """
    name = path[-1].lower().replace("-", "_")
    table = list(path[:-1])
    key_below = None
    for key in HABITS.get(name, "").split():
        parts = key.split(".")
        if parts[:-1] == table or key_at([*table, parts[-1]]) is not None:
            return ".".join([*table, parts[-1]])
        if parts[: len(table)] == table:
            key_below = key_below or key
    return key_below
