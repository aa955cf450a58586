#!/usr/bin/env bash
# optax 0.2.8: with one weight in bfloat16 Schedule-Free averages the last 300 steps or so, not all, for all other
# weights too.
#
# Schedule-Free has no decaying rate because its result is the average of all steps so far: step t moves the average by
# weight_t / (sum of the weights), which is 1/t for a constant rate. schedule_free keeps the sum in the lowest dtype of
# the parameters. bfloat16 has 8 bits: as soon as the sum is some 300 weights, the next one is rounded away, and the
# average is one that forgets, with a fixed rate, from then on. The noise that averaging removes stays. One leaf in
# bfloat16, such as an embedding, does it to a tree that is in float32 otherwise. state_dtype=float32 is for z alone, as
# its line of the docstring says; no setting is there for the sum, and the docstring has no word of its dtype. The
# published implementation by the method's authors keeps the sum as a Python float.
#
# hypha_ray isn't touched: it doesn't use optax, and has no Schedule-Free.
#
# Seen with optax 0.2.8, jax 0.10.2, numpy 2.4.6, Python 3.11 (a noisy parabola from 1, whose minimum is at 0;
# averages):
#   in float64: 0.117 after 300, -0.012 after 1000, -0.006 after 4000
#   float32: 0.117 after 300, -0.012 after 1000, -0.006 after 4000; steps counted 4000
#   float32, another weight in bfloat16: 0.136 after 300, 0.054 after 1000, -0.046 after 4000; steps counted 312
#   bfloat16, state_dtype float32: 0.142 after 300, 0.055 after 1000, -0.046 after 4000; steps counted 312
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 optax==0.2.8

cat > "$work/average.py" <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import schedule_free_eval_params, schedule_free_sgd

RATE, STEPS = 0.01, 4000
NOISE = np.random.default_rng(0).standard_normal(STEPS)


def exact():
    fast = average = middle = 1.0
    for step, noise in enumerate(NOISE, 1):
        fast -= RATE * (middle + noise)
        average += (fast - average) / step
        middle = 0.9 * average + 0.1 * fast
        yield step, average


def trained(dtypes, **options):
    weights = {name: jnp.ones((), dtype) for name, dtype in dtypes.items()}
    optimizer = schedule_free_sgd(RATE, b1=0.9, **options)
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state, noise):
        gradients = jax.tree.map(lambda weight: (weight + noise).astype(weight.dtype), weights)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    for noise in NOISE:
        weights, state = step(weights, state, jnp.float32(noise))
        yield float(state.weight_sum) / RATE**2, float(schedule_free_eval_params(state, weights)["layer"])


SHOWN = (300, 1000, 4000)
print("in float64: " + ", ".join(f"{average:.3f} after {step}" for step, average in exact() if step in SHOWN))
for name, dtypes, options in (
    ("float32", {"layer": jnp.float32}, {}),
    ("float32, another weight in bfloat16", {"layer": jnp.float32, "other": jnp.bfloat16}, {}),
    ("bfloat16, state_dtype float32", {"layer": jnp.bfloat16}, {"state_dtype": jnp.float32}),
):
    seen = list(trained(dtypes, **options))
    averages = ", ".join(f"{seen[step - 1][1]:.3f} after {step}" for step in SHOWN)
    print(f"{name}: {averages}; steps counted {seen[-1][0]:.0f}")
PY
"$work/env/bin/python" -W ignore "$work/average.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
