"""Orders of a trainer while rollouts run: pauses, weights and caches."""

import concurrent.futures
import statistics
import time

from trainer_lab import EARLY, TOKENS
from trainer_words import SLIME, VIME, Runs


def check_keep(lab, name, pause, resume, route):
    """A pause that keeps running rollouts: nothing grows meanwhile, and then they go on token for token."""
    runs = lab.long_runs(route)
    runs.await_tokens(EARLY, share=0.5)
    lab.listener.order(*pause)
    was_paused = lab.listener.get("/is_paused")[1]["is_paused"]
    # Tokens that were on their way arrive.
    time.sleep(lab.engines[0].settle_seconds)
    before = runs.counts()
    time.sleep(1.5)
    stood, ended = runs.counts() == before, runs.ended()
    lab.listener.order(resume)
    more = f"; {'stood still' if stood else 'GREW'} while paused, {ended} had ended"
    lab.judge_greedy(f"{name}: they go on", runs.end(), lab.long, more)
    lab.row(f"{name}: nothing grows", stood and was_paused and ended < len(runs.all), f"tokens of streams {before}")


def check_wait(lab):
    """A pause that waits for running rollouts. One that comes meanwhile is held."""
    runs = lab.long_runs(VIME, 8)
    runs.await_tokens(EARLY)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(lab.listener.order, "/pause?mode=wait")
        time.sleep(0.2)
        late = Runs(lab.listener, VIME, lab.prompts[:2], TOKENS)
        pausing.result()
    # The last answers are on their way.
    time.sleep(0.3)
    ended = runs.ended()
    time.sleep(1)
    held = 2 - late.ended()
    lab.listener.order("/resume")
    rollouts = runs.end()
    late = late.end()
    lab.judge_greedy("pause, wait: running rollouts end", rollouts, lab.long)
    holds = ended == 8 and held == 2 and lab.is_greedy([(at, one.tokens, lab.short[at][0]) for at, one in enumerate(late)])
    lab.row("pause, wait: new ones are held", holds, f"{ended} of 8 had ended when it was paused, {held} of 2 waited")


def check_abort_pause(lab, name, pause, resume, route):
    """A pause that aborts. Rollouts that come meanwhile are held."""
    runs = lab.long_runs(route)
    runs.await_tokens(EARLY, share=0.5)
    lab.listener.order(*pause)
    rollouts = runs.end(seconds=30)
    late = Runs(lab.listener, route, lab.prompts[:2], TOKENS)
    time.sleep(1)
    held = 2 - late.ended()
    lab.listener.order(resume)
    late = late.end()
    cut = [(tokens[: len(one.tokens)], logprobs) for one, (tokens, logprobs) in zip(rollouts, lab.long)]
    lab.judge_greedy(f"{name}: tokens so far", rollouts, cut)
    aborted = sum(rollout.finish == "abort" for rollout in rollouts)
    holds = aborted == len(rollouts) and held == 2 and lab.is_greedy([(at, one.tokens, lab.short[at][0]) for at, one in enumerate(late)])
    lab.row(f"{name}: all end, new ones wait", holds, f"{aborted} of {len(rollouts)} aborted, {held} of 2 waited")


def check_weights(lab, name, route, load, is_paused):
    """Other weights while rollouts run. Each token has the version that sampled it, which the engine's scores show."""
    before, after = lab.version, lab.version + 1
    old, new = lab.weights[before % 2], lab.weights[after % 2]
    runs = lab.long_runs(route)
    runs.await_tokens(EARLY, share=0.5)
    if is_paused:
        lab.listener.order("/pause?mode=keep&clear_cache=false")
    lab.listener.order(*load(new, after))
    if is_paused:
        lab.listener.order("/resume")
    rollouts = runs.end()
    told = lab.listener.get("/get_weight_version")[1]
    late = lab.listener.ask(VIME, lab.prompts[0], TOKENS)
    after_scores = scored(lab, rollouts)
    lab.listener.order("/update_weights_from_disk", {"model_path": str(old), "weight_version": str(after + 1)})
    before_scores = scored(lab, rollouts)
    lab.version = after + 1
    ours, others, off, mixed = [], [], [], 0
    for rollout, olds, news in zip(rollouts, before_scores, after_scores):
        versions = [span["version"] for span in rollout.spans]
        mixed += versions == [before, after]
        assert versions in ([before], [after], [before, after]), rollout.spans
        for span in rollout.spans:
            for at in range(span["start"], span["end"]):
                right, wrong = (olds, news) if span["version"] == before else (news, olds)
                ours.append(abs(rollout.logprobs[at] - right[at]))
                others.append(abs(rollout.logprobs[at] - wrong[at]))
                if ours[-1] > lab.engines[0].logprob_tolerance:
                    off.append((at, versions, rollout.spans[-1]["start"]))
    whole = all(len(one.tokens) == lab.long_tokens and one.spans[-1]["end"] == lab.long_tokens for one in rollouts)
    near = max(ours) <= lab.engines[0].logprob_tolerance and statistics.mean(others) > lab.engines[0].contrast * statistics.mean(ours)
    holds = near and whole and mixed >= len(rollouts) // 2
    holds = holds and told["weight_version"] == str(after) and told["is_everywhere"] and late.version == str(after)
    detail = f"{mixed} of {len(rollouts)} have both versions; log-probabilities within {max(ours):.1e} of the version told"
    detail += f" (mean {statistics.mean(ours):.1e}), {statistics.mean(others):.2f} from the other"
    lab.row(name, holds, detail + (f"; off: {off[:5]}" if off else ""))


