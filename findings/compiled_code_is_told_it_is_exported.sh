#!/usr/bin/env bash
# torch.compiler.is_exporting() is True in everything that torch.compile of PyTorch 2.11 compiles.
#
# Packages:  torch 2.11.0
# Guess:     it is True while torch.export runs, as its name and documentation say, and False in what is compiled.
# Behaviour: Dynamo replaces the call by True in compiled code, too. Eager code and torch.export get what they expect.
# Seen:      eager: False; compiled: True; exported: True
# Matters:   layers that cache, pack or merge ask whether they are exported, and leave that out where they are, as a
#            program must not depend on it. Under torch.compile they take the slower way without a word: a product for
#            each of query, key and value in place of one, say. PyTorch 2.13 answers False there.
#
# Exits with 0 while this is so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0

"$folder/venv/bin/python" - <<'PYTHON'
import torch


class Asks(torch.nn.Module):
    def forward(self, x):
        return x + 1 if torch.compiler.is_exporting() else x


x = torch.zeros(2)
answers = {
    "eager": Asks()(x),
    "compiled": torch.compile(Asks(), backend="eager")(x),
    "exported": torch.export.export(Asks(), (x,)).module()(x),
}
seen = {way: bool(y.all()) for way, y in answers.items()}
print("guess: False in eager and in compiled code, True in exported code")
print("; ".join(f"{way}: {answer}" for way, answer in seen.items()))
assert seen == {"eager": False, "compiled": True, "exported": True}, "compiled code is told that it is not exported now"
PYTHON
