"""Images and recordings: tensors are those of the model's preprocessor, labels those of folder or column."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from scipy.io import wavfile
from transformers import AutoProcessor, SeamlessM4TFeatureExtractor, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from hypha_ray.data.manifest import ClassInfo, Manifest
from hypha_ray.data.report import class_counts
from hypha_ray.errors import ConfigError, DataError
from tests.support.prepared import arrays_of, omissions, prepared, table

RATE = 800


def run(source: Path | str, out: Path, **options: Any) -> Manifest:
    return prepared(source, out, **{"validation_fraction": 0.0, **options})


@pytest.fixture
def processor(tmp_path: Path) -> str:
    """An image processor in the form of ViT's: 4 by 6 pixels, from -1 to 1."""
    ViTImageProcessorPil(size={"height": 4, "width": 6}).save_pretrained(tmp_path / "vit")
    return str(tmp_path / "vit")


@pytest.fixture
def extractor(tmp_path: Path) -> str:
    Wav2Vec2FeatureExtractor(sampling_rate=RATE, do_normalize=False).save_pretrained(tmp_path / "wav2vec2")
    return str(tmp_path / "wav2vec2")


def picture(grey: int, mode: str = "RGB") -> Image.Image:
    return Image.new("RGB", (12, 8), (grey, grey, grey)).convert(mode)


def png(grey: int) -> bytes:
    buffer = io.BytesIO()
    picture(grey).save(buffer, "PNG")
    return buffer.getvalue()


def pictures(folder: Path, split: str = "") -> Path:
    """Two dark and one light picture, in a folder for each class."""
    for name, greys in {"dark": (0, 51), "light": (255,)}.items():
        (folder / split / name).mkdir(parents=True)
        for grey in greys:
            (folder / split / name / f"{grey}.png").write_bytes(png(grey))
    return folder


def levels(out: Path) -> list[tuple[float, int]]:
    """Value of the pixels of each image, which all are equal, and its label."""
    arrays = arrays_of(out)
    assert arrays["images"].dtype == np.float32
    assert all(image.min() == image.max() for image in arrays["images"])
    return sorted(
        (round(float(image[0, 0, 0]), 3), int(label))
        for image, label in zip(arrays["images"], arrays["labels"], strict=True)
    )


def wave(folder: Path, name: str, samples: npt.NDArray[np.generic], rate: int = RATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wavfile.write(folder / name, rate, samples)
    return folder / name


# ── images ────────────────────────────────────────────────────────────────────────────────────────────────────────

THREE = [(-1.0, 0), (-0.6, 0), (1.0, 1)]


def test_photos_are_upright_and_greys_of_16_bits_keep_their_steps(tmp_path: Path, processor: str) -> None:
    """As transformers and datasets turn photos; of four sixths of white, Pillow's own conversion makes white."""
    turned, upright = Image.new("RGB", (6, 4)), Image.new("RGB", (6, 4))
    for x in range(3):
        for y in range(4):
            upright.putpixel((x, y), (255, 255, 255))
            turned.putpixel((5 - x, 3 - y), (255, 255, 255))
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "b").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 3
    turned.save(tmp_path / "in" / "a" / "turned.png", exif=exif)
    steps = np.full((4, 6), 43690, np.uint16)
    Image.fromarray(steps).save(tmp_path / "in" / "b" / "grey.png")
    Image.fromarray(steps).save(tmp_path / "in" / "b" / "grey.pgm")
    Image.fromarray(steps.astype(np.float32)).save(tmp_path / "in" / "b" / "float.tiff")
    manifest = run(tmp_path / "in", tmp_path / "out", preprocessor=processor)
    assert omissions(manifest) == {"files with greys of 32 bits, whose range isn't known": 1}
    arrays = arrays_of(tmp_path / "out")
    (photo,), greys = arrays["images"][arrays["labels"] == 0], arrays["images"][arrays["labels"] == 1]
    np.testing.assert_allclose(photo, np.asarray(upright, np.float32).transpose(2, 0, 1) / 127.5 - 1, atol=1e-6)
    np.testing.assert_allclose(greys, np.full((2, 3, 4, 6), 170 / 127.5 - 1), atol=1e-6)


