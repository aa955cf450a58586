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

        format = next((name for start, name in _COMPRESSED.items() if content.startswith(start)), None)
        rate, wave = wavfile.read(io.BytesIO(content)) if format is None else _decompressed(content, format)
        if not len(wave):
            raise ValueError("an empty recording")
        if wave.dtype.kind in "iu":  # Bytes are unsigned, and everything else is signed.
            half = 1 << (8 * wave.dtype.itemsize - 1)
            wave = wave.astype(np.float64) / half - (wave.dtype.kind == "u")
        mono = wave.mean(axis=1) if wave.ndim > 1 else wave
        return np.asarray(mono if rate == self._rate else resample_poly(mono, self._rate, rate), np.float32)

    def examine(self, wave: Wave, account: Account) -> None:
        """Take the length of a recording into account, once."""
        self._longest = max(self._longest, min(len(wave), self._most))
        if len(wave) > self._most:
            reason = f"behind the first {self._most / self._rate:g} seconds, see --max-seconds"
            account.leave_out("parts of recordings", reason)

    def tensors(self, waves: Sequence[Wave]) -> Arrays:
        """Tensors of recordings, all of one length: that of a silence as long as the longest, which is taken away."""
        silence = np.zeros(self._longest, np.float32)
        several = [*(wave[: self._most] for wave in waves), silence]
        made = self._extractor(several, sampling_rate=self._rate, padding=self._padding, return_tensors="np")
        made = {name: array[: len(waves)] for name, array in made.items()}
        audio = made["input_values"] if "input_values" in made else made["input_features"]
        mask = {"attention_mask": np.asarray(made["attention_mask"], np.int32)} if "attention_mask" in made else {}
        return {"audio": np.asarray(audio, np.float32), **mask}


def _decompressed(content: bytes, format: str) -> tuple[int, npt.NDArray[np.float64]]:
    """Rate and samples of a compressed file."""
    try:
        import soundfile
    except ImportError:
        what = f"recordings in {format} need the package soundfile"
        raise ConfigError("PREP013", what, fix="pip install 'hypha_ray[audio]', or convert to WAV") from None
    wave, rate = soundfile.read(io.BytesIO(content))
    return rate, wave
