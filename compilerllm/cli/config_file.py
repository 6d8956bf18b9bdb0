"""``--config FILE``: a YAML file whose keys are flags."""

from pathlib import Path
from typing import Any

from compilerllm.errors import CompilerLLMError


class InvalidConfigFile(CompilerLLMError):
    """A file of ``--config`` that is no flat mapping of flags."""


def read_config_file(path: str) -> dict[str, Any]:
    """Flag (``--max-num-seqs``) -> value, in the file's order. Keys have dashes or underscores, as one likes.

    Raises ``InvalidConfigFile``.
    """
    import yaml

    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidConfigFile(f"Cannot read --config {path}: {reason}.") from error
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if isinstance(node, yaml.MappingNode):
            _refuse_twice(path, node)
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidConfigFile(f"--config {path} is not YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise InvalidConfigFile(f"--config {path} must have a flag a line, such as `max-num-seqs: 64`.")
    return {"--" + key.removeprefix("--").replace("_", "-"): value for key, value in found.items()}


def _refuse_twice(path: str, node: Any) -> None:
    """YAML would take the last of two equal keys in silence."""
    keys = [str(key.value).replace("_", "-") for key, _ in node.value]
    for number, key in enumerate(keys):
        if key in keys[:number]:
            line = node.value[number][0].start_mark.line + 1
            raise InvalidConfigFile(f"--config {path}, line {line}: {key} stands twice.")
