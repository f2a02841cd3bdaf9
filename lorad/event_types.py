"""The types of events, and what each says: for `loractl events --type`, and for the reference.

Goes in: nothing.  Comes out: a table.  The beginning of a type, up to the dot, is its area.
"""

from collections.abc import Mapping
from difflib import get_close_matches

TYPES: Mapping[str, str] = {
    "adapter.added": "A name was registered, or mended after a refusal.",
    "adapter.candidate": "New content of a name was registered; it serves once it is packed.",
    "adapter.damaged": "Stored, packed or resident bytes are not what they should be.",
    "adapter.fetched": "Files that were only at their source are here again.",
    "adapter.missing": "The store lost its files.",
    "adapter.nested": "Its folder in the inbox holds another adapter's, which is not served.",
    "adapter.not_loaded": "It was to be loaded, or taken from the inbox, and could not be.",
    "adapter.rejected": "It was refused and quarantined; the cause is the reason code.",
    "adapter.remote": "Its files left the disk; their source has them.",
    "adapter.removed": "A name was unregistered.",
    "adapter.repacked": "A damaged packed file was made anew.",
    "adapter.replaced": "A name means its new content from now on.",
    "adapter.retired": "A revision that nobody needs any more is gone.",
    "adapter.source_gone": "The folder of the inbox that it came from is gone; it serves on.",
    "adapter.tokenizer": "Its stored files say whose tokenizer it has; something else was known.",
    "adapter.unfinished": "What was left to do after a start could not be done.",
    "adapter.unpacked": "Its packed file made room; the next request has it packed again.",
    "adapter.verified": "It does what its stored files say: `loractl verify`, or `verify_on_load`.",
    "config.rejected": "A reload was refused; nothing changed.",
    "config.reloaded": "A reload: what changed, and what waits for a restart.",
    "config.warning": "Something that is allowed and probably not meant.",
    "daemon.start": "The daemon started.",
    "drain.done": "What was drained runs nothing any more.",
    "drain.forced": "Requests that took too long were aborted.",
    "drain.resumed": "New requests are taken again.",
    "drain.start": "No new requests are taken, of the daemon or of one name.",
    "engine.died": "The engine's process ended; it is replaced.",
    "engine.ready": "The engine takes requests.",
    "engine.stalled": "The step loop does not move; it is replaced if that goes on.",
    "labels.set": "Labels changed.",
    "operation.begun": "A pull or the like began.",
    "operation.cancelled": "It was cancelled.",
    "operation.done": "It ended well.",
    "operation.failed": "It ended otherwise; the cause is the code.",
    "operation.resumed": "It goes on after a restart.",
    "member.away": "Behind a gateway: a member does not take requests; the message says why.",
    "member.lost": "Behind a gateway: a member does not answer.",
    "member.ready": "Behind a gateway: a member takes requests, and has what it must have.",
    "pin.cleared": "A name is not pinned any more.",
    "pin.refused": "A pin would leave too little room for others.",
    "pin.set": "A name is pinned.",
    "priority.set": "A priority changed.",
    "ram.drop": "A revision left host memory.",
    "ram.load": "A revision is in host memory.",
    "ram.loading": "A revision is being read from the store.",
    "registry.recovered": "The registry was damaged or lost, and what was done about it.",
    "resolve.failed": "A reference in a request could not be pulled.",
    "slot.drain": "A revision takes no new requests, and leaves the GPU after those that run.",
    "slot.evict": "A revision left the GPU.",
    "slot.load": "A revision is on the GPU.",
    "slot.load_failed": "A load failed.",
    "slot.loading": "A revision is being copied to the GPU.",
    "slot.undrain": "A revision that drained may stay.",
    "store.collected": "Files that nobody needs were removed.",
    "tenant.added": "There is a new tenant.",
    "tenant.key_rotated": "A tenant has a new key; the message names it.",
    "tenant.removed": "A tenant and its keys are gone.",
    "tenant.set": "What a tenant is or may was changed; the message says what.",
    "watch.warning": "The inbox cannot be watched as it should be.",
}


def unlike_all(beginning: str) -> str | None:
    """None if a type begins so; else the nearest type or area, or the areas, for a hint."""
    if any(name.startswith(beginning) for name in TYPES):
        return None
    areas = sorted({name.partition(".")[0] for name in TYPES})
    near = get_close_matches(beginning, [*TYPES, *areas], n=1)
    return f"did you mean {near[0]}?" if near else f"types begin with {', '.join(areas)}"
