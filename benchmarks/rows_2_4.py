"""two_four.py OUT: bf16 and f16 2:4, each row, 8192 tokens."""
import json, sys
import torch
sys.path.insert(0, "benchmarks")
from harness import CudaTimer, warm_up
from problems import Case, Shape, make_pattern
from tilesparse import _C, functional, storage
from tilesparse._runtime.kernels import use_kernel

@torch.no_grad()
def main():
    timer, found = CudaTimer(), []
    warm_up()
    rows = [k.name for k in _C.kernels() if k.name.startswith("sm90_dds_2_4_bf16")]
    for name, block, density in [(s, b, d) for s in ("up", "down", "square") for b in (128, 64) for d in (.5, .25)]:
        n, k = {"up": (14336, 4096), "down": (4096, 14336), "square": (4096, 4096)}[name]
        case = Case("dds_nt", "bf16", Shape(name, 8192, n, k), (block, block), density, "random", "row")
        pattern = make_pattern(case, torch.Generator().manual_seed(1))
        g = torch.Generator("cuda").manual_seed(1)
        x = torch.randn(8192, k, generator=g, dtype=torch.bfloat16, device="cuda")
        blocks = torch.randn(pattern.nnz, block, block, generator=g, dtype=torch.bfloat16, device="cuda")
        pairs = blocks.view(-1, 2)
        first = pairs[:, 0].abs() >= pairs[:, 1].abs()
        mask = torch.stack((first, ~first), 1).view_as(blocks)
        values, meta = storage.compress(blocks * mask, mask)
        base = functional.linear(x, blocks * mask, pattern).float()
        record = {"shape": name, "block": block, "density": density, "us": {}, "error": {}}
        for r in rows:
            with use_kernel(r):
                run = lambda: functional.linear(x, values, pattern, metadata=meta)
                y = run()
                record["error"][r] = float((y.float() - base).norm() / base.norm())
                record["us"][r] = round(min(timer.microseconds(run, 12), timer.microseconds(run, 12)), 2)
        found.append(record)
        print(name, block, density, record["us"], max(record["error"].values()), flush=True)
    json.dump({"gpu": torch.cuda.get_device_name(), "cases": found}, open(sys.argv[1], "w"), indent=0)
main()
