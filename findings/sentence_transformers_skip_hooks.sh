#!/usr/bin/env bash
# SentenceTransformer.encode calls a model past its own hooks and past its compiled form.
#
# Packages:  sentence-transformers 6.2.0, transformers 5.24.0, torch 2.13.0
# Guess:     encode calls the model of Transformers as any module is called, model(...): forward hooks of that model run,
#            and model.compile() has what it says compiled.
# Behaviour: it looks up a method by name, "forward" for texts, and calls that. Pre-hooks and hooks of the model itself
#            never run, and neither does what compile() has put in the place of its call. Hooks of submodules do run.
# Seen:      encode: hooks that ran: ['encoder']; graphs that were compiled: 0
#            called directly: ['before', 'encoder', 'after']; graphs that were compiled: 1
# Matters:   pruning and quantization observe layers by hooks, libraries move offloaded weights by hooks of the outermost
#            module, and compile() is how models are made fast in place. Under encode() all of these are left out
#            without an error. Hook and compile submodules, such as model.encoder, or check that a hook has run.
#
# Exits with 0 while this is so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 sentence-transformers==6.2.0

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

folder = Path(sys.argv[1], "model")
folder.mkdir()
(folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sparse", "dense"]))
BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
BertModel(BertConfig(vocab_size=7, **size)).save_pretrained(folder)

transformer = Transformer(str(folder))
texts = SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")
model = transformer.model
ran, compiled = [], []
model.register_forward_pre_hook(lambda *given: ran.append("before"))
model.register_forward_hook(lambda *given: ran.append("after"))
model.encoder.register_forward_hook(lambda *given: ran.append("encoder"))


def backend(graph, inputs):
    compiled.append(graph)
    return graph.forward


model.compile(backend=backend)
print("guess: encode runs all hooks, and the compiled model")
texts.encode(["sparse dense"])
by_encode = ran.copy(), len(compiled)
print(f"encode: hooks that ran: {by_encode[0]}; graphs that were compiled: {by_encode[1]}")
ran.clear()
model(**texts.preprocess(["sparse dense"]))
print(f"called directly: {ran}; graphs that were compiled: {len(compiled)}")
assert by_encode == (["encoder"], 0), "encode calls the model itself now"
assert set(ran) == {"before", "encoder", "after"} and compiled
print("as stated: encode calls forward past the hooks and the compiled form of the model")
PYTHON
