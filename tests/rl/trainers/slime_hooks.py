"""Functions that slime's rollout code calls by their path: the reward, and records of what went by."""

from task import reward as rewarded

# The version of the weights that all engines have now.
NOW = "default"
# By the index of a sample: tokens of its output and the version of the weights, after each call to the engines.
CALLS = {}
# The groups that ended, also those that a filter dropped.
ENDED = []


async def reward(args, sample, **_):
    return rewarded(sample.response, sample.label, sample.metadata["schema"])


def after_call(args, sample, evaluation=False):
    if not evaluation:
        CALLS.setdefault(sample.index, []).append((sample.response_length, NOW))


def all_groups(args, groups, data_source):
    ENDED.extend(groups)


def forget():
    CALLS.clear()
    ENDED.clear()
