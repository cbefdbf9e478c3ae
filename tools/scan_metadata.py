import re, sys
for path in sys.argv[1:]:
    fn = None; bad = {}; n = 0; longest = 0; nwait = 0
    open_, groups = set(), []
    for line in open(path):
        if "Function" in line: fn = line.split(":")[1].strip()[:60]; open_, groups = set(), []; continue
        ins = re.sub(r"^@!?U?P\w+ ", "", line.strip())
        op = ins.split(" ")[0]
        if "GMMA.SP" in op:
            n += 1
            regs = re.findall(r"\bR(\d+)\b", ins)
            open_.add(int(regs[-1]))
            if "gsb0" in ins: groups.append(open_); open_ = set()
            continue
        if op.startswith("WARPGROUP.DEPBAR"):
            keep = int(re.search(r"gsb0, 0x(\w+)", ins)[1], 16); groups = groups[len(groups)-keep:] if keep else []
            longest = max(longest, len(groups)); nwait += 1
            continue
        live = set().union(open_, *groups)
        if not live: continue
        m = re.match(r"\S+ (?:U?P\w+, )*R(\d+)\b", ins)
        if m and not re.match(r"(ST|STS|RED|SYNCS|BAR|UTMA|ISETP|FSETP|ATOM|STG)", op):
            w = 4 if ".128" in op else 2 if ".64" in op or "WIDE" in op else 1
            hit = live & set(range(int(m[1]), int(m[1]) + w))
            if hit: bad.setdefault(fn, []).append(ins[:60])
    print(path.split("/")[-1], "sparse products", n, "waits", nwait, "writes to metadata in flight:", sum(map(len, bad.values())))
    for f, b in list(bad.items())[:3]: print("   ", f, len(b), b[:3])
