"""Compares `refrain replay` with the peer, arctic-inference's suffix cache, on the same
traces. Use tests/peer/run, which sets both up.

    tests/peer/run [TRACE...] [--docs N] [--warm-docs N] [--depths 64,24]
                   [--alpha 1] [--offset 0] [--min-token-prob 0.1]
                   [--max-spec-tokens 32]
                   [--sources request,global] [--seal-tokens N] [--depth-cap] [--tree]
                   [--repeats 2] [--no-sweep]

Both sides get the same calls in the same order, one at a time. Emitted tokens can be
drafted from at once. The sides run in turns (peer, refrain, peer, refrain ...), each in
a process of its own, and the fastest repeat counts. A design that drafts more tokens
also has more of them accepted. Tokens per step are therefore compared at the peer's
drafted tokens per step. Refrain's value there is interpolated on the upper frontier of
its settings: a grid of alpha and offset, min_token_prob, and max_spec_tokens.

The sides differ in these points:

* A call of the peer is timed in Python around speculate(), since that is how it is
  used. The cost of an empty Python method of the same shape is printed beside it, and
  nothing is subtracted. A proposal of refrain is timed in Rust, look-ups included.
* An update of the peer is start_request (a tree of the prompt) and add_active_response
  (that tree and the global one). An update of refrain is insert (namespace), extend
  (the request's own index, with its prompt) and insert into the group, if groups are a
  source. Both are per token of prompt and output together.
* A draft of the peer ends at its depth: match and draft together have at most that many
  tokens. Refrain's drafts have no such limit, unless --depth-cap sets it.
* Bytes are those of the global structure per output token in it. Both sides estimate
  them, and for the peer the growth of resident memory is given as well.

Traces hold token ids only. Files compressed with zstd need the program of that name.
"""

import argparse
import json
import os
import subprocess
import sys

# Pairs of alpha and offset. Below 1 alpha needs an offset, or a match of one token drafts nothing.
SHAPES = [(0.5, 1.0), (0.75, 0.25), (1.0, 0.0), (1.5, 0.0), (2.0, 0.0), (3.0, 0.0)]
MIN_TOKEN_PROBS = [0.05, 0.1, 0.2, 0.3, 0.5]
HERE = os.path.dirname(os.path.abspath(__file__))


def log(text):
    print(text, file=sys.stderr, flush=True)


def run_json(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} exited with status {done.returncode}")
    return json.loads(done.stdout)


def prepare(path, folder, docs, warm_docs):
    """Writes the wanted lines to plain files. Returns the name, the measured file, and the warm file or None."""
    name = os.path.basename(path).removesuffix(".zst").removesuffix(".jsonl").removesuffix(".train")
    measured, warm = (os.path.join(folder, f"{name}.{part}.jsonl") for part in ("calls", "warm"))
    with open(path, "rb") as file:
        is_zstd = file.read(4) == b"\x28\xb5\x2f\xfd"
    if is_zstd:
        reader = subprocess.Popen(["zstd", "-dc", path], stdout=subprocess.PIPE)
        lines = reader.stdout
    else:
        lines = open(path, "rb")
    with lines, open(measured, "wb") as out, open(warm, "wb") as out_warm:
        for number, line in enumerate(lines):
            if docs is not None and number == warm_docs + docs:
                break
            (out if number >= warm_docs else out_warm).write(line)
    if is_zstd:
        # A negative status is the broken pipe of a trace that was cut short, which is no failure.
        if reader.wait() > 0:
            sys.exit(f"{path}: zstd cannot decompress this file")
    return name, measured, warm if warm_docs else None


