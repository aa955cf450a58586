"""Make a prepared dataset: slices of packed texts, chats, labelled texts, images or prompts, and a manifest.

    python jobs/prepare.py --source stdlib --out ~/hypha_ray/datasets/stdlib
    python jobs/prepare.py --source digits --out ~/hypha_ray/datasets/digits
    python jobs/prepare.py --source 'texts/**/*.txt' --tokenizer gpt2 --seq-len 1024 --out texts-gpt2
    python jobs/prepare.py --source Salesforce/wikitext --subset wikitext-103-raw-v1 --tokenizer gpt2 --out wikitext
    python jobs/prepare.py --source chats.jsonl --chat --tokenizer Qwen/Qwen2.5-0.5B-Instruct --out data/chats --report
    python jobs/prepare.py --source reviews.csv --label-column sentiment --tokenizer bert-base-cased --out reviews
    python jobs/prepare.py --source flowers --preprocessor google/vit-base-patch16-224 --out flowers
    python jobs/prepare.py --source problems:sort2 --tokenizer characters --out data/sort2
    python jobs/prepare.py --source gsm8k.jsonl --prompt-column question --answer-column answer --task gsm8k \
        --tokenizer Qwen/Qwen2.5-0.5B-Instruct --chat --out data/gsm8k

stdlib is the source text of Python's own library, digits the small images of scikit-learn: neither needs a network.
problems: copyN, reverseN, sortN, maxN, sumsN and remaindersN, of N digits, are prompts that are generated with answers.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hypha_ray.config.entry_point import Phases, run
from hypha_ray.config.options import parse_options
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Origin, amount_text

if TYPE_CHECKING:
    from hypha_ray.data.manifest import Manifest

MOST_CLASSES = 20
"""Most classes that are listed with their numbers of labels."""


def main() -> None:
    """Parse, prepare with a progress line, and say what was made."""
    options = parse_options(PrepareOptions, __doc__, sys.argv[1:])
    if options.nodes is not None:
        prepare_parts(options)
        return
    phases = Phases()
    phases.begin("loading libraries")
    from rich.console import Console

    from hypha_ray.data.catalogue import is_url
    from hypha_ray.data.prepare import prepare
    from hypha_ray.texts import redacted

    begin = time.monotonic()
    counts = Counter[str]()
    console = Console(stderr=True)
    phases.begin("reading and tokenizing")
    with console.status("reading") as status:

        def report(kind: str, number: int) -> None:
            counts[kind] += number
            text = ", ".join(f"{count:,} {name}" for name, count in counts.items())
            status.update(text)
            phases.update(f"reading: {text}")

        created = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = prepare(options, report, created)
    phases.end()
    samples = sum(info.samples for info in manifest.slices)
    size_mb = samples * manifest.sample_bytes / 1e6
    for split in ("train", "validation"):
        slices = len(manifest.of(split))
        print(f"{split:<10} {manifest.samples(split):>9,} samples in {slices:,} slices")
    if is_url(options.out):
        address = redacted(options.out)
    else:
        address = str(options.folder.resolve())
        show_samples(options, manifest)
    print(f"{'size':<10} {size_mb:>9,.1f} MB in {time.monotonic() - begin:.1f} s")
    if manifest.origin is not None:
        show_origin(manifest.origin, options.kind_name)
    print(f"dataset: {address}")


def prepare_parts(options: PrepareOptions) -> None:
    """Prepare on nodes of the cluster, and say what each of them serves."""
    options.check()
    phases = Phases()
    phases.begin("loading libraries")
    from hypha_ray.config.value_types import CLUSTER
    from hypha_ray.driver.cluster_offers import prepare_on_nodes
    from hypha_ray.driver.ray_cluster import connected, connecting

    phases.begin(f"{connecting('auto')} Ray")
    with connected(CLUSTER, address_alone="auto"):
        phases.begin(f"reading and tokenizing on {options.nodes} nodes")
        replicas = prepare_on_nodes(options)
        phases.end()
        for replica in replicas:
            manifest = replica.manifest
            samples = f"{manifest.samples('train'):,} train, {manifest.samples('validation'):,} validation"
            print(f"{replica.name} on {replica.address}: {samples} samples in {len(manifest.slices):,} slices")


def show_samples(options: PrepareOptions, manifest: Manifest) -> None:
    """Say what the slices contain, which are read for that."""
    if manifest.modality == "language":
        show_tokens(options.folder, manifest, options.report, options.kind_name == "pairs")
    if manifest.modality == "prompts":
        show_prompts(options.folder, manifest)
    if manifest.modality == "preferences":
        show_preferences(options.folder, manifest)
    if manifest.classes is not None:
        show_classes(options.folder, manifest)


def show_tokens(folder: Path, manifest: Manifest, with_lengths: bool, pairs: bool) -> None:
    """Say how many tokens there are to train on; on request also their lengths, with a sample."""
    from rich.console import Console

    from hypha_ray.data.report import lengths_of, marked, sample_of

    lengths = lengths_of(folder, manifest, are_pairs=pairs)
    scored = ""
    if pairs:
        scored = f", and {lengths.scored:,} in targets, which are scored"
    elif lengths.scored is not None:
        scored = f", of which {lengths.scored:,} are scored"
    print(f"{'tokens':<10} {lengths.tokens:>9,} to train on{scored}")
    if with_lengths:
        median = f"{lengths.median:,.0f} in the median"
        unit = "source" if pairs else "sample"
        print(f"{'lengths':<10} {lengths.shortest:,} to {lengths.longest:,} tokens a {unit}, {median}")
        for bar in lengths.bars():
            print(f"{'':<10} {bar}")
        console = Console(soft_wrap=True, highlight=False)
        sample = sample_of(folder, manifest, are_pairs=pairs)
        console.print(f"{'sample':<10} ", marked(sample, console.is_terminal), sep="")


def show_prompts(folder: Path, manifest: Manifest) -> None:
    """Say how many different prompts there are and how long they are, and show the first one."""
    from hypha_ray.data.kinds.prompts import preview

    prompts = preview(folder, manifest)
    different = ", ".join(f"{number:,} in {split}" for split, number in prompts.different.items())
    first = json.dumps(prompts.prompt, ensure_ascii=False)
    record = json.dumps(prompts.record, ensure_ascii=False)
    print(f"{'different':<10} {different}")
    print(f"{'tokens':<10} {prompts.shortest:,} to {prompts.longest:,} a prompt, {prompts.mean:,.1f} on average")
    print(f"{'prompt':<10} {first}")
    print(f"{'record':<10} {record}")


def show_preferences(folder: Path, manifest: Manifest) -> None:
    """Say how many tokens the preferences have, and show the first one."""
    from hypha_ray.data.report import lengths_of, preference_texts

    lengths = lengths_of(folder, manifest)
    print(f"{'tokens':<10} {lengths.tokens:>9,} to train on, of which {lengths.scored:,} are scored")
    for name, text in preference_texts(folder, manifest).items():
        print(f"{name:<10} {json.dumps(text, ensure_ascii=False)}")


def show_classes(folder: Path, manifest: Manifest) -> None:
    """Say how often each class occurs, in the order of their numbers."""
    from hypha_ray.data.report import class_counts

    counts = class_counts(folder, manifest)
    texts = [f"{name} {count:,}" for name, count in counts.items()]
    if len(texts) > MOST_CLASSES:
        texts[MOST_CLASSES:] = ["…"]
    print(f"{'classes':<10} {len(counts):>9,}: {', '.join(texts)}")


def show_origin(origin: Origin, kind: str) -> None:
    """Say what was read, and what was left out of it."""
    documents = amount_text(origin.documents, kind, 9)
    files = f" from {amount_text(origin.files, 'files')}" if origin.files else ""
    print(f"{'read':<10} {documents}{files}")
    for omission in origin.omissions:
        print(f"{'left out':<10} {omission}")
    for note in origin.notes:
        print(f"{'note':<10} {note}")


if __name__ == "__main__":
    run(main)
