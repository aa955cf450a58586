"""From images and recordings to a prepared dataset, by the preprocessor of a model.

    images        ``images`` float32 [N, C, H, W]
    recordings    ``audio`` float32 [N, …], and ``attention_mask`` int32 [N, …] if the preprocessor makes one

Sources are folders by class, and columns of tables with files or their bytes. ``labels`` are int32 [N], or uint8 [N, C]
if a file has a list of labels. Files are read twice, and decoded for one slice at a time. The preprocessor is kept
beside the slices. scikit-learn's images of digits need none.
Recordings have the preprocessor's rate, and are cut off or padded to one length.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.encoders import PREPROCESSOR, save_preprocessor
from hypha_ray.data.kinds.kind import Kind, Report, Rows, SliceWriter, no_samples, split, write_split
from hypha_ray.data.kinds.labelled_texts import classes_of, numbered
from hypha_ray.data.manifest import PreprocessorInfo
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Account
from hypha_ray.data.slices import Arrays
from hypha_ray.data.sources.columns import Column, Row, complete, no_table, useless_value
from hypha_ray.data.sources.documents import counted_records, digits, read
from hypha_ray.data.sources.files import Medium, classified, medium_of
from hypha_ray.data.sources.judged import Label, label_of, no_label
from hypha_ray.errors import ConfigError, DataError, reason_of
from hypha_ray.model.sources import fetch

_COMPRESSED = {b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3", b"\xff": "MP3"}
"""Formats by the first bytes of a file; all others are taken for WAV."""
Wave: TypeAlias = npt.NDArray[np.float32]
"""Samples of a recording from -1 to 1, [T]."""
MOST_SLICE_BYTES = 1 << 26
"""Most bytes of a slice, however many samples are asked for."""


class Recordings:
    """Makes tensors of recordings by a feature extractor; `max_seconds` is the length at which they are cut off."""

    def __init__(self, extractor: Any, max_seconds: float) -> None:
        self._extractor = extractor
        self._rate = int(extractor.sampling_rate)
        self._most = min(round(max_seconds * self._rate), getattr(extractor, "n_samples", sys.maxsize))
        padding = inspect.signature(type(extractor).__call__).parameters.get("padding")
        self._padding = (padding and padding.default) or True  # Whisper's is up to the one length that it takes.
        self._longest = 1

    def decode(self, content: bytes) -> Wave:
        """The samples of an audio file, the mean of its channels, at the extractor's rate.

        Raises:
            ValueError: it is damaged, or of a format that isn't known.
            ConfigError: its format needs a package that isn't installed.

        """
        from scipy.io import wavfile
        from scipy.signal import resample_poly

        format = _compression(content)
        rate, wave = wavfile.read(io.BytesIO(content)) if format is None else _decompressed(content, format)
        if not len(wave):
            raise ValueError("an empty recording")
        if wave.dtype.kind in "iu":  # Bytes are unsigned, and everything else is signed.
            half = 1 << (8 * wave.dtype.itemsize - 1)
            wave = wave.astype(np.float64) / half - (wave.dtype.kind == "u")
        if wave.ndim > 1:
            wave = wave.mean(axis=1)
        if rate != self._rate:
            wave = resample_poly(wave, self._rate, rate)
        return np.asarray(wave, np.float32)

    def examine(self, wave: Wave, account: Account) -> None:
        """Record the length of a recording, and a part that is cut off; called once for each."""
        self._longest = max(self._longest, min(len(wave), self._most))
        if len(wave) > self._most:
            reason = f"behind the first {self._most / self._rate:g} seconds, see --max-seconds"
            account.leave_out("parts of recordings", reason)

    def tensors(self, waves: Sequence[Wave]) -> Arrays:
        """Tensors of recordings, all as long as the longest of the dataset.

        The extractor pads them to a silence of that length behind them, whose tensors are dropped.
        """
        padded_waves = [wave[: self._most] for wave in waves]
        padded_waves.append(np.zeros(self._longest, np.float32))
        features = self._extractor(padded_waves, sampling_rate=self._rate, padding=self._padding, return_tensors="np")
        audio = features["input_values"] if "input_values" in features else features["input_features"]
        arrays: Arrays = {"audio": np.asarray(audio[: len(waves)], np.float32)}
        if "attention_mask" in features:
            arrays["attention_mask"] = np.asarray(features["attention_mask"][: len(waves)], np.int32)
        return arrays


def _compression(content: bytes) -> str | None:
    """Format of a compressed file; None for WAV."""
    for start, format in _COMPRESSED.items():
        if content.startswith(start):
            return format
    return None


def _decompressed(content: bytes, format: str) -> tuple[int, npt.NDArray[np.float64]]:
    """Rate and samples of a compressed file."""
    try:
        import soundfile
    except ImportError:
        problem = f"recordings in {format} need the package soundfile"
        raise ConfigError("PREP013", problem, fix="pip install 'hypha_ray[audio]', or convert to WAV") from None
    wave, rate = soundfile.read(io.BytesIO(content))
    return rate, wave


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An image or a recording: its path, or its content; None instead of a label without one."""

    location: str
    data: Path | bytes
    label: Label | None

    def content(self) -> bytes:
        """The content of the file.

        Raises:
            OSError: it can't be read.

        """
        if isinstance(self.data, bytes):
            return self.data
        return self.data.read_bytes()


