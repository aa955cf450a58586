"""The tables of a job file about optimizers: the workers' and the parameter server's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from hypha_ray.config.value_types import Count, Fraction, NotNegative, Positive, Table, identifier
from hypha_ray.plugins import Plugin


class InnerOptimizer(Table):
    """Optimizer of every worker; in synchronous training, of the server, which steps on the mean gradient."""

    name: Annotated[str, AfterValidator(identifier), Plugin("inner_optimizers", checked=False)] = Field(
        "adamw", description="muon: for matrices, the rest by AdamW; or the name of a class of torch.optim"
    )
    name_options: dict[str, Any] | None = Field(None, description="options of your own inner optimizer")
    learning_rate: Positive = Field(1e-3, description="peak learning rate of AdamW and SGD")
    muon_learning_rate: Positive = Field(2e-2, description="peak learning rate of the matrices under muon")
    muon_step_length: Literal["original", "match_rms_adamw"] = Field(
        "original",
        description="muon's steps in rates: √max(1, outputs/inputs), or 0.2·√max(outputs, inputs), for AdamW's rates",
    )
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), strict=False, description="decay of AdamW's running averages")
    epsilon: Positive = Field(1e-8, description="AdamW's epsilon")
    k_aware: bool = Field(
        False, description="AdamW: steps as long as those on the mean gradient of all workers, which has less noise"
    )
    momentum: Fraction = Field(0.0, description="momentum of sgd; Muon's is 0.95")
    weight_decay: NotNegative = Field(0.1, description="weight decay, decoupled except for sgd")
    stochastic_rounding: bool = Field(
        False, description="weights of bfloat16: round steps at random, so that small ones aren't lost on average"
    )
    schedule: Annotated[str, Plugin("schedules")] = Field("constant", description="learning rate over inner steps")
    schedule_options: dict[str, Any] | None = Field(None, description="options of your own schedule")
    warmup_steps: int = Field(0, ge=0, description="inner steps of linear warm-up")
    total_steps: Count | None = Field(None, description="inner steps of the schedule; default: as planned")
    decay_steps: Count | None = Field(None, description="inner steps of wsd's decay; default: a fifth of total_steps")
    min_lr_rate: Fraction = Field(0.0, description="fraction of the peak rate at which schedules end, except constant")
    clip_norm: Positive | None = Field(1.0, description="gradient norm above which gradients are scaled down")


class OuterOptimizer(Table):
    """Optimizer of the parameter server, which steps on the mean delta."""

    name: Annotated[str, Plugin("outer_optimizers")] = Field(
        "nesterov", description="average: the workers' mean itself, which is nesterov with η = 1 and μ = 0"
    )
    name_options: dict[str, Any] | None = Field(None, description="options of your own outer optimizer")
    learning_rate: Positive = Field(0.7, description="η in θ ← θ + η(μv + Δ̄); for adam far smaller, such as 1e-3")
    momentum: Fraction = Field(0.9, description="μ in v ← μv + Δ̄")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.99), strict=False, description="decay of adam's running averages")
    epsilon: Positive = Field(1e-8, description="adam's epsilon")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate over the rounds")
    final_learning_rate: NotNegative | None = Field(
        None, description="η of the last round, unless the schedule is constant; default: a seventh of learning_rate"
    )
