"""Trains the shipped model with rollouts of agents, whose sessions at the trainers' listener are the trajectories."""

import argparse
import collections
import logging
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from agent_kinds import AGENTS  # noqa: E402
from agent_task import Conversation, tasks  # noqa: E402
from checks import Checks, update  # noqa: E402
from grpo import load_state, report  # noqa: E402
from mesh import DRAFTS, MODEL_FOLDER, Mesh, call  # noqa: E402
from sessions import (  # noqa: E402
    SessionPolicy, SessionRollout, check_session, delete_session, make_session, read_session,
)

# bfloat16 weights, products in another order. The rollouts of `train.py` differ by as much.
LOGPROB_ERROR_MAX = 3e-5


def roll_out(mesh, agent, asked, place, version, checks):
    """One rollout in a session of its own, which is read and deleted."""
    # Agents may name their sessions, and trainers may make them.
    session = place.replace("/", ":") if agent == "mini-swe-agent" else make_session(mesh.url)
    conversation = Conversation(asked)
    episode = AGENTS[agent](f"{mesh.url}/sessions/{session}/v1", conversation)
    trajectories = read_session(mesh.url, session, checks)
    delete_session(mesh.url, session, checks)
    rollout = SessionRollout(place, episode, conversation.reward(), trajectories)
    check_session(rollout, version, checks)
    return rollout


def roll_out_all(mesh, options, asked, epoch, version, checks):
    """All groups of an epoch, sent at once: each task for each agent."""
    jobs = [
        [
            mesh.pool.submit(roll_out, mesh, agent, task, f"{agent}/{epoch}/{number}/{index}", version, checks)
            for index in range(options.group)
        ]
        for agent in AGENTS
        for number, task in enumerate(asked)
    ]
    return [[job.result() for job in group] for group in jobs]


def flat(groups):
    return [one for group in groups for one in group]


def train(mesh, options, asked, policy, checks):
    """All epochs. Returns a row of figures for each, and the folders of the weights."""
    rows, folders = [], [str(MODEL_FOLDER)]
    for epoch in range(options.epochs):
        if epoch > 0:
            folders.append(policy.save(options.run / f"weights-{epoch}"))
            update(mesh, folders[epoch], epoch, checks)
        began = time.monotonic()
        groups = roll_out_all(mesh, options, asked, epoch, epoch, checks)
        seconds = time.monotonic() - began
        error = policy.check(flat(groups))
        checks.hold(error < LOGPROB_ERROR_MAX, f"epoch {epoch}: log-probabilities differ by {error:.2e}")
        rows.append({**figures(groups), "epoch": epoch, "seconds": seconds, "logprob_error": error})
        for _ in range(options.passes):
            policy.improve(groups)
        print_row(rows[-1])
    return rows, folders


def figures(groups):
    rollouts = flat(groups)
    trajectories = [one for rollout in rollouts for one in rollout.trajectories]
    later = [turn for one in trajectories for turn in one["turns"] if turn["start"] > 0]
    by_agent = {agent: [one.reward for one in rollouts if one.name.startswith(agent)] for agent in AGENTS}
    return {
        "reward": statistics.mean(one.reward for one in rollouts),
        "reward_by_agent": {agent: statistics.mean(rewards) for agent, rewards in by_agent.items()},
        "right": statistics.mean(one.reward == 1.0 for one in rollouts),
        "rollouts": len(rollouts),
        "trajectories": len(trajectories),
        "turns": sum(len(one.episode.turns) for one in rollouts),
        "tokens": sum(len(one["token_ids"]) - one["shared_tokens"] for one in trajectories),
        "sampled": sum(sum(one["loss_mask"][one["shared_tokens"] :]) for one in trajectories),
        "cached": sum(turn["cached_tokens"] for turn in later) / max(sum(turn["output_start"] for turn in later), 1),
        "known": sum(turn["start"] for turn in later) / max(sum(turn["output_start"] for turn in later), 1),
        "ends": dict(collections.Counter(one.episode.end for one in rollouts)),
        "not_ordinary": sum(not one.episode.is_ordinary for one in rollouts),
    }


