"""What a request brings along in `vllm_xargs`. Refrain's workers set it; whoever reaches the engine can as well, so a token
is believed only when it is signed, and what names an output only beside one."""

import logging

log = logging.getLogger("refrain_client")
PREFIX = "refrain_"
# What goes past these no field can mean.
COUNT_MAX = 2**63 - 1
# All that values of the wrong kind raise, on their way through Python and into the native module.
UNREADABLE = (ValueError, TypeError, OverflowError)
_refused = False


def announces(fields):
    """Whether a request brought anything of Refrain's."""
    return bool(fields) and any(str(name).startswith(PREFIX) for name in fields)


def start(client, request_id, prompt, fields):
    """Begins a request with what it brought. What cannot be read, or is refused, costs drafts, not the request. Returns how
    many tokens behind the prompt are known from before."""
    try:
        brought = read(fields)
    except UNREADABLE as error:
        client.refuse()
        _warn(error)
        return 0
    try:
        return client.start(request_id, prompt, **brought)
    except UNREADABLE as error:
        _warn(error)
        return 0


def read(fields):
    """The fields as `Client.start` takes them."""
    brought = {"namespace": _text(fields, "namespace"), "group": _text(fields, "group")}
    if brought["namespace"] is not None:
        brought["document"] = _text(fields, "document")
        brought["epoch"] = _count(fields, "epoch", 1)
        brought["written"] = _count(fields, "written", 0)
    return brought


def _text(fields, name):
    value = fields.get(PREFIX + name)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{PREFIX}{name}: not a string")
    return value


def _count(fields, name, default):
    value = int(fields.get(PREFIX + name, default))
    if not 0 <= value <= COUNT_MAX:
        raise OverflowError(f"{PREFIX}{name}: not between 0 and {COUNT_MAX}")
    return value


def _warn(error):
    global _refused
    if not _refused:
        log.warning("%s; further refusals are only counted", error)
    _refused = True
