"""Compares the goodput of Refrain's router with that of the peer, arctic-inference's suffix
cache, at the peer's best setting. Use tests/peer/run, which sets both up.

    tests/peer/run goodput [TRACE...] [--docs N] [--warm-docs N] [--concurrency 1,16,64]
                   [--factors 1,2,4] [--peer-depths 24,64] [--engine-model h100-8b]
                   [--option=--alpha=2 ...]

Both sides replay the same calls, so many at once, on the same modelled engine. Drafts come
from text alone: there is no head. The goodput of a side is its output tokens over the time
of all steps, which is that of the modelled engine and that of proposals on this machine.
The drafts of a step are made one after the other on both sides. For each number of calls
the peer's best setting counts: every factor (max_spec_factor) at every depth, at its
default min_token_prob. Refrain runs as it is shipped, unless --option changes it.

Each side runs in a process of its own, and nothing else runs meanwhile. Counts do not
depend on the machine; only the times of proposals do.
"""

import argparse
import json
import math
import os
import sys
import tomllib

from compare import HERE, log, prepared, run_json

PRESETS = os.path.join(HERE, "../../services/lab/src/replay/engine_model/presets.toml")


def engine_file(name, folder):
    """Writes the engine model of this name, or of this file, as JSON. Returns its path."""
    with open(name if os.path.exists(name) else PRESETS, "rb") as file:
        model = tomllib.load(file)
    if "preset" in model:
        named = [preset for preset in model["preset"] if preset["name"] == name]
        if not named:
            sys.exit(f"--engine-model {name}: neither a preset nor a file")
        model = {key: value for key, value in named[0].items() if key != "name"}
    path = os.path.join(folder, "engine.json")
    with open(path, "w") as file:
        json.dump(model, file)
    return path


def peer(args, measured, warm, concurrency, depth, factor, engine):
    """A row of the peer at one setting."""
    report = run_json([
        sys.executable, os.path.join(HERE, "peer.py"), measured, f"--depth={depth}",
        f"--max-spec-tokens={depth}", f"--alpha={factor}", f"--concurrency={concurrency}",
        f"--engine-model={engine}", *([f"--warm={warm}"] if warm else [])])
    return {
        "setting": f"{factor:g}, {depth}", "output_tokens": report["output_tokens"],
        "tokens_per_step": report["tokens_per_step"],
        "drafted_per_step": report["drafted_per_step"],
        "propose_us": report["propose_us"]["mean"],
        "tokens_per_s": report["output_tokens"] / (report["engine_s"] + report["propose_s"]),
    }


def refrain(args, measured, warm):
    """A row of the router for each number of calls, with the goodput of plain decoding."""
    report = run_json([
        args.refrain, "replay", measured, "--json", "--policies=off,goodput", "--eagle3=off",
        f"--engine-model={args.engine_model}", f"--concurrency={args.concurrency}",
        *([f"--warm={warm}"] if warm else []), *args.option])
    plain = {row["concurrency"]: row["goodput_tokens_per_s"]
             for row in report["policies"] if row["policy"] == "off"}
    rows = {}
    for row in report["policies"]:
        if row["policy"] != "goodput":
            continue
        propose_s_per_token = row["propose_us_per_step"] / 1e6 / row["tokens_per_step"]
        rows[row["concurrency"]] = {
            "output_tokens": report["output_tokens"],
            "tokens_per_step": row["tokens_per_step"],
            "drafted_per_step": row["drafted_per_step"],
            "propose_us": row["propose_us_per_step"],
            "tokens_per_s": 1 / (1 / row["goodput_tokens_per_s"] + propose_s_per_token),
            "plain_tokens_per_s": plain[row["concurrency"]],
        }
    return rows


def compare(args, name, measured, warm, engine):
    """Prints the rows of one trace. Returns them."""
    log(f"{name}: refrain")
    ours = refrain(args, measured, warm)
    results = []
    for concurrency, own in ours.items():
        settings = []
        for depth in args.peer_depths.split(","):
            for factor in args.factors.split(","):
                log(f"{name}, {concurrency} at once: peer, factor {factor}, depth {depth}")
                settings.append(peer(args, measured, warm, concurrency, int(depth), float(factor), engine))
        best = max(settings, key=lambda row: row["tokens_per_s"])
        assert best["output_tokens"] == own["output_tokens"]
        ratio = own["tokens_per_s"] / best["tokens_per_s"]
        results.append({"trace": name, "concurrency": concurrency, "ratio": ratio,
                        "refrain": own, "peer": settings})
        sides = "".join(
            f"{side['tokens_per_s'] / own['plain_tokens_per_s']:>8.3f}{side['tokens_per_step']:>7.2f}"
            f"{side['drafted_per_step']:>7.2f}{side['propose_us']:>7.1f}" for side in (best, own))
        print(f"{name[:28]:<28}{concurrency:>5}  {best['setting']:>8}{sides}{ratio:>8.3f}", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    parser.add_argument("--docs", type=int, help="measure at most so many calls")
    parser.add_argument("--warm-docs", type=int, default=0,
                        help="calls at the start that are indexed before the measurement")
    parser.add_argument("--concurrency", default="1,16,64", help="calls at once")
    parser.add_argument("--factors", default="1,2,4", help="factors of the peer")
    parser.add_argument("--peer-depths", default="24,64", help="depths of the peer")
    parser.add_argument("--engine-model", default="h100-8b", help="a preset or a file")
    parser.add_argument("--option", action="append", default=[],
                        help="an option of refrain replay, such as --option=--alpha=2")
    parser.add_argument("--refrain", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--work", required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    engine = engine_file(args.engine_model, args.work)
    print(f"{'':<43}{'peer':>29}{'refrain':>29}")
    columns = f"{'speed':>8}{'tokens':>7}{'draft':>7}{'us':>7}"
    print(f"{'trace':<28}{'calls':>5}{'best':>10}{columns}{columns}{'ratio':>8}", flush=True)
    results = []
    for name, measured, warm in prepared(args):
        results += compare(args, name, measured, warm, engine)
    for concurrency in sorted({row["concurrency"] for row in results}):
        ratios = [row["ratio"] for row in results if row["concurrency"] == concurrency]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{concurrency} at once: geometric mean {mean:.3f}, least {min(ratios):.3f}, "
              f"of {len(ratios)} traces")
    with open(os.path.join(args.work, "goodput.json"), "w") as out:
        json.dump(results, out, indent=1)
    log(f"all figures: {out.name}")


if __name__ == "__main__":
    main()
