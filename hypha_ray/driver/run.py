"""Python interface: train a job, and look at a run."""

from __future__ import annotations

import html
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, overload

from hypha_ray.config import Job
from hypha_ray.config.load import Loaded, from_tables, job_of_run, load, resolved
from hypha_ray.config.options import Sampling, require_sampling
from hypha_ray.config.training import RECORD_KINDS
from hypha_ray.driver.evaluation import (
    EvaluationRequest,
    ModelSource,
    evaluate_on_dataset,
    find_model,
    save_snapshot,
)
from hypha_ray.driver.run_folders import FIX, find_run, require_replaceable
from hypha_ray.driver.training import (
    FLAG,
    JOB,
    NUMBER,
    PATH,
    TEXT,
    TEXTS,
    WHOLE,
    Callback,
    Training,
    flagless,
    or_none,
    require_callbacks,
    require_choice,
    require_kind,
    require_settings,
)
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.store.directory import RunDirectory
from hypha_ray.store.directory import runs as folder_of_runs
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, read_json, read_jsonl

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

    from hypha_ray.model.writer import Writer

Source: TypeAlias = Job | Mapping[str, Any] | str | Path
"""A job, its tables, or the path of its job file."""


@overload
def train(
    job: Source, *, resume: bool = False, callbacks: Sequence[Callback] = (), wait: Literal[True] = True
) -> Run: ...


@overload
def train(
    job: Source, *, resume: bool = False, callbacks: Sequence[Callback] = (), wait: Literal[False]
) -> Training: ...


def train(
    job: Source, *, resume: bool = False, callbacks: Sequence[Callback] = (), wait: bool = True
) -> Run | Training:
    """Train a job to its end, as `jobs/diloco.py` does.

    It joins the cluster that `RAY_ADDRESS` names, or starts Ray on this machine. An interrupted run goes on from its
    last commit. A process trains one run at a time, begun by any of its threads.

    Args:
        job: the job, its tables as nested dicts, or the path of a job file.
        resume: whether to go on with the run even if the job has changed.
        callbacks: objects that are told of rounds, evaluations and events, see `Callback`.
        wait: whether to return only at the end; otherwise the run trains in the background.

    Returns:
        The run, or a handle of its training if this doesn't wait for its end.

    Raises:
        HyphaError: the job or an argument is wrong, or an error ended the run.

    """
    require_kind(FLAG, resume=resume, wait=wait)
    require_callbacks(callbacks)
    with flagless():
        parsed = _job(job)
        job_kind = parsed.rl.algorithm or ("dpo" if parsed.preference.loss else parsed.sync.strategy)
        training = Training(Loaded(parsed, resume=resume), job_kind, callbacks)
    return training.train_here() if wait else training.begin()


class Runs(list["Run"]):
    """Runs of a folder, the one with the newest record first; shown as a table."""

    def __repr__(self) -> str:
        from hypha_ray.history.overview import aligned, listing, overview

        if not self:
            return "no runs"
        overviews = [overview(run.path) for run in self]
        return "\n".join(aligned(listing(overviews, time.time())))

    def _repr_html_(self) -> str:
        return _preformatted(repr(self))


def runs(folder: str | Path | None = None) -> Runs:
    """List the runs of a folder, the one with the newest record first.

    Args:
        folder: folder of the runs, as `run.dir`; None: `$HYPHA_RAY_HOME`, or `~/hypha_ray`.

    Raises:
        ConfigError: CFG003, there is no such folder.

    """
    require_kind(or_none(PATH), folder=folder)
    from hypha_ray.history.overview import overviews

    parent = folder_of_runs(None if folder is None else str(folder))
    if folder is not None and not parent.is_dir():
        problem = "folder is out of range"
        raise ConfigError("CFG003", problem, str(parent), "a folder that exists", "name one with runs in it")
    run_overviews, _ = overviews(parent)
    return Runs(Run(listed_run.folder) for listed_run in run_overviews)


