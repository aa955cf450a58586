#!/usr/bin/env bash
# chorus-fl 0.1.0: its detection of outliers finds none among ten clients or fewer, however far off one is.
#
# detect_outlier_deltas gives the clients whose update's length is more than threshold standard deviations from the
# mean, by default 3. Mean and deviation are those of all clients, the outlier among them. So the more it's off, the
# larger is the deviation: among n clients no value can be more than (n - 1) / sqrt(n) deviations away, which is 1.8 for
# 5 clients and 2.8 for 10. With the default no update is ever filtered in a round of up to 10, a diverged one of length
# 1e6 neither, and it's averaged in. From 11 on one outlier is found, and of two equal ones none below 21. The README's
# example has 5 updates a round and --outlier-threshold 3.0, and says that it rejects "malicious or corrupted deltas".
# The server logs only what was filtered.
#
# hypha_ray isn't touched: it compares lengths with a multiple of their median.
#
# Seen with chorus-fl 0.1.0, torch 2.13.0, Python 3.11 (updates of length 1 and one or two of 1e6):
#   5 clients, one far off: greatest deviation 1.79, found []
#   10 clients, one far off: greatest deviation 2.85, found []
#   11 clients, one far off: greatest deviation 3.02, found [0]
#   20 clients, one far off: greatest deviation 4.25, found [0]
#   11 clients, two far off: greatest deviation 2.02, found []
#   20 clients, two far off: greatest deviation 2.92, found []
#   21 clients, two far off: greatest deviation 3.01, found [0, 1]
#   5 clients, one far off, filtered and averaged: length 2e+05
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 chorus-fl==0.1.0

cat > "$work/outliers.py" <<'PY'
import torch
from chorus.server.aggregation import FedAvg, detect_outlier_deltas, filter_outlier_deltas

NAMES = ("layer.lora_A.weight", "layer.lora_B.weight")


def updates(clients, far):
    draw = torch.Generator().manual_seed(0)
    made = []
    for client in range(clients):
        values = torch.randn(2, 4, 4, generator=draw)
        values *= (1e6 if client < far else 1.0) / values.norm()
        made.append(dict(zip(NAMES, values, strict=True)))
    return made


def length(update):
    return torch.cat([tensor.flatten() for tensor in update.values()]).norm()


for clients, far in ((5, 1), (10, 1), (11, 1), (20, 1), (11, 2), (20, 2), (21, 2)):
    made = updates(clients, far)
    lengths = torch.stack([length(update) for update in made])
    deviation = ((lengths - lengths.mean()).abs() / lengths.std()).max()
    count = "one" if far == 1 else "two"
    found = detect_outlier_deltas(made)
    print(f"{clients} clients, {count} far off: greatest deviation {deviation:.2f}, found {found}")
kept = filter_outlier_deltas(updates(5, 1))
print(f"5 clients, one far off, filtered and averaged: length {length(FedAvg().aggregate(kept)):.0e}")
PY
"$work/env/bin/python" -W ignore "$work/outliers.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
