"""Groups of paged states: those with the same window share one block table.

The order is part of a step's meaning (the first axis of ``StepInputs.block_tables``), so every target takes it from here.
"""

from typing import Any

from compilerllm.ir.graph import Module


def paged_windows(module: Module) -> tuple[int | None, ...]:
    """The window of each group in tokens, None for the whole context: the windowless group first, then by size."""
    windows = {t.get("window") for _, t in module.state_instances() if t.addressing == "paged"}
    return tuple(sorted(windows, key=lambda w: (w is not None, w or 0)))


def group_name(window: int | None) -> str:
    """What a group is called in an artifact and on the startup card."""
    return "kv" if window is None else f"kv_window_{window}"


def state_entries(module: Module) -> dict[str, Any]:
    """The manifest's ``groups`` and ``states``: each state, by its name over all layers, with its group's index."""
    windows = paged_windows(module)
    return {
        "groups": [
            {"name": group_name(window), "index": index, "addressing": "paged", "window": window}
            for index, window in enumerate(windows)
        ],
        "states": [
            {
                "name": name,
                "kind": t.kind,
                "dtype": t.dtype,
                **dict(t.fields),
                "group": windows.index(t.get("window")),
            }
            for name, t in module.state_instances()
        ],
    }
