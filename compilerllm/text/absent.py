"""A model without a tokenizer (made-up weights for a benchmark, say): token ids in, token ids out, no text."""

from pathlib import Path

from compilerllm.errors import InvalidParameter
from compilerllm.text.detokenizer import Detokenizer
from compilerllm.text.tokenizer import Tokenizer


class _NoText:
    def add(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class NoTokenizer(Tokenizer):
    """Refuses texts, and shows tokens as no text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.special_ids, self.special_tokens = frozenset[int](), frozenset[str]()
        self.vocab_size = 0
        self.generation_config = {}
        self.named_tokens = {}
        self.eos_token_ids = ()
        self.chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise InvalidParameter("This model has no tokenizer: give the prompt as token ids.", "prompt")

    def fewest_tokens(self, text: str) -> int:
        return 0

    def has_token(self, text: str) -> bool:
        return False

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""

    def detokenizer(self, skip_special_tokens: bool = True, prompt: list[int] | None = None) -> Detokenizer:
        return _NoText()

    def token_bytes(self, token_id: int) -> bytes:
        return b""


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in an artifact's text folder; ``NoTokenizer`` if the checkpoint had none."""
    return Tokenizer(folder) if (folder / "tokenizer.json").is_file() else NoTokenizer(folder)
