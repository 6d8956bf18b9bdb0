"""Measured choices: mergeable data by chip, and the chooser that reads it.

Data is JSON: ``{"chip": "H200", "entries": {family: {problem: [{"config": {...}, "us": 12.3}, ...]}}}``, candidates of a
problem from fastest to slowest. ``us`` is of a candidate behind itself; ``step_us``, where it is there, of a whole step
that runs it among all others, and goes before ``us``. Files of one chip merge by (family, problem, config), newer figures
winning; a problem is the text of its sorted fields. A problem never timed falls to the nearest M of the same other fields
if that is within a factor of two, else to the first of the family's own order, which is its cost model's.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.triton.target import CudaTarget

FOLDER = Path(__file__).parent / "tuning_data"
CONTEXT = 256  # tokens of context of each sequence, in attention's problems with one query each
CHOICE_LEVEL = 2  # from here on what no figure decides is left to the machine that serves
SIZE_FIELD = "M"  # the field of a problem that buckets vary
# Of a config: what tells ways apart, beside sizes that tune them.
KIND_FIELDS = ("path", "norm", "fused", "bm")
CLOSE = 1.3  # times the fastest: what a candidate may take by itself and still do better than it in a step
Problem = Mapping[str, int | str]


class BadTuningData(KernelError):
    """A file of tuning data that cannot be read."""


def problem_key(problem: Problem) -> str:
    """Text of a problem, equal exactly for equal ones."""
    return ",".join(f"{k}={problem[k]}" for k in sorted(problem))


@dataclass
class TuningData:
    """Timed candidates of one chip, microseconds a launch (of all launches of a node)."""

    chip: str
    entries: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> "TuningData":
        """Raises ``BadTuningData`` naming the file."""
        try:
            data = json.loads(path.read_text())
            return TuningData(data["chip"], data["entries"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadTuningData(f"{path} is no tuning data ({error}). Delete it, or restore it.") from error

    def write(self, path: Path) -> None:
        """Sorted, one problem a line, so that merges of two files are readable."""
        lines = []
        for family in sorted(self.entries):
            problems = ",\n".join(
                f"   {json.dumps(key)}: {json.dumps(self.entries[family][key], sort_keys=True)}"
                for key in sorted(self.entries[family])
            )
            lines.append(f"  {json.dumps(family)}: {{\n{problems}\n  }}")
        body = ",\n".join(lines)
        path.write_text(f'{{"chip": {json.dumps(self.chip)},\n "entries": {{\n{body}\n }}}}\n')

    def add(self, family: str, problem: Problem, config: Mapping[str, Any], us: float) -> None:
        """Note one figure, in place of an older one of the same candidate."""
        timed = self.entries.setdefault(family, {}).setdefault(problem_key(problem), [])
        timed[:] = _merged(timed, [{"config": dict(config), "us": round(us, 3)}])

    def add_step(self, family: str, key: str, config: Mapping[str, Any], step_us: float) -> None:
        """Note what a whole step takes with a candidate that has a figure of its own. ``key``: the problem's text."""
        timed = self.entries[family][key]
        known = next(t for t in timed if t["config"] == dict(config))
        timed[:] = _merged(timed, [known | {"step_us": round(step_us, 3)}])

    def merge(self, newer: "TuningData") -> None:
        """Take over everything ``newer`` has. Raises ``BadTuningData`` for another chip's."""
        if newer.chip != self.chip:
            raise BadTuningData(f"tuning data of {newer.chip} cannot be merged into that of {self.chip}")
        for family, problems in newer.entries.items():
            mine = self.entries.setdefault(family, {})
            for key, timed in problems.items():
                mine[key] = _merged(mine.get(key, []), timed)

    def find(self, family: str, problem: Problem) -> tuple[list[dict[str, Any]], bool]:
        """Timed candidates of the problem, or of the nearest size within a factor of two; whether they are exact."""
        problems = self.entries.get(family, {})
        if exact := problems.get(problem_key(problem)):
            return exact, True
        size = problem.get(SIZE_FIELD)
        if not isinstance(size, int):
            return [], False
        near = [
            (abs(other - size), timed)
            for other, timed in self._sizes(family, problem)
            if max(other, size) <= 2 * min(other, size) and min(other, size) > 1
        ]
        return (min(near, key=lambda n: n[0])[1], False) if near else ([], False)

    def _sizes(self, family: str, problem: Problem) -> Iterable[tuple[int, list[dict[str, Any]]]]:
        rest = {k: v for k, v in problem.items() if k != SIZE_FIELD}
        for key, timed in self.entries.get(family, {}).items():
            fields = dict(part.split("=", 1) for part in key.split(","))
            size = fields.pop(SIZE_FIELD, "")
            if size.isdigit() and fields == {k: str(v) for k, v in rest.items()}:
                yield int(size), timed


