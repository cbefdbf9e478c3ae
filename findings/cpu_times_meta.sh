#!/usr/bin/env bash
# A CPU tensor times a weight on the meta device gives memory that nothing has written.
#
# Package:   torch 2.13.0, torch.nn.functional.linear, torch.mm, torch.addmm
# Guess:     it raises, as a sum of the two does and as products with a weight on another device do.
# Behaviour: linear, mm, addmm and matmul of matrices return a CPU tensor of the right shape and dtype without an error
#            or a warning. It is allocated and never written: with PyTorch's option to fill new memory all of it is
#            NaN, without that it holds whatever lay there. bmm of the same tensors returns a meta tensor.
# Seen:      linear: a CPU tensor, 100% of it never written (mm, addmm and matmul likewise)
#            bmm: a meta tensor
#            add: RuntimeError: Tensor on device meta is not on the expected device cpu!
# Matters:   large sparse models are built on meta and filled from a checkpoint. A layer that loading missed (a tensor
#            kept in a list, a second name of a parameter) should stop the first forward pass, but yields plausible or
#            random numbers. Look for is_meta in all parameters, buffers and attributes after loading.
#
# Exits with 0 while this is so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0

"$folder/venv/bin/python" - <<'PYTHON'
import torch
import torch.nn.functional as F

print("guess: every product raises. torch", torch.__version__)
x, bias = torch.ones(4, 8), torch.zeros(8)
weight = torch.nn.Linear(8, 8, device="meta").weight.detach()
products = {
    "linear": lambda: F.linear(x, weight),
    "linear with a bias": lambda: F.linear(x, weight, bias),
    "mm": lambda: torch.mm(x, weight),
    "addmm": lambda: torch.addmm(bias, x, weight),
    "matmul": lambda: x @ weight,
    "bmm": lambda: torch.bmm(x[None], weight[None]),
    "add": lambda: x + weight[:4],
}
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True  # new memory is NaN until something writes to it
seen = {}
for name, product in products.items():
    try:
        result = product()
        if result.is_meta:
            seen[name] = "a meta tensor"
        else:
            assert result.shape == (4, 8) and result.device.type == "cpu"
            seen[name] = f"a CPU tensor, {result.isnan().float().mean():.0%} of it never written"
    except RuntimeError as error:
        seen[name] = f"RuntimeError: {error}"
    print(f"{name}: {seen[name]}")
silent = [name for name, what in seen.items() if what == "a CPU tensor, 100% of it never written"]
assert silent == ["linear", "linear with a bias", "mm", "addmm", "matmul"], f"this has changed: {seen}"
assert seen["bmm"] == "a meta tensor" and seen["add"].startswith("RuntimeError")
print("as stated: products of a CPU tensor and a meta weight return memory that nothing has written")
PYTHON
