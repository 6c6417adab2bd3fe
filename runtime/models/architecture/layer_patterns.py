"""Which blocks of a model see all tokens and which a window, and which blocks rotate: read from a
config, by global index. Pure: no torch.

`layer_types` says which blocks have the window, in every family that knows it; the functions below
give the pattern that holds where it is absent.
"""

from collections.abc import Callable, Sequence

from zrt.runtime.models.architecture.config_json import Keys

Window = int | None
"""How many tokens a token sees, itself included; None: all tokens before it."""


def full_attention(keys: Keys, num_blocks: int) -> tuple[Window, ...]:
    return (None,) * num_blocks


def one_window(absent: Window) -> Callable[[Keys, int], tuple[Window, ...]]:
    """Return `sliding_window` for every block."""
    return lambda keys, num_blocks: (keys.size_or_none("sliding_window", absent),) * num_blocks


def last_blocks(keys: Keys, num_blocks: int) -> tuple[Window, ...]:
    """Return a window, where `use_sliding_window` says so, for blocks from `max_window_layers`
    on."""
    window = keys.size_or_none("sliding_window", 4096) if keys.flag("use_sliding_window") else None
    first = keys.size("max_window_layers", 28, least=0)
    return _windows(keys, window, [window is not None and block >= first for block in range(num_blocks)])


def blocks_without_rope(keys: Keys, num_blocks: int) -> tuple[Window, ...]:
    """Return a window, where `use_sliding_window` says so, for blocks that rotate nothing."""
    window = keys.size_or_none("sliding_window", None)
    used = keys.flag("use_sliding_window") and window is not None
    return _windows(keys, window, [used and not rotates for rotates in some_blocks(keys, num_blocks)])


def every_other(keys: Keys, num_blocks: int) -> tuple[Window, ...]:
    return _windows(keys, keys.size_or_none("sliding_window", 4096), [block % 2 == 0 for block in range(num_blocks)])


def all_but_every_nth(keys: Keys, num_blocks: int) -> tuple[Window, ...]:
    """Return a window for all blocks but each `sliding_window_pattern`th."""
    period = keys.size("sliding_window_pattern", 6)
    slides = [(block + 1) % period != 0 for block in range(num_blocks)]
    return _windows(keys, keys.size_or_none("sliding_window", 4096), slides)


def _windows(keys: Keys, window: Window, slides: Sequence[bool]) -> tuple[Window, ...]:
    """Return `window` for the blocks that slide: those `layer_types` names, or `slides` where it is
    absent."""
    kinds = keys.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != len(slides):
            raise keys.wrong("layer_types", f"a list of {len(slides)} kinds of layer")
        known = {"full_attention": False, "sliding_attention": True}
        if not all(isinstance(kind, str) and kind in known for kind in kinds):
            raise keys.unsupported("layer_types", f"has a kind that is not one of {', '.join(known)}")
        slides = [known[kind] for kind in kinds]
    if window is None and any(slides):
        raise keys.wrong("sliding_window", "a whole number from 1 on, and in use, since some layers slide")
    return tuple(window if sliding else None for sliding in slides)


def all_blocks(keys: Keys, num_blocks: int) -> tuple[bool, ...]:
    return (True,) * num_blocks


def some_blocks(keys: Keys, num_blocks: int) -> tuple[bool, ...]:
    """Return which blocks rotate: those marked 1 in `no_rope_layers`; where that key is absent, all
    but each `no_rope_layer_interval`th."""
    marks = keys.values.get("no_rope_layers")
    if marks is None:
        interval = keys.size("no_rope_layer_interval", 4)
        return tuple((block + 1) % interval != 0 for block in range(num_blocks))
    if not isinstance(marks, list) or len(marks) < num_blocks or not all(mark in (0, 1) for mark in marks):
        raise keys.wrong("no_rope_layers", f"a list of at least {num_blocks} numbers, 0 or 1")
    return tuple(bool(mark) for mark in marks[:num_blocks])
