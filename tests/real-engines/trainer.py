"""The listener for trainers in front of two real engines that register with it, in the words of trainers.

`tests/real-engines/run trainer` runs it with two vLLMs. docs/rollouts.md tells what it checks.
"""

import collections
import concurrent.futures
import contextlib
import signal
import statistics
import time
import urllib.parse

from engines import END_TOKEN, Process
from mesh import PUBLIC, TENANT, await_ready, compare, free_port, prompts
from trainer_engines import TrainerVllm, other_weights
from trainer_words import ROUTES, SLIME, VIME, Listener, Runs

# Samples of one prompt.
GROUP = 8
GROUPS = 4
TOKENS = 48
# Output tokens of rollouts that something happens to, and the tokens after which it happens.
LONG, EARLY = 160, 24
# Rollouts that the listener lets run at once; further ones are held.
IN_FLIGHT_MAX = 24


class Lab:
    """Two engines that a trainer has started, a mesh without an engine, and what the engines say without it."""

    def __init__(self, table, options, engines, name):
        self.table, self.options, self.engines, self.name = table, options, engines, name
        self.weights = {0: options.model, 1: other_weights(options.model, options.work / f"{name}-weights", 1.25)}
        # Even versions are the first weights, and odd ones the others.
        self.version = 0
        trainer, gateway = free_port(), free_port()
        config = options.work / f"{name}.toml"
        config.write_text(f"""
[telemetry]
log = "info"
[gateway]
listen = "127.0.0.1:{gateway}"
anonymous_tenant = "{TENANT}"
[gateway.trainer]
tenant = "{TENANT}"
in_flight_max = {IN_FLIGHT_MAX}
[[gateway.models]]
id = "{PUBLIC}"
files = "{options.model}"
[draft_store]
data_dir = "{options.work / f"{name}-data"}"
[worker]
evacuate_after_ms = 500
[worker.engine]
model = "{PUBLIC}"
served_model = "{engines[0].served}"
files = "{options.model}"
""")
        command = [options.refrain, "up", "--config", config, "--trainer", f"127.0.0.1:{trainer}", "--adopt", "8"]
        self.mesh = Process(command, options.work / f"{name}.log")
        await_ready(self.mesh, f"http://127.0.0.1:{gateway}")
        self.listener = Listener(trainer, PUBLIC)

    def learn(self):
        """What the engines say without Refrain: greedy outputs, short ones and endless ones."""
        self.prompts = prompts(self.engines[0])[:16]
        with concurrent.futures.ThreadPoolExecutor(GROUP) as pool:
            ask = self.engines[0].reference
            self.short = list(pool.map(lambda prompt: ask(prompt, TOKENS), self.prompts))
            self.long = list(pool.map(lambda prompt: ask(prompt, LONG, endless=True), self.prompts))

    def row(self, name, holds, detail):
        self.table.row(self.name, name, bool(holds), detail)

    @contextlib.contextmanager
    def reported(self, name):
        """Reports a check that did not come to its end as one that failed, and lets the engines go on."""
        try:
            yield
        except (AssertionError, KeyError, OSError, RuntimeError, TypeError) as error:
            self.row(name, False, f"{type(error).__name__}: {str(error)[:300]}")
            self.listener.post("/abort_request", {"abort_all": True})
            self.listener.post("/resume")

    def long_runs(self, route, count=16, **how):
        """Endless greedy rollouts, of which the outputs are known."""
        return Runs(self.listener, route, self.prompts[:count], LONG, endless=True, **how)

    def judge_greedy(self, name, rollouts, references, more=""):
        """Checks that greedy outputs have the tokens that the engine gives by itself."""
        outputs = [
            (number, self.prompts[number], rollout.tokens, references[number][0]) for number, rollout in enumerate(rollouts)
        ]
        same, ties, wrong = compare(self.engines[0], outputs, self.engines[0].near_tie)
        tokens = sum(len(rollout.tokens) for rollout in rollouts)
        detail = f"{same} of {len(outputs)} outputs, {tokens} tokens; {ties} part at near-ties; {len(wrong)} differ{more}"
        self.row(name, not wrong, detail)

    def idle(self, seconds=10):
        """Waits until no engine has anything to do. Returns the milliseconds, or None."""
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            if all(engine.running() == 0 for engine in self.engines):
                return 1e3 * (time.monotonic() - started)
            time.sleep(0.02)
        return None


