"""Sessions of agents: their trajectories as a trainer reads them, and what has to hold of them."""

import math
import urllib.error
import urllib.request
from dataclasses import dataclass

import msgpack
from grpo import Policy, Sample
from mesh import call


@dataclass
class SessionRollout:
    """What an agent did in a session, and the trajectories that the listener made of it."""

    name: str
    episode: object
    reward: float
    trajectories: list


class SessionPolicy(Policy):
    """The policy that learns from trajectories: from each token that was sampled, once."""

    def samples(self, rollout):
        return [sample_of(one) for one in rollout.trajectories]


def sample_of(trajectory):
    mask, shared = trajectory["loss_mask"], trajectory["shared_tokens"]
    # An earlier trajectory of the session has the shared tokens as well, and is trained with them.
    places = [place for place in range(shared, len(mask)) if mask[place]]
    return Sample(trajectory["token_ids"], places, [trajectory["logprobs"][place] for place in places])


def make_session(url):
    status, answer = call(f"{url}/sessions", {})
    if status != 200:
        raise SystemExit(f"POST /sessions answered {status}: {answer}")
    return answer["session_id"]


def read_session(url, session, checks):
    """The trajectories of a session, which must be the same in both formats."""
    path = f"{url}/sessions/{session}/trajectories"
    status, answer = call(path)
    if status != 200:
        raise SystemExit(f"{path} answered {status}: {answer}")
    request = urllib.request.Request(path, headers={"accept": "application/msgpack"})
    with urllib.request.urlopen(request, timeout=30) as response:
        packed = msgpack.unpackb(response.read())
    trajectories = answer["trajectories"]
    exact = ({**one, "logprobs": [float32(value) for value in one["logprobs"]]} for one in trajectories)
    checks.hold(packed["trajectories"] == list(exact), f"{session}: MessagePack has what JSON has")
    return trajectories


def float32(value):
    """The number that a text of a 32-bit number means."""
    return None if value is None else msgpack.unpackb(msgpack.packb(value, use_single_float=True))


def delete_session(url, session, checks):
    request = urllib.request.Request(f"{url}/sessions/{session}", method="DELETE")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            status = response.status
    except urllib.error.HTTPError as error:
        status = error.code
    checks.hold(status == 204, f"{session}: its deletion answers 204 instead of {status}")


def expected_trajectories(seen):
    """The trajectories that the answers show: pairs of tokens and mask, in the order of their last turns."""
    known, has_next = [], set()
    for turn in seen:
        before = [at for at, (ids, _) in enumerate(known) if turn.prompt[: len(ids)] == ids]
        ids, mask = ([], []) if not before else known[before[-1]]
        has_next.update(before[-1:])
        added = len(turn.prompt) - len(ids)
        known.append((turn.prompt + turn.output, mask + [0] * added + [1] * len(turn.output)))
    return [one for at, one in enumerate(known) if at not in has_next]


def check_session(rollout, version, checks):
    """Checks all but the log-probabilities. `version` is that of all tokens; `None` if any may be."""
    hold = lambda condition, text: checks.hold(condition, f"{rollout.name}: {text}")  # noqa: E731
    found = [(one["token_ids"], one["loss_mask"]) for one in rollout.trajectories]
    seen = rollout.episode.turns
    expected = expected_trajectories(seen)
    hold(found == expected, f"{len(found)} trajectories with the tokens of {len(expected)} that the engine saw")
    if rollout.episode.is_ordinary:
        prompts = [turn.prompt for turn in seen]
        whole = [turn.prompt + turn.output for turn in seen]
        exact = all(prompt[: len(before)] == before for prompt, before in zip(prompts[1:], whole))
        hold(exact, "each prompt begins with all tokens before it")
        hold(len(found) == 1, f"an ordinary rollout is one trajectory instead of {len(found)}")
    for one in rollout.trajectories:
        check_lists(one, version, hold)


def check_lists(one, version, hold):
    mask, logprobs, turns = one["loss_mask"], one["logprobs"], one["turns"]
    hold(len(one["token_ids"]) == len(mask) == len(logprobs), "the lists of a trajectory have one length")
    sampled = all(value is not None and math.isfinite(value) and value <= 0 for value in logprobs)
    hold(sampled and not any(value for value, is_sampled in zip(logprobs, mask) if not is_sampled),
         "each sampled token has a log-probability, and others have 0")
    places = [(turn["start"], turn["output_start"], turn["end"]) for turn in turns]
    ends = [0, *(end for _, _, end in places)]
    follow = [start for start, _, _ in places] == ends[:-1] and ends[-1] == len(mask)
    hold(follow and runs(mask) == [(middle, end) for _, middle, end in places],
         f"turns follow each other, and the mask has their outputs: {places}")
    spans = [(span["start"], span["end"]) for span in one["weight_versions"]]
    hold(joined(spans) == joined(runs(mask)), f"versions cover exactly what was sampled: {spans}")
    versions = {span["version"] for span in one["weight_versions"]}
    last = one["weight_versions"][-1]["version"]
    hold(one["weight_version"] == (str(last) if last else "default"), f"the last version is {one['weight_version']}")
    if version is not None:
        hold(versions == {version}, f"all tokens have version {version}: {versions}")


def runs(mask):
    """The places of runs of ones: start and end."""
    edges = [at for at in range(len(mask) + 1) if (mask[at - 1] if at else 0) != (mask[at] if at < len(mask) else 0)]
    return list(zip(edges[::2], edges[1::2]))


def joined(spans):
    """Spans of which each two that touch are one."""
    whole = []
    for start, end in spans:
        if whole and whole[-1][1] == start:
            start = whole.pop()[0]
        whole.append((start, end))
    return whole
