"""Runs real coding agents against Refrain in front of a scripted engine. `run` installs them, and calls this."""

import argparse
import base64
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import texts
from engine import Engine
from mesh import SHIPPED, Mesh
from programs import CONTENT, IMAGE, PIXEL, PROGRAMS, environment
from recorder import Recorder
from script import FINAL, STORY, TASKS, Script

TEMPLATES = ("bare", "qwen3", "strict")
# Programs that are tested with a slow engine and with one that dies as well.
WITH_FAULTS = ("codex", "claude-code")
# Programs that run at the same time. More do not go faster on two cores, and some have limits on time.
PROGRAMS_AT_ONCE = 2
START_SECONDS = 120
# The longest time in which an interrupted program has to be gone and its stream dropped, and how often it is
# interrupted until then.
INTERRUPT_SECONDS = 5
INTERRUPTS = 3
GENERATING = ("/chat/completions", "/responses", "/messages")


class Failure(Exception):
    """A check that did not hold."""


def require(holds, fault):
    if not holds:
        raise Failure(fault)


def await_value(measured, seconds):
    until = time.monotonic() + seconds
    while not (value := measured()) and time.monotonic() < until:
        time.sleep(0.02)
    return value


def kill_group(process):
    """Ends what is left of a program and of its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


class Case:
    """One program with one template."""

    def __init__(self, kind, template, engine, mesh, folder):
        self.template, self.engine = template, engine
        self.recorder = Recorder(mesh.port)
        self.program = kind(folder, self.recorder.url, template)
        self.log = folder / "said.log"
        for path in (self.program.home, self.program.repo, folder / "tmp"):
            path.mkdir(parents=True)
        # Some programs look for a repository.
        subprocess.run(["git", "init", "--quiet", self.program.repo], check=True)
        self.command = Path(os.environ["WORK"]) / self.program.folder / self.program.program
        self.env = environment(self.program, os.environ["BIN"])
        (self.program.repo / IMAGE).write_bytes(base64.b64decode(PIXEL))
        self.program.prepare()
        self.begun_at = time.monotonic()
        engine.script = Script(self.program)

    def start(self, args):
        with self.log.open("a") as log:
            print(f"\n== {' '.join(args)}", file=log, flush=True)
            return subprocess.Popen([self.command, *args], cwd=self.program.repo, env=self.env, stdout=log, stderr=log,
                                    stdin=subprocess.DEVNULL, start_new_session=True)

    def carry_out(self, task, args):
        """Has the program carry out a task to its end."""
        place = self.log.stat().st_size if self.log.exists() else 0
        process, begun_at = self.start(args), time.monotonic()
        try:
            process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            raise Failure(f"{task}: not at its end after {START_SECONDS} s") from None
        finally:
            kill_group(process)
        require(process.returncode == 0, f"{task}: ended with status {process.returncode}")
        said = self.log.read_bytes()[place:].decode(errors="replace")
        require(FINAL[task] in said, f"{task}: the program does not show the last answer")
        prompts = [stream.prompt for stream in self.engine.since(begun_at)]
        require(any(prompt.task == task for prompt in prompts), f"{task}: the engine was not asked")
        return prompts

    def holds(self, name, content):
        path = self.program.repo / name
        require(path.is_file(), f"{name} was not made")
        # Some tools end a file with a line feed, and some do not.
        found = path.read_bytes()
        require(found.rstrip(b"\n") == content.encode(), f"{name} has other bytes: {found!r}")

    def run(self):
        program, first = self.program, TASKS["TASK-WRITE"]
        prompts = self.carry_out("TASK-WRITE", program.first(first))
        self.holds("made.txt", CONTENT)
        if program.has_tools:
            self.read_back(prompts)
        if program.has_sessions:
            task = TASKS["TASK-PAIR"]
            before = len(self.recorder.calls)
            prompts = self.carry_out("TASK-PAIR", program.again(task))
            require(any("TASK-WRITE" in prompt.text for prompt in prompts), "the session does not go on")
            self.sessions(before)
        elif program.has_pairs:
            self.carry_out("TASK-PAIR", program.first(TASKS["TASK-PAIR"]))
        if program.has_pairs:
            for name in ("one", "two"):
                self.holds(f"{name}.txt", name)
        seconds = self.interrupt()
        self.statuses(0)
        self.prompts()
        if program.name in WITH_FAULTS:
            self.carry_out("TASK-SLOW", program.first(TASKS["TASK-SLOW"]))
            self.holds("slow.txt", "slow")
            before = len(self.recorder.calls)
            self.statuses(before)
            self.carry_out("TASK-DEATH", program.first(TASKS["TASK-DEATH"]))
            require(self.engine.script.has_died, "TASK-DEATH: the engine did not die")
            self.holds("death.txt", "death")
            self.prompts()
        streams = self.engine.since(self.begun_at)
        tokens = [stream.prompt.tokens for stream in streams]
        return (f"{len(tokens)} prompts of {min(tokens)} to {max(tokens)} tokens, "
                f"engine free {seconds * 1000:.0f} ms after the interrupt")

    def keep(self):
        """Writes what was sent and what the engine read, to find out why a check failed."""
        folder = self.log.parent
        with (folder / "calls.log").open("wb") as file:
            for call in self.recorder.calls:
                heads = "".join(f"{name}: {value}\n" for name, value in call.heads.items())
                file.write(f"\n== {call.method} {call.path} {call.status}\n{heads}\n".encode() + call.body + b"\n\n")
                file.write(call.answer + b"\n")
        with (folder / "prompts.log").open("w") as file:
            for stream in self.engine.since(self.begun_at):
                print(f"\n== {stream.prompt.task} step {stream.prompt.step}\n{stream.prompt.text}", file=file)

    def read_back(self, prompts):
        line = CONTENT.splitlines()[-1]
        last = max((prompt for prompt in prompts if prompt.task == "TASK-WRITE"), key=lambda prompt: prompt.step)
        turns = 2 + len(self.program.extras())
        require(last.step >= turns, f"TASK-WRITE ended after {last.step} of {turns} turns")
        require("unsupported call" not in last.text, "the program does not know a call that it was sent")
        after = last.text[last.text.rfind("TASK-WRITE"):]
        require(after.count(line) >= 2, "what was read back is not in the prompt")

    def sessions(self, before):
        """Checks that the program names the same session over a resume."""
        def named(calls, name):
            bodies = [call.json() or {} for call in calls if call.path.split("?")[0].endswith(GENERATING)]
            return {call.heads.get(name) for call in calls} | {body.get(name) for body in bodies}
        for name in self.program.session:
            calls = self.recorder.calls
            kept = (named(calls[:before], name) & named(calls[before:], name)) - {None}
            require(kept, f"{name} does not keep its value over a resume")

    def interrupt(self):
        """Stops the program in the middle of a stream. Returns after how long the engine was free."""
        begun_at = time.monotonic()
        process = self.start(self.program.first(TASKS["TASK-LONG"]))
        try:
            def under_way():
                # Programs ask for a title of the session as well, which is short.
                told = (stream for stream in self.engine.since(begun_at) if stream.answer.text == STORY)
                return next((stream for stream in told if stream.tokens > 5), None)
            stream = await_value(under_way, START_SECONDS)
            require(stream, "TASK-LONG: the engine was not asked")
            # Aider asks for a second interrupt when the first one comes before it has shown a word, so a person who
            # sees it go on presses again.
            for _ in range(INTERRUPTS):
                signalled_at = time.monotonic()
                os.killpg(process.pid, signal.SIGINT if self.program.obeys_interrupts else signal.SIGTERM)
                if await_value(lambda: stream.ended_at, INTERRUPT_SECONDS):
                    break
            require(stream.dropped_at, "the stream goes on after an interrupt")
            return stream.dropped_at - signalled_at
        finally:
            kill_group(process)

    def statuses(self, since):
        for call in self.recorder.calls[since:]:
            is_expected = any(call.status == status and call.path.startswith(path)
                              for status, path in self.program.expected)
            if call.status is not None and call.status >= 400 and not is_expected:
                said = call.answer.partition(b"\r\n\r\n")[2][:300].decode(errors="replace")
                raise Failure(f"{call.method} {call.path}: {call.status} {said}")

    def prompts(self):
        """Checks that each text that the program sent was in the prompt."""
        streams = self.engine.since(self.begun_at)
        for call in self.recorder.calls:
            path = call.path.split("?")[0]
            if not path.endswith(GENERATING) or call.method != "POST" or call.status != 200:
                continue
            until = call.ended_at or time.monotonic()
            found = [stream.prompt.text for stream in streams if call.begun_at <= stream.prompt.at <= until]
            require(found, f"{path}: no prompt came of a request")
            lost = min((texts.missing(path, call.json(), prompt) for prompt in found), key=len)
            if lost:
                place, text = lost[0]
                raise Failure(f"{path}: {len(lost)} texts are not in the prompt; one of {place}: {text[:200]!r}")


class Report:
    """The printed lines."""

    def __init__(self):
        self.failed = 0
        self.passed = 0
        self.lock = threading.Lock()

    def line(self, program, template, seconds, fault, detail):
        with self.lock:
            self.failed += fault is not None
            self.passed += fault is None
            verdict = "PASS" if fault is None else "FAIL"
            print(f"{verdict} {program:<20} {template:<7} {seconds:4.0f} s  {detail if fault is None else fault}",
                  flush=True)


class Place:
    """A mesh with one of the templates. It has an engine of its own, since that dies in some tests."""

    def __init__(self, template, runs):
        self.template, self.work = template, runs / template
        self.work.mkdir(parents=True)
        self.engine = Engine(SHIPPED / "tokenizer.json", template)
        self.mesh = Mesh(os.environ["REFRAIN"], self.work, self.engine.url, template)

    def check(self, kind, report):
        begun, fault, detail = time.monotonic(), None, ""
        folder = self.work / kind.name
        case = Case(kind, self.template, self.engine, self.mesh, folder)
        try:
            detail = case.run()
        except Failure as failure:
            fault = str(failure)
        finally:
            case.recorder.close()
        report.line(kind.name, self.template, time.monotonic() - begun, fault, detail)
        if fault is not None or os.environ.get("KEEP"):
            case.keep()
        else:
            shutil.rmtree(folder, ignore_errors=True)


class Jobs:
    """What is left to check. A mesh serves one program at a time, so that the engine knows whose script it follows."""

    def __init__(self, kinds, places):
        self.left = [(kind, place) for kind in kinds for place in places]
        self.busy = set()
        self.changed = threading.Condition()

    def take(self):
        with self.changed:
            while self.left:
                job = next((job for job in self.left if job[1] not in self.busy), None)
                if job:
                    self.left.remove(job)
                    self.busy.add(job[1])
                    return job
                self.changed.wait()
            return None

    def work(self, report):
        while job := self.take():
            kind, place = job
            try:
                place.check(kind, report)
            except Exception as error:
                traceback.print_exc()
                report.line(kind.name, place.template, 0, f"the test itself failed: {error}", "")
            with self.changed:
                self.busy.remove(place)
                self.changed.notify_all()


def chosen(names):
    """The programs of these names. The name of a program stands for all its ways to speak to a model."""
    for name in names:
        if name not in PROGRAMS and name not in {kind.folder for kind in PROGRAMS.values()}:
            raise SystemExit(f"there is no program {name}: choose among {' '.join(PROGRAMS)}")
    return [kind for kind in PROGRAMS.values() if not names or kind.name in names or kind.folder in names]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--folders", action="store_true", help="print which packages these names need")
    options = parser.parse_args()
    if options.list:
        print("\n".join(PROGRAMS))
        return
    kinds = chosen(options.names)
    if options.folders:
        print("\n".join(dict.fromkeys(kind.folder for kind in kinds)))
        return
    # A shell has its background jobs ignore interrupts, and programs inherit that; a handler they do not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kinds = [kind for kind in kinds if kind.folder not in os.environ.get("LEFT_OUT", "").split()]
    templates = os.environ.get("TEMPLATES", " ".join(TEMPLATES)).split()
    runs = Path(os.environ["WORK"]) / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    report, begun = Report(), time.monotonic()
    places = [Place(template, runs) for template in templates]
    # A signal ends this script by an exception, so that the meshes end as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for place in places:
            place.mesh.await_ready()
        jobs = Jobs(kinds, places)
        threads = [threading.Thread(target=jobs.work, args=(report,), daemon=True) for _ in range(PROGRAMS_AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for place in places:
            place.mesh.stop()
    print(f"{report.passed} passed, {report.failed} failed, in {time.monotonic() - begun:.0f} s")
    sys.exit(report.failed > 0)


main()