def _merged(old: Sequence[dict[str, Any]], newer: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Candidates of one problem, fastest first: in a step where that is known, else by themselves."""
    found = [dict(t) for t in old]
    for entry in newer:
        known = next((t for t in found if t["config"] == entry["config"]), None)
        if known is None:
            found.append(dict(entry))
        else:
            known |= entry
    return sorted(found, key=lambda t: (t.get("step_us", math.inf), t["us"]))


def tuning_files(target: CudaTarget, own: Path | None = None) -> list[Path]:
    """The data there is for the target's chip: what comes with the package, then what lies in the folder ``own``."""
    paths = [folder / f"{target.chip.lower()}.json" for folder in (FOLDER, own) if folder is not None]
    return [path for path in paths if path.exists()]


def tuning_digest(target: CudaTarget, own: Path | None = None) -> str:
    """Hash of that data: other figures may choose other kernels. Raises ``BadTuningData`` for a file that is unreadable."""
    digest = hashlib.sha256()
    for path in tuning_files(target, own):
        try:
            digest.update(path.read_bytes() + b"\0")
        except OSError as error:
            raise BadTuningData(f"{path} cannot be read ({error}). Delete it, or restore it.") from error
    return digest.hexdigest()


class TunedChooser:
    """Picks the fastest timed candidate; remembers what it picked and why.

    Where there is no figure, it may leave the choice to the machine that serves, among ``most`` candidates.
    """

    def __init__(self, data: TuningData | None, most: int = 1) -> None:
        self.data, self.most = data, most
        self.picks: dict[tuple[str, str], tuple[dict[str, Any], str]] = {}

    @classmethod
    def for_target(cls, target: CudaTarget, own: Path | None = None, most: int = 1) -> Self:
        """With what comes with the package for the target's chip, and over it what lies in the folder ``own``."""
        data: TuningData | None = None
        for path in tuning_files(target, own):
            read = TuningData.read(path)
            if data is None:
                data = read
            else:
                data.merge(read)
        return cls(data, most)

    def choose(self, family: str, problem: Problem, candidates: Sequence[dict[str, Any]]) -> dict[str, Any]:
        known = self.picks.get((family, problem_key(problem)))  # layers are alike
        if known is not None and known[0] in candidates:
            return known[0]
        timed, exact = self.data.find(family, problem) if self.data is not None else ([], False)
        for entry in timed:
            if entry["config"] in candidates:
                why = "timed in a step" if "step_us" in entry else "timed"
                return self._note(family, problem, entry["config"], why if exact else "timed at another size")
        return self._note(family, problem, candidates[0], "cost model")

    def offer(
        self, family: str, problem: Problem, candidates: Sequence[dict[str, Any]]
    ) -> Sequence[dict[str, Any]]:
        """What is chosen, and where no figure says so what the cost model puts next."""
        chosen = self.choose(family, problem, candidates)
        open_ = self.picks[family, problem_key(problem)][1] == "cost model"
        return candidates[: self.most] if open_ else [chosen]

    def _note(self, family: str, problem: Problem, config: dict[str, Any], why: str) -> dict[str, Any]:
        self.picks[family, problem_key(problem)] = config, why
        return config

    def report(self) -> list[dict[str, Any]]:
        """What was picked for each problem, and why, for the manifest."""
        return [
            {"family": family, "problem": problem, "config": config, "why": why}
            for (family, problem), (config, why) in sorted(self.picks.items(), key=lambda p: p[0])
        ]


class RivalChooser(TunedChooser):
    """Offers what comes close to the fastest as well, where the very problem has figures: so that steps can be timed with
    each. Up to ``most`` candidates: the one that would be chosen, then the fastest of each kind, then the others."""

    def offer(
        self, family: str, problem: Problem, candidates: Sequence[dict[str, Any]]
    ) -> Sequence[dict[str, Any]]:
        chosen = self.choose(family, problem, candidates)
        timed, exact = self.data.find(family, problem) if self.data is not None else ([], False)
        known = sorted((t for t in timed if t["config"] in candidates), key=lambda t: t["us"])
        close = [t["config"] for t in known if exact and t["us"] <= CLOSE * known[0]["us"]]
        kinds = {tuple(c.get(name) for name in KIND_FIELDS): c for c in reversed(close)}
        ordered = [chosen, *(c for c in close if c in kinds.values()), *close]
        return [c for i, c in enumerate(ordered) if c not in ordered[:i]][: self.most]