def test_images_in_folders_have_the_classes_of_their_folders(tmp_path: Path, processor: str) -> None:
    manifest = run(pictures(tmp_path / "in"), tmp_path / "out", preprocessor=processor)
    assert (manifest.modality, manifest.classes) == ("vision", ClassInfo(("dark", "light")))
    assert manifest.shapes == {"images": (3, 4, 6), "labels": ()}
    assert levels(tmp_path / "out") == THREE
    assert class_counts(tmp_path / "out", manifest) == {"dark": 2, "light": 1}
    assert manifest.origin is not None and (manifest.origin.files, manifest.origin.documents) == (3, 3)


def test_preprocessor_is_kept_and_makes_the_same_tensors(tmp_path: Path, processor: str) -> None:
    out = tmp_path / "out"
    manifest = run(pictures(tmp_path / "in"), out, preprocessor=processor)
    assert manifest.preprocessor is not None and manifest.preprocessor.folder == "preprocessor"
    kept = AutoProcessor.from_pretrained(out / "preprocessor")
    wanted = kept(images=[picture(51)], return_tensors="np")["pixel_values"][0]
    assert any((image == wanted).all() for image in arrays_of(out)["images"])


def test_other_files_and_damaged_images_are_counted(tmp_path: Path, processor: str) -> None:
    folder = pictures(tmp_path / "in")
    (folder / "dark" / "notes.txt").write_text("x")
    (folder / "dark" / "bad.png").write_bytes(png(0)[:40])
    (folder / "loose.png").write_bytes(png(0))
    manifest = run(folder, tmp_path / "out", preprocessor=processor)
    assert levels(tmp_path / "out") == THREE
    assert omissions(manifest) == {
        "files no images": 1,
        "files no images, or damaged": 1,
        "files in no folder of a class": 1,
    }


def test_folder_of_a_split_is_read_alone(tmp_path: Path, processor: str) -> None:
    pictures(tmp_path / "in", "train")
    manifest = run(pictures(tmp_path / "in", "test"), tmp_path / "out", preprocessor=processor)
    assert levels(tmp_path / "out") == THREE
    assert omissions(manifest) == {"files not of split train, see --split": 3}


def test_column_of_paths_is_relative_to_its_table(tmp_path: Path, processor: str) -> None:
    pictures(tmp_path / "in")
    (tmp_path / "in" / "rows.csv").write_text("file,kind\ndark/0.png,night\nlight/255.png,day\nmissing.png,day\n")
    options = {"image_column": "file", "label_column": "kind", "preprocessor": processor}
    manifest = run(tmp_path / "in" / "rows.csv", tmp_path / "out", **options)
    assert manifest.classes == ClassInfo(("day", "night"))
    assert levels(tmp_path / "out") == [(-1.0, 1), (1.0, 0)]
    assert omissions(manifest) == {"files missing": 1}


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_images_of_a_hub_dataset_keep_numbers_and_names_of_their_classes(
    tmp_path: Path, processor: str, kind: str
) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["light", "dark"])})
    rows = datasets.Dataset.from_dict({"image": [picture(0), picture(255)], "label": [1, 0]}, features)
    folder = tmp_path / "rows"
    if kind == "saved":
        rows.save_to_disk(str(folder))
    else:
        folder.mkdir()
        rows.to_parquet(str(folder / "train.parquet"))
    options = {"image_column": "image", "label_column": "label", "preprocessor": processor}
    manifest = run(folder, tmp_path / "out", **options)
    assert manifest.classes == ClassInfo(("light", "dark"))
    assert levels(tmp_path / "out") == [(-1.0, 1), (1.0, 0)]


