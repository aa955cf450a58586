"""Kinds of GPUs: names, compute capability, and peak of dense matrix products of 16 bits.

Peaks are those of NVIDIA's data sheets, without sparsity and with sums of 32 bits: bfloat16, or float16 before Ampere.
A card that isn't listed has no peak here, and neither has a part of one (MIG) or a laptop's, which is slower.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

Capability: TypeAlias = tuple[int, int]
"""Compute capability of a card, such as (9, 0)."""

FIRST_WITH_BF16: Final[Capability] = (8, 0)
"""Compute capability from which on cards multiply matrices of bfloat16."""
FIRST_WITH_FP16: Final[Capability] = (7, 0)
"""Compute capability from which on cards multiply matrices of float16 faster than others."""
_VENDOR = re.compile(r"^(NVIDIA )?(Tesla |GeForce )?")


@dataclass(frozen=True, slots=True)
class Card:
    """Kind of a GPU."""

    name: str
    """Name in a dry run."""
    pattern: str
    """Regular expression of the whole name that `torch.cuda.get_device_name` returns, without the vendor's name."""
    tflops: float
    """Dense peak of 16 bits, in 10¹² operations a second."""
    capability: Capability
    source: str
    """Document with the peak."""


CARDS: Final = (
    Card("B200", "B200", 2250.0, (10, 0), "HGX B200 data sheet: 36 PFLOPS of 8 cards, with sparsity"),
    Card("GB200", "GB200", 2500.0, (10, 0), "GB200 NVL72 data sheet: 360 PFLOPS of 72 cards, with sparsity"),
    Card("H200", "H200", 989.4, (9, 0), "H200 data sheet: 1979 TFLOPS with sparsity"),
    Card("H200 NVL", "H200 NVL", 835.5, (9, 0), "H200 data sheet: 1671 TFLOPS with sparsity"),
    Card("GH200", r"GH200 \d+GB", 989.4, (9, 0), "GH200 data sheet: 1979 TFLOPS with sparsity"),
    Card("H100 SXM", r"H100 \d+GB HBM3", 989.4, (9, 0), "H100 data sheet: 1979 TFLOPS with sparsity"),
    Card("H100 PCIe", r"H100 PCIe|H100 80GB HBM2e", 756.5, (9, 0), "H100 data sheet: 1513 TFLOPS with sparsity"),
    Card("H100 NVL", "H100 NVL", 835.5, (9, 0), "H100 data sheet: 1671 TFLOPS with sparsity"),
    Card("A100", r"A100-(SXM4|PCIE)-\d+GB|A100 80GB PCIe", 312.0, (8, 0), "A100 data sheet"),
    Card("A40", "A40", 149.7, (8, 6), "A40 data sheet"),
    Card("A30", "A30", 165.0, (8, 0), "A30 data sheet"),
    Card("A10", "A10", 125.0, (8, 6), "A10 data sheet"),
    Card("A10G", "A10G", 70.0, (8, 6), "A10G data sheet"),
    Card("L40S", "L40S", 362.05, (8, 9), "L40S data sheet"),
    Card("L40", "L40", 181.05, (8, 9), "L40 data sheet"),
    Card("L4", "L4", 121.0, (8, 9), "L4 data sheet: 242 TFLOPS with sparsity"),
    Card("RTX 4090", "RTX 4090", 165.2, (8, 9), "Ada GPU architecture, appendix A"),
    Card("RTX 3090", "RTX 3090", 71.0, (8, 6), "Ampere GA102 GPU architecture, appendix A"),
    Card("T4", "T4", 65.0, (7, 5), "T4 data sheet, float16"),
    Card("V100 SXM2", r"V100-SXM\d-\d+GB(-LS)?", 125.0, (7, 0), "V100 data sheet, float16"),
    Card("V100 PCIe", r"V100-PCIE-\d+GB", 112.0, (7, 0), "V100 data sheet, float16"),
    Card("V100S", r"V100S-PCIE-\d+GB", 130.0, (7, 0), "V100 data sheet, float16"),
)
"""Cards that are known."""


def find_card(device_name: str) -> Card | None:
    """Return the card with the name that torch gives a device; None if it isn't listed."""
    name = _VENDOR.sub("", device_name.strip())
    return next((card for card in CARDS if re.fullmatch(card.pattern, name)), None)


def capability_of(label: str, cards: Iterable[Card] = CARDS) -> Capability | None:
    """Return the compute capability of GPUs with a label of Ray, such as H100; None for others."""
    for card in cards:
        series, *_ = card.name.split()
        if series == label:
            return card.capability
    return None
