"""Rollouts through the listener for trainers, compared with what the engine says by itself."""

import collections
import concurrent.futures

from engines import END_TOKEN
from mesh import PUBLIC
from trainer_lab import EARLY, GROUP, IN_FLIGHT_MAX, TOKENS
from trainer_words import ROUTES, SLIME, VIME, Runs

# Prompts that get a group of samples.
GROUPS = 4


def check_greedy(lab, route):
    """Greedy rollouts have the engine's own tokens and log-probabilities."""
    with concurrent.futures.ThreadPoolExecutor(len(lab.prompts)) as pool:
        rollouts = list(pool.map(lambda prompt: lab.listener.ask(route, prompt, TOKENS), lab.prompts))
    worst = max(
        (abs(ours - theirs) for rollout, (tokens, logprobs) in zip(rollouts, lab.short)
         if rollout.tokens == tokens for ours, theirs in zip(rollout.logprobs, logprobs)), default=None,
    )  # fmt: skip
    finishes = collections.Counter(rollout.finish for rollout in rollouts)
    ends = all(rollout.finish == ("stop" if rollout.tokens[-1] == END_TOKEN else "length") for rollout in rollouts)
    near = worst is not None and worst <= lab.engines[0].logprob_tolerance
    lab.judge_greedy(f"{route}: greedy tokens", rollouts, lab.short)
    detail = f"log-probabilities within {worst:.1e}; {dict(finishes)}" if worst is not None else "nothing to compare"
    lab.row(f"{route}: what it tells of them", near and ends, detail)


def check_groups(lab, route):
    """Groups of samples at temperature 1. The engine scores each output, which is read as a prompt."""
    asked = [(prompt, seed) for prompt in lab.prompts[:GROUPS] for seed in range(GROUP)]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        sample = lambda one: lab.listener.ask(route, one[0], TOKENS, temperature=1.0, seed=one[1])  # noqa: E731
        rollouts = list(pool.map(sample, asked))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda pair: lab.engines[0].scores(pair[0][0], pair[1].tokens), zip(asked, rollouts)))
    off = [abs(ours - theirs) for one, other in zip(rollouts, scores) for ours, theirs in zip(one.logprobs, other)]
    ends = all(one.finish == ("stop" if one.tokens[-1] == END_TOKEN else "length") for one in rollouts)
    kinds = len({tuple(one.tokens) for one in rollouts})
    holds = max(off) <= lab.engines[0].logprob_tolerance and ends and kinds > GROUPS
    detail = f"{len(rollouts)} rollouts, {kinds} different; {len(off)} log-probabilities within {max(off):.1e}"
    lab.row(f"{route}: groups of {GROUP}", holds, detail)


def check_streams(lab, route):
    """Streams have the same outputs as whole answers."""
    runs = Runs(lab.listener, route, lab.prompts, TOKENS)
    lab.judge_greedy(f"{route}: every other a stream", runs.end(), lab.short)


def check_unlimited(lab):
    """A rollout without an output limit ends by itself or fills the context."""
    rollouts = [lab.listener.ask(route, lab.prompts[2], None) for route in (VIME, SLIME)]
    holds = all(one.finish == "stop" and one.tokens == lab.short[2][0] for one in rollouts)
    holds = holds or all(one.finish in ("stop", "length") for one in rollouts) and lab.short[2][0][-1] != END_TOKEN
    lab.row("rollouts without a limit", holds, ", ".join(f"{one.finish} after {len(one.tokens)}" for one in rollouts))