def check_registration(lab):
    """Registers one engine in the words of slime and the other in those of older trainers."""
    first, second = lab.engines
    status, answer = lab.listener.post("/workers", {"url": first.url, "worker_type": "regular"})
    again, repeated = lab.listener.post("/workers", {"url": first.url, "worker_type": "regular"})
    older, added = lab.listener.post("/add_worker?url=" + urllib.parse.quote(second.url, safe=""))
    holds = (status, again, older) == (202, 202, 200) and answer["worker_id"] == repeated["worker_id"]
    rows = lab.listener.get("/workers")[1]["workers"]
    urls = lab.listener.get("/list_workers")[1]["urls"]
    holds = holds and [row["is_healthy"] for row in rows] == [True] * 3
    holds = holds and {first.url, second.url} < set(urls) and urls[0] == lab.listener.url
    model = lab.listener.get("/v1/models")[1]["data"][0]
    holds = holds and model["id"] == PUBLIC and model["max_model_len"] >= 2048
    lab.row("engines register", holds, f"status {status}, {again} again, {older} for an older trainer; {len(rows)} rows")
    wrong, refused = lab.listener.post("/workers", {"url": f"http://127.0.0.1:{free_port()}", "worker_type": "regular"})
    reason = refused["error"]["message"] if isinstance(refused, dict) else str(refused)
    lab.row("no engine there: refused", wrong >= 400, f"status {wrong}: {reason[:120]}")


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


def check_aborts(lab):
    """Aborts by name while rollouts run, and of all, of which some are held."""
    names = [f"rollout-{number}" for number in range(len(lab.prompts))]
    runs = lab.long_runs(SLIME, names=names)
    runs.await_tokens(EARLY)
    for name in names[:4]:
        lab.listener.order("/abort_request", {"rid": name})
    rollouts = runs.end()
    aborted = [rollout for rollout in rollouts if rollout.finish == "abort"]
    holds = [rollout.finish for rollout in rollouts] == ["abort"] * 4 + ["length"] * (len(names) - 4)
    holds = holds and all(EARLY / 2 <= len(rollout.tokens) < LONG for rollout in aborted[::2])
    cut = [(tokens[: len(one.tokens)], logprobs) for one, (tokens, logprobs) in zip(rollouts, lab.long)]
    lab.judge_greedy("aborted by name: tokens so far", rollouts, cut)
    lab.row("aborted by name: only these", holds, f"{len(aborted)} aborted, {[len(one.tokens) for one in aborted]} tokens")

    many = (lab.prompts * 3)[: IN_FLIGHT_MAX + 16]
    runs = Runs(lab.listener, VIME, many, LONG, endless=True)
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