class Run:
    """A run of a training job, finished or not.

    Args:
        run: its name, its directory, or the URL of its mirror, from which it is copied here first.

    Raises:
        CheckpointError: there is no such run.

    """

    def __init__(self, run: str | Path) -> None:
        require_kind(PATH, run=run)
        with flagless():
            self._directory = RunDirectory(find_run(str(run), None, None, FIX))
        self._writers: dict[tuple[int | None, str | None, bool | None], Writer] = {}
        """Loaded models that have generated, by round, system message, and whether they go without a template."""

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        from hypha_ray.history.report import head_of

        plots = [self.path / "plots" / f"{name}.png" for name in ("loss", "reward")]
        return _framed(head_of(self.path)) + "".join(_image(plot) for plot in plots if plot.is_file())

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._directory.path

    @property
    def model(self) -> Path:
        """The folder of the saved model; it isn't there before the last round or an `export`."""
        return self.path / "model"

    @cached_property
    def job(self) -> Job:
        """The resolved job, without secrets."""
        return job_of_run(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved job as nested tables, without secrets."""
        return resolved(self.job)

    @property
    def committed_rounds(self) -> int:
        """Number of committed rounds."""
        from hypha_ray.driver.earlier_runs import committed

        return committed(self._directory)

    @property
    def summary(self) -> dict[str, Any]:
        """Figures of the whole run; empty before its end."""
        return read_json(self.path / "summary.json")

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the records of ``metrics.jsonl``, of one kind, ``round``, ``eval`` or ``step``, or all.

        Raises:
            ConfigError: CFG003, there are no such records.

        """
        require_choice((*RECORD_KINDS, None), kind=kind)
        return read_jsonl(self.path / METRICS, None if kind is None else [kind])

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the events of ``events.jsonl``, of one kind such as ``join`` or ``loss``, or all."""
        require_kind(or_none(TEXT), kind=kind)
        return read_jsonl(self.path / EVENTS, None if kind is None else [kind])

    def frame(self, kind: Literal["round", "eval", "step"] = "round") -> DataFrame:
        """Return records as a table of pandas; records of rounds and evaluations are indexed by round, from 0.

        A field by worker is a column of each worker, such as ``batches.0``. Of a round that was trained again after a
        crash the last record counts.

        Raises:
            ConfigError: CFG003, there are no such records.

        """
        from pandas import json_normalize

        require_choice(RECORD_KINDS, kind=kind)
        frame = json_normalize(self.records(kind))
        if kind == "step" or frame.empty:
            return frame
        return frame.drop_duplicates("round", keep="last").set_index("round").sort_index()

    def plots(self) -> list[Path]:
        """Draw the run's plots into its folder ``plots``, and return the PNG files.

        Raises:
            DataError: DATA044, the run has no complete round yet.

        """
        from hypha_ray.telemetry.plots import draw

        return draw(self.path)

    @property
    def newest_snapshot(self) -> int:
        """Round of the newest snapshot that is as it was written.

        Raises:
            CheckpointError: CKPT006, there is none yet; STORE004, all are damaged.

        """
        from hypha_ray.store.snapshots import load_snapshot, newest_good, rounds

        newest_round = newest_good(self.path)
        if newest_round is None:
            for damaged_round in rounds(self.path)[-1:]:
                load_snapshot(self.path, damaged_round)
            fix = "let it train until its first checkpoint; resume it if it was ended"
            raise CheckpointError("CKPT006", f"run {self.path.name} has no checkpoint yet", fix=fix)
        return newest_round

    def require_snapshot(self, round: int) -> None:
        """Refuse a round, counted from 0, that has no snapshot.

        Raises:
            CheckpointError: STORE006, it has none.

        """
        require_kind(WHOLE, round=round)
        from hypha_ray.store.snapshots import require_snapshot

        require_snapshot(self.path, round)

    def export(
        self,
        folder: str | Path | None = None,
        round: int | None = None,
        compatible: int | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    ) -> Path:
        """Save the weights after a round for `from_pretrained`, and return the folder.

        Args:
            folder: folder to write; None: `model` in the run directory.
            round: a round that has a snapshot, counted from 0; None: the newest.
            compatible: older release of transformers that is to load the folder, too: 4; None: none.
            dtype: dtype of the weights; None: that of the job, `checkpoint.export_dtype`, or of its repository.

        Raises:
            CheckpointError: the round has no snapshot that is as it was written.
            ConfigError: an argument is out of range.

        """
        require_kind(or_none(PATH), folder=folder)
        require_choice((None, 4), compatible=compatible)
        require_choice((None, "float32", "bfloat16", "float16"), dtype=dtype)
        target = Path(folder or self.model).expanduser()
        if target != self.model:
            require_replaceable("folder", target)
        with flagless():
            save_snapshot(self, target, self.newest_snapshot if round is None else round, compatible, dtype)
        return target

    def load_model(self, round: int | None = None) -> PreTrainedModel:
        """Load the model, in evaluation mode; an adapter is merged into it.

        Args:
            round: a round that has a snapshot, counted from 0; None: the saved model, otherwise the newest snapshot.

        Raises:
            CheckpointError: there is no such model.

        """
        from hypha_ray.model.saved_model import open_saved

        with flagless(), self._model_of(round).opened() as folder:
            network, _ = open_saved(folder, trained=self.job.model)
        return network

    def evaluate(self, dataset: str | Path, *, round: int | None = None, **settings: Any) -> dict[str, float]:
        """Evaluate the model on a prepared dataset, as `jobs/evaluate.py` does.

        Args:
            dataset: folder of the dataset, or its name below the folder of datasets or among data nodes.
            round: as for `load_model`.
            settings: ``split``, ``batch_size``, ``type``, ``metrics``; for preferences ``reference``; and for prompts
                ``reward``, ``reward_model``, ``environment``, ``turns``, ``max_response_tokens``, ``samples``,
                ``temperature`` and ``seed``.

        Returns:
            Figures such as ``val_loss`` and ``accuracy``; for prompts such as ``reward``.

        Raises:
            TypeError: there is no such setting.
            HyphaError: the dataset can't be had or doesn't fit the model, or a setting is out of range.

        """
        require_kind(PATH, dataset=dataset)
        require_settings("evaluate", settings, list(EvaluationRequest.__dataclass_fields__)[1:])
        request = EvaluationRequest(str(dataset), **settings)
        _require_settings(request)
        with flagless():
            _, figures = evaluate_on_dataset(request, self._model_of(round), lambda phase: None)
        return figures

    def generate(
        self,
        prompt: str,
        *,
        round: int | None = None,
        max_new_tokens: int = 256,
        seed: int = 0,
        system: str | None = None,
        raw: bool | None = None,
        **sampling: Unpack[Sampling],
    ) -> str:
        """Let the language model answer a prompt, as `jobs/generate.py` does; the model stays loaded.

        Args:
            prompt: text to answer; without a chat template, text to continue.
            round: as for `load_model`.
            max_new_tokens: number of tokens after which the answer is cut off.
            seed: seed of the choices; equal settings give equal answers.
            system: system message of a chat; empty: none; None: that of the preparation, if there was one.
            raw: whether to go on from the text itself, without a chat template; None: as the model was trained.
            sampling: ``temperature`` divides logits; 0 is for the most probable token each time. Tokens are chosen
                from those with the probability mass ``top_p``, and from the ``top_k`` most probable ones. What isn't
                given is as saved with the model, otherwise 0.7, 1 and all.

        Raises:
            TypeError: there is no such setting.
            ConfigError: the model generates no text, or a setting is out of range.
            CheckpointError: there is no such model.

        """
        require_settings("generate", sampling, Sampling.__annotations__)
        require_kind(TEXT, prompt=prompt)
        require_kind(or_none(TEXT), system=system)
        require_kind(or_none(FLAG), raw=raw)
        require_kind(WHOLE, max_new_tokens=max_new_tokens, seed=seed)
        require_kind(or_none(WHOLE), top_k=sampling.get("top_k"))
        require_kind(or_none(NUMBER), temperature=sampling.get("temperature"), top_p=sampling.get("top_p"))
        with flagless():
            require_sampling(max_new_tokens, seed, sampling)
            writer = self._writer(round, system, raw)
        import torch

        torch.manual_seed(seed)
        writer.forget()
        return writer.write(prompt, max_new_tokens=max_new_tokens, prints=False, **sampling)

    def _writer(self, round: int | None, system: str | None, raw: bool | None) -> Writer:
        """Writer of a model, which is loaded once."""
        key = round, system, raw
        if key not in self._writers:
            from hypha_ray.model.writer import Writer

            with self._model_of(round).opened() as folder:
                self._writers[key] = Writer(folder, raw=raw, system=system)
        if system is not None and not self._writers[key].chats:
            fix = "leave system out, or take a model that was trained on chats"
            problem = "only a chat has a system message"
            raise ConfigError("GEN001", problem, "system", "a tokenizer with a template", fix)
        return self._writers[key]

    def _model_of(self, round: int | None) -> ModelSource:
        require_kind(or_none(WHOLE), round=round)
        return find_model(str(self.path), round)


def _require_settings(request: EvaluationRequest) -> None:
    """Refuse settings of an evaluation that have a wrong type."""
    require_kind(TEXT, split=request.split)
    require_kind(WHOLE, batch_size=request.batch_size, seed=request.seed)
    require_kind(or_none(TEXT), type=request.type, reward=request.reward, environment=request.environment)
    require_kind(or_none(PATH), reward_model=request.reward_model, reference=request.reference)
    require_kind(
        or_none(WHOLE),
        turns=request.turns,
        max_response_tokens=request.max_response_tokens,
        samples=request.samples,
    )
    require_kind(or_none(NUMBER), temperature=request.temperature)
    require_kind(or_none(TEXTS), metrics=request.metrics)


def _preformatted(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _framed(page: str) -> str:
    """A page in a frame of its own, which keeps its style from the notebook's."""
    style = "width: 100%; height: 20em; border: 0"
    return f'<iframe sandbox srcdoc="{html.escape(page)}" style="{style}"></iframe>'


def _image(png: Path) -> str:
    data = b64encode(png.read_bytes()).decode()
    return f'<img alt="{png.stem}" src="data:image/png;base64,{data}" style="max-width: 40em">'


def _job(source: Source) -> Job:
    """Return a job from any of its forms."""
    if isinstance(source, Job):
        return source
    if isinstance(source, Mapping):
        return from_tables(source)
    require_kind(JOB, job=source)
    return load(["@", str(source)]).job
