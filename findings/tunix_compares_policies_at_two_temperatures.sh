#!/usr/bin/env bash
# google-tunix 0.1.7: GRPO's importance ratios and PPO's KL penalty are off by the temperature, for equal policies too.
#
# An answer's old log-probabilities come from the rollout's model, whose logits are not divided by the temperature.
# Those that they are compared with are divided: in GRPO, where num_iterations above 1 takes them as the old policy, the
# loss's own, and in PPO the reference's. So before any step GRPO's ratios are not 1, and part of the tokens is clipped
# away or weighed by chance; PPO punishes a policy that is its reference, and one that has made the reference's
# distribution sharper by the power 1 / temperature not: the penalty that should hold the policy drives it away. The
# temperature is 0.9 by default, so both are met without setting one. The logged KL never gets to 0. A comment in the
# package calls this very difference an artifact, where the agentic learners divide both. Nothing is said.
#
# hypha_ray isn't touched: it has its own losses.
#
# Seen with google-tunix 0.1.7, jax 0.10.2, flax 0.12.8, Python 3.11 (policy, old policy and reference are the same toy
# model, before any step; 64 prompts, answers of 6 tokens; means of PPO's three estimators):
#   temperature 1: PPO's kl 0.000, low_var_kl 0.000, mse_kl 0.000; GRPO's ratios 1.00 to 1.00
#   temperature 0.9: PPO's kl -0.008, low_var_kl 0.003, mse_kl 0.003; GRPO's ratios 0.76 to 1.16
#   temperature 0.6: PPO's kl -0.095, low_var_kl 0.090, mse_kl 0.090; GRPO's ratios 0.18 to 1.97
#   temperature 1.5: PPO's kl -0.040, low_var_kl 0.047, mse_kl 0.041; GRPO's ratios 0.59 to 3.96
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" jax==0.10.2 flax==0.12.8 optax==0.2.8 numpy==2.4.6 qwix==0.1.8 google-metrax==0.2.4 google-tunix==0.1.7

cat > "$work/penalty.py" <<'PY'
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.rl import function_registry, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.ppo import ppo_learner
from tunix.rl.rollout import base_rollout
from tunix.tests import test_common

VOCABULARY = test_common.MockVocab()
CONFIG = test_common.ModelConfig(num_layers=1, vocab_size=VOCABULARY.GetPieceSize())
MESH = Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
PROMPTS = ["hello world", "My name is"] * 32


def model(seed=0):
    network = test_common.ToyTransformer(CONFIG, rngs=nnx.Rngs(seed))
    network.lm_head.kernel[...] = 3 * network.lm_head.kernel[...]
    network.lm_head.bias[...] = network.lm_head.bias[...].at[VOCABULARY.pad_id()].set(-1e9)
    return network


def reward(prompts, completions, **_):
    return [1.0] * len(completions)


def learner(kind, config, temperature, **models):
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.sgd(0.1), critic_optimizer=optax.sgd(0.1), eval_every_n_steps=100, max_steps=1,
        mini_batch_size=64, train_micro_batch_size=64, rollout_micro_batch_size=64, compute_logps_micro_batch_size=64,
    )
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=6, max_prompt_length=8, kv_cache_size=32, temperature=temperature, seed=jax.random.key(0)
    )
    cluster = rl_cluster.RLCluster(
        actor=model(), reference=model(), tokenizer=VOCABULARY,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: MESH for role in rl_cluster.Role}, training_config=training, rollout_config=rollout
        ),
        **models,
    )
    cluster.logged = {}
    cluster.buffer_metrics = lambda metrics, mode: cluster.logged.update(metrics)
    return cluster, kind(cluster, config, reward_fns=[reward])


def ppo_penalty(temperature, method):
    critic = test_common.ToyTransformerWithScoreHead(model(1), nnx.Rngs(1))
    config = ppo_learner.PPOConfig(kl_method=method)
    cluster, ppo = learner(ppo_learner.PPOLearner, config, temperature, critic=critic)
    ppo._generate_and_compute_advantage({"prompts": PROMPTS})
    return float(cluster.logged["rewards/reward_kl_penalty"][0]) + 0.0


def grpo_ratios(temperature):
    config = grpo_learner.GRPOConfig(num_generations=2, num_iterations=2)
    cluster, grpo = learner(grpo_learner.GRPOLearner, config, temperature)
    batch = grpo._generate_and_compute_advantage({"prompts": PROMPTS})
    loss = function_registry.default_registry.get("policy_loss_fn", "grpo")
    _, figures = loss(cluster.actor_trainer.model, batch, config, VOCABULARY.pad_id(), VOCABULARY.eos_id())
    return [float(figures[f"is_ratio/{name}"]) for name in ("min", "max")]


for temperature in (1.0, 0.9, 0.6, 1.5):
    penalties = [f"{method} {ppo_penalty(temperature, method):.3f}" for method in ("kl", "low_var_kl", "mse_kl")]
    ratios = " to ".join(f"{ratio:.2f}" for ratio in grpo_ratios(temperature))
    print(f"temperature {temperature:g}: PPO's {', '.join(penalties)}; GRPO's ratios {ratios}")
PY
"$work/env/bin/python" -W ignore "$work/penalty.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