def test_images_without_labels_have_none(tmp_path: Path, processor: str) -> None:
    pictures(tmp_path / "in")
    source = table(tmp_path / "in" / "rows.jsonl", {"file": "dark/0.png"}, {"file": "light/255.png"})
    manifest = run(source, tmp_path / "out", image_column="file", preprocessor=processor)
    assert manifest.shapes.keys() == {"images"} and manifest.classes is None


def test_several_labels_of_an_image_are_marks(tmp_path: Path, processor: str) -> None:
    pictures(tmp_path / "in")
    rows = [{"f": "dark/0.png", "l": ["a", "c"]}, {"f": "light/255.png", "l": ["b"]}]
    options = {"image_column": "f", "label_column": "l", "preprocessor": processor}
    manifest = run(table(tmp_path / "in" / "rows.jsonl", *rows), tmp_path / "out", **options)
    assert manifest.classes == ClassInfo(("a", "b", "c"), several=True)
    assert sorted(arrays_of(tmp_path / "out")["labels"].tolist()) == [[0, 1, 0], [1, 0, 1]]


def test_grey_model_gets_one_channel(tmp_path: Path) -> None:
    settings = {"do_normalize": True, "image_mean": [0.5], "image_std": [0.5], "size": {"height": 4, "width": 4}}
    ViTImageProcessorPil(**settings).save_pretrained(tmp_path / "grey")
    manifest = run(pictures(tmp_path / "in"), tmp_path / "out", preprocessor=str(tmp_path / "grey"))
    assert manifest.shapes["images"] == (1, 4, 4)
    assert levels(tmp_path / "out") == THREE


def test_slices_of_large_images_have_fewer_samples(
    tmp_path: Path, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_ray.data.kinds.media.MOST_SLICE_BYTES", 2 * (3 * 4 * 6 * 4 + 4))
    manifest = run(pictures(tmp_path / "in"), tmp_path / "out", preprocessor=processor)
    assert [info.samples for info in manifest.slices] == [2, 1]


def test_images_of_several_sizes_are_refused(tmp_path: Path) -> None:
    ViTImageProcessorPil(do_resize=False).save_pretrained(tmp_path / "sizes")
    folder = pictures(tmp_path / "in")
    Image.new("RGB", (5, 5)).save(folder / "dark" / "small.png")
    with pytest.raises(DataError, match=r"DATA038.*preprocessor .* makes no tensors of these images"):
        run(folder, tmp_path / "out", preprocessor=str(tmp_path / "sizes"))
    assert not (tmp_path / "out").exists()


def test_equal_images_are_in_one_split(tmp_path: Path, processor: str) -> None:
    for grey in range(20):
        for copy in "ab":
            (tmp_path / "in" / copy).mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / copy / f"{grey}.png").write_bytes(png(grey))
    run(tmp_path / "in", tmp_path / "out", preprocessor=processor, validation_fraction=0.2)
    train, held = (
        {i.tobytes() for i in arrays_of(tmp_path / "out", name)["images"]} for name in ("train", "validation")
    )
    assert (len(train), len(held), train & held) == (16, 4, set())


# ── recordings ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("samples", "first"),
    [
        (np.full(80, 16384, np.int16), 0.5),
        (np.full(80, 192, np.uint8), 0.5),
        (np.full(80, -(1 << 30), np.int32), -0.5),
        (np.full(80, 0.25, np.float32), 0.25),
        (np.stack([np.full(80, 0.5, np.float32), np.full(80, 0.0, np.float32)], axis=1), 0.25),
    ],
)
def test_recordings_are_one_channel_from_minus_one_to_one(
    tmp_path: Path, extractor: str, samples: npt.NDArray[np.generic], first: float
) -> None:
    for name in ("a", "b"):
        wave(tmp_path / "in" / name, "1.wav", samples)
    manifest = run(tmp_path / "in", tmp_path / "out", preprocessor=extractor)
    assert (manifest.modality, manifest.shapes) == ("audio", {"audio": (80,), "labels": ()})
    assert arrays_of(tmp_path / "out")["audio"].tolist() == [[first] * 80] * 2


