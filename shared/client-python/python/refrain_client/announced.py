"""What a request brings along in `vllm_xargs`. Only Refrain's gateway and workers set it, and a token is believed only
when it is signed."""

import logging

log = logging.getLogger("refrain_client")
_refused = False


def start(client, request_id, prompt, fields):
    """Begins a request with what it brought. A refused token costs drafts, not the request."""
    global _refused
    try:
        client.start(
            request_id,
            prompt,
            namespace=fields.get("refrain_namespace"),
            group=fields.get("refrain_group"),
            document=fields.get("refrain_document"),
            epoch=int(fields.get("refrain_epoch", 1)),
            written=int(fields.get("refrain_written", 0)),
        )
    except ValueError as error:
        if not _refused:
            log.warning("%s; further refusals are only counted", error)
        _refused = True