def check_aborts(lab):
    """Aborts by name while rollouts run, and of all, of which some are held."""
    names = [f"rollout-{number}" for number in range(len(lab.prompts))]
    runs = lab.long_runs(SLIME, names=names)
    runs.await_tokens(EARLY, share=0.5)
    for name in names[:4]:
        lab.listener.order("/abort_request", {"rid": name})
    rollouts = runs.end()
    aborted = [rollout for rollout in rollouts if rollout.finish == "abort"]
    holds = [rollout.finish for rollout in rollouts] == ["abort"] * 4 + ["length"] * (len(names) - 4)
    holds = holds and sum(len(rollout.tokens) > 0 for rollout in aborted) >= 2
    cut = [(tokens[: len(one.tokens)], logprobs) for one, (tokens, logprobs) in zip(rollouts, lab.long)]
    lab.judge_greedy("aborted by name: tokens so far", rollouts, cut)
    lab.row("aborted by name: only these", holds, f"{len(aborted)} aborted, {[len(one.tokens) for one in aborted]} tokens")

    many = (lab.prompts * 3)[: IN_FLIGHT_MAX + 16]
    runs = Runs(lab.listener, VIME, many, lab.long_tokens, endless=True)
    runs.await_tokens(EARLY, share=0.25)
    before = sum(row["num_total_reqs"] for row in loads(lab))
    answer = lab.listener.order("/abort_request", {"abort_all": True})
    rollouts = runs.end(seconds=30)
    empty = sum(not rollout.tokens for rollout in rollouts)
    after = sum(row["num_total_reqs"] for row in loads(lab))
    free = lab.idle()
    ends = collections.Counter(rollout.finish for rollout in rollouts)
    holds = answer["aborted"] == before == ends["abort"] and after == 0 and free is not None and empty >= 16
    detail = f"{ends['abort']} of {len(many)}, of which {empty} without a token; the engines are free"
    detail += f" after {free:.0f} ms" if free is not None else " never"
    lab.row("all aborted, also the held", holds, f"{detail}; {before} in flight before, {after} after")


def loads(lab):
    """What a trainer waits for after it aborted everything."""
    return lab.listener.get("/v1/loads?include=core")[1]["loads"]


def check_stops(lab, route):
    """A text that ends outputs, which is part of them."""
    stop = "("
    expected = [lab.engines[0].stopped(prompt, TOKENS, stop) for prompt in lab.prompts[:4]]
    rollouts = [lab.listener.ask(route, prompt, TOKENS, stop=[stop]) for prompt in lab.prompts[:4]]
    same = lab.is_greedy([(at, one.tokens, tokens) for at, (one, tokens) in enumerate(zip(rollouts, expected))])
    cut = sum(len(tokens) < len(whole[0]) for tokens, whole in zip(expected, lab.short))
    lengths = f"{[len(one.tokens) for one in rollouts]} tokens, {[len(tokens) for tokens in expected]} by the engine itself"
    lab.row(f"{route}: a text that ends it", same and cut > 0, f"{lengths}; {cut} were cut")


def check_lists(lab):
    """A list of prompts with several samples of each in one call, as SGLang takes it."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "n": 4}
    body = {"input_ids": lab.prompts[:2], "sampling_params": sampling, "return_logprob": True}
    status, answers = lab.listener.post(SLIME, body)
    pairs = [(at // 4, answer["output_ids"], lab.short[at // 4][0]) for at, answer in enumerate(answers)]
    lab.row("lists of prompts and samples", len(pairs) == 8 and lab.is_greedy(pairs), f"status {status}, {len(answers)} outputs")


def check_scores(lab):
    """Prompts are scored in both interfaces, as for distillation."""
    text = lab.prompts[0] + lab.long[0][0][:160]
    expected = lab.engines[0].scores(text[:1], text[1:])
    body = {"model": PUBLIC, "token_ids": text, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
    status, answer = lab.listener.post(VIME, body)
    if status == 400 and answer["error"]["code"] == "unsupported_by_engine":
        lab.row("prompts are scored", True, "refused by name: Refrain does not ask this engine for it")
        return
    rows = answer["prompt_logprobs"]
    first = [row[str(token)]["logprob"] for row, token in zip(rows[1:], text[1:])]
    body = {
        "input_ids": text, "sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True,
        "logprob_start_len": 0,
    }  # fmt: skip
    rows = lab.listener.order(SLIME, body)["meta_info"]["input_token_logprobs"]
    second = [logprob for logprob, _, _ in rows[1:]]
    off = max(abs(ours - theirs) for scores in (first, second) for ours, theirs in zip(scores, expected))
    holds = len(first) == len(second) == len(expected) and off <= lab.engines[0].logprob_tolerance
    lab.row("prompts are scored", holds, f"{len(expected)} tokens in both interfaces, within {off:.1e}")


def check(lab):
    for route in ROUTES:
        for check in (check_greedy, check_groups, check_stops):
            lab.check(f"{route}: {check.__doc__}", check, lab, route)
    for route in (VIME, SLIME):
        lab.check(f"{route}: {check_streams.__doc__}", check_streams, lab, route)
    for check in (check_lists, check_scores, check_unlimited, check_aborts):
        lab.check(check.__doc__, check, lab)