def media_files(options: PrepareOptions, classes: list[str], account: Account) -> Iterator[MediaFile]:
    """The images or recordings of a source, up to the number asked for; `classes` receives names that the source has.

    Raises:
        DataError: there is no such source, it is damaged, or a row lacks a column.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    medium = medium_of(options.source, mixed=True)
    files: Iterable[MediaFile]
    if options.media_column is None and medium is not None:
        folder = Path(options.source).expanduser()
        files = _classified_files(folder, medium, options.split, account)
    else:
        files = read(options, MediaReader(options, classes), account)
    yield from counted_records(files, options.max_documents, account)


def _classified_files(folder: Path, medium: Medium, split: str, account: Account) -> Iterator[MediaFile]:
    """Files in a folder for each class."""
    for path, class_name in classified(folder, medium, split, account):
        yield MediaFile(str(path), path, class_name)


class MediaReader:
    """Reads rows of a table with a file and its label."""

    def __init__(self, options: PrepareOptions, classes: list[str]) -> None:
        flag = "--image-column" if options.image_column is not None else "--audio-column"
        self._file = Column(str(options.media_column), flag)
        label = options.label_column
        self._label = None if label is None else Column(label, "--label-column", classes)
        source = Path(options.source).expanduser()
        self._folder = source if source.is_dir() else source.parent

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of file and label."""
        if self._label is None:
            return (self._file,)
        return self._file, self._label

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[MediaFile]:
        """The files of rows; those without file or label are put into the account.

        Raises:
            DataError: a row lacks a column, or has something in it that is of no use.

        """
        for location, row in complete(rows, self.columns, account):
            content = self._content(location, row[self._file.name])
            if content is None:
                account.leave_out("rows", "without a file")
            elif self._label is None:
                yield MediaFile(location, content, None)
            elif no_label(row[self._label.name]):
                account.leave_out("rows", "without a label")
            else:
                yield MediaFile(location, content, label_of(location, self._label, row[self._label.name]))

    def of_text(self, path: Path, file: IO[str], is_only_file: bool) -> Iterator[MediaFile]:
        """Refuse a plain text: it has no columns."""
        del file, is_only_file
        raise no_table(path, f"column {self._file.name!r}")

    def _content(self, location: str, value: Any) -> Path | bytes | None:
        """A file's path, relative to the table, or its content; None if there is neither."""
        if isinstance(value, Mapping) and value.keys() & {"bytes", "path"}:
            value = value.get("bytes") or value.get("path")
        if value is None or value == "":
            return None
        if isinstance(value, str):
            return self._folder / Path(value).expanduser()
        if isinstance(value, bytes):
            return value
        raise useless_value(location, self._file, type(value).__name__, "a path, or the content of a file")


