"""Runs prime-rl's own clients against a mesh of two reference engines. `run_prime_rl` starts it.

The orchestrator of prime-rl has a client for orders, and gives its environments a client of verifiers, which renders
chats to tokens and asks for tokens. Both are run here as they are, without the orchestrator and its environments.
"""

import argparse
import asyncio
import logging
import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import stubs  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--prime-rl", required=True, type=Path)
parser.add_argument("--refrain", required=True)
parser.add_argument("--work", required=True, type=Path)
options = parser.parse_args()
sys.path.insert(0, str(options.prime_rl / "src"))
made = stubs.for_prime_rl()

import torch  # noqa: E402
from grpo import LOGPROB_ERROR_MAX, Policy, load_state  # noqa: E402
from logprobs import Weights  # noqa: E402
from mesh import DRAFTS, MODEL, MODEL_FOLDER, Mesh  # noqa: E402
from prime_rl.configs.shared import ClientConfig  # noqa: E402
from prime_rl.orchestrator import clients  # noqa: E402
from report import Report  # noqa: E402
from task import END, questions, reward  # noqa: E402
from verifiers.v1.clients import resolve_client  # noqa: E402
from verifiers.v1.dialects.chat import ChatDialect  # noqa: E402
from verifiers.v1.types import SamplingConfig  # noqa: E402

GROUP, TOKENS_MAX, SEED = 8, 160, 5


def sampling(version, **changes):
    """What the orchestrator gives its environments for training."""
    extra = {"top_k": -1, "min_p": 0.0, "return_token_ids": True, "cache_salt": str(version)}
    return SamplingConfig(**{"temperature": 1.0, "top_p": 1.0, "max_tokens": TOKENS_MAX, "extra_body": extra, **changes})


async def roll_out(client, asked, version, size=GROUP, **changes):
    """Groups of rollouts, all at once, in the order of the questions."""
    def one(question, number):
        body = {"model": MODEL, "messages": question.messages}
        return client.get_response(ChatDialect(), body, sampling(version, **changes), session_id=f"{version}-{number}")

    jobs = [one(question, number) for question in asked for number in range(size)]
    return await asyncio.gather(*jobs)


