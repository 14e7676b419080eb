"""The listener for trainers in front of two real engines that register with it, in the words of trainers.

`tests/real-engines/run trainer` runs it with two vLLMs. docs/rollouts.md tells what it checks.
"""

import concurrent.futures
import signal
import time
import urllib.parse

import trainer_orders
import trainer_rollouts
from engines import call
from mesh import PUBLIC, free_port
from trainer_engines import TrainerVllm
from trainer_lab import EARLY, TOKENS, Lab
from trainer_words import SLIME, VIME


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


def check_devices(lab):
    """The number of devices, by which a trainer counts ranks."""
    status, answer = lab.listener.get("/get_world_size")
    lab.row("devices of all engines", status == 200 and answer.get("world_size") == 2, f"status {status}: {answer}"[:150])


def check_removal(lab):
    """An engine is removed while it has rollouts, and comes back."""
    runs = lab.long_runs(VIME)
    runs.await_tokens(EARLY, share=0.5)
    second, load = lab.engines[1], lab.loads()
    status, text = lab.listener.delete("/workers/" + urllib.parse.quote(second.url, safe=""))
    # An engine tells what it runs a step late.
    free, left = lab.idle(1 + second.settle_seconds, [second]), len(runs.all) - runs.ended()
    rollouts = runs.end()
    rows = lab.listener.get("/workers")[1]["workers"]
    holds = status == 202 and free is not None and left > 0 and load[1] > 0 and len(rows) == 2
    later = "not free" if free is None else f"free {free:.0f} ms later"
    lab.judge_greedy("an engine is removed: no loss", rollouts, lab.long)
    detail = f"status {status}; rollouts at the engines {load}; {later}, when {left} ran on"
    lab.row("an engine is removed: it is free", holds, detail)


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
    second, load = lab.engines[1], lab.loads()
    second.kill()
    died = time.monotonic()
    rollouts = runs.end()
    took = time.monotonic() - died
    lab.judge_greedy("an engine dies: no loss", rollouts, lab.long, f"; rollouts at the engines {load}, all ended {took:.1f} s later")
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


def check_leaving_by_urls(lab):
    """Aborts at each URL of the list of workers, where the engines are as well, as slime, miles and vime abort."""
    words = lab.engines[0].abort_words
    runs = lab.long_runs(SLIME if lab.engines[0].is_sglang else VIME)
    runs.await_tokens(EARLY, share=0.5)
    urls = [row["url"] for row in lab.listener.get("/workers")[1]["workers"]]
    with concurrent.futures.ThreadPoolExecutor(len(urls)) as pool:
        # All at once, so that an engine may be first.
        told = list(pool.map(lambda url: call(url + words[0][0], words[0][1])[0], reversed(urls)))
    rollouts = runs.end(seconds=30)
    for path, fields in words[1:]:
        told += [call(url + path, fields)[0] for url in urls]
    free = lab.idle()
    aborted = sum(one.finish == "abort" for one in rollouts)
    cut = [(tokens[: len(one.tokens)], logprobs) for one, (tokens, logprobs) in zip(rollouts, lab.long)]
    lab.judge_greedy("aborted at each URL: tokens so far", rollouts, cut)
    late = lab.listener.ask(VIME, lab.prompts[0], TOKENS)
    holds = aborted == len(rollouts) and set(told) == {200} and free is not None and lab.is_greedy([(0, late.tokens, lab.short[0][0])])
    lab.row("aborted at each URL: all end", holds, f"{aborted} of {len(rollouts)} aborted; the next one has {late.finish}")


def check_restart(lab):
    """The mesh is started anew. It takes over the engines that had registered."""
    code = lab.stop_mesh()
    lab.start_mesh()
    until = time.monotonic() + 30
    while time.monotonic() < until:
        rows = lab.listener.get("/workers")[1]["workers"]
        if [row["is_healthy"] for row in rows] == [True] * 3:
            break
        time.sleep(0.1)
    runs = lab.long_runs(VIME)
    lab.judge_greedy("the mesh is started anew", runs.end(), lab.long, f"; exit {code}, then {len(rows) - 1} engines")


def run(table, options, engines, name):
    """Checks the listener with two engines."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda engine: engine.start(), engines))
    lab = Lab(table, options, engines, name)
    try:
        lab.learn()
        lab.check("engines register", check_registration, lab)
        trainer_rollouts.check(lab)
        trainer_orders.check(lab)
        for check in (
            check_devices, check_leaving_by_urls, check_removal, check_join_in_pause, check_death, check_restart,
        ):  # fmt: skip
            lab.check(check.__doc__, check, lab)
        code = lab.stop_mesh()
        lab.row("the mesh stops in order", code == 0, f"exit {code}")
    finally:
        lab.mesh.stop(signal.SIGKILL)
        for engine in engines:
            engine.process.stop(signal.SIGKILL)


def check(table, options):
    """The part `trainer`: two vLLMs."""
    engines = [TrainerVllm(options.work, free_port(), options.model, number) for number in range(2)]
    run(table, options, engines, "trainer")