class Sides:
    """The commands of both sides, for one trace."""

    def __init__(self, args, measured, warm):
        self.args, self.measured, self.warm = args, measured, warm

    def options(self, alpha, offset, min_token_prob, max_spec_tokens):
        return ([f"--alpha={alpha}", f"--offset={offset}", f"--min-token-prob={min_token_prob}",
                 f"--max-spec-tokens={max_spec_tokens}"]
                + ([f"--warm={self.warm}"] if self.warm else []))

    def settings(self):
        args = self.args
        return args.alpha, args.offset, args.min_token_prob, args.max_spec_tokens

    def grid(self, depth):
        # At factor 1 the peer drafts up to half of its depth.
        most = self.args.max_spec_tokens
        return [(*shape, min_token_prob, max_spec_tokens)
                for max_spec_tokens in sorted({min(most, depth // 2), most})
                for shape in SHAPES for min_token_prob in MIN_TOKEN_PROBS]

    def peer(self, depth):
        command = [sys.executable, os.path.join(HERE, "peer.py"), self.measured,
                   f"--depth={depth}", *self.options(*self.settings())]
        return run_json(command + (["--tree"] if self.args.tree else []))

    def refrain(self, depth, *settings):
        return run_json([self.args.refrain, "replay", self.measured, "--json",
                         f"--max-pattern={depth}", f"--sources={self.args.sources}",
                         "--tree" if self.args.tree else "--linear",
                         *([f"--seal-tokens={self.args.seal_tokens}"] if self.args.seal_tokens else []),
                         *([f"--match-plus-draft={depth}"] if self.args.depth_cap else []),
                         *self.options(*(settings or self.settings()))])


def fastest(runs):
    """The figures of one run, with the least of each time over all runs."""
    best = dict(runs[0])
    for key, value in best.items():
        if "us" in key.split("_") and isinstance(value, dict):
            best[key] = {part: min(run[key][part] for run in runs) for part in value}
        elif "us" in key.split("_") and value is not None:
            best[key] = min(run[key] for run in runs)
    return best


def update_us_per_token(report):
    """Refrain's total cost of updates, per token of prompt and output."""
    both = report["prompt_tokens"] + report["output_tokens"]
    extend = (report["extend_us_per_token"] or 0) * both
    insert = (report["insert_us_per_token"] or 0) * report["output_tokens"]
    grouped = (report["group_insert_us_per_token"] or 0) * report["output_tokens"]
    return (extend + insert + grouped) / max(both, 1)


def frontier(points):
    """The (drafted, tokens) per step that no other point beats with fewer drafted."""
    upper = []
    for drafted, tokens in sorted(points, key=lambda point: (point[0], -point[1])):
        if not upper or tokens > upper[-1][1]:
            upper.append((drafted, tokens))
    return upper


def at_drafted(upper, drafted):
    """Tokens per step on the frontier at this many drafted; None before its start.
    After its end nothing is gained by drafting more, so its end counts."""
    if drafted < upper[0][0]:
        return None
    for (x0, y0), (x1, y1) in zip(upper, upper[1:]):
        if drafted <= x1:
            return y0 + (y1 - y0) * (drafted - x0) / (x1 - x0)
    return upper[-1][1]


def compare(sides, depth, name):
    """Runs both sides. Returns one row of the table."""
    runs = {"peer": [], "refrain": []}
    for repeat in range(sides.args.repeats):
        for side in runs:
            log(f"{name}, depth {depth}: {side}, run {repeat + 1} of {sides.args.repeats}")
            runs[side].append(getattr(sides, side)(depth))
    for side in runs:
        counts = {(run["steps"], run["tokens_per_step"], run["drafted_per_step"]) for run in runs[side]}
        assert len(counts) == 1, f"{side} has other counts in each run: {counts}"
    peer, ours = fastest(runs["peer"]), fastest(runs["refrain"])
    assert (peer["docs"], peer["output_tokens"]) == (ours["docs"], ours["output_tokens"])
    row = {"trace": name, "depth": depth, "peer": peer, "refrain": ours}
    if not sides.args.no_sweep:
        points = [(ours["drafted_per_step"], ours["tokens_per_step"])]
        grid = sides.grid(depth)
        log(f"{name}, depth {depth}: {len(grid)} settings of refrain")
        for settings in grid:
            report = sides.refrain(depth, *settings)
            points.append((report["drafted_per_step"], report["tokens_per_step"]))
        row["frontier"] = frontier(points)
        row["tokens_per_step_at_drafted"] = at_drafted(row["frontier"], peer["drafted_per_step"])
    return row


def table(rows):
    """The table as text. For each row a line has the peer's figure, refrain's, and a ratio
    that is above 1 where refrain is better."""
    def line(what, of_peer, of_ours, is_more_better):
        text = f"{what:<34}"
        for row in rows:
            peer, ours = of_peer(row), of_ours(row)
            if peer is None or ours is None:
                text += f"{'-' if peer is None else format(peer, '.3f'):>11}" \
                        f"{'-' if ours is None else format(ours, '.3f'):>9}{'-':>9}"
                continue
            better = (ours / peer if is_more_better else peer / ours) if peer and ours else 0
            text += f"{peer:>11.3f}{ours:>9.3f}{better:>8.2f}x"
        return text

    def same(key, is_more_better=False, what=None):
        return line(what or key, lambda row: row["peer"][key], lambda row: row["refrain"][key],
                    is_more_better)

    def propose(part):
        return line(f"propose, us: {part}", lambda row: row["peer"]["propose_us"][part],
                    lambda row: row["refrain"]["propose_us"][part], False)

    def title(row):
        return f"{row['trace'][:23]}, {row['depth']}".rjust(29)

    lines = [
        f"{'trace, depth':<34}" + "".join(title(row) for row in rows),
        f"{'':<34}" + f"{'peer':>11}{'refrain':>9}{'better':>9}" * len(rows),
        same("tokens_per_step", True),
        same("drafted_per_step"),
        line("tokens_per_step at peer's drafted", lambda row: row["peer"]["tokens_per_step"],
             lambda row: row.get("tokens_per_step_at_drafted"), True),
        propose("mean"), propose("p50"), propose("p99"),
        line("  an empty call in Python: p50", lambda row: row["peer"]["empty_call_us"]["p50"],
             lambda row: None, False),
        line("update, us per token", lambda row: row["peer"]["update_us_per_token"],
             lambda row: update_us_per_token(row["refrain"]), False),
        line("  start, us per prompt token", lambda row: row["peer"]["start_us_per_token"],
             lambda row: None, False),
        line("  append, us per output token", lambda row: row["peer"]["append_us_per_token"],
             lambda row: None, False),
        line("  insert, us per output token", lambda row: None,
             lambda row: row["refrain"]["insert_us_per_token"], False),
        line("  extend, us per token", lambda row: None,
             lambda row: row["refrain"]["extend_us_per_token"], False),
        same("index_bytes_per_token", what="index, bytes per token (estimate)"),
        line("  resident, bytes per token", lambda row: row["peer"]["resident_bytes_per_token"],
             lambda row: None, False),
    ]
    return "\n".join(lines)


def prepared(args):
    """Yields the name, the measured part and the warm part of each trace; of a generated one if none is given."""
    folder = os.path.join(args.work, "traces")
    os.makedirs(folder, exist_ok=True)
    traces = args.traces
    if not traces:
        traces = [os.path.join(folder, "generated.jsonl")]
        subprocess.run([sys.executable, os.path.join(HERE, "make_trace.py"), traces[0]], check=True)
    for path in traces:
        yield prepare(path, folder, args.docs, args.warm_docs)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    parser.add_argument("--docs", type=int, help="measure at most so many calls")
    parser.add_argument("--warm-docs", type=int, default=0,
                        help="calls at the start that are indexed before the measurement")
    parser.add_argument("--depths", default="64,24", help="depths of the peer, which are refrain's longest patterns")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--offset", type=float, default=0.0)
    parser.add_argument("--min-token-prob", type=float, default=0.1)
    parser.add_argument("--max-spec-tokens", type=int, default=32)
    parser.add_argument("--sources", default="request,global",
                        help="refrain's sources; the peer always has request and global")
    parser.add_argument("--seal-tokens", type=int,
                        help="size at which refrain seals its live part [default: never]")
    parser.add_argument("--depth-cap", action="store_true",
                        help="limit refrain's drafts by the peer's depth")
    parser.add_argument("--tree", action="store_true", help="drafts of both sides are trees instead of chains")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--refrain", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--work", required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    results = []
    for name, measured, warm in prepared(args):
        sides = Sides(args, measured, warm)
        rows = [compare(sides, int(depth), name) for depth in args.depths.split(",")]
        print(table(rows), end="\n\n", flush=True)
        results += rows
    with open(os.path.join(args.work, "results.json"), "w") as out:
        json.dump(results, out, indent=1)
    log(f"all figures: {out.name}")


if __name__ == "__main__":
    main()