def print_row(row):
    agents = ", ".join(f"{agent} {reward:.3f}" for agent, reward in row["reward_by_agent"].items())
    print(
        f"epoch {row['epoch']}  {row['seconds']:6.1f} s  reward {row['reward']:.3f} ({agents})  "
        f"right {row['right']:.1%}  {row['rollouts']} rollouts  {row['turns']} turns  "
        f"{row['trajectories']} trajectories  {row['sampled']} of {row['tokens']} tokens sampled  "
        f"{row['cached']:.1%} of later prompts cached ({row['known']:.1%} known)  "
        f"log-probabilities within {row['logprob_error']:.1e}  ends {row['ends']}",
        flush=True,
    )


def check_swap_in_flight(mesh, options, asked, policy, folders, seconds, checks):
    """Weights change while agents are at work. Each token must have the log-probability of those that sampled it.

    They change after `seconds`, which is half of the time that an epoch takes.
    """
    version, groups = len(folders), []
    old = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    thread = threading.Thread(
        target=lambda: groups.extend(roll_out_all(mesh, options, asked, "in-flight", None, checks))
    )
    thread.start()
    time.sleep(seconds)
    mesh.post("/pause?mode=keep&clear_cache=false", {})
    mesh.post("/update_weights_from_disk", {"model_path": folders[0], "weight_version": str(version)})
    mesh.post("/resume", {})
    thread.join()
    rollouts = flat(groups)
    checks.hold(len(rollouts) == len(AGENTS) * len(asked) * options.group, "all rollouts under changing weights end")
    trajectories = [one for rollout in rollouts for one in rollout.trajectories]
    mixed = [one for one in trajectories if len({span["version"] for span in one["weight_versions"]}) > 1]
    checks.hold(len(mixed) > 0, "some trajectories have tokens of two versions")
    worst = 0.0
    for folder, wanted in ((folders[-1], version - 1), (folders[0], version)):
        policy.model.load_state_dict(load_state(folder))
        worst = max(worst, version_error(policy, rollouts, wanted))
    checks.hold(worst < LOGPROB_ERROR_MAX, f"weights changed in flight: log-probabilities differ by {worst:.2e}")
    policy.model.load_state_dict(old)
    print(
        f"weights changed in flight: {len(mixed)} of {len(trajectories)} trajectories have two versions, largest "
        f"difference of log-probabilities {worst:.1e}",
        flush=True,
    )


def version_error(policy, rollouts, version):
    """The largest difference over the tokens that a version sampled. The policy has its weights."""
    kept = []
    for rollout in rollouts:
        for trajectory, sample in zip(rollout.trajectories, policy.samples(rollout)):
            spans = [range(span["start"], span["end"]) for span in trajectory["weight_versions"]
                     if span["version"] == version]
            pairs = [pair for pair in zip(sample.places, sample.logprobs) if any(pair[0] in span for span in spans)]
            if pairs:
                sample.places, sample.logprobs = map(list, zip(*pairs))
                kept.append(sample)
    return policy.check_samples(kept)


def check_answers(mesh, checks):
    """What is left after all sessions were deleted."""
    status, answer = call(f"{mesh.url}/sessions")
    checks.hold(status == 200 and answer["sessions"] == [], f"no session is left: {answer}")
    status, _ = call(f"{mesh.url}/sessions/never-made/trajectories")
    checks.hold(status == 404, f"a session that was never made answers 404 instead of {status}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refrain", required=True)
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--passes", type=int, default=1, help="passes over the rollouts of an epoch")
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    options.run = options.work / "agents"
    shutil.rmtree(options.run, ignore_errors=True)
    options.run.mkdir(parents=True)
    logging.getLogger("LiteLLM").setLevel(logging.ERROR)

    policy = SessionPolicy(str(MODEL_FOLDER), options.rate, options.seed)
    asked, checks = tasks(options.tasks, options.seed), Checks()
    print(f"{len(asked)} tasks for {len(AGENTS)} agents, groups of {options.group}, {options.epochs} epochs")
    mesh = Mesh(options.refrain, options.run, "mesh", MODEL_FOLDER, DRAFTS)
    rows, folders = train(mesh, options, asked, policy, checks)
    check_swap_in_flight(mesh, options, asked, policy, folders, rows[-1]["seconds"] / 2, checks)
    check_answers(mesh, checks)
    mesh.stop()
    worst = max(row["logprob_error"] for row in rows)
    print(f"\nlargest difference of log-probabilities: {worst:.1e}; reward {rows[0]['reward']:.3f} -> "
          f"{rows[-1]['reward']:.3f}")
    report(options.run / "report.json", rows)
    if checks.failed:
        raise SystemExit(f"{len(checks.failed)} checks failed")
    print("all checks hold")


if __name__ == "__main__":
    main()
