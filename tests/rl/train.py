"""Trains the shipped model with rollouts through a mesh, and measures what drafts from earlier epochs bring.

The arm `training` trains. The other arms make the same rollouts again with the weights that it wrote: their outputs
must be the same tokens, since drafts change no output and the seeds are the same. Their times can be compared, because
nothing trains between their epochs.
"""

import argparse
import hashlib
import shutil
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checks import Checks, update  # noqa: E402
from grpo import LOGPROB_ERROR_MAX, Policy, load_state, report  # noqa: E402
from mesh import DRAFTS, MODEL_FOLDER, NO_DRAFTS, Mesh  # noqa: E402
from task import questions  # noqa: E402

GROUP = 8
TOKENS_MAX = 160
ARMS = {"training": DRAFTS, "off": NO_DRAFTS, "group": DRAFTS, "history": DRAFTS}
TIMED = ("off", "group", "history")


@dataclass
class Rollout:
    prompt: list
    tokens: list
    logprobs: list
    reward: float
    steps: int
    versions: list
    seconds: float


def sample(mesh, question, epoch, number, index):
    """One answer, asked for as slime asks."""
    seed = int.from_bytes(hashlib.sha256(f"{epoch}/{number}/{index}".encode()).digest()[:4], "big") >> 1
    began = time.monotonic()
    answer = mesh.generate({
        "input_ids": question.prompt,
        "sampling_params": {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": TOKENS_MAX, "stop": None,
            "stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True,
            "spaces_between_special_tokens": False, "sampling_seed": seed,
        },
        "return_logprob": True,
    })
    meta = answer["meta_info"]
    return Rollout(
        prompt=question.prompt,
        tokens=[entry[1] for entry in meta["output_token_logprobs"]],
        logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
        reward=question.reward(answer["text"]),
        steps=meta["spec_verify_ct"],
        versions=meta["weight_versions"],
        seconds=time.monotonic() - began,
    )


def roll_out(mesh, asked, epoch):
    """All groups of an epoch, sent at once. Returns the groups and the seconds until the last answer."""
    began = time.monotonic()
    jobs = [
        [mesh.pool.submit(sample, mesh, question, epoch, number, index) for index in range(GROUP)]
        for number, question in enumerate(asked)
    ]
    groups = [[job.result() for job in group] for group in jobs]
    return groups, time.monotonic() - began


def spans(one):
    return [(span["start"], span["end"], span["version"]) for span in one.versions]


def per_step(rollouts):
    return sum(len(one.tokens) for one in rollouts) / max(sum(one.steps for one in rollouts), 1)


def fingerprint(groups):
    return hashlib.sha256(repr([[one.tokens for one in group] for group in groups]).encode()).hexdigest()[:16]


def difference(before, after):
    """Counts since `before`, by the text that drafts came from."""
    of = lambda sums, name, kind: sums.get(name, {}).get(kind, 0.0)  # noqa: E731
    kinds = ("drafted_tokens", "accepted_tokens")
    return {name: {kind: of(after, name, kind) - of(before, name, kind) for kind in kinds} for name in after}


def run_arm(name, options, asked, policy, folders, expected, checks):
    """All epochs of one arm. `policy` is given to the arm that trains."""
    mesh = Mesh(options.refrain, options.run, name, MODEL_FOLDER, ARMS[name])
    rows = []
    for epoch in range(options.epochs):
        if epoch > 0:
            if policy:
                folders.append(policy.save(options.run / f"weights-{epoch}"))
            load_s = update(mesh, folders[epoch], epoch, checks)
            if name == "group":
                # Samples of an epoch draft from each other, and from nothing before it.
                mesh.forget()
        else:
            load_s = 0.0
        before = mesh.counts()
        groups, seconds = roll_out(mesh, asked, epoch)
        rollouts = [one for group in groups for one in group]
        row = {
            "epoch": epoch,
            "seconds": seconds,
            "load_s": load_s,
            "per_step": per_step(rollouts),
            "tokens": sum(len(one.tokens) for one in rollouts),
            "reward": statistics.mean(one.reward for one in rollouts),
            "right": statistics.mean(one.reward == 1.0 for one in rollouts),
            "sources": difference(before, mesh.counts()),
            "outputs": fingerprint(groups),
        }
        for one in rollouts:
            whole = [(0, len(one.tokens), epoch)] if one.tokens else []
            checks.hold(spans(one) == whole, f"{name}, epoch {epoch}: versions {spans(one)} instead of {whole}")
        if policy:
            row["logprob_error"] = policy.check(rollouts)
            error = row["logprob_error"]
            checks.hold(error < LOGPROB_ERROR_MAX, f"epoch {epoch}: log-probabilities differ by {error:.2e}")
            expected.append(row["outputs"])
            row["loss"] = policy.improve(groups)
        else:
            checks.hold(row["outputs"] == expected[epoch], f"{name}, epoch {epoch}: the outputs differ from training's")
        rows.append(row)
        print_row(name, row)
    return mesh, rows


