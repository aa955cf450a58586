"""Sources of documents: Python's own sources, files, Hugging Face datasets; and images from scikit-learn.

Every source yields its documents one by one and always in the same order, so a corpus may be of any size.
"""

from __future__ import annotations

import difflib
import itertools
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hypha_ray.data.manifest import MANIFEST
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Account, readable
from hypha_ray.data.slices import Arrays
from hypha_ray.data.sources.columns import (
    Column,
    FieldReader,
    Reader,
    Row,
    TextReader,
    with_fields,
    without_nulls,
    without_surrogates,
)
from hypha_ray.data.sources.files import (
    ARROW,
    UNREADABLE,
    is_binary,
    kind_of,
    leave_out_file,
    opened,
    split_names,
    texts_among,
    walk,
)
from hypha_ray.data.sources.tables import CSV, JSON, arrow_rows, csv_rows, json_rows
from hypha_ray.errors import AuthenticationError, ConfigError, DataError, HubError, HyphaError

T = TypeVar("T")

_HUB_FILES = {".parquet", ".arrow"}
_FILES = JSON | CSV | ARROW | {".txt"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def documents(options: PrepareOptions, account: Account | None = None) -> Iterator[str]:
    """The texts of a source, without blank ones.

    Args:
        options: the source, and the part of it to read.
        account: records the files read and the omissions; None: no record.

    Raises:
        DataError: there is no such source, or it is damaged.
        HyphaError: the hub can't be reached, or refuses access.

    """
    account = account or Account()
    source = (
        _standard_library(account)
        if options.source == "stdlib"
        else read(options, TextReader(options.text_column), account)
    )
    for text in source:
        if not text.strip():
            account.leave_out("documents", "blank")
        else:
            account.documents += 1
            yield without_surrogates(text)


def counted_records(records: Iterable[T], limit: int | None, account: Account) -> Iterator[T]:
    """The first records of a source, which an account counts as they are read; `limit` None: all of them."""
    for record in itertools.islice(records, limit):
        account.documents += 1
        yield record


def digits() -> Arrays:
    """The 1797 digits of scikit-learn: images ``[N, 1, 8, 8]`` from 0 to 1, labels ``[N]``."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    images = (dataset.images / 16.0).astype(np.float32)[:, np.newaxis]
    return {"images": images, "labels": dataset.target.astype(np.int64)}


def read(options: PrepareOptions, reader: Reader[T], account: Account) -> Iterable[T]:
    """Documents or prompts from files, or from a Hugging Face dataset.

    Raises:
        DataError: there is no such source, or it is damaged.
        HyphaError: the hub can't be reached, or refuses access.

    """
    source = options.source
    path = Path(source).expanduser()
    if options.named_fields:
        reader = FieldReader(reader, options)
    if path.is_dir():
        return _folder(path, options, reader, account)
    if path.exists():
        _refuse_split(options)
        return _file(path, reader, account, is_only_file=True)
    if set(source) & set("*?["):
        _refuse_split(options)
        return _files(_matches(path), Path(), options, reader, account)
    _require_hub_name(source, path)
    return _hub(source, options, reader, account)


def _refuse_split(options: PrepareOptions) -> None:
    """Refuse options of a Hugging Face dataset beside files, which are read as a whole.

    Raises:
        ConfigError: PREP007.

    """
    for flag, is_given in (("--split", options.split != "train"), ("--subset", options.subset is not None)):
        if is_given:
            problem = f"{flag} has no effect on files, which are read as a whole"
            raise ConfigError("PREP007", problem, fix="leave it out, and name the files to read by --source")


def require_source(source: str) -> None:
    """Refuse a path or pattern that leads to no file, before anything is loaded; a hub is asked later.

    Raises:
        DataError: DATA030, there is no such source, or it is prepared already.

    """
    path = Path(source).expanduser()
    if (path / MANIFEST).is_file() and any(path.glob("slice-*")):
        fix = "give it to a job as --dataset.path, or name the texts that it was made from"
        raise DataError("DATA030", f"{source} is a prepared dataset", fix=fix)
    if path.exists():
        return
    if set(source) & set("*?["):
        _require_match(path, next(_matching(path), None))
    else:
        _require_hub_name(source, path)


def _require_hub_name(source: str, path: Path) -> None:
    if kind_of(path) in _FILES or not _HUB_NAME.fullmatch(source):
        raise DataError("DATA030", f"there is no file or folder {source}", fix=_suggestion(path))


def _matches(pattern: Path) -> list[Path]:
    files = sorted(_matching(pattern))
    _require_match(pattern, next(iter(files), None))
    return files


def _matching(pattern: Path) -> Iterator[Path]:
    """Files that a pattern matches, in any order."""
    try:
        relative = pattern.relative_to(pattern.anchor)
        yield from filter(Path.is_file, Path(pattern.anchor).glob(str(relative)))
    except ValueError as error:
        allowed = "* ? [ ], and ** for all folders"
        raise DataError("DATA030", f"{pattern} isn't a pattern", str(error), allowed) from None


def _require_match(pattern: Path, file: Path | None) -> None:
    if file is None:
        raise DataError("DATA030", f"no file matches {pattern}", fix="quote the pattern, and try it with ls")


def _standard_library(account: Account) -> Iterator[str]:
    """Modules of the running interpreter's library, each as a document; some test modules aren't UTF-8 on purpose."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            modules.append(path)
    for path in texts_among(modules, root, account):
        account.files += 1
        yield path.read_text(encoding="utf-8")


def _folder(folder: Path, options: PrepareOptions, reader: Reader[T], account: Account) -> Iterable[T]:
    """A saved dataset, Parquet files in the layout of the hub, or loose files."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _hub(str(folder), options, reader, account, saved=True)
    files = walk(folder, account)
    if any(path.suffix in _HUB_FILES for path in files) and all(map(_is_utf8, files)):
        layout = _layout(folder, options)
        data_files = set[Path]().union(*layout.values())
        if all(path.suffix in _HUB_FILES for path in data_files):
            _leave_out_other_splits(layout, files, folder, options.split, account)
            return _hub(str(folder), options, reader, account)
    _refuse_split(options)
    splits = split_names(files)
    if splits:
        account.note(f"{' and '.join(splits)} are read as one; name one of them by --source to leave the others out")
    return _files(files, folder, options, reader, account)


def _files(
    files: Sequence[Path], folder: Path, options: PrepareOptions, reader: Reader[T], account: Account
) -> Iterator[T]:
    """Loose files, read by type; a table without text is left out as a whole."""
    has_read = False
    refused = None
    for path in texts_among(files, folder, account):
        file_account = Account()
        documents_of_file = _file(path, reader, file_account, is_only_file=len(files) == 1)
        try:
            first_document = next(documents_of_file, None)
        except DataError as error:
            refused = refused or error
            leave_out_file(path, folder, error, account)
            continue
        has_read = True
        try:
            if first_document is not None:
                yield first_document
                yield from documents_of_file
        finally:
            account.add(file_account)
    if refused and not has_read:
        raise refused
    if not has_read:
        problem = f"{options.source} contains no texts or tables"
        fix = "name another --source"
        raise DataError("DATA030", problem, account.left_out, fix=fix)


def _file(path: Path, reader: Reader[T], account: Account, is_only_file: bool) -> Iterator[T]:
    suffix = kind_of(path)
    columns = reader.columns
    account.files += 1
    try:
        if suffix in ARROW:
            yield from reader.of_rows(arrow_rows(path, columns, account), account)
            return
        if is_only_file and is_binary(path):
            fix = f"unpack it, or convert it by `iconv -f UTF-16 -t UTF-8 {path.name} > NEW` if it is text in UTF-16"
            raise DataError("DATA031", f"{path} is binary", "zero bytes", "text in UTF-8", fix)
        with opened(path, "rt", encoding="utf-8-sig", newline="" if suffix in CSV else None) as file:
            if suffix in JSON:
                yield from reader.of_rows(json_rows(file, path), account)
            elif suffix in CSV:
                yield from reader.of_rows(csv_rows(file, path, columns, account), account)
            else:
                yield from reader.of_text(path, file, is_only_file)
    except UnicodeDecodeError as error:
        fix = "convert it, or name a folder or pattern of files: those that aren't text are left out"
        raise DataError("DATA031", f"{path} isn't UTF-8 text", error.reason, "UTF-8", fix) from None
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError("DATA031", f"{path} can't be read", reason, fix="copy it again") from None


def _is_utf8(path: Path) -> bool:
    """Whether a path's name is UTF-8; `datasets` accepts no other names."""
    return not any("\udc80" <= character <= "\udcff" for character in str(path))


def _hub(name: str, options: PrepareOptions, reader: Reader[T], account: Account, saved: bool = False) -> Iterator[T]:
    """A Hugging Face dataset by name, which is streamed, or a local folder in that form."""
    with _explained(name):
        import datasets

        datasets.disable_progress_bars()
        if saved:
            dataset = datasets.load_from_disk(name)
            if isinstance(dataset, datasets.DatasetDict):
                if options.split not in dataset:
                    problem = f"dataset {name!r} has no split {options.split!r}"
                    raise DataError("HUB004", problem, allowed=", ".join(dataset), fix="choose one by --split")
                splits = sorted(dataset.keys() - {options.split})
                dataset = dataset[options.split]
                for split in splits:
                    account.leave_out("splits", "not requested, see --split", name=split)
        else:
            path = str(Path(name).resolve()) if Path(name).is_dir() else name
            dataset = datasets.load_dataset(
                path, options.subset, split=options.split, revision=options.revision, streaming=True
            )
        rows = _with_class_names(_undecoded(dataset), dataset.features, reader.columns)
        yield from reader.of_rows(_located(rows, name), account)


def _located(rows: Iterable[Mapping[str, Any]], name: str) -> Iterator[Row]:
    """Rows of a Hugging Face dataset, with their locations."""
    for row_number, row in enumerate(rows, 1):
        yield f"dataset {readable(name)!r}, row {row_number}", without_nulls(row)


def _undecoded(dataset: Any) -> Any:
    """A dataset whose images and recordings stay as in their files, since a preprocessor decodes those it needs."""
    import datasets

    for name, feature in (dataset.features or {}).items():
        if isinstance(feature, datasets.Image | datasets.Audio):
            dataset = dataset.cast_column(name, type(feature)(decode=False))
    return dataset


def _layout(folder: Path, options: PrepareOptions) -> dict[str, set[Path]]:
    """The splits that `datasets` finds in a folder, and the files of each."""
    with _explained(str(folder)):
        import datasets

        builder = datasets.load_dataset_builder(str(folder.resolve()), options.subset, revision=options.revision)
        layout = dict[str, set[Path]]()
        for split, files in (builder.config.data_files or {}).items():
            layout[split] = {Path(file).resolve() for file in files}
        return layout


def _leave_out_other_splits(
    layout: dict[str, set[Path]], files: Iterable[Path], folder: Path, split: str, account: Account
) -> None:
    """Record the files that aren't of the split being read."""
    for path in files:
        splits = [name for name, data_files in layout.items() if path.resolve() in data_files]
        name = path.relative_to(folder).as_posix()
        if split in splits:
            account.files += 1
        elif splits:
            account.leave_out("files", f"of split {splits[0]}", name=name)
        else:
            account.leave_out("files", "beside Parquet; a pattern such as 'DIR/**/*.txt' reads them", name=name)


def _with_class_names(
    rows: Iterable[Mapping[str, Any]], features: Any, columns: Iterable[Column]
) -> Iterator[Mapping[str, Any]]:
    """Rows with the names of classes instead of their numbers, in the columns that receive names."""
    names_by_column = {}
    for column in columns:
        if column.classes is not None:
            class_names = _class_names(features, column.name)
            names_by_column[column.name] = class_names
            if class_names is not None:
                column.classes[:] = class_names
    for row in rows:
        columns_of_row = with_fields(row, names_by_column)
        yield {name: _with_names(value, names_by_column.get(name)) for name, value in columns_of_row.items()}


def _class_names(features: Any, column: str) -> list[str] | None:
    """Names of the classes of a column; None if it has none."""
    feature: Any = features or {}
    for name in [column] if column in feature else column.split("."):
        feature = feature.get(name) if isinstance(feature, Mapping) else None
    feature = getattr(feature, "feature", feature)
    return getattr(feature, "names", None)


def _with_names(value: Any, class_names: list[str] | None) -> Any:
    """The names of one or several numbers; a number without a name, such as -1, stands for no label."""
    if class_names is None or value is None:
        return value
    if isinstance(value, list):
        return [_with_names(number, class_names) for number in value]
    return class_names[value] if 0 <= value < len(class_names) else None


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Translate errors of the `datasets` library."""
    try:
        yield
    except (HyphaError, GeneratorExit):
        raise
    except Exception as error:
        raise explain(error, name, _suggestion(Path(name), "stdlib", "digits")) from error


def _suggestion(path: Path, *names: str) -> str:
    """Remedy that names the most similar source, among names and the files beside a path."""
    sources = list(names)
    if path.parent.is_dir():
        sources += [child.name for child in path.parent.iterdir()]
    for similar in difflib.get_close_matches(path.name, sources, n=1, cutoff=0.6):
        return f"did you mean {similar!r}?"
    return "give stdlib, digits, a path, a URL, or a Hugging Face name"


def explain(error: Exception, name: str, hint: str) -> HyphaError:
    """The error to raise in place of an error of reading a dataset, by that error and its causes.

    Args:
        error: error that the library raised.
        name: name of a dataset on the hub, or a local folder.
        hint: remedy if there is no such dataset.

    """
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import constants, errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # Of httpx or httpx2, by its version.

    not_found = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)
    missing = (DatasetNotFoundError, *not_found)
    unreachable = (errors.LocalEntryNotFoundError, ConnectionError, TimeoutError, HTTPError)
    chain = list(_chain(error))
    text = " ".join(str(error).split())[:300]
    if "gated" in text or any(_status(link) in (401, 403) for link in chain):
        fix = "check the name; if it is private or gated, ask for access and set HF_TOKEN"
        return AuthenticationError("HUB002", f"the hub refuses access to dataset {name!r}", text, fix=fix)
    if any(isinstance(link, missing) for link in chain):
        return DataError("HUB001", f"there is no dataset {name!r}", text, fix=hint)
    if any(isinstance(link, unreachable) for link in chain):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else text
        problem = f"dataset {name!r} is neither a path nor in the cache, and can't be fetched: offline ({why})"
        fix = f"check the network and HF_HUB_OFFLINE, or fill the cache {constants.HF_HOME}"
        return HubError("HUB003", problem, fix=fix)
    return DataError("HUB004", f"dataset {name!r} can't be read", text, fix="check --subset, --split and --revision")


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
