#!/usr/bin/env bash
# functional_call leaves its trial tensors in a module that has two names.
#
# Package:   torch 2.13.0, torch.func.functional_call
# Guess:     functional_call is functional: whatever is passed, the module is as before once it returns. For one layer
#            used in two places, tie_weights=True (the default) takes care of the second name.
# Behaviour: the value passed for one name is swapped in for both names. On the way back the second name's original is
#            read after the first name was already swapped, so the trial tensor is put back. The module keeps it: its
#            weight is a plain tensor that no optimizer trains, and later outputs are those of the trial. Nothing warns.
# Seen:      before: Parameter, weight [1.0, 1.0, 1.0, 1.0]
#            after:  Tensor, weight [9.0, 9.0, 9.0, 9.0]
#            output now differs from before by 6.69, from the trial by 0.00
# Matters:   calibration, error profiles and trial quantization of sparse layers try values by functional_call over a
#            whole model. One shared norm or projection, and the trial stays in the model that is then saved. Give the
#            call the submodule that owns the tensor, or put the parameter back by hand.
#
# Exits with 0 while this is so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0

"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch import nn
from torch.func import functional_call

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(self.norm(x))


print("guess: the module is as before. torch", torch.__version__)
norm = nn.LayerNorm(4)  # shared by both blocks, as some models share norms and embeddings
model = nn.Sequential(Block(norm), Block(norm))
x = torch.randn(2, 4)
parameter, output = norm.weight, model(x)
print(f"before: {type(norm.weight).__name__}, weight {norm.weight.tolist()}")

trial = functional_call(model, {"0.norm.weight": torch.full((4,), 9.0)}, (x,))
after = model(x)
print(f"after:  {type(norm.weight).__name__}, weight {norm.weight.tolist()}")
changes = [f"{(after - other).abs().max():.2f}" for other in (output, trial)]
print(f"output now differs from before by {changes[0]}, from the trial by {changes[1]}")
assert norm.weight is not parameter, "this has changed: the parameter is back"
assert not isinstance(norm.weight, nn.Parameter) and all(each is not parameter for each in model.parameters())
assert torch.equal(after, trial) and not torch.equal(after, output)

alone = nn.Sequential(Block(nn.LayerNorm(4)), Block(nn.LayerNorm(4)))
parameter = alone[0].norm.weight
functional_call(alone, {"0.norm.weight": torch.full((4,), 9.0)}, (x,))
assert alone[0].norm.weight is parameter
print("as stated: with one name the parameter comes back, with two names it does not")
PYTHON