def print_row(name, row):
    sources = ", ".join(
        f"{source} {counts['accepted_tokens']:.0f}/{counts['drafted_tokens']:.0f}"
        for source, counts in sorted(row["sources"].items())
        if counts["drafted_tokens"]
    )
    print(
        f"{name:<8} epoch {row['epoch']}  {row['seconds']:6.1f} s  {row['per_step']:.2f} tokens/step  "
        f"reward {row['reward']:.3f}  right {row['right']:.1%}  {row['tokens']} tokens  accepted/drafted: {sources or '-'}",
        flush=True,
    )


def check_swap_in_flight(mesh, asked, policy, folders, checks):
    """Weights change while rollouts run. Each token must have the log-probability of the weights that sampled it."""
    version = len(folders)
    old = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    folder = folders[0]
    result = {}

    def all_rollouts():
        result["groups"], _ = roll_out(mesh, asked, "in flight")

    thread = threading.Thread(target=all_rollouts)
    thread.start()
    time.sleep(1.0)
    mesh.post("/pause?mode=keep&clear_cache=false", {})
    mesh.post("/update_weights_from_disk", {"model_path": folder, "weight_version": str(version)})
    mesh.post("/resume", {})
    thread.join()
    rollouts = [one for group in result["groups"] for one in group]
    mixed = [one for one in rollouts if len(one.versions) > 1]
    checks.hold(len(mixed) > 0, "some rollouts have tokens of two versions")
    worst = 0.0
    for state, wanted in ((folders[-1], version - 1), (folder, version)):
        policy.model.load_state_dict(load_state(state))
        worst = max(worst, span_error(policy, rollouts, wanted))
    checks.hold(worst < LOGPROB_ERROR_MAX, f"weights changed in flight: log-probabilities differ by {worst:.2e}")
    policy.model.load_state_dict(old)
    print(
        f"weights changed in flight: {len(mixed)} of {len(rollouts)} rollouts have two versions, largest difference "
        f"of log-probabilities {worst:.1e}",
        flush=True,
    )


def span_error(policy, rollouts, version):
    """The largest difference over all tokens that this version sampled. The policy has its weights."""
    import torch

    worst = 0.0
    with torch.no_grad():
        for one in rollouts:
            if not any(of == version for _, _, of in spans(one)):
                continue
            own = policy.logprobs([(one.prompt, one.tokens)])[0]
            for start, end, of in spans(one):
                if of == version and end > start:
                    given = torch.tensor(one.logprobs[start:end])
                    worst = max(worst, (given - own[start:end]).abs().max().item())
    return worst


def summary(rows_by_arm):
    """Seconds of the epochs after the first, in which all arms have something to remember."""
    later = {arm: rows[1:] for arm, rows in rows_by_arm.items()}
    off = sum(row["seconds"] for row in later["off"])
    print("\narm       rollout seconds   speedup   tokens per step, by epoch")
    for arm in TIMED:
        seconds = sum(row["seconds"] for row in later[arm])
        steps = "  ".join(f"{row['per_step']:.2f}" for row in rows_by_arm[arm])
        print(f"{arm:<9} {seconds:>12.1f} s   {off / seconds:>6.2f}x   {steps}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refrain", required=True)
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    options.run = options.work / "run"
    shutil.rmtree(options.run, ignore_errors=True)
    options.run.mkdir(parents=True)

    policy = Policy(str(MODEL_FOLDER), options.rate, options.seed)
    asked = questions(options.prompts, policy.tokenizer, options.seed)
    checks, folders, expected, rows = Checks(), [str(MODEL_FOLDER)], [], {}
    print(f"{len(asked)} prompts, groups of {GROUP}, {options.epochs} epochs, {options.epochs - 1} changes of weights")
    mesh, rows["training"] = run_arm("training", options, asked, policy, folders, expected, checks)
    check_swap_in_flight(mesh, asked, policy, folders, checks)
    mesh.stop()
    for arm in TIMED:
        mesh, rows[arm] = run_arm(arm, options, asked, None, folders, expected, checks)
        mesh.stop()
    summary(rows)
    trained = rows["training"]
    worst = max(row["logprob_error"] for row in trained)
    print(f"\nlargest difference of log-probabilities: {worst:.1e}; reward {trained[0]['reward']:.3f} -> "
          f"{trained[-1]['reward']:.3f}")
    report(options.run / "report.json", rows)
    if checks.failed:
        raise SystemExit(f"{len(checks.failed)} checks failed")
    print("all checks hold")


if __name__ == "__main__":
    main()
