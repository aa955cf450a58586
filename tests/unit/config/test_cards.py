"""Cards are known by the names that CUDA gives them, and by Ray's labels."""

import pytest

from hypha_ray.config.automatic import CARDS, capability_of, find_card

NAMES = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA A10": 125.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71.0,
    "Tesla T4": 65.0,
    "Tesla V100-SXM2-16GB": 125.0,
    "Tesla V100-PCIE-32GB": 112.0,
    "Tesla V100S-PCIE-32GB": 130.0,
}
OTHERS = (
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA A1000",
    "AMD Instinct MI300X",
    "",
)


@pytest.mark.parametrize(("name", "tflops"), NAMES.items())
def test_card_has_the_peak_of_its_data_sheet(name: str, tflops: float) -> None:
    card = find_card(name)
    assert card is not None and card.tflops == tflops


@pytest.mark.parametrize("name", OTHERS)
def test_other_card_or_a_part_of_one_has_none(name: str) -> None:
    assert find_card(name) is None


def test_labels_of_ray_tell_the_capability() -> None:
    known = {"H100": (9, 0), "A100": (8, 0), "L4": (8, 9), "T4": (7, 5), "V100": (7, 0), "G": None, "MI300X": None}
    assert {label: capability_of(label) for label in known} == known
    assert len({card.name for card in CARDS}) == len(CARDS)
