"""From images and recordings to a prepared dataset, by the preprocessor of a model.

    images        ``images`` float32 [N, C, H, W]
    recordings    ``audio`` float32 [N, …], and ``attention_mask`` int32 [N, …] if the preprocessor makes one

``labels`` are int32 [N], or uint8 [N, C] if a file has a list of labels. Files are read twice, and decoded for one
slice at a time. The preprocessor is kept beside the slices.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np

from hypha_ray.data.manifest import PreprocessorInfo
from hypha_ray.data.preparation.encoders import PREPROCESSOR, save_preprocessor
from hypha_ray.data.preparation.kinds.digits import write_digits
from hypha_ray.data.preparation.kinds.kind import Kind
from hypha_ray.data.preparation.kinds.labels import classes_of, numbered
from hypha_ray.data.preparation.kinds.recordings import Recordings
from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.slice_writer import Report, SliceWriter
from hypha_ray.data.preparation.sources.media import MediaFile, media_files
from hypha_ray.data.preparation.splitting import Rows, split, write_split
from hypha_ray.data.provenance import Account
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import ConfigError, DataError, reason_of
from hypha_ray.model.loading.hub import fetch

MOST_SLICE_BYTES = 1 << 26
"""Most bytes of a slice, however many samples are asked for."""


class Medium(Protocol):
    """Makes tensors of files of one kind."""

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
        self._mode = "L" if len(getattr(processor, "image_mean", None) or "RGB") == 1 else "RGB"

    def decode(self, content: bytes) -> Any:
        """A picture in the colours of the processor, upright as its camera tells."""
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(content)) as image:
            return _of_bytes(ImageOps.exif_transpose(image), image.format).convert(self._mode)

    def examine(self, decoded: Any, account: Account) -> None:
        """Do nothing: an image has no length."""

    def tensors(self, decoded: Sequence[Any]) -> Arrays:
        """Tensors of pictures, all of one size."""
        return {"images": np.asarray(self._processor(images=list(decoded), return_tensors="np")["pixel_values"])}


class UnknownRange(ValueError):
    """Error for an image whose numbers don't tell which of them is white."""


def _of_bytes(image: Any, format: str | None) -> Any:
    """An image with greys of 16 bits scaled to 8, which Pillow would cut off at 255."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and format == "PPM"):
        return Image.fromarray((np.asarray(image, np.float64) / 257).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UnknownRange
    return image


def write_media(options: Options, writer: SliceWriter, report: Report, account: Account) -> PreprocessorInfo:
    """Write the slices of both splits, and the preprocessor beside them.

    Raises:
        DataError: there are no files, or the preprocessor doesn't make tensors of one shape of them.
        HyphaError: source or preprocessor can't be had.

    """
    processor = _preprocessor(options)
    images = options.kind_name == "images"
    medium: Medium = Images(processor) if images else Recordings(processor, options.max_seconds)
    names: list[str] = []
    found = list(_usable(media_files(options, names, account), medium, report, account, options.kind_name))
    if not found:
        what = f"there are no {options.kind_name} in {options.source}"
        fix = "name another --source, or another column"
        raise DataError("DATA033", what, account.left_out or "an empty source", fix=fix)
    files = [file for file, _ in found]
    numbers = _numbers(files, names, writer, options.source)
    splits = split([key for _, key in found], options, account, options.kind_name)

    def load(rows: Rows) -> Arrays:
        chosen = [files[row] for row in rows]
        try:
            tensors = medium.tensors([medium.decode(file.content()) for file in chosen])
        except Exception as error:  # Preprocessors raise anything, for instance for images of several sizes.
            got = reason_of(error)
            what = f"preprocessor {options.preprocessor!r} makes no tensors of these {options.kind_name}"
            raise DataError("DATA038", what, got, fix="choose another --preprocessor, or give it a size") from None
        labels = [numbered(file.label, numbers) for file in chosen if file.label is not None]
        return tensors | ({"labels": np.stack(labels)} if labels else {})

    one = sum(array.nbytes for array in load(splits[0][:1]).values())
    size = min(options.samples_per_slice, max(1, MOST_SLICE_BYTES // one))
    write_split(splits, load, size, writer)
    save_preprocessor(processor, writer.folder / PREPROCESSOR)
    return PreprocessorInfo(str(options.preprocessor), options.preprocessor_revision, PREPROCESSOR)


def _usable(
    found: Iterator[MediaFile], medium: Medium, report: Report, account: Account, what: str
) -> Iterator[tuple[MediaFile, bytes]]:
    """Files that can be decoded, each with a key of its content; the others are put into the account."""
    for file in found:
        try:
            content = file.content()
            medium.examine(medium.decode(content), account)
        except ConfigError:
            raise
        except Exception as error:  # Decoders raise anything from OSError to struct.error.
            reasons = {FileNotFoundError: "missing", UnknownRange: "with greys of 32 bits, whose range isn't known"}
            reason = next((why for kind, why in reasons.items() if isinstance(error, kind)), f"no {what}, or damaged")
            account.leave_out("files", reason, name=file.where)
            continue
        yield file, hashlib.blake2b(content, digest_size=16).digest()
        report(what, 1)


def _numbers(files: Sequence[MediaFile], names: Sequence[str], writer: SliceWriter, source: str) -> dict[str, int]:
    """Number of each class, which the writer gets to know.

    Raises:
        DataError: all labels are the same, or some files have one label, and others a list of labels.

    """
    labels = [file.label for file in files if file.label is not None]
    if not labels:
        return {}
    several = isinstance(labels[0], list)
    for file in files:
        if isinstance(file.label, list) != several:
            what = f"{file.where}: the labels are of another kind than those of {files[0].where}"
            raise DataError("DATA037", what, fix="give all rows one label, or all of them a list of labels")
    writer.classes = classes_of(labels, names, several, source)
    return {name: number for number, name in enumerate(writer.classes.names)}


def _preprocessor(options: Options) -> Any:
    """The image processor or feature extractor that the options name."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    name = str(options.preprocessor)
    auto = AutoImageProcessor if options.kind_name == "images" else AutoFeatureExtractor
    folder = fetch(name, options.preprocessor_revision, token=None)
    try:
        return auto.from_pretrained(folder)
    except Exception as error:  # They raise anything from OSError to KeyError.
        got = reason_of(error)
        fix = f"name a model for {options.kind_name}, or a folder with its preprocessor_config.json"
        raise ConfigError("PREP012", f"preprocessor {name!r} can't be loaded", got, fix=fix) from error


def _write_images(options: Options, writer: SliceWriter, report: Report, account: Account) -> PreprocessorInfo | None:
    """Write images of files, or scikit-learn's digits."""
    if options.source != "digits":
        return write_media(options, writer, report, account)
    write_digits(options, writer)
    return None


IMAGES: Final = Kind(_write_images, "vision", "image and label are")
RECORDINGS: Final = Kind(write_media, "audio", "recording and label are")
