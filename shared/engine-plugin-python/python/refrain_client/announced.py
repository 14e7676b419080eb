"""The fields of a request in `vllm_xargs` or `custom_params` that start with `refrain_`.

Refrain's workers set them, and so can any caller that reaches the engine. A namespace is therefore accepted only with
a valid signature, and a named output only together with a namespace.
"""

import logging

log = logging.getLogger("refrain_client")
PREFIX = "refrain_"
# Larger numbers do not fit the fields of the native module.
COUNT_MAX = 2**63 - 1
# The errors that values of a wrong type or range raise, here or in the native module.
UNREADABLE = (ValueError, TypeError, OverflowError)
_has_warned = False


def announces(fields):
    """Whether a request has any of Refrain's fields."""
    return bool(fields) and any(str(name).startswith(PREFIX) for name in fields)


def start(client, request_id, prompt, fields):
    """Begins a request with its fields. Returns how many output tokens the client knows from before an interruption.

    Fields that cannot be read, or a token that is refused, cost drafts, but never stop the request.
    """
    try:
        values = read(fields)
    except UNREADABLE as error:
        client.refuse()
        _warn(error)
        return 0
    try:
        return client.start(request_id, prompt, **values)
    except UNREADABLE as error:
        _warn(error)
        return 0


def read(fields):
    """The fields as keyword arguments of `Client.start`."""
    values = {"namespace": _text(fields, "namespace"), "group": _text(fields, "group")}
    if values["namespace"] is not None:
        values["document"] = _text(fields, "document")
        values["epoch"] = _count(fields, "epoch", 1)
        values["written"] = _count(fields, "written", 0)
    # The rules of its drafts.
    for name, kind in (("alpha", _number), ("min_token_prob", _number), ("max_spec_tokens", _count)):
        if fields.get(PREFIX + name) is not None:
            values[name] = kind(fields, name)
    return values


def _text(fields, name):
    value = fields.get(PREFIX + name)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{PREFIX}{name}: must be a string")
    return value


def _number(fields, name):
    value = fields[PREFIX + name]
    if not isinstance(value, int | float):
        raise TypeError(f"{PREFIX}{name}: must be a number")
    return float(value)


def _count(fields, name, default=None):
    value = int(fields.get(PREFIX + name, default))
    if not 0 <= value <= COUNT_MAX:
        raise OverflowError(f"{PREFIX}{name}: must be between 0 and {COUNT_MAX}")
    return value


def _warn(error):
    global _has_warned
    if not _has_warned:
        log.warning("a request's Refrain fields are refused: %s; further refusals are only counted", error)
    _has_warned = True