def test_recordings_are_padded_to_the_longest_and_cut_off_at_the_limit(tmp_path: Path, extractor: str) -> None:
    for name, length in {"short": 40, "long": 1000}.items():
        wave(tmp_path / "in" / name, "1.wav", np.full(length, 0.5, np.float32))
    manifest = run(tmp_path / "in", tmp_path / "out", preprocessor=extractor, max_seconds=0.25)
    assert manifest.shapes["audio"] == (200,)
    arrays = arrays_of(tmp_path / "out")
    filled = {int(label): int((row == 0.5).sum()) for label, row in zip(arrays["labels"], arrays["audio"], strict=True)}
    assert filled == {0: 200, 1: 40}
    assert omissions(manifest) == {"parts of recordings behind the first 0.25 seconds, see --max-seconds": 1}


@pytest.mark.parametrize(
    ("kind", "own"), [(WhisperFeatureExtractor, {"chunk_length": 1}), (SeamlessM4TFeatureExtractor, {})]
)
def test_spectra_are_as_long_as_the_extractor_makes_them(tmp_path: Path, kind: Any, own: dict[str, Any]) -> None:
    """Whisper takes one length; Wav2Vec2-BERT's are padded to the longest, and counted in frames."""
    theirs = kind(**own)
    theirs.save_pretrained(tmp_path / "extractor")
    waves = [np.random.default_rng(n).normal(0, 0.1, 4000 * n).astype(np.float32) for n in (1, 2)]
    for name, samples in zip(("a", "b"), waves, strict=True):
        wave(tmp_path / "in" / name, "1.wav", samples, rate=16_000)
    run(tmp_path / "in", tmp_path / "out", preprocessor=str(tmp_path / "extractor"))
    plain = theirs(waves, sampling_rate=16_000, return_tensors="np")
    arrays = arrays_of(tmp_path / "out")
    order = np.argsort(arrays["labels"])
    np.testing.assert_allclose(arrays["audio"][order], plain["input_features"], atol=1e-5)


def test_recordings_are_resampled_to_the_rate_of_the_model(tmp_path: Path, extractor: str) -> None:
    seconds = np.arange(3200) / 3200
    for name in ("a", "b"):
        wave(tmp_path / "in" / name, "1.wav", np.sin(2 * np.pi * 50 * seconds).astype(np.float32), rate=3200)
    run(tmp_path / "in", tmp_path / "out", preprocessor=extractor)
    found = arrays_of(tmp_path / "out")["audio"][0]
    wanted = np.sin(2 * np.pi * 50 * np.arange(RATE) / RATE)
    assert found.shape == (RATE,)
    assert np.abs(found - wanted)[50:-50].max() < 0.02


def test_column_of_recordings_has_their_labels(tmp_path: Path, extractor: str) -> None:
    for name in ("1.wav", "2.wav"):
        wave(tmp_path / "in", name, np.full(8, 0.5, np.float32))
    (tmp_path / "in" / "3.wav").write_bytes(b"no recording")
    rows = [{"f": f"{number}.wav", "l": label} for number, label in enumerate(("yes", "no", "maybe"), 1)]
    source = table(tmp_path / "in" / "rows.jsonl", *rows)
    options = {"audio_column": "f", "label_column": "l", "preprocessor": extractor}
    manifest = run(source, tmp_path / "out", **options)
    assert manifest.classes == ClassInfo(("no", "yes"))
    assert omissions(manifest) == {"files no recordings, or damaged": 1}


