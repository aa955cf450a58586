"""Modules that measure each row of the benchmark, by names alone: a wrong name is refused before any is loaded."""

from __future__ import annotations

from typing import Final

_CONDITIONS = ("exact", "noise", "drift", "stragglers")
_PLANNER = tuple(f"planner_{shape}_{name}" for shape in ("8x20", "32x20", "8x5", "32x5") for name in _CONDITIONS)
_CORE = tuple(f"core_{kind}_{workers}" for kind in ("barrier", "async") for workers in (100, 1000, 10_000))
_SYNC = ("sync", "sync_gloo", "sync_torchft", "sync_hivemind")
_CODECS = ("bf16", "fp16", "int8", "int4", "e3m0", "huffman3", "huffman2", "topk", "visible")
_PRODUCTS = ("merge", "gather", "bf16", "fp16", "int8", "int4", "e3m0")
_ASYNCHRONY = ("", "_loss", "_naive", "_naive_loss", "_planned", "_planned_loss")
_RL = ("rl", "rl_one_actor", "rl_two_actors")

PLACES: Final[dict[str, tuple[str, ...]]] = {
    "scheduling.planner:planner": ("planner", *_PLANNER),
    "scheduling.planner:plan_time": ("plan_64_ms", "plan_10000_ms"),
    "scheduling.core:core": ("core", *_CORE, "core_wall_clock"),
    "scheduling.streams:streams": ("streams_500",),
    "scheduling.market:market": ("hire", "exchange_leases", "selection_10000"),
    "scheduling.prediction:prediction": ("prediction", "prediction_bytes_up", "prediction_bytes_down"),
    "start:start": ("start", "start_first_line", "start_first_worker", "start_end"),
    "sinks:sinks": ("all_sinks", "hanging_collector", "hanging_collector_cpu"),
    "throughput:inner_loop": ("inner_overhead", "inner_loop_cpu", "data_wait_fraction"),
    "rl.steps:rl": (*_RL, *(f"{row}_long" for row in _RL)),
    "rl.ahead:ahead": ("rl_ahead_1", "rl_ahead_1_pass", "rl_ahead_2", "rl_ahead_2_pass"),
    "rl.engines:rounds": ("continuous_round",),
    "rl.engines:long_responses": ("continuous_64", "continuous_128"),
    "bridge:bridge": ("bridge_receive", "bridge_throughput", "bridge_file"),
    "relay:relay": ("bridge_relay",),
    "slice_path:slice_path": ("slice_path", "slice_path_first"),
    "data_faults:data_faults": ("data_node_killed", "data_node_removed", "data_node_damaged"),
    "exchange:exchange": tuple(f"{row}_{size}" for size in ("25M_2", "25M_4", "100M_2", "100M_4") for row in _SYNC),
    "device_exchange:device_exchange": tuple(f"device_{name}" for name in _PRODUCTS),
    "wide_area.time_to_loss:time_to_loss": ("time_to_loss",),
    "wide_area.overlap:overlap": ("overlap_none", "overlap", "overlap_one_in_flight", "overlap_three_in_flight"),
    "wide_area.peak:peak": ("peak_bytes",),
    "convergence.asynchrony:asynchrony": tuple(f"asynchrony{kind}" for kind in _ASYNCHRONY),
    "convergence.exchange_options:options": ("option_fragments", "option_delay", "option_mixing", "option_warm_up"),
    "codecs:codecs": (*(f"codec_{name}" for name in _CODECS), "codec_visible_down"),
}
"""Rows that one function measures, by its module and its name."""
QUALITY = "convergence.quality:quality"
QUALITY_ROWS = ("quality", "quality_muon")
"""Rows that are measured one at a time, each with that of a worker alone."""
GPU = "gpu.rows:measure_on"
GPU_ROWS = ("gpu_loop", "gpu_auto", "gpu_trainer", "gpu_exchange", "gpu_generation", "gpu_start")
"""Rows of one GPU; the name ``gpu`` stands for all of them."""