def scored(lab, rollouts):
    """The scores of the outputs by both engines in turn, which have to have the same weights."""
    jobs = [(lab.engines[number % 2], lab.prompts[number], one.tokens) for number, one in enumerate(rollouts)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda job: job[0].scores(job[1], job[2]), jobs))


def check_version(lab):
    """A version that a trainer only names, after weights came by other means."""
    lab.version += 2
    lab.listener.order("/update_weight_version", {"new_version": str(lab.version), "abort_all_requests": False})
    one = lab.listener.ask(SLIME, lab.prompts[0], 8)
    lab.row("a version that is only named", one.version == str(lab.version), f"{one.version}, {one.spans}")


def check_flush(lab):
    """The cache can be flushed while nothing runs, and is empty then."""
    runs = lab.long_runs(VIME, 4)
    runs.await_tokens(EARLY)
    busy, _ = lab.listener.post("/flush_cache")
    runs.end()
    lab.idle()
    prompt = (lab.prompts[0] + lab.long[0][0] + lab.prompts[1] + lab.long[1][0])[:600]
    cached = [max(lab.listener.ask(VIME, prompt, 1).cached for _ in range(6))]
    status, answer = lab.listener.post("/flush_cache")
    cached.append(lab.listener.ask(VIME, prompt, 1).cached)
    holds = (busy, status) == (400, 200) and cached[0] > 100 and cached[1] <= 1
    lab.row("flush_cache", holds, f"status {busy} while rollouts run, {status} later; cached tokens {cached[0]}, then {cached[1]}")


def from_disk(folder, version):
    """The words of SGLang."""
    return "/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version)}


def from_folder(folder, version):
    """The words of prime-rl, with a version."""
    return "/update_weights", {"weight_dir": str(folder), "weight_version": version}


def check_wrong_weights(lab):
    """Weights that do not exist change nothing, and rollouts go on."""
    runs = lab.long_runs(SLIME, 8)
    runs.await_tokens(EARLY, share=0.5)
    path, fields = from_disk(lab.options.work / "no-such-folder", lab.version + 1)
    status, answer = lab.listener.post(path, fields)
    told = lab.listener.get("/get_weight_version")[1]
    holds = status >= 400 and not answer["success"] and told["weight_version"] in ("default", str(lab.version))
    lab.judge_greedy("weights that do not exist: rollouts", runs.end(), lab.long)
    lab.row("weights that do not exist", holds, f"status {status}: {answer.get('message', '')[:150]}")


def check_unknown_call(lab):
    """A call that the engines do not have, which prime-rl makes and expects to be missing."""
    status, answer = lab.listener.post("/init_broadcaster", {"host": "127.0.0.1", "port": 1, "rank_offset": 0})
    lab.row("a call that the engines lack", status == 404, f"status {status}: {str(answer)[:120]}")


def check(lab):
    for words, pause in (
        ("pause, keep", "/pause?mode=keep&clear_cache=false"),
        ("pause, keep, no cache", "/pause?mode=keep&clear_cache=true"),
    ):
        lab.check(words, check_keep, lab, words, (pause,), "/resume", VIME)
    for mode in ("in_place", "retract"):
        pause = ("/pause_generation", {"mode": mode})
        lab.check(mode, check_keep, lab, f"pause, {mode}", pause, "/continue_generation", SLIME)
    lab.check("pause, wait", check_wait, lab)
    for words, pause, resume, route in (
        ("pause, abort", ("/pause?mode=abort",), "/resume", VIME),
        ("pause_generation, abort", ("/pause_generation", {}), "/continue_generation", SLIME),
    ):
        lab.check(words, check_abort_pause, lab, words, pause, resume, route)
    for words, route, load, is_paused in (
        ("weights in a pause", VIME, from_folder, True),
        ("weights without a pause", SLIME, from_disk, False),
    ):
        lab.check(words, check_weights, lab, words, route, load, is_paused)
    for check in (check_wrong_weights, check_version, check_flush, check_unknown_call):
        lab.check(check.__doc__, check, lab)
