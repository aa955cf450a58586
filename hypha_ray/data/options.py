"""Options of `prepare`, from which its command line is generated; free of heavy imports."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Final

from hypha_ray.config.value_types import is_malformed, malformed
from hypha_ray.data.sources.files import medium_of
from hypha_ray.errors import ConfigError
from hypha_ray.plugins import Plugin, is_built_in, require_known

PROBLEMS = "problems:"
GYM = "reasoning-gym:"
GENERATED: Final = (PROBLEMS, GYM)
"""Beginnings of sources whose prompts are generated."""
MOST_PARTS = 1000
"""Most parts of a dataset."""

_OF_ANSWERS = ("answer_column", "answer_pattern", "task", "keep_columns")
_OF_CHATS = ("messages_column", "completion_column")
_OF_PAIRS = ("source_column", "target_column")
_OF_FILES = ("image_column", "audio_column")
_OF_TEXTS = ("label_columns", "regression", "second_column")
_OF_LABELS = ("label_column", *_OF_TEXTS)
_MARKS = {
    "chats": "add --chat or --messages-column, or --prompt-column and --completion-column",
    "prompts": "add --prompt-column",
    "pairs": "add --source-column and --target-column",
    "texts": "add --label-column",
    "images": "add --image-column, or name a folder of images",
    "recordings": "add --audio-column, or name a folder of recordings",
}
"""Remedy for a kind without an option of its own."""
_OF_COMPARISONS = ("chosen_column", "rejected_column", "margin_column")
_OF_PREFERENCES = (*_OF_COMPARISONS, "desirable_column", "reference", "reference_revision")


@dataclass(frozen=True)
class PrepareOptions:
    """Options for turning a corpus into slices of packed sequences, chats, images or prompts, with a manifest."""

    source: str
    """stdlib, digits, a file of text, CSV, JSON, Parquet or Arrow, a folder or pattern of them, the URL of a file or
    folder, a Hugging Face dataset, problems:NAME such as problems:sort2, or reasoning-gym:NAME"""
    out: str
    """folder to create, or its URL: s3, gs, hf or file; its name becomes the dataset's name"""
    kind: Annotated[str, Plugin("dataset_kinds", checked=False)] | None = None
    """kind of the samples; default: what the other options tell"""
    tokenizer: str = "byte"
    """byte or characters (no download), or a Hugging Face name or local folder"""
    tokenizer_revision: str | None = None
    """branch, tag or commit of the tokenizer"""
    preprocessor: str | None = None
    """Hugging Face name or local folder of an image processor or feature extractor, for images or recordings"""
    preprocessor_revision: str | None = None
    """branch, tag or commit of the preprocessor"""
    seq_len: int = 256
    """tokens in a sample; longer prompts are left out, and longer chats are cut off"""
    samples_per_slice: int = 1024
    """samples in a slice, the unit of data sent to workers; fewer images or recordings if they exceed 64 MB"""
    max_seconds: float = 10.0
    """length at which recordings are cut off, in seconds"""
    validation_fraction: float = 0.05
    """fraction of the documents, or of the different samples, to hold out"""
    validation_samples: int = 256
    """most samples to hold out"""
    seed: int = 0
    """seed of split and order"""
    max_documents: int | None = None
    """most documents or prompts to read; default for generated prompts: 8192"""
    max_samples: int | None = None
    """most training samples to write"""
    text_column: str = "text"
    """column with the text, or with a list of words; default in CSV files: the only column with text"""
    chat: bool = False
    """train on chats, with a loss on the assistant's tokens; with --prompt-column alone: put prompts into the chat
    template, up to where the model answers"""
    messages_column: str | None = None
    """column that has the messages of a chat; default: recognised"""
    completion_column: str | None = None
    """column that has completions of prompts, which alone have a loss; without --chat no template is applied"""
    chat_template: Path | None = None
    """file of a Jinja template for chats; default: the tokenizer's"""
    pack: bool = False
    """put several chats into a sample of --seq-len tokens, each without attention to the others"""
    chosen_column: str | None = None
    """column that has the preferred answers, of --kind preferences; default: chosen"""
    rejected_column: str | None = None
    """column that has the answers that others were preferred to; default: rejected"""
    margin_column: str | None = None
    """column that has numbers by which preferred answers are better; default: margin, if a row has one"""
    desirable_column: str | None = None
    """column that tells whether a completion is desirable, true or false; default: label"""
    reference: str | None = None
    """Hugging Face name or local folder of a model whose log-probabilities of preferred and other answers are stored"""
    reference_revision: str | None = None
    """branch, tag or commit of the reference"""
    source_column: str | None = None
    """column that has texts for an encoder"""
    target_column: str | None = None
    """column that has the text that a decoder has to make of each of them"""
    image_column: str | None = None
    """column that has images: paths, or contents of files"""
    audio_column: str | None = None
    """column that has recordings: paths, or contents of files"""
    label_column: str | None = None
    """column that has a label, or a list of labels, of each text or file; of a list of words one label each"""
    label_columns: list[str] = field(default_factory=list)
    """columns of classes, with 1 in the rows of texts of that class and 0 in the others"""
    regression: bool = False
    """predict the numbers in --label-column, which are no classes"""
    second_column: str | None = None
    """column that has a second text of each sample, such as an answer or a hypothesis"""
    prompt_column: str | None = None
    """column that has prompts; without --completion-column the dataset is one of prompts for reinforcement learning"""
    answer_column: str | None = None
    """column that has the right answers, for rewards"""
    answer_pattern: str | None = None
    """regular expression that finds the answer in its column; its first group, if it has one, is the answer"""
    task: str | None = None
    """name of the task in the records for rewards; of gsm8k and number the answer is the number; default: exact"""
    keep_columns: list[str] = field(default_factory=list)
    """other columns to put into the records for rewards; as all columns, also fields such as extra_info.index"""
    system: str | None = None
    """system message before each prompt or chat that has none"""
    subset: str | None = None
    """configuration of a Hugging Face dataset, such as wikitext-103-raw-v1"""
    split: str = "train"
    """split of a Hugging Face dataset to read"""
    revision: str | None = None
    """branch, tag or commit of a Hugging Face dataset"""
    part: str | None = None
    """I/N: prepare only part I of N, counted from 0; each document is in one of them, validation in part 0"""
    nodes: int | None = None
    """prepare in that many parts, each on another node of the Ray cluster, which serves it from there"""
    name: str | None = None
    """name by which --nodes serves the dataset; default: that of OUT"""
    overwrite: bool = False
    """replace the dataset in OUT"""
    report: bool = False
    """show the lengths of the samples, and one of them with its scored tokens marked"""

    @property
    def kind_name(self) -> str:
        """Name of the kind of the samples, in the plural, or that of a kind of the user's own."""
        if self.kind is not None and not is_built_in("dataset_kinds", self.kind):
            return self.kind
        return self._marked_kind

    @property
    def _marked_kind(self) -> str:
        """Kind that the other options imply."""
        judges = self.kind == "preferences" or self.desirable_column is not None
        marks = (
            ("preferences", judges or any(getattr(self, name) is not None for name in _OF_COMPARISONS)),
            ("prompts", self.source.startswith(GENERATED)),
            ("images", self.image_column is not None or self.source == "digits"),
            ("recordings", self.audio_column is not None),
            ("pairs", self.source_column is not None or self.target_column is not None),
            ("texts", self.label_column is not None or bool(self.label_columns)),
            ("chats", self.completion_column is not None or self.messages_column is not None),
            ("prompts", self.prompt_column is not None),
            ("chats", self.chat),
        )
        for kind, is_marked in marks:
            if is_marked:
                return kind
        return medium_of(self.source, mixed=self.preprocessor is not None) or "documents"

    @property
    def folder(self) -> Path:
        """Folder to create; for a URL, a path that doesn't exist."""
        return Path(self.out).expanduser()

    @property
    def numbered_part(self) -> tuple[int, int] | None:
        """Number of the part, and of all parts; None: the whole."""
        if self.part is None:
            return None
        number, _, parts = self.part.partition("/")
        return int(number), int(parts)

    @property
    def media_column(self) -> str | None:
        """Column of images or recordings."""
        return self.audio_column if self.image_column is None else self.image_column

    @property
    def named_columns(self) -> frozenset[str]:
        """All columns that options name."""
        names = set(self.keep_columns) | set(self.label_columns)
        for option in fields(self):
            if option.name.endswith("_column") and getattr(self, option.name) is not None:
                names.add(getattr(self, option.name))
        return frozenset(names)

    @property
    def named_fields(self) -> list[str]:
        """Named columns that may be fields of other columns, such as ``extra_info.index``."""
        return sorted(name for name in self.named_columns if "." in name)

    @property
    def is_templated(self) -> bool:
        """Whether samples go through a chat template."""
        return self.chat or self.messages_column is not None

    def check(self) -> None:
        """Check each option, and that they fit together.

        Raises:
            ConfigError: a number is out of range.

        """
        minima = {"seq_len": 2, "samples_per_slice": 1, "validation_samples": 0, "seed": 0}
        minima |= {"max_documents": 1, "max_samples": 1}
        for name, minimum in minima.items():
            number = getattr(self, name)
            if number is not None and number < minimum:
                raise _out_of_range(name, number, f"{minimum} and up")
        if not 0 <= self.validation_fraction < 1 or not math.isfinite(self.validation_fraction):
            raise _out_of_range("validation_fraction", self.validation_fraction, "0 ≤ x < 1")
        if not self.source:
            raise _out_of_range("source", "nothing", "stdlib, digits, a path, a URL, or a Hugging Face name")
        if not str(self.out):
            raise ConfigError("CFG003", "--out is out of range", "nothing", "text", "name one")
        for address in (str(self.source), str(self.out)):
            if is_malformed(address):
                raise malformed(address)
        self._check_kind()
        self._check_part()
        self._check_source()
        self._check_columns()
        if "://" not in self.source:  # What is at a URL isn't known before it is here.
            self._check_media()
        self._check_prompts()

    def _check_kind(self) -> None:
        """Refuse a kind that there isn't, and options that belong to another one.

        Raises:
            ConfigError: PLG001, PREP007.

        """
        if self.kind is None:
            return
        require_known("dataset_kinds", self.kind)
        if self.kind_name != self.kind:
            problem = f"--kind {self.kind} and the other options exclude each other"
            fix = _MARKS.get(self.kind, "leave --kind out")
            if self.kind_name != "documents":
                fix = "leave --kind out"
            raise ConfigError("PREP007", problem, f"options of {self.kind_name}", fix=fix)
        if is_built_in("dataset_kinds", self.kind):
            return
        columns = (*_OF_CHATS, *_OF_PAIRS, *_OF_FILES, "prompt_column", *_OF_LABELS, *_OF_ANSWERS, *_OF_PREFERENCES)
        of_built_in_kinds = ("chat", "preprocessor", "system", "chat_template", "pack", "report")
        self._refuse((*columns, *of_built_in_kinds), f"has no effect on --kind {self.kind}")
        if self.source.startswith(GENERATED) or self.source in ("stdlib", "digits"):
            problem = f"--source {self.source} has no rows, which --kind {self.kind} makes samples of"
            raise ConfigError("PREP007", problem, fix="name a table, or a Hugging Face dataset")

    def _check_source(self) -> None:
        """Refuse columns of a source that has none."""
        columns = (*_OF_CHATS, *_OF_PAIRS, *_OF_FILES, "prompt_column", *_OF_LABELS, "preprocessor", *_OF_PREFERENCES)
        if self.source.startswith(GENERATED):
            self._refuse((*columns, *_OF_ANSWERS), f"has no effect on generated prompts, --source {self.source}")
        elif self.source in ("stdlib", "digits"):
            self._refuse((*columns, "chat"), f"has no effect on --source {self.source}, which has no columns")

    def _check_part(self) -> None:
        """Refuse parts of samples that aren't documents, and a number that no part has."""
        if self.nodes is not None:
            self._check_nodes()
        elif self.name is not None:
            self._refuse(("name",), "has no effect without --nodes")
        if self.part is None:
            return
        match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", self.part)
        if match is None or not int(match[1]) < int(match[2]) <= MOST_PARTS:
            raise _out_of_range("part", self.part, f"0/N to N-1/N, with N up to {MOST_PARTS}")
        if self.kind_name != "documents":
            self._refuse(("part",), f"has no effect on {self.kind_name}")

    def _check_nodes(self) -> None:
        """Refuse a number of nodes that isn't one, and places that aren't on the nodes."""
        if not 1 <= int(self.nodes or 0) <= MOST_PARTS:
            raise _out_of_range("nodes", self.nodes, f"1 to {MOST_PARTS}")
        self._refuse(("part",), "and --nodes exclude each other")
        if self.kind_name != "documents":
            self._refuse(("nodes",), f"has no effect on {self.kind_name}")
        if "://" in str(self.out):
            raise ConfigError("PREP007", "--nodes and a URL as --out exclude each other", fix="name a folder")

    def _check_columns(self) -> None:
        """Refuse columns of several kinds of samples."""
        if self.messages_column is not None:
            self._refuse(("prompt_column", "completion_column"), "and --messages-column exclude each other")
        if (self.source_column is None) != (self.target_column is None):
            raise ConfigError("PREP007", "--source-column and --target-column belong together", fix="give both or none")
        self._check_labels()
        for name in ("source_column", "label_column", "label_columns", *_OF_FILES):
            if getattr(self, name) in (None, []):
                continue
            reason = f"and --{_flag(name)} exclude each other"
            self._refuse((*_OF_CHATS, "prompt_column", "chat"), reason)
            if name not in _OF_PAIRS:
                self._refuse(_OF_PAIRS, reason)
        self._check_preferences()
        if self.report and self.kind_name in ("images", "recordings", "prompts", "preferences"):
            raise ConfigError("PREP007", f"--report has no effect on {self.kind_name}", fix="leave it out")

    def _check_preferences(self) -> None:
        """Refuse columns of other samples beside those of preferences, and the columns of both kinds of preferences."""
        if self.kind_name != "preferences":
            self._refuse(_OF_PREFERENCES, f"has no effect on {self.kind_name}")
            return
        other_options = ("messages_column", *_OF_PAIRS, *_OF_FILES, *_OF_LABELS, *_OF_ANSWERS)
        self._refuse(other_options, "has no effect on preferences")
        if self.source in ("stdlib", "digits") or self.source.startswith(GENERATED):
            problem = f"--source {self.source} has no preferences"
            raise ConfigError("PREP007", problem, fix="name a table, or a Hugging Face dataset")
        if self.desirable_column is not None:
            self._refuse(_OF_COMPARISONS, "and --desirable-column exclude each other")
        elif self.chosen_column is not None:
            self._refuse(("completion_column",), "and --chosen-column exclude each other")
        if self.reference is None:
            self._refuse(("reference_revision",), "has no effect without --reference")

    def _check_labels(self) -> None:
        """Refuse labels of two kinds, and options of labelled texts without them."""
        if self.kind_name != "texts":
            self._refuse(_OF_TEXTS, f"has no effect on {self.kind_name}")
        if self.label_columns:
            self._refuse(("label_column", "regression"), "and --label-columns exclude each other")
            if len(set(self.label_columns)) < len(self.label_columns):
                raise _out_of_range("label_columns", ", ".join(self.label_columns), "different columns")

    def _check_prompts(self) -> None:
        """Refuse options of prompts and chats that would have no effect."""
        if self.kind_name != "chats":
            self._refuse(("pack",), f"has no effect on {self.kind_name}")
        if self.kind_name == "chats":
            self._refuse(_OF_ANSWERS, "has no effect on chats")
        if self.prompt_column is None:
            needs_prompts = _OF_ANSWERS if self.kind_name == "preferences" else ("completion_column", *_OF_ANSWERS)
            self._refuse(needs_prompts, "has no effect without --prompt-column")
        if not self.is_templated:
            self._refuse(("system", "chat_template"), "has no effect without --chat")
        if self.system is not None and self.system != self.system.encode("utf-8", "replace").decode():
            raise _out_of_range("system", repr(self.system), "a text in UTF-8")
        if self.answer_column is None:
            self._refuse(("answer_pattern",), "has no effect without --answer-column")
        reserved = {"task", "answer"} & set(self.keep_columns)
        if reserved:
            raise _out_of_range("keep_columns", ", ".join(sorted(reserved)), "columns of other names")
        try:
            re.compile(self.answer_pattern or "")
        except re.error as error:
            raise _out_of_range("answer_pattern", f"{self.answer_pattern}: {error}", "a regular expression") from None

    def _check_media(self) -> None:
        """Refuse images and recordings without a preprocessor, and a preprocessor without them."""
        if not self.max_seconds > 0 or not math.isfinite(self.max_seconds):
            raise _out_of_range("max_seconds", self.max_seconds, "more than 0")
        if self.image_column is not None:
            self._refuse(("audio_column",), "and --image-column exclude each other")
        if self.kind_name not in ("images", "recordings"):
            self._refuse(("preprocessor", "preprocessor_revision"), f"has no effect on {self.kind_name}")
        elif self.source != "digits" and self.preprocessor is None:
            problem = f"{self.kind_name} need --preprocessor"
            fix = "name the model to train, such as google/vit-base-patch16-224"
            raise ConfigError("PREP012", problem, fix=fix)

    def _refuse(self, names: tuple[str, ...], reason: str) -> None:
        for name in names:
            if getattr(self, name) not in (None, False, []):
                raise ConfigError("PREP007", f"--{_flag(name)} {reason}", fix="leave it out")


def _out_of_range(name: str, got: object, allowed: str) -> ConfigError:
    return ConfigError("PREP001", f"--{_flag(name)} is out of range", str(got), allowed)


def _flag(name: str) -> str:
    """Name of an option on the command line, without its dashes."""
    return name.replace("_", "-")
