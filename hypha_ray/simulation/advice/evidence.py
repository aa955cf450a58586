"""Measured figures that advice rests on, each with its source and the model sizes that it was measured at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOLERANCE: Final = 2.0
"""Factor beyond the measured sizes from which a figure is called an extrapolation."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A measured figure."""

    figure: str
    source: str
    """Paper, page or table that has the figure."""
    least_parameters: float
    """Parameters of the smallest model that it was measured with."""
    most_parameters: float
    """Parameters of the largest."""

    def text(self, parameters: float) -> str:
        """Write figure and source, and whether they say little of a model of this size."""
        text = f"{self.figure} ({self.source})"
        if self.least_parameters / TOLERANCE <= parameters <= self.most_parameters * TOLERANCE:
            return text
        measured = size_text(self.least_parameters)
        if self.most_parameters > self.least_parameters:
            measured = f"{measured} to {size_text(self.most_parameters)}"
        return f"{text}; measured at {measured} parameters, so an extrapolation to {size_text(parameters)}"


def size_text(parameters: float) -> str:
    """Write a number of parameters: ``1.1 billion``, ``136 thousand``."""
    for limit, noun in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if parameters >= limit:
            return f"{parameters / limit:.3g} {noun}"
    return f"{parameters:.0f}"


QUALITY: Final = "docs/communication.md"
DILOCO: Final = "DiLoCo, arXiv 2311.08105"
OPEN_DILOCO: Final = "OpenDiLoCo, arXiv 2407.07852"
INTELLECT: Final = "INTELLECT-1, arXiv 2412.01152"
STREAMING: Final = "Streaming DiLoCo, arXiv 2501.18512"
SCALING: Final = "Scaling laws for DiLoCo, arXiv 2503.09799, Table 4"

SHORT_ROUNDS: Final = Evidence(
    "rounds of 13 steps with four workers end at 0.999 of the loss of synchronous AdamW", QUALITY, 0.15e6, 0.15e6
)
H_30: Final = Evidence("H = 30 ends at 2.49, as data parallelism does, on C4", STREAMING, 1e9, 1e9)
H_100: Final = Evidence(
    "H = 100 ends at 3.56, H = 30 at 3.53 with 35 million parameters; with 1 billion at 2.66, data parallelism at 2.67",
    STREAMING,
    35e6,
    1e9,
)
H_500: Final = Evidence("H = 500 ends at perplexity 15.02, data parallelism at 15.30", DILOCO, 150e6, 150e6)
H_500_LARGE: Final = Evidence("H = 125 is nearer to the baseline than 500", OPEN_DILOCO, 1.1e9, 1.1e9)
H_1000: Final = Evidence("H = 1000 costs 2.9 % of perplexity over H = 50", DILOCO, 150e6, 150e6)

HALF_PRECISION: Final = Evidence("16 bits lose nothing", OPEN_DILOCO, 150e6, 1.1e9)
EIGHT_BITS: Final = Evidence("8 bits with H = 100 trained a model on a trillion tokens", INTELLECT, 10e9, 10e9)
FOUR_BITS: Final = Evidence(
    "4 bits (E3M0) lose nothing: streaming with them ends at 3.53, DiLoCo at 3.54", STREAMING, 35e6, 35e6
)
FOUR_BITS_HERE: Final = Evidence(
    "int4 both ways with feedback ends at 0.999 of synchronous AdamW", QUALITY, 0.15e6, 0.15e6
)
TWO_BITS: Final = Evidence(
    "huffman2 up and huffman3 down with Muon end at 1.007 of synchronous Muon", QUALITY, 0.15e6, 0.15e6
)

FRAGMENTS: Final = Evidence("fragments of three layers in turn end at 2.48 instead of 2.49", STREAMING, 1e9, 1e9)
FRAGMENTS_HERE: Final = Evidence("two fragments in turn end at 0.996 of the loss without", QUALITY, 0.15e6, 0.15e6)
SHORT_DELAY: Final = Evidence("a delay of up to 10 steps costs less than 0.2 %", STREAMING, 35e6, 1e9)
LONG_DELAY: Final = Evidence("a delay of half a round costs 6.1 % of the loss", QUALITY, 0.15e6, 0.15e6)

OUTER: Final = Evidence("outer Nesterov with η 0.7 and μ 0.9 is better than SGD and Adam", DILOCO, 150e6, 150e6)
OUTER_STREAMING: Final = Evidence("with fragments in turn it takes η 0.4", STREAMING, 35e6, 1e9)
DROPPED: Final = Evidence("half of all deltas dropped cost 2.1 % of perplexity", DILOCO, 150e6, 150e6)

LOSS_AT_H_30: Final[dict[float, dict[int, float]]] = {
    35e6: {0: 3.485, 1: 3.482, 2: 3.508, 4: 3.554, 8: 3.621},
    90e6: {0: 3.167, 1: 3.162, 2: 3.182, 4: 3.213, 8: 3.265},
    180e6: {0: 2.950, 1: 2.943, 2: 2.957, 4: 2.981, 8: 3.019},
    550e6: {0: 2.653, 1: 2.645, 2: 2.657, 4: 2.673, 8: 2.698},
    2.4e9: {0: 2.326, 1: 2.317, 2: 2.323, 4: 2.332, 8: 2.351},
    4e9: {0: 2.224, 1: 2.219, 2: 2.220, 4: 2.230},
    10e9: {0: 2.090, 1: 2.086, 2: 2.086, 4: 2.096},
}
"""Loss by parameters and workers, with H = 30; of 0 workers that of data parallelism. From `SCALING`."""


def loss_beside_data_parallelism(parameters: float, workers: int) -> str | None:
    """Write the nearest published loss over that of data parallelism; None beyond the measured sizes and fleets."""
    size = min(LOSS_AT_H_30, key=lambda measured: max(measured / parameters, parameters / measured))
    if max(size / parameters, parameters / size) > TOLERANCE:
        return None
    losses = LOSS_AT_H_30[size]
    fleets = [fleet for fleet in losses if fleet]
    fleet = min(fleets, key=lambda measured: max(measured / workers, workers / measured))
    if max(fleet / workers, workers / fleet) > TOLERANCE:
        return None
    excess = 100 * (losses[fleet] / losses[0] - 1)
    condition = f"{fleet} workers with H = 30 and {size_text(size)} parameters"
    return f"{condition} end {excess:+.1f} % from data parallelism's loss ({SCALING})"
