"""Recordings as tensors: audio files at the preprocessor's rate, cut off or padded to one length."""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.provenance import Account
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import ConfigError

_COMPRESSED = {b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3", b"\xff": "MP3"}
"""Formats by the first bytes of a file; all others are taken for WAV."""
Wave: TypeAlias = npt.NDArray[np.float32]
"""Samples of a recording from -1 to 1, [T]."""


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
        padded = [wave[: self._most] for wave in waves]
        padded.append(np.zeros(self._longest, np.float32))
        features = self._extractor(padded, sampling_rate=self._rate, padding=self._padding, return_tensors="np")
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
