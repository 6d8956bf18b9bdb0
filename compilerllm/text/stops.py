"""Stop strings, found wherever token boundaries fall."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class _State:
    """A node of the automaton: the longest suffix of the text that begins a stop string."""

    depth: int = 0  # characters of that suffix
    next: dict[str, "_State"] = field(default_factory=dict)
    fall: "_State | None" = None  # the state of the next shorter such suffix
    stop: str | None = None  # the longest stop string that ends here


class StopStrings:
    """Stop strings compiled once per request and shared by its sequences (the automaton of Aho and Corasick)."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.root = _State()
        for stop in stops:
            state = self.root
            for char in stop:
                state = state.next.setdefault(char, _State(state.depth + 1))
            state.stop = stop
        level = [(char, state, self.root) for char, state in self.root.next.items()]
        while level:  # breadth first: a state's fall is shallower, so it is ready
            for char, state, parent in level:
                fall = parent.fall
                while fall is not None and char not in fall.next:
                    fall = fall.fall
                state.fall = fall.next[char] if fall is not None else self.root
                state.stop = state.stop or state.fall.stop
            level = [(char, child, state) for _, state, _ in level for char, child in state.next.items()]


class StopMatcher:
    """Watches one text. Text is held back exactly while it may be the beginning of a stop string.

    The stop string that *ends* first wins, and among those the longest, so the result does not depend on how the text
    was cut. Work per character is constant (amortised).
    """

    def __init__(self, stops: StopStrings, include: bool) -> None:
        self._root = self._state = stops.root
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """The text that may be shown now. Once ``matched`` is set nothing more is."""
        if self.matched is not None:
            return ""
        state, root = self._state, self._root
        text = self._held + text
        for at in range(len(self._held), len(text)):
            char = text[at]
            while char not in state.next and state is not root:
                state = state.fall or root
            state = state.next.get(char, root)
            if state.stop is not None:
                self.matched, self._held = state.stop, ""
                return text[: at + 1] if self._include else text[: at + 1 - len(state.stop)]
        self._state = state
        self._held = text[len(text) - state.depth :]
        return text[: len(text) - state.depth]

    def finish(self) -> str:
        """The text still held back when the sequence ends without a stop string."""
        held, self._held = self._held, ""
        return held
