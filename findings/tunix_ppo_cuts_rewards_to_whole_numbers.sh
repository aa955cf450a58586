#!/usr/bin/env bash
# google-tunix 0.1.7: PPO cuts every reward to a whole number, so 0.9 trains as 0 and -1.9 as -1.
#
# PPOLearner puts each answer's reward on its last token, in an array that is made like the token ids: of int32. The sum
# of a float and a whole number is cut toward 0 there. Rewards that are 0 or 1 pass; the shares of tests passed, of
# format points or of similarity, and the scores of a reward model, which are hardly ever whole, become 0 for most
# answers. Then the advantages come from the critic's errors alone. The logged rewards/score/mean, which is taken
# before, is right. The documentation says that a reward function returns "a list of float rewards". GRPO, in the same
# package, keeps them. JAX has a FutureWarning about types, once a process; the run goes on.
#
# hypha_ray isn't touched: it computes its own advantages, in floating point.
#
# Seen with google-tunix 0.1.7, jax 0.10.2, flax 0.12.8, Python 3.11 (one batch, no KL term, gae_lambda = gamma = 1, so
# the return of the first token is the reward):
#   reward 1: logged 1.00, trained on 1.00
#   reward 0.9: logged 0.90, trained on 0.00
#   reward 0.5: logged 0.50, trained on 0.00
#   reward -0.5: logged -0.50, trained on 0.00
#   reward 1.9: logged 1.90, trained on 1.00
#   reward -1.9: logged -1.90, trained on -1.00
#   two functions of 0.7: logged 1.40, trained on 1.00
#   a reward model: logged -0.21, trained on 0.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" jax==0.10.2 flax==0.12.8 optax==0.2.8 numpy==2.4.6 qwix==0.1.8 google-metrax==0.2.4 google-tunix==0.1.7

cat > "$work/rewards.py" <<'PY'
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.rl import rl_cluster
from tunix.rl.ppo import ppo_learner
from tunix.rl.rollout import base_rollout
from tunix.tests import test_common

VOCABULARY = test_common.MockVocab()
CONFIG = test_common.ModelConfig(num_layers=1, vocab_size=VOCABULARY.GetPieceSize())
MESH = Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))


def policy(seed):
    model = test_common.ToyTransformer(CONFIG, rngs=nnx.Rngs(seed))
    never_padding = model.lm_head.bias[...].at[VOCABULARY.pad_id()].set(-1e9)
    model.lm_head.bias[...] = never_padding
    return model


def scorer(seed):
    return test_common.ToyTransformerWithScoreHead(policy(seed), nnx.Rngs(seed))


def shown(label, reward_fns=None, reward_model=None):
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.sgd(0.1), critic_optimizer=optax.sgd(0.1), eval_every_n_steps=100, max_steps=1
    )
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=6, max_prompt_length=8, kv_cache_size=32, temperature=1.0
    )
    cluster = rl_cluster.RLCluster(
        actor=policy(0), critic=scorer(1), reward=reward_model, tokenizer=VOCABULARY,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: MESH for role in rl_cluster.Role}, training_config=training, rollout_config=rollout
        ),
    )
    logged = {}
    cluster.buffer_metrics = lambda metrics, mode: logged.update(metrics)
    learner = ppo_learner.PPOLearner(cluster, ppo_learner.PPOConfig(beta=0.0, gae_lambda=1.0), reward_fns=reward_fns)
    batch = learner._generate_and_compute_advantage({"prompts": ["hello world", "My name is"]})
    assert bool(batch.completion_mask.all())
    trained = np.asarray(batch.returns)[:, 0].mean()
    trained = round(float(trained), 2) + 0.0
    print(f"{label}: logged {logged['rewards/score/mean'][0]:.2f}, trained on {trained:.2f}")


def constant(reward):
    def reward_function(prompts, completions, **_):
        return [reward] * len(completions)

    return reward_function


for reward in (1.0, 0.9, 0.5, -0.5, 1.9, -1.9):
    shown(f"reward {reward:g}", [constant(reward)])
shown("two functions of 0.7", [constant(0.7), constant(0.7)])
shown("a reward model", reward_model=scorer(2))
PY
"$work/env/bin/python" -W ignore "$work/rewards.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
