#!/usr/bin/env bash
# datatrove 0.10.1: a no-loss range that ends at a space drops the rest of its document, with tokenizers as T5's or
# BERT's.
#
# With save_loss_metadata a document's no_loss_ranges, pairs of character positions, are to be left out of the loss.
# Their ends are looked up by char_to_token. It gives None for a character that is in no token, and tokenizers that
# split at whitespace (BERT, T5, XLM-R) have none for spaces and line ends. As an end, None counts as the document's
# end: the range and all behind it are cut away, and a prompt at the start with a space behind it leaves an empty
# document. As a start it counts as 0, so all before it is left out of the loss, too. A range that ends behind the
# space is right, and so are byte-level tokenizers, whose tokens have the spaces. Nothing is said.
#
# hypha_ray isn't touched: it doesn't use datatrove.
#
# Seen with datatrove 0.10.1, tokenizers 0.23.3, Python 3.11 (tokenizers that split as GPT-2, T5 and BERT do):
#   GPT-2, no range: 19 of 19 tokens, learned: Q: two plus two? A: four Q: two plus three? A: five
#   GPT-2, the first question: 19 of 19 tokens, learned: four Q: two plus three? A: five
#   GPT-2, the first question and the space: 19 of 19 tokens, learned: four Q: two plus three? A: five
#   GPT-2, the first answer: 19 of 19 tokens, learned: Q: two plus two? A: Q: two plus three? A: five
#   T5, no range: 12 of 12 tokens, learned: Q: two plus two? A: four Q: two plus three? A: five
#   T5, the first question: 0 of 12 tokens, learned: nothing
#   T5, the first question and the space: 12 of 12 tokens, learned: four Q: two plus three? A: five
#   T5, the first answer: 12 of 12 tokens, learned: nothing
#   BERT, no range: 18 of 18 tokens, learned: Q : two plus two ? A : four Q : two plus three ? A : five
#   BERT, the first question: 0 of 18 tokens, learned: nothing
#   BERT, the first question and the space: 18 of 18 tokens, learned: four Q : two plus three ? A : five
#   BERT, the first answer: 18 of 18 tokens, learned: nothing
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" numpy==2.4.6 tokenizers==0.23.3 datatrove==0.10.1

cat > "$work/ranges.py" <<'PY'
import sys
import tempfile

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = "Q: two plus two? A: four\nQ: two plus three? A: five"
QUESTION, REST = TEXT.index(" four"), TEXT.index("\n")
RANGES = {
    "no range": [],
    "the first question": [(0, QUESTION)],
    "the first question and the space": [(0, QUESTION + 1)],
    "the first answer": [(QUESTION, REST)],
}


def tokenizer(name):
    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    if name == "GPT-2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.post_processor = processors.ByteLevel(trim_offsets=False)
        made.decoder = decoders.ByteLevel()
    elif name == "BERT":
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        made.pre_tokenizer = pre_tokenizers.Sequence(split)
        made.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=["[UNK]"], show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    return made


for name in ("GPT-2", "T5", "BERT"):
    for described, ranges in RANGES.items():
        folder = tempfile.mkdtemp(dir=sys.argv[1])
        tokens = tokenizer(name)
        tokens.save(f"{folder}/tokenizer.json")
        document = Document(text=TEXT, id="0", metadata={"no_loss_ranges": ranges})
        step = DocumentTokenizer(folder, f"{folder}/tokenizer.json", shuffle_documents=False, save_loss_metadata=True)
        step.run([document])
        ids = np.fromfile(f"{folder}/00000_unshuffled.ds", np.uint16)
        loss = np.fromfile(f"{folder}/00000_unshuffled.ds.loss", bool)
        learned = tokens.decode(ids[loss].tolist()).split()
        kept = f"{len(ids)} of {len(tokens.encode(TEXT).ids)} tokens"
        print(f"{name}, {described}: {kept}, learned: {' '.join(learned) or 'nothing'}")
PY
"$work/env/bin/python" -W ignore "$work/ranges.py" "$work" 2> "$work/errors" | sed '/^$/d' | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
