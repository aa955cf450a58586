#!/usr/bin/env bash
# @huggingface/tokenizers 0.2.0 (JavaScript) loads a tokenizer.json and makes other tokens of a text than Python does, or
# none: words that a WordLevel model doesn't know have the id undefined.
#
# By its description it reads the files of transformers and tokenizers for use in the browser. Of Split, "isolated" and
# "removed" are right; merged_with_previous, merged_with_next and contiguous count as "isolated", and invert=True with
# "isolated" throws the words away, so that spaces are left. A prefix of inner pieces isn't looked up, and the file's
# truncation is left out. Steps that it lacks are named in an error as the file is loaded (CharDelimiterSplit,
# UnicodeScripts); of these nothing is said. A model then reads texts in tokens that it was not trained on.
# (microsoft/onnxruntime-extensions, pull request 1064, made another reader refuse such behaviors of Split.)
#
# hypha_ray is touched by one: its tokenizer of characters is a WordLevel model, so a character that its dataset lacks is
# <unk> in Python and undefined in JavaScript; docs/operations.md says so. Its tokenizer of bytes knows all texts.
#
# Seen with @huggingface/tokenizers 0.2.0, tokenizers 0.23.3, Node 20, Python 3.11:
#   Split, isolated: the same, 6 5 7 5 5 6 5 0 0
#   Split, removed: the same, 6 7 6 0 0
#   Split, merged_with_previous: 9 11 5 9 0 0 in Python, 6 5 7 5 5 6 5 0 0 here
#   Split, merged_with_next: 6 10 5 8 5 0 0 in Python, 6 5 7 5 5 6 5 0 0 here
#   Split, contiguous: 6 5 7 12 6 5 0 0 in Python, 6 5 7 5 5 6 5 0 0 here
#   Split, removed, inverted: the same, 5 5 5 5
#   Split, isolated, inverted: 6 5 7 5 5 6 5 0 0 in Python, 5 5 5 5 here
#   prefix of inner pieces: 5 6 5 0 0 in Python, 1 0 3 0 1 0 0 0 here
#   fused unknown: the same, 6 7 6 0
#   words: 1 2 1 0 in Python, 1 2 1 undefined here
#   truncated to 2: 6 5 in Python, 6 5 7 5 5 6 5 0 0 here
set -euo pipefail
script=$(realpath "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
cd "$work"
echo '{"private": true, "type": "module"}' > package.json
npm install --silent --no-audit --no-fund @huggingface/tokenizers@0.2.0

cat > make.py <<'PY'
import json

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

text = "ab cd  ab zz"
pieces = ["<unk>", "a", "b", "c", "d", " ", "ab", "cd", " ab", "ab ", " cd", "cd ", "  "]
vocabulary = {piece: number for number, piece in enumerate(pieces)}
merges = [("a", "b"), ("c", "d"), (" ", "ab"), (" ", "cd"), ("ab", " "), ("cd", " "), (" ", " ")]


def split(behavior, invert=False):
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" "), behavior, invert)
    return tokenizer


def words(model):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


inner = {"<unk>": 0, "a": 1, "##b": 2, "c": 3, "##d": 4, "ab": 5, "cd": 6}
cut = split("isolated")
cut.enable_truncation(2)
tokenizers = {
    "Split, isolated": split("isolated"),
    "Split, removed": split("removed"),
    "Split, merged_with_previous": split("merged_with_previous"),
    "Split, merged_with_next": split("merged_with_next"),
    "Split, contiguous": split("contiguous"),
    "Split, removed, inverted": split("removed", invert=True),
    "Split, isolated, inverted": split("isolated", invert=True),
    "prefix of inner pieces": words(models.BPE(inner, [("a", "##b"), ("c", "##d")], unk_token="<unk>", continuing_subword_prefix="##")),
    "fused unknown": words(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True)),
    "words": words(models.WordLevel({"<unk>": 0, "ab": 1, "cd": 2}, "<unk>")),
    "truncated to 2": cut,
}
for name, tokenizer in tokenizers.items():
    tokenizer.save(f"{name}.json")
json.dump({"text": text, "ids": {name: tokenizer.encode(text).ids for name, tokenizer in tokenizers.items()}}, open("ids", "w"))
PY
cat > read.js <<'JS'
import { readFileSync } from "node:fs";
import { Tokenizer } from "@huggingface/tokenizers";

const { text, ids } = JSON.parse(readFileSync("ids"));
for (const [name, right] of Object.entries(ids)) {
  const read = new Tokenizer(JSON.parse(readFileSync(`${name}.json`)), {}).encode(text).ids;
  const found = Array.from(read, String).join(" ");
  console.log(found === right.join(" ") ? `${name}: the same, ${found}` : `${name}: ${right.join(" ")} in Python, ${found} here`);
}
JS
"$work/env/bin/python" make.py
node read.js | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$script")
echo 'as described'
