"""Command lines as other tools take them: a file without @, and flags of other names."""

from pathlib import Path

import pytest

from hypha_ray.config.aliases import HABITS
from hypha_ray.config.keys import key_at
from hypha_ray.config.load import load
from hypha_ray.errors import ConfigError


@pytest.mark.parametrize("name", ["job.toml", "plain"])
def test_job_file_without_an_at_sign_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("[run]\nseed = 7\n")
    loaded = load([name, "--rounds.update_rounds", "5"])
    assert (loaded.job.run.seed, loaded.job.rounds.update_rounds, loaded.files) == (7, 5, (name,))


def test_files_with_and_without_an_at_sign_override_from_left_to_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2, 3):
        Path(f"{seed}.toml").write_text(f"[run]\nseed = {seed}\n")
    assert load(["@", "1.toml", "2.toml", "@3.toml"]).job.run.seed == 3
    assert load(["3.toml", "@1.toml", "2.toml", "--dry-run"]).job.run.seed == 2


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--lr 3", "did you mean `inner_optimizer.learning_rate`?"),
        ("--inner_optimizer.lr 3", "did you mean `inner_optimizer.learning_rate`?"),
        ("--learning-rate 3", "did you mean `inner_optimizer.learning_rate`?"),
        ("--config job.toml", "give the job file without a flag: `@ job.toml`"),
        ("--config=job.toml", "give the job file without a flag: `@ job.toml`"),
        ("--output_dir x", "did you mean `run.dir`?"),
        ("--output-dir x", "did you mean `run.dir`?"),
        ("--out x", "did you mean `run.dir`?"),
        ("--epochs 3", "did you mean `rounds.epochs`?"),
        ("--num_train_epochs 3", "did you mean `rounds.epochs`?"),
        ("--max_steps 3", "did you mean `rounds.update_rounds`?"),
        ("--batch_size 8", "did you mean `rounds.max_batch_size`?"),
        ("--per_device_train_batch_size 8", "did you mean `rounds.max_batch_size`?"),
        ("--model gpt2", "did you mean `model.repository`?"),
        ("--model_name_or_path gpt2", "did you mean `model.repository`?"),
        ("--data texts", "did you mean `dataset.path`?"),
        ("--dataset texts", "did you mean `dataset.path`?"),
        ("--gpus 2", "did you mean `resources.worker.gpu`?"),
        ("--workers 4", "did you mean `resources.num_workers`?"),
        ("--num_workers 4", "did you mean `resources.num_workers`?"),
        ("--resume_from_checkpoint x", "did you mean `--resume NAME`?"),
        ("--checkpoint x", "did you mean `--resume NAME`?"),
        ("--seed 3", "did you mean `run.seed`?"),
        ("--tokenizer x", "did you mean `preprocessor.repository`?"),
        ("--report_to wandb", "did you mean `telemetry.sinks`?"),
        ("--bf16", "did you mean `worker.autocast`?"),
        ("--loss_type ipo", "did you mean `preference.loss`, or `rl.loss`?"),
        ("--num_generations 4", "did you mean `rl.group_size`?"),
        ("--max_completion_length 64", "did you mean `rl.generation.max_response_tokens`?"),
        ("--reward_funcs a:b", "did you mean `rl.reward.functions`?"),
        ("--use_peft", "did you mean `model.lora.rank`?"),
        ("--warmup_ratio 0.1", "did you mean `inner_optimizer.warmup_steps`?"),
        ("--deepspeed x.json", "did you mean `worker.sharding`?"),
        ("--max_length 512", "give it to jobs/prepare.py as --seq-len"),
        ("--packing", "give it to jobs/prepare.py as --pack"),
        ("-c job.yaml", "give a TOML file behind @: `@ job.toml`; see docs/configuration.md"),
        ("job.yaml", "give a TOML file behind @: `@ job.toml`; see docs/configuration.md"),
        ("--resum", "did you mean --resume?"),
        ("--total_epochs 3", "did you mean `rounds.epochs`?"),
        ("--trainer.total_epochs 3", "did you mean `rounds.epochs`?"),
        ("--trainer.n_gpus_per_node 8", "did you mean `resources.worker.gpu`?"),
        ("--data.train_files x", "did you mean `dataset.path`?"),
        ("--data.max_prompt_length 512", "give it to jobs/prepare.py as --seq-len"),
        ("--actor_rollout_ref.model.path x", "did you mean `model.repository`?"),
        ("--actor_rollout_ref.actor.optim.lr 1e-6", "did you mean `inner_optimizer.learning_rate`?"),
        ("--actor_rollout_ref.rollout.n 5", "did you mean `rl.group_size`?"),
        ("--actor_rollout_ref.rollout.name vllm", "did you mean `rl.generation.engine`?"),
        ("--critic.optim.lr 1e-5", "did you mean `rl.critic.learning_rate`?"),
        ("--algorithm.adv_estimator grpo", "did you mean `rl.algorithm`?"),
        ("--model.path x", "did you mean `model.repository`?"),
        ("--model.adapter x", "did you mean `model.lora.rank`?"),
        ("--model.peft x", "did you mean `model.lora.rank`?"),
        ("--rl.max_new_tokens 64", "did you mean `rl.generation.max_response_tokens`?"),
        ("--rl.max_completion_length 64", "did you mean `rl.generation.max_response_tokens`?"),
        ("--early_stopping_patience 3", "did you mean `rounds.patience`?"),
        ("--logging_steps 10", "did you mean `worker.report_every_s`?"),
        ("--use_liger_kernel true", "did you mean `worker.fused_loss`?"),
        ("--lora_target_linear true", "did you mean `model.lora.targets`?"),
        ("--num_fragments 4", "did you mean `sync.fragments`?"),
        ("--min_replica_size 2", "did you mean `resources.min_workers`?"),
        ("--max_async_level 2", "did you mean `rl.staleness`?"),
        ("--cliprange 0.2", "did you mean `rl.clip_low`?"),
        ("--outer_optimizer sgd", "did you mean `outer_optimizer.name`?"),
        ("--train_on_inputs false", "give it to jobs/prepare.py as --chat"),
        ("--per_device_eval_batch_size 8", "leave it out: an evaluation has the training's batches"),
        ("--beta 0.1", "did you mean `preference.beta`, or `rl.kl`?"),
        ("--gamma 1", "did you mean `preference.gamma`, or `rl.critic.discount`?"),
        ("--epsilon 0.2", "did you mean `rl.clip_low`, or `inner_optimizer.epsilon`?"),
        ("--algorithm.gamma 1", "did you mean `preference.gamma`, or `rl.critic.discount`?"),
        ("--kto_desirable_weight 1", "did you mean `preference.desirable_weight`?"),
        ("--scale_rewards false", "did you mean `rl.advantage`?"),
        ("--mask_truncated_completions true", "did you mean `rl.mask_truncated`?"),
        ("--overlong_buffer true", "did you mean `rl.reward.functions`?"),
        ("--log_completions", "did you mean `rl.shown_responses`?"),
        ("--activation_offloading true", "did you mean `worker.gradient_checkpointing`?"),
        ("--vllm_gpu_memory_utilization 0.5", "did you mean `rl.generation.server.command`?"),
        ("--actor_rollout_ref.actor.use_kl_loss true", "did you mean `rl.kl_place`?"),
        ("--neftune_noise_alpha 5", "leave it out: nothing of the kind is built in"),
        ("--tf32 true", "leave it out: float32 keeps its precision, and worker.autocast has the fast formats"),
        (
            "--sequence_parallel_size 2",
            "leave it out: no sequence and no matrix is split over processes, see worker.sharding",
        ),
        ("--disable_tqdm true", "leave it out: a run prints a line for each round, and metrics.jsonl has all records"),
        ("--eos_token x", "give it to jobs/prepare.py as --tokenizer"),
        ("--hub_token x", "set the environment variable HF_TOKEN"),
        ("--do_train", "leave it out: the command says what is done"),
        ("--local-rank 0", "leave it out: Ray starts and connects the processes"),
        ("--optim.type adamw", "did you mean `inner_optimizer.name`?"),
        ("--trainer.scheduler.type linear", "did you mean `inner_optimizer.schedule`?"),
        ("--optim.betas1 0.9", "did you mean `inner_optimizer.betas`?"),
        ("--optim.max_norm 1", "did you mean `inner_optimizer.clip_norm`?"),
        ("--trainer.loss.kl_tau 0.1", "did you mean `rl.kl`?"),
        ("--data.name a/b", "did you mean `dataset.path`?"),
        ("--ckpt.interval 10", "did you mean `checkpoint.every_rounds`?"),
        ("--trainer.ckpt.resume_step 10", "did you mean `--resume NAME`?"),
        ("--model.attn sdpa", "did you mean `worker.attention`?"),
        ("--model.ac", "did you mean `worker.gradient_checkpointing`?"),
        ("--orchestrator.buffer.online_difficulty_filtering true", "did you mean `rl.drop_equal_groups`?"),
        ("--orchestrator.oversampling_factor 2", "did you mean `rl.refill`?"),
        ("--orchestrator.eval.num_examples 9", "give it to jobs/prepare.py as --validation-samples"),
        ("--trainer_gpu_ids 1", "did you mean `resources.worker.gpu`?"),
        ("--model.peft.r 8", "did you mean `model.lora.rank`?"),
        ("--model.lora_config.r 8", "did you mean `model.lora.rank`?"),
        ("--model.r 8", "did you mean `model.lora.rank`?"),
        ("--r 8", "did you mean `model.lora.rank`?"),
        ("--optimizer.betas 0.9,0.95", "did you mean `inner_optimizer.betas`?"),
        ("--optimizer.name adamw", "did you mean `inner_optimizer.name`?"),
        ("--scheduler.name cosine", "did you mean `inner_optimizer.schedule`?"),
        ("--outer_optimizer.lr 0.7", "did you mean `outer_optimizer.learning_rate`?"),
        ("--rl.critic.lr 1e-5", "did you mean `rl.critic.learning_rate`?"),
        ("--rl.beta 0.1", "did you mean `rl.kl`?"),
        ("--rl.lr 1e-6", "did you mean `inner_optimizer.learning_rate`?"),
        ("--rl.generation.n 8", "did you mean `rl.group_size`?"),
        ("--workers.0.gpus 1", "did you mean `workers.0.gpu`?"),
        ("--diloco.H 30", "did you mean `rounds.samples_between_updates`?"),
        ("--sync.H 30", "did you mean `rounds.samples_between_updates`?"),
        ("--model.torch_dtype bfloat16", "did you mean `worker.autocast`?"),
        ("--dataset.seq_len 512", "give it to jobs/prepare.py as --seq-len"),
        ("--dataset.name_or_path a/b", "did you mean `dataset.path`?"),
        ("--checkpoint.folder x", "did you mean `run.dir`?"),
        ("--job.dump_folder x", "did you mean `run.dir`?"),
        ("--metrics.enable_wandb", "did you mean `telemetry.sinks`?"),
        ("--activation_checkpoint.mode full", "did you mean `worker.gradient_checkpointing`?"),
        ("--compile.enable", "did you mean `worker.compile`?"),
        ("--rounds.max_batch_sise 8", "did you mean `rounds.max_batch_size`?"),
    ],
)
def test_flag_of_another_tool_is_answered_with_the_key_that_it_means(words: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(words.split())
    assert caught.value.fix == remedy and caught.value.exit_code == 2


@pytest.mark.parametrize("key", sorted({key for keys in HABITS.values() for key in keys.split()}))
def test_every_remedy_is_a_key_of_the_job_file(key: str) -> None:
    assert key_at(key.split(".")) is not None


def test_key_of_another_tool_in_a_job_file_is_answered_in_its_table(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[inner_optimizer]\nlr = 3e-4\n")
    with pytest.raises(
        ConfigError, match=r"job.toml:2: unknown key inner_optimizer.lr. .*`inner_optimizer.learning_rate`"
    ):
        load([str(file)])


def test_job_file_of_another_tool_is_answered_with_the_keys_that_it_means(tmp_path: Path) -> None:
    """Files of axolotl, TRL, torchtune and transformers are YAML or JSON; prime-rl's are TOML."""
    yaml = tmp_path / "axolotl.yaml"
    yaml.write_text(
        "base_model: a/b\n# a note: none\ndatasets:\n  - path: c\n    type: alpaca\nadapter: lora\nlora_r: 8\n"
    )
    for words in ([str(yaml)], ["@", str(yaml)]):
        with pytest.raises(ConfigError) as caught:
            load(words)
        assert caught.value.code == "CFG015" and caught.value.exit_code == 2
        meanings = "base_model is `model.repository`, datasets is `dataset.path`, adapter is `model.lora.rank`"
        assert meanings in caught.value.fix and "a note" not in caught.value.fix
    json = tmp_path / "args.json"
    json.write_text('{\n  "learning_rate": 1e-4,\n  "num_train_epochs": 3\n}')
    with pytest.raises(ConfigError, match=r"isn't a TOML file.*learning_rate is `inner_optimizer.learning_rate`"):
        load(["@", str(json)])
    toml = tmp_path / "rl.toml"
    for text, remedy in [
        ("max_steps = 100\n", "`rounds.update_rounds`"),
        ("max_async_level = 2\n", "`rl.staleness`"),
        ('[model]\nname = "a/b"\n', "`model.repository`"),
    ]:
        toml.write_text(text)
        with pytest.raises(ConfigError, match=rf"CFG001.*rl.toml:.*{remedy}"):
            load(["@", str(toml)])


def test_tables_on_the_command_line_are_taken_as_before() -> None:
    job = load(["--model", "{repository = 'a'}", "--workers", "[{gpu = 1}, {cpu = 2}]"]).job
    assert job.model.repository == "a" and [group.cpu for group in job.workers][1] == 2
