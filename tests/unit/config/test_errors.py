"""Every way to get a job file or a command line wrong: one line that says what, where, and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hypha_ray.config.load import load, require_complete
from hypha_ray.errors import ConfigError

SECRET = "hf_abcdefgh"
PROBE = "[worker]\nprobe_batch_size = true\n[resources.worker]\nmemory_gb = 1\n"

SYNC = "[sync]\nstrategy = 'sync'\n[rl]\n"
DPO = "[preference]\nloss = 'dpo'\n"
TASKS = "[rl]\nalgorithm = 'grpo'\n[[rl.reward.tasks]]\nname = 'a'\nfunctions = ['exact']\n"

IN_FILES = [
    # An unknown key: the nearest one, and the line.
    ("[inner_optimizer]\nname = 'sgd'\nlearning_rte = 1", "CFG001", "job.toml:3: unknown key inner_optimizer.learnin"),
    ("[inner_optimizer]\nlearning_rte = 1", "CFG001", "did you mean `inner_optimizer.learning_rate`?"),
    ("inner_optimizer.learning_rte = 1", "CFG001", "job.toml:1: unknown key inner_optimizer.learning_rte"),
    ("\n[scheduler.job.inner_optimizer]\nlearning_rte = 1", "CFG001", "job.toml:3: unknown key scheduler.job.inner_o"),
    ("[scheduler.job.inner_optimizer]\nlearning_rte = 1", "CFG001", "did you mean `inner_optimizer.learning_rate`?"),
    ("[inner_optimizer]\nlearning-rte = 1", "CFG001", "did you mean `inner_optimizer.learning_rate`?"),
    ("\n\n[modle]\nrepository = 'x'", "CFG001", "job.toml:3: unknown key modle. Fix: did you mean `model`?"),
    ("[model]\nnum_label = 3", "CFG001", "did you mean `model.num_labels`?"),
    ("[scheduler.job.model]\nid2lable = 3", "CFG001", "did you mean `model.id2label`?"),
    ("[rounds]\nlearning_rate = 1", "CFG001", "did you mean `inner_optimizer.learning_rate`?"),
    ("seed = 1", "CFG001", "did you mean `run.seed`?"),
    ('run.tags = ["a,b"]', "CFG003", "1 to 64 characters without a comma"),
    ('run.tags = ["a "]', "CFG003", "1 to 64 characters without a comma"),
    ("[resources.worker]\ncpus = 1", "CFG001", "did you mean `resources.worker.cpu`?"),
    ("resources = {worker = {cpus = 1}}", "CFG001", "job.toml:1: unknown key resources.worker.cpus"),
    ("[preprocessor]\nzzz = 1", "CFG001", "allowed repository, revision. Fix: see --help"),
    ("[scheduler]\nsed = 1", "CFG001", "unknown key scheduler.sed"),
    ("[workeer]\n", "CFG001", "did you mean `worker`?"),
    ("[scheduler.job.scheduler]\n", "CFG001", "unknown key scheduler.job.scheduler"),
    ('"a\\nb" = 1', "CFG001", r"unknown key 'a\nb'"),
    # A wrong type.
    ("[inner_optimizer]\nlearning_rate = 'fast'", "CFG002", "job.toml:2: inner_optimizer.learning_rate has the wrong"),
    ("[inner_optimizer]\nlearning_rate = 'fast'", "CFG002", "got 'fast', allowed number > 0"),
    ("[inner_optimizer]\nlearning_rate = true", "CFG002", "got true, allowed number > 0"),
    ("[inner_optimizer]\nbetas = 0.9", "CFG002", "got 0.9, allowed [number ≥ 0 and < 1, number ≥ 0 and < 1]"),
    ("[inner_optimizer]\nbetas = ['a', 0.9]", "CFG002", "inner_optimizer.betas"),
    ("[rounds]\nupdate_rounds = 1.5", "CFG002", "allowed integer ≥ 1"),
    ("[rounds]\nupdate_rounds = '5'", "CFG002", "got '5'"),
    ("[rounds]\nupdate_rounds = true", "CFG002", "got true"),
    ("[rounds]\nupdate_rounds = 2024-01-01", "CFG002", "rounds.update_rounds"),
    ("[rounds.update_rounds]\nx = 1", "CFG002", "got a table, allowed integer ≥ 1"),
    ("[worker]\ncompile = 'yes'", "CFG002", "allowed true | false"),
    ("[worker]\ncompile = 1", "CFG002", "allowed true | false"),
    ("[run]\nname = 3", "CFG002", "got 3, allowed text"),
    ("[telemetry]\nsinks = 'jsonl'", "CFG002", "got 'jsonl', allowed list of console"),
    ("[model]\nconfig = 3", "CFG002", "got 3, allowed table"),
    ("[model]\ninput_names = ['a', 1]", "CFG002", "got 1, allowed list of text"),
    ("model = 3", "CFG002", "job.toml:1: model has the wrong type — got 3, allowed a table"),
    ("[[model]]\nrepository = 'x'", "CFG002", "allowed a table"),
    ("scheduler = 3", "CFG002", "allowed a table"),
    ("[scheduler]\njob = []", "CFG002", "job.toml:2"),
    ("[resources]\nworker = 2", "CFG002", "resources.worker"),
    # A value out of range.
    ("[outer_optimizer]\n\nmomentum = -1", "CFG003", "job.toml:3: outer_optimizer.momentum is out of range — got -1"),
    ("[outer_optimizer]\nmomentum = 1.0", "CFG003", "< 1. Fix: write a number ≥ 0 and < 1, or leave it out for 0"),
    ("[rounds]\nupdate_rounds = 0", "CFG003", "Fix: write an integer ≥ 1, or leave it out for 100"),
    ("[run]\nmode = 'nope'", "CFG003", "allowed elastic | replay. Fix: write one of these, or leave it out for"),
    ("[sync]\ncodec = 'int9'", "CFG003", "Fix: write int"),
    ("[run]\nname = '../x'", "CFG003", "first. Fix: write what is allowed, or leave it out"),
    ("[outer_optimizer]\nmomentum = nan", "CFG003", "got nan"),
    ("[outer_optimizer]\nlearning_rate = inf", "CFG003", "got inf, allowed number > 0"),
    ("[outer_optimizer]\nlearning_rate = 0", "CFG003", "got 0"),
    ("[inner_optimizer]\nlearning_rate = -1e-3", "CFG003", "got -0.001"),
    ("[inner_optimizer]\nbetas = [0.9]", "CFG003", "got [0.9]"),
    ("[inner_optimizer]\nbetas = [0.9, 0.9, 0.9]", "CFG003", "inner_optimizer.betas"),
    ("[inner_optimizer]\nbetas = [0.9, 1.0]", "CFG003", "got 1.0"),
    ("[inner_optimizer]\nclip_norm = 0", "CFG003", "allowed number > 0 | none"),
    ("[inner_optimizer]\nname = 'adam w'", "CFG003", "got 'adam w', allowed the name of an optimizer, such as adamw"),
    ("[inner_optimizer]\nwarmup_steps = 9\ntotal_steps = 5", "CFG003", "job.toml:2: inner_optimizer.warmup_steps is"),
    ("[rounds]\nupdate_rounds = 0", "CFG003", "got 0, allowed integer ≥ 1"),
    ("[rounds]\nsamples_between_updates = 0", "CFG003", "rounds.samples_between_updates"),
    ("[rounds]\navg_samples_between_updates = 0", "CFG003", "job.toml:2: rounds.samples_between_updates"),
    ("[rounds]\nmax_batch_size = -4", "CFG003", "rounds.max_batch_size"),
    ("[rounds]\nevaluate_every = -1", "CFG003", "allowed integer ≥ 0"),
    ("[resources]\nnum_workers = 0", "CFG003", "resources.num_workers"),
    ("[resources]\nnum_workers = 2\nmin_workers = 3", "CFG003", "job.toml:3: resources.min_workers is more than"),
    ("[resources]\nmin_workers = 3", "CFG003", "got 3, allowed up to 2"),
    ("[resources]\nworker_price = {bid = 110, max = 50}", "CFG003", "worker_price.max — got 110.0, allowed up to 50.0"),
    ("[resources]\nparameter_server_price.bid = 101", "CFG003", "parameter_server_price.bid is more than resources.p"),
    (
        "[bridge]\ncommands = ['a', 'b', 'c']",
        "CFG003",
        "job.toml:2: bridge.commands is more than",
    ),
    ("[rounds]\nepochs = 0", "CFG003", "rounds.epochs is out of range — got 0, allowed integer ≥ 1"),
    ("[rounds]\nepochs = 1.5", "CFG002", "got 1.5"),
    (
        "[rounds]\nepochs = 3\nupdate_rounds = 8",
        "CFG011",
        "job.toml:2: rounds.epochs and job.toml:3: rounds.update_rounds exclude each other",
    ),
    ("[sync]\nstrategy = 'sync'\nfragments = 2", "CFG011", "job.toml:3: sync.fragments and sync.strategy"),
    ("[sync]\nstrategy = 'sync'\ncodec = 'visible'", "CFG011", 'sync.codec = "visible" and sync.strategy = "sync"'),
    (
        "[sync]\nstrategy = 'sync'\ndownward_codec = 'visible'",
        "CFG011",
        'sync.downward_codec = "visible" and sync.str',
    ),
    ("[sync]\ncodec = 'visible'\nmerge = 'median'", "CFG011", 'sync.codec = "visible" and sync.merge = "median"'),
    ("[sync]\ncodec = 'topk'\nmerge = 'trimmed_mean'", "CFG011", 'sync.codec = "topk" and sync.merge = "trimmed_mean"'),
    ("[sync]\ncodec = 'visible'\nerror_feedback = 0", "CFG011", "set it above 0: changes that aren't visible yet"),
    (
        "[inner_optimizer]\nk_aware = true\nname = 'sgd'",
        "CFG011",
        "job.toml:2: inner_optimizer.k_aware and inner_optim",
    ),
    ("[inner_optimizer]\nk_aware = true\n[sync]\nstrategy = 'sync'", "CFG011", "inner_optimizer.k_aware and sync.str"),
    ("[worker]\nprocesses = 2\n[rl]\nalgorithm = 'grpo'", "CFG011", "worker.processes and job.toml:4: rl.algorithm"),
    (
        "[rl]\nalgorithm = 'grpo'\nenvironment = 'calculator'\nreward.functions = ['environment']\n"
        "[[workers]]\nkind = 'bridged'\ncount = 1",
        "CFG011",
        "rl.environment and job.toml:6: workers.0.kind exclude each other",
    ),
    (SYNC + "algorithm = 'ppo'", "CFG011", "job.toml:4: rl.algorithm and sync.strategy = "),
    (SYNC + "algorithm = 'reinforce++'", "CFG011", "choose grpo, dapo or another of groups: each worker sees a part"),
    (SYNC + "algorithm = 'grpo'\nadvantage = 'batch_std'", "CFG011", "job.toml:5: rl.advantage and sync.strategy"),
    (SYNC + "algorithm = 'grpo'\nadvantage = 'batch_scale'", "CFG011", "job.toml:5: rl.advantage and sync.strategy"),
    ("[rl]\nalgorithm = 'ppo'\nmask_truncated = true", "CFG011", "rl.mask_truncated and rl.advantage = 'gae'"),
    (SYNC + "algorithm = 'grpo'\nkl_target = 0.1", "CFG011", "job.toml:5: rl.kl_target and sync.strategy = "),
    (SYNC + "algorithm = 'grpo'\nreference = 'average'", "CFG011", 'rl.reference = "average" and sync.strategy'),
    (SYNC + "algorithm = 'grpo'\nepochs = 2", "CFG011", "rl.epochs and sync.strategy = "),
    (SYNC + "algorithm = 'grpo'\nstaleness = 1", "CFG011", "rl.staleness and sync.strategy = "),
    ("[rl]\nalgorithm = 'grpo'\n[[rl.reward.tasks]]\nname = 'a'", "CFG011", "rl.reward.tasks.0.functions and rl.rew"),
    (
        "[preference]\nloss = 'dop'",
        "CFG003",
        "job.toml:2: preference.loss is out of range — got 'dop', allowed dpo | rob",
    ),
    ("[preference]\nlabel_smoothing = 0.5", "CFG003", "preference.label_smoothing is out of range — got 0.5"),
    (DPO + "[rl]\nalgorithm = 'grpo'", "CFG011", "job.toml:2: preference.loss and job.toml:4: rl.algorithm exclude"),
    (DPO + "[model]\nloss = 'a:b'", "CFG011", "job.toml:2: preference.loss and job.toml:4: model.loss exclude"),
    (DPO + "[model]\ntype = 'masked-lm'", "CFG011", 'preference.loss and model.type = "masked-lm" exclude'),
    (DPO + "[worker]\nfused_loss = true", "CFG011", "preference.loss and job.toml:4: worker.fused_loss exclude"),
    (
        DPO + "[worker]\nprocesses = 2\nsharding = 'full'",
        "CFG011",
        "prepare the dataset with --reference MODEL, and set",
    ),
    (DPO + "[bridge]\ncommands = ['a']", "CFG011", "preference.loss and job.toml:4: bridge.commands exclude"),
    ("[preference]\nloss = 'kto'\n[rounds]\nmax_batch_size = 1", "CFG011", "take batches of two samples or more"),
    (TASKS + "[[rl.reward.tasks]]\nname = 'a'\nfunctions = ['math']", "CFG011", "give a task one or more of the fun"),
    (TASKS + "[[rl.reward.tasks]]\nname = 'a'\nfunctions = ['exact']", "CFG011", "rl.reward.tasks.1.name and"),
    ("[worker]\nprobe_batch_size = true", "CFG011", "job.toml:2: worker.probe_batch_size and resources.worker.memory_"),
    (PROBE + "[run]\nmode = 'replay'", "CFG011", "job.toml:2: worker.probe_batch_size and run.mode"),
    (
        "[worker]\nattention = 'flash_attention_2'\n[run]\nmode = 'replay'",
        "CFG011",
        "job.toml:2: worker.attention and job.toml:4: run.mode exclude each other. Fix: flash attention's sums",
    ),
    (
        "[worker]\nattention = 'flex_attention'",
        "CFG011",
        "job.toml:2: worker.attention and resources.worker.gpu = 0 exclude each other. Fix: CPUs can't train with it",
    ),
    (
        "[worker]\nattention = 'flash_attention_3'\n[[workers]]\ngpu = 1\n[[workers]]\n",
        "CFG011",
        "job.toml:2: worker.attention and workers.1.gpu = 0 exclude each other",
    ),
    (
        "[worker]\nattention = 'flash_attention_2'\ndevice = 'cpu'\n[resources]\nworker.gpu = 1",
        "CFG011",
        "job.toml:2: worker.attention and job.toml:3: worker.device exclude each other",
    ),
    ("[dataset]\nlocality = 'prefer'\npath = 'd'", "CFG011", "dataset.locality and job.toml:3: dataset.path exclude"),
    ("[dataset]\nlocality = 'prefer'\n[run]\nmode = 'replay'", "CFG011", "dataset.locality and job.toml:4: run.mode"),
    (
        "[dataset]\nlocality = 'prefer'\n[[dataset.mix]]\nname = 'a'",
        "CFG011",
        "job.toml:2: dataset.locality and job.toml:3: dataset.mix exclude",
    ),
    (PROBE + "[rounds]\nwarmup_rounds = 1", "CFG011", "worker.probe_batch_size and job.toml:6: rounds.warmup_rounds"),
    (PROBE + "[rl]\nalgorithm = 'grpo'", "CFG011", "worker.probe_batch_size and job.toml:6: rl.algorithm"),
    (
        "[worker]\nprobe_batch_size = true\nprocesses = 2",
        "CFG011",
        "job.toml:2: worker.probe_batch_size and job.toml:3",
    ),
    (
        "[worker]\nprobe_batch_size = true\ndevice = 'cpu'\n[[workers]]\nmemory_gb = 1\n[[workers]]\ngpu = 1",
        "CFG011",
        "worker.probe_batch_size and workers.1.memory_gb = 0 exclude each other",
    ),
    (
        "[inner_optimizer]\nstochastic_rounding = true\n[sync]\nstrategy = 'sync'",
        "CFG011",
        "the server steps on weights of float32",
    ),
    (
        "[worker]\nprocesses = 2\nsharding = 'full'\n[inner_optimizer]\nstochastic_rounding = true",
        "CFG011",
        "worker.sharding and job.toml:5: inner_optimizer.stochastic_rounding exclude each other",
    ),
    ("[model]\nrepository = 'x'\nquantization = 'nf4'", "CFG011", "only frozen weights below a new adapter may be"),
    ("[model]\nquantization = 'nf4'\ntype = 'auto'\n[model.lora]\nrank = 2", "CFG011", "other tasks train their head"),
    ("[model]\nquantization = 'int4'\n[model.lora]\nrank = 2", "CFG003", "nf4 | int8"),
    ("[worker]\nfused_loss = true\ncompile = true", "CFG011", "head of a compiled model is part of it"),
    ("[worker]\nfused_loss = true\nprocesses = 2\nsharding = 'full'", "CFG011", "FSDP2 gathers the head"),
    ("[worker]\nfused_loss = true\n[rl]\nalgorithm = 'grpo'", "CFG011", "policies are trained on probabilities"),
    ("[inner_optimizer]\nname = 'adamw8bit'\n[sync]\nstrategy = 'sync'", "CFG011", "a state of 8 bits is neither sent"),
    ("[inner_optimizer]\nname = 'adamw8bit'\n[run]\nmode = 'replay'", "CFG011", "a state of 8 bits is neither sent"),
    ("[rounds]\npatience = 0", "CFG003", "allowed integer ≥ 1"),
    ("[rounds]\npatience = 2\nevaluate_every = 0", "CFG011", "rounds.patience and rounds.evaluate_every = 0 exclude"),
    ("[sync]\nin_flight = 2", "CFG011", "job.toml:2: sync.in_flight and sync.fragments = 1 exclude each other"),
    ("[sync]\nin_flight = 3\nfragments = 2", "CFG011", "set at least as many fragments"),
    ("[sync]\nin_flight = 2\nfragments = 2\nstagger = false", "CFG011", "sync.stagger = false exclude each other"),
    ("[sync]\nstrategy = 'async'\n[rounds]\nwarmup_rounds = 2", "CFG011", "job.toml:4: rounds.warmup_rounds and sync."),
    ("[sync]\nfragments = 2\n[run]\nmode = 'replay'", "CFG011", "job.toml:2: sync.fragments and job.toml:4: run.mode"),
    ("[sync]\nstrategy = 'sync'\ndelay_steps = 1", "CFG011", "sync.delay_steps and job.toml:2: sync.strategy exclude"),
    ("[sync]\nmixing = 0.5\n[bridge]\ncommands = ['a']", "CFG011", "sync.mixing and job.toml:4: bridge.commands excl"),
    ("[sync]\nstrategy = 'async'\n[run]\nmode = 'replay'", "CFG011", 'job.toml:4: run.mode and sync.strategy = "asy'),
    ("[sync]\nstrategy = 'async'\ndownward_codec = 'int8'", "CFG011", "job.toml:3: sync.downward_codec and sync.st"),
    ("[sync]\nstrategy = 'async'\nquorum = 1", "CFG011", "job.toml:3: sync.quorum and sync.strategy"),
    ("[sync]\nstrategy = 'async'\nmerge = 'median'", "CFG011", "job.toml:3: sync.merge and sync.strategy"),
    ("[sync]\nstrategy = 'async'\ndelay_steps = 1", "CFG011", "sync.delay_steps and job.toml:2: sync.strategy"),
    ("[sync]\nstrategy = 'async'\n[outer_optimizer]\nname = 'adam'", "CFG011", "job.toml:4: outer_optimizer.name and"),
    ("[sync]\nmax_staleness = -1", "CFG003", "allowed integer ≥ 0"),
    ("[sync]\nmixing = 1.5", "CFG003", "job.toml:2: sync.mixing is out of range"),
    ("[sync]\ndelay_steps = -1", "CFG003", "allowed integer ≥ 0"),
    ("[sync]\npartition = 'layers'", "CFG003", "allowed contiguous | strided"),
    ("[inner_optimizer]\nname = 'no such'", "CFG003", "job.toml:2: inner_optimizer.name is out of range"),
    ("[run]\nmode = 'replay'\n[bridge]\ncommands = ['a']", "CFG011", "job.toml:4: bridge.commands and run.mode"),
    ("[resources.worker]\ncpu = -1", "CFG003", "resources.worker.cpu"),
    ("[resources]\nmin_gpus = -1", "CFG003", "resources.min_gpus"),
    ("[rounds]\nupdate_rounds = 3\nwarmup_rounds = 4", "CFG003", "job.toml:3: rounds.warmup_rounds is more than job"),
    ("[sync]\nquorum = 3", "CFG003", "sync.quorum is more than resources.num_workers"),
    ("[scheduler.job]\ntype = 'fedavg'", "CFG003", "job.toml:2: sync.strategy is out of range — got 'fedavg', allowe"),
    ("[telemetry]\nsinks = ['jsonl', 'comet']", "CFG003", "got 'comet'"),
    ("[run]\nname = '../elsewhere'", "CFG003", "got '../elsewhere'"),
    ("[run]\nname = ''", "CFG003", "got ''"),
    ("[run]\nname = '..'", "CFG003", "got '..'"),
    ("[scheduler]\nstatus_bridge = '0.0.0.0'", "CFG003", "job.toml:2: telemetry.status_bridge is out of range"),
    ("[run]\nseed = 9223372036854775808", "CFG003", "job.toml:2: run.seed is out of range — got more, allowed 64 bits"),
    ("[run]\nseed = 0x" + "f" * 5000, "CFG003", "allowed 64 bits"),
    (
        "[[workers]]\nmemory_gb = 1\n[[workers]]\nprices = [1, 9223372036854775808]",
        "CFG003",
        "job.toml:4: workers.1.prices.1 is",
    ),
    ("[testing]\nslowdown = [0.5]", "CFG003", "got 0.5"),
    # TOML that isn't, and what stands twice.
    ("[run]\nseed = 1\n[rounds]\n[run]\nname = 'x'", "CFG005", "job.toml:4: run is declared twice, on lines 1 and 4"),
    ("[run]\nseed = 1\nseed = 2", "CFG005", "run.seed is declared twice, on lines 2 and 3"),
    ("[run]\nseed = 1\n[scheduler.job.run]\nseed = 2", "CFG005", "job.toml:4: scheduler.job.run.seed and run.seed ar"),
    ("[rounds]\nupdate-rounds = 1\nupdate_rounds = 2", "CFG005", "job.toml:3"),
    ("[run]\nname = \n", "CFG005", "job.toml:2"),
    ("[run\n", "CFG005", "job.toml:1"),
    ("run:\n  seed: 1\n", "CFG005", "job.toml:1"),
    ('{"run": {"seed": 1}}', "CFG005", "job.toml:1"),
    ("[run]\nname = 'x", "CFG005", "job.toml:2"),
    ("[run]\nseed = 01", "CFG005", "job.toml:2"),
    ("[run]\nseed = " + "9" * 5000, "CFG005", "job.toml"),
    ("[run]\rseed = 1", "CFG005", "job.toml:1"),
    # Too large or too deep.
    ("#" * (10 * 2**20), "CFG006", "too large"),
    ("x = " + "[" * 1000 + "]" * 1000, "CFG006", "too deep"),
    ("x = " + "[" * 100_000, "CFG006", "too deep"),
    ("x = " + "{a = " * 1000 + "1" + "}" * 1000, "CFG006", "too deep"),
    ("[model.config]\nx = " + "[" * 40 + "]" * 40, "CFG006", "allowed 32 levels"),
    ("a." * 100_000 + "a = 1", "CFG006", "too deep"),
    ("'a' . " * 100_000 + "a = 1", "CFG006", "too deep"),
    ("[" + "a." * 1000 + "a]", "CFG006", "too deep"),
    # Bytes that are no text.
    (b"\xff\xfe[\0r\0u\0n\0]\0", "CFG007", "byte 0xff at offset 0"),
    (b"[run]\nname = '\xe9'", "CFG007", "byte 0xe9 at offset 14"),
    (b"[run]\nname = 'a\0b'", "CFG007", "byte 0x00 at offset 15"),
    (b"# \0", "CFG007", "byte 0x00 at offset 2"),
    ('\ndataset.path = "a\\u0000b"', "CFG007", "job.toml:2 is not UTF-8 text without NUL"),
    ('[model.config]\n"a\\u0000b" = 1', "CFG007", "job.toml"),
    # Keys that exclude each other.
    ("[model]\nrepository = 'a/b'\nconfig = {model_type = 'llama'}", "CFG011", "job.toml:2: model.repository and job"),
    ("[model]\nrepository = 'a/b'\nconfig = {}", "CFG011", "exclude each other"),
    ("[model]\nrepository = 'a/b'\nnum_labels = 2\nconfig = {hidden_size = 4}", "CFG011", "model.config.hidden_size"),
    ("[model]\nnum_labels = 2\nid2label = {0 = 'a'}", "CFG011", "job.toml:2: model.config.num_labels and "),
]

IN_FLAGS = [
    (["--inner_optimizer.learning_rte", "1"], "CFG001", "unknown flag --inner_optimizer.learning_rte. Fix: did you m"),
    (["--modle.repository", "x"], "CFG001", "did you mean `model.repository`?"),
    (["--learning_rte=1"], "CFG001", "learning_rate`?"),
    (["--verbose"], "CFG001", "unknown flag --verbose"),
    (["--dryrun"], "CFG001", "unknown flag --dryrun. Fix: did you mean --dry-run?"),
    (["--resum", "x"], "CFG001", "did you mean --resume?"),
    (["--hlep"], "CFG001", "did you mean --help?"),
    (["--dry-run=maybe"], "CFG002", "got 'maybe', allowed true | false"),
    (["--"], "CFG001", "unknown flag"),
    (["--.", "x"], "CFG001", "unknown flag"),
    (["--run.", "x"], "CFG001", "unknown flag"),
    (["--run.seed.x", "1"], "CFG001", "unknown flag --run.seed.x"),
    (["--run.seed.x.y", "1"], "CFG001", "unknown flag --run.seed.x.y"),
    (["--resources.x", "1"], "CFG001", "parameter_server_price, start_deadline_s, strategy, worker, worker_price"),
    (["--" + "x" * 100_000], "CFG001", "unknown flag --xxx"),
    (["--rounds.update_rounds", "ten"], "CFG002", "--rounds.update_rounds has the wrong type — got 'ten', allowed in"),
    (["--rounds.update_rounds", "1e3"], "CFG002", "got 1000.0"),
    (["--rounds.update_rounds="], "CFG002", "got ''"),
    (["--worker.compile", "yes"], "CFG002", "allowed true | false"),
    (["--inner_optimizer.learning_rate", ".5"], "CFG002", "got '.5'"),
    (["--run.seed", "1\n[rounds]\nupdate_rounds = 7"], "CFG002", "--run.seed"),
    (["--model", "x"], "CFG002", "--model has the wrong type — got 'x', allowed a table"),
    (["--model.config", "3"], "CFG002", "--model.config"),
    (["--telemetry.sinks", "[jsonl]"], "CFG002", "got '[jsonl]'"),
    (["--rounds.update_rounds", "0"], "CFG003", "got 0"),
    (["--inner_optimizer.momentum", "-1"], "CFG003", "--inner_optimizer.momentum is out of range — got -1"),
    (["--outer_optimizer.momentum", "nan"], "CFG003", "got nan"),
    (["--inner_optimizer.betas", "0.9"], "CFG003", "got [0.9]"),
    (["--run.mode", "fast"], "CFG003", "allowed elastic | replay"),
    (
        ["--model.input_names", "[]"],
        "CFG003",
        "--model.input_names is out of range — got [], allowed list of text, 1 or more",
    ),
    (
        ["--rl.reward.tasks.0.functions", "[]"],
        "CFG003",
        "each of them once. Fix: write what is allowed, or leave it out",
    ),
    (["--telemetry.sinks", "jsonl,comet"], "CFG003", "got 'comet'"),
    (["--resources.num_workers", "3", "--resources.min_workers", "4"], "CFG003", "--resources.min_workers is more th"),
    (["--sync.quorum", "9"], "CFG003", "up to 2"),
    (["--run.seed", "9" * 30], "CFG003", "--run.seed: an integer is out of range — got more, allowed 64 bits"),
    (["--model.config.x", "[" * 5000], "CFG006", "--model.config.x is nested too deep"),
    (["--model.config" + ".a" * 50_000, "1"], "CFG006", "too deep"),
    (["--run.name", "a\0b"], "CFG007", "--run.name"),
    (["--dataset.path", "caf\udce9"], "CFG007", "--dataset.path"),
    (
        ["--model.repository", "a/b", "--model.config.model_type", "x"],
        "CFG011",
        "--model.repository and --model.config",
    ),
    (["stray"], "CFG015", "unexpected argument 'stray'"),
    (["stray"], "CFG015", "Fix: write -- before a key; a job file is a name that ends in .toml, or stands behind @"),
    (["-x"], "CFG015", "unexpected argument '-x'"),
    (["--telemetry.sinks", "jsonl", "otel"], "CFG015", "with commas between them, behind --telemetry.sinks"),
    (["nowhere.toml"], "CFG015", "job file 'nowhere.toml' can't be read"),
    (["run.seed=1"], "CFG015", "unexpected argument 'run.seed'"),
    (["--dry-run", "true"], "CFG015", "unexpected argument 'true'"),
    (["--run.seed"], "CFG015", "--run.seed needs a value — allowed integer ≥ 0"),
    (["--run.seed", "--dry-run"], "CFG015", "--run.seed needs a value"),
    (["--run.name", "@", "x.toml"], "CFG015", "--run.name needs a value"),
    (["@"], "CFG015", "@ names no job file"),
    (["@", "--dry-run"], "CFG015", "@ names no job file"),
    (["@", "/nowhere/job.toml"], "CFG015", "'/nowhere/job.toml' can't be read — got No such file or directory"),
    (["@/nowhere/job.toml"], "CFG015", "can't be read"),
    (["@", "/"], "CFG015", "got a directory"),
    (["@", os.devnull], "CFG015", "got neither file nor directory"),
    (["@", "/dev/zero"], "CFG015", "got neither file nor directory"),
    (["@", "x" * 5000], "CFG015", "can't be read"),
    (["@", "a\0b"], "CFG015", "can't be read"),
    (["--model.token", SECRET], "CFG102", "--model.token: others can read a secret on the command line. Fix: set HF_"),
    ([f"--model.token={SECRET}"], "CFG102", "HF_TOKEN"),
    (["--model", f"{{token = '{SECRET}'}}"], "CFG102", "--model.token"),
    (["--scheduler.job.model.token", SECRET], "CFG102", "HF_TOKEN"),
]


def refused(arguments: list[str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(arguments)
    text = str(caught.value)
    assert text.startswith(f"error[{caught.value.code}]: ")
    assert "\n" not in text
    assert len(text) < 1000
    assert caught.value.fix
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("content", "code", "text"), IN_FILES, ids=range(len(IN_FILES)))
def test_load_wrong_file_is_refused_with_code_and_line(
    content: str | bytes, code: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    error = refused(["@", "job.toml"])
    assert error.code == code
    assert text in str(error)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("arguments", "code", "text"), IN_FLAGS, ids=range(len(IN_FLAGS)))
def test_load_wrong_flag_is_refused_with_code_and_name(arguments: list[str], code: str, text: str) -> None:
    error = refused(arguments)
    assert error.code == code
    assert text in str(error)


def test_load_error_names_the_setting_that_won(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text("[rounds]\nupdate_rounds = 5\n")
    bad.write_text("\n[rounds]\nupdate_rounds = 0\n")
    assert f"{bad}:3: rounds.update_rounds" in str(refused(["@", str(good), "@", str(bad)]))
    assert load(["@", str(bad), "@", str(good)]).job.rounds.update_rounds == 5
    assert "--rounds.update_rounds is" in str(refused(["@", str(good), "--rounds.update_rounds", "0"]))


def test_load_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert refused(["@", str(tmp_path / "fifo")]).code == "CFG015"


@pytest.mark.parametrize(
    "content",
    [
        f"[model]\ntoken = '{SECRET}'\n[run]\nname = ''",
        f"[model]\ntokn = '{SECRET}'",
        f"[model]\ntoken = ['{SECRET}']",
        f"[model.token]\nx = '{SECRET}'",
        f"[model]\ntoken = '{SECRET}'\ntoken = '{SECRET}'",
        f"[model]\ntoken = '{SECRET}",
        f"[model]\ntoken = {SECRET}",
        f'[model]\ntoken = "{SECRET}\\u0000"',
        f"[model]\nrepository = ['{SECRET}']",
        f"model = '{SECRET}'",
        "[model]\ntoken = 123456789",
    ],
)
def test_load_error_about_a_file_with_a_secret_does_not_show_it(content: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(content)
    error = refused(["@", str(file)])
    assert "abcdefgh" not in repr(error) + str(error)
    assert "123456789" not in repr(error) + str(error)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the job has no model"),
        (["--dataset.path", "data"], "the job has no model"),
        (["--model.repository", "", "--dataset.path", "data"], "the job has no model"),
        (["--model.config.hidden_size", "8", "--dataset.path", "data"], "model.config has no model_type"),
        (["--model.repository", "gpt2"], "the job has no dataset"),
        (["--model.repository", "gpt2", "--dataset.path", ""], "the job has no dataset"),
    ],
)
def test_require_complete_job_that_lacks_something_is_refused(arguments: list[str], text: str) -> None:
    job = load(arguments).job
    with pytest.raises(ConfigError, match=text) as caught:
        require_complete(job)
    assert caught.value.code == "CFG012"


@pytest.mark.parametrize("dataset", ["--dataset.path", "--dataset.name"])
@pytest.mark.parametrize("model", ["--model.repository", "--model.config.model_type"])
def test_require_complete_job_with_model_and_dataset_passes(model: str, dataset: str) -> None:
    require_complete(load([model, "gpt2", dataset, "stdlib"]).job)