def check_keep(lab, name, pause, resume, route):
    """A pause that keeps running rollouts: nothing grows meanwhile, and then they go on token for token."""
    runs = lab.long_runs(route)
    runs.await_tokens(EARLY, share=0.5)
    lab.listener.order(*pause)
    was_paused = lab.listener.get("/is_paused")[1]["is_paused"]
    # Tokens that were on their way arrive.
    time.sleep(0.3)
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
    holds = ended == 8 and held == 2 and all(one.tokens == short[0] for one, short in zip(late, lab.short))
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
    holds = aborted == len(rollouts) and held == 2 and all(one.tokens == short[0] for one, short in zip(late, lab.short))
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
    ours, others, mixed = [], [], 0
    for rollout, olds, news in zip(rollouts, before_scores, after_scores):
        versions = [span["version"] for span in rollout.spans]
        mixed += versions == [before, after]
        assert versions in ([before], [after], [before, after]), rollout.spans
        for span in rollout.spans:
            for at in range(span["start"], span["end"]):
                right, wrong = (olds, news) if span["version"] == before else (news, olds)
                ours.append(abs(rollout.logprobs[at] - right[at]))
                others.append(abs(rollout.logprobs[at] - wrong[at]))
    whole = all(len(one.tokens) == LONG and one.spans[-1]["end"] == LONG for one in rollouts)
    near = max(ours) <= lab.engines[0].logprob_tolerance and statistics.mean(others) > 10 * statistics.mean(ours)
    holds = near and whole and mixed >= len(rollouts) // 2
    holds = holds and told["weight_version"] == str(after) and told["is_everywhere"] and late.version == str(after)
    detail = f"{mixed} of {len(rollouts)} have both versions; log-probabilities within {max(ours):.1e} of the version told"
    lab.row(name, holds, f"{detail} (mean {statistics.mean(ours):.1e}), {statistics.mean(others):.2f} from the other")


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
    busy, _ = lab.listener.get("/flush_cache")
    runs.end()
    lab.idle()
    prompt = (lab.prompts[0] + lab.long[0][0] + lab.prompts[1] + lab.long[1][0])[:600]
    cached = [max(lab.listener.ask(VIME, prompt, 1).cached for _ in range(6))]
    status, answer = lab.listener.get("/flush_cache")
    cached.append(lab.listener.ask(VIME, prompt, 1).cached)
    holds = (busy, status) == (400, 200) and cached[0] > 0 and cached[1] == 0
    lab.row("flush_cache", holds, f"status {busy} while rollouts run, {status} later; cached tokens {cached[0]}, then {cached[1]}")


def check_devices(lab):
    """The number of devices, by which a trainer counts ranks."""
    status, answer = lab.listener.get("/get_world_size")
    lab.row("devices of all engines", status == 200 and answer.get("world_size") == 2, f"status {status}: {answer}"[:150])


def check_unlimited(lab):
    """A rollout without an output limit ends by itself or fills the context."""
    rollouts = [lab.listener.ask(route, lab.prompts[2], None) for route in (VIME, SLIME)]
    holds = all(one.finish == "stop" and one.tokens == lab.short[2][0] for one in rollouts)
    holds = holds or all(one.finish in ("stop", "length") for one in rollouts) and lab.short[2][0][-1] != END_TOKEN
    lab.row("rollouts without a limit", holds, ", ".join(f"{one.finish} after {len(one.tokens)}" for one in rollouts))


def check_removal(lab):
    """An engine is removed while it has rollouts, and comes back."""
    runs = lab.long_runs(VIME)
    runs.await_tokens(EARLY, share=0.5)
    second = lab.engines[1]
    load = next(row["load"] for row in lab.listener.get("/workers")[1]["workers"] if row["url"] == second.url)
    status, text = lab.listener.delete("/workers/" + urllib.parse.quote(second.url, safe=""))
    running, left = second.running(), len(runs.all) - runs.ended()
    rollouts = runs.end()
    rows = lab.listener.get("/workers")[1]["workers"]
    holds = status == 202 and running == 0 and load > 0 and len(rows) == 2
    lab.judge_greedy("an engine is removed: no loss", rollouts, lab.long)
    lab.row("an engine is removed: it is free", holds, f"status {status}; {load} rollouts were there; {left} ran on after it")


def check_join_in_pause(lab):
    """An engine that joins in a pause starts paused."""
    lab.listener.order("/pause?mode=keep")
    status, answer = lab.listener.post("/workers", {"url": lab.engines[1].url, "worker_type": "regular"})
    paused = lab.listener.get("/is_paused")[1]
    lab.listener.order("/resume")
    holds = status == 202 and paused["is_paused"] and len(paused["workers"]) == 2
    runs = lab.long_runs(SLIME)
    lab.judge_greedy("an engine joins in a pause", runs.end(), lab.long, f"; paused everywhere {holds}")
    lab.row("it starts paused", holds, f"status {status}, version {answer.get('weight_version')}")


