"""Whether a run may go on: what makes two datasets the same."""

from __future__ import annotations

from hypha_ray.data.manifest import Manifest, PreprocessorInfo, TensorInfo
from hypha_ray.types import SliceInfo

ONE, TWO = (SliceInfo(number, f"{number}.safetensors", f"{number}" * 64, 10 + number) for number in (0, 1))


def manifest(*slices: SliceInfo, name: str = "texts", preprocessor: PreprocessorInfo | None = None) -> Manifest:
    tensors = (TensorInfo("input_ids", "int32", (8,), 0, 9),)
    return Manifest(name=name, modality="language", slices=slices, tensors=tensors, preprocessor=preprocessor)


def test_identity_of_a_dataset_is_that_of_its_samples_and_not_of_its_names() -> None:
    renamed = SliceInfo(0, "other.safetensors", ONE.sha256, ONE.samples)
    other = manifest(TWO, renamed, name="other", preprocessor=PreprocessorInfo("gpt2"))
    assert other.identity == manifest(ONE, TWO).identity


def test_identity_of_a_dataset_changes_with_a_slice_its_size_place_or_split() -> None:
    changed = [
        SliceInfo(0, ONE.file, "f" * 64, ONE.samples),
        SliceInfo(0, ONE.file, ONE.sha256, ONE.samples + 1),
        SliceInfo(2, ONE.file, ONE.sha256, ONE.samples),
        SliceInfo(0, ONE.file, ONE.sha256, ONE.samples, "validation"),
    ]
    found = {manifest(TWO, one).identity for one in (ONE, *changed)} | {manifest(TWO).identity}
    assert len(found) == len(changed) + 2
