"""rows.py OUT SECONDS: times 2:4 in 8 bits and narrow blocks in 8 bits, row by row."""
import json, sys, time
from collections import defaultdict
import torch
sys.path.insert(0, "benchmarks")
from harness import CudaTimer, warm_up
from problems import Case, Shape, make_pattern
from tilesparse import _C, functional, storage
from tilesparse._runtime.kernels import use_kernel
from tilesparse._runtime.lookup import prepared
from tilesparse._runtime import values as V
from tilesparse._runtime.scaled import dds_quantized

out, seconds = sys.argv[1], float(sys.argv[2])
start = time.monotonic()
DTYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
NAMES = [k.name for k in _C.kernels()]
found = []

def save():
    json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": found}, open(out, "w"), indent=0)

def call(x, values, pattern, scales, q, metadata=None, fast=True):
    return dds_quantized(x, values, prepared(pattern.index_on(x.device)), None, None, 0, False, scales, None, metadata, *q, fast)

def rows(prefix, f="bf16"):
    return [n for n in NAMES if n.startswith(prefix) and f in n]

@torch.no_grad()
def main():
    timer = CudaTimer()
    warm_up()
    order = [(t, d, s, b) for t in (8192, 2048, 512) for b in (128, 64, 32) for d in (.5, .25, .1) for s in ("up", "down")]
    dense_us = {}
    for tokens, density, name, block in order:
        if time.monotonic() - start > seconds:
            print("out of time"); break
        n, k = (14336, 4096) if name == "up" else (4096, 14336)
        case = Case("dds_nt", "int8", Shape(name, tokens, n, k), (block, block), density, "random", "row")
        pattern = make_pattern(case, torch.Generator().manual_seed(1))
        g = torch.Generator("cuda").manual_seed(1)
        x = torch.randn(tokens, k, generator=g, dtype=torch.bfloat16, device="cuda")
        blocks = torch.randn(pattern.nnz, block, block, generator=g, dtype=torch.bfloat16, device="cuda")
        record = {"tokens": tokens, "density": density, "shape": name, "block": block, "us": {}, "error": {}}
        reps = 10 if tokens == 8192 else 14
        if (tokens, name) not in dense_us:
            w = torch.randn(n, k, generator=g, dtype=torch.bfloat16, device="cuda")
            qx, sx = functional.quantize(x, torch.float8_e4m3fn); qw, sw = functional.quantize(w, torch.float8_e4m3fn)
            dense = lambda: torch._scaled_mm(qx, qw.t(), sx[:, None], sw[None], out_dtype=torch.bfloat16, use_fast_accum=True)
            dense_us[tokens, name] = timer.microseconds(dense, reps)
            del w, qw
        record["us"]["scaled_mm"] = dense_us[tokens, name]
        if block == 32:
            bf = lambda: functional.linear(x, blocks, pattern)
            bf(); record["us"]["bf16 auto"] = timer.microseconds(bf, reps)
        for dname, dtype in DTYPES.items():
            q = functional.quantize(x, dtype)
            mask = None
            if block > 32:
                pairs = blocks.view(-1, 2)
                first = pairs[:, 0].abs() >= pairs[:, 1].abs()
                mask = torch.stack((first, ~first), 1).view_as(blocks)
            b = blocks if mask is None else blocks * mask
            values, scales = storage.quantize(b, dtype, per="feature", pattern=pattern)
            contenders = {f"{dname} auto": (values, None, None)}
            for r in rows(f"sm90_dds_nt_{dname}_"):
                if "scaled" not in r and "promoted" not in r: contenders[r] = (values, None, r)
            if block == 32:
                for r in rows(f"sm90_narrow_{dname}_"): contenders[r] = (values, None, r)
                if dname == "int8": contenders["sm80_dds_nt_i8_128x128"] = (values, None, "sm80_dds_nt_i8_128x128")
            if mask is not None:
                cv, meta = storage.compress(values, mask)
                contenders[f"{dname} 2:4 auto"] = (cv, meta, None)
                for r in rows(f"sm90_dds_2_4_{dname}_"): contenders[r] = (cv, meta, r)
            base = None
            for label, (v, m, r) in contenders.items():
                fast = "promoted" not in label
                try:
                    run = lambda: call(x, v, pattern, scales, q, m, fast)
                    if r is not None:
                        with use_kernel(r):
                            y = run(); us = timer.microseconds(run, reps)
                    else:
                        y = run(); us = timer.microseconds(run, reps)
                    if base is None: base = y.float()
                    record["error"][label] = float((y.float() - base).norm() / base.norm())
                    record["us"][label] = round(us, 2)
                except Exception as e:
                    record["us"][label] = None; record["error"][label] = str(e)[:160]
            if mask is not None:
                ex = lambda: V.decompressed(cv, meta)
                ex(); record["us"][f"{dname} decompressing"] = round(timer.microseconds(ex, reps), 2)
        found.append(record); save()
        u = record["us"]
        print(tokens, density, name, block, {k.replace("sm90_", ""): v and round(v) for k, v in u.items()}, flush=True)
        bad = {k: v for k, v in record["error"].items() if not isinstance(v, float) or not v < 5e-3}
        if bad: print("   BAD", bad, flush=True)
        torch.cuda.synchronize()
main()