def write_digits(options: PrepareOptions, writer: SliceWriter) -> None:
    """Write the slices of both splits, which have the same proportions of classes."""
    from sklearn.model_selection import train_test_split

    arrays = digits()
    labels = arrays["labels"]
    train = np.random.default_rng(options.seed).permutation(len(labels))
    validation = np.empty(0, np.int64)
    held_out = min(options.validation_samples, round(options.validation_fraction * len(labels)))
    if held_out:
        try:
            train, validation = train_test_split(
                train, test_size=held_out, stratify=labels[train], random_state=options.seed
            )
        except ValueError as error:
            allowed = "none, or at least one image of each of 10 classes in both splits"
            raise ConfigError("PREP005", "validation can't have all classes", str(error), allowed) from None
    for part, rows in (("train", train[: options.max_samples]), ("validation", validation)):
        if len(rows):
            writer.add({name: array[rows] for name, array in arrays.items()}, part)


class MediaDecoder(Protocol):
    """Decodes files of one medium, and makes tensors of them."""

    def decode(self, content: bytes) -> Any:
        """The picture or the recording in a file.

        Raises:
            Exception: it is damaged, or of another kind.

        """
        ...

    def examine(self, decoded: Any, account: Account) -> None:
        """Look at a file's content before any tensors are made."""
        ...

    def tensors(self, decoded: Sequence[Any]) -> Arrays:
        """Tensors of some files."""
        ...


class Images:
    """Makes tensors of images by an image processor."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        means = getattr(processor, "image_mean", None) or "RGB"
        self._mode = "L" if len(means) == 1 else "RGB"

    def decode(self, content: bytes) -> Any:
        """A picture in the colours of the processor, turned upright by its EXIF data."""
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(content)) as image:
            upright_image = ImageOps.exif_transpose(image)
            return _in_8_bits(upright_image, image.format).convert(self._mode)

    def examine(self, decoded: Any, account: Account) -> None:
        """Do nothing: an image has no length."""

    def tensors(self, decoded: Sequence[Any]) -> Arrays:
        """Tensors of pictures, all of one size."""
        features = self._processor(images=list(decoded), return_tensors="np")
        return {"images": np.asarray(features["pixel_values"])}


class UnknownRange(ValueError):
    """Error for an image with greys of 32 bits, whose number for white isn't known."""


