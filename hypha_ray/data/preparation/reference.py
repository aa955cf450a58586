"""Log-probabilities of answers by a reference, computed once, so that workers hold no copy of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.data.slices import Arrays
from hypha_ray.data.storage import same_tokens
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.checks.positions import require_positions
from hypha_ray.model.environment import device_of
from hypha_ray.model.identity import folder_hash, snapshot_commit
from hypha_ray.model.loading.hub import fetch
from hypha_ray.model.preferences.objective import score_sequences
from hypha_ray.model.saved_model import open_saved

_TOKENS = 1 << 14
"""Most tokens that are computed at once, of two sequences at least."""


class ReferenceModel:
    """Language model whose log-probabilities are stored beside preferences.

    Args:
        name: Hugging Face name or local folder.
        revision: its revision on the hub; None: the default branch.
        tokenizer: folder of the tokenizer of the preferences.

    Raises:
        HyphaError: the model can't be had, is no causal language model, or has another tokenizer.

    """

    def __init__(self, name: str, revision: str | None, tokenizer: Path) -> None:
        folder = fetch(name, revision, token=None, weights=True)
        if not same_tokens(folder, tokenizer):
            raise _other_tokens(name, "another tokenizer", f"that of {name}")
        self.hashes = {"reference_sha256": folder_hash(folder)}
        """Hash of the model's files, and the commit of a repository of the hub, by their names in manifests."""
        commit = snapshot_commit(folder)
        if commit is not None:
            self.hashes["reference_commit"] = commit
        network, self._task = open_saved(folder)
        if self._task.name != "causal-lm":
            fix = "name a language model"
            raise ConfigError("PREP015", f"--reference {name} can't score answers", self._task.name, "causal-lm", fix)
        self._name = name
        self._device = device_of("auto")
        self._network = network.to(self._device).eval()

    def logprobs(self, arrays: Arrays) -> npt.NDArray[np.float32]:
        """Return the sums of the log-probabilities of answers, float32 [N, 2].

        Args:
            arrays: ``input_ids``, ``attention_mask`` and ``labels``, each [N, 2, L].

        Raises:
            DataError: DATA024, the sequences are too long for the model; DATA023, it lacks some of their tokens.

        """
        ids = arrays["input_ids"]
        require_positions(self._network, self._task, {"input_ids": ids.shape[1:]}, "the preferences")
        rows = self._network.get_input_embeddings().weight.shape[0]
        if int(ids.max()) >= rows:
            raise _other_tokens(self._name, f"token {ids.max()}", f"0 … {rows - 1}")
        size = max(1, _TOKENS // (2 * ids.shape[-1]))
        parts = [self._part(arrays, slice(start, start + size)) for start in range(0, len(ids), size)]
        return np.concatenate(parts)

    @torch.inference_mode()
    def _part(self, arrays: Arrays, rows: slice) -> Any:
        inputs = {}
        for name in ("input_ids", "attention_mask", "labels"):
            inputs[name] = torch.from_numpy(np.asarray(arrays[name][rows], np.int64)).to(self._device)
        return score_sequences(self._task, self._network, inputs).logprobs.float().cpu().numpy()


def _other_tokens(name: str, got: str, allowed: str) -> DataError:
    problem = f"--reference {name} has other tokens than the preferences"
    return DataError("DATA023", problem, got, allowed, f"prepare them with --tokenizer {name}")