@pytest.mark.parametrize(("suffix", "options"), [("flac", {}), ("ogg", {"subtype": "VORBIS"}), ("mp3", {})])
def test_compressed_recordings_are_those_of_a_wav_file(
    tmp_path: Path, extractor: str, suffix: str, options: dict[str, Any]
) -> None:
    soundfile = pytest.importorskip("soundfile")
    rate, seconds = 16_000, np.arange(16_000) / 16_000
    for number, name in enumerate(("low", "high")):
        tone = np.round(20_000 * np.sin(2 * np.pi * (40 + 60 * number) * seconds)).astype(np.int16)
        wave(tmp_path / "wav" / name, "1.wav", tone, rate=rate)
        (tmp_path / suffix / name).mkdir(parents=True)
        soundfile.write(tmp_path / suffix / name / f"1.{suffix}", tone, rate, **options)
    found = {}
    for kind in ("wav", suffix):
        run(tmp_path / kind, tmp_path / f"out-{kind}", preprocessor=extractor)
        arrays = arrays_of(tmp_path / f"out-{kind}")
        found[kind] = arrays["audio"][np.argsort(arrays["labels"])][:, :RATE]
    assert np.abs(found[suffix] - found["wav"]).max() <= (0 if suffix == "flac" else 0.05)


def test_compressed_recordings_without_the_package_for_them_are_refused(
    tmp_path: Path, extractor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)  # As if it weren't installed.
    (tmp_path / "in" / "low").mkdir(parents=True)
    (tmp_path / "in" / "low" / "1.flac").write_bytes(b"fLaC" + bytes(40))
    with pytest.raises(ConfigError, match=r"PREP013.*FLAC need the package soundfile.*hypha_ray\[audio\]"):
        run(tmp_path / "in", tmp_path / "out", preprocessor=extractor)


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────


def test_folder_of_images_needs_a_preprocessor(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PREP012.*images need --preprocessor.*name the model to train"):
        run(pictures(tmp_path / "in"), tmp_path / "out")


def test_folder_with_one_class_of_files_is_refused(tmp_path: Path, processor: str, extractor: str) -> None:
    (pictures(tmp_path / "images") / "light" / "255.png").write_bytes(b"no image")
    wave(tmp_path / "sounds" / "low", "1.wav", np.full(8, 0.5, np.float32))
    for source, preprocessor, only in (("images", processor, "dark"), ("sounds", extractor, "low")):
        with pytest.raises(DataError, match=rf"DATA039.*{source} are the same — got '{only}', allowed at least two"):
            run(tmp_path / source, tmp_path / "out", preprocessor=preprocessor)


def test_preprocessor_that_cannot_be_loaded_is_refused(tmp_path: Path, extractor: str) -> None:
    with pytest.raises(ConfigError, match=r"PREP012.*preprocessor '.*wav2vec2' can't be loaded"):
        run(pictures(tmp_path / "in"), tmp_path / "out", preprocessor=extractor)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preprocessor": "x"}, "--preprocessor has no effect on documents"),
        ({"image_column": "a", "audio_column": "b", "preprocessor": "x"}, "--audio-column and --image-column exclude"),
        ({"image_column": "a", "preprocessor": "x", "max_seconds": 0.0}, "--max-seconds is out of range"),
        ({"image_column": "a", "preprocessor": "x", "chat": True}, "--chat and --image-column exclude each other"),
        ({"image_column": "a", "preprocessor": "x", "report": True}, "--report has no effect on images"),
    ],
)
def test_option_of_media_that_cant_be_used_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x"}))
    with pytest.raises(ConfigError, match=words):
        run(tmp_path / "a.jsonl", tmp_path / "out", **options)


def test_folder_of_texts_with_a_picture_is_still_one_of_texts(tmp_path: Path) -> None:
    (tmp_path / "in" / "docs").mkdir(parents=True)
    (tmp_path / "in" / "docs" / "a.txt").write_text("word " * 200)
    (tmp_path / "in" / "docs" / "logo.png").write_bytes(png(0))
    manifest = run(tmp_path / "in", tmp_path / "out", seq_len=16)
    assert manifest.modality == "language"