def _in_8_bits(image: Any, format: str | None) -> Any:
    """An image with greys of 16 bits scaled to 8, which Pillow would cut off at 255."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and format == "PPM"):
        greys = np.asarray(image, np.float64) / 257
        return Image.fromarray(greys.round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UnknownRange
    return image


def write_media(options: PrepareOptions, writer: SliceWriter, report: Report, account: Account) -> PreprocessorInfo:
    """Write the slices of both splits, and the preprocessor beside them.

    Raises:
        DataError: there are no files, or the preprocessor doesn't make tensors of one shape of them.
        HyphaError: source or preprocessor can't be had.

    """
    processor = _preprocessor(options)
    are_images = options.kind_name == "images"
    decoder: MediaDecoder = Images(processor) if are_images else Recordings(processor, options.max_seconds)
    class_names: list[str] = []
    files = list[MediaFile]()
    keys = list[bytes]()
    for file in media_files(options, class_names, account):
        key = _examined(file, decoder, options.kind_name, account)
        if key is not None:
            files.append(file)
            keys.append(key)
            report(options.kind_name, 1)
    if not files:
        raise no_samples(options.kind_name, options, account, "name another --source, or another column")
    numbers = _class_numbers(files, class_names, writer, options.source)
    splits = split(keys, options, account, options.kind_name)

    def load(rows: Rows) -> Arrays:
        chosen_files = [files[row] for row in rows]
        try:
            tensors = decoder.tensors([decoder.decode(file.content()) for file in chosen_files])
        except Exception as error:  # Preprocessors raise anything, for instance for images of several sizes.
            got = reason_of(error)
            problem = f"preprocessor {options.preprocessor!r} makes no tensors of these {options.kind_name}"
            raise DataError("DATA038", problem, got, fix="choose another --preprocessor, or give it a size") from None
        labels = [numbered(file.label, numbers) for file in chosen_files if file.label is not None]
        if labels:
            tensors = tensors | {"labels": np.stack(labels)}
        return tensors

    first_sample = load(splits[0][:1])
    sample_bytes = sum(array.nbytes for array in first_sample.values())
    samples_per_slice = min(options.samples_per_slice, max(1, MOST_SLICE_BYTES // sample_bytes))
    write_split(splits, load, samples_per_slice, writer)
    save_preprocessor(processor, writer.folder / PREPROCESSOR)
    return PreprocessorInfo(str(options.preprocessor), options.preprocessor_revision, PREPROCESSOR)


def _examined(file: MediaFile, decoder: MediaDecoder, plural: str, account: Account) -> bytes | None:
    """Key of a file's content, equal for equal files; None if it can't be decoded, which is put into the account."""
    try:
        content = file.content()
        decoder.examine(decoder.decode(content), account)
    except ConfigError:
        raise
    except FileNotFoundError:
        account.leave_out("files", "missing", name=file.location)
    except UnknownRange:
        account.leave_out("files", "with greys of 32 bits, whose range isn't known", name=file.location)
    except Exception:  # Decoders raise anything from OSError to struct.error.
        account.leave_out("files", f"no {plural}, or damaged", name=file.location)
    else:
        return hashlib.blake2b(content, digest_size=16).digest()
    return None


def _class_numbers(
    files: Sequence[MediaFile], class_names: Sequence[str], writer: SliceWriter, source: str
) -> dict[str, int]:
    """Number of each class; the classes are recorded in the writer.

    Raises:
        DataError: all labels are the same, or some files have one label, and others a list of labels.

    """
    labels = [file.label for file in files if file.label is not None]
    if not labels:
        return {}
    has_several = isinstance(labels[0], list)
    for file in files:
        if isinstance(file.label, list) != has_several:
            problem = f"{file.location}: the labels are of another kind than those of {files[0].location}"
            raise DataError("DATA037", problem, fix="give all rows one label, or all of them a list of labels")
    writer.classes = classes_of(labels, class_names, has_several, source)
    return {name: number for number, name in enumerate(writer.classes.names)}


def _preprocessor(options: PrepareOptions) -> Any:
    """The image processor or feature extractor that the options name."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    name = str(options.preprocessor)
    auto = AutoImageProcessor if options.kind_name == "images" else AutoFeatureExtractor
    folder = fetch(name, options.preprocessor_revision, token=None)
    try:
        return auto.from_pretrained(folder)
    except Exception as error:  # Preprocessors raise anything from OSError to KeyError.
        got = reason_of(error)
        fix = f"name a model for {options.kind_name}, or a folder with its preprocessor_config.json"
        raise ConfigError("PREP012", f"preprocessor {name!r} can't be loaded", got, fix=fix) from error


def _write_images(
    options: PrepareOptions, writer: SliceWriter, report: Report, account: Account
) -> PreprocessorInfo | None:
    """Write images of files, or scikit-learn's digits."""
    if options.source != "digits":
        return write_media(options, writer, report, account)
    write_digits(options, writer)
    return None


IMAGES: Final = Kind(_write_images, "vision", "image and label are")
RECORDINGS: Final = Kind(write_media, "audio", "recording and label are")
