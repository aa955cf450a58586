#!/usr/bin/env bash
# datatrove 0.10.1: without metadata files its merger cuts tokens of 4 bytes in two: half are lost, no document is
# whole.
#
# Vocabularies of more than 65536 words (Llama 3, Qwen) are written with 4 bytes a token. DocumentTokenizerMerger
# reads that size from the .metadata file of its first input, and only if its own save_final_metadata is on. If it is
# off, or was off when the files were written, the merger takes 2 bytes for granted. It reads half of each file, and
# gives each document half its bytes. As documents of several files follow each other, later ones begin in the middle
# of a token. The index that it writes counts all tokens, and so do its statistics. The setting is described as
# whether to save the metadata. Nothing is said; a reader with token_size=4 gets words that don't exist.
#
# hypha_ray isn't touched: it doesn't use datatrove.
#
# Seen with datatrove 0.10.1, tokenizers 0.23.3, Python 3.11 (four files; save_final_metadata of tokenizer and merger):
#   60000 words, True and True: 26271 of 26271 tokens, 0 not in the vocabulary, 1000 of 1000 documents
#   60000 words, True and False: 26271 of 26271 tokens, 0 not in the vocabulary, 1000 of 1000 documents
#   60000 words, False and True: 26271 of 26271 tokens, 0 not in the vocabulary, 1000 of 1000 documents
#   100000 words, True and True: 26890 of 26890 tokens, 0 not in the vocabulary, 1000 of 1000 documents
#   100000 words, True and False: 13445 of 26890 tokens, 7276 not in the vocabulary, 0 of 1000 documents
#   100000 words, False and True: 13445 of 26890 tokens, 7276 not in the vocabulary, 0 of 1000 documents
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" numpy==2.4.6 tokenizers==0.23.3 datatrove==0.10.1

cat > "$work/merge.py" <<'PY'
import sys
import tempfile

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

FILES = 4
DRAW = np.random.default_rng(0)


def merged(words, documents, at_tokenizer, at_merger):
    """The tokens and document ends of a file that was merged from four."""
    folder = tempfile.mkdtemp(dir=sys.argv[1])
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(f"{folder}/tokenizer.json")
    for rank in range(FILES):
        texts = [" ".join(f"w{token}" for token in tokens) for tokens in documents[rank::FILES]]
        step = DocumentTokenizer(
            f"{folder}/tokens", f"{folder}/tokenizer.json", save_final_metadata=at_tokenizer, seed=rank
        )
        step.run([Document(text=text, id=str(number)) for number, text in enumerate(texts)], rank, FILES)
    merger = DocumentTokenizerMerger(
        f"{folder}/tokens", f"{folder}/merged", "all", seed=0, save_final_metadata=at_merger, progress=False
    )
    merger.run()
    tokens = np.fromfile(f"{folder}/merged/000_all.ds", np.uint32 if words > 65536 else np.uint16)
    return tokens, np.fromfile(f"{folder}/merged/000_all.ds.index", np.uint64).astype(int)


for words in (60_000, 100_000):
    documents = [DRAW.integers(words, size=DRAW.integers(5, 50)).tolist() for _ in range(1000)]
    for at_tokenizer, at_merger in ((True, True), (True, False), (False, True)):
        tokens, ends = merged(words, documents, at_tokenizer, at_merger)
        found = {tuple(tokens[start:end].tolist()) for start, end in zip([0, *ends[:-1]], ends)}
        whole = sum(tuple(document) in found for document in documents)
        kept = f"{len(tokens)} of {sum(map(len, documents))} tokens, {(tokens >= words).sum()} not in the vocabulary"
        print(f"{words} words, {at_tokenizer} and {at_merger}: {kept}, {whole} of {len(documents)} documents")
PY
"$work/env/bin/python" -W ignore "$work/merge.py" "$work" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