def check_death(lab):
    """An engine dies while it has rollouts. It counts until it is removed, and a new one takes its place."""
    runs = lab.long_runs(VIME)
    runs.await_tokens(EARLY, share=0.5)
    second = lab.engines[1]
    load = next(row["load"] for row in lab.listener.get("/workers")[1]["workers"] if row["url"] == second.url)
    second.kill()
    died = time.monotonic()
    rollouts = runs.end()
    took = time.monotonic() - died
    lab.judge_greedy("an engine dies: no loss", rollouts, lab.long, f"; {load} were there, all ended {took:.1f} s later")
    healthy = [row["is_healthy"] for row in lab.listener.get("/workers")[1]["workers"]]
    pause, answer = lab.listener.post("/pause?mode=keep")
    named = "workers" in answer and [row["done"] for row in answer["workers"]].count(False) == 1
    removed, _ = lab.listener.delete("/workers/" + urllib.parse.quote(second.url, safe=""))
    lab.listener.order("/resume")
    again, _ = lab.listener.post("/pause?mode=keep")
    lab.listener.order("/resume")
    holds = sorted(healthy) == [False, True, True] and pause >= 400 and named and (removed, again) == (202, 200)
    detail = f"healthy {healthy}; an order has status {pause}, and {again} after the removal ({removed})"
    lab.row("an engine dies: what is told", holds, detail)
    second.start()
    status, answer = lab.listener.post("/workers", {"url": second.url, "worker_type": "regular"})
    runs = lab.long_runs(VIME)
    lab.judge_greedy("an engine is started anew", runs.end(), lab.long, f"; it registered with status {status}")


def run(table, options, engines, name):
    """Checks the listener with two engines."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda engine: engine.start(), engines))
    lab = Lab(table, options, engines, name)
    try:
        lab.learn()
        with lab.reported("engines register"):
            check_registration(lab)
        for route in ROUTES:
            with lab.reported(f"{route}: greedy tokens"):
                check_greedy(lab, route)
            with lab.reported(f"{route}: groups of {GROUP}"):
                check_groups(lab, route)
        for route in (VIME, SLIME):
            with lab.reported(f"{route}: every other a stream"):
                check_streams(lab, route)
        for check in (check_unlimited, check_devices, check_aborts):
            with lab.reported(check.__doc__):
                check(lab)
        keeps = {
            "pause, keep": ("/pause?mode=keep&clear_cache=false",),
            "pause, keep, no cache": ("/pause?mode=keep&clear_cache=true",),
        }
        for kept, pause in keeps.items():
            with lab.reported(kept):
                check_keep(lab, kept, pause, "/resume", VIME)
        for mode in ("in_place", "retract"):
            with lab.reported(mode):
                pause = ("/pause_generation", {"mode": mode})
                check_keep(lab, f"pause, {mode}", pause, "/continue_generation", SLIME)
        with lab.reported("pause, wait"):
            check_wait(lab)
        for words, pause, resume, route in (
            ("pause, abort", ("/pause?mode=abort",), "/resume", VIME),
            ("pause_generation, abort", ("/pause_generation", {}), "/continue_generation", SLIME),
        ):
            with lab.reported(words):
                check_abort_pause(lab, words, pause, resume, route)
        from_disk = lambda folder, version: (  # noqa: E731
            "/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version)},
        )  # fmt: skip
        in_vllms_words = lambda folder, version: (  # noqa: E731
            "/update_weights", {"weight_dir": str(folder), "weight_version": version},
        )  # fmt: skip
        for words, route, load, is_paused in (
            ("weights in a pause", VIME, in_vllms_words, True),
            ("weights without a pause", SLIME, from_disk, False),
        ):
            with lab.reported(words):
                check_weights(lab, words, route, load, is_paused)
        for check in (check_version, check_flush, check_removal, check_join_in_pause, check_death):
            with lab.reported(check.__doc__):
                check(lab)
        lab.row("the mesh stops in order", lab.mesh.stop() == 0, f"exit {lab.mesh.child.returncode}")
    finally:
        lab.mesh.stop(signal.SIGKILL)
        for engine in engines:
            engine.process.stop(signal.SIGKILL)


def check(table, options):
    """The part `trainer`: two vLLMs."""
    engines = [TrainerVllm(options.work, free_port(), options.model, number) for number in range(2)]
    run(table, options, engines, "trainer")