def look(report, name, asked, responses, weights, version, size=GROUP):
    """Checks rollouts that one version sampled."""
    faults, rows = [], []
    for at, response in enumerate(responses):
        question, tokens = asked[at // size], response.tokens
        is_whole = tokens.completion_ids[-1:] == [END_TOKEN]
        checks = {
            "the prompt": tokens.prompt_ids == question.prompt,
            "lengths": 0 < len(tokens.completion_ids) == len(tokens.completion_logprobs) <= TOKENS_MAX,
            f"the end {response.finish_reason}": response.finish_reason == ("stop" if is_whole else "length"),
            "the text": response.message.content == text_of(tokens.completion_ids),
            "the name": bool(response.id),
        }
        faults += [fault for fault, holds in checks.items() if not holds]
        spans = [(0, len(tokens.completion_ids), version)]
        rows.append((list(tokens.prompt_ids), list(tokens.completion_ids), list(tokens.completion_logprobs), spans))
    report.row(f"{name}: rollouts", f"{len(responses)}" + "".join(f"; {fault}" for fault in faults[:3]),
               not faults and len(responses) == size * len(asked))
    worst, count = weights.difference(rows)
    tokens = sum(len(row[1]) for row in rows)
    report.row(f"{name}: log-probabilities", f"{count} of {tokens} tokens, within {worst:.1e}",
               worst < LOGPROB_ERROR_MAX and count == tokens)
    return rows


def text_of(ids):
    text = policy.tokenizer.decode([one for one in ids if one != END_TOKEN], skip_special_tokens=False)
    return text or None


def learn(asked, responses):
    rows = [
        Namespace(prompt=list(response.tokens.prompt_ids), tokens=list(response.tokens.completion_ids),
                  logprobs=list(response.tokens.completion_logprobs),
                  reward=reward((response.message.content or "") + END, asked[at // GROUP].answer, asked[at // GROUP].schema))
        for at, response in enumerate(responses)
    ]
    policy.improve([rows[at : at + GROUP] for at in range(0, len(rows), GROUP)][:4])


def change(rows, old, new):
    """How many outputs have a place from which on the new weights sampled, and the largest difference besides."""
    logprobs = {}
    for folder in (old, new):
        policy.model.load_state_dict(load_state(folder))
        with torch.no_grad():
            logprobs[folder] = policy.logprobs([(prompt, output) for prompt, output, _, _ in rows])
    mixed, worst = 0, 0.0
    for at, (_, output, given, _) in enumerate(rows):
        given = torch.tensor(given)
        by_old, by_new = ((given - logprobs[folder][at]).abs() for folder in (old, new))
        gaps = [torch.cat([by_old[:place], by_new[place:]]).max().item() for place in range(len(output) + 1)]
        place = min(range(len(gaps)), key=gaps.__getitem__)
        mixed += 0 < place < len(output)
        worst = max(worst, gaps[place])
    return mixed, worst


def version_told(mesh):
    answer = mesh.post("/get_weight_version", None)
    return answer["weight_version"], [worker["weight_version"] for worker in answer["workers"]]


async def main():
    global policy, END_TOKEN
    report, run = Report(), options.work / "prime-rl-run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    logging.basicConfig(filename=run / "prime-rl.log", level=logging.DEBUG)
    print("stubs: " + ", ".join(made), flush=True)
    policy = Policy(str(MODEL_FOLDER), 2e-4, SEED)
    weights = Weights(policy, str(MODEL_FOLDER))
    END_TOKEN = policy.tokenizer.token_to_id(END)
    asked = questions(12, policy.tokenizer, SEED)
    mesh = Mesh(options.refrain, run, "mesh", MODEL_FOLDER, DRAFTS)
    # prime-rl loads the tokenizer by the name of the model, which is a folder here.
    os.chdir(run)
    os.symlink(MODEL_FOLDER, MODEL)
    config = ClientConfig(base_url=mesh.url + "/v1", admin_base_url=[mesh.url])
    admin = clients.setup_admin_plane(config, MODEL)
    inference = clients.InferenceClient(config, MODEL, train_client_type="renderer")
    train = resolve_client(inference.train_client)
    evaluation = resolve_client(inference.eval_client)
    await parts(report, mesh, run, weights, asked, admin, inference, train, evaluation)
    await train.close()
    await admin.aclose()
    mesh.stop()
    return report.end()


async def parts(report, mesh, run, weights, asked, admin, inference, train, evaluation):
    with report.part("readiness"):
        await admin.wait_for_ready(MODEL)
        report.row("readiness", "health and model", True)
    with report.part("rollouts"):
        responses = await roll_out(train, asked, 0)
        look(report, "first batch", asked, responses, weights, "default")
        learn(asked, responses)
    with report.part("weights between batches"):
        folder = Path(weights.save(run / "step_1", 1))
        await admin.update_weights(folder, transport="filesystem", step=1)
        told = version_told(mesh)
        report.row("weights between batches", f"versions {told[1]}", told == ("1", ["1", "1"]))
        responses = await roll_out(train, asked, 1)
        look(report, "second batch", asked, responses, weights, "1")
        learn(asked, responses)
    with report.part("weights while rollouts run"):
        folder = Path(weights.save(run / "step_2", 2))
        begun = asyncio.ensure_future(roll_out(train, asked, 1))
        await asyncio.sleep(1.0)
        await admin.update_weights(folder, transport="filesystem", step=2)
        responses = await begun
        rows = [(list(one.tokens.prompt_ids), list(one.tokens.completion_ids), list(one.tokens.completion_logprobs), [])
                for one in responses]
        mixed, worst = change(rows, weights.folders["1"], weights.folders["2"])
        report.row("weights while rollouts run", f"{mixed} of {len(rows)} outputs have both, within {worst:.1e}",
                   mixed > 0 and worst < LOGPROB_ERROR_MAX and version_told(mesh)[0] == "2")
    with report.part("scores of prompts"):
        row = rows[0]
        scores = await inference.score(row[0] + row[1])
        policy.model.load_state_dict(load_state(weights.folders["2"]))
        with torch.no_grad():
            own = policy.logprobs([(row[0][:1], row[0][1:] + row[1])])[0]
        gap = (torch.tensor(scores[1:]) - own).abs().max().item()
        report.row("scores of prompts", f"{len(scores)} tokens, within {gap:.1e}",
                   gap < LOGPROB_ERROR_MAX and scores[0] == 0.0 and len(scores) == len(own) + 1)
    with report.part("evaluation"):
        body = [{"model": MODEL, "messages": one.messages, "temperature": 0.0, "max_tokens": TOKENS_MAX} for one in asked]
        answers = await asyncio.gather(*[
            evaluation.get_response(ChatDialect(), one, SamplingConfig(temperature=0.0), session_id="e") for one in body
        ])
        right = sum(reward((one.message.content or "") + END, q.answer, q.schema) == 1.0 for one, q in zip(answers, asked))
        report.row("evaluation by chats", f"{len(answers)} answers, {right} right", right > len(asked) // 2)
    with report.part("a rollout that prime-rl gives up"):
        given_up = asyncio.ensure_future(roll_out(train, asked, 2))
        await asyncio.sleep(0.5)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        left = None
        for _ in range(100):
            left = mesh_load(mesh)
            if left == 0:
                break
            await asyncio.sleep(0.1)
        report.row("rollouts that prime-rl gives up", f"{left} are left in flight", left == 0)
    with report.part("groups of GPUs"):
        # The reference engine has no such group. prime-rl takes no notice of the refusal.
        await admin.initialize_nccl(host="127.0.0.1", port=1, timeout=5, inference_world_size=2)
        responses = await roll_out(train, asked[:2], 2)
        look(report, "after a group that engines refuse", asked[:2], responses, weights, "2")


def mesh_load(mesh):
    from engines import call

    return call(mesh.url + "/v1/loads")[1]["num_reqs"]


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
