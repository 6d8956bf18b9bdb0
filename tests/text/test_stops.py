"""Stop strings against a plain search, however the text is cut."""

from hypothesis import given, settings
from hypothesis import strategies as st

from compilerllm.text.stops import StopMatcher, StopStrings

_ab = st.text("ab", min_size=1, max_size=5)


def plain(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop string that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        here = [s for s in stops if text[:end].endswith(s)]
        if here:
            longest = max(here, key=len)
            return text[:end] if include else text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(_ab, min_size=1, max_size=4),
    cuts=st.data(),
    include=st.booleans(),
)
@settings(deadline=None, max_examples=500)
def test_found_like_a_plain_search(text: str, stops: list[str], cuts: st.DataObject, include: bool) -> None:
    matcher, shown, at = StopMatcher(StopStrings(tuple(stops)), include), "", 0
    while at < len(text):
        size = cuts.draw(st.integers(1, 4))
        shown += matcher.add(text[at : at + size])
        at += size
        if matcher.matched is not None:
            break
        seen = text[:at]
        held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert shown == seen[: len(seen) - held], "held back more or less than may begin a stop string"
    if matcher.matched is None:
        shown += matcher.finish()
    assert (shown, matcher.matched) == plain(text, stops, include)


def test_one_compiled_set_serves_several_texts() -> None:
    stops = StopStrings(("END",))
    first, second = StopMatcher(stops, False), StopMatcher(stops, False)
    assert first.add("xE") == "x" and second.add("ND") == "ND" and first.add("ND") == ""
    assert first.matched == "END" and second.matched is None


def test_a_thousand_stop_strings_compile_and_match() -> None:
    stops = StopStrings(tuple(f"stop-{i:04d}" for i in range(1000)))
    matcher = StopMatcher(stops, False)
    assert matcher.add("a stop-07") == "a " and matcher.add("77 b") == "" and matcher.matched == "stop-0777"
